"""RMSNorm and rotation on a GPU: forward and backward, each in one pass over q and k."""

# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright: reportPossiblyUnboundVariable=false
# In Triton's language a tl.constexpr is its value, which type checkers do not know.

import triton
import triton.language as tl

from ropewalk.kernels.rotate.triton import NUMBERS, STRIDES, feature_offset, place, rotate_pair, unrotated_feature


@triton.jit
def load_rows(source, valid, STEP: tl.constexpr, ROWS: tl.constexpr, FEATURES: tl.constexpr):
    """Return the first and second members of the pairs of rows at `source`, and the unrotated features.

    FEATURES is (pairs, unrotated features, first rotated feature, whether pairs are interleaved, pairs padded to a
    power of two, unrotated features padded to a power of two).
    """
    PAIRS: tl.constexpr = FEATURES[0]
    REST: tl.constexpr = FEATURES[1]
    START: tl.constexpr = FEATURES[2]
    PADDED_PAIRS: tl.constexpr = FEATURES[4]
    if FEATURES[3]:
        at = tl.arange(0, 2 * PADDED_PAIRS)[None, :]
        z = tl.load(
            source[:, None] + feature_offset(START + at, STEP), mask=valid[:, None] & (at < 2 * PAIRS), other=0.0
        )
        first, second = tl.split(tl.reshape(z, (ROWS, PADDED_PAIRS, 2)))
    else:
        at = tl.arange(0, PADDED_PAIRS)[None, :]
        mask = valid[:, None] & (at < PAIRS)
        first = tl.load(source[:, None] + feature_offset(START + at, STEP), mask=mask, other=0.0)
        second = tl.load(source[:, None] + feature_offset(START + PAIRS + at, STEP), mask=mask, other=0.0)
    rest = first
    if REST:
        at = tl.arange(0, FEATURES[5])[None, :]
        mask = valid[:, None] & (at < REST)
        rest = tl.load(
            source[:, None] + feature_offset(unrotated_feature(at, PAIRS, REST, START), STEP), mask=mask, other=0.0
        )
    return first, second, rest


@triton.jit
def _store(target, first, second, rest, valid, STEP: tl.constexpr, ROWS: tl.constexpr, FEATURES: tl.constexpr):
    """Store what `load_rows` returns to rows at `target`, in their dtype."""
    PAIRS: tl.constexpr = FEATURES[0]
    REST: tl.constexpr = FEATURES[1]
    START: tl.constexpr = FEATURES[2]
    PADDED_PAIRS: tl.constexpr = FEATURES[4]
    dtype = target.dtype.element_ty
    if FEATURES[3]:
        at = tl.arange(0, 2 * PADDED_PAIRS)[None, :]
        z = tl.reshape(tl.join(first.to(dtype), second.to(dtype)), (ROWS, 2 * PADDED_PAIRS))
        tl.store(target[:, None] + feature_offset(START + at, STEP), z, mask=valid[:, None] & (at < 2 * PAIRS))
    else:
        at = tl.arange(0, PADDED_PAIRS)[None, :]
        mask = valid[:, None] & (at < PAIRS)
        tl.store(target[:, None] + feature_offset(START + at, STEP), first.to(dtype), mask=mask)
        tl.store(target[:, None] + feature_offset(START + PAIRS + at, STEP), second.to(dtype), mask=mask)
    if REST:
        at = tl.arange(0, FEATURES[5])[None, :]
        mask = valid[:, None] & (at < REST)
        tl.store(
            target[:, None] + feature_offset(unrotated_feature(at, PAIRS, REST, START), STEP), rest.to(dtype), mask=mask
        )


@triton.jit
def _tables(cos, sin, rows, b, s, head, valid, FEATURES: tl.constexpr):
    pair = tl.arange(0, FEATURES[4])[None, :]
    at = ((rows[0] + b * rows[1] + head * rows[2] + s) * FEATURES[0])[:, None] + pair
    known = valid[:, None] & (pair < FEATURES[0])
    c = tl.load(cos + at, mask=known, other=1.0, eviction_policy="evict_last")
    return c, tl.load(sin + at, mask=known, other=0.0, eviction_policy="evict_last")


@triton.jit
def _weights(weight, dtype, PLUS_ONE: tl.constexpr, ROWS: tl.constexpr, FEATURES: tl.constexpr):
    # One row of pointers per row of features: loads hit the cache, and no layout conversion is needed.
    always = tl.zeros((ROWS,), tl.int32) == 0
    u, v, w = load_rows(weight + tl.zeros((ROWS,), tl.int32), always, 1, ROWS, FEATURES)
    u, v, w = u.to(dtype), v.to(dtype), w.to(dtype)
    if PLUS_ONE:
        u, v, w = u + 1, v + 1, w + 1
    return u, v, w


