/* ropewalk.kernels._native: the rotation and its angles, as a CPython extension without torch's headers. */
#include "tensors.h"

#include "angles.h"
#include "rotation.h"
#include "threads.h"

#ifndef SOURCE_HASH
#define SOURCE_HASH ""
#endif

/* Elements per thread below which another thread does not pay off. */
enum { GRAIN = 32768 };

static Loops best;
static PyObject *checks, *empty_like;

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

/* use_torch(Tensor, Parameter, exchange API, address of GOMP_parallel or 0, checks, empty_like): each check is a
   function of a tensor that returns True if its data pointer must not be read directly. */
static PyObject *use(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    if (count != 6 || !PyTuple_Check(args[4])) return fail("use_torch expects 6 arguments");
    if (use_torch(args[0], args[1], args[2])) return NULL;
    void *address = PyLong_AsVoidPtr(args[3]);
    if (PyErr_Occurred()) return NULL;
    team = (Team)address;
    Py_INCREF(args[4]), Py_INCREF(args[5]);
    checks = args[4], empty_like = args[5];
    Py_RETURN_NONE;
}

/* Whether this is a plain CPU tensor of a supported dtype. Returns 1 or 0, or -1 with an exception. */
static int is_ready(PyObject *object, Tensor *out) {
    if (!exchange || (Py_TYPE(object) != tensor_type && Py_TYPE(object) != parameter_type)) return 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(checks); i++) {
        PyObject *result = PyObject_CallOneArg(PyTuple_GET_ITEM(checks, i), object);
        if (!result) return -1;
        const int is_masked = PyObject_IsTrue(result);
        Py_DECREF(result);
        if (is_masked) return is_masked < 0 ? -1 : 0;
    }
    Dtype dtype;
    if (exchange->borrow(object, out)) {
        /* A device or memory layout that DLPack does not support. */
        PyErr_Clear();
        return 0;
    }
    return out->device_type == DL_CPU && out->strides && has_memory(out) && find_dtype(out, &dtype);
}

/* The first row of cos and sin, the first rotated feature, the dimension of the sequence counted from the end, the
   pairing, and whether the angles are negated. */
