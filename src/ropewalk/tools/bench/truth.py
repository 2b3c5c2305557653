"""What contestants must compute, in float64: rotations, RMSNorm and rotation, and their gradients."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ropewalk.reference.budget import rotation_budget
from ropewalk.reference.pairs import join_pairs, split_pairs
from ropewalk.reference.qk_norm import qk_norm_rotate, rms_norm
from ropewalk.reference.rotate import rotate
from ropewalk.spec.rope import Pairing

__all__ = ["Truth", "true_norms", "true_rotations"]


@dataclass(frozen=True)
class Truth:
    """A result in float64, what each element may be off by, and the size that errors of peers are measured by."""

    value: Tensor
    allowed: Tensor
    norm: Tensor
    dtype: torch.dtype

    @classmethod
    def of_rotation(cls, x: Tensor, positions: Tensor, inv_freq: Tensor, pairing: Pairing, conjugate: bool) -> "Truth":
        """The rotation of x, [batch, heads, seq, dim], whose first 2 * pairs features are rotated."""
        rotary_dim = 2 * inv_freq.shape[-1]
        value = rotate(x.detach().double(), positions, inv_freq, pairing=pairing, conjugate=conjugate)
        norm = torch.hypot(*split_pairs(value[..., :rotary_dim], pairing))
        norm = torch.cat((join_pairs(norm, norm, pairing), value[..., rotary_dim:].abs()), dim=-1)
        return cls(value, rotation_budget(value, x.dtype, rotary_dim=rotary_dim, pairing=pairing), norm, x.dtype)

    def errors(self, y: Tensor) -> tuple[float, float]:
        """The largest error of any element of y, in budgets and in norms of its pair; infinite for another dtype."""
        if y.shape != self.value.shape or y.dtype != self.dtype:
            return torch.inf, torch.inf
        error = torch.nan_to_num((y.detach().double() - self.value).abs_(), nan=torch.inf)
        # What is only copied is allowed no error, and 0 / 0 is none.
        return tuple(float(torch.where(error == 0, 0, error / size).max()) for size in (self.allowed, self.norm))  # pyright: ignore[reportReturnType]


def true_rotations(
    tensors: Sequence[Tensor], cotangents: Sequence[Tensor], positions: Tensor, inv_freq: Tensor, pairing: Pairing
) -> list[Truth]:
    """The rotation of each tensor, then the gradient for each cotangent."""
    forward = [Truth.of_rotation(x, positions, inv_freq, pairing, False) for x in tensors]
    return forward + [Truth.of_rotation(g, positions, inv_freq, pairing, True) for g in cotangents]


def true_norms(
    tensors: Sequence[Tensor],
    cotangents: Sequence[Tensor],
    weights: Sequence[Tensor],
    positions: Tensor,
    inv_freq: Tensor,
    pairing: Pairing,
    eps: float,
) -> list[Truth]:
    """The same for the rotation of the norm of each, and the gradients of the weights."""
    truths = [_norm(x, weight, positions, inv_freq, pairing, eps) for x, weight in zip(tensors, weights, strict=True)]
    backward = list(zip(cotangents, tensors, weights, strict=False))
    truths += [_norm_backward(*each, positions, inv_freq, pairing, eps) for each in backward]
    return truths + [_weight_backward(*each, positions, inv_freq, pairing, eps) for each in backward]


def _norm(x: Tensor, weight: Tensor, positions: Tensor, inv_freq: Tensor, pairing: Pairing, eps: float) -> Truth:
    weight = weight.detach().double()
    value = qk_norm_rotate(x.detach().double(), weight, positions, inv_freq, eps=eps, pairing=pairing)
    rotary_dim = 2 * inv_freq.shape[-1]
    allowed = rotation_budget(value, x.dtype, rotary_dim=rotary_dim, pairing=pairing, copied=False)
    return Truth(value, allowed, _largest(value), x.dtype)


def _norm_backward(
    g: Tensor, x: Tensor, weight: Tensor, positions: Tensor, inv_freq: Tensor, pairing: Pairing, eps: float
) -> Truth:
    """dx = r (e w - n mean(e w n)): rounded once, and before that in float32 by a little of the larger term."""
    wide, weight = x.detach().double(), weight.detach().double()
    unrotated = rotate(g.double(), positions, inv_freq, pairing=pairing, conjugate=True) * weight
    scaled = rms_norm(wide, eps=eps)
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    value = inverse * (unrotated - scaled * (unrotated * scaled).mean(-1, keepdim=True))
    size = _largest(inverse * unrotated)
    info = torch.finfo(x.dtype)
    return Truth(value, info.eps / 2 * value.abs() + 2.0**-16 * size, size, x.dtype)


def _weight_backward(
    g: Tensor, x: Tensor, weight: Tensor, positions: Tensor, inv_freq: Tensor, pairing: Pairing, eps: float
) -> Truth:
    """dw sums e n over all tokens: rounded once, and before that by a little of what was added up."""
    unrotated = rotate(g.double(), positions, inv_freq, pairing=pairing, conjugate=True)
    unrotated *= rms_norm(x.detach().double(), eps=eps)
    everything_else = tuple(range(x.dim() - 1))
    value = unrotated.sum(everything_else)
    size = unrotated.square().sum(everything_else).sqrt()
    allowed = torch.finfo(weight.dtype).eps / 2 * value.abs() + 2.0**-12 * size
    return Truth(value, allowed, size, weight.dtype)


def _largest(value: Tensor) -> Tensor:
    return value.abs().amax(-1, keepdim=True).expand_as(value)
