"""The rotation on a GPU: one Triton kernel that reads and writes every feature once, at the speed of a copy.

A lane of the kernel has WIDTH neighbouring features, sixteen bytes, the widest load there is, of one head or of a few
that share its cos and sin. Lanes are counted through blocks of tokens, heads, tokens and parts of a head in one row,
so that no head dimension leaves any idle. Programs for q and k take turns in one launch, at a pace at which both come
by a token at the same time: what one has read of cos and sin the other finds in the cache.
"""

# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright: reportPossiblyUnboundVariable=false
# A kernel is Triton's language, in which a constexpr is whatever it was given.

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ropewalk.kernels.constructors import empty_like
from ropewalk.kernels.precision import FLOATS
from ropewalk.kernels.torch_internals import is_masked
from ropewalk.kernels.triton_launch import (
    LAUNCHES,
    Launch,
    Rows,
    alignment,
    far_tokens,
    is_wide,
    lie_together,
    rows_of,
    table_strides,
)
from ropewalk.kernels.types import Layout

__all__ = ["Tile", "rotate", "rotate_if_ready", "tile_of"]


@triton.jit
def rotate_pair(a, b, cos, sin, CONJUGATE: tl.constexpr):
    """A pair, turned. Which of the products is rounded is said here, so that no shape of a call changes a bit."""
    if CONJUGATE:
        sin = -sin
    return tl.fma(a, cos, -(b * sin)), tl.fma(a, sin, b * cos)


