# cython: language_level=3, boundscheck=False, wraparound=False, auto_pickle=False
"""The compiled core of librmq: what an append and a scan do for a usual record.

A function does the usual case whole. For anything else it has no effect, and its result says so; then librmq runs its
Python code. `librmq.core` decides whether this module is used.
"""

import mmap

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_CheckExact, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.dict cimport PyDict_CheckExact, PyDict_GetItem, PyDict_Next, PyDict_Size
from cpython.exc cimport PyErr_Clear
from cpython.list cimport PyList_GET_SIZE
from cpython.long cimport PyLong_CheckExact
from cpython.object cimport PyObject
from cpython.ref cimport Py_INCREF
from cpython.tuple cimport PyTuple_SET_ITEM
from cpython.unicode cimport PyUnicode_CheckExact, PyUnicode_GET_LENGTH
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memchr, memcpy
from posix.time cimport CLOCK_REALTIME, clock_gettime, timespec

cdef extern from "Python.h":
    ctypedef struct PyTypeObject:
        object (*tp_alloc)(type made, Py_ssize_t items)
    const char *PyUnicode_AsUTF8AndSize(object text, Py_ssize_t *size) except NULL
    int PyUnicode_KIND(object text)
    void *PyUnicode_DATA(object text)
    uint32_t PyUnicode_READ(int kind, void *data, Py_ssize_t at)
    int PyGC_Disable()
    int PyGC_Enable()
    char *PyByteArray_AS_STRING(object data)

cdef extern from *:
    """
    #if PY_VERSION_HEX >= 0x030E0000  /* a tuple keeps its hash, and -1 is none */
    #define rmq_forget_hash(made) (((PyTupleObject *)(made))->ob_hash = -1)
    #else
    #define rmq_forget_hash(made) ((void)(made))
    #endif
    """
    void rmq_forget_hash(object made)

cdef extern from "crc32.h":
    void rmq_crc32_init()
    int rmq_can_fold()
    uint32_t rmq_crc32(const uint8_t *data, size_t size, int folds) nogil

API = 3
"""Number that librmq compares at its import; it changes with the functions here."""

cdef int64_t appended = 0, scanned = 0


def counts():
    """Return how many records were appended and scanned here, to prove in a test that this code ran."""
    return {"append": appended, "records": scanned}


cdef uint32_t MAGIC = 0xDAA320A7
cdef enum:
    FIXED = 91
    HOSTS_V6 = 48
    SCHEDULE_TOPIC_SIZE = 19
    AT_ONCE = 512
    HEADER = 88
    MOST_PROPERTIES = 64
    MOST_PROPERTY_BYTES = 32767
    SCRATCH = 1 << 17
    BATCH_SCRATCH = 1 << 20
    BATCH = 256

rmq_crc32_init()
cdef int FOLDS = rmq_can_fold()
can_fold = bool(FOLDS)


def crc32(bytes data, bint folds=True):
    """Return the CRC-32 of ``data``; without ``folds`` by tables."""
    return rmq_crc32(<const uint8_t *>PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data), FOLDS and folds)


cdef inline uint32_t big32(const uint8_t *at) noexcept:
    return <uint32_t>at[0] << 24 | <uint32_t>at[1] << 16 | <uint32_t>at[2] << 8 | at[3]


def records(bytes chunk, Py_ssize_t inside, int64_t chunk_offset, bint check_body):
    """Return items for the usual records of ``chunk`` from ``inside`` on, and the place in it after the last of them.

    It ends before the first record that is unusual, damaged or not whole, and after 512 of them.
    ``chunk_offset`` is the physical offset of the chunk's first byte.
    """
    cdef const uint8_t *data = <const uint8_t *>PyBytes_AS_STRING(chunk)
    cdef const uint8_t *record
    cdef uint64_t limit = PyBytes_GET_SIZE(chunk), size, body_size, topic_end
    cdef list found = []
    cdef int count = 0
    global scanned
    if inside < 0:
        raise ValueError("inside: expected a place in the chunk")
    while count < AT_ONCE and <uint64_t>inside + FIXED <= limit:
        record = data + inside
        size, body_size = big32(record), big32(record + 84)
        if (
            size < FIXED or body_size > size - FIXED or inside + size > limit
            or big32(record + 4) != MAGIC or big32(record + 36) & HOSTS_V6
        ):
            break
        topic_end = 89 + body_size + record[88 + body_size]
        if (
            record[88 + body_size] > 127 or record[88 + body_size] == SCHEDULE_TOPIC_SIZE or topic_end + 2 > size
            or <uint64_t>(record[topic_end] << 8 | record[topic_end + 1]) != size - topic_end - 2
            or record[topic_end] > 127
        ):
            break
        if check_body and body_size:
            if rmq_crc32(record + 88, body_size, FOLDS) & 0x7FFFFFFF != big32(record + 8):
                break
        found.append((chunk_offset + inside, size, PyBytes_FromStringAndSize(<const char *>record, size)))
        inside += size
        count += 1
    scanned += count
    return found, inside


