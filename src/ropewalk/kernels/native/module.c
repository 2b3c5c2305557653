/* ropewalk.kernels._native: the rotation and its angles, as a CPython extension without torch's headers. */
#include "tensors.h"

#include "angles.h"
#include "job.h"
#include "shortcut.h"
#include "step.h"

#ifndef SOURCE_HASH
#define SOURCE_HASH ""
#endif

/* use_torch(Tensor, Parameter, exchange API, address of GOMP_parallel or 0, functions): `functions` is a tuple of
   empty_like, get_num_threads, is_neg, is_grad_enabled, is_inference_mode_enabled, increment_version, the tuple of
   interceptors, and the namespace of torch.autograd.forward_ad. */
static PyObject *use(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    PyObject **stored[] = {&empty_like,        &get_num_threads, &is_negated, &is_grad_enabled, &is_inference_mode_enabled,
                           &increment_version, &interceptors,    &forward_ad};
    const Py_ssize_t functions = sizeof stored / sizeof *stored;
    if (count != 5 || !PyTuple_Check(args[4]) || PyTuple_GET_SIZE(args[4]) != functions ||
        !PyTuple_Check(PyTuple_GET_ITEM(args[4], 6)) || !PyDict_Check(PyTuple_GET_ITEM(args[4], 7)))
        return fail("use_torch expects 5 arguments");
    void *address = PyLong_AsVoidPtr(args[3]);
    if (PyErr_Occurred()) return NULL;
    for (Py_ssize_t i = 0; i < functions; i++) *stored[i] = Py_NewRef(PyTuple_GET_ITEM(args[4], i));
    team = (Team)address;
    if (use_torch(args[0], args[1], args[2])) return NULL;
    Py_RETURN_NONE;
}

/* rotate(q, k, yq, yk, cos, sin, row, start, seq_dim, interleaved, conjugate, threads[, q_weight, k_weight, eps,
   rounding]) -> (yq, yk) or (yq,). k and yk may be None. If yq is None, new tensors are created. */
static PyObject *rotate(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    if (!exchange || (count != 12 && count != 16)) return fail("rotate expects 12 or 16 arguments, after use_torch");
    const Layout layout = {PyLong_AsLongLong(args[6]), PyLong_AsLongLong(args[7]), PyLong_AsLongLong(args[8]),
                           PyObject_IsTrue(args[9]), PyObject_IsTrue(args[10]), 0};
    const int64_t threads = PyLong_AsLongLong(args[11]);
    if (PyErr_Occurred()) return NULL;
    Tensor inputs[2], cos, sin;
    if (borrow(args[0], &inputs[0], "q") || (args[1] != Py_None && borrow(args[1], &inputs[1], "k")) ||
        borrow(args[4], &cos, "cos") || borrow(args[5], &sin, "sin"))
        return NULL;
    PyObject *both = targets(args[2] == Py_None ? NULL : args + 2, args);
    return rotate_both(inputs, both, &cos, &sin, &layout, threads, count == 16 ? args + 12 : NULL);
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
    if (!fits || !is_type(&tables, DL_COMPLEX, 128)) return fail("positions, tables, cos and sin do not fit together");
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
    {"shortcut", (PyCFunction)(void (*)(void))make_shortcut, METH_FASTCALL, NULL},
    {"signature", (PyCFunction)(void (*)(void))signature, METH_FASTCALL,
     PyDoc_STR("Return the signature of tensors: see ropewalk.kernels.signature.python_signature.\n\n"
               ">>> import torch\n>>> signature(torch.ones(2), None)[1][1]\n0\n")},
    {"are_plain", (PyCFunction)(void (*)(void))are_plain, METH_FASTCALL, NULL},
    {"is_eager", eager, METH_NOARGS,
     PyDoc_STR("Return whether nothing transforms, intercepts or traces the current call.\n\n>>> is_eager()\nTrue\n")},
    {"rotate", (PyCFunction)(void (*)(void))rotate, METH_FASTCALL, NULL},
    {"cos_sin", (PyCFunction)(void (*)(void))cos_sin, METH_FASTCALL, NULL},
    {"linear_step", (PyCFunction)(void (*)(void))linear_step, METH_FASTCALL, NULL},
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
    shortcut_type = (PyTypeObject *)PyType_FromSpec(&shortcut_spec);
    if (!shortcut_type || intern_names() || PyModule_AddStringConstant(module, "instructions", name) ||
        PyModule_AddStringConstant(module, "source_hash", SOURCE_HASH)) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
