"""RMSNorm and rotation of q and k: one pass in C, or the formula."""

from typing import Any

import torch
from torch import Tensor

from ropewalk.kernels import rotate_native
from ropewalk.kernels.layout import Layout
from ropewalk.kernels.qk_norm_torch import Norm, factor, norm_rotate, norm_rotate_backward
from ropewalk.ops.plain import is_plain, why_not_plain
from ropewalk.ops.registry import cannot_serve
from ropewalk.ops.rotation import native_serves, rotate, takes_op

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

    The paths are those of the rotation; backward turns back by the rotation's kernel and goes through the norm in torch
    operations.

    >>> x, quarter = torch.tensor([[3.0, 4.0]]), (torch.zeros(1, 1), torch.ones(1, 1))
    >>> y, _ = qk_norm_rotate(x, x, None, None, *quarter, Layout(True, 0, -2), Norm(1e-9))
    >>> [round(v, 4) for v in y[0].tolist()]
    [-1.1314, 0.8485]
    """
    given = (q, k, q_weight, k_weight, cos, sin)
    grad = torch.is_grad_enabled()
    tables_learn = grad and (cos.requires_grad or sin.requires_grad)
    if layout.backend != "torch" and takes_op((q, k), cos, sin, layout):
        seq = q.shape[layout.seq_dim]
        cos, sin = (table.narrow(-2, row, seq) if row or table.shape[-2] != seq else table for table in (cos, sin))
        how = layout.interleaved, layout.start, layout.seq_dim, norm.eps, norm.rounding()
        op = torch.ops.ropewalk.norm_rotate
        return op(q, factor(q_weight, q, norm), cos, sin, *how), op(k, factor(k_weight, k, norm), cos, sin, *how)
    if layout.backend == "torch" or tables_learn or not is_plain(*given) or not native_serves(q, k):
        if layout.backend == "native":
            why = (
                "gradients of cos and sin"
                if tables_learn
                else why_not_plain(*given) or f"{q.dim()} and {k.dim()} dimensions of {q.dtype} on {q.device}"
            )
            raise cannot_serve("native", why)
        return (
            norm_rotate(q, q_weight, cos, sin, layout, norm, row),
            norm_rotate(k, k_weight, cos, sin, layout, norm, row),
        )
    factors = factor(q_weight, q, norm), factor(k_weight, k, norm)
    if grad and any(x.requires_grad for x in (q, k, *factors)):
        both = zip((q, k), factors, strict=True)
        return tuple(_NormRotate.apply(x, weight, cos, sin, layout, norm, row) for x, weight in both)  # pyright: ignore[reportReturnType]
    return rotate_native.norm_rotate(  # pyright: ignore[reportReturnType]
        q, k, *factors, cos, sin, layout, norm.eps, norm.rounding(), row
    )


class _NormRotate(torch.autograd.Function):
    """One tensor, by the C kernel. Backward turns the cotangent back in the working dtype, then through the norm."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, layout: Layout, norm: Norm, row: int
    ) -> Tensor:
        ctx.save_for_backward(x, weight, cos, sin)
        ctx.how = layout, norm, row
        how = cos, sin, layout, norm.eps, norm.rounding(), row
        return rotate_native.norm_rotate(x, None, weight, None, *how)[0]

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, cos, sin = ctx.saved_tensors
        layout, norm, row = ctx.how
        (turned,) = rotate(cotangents[0].to(cos.dtype), None, cos, sin, layout, row=row, conjugate=True)
        return *norm_rotate_backward(turned, x, weight, norm.eps), *[None] * 5


@torch.library.custom_op("ropewalk::norm_rotate", mutates_args=())
def _norm_rotate_op(
    x: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    start: int,
    seq_dim: int,
    eps: float,
    rounding: int,
) -> Tensor:
    layout = Layout(interleaved, start, seq_dim)
    return rotate_native.norm_rotate(x, None, weight, None, cos, sin, layout, eps, rounding)[0]


@_norm_rotate_op.register_fake
def _(x: Tensor, *how: Any) -> Tensor:
    return torch.empty_like(x)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, cos, sin, *ctx.how = inputs
    ctx.save_for_backward(x, weight, cos, sin)


def _backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, cos, sin = ctx.saved_tensors
    *layout, eps, _ = ctx.how
    (turned,) = torch.ops.ropewalk.rotate([cotangent.to(cos.dtype)], cos, sin, *layout, True)
    return *norm_rotate_backward(turned, x, weight, eps), *[None] * 7


_norm_rotate_op.register_autograd(_backward, setup_context=_save)
