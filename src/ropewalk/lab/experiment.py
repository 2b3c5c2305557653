"""Experiment: a question, registered before it is answered, and its verdict by the results of several seeds."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import mean
from typing import NamedTuple

from ropewalk.lab.run import Run
from ropewalk.lab.training import RunResult

__all__ = [
    "SWEPT_RATES",
    "Arm",
    "Experiment",
    "Outcome",
    "Statement",
    "Value",
    "Verdict",
    "about",
    "final_loss",
    "judge",
]

# The range of fewer numbers is too small: with two seeds, equal models differ by more than it in one case of five.
LEAST_SEEDS = 3

SWEPT_RATES = (
    "per encoding and size: the best of a recorded sweep on text, with a seed that no experiment uses"
    " (`rates.json`); what is not in the sweep has the rate of rope, and a size without a sweep has one rate"
)

# The results of one seed, by the label of their arm -> a number; None if it is not defined.
Value = Callable[[Mapping[str, RunResult]], float | None]


class Verdict(StrEnum):
    """Whether results support a statement."""

    HOLDS = "holds"
    FAILS = "fails"
    UNDECIDED = "undecided"


class Arm(NamedTuple):
    """One line of an experiment: a label, and the run of its first seed."""

    label: str
    run: Run


@dataclass(frozen=True)
class Statement:
    """What a source states: that one number is lower than another.

    Attributes:
        text: The statement, in one sentence.
        source: Who states it: a note (000 to 004) or a paper, with a place in it.
        lower: The number that is stated to be lower.
        higher: The number that is stated to be higher, or a constant.
        needs: Numbers that have to be at least so large, per seed: otherwise there is nothing to compare.
    """

    text: str
    source: str
    lower: Value
    higher: Value | float
    needs: tuple[tuple[str, Value, float], ...] = ()


class Outcome(NamedTuple):
    """A verdict with its figures.

    Attributes:
        verdict: The verdict.
        reason: Why, in words with figures.
        lower: The lower number per seed.
        higher: The higher number per seed.
    """

    verdict: Verdict
    reason: str
    lower: tuple[float | None, ...]
    higher: tuple[float | None, ...]


@dataclass(frozen=True)
class Experiment:
    """An experiment.

    Attributes:
        name: Its name on the command line.
        question: What it asks.
        metric: What is measured.
        direction: What the sources expect.
        rates: How learning rates were fixed.
        statements: What is judged.
        arms: Size -> the arms, with seed 0.
        arm_for: (encoding, size) -> the arm of another encoding.
        curves: Names of the curves that its picture shows.
        seeds: Number of seeds that it is registered with.
    """

    name: str
    question: str
    metric: str
    direction: str
    statements: tuple[Statement, ...]
    arms: Callable[[str], list[Arm]]
    arm_for: Callable[[str, str], Arm]
    curves: tuple[str, ...] = ("loss by step",)
    rates: str = SWEPT_RATES
    seeds: int = 3

    @property
    def sources(self) -> tuple[str, ...]:
        """Sources of all statements, each once."""
        return tuple(dict.fromkeys(statement.source for statement in self.statements))

    @property
    def undecided(self) -> str:
        """When a statement is undecided."""
        rule = (
            "fewer than three seeds, a loss that is not finite, or a difference of means at most as large as the range"
        )
        rule += " of a number over the seeds"
        needs = {f"{what} below {least:g}" for x in self.statements for what, _, least in x.needs}
        return "; ".join((rule, *sorted(needs)))


def judge(statement: Statement, results: Sequence[Mapping[str, RunResult]]) -> Outcome:
    """Compare the two numbers of a statement over the seeds.

    Args:
        statement: The statement.
        results: Results by label, one mapping per seed.

    Returns:
        HOLDS or FAILS if the difference of means is larger than the range of either number over three seeds or more.

    >>> results = [{"a": x, "b": x + 1} for x in (0.0, 0.1, 0.2)]
    >>> judge(Statement("a < b", "", lambda r: r["a"], lambda r: r["b"]), results).verdict.value
    'holds'
    """
    lower = tuple(statement.lower(x) for x in results)
    higher = tuple(statement.higher(x) if callable(statement.higher) else statement.higher for x in results)

    def outcome(verdict: Verdict, reason: str) -> Outcome:
        return Outcome(verdict, reason, lower, higher)

    # Before what is needed: a model whose loss is not finite has not failed to learn, it has diverged.
    missing = _missing(statement, results)
    if missing:
        return outcome(Verdict.UNDECIDED, f"a number is missing: {missing}")
    for what, value, least in statement.needs:
        reached = [x for x in map(value, results) if x is not None]
        if min(reached) < least:
            shown = ", ".join(f"{x:.3g}" for x in reached)
            return outcome(Verdict.UNDECIDED, f"{what}: {shown}; at least {least:g} is needed")
    a, b = [x for x in lower if x is not None], [x for x in higher if x is not None]
    difference = mean(b) - mean(a)
    figures = f"{mean(a):.4g} and {mean(b):.4g}"
    if len(results) < LEAST_SEEDS:
        return outcome(Verdict.UNDECIDED, f"{figures}; fewer than three seeds")
    spread = max(max(x) - min(x) for x in (a, b))
    figures += f"; difference {abs(difference):.2g}, spread {spread:.2g}"
    if abs(difference) <= spread:
        return outcome(Verdict.UNDECIDED, figures)
    return outcome(Verdict.HOLDS if difference > 0 else Verdict.FAILS, figures)


class _Noting(dict[str, RunResult]):
    """Results that note which labels were asked for."""

    def __init__(self, results: Mapping[str, RunResult]) -> None:
        super().__init__(results)
        self.labels: list[str] = []

    def __getitem__(self, label: str) -> RunResult:
        self.labels.append(label)
        return super().__getitem__(label)


def _missing(statement: Statement, results: Sequence[Mapping[str, RunResult]]) -> str:
    """Losses that are missing in the arms of numbers that are None, in words; "" if no number is."""
    found: dict[str, None] = {}
    for of_seed in results:
        for value in _values(statement):
            noting = _Noting(of_seed)
            if value(noting) is None:
                found |= dict.fromkeys(_missing_loss(label, of_seed[label]) for label in noting.labels)
    return "; ".join(x for x in found if x) or ("it is not defined" if found else "")


def _missing_loss(label: str, result: RunResult) -> str:
    """The first loss of a result that is None, in words; "" if none is."""
    for curve, words in (
        ("loss by step", "the loss of {} is not finite at step {:g}"),
        ("loss by length", "{} is not defined at length {:g}, or its loss there is not finite"),
    ):
        for x, y in result.curves.get(curve, ()):
            if y is None:
                return words.format(label, x)
    return ""


def _values(statement: Statement) -> list[Value]:
    """All numbers of a statement that are not constants."""
    values = (statement.lower, statement.higher, *(value for _, value, _ in statement.needs))
    return [value for value in values if callable(value)]


def about(statement: Statement, results: Mapping[str, RunResult]) -> bool:
    """Whether there are results of all arms that a statement is about.

    >>> from types import SimpleNamespace
    >>> about(Statement("", "", final_loss("a"), final_loss("b")), {"a": SimpleNamespace(final_loss=1.0)})
    False
    """
    try:
        for value in _values(statement):
            value(results)
    except KeyError:
        return False
    return True


def final_loss(label: str) -> Value:
    """The last validation loss of an arm; None if it is not finite."""
    return lambda results: results[label].final_loss
