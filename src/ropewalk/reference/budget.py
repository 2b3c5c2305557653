"""The error budget of a fast rotation: the largest error against the reference that its arithmetic explains.

A fast path computes in float32 and rounds once to the dtype of x. The bound for each element is

    |fast - reference| <= u |reference| + e |pair| + s

u |reference|: the final rounding, half an ulp. u is 2^-24, 2^-11, 2^-8 for float32, float16, bfloat16.
e |pair|: the errors of cos and sin (2^-24 each), two products and a sum in float32, relative to the norm of the pair.
    e = 2^-18 allows 64 roundings, and rejects an angle that is wrong by 1e-5. For float64, which is computed in
    float64, e is 2^-40, plus 2^-52 per radian of the largest angle: the product of position and frequency is rounded
    in the reference too.
s: half the smallest subnormal number of the dtype, for values so small that rounding errors are no longer relative.

The bound is elementwise, not a mean, so one wrong row in a million is detected. No setting changes it.
"""

import torch
from torch import Tensor

from ropewalk.errors import RopewalkError, require_even
from ropewalk.reference.pairs import join_pairs, join_slice, split_pairs, split_slice
from ropewalk.shapes import Float
from ropewalk.spec.rope import Pairing, RotarySlice

__all__ = ["BudgetError", "assert_within_budget", "rotation_budget"]


class BudgetError(AssertionError):
    """The error of a fast path exceeds its budget.

    >>> issubclass(BudgetError, AssertionError)
    True
    """


def rotation_budget(
    reference: Float[Tensor, "*any dim"],
    dtype: torch.dtype,
    *,
    rotary_dim: int,
    pairing: Pairing = "interleaved",
    rotary_slice: RotarySlice = "leading",
    farthest: float = 0.0,
    copied: bool = True,
) -> Float[Tensor, "*any dim"]:
    """Error allowed for each element of a rotation in `dtype`.

    Args:
        reference: Result of the reference in float64 [..., dim].
        dtype: Dtype of the fast path.
        rotary_dim: Number of rotated features.
        pairing: Pairing of the rotated features.
        rotary_slice: Which features are rotated.
        farthest: Largest angle in radians. Used for float64 only.
        copied: Whether features that are not rotated are copies of the input, and so must be exact. With False, as
            after a norm, they get the budget of a feature rotated by angle 0.

    Returns:
        Allowed absolute errors [..., dim].

    Raises:
        RopewalkError: If `rotary_dim` is not a positive even integer.

    >>> y = torch.tensor([[3.0, 4.0, 7.0]], dtype=torch.float64)  # a pair of norm 5, and a feature that is not rotated
    >>> allowed = rotation_budget(y, torch.bfloat16, rotary_dim=2)
    >>> allowed[0, 0].item() == 3 * 2**-8 + 5 * 2**-18 + 2**-134
    True
    >>> allowed[0, 2].item()
    0.0
    """
    require_even(rotary_dim, asked="rotation_budget(rotary_dim=...)", do="pass the number of rotated features")
    info = torch.finfo(dtype)
    pair_share = 2.0**-40 + farthest * 2.0**-52 if dtype == torch.float64 else 2.0**-18
    rotated, rest = split_slice(reference.double(), rotary_dim, rotary_slice)
    a, b = split_pairs(rotated, pairing)
    norm = torch.hypot(a, b)
    smallest = info.smallest_normal * info.eps
    allowed = info.eps / 2 * rotated.abs() + pair_share * join_pairs(norm, norm, pairing) + smallest / 2
    allowed_rest = torch.zeros_like(rest) if copied else (info.eps / 2 + pair_share) * rest.abs() + smallest / 2
    return join_slice(allowed, allowed_rest, rotary_slice)


def assert_within_budget(
    fast: Float[Tensor, "*any dim"],
    reference: Float[Tensor, "*any dim"],
    *,
    rotary_dim: int,
    pairing: Pairing = "interleaved",
    rotary_slice: RotarySlice = "leading",
    farthest: float = 0.0,
    copied: bool = True,
) -> float:
    """Check that every element of `fast` is within its budget; see `rotation_budget`.

    Args:
        fast: Result of the fast path [..., dim].
        reference: Result of the reference in float64, without rounding [..., dim].
        rotary_dim: Number of rotated features.
        pairing: Pairing of the rotated features.
        rotary_slice: Which features are rotated.
        farthest: Largest angle in radians. Used for float64 only.
        copied: Whether features that are not rotated must be exact.

    Returns:
        The largest error divided by its budget.

    Raises:
        BudgetError: If an element is not within its budget.
        RopewalkError: If the shapes differ, or if `reference` is not float64.

    >>> y = torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    >>> assert_within_budget(y.float(), y, rotary_dim=2)
    0.0
    >>> assert_within_budget(y.float() + 1e-3, y, rotary_dim=2)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ropewalk.reference.budget.BudgetError: element (0, 0): 3.00099... differs from 3.0 by 51.9... budgets...
    """
    if fast.shape != reference.shape or reference.dtype != torch.float64:
        raise RopewalkError(
            asked="assert_within_budget(fast, reference)",
            expected="two tensors of the same shape, the reference in float64",
            got=f"{list(fast.shape)}; {list(reference.shape)} in {reference.dtype}",
            do="run the reference on x.double()",
        )
    allowed = rotation_budget(
        reference,
        fast.dtype,
        rotary_dim=rotary_dim,
        pairing=pairing,
        rotary_slice=rotary_slice,
        farthest=farthest,
        copied=copied,
    )
    error = (fast.double() - reference).abs()
    # Comparisons with NaN are False, so NaN would pass. It counts as an infinite error.
    error = torch.where(error.isnan(), torch.inf, error)
    ratio = torch.where(error == 0, 0.0, error / allowed)
    worst = float(ratio.max()) if ratio.numel() else 0.0
    if worst > 1:
        index = tuple(int(i) for i in torch.unravel_index(ratio.argmax(), ratio.shape))
        raise BudgetError(
            f"element {index}: {fast[index].item()} differs from {reference[index].item()} by {worst:.4g} budgets "
            f"({int((ratio > 1).sum())} of {ratio.numel()} elements exceed their budget)"
        )
    return worst
