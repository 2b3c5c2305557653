"""Attention: softmax attention with any encoding; grouped heads, padding, packed sequences, a cache."""

import itertools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ropewalk.errors import RopewalkError, as_float, shown
from ropewalk.kernels.constructors import arange, zeros_like
from ropewalk.nn.attention.cache import KVCache, check_counts, check_room
from ropewalk.nn.attention.projections import HeadSizes, ProjectedHeads
from ropewalk.nn.attention.scores import Biased, Sight, attend, documents_of
from ropewalk.nn.encodings.base import Encoding
from ropewalk.nn.encodings.rotary import as_encoding, check_encoding, rope_in
from ropewalk.nn.position_checks import check_ends, check_ids, check_positions, described, may_look
from ropewalk.nn.positions import packed_positions, range_positions
from ropewalk.nn.rotary.embedding import RotaryEmbedding

__all__ = ["Attention"]


class Attention(ProjectedHeads):
    """A layer of attention: softmax(q k^T / sqrt(head_dim) + bias) v for each head (Vaswani et al., 1706.03762, eq. 1).

    q, k, v are projections of x, split into heads; `num_kv_heads` key heads each serve num_heads / num_kv_heads query
    heads (GQA, 2305.13245). `encoding` brings position in: it rotates q and k, or adds its bias to the scores, and may
    set another scale; None brings none. An encoding that embeds is called once by the model, at its bottom, and not
    here. It may be shared between layers.

    `causal` hides the tokens that come after a query. `dropout` is the share of weights that are dropped in training.
    `qkv_bias` and `out_bias` add one to the projections before and after. `device` and `dtype` are the projections',
    whose names are those of most checkpoints: q_proj, k_proj, v_proj and o_proj.

    Where a mask or a bias is needed it is a tensor [.., seq, seq] on the CPU; on a CUDA device FlexAttention works it
    out score by score, except in float64, with dropout, or for a few queries.

    >>> attention = Attention(2, num_heads=1)
    >>> eye, none = torch.eye(2), torch.zeros(2, 2)
    >>> for layer, weight in zip(attention.children(), (none, none, eye, eye)):
    ...     _ = layer.load_state_dict({"weight": weight})
    >>> attention(torch.tensor([[[1.0, 0.0], [3.0, 2.0]]])).tolist()  # equal scores: the mean of what is seen
    [[[1.0, 0.0], [2.0, 1.0]]]
    """

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
        self.encoding: Encoding | None = as_encoding(encoding)

    @property
    def scale(self) -> float:
        """What scores are multiplied by before a bias is added: the encoding's scale, else 1/sqrt(head_dim).

        >>> Attention(8, num_heads=2).scale
        0.5
        """
        scale = None if self.encoding is None else self.encoding.scale
        return self.head_dim**-0.5 if scale is None else scale

    @property
    def axes(self) -> int:
        """How many positions a token has: more than one where a rope has axes.

        >>> Attention(8, num_heads=2).axes
        1
        """
        rope = rope_in(self.encoding)
        return 1 if rope is None or rope.spec.axes is None else rope.spec.axes.count

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
        """x [batch, seq, dim] -> [batch, seq, dim].

        `positions`, [seq] or [batch, seq], say where tokens stand; unless given, from 0 on, or from where the cache or
        a packed sequence stands. They matter to the encoding alone: what is causal goes by the order of the tokens.

        `cache` holds the tokens before x, which are seen too, and takes those of x; `counts` [batch] says how many of
        them are tokens, where sequences differ and are padded at their end. What comes out for padding is of no use.

        `key_mask`, bool, True where a key may be seen, [batch, seq], or [batch, max_length] of the cache. What a query
        that sees no key gives is o_proj(0).

        `cu_seqlens` [sequences + 1] are the ends of sequences that are laid end to end in a batch of 1; each sees
        itself alone. Tokens past the last end are padding, and see nothing.

        >>> attention = Attention(8, num_heads=2, encoding=RotaryEmbedding(4))
        >>> x, cache = torch.randn(1, 5, 8), KVCache(1, 2, max_length=16, head_dim=4)
        >>> with torch.inference_mode():
        ...     y = torch.cat([attention(token, cache=cache) for token in x.split(1, dim=1)], dim=1)
        ...     torch.allclose(y, attention(x), atol=1e-6)
        True
        """
        self._check_tokens(x)
        if cache is not None and not isinstance(cache, KVCache):
            raise RopewalkError(
                asked="attention(x, cache=...)",
                expected="a KVCache, or None",
                got=shown(cache),
                do="make one for each layer: KVCache(batch, num_kv_heads, max_length, head_dim)",
            )
        self._check_call(x, positions, cache, key_mask, cu_seqlens, counts)
        seq = x.shape[1]
        if positions is None and self.axes == 1:
            # Without any the rotation takes a plain range, which is faster.
            if cache is not None:
                positions = range_positions(seq, cache.lengths[0] if cache.even else cache.lengths, x.device)
            elif cu_seqlens is not None:
                positions = packed_positions(cu_seqlens, seq)
        q, k, v = self.heads_of(x)
        if self.encoding is not None:
            q, k = (rotated.to(v.dtype) for rotated in self.encoding.rotate(q, k, positions))
        if key_mask is not None:
            # Hidden values are still multiplied, by 0, and what padding holds may be no number.
            hidden = ~key_mask if cache is None else ~_next_slots(key_mask, cache.lengths, seq)
            k, v = (heads.masked_fill(hidden[:, None, :, None], 0) for heads in (k, v))
        if cache is not None:
            y = self._with_cache(q, k, v, positions, cache, key_mask, counts)
        elif cu_seqlens is not None:
            y = self._packed(q, k, v, positions, cu_seqlens, key_mask)
        else:
            y = self._attend(q, k, v, Sight(self.causal, None, key_mask), positions, positions)
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
        self, q: Tensor, k: Tensor, v: Tensor, sight: Sight, q_positions: Tensor | None, k_positions: Tensor | None
    ) -> Tensor:
        biased = None
        if self.encoding is not None and self._adds_bias:
            q_positions, k_positions = (
                arange(x.shape[2], device=x.device) if ids is None else ids
                for x, ids in ((q, q_positions), (k, k_positions))
            )
            biased = Biased(self.encoding, q_positions, k_positions)
        dropout = self.dropout if self.training else 0.0
        return attend(q, k, v, sight, scale=self.scale, dropout=dropout, biased=biased)

    @property
    def _adds_bias(self) -> bool:
        return self.encoding is not None and type(self.encoding).bias is not Encoding.bias

    def _packed(
        self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor | None, cu_seqlens: Tensor, key_mask: Tensor | None
    ) -> Tensor:
        if not may_look(cu_seqlens):
            sight = Sight(self.causal, None, key_mask, documents_of(cu_seqlens, q.shape[2]))
            return self._attend(q, k, v, sight, positions, positions)
        # One after the other: less work than a mask, and what is not finite stays where it is.
        ends, parts = cu_seqlens.tolist(), []
        for start, end in itertools.pairwise(ends):
            tokens = slice(start, end)
            ids = None if positions is None else positions[..., tokens]
            seen = None if key_mask is None else key_mask[:, tokens]
            sight = Sight(self.causal, None, seen)
            parts.append(self._attend(q[:, :, tokens], k[:, :, tokens], v[:, :, tokens], sight, ids, ids))
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
        # A compiler is given the whole memory, so that shapes stay what they are from step to step.
        filled = cache.max_length if torch.compiler.is_compiling() else cache.filled_at_most
        reach = seq if empty else filled
        keys, values = cache.keys[:, :, :reach], cache.values[:, :, :reach]
        seen = None if key_mask is None else key_mask[:, :reach]
        if empty:
            sight = Sight(True, None, seen)
        elif even and seq == 1 and not torch.compiler.is_compiling():
            sight = Sight(False, None, seen)
        else:
            sight = Sight(True, starts, seen)
        return self._attend(q, keys, values, sight, positions, cache.positions[:, :reach])

    def extra_repr(self) -> str:
        """The sizes, and what is not the default."""
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
        """Raise unless the arguments of `forward` fit x and each other."""
        batch, seq = x.shape[:2]
        if cache is not None:
            self._check_cache(cache, x, cu_seqlens)
            check_room(cache, seq, counts)
        if counts is not None:
            if cache is None:
                raise RopewalkError(
                    asked="attention(x, counts=...)",
                    expected="a cache, which keeps the padding out",
                    got="no cache",
                    do="hide padding with key_mask= where there is no cache",
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
                    expected="a batch of 1, in which all sequences lie end to end",
                    got=f"a batch of {batch}",
                    do="lay them end to end: x.flatten(0, 1).unsqueeze(0)",
                )
            asked = "attention(cu_seqlens=...)"
            check_ids(cu_seqlens, asked=asked, shape="[sequences + 1]", dims=(1,), whole=True)
            if cu_seqlens.device != x.device or len(cu_seqlens) == 0:
                raise RopewalkError(
                    asked=asked,
                    expected=f"ends of sequences from 0 on, on {x.device}",
                    got=described(cu_seqlens),
                    do="put a 0 before the cumulated lengths, and move them where x is",
                )
            if may_look(cu_seqlens):
                check_ends(cu_seqlens, seq, asked=asked)

    def _check_cache(self, cache: KVCache, x: Tensor, cu_seqlens: Tensor | None) -> None:
        if not self.causal or cu_seqlens is not None:
            raise RopewalkError(
                asked="attention(x, cache=...)",
                expected="causal attention over a batch: tokens in a cache were read without those that come now",
                got="cu_seqlens" if self.causal else "causal=False",
                do="give a sequence a row of the batch, and counts= where they differ in length"
                if self.causal
                else "leave the cache out and read the whole sequence",
            )
        wanted = x.shape[0], self.num_kv_heads, self.head_dim, self.head_dim
        sizes = cache.batch, cache.num_kv_heads, cache.head_dim, cache.v_dim
        if wanted != sizes or cache.keys.device != x.device:
            names = "batch", "num_kv_heads", "head_dim", "v_dim"
            raise RopewalkError(
                asked="attention(x, cache=...)",
                expected=", ".join(f"{name}={n}" for name, n in zip(names, wanted, strict=True)) + f" on {x.device}",
                got=", ".join(f"{name}={n}" for name, n in zip(names, sizes, strict=True)) + f" on {cache.keys.device}",
                do="make a cache for this layer and this batch",
            )


