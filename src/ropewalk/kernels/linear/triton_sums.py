"""Linear attention on a GPU: features, turned; sums over segments of tokens, and their running totals.

Features are kept as first and second members of pairs, so that the rotation is arithmetic between two tiles. Features
that do not turn are paired with each other. Where products take them, a row has all first members before all second
ones, or both in turns where pairs are interleaved, so that memory is read and written without gaps.
"""

# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false
# A kernel is Triton's language, in which a constexpr is whatever it was given.

import triton
import triton.language as tl

from ropewalk.kernels.linear.triton_features import EXP, NOTHING, mapped


@triton.jit
def members(lane, FEATURES: tl.constexpr):
    """Which features lane `lane` holds, and whether there are such.

    FEATURES are width, pairs that turn, the first feature that turns, and whether pairs are interleaved.
    """
    WIDTH: tl.constexpr = FEATURES[0]
    PAIRS: tl.constexpr = FEATURES[1]
    START: tl.constexpr = FEATURES[2]
    if FEATURES[3]:
        first, second = 2 * lane, 2 * lane + 1
        has_first = first < WIDTH
        has_second = second < WIDTH
    else:
        STILL: tl.constexpr = WIDTH - 2 * PAIRS
        HALF: tl.constexpr = (STILL + 1) // 2
        BASE: tl.constexpr = 0 if START > 0 else 2 * PAIRS
        is_rotated = lane < PAIRS
        rest = lane - PAIRS
        first = tl.where(is_rotated, START + lane, BASE + rest)
        second = tl.where(is_rotated, START + PAIRS + lane, BASE + HALF + rest)
        has_first = is_rotated | (rest < HALF)
        has_second = is_rotated | (HALF + rest < STILL)
    return first, second, has_first, has_second


@triton.jit
def halves(x, FEATURES: tl.constexpr):
    """First and second members of a tile of whole rows."""
    ROWS: tl.constexpr = x.shape[0]
    LANES: tl.constexpr = x.shape[1] // 2
    pairs = tl.reshape(x, (ROWS, LANES, 2) if FEATURES[3] else (ROWS, 2, LANES))
    return tl.split(pairs if FEATURES[3] else tl.permute(pairs, (0, 2, 1)))


@triton.jit
def load_pairs(source, there, offset, LANES: tl.constexpr, FEATURES: tl.constexpr, MAP: tl.constexpr):
    """First and second members at rows that start at `source`; where there is nothing, what the map makes 0 of."""
    FILL: tl.constexpr = NOTHING[MAP]
    if FEATURES[3]:
        feature = 2 * offset + tl.arange(0, 2 * LANES)
        mask = there[:, None] & (feature < FEATURES[0])[None, :]
        a, b = halves(tl.load(source[:, None] + feature[None, :], mask=mask, other=FILL), FEATURES)
    else:
        first, second, has_first, has_second = members(offset + tl.arange(0, LANES), FEATURES)
        a = tl.load(source[:, None] + first[None, :], mask=there[:, None] & has_first[None, :], other=FILL)
        b = tl.load(source[:, None] + second[None, :], mask=there[:, None] & has_second[None, :], other=FILL)
    return a, b


@triton.jit
def store_pairs(target, there, offset, a, b, LANES: tl.constexpr, FEATURES: tl.constexpr):
    """Writes first and second members to rows that start at `target`."""
    kind = target.dtype.element_ty
    if FEATURES[3]:
        ROWS: tl.constexpr = a.shape[0]
        feature = 2 * offset + tl.arange(0, 2 * LANES)
        mask = there[:, None] & (feature < FEATURES[0])[None, :]
        both = tl.reshape(tl.join(a.to(kind), b.to(kind)), (ROWS, 2 * LANES))
        tl.store(target[:, None] + feature[None, :], both, mask=mask)
    else:
        first, second, has_first, has_second = members(offset + tl.arange(0, LANES), FEATURES)
        tl.store(target[:, None] + first[None, :], a.to(kind), mask=there[:, None] & has_first[None, :])
        tl.store(target[:, None] + second[None, :], b.to(kind), mask=there[:, None] & has_second[None, :])


