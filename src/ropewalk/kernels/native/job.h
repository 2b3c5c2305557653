/* A call of the kernel: the rotation of one or two tensors, checked as a whole, then run in threads. */
#ifndef ROPEWALK_JOB_H
#define ROPEWALK_JOB_H

#include "tensors.h"

#include "rotation.h"
#include "threads.h"

/* Elements per thread below which another thread does not pay off. */
enum { GRAIN = 32768 };

static Loops best;
static PyObject *empty_like, *get_num_threads;

static PyObject *fail(const char *message) {
    PyErr_SetString(PyExc_ValueError, message);
    return NULL;
}

static int find_dtype(const Tensor *t, Dtype *out) {
    if (is_type(t, DL_FLOAT, 32)) return *out = F32, 1;
    if (is_type(t, DL_FLOAT, 64)) return *out = F64, 1;
    if (is_type(t, DL_FLOAT, 16)) return *out = F16, 1;
    if (is_type(t, DL_BFLOAT, 16)) return *out = BF16, 1;
    return 0;
}

/* The first row of cos and sin, the first rotated feature, the dimension of the sequence counted from the end, the
   pairing, whether the angles are negated, and whether cos and sin are known to contain no NaN. */
typedef struct {
    int64_t row, start, seq_dim;
    int interleaved, conjugate, finite;
} Layout;

typedef struct {
    Rotation rotations[2];
    int count;
    int64_t elements;
} Job;

/* Describe the rotation of x into y. Returns 1, or 0 with an exception if shapes or dtypes do not match. */
static int describe(Rotation *r, const Tensor *x, const Tensor *y, const Tensor *cos, const Tensor *sin,
                    const Layout *l, int64_t *elements) {
    const int dims = x->dims, seq = dims + (int)l->seq_dim, heads = l->seq_dim == -2 ? dims - 3 : dims - 2;
    const int wide = cos->dims, batch = 0;
    memset(r, 0, sizeof *r);
    int fits = (l->seq_dim == -2 || l->seq_dim == -3) && seq >= 0 && dims <= MOST_OTHERS && y->dims == dims &&
               wide >= 2 && wide <= 4 && sin->dims == wide && find_dtype(x, &r->dtype) &&
               memcmp(&x->dtype, &y->dtype, sizeof x->dtype) == 0 && l->start >= 0 && l->row >= 0;
    const uint8_t bits = fits && r->dtype == F64 ? 64 : 32;
    fits = fits && is_type(cos, DL_FLOAT, bits) && is_type(sin, DL_FLOAT, bits);
    for (int i = 0; fits && i < dims; i++) fits = x->shape[i] == y->shape[i];
    for (int i = 0; fits && i < wide; i++) fits = cos->shape[i] == sin->shape[i];
    if (!fits) return fail("x, y, cos and sin do not fit together"), 0;
    const int64_t pairs = cos->shape[wide - 1], tokens = x->shape[seq];
    fits = l->row <= cos->shape[wide - 2] - tokens && l->start <= x->shape[dims - 1] - 2 * pairs;
    Axis axes[MOST_OTHERS];
    *elements = x->shape[dims - 1];
    for (int i = 0; i < dims - 1; i++) {
        axes[i] = (Axis){x->shape[i], x->strides[i], y->strides[i], 0, 0};
        *elements *= x->shape[i];
    }
    axes[seq].cos = cos->strides[wide - 2], axes[seq].sin = sin->strides[wide - 2];
    if (wide == 3 && cos->shape[0] != 1) {
        fits = fits && seq > 0 && cos->shape[0] == x->shape[0];
        axes[batch].cos += cos->strides[0], axes[batch].sin += sin->strides[0];
    }
    if (wide == 4) {
        fits = fits && heads >= 0 && (dims == 3 || dims == 4);
        if (fits && cos->shape[1] != 1) {
            fits = cos->shape[1] == x->shape[heads];
            axes[heads].cos += cos->strides[1], axes[heads].sin += sin->strides[1];
        }
        if (fits && cos->shape[0] != 1) {
            fits = dims == 4 && cos->shape[0] == x->shape[0];
            axes[batch].cos += cos->strides[0], axes[batch].sin += sin->strides[0];
        }
    }
    if (!fits) return fail("x, cos and sin do not fit together"), 0;
    r->x = x->data, r->y = y->data, r->finite = l->finite;
    const size_t width = bits / 8;
    r->cos = (char *)cos->data + l->row * axes[seq].cos * (int64_t)width;
    r->sin = (char *)sin->data + l->row * axes[seq].sin * (int64_t)width;
    r->tokens = axes[seq];
    r->heads = heads >= 0 ? axes[heads] : (Axis){1, 0, 0, 0, 0};
    for (int i = 0; i < dims - 1; i++)
        if (i != seq && i != heads) r->others[r->other_count++] = axes[i];
    r->features = (Features){.dim = x->shape[dims - 1],
                             .start = l->start,
                             .pairs = pairs,
                             .step = x->strides[dims - 1],
                             .ystep = y->strides[dims - 1],
                             .cos_step = cos->strides[wide - 1],
                             .sin_step = sin->strides[wide - 1],
                             .interleaved = l->interleaved,
                             .conjugate = l->conjugate};
    return 1;
}

