"""Inputs and measurements that several chapters share: seeded vectors, rotations, and drift under a shift."""

from collections.abc import Callable

import torch
from torch import Tensor

from ropewalk.reference import rotate
from ropewalk.spec import Plain

# What float64 leaves of an identity between numbers of size 1 to 100, after some hundred roundings.
EXACT = 1e-12


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal float64."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def theta(dim: int, base: float = 10_000.0) -> Tensor:
    """base^(-2i/dim) as a tensor."""
    return torch.as_tensor(Plain(base).evaluate(dim))


def turn(x: Tensor, position: float, inv_freq: Tensor | None = None) -> Tensor:
    """One vector [dim], or several [n, dim], turned to one position."""
    rows = x.reshape(-1, x.shape[-1])
    ids = torch.full((len(rows),), position, dtype=torch.float64)
    return rotate(rows, ids, theta(x.shape[-1]) if inv_freq is None else inv_freq).reshape(x.shape)


def largest(error: Tensor) -> float:
    """The largest absolute value."""
    return float(error.abs().max())


def drift(score: Callable[[int, int], Tensor], pairs: tuple[tuple[int, int], ...] = ((3, 1), (17, 40))) -> float:
    """How much score(m, n) moves when both positions move by 1 to 1000, which a relative encoding does not notice."""
    return max(largest(score(m + by, n + by) - score(m, n)) for m, n in pairs for by in (1, 7, 64, 1000))


def rank(matrix: Tensor) -> int:
    """The numerical rank."""
    return int(torch.linalg.matrix_rank(matrix, rtol=1e-9))


def cos_error(low: int, high: int, dtype: torch.dtype) -> float:
    """The largest error of cos(m theta), d = 128, at positions low .. high-1, its angles formed in `dtype`."""
    ids = torch.arange(low, high)
    exact = torch.cos(torch.outer(ids.double(), theta(128)))
    return largest(torch.cos(torch.outer(ids.to(dtype), theta(128).to(dtype)).double()) - exact)
