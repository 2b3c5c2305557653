"""The kernels that read sums: outputs, and gradients of queries, keys, values and of a band.

Rows read the sums before them and their own segment, chunk by chunk, or are computed chunk by chunk APART from each
other. SIDE is which rows y a row x reads: -1 for those up to it, 1 for those from it on, 0 for all.
"""

# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false
# In Triton's language a tl.constexpr is its value, which type checkers do not know.

import triton
import triton.language as tl

from ropewalk.kernels.linear.triton_apart import factor_gradient, feature_chunk, key_chunk, value_chunk
from ropewalk.kernels.linear.triton_backward import feature_rows
from ropewalk.kernels.linear.triton_read import value_rows


@triton.jit(do_not_specialize=["x_row", "y_row", "length", "owners", "count", "slots", "x_heads", "y_heads"])
def read_values(
    x, y, v, x_shift, y_shift, x_cos, x_sin, y_cos, y_sin, decay, band, factors, begins, running, inner, plain, low,
    y_rotated, y_mapped, out, inverse, x_row, y_row, x_b, x_h, x_n, y_b, y_h, y_n, v_b, v_h, v_n, o_b, o_h, o_n, d_b,
    d_h, d_n, x_table_b, x_table_h, y_table_b, y_table_h, length, owners, count, slots, x_heads, y_heads, factor, least,
    X_HEADS: tl.constexpr, X_GROUP: tl.constexpr, Y_SHARE: tl.constexpr, FEATURES: tl.constexpr, V_DIM: tl.constexpr,
    X_MAP: tl.constexpr, Y_MAP: tl.constexpr, NORMALIZED: tl.constexpr, APART: tl.constexpr, SIDE: tl.constexpr,
    DECAY: tl.constexpr, BAND: tl.constexpr, PACKED: tl.constexpr, SEGMENT: tl.constexpr, CHUNK: tl.constexpr,
    STEP: tl.constexpr, LANES: tl.constexpr, COLUMNS: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr,
    SAME: tl.constexpr,
):  # fmt: skip
    """Store the outputs of queries x, which read keys y with values v, and the inverse of each denominator.

    Args:
        running: Sums before each segment. If SIDE is 0, then those after it if APART, otherwise those of all keys.
        inner: If APART, sums within each segment before each chunk, then those after it.
        plain: As `running`, of unrotated keys.
        low: As `inner`, of unrotated keys. If not APART, sums over each chunk.
        y_rotated: If APART, rotated features of keys, as `sum_segments` stores them.
        y_mapped: The same without rotation, if APART, NORMALIZED, and there is a rotation.
        slots: Number of sums of segments in one direction, of all sequences and heads.
        factor: Factor on outputs that are not divided.
        least: Denominators up to this are 0.
    """
    x_side, y_side = (x, x_shift, x_b, x_h, x_n, x_heads), (y, y_shift, y_b, y_h, y_n, y_heads)
    x_table, y_table = (x_cos, x_sin, x_row, x_table_b, x_table_h), (y_cos, y_sin, y_row, y_table_b, y_table_h)
    values, logs, outs = (v, v_b, v_h, v_n), (decay, d_b, d_h, d_n), (out, o_b, o_h, o_n)
    if APART:
        y_stored = y_rotated, y_mapped, y_heads
        value_chunk(
            x_side, y_stored, y_stored, x_table, values, logs, band, factors, begins, (running, inner, plain, low),
            outs, inverse, tl.program_id(1), length, owners, count, slots, factor, least, X_HEADS, X_GROUP, 1, 1,
            Y_SHARE, FEATURES, V_DIM, X_MAP, False, NORMALIZED, SIDE, DECAY, BAND,
            PACKED, SEGMENT, CHUNK, STEP, LANES, COLUMNS, KIND, PRECISION,
        )  # fmt: skip
    else:
        value_rows(
            x_side, y_side, x_table, y_table, values, (inverse, inverse), logs, begins, running, plain, low, outs,
            inverse, tl.program_id(1), length, owners, count, factor, least, X_HEADS, X_GROUP, 1, 1, Y_SHARE, FEATURES,
            V_DIM, X_MAP, Y_MAP, False, NORMALIZED, SIDE, DECAY, SAME, PACKED, SEGMENT, CHUNK, LANES, COLUMNS, KIND,
            PRECISION,
        )  # fmt: skip


