/* Token ids of a key, and their JSON: the compiled forms of `fill_ids` in draws.py and `padded_ids` in bodies.py. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdint.h>

static const uint64_t GOLDEN = 0x9E3779B97F4A7C15u;

static uint64_t mix64(uint64_t value)
{
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9u;
    value = (value ^ (value >> 27)) * 0x94D049BB133111EBu;
    return value ^ (value >> 31);
}

static int wrong(const char *text)
{
    PyErr_SetString(PyExc_TypeError, text);
    return -1;
}

static int open_buffer(PyObject *object, Py_buffer *view, int flags, Py_ssize_t item, const char *text)
{
    if (PyObject_GetBuffer(object, view, flags) < 0)
        return -1;
    if (view->itemsize == item)
        return 0;
    PyBuffer_Release(view);
    return wrong(text);
}

/* fill_ids(ids, keys, low, span): row k of the uint32 array `ids` gets the ids of key k, all below low + span. */
static PyObject *fill_ids(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    Py_buffer ids, keys;
    if (num_args != 4) {
        wrong("fill_ids: expected ids, keys, low, span");
        return NULL;
    }
    uint64_t low = PyLong_AsUnsignedLongLong(args[2]), span = PyLong_AsUnsignedLongLong(args[3]);
    if (PyErr_Occurred() || open_buffer(args[0], &ids, PyBUF_CONTIG, 4, "fill_ids: ids: expected uint32") < 0)
        return NULL;
    if (open_buffer(args[1], &keys, PyBUF_CONTIG_RO, 8, "fill_ids: keys: expected uint64") < 0) {
        PyBuffer_Release(&ids);
        return NULL;
    }
    uint32_t *to = ids.buf;
    const uint64_t *key = keys.buf;
    Py_ssize_t rows = keys.len / 8, count = rows ? ids.len / 4 / rows : 0;
    for (Py_ssize_t row = 0; row < rows; row++)
        for (Py_ssize_t place = 1; place <= count; place++)
            *to++ = (uint32_t)(low + ((mix64(key[row] + (uint64_t)place * GOLDEN) >> 32) * span >> 32));
    PyBuffer_Release(&keys);
    PyBuffer_Release(&ids);
    Py_RETURN_NONE;
}

static void write_id(char *to, uint32_t id, int width)
{
    for (int place = width - 1; place >= 0; place--) {
        to[place] = id || place == width - 1 ? (char)('0' + id % 10) : ' ';
        id /= 10;
    }
    to[width] = ',';
}

/* padded_ids(ids) -> JSON array of a uint32 array's ids, each padded to five places, from the first longer one on to
   six; None: an id has more. */
static PyObject *padded_ids(PyObject *module, PyObject *object)
{
    Py_buffer view;
    uint32_t largest = 0;
    if (open_buffer(object, &view, PyBUF_CONTIG_RO, 4, "padded_ids: expected uint32") < 0)
        return NULL;
    const uint32_t *ids = view.buf;
    Py_ssize_t count = view.len / 4;
    for (Py_ssize_t at = 0; at < count; at++)
        largest = ids[at] > largest ? ids[at] : largest;
    if (largest >= 1000000) {
        PyBuffer_Release(&view);
        Py_RETURN_NONE;
    }
    Py_ssize_t shorts = 0;
    while (shorts < count && ids[shorts] < 100000)
        shorts++;
    PyObject *made = PyBytes_FromStringAndSize(NULL, count ? shorts * 6 + (count - shorts) * 7 + 1 : 2);
    if (made != NULL) {
        char *to = PyBytes_AsString(made);
        *to++ = '[';
        for (Py_ssize_t at = 0; at < count; at++) {
            int width = at < shorts ? 5 : 6;
            write_id(to, ids[at], width);
            to += width + 1;
        }
        to[count ? -1 : 0] = ']';
    }
    PyBuffer_Release(&view);
    return made;
}

static PyMethodDef methods[] = {
    {"fill_ids", (PyCFunction)(void (*)(void))fill_ids, METH_FASTCALL, NULL},
    {"padded_ids", padded_ids, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "promptids", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_promptids(void)
{
    return PyModuleDef_Init(&module);
}
