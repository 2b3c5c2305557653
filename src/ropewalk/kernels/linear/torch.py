"""Linear attention in chunks of tokens, by matrix products: for any device and any derivative."""

import itertools
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from ropewalk.kernels.constructors import arange, new_zeros, zeros_like
from ropewalk.kernels.linear.feature_maps import map_features, row_shift
from ropewalk.kernels.linear.segments import Plan
from ropewalk.kernels.precision import working_dtype
from ropewalk.kernels.rotate.torch import rotate_traceable
from ropewalk.kernels.torch_internals import is_plain, is_transformed
from ropewalk.kernels.types import Features, Layout, Side, Sums, Tables

__all__ = ["CHUNK", "attend", "attend_packed", "divide", "linear_attention"]

# Tokens per chunk, within which scores are computed. Larger chunks have more scores; smaller ones have matrices that
# are too small for a BLAS without batched products.
CHUNK = 128

# Rotates features: (features, tables, layout) -> rotated features.
Rotate = Callable[[Tensor, Tables, Layout], Tensor]


def _by_formula(x: Tensor, tables: Tables, layout: Layout) -> Tensor:
    return rotate_traceable(x, *tables[:2], layout, tables.row)


def linear_attention(
    q: Side,
    k: Side,
    v: Tensor,
    before: Sums | None,
    layout: Layout,
    causal: bool,
    cu_seqlens: Tensor | None = None,
    rotate: Rotate = _by_formula,
) -> tuple[Tensor, Sums]:
    """Return the output of linear attention, and the sums after the last key.

    Everything is computed in float32 (float64 for float64) and rounded once. Packed sequences are computed one after
    the other if the host can read their ends, and otherwise by `attend_packed`.

    Args:
        q: Queries, their feature map and tables.
        k: Keys, their feature map and tables.
        v: Values [batch, kv_heads, seq, v_dim].
        before: Sums over earlier keys, or None.
        layout: Layout of the rotation.
        causal: Whether a query reads only keys up to its own index.
        cu_seqlens: Ends of packed sequences [sequences + 1], starting with 0.
        rotate: Function that rotates features.

    Returns:
        The output [batch, heads, seq, v_dim] in the dtype of v, and the sums, with one row per packed sequence.

    >>> x, v = torch.zeros(1, 1, 2, 2), torch.tensor([[[[1.0], [3.0]]]])
    >>> linear_attention(Side(x, "elu"), Side(x, "elu"), v, None, Layout(True, 0, -2), False)[0].flatten().tolist()
    [2.0, 2.0]
    """
    # There is no autocast for meta tensors.
    with torch.autocast("cpu" if v.is_meta else v.device.type, enabled=False):
        working, ends, total = working_dtype(v), None, q.x.shape[2]
        # Excluded, because features of padding after the last sequence may have no finite derivative.
        if cu_seqlens is not None and is_plain(cu_seqlens) and cu_seqlens.device.type == "cpu":
            ends = cu_seqlens.tolist()
            if ends[-1] < total:
                q, k = (side._replace(x=side.x[:, :, : ends[-1]]) for side in (q, k))
        elif cu_seqlens is not None:
            padding = (arange(total, device=v.device) >= cu_seqlens[-1])[:, None]
            q, k = (side._replace(x=side.x.masked_fill(padding, 0.0)) for side in (q, k))
        queries, keys = _features(q, layout, working, "q", rotate), _features(k, layout, working, "k", rotate)
        values = v.to(working)
        if cu_seqlens is None:
            out, after = attend(queries, keys, values, before, causal=causal)
        elif ends is not None:
            out, after = _attend_each(queries, keys, values, before, ends, total, causal=causal)
        else:
            out, after = attend_packed(queries, keys, values, before, cu_seqlens, causal=causal)
        return out.to(v.dtype), after


def _features(side: Side, layout: Layout, working: torch.dtype, role: str, rotate: Rotate) -> Features:
    x = side.x.to(working)
    plain = map_features(x, side.map, row_shift(x, side.map) if role == "q" else None)
    return Features(plain, plain if side.tables is None else rotate(plain, side.tables, layout))


def _attend_each(
    q: Features, k: Features, values: Tensor, before: Sums | None, ends: list[int], total: int, *, causal: bool
) -> tuple[Tensor, Sums]:
    """Compute packed sequences one after the other. NaN in one sequence cannot reach another. `total`: all tokens."""
    outputs: list[Tensor] = []
    sums: list[Sums] = []
    for sequence, (start, stop) in enumerate(itertools.pairwise(ends)):
        queries, keys = (Features(*(x[:, :, start:stop] for x in side)) for side in (q, k))
        earlier = None if before is None else Sums(*(x[sequence : sequence + 1] for x in before))
        out, after = attend(queries, keys, values[:, :, start:stop], earlier, causal=causal)
        outputs.append(out)
        sums.append(after)
    batch, heads = q.plain.shape[:2]
    outputs.append(new_zeros(values, batch, heads, total - ends[-1], values.shape[-1]))
    return torch.cat(outputs, dim=2), Sums(*(torch.cat(parts) for parts in zip(*sums, strict=True)))


