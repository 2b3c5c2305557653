"""RotaryEmbedding with the signature of the reference rotation, so that the parity check can drive it."""

import dataclasses
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ropewalk import RopeSpec, RotaryEmbedding, ops
from ropewalk.spec.frequencies import Frequencies


@dataclasses.dataclass(frozen=True)
class Given(Frequencies):
    """Frequencies and an amplitude given as they are."""

    values: tuple[Any, ...]
    scale: float = 1.0

    def evaluate(self, rotary_dim, length=None, arithmetic=None) -> Any:
        return np.array(self.values, dtype=np.float64)

    def amplitude(self, length=None, arithmetic=None):
        return self.scale


Frequencies.known.pop("Given")


def module_for(
    x: Tensor,
    inv_freq: Tensor,
    amplitude: float = 1.0,
    seq_dim: int = -2,
    backend: str | None = None,
    **fields: Any,
) -> RotaryEmbedding:
    rows = inv_freq.tolist()
    values = tuple(tuple(row) for row in rows) if inv_freq.dim() == 2 else tuple(rows)
    spec = RopeSpec(x.shape[-1], Given(values, amplitude), rotary_dim=2 * inv_freq.shape[-1], **fields)
    return RotaryEmbedding(spec, seq_dim=seq_dim, backend=backend)


def by_module(x, positions, inv_freq, *, pairing, conjugate, amplitude, rotary_slice, backend=None):
    """The module's forward; its angles and the op's conjugate where the other way is asked for."""
    rope = module_for(x, inv_freq, amplitude, backend=backend, pairing=pairing, rotary_slice=rotary_slice)
    if not conjugate:
        return rope(x, positions=positions)
    working = torch.float64 if x.dtype == torch.float64 else torch.float32
    return ops.rotate(x, None, *rope.at(positions, dtype=working), rope.layout, conjugate=True, backend=backend)[0]


def with_heads_last(x, positions, inv_freq, *, pairing, conjugate, amplitude, rotary_slice, backend=None):
    """The same for [..., seq, heads, dim]."""
    rope = module_for(x, inv_freq, amplitude, -3, backend, pairing=pairing, rotary_slice=rotary_slice)
    working = torch.float64 if x.dtype == torch.float64 else torch.float32
    angles = rope.at(positions, dtype=working)
    rotated = ops.rotate(x.transpose(-2, -3), None, *angles, rope.layout, conjugate=conjugate, backend=backend)
    return rotated[0].transpose(-2, -3)
