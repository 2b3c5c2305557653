"""The pictures of `ropewalk verify`: decay, wavelengths, rotation in the plane, the sinusoidal table."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from ropewalk.errors import RopewalkError
from ropewalk.reference import sinusoidal_table
from ropewalk.spec import Plain
from ropewalk.theory import BAND_EDGES, band_means, decay_curve, periods, score_sum

try:
    from matplotlib.figure import Figure
    from matplotlib.patches import Circle
except ImportError:
    raise RopewalkError(
        asked="pictures",
        expected="matplotlib, which the extra `plots` installs",
        got="no matplotlib",
        do="pip install 'ropewalk[plots]'",
    ) from None

__all__ = ["draw_all"]

THETA = Plain(10_000).evaluate(128)
BLUE, ORANGE, GREY = "#1f5fa8", "#d9662b", "#8a8a8a"


def decay() -> Figure:
    """RoFormer's figure 2 with the means of its bands, beside the score of parallel vectors."""
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    bound, score = figure.subplots(1, 2)
    distances = np.arange(BAND_EDGES[-1])
    for axes, curve, title in (
        (bound, decay_curve(distances, THETA), "bound: mean of $|S_j|$, RoFormer figure 2"),
        (score, score_sum(distances, THETA), "score of parallel vectors: Σ cos(Δθ)"),
    ):
        axes.plot(distances[1:], curve[1:], color=BLUE, linewidth=0.8, alpha=0.6, label="each distance")
        means = band_means(curve, BAND_EDGES)
        axes.stairs(means, BAND_EDGES, baseline=None, color=ORANGE, linewidth=2, zorder=3, label="mean of a band")
        axes.axhline(0, color=GREY, linewidth=0.6)
        axes.set(title=title, xlabel="distance Δ", ylabel="value", xscale="log", xlim=(1, BAND_EDGES[-1]))
        axes.legend(frameon=False)
    figure.suptitle("Long-term decay, d = 128: bands fall, single steps rise and fall")
    return figure


def wavelengths() -> Figure:
    """The period of every pair, for three bases, against a trained length of 4096."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for base, colour in ((10_000, BLUE), (500_000, ORANGE), (10_000_000, GREY)):
        lengths = periods(Plain(base).evaluate(128))
        axes.plot(
            np.arange(64), lengths, color=colour, label=f"base {base:,}: {int((lengths <= 4096).sum())} of 64 pairs"
        )
    axes.axhline(4096, color="black", linestyle="--", linewidth=0.8)
    axes.annotate("trained length 4096", (1, 4096), xytext=(0, 4), textcoords="offset points", fontsize=9)
    axes.set(yscale="log", xlabel="pair i", ylabel="period 2π/θ, in positions", xlim=(0, 63))
    axes.legend(title="pairs that finish a turn within 4096", frameon=False, loc="upper left", bbox_to_anchor=(0, 0.9))
    axes.set_title("How many positions a pair needs for one turn, d = 128")
    return figure


def rotation() -> Figure:
    """A query and a key in the plane at two places of the same distance: both turn, the angle between them stays."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    query, key = 0.7 * np.exp(0.4j), 0.6 * np.exp(1.9j)
    theta = 0.35
    for axes, (m, n) in zip(figure.subplots(1, 3), ((0, 0), (3, 1), (10, 8)), strict=True):
        turned = query * np.exp(1j * m * theta), key * np.exp(1j * n * theta)
        for vector, colour, name in zip(turned, (BLUE, ORANGE), (f"q at {m}", f"k at {n}"), strict=True):
            axes.annotate(
                "", (vector.real, vector.imag), (0, 0), arrowprops={"arrowstyle": "-|>", "color": colour, "lw": 2}
            )
            axes.annotate(name, (1.3 * vector.real, 1.3 * vector.imag), color=colour, ha="center", va="center")
        axes.add_patch(Circle((0, 0), 1, fill=False, color=GREY, linewidth=0.6))
        score = (turned[0] * turned[1].conjugate()).real
        axes.set(title=f"m − n = {m - n}:  q·k = {score:.3f}", xlim=(-1.3, 1.3), ylim=(-1.3, 1.3))
        axes.set(aspect="equal", xticks=[], yticks=[])
        axes.set_frame_on(False)
    figure.suptitle("Both vectors turn by θ a position; the score knows m − n alone (θ = 0.35)")
    return figure


def sinusoid() -> Figure:
    """The sinusoidal table of 128 positions and 64 features."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(
        sinusoidal_table(torch.arange(128), 64), aspect="auto", cmap="RdBu", vmin=-1, vmax=1, interpolation="nearest"
    )
    axes.set(xlabel="feature: sin at 2i, cos at 2i+1", ylabel="position")
    axes.set_title("Sinusoidal encoding, d = 64: fast on the left, slow on the right")
    figure.colorbar(image, ax=axes)
    return figure


FIGURES: dict[str, Callable[[], Figure]] = {
    "decay": decay,
    "wavelengths": wavelengths,
    "rotation": rotation,
    "sinusoid": sinusoid,
}


def draw_all(folder: Path) -> Iterator[Path]:
    """Draws every figure into `folder` as a PNG, and yields the paths as they are written."""
    for name, draw in FIGURES.items():
        path = folder / f"{name}.png"
        draw().savefig(path, dpi=150)
        yield path
