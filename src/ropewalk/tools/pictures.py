"""The common style of all pictures: sizes, colours that are safe for colour-blind readers, and saving to a file.

with figure(7.1, 3.6) as canvas:
    axes = canvas.subplots()
    axes.plot(...)
save(canvas, "picture.svg")
"""

import io
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ropewalk.errors import RopewalkError
from ropewalk.tools.output import require_writable_file, write_whole

try:
    from cycler import cycler
    from matplotlib import colormaps, rc_context
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.mathtext import MathTextParser
    from matplotlib.patches import Arc, Circle
except ImportError:
    raise RopewalkError(
        asked="pictures",
        expected="matplotlib, which the extra `plots` installs",
        got="matplotlib is not installed",
        do="pip install 'ropewalk[plots]'",
    ) from None

__all__ = [
    "BLUE",
    "COLOURS",
    "DASHES",
    "DPI",
    "GREEN",
    "GREY",
    "KINDS",
    "ORANGE",
    "RED",
    "Arc",
    "Circle",
    "Figure",
    "cite",
    "figure",
    "legend_below",
    "lengths_axis",
    "require_picture",
    "require_text",
    "save",
    "shades",
    "shown_length",
]

# The colours of Okabe and Ito without yellow, which is hard to see on white.
BLUE, RED, GREEN, PURPLE, ORANGE, SKY = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"
COLOURS = (BLUE, RED, GREEN, PURPLE, ORANGE, SKY)
# Curves also differ in their dashes, for prints in grey.
DASHES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (6, 1, 1, 1, 1, 1)), (0, (3, 1)))
GREY = "#767676"

# File suffixes, and the metadata to leave out, so that the same picture has the same bytes.
KINDS: dict[str, dict[str, None]] = {".png": {}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}

# Dots per inch of a PNG.
DPI = 200

_TEXT = 8.0
# The number of letters of a legend that fit into an inch, with room for wide letters and the symbol before the name.
_LETTERS_PER_INCH = 12
# The same for the text of a source, which is smaller and has no symbol.
_SMALL_LETTERS_PER_INCH = 17
_LOOK: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": _TEXT,
    "mathtext.fontset": "dejavusans",
    "axes.titlesize": _TEXT + 0.5,
    "axes.titlelocation": "left",
    "axes.labelsize": _TEXT,
    "axes.linewidth": 0.6,
    "axes.edgecolor": GREY,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.prop_cycle": cycler(color=COLOURS),
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.5,
    "xtick.labelsize": _TEXT - 0.5,
    "ytick.labelsize": _TEXT - 0.5,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "xtick.labelcolor": "black",
    "ytick.labelcolor": "black",
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "xtick.minor.size": 0.0,
    "ytick.minor.size": 0.0,
    "lines.linewidth": 1.2,
    "lines.markersize": 3.2,
    "legend.frameon": False,
    "legend.fontsize": _TEXT,
    "legend.handlelength": 2.2,
    "legend.labelspacing": 0.35,
    "figure.titlesize": _TEXT + 1.5,
    "savefig.facecolor": "white",
    # Text is stored as text: it can be searched, and the font can be replaced.
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
    "svg.hashsalt": "ropewalk",
}


@contextmanager
def figure(width: float = 7.1, height: float = 3.6) -> Iterator[Figure]:
    """A new figure in the common style, which applies inside the `with` block.

    Args:
        width: The width in inches. 7.1 is two columns of a paper.
        height: The height in inches.

    Yields:
        The empty figure.
    """
    with rc_context(_LOOK):
        yield Figure(figsize=(width, height), layout="constrained")


