"""Checked claims: statements of notes and papers about position encodings, each measured at every run."""

from ropewalk.claims.claim import Chapter as Chapter
from ropewalk.claims.claim import Claim as Claim
from ropewalk.claims.claim import Entry as Entry
from ropewalk.claims.claim import Finding as Finding
from ropewalk.claims.claim import NotAvailable as NotAvailable
from ropewalk.claims.claim import Verdict as Verdict
from ropewalk.claims.claim import run as run
from ropewalk.claims.papers import context, extension, precision, training
from ropewalk.claims.records import Record as Record
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
from ropewalk.claims.sources import Place as Place
from ropewalk.claims.sources import Source as Source

__all__ = [
    "CHAPTERS",
    "Chapter",
    "Claim",
    "Entry",
    "Finding",
    "NotAvailable",
    "Place",
    "Record",
    "Source",
    "Verdict",
    "run",
]

# In reading order.
CHAPTERS: tuple[Chapter, ...] = tuple(
    module.chapter
    for module in (
        *(order, absolute, derivation, rotation, decay, linear, linear_state, linear_position, attention, heads, code),
        *(extension, context, precision, training),
    )
)
