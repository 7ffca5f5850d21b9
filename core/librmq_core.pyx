# cython: language_level=3, boundscheck=False, wraparound=False, auto_pickle=False, binding=False
"""The compiled core of librmq: what an append and a scan do for a usual record.

A function does the usual case whole. For anything else it has no effect, and its result says so; then librmq runs its
Python code. `librmq.runtime.compiled_core` decides whether this module is used.
"""

import mmap
from threading import get_ident

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_CheckExact, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.dict cimport PyDict_CheckExact, PyDict_GetItem, PyDict_Next, PyDict_Size
from cpython.exc cimport PyErr_Clear
from cpython.list cimport PyList_GET_SIZE, PyList_New, PyList_SET_ITEM
from cpython.long cimport PyLong_CheckExact
from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF, Py_INCREF, Py_XDECREF
from cpython.tuple cimport PyTuple_GET_SIZE
from cpython.unicode cimport PyUnicode_CheckExact, PyUnicode_GET_LENGTH
from libc.stdint cimport INT32_MAX, INT32_MIN, INT64_MAX, int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memchr, memcmp, memcpy
from posix.time cimport CLOCK_REALTIME, clock_gettime, timespec

cdef extern from "Python.h":
    ctypedef struct PyTypeObject:
        object (*tp_alloc)(type made, Py_ssize_t items)
        object (*tp_new)(type made, object arguments, PyObject *keywords)
        void (*tp_free)(void *made)
    const char *PyUnicode_AsUTF8AndSize(object text, Py_ssize_t *size) except NULL
    void *PyUnicode_DATA(object text)
    int PyGC_Disable()
    int PyGC_Enable()
    char *PyByteArray_AS_STRING(object data)
    object PyByteArray_FromStringAndSize(const char *data, Py_ssize_t size)
    int PyByteArray_Resize(object data, Py_ssize_t size) except -1
    bint PyUnicode_IS_COMPACT_ASCII(object text)
    Py_ssize_t Py_REFCNT(PyObject *held)
    object PyObject_CallNoArgs(object called)
    object PyUnicode_DecodeASCII(const char *text, Py_ssize_t size, const char *errors)
    long long PyLong_AsLongLongAndOverflow(object number, int *overflow) except? -1
    object PyObject_Init(PyObject *made, PyTypeObject *type)
    PyObject *class_of "(PyObject *)Py_TYPE"(PyObject *made)
    PyObject *PyList_GET_ITEM(object items, Py_ssize_t at)

cdef extern from *:
    """
    #include <structmember.h>
    static Py_ssize_t rmq_slot(PyObject *descriptor) {  /* where instances keep the value of a slot */
        if (Py_TYPE(descriptor) != &PyMemberDescr_Type)
            return 0;
        PyMemberDef *member = ((PyMemberDescrObject *)descriptor)->d_member;
        return member->type == T_OBJECT_EX ? member->offset : 0;
    }
    #if PY_VERSION_HEX >= 0x030E0000  /* a tuple keeps its hash, and -1 is none */
    #define rmq_forget_hash(made) (((PyTupleObject *)(made))->ob_hash = -1)
    #else
    #define rmq_forget_hash(made) ((void)(made))
    #endif
    #if defined(__GNUC__)
    #define IN_ORDER() __asm__ __volatile__("" ::: "memory")
    #else
    #define IN_ORDER()
    #endif
    static void rmq_put_item(PyObject *made, Py_ssize_t at, PyObject *value) {
        PyObject *before = PyTuple_GET_ITEM(made, at);
        Py_INCREF(value);
        PyTuple_SET_ITEM(made, at, value);
        Py_XDECREF(before);
    }
    static inline void rmq_forget_bytes_hash(PyObject *raw) {
        _Py_COMP_DIAG_PUSH
        _Py_COMP_DIAG_IGNORE_DEPR_DECLS
        ((PyBytesObject *)raw)->ob_shash = -1;
        _Py_COMP_DIAG_POP
    }
    static inline PyObject *rmq_dropped_bytes(PyObject *item, Py_ssize_t size) {  /* to be filled again, if none has them */
        PyObject *raw = PyTuple_GET_ITEM(item, 2);
        if (Py_REFCNT(item) != 1 || Py_REFCNT(raw) != 1 || PyBytes_GET_SIZE(raw) != size)
            return NULL;
        rmq_forget_bytes_hash(raw);
        return raw;
    }
    static inline void rmq_fetch(const uint8_t *at, int64_t size) {  /* into the cache, while other work is done */
    #if defined(__GNUC__)
        const uint8_t *end = at + (size > 4096 ? 4096 : size < 0 ? 0 : size);
        for (; at < end; at += 64)
            __builtin_prefetch(at);
    #endif
    }
    static void rmq_free_by(PyTypeObject *made, destructor dealloc) {  /* its instances are in no cycle: see StoredState */
        made->tp_flags &= ~Py_TPFLAGS_HAVE_GC;
        made->tp_traverse = NULL;
        made->tp_clear = NULL;
        made->tp_free = PyObject_Free;
        made->tp_dealloc = dealloc;
    }
    static inline uint64_t rmq_twos(uint64_t word) {  /* not 0 if one of its bytes is 2 */
        word ^= 0x0202020202020202u;
        return (word - 0x0101010101010101u) & ~word & 0x8080808080808080u;
    }
    static inline const uint8_t *rmq_segment_end(const uint8_t *at, const uint8_t *end, uint64_t *seen) {
        uint64_t word, all = 0;  /* the next byte 2, or the end, and the bits of what was read */
        for (; end - at >= 8; at += 8) {
            memcpy(&word, at, 8);
            all |= word;
            if ((word = rmq_twos(word))) {
    #if defined(__GNUC__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
                *seen |= all;
                return at + (__builtin_ctzll(word) >> 3);
    #else
                break;
    #endif
            }
        }
        for (; at < end && *at != 2; at++)
            all |= *at;
        *seen |= all;
        return at;
    }
    static inline int rmq_put_text(uint8_t *at, const char *text, Py_ssize_t size) {  /* whether it has no byte 2 */
        uint64_t word, found = 0;
        uint32_t first, last;
        Py_ssize_t done = 0;
        if (size >= 8) {
            for (; done + 8 < size; done += 8) {
                memcpy(&word, text + done, 8);
                memcpy(at + done, &word, 8);
                found |= rmq_twos(word);
            }
            memcpy(&word, text + size - 8, 8);  /* some of them again */
            memcpy(at + size - 8, &word, 8);
            return !(found | rmq_twos(word));
        }
        if (size >= 4) {
            memcpy(&first, text, 4);
            memcpy(&last, text + size - 4, 4);
            memcpy(at, &first, 4);
            memcpy(at + size - 4, &last, 4);
            return !rmq_twos((uint64_t)first << 32 | last);
        }
        for (; done < size; done++)
            found |= (at[done] = (uint8_t)text[done]) == 2;
        return !found;
    }
    /* Compilers make eight instructions of stores byte by byte, if many follow. */
    static inline void rmq_put64(uint8_t *at, uint64_t value) {
    #if defined(__GNUC__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
        value = __builtin_bswap64(value);
        memcpy(at, &value, 8);
    #else
        for (int shift = 56; shift >= 0; shift -= 8)
            *at++ = (uint8_t)(value >> shift);
    #endif
    }
    static inline uint64_t rmq_big64(const uint8_t *at) {
    #if defined(__GNUC__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
        uint64_t value;
        memcpy(&value, at, 8);
        return __builtin_bswap64(value);
    #else
        uint64_t value = 0;
        for (int number = 0; number < 8; number++)
            value = value << 8 | at[number];
        return value;
    #endif
    }
    static inline int rmq_is_same(const uint8_t *a, const uint8_t *b, size_t size) {  /* mostly of few bytes */
        uint64_t pair[4];
        if (size < 8 || size > 16)
            return !memcmp(a, b, size);
        memcpy(pair, a, 8);
        memcpy(pair + 1, b, 8);
        memcpy(pair + 2, a + size - 8, 8);  /* some of them again */
        memcpy(pair + 3, b + size - 8, 8);
        return !((pair[0] ^ pair[1]) | (pair[2] ^ pair[3]));
    }
    static inline void rmq_put32(uint8_t *at, uint32_t value) {
    #if defined(__GNUC__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
        value = __builtin_bswap32(value);
        memcpy(at, &value, 4);
    #else
        for (int shift = 24; shift >= 0; shift -= 8)
            *at++ = (uint8_t)(value >> shift);
    #endif
    }
    """
    void rmq_free_by(PyTypeObject *made, void (*dealloc)(PyObject *) noexcept)
    void rmq_forget_bytes_hash(PyObject *raw)
    int rmq_put_text(uint8_t *at, const char *text, Py_ssize_t size) noexcept
    void put32 "rmq_put32" (uint8_t *at, uint32_t value) noexcept nogil
    void put64 "rmq_put64" (uint8_t *at, uint64_t value) noexcept nogil
    const uint8_t *rmq_segment_end(const uint8_t *at, const uint8_t *end, uint64_t *seen) noexcept nogil
    void rmq_fetch(const uint8_t *at, int64_t size) noexcept nogil
    uint64_t rmq_big64(const uint8_t *at) noexcept nogil
    bint rmq_is_same(const uint8_t *a, const uint8_t *b, size_t size) noexcept nogil
    void in_order "IN_ORDER" ()  # the compiler moves or drops no store across it
    void rmq_forget_hash(object made)
    void rmq_put_item(object made, Py_ssize_t at, object value)
    PyObject *rmq_dropped_bytes(PyObject *item, Py_ssize_t size) noexcept
    Py_ssize_t rmq_slot(object descriptor)

cdef extern from "sys/file.h":
    int flock(int descriptor, int operation) nogil
    int LOCK_EX, LOCK_NB, LOCK_UN

cdef extern from "sys/mman.h":
    int madvise(void *begin, size_t size, int advice) nogil

cdef extern from "crc32.h":
    void rmq_crc32_init()
    int rmq_can_fold()
    uint32_t rmq_crc32(const uint8_t *data, size_t size, int folds) nogil
    bint rmq_is_as_written(const uint8_t *record, size_t size, int folds) noexcept nogil

API = 22
"""Compared by librmq at its import. Raised when a function here changes; one that librmq can do without does not raise it."""

cdef int64_t appended = 0, scanned = 0, pulled = 0, checked = 0, derived = 0


def counts():
    """Return how many records each function took, to prove in a test that this code ran."""
    return {"append": appended, "records": scanned, "pull": pulled, "checksums": checked, "derive": derived}

cdef uint32_t MAGIC = 0xDAA320A7, MAGIC_V2 = 0xDAA320AB, UNFINISHED_MAGIC = 0x756E646F
cdef enum:
    FIXED = 91
    HOSTS_V6 = 48
    SCHEDULE_TOPIC_SIZE = 19
    HALF_TOPIC_SIZE = 24
    AT_ONCE = 16
    AHEAD = 2048  # bytes behind the next record that a scan fetches
    GATHERED = 12  # number of the record after this one that a gathering fetches
    TAIL = 128  # bytes that a record has behind its body, about
    MOST_FIELDS = 16
    FETCHED_SLOTS = 16  # number of the key after this one whose slot is fetched
    MOST_ENTRIES = 64  # of a read
    SPARES = 64  # messages that are kept to be filled again
    SPARE_SIZE = 4096  # the most bytes that one of them keeps
    FETCHED = 4  # number of the record after this one that a pull fetches
    REPORTED = 1 << 16  # bytes after which a scan reports them
    SKIPPED = 1 << 24
    MOST_LOOKS = 1024  # looks at the log after which `LogReader._note_looks` releases its pages
    SHORT = 32  # bytes of a part that are copied with what follows it
    HEADER = 88
    ENTRY = 20
    MOST_TAIL = 32897
    MOST_PROPERTIES = 64
    MOST_PROPERTY_BYTES = 32767
    SCRATCH = 1 << 17
    BATCH_SCRATCH = 1 << 20
    BATCH = 256
    KEYS = 4  # number of keys of a record for which there is room at once
    PAGE_STATE = 1  # the places and two values of `librmq.store.engine._append_page`
    PAGE_TAIL = 2
    PAGE_ROOM = 3
    PAGE_WRITING = 4
    PAGE_HOLDER = 7
    PAGE_TAKES = 8
    PAGE_ASLEEP = 11
    PAGE_OPEN = 2
    PAGE_OWNERS = -1
    MOST_TRIES = 64  # to take the lock of the page: some microseconds, as long as an append of another process
    LATER = 4  # number of the message after this one of a batch whose body is fetched

rmq_crc32_init()
cdef int FOLDS = rmq_can_fold()


def crc32(bytes data, int folds=2):
    """Return the CRC-32 of ``data``: by tables (0), by folding (1), or by wide folding, if the processor has that."""
    return rmq_crc32(<const uint8_t *>PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data), min(FOLDS, folds))


