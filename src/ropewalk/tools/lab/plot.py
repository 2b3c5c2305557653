"""Pictures of experiments: curves of the mean over seeds, with the range of the seeds."""

import textwrap
from collections.abc import Mapping, Sequence

import numpy as np

from ropewalk.lab.conduct import Findings
from ropewalk.lab.training import RunResult
from ropewalk.tools.pictures import COLOURS, DASHES, figure, legend_below, save

__all__ = ["plot_findings", "plot_runs"]

_AXES = {
    "loss by step": ("step", "validation loss [nats per token]"),
    "loss by length": ("length", "loss of the same tokens [nats]"),
    "accuracy by length": ("length", "share of right tokens"),
    "exact by length": ("length", "share of exact answers"),
    "accuracy by distance": ("distance", "share of right values"),
}
# Losses of the first steps would hide all differences.
_SHOWN_FROM = 0.1
# Of a title.
_LETTERS_PER_INCH = 13


def plot_findings(findings: Findings, target: str) -> None:
    """Write the picture of an experiment.

    Args:
        findings: The findings.
        target: The file.
    """
    results = {arm.label: [x[arm.label] for x in findings.results] for arm in findings.arms}
    many = len(findings.seeds) > 1
    seeds = f"{len(findings.seeds)} seeds: mean and range" if many else f"seed {min(findings.seeds)}"
    title = f"{findings.experiment.question} ({findings.size}, {seeds})"
    _plot(results, findings.experiment.curves, title, target)


def plot_runs(results: Mapping[str, RunResult], encodings: Sequence[str], target: str) -> None:
    """Write the picture of single runs: one colour per encoding, and other dashes for each of its runs.

    Args:
        results: Results by label.
        encodings: The encoding of each.
        target: The file.
    """
    colours = list(dict.fromkeys(encodings))
    styles = [(colours.index(x), encodings[:i].count(x)) for i, x in enumerate(encodings)]
    runs = {label: [result] for label, result in results.items()}
    _plot(runs, ("loss by step", "loss by length"), "Runs", target, styles)


def _plot(
    results: Mapping[str, Sequence[RunResult]],
    curves: Sequence[str],
    title: str,
    target: str,
    styles: Sequence[tuple[int, int]] | None = None,
) -> None:
    # Indices of a colour and of dashes per label.
    styles = styles or [(i, i // len(COLOURS)) for i in range(len(results))]
    curves = [name for name in curves if any(name in runs[0].curves for runs in results.values())]
    with figure(7.1 if len(curves) > 1 else 5.2, 3.9) as canvas:
        panels = canvas.subplots(1, len(curves), squeeze=False)[0]
        handles: dict[str, object] = {}
        for axes, name in zip(panels, curves, strict=True):
            across, up = _AXES[name]
            axes.set(xlabel=across, ylabel=up)
            ticks: set[float] = set()
            for (label, runs), (of_colour, of_dashes) in zip(results.items(), styles, strict=True):
                if name not in runs[0].curves:
                    continue
                xs = np.array([x for x, _ in runs[0].curves[name]], dtype=float)
                ys = np.array([[np.nan if y is None else y for _, y in run.curves[name]] for run in runs], dtype=float)
                shown = xs >= _SHOWN_FROM * xs.max() if name == "loss by step" else np.full(xs.shape, True)
                colour, dashes = COLOURS[of_colour % len(COLOURS)], DASHES[of_dashes % len(DASHES)]
                marker = {} if name == "loss by step" else {"marker": "o"}
                (line,) = axes.plot(xs[shown], ys.mean(0)[shown], color=colour, linestyle=dashes, **marker)
                axes.fill_between(xs[shown], ys.min(0)[shown], ys.max(0)[shown], color=colour, alpha=0.15, lw=0)
                handles.setdefault(label, line)
                ticks |= set(xs.tolist())
            if name.endswith("length") and len(ticks) > 1:
                axes.set_xscale("log", base=2)
                axes.set_xticks(sorted(ticks), [f"{x:g}" for x in sorted(ticks)])
                axes.minorticks_off()
        letters = int(canvas.get_figwidth() * _LETTERS_PER_INCH)
        canvas.suptitle(textwrap.fill(title, letters), x=0.01, ha="left")
        legend_below(canvas, list(handles.values()), list(handles))
        save(canvas, target)
