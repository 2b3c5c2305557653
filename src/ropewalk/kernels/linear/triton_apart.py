"""Rows of one chunk apart from all others: a bias within a band, and weights in both directions.

A program computes the rows of one chunk. It reads the sums of the chunks before those that it visits, and after them,
which `sum_segments` and `run_totals` stored in two parts: of the segments before, and within the segment. It visits all
chunks within reach, a few rows at a time: those of the band, or only its own. Nothing is added to the sums, so that
chunks need no order.
"""

# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false
# In Triton's language a tl.constexpr is its value, which type checkers do not know.

import triton
import triton.language as tl

from ropewalk.kernels.linear.triton_backward import load_pulls, store_gradients
from ropewalk.kernels.linear.triton_features import exponential
from ropewalk.kernels.linear.triton_read import add_visible, store_quotients
from ropewalk.kernels.linear.triton_rows import (
    joined,
    load_operand,
    load_plain,
    load_rotated,
    load_sums,
    load_values,
    parted,
    segment_of,
    store_operand,
)
from ropewalk.kernels.linear.triton_weights import bounded, far_weight, load_factors


@triton.jit
def chunk_of(
    program, begins, owners, count, length, HEADS: tl.constexpr, SEGMENT: tl.constexpr, CHUNK: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Return batch, head, segment and chunk of a program, the first token of the segment, its size, and its sequence.

    The sequence is its first token and its end, relative to the segment.
    """
    owner = (program % owners).to(tl.int64)
    place = program // owners
    number, chunk = place // (SEGMENT // CHUNK), place % (SEGMENT // CHUNK)
    begin, end, first, last = segment_of(begins, number, count, length, SEGMENT, PACKED)
    size = (end - begin).to(tl.int32)
    return owner // HEADS, owner % HEADS, number, chunk, begin, size, first - begin, last - begin


@triton.jit
def load_state(
    stored, slot, chunk, size, first, last, decay, column, offset, AFTER: tl.constexpr, NEAR: tl.constexpr,
    DECAY: tl.constexpr, LANES: tl.constexpr, FEATURES: tl.constexpr, V_DIM: tl.constexpr, SEGMENT: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Load the sums over all rows that are more than NEAR chunks before a chunk, or after it if AFTER.

    `stored` is the sums of segments, those within them, and both of unrotated rows. `slot` is the segment. Sums are
    decayed to the token before the chunk, or to the last one of the chunk if AFTER.

    Returns:
        The tile [columns, 2 * lanes], and first and second members [lanes] of the sum of unrotated rows.
    """
    CHUNKS: tl.constexpr = SEGMENT // CHUNK
    other = chunk + NEAR if AFTER else chunk - NEAR
    # Division rounds towards 0, so the dividend is made positive.
    ahead = (other + NEAR * CHUNKS) // CHUNKS - NEAR
    inside = other - ahead * CHUNKS
    exists = (size > 0) & (other * CHUNK < last if AFTER else other * CHUNK >= first)
    # Where there is no such chunk, another one is read, and not used.
    at = slot + tl.where(exists, ahead, 0)
    kept = 1.0
    if DECAY:
        g = bounded(tl.load(decay[0]).to(tl.float32))
        kept = exponential(g * (SEGMENT - (inside + 1) * CHUNK if AFTER else inside * CHUNK))
    sums = tl.where(exists, load_sums(stored[0], at, column, offset, LANES, FEATURES, V_DIM), 0.0).to(tl.float32) * kept
    at_inner = at * CHUNKS + inside
    sums += tl.where(exists, load_sums(stored[1], at_inner, column, offset, LANES, FEATURES, V_DIM), 0.0)
    plain_a, plain_b = load_plain(stored[2], at, offset, LANES, FEATURES)
    more_a, more_b = load_plain(stored[3], at_inner, offset, LANES, FEATURES)
    plain_a = tl.where(exists, plain_a, 0.0) * kept + tl.where(exists, more_a, 0.0)
    plain_b = tl.where(exists, plain_b, 0.0) * kept + tl.where(exists, more_b, 0.0)
    return sums, plain_a, plain_b


@triton.jit
def state_weights(
    decay, band, head, AFTER: tl.constexpr, DECAY: tl.constexpr, BAND: tl.constexpr, KEYS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Return the factors of the sums before or after a chunk, for each of its rows."""
    row = tl.arange(0, CHUNK)
    weights = tl.zeros((CHUNK,), tl.float32) + 1.0
    if DECAY:
        g = bounded(tl.load(decay[0]).to(tl.float32))
        weights = exponential(g * (CHUNK - 1 - row if AFTER else row + 1))
    elif not KEYS:
        # Sums of queries already have the factors of their heads.
        weights *= far_weight(band, head, BAND, AFTER)
    return weights


@triton.jit
def no_state(CHUNK: tl.constexpr, LANES: tl.constexpr):
    """Return factors and sums of unrotated rows that are 0."""
    nothing = tl.zeros((LANES,), tl.float32)
    return tl.zeros((CHUNK,), tl.float32), nothing, nothing


@triton.jit
def unrotated_states(before, after):
    """Return first and second members [rows, lanes] of the unrotated sums before and after a chunk, with factors."""
    a = before[0][:, None] * before[1][None, :] + after[0][:, None] * after[1][None, :]
    b = before[0][:, None] * before[2][None, :] + after[0][:, None] * after[2][None, :]
    return a, b


@triton.jit
def visit_weights(
    decay, factors, head, ahead, DECAY: tl.constexpr, BAND: tl.constexpr, KEYS: tl.constexpr, CHUNK: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """Return the factors [x, y] between the rows of a chunk and STEP rows, `ahead` steps after the chunk's first."""
    if DECAY:
        x, y = tl.arange(0, CHUNK), tl.arange(0, STEP)
        g = bounded(tl.load(decay[0]).to(tl.float32))
        weights = exponential(g * tl.abs(ahead * STEP + y[None, :] - x[:, None]))
    else:
        weights = load_factors(factors, head, ahead, BAND, KEYS, CHUNK, STEP)
    return weights


@triton.jit
def load_visited(
    stored, values, batch, member, begin, index, valid, offset, column, length, LANES: tl.constexpr,
    FEATURES: tl.constexpr, V_DIM: tl.constexpr, TWICE: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Load rows y that were stored as operands: rotated features, the others, and values.

    `stored` is the rotated features, the others if they are stored TWICE, and the number of heads. Keys without a
    rotation are stored once.
    """
    rotated = load_operand(
        stored[0], batch, member, begin, index, valid, offset, stored[2], length, LANES, FEATURES, KIND
    )
    unrotated = rotated
    if TWICE:
        unrotated = load_operand(
            stored[1], batch, member, begin, index, valid, offset, stored[2], length, LANES, FEATURES, KIND
        )
    return rotated, unrotated, load_values(values, batch, member, begin, index, valid, column, V_DIM, KIND)


@triton.jit
def store_visited(
    stored, rotated, unrotated, batch, head, begin, index, valid, length, LANES: tl.constexpr, FEATURES: tl.constexpr,
    TWICE: tl.constexpr,
):  # fmt: skip
    """Store rows x as operands, for `load_visited`."""
    store_operand(stored[0], rotated, batch, head, begin, index, valid, 0, stored[2], length, LANES, FEATURES)
    if TWICE:
        store_operand(stored[1], unrotated, batch, head, begin, index, valid, 0, stored[2], length, LANES, FEATURES)


@triton.jit
def value_chunk(
    x_side, x_stored, y_stored, x_table, values, decay, band, factors, begins, stored, out, inverse, block, length,
    owners, count, slots, factor, least,
    X_HEADS: tl.constexpr, X_GROUP: tl.constexpr, Y_GROUP: tl.constexpr, X_SHARE: tl.constexpr, Y_SHARE: tl.constexpr,
    FEATURES: tl.constexpr, V_DIM: tl.constexpr, X_MAP: tl.constexpr, KEYS: tl.constexpr, NORMALIZED: tl.constexpr,
    SIDE: tl.constexpr, DECAY: tl.constexpr, BAND: tl.constexpr, PACKED: tl.constexpr, SEGMENT: tl.constexpr,
    CHUNK: tl.constexpr, STEP: tl.constexpr, LANES: tl.constexpr, COLUMNS: tl.constexpr, KIND: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the rows of a chunk: outputs of queries x, or gradients of the values of keys x if KEYS.

    Rows y were stored as operands: `y_stored` is the rotated features, the others, and the number of heads. KEYS: rows
    x are stored too, in `x_stored`.
    """
    BELOW: tl.constexpr = NORMALIZED and not KEYS
    NEAR: tl.constexpr = (BAND + CHUNK - 2) // CHUNK if BAND else 0
    batch, head, number, chunk, begin, size, first, last = chunk_of(
        tl.program_id(0), begins, owners, count, length, X_HEADS, SEGMENT, CHUNK, PACKED
    )
    shared, x_head = head // X_GROUP, head // X_SHARE
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    logs = decay[0] + batch * decay[1] + shared * decay[2], decay[3]
    slot = (batch * (X_HEADS // X_GROUP) + shared) * count + number
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    valid = index < size
    a, b, u, w, _cos, _sin = load_rotated(
        x_side, x_table, batch, x_head, begin, index, valid, 0, length, LANES, FEATURES, X_MAP
    )
    rotated = joined(u, w, FEATURES, KIND)
    below, unrotated = tl.zeros((CHUNK,), tl.float32), rotated
    if NORMALIZED:
        unrotated = joined(a, b, FEATURES, KIND)
    if KEYS and (block == 0) & (head % X_SHARE == 0):
        store_visited(
            x_stored, rotated, unrotated, batch, x_head, begin, index, valid, length, LANES, FEATURES,
            NORMALIZED and FEATURES[1] > 0,
        )  # fmt: skip
    total = tl.zeros((CHUNK, COLUMNS), tl.float32)
    for AFTER in tl.static_range(2):
        if (AFTER == 0 and SIDE <= 0) or (AFTER == 1 and SIDE >= 0):
            sums, plain_a, plain_b = load_state(
                stored, slot + (slots if SIDE == 0 and AFTER == 1 else 0), chunk, size, first, last, logs, column, 0,
                AFTER == 1, NEAR, DECAY, LANES, FEATURES, V_DIM, SEGMENT, CHUNK,
            )  # fmt: skip
            near = state_weights(logs, band, head, AFTER == 1, DECAY, BAND, KEYS, CHUNK)
            total += near[:, None] * tl.dot(rotated, tl.trans(sums.to(KIND)), input_precision=PRECISION)
            if BELOW:
                below += near * tl.sum(a * plain_a[None, :] + b * plain_b[None, :], axis=1)
    # The first visited rows, in steps from the chunk.
    STEPS: tl.constexpr = CHUNK // STEP
    FIRST: tl.constexpr = 0 if SIDE > 0 else -NEAR * STEPS
    VISITS: tl.constexpr = (1 + 2 * NEAR if SIDE == 0 else 1 + NEAR) * STEPS * Y_GROUP
    for visit in range(0, VISITS):
        ahead = FIRST + visit // Y_GROUP
        other = chunk * CHUNK + ahead * STEP + tl.arange(0, STEP)
        virtual = shared * Y_GROUP + visit % Y_GROUP
        operand, y_unrotated, z = load_visited(
            y_stored, values, batch, virtual // Y_SHARE, begin, other, (other >= first) & (other < last), 0, column,
            length, LANES, FEATURES, V_DIM, BELOW and FEATURES[1] > 0, KIND,
        )  # fmt: skip
        weight = visit_weights(logs, factors, virtual if KEYS else head, ahead, DECAY, BAND, KEYS, CHUNK, STEP)
        total, below = add_visible(
            total, below, rotated, unrotated, operand, y_unrotated, z, weight, BELOW, True, KIND, PRECISION
        )
    store_quotients(
        total, below, out, inverse, batch, head, begin, index, valid, column, block, X_HEADS, length, factor, least,
        V_DIM, KEYS, NORMALIZED,
    )  # fmt: skip


@triton.jit
def feature_chunk(
    x_side, y_stored, x_table, p, values, rows, decay, band, factors, begins, stored, out, of_far, block, length,
    owners, count, slots, factor,
    X_HEADS: tl.constexpr, X_GROUP: tl.constexpr, Y_GROUP: tl.constexpr, X_SHARE: tl.constexpr, Y_SHARE: tl.constexpr,
    FEATURES: tl.constexpr, V_DIM: tl.constexpr, X_MAP: tl.constexpr, KEYS: tl.constexpr, NORMALIZED: tl.constexpr,
    SIDE: tl.constexpr, DECAY: tl.constexpr, BAND: tl.constexpr, LEARNED: tl.constexpr, PACKED: tl.constexpr,
    SEGMENT: tl.constexpr, CHUNK: tl.constexpr, STEP: tl.constexpr, LANES: tl.constexpr, COLUMNS: tl.constexpr,
    KIND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of the rows x of a chunk. Arguments are those of `feature_rows`.

    LEARNED: x are queries, and the gradients of the factors beyond the band are stored in `of_far`, for keys before
    and after.
    """
    NEAR: tl.constexpr = (BAND + CHUNK - 2) // CHUNK if BAND else 0
    batch, head, number, chunk, begin, size, first, last = chunk_of(
        tl.program_id(0), begins, owners, count, length, X_HEADS, SEGMENT, CHUNK, PACKED
    )
    shared, x_head = head // X_GROUP, head // X_SHARE
    offset = block * LANES
    column = tl.arange(0, COLUMNS)
    logs = decay[0] + batch * decay[1] + shared * decay[2], decay[3]
    slot = (batch * (X_HEADS // X_GROUP) + shared) * count + number
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    valid = index < size
    cotangents = load_values(p, batch, x_head, begin, index, valid, column, V_DIM, KIND)
    at = (batch * x_side[5] + x_head) * length + begin + index
    over, pull = load_pulls(rows, at, valid, factor, NORMALIZED and not KEYS)
    top = tl.zeros((CHUNK, 2 * LANES), tl.float32)
    under = tl.zeros((CHUNK, 2 * LANES), tl.float32)
    # Factors and sums of unrotated rows, before the chunk and after it. Their products wait for free registers.
    before = no_state(CHUNK, LANES)
    after = before
    for AFTER in tl.static_range(2):
        if (AFTER == 0 and SIDE <= 0) or (AFTER == 1 and SIDE >= 0):
            sums, plain_a, plain_b = load_state(
                stored, slot + (slots if SIDE == 0 and AFTER == 1 else 0), chunk, size, first, last, logs, column,
                offset, AFTER == 1, NEAR, DECAY, LANES, FEATURES, V_DIM, SEGMENT, CHUNK,
            )  # fmt: skip
            near = state_weights(logs, band, head, AFTER == 1, DECAY, BAND, KEYS, CHUNK)
            more = near[:, None] * tl.dot(cotangents, sums.to(KIND), input_precision=PRECISION)
            if LEARNED:
                a, b, u, w, _cos, _sin = load_rotated(
                    x_side, x_table, batch, x_head, begin, index, valid, offset, length, LANES, FEATURES, X_MAP
                )
                more_u, more_w = parted(more)
                gradient = over * tl.sum(u * more_u + w * more_w, axis=1)
                gradient += pull * near * tl.sum(a * plain_a[None, :] + b * plain_b[None, :], axis=1)
                gradient = tl.sum(tl.where(valid, gradient, 0.0), axis=0)
                place = (block * tl.num_programs(0) + tl.program_id(0)).to(tl.int64)
                tl.store(of_far + 2 * place + AFTER, gradient)
            top += more
            if AFTER == 0:
                before = near, plain_a, plain_b
            else:
                after = near, plain_a, plain_b
    # As in `value_chunk`.
    STEPS: tl.constexpr = CHUNK // STEP
    FIRST: tl.constexpr = 0 if SIDE > 0 else -NEAR * STEPS
    VISITS: tl.constexpr = (1 + 2 * NEAR if SIDE == 0 else 1 + NEAR) * STEPS * Y_GROUP
    for visit in range(0, VISITS):
        ahead = FIRST + visit // Y_GROUP
        other = chunk * CHUNK + ahead * STEP + tl.arange(0, STEP)
        virtual = shared * Y_GROUP + visit % Y_GROUP
        operand, y_unrotated, z = load_visited(
            y_stored, values, batch, virtual // Y_SHARE, begin, other, (other >= first) & (other < last), offset,
            column, length, LANES, FEATURES, V_DIM, NORMALIZED and (KEYS or FEATURES[1] > 0), KIND,
        )  # fmt: skip
        weight = visit_weights(logs, factors, virtual if KEYS else head, ahead, DECAY, BAND, KEYS, CHUNK, STEP)
        moved = tl.dot(cotangents, tl.trans(z), input_precision=PRECISION)
        top = tl.dot((moved * weight).to(KIND), operand, top, input_precision=PRECISION)
        if NORMALIZED:
            under = tl.dot(weight.to(KIND), y_unrotated, under, input_precision=PRECISION)
    low_a, low_b = unrotated_states(before, after)
    store_gradients(
        top, under, low_a, low_b, over, pull, x_side, x_table, out, batch, x_head, head, begin, index, valid, offset,
        length, LANES, FEATURES, X_MAP, KEYS,
    )  # fmt: skip


@triton.jit
def key_chunk(
    x_side, x_stored, y_stored, x_table, p, values, decay, band, factors, begins, stored, out, value_out, length,
    owners, count, slots,
    X_HEADS: tl.constexpr, Y_GROUP: tl.constexpr, X_SHARE: tl.constexpr, FEATURES: tl.constexpr, V_DIM: tl.constexpr,
    X_MAP: tl.constexpr, NORMALIZED: tl.constexpr, SIDE: tl.constexpr, DECAY: tl.constexpr, BAND: tl.constexpr,
    PACKED: tl.constexpr, SEGMENT: tl.constexpr, CHUNK: tl.constexpr, STEP: tl.constexpr, LANES: tl.constexpr,
    COLUMNS: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of the keys x of a chunk and of their values p, as `feature_chunk` and `value_chunk` do.

    Visited queries are loaded once for both. One program has all features and all values.
    """
    NEAR: tl.constexpr = (BAND + CHUNK - 2) // CHUNK if BAND else 0
    batch, head, number, chunk, begin, size, first, last = chunk_of(
        tl.program_id(0), begins, owners, count, length, X_HEADS, SEGMENT, CHUNK, PACKED
    )
    x_head = head // X_SHARE
    column = tl.arange(0, COLUMNS)
    logs = decay[0] + batch * decay[1] + head * decay[2], decay[3]
    slot = (batch * X_HEADS + head) * count + number
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    valid = index < size
    a, b, u, w, _cos, _sin = load_rotated(
        x_side, x_table, batch, x_head, begin, index, valid, 0, length, LANES, FEATURES, X_MAP
    )
    rotated = joined(u, w, FEATURES, KIND)
    if head % X_SHARE == 0:
        unrotated = joined(a, b, FEATURES, KIND)
        store_visited(
            x_stored, rotated, unrotated, batch, x_head, begin, index, valid, length, LANES, FEATURES,
            NORMALIZED and FEATURES[1] > 0,
        )  # fmt: skip
    x_values = load_values(p, batch, x_head, begin, index, valid, column, V_DIM, KIND)
    total = tl.zeros((CHUNK, COLUMNS), tl.float32)
    top = tl.zeros((CHUNK, 2 * LANES), tl.float32)
    under = tl.zeros((CHUNK, 2 * LANES), tl.float32)
    # Factors and sums of unrotated rows, before the chunk and after it. Their products wait for free registers.
    before = no_state(CHUNK, LANES)
    after = before
    for AFTER in tl.static_range(2):
        if (AFTER == 0 and SIDE <= 0) or (AFTER == 1 and SIDE >= 0):
            sums, plain_a, plain_b = load_state(
                stored, slot + (slots if SIDE == 0 and AFTER == 1 else 0), chunk, size, first, last, logs, column, 0,
                AFTER == 1, NEAR, DECAY, LANES, FEATURES, V_DIM, SEGMENT, CHUNK,
            )  # fmt: skip
            near = state_weights(logs, band, head, AFTER == 1, DECAY, BAND, True, CHUNK)
            state = sums.to(KIND)
            total += near[:, None] * tl.dot(rotated, tl.trans(state), input_precision=PRECISION)
            top += near[:, None] * tl.dot(x_values, state, input_precision=PRECISION)
            if AFTER == 0:
                before = near, plain_a, plain_b
            else:
                after = near, plain_a, plain_b
    # As in `value_chunk`.
    STEPS: tl.constexpr = CHUNK // STEP
    FIRST: tl.constexpr = 0 if SIDE > 0 else -NEAR * STEPS
    VISITS: tl.constexpr = (1 + 2 * NEAR if SIDE == 0 else 1 + NEAR) * STEPS * Y_GROUP
    for visit in range(0, VISITS):
        ahead = FIRST + visit // Y_GROUP
        other = chunk * CHUNK + ahead * STEP + tl.arange(0, STEP)
        virtual = head * Y_GROUP + visit % Y_GROUP
        operand, y_unrotated, z = load_visited(
            y_stored, values, batch, virtual, begin, other, (other >= first) & (other < last), 0, column, length,
            LANES, FEATURES, V_DIM, NORMALIZED, KIND,
        )  # fmt: skip
        weight = visit_weights(logs, factors, virtual, ahead, DECAY, BAND, True, CHUNK, STEP)
        scores = tl.dot(rotated, tl.trans(operand), input_precision=PRECISION)
        total = tl.dot((scores * weight).to(KIND), z, total, input_precision=PRECISION)
        moved = tl.dot(x_values, tl.trans(z), input_precision=PRECISION)
        top = tl.dot((moved * weight).to(KIND), operand, top, input_precision=PRECISION)
        if NORMALIZED:
            under = tl.dot(weight.to(KIND), y_unrotated, under, input_precision=PRECISION)
    target = value_out[0] + batch * value_out[1] + head * value_out[2] + begin * value_out[3] + index * value_out[3]
    mask = valid[:, None] & (column < V_DIM)[None, :]
    tl.store(target[:, None] + column[None, :], total.to(value_out[0].dtype.element_ty), mask=mask)
    ones = tl.zeros((CHUNK,), tl.float32) + 1.0
    low_a, low_b = unrotated_states(before, after)
    store_gradients(
        top, under, low_a, low_b, ones, ones, x_side, x_table, out, batch, x_head, head, begin, index, valid, 0,
        length, LANES, FEATURES, X_MAP, True,
    )  # fmt: skip


@triton.jit
def factor_gradient(
    x_side, y_stored, x_table, p, values, rows, factors, begins, out, length, owners, count, factor,
    X_HEADS: tl.constexpr, X_GROUP: tl.constexpr, FEATURES: tl.constexpr, V_DIM: tl.constexpr, X_MAP: tl.constexpr,
    NORMALIZED: tl.constexpr, BAND: tl.constexpr, PACKED: tl.constexpr, SEGMENT: tl.constexpr, CHUNK: tl.constexpr,
    STEP: tl.constexpr, LANES: tl.constexpr, COLUMNS: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store the gradients of the logarithms of one tile of factors [query, key], summed over some chunks.

    The first grid axis is batch and query head, the second the visited rows, the third which chunks are summed.
    """
    NEAR: tl.constexpr = (BAND + CHUNK - 2) // CHUNK
    CHUNKS: tl.constexpr = SEGMENT // CHUNK
    ahead = tl.program_id(1) - NEAR * (CHUNK // STEP)
    owner = tl.program_id(0)
    column = tl.arange(0, COLUMNS)
    gradient = tl.zeros((CHUNK, STEP), tl.float32)
    for place in range(tl.program_id(2), count * CHUNKS, tl.num_programs(2)):
        batch, head, _number, chunk, begin, size, first, last = chunk_of(
            owner + place * owners, begins, owners, count, length, X_HEADS, SEGMENT, CHUNK, PACKED
        )
        index = chunk * CHUNK + tl.arange(0, CHUNK)
        valid = index < size
        a, b, u, w, _cos, _sin = load_rotated(
            x_side, x_table, batch, head, begin, index, valid, 0, length, LANES, FEATURES, X_MAP
        )
        cotangents = load_values(p, batch, head, begin, index, valid, column, V_DIM, KIND)
        over, pull = load_pulls(rows, (batch * X_HEADS + head) * length + begin + index, valid, factor, NORMALIZED)
        other = chunk * CHUNK + ahead * STEP + tl.arange(0, STEP)
        operand, y_unrotated, z = load_visited(
            y_stored, values, batch, head // X_GROUP, begin, other, (other >= first) & (other < last), 0, column,
            length, LANES, FEATURES, V_DIM, NORMALIZED and FEATURES[1] > 0, KIND,
        )  # fmt: skip
        moved = tl.dot(cotangents, tl.trans(z), input_precision=PRECISION)
        scores = tl.dot(joined(u, w, FEATURES, KIND), tl.trans(operand), input_precision=PRECISION)
        gradient += scores * moved * over[:, None]
        if NORMALIZED:
            scores = tl.dot(joined(a, b, FEATURES, KIND), tl.trans(y_unrotated), input_precision=PRECISION)
            gradient += scores * pull[:, None]
    weight = load_factors(factors, owner % X_HEADS, ahead, BAND, False, CHUNK, STEP)
    x, y = tl.arange(0, CHUNK), tl.arange(0, STEP)
    target = ((tl.program_id(2) * owners + owner) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)
    tl.store(out + target * (CHUNK * STEP) + x[:, None] * STEP + y[None, :], gradient * weight)
