"""Products of rows with the sums before them and with the tokens of their segment: outputs, gradients of values.

A program computes the rows of one segment, chunk by chunk. It keeps the sums of the rows before the chunk, to which
each chunk is added after it was read. Every row is therefore mapped and rotated once. SIDE is which rows y a row x
reads: -1 for those up to it, 1 for those from it on, 0 for all keys, whose sums it reads.
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
    load_rotated,
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
    carried_decay,
    chunk_decay,
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
    rotated = joined(r, t, FEATURES, KIND)
    kept, unrotated = rotated, rotated
    if WEIGHTED:
        kept = joined(r * far[:, None], t * far[:, None], FEATURES, KIND)
    if BELOW:
        unrotated = joined(e, f, FEATURES, KIND)
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
    total, below, rotated, unrotated, y_rotated, y_unrotated, z, weight, BELOW: tl.constexpr, WEIGHTED: tl.constexpr,
    KIND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the products of rows x with visible rows y to the numerator, and to the denominator if BELOW."""
    if BELOW:
        under = tl.dot(unrotated, tl.trans(y_unrotated), input_precision=PRECISION)
        below += tl.sum(weighted(under, weight, WEIGHTED), axis=1)
    scores = tl.dot(rotated, tl.trans(y_rotated), input_precision=PRECISION)
    total = tl.dot(weighted(scores, weight, WEIGHTED).to(KIND), z, total, input_precision=PRECISION)
    return total, below


@triton.jit
def store_quotients(
    total, below, out, inverse, batch, head, begin, index, valid, column, block, heads, length, factor, least,
    V_DIM: tl.constexpr, KEYS: tl.constexpr, NORMALIZED: tl.constexpr,
):  # fmt: skip
    """Store rows of outputs and the inverse of their denominators, or gradients of values if KEYS."""
    if NORMALIZED and not KEYS:
        # Division by 0 gives 0, as in `linear.torch.divide`. Both are scaled if the inverse would be infinite.
        scale = tl.where(tl.abs(below) < 2.0**-64, 2.0**64, 1.0)
        over = 1 / tl.where(tl.abs(below) <= least, float("inf"), below * scale)
        total = (total * scale[:, None]) * over[:, None]
        # Not by minimum and maximum, which would replace NaN by a number.
        bound = LARGEST / scale
        over = tl.where(over > bound, bound, tl.where(over < -bound, -bound, over)) * scale
        if block == 0:
            tl.store(inverse + (batch * heads + head) * length + begin + index, over, mask=valid)
    elif not KEYS:
        total = total * factor
    target = out[0] + batch * out[1] + head * out[2] + begin * out[3] + index * out[3]
    mask = valid[:, None] & (column < V_DIM)[None, :]
    tl.store(target[:, None] + column[None, :], total.to(out[0].dtype.element_ty), mask=mask)


