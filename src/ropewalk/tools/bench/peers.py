"""Rotations of other libraries: formulas, written from their descriptions, and functions of installed packages.

A maker computes its tables once and returns the function that is timed, from q and k to rotated q and k. It returns
None if the package is not installed or does not support the arguments. A package is only imported by its maker.
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
    "formula_with_angles",
    "installed",
    "norm_before",
    "transformers_formula",
]

Rotation = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
# Arguments: positions, head_dim, dtype, pairing. On a GPU: positions, head_dim, rotary_dim, dtype, pairing.
Maker = Callable[[range, int, torch.dtype, Pairing], Rotation | None]
GpuMaker = Callable[[range, int, int, torch.dtype, Pairing], Rotation | None]


def _angles(positions: range, dim: int) -> Tensor:
    return torch.outer(
        torch.arange(positions.start, positions.stop).float(), 10_000.0 ** (-torch.arange(0, dim, 2).float() / dim)
    )


def transformers_formula(positions: range, dim: int, dtype: torch.dtype, pairing: Pairing) -> Rotation:
    """x * cos + rotated(x) * sin with tables in the shape and dtype of x: Llama for half, GPT-J for interleaved."""
    return formula_with_angles(_angles(positions, dim), dtype, pairing)


def formula_with_angles(angles: Tensor, dtype: torch.dtype, pairing: Pairing, amplitude: float = 1.0) -> Rotation:
    """`transformers_formula` for angles [seq, pairs] of any rule. `amplitude` is the factor on cos and sin."""
    wide = torch.cat((angles, angles), dim=-1) if pairing == "half" else angles.repeat_interleave(2, dim=-1)
    cos, sin = ((table * amplitude).to(dtype)[None, None] for table in (wide.cos(), wide.sin()))

    def halves(x: Tensor) -> Tensor:
        first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
        return torch.cat((-second, first), dim=-1)

    def neighbours(x: Tensor) -> Tensor:
        return torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)

    rotated = halves if pairing == "half" else neighbours
    return lambda q, k: (q * cos + rotated(q) * sin, k * cos + rotated(k) * sin)


def complex_product(positions: range, dim: int, dtype: torch.dtype, pairing: Pairing) -> Rotation | None:
    """Llama's original code: neighbouring features as complex numbers, one product in float32."""
    if pairing != "interleaved":
        return None
    angles = _angles(positions, dim)
    table = torch.polar(torch.ones_like(angles), angles)

    def rotate(x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * table).flatten(-2).type_as(x)

    return lambda q, k: (rotate(q), rotate(k))


def seed_cut(positions: range, dim: int, dtype: torch.dtype, pairing: Pairing) -> Rotation | None:
    """A function of the seeds: a longer table is sliced; even and odd features are rotated and stacked."""
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
    """Another function of the seeds: table rows are gathered by position ids; results are written to a new tensor."""
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
    """The library rotary-embedding-torch, called as in its README."""
    if pairing != "interleaved" or not installed("rotary_embedding_torch"):
        return None
    module = importlib.import_module("rotary_embedding_torch").RotaryEmbedding(dim)
    start = positions.start
    return lambda q, k: (module.rotate_queries_or_keys(q, offset=start), module.rotate_queries_or_keys(k, offset=start))


def installed(package: str) -> bool:
    """Whether `package` can be imported."""
    return importlib.util.find_spec(package) is not None


# Maker by display name, and whether a compiled form is timed too.
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
    """transformers' function for Llama for half pairs, GPT-J's formula for interleaved pairs."""
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
    """Llama's original code: neighbouring features as complex numbers."""
    with torch.device(timing.DEVICE):
        return complex_product(positions, dim, dtype, pairing) if rotary_dim == dim else None


def liger(positions: range, dim: int, rotary_dim: int, dtype: torch.dtype, pairing: Pairing) -> Rotation | None:
    """Liger's kernel, which works in place."""
    if pairing != "half" or rotary_dim != dim or not installed("liger_kernel"):
        return None
    function = importlib.import_module("liger_kernel.ops.rope").LigerRopeFunction
    cos, sin = (table[None] for table in _tables(positions, dim, dtype, wide=True))
    return lambda q, k: function.apply(q, k, cos, sin)


def fla(positions: range, dim: int, rotary_dim: int, dtype: torch.dtype, pairing: Pairing) -> Rotation | None:
    """flash-linear-attention's kernel, which requires tables in the dtype of x."""
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
    """RMSNorm as in the models of transformers, followed by the rotation."""

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return weight * wide.to(x.dtype)

    return lambda q, k: rotation(norm(q, weights[0]), norm(k, weights[1]))


@dataclass(frozen=True)
class GpuPeer:
    """A rotation of another library.

    Attributes:
        maker: Its maker.
        compiles: Whether a compiled form is timed too.
        in_place: Whether it overwrites its input.
        tunes: Whether it tunes its kernel at the first call. It is then only timed in one case.
    """

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
