"""KVCache: keys and values of past tokens, for decoding."""

import weakref

import torch
from torch import Tensor, nn

from ropewalk.errors import RopewalkError, require_count, shown
from ropewalk.kernels.constructors import arange, zeros
from ropewalk.nn.encodings.base import Encoding
from ropewalk.nn.encodings.rotary import rope_in
from ropewalk.nn.position_checks import can_read_values, check_ids, check_index, check_positions, described
from ropewalk.nn.rotary.embedding import RotaryEmbedding
from ropewalk.signatures import checks_names

__all__ = ["KVCache", "check_capacity", "check_counts"]


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
        positions: Position of the token in each slot [batch, max_length], int64, for encodings that add a bias.
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
        dtype = _checked_dtype(torch.get_default_dtype() if dtype is None else dtype, "KVCache(dtype=...)")
        shape = self.batch, self.num_kv_heads, self.max_length
        # Tensors created in inference mode cannot be written outside of it.
        with torch.inference_mode(False):
            self.keys: Tensor = zeros(*shape, self.head_dim, dtype=dtype, device=device)
            self.values: Tensor = zeros(*shape, self.v_dim, dtype=dtype, device=device)
            self.lengths: Tensor = zeros(self.batch, dtype=torch.int64, device=device)
            self.positions: Tensor = zeros(self.batch, self.max_length, dtype=torch.int64, device=device)
        self.encoding_state: Tensor | None = None
        self.filled_at_most: int = 0
        # Whether the host knows that every sequence has filled_at_most tokens.
        self.even: bool = True
        self._layer: weakref.ref[nn.Module] | None = None

    @checks_names
    def append(self, k: Tensor, v: Tensor, counts: Tensor | None = None, *, positions: Tensor | None = None) -> None:
        """Append keys and values to each sequence. If an error is raised, nothing was written.

        Args:
            k: Keys [batch, num_kv_heads, seq, head_dim].
            v: Values [batch, num_kv_heads, seq, v_dim].
            counts: Number of tokens per sequence [batch]; the rest of `seq` is padding, which is not stored. None for
                no padding.
            positions: Whole positions [seq] or [batch, seq]; None continues from `lengths`.

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
        self._check_append(k, v, counts, positions)
        seq = k.shape[2]
        steps = arange(seq, device=k.device)
        rows, slots = arange(self.batch, device=k.device)[:, None], self.lengths[:, None] + steps
        if counts is not None:
            # Padding is stored as zeros: hidden values are still multiplied by 0, which is NaN for NaN or infinity.
            padding = (steps >= counts[:, None])[:, None, :, None]
            k, v = k.masked_fill(padding, 0), v.masked_fill(padding, 0)
        for buffer, new in ((self.keys, k), (self.values, v)):
            buffer.transpose(1, 2)[rows, slots] = new.detach().transpose(1, 2)
        self.positions[rows, slots] = slots if positions is None else positions.to(torch.int64)
        self.lengths += seq if counts is None else counts
        self.filled_at_most += seq
        if counts is not None:
            self.even = False
            if can_read_values(self.lengths):
                self.filled_at_most = int(self.lengths.max())

    def check_layer(self, layer: nn.Module) -> None:
        """Raise if another layer has stored tokens in the cache.

        >>> KVCache(1, 1, 4, 2).check_layer(nn.Identity())
        """
        other = None if self._layer is None else self._layer()
        if other is None or other is layer:
            return
        raise RopewalkError(
            asked=f"{type(layer).__name__}(x, cache=...)",
            expected="a cache of this layer alone: it contains the keys and values of one layer",
            got="a cache with the tokens of another layer",
            do="create one cache per layer: caches = [KVCache(...) for _ in layers]; for a copy of the layer, pass"
            " copy.copy(cache)",
        )

    def belongs_to(self, layer: nn.Module) -> None:
        """Record that `layer` stores its tokens here, until `reset`.

        >>> KVCache(1, 1, 4, 2).belongs_to(nn.Identity())
        """
        if self._layer is None or self._layer() is not layer:
            self._layer = weakref.ref(layer)

    def evict_prefix(self, count: int, rope: RotaryEmbedding | Encoding | None) -> None:
        """Drop the first `count` tokens of each sequence, and move the others to the front. Positions start at 0 again.

        Rotated keys are rotated by rope.shift(k, by=-count), which rounds once more per call. A sequence with fewer
        than `count` tokens becomes empty.

        Args:
            count: Number of tokens to drop.
            rope: The encoding that the keys were rotated with, or None if keys contain no position.

        Raises:
            RopewalkError: If `count` is larger than `filled_at_most`, if `rope` does not match the keys, or if it is an
                absolute encoding, whose keys cannot be moved.

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
        (rotation, length), remaining = _rope_of_keys(rope, self.head_dim), self.filled_at_most - number
        keys = self.keys[:, :, number : self.filled_at_most]
        # Copies: source and destination overlap.
        keys = keys.clone() if rotation is None else rotation.shift(keys, by=-number, length=length)
        values = self.values[:, :, number : self.filled_at_most].clone()
        positions = self.positions[:, number : self.filled_at_most] - number
        for buffer, rest in ((self.keys, keys), (self.values, values), (self.positions[:, None], positions[:, None])):
            buffer[:, :, :remaining] = rest
            buffer[:, :, remaining : self.filled_at_most] = 0
        self.lengths.sub_(number).clamp_(min=0)
        self.filled_at_most, self.even = remaining, self.even or remaining == 0

    def reorder(self, index: Tensor) -> None:
        """Replace sequence b by sequence index[b], for beam search.

        Args:
            index: int32 or int64 [batch], on the device of the cache.

        Raises:
            RopewalkError: If the shape, dtype or device does not match, or if an index is out of range.

        >>> cache = KVCache(2, 1, 4, 1)
        >>> cache.append(torch.tensor([5.0, 7.0]).view(2, 1, 1, 1), torch.zeros(2, 1, 1, 1))
        >>> cache.reorder(torch.tensor([1, 1]))
        >>> cache.keys[:, 0, 0, 0].tolist()
        [7.0, 7.0]
        """
        check_index(index, self.batch, self.lengths.device, asked="KVCache.reorder(index)", number=self.batch)
        for buffer in (self.keys, self.values, self.lengths, self.positions):
            buffer.copy_(buffer.index_select(0, index))
        if self.encoding_state is not None:
            self.encoding_state = self.encoding_state.index_select(0, index)

    def reset(self) -> None:
        """Remove all tokens. The memory stays allocated.

        >>> cache = KVCache(1, 1, 2, 1)
        >>> cache.append(torch.ones(1, 1, 2, 1), torch.ones(1, 1, 2, 1))
        >>> cache.reset()
        >>> cache.lengths.tolist(), cache.filled_at_most
        ([0], 0)
        """
        for buffer in (self.keys, self.values, self.lengths, self.positions):
            buffer.zero_()
        self.encoding_state, self.filled_at_most, self.even = None, 0, True
        self._layer = None

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
        dtype = _checked_dtype(self.keys.dtype if dtype is None else dtype, "KVCache.to(dtype=...)")
        with torch.inference_mode(False):
            self.keys, self.values = (x.to(device=device, dtype=dtype) for x in (self.keys, self.values))
            self.lengths, self.positions = self.lengths.to(device=device), self.positions.to(device=device)
        if self.encoding_state is not None:
            self.encoding_state = self.encoding_state.to(device=device)
        return self

    def __getstate__(self) -> dict[str, object]:
        # A copy, or a cache in another process, can belong to a copy of the layer.
        return {**self.__dict__, "_layer": None}

    def __repr__(self) -> str:
        sizes = f"{self.batch}, {self.num_kv_heads}, {self.max_length}, {self.head_dim}"
        v_dim = "" if self.v_dim == self.head_dim else f", v_dim={self.v_dim}"
        options = f"dtype={self.keys.dtype}, device={str(self.keys.device)!r}"
        return f"KVCache({sizes}{v_dim}, {options}), filled_at_most={self.filled_at_most}"

    def _check_append(self, k: Tensor, v: Tensor, counts: Tensor | None, positions: Tensor | None) -> None:
        """Raise unless keys and values match the cache, and fit by what the host knows."""
        for name, x, buffer in (("k", k, self.keys), ("v", v, self.values)):
            fits = isinstance(x, Tensor) and x.dim() == 4 and x.dtype == buffer.dtype and x.device == buffer.device
            if not fits or x.shape[:2] != buffer.shape[:2] or x.shape[3] != buffer.shape[3]:
                batch, heads, _, width = buffer.shape
                raise RopewalkError(
                    asked=f"KVCache.append({name})",
                    expected=f"[{batch}, {heads}, seq, {width}] of {buffer.dtype} on {buffer.device}",
                    got=described(x),
                    do="pass keys and values of the batch, heads and dtype of the cache, or create another cache",
                )
        if k.shape[2] != v.shape[2]:
            raise RopewalkError(
                asked="KVCache.append(k, v)",
                expected="as many values as keys",
                got=f"{k.shape[2]} keys and {v.shape[2]} values",
                do="pass both for the same tokens",
            )
        if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
            raise RopewalkError(
                asked="KVCache.append(k, v)",
                expected="keys and values without a gradient: the cache is overwritten at every step",
                got="a tensor that requires a gradient",
                do="decode under torch.inference_mode() or torch.no_grad()",
            )
        if counts is not None:
            check_counts(self, counts, k.shape[2])
        if positions is not None:
            asked = "KVCache.append(positions=...)"
            check_ids(positions, asked=asked, whole=True)
            check_positions(positions, k, asked=asked)
        check_capacity(self, k.shape[2], counts)


