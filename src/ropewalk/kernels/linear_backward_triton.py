"""The gradients of linear attention on a GPU that are not those of values: of queries and of keys."""

# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright: reportPossiblyUnboundVariable=false
# A kernel is Triton's language, in which a constexpr is whatever it was given.

import triton
import triton.language as tl

from ropewalk.kernels.linear_triton import (
    block_of,
    features,
    load_below,
    load_pairs,
    load_sums,
    members,
    side_at,
    sums_of,
    tables,
    values,
    values_at,
)


@triton.jit(do_not_specialize=["length", "rows"])
def divide_rows(
    out, cotangent, below, scale, weight, o_b, o_h, o_n, g_b, g_h, g_n, length, rows,
    HEADS: tl.constexpr, V_DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """1 / denominator of each row, and the cotangent of the denominator, -(g . o) / denominator."""
    flat = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = flat < rows
    token, batch, head = flat % length, flat // length // HEADS, flat // length % HEADS
    column = tl.arange(0, COLUMNS)
    mask = there[:, None] & (column < V_DIM)[None, :]
    o = tl.load((out + batch * o_b + head * o_h + token * o_n)[:, None] + column[None, :], mask=mask, other=0.0)
    g = tl.load((cotangent + batch * g_b + head * g_h + token * g_n)[:, None] + column[None, :], mask=mask, other=0.0)
    under = tl.load(below + flat, mask=there, other=0.0)
    inverse = tl.where(under == 0, 0.0, 1.0 / tl.where(under == 0, 1.0, under))
    tl.store(scale + flat, inverse, mask=there)
    tl.store(weight + flat, -inverse * tl.sum(o.to(tl.float32) * g.to(tl.float32), axis=1), mask=there)


@triton.jit
def slope(x, shift, MAP: tl.constexpr):
    """The derivative of the feature map."""
    x = x.to(tl.float32)
    if MAP == 0:
        x = tl.where(x > 0, 1.0, tl.exp(tl.minimum(x, 0.0)))
    elif MAP == 1:
        x = tl.where(x > 0, 1.0, 0.0)
    elif MAP == 2:
        x = 2 * tl.maximum(x, 0.0)
    elif MAP == 3:
        x = tl.full(x.shape, 1.0, tl.float32)
    else:
        x = tl.exp(x - shift[:, None])
    return x


@triton.jit
def _pull_block(
    given, y, v, weight, local, size, lane, column, row, top, under, low,
    FEATURES: tl.constexpr, V_DIM: tl.constexpr, MAP: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr,
    REVERSE: tl.constexpr, DIAGONAL: tl.constexpr,
):  # fmt: skip
    """Adds what a block of y and v gives to the gradient of rows: above the line, turned, and below it."""
    a, b, u, w = features(y, local, local < size, lane, FEATURES, MAP)
    z = values(v, local, local < size, column, V_DIM, REVERSE, KIND)
    pull = tl.dot(given, tl.trans(z), input_precision=PRECISION)
    if DIAGONAL:
        seen = row[:, None] <= local[None, :] if REVERSE else row[:, None] >= local[None, :]
        pull = tl.where(seen, pull, 0.0)
    top_a = tl.dot(pull.to(KIND), u.to(KIND), top[0], input_precision=PRECISION)
    top_b = tl.dot(pull.to(KIND), w.to(KIND), top[1], input_precision=PRECISION)
    if REVERSE:
        factor = tl.load(weight + local, mask=local < size, other=0.0)[:, None]
        a, b = a * factor, b * factor
    under_a, under_b, low_a, low_b = under[0], under[1], low[0], low[1]
    if DIAGONAL:
        ones = tl.where(seen, 1.0, 0.0).to(KIND)
        under_a = tl.dot(ones, a.to(KIND), under_a, input_precision=PRECISION)
        under_b = tl.dot(ones, b.to(KIND), under_b, input_precision=PRECISION)
    else:
        low_a += tl.sum(a, axis=0)
        low_b += tl.sum(b, axis=0)
    return top_a, top_b, under_a, under_b, low_a, low_b


@triton.jit(
    do_not_specialize=["length", "row", "table_b", "table_h", "y_row", "y_table_b", "y_table_h", "count", "owner_step"]
)
def read_features(
    x, y, p, v, x_shift, y_shift, scale, weight, cos, sin, y_cos, y_sin, begins, sums, out,
    x_b, x_h, x_n, y_b, y_h, y_n, p_b, p_h, p_n, v_b, v_h, v_n, d_b, d_h, d_n,
    length, row, table_b, table_h, y_row, y_table_b, y_table_h, count, owner_step,
    X_HEADS: tl.constexpr, X_GROUP: tl.constexpr, Y_GROUP: tl.constexpr, FEATURES: tl.constexpr,
    V_DIM: tl.constexpr, X_MAP: tl.constexpr, Y_MAP: tl.constexpr, CAUSAL: tl.constexpr, REVERSE: tl.constexpr,
    PACKED: tl.constexpr, SEGMENT: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, LANES: tl.constexpr,
    COLUMNS: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of x: of queries, from the keys y before them and their values v, with p their cotangents.

    REVERSE: of keys, from the queries y behind them and their cotangents v, with p the values. `scale` is on
    cotangents; `weight`, the cotangent of the denominator, on what a query reads below the line.
    """
    batch, head = (tl.program_id(1) // X_HEADS).to(tl.int64), (tl.program_id(1) % X_HEADS).to(tl.int64)
    SHARED: tl.constexpr = X_HEADS // X_GROUP
    lane = tl.program_id(2) * LANES + tl.arange(0, LANES)
    column = tl.arange(0, COLUMNS)
    segment, begin, size, start = block_of(tl.program_id(0), begins, length, SEGMENT, ROWS, PACKED)
    if start >= size:
        return
    own = sums_of(
        sums, begins, batch * SHARED + head // X_GROUP, segment, count, owner_step,
        SHARED, FEATURES[0] * (V_DIM + 1), CAUSAL, PACKED,
    )  # fmt: skip
    local = start + tl.arange(0, ROWS)
    there = local < size
    table = (row, table_b, table_h)
    side = side_at(x, x_shift, cos, sin, (x_b, x_h, x_n), table, batch, head, X_HEADS, length, begin, FEATURES)
    mine = values_at(p, scale, (p_b, p_h, p_n), batch, head, X_HEADS, length, begin)
    given = values(mine, local, there, column, V_DIM, not REVERSE, KIND)
    sum_a, sum_b = load_sums(own, lane, column, V_DIM, FEATURES)
    low_a, low_b = load_below(own, lane, V_DIM, FEATURES)
    top_a = tl.dot(given, tl.trans(sum_a.to(KIND)), input_precision=PRECISION)
    top_b = tl.dot(given, tl.trans(sum_b.to(KIND)), input_precision=PRECISION)
    under_a = tl.zeros((ROWS, LANES), tl.float32)
    under_b = tl.zeros((ROWS, LANES), tl.float32)
    if CAUSAL:
        y_table = (y_row, y_table_b, y_table_h)
        for other in tl.static_range(Y_GROUP):
            where = (batch, (head // X_GROUP) * Y_GROUP + other, SHARED * Y_GROUP, length, begin)
            their = side_at(y, y_shift, y_cos, y_sin, (y_b, y_h, y_n), y_table, *where, FEATURES)
            others = values_at(v, scale, (v_b, v_h, v_n), *where)
            weights = values_at(v, weight, (v_b, v_h, v_n), *where)[1]
            block = start + ROWS if REVERSE else start * 0
            stop = size if REVERSE else start
            while block < stop:
                top_a, top_b, under_a, under_b, low_a, low_b = _pull_block(
                    given, their, others, weights, block + tl.arange(0, CHUNK), stop, lane, column, local,
                    (top_a, top_b), (under_a, under_b), (low_a, low_b),
                    FEATURES, V_DIM, Y_MAP, KIND, PRECISION, REVERSE, False,
                )  # fmt: skip
                block += CHUNK
            for step in tl.static_range(ROWS // CHUNK):
                top_a, top_b, under_a, under_b, low_a, low_b = _pull_block(
                    given, their, others, weights, start + step * CHUNK + tl.arange(0, CHUNK), size, lane, column,
                    local, (top_a, top_b), (under_a, under_b), (low_a, low_b),
                    FEATURES, V_DIM, Y_MAP, KIND, PRECISION, REVERSE, True,
                )  # fmt: skip
    under_a, under_b = under_a + low_a[None, :], under_b + low_b[None, :]
    if not REVERSE:
        own_weight = values_at(p, weight, (p_b, p_h, p_n), batch, head, X_HEADS, length, begin)[1]
        factor = tl.load(own_weight + local, mask=there, other=0.0)[:, None]
        under_a, under_b = under_a * factor, under_b * factor
    if FEATURES[1]:
        c, s = tables(side[2], side[3], local, there, lane, FEATURES)
        top_a, top_b = top_a * c + top_b * s, top_b * c - top_a * s
    m, n = load_pairs(side[0], local, there, lane, side[4], FEATURES)
    moved = tl.zeros((ROWS,), tl.float32)
    if X_MAP == 4:
        moved = tl.load(side[1] + local, mask=there, other=0.0)
    grad_a = (top_a + under_a) * slope(m, moved, X_MAP)
    grad_b = (top_b + under_b) * slope(n, moved, X_MAP)
    first, second, has_first, has_second = members(lane, FEATURES)
    target = out + (batch * d_b + head * d_h + begin * d_n)
    at = (local * d_n)[:, None]
    kind = out.dtype.element_ty
    tl.store(target + (at + first[None, :]), grad_a.to(kind), mask=there[:, None] & has_first[None, :])
    tl.store(target + (at + second[None, :]), grad_b.to(kind), mask=there[:, None] & has_second[None, :])
