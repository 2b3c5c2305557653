"""RollingKVCache: keys and values of the last tokens, for layers with a window, in constant memory."""

from typing import ClassVar

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
        seq, empty, filled = k.shape[2], self.filled_at_most == 0, self.filled_at_most
        starts = self.lengths[0].clone() if self.even else self.lengths.clone()
        if seq == 1:
            simple = self.even and counts is None and not torch.compiler.is_compiling()
            self._write(k, v, counts, positions, key_mask)
            slots = slice(0, min(filled + 1, self.window)) if simple else slice(0, self.window)
            # Every token in the cache is in the window if it has no more slots than the window.
            visibility = Visibility()
            if not simple or window < self.window:
                visibility = Visibility(True, starts, window=window, key_indices=self._indices()[:, slots])
            if self.hidden is not None:
                visibility = visibility._replace(key_mask=~self.hidden[:, slots])
            return CachedTokens(self.keys[:, :, slots], self.values[:, :, slots], self.positions[:, slots], visibility)
        # Writing the new tokens overwrites old ones that the first queries see.
        before = None if empty else (self.keys.clone(), self.values.clone(), self.positions.clone(), self._indices())
        hidden = None if self.hidden is None else self.hidden.clone()
        following = arange(seq, device=k.device) + self.next_positions().unsqueeze(-1)
        k, v = self._write(k, v, counts, positions, key_mask)
        steps = arange(seq, device=k.device) + (starts if starts.dim() == 0 else starts[:, None])
        ids = (following if positions is None else positions.to(torch.int64)).expand(self.batch, seq)
        if before is None:
            return CachedTokens(k, v, ids, Visibility(True, key_mask=key_mask, window=window))
        indices = torch.cat([before[3], steps.expand(self.batch, seq)], dim=1)
        visibility = Visibility(True, starts, window=window, key_indices=indices)
        if self.hidden is not None:
            old = ones_like(self.hidden) if hidden is None else ~hidden
            new = ones_like(ids, dtype=torch.bool) if key_mask is None else key_mask
            visibility = visibility._replace(key_mask=torch.cat([old, new], dim=1))
        keys, values = torch.cat([before[0], k], dim=2), torch.cat([before[1], v], dim=2)
        return CachedTokens(keys, values, torch.cat([before[2], ids], dim=1), visibility)

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

    def _indices(self) -> Tensor:
        """Return the index of the token in each slot [batch, window]; below 0 for an empty slot."""
        slots, newest = arange(self.window, device=self.lengths.device), self.lengths[:, None] - 1
        return newest - (newest - slots) % self.window

    def _store(self, new: dict[str, Tensor], indices: Tensor, counts: Tensor | None) -> None:
        seq, window = indices.shape[1], self.window
        if counts is None:
            # The last tokens, each in its own slot.
            kept = slice(max(0, seq - window), seq)
            last = {name: x[:, :, kept] if SLOT_DIMS[name] == 2 else x[:, kept] for name, x in new.items()}
            super()._store(last, indices[:, kept] % window, None)
            return
        # Per slot: the new token to write to it. Sequences keep different slots.
        slots, newest = arange(window, device=indices.device), (self.lengths + counts)[:, None] - 1
        source = newest - (newest - slots) % window - self.lengths[:, None]
        is_new, source = source >= 0, source.clamp(0, max(seq - 1, 0))
        for name, x in new.items() if seq else ():
            buffer, dim = getattr(self, name), SLOT_DIMS[name]
            shape = (self.batch, 1, window, 1) if dim == 2 else (self.batch, window)
            chosen = source.view(shape).expand_as(buffer)
            buffer.copy_(torch.where(is_new.view(shape), x.gather(dim, chosen), buffer))

    def _check_capacity(self, seq: int, counts: Tensor | None) -> None:
        """Any number of tokens fits."""