@triton.jit
def tables(cos, sin, rows, there, lane, FEATURES: tl.constexpr):
    """cos and sin of rows of the tables; 1 and 0 for features that do not turn."""
    PAIRS: tl.constexpr = FEATURES[1]
    pair = lane - FEATURES[2] // 2 if FEATURES[3] else lane
    known = there[:, None] & ((pair >= 0) & (pair < PAIRS))[None, :]
    at = rows[:, None] * PAIRS + pair[None, :]
    return tl.load(cos + at, mask=known, other=1.0), tl.load(sin + at, mask=known, other=0.0)


@triton.jit
def features(x, shift, at, there, LANES: tl.constexpr, FEATURES: tl.constexpr, MAP: tl.constexpr):
    """First and second members of the features of rows. `at` are the offsets of rows in x and in shift."""
    a, b = load_pairs(x + at[0], there, 0, LANES, FEATURES, MAP)
    moved = tl.zeros(at[1].shape, tl.float32)
    if MAP == EXP:
        moved = tl.load(shift + at[1], mask=there, other=0.0)
    return mapped(a, moved, MAP), mapped(b, moved, MAP)


@triton.jit
def places(lane, FEATURES: tl.constexpr):
    """Where the two members of a lane stand in a row for products."""
    HALF: tl.constexpr = (FEATURES[0] + 1) // 2
    return (2 * lane, 2 * lane + 1) if FEATURES[3] else (lane, HALF + lane)


@triton.jit
def slots(slot, offset, LANES: tl.constexpr, FEATURES: tl.constexpr):
    """Of a tile of whole rows from lane `offset` on: each one's feature, and its place in a row for products.

    What is no feature, or no place, comes with False.
    """
    HALF: tl.constexpr = (FEATURES[0] + 1) // 2
    if FEATURES[3]:
        place = 2 * offset + slot
        known = place < 2 * HALF
        feature, has = place, place < FEATURES[0]
    else:
        # Written so that the compiler sees which of them lie side by side.
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
    """The tokens of a segment: from the first to before the last."""
    if PACKED:
        begin, end = tl.load(begins + 2 * number), tl.load(begins + 2 * number + 1)
    else:
        begin = number.to(tl.int64) * SEGMENT
        end = tl.minimum(begin + SEGMENT, length.to(tl.int64))
    return begin, end


@triton.jit
def place_of(owners, HEADS: tl.constexpr, BLOCKS: tl.constexpr):
    """Batch, head, segment and block in it of a program: heads first, so that neighbours read the same tables."""
    owner = (tl.program_id(0) % owners).to(tl.int64)
    block = tl.program_id(0) // owners
    return owner // HEADS, owner % HEADS, block // BLOCKS, block % BLOCKS


@triton.jit
def offsets(token, strides, batch, head, HEADS: tl.constexpr, length):
    """Where rows lie in the tensor, and in [batch, heads, seq]."""
    return batch * strides[0] + head * strides[1] + token * strides[2], (batch * HEADS + head) * length + token


@triton.jit
def tables_of(cos, sin, place, batch, head, token, there, lane, FEATURES: tl.constexpr):
    """cos and sin of tokens. `place` is their first row in the tables, and the strides of batch and head."""
    return tables(cos, sin, place[0] + batch * place[1] + head * place[2] + token, there, lane, FEATURES)


@triton.jit
def rotated_pairs(a, b, cos, sin, place, batch, head, token, there, lane, FEATURES: tl.constexpr):
    """Pairs of features, each turned by its angle."""
    if FEATURES[1]:
        c, s = tables_of(cos, sin, place, batch, head, token, there, lane, FEATURES)
        a, b = a * c - b * s, a * s + b * c
    return a, b