# --------------------------------------------------------------------------------------------------------------- append

shapes = {}
"""By the names of properties in the order of a dict: the bytes before each value in stored order, and for each of them
the place of its value in the dict. librmq fills and bounds it."""

cdef dict _shapes = shapes
cdef object _mmap = mmap.mmap
# The records of the running append. The interpreter lock protects them, because nothing in between gives it up.
cdef uint8_t scratch[SCRATCH]
cdef uint8_t batch_scratch[BATCH_SCRATCH]


cdef class LogState:
    """What appends need of a `CommitLog`, which inherits from it."""

    cdef public int64_t end, sure, _file_start
    cdef public object _buffer, last_write


cdef class DispatchState:
    """What appends need of a `Dispatcher`, which inherits from it."""

    cdef public list lanes, records
    cdef public int64_t writing_at


cdef class LaneState:
    """What appends need of a `Lane`, which inherits from it."""

    cdef public int64_t next_queue_offset, pending_from, prefix_hash
    cdef public list pending
    cdef public bytes topic_field
    cdef public object topic, queue, queue_id


cdef class AppendState:
    """What appends need of an `Appender`, which inherits from it, and the usual append."""

    cdef public bint accepts, is_usual
    cdef public object parts, _host, _housekeeping, lock, message_class, result_class, now_ms, system_now_ms
    cdef public object manual_now_ms
    cdef public LogState log
    cdef public DispatchState dispatcher
    cdef public dict lanes
    cdef public int64_t _max_body_size, _compress_from, batch_fixed_size

    def append_batch_usual(self, messages, queue_id=0, *, wait=True, **fields):
        """Append a usual batch here, any other by `Appender.append_batch`."""
        if self.is_usual and not fields and type(messages) is list:
            results = _append_batch(self, messages, queue_id)
            if results is not None:
                if PyList_GET_SIZE(self.dispatcher.records) >= BATCH:
                    self.write_due()
                last = results[len(results) - 1]
                end = last[0] + last[1]
                if end >= self._housekeeping.alarm:
                    self._acknowledge(end, wait)
                return results
        return self.append_batch(messages, queue_id, wait=wait, **fields)

    def append_usual(self, message, queue_id=0, *, wait=True, **fields):
        """Append a usual message here, any other by `Appender.append`."""
        if self.is_usual and not fields:
            result = _append(self, message, queue_id)
            if result is not None:
                end = result[0] + result[1]
                if end >= self._housekeeping.alarm:
                    self._acknowledge(end, wait)
                return result
        return self.append(message, queue_id, wait=wait, **fields)


cdef inline void put32(uint8_t *at, uint32_t value) noexcept:
    at[0], at[1], at[2], at[3] = value >> 24, value >> 16 & 255, value >> 8 & 255, value & 255


cdef inline void put64(uint8_t *at, uint64_t value) noexcept:
    put32(at, value >> 32)
    put32(at + 4, value & 0xFFFFFFFF)


cdef uint32_t hashed(uint32_t code, int kind, const void *data, Py_ssize_t begin, Py_ssize_t end) noexcept:
    """Continue a hash of Java, over UTF-16 units, with some characters of a text."""
    cdef uint32_t unit
    cdef Py_ssize_t at
    for at in range(begin, end):
        unit = PyUnicode_READ(kind, <void *>data, at)
        if unit > 0xFFFF:
            unit -= 0x10000
            code = 31 * code + (0xD800 | unit >> 10)
            unit = 0xDC00 | unit & 0x3FF
        code = 31 * code + unit
    return code


cdef int32_t java_hash(object text):
    """Return Java's ``hashCode`` of a text."""
    return <int32_t>hashed(0, PyUnicode_KIND(text), PyUnicode_DATA(text), 0, PyUnicode_GET_LENGTH(text))


def string_hash(str text not None):
    """Return Java's ``hashCode`` of a text."""
    return java_hash(text)