@triton.jit
def value_rows(
    x_side, y_side, x_table, y_table, values, rows, decay, begins, running, plain, low, out, inverse, block,
    length, owners, count, factor, least,
    X_HEADS: tl.constexpr, X_GROUP: tl.constexpr, Y_GROUP: tl.constexpr, X_SHARE: tl.constexpr, Y_SHARE: tl.constexpr,
    FEATURES: tl.constexpr, V_DIM: tl.constexpr, X_MAP: tl.constexpr, Y_MAP: tl.constexpr, KEYS: tl.constexpr,
    NORMALIZED: tl.constexpr, SIDE: tl.constexpr, DECAY: tl.constexpr, SAME: tl.constexpr, PACKED: tl.constexpr,
    SEGMENT: tl.constexpr, CHUNK: tl.constexpr, LANES: tl.constexpr, COLUMNS: tl.constexpr, KIND: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the rows of a segment: outputs of queries x, or gradients of the values of keys x if KEYS."""
    HEADS: tl.constexpr = X_HEADS // X_GROUP
    BELOW: tl.constexpr = NORMALIZED and not KEYS
    # Whether rows read the sums over all keys.
    ALL: tl.constexpr = SIDE == 0
    # Causal queries never read a key after the last token, and queries after it are multiplied by 0.
    ZEROS: tl.constexpr = KEYS and not NORMALIZED
    batch, head, number = place_of(owners, X_HEADS)
    shared, x_head = head // X_GROUP, head // X_SHARE
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    begin, end, _first, _last = segment_of(begins, number, count, length, SEGMENT, PACKED)
    size = (end - begin).to(tl.int32)
    logs = decay[0] + batch * decay[1] + shared * decay[2], decay[3]
    slot = slot_of(begins, number, count, batch, shared, HEADS, ALL, PACKED)
    sums = load_sums(running, slot, column, 0, LANES, FEATURES, V_DIM).to(tl.float32)
    plain_a, plain_b = load_plain(plain, slot, 0, LANES, FEATURES)
    chunks = (size + CHUNK - 1) // CHUNK
    for step in range(0, chunks):
        chunk = chunks - 1 - step if SIDE > 0 else step
        index = chunk * CHUNK + tl.arange(0, CHUNK)
        valid = index < size
        a, b, u, w, c, s = load_rotated(
            x_side, x_table, batch, x_head, begin, index, valid, 0, length, LANES, FEATURES, X_MAP
        )
        rotated = joined(u, w, FEATURES, KIND)
        below, unrotated = tl.zeros((CHUNK,), tl.float32), rotated
        if BELOW:
            unrotated = joined(a, b, FEATURES, KIND)
            below = tl.sum(a * plain_a[None, :] + b * plain_b[None, :], axis=1)
        if ALL:
            total = tl.dot(rotated, tl.trans(sums.to(KIND)), input_precision=PRECISION)
        else:
            tokens = tl.minimum(size - chunk * CHUNK, CHUNK)
            local, whole = chunk_decay(logs, begin, chunk * CHUNK, tokens, DECAY, CHUNK)
            far = carried_decay(local, whole, -SIDE)
            # The rows y are loaded before the first product, so that few numbers are in registers at once.
            virtual = shared * Y_GROUP
            operand, kept, y_unrotated, z = load_others(
                y_side, y_table, values, rows, batch, virtual // Y_SHARE, begin, index, valid, 0, column, length,
                factor, c, s, far, LANES, FEATURES, V_DIM, Y_MAP, KEYS, NORMALIZED, BELOW, SAME, ZEROS, DECAY != 0,
                KIND,
            )  # fmt: skip
            more_a, more_b = load_plain(low, slot * (SEGMENT // CHUNK) + chunk, 0, LANES, FEATURES)
            total = tl.dot(rotated, tl.trans(sums.to(KIND)), input_precision=PRECISION)
            if DECAY:
                near = carried_decay(local, whole, SIDE)
                total, below = total * near[:, None], below * near
            weight = pair_weights(index, index, local, logs, SIDE, DECAY)
            total, below = add_visible(
                total, below, rotated, unrotated, operand, y_unrotated, z, weight, BELOW, DECAY != 0, KIND, PRECISION
            )
            if DECAY:
                gone = exponential(whole.to(tl.float32))
                sums, plain_a, plain_b = sums * gone, plain_a * gone, plain_b * gone
            sums = tl.dot(tl.trans(z), kept, sums, input_precision=PRECISION)
            plain_a, plain_b = plain_a + more_a, plain_b + more_b
            if Y_GROUP > 1:
                for visit in range(1, Y_GROUP):
                    operand, kept, y_unrotated, z = load_others(
                        y_side, y_table, values, rows, batch, (virtual + visit) // Y_SHARE, begin, index, valid, 0,
                        column, length, factor, c, s, far, LANES, FEATURES, V_DIM, Y_MAP, KEYS, NORMALIZED, BELOW,
                        SAME, ZEROS, DECAY != 0, KIND,
                    )  # fmt: skip
                    total, below = add_visible(
                        total, below, rotated, unrotated, operand, y_unrotated, z, weight, BELOW, DECAY != 0, KIND,
                        PRECISION,
                    )  # fmt: skip
                    sums = tl.dot(tl.trans(z), kept, sums, input_precision=PRECISION)
        store_quotients(
            total, below, out, inverse, batch, head, begin, index, valid, column, block, X_HEADS, length, factor,
            least, V_DIM, KEYS, NORMALIZED,
        )  # fmt: skip
