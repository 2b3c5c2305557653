"""Sums over segments of tokens on a GPU, and the running totals of segments."""

# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false
# In Triton's language a tl.constexpr is its value, which type checkers do not know.

import triton
import triton.language as tl

from ropewalk.kernels.linear.triton_features import exponential
from ropewalk.kernels.linear.triton_rows import (
    joined,
    load_features,
    load_operand,
    load_tables,
    load_values,
    mapped_pairs,
    members,
    place_of,
    rotate_pairs,
    segment_of,
    store_operand,
)
from ropewalk.kernels.linear.triton_weights import chunk_decay, far_weight, store_factors


@triton.jit
def row_products(out, cotangents, batch, head, begin, index, valid, V_DIM: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the product of output and cotangent of each row."""
    total = tl.zeros(index.shape, tl.float32)
    for start in range(0, V_DIM, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        o = load_values(out, batch, head, begin, index, valid, column, V_DIM, tl.float32)
        g = load_values(cotangents, batch, head, begin, index, valid, column, V_DIM, tl.float32)
        total += tl.sum(o * g, axis=1)
    return total


@triton.jit
def store_lanes(target, slot, a, b, lane, HALF: tl.constexpr):
    """Store the first and second members of a sum of y."""
    source = target + slot * (2 * HALF) + 2 * lane
    tl.store(source, a, mask=lane < HALF)
    tl.store(source + 1, b, mask=lane < HALF)


@triton.jit
def sum_back(
    stored, values, decay, band, sums, inner, low, slot, batch, head, begin, size, length, column, offset, is_first,
    GROUP: tl.constexpr, SHARE: tl.constexpr, FEATURES: tl.constexpr, V_DIM: tl.constexpr, QUERIES: tl.constexpr,
    NORMALIZED: tl.constexpr, DECAY: tl.constexpr, BAND: tl.constexpr, SEGMENT: tl.constexpr, CHUNK: tl.constexpr,
    STEP: tl.constexpr, LANES: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sum a segment from its end, decayed to the token before it, and store the sums after each chunk and of all.

    Rows were stored as operands: `stored` is the rotated features, the others, and the number of heads. The sums are
    stored at `slot`.
    """
    HALF: tl.constexpr = (FEATURES[0] + 1) // 2
    SIZE: tl.constexpr = 2 * HALF * (V_DIM + 1)
    STEPS: tl.constexpr = SEGMENT // STEP
    place = 2 * offset + tl.arange(0, 2 * LANES)
    at_sums = column[:, None] * (2 * HALF) + place[None, :]
    known = place < 2 * HALF
    inside = (column < V_DIM)[:, None] & known[None, :]
    total = tl.zeros((column.shape[0], 2 * LANES), tl.float32)
    plain = tl.zeros((2 * LANES,), tl.float32)
    for step in range(0, STEPS * GROUP):
        start = (STEPS - 1 - step // GROUP) * STEP
        index = start + tl.arange(0, STEP)
        valid = index < size
        virtual = head * GROUP + step % GROUP
        member = virtual // SHARE
        if step % (GROUP * (CHUNK // STEP)) == 0:
            chunk = slot * (SEGMENT // CHUNK) + start // CHUNK
            tl.store(inner + chunk * (2 * HALF * V_DIM) + at_sums, total.to(inner.dtype.element_ty), mask=inside)
            if is_first:
                tl.store(low + chunk * (2 * HALF) + place, plain, mask=known)
        x = load_operand(
            stored[0], batch, member, begin, index, valid, offset, stored[2], length, LANES, FEATURES, KIND
        )
        z = load_values(values, batch, member, begin, index, valid, column, V_DIM, KIND)
        y = x
        if NORMALIZED and (QUERIES or FEATURES[1] > 0):
            y = load_operand(
                stored[1], batch, member, begin, index, valid, offset, stored[2], length, LANES, FEATURES, KIND
            )
        y = y.to(tl.float32)
        if DECAY:
            tokens = tl.minimum(tl.maximum(size - start, 0), STEP)
            local, whole = chunk_decay(decay, begin, start, tokens, DECAY, STEP)
            far = exponential(local.to(tl.float32))[:, None]
            z, y = (z.to(tl.float32) * far).to(KIND), y * far
            if step % GROUP == 0:
                kept = exponential(whole.to(tl.float32))
                total, plain = total * kept, plain * kept
        if QUERIES and BAND > 0:
            # The factor with which keys before their band read a query.
            far = far_weight(band, virtual, BAND, False)
            total += far * tl.dot(tl.trans(z), x, input_precision=PRECISION)
            y *= far
        else:
            total = tl.dot(tl.trans(z), x, total, input_precision=PRECISION)
        if NORMALIZED:
            plain += tl.sum(y, axis=0)
    tl.store(sums + slot * SIZE + at_sums, total, mask=inside)
    if is_first:
        tl.store(sums + slot * SIZE + 2 * HALF * V_DIM + place, plain, mask=known)


@triton.jit(do_not_specialize=["row", "length", "owners", "count", "heads"])
def sum_segments(
    y, shift, cos, sin, z, out, inverse, weight, decay, band, begins, sums, inner, low, fade, factors, rotated, mapped,
    row, y_b, y_h, y_n, z_b, z_h, z_n, o_b, o_h, o_n, d_b, d_h, d_n, table_b, table_h, length, owners, count, heads,
    factor,
    HEADS: tl.constexpr, GROUP: tl.constexpr, SHARE: tl.constexpr, FEATURES: tl.constexpr, V_DIM: tl.constexpr,
    MAP: tl.constexpr, QUERIES: tl.constexpr, NORMALIZED: tl.constexpr, DECAY: tl.constexpr, DIRECTIONS: tl.constexpr,
    APART: tl.constexpr, BAND: tl.constexpr, READERS: tl.constexpr, PACKED: tl.constexpr, SEGMENT: tl.constexpr,
    CHUNK: tl.constexpr, STEP: tl.constexpr, LANES: tl.constexpr, COLUMNS: tl.constexpr, LANE_BLOCKS: tl.constexpr,
    KIND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sum z (R y)^T and y over each segment, and over the GROUP heads that share a sum.

    A sum of keys is decayed to the segment's last token, one of queries to the token before its first. With two
    DIRECTIONS, the first is summed as for keys, also if y are queries, and `sum_back` sums the second. The sums of y
    over each chunk, decayed to its end, are stored in `low`. APART: the sums of the segment before each chunk are
    stored instead, also those of z (R y)^T, in `inner`, and the rows as operands, in `rotated` and `mapped`. Only then
    may a chunk be several steps. QUERIES: y are queries and z the cotangents of their outputs. Rotated rows are
    multiplied by `inverse`, the others by the cotangent of the denominator, which is stored in `weight`. With a BAND,
    the factors of the READERS query heads per sum are stored in `factors`.
    """
    HALF: tl.constexpr = (FEATURES[0] + 1) // 2
    SIZE: tl.constexpr = 2 * HALF * (V_DIM + 1)
    batch, head, number = place_of(owners, HEADS)
    block = tl.program_id(1)
    offset = (block % LANE_BLOCKS) * LANES
    lane = offset + tl.arange(0, LANES)
    column = (block // LANE_BLOCKS) * COLUMNS + tl.arange(0, COLUMNS)
    begin, end, _first, _last = segment_of(begins, number, count, length, SEGMENT, PACKED)
    after: tl.constexpr = 1 if DIRECTIONS == 1 and QUERIES else 0
    size = (end - begin).to(tl.int32)
    side, table = (y, shift, y_b, y_h, y_n, heads), (cos, sin, row, table_b, table_h)
    values, outs, logs = (z, z_b, z_h, z_n), (out, o_b, o_h, o_n), (decay + batch * d_b + head * d_h, d_n)
    slot = (batch * HEADS + head) * count + number
    total = tl.zeros((COLUMNS, 2 * LANES), tl.float32)
    plain_a = tl.zeros((LANES,), tl.float32)
    plain_b = tl.zeros((LANES,), tl.float32)
    low_a = tl.zeros((LANES,), tl.float32)
    low_b = tl.zeros((LANES,), tl.float32)
    gone = 0.0
    place = 2 * offset + tl.arange(0, 2 * LANES)
    at_sums = column[:, None] * (2 * HALF) + place[None, :]
    inside = (column < V_DIM)[:, None] & (place < 2 * HALF)[None, :]
    tl.static_assert(APART or STEP == CHUNK)
    CHUNKS: tl.constexpr = SEGMENT // CHUNK
    STEPS: tl.constexpr = SEGMENT // STEP
    for step in range(0, STEPS * GROUP):
        start = (step // GROUP + after * (STEPS - 1 - 2 * (step // GROUP))) * STEP
        chunk = start // CHUNK
        index = start + tl.arange(0, STEP)
        valid = index < size
        virtual = head * GROUP + step % GROUP
        member = virtual // SHARE
        if APART and step % (GROUP * (CHUNK // STEP)) == 0:
            target = inner + (slot * CHUNKS + chunk) * (2 * HALF * V_DIM)
            tl.store(target + at_sums, total.to(inner.dtype.element_ty), mask=inside)
            if block // LANE_BLOCKS == 0:
                store_lanes(low, slot * CHUNKS + chunk, plain_a, plain_b, lane, HALF)
        e, f, shifts = load_features(
            side, batch, member, begin, index, valid, offset, length, LANES, FEATURES, MAP, True
        )
        z_tile = load_values(values, batch, member, begin, index, valid, column, V_DIM, KIND)
        e, f = mapped_pairs(e, f, shifts, MAP)
        r, t = e, f
        if FEATURES[1]:
            c, s = load_tables(table, batch, member, begin, index, valid, offset, LANES, FEATURES)
            r, t = rotate_pairs(e, f, c, s, FEATURES)
        if QUERIES:
            if NORMALIZED:
                at = (batch * heads + member) * length + begin + index
                over = tl.load(inverse + at, mask=valid, other=0.0)
                if V_DIM <= COLUMNS:
                    o = load_values(outs, batch, member, begin, index, valid, column, V_DIM, tl.float32)
                    pull = -over * tl.sum(o * z_tile.to(tl.float32), axis=1)
                else:
                    pull = -over * row_products(outs, values, batch, member, begin, index, valid, V_DIM, COLUMNS)
                if block == 0:
                    tl.store(weight + at, pull, mask=valid)
                r, t, e, f = r * over[:, None], t * over[:, None], e * pull[:, None], f * pull[:, None]
            else:
                # Cotangents of denominators are 0.
                r, t, e, f = r * factor, t * factor, e * 0.0, f * 0.0
        # A program reads its own rows again. Otherwise one of the programs that share a row is enough.
        if APART and (DIRECTIONS == 2 or ((block // LANE_BLOCKS == 0) & (virtual % SHARE == 0))):
            store_operand(
                rotated, joined(r, t, FEATURES, KIND), batch, member, begin, index, valid, offset, heads, length,
                LANES, FEATURES,
            )  # fmt: skip
            # Without a rotation, the features of keys are the same, but not those of queries, which have other factors.
            if NORMALIZED and (QUERIES or FEATURES[1] > 0):
                store_operand(
                    mapped, joined(e, f, FEATURES, KIND), batch, member, begin, index, valid, offset, heads, length,
                    LANES, FEATURES,
                )  # fmt: skip
        if QUERIES and BAND > 0:
            # Keys beyond the band share one factor per query head. Queries after them read keys before.
            far = far_weight(band, virtual, BAND, DIRECTIONS == 2)
            r, t, e, f = r * far, t * far, e * far, f * far
        if DECAY:
            tokens = tl.minimum(tl.maximum(size - start, 0), STEP)
            local, whole = chunk_decay(logs, begin, start, tokens, DECAY, STEP)
            far = exponential((after * local + (1 - after) * (whole - local)).to(tl.float32))[:, None]
            r, t, e, f = r * far, t * far, e * far, f * far
            if step % GROUP == 0:
                kept = exponential(whole.to(tl.float32))
                total, plain_a, plain_b = total * kept, plain_a * kept, plain_b * kept
                gone += whole.to(tl.float32)
        total = tl.dot(tl.trans(z_tile), joined(r, t, FEATURES, KIND), total, input_precision=PRECISION)
        sum_a, sum_b = tl.sum(e, axis=0), tl.sum(f, axis=0)
        plain_a, plain_b = plain_a + sum_a, plain_b + sum_b
        if not APART:
            if GROUP == 1:
                low_a, low_b = sum_a, sum_b
            else:
                is_first = step % GROUP == 0
                low_a, low_b = tl.where(is_first, 0.0, low_a) + sum_a, tl.where(is_first, 0.0, low_b) + sum_b
            if block // LANE_BLOCKS == 0:
                # Of several heads, the last one stores the sum over all.
                store_lanes(low, slot * CHUNKS + chunk, low_a, low_b, lane, HALF)
    tl.store(sums + slot * SIZE + at_sums, total, mask=inside)
    if block // LANE_BLOCKS == 0:
        store_lanes(sums + slot * SIZE + 2 * HALF * V_DIM, slot * 0, plain_a, plain_b, lane, HALF)
    if DECAY and block == 0:
        tl.store(fade + (batch * HEADS + head) * count + number, gone)
    if DIRECTIONS == 2:
        # The rows that this program stored are complete.
        tl.debug_barrier()
        sum_back(
            (rotated, mapped, heads), values, logs, band, sums, inner, low,
            slot + (owners * count).to(tl.int64), batch, head, begin, size, length, column, offset,
            block // LANE_BLOCKS == 0, GROUP, SHARE, FEATURES, V_DIM, QUERIES, NORMALIZED, DECAY, BAND, SEGMENT, CHUNK,
            STEP, LANES, KIND, PRECISION,
        )  # fmt: skip
    if BAND > 0:
        BLOCKS: tl.constexpr = 2 * (1 + (BAND + CHUNK - 2) // CHUNK)
        SIDE: tl.constexpr = -1 if DIRECTIONS == 1 else 0
        if (tl.program_id(0) < HEADS) & (block == 0):
            for step in range(0, READERS * BLOCKS):
                store_factors(factors, band, head * READERS + step // BLOCKS, step % BLOCKS, BAND, SIDE, CHUNK)


@triton.jit
def carried(
    total, kept, segment_sum, running, plain, slot, at, valid, ABOVE: tl.constexpr, SIZE: tl.constexpr,
    ALL: tl.constexpr,
):  # fmt: skip
    """Store the total before a segment if it is valid, and return the total after it."""
    if not ALL:
        tl.store(running + slot * ABOVE + at, total.to(running.dtype.element_ty), mask=valid & (at < ABOVE))
        tl.store(plain + slot * (SIZE - ABOVE) + at - ABOVE, total, mask=valid & (at >= ABOVE) & (at < SIZE))
    return tl.where(valid, total * kept + segment_sum, total)


@triton.jit(do_not_specialize=["heads", "count"])
def run_totals(
    sums, fade, before, after, running, plain, starts, heads, count,
    FEATURES: tl.constexpr, V_DIM: tl.constexpr, HAS_BEFORE: tl.constexpr, DECAYS: tl.constexpr, PACKED: tl.constexpr,
    DIRECTIONS: tl.constexpr, REVERSE: tl.constexpr, ALL: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Store the total of the segments before each segment, or after it if REVERSE, and the total of all in `after`.

    Sums are stored in `running`, in the dtype of operands, and in `plain`, in the order of `sum_segments`: one per
    segment, or only the total if ALL. `before` and `after` are flat sums. `starts` contains the first segment of each
    packed sequence.
    """
    HALF: tl.constexpr = (FEATURES[0] + 1) // 2
    ABOVE: tl.constexpr = 2 * HALF * V_DIM
    SIZE: tl.constexpr = ABOVE + 2 * HALF
    FLAT: tl.constexpr = FEATURES[0] * (V_DIM + 1)
    owner = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = at < SIZE
    if DIRECTIONS == 1:
        reverse = REVERSE
    else:
        reverse = tl.program_id(2)
        other = reverse * (heads if PACKED else tl.num_programs(0)).to(tl.int64)
        sums += other * count * SIZE
        running += other * count * ABOVE
        plain += other * count * (SIZE - ABOVE)
    first, second, has_first, has_second = members(at % (2 * HALF) // 2, FEATURES)
    feature = tl.where(at % 2 == 0, first, second)
    has = inside & tl.where(at % 2 == 0, has_first, has_second)
    column = at // (2 * HALF)
    flat = tl.where(column < V_DIM, feature * V_DIM + column, FEATURES[0] * V_DIM + feature)
    total = tl.zeros((WIDTH,), tl.float32)
    if HAS_BEFORE:
        total = tl.load(before + owner * FLAT + flat, mask=has, other=0.0)
    if PACKED:
        sequence, head = owner // heads, owner % heads
        start, stop = tl.load(starts + sequence), tl.load(starts + sequence + 1)
        base = head * count
    else:
        start, stop = owner * 0, owner * 0 + count
        base = owner * count
    slot, step = base + start + reverse * (stop - 1 - start), 1 - 2 * reverse
    # Four segments are loaded before the first is added, to hide the latency of memory.
    for segment in range(0, (stop - start).to(tl.int32), 4):
        left = tl.where(inside, (stop - start).to(tl.int32) - segment, 0)
        source = sums + slot * SIZE + at
        sum_0 = tl.load(source, mask=left > 0, other=0.0)
        sum_1 = tl.load(source + step * SIZE, mask=left > 1, other=0.0)
        sum_2 = tl.load(source + 2 * step * SIZE, mask=left > 2, other=0.0)
        sum_3 = tl.load(source + 3 * step * SIZE, mask=left > 3, other=0.0)
        kept_0, kept_1, kept_2, kept_3 = 1.0, 1.0, 1.0, 1.0
        if DECAYS:
            logs = fade + slot + at * 0
            kept_0 = exponential(tl.load(logs, mask=left > 0, other=0.0))
            kept_1 = exponential(tl.load(logs + step, mask=left > 1, other=0.0))
            kept_2 = exponential(tl.load(logs + 2 * step, mask=left > 2, other=0.0))
            kept_3 = exponential(tl.load(logs + 3 * step, mask=left > 3, other=0.0))
        total = carried(total, kept_0, sum_0, running, plain, slot, at, left > 0, ABOVE, SIZE, ALL)
        total = carried(total, kept_1, sum_1, running, plain, slot + step, at, left > 1, ABOVE, SIZE, ALL)
        total = carried(total, kept_2, sum_2, running, plain, slot + 2 * step, at, left > 2, ABOVE, SIZE, ALL)
        total = carried(total, kept_3, sum_3, running, plain, slot + 3 * step, at, left > 3, ABOVE, SIZE, ALL)
        slot += 4 * step
    # Of two directions, the first.
    tl.store(after + owner * FLAT + flat, total, mask=has & (at >= tl.program_id(2) * SIZE))
    if ALL:
        tl.store(running + owner * ABOVE + at, total.to(running.dtype.element_ty), mask=at < ABOVE)
        tl.store(plain + owner * (SIZE - ABOVE) + at - ABOVE, total, mask=(at >= ABOVE) & inside)