def checksums(data, begins, ends):
    """Return the CRC-32 of each part of ``data`` as 32-bit numbers, 0 for a part that is not within it.

    ``begins`` and ``ends`` are arrays of 64-bit numbers. Other threads run meanwhile.
    """
    cdef Py_buffer view, begin_view, end_view
    cdef Py_ssize_t count = len(begins), number
    cdef bytes made = PyBytes_FromStringAndSize(NULL, 4 * count)
    cdef uint32_t *found = <uint32_t *>PyBytes_AS_STRING(made)
    cdef int64_t begin, end
    global checked
    PyObject_GetBuffer(begins, &begin_view, PyBUF_SIMPLE)
    PyObject_GetBuffer(ends, &end_view, PyBUF_SIMPLE)
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        if begin_view.len != 8 * count or end_view.len != 8 * count:
            raise ValueError("begins, ends: expected arrays of one length")
        with nogil:
            for number in range(count):
                begin, end = (<int64_t *>begin_view.buf)[number], (<int64_t *>end_view.buf)[number]
                found[number] = 0
                if 0 <= begin < end <= view.len:
                    found[number] = rmq_crc32(<const uint8_t *>view.buf + begin, end - begin, FOLDS)
    finally:
        PyBuffer_Release(&view)
        PyBuffer_Release(&end_view)
        PyBuffer_Release(&begin_view)
    checked += count
    return made


def advise(buffer, Py_ssize_t begin, Py_ssize_t end, int advice, Py_ssize_t part):
    """Give the system an advice on pages of a mapping, part by part until it refuses one; ``begin`` begins a page.

    Other threads run meanwhile, and can change the mappings of the process between two parts.
    """
    cdef Py_buffer view
    PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE | PyBUF_WRITABLE)
    try:
        end = min(end, view.len)
        with nogil:
            while 0 <= begin < end and part > 0 and not madvise(
                <uint8_t *>view.buf + begin, min(part, end - begin), advice
            ):
                begin += part
    finally:
        PyBuffer_Release(&view)


def gather(data, places, Py_ssize_t size):
    """Return ``size`` bytes of ``data`` from each of ``places`` on, an array of 64-bit numbers, side by side."""
    cdef Py_ssize_t count = len(places), number = 0
    cdef const int64_t *place_at = numbers(places, count)
    cdef bytearray made = PyByteArray_FromStringAndSize(NULL, size * count)
    cdef uint8_t *at = <uint8_t *>PyByteArray_AS_STRING(made)
    cdef const uint8_t *source
    cdef Py_buffer view
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        with nogil:
            while number < count and 0 <= place_at[number] <= view.len - size:
                source = <const uint8_t *>view.buf + place_at[number]
                if size == 8:
                    memcpy(at, source, 8)
                else:
                    if number + GATHERED < count:
                        rmq_fetch(<const uint8_t *>view.buf + place_at[number + GATHERED], size)
                    memcpy(at, source, size)
                at += size
                number += 1
    finally:
        PyBuffer_Release(&view)
    if number < count:
        raise IndexError(f"places: expected ones of {size} bytes of the data, found {place_at[number]}")
    return made


def fields(data, places, bytes ats not None, bytes sizes not None):
    """Return big-endian numbers of 4 or 8 bytes as native ones, field by field: those ``ats`` behind ``places``.

    ``places`` is an array of 64-bit numbers. Other threads run meanwhile.
    """
    cdef Py_ssize_t count = len(places), width = len(ats), number = 0, field, span = 0
    cdef const int64_t *place_at = numbers(places, count)
    cdef const uint8_t *field_at = <const uint8_t *>PyBytes_AS_STRING(ats)
    cdef const uint8_t *size_at = <const uint8_t *>PyBytes_AS_STRING(sizes)
    cdef const uint8_t *source
    cdef void *made_at[MOST_FIELDS]
    cdef list made = []
    cdef Py_buffer view
    if len(sizes) != width or width > MOST_FIELDS or {*sizes} - {4, 8}:
        raise ValueError("sizes: expected 4 or 8 for each field, and at most 16 fields")
    for field in range(width):
        made.append(PyByteArray_FromStringAndSize(NULL, count * size_at[field]))
        made_at[field] = PyByteArray_AS_STRING(made[field])
        span = max(span, <Py_ssize_t>field_at[field] + size_at[field])
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        with nogil:
            while number < count and 0 <= place_at[number] <= view.len - span:
                source = <const uint8_t *>view.buf + place_at[number]
                if number + GATHERED < count:
                    rmq_fetch(<const uint8_t *>view.buf + place_at[number + GATHERED], span)
                for field in range(width):
                    if size_at[field] == 8:
                        (<int64_t *>made_at[field])[number] = big64(source + field_at[field])
                    else:
                        (<uint32_t *>made_at[field])[number] = big32(source + field_at[field])
                number += 1
    finally:
        PyBuffer_Release(&view)
    if number < count:
        raise IndexError(f"places: expected ones of {span} bytes of the data, found {place_at[number]}")
    return made


def frames(data, places, sizes):
    """Return where the bodies and the topics of records end, as 64-bit numbers.

    ``places`` and ``sizes`` are arrays of 64-bit numbers. None if one of the records is not usual and of its size. Other
    threads run meanwhile.
    """
    cdef Py_ssize_t count = len(places), number = 0
    cdef const int64_t *place_at = numbers(places, count)
    cdef const int64_t *size_at = numbers(sizes, count)
    cdef bytearray bodies = PyByteArray_FromStringAndSize(NULL, 8 * count)
    cdef bytearray topics = PyByteArray_FromStringAndSize(NULL, 8 * count)
    cdef int64_t *body_at = <int64_t *>PyByteArray_AS_STRING(bodies)
    cdef int64_t *topic_at = <int64_t *>PyByteArray_AS_STRING(topics)
    cdef const uint8_t *record
    cdef int64_t place, size, later
    cdef uint64_t properties
    cdef Py_buffer view
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        with nogil:
            while number < count:
                place, size = place_at[number], size_at[number]
                if not 0 <= place <= view.len - FIXED or not FIXED <= size <= view.len - place:
                    break
                if number + GATHERED < count:
                    later = place_at[number + GATHERED]
                    rmq_fetch(<const uint8_t *>view.buf + later, FIXED)
                    later += size_at[number + GATHERED] - TAIL
                    rmq_fetch(<const uint8_t *>view.buf + later, TAIL)
                record = <const uint8_t *>view.buf + place
                properties = properties_of(record, size)
                if not properties:
                    break
                body_at[number] = place + 88 + big32(record + 84)
                topic_at[number] = place + properties - 2
                number += 1
    finally:
        PyBuffer_Release(&view)
    return (bodies, topics) if number == count else None