@triton.jit
def place(index, counts, HEADS: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr, WIDE: tl.constexpr):
    """Part, batch, token and head of the lanes of program `index`, and which of them are there.

    Lanes are counted through blocks of tokens; in a block through heads, tokens, parts of a head. `counts` are tokens
    of a sequence, blocks of a sequence and all blocks; TILE is tokens a block, lanes a program.
    """
    TOKENS: tl.constexpr = TILE[0]
    LANES: tl.constexpr = TILE[1]
    A_BLOCK: tl.constexpr = TOKENS * HEADS * PARTS
    counting = tl.int64 if WIDE else tl.int32
    first = index.to(tl.int64) * LANES
    block = first // A_BLOCK
    lane = (first - block * A_BLOCK).to(tl.int32) + tl.arange(0, LANES)
    later, lane = lane // A_BLOCK, lane % A_BLOCK
    part, lane = lane % PARTS, lane // PARTS
    token, head = lane % TOKENS, lane // TOKENS
    batch = block // counts[1]
    inner = (block - batch * counts[1]).to(tl.int32) + later
    s = (inner % counts[1]) * TOKENS + token
    b = batch.to(counting) + (inner // counts[1]).to(counting)
    there = (block + later < counts[2]) & (s < counts[0])
    return part, b, s.to(counting), head.to(counting), there


@triton.jit
def stepped(number, STEP: tl.constexpr):
    """How far feature `number` lies from the first."""
    if STEP != 1:
        number = number.to(tl.int64) * STEP
    return number


@triton.jit
def unrotated(number, PAIRS: tl.constexpr, STILL: tl.constexpr, START: tl.constexpr):
    """Where the features that do not turn lie, by their number: before those that do, after them, or both."""
    if START == 0:
        number += 2 * PAIRS
    elif START != STILL:
        number = tl.where(number < START, number, number + 2 * PAIRS)
    return number


@triton.jit
def _rotate_lanes(
    x,
    y,
    cos,
    sin,
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
    WIDE: tl.constexpr,
):
    """The lanes of one program: `index` counts the programs of this tensor."""
    PAIRS: tl.constexpr = FEATURES[0]
    STILL: tl.constexpr = FEATURES[1]
    START: tl.constexpr = FEATURES[2]
    WIDTH: tl.constexpr = FEATURES[3]
    ALIGN: tl.constexpr = FEATURES[4]
    LANES: tl.constexpr = TILE[1]
    V: tl.constexpr = WIDTH // 2 if INTERLEAVED else WIDTH
    TURNING: tl.constexpr = PAIRS // V
    PARTS: tl.constexpr = TURNING + (STILL + 2 * V - 1) // (2 * V)
    GROUPS: tl.constexpr = (HEADS + SHARE - 1) // SHARE
    part, b, s, group, there = place(index, counts, GROUPS, PARTS, TILE, WIDE)
    head = group[:, None] * SHARE + tl.arange(0, SHARE)[None, :]

    pair = tl.arange(0, V)
    at_table = (first_rows[0] + b * first_rows[1] + group * first_rows[2] + s) * PAIRS + part * V
    at_table = at_table[:, None, None] + pair[None, None, :]
    rotated_dim = part < TURNING
    known = (there & rotated_dim)[:, None, None]
    # Where heads do not lie together, each reads them anew: they are to stay in the cache.
    c = tl.load(cos + at_table, mask=known, other=1.0, eviction_policy="evict_last")
    d = tl.load(sin + at_table, mask=known, other=0.0, eviction_policy="evict_last")

    source = x + ((b * x_strides[0] + s * x_strides[1])[:, None] + head * x_strides[2]) * ALIGN
    target = y + ((b * y_strides[0] + s * y_strides[1])[:, None] + head * y_strides[2]) * ALIGN
    there = there[:, None]
    if HEADS % SHARE:
        there = there & (head < HEADS)
    # Lanes past those that turn take as many of the features that do not.
    still = (part - TURNING)[:, None, None] * (2 * V)
    rotated_dim = rotated_dim[:, None, None]
    if INTERLEAVED:
        at = (START + part * WIDTH)[:, None, None]
        mask = there[:, :, None]
        if STILL:
            if STILL % WIDTH:
                mask = mask & (rotated_dim | (still + tl.arange(0, WIDTH)[None, None, :] < STILL))
            at = tl.where(rotated_dim, at, unrotated(still, PAIRS, STILL, START))
        at += tl.arange(0, WIDTH)[None, None, :]
        z = tl.load(source[:, :, None] + stepped(at, STEPS[0]), mask=mask)
        first, second = tl.split(tl.reshape(z, (LANES, SHARE, V, 2)))
    else:
        at = (START + part * V)[:, None, None]
        and_at = at + PAIRS
        mask = there[:, :, None]
        and_mask = mask
        if STILL:
            and_mask = mask & (rotated_dim | (still + V < STILL))
            at = tl.where(rotated_dim, at, unrotated(still, PAIRS, STILL, START))
            and_at = tl.where(rotated_dim, and_at, unrotated(still + V, PAIRS, STILL, START))
        at, and_at = at + pair[None, None, :], and_at + pair[None, None, :]
        first = tl.load(source[:, :, None] + stepped(at, STEPS[0]), mask=mask)
        second = tl.load(source[:, :, None] + stepped(and_at, STEPS[0]), mask=and_mask)
    kind = first.dtype
    first, second = first.to(c.dtype), second.to(c.dtype)
    a, b_ = rotate_pair(first, second, c, d, CONJUGATE)
    if STILL:
        # A product with 1 and a sum with 0 would not copy an infinity.
        a, b_ = tl.where(rotated_dim, a, first), tl.where(rotated_dim, b_, second)
    if INTERLEAVED:
        z = tl.reshape(tl.join(a.to(kind), b_.to(kind)), (LANES, SHARE, WIDTH))
        tl.store(target[:, :, None] + stepped(at, STEPS[1]), z, mask=mask)
    else:
        tl.store(target[:, :, None] + stepped(at, STEPS[1]), a.to(kind), mask=mask)
        tl.store(target[:, :, None] + stepped(and_at, STEPS[1]), b_.to(kind), mask=and_mask)


STRIDES = [f"{x}_{dim}" for x in ("q", "k", "yq", "yk", "gq", "gk") for dim in "bsh"]
NUMBERS = ["row", "table_b", "table_h", "seq", "blocks_a_batch", "blocks"]


@triton.jit(do_not_specialize=NUMBERS + STRIDES[:12])
def _rotate(
    q,
    k,
    yq,
    yk,
    cos,
    sin,
    row,
    table_b,
    table_h,
    seq,
    blocks_a_batch,
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
    STILL: tl.constexpr,
    START: tl.constexpr,
    WIDTH: tl.constexpr,
    ALIGN: tl.constexpr,
    TOKENS: tl.constexpr,
    LANES: tl.constexpr,
    SHARE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    CONJUGATE: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Of Q_SHARE + K_SHARE programs in a row the first are for q and the others for k."""
    unit = tl.program_id(0) // (Q_SHARE + K_SHARE)
    own = tl.program_id(0) % (Q_SHARE + K_SHARE)
    rows, counts = (row, table_b, table_h), (seq, blocks_a_batch, blocks)
    STEPS: tl.constexpr = (X_STEP, Y_STEP)
    FEATURES: tl.constexpr = (PAIRS, STILL, START, WIDTH, ALIGN)
    TILE: tl.constexpr = (TOKENS, LANES)
    if own < Q_SHARE:
        x_strides, y_strides, index = (q_b, q_s, q_h), (yq_b, yq_s, yq_h), unit * Q_SHARE + own
        _rotate_lanes(
            q, yq, cos, sin, rows, x_strides, y_strides, counts, index, Q_HEADS, STEPS, FEATURES, TILE, SHARE,
            INTERLEAVED, CONJUGATE, WIDE,
        )  # fmt: skip
    elif K_SHARE:
        x_strides, y_strides, index = (k_b, k_s, k_h), (yk_b, yk_s, yk_h), unit * K_SHARE + own - Q_SHARE
        _rotate_lanes(
            k, yk, cos, sin, rows, x_strides, y_strides, counts, index, K_HEADS, STEPS, FEATURES, TILE, SHARE,
            INTERLEAVED, CONJUGATE, WIDE,
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
    out: Sequence[Tensor] | None = None,
) -> tuple[Tensor, ...]:
    """q, and k if there is one, rotated: plain tensors of a GPU, into memory like theirs, into `out`, or in place.

    >>> from ropewalk.kernels.triton_launch import INTERPRETED
    >>> device = "cpu" if INTERPRETED else "cuda"
    >>> x, tables = torch.tensor([[1.0, 2.0, 3.0, 4.0]], device=device), torch.zeros(2, 1, 2, device=device)
    >>> tables[1] = 1  # a quarter turn: cos 0, sin 1
    >>> rotate(x, None, *tables, Layout(False, 0, -2))[0].tolist()
    [[-3.0, -4.0, 1.0, 2.0]]
    """
    if in_place:
        yq, yk = q, k
    elif out is not None:
        yq, yk = out[0], None if k is None else out[1]
    else:
        yq, yk = empty_like(q), None if k is None else empty_like(k)
    if not (cos.is_contiguous() and sin.is_contiguous()):
        cos, sin = cos.contiguous(), sin.contiguous()
    tensors = (q, q if k is None else k, yq, yq if yk is None else yk, cos, sin)
    # Memory from torch's allocator is aligned; views of it may not be, and Triton compiles for what it is given.
    addresses = 0
    for x in tensors:
        addresses |= x.data_ptr()
    others = None if k is None or yk is None else (k.shape, k.stride(), yk.stride(), k.dtype)
    how = q.dtype, cos.dtype, q.device, layout, conjugate, in_place
    key = _rotate, q.shape, q.stride(), yq.stride(), others, cos.shape, how, addresses & 15 and _misaligned(tensors)
    launch = LAUNCHES.get(key)
    if launch is None and q.numel() == 0 and (k is None or k.numel() == 0):
        return (yq,) if yk is None else (yq, yk)
    if launch is None:
        launch = LAUNCHES.keep(key, _plan(q, k, yq, yk, cos, layout, conjugate, in_place) or "apart")
    if launch == "apart":
        _rotate_apart(q, k, yq, yk, (cos, sin, layout, row, conjugate, in_place))
    else:
        launch(q.device, *tensors, row)
    return (yq,) if yk is None else (yq, yk)


def rotate_if_ready(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    layout: Layout,
    row: int,
    rows: int,
    head_dim: int,
    only_ask: bool = False,
) -> tuple[Tensor, ...] | bool | None:
    """`rotate`, if q and k are plain, on the device of cos, with head_dim features and up to `rows` tokens; else None.

    >>> from ropewalk.kernels.triton_launch import INTERPRETED
    >>> table = torch.ones(3, 2, device="cpu" if INTERPRETED else "cuda")
    >>> rotate_if_ready(torch.ones(3, 4), None, table, table, Layout(True, 0, -2), 0, 3, 5)  # it has no five features
    """
    seq_dim, device = layout.seq_dim, cos.device
    if row < 0 or type(q) is not Tensor or q.device != device or q.dtype not in FLOATS or is_masked(q):
        return None
    shape, dtype = q.shape, q.dtype
    if len(shape) < -seq_dim or shape[-1] != head_dim or not 0 < shape[seq_dim] <= rows:
        return None
    if k is not None:
        if type(k) is not Tensor or k.device != device or k.dtype != dtype or is_masked(k):
            return None
        other = k.shape
        if len(other) < -seq_dim or other[-1] != head_dim or other[seq_dim] != shape[seq_dim]:
            return None
    if (dtype == torch.float64) != (cos.dtype == torch.float64):
        return None
    # What a graph reads must outlive it, and the cache of ranges drops what it holds.
    if torch.cuda.is_current_stream_capturing():
        return None
    return True if only_ask else rotate(q, k, cos, sin, layout, row)


def _misaligned(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(x.data_ptr() & 15 for x in tensors)


def _rotate_apart(q: Tensor, k: Tensor | None, yq: Tensor, yk: Tensor | None, how: tuple[Any, ...]) -> None:
    """q and k one after the other, and what still does not lie as rows slice by slice."""
    if k is not None and yk is not None:
        rotate(q, None, *how, out=(yq,))
        rotate(k, None, *how, out=(yk,))
    else:
        for x, y in zip(q.unbind(1), yq.unbind(1), strict=True):
            rotate(x, None, *how, out=(y,))


def _plan(
    q: Tensor,
    k: Tensor | None,
    yq: Tensor,
    yk: Tensor | None,
    cos: Tensor,
    layout: Layout,
    conjugate: bool,
    in_place: bool,
) -> Launch | None:
    """The launch for tensors like these, or None if one cannot serve them together."""
    seq_dim, dims, pairs = layout.seq_dim, cos.dim(), cos.shape[-1]
    found = [rows_of(x, seq_dim, dims) for x in (q, yq, *(() if k is None or yk is None else (k, yk)))]
    rows = [x for x in found if x is not None]
    x, y = rows[:2] if len(rows) == len(found) else (None, None)
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
    table_b, table_h = table_strides(cos)
    still = 0 if in_place else x.dim - 2 * pairs
    tile = tile_of(x, layout.interleaved, bool(table_h))
    most = max(2 if layout.interleaved else 1, tile.width // q.element_size())
    widths = (2 * pairs, layout.start, still & ~1) if layout.interleaved else (pairs, layout.start, still)
    width = alignment(most, *widths)
    aligned = alignment(width, *(stride for r in (x, y, *others) for stride in r.strides[:3]))
    parts = pairs // (width // 2 if layout.interleaved else width)
    parts += -(-still // (2 * (width // 2 if layout.interleaved else width)))
    groups = [-(-r.heads // tile.share) for r in (x, others[0])]
    shares = [group // math.gcd(*groups) for group in groups]
    blocks_a_batch = -(-x.seq // tile.tokens)
    blocks = x.batch * blocks_a_batch
    # As many programs of each tensor as cover all of its lanes, in whole units of turns.
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
        "STILL": still,
        "START": layout.start,
        "WIDTH": width,
        "ALIGN": aligned,
        "TOKENS": tile.tokens,
        "LANES": tile.lanes,
        "SHARE": tile.share,
        "INTERLEAVED": layout.interleaved,
        "CONJUGATE": conjugate,
        "WIDE": is_wide(*(r.reach() for r in (x, y, *others)), cos.numel()),
    }
    numbers = (table_b, table_h, x.seq, blocks_a_batch, blocks, *strides)
    return Launch(_rotate, units * sum(shares), numbers, constants, tile.warps)


class Tile(NamedTuple):
    """What a program takes: tokens of a head side by side, heads a lane, lanes, warps; bytes of the widest load.

    >>> Tile(1, 1, 128, 4, 16).lanes
    128
    """

    tokens: int
    share: int
    lanes: int
    warps: int
    width: int


def tile_of(rows: Rows, interleaved: bool, table_a_head: bool) -> Tile:
    """The tile that was fastest on an H200 for rows that lie so: docs/gpu.md says what was tried.

    >>> tile_of(Rows(1, 64, 8, 128, (65536, 1024, 128, 1)), False, False)  # heads of a token lie together
    Tile(tokens=1, share=1, lanes=128, warps=4, width=16)
    >>> tile_of(Rows(1, 64, 8, 128, (65536, 128, 8192, 1)), False, False)  # tokens of a head do
    Tile(tokens=64, share=2, lanes=128, warps=4, width=8)
    """
    if table_a_head:
        return Tile(1, 1, 128, 4, 16)
    if lie_together(rows):
        return Tile(1, 2 if interleaved and rows.heads > 1 else 1, 128, 4, 16)
    # Eight bytes of a bfloat16 half, so that a lane's cos and sin are sixteen each.
    return Tile(far_tokens(rows.seq), 2, 128, 4, 16 if interleaved else 8)
