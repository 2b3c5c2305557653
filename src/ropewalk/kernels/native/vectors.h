/* Vectors of numbers: loads that convert each dtype to the working type, and stores that round once, to nearest, ties
   to even. Included once per instruction set, with LANES floats per vector, and with NAME, which makes names of the
   copies distinct.

   Every operation has exactly one result in IEEE arithmetic, because the build forbids the compiler to fuse multiply
   and add. A number is therefore rounded in the same way in any lane and any vector, and the rotation of a token does
   not depend on the other tokens. */

typedef float NAME(F) __attribute__((vector_size(4 * LANES)));
typedef uint32_t NAME(U) __attribute__((vector_size(4 * LANES)));
typedef uint16_t NAME(H) __attribute__((vector_size(4 * LANES)));
typedef uint16_t NAME(Q) __attribute__((vector_size(2 * LANES)));
typedef double NAME(D) __attribute__((vector_size(4 * LANES)));
typedef int64_t NAME(L) __attribute__((vector_size(4 * LANES)));

/* u - v w and u + v w, fused if the instruction set supports it: NEON, and AVX2, which is only used with FMA. */
#if NEON
INLINE NAME(F) NAME(minus_f)(NAME(F) u, NAME(F) v, NAME(F) w) { return vfmsq_f32(u, v, w); }
INLINE NAME(F) NAME(plus_f)(NAME(F) u, NAME(F) v, NAME(F) w) { return vfmaq_f32(u, v, w); }
INLINE NAME(D) NAME(minus_d)(NAME(D) u, NAME(D) v, NAME(D) w) { return vfmsq_f64(u, v, w); }
INLINE NAME(D) NAME(plus_d)(NAME(D) u, NAME(D) v, NAME(D) w) { return vfmaq_f64(u, v, w); }
#elif LANES == 8
INLINE NAME(F) NAME(minus_f)(NAME(F) u, NAME(F) v, NAME(F) w) { return _mm256_fnmadd_ps(v, w, u); }
INLINE NAME(F) NAME(plus_f)(NAME(F) u, NAME(F) v, NAME(F) w) { return _mm256_fmadd_ps(v, w, u); }
INLINE NAME(D) NAME(minus_d)(NAME(D) u, NAME(D) v, NAME(D) w) { return _mm256_fnmadd_pd(v, w, u); }
INLINE NAME(D) NAME(plus_d)(NAME(D) u, NAME(D) v, NAME(D) w) { return _mm256_fmadd_pd(v, w, u); }
#else
INLINE NAME(F) NAME(minus_f)(NAME(F) u, NAME(F) v, NAME(F) w) { return u - v * w; }
INLINE NAME(F) NAME(plus_f)(NAME(F) u, NAME(F) v, NAME(F) w) { return u + v * w; }
INLINE NAME(D) NAME(minus_d)(NAME(D) u, NAME(D) v, NAME(D) w) { return u - v * w; }
INLINE NAME(D) NAME(plus_d)(NAME(D) u, NAME(D) v, NAME(D) w) { return u + v * w; }
#endif

/* Loads and stores of two vectors. */
INLINE void NAME(load_f32)(const AnyFloat *from, NAME(F) *v) {
    for (int i = 0; i < 2; i++) memcpy(&v[i], from + i * LANES, sizeof v[i]);
}

INLINE void NAME(store_f32)(AnyFloat *to, const NAME(F) *v) {
    for (int i = 0; i < 2; i++) memcpy(to + i * LANES, &v[i], sizeof v[i]);
}

INLINE void NAME(load_f64)(const AnyDouble *from, NAME(D) *v) {
    for (int i = 0; i < 2; i++) memcpy(&v[i], from + i * (LANES / 2), sizeof v[i]);
}

INLINE void NAME(store_f64)(AnyDouble *to, const NAME(D) *v) {
    for (int i = 0; i < 2; i++) memcpy(to + i * (LANES / 2), &v[i], sizeof v[i]);
}