cdef Py_ssize_t put_properties(dict properties, uint8_t *at) except -2:
    """Write properties in stored form; return their size, -1 if they are unusual."""
    cdef PyObject *values[MOST_PROPERTIES]
    cdef PyObject *name
    cdef PyObject *value
    cdef Py_ssize_t place = 0, count = PyDict_Size(properties), number = 0, size, total = 0
    cdef const char *text
    cdef bytes before
    if not count:
        return 0
    if count > MOST_PROPERTIES:
        return -1
    while PyDict_Next(properties, &place, &name, &value):
        # Names of another type could run Python code when they are compared.
        if not PyUnicode_CheckExact(<object>name) or not PyUnicode_CheckExact(<object>value):
            return -1
        values[number] = value
        number += 1
    shape = _shapes.get(tuple(properties))
    if shape is None:
        return -1
    for before, number in <list>shape:
        size = PyBytes_GET_SIZE(before)
        if total + size > MOST_PROPERTY_BYTES:
            return -1
        memcpy(at + total, PyBytes_AS_STRING(before), size)
        total += size
        try:
            text = PyUnicode_AsUTF8AndSize(<object>values[number], &size)
        except UnicodeEncodeError:
            return -1
        if total + size > MOST_PROPERTY_BYTES or memchr(text, 2, size) != NULL:
            return -1
        memcpy(at + total, text, size)
        total += size
    return total


cdef bint is_usual(AppendState self, object message, object topic):
    """Return whether a message has the usual types and no delay; its topic must be ``topic`` unless that is None."""
    if type(message) is not self.message_class:
        return False
    cdef object flag = message.flag, properties = message.properties, body = message.body
    if (
        message._delays is not None or not PyUnicode_CheckExact(message.topic) or not PyBytes_CheckExact(body)
        or not PyDict_CheckExact(properties) or not PyLong_CheckExact(flag) or "DELAY" in <dict>properties
        or not -0x80000000 <= flag <= 0x7FFFFFFF or PyBytes_GET_SIZE(body) > self._max_body_size
    ):
        return False
    return topic is None or (message.topic == topic and "WAIT" not in <dict>properties)


cdef LaneState usual_lane(AppendState self, object topic, object queue_id):
    """Return the lane of a queue, None if it is unusual or not open."""
    if not PyLong_CheckExact(queue_id) or not PyBytes_CheckExact(self._host) or PyBytes_GET_SIZE(self._host) != 8:
        return None
    cdef LaneState lane = self.lanes.get((topic, queue_id))
    if (
        lane is None or lane.queue.ext is not None or PyUnicode_GET_LENGTH(topic) == SCHEDULE_TOPIC_SIZE
        or PyBytes_GET_SIZE(lane.topic_field) > 128
    ):
        return None
    return lane


cdef int64_t clock_ms(AppendState self) except -3:
    """Return the time of a manual clock, -1 for the system's clock, -2 for any other clock."""
    if self.now_ms is self.system_now_ms:
        return -1
    if self.now_ms is not self.manual_now_ms:
        return -2
    cdef int64_t now = self.now_ms()
    return now if now >= 0 else -2


cdef object _append(AppendState self, object message, object queue_id):
    """Append a usual message and return the result, or None before any effect."""
    if not is_usual(self, message, None):
        return None
    cdef LaneState lane = usual_lane(self, message.topic, queue_id)
    cdef int64_t now = clock_ms(self)
    cdef object body = message.body  # again, because Python code ran since the last look
    if (
        lane is None or now == -2 or not PyBytes_CheckExact(body) or PyBytes_GET_SIZE(body) >= self._compress_from
        or PyBytes_GET_SIZE(body) > SCRATCH - HEADER - 130 - MOST_PROPERTY_BYTES
    ):
        return None
    mutex = self.lock.mutex
    if not mutex.acquire(False):
        return None
    cdef int collects = PyGC_Disable()  # it could run Python code, which gives up the interpreter
    try:
        return _write(self, lane, body, message.properties, <int32_t>message.flag, <uint32_t>queue_id, now)
    finally:
        if collects:
            PyGC_Enable()
        mutex.release()


cdef object _append_batch(AppendState self, list messages, object queue_id):
    """The same for a batch."""
    if not messages:
        return None
    topic = getattr(messages[0], "topic", None)
    if topic is None:
        return None
    for message in messages:
        if not is_usual(self, message, topic):
            return None
    cdef LaneState lane = usual_lane(self, topic, queue_id)
    cdef int64_t now = clock_ms(self)
    if lane is None or now == -2:
        return None
    mutex = self.lock.mutex
    if not mutex.acquire(False):
        return None
    cdef int collects = PyGC_Disable()
    try:
        result = _write_batch(self, lane, messages, <uint32_t>queue_id, now)
    finally:
        if collects:
            PyGC_Enable()
        mutex.release()
    return result


