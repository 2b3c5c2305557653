"""RMSNorm and rotation in torch operations: differentiable in everything, and for compilers to fuse."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ropewalk.kernels.constructors import ones
from ropewalk.kernels.precision import working_dtype
from ropewalk.kernels.rotate.torch import rotate_traceable
from ropewalk.kernels.types import Layout, Norm

__all__ = ["factor", "norm_backward", "norm_rotate", "norm_rotate_traceable"]


def factor(weight: Tensor | None, x: Tensor, norm: Norm) -> Tensor:
    """What the scaled features are multiplied with, in the dtype in which x is worked: [dim].

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
) -> Tensor:
    """The rotation of x / rms(x) * weight, worked in float32 (float64 for float64) and rounded once.

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
    return rotate_traceable(scaled, cos, sin, layout, row).to(x.dtype)


def norm_rotate(
    tensors: Sequence[Tensor],
    weights: Sequence[Tensor | None],
    cos: Tensor,
    sin: Tensor,
    layout: Layout,
    norm: Norm,
    row: int = 0,
) -> list[Tensor]:
    """`norm_rotate_traceable` for each tensor and its weight.

    >>> x, quarter = torch.tensor([[3.0, 4.0]]), (torch.zeros(1, 1), torch.ones(1, 1))
    >>> len(norm_rotate([x, x], [None, None], *quarter, Layout(True, 0, -2), Norm(1e-9)))
    2
    """
    pairs = zip(tensors, weights, strict=True)
    return [norm_rotate_traceable(x, weight, cos, sin, layout, norm, row) for x, weight in pairs]


def norm_backward(rotated_back: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The gradients of x and of what it was multiplied with, from the gradient of the norm: the cotangent, turned back.

    With n = x r, r = 1 / rms(x), g the gradient and w the factor: dx = r (g w - n mean(g w n)), dw = sum(g n). Where
    the norm was rounded, the rounding is passed over.

    >>> one = torch.ones(2)
    >>> grad, _ = norm_backward(torch.tensor([[1.0, 0.0]]), torch.tensor([[3.0, 4.0]]), one, 1e-9)
    >>> [round(v, 4) for v in grad[0].tolist()]  # x grad = 0: the norm does not see a longer x
    [0.181, -0.1358]
    """
    wide, gradient = x.to(weight.dtype), rotated_back.to(weight.dtype)
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    scaled, weighted = wide * inverse, gradient * weight
    of_x = inverse * (weighted - scaled * (weighted * scaled).mean(-1, keepdim=True))
    return of_x.to(x.dtype), (gradient * scaled).sum(dim=tuple(range(x.dim() - 1)))
