"""The picture of `ropewalk demo`: the errors of the rotation against the position."""

from collections.abc import Sequence

from ropewalk.hub.configs.model import Lengths
from ropewalk.tools.demo.agreement import Agreement
from ropewalk.tools.inspect.sheet import number
from ropewalk.tools.pictures import BLUE, GREY, RED, figure, legend_below, save
from ropewalk.tools.plot.curves import as_text

__all__ = ["draw_agreement"]


def draw_agreement(rows: Sequence[Agreement], lengths: Lengths, name: str, target: str) -> None:
    """Draw the error of transformers' formula and of the module with angles="exact", against the exact rotation.

    Without the error of the formula, if the module was not compared with it.

    Args:
        rows: The errors, by position.
        lengths: The lengths of the model, which are marked.
        name: The name of the model, for the title.
        target: The path of the picture.
    """
    positions = [row.position for row in rows]
    with figure(7.1, 3.6) as drawn:
        axes = drawn.subplots()
        formula, distances = ([getattr(row, name) for row in rows] for name in ("formula", "to_formula"))
        if None not in formula:
            label = "transformers' formula, float32 angles; ropewalk as loaded"
            same = all(row.same_tables for row in rows)
            label += " has the same cos and sin" if same else f" is within {max(distances):.0e} of it"
            axes.plot(positions, formula, color=RED, linestyle="--", label=label)
        axes.plot(positions, [row.exact for row in rows], color=BLUE, label='ropewalk with angles="exact"')
        axes.axhline(2.0**-24, color=GREY, linewidth=0.8, linestyle=":", label="one rounding of float32, $2^{-24}$")
        axes.set(xscale="log", yscale="log", xlabel="position", ylabel="error of a rotated pair / its norm")
        axes.set(
            title=f"{as_text(name)}: error of the rotation against float64", ylim=(1e-8, 1.0), xlim=(1, positions[-1])
        )
        named = {"original length": lengths.trained, "context length": lengths.configured}
        if lengths.trained == lengths.configured:
            named = {"trained length": lengths.trained}
        marked = [(words, length) for words, length in named.items() if length is not None]
        for rank, (words, length) in enumerate(marked):
            axes.axvline(length, color="black", linewidth=0.6)
            # One label below the other, because the lines may be close.
            style = {"textcoords": "offset points", "fontsize": 7, "va": "top", "ha": "right"}
            axes.annotate(f"{words} {number(length)}", (length, 1.0), xytext=(-2, -2 - 9 * rank), **style)
        legend_below(drawn, *axes.get_legend_handles_labels(), side="outside lower left", most=1)
    save(drawn, target)
