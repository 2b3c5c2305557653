"""RMSNorm and rotation in torch operations, which are differentiable in all arguments and which compilers can fuse."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ropewalk.kernels.constructors import ones
from ropewalk.kernels.precision import working_dtype
from ropewalk.kernels.rotate.torch import rotate_traceable
from ropewalk.kernels.types import Layout, Norm

__all__ = ["factor", "norm_backward", "norm_rotate", "norm_rotate_traceable"]


def factor(weight: Tensor | None, x: Tensor, norm: Norm) -> Tensor:
    """Return the factor of the scaled features [dim], weight or 1 + weight, in the dtype in which x is computed.

    >>> factor(torch.tensor([0.5]), torch.ones(2, 1), Norm(1e-6, plus_one=True)).tolist()
    [1.5]
    """
    working = working_dtype(x)
    if weight is None:
        return ones(x.shape[-1], dtype=working, device=x.device)
    weight = weight.to(working)
    return weight + 1 if norm.plus_one else weight


def norm_rotate_traceable(
    x: Tensor,
    weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    layout: Layout,
    norm: Norm,
    row: int = 0,
    rotation: Callable[..., Tensor] = rotate_traceable,
) -> Tensor:
    """Return the rotation of x / rms(x) * weight, computed in float32 (float64 for float64) and rounded once.

    Args:
        x: Queries or keys.
        weight: Weight of the norm [dim], or None.
        cos: As `cos_sin` returns it.
        sin: As `cos_sin` returns it.
        layout: Pairing, first rotated feature, and dimension of the sequence.
        norm: eps, plus_one and rounding of the norm.
        row: Row of cos and sin that belongs to the first token.
        rotation: The rotation after the norm, with the arguments of `rotate_traceable`.

    >>> x, quarter = torch.tensor([[3.0, 4.0]]), (torch.zeros(1, 1), torch.ones(1, 1))
    >>> [round(v, 4) for v in norm_rotate_traceable(x, None, *quarter, Layout(True, 0, -2), Norm(1e-9))[0].tolist()]
    [-1.1314, 0.8485]
    """
    weight = factor(weight, x, norm)
    wide = x.to(weight.dtype)
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps)
    if norm.rounding & 1:
        scaled = scaled.to(x.dtype).to(weight.dtype)
    scaled = scaled * weight
    if norm.rounding & 2:
        scaled = scaled.to(x.dtype).to(weight.dtype)
    return rotation(scaled, cos, sin, layout, row).to(x.dtype)


def norm_rotate(
    tensors: Sequence[Tensor],
    weights: Sequence[Tensor | None],
    cos: Tensor,
    sin: Tensor,
    layout: Layout,
    norm: Norm,
    row: int = 0,
) -> list[Tensor]:
    """Return `norm_rotate_traceable` of each tensor with its weight.

    >>> x, quarter = torch.tensor([[3.0, 4.0]]), (torch.zeros(1, 1), torch.ones(1, 1))
    >>> len(norm_rotate([x, x], [None, None], *quarter, Layout(True, 0, -2), Norm(1e-9)))
    2
    """
    pairs = zip(tensors, weights, strict=True)
    return [norm_rotate_traceable(x, weight, cos, sin, layout, norm, row) for x, weight in pairs]


def norm_backward(rotated_back: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and of its factor.

    With n = x r, r = 1 / rms(x), g the gradient of the norm and w the factor: dx = r (g w - n mean(g w n)),
    dw = sum(g n). Rounding of the norm is ignored.

    Args:
        rotated_back: Gradient of the norm: the cotangent, rotated by the opposite angles.
        x: Input of the norm.
        weight: The factor w [dim].
        eps: Added to the mean square.

    >>> one = torch.ones(2)
    >>> grad, _ = norm_backward(torch.tensor([[1.0, 0.0]]), torch.tensor([[3.0, 4.0]]), one, 1e-9)
    >>> [round(v, 4) for v in grad[0].tolist()]  # x grad = 0: the result does not depend on the scale of x
    [0.181, -0.1358]
    """
    wide, gradient = x.to(weight.dtype), rotated_back.to(weight.dtype)
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    scaled, weighted = wide * inverse, gradient * weight
    of_x = inverse * (weighted - scaled * (weighted * scaled).mean(-1, keepdim=True))
    return of_x.to(x.dtype), (gradient * scaled).sum(dim=tuple(range(x.dim() - 1)))
