/* One token of linear attention after a state: feature maps, rotation, decay, new sums, and the quotient, in one pass
   over the sums. */
#ifndef ROPEWALK_STEP_H
#define ROPEWALK_STEP_H

#include "job.h"
#include "shortcut.h"

/* Most features, and most values, of a head. They are on the stack. */
enum { WIDEST = 512 };

typedef int32_t I_16 __attribute__((vector_size(16)));

/* As in FeatureMap of kernels/types.py. */
typedef enum { ELU, RELU, SQUARED_RELU, IDENTITY, EXP, MAPS } Map;

/* A tensor [batch, heads, 1, numbers] with neighbouring numbers, or sums [batch, heads, ...]. */
typedef struct {
    char *data;
    int64_t batch_step, head_step;
} Rows;

typedef struct {
    Rows q, k, v, above, below, out, new_above, new_below, decay;
    const AnyFloat *cos, *sin;
    int64_t batch, heads, kv_heads, state_heads, width, v_dim, pairs, start;
    Dtype dtype, decay_dtype;
    Map q_map, k_map;
    int interleaved, normalize;
    float scale, smallest;
} Step;

static inline F_16 all_16(float x) { return (F_16){x, x, x, x}; }

/* The larger number, or NaN if x is NaN. */
static inline F_16 larger(F_16 x, F_16 low) {
#if NEON
    return vmaxq_f32(x, low);
#else
    return (F_16)choose_16((U_16)(x < low), (U_16)low, (U_16)x);
#endif
}

/* The smaller number, or NaN if x is NaN. */
static inline F_16 smaller(F_16 x, F_16 high) {
#if NEON
    return vminq_f32(x, high);
#else
    return (F_16)choose_16((U_16)(x > high), (U_16)high, (U_16)x);
#endif
}

/* exp of each number from -104 to 89, within 2 units in the last place: x = n log 2 + r, and a Taylor polynomial of r
   with 8 terms, because |r| is at most log(2) / 2. The result for NaN is not specified. */
static inline F_16 exponential(F_16 x) {
    /* The sum with 1.5 * 2^23 has no bits for a fraction. Its lowest bits are n + 127, the exponent of 2^n. */
    const F_16 whole_numbers = all_16(12582912.0f + 127.0f), sum = plus_f_16(whole_numbers, x, all_16(1.44269504f));
    const F_16 n = sum - whole_numbers;
    /* log 2 in two parts. The first has few bits, so that its product with n is exact. */
    const F_16 r = plus_f_16(minus_f_16(x, n, all_16(0.693359375f)), n, all_16(2.12194440e-4f));
    F_16 y = plus_f_16(all_16(1.0f / 720), r, all_16(1.0f / 5040));
    y = plus_f_16(all_16(1.0f / 120), y, r), y = plus_f_16(all_16(1.0f / 24), y, r);
    y = plus_f_16(all_16(1.0f / 6), y, r), y = plus_f_16(all_16(0.5f), y, r);
    y = plus_f_16(all_16(1.0f), y, r), y = plus_f_16(all_16(1.0f), y, r);
    /* 2^n in two factors, because the result may be subnormal. The first changes only the exponent of y. */
    const U_16 half = (U_16)((I_16)((U_16)sum - (U_16)whole_numbers) >> 1);
    return (F_16)((U_16)y + (half << 23)) * (F_16)(((U_16)sum - half) << 23);
}

/* elu(x) + 1 = exp(x) up to 0, and x + 1 above 0 and for NaN. */
static inline F_16 elu(F_16 x) {
    const F_16 zero = {0}, low = smaller(larger(x, all_16(-104.0f)), zero);
    return (F_16)choose_16((U_16)(x <= zero), (U_16)exponential(low), (U_16)(x + 1.0f));
}

/* exp of any number. */
static inline F_16 any_exponential(F_16 x) {
    const F_16 y = exponential(smaller(larger(x, all_16(-104.0f)), all_16(89.0f)));
    return (F_16)choose_16((U_16)(x == x), (U_16)y, (U_16)x);
}

