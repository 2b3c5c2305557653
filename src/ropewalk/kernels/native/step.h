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

/* exp of each number, within 2 units in the last place: x = n log 2 + r, and a Taylor polynomial of r with 8 terms,
   because |r| is at most log(2) / 2. */
static inline F_16 exponential(F_16 x) {
    const F_16 zero = {0}, low = zero - 104.0f, high = zero + 89.0f, whole_numbers = zero + 12582912.0f;
    const U_16 is_number = (U_16)(x == x), above_low = (U_16)(x > low), below_high = (U_16)(x < high);
    F_16 bounded = (F_16)choose_16(above_low, (U_16)x, (U_16)low);
    bounded = (F_16)choose_16(below_high, (U_16)bounded, (U_16)high);
    bounded = (F_16)((U_16)bounded & is_number);
    /* The sum with 1.5 * 2^23 has no bits for a fraction. */
    const F_16 n = (bounded * 1.44269504f + whole_numbers) - whole_numbers;
    /* log 2 in two parts. The first has few bits, so that its product with n is exact. */
    const F_16 r = (bounded - n * 0.693359375f) + n * 2.12194440e-4f;
    F_16 y = zero + 1.0f / 5040;
    y = y * r + 1.0f / 720, y = y * r + 1.0f / 120, y = y * r + 1.0f / 24, y = y * r + 1.0f / 6, y = y * r + 0.5f;
    y = (y * r) * r + r + 1.0f;
    /* 2^n in two factors, because the result may be subnormal. */
    const U_16 whole = (U_16)(n + whole_numbers) - (U_16)whole_numbers, half = (U_16)((I_16)whole >> 1);
    y = y * (F_16)((half + 127u) << 23) * (F_16)((whole - half + 127u) << 23);
    const U_16 overflows = (U_16)(x > zero + 88.7228394f);
    y = (F_16)choose_16(overflows, (U_16)(zero + INFINITY), (U_16)y);
    return (F_16)choose_16(is_number, (U_16)y, (U_16)x);
}

/* Several vectors at once, because each operation waits for the one before. */
enum { UNROLLED = 4 };

static inline void exponentials(const F_16 *x, F_16 *y) {
    for (int n = 0; n < UNROLLED; n++) y[n] = exponential(x[n]);
}