typedef struct {
    int64_t row, start, seq_dim;
    int interleaved, conjugate;
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
    r->x = x->data, r->y = y->data;
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

/* Rotate one part of each tensor: a range of its longest dimension. */
static void rotate_part(const void *data, int64_t part, int64_t parts) {
    const Job *job = data;
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
        r.features.careful = r.dtype == BF16 && needs_care(&r);
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

/* Rotate q and k, in `inputs`, into the tensors of `both`, which is returned, or released on error. All checks are done
   before anything is written. `norm` is NULL or q_weight, k_weight, eps, rounding. */
static PyObject *rotate_both(PyObject *const *inputs, PyObject *both, PyObject *const *tables, const Layout *layout,
                      int64_t threads, PyObject *const *norm) {
    Job job = {.count = 0};
    Tensor cos, sin;
    if (both && (borrow(tables[0], &cos, "cos") || borrow(tables[1], &sin, "sin"))) Py_CLEAR(both);
    for (int i = 0; both && i < (int)PyTuple_GET_SIZE(both); i++) {
        Tensor x, y;
        Rotation *r = &job.rotations[job.count];
        int64_t elements;
        if (borrow(inputs[i], &x, i ? "k" : "q") || borrow(PyTuple_GET_ITEM(both, i), &y, i ? "yk" : "yq") ||
            !describe(r, &x, &y, &cos, &sin, layout, &elements) ||
            (norm && !read_norm(norm[i], norm[2], norm[3], r))) {
            Py_CLEAR(both);
            break;
        }
        job.elements += elements;
        job.count += elements > 0;
    }
    if (!both) return NULL;
    const int64_t worth = job.elements / GRAIN;
    if (threads <= 1 || worth <= 1) {
        rotate_part(&job, 0, 1);
    } else {
        Py_BEGIN_ALLOW_THREADS;
        in_threads(rotate_part, &job, worth < threads ? worth : threads);
        Py_END_ALLOW_THREADS;
    }
    return both;
}

/* rotate(q, k, yq, yk, cos, sin, row, start, seq_dim, interleaved, conjugate, threads[, q_weight, k_weight, eps,
   rounding]) -> (yq, yk) or (yq,). k and yk may be None. If yq is None, new tensors are created. */
static PyObject *rotate(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    if (!exchange || (count != 12 && count != 16)) return fail("rotate expects 12 or 16 arguments, after use_torch");
    const Layout layout = {PyLong_AsLongLong(args[6]), PyLong_AsLongLong(args[7]), PyLong_AsLongLong(args[8]),
                           PyObject_IsTrue(args[9]), PyObject_IsTrue(args[10])};
    const int64_t threads = PyLong_AsLongLong(args[11]);
    if (PyErr_Occurred()) return NULL;
    PyObject *both = targets(args[2] == Py_None ? NULL : args + 2, args);
    return rotate_both(args, both, args + 4, &layout, threads, count == 16 ? args + 12 : NULL);
}

/* direct(q, k, cos, sin, row, rows, head_dim, start, seq_dim, interleaved, threads) -> (yq, yk) or (yq,): `rotate` if q
   and k are plain CPU tensors of one dtype, with head_dim features and the same number of tokens, at most `rows`.
   Otherwise it returns None and does nothing. With threads = 0 it returns True instead of rotating. */
static PyObject *direct(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    if (!exchange || count != 11) return fail("direct expects 11 arguments, after use_torch");
    const Layout layout = {PyLong_AsLongLong(args[4]), PyLong_AsLongLong(args[7]), PyLong_AsLongLong(args[8]),
                           PyObject_IsTrue(args[9]), 0};
    const int64_t rows = PyLong_AsLongLong(args[5]), head_dim = PyLong_AsLongLong(args[6]);
    const int64_t threads = PyLong_AsLongLong(args[10]);
    if (PyErr_Occurred()) return NULL;
    if (layout.row < 0) Py_RETURN_NONE;
    Tensor x[2], cos;
    const int tensors = args[1] == Py_None ? 1 : 2;
    for (int i = 0; i < tensors; i++) {
        const int ready = is_ready(args[i], &x[i]);
        if (ready < 0) return NULL;
        const int64_t dims = ready ? x[i].dims : 0, seq = dims + layout.seq_dim;
        if (!ready || seq < 0 || dims > MOST_OTHERS || x[i].shape[dims - 1] != head_dim || x[i].shape[seq] > rows ||
            memcmp(&x[i].dtype, &x[0].dtype, sizeof x[i].dtype) || x[i].shape[seq] != x[0].shape[x[0].dims + layout.seq_dim])
            Py_RETURN_NONE;
    }
    if (borrow(args[2], &cos, "cos")) return NULL;
    if (cos.dtype.bits != (x[0].dtype.bits == 64 ? 64 : 32)) Py_RETURN_NONE;
    if (threads == 0) Py_RETURN_TRUE;
    return rotate_both(args, targets(NULL, args), args + 2, &layout, threads, NULL);
}

/* cos_sin(positions, inv_freq, tables, amplitude, cos, sin, threads): write cos and sin. */
static PyObject *cos_sin(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    if (count != 7) return fail("cos_sin expects 7 arguments");
    Tensor p, theta, tables, amplitude, cos, sin;
    if (borrow(args[0], &p, "positions") || borrow(args[1], &theta, "inv_freq") || borrow(args[2], &tables, "tables") ||
        borrow(args[3], &amplitude, "amplitude") || borrow(args[4], &cos, "cos") || borrow(args[5], &sin, "sin"))
        return NULL;
    const int64_t threads = PyLong_AsLongLong(args[6]);
    if (PyErr_Occurred()) return NULL;
    const int64_t pairs = theta.dims ? theta.shape[theta.dims - 1] : 0, heads = theta.dims == 2 ? theta.shape[0] : 1;
    const int64_t batch = p.dims == 2 ? p.shape[0] : 1, seq = p.dims ? p.shape[p.dims - 1] : 0;
    const int64_t all = batch * heads * seq * pairs;
    int fits = (p.dims == 1 || p.dims == 2) && (is_type(&p, DL_INT, 64) || is_type(&p, DL_INT, 32));
    fits = fits && (theta.dims == 1 || theta.dims == 2) && is_type(&theta, DL_FLOAT, 64) && amplitude.dims == 0 &&
           is_type(&amplitude, DL_FLOAT, 64) && is_type(&cos, DL_FLOAT, 32) && is_type(&sin, DL_FLOAT, 32);
    /* These tensors must be contiguous. */
    const Tensor *contiguous[] = {&theta, &tables, &cos, &sin};
    const int64_t sizes[] = {heads * pairs, 3 * 256 * heads * pairs, all, all};
    for (int i = 0; fits && i < 4; i++) {
        int64_t expected = 1;
        for (int d = contiguous[i]->dims - 1; d >= 0; d--) {
            fits = fits &&
                   (contiguous[i]->shape[d] == 1 || all == 0 || contiguous[i]->strides[d] == expected);
            expected *= contiguous[i]->shape[d];
        }
        fits = fits && expected == sizes[i];
    }
    /* complex128, which has code 5 in DLPack. */
    if (!fits || !is_type(&tables, 5, 128)) return fail("positions, tables, cos and sin do not fit together");
    if (all == 0) Py_RETURN_NONE;
    const Angles job = {p.data,
                        p.dims == 2 ? p.strides[0] : 0,
                        p.strides[p.dims - 1],
                        is_type(&p, DL_INT, 64),
                        tables.data,
                        theta.data,
                        *(const AnyDouble *)amplitude.data,
                        cos.data,
                        sin.data,
                        batch,
                        heads,
                        seq,
                        pairs};
    const int64_t worth = all / (GRAIN / 4);
    if (threads <= 1 || worth <= 1) {
        angles_part(&job, 0, 1);
    } else {
        Py_BEGIN_ALLOW_THREADS;
        in_threads(angles_part, &job, worth < threads ? worth : threads);
        Py_END_ALLOW_THREADS;
    }
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"use_torch", (PyCFunction)(void (*)(void))use, METH_FASTCALL, NULL},
    {"direct", (PyCFunction)(void (*)(void))direct, METH_FASTCALL, NULL},
    {"rotate", (PyCFunction)(void (*)(void))rotate, METH_FASTCALL, NULL},
    {"cos_sin", (PyCFunction)(void (*)(void))cos_sin, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_native", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) {
    const char *name;
    best = best_loops(&name);
#if !defined(_WIN32)
    pthread_atfork(NULL, NULL, after_fork);
#endif
    PyObject *module = PyModule_Create(&definition);
    if (!module) return NULL;
    if (PyModule_AddStringConstant(module, "instructions", name) ||
        PyModule_AddStringConstant(module, "source_hash", SOURCE_HASH)) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