static inline F_16 vector_at(const AnyFloat *from) {
    F_16 v;
    memcpy(&v, from, sizeof v);
    return v;
}

static inline void store_four(float *to, F_16 a, F_16 b, F_16 c, F_16 d) {
    memcpy(to, &a, sizeof a), memcpy(to + 4, &b, sizeof b);
    memcpy(to + 8, &c, sizeof c), memcpy(to + 12, &d, sizeof d);
}

/* Map the features of a row, in place. The row has room for a multiple of 16 numbers. */
static void map_features(float *x, int64_t count, Map map, int shifted) {
    F_16 most = {0};
    switch (map) {
    /* Four vectors at once, because each operation waits for the one before. */
    case ELU:
        for (int64_t i = 0; i < count; i += 16) {
            const F_16 a = elu(vector_at(x + i)), b = elu(vector_at(x + i + 4));
            const F_16 c = elu(vector_at(x + i + 8)), d = elu(vector_at(x + i + 12));
            store_four(x + i, a, b, c, d);
        }
        break;
    case RELU:
        for (int64_t i = 0; i < count; i++) x[i] = x[i] < 0 ? 0.0f : x[i];
        break;
    case SQUARED_RELU:
        for (int64_t i = 0; i < count; i++) x[i] = x[i] < 0 ? 0.0f : x[i] * x[i];
        break;
    case EXP:
        if (shifted) {
            float largest = x[0];
            for (int64_t i = 1; i < count; i++) largest = x[i] > largest || x[i] != x[i] ? x[i] : largest;
            most = all_16(largest);
        }
        for (int64_t i = 0; i < count; i += 16) {
            const F_16 a = vector_at(x + i) - most, b = vector_at(x + i + 4) - most;
            const F_16 c = vector_at(x + i + 8) - most, d = vector_at(x + i + 12) - most;
            store_four(x + i, any_exponential(a), any_exponential(b), any_exponential(c), any_exponential(d));
        }
        break;
    default:
        break;
    }
}

/* The numbers of a row as float32. */
static void read_row(const Rows *rows, int64_t batch, int64_t head, int64_t count, Dtype dtype, float *to) {
    const int64_t at = batch * rows->batch_step + head * rows->head_step;
    if (dtype == F32) {
        memcpy(to, (const AnyFloat *)rows->data + at, (size_t)count * sizeof *to);
        return;
    }
    const AnyHalf *from = (const AnyHalf *)rows->data + at;
    for (int64_t i = 0; i < count; i += 8) {
        AnyHalf last[8] = {0};
        F_16 both[2];
        const int64_t left = count - i < 8 ? count - i : 8;
        memcpy(last, from + i, (size_t)left * sizeof *last);
        if (dtype == BF16) load_bf16_16(last, both);
        else load_f16_16(last, both);
        memcpy(to + i, both, (size_t)left * sizeof *to);
    }
}

/* Round float32 to a row of BF16 or F16. */
static void write_row(const Rows *rows, int64_t batch, int64_t head, int64_t count, Dtype dtype, const float *from) {
    AnyHalf *to = (AnyHalf *)rows->data + batch * rows->batch_step + head * rows->head_step;
    for (int64_t i = 0; i < count; i += 8) {
        AnyHalf last[8];
        F_16 both[2] = {{0}};
        const int64_t left = count - i < 8 ? count - i : 8;
        memcpy(both, from + i, (size_t)left * sizeof *from);
        if (dtype == BF16) careful_store_bf16_16(last, both);
        else store_f16_16(last, both);
        memcpy(to + i, last, (size_t)left * sizeof *last);
    }
}

