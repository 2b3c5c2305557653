"""The gradients of linear attention on a GPU that are not those of values: of queries and of keys."""

# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false
# A kernel is Triton's language, in which a constexpr is whatever it was given.

import triton
import triton.language as tl

from ropewalk.kernels.linear_triton import (
    features,
    load_below,
    load_pairs,
    load_sums,
    members,
    row_offsets,
    segment_of,
    sums_of,
    tables,
    values,
)


@triton.jit(do_not_specialize=["length", "rows"])
def divide_rows(
    out, cotangent, below, scale, weight, o_b, o_h, o_n, g_b, g_h, g_n, length, rows,
    HEADS: tl.constexpr, V_DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The denominator of each row, infinite where there is none, and its cotangent, -(g . o) / denominator."""
    flat = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = flat < rows
    token, batch, head = flat % length, flat // length // HEADS, flat // length % HEADS
    column = tl.arange(0, COLUMNS)
    mask = there[:, None] & (column < V_DIM)[None, :]
    o = tl.load((out + batch * o_b + head * o_h + token * o_n)[:, None] + column[None, :], mask=mask, other=0.0)
    g = tl.load((cotangent + batch * g_b + head * g_h + token * g_n)[:, None] + column[None, :], mask=mask, other=0.0)
    under = tl.load(below + flat, mask=there, other=0.0)
    under = tl.where(under == 0, float("inf"), under)
    tl.store(scale + flat, under, mask=there)
    tl.store(weight + flat, -tl.sum(o.to(tl.float32) * g.to(tl.float32), axis=1) / under, mask=there)


@triton.jit
def slope(x, shift, MAP: tl.constexpr):
    """The derivative of the feature map."""
    x = x.to(tl.float32)
    if MAP == 0:
        x = tl.where(x > 0, 1.0, tl.exp(tl.where(x > 0, 0.0, x)))
    elif MAP == 1:
        x = tl.where(x > 0, 1.0, 0.0)
    elif MAP == 2:
        x = tl.where(x <= 0, 0.0, 2 * x)
    elif MAP == 3:
        x = tl.full(x.shape, 1.0, tl.float32)
    else:
        x = tl.exp(x - shift[:, None])
    return x


@triton.jit(
    do_not_specialize=["length", "row", "table_b", "table_h", "y_row", "y_table_b", "y_table_h", "count", "owner_step"]
)
def read_features(
    x, y, p, v, x_shift, y_shift, scale, weight, cos, sin, y_cos, y_sin, begins, sums, out,
    x_b, x_h, x_n, y_b, y_h, y_n, p_b, p_h, p_n, v_b, v_h, v_n, d_b, d_h, d_n,
    length, row, table_b, table_h, y_row, y_table_b, y_table_h, count, owner_step,
    X_HEADS: tl.constexpr, X_GROUP: tl.constexpr, Y_GROUP: tl.constexpr, FEATURES: tl.constexpr,
    V_DIM: tl.constexpr, X_MAP: tl.constexpr, Y_MAP: tl.constexpr, CAUSAL: tl.constexpr, REVERSE: tl.constexpr,
    PACKED: tl.constexpr, SEGMENT: tl.constexpr, CHUNK: tl.constexpr, LANES: tl.constexpr, COLUMNS: tl.constexpr,
    KIND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of x: of queries, from the keys y before them and their values v, with p their cotangents.

    REVERSE: of keys, from the queries y behind them and their cotangents v, with p the values. Cotangents are
    over `scale`; `weight`, the cotangent of the denominator, on what a query reads below the line.
    """
    batch, head = (tl.program_id(0) // X_HEADS).to(tl.int64), (tl.program_id(0) % X_HEADS).to(tl.int64)
    SHARED: tl.constexpr = X_HEADS // X_GROUP
    lane = tl.program_id(2) * LANES + tl.arange(0, LANES)
    column = tl.arange(0, COLUMNS)
    number = tl.program_id(1)
    begin, end = segment_of(begins, number, length, SEGMENT, PACKED)
    own = sums_of(
        sums, begins, batch * SHARED + head // X_GROUP, number.to(tl.int64), count, owner_step,
        SHARED, FEATURES[0] * (V_DIM + 1), CAUSAL, PACKED,
    )  # fmt: skip
    table, y_table = (row, table_b, table_h), (y_row, y_table_b, y_table_h)
    sum_a, sum_b = load_sums(own, lane, column, V_DIM, FEATURES)
    low_a, low_b = load_below(own, lane, V_DIM, FEATURES)
    first, second, has_first, has_second = members(lane, FEATURES)
    for step in range(0, SEGMENT // CHUNK):
        index = SEGMENT // CHUNK - 1 - step if REVERSE else step
        token = begin + index * CHUNK + tl.arange(0, CHUNK)
        there = token < end
        at = row_offsets(token, (x_b, x_h, x_n), batch, head, X_HEADS, length, table)
        at_p = row_offsets(token, (p_b, p_h, p_n), batch, head, X_HEADS, length, table)
        given = values(p, scale, at_p, there, column, V_DIM, not REVERSE, KIND)
        top_a = tl.dot(given, tl.trans(sum_a.to(KIND)), input_precision=PRECISION)
        top_b = tl.dot(given, tl.trans(sum_b.to(KIND)), input_precision=PRECISION)
        under_a = tl.zeros((CHUNK, LANES), tl.float32) + low_a[None, :]
        under_b = tl.zeros((CHUNK, LANES), tl.float32) + low_b[None, :]
        if CAUSAL:
            here = tl.arange(0, CHUNK)
            seen = here[:, None] <= here[None, :] if REVERSE else here[:, None] >= here[None, :]
            for other in tl.static_range(Y_GROUP):
                member = (head // X_GROUP) * Y_GROUP + other
                at_y = row_offsets(token, (y_b, y_h, y_n), batch, member, SHARED * Y_GROUP, length, y_table)
                at_v = row_offsets(token, (v_b, v_h, v_n), batch, member, SHARED * Y_GROUP, length, y_table)
                a, b, u, w = features(y, y_shift, y_cos, y_sin, at_y, there, lane, FEATURES, Y_MAP)
                z = values(v, scale, at_v, there, column, V_DIM, REVERSE, KIND)
                g, h = u.to(KIND), w.to(KIND)
                pull = tl.dot(given, tl.trans(z), input_precision=PRECISION)
                pull = tl.where(seen, pull, 0.0).to(KIND)
                top_a = tl.dot(pull, g, top_a, input_precision=PRECISION)
                top_b = tl.dot(pull, h, top_b, input_precision=PRECISION)
                sum_a = tl.dot(tl.trans(g), z, sum_a, input_precision=PRECISION)
                sum_b = tl.dot(tl.trans(h), z, sum_b, input_precision=PRECISION)
                if REVERSE:
                    factor = tl.load(weight + at_y[1], mask=there, other=0.0)[:, None]
                    a, b = a * factor, b * factor
                ones = tl.where(seen, 1.0, 0.0).to(KIND)
                under_a = tl.dot(ones, a.to(KIND), under_a, input_precision=PRECISION)
                under_b = tl.dot(ones, b.to(KIND), under_b, input_precision=PRECISION)
                low_a += tl.sum(a, axis=0)
                low_b += tl.sum(b, axis=0)
        if not REVERSE:
            factor = tl.load(weight + at[1], mask=there, other=0.0)[:, None]
            under_a, under_b = under_a * factor, under_b * factor
        if FEATURES[1]:
            c, s = tables(cos, sin, at[2], there, lane, FEATURES)
            top_a, top_b = top_a * c + top_b * s, top_b * c - top_a * s
        m, n = load_pairs(x + at[0], there, lane, FEATURES)
        moved = tl.zeros((CHUNK,), tl.float32)
        if X_MAP == 4:
            moved = tl.load(x_shift + at[1], mask=there, other=0.0)
        grad_a = (top_a + under_a) * slope(m, moved, X_MAP)
        grad_b = (top_b + under_b) * slope(n, moved, X_MAP)
        target = out + batch * d_b + head * d_h + token * d_n
        kind = out.dtype.element_ty
        tl.store(target[:, None] + first[None, :], grad_a.to(kind), mask=there[:, None] & has_first[None, :])
        tl.store(target[:, None] + second[None, :], grad_b.to(kind), mask=there[:, None] & has_second[None, :])
