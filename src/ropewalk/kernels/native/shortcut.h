/* Shortcut: the common calls of a rope, checked and run in C, because Python's checks take longer than the rotation of
   one token. A call that is unusual in any way returns None and does nothing. Python's path then computes it, or raises
   the error. */
#ifndef ROPEWALK_SHORTCUT_H
#define ROPEWALK_SHORTCUT_H

#include <stddef.h>

#include "angles.h"
#include "job.h"

/* Most numbers of cos for positions that are not in the remembered range. They are computed on the stack. */
enum { MOST_ANGLES = 4096 };

/* What torch reports: functions that return something true if a call is traced, transformed or intercepted; the
   namespace of torch.autograd.forward_ad; functions without arguments; a function that increments versions. */
static PyObject *interceptors, *forward_ad, *is_grad_enabled, *is_inference_mode_enabled, *increment_version;
/* Whether the sign of a tensor's numbers is to be changed when they are read. */
static PyObject *is_negated;

static PyObject *name_k, *name_positions, *name_offset, *name_angles, *name_requires_grad, *name_base, *name_level,
    *name_is_inference;

typedef struct {
    PyObject_HEAD
    Layout layout;
    int64_t head_dim, pairs, context_length;
    /* cos and sin of positions start .. stop-1, or NULL. */
    PyObject *cos, *sin;
    int64_t start, stop;
    /* Frequencies, radix tables and amplitude. The tables are None if positions are not supported. */
    PyObject *inv_freq, *tables, *amplitude;
    /* Which rope computed a tensor of cos, by its id: (reference, rope, parameter). This rope is `rope`. */
    PyObject *makers, *rope;
    /* (q, k, rotated tensors, cos, sin, row, whether nobody else can write to cos and sin) -> the rotated tensors with a
       graph. */
    PyObject *with_graph;
} Shortcut;

typedef struct {
    PyObject *inputs[2];
    PyObject *positions, *offset, *angles;
} Call;

/* Read the arguments. Returns 0 if there are others than those of `Call`. */
static int read_call(PyObject *args, PyObject *kwargs, Call *call) {
    const Py_ssize_t count = PyTuple_GET_SIZE(args);
    if (count < 1 || count > 2) return 0;
    *call = (Call){{PyTuple_GET_ITEM(args, 0), count == 2 ? PyTuple_GET_ITEM(args, 1) : Py_None}, NULL, NULL, NULL};
    PyObject *name, *value;
    Py_ssize_t at = 0;
    while (kwargs && PyDict_Next(kwargs, &at, &name, &value)) {
        if (name == name_offset)
            call->offset = value == Py_None ? NULL : value;
        else if (name == name_angles)
            call->angles = value == Py_None ? NULL : value;
        else if (name == name_positions)
            call->positions = value == Py_None ? NULL : value;
        else if (name == name_k && count == 1)
            call->inputs[1] = value;
        else
            return 0;
    }
    return !call->offset + !call->angles + !call->positions >= 2;
}

/* Whether the object has a true attribute. Returns 1 or 0, or -1 with an exception. */
static int has_true(PyObject *object, PyObject *name) {
    PyObject *value = PyObject_GetAttr(object, name);
    const int result = value ? PyObject_IsTrue(value) : -1;
    Py_XDECREF(value);
    return result;
}

static int is_true(PyObject *result) {
    const int value = result ? PyObject_IsTrue(result) : -1;
    Py_XDECREF(result);
    return value;
}

/* Whether nothing traces, transforms or intercepts this call. Compilers are detected in Python. */
static int is_eager(void) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(interceptors); i++) {
        const int value = is_true(PyObject_CallNoArgs(PyTuple_GET_ITEM(interceptors, i)));
        if (value) return value < 0 ? -1 : 0;
    }
    PyObject *level = PyDict_GetItemWithError(forward_ad, name_level);
    return level ? PyLong_AsLong(level) < 0 : 0;
}

