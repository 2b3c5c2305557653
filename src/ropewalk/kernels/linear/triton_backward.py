"""Gradients of queries and keys of linear attention on a GPU."""

# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false
# In Triton's language a tl.constexpr is its value, which type checkers do not know.

import triton
import triton.language as tl

from ropewalk.kernels.linear.triton_features import exponential, slope
from ropewalk.kernels.linear.triton_read import load_others, slot_of, value_rows
from ropewalk.kernels.linear.triton_rows import (
    joined,
    load_features,
    load_plain,
    load_sums,
    load_tables,
    load_values,
    mapped_pairs,
    parted,
    place_of,
    rotate_pairs,
    segment_of,
    store_pairs,
)
from ropewalk.kernels.linear.triton_weights import (
    added_weights,
    carried_decay,
    chunk_decay,
    far_weights,
    later_weights,
    pair_weights,
    weighted,
)


@triton.jit
def add_diagonals(target, tile, CHUNK: tl.constexpr):
    """Store the sums of the diagonals of a tile [x, y], by y - x + CHUNK - 1."""
    row, place = tl.arange(0, CHUNK), tl.arange(0, 2 * CHUNK)
    # Row x shifted by x, so that diagonals become columns.
    at = place[None, :] + row[:, None] - (CHUNK - 1)
    inside = (at >= 0) & (at < CHUNK)
    moved = tl.gather(tile, tl.where(inside, at, 0), axis=1)
    tl.store(target + place, tl.sum(tl.where(inside, moved, 0.0), axis=0))


