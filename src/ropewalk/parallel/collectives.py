"""The exchanges between ranks, as differentiable functions of local tensors. DTensor implements them.

All ranks pass tensors of the same shape.
"""

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

__all__ = ["gather", "swap"]


def gather(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the tensors of all ranks [ranks, ...]: one all-gather, and one reduce-scatter in the backward pass.

    The gradient of x is the sum over the gradients that all ranks have of it. The call does not wait: the result is
    waited for when it is first used.

    >>> gather.__name__
    'gather'
    """
    parts = DTensor.from_local(x.unsqueeze(0), mesh, [Shard(0)], run_check=False)
    return parts.redistribute(mesh, [Replicate()], async_op=True).to_local(grad_placements=[Partial()])


def swap(x: Tensor, mesh: DeviceMesh, split: int, join: int) -> Tensor:
    """Split dimension `split` over the ranks, and join their parts of dimension `join`: one all-to-all in each pass.

    Args:
        x: Local tensor. The size of `split` is a multiple of the number of ranks.
        mesh: A mesh with one dimension.
        split: Dimension of which each rank keeps its part.
        join: Dimension of which each rank had a part.

    >>> swap.__name__
    'swap'
    """
    whole = DTensor.from_local(x.contiguous(), mesh, [Shard(join)], run_check=False)
    return whole.redistribute(mesh, [Shard(split)]).to_local()
