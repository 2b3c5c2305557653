"""Gradients of queries and keys of linear attention on a GPU."""

# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false
# In Triton's language a tl.constexpr is its value, which type checkers do not know.

import triton
import triton.language as tl

from ropewalk.kernels.linear.triton_features import exponential, slope
from ropewalk.kernels.linear.triton_read import load_others, slot_of
from ropewalk.kernels.linear.triton_rows import (
    load_features,
    load_plain,
    load_sums,
    load_tables,
    load_values,
    parted,
    place_of,
    segment_of,
    store_pairs,
)
from ropewalk.kernels.linear.triton_weights import carried_decay, chunk_decay, pair_weights, weighted


@triton.jit
def store_gradients(
    top, under, low_a, low_b, over, pull, x_side, x_table, out, batch, x_head, head, begin, index, valid, offset,
    length, LANES: tl.constexpr, FEATURES: tl.constexpr, MAP: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Store the gradient of rows x, from that of rotated features `top`, and of others `under` and `low`."""
    top_a, top_b = parted(top)
    under_a, under_b = parted(under)
    under_a, under_b = under_a + low_a, under_b + low_b
    if not KEYS:
        top_a, top_b = top_a * over[:, None], top_b * over[:, None]
        under_a, under_b = under_a * pull[:, None], under_b * pull[:, None]
    # Only now, because the numbers above need the registers.
    m, n, shifts = load_features(
        x_side, batch, x_head, begin, index, valid, offset, length, LANES, FEATURES, MAP, False
    )
    if FEATURES[1]:
        c, s = load_tables(x_table, batch, x_head, begin, index, valid, offset, LANES, FEATURES)
        top_a, top_b = top_a * c + top_b * s, top_b * c - top_a * s
    grad_a = (top_a + under_a) * slope(m, shifts, MAP)
    grad_b = (top_b + under_b) * slope(n, shifts, MAP)
    target = out[0] + batch * out[1] + head * out[2] + begin * out[3] + index * out[3]
    store_pairs(target, valid, offset, grad_a, grad_b, LANES, FEATURES)


@triton.jit
def load_pulls(rows, at, valid, factor, READ: tl.constexpr):
    """Load the inverse denominators of queries and the cotangents of the denominators, or `factor` and 0."""
    over = tl.zeros(valid.shape, tl.float32) + factor
    pull = tl.zeros(valid.shape, tl.float32)
    if READ:
        over = tl.load(rows[0] + at, mask=valid, other=0.0)
        pull = tl.load(rows[1] + at, mask=valid, other=0.0)
    return over, pull


@triton.jit
def feature_rows(
    x_side, y_side, x_table, y_table, p, values, rows, decay, begins, running, plain, low, out, block,
    length, owners, count, factor,
    X_HEADS: tl.constexpr, X_GROUP: tl.constexpr, Y_GROUP: tl.constexpr, X_SHARE: tl.constexpr, Y_SHARE: tl.constexpr,
    FEATURES: tl.constexpr, V_DIM: tl.constexpr, X_MAP: tl.constexpr, Y_MAP: tl.constexpr, KEYS: tl.constexpr,
    NORMALIZED: tl.constexpr, SIDE: tl.constexpr, DECAY: tl.constexpr, PACKED: tl.constexpr, SEGMENT: tl.constexpr,
    CHUNK: tl.constexpr, LANES: tl.constexpr, COLUMNS: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of x of a segment, as `value_rows` computes values.

    x are queries, y the keys that they read, `values` those of y, and p the cotangents of x. KEYS: x are keys, y the
    queries that read them, `values` the cotangents of y, and p the values of x.
    """
    HEADS: tl.constexpr = X_HEADS // X_GROUP
    ALL: tl.constexpr = SIDE == 0
    # As in `value_rows`.
    ZEROS: tl.constexpr = KEYS and not NORMALIZED
    batch, head, number = place_of(owners, X_HEADS)
    shared, x_head = head // X_GROUP, head // X_SHARE
    offset = block * LANES
    column = tl.arange(0, COLUMNS)
    begin, end, _first, _last = segment_of(begins, number, count, length, SEGMENT, PACKED)
    size = (end - begin).to(tl.int32)
    logs = decay[0] + batch * decay[1] + shared * decay[2], decay[3]
    slot = slot_of(begins, number, count, batch, shared, HEADS, ALL, PACKED)
    sums = load_sums(running, slot, column, offset, LANES, FEATURES, V_DIM).to(tl.float32)
    plain_a, plain_b = load_plain(plain, slot, offset, LANES, FEATURES)
    chunks = (size + CHUNK - 1) // CHUNK
    for step in range(0, chunks):
        chunk = chunks - 1 - step if SIDE > 0 else step
        index = chunk * CHUNK + tl.arange(0, CHUNK)
        valid = index < size
        cotangents = load_values(p, batch, x_head, begin, index, valid, column, V_DIM, KIND)
        at = (batch * x_side[5] + x_head) * length + begin + index
        over, pull = load_pulls(rows, at, valid, factor, NORMALIZED and not KEYS)
        top = tl.dot(cotangents, sums.to(KIND), input_precision=PRECISION)
        # The sums of unrotated features of the rows before the chunk.
        near = tl.zeros((CHUNK,), tl.float32) + 1.0
        under = tl.zeros((CHUNK, 2 * LANES), tl.float32)
        if not ALL:
            tokens = tl.minimum(size - chunk * CHUNK, CHUNK)
            local, whole = chunk_decay(logs, begin, chunk * CHUNK, tokens, DECAY, CHUNK)
            if DECAY:
                near = carried_decay(local, whole, SIDE)
                top = top * near[:, None]
        low_a, low_b = near[:, None] * plain_a[None, :], near[:, None] * plain_b[None, :]
        if not ALL:
            if DECAY:
                gone = exponential(whole.to(tl.float32))
                sums, plain_a, plain_b = sums * gone, plain_a * gone, plain_b * gone
            far = carried_decay(local, whole, -SIDE)
            weight = pair_weights(index, index, local, logs, SIDE, DECAY)
            for visit in range(0, Y_GROUP):
                operand, kept, y_unrotated, z = load_others(
                    y_side, y_table, values, rows, batch, (shared * Y_GROUP + visit) // Y_SHARE, begin, index, valid,
                    offset, column, length, factor, near, near, far, LANES, FEATURES, V_DIM, Y_MAP, KEYS, NORMALIZED,
                    NORMALIZED, False, ZEROS, DECAY != 0, KIND,
                )  # fmt: skip
                moved = tl.dot(cotangents, tl.trans(z), input_precision=PRECISION)
                moved = weighted(moved, weight, DECAY != 0).to(KIND)
                top = tl.dot(moved, operand, top, input_precision=PRECISION)
                if NORMALIZED:
                    under = tl.dot(weight.to(KIND), y_unrotated, under, input_precision=PRECISION)
                sums = tl.dot(tl.trans(z), kept, sums, input_precision=PRECISION)
            added_a, added_b = load_plain(low, slot * (SEGMENT // CHUNK) + chunk, offset, LANES, FEATURES)
            plain_a, plain_b = plain_a + added_a, plain_b + added_b
        store_gradients(
            top, under, low_a, low_b, over, pull, x_side, x_table, out, batch, x_head, head, begin, index, valid,
            offset, length, LANES, FEATURES, X_MAP, KEYS,
        )  # fmt: skip