/* Whether this is a plain CPU tensor of a supported dtype. Returns 1 or 0, or -1 with an exception. */
static int is_ready(PyObject *object, Tensor *out) {
    if (Py_TYPE(object) != tensor_type && Py_TYPE(object) != parameter_type) return 0;
    if (exchange->borrow(object, out)) {
        /* A device or memory layout that DLPack does not support. */
        PyErr_Clear();
        return 0;
    }
    if (out->device_type != DL_CPU || out->dtype.lanes != 1 || !out->strides || !has_memory(out)) return 0;
    if (out->data) out->data = (char *)out->data + out->byte_offset;
    const int negated = is_true(PyObject_CallOneArg(is_negated, object));
    return negated < 0 ? -1 : !negated;
}

/* The part of a signature that describes one tensor. */
typedef struct {
    int32_t device_type, device_id, dims;
    DlType dtype;
    int32_t misalignment, needs_gradient;
    int64_t shape[MOST_OTHERS], strides[MOST_OTHERS];
} Description;

/* signature(*tensors) -> (bytes that describe everything about them except their numbers, their addresses), or None if
   one of them is not a plain tensor with memory. A tensor may be None, with address 0. Kernels of other devices are
   chosen by it, because Python takes longer to read the attributes. */
static PyObject *signature(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    enum { MOST = 16 };
    Description descriptions[MOST];
    if (!exchange || count > MOST) return fail("signature expects at most 16 tensors, after use_torch");
    memset(descriptions, 0, (size_t)count * sizeof *descriptions);
    const int graphs = is_true(PyObject_CallNoArgs(is_grad_enabled));
    PyObject *addresses = graphs < 0 ? NULL : PyTuple_New(count);
    for (Py_ssize_t i = 0; addresses && i < count; i++) {
        Description *d = &descriptions[i];
        Tensor t = {.data = NULL};
        if (args[i] != Py_None) {
            if (Py_TYPE(args[i]) != tensor_type && Py_TYPE(args[i]) != parameter_type) goto unusual;
            if (exchange->borrow(args[i], &t)) {
                PyErr_Clear();
                goto unusual;
            }
            if (t.dims > MOST_OTHERS || !t.strides || !has_memory(&t)) goto unusual;
            const int negated = is_true(PyObject_CallOneArg(is_negated, args[i]));
            if (negated < 0) goto error;
            if (negated) goto unusual;
            if (t.data) t.data = (char *)t.data + t.byte_offset;
            d->device_type = t.device_type, d->device_id = t.device_id, d->dims = t.dims + 1, d->dtype = t.dtype;
            d->misalignment = (int32_t)((uintptr_t)t.data & 15);
            if (graphs && (d->needs_gradient = has_true(args[i], name_requires_grad)) < 0) goto error;
            memcpy(d->shape, t.shape, (size_t)t.dims * sizeof *t.shape);
            memcpy(d->strides, t.strides, (size_t)t.dims * sizeof *t.strides);
        }
        PyObject *address = PyLong_FromVoidPtr(t.data);
        if (!address) goto error;
        PyTuple_SET_ITEM(addresses, i, address);
    }
    if (!addresses) return NULL;
    /* Only the used part of each description. */
    char packed[MOST * sizeof(Description)];
    size_t size = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        const Description *d = &descriptions[i];
        const size_t numbers = d->dims ? (size_t)(d->dims - 1) * sizeof *d->shape : 0;
        memcpy(packed + size, d, offsetof(Description, shape)), size += offsetof(Description, shape);
        memcpy(packed + size, d->shape, numbers), size += numbers;
        memcpy(packed + size, d->strides, numbers), size += numbers;
    }
    PyObject *key = PyBytes_FromStringAndSize(packed, (Py_ssize_t)size);
    PyObject *result = key ? PyTuple_Pack(2, key, addresses) : NULL;
    Py_XDECREF(key), Py_DECREF(addresses);
    return result;
unusual:
    Py_DECREF(addresses);
    Py_RETURN_NONE;
error:
    Py_DECREF(addresses);
    return NULL;
}