/* Rotate the features of a row. */
static void rotate_row(const Step *s, const float *x, float *y) {
    const int64_t pairs = s->pairs, start = s->start, stop = start + 2 * pairs;
    if (start > 0) memcpy(y, x, (size_t)start * sizeof *y);
    if (stop < s->width) memcpy(y + stop, x + stop, (size_t)(s->width - stop) * sizeof *y);
    x += start, y += start;
    int64_t i = 0;
    for (; i + 8 <= pairs; i += 8) {
        F_16 a[2], b[2], c[2], d[2];
        load_f32_16(s->cos + i, c), load_f32_16(s->sin + i, d);
        if (s->interleaved) {
            load2_f32_16(x + 2 * i, a, b);
            f32_rotate_16(a, b, c, d);
            store2_f32_16(y + 2 * i, a, b);
        } else {
            load_f32_16(x + i, a), load_f32_16(x + pairs + i, b);
            f32_rotate_16(a, b, c, d);
            store_f32_16(y + i, a), store_f32_16(y + pairs + i, b);
        }
    }
    const int64_t apart = s->interleaved ? 1 : pairs, between = s->interleaved ? 2 : 1;
    for (; i < pairs; i++) {
        const int64_t first = i * between, second = first + apart;
        y[first] = x[first] * s->cos[i] - x[second] * s->sin[i];
        y[second] = x[first] * s->sin[i] + x[second] * s->cos[i];
    }
}

/* What happens to the sums: they are only read, a key is added, or a key is added after they decayed. */
typedef enum { READ, ADD, DECAY_AND_ADD } Change;

/* One head and its query. `v_dim` is the distance of rows of the sums. */
typedef struct {
    const AnyFloat *old;
    AnyFloat *new;
    const float *k, *q;
    const AnyFloat *v;
    AnyFloat *above;
    float kept;
    int64_t width, v_dim;
} Head;

#define ONE(DO) DO(0)
#define EIGHT(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7)
#define SIXTEEN(DO) EIGHT(DO) DO(8) DO(9) DO(10) DO(11) DO(12) DO(13) DO(14) DO(15)
#define DECLARE(N) F_16 t##N = {0};
#define WRITE(N) memcpy(above + 4 * N, &t##N, sizeof t##N);
#define ROW(N)                                                                                                         \
    {                                                                                                                  \
        F_16 sum = vector_at(old + 4 * N);                                                                             \
        if (change == DECAY_AND_ADD) sum *= kept;                                                                      \
        if (change != READ) {                                                                                          \
            sum = plus_f_16(sum, k, vector_at(v + 4 * N));                                                             \
            memcpy(new + 4 * N, &sum, sizeof sum);                                                                     \
        }                                                                                                              \
        t##N = plus_f_16(t##N, q, sum);                                                                                \
    }
/* Values from number j, as many vectors as VECTORS repeats, whose totals are kept in registers: S = kept S + k v^T, and
   q S, which is the numerator. */
#define DEFINE_VALUES(NAME, VECTORS)                                                                                   \
    static inline __attribute__((always_inline)) void NAME(const Head *h, int64_t j, Change change) {                  \
        const AnyFloat *old = h->old + j, *v = h->v + j;                                                               \
        AnyFloat *new = h->new + j;                                                                                    \
        AnyFloat *above = h->above + j;                                                                                \
        const int64_t width = h->width, v_dim = h->v_dim;                                                              \
        const float kept = h->kept, *keys = h->k, *queries = h->q;                                                     \
        VECTORS(DECLARE)                                                                                               \
        for (int64_t i = 0; i < width; i++, old += v_dim, new += v_dim) {                                              \
            const F_16 k = all_16(keys[i]), q = all_16(queries[i]);                                                    \
            VECTORS(ROW)                                                                                               \
        }                                                                                                              \
        VECTORS(WRITE)                                                                                                 \
    }
DEFINE_VALUES(one_vector, ONE)
DEFINE_VALUES(eight_vectors, EIGHT)
DEFINE_VALUES(sixteen_vectors, SIXTEEN)
#undef ONE
#undef EIGHT
#undef SIXTEEN
#undef DECLARE
#undef WRITE
#undef ROW
#undef DEFINE_VALUES

