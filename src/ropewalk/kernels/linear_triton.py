"""Linear attention on a GPU: sums over segments of tokens, their running totals, and what queries read of them.

Features are kept as two tiles, first and second members of pairs, so that the rotation is arithmetic between them and
a product over features is the sum of two. Features that do not turn are paired with each other.
"""

# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false
# A kernel is Triton's language, in which a constexpr is whatever it was given.

import triton
import triton.language as tl


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
        turns = lane < PAIRS
        rest = lane - PAIRS
        first = tl.where(turns, START + lane, BASE + rest)
        second = tl.where(turns, START + PAIRS + lane, BASE + HALF + rest)
        has_first = turns | (rest < HALF)
        has_second = turns | (HALF + rest < STILL)
    return first, second, has_first, has_second


@triton.jit
def load_pairs(source, there, lane, FEATURES: tl.constexpr):
    """First and second members at rows that start at `source`; 0 where there is nothing."""
    first, second, has_first, has_second = members(lane, FEATURES)
    a = tl.load(source[:, None] + first[None, :], mask=there[:, None] & has_first[None, :], other=0.0)
    b = tl.load(source[:, None] + second[None, :], mask=there[:, None] & has_second[None, :], other=0.0)
    return a, b


@triton.jit
def mapped(x, shift, there, MAP: tl.constexpr):
    """The feature map, in float32; 0 where there is no feature. MAP counts as FEATURE_MAPS does."""
    x = x.to(tl.float32)
    if MAP == 0:
        # By comparisons: a minimum or maximum would make a number of NaN.
        x = tl.where(x > 0, x + 1, tl.exp(tl.where(x > 0, 0.0, x)))
    elif MAP == 1:
        x = tl.where(x <= 0, 0.0, x)
    elif MAP == 2:
        x = tl.where(x <= 0, 0.0, x)
        x = x * x
    elif MAP == 4:
        x = tl.exp(x - shift[:, None])
    return tl.where(there, x, 0.0)


@triton.jit
def tables(cos, sin, rows, there, lane, FEATURES: tl.constexpr):
    """cos and sin of rows of the tables; 1 and 0 for features that do not turn."""
    PAIRS: tl.constexpr = FEATURES[1]
    pair = lane - FEATURES[2] // 2 if FEATURES[3] else lane
    known = there[:, None] & ((pair >= 0) & (pair < PAIRS))[None, :]
    at = rows[:, None] * PAIRS + pair[None, :]
    return tl.load(cos + at, mask=known, other=1.0), tl.load(sin + at, mask=known, other=0.0)


@triton.jit
def features(x, shift, cos, sin, offsets, there, lane, FEATURES: tl.constexpr, MAP: tl.constexpr):
    """Features of rows and the same turned: a, b, turned a, turned b. `offsets` are of rows in x, shift and tables."""
    a, b = load_pairs(x + offsets[0], there, lane, FEATURES)
    _, _, has_first, has_second = members(lane, FEATURES)
    moved = tl.zeros(offsets[1].shape, tl.float32)
    if MAP == 4:
        moved = tl.load(shift + offsets[1], mask=there, other=0.0)
    a = mapped(a, moved, there[:, None] & has_first[None, :], MAP)
    b = mapped(b, moved, there[:, None] & has_second[None, :], MAP)
    u, v = a, b
    if FEATURES[1]:
        c, s = tables(cos, sin, offsets[2], there, lane, FEATURES)
        u, v = a * c - b * s, a * s + b * c
    return a, b, u, v


@triton.jit
def values(v, scale, offsets, there, column, V_DIM: tl.constexpr, SCALED: tl.constexpr, KIND: tl.constexpr):
    """Rows of values, each over its scale, as what products take: KIND."""
    mask = there[:, None] & (column < V_DIM)[None, :]
    x = tl.load(v + offsets[0][:, None] + column[None, :], mask=mask, other=0.0)
    if SCALED:
        x = x.to(tl.float32) / tl.load(scale + offsets[1], mask=there, other=1.0)[:, None]
    return x.to(KIND)


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
def row_offsets(token, strides, batch, head, heads, length, table):
    """Where rows lie in the tensor, in [batch, heads, seq], and in the tables."""
    at = batch * strides[0] + head * strides[1] + token * strides[2]
    flat = (batch * heads + head) * length + token
    return at, flat, table[0] + batch * table[1] + head * table[2] + token