cdef int64_t encode(
    AppendState self, LaneState lane, object body, dict properties, int32_t flag, uint32_t queue_id, uint8_t *record
) except -2:
    """Write a record without its place and times; return its size, -1 if its properties are unusual."""
    cdef Py_ssize_t body_size = PyBytes_GET_SIZE(body), topic_size = PyBytes_GET_SIZE(lane.topic_field), raw_size
    cdef uint8_t *place = record + HEADER
    memcpy(place, PyBytes_AS_STRING(body), body_size)
    place += body_size
    memcpy(place, PyBytes_AS_STRING(lane.topic_field), topic_size)
    place += topic_size
    raw_size = put_properties(properties, place + 2)
    if raw_size < 0:
        return -1
    place[0], place[1] = raw_size >> 8, raw_size & 255
    put32(record, HEADER + body_size + topic_size + 2 + raw_size)
    put32(record + 4, MAGIC)
    put32(record + 8, rmq_crc32(record + HEADER, body_size, FOLDS) & 0x7FFFFFFF)
    put32(record + 12, queue_id)
    put32(record + 16, <uint32_t>flag)
    put32(record + 36, 0)
    memcpy(record + 48, PyBytes_AS_STRING(self._host), 8)
    memcpy(record + 64, PyBytes_AS_STRING(self._host), 8)
    put32(record + 72, 0)
    put64(record + 76, 0)
    put32(record + 84, body_size)
    return HEADER + body_size + topic_size + 2 + raw_size


cdef void put_place(uint8_t *record, int64_t queue_offset, int64_t physical_offset, int64_t now) noexcept:
    put64(record + 20, queue_offset)
    put64(record + 28, physical_offset)
    put64(record + 40, now)
    put64(record + 56, now)


cdef bytes new_entry(int64_t physical_offset, int64_t size, object tags):
    """Return the queue entry of a record."""
    cdef bytes entry = PyBytes_FromStringAndSize(NULL, 20)
    cdef uint8_t *at = <uint8_t *>PyBytes_AS_STRING(entry)
    put64(at, physical_offset)
    put32(at + 8, size)
    put64(at + 12, <uint64_t><int64_t>(java_hash(tags) if tags else 0))
    return entry


cdef int64_t system_ms() noexcept:
    cdef timespec time
    clock_gettime(CLOCK_REALTIME, &time)
    return <int64_t>time.tv_sec * 1000 + time.tv_nsec // 1000000


cdef bint can_write(AppendState self, int64_t size):
    """Return whether ``size`` bytes can just be copied to the log's end, and noted."""
    cdef LogState log = self.log
    cdef DispatchState dispatcher = self.dispatcher
    return (
        self.accepts and type(log._buffer) is _mmap and log.end + size <= log.sure and log.end >= log._file_start
        and PyList_GET_SIZE(dispatcher.records) < BATCH and dispatcher.writing_at < 0
    )


cdef object copy_in(LogState log, const uint8_t *data, int64_t size):
    """Copy records to the end of the log, which `can_write` allowed."""
    cdef Py_buffer view
    cdef int64_t at = log.end - log._file_start
    begin = log.end
    PyObject_GetBuffer(log._buffer, &view, PyBUF_SIMPLE | PyBUF_WRITABLE)
    if at + size > view.len:
        PyBuffer_Release(&view)
        raise ValueError("log: expected room in its file")
    memcpy(<uint8_t *>view.buf + at, data, size)
    PyBuffer_Release(&view)
    log.last_write = begin
    log.end += size


cdef object _write(
    AppendState self, LaneState lane, object body, dict properties, int32_t flag, uint32_t queue_id, int64_t now
):
    """Write the record, and note its entry and keys, under the lock."""
    cdef DispatchState dispatcher = self.dispatcher
    cdef int64_t size = encode(self, lane, body, properties, flag, queue_id, scratch), physical_offset, queue_offset
    global appended
    if size < 0 or not can_write(self, size):
        return None
    now = system_ms() if now < 0 else now
    physical_offset, queue_offset = self.log.end, lane.next_queue_offset
    put_place(scratch, queue_offset, physical_offset, now)
    # First everything that can fail.
    entry = new_entry(physical_offset, size, properties.get("TAGS"))
    py_offset, py_now = physical_offset, now
    record = (py_offset, py_now, lane.prefix_hash, properties.get("UNIQ_KEY"), properties.get("KEYS"))
    result = new_result(self.result_class, (py_offset, size, queue_offset, py_now, self._host))
    dispatcher.writing_at = physical_offset  # the next append repairs what a failing step leaves
    copy_in(self.log, scratch, size)
    lane.next_queue_offset = queue_offset + 1
    if not lane.pending:
        lane.pending_from = queue_offset
        dispatcher.lanes.append(lane)
    lane.pending.append(entry)
    dispatcher.records.append(record)
    dispatcher.writing_at = -1
    appended += 1
    return result


