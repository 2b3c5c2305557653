"""Gradients of queries and keys of linear attention on a GPU."""

# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false
# In Triton's language a tl.constexpr is its value, which type checkers do not know.

import triton
import triton.language as tl

from ropewalk.kernels.linear.stored.triton_read import chunks_of, load_sums, sums_of, visible
from ropewalk.kernels.linear.stored.triton_sums import (
    decays,
    halves,
    load_rotated,
    load_values,
    low_sums,
    offsets,
    place_of,
    segment_of,
    slots,
    tables_of,
)
from ropewalk.kernels.linear.triton_features import EXP, NOTHING, mapped, slope
from ropewalk.kernels.linear.triton_rows import load_pairs, store_pairs
from ropewalk.kernels.linear.triton_weights import head_decay


@triton.jit(do_not_specialize=["length", "rows"])
def divide_rows(
    out, cotangent, below, scale, weight, o_b, o_h, o_n, g_b, g_h, g_n, length, rows,
    HEADS: tl.constexpr, V_DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Store the denominator of each row, infinity instead of 0, and its cotangent -(g . o) / denominator."""
    flat = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    valid = flat < rows
    token, batch, head = flat % length, flat // length // HEADS, flat // length % HEADS
    column = tl.arange(0, COLUMNS)
    mask = valid[:, None] & (column < V_DIM)[None, :]
    o = tl.load((out + batch * o_b + head * o_h + token * o_n)[:, None] + column[None, :], mask=mask, other=0.0)
    g = tl.load((cotangent + batch * g_b + head * g_h + token * g_n)[:, None] + column[None, :], mask=mask, other=0.0)
    under = tl.load(below + flat, mask=valid, other=0.0)
    under = tl.where(under == 0, float("inf"), under)
    tl.store(scale + flat, under, mask=valid)
    tl.store(weight + flat, -tl.sum(o.to(tl.float32) * g.to(tl.float32), axis=1) / under, mask=valid)


@triton.jit(do_not_specialize=["length", "row", "table_b", "table_h", "owners", "count", "decay_b", "decay_h"])
def read_features(
    x, y, rotated, p, v, x_shift, y_shift, scale, weight, cos, sin, decay, begins, sums, plain, low, out,
    x_b, x_h, x_n, y_b, y_h, y_n, p_b, p_h, p_n, v_b, v_h, v_n, d_b, d_h, d_n, decay_b, decay_h,
    length, row, table_b, table_h, owners, count, factor,
    X_HEADS: tl.constexpr, X_GROUP: tl.constexpr, Y_GROUP: tl.constexpr, FEATURES: tl.constexpr,
    V_DIM: tl.constexpr, X_MAP: tl.constexpr, Y_MAP: tl.constexpr, NORMALIZED: tl.constexpr, CAUSAL: tl.constexpr,
    REVERSE: tl.constexpr, DECAY: tl.constexpr, PACKED: tl.constexpr, SEGMENT: tl.constexpr, LOW: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, LANES: tl.constexpr, COLUMNS: tl.constexpr, KIND: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of x.

    Forward order: x are queries, y the keys before them, v the values of y, and p the cotangents of x. REVERSE: x are
    keys, y the queries after them, v the cotangents of y, and p the values of x. `rotated` contains rotated features of
    y, which are divided by `scale` if y are queries. `weight` is the cotangent of the denominator. If not NORMALIZED,
    there is none, and `factor` is a factor on the outputs. A DECAY is as in `read_values`.
    """
    HALF: tl.constexpr = (FEATURES[0] + 1) // 2
    SHARED: tl.constexpr = X_HEADS // X_GROUP
    batch, head, number, index = place_of(owners, X_HEADS, SEGMENT // ROWS)
    owner = batch * SHARED + head // X_GROUP
    offset = tl.program_id(1) * LANES
    feature, has, place, known = slots(tl.arange(0, 2 * LANES), offset, LANES, FEATURES)
    column = tl.arange(0, COLUMNS)
    begin, end = segment_of(begins, number, length, SEGMENT, PACKED)
    sums_index = sums_of(begins, batch, head // X_GROUP, number, count, SHARED, CAUSAL, PACKED)
    above = sums + sums_index * (FEATURES[0] * (V_DIM if CAUSAL else V_DIM + 1))
    row_index = index * ROWS + tl.arange(0, ROWS)
    token = begin + row_index
    valid = token < end
    cotangents = load_values(p, batch * p_b + head * p_h + token * p_n, valid, column, V_DIM, KIND)
    top = tl.dot(cotangents, tl.trans(load_sums(above, feature, has, column, V_DIM, KIND)), input_precision=PRECISION)
    source = plain + sums_index * (FEATURES[0] if CAUSAL else FEATURES[0] * (V_DIM + 1))
    below = tl.load(source + feature, mask=has, other=0.0)
    g = 0.0
    if DECAY:
        g = head_decay(decay + batch * decay_b + (head // X_GROUP) * decay_h)
        inside, outside = decays(g, index, (end - begin).to(tl.int32), ROWS, REVERSE)
        top, below = top * (inside * outside)[:, None], below * outside
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
            pull = tl.dot(cotangents, tl.trans(z), input_precision=PRECISION)
            pull = visible(pull, g, row_index, other_index, DECAY, REVERSE)
            top = tl.dot(pull.to(KIND), t, top, input_precision=PRECISION)
    if CAUSAL and NORMALIZED:
        if REVERSE:
            first, last = (index + 1) * (ROWS // LOW), index * 0 + SEGMENT // LOW
        else:
            first, last = index * 0, index * (ROWS // LOW)
        below += low_sums(
            low, place, known, first, last, g, index * ROWS, number, owners // X_GROUP * Y_GROUP, owner, HALF,
            SEGMENT // LOW, LOW, Y_GROUP, DECAY, REVERSE,
        )  # fmt: skip
    under = tl.zeros((ROWS, 2 * LANES), tl.float32) + below[None, :]
    if DECAY:
        under = under * inside[:, None]
    if CAUSAL and NORMALIZED:
        ones = visible(tl.full((ROWS, ROWS), 1.0, tl.float32), g, row_index, row_index, DECAY, REVERSE).to(KIND)
        for other in range(0, Y_GROUP):
            member = (head // X_GROUP) * Y_GROUP + other
            at_y = offsets(token, (y_b, y_h, y_n), batch, member, SHARED * Y_GROUP, length)
            mask = valid[:, None] & has[None, :]
            FILL: tl.constexpr = NOTHING[Y_MAP]
            near = tl.load(y + at_y[0][:, None] + feature[None, :], mask=mask, other=FILL)
            shifts = tl.zeros((ROWS,), tl.float32)
            if Y_MAP == EXP:
                shifts = tl.load(y_shift + at_y[1], mask=valid, other=0.0)
            near = mapped(near, shifts, Y_MAP)
            if REVERSE:
                near = near * tl.load(weight + at_y[1], mask=valid, other=0.0)[:, None]
            under = tl.dot(ones, near.to(KIND), under, input_precision=PRECISION)
    at = offsets(token, (x_b, x_h, x_n), batch, head, X_HEADS, length)
    if not REVERSE and not NORMALIZED:
        top, under = top * factor, tl.zeros((ROWS, 2 * LANES), tl.float32)
    elif not REVERSE:
        top = top / tl.load(scale + at[1], mask=valid, other=1.0)[:, None]
        under = under * tl.load(weight + at[1], mask=valid, other=0.0)[:, None]
    top_a, top_b = halves(top, FEATURES)
    under_a, under_b = halves(under, FEATURES)
    lane = offset + tl.arange(0, LANES)
    if FEATURES[1]:
        c, s = tables_of(cos, sin, (row, table_b, table_h), batch, head, token, valid, lane, FEATURES)
        top_a, top_b = top_a * c + top_b * s, top_b * c - top_a * s
    m, n = load_pairs(x + at[0], valid, offset, LANES, FEATURES, NOTHING[X_MAP])
    shifts = tl.zeros((ROWS,), tl.float32)
    if X_MAP == EXP:
        shifts = tl.load(x_shift + at[1], mask=valid, other=0.0)
    grad_a = (top_a + under_a) * slope(m, shifts, X_MAP)
    grad_b = (top_b + under_b) * slope(n, shifts, X_MAP)
    target = out + batch * d_b + head * d_h + token * d_n
    store_pairs(target, valid, offset, grad_a, grad_b, LANES, FEATURES)
