/* Events of a completions stream as nearly all are written, read at once: the compiled form of what completion.py does
   with them one by one. The first event of any other shape ends it, and Python reads on from there: escapes other than
   JSON's short ones, several choices, reasoning, tool calls, logprobs, errors, timings, fields named twice. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <string.h>

static const Py_ssize_t MAX_READ_BYTES = 1 << 20; /* The memory of a larger event is measured before it is read. */
static const long long MAX_COUNT = 1LL << 40;     /* `MOST_TOKENS` in events.py. */
enum { UNSAID = -2, NONE = -1 };                  /* Of a count, beside its value. */

typedef struct {
    const char *at;
    Py_ssize_t size; /* -1: not there, or null. */
    int escaped, wide;
} Text;

typedef struct {
    const char *at, *end;
} Cursor;

/* An event, and then the read's events so far. */
typedef struct {
    Text model, text, content, finish;
    PyObject *ids; /* The read's ids so far, for all its events. */
    Py_ssize_t tokens;
    int has_ids, has_choice;
    long long prompt, output, cached;
} Said;

static void spaces(Cursor *c)
{
    while (c->at < c->end && *c->at == ' ')
        c->at++;
}

static int take_word(Cursor *c, const char *word, Py_ssize_t size)
{
    if (c->end - c->at < size || memcmp(c->at, word, (size_t)size))
        return 0;
    c->at += size;
    return 1;
}

#define TAKE(c, word) take_word(c, word, sizeof(word) - 1)

static int take_byte(Cursor *c, char byte)
{
    if (c->at == c->end || *c->at != byte)
        return 0;
    c->at++;
    return 1;
}

static int take_text(Cursor *c, Text *text)
{
    if (!take_byte(c, '"'))
        return 0;
    text->at = c->at;
    text->escaped = text->wide = 0;
    for (; c->at < c->end; c->at++) {
        unsigned char byte = (unsigned char)*c->at;
        if (byte == '"') {
            text->size = c->at++ - text->at;
            return 1;
        }
        if (byte == '\\') {
            c->at++;
            if (c->at == c->end || *c->at == 0 || strchr("\"\\/bfnrt", *c->at) == NULL)
                return 0;
            text->escaped = 1;
        }
        else if (byte < 0x20)
            return 0;
        text->wide |= byte & 0x80;
    }
    return 0;
}

/* A text of plain ASCII. */
static int take_plain(Cursor *c, Text *text)
{
    return take_text(c, text) && !text->escaped && !text->wide;
}

static int take_plain_or_null(Cursor *c, Text *text)
{
    text->size = -1;
    return TAKE(c, "null") || take_plain(c, text);
}

static int take_count(Cursor *c, long long *count)
{
    const char *from = c->at;
    *count = 0;
    while (c->at < c->end && *c->at >= '0' && *c->at <= '9' && c->at - from < 15)
        *count = *count * 10 + (*c->at++ - '0');
    return c->at > from && (*from != '0' || c->at - from == 1) && *count <= MAX_COUNT;
}

static int take_count_or_null(Cursor *c, long long *count)
{
    *count = NONE;
    return TAKE(c, "null") || take_count(c, count);
}

static int skip(Cursor *c)
{
    Text text;
    long long count;
    switch (c->at < c->end ? *c->at : 0) {
    case '"': return take_plain(c, &text);
    case 'n': return TAKE(c, "null");
    case 't': return TAKE(c, "true");
    case 'f': return TAKE(c, "false");
    default: return take_count(c, &count);
    }
}

static int is(const Text *text, const char *word, Py_ssize_t size)
{
    return text->size == size && !memcmp(text->at, word, (size_t)size);
}

typedef struct {
    const char *name;
    Py_ssize_t size;
    int (*take)(Cursor *, Said *);
} Member;

#define MEMBER(name, take) {name, sizeof(name) - 1, take}
#define END {NULL, 0, NULL}