def record_starts(data, int64_t begin, int64_t end):
    """Return the places of records that follow each other from ``begin`` on, as 64-bit numbers, and where they end.

    They end at or after ``end``, or at other bytes. Other threads run meanwhile.
    """
    cdef int64_t place = begin, count = 0
    cdef uint64_t size
    cdef uint32_t magic
    cdef bytearray made
    cdef int64_t *found
    cdef Py_buffer view
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        if begin < 0:
            raise ValueError("begin: expected a place in the data")
        end = min(end, <int64_t>view.len - FIXED + 1)
        made = PyByteArray_FromStringAndSize(NULL, 8 * (max(0, end - begin) // FIXED + 1))
        found = <int64_t *>PyByteArray_AS_STRING(made)
        with nogil:
            while place < end:
                size = big32(<const uint8_t *>view.buf + place)
                magic = big32(<const uint8_t *>view.buf + place + 4)
                if (magic != MAGIC and magic != MAGIC_V2) or size < FIXED or size > <uint64_t>(view.len - place):
                    break
                found[count] = place
                count += 1
                place += <int64_t>size
    finally:
        PyBuffer_Release(&view)
    PyByteArray_Resize(made, 8 * count)
    return made, place


def slices(data, begins, ends):
    """Return the parts of ``data`` side by side: where each begins, and the last one ends, as 32-bit numbers; the bytes.

    ``begins`` and ``ends`` are arrays of 64-bit numbers. Other threads run meanwhile.
    """
    cdef Py_ssize_t count = len(begins), number
    cdef const int64_t *begin_at = numbers(begins, count)
    cdef const int64_t *end_at = numbers(ends, count)
    cdef bytearray offsets = PyByteArray_FromStringAndSize(NULL, 4 * count + 4), made
    cdef int32_t *offset_at = <int32_t *>PyByteArray_AS_STRING(offsets)
    cdef int64_t total = 0, begin, end
    cdef Py_buffer view
    cdef uint8_t *at
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        for number in range(count):
            begin, end = begin_at[number], end_at[number]
            if not 0 <= begin <= end <= view.len or total + (end - begin) > INT32_MAX:
                raise ValueError("begins, ends: expected parts of the data, of 2 GiB at most")
            offset_at[number] = total
            total += end - begin
        offset_at[count] = total
        made = PyByteArray_FromStringAndSize(NULL, total + SHORT)
        at = <uint8_t *>PyByteArray_AS_STRING(made)
        with nogil:
            for number in range(count):
                begin, end = begin_at[number], end_at[number]
                if end - begin <= SHORT and begin + SHORT <= view.len:
                    memcpy(at + offset_at[number], <const uint8_t *>view.buf + begin, SHORT)  # quicker than its own size
                else:
                    memcpy(at + offset_at[number], <const uint8_t *>view.buf + begin, end - begin)
    finally:
        PyBuffer_Release(&view)
    PyByteArray_Resize(made, total)
    return offsets, made


def property_values(data, begins, ends, bytes name not None):
    """Return where in ``data`` the values of one property begin and end, as 64-bit numbers; equal where there is none.

    ``begins`` and ``ends`` are those of each record's properties, arrays of 64-bit numbers. None if these have a byte
    that is not ASCII. Other threads run meanwhile.
    """
    cdef Py_ssize_t count = len(begins), number = 0, size = PyBytes_GET_SIZE(name)
    cdef const int64_t *begin_at = numbers(begins, count)
    cdef const int64_t *end_at = numbers(ends, count)
    cdef bytearray first = PyByteArray_FromStringAndSize(NULL, 8 * count)
    cdef bytearray last = PyByteArray_FromStringAndSize(NULL, 8 * count)
    cdef int64_t *first_at = <int64_t *>PyByteArray_AS_STRING(first)
    cdef int64_t *last_at = <int64_t *>PyByteArray_AS_STRING(last)
    cdef const char *wanted = PyBytes_AS_STRING(name)
    cdef const uint8_t *at
    cdef const uint8_t *until
    cdef const uint8_t *end
    cdef uint64_t seen = 0
    cdef Py_buffer view
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        with nogil:
            while number < count and 0 <= begin_at[number] <= end_at[number] <= view.len:
                if number + GATHERED < count:
                    rmq_fetch(<const uint8_t *>view.buf + begin_at[number + GATHERED], TAIL)
                at, end = <const uint8_t *>view.buf + begin_at[number], <const uint8_t *>view.buf + end_at[number]
                first_at[number] = last_at[number] = 0
                while at < end:
                    until = rmq_segment_end(at, end, &seen)
                    if until - at > size + 1 and at[size] == 1 and not memcmp(at, wanted, size):  # the last one counts
                        first_at[number] = at + size + 1 - <const uint8_t *>view.buf
                        last_at[number] = until - <const uint8_t *>view.buf
                    at = until + 1
                number += 1
    finally:
        PyBuffer_Release(&view)
    if number < count:
        raise ValueError("begins, ends: expected parts of the data")
    return None if seen & 0x8080808080808080 else (first, last)


cdef inline uint32_t big32(const uint8_t *at) noexcept nogil:
    return <uint32_t>at[0] << 24 | <uint32_t>at[1] << 16 | <uint32_t>at[2] << 8 | at[3]


cdef inline int64_t big64(const uint8_t *at) noexcept nogil:
    return <int64_t>(<uint64_t>big32(at) << 32 | big32(at + 4))


cdef class Items:
    """The items of one file of the log, as `librmq.message.frames.items` yields them.

    ``start`` is the physical offset of the file's first byte. ``unusual`` returns the item at a place of the file where
    no usual record is, or raises why there is none. ``advance`` is called with the bytes that were read.
    """

    cdef object buffer, unusual, advance
    cdef int64_t start, place, end, file_size, reported
    cdef bint check_body
    cdef PyObject *found[AT_ONCE]  # owned here: those up to ``at`` serve again, if the caller has dropped them
    cdef int at, count

    def __init__(
        self, buffer, int64_t start, int64_t place, int64_t end, int64_t file_size, bint check_body, unusual, advance
    ):
        if place < 0:
            raise ValueError("place: expected one in the file")
        self.buffer, self.unusual, self.advance = buffer, unusual, advance
        self.start, self.place, self.end, self.file_size, self.check_body = start, place, end, file_size, check_body
        self.reported = place

    def __dealloc__(self):
        cdef int number
        for number in range(AT_ONCE):
            Py_XDECREF(self.found[number])

    def __iter__(self):
        return self

    def __next__(self):
        cdef int64_t begin
        while self.at >= self.count:
            begin = self.place
            if begin < self.end and self.find():
                if self.count < AT_ONCE or self.place - self.reported >= REPORTED:
                    self.report()  # here, because a caller can end behind any record
                continue
            self.report()
            if begin >= self.end:
                raise StopIteration
            item = self.unusual(begin)
            self.place = self.file_size if item[2] is None else begin + <int64_t>item[1]
            return item
        item = <object>self.found[self.at]
        self.at += 1
        return item

    def skip(self):
        """Go on behind the usual records that follow; return the place of the last of them (-1 for none), and its end."""
        cdef Py_buffer view
        cdef const uint8_t *at
        cdef int64_t last = -1, begin = self.place
        cdef uint64_t size, limit
        global scanned
        if self.at < self.count:
            raise ValueError("skip: expected before the first item, or after an unusual one")
        PyObject_GetBuffer(self.buffer, &view, PyBUF_SIMPLE)
        try:
            limit = min(self.end, view.len)
            while <uint64_t>self.place + FIXED <= limit and self.place - begin < SKIPPED:
                at = <const uint8_t *>view.buf + self.place
                size = big32(at)
                if size < FIXED or size > limit - self.place or not is_sound(at, size, self.check_body):
                    break
                last = self.place
                self.place += size
                scanned += 1
        finally:
            PyBuffer_Release(&view)
        self.report()
        return last, self.place

    cdef int report(self) except -1:
        if self.place > self.reported:
            self.advance(self.place - self.reported)
            self.reported = self.place
        return 0

    cdef int find(self) except -1:
        """Find the usual records that follow, up to one that is unusual, damaged or not whole; return their number."""
        cdef Py_buffer view
        cdef const uint8_t *at
        cdef uint64_t size, limit
        cdef PyObject *dropped
        cdef bytes raw
        cdef uint64_t last_size = 0  # as an object, because many records have one size
        cdef int count = 0
        py_size = None
        global scanned
        self.at = self.count = 0
        PyObject_GetBuffer(self.buffer, &view, PyBUF_SIMPLE)
        cdef int collects = PyGC_Disable()  # it could run Python code, while the mapping must not be closed
        try:
            limit = min(self.end, view.len)
            while count < AT_ONCE and <uint64_t>self.place + FIXED <= limit:
                at = <const uint8_t *>view.buf + self.place
                size = big32(at)
                if size < FIXED or size > limit - self.place or big32(at + 4) != MAGIC:
                    break
                # The copy is checked, because another process can change the mapping.
                dropped = NULL if self.found[count] == NULL else rmq_dropped_bytes(self.found[count], size)
                if dropped == NULL:
                    raw = PyBytes_FromStringAndSize(<const char *>at, size)
                else:
                    raw = <bytes>dropped
                    memcpy(PyBytes_AS_STRING(raw), at, size)
                if limit - self.place > 2 * size + AHEAD:
                    rmq_fetch(at + size + AHEAD, size)
                if not is_sound(<const uint8_t *>PyBytes_AS_STRING(raw), size, self.check_body):
                    break
                if size != last_size:
                    py_size, last_size = size, size
                if self.found[count] != NULL and Py_REFCNT(self.found[count]) == 1:
                    item = <object>self.found[count]
                    rmq_forget_hash(item)
                    rmq_put_item(item, 0, self.start + self.place)
                    rmq_put_item(item, 1, py_size)
                    rmq_put_item(item, 2, raw)
                else:
                    item = (self.start + self.place, py_size, raw)
                    Py_XDECREF(self.found[count])
                    Py_INCREF(item)
                    self.found[count] = <PyObject *>item
                count += 1
                self.count = count
                self.place += size
        finally:
            PyBuffer_Release(&view)
            if collects:
                PyGC_Enable()
        scanned += count
        return count


cdef inline uint64_t properties_of(const uint8_t *record, uint64_t size) noexcept nogil:
    """Return where the properties of a usual record begin, 0 if bytes are none."""
    cdef uint64_t body_size = big32(record + 84), topic_end
    if (
        big32(record) != size or body_size > size - FIXED or big32(record + 4) != MAGIC
        or big32(record + 36) & HOSTS_V6
    ):
        return 0
    topic_end = 89 + body_size + record[88 + body_size]
    if record[88 + body_size] > 127 or topic_end + 2 > size or record[topic_end] > 127:
        return 0
    return topic_end + 2 if <uint64_t>(record[topic_end] << 8 | record[topic_end + 1]) == size - topic_end - 2 else 0


cdef bint is_sound(const uint8_t *record, uint64_t size, bint check_body) noexcept:
    """Return whether bytes are a usual record that is sound."""
    cdef uint64_t body_size
    if not properties_of(record, size):
        return False
    body_size = big32(record + 84)
    return record[88 + body_size] != SCHEDULE_TOPIC_SIZE and (
        not check_body or (
            (not body_size or rmq_crc32(record + 88, body_size, FOLDS) & 0x7FFFFFFF == big32(record + 8))
            and rmq_is_as_written(record, size, FOLDS)
        )
    )


# --------------------------------------------------------------------------------------------------------------- append

shapes = {}
"""By the names of properties in the order of a dict: the bytes before each value in stored order, and for each of them
the place of its value in the dict. librmq fills and bounds it."""

cdef dict _shapes = shapes
cdef object _mmap = mmap.mmap
cdef object UNSET = object(), ZERO = 0, SCHEDULE_TOPIC = "SCHEDULE_TOPIC_XXXX"
# The records of the running append. The interpreter lock protects them, because nothing in between gives it up.
cdef uint8_t scratch[SCRATCH]
cdef uint8_t batch_scratch[BATCH_SCRATCH]
cdef int64_t last_ms = -1
cdef object last_time = None  # as an object, because many records have one time


cdef struct Piece:
    const char *before
    Py_ssize_t size
    Py_ssize_t number


cdef struct Shape:
    Py_ssize_t count, stored  # a delayed message is stored with its topic and queue, behind its own properties
    PyObject *names[MOST_PROPERTIES]
    Piece pieces[MOST_PROPERTIES]
    Py_ssize_t delay, real_topic, real_queue
    bint waits


cdef struct Values:
    const Shape *shape
    PyObject *values[MOST_PROPERTIES]


# The last shape of each number of properties, and what keeps its bytes and names.
cdef Shape kept_shapes[8]
cdef Shape no_shape
cdef list kept = [None] * 8


cdef class LogState:
    """What appends need of a `CommitLog`, which inherits from it."""

    cdef public int64_t end, sure, _file_start, _looks, _looked_at
    cdef public object _buffer, last_write


cdef class DispatchState:
    """What appends need of a `Dispatcher`, which inherits from it."""

    cdef public int64_t writing_at, followed, due
    cdef public list records
    cdef public set unflushed


cdef class LaneState:
    """What appends need of a `Lane`, which inherits from it."""

    cdef public int64_t next_queue_offset
    cdef public bytes topic_field
    cdef public object topic, queue, queue_id, prefix_hash
    cdef object plain_queue  # the queue, once it was seen to have no extension


cdef class AlarmState:
    """What appends need of a `Housekeeping`, which inherits from it."""

    cdef public int64_t alarm


cdef class TurnState:
    """What appends need of `SharedAppends`, which inherits from it."""

    cdef public bint is_open, _has_turn, _drops
    cdef public int64_t _sure, adopted_end
    cdef public object _page
    cdef public dict _numbers
    cdef public list _untold


cdef struct Fields:
    uint32_t sys_flag, reconsume_times, flag
    int64_t born, prepared  # born: -1 for the time of the append
    uint8_t[8] born_host, store_host


cdef class AppendState:
    """What appends need of an `Appender`, which inherits from it, and the usual append."""

    cdef public bint accepts, is_sync
    cdef public object parts, _host, lock, message_class, result_class, now_ms, system_now_ms, manual_now_ms
    cdef public object is_locked
    cdef public AlarmState _housekeeping
    cdef public LogState log
    cdef public DispatchState dispatcher
    cdef public TurnState shared
    cdef public dict lanes, _delays
    cdef public int64_t _max_body_size, _compress_from, batch_fixed_size
    cdef int64_t last_batch  # bytes of the last batch, which the next one is taken to have
    cdef Py_ssize_t topic_at, body_at, flag_at, properties_at, delays_at
    cdef LaneState last_lane
    cdef object last_result  # of a single append; the next one takes it if only this field has it
    cdef public object host_bytes
    cdef object last_host, last_host_bytes  # a sender's address, and its form in a record

    def append_batch_usual(self, messages, queue_id=0, *, wait=True, **fields):
        """Append a usual batch here, any other by `Appender.append_batch`."""
        if type(messages) is list and not fields:
            results = _append_batch(self, messages, queue_id)
            if results is not None:
                if self.dispatcher.due >= BATCH:
                    self.write_due()
                last = results[len(results) - 1]
                if self.is_sync or last[0] + last[1] >= self._housekeeping.alarm:
                    self._acknowledge(last[0] + last[1], wait)
                return results
        return self.append_batch(messages, queue_id, wait=wait, **fields)

    def append_waiting(self, list messages not None, list befores not None, tuple places not None):
        """Append usual messages that waited, each to its own queue; return what reports each, or None before any effect.

        Their properties have the layout of `librmq.delay.Layout`.
        """
        cdef list reports = _append_waiting(self, messages, befores, places)
        if reports is not None:
            self.finish_append(self.log.end, False)
        return reports

    def append_usual(
        self, message, queue_id=0, *, born_timestamp_ms=None, born_host=None, store_host=None, sys_flag=ZERO,
        reconsume_times=ZERO, prepared_transaction_offset=ZERO, properties_raw=None, wait=True, is_copy=False
    ):
        """Append a usual message here, any other by `Appender.append`."""
        cdef int64_t end = 0
        cdef Fields fields
        if (
            properties_raw is None and (store_host is None or store_host == self._host)
            and usual_fields(
                self, &fields, born_timestamp_ms, born_host, sys_flag, reconsume_times, prepared_transaction_offset
            )
        ):
            result = _append(self, message, queue_id, &fields, &end, False)
            if end < 0:
                self.advance()
                end = 0
                result = _append(self, message, queue_id, &fields, &end, True)  # Python code ran, so all is looked at again
            if result is not None:
                if self.is_sync or end >= self._housekeeping.alarm:
                    self._acknowledge(end, wait)
                return result
        return self.append(
            message, queue_id, born_timestamp_ms=born_timestamp_ms, born_host=born_host, store_host=store_host,
            sys_flag=sys_flag, reconsume_times=reconsume_times, properties_raw=properties_raw, wait=wait,
            prepared_transaction_offset=prepared_transaction_offset, is_copy=is_copy,
        )


no_shape.delay = -1


cdef bint keep_shape(Shape *shape, tuple names):
    """Keep the stored form of properties with these names; return whether librmq has it."""
    cdef tuple stored = names
    cdef list pieces
    cdef Py_ssize_t count = PyTuple_GET_SIZE(names), at
    cdef bytes before
    if "DELAY" in names:
        stored = tuple(dict.fromkeys(names + ("REAL_TOPIC", "REAL_QID")))
    pieces = _shapes.get(stored)
    if pieces is None:
        return False
    kept[count & 7] = names, pieces
    shape.count, shape.stored = count, PyTuple_GET_SIZE(stored)
    shape.delay = shape.real_topic = shape.real_queue = -1
    shape.waits = "WAIT" in names
    for at in range(shape.stored):
        name = stored[at]
        if at < count:
            shape.names[at] = <PyObject *>name
        if name == "DELAY":
            shape.delay = at
        elif name == "REAL_TOPIC":
            shape.real_topic = at
        elif name == "REAL_QID":
            shape.real_queue = at
        before, number = pieces[at]
        shape.pieces[at].before, shape.pieces[at].size = PyBytes_AS_STRING(before), PyBytes_GET_SIZE(before)
        shape.pieces[at].number = number
    return True


cdef bint find_values(dict properties, Values *found):
    """Find the values of properties and their stored form; return whether both are usual."""
    cdef PyObject *name
    cdef Py_ssize_t place = 0, count = PyDict_Size(properties), number = 0
    cdef Shape *shape = &kept_shapes[count & 7]
    cdef bint is_kept = shape.count == count
    if count > MOST_PROPERTIES:
        return False
    while PyDict_Next(properties, &place, &name, &found.values[number]):
        # Names of another type could run Python code when they are compared.
        if not PyUnicode_CheckExact(<object>found.values[number]) or not PyUnicode_CheckExact(<object>name):
            return False
        is_kept &= shape.names[number] == name
        number += 1
    found.shape = shape if count else &no_shape
    return is_kept or count == 0 or keep_shape(shape, tuple(properties))


cdef Py_ssize_t put_properties(const Values *found, uint8_t *at) except -2:
    """Write properties in stored form; return their size, -1 if they are unusual."""
    cdef Py_ssize_t number, size, total = 0
    cdef const char *text
    cdef const Piece *piece
    for number in range(found.shape.stored):
        piece = &found.shape.pieces[number]
        if total + piece.size > MOST_PROPERTY_BYTES:
            return -1
        rmq_put_text(at + total, piece.before, piece.size)
        total += piece.size
        value = <object>found.values[piece.number]
        if PyUnicode_IS_COMPACT_ASCII(value):
            text, size = <const char *>PyUnicode_DATA(value), PyUnicode_GET_LENGTH(value)
        else:
            try:
                text = PyUnicode_AsUTF8AndSize(value, &size)
            except UnicodeEncodeError:
                return -1
        if total + size > MOST_PROPERTY_BYTES or not rmq_put_text(at + total, text, size):
            return -1
        total += size
    return total


cdef bint find_slots(AppendState self):
    """Find where messages keep their parts; return whether they do so in slots."""
    made = vars(self.message_class)
    self.topic_at, self.body_at, self.flag_at = rmq_slot(made["topic"]), rmq_slot(made["body"]), rmq_slot(made["flag"])
    self.properties_at, self.delays_at = rmq_slot(made["properties"]), rmq_slot(made["_delays"])
    return self.topic_at and self.body_at and self.flag_at and self.properties_at and self.delays_at


cdef inline object part(object owner, Py_ssize_t at):
    """Return what a slot of an object has, UNSET for nothing."""
    cdef PyObject *found = (<PyObject **>(<char *><PyObject *>owner + at))[0]
    return UNSET if found == NULL else <object>found


cdef bint is_usual(AppendState self, object message, object topic):
    """Return whether a message has the usual types; its topic must be ``topic`` unless that is None."""
    if type(message) is not self.message_class or not (self.topic_at or find_slots(self)):
        return False
    own, body, flag = part(message, self.topic_at), part(message, self.body_at), part(message, self.flag_at)
    if (
        part(message, self.delays_at) is not None or not PyUnicode_CheckExact(own) or not PyBytes_CheckExact(body)
        or not PyDict_CheckExact(part(message, self.properties_at)) or not PyLong_CheckExact(flag)
        or PyBytes_GET_SIZE(body) > self._max_body_size
    ):
        return False
    return topic is None or own is topic or own == topic


cdef LaneState usual_lane(AppendState self, object topic, object queue_id):
    """Return the lane of a queue, None if it is unusual or not open."""
    cdef LaneState lane = self.last_lane
    if not PyLong_CheckExact(queue_id) or not PyBytes_CheckExact(self._host) or PyBytes_GET_SIZE(self._host) != 8:
        return None
    if lane is None or lane.topic is not topic or lane.queue_id is not queue_id:  # a queue keeps its lane
        lane = self.lanes.get((topic, queue_id))
    if lane is None or (lane.plain_queue is not lane.queue and not is_plain(lane)):
        return None
    self.last_lane = lane
    return lane


cdef bint is_plain(LaneState lane):
    """Return whether records of a lane are usual, and note it."""
    if lane.queue.ext is not None or PyBytes_GET_SIZE(lane.topic_field) > 128:
        return False
    lane.plain_queue = lane.queue
    return True


cdef bint usual_fields(
    AppendState self, Fields *fields, object born, object born_host, object sys_flag, object times, object prepared
):
    """Take the fields of a record that a broker sets; return whether they are usual."""
    cdef int overflow[4]
    if not PyBytes_CheckExact(self._host) or PyBytes_GET_SIZE(self._host) != 8:
        return False
    memcpy(fields.store_host, PyBytes_AS_STRING(self._host), 8)
    memcpy(fields.born_host, fields.store_host, 8)
    if born_host is not None:
        if born_host is not self.last_host:
            host = self.host_bytes(born_host) if type(born_host) is tuple else born_host
            if not PyBytes_CheckExact(host) or PyBytes_GET_SIZE(host) != 8:
                return False
            self.last_host, self.last_host_bytes = born_host, host
        memcpy(fields.born_host, PyBytes_AS_STRING(self.last_host_bytes), 8)
    fields.sys_flag, fields.reconsume_times, fields.born, fields.prepared = 0, 0, -1, 0
    if born is not None:
        if not PyLong_CheckExact(born):
            return False
        fields.born = PyLong_AsLongLongAndOverflow(born, overflow)
        if fields.born < 0 or overflow[0]:
            return False
    if sys_flag is ZERO and times is ZERO and prepared is ZERO:
        return True
    if not PyLong_CheckExact(sys_flag) or not PyLong_CheckExact(times) or not PyLong_CheckExact(prepared):
        return False
    cdef long long flags = PyLong_AsLongLongAndOverflow(sys_flag, overflow)
    cdef long long count = PyLong_AsLongLongAndOverflow(times, overflow + 1)
    fields.prepared = PyLong_AsLongLongAndOverflow(prepared, overflow + 2)
    fields.sys_flag, fields.reconsume_times = <uint32_t>flags, <uint32_t>count
    # Without the bits of hosts, and of records that are in no queue.
    return (
        not (overflow[0] or overflow[1] or overflow[2]) and 0 <= flags <= 0x7FFFFFFF and not flags & (48 | 4)
        and 0 <= count <= 0x7FFFFFFF
    )


cdef uint32_t hashed_ascii(uint32_t code, const uint8_t *text, Py_ssize_t size, uint8_t *seen) noexcept:
    """Return Java's hash of a text that continues one with the hash ``code``; ``seen`` gets the bits of its bytes."""
    cdef const uint8_t *end = text + size
    while end - text >= 4:
        code = 923521 * code + (29791 * text[0] + 961 * text[1] + 31 * text[2] + text[3])  # powers of 31
        seen[0] |= text[0] | text[1] | text[2] | text[3]
        text += 4
    while text < end:
        code = 31 * code + text[0]
        seen[0] |= text[0]
        text += 1
    return code


cdef inline int64_t index_hash(uint32_t code) noexcept:
    cdef int64_t signed = <int32_t>code
    return (-signed if signed < 0 else signed) & 0x7FFFFFFF


cdef class Block:
    """The keys of many records as columns of 64-bit numbers."""

    cdef bytearray places, times, owners, hashes
    cdef int64_t *place_at
    cdef int64_t *time_at
    cdef int64_t *owner_at
    cdef int64_t *hash_at
    cdef Py_ssize_t room, keys

    def __cinit__(self, Py_ssize_t count):
        self.places = PyByteArray_FromStringAndSize(NULL, 8 * count)
        self.times = PyByteArray_FromStringAndSize(NULL, 8 * count)
        self.owners, self.hashes = bytearray(), bytearray()
        self.place_at = <int64_t *>PyByteArray_AS_STRING(self.places)
        self.time_at = <int64_t *>PyByteArray_AS_STRING(self.times)
        self.make_room(KEYS * count + 64)

    cdef int make_room(self, Py_ssize_t room) except -1:
        self.room = room
        PyByteArray_Resize(self.owners, 8 * room)
        PyByteArray_Resize(self.hashes, 8 * room)
        self.owner_at = <int64_t *>PyByteArray_AS_STRING(self.owners)
        self.hash_at = <int64_t *>PyByteArray_AS_STRING(self.hashes)

    cdef bint put_keys(self, Py_ssize_t number, object prefix_hash, object unique, object keys) except -1:
        """Add the keys of a record; return whether they are ASCII."""
        cdef uint32_t prefix = <uint32_t><int64_t>prefix_hash
        cdef const uint8_t *text
        cdef const uint8_t *end
        cdef const uint8_t *until
        cdef uint8_t seen = 0
        if unique:
            text = <const uint8_t *>PyBytes_AS_STRING(<bytes?>unique)
            self.put_key(number, hashed_ascii(prefix, text, PyBytes_GET_SIZE(unique), &seen))
        if keys:
            text = <const uint8_t *>PyBytes_AS_STRING(<bytes?>keys)
            end = text + PyBytes_GET_SIZE(keys)
            while text < end:
                until = <const uint8_t *>memchr(text, 32, end - text)
                until = end if until == NULL else until
                if until > text:
                    self.put_key(number, hashed_ascii(prefix, text, until - text, &seen))
                text = until + 1
        return seen <= 127

    cdef inline int put_key(self, Py_ssize_t number, uint32_t code) except -1:
        if self.keys == self.room:
            self.make_room(2 * self.room)
        self.owner_at[self.keys], self.hash_at[self.keys] = number, index_hash(code)
        self.keys += 1

    cdef tuple columns(self):
        self.make_room(self.keys)
        return self.places, self.times, self.owners, self.hashes


cdef int64_t clock_ms(AppendState self) except -3:
    """Return the time of a manual clock, -1 for the system's clock, -2 for any other clock."""
    if self.now_ms is self.system_now_ms:
        return -1
    if self.now_ms is not self.manual_now_ms:
        return -2
    cdef int64_t now = self.now_ms()
    return now if now >= 0 else -2


cdef object _append(AppendState self, object message, object queue_id, Fields *fields, int64_t *end, bint advanced):
    """Append a usual message and return the result, or None before any effect.

    While many entries and keys are due, each append advances them once; if that is due first, ``end`` becomes -1.
    """
    cdef int64_t now = clock_ms(self)  # first, because it may run Python code
    if now == -2 or not is_usual(self, message, None) or not PyLong_CheckExact(queue_id):
        return None
    if PyBytes_GET_SIZE(part(message, self.body_at)) >= self._compress_from:
        return None
    # Nothing from here on gives up the interpreter, so a lock that is free remains free.
    cdef int collects = PyGC_Disable()  # it could run Python code
    try:
        if PyObject_CallNoArgs(self.is_locked) is True:
            return None
        if self.shared is not None and self.shared.is_open:
            return _append_in_turn(self, message, queue_id, fields, now, end, advanced)
        return _write(self, message, queue_id, fields, now, end, advanced, NULL)
    finally:
        if collects:
            PyGC_Enable()


cdef object _append_in_turn(
    AppendState self, object message, object queue_id, Fields *fields, int64_t now, int64_t *end, bint advanced
):
    """The same to a store to which other processes append, behind what they have written.

    It is left to the Python code while one of them has the lock of the page, was killed in a write, or has written
    where this process has not prepared the log, or while the thread that tells of their messages has to be woken.
    """
    cdef TurnState turn = self.shared
    cdef Py_buffer view, offsets
    cdef int64_t *numbers
    cdef int descriptor, tries = 0
    cdef int64_t end_before = self.log.end, adopted_before = turn.adopted_end, tail
    page, result = turn._page, None
    if turn._has_turn or turn._drops or not self.accepts:
        return None
    descriptor = page._descriptor
    PyObject_GetBuffer(page.numbers, &view, PyBUF_SIMPLE | PyBUF_WRITABLE)
    PyObject_GetBuffer(page.offsets, &offsets, PyBUF_SIMPLE | PyBUF_WRITABLE)
    numbers = <int64_t *>view.buf
    try:
        while flock(descriptor, LOCK_EX | LOCK_NB):
            if tries == MOST_TRIES:
                return None
            tries += 1  # not by giving up the processor, which could last, and this thread has the interpreter
        tail = numbers[PAGE_TAIL]
        if (
            numbers[PAGE_WRITING] or numbers[PAGE_ROOM] < 0 or numbers[PAGE_STATE] != PAGE_OPEN
            or not end_before <= tail <= turn._sure or (tail > end_before and numbers[PAGE_ASLEEP])
        ):
            flock(descriptor, LOCK_UN)
            return None
        numbers[PAGE_HOLDER] = page._process
        numbers[PAGE_TAKES] += 1
        numbers[PAGE_WRITING] = PAGE_OWNERS
        # If the write fails, this is a turn whose end a signal has interrupted.
        page.holds, turn._has_turn, self.log.sure = True, True, turn._sure
        if tail > end_before:
            turn._untold.append((end_before, tail))
            self.log.end = turn.adopted_end = tail
        result = _write(self, message, queue_id, fields, now, end, advanced, <int64_t *>offsets.buf)
        if result is not None:
            in_order()
            numbers[PAGE_TAIL] = self.log.end
        elif tail > end_before:  # left to the Python code
            self.log.end, turn.adopted_end = end_before, adopted_before
            turn._untold.pop()
        self.log.sure, turn._has_turn, page.holds = -1, False, False
        in_order()
        numbers[PAGE_WRITING] = 0
        flock(descriptor, LOCK_UN)
    finally:
        PyBuffer_Release(&offsets)
        PyBuffer_Release(&view)
    return result


cdef object _append_batch(AppendState self, list messages, object queue_id):
    """The same for a batch, under the lock."""
    cdef int64_t now = clock_ms(self)
    cdef object lock = self.lock, mutex = lock.mutex, results = None
    cdef LaneState lane
    cdef int collects
    if now == -2 or not messages or not is_usual(self, messages[0], None):
        return None
    if mutex.acquire(False) is not True:
        lock.yield_to_waiters()  # often housekeeping has it for a moment, and waits for the interpreter
        now = clock_ms(self)
        if mutex.acquire(False) is not True:
            return None
    try:
        lock.owner = get_ident()
        if self.accepts and self.log.sure - self.log.end < self.last_batch:
            self.make_room(self.last_batch)
        if now == -2 or not messages or not is_usual(self, messages[0], None):  # Python code ran
            return None
        topic = part(messages[0], self.topic_at)
        lane = usual_lane(self, topic, queue_id)
        if lane is None or self.dispatcher.due >= BATCH:
            return None
        collects = PyGC_Disable()
        try:
            results = _write_batch(self, lane, messages, topic, now)
        finally:
            if collects:
                PyGC_Enable()
    finally:
        lock.owner = 0
        mutex.release()
    return results


cdef int64_t pack(
    LaneState lane, const Fields *fields, const uint8_t *body, Py_ssize_t body_size, Py_ssize_t raw_size,
    int64_t queue_offset, int64_t physical_offset, int64_t now, uint8_t *record, uint8_t *tail
) except -2:
    """Pack the header of a record, and at ``tail`` what follows the body, and return the record's size.

    The caller has put ``raw_size`` bytes of properties behind the topic and two bytes. Every append packs here.
    """
    cdef Py_ssize_t topic_size = PyBytes_GET_SIZE(lane.topic_field)
    cdef int64_t size = HEADER + body_size + topic_size + 2 + raw_size
    cdef uint32_t queue_id = lane.queue_id
    memcpy(tail, PyBytes_AS_STRING(lane.topic_field), topic_size)
    tail[topic_size], tail[topic_size + 1] = raw_size >> 8, raw_size & 255
    put32(record, size)
    put32(record + 4, MAGIC)
    put32(record + 8, rmq_crc32(body, body_size, FOLDS) & 0x7FFFFFFF)
    put32(record + 12, queue_id)
    put32(record + 16, fields.flag)
    put64(record + 20, queue_offset)
    put64(record + 28, physical_offset)
    put32(record + 36, fields.sys_flag)
    put64(record + 40, now if fields.born < 0 else fields.born)
    memcpy(record + 48, fields.born_host, 8)
    put64(record + 56, now)
    memcpy(record + 64, fields.store_host, 8)
    put32(record + 72, fields.reconsume_times)
    put64(record + 76, fields.prepared)
    put32(record + 84, body_size)
    return size


cdef int64_t pack_message(
    AppendState self, LaneState lane, object message, const Values *found, Fields *fields, int64_t queue_offset,
    int64_t physical_offset, int64_t now, uint8_t *record, uint8_t *tail
) except -2:
    """Do so for a message; return -1 if its properties or its flag are unusual."""
    cdef int overflow = 0
    cdef long long flag = PyLong_AsLongLongAndOverflow(part(message, self.flag_at), &overflow)
    cdef Py_ssize_t raw_size = put_properties(found, tail + PyBytes_GET_SIZE(lane.topic_field) + 2)
    if raw_size < 0 or overflow or flag != <int32_t>flag:
        return -1
    body, fields.flag = part(message, self.body_at), <uint32_t>flag
    return pack(
        lane, fields, <const uint8_t *>PyBytes_AS_STRING(body), PyBytes_GET_SIZE(body), raw_size, queue_offset,
        physical_offset, now, record, tail
    )


cdef object time_now(int64_t *now):
    """Set a time that is -1 to the system's; return it as an object."""
    cdef timespec time
    global last_ms, last_time
    if now[0] < 0:
        clock_gettime(CLOCK_REALTIME, &time)
        now[0] = <int64_t>time.tv_sec * 1000 + time.tv_nsec // 1000000
    if now[0] != last_ms:
        last_time, last_ms = now[0], now[0]
    return last_time


cdef bint can_write(AppendState self, int64_t size):
    """Return whether ``size`` bytes can just be copied to the log's end, and noted."""
    cdef LogState log = self.log
    if not self.accepts or self.dispatcher.writing_at >= 0:
        return False
    return type(log._buffer) is _mmap and size <= log.sure - log.end and log.end >= log._file_start


cdef uint8_t *end_of(LogState log, int64_t size, Py_buffer *view) except NULL:
    """Return where the log ends in its file, for ``size`` bytes, which `can_write` allowed; the caller releases it."""
    cdef int64_t at = log.end - log._file_start
    PyObject_GetBuffer(log._buffer, view, PyBUF_SIMPLE | PyBUF_WRITABLE)
    if at + size > view.len:
        PyBuffer_Release(view)
        raise ValueError("log: expected room in its file")
    return <uint8_t *>view.buf + at


cdef inline void put_mark(uint8_t *place, int64_t size) noexcept:
    """Write the mark of the Python code before ``size`` bytes, whose first eight replace it at last."""
    put32(place, <uint32_t>size)
    put32(place + 4, UNFINISHED_MAGIC)
    in_order()


cdef object copy_in(LogState log, object begin, const uint8_t *data, int64_t size, bint many):
    """Copy records to the end of the log, ``begin``, which `can_write` allowed; many with the mark of the Python code."""
    cdef Py_buffer view
    cdef uint8_t *place = end_of(log, size, &view)
    if many and size > 8:
        put_mark(place, size)
        memcpy(place + 8, data + 8, size - 8)
        in_order()
        memcpy(place, data, 8)
    else:
        memcpy(place, data, size)
    PyBuffer_Release(&view)
    log.last_write = begin
    log.end += size


cdef object copy_batch_in(AppendState self, list messages, object begin, int64_t total):
    """The same for the messages of a batch, with their bodies between what `batch_scratch` has of their records."""
    cdef Py_buffer view
    cdef uint8_t *first = end_of(self.log, total, &view)
    cdef uint8_t *place = first
    cdef const uint8_t *kept = batch_scratch
    cdef Py_ssize_t size, skipped = 8
    put_mark(place, total)
    for message in messages:
        body = part(message, self.body_at)
        size = PyBytes_GET_SIZE(body)
        memcpy(place + skipped, kept + skipped, HEADER - skipped)
        memcpy(place + HEADER, PyBytes_AS_STRING(body), size)
        memcpy(place + HEADER + size, kept + HEADER, big32(kept) - size - HEADER)
        place += big32(kept)
        kept += big32(kept) - size
        skipped = 0
    in_order()
    memcpy(first, batch_scratch, 8)
    PyBuffer_Release(&view)
    self.log.last_write = begin
    self.log.end += total


cdef LaneState delay_lane(AppendState self, Values *found):
    """Name the delay of a message as it is stored, and return the lane in which it waits, None if it is unusual."""
    cdef tuple delay = self._delays.get(<object>found.values[found.shape.delay])
    if delay is None or delay[0] <= 0:
        return None
    level, name = delay
    found.values[found.shape.delay] = <PyObject *>name  # which `_delays` keeps
    return usual_lane(self, SCHEDULE_TOPIC, level - 1)


cdef object _write(
    AppendState self, object message, object queue_id, Fields *fields, int64_t now, int64_t *end, bint advanced,
    int64_t *shared_offsets
):
    """Write the record, and count it, while the lock is free.

    ``shared_offsets`` has the next offsets of queues to which other processes append, which are read and written there.
    """
    cdef DispatchState dispatcher = self.dispatcher
    cdef LaneState lane
    cdef int64_t *shared_offset = NULL
    cdef int64_t size, physical_offset = self.log.end, queue_offset
    cdef Values found
    global appended
    body = part(message, self.body_at)
    if (
        PyBytes_GET_SIZE(body) > SCRATCH - HEADER - 130 - MOST_PROPERTY_BYTES
        or not find_values(part(message, self.properties_at), &found)
    ):
        return None
    if found.shape.delay < 0:
        lane = usual_lane(self, part(message, self.topic_at), queue_id)
    else:
        topic, queue_text = part(message, self.topic_at), str(queue_id)
        found.values[found.shape.real_topic] = <PyObject *>topic
        found.values[found.shape.real_queue] = <PyObject *>queue_text
        lane = delay_lane(self, &found)
    if lane is None:
        return None
    # First everything that can fail.
    queue_offset = lane.next_queue_offset
    if shared_offsets != NULL:
        number = self.shared._numbers.get(lane)
        if number is not None:
            shared_offset = shared_offsets + <Py_ssize_t>number
            queue_offset = shared_offset[0]
    py_now = time_now(&now)
    memcpy(scratch + HEADER, PyBytes_AS_STRING(body), PyBytes_GET_SIZE(body))
    size = pack_message(
        self, lane, message, &found, fields, queue_offset, physical_offset, now, scratch,
        scratch + HEADER + PyBytes_GET_SIZE(body)
    )
    if size < 0 or not can_write(self, size):
        return None
    if not advanced and dispatcher.due >= BATCH:
        end[0] = -1
        return None
    py_offset = physical_offset
    result = new_result(self, True, py_offset, size, queue_offset, py_now, self._host)
    dispatcher.writing_at = physical_offset  # the next append repairs what a failing step leaves
    copy_in(self.log, py_offset, scratch, size, False)
    lane.next_queue_offset = queue_offset + 1
    if shared_offset != NULL:
        shared_offset[0] = lane.next_queue_offset
    dispatcher.due += 1
    dispatcher.writing_at = -1
    appended += 1
    end[0] = physical_offset + size
    return result


cdef inline void fetch_later(AppendState self, list messages, Py_ssize_t number, Py_ssize_t body_size) noexcept:
    """Fetch into the cache what messages after this one need; their bodies are taken to be as long as the last one."""
    cdef PyObject *later
    if number + 2 * LATER < PyList_GET_SIZE(messages):
        rmq_fetch(<const uint8_t *>PyList_GET_ITEM(messages, number + 2 * LATER), 1)
        later = PyList_GET_ITEM(messages, number + LATER)
        if type(<object>later) is self.message_class:
            later = (<PyObject **>(<char *>later + self.body_at))[0]
            rmq_fetch(<const uint8_t *>later, body_size + 64)


cdef object _write_batch(AppendState self, LaneState lane, list messages, object topic, int64_t now):
    """Write the records side by side, and count them."""
    cdef DispatchState dispatcher = self.dispatcher
    cdef int64_t total = 0, size, encoded = 0, queue_offset = lane.next_queue_offset, physical_offset = self.log.end
    cdef int64_t last_size = -1
    cdef Py_ssize_t number = 0, count = PyList_GET_SIZE(messages), body_size = 0
    cdef list results = []
    cdef uint8_t *record = batch_scratch
    cdef Values found
    cdef Fields fields
    global appended
    if not can_write(self, 0) or not usual_fields(self, &fields, None, None, ZERO, ZERO, ZERO):
        return None
    py_now = time_now(&now)
    py_size = None  # as an object, because many records have one size
    for message in messages:
        fetch_later(self, messages, number, body_size)
        if (
            not is_usual(self, message, topic)
            or HEADER + 130 + MOST_PROPERTY_BYTES > BATCH_SCRATCH - (record - batch_scratch)
            or not find_values(part(message, self.properties_at), &found)
            or found.shape.delay >= 0 or found.shape.waits
        ):
            return None
        py_offset = physical_offset + total
        size = pack_message(
            self, lane, message, &found, &fields, queue_offset + number, physical_offset + total, now, record,
            record + HEADER
        )
        if size < 0:
            return None
        encoded += size - HEADER - PyBytes_GET_SIZE(lane.topic_field) - 2 + self.batch_fixed_size
        if size != last_size:
            py_size, last_size = size, size
        results.append(new_result(self, False, py_offset, py_size, queue_offset + number, py_now, self._host))
        body_size = PyBytes_GET_SIZE(part(message, self.body_at))
        record += size - body_size
        total += size
        number += 1
    self.last_batch = total
    if encoded > self._max_body_size or not can_write(self, total):
        return None
    dispatcher.writing_at = physical_offset
    copy_batch_in(self, messages, physical_offset, total)
    lane.next_queue_offset = queue_offset + count
    dispatcher.due += count
    dispatcher.writing_at = -1
    appended += count
    return results


cdef object _append_waiting(AppendState self, list messages, list befores, tuple places):
    """Append messages that waited, and return what reports each, or None before any effect."""
    cdef int64_t now = clock_ms(self)
    if now == -2 or self.dispatcher.due >= BATCH:
        return None
    cdef int collects = PyGC_Disable()
    try:
        if PyObject_CallNoArgs(self.is_locked) is True:
            return None
        return _write_waiting(self, messages, befores, places, now)
    finally:
        if collects:
            PyGC_Enable()


cdef struct Span:
    const char *at
    Py_ssize_t size


cdef bint find_spans(const uint8_t *raw, Py_ssize_t size, list befores, Span *spans):
    """Find the values of stored properties.

    Return whether they have exactly these names, in this order, with ASCII values that are not empty.
    """
    cdef Py_ssize_t at = 0, number, before_size
    cdef uint8_t seen = 0
    cdef bytes before
    for number in range(PyList_GET_SIZE(befores)):
        before = befores[number]
        before_size = PyBytes_GET_SIZE(before)
        if before_size > size - at or memcmp(raw + at, PyBytes_AS_STRING(before), before_size):
            return False
        at += before_size
        spans[number].at = <const char *>raw + at
        while at < size and raw[at] != 2:
            seen |= raw[at]
            at += 1
        spans[number].size = <const char *>raw + at - spans[number].at
        if not spans[number].size:
            return False
    return at == size and seen <= 127


cdef LaneState own_lane(AppendState self, const Span *topic, const Span *queue):
    """Return the lane of the queue that a message waits for, None if it is unusual or not open."""
    cdef int64_t queue_id = 0
    cdef Py_ssize_t at
    if topic.size == SCHEDULE_TOPIC_SIZE or queue.size > 9 or (
        topic.size == HALF_TOPIC_SIZE and not memcmp(topic.at, b"RMQ_SYS_TRANS_HALF_TOPIC", HALF_TOPIC_SIZE)
    ):
        return None
    for at in range(queue.size):
        if not 48 <= queue.at[at] <= 57:
            return None
        queue_id = 10 * queue_id + queue.at[at] - 48
    return usual_lane(self, PyUnicode_DecodeASCII(topic.at, topic.size, NULL), queue_id)


cdef object _write_waiting(AppendState self, list messages, list befores, tuple places, int64_t now):
    """Write the records side by side, and count them, while the lock is free."""
    cdef DispatchState dispatcher = self.dispatcher
    cdef int64_t total = 0, size, queue_offset = 0, physical_offset = self.log.end
    cdef Py_ssize_t count = PyList_GET_SIZE(messages), number, earlier, topic_size, topic, queue
    cdef uint64_t begin, body_size, raw_size
    cdef list lanes = [], reports = []
    cdef LaneState lane
    cdef const uint8_t *raw
    cdef uint8_t *record
    cdef Span spans[MOST_PROPERTIES]
    cdef Span last_topic, last_queue
    cdef Fields fields
    global appended
    topic, queue = places
    number = PyList_GET_SIZE(befores)
    if (
        not count or not can_write(self, 0) or number > MOST_PROPERTIES or topic < 0 or queue < 0
        or max(topic, queue) >= number
    ):
        return None
    py_now = time_now(&now)
    lane = None
    for number in range(count):
        message = messages[number]
        if type(message) is not stored_class or not PyBytes_CheckExact((<StoredState>message).raw):
            return None
        data = (<StoredState>message).raw
        raw, size = <const uint8_t *>PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data)
        if size < FIXED or raw[39] & 4 or raw[40] & 128:  # a record that is in no queue, or has no usual born time
            return None
        begin = properties_of(raw, size)
        if not begin or not find_spans(raw + begin, size - begin, befores, spans):
            return None
        if (
            lane is None or spans[topic].size != last_topic.size or spans[queue].size != last_queue.size
            or memcmp(spans[topic].at, last_topic.at, last_topic.size)
            or memcmp(spans[queue].at, last_queue.at, last_queue.size)
        ):
            lane = own_lane(self, &spans[topic], &spans[queue])
            if lane is None:
                return None
            queue_offset = lane.next_queue_offset
            for earlier in range(number):
                queue_offset += lanes[earlier] is lane
        last_topic, last_queue = spans[topic], spans[queue]  # the caller keeps their bytes
        body_size, raw_size, topic_size = big32(raw + 84), size - begin, PyBytes_GET_SIZE(lane.topic_field)
        if HEADER + body_size + topic_size + 2 + raw_size > BATCH_SCRATCH - total:
            return None
        record = batch_scratch + total
        memcpy(record + HEADER, raw + HEADER, body_size)
        memcpy(record + HEADER + body_size + topic_size + 2, raw + begin, raw_size)
        fields.flag, fields.sys_flag, fields.reconsume_times = big32(raw + 16), big32(raw + 36), big32(raw + 72)
        fields.born, fields.prepared = big64(raw + 40), big64(raw + 76)
        memcpy(fields.born_host, raw + 48, 8)
        memcpy(fields.store_host, raw + 64, 8)
        size = pack(
            lane, &fields, raw + HEADER, body_size, raw_size, queue_offset, physical_offset + total, now, record,
            record + HEADER + body_size
        )
        py_offset = physical_offset + total
        host = PyBytes_FromStringAndSize(<const char *>raw + 64, 8)
        result = new_result(self, False, py_offset, size, queue_offset, py_now, host)
        lanes.append(lane)
        reports.append((message, lane.topic, lane.queue_id, result))
        total += size
        queue_offset += 1
    if not can_write(self, total):
        return None
    dispatcher.writing_at = physical_offset
    copy_in(self.log, physical_offset, batch_scratch, total, True)
    for number in range(count):
        lane = lanes[number]
        lane.next_queue_offset += 1
    dispatcher.due += count
    dispatcher.writing_at = -1
    appended += count
    return reports


cdef object new_result(
    AppendState self, bint alone, object physical_offset, object size, int64_t queue_offset, object now, object host
):
    """Return a named tuple of these fields without a call of its class; ``alone``, the last one if no caller has it."""
    cdef object result
    if alone and Py_REFCNT(<PyObject *>self.last_result) == 1:
        result = self.last_result
    else:
        result = (<PyTypeObject *>self.result_class).tp_alloc(<type>self.result_class, 5)
    rmq_forget_hash(result)
    rmq_put_item(result, 0, physical_offset)
    rmq_put_item(result, 1, size)
    rmq_put_item(result, 2, queue_offset)
    rmq_put_item(result, 3, now)
    rmq_put_item(result, 4, host)
    if alone:
        self.last_result = result
    return result


# ----------------------------------------------------------------------------------------------------------------- keys


def key_hashes(list records not None):
    """Return places, times, records of keys and hashes of keys as bytes of 64-bit numbers, or None."""
    cdef Py_ssize_t count = PyList_GET_SIZE(records), number
    cdef Block block = Block(count)
    cdef tuple record
    for number in range(count):
        record = records[number]
        place, time, prefix_hash, unique, keys = record
        block.place_at[number], block.time_at[number] = place, time
        if not block.put_keys(number, prefix_hash, unique, keys):
            return None
    return block.columns()


cdef const int64_t *numbers(object array, Py_ssize_t count) except? NULL:
    """Return the 64-bit numbers of an array that the caller keeps, for use until Python code runs."""
    cdef Py_buffer view
    PyObject_GetBuffer(array, &view, PyBUF_SIMPLE)
    PyBuffer_Release(&view)
    if view.len != 8 * count:
        raise ValueError("expected arrays of one length")
    return <const int64_t *>view.buf


def spread(places, times, owners, int64_t end):
    """Return place and time of each key's record as bytes, or None if a place is before ``end`` or the one before it."""
    cdef Py_ssize_t keys = len(owners), count = len(places), at
    cdef bytes found = PyBytes_FromStringAndSize(NULL, 8 * keys), found_times = PyBytes_FromStringAndSize(NULL, 8 * keys)
    cdef int64_t *found_at = <int64_t *>PyBytes_AS_STRING(found)
    cdef int64_t *found_time_at = <int64_t *>PyBytes_AS_STRING(found_times)
    cdef const int64_t *place_at = numbers(places, count)
    cdef const int64_t *time_at = numbers(times, count)
    cdef const int64_t *owner_at = numbers(owners, keys)
    for at in range(keys):
        if not 0 <= owner_at[at] < count or place_at[owner_at[at]] < end:
            return None
        end = found_at[at] = place_at[owner_at[at]]
        found_time_at[at] = time_at[owner_at[at]]
    return found, found_times


def put_entries(
    buffer, int64_t max_slots, int64_t number, physical, timestamps, hashes, int64_t begin_ms, int64_t first_seconds
):
    """Write entries of an index file and the slots that lead to them; return how many slots led to none before.

    ``number`` is that of the first entry, ``first_seconds`` its time.
    """
    cdef Py_buffer view
    cdef int64_t keys = len(hashes), at, slot, previous, seconds, fresh = 0
    cdef uint8_t *entry
    cdef uint8_t *slot_at
    if type(buffer) is not _mmap:
        raise TypeError("buffer: expected a mapping")
    cdef const int64_t *physical_at = numbers(physical, keys)
    cdef const int64_t *time_at = numbers(timestamps, keys)
    cdef const int64_t *hash_at = numbers(hashes, keys)
    PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE | PyBUF_WRITABLE)
    try:
        if max_slots <= 0 or number < 0 or 40 + 4 * max_slots + 20 * (number + keys) > view.len:
            raise ValueError("entries: expected room for them")
        entry = <uint8_t *>view.buf + 40 + 4 * max_slots + 20 * number
        for at in range(keys):
            if hash_at[at] < 0:
                raise ValueError("hashes: expected none below zero")
            if at + FETCHED_SLOTS < keys:  # slots are anywhere in the file
                slot = <uint64_t>hash_at[at + FETCHED_SLOTS] % <uint64_t>max_slots
                rmq_fetch(<uint8_t *>view.buf + 40 + 4 * slot, 1)
            slot = hash_at[at] % max_slots
            slot_at = <uint8_t *>view.buf + 40 + 4 * slot
            previous = <int32_t>big32(slot_at)
            if not 0 < previous <= number + at:
                previous = 0
                fresh += 1
            seconds = 0
            if at == 0:
                seconds = first_seconds
            elif begin_ms > 0:
                seconds = (time_at[at] - begin_ms) // 1000
                seconds = 0 if seconds < 0 else 0x7FFFFFFF if seconds > 0x7FFFFFFF else seconds
            put32(entry, <uint32_t>hash_at[at])
            put64(entry + 4, physical_at[at])
            put32(entry + 12, <uint32_t>seconds)
            put32(entry + 16, <uint32_t>previous)
            put32(slot_at, <uint32_t>(number + at))
            entry += 20
    finally:
        PyBuffer_Release(&view)
    return fresh


