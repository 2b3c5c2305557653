"""How others rotate on the CPU, each written from its description, as a contestant: q and k to rotated q and k.

Each maker takes the positions, as a range, the head dimension, the dtype and the pairing, makes its tables once, and
returns the function that is timed; None where it has no such pairing.
"""

import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["PEERS", "Rotation", "installed"]

Rotation = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
Maker = Callable[[range, int, torch.dtype, str], Rotation | None]


def _angles(where: range, dim: int) -> Tensor:
    return torch.outer(
        torch.arange(where.start, where.stop).float(), 10_000.0 ** (-torch.arange(0, dim, 2).float() / dim)
    )


def transformers_formula(where: range, dim: int, dtype: torch.dtype, pairing: str) -> Rotation:
    """x * cos + rotated(x) * sin, tables as wide as x and in its dtype: Llama's form for half, GPT-J's for pairs."""
    angles = _angles(where, dim)
    wide = torch.cat((angles, angles), dim=-1) if pairing == "half" else angles.repeat_interleave(2, dim=-1)
    cos, sin = wide.cos().to(dtype)[None, None], wide.sin().to(dtype)[None, None]

    def halves(x: Tensor) -> Tensor:
        first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
        return torch.cat((-second, first), dim=-1)

    def neighbours(x: Tensor) -> Tensor:
        return torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)

    rotated = halves if pairing == "half" else neighbours
    return lambda q, k: (q * cos + rotated(q) * sin, k * cos + rotated(k) * sin)


def complex_product(where: range, dim: int, dtype: torch.dtype, pairing: str) -> Rotation | None:
    """Llama's original code: neighbours as complex numbers, one product in float32."""
    if pairing != "interleaved":
        return None
    angles = _angles(where, dim)
    table = torch.polar(torch.ones_like(angles), angles)

    def turn(x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * table).flatten(-2).type_as(x)

    return lambda q, k: (turn(q), turn(k))


def seed_cut(where: range, dim: int, dtype: torch.dtype, pairing: str) -> Rotation | None:
    """A note's function: a longer table cut to the sequence, even and odd features turned and stacked."""
    if pairing != "interleaved":
        return None
    angles = _angles(range(where.stop + 512), dim)
    cos, sin = angles.cos()[None, None], angles.sin()[None, None]

    def turn(x: Tensor) -> Tensor:
        c, s = cos[:, :, where.start : where.stop], sin[:, :, where.start : where.stop]
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack((even * c - odd * s, even * s + odd * c), dim=-1).flatten(-2).to(x.dtype)

    return lambda q, k: (turn(q), turn(k))


def seed_gathered(where: range, dim: int, dtype: torch.dtype, pairing: str) -> Rotation | None:
    """Another note's: rows of the table gathered by position ids, even and odd features written into a copy."""
    if pairing != "interleaved":
        return None
    angles = _angles(range(where.stop + 512), dim)
    table, ids = torch.stack((angles.cos(), angles.sin())), torch.arange(where.start, where.stop)[None]

    def turn(x: Tensor) -> Tensor:
        cos, sin = table[:, ids][:, :, None]
        even, odd = x[..., 0::2], x[..., 1::2]
        y = torch.empty_like(x)
        y[..., 0::2], y[..., 1::2] = even * cos - odd * sin, even * sin + odd * cos
        return y

    return lambda q, k: (turn(q), turn(k))


def rotary_embedding_torch(where: range, dim: int, dtype: torch.dtype, pairing: str) -> Rotation | None:
    """The library of that name, as its README calls it."""
    if pairing != "interleaved" or not installed("rotary_embedding_torch"):
        return None
    module = importlib.import_module("rotary_embedding_torch").RotaryEmbedding(dim)
    start = where.start
    return lambda q, k: (module.rotate_queries_or_keys(q, offset=start), module.rotate_queries_or_keys(k, offset=start))


def installed(package: str) -> bool:
    """Whether `package` can be imported."""
    return importlib.util.find_spec(package) is not None


# By the name under which they are shown; whether a compiled form takes part too.
PEERS: dict[str, tuple[Maker, bool]] = {
    "transformers' formula": (transformers_formula, True),
    "complex product": (complex_product, False),
    "seed, table cut": (seed_cut, False),
    "seed, table gathered": (seed_gathered, False),
    "rotary-embedding-torch": (rotary_embedding_torch, False),
}
