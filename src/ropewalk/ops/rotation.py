"""The rotation: the one place that decides which path serves a call.

What a call costs, apart from the rotation itself, on two Neoverse-N1 cores with torch 2.13 (2026-11): a direct call
2 us, an autograd.Function 15 to 22 us, a library op 21 to 58 us. So

- a call that needs nothing else goes directly to a kernel: `native`, in C, for plain CPU tensors; `triton` for those of
  a GPU; else `torch`;
- one that needs a gradient goes through the cheapest autograd.Function to the same kernel;
- a compiler gets a library op where one of these kernels can serve, and else the formula in torch operations, which
  Inductor fuses. On the same machine q and k of (1, 2048, 32 and 8, 128) take Inductor's code 2.1 and 5.6 ms in
  float32 (half, interleaved) and 6.0 and 12.8 ms in bfloat16; what the op takes is in benchmarks/cpu.json, as
  "compiled", and what both take on an H200 in benchmarks/gpu.json;
- everything else that looks inside (export, functorch, forward-mode AD, tensor subclasses, gradients of cos and sin on
  the CPU) gets the formula, which all of them understand.

Only plain tensors reach a kernel, so that none takes a pointer that is not there.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ropewalk.kernels.backends import triton as gpu
from ropewalk.kernels.native import extension as rotate_native
from ropewalk.kernels.rotate import torch as rotate_torch
from ropewalk.kernels.torch_internals import is_eager, is_exporting, is_plain, is_transformed, why_not_plain
from ropewalk.kernels.types import Layout
from ropewalk.ops.registry import Kernel, cannot_serve

__all__ = [
    "by_formula",
    "fast_kernel",
    "kernel_for",
    "rotate",
    "rotate_",
    "rotate_directly",
    "rotate_plain",
    "takes_op",
]


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
    if not is_plain(q, k, cos, sin):
        return _traced((q,) if k is None else (q, k), cos, sin, layout, row, conjugate)
    if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        if fast_kernel(q, layout, k) == "triton":
            return _RotateLearned.apply(q, k, cos, sin, layout, row, conjugate)  # pyright: ignore[reportReturnType]
        return _traced((q,) if k is None else (q, k), cos, sin, layout, row, conjugate)
    return rotate_plain(q, k, cos, sin, layout, kernel_for(q, layout, k), row, conjugate)


def rotate_directly(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, layout: Layout, row: int, rows: int, head_dim: int
) -> tuple[Tensor, ...] | None:
    """`rotate` for a plain eager call on tensors that a kernel serves as they are; else None, and nothing is done.

    It asks in two microseconds what `is_plain` and the checks of a module ask in ten. cos and sin are plain, need no
    gradient, and have `rows` rows for these tokens from `row` on.

    >>> table = torch.ones(3, 2)
    >>> rotate_directly(torch.ones(3, 4), None, table, table, Layout(True, 0, -2), 0, 3, 5)  # it has no five features
    """
    if layout.backend not in (None, "triton" if cos.is_cuda else "native") or not is_eager():
        return None
    if cos.is_cuda:
        # The C kernel sees by itself that a row lies before the table.
        if row < 0:
            return None
        return _rotate_directly_on_gpu(q, k, cos, sin, layout, row, rows, head_dim)
    how = cos, sin, layout, row, rows, head_dim
    if torch.is_grad_enabled():
        if not rotate_native.rotate_if_ready(q, k, *how, act=False):
            return None
        if q.requires_grad or (k is not None and k.requires_grad):
            return rotate_plain(q, k, cos, sin, layout, row=row)
    return rotate_native.rotate_if_ready(q, k, *how, act=True)  # pyright: ignore[reportReturnType]


def _rotate_directly_on_gpu(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, layout: Layout, row: int, rows: int, head_dim: int
) -> tuple[Tensor, ...] | None:
    """The same for tensors of a GPU, on which it is asked here what the C kernel asks by itself."""
    seq_dim, device = layout.seq_dim, cos.device
    if type(q) is not Tensor or q.device != device or q.dtype not in gpu.DTYPES or _is_masked(q):
        return None
    shape, dtype = q.shape, q.dtype
    if len(shape) < -seq_dim or shape[-1] != head_dim or not 0 < shape[seq_dim] <= rows:
        return None
    if k is not None:
        if type(k) is not Tensor or k.device != device or k.dtype != dtype or _is_masked(k):
            return None
        other = k.shape
        if len(other) < -seq_dim or other[-1] != head_dim or other[seq_dim] != shape[seq_dim]:
            return None
    if (dtype == torch.float64) != (cos.dtype == torch.float64) or not gpu.INSTALLED:
        return None
    # What a graph reads must outlive it, and the cache lets go of what it holds.
    if torch.cuda.is_current_stream_capturing():
        return None
    return rotate_plain(q, k, cos, sin, layout, gpu.kernels().rotate, row)


def _is_masked(x: Tensor) -> bool:
    return any(masked(x) for masked in rotate_native.MASKS)


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
    if needs_graph or not is_plain(q, k, cos, sin) or fast_kernel(q, layout, k) is None:
        return False
    kernel_for(q, layout, k)(q, k, cos, sin, layout, row, in_place=True)
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
    name = fast_kernel(x, layout, other)
    if name is None and layout.backend not in (None, "torch"):
        raise cannot_serve(layout.backend, f"{x.dtype} of {x.dim()} dimensions on {x.device}")
    if name == "native":
        return rotate_native.rotate
    return rotate_torch.rotate if name is None else gpu.kernels().rotate


def fast_kernel(x: Tensor, layout: Layout, other: Tensor | None = None) -> str | None:
    """The kernel that serves x: "native" or "triton", if it is there, was not ruled out, and knows device and dtype.

    >>> fast_kernel(torch.ones(1, dtype=torch.float8_e5m2), Layout(True, 0, -2)) is None
    True
    """
    asked = layout.backend
    if x.is_cuda:
        served = asked in (None, "triton") and gpu.INSTALLED and x.dtype in gpu.DTYPES
        return "triton" if served else None
    if not x.is_cpu or asked == "torch":
        return None
    if asked == "triton":
        return "triton" if gpu.INTERPRETED and gpu.INSTALLED and x.dtype in gpu.DTYPES else None
    served = rotate_native.MISSING is None and x.dtype in rotate_native.DTYPES
    few = x.dim() <= rotate_native.MOST_DIMS and (other is None or other.dim() <= rotate_native.MOST_DIMS)
    return "native" if served and few else None


def _traced(
    both: tuple[Tensor, ...], cos: Tensor, sin: Tensor, layout: Layout, row: int, conjugate: bool
) -> tuple[Tensor, ...]:
    """The rotation for everything that is not a plain eager call."""
    if layout.backend != "torch" and takes_op(both, cos, sin, layout):
        if row or cos.shape[-2] != both[0].shape[layout.seq_dim]:
            cos, sin = (table.narrow(-2, row, both[0].shape[layout.seq_dim]) for table in (cos, sin))
        how = cos, sin, layout.interleaved, layout.start, layout.seq_dim, layout.backend, conjugate
        if torch.is_grad_enabled() and len({x.requires_grad for x in both}) > 1:
            # One op for both would give the one that needs no gradient a graph.
            return tuple(torch.ops.ropewalk.rotate([x], *how)[0] for x in both)
        return tuple(torch.ops.ropewalk.rotate(both, *how))
    if layout.backend not in (None, "torch"):
        raise cannot_serve(layout.backend, why_not_plain(*both, cos, sin) or "gradients of cos and sin")
    return tuple(rotate_torch.rotate_traceable(x, cos, sin, layout, row, conjugate) for x in both)


def takes_op(both: tuple[Tensor, ...], cos: Tensor, sin: Tensor, layout: Layout) -> bool:
    """Whether a compiler is to see a kernel, as a library op. What an exporter writes must not need ropewalk.

    For one token the call of an op takes longer than the rotation, and Inductor's code is faster.

    >>> table = torch.ones(3, 2)
    >>> takes_op((torch.ones(3, 4),), table, table, Layout(True, 0, -2))  # nothing is compiled here
    False
    """
    return (
        torch.compiler.is_compiling()
        and not is_exporting()
        and not is_transformed()
        and fast_kernel(both[0], layout, both[-1]) is not None
        and not (cos.requires_grad or sin.requires_grad)
        and all(type(x) in (Tensor, torch.nn.Parameter) for x in (*both, cos, sin))
        and (layout.backend is not None or not _is_one(both[0].shape[layout.seq_dim]))
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
        turned = kernel(q, k, cos, sin, layout, row, conjugate)
        ctx.how = layout, row, conjugate, [y.stride() for y in turned]
        return turned

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        layout, row, conjugate, strides = ctx.how
        grads = _turned_back(cotangents, strides, cos, sin, layout, row, conjugate)
        return (*grads, *[None] * (8 - len(grads)))


def _turned_back(
    cotangents: Sequence[Tensor | None],
    strides: Sequence[tuple[int, ...]],
    cos: Tensor,
    sin: Tensor,
    layout: Layout,
    row: int,
    conjugate: bool,
) -> list[Tensor | None]:
    """The cotangents of a rotation, turned the other way, into memory that lies as the rotated tensors did.

    What is then added to a gradient, or multiplied with a weight, lies as autograd expects it.
    """
    there = [(g, stride) for g, stride in zip(cotangents, strides, strict=True) if g is not None]
    if not there:
        return [None for _ in cotangents]
    given = [g for g, _ in there]
    q, k = given[0], given[1] if len(given) == 2 else None
    plain = is_plain(*given, cos, sin)
    if not plain:
        # Batched cotangents, for one: whatever backend was asked for, these have the formula alone.
        layout = replace(layout, backend=None)
    if plain and not torch.is_grad_enabled() and fast_kernel(q, layout, k) == "triton":
        out = [g.new_empty_strided(g.shape, stride) for g, stride in there]
        turned = gpu.kernels().rotate(q, k, cos, sin, layout, row, not conjugate, out=out)
    else:
        turned = rotate(q, k, cos, sin, layout, row=row, conjugate=not conjugate)
    back = iter(turned)
    return [None if g is None else next(back) for g in cotangents]


def by_formula(
    function: Callable[..., Sequence[Tensor]], given: Sequence[Tensor | None], cotangents: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """The gradients of a function, each argument's own, by operations that can be differentiated again.

    >>> x = torch.tensor(3.0, requires_grad=True)
    >>> by_formula(lambda a, b: [a * b], [x, x], [torch.tensor(1.0)])[0].item()  # of a alone, though b is x too
    3.0
    """
    with torch.enable_grad():
        # An alias for each argument: of a tensor that is given twice, or made from another, each gets its own share.
        aliases = [None if x is None else x.view_as(x) for x in given]
        results = function(*aliases)
    there = [(y, g) for y, g in zip(results, cotangents, strict=True) if g is not None]
    asked = [x for x in aliases if x is not None and x.requires_grad]
    outputs, seeds = zip(*there, strict=True)
    found = iter(torch.autograd.grad(outputs, asked, seeds, create_graph=True, allow_unused=True))
    return [next(found) if x is not None and x.requires_grad else None for x in aliases]


class _RotateLearned(torch.autograd.Function):
    """The rotation by a GPU's kernel with gradients for cos and sin too."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, layout: Layout, row: int, conjugate: bool
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, cos, sin)
        turned = gpu.kernels().rotate(q, k, cos, sin, layout, row, conjugate)
        ctx.how = layout, row, conjugate, [y.stride() for y in turned]
        return turned

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, cos, sin = ctx.saved_tensors
        layout, row, conjugate, strides = ctx.how
        both = [q] if k is None else [q, k]
        if all(g is None for g in cotangents):
            return (None,) * 7
        if torch.is_grad_enabled() or not is_plain(*cotangents, cos, sin):
            # A derivative of this derivative is wanted: the formula has all of them.

            def formula(*x: Tensor) -> list[Tensor]:
                *tensors, c, d = x
                return [rotate_torch.rotate_traceable(y, c, d, layout, row, conjugate) for y in tensors]

            grads = by_formula(formula, [*both, cos, sin], cotangents)
            return (*grads[: len(both)], *[None] * (2 - len(both)), *grads[len(both) :], None, None, None)
        wanted = [g if needed else None for g, needed in zip(cotangents, ctx.needs_input_grad, strict=False)]
        turned = _turned_back(wanted, strides, cos, sin, layout, row, conjugate)
        tables = gpu.kernels().table_gradient(both, cotangents, cos, layout, row, conjugate)
        return (*turned, *[None] * (2 - len(both)), *tables, None, None, None)


@torch.library.custom_op("ropewalk::rotate", mutates_args=())
def _rotate_op(
    both: Sequence[Tensor],
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    start: int,
    seq_dim: int,
    backend: str | None,
    conjugate: bool,
) -> list[Tensor]:
    layout = Layout(interleaved, start, seq_dim, backend)
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
    return back, *[None] * 7


_rotate_op.register_autograd(_rotation_backward, setup_context=_save_rotation)