/* are_plain(*tensors) -> whether nothing transforms, intercepts or traces the call, and all are plain tensors with
   memory, or None. */
static PyObject *are_plain(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    if (!exchange) return fail("use_torch was not called");
    int plain = is_eager();
    for (Py_ssize_t i = 0; plain > 0 && i < count; i++) {
        if (args[i] == Py_None) continue;
        Tensor t;
        plain = Py_TYPE(args[i]) == tensor_type || Py_TYPE(args[i]) == parameter_type;
        if (plain && exchange->borrow(args[i], &t)) {
            PyErr_Clear();
            plain = 0;
        }
        if (!plain || !t.strides || !has_memory(&t)) Py_RETURN_FALSE;
        const int negated = is_true(PyObject_CallOneArg(is_negated, args[i]));
        plain = negated < 0 ? -1 : !negated;
    }
    return plain < 0 ? NULL : PyBool_FromLong(plain);
}

/* eager() -> whether nothing transforms, intercepts or traces a call. */
static PyObject *eager(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    if (!exchange) return fail("use_torch was not called");
    const int value = is_eager();
    return value < 0 ? NULL : PyBool_FromLong(value);
}

/* Whether q and k can be rotated: plain tensors of one dtype and length, with head_dim features. */
static int are_ready(const Shortcut *self, const Call *call, Tensor *x, int *count) {
    Dtype dtype;
    *count = call->inputs[1] == Py_None ? 1 : 2;
    for (int i = 0; i < *count; i++) {
        const int ready = is_ready(call->inputs[i], &x[i]);
        if (ready <= 0) return ready;
        const int64_t dims = x[i].dims, seq = dims + self->layout.seq_dim;
        if (seq < 0 || dims > MOST_OTHERS || x[i].shape[dims - 1] != self->head_dim || !find_dtype(&x[i], &dtype) ||
            memcmp(&x[i].dtype, &x[0].dtype, sizeof x[i].dtype) ||
            x[i].shape[seq] != x[0].shape[x[0].dims + self->layout.seq_dim])
            return 0;
    }
    return 1;
}

/* The remembered cos and sin, and the row of the first token. */
static int tables_of_range(Shortcut *self, const Call *call, int64_t tokens, Tensor *cos, Tensor *sin, int64_t *row) {
    int64_t offset = 0;
    if (call->offset) {
        int overflow;
        if (!PyLong_CheckExact(call->offset)) return 0;
        offset = PyLong_AsLongLongAndOverflow(call->offset, &overflow);
        if (overflow) return 0;
    }
    if (!self->cos || offset < self->start || offset > self->stop - tokens || offset > self->context_length - tokens)
        return 0;
    *row = offset - self->start;
    return borrow(self->cos, cos, "cos") || borrow(self->sin, sin, "sin") ? -1 : 1;
}

/* Whether a rope with other angles computed this tensor of cos, or may have. */
static int is_foreign(const Shortcut *self, PyObject *cos) {
    PyObject *key = PyLong_FromVoidPtr(cos);
    PyObject *maker = key ? PyDict_GetItemWithError(self->makers, key) : NULL;
    Py_XDECREF(key);
    if (!maker) return PyErr_Occurred() ? -1 : 0;
    if (!PyTuple_Check(maker) || PyTuple_GET_SIZE(maker) != 3) return 1;
    if (PyTuple_GET_ITEM(maker, 1) == self->rope && PyTuple_GET_ITEM(maker, 2) == Py_None) return 0;
    /* The id may belong to another tensor by now. */
    PyObject *made = PyObject_CallNoArgs(PyTuple_GET_ITEM(maker, 0));
    Py_XDECREF(made);
    return made ? made == cos : -1;
}

