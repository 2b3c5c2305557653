"""RMSNorm and rotation of q and k: one pass in C or on a GPU, or the formula."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ropewalk.kernels.backends import triton as gpu
from ropewalk.kernels.native import extension as rotate_native
from ropewalk.kernels.qk_norm.torch import Norm, factor, norm_rotate, norm_rotate_backward
from ropewalk.kernels.torch_internals import is_plain, why_not_plain
from ropewalk.kernels.types import Layout
from ropewalk.ops.registry import cannot_serve
from ropewalk.ops.rotation import by_formula, fast_kernel, rotate, takes_op

__all__ = ["qk_norm_rotate"]

Both = Sequence[Tensor]


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

    The paths are those of the rotation. Backward is one pass on a GPU; on the CPU it turns back by the rotation's
    kernel and goes through the norm in torch operations.

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
        factors = factor(q_weight, q, norm), factor(k_weight, k, norm)
        how = layout.interleaved, layout.start, layout.seq_dim, layout.backend, norm.eps, norm.rounding()
        return tuple(torch.ops.ropewalk.norm_rotate((q, k), factors, cos, sin, *how))  # pyright: ignore[reportReturnType]
    name = None if tables_learn or not is_plain(*given) else fast_kernel(q, layout, k)
    if name is None:
        if layout.backend not in (None, "torch"):
            why = (
                "gradients of cos and sin"
                if tables_learn
                else why_not_plain(*given) or f"{q.dim()} and {k.dim()} dimensions of {q.dtype} on {q.device}"
            )
            raise cannot_serve(layout.backend, why)
        return (
            norm_rotate(q, q_weight, cos, sin, layout, norm, row),
            norm_rotate(k, k_weight, cos, sin, layout, norm, row),
        )
    if name == "triton":
        sides = (q, q_weight), (k, k_weight)
        needs = [grad and any(x is not None and x.requires_grad for x in side) for side in sides]
        if all(needs):
            return _NormRotateGpu.apply(q, k, q_weight, k_weight, cos, sin, layout, norm, row)  # pyright: ignore[reportReturnType]
        if any(needs):
            # One Function for both would give the one that needs no gradient a graph.
            return tuple(_NormRotateGpu.apply(*side, cos, sin, layout, norm, row)[0] for side in sides)  # pyright: ignore
        how = layout, (norm.eps, norm.plus_one, norm.rounding()), row
        return tuple(gpu.kernels().norm_rotate((q, k), (q_weight, k_weight), cos, sin, *how))  # pyright: ignore[reportReturnType]
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


class _NormRotateGpu(torch.autograd.Function):
    """One or two tensors, by the kernels of a GPU: the tensors, as many weights, cos, sin, layout, norm and row."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, ...]:
        *tensors, layout, norm, row = given
        count = (len(tensors) - 2) // 2
        ctx.save_for_backward(*tensors)
        ctx.how = count, layout, norm, row
        how = layout, (norm.eps, norm.plus_one, norm.rounding()), row
        return tuple(gpu.kernels().norm_rotate(tensors[:count], tensors[count:-2], *tensors[-2:], *how))

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, cos, sin = ctx.saved_tensors
        count, layout, norm, row = ctx.how
        both, weights = tensors[:count], tensors[count:]
        if torch.is_grad_enabled() or not is_plain(*cotangents, *both, cos, sin):

            def formula(*x: Any) -> list[Tensor]:
                pairs = zip(x[:count], x[count:], strict=True)
                return [norm_rotate(y, weight, cos, sin, layout, norm, row) for y, weight in pairs]

            return *by_formula(formula, tensors, cotangents), *[None] * 5
        learns = any(ctx.needs_input_grad[count : 2 * count])
        how = layout, (norm.eps, norm.plus_one, 0), row
        of_x, of_weights = gpu.kernels().norm_rotate_backward(cotangents, both, weights, learns, cos, sin, *how)
        return *of_x, *of_weights, *[None] * 5


@torch.library.custom_op("ropewalk::norm_rotate", mutates_args=())
def _norm_rotate_op(
    both: Sequence[Tensor],
    factors: Sequence[Tensor],
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    start: int,
    seq_dim: int,
    backend: str | None,
    eps: float,
    rounding: int,
) -> list[Tensor]:
    layout = Layout(interleaved, start, seq_dim, backend)
    if fast_kernel(both[0], layout, both[1]) == "triton":
        return gpu.kernels().norm_rotate(both, factors, cos, sin, layout, (eps, False, rounding))
    (q, k), (q_factor, k_factor) = both, factors
    return list(rotate_native.norm_rotate(q, k, q_factor, k_factor, cos, sin, layout, eps, rounding))


@_norm_rotate_op.register_fake
def _(both: Both, *how: Any) -> list[Tensor]:
    return [torch.empty_like(x) for x in both]


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    both, factors, cos, sin, *ctx.how = inputs
    ctx.save_for_backward(*both, *factors, cos, sin)


def _backward(ctx: Any, cotangents: list[Tensor]) -> tuple[Any, ...]:
    *saved, cos, sin = ctx.saved_tensors
    *how, _ = ctx.how
    grads = torch.ops.ropewalk.norm_rotate_backward(cotangents, saved[:2], saved[2:], cos, sin, *how)
    return grads[:2], grads[2:], *[None] * 8


_norm_rotate_op.register_autograd(_backward, setup_context=_save)


@torch.library.custom_op("ropewalk::norm_rotate_backward", mutates_args=())
def _norm_rotate_backward_op(
    cotangents: Sequence[Tensor],
    both: Sequence[Tensor],
    factors: Sequence[Tensor],
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    start: int,
    seq_dim: int,
    backend: str | None,
    eps: float,
) -> list[Tensor]:
    layout = Layout(interleaved, start, seq_dim, backend)
    if fast_kernel(both[0], layout, both[1]) == "triton":
        of_x, of_weights = gpu.kernels().norm_rotate_backward(
            cotangents, both, factors, True, cos, sin, layout, (eps, False, 0)
        )
        return [*of_x, *(weight for weight in of_weights if weight is not None)]
    turned = [rotate(g.to(cos.dtype), None, cos, sin, layout, conjugate=True)[0] for g in cotangents]
    found = [norm_rotate_backward(g, x, w, eps) for g, x, w in zip(turned, both, factors, strict=True)]
    # Compilers count on what the fake kernel says: gradients that lie in memory as x does.
    of_both = [torch.empty_like(x).copy_(of_x) for x, (of_x, _) in zip(both, found, strict=True)]
    return of_both + [of_weight for _, of_weight in found]


@_norm_rotate_backward_op.register_fake
def _(cotangents: Both, both: Both, factors: Both, *how: Any) -> list[Tensor]:
    return [torch.empty_like(x) for x in (*both, *factors)]
