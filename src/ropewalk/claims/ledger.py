"""The ledger: statements that others make about position encodings, how each is measured, and what is known of it.

A statement is recorded with a verdict. Each run measures it anew; a measurement that contradicts the recorded verdict
is an error in the ledger, in the code that measures, or in the library.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Chapter", "Claim", "Entry", "Finding", "Verdict", "run"]


class Verdict(StrEnum):
    """What is known of a statement.

    >>> print(Verdict.CONDITIONAL)
    holds under a stated condition
    """

    HOLDS = "holds"
    CONDITIONAL = "holds under a stated condition"
    FAILS = "does not hold"


@dataclass(frozen=True)
class Finding:
    """What a measurement says: the figures, whether the statement is true as made, and whether as amended.

    >>> Finding("1.909", stated=False, amended=True).supports(Verdict.FAILS)
    True
    >>> Finding("1.4", stated=True, amended=True).supports(Verdict.FAILS)
    False
    """

    measured: str
    stated: bool
    amended: bool = False

    def supports(self, verdict: Verdict) -> bool:
        """Whether this is what the verdict says. A condition or a correction must itself have been measured."""
        if verdict is Verdict.HOLDS:
            return bool(self.stated)
        return not self.stated and bool(self.amended)


@dataclass(frozen=True)
class Claim:
    """A statement, where it stands, how it is measured, what should come out, and the verdict.

    `amendment` is the condition under which it holds, or what holds instead; empty where it simply holds.

    >>> Claim("a.b", "1 + 1 is 2", "arithmetic", "add", "2", Verdict.HOLDS, "", lambda: Finding("2", True)).verdict
    <Verdict.HOLDS: 'holds'>
    """

    id: str
    statement: str
    source: str
    method: str
    expected: str
    verdict: Verdict
    amendment: str
    measure: Callable[[], Finding]

    def __post_init__(self) -> None:
        if (self.verdict is Verdict.HOLDS) != (self.amendment == ""):
            raise ValueError(f"{self.id}: a verdict other than 'holds' says what holds instead, and 'holds' does not")


class Chapter:
    """Claims on one subject, in the order in which they are made.

    >>> chapter = Chapter("Sums")
    >>> @chapter.claim("sum", "1 + 1 is 3", "a mistake", method="add", expected="2", fails="1 + 1 is 2")
    ... def _() -> Finding:
    ...     return Finding(str(1 + 1), stated=1 + 1 == 3, amended=1 + 1 == 2)
    >>> [claim.verdict.value for claim in chapter.claims]
    ['does not hold']
    """

    def __init__(self, title: str) -> None:
        self.title = title
        self.claims: list[Claim] = []

    def claim(
        self, id: str, statement: str, source: str, *, method: str, expected: str, only_if: str = "", fails: str = ""
    ) -> Callable[[Callable[[], Finding]], Callable[[], Finding]]:
        """Records the function below it as the measurement of a claim.

        `only_if` is the condition under which the statement holds, `fails` what holds in its place.
        """
        verdict = Verdict.CONDITIONAL if only_if else Verdict.FAILS if fails else Verdict.HOLDS

        def record(measure: Callable[[], Finding]) -> Callable[[], Finding]:
            self.claims.append(Claim(id, statement, source, method, expected, verdict, only_if or fails, measure))
            return measure

        return record


@dataclass(frozen=True)
class Entry:
    """A claim with what one run measured.

    >>> claim = Claim("a.b", "1 is 1", "logic", "look", "1", Verdict.HOLDS, "", lambda: Finding("1", stated=True))
    >>> Entry(claim, claim.measure()).contradicted
    False
    """

    claim: Claim
    finding: Finding

    @property
    def contradicted(self) -> bool:
        """Whether the measurement speaks against the recorded verdict."""
        return not self.finding.supports(self.claim.verdict)

    def as_dict(self) -> dict[str, str | bool]:
        """The entry as JSON holds it."""
        claim = self.claim
        return {
            "id": claim.id,
            "statement": claim.statement,
            "source": claim.source,
            "method": claim.method,
            "expected": claim.expected,
            "measured": self.finding.measured,
            "verdict": str(claim.verdict),
            "amendment": claim.amendment,
            "contradicted": self.contradicted,
        }


def run(claims: list[Claim]) -> Iterator[Entry]:
    """Measures each claim in turn. A measurement that raises is one that contradicts.

    >>> broken = Claim("a", "1/0 is 0", "a slip", "divide", "0", Verdict.HOLDS, "", lambda: Finding(str(1 / 0), True))
    >>> [(entry.finding.measured, entry.contradicted) for entry in run([broken])]
    [('ZeroDivisionError: division by zero', True)]
    """
    for claim in claims:
        try:
            finding = claim.measure()
        except Exception as error:  # whatever breaks one measurement must not hide the others: it is reported
            finding = Finding(f"{type(error).__name__}: {error}", stated=False, amended=False)
        yield Entry(claim, finding)