@triton.jit
def feature_rows(
    x_side, y_side, x_table, y_table, p, values, rows, decay, band, begins, running, plain, low, out, block,
    of_band, of_far, length, owners, count, slots, factor,
    X_HEADS: tl.constexpr, X_GROUP: tl.constexpr, Y_GROUP: tl.constexpr, X_SHARE: tl.constexpr, Y_SHARE: tl.constexpr,
    FEATURES: tl.constexpr, V_DIM: tl.constexpr, X_MAP: tl.constexpr, Y_MAP: tl.constexpr, KEYS: tl.constexpr,
    NORMALIZED: tl.constexpr, SIDE: tl.constexpr, ALL: tl.constexpr, DECAY: tl.constexpr, BAND: tl.constexpr,
    LEAD: tl.constexpr, LEARNED: tl.constexpr, PACKED: tl.constexpr, SEGMENT: tl.constexpr, CHUNK: tl.constexpr,
    LANES: tl.constexpr, COLUMNS: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of x of a segment.

    x are queries, y the keys that they read, `values` those of y, and p the cotangents of x. KEYS: x are keys, y the
    queries that read them, `values` the cotangents of y, and p the values of x. LEARNED: x are queries, and the
    gradient of the band is computed too.
    """
    HEADS: tl.constexpr = X_HEADS // X_GROUP
    DIRECTION: tl.constexpr = -1 if SIDE > 0 else 1
    WEIGHTED: tl.constexpr = DECAY != 0 or (BAND > 0 and KEYS)
    # As in `value_rows`.
    ZEROS: tl.constexpr = SIDE == 0 or LEAD > 0 or (KEYS and not NORMALIZED)
    batch, head, number = place_of(owners, X_HEADS)
    shared, x_head = head // X_GROUP, head // X_SHARE
    offset = block * LANES
    column = tl.arange(0, COLUMNS)
    begin, end, first, last = segment_of(begins, number, count, length, SEGMENT, PACKED)
    size = (end - begin).to(tl.int32)
    lowest, highest = (first - begin).to(tl.int32), (last - begin).to(tl.int32)
    logs = decay[0] + batch * decay[1] + shared * decay[2], decay[3]
    slot = slot_of(begins, number, count, batch, shared, HEADS, ALL, PACKED)
    sums = load_sums(running, slot, column, offset, LANES, FEATURES, V_DIM).to(tl.float32)
    plain_a, plain_b = load_plain(plain, slot, offset, LANES, FEATURES)
    if SIDE == 0 and not ALL:
        later = load_sums(running, slots + slot, column, offset, LANES, FEATURES, V_DIM)
        plain_later_a, plain_later_b = load_plain(plain, slots + slot, offset, LANES, FEATURES)
    chunks = (size + CHUNK - 1) // CHUNK
    far_total = tl.zeros((CHUNK,), tl.float32)
    later_total = tl.zeros((CHUNK,), tl.float32)
    for step in range(0, chunks):
        chunk = chunks - 1 - step if SIDE > 0 else step
        index = chunk * CHUNK + tl.arange(0, CHUNK)
        valid = index < size
        cotangents = load_values(p, batch, x_head, begin, index, valid, column, V_DIM, KIND)
        over = tl.zeros((CHUNK,), tl.float32) + factor
        pull = tl.zeros((CHUNK,), tl.float32)
        if NORMALIZED and not KEYS:
            at = (batch * x_side[5] + x_head) * length + begin + index
            over = tl.load(rows[0] + at, mask=valid, other=0.0)
            pull = tl.load(rows[1] + at, mask=valid, other=0.0)
        local, whole = chunk_decay(logs, begin, chunk * CHUNK, tl.minimum(size - chunk * CHUNK, CHUNK), DECAY, CHUNK)
        near = tl.zeros((CHUNK,), tl.float32) + 1.0
        if DECAY:
            near = carried_decay(local, whole, SIDE)
        if BAND and not KEYS:
            near *= far_weights(band, head, SIDE <= 0, BAND, KEYS)
        top = tl.dot(cotangents, sums.to(KIND), input_precision=PRECISION)
        if DECAY or BAND:
            top = top * near[:, None]
        # The sums of unrotated features of the rows before the chunk, and of those that are visited.
        low_a, low_b = near[:, None] * plain_a[None, :], near[:, None] * plain_b[None, :]
        under = tl.zeros((CHUNK, 2 * LANES), tl.float32)
        if LEARNED:
            m, n, shifts = load_features(
                x_side, batch, x_head, begin, index, valid, offset, length, LANES, FEATURES, X_MAP, False
            )
            a, b = mapped_pairs(m, n, shifts, X_MAP)
            u, w = a, b
            if FEATURES[1]:
                c, s = load_tables(x_table, batch, x_head, begin, index, valid, offset, LANES, FEATURES)
                u, w = rotate_pairs(a, b, c, s, FEATURES)
            top_a, top_b = parted(top)
            far_total += over * tl.sum(u * top_a + w * top_b, axis=1)
            if NORMALIZED:
                far_total += pull * tl.sum(a * low_a + b * low_b, axis=1)
        if SIDE == 0 and not ALL:
            near = later_weights(logs, band, head, index, size, DECAY, BAND, KEYS)[:, None]
            more = near * tl.dot(cotangents, later.to(KIND), input_precision=PRECISION)
            more_a, more_b = near * plain_later_a[None, :], near * plain_later_b[None, :]
            top, low_a, low_b = top + more, low_a + more_a, low_b + more_b
            if LEARNED:
                top_a, top_b = parted(more)
                later_total += over * tl.sum(u * top_a + w * top_b, axis=1)
                if NORMALIZED:
                    later_total += pull * tl.sum(a * more_a + b * more_b, axis=1)
        if not ALL:
            if DECAY:
                gone = exponential(whole.to(tl.float32))
                sums, plain_a, plain_b = sums * gone, plain_a * gone, plain_b * gone
            visits = 1 + LEAD // CHUNK
            if SIDE == 0:
                visits = chunks - chunk + 2 * (LEAD // CHUNK)
            for visit in range(0, visits * Y_GROUP):
                other = (chunk + DIRECTION * (visit // Y_GROUP)) * CHUNK - DIRECTION * LEAD + tl.arange(0, CHUNK)
                virtual = shared * Y_GROUP + visit % Y_GROUP
                far = added_weights(local, whole, band, virtual, SIDE, DECAY, BAND, KEYS)
                operand, kept, y_unrotated, z = load_others(
                    y_side, y_table, values, rows, batch, virtual // Y_SHARE, begin, other,
                    (other >= lowest) & (other < highest), offset, column, length, factor, near, near, far, LANES,
                    FEATURES, V_DIM, Y_MAP, KEYS, NORMALIZED, NORMALIZED, False, ZEROS, WEIGHTED, KIND,
                )  # fmt: skip
                weight = pair_weights(
                    index, other, local, logs, band, virtual if KEYS else head, SIDE, DECAY, BAND, KEYS
                )
                moved = tl.dot(cotangents, tl.trans(z), input_precision=PRECISION)
                if LEARNED:
                    scores = tl.dot(joined(u, w, KIND), tl.trans(operand), input_precision=PRECISION)
                    gradient = scores * moved * over[:, None]
                    if NORMALIZED:
                        scores = tl.dot(joined(a, b, KIND), tl.trans(y_unrotated), input_precision=PRECISION)
                        gradient += scores * pull[:, None]
                    gradient = tl.where(valid[:, None], gradient * weight, 0.0)
                    place = ((block * owners + batch * X_HEADS + head) * count + number) * (SEGMENT // CHUNK) + chunk
                    place = place * ((SEGMENT // CHUNK if SIDE == 0 else 1) + (2 - SIDE * SIDE) * (LEAD // CHUNK))
                    add_diagonals(of_band + (place + visit) * (2 * CHUNK), gradient, CHUNK)
                moved = weighted(moved, weight, DECAY, BAND).to(KIND)
                top = tl.dot(moved, operand, top, input_precision=PRECISION)
                if NORMALIZED:
                    under = tl.dot(weight.to(KIND), y_unrotated, under, input_precision=PRECISION)
                if visit < Y_GROUP:
                    sums = tl.dot(tl.trans(z), kept, sums, input_precision=PRECISION)
            added_a, added_b = load_plain(low, slot * (SEGMENT // CHUNK) + chunk, offset, LANES, FEATURES)
            plain_a, plain_b = plain_a + added_a, plain_b + added_b
        top_a, top_b = parted(top)
        under_a, under_b = parted(under)
        under_a, under_b = under_a + low_a, under_b + low_b
        if not KEYS:
            top_a, top_b = top_a * over[:, None], top_b * over[:, None]
            under_a, under_b = under_a * pull[:, None], under_b * pull[:, None]
        # Only now, because the numbers above need the registers.
        m, n, shifts = load_features(
            x_side, batch, x_head, begin, index, valid, offset, length, LANES, FEATURES, X_MAP, False
        )
        if FEATURES[1]:
            c, s = load_tables(x_table, batch, x_head, begin, index, valid, offset, LANES, FEATURES)
            top_a, top_b = top_a * c + top_b * s, top_b * c - top_a * s
        grad_a = (top_a + under_a) * slope(m, shifts, X_MAP)
        grad_b = (top_b + under_b) * slope(n, shifts, X_MAP)
        target = out[0] + batch * out[1] + head * out[2] + begin * out[3] + index * out[3]
        store_pairs(target, valid, offset, grad_a, grad_b, LANES, FEATURES)
    if LEARNED:
        at = (block * owners + batch * X_HEADS + head) * count + number
        tl.store(of_far + 2 * at, tl.sum(far_total, axis=0))
        tl.store(of_far + 2 * at + 1, tl.sum(later_total, axis=0))


@triton.jit(do_not_specialize=["x_row", "y_row", "length", "owners", "count", "slots", "x_heads", "y_heads"])
def read_queries(
    x, y, v, p, x_shift, y_shift, x_cos, x_sin, y_cos, y_sin, inverse, weight, decay, band, begins, running, plain,
    low, out, of_band, of_far, x_row, y_row, x_b, x_h, x_n, y_b, y_h, y_n, v_b, v_h, v_n, p_b, p_h, p_n, o_b, o_h, o_n,
    d_b, d_h, d_n, x_table_b, x_table_h, y_table_b, y_table_h, length, owners, count, slots, x_heads, y_heads, factor,
    X_HEADS: tl.constexpr, X_GROUP: tl.constexpr, Y_SHARE: tl.constexpr, FEATURES: tl.constexpr, V_DIM: tl.constexpr,
    X_MAP: tl.constexpr, Y_MAP: tl.constexpr, NORMALIZED: tl.constexpr, SIDE: tl.constexpr, ALL: tl.constexpr,
    DECAY: tl.constexpr, BAND: tl.constexpr, LEAD: tl.constexpr, LEARNED: tl.constexpr, PACKED: tl.constexpr,
    SEGMENT: tl.constexpr, CHUNK: tl.constexpr, LANES: tl.constexpr, COLUMNS: tl.constexpr, KIND: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Store the gradients of queries x, whose outputs have the cotangents p.

    Args:
        weight: Cotangents of the denominators.
        of_band: If LEARNED, gradients of the band per chunk and visited chunk, by difference.
        of_far: If LEARNED, gradients of the factors of keys beyond the band, before and after, per segment.
    """
    feature_rows(
        (x, x_shift, x_b, x_h, x_n, x_heads), (y, y_shift, y_b, y_h, y_n, y_heads),
        (x_cos, x_sin, x_row, x_table_b, x_table_h), (y_cos, y_sin, y_row, y_table_b, y_table_h),
        (p, p_b, p_h, p_n), (v, v_b, v_h, v_n), (inverse, weight), (decay, d_b, d_h, d_n), band, begins, running,
        plain, low, (out, o_b, o_h, o_n), tl.program_id(1),
        of_band, of_far, length, owners, count, slots, factor, X_HEADS, X_GROUP, 1, 1,
        Y_SHARE, FEATURES, V_DIM, X_MAP, Y_MAP, False, NORMALIZED, SIDE, ALL, DECAY, BAND, LEAD, LEARNED, PACKED,
        SEGMENT, CHUNK, LANES, COLUMNS, KIND, PRECISION,
    )  # fmt: skip


@triton.jit(do_not_specialize=["x_row", "y_row", "length", "owners", "count", "slots", "x_heads", "y_heads"])
def read_keys(
    x, y, v, p, x_shift, y_shift, x_cos, x_sin, y_cos, y_sin, inverse, weight, decay, band, begins, running, plain,
    low, out, of_values, x_row, y_row, x_b, x_h, x_n, y_b, y_h, y_n,
    v_b, v_h, v_n, p_b, p_h, p_n, o_b, o_h, o_n, w_b, w_h, w_n, d_b, d_h, d_n, x_table_b, x_table_h,
    y_table_b, y_table_h, length, owners, count, slots, x_heads, y_heads, factor,
    X_HEADS: tl.constexpr, Y_GROUP: tl.constexpr, X_SHARE: tl.constexpr, FEATURES: tl.constexpr, V_DIM: tl.constexpr,
    X_MAP: tl.constexpr, Y_MAP: tl.constexpr, NORMALIZED: tl.constexpr, SIDE: tl.constexpr, ALL: tl.constexpr,
    DECAY: tl.constexpr, BAND: tl.constexpr, LEAD: tl.constexpr, SAME: tl.constexpr,
    PACKED: tl.constexpr, SEGMENT: tl.constexpr, CHUNK: tl.constexpr, LANES: tl.constexpr, COLUMNS: tl.constexpr,
    LANE_BLOCKS: tl.constexpr, ALL_LANES: tl.constexpr, FEW_COLUMNS: tl.constexpr, KIND: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Store the gradients of keys x in `out`, and of their values v in `of_values`.

    The first LANE_BLOCKS programs of a segment compute gradients of keys, the others those of values.

    Args:
        y: Queries, whose outputs have the cotangents p.
        running: Sums of (R y) p^T after each segment.
    """
    block = tl.program_id(1)
    x_side, y_side = (x, x_shift, x_b, x_h, x_n, x_heads), (y, y_shift, y_b, y_h, y_n, y_heads)
    x_table, y_table = (x_cos, x_sin, x_row, x_table_b, x_table_h), (y_cos, y_sin, y_row, y_table_b, y_table_h)
    values, cotangents, rows = (v, v_b, v_h, v_n), (p, p_b, p_h, p_n), (inverse, weight)
    logs = decay, d_b, d_h, d_n
    if block < LANE_BLOCKS:
        feature_rows(
            x_side, y_side, x_table, y_table, values, cotangents, rows, logs, band, begins, running, plain, low,
            (out, o_b, o_h, o_n), block, plain, plain, length, owners,
            count, slots, factor, X_HEADS, 1, Y_GROUP, X_SHARE, 1, FEATURES, V_DIM, X_MAP, Y_MAP, True, NORMALIZED,
            SIDE, ALL, DECAY, BAND, LEAD, False, PACKED, SEGMENT, CHUNK, LANES, COLUMNS, KIND, PRECISION,
        )  # fmt: skip
    else:
        value_rows(
            x_side, y_side, x_table, y_table, cotangents, rows, logs, band, begins, running, plain, low,
            (of_values, w_b, w_h, w_n), inverse, block - LANE_BLOCKS, length, owners, count, slots, factor, 0.0,
            X_HEADS, 1, Y_GROUP, X_SHARE, 1, FEATURES, V_DIM, X_MAP, Y_MAP, True, NORMALIZED, SIDE, ALL, DECAY, BAND,
            LEAD, SAME, PACKED, SEGMENT, CHUNK, ALL_LANES, FEW_COLUMNS, KIND, PRECISION,
        )  # fmt: skip
