"""Three statements of notes and papers that are false, measured by the checked claims themselves."""

from ropewalk.claims import CHAPTERS, Entry, run
from ropewalk.claims.sources import NOTES

__all__ = ["STATEMENTS", "false_statements", "source_of"]

# A number in a note, a number in a paper, and a paper that differs from its own code.
STATEMENTS = ("decay.s20", "men.table-2", "yarn.ramps")


def false_statements() -> list[Entry]:
    """Measure the three statements.

    >>> [entry.contradicted for entry in false_statements()]
    [False, False, False]
    """
    claims = {claim.id: claim for chapter in CHAPTERS for claim in chapter.claims}
    return list(run([claims[name] for name in STATEMENTS]))


def source_of(entry: Entry) -> str:
    """The source as a reader knows it: a paper by its name, a note as a note.

    >>> [source_of(entry) for entry in false_statements()][1]
    'Base of RoPE Bounds Context Length, 2405.14591'
    """
    return "a note" if entry.claim.source in NOTES else entry.claim.source
