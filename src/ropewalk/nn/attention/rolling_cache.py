"""RollingKVCache: keys and values of the last tokens, for layers with a window, in constant memory."""

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ropewalk.errors import RopewalkError
from ropewalk.kernels.constructors import arange, ones_like
from ropewalk.nn.attention.cache import SLOT_DIMS, KVCache
from ropewalk.nn.attention.cache_interface import CachedTokens
from ropewalk.nn.attention.moved_keys import KeyRotation
from ropewalk.nn.attention.visibility import Visibility
from ropewalk.signatures import checks_names

__all__ = ["RollingKVCache"]


class _OldTokens(NamedTuple):
    keys: Tensor
    values: Tensor
    positions: Tensor
    indices: Tensor
    visible: Tensor


class RollingKVCache(KVCache):
    """Cache of the last `window` tokens of each sequence, for a layer with a window. A sequence can be of any length.

    The token with index n is stored in slot n % window, in place of the token with index n - window. Keys are stored as
    they are passed, rotated at their positions, and are not rotated again.

    Args:
        batch: Number of sequences.
        num_kv_heads: Number of key heads.
        window: Number of slots per sequence: the window of the layer, or more.
        head_dim: Width of a key head.
        v_dim: Width of a value head; None for head_dim.
        dtype: Floating-point dtype of keys and values; None for the default dtype.
        device: Device of the cache; None for the default device.

    Attributes:
        lengths: Number of tokens per sequence [batch], also if they are more than the slots.

    Raises:
        RopewalkError: As `KVCache`.

    >>> cache = RollingKVCache(1, 1, window=2, head_dim=1)
    >>> for n in range(5):
    ...     cache.append(torch.full((1, 1, 1, 1), float(n)), torch.zeros(1, 1, 1, 1))
    >>> cache.keys.flatten().tolist(), cache.positions.tolist(), cache.lengths.tolist()
    ([4.0, 3.0], [[4, 3]], [5])
    """

    _rolling: ClassVar[bool] = True

    @checks_names
    def __init__(
        self,
        batch: int,
        num_kv_heads: int,
        window: int,
        head_dim: int,
        *,
        v_dim: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(batch, num_kv_heads, window, head_dim, v_dim=v_dim, dtype=dtype, device=device)

    @property
    def window(self) -> int:
        """The number of slots per sequence.

        >>> RollingKVCache(1, 1, window=4, head_dim=2).window
        4
        """
        return self.max_length

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
        """As `KVCache.update`, with `key_mask` [batch, seq] for the new tokens.

        The queries see the tokens that were stored before, and the new ones, also if the new ones are more than fit.

        >>> cache = RollingKVCache(1, 1, window=2, head_dim=1)
        >>> cache.update(torch.ones(1, 1, 9, 1), torch.ones(1, 1, 9, 1), window=2).keys.shape, cache.keys.shape
        (torch.Size([1, 1, 9, 1]), torch.Size([1, 1, 2, 1]))
        """
        if window is None or window > self.window:
            raise RopewalkError(
                asked="a RollingKVCache in a layer",
                expected=f"a layer with a window of at most {self.window}, the number of slots",
                got="a layer without a window" if window is None else f"window={window}",
                do="create the cache with layer.make_cache(batch, max_length)",
            )
        seq, filled, compiling = k.shape[2], self.filled_at_most, torch.compiler.is_compiling()
        # Whether the host knows which token is in which slot.
        known = self.even and counts is None and not compiling
        if seq == 1:
            starts = self.lengths.clone()
            self._write(k, v, counts, positions, key_mask)
            slots = slice(0, min(filled + 1, self.window)) if known else slice(0, self.window)
            # Every token in the cache is in the window if it has no more slots than the window.
            visibility = Visibility()
            if not known or window < self.window:
                visibility = Visibility(True, starts, window=window, key_indices=self._indices(self.lengths)[:, slots])
            if self.hidden is not None:
                visibility = visibility._replace(key_mask=~self.hidden[:, slots])
            return CachedTokens(self.keys[:, :, slots], self.values[:, :, slots], self.positions[:, slots], visibility)
        # Writing the new tokens overwrites old ones that the first queries see.
        old = None if filled == 0 else self._in_order(filled if known else None)
        starts = self.lengths.clone()
        k, v, following = self._write(k, v, counts, positions, key_mask)
        if old is None:
            return CachedTokens(k, v, following, Visibility(True, key_mask=key_mask, window=window))
        keys, values = torch.cat([old.keys, k], dim=2), torch.cat([old.values, v], dim=2)
        key_mask = ones_like(following, dtype=torch.bool) if key_mask is None else key_mask
        visible = None if self.hidden is None else torch.cat([old.visible, key_mask], dim=1)
        visibility = Visibility(True, old.keys.shape[2], visible, window=window)
        if not known:
            indices = torch.cat([old.indices, starts[:, None] + arange(seq, device=k.device)], dim=1)
            visibility = visibility._replace(starts=starts, key_indices=indices)
        return CachedTokens(keys, values, torch.cat([old.positions, following], dim=1), visibility)

    def _in_order(self, filled: int | None) -> "_OldTokens":
        """Return copies of the stored tokens: in the order of their indices if the host knows how many there are."""
        indices = self._indices(self.lengths)
        visible = ones_like(indices, dtype=torch.bool) if self.hidden is None else ~self.hidden
        if filled is None:
            return _OldTokens(self.keys.clone(), self.values.clone(), self.positions.clone(), indices, visible)
        number, first = min(filled, self.window), filled % self.window if filled > self.window else 0
        parts = slice(first, number), slice(0, first)
        keys, values = (torch.cat([x[:, :, part] for part in parts], dim=2) for x in (self.keys, self.values))
        positions, indices, visible = (
            torch.cat([x[:, part] for part in parts], dim=1) for x in (self.positions, indices, visible)
        )
        return _OldTokens(keys, values, positions, indices, visible)

    def evict_prefix(self, count: int, rope: KeyRotation) -> None:
        """Raise an error: old tokens are overwritten without it.

        Raises:
            RopewalkError: Always.
        """
        raise RopewalkError(
            asked=f"RollingKVCache.evict_prefix({count})",
            expected="a KVCache, whose slots fill up",
            got="a RollingKVCache, in which a new token replaces the oldest one",
            do="omit the call",
        )

    def _indices(self, lengths: Tensor) -> Tensor:
        slots, newest = arange(self.window, device=lengths.device), lengths[:, None] - 1
        return newest - (newest - slots) % self.window

    def _store(self, new: dict[str, Tensor], indices: Tensor, counts: Tensor | None) -> None:
        seq, window = indices.shape[1], self.window
        if counts is None:
            # The last tokens, each in its own slot.
            last = {name: x[:, :, -window:] if SLOT_DIMS[name] == 2 else x[:, -window:] for name, x in new.items()}
            super()._store(last, indices[:, -window:] % window, None)
            return
        # Per slot: the new token to write to it. Sequences keep different slots.
        source = self._indices(self.lengths + counts) - self.lengths[:, None]
        is_new, source = source >= 0, source.clamp(0, max(seq - 1, 0))
        for name, x in new.items() if seq else ():
            buffer, dim = getattr(self, name), SLOT_DIMS[name]
            shape = (self.batch, 1, window, 1) if dim == 2 else (self.batch, window)
            chosen = source.view(shape).expand_as(buffer)
            buffer.copy_(torch.where(is_new.view(shape), x.gather(dim, chosen), buffer))

    def truncate(self, length: int) -> None:
        """Raise an error: tokens before the window were overwritten, and would be visible again.

        Raises:
            RopewalkError: Always.
        """
        raise RopewalkError(
            asked=f"RollingKVCache.truncate({length})",
            expected="a KVCache, which keeps all tokens",
            got="a RollingKVCache, in which a new token replaces the oldest one",
            do="copy the cache before draft tokens are read: copy.copy(cache)",
        )

    def _check_capacity(self, seq: int, counts: Tensor | None) -> None:
        """Any number of tokens fits."""
