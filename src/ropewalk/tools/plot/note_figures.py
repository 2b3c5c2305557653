"""The pictures of what the notes show: RoFormer's figure 2, S(Δ), R_m, bands of heads, the rotation, T5's bias.

The arguments `title` replace the titles of the pictures, if they are not None. Every function returns the figure.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ropewalk.tools.pictures import (
    BLUE,
    COLOURS,
    DASHES,
    GREY,
    RED,
    Arc,
    Circle,
    Figure,
    cite,
    figure,
    lengths_axis,
    shown_length,
)
from ropewalk.tools.plot.curves import Curve, Decay
from ropewalk.tools.plot.notes import FIGURE_2_LONGEST, Bound, Heads, Matrix, Plane, Score, T5Bias, lowest_band

__all__ = ["bound", "heads", "matrix", "plane", "score", "t5"]

# The first band of the inset: before it, the means fall too steeply for one linear axis.
_INSET_FROM = 1024
# Where the texts of the marks are, by distance: the curve leaves room there.
_PLACES = {0: (3.5, 3.15), 2: (8.5, 2), 20: (25, 2.75), 50: (49, 2.2)}


def bound(numbers: Bound, curve: Curve, title: str | None = None) -> Figure:
    """RoFormer's figure 2 on the axes of the paper, beside the same bound on logarithmic axes, with band means."""
    decay, dim = numbers.decay, curve.spec.rotated_dim
    with figure(7.1, 3.7) as drawn:
        paper, farther = drawn.subplots(1, 2)
        paper.plot(numbers.distance, numbers.bound, color=BLUE)
        paper.set(title="axes of the paper: linear, to 250", xlim=(0, FIGURE_2_LONGEST))
        if dim == 128:
            # The curve of the paper begins at distance 8, where the bound is 19.8.
            paper.set_ylim(6, 20)
            paper.annotate(f"{numbers.bound[0]:.1f} at distance 0:\ncut off, as in the paper", (28, 19.6), va="top")
        style = {"color": BLUE, "linewidth": 0.6, "alpha": 0.6}
        farther.plot(decay.distance[1:], decay.bound[1:], label="single distances", **style)
        style = {"color": RED, "linewidth": 1.8, "baseline": None, "zorder": 3}
        farther.stairs(decay.bound_means, decay.edges, label="mean over a band", **style)
        farther.axvspan(1, FIGURE_2_LONGEST, color="#f0f0f0", zorder=0, linewidth=0)
        farther.annotate("the left picture", (0.03, 0.97), xycoords="axes fraction", va="top", fontsize=6.5, color=GREY)
        lengths_axis(farther, 1, decay.edges[-1])
        farther.set(title=f"logarithmic axes, to {shown_length(decay.edges[-1])}", yscale="log")
        ticks = [tick for tick in (0.2, 0.5, 1, 2, 5, 10, 20, 50, 100) if tick < numbers.bound[0]]
        farther.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        farther.minorticks_off()
        farther.set_ylim(0.8 * decay.bound.min(), 4 * numbers.bound[0])
        farther.legend(loc="lower left", fontsize=6.5)
        if decay.edges[-1] > 4 * _INSET_FROM:
            _band_means(farther.inset_axes((0.45, 0.62, 0.53, 0.31)), decay)
        for axes in (paper, farther):
            axes.set(xlabel="relative distance Δ, in positions", ylabel="relative upper bound")
        low, high, mean = lowest_band(decay.edges, decay.bound_means)
        heading = f"RoFormer's bound, d = {dim}, {curve.name}: the band mean is lowest ({mean:.2f})"
        heading += f" at distances of {shown_length(low)} to {shown_length(high)}"
        drawn.suptitle(heading if title is None else title, wrap=True)
        cite(
            drawn, "RoFormer, 2104.09864, section 3.4.3 and figure 2; note 002, lines 321 to 326. Bound: mean of |S_j|."
        )
    return drawn