def check_capacity(cache: KVCache, seq: int, counts: Tensor | None) -> None:
    """Raise if `seq` more tokens may not fit, by what the host knows.

    >>> check_capacity(KVCache(1, 1, 4, 1), 4, None)
    """
    free = cache.max_length - cache.filled_at_most
    if seq <= free:
        return
    # torch.compile cannot format numbers that change between steps.
    known = not torch.compiler.is_compiling()
    do = "create a longer cache, or drop old tokens with evict_prefix"
    raise RopewalkError(
        asked=f"more tokens in a KVCache of max_length={cache.max_length}",
        expected=f"at most {free}, because {cache.filled_at_most} slots may be filled" if known else "no more than fit",
        got=f"{seq}" if known else "more",
        do=do if counts is None else f"{do}; padding needs slots too while it is written",
    )


def check_counts(cache: KVCache, counts: Tensor, seq: int) -> None:
    """Raise unless `counts` has the number of tokens per sequence, from 0 to `seq`. The rest is padding.

    >>> check_counts(KVCache(2, 1, 4, 1), torch.tensor([3, 1]), 3)
    """
    lengths = cache.lengths
    fits = isinstance(counts, Tensor) and counts.dtype in (torch.int32, torch.int64)
    fits = fits and counts.shape == lengths.shape and counts.device == lengths.device
    if fits and (not can_read_values(counts) or bool(((counts >= 0) & (counts <= seq)).all())):
        return
    raise RopewalkError(
        asked=f"counts= for {seq} tokens with padding",
        expected=f"whole numbers [{len(lengths)}] from 0 to {seq}, one per sequence, on {lengths.device}",
        got=f"{counts.tolist()}" if fits else described(counts),
        do="pass the number of tokens per sequence that are not padding; padding is at the end",
    )