/* Conversion of 16-bit numbers to the upper halves of 32-bit words, and back. */
INLINE void NAME(load_upper)(const AnyHalf *from, NAME(U) *v) {
#if NEON
    NAME(H) both, zero = {0};
    memcpy(&both, from, sizeof both);
    v[0] = (NAME(U))SHUFFLE_H(zero, both, 0, 8, 1, 9, 2, 10, 3, 11);
    v[1] = (NAME(U))SHUFFLE_H(zero, both, 4, 12, 5, 13, 6, 14, 7, 15);
#else
    for (int i = 0; i < 2; i++) {
        NAME(Q) half;
        memcpy(&half, from + i * LANES, sizeof half);
        v[i] = __builtin_convertvector(half, NAME(U)) << 16;
    }
#endif
}

INLINE void NAME(store_upper)(AnyHalf *to, const NAME(U) *v) {
#if NEON
    NAME(H) both = SHUFFLE_H((NAME(H))v[0], (NAME(H))v[1], 1, 3, 5, 7, 9, 11, 13, 15);
    memcpy(to, &both, sizeof both);
#else
    for (int i = 0; i < 2; i++) {
        NAME(Q) half = __builtin_convertvector(v[i] >> 16, NAME(Q));
        memcpy(to + i * LANES, &half, sizeof half);
    }
#endif
}

/* bfloat16 is the upper half of a float32. round_bf16 adds half a unit in the last place of bfloat16, minus one bit if
   that place is even, so that ties go to even. The caller drops the lower half. */
INLINE NAME(U) NAME(odd_bf16)(NAME(U) bits) { return (NAME(U))((bits & 0x10000u) != 0u); }

INLINE NAME(U) NAME(round_bf16)(NAME(F) v) { return (NAME(U))v - NAME(odd_bf16)((NAME(U))v) + 0x7fffu; }

/* The sum would overflow a NaN whose bits are all ones to zero. No bfloat16 is such a NaN, and arithmetic produces
   none, but float32 cos, sin and weights may contain one. `careful_` handles these, with two more operations. */
INLINE NAME(U) NAME(careful_bf16)(NAME(F) v) { return NAME(round_bf16)(v) | (NAME(U))(v != v); }

INLINE NAME(F) NAME(nearest_bf16)(NAME(F) v) { return (NAME(F))(NAME(careful_bf16)(v) & 0xffff0000u); }

INLINE void NAME(load_bf16)(const AnyHalf *from, NAME(F) *v) { NAME(load_upper)(from, (NAME(U) *)v); }

#if NEON
/* round_bf16 of eight numbers, from their lower and upper halves: the upper half plus one if the lower half is more
   than 0x8000, or is 0x8000 and the upper half is odd. */
INLINE uint16x8_t NAME(round_halves)(uint16x8_t lower, uint16x8_t upper) {
    const uint16x8_t even = vbicq_u16(vdupq_n_u16(1), upper);
    return vsraq_n_u16(upper, vqsubq_u16(lower, even), 15);
}
#endif

INLINE void NAME(store_bf16)(AnyHalf *to, const NAME(F) *v) {
#if NEON
    const uint16x8_t low = (uint16x8_t)v[0], high = (uint16x8_t)v[1];
    const uint16x8_t both = NAME(round_halves)(vuzp1q_u16(low, high), vuzp2q_u16(low, high));
    memcpy(to, &both, sizeof both);
#else
    NAME(U) bits[2] = {NAME(round_bf16)(v[0]), NAME(round_bf16)(v[1])};
    NAME(store_upper)(to, bits);
#endif
}

INLINE void NAME(careful_store_bf16)(AnyHalf *to, const NAME(F) *v) {
    NAME(U) bits[2] = {NAME(careful_bf16)(v[0]), NAME(careful_bf16)(v[1])};
    NAME(store_upper)(to, bits);
}

INLINE NAME(U) NAME(choose)(NAME(U) mask, NAME(U) yes, NAME(U) no) { return (mask & yes) | (~mask & no); }

/* float16, in the lower half of each word, to float32. */
INLINE NAME(F) NAME(expand_f16)(NAME(U) bits) {
    NAME(U) sign = (bits & 0x8000u) << 16, size = (bits & 0x7fffu) << 13, exponent = size & (31u << 23);
    /* The exponent is biased by 15 in float16 and by 127 in float32. Infinity and NaN have the largest one in both. */
    NAME(U) most = (NAME(U))(exponent == (31u << 23)), normal = size + (112u << 23) + (most & (112u << 23));
    /* Subnormal numbers: 2^-14 (1 + m) - 2^-14, which is exact. */
    NAME(F) one = (NAME(F))((NAME(U)){0} + (113u << 23));
    NAME(U) tiny = (NAME(U))((NAME(F))(size | (113u << 23)) - one);
    return (NAME(F))(sign | NAME(choose)((NAME(U))(exponent == 0u), tiny, normal));
}

