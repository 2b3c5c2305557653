"""Rotations of DTensors: each rank rotates its part, at the positions of its tokens."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from ropewalk.errors import RopewalkError
from ropewalk.nn.positions import range_positions
from ropewalk.nn.rotary.angle_source import AngleSource
from ropewalk.nn.rotary.call import Placement, check_same_length, checked_length
from ropewalk.nn.rotary.tables import check_angles
from ropewalk.ops.dtensors import HEADS, Cut, cut_of, is_dtensor, with_local_parameters

__all__ = ["LocalCall", "local_call", "rotate_locally"]


class LocalCall(NamedTuple):
    """This rank's part of a rotation.

    Attributes:
        cut: How the mesh cuts q and k.
        tensors: The DTensors q, or q and k, with the names of their dimensions.
        options: The positions of this rank's tokens, as arguments of `RotaryEmbedding.forward`.

    >>> LocalCall._fields
    ('cut', 'tensors', 'options')
    """

    cut: Cut
    tensors: tuple[tuple[Any, tuple[str, ...]], ...]
    options: dict[str, Any]

    def __call__(self, run: Callable[..., Any], modules: Sequence[nn.Module], **options: Any) -> Any:
        """Call a function with local tensors, and return its results as DTensors.

        Args:
            run: The function, of q, or of q and k.
            modules: Modules whose parameters it reads.
            options: More arguments of the function.
        """
        local = [x.to_local() for x, _ in self.tensors]
        results = with_local_parameters(self.cut, modules, run, *local, **self.options, **options)
        results = [results] if isinstance(results, Tensor) else results
        whole = [self.cut.whole(y, dims, x.shape) for y, (x, dims) in zip(results, self.tensors, strict=True)]
        return whole[0] if len(whole) == 1 else tuple(whole)


def rotate_locally(
    rope: nn.Module, q: Tensor, k: Tensor | None, placement: Placement, part: Callable[..., LocalCall]
) -> Any:
    """Rotate q, or q and k, in one call if the mesh cuts both in the same way.

    Args:
        rope: The rotation.
        q: Queries, or any single tensor.
        k: Keys, or None. Both are DTensors.
        placement: The positions of all tokens.
        part: Returns this rank's part of a call.

    Returns:
        The rotated tensors, with the placements of q and k.

    >>> import torch
    >>> import torch.distributed as dist
    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> from torch.distributed.tensor import Shard, distribute_tensor
    >>> from ropewalk import RotaryEmbedding
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> rope, x = RotaryEmbedding(4), distribute_tensor(torch.ones(3, 4), init_device_mesh("cpu", (1,)), [Shard(0)])
    >>> rotate_locally(rope, x, None, Placement(), rope.local_call).placements
    (Shard(dim=0),)
    >>> dist.destroy_process_group()
    """
    if k is None or not (is_dtensor(q) and is_dtensor(k)) or _cuts_alike(q, k):
        # Refuses a plain tensor next to a DTensor: which of all tokens it has is not known.
        return part(q, k, placement)(rope, [rope])
    placement.check(k)
    if placement.k_positions is None:
        check_same_length(q, k, getattr(rope, "seq_dim", -2), placement.call)
    of_keys = placement.of_keys()
    roles = ("q", "k") if placement.role is None else (placement.role, placement.role)
    calls = (q, placement, roles[0]), (k, of_keys, roles[1])
    return tuple(part(x, None, own._replace(role=role, k_positions=None))(rope, [rope]) for x, own, role in calls)


def _cuts_alike(q: Any, k: Any) -> bool:
    return q.dim() == k.dim() and q.device_mesh == k.device_mesh and tuple(q.placements) == tuple(k.placements)


def local_call(source: AngleSource, q: Tensor, k: Tensor | None, placement: Placement) -> LocalCall:
    """Return this rank's part of a rotation of DTensors.

    Args:
        source: The angles of the rope.
        q: Queries, or any single tensor.
        k: Keys with the placements of q, or None.
        placement: The positions of all tokens.

    Raises:
        RopewalkError: If an argument does not match; if the mesh cuts features, or heads with different frequencies; or
            if it cuts q and k differently.

    >>> import torch
    >>> import torch.distributed as dist
    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> from torch.distributed.tensor import Shard, distribute_tensor
    >>> from ropewalk.spec.rope import RopeSpec
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> x = distribute_tensor(torch.ones(3, 4), init_device_mesh("cpu", (1,)), [Shard(0)])
    >>> local_call(AngleSource(RopeSpec(4)), x, None, Placement(offset=7)).options
    {'offset': 7}
    >>> dist.destroy_process_group()
    """
    call = placement.call
    source.check_tensors(q, k, call)
    placement.check(k)
    tensors = tuple((x, _dims(source, x)) for x in (q, k) if x is not None)
    cut = cut_of(dict(zip(("q", "k"), tensors, strict=False)), asked=call)
    if cut is None or (k is not None and not _cuts_alike(q, k)):
        raise RopewalkError(
            asked=f"{call}(q, k)",
            expected="q and k with the same placements",
            got=f"{getattr(q, 'placements', 'a plain q')} and {getattr(k, 'placements', 'a plain k')}",
            do="redistribute one of them: x.redistribute(placements=...)",
        )
    if source.heads is not None and "heads" in cut.names:
        raise RopewalkError(
            asked=f"{call}(q) with different frequencies for each of {source.heads} heads",
            expected="all heads on each rank",
            got="heads that are cut over ranks",
            do="redistribute them: x.redistribute(placements=...), or use frequencies that all heads share",
        )
    options: dict[str, Any] = {} if placement.role is None else {"role": placement.role}
    sizes = dict(zip(tensors[0][1], q.shape, strict=True))
    if placement.angles is not None:
        tables, dims = check_angles(placement.angles, q, source.pairs, source.seq_dim, call), {2: HEADS[2:], 4: HEADS}
        dims[3] = "batch", *HEADS[2:]
        options["angles"] = tuple(cut.local(x, dims[x.dim()], sizes=sizes) for x in tables)
        return LocalCall(cut, tensors, options)
    seq = q.shape[source.seq_dim]
    fresh = seq if placement.is_fresh() else None
    length = checked_length(placement.length, source.spec, source.rows(q), fresh, call=call)
    if length is not None:
        is_tensor = isinstance(length, Tensor)
        options["length"] = cut.local(length, ("batch",) * length.dim(), sizes=sizes) if is_tensor else length
    ids = source.positions_or_start(q, placement)
    if isinstance(ids, Tensor):
        options["positions"] = _local_ids(source, cut, ids, sizes)
    else:
        # Of all tokens, so that every rank raises if one is past a limit.
        source.limits.check_range(ids, seq, call)
        first, count = cut.part("seq", seq)
        if placement.k_positions is None:
            options["offset"] = ids + first
        else:
            options["positions"] = range_positions(count, ids + first, q.device)
    if placement.k_positions is not None and k is not None:
        of_keys = source.positions_or_start(k, placement.of_keys())
        sizes = dict(zip(tensors[1][1], k.shape, strict=True))
        options["k_positions"] = _local_ids(source, cut, of_keys, sizes) if isinstance(of_keys, Tensor) else of_keys
    return LocalCall(cut, tensors, options)


def _dims(source: AngleSource, x: Tensor) -> tuple[str, ...]:
    """Return the names of the dimensions of a tensor that is rotated; numbers for other leading dimensions."""
    names = [str(dim) for dim in range(x.dim())]
    names[source.seq_dim], names[-1] = "seq", "features"
    if x.dim() > 2:
        names[-2 if source.seq_dim == -3 else -3] = "heads"
    if source.batched(x):
        names[0] = "batch"
    return tuple(names)


def _local_ids(source: AngleSource, cut: Cut, ids: Tensor, sizes: Mapping[str, int]) -> Tensor:
    axes = () if source.spec.axes is None else ("axes",)
    return cut.local(ids, (*axes, *("batch", "seq")[len(axes) - ids.dim() :]), sizes=sizes)