/* cos and sin of the caller: [seq, pairs] or [1 or batch, seq, pairs]. */
static int tables_of_angles(const Shortcut *self, PyObject *angles, const Tensor *x, int count, int64_t tokens,
                            Tensor *cos, Tensor *sin) {
    if (!PyTuple_CheckExact(angles) || PyTuple_GET_SIZE(angles) != 2) return 0;
    Tensor *tables[] = {cos, sin};
    for (int i = 0; i < 2; i++) {
        const int ready = is_ready(PyTuple_GET_ITEM(angles, i), tables[i]);
        if (ready <= 0) return ready;
        const Tensor *t = tables[i];
        if ((t->dims != 2 && t->dims != 3) || t->dims != cos->dims || t->shape[t->dims - 1] != self->pairs ||
            t->shape[t->dims - 2] != tokens || (t->dims == 3 && t->shape[0] != cos->shape[0]))
            return 0;
        for (int j = 0; t->dims == 3 && j < count; j++)
            if (x[j].dims + self->layout.seq_dim < 1 || (t->shape[0] != 1 && t->shape[0] != x[j].shape[0])) return 0;
    }
    const int foreign = is_foreign(self, PyTuple_GET_ITEM(angles, 0));
    return foreign ? (foreign < 0 ? -1 : 0) : 1;
}

/* cos and sin at positions [seq] or [1 or batch, seq], computed into `numbers`. `shape` has room for 3 numbers, and is
   followed by the strides. */
static int tables_of_positions(const Shortcut *self, PyObject *positions, const Tensor *x, int count, int64_t tokens,
                               float *numbers, int64_t *shape, Tensor *cos, Tensor *sin) {
    Tensor p, theta, tables, amplitude;
    if (self->tables == Py_None) return 0;
    const int ready = is_ready(positions, &p);
    if (ready <= 0) return ready;
    const int wide = is_type(&p, DL_INT, 64);
    if ((!wide && !is_type(&p, DL_INT, 32)) || (p.dims != 1 && p.dims != 2) || p.shape[p.dims - 1] != tokens) return 0;
    const int64_t batch = p.dims == 2 ? p.shape[0] : 1, rows = batch * tokens;
    for (int i = 0; p.dims == 2 && i < count; i++)
        if (x[i].dims + self->layout.seq_dim < 1 || (batch != 1 && batch != x[i].shape[0])) return 0;
    if (rows > MOST_ANGLES || rows * self->pairs > MOST_ANGLES || x[0].dtype.bits == 64) return 0;
    if (borrow(self->inv_freq, &theta, "inv_freq") || borrow(self->tables, &tables, "tables") ||
        borrow(self->amplitude, &amplitude, "amplitude"))
        return -1;
    const Angles job = {.positions = p.data,
                        .batch_step = p.dims == 2 ? p.strides[0] : 0,
                        .seq_step = p.strides[p.dims - 1],
                        .wide = wide,
                        .tables = tables.data,
                        .inv_freq = theta.data,
                        .amplitude = *(const AnyDouble *)amplitude.data,
                        .cos = (AnyFloat *)numbers,
                        .sin = (AnyFloat *)(numbers + rows * self->pairs),
                        .batch = batch,
                        .heads = 1,
                        .seq = tokens,
                        .pairs = self->pairs};
    if (self->context_length != INT64_MAX)
        for (int64_t row = 0; row < rows; row++)
            if (position_of(&job, row) >= self->context_length) return 0;
    angles_part(&job, 0, 1);
    const int64_t sizes_and_strides[] = {batch, tokens, self->pairs, tokens * self->pairs, self->pairs, 1};
    memcpy(shape, sizes_and_strides, sizeof sizes_and_strides);
    *cos = (Tensor){.data = numbers, .device_type = DL_CPU, .dims = 3, .dtype = {DL_FLOAT, 32, 1},
                    .shape = shape, .strides = shape + 3};
    *sin = *cos;
    sin->data = numbers + rows * self->pairs;
    /* Tables that all sequences share have no batch, so that they fit tensors without one. */
    if (p.dims == 1) cos->dims = sin->dims = 2, cos->shape = sin->shape = shape + 1, cos->strides = sin->strides = shape + 4;
    return 1;
}