def _next_slots(key_mask: Tensor, lengths: Tensor, seq: int) -> Tensor:
    """Of a mask over the slots of a cache, those that the next `seq` tokens take."""
    slots = lengths[:, None] + arange(seq, device=lengths.device)
    return key_mask.gather(1, slots.clamp_max(key_mask.shape[1] - 1))


def _check_key_mask(key_mask: Tensor, x: Tensor, shape: tuple[int, int], *, cached: bool) -> None:
    fits = isinstance(key_mask, Tensor) and key_mask.dtype == torch.bool and key_mask.shape == shape
    if not fits or key_mask.device != x.device:
        raise RopewalkError(
            asked="attention(key_mask=...)",
            expected=f"bool {list(shape)} on {x.device}: [batch, {'max_length of the cache' if cached else 'seq'}]",
            got=described(key_mask),
            do="True is a key that may be seen; write ids != padding, or mask.bool()",
        )


def _checked_dropout(dropout: float) -> float:
    """The share of the weights to drop, from 0 to below 1."""
    number = as_float(dropout)
    if number is None or not 0 <= number < 1:
        raise RopewalkError(
            asked="Attention(dropout=...)",
            expected="a number from 0 to below 1",
            got=shown(dropout),
            do="pass the share of attention weights to drop in training, or leave it out",
        )
    return number
