"""Inputs and measurements shared by several chapters: seeded vectors, rotations, and drift under a shift."""

from collections.abc import Callable

import torch
from torch import Tensor

from ropewalk.reference import rotate
from ropewalk.spec import Plain

# Tolerance for identities in float64: numbers of size 1 to 100, after some hundred roundings.
EXACT = 1e-12


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal float64 numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def theta(dim: int, base: float = 10_000.0) -> Tensor:
    """base^(-2i/dim) as a tensor."""
    return torch.as_tensor(Plain(base).evaluate(dim))


def rotate_to(x: Tensor, position: float, inv_freq: Tensor | None = None) -> Tensor:
    """Rotate one vector [dim], or several [n, dim], to one position."""
    rows = x.reshape(-1, x.shape[-1])
    ids = torch.full((len(rows),), position, dtype=torch.float64)
    return rotate(rows, ids, theta(x.shape[-1]) if inv_freq is None else inv_freq).reshape(x.shape)


def largest(error: Tensor) -> float:
    """The largest absolute value."""
    return float(error.abs().max())


def drift(score: Callable[[int, int], Tensor], pairs: tuple[tuple[int, int], ...] = ((3, 1), (17, 40))) -> float:
    """Largest change of score(m, n) if both positions are shifted by 1 to 1000. It is 0 for a relative encoding."""
    return max(largest(score(m + shift, n + shift) - score(m, n)) for m, n in pairs for shift in (1, 7, 64, 1000))


def rank(matrix: Tensor) -> int:
    """The numerical rank."""
    return int(torch.linalg.matrix_rank(matrix, rtol=1e-9))


def cos_error(low: int, high: int, dtype: torch.dtype) -> float:
    """Largest error of cos(m theta), d = 128, at positions low .. high-1, if angles are computed in `dtype`."""
    ids = torch.arange(low, high)
    exact = torch.cos(torch.outer(ids.double(), theta(128)))
    return largest(torch.cos(torch.outer(ids.to(dtype), theta(128).to(dtype)).double()) - exact)