@triton.jit
def store_rotated(rotated, flat, there, a, b, LANES: tl.constexpr, FEATURES: tl.constexpr):
    """Turned features, as rows for products."""
    WIDTH: tl.constexpr = FEATURES[0] + FEATURES[0] % 2
    # In such a row all features turn, from the first on.
    ROW: tl.constexpr = (WIDTH, WIDTH // 2, 0, FEATURES[3])
    store_pairs(rotated + flat * WIDTH, there, 0, a, b, LANES, ROW)


@triton.jit(do_not_specialize=["length", "row", "table_b", "table_h", "owners"])
def rotate_rows(
    x, shift, scale, weight, cos, sin, begins, rotated, low,
    x_b, x_h, x_n, length, row, table_b, table_h, owners,
    HEADS: tl.constexpr, TOGETHER: tl.constexpr, FEATURES: tl.constexpr, MAP: tl.constexpr, SCALED: tl.constexpr,
    PACKED: tl.constexpr, SEGMENT: tl.constexpr, LOW: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Features of rows, turned, and the plain ones summed over each block of LOW rows.

    A program takes TOGETHER heads, which have their tables in common, and reads the next ones while it works on one.
    SCALED, for queries in the backward: turned ones are over the row's `scale`, plain ones times its `weight`.
    """
    HALF: tl.constexpr = (FEATURES[0] + 1) // 2
    BLOCKS: tl.constexpr = SEGMENT // LOW
    batch, group, number, index = place_of(owners // TOGETHER, HEADS // TOGETHER, BLOCKS)
    begin, end = segment_of(begins, number, length, SEGMENT, PACKED)
    lane = tl.arange(0, LANES)
    token = begin + index * LOW + tl.arange(0, LOW)
    there = token < end
    place_a, place_b = places(lane, FEATURES)
    if FEATURES[1]:
        place = row, table_b, table_h
        c, s = tables_of(cos, sin, place, batch, group * TOGETHER, token, there, lane, FEATURES)
    for member in tl.range(0, TOGETHER, num_stages=3):
        head = group * TOGETHER + member
        at = offsets(token, (x_b, x_h, x_n), batch, head, HEADS, length)
        a, b = features(x, shift, at, there, LANES, FEATURES, MAP)
        u, w = a, b
        if FEATURES[1]:
            u, w = a * c - b * s, a * s + b * c
        if SCALED:
            over = tl.load(scale + at[1], mask=there, other=1.0)[:, None]
            factor = tl.load(weight + at[1], mask=there, other=0.0)[:, None]
            a, b, u, w = a * factor, b * factor, u / over, w / over
        store_rotated(rotated, at[1], there, u, w, LANES, FEATURES)
        own = low + ((number * BLOCKS + index).to(tl.int64) * owners + batch * HEADS + head) * (2 * HALF)
        tl.store(own + place_a, tl.sum(a, axis=0), mask=lane < HALF)
        tl.store(own + place_b, tl.sum(b, axis=0), mask=lane < HALF)


@triton.jit
def load_rotated(rotated, base, index, there, place, known, HALF: tl.constexpr):
    """Rows that `rotate_rows` wrote, `index` of them past row `base`; 0 where there is nothing."""
    mask = there[:, None] & known[None, :]
    # Within a segment 32 bits count: less arithmetic where it is done most often.
    return tl.load(rotated + base * (2 * HALF) + (index[:, None] * (2 * HALF) + place[None, :]), mask=mask, other=0.0)


@triton.jit
def load_values(v, at, there, column, V_DIM: tl.constexpr, KIND: tl.constexpr):
    """Rows of values, as what products take: KIND."""
    mask = there[:, None] & (column < V_DIM)[None, :]
    return tl.load(v + at[:, None] + column[None, :], mask=mask, other=0.0).to(KIND)


@triton.jit
def low_sums(
    low, place, known, first, last, number, owners, owner, HALF: tl.constexpr, BLOCKS: tl.constexpr, GROUP: tl.constexpr
):
    """The plain sums of a segment's blocks from `first` to before `last`, over the heads of a group."""
    block = tl.arange(0, BLOCKS)
    mask = ((block >= first) & (block < last))[:, None] & known[None, :]
    rows = (number * BLOCKS + block).to(tl.int64) * owners + owner * GROUP
    total = tl.zeros(place.shape, tl.float32)
    for other in range(0, GROUP):
        at = (rows + other)[:, None] * (2 * HALF) + place[None, :]
        total += tl.sum(tl.load(low + at, mask=mask, other=0.0), axis=0)
    return total


@triton.jit(do_not_specialize=["length", "owners", "count"])
def sum_segments(
    rotated, v, low, begins, sums, v_b, v_h, v_n, length, owners, count,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, FEATURES: tl.constexpr, V_DIM: tl.constexpr, PACKED: tl.constexpr,
    SEGMENT: tl.constexpr, BLOCKS: tl.constexpr, CHUNK: tl.constexpr, LANES: tl.constexpr, COLUMNS: tl.constexpr,
    LANE_BLOCKS: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Of each segment the sums of (R x) v^T and of x, over the GROUP heads that share a sum."""
    HALF: tl.constexpr = (FEATURES[0] + 1) // 2
    batch, head, number, _ = place_of(owners, KV_HEADS, 1)
    block = tl.program_id(1)
    slot = tl.arange(0, 2 * LANES)
    feature, has, place, known = slots(slot, (block % LANE_BLOCKS) * LANES, LANES, FEATURES)
    column = (block // LANE_BLOCKS) * COLUMNS + tl.arange(0, COLUMNS)
    begin, end = segment_of(begins, number, length, SEGMENT, PACKED)
    total = tl.zeros((2 * LANES, COLUMNS), tl.float32)
    for step in range(0, GROUP * (SEGMENT // CHUNK)):
        member = head * GROUP + step % GROUP
        index = (step // GROUP) * CHUNK + tl.arange(0, CHUNK)
        token = begin + index
        there = token < end
        base = (batch * (KV_HEADS * GROUP) + member) * length + begin
        t = load_rotated(rotated, base, index, there, place, known, HALF)
        y = load_values(v, batch * v_b + member * v_h + token * v_n, there, column, V_DIM, KIND)
        total = tl.dot(tl.trans(t), y, total, input_precision=PRECISION)
    owner = batch * KV_HEADS + head
    own = sums + (owner * count + number) * (FEATURES[0] * (V_DIM + 1))
    inside = has[:, None] & (column < V_DIM)[None, :]
    tl.store(own + feature[:, None] * V_DIM + column[None, :], total, mask=inside)
    if block // LANE_BLOCKS == 0:
        plain = low_sums(low, place, known, 0, BLOCKS, number, owners * GROUP, owner, HALF, BLOCKS, GROUP)
        tl.store(own + FEATURES[0] * V_DIM + feature, plain, mask=has)


@triton.jit
def carried(total, own, running, plain, place, at, there, ABOVE: tl.constexpr, SIZE: tl.constexpr):
    """Writes the total before a segment, where it is there, and gives the total behind it."""
    tl.store(running + place * ABOVE + at, total.to(running.dtype.element_ty), mask=there & (at < ABOVE))
    tl.store(plain + place * (SIZE - ABOVE) + at - ABOVE, total, mask=there & (at >= ABOVE) & (at < SIZE))
    return total + own


@triton.jit(do_not_specialize=["heads", "count"])
def run_totals(
    sums, before, after, running, plain, starts, heads, count,
    ABOVE: tl.constexpr, SIZE: tl.constexpr, GIVEN: tl.constexpr, PACKED: tl.constexpr, REVERSE: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """The total of the segments before each segment, or behind it where REVERSE; `after` is of all.

    Of the SIZE sums, the ABOVE first go to `running`, as products take them, the others to `plain`. `starts` says at
    which segment each packed sequence starts.
    """
    owner = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = at < SIZE
    total = tl.zeros((WIDTH,), tl.float32)
    if GIVEN:
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
    # Four segments are read before the first is added: a GPU waits long for what it reads.
    for segment in range(0, (stop - start).to(tl.int32), 4):
        left = tl.where(inside, (stop - start).to(tl.int32) - segment, 0)
        own = sums + place * SIZE + at
        first = tl.load(own, mask=left > 0, other=0.0)
        second = tl.load(own + step * SIZE, mask=left > 1, other=0.0)
        third = tl.load(own + 2 * step * SIZE, mask=left > 2, other=0.0)
        fourth = tl.load(own + 3 * step * SIZE, mask=left > 3, other=0.0)
        total = carried(total, first, running, plain, place, at, left > 0, ABOVE, SIZE)
        total = carried(total, second, running, plain, place + step, at, left > 1, ABOVE, SIZE)
        total = carried(total, third, running, plain, place + 2 * step, at, left > 2, ABOVE, SIZE)
        total = carried(total, fourth, running, plain, place + 3 * step, at, left > 3, ABOVE, SIZE)
        place += 4 * step
    tl.store(after + owner * SIZE + at, total, mask=inside)