/* The memory of a tensor in bytes, from `*first` to `*last`. Returns 0 if two of its elements may share memory. */
static int extent(const Tensor *x, uintptr_t *first, uintptr_t *last) {
    int order[MOST_OTHERS];
    int64_t reach = 0;
    for (int i = 0; i < x->dims; i++) {
        int j = i;
        for (; j > 0 && x->strides[order[j - 1]] > x->strides[i]; j--) order[j] = order[j - 1];
        order[j] = i;
    }
    for (int i = 0; i < x->dims; i++) {
        const int64_t size = x->shape[order[i]], stride = x->strides[order[i]];
        if (size <= 1) continue;
        if (stride <= reach) return 0;
        reach += stride * (size - 1);
    }
    *first = (uintptr_t)x->data;
    *last = *first + (uintptr_t)(reach + 1) * (x->dtype.bits / 8);
    return 1;
}

/* Whether the tensors can be written without further checks: separate memory, and nothing that autograd protects. */
static int are_writable(const Call *call, const Tensor *x, int count, int graphs, int *inference) {
    uintptr_t first[2], last[2];
    for (int i = 0; i < count; i++) {
        if (!has_elements(&x[i]) || !extent(&x[i], &first[i], &last[i])) return 0;
        inference[i] = is_true(PyObject_CallMethodNoArgs(call->inputs[i], name_is_inference));
        if (inference[i] < 0) return -1;
        if (inference[i]) {
            const int allowed = is_true(PyObject_CallNoArgs(is_inference_mode_enabled));
            if (allowed <= 0) return allowed;
        }
        if (!graphs) continue;
        PyObject *base = PyObject_GetAttr(call->inputs[i], name_base);
        if (!base) return -1;
        Py_DECREF(base);
        if (base != Py_None) return 0;
    }
    return count == 1 || first[0] >= last[1] || first[1] >= last[0];
}

static int note_writes(const Call *call, int count, const int *inference) {
    for (int i = 0; i < count; i++) {
        if (inference[i]) continue;
        PyObject *one = PyTuple_Pack(1, call->inputs[i]);
        PyObject *result = one ? PyObject_CallOneArg(increment_version, one) : NULL;
        Py_XDECREF(one);
        if (!result) return -1;
        Py_DECREF(result);
    }
    return 0;
}

static PyObject *first_or_both(PyObject *both) {
    if (!both || !PyTuple_Check(both) || PyTuple_GET_SIZE(both) != 1) return both;
    PyObject *first = Py_NewRef(PyTuple_GET_ITEM(both, 0));
    Py_DECREF(both);
    return first;
}

#define UNUSUAL(CONDITION)                         \
    do {                                           \
        const int usual_ = (CONDITION);            \
        if (usual_ < 0 && PyErr_Occurred()) {      \
            result = NULL;                         \
            goto end;                              \
        }                                          \
        if (usual_ <= 0) goto end;                 \
    } while (0)