static inline __attribute__((always_inline)) void all_values(const Head *h, Change change) {
    int64_t j = 0;
    /* Other machines have 16 registers. */
    for (; NEON && j + 64 <= h->v_dim; j += 64) sixteen_vectors(h, j, change);
    for (; j + 32 <= h->v_dim; j += 32) eight_vectors(h, j, change);
    for (; j + 4 <= h->v_dim; j += 4) one_vector(h, j, change);
    for (; j < h->v_dim; j++) {
        float total = 0;
        for (int64_t i = 0; i < h->width; i++) {
            const int64_t at = i * h->v_dim + j;
            float sum = h->old[at];
            if (change != READ) h->new[at] = sum = h->kept * sum + h->k[i] * h->v[j];
            total += h->q[i] * sum;
        }
        h->above[j] = total;
    }
}

static void read_sums(const Head *h) { all_values(h, READ); }
static void add_key(const Head *h) { all_values(h, ADD); }
static void decay_and_add_key(const Head *h) { all_values(h, DECAY_AND_ADD); }

/* The denominator: q z. */
static float product(const float *q, const AnyFloat *z, int64_t width) {
    F_16 a = {0}, b = {0};
    int64_t j = 0;
    for (; j + 8 <= width; j += 8) {
        a = plus_f_16(a, vector_at(q + j), vector_at(z + j));
        b = plus_f_16(b, vector_at(q + j + 4), vector_at(z + j + 4));
    }
    a += b;
    float total = (a[0] + a[1]) + (a[2] + a[3]);
    for (; j < width; j++) total += q[j] * z[j];
    return total;
}

static float decay_of(const Step *s, int64_t batch, int64_t head) {
    if (!s->decay.data) return 1.0f;
    const int64_t at = batch * s->decay.batch_step + head * s->decay.head_step;
    if (s->decay_dtype == F64) return (float)exp(((const AnyDouble *)s->decay.data)[at]);
    return (float)exp((double)((const AnyFloat *)s->decay.data)[at]);
}

static AnyFloat *floats_at(const Rows *rows, int64_t batch, int64_t head) {
    return (AnyFloat *)rows->data + batch * rows->batch_step + head * rows->head_step;
}

/* Process a range of the pairs of a sequence and a head of the sums. */
static void step_part(const void *job, int64_t part, int64_t parts) {
    const Step *s = job;
    const int64_t all = s->batch * s->state_heads, stop = all * (part + 1) / parts, group = s->heads / s->state_heads;
    /* The compiler would read the fields again after each store. */
    const int64_t width = s->width, v_dim = s->v_dim;
    float plain_k[WIDEST] = {0}, plain_q[WIDEST] = {0}, k[WIDEST], q[WIDEST], wide_v[WIDEST], wide_out[WIDEST];
    for (int64_t i = all * part / parts; i < stop; i++) {
        const int64_t batch = i / s->state_heads, head = i % s->state_heads;
        const int64_t key_head = head * s->kv_heads / s->state_heads;
        const float kept = decay_of(s, batch, head);
        read_row(&s->k, batch, key_head, width, s->dtype, plain_k);
        map_features(plain_k, width, s->k_map, 0);
        rotate_row(s, plain_k, k);
        const AnyFloat *v = s->dtype == F32 ? floats_at(&s->v, batch, key_head) : wide_v;
        if (v == wide_v) read_row(&s->v, batch, key_head, v_dim, s->dtype, wide_v);
        const AnyFloat *z = floats_at(&s->below, batch, head);
        AnyFloat *new_z = floats_at(&s->new_below, batch, head), *sums = floats_at(&s->new_above, batch, head);
        for (int64_t j = 0; j < width; j++) new_z[j] = kept * z[j] + plain_k[j];
        Head h = {floats_at(&s->above, batch, head), sums, k, q, v, wide_out, kept, width, v_dim};
        for (int64_t member = 0; member < group; member++, h.old = sums) {
            const int64_t query_head = head * group + member;
            read_row(&s->q, batch, query_head, width, s->dtype, plain_q);
            map_features(plain_q, width, s->q_map, s->normalize);
            rotate_row(s, plain_q, q);
            AnyFloat *out = s->dtype == F32 ? floats_at(&s->out, batch, query_head) : wide_out;
            h.above = out;
            if (member > 0) read_sums(&h);
            else if (kept == 1.0f) add_key(&h);
            else decay_and_add_key(&h);
            if (s->normalize) {
                const float below = product(plain_q, new_z, width);
                const float divisor = fabsf(below) <= s->smallest ? INFINITY : below;
                for (int64_t j = 0; j < v_dim; j++) out[j] /= divisor;
            } else {
                const float scale = s->scale;
                for (int64_t j = 0; j < v_dim; j++) out[j] *= scale;
            }
            if (out == wide_out) write_row(&s->out, batch, query_head, v_dim, s->dtype, wide_out);
        }
    }
}