# ---------------------------------------------------------------------------------------------------------- derivation

cdef struct Texts:  # where they begin in what follows a body, and their sizes: -1 for one that is not there
    Py_ssize_t topic_size, unique, unique_size, keys, keys_size, tags, tags_size
    Py_ssize_t level  # of a record that waits for a delay, 0 for any other


cdef inline bint find_texts(const uint8_t *tail, Py_ssize_t size, Py_ssize_t levels, Texts *found) noexcept:
    """Find the topic and the properties that a usual record's entry and keys are made of; return whether it is one."""
    cdef Py_ssize_t topic_size = tail[0], begin = topic_size + 3, at, part_size, delay = -1, delay_size = -1
    cdef bint waits = topic_size == SCHEDULE_TOPIC_SIZE < size and not memcmp(tail + 1, b"SCHEDULE_TOPIC_XXXX", 19)
    cdef const uint8_t *mark
    if (
        topic_size > 127 or waits and not levels or begin > size or tail[begin - 2] > 127
        or (tail[begin - 2] << 8 | tail[begin - 1]) != size - begin
    ):
        return False
    found.topic_size, found.level = topic_size, 0
    found.unique_size = found.keys_size = found.tags_size = found.unique = found.keys = found.tags = -1
    while begin < size:
        mark = <const uint8_t *>memchr(tail + begin, 2, size - begin)
        at = size if mark == NULL else mark - tail
        part_size = at - begin
        if part_size >= 9 and not memcmp(tail + begin, b"UNIQ_KEY\1", 9):
            found.unique, found.unique_size = begin + 9, part_size - 9
        elif part_size >= 5 and not memcmp(tail + begin, b"KEYS\1", 5):
            found.keys, found.keys_size = begin + 5, part_size - 5
        elif part_size >= 5 and not memcmp(tail + begin, b"TAGS\1", 5):
            found.tags, found.tags_size = begin + 5, part_size - 5
        elif waits and part_size >= 6 and not memcmp(tail + begin, b"DELAY\1", 6):
            delay, delay_size = begin + 6, part_size - 6
        begin = at + 1
    if waits:
        if not 1 <= delay_size <= 2 or not 49 <= tail[delay] <= 57 or not 48 <= tail[delay + delay_size - 1] <= 57:
            return False
        found.level = tail[delay] - 48 if delay_size == 1 else 10 * (tail[delay] - 48) + tail[delay + 1] - 48
        found.level = min(found.level, levels)
    return found.unique_size and found.keys_size and found.tags_size  # an empty one needs the careful search


