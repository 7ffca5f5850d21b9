"""Bytes of a log record to values and back, and the small formats inside it. No I/O.

A record, big-endian::

     0  size                4    of the whole record
     4  magic               4    da a3 20 a7, or da a3 20 ab (5.x: a topic length of two bytes)
     8  body crc            4    crc32 & 7fffffff of the body as stored; nothing else has a checksum
    12  queue id            4
    16  flag                4    the user's
    20  queue offset        8
    28  physical offset     8    of this record's first byte
    36  sys flag            4    bits, below
    40  born timestamp      8    ms
    48  born host        4 + 4   address, port; 16 + 4 with BORN_HOST_V6, then all that follows is 12 further
    56  store timestamp     8    ms
    64  store host       4 + 4   16 + 4 with STORE_HOST_V6
    72  reconsume times     4
    76  prepared offset     8    transaction: physical offset of the prepared message
    84  body length         4
    88  body
        topic length        1    2 with the second magic
        topic                    UTF-8
        properties length   2
        properties               name 01 value 02 name 01 value ...   UTF-8

A blank, where the next record did not fit into a file::

    remaining length 4 | cb d4 31 94 | (left as it is)

Mirrors ``MessageDecoder``, ``CommitLog.MessageExtEncoder``, ``CommitLog.checkMessageAndReturnSize``,
``MessageSysFlag`` and ``MessageConst``. Everything here is a pure function of its arguments, and thread-safe.
"""

from __future__ import annotations

import mmap
import struct
import zlib
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from librmq.errors import BodyChecksumError, BodyCompressionError, MessageIllegalError, MissingExtraError, RecordError
from librmq.java.lang import java_decode, java_int
from librmq.message.ids import Host, decode_host, encode_host
from librmq.message.properties import PropertyName, encode_properties, find_property
from librmq.message.topics import SystemTopic
from librmq.runtime import lazy_numpy as np
from librmq.runtime.compiled_core import CORE

if TYPE_CHECKING:
    import numpy.typing as npt

try:  # ISA-L (extra `fast`) computes the same checksums as zlib in less time
    from isal.isal_zlib import crc32 as crc32
except ImportError:
    from zlib import crc32 as crc32

short_crc32 = zlib.crc32
SHORT_BODY: Final = 1024
"""Size in bytes up to which `short_crc32` is better: on some processors the interpreter runs slower after a call of
ISA-L, so that an append of 128 bytes takes a sixth longer."""


# ---- compressed bodies

DECOMPRESSED_LIMIT: Final = 64 << 20
"""The longest decompressed body that `StoredMessage.body` returns, in bytes."""

# The values of `CompressionType`. A body is a zlib stream, one LZ4 frame, or one Zstandard frame. No bit means zlib:
# older clients had no choice.
COMPRESSED: Final = 1
COMPRESSION_MASK: Final = 0x700
COMPRESSION_LZ4: Final = 0x100
COMPRESSION_ZSTD: Final = 0x200
COMPRESSION_ZLIB: Final = 0x300

_LZ4_STEP: Final = 1 << 20
_ZSTD_PIECE: Final = 128


def compress_body(body: bytes) -> bytes:
    """Compress ``body`` as RocketMQ's clients do, for the sys flag ``COMPRESSED | COMPRESSION_ZLIB``."""
    return zlib.compress(body, 5)


def compression_type(sys_flag: int) -> str:
    """Return ``zlib``, ``lz4`` or ``zstd``.

    Raises:
        BodyCompressionError: The bits of ``sys_flag`` are none of these.
    """
    try:
        return ("zlib", "lz4", "zstd", "zlib")[(sys_flag & COMPRESSION_MASK) >> 8]
    except IndexError:
        raise BodyCompressionError(f"body: unknown compression type in sys flag {sys_flag:#x}") from None


