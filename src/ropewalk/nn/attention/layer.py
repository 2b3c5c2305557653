"""Attention: a layer of softmax attention with any encoding, grouped heads, padding, packed sequences and a cache."""

import itertools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ropewalk.errors import RopewalkError, as_float, shown
from ropewalk.kernels.constructors import arange, zeros_like
from ropewalk.nn.attention.cache import KVCache, check_capacity, check_counts
from ropewalk.nn.attention.projections import HeadSizes, ProjectedHeads
from ropewalk.nn.attention.scores import ScoreBias, Visibility, attend, documents_of
from ropewalk.nn.encodings.base import Encoding, warn_if_not_embedded
from ropewalk.nn.encodings.bias import check_causal
from ropewalk.nn.encodings.rotary import as_encoding, check_encoding, rope_in
from ropewalk.nn.position_checks import (
    can_read_values,
    check_ends,
    check_ids,
    check_positions,
    described,
    warn_if_all_hidden,
)
from ropewalk.nn.positions import packed_positions, range_positions
from ropewalk.nn.rotary.embedding import RotaryEmbedding
from ropewalk.signatures import checks_names

__all__ = ["Attention"]


class Attention(ProjectedHeads):
    """Softmax attention: softmax(q k^T / sqrt(head_dim) + bias) v for each head (Vaswani et al., 1706.03762, eq. 1).

    q, k and v are projections of x, split into heads. Each key head is shared by num_heads / num_kv_heads query heads
    (GQA, 2305.13245). The projections are named as in most checkpoints: q_proj, k_proj, v_proj and o_proj.

    On the CPU a mask or a bias is a tensor [..., seq, seq]. On a CUDA device FlexAttention computes it per score,
    except in float64, with dropout, or for few queries.

    Args:
        dim: Width of the model.
        num_heads: Number of query heads.
        num_kv_heads: Number of key heads, a divisor of `num_heads`; None for `num_heads`.
        head_dim: Width of a head; None for dim / num_heads.
        encoding: Rotates q and k, or adds a bias to the scores, and can set another scale. It can be shared between
            layers. The `embed` hook is not called here: the model calls it once, before the first layer. None adds no
            position.
        causal: Hide the tokens after a query.
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
        dropout: float = 0.0,
        qkv_bias: bool = False,
        out_bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        layer = type(self).__name__
        sizes = HeadSizes.checked(dim, num_heads, num_kv_heads, head_dim, layer=layer)
        super().__init__(sizes, causal=causal, qkv_bias=qkv_bias, out_bias=out_bias, device=device, dtype=dtype)
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
        rope = rope_in(self.encoding)
        return 1 if rope is None or rope.spec.axes is None else rope.spec.axes.count

    @checks_names
    def forward(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        cache: KVCache | None = None,
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
            key_mask: bool [batch, seq], or [batch, max_length] with a cache. False hides a key.
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
        self._check_tokens(x)
        warn_if_not_embedded(self.encoding, "Attention")
        if cache is not None and not isinstance(cache, KVCache):
            raise RopewalkError(
                asked="attention(x, cache=...)",
                expected="a KVCache, or None",
                got=shown(cache),
                do="create one per layer: KVCache(batch, num_kv_heads, max_length, head_dim)",
            )
        self._check_call(x, positions, cache, key_mask, cu_seqlens, counts)
        seq = x.shape[1]
        if positions is None and self.axes == 1:
            # Otherwise positions stay None: the rotation then uses a plain range, which is faster.
            if cache is not None:
                positions = range_positions(seq, cache.lengths[0] if cache.even else cache.lengths, x.device)
            elif cu_seqlens is not None:
                positions = packed_positions(cu_seqlens, seq)
        q, k, v = self.heads_of(x)
        if self.encoding is not None:
            q, k = (rotated.to(v.dtype) for rotated in self.encoding.rotate(q, k, positions))
        if key_mask is not None:
            # Hidden values are still multiplied by 0, which is NaN if padding contains NaN or infinity.
            hidden = ~key_mask if cache is None else ~_next_slots(key_mask, cache.lengths, seq)
            k, v = (heads.masked_fill(hidden[:, None, :, None], 0) for heads in (k, v))
        if cache is not None:
            y = self._with_cache(q, k, v, positions, cache, key_mask, counts)
        elif cu_seqlens is not None:
            y = self._packed(q, k, v, positions, cu_seqlens, key_mask)
        else:
            y = self._attend(q, k, v, Visibility(self.causal, None, key_mask), positions, positions)
        return self.joined(y)

    # nn.Module declares that a call returns Any.
    if TYPE_CHECKING:

        def __call__(
            self,
            x: Tensor,
            positions: Tensor | None = None,
            cache: KVCache | None = None,
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
        q_positions: Tensor | None,
        k_positions: Tensor | None,
    ) -> Tensor:
        score_bias = None
        if self.encoding is not None and self._adds_bias:
            q_positions, k_positions = (
                arange(x.shape[2], device=x.device) if ids is None else ids
                for x, ids in ((q, q_positions), (k, k_positions))
            )
            score_bias = ScoreBias(self.encoding, q_positions, k_positions)
        dropout = self.dropout if self.training else 0.0
        return attend(q, k, v, visibility, scale=self.scale, dropout=dropout, score_bias=score_bias)

    @property
    def _adds_bias(self) -> bool:
        return self.encoding is not None and type(self.encoding).bias is not Encoding.bias

    def _packed(
        self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor | None, cu_seqlens: Tensor, key_mask: Tensor | None
    ) -> Tensor:
        if not can_read_values(cu_seqlens):
            visibility = Visibility(self.causal, None, key_mask, documents_of(cu_seqlens, q.shape[2]))
            return self._attend(q, k, v, visibility, positions, positions)
        # One call per sequence: less work than a mask, and NaN cannot reach other sequences.
        ends, parts = cu_seqlens.tolist(), []
        for start, end in itertools.pairwise(ends):
            tokens = slice(start, end)
            ids = None if positions is None else positions[..., tokens]
            visible = None if key_mask is None else key_mask[:, tokens]
            visibility = Visibility(self.causal, None, visible)
            parts.append(self._attend(q[:, :, tokens], k[:, :, tokens], v[:, :, tokens], visibility, ids, ids))
        return torch.cat([*parts, zeros_like(q[:, :, ends[-1] :])], dim=2)

    def _with_cache(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor | None,
        cache: KVCache,
        key_mask: Tensor | None,
        counts: Tensor | None,
    ) -> Tensor:
        seq, empty, even = q.shape[2], cache.filled_at_most == 0, cache.even
        starts = (cache.lengths[0] if even else cache.lengths).clone()
        cache.append(k, v, counts, positions=positions if self._adds_bias else None)
        if not torch.compiler.is_compiling():
            cache.belongs_to(self)
        # torch.compile reads the whole cache, so that shapes do not change between steps.
        filled = cache.max_length if torch.compiler.is_compiling() else cache.filled_at_most
        length = seq if empty else filled
        keys, values = cache.keys[:, :, :length], cache.values[:, :, :length]
        visible = None if key_mask is None else key_mask[:, :length]
        if empty:
            visibility = Visibility(True, None, visible)
        elif even and seq == 1 and not torch.compiler.is_compiling():
            visibility = Visibility(False, None, visible)
        else:
            visibility = Visibility(True, starts, visible)
        return self._attend(q, keys, values, visibility, positions, cache.positions[:, :length])

    def extra_repr(self) -> str:
        """Return the sizes, and options that are not the default."""
        return super().extra_repr() + (f", dropout={self.dropout}" if self.dropout else "")

    def _check_call(
        self,
        x: Tensor,
        positions: Tensor | None,
        cache: KVCache | None,
        key_mask: Tensor | None,
        cu_seqlens: Tensor | None,
        counts: Tensor | None,
    ) -> None:
        """Raise unless the arguments of `forward` match x and each other."""
        batch, seq = x.shape[:2]
        if cache is not None:
            self._check_cache(cache, x, cu_seqlens)
            if not torch.compiler.is_compiling():
                cache.check_layer(self)
            check_capacity(cache, seq, counts)
        if counts is not None:
            if cache is None:
                raise RopewalkError(
                    asked="attention(x, counts=...)",
                    expected="a cache, which does not store the padding",
                    got="no cache",
                    do="without a cache, hide padding with key_mask=",
                )
            check_counts(cache, counts, seq)
        if positions is not None:
            check_positions(positions, x, asked="attention(positions=...)", axes=self.axes)
        if key_mask is not None:
            keys = seq if cache is None else cache.max_length
            _check_key_mask(key_mask, x, (batch, keys), cached=cache is not None)
        if cu_seqlens is not None:
            if batch != 1:
                raise RopewalkError(
                    asked="attention(x, cu_seqlens=...)",
                    expected="a batch of 1 that contains the concatenated sequences",
                    got=f"a batch of {batch}",
                    do="concatenate them: x.flatten(0, 1).unsqueeze(0)",
                )
            asked = "attention(cu_seqlens=...)"
            check_ids(cu_seqlens, asked=asked, shape="[sequences + 1]", dims=(1,), whole=True)
            if cu_seqlens.device != x.device or len(cu_seqlens) == 0:
                raise RopewalkError(
                    asked=asked,
                    expected=f"cumulated lengths that start at 0, on {x.device}",
                    got=described(cu_seqlens),
                    do="put a 0 before the cumulated lengths, and move them to the device of x",
                )
            if can_read_values(cu_seqlens):
                check_ends(cu_seqlens, seq, asked=asked)

    def _check_cache(self, cache: KVCache, x: Tensor, cu_seqlens: Tensor | None) -> None:
        if not self.causal or cu_seqlens is not None:
            raise RopewalkError(
                asked="attention(x, cache=...)",
                expected="causal attention over a batch: tokens in a cache were read without the later tokens",
                got="cu_seqlens" if self.causal else "causal=False",
                do="use one row of the batch per sequence, and counts= if the lengths differ"
                if self.causal
                else "omit the cache, and read the whole sequence",
            )
        expected_sizes = x.shape[0], self.num_kv_heads, self.head_dim, self.head_dim
        sizes = cache.batch, cache.num_kv_heads, cache.head_dim, cache.v_dim
        if expected_sizes != sizes or cache.keys.device != x.device:
            names = "batch", "num_kv_heads", "head_dim", "v_dim"
            raise RopewalkError(
                asked="attention(x, cache=...)",
                expected=", ".join(f"{name}={n}" for name, n in zip(names, expected_sizes, strict=True))
                + f" on {x.device}",
                got=", ".join(f"{name}={n}" for name, n in zip(names, sizes, strict=True)) + f" on {cache.keys.device}",
                do="create a cache for this layer and this batch",
            )


def _next_slots(key_mask: Tensor, lengths: Tensor, seq: int) -> Tensor:
    """Return the part of a mask over cache slots that belongs to the next `seq` tokens."""
    slots = lengths[:, None] + arange(seq, device=lengths.device)
    return key_mask.gather(1, slots.clamp_max(key_mask.shape[1] - 1))


def _check_key_mask(key_mask: Tensor, x: Tensor, shape: tuple[int, int], *, cached: bool) -> None:
    fits = isinstance(key_mask, Tensor) and key_mask.dtype == torch.bool and key_mask.shape == shape
    if not fits or key_mask.device != x.device:
        raise RopewalkError(
            asked="attention(key_mask=...)",
            expected=f"bool {list(shape)} on {x.device}: [batch, {'max_length of the cache' if cached else 'seq'}]",
            got=described(key_mask),
            do="True is a visible key; pass ids != padding, or mask.bool()",
        )
    warn_if_all_hidden(key_mask, asked="attention(key_mask=...)")


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
