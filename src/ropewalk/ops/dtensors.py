"""DTensors as plain tensors of this rank: the part of each dimension that it has, and results as DTensors again.

torch.distributed.tensor is imported when the first DTensor is seen.
"""

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import torch
from torch import Size, Tensor, nn

from ropewalk.errors import RopewalkError
from ropewalk.kernels.torch_internals import call_with_tensors, own_tensors, was_distributed

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = [
    "HEADS",
    "Cut",
    "check_divisible",
    "cut_of",
    "heads_of_projection",
    "is_dtensor",
    "join_heads",
    "local_size",
    "split_heads",
    "with_full_parameters",
    "with_local_parameters",
    "with_own_parameters",
]

# The dimensions of heads. Positions, masks and decays have some of them.
HEADS = ("batch", "heads", "seq", "features")
# Those of tokens after a projection: their features are heads.
_TOKENS = ("batch", "seq", "heads")

Result = TypeVar("Result")


def is_dtensor(x: object) -> bool:
    """Whether x is a DTensor.

    >>> is_dtensor(None)
    False
    """
    return type(x).__name__ == "DTensor"


class Cut(NamedTuple):
    """The dimensions along which a mesh cuts tensors.

    Attributes:
        mesh: The mesh.
        names: Per dimension of the mesh, the name of the dimension that it cuts; None if all its ranks have the same.

    >>> import torch
    >>> import torch.distributed as dist
    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> cut = Cut(init_device_mesh("cpu", (1,)), ("heads",))
    >>> cut.part("heads", 8), cut.local(torch.ones(2, 8), ("batch", "heads")).shape  # one rank has everything
    ((0, 8), torch.Size([2, 8]))
    >>> dist.destroy_process_group()
    """

    mesh: "DeviceMesh"
    names: tuple[str | None, ...]

    def ranks(self, name: str) -> int:
        """Return the number of parts of a dimension."""
        count = 1
        for i, other in enumerate(self.names):
            count *= self.mesh.size(i) if other == name else 1
        return count

    def part(self, name: str, size: int) -> tuple[int, int]:
        """Return the first index of this rank along a dimension of this size, and the number of its indices."""
        start, coordinate = 0, self.mesh.get_coordinate()
        if coordinate is None:
            raise RopewalkError(
                asked="a call with DTensors",
                expected="a rank of their mesh",
                got="a rank outside of it",
                do="call it on the ranks of the mesh alone",
            )
        # As torch.chunk: the first parts have the rounded-up size.
        for i, other in enumerate(self.names):
            if other == name:
                most = -(-size // self.mesh.size(i))
                first = min(most * coordinate[i], size)
                start, size = start + first, min(most, size - first)
        return start, size

    def local(
        self,
        x: Tensor,
        dims: Sequence[str],
        broadcast: Collection[str] = HEADS,
        sizes: Mapping[str, int] = MappingProxyType({}),
    ) -> Tensor:
        """Return this rank's part of x.

        The gradient of x is that of all ranks: where a rank has all of x but only a part of the call, gradients are
        summed.

        Args:
            x: A DTensor, or a plain tensor that is the same on all ranks.
            dims: The names of its dimensions.
            broadcast: Names of dimensions that are not cut if their size is 1: all parts of the call use them.
            sizes: Sizes of the call. A dimension of which the call itself has 1 is cut.
        """
        alone = [name for name, size in sizes.items() if size == 1]
        shared = {
            name
            for name, size in zip(dims, x.shape, strict=True)
            if size == 1 and name in broadcast and name not in alone
        }
        if not is_dtensor(x) and not (x.requires_grad and torch.is_grad_enabled()):
            for dim, name in enumerate(dims):
                if name in self.names and name not in shared:
                    x = x.narrow(dim, *self.part(name, x.shape[dim]))
            return x
        from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

        wanted = tuple(
            Replicate() if name is None or name in shared or name not in dims else Shard(dims.index(name))
            for name in self.names
        )
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, self.mesh, [Replicate()] * self.mesh.ndim, run_check=False)
        if tuple(x.placements) != wanted:
            x = x.redistribute(self.mesh, wanted)
        gradients = [
            Partial() if name is not None and placement.is_replicate() else placement
            for name, placement in zip(self.names, wanted, strict=True)
        ]
        return x.to_local(grad_placements=gradients)

    def whole(self, y: Tensor, dims: Sequence[str], shape: Sequence[int]) -> Tensor:
        """Return the DTensor of which y is this rank's part.

        Args:
            y: A plain tensor.
            dims: The names of its dimensions.
            shape: The shape of the DTensor.
        """
        from torch.distributed.tensor import DTensor, Replicate, Shard

        placements = [
            Replicate() if name is None or name not in dims else Shard(dims.index(name)) for name in self.names
        ]
        even = all(
            size == y.shape[dim] * self.ranks(name) for dim, (name, size) in enumerate(zip(dims, shape, strict=True))
        )
        if even:
            return DTensor.from_local(y, self.mesh, placements, run_check=False)
        sizes = itertools.accumulate(reversed(shape[1:]), lambda stride, size: stride * size, initial=1)
        stride = tuple(reversed(list(sizes)))
        y = y.contiguous()
        return DTensor.from_local(y, self.mesh, placements, run_check=False, shape=Size(shape), stride=stride)