static PyObject *run(Shortcut *self, PyObject *args, PyObject *kwargs, int in_place) {
    Call call;
    Tensor x[2], cos, sin;
    Layout layout = self->layout;
    PyObject *result = Py_None, *cosines = NULL, *sines = NULL;
    float numbers[2 * MOST_ANGLES];
    int64_t shape[6];
    int count, graphs, needed = 0, inference[2];
    if (!exchange || !read_call(args, kwargs, &call)) Py_RETURN_NONE;
    UNUSUAL(is_eager());
    UNUSUAL(are_ready(self, &call, x, &count));
    const int64_t tokens = x[0].shape[x[0].dims + layout.seq_dim];
    graphs = is_true(PyObject_CallNoArgs(is_grad_enabled));
    UNUSUAL(graphs < 0 ? -1 : 1);
    for (int i = 0; graphs && i < count; i++) {
        const int needs_gradient = has_true(call.inputs[i], name_requires_grad);
        UNUSUAL(needs_gradient < 0 ? -1 : 1);
        needed += needs_gradient;
    }
    /* A graph of both would include a tensor that needs no gradient. */
    if (needed && (needed < count || call.positions || in_place)) goto end;
    if (call.positions) {
        UNUSUAL(tables_of_positions(self, call.positions, x, count, tokens, numbers, shape, &cos, &sin));
    } else if (call.angles) {
        UNUSUAL(tables_of_angles(self, call.angles, x, count, tokens, &cos, &sin));
        cosines = Py_NewRef(PyTuple_GET_ITEM(call.angles, 0)), sines = Py_NewRef(PyTuple_GET_ITEM(call.angles, 1));
        if (graphs) {
            int learned = has_true(cosines, name_requires_grad);
            if (!learned) learned = has_true(sines, name_requires_grad);
            UNUSUAL(learned < 0 ? -1 : !learned);
        }
    } else {
        UNUSUAL(tables_of_range(self, &call, tokens, &cos, &sin, &layout.row));
        /* Another thread may replace them. */
        cosines = Py_NewRef(self->cos), sines = Py_NewRef(self->sin);
    }
    /* A rope has finite frequencies, and positions are integers here. */
    layout.finite = !call.angles;
    if (!is_type(&cos, DL_FLOAT, x[0].dtype.bits == 64 ? 64 : 32) || !is_type(&sin, DL_FLOAT, cos.dtype.bits)) goto end;
    if (in_place) {
        UNUSUAL(are_writable(&call, x, count, graphs, inference));
        result = rotate_both(x, targets(call.inputs, call.inputs), &cos, &sin, &layout, -1, NULL);
        if (result && note_writes(&call, count, inference)) Py_CLEAR(result);
    } else {
        result = rotate_both(x, targets(NULL, call.inputs), &cos, &sin, &layout, -1, NULL);
        if (result && needed) {
            PyObject *rotated = result, *row = PyLong_FromLongLong(layout.row);
            PyObject *owned = call.angles ? Py_False : Py_True;
            PyObject *arguments[] = {call.inputs[0], call.inputs[1], rotated, cosines, sines, row, owned};
            result = row ? PyObject_Vectorcall(self->with_graph, arguments, 7, NULL) : NULL;
            Py_DECREF(rotated);
            Py_XDECREF(row);
        }
    }
    result = first_or_both(result);
end:
    Py_XDECREF(cosines), Py_XDECREF(sines);
    return result == Py_None ? Py_NewRef(Py_None) : result;
}
#undef UNUSUAL

static PyObject *shortcut_call(PyObject *self, PyObject *args, PyObject *kwargs) {
    return run((Shortcut *)self, args, kwargs, 0);
}

static PyObject *shortcut_rotate_(PyObject *self, PyObject *args, PyObject *kwargs) {
    return run((Shortcut *)self, args, kwargs, 1);
}

/* remember(start, stop, cos, sin): cos and sin of positions start .. stop-1, [stop - start, pairs]. */
static PyObject *shortcut_remember(PyObject *object, PyObject *const *args, Py_ssize_t count) {
    Shortcut *self = (Shortcut *)object;
    if (count != 4) return fail("remember expects 4 arguments");
    const int64_t start = PyLong_AsLongLong(args[0]), stop = PyLong_AsLongLong(args[1]);
    Tensor tables[2];
    if (PyErr_Occurred() || borrow(args[2], &tables[0], "cos") || borrow(args[3], &tables[1], "sin")) return NULL;
    for (int i = 0; i < 2; i++)
        if (tables[i].dims != 2 || tables[i].shape[0] != stop - start || tables[i].shape[1] != self->pairs)
            return fail("cos and sin do not fit the range");
    Py_INCREF(args[2]), Py_INCREF(args[3]);
    PyObject *cos = self->cos, *sin = self->sin;
    self->cos = args[2], self->sin = args[3], self->start = start, self->stop = stop;
    Py_XDECREF(cos), Py_XDECREF(sin);
    Py_RETURN_NONE;
}

