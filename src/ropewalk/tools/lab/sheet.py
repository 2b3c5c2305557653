"""Tables of experiments: what they ask, what was measured, and the verdicts."""

from collections.abc import Mapping, Sequence
from statistics import mean

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ropewalk.lab.conduct import Findings
from ropewalk.lab.decoder import SIZES
from ropewalk.lab.experiment import Arm, Experiment, Verdict
from ropewalk.lab.training import RunResult
from ropewalk.tools.output import trimmed

__all__ = ["print_comparison", "print_experiment", "print_findings", "print_list"]

_COLOURS = {Verdict.HOLDS: "green", Verdict.FAILS: "red", Verdict.UNDECIDED: "yellow"}


def print_list(console: Console, experiments: Sequence[Experiment]) -> None:
    """One line per experiment: its name and its question."""
    table = _table("name", "question")
    table.columns[1].no_wrap = False
    for experiment in experiments:
        table.add_row(experiment.name, experiment.question)
    with trimmed(console):
        console.print(table)
        console.print("\nropewalk lab show NAME prints sources, metric and rules; ropewalk lab run NAME runs it")


def print_experiment(console: Console, experiment: Experiment, size: str, arms: Sequence[Arm]) -> None:
    """What an experiment is, before it runs."""
    with trimmed(console):
        console.print(f"{experiment.name}\n")
        facts = {
            "question": experiment.question,
            "metric": experiment.metric,
            "expected": experiment.direction,
            "rates": experiment.rates,
            "undecided": experiment.undecided,
            "sizes": ", ".join(SIZES),
            "seeds": f"{experiment.seeds}, from 0; --seeds and --first-seed choose others",
        }
        grid = Table.grid(padding=(0, 2))
        for name, text in facts.items():
            grid.add_row(name, text)
        console.print(grid)
        statements = _table("source", "statement")
        statements.columns[1].no_wrap = False
        for statement in experiment.statements:
            statements.add_row(statement.source, statement.text)
        console.print(Padding(statements, (1, 0)))
        table = _table(f"arm ({size})", "encoding", "steps", "batch", "length", "rate")
        for arm in arms:
            run = arm.run
            cells = (run.steps, run.batch, run.length, f"{run.rate:g}")
            table.add_row(arm.label, "" if run.encoding == arm.label else run.encoding, *map(str, cells))
        console.print(table)


def print_findings(console: Console, findings: Findings) -> None:
    """What was measured, and the verdicts."""
    experiment, seeds = findings.experiment, findings.seeds
    many = f"seeds {min(seeds)} to {max(seeds)}" if len(seeds) > 1 else f"seed {min(seeds)}"
    with trimmed(console):
        console.print(f"{experiment.name}, {findings.size}, {many}: {experiment.question}\n")
        by_label = {arm.label: [x[arm.label] for x in findings.results] for arm in findings.arms}
        _print_results(console, by_label, _shown_curve(experiment))
        if findings.outcomes:
            console.print()
        grid = Table.grid(padding=(0, 2))
        for statement, outcome in zip(experiment.statements, findings.outcomes, strict=False):
            verdict = Text(outcome.verdict.value, style=_COLOURS[outcome.verdict])
            grid.add_row(verdict, f"{statement.text} ({statement.source})\n{outcome.reason}")
        if findings.outcomes:
            console.print(grid)


def print_comparison(console: Console, results: Mapping[str, RunResult]) -> None:
    """Runs side by side."""
    with trimmed(console):
        _print_results(console, {label: [result] for label, result in results.items()}, "loss by length")


def _shown_curve(experiment: Experiment) -> str | None:
    """The first curve of an experiment that is not over steps: its points become columns."""
    return next((name for name in experiment.curves if name != "loss by step"), None)


def _print_results(console: Console, results: dict[str, list[RunResult]], curve: str | None) -> None:
    points = sorted({x for runs in results.values() for x, _ in next(iter(runs)).curves.get(curve or "", [])})
    table = _table("arm", "loss", *(f"{x:g}" for x in points))
    for column in table.columns[1:]:
        column.justify = "right"
    for label, runs in results.items():
        cells = [_mean_and_spread([run.final_loss for run in runs])]
        for x in points:
            values = [dict(run.curves.get(curve or "", [])).get(x) for run in runs]
            cells.append(_mean_and_spread(values, short=True))
        table.add_row(label, *cells)
    console.print(table)
    note = ["loss: validation at the trained length"]
    if any(len(runs) > 1 for runs in results.values()):
        note[0] += ", mean and half the range over seeds"
    note += [f"then {curve}"] if points else []
    console.print("; ".join([*note, "- is not defined, or not finite"]))


def _mean_and_spread(present: Sequence[float | None], *, short: bool = False) -> str:
    # A mean without the seeds that diverged would be that of the better ones.
    values = [x for x in present if x is not None]
    if not values or len(values) < len(present):
        return "-"
    middle = mean(values)
    spread = (max(values) - min(values)) / 2
    return f"{middle:.3f}" if short or len(values) == 1 else f"{middle:.3f} ±{spread:.3f}"


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for index, name in enumerate(columns):
        table.add_column(name, no_wrap=index > 0)
    return table
