/* What is to be rotated, and the loops over it for every instruction set. */
#ifndef ROPEWALK_ROTATION_H
#define ROPEWALK_ROTATION_H

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* A test builds with 1, to run what machines without NEON or AVX2 run. */
#ifndef BASELINE
#define BASELINE 0
#endif
#if defined(__aarch64__) && !BASELINE
#define NEON 1
#include <arm_neon.h>
#else
#define NEON 0
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "tensors.h"

/* What is compiled for an instruction set is inlined into what is compiled for the same alone. */
#define INLINE TARGET static inline __attribute__((always_inline))
/* What is seldom run, kept out of the loops that are. */
#define APART TARGET static __attribute__((noinline))

typedef enum { F32, F64, BF16, F16 } Dtype;

/* Where the features of a row lie: how many there are, the first that turns, how many pairs turn; the distance of
   neighbours in x, y, cos and sin; which features form a pair, and which way it turns; whether every store is to be careful. */
typedef struct {
    int64_t dim, start, pairs, step, ystep, cos_step, sin_step;
    int interleaved, conjugate, careful;
} Features;

/* RMSNorm before the rotation. `weight` has the working type, one a feature; NULL for no norm. */
typedef struct {
    const void *weight;
    double eps;
    int rounding;
} Norm;

enum { ROUND_SCALED = 1, ROUND_WEIGHTED = 2 };

/* A dimension of the tensor: its size, and what a step along it is, in elements, in x, y, cos and sin. */
typedef struct {
    int64_t size, x, y, cos, sin;
} Axis;

enum { MOST_OTHERS = 16 };

/* One tensor. `others` are all its dimensions but those of tokens, heads and features. None is empty. */
typedef struct {
    const void *x;
    void *y;
    const void *cos, *sin;
    Axis tokens, heads, others[MOST_OTHERS];
    int other_count;
    Features features;
    Norm norm;
    Dtype dtype;
} Rotation;

/* Tokens whose cos and sin stay in a near cache while all heads pass, where heads lie farther apart than tokens. Fewer
   would fit nearer, and break up the long reads that memory likes. */
enum { BLOCK = 256 };

static int any_nan(const AnyFloat *numbers, int64_t count) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, numbers + i, sizeof bits);
        bits &= 0x7fffffffu;
        largest = bits > largest ? bits : largest;
    }
    /* Infinity has these bits, and a NaN has more. */
    return largest > 0x7f800000u;
}

/* Whether a NaN may stand in what a bfloat16 is multiplied with. */
static int needs_care(const Rotation *r) {
    if (r->features.cos_step != 1 || r->features.sin_step != 1) return 1;
    if (r->norm.weight && any_nan((const AnyFloat *)r->norm.weight, r->features.dim)) return 1;
    int64_t at[MOST_OTHERS + 2] = {0};
    Axis axes[MOST_OTHERS + 2] = {r->tokens, r->heads};
    memcpy(axes + 2, r->others, sizeof r->others);
    const int count = r->other_count + 2;
    int64_t length = r->features.pairs;
    /* A dimension along which cos and sin stay the same is looked at once; rows without a gap are one. */
    for (int i = 0; i < count; i++)
        if (axes[i].cos == 0 && axes[i].sin == 0) axes[i].size = 1;
    if (axes[0].cos == length && axes[0].sin == length) length *= axes[0].size, axes[0].size = 1;
    for (int axis = 0; axis >= 0;) {
        const AnyFloat *cosines = (const AnyFloat *)r->cos, *sines = (const AnyFloat *)r->sin;
        for (int i = 0; i < count; i++) cosines += at[i] * axes[i].cos, sines += at[i] * axes[i].sin;
        if (any_nan(cosines, length) || any_nan(sines, length)) return 1;
        axis = count - 1;
        while (axis >= 0 && ++at[axis] == axes[axis].size) at[axis--] = 0;
    }
    return 0;
}

#if defined(__clang__)
#define SHUFFLE(u, v, ...) __builtin_shufflevector(u, v, __VA_ARGS__)
#define SHUFFLE_D SHUFFLE
#define SHUFFLE_H SHUFFLE
#else
#define SHUFFLE(u, v, ...) __builtin_shuffle(u, v, (NAME(U)){__VA_ARGS__})
#define SHUFFLE_D(u, v, ...) __builtin_shuffle(u, v, (NAME(L)){__VA_ARGS__})
#define SHUFFLE_H(u, v, ...) __builtin_shuffle(u, v, (NAME(H)){__VA_ARGS__})
#endif

/* 16-byte vectors: NEON, SSE2, and whatever else the compiler lowers them to. */
#define NAME(x) x##_16
#define LANES 4
#define TARGET
#include "vectors.h"
#include "rows.h"
#include "walk.h"
#undef NAME
#undef LANES
#undef TARGET

#if defined(__x86_64__)
#define NAME(x) x##_32
#define LANES 8
#define TARGET __attribute__((target("avx2,fma")))
#include "vectors.h"
#include "rows.h"
#include "walk.h"
#undef NAME
#undef LANES
#undef TARGET
#endif

typedef void (*Walk)(const Rotation *);

/* The best loops for this machine, and what they are called. */
static Walk best_walk(const char **name) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!BASELINE && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return *name = "avx2", walk_32;
    *name = "sse2";
#elif NEON
    *name = "neon";
#else
    *name = "portable";
#endif
    return walk_16;
}

#endif
