"""What the contestants on a GPU must compute, in float64."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ropewalk.reference.budget import rotation_budget
from ropewalk.reference.qk_norm import qk_norm_rotate, rms_norm
from ropewalk.reference.rotate import rotate
from ropewalk.tools.bench.timing import Truth

__all__ = ["true_norms", "true_rotations"]


def true_rotations(
    tensors: Sequence[Tensor], cotangents: Sequence[Tensor], positions: Tensor, inv_freq: Tensor, pairing: str
) -> list[Truth]:
    """Of each tensor its rotation, then of each cotangent its way back."""
    found = [Truth.of_rotation(x, positions, inv_freq, pairing, False) for x in tensors]
    return found + [Truth.of_rotation(g, positions, inv_freq, pairing, True) for g in cotangents]


def true_norms(
    tensors: Sequence[Tensor],
    cotangents: Sequence[Tensor],
    weights: Sequence[Tensor],
    positions: Tensor,
    inv_freq: Tensor,
    pairing: str,
    eps: float,
) -> list[Truth]:
    """The same for the rotation of the norm of each."""
    found = [_norm(x, weight, positions, inv_freq, pairing, eps) for x, weight in zip(tensors, weights, strict=True)]
    backward = list(zip(cotangents, tensors, weights, strict=False))
    found += [_norm_backward(*each, positions, inv_freq, pairing, eps) for each in backward]
    return found + [_weight_backward(*each, positions, inv_freq, pairing, eps) for each in backward]


def _norm(x: Tensor, weight: Tensor, positions: Tensor, inv_freq: Tensor, pairing: str, eps: float) -> Truth:
    weight = weight.detach().double()
    value = qk_norm_rotate(x.detach().double(), weight, positions, inv_freq, eps=eps, pairing=pairing)
    turning = 2 * inv_freq.shape[-1]
    allowed = rotation_budget(value, x.dtype, rotary_dim=turning, pairing=pairing, copied=False)
    return Truth(value, allowed, _largest(value), x.dtype)


def _norm_backward(
    g: Tensor, x: Tensor, weight: Tensor, positions: Tensor, inv_freq: Tensor, pairing: str, eps: float
) -> Truth:
    """dx = r (e w - n mean(e w n)): rounded once, and before that in float32 by a little of the larger term."""
    wide, weight = x.detach().double(), weight.detach().double()
    turned = rotate(g.double(), positions, inv_freq, pairing=pairing, conjugate=True) * weight
    scaled = rms_norm(wide, eps=eps)
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    value = inverse * (turned - scaled * (turned * scaled).mean(-1, keepdim=True))
    size = _largest(inverse * turned)
    info = torch.finfo(x.dtype)
    return Truth(value, info.eps / 2 * value.abs() + 2.0**-16 * size, size, x.dtype)


def _weight_backward(
    g: Tensor, x: Tensor, weight: Tensor, positions: Tensor, inv_freq: Tensor, pairing: str, eps: float
) -> Truth:
    """dw sums e n over all tokens: rounded once, and before that by a little of what was added up."""
    turned = rotate(g.double(), positions, inv_freq, pairing=pairing, conjugate=True)
    turned *= rms_norm(x.detach().double(), eps=eps)
    everything_else = tuple(range(x.dim() - 1))
    value = turned.sum(everything_else)
    size = turned.square().sum(everything_else).sqrt()
    allowed = torch.finfo(weight.dtype).eps / 2 * value.abs() + 2.0**-12 * size
    return Truth(value, allowed, size, weight.dtype)


def _largest(value: Tensor) -> Tensor:
    return value.abs().amax(-1, keepdim=True).expand_as(value)
