"""The registry of operations, and the one place that decides which path serves a call.

What a call costs, apart from the rotation itself, on two Neoverse-N1 cores with torch 2.13 (2026-11): a direct call
2 us, an autograd.Function 15 to 22 us, a library op 21 to 58 us. So a call that needs nothing else goes directly to a
kernel; one that needs a gradient goes through the cheapest Function; everything that looks inside (compile, export,
functorch, forward-mode AD, tensor subclasses, gradients of cos and sin) gets the formula in torch operations, which
all of them understand. Only plain tensors reach a kernel, so that none takes a pointer that is not there.

For a compiler the formula is also the faster way, as long as the kernel is made of torch operations: on the same
machine q and k of (1, 2048, 32 and 8, 128) take Inductor 2.1 and 5.6 ms in float32 (half, interleaved) and 6.0 and
12.8 ms in bfloat16, where the kernel takes 7.8, 8.1, 15.0 and 14.3. So the rotation is no library op; the angles,
which Inductor would compute again for every head, are one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor
from torch.autograd import forward_ad

from ropewalk.errors import RopewalkError, require_choice
from ropewalk.kernels import angles as angle_kernels
from ropewalk.kernels import rotate_torch
from ropewalk.reference import rotate as reference_rotate
from ropewalk.reference.budget import rotation_budget

__all__ = ["OPS", "Layout", "Op", "backend_reasons", "cos_sin", "is_plain", "line_up", "require_backend", "rotate"]


@dataclass(frozen=True)
class Op:
    """An operation: its reference, the backends that compute it, and how far they may be from it.

    >>> sorted(OPS["rotate"].backends)
    ['torch']
    """

    name: str
    reference: Callable[..., Any]
    backends: dict[str, Callable[..., Any]]
    budget: Callable[..., Any]


OPS = {op.name: op for op in (Op("rotate", reference_rotate, {"torch": rotate_torch.rotate}, rotation_budget),)}

# Why a backend of the design is not here.
_MISSING = {
    "native": "the C kernel is not part of this version",
    "triton": "the Triton kernel is not part of this version",
}


def backend_reasons() -> dict[str, str | None]:
    """Each backend of the rotation, with the reason why it cannot serve, or None.

    >>> backend_reasons()["torch"] is None
    True
    """
    return dict.fromkeys(OPS["rotate"].backends) | _MISSING


def require_backend(name: str | None) -> str | None:
    """`name`, if that backend is there; None, which leaves the choice to each call, for None.

    >>> require_backend("torch")
    'torch'
    """
    if name is None:
        return None
    reason = backend_reasons()[require_choice(name, backend_reasons(), asked="backend=...")]
    if reason is not None:
        raise RopewalkError(
            asked=f"backend={name!r}",
            expected="a backend that is there",
            got=reason,
            do="leave backend out, or use backend='torch'",
        )
    return name


@dataclass(frozen=True)
class Layout:
    """Where the features of a rotation lie: their pairing, the first that turns, the dimension of the sequence.

    >>> Layout(interleaved=True, start=0, seq_dim=-2).backend is None
    True
    """

    interleaved: bool
    start: int
    seq_dim: int
    backend: str | None = None


def is_plain(*tensors: Tensor | None) -> bool:
    """Whether these are ordinary tensors in an ordinary eager call, which nothing traces, transforms or intercepts.

    >>> is_plain(torch.ones(2)), torch.func.vmap(lambda x: torch.tensor(is_plain(x)))(torch.ones(1)).item()
    (True, False)
    """
    return not (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or torch._C._len_torch_dispatch_stack() > 0
        or any(tensor is not None and not _is_ordinary(tensor) for tensor in tensors)
    )


def _is_ordinary(tensor: Tensor) -> bool:
    # The batched tensors of `is_grads_batched` say that they are of type Tensor, and have no memory.
    return type(tensor) in (Tensor, torch.nn.Parameter) and not is_legacy_batchedtensor(tensor)


def line_up(table: Tensor, dims: int, seq_dim: int) -> Tensor:
    """cos or sin as `cos_sin` gives it, shaped to broadcast against an x of `dims` dimensions.

    [seq, pairs] serves every batch and head, [batch, seq, pairs] every head, [batch, heads, seq, pairs] is as it says.
    x is [.., seq, dim] for seq_dim -2 and [.., seq, heads, dim] for seq_dim -3; its batch is its first dimension.

    >>> line_up(torch.ones(2, 5, 4), dims=4, seq_dim=-2).shape, line_up(torch.ones(2, 5, 4), dims=4, seq_dim=-3).shape
    (torch.Size([2, 1, 5, 4]), torch.Size([2, 5, 1, 4]))
    """
    if table.dim() == 4:
        table = table if seq_dim == -2 else table.transpose(1, 2)
        return table if dims == 4 else table.squeeze(0)
    per_batch = table.dim() == 3
    table = table if seq_dim == -2 else table.unsqueeze(-2)
    if not per_batch:
        return table
    return table.view(table.shape[0], *[1] * (dims - table.dim()), *table.shape[1:])


def rotate(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, layout: Layout, *, conjugate: bool = False
) -> tuple[Tensor, ...]:
    """q, and k if there is one, turned by cos and sin as `cos_sin` gives them; the other way if `conjugate`.

    Differentiable in everything, by every kind of derivative that torch has. The backward of a rotation is the
    rotation the other way.

    >>> quarter = torch.zeros(1, 1), torch.ones(1, 1)
    >>> rotate(torch.tensor([[1.0, 0.0]]), None, *quarter, Layout(True, 0, -2))[0].tolist()
    [[0.0, 1.0]]
    """
    sin = -sin if conjugate else sin
    both = (q,) if k is None else (q, k)
    grad = torch.is_grad_enabled()
    if not is_plain(q, k, cos, sin) or (grad and (cos.requires_grad or sin.requires_grad)):
        return tuple(_formula(x, cos, sin, layout) for x in both)
    if grad and any(x.requires_grad for x in both):
        if not all(x.requires_grad for x in both):
            # One Function for both would give the one that needs no gradient a graph.
            return tuple(rotate(x, None, cos, sin, layout)[0] for x in both)
        return _Rotate.apply(q, k, cos, sin, layout)  # pyright: ignore[reportReturnType]
    return _kernel(both, cos, sin, layout)


class _Rotate(torch.autograd.Function):
    """The rotation of one or two tensors with the opposite rotation as its backward. cos and sin get no gradient."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, layout: Layout) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(cos, sin)
        ctx.layout = layout
        return _kernel((q,) if k is None else (q, k), cos, sin, layout)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        back = [None if g is None else rotate(g, None, cos, sin, ctx.layout, conjugate=True)[0] for g in cotangents]
        return (*back, *[None] * (5 - len(back)))