def attend(
    q: Features, k: Features, v: Tensor, before: Sums | None, *, causal: bool, chunk: int = CHUNK
) -> tuple[Tensor, Sums]:
    """Return o_i = sum_j (R q_i . R k_j) v_j / sum_j q_i . k_j over the visible keys, and the sums over all keys.

    RoFormer, 2104.09864, eq. 19.

    Args:
        q: Features of queries [batch, heads, q_seq, width].
        k: Features of keys [batch, kv_heads, seq, width]. heads is a multiple of kv_heads.
        v: Values [batch, kv_heads, seq, v_dim]. q, k and v have one dtype, in which everything is computed.
        before: Sums over earlier keys, or None.
        causal: Whether query i reads only keys up to i. It requires as many queries as keys.
        chunk: Tokens per chunk. It changes only the order of summation.

    >>> ones = Features(torch.ones(1, 1, 2, 2), torch.ones(1, 1, 2, 2))
    >>> out, after = attend(ones, ones, torch.tensor([[[[1.0], [3.0]]]]), None, causal=True)
    >>> out.flatten().tolist(), after.below.flatten().tolist()
    ([1.0, 2.0], [2.0, 2.0])
    """
    batch, kv_heads, keys, width = k.plain.shape
    before = before if before is not None else _zero_sums(k.plain, v)
    group, queries = q.plain.shape[1] // kv_heads, q.plain.shape[2]
    if not causal or keys <= 1:
        after = Sums(before.above + k.rotated.transpose(-1, -2) @ v, before.below + k.plain.sum(dim=-2))
        grouped = Features(*(x.unflatten(1, (kv_heads, group)).flatten(2, 3) for x in q))
        numerator = grouped.rotated @ after.above
        denominator = grouped.plain @ after.below.unsqueeze(-1)
        out = divide(numerator, denominator)
        return out.unflatten(2, (group, queries)).flatten(1, 2), after
    size = chunk if keys >= chunk else keys
    count = (keys + size - 1) // size
    missing = count * size - keys
    padded = [*q, *k, v]
    if torch.compiler.is_compiling() or missing:
        # Padding keys of zeros add nothing, and the outputs of padding queries are cut off. A compiled graph always
        # pads, because it is for every length. Not by `pad`, whose strides differ if there is nothing to pad.
        padded = [torch.cat([x, new_zeros(x, *x.shape[:2], missing, x.shape[-1])], dim=2) for x in padded]
    q_plain, q_rotated = (
        x.view(batch, kv_heads, group, count, size, width).transpose(2, 3).flatten(3, 4) for x in padded[:2]
    )
    k_plain, k_rotated, v = (x.unflatten(2, (count, size)) for x in padded[2:])
    # Contiguous, because on ARM a product with a transposed view costs more than its arithmetic.
    k_columns = k_rotated.transpose(-1, -2).contiguous()
    chunk_sums = Sums(k_columns @ v, k_plain.sum(dim=-2))
    running = Sums(
        *(torch.cat([x.unsqueeze(2), each], dim=2).cumsum(dim=2) for x, each in zip(before, chunk_sums, strict=True))
    )
    earlier, after = Sums(*(x[:, :, :-1] for x in running)), Sums(*(x[:, :, -1] for x in running))
    scores = _lower_triangle((q_rotated @ k_columns).unflatten(-2, (group, size))).flatten(-3, -2)
    numerator = q_rotated @ earlier.above + scores @ v
    seen = (k_plain.cumsum(dim=-2) + earlier.below.unsqueeze(-2)).unsqueeze(3)
    denominator = (q_plain.unflatten(3, (group, size)) * seen).sum(dim=-1).flatten(3, 4).unsqueeze(-1)
    out = divide(numerator, denominator).unflatten(3, (group, size)).transpose(2, 3)
    return out.reshape(batch, kv_heads * group, count * size, v.shape[-1])[:, :, :keys], after


