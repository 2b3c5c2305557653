"""Hypothesis strategies for the inputs of a rotation, and the tolerance that float64 deserves."""

import torch
from hypothesis import strategies as st
from torch import Tensor

from formulas import plain_frequencies

MAX_POSITION = 1 << 20

pairings = st.sampled_from(["interleaved", "half"])
positions = st.integers(-MAX_POSITION, MAX_POSITION)
even_dims = st.integers(1, 64).map(lambda pairs: 2 * pairs)
bases = st.floats(1.5, 1e8)
seeds = st.integers(0, 2**32 - 1)


def vector(seed: int, *shape: int) -> Tensor:
    """Standard normal float64, from a seed that Hypothesis can shrink and print."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def theta(dim: int, base: float = 10_000.0) -> Tensor:
    """Plain frequencies, from the formula and not from the package."""
    return torch.as_tensor(plain_frequencies(dim, base))


def at(*values: float) -> Tensor:
    """Positions as a tensor [seq]."""
    return torch.tensor(values)


def tolerance(*reached: int) -> float:
    """(8 + |m|) 2^-52: an angle m theta is off by half an ulp of itself, and a few roundings follow."""
    return (8 + sum(abs(m) for m in reached)) * 2.0**-52