def decompress_body(body: bytes, sys_flag: int, limit: int, *, cuts: bool = False) -> bytes:
    """Return a stored body as sent: ``body`` itself unless ``sys_flag`` says that it is compressed.

    With ``cuts`` only the first ``limit`` bytes of a longer one, of which the rest is not looked at.

    Raises:
        BodyCompressionError: The body is damaged or cut off, has bytes after its end, or decompresses to more than
            ``limit`` bytes, where decompression stops.
        MissingExtraError: The body is compressed by lz4 or zstd, and the extra ``compression`` is not installed.
    """
    if not sys_flag & COMPRESSED or not body:
        return body[:limit] if cuts else body
    kind = compression_type(sys_flag)
    if kind == "lz4":
        return _decompress_lz4(body, limit, cuts)
    if kind == "zstd":
        return _decompress_zstd(body, limit, cuts)
    stream = zlib.decompressobj()
    try:
        result = stream.decompress(body, limit + 1)
    except zlib.error as error:
        raise BodyCompressionError(f"zlib body: {error}") from None
    return _complete_body(kind, result, stream.eof, stream.unused_data, limit, cuts)


def _decompress_lz4(body: bytes, limit: int, cuts: bool) -> bytes:
    try:
        from lz4.frame import LZ4FrameDecompressor
    except ImportError:
        raise MissingExtraError("a body compressed with lz4", "compression") from None
    stream = LZ4FrameDecompressor()
    parts, size, pending = [], 0, body
    try:
        # The decoder allocates `max_length` bytes ahead, so ask for few at a time.
        while size <= limit and not stream.eof and (pending or not stream.needs_input):
            parts.append(stream.decompress(pending, max_length=_LZ4_STEP))
            size += len(parts[-1])
            pending = b""
    except (RuntimeError, EOFError, ValueError) as error:
        raise BodyCompressionError(f"lz4 body: {error}") from None
    return _complete_body("lz4", b"".join(parts), stream.eof, stream.unused_data or b"", limit, cuts)


def _decompress_zstd(body: bytes, limit: int, cuts: bool) -> bytes:
    try:
        from zstandard import ZstdDecompressor, ZstdError
    except ImportError:
        raise MissingExtraError("a body compressed with zstd", "compression") from None
    stream = ZstdDecompressor().decompressobj()
    parts, size, at = [], 0, 0
    try:
        # Each 4 bytes of input can become 128 KiB at once, so feed small pieces.
        while size <= limit and not stream.eof and at < len(body):
            parts.append(stream.decompress(body[at : at + _ZSTD_PIECE]))
            size += len(parts[-1])
            at += _ZSTD_PIECE
    except ZstdError as error:
        raise BodyCompressionError(f"zstd body: {error}") from None
    return _complete_body("zstd", b"".join(parts), stream.eof, stream.unused_data or body[at:], limit, cuts)


def _complete_body(kind: str, result: bytes, eof: bool, surplus: bytes, limit: int, cuts: bool) -> bytes:
    """Return ``result``, or raise `BodyCompressionError` if it is not all of the body."""
    if len(result) > limit and cuts:
        return result[:limit]
    if len(result) > limit:
        raise BodyCompressionError(f"{kind} body: expected at most {limit:,} bytes decompressed, found more")
    if not eof:
        raise BodyCompressionError(f"{kind} body: cut off after {len(result):,} decompressed bytes")
    if surplus:
        raise BodyCompressionError(f"{kind} body: {len(surplus):,} bytes after its end")
    return result


Raw = bytes | bytearray | memoryview | mmap.mmap

MESSAGE_MAGIC: Final = 0xDAA320A7
MESSAGE_MAGIC_V2: Final = 0xDAA320AB
MAGICS: Final = (MESSAGE_MAGIC, MESSAGE_MAGIC_V2)
BLANK_MAGIC: Final = 0xCBD43194
UNFINISHED_MAGIC: Final = 0x756E646F
"""After a number of bytes, in place of the first record's size and magic, while several records are written there."""
BLANK_SIZE: Final = 8
"""Smallest size of a blank; this many bytes always stay free at the end of a file."""
FIXED_SIZE: Final = 91
"""Size of a record without body, topic and properties, with IPv4 hosts."""
HOST_V6_EXTRA: Final = 12
MAX_TOPIC_SIZE: Final = 127
MAX_TOPIC_SIZE_V2: Final = 32_767
MAX_PROPERTIES_SIZE: Final = 32_767