def divide(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Return the quotient, and 0 with zero gradients if the denominator is 0: all features of visible keys are 0.

    >>> divide(torch.tensor([6.0, 0.0]), torch.tensor([2.0, 0.0])).tolist()
    [3.0, 0.0]
    """
    return numerator / torch.where(denominator == 0, torch.inf, denominator)


def _lower_triangle(fresh: Tensor) -> Tensor:
    """Return the lower triangle, in place except under vmap: ten times as fast on a CPU."""
    if torch.compiler.is_compiling() or is_transformed():
        return fresh.tril()
    return fresh.tril_()


def _zero_sums(k: Tensor, v: Tensor) -> Sums:
    batch, kv_heads, _, width = k.shape
    return Sums(new_zeros(v, batch, kv_heads, width, v.shape[-1]), new_zeros(v, batch, kv_heads, width))


def attend_packed(
    q: Features, k: Features, v: Tensor, before: Sums | None, cu_seqlens: Tensor, *, causal: bool, chunk: int = CHUNK
) -> tuple[Tensor, Sums]:
    """Return `attend` of each packed sequence, and their sums [sequences, ...].

    It is for compilers, and for calls that must not block the host. Tokens are copied into chunks that contain one
    sequence each. A matrix of zeros and ones specifies which chunks a chunk reads. Therefore the cost grows with the
    square of the number of chunks, and a NaN can reach other sequences. In eager mode, if the host can read the ends,
    sequences are computed one after the other instead.

    Arguments are those of `attend`, and `cu_seqlens` [sequences + 1].

    >>> ones = Features(torch.ones(1, 1, 3, 2), torch.ones(1, 1, 3, 2))
    >>> v, ends = torch.tensor([[[[1.0], [3.0], [7.0]]]]), torch.tensor([0, 2, 3])
    >>> attend_packed(ones, ones, v, None, ends, causal=True)[0].flatten().tolist()
    [1.0, 2.0, 7.0]
    """
    (_, kv_heads, length, width), v_dim = k.plain.shape, v.shape[-1]
    group, sequences = q.plain.shape[1] // kv_heads, len(cu_seqlens) - 1
    plan = Plan.of(k.plain, cu_seqlens, chunk)
    count, begins = plan.number, cast(Tensor, plan.begins)
    bounds, owner = begins[: 2 * count].view(count, 2), begins[2 * count :]
    slots = bounds[:, :1] + arange(chunk, device=v.device)
    # Padding of chunks reads a row of zeros after the last token.
    slots = torch.where(slots < bounds[:, 1:], slots, length).flatten()

    def cut(x: Tensor) -> Tensor:
        return functional.pad(x, (0, 0, 0, 1))[0, :, slots].unflatten(1, (count, chunk))

    k_plain, k_rotated, values = cut(k.plain), cut(k.rotated), cut(v)
    q_plain, q_rotated = (cut(x).unflatten(0, (kv_heads, group)).transpose(1, 2).flatten(2, 3) for x in q)
    chunk_sums = (k_rotated.transpose(-1, -2) @ values).flatten(2), k_plain.sum(dim=-2)
    start = [new_zeros(v, sequences, *shape) for shape in ((kv_heads, width, v_dim), (kv_heads, width))]
    first = [x.flatten(2).transpose(0, 1) for x in (start if before is None else before)]
    members = (owner == arange(sequences, device=v.device)[:, None]).to(v.dtype)
    after = [x + members @ part for x, part in zip(first, chunk_sums, strict=True)]
    if causal:
        number = arange(count, device=v.device)
        reads = ((owner[:, None] == owner) & (number[:, None] > number)).to(v.dtype)
        earlier = [x[:, owner] + reads @ part for x, part in zip(first, chunk_sums, strict=True)]
        scores = (q_rotated @ k_rotated.transpose(-1, -2)).unflatten(-2, (group, chunk)).tril().flatten(-3, -2)
        near, seen = scores @ values, k_plain.cumsum(dim=-2)
    else:
        earlier, near, seen = [x[:, owner] for x in after], 0.0, zeros_like(k_plain)
    numerator = q_rotated @ earlier[0].unflatten(-1, (width, v_dim)) + near
    below = (seen + earlier[1].unsqueeze(-2)).unsqueeze(2)
    denominator = (q_plain.unflatten(2, (group, chunk)) * below).sum(dim=-1).flatten(2, 3).unsqueeze(-1)
    out = divide(numerator, denominator).unflatten(2, (group, chunk)).transpose(1, 2).flatten(0, 1).flatten(1, 2)
    padded_out = new_zeros(v, kv_heads * group, length + 1, v_dim).index_copy(1, slots, out)
    shapes = (width, v_dim), (width,)
    sums = Sums(*(x.transpose(0, 1).unflatten(-1, shape) for x, shape in zip(after, shapes, strict=True)))
    return padded_out[None, :, :length], sums
