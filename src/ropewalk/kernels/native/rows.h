/* Rotation of one row: the features of one head of one token, after an optional norm. Included once per instruction
   set, after vectors.h.

   y_a = a cos - b sin, y_b = b cos + a sin for each pair (a, b). Unrotated features are copied. For the opposite
   angles, a and b are swapped. Pairs are independent, and each is read before it is written, so y may be x. */

/* T is the type of x and y in memory, V a vector of the working type W. VECTORS of them, N numbers, are processed at
   once. LOAD_W and LOAD2_W load N numbers of the working type. */
#define DEFINE_ROW(KIND, T, V, W, VECTORS, LOAD_W, LOAD2_W, NEAREST, MINUS, PLUS)                                      \
    enum { NAME(KIND##_N) = VECTORS * sizeof(V) / sizeof(W) };                                                         \
    /* RMSNorm: x / rms(x) * weight, rounded after each product as `rounding` specifies. */                            \
    INLINE void NAME(KIND##_norm)(V *v, const V *weight, W scale, int rounding) {                                      \
        for (int i = 0; i < VECTORS; i++) {                                                                            \
            v[i] = v[i] * scale;                                                                                       \
            if (rounding & ROUND_SCALED) v[i] = NEAREST(v[i]);                                                         \
            v[i] = v[i] * weight[i];                                                                                   \
            if (rounding & ROUND_WEIGHTED) v[i] = NEAREST(v[i]);                                                       \
        }                                                                                                              \
    }                                                                                                                  \
    /* 1 / sqrt(mean of squares + eps). 32 partial sums for any vector length, so that all machines round alike. */    \
    INLINE W NAME(KIND##_scale)(const T *x, const Features *f, double eps) {                                           \
        enum { SUMS = 32, EACH = SUMS * sizeof(W) / sizeof(V) };                                                       \
        _Static_assert(SUMS % NAME(KIND##_N) == 0, "whole loads");                                                     \
        double total = 0;                                                                                              \
        for (int64_t from = 0; from < f->dim; from += 512) {                                                           \
            const int64_t stop = from + 512 < f->dim ? from + 512 : f->dim;                                            \
            V sums[EACH];                                                                                              \
            memset(sums, 0, sizeof sums);                                                                              \
            for (int64_t i = from; i < stop; i += SUMS) {                                                              \
                T some[SUMS] = {0};                                                                                    \
                V v[EACH];                                                                                             \
                if (f->step == 1 && i + SUMS <= stop)                                                                  \
                    memcpy(some, x + i, sizeof some);                                                                  \
                else                                                                                                   \
                    for (int64_t j = 0; j < SUMS && i + j < stop; j++) some[j] = x[(i + j) * f->step];                 \
                for (int j = 0; j < SUMS; j += NAME(KIND##_N))                                                         \
                    NAME(load_##KIND)(some + j, v + (size_t)j * sizeof(W) / sizeof(V));                                \
                for (int j = 0; j < EACH; j++) sums[j] += v[j] * v[j];                                                 \
            }                                                                                                          \
            W s[SUMS];                                                                                                 \
            memcpy(s, sums, sizeof s);                                                                                 \
            for (int half = SUMS / 2; half; half /= 2)                                                                 \
                for (int j = 0; j < half; j++) s[j] += s[j + half];                                                    \
            total += (double)s[0];                                                                                     \
        }                                                                                                              \
        return (W)(1.0 / sqrt(total / (double)f->dim + eps));                                                          \
    }                                                                                                                  \
    INLINE void NAME(KIND##_rotate)(V *a, V *b, const V *c, const V *s) {                                              \
        for (int i = 0; i < VECTORS; i++) {                                                                            \
            const V first = MINUS(a[i] * c[i], b[i], s[i]), second = PLUS(b[i] * c[i], a[i], s[i]);                    \
            a[i] = first, b[i] = second;                                                                               \
        }                                                                                                              \
    }                                                                                                                  \
    /* At most N pairs, with any strides. */                                                                           \
    APART void NAME(KIND##_few)(const T *x, T *y, const W *cosines, const W *sines, const Features *f,                 \
                                 const Norm *norm, W scale, int64_t first, int64_t count) {                            \
        T a[NAME(KIND##_N)] = {0}, b[NAME(KIND##_N)] = {0};                                                            \
        W c[NAME(KIND##_N)] = {0}, s[NAME(KIND##_N)] = {0}, wa[NAME(KIND##_N)] = {0}, wb[NAME(KIND##_N)] = {0};        \
        V va[VECTORS], vb[VECTORS], vc[VECTORS], vs[VECTORS], weight[VECTORS];                                         \
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
                V va[VECTORS], weight[VECTORS];                                                                        \
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
    /* Pairs in groups of N, from contiguous features. Returns the number of processed pairs. */                       \
    INLINE int64_t NAME(KIND##_many)(const T *x, T *y, const W *cosines, const W *sines, const Features *f,            \
                                     const Norm *norm, W scale, int interleaved, int conjugate) {                      \
        const W *weight = norm ? (const W *)norm->weight + f->start : NULL;                                            \
        const int64_t p = f->pairs;                                                                                    \
        int64_t i = 0;                                                                                                 \
        x += f->start, y += f->start;                                                                                  \
        for (; i + NAME(KIND##_N) <= p; i += NAME(KIND##_N)) {                                                         \
            V low[VECTORS], high[VECTORS], c[VECTORS], s[VECTORS], wl[VECTORS], wh[VECTORS];                           \
            LOAD_W(cosines + i, c), LOAD_W(sines + i, s);                                                              \
            if (interleaved)                                                                                           \
                NAME(load2_##KIND)(x + 2 * i, low, high);                                                              \
            else                                                                                                       \
                NAME(load_##KIND)(x + i, low), NAME(load_##KIND)(x + p + i, high);                                     \
            if (norm && interleaved) LOAD2_W(weight + 2 * i, wl, wh);                                                  \
            if (norm && !interleaved) LOAD_W(weight + i, wl), LOAD_W(weight + p + i, wh);                              \
            if (norm) NAME(KIND##_norm)(low, wl, scale, norm->rounding);                                               \
            if (norm) NAME(KIND##_norm)(high, wh, scale, norm->rounding);                                              \
            if (conjugate)                                                                                             \
                NAME(KIND##_rotate)(high, low, c, s);                                                                  \
            else                                                                                                       \
                NAME(KIND##_rotate)(low, high, c, s);                                                                  \
            if (interleaved)                                                                                           \
                NAME(store2_##KIND)(y + 2 * i, low, high);                                                             \
            else                                                                                                       \
                NAME(store_##KIND)(y + i, low), NAME(store_##KIND)(y + p + i, high);                                   \
        }                                                                                                              \
        return i;                                                                                                      \
    }                                                                                                                  \
    INLINE void NAME(KIND##_loop)(const T *x, T *y, const W *cosines, const W *sines, const Features *f,               \
                                  const Norm *norm, const Axis *outer, const Axis *inner, int contiguous,              \
                                  int interleaved, int conjugate) {                                                    \
        for (int64_t m = 0; m < outer->size; m++)                                                                      \
            for (int64_t n = 0; n < inner->size; n++) {                                                                \
                const T *from = x + m * outer->x + n * inner->x;                                                       \
                T *to = y + m * outer->y + n * inner->y;                                                               \
                const W *c = cosines + m * outer->cos + n * inner->cos, *s = sines + m * outer->sin + n * inner->sin;  \
                const W scale = norm ? NAME(KIND##_scale)(from, f, norm->eps) : 1;                                     \
                int64_t done = 0;                                                                                      \
                if (contiguous) done = NAME(KIND##_many)(from, to, c, s, f, norm, scale, interleaved, conjugate);      \
                if (2 * done < f->dim) NAME(KIND##_rest)(from, to, c, s, f, norm, scale, done);                        \
            }                                                                                                          \
    }                                                                                                                  \
    /* Loops over rows along two dimensions. Options are compile-time constants in each loop. */                       \
    APART void NAME(KIND##_rows)(const T *x, T *y, const W *cosines, const W *sines, const Features *f,                \
                                 const Norm *norm, const Axis *outer, const Axis *inner) {                             \
        if (f->careful || f->step != 1 || f->ystep != 1 || f->cos_step != 1 || f->sin_step != 1)                       \
            NAME(KIND##_loop)(x, y, cosines, sines, f, norm, outer, inner, 0, 0, 0);                                   \
        else if (f->interleaved && f->conjugate)                                                                       \
            NAME(KIND##_loop)(x, y, cosines, sines, f, norm, outer, inner, 1, 1, 1);                                   \
        else if (f->interleaved)                                                                                       \
            NAME(KIND##_loop)(x, y, cosines, sines, f, norm, outer, inner, 1, 1, 0);                                   \
        else if (f->conjugate)                                                                                         \
            NAME(KIND##_loop)(x, y, cosines, sines, f, norm, outer, inner, 1, 0, 1);                                   \
        else                                                                                                           \
            NAME(KIND##_loop)(x, y, cosines, sines, f, norm, outer, inner, 1, 0, 0);                                   \
    }

#define ITSELF(v) (v)
DEFINE_ROW(f32, AnyFloat, NAME(F), AnyFloat, 4, NAME(load_f32), NAME(load2_f32), ITSELF, NAME(minus_f), NAME(plus_f))
DEFINE_ROW(f64, AnyDouble, NAME(D), AnyDouble, 2, NAME(load_f64), NAME(load2_f64), ITSELF, NAME(minus_d), NAME(plus_d))
DEFINE_ROW(bf16, AnyHalf, NAME(F), AnyFloat, 2, NAME(load_pair), NAME(load2_pair), NAME(nearest_bf16), NAME(minus_f),
           NAME(plus_f))
DEFINE_ROW(f16, AnyHalf, NAME(F), AnyFloat, 2, NAME(load_pair), NAME(load2_pair), NAME(nearest_f16), NAME(minus_f),
           NAME(plus_f))
#undef ITSELF
#undef DEFINE_ROW