static int64_t longest(const Rotation *r, int *which) {
    int64_t most = r->tokens.size;
    *which = -1;
    if (r->heads.size > most) most = r->heads.size, *which = -2;
    for (int i = 0; i < r->other_count; i++)
        if (r->others[i].size > most) most = r->others[i].size, *which = i;
    return most;
}

/* Whether two rotations read the same rows of cos and sin. */
static int share_tables(const Rotation *a, const Rotation *b) {
    int same = a->cos == b->cos && a->sin == b->sin && a->tokens.size == b->tokens.size &&
               a->other_count == b->other_count && !a->norm.weight && !b->norm.weight && !a->heads.cos && !b->heads.cos &&
               !a->heads.sin && !b->heads.sin;
    for (int i = 0; same && i < a->other_count; i++)
        same = a->others[i].size == b->others[i].size && a->others[i].cos == b->others[i].cos &&
               a->others[i].sin == b->others[i].sin;
    return same;
}

/* Rotate one part of each tensor: a range of its longest dimension. */
static void rotate_part(const void *data, int64_t part, int64_t parts) {
    const Job *job = data;
    Rotation checked = {.cos = NULL};
    for (int i = 0; i < job->count; i++) {
        Rotation r = job->rotations[i];
        int which;
        const int64_t size = longest(&r, &which), from = size * part / parts, to = size * (part + 1) / parts;
        if (from == to) continue;
        Axis *axis = which == -1 ? &r.tokens : which == -2 ? &r.heads : &r.others[which];
        const int64_t width = r.dtype == F64 ? 8 : r.dtype == F32 ? 4 : 2, table = r.dtype == F64 ? 8 : 4;
        r.x = (const char *)r.x + from * axis->x * width, r.y = (char *)r.y + from * axis->y * width;
        r.cos = (const char *)r.cos + from * axis->cos * table, r.sin = (const char *)r.sin + from * axis->sin * table;
        axis->size = to - from;
        /* cos and sin of q are usually those of k, and are checked once. */
        if (r.dtype == BF16 && !(r.finite && !r.norm.weight))
            r.features.careful = share_tables(&checked, &r) ? checked.features.careful : needs_care(&r);
        checked = r;
        best(&r);
    }
}

static int read_norm(PyObject *weight, PyObject *eps, PyObject *rounding, Rotation *r) {
    Tensor w;
    if (borrow(weight, &w, "weight")) return 0;
    if (w.dims != 1 || w.shape[0] != r->features.dim || (w.strides[0] != 1 && w.shape[0] > 1) ||
        !is_type(&w, DL_FLOAT, r->dtype == F64 ? 64 : 32))
        return fail("the weight does not fit x"), 0;
    r->norm = (Norm){w.data, PyFloat_AsDouble(eps), (int)PyLong_AsLong(rounding)};
    return !PyErr_Occurred();
}

/* Return a tuple of the result tensors: those in `args`, or new ones like `like` if `args` is NULL. There are one or
   two, depending on whether like[1] is None. */
static PyObject *targets(PyObject *const *args, PyObject *const *like) {
    const int count = like[1] == Py_None ? 1 : 2;
    PyObject *both = PyTuple_New(count);
    for (int i = 0; both && i < count; i++) {
        PyObject *target = args ? Py_NewRef(args[i]) : PyObject_CallOneArg(empty_like, like[i]);
        if (target) {
            PyTuple_SET_ITEM(both, i, target);
        } else {
            Py_CLEAR(both);
        }
    }
    return both;
}

/* Rotate the tensors x of `inputs` into the tensors of `both`, which is returned, or released on error. All checks are
   done before anything is written. `threads` is the number of threads, or -1 to ask torch for it. `norm` is NULL or
   q_weight, k_weight, eps, rounding. */
static PyObject *rotate_both(const Tensor *inputs, PyObject *both, const Tensor *cos, const Tensor *sin,
                             const Layout *layout, int64_t threads, PyObject *const *norm) {
    Job job = {.count = 0};
    for (int i = 0; both && i < (int)PyTuple_GET_SIZE(both); i++) {
        Tensor y;
        Rotation *r = &job.rotations[job.count];
        int64_t elements;
        if (borrow(PyTuple_GET_ITEM(both, i), &y, i ? "yk" : "yq") ||
            !describe(r, &inputs[i], &y, cos, sin, layout, &elements) ||
            (norm && !read_norm(norm[i], norm[2], norm[3], r))) {
            Py_CLEAR(both);
            break;
        }
        job.elements += elements;
        job.count += elements > 0;
    }
    if (!both) return NULL;
    const int64_t worth = job.elements / GRAIN;
    if (worth > 1 && threads < 0) {
        PyObject *count = PyObject_CallNoArgs(get_num_threads);
        threads = count ? PyLong_AsLongLong(count) : -1;
        Py_XDECREF(count);
        if (PyErr_Occurred()) {
            Py_DECREF(both);
            return NULL;
        }
    }
    if (threads <= 1 || worth <= 1) {
        rotate_part(&job, 0, 1);
    } else {
        Py_BEGIN_ALLOW_THREADS;
        in_threads(rotate_part, &job, worth < threads ? worth : threads);
        Py_END_ALLOW_THREADS;
    }
    return both;
}

#endif
