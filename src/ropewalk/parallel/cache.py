"""ShardedKVCache: keys and values that are cut over ranks, for decoding contexts that are too long for one device."""

from collections.abc import Callable, Mapping
from typing import Never

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ropewalk.errors import RopewalkError, require_flag, shown
from ropewalk.kernels.constructors import arange, tensor, zeros_like
from ropewalk.kernels.precision import working_dtype
from ropewalk.nn.attention.cache import KVCache
from ropewalk.nn.attention.cache_interface import CachedTokens, CacheOfRanks
from ropewalk.nn.attention.moved_keys import KeyRotation
from ropewalk.nn.attention.scores import part_weight
from ropewalk.nn.attention.visibility import Visibility
from ropewalk.nn.position_checks import can_read_values, check_index, described
from ropewalk.nn.saved_tensors import check_tensor, checked_tensors
from ropewalk.parallel.agreement import agree, agree_on_call, cpu_group
from ropewalk.parallel.arguments import describe_autocast
from ropewalk.parallel.collectives import gather
from ropewalk.parallel.mesh import checked_mesh, device_of
from ropewalk.signatures import checks_names, refuse_arguments

__all__ = ["ShardedKVCache"]

_SAVED = ("keys", "values", "lengths", "positions", "hidden", "ranks")