/* Read an object. Members that are not in the table are skipped; one of the table that comes twice is unusual. */
static int take_object(Cursor *c, Said *said, const Member *members)
{
    unsigned seen = 0;
    int number = 0, place;
    Text name;
    if (!take_byte(c, '{'))
        return 0;
    for (spaces(c); !take_byte(c, '}'); spaces(c)) {
        if (number++ && !take_byte(c, ','))
            return 0;
        spaces(c);
        if (!take_plain(c, &name))
            return 0;
        spaces(c);
        if (!take_byte(c, ':'))
            return 0;
        spaces(c);
        for (place = 0; members[place].name != NULL && !is(&name, members[place].name, members[place].size);)
            place++;
        if (members[place].name == NULL ? !skip(c) : seen & 1u << place || !members[place].take(c, said))
            return 0;
        seen |= members[place].name == NULL ? 0 : 1u << place;
    }
    return 1;
}

static int is_utf8(const Text *text)
{
    PyObject *made = PyUnicode_DecodeUTF8(text->at, text->size, NULL);
    if (made == NULL)
        PyErr_Clear();
    Py_XDECREF(made);
    return made != NULL;
}

static int take_spoken(Cursor *c, Text *text)
{
    return TAKE(c, "null") || (take_text(c, text) && (!text->wide || is_utf8(text)));
}

static int take_null(Cursor *c, Said *said) { return TAKE(c, "null"); }
static int take_prompt(Cursor *c, Said *said) { return take_count_or_null(c, &said->prompt); }
static int take_output(Cursor *c, Said *said) { return take_count_or_null(c, &said->output); }
static int take_cached(Cursor *c, Said *said) { return take_count_or_null(c, &said->cached); }
static int take_words(Cursor *c, Said *said) { return take_spoken(c, &said->text); }
static int take_content(Cursor *c, Said *said) { return take_spoken(c, &said->content); }
static int take_finish(Cursor *c, Said *said) { return take_plain_or_null(c, &said->finish); }
static int take_model(Cursor *c, Said *said) { return take_plain_or_null(c, &said->model); }

static int take_kind(Cursor *c, Said *said)
{
    Text kind;
    return take_plain_or_null(c, &kind) && !is(&kind, "error", 5);
}

static int take_index(Cursor *c, Said *said)
{
    long long index;
    return take_count(c, &index) && index == 0;
}

static int take_ids(Cursor *c, Said *said)
{
    long long id;
    if (TAKE(c, "null"))
        return 1;
    if (!take_byte(c, '['))
        return 0;
    said->has_ids = 1;
    spaces(c);
    if (take_byte(c, ']'))
        return 1;
    do {
        spaces(c);
        if (!take_count(c, &id))
            return 0;
        PyObject *made = PyLong_FromLongLong(id);
        int failed = made == NULL || PyList_Append(said->ids, made) < 0;
        Py_XDECREF(made);
        if (failed)
            return 0;
        said->tokens++;
        spaces(c);
    } while (take_byte(c, ','));
    return take_byte(c, ']');
}

static const Member DELTA[] = {
    MEMBER("content", take_content), MEMBER("reasoning_content", take_null), MEMBER("reasoning", take_null), MEMBER("tool_calls", take_null),
    END};
static int take_delta(Cursor *c, Said *said) { return TAKE(c, "null") || take_object(c, said, DELTA); }

static const Member CHOICE[] = {
    MEMBER("token_ids", take_ids), MEMBER("text", take_words), MEMBER("delta", take_delta), MEMBER("finish_reason", take_finish),
    MEMBER("index", take_index), MEMBER("message", take_null), MEMBER("prompt_token_ids", take_null), MEMBER("response_token_ids", take_null),
    END};
