"""The rotation on a GPU: one Triton kernel that reads and writes every feature once, at the speed of a copy.

A lane of the kernel processes WIDTH neighbouring features: sixteen bytes, the widest load. It processes one head, or a
few heads that share cos and sin. Lanes are numbered consecutively over blocks of tokens, heads, tokens and parts of a
head, so that no head dimension leaves lanes idle. One launch interleaves programs for q and k so that both reach a
token at the same time, and share its cos and sin in the cache.
"""

# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright: reportPossiblyUnboundVariable=false
# In Triton's language a tl.constexpr is its value, which type checkers do not know.

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ropewalk.kernels.angles.triton import cos_sin_of
from ropewalk.kernels.constructors import empty_like, new_empty_strided
from ropewalk.kernels.signature import signature
from ropewalk.kernels.triton_launch import (
    LAUNCHES,
    Launch,
    Rows,
    alignment,
    heads_are_adjacent,
    is_wide,
    rows_of,
    table_strides,
    tokens_before_next_head,
)
from ropewalk.kernels.types import Layout

__all__ = ["TableShape", "Tile", "plan", "rotate", "table_shape", "tile_of"]


@triton.jit
def rotate_pair(a, b, cos, sin, CONJUGATE: tl.constexpr):
    """Rotate a pair. The explicit fma fixes which products are rounded, so that results do not depend on shapes."""
    if CONJUGATE:
        sin = -sin
    return tl.fma(a, cos, -(b * sin)), tl.fma(a, sin, b * cos)