def _band_means(axes: Any, decay: Decay) -> None:
    """The last band means on a linear axis, with their values."""
    first = next(band for band, edge in enumerate(decay.edges) if edge >= _INSET_FROM)
    edges, means = decay.edges[first:], decay.bound_means[first:]
    axes.stairs(means, range(len(edges)), color=RED, linewidth=1.4, baseline=None)
    for band, mean in enumerate(means):
        place = {"xytext": (0, 2), "textcoords": "offset points", "ha": "center", "fontsize": 5.5}
        axes.annotate(f"{mean:.2f}", (band + 0.5, mean), **place)
    room = np.ptp(means)
    axes.set_ylim(means.min() - 0.2 * room, means.max() + 0.35 * room)
    axes.set_xticks(range(len(edges)), [shown_length(edge) for edge in edges])
    axes.set_yticks([])
    axes.tick_params(labelsize=5.5, pad=1)
    axes.set_title("means over bands, linear axis", fontsize=6, pad=2)
    axes.grid(False)


def score(numbers: Score, title: str | None = None) -> Figure:
    """S(Δ) of note 002 with the sums that the note states and the sums that are computed."""
    with figure(7.1, 3.7) as drawn:
        axes = drawn.subplots()
        axes.plot(numbers.distance, numbers.score, color=GREY, linewidth=1, label="S(Δ)")
        whole = numbers.distance % 1 == 0
        dots = {"color": GREY, "linestyle": "none", "marker": ".", "markersize": 3}
        axes.plot(numbers.distance[whole], numbers.score[whole], label="integer distances", **dots)
        at = [mark.distance for mark in numbers.marks]
        circles = {"color": BLUE, "linestyle": "none", "marker": "o", "markersize": 6}
        axes.plot(at, [mark.computed for mark in numbers.marks], label="computed", **circles)
        crosses = {"color": RED, "linestyle": "none", "marker": "x", "markersize": 7, "markeredgewidth": 1.8}
        axes.plot(at, [mark.stated for mark in numbers.marks], label="stated in note 002", **crosses)
        for mark in numbers.marks:
            text = f"Δ = {mark.distance}\nnote: {_signed(mark.stated, 1)}\ncomputed: {_signed(mark.computed, 3)}"
            wrong = f"{mark.computed:.1f}" != f"{mark.stated:.1f}"
            if wrong:
                text += f"\ndifference: {_signed(mark.computed - mark.stated, 3)}"
                between = {"arrowstyle": "<->", "color": RED, "lw": 1, "shrinkA": 0, "shrinkB": 0}
                axes.annotate("", (mark.distance, mark.computed), (mark.distance, mark.stated), arrowprops=between)
            line = {"arrowstyle": "-", "color": GREY, "lw": 0.6, "shrinkB": 5}
            style = {"color": RED if wrong else "black", "fontsize": 7, "ha": "left", "va": "center"}
            axes.annotate(text, (mark.distance, mark.computed), _PLACES[mark.distance], arrowprops=line, **style)
        axes.axhline(0, color=GREY, linewidth=0.6)
        axes.set(xlim=(-1, numbers.distance[-1]), ylim=(-3.2, 3.6), xlabel="distance Δ = m − n, in positions")
        axes.set_ylabel("S(Δ), sum of three cosines, no unit")
        axes.legend(loc="lower left", ncols=2)
        theta = " + ".join(f"cos {value:g}Δ" if value != 1 else "cos Δ" for value in numbers.inv_freq)
        axes.set_title(f"S(Δ) = {theta}" if title is None else title, wrap=True)
        cite(drawn, "Note 002, line 317; the stated sums are in lines 319 and 321.")
    return drawn


def _signed(value: float, digits: int) -> str:
    return f"{value:.{digits}f}".replace("-", "−")