/* The rows of [batch, heads, 1, numbers]. Returns 0 if it has another shape, or if its numbers are not neighbours. */
static int rows_of(const Tensor *t, int64_t batch, int64_t heads, int64_t numbers, Rows *rows) {
    *rows = (Rows){t->data, t->strides[0], t->strides[1]};
    return t->dims == 4 && t->shape[0] == batch && t->shape[1] == heads && t->shape[2] == 1 && t->shape[3] == numbers &&
           (t->strides[3] == 1 || numbers == 1);
}

/* The rows of contiguous sums [batch, heads, width(, v_dim)]. */
static int sums_of(const Tensor *t, int64_t batch, int64_t heads, int64_t width, int64_t v_dim, Rows *rows) {
    const int64_t numbers = v_dim ? width * v_dim : width;
    *rows = (Rows){t->data, heads * numbers, numbers};
    int fits = t->dims == (v_dim ? 4 : 3) && is_type(t, DL_FLOAT, 32) && t->shape[0] == batch && t->shape[1] == heads &&
               t->shape[2] == width && (!v_dim || t->shape[3] == v_dim);
    int64_t expected = 1;
    for (int d = t->dims - 1; fits && d >= 0; d--) {
        fits = t->shape[d] == 1 || t->strides[d] == expected;
        expected *= t->shape[d];
    }
    return fits;
}

/* A new tensor [batch, heads, 1, v_dim] for the results. */
static PyObject *new_results(const Step *s, PyObject *q, PyObject *v) {
    if (s->v_dim == s->width) return PyObject_CallOneArg(empty_like, q);
    return PyObject_CallMethod(v, "new_empty", "((LLLL))", (long long)s->batch, (long long)s->heads, 1LL,
                               (long long)s->v_dim);
}

/* Read the decay [heads] or [batch, heads, 1]. Returns 0 if it has another shape or dtype, or a number above 0. */
static int read_decay(Step *s, const Tensor *d) {
    const int per_head = d->dims == 1 && d->shape[0] == s->state_heads;
    const int per_token = d->dims == 3 && d->shape[0] == s->batch && d->shape[1] == s->state_heads && d->shape[2] == 1;
    if ((!per_head && !per_token) || !find_dtype(d, &s->decay_dtype)) return 0;
    if (s->decay_dtype != F32 && s->decay_dtype != F64) return 0;
    s->decay = (Rows){d->data, per_token ? d->strides[0] : 0, per_token ? d->strides[1] : d->strides[0]};
    for (int64_t i = 0; i < s->batch * s->state_heads; i++) {
        const int64_t at = i / s->state_heads * s->decay.batch_step + i % s->state_heads * s->decay.head_step;
        const double g = s->decay_dtype == F64 ? ((const AnyDouble *)d->data)[at] : ((const AnyFloat *)d->data)[at];
        if (!(g <= 0)) return 0;
    }
    /* As in linear/torch.py: what is smaller would overflow in the derivative of the quotient. */
    s->smallest = 1.17549435e-38f / 1.1920929e-07f;
    return 1;
}

