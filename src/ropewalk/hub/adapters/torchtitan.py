"""Overrides for torchtitan: its RoPE modules with ropewalk's fused rotation. Importing this file imports torchtitan.

For torchtitan 0.3, whose modules are called with query and key [batch, seq, heads, head_dim]; [tokens, heads, head_dim]
is accepted too. Activate both, or one of them:

    --override.imports ropewalk.hub.adapters.torchtitan.cos_sin_rope ropewalk.hub.adapters.torchtitan.complex_rope

The modules keep torchtitan's cache, so cos and sin are torchtitan's and checkpoints do not change. DTensors, and shapes
and dtypes that the kernels do not support, use torchtitan's own rotation.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torchtitan.config.override import derive, override
from torchtitan.models.common.rope import ComplexRoPE, CosSinRoPE

from ropewalk.kernels.precision import FLOATS
from ropewalk.kernels.types import Layout
from ropewalk.ops import rotate

__all__ = ["FusedComplexRoPE", "FusedCosSinRoPE", "complex_rope", "cos_sin_rope"]


class FusedCosSinRoPE(CosSinRoPE):
    """torchtitan's rotation of half pairs, in one pass over memory."""

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        """The config of `CosSinRoPE`."""

    def forward(self, query: Tensor, key: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Rotate query and key [batch, seq, heads, head_dim] at `positions` [1 or batch, seq], or at 0 .. seq-1."""
        dim = self.config.dim
        if not _is_supported(query, key, positions, dim):
            return super().forward(query, key, positions)
        # Both halves of the cache repeat their angles.
        rows = _rows(self.cache, query, positions)
        return _rotated(query, key, rows[..., : dim // 2], rows[..., dim : dim + dim // 2], interleaved=False)


class FusedComplexRoPE(ComplexRoPE):
    """torchtitan's rotation of interleaved pairs, in one pass over memory and in real arithmetic."""

    @dataclass(kw_only=True, slots=True)
    class Config(ComplexRoPE.Config):
        """The config of `ComplexRoPE`."""

    def forward(self, query: Tensor, key: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Rotate query and key [batch, seq, heads, head_dim] at `positions` [1 or batch, seq], or at 0 .. seq-1."""
        if not _is_supported(query, key, positions, self.config.dim):
            return super().forward(query, key, positions)
        rows = _rows(torch.view_as_real(self.cache), query, positions)
        return _rotated(query, key, rows[..., 0], rows[..., 1], interleaved=True)


@override(target=CosSinRoPE.Config, exact=True, description="ropewalk's fused rotation of half pairs")
def cos_sin_rope(config: CosSinRoPE.Config) -> FusedCosSinRoPE.Config:
    """Return the config of the fused module, with the fields of torchtitan's."""
    return derive(config, FusedCosSinRoPE.Config)


@override(target=ComplexRoPE.Config, exact=True, description="ropewalk's fused rotation of interleaved pairs")
def complex_rope(config: ComplexRoPE.Config) -> FusedComplexRoPE.Config:
    """Return the config of the fused module, with the fields of torchtitan's."""
    return derive(config, FusedComplexRoPE.Config)


def _is_supported(query: Tensor, key: Tensor, positions: Tensor | None, dim: int) -> bool:
    plain = all(type(x) in (Tensor, torch.nn.Parameter) for x in (query, key))
    fits = plain and query.dim() == key.dim() and query.dim() in (3, 4) and query.shape[-1] == key.shape[-1] == dim
    same = fits and query.dtype == key.dtype and query.dtype in FLOATS and query.dtype != torch.float64
    lined_up = same and query.shape[:-2] == key.shape[:-2]
    if positions is None or not lined_up:
        return lined_up
    shape = query.shape[:-2]
    return type(positions) is Tensor and (positions.shape == shape or positions.shape == (1, *shape[1:]))


def _rows(cache: Tensor, query: Tensor, positions: Tensor | None) -> Tensor:
    """Return the rows of the cache [seq, ...] or [1 or batch, seq, ...] for the tokens of a query."""
    return cache[: query.shape[-3]] if positions is None else cache[positions]


def _rotated(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    query, key = rotate(query, key, cos.contiguous(), sin.contiguous(), Layout(interleaved, 0, -3))
    return query, key
