/* Rotation of one row: the features of one head of one token, after an optional norm. Included once per instruction
   set, after vectors.h.

   y_a = a cos - b sin, y_b = b cos + a sin for each pair (a, b). Unrotated features are copied. For the opposite
   angles, a and b are swapped. Pairs are independent, and each is read before it is written, so y may be x. */

/* Adds the second half of 2 * HALF sums to the first, if there are as many. HALF is a constant, so that the sums are
   kept in registers. */
#define HALVE(HALF, COUNT, SUMS)                                                                                       \
    for (int j = 0; j < HALF && HALF < COUNT; j++) SUMS[j] += SUMS[j + HALF];

/* T is the type of x and y in memory, V a vector of the working type W. VECTORS of them, N numbers, are processed at
   once. LOAD_W and LOAD2_W load N numbers of the working type. */
#define DEFINE_ROW(KIND, T, V, W, LOAD_W, LOAD2_W, NEAREST, MINUS, PLUS)                                               \
    enum { NAME(KIND##_N) = 2 * sizeof(V) / sizeof(W) };                                                               \
    /* RMSNorm: x / rms(x) * weight, rounded after each product as `rounding` specifies. */                            \
    INLINE void NAME(KIND##_norm)(V *v, const V *weight, W scale, int rounding) {                                      \
        for (int i = 0; i < 2; i++) {                                                                                  \
            v[i] = v[i] * scale;                                                                                       \
            if (rounding & ROUND_SCALED) v[i] = NEAREST(v[i]);                                                         \
            v[i] = v[i] * weight[i];                                                                                   \
            if (rounding & ROUND_WEIGHTED) v[i] = NEAREST(v[i]);                                                       \
        }                                                                                                              \
    }                                                                                                                  \
    /* 1 / sqrt(mean of squares + eps). 32 partial sums for any vector length, so that all machines round alike. */    \
    INLINE W NAME(KIND##_scale)(const T *x, int64_t dim, int64_t step, double eps) {                                   \
        enum { SUMS = 32, LENGTH = sizeof(V) / sizeof(W), EACH = SUMS / LENGTH };                                      \
        _Static_assert(SUMS % NAME(KIND##_N) == 0 && EACH <= 16 && LENGTH <= 8, "whole loads, and enough halvings");   \
        double total = 0;                                                                                              \
        for (int64_t from = 0; from < dim; from += 512) {                                                              \
            const int64_t stop = from + 512 < dim ? from + 512 : dim;                                                  \
            V sums[EACH], v[EACH];                                                                                     \
            for (int j = 0; j < EACH; j++) sums[j] = (V){0};                                                           \
            for (int64_t i = from; i < stop; i += SUMS) {                                                              \
                const T *some = x + i;                                                                                 \
                T gathered[SUMS];                                                                                      \
                if (step != 1 || i + SUMS > stop) {                                                                    \
                    for (int64_t j = 0; j < SUMS; j++) gathered[j] = i + j < stop ? x[(i + j) * step] : 0;             \
                    some = gathered;                                                                                   \
                }                                                                                                      \
                for (int j = 0; j < EACH; j += 2) NAME(load_##KIND)(some + j * LENGTH, v + j);                         \
                for (int j = 0; j < EACH; j++) sums[j] += v[j] * v[j];                                                 \
            }                                                                                                          \
            HALVE(8, EACH, sums) HALVE(4, EACH, sums) HALVE(2, EACH, sums) HALVE(1, EACH, sums)                        \
            HALVE(4, LENGTH, sums[0]) HALVE(2, LENGTH, sums[0]) HALVE(1, LENGTH, sums[0])                              \
            total += (double)sums[0][0];                                                                               \
        }                                                                                                              \
        return (W)(1.0 / sqrt(total / (double)dim + eps));                                                             \
    }                                                                                                                  \
    INLINE void NAME(KIND##_rotate)(V *a, V *b, const V *c, const V *s) {                                              \
        for (int i = 0; i < 2; i++) {                                                                                  \
            const V first = MINUS(a[i] * c[i], b[i], s[i]), second = PLUS(b[i] * c[i], a[i], s[i]);                    \
            a[i] = first, b[i] = second;                                                                               \
        }                                                                                                              \
    }                                                                                                                  \
    /* At most N pairs, with any strides. */                                                                           \
    APART void NAME(KIND##_few)(const T *x, T *y, const W *cosines, const W *sines, const Features *f,                 \
                                 const Norm *norm, W scale, int64_t first, int64_t count) {                            \
        T a[NAME(KIND##_N)] = {0}, b[NAME(KIND##_N)] = {0};                                                            \
        W c[NAME(KIND##_N)] = {0}, s[NAME(KIND##_N)] = {0}, wa[NAME(KIND##_N)] = {0}, wb[NAME(KIND##_N)] = {0};        \
        V va[2], vb[2], vc[2], vs[2], weight[2];                                                                       \
        const int64_t apart = f->interleaved ? 1 : f->pairs, next = f->interleaved ? 2 : 1;                            \
        const int64_t at = f->start + first * next + (f->conjugate ? apart : 0), mate = f->conjugate ? -apart : apart; \
        for (int64_t i = 0; i < count; i++) {                                                                          \
            const int64_t n = at + i * next;                                                                           \
            a[i] = x[n * f->step], b[i] = x[(n + mate) * f->step];                                                     \
            c[i] = cosines[(first + i) * f->cos_step], s[i] = sines[(first + i) * f->sin_step];                        \
            if (norm) wa[i] = ((const W *)norm->weight)[n], wb[i] = ((const W *)norm->weight)[n + mate];               \
        }                                                                                                              \
        NAME(load_##KIND)(a, va), NAME(load_##KIND)(b, vb), LOAD_W(c, vc), LOAD_W(s, vs);                              \
        if (norm) {                                                                                                    \
            LOAD_W(wa, weight), NAME(KIND##_norm)(va, weight, scale, norm->rounding);                                  \
            LOAD_W(wb, weight), NAME(KIND##_norm)(vb, weight, scale, norm->rounding);                                  \
        }                                                                                                              \
        NAME(KIND##_rotate)(va, vb, vc, vs);                                                                           \
        NAME(careful_store_##KIND)(a, va), NAME(careful_store_##KIND)(b, vb);                                          \
        for (int64_t i = 0; i < count; i++) {                                                                          \
            const int64_t n = at + i * next;                                                                           \
            y[n * f->ystep] = a[i], y[(n + mate) * f->ystep] = b[i];                                                   \
        }                                                                                                              \
    }                                                                                                                  \
    /* The unrotated features from `from` to `to`. */                                                                  \
    APART void NAME(KIND##_copy)(const T *x, T *y, const Features *f, const Norm *norm, W scale, int64_t from,         \
                                   int64_t to) {                                                                       \
        if (from == to || (!norm && x == y)) return;                                                                   \
        if (!norm && f->step == 1 && f->ystep == 1) {                                                                  \
            memcpy(y + from, x + from, (size_t)(to - from) * sizeof(T));                                               \
            return;                                                                                                    \
        }                                                                                                              \
        for (int64_t i = from; i < to; i += NAME(KIND##_N)) {                                                          \
            const int64_t count = to - i < NAME(KIND##_N) ? to - i : NAME(KIND##_N);                                   \
            T a[NAME(KIND##_N)] = {0};                                                                                 \
            for (int64_t j = 0; j < count; j++) a[j] = x[(i + j) * f->step];                                           \
            if (norm) {                                                                                                \
                W w[NAME(KIND##_N)] = {0};                                                                             \
                V va[2], weight[2];                                                                                    \
                for (int64_t j = 0; j < count; j++) w[j] = ((const W *)norm->weight)[i + j];                           \
                NAME(load_##KIND)(a, va), LOAD_W(w, weight);                                                           \
                NAME(KIND##_norm)(va, weight, scale, norm->rounding);                                                  \
                NAME(careful_store_##KIND)(a, va);                                                                     \
            }                                                                                                          \
            for (int64_t j = 0; j < count; j++) y[(i + j) * f->ystep] = a[j];                                          \
        }                                                                                                              \
    }                                                                                                                  \
    /* The rest of a row after its first `done` pairs. */                                                              \
    APART void NAME(KIND##_rest)(const T *x, T *y, const W *cosines, const W *sines, const Features *f,                \
                                 const Norm *norm, W scale, int64_t done) {                                            \
        const int64_t p = f->pairs;                                                                                    \
        for (int64_t i = done; i < p; i += NAME(KIND##_N))                                                             \
            NAME(KIND##_few)(x, y, cosines, sines, f, norm, scale, i, p - i < NAME(KIND##_N) ? p - i : NAME(KIND##_N));\
        NAME(KIND##_copy)(x, y, f, norm, scale, 0, f->start);                                                          \
        NAME(KIND##_copy)(x, y, f, norm, scale, f->start + 2 * p, f->dim);                                             \
    }                                                                                                                  \
    /* Up to GROUPS groups of N pairs, from pair `i` on, of contiguous features. All are read before the first is      \
       written, so that the operations of the groups overlap. */                                                       \
    INLINE void NAME(KIND##_groups)(const T *x, T *y, const W *cosines, const W *sines, int64_t pairs, int64_t i,      \
                                    int normed, const W *weight, W scale, int rounding, int groups,                    \
                                    int interleaved, int conjugate) {                                                  \
        V low[GROUPS][2], high[GROUPS][2], c[GROUPS][2], s[GROUPS][2], wl[2], wh[2];                                   \
        for (int g = 0; g < groups; g++) {                                                                             \
            const int64_t at = i + g * NAME(KIND##_N);                                                                 \
            LOAD_W(cosines + at, c[g]), LOAD_W(sines + at, s[g]);                                                      \
            if (interleaved)                                                                                           \
                NAME(load2_##KIND)(x + 2 * at, low[g], high[g]);                                                       \
            else                                                                                                       \
                NAME(load_##KIND)(x + at, low[g]), NAME(load_##KIND)(x + pairs + at, high[g]);                         \
            if (normed && interleaved) LOAD2_W(weight + 2 * at, wl, wh);                                               \
            if (normed && !interleaved) LOAD_W(weight + at, wl), LOAD_W(weight + pairs + at, wh);                      \
            if (normed) NAME(KIND##_norm)(low[g], wl, scale, rounding);                                                \
            if (normed) NAME(KIND##_norm)(high[g], wh, scale, rounding);                                               \
        }                                                                                                              \
        for (int g = 0; g < groups; g++)                                                                               \
            if (conjugate)                                                                                             \
                NAME(KIND##_rotate)(high[g], low[g], c[g], s[g]);                                                      \
            else                                                                                                       \
                NAME(KIND##_rotate)(low[g], high[g], c[g], s[g]);                                                      \
        /* First all lower features, then all upper ones: memory accepts long runs of stores faster. */                \
        for (int g = 0; g < groups; g++)                                                                               \
            if (interleaved)                                                                                           \
                NAME(store2_##KIND)(y + 2 * (i + g * NAME(KIND##_N)), low[g], high[g]);                                \
            else                                                                                                       \
                NAME(store_##KIND)(y + i + g * NAME(KIND##_N), low[g]);                                                \
        for (int g = 0; g < groups && !interleaved; g++)                                                               \
            NAME(store_##KIND)(y + pairs + i + g * NAME(KIND##_N), high[g]);                                           \
    }                                                                                                                  \
    /* Rows along two dimensions, in one loop. Its constants are copies, because for the compiler a store to y could   \
       change what a pointer refers to. `next` leads from the end of a run of rows to the next run. */                 \
    INLINE void NAME(KIND##_rows)(const T *x, T *y, const W *cosines, const W *sines, const Features *f,               \
                                  const Norm *norm, const Axis *outer, const Axis *inner, int normed,                  \
                                  int contiguous, int interleaved, int conjugate) {                                    \
        const Axis row = *inner, next = {outer->size, outer->x - row.size * row.x, outer->y - row.size * row.y,        \
                                         outer->cos - row.size * row.cos, outer->sin - row.size * row.sin};            \
        const int64_t start = f->start, pairs = f->pairs, grouped = contiguous ? pairs - pairs % NAME(KIND##_N) : 0;   \
        const int64_t dim = f->dim, step = contiguous ? 1 : f->step;                                                   \
        const int whole = 2 * grouped == dim, rounding = normed ? norm->rounding : 0;                                  \
        const double eps = normed ? norm->eps : 0;                                                                     \
        const W *weight = normed ? (const W *)norm->weight + start : NULL;                                             \
        for (int64_t left = next.size * row.size, run = row.size; left > 0; left--) {                                  \
            const W scale = normed ? NAME(KIND##_scale)(x, dim, step, eps) : 1;                                        \
            int64_t i = 0;                                                                                             \
            /* With a norm, registers suffice for one group. */                                                        \
            for (; !normed && i + GROUPS * NAME(KIND##_N) <= grouped; i += GROUPS * NAME(KIND##_N))                    \
                NAME(KIND##_groups)(x + start, y + start, cosines, sines, pairs, i, normed, weight, scale, rounding,   \
                                    GROUPS, interleaved, conjugate);                                                   \
            for (; i < grouped; i += NAME(KIND##_N))                                                                   \
                NAME(KIND##_groups)(x + start, y + start, cosines, sines, pairs, i, normed, weight, scale, rounding,   \
                                    1, interleaved, conjugate);                                                        \
            if (!whole) NAME(KIND##_rest)(x, y, cosines, sines, f, norm, scale, grouped);                              \
            x += row.x, y += row.y, cosines += row.cos, sines += row.sin;                                              \
            if (--run == 0) {                                                                                          \
                x += next.x, y += next.y, cosines += next.cos, sines += next.sin;                                      \
                run = row.size;                                                                                        \
            }                                                                                                          \
        }                                                                                                              \
    }

#define ITSELF(v) (v)
DEFINE_ROW(f32, AnyFloat, NAME(F), AnyFloat, NAME(load_f32), NAME(load2_f32), ITSELF, NAME(minus_f), NAME(plus_f))
DEFINE_ROW(f64, AnyDouble, NAME(D), AnyDouble, NAME(load_f64), NAME(load2_f64), ITSELF, NAME(minus_d), NAME(plus_d))
DEFINE_ROW(bf16, AnyHalf, NAME(F), AnyFloat, NAME(load_f32), NAME(load2_f32), NAME(nearest_bf16), NAME(minus_f),
           NAME(plus_f))
DEFINE_ROW(f16, AnyHalf, NAME(F), AnyFloat, NAME(load_f32), NAME(load2_f32), NAME(nearest_f16), NAME(minus_f),
           NAME(plus_f))
#undef ITSELF
#undef DEFINE_ROW
#undef HALVE
