"""The sums of linear attention in chunks of tokens: scores near a query, and sums over the keys before.

Tensors of chunks are [batch, kv_heads, chunks, group, size, ...]: `group` query heads share a key head. Sums are the
same for all heads of a group, unless each query head has its own decay.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ropewalk.kernels.constructors import arange, new_zeros
from ropewalk.kernels.linear.weights import band_weights, decay_weights, grouped_decay, lead_of, running
from ropewalk.kernels.torch_internals import is_transformed
from ropewalk.kernels.types import Features, Sums, Weighting

__all__ = [
    "CHUNK",
    "Far",
    "Parts",
    "attend_parts",
    "between_chunks",
    "chunk_sums_of",
    "join_parts",
    "near_chunks",
    "read_chunks",
    "sum_keys",
    "zero_sums",
]

# Tokens per chunk, within which scores are computed. Larger chunks have more scores; smaller ones have matrices that
# are too small for a BLAS without batched products.
CHUNK = 128


class Parts(NamedTuple):
    """Numerator and denominator of linear attention, before the division.

    Args:
        above: Numerator [..., v_dim].
        below: Denominator [...], or None if there is none.

    >>> Parts(torch.ones(2, 3), torch.ones(2)).below.shape
    torch.Size([2])
    """

    above: Tensor
    below: Tensor | None


def join_parts(parts: list[Parts]) -> Parts:
    """Join the parts of consecutive tokens [batch, heads, seq, ...].

    >>> join_parts([Parts(torch.ones(1, 1, 2, 3), None)] * 2).above.shape
    torch.Size([1, 1, 4, 3])
    """
    above, below = zip(*parts, strict=True)
    return Parts(torch.cat(above, dim=2), None if below[0] is None else torch.cat(below, dim=2))


class Far(NamedTuple):
    """Sums over keys that are not near the queries of a chunk.

    Args:
        sums: Sums [batch, kv_heads, chunks, group or 1, width, ...].
        factors: Factors of queries [batch or 1, kv_heads, chunks or 1, group or 1, size], or None.

    >>> Far(Sums(torch.ones(1, 1, 1, 1, 4, 2), torch.ones(1, 1, 1, 1, 4)), None).sums.below.shape
    torch.Size([1, 1, 1, 1, 4])
    """

    sums: Sums
    factors: Tensor | None


def zero_sums(k: Tensor, v: Tensor, heads: int) -> Sums:
    """Return sums over no keys, for keys [batch, kv_heads, seq, width].

    >>> zero_sums(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 5), 2).above.shape
    torch.Size([1, 2, 4, 5])
    """
    batch, _, _, width = k.shape
    return Sums(new_zeros(v, batch, heads, width, v.shape[-1]), new_zeros(v, batch, heads, width))


def sum_keys(k: Features, v: Tensor, before: Sums | None, weighting: Weighting) -> Sums:
    """Return the sums over all keys. `weighting` specifies the decay. A band does not change sums.

    Args:
        k: Features of keys [batch, kv_heads, seq, width].
        v: Values [batch, kv_heads, seq, v_dim].
        before: Sums over earlier keys, or None.
        weighting: The decay.

    >>> ones = Features(torch.ones(1, 1, 2, 1), torch.ones(1, 1, 2, 1))
    >>> sum_keys(ones, torch.tensor([[[[1.0], [3.0]]]]), None, Weighting()).above.item()
    4.0
    """
    _, kv_heads, keys, width = k.plain.shape
    if weighting.decay is None:
        sums = Sums(k.rotated.transpose(-1, -2) @ v, k.plain.sum(dim=-2))
        return sums if before is None else Sums(before.above + sums.above, before.below + sums.below)
    decay = grouped_decay(weighting, kv_heads)
    local = running(decay, 1, keys)[:, :, 0]
    end = local[..., -1:] if keys else new_zeros(local, *local.shape[:-1], 1)
    factors = torch.exp(end - local).to(v.dtype).unsqueeze(-1)
    columns = (k.rotated.unsqueeze(2) * factors).transpose(-1, -2).flatten(2, 3)
    sums = Sums((columns @ v).unflatten(2, (-1, width)), (k.plain.unsqueeze(2) * factors).sum(dim=-2))
    sums = Sums(*(x.flatten(1, 2) for x in sums))
    if before is None:
        return sums
    kept = torch.exp(end).to(v.dtype).flatten(1, 2)
    return Sums(before.above * kept.unsqueeze(-1) + sums.above, before.below * kept + sums.below)


def attend_parts(
    q: Features,
    k: Features,
    v: Tensor,
    before: Sums | None,
    weighting: Weighting,
    *,
    strict: bool = False,
    chunk: int = CHUNK,
) -> tuple[Parts, Sums]:
    """Return numerator and denominator of causal linear attention, and the sums from which the next tokens continue.

    Args:
        q: Features of queries [batch, heads, q_seq, width].
        k: Features of keys [batch, kv_heads, seq, width]. heads is a multiple of kv_heads.
        v: Values [batch, kv_heads, seq, v_dim]. q, k and v have one dtype, in which everything is computed.
        before: Sums over earlier keys, or None. With a band, they must be farther from all queries than its window.
        weighting: Factors of the terms. With a band the queries are the last keys, otherwise there are as many.
        strict: Whether a query does not read its own key.
        chunk: Tokens per chunk. It changes only the order of summation.

    Returns:
        Parts [batch, heads, q_seq, ...], and the sums: over all keys, or with a band over all keys except the last
        `lead_of(band, chunk)`, if the number of queries is a multiple of `chunk`.

    >>> ones = Features(torch.ones(1, 1, 2, 1), torch.ones(1, 1, 2, 1))
    >>> parts, _ = attend_parts(ones, ones, torch.tensor([[[[1.0], [3.0]]]]), None, Weighting())
    >>> parts.above.flatten().tolist(), parts.below.flatten().tolist()
    ([1.0, 4.0], [1.0, 2.0])
    """
    batch, kv_heads, _, width = k.plain.shape
    group, queries = q.plain.shape[1] // kv_heads, q.plain.shape[2]
    lead = k.plain.shape[2] - queries
    before = before if before is not None else zero_sums(k.plain, v, weighting.state_heads(kv_heads))
    size = chunk if queries >= chunk else queries
    count = (queries + size - 1) // size
    missing = count * size - queries
    if torch.compiler.is_compiling() or missing:
        # Padding keys of zeros add nothing, and the outputs of padding queries are cut off. A compiled graph always
        # pads, because it is for every length. Not by `pad`, whose strides differ if there is nothing to pad.
        q, k = (Features(*(_padded(x, missing) for x in side)) for side in (q, k))
        v, weighting = _padded(v, missing), _padded_weighting(weighting, queries + lead, missing)
    queries_of_chunks = Features(*(x.view(batch, kv_heads, group, count, size, width).transpose(2, 3) for x in q))
    if weighting.band is not None:
        near = lead_of(weighting.band, chunk) if queries >= chunk else None
        parts, after = _attend_band(queries_of_chunks, k, v, before, weighting, (lead, near), strict)
    else:
        keys = Features(*(x.unflatten(2, (count, size)) for x in k))
        values = v.unflatten(2, (count, size))
        if weighting.decay is None:
            parts, after = _attend_plain(queries_of_chunks, keys, values, before, weighting.normalize)
        else:
            parts, after = _attend_decayed(queries_of_chunks, keys, values, before, weighting, strict)
    above, below = parts
    above = above.transpose(2, 3).reshape(batch, kv_heads * group, count * size, v.shape[-1])[:, :, :queries]
    if below is not None:
        below = below.transpose(2, 3).reshape(batch, kv_heads * group, count * size)[:, :, :queries]
    return Parts(above, below), after


def _padded(x: Tensor, missing: int) -> Tensor:
    return torch.cat([x, new_zeros(x, *x.shape[:2], missing, x.shape[-1])], dim=2)


def _padded_weighting(weighting: Weighting, keys: int, missing: int) -> Weighting:
    """Return the weighting with padding that does not decay, so that it does not change the sums after the last key."""
    decay, ids = weighting.decay, weighting.positions
    if decay is not None:
        decay = decay.expand(*decay.shape[:2], keys)
        decay = torch.cat([decay, new_zeros(decay, *decay.shape[:2], missing)], dim=-1)
    if ids is not None:
        ids = torch.cat([ids, new_zeros(ids, len(ids), missing)], dim=-1)
    return weighting._replace(decay=decay, positions=ids)


def _attend_plain(q: Features, k: Features, v: Tensor, before: Sums, normalize: bool) -> tuple[Parts, Sums]:
    chunk_sums = Sums(_columns(k.rotated) @ v, k.plain.sum(dim=-2))
    running_sums = Sums(
        *(torch.cat([x.unsqueeze(2), each], dim=2).cumsum(dim=2) for x, each in zip(before, chunk_sums, strict=True))
    )
    earlier, after = (Sums(*(x[:, :, part] for x in running_sums)) for part in (slice(-1), -1))
    far = Far(Sums(*(x.unsqueeze(3) for x in earlier)), None)
    return read_chunks(q, k, v, None, far, normalize=normalize), after


def _attend_decayed(
    q: Features, k: Features, v: Tensor, before: Sums, weighting: Weighting, strict: bool
) -> tuple[Parts, Sums]:
    (_, kv_heads, count, size, width), v_dim = k.plain.shape, v.shape[-1]
    local = running(grouped_decay(weighting, kv_heads), count, size)
    chunk_sums = chunk_sums_of(k, v, local)
    # Logarithm of the decay before each chunk, and after the last: [batch or 1, kv_heads, group or 1, count + 1].
    ends = local[..., -1].transpose(2, 3).expand(-1, -1, -1, count)
    starts = torch.cat([new_zeros(ends, *ends.shape[:3], 1), ends.cumsum(dim=-1)], dim=-1)
    reads = between_chunks(starts, count).to(v.dtype)
    kept = torch.exp(starts).to(v.dtype)
    totals = Sums(
        *(
            reads @ each.transpose(2, 3).flatten(4)
            + kept.unsqueeze(-1) * first.unflatten(1, (kv_heads, -1)).flatten(3).unsqueeze(3)
            for each, first in zip(chunk_sums, before, strict=True)
        )
    )
    totals = Sums(totals.above.unflatten(-1, (width, v_dim)), totals.below)
    earlier = Sums(*(x[:, :, :, :-1].transpose(2, 3) for x in totals))
    after = Sums(*(x[:, :, :, -1].flatten(1, 2) for x in totals))
    far = Far(earlier, torch.exp(local).to(v.dtype))
    weights = decay_weights(local, v.dtype, strict=strict)
    return read_chunks(q, k, v, weights, far, normalize=weighting.normalize), after


def chunk_sums_of(k: Features, v: Tensor, local: Tensor) -> Sums:
    """Return the sums over each chunk, decayed to its end: [batch, kv_heads, chunks, group or 1, width, ...].

    Args:
        k: Features of keys [batch, kv_heads, chunks, size, width].
        v: Values [batch, kv_heads, chunks, size, v_dim].
        local: Logarithm of the decay from the start of a chunk, as `running` returns it.

    >>> ones, local = torch.ones(1, 1, 1, 2, 1), torch.tensor([0.5, 0.5]).log().cumsum(0).view(1, 1, 1, 1, 2)
    >>> chunk_sums_of(Features(ones, ones), ones, local).above.item()  # 1/2 + 1
    1.5
    """
    factors = torch.exp(local[..., -1:] - local).to(v.dtype).unsqueeze(-1)
    columns = (k.rotated.unsqueeze(3) * factors).transpose(-1, -2).flatten(3, 4)
    above = (columns @ v).unflatten(3, (-1, k.plain.shape[-1]))
    return Sums(above, (k.plain.unsqueeze(3) * factors).sum(dim=-2))


def between_chunks(starts: Tensor, count: int) -> Tensor:
    """Return the decay from the end of each chunk to the start of each later one: [..., count + 1, count].

    Args:
        starts: Logarithm of the decay before each chunk, and after the last [..., count + 1].
        count: Number of chunks.

    >>> between_chunks(torch.tensor([0.0, -1.0, -3.0]), 2).log().tolist()
    [[-inf, -inf], [0.0, -inf], [-2.0, 0.0]]
    """
    number = arange(count + 1, device=starts.device)
    hidden = number[:, None] <= number[:-1]
    return torch.exp((starts.unsqueeze(-1) - starts[..., 1:].unsqueeze(-2)).masked_fill(hidden, -torch.inf))


def _attend_band(
    q: Features, k: Features, v: Tensor, before: Sums, weighting: Weighting, leads: tuple[int, int | None], strict: bool
) -> tuple[Parts, Sums]:
    """Attend by a band. `leads` are the numbers of keys before a chunk: before the first one, and near any of them.

    Less than a chunk of queries reads all keys. The number of near keys is None then.
    """
    lead, near = leads[0], leads[0] if leads[1] is None else leads[1]
    band, ids = weighting.band, weighting.positions
    if band is None:
        raise TypeError("there is no band")
    (_, kv_heads, _, width), (count, _, size) = k.plain.shape, q.plain.shape[2:5]
    if lead > near:
        early = Features(*(x[:, :, : lead - near] for x in k))
        before = sum_keys(early, v[:, :, : lead - near], before, Weighting())
        k, v = Features(*(x[:, :, lead - near :] for x in k)), v[:, :, lead - near :]
        ids = None if ids is None else ids[..., lead - near :]
    elif lead < near:
        front = near - lead
        k = Features(*(torch.cat([new_zeros(x, *x.shape[:2], front, width), x], dim=2) for x in k))
        v = torch.cat([new_zeros(v, *v.shape[:2], front, v.shape[-1]), v], dim=2)
        ids = None if ids is None else torch.cat([new_zeros(ids, len(ids), front), ids], dim=-1)

    def near_queries(x: Tensor) -> Tensor:
        return x.unsqueeze(2) if leads[1] is None else near_chunks(x, count, size, near)

    k_near, v_near = Features(*(near_queries(x) for x in k)), near_queries(v)
    if ids is None:
        k_ids = arange(near + size, device=v.device)[None, None]
        q_ids = k_ids[..., near:]
    else:
        k_ids = near_queries(ids[:, None, :, None])[:, 0, ..., 0]
        q_ids = k_ids[..., near:]
    weights = band_weights(band, q_ids, k_ids, near, kv_heads, strict=strict).to(v.dtype)
    farthest = torch.exp(band[:, 0]).to(v.dtype).view(1, kv_heads, 1, -1, 1)
    if leads[1] is None:
        far = Far(Sums(*(x[:, :, None, None] for x in before)), farthest)
        return read_chunks(q, k_near, v_near, weights, far, normalize=weighting.normalize), before
    # A chunk reads the sums over all keys except those near it.
    far_k = Features(*(x[:, :, : count * size].unflatten(2, (count, size)) for x in k))
    sums = Sums(_columns(far_k.rotated) @ v[:, :, : count * size].unflatten(2, (count, size)), far_k.plain.sum(dim=-2))
    totals = [torch.cat([x.unsqueeze(2), each], dim=2).cumsum(dim=2) for x, each in zip(before, sums, strict=True)]
    earlier = Sums(*(x[:, :, :-1].unsqueeze(3) for x in totals))
    after = Sums(*(x[:, :, -1] for x in totals))
    return read_chunks(q, k_near, v_near, weights, Far(earlier, farthest), normalize=weighting.normalize), after


def near_chunks(x: Tensor, count: int, size: int, near: int) -> Tensor:
    """Return the tokens of each chunk and the `near` tokens before it: [batch, heads, count, near + size, width].

    >>> near_chunks(torch.arange(6.0).view(1, 1, 6, 1), 2, 2, 2).flatten(0, 2).flatten(1).tolist()
    [[0.0, 1.0, 2.0, 3.0], [2.0, 3.0, 4.0, 5.0]]
    """
    parts = [x[:, :, start : start + count * size].unflatten(2, (count, size)) for start in range(0, near, size)]
    return torch.cat([*parts, x[:, :, near:].unflatten(2, (count, size))], dim=3)


def read_chunks(q: Features, k: Features, v: Tensor, weights: Tensor | None, far: Far, *, normalize: bool) -> Parts:
    """Return the parts of each chunk of queries: of keys near them by scores, and of far keys by their sums.

    Args:
        q: Features of queries [batch, kv_heads, chunks, group, size, width].
        k: Features of near keys [batch, kv_heads, chunks, near, width].
        v: Values of near keys [batch, kv_heads, chunks, near, v_dim].
        weights: Factors [batch or 1, kv_heads, chunks or 1, group or 1, size, near]; None is the lower triangle.
        far: Sums over the keys before the near ones, with factors of queries [batch or 1, kv_heads, chunks or 1,
            group or 1, size].
        normalize: Whether the denominator is needed.

    Returns:
        Parts [batch, kv_heads, chunks, group, size, ...].

    >>> q, k = (Features(x, x) for x in (torch.ones(1, 1, 1, 1, 2, 1), torch.ones(1, 1, 1, 2, 1)))
    >>> far = Far(Sums(torch.zeros(1, 1, 1, 1, 1, 1), torch.full((1, 1, 1, 1, 1), 5.0)), None)
    >>> read_chunks(q, k, torch.ones(1, 1, 1, 2, 1), None, far, normalize=True).below.flatten().tolist()
    [6.0, 7.0]
    """
    group, size = q.plain.shape[3:5]

    def scores_of(queries: Tensor, keys: Tensor) -> Tensor:
        scores = (queries.flatten(3, 4) @ _columns(keys)).unflatten(3, (group, size))
        if weights is None:
            return _lower_triangle(scores)
        # In place, except where that is not supported: the largest tensor of all.
        return scores * weights if torch.compiler.is_compiling() or is_transformed() else scores.mul_(weights)

    scores = scores_of(q.rotated, k.rotated)
    above = (scores.flatten(3, 4) @ v).unflatten(3, (group, size))
    above = above + _scaled(_product(q.rotated, far.sums.above), far.factors)
    if not normalize:
        return Parts(above, None)
    if weights is None:
        seen = k.plain.cumsum(dim=-2).unsqueeze(3) + far.sums.below.unsqueeze(-2)
        return Parts(above, (q.plain * seen).sum(dim=-1))
    near = scores if q.rotated is q.plain and k.rotated is k.plain else scores_of(q.plain, k.plain)
    below = _scaled(_product(q.plain, far.sums.below.unsqueeze(-1)), far.factors)
    return Parts(above, near.sum(dim=-1) + below.squeeze(-1))


def _product(q: Tensor, sums: Tensor) -> Tensor:
    """Multiply queries [..., group, size, width] by sums [..., group or 1, width, columns]."""
    if sums.shape[3] == q.shape[3]:
        return q @ sums
    return (q.flatten(3, 4) @ sums.squeeze(3)).unflatten(3, q.shape[3:5])


def _scaled(x: Tensor, factors: Tensor | None) -> Tensor:
    return x if factors is None else x * factors.unsqueeze(-1)


def _columns(x: Tensor) -> Tensor:
    # Contiguous, because on ARM a product with a transposed view costs more than its arithmetic.
    return x.transpose(-1, -2).contiguous()


def _lower_triangle(fresh: Tensor) -> Tensor:
    """Return the lower triangle, in place except under vmap: ten times as fast on a CPU."""
    if torch.compiler.is_compiling() or is_transformed():
        return fresh.tril()
    return fresh.tril_()