def legend_below(
    canvas: Figure,
    handles: Sequence[Any],
    names: Sequence[str],
    *,
    side: Literal["outside lower left", "outside lower center"] = "outside lower center",
    most: int | None = None,
    **style: Any,
) -> None:
    """Add a legend below the axes, in as many columns as fit the width of the figure. Long names are wrapped.

    Args:
        canvas: The figure, in the `with` block of `figure`.
        handles: The artists.
        names: Their names.
        side: The place of the legend, in the words of matplotlib.
        most: The maximum number of columns. Default: one per name.
        **style: Further arguments for matplotlib.
    """
    width = canvas.bbox.width
    letters = int(canvas.get_figwidth() * _LETTERS_PER_INCH)
    wrapped = [textwrap.fill(name, letters) for name in names]
    for columns in range(min(most or len(names), len(names)), 0, -1):
        legend = canvas.legend(handles, wrapped, loc=side, ncols=columns, **style)
        if columns == 1 or legend.get_window_extent().width <= width:
            return
        legend.remove()


def cite(canvas: Figure, text: str) -> None:
    """Write the source of a picture below its axes, in grey, on the left. Long texts are wrapped.

    Args:
        canvas: The figure, in the `with` block of `figure`.
        text: The source: the number and line of a note, the number and figure of a paper.
    """
    wrapped = textwrap.fill(text, int(canvas.get_figwidth() * _SMALL_LETTERS_PER_INCH))
    canvas.supxlabel(wrapped, x=0.01, ha="left", fontsize=_TEXT - 1.5, color=GREY, multialignment="left")


def lengths_axis(axes: Axes, low: int, high: int) -> None:
    """Make the x axis logarithmic from `low` to `high` positions, with labels at powers of two: 64, 1k, 32k."""
    axes.set(xscale="log", xlim=(low, high))
    powers = [2**n for n in range(21) if low <= 2**n <= high]
    # Skip labels where they would overlap.
    powers = powers[:: max(1, -(-len(powers) // 7))]
    axes.set_xticks(powers, [shown_length(power) for power in powers])
    axes.minorticks_off()


def shown_length(length: float) -> str:
    """Format a length: 4096 is shown as 4k.

    >>> shown_length(512), shown_length(4096), shown_length(1536)
    ('512', '4k', '1.5k')
    """
    return f"{length / 1024:g}k" if length >= 1024 else f"{length:g}"


def shades(count: int) -> NDArray[np.float64]:
    """`count` RGBA colours from dark to light, [count, 4], without the lightest, which is hard to see on white."""
    return colormaps["viridis"](np.linspace(0.0, 0.88, count))


def require_picture(target: str, *, asked: str) -> None:
    """Check that `target` has a supported suffix and can be written.

    Args:
        target: The path of the picture.
        asked: The request, for the error message.

    Raises:
        RopewalkError: If the suffix is not supported, or the file cannot be written.
    """
    if Path(target).suffix.lower() not in KINDS:
        raise RopewalkError(
            asked=asked,
            expected="a file name with the suffix of a picture format",
            got=repr(target),
            do=f"use one of {', '.join(KINDS)}",
        )
    require_writable_file(target, asked=asked)


def require_text(text: str, *, asked: str) -> None:
    """Raise `RopewalkError` if matplotlib cannot parse a $formula$ in `text`."""
    try:
        MathTextParser("path").parse(text)
    except ValueError as error:
        raise RopewalkError(
            asked=asked,
            expected="text, with formulas between dollar signs that matplotlib can parse",
            got=f"{text!r}: {error.__context__ or error}",
            do=r"fix the formula, or write \$ for a dollar sign",
        ) from None


def save(canvas: Figure, target: str, dpi: int = DPI) -> None:
    """Write the figure to `target`, completely or not at all, in the format of its suffix.

    Args:
        canvas: The figure.
        target: The path of the picture.
        dpi: Dots per inch. Only used for PNG.
    """
    suffix = Path(target).suffix.lower()
    buffer = io.BytesIO()
    with rc_context(_LOOK):
        canvas.savefig(buffer, format=suffix.removeprefix("."), metadata=KINDS[suffix], dpi=dpi)
    write_whole(buffer.getvalue(), target)
