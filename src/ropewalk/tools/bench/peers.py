"""How others rotate: formulas, each written from its description, and the functions and kernels of installed packages.

Each maker takes what is to be rotated, makes its tables once, and returns the function that is timed: from q and k to
rotated q and k. None where the package is not installed or has no such form. A package is imported by its maker alone.
"""

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ropewalk.spec.rope import Pairing
from ropewalk.tools.bench import timing

__all__ = [
    "GPU_PEERS",
    "PEERS",
    "GpuPeer",
    "Rotation",
    "complex_product",
    "installed",
    "norm_before",
    "transformers_formula",
]

Rotation = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
# From the positions, the head dimension, the dtype and the pairing; on a GPU the rotary dimension follows the head's.
Maker = Callable[[range, int, torch.dtype, Pairing], Rotation | None]
GpuMaker = Callable[[range, int, int, torch.dtype, Pairing], Rotation | None]


def _angles(positions: range, dim: int) -> Tensor:
    return torch.outer(
        torch.arange(positions.start, positions.stop).float(), 10_000.0 ** (-torch.arange(0, dim, 2).float() / dim)
    )


def transformers_formula(positions: range, dim: int, dtype: torch.dtype, pairing: Pairing) -> Rotation:
    """x * cos + rotated(x) * sin, tables as wide as x and in its dtype: Llama's form for half, GPT-J's for pairs."""
    angles = _angles(positions, dim)
    wide = torch.cat((angles, angles), dim=-1) if pairing == "half" else angles.repeat_interleave(2, dim=-1)
    cos, sin = wide.cos().to(dtype)[None, None], wide.sin().to(dtype)[None, None]

    def halves(x: Tensor) -> Tensor:
        first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
        return torch.cat((-second, first), dim=-1)

    def neighbours(x: Tensor) -> Tensor:
        return torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)

    rotated = halves if pairing == "half" else neighbours
    return lambda q, k: (q * cos + rotated(q) * sin, k * cos + rotated(k) * sin)


def complex_product(positions: range, dim: int, dtype: torch.dtype, pairing: Pairing) -> Rotation | None:
    """Llama's original code: neighbours as complex numbers, one product in float32."""
    if pairing != "interleaved":
        return None
    angles = _angles(positions, dim)
    table = torch.polar(torch.ones_like(angles), angles)

    def rotate(x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * table).flatten(-2).type_as(x)

    return lambda q, k: (rotate(q), rotate(k))


def seed_cut(positions: range, dim: int, dtype: torch.dtype, pairing: Pairing) -> Rotation | None:
    """A note's function: a longer table cut to the sequence, even and odd features rotated and stacked."""
    if pairing != "interleaved":
        return None
    angles = _angles(range(positions.stop + 512), dim)
    cos, sin = angles.cos()[None, None], angles.sin()[None, None]

    def rotate(x: Tensor) -> Tensor:
        c, s = cos[:, :, positions.start : positions.stop], sin[:, :, positions.start : positions.stop]
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack((even * c - odd * s, even * s + odd * c), dim=-1).flatten(-2).to(x.dtype)

    return lambda q, k: (rotate(q), rotate(k))


def seed_gathered(positions: range, dim: int, dtype: torch.dtype, pairing: Pairing) -> Rotation | None:
    """Another note's: rows of the table gathered by position ids, even and odd features written into a copy."""
    if pairing != "interleaved":
        return None
    angles = _angles(range(positions.stop + 512), dim)
    table, ids = torch.stack((angles.cos(), angles.sin())), torch.arange(positions.start, positions.stop)[None]

    def rotate(x: Tensor) -> Tensor:
        cos, sin = table[:, ids][:, :, None]
        even, odd = x[..., 0::2], x[..., 1::2]
        y = torch.empty_like(x)
        y[..., 0::2], y[..., 1::2] = even * cos - odd * sin, even * sin + odd * cos
        return y

    return lambda q, k: (rotate(q), rotate(k))


def rotary_embedding_torch(positions: range, dim: int, dtype: torch.dtype, pairing: Pairing) -> Rotation | None:
    """The library of that name, as its README calls it."""
    if pairing != "interleaved" or not installed("rotary_embedding_torch"):
        return None
    module = importlib.import_module("rotary_embedding_torch").RotaryEmbedding(dim)
    start = positions.start
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