/* Read cos and sin [rows, pairs]. */
static int read_tables(Step *s, const Tensor *cos, const Tensor *sin, int64_t row) {
    const Tensor *both[] = {cos, sin};
    for (int i = 0; i < 2; i++) {
        const Tensor *t = both[i];
        if (t->dims != 2 || !is_type(t, DL_FLOAT, 32) || row >= t->shape[0] || t->shape[1] != cos->shape[1] ||
            (t->strides[1] != 1 && t->shape[1] > 1) || s->start + 2 * t->shape[1] > s->width)
            return 0;
    }
    s->pairs = cos->shape[1];
    s->cos = (const AnyFloat *)cos->data + row * cos->strides[0];
    s->sin = (const AnyFloat *)sin->data + row * sin->strides[0];
    return 1;
}

/* The arguments of linear_step. Those before ROW, and DECAY, are tensors. */
enum { Q, K, V, ABOVE, BELOW, COS, SIN, ROW, DECAY, LAYOUT, FEATURE_MAPS, NORMALIZE, SCALE, STEP_ARGUMENTS };

/* Read the arguments that are no tensors, and the row of cos and sin. Returns 0, or -1 with an exception. */
static int read_options(PyObject *const *args, Step *s, int64_t *row) {
    PyObject *layout = args[LAYOUT], *maps = args[FEATURE_MAPS];
    if (!PyTuple_Check(layout) || PyTuple_GET_SIZE(layout) != 3 || !PyTuple_Check(maps) || PyTuple_GET_SIZE(maps) != 2)
        return fail("linear_step expects a Layout and two feature maps"), -1;
    const int64_t q_map = PyLong_AsLongLong(PyTuple_GET_ITEM(maps, 0));
    const int64_t k_map = PyLong_AsLongLong(PyTuple_GET_ITEM(maps, 1));
    *row = PyLong_AsLongLong(args[ROW]);
    *s = (Step){.start = PyLong_AsLongLong(PyTuple_GET_ITEM(layout, 1)),
                .interleaved = PyObject_IsTrue(PyTuple_GET_ITEM(layout, 0)),
                .q_map = (Map)q_map,
                .k_map = (Map)k_map,
                .normalize = PyObject_IsTrue(args[NORMALIZE]),
                .scale = (float)PyFloat_AsDouble(args[SCALE])};
    if (PyErr_Occurred()) return -1;
    if (q_map < 0 || q_map >= MAPS || k_map < 0 || k_map >= MAPS || *row < 0 || s->start < 0)
        return fail("a number is invalid"), -1;
    return 0;
}

/* Whether a tensor can be read, and needs no gradient. Returns 1 or 0, or -1 with an exception. */
static int is_constant(PyObject *object, Tensor *out, int graphs) {
    const int ready = is_ready(object, out);
    if (ready <= 0 || !graphs) return ready;
    const int needs_gradient = has_true(object, name_requires_grad);
    return needs_gradient < 0 ? -1 : !needs_gradient;
}

/* linear_step(q, k, v, above, below, cos, sin, row, decay, layout, maps, normalize, scale) -> (out, new above, new
   below), or None if something is unusual: see ropewalk.kernels.linear.native. */
