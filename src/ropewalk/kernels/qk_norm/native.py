"""RMSNorm and rotation by the C extension. The backward uses its rotation and torch operations."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ropewalk.kernels.native.extension import NATIVE
from ropewalk.kernels.qk_norm.torch import factor, norm_backward
from ropewalk.kernels.rotate.native import rotate
from ropewalk.kernels.types import Layout, Norm

__all__ = ["norm_rotate", "norm_rotate_backward"]


def norm_rotate(
    tensors: Sequence[Tensor],
    weights: Sequence[Tensor | None],
    cos: Tensor,
    sin: Tensor,
    layout: Layout,
    norm: Norm,
    row: int = 0,
) -> tuple[Tensor, ...]:
    """Return the rotation of x / rms(x) * weight for one or two tensors, in one call.

    >>> x, quarter = torch.tensor([[3.0, 4.0]]), (torch.zeros(1, 1), torch.ones(1, 1))
    >>> y = [[-1.1314, 0.8485]]
    >>> if NATIVE is not None:
    ...     y = norm_rotate([x], [None], *quarter, Layout(True, 0, -2), Norm(1e-9))[0].tolist()
    >>> [round(v, 4) for v in y[0]]
    [-1.1314, 0.8485]
    """
    factors = [factor(weight, x, norm).contiguous() for weight, x in zip(weights, tensors, strict=True)]
    q, k = tensors if len(tensors) == 2 else (tensors[0], None)
    q_factor, k_factor = factors if len(factors) == 2 else (factors[0], None)
    options = row, layout.start, layout.seq_dim, layout.interleaved, False, torch.get_num_threads()
    norms = q_factor, k_factor, norm.eps, norm.rounding
    return NATIVE.rotate(q, k, None, None, cos, sin, *options, *norms)  # pyright: ignore[reportOptionalMemberAccess]


def norm_rotate_backward(
    cotangents: Sequence[Tensor],
    tensors: Sequence[Tensor],
    weights: Sequence[Tensor | None],
    learns: bool,
    cos: Tensor,
    sin: Tensor,
    layout: Layout,
    norm: Norm,
    row: int = 0,
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Return the gradients of the tensors, and of their weights if `learns`. Rounding of the norm is ignored.

    >>> x, g = torch.tensor([[[3.0, 4.0]], [[1.0, 0.0]]])
    >>> identity = torch.ones(1, 1), torch.zeros(1, 1)
    >>> gradient = [[0.181, -0.1358]]
    >>> if NATIVE is not None:
    ...     (gradient,), _ = norm_rotate_backward([g], [x], [None], False, *identity, Layout(True, 0, -2), Norm(1e-9))
    ...     gradient = gradient.tolist()
    >>> [round(v, 4) for v in gradient[0]]  # x dx = 0: the result does not depend on the scale of x
    [0.181, -0.1358]
    """
    gradients: list[Tensor] = []
    weight_gradients: list[Tensor | None] = []
    for cotangent, x, weight in zip(cotangents, tensors, weights, strict=True):
        (back,) = rotate(cotangent.to(cos.dtype), None, cos, sin, layout, row, conjugate=True)
        of_x, of_factor = norm_backward(back, x, factor(weight, x, norm), norm.eps)
        gradients.append(of_x)
        weight_gradients.append(of_factor.to(weight.dtype) if learns and weight is not None else None)
    return gradients, weight_gradients
