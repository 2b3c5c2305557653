/* Access to torch tensors through the C functions of DLPack's exchange API: no torch headers, no copies, no Python
   attributes. The structs below are those of DLPack 1.x. */
#ifndef ROPEWALK_TENSORS_H
#define ROPEWALK_TENSORS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

typedef struct {
    uint8_t code, bits;
    uint16_t lanes;
} DlType;

typedef struct {
    void *data;
    int32_t device_type, device_id;
    int32_t dims;
    DlType dtype;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} Tensor;

typedef struct {
    struct {
        uint32_t major, minor;
        void *previous;
    } header;
    void *allocate, *from_object, *to_object;
    int (*borrow)(void *object, Tensor *out);
    void *stream;
} Exchange;

/* torch accepts external memory, so numbers may be unaligned. */
typedef float AnyFloat __attribute__((aligned(1), may_alias));
typedef double AnyDouble __attribute__((aligned(1), may_alias));
typedef uint16_t AnyHalf __attribute__((aligned(1), may_alias));
typedef int32_t AnyInt __attribute__((aligned(1), may_alias));
typedef int64_t AnyLong __attribute__((aligned(1), may_alias));

enum { DL_CPU = 1, DL_INT = 0, DL_FLOAT = 2, DL_BFLOAT = 4, DL_COMPLEX = 5 };

static const Exchange *exchange;
static PyTypeObject *tensor_type, *parameter_type;

/* Store what torch exports. Returns 0, or -1 with an exception. */
static int use_torch(PyObject *tensors, PyObject *parameters, PyObject *capsule) {
    const Exchange *api = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    if (!api) return -1;
    if (api->header.major != 1 || !api->borrow) {
        PyErr_Format(PyExc_ImportError, "torch exports version %u of DLPack's exchange API, but only 1 is supported",
                     (unsigned)api->header.major);
        return -1;
    }
    Py_INCREF(tensors), Py_INCREF(parameters);
    tensor_type = (PyTypeObject *)tensors, parameter_type = (PyTypeObject *)parameters;
    exchange = api;
    return 0;
}

static int has_elements(const Tensor *t) {
    for (int i = 0; i < t->dims; i++)
        if (t->shape[i] == 0) return 0;
    return 1;
}

/* Whether the tensor has memory, or needs none because it is empty. */
static int has_memory(const Tensor *t) { return t->data != NULL || !has_elements(t); }

/* Describe a plain CPU tensor in `out`, valid while the object lives. Returns 0, or -1 with an exception. */
static int borrow(PyObject *object, Tensor *out, const char *name) {
    if (!exchange) {
        PyErr_SetString(PyExc_RuntimeError, "use_torch was not called");
        return -1;
    }
    if (Py_TYPE(object) != tensor_type && Py_TYPE(object) != parameter_type) {
        PyErr_Format(PyExc_TypeError, "%s: a plain torch.Tensor was expected, not %s", name, Py_TYPE(object)->tp_name);
        return -1;
    }
    if (exchange->borrow(object, out)) {
        /* A device or memory layout that DLPack does not support. torch's message contains a C++ stack trace. */
        PyErr_Clear();
        out->device_type = 0;
    }
    if (out->device_type != DL_CPU || out->dtype.lanes != 1 || !out->strides || !has_memory(out)) {
        PyErr_Format(PyExc_ValueError, "%s: a strided tensor on the CPU was expected", name);
        return -1;
    }
    if (out->data) out->data = (char *)out->data + out->byte_offset;
    return 0;
}

static int is_type(const Tensor *t, uint8_t code, uint8_t bits) { return t->dtype.code == code && t->dtype.bits == bits; }

#endif