def cut_of(tensors: Mapping[str, tuple[Any, Sequence[str]]], *, asked: str, sequences: bool = True) -> Cut | None:
    """Return how a mesh cuts the tensors of a call, or None if they are plain.

    Args:
        tensors: The tensors of the call and the names of their dimensions, by the names of the arguments. None is
            ignored.
        asked: The function, for errors.
        sequences: Whether a rank may have a part of the sequence.

    Raises:
        RopewalkError: If some are plain, or on different meshes, or cut along different dimensions; if a placement is
            Partial or cuts the features; if it cuts a sequence and `sequences` is False; or if this rank has another
            number of tokens, heads or sequences than torch.chunk would assign to it.

    >>> import torch
    >>> cut_of({"q": (torch.ones(1, 2, 3, 4), HEADS)}, asked="a doctest") is None
    True
    """
    given = {name: (x, dims) for name, (x, dims) in tensors.items() if x is not None}
    if not any(is_dtensor(x) for x, _ in given.values()):
        return None
    names = ", ".join(given)
    plain = [name for name, (x, _) in given.items() if not is_dtensor(x)]
    if plain:
        raise RopewalkError(
            asked=f"{asked}({names})",
            expected="all of them DTensors, or none",
            got=f"{', '.join(plain)} as a plain tensor",
            do="distribute it: torch.distributed.tensor.distribute_tensor(x, mesh, placements)",
        )
    meshes = [x.device_mesh for x, _ in given.values()]
    if any(mesh != meshes[0] for mesh in meshes):
        raise RopewalkError(
            asked=f"{asked}({names})",
            expected="DTensors on one mesh",
            got=f"{' and '.join(dict.fromkeys(str(mesh) for mesh in meshes))}",
            do="distribute them over the same mesh",
        )
    cuts: list[str | None] = []
    for i in range(meshes[0].ndim):
        found = {name: _name_of(x, i, dims, name, asked, sequences) for name, (x, dims) in given.items()}
        different = {cut for cut in found.values() if cut is not None}
        if len(different) > 1:
            raise RopewalkError(
                asked=f"{asked}({names})",
                expected="one dimension that dimension " + f"{i} of the mesh cuts",
                got=", ".join(f"{name} cut along {cut}" for name, cut in found.items() if cut is not None),
                do="redistribute one of them: x.redistribute(placements=...)",
            )
        cuts.append(next(iter(different), None))
    if "seq" in cuts and not sequences:
        raise RopewalkError(
            asked=f"{asked}({names}) with DTensors",
            expected="all tokens of a sequence on each rank: placements of batch or heads, or Replicate()",
            got="a sequence that is cut over ranks, whose queries would not see the keys of other ranks",
            do=f"ropewalk.parallel computes attention over such sequences: pass local tensors, q.to_local(), and "
            f"shards=Shards(mesh, length), to ropewalk.parallel.{'linear_' if 'linear' in asked else ''}attention",
        )
    for name, (x, dims) in given.items():
        _check_sizes(x, dims, name, asked)
    return Cut(meshes[0], tuple(cuts))


