"""The state before each run of tokens, merged from the states of the runs of all ranks."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ropewalk.kernels.constructors import new_zeros, tensor
from ropewalk.kernels.types import FeatureMap, Sums
from ropewalk.nn.linear.near_keys import EMPTY, NearKeys, map_of_near, sum_far
from ropewalk.nn.linear.state import LinearState
from ropewalk.nn.rotary.embedding import RotaryEmbedding
from ropewalk.parallel.collectives import attach, gather
from ropewalk.parallel.layout import Run
from ropewalk.parallel.shards import Shards

__all__ = ["Exchange", "Slot"]

# States that are added at a time. More need more memory, fewer more operations.
_BLOCK = 64


class Slot(NamedTuple):
    """A run of any rank, and the number of its state among the gathered ones.

    >>> Slot(Run(0, 4, 8, 0), 1).run.length
    4
    """

    run: Run
    number: int


class Exchange:
    """States of runs, gathered by one all-gather. Its backward pass is one reduce-scatter.

    A rank sends the state of a run if another run reads it: one state per rank of a contiguous layout, two per sequence
    of zigzag. With a bias that has a window it also sends the sums over all keys of the run: keys that are near the end
    of one rank are not near the tokens two ranks later.

    Args:
        shards: The shards.
        state: State of the runs of this rank: rows are [runs * batch].
        whole: Sums over all keys of the runs, if `state` has near keys; None otherwise.
        batch: Number of rows per run.
        causal: Whether a run reads the runs before it only. Otherwise it reads all others of its sequence.
        every: Whether all runs are sent, for the states after the sequences.

    >>> import torch.distributed as dist
    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> mesh = init_device_mesh("cpu", (1,))
    >>> state = LinearState(torch.ones(2, 1, 1, 1), torch.ones(2, 1, 1), feature_map="elu")  # one row per run
    >>> shards = Shards(mesh, 4, "zigzag")
    >>> exchange = Exchange(shards, state, None, batch=1, causal=True, every=False)
    >>> exchange.before(shards.local, 0, None, None).below.flatten().tolist()  # the second run reads the first
    [0.0, 1.0]
    >>> dist.destroy_process_group()
    """

    def __init__(
        self, shards: Shards, state: LinearState, whole: Sums | None, *, batch: int, causal: bool, every: bool
    ) -> None:
        self._state, self._batch, self._causal = state, batch, causal
        last: dict[int, int] = {}
        for run in itertools.chain.from_iterable(shards.runs):
            last[run.sequence] = max(run.stop, last.get(run.sequence, 0))

        def is_read(run: Run) -> bool:
            # Without causality a run is read by all others of its sequence.
            return run.stop < last[run.sequence] or (not causal and run.start > 0)

        sent = [[i for i, run in enumerate(runs) if every or is_read(run)] for runs in shards.runs]
        count = max(map(len, sent))
        self._slots: dict[int, list[Slot]] = {}
        places = [{i: place for place, i in enumerate(chosen)} for chosen in sent]
        # In the order of the tokens.
        for rank, i in shards.order:
            if i in places[rank]:
                slot = Slot(shards.runs[rank][i], rank * count + places[rank][i])
                self._slots.setdefault(slot.run.sequence, []).append(slot)
        parts = {"above": state.above, "below": state.below}
        if state.log_decay is not None:
            parts["log_decay"] = state.log_decay
        if state.near is not None and whole is not None:
            parts |= {"whole_above": whole.above, "whole_below": whole.below}
            parts |= {"keys": state.near.keys, "values": state.near.values}
        self._shapes: dict[str, torch.Size] = {name: x.shape[1:] for name, x in parts.items()}
        self._gathered: Tensor | None = None
        if count:
            flat = torch.cat([x.flatten(1).to(state.above.dtype) for x in parts.values()], dim=1)
            runs, chosen = flat.unflatten(0, (max(1, len(shards.local)), batch)), sent[shards.rank]
            # Ranks that send less repeat a run, which nobody reads. A compiled backward pass would omit the
            # reduce-scatter of a constant, for which the other ranks wait.
            self._gathered = gather(runs[chosen + [0] * (count - len(chosen))], shards.mesh)

    def attach(self, out: Tensor) -> Tensor:
        """Return `out`, in whose backward pass this rank takes part in the reduce-scatter even if it read nothing.

        Also on a rank that read: which of its gradients, and of their gradients, need what it read depends on the call.
        """
        return out if self._gathered is None else attach(out, self._gathered)

    def before(
        self, runs: Sequence[Run], start: int | Tensor, rotation: RotaryEmbedding | None, length: int | Tensor | None
    ) -> LinearState:
        """Return the states that runs read, without the initial state: rows are [runs * batch].

        Args:
            runs: Runs of this rank; or runs of no tokens at the ends of sequences, for the states after them.
            start: Position of the first token of each sequence: an int, or a tensor [runs * batch].
            rotation: The rotation, or None.
            length: Length for rules that depend on it.
        """
        state, device = self._state, self._state.above.device
        sources = [self._sources(run) for run in runs]
        firsts = [run.start for run in runs for _ in range(self._batch)]
        same = len(set(firsts)) == 1
        position = (firsts[0] if same else tensor(firsts, dtype=torch.int64, device=device)) + start
        if state.near is None:
            weights, total = self._weights(sources)
            sums = Sums(self._sum("above", sources, weights), self._sum("below", sources, weights))
            return replace(state, above=sums.above, below=sums.below, position=position, first=None, log_decay=total)
        count = state.near.keys.shape[2]
        far = [[x for x in each if x.run.stop <= run.start - count] for each, run in zip(sources, runs, strict=True)]
        close = [[x for x in each if x.run.stop > run.start - count] for each, run in zip(sources, runs, strict=True)]
        above, below = (self._sum(f"whole_{name}", far) + self._sum(name, close) for name in ("above", "below"))
        sums = Sums(above, below)
        # Tokens are near from run.start - count on. Others that were sent as near keys leave the window here.
        leaving = [
            [(x, i) for x in each for i in range(max(x.run.start, x.run.stop - count), run.start - count)]
            for each, run in zip(close, runs, strict=True)
        ]
        if any(leaving):
            sums = sum_far(self._keys(leaving, start), sums, state.feature_map, rotation, length)
        staying = [
            [(x, i) for x in each for i in range(max(x.run.start, run.start - count), x.run.stop)]
            for each, run in zip(close, runs, strict=True)
        ]
        near = self._keys(staying, start, count)
        return replace(state, above=sums.above, below=sums.below, position=position, first=None, near=near)

    def _sources(self, run: Run) -> list[Slot]:
        """Return the gathered runs that a run reads, in their order."""
        slots = self._slots.get(run.sequence, [])
        if self._causal:
            return [slot for slot in slots if slot.run.stop <= run.start]
        return [slot for slot in slots if slot.run.start != run.start]

    def _numbers(self, name: str) -> Tensor:
        """Return one of the gathered tensors [slots, batch, ...]."""
        names = list(self._shapes)
        first = sum(self._shapes[other].numel() for other in names[: names.index(name)])
        gathered: Any = self._gathered
        shape = self._shapes[name]
        return gathered.flatten(0, 1)[..., first : first + shape.numel()].unflatten(-1, shape)

    def _padded(self, sources: Sequence[Sequence[Slot]]) -> tuple[Tensor, Tensor]:
        """Return the indices of slots [most, runs], and the number of their tokens: 0 for padding at the front."""
        most = max(map(len, sources))
        index = [[0] * (most - len(each)) + [slot.number for slot in each] for each in sources]
        tokens = [[0] * (most - len(each)) + [slot.run.length for slot in each] for each in sources]
        device = self._state.above.device
        both = (tensor(x, dtype=torch.int64, device=device).reshape(len(sources), most).t() for x in (index, tokens))
        return next(both), next(both)

    def _weights(self, sources: Sequence[Sequence[Slot]]) -> tuple[Tensor | None, Tensor | None]:
        """Return the decay of each source by the sources after it [most, runs, batch or 1, heads], and of all of them.

        The decay of all is a logarithm [runs * batch, heads]; None if it is not a part of the state.
        """
        state = self._state
        if state.log_decay is None and state.slopes is None:
            return None, None
        if not any(sources) or self._gathered is None:
            total = state.log_decay
            return None, None if total is None else new_zeros(total, len(sources) * self._batch, *total.shape[1:])
        index, tokens = self._padded(sources)
        if state.slopes is not None:
            logs = -tokens[..., None, None] * state.slopes
        else:
            logs = torch.where((tokens > 0)[..., None, None], self._numbers("log_decay")[index], 0.0)
        later = torch.cat([logs[1:], new_zeros(logs[:1], logs[:1].shape)])
        weights = later.flip(0).cumsum(0).flip(0).exp().to(state.above.dtype)
        total = None if state.log_decay is None else logs.sum(0).flatten(0, 1)
        return weights, total

    def _sum(self, name: str, sources: Sequence[Sequence[Slot]], weights: Tensor | None = None) -> Tensor:
        """Return the sum of a tensor of the sources of each run [runs * batch, ...]."""
        state, shape = self._state, self._shapes[name]
        total = new_zeros(state.above, len(sources), self._batch, *shape)
        if any(sources) and self._gathered is not None:
            numbers, (index, tokens) = self._numbers(name), self._padded(sources)
            size = max(1, _BLOCK // len(sources))
            for begin in range(0, len(index), size):
                part = slice(begin, begin + size)
                block = numbers[index[part]]
                # Padding reads the state of some rank, which may be NaN.
                padding = (tokens[part] == 0).reshape(*block.shape[:2], *[1] * (block.dim() - 2))
                block = block.masked_fill(padding, 0.0)
                if weights is not None:
                    factor = weights[part]
                    block = block * factor.reshape(*factor.shape, *[1] * (block.dim() - factor.dim()))
                total = total + block.sum(0)
        return total.flatten(0, 1)

    def _keys(self, chosen: Sequence[Sequence[tuple[Slot, int]]], start: int | Tensor, count: int = 0) -> NearKeys:
        """Return chosen tokens of each run, of those that were sent as near keys.

        Args:
            chosen: For each run, the slots and the indices of tokens in their sequence.
            start: As in `before`.
            count: Number of keys, of which those at the front may add nothing. By default the longest of `chosen`.
        """
        state, batch = self._state, self._batch
        near: Any = state.near
        total, device = near.keys.shape[2], state.above.device
        count = count or max(map(len, chosen))
        places = [
            [-1] * (count - len(each)) + [slot.number * total + total - slot.run.stop + i for slot, i in each]
            for each in chosen
        ]
        numbers = [[0] * (count - len(each)) + [i for _, i in each] for each in chosen]
        index = tensor(places, dtype=torch.int64, device=device).reshape(len(chosen), count)
        hidden = (index < 0).repeat_interleave(batch, dim=0)
        ids = tensor(numbers, dtype=torch.int64, device=device).reshape(len(chosen), count)
        ids = ids.repeat_interleave(batch, dim=0) + (start.reshape(-1, 1) if isinstance(start, Tensor) else start)
        ids = ids.masked_fill(hidden, EMPTY)
        fill = FeatureMap[map_of_near(state.feature_map)].zero
        results: list[Tensor] = []
        for name, like, nothing in (("keys", near.keys, fill), ("values", near.values, 0.0)):
            if self._gathered is None:
                x = new_zeros(like, len(ids), like.shape[1], count, like.shape[3])
            else:
                x = self._numbers(name).permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, index.clamp_min(0)]
                x = x.movedim(2, 0).flatten(0, 1).to(like.dtype)
            results.append(x.masked_fill(hidden[:, None, :, None], nothing))
        return NearKeys(results[0], results[1], ids)