@triton.jit
def _inverse_rms(first, second, rest, EPS: tl.constexpr, FEATURES: tl.constexpr):
    squares = tl.sum(first * first + second * second, axis=1)
    if FEATURES[1]:
        squares += tl.sum(rest * rest, axis=1)
    return tl.rsqrt(squares / (2 * FEATURES[0] + FEATURES[1]) + EPS)[:, None]


@triton.jit
def _cast(first, second, rest, dtype):
    return first.to(dtype), second.to(dtype), rest.to(dtype)


@triton.jit
def _norm_rows(
    x,
    y,
    weight,
    cos,
    sin,
    rows,
    x_strides,
    y_strides,
    counts,
    index,
    HEADS: tl.constexpr,
    WEIGHTED: tl.constexpr,
    STEPS: tl.constexpr,
    FEATURES: tl.constexpr,
    TILE: tl.constexpr,
    NORM: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Process the rows of one program. NORM is (eps, whether to add 1 to the weight, bits of `Norm.rounding`)."""
    ROWS: tl.constexpr = TILE[1]
    _part, b, s, head, valid = place(index, counts, HEADS, 1, TILE, WIDE)
    c, d = _tables(cos, sin, rows, b, s, head, valid, FEATURES)
    source = x + (b * x_strides[0] + s * x_strides[1] + head * x_strides[2]) * TILE[2]
    first, second, rest = load_rows(source, valid, STEPS[0], ROWS, FEATURES)
    kind = first.dtype
    first, second, rest = _cast(first, second, rest, c.dtype)
    inverse = _inverse_rms(first, second, rest, NORM[0], FEATURES)
    first, second, rest = first * inverse, second * inverse, rest * inverse
    if NORM[2] & 1:
        first, second, rest = _cast(first, second, rest, kind)
        first, second, rest = _cast(first, second, rest, c.dtype)
    if WEIGHTED:
        u, v, w = _weights(weight, c.dtype, NORM[1], ROWS, FEATURES)
        first, second = first * u, second * v
        if FEATURES[1]:
            rest = rest * w
    if NORM[2] & 2:
        first, second, rest = _cast(first, second, rest, kind)
        first, second, rest = _cast(first, second, rest, c.dtype)
    first, second = rotate_pair(first, second, c, d, False)
    target = y + (b * y_strides[0] + s * y_strides[1] + head * y_strides[2]) * TILE[2]
    _store(target, first, second, rest, valid, STEPS[1], ROWS, FEATURES)


@triton.jit(do_not_specialize=NUMBERS + STRIDES[:12])
def norm_rotate_kernel(
    q,
    k,
    yq,
    yk,
    q_weight,
    k_weight,
    cos,
    sin,
    row,
    table_b,
    table_h,
    seq,
    blocks_per_batch,
    blocks,
    q_b,
    q_s,
    q_h,
    k_b,
    k_s,
    k_h,
    yq_b,
    yq_s,
    yq_h,
    yk_b,
    yk_s,
    yk_h,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    Q_SHARE: tl.constexpr,
    K_SHARE: tl.constexpr,
    Q_WEIGHTED: tl.constexpr,
    K_WEIGHTED: tl.constexpr,
    X_STEP: tl.constexpr,
    Y_STEP: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
    START: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PADDED_PAIRS: tl.constexpr,
    PADDED_REST: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    ALIGN: tl.constexpr,
    EPS: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    ROUNDING: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Process q and k. Of each Q_SHARE + K_SHARE consecutive programs, the first ones process q and the others k."""
    unit = tl.program_id(0) // (Q_SHARE + K_SHARE)
    program = tl.program_id(0) % (Q_SHARE + K_SHARE)
    rows, counts = (row, table_b, table_h), (seq, blocks_per_batch, blocks)
    STEPS: tl.constexpr = (X_STEP, Y_STEP)
    FEATURES: tl.constexpr = (PAIRS, REST, START, INTERLEAVED, PADDED_PAIRS, PADDED_REST)
    TILE: tl.constexpr = (TOKENS, ROWS, ALIGN)
    NORM: tl.constexpr = (EPS, PLUS_ONE, ROUNDING)
    if program < Q_SHARE:
        x_strides, y_strides, index = (q_b, q_s, q_h), (yq_b, yq_s, yq_h), unit * Q_SHARE + program
        _norm_rows(
            q, yq, q_weight, cos, sin, rows, x_strides, y_strides, counts, index,
            Q_HEADS, Q_WEIGHTED, STEPS, FEATURES, TILE, NORM, WIDE,
        )  # fmt: skip
    elif K_SHARE:
        x_strides, y_strides, index = (k_b, k_s, k_h), (yk_b, yk_s, yk_h), unit * K_SHARE + program - Q_SHARE
        _norm_rows(
            k, yk, k_weight, cos, sin, rows, x_strides, y_strides, counts, index,
            K_HEADS, K_WEIGHTED, STEPS, FEATURES, TILE, NORM, WIDE,
        )  # fmt: skip


@triton.jit
def _load_both(
    x,
    g,
    x_strides,
    g_strides,
    counts,
    index,
    HEADS: tl.constexpr,
    STEPS: tl.constexpr,
    FEATURES: tl.constexpr,
    TILE: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Load a block of rows of x, and of their cotangents."""
    _part, b, s, head, valid = place(index, counts, HEADS, 1, TILE, WIDE)
    source = x + (b * x_strides[0] + s * x_strides[1] + head * x_strides[2]) * TILE[2]
    cotangent = g + (b * g_strides[0] + s * g_strides[1] + head * g_strides[2]) * TILE[2]
    n, m, o = load_rows(source, valid, STEPS[0], TILE[1], FEATURES)
    e, f, h = load_rows(cotangent, valid, STEPS[1], TILE[1], FEATURES)
    return n, m, o, e, f, h


@triton.jit
def _norm_rows_backward(
    x,
    g,
    dx,
    weight,
    sums,
    cos,
    sin,
    rows,
    x_strides,
    g_strides,
    dx_strides,
    counts,
    program,
    programs,
    HEADS: tl.constexpr,
    WEIGHTED: tl.constexpr,
    STEPS: tl.constexpr,
    FEATURES: tl.constexpr,
    TILE: tl.constexpr,
    NORM: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Compute dx = r (e w - n mean(e w n)) and dw = sum(e n) with n = x r, r = 1 / rms(x).

    e is the cotangent, rotated by the opposite angles. A program processes every `programs`-th block of rows, and keeps
    the sums of all its blocks.
    """
    ROWS: tl.constexpr = TILE[1]
    REST: tl.constexpr = FEATURES[1]
    DIM: tl.constexpr = 2 * FEATURES[0] + REST
    dtype = cos.dtype.element_ty
    if WEIGHTED:
        u, v, w = _weights(weight, dtype, NORM[1], ROWS, FEATURES)
    if NORM[3]:
        du = tl.zeros((ROWS, FEATURES[4]), dtype)
        dv = tl.zeros((ROWS, FEATURES[4]), dtype)
        dw = tl.zeros((ROWS, FEATURES[5]), dtype)
    counting = tl.int64 if WIDE else tl.int32
    count = (counts[2].to(counting) * (TILE[0] * HEADS) + ROWS - 1) // ROWS
    start = program.to(counting)
    # Loads of the next iterations overlap with the arithmetic of this one: of one iteration, kept in registers, or of
    # several, in shared memory. Which is faster depends on the layout.
    AHEAD: tl.constexpr = TILE[3]
    STAGES: tl.constexpr = 1 if AHEAD else 3
    if AHEAD:
        n, m, o, e, f, h = _load_both(x, g, x_strides, g_strides, counts, start, HEADS, STEPS, FEATURES, TILE, WIDE)
    for index in tl.range(start, count, programs, num_stages=STAGES):
        if AHEAD:
            n_, m_, o_, e_, f_, h_ = _load_both(
                x, g, x_strides, g_strides, counts, index + programs, HEADS, STEPS, FEATURES, TILE, WIDE
            )
        else:
            n, m, o, e, f, h = _load_both(x, g, x_strides, g_strides, counts, index, HEADS, STEPS, FEATURES, TILE, WIDE)
        _part, b, s, head, valid = place(index, counts, HEADS, 1, TILE, WIDE)
        c, d = _tables(cos, sin, rows, b, s, head, valid, FEATURES)
        first, second, rest = _cast(n, m, o, dtype)
        # Rows that are not valid must add nothing to the sums, even if eps is 0.
        inverse = tl.where(valid[:, None], _inverse_rms(first, second, rest, NORM[0], FEATURES), 0.0)
        first, second, rest = first * inverse, second * inverse, rest * inverse
        p, r, t = _cast(e, f, h, dtype)
        p, r = rotate_pair(p, r, c, d, True)
        if NORM[3]:
            du += p * first
            dv += r * second
            if REST:
                dw += t * rest
        if WEIGHTED:
            p, r = p * u, r * v
            if REST:
                t = t * w
        mean = tl.sum(p * first + r * second, axis=1)
        if REST:
            mean += tl.sum(t * rest, axis=1)
        mean = (mean / DIM)[:, None]
        target = dx + (b * dx_strides[0] + s * dx_strides[1] + head * dx_strides[2]) * TILE[2]
        p, r, t = inverse * (p - first * mean), inverse * (r - second * mean), inverse * (t - rest * mean)
        _store(target, p, r, t, valid, STEPS[2], ROWS, FEATURES)
        if AHEAD:
            n, m, o, e, f, h = n_, m_, o_, e_, f_, h_
    if NORM[3]:
        always = tl.zeros((1,), tl.int32) == 0
        du, dv, dw = tl.sum(du, axis=0)[None, :], tl.sum(dv, axis=0)[None, :], tl.sum(dw, axis=0)[None, :]
        _store(sums + tl.zeros((1,), tl.int32), du, dv, dw, always, 1, 1, FEATURES)


@triton.jit(do_not_specialize=[*NUMBERS, *STRIDES])
def norm_rotate_backward_kernel(
    q,
    k,
    gq,
    gk,
    dq,
    dk,
    q_weight,
    k_weight,
    sums,
    cos,
    sin,
    row,
    table_b,
    table_h,
    seq,
    blocks_per_batch,
    blocks,
    q_b,
    q_s,
    q_h,
    k_b,
    k_s,
    k_h,
    gq_b,
    gq_s,
    gq_h,
    gk_b,
    gk_s,
    gk_h,
    yq_b,
    yq_s,
    yq_h,
    yk_b,
    yk_s,
    yk_h,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    Q_PROGRAMS: tl.constexpr,
    K_PROGRAMS: tl.constexpr,
    Q_WEIGHTED: tl.constexpr,
    K_WEIGHTED: tl.constexpr,
    X_STEP: tl.constexpr,
    G_STEP: tl.constexpr,
    Y_STEP: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
    START: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PADDED_PAIRS: tl.constexpr,
    PADDED_REST: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    ALIGN: tl.constexpr,
    EPS: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    LEARNS: tl.constexpr,
    AHEAD: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Process q with Q_PROGRAMS programs, then k with K_PROGRAMS. Each program writes one row of `sums`."""
    program = tl.program_id(0)
    rows, counts = (row, table_b, table_h), (seq, blocks_per_batch, blocks)
    STEPS: tl.constexpr = (X_STEP, G_STEP, Y_STEP)
    FEATURES: tl.constexpr = (PAIRS, REST, START, INTERLEAVED, PADDED_PAIRS, PADDED_REST)
    TILE: tl.constexpr = (TOKENS, ROWS, ALIGN, AHEAD)
    NORM: tl.constexpr = (EPS, PLUS_ONE, 0, LEARNS)
    sums += program * (2 * PAIRS + REST)
    if program < Q_PROGRAMS:
        x_strides, g_strides, dx_strides = (q_b, q_s, q_h), (gq_b, gq_s, gq_h), (yq_b, yq_s, yq_h)
        _norm_rows_backward(
            q, gq, dq, q_weight, sums, cos, sin, rows, x_strides, g_strides, dx_strides, counts, program, Q_PROGRAMS,
            Q_HEADS, Q_WEIGHTED, STEPS, FEATURES, TILE, NORM, WIDE,
        )  # fmt: skip
    elif K_PROGRAMS:
        x_strides, g_strides, dx_strides = (k_b, k_s, k_h), (gk_b, gk_s, gk_h), (yk_b, yk_s, yk_h)
        _norm_rows_backward(
            k, gk, dk, k_weight, sums, cos, sin, rows, x_strides, g_strides, dx_strides, counts, program - Q_PROGRAMS,
            K_PROGRAMS, K_HEADS, K_WEIGHTED, STEPS, FEATURES, TILE, NORM, WIDE,
        )  # fmt: skip


@triton.jit(do_not_specialize=["q_programs", "k_programs"])
def weight_sums_kernel(
    sums,
    q_sum,
    k_sum,
    q_programs,
    k_programs,
    DIM: tl.constexpr,
    Q_WEIGHTED: tl.constexpr,
    K_WEIGHTED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Add the rows of `sums` that the programs of q and of k wrote: the gradients of both weights, in their dtypes."""
    blocks: tl.constexpr = (DIM + COLUMNS - 1) // COLUMNS
    is_k = tl.program_id(0) >= blocks
    column = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.where(is_k, q_programs, 0)
    count = tl.where(is_k, k_programs, q_programs)
    total = tl.zeros((ROWS, COLUMNS), sums.dtype.element_ty)
    row = 0
    while row < count:
        rows = row + tl.arange(0, ROWS)
        at = (first + rows)[:, None] * DIM + column[None, :]
        total += tl.load(sums + at, mask=(rows < count)[:, None] & (column < DIM)[None, :], other=0.0)
        row += ROWS
    result = tl.sum(total, axis=0)
    if Q_WEIGHTED:
        tl.store(q_sum + column, result.to(q_sum.dtype.element_ty), mask=column < tl.where(is_k, 0, DIM))
    if K_WEIGHTED:
        tl.store(k_sum + column, result.to(k_sum.dtype.element_ty), mask=column < tl.where(is_k, DIM, 0))