static int take_choices(Cursor *c, Said *said)
{
    if (TAKE(c, "null"))
        return 1;
    if (!take_byte(c, '['))
        return 0;
    spaces(c);
    if (take_byte(c, ']'))
        return 1;
    if (!take_object(c, said, CHOICE))
        return 0;
    if (said->text.size <= 0)
        said->text = said->content;
    if (!said->has_ids)
        said->tokens = said->text.size > 0;
    said->has_choice = 1;
    spaces(c);
    return take_byte(c, ']');
}

static const Member DETAILS[] = {MEMBER("cached_tokens", take_cached), END};
static int take_details(Cursor *c, Said *said)
{
    if (TAKE(c, "null"))
        return 1;
    said->cached = NONE;
    return take_object(c, said, DETAILS);
}

static const Member USAGE[] = {
    MEMBER("prompt_tokens", take_prompt), MEMBER("completion_tokens", take_output), MEMBER("prompt_tokens_details", take_details),
    END};
static int take_usage(Cursor *c, Said *said)
{
    if (TAKE(c, "null"))
        return 1;
    said->prompt = said->output = NONE;
    return take_object(c, said, USAGE);
}

static const Member EVENT[] = {
    MEMBER("choices", take_choices), MEMBER("usage", take_usage), MEMBER("model", take_model), MEMBER("object", take_kind),
    MEMBER("error", take_null), MEMBER("timings", take_null), MEMBER("prompt_token_ids", take_null), END};

/* Copy a text with its escapes undone; returns the place behind. */
static char *unescape(char *to, const Text *text)
{
    static const char short_names[] = "bfnrt", short_values[] = "\b\f\n\r\t";
    const char *at = text->at, *end = at + text->size, *found;
    while (at < end) {
        if (*at == '\\') {
            at++;
            found = strchr(short_names, *at);
            *to++ = found == NULL ? *at : short_values[found - short_names];
            at++;
        }
        else
            *to++ = *at++;
    }
    return to;
}

/* Add an event to those before it; returns the place behind its text. */
static char *add_event(Said *all, const Said *event, char *to)
{
    if (event->model.size >= 0)
        all->model = event->model;
    if (event->finish.size > 0)
        all->finish = event->finish;
    all->has_ids |= event->has_ids;
    all->has_choice |= event->has_choice;
    all->tokens += event->tokens;
    if (event->prompt != UNSAID) {
        all->prompt = event->prompt;
        all->output = event->output;
    }
    if (event->cached != UNSAID)
        all->cached = event->cached;
    if (event->text.size <= 0)
        return to;
    if (event->text.escaped)
        return unescape(to, &event->text);
    memcpy(to, event->text.at, (size_t)event->text.size);
    return to + event->text.size;
}

/* Fields of `Completion`. */
enum { MODEL, FINISH_REASON, PROMPT_TOKENS, OUTPUT_TOKENS, CACHED_TOKENS, TOKEN_IDS, DONE, NUM_FIELDS };
static const char *const FIELD_NAMES[] = {"model", "finish_reason", "prompt_tokens", "output_tokens", "cached_tokens",
                                          "token_ids", "done"};
static PyObject *fields[NUM_FIELDS];

/* Set a field to a new reference, and drop that. */
static int set(PyObject *completion, int field, PyObject *value)
{
    int failed = value == NULL ? -1 : PyObject_SetAttr(completion, fields[field], value);
    Py_XDECREF(value);
    return failed;
}

static int set_text(PyObject *completion, int field, const Text *text)
{
    return text->size < 0 ? 0 : set(completion, field, PyUnicode_DecodeUTF8(text->at, text->size, NULL));
}

static int set_count(PyObject *completion, int field, long long count)
{
    if (count == NONE)
        return PyObject_SetAttr(completion, fields[field], Py_None);
    return count == UNSAID ? 0 : set(completion, field, PyLong_FromLongLong(count));
}

