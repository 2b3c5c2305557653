"""Linear attention of packed sequences whose ends only the device knows."""

from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from ropewalk.kernels.constructors import arange, new_zeros
from ropewalk.kernels.linear.chunks import CHUNK, Far, Parts, chunk_sums_of, read_chunks
from ropewalk.kernels.linear.segments import Plan
from ropewalk.kernels.linear.weights import (
    band_weights,
    decay_weights,
    grouped_decay,
    lead_of,
    reversed_weighting,
    running,
)
from ropewalk.kernels.types import Features, Sums, Weighting

__all__ = ["attend_packed"]


def attend_packed(
    q: Features,
    k: Features,
    v: Tensor,
    before: Sums | None,
    cu_seqlens: Tensor,
    weighting: Weighting,
    *,
    causal: bool,
    chunk: int = CHUNK,
) -> tuple[Parts, Sums]:
    """Return numerator and denominator of each packed sequence, and their sums [sequences, ...].

    It is for compilers, and for calls that must not block the host. Tokens are copied into chunks that contain one
    sequence each. A matrix specifies which chunks a chunk reads, and the decay between them. Therefore the cost grows
    with the square of the number of chunks, and a NaN can reach other sequences. In eager mode, if the host can read
    the ends, sequences are computed one after the other instead.

    Args:
        q: Features of queries [1, heads, seq, width], or without tokens.
        k: Features of keys [1, kv_heads, seq, width].
        v: Values [1, kv_heads, seq, v_dim].
        before: Sums over earlier keys [sequences, ...], or None.
        cu_seqlens: Ends of the sequences [sequences + 1], starting with 0.
        weighting: Factors of the terms.
        causal: Whether a query reads only keys up to its own index.
        chunk: Tokens per chunk.

    >>> ones = Features(torch.ones(1, 1, 3, 2), torch.ones(1, 1, 3, 2))
    >>> v, ends = torch.tensor([[[[1.0], [3.0], [7.0]]]]), torch.tensor([0, 2, 3])
    >>> attend_packed(ones, ones, v, None, ends, Weighting(), causal=True)[0].above.flatten().tolist()
    [2.0, 8.0, 14.0]
    """
    weighted = weighting.decay is not None or weighting.band is not None
    parts, after = _attend(q, k, v, before, cu_seqlens, weighting, causal, causal or weighted, False, chunk)
    if causal or not weighted:
        return parts, after
    q, k = (Features(*(x.flip(2) for x in side)) for side in (q, k))
    # Tokens after the last sequence are the first in reverse.
    ends = v.shape[2] - cu_seqlens.flip(0)
    later, _ = _attend(q, k, v.flip(2), None, ends, reversed_weighting(weighting), True, True, True, chunk)
    below = None if parts.below is None or later.below is None else parts.below + later.below.flip(2)
    return Parts(parts.above + later.above.flip(2), below), after


