"""The pictures of `ropewalk plot` and `ropewalk verify`: decay, periods, rotation, biases, the sinusoidal table.

The arguments `title` are the titles of the pictures. Every function returns the figure.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ropewalk.spec.frequencies import Plain
from ropewalk.spec.rope import RopeSpec
from ropewalk.theory import classify, periods, plain_inv_freq
from ropewalk.theory.encodings import sinusoidal_table
from ropewalk.tools.pictures import (
    BLUE,
    COLOURS,
    DASHES,
    GREY,
    RED,
    Figure,
    cite,
    figure,
    legend_below,
    lengths_axis,
    save,
    shades,
    shown_length,
)
from ropewalk.tools.plot.curves import Curve, Decay, as_text, decay_of
from ropewalk.tools.plot.note_figures import plane
from ropewalk.tools.plot.notes import lowest_band, planes

__all__ = ["bias", "decay", "draw_all", "frequencies", "rotation", "sinusoidal"]

# The number of positions that are drawn per pair, and of heads in a legend.
_POINTS, _MOST_NAMED = 900, 12


def decay(curves: Sequence[tuple[Curve, Decay]], title: str) -> Figure:
    """RoFormer's figure 2 with means over bands, next to the score of pairs that are parallel and of norm 1."""
    with figure(7.1, 3.4) as drawn:
        panels = (
            ("bound", "bound: mean of $|S_j|$ (RoFormer, figure 2)", "mean of $|S_j|$"),
            ("score", r"score, pairs parallel and of norm 1: $\Sigma_i\,\cos(\Delta\,\theta_i)$", "score"),
        )
        for axes, (name, heading, label) in zip(drawn.subplots(1, 2), panels, strict=True):
            for number, (curve, decayed) in enumerate(curves):
                single = len(curves) == 1
                colour, distance = COLOURS[number], decayed.distance[1:]
                style = {"color": BLUE if single else colour, "linewidth": 0.6, "alpha": 0.6 if single else 0.25}
                axes.plot(
                    distance,
                    getattr(decayed, name)[1:],
                    label="single distances" if single else None,
                    zorder=2,
                    **style,
                )
                means = getattr(decayed, f"{name}_means")
                style = {"color": RED if single else colour, "linewidth": 1.8, "baseline": None, "zorder": 3 + number}
                axes.stairs(means, decayed.edges, label="mean over a band" if single else as_text(curve.name), **style)
            axes.set(title=heading, xlabel="distance Δ, in positions", ylabel=label)
            lengths_axis(axes, 1, curves[0][1].edges[-1])
        drawn.axes[0].set_ylim(bottom=0)
        drawn.axes[1].axhline(0, color=GREY, linewidth=0.6)
        if len(curves) == 1:
            drawn.axes[0].legend()
        else:
            legend_below(drawn, *drawn.axes[0].get_legend_handles_labels(), most=3)
        drawn.suptitle(title, wrap=True)
    return drawn


def frequencies(curves: Sequence[Curve], length: int | None, title: str) -> Figure:
    """The period of every pair, with lines at the trained lengths of the models and at `length`."""
    with figure(7.1, 3.8) as drawn:
        axes = drawn.subplots()
        marked: dict[int, str] = {}
        for number, curve in enumerate(curves):
            period = periods(curve.inv_freq(length))
            label, trained = as_text(curve.name), curve.trained
            if trained is not None:
                label += f": {int((period <= trained).sum())} of {len(period)} periods within {trained:,}"
                # Before scaling it was more pairs. `ropewalk inspect` counts those as the critical dimension.
                kinds = set(classify(curve.spec.inv_freq(length), plain_inv_freq(curve.spec)))
                label += "" if kinds <= {"unchanged", "still"} else ", as scaled"
                marked.setdefault(trained, COLOURS[number])
            axes.plot(np.arange(len(period)), period, label=label, color=COLOURS[number], linestyle=DASHES[number])
        for trained, colour in marked.items():
            _horizontal_line(axes, trained, f"trained length {trained:,}", colour if len(marked) > 1 else "black", "--")
        if length is not None and length not in marked:
            _horizontal_line(axes, length, f"length {length:,}", "black", ":")
        axes.set(yscale="log", xlabel="pair i", ylabel="period 2π/θ, in positions")
        axes.set_title(title, wrap=True)
        axes.margins(x=0.01)
        legend_below(
            drawn, *axes.get_legend_handles_labels(), side="outside lower left", most=1 if len(curves) < 4 else 2
        )
    return drawn


