"""RMSNorm and rotation on a GPU: forward and backward, each in one pass over q and k."""

# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright: reportPossiblyUnboundVariable=false
# A kernel is Triton's language, in which a constexpr is whatever it was given.

import triton
import triton.language as tl

from ropewalk.kernels.rotate.triton import NUMBERS, STRIDES, place, rotate_pair, stepped, unrotated


@triton.jit
def load_rows(source, there, STEP: tl.constexpr, ROWS: tl.constexpr, FEATURES: tl.constexpr):
    """First and second members of the pairs of rows at `source`, and the features that do not turn.

    FEATURES are pairs, features that do not turn, the first that turns, whether pairs are interleaved, and powers of
    two in which pairs and still features have room.
    """
    PAIRS: tl.constexpr = FEATURES[0]
    STILL: tl.constexpr = FEATURES[1]
    START: tl.constexpr = FEATURES[2]
    ROOM: tl.constexpr = FEATURES[4]
    if FEATURES[3]:
        at = tl.arange(0, 2 * ROOM)[None, :]
        z = tl.load(source[:, None] + stepped(START + at, STEP), mask=there[:, None] & (at < 2 * PAIRS), other=0.0)
        first, second = tl.split(tl.reshape(z, (ROWS, ROOM, 2)))
    else:
        at = tl.arange(0, ROOM)[None, :]
        mask = there[:, None] & (at < PAIRS)
        first = tl.load(source[:, None] + stepped(START + at, STEP), mask=mask, other=0.0)
        second = tl.load(source[:, None] + stepped(START + PAIRS + at, STEP), mask=mask, other=0.0)
    still = first
    if STILL:
        at = tl.arange(0, FEATURES[5])[None, :]
        mask = there[:, None] & (at < STILL)
        still = tl.load(source[:, None] + stepped(unrotated(at, PAIRS, STILL, START), STEP), mask=mask, other=0.0)
    return first, second, still


@triton.jit
def _store(target, first, second, still, there, STEP: tl.constexpr, ROWS: tl.constexpr, FEATURES: tl.constexpr):
    """What `load_rows` reads, into rows at `target`, in their dtype."""
    PAIRS: tl.constexpr = FEATURES[0]
    STILL: tl.constexpr = FEATURES[1]
    START: tl.constexpr = FEATURES[2]
    ROOM: tl.constexpr = FEATURES[4]
    dtype = target.dtype.element_ty
    if FEATURES[3]:
        at = tl.arange(0, 2 * ROOM)[None, :]
        z = tl.reshape(tl.join(first.to(dtype), second.to(dtype)), (ROWS, 2 * ROOM))
        tl.store(target[:, None] + stepped(START + at, STEP), z, mask=there[:, None] & (at < 2 * PAIRS))
    else:
        at = tl.arange(0, ROOM)[None, :]
        mask = there[:, None] & (at < PAIRS)
        tl.store(target[:, None] + stepped(START + at, STEP), first.to(dtype), mask=mask)
        tl.store(target[:, None] + stepped(START + PAIRS + at, STEP), second.to(dtype), mask=mask)
    if STILL:
        at = tl.arange(0, FEATURES[5])[None, :]
        mask = there[:, None] & (at < STILL)
        tl.store(target[:, None] + stepped(unrotated(at, PAIRS, STILL, START), STEP), still.to(dtype), mask=mask)


@triton.jit
def _tables(cos, sin, rows, b, s, head, there, FEATURES: tl.constexpr):
    pair = tl.arange(0, FEATURES[4])[None, :]
    at = ((rows[0] + b * rows[1] + head * rows[2] + s) * FEATURES[0])[:, None] + pair
    known = there[:, None] & (pair < FEATURES[0])
    c = tl.load(cos + at, mask=known, other=1.0, eviction_policy="evict_last")
    return c, tl.load(sin + at, mask=known, other=0.0, eviction_policy="evict_last")


@triton.jit
def _weights(weight, dtype, PLUS_ONE: tl.constexpr, ROWS: tl.constexpr, FEATURES: tl.constexpr):
    # A row of pointers for each row of features: the cache serves them, and no layout has to be changed.
    always = tl.zeros((ROWS,), tl.int32) == 0
    u, v, w = load_rows(weight + tl.zeros((ROWS,), tl.int32), always, 1, ROWS, FEATURES)
    u, v, w = u.to(dtype), v.to(dtype), w.to(dtype)
    if PLUS_ONE:
        u, v, w = u + 1, v + 1, w + 1
    return u, v, w