def _check_sizes(x: Any, dims: Sequence[str], name: str, asked: str) -> None:
    """Raise unless this rank has as much of x as its placements mean. A compiled call is not checked."""
    if torch.compiler.is_compiling():
        return
    placements: Sequence[Any] = x.placements
    names: tuple[str | None, ...] = tuple(dims[int(p.dim)] if p.is_shard() else None for p in placements)
    cut = Cut(x.device_mesh, names)
    with torch.no_grad():
        local = list(x.to_local().shape)
    expected = [cut.part(each, size)[1] for each, size in zip(dims, x.shape, strict=True)]
    if local != expected:
        raise RopewalkError(
            asked=f"{asked}({name})",
            expected=f"{expected} on this rank, as torch.chunk and distribute_tensor cut {list(x.shape)}: the first "
            "ranks have the rounded-up size",
            got=f"{local}",
            do="pass DTensors that distribute_tensor cuts, or local tensors with their positions=",
        )


def _name_of(x: Any, mesh_dim: int, dims: Sequence[str], name: str, asked: str, sequences: bool) -> str | None:
    """Return the name of the dimension of x that a dimension of the mesh cuts, or None."""
    placement = x.placements[mesh_dim]
    if placement.is_replicate():
        return None
    dim: int = placement.dim if placement.is_shard() else -1
    cut = dims[dim] if placement.is_shard() else None
    if cut is None or cut == "features" or type(placement).__name__ != "Shard":
        raise RopewalkError(
            asked=f"{asked}({name})",
            expected=f"Shard of {'batch, heads or sequence' if sequences else 'batch or heads'}, or Replicate()",
            got=f"{placement!r}" + (", which cuts the features of a head" if cut == "features" else ""),
            do="sum it first: x.redistribute(placements=[Replicate()])"
            if placement.is_partial()
            else "redistribute it: x.redistribute(placements=...)",
        )
    return cut


def check_divisible(cut: Cut, heads: int, kv_heads: int, *, asked: str) -> None:
    """Raise unless every rank has as many heads. One key head can be shared by all ranks.

    Args:
        cut: How the mesh cuts heads.
        heads: Number of query heads.
        kv_heads: Number of key heads.
        asked: The function, for errors.

    >>> import torch.distributed as dist
    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> check_divisible(Cut(init_device_mesh("cpu", (1,)), ("heads",)), 8, 2, asked="a doctest")
    >>> dist.destroy_process_group()
    """
    ranks = cut.ranks("heads")
    if heads % ranks or (kv_heads % ranks and kv_heads > 1):
        raise RopewalkError(
            asked=f"{asked} with heads cut over {ranks} ranks",
            expected=f"numbers of heads that are multiples of {ranks}",
            got=f"{heads} heads and {kv_heads} kv_heads",
            do="use fewer ranks for the heads",
        )


def local_size(x: Tensor, dim: int) -> int:
    """Return the size of a dimension on this rank.

    >>> import torch
    >>> local_size(torch.ones(2, 3), 1)
    3
    """
    local: Any = x
    return local.to_local().shape[dim] if is_dtensor(x) else x.shape[dim]


