"""Shards: which tokens of a long sequence this rank has, and their positions."""

from collections.abc import Callable, Sequence
from typing import Never

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from ropewalk.errors import RopewalkError, as_int, require_flag, shown
from ropewalk.kernels.constructors import arange, empty_like, new_zeros
from ropewalk.nn.position_checks import described
from ropewalk.parallel.agreement import agree, agree_on_call, cpu_group
from ropewalk.parallel.collectives import gather
from ropewalk.parallel.layout import LayoutName, Run, runs_of_ranks
from ropewalk.parallel.mesh import checked_mesh, device_of
from ropewalk.signatures import checks_names, refuse_arguments

__all__ = ["Shards"]


@checks_names
class Shards:
    """The tokens of each rank of a mesh, for sequences that are too long for one device.

    Every rank creates it with the same arguments, and passes to `parallel.attention` and `parallel.linear_attention`
    the tokens that it has. Position and causality follow from the index of a token in its sequence: nobody passes
    positions by hand. Ranks that pass different arguments all raise an error.

    Args:
        mesh: A DeviceMesh with one dimension: mesh["name"] of a mesh with several. What is exchanged is copied
            to a device of the mesh, and the result back, if the tensors are on another.
        length: Number of tokens of all ranks, or a list with the number of each rank. A number is cut evenly: the first
            ranks have one token more if it is not a multiple of theirs.
        layout: "contiguous": rank r has part r. "zigzag": rank r has chunks r and 2 ranks - 1 - r of each sequence, so
            that causal softmax attention is the same work on all ranks. It requires sequences whose lengths are
            multiples of twice the number of ranks.
        cu_seqlens: Cumulated lengths [sequences + 1] of packed sequences of all ranks together, from 0 to `length`. A
            sequence can be on several ranks.
        check_calls: Whether each call compares its shapes, dtypes and options between the ranks, by an exchange of 32
            bytes on the CPU. Compiled calls do not.

    Attributes:
        mesh: The mesh.
        layout: The layout.
        rank: Index of this rank in the mesh.
        ranks: Number of ranks.
        length: Number of tokens of all ranks.
        lengths: Number of tokens of each rank.
        sequences: Number of packed sequences, or None.
        ends: Cumulated lengths of the sequences, from 0 to `length`.
        runs: The consecutive tokens of each rank.
        order: The rank of each run, and its index in `runs[rank]`, in the order of all tokens.
        positions: Position of each token of this rank in its sequence, int64 [tokens], on the device of the mesh.
        indices: Index of each token of this rank among all tokens, int64 [tokens].
        check_calls: As the argument.

    Raises:
        RopewalkError: If an argument is invalid, or differs between ranks.

    >>> import torch.distributed as dist
    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> store = dist.HashStore()
    >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    >>> shards = Shards(init_device_mesh("cpu", (1,)), 4, cu_seqlens=[0, 3, 4])
    >>> shards.positions.tolist(), shards.indices.tolist()
    ([0, 1, 2, 0], [0, 1, 2, 3])
    >>> dist.destroy_process_group()
    """

    mesh: DeviceMesh
    layout: LayoutName
    rank: int
    ranks: int
    length: int
    lengths: tuple[int, ...]
    sequences: int | None
    ends: tuple[int, ...]
    runs: tuple[tuple[Run, ...], ...]
    order: tuple[tuple[int, int], ...]
    positions: Tensor
    indices: Tensor
    check_calls: bool
    # What the ranks compared at creation, and compare in each call.
    _text: str

    def __init__(
        self,
        mesh: DeviceMesh,
        length: int | Sequence[int],
        layout: LayoutName = "contiguous",
        cu_seqlens: Tensor | Sequence[int] | None = None,
        *unnamed: Never,
        check_calls: bool = True,
        **unknown: Never,
    ) -> None:
        # Without a mesh there is nobody to agree with.
        self.mesh = checked_mesh(mesh, asked="Shards(mesh, ...)")
        self.rank, self.ranks = mesh.get_local_rank(), mesh.size()
        self._group = cpu_group(mesh)
        ends: list[int] | None = None

        def describe() -> str:
            nonlocal ends
            if unnamed or unknown:
                # Here, so that it is an error of all ranks.
                refuse_arguments("Shards", Shards, unnamed, unknown)
            self.check_calls = require_flag(check_calls, asked="Shards(check_calls=...)")
            ends = _as_list(cu_seqlens)
            self.runs = runs_of_ranks(self.ranks, length, layout, ends, asked="Shards")
            self.lengths = tuple(sum(run.length for run in runs) for runs in self.runs)
            self._text = f"tokens of each rank {self.lengths}; layout {layout}; cu_seqlens {ends}"
            return f"{self._text}; check_calls {check_calls}"

        agree(self._group, describe, asked="Shards", do="create it with the same arguments on every rank")
        self.layout, self.sequences = layout, None if ends is None else len(ends) - 1
        self.length = sum(self.lengths)
        self.ends = (0, self.length) if ends is None else tuple(ends)
        # Here, because torch.compile does not sort numbers that it does not know.
        places = [
            (run.sequence, run.start, rank, i) for rank, runs in enumerate(self.runs) for i, run in enumerate(runs)
        ]
        self.order = tuple((rank, i) for _, _, rank, i in sorted(places))
        device = device_of(mesh)
        # An inference tensor could not be saved for a backward pass.
        with torch.inference_mode(False):
            self.indices = self._indices_of(self.rank).to(device)
            self.positions = _joined([(run.start, run.length) for run in self.local]).to(device)
            self._places: Tensor | None = None if self._is_even else self._all_places().to(device)

    @property
    def local(self) -> tuple[Run, ...]:
        """The runs of this rank."""
        return self.runs[self.rank]

    def _indices_of(self, rank: int) -> Tensor:
        """Return the index of each token of a rank among all tokens."""
        return _joined([(self.ends[run.sequence] + run.start, run.length) for run in self.runs[rank]])

    def _all_places(self) -> Tensor:
        """Return where each token is among the tokens of all ranks, padded to the longest rank."""
        longest = max(self.lengths)
        slots = _joined([(rank * longest, count) for rank, count in enumerate(self.lengths)])
        indices = torch.cat([self._indices_of(rank) for rank in range(self.ranks)])
        return empty_like(slots).scatter_(0, indices, slots)

    def cut(self, x: Tensor, dim: int) -> Tensor:
        """Return the tokens of this rank.

        The gradient of x is that of the tokens of this rank, and 0 elsewhere: the sum over ranks is the whole gradient.

        Args:
            x: A tensor of all tokens, the same on all ranks.
            dim: Dimension of the tokens.

        Returns:
            A tensor with `lengths[rank]` tokens: a view if the layout is contiguous.

        Raises:
            RopewalkError: If the number of tokens is another one.
        """
        self._check_tokens(x, dim, self.length, "Shards.cut(x, dim)", "all tokens")
        if self.layout == "contiguous":
            return x.narrow(dim, sum(self.lengths[: self.rank]), self.lengths[self.rank])
        return x.index_select(dim, self.indices.to(x.device))

    def join(self, x: Tensor, dim: int) -> Tensor:
        """Return the tokens of all ranks, in order, on every rank. As a call, it is compared between the ranks.

        The gradient of x is the sum of the gradients of the ranks. If every rank computes the same loss of the result,
        divide that loss by the number of ranks.

        Args:
            x: A tensor of the tokens of this rank. Other dimensions are the same on all ranks.
            dim: Dimension of the tokens.

        Returns:
            A tensor with `length` tokens.

        Raises:
            RopewalkError: On every rank, if the number of tokens of some rank is another one, or if a dtype, another
                size, `dim`, or the need for a gradient differs between ranks.
        """
        asked = "Shards.join(x, dim)"

        def describe() -> str:
            sizes = [size for i, size in enumerate(x.shape) if i != dim % x.dim()]
            needs = torch.is_grad_enabled() and x.requires_grad
            return f"join; dimension {dim % x.dim()}, other sizes {sizes}; {x.dtype}; gradient {needs}"

        count, what = self.lengths[self.rank], "the tokens of this rank"
        self.agree(lambda: self._check_tokens(x, dim, count, asked, what), describe, asked=asked)
        dim %= x.dim()
        return self.ordered(gather(self.padded(x, dim), self.mesh).movedim(0, dim).flatten(dim, dim + 1), dim)

    def padded(self, x: Tensor, dim: int) -> Tensor:
        """Return the tokens of this rank, followed by zeros up to the number of tokens of the longest rank."""
        missing = max(self.lengths) - x.shape[dim]
        if not missing:
            return x
        return functional.pad(x.movedim(dim, -1), (0, missing)).movedim(-1, dim)

    def ordered(self, x: Tensor, dim: int) -> Tensor:
        """Return all tokens in order, from the padded tokens of one rank after the other in dimension `dim`."""
        return x if self._places is None else x.index_select(dim, self._places.to(x.device))

    def spread(self, x: Tensor, dim: int) -> Tensor:
        """Return the padded tokens of one rank after the other, from all tokens in order: the inverse of `ordered`."""
        if self._places is None:
            return x
        size = list(x.shape)
        size[dim] = self.ranks * max(self.lengths)
        return new_zeros(x, size).index_copy(dim, self._places.to(x.device), x)

    def agree(self, check: Callable[[], object], describe: Callable[[], str], *, asked: str) -> None:
        """Check a call on all ranks. The shards are compared too: a rank can have created several.

        Args:
            check: Raises if the arguments of this rank are invalid.
            describe: Describes what else must not differ between ranks.
            asked: The call, for errors.

        Raises:
            RopewalkError: On every rank, if a rank disagrees or has raised.
        """
        do = "pass the same arguments on every rank, with the tokens that Shards assigns to it"
        group = self._group if self.check_calls else None
        agree_on_call(group, check, lambda: f"{self._text}; {describe()}", asked=asked, do=do)

    @property
    def _is_even(self) -> bool:
        """Whether the tokens of one rank after the other are in order, without padding."""
        return self.layout == "contiguous" and len(set(self.lengths)) == 1

    def __deepcopy__(self, memo: object) -> "Shards":
        # It never changes, and its process groups cannot be copied: a copy of a model shares it.
        return self

    def __repr__(self) -> str:
        packed = "" if self.sequences is None else f", {self.sequences} sequences"
        return f"Shards({self.length} tokens{packed}, {self.layout}, rank {self.rank} of {self.ranks})"

    def _check_tokens(self, x: Tensor, dim: int, count: int, asked: str, what: str) -> None:
        if not isinstance(x, Tensor) or not -x.dim() <= dim < x.dim() or x.shape[dim] != count:
            raise RopewalkError(
                asked=asked,
                expected=f"{what}: {count} in dimension {dim}",
                got=described(x),
                do="pass the dimension of the tokens: 1 for [batch, seq, dim], 2 for [batch, heads, seq, dim]",
            )


def _joined(ranges: Sequence[tuple[int, int]]) -> Tensor:
    """Return the numbers of ranges, each from its first number on, in one tensor on the CPU."""
    parts = [arange(first, first + count, device=torch.device("cpu")) for first, count in ranges]
    return torch.cat(parts) if parts else arange(0, device=torch.device("cpu"))


def _as_list(cu_seqlens: Tensor | Sequence[int] | None) -> list[int] | None:
    if cu_seqlens is None:
        return None
    numbers = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else cu_seqlens
    ends = [as_int(x) for x in numbers] if isinstance(numbers, Sequence) else [None]
    if any(x is None for x in ends):
        raise RopewalkError(
            asked="Shards(cu_seqlens=...)",
            expected="whole numbers [sequences + 1]",
            got=shown(cu_seqlens),
            do="cumulate the lengths of the packed sequences of all ranks",
        )
    return [x for x in ends if x is not None]