static PyObject *linear_step(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    if (!exchange || count != STEP_ARGUMENTS) return fail("linear_step expects 13 arguments, after use_torch");
    Step s;
    int64_t row;
    if (read_options(args, &s, &row)) return NULL;
    int usual = is_eager();
    const int graphs = usual > 0 ? is_true(PyObject_CallNoArgs(is_grad_enabled)) : 0;
    if (usual < 0 || graphs < 0) return NULL;
    Tensor t[DECAY + 1];
    for (int i = Q; usual > 0 && i <= BELOW; i++) usual = is_constant(args[i], &t[i], graphs);
    if (usual > 0 && args[DECAY] != Py_None) usual = is_constant(args[DECAY], &t[DECAY], graphs);
    if (usual < 0) return NULL;
    if (usual && args[COS] != Py_None && args[SIN] != Py_None &&
        (borrow(args[COS], &t[COS], "cos") || borrow(args[SIN], &t[SIN], "sin"))) {
        PyErr_Clear();
        usual = 0;
    }
    if (!usual || t[Q].dims != 4 || t[K].dims != 4 || t[V].dims != 4 || t[ABOVE].dims != 4) Py_RETURN_NONE;
    s.batch = t[Q].shape[0], s.heads = t[Q].shape[1], s.width = t[Q].shape[3];
    s.kv_heads = t[K].shape[1], s.v_dim = t[V].shape[3], s.state_heads = t[ABOVE].shape[1];
    int fits = s.width <= WIDEST && s.v_dim <= WIDEST;
    for (int i = Q; i <= V; i++) fits = fits && has_elements(&t[i]);
    fits = fits && s.heads % s.kv_heads == 0 && (s.state_heads == s.kv_heads || s.state_heads == s.heads);
    fits = fits && find_dtype(&t[Q], &s.dtype) && s.dtype != F64;
    for (int i = K; i <= V; i++) fits = fits && !memcmp(&t[Q].dtype, &t[i].dtype, sizeof t[i].dtype);
    fits = fits && rows_of(&t[Q], s.batch, s.heads, s.width, &s.q) &&
           rows_of(&t[K], s.batch, s.kv_heads, s.width, &s.k) &&
           rows_of(&t[V], s.batch, s.kv_heads, s.v_dim, &s.v) &&
           sums_of(&t[ABOVE], s.batch, s.state_heads, s.width, s.v_dim, &s.above) &&
           sums_of(&t[BELOW], s.batch, s.state_heads, s.width, 0, &s.below);
    fits = fits && (args[DECAY] != Py_None || s.state_heads == s.kv_heads);
    fits = fits && (args[COS] == Py_None) == (args[SIN] == Py_None);
    fits = fits && (args[COS] == Py_None || read_tables(&s, &t[COS], &t[SIN], row));
    fits = fits && (args[DECAY] == Py_None || read_decay(&s, &t[DECAY]));
    if (!fits) Py_RETURN_NONE;
    PyObject *out = new_results(&s, args[Q], args[V]), *sums = out ? targets(NULL, args + ABOVE) : NULL, *result = NULL;
    Tensor new_out, above, below;
    if (!sums || borrow(out, &new_out, "out") || borrow(PyTuple_GET_ITEM(sums, 0), &above, "above") ||
        borrow(PyTuple_GET_ITEM(sums, 1), &below, "below"))
        goto end;
    if (!rows_of(&new_out, s.batch, s.heads, s.v_dim, &s.out) ||
        !sums_of(&above, s.batch, s.state_heads, s.width, s.v_dim, &s.new_above) ||
        !sums_of(&below, s.batch, s.state_heads, s.width, 0, &s.new_below)) {
        result = Py_NewRef(Py_None);
        goto end;
    }
    const int64_t worth = s.batch * s.state_heads * s.width * s.v_dim / GRAIN;
    int64_t threads = 1;
    if (worth > 1) {
        PyObject *number = PyObject_CallNoArgs(get_num_threads);
        threads = number ? PyLong_AsLongLong(number) : -1;
        Py_XDECREF(number);
        if (PyErr_Occurred()) goto end;
    }
    if (threads <= 1) {
        step_part(&s, 0, 1);
    } else {
        Py_BEGIN_ALLOW_THREADS;
        in_threads(step_part, &s, worth < threads ? worth : threads);
        Py_END_ALLOW_THREADS;
    }
    result = PyTuple_Pack(3, out, PyTuple_GET_ITEM(sums, 0), PyTuple_GET_ITEM(sums, 1));
end:
    Py_XDECREF(out), Py_XDECREF(sums);
    return result;
}

#endif