@triton.jit(do_not_specialize=["x_row", "y_row", "length", "owners", "count", "slots", "x_heads", "y_heads"])
def read_queries(
    x, y, v, p, x_shift, y_shift, x_cos, x_sin, y_cos, y_sin, inverse, weight, decay, band, factors, begins, running,
    inner, plain, low, y_rotated, y_mapped, out, of_far, x_row, y_row, x_b, x_h, x_n, y_b, y_h, y_n, v_b, v_h, v_n, p_b,
    p_h, p_n, o_b, o_h, o_n, d_b, d_h, d_n, x_table_b, x_table_h, y_table_b, y_table_h, length, owners, count, slots,
    x_heads, y_heads, factor,
    X_HEADS: tl.constexpr, X_GROUP: tl.constexpr, Y_SHARE: tl.constexpr, FEATURES: tl.constexpr, V_DIM: tl.constexpr,
    X_MAP: tl.constexpr, Y_MAP: tl.constexpr, NORMALIZED: tl.constexpr, APART: tl.constexpr, SIDE: tl.constexpr,
    DECAY: tl.constexpr, BAND: tl.constexpr, PACKED: tl.constexpr, SEGMENT: tl.constexpr, CHUNK: tl.constexpr,
    STEP: tl.constexpr, LANES: tl.constexpr, COLUMNS: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr,
    LEARNED: tl.constexpr,
):  # fmt: skip
    """Store the gradients of queries x, whose outputs have the cotangents p.

    Args:
        weight: Cotangents of the denominators.
        of_far: If LEARNED, gradients of the factors of keys beyond the band, before and after, per program.
    """
    x_side, y_side = (x, x_shift, x_b, x_h, x_n, x_heads), (y, y_shift, y_b, y_h, y_n, y_heads)
    x_table, y_table = (x_cos, x_sin, x_row, x_table_b, x_table_h), (y_cos, y_sin, y_row, y_table_b, y_table_h)
    values, cotangents, rows = (v, v_b, v_h, v_n), (p, p_b, p_h, p_n), (inverse, weight)
    logs, outs = (decay, d_b, d_h, d_n), (out, o_b, o_h, o_n)
    if APART:
        feature_chunk(
            x_side, (y_rotated, y_mapped, y_heads), x_table, cotangents, values, rows, logs, band, factors, begins,
            (running, inner, plain, low), outs, of_far, tl.program_id(1), length, owners, count, slots, factor, X_HEADS,
            X_GROUP, 1, 1, Y_SHARE, FEATURES, V_DIM, X_MAP, False, NORMALIZED, SIDE, DECAY, BAND, LEARNED,
            PACKED, SEGMENT, CHUNK, STEP, LANES, COLUMNS, KIND, PRECISION,
        )  # fmt: skip
    else:
        feature_rows(
            x_side, y_side, x_table, y_table, cotangents, values, rows, logs, begins, running, plain, low, outs,
            tl.program_id(1), length, owners, count, factor, X_HEADS, X_GROUP, 1, 1, Y_SHARE, FEATURES, V_DIM, X_MAP,
            Y_MAP, False, NORMALIZED, SIDE, DECAY, PACKED, SEGMENT, CHUNK, LANES, COLUMNS, KIND, PRECISION,
        )  # fmt: skip


