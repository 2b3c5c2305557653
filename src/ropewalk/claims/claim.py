"""Claims: statements about position encodings, how each is measured, and its recorded verdict.

Each run repeats the measurements. If a measurement contradicts the recorded verdict, the verdict, the measurement or
the library is wrong.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Chapter", "Claim", "Entry", "Finding", "Verdict", "run"]


class Verdict(StrEnum):
    """The recorded result for a statement.

    >>> print(Verdict.CONDITIONAL)
    holds under a stated condition
    """

    HOLDS = "holds"
    CONDITIONAL = "holds under a stated condition"
    FAILS = "does not hold"


@dataclass(frozen=True)
class Finding:
    """The result of a measurement.

    Attributes:
        measured: The figures, as text.
        stated: Whether the statement is true as made.
        amended: Whether the condition or correction of the claim is true.

    >>> Finding("1.909", stated=False, amended=True).supports(Verdict.FAILS)
    True
    >>> Finding("1.4", stated=True, amended=True).supports(Verdict.FAILS)
    False
    """

    measured: str
    stated: bool
    amended: bool = False

    def supports(self, verdict: Verdict) -> bool:
        """Whether the measurement agrees with `verdict`. A condition or a correction must be measured too."""
        if verdict is Verdict.HOLDS:
            return bool(self.stated)
        return not self.stated and bool(self.amended)


@dataclass(frozen=True)
class Claim:
    """A statement with its measurement and its recorded verdict.

    Attributes:
        id: Unique name, "subject.name".
        statement: The statement in plain words.
        source: The note or paper that makes the statement.
        method: How the statement is measured.
        expected: The expected figures.
        verdict: The recorded verdict.
        amendment: The condition under which the statement holds, or what holds instead. Empty if it holds.
        measure: Runs the measurement.

    Raises:
        ValueError: If a verdict other than "holds" has no amendment, or "holds" has one.

    >>> Claim("a.b", "1 + 1 is 2", "a note", "add", "2", Verdict.HOLDS, "", lambda: Finding("2", True)).verdict
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
            raise ValueError(f"{self.id}: a verdict other than 'holds' needs an amendment, and 'holds' has none")


class Chapter:
    """Claims on one subject, in the order of their definition.

    Args:
        title: Heading of the chapter.

    >>> chapter = Chapter("Sums")
    >>> @chapter.claim("sum", "1 + 1 is 3", "a note", method="add", expected="2", fails="1 + 1 is 2")
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
        """Decorator that adds a claim, measured by the decorated function.

        Args:
            id: Unique name, "subject.name".
            statement: The statement in plain words.
            source: The note or paper that makes the statement.
            method: How the statement is measured.
            expected: The expected figures.
            only_if: The condition under which the statement holds, for the verdict CONDITIONAL.
            fails: What holds instead, for the verdict FAILS.

        Returns:
            The decorator. It returns the function unchanged.
        """
        verdict = Verdict.CONDITIONAL if only_if else Verdict.FAILS if fails else Verdict.HOLDS

        def record(measure: Callable[[], Finding]) -> Callable[[], Finding]:
            self.claims.append(Claim(id, statement, source, method, expected, verdict, only_if or fails, measure))
            return measure

        return record


@dataclass(frozen=True)
class Entry:
    """A claim with the result of one run.

    Attributes:
        claim: The claim.
        finding: The result of its measurement.

    >>> claim = Claim("a.b", "1 is 1", "a note", "compare", "1", Verdict.HOLDS, "", lambda: Finding("1", stated=True))
    >>> Entry(claim, claim.measure()).contradicted
    False
    """

    claim: Claim
    finding: Finding

    @property
    def contradicted(self) -> bool:
        """Whether the measurement contradicts the recorded verdict."""
        return not self.finding.supports(self.claim.verdict)

    def as_dict(self) -> dict[str, str | bool]:
        """The entry as a JSON object."""
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
    """Measure the claims one after another. A measurement that raises contradicts its claim.

    Args:
        claims: Claims to measure.

    Yields:
        One entry per claim.

    >>> broken = Claim("a", "1/0 is 0", "a note", "divide", "0", Verdict.HOLDS, "", lambda: Finding(str(1 / 0), True))
    >>> [(entry.finding.measured, entry.contradicted) for entry in run([broken])]
    [('ZeroDivisionError: division by zero', True)]
    """
    for claim in claims:
        try:
            finding = claim.measure()
        except Exception as error:  # reported as the result, so that the other claims are still measured
            finding = Finding(f"{type(error).__name__}: {error}", stated=False, amended=False)
        yield Entry(claim, finding)
