/* Description of a rotation, and its loops for every instruction set. */
#ifndef ROPEWALK_ROTATION_H
#define ROPEWALK_ROTATION_H

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Tests build with 1, to run the code of machines without NEON and AVX2. */
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

/* Functions compiled for an instruction set are only inlined into functions compiled for the same one. */
#define INLINE TARGET static inline __attribute__((always_inline))
/* Rarely executed functions, which are kept out of the loops. */
#define APART TARGET static __attribute__((noinline))

typedef enum { F32, F64, BF16, F16 } Dtype;

/* The features of a row: their number, the first rotated one, and the number of rotated pairs; the strides of features
   in x, y, cos and sin; which features form a pair, and whether the angles are negated; whether every store must handle
   NaN. */
typedef struct {
    int64_t dim, start, pairs, step, ystep, cos_step, sin_step;
    int interleaved, conjugate, careful;
} Features;

/* RMSNorm before the rotation. `weight` has one number per feature, in the working type, or is NULL for no norm. */
typedef struct {
    const void *weight;
    double eps;
    int rounding;
} Norm;

enum { ROUND_SCALED = 1, ROUND_WEIGHTED = 2 };

/* A dimension of the tensor: its size, and its strides in x, y, cos and sin, in elements. */
typedef struct {
    int64_t size, x, y, cos, sin;
} Axis;

enum { MOST_OTHERS = 16 };

/* One tensor. `others` are all dimensions except tokens, heads and features. No dimension is empty. */
typedef struct {
    const void *x;
    void *y;
    const void *cos, *sin;
    Axis tokens, heads, others[MOST_OTHERS];
    int other_count;
    /* Whether cos and sin are known to contain no NaN. */
    int finite;
    Features features;
    Norm norm;
    Dtype dtype;
} Rotation;

/* Number of tokens whose cos and sin stay in the cache while all heads are processed, if the stride of heads is larger
   than that of tokens. Fewer tokens would fit in a faster cache, but split the long reads that memory needs. */
enum { BLOCK = 256 };

/* Number of groups of pairs, of two vectors each, that are processed at once: as many as fit in 32 registers, or 16. */
enum { GROUPS = NEON ? 2 : 1 };

/* Whether a number may be NaN: if one is, so is their sum. A sum with infinite numbers may also be NaN: harmless. */
static int any_nan(const AnyFloat *numbers, int64_t count) {
    float sums[16] = {0}, total = 0;
    int64_t i = 0;
    for (; i + 16 <= count; i += 16)
        for (int j = 0; j < 16; j++) sums[j] += numbers[i + j];
    for (; i < count; i++) total += numbers[i];
    for (int j = 0; j < 16; j++) total += sums[j];
    return total != total;
}

/* Whether a factor of a bfloat16 number may be NaN. */
static int needs_care(const Rotation *r) {
    if (r->features.cos_step != 1 || r->features.sin_step != 1) return 1;
    if (r->norm.weight && any_nan((const AnyFloat *)r->norm.weight, r->features.dim)) return 1;
    int64_t at[MOST_OTHERS + 2] = {0};
    Axis axes[MOST_OTHERS + 2] = {r->tokens, r->heads};
    memcpy(axes + 2, r->others, sizeof r->others);
    const int count = r->other_count + 2;
    int64_t length = r->features.pairs;
    /* Dimensions that share cos and sin are checked once. Contiguous rows are checked as one. */
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
#include "loops.h"
#undef NAME
#undef LANES
#undef TARGET

#if defined(__x86_64__)
#define NAME(x) x##_32
#define LANES 8
#define TARGET __attribute__((target("avx2,fma")))
#include "vectors.h"
#include "rows.h"
#include "loops.h"
#undef NAME
#undef LANES
#undef TARGET
#endif

typedef void (*Loops)(const Rotation *);

/* The fastest loops for this machine, and their name. */
static Loops best_loops(const char **name) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!BASELINE && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return *name = "avx2", loops_32;
    *name = "sse2";
#elif NEON
    *name = "neon";
#else
    *name = "portable";
#endif
    return loops_16;
}

#endif
