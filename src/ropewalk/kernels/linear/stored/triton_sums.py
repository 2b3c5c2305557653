"""Linear attention on a GPU: rotated features, sums over segments of tokens, and their running totals.

Features are stored as first and second members of pairs, so that the rotation is arithmetic between two tiles.
Unrotated features are paired with each other. Rows of operands of matrix products contain all first members before all
second ones, or both alternately if pairs are interleaved. Memory is therefore accessed without gaps.
"""

# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false
# In Triton's language a tl.constexpr is its value, which type checkers do not know.

import triton
import triton.language as tl

from ropewalk.kernels.linear.triton_features import EXP, NOTHING, exponential, mapped
from ropewalk.kernels.linear.triton_rows import load_pairs, members, store_pairs
from ropewalk.kernels.linear.triton_weights import head_decay


@triton.jit
def halves(x, FEATURES: tl.constexpr):
    """Split a tile of rows into first and second members."""
    ROWS: tl.constexpr = x.shape[0]
    LANES: tl.constexpr = x.shape[1] // 2
    pairs = tl.reshape(x, (ROWS, LANES, 2) if FEATURES[3] else (ROWS, 2, LANES))
    return tl.split(pairs if FEATURES[3] else tl.permute(pairs, (0, 2, 1)))


@triton.jit
def tables(cos, sin, rows, valid, lane, FEATURES: tl.constexpr):
    """Load rows of cos and sin, with 1 and 0 for unrotated features."""
    PAIRS: tl.constexpr = FEATURES[1]
    pair = lane - FEATURES[2] // 2 if FEATURES[3] else lane
    known = valid[:, None] & ((pair >= 0) & (pair < PAIRS))[None, :]
    at = rows[:, None] * PAIRS + pair[None, :]
    return tl.load(cos + at, mask=known, other=1.0), tl.load(sin + at, mask=known, other=0.0)


@triton.jit
def features(x, shift, at, valid, LANES: tl.constexpr, FEATURES: tl.constexpr, MAP: tl.constexpr):
    """Return first and second members of the features of rows. `at` is the offsets of rows in x and in shift."""
    a, b = load_pairs(x + at[0], valid, 0, LANES, FEATURES, NOTHING[MAP])
    shifts = tl.zeros(at[1].shape, tl.float32)
    if MAP == EXP:
        shifts = tl.load(shift + at[1], mask=valid, other=0.0)
    return mapped(a, shifts, MAP), mapped(b, shifts, MAP)


@triton.jit
def places(lane, FEATURES: tl.constexpr):
    """Return the positions of both members of a lane in an operand row."""
    HALF: tl.constexpr = (FEATURES[0] + 1) // 2
    return (2 * lane, 2 * lane + 1) if FEATURES[3] else (lane, HALF + lane)


