"""The check that every fast rotation must pass: values and gradients against the reference, within the budget.

The cases start from positions, so the check includes the cos and sin that a candidate computes.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ropewalk.errors import RopewalkError
from ropewalk.reference.budget import BudgetError, assert_within_budget
from ropewalk.reference.rotate import rotate
from ropewalk.shapes import Float, Shaped
from ropewalk.spec.frequencies import AcrossHeads, Plain
from ropewalk.spec.rope import PAIRINGS, Pairing, RotarySlice

__all__ = ["RotationCase", "check_rotation", "rotation_cases"]

# A function with the signature of reference.rotate.
Candidate = Callable[..., Tensor]
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class RotationCase(NamedTuple):
    """The arguments of one call of a rotation.

    >>> RotationCase("tiny", torch.ones(1, 2), torch.zeros(1), torch.ones(1)).pairing
    'interleaved'
    """

    name: str
    x: Float[Tensor, "*any seq dim"]
    positions: Shaped[Tensor, "*ids"]
    inv_freq: Float[Tensor, "*heads pairs"]
    pairing: Pairing = "interleaved"
    conjugate: bool = False
    amplitude: float = 1.0
    rotary_slice: RotarySlice = "leading"

    def call(self, function: Candidate, x: Tensor) -> Tensor:
        """Call `function` on `x` with the other arguments of this case."""
        return function(
            x,
            self.positions,
            self.inv_freq,
            pairing=self.pairing,
            conjugate=self.conjugate,
            amplitude=self.amplitude,
            rotary_slice=self.rotary_slice,
        )


def rotation_cases(dtype: torch.dtype, seed: int = 0) -> Iterator[RotationCase]:
    """Yield test cases: unusual lengths and widths, partial rotation, views, large, negative and fractional positions.

    Args:
        dtype: Dtype of x.
        seed: Seed of the random numbers.

    Yields:
        Cases with distinct names.

    >>> cases = list(rotation_cases(torch.float32))
    >>> len({case.name for case in cases}) == len(cases) > 30
    True
    """
    random = torch.Generator().manual_seed(seed)

    def x(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64).to(dtype)

    def theta(dim: int, base: float = 10_000.0) -> Tensor:
        return torch.as_tensor(Plain(base).evaluate(dim))

    def scattered(*shape: int, low: int = 0, high: int = 1 << 20) -> Tensor:
        return torch.randint(low, high, shape, generator=random)

    per_head = torch.as_tensor(AcrossHeads(10_000.0, num_heads=3).evaluate(64))
    for pairing in PAIRINGS:
        for dim in (2, 60, 64, 80, 92, 96, 112, 128, 256, 512):
            yield RotationCase(f"{pairing}, dim {dim}", x(2, 3, 5, dim), torch.arange(5), theta(dim), pairing=pairing)
        for seq in (1, 2, 63, 64, 65, 1000):
            ids = torch.arange(seq)
            yield RotationCase(f"{pairing}, {seq} tokens", x(1, 2, seq, 64), ids, theta(64), pairing=pairing)
        base = RotationCase("", x(2, 3, 7, 64), torch.arange(7), theta(64), pairing=pairing)
        for name, positions in {
            "far": torch.arange(7) + (1 << 20) - 7,
            "farther": scattered(7, low=1 << 20, high=1 << 24),
            "beyond 131072": torch.arange(7) + 131_072,
            "negative": torch.arange(-7, 0),
            "unsorted and repeated": torch.tensor([5, 5, 0, 1_000, 3, 2, 2]),
            "fractional": torch.linspace(-3.5, 40.25, 7, dtype=torch.float64),
            "fractional, float32": torch.linspace(-3.5, 40.25, 7),
            "one row for all batches": scattered(1, 7),
            "int32": scattered(7, low=-4096, high=4096).int(),
        }.items():
            yield base._replace(name=f"{pairing}, positions {name}", positions=positions)
        yield base._replace(name=f"{pairing}, base 5e5", inv_freq=theta(64, 500_000.0), positions=scattered(7))
        yield base._replace(name=f"{pairing}, clockwise", inv_freq=-theta(64))
        # As many heads as batches: shapes do not show whether positions broadcast along the wrong dimension.
        yield base._replace(name=f"{pairing}, as many heads as batches", x=x(3, 3, 7, 64), positions=scattered(3, 7))
        yield base._replace(name=f"{pairing}, one head", x=x(2, 1, 7, 64), positions=scattered(2, 7))
        yield base._replace(name=f"{pairing}, transposed view", x=x(2, 7, 3, 64).transpose(1, 2))
        yield base._replace(name=f"{pairing}, every other feature", x=x(2, 3, 7, 128)[..., ::2])
        yield base._replace(name=f"{pairing}, odd offset in memory", x=x(2, 3, 7, 67)[..., 3:])
        yield base._replace(name=f"{pairing}, [seq, dim]", x=x(7, 64))
        yield base._replace(name=f"{pairing}, [batch, seq, dim]", x=x(2, 7, 64), positions=scattered(2, 7))
        yield base._replace(name=f"{pairing}, five dimensions", x=x(2, 2, 3, 7, 64), positions=scattered(2, 7))
        yield base._replace(name=f"{pairing}, no token", x=x(2, 3, 0, 64), positions=torch.arange(0))
        # Options that work alone can fail in combination.
        for conjugate, amplitude, ids in itertools.product((False, True), (1.0, 1.2772588722), ("shared", "per row")):
            for which, frequencies, rotary_slice in (
                ("whole", theta(64), "leading"),
                ("leading 24 of 64", theta(24), "leading"),
                ("trailing 24 of 64", theta(24), "trailing"),
                ("frequencies per head", per_head, "leading"),
                ("frequencies per head, trailing 24 of 64", per_head[:, :12], "trailing"),
            ):
                yield base._replace(
                    name=f"{pairing}, {which}, conjugate {conjugate}, amplitude {amplitude}, ids {ids}",
                    positions=scattered(2, 7) if ids == "per row" else scattered(7),
                    inv_freq=frequencies,
                    conjugate=conjugate,
                    amplitude=amplitude,
                    rotary_slice=rotary_slice,
                )


def check_rotation(
    candidate: Candidate,
    dtypes: Sequence[torch.dtype] = DTYPES,
    seed: int = 0,
    *,
    where: Callable[[RotationCase], bool] = lambda case: True,
) -> float:
    """Check a fast rotation against the reference in every case; see `rotation_cases`.

    It checks the values, dtype and shape of the result, that x is unchanged, and the gradient for a random cotangent.

    Args:
        candidate: A function with the signature of `reference.rotate`.
        dtypes: Dtypes of x.
        seed: Seed of the random numbers.
        where: Selects cases, if `candidate` supports only some: `lambda case: case.pairing == "half"`.

    Returns:
        The largest error divided by its budget.

    Raises:
        BudgetError: If a result is wrong. The message names the case.
        RopewalkError: If no case is selected.

    >>> check_rotation(rotate, [torch.float32]) <= 1
    True
    """
    ratios = [_check(candidate, case) for dtype in dtypes for case in rotation_cases(dtype, seed) if where(case)]
    if not ratios:
        raise RopewalkError(
            asked="check_rotation(candidate, dtypes, where=...)",
            expected="at least one dtype and one case",
            got="none",
            do="pass a dtype, and a `where` that selects at least one case",
        )
    return max(ratios)


def _check(candidate: Candidate, case: RotationCase) -> float:
    name = f"{case.name}, {case.x.dtype}"
    # detach keeps the strides of the case. A clone would make a view contiguous.
    x = case.x.detach().requires_grad_()
    before = case.x.clone()
    result = case.call(candidate, x)
    if result.dtype != x.dtype or result.shape != x.shape:
        raise BudgetError(f"{name}: the result is {result.dtype} {list(result.shape)}, x is {x.dtype} {list(x.shape)}")
    if not torch.equal(case.x, before):
        raise BudgetError(f"{name}: the input was changed")
    expected = case.call(rotate, before.double())
    random = torch.Generator().manual_seed(1)
    cotangent = torch.randn(x.shape, generator=random, dtype=torch.float64).to(x.dtype)
    (gradient,) = torch.autograd.grad(result, x, cotangent)
    # The transpose of a rotation is the opposite rotation, so the reference also computes the gradient.
    transposed = case._replace(conjugate=not case.conjugate)
    expected_gradient = transposed.call(rotate, cotangent.double())
    farthest = _largest(case.positions) * _largest(case.inv_freq)
    worst = 0.0
    for quantity, fast, reference in (("value", result.detach(), expected), ("gradient", gradient, expected_gradient)):
        try:
            ratio = assert_within_budget(
                fast,
                reference,
                rotary_dim=2 * case.inv_freq.shape[-1],
                pairing=case.pairing,
                rotary_slice=case.rotary_slice,
                farthest=farthest,
            )
        except BudgetError as error:
            raise BudgetError(f"{name}: {quantity}: {error}") from None
        worst = max(worst, ratio)
    return worst


def _largest(numbers: Tensor) -> float:
    return float(numbers.abs().max()) if numbers.numel() else 0.0
