/* Chunks as nearly all are written, taken from a read at once: the compiled form of `take_whole_chunks` in framing.py. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <string.h>

static int digit(unsigned char byte)
{
    if (byte >= '0' && byte <= '9')
        return byte - '0';
    return byte >= 'a' && byte <= 'f' ? byte - 'a' + 10 : -1;
}

/* The data of the whole, usual chunk at `at`, and its size; NULL: there is none. A size has one to three digits. */
static const char *chunk_data(const char *at, const char *end, Py_ssize_t *size)
{
    Py_ssize_t found = 0;
    int digits = 0, value;
    while (digits < 3 && at < end && (value = digit((unsigned char)*at)) >= 0) {
        if (digits == 0 && value == 0)
            return NULL;
        found = found * 16 + value;
        digits++;
        at++;
    }
    if (digits == 0 || end - at < found + 4 || memcmp(at, "\r\n", 2) || memcmp(at + 2 + found, "\r\n", 2))
        return NULL;
    *size = found;
    return at + 2;
}

/* take_whole_chunks(data, at, most) -> (place behind, number, their data) */
static PyObject *take_whole_chunks(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    char *data, *to;
    Py_ssize_t length, size, total = 0, number = 0;
    if (num_args != 3) {
        PyErr_SetString(PyExc_TypeError, "take_whole_chunks: expected data, at, most");
        return NULL;
    }
    if (PyBytes_AsStringAndSize(args[0], &data, &length) < 0)
        return NULL;
    Py_ssize_t from = PyLong_AsSsize_t(args[1]), most = PyLong_AsSsize_t(args[2]);
    if (PyErr_Occurred())
        return NULL;
    if (from < 0 || from > length) {
        PyErr_SetString(PyExc_ValueError, "take_whole_chunks: at: expected a place in data");
        return NULL;
    }
    const char *at = data + from, *end = data + length, *body;
    while (number < most && (body = chunk_data(at, end, &size)) != NULL) {
        at = body + size + 2;
        total += size;
        number++;
    }
    PyObject *joined = PyBytes_FromStringAndSize(NULL, total);
    if (joined == NULL)
        return NULL;
    to = PyBytes_AsString(joined);
    const char *next = data + from;
    for (Py_ssize_t each = 0; each < number; each++) {
        body = chunk_data(next, end, &size);
        memcpy(to, body, (size_t)size);
        to += size;
        next = body + size + 2;
    }
    return Py_BuildValue("(nnN)", (Py_ssize_t)(at - data), number, joined);
}

static PyMethodDef methods[] = {
    {"take_whole_chunks", (PyCFunction)(void (*)(void))take_whole_chunks, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "usualchunks", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_usualchunks(void)
{
    return PyModuleDef_Init(&module);
}