def matrix(numbers: Matrix, title: str | None = None) -> Figure:
    """R_m as an image, with the formula and the value of every element that is not 0 by construction."""
    dim = len(numbers.matrix)
    size = max(0.52 * dim, 2.6)
    with figure(size + 1.2, size + 0.8) as drawn:
        axes = drawn.subplots()
        style = {"cmap": "RdBu", "vmin": -1, "vmax": 1, "interpolation": "nearest"}
        image = axes.imshow(numbers.matrix, **style)
        names = {}
        for pair, (first, second) in enumerate(numbers.features):
            names |= {(first, first): rf"$\cos\,m\theta_{{{pair}}}$", (first, second): rf"$-\sin\,m\theta_{{{pair}}}$"}
            names |= {(second, first): rf"$\sin\,m\theta_{{{pair}}}$", (second, second): rf"$\cos\,m\theta_{{{pair}}}$"}
        for (row, column), value in np.ndenumerate(numbers.matrix):
            name = names.get((row, column))
            text = "0" if name is None else f"{name}\n{_signed(value, 2)}"
            colour = "white" if abs(value) > 0.6 else GREY if name is None else "black"
            axes.text(column, row, text, ha="center", va="center", fontsize=6, color=colour)
        axes.set(xticks=range(dim), yticks=range(dim))
        axes.set(xlabel="feature of the vector q", ylabel="feature of the rotated vector")
        axes.set_xticks(np.arange(dim + 1) - 0.5, minor=True)
        axes.set_yticks(np.arange(dim + 1) - 0.5, minor=True)
        axes.grid(False)
        axes.grid(True, which="minor", color="white", linewidth=1)
        drawn.colorbar(image, ax=axes, label="element of the matrix, no unit", pad=0.02, shrink=0.8)
        heading = rf"$\mathcal{{R}}_m$ at position m = {numbers.position}, d = {dim}"
        axes.set_title(heading if title is None else title, wrap=True)
        cite(drawn, "Note 004, lines 72 to 74; also note 002, line 255, and RoFormer, 2104.09864, equation 15.")
    return drawn


def heads(numbers: Heads, title: str | None = None) -> Figure:
    """The period of every pair of every head, if d_model is rotated before the split, and if each head is rotated."""
    width = numbers.num_heads * numbers.head_dim
    with figure(7.1, 3.9) as drawn:
        left, right = drawn.subplots(1, 2, sharey=True)
        panels = (
            (left, numbers.before_split, f"d_model = {width} is rotated, then split", BLUE),
            (right, numbers.per_head, f"every head of {numbers.head_dim} is rotated", RED),
        )
        for axes, rows, heading, colour in panels:
            for head, row in enumerate(rows):
                axes.axvspan(head - 0.4, head + 0.4, color="#f5f5f5", zorder=0, linewidth=0)
                place = head + np.linspace(-0.35, 0.35, len(row))
                axes.plot(place, row, color=colour, linestyle="none", marker=".", markersize=2)
                for at, offset, align in ((0, -3, "top"), (-1, 3, "bottom")):
                    style = {"ha": "center", "va": align, "fontsize": 5.5, "textcoords": "offset points"}
                    axes.annotate(_period(row[at]), (place[at], row[at]), (0, offset), **style)
            axes.set(
                title=heading,
                xlabel="head, and in it the pairs from left to right",
                yscale="log",
                xlim=(-0.7, numbers.num_heads - 0.3),
            )
            axes.set_xticks(range(numbers.num_heads))
            axes.grid(False, axis="x")
        left.set_ylabel("period 2π/θ of a pair, in positions")
        left.set_ylim(numbers.before_split.min() / 2, 2 * max(numbers.before_split.max(), numbers.per_head.max()))
        heading = f"Periods per head, {numbers.num_heads} heads of {numbers.head_dim}, base {numbers.base:,.12g}"
        drawn.suptitle(heading if title is None else title, wrap=True)
        cite(drawn, "Left: note 000, line 52. Right: what models do; note 003, line 84. Each point is one pair.")
    return drawn


def _period(value: float) -> str:
    return f"{value:.1f}" if value < 10 else f"{value:,.0f}"


def plane(numbers: Sequence[Plane], title: str | None = None) -> Figure:
    """A vector before and after its rotation, and then a query and a key at positions with the same distance."""
    first = numbers[0]
    with figure(7.1, 3.3) as drawn:
        alone, *others = drawn.subplots(1, 1 + len(numbers))
        _rotated(alone, first.query, first.m * first.theta, "q", "m", BLUE, 0.36, f" = {first.m * first.theta:g} rad")
        alone.set_title(f"q at position m = {first.m}", loc="center")
        for axes, both in zip(others, numbers, strict=True):
            _rotated(axes, both.query, both.m * both.theta, "q", "m", BLUE, 0.36)
            _rotated(axes, both.key, both.n * both.theta, "k", "n", RED, 0.2)
            product = r"$(\mathcal{R}_m\,q)\cdot(\mathcal{R}_n\,k)$"
            at = f"m = {both.m}, n = {both.n}, m − n = {both.m - both.n}"
            axes.set_title(f"{at}:\n{product} = {both.score:.3f}", loc="center")
        for axes in drawn.axes:
            axes.axhline(0, color="#e4e4e4", linewidth=0.5, zorder=0)
            axes.axvline(0, color="#e4e4e4", linewidth=0.5, zorder=0)
            axes.add_patch(Circle((0, 0), abs(first.query), fill=False, color="#c8c8c8", linewidth=0.6))
            axes.set(xlim=(-0.9, 0.9), ylim=(-0.9, 0.9), aspect="equal", xticks=[], yticks=[])
            axes.set(xlabel="first feature of the pair", ylabel="second feature" if axes is alone else "")
            axes.grid(False)
        heading = f"Both vectors rotate by θ = {first.theta:g} rad per position; the score depends only on m − n"
        drawn.suptitle(heading if title is None else title, wrap=True)
        cite(
            drawn,
            "Dashed: not rotated. Note 001, lines 27 to 29; note 002, lines 190 to 195; RoFormer, 2104.09864, figure 1",
        )
    return drawn