def _kernel(both: tuple[Tensor, ...], cos: Tensor, sin: Tensor, layout: Layout) -> tuple[Tensor, ...]:
    if len({x.dim() for x in both}) > 1:
        return tuple(y for x in both for y in _kernel((x,), cos, sin, layout))
    cos, sin = (line_up(table, both[0].dim(), layout.seq_dim) for table in (cos, sin))
    backend = OPS["rotate"].backends[layout.backend or "torch"]
    return backend(both, cos, sin, interleaved=layout.interleaved, start=layout.start)


def _formula(x: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
    cos, sin = (_as_on(x, line_up(table, x.dim(), layout.seq_dim)) for table in (cos, sin))
    return rotate_torch.rotate_traceable(x, cos, sin, interleaved=layout.interleaved, start=layout.start)


def _as_on(x: Tensor, table: Tensor) -> Tensor:
    """`table` as x can meet it: replicated on the mesh of a DTensor, since every rank computes the same."""
    if type(x).__name__ != "DTensor" or type(table).__name__ == "DTensor":
        return table
    from torch.distributed.tensor import DTensor, Replicate

    mesh = x.device_mesh  # pyright: ignore[reportAttributeAccessIssue]
    return DTensor.from_local(table, mesh, [Replicate()] * mesh.ndim, run_check=False)


def cos_sin(
    positions: Tensor, inv_freq: Tensor, table: Tensor | None, amplitude: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """cos and sin of the angles: `kernels.angles.cos_sin`, behind an op boundary where a compiler would see it.

    Left to itself Inductor computes the float64 cosines again for every head: on two Neoverse-N1 cores 163 ms against
    7 ms (2026-11). An exporter gets the formula, so that what it writes needs no ropewalk; so does functorch, for which
    the op has no rules.

    >>> one = torch.ones(1, dtype=torch.float64)
    >>> cos, _ = cos_sin(torch.tensor([2]), one, None, one[0], torch.float32)
    >>> round(cos.item(), 4)
    -0.4161
    """
    transformed = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    if torch.compiler.is_compiling() and not torch.compiler.is_exporting() and not transformed:
        return torch.ops.ropewalk.cos_sin(positions, inv_freq, table, amplitude, dtype)
    # The table is looked up by values, which only plain positions have.
    return angle_kernels.cos_sin(positions, inv_freq, table if is_plain(positions) else None, amplitude, dtype)


@torch.library.custom_op("ropewalk::cos_sin", mutates_args=())
def _cos_sin_op(
    positions: Tensor, inv_freq: Tensor, table: Tensor | None, amplitude: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    return angle_kernels.cos_sin(positions, inv_freq, table, amplitude, dtype)


@_cos_sin_op.register_fake
def _(positions: Tensor, inv_freq: Tensor, table: Tensor | None, amplitude: Tensor, dtype: torch.dtype):
    pairs = inv_freq.shape[-1]
    if inv_freq.dim() == 2:
        batch = 1 if positions.dim() == 1 else positions.shape[0]
        shape = (batch, inv_freq.shape[0], positions.shape[-1], pairs)
    else:
        shape = (*positions.shape, pairs)
    return tuple(torch.empty(shape, dtype=dtype, device=positions.device) for _ in range(2))


def _save_angles(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    positions, inv_freq, *_ = inputs
    ctx.save_for_backward(positions, inv_freq, *output)


def _angles_backward(ctx: Any, cos_grad: Tensor, sin_grad: Tensor) -> tuple[Tensor | None, ...]:
    # d(a cos(m theta)) = -a sin(m theta) (m dtheta + theta dm), and a sin, a cos are what was returned.
    positions, inv_freq, cos, sin = ctx.saved_tensors
    turned = (sin_grad * cos - cos_grad * sin).to(torch.float64)
    per_head = inv_freq.dim() == 2
    where = positions
    if per_head:
        where = positions.unsqueeze(-2) if positions.dim() == 2 else positions[None, None]
    by_frequency = turned * where.to(torch.float64).unsqueeze(-1)
    by_position = turned * (inv_freq.unsqueeze(-2) if per_head else inv_freq)
    over_tokens = (0, 2) if per_head else tuple(range(positions.dim()))
    theta_grad = by_frequency.sum(over_tokens).to(inv_freq.dtype) if ctx.needs_input_grad[1] else None
    position_grad = None
    if ctx.needs_input_grad[0]:
        position_grad = by_position.sum((1, 3) if per_head else -1).reshape(positions.shape).to(positions.dtype)
    return position_grad, theta_grad, None, None, None


_cos_sin_op.register_autograd(_angles_backward, setup_context=_save_angles)