static int add_ids(PyObject *completion, PyObject *ids)
{
    PyObject *before = PyObject_GetAttr(completion, fields[TOKEN_IDS]);
    if (before == NULL)
        return -1;
    Py_ssize_t size = before == Py_None ? 0 : PyList_Size(before);
    int failed = before == Py_None ? PyObject_SetAttr(completion, fields[TOKEN_IDS], ids)
                                   : size < 0 ? -1 : PyList_SetSlice(before, size, size, ids);
    Py_DECREF(before);
    return failed;
}

static int set_all(PyObject *completion, const Said *all, int done)
{
    if (set_text(completion, MODEL, &all->model) < 0 || set_text(completion, FINISH_REASON, &all->finish) < 0 ||
        set_count(completion, PROMPT_TOKENS, all->prompt) < 0 ||
        set_count(completion, OUTPUT_TOKENS, all->output) < 0 ||
        set_count(completion, CACHED_TOKENS, all->cached) < 0 || (all->has_ids && add_ids(completion, all->ids) < 0))
        return -1;
    return done ? PyObject_SetAttr(completion, fields[DONE], Py_True) : 0;
}

/* Read the usual events at the beginning of `data`; returns the bytes of them, or -1 with an error. */
static Py_ssize_t read_events(const char *data, Py_ssize_t size, PyObject *ids, PyObject *completion, Said *all,
                              char **text)
{
    static const Text none = {NULL, -1, 0, 0};
    const Said unsaid = {none, none, none, none, ids, 0, 0, 0, UNSAID, UNSAID, UNSAID};
    const char *read = data;
    Cursor c = {data, data + size};
    Py_ssize_t num_ids = 0;
    int done = 0;
    for (*all = unsaid; TAKE(&c, "data: "); read = c.at) {
        Said event = unsaid;
        if (TAKE(&c, "[DONE]\n\n")) {
            done = 1;
            continue;
        }
        if (!take_object(&c, &event, EVENT) || !TAKE(&c, "\n\n"))
            break;
        *text = add_event(all, &event, *text);
        num_ids = PyList_Size(ids);
    }
    /* An event that was unusual behind its ids has left them. */
    if (PyErr_Occurred() || PyList_SetSlice(ids, num_ids, PyList_Size(ids), NULL) < 0)
        return -1;
    return set_all(completion, all, done) < 0 ? -1 : read - data;
}

/* take_usual_events(completion, data, texts) -> (tokens, bytes of `data` that are read) */
static PyObject *take_usual_events(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    Said all;
    char *data;
    Py_ssize_t size, read = -1;
    if (num_args != 3) {
        PyErr_SetString(PyExc_TypeError, "take_usual_events: expected completion, data, texts");
        return NULL;
    }
    if (PyBytes_AsStringAndSize(args[1], &data, &size) < 0)
        return NULL;
    if (size > MAX_READ_BYTES)
        return Py_BuildValue("(ii)", 0, 0);
    PyObject *ids = PyList_New(0);
    char *text = PyMem_Malloc((size_t)size + 1), *end = text;
    if (text == NULL)
        PyErr_NoMemory();
    else if (ids != NULL)
        read = read_events(data, size, ids, args[0], &all, &end);
    if (read >= 0 && all.has_choice) {
        PyObject *made = PyUnicode_DecodeUTF8(text, end - text, NULL);
        if (made == NULL || PyList_Append(args[2], made) < 0)
            read = -1;
        Py_XDECREF(made);
    }
    PyMem_Free(text);
    Py_XDECREF(ids);
    return read < 0 ? NULL : Py_BuildValue("(nn)", all.tokens, read);
}

static PyMethodDef methods[] = {
    {"take_usual_events", (PyCFunction)(void (*)(void))take_usual_events, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "usualevents", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_usualevents(void)
{
    for (int field = 0; field < NUM_FIELDS; field++)
        if (fields[field] == NULL && (fields[field] = PyUnicode_InternFromString(FIELD_NAMES[field])) == NULL)
            return NULL;
    return PyModuleDef_Init(&module);
}
