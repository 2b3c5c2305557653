/* Loops over all rows of a tensor, in the order of its memory. Included once per instruction set, after rows.h. */

#define DEFINE_LOOPS(KIND, T, W)                                                                                       \
    INLINE void NAME(KIND##_loops)(const Rotation *r, const Norm *norm) {                                              \
        const Axis t = r->tokens, h = r->heads;                                                                        \
        const Features f = r->features;                                                                                \
        const int by_token = llabs(h.x) <= llabs(t.x);                                                                 \
        int64_t at[MOST_OTHERS] = {0};                                                                                 \
        for (int axis = 0; axis >= 0;) {                                                                               \
            const T *x = (const T *)r->x;                                                                              \
            T *y = (T *)r->y;                                                                                          \
            const W *cosines = (const W *)r->cos, *sines = (const W *)r->sin;                                          \
            for (int i = 0; i < r->other_count; i++) {                                                                 \
                const Axis *o = &r->others[i];                                                                         \
                x += at[i] * o->x, y += at[i] * o->y, cosines += at[i] * o->cos, sines += at[i] * o->sin;              \
            }                                                                                                          \
            if (by_token)                                                                                              \
                NAME(KIND##_rows)(x, y, cosines, sines, &f, norm, &t, &h);                                             \
            else                                                                                                       \
                for (int64_t m = 0; m < t.size; m += BLOCK) {                                                          \
                    Axis some = t;                                                                                     \
                    some.size = t.size - m < BLOCK ? t.size - m : BLOCK;                                               \
                    NAME(KIND##_rows)(x + m * t.x, y + m * t.y, cosines + m * t.cos, sines + m * t.sin, &f, norm, &h,  \
                                      &some);                                                                          \
                }                                                                                                      \
            axis = r->other_count - 1;                                                                                 \
            while (axis >= 0 && ++at[axis] == r->others[axis].size) at[axis--] = 0;                                    \
        }                                                                                                              \
    }

DEFINE_LOOPS(f32, AnyFloat, AnyFloat)
DEFINE_LOOPS(f64, AnyDouble, AnyDouble)
DEFINE_LOOPS(bf16, AnyHalf, AnyFloat)
DEFINE_LOOPS(f16, AnyHalf, AnyFloat)
#undef DEFINE_LOOPS

/* Separate loops with and without a norm, so that an unused norm costs nothing. */
#define CASE(LABEL, KIND)                                                                                              \
    case LABEL:                                                                                                        \
        if (r->norm.weight)                                                                                            \
            NAME(KIND##_loops)(r, &r->norm);                                                                           \
        else                                                                                                           \
            NAME(KIND##_loops)(r, NULL);                                                                               \
        break;

TARGET static void NAME(loops)(const Rotation *r) {
    switch (r->dtype) {
        CASE(F32, f32)
        CASE(F64, f64)
        CASE(BF16, bf16)
        CASE(F16, f16)
    }
}
#undef CASE
