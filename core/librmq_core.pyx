# cython: language_level=3, boundscheck=False, wraparound=False
"""The compiled core of librmq: what an append and a scan do for a usual record.

A function does the usual case whole. For anything else it has no effect, and its result says so; then librmq runs its
Python code. `librmq.core` decides whether this module is used.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

cdef extern from "crc32.h":
    void rmq_crc32_init()
    int rmq_can_fold()
    uint32_t rmq_crc32(const uint8_t *data, size_t size, int folds) nogil

API = 1
"""Number that librmq compares at its import; it changes with the functions here."""

calls = {"records": 0}
"""Number of records that each function has done, to prove in a test that it ran."""

cdef uint32_t MAGIC = 0xDAA320A7
cdef enum:
    FIXED = 91
    HOSTS_V6 = 48
    SCHEDULE_TOPIC_SIZE = 19
    AT_ONCE = 512

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
    calls["records"] += count
    return found, inside