cdef object _write_batch(
    AppendState self, LaneState lane, list messages, uint32_t queue_id, int64_t now
):
    """Write the records side by side, and note their entries and keys, under the lock."""
    cdef DispatchState dispatcher = self.dispatcher
    cdef int64_t total = 0, size, encoded = 0, queue_offset = lane.next_queue_offset, physical_offset
    cdef Py_ssize_t number, count = PyList_GET_SIZE(messages)
    cdef list sizes = [], entries = [], records = [], results = []
    cdef dict properties
    global appended
    for message in messages:
        if type(message) is not self.message_class or not PyBytes_CheckExact(message.body):
            return None  # it was changed since the last look
        body = message.body
        if PyBytes_GET_SIZE(body) + HEADER + 130 + MOST_PROPERTY_BYTES > BATCH_SCRATCH - total:
            return None
        size = encode(self, lane, body, message.properties, <int32_t>message.flag, queue_id, batch_scratch + total)
        if size < 0:
            return None
        encoded += size - HEADER - PyBytes_GET_SIZE(lane.topic_field) - 2 + self.batch_fixed_size
        sizes.append(size)
        total += size
    if encoded > self._max_body_size or not can_write(self, total):
        return None
    now = system_ms() if now < 0 else now
    py_now = now
    prefix_hash = lane.prefix_hash
    total = 0
    for number in range(count):
        size, properties = sizes[number], messages[number].properties
        physical_offset = self.log.end + total
        put_place(batch_scratch + total, queue_offset + number, physical_offset, now)
        entries.append(new_entry(physical_offset, size, properties.get("TAGS")))
        py_offset = physical_offset
        records.append((py_offset, py_now, prefix_hash, properties.get("UNIQ_KEY"), properties.get("KEYS")))
        results.append(
            new_result(self.result_class, (py_offset, sizes[number], queue_offset + number, py_now, self._host))
        )
        total += size
    dispatcher.writing_at = self.log.end
    copy_in(self.log, batch_scratch, total)
    lane.next_queue_offset = queue_offset + count
    if not lane.pending:
        lane.pending_from = queue_offset
        dispatcher.lanes.append(lane)
    lane.pending.extend(entries)
    dispatcher.records.extend(records)
    dispatcher.writing_at = -1
    appended += count
    return results


cdef object new_result(object result_class, tuple fields):
    """Return a named tuple of these fields, without a call of its class."""
    cdef object result = (<PyTypeObject *>result_class).tp_alloc(<type>result_class, 5)
    cdef int number
    rmq_forget_hash(result)
    for number in range(5):
        Py_INCREF(fields[number])
        PyTuple_SET_ITEM(result, number, fields[number])
    return result


# ----------------------------------------------------------------------------------------------------------------- keys


cdef int text_of(object text, int *kind, const void **data, Py_ssize_t *size) except -1:
    """Find the characters of a text, or of bytes that are ASCII; return 0 for anything else."""
    cdef const uint8_t *at
    cdef Py_ssize_t number
    if PyUnicode_CheckExact(text):
        kind[0], data[0], size[0] = PyUnicode_KIND(text), PyUnicode_DATA(text), PyUnicode_GET_LENGTH(text)
        return 1
    if PyBytes_CheckExact(text):
        at = <const uint8_t *>PyBytes_AS_STRING(text)
        for number in range(PyBytes_GET_SIZE(text)):
            if at[number] > 127:
                return 0
        kind[0], data[0], size[0] = 1, at, PyBytes_GET_SIZE(text)
        return 1
    return 0


cdef inline int64_t index_hash(uint32_t code) noexcept:
    cdef int64_t signed = <int32_t>code
    return (-signed if signed < 0 else signed) & 0x7FFFFFFF


