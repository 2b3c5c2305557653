"""The picture of `ropewalk bench attention`: time and memory against N, with the powers of N."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from ropewalk.tools.pictures import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, figure, save, shown_length

__all__ = ["draw"]

# Colour, marker and line style. Other paths are grey.
STYLES = {
    "softmax (SDPA)": (GREY, "s", "-"),
    "ropewalk linear": (BLUE, "o", "-"),
    "ropewalk linear + RoPE": (RED, "D", "-"),
    "ropewalk linear + ALiBi": (ORANGE, "P", "-"),
    "ropewalk linear + T5": (PURPLE, "X", "-"),
    "fla linear": (BLUE, "^", "--"),
    "fla linear + RoPE": (RED, "v", "--"),
    "fla, no denominator": (GREEN, "x", "--"),
}


def _curves(record: dict[str, Any], work: str, field: str) -> Iterator[tuple[str, list[int], list[float]]]:
    """The lengths and values of each path over the sweep, in the order of STYLES."""
    cases = sorted((c for c in record["cases"] if c["sweep"] and c["work"] == work), key=lambda c: c["shape"][2])
    lines = [(case["shape"][2], line) for case in cases for line in case["lines"] if line[field]]
    measured = {line["path"] for _, line in lines}
    for path in [*STYLES, *sorted(measured - set(STYLES))]:
        if path in measured:
            seqs, values = zip(*((seq, line[field]) for seq, line in lines if line["path"] == path), strict=True)
            yield path, list(seqs), list(values)


def _axes(axes: Any, seqs: set[int], title: str, label: str) -> None:
    ticks = sorted(seqs)
    ticks = ticks[(len(ticks) - 1) % 2 :: 2] if len(ticks) > 5 else ticks
    axes.set(xscale="log", yscale="log", xlabel="tokens $N$", ylabel=label, title=title)
    axes.set_xticks(ticks, [shown_length(seq) for seq in ticks])
    axes.minorticks_off()


def _named(path: str, works: list[str], powers: dict[tuple[str, str], float | None]) -> str:
    """The name of the path, and the power of N with which its time grows, per panel."""
    panels = [(letter, powers.get((path, work))) for letter, work in zip("abc", works, strict=False)]
    labels = [f"{f'({letter}) ' if len(works) > 1 else ''}$N^{{{p:.2f}}}$" for letter, p in panels if p is not None]
    return f"{path}:  {', '.join(labels)}" if labels else path


def draw(record: dict[str, Any], target: str) -> None:
    """Draw time against N for each kind of work, and peak memory of the forward pass, on logarithmic axes.

    Args:
        record: The record of the benchmark.
        target: The path of the picture.
    """
    works = list(dict.fromkeys(case["work"] for case in record["cases"] if case["sweep"]))
    powers = {(fit["path"], fit["work"]): fit["exponent"] for fit in record["growth"]}
    panels = [(work, "ms", 1.0, f"time, {work}", "ms") for work in works]
    panels.append((works[0], "peak_bytes", 2.0**-20, f"peak memory, {works[0]}", "MiB above q, k, v"))
    with figure(7.1, 3.0) as drawn:
        lines: dict[str, Any] = {}
        for letter, axes, (work, field, unit, title, label) in zip(
            "abc", drawn.subplots(1, len(panels)), panels, strict=False
        ):
            lengths: set[int] = set()
            for path, seqs, values in _curves(record, work, field):
                colour, marker, dashes = STYLES.get(path, (GREY, ".", ":"))
                style = {"color": colour, "marker": marker, "linestyle": dashes}
                (lines[path],) = axes.plot(seqs, np.asarray(values) * unit, **style)
                lengths |= set(seqs)
            _axes(axes, lengths, f"({letter}) {title}", label)
        names = [_named(path, works, powers) for path in lines]
        drawn.legend(list(lines.values()), names, loc="outside lower center", ncols=3 if len(works) == 1 else 2)
    save(drawn, target)
