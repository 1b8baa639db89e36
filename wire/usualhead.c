/* A request's head as nearly all are written: the compiled form of what requesthead.py's parser and checks make of it.
   Any other head is for those: other methods and versions, unusual targets and spaces, headers that frame a body by
   anything but one Content-Length, upgrades. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <string.h>

#define MAX_NAME 64
#define MAX_DIGITS 15

static int is_alphanumeric(unsigned char byte)
{
    return (byte >= '0' && byte <= '9') || (byte >= 'A' && byte <= 'Z') || (byte >= 'a' && byte <= 'z');
}

static int in_target(unsigned char byte)
{
    return is_alphanumeric(byte) || (byte && strchr("/_.~?=&%:@,+-", byte) != NULL);
}

static int in_name(unsigned char byte)
{
    return is_alphanumeric(byte) || (byte && strchr("!#$%&'*+-.^_`|~", byte) != NULL);
}

static int take(const char **at, const char *end, const char *word)
{
    size_t size = strlen(word);
    if ((size_t)(end - *at) < size || memcmp(*at, word, size))
        return 0;
    *at += size;
    return 1;
}

/* Headers that have come, of those that decide where the request ends and who it is for. */
typedef struct {
    int hosts, lengths;
} Seen;

static int is(const char *name, Py_ssize_t size, const char *word)
{
    return size == (Py_ssize_t)strlen(word) && !memcmp(name, word, (size_t)size);
}

/* Check a header by its name in lower case; 0: it is for the parser. */
static int check(const char *name, Py_ssize_t size, const char *value, Py_ssize_t length, Seen *seen)
{
    if (is(name, size, "host"))
        return ++seen->hosts == 1;
    if (is(name, size, "content-length")) {
        for (Py_ssize_t at = 0; at < length; at++)
            if (value[at] < '0' || value[at] > '9')
                return 0;
        return length <= MAX_DIGITS && ++seen->lengths == 1;
    }
    return !is(name, size, "transfer-encoding") && !is(name, size, "upgrade") && !is(name, size, "content_length") &&
           !is(name, size, "transfer_encoding");
}

/* Append a new reference, and drop it. */
static int append(PyObject *list, PyObject *item)
{
    int failed = item == NULL ? -1 : PyList_Append(list, item);
    Py_XDECREF(item);
    return failed;
}

/* Read one header line. 1: it is in both lists; 0: it is for the parser; -1: an error. */
static int take_header(const char **at, const char *end, PyObject *headers, PyObject *names, Seen *seen)
{
    char lower[MAX_NAME];
    const char *name = *at, *value;
    Py_ssize_t size = 0, length;
    for (; *at < end && size < MAX_NAME && in_name((unsigned char)**at); (*at)++, size++)
        lower[size] = (char)(**at >= 'A' && **at <= 'Z' ? **at + 'a' - 'A' : **at);
    if (size == 0 || !take(at, end, ":"))
        return 0;
    take(at, end, " ");
    for (value = *at; *at < end && **at >= 0x20 && **at < 0x7f;)
        (*at)++;
    length = *at - value;
    if (length == 0 || value[0] == ' ' || value[length - 1] == ' ' || !take(at, end, "\r\n") ||
        !check(lower, size, value, length, seen))
        return 0;
    if (append(headers, Py_BuildValue("(y#y#)", name, size, value, length)) < 0)
        return -1;
    return append(names, PyBytes_FromStringAndSize(lower, size)) < 0 ? -1 : 1;
}

/* take_usual_head(data) -> (method, target, headers, names in lower case), or None */
static PyObject *take_usual_head(PyObject *module, PyObject *data)
{
    char *start;
    Py_ssize_t size;
    Seen seen = {0, 0};
    int usual = 1;
    if (PyBytes_AsStringAndSize(data, &start, &size) < 0)
        return NULL;
    const char *at = start, *end = start + size, *target;
    if (!take(&at, end, "POST ") && !take(&at, end, "GET "))
        Py_RETURN_NONE;
    for (target = at; at < end && in_target((unsigned char)*at);)
        at++;
    Py_ssize_t method_size = target - start - 1, target_size = at - target;
    if (target_size == 0 || *target != '/' || !take(&at, end, " HTTP/1.1\r\n"))
        Py_RETURN_NONE;
    PyObject *headers = PyList_New(0), *names = PyList_New(0), *found = NULL;
    if (headers == NULL || names == NULL)
        usual = -1;
    while (usual > 0 && !take(&at, end, "\r\n"))
        usual = take_header(&at, end, headers, names, &seen);
    if (usual > 0 && at == end && seen.hosts == 1)
        found = Py_BuildValue("(y#y#OO)", start, method_size, target, target_size, headers, names);
    else if (usual >= 0)
        found = Py_NewRef(Py_None);
    Py_XDECREF(headers);
    Py_XDECREF(names);
    return found;
}

static PyMethodDef methods[] = {
    {"take_usual_head", take_usual_head, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "usualhead", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_usualhead(void)
{
    return PyModuleDef_Init(&module);
}
