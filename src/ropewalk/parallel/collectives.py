"""The exchanges between ranks, as differentiable functions of local tensors.

All ranks pass tensors of the same shape. A tensor that is not on a device of the mesh is copied to one, and the result
back.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ropewalk.kernels.constructors import empty_like, zeros, zeros_like

__all__ = ["attach", "gather", "no_outputs", "on_mesh", "swap"]


def on_mesh(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return x on a device of the mesh.

    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> x = torch.ones(2)
    >>> on_mesh(x, init_device_mesh("cpu", (1,))) is x
    True
    >>> dist.destroy_process_group()
    """
    return x if x.device.type == mesh.device_type else x.to(mesh.device_type)


def gather(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the tensors of all ranks [ranks, ...]: one all-gather, and one reduce-scatter in the backward pass.

    The gradient of x is the sum of the gradients that the ranks have of it. The call does not wait: the result is
    waited for when it is first used.

    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> mesh = init_device_mesh("cpu", (1,))
    >>> gather(torch.ones(2), mesh).shape
    torch.Size([1, 2])
    >>> dist.destroy_process_group()
    """
    return _Gathered.apply(x, mesh)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        sent = on_mesh(x.detach(), mesh)
        parts = DTensor.from_local(sent.unsqueeze(0), mesh, [Shard(0)], run_check=False)
        arrived = parts.redistribute(mesh, [Replicate()], async_op=True).to_local()
        return arrived if sent.device == x.device else arrived.to(x.device)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> tuple[Tensor, None]:
        # Waits: kernels of the operations before read plain tensors only.
        sent = on_mesh(cotangents[0].contiguous(), ctx.mesh)
        total = DTensor.from_local(sent, ctx.mesh, [Partial()], run_check=False)
        return total.redistribute(ctx.mesh, [Shard(0)]).to_local().squeeze(0).to(cotangents[0].device), None


def swap(x: Tensor, mesh: DeviceMesh, split: int, join: int) -> Tensor:
    """Split dimension `split` over the ranks, and join their parts of dimension `join`: one all-to-all in each pass.

    Args:
        x: Local tensor. The size of `split` is a multiple of the number of ranks.
        mesh: A mesh with one dimension.
        split: Dimension of which each rank keeps its part.
        join: Dimension of which each rank had a part.

    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> mesh = init_device_mesh("cpu", (1,))
    >>> swap(torch.ones(2, 3), mesh, split=0, join=1).shape  # one rank keeps everything
    torch.Size([2, 3])
    >>> dist.destroy_process_group()
    """
    return _Swapped.apply(x, mesh, split, join)


# Not by DTensor, which has no all-to-all for CPUs and gathers everything there.
class _Swapped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh, split: int, join: int) -> Tensor:
        ctx.options = mesh, join, split
        sent = on_mesh(x.unflatten(split, (mesh.size(), -1)).movedim(split, 0).contiguous(), mesh)
        arrived = empty_like(sent)
        dist.all_to_all_single(arrived, sent, group=mesh.get_group())
        return arrived.to(x.device).movedim(0, join).flatten(join, join + 1)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> tuple[Tensor, None, None, None]:
        return _Swapped.apply(cotangents[0], *ctx.options), None, None, None


def attach(x: Tensor, gathered: Tensor) -> Tensor:
    """Return x, in whose backward pass this rank takes part in the reduce-scatter of a gathered tensor.

    A rank that does not read the gathered tensor would otherwise skip the reduce-scatter for which all others wait. The
    backward pass reads it, so that a recomputation (activation checkpointing) gathers again on every rank. Gradients
    depend on it too, so that second derivatives have the same exchanges on all ranks. Compiled, the result is x + 0.

    >>> x = torch.ones(2, requires_grad=True)
    >>> attach(torch.ones(3), x).sum().backward()
    >>> x.grad
    tensor([0., 0.])
    """
    # Any operation waits. Memory of a collective that nobody waits for must not be freed.
    return _Attached.apply(x, gathered.flatten()[:1].clone())


def no_outputs(q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> Tensor:
    """Return the outputs [batch, heads, 0, v_dim] of a rank without tokens.

    They are a function of all tensors that a rank with tokens uses, so that each has a gradient of 0, and so that this
    rank takes part in the backward passes of earlier calls.

    >>> no_outputs(torch.ones(1, 2, 0, 4), torch.ones(1, 1, 0, 4), torch.ones(1, 1, 0, 3)).shape
    torch.Size([1, 2, 0, 3])
    """
    total = sum((x.sum().to(v.dtype) for x in (k, v, *others)), start=zeros((), dtype=v.dtype, device=v.device))
    # exp saves its result. Activation checkpointing recomputes a call only on ranks whose backward pass reads
    # something.
    return (q.sum(-1, keepdim=True).to(v.dtype) + total).exp().expand(*q.shape[:3], v.shape[-1])


class _Attached(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, first: Tensor) -> Tensor:
        ctx.save_for_backward(first)
        # A compiler would omit a collective whose result is not used, and the other ranks would wait for it.
        return x + _zero_of(first).to(x.dtype) if torch.compiler.is_compiling() else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> tuple[Tensor, Tensor]:
        (first,), (cotangent,) = ctx.saved_tensors, cotangents
        if torch.compiler.is_compiling():
            # A compiler would move a collective of constants to the forward pass.
            return cotangent, (_zero_of(first) | _zero_of(cotangent)).to(first.dtype)
        # Attached too: the gradient of a rank that reads nothing would have no second derivative.
        return _Attached.apply(cotangent, first), _Attached.apply(zeros_like(first), first)


def _zero_of(x: Tensor) -> Tensor:
    """Return a tensor [1] that is False, in a form that compilers do not simplify."""
    first = x.flatten()[:1]
    return first.isnan() & first.isfinite()