def _tables(positions: range, rotary_dim: int, dtype: torch.dtype, wide: bool) -> tuple[Tensor, Tensor]:
    ids = torch.arange(positions.start, positions.stop, device=timing.DEVICE).float()
    exponents = torch.arange(0, rotary_dim, 2, device=timing.DEVICE).float() / rotary_dim
    angles = torch.outer(ids, 10_000.0**-exponents)
    angles = torch.cat((angles, angles), dim=-1) if wide else angles
    return angles.cos().to(dtype), angles.sin().to(dtype)


def transformers(positions: range, dim: int, rotary_dim: int, dtype: torch.dtype, pairing: Pairing) -> Rotation | None:
    """transformers' function for Llama, half pairs; for interleaved ones GPT-J's formula."""
    if rotary_dim != dim:
        return None
    if pairing != "half" or not installed("transformers"):
        with torch.device(timing.DEVICE):
            return transformers_formula(positions, dim, dtype, pairing)
    llama = importlib.import_module("transformers.models.llama.modeling_llama")
    cos, sin = (table[None] for table in _tables(positions, dim, dtype, wide=True))
    return lambda q, k: llama.apply_rotary_pos_emb(q, k, cos, sin)


def complex_numbers(
    positions: range, dim: int, rotary_dim: int, dtype: torch.dtype, pairing: Pairing
) -> Rotation | None:
    """Llama's original code: neighbours as complex numbers."""
    with torch.device(timing.DEVICE):
        return complex_product(positions, dim, dtype, pairing) if rotary_dim == dim else None


def liger(positions: range, dim: int, rotary_dim: int, dtype: torch.dtype, pairing: Pairing) -> Rotation | None:
    """Liger's kernel, which rotates the storage of its arguments."""
    if pairing != "half" or rotary_dim != dim or not installed("liger_kernel"):
        return None
    function = importlib.import_module("liger_kernel.ops.rope").LigerRopeFunction
    cos, sin = (table[None] for table in _tables(positions, dim, dtype, wide=True))
    return lambda q, k: function.apply(q, k, cos, sin)


def fla(positions: range, dim: int, rotary_dim: int, dtype: torch.dtype, pairing: Pairing) -> Rotation | None:
    """flash-linear-attention's kernel; it takes tables of the dtype of x alone."""
    if not installed("fla"):
        return None
    function = importlib.import_module("fla.modules.rotary.ops").rotary_embedding
    cos, sin = _tables(positions, rotary_dim, dtype, wide=False)

    def rotate(x: Tensor) -> Tensor:
        return function(x.transpose(1, 2), cos, sin, interleaved=pairing == "interleaved").transpose(1, 2)

    return lambda q, k: (rotate(q), rotate(k))


def flash_attention(
    positions: range, dim: int, rotary_dim: int, dtype: torch.dtype, pairing: Pairing
) -> Rotation | None:
    """flash-attention's Triton kernel."""
    if not installed("flash_attn"):
        return None
    function = importlib.import_module("flash_attn.layers.rotary").apply_rotary_emb
    cos, sin = _tables(positions, rotary_dim, dtype, wide=False)

    def rotate(x: Tensor) -> Tensor:
        return function(x.transpose(1, 2), cos, sin, interleaved=pairing == "interleaved").transpose(1, 2)

    return lambda q, k: (rotate(q), rotate(k))


def norm_before(rotation: Rotation, weights: tuple[Tensor, Tensor], eps: float) -> Rotation:
    """RMSNorm as transformers' models write it, then the rotation."""

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return weight * wide.to(x.dtype)

    return lambda q, k: rotation(norm(q, weights[0]), norm(k, weights[1]))


@dataclass(frozen=True)
class GpuPeer:
    """One that takes part: its maker, whether a compiled form does too, whether it writes into its input, and whether
    it tries many kernels first, for which it is given time in one case only."""

    maker: GpuMaker
    compiles: bool = False
    in_place: bool = False
    tunes: bool = False


GPU_PEERS: dict[str, GpuPeer] = {
    "transformers": GpuPeer(transformers, compiles=True),
    "complex product": GpuPeer(complex_numbers),
    "Liger": GpuPeer(liger, in_place=True),
    "fla": GpuPeer(fla, tunes=True),
    "flash-attention": GpuPeer(flash_attention),
}