@triton.jit
def load_sums(sums, lane, column, V_DIM: tl.constexpr, FEATURES: tl.constexpr):
    """A block of sum (R k) v^T, [lanes, columns] of first and of second members."""
    first, second, has_first, has_second = members(lane, FEATURES)
    inside = (column < V_DIM)[None, :]
    at = column[None, :]
    a = tl.load(sums + first[:, None] * V_DIM + at, mask=has_first[:, None] & inside, other=0.0)
    b = tl.load(sums + second[:, None] * V_DIM + at, mask=has_second[:, None] & inside, other=0.0)
    return a, b


@triton.jit
def load_below(sums, lane, V_DIM: tl.constexpr, FEATURES: tl.constexpr):
    """The sum of k, which lies behind the other."""
    first, second, has_first, has_second = members(lane, FEATURES)
    z = sums + FEATURES[0] * V_DIM
    return tl.load(z + first, mask=has_first, other=0.0), tl.load(z + second, mask=has_second, other=0.0)


@triton.jit(do_not_specialize=["length", "row", "table_b", "table_h", "count"])
def sum_segments(
    x, v, shift, scale, weight, cos, sin, begins, sums,
    x_b, x_h, x_n, v_b, v_h, v_n, length, row, table_b, table_h, count,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, FEATURES: tl.constexpr, V_DIM: tl.constexpr, MAP: tl.constexpr,
    SCALED: tl.constexpr, PACKED: tl.constexpr, SEGMENT: tl.constexpr, CHUNK: tl.constexpr,
    LANES: tl.constexpr, COLUMNS: tl.constexpr, LANE_BLOCKS: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Of each segment the sums of (R x) v^T and of x, over the GROUP heads that share a sum.

    SCALED values are over `scale`, and x in its plain sum times `weight`: what the backward sums.
    """
    number = tl.program_id(1)
    batch, head = (tl.program_id(0) // KV_HEADS).to(tl.int64), (tl.program_id(0) % KV_HEADS).to(tl.int64)
    block = tl.program_id(2)
    lane = (block % LANE_BLOCKS) * LANES + tl.arange(0, LANES)
    column = (block // LANE_BLOCKS) * COLUMNS + tl.arange(0, COLUMNS)
    begin, end = segment_of(begins, number, length, SEGMENT, PACKED)
    table = (row, table_b, table_h)
    sum_a = tl.zeros((LANES, COLUMNS), tl.float32)
    sum_b = tl.zeros((LANES, COLUMNS), tl.float32)
    low_a = tl.zeros((LANES,), tl.float32)
    low_b = tl.zeros((LANES,), tl.float32)
    for step in range(0, GROUP * (SEGMENT // CHUNK)):
        member = head * GROUP + step % GROUP
        token = begin + (step // GROUP) * CHUNK + tl.arange(0, CHUNK)
        there = token < end
        at = row_offsets(token, (x_b, x_h, x_n), batch, member, KV_HEADS * GROUP, length, table)
        at_v = row_offsets(token, (v_b, v_h, v_n), batch, member, KV_HEADS * GROUP, length, table)
        a, b, u, w = features(x, shift, cos, sin, at, there, lane, FEATURES, MAP)
        y = values(v, scale, at_v, there, column, V_DIM, SCALED, KIND)
        sum_a = tl.dot(tl.trans(u.to(KIND)), y, sum_a, input_precision=PRECISION)
        sum_b = tl.dot(tl.trans(w.to(KIND)), y, sum_b, input_precision=PRECISION)
        if SCALED:
            factor = tl.load(weight + at[1], mask=there, other=0.0)[:, None]
            a, b = a * factor, b * factor
        low_a += tl.sum(a, axis=0)
        low_b += tl.sum(b, axis=0)
    first, second, has_first, has_second = members(lane, FEATURES)
    inside = (column < V_DIM)[None, :]
    own = sums + (tl.program_id(0).to(tl.int64) * count + number) * (FEATURES[0] * (V_DIM + 1))
    tl.store(own + first[:, None] * V_DIM + column[None, :], sum_a, mask=has_first[:, None] & inside)
    tl.store(own + second[:, None] * V_DIM + column[None, :], sum_b, mask=has_second[:, None] & inside)
    if block // LANE_BLOCKS == 0:
        z = own + FEATURES[0] * V_DIM
        tl.store(z + first, low_a, mask=has_first)
        tl.store(z + second, low_b, mask=has_second)


@triton.jit(do_not_specialize=["width", "heads", "count"])
def run_totals(
    sums, before, after, starts, width, heads, count,
    GIVEN: tl.constexpr, PACKED: tl.constexpr, REVERSE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Each segment's sums become the total of the segments before it, or behind it where REVERSE; `after` is of all.

    `starts` says at which segment each packed sequence starts. The loop reads one segment ahead of what it writes.
    """
    owner = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = at < width
    total = tl.zeros((WIDTH,), tl.float32)
    if GIVEN:
        total = tl.load(before + owner * width + at, mask=inside, other=0.0)
    if PACKED:
        sequence, head = owner // heads, owner % heads
        segment, stop = tl.load(starts + sequence), tl.load(starts + sequence + 1)
        base = sums + head * count * width
    else:
        segment, stop = owner * 0, owner * 0 + count
        base = sums + owner * count * width
    left = tl.where(inside, stop - segment, 0)
    if REVERSE:
        place, step = base + (stop - 1) * width + at, -width
    else:
        place, step = base + segment * width + at, width
    own = tl.load(place, mask=left > 0, other=0.0)
    while segment < stop:
        following = place + step
        left -= 1
        more = tl.load(following, mask=left > 0, other=0.0)
        tl.store(place, total, mask=inside)
        total += own
        own, place = more, following
        segment += 1
    tl.store(after + owner * width + at, total, mask=inside)


@triton.jit
def sums_of(
    sums, begins, owner, segment, count, step, SHARED: tl.constexpr, SIZE: tl.constexpr, CAUSAL: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Where the sums lie that rows of a segment read: its running sums, or, without an order, those of the sequence."""
    own = sums + owner * step
    if CAUSAL:
        own += segment * SIZE
    elif PACKED:
        own += tl.load(begins + 2 * count + segment) * step * SHARED
    return own


@triton.jit(
    do_not_specialize=["length", "row", "table_b", "table_h", "y_row", "y_table_b", "y_table_h", "count", "owner_step"]
)
def read_values(
    x, y, v, x_shift, y_shift, scale, cos, sin, y_cos, y_sin, begins, sums, out, below,
    x_b, x_h, x_n, y_b, y_h, y_n, v_b, v_h, v_n, o_b, o_h, o_n,
    length, row, table_b, table_h, y_row, y_table_b, y_table_h, count, owner_step,
    X_HEADS: tl.constexpr, X_GROUP: tl.constexpr, Y_GROUP: tl.constexpr, FEATURES: tl.constexpr,
    V_DIM: tl.constexpr, X_MAP: tl.constexpr, Y_MAP: tl.constexpr, CAUSAL: tl.constexpr, REVERSE: tl.constexpr,
    PACKED: tl.constexpr, SEGMENT: tl.constexpr, CHUNK: tl.constexpr, LANES: tl.constexpr, COLUMNS: tl.constexpr,
    KIND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What each row of x reads of the values: forward, queries of keys and values, over their denominator.

    A row reads what was summed before its chunk, and the tokens of the chunk themselves. REVERSE, for the gradient of
    values: keys read of the queries behind them, with values over `scale` and without a denominator. X_GROUP heads
    of x share a sum, Y_GROUP heads of y are in one.
    """
    batch, head = (tl.program_id(0) // X_HEADS).to(tl.int64), (tl.program_id(0) % X_HEADS).to(tl.int64)
    SHARED: tl.constexpr = X_HEADS // X_GROUP
    lane = tl.arange(0, LANES)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    number = tl.program_id(1)
    begin, end = segment_of(begins, number, length, SEGMENT, PACKED)
    own = sums_of(
        sums, begins, batch * SHARED + head // X_GROUP, number.to(tl.int64), count, owner_step,
        SHARED, FEATURES[0] * (V_DIM + 1), CAUSAL, PACKED,
    )  # fmt: skip
    table, y_table = (row, table_b, table_h), (y_row, y_table_b, y_table_h)
    sum_a, sum_b = load_sums(own, lane, column, V_DIM, FEATURES)
    low_a, low_b = load_below(own, lane, V_DIM, FEATURES)
    for step in range(0, SEGMENT // CHUNK):
        index = SEGMENT // CHUNK - 1 - step if REVERSE else step
        token = begin + index * CHUNK + tl.arange(0, CHUNK)
        there = token < end
        at = row_offsets(token, (x_b, x_h, x_n), batch, head, X_HEADS, length, table)
        a, b, u, w = features(x, x_shift, cos, sin, at, there, lane, FEATURES, X_MAP)
        p, r = u.to(KIND), w.to(KIND)
        total = tl.dot(p, sum_a.to(KIND), input_precision=PRECISION)
        total = tl.dot(r, sum_b.to(KIND), total, input_precision=PRECISION)
        if not REVERSE:
            under = tl.sum(a * low_a[None, :] + b * low_b[None, :], axis=1)
        if CAUSAL:
            here = tl.arange(0, CHUNK)
            seen = here[:, None] <= here[None, :] if REVERSE else here[:, None] >= here[None, :]
            for other in tl.static_range(Y_GROUP):
                member = (head // X_GROUP) * Y_GROUP + other
                at_y = row_offsets(token, (y_b, y_h, y_n), batch, member, SHARED * Y_GROUP, length, y_table)
                at_v = row_offsets(token, (v_b, v_h, v_n), batch, member, SHARED * Y_GROUP, length, y_table)
                c, d, e, f = features(y, y_shift, y_cos, y_sin, at_y, there, lane, FEATURES, Y_MAP)
                z = values(v, scale, at_v, there, column, V_DIM, REVERSE, KIND)
                g, h = e.to(KIND), f.to(KIND)
                scores = tl.dot(p, tl.trans(g), input_precision=PRECISION)
                scores = tl.dot(r, tl.trans(h), scores, input_precision=PRECISION)
                scores = tl.where(seen, scores, 0.0)
                total = tl.dot(scores.to(KIND), z, total, input_precision=PRECISION)
                sum_a = tl.dot(tl.trans(g), z, sum_a, input_precision=PRECISION)
                sum_b = tl.dot(tl.trans(h), z, sum_b, input_precision=PRECISION)
                if not REVERSE:
                    plain = tl.dot(a.to(KIND), tl.trans(c.to(KIND)), input_precision=PRECISION)
                    plain = tl.dot(b.to(KIND), tl.trans(d.to(KIND)), plain, input_precision=PRECISION)
                    under += tl.sum(tl.where(seen, plain, 0.0), axis=1)
                    low_a += tl.sum(c, axis=0)
                    low_b += tl.sum(d, axis=0)
        if not REVERSE:
            # No feature of any key that is seen: 0, as `linear_torch.divide` has it.
            total = total / tl.where(under == 0, float("inf"), under)[:, None]
            if tl.program_id(2) == 0:
                tl.store(below + at[1], under, mask=there)
        target = out + batch * o_b + head * o_h + token * o_n
        mask = there[:, None] & (column < V_DIM)[None, :]
        tl.store(target[:, None] + column[None, :], total.to(out.dtype.element_ty), mask=mask)
