"""Claims: statements about position encodings, how each is measured, and its recorded verdict.

A measurement that contradicts the recorded verdict shows that the verdict, the measurement or the library is wrong.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from ropewalk.claims.records import Record, records
from ropewalk.claims.sources import Place, Source

__all__ = ["Chapter", "Claim", "Entry", "Finding", "NotAvailable", "Verdict", "run"]


class Verdict(StrEnum):
    """The recorded result for a statement.

    >>> print(Verdict.MISPRINT)
    misprint or notation
    """

    HOLDS = "holds"
    CONDITIONAL = "holds under a condition that the source leaves out"
    FAILS = "does not hold"
    MISPRINT = "misprint or notation"
    UNMEASURABLE = "not measurable here"


@dataclass(frozen=True)
class Finding:
    """The result of a measurement.

    Attributes:
        measured: The figures, as text.
        stated: Whether the statement is true as made; None if this measurement cannot decide it.
        amended: Whether the amendment of the claim is true: its condition, its correction, or what can be measured.

    >>> Finding("1.909", stated=False, amended=True).supports(Verdict.FAILS)
    True
    >>> Finding("1.4", stated=True, amended=True).supports(Verdict.FAILS)
    False
    """

    measured: str
    stated: bool | None
    amended: bool = False

    def supports(self, verdict: Verdict) -> bool:
        """Whether the measurement agrees with `verdict`. An amendment must be measured too."""
        if verdict is Verdict.HOLDS:
            return self.stated is not None and bool(self.stated)
        if verdict is Verdict.UNMEASURABLE:
            return self.stated is None and bool(self.amended)
        return self.stated is not None and not self.stated and bool(self.amended)


class NotAvailable(Exception):  # noqa: N818 - not an error: the claim is reported as not measured
    """Raised by a measurement that needs a package which is not installed. Its text is the reason.

    >>> def measure() -> Finding:
    ...     raise NotAvailable("einx is missing")
    >>> claim = Claim("a.b", "1 is 1", (), "compare", "1", Verdict.HOLDS, "", measure)
    >>> [(entry.finding.measured, entry.contradicted) for entry in run([claim])]
    [('not measured: einx is missing', False)]
    """


@dataclass(frozen=True)
class Claim:
    """A statement with its measurement and its recorded verdict.

    Attributes:
        id: Unique name, "subject.name".
        statement: Our reading of the statement, in plain English.
        places: Where the statement is made: notes with line and quotation, papers.
        method: How the statement is measured.
        expected: The expected figures.
        verdict: The recorded verdict.
        amendment: The condition under which the statement holds, what holds instead, what was meant, or what is
            needed to measure it. Empty if it holds.
        measure: Runs the measurement.
        long: Whether the measurement takes long or needs hardware. `run(..., anew=False)` cites its record instead.

    Raises:
        ValueError: If a verdict other than "holds" has no amendment, or "holds" has one.

    >>> Claim("a.b", "1 + 1 is 2", (), "add", "2", Verdict.HOLDS, "", lambda: Finding("2", True)).verdict
    <Verdict.HOLDS: 'holds'>
    """

    id: str
    statement: str
    places: tuple[Place, ...]
    method: str
    expected: str
    verdict: Verdict
    amendment: str
    measure: Callable[[], Finding]
    long: bool = False

    def __post_init__(self) -> None:
        if (self.verdict is Verdict.HOLDS) != (self.amendment == ""):
            raise ValueError(f"{self.id}: a verdict other than 'holds' needs an amendment, and 'holds' has none")

    def is_from(self, source: Source) -> bool:
        """Whether `source` makes the statement."""
        return any(place.source == source for place in self.places)


class Chapter:
    """Claims on one subject, in the order of their definition.

    Args:
        title: Heading of the chapter.

    >>> chapter = Chapter("Sums")
    >>> note = Source("a", "a note")
    >>> @chapter.claim("sum", "1 + 1 is 3", note.at(7, "1 + 1 = 3"), method="add", expected="2", fails="1 + 1 is 2")
    ... def _() -> Finding:
    ...     return Finding(str(1 + 1), stated=1 + 1 == 3, amended=1 + 1 == 2)
    >>> [(claim.verdict.value, claim.places[0].label) for claim in chapter.claims]
    [('does not hold', 'a:7')]
    """

    def __init__(self, title: str) -> None:
        self.title = title
        self.claims: list[Claim] = []

    def claim(
        self,
        id: str,
        statement: str,
        *places: Place | Source,
        method: str,
        expected: str,
        only_if: str = "",
        fails: str = "",
        misprint: str = "",
        needs: str = "",
        long: bool = False,
    ) -> Callable[[Callable[[], Finding]], Callable[[], Finding]]:
        """Decorator that adds a claim, measured by the decorated function.

        Args:
            id: Unique name, "subject.name".
            statement: Our reading of the statement, in plain English.
            places: The notes, with line and quotation, and papers that make the statement.
            method: How the statement is measured.
            expected: The expected figures.
            only_if: The condition under which the statement holds, for the verdict CONDITIONAL.
            fails: What holds instead, for the verdict FAILS.
            misprint: What the source means, for the verdict MISPRINT.
            needs: What a measurement would need, and what is measured here, for the verdict UNMEASURABLE.
            long: Whether the measurement takes long or needs hardware.

        Returns:
            The decorator. It returns the function unchanged.
        """
        amendments = {
            Verdict.CONDITIONAL: only_if,
            Verdict.FAILS: fails,
            Verdict.MISPRINT: misprint,
            Verdict.UNMEASURABLE: needs,
        }
        ((verdict, amendment),) = [(v, text) for v, text in amendments.items() if text] or [(Verdict.HOLDS, "")]
        cited = tuple(place if isinstance(place, Place) else Place(place) for place in places)

        def record(measure: Callable[[], Finding]) -> Callable[[], Finding]:
            self.claims.append(Claim(id, statement, cited, method, expected, verdict, amendment, measure, long))
            return measure

        return record


@dataclass(frozen=True)
class Entry:
    """A claim with the result of one run.

    Attributes:
        claim: The claim.
        finding: The result of its measurement.
        available: Whether it could be measured with the installed packages.
        record: The record that was cited instead of a measurement; None if it was measured now.

    >>> claim = Claim("a.b", "1 is 1", (), "compare", "1", Verdict.HOLDS, "", lambda: Finding("1", stated=True))
    >>> Entry(claim, claim.measure()).contradicted
    False
    """

    claim: Claim
    finding: Finding
    available: bool = True
    record: Record | None = None

    @property
    def contradicted(self) -> bool:
        """Whether the measurement contradicts the recorded verdict."""
        return self.available and not self.finding.supports(self.claim.verdict)

    def as_dict(self) -> dict[str, object]:
        """The entry as a JSON object."""
        claim, record = self.claim, self.record
        return {
            "id": claim.id,
            "statement": claim.statement,
            "places": [
                {
                    "source": place.source.key,
                    "title": place.source.title,
                    "line": place.line,
                    "quotation": place.quotation,
                }
                for place in claim.places
            ],
            "method": claim.method,
            "expected": claim.expected,
            "measured": self.finding.measured,
            "verdict": str(claim.verdict),
            "amendment": claim.amendment,
            "contradicted": self.contradicted,
            "available": self.available,
            "record": None if record is None else {"date": record.date, "hardware": record.hardware},
        }


def run(claims: Iterable[Claim], *, anew: bool = True) -> Iterator[Entry]:
    """Measure the claims one after another. A measurement that raises contradicts its claim.

    Args:
        claims: Claims to measure.
        anew: Whether claims with `long` are measured too. False cites their records.

    Yields:
        One entry per claim.

    >>> broken = Claim("a", "1/0 is 0", (), "divide", "0", Verdict.HOLDS, "", lambda: Finding(str(1 / 0), True))
    >>> [(entry.finding.measured, entry.contradicted) for entry in run([broken])]
    [('ZeroDivisionError: division by zero', True)]
    """
    for claim in claims:
        if claim.long and not anew:
            record = records()[claim.id]
            yield Entry(claim, Finding(record.measured, record.stated, record.amended), record=record)
            continue
        try:
            entry = Entry(claim, claim.measure())
        except NotAvailable as reason:
            entry = Entry(claim, Finding(f"not measured: {reason}", stated=None), available=False)
        except Exception as error:  # reported as the result, so that the other claims are still measured
            entry = Entry(claim, Finding(f"{type(error).__name__}: {error}", stated=False, amended=False))
        yield entry
