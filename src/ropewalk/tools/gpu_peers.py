"""How others rotate on a GPU: transformers' own functions, and the kernels of packages that are installed.

Each maker takes what is to be rotated, makes its tables once, and returns the function that is timed: q and k,
[batch, heads, seq, dim], to rotated q and k. None where the package is not there or has no such form.
"""

import importlib
from collections.abc import Callable

import torch
from torch import Tensor

from ropewalk.tools.peers import Rotation, complex_product, installed, transformers_formula

__all__ = ["GPU_PEERS", "norm_before"]

Maker = Callable[[range, int, int, torch.dtype, str], Rotation | None]


def _tables(where: range, rotary_dim: int, dtype: torch.dtype, wide: bool) -> tuple[Tensor, Tensor]:
    positions = torch.arange(where.start, where.stop, device="cuda").float()
    exponents = torch.arange(0, rotary_dim, 2, device="cuda").float() / rotary_dim
    angles = torch.outer(positions, 10_000.0**-exponents)
    angles = torch.cat((angles, angles), dim=-1) if wide else angles
    return angles.cos().to(dtype), angles.sin().to(dtype)


def transformers(where: range, dim: int, rotary_dim: int, dtype: torch.dtype, pairing: str) -> Rotation | None:
    """transformers' function for Llama, half pairs; for interleaved ones GPT-J's formula."""
    if rotary_dim != dim:
        return None
    if pairing != "half" or not installed("transformers"):
        with torch.device("cuda"):
            return transformers_formula(where, dim, dtype, pairing)
    llama = importlib.import_module("transformers.models.llama.modeling_llama")
    cos, sin = (table[None] for table in _tables(where, dim, dtype, wide=True))
    return lambda q, k: llama.apply_rotary_pos_emb(q, k, cos, sin)


def complex_numbers(where: range, dim: int, rotary_dim: int, dtype: torch.dtype, pairing: str) -> Rotation | None:
    """Llama's original code: neighbours as complex numbers."""
    with torch.device("cuda"):
        return complex_product(where, dim, dtype, pairing) if rotary_dim == dim else None


def liger(where: range, dim: int, rotary_dim: int, dtype: torch.dtype, pairing: str) -> Rotation | None:
    """Liger's kernel, which rotates the storage of its arguments."""
    if pairing != "half" or rotary_dim != dim or not installed("liger_kernel"):
        return None
    function = importlib.import_module("liger_kernel.ops.rope").LigerRopeFunction
    cos, sin = (table[None] for table in _tables(where, dim, dtype, wide=True))
    return lambda q, k: function.apply(q, k, cos, sin)


def fla(where: range, dim: int, rotary_dim: int, dtype: torch.dtype, pairing: str) -> Rotation | None:
    """flash-linear-attention's kernel; it takes tables of the dtype of x alone."""
    if not installed("fla"):
        return None
    function = importlib.import_module("fla.modules.rotary.ops").rotary_embedding
    cos, sin = _tables(where, rotary_dim, dtype, wide=False)

    def turn(x: Tensor) -> Tensor:
        return function(x.transpose(1, 2), cos, sin, interleaved=pairing == "interleaved").transpose(1, 2)

    return lambda q, k: (turn(q), turn(k))


def flash_attention(where: range, dim: int, rotary_dim: int, dtype: torch.dtype, pairing: str) -> Rotation | None:
    """flash-attention's Triton kernel."""
    if not installed("flash_attn"):
        return None
    function = importlib.import_module("flash_attn.layers.rotary").apply_rotary_emb
    cos, sin = _tables(where, rotary_dim, dtype, wide=False)

    def turn(x: Tensor) -> Tensor:
        return function(x.transpose(1, 2), cos, sin, interleaved=pairing == "interleaved").transpose(1, 2)

    return lambda q, k: (turn(q), turn(k))


def norm_before(rotation: Rotation, weights: tuple[Tensor, Tensor], eps: float) -> Rotation:
    """RMSNorm as transformers' models write it, then the rotation."""

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return weight * wide.to(x.dtype)

    return lambda q, k: rotation(norm(q, weights[0]), norm(k, weights[1]))


# By the name under which they are shown; whether a compiled form takes part, and whether they write into their input.
GPU_PEERS: dict[str, tuple[Maker, bool, bool]] = {
    "transformers": (transformers, True, False),
    "complex product": (complex_numbers, False, False),
    "Liger": (liger, False, True),
    "fla": (fla, False, False),
    "flash-attention": (flash_attention, False, False),
}
