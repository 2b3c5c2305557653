"""The picture of `ropewalk inspect`: the wavelength of every pair, with the lengths of the model."""

import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np

from ropewalk.hub.configs.model import Lengths, Model
from ropewalk.hub.inspection import Inspection, Layer, View
from ropewalk.theory import periods
from ropewalk.tools.inspect.sheet import number
from ropewalk.tools.pictures import BLUE, GREEN, GREY, ORANGE, RED, figure, legend_below, save
from ropewalk.tools.plot.curves import as_text

__all__ = ["draw"]

# Colour and marker of each kind of pair. The markers differ because prints may be grey.
LOOKS = {
    "unchanged": (BLUE, "o"),
    "between": (ORANGE, "D"),
    "interpolated": (RED, "s"),
    "faster": (GREEN, "^"),
}
PLAIN = "without the rule"
# The number of letters that fit above a panel.
TITLE = 44


def draw(inspections: Sequence[Inspection], target: str) -> None:
    """Draw one panel per rotated layer type, or two if its frequencies depend on the length.

    Args:
        inspections: The figures of the models.
        target: The path of the picture.
    """
    panels = [
        (_title(shown.model, layer, view, alone=len(shown.layers) == 1), view, shown.model.lengths)
        for shown in inspections
        for layer in shown.layers
        for view in layer.views
    ]
    columns = min(len(panels), 2)
    rows = -(-len(panels) // columns)
    with figure(3.7 if len(panels) == 1 else 7.1, 2.8 * rows + 0.4) as drawn:
        grid: Any = drawn.subplots(rows, columns, squeeze=False, sharey=True)
        handles: dict[str, Any] = {}
        for axes, panel in zip(grid.flat, panels, strict=False):
            handles |= _panel(axes, *panel)
        for axes in grid.flat[len(panels) :]:
            axes.set_visible(False)
        for axes in grid[:, 0]:
            axes.set_ylabel("wavelength 2π/θ, in positions")
        names = [name for name in (*LOOKS, PLAIN) if name in handles]
        legend_below(drawn, [handles[name] for name in names], names)
    save(drawn, target)


def _title(model: Model, layer: Layer, view: View, *, alone: bool) -> str:
    name = model.name if alone else f"{model.name}, {layer.title}"
    length = "" if view.length is None else f", {'up to' if view is layer.views[0] else 'at'} {number(view.length)}"
    return "\n".join(textwrap.fill(as_text(line), TITLE) for line in (name, f"{layer.kind}{length}"))


def _panel(axes: Any, title: str, view: View, lengths: Lengths) -> dict[str, Any]:
    pairs, wavelengths, kinds = np.arange(len(view.inv_freq)), view.wavelengths, np.array(view.kinds)
    handles: dict[str, Any] = {}
    if set(view.kinds) != {"unchanged"}:
        (handles[PLAIN],) = axes.plot(pairs, periods(view.plain), color=GREY, linewidth=0.8, linestyle=":", zorder=1)
    for kind, (colour, marker) in LOOKS.items():
        selected = kinds == kind
        if selected.any():
            style = {"color": colour, "marker": marker, "linestyle": "", "markersize": min(2.6, 170 / len(pairs))}
            (handles[kind],) = axes.plot(pairs[selected], wavelengths[selected], **style, zorder=3)
    still = int((kinds == "still").sum())
    if still:
        title += f"\n{still} pairs with frequency 0"
    _lengths(axes, lengths, scaled=PLAIN in handles)
    axes.set(title=title, xlabel="pair i", yscale="log", xlim=(-1, len(pairs)))
    return handles


def _lengths(axes: Any, lengths: Lengths, *, scaled: bool) -> None:
    """Draw the original length and the context length as lines, or one line if they are equal."""
    named = {"original length": lengths.trained, "context length": lengths.configured}
    if lengths.trained == lengths.configured:
        named = {"original length" if scaled else "trained length": lengths.trained}
    lines = sorted((length, name) for name, length in named.items() if length is not None)
    for rank, (length, name) in enumerate(lines):
        dashes = "-" if name == "context length" else "--"
        axes.axhline(length, color="black", linewidth=0.8, linestyle=dashes, zorder=2)
        # The label of the lower line is below it, because the lines may be close.
        above = rank + 1 == len(lines)
        style = {"textcoords": "offset points", "fontsize": 7, "va": "bottom" if above else "top"}
        axes.annotate(f"{name} {number(length)}", (0, length), xytext=(0, 2 if above else -3), **style)