cdef inline uint64_t copy_parts(
    const uint8_t *data, uint64_t place, uint64_t limit, int64_t address, uint32_t unusual_flags, uint8_t *head,
    uint8_t *tail, Py_ssize_t *tail_size
) noexcept:
    """Copy a record's header and what follows its body; return its size, 0 if it is unusual or names another place.

    Copies are looked at, because another process can change the mapping.
    """
    cdef uint64_t size, body_size
    if place + FIXED > limit:
        return 0
    memcpy(head, data + place, HEADER)
    size, body_size = big32(head), big32(head + 84)
    if (
        size < FIXED or size > limit - place or body_size > size - FIXED or size - body_size - HEADER > MOST_TAIL
        or big32(head + 4) != MAGIC or big32(head + 36) & unusual_flags or big64(head + 28) != address
    ):
        return 0
    tail_size[0] = size - body_size - HEADER
    memcpy(tail, data + place + HEADER + body_size, tail_size[0])
    return size


cdef inline int64_t code_of(
    const uint8_t *head, const uint8_t *tail, const Texts *found, tuple delays_ms, uint8_t *seen
) except? -1:
    """Return the tags code of a record's entry; ``seen`` gets the bits of its text."""
    if found.level:
        return big64(head + 56) + <int64_t>delays_ms[found.level - 1]
    return <int32_t>hashed_ascii(0, tail + found.tags, found.tags_size, seen) if found.tags_size > 0 else 0