class ShardedKVCache(KVCache, CacheOfRanks):
    """`KVCache` whose keys and values are cut over the ranks of a mesh. `Attention` uses it as any other cache.

    Token n is stored on rank n % ranks, in slot n // ranks: the ranks stay balanced while tokens are decoded. All ranks
    pass the same tokens. Each computes the attention of their queries to its own keys, and one all-gather per call
    exchanges outputs and the log-sum-exp of their scores, by which they are merged (as in 2310.01889, eq. 4). So every
    rank returns the same output, bit for bit if the devices are equal: that of a `KVCache` up to rounding.

    A layer with a window needs few keys. `layer.make_cache(batch)` on every rank then stores them without an exchange.

    Args:
        mesh: A DeviceMesh with one dimension: mesh["name"] of a mesh with several.
        batch: Number of sequences.
        num_kv_heads: Number of key heads.
        max_length: Largest number of tokens per sequence, on all ranks together.
        head_dim: Width of a key head.
        v_dim: Width of a value head; None for head_dim.
        dtype: Floating-point dtype of keys and values; None for the default dtype.
        device: Device of the cache; None for the device of the mesh.
        check_calls: Whether each call compares its shapes, its options and the number of tokens between the ranks, by
            an exchange of 32 bytes on the CPU. Compiled calls do not.

    Attributes:
        keys: Keys of this rank [batch, num_kv_heads, ceil(max_length / ranks), head_dim].
        values: Values of this rank [batch, num_kv_heads, ceil(max_length / ranks), v_dim].
        lengths: Number of tokens per sequence on all ranks together [batch], int64.
        positions: Position of every token of all ranks [batch, max_length], int64; -1 if it was a fraction.
        hidden: True for tokens of all ranks that a `key_mask` hides [batch, max_length]; None if there was no mask.
        mesh: The mesh.
        rank: Index of this rank in the mesh.
        ranks: Number of ranks.
        check_calls: As the argument.

    Raises:
        RopewalkError: On every rank, if an argument of some rank is invalid, or differs between ranks.

    >>> import torch.distributed as dist
    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> cache = ShardedKVCache(init_device_mesh("cpu", (1,)), 1, 1, max_length=4, head_dim=1)
    >>> cache.append(torch.ones(1, 1, 3, 1), torch.ones(1, 1, 3, 1))
    >>> cache.lengths.tolist(), cache.keys.flatten().tolist()  # one rank has all tokens
    ([3], [1.0, 1.0, 1.0, 0.0])
    >>> dist.destroy_process_group()
    """

    @checks_names
    def __init__(
        self,
        mesh: DeviceMesh,
        batch: int,
        num_kv_heads: int,
        max_length: int,
        head_dim: int,
        *unnamed: Never,
        v_dim: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        check_calls: bool = True,
        **unknown: Never,
    ) -> None:
        # Without a mesh there is nobody to agree with.
        self.mesh: DeviceMesh = checked_mesh(mesh, asked="ShardedKVCache(mesh, ...)")
        self.rank: int = mesh.get_local_rank()
        self.ranks: int = mesh.size()
        self.check_calls: bool = True
        self._group = cpu_group(mesh)
        group = dist.get_process_group_ranks(mesh.get_group())
        self._of_group: str = "" if len(group) == dist.get_world_size() else f" of the group of rank {group[0]}"
        create, home = super().__init__, device_of(mesh) if device is None else device

        def describe() -> str:
            if unnamed or unknown:
                # Here, so that it is an error of all ranks.
                refuse_arguments("ShardedKVCache", ShardedKVCache, unnamed, unknown)
            self.check_calls = require_flag(check_calls, asked="ShardedKVCache(check_calls=...)")
            create(batch, num_kv_heads, max_length, head_dim, v_dim=v_dim, dtype=dtype, device=home)
            return f"{self._describe()}; check_calls {check_calls}"

        agree(self._group, describe, asked="ShardedKVCache", do="create it with the same arguments on every rank")

    def update(
        self,
        k: Tensor,
        v: Tensor,
        *,
        counts: Tensor | None = None,
        positions: Tensor | None = None,
        key_mask: Tensor | None = None,
        window: int | None = None,
    ) -> CachedTokens:
        """As `KVCache.update`, with the keys of this rank, and the function that merges outputs with other ranks."""
        seq, compiling = k.shape[2], torch.compiler.is_compiling()
        # Whether the host knows which tokens there were before.
        known = self.even and not compiling
        before, starts = self.filled_at_most, None if known else self.lengths.clone()
        self._write(k, v, counts, positions, key_mask)
        # torch.compile reads all slots, so that shapes do not change between steps.
        last = self._stored_here(self.max_length if compiling else self.filled_at_most)
        first = 0 if window is None or not known else self._stored_here(max(0, before - window + 1))
        slots = slice(first, last)
        visibility = Visibility()
        if not known or seq != 1 or counts is not None:
            indices = arange(first, last, device=k.device) * self.ranks + self.rank
            visibility = Visibility(True, before if starts is None else starts, window=window, key_indices=indices)
        masks = [] if self.hidden is None else [~self.hidden]
        if key_mask is not None and key_mask.shape[1] != seq:
            masks.append(key_mask)
        if masks:
            visible = masks[0] if len(masks) == 1 else masks[0] & masks[1]
            visibility = visibility._replace(key_mask=self._of_rank(visible)[:, slots])
        ids = self._of_rank(self.positions)[:, slots]
        return CachedTokens(self.keys[:, :, slots], self.values[:, :, slots], ids, visibility, self._merged)

    def agree(self, check: Callable[[], None], layer: nn.Module, tensors: Mapping[str, Tensor | None]) -> None:
        """Check a call of a layer on all ranks. `Attention` calls it.

        Args:
            check: Raises if the arguments of this rank are invalid.
            layer: The layer.
            tensors: The arguments of the call by name.

        Raises:
            RopewalkError: On every rank, if a rank disagrees or has raised, or if a gradient is needed.
        """

        def check_all() -> None:
            check()
            needs = [x for x in tensors.values() if x is not None and x.requires_grad]
            if torch.is_grad_enabled() and (needs or any(x.requires_grad for x in layer.parameters())):
                raise RopewalkError(
                    asked="attention(x, cache=...) with a ShardedKVCache",
                    expected="no gradients: the cache is overwritten at every step",
                    got="tokens or a layer that require a gradient",
                    do="decode under torch.inference_mode() or torch.no_grad()",
                )

        def describe() -> str:
            parts = [f"{name} {_shape(x)}" for name, x in tensors.items()]
            counts = tensors.get("counts")
            if counts is not None and can_read_values(counts):
                parts.append(f"counts {counts.tolist()}")
            parts.append(describe_autocast(self.keys))
            tokens = f"{self.filled_at_most} tokens in the cache at most; lengths that are equal {self.even}"
            return "; ".join([*parts, tokens, self._describe(), f"layer {' '.join(repr(layer).split())}"])

        do = "pass the same tokens and options on every rank, to caches that were used in the same calls"
        group = self._group if self.check_calls else None
        agree_on_call(group, check_all, describe, asked="attention(x, cache=...) with a ShardedKVCache", do=do)

    def reorder(self, index: Tensor) -> None:
        """As `KVCache.reorder`, on all ranks, which compare the index as they compare calls.

        Args:
            index: As in `KVCache.reorder`, the same on all ranks.

        Raises:
            RopewalkError: On every rank, if the index is invalid on a rank, or differs between ranks.
        """

        def check() -> None:
            check_index(index, self.batch, self.lengths.device, asked="ShardedKVCache.reorder(index)")

        def describe() -> str:
            return f"index {index.tolist() if can_read_values(index) else list(index.shape)}; {self._describe()}"

        do = "pass the same index on every rank"
        group = self._group if self.check_calls else None
        agree_on_call(group, check, describe, asked="ShardedKVCache.reorder(index)", do=do)
        super().reorder(index)

    def truncate(self, length: int) -> None:
        """As `KVCache.truncate`, on all ranks.

        Args:
            length: Number of tokens to keep. A sequence with fewer tokens is unchanged.

        Raises:
            RopewalkError: If `length` is not an integer of at least 1.
        """
        super().truncate(length)
        for buffer in (self.keys, self.values):
            buffer[:, :, self._stored_here(int(length)) :].zero_()

    _do_if_full = "create a cache that is long enough before the first token"

    def evict_prefix(self, count: int, rope: KeyRotation) -> None:
        """Raise an error: tokens would move to other ranks.

        Raises:
            RopewalkError: Always.
        """
        raise RopewalkError(
            asked=f"ShardedKVCache.evict_prefix({count})",
            expected="a KVCache, whose tokens move to the front",
            got="a ShardedKVCache, in which the index of a token determines its rank",
            do="create a longer cache, or give the layer a window and use its make_cache on every rank",
        )

    def state_dict(self) -> dict[str, Tensor]:
        """Return copies of the tensors of the cache, with all slots, for `torch.distributed.checkpoint`.

        `torch.distributed.checkpoint.save({"cache": cache})` and `load` call it, and `load_state_dict`. It exchanges
        nothing.

        Returns:
            "keys" and "values" of all ranks as DTensors, cut over the mesh in dimension 2; "lengths", "positions" and
            "hidden", the same on all ranks; and "ranks", the number of ranks []. If the mesh is a part of all ranks,
            each name ends with " of the group of rank N", its first rank: other groups have other tokens or heads, and
            a checkpoint keeps one tensor per name.

        Raises:
            RopewalkError: If the cache has the state of an encoding, which a new cache cannot load.
        """
        if self.encoding_state is not None:
            raise RopewalkError(
                asked="ShardedKVCache.state_dict()",
                expected="no encoding_state: a checkpoint is loaded by a new cache, which does not know its shape",
                got=f"encoding_state {list(self.encoding_state.shape)}",
                do="save cache.encoding_state, which is the same on all ranks, and set it to None before",
            )
        hidden = zeros_like(self.positions, dtype=torch.bool) if self.hidden is None else self.hidden
        state = self._buffers() | {"hidden": hidden}
        state = {name: x.detach().clone(memory_format=torch.contiguous_format) for name, x in state.items()}
        for name in ("keys", "values"):
            state[name] = DTensor.from_local(state[name], self.mesh, [Shard(2)], run_check=False)
        state["ranks"] = tensor(self.ranks, dtype=torch.int64, device="cpu")
        return {f"{name}{self._of_group}": x for name, x in state.items()}

    @checks_names
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Replace the content of the cache by that of a saved one. The cache then belongs to no layer.

        All ranks call it. If an error is raised, nothing was written on any of them.

        Args:
            state: What `state_dict` returned, for the same sizes and dtype, on the same ranks.

        Raises:
            RopewalkError: On every rank, if a tensor is missing, if there is another one, or if the number of ranks, a
                shape, a dtype or a length does not match.
        """
        tensors: dict[str, Tensor] = {}

        def describe() -> str:
            tensors.update(self._checked_state(state))
            return f"lengths {tensors['lengths'].tolist()}"

        do = "load the same checkpoint on every rank"
        agree(self._group, describe, asked="ShardedKVCache.load_state_dict(state)", do=do)
        self.reset()
        lengths = tensors["lengths"].to(self.lengths.device)
        # A file can contain NaN in slots past the length, which a mask does not remove: 0 times NaN is NaN.
        empty = arange(self.max_length, device=lengths.device) >= lengths[:, None]
        if bool(tensors["hidden"].any()):
            with torch.inference_mode(False):
                self.hidden: Tensor | None = tensors["hidden"].to(lengths.device) & ~empty
        self.lengths.copy_(lengths)
        self.positions.copy_(tensors["positions"]).masked_fill_(empty, 0)
        slots = arange(self.keys.shape[2], device=lengths.device) * self.ranks + self.rank
        for name, buffer in (("keys", self.keys), ("values", self.values)):
            buffer.copy_(tensors[name]).masked_fill_((slots >= lengths[:, None])[:, None, :, None], 0)
        self._restore_counts(lengths.tolist(), self.positions.cpu())

    def __repr__(self) -> str:
        return f"{super().__repr__()}, rank {self.rank} of {self.ranks}"

    def _describe(self) -> str:
        sizes = self.batch, self.num_kv_heads, self.max_length, self.head_dim, self.v_dim
        return f"[batch, num_kv_heads, max_length, head_dim, v_dim] of the cache {list(sizes)} {self.keys.dtype}"

    def _key_slots(self) -> int:
        return -(-self.max_length // self.ranks)

    def _stored_here(self, tokens: int) -> int:
        """Return how many of the first tokens of a sequence are on this rank."""
        return (tokens - self.rank + self.ranks - 1) // self.ranks

    def _of_rank(self, x: Tensor) -> Tensor:
        """Return the part [batch, slots] of this rank of a tensor with all tokens [batch, max_length]."""
        return x[:, self.rank :: self.ranks]

    def _store(self, new: dict[str, Tensor], indices: Tensor, counts: Tensor | None) -> None:
        super()._store({name: x for name, x in new.items() if name not in ("keys", "values")}, indices, counts)
        seq, ranks = indices.shape[1], self.ranks
        pairs = (self.keys, new["keys"]), (self.values, new["values"])
        if self.even and counts is None and not torch.compiler.is_compiling():
            before = self.filled_at_most
            slots = slice(self._stored_here(before), self._stored_here(before + seq))
            for buffer, x in pairs:
                buffer[:, :, slots] = x[:, :, (self.rank - before) % ranks :: ranks]
            return
        # Tokens that belong to this rank: each `ranks`-th from the first one on, which differs between sequences.
        steps = (self.rank - self.lengths[:, None]) % ranks + arange(-(-seq // ranks), device=indices.device) * ranks
        # A step past the last token writes what there is. By the remainder no two steps have the same slot.
        slots = (self.lengths[:, None] + steps) // ranks % self.keys.shape[2]
        rows, exists = arange(self.batch, device=indices.device)[:, None], (steps < seq)[..., None, None]
        for buffer, x in pairs:
            by_slot, by_token = buffer.transpose(1, 2), x.transpose(1, 2)
            chosen = by_token[rows, steps.clamp_max(seq - 1)]
            by_slot[rows, slots] = torch.where(exists, chosen, by_slot[rows, slots])

    def _merged(self, out: Tensor, lse: Tensor) -> Tensor:
        """Return the outputs over the keys of all ranks, from those over the keys of this rank."""
        both = gather(torch.cat([out.to(working_dtype(out)), lse.to(working_dtype(out)).unsqueeze(-1)], -1), self.mesh)
        parts, sums = both[..., :-1], both[..., -1]
        return (part_weight(sums, torch.logsumexp(sums, dim=0)) * parts).sum(0).to(out.dtype)

    def _checked_state(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of this rank. Raise unless they fit."""
        asked = "ShardedKVCache.load_state_dict(state)"
        do = "create the cache with the sizes and dtype of the saved one, on as many ranks"
        if not isinstance(state, Mapping):
            raise RopewalkError(asked=asked, expected="what state_dict() returned", got=shown(state), do=do)
        if state and not any(f"{name}{self._of_group}" in state for name in _SAVED):
            raise RopewalkError(
                asked=asked,
                expected=f"names that end with {self._of_group!r}" if self._of_group else f"{', '.join(_SAVED)}",
                got=", ".join(map(str, state)),
                do="load a cache on the ranks that saved it",
            )
        state = {str(name).removesuffix(self._of_group): x for name, x in state.items()}
        for name in ("keys", "values"):
            x = state.get(name)
            if x is None:
                continue
            cut = (x.placements, x.device_mesh.size()) if isinstance(x, DTensor) else None
            if cut != ((Shard(2),), self.ranks):
                got = described(x) if cut is None else f"a DTensor {cut[0]} over {cut[1]} ranks"
                expected = f"{name} as a DTensor that is cut over {self.ranks} ranks in dimension 2"
                raise RopewalkError(asked=asked, expected=expected, got=got, do=do)
        plain = {name: x.to_local() if isinstance(x, DTensor) else x for name, x in state.items()}
        tensors = checked_tensors(plain, _SAVED, (), asked=asked)
        check_tensor(tensors["ranks"], "ranks", (), torch.int64, asked=asked, do=do)
        if int(tensors["ranks"]) != self.ranks:
            raise RopewalkError(
                asked=asked,
                expected=f"a cache that was saved on {self.ranks} ranks: token n is on rank n % ranks",
                got=f"a cache that was saved on {int(tensors['ranks'])}",
                do="load it on as many ranks, or read the tokens again",
            )
        hidden = zeros_like(self.positions, dtype=torch.bool) if self.hidden is None else self.hidden
        for name, buffer in (self._buffers() | {"hidden": hidden}).items():
            check_tensor(tensors[name], name, tuple(buffer.shape), buffer.dtype, asked=asked, do=do)
        lengths = tensors["lengths"].tolist()
        if min(lengths) < 0 or max(lengths) > self.max_length:
            expected = f"lengths from 0 to {self.max_length}"
            raise RopewalkError(asked=asked, expected=expected, got=shown(lengths), do=do)
        return tensors


def _shape(x: Tensor | None) -> str:
    # Without the device, whose index differs between ranks.
    return "None" if x is None else f"{list(x.shape)} {x.dtype}"
