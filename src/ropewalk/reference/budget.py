"""How far a fast rotation may be from the reference, and why.

A fast path works in float32 and rounds once to the dtype of x. What it may lose is

    |fast - reference| <= u |reference| + e |pair| + s

u |reference|: the one rounding at the end, half an ulp. u is 2^-24, 2^-11, 2^-8 for float32, float16, bfloat16.
e |pair|: cos and sin (2^-24 each), two products and a sum in float32, relative to the norm of the pair: e = 2^-18
    leaves 64 roundings of room and still rejects an angle that is wrong by 1e-5. float64 is worked in float64 and has
    e = 2^-40, which is below 1e-12, and 2^-52 for every radian of the farthest angle: the product of position and
    frequency is itself rounded, in the reference too.
s: half the smallest number of the dtype, where rounding is no longer relative.

It is an elementwise bound, never a mean: one wrong row among a million is found. No setting changes it.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from ropewalk.errors import RopewalkError, require_even
from ropewalk.reference.pairs import join_pairs, join_slice, split_pairs, split_slice
from ropewalk.spec.rope import Pairing, RotarySlice

__all__ = ["BudgetError", "assert_within_budget", "rotation_budget"]


class BudgetError(AssertionError):
    """A fast path is further from the reference than its arithmetic explains.

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
    """The error allowed to each element of a rotation in `dtype`, from its float64 `reference`.

    `farthest` is the largest angle that was turned, in radians; it matters to float64 alone. Features that do not turn
    are copied, and are allowed no error at all; with copied=False, as after a norm, they are allowed what a feature
    that turns by nothing is.

    >>> y = torch.tensor([[3.0, 4.0, 7.0]], dtype=torch.float64)  # a pair of norm 5, and a feature that does not turn
    >>> allowed = rotation_budget(y, torch.bfloat16, rotary_dim=2)
    >>> allowed[0, 0].item() == 3 * 2**-8 + 5 * 2**-18 + 2**-134
    True
    >>> allowed[0, 2].item()
    0.0
    """
    require_even(rotary_dim, asked="rotation_budget(rotary_dim=...)", do="pass how many features turn")
    info = torch.finfo(dtype)
    pair_share = 2.0**-40 + farthest * 2.0**-52 if dtype == torch.float64 else 2.0**-18
    turned, rest = split_slice(reference.double(), rotary_dim, rotary_slice)
    a, b = split_pairs(turned, pairing)
    norm = torch.hypot(a, b)
    smallest = info.smallest_normal * info.eps
    allowed = info.eps / 2 * turned.abs() + pair_share * join_pairs(norm, norm, pairing) + smallest / 2
    still = torch.zeros_like(rest) if copied else (info.eps / 2 + pair_share) * rest.abs() + smallest / 2
    return join_slice(allowed, still, rotary_slice)


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
    """Raises `BudgetError` unless every element of `fast` is within budget; returns the largest error / budget.

    `reference` is in float64, before any rounding.

    >>> y = torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    >>> assert_within_budget(y.float(), y, rotary_dim=2)
    0.0
    >>> assert_within_budget(y.float() + 1e-3, y, rotary_dim=2)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ropewalk.reference.budget.BudgetError: element (0, 0): 3.00099... is 51.9... budgets from 3.0...
    """
    if fast.shape != reference.shape or reference.dtype != torch.float64:
        raise RopewalkError(
            asked="assert_within_budget(fast, reference)",
            expected="two tensors of one shape, the reference in float64",
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
    # NaN fails every comparison, so it is counted as infinitely wrong rather than as not greater.
    wrong = torch.where(error.isnan(), torch.inf, error)
    ratio = torch.where(wrong == 0, 0.0, wrong / allowed)
    worst = float(ratio.max()) if ratio.numel() else 0.0
    if worst > 1:
        at = tuple(int(i) for i in torch.unravel_index(ratio.argmax(), ratio.shape))
        raise BudgetError(
            f"element {at}: {fast[at].item()} is {worst:.4g} budgets from {reference[at].item()} "
            f"({int((ratio > 1).sum())} of {ratio.numel()} elements are past their budget)"
        )
    return worst