cdef inline bytes text_at(const uint8_t *tail, Py_ssize_t at, Py_ssize_t size):
    return PyBytes_FromStringAndSize(<const char *>tail + at, size) if size >= 0 else None


cdef inline void put_entry(uint8_t *at, int64_t physical_offset, int64_t size, int64_t code) noexcept:
    put64(at, physical_offset)
    put32(at + 8, size)
    put64(at + 12, <uint64_t>code)


cdef bint are_few(LogState log, int64_t place):
    """Return whether the log ends behind at most so many records from ``place`` on as are taken one by one."""
    cdef Py_buffer view
    cdef Py_ssize_t count = 0
    cdef uint32_t size = FIXED
    if type(log._buffer) is not _mmap or place < log._file_start:
        return False
    PyObject_GetBuffer(log._buffer, &view, PyBUF_SIMPLE)
    while count < AT_ONCE and FIXED <= size and place < log.end and place + 4 - log._file_start <= view.len:
        size = big32(<const uint8_t *>view.buf + place - log._file_start)
        place += size
        count += 1
    PyBuffer_Release(&view)
    return place == log.end


cdef struct Run:  # of records of one queue
    uint8_t entries[ENTRY * AT_ONCE]
    Py_ssize_t count
    int64_t first, end  # the first queue offset, and the physical offset behind the last record


