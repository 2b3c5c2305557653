"""Products of rows with the sums before them and with the tokens of their segment: outputs, gradients of values."""

# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false
# In Triton's language a tl.constexpr is its value, which type checkers do not know.

import triton
import triton.language as tl

from ropewalk.kernels.linear.stored.triton_sums import (
    decays,
    features,
    load_rotated,
    load_values,
    low_sums,
    offsets,
    place_of,
    places,
    rotated_pairs,
    segment_of,
    slots,
    store_rotated,
)
from ropewalk.kernels.linear.triton_rows import members
from ropewalk.kernels.linear.triton_step import SMALLEST
from ropewalk.kernels.linear.triton_weights import distance_weights, head_decay

# A decayed denominator that is not larger is an underflow.
LEAST = tl.constexpr(SMALLEST)


@triton.jit
def sums_of(
    begins, batch, shared, segment, count, SHARED: tl.constexpr, CAUSAL: tl.constexpr, PACKED: tl.constexpr
):  # fmt: skip
    """Return the index of the sums that the rows of a segment read.

    Causal: the running sums of the segment, which are stored in two tensors. Otherwise: the sums of the sequence, which
    are stored in one tensor.
    """
    if CAUSAL:
        index = (batch * SHARED + shared) * count + segment
    elif PACKED:
        index = tl.load(begins + 2 * count + segment) * SHARED + shared
    else:
        index = batch * SHARED + shared
    return index


@triton.jit
def load_sums(sums, feature, has, column, V_DIM: tl.constexpr, KIND: tl.constexpr):
    """Load a block of the sum of (R k) v^T [features, columns] as an operand."""
    mask = has[:, None] & (column < V_DIM)[None, :]
    return tl.load(sums + feature[:, None] * V_DIM + column[None, :], mask=mask, other=0.0).to(KIND)


