"""What callers of Attention and KVCache may give, checked before anything is computed or written."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ropewalk.errors import RopewalkError, as_float, require_count, shown
from ropewalk.nn.encodings.base import Encoding, check_as, may_look
from ropewalk.nn.rotary.checks import check_ends, check_ids, check_positions
from ropewalk.nn.rotary.embedding import RotaryEmbedding

if TYPE_CHECKING:
    from ropewalk.nn.attention.cache import KVCache
    from ropewalk.nn.attention.layer import Attention


def checked_sizes(dim: Any, num_heads: Any, num_kv_heads: Any, head_dim: Any, layer: str) -> tuple[int, int, int, int]:
    """dim, num_heads, num_kv_heads and head_dim of a layer of that name; the last two may be None."""
    do = "pass a whole number above 0"
    dim = require_count(dim, asked=f"{layer}(dim=...)", do=do)
    heads = require_count(num_heads, asked=f"{layer}(num_heads=...)", do=do)
    shared = heads if num_kv_heads is None else num_kv_heads
    kv_heads = require_count(shared, asked=f"{layer}(num_kv_heads=...)", do=do)
    if heads % kv_heads:
        raise RopewalkError(
            asked=f"{layer}(num_heads={heads}, num_kv_heads={kv_heads})",
            expected="num_heads a multiple of num_kv_heads: each key head serves as many query heads",
            got=f"{heads} and {kv_heads}",
            do=f"use a num_kv_heads that divides {heads}",
        )
    if head_dim is None and dim % heads:
        raise RopewalkError(
            asked=f"{layer}(dim={dim}, num_heads={heads})",
            expected="a dim that is a multiple of num_heads, or a head_dim",
            got=f"{dim} and {heads}",
            do="pass head_dim=",
        )
    width = require_count(dim // heads if head_dim is None else head_dim, asked=f"{layer}(head_dim=...)", do=do)
    return dim, heads, kv_heads, width


def checked_dropout(dropout: Any) -> float:
    """A share of the weights from 0 to below 1."""
    number = as_float(dropout)
    if number is None or not 0 <= number < 1:
        raise RopewalkError(
            asked="Attention(dropout=...)",
            expected="a number from 0 to below 1",
            got=shown(dropout),
            do="pass the share of attention weights to drop in training, or leave it out",
        )
    return number


def rope_in(encoding: Any) -> RotaryEmbedding | None:
    """The rope that an encoding is, or has."""
    rope = getattr(encoding, "rope", encoding)
    return rope if isinstance(rope, RotaryEmbedding) else None


def check_encoding(encoding: Any, head_dim: int, num_heads: int, num_kv_heads: int) -> None:
    """Refuses what is no encoding, or one that was made for other heads."""
    rope = rope_in(encoding)
    if not isinstance(encoding, Encoding | RotaryEmbedding):
        raise RopewalkError(
            asked="Attention(encoding=...)",
            expected="an Encoding, a RotaryEmbedding, or None for no position",
            got=shown(encoding),
            do='make one: ropewalk.encoding("rope", dim=dim, num_heads=num_heads)',
        )
    if rope is not None and (rope.spec.head_dim != head_dim or rope.seq_dim != -2):
        raise RopewalkError(
            asked=f"Attention(encoding=...) with head_dim={head_dim}",
            expected=f"a rope with head_dim={head_dim} and seq_dim=-2",
            got=f"{rope}",
            do="make it for the heads of this layer",
        )
    own = None if rope is None else rope._heads
    made_for = getattr(encoding, "num_heads", num_heads) if own is None else own
    if made_for != num_heads or (own is not None and num_kv_heads != num_heads):
        raise RopewalkError(
            asked=f"Attention(num_heads={num_heads}, num_kv_heads={num_kv_heads}, encoding=...)",
            expected=f"an encoding for {num_heads} heads" + ("" if own is None else ", and as many key heads"),
            got=f"{type(encoding).__name__} for {made_for} heads" + ("" if own is None else ", each with its own"),
            do=f"make it with num_heads={num_heads}" + ("" if own is None else ", and leave num_kv_heads out"),
        )


def check_tokens_fit(x: Any, dim: int, layer: nn.Module) -> None:
    """Refuses what is no tensor of tokens [batch, seq, dim] that the projection can take."""
    if not (isinstance(x, Tensor) and x.is_floating_point() and x.dim() == 3 and x.shape[-1] == dim):
        raise RopewalkError(
            asked="attention(x)",
            expected=f"floating-point tokens [batch, seq, {dim}]",
            got=described(x),
            do="give it tokens before their heads are split, with a batch of 1 where there is one sequence",
        )
    # Layers that were put in its place, sharded or offloaded, know themselves what they take.
    if type(layer) is not nn.Linear or layer.weight.is_meta:
        return
    weight = layer.weight
    if x.device != weight.device or not (x.dtype == weight.dtype or torch.is_autocast_enabled(x.device.type)):
        raise RopewalkError(
            asked="attention(x)",
            expected=f"tokens of {weight.dtype} on {weight.device}, as the projections are",
            got=f"{x.dtype} on {x.device}",
            do="cast or move one of them: attention.to(x.device, x.dtype)",
        )


def check_call(
    layer: "Attention", x: Tensor, positions: Any, cache: "KVCache | None", key_mask: Any, cu_seqlens: Any, counts: Any
) -> None:
    """Refuses arguments of `Attention.forward` that do not fit x or each other."""
    batch, seq = x.shape[:2]
    if cache is not None:
        _check_cache(layer, cache, x, cu_seqlens)
        check_room(cache, seq, counts)
    if counts is not None:
        if cache is None:
            raise RopewalkError(
                asked="attention(x, counts=...)",
                expected="a cache, which keeps the padding out",
                got="no cache",
                do="hide padding with key_mask= where there is no cache",
            )
        check_counts(counts, seq, cache.lengths)
    if positions is not None:
        axes = layer.axes
        check_as("attention(positions=...)", check_positions, positions, x, -2, True, "positions", axes)
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
        ends = {"name": "cu_seqlens", "shape": "[sequences + 1]", "dims": (1,), "whole": True}
        check_as(asked, check_ids, cu_seqlens, **ends)
        if cu_seqlens.device != x.device or len(cu_seqlens) == 0:
            raise RopewalkError(
                asked=asked,
                expected=f"ends of sequences from 0 on, on {x.device}",
                got=described(cu_seqlens),
                do="put a 0 before the cumulated lengths, and move them where x is",
            )
        if may_look(cu_seqlens):
            check_as(asked, check_ends, cu_seqlens, seq)


def _check_key_mask(key_mask: Any, x: Tensor, shape: tuple[int, int], *, cached: bool) -> None:
    fits = isinstance(key_mask, Tensor) and key_mask.dtype == torch.bool and key_mask.shape == shape
    if not fits or key_mask.device != x.device:
        raise RopewalkError(
            asked="attention(key_mask=...)",
            expected=f"bool {list(shape)} on {x.device}: [batch, {'max_length of the cache' if cached else 'seq'}]",
            got=described(key_mask),
            do="True is a key that may be seen; write ids != padding, or mask.bool()",
        )


def _check_cache(layer: "Attention", cache: "KVCache", x: Tensor, cu_seqlens: Any) -> None:
    if not layer.causal or cu_seqlens is not None:
        raise RopewalkError(
            asked="attention(x, cache=...)",
            expected="causal attention over a batch: tokens in a cache were read without those that come now",
            got="cu_seqlens" if layer.causal else "causal=False",
            do="give a sequence a row of the batch, and counts= where they differ in length"
            if layer.causal
            else "leave the cache out and read the whole sequence",
        )
    wanted = x.shape[0], layer.num_kv_heads, layer.head_dim, layer.head_dim
    found = cache.batch, cache.num_kv_heads, cache.head_dim, cache.v_dim
    if wanted != found or cache.keys.device != x.device:
        names = "batch", "num_kv_heads", "head_dim", "v_dim"
        raise RopewalkError(
            asked="attention(x, cache=...)",
            expected=", ".join(f"{name}={n}" for name, n in zip(names, wanted, strict=True)) + f" on {x.device}",
            got=", ".join(f"{name}={n}" for name, n in zip(names, found, strict=True)) + f" on {cache.keys.device}",
            do="make a cache for this layer and this batch",
        )


def check_append(cache: "KVCache", k: Any, v: Any, counts: Any, positions: Any) -> None:
    """Refuses keys and values that do not belong into the cache, or may not fit."""
    for name, x, buffer in (("k", k, cache.keys), ("v", v, cache.values)):
        fits = isinstance(x, Tensor) and x.dim() == 4 and x.dtype == buffer.dtype and x.device == buffer.device
        if not fits or x.shape[:2] != buffer.shape[:2] or x.shape[3] != buffer.shape[3]:
            batch, heads, _, width = buffer.shape
            raise RopewalkError(
                asked=f"KVCache.append({name})",
                expected=f"[{batch}, {heads}, seq, {width}] of {buffer.dtype} on {buffer.device}",
                got=described(x),
                do="give it keys and values of the batch, heads and dtype that it was made with, or make another",
            )
    if k.shape[2] != v.shape[2]:
        raise RopewalkError(
            asked="KVCache.append(k, v)",
            expected="as many values as keys",
            got=f"{k.shape[2]} keys and {v.shape[2]} values",
            do="give both for the same tokens",
        )
    if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
        raise RopewalkError(
            asked="KVCache.append(k, v)",
            expected="keys and values without a gradient: the cache is overwritten at every step",
            got="a tensor that requires a gradient",
            do="decode under torch.inference_mode() or torch.no_grad()",
        )
    if counts is not None:
        check_counts(counts, k.shape[2], cache.lengths)
    if positions is not None:
        asked = "KVCache.append(positions=...)"
        check_as(asked, check_ids, positions, name="positions", whole=True)
        check_as(asked, check_positions, positions, k, -2, True, "positions")
    check_room(cache, k.shape[2], counts)


def check_room(cache: "KVCache", seq: int, counts: Tensor | None) -> None:
    """Refuses tokens that may not fit, as far as the host knows."""
    room = cache.max_length - cache.filled_at_most
    if seq <= room:
        return
    # A compiler cannot print what changes from step to step.
    known = not torch.compiler.is_compiling()
    do = "make a longer cache, or drop old tokens with evict_prefix"
    raise RopewalkError(
        asked=f"more tokens in a KVCache of max_length={cache.max_length}",
        expected=f"at most {room}, since {cache.filled_at_most} may be there" if known else "no more than fit",
        got=f"{seq}" if known else "more",
        do=do if counts is None else f"{do}; padding takes room too while it is written",
    )


def check_counts(counts: Any, seq: int, lengths: Tensor) -> None:
    """Refuses what is not, for each sequence, how many of `seq` tokens are no padding."""
    fits = _one_a_sequence(counts, lengths)
    if fits and (not may_look(counts) or bool(((counts >= 0) & (counts <= seq)).all())):
        return
    raise RopewalkError(
        asked=f"counts of tokens in {seq} that may be padded",
        expected=f"whole numbers [{len(lengths)}] from 0 to {seq}, one a sequence, on {lengths.device}",
        got=f"{counts.tolist()}" if fits else described(counts),
        do="pass how many tokens of each sequence are no padding; padding comes last",
    )


def check_index(index: Any, sequences: int, device: torch.device, asked: str, *, number: int | None = None) -> None:
    """Refuses what does not name sequences that there are: `number` of them, or any."""
    fits = isinstance(index, Tensor) and index.dtype in (torch.int32, torch.int64) and index.device == device
    fits = fits and index.dim() == 1 and number in (None, len(index))
    if fits and (not may_look(index) or bool(((index >= 0) & (index < sequences)).all())):
        return
    raise RopewalkError(
        asked=asked,
        expected=f"whole numbers [{'any' if number is None else number}] from 0 to {sequences - 1}, on {device}",
        got=f"{index.tolist()}" if fits else described(index),
        do="pass, for each sequence that goes on, the one that it goes on from",
    )


def _one_a_sequence(numbers: Any, lengths: Tensor) -> bool:
    whole = isinstance(numbers, Tensor) and numbers.dtype in (torch.int32, torch.int64)
    return whole and numbers.shape == lengths.shape and numbers.device == lengths.device


def rope_of(encoding: Any, head_dim: int) -> tuple[RotaryEmbedding | None, int | None]:
    """What rotated the keys and can move them, None where keys hold no position; and for which length it did."""
    rope = rope_in(encoding)
    if rope is not None and rope.spec.axes is not None:
        raise RopewalkError(
            asked="KVCache.evict_prefix(count, rope)",
            expected="a rope over one axis: as many tokens as are dropped, so far the rest moves",
            got=f"{rope}",
            do="over several axes that is not so: reset(), and read the last tokens again",
        )
    if rope is not None and rope.spec.head_dim == head_dim and rope.seq_dim == -2:
        return rope, getattr(encoding, "at_length", None)
    still = isinstance(encoding, Encoding) and encoding.relative and type(encoding).rotate is Encoding.rotate
    if encoding is None or still:
        return None, None
    raise RopewalkError(
        asked="KVCache.evict_prefix(count, rope)",
        expected=f"what made these keys and can move them: a rope with head_dim={head_dim} and seq_dim=-2, an encoding "
        "that has such a rope or only adds a bias, or None where keys hold no position",
        got=f"{encoding}" if isinstance(encoding, nn.Module) else shown(encoding),
        do="pass the encoding of the layer; where it is absolute, reset() and read the last tokens again",
    )


def described(x: Any) -> str:
    """A tensor as an error shows it."""
    return f"{x.dtype} {list(x.shape)} on {x.device}" if isinstance(x, Tensor) else shown(x)