/* Map the features of a row, in place. The row has room for a multiple of 4 * UNROLLED numbers. */
static void map_features(float *x, int64_t count, Map map, int shifted) {
    float most = 0;
    switch (map) {
    case ELU:
        for (int64_t i = 0; i < count; i += 4 * UNROLLED) {
            const F_16 zero = {0};
            F_16 u[UNROLLED], e[UNROLLED];
            memcpy(u, x + i, sizeof u);
            exponentials(u, e);
            for (int n = 0; n < UNROLLED; n++)
                u[n] = (F_16)choose_16((U_16)(u[n] > zero), (U_16)(u[n] + 1.0f), (U_16)e[n]);
            memcpy(x + i, u, sizeof u);
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
            most = x[0];
            for (int64_t i = 1; i < count; i++) most = x[i] > most || x[i] != x[i] ? x[i] : most;
        }
        for (int64_t i = 0; i < count; i += 4 * UNROLLED) {
            F_16 u[UNROLLED], e[UNROLLED];
            memcpy(u, x + i, sizeof u);
            for (int n = 0; n < UNROLLED; n++) u[n] -= most;
            exponentials(u, e);
            memcpy(x + i, e, sizeof e);
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

static void write_row(const Rows *rows, int64_t batch, int64_t head, int64_t count, Dtype dtype, const float *from) {
    const int64_t at = batch * rows->batch_step + head * rows->head_step;
    if (dtype == F32) {
        memcpy((AnyFloat *)rows->data + at, from, (size_t)count * sizeof *from);
        return;
    }
    AnyHalf *to = (AnyHalf *)rows->data + at;
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
    memcpy(y, x, (size_t)s->width * sizeof *y);
    const int64_t apart = s->interleaved ? 1 : s->pairs, between = s->interleaved ? 2 : 1;
    for (int64_t i = 0; i < s->pairs; i++) {
        const int64_t first = s->start + i * between, second = first + apart;
        y[first] = x[first] * s->cos[i] - x[second] * s->sin[i];
        y[second] = x[first] * s->sin[i] + x[second] * s->cos[i];
    }
}

/* Vectors of values that are processed at once, in registers. */
enum { AT_ONCE = 8 };

static inline F_16 vector_at(const AnyFloat *from) {
    F_16 v;
    memcpy(&v, from, sizeof v);
    return v;
}

/* Sums after one key, of one head: S = kept S + k v^T, and q S, which is the numerator. */
static void update_sums(const AnyFloat *from, AnyFloat *to, const float *k, const float *q, const float *v, float *above,
                        float kept, int64_t width, int64_t v_dim) {
    int64_t j = 0;
    for (; j + 4 * AT_ONCE <= v_dim; j += 4 * AT_ONCE) {
        F_16 t0 = {0}, t1 = t0, t2 = t0, t3 = t0, t4 = t0, t5 = t0, t6 = t0, t7 = t0;
        const F_16 v0 = vector_at(v + j), v1 = vector_at(v + j + 4), v2 = vector_at(v + j + 8), v3 = vector_at(v + j + 12);
        const F_16 v4 = vector_at(v + j + 16), v5 = vector_at(v + j + 20), v6 = vector_at(v + j + 24), v7 = vector_at(v + j + 28);
        for (int64_t i = 0; i < width; i++) {
            const AnyFloat *old = from + i * v_dim + j;
            AnyFloat *new = to + i * v_dim + j;
            const F_16 a = (F_16){0} + k[i], b = (F_16){0} + q[i];
#define STEP(N)                                                                  \
    {                                                                            \
        const F_16 sum = plus_f_16(vector_at(old + 4 * N) * kept, a, v##N);      \
        memcpy(new + 4 * N, &sum, sizeof sum);                                   \
        t##N = plus_f_16(t##N, b, sum);                                          \
    }
            STEP(0) STEP(1) STEP(2) STEP(3) STEP(4) STEP(5) STEP(6) STEP(7)
#undef STEP
        }
        const F_16 total[AT_ONCE] = {t0, t1, t2, t3, t4, t5, t6, t7};
        memcpy(above + j, total, sizeof total);
    }
    for (; j < v_dim; j++) {
        above[j] = 0;
        for (int64_t i = 0; i < width; i++) {
            const float sum = kept * from[i * v_dim + j] + k[i] * v[j];
            to[i * v_dim + j] = sum;
            above[j] += q[i] * sum;
        }
    }
}

static void read_sums(const AnyFloat *sums, const float *q, float *above, int64_t width, int64_t v_dim) {
    int64_t j = 0;
    for (; j + 4 * AT_ONCE <= v_dim; j += 4 * AT_ONCE) {
        F_16 total[AT_ONCE] = {{0}}, sum;
        for (int64_t i = 0; i < width; i++)
            for (int n = 0; n < AT_ONCE; n++) {
                memcpy(&sum, sums + i * v_dim + j + 4 * n, sizeof sum);
                total[n] = plus_f_16(total[n], (F_16){0} + q[i], sum);
            }
        memcpy(above + j, total, sizeof total);
    }
    for (; j < v_dim; j++) {
        above[j] = 0;
        for (int64_t i = 0; i < width; i++) above[j] += q[i] * sums[i * v_dim + j];
    }
}

static float decay_of(const Step *s, int64_t batch, int64_t head) {
    if (!s->decay.data) return 1.0f;
    const int64_t at = batch * s->decay.batch_step + head * s->decay.head_step;
    if (s->decay_dtype == F64) return (float)exp(((const AnyDouble *)s->decay.data)[at]);
    return (float)exp((double)((const AnyFloat *)s->decay.data)[at]);
}

/* Process a range of the pairs of a sequence and a head of the sums. */
static void step_part(const void *job, int64_t part, int64_t parts) {
    const Step *s = job;
    const int64_t all = s->batch * s->state_heads, stop = all * (part + 1) / parts, group = s->heads / s->state_heads;
    float plain_k[WIDEST] = {0}, plain_q[WIDEST] = {0}, k[WIDEST], q[WIDEST], v[WIDEST], above[WIDEST];
    for (int64_t i = all * part / parts; i < stop; i++) {
        const int64_t batch = i / s->state_heads, head = i % s->state_heads;
        const int64_t key_head = head * s->kv_heads / s->state_heads;
        const float kept = decay_of(s, batch, head);
        read_row(&s->k, batch, key_head, s->width, s->dtype, plain_k);
        map_features(plain_k, s->width, s->k_map, 0);
        rotate_row(s, plain_k, k);
        read_row(&s->v, batch, key_head, s->v_dim, s->dtype, v);
        const AnyFloat *old = (const AnyFloat *)s->above.data + batch * s->above.batch_step + head * s->above.head_step;
        AnyFloat *new = (AnyFloat *)s->new_above.data + batch * s->new_above.batch_step + head * s->new_above.head_step;
        const AnyFloat *z = (const AnyFloat *)s->below.data + batch * s->below.batch_step + head * s->below.head_step;
        AnyFloat *new_z = (AnyFloat *)s->new_below.data + batch * s->new_below.batch_step + head * s->new_below.head_step;
        for (int64_t j = 0; j < s->width; j++) new_z[j] = kept * z[j] + plain_k[j];
        for (int64_t member = 0; member < group; member++) {
            const int64_t query_head = head * group + member;
            read_row(&s->q, batch, query_head, s->width, s->dtype, plain_q);
            map_features(plain_q, s->width, s->q_map, s->normalize);
            rotate_row(s, plain_q, q);
            if (member == 0) update_sums(old, new, k, q, v, above, kept, s->width, s->v_dim);
            else read_sums(new, q, above, s->width, s->v_dim);
            if (s->normalize) {
                float below = 0;
                for (int64_t j = 0; j < s->width; j++) below += plain_q[j] * new_z[j];
                below = fabsf(below) <= s->smallest ? INFINITY : below;
                for (int64_t j = 0; j < s->v_dim; j++) above[j] /= below;
            } else {
                for (int64_t j = 0; j < s->v_dim; j++) above[j] *= s->scale;
            }
            write_row(&s->out, batch, query_head, s->v_dim, s->dtype, above);
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

enum { Q, K, V, ABOVE, BELOW, COS, SIN, DECAY, STEP_TENSORS };

/* linear_step(q, k, v, above, below, cos, sin, decay, row, start, interleaved, q_map, k_map, normalize, scale) -> (out,
   new above, new below), or None if something is unusual. cos, sin and decay may be None. */
static PyObject *linear_step(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    if (!exchange || count != STEP_TENSORS + 7) return fail("linear_step expects 15 arguments, after use_torch");
    PyObject *const *options = args + STEP_TENSORS;
    const int64_t row = PyLong_AsLongLong(options[0]), start = PyLong_AsLongLong(options[1]);
    const int64_t q_map = PyLong_AsLongLong(options[3]), k_map = PyLong_AsLongLong(options[4]);
    Step s = {.start = start, .interleaved = PyObject_IsTrue(options[2]), .q_map = (Map)q_map, .k_map = (Map)k_map,
              .normalize = PyObject_IsTrue(options[5]), .scale = (float)PyFloat_AsDouble(options[6])};
    if (PyErr_Occurred()) return NULL;
    if (q_map < 0 || q_map >= MAPS || k_map < 0 || k_map >= MAPS || row < 0 || start < 0) return fail("a number is invalid");
    int usual = is_eager();
    const int graphs = usual > 0 ? is_true(PyObject_CallNoArgs(is_grad_enabled)) : 0;
    if (usual < 0 || graphs < 0) return NULL;
    Tensor t[STEP_TENSORS];
    for (int i = 0; usual && i < STEP_TENSORS; i++) {
        if (args[i] == Py_None && i >= COS) continue;
        usual = is_ready(args[i], &t[i]);
        if (usual > 0 && graphs) {
            const int needs_gradient = has_true(args[i], name_requires_grad);
            usual = needs_gradient < 0 ? -1 : !needs_gradient;
        }
        if (usual < 0) return NULL;
    }
    if (!usual || t[Q].dims != 4 || t[K].dims != 4 || t[V].dims != 4 || t[ABOVE].dims != 4) Py_RETURN_NONE;
    s.batch = t[Q].shape[0], s.heads = t[Q].shape[1], s.width = t[Q].shape[3];
    s.kv_heads = t[K].shape[1], s.v_dim = t[V].shape[3], s.state_heads = t[ABOVE].shape[1];
    int fits = s.width <= WIDEST && s.v_dim <= WIDEST && has_elements(&t[Q]) && has_elements(&t[K]) && has_elements(&t[V]);
    fits = fits && s.heads % s.kv_heads == 0 && (s.state_heads == s.kv_heads || s.state_heads == s.heads);
    fits = fits && find_dtype(&t[Q], &s.dtype) && s.dtype != F64;
    for (int i = K; i <= V; i++) fits = fits && !memcmp(&t[Q].dtype, &t[i].dtype, sizeof t[i].dtype);
    fits = fits && rows_of(&t[Q], s.batch, s.heads, s.width, &s.q) && rows_of(&t[K], s.batch, s.kv_heads, s.width, &s.k) &&
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