def _checked_dtype(dtype: torch.dtype, asked: str) -> torch.dtype:
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
        return dtype
    raise RopewalkError(
        asked=asked,
        expected="a floating-point dtype",
        got=shown(dtype),
        do="pass the dtype of the keys: torch.bfloat16",
    )


def _rope_of_keys(
    encoding: RotaryEmbedding | Encoding | None, head_dim: int
) -> tuple[RotaryEmbedding | None, int | None]:
    """Return the rope that rotated the keys, or None if keys contain no position; and the length it was used with."""
    rope = rope_in(encoding)
    if rope is not None and rope.spec.axes is not None:
        raise RopewalkError(
            asked="KVCache.evict_prefix(count, rope)",
            expected="a rope with one axis, on which positions move by the number of dropped tokens",
            got=f"{rope}",
            do="call reset(), and read the last tokens again",
        )
    if rope is not None and rope.spec.head_dim == head_dim and rope.seq_dim == -2:
        return rope, getattr(encoding, "at_length", None)
    no_rotation = isinstance(encoding, Encoding) and encoding.relative and type(encoding).rotate is Encoding.rotate
    if encoding is None or no_rotation:
        return None, None
    raise RopewalkError(
        asked="KVCache.evict_prefix(count, rope)",
        expected=f"a rope with head_dim={head_dim} and seq_dim=-2, an encoding that has such a rope or only adds a "
        "bias, or None if keys contain no position",
        got=f"{encoding}" if isinstance(encoding, nn.Module) else shown(encoding),
        do="pass the encoding of the layer; if it is absolute, call reset() and read the last tokens again",
    )