INLINE NAME(U) NAME(round_f16)(NAME(F) v) {
    NAME(U) bits = (NAME(U))v, sign = (bits >> 16) & 0x8000u, size = bits & 0x7fffffffu;
    /* Below 2^-14 the spacing is 2^-24, which is the spacing of float32 at 1/2: adding 1/2 rounds there. */
    NAME(U) tiny = (NAME(U))((NAME(F))size + 0.5f) - (126u << 23);
    NAME(U) normal = (size - (112u << 23) + 0xfffu + ((size >> 13) & 1u)) >> 13;
    NAME(U) rounded = NAME(choose)((NAME(U))(size < (113u << 23)), tiny, normal);
    NAME(U) huge = 0x7c00u + ((NAME(U))(size > 0x7f800000u) & 0x200u);
    return sign | NAME(choose)((NAME(U))(size >= (143u << 23)), huge, rounded);
}

INLINE NAME(F) NAME(nearest_f16)(NAME(F) v) { return NAME(expand_f16)(NAME(round_f16)(v)); }

INLINE void NAME(load_f16)(const AnyHalf *from, NAME(F) *v) {
#if NEON
    float16x8_t both;
    memcpy(&both, from, sizeof both);
    v[0] = vcvt_f32_f16(vget_low_f16(both)), v[1] = vcvt_high_f32_f16(both);
#else
    NAME(U) bits[2];
    NAME(load_upper)(from, bits);
    for (int i = 0; i < 2; i++) v[i] = NAME(expand_f16)(bits[i] >> 16);
#endif
}

INLINE void NAME(store_f16)(AnyHalf *to, const NAME(F) *v) {
#if NEON
    float16x8_t both = vcvt_high_f16_f32(vcvt_f16_f32(v[0]), v[1]);
    memcpy(to, &both, sizeof both);
#else
    NAME(U) bits[2] = {NAME(round_f16)(v[0]) << 16, NAME(round_f16)(v[1]) << 16};
    NAME(store_upper)(to, bits);
#endif
}

/* For other dtypes, careful stores are plain stores. */
INLINE void NAME(careful_store_f32)(AnyFloat *to, const NAME(F) *v) { NAME(store_f32)(to, v); }
INLINE void NAME(careful_store_f64)(AnyDouble *to, const NAME(D) *v) { NAME(store_f64)(to, v); }
INLINE void NAME(careful_store_f16)(AnyHalf *to, const NAME(F) *v) { NAME(store_f16)(to, v); }

/* Conversion of neighbours (0,1), (2,3), ... to two vectors, and back. */
#if LANES == 4
#define EVEN 0, 2, 4, 6
#define ODD 1, 3, 5, 7
#define LOW 0, 4, 1, 5
#define HIGH 2, 6, 3, 7
#define EVEN_D 0, 2
#define ODD_D 1, 3
#define LOW_D 0, 2
#define HIGH_D 1, 3
#else
#define EVEN 0, 2, 4, 6, 8, 10, 12, 14
#define ODD 1, 3, 5, 7, 9, 11, 13, 15
#define LOW 0, 8, 1, 9, 2, 10, 3, 11
#define HIGH 4, 12, 5, 13, 6, 14, 7, 15
#define EVEN_D 0, 2, 4, 6
#define ODD_D 1, 3, 5, 7
#define LOW_D 0, 4, 1, 5
#define HIGH_D 2, 6, 3, 7
#endif

INLINE void NAME(load2_f32)(const AnyFloat *from, NAME(F) *a, NAME(F) *b) {
    for (int i = 0; i < 2; i++) {
        NAME(F) u, v;
        memcpy(&u, from + 2 * LANES * i, sizeof u), memcpy(&v, from + 2 * LANES * i + LANES, sizeof v);
        a[i] = SHUFFLE(u, v, EVEN), b[i] = SHUFFLE(u, v, ODD);
    }
}

