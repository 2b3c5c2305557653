"""The correct results in float64: rotations, RMSNorm followed by a rotation, and their gradients."""

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
    """A correct result and its tolerances.

    Attributes:
        value: The result in float64.
        allowed: The allowed error per element of our own paths.
        norm: The unit in which errors of other libraries are measured, per element.
        dtype: The expected dtype.
    """

    value: Tensor
    allowed: Tensor
    norm: Tensor
    dtype: torch.dtype

    @classmethod
    def of_rotation(cls, x: Tensor, positions: Tensor, inv_freq: Tensor, pairing: Pairing, conjugate: bool) -> "Truth":
        """The rotation of the first 2 * pairs features of x, [batch, heads, seq, dim]. `inv_freq` is [pairs]."""
        rotary_dim = 2 * inv_freq.shape[-1]
        value = rotate(x.detach().double(), positions, inv_freq, pairing=pairing, conjugate=conjugate)
        norm = torch.hypot(*split_pairs(value[..., :rotary_dim], pairing))
        norm = torch.cat((join_pairs(norm, norm, pairing), value[..., rotary_dim:].abs()), dim=-1)
        return cls(value, rotation_budget(value, x.dtype, rotary_dim=rotary_dim, pairing=pairing), norm, x.dtype)

    def errors(self, y: Tensor) -> tuple[float, float]:
        """The largest error of y, in budgets and in norms of a pair. Infinite for a wrong shape or dtype."""
        if y.shape != self.value.shape or y.dtype != self.dtype:
            return torch.inf, torch.inf
        error = torch.nan_to_num((y.detach().double() - self.value).abs_(), nan=torch.inf)
        # The allowed error of copied elements is 0, so 0 / 0 counts as no error.
        return tuple(float(torch.where(error == 0, 0, error / size).max()) for size in (self.allowed, self.norm))  # pyright: ignore[reportReturnType]


def true_rotations(
    tensors: Sequence[Tensor], cotangents: Sequence[Tensor], positions: Tensor, inv_freq: Tensor, pairing: Pairing
) -> list[Truth]:
    """The rotation of every tensor, then the gradient for every cotangent."""
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
    """The rotated RMSNorm of every tensor, then the gradients of the tensors, then those of the weights."""
    truths = [_norm(x, weight, positions, inv_freq, pairing, eps) for x, weight in zip(tensors, weights, strict=True)]
    backward = list(zip(cotangents, tensors, weights, strict=False))
    truths += [_norm_backward(*arguments, positions, inv_freq, pairing, eps) for arguments in backward]
    return truths + [_weight_backward(*arguments, positions, inv_freq, pairing, eps) for arguments in backward]


def _norm(x: Tensor, weight: Tensor, positions: Tensor, inv_freq: Tensor, pairing: Pairing, eps: float) -> Truth:
    weight = weight.detach().double()
    value = qk_norm_rotate(x.detach().double(), weight, positions, inv_freq, eps=eps, pairing=pairing)
    rotary_dim = 2 * inv_freq.shape[-1]
    allowed = rotation_budget(value, x.dtype, rotary_dim=rotary_dim, pairing=pairing, copied=False)
    return Truth(value, allowed, _largest(value), x.dtype)


def _norm_backward(
    g: Tensor, x: Tensor, weight: Tensor, positions: Tensor, inv_freq: Tensor, pairing: Pairing, eps: float
) -> Truth:
    """dx = r (e w - n mean(e w n)). Allowed: one rounding, plus a small part of the larger term in float32."""
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
    """dw = sum of e n over all tokens. Allowed: one rounding, plus a small part of the summands."""
    unrotated = rotate(g.double(), positions, inv_freq, pairing=pairing, conjugate=True)
    unrotated *= rms_norm(x.detach().double(), eps=eps)
    token_axes = tuple(range(x.dim() - 1))
    value = unrotated.sum(token_axes)
    size = unrotated.square().sum(token_axes).sqrt()
    allowed = torch.finfo(weight.dtype).eps / 2 * value.abs() + 2.0**-12 * size
    return Truth(value, allowed, size, weight.dtype)


def _largest(value: Tensor) -> Tensor:
    return value.abs().amax(-1, keepdim=True).expand_as(value)