def _horizontal_line(axes: Any, y: float, text: str, colour: str, dashes: Any) -> None:
    axes.axhline(y, color=colour, linestyle=dashes, linewidth=0.8)
    placement = {"xytext": (2, 2), "textcoords": "offset points", "xycoords": ("axes fraction", "data")}
    axes.annotate(text, (0, y), color=colour, fontsize="small", **placement)


def rotation(curves: Sequence[Curve], pairs: Sequence[Sequence[int]], length: int, title: str) -> Figure:
    """Pairs of each curve as points in polar coordinates. The angle is that of the pair, the radius is the position."""
    columns = max(map(len, pairs))
    width = min(7.1, max(4.6, 1.2 * columns))
    # Random positions: with even steps, aliasing would show spiral arms that do not exist.
    positions = np.sort(np.random.default_rng(0).choice(length, min(length, _POINTS), replace=False))
    with figure(width, 0.6 + (width / columns + 0.4) * len(curves)) as drawn:
        grid = drawn.subplots(len(curves), columns, squeeze=False, subplot_kw={"projection": "polar"})
        handles: dict[str, Any] = {}
        for row, curve, drawn_pairs in zip(grid, curves, pairs, strict=True):
            theta, trained = curve.inv_freq(length), curve.trained or length
            parts = (
                ("within the trained length", BLUE, positions < trained),
                ("beyond it", RED, positions >= trained),
            )
            for axes in row[len(drawn_pairs) :]:
                axes.set_axis_off()
            for axes, pair in zip(row, drawn_pairs, strict=False):
                for name, colour, part in parts:
                    radius = positions[part]
                    if radius.size:
                        handles[name] = axes.scatter(radius * theta[pair], radius, s=1.6, color=colour, linewidths=0)
                axes.set(ylim=(0, length), xticks=[], yticks=[])
                first, second = curve.features(pair)
                rotations = length * theta[pair] / (2 * np.pi)
                count = f"{rotations:,.0f}" if rotations >= 100 else f"{rotations:.3g}"
                axes.set_title(f"pair {pair}: ({first}, {second})\n{count} rotations", fontsize=6.5, loc="center")
            if len(curves) > 1:
                row[0].set_ylabel(as_text(curve.name).replace(", ", "\n"), fontsize=6.5, labelpad=10)
        if len(handles) > 1:
            legend_below(drawn, list(handles.values()), list(handles), markerscale=3)
        drawn.suptitle(title, wrap=True)
    return drawn


