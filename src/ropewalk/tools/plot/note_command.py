"""The commands of `ropewalk plot` that draw what the notes show. As in `command`, nothing here needs torch."""

from dataclasses import asdict
from typing import Any

from ropewalk.errors import RopewalkError, require_choice, require_count
from ropewalk.spec.frequencies import Plain
from ropewalk.spec.rope import PAIRINGS, RopeSpec
from ropewalk.tools.plot.command import DEFAULT_LONGEST, LONGEST, MOST_HEADS, Target
from ropewalk.tools.plot.curves import Curve
from ropewalk.tools.plot.notes import FIGURE_2_LONGEST, bound_of, heads_of, matrix_of, planes, score_of_note, t5_bias

__all__ = ["plot_bound", "plot_heads", "plot_matrix", "plot_plane", "plot_score", "plot_t5"]

# The numbers of rows and of heads that remain readable in one picture, and the widest head.
MOST_ROWS, MOST_COLUMNS, WIDEST_HEAD = 12, 16, 1024


def _figures() -> Any:
    """The module with the drawing functions, which needs matplotlib."""
    from ropewalk.tools.plot import note_figures

    return note_figures


def plot_bound(target: Target, dim: int = 128, base: float = 10_000.0, length: int = DEFAULT_LONGEST) -> int:
    """Plot RoFormer's figure 2 on the axes of the paper, beside the same bound on logarithmic axes.

    Args:
        target: The outputs.
        dim: The number of rotated features.
        base: The base of the frequencies.
        length: Distances below this are plotted on the logarithmic axes.

    Returns:
        The exit code 0.

    Raises:
        RopewalkError: If an argument is invalid or an output cannot be written.
    """
    asked = "ropewalk plot bound"
    target.check(asked)
    _between("--length", length, FIGURE_2_LONGEST + 1, LONGEST, asked, "plot as far as the paper does, or farther")
    curve = Curve(f"base {base:,.12g}", RopeSpec(dim, Plain(base)))
    bound = bound_of(curve, length)
    numbers = {"dim": dim, "base": base} | asdict(bound)
    return target.write(numbers, lambda: _figures().bound(bound, curve, target.title))


def plot_score(target: Target) -> int:
    """Plot S(Δ) of note 002, with the sums that the note states and those that are computed.

    For the argument, the result and the errors see `plot_bound`.
    """
    target.check("ropewalk plot score")
    score = score_of_note()
    return target.write(asdict(score), lambda: _figures().score(score, target.title))


def plot_matrix(
    target: Target, dim: int = 8, position: int = 20, base: float = 10_000.0, pairing: str = PAIRINGS[0]
) -> int:
    """Plot the block-diagonal matrix R_m as an image with its cosines and sines.

    `position` is m. For the other arguments, the result and the errors see `plot_bound`.
    """
    asked = "ropewalk plot matrix"
    target.check(asked)
    _between("--dim", dim, 2, MOST_ROWS, asked, "the labels of larger matrices are not readable")
    _between("--position", position, 0, LONGEST, asked, "specify one position")
    matrix = matrix_of(dim, position, base, require_choice(pairing, PAIRINGS, asked=f"{asked} --pairing"))
    numbers = {"base": base, "pairing": pairing} | asdict(matrix)
    return target.write(numbers, lambda: _figures().matrix(matrix, target.title))


def plot_heads(target: Target, num_heads: int = 8, head_dim: int = 64, base: float = 10_000.0) -> int:
    """Plot the periods of every head if d_model is rotated before the split, beside those of a rotation per head.

    For the arguments, the result and the errors see `plot_bound`.
    """
    asked = "ropewalk plot heads"
    target.check(asked)
    _between("--num-heads", num_heads, 1, MOST_COLUMNS, asked, "the labels of more heads are not readable")
    _between("--head-dim", head_dim, 2, WIDEST_HEAD, asked, "specify the features of one head")
    heads = heads_of(num_heads, head_dim, base)
    return target.write(asdict(heads), lambda: _figures().heads(heads, target.title))


def plot_plane(target: Target) -> int:
    """Plot a vector before and after its rotation by mθ, and two pairs of positions with the same distance.

    For the argument, the result and the errors see `plot_bound`.
    """
    target.check("ropewalk plot plane")
    drawn = planes()
    numbers = [
        {"theta": plane.theta, "m": plane.m, "n": plane.n, "score": plane.score}
        | {
            name: [vector.real, vector.imag]
            for name, vector in zip(
                ("query", "key", "rotated_query", "rotated_key"),
                (plane.query, plane.key, *plane.rotated),
                strict=True,
            )
        }
        for plane in drawn
    ]
    return target.write(numbers, lambda: _figures().plane(drawn, target.title))


def plot_t5(target: Target, buckets: int = 32, max_distance: int = 128, length: int = 256) -> int:
    """Plot T5's buckets, and the bias of a table that is stated in the picture, in units of the score.

    For the arguments see `plot_bias`. For the result and the errors see `plot_bound`.
    """
    asked = "ropewalk plot t5"
    target.check(asked)
    _between("--length", length, 2, LONGEST, asked, "specify the number of distances")
    _between("--buckets", buckets, 4, MOST_HEADS, asked, "T5 has 32 buckets")
    _between("--max-distance", max_distance, buckets // 2 + 1, LONGEST, asked, "T5 has 128")
    bias = t5_bias(length, buckets, max_distance)
    numbers = {"num_buckets": buckets, "max_distance": max_distance} | asdict(bias)
    return target.write(numbers, lambda: _figures().t5(bias, target.title))


def _between(option: str, value: int, least: int, most: int, asked: str, do: str) -> None:
    """Raise `RopewalkError` if the value of an option is not an integer from `least` to `most`."""
    require_count(value, asked=f"{asked} {option}", do=do, at_least=least)
    if value > most:
        raise RopewalkError(asked=f"{asked} {option} {value}", expected=f"at most {most}", got=f"{value}", do=do)