INLINE void NAME(store2_f32)(AnyFloat *to, const NAME(F) *a, const NAME(F) *b) {
    for (int i = 0; i < 2; i++) {
        NAME(F) u = SHUFFLE(a[i], b[i], LOW), v = SHUFFLE(a[i], b[i], HIGH);
        memcpy(to + 2 * LANES * i, &u, sizeof u), memcpy(to + 2 * LANES * i + LANES, &v, sizeof v);
    }
}

INLINE void NAME(load2_f64)(const AnyDouble *from, NAME(D) *a, NAME(D) *b) {
    for (int i = 0; i < 2; i++) {
        NAME(D) u, v;
        memcpy(&u, from + LANES * i, sizeof u), memcpy(&v, from + LANES * i + LANES / 2, sizeof v);
        a[i] = SHUFFLE_D(u, v, EVEN_D), b[i] = SHUFFLE_D(u, v, ODD_D);
    }
}

INLINE void NAME(store2_f64)(AnyDouble *to, const NAME(D) *a, const NAME(D) *b) {
    for (int i = 0; i < 2; i++) {
        NAME(D) u = SHUFFLE_D(a[i], b[i], LOW_D), v = SHUFFLE_D(a[i], b[i], HIGH_D);
        memcpy(to + LANES * i, &u, sizeof u), memcpy(to + LANES * i + LANES / 2, &v, sizeof v);
    }
}

/* Two 16-bit neighbours are one 32-bit word, with the first one in the lower half: all supported machines are
   little-endian. */
INLINE void NAME(load2_bf16)(const AnyHalf *from, NAME(F) *a, NAME(F) *b) {
    for (int i = 0; i < 2; i++) {
        NAME(U) words;
        memcpy(&words, from + 2 * LANES * i, sizeof words);
        a[i] = (NAME(F))(words << 16), b[i] = (NAME(F))(words & 0xffff0000u);
    }
}

INLINE void NAME(store2_bf16)(AnyHalf *to, const NAME(F) *a, const NAME(F) *b) {
    for (int i = 0; i < 2; i++) {
#if NEON
        const uint16x8_t even = (uint16x8_t)a[i], odd = (uint16x8_t)b[i];
        const uint16x8_t words = NAME(round_halves)(vtrn1q_u16(even, odd), vtrn2q_u16(even, odd));
#else
        const NAME(U) words = (NAME(round_bf16)(a[i]) >> 16) | (NAME(round_bf16)(b[i]) & 0xffff0000u);
#endif
        memcpy(to + 2 * LANES * i, &words, sizeof words);
    }
}

INLINE void NAME(load2_f16)(const AnyHalf *from, NAME(F) *a, NAME(F) *b) {
#if NEON
    float16x8_t u, v;
    memcpy(&u, from, sizeof u), memcpy(&v, from + 8, sizeof v);
    const float16x8_t even = vuzp1q_f16(u, v), odd = vuzp2q_f16(u, v);
    a[0] = vcvt_f32_f16(vget_low_f16(even)), a[1] = vcvt_high_f32_f16(even);
    b[0] = vcvt_f32_f16(vget_low_f16(odd)), b[1] = vcvt_high_f32_f16(odd);
#else
    for (int i = 0; i < 2; i++) {
        NAME(U) words;
        memcpy(&words, from + 2 * LANES * i, sizeof words);
        a[i] = NAME(expand_f16)(words & 0xffffu), b[i] = NAME(expand_f16)(words >> 16);
    }
#endif
}

INLINE void NAME(store2_f16)(AnyHalf *to, const NAME(F) *a, const NAME(F) *b) {
#if NEON
    const float16x8_t even = vcvt_high_f16_f32(vcvt_f16_f32(a[0]), a[1]);
    const float16x8_t odd = vcvt_high_f16_f32(vcvt_f16_f32(b[0]), b[1]);
    const float16x8_t u = vzip1q_f16(even, odd), v = vzip2q_f16(even, odd);
    memcpy(to, &u, sizeof u), memcpy(to + 8, &v, sizeof v);
#else
    for (int i = 0; i < 2; i++) {
        NAME(U) words = NAME(round_f16)(a[i]) | (NAME(round_f16)(b[i]) << 16);
        memcpy(to + 2 * LANES * i, &words, sizeof words);
    }
#endif
}

#undef EVEN
#undef ODD
#undef LOW
#undef HIGH
#undef EVEN_D
#undef ODD_D
#undef LOW_D
#undef HIGH_D