@triton.jit
def _inverse_rms(first, second, still, EPS: tl.constexpr, FEATURES: tl.constexpr):
    squares = tl.sum(first * first + second * second, axis=1)
    if FEATURES[1]:
        squares += tl.sum(still * still, axis=1)
    return tl.rsqrt(squares / (2 * FEATURES[0] + FEATURES[1]) + EPS)[:, None]


@triton.jit
def _cast(first, second, still, dtype):
    return first.to(dtype), second.to(dtype), still.to(dtype)


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
    """The rows of one program. NORM is eps, whether to add 1 to the weight, and the bits of `Norm.rounding`."""
    ROWS: tl.constexpr = TILE[1]
    _, b, s, head, there = place(index, counts, HEADS, 1, TILE, WIDE)
    c, d = _tables(cos, sin, rows, b, s, head, there, FEATURES)
    source = x + (b * x_strides[0] + s * x_strides[1] + head * x_strides[2]) * TILE[2]
    first, second, still = load_rows(source, there, STEPS[0], ROWS, FEATURES)
    kind = first.dtype
    first, second, still = _cast(first, second, still, c.dtype)
    inverse = _inverse_rms(first, second, still, NORM[0], FEATURES)
    first, second, still = first * inverse, second * inverse, still * inverse
    if NORM[2] & 1:
        first, second, still = _cast(first, second, still, kind)
        first, second, still = _cast(first, second, still, c.dtype)
    if WEIGHTED:
        u, v, w = _weights(weight, c.dtype, NORM[1], ROWS, FEATURES)
        first, second = first * u, second * v
        if FEATURES[1]:
            still = still * w
    if NORM[2] & 2:
        first, second, still = _cast(first, second, still, kind)
        first, second, still = _cast(first, second, still, c.dtype)
    first, second = rotate_pair(first, second, c, d, False)
    target = y + (b * y_strides[0] + s * y_strides[1] + head * y_strides[2]) * TILE[2]
    _store(target, first, second, still, there, STEPS[1], ROWS, FEATURES)


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
    blocks_a_batch,
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
    STILL: tl.constexpr,
    START: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROOM: tl.constexpr,
    STILL_ROOM: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    ALIGN: tl.constexpr,
    EPS: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    ROUNDING: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Of Q_SHARE + K_SHARE programs in a row the first are for q and the others for k."""
    unit = tl.program_id(0) // (Q_SHARE + K_SHARE)
    own = tl.program_id(0) % (Q_SHARE + K_SHARE)
    rows, counts = (row, table_b, table_h), (seq, blocks_a_batch, blocks)
    STEPS: tl.constexpr = (X_STEP, Y_STEP)
    FEATURES: tl.constexpr = (PAIRS, STILL, START, INTERLEAVED, ROOM, STILL_ROOM)
    TILE: tl.constexpr = (TOKENS, ROWS, ALIGN)
    NORM: tl.constexpr = (EPS, PLUS_ONE, ROUNDING)
    if own < Q_SHARE:
        x_strides, y_strides, index = (q_b, q_s, q_h), (yq_b, yq_s, yq_h), unit * Q_SHARE + own
        _norm_rows(
            q, yq, q_weight, cos, sin, rows, x_strides, y_strides, counts, index,
            Q_HEADS, Q_WEIGHTED, STEPS, FEATURES, TILE, NORM, WIDE,
        )  # fmt: skip
    elif K_SHARE:
        x_strides, y_strides, index = (k_b, k_s, k_h), (yk_b, yk_s, yk_h), unit * K_SHARE + own - Q_SHARE
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
    """A block of rows of x, and of their cotangents."""
    _, b, s, head, there = place(index, counts, HEADS, 1, TILE, WIDE)
    source = x + (b * x_strides[0] + s * x_strides[1] + head * x_strides[2]) * TILE[2]
    given = g + (b * g_strides[0] + s * g_strides[1] + head * g_strides[2]) * TILE[2]
    n, m, o = load_rows(source, there, STEPS[0], TILE[1], FEATURES)
    e, f, h = load_rows(given, there, STEPS[1], TILE[1], FEATURES)
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
    own,
    programs,
    HEADS: tl.constexpr,
    WEIGHTED: tl.constexpr,
    STEPS: tl.constexpr,
    FEATURES: tl.constexpr,
    TILE: tl.constexpr,
    NORM: tl.constexpr,
    WIDE: tl.constexpr,
):
    """dx = r (e w - n mean(e w n)) with n = x r, r = 1 / rms(x), e the cotangent turned back; dw sums e n.

    A program takes one block of rows in `programs`, and keeps the sums of all of its blocks.
    """
    ROWS: tl.constexpr = TILE[1]
    STILL: tl.constexpr = FEATURES[1]
    DIM: tl.constexpr = 2 * FEATURES[0] + STILL
    dtype = cos.dtype.element_ty
    if WEIGHTED:
        u, v, w = _weights(weight, dtype, NORM[1], ROWS, FEATURES)
    if NORM[3]:
        du = tl.zeros((ROWS, FEATURES[4]), dtype)
        dv = tl.zeros((ROWS, FEATURES[4]), dtype)
        dw = tl.zeros((ROWS, FEATURES[5]), dtype)
    count = (counts[2].to(tl.int64) * (TILE[0] * HEADS) + ROWS - 1) // ROWS
    index = own.to(tl.int64)
    n, m, o, e, f, h = _load_both(x, g, x_strides, g_strides, counts, index, HEADS, STEPS, FEATURES, TILE, WIDE)
    while index < count:
        # What the next turn of the loop needs is on its way while this one is worked.
        n_, m_, o_, e_, f_, h_ = _load_both(
            x, g, x_strides, g_strides, counts, index + programs, HEADS, STEPS, FEATURES, TILE, WIDE
        )
        _, b, s, head, there = place(index, counts, HEADS, 1, TILE, WIDE)
        c, d = _tables(cos, sin, rows, b, s, head, there, FEATURES)
        first, second, still = _cast(n, m, o, dtype)
        # A row that is not there has no features, whose root would be 0: its sums are to be.
        inverse = tl.where(there[:, None], _inverse_rms(first, second, still, NORM[0], FEATURES), 0.0)
        first, second, still = first * inverse, second * inverse, still * inverse
        p, r, t = _cast(e, f, h, dtype)
        p, r = rotate_pair(p, r, c, d, True)
        if NORM[3]:
            du += p * first
            dv += r * second
            if STILL:
                dw += t * still
        if WEIGHTED:
            p, r = p * u, r * v
            if STILL:
                t = t * w
        mean = tl.sum(p * first + r * second, axis=1)
        if STILL:
            mean += tl.sum(t * still, axis=1)
        mean = (mean / DIM)[:, None]
        target = dx + (b * dx_strides[0] + s * dx_strides[1] + head * dx_strides[2]) * TILE[2]
        p, r, t = inverse * (p - first * mean), inverse * (r - second * mean), inverse * (t - still * mean)
        _store(target, p, r, t, there, STEPS[2], ROWS, FEATURES)
        index += programs
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
    blocks_a_batch,
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
    STILL: tl.constexpr,
    START: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROOM: tl.constexpr,
    STILL_ROOM: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    ALIGN: tl.constexpr,
    EPS: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    LEARNS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Q_PROGRAMS for q, then K_PROGRAMS for k, each with a row of `sums` of its own."""
    own = tl.program_id(0)
    rows, counts = (row, table_b, table_h), (seq, blocks_a_batch, blocks)
    STEPS: tl.constexpr = (X_STEP, G_STEP, Y_STEP)
    FEATURES: tl.constexpr = (PAIRS, STILL, START, INTERLEAVED, ROOM, STILL_ROOM)
    TILE: tl.constexpr = (TOKENS, ROWS, ALIGN)
    NORM: tl.constexpr = (EPS, PLUS_ONE, 0, LEARNS)
    sums += own * (2 * PAIRS + STILL)
    if own < Q_PROGRAMS:
        x_strides, g_strides, dx_strides = (q_b, q_s, q_h), (gq_b, gq_s, gq_h), (yq_b, yq_s, yq_h)
        _norm_rows_backward(
            q, gq, dq, q_weight, sums, cos, sin, rows, x_strides, g_strides, dx_strides, counts, own, Q_PROGRAMS,
            Q_HEADS, Q_WEIGHTED, STEPS, FEATURES, TILE, NORM, WIDE,
        )  # fmt: skip
    elif K_PROGRAMS:
        x_strides, g_strides, dx_strides = (k_b, k_s, k_h), (gk_b, gk_s, gk_h), (yk_b, yk_s, yk_h)
        _norm_rows_backward(
            k, gk, dk, k_weight, sums, cos, sin, rows, x_strides, g_strides, dx_strides, counts, own - Q_PROGRAMS,
            K_PROGRAMS, K_HEADS, K_WEIGHTED, STEPS, FEATURES, TILE, NORM, WIDE,
        )  # fmt: skip
