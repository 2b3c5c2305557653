"""Attention: a layer of softmax attention with any encoding, grouped heads, padding, packed sequences and a cache."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ropewalk.errors import RopewalkError, as_float, require_count, shown
from ropewalk.kernels.constructors import arange
from ropewalk.kernels.precision import has_autocast
from ropewalk.nn.attention.cache import KVCache
from ropewalk.nn.attention.cache_interface import Cache, CacheOfRanks, Merge, check_cached_tokens
from ropewalk.nn.attention.function import checked_window
from ropewalk.nn.attention.projections import HeadSizes, ProjectedHeads
from ropewalk.nn.attention.rolling_cache import RollingKVCache
from ropewalk.nn.attention.scores import ScoreBias, attend, attend_packed, attend_with_lse
from ropewalk.nn.attention.visibility import Visibility
from ropewalk.nn.encodings.base import Encoding, warn_if_not_embedded
from ropewalk.nn.encodings.bias import check_causal
from ropewalk.nn.encodings.rotary import as_encoding, check_encoding, rope_axes
from ropewalk.nn.local_heads import call_locally, dims_of_ids
from ropewalk.nn.owners import check_owner, set_owner
from ropewalk.nn.position_checks import (
    check_key_mask,
    check_packed,
    check_positions,
    warn_if_positions_restart,
    warn_if_row_is_hidden,
)
from ropewalk.nn.positions import packed_positions, range_positions
from ropewalk.nn.rotary.embedding import RotaryEmbedding
from ropewalk.ops.dtensors import is_dtensor, local_size
from ropewalk.signatures import checks_names

__all__ = ["Attention"]


class Attention(ProjectedHeads):
    """Softmax attention: softmax(q k^T / sqrt(head_dim) + bias) v for each head (Vaswani et al., 1706.03762, eq. 1).

    q, k and v are projections of x, split into heads. Each key head is shared by num_heads / num_kv_heads query heads
    (GQA, 2305.13245). The projections are named as in most checkpoints: q_proj, k_proj, v_proj and o_proj.

    On the CPU a mask or a bias is a tensor [..., seq, seq], or [..., part, keys] per part of the queries in a window.
    On a CUDA device FlexAttention computes it per score, except in float64, with dropout, or for few queries.

    Args:
        dim: Width of the model.
        num_heads: Number of query heads.
        num_kv_heads: Number of key heads, a divisor of `num_heads`; None for `num_heads`.
        head_dim: Width of a head; None for dim / num_heads.
        encoding: Changes q, k and v, rotates q and k, or adds a bias to the scores, and can set another scale. It can
            be shared between layers. The `embed` hook is not called here: the model calls it once, before the first
            layer. None adds no position.
        causal: Hide the tokens after a query.
        window: Number of tokens that a query sees, itself included, as `sliding_window` in configs: query m sees key n
            if 0 <= m - n < window; if not causal, if |m - n| < window. m and n count tokens, not positions. None for no
            window.
        dropout: Probability of dropping an attention weight in training.
        qkv_bias: Whether q_proj, k_proj and v_proj have a bias.
        out_bias: Whether o_proj has a bias.
        device: Device of the projections.
        dtype: Dtype of the projections.

    Raises:
        RopewalkError: If an argument is invalid, or if the encoding does not match the heads.

    >>> attention = Attention(2, num_heads=1)
    >>> eye, none = torch.eye(2), torch.zeros(2, 2)
    >>> for layer, weight in zip(attention.children(), (none, none, eye, eye)):
    ...     _ = layer.load_state_dict({"weight": weight})
    >>> attention(torch.tensor([[[1.0, 0.0], [3.0, 2.0]]])).tolist()  # equal scores: the mean of the visible values
    [[[1.0, 0.0], [2.0, 1.0]]]
    """

    @checks_names
    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        encoding: Encoding | RotaryEmbedding | None = None,
        causal: bool = True,
        window: int | None = None,
        dropout: float = 0.0,
        qkv_bias: bool = False,
        out_bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        layer = type(self).__name__
        sizes = HeadSizes.checked(dim, num_heads, num_kv_heads, head_dim, layer=layer)
        super().__init__(sizes, causal=causal, qkv_bias=qkv_bias, out_bias=out_bias, device=device, dtype=dtype)
        self.window: int | None = checked_window(window, asked=f"{layer}(window=...)")
        self.dropout: float = _checked_dropout(dropout)
        if encoding is not None:
            check_encoding(encoding, self.head_dim, self.num_heads, self.num_kv_heads, layer=layer)
            check_causal(encoding, self.causal, layer=layer)
        self.encoding: Encoding | None = as_encoding(encoding)

    @property
    def scale(self) -> float:
        """Factor on the scores before a bias is added: the scale of the encoding, or 1/sqrt(head_dim).

        >>> Attention(8, num_heads=2).scale
        0.5
        """
        scale = None if self.encoding is None else self.encoding.scale
        return self.head_dim**-0.5 if scale is None else scale

    @property
    def axes(self) -> int:
        """Number of positions per token: more than one if a rope has axes.

        >>> Attention(8, num_heads=2).axes
        1
        """
        return rope_axes(self.encoding)

    @checks_names
    def forward(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        cache: Cache | None = None,
        *,
        key_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        counts: Tensor | None = None,
    ) -> Tensor:
        """Apply the layer to tokens.

        Args:
            x: Tokens [batch, seq, dim].
            positions: [seq] or [batch, seq]; [axes, seq] or [axes, batch, seq] if tokens have several axes. None
                continues from the cache, starts at 0 in each packed sequence, or is 0 .. seq-1. Only the encoding uses
                positions: causality depends on the order of the tokens.
            cache: Contains the tokens before x, which are visible too. The tokens of x are appended to it.
            key_mask: bool [batch, seq]. False hides a key; in a cache, also from later tokens. With a `KVCache` also
                bool [batch, max_length], which hides slots in this call.
            cu_seqlens: Cumulated lengths [sequences + 1] of sequences packed in a batch of 1. Each sequence only sees
                itself. Tokens past the last sequence are padding, and see no key.
            counts: Number of tokens per sequence [batch], if sequences are padded at the end. Requires a cache. The
                output for padding is undefined.

        Returns:
            Tensor [batch, seq, dim]. The output for a query without a visible key is o_proj(0).

        Raises:
            RopewalkError: If a shape, dtype or device does not match, or if the tokens may not fit in the cache.

        >>> attention = Attention(8, num_heads=2, encoding=RotaryEmbedding(4))
        >>> x, cache = torch.randn(1, 5, 8), KVCache(1, 2, max_length=16, head_dim=4)
        >>> with torch.inference_mode():
        ...     y = torch.cat([attention(token, cache=cache) for token in x.split(1, dim=1)], dim=1)
        ...     torch.allclose(y, attention(x), atol=1e-6)
        True
        """
        warn_if_not_embedded(self.encoding, "Attention")
        if isinstance(cache, CacheOfRanks):
            given = {"x": x, "positions": positions, "key_mask": key_mask, "cu_seqlens": cu_seqlens, "counts": counts}
            cache.agree(lambda: self._check_call(x, positions, cache, key_mask, cu_seqlens, counts), self, given)
        else:
            self._check_call(x, positions, cache, key_mask, cu_seqlens, counts)
        heads, asked = self.heads_of(x), "attention"
        tensors = {
            "positions": (positions, dims_of_ids(positions, self.axes)),
            "key_mask": (key_mask, ("batch", "seq")),
            "cu_seqlens": (cu_seqlens, ("sequences",)),
            "counts": (counts, ("batch",)),
        }
        if is_dtensor(heads[0]):
            encodings = {"encoding": self.encoding}
            y = call_locally(self._over_heads, *heads, asked=asked, encodings=encodings, tensors=tensors, cache=cache)
        else:
            rest = self.encoding, positions, cache, key_mask, cu_seqlens, counts
            y = self._run_plainly(self.encoding, self._over_heads, *heads, *rest)
        return self.joined(y)

    def _over_heads(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        encoding: Encoding | None,
        positions: Tensor | None,
        cache: Cache | None,
        key_mask: Tensor | None,
        cu_seqlens: Tensor | None,
        counts: Tensor | None,
    ) -> Tensor:
        """Return the outputs of the heads. The encoding is that of the layer, for these heads."""
        seq, explicit = q.shape[2], positions
        if positions is None and self.axes == 1:
            # Otherwise positions stay None: the rotation then uses a plain range, which is faster.
            if cache is not None:
                positions = range_positions(seq, self._start(cache), q.device)
            elif cu_seqlens is not None:
                positions = packed_positions(cu_seqlens, seq)
        if encoding is not None:
            dtype = v.dtype
            q, k, v = encoding.encode_heads(q, k, v, positions)
            q, k, v = (heads.to(dtype) for heads in (*encoding.rotate(q, k, positions), v))
        if cache is not None:
            # A cache stores whole positions of one axis. A bias needs them; other encodings can use fractions.
            storable = self.axes == 1 and (self._adds_bias or explicit is None or not explicit.is_floating_point())
            stored = explicit if storable else None
            if explicit is not None and stored is None and isinstance(cache, KVCache):
                cache.forget_positions()
            seen = cache.update(k, v, counts=counts, positions=stored, key_mask=key_mask, window=self.window)
            if isinstance(cache, KVCache):
                set_owner(cache, self)
            else:
                check_cached_tokens(seen, k, v)
            ids = positions, seen.positions
            return self._attend(q, seen.keys, seen.values, seen.visibility, encoding, *ids, merge=seen.merge)
        if key_mask is not None:
            # Hidden values are still multiplied by 0, which is NaN if padding contains NaN or infinity.
            k, v = (heads.masked_fill(~key_mask[:, None, :, None], 0) for heads in (k, v))
        visibility = Visibility(self.causal, None, key_mask, window=self.window)
        return self._attend(q, k, v, visibility, encoding, positions, positions, cu_seqlens)

    @checks_names
    def make_cache(
        self,
        batch: int,
        max_length: int | None = None,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> KVCache:
        """Create a cache for this layer.

        Args:
            batch: Number of sequences.
            max_length: Largest number of tokens per sequence. Optional if the layer has a window.
            dtype: Dtype of keys and values; None for that of the layer, or of autocast where it is enabled.
            device: Device of the cache; None for that of the layer.

        Returns:
            A `RollingKVCache` with a slot per token of the window; a `KVCache` if the layer has no window, or if
            `max_length` is smaller.

        Raises:
            RopewalkError: If a size is not an integer of at least 1, or if the layer needs a `max_length`.

        >>> Attention(8, num_heads=2).make_cache(1, 128)
        KVCache(1, 2, 128, 4, dtype=torch.float32, device='cpu'), filled_at_most=0
        >>> Attention(8, num_heads=2, window=16).make_cache(1).window
        16
        """
        asked = "Attention.make_cache(batch, max_length)"
        if max_length is not None:
            max_length = require_count(max_length, asked=asked, do="pass the largest number of tokens per sequence")
        elif self.window is None:
            raise RopewalkError(
                asked=asked,
                expected="a max_length: this layer has no window, and every token is kept",
                got="no max_length",
                do="pass the largest number of tokens per sequence, prompt included",
            )
        weight, kv_heads = self.k_proj.weight, self.heads_here[2]
        device = weight.device if device is None else torch.device(device)
        if dtype is None:
            autocast = has_autocast(device.type) and torch.is_autocast_enabled(device.type)
            autocast = autocast and weight.dtype != torch.float64
            dtype = torch.get_autocast_dtype(device.type) if autocast else weight.dtype
        if self.window is None or (max_length is not None and max_length < self.window):
            slots = 1 if max_length is None else max_length
            return KVCache(batch, kv_heads, slots, self.head_dim, dtype=dtype, device=device)
        return RollingKVCache(batch, kv_heads, self.window, self.head_dim, dtype=dtype, device=device)

    # nn.Module declares that a call returns Any.
    if TYPE_CHECKING:

        def __call__(
            self,
            x: Tensor,
            positions: Tensor | None = None,
            cache: Cache | None = None,
            *,
            key_mask: Tensor | None = None,
            cu_seqlens: Tensor | None = None,
            counts: Tensor | None = None,
        ) -> Tensor: ...

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        visibility: Visibility,
        encoding: Encoding | None,
        q_positions: Tensor | None,
        k_positions: Tensor | None,
        cu_seqlens: Tensor | None = None,
        merge: Merge | None = None,
    ) -> Tensor:
        score_bias = None
        if encoding is not None and self._adds_bias:
            q_positions, k_positions = (
                arange(x.shape[2], device=x.device) if ids is None else ids
                for x, ids in ((q, q_positions), (k, k_positions))
            )
            score_bias = ScoreBias(encoding, q_positions, k_positions)
        if merge is not None:
            return merge(*attend_with_lse(q, k, v, visibility, scale=self.scale, score_bias=score_bias))
        dropout = self.dropout if self.training else 0.0
        if cu_seqlens is None:
            return attend(q, k, v, visibility, scale=self.scale, dropout=dropout, score_bias=score_bias)
        y, _ = attend_packed(q, k, v, visibility, cu_seqlens, scale=self.scale, dropout=dropout, score_bias=score_bias)
        return y

    @staticmethod
    def _start(cache: Cache) -> int | Tensor:
        """Return the position of the next token: one for all sequences if the host knows it, which is faster."""
        if not isinstance(cache, KVCache):
            return cache.lengths
        return cache.lengths[0] if cache.starts_equally else cache.next_positions()

    @property
    def _adds_bias(self) -> bool:
        return self.encoding is not None and type(self.encoding).bias is not Encoding.bias

    def extra_repr(self) -> str:
        """Return the sizes, and options that are not the default."""
        window = "" if self.window is None else f", window={self.window}"
        return super().extra_repr() + window + (f", dropout={self.dropout}" if self.dropout else "")

    def _check_call(
        self,
        x: Tensor,
        positions: Tensor | None,
        cache: Cache | None,
        key_mask: Tensor | None,
        cu_seqlens: Tensor | None,
        counts: Tensor | None,
    ) -> None:
        """Raise unless the arguments of `forward` match x and each other."""
        self._check_tokens(x)
        batch, seq = x.shape[:2]
        if cache is not None:
            self._check_cache(cache, x, cu_seqlens)
        elif counts is not None:
            raise RopewalkError(
                asked="attention(x, counts=...)",
                expected="a cache, which does not store the padding",
                got="no cache",
                do="without a cache, hide padding with key_mask=",
            )
        if positions is not None:
            # The compiler cannot compare tensors with a protocol that has attributes.
            if not isinstance(positions, Tensor) and isinstance(positions, Cache):
                raise RopewalkError(
                    asked="attention(x, positions)",
                    expected="positions, or None",
                    got=f"a {type(positions).__name__}",
                    do="pass it by name: attention(x, cache=cache)",
                )
            check_positions(positions, x, asked="attention(positions=...)", axes=self.axes)
        if key_mask is not None and cache is None:
            asked = "attention(key_mask=...)"
            check_key_mask(key_mask, (batch, seq), x.device, asked=asked, dims="[batch, seq]")
            warn_if_row_is_hidden(key_mask, asked=asked)
        if cu_seqlens is not None:
            check_packed(cu_seqlens, batch, seq, x.device, asked="attention(cu_seqlens=...)")
        elif positions is not None and self.axes == 1:
            fits = isinstance(key_mask, Tensor) and key_mask.dtype == torch.bool and key_mask.shape == (batch, seq)
            mask = key_mask if fits else None
            warn_if_positions_restart(positions, mask, asked="attention(positions=...)")

    def _check_cache(self, cache: Cache, x: Tensor, cu_seqlens: Tensor | None) -> None:
        known = isinstance(cache, KVCache)
        if not known and not isinstance(cache, Cache):
            raise RopewalkError(
                asked="attention(x, cache=...)",
                expected="a KVCache or another Cache, with lengths and update, or None",
                got=shown(cache),
                do="create one per layer: layer.make_cache(batch, max_length)",
            )
        if not self.causal or cu_seqlens is not None:
            raise RopewalkError(
                asked="attention(x, cache=...)",
                expected="causal attention over a batch: tokens in a cache were read without the later tokens",
                got="cu_seqlens" if self.causal else "causal=False",
                do="use one row of the batch per sequence, and counts= if the lengths differ"
                if self.causal
                else "omit the cache, and read the whole sequence",
            )
        if isinstance(cache, CacheOfRanks) and self.training and self.dropout:
            raise RopewalkError(
                asked="attention(x, cache=...) with a cache that is cut over ranks",
                expected="no dropout, which drops other weights on each rank",
                got=f"dropout={self.dropout} in training",
                do="call model.eval() before decoding",
            )
        if not known:
            return
        rows, heads = local_size(x, 0), self.heads_here[2]
        expected_sizes = rows, heads, self.head_dim, self.head_dim
        sizes = cache.batch, cache.num_kv_heads, cache.head_dim, cache.v_dim
        if expected_sizes != sizes or cache.keys.device != x.device:
            names = "batch", "num_kv_heads", "head_dim", "v_dim"
            raise RopewalkError(
                asked="attention(x, cache=...)",
                expected=", ".join(f"{name}={n}" for name, n in zip(names, expected_sizes, strict=True))
                + f" on {x.device}",
                got=", ".join(f"{name}={n}" for name, n in zip(names, sizes, strict=True)) + f" on {cache.keys.device}",
                do="create a cache for this layer and this batch: layer.make_cache(batch, max_length)"
                + (
                    "" if heads == self.num_kv_heads else f"; {heads} of its {self.num_kv_heads} heads are on this rank"
                ),
            )
        check_owner(cache, self, "cache")


def _checked_dropout(dropout: float) -> float:
    """Return `dropout` as a float. Raise unless it is from 0 to below 1."""
    number = as_float(dropout)
    if number is None or not 0 <= number < 1:
        raise RopewalkError(
            asked="Attention(dropout=...)",
            expected="a number from 0 to below 1",
            got=shown(dropout),
            do="pass the probability of dropping an attention weight in training, or omit it",
        )
    return number