static void shortcut_free(PyObject *object) {
    Shortcut *self = (Shortcut *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject *owned[] = {self->cos,       self->sin,    self->inv_freq, self->tables,
                         self->amplitude, self->makers, self->rope,     self->with_graph};
    for (size_t i = 0; i < sizeof owned / sizeof *owned; i++) Py_XDECREF(owned[i]);
    type->tp_free(object);
    Py_DECREF(type);
}

static PyMethodDef shortcut_methods[] = {
    {"rotate_", (PyCFunction)(void (*)(void))shortcut_rotate_, METH_VARARGS | METH_KEYWORDS, NULL},
    {"remember", (PyCFunction)(void (*)(void))shortcut_remember, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot shortcut_slots[] = {
    {Py_tp_call, shortcut_call}, {Py_tp_dealloc, shortcut_free}, {Py_tp_methods, shortcut_methods}, {0, NULL}};

static PyType_Spec shortcut_spec = {"ropewalk.kernels._native.Shortcut", sizeof(Shortcut), 0,
                                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, shortcut_slots};
static PyTypeObject *shortcut_type;

static int intern_names(void) {
    const char *texts[] = {"k", "positions", "offset", "angles", "requires_grad", "_base", "_current_level", "is_inference"};
    PyObject **names[] = {&name_k,    &name_positions, &name_offset, &name_angles, &name_requires_grad,
                          &name_base, &name_level,     &name_is_inference};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        if (!(*names[i] = PyUnicode_InternFromString(texts[i]))) return -1;
    return 0;
}

/* shortcut(head_dim, pairs, start, seq_dim, interleaved, context_length, inv_freq, tables, amplitude, makers, rope,
   with_graph): see the fields. context_length and tables may be None. */
static PyObject *make_shortcut(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    if (!exchange || count != 12 || !PyDict_Check(args[9])) return fail("shortcut expects 12 arguments, after use_torch");
    Tensor theta, tables, amplitude;
    if (borrow(args[6], &theta, "inv_freq") || borrow(args[8], &amplitude, "amplitude") ||
        (args[7] != Py_None && borrow(args[7], &tables, "tables")))
        return NULL;
    const int64_t head_dim = PyLong_AsLongLong(args[0]), pairs = PyLong_AsLongLong(args[1]);
    const Layout layout = {0, PyLong_AsLongLong(args[2]), PyLong_AsLongLong(args[3]), PyObject_IsTrue(args[4]), 0, 0};
    const int64_t context = args[5] == Py_None ? INT64_MAX : PyLong_AsLongLong(args[5]);
    if (PyErr_Occurred()) return NULL;
    int fits = theta.dims == 1 && theta.shape[0] == pairs && amplitude.dims == 0 && is_type(&amplitude, DL_FLOAT, 64) &&
               (layout.seq_dim == -2 || layout.seq_dim == -3);
    if (args[7] != Py_None) {
        fits = fits && is_type(&theta, DL_FLOAT, 64) && is_type(&tables, DL_COMPLEX, 128);
        int64_t expected = 1;
        for (int d = tables.dims - 1; d >= 0; d--) {
            fits = fits && (tables.shape[d] == 1 || tables.strides[d] == expected);
            expected *= tables.shape[d];
        }
        fits = fits && expected == 3 * 256 * pairs && (theta.strides[0] == 1 || pairs == 1);
    }
    if (!fits) return fail("the numbers of the rope do not fit together");
    Shortcut *self = (Shortcut *)shortcut_type->tp_alloc(shortcut_type, 0);
    if (!self) return NULL;
    self->layout = layout, self->head_dim = head_dim, self->pairs = pairs, self->context_length = context;
    self->inv_freq = Py_NewRef(args[6]), self->tables = Py_NewRef(args[7]), self->amplitude = Py_NewRef(args[8]);
    self->makers = Py_NewRef(args[9]), self->rope = Py_NewRef(args[10]), self->with_graph = Py_NewRef(args[11]);
    return (PyObject *)self;
}

#endif
