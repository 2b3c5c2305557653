"""The rotation: the one place that decides which path serves a call.

What a call costs, apart from the rotation itself, on two Neoverse-N1 cores with torch 2.13 (2026-11): a direct call
2 us, an autograd.Function 15 to 22 us, a library op 21 to 58 us. So

- a call that needs nothing else goes directly to a kernel: `native`, in C, for plain CPU tensors; else `torch`;
- one that needs a gradient goes through the cheapest autograd.Function to the same kernel;
- a compiler gets a library op where the C kernel can serve, and else the formula in torch operations, which Inductor
  fuses. On the same machine q and k of (1, 2048, 32 and 8, 128) take Inductor's code 2.1 and 5.6 ms in float32 (half,
  interleaved) and 6.0 and 12.8 ms in bfloat16; what the op takes is in benchmarks/cpu.json, as "compiled";
- everything else that looks inside (export, functorch, forward-mode AD, tensor subclasses, gradients of cos and sin)
  gets the formula, which all of them understand.

Only plain tensors reach a kernel, so that none takes a pointer that is not there.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ropewalk.kernels import rotate_native, rotate_torch
from ropewalk.kernels.layout import Layout
from ropewalk.ops.plain import is_eager, is_exporting, is_plain, is_transformed, why_not_plain
from ropewalk.ops.registry import OPS, Kernel, cannot_serve

__all__ = ["kernel_for", "native_serves", "rotate", "rotate_", "rotate_directly", "rotate_plain", "takes_op"]


def rotate(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, layout: Layout, *, row: int = 0, conjugate: bool = False
) -> tuple[Tensor, ...]:
    """q, and k if there is one, turned by cos and sin as `cos_sin` gives them; the other way if `conjugate`.

    Row `row` of cos and sin is the first token's. Differentiable in everything, by every kind of derivative that torch
    has. The backward of a rotation is the rotation the other way.

    >>> quarter = torch.zeros(1, 1), torch.ones(1, 1)
    >>> rotate(torch.tensor([[1.0, 0.0]]), None, *quarter, Layout(True, 0, -2))[0].tolist()
    [[0.0, 1.0]]
    """
    if not is_plain(q, k, cos, sin) or (torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad)):
        return _traced((q,) if k is None else (q, k), cos, sin, layout, row, conjugate)
    return rotate_plain(q, k, cos, sin, layout, kernel_for(q, layout, k), row, conjugate)


def rotate_directly(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, layout: Layout, row: int, rows: int, head_dim: int
) -> tuple[Tensor, ...] | None:
    """`rotate` for a plain eager call on tensors that the C kernel serves as they are; else None, and nothing is done.

    It asks in two microseconds what `is_plain` and the checks of a module ask in ten. cos and sin are plain, need no
    gradient, and have `rows` rows for these tokens from `row` on.

    >>> table = torch.ones(3, 2)
    >>> rotate_directly(torch.ones(3, 4), None, table, table, Layout(True, 0, -2), 0, 3, 5)  # it has no five features
    """
    if layout.backend == "torch" or not is_eager():
        return None
    how = cos, sin, layout, row, rows, head_dim
    if torch.is_grad_enabled():
        if not rotate_native.rotate_if_ready(q, k, *how, act=False):
            return None
        if q.requires_grad or (k is not None and k.requires_grad):
            return rotate_plain(q, k, cos, sin, layout, row=row)
    return rotate_native.rotate_if_ready(q, k, *how, act=True)  # pyright: ignore[reportReturnType]


def rotate_plain(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    layout: Layout,
    kernel: Kernel = rotate_native.rotate,
    row: int = 0,
    conjugate: bool = False,
) -> tuple[Tensor, ...]:
    """`rotate` for plain tensors in an eager call, by a kernel that serves them. cos and sin get no gradient.

    >>> quarter = torch.zeros(1, 1), torch.ones(1, 1)
    >>> rotate_plain(torch.tensor([[1.0, 0.0]]), None, *quarter, Layout(True, 0, -2), rotate_torch.rotate)
    (tensor([[0., 1.]]),)
    """
    if torch.is_grad_enabled() and (q.requires_grad or (k is not None and k.requires_grad)):
        if k is not None and q.requires_grad != k.requires_grad:
            # One Function for both would give the one that needs no gradient a graph.
            return tuple(rotate_plain(x, None, cos, sin, layout, kernel, row, conjugate)[0] for x in (q, k))
        return _Rotate.apply(q, k, cos, sin, layout, kernel, row, conjugate)  # pyright: ignore[reportReturnType]
    return kernel(q, k, cos, sin, layout, row, conjugate)


def rotate_(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, layout: Layout, *, row: int = 0) -> bool:
    """Turns q and k where they lie, if a kernel can do that to them; whether it did.

    >>> x = torch.tensor([[1.0, 0.0]])
    >>> done = rotate_(x, None, torch.zeros(1, 1), torch.ones(1, 1), Layout(True, 0, -2))
    >>> x.tolist() == ([[0.0, 1.0]] if done else [[1.0, 0.0]])
    True
    """
    both = (q,) if k is None else (q, k)
    needs_graph = torch.is_grad_enabled() and any(x.requires_grad for x in (*both, cos, sin))
    if needs_graph or not is_plain(q, k, cos, sin) or kernel_for(q, layout, k) is not rotate_native.rotate:
        return False
    rotate_native.rotate(q, k, cos, sin, layout, row, in_place=True)
    for x in both:
        # What autograd saved of x before this is no longer there: it must say so.
        if not x.is_inference():
            torch.autograd.graph.increment_version(x)
    return True


def kernel_for(x: Tensor, layout: Layout, other: Tensor | None = None) -> Kernel:
    """The backend for plain tensors like x and the other: the one that was asked for, else the fastest that can serve.

    >>> kernel_for(torch.ones(1), Layout(True, 0, -2, "torch")) is rotate_torch.rotate
    True
    """
    if layout.backend is not None:
        if layout.backend == "native" and not native_serves(x, other):
            raise cannot_serve("native", f"{x.dtype} of {x.dim()} dimensions on {x.device}")
        return OPS["rotate"].backends[layout.backend]
    return rotate_native.rotate if native_serves(x, other) else rotate_torch.rotate


def native_serves(x: Tensor, other: Tensor | None = None) -> bool:
    """Whether the C kernel is there, and knows the device, the dtype and as many dimensions.

    >>> native_serves(torch.ones(1, dtype=torch.float8_e5m2))
    False
    """
    served = x.is_cpu and rotate_native.MISSING is None and x.dtype in rotate_native.DTYPES
    return served and x.dim() <= rotate_native.MOST_DIMS and (other is None or other.dim() <= rotate_native.MOST_DIMS)


def _traced(
    both: tuple[Tensor, ...], cos: Tensor, sin: Tensor, layout: Layout, row: int, conjugate: bool
) -> tuple[Tensor, ...]:
    """The rotation for everything that is not a plain eager call."""
    if layout.backend != "torch" and takes_op(both, cos, sin, layout):
        if row or cos.shape[-2] != both[0].shape[layout.seq_dim]:
            cos, sin = (table.narrow(-2, row, both[0].shape[layout.seq_dim]) for table in (cos, sin))
        how = cos, sin, layout.interleaved, layout.start, layout.seq_dim, conjugate
        if torch.is_grad_enabled() and len({x.requires_grad for x in both}) > 1:
            # One op for both would give the one that needs no gradient a graph.
            return tuple(torch.ops.ropewalk.rotate([x], *how)[0] for x in both)
        return tuple(torch.ops.ropewalk.rotate(both, *how))
    if layout.backend == "native":
        raise cannot_serve("native", why_not_plain(*both, cos, sin) or "gradients of cos and sin")
    return tuple(rotate_torch.rotate_traceable(x, cos, sin, layout, row, conjugate) for x in both)


def takes_op(both: tuple[Tensor, ...], cos: Tensor, sin: Tensor, layout: Layout) -> bool:
    """Whether a compiler is to see the C kernel, as a library op. What an exporter writes must not need ropewalk.

    For one token the call of an op takes longer than the rotation, and Inductor's code is faster.

    >>> table = torch.ones(3, 2)
    >>> takes_op((torch.ones(3, 4),), table, table, Layout(True, 0, -2))  # nothing is compiled here
    False
    """
    return (
        torch.compiler.is_compiling()
        and not is_exporting()
        and not is_transformed()
        and native_serves(*both)
        and not (cos.requires_grad or sin.requires_grad)
        and all(type(x) in (Tensor, torch.nn.Parameter) for x in (*both, cos, sin))
        and (layout.backend == "native" or not _is_one(both[0].shape[layout.seq_dim]))
    )


def _is_one(length: Any) -> bool:
    """Whether a compiler knows the length to be 1. One that depends on data is asked nothing."""
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(length == 1)


class _Rotate(torch.autograd.Function):
    """The rotation of one or two tensors with the opposite rotation as its backward. cos and sin get no gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        layout: Layout,
        kernel: Kernel,
        row: int,
        conjugate: bool,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(cos, sin)
        ctx.how = layout, row, conjugate
        return kernel(q, k, cos, sin, layout, row, conjugate)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        layout, row, conjugate = ctx.how
        there = [g for g in cotangents if g is not None]
        if not there:
            return (None,) * 8
        q, k = (there[0], None) if len(there) == 1 else there
        back = iter(rotate(q, k, cos, sin, layout, row=row, conjugate=not conjugate))
        grads = [None if g is None else next(back) for g in cotangents]
        return (*grads, *[None] * (8 - len(grads)))


@torch.library.custom_op("ropewalk::rotate", mutates_args=())
def _rotate_op(
    both: Sequence[Tensor],
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    start: int,
    seq_dim: int,
    conjugate: bool,
) -> list[Tensor]:
    layout = Layout(interleaved, start, seq_dim)
    q, k = (both[0], None) if len(both) == 1 else both
    return list(kernel_for(q, layout, k)(q, k, cos, sin, layout, 0, conjugate))


@_rotate_op.register_fake
def _(both: Sequence[Tensor], cos: Tensor, sin: Tensor, *how: Any) -> list[Tensor]:
    return [torch.empty_like(x) for x in both]


def _save_rotation(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    _, cos, sin, *ctx.how = inputs
    ctx.save_for_backward(cos, sin)


def _rotation_backward(ctx: Any, cotangents: list[Tensor]) -> tuple[Any, ...]:
    *how, conjugate = ctx.how
    back = torch.ops.ropewalk.rotate(cotangents, *ctx.saved_tensors, *how, not conjugate)
    return back, *[None] * 6


_rotate_op.register_autograd(_rotation_backward, setup_context=_save_rotation)
