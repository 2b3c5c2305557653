"""Products of rows with the sums before them and with the tokens of their segment: outputs, gradients of values.

A program computes the rows of one segment, chunk by chunk. It keeps the sums of the rows before the chunk, to which
each chunk is added after it was read. Every row is therefore mapped and rotated once. SIDE is which rows y a row x
reads: -1 for those up to it, 1 for those from it on, 0 for all.
"""

# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false
# In Triton's language a tl.constexpr is its value, which type checkers do not know.

import triton
import triton.language as tl

from ropewalk.kernels.linear.triton_features import exponential
from ropewalk.kernels.linear.triton_rows import (
    joined,
    load_features,
    load_plain,
    load_sums,
    load_tables,
    load_values,
    mapped_pairs,
    place_of,
    rotate_pairs,
    segment_of,
    sequence_of,
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

# The largest inverse that is stored: a finite float32.
LARGEST = tl.constexpr(3.0e38)


@triton.jit
def load_others(
    side, table, values, rows, batch, member, begin, index, valid, offset, column, length, factor, c, s, far,
    LANES: tl.constexpr, FEATURES: tl.constexpr, V_DIM: tl.constexpr, MAP: tl.constexpr, SCALED: tl.constexpr,
    NORMALIZED: tl.constexpr, BELOW: tl.constexpr, SAME: tl.constexpr, ZEROS: tl.constexpr, WEIGHTED: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    """Load rows y as operands: rotated features, the same times `far`, unrotated features if BELOW, and values.

    SCALED: y are queries, whose rotated features are multiplied by the inverse of their denominators, the others by the
    cotangents of the denominators. `rows` is both. SAME: c and s are their cos and sin. ZEROS: as in `load_features`.
    WEIGHTED: `far` is not 1.
    """
    e, f, shifts = load_features(side, batch, member, begin, index, valid, offset, length, LANES, FEATURES, MAP, ZEROS)
    z = load_values(values, batch, member, begin, index, valid, column, V_DIM, KIND)
    e, f = mapped_pairs(e, f, shifts, MAP)
    if FEATURES[1] and not SAME:
        c, s = load_tables(table, batch, member, begin, index, valid, offset, LANES, FEATURES)
    r, t = rotate_pairs(e, f, c, s, FEATURES)
    if SCALED:
        if NORMALIZED:
            at = (batch * side[5] + member) * length + begin + index
            over = tl.load(rows[0] + at, mask=valid, other=0.0)[:, None]
            r, t = r * over, t * over
            if BELOW:
                pull = tl.load(rows[1] + at, mask=valid, other=0.0)[:, None]
                e, f = e * pull, f * pull
        else:
            r, t = r * factor, t * factor
    rotated = joined(r, t, KIND)
    kept, unrotated = rotated, rotated
    if WEIGHTED:
        kept = joined(r * far[:, None], t * far[:, None], KIND)
    if BELOW:
        unrotated = joined(e, f, KIND)
    return rotated, kept, unrotated, z


@triton.jit
def slot_of(begins, number, count, batch, shared, HEADS: tl.constexpr, ALL: tl.constexpr, PACKED: tl.constexpr):
    """Return the index of the sums that a segment reads: its own, or those of its sequence if ALL."""
    if ALL:
        slot = sequence_of(begins, number, count, batch, PACKED) * HEADS + shared
    else:
        slot = (batch * HEADS + shared) * count + number
    return slot


@triton.jit
def add_visible(
    total, below, rotated, unrotated, y_rotated, y_unrotated, z, weight, BELOW: tl.constexpr, DECAY: tl.constexpr,
    BAND: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the products of rows x with visible rows y to the numerator, and to the denominator if BELOW."""
    if BELOW:
        under = tl.dot(unrotated, tl.trans(y_unrotated), input_precision=PRECISION)
        below += tl.sum(weighted(under, weight, DECAY, BAND), axis=1)
    scores = tl.dot(rotated, tl.trans(y_rotated), input_precision=PRECISION)
    total = tl.dot(weighted(scores, weight, DECAY, BAND).to(KIND), z, total, input_precision=PRECISION)
    return total, below


@triton.jit
def value_rows(
    x_side, y_side, x_table, y_table, values, rows, decay, band, begins, running, plain, low, out, inverse, block,
    length, owners, count, slots, factor, least,
    X_HEADS: tl.constexpr, X_GROUP: tl.constexpr, Y_GROUP: tl.constexpr, X_SHARE: tl.constexpr, Y_SHARE: tl.constexpr,
    FEATURES: tl.constexpr, V_DIM: tl.constexpr, X_MAP: tl.constexpr, Y_MAP: tl.constexpr, KEYS: tl.constexpr,
    NORMALIZED: tl.constexpr, SIDE: tl.constexpr, ALL: tl.constexpr, DECAY: tl.constexpr, BAND: tl.constexpr,
    LEAD: tl.constexpr, SAME: tl.constexpr, PACKED: tl.constexpr, SEGMENT: tl.constexpr, CHUNK: tl.constexpr,
    LANES: tl.constexpr, COLUMNS: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the rows of a segment: outputs of queries x, or gradients of the values of keys x if KEYS."""
    HEADS: tl.constexpr = X_HEADS // X_GROUP
    BELOW: tl.constexpr = NORMALIZED and not KEYS
    DIRECTION: tl.constexpr = -1 if SIDE > 0 else 1
    WEIGHTED: tl.constexpr = DECAY != 0 or (BAND > 0 and KEYS)
    # Causal queries never read a key after the last token, and queries after it are multiplied by 0.
    ZEROS: tl.constexpr = SIDE == 0 or LEAD > 0 or (KEYS and not NORMALIZED)
    batch, head, number = place_of(owners, X_HEADS)
    shared, x_head = head // X_GROUP, head // X_SHARE
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    begin, end, first, last = segment_of(begins, number, count, length, SEGMENT, PACKED)
    size = (end - begin).to(tl.int32)
    lowest, highest = (first - begin).to(tl.int32), (last - begin).to(tl.int32)
    logs = decay[0] + batch * decay[1] + shared * decay[2], decay[3]
    slot = slot_of(begins, number, count, batch, shared, HEADS, ALL, PACKED)
    sums = load_sums(running, slot, column, 0, LANES, FEATURES, V_DIM).to(tl.float32)
    plain_a, plain_b = load_plain(plain, slot, 0, LANES, FEATURES)
    if SIDE == 0 and not ALL:
        later = load_sums(running, slots + slot, column, 0, LANES, FEATURES, V_DIM)
        plain_later_a, plain_later_b = load_plain(plain, slots + slot, 0, LANES, FEATURES)
    chunks = (size + CHUNK - 1) // CHUNK
    for step in range(0, chunks):
        chunk = chunks - 1 - step if SIDE > 0 else step
        index = chunk * CHUNK + tl.arange(0, CHUNK)
        valid = index < size
        a, b, shifts = load_features(
            x_side, batch, x_head, begin, index, valid, 0, length, LANES, FEATURES, X_MAP, False
        )
        a, b = mapped_pairs(a, b, shifts, X_MAP)
        c, s = a, b
        if FEATURES[1]:
            c, s = load_tables(x_table, batch, x_head, begin, index, valid, 0, LANES, FEATURES)
        u, w = rotate_pairs(a, b, c, s, FEATURES)
        rotated = joined(u, w, KIND)
        below, unrotated = tl.zeros((CHUNK,), tl.float32), rotated
        if BELOW:
            unrotated = joined(a, b, KIND)
            below = tl.sum(a * plain_a[None, :] + b * plain_b[None, :], axis=1)
        local, whole = chunk_decay(logs, begin, chunk * CHUNK, tl.minimum(size - chunk * CHUNK, CHUNK), DECAY, CHUNK)
        near = tl.zeros((CHUNK,), tl.float32) + 1.0
        if DECAY:
            near = carried_decay(local, whole, SIDE)
        if BAND and not KEYS:
            near *= far_weights(band, head, SIDE <= 0, BAND, KEYS)
        if not ALL:
            # The first rows y are those that are added to the sums. They are loaded before the first product, so that
            # few numbers are in registers at once.
            other = chunk * CHUNK - DIRECTION * LEAD + tl.arange(0, CHUNK)
            virtual = shared * Y_GROUP
            far = added_weights(local, whole, band, virtual, SIDE, DECAY, BAND, KEYS)
            operand, kept, y_unrotated, z = load_others(
                y_side, y_table, values, rows, batch, virtual // Y_SHARE, begin, other,
                (other >= lowest) & (other < highest), 0, column, length, factor, c, s, far, LANES, FEATURES, V_DIM,
                Y_MAP, KEYS, NORMALIZED, BELOW, SAME, ZEROS, WEIGHTED, KIND,
            )  # fmt: skip
            more_a, more_b = load_plain(low, slot * (SEGMENT // CHUNK) + chunk, 0, LANES, FEATURES)
        total = tl.dot(rotated, tl.trans(sums.to(KIND)), input_precision=PRECISION)
        if DECAY or BAND:
            total, below = total * near[:, None], below * near
        if SIDE == 0 and not ALL:
            # The sums after the segment, decayed from its last token to each row.
            near = later_weights(logs, band, head, index, size, DECAY, BAND, KEYS)
            total += near[:, None] * tl.dot(rotated, tl.trans(later.to(KIND)), input_precision=PRECISION)
            if BELOW:
                below += near * tl.sum(a * plain_later_a[None, :] + b * plain_later_b[None, :], axis=1)
        if not ALL:
            weight = pair_weights(index, other, local, logs, band, virtual if KEYS else head, SIDE, DECAY, BAND, KEYS)
            total, below = add_visible(
                total, below, rotated, unrotated, operand, y_unrotated, z, weight, BELOW, DECAY, BAND, KIND, PRECISION
            )
            if DECAY:
                gone = exponential(whole.to(tl.float32))
                sums, plain_a, plain_b = sums * gone, plain_a * gone, plain_b * gone
            sums = tl.dot(tl.trans(z), kept, sums, input_precision=PRECISION)
            plain_a, plain_b = plain_a + more_a, plain_b + more_b
            visits = 1 + LEAD // CHUNK
            if SIDE == 0:
                visits = chunks - chunk + 2 * (LEAD // CHUNK)
            if SIDE == 0 or LEAD > 0 or Y_GROUP > 1:
                for visit in range(1, visits * Y_GROUP):
                    other = (chunk + DIRECTION * (visit // Y_GROUP)) * CHUNK - DIRECTION * LEAD + tl.arange(0, CHUNK)
                    virtual = shared * Y_GROUP + visit % Y_GROUP
                    far = added_weights(local, whole, band, virtual, SIDE, DECAY, BAND, KEYS)
                    operand, kept, y_unrotated, z = load_others(
                        y_side, y_table, values, rows, batch, virtual // Y_SHARE, begin, other,
                        (other >= lowest) & (other < highest), 0, column, length, factor, c, s, far, LANES, FEATURES,
                        V_DIM, Y_MAP, KEYS, NORMALIZED, BELOW, SAME, ZEROS, WEIGHTED, KIND,
                    )  # fmt: skip
                    weight = pair_weights(
                        index, other, local, logs, band, virtual if KEYS else head, SIDE, DECAY, BAND, KEYS
                    )
                    total, below = add_visible(
                        total, below, rotated, unrotated, operand, y_unrotated, z, weight, BELOW, DECAY, BAND, KIND,
                        PRECISION,
                    )  # fmt: skip
                    if visit < Y_GROUP:
                        sums = tl.dot(tl.trans(z), kept, sums, input_precision=PRECISION)
        if BELOW:
            # Division by 0 gives 0, as in `linear.torch.divide`. Both are scaled if the inverse would be infinite.
            scale = tl.where(tl.abs(below) < 2.0**-64, 2.0**64, 1.0)
            over = 1 / tl.where(tl.abs(below) <= least, float("inf"), below * scale)
            total = (total * scale[:, None]) * over[:, None]
            # Not by minimum and maximum, which would replace NaN by a number.
            bound = LARGEST / scale
            over = tl.where(over > bound, bound, tl.where(over < -bound, -bound, over)) * scale
            if block == 0:
                at = (batch * X_HEADS + head) * length + begin + index
                tl.store(inverse + at, over, mask=valid)
        elif not KEYS:
            total = total * factor
        target = out[0] + batch * out[1] + head * out[2] + begin * out[3] + index * out[3]
        mask = valid[:, None] & (column < V_DIM)[None, :]
        tl.store(target[:, None] + column[None, :], total.to(out[0].dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["x_row", "y_row", "length", "owners", "count", "slots", "x_heads", "y_heads"])
def read_values(
    x, y, v, x_shift, y_shift, x_cos, x_sin, y_cos, y_sin, decay, band, begins, running, plain, low, out, inverse,
    x_row, y_row, x_b, x_h, x_n, y_b, y_h, y_n, v_b, v_h, v_n, o_b, o_h, o_n, d_b, d_h, d_n,
    x_table_b, x_table_h, y_table_b, y_table_h, length, owners, count, slots, x_heads, y_heads, factor, least,
    X_HEADS: tl.constexpr, X_GROUP: tl.constexpr, Y_SHARE: tl.constexpr, FEATURES: tl.constexpr, V_DIM: tl.constexpr,
    X_MAP: tl.constexpr, Y_MAP: tl.constexpr, NORMALIZED: tl.constexpr, SIDE: tl.constexpr, ALL: tl.constexpr,
    DECAY: tl.constexpr, BAND: tl.constexpr, LEAD: tl.constexpr, SAME: tl.constexpr, PACKED: tl.constexpr,
    SEGMENT: tl.constexpr, CHUNK: tl.constexpr, LANES: tl.constexpr, COLUMNS: tl.constexpr, KIND: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Store the outputs of queries x, which read keys y with values v, and the inverse of each denominator.

    Args:
        running: Sums before each segment, then those after it if SIDE is 0. Those of all keys if ALL.
        plain: The same of unrotated keys.
        low: Sums of unrotated keys over each chunk, as `sum_segments` stored them.
        slots: Number of sums in one direction.
        factor: Factor on outputs that are not divided.
        least: Denominators up to this are 0.
    """
    value_rows(
        (x, x_shift, x_b, x_h, x_n, x_heads), (y, y_shift, y_b, y_h, y_n, y_heads),
        (x_cos, x_sin, x_row, x_table_b, x_table_h), (y_cos, y_sin, y_row, y_table_b, y_table_h),
        (v, v_b, v_h, v_n), (inverse, inverse), (decay, d_b, d_h, d_n), band, begins, running, plain, low,
        (out, o_b, o_h, o_n), inverse, tl.program_id(1), length, owners, count, slots, factor, least,
        X_HEADS, X_GROUP, 1, 1, Y_SHARE, FEATURES, V_DIM, X_MAP, Y_MAP, False, NORMALIZED, SIDE, ALL, DECAY, BAND,
        LEAD, SAME, PACKED, SEGMENT, CHUNK, LANES, COLUMNS, KIND, PRECISION,
    )  # fmt: skip