LAYOUT: Final = {
    "size": "i",
    "magic": "I",
    "body_crc": "i",
    "queue_id": "i",
    "flag": "i",
    "queue_offset": "q",
    "physical_offset": "q",
    "sys_flag": "i",
    "born_timestamp": "q",
    "born_host": "8s",
    "store_timestamp": "q",
    "store_host": "8s",
    "reconsume_times": "i",
    "prepared_offset": "q",
    "body_length": "i",
}
"""The fields up to the body, with IPv4 hosts, in the codes of `struct`: what every struct and array is made from."""


@cache
def header_dtype() -> np.dtype[Any]:
    """Return the same as a numpy type."""
    return np.dtype([(name, {"8s": "V8"}.get(code, f">{code}")) for name, code in (LAYOUT | {"body_crc": "I"}).items()])


def gather(raw: npt.NDArray[np.uint8], places: npt.NDArray[np.int64], dtype: str) -> npt.NDArray[Any]:
    """Return the values of a numpy type at places of ``raw``, which need not be aligned."""
    kind = np.dtype(dtype)
    if len(raw) < kind.itemsize:
        return np.zeros(len(places), kind)
    if CORE.gather is not None:
        return np.frombuffer(CORE.gather(raw, np.ascontiguousarray(places), kind.itemsize), kind)
    return np.ndarray((len(raw) - kind.itemsize + 1,), kind, raw, strides=(1,))[places]


