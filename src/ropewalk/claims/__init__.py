"""What others SAY of position encodings: the ledger, one entry a statement, measured at every run."""

from ropewalk.claims.ledger import Chapter as Chapter
from ropewalk.claims.ledger import Claim as Claim
from ropewalk.claims.ledger import Entry as Entry
from ropewalk.claims.ledger import Finding as Finding
from ropewalk.claims.ledger import Verdict as Verdict
from ropewalk.claims.ledger import run as run
from ropewalk.claims.papers import context, extension, precision
from ropewalk.claims.seeds import (
    absolute,
    attention,
    code,
    decay,
    derivation,
    heads,
    linear,
    linear_position,
    linear_state,
    order,
    rotation,
)

__all__ = ["CHAPTERS", "Chapter", "Claim", "Entry", "Finding", "Verdict", "run"]

# The order in which a reader should meet them.
CHAPTERS: tuple[Chapter, ...] = tuple(
    module.chapter
    for module in (
        *(order, absolute, derivation, rotation, decay, linear, linear_state, linear_position, attention, heads, code),
        *(extension, context, precision),
    )
)