@triton.jit
def chunks_of(begin, end, index, ROWS: tl.constexpr, CHUNK: tl.constexpr, REVERSE: tl.constexpr):
    """Return the range of chunks that a block of rows reads: up to its last token, or from its first if REVERSE."""
    tokens = (end - begin).to(tl.int32)
    if REVERSE:
        first = index * (ROWS // CHUNK)
        last = tl.maximum((tokens + CHUNK - 1) // CHUNK, first)
    else:
        first = index * 0
        last = (tl.minimum(tokens, (index + 1) * ROWS) + CHUNK - 1) // CHUNK
    return first, last


@triton.jit
def visible(scores, g, x_index, y_index, DECAY: tl.constexpr, REVERSE: tl.constexpr):
    """Return scores of rows x and y times the decay between them, 0 if y is not visible: after x, or before it."""
    if DECAY:
        # Distances of integers would be converted to float32, which is slow.
        x_index, y_index = x_index.to(tl.float32), y_index.to(tl.float32)
        scores = scores * distance_weights(g, x_index, y_index)
    seen = x_index[:, None] <= y_index[None, :] if REVERSE else x_index[:, None] >= y_index[None, :]
    return tl.where(seen, scores, 0.0)


@triton.jit(do_not_specialize=["length", "row", "table_b", "table_h", "owners", "count", "decay_b", "decay_h"])
def read_below(
    x, y, x_shift, y_shift, cos, sin, decay, begins, plain, low, rotated, below,
    x_b, x_h, x_n, y_b, y_h, y_n, decay_b, decay_h, length, row, table_b, table_h, owners, count,
    X_HEADS: tl.constexpr, X_GROUP: tl.constexpr, FEATURES: tl.constexpr, V_DIM: tl.constexpr, X_MAP: tl.constexpr,
    Y_MAP: tl.constexpr, CAUSAL: tl.constexpr, DECAY: tl.constexpr, PACKED: tl.constexpr, SEGMENT: tl.constexpr,
    LOW: tl.constexpr, LANES: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store rotated features of queries x, and their denominators: unrotated queries times sums of keys y."""
    HALF: tl.constexpr = (FEATURES[0] + 1) // 2
    BLOCKS: tl.constexpr = SEGMENT // LOW
    SHARED: tl.constexpr = X_HEADS // X_GROUP
    batch, head, number, index = place_of(owners, X_HEADS, BLOCKS)
    begin, end = segment_of(begins, number, length, SEGMENT, PACKED)
    lane, shared = tl.arange(0, LANES), head // X_GROUP
    token = begin + index * LOW + tl.arange(0, LOW)
    valid = token < end
    at = offsets(token, (x_b, x_h, x_n), batch, head, X_HEADS, length)
    a, b = features(x, x_shift, at, valid, LANES, FEATURES, X_MAP)
    u, w = rotated_pairs(a, b, cos, sin, (row, table_b, table_h), batch, head, token, valid, lane, FEATURES)
    store_rotated(rotated, at[1], valid, u, w, LANES, FEATURES)
    sums_index = sums_of(begins, batch, shared, number, count, SHARED, CAUSAL, PACKED)
    source = plain + sums_index * (FEATURES[0] if CAUSAL else FEATURES[0] * (V_DIM + 1))
    first, second, has_first, has_second = members(lane, FEATURES)
    low_a = tl.load(source + first, mask=has_first, other=0.0)
    low_b = tl.load(source + second, mask=has_second, other=0.0)
    g = 0.0
    if DECAY:
        g = head_decay(decay + batch * decay_b + shared * decay_h)
        inside, outside = decays(g, index, (end - begin).to(tl.int32), LOW, False)
        low_a, low_b = low_a * outside, low_b * outside
    if CAUSAL:
        known, owner, others = lane < HALF, batch * SHARED + shared, owners // X_GROUP
        place_a, place_b = places(lane, FEATURES)
        size = index * LOW
        low_a += low_sums(
            low, place_a, known, 0, index, g, size, number, others, owner, HALF, BLOCKS, LOW, 1, DECAY, False
        )
        low_b += low_sums(
            low, place_b, known, 0, index, g, size, number, others, owner, HALF, BLOCKS, LOW, 1, DECAY, False
        )
    sum_a, sum_b = low_a[None, :], low_b[None, :]
    if DECAY:
        sum_a, sum_b = sum_a * inside[:, None], sum_b * inside[:, None]
    if CAUSAL:
        at_y = offsets(token, (y_b, y_h, y_n), batch, shared, SHARED, length)
        e, f = features(y, y_shift, at_y, valid, LANES, FEATURES, Y_MAP)
        row_index = tl.arange(0, LOW)
        seen = visible(tl.full((LOW, LOW), 1.0, tl.float32), g, row_index, row_index, DECAY, False).to(KIND)
        sum_a += tl.dot(seen, e.to(KIND), input_precision=PRECISION)
        sum_b += tl.dot(seen, f.to(KIND), input_precision=PRECISION)
    under = tl.sum(a * sum_a + b * sum_b, axis=1)
    if DECAY:
        under = tl.where(tl.abs(under) <= LEAST, 0.0, under)
    tl.store(below + at[1], under, mask=valid)


@triton.jit(do_not_specialize=["length", "owners", "count", "decay_b", "decay_h"])
def read_values(
    rows, rotated, v, decay, begins, sums, out, below,
    v_b, v_h, v_n, o_b, o_h, o_n, decay_b, decay_h, length, owners, count, factor,
    X_HEADS: tl.constexpr, X_GROUP: tl.constexpr, Y_GROUP: tl.constexpr, FEATURES: tl.constexpr,
    V_DIM: tl.constexpr, NORMALIZED: tl.constexpr, CAUSAL: tl.constexpr, REVERSE: tl.constexpr, DECAY: tl.constexpr,
    PACKED: tl.constexpr, SEGMENT: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, LANES: tl.constexpr,
    COLUMNS: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the output of linear attention: rotated queries times sums of keys and values, over the denominator.

    A row reads the sums before its segment, and the tokens of its segment up to itself. REVERSE is for the gradient of
    values: keys read the queries after them, and there is no denominator. X_GROUP heads of `rows` share one sum, to
    which Y_GROUP heads of `rotated` contribute. If not NORMALIZED, outputs are multiplied by `factor`. With a DECAY,
    sums are decayed to the edge of the segment.
    """
    HALF: tl.constexpr = (FEATURES[0] + 1) // 2
    SHARED: tl.constexpr = X_HEADS // X_GROUP
    batch, head, number, index = place_of(owners, X_HEADS, SEGMENT // ROWS)
    if not REVERSE:
        index = SEGMENT // ROWS - 1 - index  # blocks with the most work start first
    feature, has, place, known = slots(tl.arange(0, 2 * LANES), 0, LANES, FEATURES)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    begin, end = segment_of(begins, number, length, SEGMENT, PACKED)
    sums_index = sums_of(begins, batch, head // X_GROUP, number, count, SHARED, CAUSAL, PACKED)
    source = sums + sums_index * (FEATURES[0] * (V_DIM if CAUSAL else V_DIM + 1))
    row_index = index * ROWS + tl.arange(0, ROWS)
    token = begin + row_index
    valid = token < end
    flat = (batch * X_HEADS + head) * length + begin
    row = load_rotated(rows, flat, row_index, valid, place, known, HALF)
    total = tl.dot(row, load_sums(source, feature, has, column, V_DIM, KIND), input_precision=PRECISION)
    g = 0.0
    if DECAY:
        g = head_decay(decay + batch * decay_b + (head // X_GROUP) * decay_h)
        inside, outside = decays(g, index, (end - begin).to(tl.int32), ROWS, REVERSE)
        total = total * (inside * outside)[:, None]
    if CAUSAL:
        start, stop = chunks_of(begin, end, index, ROWS, CHUNK, REVERSE)
        for step in range(start * Y_GROUP, stop * Y_GROUP):
            member = (head // X_GROUP) * Y_GROUP + step % Y_GROUP
            other_index = (step // Y_GROUP) * CHUNK + tl.arange(0, CHUNK)
            key = begin + other_index
            has_key = key < end
            base = (batch * (SHARED * Y_GROUP) + member) * length + begin
            t = load_rotated(rotated, base, other_index, has_key, place, known, HALF)
            z = load_values(v, batch * v_b + member * v_h + key * v_n, has_key, column, V_DIM, KIND)
            scores = tl.dot(row, tl.trans(t), input_precision=PRECISION)
            scores = visible(scores, g, row_index, other_index, DECAY, REVERSE)
            total = tl.dot(scores.to(KIND), z, total, input_precision=PRECISION)
    if not REVERSE and not NORMALIZED:
        total = total * factor
    elif not REVERSE:
        # Division by 0 gives 0, as in `linear.torch.divide`: all features of the visible keys are 0.
        under = tl.load(below + flat + row_index, mask=valid, other=1.0)
        total = total / tl.where(under == 0, float("inf"), under)[:, None]
    target = out + batch * o_b + head * o_h + token * o_n
    mask = valid[:, None] & (column < V_DIM)[None, :]
    tl.store(target[:, None] + column[None, :], total.to(out.dtype.element_ty), mask=mask)