@triton.jit
def slots(slot, offset, LANES: tl.constexpr, FEATURES: tl.constexpr):
    """Return the feature and the position in an operand row of each slot of a tile, from lane `offset` on.

    Each comes with a mask that is False if there is no such feature, or no such position.
    """
    HALF: tl.constexpr = (FEATURES[0] + 1) // 2
    if FEATURES[3]:
        place = 2 * offset + slot
        known = place < 2 * HALF
        feature, has = place, place < FEATURES[0]
    else:
        # In a form from which the compiler can derive which elements are contiguous.
        place = offset + slot + (slot // LANES) * (HALF - LANES)
        lane = offset + slot % LANES
        known = lane < HALF
        if FEATURES[1] == HALF:
            feature, has = place, known & (place < FEATURES[0])
        else:
            first, second, has_first, has_second = members(lane, FEATURES)
            feature = tl.where(slot >= LANES, second, first)
            has = tl.where(slot >= LANES, has_second, has_first)
    return feature, has, place, known


@triton.jit
def segment_of(begins, number, length, SEGMENT: tl.constexpr, PACKED: tl.constexpr):
    """Return the first token of a segment and the end of the segment."""
    if PACKED:
        begin, end = tl.load(begins + 2 * number), tl.load(begins + 2 * number + 1)
    else:
        begin = number.to(tl.int64) * SEGMENT
        end = tl.minimum(begin + SEGMENT, length.to(tl.int64))
    return begin, end


@triton.jit
def place_of(owners, HEADS: tl.constexpr, BLOCKS: tl.constexpr):
    """Return batch, head, segment and block of a program. Neighbouring programs differ in heads and share tables."""
    owner = (tl.program_id(0) % owners).to(tl.int64)
    block = tl.program_id(0) // owners
    return owner // HEADS, owner % HEADS, block // BLOCKS, block % BLOCKS


@triton.jit
def offsets(token, strides, batch, head, HEADS: tl.constexpr, length):
    """Return the offsets of rows in the tensor, and in a contiguous [batch, heads, seq]."""
    return batch * strides[0] + head * strides[1] + token * strides[2], (batch * HEADS + head) * length + token


@triton.jit
def tables_of(cos, sin, place, batch, head, token, valid, lane, FEATURES: tl.constexpr):
    """Load cos and sin of tokens. `place` is their first row in the tables, and the strides of batch and head."""
    return tables(cos, sin, place[0] + batch * place[1] + head * place[2] + token, valid, lane, FEATURES)


@triton.jit
def rotated_pairs(a, b, cos, sin, place, batch, head, token, valid, lane, FEATURES: tl.constexpr):
    """Rotate pairs of features."""
    if FEATURES[1]:
        c, s = tables_of(cos, sin, place, batch, head, token, valid, lane, FEATURES)
        a, b = a * c - b * s, a * s + b * c
    return a, b


@triton.jit
def store_rotated(rotated, flat, valid, a, b, LANES: tl.constexpr, FEATURES: tl.constexpr):
    """Store rotated features as operand rows."""
    WIDTH: tl.constexpr = FEATURES[0] + FEATURES[0] % 2
    # In an operand row all features are pairs, from the first on.
    ROW: tl.constexpr = (WIDTH, WIDTH // 2, 0, FEATURES[3])
    store_pairs(rotated + flat * WIDTH, valid, 0, a, b, LANES, ROW)


@triton.jit
def decays(g, index, size, ROWS: tl.constexpr, REVERSE: tl.constexpr):
    """Return the decay between each row of a block and the edge of the block, and from there to that of its segment.

    The edges are the tokens before the block and before the segment, or, if REVERSE, the last tokens of both.

    Args:
        g: Logarithm of the decay.
        index: Number of the block in its segment.
        size: Tokens of the segment.
    """
    row = tl.arange(0, ROWS)
    if REVERSE:
        inside, outside = tl.minimum(size - index * ROWS, ROWS) - 1 - row, size - (index + 1) * ROWS
    else:
        inside, outside = row + 1, index * ROWS
    # Rows after the last token have any number that is finite.
    return exponential(g * tl.maximum(inside, 0)), exponential(g * tl.maximum(outside, 0))


@triton.jit(do_not_specialize=["length", "row", "table_b", "table_h", "owners", "decay_b", "decay_h"])
def rotate_rows(
    x, shift, scale, weight, cos, sin, decay, begins, rotated, low,
    x_b, x_h, x_n, decay_b, decay_h, length, row, table_b, table_h, owners, factor,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEADS_PER_PROGRAM: tl.constexpr, FEATURES: tl.constexpr,
    MAP: tl.constexpr, SCALED: tl.constexpr, NORMALIZED: tl.constexpr, DECAY: tl.constexpr, PACKED: tl.constexpr,
    SEGMENT: tl.constexpr, LOW: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Store rotated features of rows, and the sums of unrotated features over each block of LOW rows.

    A program processes HEADS_PER_PROGRAM heads that share their tables, and prefetches the next head. SCALED is for
    queries in the backward: rotated features are divided by the row's `scale`, unrotated ones multiplied by its
    `weight`. If not NORMALIZED, the numbers are `factor` and 0 instead. With a DECAY, which GROUP heads share, sums of
    keys are decayed to the last token of the block, those of queries to the token before the block.
    """
    HALF: tl.constexpr = (FEATURES[0] + 1) // 2
    BLOCKS: tl.constexpr = SEGMENT // LOW
    batch, group, number, index = place_of(owners // HEADS_PER_PROGRAM, HEADS // HEADS_PER_PROGRAM, BLOCKS)
    begin, end = segment_of(begins, number, length, SEGMENT, PACKED)
    lane = tl.arange(0, LANES)
    token = begin + index * LOW + tl.arange(0, LOW)
    valid = token < end
    place_a, place_b = places(lane, FEATURES)
    if FEATURES[1]:
        place = row, table_b, table_h
        c, s = tables_of(cos, sin, place, batch, group * HEADS_PER_PROGRAM, token, valid, lane, FEATURES)
    for member in tl.range(0, HEADS_PER_PROGRAM, num_stages=3):
        head = group * HEADS_PER_PROGRAM + member
        at = offsets(token, (x_b, x_h, x_n), batch, head, HEADS, length)
        a, b = features(x, shift, at, valid, LANES, FEATURES, MAP)
        u, w = a, b
        if FEATURES[1]:
            u, w = a * c - b * s, a * s + b * c
        if SCALED:
            if NORMALIZED:
                over = tl.load(scale + at[1], mask=valid, other=1.0)[:, None]
                pull = tl.load(weight + at[1], mask=valid, other=0.0)[:, None]
                a, b, u, w = a * pull, b * pull, u / over, w / over
            else:
                a, b, u, w = a * 0.0, b * 0.0, u * factor, w * factor
        store_rotated(rotated, at[1], valid, u, w, LANES, FEATURES)
        if DECAY:
            g = head_decay(decay + batch * decay_b + (head // GROUP) * decay_h)
            far, _outside = decays(g, index, (end - begin).to(tl.int32), LOW, not SCALED)
            a, b = a * far[:, None], b * far[:, None]
        target = low + ((number * BLOCKS + index).to(tl.int64) * owners + batch * HEADS + head) * (2 * HALF)
        tl.store(target + place_a, tl.sum(a, axis=0), mask=lane < HALF)
        tl.store(target + place_b, tl.sum(b, axis=0), mask=lane < HALF)


@triton.jit
def load_rotated(rotated, base, index, valid, place, known, HALF: tl.constexpr):
    """Load operand rows that `rotate_rows` stored, at indices `base + index`, padded with 0."""
    mask = valid[:, None] & known[None, :]
    # Indices within a segment have 32 bits: less arithmetic in the innermost loops.
    return tl.load(rotated + base * (2 * HALF) + (index[:, None] * (2 * HALF) + place[None, :]), mask=mask, other=0.0)


@triton.jit
def load_values(v, at, valid, column, V_DIM: tl.constexpr, KIND: tl.constexpr):
    """Load rows of values as operands of dtype KIND."""
    mask = valid[:, None] & (column < V_DIM)[None, :]
    return tl.load(v + at[:, None] + column[None, :], mask=mask, other=0.0).to(KIND)


@triton.jit
def low_sums(
    low, place, known, first, last, g, size, number, owners, owner, HALF: tl.constexpr, BLOCKS: tl.constexpr,
    LOW: tl.constexpr, GROUP: tl.constexpr, DECAY: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """Return the sum of blocks `first` .. `last - 1` of a segment, over the heads of a group.

    With a DECAY of logarithm `g`, sums of keys are decayed to the last of the `size` tokens up to the last block. If
    REVERSE, sums of queries are decayed to the token before the first block.
    """
    block = tl.arange(0, BLOCKS)
    mask = ((block >= first) & (block < last))[:, None] & known[None, :]
    rows = (number * BLOCKS + block).to(tl.int64) * owners + owner * GROUP
    total = tl.zeros(place.shape, tl.float32)
    for other in range(0, GROUP):
        at = (rows + other)[:, None] * (2 * HALF) + place[None, :]
        sums = tl.load(low + at, mask=mask, other=0.0)
        if DECAY:
            apart = (block - first) * LOW if REVERSE else size - (block + 1) * LOW
            sums = sums * exponential(g * tl.maximum(apart, 0))[:, None]
        total += tl.sum(sums, axis=0)
    return total


@triton.jit
def decayed_rows(y, g, index, size, REVERSE: tl.constexpr):
    """Return rows of values of a segment, decayed to its last token, or to the token before its first if REVERSE."""
    apart = index + 1 if REVERSE else tl.maximum(size - 1 - index, 0)
    return (y.to(tl.float32) * exponential(g * apart)[:, None]).to(y.dtype)


@triton.jit(do_not_specialize=["length", "owners", "count", "decay_b", "decay_h"])
def sum_segments(
    rotated, v, low, decay, begins, sums, fade, v_b, v_h, v_n, decay_b, decay_h, length, owners, count,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, FEATURES: tl.constexpr, V_DIM: tl.constexpr, DECAY: tl.constexpr,
    REVERSE: tl.constexpr, PACKED: tl.constexpr, SEGMENT: tl.constexpr, BLOCKS: tl.constexpr, CHUNK: tl.constexpr,
    LANES: tl.constexpr, COLUMNS: tl.constexpr, LANE_BLOCKS: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sum (R x) v^T and x over each segment, and over the GROUP heads that share a sum.

    With a DECAY, sums of keys are decayed to the last token of the segment, those of queries, if REVERSE, to the token
    before its first. The logarithm of the decay over the segment is stored in `fade`.
    """
    HALF: tl.constexpr = (FEATURES[0] + 1) // 2
    batch, head, number, _block = place_of(owners, KV_HEADS, 1)
    block = tl.program_id(1)
    slot = tl.arange(0, 2 * LANES)
    feature, has, place, known = slots(slot, (block % LANE_BLOCKS) * LANES, LANES, FEATURES)
    column = (block // LANE_BLOCKS) * COLUMNS + tl.arange(0, COLUMNS)
    begin, end = segment_of(begins, number, length, SEGMENT, PACKED)
    size = (end - begin).to(tl.int32)
    g = 0.0
    if DECAY:
        g = head_decay(decay + batch * decay_b + head * decay_h)
    total = tl.zeros((2 * LANES, COLUMNS), tl.float32)
    for step in range(0, GROUP * (SEGMENT // CHUNK)):
        member = head * GROUP + step % GROUP
        index = (step // GROUP) * CHUNK + tl.arange(0, CHUNK)
        token = begin + index
        valid = token < end
        base = (batch * (KV_HEADS * GROUP) + member) * length + begin
        t = load_rotated(rotated, base, index, valid, place, known, HALF)
        y = load_values(v, batch * v_b + member * v_h + token * v_n, valid, column, V_DIM, KIND)
        if DECAY:
            y = decayed_rows(y, g, index, size, REVERSE)
        total = tl.dot(tl.trans(t), y, total, input_precision=PRECISION)
    owner = batch * KV_HEADS + head
    target = sums + (owner * count + number) * (FEATURES[0] * (V_DIM + 1))
    inside = has[:, None] & (column < V_DIM)[None, :]
    tl.store(target + feature[:, None] * V_DIM + column[None, :], total, mask=inside)
    if block // LANE_BLOCKS == 0:
        plain = low_sums(
            low, place, known, 0, BLOCKS, g, size, number, owners * GROUP, owner, HALF, BLOCKS, SEGMENT // BLOCKS,
            GROUP, DECAY, REVERSE,
        )  # fmt: skip
        tl.store(target + FEATURES[0] * V_DIM + feature, plain, mask=has)
    if DECAY and block == 0:
        tl.store(fade + owner * count + number, g * size)


@triton.jit
def carried(total, kept, segment_sum, running, plain, place, at, valid, ABOVE: tl.constexpr, SIZE: tl.constexpr):
    """Store the total before a segment if it is valid, and return the total after it."""
    tl.store(running + place * ABOVE + at, total.to(running.dtype.element_ty), mask=valid & (at < ABOVE))
    tl.store(plain + place * (SIZE - ABOVE) + at - ABOVE, total, mask=valid & (at >= ABOVE) & (at < SIZE))
    return total * kept + segment_sum


@triton.jit(do_not_specialize=["heads", "count"])
def run_totals(
    sums, fade, before, after, running, plain, starts, heads, count,
    ABOVE: tl.constexpr, SIZE: tl.constexpr, HAS_BEFORE: tl.constexpr, DECAY: tl.constexpr, PACKED: tl.constexpr,
    REVERSE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Store the total of the segments before each segment, or after it if REVERSE, and the total of all in `after`.

    Of the SIZE sums, the first ABOVE are stored in `running`, in the dtype of operands, the others in `plain`. `starts`
    contains the first segment of each packed sequence. With a DECAY, a total decays over each segment by `fade`.
    """
    owner = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = at < SIZE
    total = tl.zeros((WIDTH,), tl.float32)
    if HAS_BEFORE:
        total = tl.load(before + owner * SIZE + at, mask=inside, other=0.0)
    if PACKED:
        sequence, head = owner // heads, owner % heads
        start, stop = tl.load(starts + sequence), tl.load(starts + sequence + 1)
        base = head * count
    else:
        start, stop = owner * 0, owner * 0 + count
        base = owner * count
    if REVERSE:
        place, step = base + stop - 1, -1
    else:
        place, step = base + start, 1
    # Four segments are loaded before the first is added, to hide the latency of memory.
    for segment in range(0, (stop - start).to(tl.int32), 4):
        left = tl.where(inside, (stop - start).to(tl.int32) - segment, 0)
        source = sums + place * SIZE + at
        first = tl.load(source, mask=left > 0, other=0.0)
        second = tl.load(source + step * SIZE, mask=left > 1, other=0.0)
        third = tl.load(source + 2 * step * SIZE, mask=left > 2, other=0.0)
        fourth = tl.load(source + 3 * step * SIZE, mask=left > 3, other=0.0)
        kept_0, kept_1, kept_2, kept_3 = 1.0, 1.0, 1.0, 1.0
        if DECAY:
            logs = fade + place + at * 0
            kept_0 = exponential(tl.load(logs, mask=left > 0, other=0.0))
            kept_1 = exponential(tl.load(logs + step, mask=left > 1, other=0.0))
            kept_2 = exponential(tl.load(logs + 2 * step, mask=left > 2, other=0.0))
            kept_3 = exponential(tl.load(logs + 3 * step, mask=left > 3, other=0.0))
        total = carried(total, kept_0, first, running, plain, place, at, left > 0, ABOVE, SIZE)
        total = carried(total, kept_1, second, running, plain, place + step, at, left > 1, ABOVE, SIZE)
        total = carried(total, kept_2, third, running, plain, place + 2 * step, at, left > 2, ABOVE, SIZE)
        total = carried(total, kept_3, fourth, running, plain, place + 3 * step, at, left > 3, ABOVE, SIZE)
        place += 4 * step
    tl.store(after + owner * SIZE + at, total, mask=inside)
