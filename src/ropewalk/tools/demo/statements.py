"""Three statements of notes and papers that are false, measured by the checked claims themselves.

The statements of the claims are paraphrases. They are printed without quotation marks.
"""

from ropewalk.claims import CHAPTERS, Entry, run
from ropewalk.claims.sources import NOTES

__all__ = ["STATEMENTS", "false_statements", "source_of"]

# A number in a note, a number in a table of a paper (table 2), and a theorem of a paper (theorem 2.1).
STATEMENTS = ("decay.s20", "men.table-2", "pi.bound")


def false_statements() -> list[Entry]:
    """Measure the three statements.

    >>> [entry.contradicted for entry in false_statements()]
    [False, False, False]
    """
    claims = {claim.id: claim for chapter in CHAPTERS for claim in chapter.claims}
    return list(run([claims[name] for name in STATEMENTS]))


def source_of(entry: Entry) -> str:
    """The source in few words: a paper by its arXiv number, a note by its number and line.

    >>> [source_of(entry) for entry in false_statements()]
    ['note 002, line 321', 'arXiv 2405.14591', 'arXiv 2306.15595']
    """
    place = entry.claim.places[0]
    return f"note {place.source.key}, line {place.line}" if place.source in NOTES else f"arXiv {place.source.key}"
