"""How others rotate on a GPU: transformers' own functions, and the kernels of packages that are installed.

Each maker takes what is to be rotated, makes its tables once, and returns the function that is timed: q and k,
[batch, heads, seq, dim], to rotated q and k. None where the package is not there or has no such form.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ropewalk.tools.bench import gpu_timing
from ropewalk.tools.bench.peers import Rotation, complex_product, installed, transformers_formula

__all__ = ["GPU_PEERS", "Peer", "norm_before"]

Maker = Callable[[range, int, int, torch.dtype, str], Rotation | None]


def _tables(where: range, rotary_dim: int, dtype: torch.dtype, wide: bool) -> tuple[Tensor, Tensor]:
    positions = torch.arange(where.start, where.stop, device=gpu_timing.DEVICE).float()
    exponents = torch.arange(0, rotary_dim, 2, device=gpu_timing.DEVICE).float() / rotary_dim
    angles = torch.outer(positions, 10_000.0**-exponents)
    angles = torch.cat((angles, angles), dim=-1) if wide else angles
    return angles.cos().to(dtype), angles.sin().to(dtype)


def transformers(where: range, dim: int, rotary_dim: int, dtype: torch.dtype, pairing: str) -> Rotation | None:
    """transformers' function for Llama, half pairs; for interleaved ones GPT-J's formula."""
    if rotary_dim != dim:
        return None
    if pairing != "half" or not installed("transformers"):
        with torch.device(gpu_timing.DEVICE):
            return transformers_formula(where, dim, dtype, pairing)
    llama = importlib.import_module("transformers.models.llama.modeling_llama")
    cos, sin = (table[None] for table in _tables(where, dim, dtype, wide=True))
    return lambda q, k: llama.apply_rotary_pos_emb(q, k, cos, sin)


def complex_numbers(where: range, dim: int, rotary_dim: int, dtype: torch.dtype, pairing: str) -> Rotation | None:
    """Llama's original code: neighbours as complex numbers."""
    with torch.device(gpu_timing.DEVICE):
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


@dataclass(frozen=True)
class Peer:
    """One that takes part: its maker, whether a compiled form does too, whether it writes into its input, and whether
    it tries many kernels first, for which it is given time in one case only."""

    maker: Maker
    compiles: bool = False
    in_place: bool = False
    tunes: bool = False


GPU_PEERS: dict[str, Peer] = {
    "transformers": Peer(transformers, compiles=True),
    "complex product": Peer(complex_numbers),
    "Liger": Peer(liger, in_place=True),
    "fla": Peer(fla, tunes=True),
    "flash-attention": Peer(flash_attention),
}
