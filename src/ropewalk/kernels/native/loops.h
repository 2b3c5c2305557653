/* Loops over all rows of a tensor, in the order of its memory. Included once per instruction set, after rows.h. */

/* A function per combination of options, which are constants in its loops. The variables of a loop then fit in
   registers. Between the stores to y, a store to the stack would be slow: it interrupts a run of whole cache lines,
   which processors write without reading them first. */
#define VARIANT(KIND, T, W, LABEL, NORMED, CONTIGUOUS, INTERLEAVED, CONJUGATE)                                         \
    APART void NAME(KIND##_##LABEL)(const T *x, T *y, const W *cosines, const W *sines, const Features *f,             \
                                    const Norm *norm, const Axis *outer, const Axis *inner) {                          \
        NAME(KIND##_rows)(x, y, cosines, sines, f, norm, outer, inner, NORMED, CONTIGUOUS, INTERLEAVED,                \
                          CONJUGATE);                                                                                  \
    }

#define DEFINE_LOOPS(KIND, T, W)                                                                                       \
    VARIANT(KIND, T, W, strided, norm != NULL, 0, 0, 0)                                                                \
    VARIANT(KIND, T, W, half, 0, 1, 0, 0)                                                                              \
    VARIANT(KIND, T, W, half_conjugate, 0, 1, 0, 1)                                                                    \
    VARIANT(KIND, T, W, interleaved, 0, 1, 1, 0)                                                                       \
    VARIANT(KIND, T, W, interleaved_conjugate, 0, 1, 1, 1)                                                             \
    VARIANT(KIND, T, W, norm_half, 1, 1, 0, 0)                                                                         \
    VARIANT(KIND, T, W, norm_half_conjugate, 1, 1, 0, 1)                                                               \
    VARIANT(KIND, T, W, norm_interleaved, 1, 1, 1, 0)                                                                  \
    VARIANT(KIND, T, W, norm_interleaved_conjugate, 1, 1, 1, 1)                                                        \
    APART void NAME(KIND##_loops)(const Rotation *r) {                                                                 \
        static void (*const variants[])(const T *, T *, const W *, const W *, const Features *, const Norm *,          \
                                        const Axis *, const Axis *) = {                                                \
            NAME(KIND##_half), NAME(KIND##_half_conjugate), NAME(KIND##_interleaved),                                  \
            NAME(KIND##_interleaved_conjugate), NAME(KIND##_norm_half), NAME(KIND##_norm_half_conjugate),              \
            NAME(KIND##_norm_interleaved), NAME(KIND##_norm_interleaved_conjugate), NAME(KIND##_strided)};             \
        const Axis t = r->tokens, h = r->heads;                                                                        \
        const Features *f = &r->features;                                                                              \
        const Norm *norm = r->norm.weight ? &r->norm : NULL;                                                           \
        const int strided = f->careful || f->step != 1 || f->ystep != 1 || f->cos_step != 1 || f->sin_step != 1;       \
        const int variant = strided ? 8 : 4 * (norm != NULL) + 2 * (f->interleaved != 0) + (f->conjugate != 0);        \
        const int by_token = llabs(h.x) <= llabs(t.x);                                                                 \
        const int64_t block = by_token ? t.size : BLOCK;                                                               \
        int64_t at[MOST_OTHERS] = {0};                                                                                 \
        for (int axis = 0; axis >= 0;) {                                                                               \
            const T *x = (const T *)r->x;                                                                              \
            T *y = (T *)r->y;                                                                                          \
            const W *cosines = (const W *)r->cos, *sines = (const W *)r->sin;                                          \
            for (int i = 0; i < r->other_count; i++) {                                                                 \
                const Axis *o = &r->others[i];                                                                         \
                x += at[i] * o->x, y += at[i] * o->y, cosines += at[i] * o->cos, sines += at[i] * o->sin;              \
            }                                                                                                          \
            for (int64_t m = 0; m < t.size; m += block) {                                                              \
                const Axis some = {t.size - m < block ? t.size - m : block, t.x, t.y, t.cos, t.sin};                   \
                variants[variant](x + m * t.x, y + m * t.y, cosines + m * t.cos, sines + m * t.sin, f, norm,           \
                                  by_token ? &some : &h, by_token ? &h : &some);                                       \
            }                                                                                                          \
            axis = r->other_count - 1;                                                                                 \
            while (axis >= 0 && ++at[axis] == r->others[axis].size) at[axis--] = 0;                                    \
        }                                                                                                              \
    }

DEFINE_LOOPS(f32, AnyFloat, AnyFloat)
DEFINE_LOOPS(f64, AnyDouble, AnyDouble)
DEFINE_LOOPS(bf16, AnyHalf, AnyFloat)
DEFINE_LOOPS(f16, AnyHalf, AnyFloat)
#undef DEFINE_LOOPS
#undef VARIANT

TARGET static void NAME(loops)(const Rotation *r) {
    switch (r->dtype) {
        case F32: NAME(f32_loops)(r); break;
        case F64: NAME(f64_loops)(r); break;
        case BF16: NAME(bf16_loops)(r); break;
        case F16: NAME(f16_loops)(r); break;
    }
}
