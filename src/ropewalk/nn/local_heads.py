"""Attention of DTensors: each rank computes its sequences and heads."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ropewalk.errors import RopewalkError
from ropewalk.nn.encodings.base import Encoding
from ropewalk.nn.encodings.rotary import rope_in
from ropewalk.nn.encodings.some_heads import SomeHeads
from ropewalk.nn.position_checks import described
from ropewalk.ops.dtensors import HEADS, Cut, check_divisible, cut_of, with_local_parameters

__all__ = ["call_locally", "check_arguments_of_heads", "check_shards_of_heads", "dims_of_decay", "dims_of_ids"]


def check_shards_of_heads(q: Tensor, k: Tensor, v: Tensor, *, asked: str) -> Cut | None:
    """Return how a mesh cuts q, k and v; None if they are plain. Raise if attention cannot be computed per rank.

    >>> import torch
    >>> check_shards_of_heads(*[torch.ones(1, 2, 3, 4)] * 3, asked="a doctest") is None
    True
    """
    cut = cut_of({name: (x, HEADS) for name, x in (("q", q), ("k", k), ("v", v))}, asked=asked, sequences=False)
    if cut is not None:
        check_divisible(cut, q.shape[1], k.shape[1], asked=asked)
    return cut


def check_arguments_of_heads(
    cut: Cut | None, encodings: Mapping[str, Any], tensors: Mapping[str, tuple[Any, tuple[str, ...]]], *, asked: str
) -> None:
    """Raise unless a rank can compute its heads with these encodings and tensors. The arguments of `call_locally`.

    >>> check_arguments_of_heads(None, {}, {}, asked="a doctest")
    """
    for name, encoding in encodings.items():
        rope = rope_in(encoding) if isinstance(encoding, nn.Module) else None
        if cut is not None and "heads" in cut.names and rope is not None and rope.heads is not None:
            raise RopewalkError(
                asked=f"{asked}({name}=...) with different frequencies for each of {rope.heads} heads",
                expected="all heads on each rank",
                got="heads that are cut over ranks",
                do="redistribute q, k and v, or use frequencies that all heads share",
            )
    for name, (x, dims) in tensors.items():
        if cut is not None and isinstance(x, Tensor) and x.dim() != len(dims):
            raise RopewalkError(
                asked=f"{asked}({name}=...) with DTensors",
                expected=f"a tensor [{', '.join(dims)}]",
                got=described(x),
                do=f"pass {name} with these dimensions",
            )


def call_locally(
    run: Callable[..., Any],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    asked: str,
    encodings: Mapping[str, Any],
    tensors: Mapping[str, tuple[Any, tuple[str, ...]]],
    reads: Sequence[object] = (),
    **options: Any,
) -> Any:
    """Call a function of attention with this rank's part of DTensors.

    Args:
        run: The function (q, k, v, **encodings, **tensors, **options). It returns the outputs, or a tuple of them and
            their log-sum-exp or a state.
        q: Queries [batch, heads, queries, head_dim].
        k: Keys [batch, kv_heads, keys, head_dim].
        v: Values [batch, kv_heads, keys, v_dim].
        asked: The function, for errors.
        encodings: Arguments that are encodings or rotations, or None. A bias is that of this rank's heads.
        tensors: Arguments that are tensors with the names of their dimensions, or anything that is no tensor.
        reads: Other modules whose parameters the function reads, among other objects.
        options: Arguments that are the same on all ranks.

    Returns:
        The outputs as a DTensor, which is cut as q is. A state stays this rank's.

    Raises:
        RopewalkError: If a mesh cuts the sequence or features, or heads that its ranks do not divide, or that have
            different frequencies.

    >>> import torch
    >>> import torch.distributed as dist
    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> from torch.distributed.tensor import Shard, distribute_tensor
    >>> from ropewalk import attention
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> x = distribute_tensor(torch.ones(1, 2, 3, 4), init_device_mesh("cpu", (1,)), [Shard(1)])
    >>> call_locally(attention, x, x, x, asked="a doctest", encodings={}, tensors={}).placements
    (Shard(dim=1),)
    >>> dist.destroy_process_group()
    """
    cut = check_shards_of_heads(q, k, v, asked=asked)
    check_arguments_of_heads(cut, encodings, tensors, asked=asked)
    arguments = dict(options)
    if cut is None:
        return run(q, k, v, **encodings, **{name: x for name, (x, _) in tensors.items()}, **arguments)
    modules = [module for module in reads if isinstance(module, nn.Module)]
    first, count = cut.part("heads", q.shape[1])
    sizes: dict[str, int] = {"batch": q.shape[0], "heads": q.shape[1]}
    for name, encoding in encodings.items():
        arguments[name] = encoding
        if not isinstance(encoding, nn.Module):
            continue
        modules.append(encoding)
        if "heads" in cut.names and isinstance(encoding, Encoding) and type(encoding).bias is not Encoding.bias:
            arguments[name] = SomeHeads(encoding, first, count)
    for name, (x, dims) in tensors.items():
        arguments[name] = cut.local(x, dims, sizes=sizes) if isinstance(x, Tensor) else x
    # All query heads use a single key head.
    heads = [cut.local(x, HEADS, broadcast) for x, broadcast in ((q, ()), (k, ("heads",)), (v, ("heads",)))]
    result = with_local_parameters(cut, modules, run, *heads, **arguments)
    out, *rest = result if isinstance(result, tuple) else (result,)
    shape = (*q.shape[:3], v.shape[-1])
    out = cut.whole(out, HEADS, shape)
    rest = [cut.whole(x, HEADS[:3], shape[:3]) if isinstance(x, Tensor) else x for x in rest]
    return (out, *rest) if rest else out


def dims_of_decay(decay: object) -> tuple[str, ...]:
    """Return the names of the dimensions of a decay: one number per head, or per token.

    >>> dims_of_decay(None)
    ('batch', 'heads', 'seq')
    """
    return ("heads",) if isinstance(decay, Tensor) and decay.dim() == 1 else HEADS[:3]


def dims_of_ids(ids: Any, axes: int) -> tuple[str, ...]:
    """Return the names of the dimensions of positions; none if there are no positions.

    Args:
        ids: [seq] or [batch, seq], with the axes first if there are several; or None.
        axes: Number of positions per token.

    >>> import torch
    >>> dims_of_ids(torch.zeros(2, 5), 1), dims_of_ids(torch.zeros(3, 5), 3), dims_of_ids(None, 1)
    (('batch', 'seq'), ('axes', 'seq'), ())
    """
    if not isinstance(ids, Tensor):
        return ()
    first = ("axes",) if axes > 1 else ()
    return (*first, *("batch", "seq")[len(first) - ids.dim() :])
