"""KVCache: keys and values of past tokens, for decoding."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from ropewalk.errors import RopewalkError, require_count, warn
from ropewalk.kernels.constructors import arange, full_like, tensor, zeros, zeros_like
from ropewalk.nn.attention.cache_checks import check_counts, check_new_tokens, checked_dtype
from ropewalk.nn.attention.cache_interface import CachedTokens
from ropewalk.nn.attention.moved_keys import KeyRotation, moved_keys
from ropewalk.nn.attention.saved_cache import checked_cache_state
from ropewalk.nn.attention.visibility import Visibility
from ropewalk.nn.owners import release
from ropewalk.nn.position_checks import (
    as_signed,
    can_read_values,
    check_ids,
    check_index,
    check_key_mask,
    check_positions,
    warn_if_row_is_hidden,
)
from ropewalk.signatures import checks_names

__all__ = ["KVCache"]

# Tensors of a cache with a slot per token, and the dimension of the slots.
SLOT_DIMS = {"keys": 2, "values": 2, "positions": 1, "hidden": 1}


class KVCache:
    """Cache of the keys and values of one attention layer, with a fixed size and without gradients.

    All memory is allocated at creation. The tokens of a sequence are stored in slots 0, 1, ... Slots past the length of
    the sequence contain zeros. Keys are stored as they are passed: rotated.

    No method synchronizes with the device. The host only knows an upper bound of the longest sequence,
    `filled_at_most`, and tokens that may not fit raise an error.

    Args:
        batch: Number of sequences.
        num_kv_heads: Number of key heads.
        max_length: Number of slots per sequence.
        head_dim: Width of a key head.
        v_dim: Width of a value head; None for head_dim.
        dtype: Floating-point dtype of keys and values; None for the default dtype.
        device: Device of the cache; None for the default device.

    Attributes:
        keys: [batch, num_kv_heads, max_length, head_dim].
        values: [batch, num_kv_heads, max_length, v_dim].
        lengths: Number of tokens per sequence [batch], int64, on the device. Lengths differ if `counts` were passed.
        positions: Position of the token in each slot [batch, max_length], int64; -1 if it was a fraction.
        hidden: True for slots with a token that a `key_mask` hides [batch, max_length]; None if there was no mask.
        encoding_state: State of an encoding that needs one between calls; None in a new cache.
        filled_at_most: Upper bound of `lengths`, known to the host.
        even: Whether the host knows that every sequence has `filled_at_most` tokens.

    Raises:
        RopewalkError: If a size is not an integer of at least 1, or if the dtype is not floating-point.

    >>> cache = KVCache(2, 1, max_length=8, head_dim=4)
    >>> cache.append(torch.ones(2, 1, 3, 4), torch.ones(2, 1, 3, 4), torch.tensor([3, 1]))  # the second is padded
    >>> cache.lengths.tolist(), cache.filled_at_most
    ([3, 1], 3)
    >>> cache.keys[:, 0, :, 0].tolist()
    [[1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]]
    """

    _rolling: ClassVar[bool] = False

    @checks_names
    def __init__(
        self,
        batch: int,
        num_kv_heads: int,
        max_length: int,
        head_dim: int,
        *,
        v_dim: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        sizes = {"batch": batch, "num_kv_heads": num_kv_heads, "max_length": max_length, "head_dim": head_dim}
        sizes["v_dim"] = head_dim if v_dim is None else v_dim
        for name, size in sizes.items():
            sizes[name] = require_count(size, asked=f"KVCache({name}=...)", do="pass a whole number above 0")
        self.batch: int = sizes["batch"]
        self.num_kv_heads: int = sizes["num_kv_heads"]
        self.max_length: int = sizes["max_length"]
        self.head_dim: int = sizes["head_dim"]
        self.v_dim: int = sizes["v_dim"]
        dtype = checked_dtype(torch.get_default_dtype() if dtype is None else dtype, "KVCache(dtype=...)")
        shape = self.batch, self.num_kv_heads, self._key_slots()
        # Tensors created in inference mode cannot be written outside of it.
        with torch.inference_mode(False):
            self.keys: Tensor = zeros(*shape, self.head_dim, dtype=dtype, device=device)
            self.values: Tensor = zeros(*shape, self.v_dim, dtype=dtype, device=device)
            self.lengths: Tensor = zeros(self.batch, dtype=torch.int64, device=device)
            self.positions: Tensor = zeros(self.batch, self.max_length, dtype=torch.int64, device=device)
        self.hidden: Tensor | None = None
        self.encoding_state: Tensor | None = None
        self.filled_at_most: int = 0
        self.even: bool = True
        # Whether the position of every token is its index. Otherwise new tokens continue from the stored positions.
        self._counts_positions: bool = True
        # False after positions that are not stored: fractions, or several axes.
        self._knows_positions: bool = True

    @checks_names
    def append(self, k: Tensor, v: Tensor, counts: Tensor | None = None, *, positions: Tensor | None = None) -> None:
        """Append keys and values to each sequence. If an error is raised, nothing was written.

        Args:
            k: Keys [batch, num_kv_heads, seq, head_dim].
            v: Values [batch, num_kv_heads, seq, v_dim].
            counts: Number of tokens per sequence [batch]; the rest of `seq` is padding, which is not stored. None for
                no padding.
            positions: Whole positions [seq] or [batch, seq]; None continues from the last token, or starts at 0.

        Raises:
            RopewalkError: If a shape, dtype or device does not match, if a tensor requires a gradient, or if the tokens
                may not fit.

        >>> cache = KVCache(1, 1, 2, 1)
        >>> cache.append(torch.ones(1, 1, 2, 1), torch.ones(1, 1, 2, 1))
        >>> cache.append(torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1, 1))
        Traceback (most recent call last):
        ropewalk.errors.RopewalkError: asked:    more tokens in a KVCache of max_length=2
        expected: at most 0, because 2 slots may be filled
        got:      1
        do this:  create a longer cache, or drop old tokens with evict_prefix
        """
        self._write(k, v, counts, positions, None)

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
        """Append keys and values, and return all that their queries can see. `Attention` calls it.

        Args:
            k: As for `append`.
            v: As for `append`.
            counts: As for `append`.
            positions: As for `append`.
            key_mask: bool [batch, seq]: False hides a new token, now and in later calls. Or bool [batch, max_length],
                one per slot: it also hides earlier tokens, in this call alone.
            window: Number of tokens that a query sees, itself included; None for all.

        Returns:
            The stored keys and values, and which of them are visible to each query.

        Raises:
            RopewalkError: As `append`, and if the mask does not match.

        >>> cache = KVCache(1, 1, 8, 1)
        >>> for _ in range(3):
        ...     seen = cache.update(torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1, 1), window=2)
        >>> seen.keys.shape, seen.visibility.hides_nothing()
        (torch.Size([1, 1, 2, 1]), True)
        """
        seq, empty, even = k.shape[2], self.filled_at_most == 0, self.even
        compiling = torch.compiler.is_compiling()
        starts = self.filled_at_most if even and not compiling else self.lengths.clone()
        self._write(k, v, counts, positions, key_mask)
        # torch.compile reads the whole cache, so that shapes do not change between steps.
        filled = self.max_length if compiling else self.filled_at_most
        first, last = 0, seq if empty else filled
        if empty:
            visibility = Visibility(True, window=window)
        elif even and seq == 1 and counts is None and not compiling:
            first = 0 if window is None else max(0, last - window)
            visibility = Visibility()
        else:
            visibility = Visibility(True, starts, window=window)
        slots = slice(first, last)
        visible = None if self.hidden is None else ~self.hidden[:, slots]
        if key_mask is not None and key_mask.shape[1] != seq:
            visible = key_mask[:, slots] if visible is None else visible & key_mask[:, slots]
        visibility = visibility._replace(key_mask=visible)
        return CachedTokens(self.keys[:, :, slots], self.values[:, :, slots], self.positions[:, slots], visibility)

    def next_positions(self) -> Tensor:
        """Return the position after the last token of each sequence, where tokens continue by default.

        Hidden tokens count too.

        Returns:
            int64 [batch].

        Raises:
            RopewalkError: If the cache does not store the positions of its tokens, which were fractions.

        >>> cache = KVCache(1, 1, 4, 1)
        >>> cache.append(torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1, 1), positions=torch.tensor([7]))
        >>> cache.next_positions().tolist()
        [8]
        """
        if not self._knows_positions:
            raise RopewalkError(
                asked="positions that continue from a cache",
                expected="a cache that stores the positions of its tokens, which are whole",
                got="a cache whose tokens had fractional positions",
                do="pass positions= in every call",
            )
        if self._counts_positions:
            return self.lengths.clone()
        return torch.where(self.lengths > 0, self._newest_positions() + 1, 0)

    @property
    def starts_equally(self) -> bool:
        """Whether the host knows that the next position is the same for all sequences: their number of tokens.

        >>> KVCache(2, 1, 4, 1).starts_equally
        True
        """
        return self.even and self._counts_positions

    def forget_positions(self) -> None:
        """Record that the next tokens have positions that are not stored, so that positions cannot continue from them.

        >>> KVCache(1, 1, 4, 1).forget_positions()
        """
        self._knows_positions = self._counts_positions = False

    def truncate(self, length: int) -> None:
        """Drop the tokens after the first `length` of each sequence, such as draft tokens that were rejected.

        Args:
            length: Number of tokens to keep. A sequence with fewer tokens is unchanged.

        Raises:
            RopewalkError: If `length` is not an integer of at least 1.

        >>> cache = KVCache(1, 1, 4, 1)
        >>> cache.append(torch.ones(1, 1, 3, 1), torch.ones(1, 1, 3, 1))
        >>> cache.truncate(2)
        >>> cache.lengths.tolist(), cache.keys.flatten().tolist()
        ([2], [1.0, 1.0, 0.0, 0.0])
        """
        asked, do = "KVCache.truncate(length)", "pass the number of tokens to keep; reset() drops all"
        number = require_count(length, asked=asked, do=do)
        for name, dim in SLOT_DIMS.items():
            buffer = getattr(self, name)
            if buffer is not None and number < buffer.shape[dim]:
                buffer.narrow(dim, number, buffer.shape[dim] - number).zero_()
        self.lengths.clamp_(max=number)
        self.filled_at_most = min(self.filled_at_most, number)

    def evict_prefix(self, count: int, rope: KeyRotation) -> None:
        """Drop the first `count` tokens of each sequence, and move the others to the front. Positions start at 0 again.

        Rotated keys are rotated back by `count` positions, which rounds once more per call. A sequence with fewer than
        `count` tokens becomes empty.

        Args:
            count: Number of tokens to drop.
            rope: What rotated the keys: an encoding, a RotaryEmbedding, or a spec, as `load_spec` returns it. None if
                keys contain no position, or are to keep theirs: pass the positions of later tokens then.

        Raises:
            RopewalkError: If `count` is larger than `filled_at_most`, if `rope` does not match the keys, or if it is an
                absolute encoding or has several axes.

        >>> from ropewalk import RotaryEmbedding
        >>> rope, cache = RotaryEmbedding(2), KVCache(1, 1, 4, 2)
        >>> k = torch.ones(1, 1, 3, 2)
        >>> cache.append(rope(k), k)
        >>> cache.evict_prefix(1, rope)
        >>> cache.lengths.tolist(), torch.allclose(cache.keys[:, :, :2], rope(k[:, :, :2]))
        ([2], True)
        """
        number = require_count(count, asked="KVCache.evict_prefix(count)", do="pass the number of tokens to drop")
        if number > self.filled_at_most:
            raise RopewalkError(
                asked=f"KVCache.evict_prefix({number})",
                expected=f"at most {self.filled_at_most} tokens, the number of slots that may be filled",
                got=f"{number}",
                do="drop fewer, or call reset() to drop them all",
            )
        remaining = self.filled_at_most - number
        filled = slice(number, self.filled_at_most)
        # Copies: source and destination overlap.
        keys = moved_keys(self.keys[:, :, filled], self.positions[:, filled], -number, rope)
        moved = {"keys": keys, "positions": self.positions[:, filled] - (0 if rope is None else number)}
        if rope is None:
            # Keys keep the positions that they may have been rotated with, and new tokens continue from these.
            self._counts_positions = False
        for name, dim in SLOT_DIMS.items():
            buffer = getattr(self, name)
            if buffer is not None:
                slots = buffer.narrow(dim, 0, self.filled_at_most)
                rest = moved[name] if name in moved else slots.narrow(dim, number, remaining).clone()
                slots.narrow(dim, 0, remaining).copy_(rest)
                slots.narrow(dim, remaining, number).zero_()
        self.lengths.sub_(number).clamp_(min=0)
        self.filled_at_most, self.even = remaining, self.even or remaining == 0

    def reorder(self, index: Tensor) -> None:
        """Replace sequence b by sequence index[b], for beam search, or to add and drop sequences.

        Args:
            index: int32 or int64 [rows], on the device of the cache. If `rows` is not the batch, new memory is
                allocated, and the batch changes.

        Raises:
            RopewalkError: If the shape, dtype or device does not match, or if an index is out of range.

        >>> cache = KVCache(2, 1, 4, 1)
        >>> cache.append(torch.tensor([5.0, 7.0]).view(2, 1, 1, 1), torch.zeros(2, 1, 1, 1))
        >>> cache.reorder(torch.tensor([1, 1]))
        >>> cache.keys[:, 0, 0, 0].tolist()
        [7.0, 7.0]
        """
        check_index(index, self.batch, self.lengths.device, asked="KVCache.reorder(index)")
        with torch.inference_mode(False):
            for name, buffer in self._buffers().items():
                rows = buffer.index_select(0, index)
                if len(index) == self.batch:
                    buffer.copy_(rows)
                else:
                    setattr(self, name, rows)
            if self.encoding_state is not None:
                self.encoding_state = self.encoding_state.index_select(0, index)
        self.batch = len(index)

    def reset(self) -> None:
        """Remove all tokens. The memory stays allocated.

        >>> cache = KVCache(1, 1, 2, 1)
        >>> cache.append(torch.ones(1, 1, 2, 1), torch.ones(1, 1, 2, 1))
        >>> cache.reset()
        >>> cache.lengths.tolist(), cache.filled_at_most
        ([0], 0)
        """
        for buffer in self._buffers().values():
            buffer.zero_()
        self.hidden, self.encoding_state, self.filled_at_most, self.even = None, None, 0, True
        self._counts_positions = self._knows_positions = True
        release(self)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "KVCache":
        """Move the cache to a device, and cast keys and values to a dtype.

        Args:
            device: The new device; None for no change.
            dtype: The new floating-point dtype of keys and values; None for no change.

        Returns:
            The cache itself.

        Raises:
            RopewalkError: If the dtype is not floating-point.

        >>> KVCache(1, 1, 2, 1).to(dtype=torch.float64).keys.dtype
        torch.float64
        """
        dtype = checked_dtype(self.keys.dtype if dtype is None else dtype, "KVCache.to(dtype=...)")
        with torch.inference_mode(False):
            self.keys, self.values = (x.to(device=device, dtype=dtype) for x in (self.keys, self.values))
            self.lengths, self.positions = self.lengths.to(device=device), self.positions.to(device=device)
            self.hidden = None if self.hidden is None else self.hidden.to(device=device)
        if self.encoding_state is not None:
            self.encoding_state = self.encoding_state.to(device=device)
        return self

    def state_dict(self) -> dict[str, Tensor]:
        """Return copies of the tensors of the cache, without empty slots.

        `torch.save` and safetensors write it. `torch.load` reads it with weights_only=True.

        Returns:
            "keys", "values", "lengths" and "positions"; "hidden" and "encoding_state" if the cache has them.

        >>> cache = KVCache(1, 1, 8, 1)
        >>> cache.append(torch.ones(1, 1, 3, 1), torch.ones(1, 1, 3, 1))
        >>> {name: list(x.shape) for name, x in cache.state_dict().items()}
        {'keys': [1, 1, 3, 1], 'values': [1, 1, 3, 1], 'lengths': [1], 'positions': [1, 3]}
        """
        slots, state = min(self.filled_at_most, self.max_length), self._buffers()
        for name, dim in SLOT_DIMS.items():
            if name in state:
                state[name] = state[name].narrow(dim, 0, slots)
        if self.encoding_state is not None:
            state["encoding_state"] = self.encoding_state
        return {name: x.detach().clone(memory_format=torch.contiguous_format) for name, x in state.items()}

    @checks_names
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Replace the content of the cache by that of a saved one. The cache then belongs to no layer.

        Reads the lengths, which synchronizes with the device. If an error is raised, nothing was written.

        Args:
            state: What `state_dict` returned, for the same batch, heads and dtype, on any device.

        Raises:
            RopewalkError: If a tensor is missing, if there is another one, if a shape, dtype or length does not match,
                or if the tokens do not fit.

        >>> cache, loaded = KVCache(1, 1, 8, 1), KVCache(1, 1, 4, 1)
        >>> cache.append(torch.ones(1, 1, 3, 1), torch.ones(1, 1, 3, 1))
        >>> loaded.load_state_dict(cache.state_dict())
        >>> loaded.lengths.tolist(), loaded.keys.flatten().tolist()
        ([3], [1.0, 1.0, 1.0, 0.0])
        """
        asked = f"{type(self).__name__}.load_state_dict(state)"
        state, lengths = checked_cache_state(state, self.keys, self.values, rolling=self._rolling, asked=asked)
        encoding_state = state.get("encoding_state")
        self.reset()
        with torch.inference_mode(False):
            if "hidden" in state:
                self.hidden = zeros(self.batch, self.max_length, dtype=torch.bool, device=self.keys.device)
            if encoding_state is not None:
                encoding_state = encoding_state.detach().clone().to(self.keys.device)
        self.encoding_state = encoding_state
        self.lengths.copy_(state["lengths"])
        # A file can contain NaN in slots past the length, which a mask does not remove: 0 times NaN is NaN.
        empty = arange(state["positions"].shape[1]) >= state["lengths"].cpu()[:, None]
        for name, dim in SLOT_DIMS.items():
            if name in state:
                saved = state[name].detach()
                slots = empty.to(saved.device)
                saved = saved.masked_fill(slots[:, None, :, None] if dim == 2 else slots, 0)
                getattr(self, name).narrow(dim, 0, saved.shape[dim]).copy_(saved)
        self._restore_counts(lengths, state["positions"].cpu())

    def __repr__(self) -> str:
        sizes = f"{self.batch}, {self.num_kv_heads}, {self.max_length}, {self.head_dim}"
        v_dim = "" if self.v_dim == self.head_dim else f", v_dim={self.v_dim}"
        options = f"dtype={self.keys.dtype}, device={str(self.keys.device)!r}"
        return f"{type(self).__name__}({sizes}{v_dim}, {options}), filled_at_most={self.filled_at_most}"

    def __copy__(self) -> "KVCache":
        # Two caches must not share memory: each counts its tokens itself.
        copied = object.__new__(type(self))
        with torch.inference_mode(False):
            copied.__dict__ |= {name: x.clone() if isinstance(x, Tensor) else x for name, x in vars(self).items()}
        return copied

    def __deepcopy__(self, memo: dict[int, object]) -> "KVCache":
        memo[id(self)] = copied = self.__copy__()
        return copied

    def __setstate__(self, state: dict[str, object]) -> None:
        # Caches that were pickled by earlier versions have fewer attributes.
        self.__dict__ |= {"hidden": None, "_counts_positions": True, "_knows_positions": True} | state

    def _key_slots(self) -> int:
        """Return the number of slots of keys and values. Positions always have `max_length`."""
        return self.max_length

    def _restore_counts(self, lengths: list[int], positions: Tensor) -> None:
        """Set what the host knows of tokens that were loaded: lengths, and positions [batch, slots] on the CPU."""
        self.filled_at_most, self.even = max(lengths), len(set(lengths)) == 1
        indices = self._indices(tensor(lengths, dtype=torch.int64, device="cpu"))[:, : positions.shape[1]]
        self._counts_positions = bool(((positions == indices) | (indices < 0)).all())
        self._knows_positions = bool(((positions >= 0) | (indices < 0)).all()) or self._counts_positions

    def _indices(self, lengths: Tensor) -> Tensor:
        """Return the index of the token in each slot [batch, max_length]; below 0 for an empty slot."""
        slots = arange(self.max_length, device=lengths.device)
        return torch.where(slots < lengths[:, None], slots, -1)

    def _buffers(self) -> dict[str, Tensor]:
        buffers = {"keys": self.keys, "values": self.values, "lengths": self.lengths, "positions": self.positions}
        return buffers if self.hidden is None else buffers | {"hidden": self.hidden}

    def _write(
        self, k: Tensor, v: Tensor, counts: Tensor | None, positions: Tensor | None, key_mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Check and store new tokens. Return k and v with zeros for padding and hidden tokens, and their positions."""
        self._check_append(k, v, counts, positions)
        seq = k.shape[2]
        steps = arange(seq, device=k.device)
        indices = self.lengths[:, None] + steps
        hidden = None if key_mask is None else self._checked_mask(key_mask, k, indices)
        if positions is not None:
            self._warn_if_not_beyond(positions, counts, hidden)
        if key_mask is not None and self.hidden is None:
            with torch.inference_mode(False):
                self.hidden = zeros(self.batch, self.max_length, dtype=torch.bool, device=k.device)
        padding = None if counts is None else steps >= counts[:, None]
        ignored = hidden if padding is None else padding if hidden is None else hidden | padding
        if ignored is not None:
            # Hidden values are still multiplied by 0, which is NaN for NaN or infinity.
            k, v = (x.masked_fill(ignored[:, None, :, None], 0) for x in (k, v))
        new = {"keys": k.detach(), "values": v.detach(), "positions": indices}
        if positions is not None:
            new["positions"] = positions.to(torch.int64).expand(self.batch, seq)
            self._counts_positions = False
        elif not self._knows_positions:
            new["positions"] = full_like(indices, -1)
        elif not self._counts_positions:
            new["positions"] = self.next_positions()[:, None] + steps
        if self.hidden is not None:
            new["hidden"] = zeros_like(indices, dtype=torch.bool) if hidden is None else hidden
        self._store(new, indices, counts)
        self.lengths += seq if counts is None else counts
        self.filled_at_most += seq
        if counts is not None:
            self.even = False
            if can_read_values(self.lengths):
                self.filled_at_most = int(self.lengths.max())
        return k, v, new["positions"]

    def _store(self, new: dict[str, Tensor], indices: Tensor, counts: Tensor | None) -> None:
        """Write tensors with one entry per new token to the slots of the tokens."""
        rows = arange(self.batch, device=indices.device)[:, None]
        for name, x in new.items():
            buffer, dim = getattr(self, name), SLOT_DIMS[name]
            buffer.transpose(1, dim)[rows, indices] = x.transpose(1, dim)

    def _checked_mask(self, key_mask: Tensor, k: Tensor, indices: Tensor) -> Tensor:
        """Return True for new tokens that the mask hides [batch, seq]."""
        seq = k.shape[2]
        by_slot = isinstance(key_mask, Tensor) and key_mask.dim() == 2 and key_mask.shape[1] != seq
        by_slot = by_slot and not self._rolling
        slots = "" if self._rolling else f"; or [batch, {self.max_length}], all slots of the cache"
        check_key_mask(
            key_mask,
            (self.batch, self.max_length if by_slot else seq),
            k.device,
            asked="attention(key_mask=...) with a cache",
            dims=f"[batch, seq], the new tokens{slots}",
            do="True is a visible key; pass the mask of the new tokens alone: the cache remembers the earlier ones",
        )
        # Later, all new tokens of a sequence can be hidden: those of a sequence that has ended.
        if self.filled_at_most == 0 and seq > 1:
            warn_if_row_is_hidden(key_mask, asked="attention(key_mask=...) with a cache")
        return ~(key_mask.gather(1, indices.clamp_max(self.max_length - 1)) if by_slot else key_mask)

    def _check_append(self, k: Tensor, v: Tensor, counts: Tensor | None, positions: Tensor | None) -> None:
        """Raise unless keys and values match the cache, and fit by what the host knows."""
        check_new_tokens(k, v, self.keys, self.values)
        if counts is not None:
            check_counts(counts, self.lengths, k.shape[2])
        if positions is not None:
            asked = "positions= with a KVCache"
            check_ids(positions, asked=asked, whole=True)
            check_positions(positions, k, asked=asked)
        self._check_capacity(k.shape[2], counts)

    # What to do if the tokens do not fit.
    _do_if_full = "create a longer cache, or drop old tokens with evict_prefix"

    def _check_capacity(self, seq: int, counts: Tensor | None) -> None:
        """Raise if `seq` more tokens may not fit, by what the host knows."""
        free = self.max_length - self.filled_at_most
        if seq <= free:
            return
        # torch.compile cannot format numbers that change between steps.
        known = not torch.compiler.is_compiling()
        do = self._do_if_full
        raise RopewalkError(
            asked=f"more tokens in a {type(self).__name__} of max_length={self.max_length}",
            expected=f"at most {free}, because {self.filled_at_most} slots may be filled" if known else "fewer tokens",
            got=f"{seq}" if known else "more than fit",
            do=do if counts is None else f"{do}; padding needs slots too while it is written",
        )

    def _newest_positions(self) -> Tensor:
        """Return the position of the last token of each sequence [batch]; any number if it is empty."""
        return self.positions.gather(1, ((self.lengths - 1).clamp_min(0) % self.max_length)[:, None])[:, 0]

    def _warn_if_not_beyond(self, positions: Tensor, counts: Tensor | None, hidden: Tensor | None) -> None:
        """Warn if the first new position of a sequence is not larger than that of its last visible token."""
        if self.filled_at_most == 0 or not positions.numel() or not can_read_values(positions):
            return
        indices = self._indices(self.lengths)
        indices = indices if self.hidden is None else indices.masked_fill(self.hidden, -1)
        newest = self.positions.gather(1, indices.argmax(1, keepdim=True))[:, 0]
        first = as_signed(positions[..., 0]).expand(self.batch)
        behind = (first <= newest) & (indices >= 0).any(1)
        behind = behind if counts is None else behind & (counts > 0)
        behind = behind if hidden is None else behind & ~hidden[:, 0]
        if bool(behind.any()):
            warn(
                asked="attention(positions=...) with a cache",
                expected="positions beyond that of the last token in the cache",
                got="a first position that is not larger",
                do="omit positions, which continue from the cache; or pass the positions of the new tokens alone",
            )