def headers_at(raw: npt.NDArray[np.uint8], places: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    """Return what records at places of ``raw`` have before the body, as `header_dtype`; zeros if ``raw`` is shorter."""
    kind = header_dtype()
    return gather(raw, places, f"V{kind.itemsize}").view(kind)


def fields_at(
    raw: npt.NDArray[np.uint8], places: npt.NDArray[np.int64], names: Iterable[str]
) -> dict[str, npt.NDArray[Any]]:
    """Return some numbers of what `headers_at` returns, each field an array of its own in native byte order."""
    kind = header_dtype()
    types = {name: kind[name].newbyteorder("=") for name in names}
    if CORE.fields is None or len(raw) < kind.itemsize:
        head = headers_at(raw, places)
        return {name: head[name].astype(native) for name, native in types.items()}
    ats = bytes(kind.fields[name][1] for name in types)  # type: ignore[index]
    sizes = bytes(native.itemsize for native in types.values())
    values = map(np.frombuffer, CORE.fields(raw, np.ascontiguousarray(places), ats, sizes), types.values())
    return dict(zip(types, values, strict=True))


def span(first: str, last: str, sys_flag: int = 0) -> int:
    """Return the size of the fields from ``first`` to ``last``, by the kinds of hosts in ``sys_flag``."""
    names = list(LAYOUT)
    fields = names[names.index(first) : names.index(last) + 1]
    return sum(struct.calcsize(f">{_code(name, sys_flag)}") for name in fields)


def _code(name: str, sys_flag: int) -> str:
    is_v6 = sys_flag & {"born_host": 16, "store_host": 32}.get(name, 0)
    return "20s" if is_v6 else LAYOUT[name]


def header_struct(*names: str, sys_flag: int = 0, unsigned: Container[str] = ()) -> struct.Struct:
    """Return the struct of the fields ``names``, by default all, in the order drawn above.

    Negative values of ``unsigned`` fields are read as large numbers.
    """
    parts, skipped = [">"], 0
    for name in LAYOUT:
        code = _code(name, sys_flag)
        if names and name not in names:
            skipped += struct.calcsize(f">{code}")
            continue
        parts.append(f"{skipped}x" if skipped else "")
        parts.append(code.upper() if name in unsigned else code)
        skipped = 0
    return struct.Struct("".join(parts))


def _at(name: str) -> int:
    return span("size", name) - struct.calcsize(f">{LAYOUT[name]}")


MAGIC_AT: Final = _at("magic")
BODY_CRC_AT: Final = _at("body_crc")
QUEUE_ID_AT: Final = _at("queue_id")
FLAG_AT: Final = _at("flag")
QUEUE_OFFSET_AT: Final = _at("queue_offset")
PHYSICAL_OFFSET_AT: Final = _at("physical_offset")
SYS_FLAG_AT: Final = _at("sys_flag")
BORN_TIMESTAMP_AT: Final = _at("born_timestamp")
BORN_HOST_AT: Final = _at("born_host")
# With IPv4 hosts; 12 further for each IPv6 host before it.
STORE_TIMESTAMP_AT: Final = _at("store_timestamp")
STORE_HOST_AT: Final = _at("store_host")
BODY_AT: Final = span("size", "body_length")
TOPIC_AT: Final = BODY_AT + 1
"""Place of the topic in a record without body, with IPv4 hosts and the first magic; its length is the byte before."""

# Sys flag; its bits COMPRESSED (1) and COMPRESSION_MASK come from `librmq.message.record`.
MULTI_TAGS: Final = 2
TRANSACTION_MASK: Final = 12
TRANSACTION_PREPARED: Final = 4
UNQUEUED: Final = TRANSACTION_PREPARED
"""The bit by which a record has no queue entry: prepared records and rollbacks have it."""
TRANSACTION_COMMIT: Final = 8
TRANSACTION_ROLLBACK: Final = 12
BORN_HOST_V6: Final = 16
STORE_HOST_V6: Final = 32
HOSTS_V6: Final = BORN_HOST_V6 | STORE_HOST_V6
NEED_UNWRAP: Final = 64
INNER_BATCH: Final = 128
"""5.x: the body holds several messages, one at each queue offset from the record's on."""

HEADERS: Final = {
    hosts: header_struct(sys_flag=hosts, unsigned=("size", "magic", "body_crc"))
    for hosts in (0, BORN_HOST_V6, STORE_HOST_V6, HOSTS_V6)
}
"""Structs of a record up to its body, by the two bits of the sys flag for hosts of 16 bytes."""

_unpack_check = header_struct("size", "magic", "body_crc", "sys_flag", "body_length").unpack_from
_INT: Final = struct.Struct(">i")
_SHORT: Final = struct.Struct(">h")
_LONG: Final = struct.Struct(">q")
_BEFORE_HOSTS: Final = header_struct(*list(LAYOUT)[: list(LAYOUT).index("born_host")])
_AFTER_HOSTS: Final = struct.Struct(
    ">" + "".join(list(LAYOUT.values())[-3:])
)  # reconsume times, prepared offset, body length
_BLANK_MAGIC_BYTES: Final = BLANK_MAGIC.to_bytes(4, "big")
_SCHEDULE_TOPIC_BYTES: Final = SystemTopic.SCHEDULE.encode()
_SCHEDULE_TOPIC_SIZE: Final = len(SystemTopic.SCHEDULE)
_DELAY_BYTES: Final = PropertyName.DELAY.encode()
OWN_CHECKSUM: Final = b"__CRC32#\1"
OWN_CHECKSUM_SIZE: Final = len(OWN_CHECKSUM) + 11


# ---------------------------------------------------------------------------------------------------- records


def host_flags(born_host: Host, store_host: Host) -> int:
    """Return the bits of the sys flag for IPv6 hosts."""
    return (BORN_HOST_V6 if ":" in born_host[0] else 0) | (STORE_HOST_V6 if ":" in store_host[0] else 0)


@dataclass(slots=True, kw_only=True)
class Record:
    """The values of one log record, with ``body`` and ``properties_raw`` in stored form."""

    topic: str
    queue_id: int = 0
    flag: int = 0
    queue_offset: int = 0
    physical_offset: int = 0
    sys_flag: int = 0
    born_timestamp_ms: int = 0
    born_host: Host = ("127.0.0.1", 0)
    store_timestamp_ms: int = 0
    store_host: Host = ("127.0.0.1", 0)
    reconsume_times: int = 0
    prepared_transaction_offset: int = 0
    body: bytes = b""
    body_crc: int = 0
    properties_raw: bytes = b""
    magic: int = MESSAGE_MAGIC

    @property
    def size(self) -> int:
        """The length of the record in bytes."""
        lengths = 4 if self.magic == MESSAGE_MAGIC_V2 else 3  # one or two bytes for the topic, two for the properties
        fixed = host_ends(self.sys_flag)[1] + _AFTER_HOSTS.size + lengths
        return fixed + len(self.body) + len(self.topic.encode("utf-8", "replace")) + len(self.properties_raw)


def has_room(properties: Mapping[str, str]) -> bool:
    """Return whether a record has room for these properties."""
    return len(encode_properties(properties)) <= MAX_PROPERTIES_SIZE


def body_checksum(body: bytes | bytearray | memoryview) -> int:
    """Return the checksum of a stored body."""
    return (short_crc32 if len(body) <= SHORT_BODY else crc32)(body) & 0x7FFFFFFF


def encode_record(record: Record) -> bytes:
    """Encode ``record``; its ``body_crc`` is not computed.

    Raises:
        MessageIllegalError: A value does not fit its field, or a host's kind contradicts the sys flag.
    """
    try:
        topic = record.topic.encode()
    except UnicodeEncodeError:
        raise MessageIllegalError(f"topic {record.topic!r} cannot be written as UTF-8") from None
    if record.magic not in MAGICS:
        raise MessageIllegalError(f"unknown magic {record.magic:08x}")
    max_topic_size = MAX_TOPIC_SIZE if record.magic == MESSAGE_MAGIC else MAX_TOPIC_SIZE_V2
    if len(topic) > max_topic_size:
        raise MessageIllegalError(f"topic {record.topic[:200]!r} has {len(topic)} bytes, {max_topic_size} at most")
    if len(record.properties_raw) > MAX_PROPERTIES_SIZE:
        size = len(record.properties_raw)
        raise MessageIllegalError(f"{size} bytes of properties, {MAX_PROPERTIES_SIZE} at most")
    if (record.sys_flag ^ host_flags(record.born_host, record.store_host)) & HOSTS_V6:
        raise MessageIllegalError(f"sys flag {record.sys_flag} does not agree with the kinds of the hosts")
    try:
        return b"".join(
            (
                _BEFORE_HOSTS.pack(
                    record.size,
                    record.magic,
                    record.body_crc,
                    record.queue_id,
                    record.flag,
                    record.queue_offset,
                    record.physical_offset,
                    record.sys_flag,
                    record.born_timestamp_ms,
                ),
                encode_host(record.born_host),
                _LONG.pack(record.store_timestamp_ms),
                encode_host(record.store_host),
                _AFTER_HOSTS.pack(record.reconsume_times, record.prepared_transaction_offset, len(record.body)),
                record.body,
                len(topic).to_bytes(1 if record.magic == MESSAGE_MAGIC else 2, "big"),
                topic,
                _SHORT.pack(len(record.properties_raw)),
                record.properties_raw,
            )
        )
    except struct.error as error:
        raise MessageIllegalError(f"a field of the record is out of range: {error}") from None


Frame = tuple[int, int, int, int, int, int]
"""Where body and topic begin and end, where the properties begin, and where the record ends.

Unpack it: a named tuple takes 130 ns more, a seventh of the first look at a field.
"""


def frame(raw: Raw, position: int, limit: int) -> Frame:
    """Return the places of the parts of the record at ``position`` of ``raw``, which ends at or before ``limit``.

    All lengths are checked against each other, and no part is outside of the record. The content of the parts is not
    checked. As in RocketMQ, a negative length of body or properties counts as 0.

    Raises:
        RecordError: The bytes are not a record; the error names the field.
    """
    if limit - position < FIXED_SIZE:
        raise RecordError(f"expected a record of at least {FIXED_SIZE} bytes, found {limit - position} bytes")
    size, magic, _, sys_flag, body_length = _unpack_check(raw, position)
    if magic != MESSAGE_MAGIC and magic != MESSAGE_MAGIC_V2:
        raise RecordError(f"magic: expected {MESSAGE_MAGIC:08x}, found {magic:08x}", MAGIC_AT)
    end = position + size
    if size < FIXED_SIZE or end > limit:
        raise RecordError(f"size: expected {FIXED_SIZE} to {limit - position}, found {size}")
    lengths = 3 if magic == MESSAGE_MAGIC else 4  # one or two bytes for the topic, two for the properties
    body_at = position + BODY_AT
    if sys_flag & HOSTS_V6:
        body_at += HOST_V6_EXTRA * (sys_flag & HOSTS_V6).bit_count()
        if body_at + lengths > end:
            raise RecordError(f"sys flag: IPv6 hosts do not fit into {size} bytes", SYS_FLAG_AT)
        (body_length,) = _INT.unpack_from(raw, body_at - 4)
    topic_at = body_end = body_at + body_length if body_length > 0 else body_at
    if body_end + lengths > end:
        body_limit = end - body_at - lengths
        at = body_at - 4 - position
        raise RecordError(f"body length: expected {body_limit} at most, found {body_length}", at)
    topic_length, topic_limit = raw[body_end], MAX_TOPIC_SIZE
    topic_at += 1
    if magic == MESSAGE_MAGIC_V2:
        topic_length, topic_limit = topic_length << 8 | raw[topic_at], MAX_TOPIC_SIZE_V2
        topic_at += 1
    topic_end = topic_at + topic_length
    if topic_length > topic_limit or topic_end + 2 > end:
        topic_limit = min(topic_limit, end - topic_at - 2)
        raise RecordError(f"topic length: expected {topic_limit} at most, found {topic_length}", body_end - position)
    properties_at = topic_end + 2
    properties_length = raw[topic_end] << 8 | raw[topic_end + 1]
    if properties_at + (properties_length if properties_length <= MAX_PROPERTIES_SIZE else 0) != end:
        expected = f"expected {end - properties_at}"
        if properties_length == end - properties_at:  # RocketMQ reads a negative number
            expected = f"expected at most {MAX_PROPERTIES_SIZE}"
        raise RecordError(f"properties length: {expected}, found {properties_length}", topic_end - position)
    return body_at, body_end, topic_at, topic_end, properties_at, end


def host_ends(sys_flag: int) -> tuple[int, int]:
    """Return the ends of born host and store host in a record, which depend on their kinds.

    The store timestamp (8 bytes) is between them, the reconsume times after the second.
    """
    born_end = STORE_TIMESTAMP_AT + (HOST_V6_EXTRA if sys_flag & BORN_HOST_V6 else 0)
    return born_end, born_end + 16 + (HOST_V6_EXTRA if sys_flag & STORE_HOST_V6 else 0)


def check_record(raw: Raw, position: int, limit: int, *, check_body: bool) -> int:
    """Return the size of the sound record at ``position``, 0 for the blank that ends a file.

    RocketMQ's recovery continues after a sound record. Its lengths agree, its body matches the checksum (if
    ``check_body``), and in the schedule topic its DELAY is a number. The other fields, topic and properties have no
    checksum, unless the record has one of itself (`has_own_checksum`), which is compared with ``check_body`` too. The
    file ends at ``limit``, which is at most ``len(raw)``.

    Raises:
        RecordError: The record is not sound; the error names the field.
        BodyChecksumError: Only the body is wrong.
    """
    try:
        body_at, body_end, topic_at, topic_end, properties_at, end = frame(raw, position, limit)
    except RecordError:
        if limit - position >= BLANK_SIZE and raw[position + 4 : position + 8] == _BLANK_MAGIC_BYTES:
            return 0
        raise
    if check_body and body_end > body_at:
        (expected,) = _INT.unpack_from(raw, position + BODY_CRC_AT)
        checksum = body_checksum(raw[body_at:body_end])
        if checksum != expected:
            raise _bad_checksum(expected, checksum)
    if check_body:
        check_own_checksum(raw, position, end)
    if topic_end - topic_at == _SCHEDULE_TOPIC_SIZE and raw[topic_at:topic_end] == _SCHEDULE_TOPIC_BYTES:
        level = find_property(bytes(raw[properties_at:end]), _DELAY_BYTES)
        if level is not None and java_int(java_decode(level)) is None:
            at = properties_at - position
            raise RecordError(f"DELAY of a delayed message: expected a number, found {level[:40]!r}", at)
    return end - position


def has_own_checksum(tail: bytes) -> bool:
    """Return whether a record that ends in ``tail``, at least 20 bytes, has a checksum of itself as its last property.

    RocketMQ writes one since 5.1.5 where ``enabledAppendPropCRC`` is set: the name, ten decimal digits, the least
    significant first, and the separator of properties. It covers all bytes of the record before it.
    """
    return tail[-1:] == b"\2" and tail[-OWN_CHECKSUM_SIZE:].startswith(OWN_CHECKSUM)


def check_own_checksum(raw: Raw, position: int, end: int) -> None:
    """Compare the record from ``position`` to ``end`` with the checksum of itself, if it has one.

    Raises:
        RecordError: They differ.
    """
    at = end - OWN_CHECKSUM_SIZE
    tail = bytes(raw[at:end])
    if has_own_checksum(tail):
        digits, actual = tail[len(OWN_CHECKSUM) : -1][::-1], body_checksum(raw[position:at])
        if not digits.isdigit() or int(digits) != actual:
            what = f"checksum of the record in __CRC32#: expected {digits.decode('ascii', 'replace')}, found {actual}"
            raise RecordError(what, at - position)


def decode_record(raw: Raw, position: int = 0, *, check_body: bool = True) -> Record:
    """Decode the record at ``position`` of ``raw``.

    Raises:
        RecordError: The bytes are not a record.
        BodyChecksumError: Only the body is wrong (with ``check_body``).
    """
    body_at, body_end, topic_at, topic_end, properties_at, end = frame(raw, position, len(raw))
    _, magic, body_crc, queue_id, flag, queue_offset, physical_offset, sys_flag, born_timestamp_ms = (
        _BEFORE_HOSTS.unpack_from(raw, position)
    )
    born_end, store_end = host_ends(sys_flag)
    reconsume_times, prepared_transaction_offset, _ = _AFTER_HOSTS.unpack_from(raw, position + store_end)
    body = bytes(raw[body_at:body_end])
    if check_body and body and body_checksum(body) != body_crc:
        raise _bad_checksum(body_crc, body_checksum(body))
    return Record(
        topic=java_decode(bytes(raw[topic_at:topic_end])),
        queue_id=queue_id,
        flag=flag,
        queue_offset=queue_offset,
        physical_offset=physical_offset,
        sys_flag=sys_flag,
        born_timestamp_ms=born_timestamp_ms,
        born_host=decode_host(bytes(raw[position + BORN_HOST_AT : position + born_end])),
        store_timestamp_ms=_LONG.unpack_from(raw, position + born_end)[0],
        store_host=decode_host(bytes(raw[position + born_end + 8 : position + store_end])),
        reconsume_times=reconsume_times,
        prepared_transaction_offset=prepared_transaction_offset,
        body=body,
        body_crc=body_crc,
        properties_raw=bytes(raw[properties_at:end]),
        magic=magic,
    )


def _bad_checksum(expected: int, actual: int) -> BodyChecksumError:
    return BodyChecksumError(f"body checksum: expected {expected & 0xFFFFFFFF:08x}, found {actual:08x}", BODY_CRC_AT)


def store_timestamp_ms(raw: Raw, position: int = 0) -> int:
    """Return the store time of the record at ``position``, which must have at least ``FIXED_SIZE`` bytes there."""
    at = position + host_ends(raw[position + SYS_FLAG_AT + 3])[0]
    return int(_LONG.unpack_from(raw, at)[0])