def split_heads(
    projected: Sequence[Tensor], weights: Sequence[object], heads: Sequence[int], head_dim: int
) -> list[Tensor] | None:
    """Return the outputs of projections as DTensors of heads; None if ranks have all heads, as plain tensors.

    Column-wise projections return the local part of their output, as a plain tensor. The output of a projection that is
    the same on all ranks is replicated. Views are those of local tensors, which inference mode supports.

    Args:
        projected: The outputs [batch, seq, width], of q, k and v.
        weights: The weights of the projections, or None.
        heads: The numbers of heads.
        head_dim: Width of a head.

    Returns:
        DTensors [batch, heads, seq, head_dim].

    Raises:
        RopewalkError: If ranks would have parts of a head.

    >>> import torch
    >>> import torch.distributed as dist
    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> from torch.distributed.tensor import Shard, distribute_tensor
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> weight = distribute_tensor(torch.ones(4, 3), init_device_mesh("cpu", (1,)), [Shard(0)])
    >>> split_heads([torch.ones(2, 5, 4)], [weight], [2], 2) is None  # one rank has all heads
    True
    >>> dist.destroy_process_group()
    """
    cuts: list[Cut | None] = []
    for y, weight, count in zip(projected, weights, heads, strict=True):
        cut = cut_of({"x": (y, _TOKENS)}, asked="attention")
        if cut is None and y.shape[-1] != count * head_dim and is_dtensor(weight):
            wide: Any = weight
            names = tuple("heads" if _cuts_rows(placement) else None for placement in wide.placements)
            cut = Cut(wide.device_mesh, names)
        cuts.append(cut)
    found = [cut for cut in cuts if cut is not None]
    if not found:
        # FSDP gathers weights for a call, and cuts them again after it.
        return None
    seqs = {y.shape[1] for y in projected}
    if len(seqs) > 1:
        raise RopewalkError(
            asked="attention(x) with projections that are cut over ranks",
            expected="the same tokens in q, k and v",
            got=f"{' and '.join(map(str, sorted(seqs)))} tokens",
            do="gather the tokens before the layer: PrepareModuleInput(input_layouts=Shard(1), "
            "desired_input_layouts=Replicate(), use_local_output=True)",
        )
    results: list[Tensor] = []
    for y, cut, count, of_keys in zip(projected, cuts, heads, (False, True, True), strict=True):
        cut = Cut(found[0].mesh, (None,) * found[0].mesh.ndim) if cut is None else cut
        ranks = cut.ranks("heads")
        _check_whole_heads(count, ranks, of_keys)
        local: Any = y
        local = local.to_local() if is_dtensor(y) else y
        part = local.unflatten(-1, (count // ranks, head_dim)).transpose(1, 2)
        batch = y.shape[0] if is_dtensor(y) else part.shape[0]
        seq = y.shape[1] if is_dtensor(y) else part.shape[2]
        results.append(cut.whole(part, HEADS, (batch, count, seq, part.shape[-1])))
    return results


def _check_whole_heads(heads: int, ranks: int, of_keys: bool) -> None:
    """Raise unless every rank computes as many whole heads."""
    if heads % ranks:
        raise RopewalkError(
            asked=f"an attention layer with projections that are cut over {ranks} ranks",
            expected=f"num_heads and num_kv_heads that are multiples of {ranks}: a rank computes whole heads",
            got=f"{'num_kv_heads' if of_keys else 'num_heads'} {heads}",
            do="use fewer ranks for the heads" + (", or leave k_proj and v_proj uncut" if heads == 1 else ""),
        )


def join_heads(y: Tensor) -> Tensor:
    """Return heads [batch, heads, seq, head_dim] as tokens [batch, seq, heads * head_dim].

    >>> import torch
    >>> join_heads(torch.ones(1, 2, 3, 4)).shape
    torch.Size([1, 3, 8])
    """
    cut = cut_of({"y": (y, HEADS)}, asked="attention")
    if cut is None:
        return y.transpose(1, 2).flatten(2)
    local: Any = y
    batch, heads, seq, width = y.shape
    return cut.whole(local.to_local().transpose(1, 2).flatten(2), _TOKENS, (batch, seq, heads * width))


def heads_of_projection(projection: nn.Module, heads: int, *, of_keys: bool = False) -> tuple[int, int]:
    """Return the first head that a projection computes on this rank, and the number of its heads.

    Args:
        projection: A linear layer. It is cut if `parallelize_module` or `distribute_module` distributed it.
        heads: Number of heads on all ranks.
        of_keys: Whether they are key heads, for errors.

    Raises:
        RopewalkError: On every rank, if ranks would have parts of a head.

    >>> heads_of_projection(nn.Linear(4, 8), 2)
    (0, 2)
    """
    weight: Any = getattr(projection, "weight", None)
    # FSDP cuts weights too, and gathers them for a call.
    if not is_dtensor(weight) or not was_distributed(projection):
        return 0, heads
    # FSDP cuts along the first dimensions of a mesh, and tensor parallelism along the last one.
    names = (*[None] * (weight.device_mesh.ndim - 1), "heads" if _cuts_rows(weight.placements[-1]) else None)
    cut = Cut(weight.device_mesh, names)
    _check_whole_heads(heads, cut.ranks("heads"), of_keys)
    return cut.part("heads", heads)


def _cuts_rows(placement: Any) -> bool:
    # Not _StridedShard, by which FSDP cuts what tensor parallelism has cut before.
    return type(placement).__name__ == "Shard" and placement.dim == 0


def with_full_parameters(modules: Sequence[nn.Module], run: Callable[..., Result], *arguments: Any) -> Result:
    """Call a function in which parameters that are DTensors are plain and whole, without gradients.

    >>> with_full_parameters([nn.Linear(2, 2)], max, 1, 2)
    2
    """
    # Not in inference mode, in which DTensors of torch 2.11 cannot be gathered.
    with torch.inference_mode(False), torch.no_grad():
        replaced = [(module, name, x.full_tensor()) for module, name, x in _tensors(modules) if is_dtensor(x)]
    return call_with_tensors(replaced, run, *arguments)


def with_local_parameters(
    cut: Cut, modules: Sequence[nn.Module], run: Callable[..., Result], *arguments: Any, **options: Any
) -> Result:
    """Call a function in which parameters of modules are plain tensors, whose gradients are summed over ranks.

    Args:
        cut: How the mesh cuts the tensors of the call.
        modules: The modules, whose parameters are the same on all ranks: plain, or DTensors.
        run: The function.
        arguments: Its arguments.
        options: Its options.

    Returns:
        What it returns.

    >>> import torch.distributed as dist
    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> with_local_parameters(Cut(init_device_mesh("cpu", (1,)), (None,)), [], max, 1, 2)
    2
    >>> dist.destroy_process_group()
    """
    replaced = [
        (module, name, cut.local(x, [""] * x.dim()))
        for module, name, x in _tensors(modules)
        if is_dtensor(x) or x.requires_grad
    ]
    results = call_with_tensors(replaced, run, *arguments, **options)
    needed = [x for x in (*arguments, *options.values(), *(x for _, _, x in replaced)) if _learns(x)]
    if not needed:
        return results
    if isinstance(results, tuple):
        connected: Any = tuple(_connected(y, needed) for y in results)
        return connected
    return cast(Result, _connected(results, needed))


def _learns(x: object) -> bool:
    return isinstance(x, Tensor) and x.requires_grad


def _connected(y: Any, tensors: Sequence[Tensor]) -> Any:
    """Return y, which depends on tensors if it is empty.

    A kernel may omit them then. Their gradients are sums over ranks, for which the other ranks would wait.
    """
    if not isinstance(y, Tensor) or y.numel() or not y.is_floating_point():
        return y
    total = y
    for x in tensors:
        total = total + x.sum().to(y.dtype)
    # exp saves its result: activation checkpointing recomputes a call only if its backward pass reads something.
    return total.exp()


def with_own_parameters(
    modules: Sequence[nn.Module], run: Callable[..., Result], *arguments: Any, **options: Any
) -> Any:
    """Call a function of plain tensors in which parameters that are DTensors are plain too, with gradients.

    For a mesh whose ranks all compute the same, or that has one rank.

    >>> with_own_parameters([nn.Linear(2, 2)], max, 1, 2)
    2
    """
    replaced = [
        (module, name, Cut(x.device_mesh, (None,) * x.device_mesh.ndim).local(x, [""] * x.dim()))
        for module, name, x in _tensors(modules)
        if is_dtensor(x)
    ]
    return call_with_tensors(replaced, run, *arguments, **options)


def _tensors(modules: Sequence[nn.Module]) -> list[tuple[nn.Module, str, Any]]:
    """Return the parameters and buffers of modules, with the module that has each of them and its name there."""
    return [
        (part, name, tensor)
        for module in dict.fromkeys(modules)
        for part in module.modules()
        for name, tensor in own_tensors(part).items()
        if tensor is not None
    ]