def bias(
    distance: NDArray[np.int64],
    slopes: NDArray[np.float64] | None,
    buckets: dict[str, NDArray[np.int64]],
    learned: dict[str, NDArray[np.float64]],
    title: str,
) -> Figure:
    """ALiBi's bias per head, from [heads] slopes, and T5's bias, against the distance. Either may be left out.

    T5's bias is `learned`, [heads, distance] per stack of layers. If it is empty, the buckets are drawn instead.
    """
    panels = (slopes is not None) + (len(learned) or bool(buckets))
    with figure(7.1 if panels == 2 else 4.6, 3.4) as drawn:
        grid = iter(np.atleast_1d(drawn.subplots(1, panels)))
        if slopes is not None:
            axes = next(grid)
            named = np.unique(np.linspace(1, len(slopes), min(len(slopes), _MOST_NAMED)).round())
            for head, (slope, colour) in enumerate(zip(slopes, shades(len(slopes)), strict=True), 1):
                name = f"{head}: slope $2^{{{np.log2(slope):.4g}}}$"
                axes.plot(distance[1:], slope * distance[1:], color=colour, label=name if head in named else None)
            axes.set(title="ALiBi: slope × Δ is subtracted from the score", ylabel="slope × Δ", yscale="log")
            axes.legend(title="head", loc="center left", bbox_to_anchor=(1, 0.5), fontsize=6.5, handlelength=1.5)
        for name, values in learned.items():
            axes = next(grid)
            for head, (row, colour) in enumerate(zip(values, shades(len(values)), strict=True), 1):
                shown = len(values) <= _MOST_NAMED or head in (1, len(values))
                style = {"color": colour, "where": "post", "label": f"{head}" if shown else None}
                axes.step(distance[1:], row[1:], **style)
            axes.axhline(0, color=GREY, linewidth=0.6)
            axes.set(title=f"T5, {name}: the learned bias", ylabel="added to q·k (no 1/√d)")
            axes.legend(title="head", loc="center left", bbox_to_anchor=(1, 0.5), fontsize=6.5, handlelength=1.5)
        if buckets and not learned:
            axes = next(grid)
            for number, (name, bucket) in enumerate(buckets.items()):
                style = {"color": COLOURS[number], "linestyle": DASHES[number], "where": "post"}
                axes.step(distance[1:], bucket[1:], label=name, **style)
            axes.set(title="T5: the buckets of distances", ylabel="index of the bucket, not a score")
            axes.legend(loc="upper left")
        for axes in drawn.axes:
            axes.set_xlabel("distance Δ, in positions")
            lengths_axis(axes, 1, len(distance))
        drawn.suptitle(title, wrap=True)
    return drawn


def sinusoidal(table: NDArray[np.float64], title: str) -> Figure:
    """The sinusoidal table, [positions, features], as an image."""
    with figure(7.1, 3.8) as drawn:
        axes = drawn.subplots()
        style = {"aspect": "auto", "cmap": "RdBu", "vmin": -1, "vmax": 1, "interpolation": "nearest"}
        image = axes.imshow(table, **style)
        axes.set(xlabel="feature: sine at 2i, cosine at 2i + 1", ylabel="position")
        axes.set_title(title, wrap=True)
        axes.grid(False)
        drawn.colorbar(image, ax=axes, label="value, no unit", pad=0.02)
        cite(drawn, "Vaswani et al., 1706.03762, section 3.5; notes 000 (line 18), 001 (line 11) and 004 (line 18).")
    return drawn


def _bases(*bases: float, trained: int | None = None) -> list[Curve]:
    return [Curve(f"base {base:,.12g}", RopeSpec(128, Plain(base)), trained) for base in bases]


def _long_decay(curve: Curve) -> Figure:
    """The decay to 131072, past the band with the lowest mean, which the title names."""
    numbers = decay_of(curve, 1 << 17)
    low, high, _ = lowest_band(numbers.edges, numbers.bound_means)
    band = f"{shown_length(low)} to {shown_length(high)}"
    title = f"Long-term decay, d = {curve.spec.rotated_dim}, {curve.name}: the means are lowest at distances of {band}"
    return decay([(curve, numbers)], title)


# The pictures of `ropewalk verify`, by file name.
FIGURES: dict[str, Callable[[], Figure]] = {
    "decay": lambda: _long_decay(*_bases(10_000)),
    "wavelengths": lambda: frequencies(
        _bases(10_000, 500_000, 10_000_000, trained=4096),
        None,
        "Positions per full rotation of a pair, d = 128",
    ),
    "rotation": lambda: plane(planes()),
    "sinusoid": lambda: sinusoidal(
        sinusoidal_table(np.arange(128), 64),
        "Sinusoidal encoding, d = 64: high frequencies on the left, low on the right",
    ),
}


def draw_all(folder: Path) -> Iterator[Path]:
    """Draw every picture of `ropewalk verify` to `folder` as a PNG, and yield each path after it is written."""
    for name, draw in FIGURES.items():
        path = folder / f"{name}.png"
        save(draw(), str(path))
        yield path