def _rotated(
    axes: Any, vector: complex, angle: float, name: str, position: str, colour: str, radius: float, value: str = ""
) -> None:
    """A vector, dashed; the same vector rotated by `angle`; and the arc between them, labelled with the angle."""
    rotated, start = vector * np.exp(1j * angle), np.angle(vector)
    for end, dashes, text in ((vector, (0, (3, 2)), name), (rotated, "-", rf"$\mathcal{{R}}_{position}\,{name}$")):
        arrow = {"arrowstyle": "-|>", "color": colour, "lw": 1.6, "shrinkA": 0, "shrinkB": 0, "linestyle": dashes}
        arrow |= {"alpha": 0.6} if end is vector else {}
        axes.annotate("", (end.real, end.imag), (0, 0), arrowprops=arrow)
        outside = end * (1 + 0.14 / abs(end))
        axes.annotate(text, (outside.real, outside.imag), color=colour, ha="center", va="center")
    degrees = np.degrees([start, start + angle])
    axes.add_patch(Arc((0, 0), 2 * radius, 2 * radius, theta1=degrees[0], theta2=degrees[1], color=colour, linewidth=1))
    middle = (radius + 0.08) * np.exp(1j * (start + angle / 2))
    align = "left" if value else "center"
    axes.annotate(f"{position}θ{value}", (middle.real, middle.imag), color=colour, ha=align, va="center", fontsize=7)


def t5(numbers: T5Bias, title: str | None = None) -> Figure:
    """T5's buckets against the distance, and the bias of the stated table in units of q·k."""
    distance = numbers.distance[1:]
    with figure(7.1, 3.6) as drawn:
        left, right = drawn.subplots(1, 2)
        for number, (name, bucket) in enumerate(numbers.bucket.items()):
            style = {"color": COLOURS[number], "linestyle": DASHES[number], "where": "post"}
            left.step(distance, bucket[1:], label=name, **style)
        left.set(title="the bucket of a distance", ylabel="index of the bucket, not a score")
        left.legend(loc="upper left")
        right.plot(distance, -np.log1p(distance), color=GREY, linestyle=":", linewidth=1, label="−ln(1 + Δ)")
        right.step(distance, numbers.bias[1:], color=BLUE, where="post", label="bias B, decoder")
        right.set(title="a stated table, not a learned one", ylabel="bias B, added to q·k (no 1/√d)")
        right.legend(loc="upper right")
        factor = right.secondary_yaxis("right", functions=(np.exp, _logarithm))
        factor.set_ylabel("exp(B), factor of the weight")
        ticks = [1 / n for n in (2, 4, 8, 16, 32, 64, 128) if np.log(1 / n) >= numbers.bias.min()]
        factor.set_yticks(ticks, [f"1/{round(1 / tick)}" for tick in ticks])
        for axes in (left, right):
            axes.set_xlabel("distance Δ, in positions")
            lengths_axis(axes, 1, len(numbers.distance))
        drawn.suptitle("T5 adds one number per bucket and head to q·k" if title is None else title, wrap=True)
        cite(
            drawn,
            "Note 002, lines 148 to 160; T5, 1910.10683, section 2.1. The table of the picture: a bucket whose least"
            " distance is n has the bias −ln(1 + n).",
        )
    return drawn


def _logarithm(factor: Any) -> Any:
    """The natural logarithm, without a warning for the limits that matplotlib tries."""
    return np.log(np.maximum(factor, 1e-300))