cdef bint put_run(DispatchState dispatcher, LaneState lane, const Run *run, list keys) except -1:
    """Write the entries of adjacent records, and collect their keys; return False, without effect, without room."""
    if not run.count:
        return True
    queue, first = lane.queue, run.first
    if queue.max_offset != first or queue.has_room(run.count) is not True:
        return False
    dispatcher.unflushed.add(queue)
    queue.append_many(first, PyBytes_FromStringAndSize(<const char *>run.entries, ENTRY * run.count))
    # Nothing from here on runs Python code, so a signal comes before all of it, or behind.
    dispatcher.records.extend(keys)
    lane.next_queue_offset = max(lane.next_queue_offset, run.first + run.count)
    dispatcher.followed = run.end
    return True


def follow(
    DispatchState dispatcher not None, LogState log not None, dict lanes not None, uint32_t unusual_flags,
    tuple delays_ms not None
):
    """Dispatch the last records of the log, if they are few, while they are usual, and the next ones of queues with room.

    Return whether all of them were. ``lanes`` are by topic and queue id in a record's form.
    """
    cdef Py_buffer view
    cdef uint8_t head[HEADER]
    cdef uint8_t tail[MOST_TAIL]
    cdef uint8_t seen = 0
    cdef Texts found
    cdef Run run
    cdef int64_t place = dispatcher.followed, limit, size, code
    cdef Py_ssize_t tail_size = 0
    cdef LaneState lane, last = None
    cdef list keys = []
    global derived
    run.count = 0
    if not are_few(log, place):
        return False
    while place < log.end:
        PyObject_GetBuffer(log._buffer, &view, PyBUF_SIMPLE)
        limit = min(log.end - log._file_start, <int64_t>view.len)
        size = copy_parts(
            <const uint8_t *>view.buf, place - log._file_start, limit, place, unusual_flags, head, tail, &tail_size
        )
        PyBuffer_Release(&view)
        if not size or not find_texts(tail, tail_size, PyTuple_GET_SIZE(delays_ms), &found):
            break
        code = code_of(head, tail, &found, delays_ms, &seen)
        name = PyBytes_FromStringAndSize(<const char *>tail + 1, found.topic_size), <int32_t>big32(head + 12)
        lane = lanes.get(name)
        if seen > 127 or lane is None or (lane.plain_queue is not lane.queue and not is_plain(lane)):
            break
        if lane is not last or run.count == AT_ONCE or big64(head + 20) != run.first + run.count:
            if not put_run(dispatcher, last, &run, keys):
                return False
            last, keys = lane, []
            run.first, run.count = big64(head + 20), 0
        put_entry(run.entries + ENTRY * run.count, place, size, code)
        keys.append((
            place, big64(head + 56), lane.prefix_hash, text_at(tail, found.unique, found.unique_size),
            text_at(tail, found.keys, found.keys_size),
        ))
        run.count += 1
        run.end = place = place + size
        derived += 1
    return put_run(dispatcher, last, &run, keys) and dispatcher.followed == log.end


def derive(
    buffer, int64_t start, int64_t place, int64_t end, Py_ssize_t most, uint32_t unusual_flags, bint check_body,
    tuple delays_ms
):
    """Return what the usual records of a log file define, from ``place`` on, up to ``most`` of them.

    ``start`` is the physical offset of the file's first byte. The result is the place behind the last one; for each
    queue its topic, queue id, first queue offset and packed entries; and places, times, records of keys and hashes of
    keys as bytes of 64-bit numbers. A record is unusual if its texts are not ASCII, if it does not name its own place,
    if it does not continue the count of its queue, or if, with ``check_body``, its body does not match its checksum. One
    that waits has a level of ``delays_ms``.
    """
    cdef Py_buffer view
    cdef Py_ssize_t room = 4 * most + 64, count = 0, keys = 0, number = -1, at, tail_size, begin, stop, kept
    cdef Texts texts
    cdef bytearray places = bytearray(8 * most), times = bytearray(8 * most), packed = bytearray(20 * most)
    cdef bytearray owners = bytearray(8 * room), hashes = bytearray(8 * room)
    cdef bytearray numbers_of = bytearray(8 * most), following = bytearray(8 * most), counted = bytearray(8 * most)
    cdef int64_t *place_at = <int64_t *>PyByteArray_AS_STRING(places)
    cdef int64_t *time_at = <int64_t *>PyByteArray_AS_STRING(times)
    cdef uint8_t *packed_at = <uint8_t *>PyByteArray_AS_STRING(packed)
    cdef int64_t *owner_at = <int64_t *>PyByteArray_AS_STRING(owners)
    cdef int64_t *hash_at = <int64_t *>PyByteArray_AS_STRING(hashes)
    cdef int64_t *number_at = <int64_t *>PyByteArray_AS_STRING(numbers_of)
    cdef int64_t *next_at = <int64_t *>PyByteArray_AS_STRING(following)
    cdef int64_t *count_at = <int64_t *>PyByteArray_AS_STRING(counted)
    cdef uint8_t head[HEADER]
    cdef uint8_t tail[MOST_TAIL]
    cdef uint8_t topic[128]
    cdef uint8_t seen
    cdef uint64_t record_size, body_size, limit
    cdef int64_t queue_offset, queue_id, last_queue = -1
    cdef uint32_t prefix = 0
    cdef int64_t code
    cdef Py_ssize_t last_topic_size = -1, topic_size
    cdef dict found = {}
    cdef list queues = [], made = []
    cdef bytes entries
    global derived
    if not 0 <= place <= end:
        raise ValueError("place: expected one in the file")
    PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE)
    cdef int collects = PyGC_Disable()  # it could run Python code, while the mapping must not be closed
    try:
        limit = min(end, view.len)
        while count < most:
            record_size = copy_parts(
                <const uint8_t *>view.buf, place, limit, start + place, unusual_flags, head, tail, &tail_size
            )
            if not record_size:
                break
            body_size = big32(head + 84)
            if not find_texts(tail, tail_size, PyTuple_GET_SIZE(delays_ms), &texts):
                break
            topic_size = texts.topic_size
            if check_body and body_size and (
                rmq_crc32(<const uint8_t *>view.buf + place + HEADER, body_size, FOLDS) & 0x7FFFFFFF != big32(head + 8)
            ):
                break
            if check_body and not rmq_is_as_written(<const uint8_t *>view.buf + place, record_size, FOLDS):
                break
            queue_id, queue_offset = <int32_t>big32(head + 12), big64(head + 20)
            seen = 0
            if topic_size != last_topic_size or queue_id != last_queue or memcmp(topic, tail + 1, topic_size):
                prefix = hashed_ascii(0, tail + 1, topic_size, &seen)
                prefix = 31 * prefix + 35  # "#"
                if seen > 127:
                    break
                last_topic_size, last_queue = topic_size, queue_id
                memcpy(topic, tail + 1, topic_size)
                name = (PyBytes_FromStringAndSize(<const char *>tail + 1, topic_size), queue_id)
                known = found.get(name)
                if known is None:
                    number = len(queues)
                    found[name] = number
                    queues.append((name[0], queue_id, queue_offset))
                    next_at[number] = queue_offset
                else:
                    number = known
            if next_at[number] != queue_offset:
                break
            code = code_of(head, tail, &texts, delays_ms, &seen)
            kept = keys
            if texts.unique_size > 0 and keys < room:
                owner_at[keys] = count
                hash_at[keys] = index_hash(hashed_ascii(prefix, tail + texts.unique, texts.unique_size, &seen))
                keys += 1
            begin, stop = texts.keys, texts.keys + texts.keys_size
            for at in range(texts.keys, stop + 1 if texts.keys_size > 0 else texts.keys):
                if at < stop and tail[at] != 32:
                    continue
                if at > begin:
                    if keys < room:
                        owner_at[keys] = count
                        hash_at[keys] = index_hash(hashed_ascii(prefix, tail + begin, at - begin, &seen))
                    keys += 1
                begin = at + 1
            if seen > 127 or keys >= room:
                keys = kept
                break
            place_at[count], time_at[count], number_at[count] = start + place, big64(head + 56), number
            put_entry(packed_at + 20 * count, start + place, record_size, code)
            next_at[number] += 1
            count_at[number] += 1
            count += 1
            place += record_size
        for number in range(len(queues)):  # from here on, the place behind the last entry of each queue
            entries = PyBytes_FromStringAndSize(NULL, 20 * count_at[number])
            next_at[number] = <int64_t>PyBytes_AS_STRING(entries)
            if count_at[number]:
                made.append((*queues[number], entries))
        for at in range(count):
            memcpy(<void *>next_at[number_at[at]], packed_at + 20 * at, 20)
            next_at[number_at[at]] += 20
    finally:
        PyBuffer_Release(&view)
        if collects:
            PyGC_Enable()
    derived += count
    return place, made, places[: 8 * count], times[: 8 * count], owners[: 8 * keys], hashes[: 8 * keys]


# ----------------------------------------------------------------------------------------------------------------- pull

cdef struct Queue:
    uint8_t topic[128]  # with its length before it
    uint64_t topic_size
    uint32_t queue_id


cdef int find_queue(object topic, object queue_id, Queue *queue) except -1:
    """Take the name of a queue; one that no usual record has gets a length that none has."""
    cdef int overflow
    cdef Py_ssize_t size
    cdef const char *text = PyUnicode_AsUTF8AndSize(topic, &size)
    cdef long long number = PyLong_AsLongLongAndOverflow(queue_id, &overflow)
    queue.topic_size, queue.queue_id, queue.topic[0] = 1, <uint32_t>number, 255
    if size <= 127 and not overflow and <int32_t>number == number:
        queue.topic_size, queue.topic[0] = size + 1, size
        memcpy(queue.topic + 1, text, size)
    return 0


cdef inline bint is_of_queue(
    const uint8_t *record, uint64_t size, int64_t place, int64_t queue_offset, const Queue *queue
) noexcept:
    """Return whether bytes are a usual record at this place of the log and of a queue, and its body is sound."""
    cdef uint64_t body_at = HEADER, body_size, tail_at
    if size < FIXED or (
        (rmq_big64(record) ^ (size << 32 | MAGIC)) | (rmq_big64(record + 20) ^ <uint64_t>queue_offset)
        | (rmq_big64(record + 28) ^ <uint64_t>place) | (big32(record + 12) ^ queue.queue_id)
    ):
        return False
    if record[39] & HOSTS_V6:
        body_at += 12 * ((record[39] >> 4 & 1) + (record[39] >> 5 & 1))
        if body_at > size:
            return False
    body_size = big32(record + body_at - 4)
    tail_at = body_at + body_size + queue.topic_size
    return (
        tail_at + 2 <= size and <uint64_t>(record[tail_at] << 8 | record[tail_at + 1]) == size - tail_at - 2 < 32768
        and rmq_is_same(record + body_at + body_size, queue.topic, queue.topic_size)
        and (not body_size or rmq_crc32(record + body_at, body_size, FOLDS) & 0x7FFFFFFF == big32(record + 8))
        and rmq_is_as_written(record, size, FOLDS)
    )