@triton.jit(do_not_specialize=["x_row", "y_row", "length", "owners", "count", "slots", "x_heads", "y_heads"])
def read_keys(
    x, y, v, p, x_shift, y_shift, x_cos, x_sin, y_cos, y_sin, inverse, weight, decay, band, factors, begins, running,
    inner, plain, low, x_rotated, x_mapped, y_rotated, y_mapped, out, of_values, x_row, y_row, x_b, x_h, x_n, y_b, y_h,
    y_n, v_b, v_h, v_n, p_b, p_h, p_n, o_b, o_h, o_n, w_b, w_h, w_n, d_b, d_h, d_n, x_table_b, x_table_h, y_table_b,
    y_table_h, length, owners, count, slots, x_heads, y_heads, factor,
    X_HEADS: tl.constexpr, Y_GROUP: tl.constexpr, X_SHARE: tl.constexpr, FEATURES: tl.constexpr, V_DIM: tl.constexpr,
    X_MAP: tl.constexpr, Y_MAP: tl.constexpr, NORMALIZED: tl.constexpr, APART: tl.constexpr, SIDE: tl.constexpr,
    DECAY: tl.constexpr, BAND: tl.constexpr, PACKED: tl.constexpr, SEGMENT: tl.constexpr, CHUNK: tl.constexpr,
    STEP: tl.constexpr, LANES: tl.constexpr, COLUMNS: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr,
    SAME: tl.constexpr, LANE_BLOCKS: tl.constexpr, ALL_LANES: tl.constexpr, FEW_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Store the gradients of keys x in `out`, and of their values v in `of_values`.

    The first LANE_BLOCKS programs of a segment compute gradients of keys, the others those of values. If LANE_BLOCKS is
    0, which needs APART, one program computes both.

    Args:
        y: Queries, whose outputs have the cotangents p.
        running: Sums of (R y) p^T after each segment. With two directions, those before it are the first.
        x_rotated: If APART, where rotated features of keys are stored, which `read_queries` and `read_factors` visit.
        x_mapped: The same without rotation, if APART, NORMALIZED, and there is a rotation.
    """
    block = tl.program_id(1)
    x_side, y_side = (x, x_shift, x_b, x_h, x_n, x_heads), (y, y_shift, y_b, y_h, y_n, y_heads)
    x_table, y_table = (x_cos, x_sin, x_row, x_table_b, x_table_h), (y_cos, y_sin, y_row, y_table_b, y_table_h)
    values, cotangents, rows = (v, v_b, v_h, v_n), (p, p_b, p_h, p_n), (inverse, weight)
    logs, outs, value_outs = (decay, d_b, d_h, d_n), (out, o_b, o_h, o_n), (of_values, w_b, w_h, w_n)
    stored = running, inner, plain, low
    if APART:
        x_stored, y_stored = (x_rotated, x_mapped, x_heads), (y_rotated, y_mapped, y_heads)
        if LANE_BLOCKS == 0:
            key_chunk(
                x_side, x_stored, y_stored, x_table, values, cotangents, logs, band, factors, begins, stored, outs,
                value_outs, length, owners, count, slots, X_HEADS, Y_GROUP, X_SHARE, FEATURES, V_DIM, X_MAP, NORMALIZED,
                SIDE, DECAY, BAND, PACKED, SEGMENT, CHUNK, STEP, LANES, COLUMNS, KIND, PRECISION,
            )  # fmt: skip
        elif block < LANE_BLOCKS:
            feature_chunk(
                x_side, y_stored, x_table, values, cotangents, rows, logs, band, factors, begins, stored, outs, plain,
                block, length, owners, count, slots, factor, X_HEADS, 1, Y_GROUP, X_SHARE, 1, FEATURES, V_DIM, X_MAP,
                True, NORMALIZED, SIDE, DECAY, BAND, False, PACKED, SEGMENT, CHUNK, STEP, LANES, COLUMNS, KIND,
                PRECISION,
            )  # fmt: skip
        else:
            value_chunk(
                x_side, x_stored, y_stored, x_table, cotangents, logs, band, factors, begins, stored, value_outs,
                inverse, block - LANE_BLOCKS, length, owners, count, slots, factor, 0.0, X_HEADS, 1, Y_GROUP, X_SHARE,
                1, FEATURES, V_DIM, X_MAP, True, NORMALIZED, SIDE, DECAY, BAND, PACKED, SEGMENT, CHUNK, STEP,
                ALL_LANES, FEW_COLUMNS, KIND, PRECISION,
            )  # fmt: skip
    elif block < LANE_BLOCKS:
        feature_rows(
            x_side, y_side, x_table, y_table, values, cotangents, rows, logs, begins, running, plain, low, outs, block,
            length, owners, count, factor, X_HEADS, 1, Y_GROUP, X_SHARE, 1, FEATURES, V_DIM, X_MAP, Y_MAP, True,
            NORMALIZED, SIDE, DECAY, PACKED, SEGMENT, CHUNK, LANES, COLUMNS, KIND, PRECISION,
        )  # fmt: skip
    else:
        value_rows(
            x_side, y_side, x_table, y_table, cotangents, rows, logs, begins, running, plain, low, value_outs, inverse,
            block - LANE_BLOCKS, length, owners, count, factor, 0.0, X_HEADS, 1, Y_GROUP, X_SHARE, 1, FEATURES, V_DIM,
            X_MAP, Y_MAP, True, NORMALIZED, SIDE, DECAY, SAME, PACKED, SEGMENT, CHUNK, ALL_LANES, FEW_COLUMNS, KIND,
            PRECISION,
        )  # fmt: skip


@triton.jit(do_not_specialize=["x_row", "length", "owners", "count", "x_heads", "y_heads"])
def read_factors(
    x, v, p, x_shift, x_cos, x_sin, inverse, weight, factors, begins, y_rotated, y_mapped, out, x_row,
    x_b, x_h, x_n, v_b, v_h, v_n, p_b, p_h, p_n, x_table_b, x_table_h, length, owners, count, x_heads, y_heads, factor,
    X_HEADS: tl.constexpr, X_GROUP: tl.constexpr, FEATURES: tl.constexpr, V_DIM: tl.constexpr, X_MAP: tl.constexpr,
    NORMALIZED: tl.constexpr, BAND: tl.constexpr, PACKED: tl.constexpr, SEGMENT: tl.constexpr, CHUNK: tl.constexpr,
    STEP: tl.constexpr, LANES: tl.constexpr, COLUMNS: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store the gradients of the factors of a band, as `factor_gradient` does."""
    factor_gradient(
        (x, x_shift, x_b, x_h, x_n, x_heads), (y_rotated, y_mapped, y_heads),
        (x_cos, x_sin, x_row, x_table_b, x_table_h), (p, p_b, p_h, p_n), (v, v_b, v_h, v_n), (inverse, weight), factors,
        begins, out, length, owners, count, factor, X_HEADS, X_GROUP, FEATURES, V_DIM, X_MAP, NORMALIZED, BAND, PACKED,
        SEGMENT, CHUNK, STEP, LANES, COLUMNS, KIND, PRECISION,
    )  # fmt: skip