@triton.jit
def place(index, counts, HEADS: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr, WIDE: tl.constexpr):
    """Return part, batch, token and head of the lanes of program `index`, and which lanes are valid.

    Lanes are numbered over blocks of tokens, and within a block over heads, tokens and parts of a head. `counts` are
    the tokens per sequence, the blocks per sequence and all blocks. TILE is (tokens per block, lanes per program).
    """
    TOKENS: tl.constexpr = TILE[0]
    LANES: tl.constexpr = TILE[1]
    BLOCK_LANES: tl.constexpr = TOKENS * HEADS * PARTS
    counting = tl.int64 if WIDE else tl.int32
    first = tl.cast(index, counting) * LANES
    block = first // BLOCK_LANES
    lane = (first - block * BLOCK_LANES).to(tl.int32) + tl.arange(0, LANES)
    later, lane = lane // BLOCK_LANES, lane % BLOCK_LANES
    part, lane = lane % PARTS, lane // PARTS
    token, head = lane % TOKENS, lane // TOKENS
    batch = block // counts[1]
    inner = (block - batch * counts[1]).to(tl.int32) + later
    s = (inner % counts[1]) * TOKENS + token
    b = batch.to(counting) + (inner // counts[1]).to(counting)
    valid = (block + later < counts[2]) & (s < counts[0])
    return part, b, s.to(counting), head.to(counting), valid


@triton.jit
def feature_offset(number, STEP: tl.constexpr):
    """Return the offset of feature `number`, in elements."""
    if STEP != 1:
        number = number.to(tl.int64) * STEP
    return number


@triton.jit
def unrotated_feature(number, PAIRS: tl.constexpr, REST: tl.constexpr, START: tl.constexpr):
    """Return the index of unrotated feature `number`. REST of them are before and after the rotated features."""
    if START == 0:
        number += 2 * PAIRS
    elif START != REST:
        number = tl.where(number < START, number, number + 2 * PAIRS)
    return number


@triton.jit
def _rotate_lanes(
    x,
    y,
    cos,
    sin,
    amplitude,
    first_rows,
    x_strides,
    y_strides,
    counts,
    index,
    HEADS: tl.constexpr,
    STEPS: tl.constexpr,
    FEATURES: tl.constexpr,
    TILE: tl.constexpr,
    SHARE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    CONJUGATE: tl.constexpr,
    FROM_POSITIONS: tl.constexpr,
    TABLE_WIDTH: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Rotate the lanes of one program. `index` is its number among the programs of this tensor.

    With FROM_POSITIONS, `cos` contains positions and `sin` frequencies. Each lane computes its cos and sin. TABLE_WIDTH
    is the number of columns of cos and sin, of which the first PAIRS are read.
    """
    PAIRS: tl.constexpr = FEATURES[0]
    REST: tl.constexpr = FEATURES[1]
    START: tl.constexpr = FEATURES[2]
    WIDTH: tl.constexpr = FEATURES[3]
    ALIGN: tl.constexpr = FEATURES[4]
    LANES: tl.constexpr = TILE[1]
    V: tl.constexpr = WIDTH // 2 if INTERLEAVED else WIDTH
    ROTATED_PARTS: tl.constexpr = PAIRS // V
    PARTS: tl.constexpr = ROTATED_PARTS + (REST + 2 * V - 1) // (2 * V)
    GROUPS: tl.constexpr = (HEADS + SHARE - 1) // SHARE
    part, b, s, group, valid = place(index, counts, GROUPS, PARTS, TILE, WIDE)
    head = group[:, None] * SHARE + tl.arange(0, SHARE)[None, :]

    pair = tl.arange(0, V)
    row = first_rows[0] + b * first_rows[1] + group * first_rows[2] + s
    is_rotated = part < ROTATED_PARTS
    known = (valid & is_rotated)[:, None, None]
    if FROM_POSITIONS:
        position = tl.load(cos + row, mask=valid, other=0).to(tl.float64)[:, None, None]
        frequency = tl.load(sin + (part * V)[:, None, None] + pair[None, None, :], mask=known, other=0.0)
        c, d = cos_sin_of(position * frequency, tl.float32)
        scale = tl.load(amplitude)
        c, d = (c * scale).to(tl.float32), (d * scale).to(tl.float32)
    else:
        at_table = (row * TABLE_WIDTH + part * V)[:, None, None] + pair[None, None, :]
        # If heads are not adjacent, each reads cos and sin again: they should stay in the cache.
        c = tl.load(cos + at_table, mask=known, other=1.0, eviction_policy="evict_last")
        d = tl.load(sin + at_table, mask=known, other=0.0, eviction_policy="evict_last")
        if c.dtype == tl.bfloat16 or c.dtype == tl.float16:
            c, d = c.to(tl.float32), d.to(tl.float32)

    source = x + ((b * x_strides[0] + s * x_strides[1])[:, None] + head * x_strides[2]) * ALIGN
    target = y + ((b * y_strides[0] + s * y_strides[1])[:, None] + head * y_strides[2]) * ALIGN
    valid = valid[:, None]
    if HEADS % SHARE:
        valid = valid & (head < HEADS)
    # The lanes after the rotated parts copy the unrotated features, as many per lane.
    rest = (part - ROTATED_PARTS)[:, None, None] * (2 * V)
    is_rotated = is_rotated[:, None, None]
    if INTERLEAVED:
        at = (START + part * WIDTH)[:, None, None]
        mask = valid[:, :, None]
        if REST:
            if REST % WIDTH:
                mask = mask & (is_rotated | (rest + tl.arange(0, WIDTH)[None, None, :] < REST))
            at = tl.where(is_rotated, at, unrotated_feature(rest, PAIRS, REST, START))
        at += tl.arange(0, WIDTH)[None, None, :]
        z = tl.load(source[:, :, None] + feature_offset(at, STEPS[0]), mask=mask)
        first, second = tl.split(tl.reshape(z, (LANES, SHARE, V, 2)))
    else:
        at = (START + part * V)[:, None, None]
        and_at = at + PAIRS
        mask = valid[:, :, None]
        and_mask = mask
        if REST:
            and_mask = mask & (is_rotated | (rest + V < REST))
            at = tl.where(is_rotated, at, unrotated_feature(rest, PAIRS, REST, START))
            and_at = tl.where(is_rotated, and_at, unrotated_feature(rest + V, PAIRS, REST, START))
        at, and_at = at + pair[None, None, :], and_at + pair[None, None, :]
        first = tl.load(source[:, :, None] + feature_offset(at, STEPS[0]), mask=mask)
        second = tl.load(source[:, :, None] + feature_offset(and_at, STEPS[0]), mask=and_mask)
    kind = first.dtype
    first, second = first.to(c.dtype), second.to(c.dtype)
    a, b_ = rotate_pair(first, second, c, d, CONJUGATE)
    if REST:
        # Rotation with cos 1 and sin 0 would not copy an infinity.
        a, b_ = tl.where(is_rotated, a, first), tl.where(is_rotated, b_, second)
    if INTERLEAVED:
        z = tl.reshape(tl.join(a.to(kind), b_.to(kind)), (LANES, SHARE, WIDTH))
        tl.store(target[:, :, None] + feature_offset(at, STEPS[1]), z, mask=mask)
    else:
        tl.store(target[:, :, None] + feature_offset(at, STEPS[1]), a.to(kind), mask=mask)
        tl.store(target[:, :, None] + feature_offset(and_at, STEPS[1]), b_.to(kind), mask=and_mask)


STRIDES = [f"{x}_{dim}" for x in ("q", "k", "yq", "yk", "gq", "gk") for dim in "bsh"]
NUMBERS = ["row", "table_b", "table_h", "seq", "blocks_per_batch", "blocks"]


@triton.jit(do_not_specialize=NUMBERS + STRIDES[:12])
def _rotate(
    q,
    k,
    yq,
    yk,
    cos,
    sin,
    amplitude,
    row,
    table_b,
    table_h,
    seq,
    blocks_per_batch,
    blocks,
    q_b,
    q_s,
    q_h,
    k_b,
    k_s,
    k_h,
    yq_b,
    yq_s,
    yq_h,
    yk_b,
    yk_s,
    yk_h,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    Q_SHARE: tl.constexpr,
    K_SHARE: tl.constexpr,
    X_STEP: tl.constexpr,
    Y_STEP: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
    START: tl.constexpr,
    WIDTH: tl.constexpr,
    ALIGN: tl.constexpr,
    TOKENS: tl.constexpr,
    LANES: tl.constexpr,
    SHARE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    CONJUGATE: tl.constexpr,
    FROM_POSITIONS: tl.constexpr,
    TABLE_WIDTH: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Rotate q and k. Of each Q_SHARE + K_SHARE consecutive programs, the first ones process q and the others k."""
    unit = tl.program_id(0) // (Q_SHARE + K_SHARE)
    slot = tl.program_id(0) % (Q_SHARE + K_SHARE)
    rows, counts = (row, table_b, table_h), (seq, blocks_per_batch, blocks)
    STEPS: tl.constexpr = (X_STEP, Y_STEP)
    FEATURES: tl.constexpr = (PAIRS, REST, START, WIDTH, ALIGN)
    TILE: tl.constexpr = (TOKENS, LANES)
    if slot < Q_SHARE:
        x_strides, y_strides, index = (q_b, q_s, q_h), (yq_b, yq_s, yq_h), unit * Q_SHARE + slot
        _rotate_lanes(
            q, yq, cos, sin, amplitude, rows, x_strides, y_strides, counts, index, Q_HEADS, STEPS, FEATURES,
            TILE, SHARE, INTERLEAVED, CONJUGATE, FROM_POSITIONS, TABLE_WIDTH, WIDE,
        )  # fmt: skip
    elif K_SHARE:
        x_strides, y_strides, index = (k_b, k_s, k_h), (yk_b, yk_s, yk_h), unit * K_SHARE + slot - Q_SHARE
        _rotate_lanes(
            k, yk, cos, sin, amplitude, rows, x_strides, y_strides, counts, index, K_HEADS, STEPS, FEATURES,
            TILE, SHARE, INTERLEAVED, CONJUGATE, FROM_POSITIONS, TABLE_WIDTH, WIDE,
        )  # fmt: skip


def rotate(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    layout: Layout,
    row: int = 0,
    conjugate: bool = False,
    in_place: bool = False,
    strides: tuple[tuple[int, ...], ...] | None = None,
) -> tuple[Tensor, ...]:
    """Return rotated q, and k unless it is None: as new tensors with their strides or other ones, or in place.

    Arguments are those of `rotate.torch.rotate`.

    >>> import torch
    >>> from ropewalk.kernels.triton_launch import INTERPRETED
    >>> device = "cpu" if INTERPRETED else "cuda"
    >>> x, tables = torch.tensor([[1.0, 2.0, 3.0, 4.0]], device=device), torch.zeros(2, 1, 2, device=device)
    >>> tables[1] = 1  # by 90 degrees: cos 0, sin 1
    >>> rotate(x, None, *tables, Layout(False, 0, -2))[0].tolist()
    [[-3.0, -4.0, 1.0, 2.0]]
    """
    # The signature contains the alignment, on which Triton specializes kernels. torch's allocator aligns new tensors.
    described = signature(q, k, cos, sin)
    key = None if described is None else (_rotate, described[0], layout, conjugate, in_place, strides)
    launch = LAUNCHES.get(key)
    if launch is None or described is None:
        return _rotate_first(q, k, cos, sin, layout, row, conjugate, in_place, strides, key)
    q_at, k_at, cos_at, sin_at = described[1]
    if in_place:
        yq, yk, yq_at, yk_at = q, k, q_at, k_at
    else:
        yq, yk = empty_like(q), None if k is None else empty_like(k)
        yq_at, yk_at = yq.data_ptr(), 0 if yk is None else yk.data_ptr()
    tensors = q, q if k is None else k, yq, yq if yk is None else yk, cos, sin, cos, row
    addresses = q_at, k_at or q_at, yq_at, yk_at or yq_at, cos_at, sin_at, cos_at, row
    launch(q.device, *tensors, addresses=addresses)
    return (yq,) if yk is None else (yq, yk)


def _rotate_first(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    layout: Layout,
    row: int,
    conjugate: bool,
    in_place: bool,
    strides: tuple[tuple[int, ...], ...] | None,
    key: Any,
) -> tuple[Tensor, ...]:
    """Rotate, and keep the launch under `key` if later calls need only the launch: results like q and k."""
    both = (q,) if k is None else (q, k)
    if in_place:
        out = both
    elif strides is None:
        out = tuple(empty_like(x) for x in both)
    else:
        out = tuple(new_empty_strided(x, x.shape, stride) for x, stride in zip(both, strides, strict=True))
    if all(x.numel() == 0 for x in both):
        return out
    alike = in_place or all(y.stride() == empty_like(x).stride() for x, y in zip(both, out, strict=True))
    if cos.is_contiguous() and sin.is_contiguous() and alike:
        yk = out[1] if k is not None else None
        launch = plan(q, k, out[0], yk, table_shape(cos), layout, conjugate, in_place)
        if launch is not None:
            LAUNCHES.keep(key, launch)(cos.device, q, both[-1], out[0], out[-1], cos, sin, cos, row)
            return out
    _rotate_into(both, out, cos.contiguous(), sin.contiguous(), layout, row, conjugate, in_place)
    return out


def _rotate_into(
    both: Sequence[Tensor],
    out: Sequence[Tensor],
    cos: Tensor,
    sin: Tensor,
    layout: Layout,
    row: int,
    conjugate: bool,
    in_place: bool,
) -> None:
    """Rotate one or two tensors into others, in as few launches as their strides allow."""
    options = cos, sin, layout, row, conjugate, in_place
    described = signature(*both, *out, cos, sin)
    key = None if described is None else (_rotate_into, described[0], len(both), layout, conjugate, in_place)
    launch = LAUNCHES.get(key)
    if launch is None:
        if all(x.numel() == 0 for x in both):
            return
        k, yk = (both[1], out[1]) if len(both) == 2 else (None, None)
        planned = plan(both[0], k, out[0], yk, table_shape(cos), layout, conjugate, in_place)
        launch = LAUNCHES.keep(key, planned or "separately")
    if launch != "separately":
        launch(cos.device, both[0], both[-1], out[0], out[-1], cos, sin, cos, row)
    elif len(both) == 2:
        for x, y in zip(both, out, strict=True):
            _rotate_into([x], [y], *options)
    else:
        # Strides that do not form rows: slice by slice.
        for x, y in zip(both[0].unbind(1), out[0].unbind(1), strict=True):
            _rotate_into([x], [y], *options)


class TableShape(NamedTuple):
    """Where a kernel finds cos and sin, or the positions that it computes them from.

    Args:
        dims: 2 if all sequences share them, 3 if each sequence has its own, 4 if each head has.
        pairs: Number of pairs.
        batch_rows: Rows from one sequence to the next, 0 for shared ones.
        head_rows: Rows from one head to the next, 0 for shared ones.
        rows: All rows.
        from_positions: Whether the kernel computes cos and sin from positions.
        width: Columns of cos and sin, of which the first `pairs` are read; 0 if there are no others.

    >>> TableShape(2, 64, 0, 0, 512).from_positions
    False
    """

    dims: int
    pairs: int
    batch_rows: int
    head_rows: int
    rows: int
    from_positions: bool = False
    width: int = 0


def table_shape(cos: Tensor) -> TableShape:
    """Return the shape of cos, which must be contiguous.

    >>> import torch
    >>> table_shape(torch.ones(2, 5, 4))
    TableShape(dims=3, pairs=4, batch_rows=5, head_rows=0, rows=10, from_positions=False, width=0)
    """
    return TableShape(cos.dim(), cos.shape[-1], *table_strides(cos), cos.shape[:-1].numel())


def plan(
    q: Tensor,
    k: Tensor | None,
    yq: Tensor,
    yk: Tensor | None,
    tables: TableShape,
    layout: Layout,
    conjugate: bool,
    in_place: bool,
) -> Launch | None:
    """Return the launch for tensors with these shapes and strides, or None if one launch does not support them.

    Args:
        q: Queries.
        k: Keys, or None.
        yq: Rotated queries.
        yk: Rotated keys, or None.
        tables: Shape of cos and sin.
        layout: Pairing, first rotated feature, and dimension of the sequence.
        conjugate: Whether to rotate by the opposite angles.
        in_place: Whether yq and yk are q and k, so that unrotated features are not copied.

    >>> import torch
    >>> x = torch.ones(2, 3, 5, 8)
    >>> plan(x, None, x, None, TableShape(2, 4, 0, 0, 5), Layout(False, 0, -2), False, True).programs
    1
    """
    seq_dim, pairs = layout.seq_dim, tables.pairs
    row_views = [rows_of(x, seq_dim, tables.dims) for x in (q, yq, *(() if k is None or yk is None else (k, yk)))]
    rows = [x for x in row_views if x is not None]
    x, y = rows[:2] if len(rows) == len(row_views) else (None, None)
    if x is None or y is None:
        return None
    if any(r.heads == 0 for r in rows):
        return None
    others = rows[2:] or [x._replace(heads=0), y._replace(heads=0)]
    alike = all(
        (o.batch, o.seq, o.strides[3]) == (r.batch, r.seq, r.strides[3]) for o, r in zip(others, (x, y), strict=True)
    )
    if not alike:
        return None
    rest = 0 if in_place else x.dim - 2 * pairs
    tile = tile_of(x, layout.interleaved, bool(tables.head_rows))
    most = max(2 if layout.interleaved else 1, tile.width // q.element_size())
    widths = (2 * pairs, layout.start, rest & ~1) if layout.interleaved else (pairs, layout.start, rest)
    width = alignment(most, *widths)
    aligned = alignment(width, *(stride for r in (x, y, *others) for stride in r.strides[:3]))
    parts = pairs // (width // 2 if layout.interleaved else width)
    parts += -(-rest // (2 * (width // 2 if layout.interleaved else width)))
    groups = [-(-r.heads // tile.share) for r in (x, others[0])]
    shares = [group // math.gcd(*groups) for group in groups]
    blocks_per_batch = -(-x.seq // tile.tokens)
    blocks = x.batch * blocks_per_batch
    # Enough programs of each tensor for all its lanes, in whole units of Q_SHARE + K_SHARE programs.
    lanes = blocks * tile.tokens * parts * math.gcd(*groups)
    units = -(-lanes // tile.lanes)
    strides = [stride // aligned for r in (x, others[0], y, others[1]) for stride in r.strides[:3]]
    constants = {
        "Q_HEADS": x.heads,
        "K_HEADS": others[0].heads,
        "Q_SHARE": shares[0],
        "K_SHARE": shares[1],
        "X_STEP": x.strides[3],
        "Y_STEP": y.strides[3],
        "PAIRS": pairs,
        "REST": rest,
        "START": layout.start,
        "WIDTH": width,
        "ALIGN": aligned,
        "TOKENS": tile.tokens,
        "LANES": tile.lanes,
        "SHARE": tile.share,
        "INTERLEAVED": layout.interleaved,
        "CONJUGATE": conjugate,
        "FROM_POSITIONS": tables.from_positions,
        "TABLE_WIDTH": tables.width or pairs,
        "WIDE": is_wide(*(r.reach() for r in (x, y, *others)), tables.rows * (tables.width or pairs)),
    }
    numbers = (tables.batch_rows, tables.head_rows, x.seq, blocks_per_batch, blocks, *strides)
    return Launch(_rotate, units * sum(shares), numbers, constants, tile.warps)


class Tile(NamedTuple):
    """Size of a program.

    Args:
        tokens: Tokens of a head before the next head.
        share: Heads per lane.
        lanes: Lanes per program.
        warps: Warps per program.
        width: Bytes of the widest load.

    >>> Tile(1, 1, 128, 4, 16).lanes
    128
    """

    tokens: int
    share: int
    lanes: int
    warps: int
    width: int


def tile_of(rows: Rows, interleaved: bool, table_per_head: bool) -> Tile:
    """Return the tile that was fastest on an H200 for rows with these strides. docs/gpu.md lists what was tried.

    >>> tile_of(Rows(1, 64, 8, 128, (65536, 1024, 128, 1)), False, False)  # heads of a token are adjacent
    Tile(tokens=1, share=1, lanes=64, warps=2, width=16)
    >>> tile_of(Rows(1, 64, 8, 128, (65536, 128, 8192, 1)), False, False)  # tokens of a head are adjacent
    Tile(tokens=64, share=2, lanes=128, warps=4, width=8)
    """
    if table_per_head:
        return Tile(1, 1, 128, 4, 16)
    if heads_are_adjacent(rows):
        return Tile(1, 2 if interleaved and rows.heads > 1 else 1, 64, 2, 16)
    # Four bfloat16 features of each half are eight bytes; cos and sin of a lane are then sixteen bytes each.
    return Tile(tokens_before_next_head(rows.seq), 2, 128, 4, 16 if interleaved else 8)