def key_hashes(list records not None):
    """Return places, times, records of keys and hashes of keys as bytes of 64-bit numbers, or None."""
    cdef Py_ssize_t count = PyList_GET_SIZE(records), room = 4 * count + 64, found = 0, number, at, size, begin
    cdef bytearray places = bytearray(8 * count), times = bytearray(8 * count)
    cdef bytearray owners = bytearray(8 * room), hashes = bytearray(8 * room)
    cdef int64_t *place_at = <int64_t *>PyByteArray_AS_STRING(places)
    cdef int64_t *time_at = <int64_t *>PyByteArray_AS_STRING(times)
    cdef int64_t *owner_at = <int64_t *>PyByteArray_AS_STRING(owners)
    cdef int64_t *hash_at = <int64_t *>PyByteArray_AS_STRING(hashes)
    cdef int kind = 0
    cdef const void *data = NULL
    cdef uint32_t prefix, code, unit
    cdef tuple record
    for number in range(count):
        record = records[number]
        place, time, prefix_hash, unique, keys = record
        place_at[number], time_at[number] = place, time
        prefix = <uint32_t>(<int64_t>prefix_hash & 0xFFFFFFFF)
        if unique:
            if not text_of(unique, &kind, &data, &size) or found >= room:
                return None
            owner_at[found], hash_at[found] = number, index_hash(hashed(prefix, kind, data, 0, size))
            found += 1
        if keys:
            if not text_of(keys, &kind, &data, &size):
                return None
            begin = 0
            for at in range(size + 1):
                if at < size and PyUnicode_READ(kind, <void *>data, at) != 32:
                    continue
                if at > begin:
                    if found >= room:
                        return None
                    owner_at[found], hash_at[found] = number, index_hash(hashed(prefix, kind, data, begin, at))
                    found += 1
                begin = at + 1
    return places, times, owners[: 8 * found], hashes[: 8 * found]


def put_entries(
    buffer, int64_t max_slots, int64_t number, physical, timestamps, hashes, int64_t begin_ms, int64_t first_seconds
):
    """Write entries of an index file and the slots that lead to them; return how many slots led to none before.

    ``number`` is that of the first entry, ``first_seconds`` its time.
    """
    cdef Py_buffer file_view, physical_view, time_view, hash_view
    cdef int64_t keys = len(hashes), at, slot, previous, seconds, fresh = 0
    cdef uint8_t *entry
    cdef uint8_t *slot_at
    cdef int64_t key_hash
    if type(buffer) is not _mmap:
        raise TypeError("buffer: expected a mapping")
    PyObject_GetBuffer(physical, &physical_view, PyBUF_SIMPLE)
    PyObject_GetBuffer(timestamps, &time_view, PyBUF_SIMPLE)
    PyObject_GetBuffer(hashes, &hash_view, PyBUF_SIMPLE)
    PyObject_GetBuffer(buffer, &file_view, PyBUF_SIMPLE | PyBUF_WRITABLE)
    try:
        if (
            max_slots <= 0 or number < 0 or 40 + 4 * max_slots + 20 * (number + keys) > file_view.len
            or physical_view.len != 8 * keys or time_view.len != 8 * keys or hash_view.len != 8 * keys
        ):
            raise ValueError("entries: expected arrays of one length, and room for them")
        entry = <uint8_t *>file_view.buf + 40 + 4 * max_slots + 20 * number
        for at in range(keys):
            key_hash = (<int64_t *>hash_view.buf)[at]
            if key_hash < 0:
                raise ValueError("hashes: expected none below zero")
            slot = key_hash % max_slots
            slot_at = <uint8_t *>file_view.buf + 40 + 4 * slot
            previous = <int32_t>big32(slot_at)
            if not 0 < previous <= number + at:
                previous = 0
                fresh += 1
            seconds = 0
            if at == 0:
                seconds = first_seconds
            elif begin_ms > 0:
                seconds = ((<int64_t *>time_view.buf)[at] - begin_ms) // 1000
                seconds = 0 if seconds < 0 else 0x7FFFFFFF if seconds > 0x7FFFFFFF else seconds
            put32(entry, <uint32_t>key_hash)
            put64(entry + 4, (<uint64_t *>physical_view.buf)[at])
            put32(entry + 12, <uint32_t>seconds)
            put32(entry + 16, <uint32_t>previous)
            put32(slot_at, <uint32_t>(number + at))
            entry += 20
    finally:
        PyBuffer_Release(&file_view)
        PyBuffer_Release(&hash_view)
        PyBuffer_Release(&time_view)
        PyBuffer_Release(&physical_view)
    return fresh
