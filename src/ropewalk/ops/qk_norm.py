"""RMSNorm and rotation of q and k: one pass in C, or the formula."""

from typing import Any

import torch
from torch import Tensor

from ropewalk.kernels import rotate_native
from ropewalk.kernels.layout import Layout
from ropewalk.kernels.qk_norm_torch import Norm, factor, norm_rotate, norm_rotate_backward
from ropewalk.ops.plain import is_plain
from ropewalk.ops.registry import cannot_serve
from ropewalk.ops.rotation import native_serves, rotate

__all__ = ["qk_norm_rotate"]


def qk_norm_rotate(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    layout: Layout,
    norm: Norm,
    *,
    row: int = 0,
) -> tuple[Tensor, Tensor]:
    """q / rms(q) * weight and the same of k, turned by cos and sin. Differentiable in everything.

    A compiler gets the formula, which Inductor fuses with what stands before it.

    >>> x, quarter = torch.tensor([[3.0, 4.0]]), (torch.zeros(1, 1), torch.ones(1, 1))
    >>> y, _ = qk_norm_rotate(x, x, None, None, *quarter, Layout(True, 0, -2), Norm(1e-9))
    >>> [round(v, 4) for v in y[0].tolist()]
    [-1.1314, 0.8485]
    """
    given = (q, k, q_weight, k_weight, cos, sin)
    grad = torch.is_grad_enabled()
    plain = is_plain(*given) and native_serves(q) and not (grad and (cos.requires_grad or sin.requires_grad))
    if not plain or layout.backend == "torch":
        if layout.backend == "native":
            raise cannot_serve("native", "a transform, a compiler, a tensor subclass, or gradients of cos and sin")
        return (
            norm_rotate(q, q_weight, cos, sin, layout, norm, row),
            norm_rotate(k, k_weight, cos, sin, layout, norm, row),
        )
    if grad and any(x is not None and x.requires_grad for x in given):
        return (
            _NormRotate.apply(q, q_weight, cos, sin, layout, norm, row),
            _NormRotate.apply(k, k_weight, cos, sin, layout, norm, row),
        )  # pyright: ignore[reportReturnType]
    return rotate_native.norm_rotate(  # pyright: ignore[reportReturnType]
        q, k, factor(q_weight, q, norm), factor(k_weight, k, norm), cos, sin, layout, norm, row
    )


class _NormRotate(torch.autograd.Function):
    """One tensor, by the C kernel. Backward turns the cotangent back in the working dtype, then through the norm."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, layout: Layout, norm: Norm, row: int
    ) -> Tensor:
        ctx.save_for_backward(x, weight, cos, sin)
        ctx.how = layout, norm, row
        return rotate_native.norm_rotate(x, None, factor(weight, x, norm), None, cos, sin, layout, norm, row)[0]

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, cos, sin = ctx.saved_tensors
        layout, norm, row = ctx.how
        (turned,) = rotate(cotangents[0].to(cos.dtype), None, cos, sin, layout, row=row, conjugate=True)
        return *norm_rotate_backward(turned, x, weight, norm), *[None] * 5