def is_stored(bytes raw not None, int64_t place, int64_t queue_offset, queue_id, topic):
    """Return whether ``raw`` is a usual record at this place of the log and of a queue, and its body is sound."""
    cdef Queue queue
    find_queue(topic, queue_id, &queue)
    return is_of_queue(<const uint8_t *>PyBytes_AS_STRING(raw), PyBytes_GET_SIZE(raw), place, queue_offset, &queue)


cdef object stored_class = None, body_limit = None


def use_stored_messages(type made not None, limit):
    """Take the class of messages that were read, and the longest body that it decompresses."""
    global stored_class, body_limit
    stored_class, body_limit = made, limit
    rmq_free_by(<PyTypeObject *>made, drop_stored)


@cython.no_gc  # it has bytes, numbers and texts
cdef class StoredState:
    """What a `StoredMessage` keeps, which inherits from it, and its body.

    Python gives all classes of Python code to the garbage collector, which took a tenth of a pull's time. So
    `rmq_free_by` takes `StoredMessage` back, and `drop_stored` frees its messages; classes that inherit from it have the
    collector.
    """

    cdef public object raw, _frame, _properties  # None for what was not looked for

    @property
    def body(self):
        """The body as sent."""
        cdef uint64_t length, size
        cdef const uint8_t *at
        if PyBytes_CheckExact(self.raw):
            size, at = PyBytes_GET_SIZE(self.raw), <const uint8_t *>PyBytes_AS_STRING(self.raw)
            if size >= FIXED:
                length = big32(at + 84)
                if not at[39] & 49 and length < size - 90:  # no IPv6 hosts (16, 32), not compressed (1)
                    return PyBytes_FromStringAndSize(<const char *>at + HEADER, length)
        return self.decompressed_body(body_limit)


def use_read_results(type made not None, status, type queue not None, type files not None):
    """Take classes with slots, of the results of reads, of queues and of their files, and the status of a result."""
    global result_class, found_status, queue_class, files_class
    for number, name in enumerate(("status", "messages", "next_offset", "min_offset", "max_offset", "total_size")):
        result_slots[number] = rmq_slot(getattr(made, name))
        if not result_slots[number]:
            return
    for number, (owner, name) in enumerate(
        ((queue, "_closed"), (queue, "_files"), (files, "mapped"), (files, "file_size"))
    ):
        queue_slots[number] = rmq_slot(getattr(owner, name))
        if not queue_slots[number]:
            return
    result_class, found_status, queue_class, files_class = made, status, queue, files


cdef object result_class = None, found_status = None, queue_class = None, files_class = None
cdef Py_ssize_t result_slots[6]
cdef Py_ssize_t queue_slots[4]


def with_codes(bytes entries not None, bytes codes not None):
    """Return the numbers of the entries whose tags code has the 32 bits of one of ``codes``, which are such numbers.

    The result is None if an entry has an address instead of a code.
    """
    cdef const uint8_t *entry = <const uint8_t *>PyBytes_AS_STRING(entries)
    cdef const int32_t *wanted = <const int32_t *>PyBytes_AS_STRING(codes)
    cdef Py_ssize_t number, at, count = PyBytes_GET_SIZE(codes) // 4
    cdef int64_t code
    cdef list found = []
    for number in range(PyBytes_GET_SIZE(entries) // 20):
        code = big64(entry + 20 * number + 12)
        if code < INT32_MIN:
            return None
        at = 0
        while at < count and wanted[at] != <int32_t>code:
            at += 1
        if at < count:
            found.append(number)
    return found


cdef Py_ssize_t copy_entries(object queue, object queue_offset, object max_messages, int64_t high, uint8_t *entry) except -1:
    """Copy the first entries of a read; return their number, 0 if anything is unusual."""
    cdef int overflow[2]
    cdef int64_t at, count, file_size
    cdef Py_buffer view
    if type(queue) is not queue_class or part(queue, queue_slots[0]) is not False or not (
        PyLong_CheckExact(queue_offset) and PyLong_CheckExact(max_messages)
    ):
        return 0
    at = PyLong_AsLongLongAndOverflow(queue_offset, overflow)
    count = PyLong_AsLongLongAndOverflow(max_messages, overflow + 1)
    files = part(queue, queue_slots[1])
    if overflow[0] or overflow[1] or not 0 <= at < min(high, INT64_MAX // ENTRY) or type(files) is not files_class:
        return 0
    count = min(max(count, 1), high - at, MOST_ENTRIES)
    at, file_size = at * ENTRY, part(files, queue_slots[3])
    file = (<dict?>part(files, queue_slots[2])).get(at - at % file_size)
    if file is None or not isinstance(file.buffer, _mmap):
        return 0
    at %= file_size
    PyObject_GetBuffer(file.buffer, &view, PyBUF_SIMPLE)
    count = max(min(count, (view.len - at) // ENTRY), 0)
    memcpy(entry, <const uint8_t *>view.buf + at, ENTRY * count)
    PyBuffer_Release(&view)
    return count


def read(LogState log not None, queue, queue_offset, max_messages, transfer, low, high, tuple name not None):
    """Return the result of a read, or None if anything is unusual.

    ``transfer`` has the limits of a read, ``low`` and ``high`` are the queue's first and next offset, ``name`` is its
    topic and id.
    """
    cdef Queue queue_name
    cdef uint8_t entry[ENTRY * MOST_ENTRIES]  # a copy, because other code can change the queue
    cdef Py_ssize_t count = copy_entries(queue, queue_offset, max_messages, high, entry)
    cdef int64_t file_size = log.file_size, memory = transfer.memory, begin, last, start, total
    if not count or log._looks >= MOST_LOOKS:
        return None
    begin, last = big64(entry), big64(entry + 20 * (count - 1))
    if begin < 0:
        return None
    most, file = transfer.most[log.end - begin > memory], (<dict>log._mapped).get(begin - begin % file_size)
    if file is None or count == MOST_ENTRIES < most[0] or (log.end - begin > memory) != (log.end - last > memory):
        return None  # messages in memory have other limits
    count, start = min(count, <Py_ssize_t>most[0]), begin - begin % file_size
    find_queue(name[0], name[1], &queue_name)
    messages = cut_out(
        entry, &count, file.buffer, start, min(log.end, start + file_size), most[1], &total, queue_offset, &queue_name
    )
    if messages is None:
        return None
    last = big64(entry + 20 * (count - 1)) >> 16
    log._looks += (begin >> 16 != log._looked_at) + min(count - 1, last - (begin >> 16))
    log._looked_at = last
    result = (<PyTypeObject *>result_class).tp_alloc(<type>result_class, 0)
    put_slot(result, 0, found_status)
    put_slot(result, 1, messages)
    put_slot(result, 2, queue_offset + count)
    put_slot(result, 3, low)
    put_slot(result, 4, high)
    put_slot(result, 5, total)
    return result


cdef inline void put_slot(object result, int number, object value):
    Py_INCREF(value)  # a new result has nothing in its slots
    (<PyObject **>(<char *><PyObject *>result + result_slots[number]))[0] = <PyObject *>value


cdef int64_t size_of(
    const uint8_t *entry, Py_ssize_t *count, int64_t start, int64_t end, int64_t max_bytes
) noexcept:
    """Return the bytes of the records of the first entries, -1 if one is unusual; ``count`` becomes their number."""
    cdef int64_t place, size, total = 0, last = -1
    cdef Py_ssize_t number
    for number in range(count[0]):
        place, size = big64(entry + 20 * number), <int32_t>big32(entry + 20 * number + 8)
        if place < start or place <= last or size < FIXED or size > end - place:
            return -1
        last = place
        if number and total + size > max_bytes:
            count[0] = number
            break
        total += size
    return total


cdef list cut_out(
    const uint8_t *entry, Py_ssize_t *count, object buffer, int64_t start, int64_t end, int64_t max_bytes,
    int64_t *total, int64_t queue_offset, const Queue *queue
):
    """Return the messages of the first entries, None if one is unusual; see `size_of`."""
    cdef const uint8_t *next_entry
    cdef Py_ssize_t number
    cdef int64_t place, size
    cdef Py_buffer view
    cdef list found
    cdef bytes raw
    global pulled
    total[0] = size_of(entry, count, start, end, max_bytes)
    if total[0] < 0 or stored_class is None or not isinstance(buffer, _mmap):
        return None
    PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE)  # first, because it fails for a mapping that was closed
    cdef int collects = PyGC_Disable()  # it could run Python code, while the mapping must not be closed
    try:
        if end - start > view.len:
            return None
        found = PyList_New(count[0])
        for number in range(count[0]):
            place, size = big64(entry + 20 * number), <int32_t>big32(entry + 20 * number + 8)
            message = new_stored(<const char *>view.buf + (place - start), size)
            if number + FETCHED < count[0]:
                next_entry = entry + 20 * (number + FETCHED)
                rmq_fetch(<const uint8_t *>view.buf + (big64(next_entry) - start), <int32_t>big32(next_entry + 8))
            Py_INCREF(message)
            PyList_SET_ITEM(found, number, message)
        # The copies are checked, because another process can change the mapping; together, because a processor works on
        # the checksums of several at once.
        for number in range(count[0]):
            raw = (<StoredState><object>PyList_GET_ITEM(found, number)).raw
            place = big64(entry + 20 * number)
            if not is_of_queue(
                <const uint8_t *>PyBytes_AS_STRING(raw), PyBytes_GET_SIZE(raw), place, queue_offset + number, queue
            ):
                return None
    finally:
        PyBuffer_Release(&view)
        if collects:
            PyGC_Enable()
    pulled += count[0]
    return found


def pull(
    bytes entries, buffer, int64_t start, int64_t end, Py_ssize_t max_count, int64_t max_bytes, topic, queue_id,
    int64_t queue_offset, bint joined=False
):
    """Return the messages of the first queue entries and their bytes, or None if anything is unusual.

    ``buffer`` is the file of the log that begins at ``start``; its records end at ``end``. ``queue_offset`` is that of
    the first entry. With ``joined``, return the records one after the other, and their number.
    """
    cdef Queue queue
    cdef const uint8_t *entry = <const uint8_t *>PyBytes_AS_STRING(entries)
    cdef Py_ssize_t count = min(PyBytes_GET_SIZE(entries) // 20, max_count), number
    cdef int64_t place, size, total
    cdef Py_buffer view
    cdef bytes raw
    cdef uint8_t *at
    global pulled
    find_queue(topic, queue_id, &queue)
    if not joined:
        found = cut_out(entry, &count, buffer, start, end, max_bytes, &total, queue_offset, &queue)
        return None if found is None else (found, total)
    total = size_of(entry, &count, start, end, max_bytes)
    if total < 0 or not isinstance(buffer, _mmap):
        return None
    PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE)
    try:
        if end - start > view.len:
            return None
        raw = PyBytes_FromStringAndSize(NULL, total)
        at = <uint8_t *>PyBytes_AS_STRING(raw)
        for number in range(count):
            place, size = big64(entry + 20 * number), <int32_t>big32(entry + 20 * number + 8)
            memcpy(at, <const uint8_t *>view.buf + (place - start), size)
            if not is_of_queue(at, size, place, queue_offset + number, &queue):  # the copy, as above
                return None
            at += size
    finally:
        PyBuffer_Release(&view)
    pulled += count
    return raw, count


cdef PyObject *spare[SPARES]  # a pull fills them again, the last one first
cdef int spares = 0


cdef void drop_stored(PyObject *made) noexcept:
    """Free a message without a reference, or keep it, and its bytes if nothing else has them."""
    global spares
    cdef PyObject *own_class = class_of(made)
    cdef PyObject *raw = <PyObject *>(<StoredState>made).raw
    (<StoredState>made)._frame = None
    (<StoredState>made)._properties = None
    if not PyBytes_CheckExact(<object>raw) or Py_REFCNT(raw) != 1 or PyBytes_GET_SIZE(<object>raw) > SPARE_SIZE:
        (<StoredState>made).raw = None
    if own_class == <PyObject *>stored_class and spares < SPARES:
        spare[spares] = made
        spares += 1
    else:
        (<StoredState>made).raw = None
        for _ in range(3):
            Py_DECREF(None)  # which each field has now
        (<PyTypeObject *>own_class).tp_free(made)
    Py_XDECREF(own_class)


cdef object new_stored(const char *data, int64_t size):
    """Return the message of a record, without a call of its class."""
    global spares
    cdef PyObject *raw
    if not spares:
        made = (<PyTypeObject *>stored_class).tp_new(<type>stored_class, (), NULL)
    else:
        spares -= 1
        made = PyObject_Init(spare[spares], <PyTypeObject *>stored_class)
        raw = <PyObject *>(<StoredState>made).raw
        if PyBytes_CheckExact(<object>raw) and PyBytes_GET_SIZE(<object>raw) == size:
            rmq_forget_bytes_hash(raw)
            memcpy(PyBytes_AS_STRING(<object>raw), data, size)
            return made
    (<StoredState>made).raw = PyBytes_FromStringAndSize(data, size)
    return made