def _attend(
    q: Features, k: Features, v: Tensor, before: Sums | None, cu_seqlens: Tensor, weighting: Weighting,
    causal: bool, ordered: bool, strict: bool, chunk: int,
) -> tuple[Parts, Sums]:  # fmt: skip
    """Attend to the keys up to each query if `ordered`; otherwise to all keys of its sequence."""
    (_, kv_heads, length, width), v_dim = k.plain.shape, v.shape[-1]
    group, sequences, device = q.plain.shape[1] // kv_heads, len(cu_seqlens) - 1, v.device
    plan = Plan.of(k.plain, cu_seqlens, chunk)
    count, begins, starts = plan.number, cast(Tensor, plan.begins), cast(Tensor, plan.starts)
    bounds, owner = begins[: 2 * count].view(count, 2), begins[2 * count : 3 * count]
    slots = bounds[:, :1] + arange(chunk, device=device)
    # Padding of chunks reads a row of zeros after the last token.
    slots = torch.where(slots < bounds[:, 1:], slots, length)

    def cut(x: Tensor, index: Tensor) -> Tensor:
        return functional.pad(x, (0, 0, 0, 1))[:, :, index.flatten()].unflatten(2, tuple(index.shape))

    keys, values = Features(*(cut(x, slots) for x in k)), cut(v, slots)
    local = _local(weighting, kv_heads, slots, length)
    sums = chunk_sums_of(keys, values, new_zeros(v, 1, 1, 1, 1, chunk) if local is None else local)
    heads = sums.below.shape[3]
    # [kv_heads, group or 1, chunks, ...]
    each = [x[0].transpose(1, 2).flatten(3) for x in sums]
    first = [
        new_zeros(v, kv_heads, heads, sequences, x.shape[-1])
        if before is None
        else before[i].unflatten(1, (kv_heads, heads)).flatten(3).permute(1, 2, 0, 3)
        for i, x in enumerate(each)
    ]
    # Logarithm of the decay before each chunk, and after the last: [kv_heads, group or 1, chunks + 1].
    ends = new_zeros(v, 1, 1, count) if local is None else local[0, ..., -1].transpose(1, 2)
    passed = torch.cat([new_zeros(ends, *ends.shape[:2], 1), ends.cumsum(dim=-1)], dim=-1)
    number, sequence = arange(count, device=device), arange(sequences, device=device)

    def decayed(later: Tensor, earlier: Tensor, reads: Tensor | None = None) -> Tensor:
        """Return the decay between two numbers of chunks, and 0 where `reads` is False."""
        between = (passed[..., later] - passed[..., earlier]).to(v.dtype)
        return torch.exp(between if reads is None else between.masked_fill(~reads, -torch.inf))

    members = decayed(starts[1:, None], number[None] + 1, owner == sequence[:, None])
    kept = decayed(starts[1:], starts[:-1])
    after = [kept.unsqueeze(-1) * x + members @ part for x, part in zip(first, each, strict=True)]
    shapes = (width, v_dim), (width,)
    total = (x.permute(2, 0, 1, 3).flatten(1, 2).unflatten(-1, shape) for x, shape in zip(after, shapes, strict=True))
    if not q.plain.shape[2]:
        # Computed from the queries, so that it has a graph if they need gradients.
        none = q.rotated.sum(-1, keepdim=True).expand(*q.plain.shape[:3], v_dim)
        return Parts(none, q.plain.sum(-1) if weighting.normalize else None), Sums(*total)
    queries = Features(*(cut(x, slots).unflatten(1, (kv_heads, group)).transpose(2, 3) for x in q))
    weights, near = None, 0
    if not ordered:
        earlier = [x[:, :, owner] for x in after]
    else:
        near = 0 if weighting.band is None else lead_of(weighting.band, chunk)
        reads = (owner[:, None] == owner) & (number[:, None] > number + near // chunk)
        back = decayed(number[:, None], number[None] + 1, reads)
        old = decayed(number, starts[owner])
        earlier = [old.unsqueeze(-1) * x[:, :, owner] + back @ part for x, part in zip(first, each, strict=True)]
    far_sums = Sums(*(x.transpose(1, 2)[None] for x in (earlier[0].unflatten(-1, (width, v_dim)), earlier[1])))
    factors = None if local is None else torch.exp(local).to(v.dtype)
    if weighting.band is not None:
        # Unused chunks can begin after the last token.
        begin, stop = cu_seqlens[owner][:, None], bounds[:, 1:].clamp_max(length)
        near_slots = bounds[:, :1] + arange(-near, chunk, device=device)
        near_slots = torch.where((near_slots >= begin) & (near_slots < stop), near_slots, length)
        keys, values = Features(*(cut(x, near_slots) for x in k)), cut(v, near_slots)
        ids = arange(length, device=device)[None] if weighting.positions is None else weighting.positions
        ids = functional.pad(ids, (0, 1))
        weights = band_weights(weighting.band, ids[:, slots], ids[:, near_slots], near, kv_heads, strict=strict).to(
            v.dtype
        )
        factors = torch.exp(weighting.band[:, 0]).to(v.dtype).view(1, kv_heads, 1, group, 1)
    elif local is not None:
        weights = decay_weights(local, v.dtype, strict=strict)
    elif not ordered:
        weights = new_zeros(v, 1, 1, 1, 1, chunk, chunk)
    parts = read_chunks(queries, keys, values, weights, Far(far_sums, factors), normalize=weighting.normalize)

    def spread(x: Tensor) -> Tensor:
        """Return tokens in their order from chunks [1, kv_heads, chunks, group, size, width]."""
        rows = x[0].transpose(1, 2).flatten(0, 1).flatten(1, 2)
        return new_zeros(v, kv_heads * group, length + 1, x.shape[-1]).index_copy(1, slots.flatten(), rows)[
            None, :, :length
        ]

    above, below = spread(parts.above), None if parts.below is None else spread(parts.below.unsqueeze(-1)).squeeze(-1)
    return Parts(above, below), Sums(*total)


def _local(weighting: Weighting, kv_heads: int, slots: Tensor, length: int) -> Tensor | None:
    """Return `running` of the decay of each chunk; padding does not decay."""
    if weighting.decay is None:
        return None
    decay = grouped_decay(weighting, kv_heads)
    decay = functional.pad(decay.expand(*decay.shape[:3], length), (0, 1))
    return running(decay[..., slots.flatten()], *slots.shape)
