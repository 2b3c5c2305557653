"""How far the module is from transformers' formula and from the exact rotation, position by position."""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from ropewalk.nn.rotary.embedding import RotaryEmbedding
from ropewalk.reference.pairs import split_pairs, split_slice
from ropewalk.reference.rotate import rotate
from ropewalk.spec.rope import RopeSpec
from ropewalk.tools.demo.formula import angles_of, formula_of, position_weights

__all__ = ["LIMIT", "Agreement", "compare", "rotation_error"]

# cos and sin are rounded to float32, and so are two products and a sum: together less than four roundings of 2^-24.
LIMIT = 2.0**-22
# The number of positions up to and including the one that is shown. One head: few enough elements for a single thread.
WINDOW = 64


@dataclasses.dataclass(frozen=True)
class Agreement:
    """Errors at one position: the largest over the 64 positions up to it, relative to the norm of the pair.

    Attributes:
        position: The position.
        to_formula: The module as `load_spec` describes it, against transformers' formula.
        exact: The module with angles="exact", against the exact rotation.
        formula: transformers' formula, against the exact rotation.
        same_tables: Whether cos and sin of the module as loaded are those of the formula, bit for bit.

    >>> Agreement(1000, to_formula=0.0, exact=1e-7, formula=2e-5, same_tables=True).agrees
    True
    """

    position: int
    to_formula: float
    exact: float
    formula: float
    same_tables: bool

    @property
    def agrees(self) -> bool:
        """Whether the module agrees with both within the roundings of float32."""
        return self.to_formula <= LIMIT and self.exact <= LIMIT


def compare(spec: RopeSpec, positions: Sequence[int]) -> list[Agreement]:
    """Compare the module with transformers' formula and with the exact rotation, in float32 on the CPU.

    Args:
        spec: The rotation, with angles="float32" as `load_spec` returns it.
        positions: The positions, 0 or larger.

    Returns:
        One entry per position.

    >>> [row.agrees for row in compare(RopeSpec(8, angles="float32"), [10, 1_000_000])]
    [True, True]
    """
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(1, 1, WINDOW, spec.head_dim, generator=generator)
    loaded, exact = RotaryEmbedding(spec), RotaryEmbedding(dataclasses.replace(spec, angles="exact"))
    role = None if spec.same_for_both else "k"
    rows: list[Agreement] = []
    for position in positions:
        ids = torch.arange(max(0, position - WINDOW + 1), position + 1)
        x, length = drawn[:, :, : len(ids)], position + 1 if spec.varies else None
        axes = ids if spec.axes is None else ids.expand(spec.axes.count, -1)
        by_formula, _ = formula_of(spec, ids, x.dtype, length=length)(x, x)
        truth = rotate(
            x.double(),
            ids,
            torch.as_tensor(spec.inv_freq(length)) * position_weights(spec),
            pairing=spec.pairing,
            amplitude=spec.amplitude(length),
            rotary_slice=spec.rotary_slice,
        )
        tables = zip(loaded.at(axes, length=length, role=role), (torch.cos, torch.sin), strict=True)
        angles, amplitude = angles_of(spec, ids, length), spec.amplitude(length)
        as_loaded, as_exact = (rope(x, positions=axes, length=length, role=role) for rope in (loaded, exact))
        rows.append(
            Agreement(
                position,
                to_formula=rotation_error(as_loaded, by_formula.double(), spec),
                exact=rotation_error(as_exact, truth, spec),
                formula=rotation_error(by_formula, truth, spec),
                same_tables=all(torch.equal(table, function(angles) * amplitude) for table, function in tables),
            )
        )
    return rows


def rotation_error(y: Tensor, truth: Tensor, spec: RopeSpec) -> float:
    """The largest error of a rotated pair, relative to its norm. Features that are not rotated must be equal.

    Args:
        y: The rotated tensor [..., head_dim].
        truth: What it is compared with, in float64.
        spec: The rotation.

    Returns:
        The error. Infinite if a feature that is not rotated differs, or for NaN.

    >>> rotation_error(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0]).double(), RopeSpec(2))
    0.1
    """
    difference, copied = split_slice(y.double() - truth, spec.rotated_dim, spec.rotary_slice)
    expected, _ = split_slice(truth, spec.rotated_dim, spec.rotary_slice)
    errors, norms = (torch.hypot(*split_pairs(pairs, spec.pairing)) for pairs in (difference, expected))
    worst = torch.where(errors == 0, 0.0, errors / norms).max()
    return float(worst) if bool(worst.isfinite()) and not bool(copied.any()) else float("inf")
