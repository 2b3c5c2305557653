"""How far the module is from transformers' formula and from the exact rotation, position by position."""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from ropewalk.nn.rotary.embedding import RotaryEmbedding
from ropewalk.reference.pairs import pair_indices
from ropewalk.spec.rope import RopeSpec
from ropewalk.tools.demo.formula import position_weights
from ropewalk.tools.demo.oracle import Oracle

__all__ = ["LIMIT", "Agreement", "compare", "rotation_error"]

# cos and sin are rounded to float32, and so are two products and a sum: together less than four roundings of 2^-24.
LIMIT = 2.0**-22
# The number of positions up to and including the one that is shown. One head: few enough elements for a single thread.
WINDOW = 64
INFINITE = float("inf")


@dataclasses.dataclass(frozen=True)
class Agreement:
    """Errors at one position: the largest over the 64 positions up to it, relative to the norm of the pair.

    The first two and the last are None if no formula is written for the model.

    Attributes:
        position: The position.
        to_formula: The module as `load_spec` describes it, against transformers' formula.
        formula: transformers' formula, against the exact rotation.
        exact: The module with angles="exact", against the exact rotation.
        same_tables: Whether cos and sin of the module as loaded are those of the formula, bit for bit.

    >>> Agreement(1000, to_formula=0.0, formula=2e-5, exact=1e-7, same_tables=True).agrees
    True
    >>> Agreement(1000, to_formula=0.5, formula=2e-5, exact=1e-7, same_tables=False).agrees
    False
    """

    position: int
    to_formula: float | None
    formula: float | None
    exact: float
    same_tables: bool | None

    @property
    def agrees(self) -> bool:
        """Whether the module agrees with both within the roundings of float32."""
        return (self.to_formula is None or self.to_formula <= LIMIT) and self.exact <= LIMIT


def compare(spec: RopeSpec, oracle: Oracle | None, positions: Sequence[int]) -> list[Agreement]:
    """Compare the module with transformers' formula and with the exact rotation, in float32 on the CPU.

    Args:
        spec: The rotation of the module, with angles="float32" as `load_spec` returns it.
        oracle: The rotation that the config describes, read without ropewalk. None if there is none: then the exact
            rotation is that of the spec in float64, and nothing is compared with transformers' formula.
        positions: The positions, 0 or larger.

    Returns:
        One entry per position.

    >>> from ropewalk.tools.demo.oracle import oracle_for
    >>> oracle = oracle_for({"model_type": "llama", "head_dim": 8})
    >>> [row.agrees for row in compare(RopeSpec(8, pairing="half", angles="float32"), oracle, [10, 1_000_000])]
    [True, True]
    >>> [row.agrees for row in compare(RopeSpec(8, pairing="interleaved", angles="float32"), oracle, [10])]
    [False]
    """
    truth = _of_spec(spec) if oracle is None else oracle
    if spec.head_dim != truth.head_dim:
        return [Agreement(position, INFINITE, INFINITE, INFINITE, same_tables=False) for position in positions]
    drawn = torch.randn(1, 1, WINDOW, spec.head_dim, generator=torch.Generator().manual_seed(0))
    loaded, exact = RotaryEmbedding(spec), RotaryEmbedding(dataclasses.replace(spec, angles="exact"))
    role = None if spec.same_for_both else "k"
    rows: list[Agreement] = []
    for position in positions:
        ids = torch.arange(max(0, position - WINDOW + 1), position + 1)
        x, length = drawn[:, :, : len(ids)], position + 1
        axes = ids if spec.axes is None else ids.expand(spec.axes.count, -1)
        options = {"length": length if spec.varies else None, "role": role}
        right = truth.rotate(x.double(), *truth.tables(ids, length, torch.float64))
        error = rotation_error(exact(x, positions=axes, **options), right, truth)
        if oracle is None:
            rows.append(Agreement(position, None, None, error, same_tables=None))
            continue
        tables = oracle.tables(ids, length, torch.float32)
        by_formula = oracle.rotate(x, *tables)
        rows.append(
            Agreement(
                position,
                to_formula=rotation_error(loaded(x, positions=axes, **options), by_formula.double(), oracle),
                formula=rotation_error(by_formula, right, oracle),
                exact=error,
                same_tables=all(map(torch.equal, loaded.at(axes, **options), tables)),
            )
        )
    return rows


def rotation_error(y: Tensor, truth: Tensor, oracle: Oracle) -> float:
    """The largest error of a rotated pair, relative to its norm. Features that are not rotated must be equal.

    Args:
        y: The rotated tensor [..., head_dim].
        truth: What it is compared with, in float64.
        oracle: Which features form a pair.

    Returns:
        The error. Infinite if a feature that is not rotated differs, or for NaN.

    >>> from ropewalk.tools.demo.oracle import oracle_for
    >>> oracle = oracle_for({"model_type": "llama", "head_dim": 2})
    >>> rotation_error(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0]).double(), oracle)
    0.1
    """
    first, second = list(oracle.first), list(oracle.second)
    difference = y.double() - truth
    errors, norms = (torch.hypot(pairs[..., first], pairs[..., second]) for pairs in (difference, truth))
    worst = torch.where(errors == 0, 0.0, errors / norms).max()
    difference[..., first + second] = 0.0
    return float(worst) if bool(worst.isfinite()) and not bool(difference.any()) else INFINITE


def _of_spec(spec: RopeSpec) -> Oracle:
    """The rotation that a spec describes, for models without an independent formula."""
    start = 0 if spec.rotary_slice == "leading" else spec.head_dim - spec.rotated_dim
    first, second = (tuple(start + i for i in indices) for indices in pair_indices(spec.rotated_dim, spec.pairing))

    def rule(length: int, dtype: torch.dtype) -> tuple[Tensor, float]:
        known = length if spec.varies else None
        frequencies = torch.as_tensor(spec.inv_freq(known)) * position_weights(spec)
        return frequencies.to(dtype), spec.amplitude(known)

    return Oracle(spec.head_dim, first, second, rule)
