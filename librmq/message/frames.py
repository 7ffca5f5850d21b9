"""Frames of a log file: records side by side, the blank at the end, and the mark of an unfinished write.

`librmq.commitlog` draws the file, `librmq.message.record` draws a record. Pure functions of a file's bytes.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import Final

from librmq.errors import BodyChecksumError, CorruptionError, RecordError
from librmq.message import record
from librmq.runtime.compiled_core import CORE
from librmq.runtime.event_log import advance

SIZE_AND_MAGIC: Final = record.header_struct("size", "magic", unsigned=("size",))
_FRAME: Final = ("size", "magic", "body_crc", "sys_flag", "body_length")
_unpack_frame = record.header_struct(*_FRAME, unsigned=_FRAME).unpack_from  # negative lengths come out large
_MAGIC: Final = record.MESSAGE_MAGIC
_V6: Final = record.HOSTS_V6
_BLANK_SIZE: Final = record.BLANK_SIZE
_HALF_REPLACED: Final = frozenset(
    int.from_bytes(magic.to_bytes(4, "big")[:count] + record.UNFINISHED_MAGIC.to_bytes(4, "big")[count:], "big")
    for magic in record.MAGICS
    for count in (1, 2, 3)
)
_CHUNK: Final = 1 << 18  # a chunk that fits the cache of a processor's core

LogItem = tuple[int, int, bytes | None]
"""An item of the log: physical offset, size, and the bytes of a record, or None for the blank of a file."""


def blank(remaining: int) -> bytes:
    """Return the blank that ends a file with ``remaining`` bytes."""
    return SIZE_AND_MAGIC.pack(remaining, record.BLANK_MAGIC)


def write_records(buffer: mmap.mmap, at: int, data: bytes) -> None:
    """Write records side by side; a kill leaves all of them, or a mark for `unfinished_size`."""
    if len(data) <= _BLANK_SIZE:
        buffer[at : at + len(data)] = data
        return
    buffer[at : at + _BLANK_SIZE] = SIZE_AND_MAGIC.pack(len(data), record.UNFINISHED_MAGIC)
    buffer[at + _BLANK_SIZE : at + len(data)] = data[_BLANK_SIZE:]
    buffer[at : at + _BLANK_SIZE] = data[:_BLANK_SIZE]


def unfinished_size(head: bytes, room: int) -> int:
    """Return the number of bytes that a mark announces, 0 if ``head`` is none; a write never crosses files.

    If the record's head has replaced only a part of the mark, its number is lost: all that follows may belong to it.
    """
    size, magic = SIZE_AND_MAGIC.unpack(head.ljust(_BLANK_SIZE, b"\0"))
    if magic in _HALF_REPLACED:
        return room
    return int(size) if magic == record.UNFINISHED_MAGIC and size <= room else 0


def items(
    buffer: mmap.mmap, path: str, start: int, place: int, end: int, file_size: int, check_body: bool, data_end: int
) -> Iterator[LogItem]:
    """Yield the records of one file from ``place`` up to ``end`` and its blank.

    ``path`` names the file, and ``start`` is its place in the log. Behind ``data_end`` may be a hole, of which no more
    is read than shows that no record begins there: a mapping would fill it in a file system that lies in memory.

    Raises:
        CorruptionError: The bytes are neither a record nor a blank.
    """
    if CORE.items is not None:
        records: Iterator[LogItem] = CORE.items(
            buffer, start, place, end, file_size, check_body,
            lambda place: _item(buffer, path, start, place, file_size, check_body), advance,
        )  # fmt: skip
        return records
    return _items(buffer, path, start, place, end, file_size, check_body, data_end)


def _items(
    buffer: mmap.mmap, path: str, start: int, place: int, end: int, file_size: int, check_body: bool, data_end: int
) -> Iterator[LogItem]:
    # Records are cut out of chunks: indexing and slicing bytes is twice as fast as a mapping. Plain records are
    # checked here like `record.check_record` does; it checks all others.
    check, unpack, fixed, body_at = record.crc32, _unpack_frame, record.FIXED_SIZE, record.BODY_AT
    chunk, chunk_at, chunk_size, body_size = b"", place, 0, record.SHORT_BODY
    while place < end:
        inside, size = place - chunk_at, fixed
        if inside + fixed <= chunk_size:
            size, magic, checksum, sys_flag, body_size = unpack(chunk, inside)
            if body_size <= size - fixed and inside + size <= chunk_size and magic == _MAGIC and not sys_flag & _V6:
                raw = chunk[inside : inside + size]
                body_end = body_at + body_size
                topic_end = body_end + 1 + raw[body_end]
                if (
                    topic_end != body_end + 20  # the length of the schedule topic's name; its records need more checks
                    and topic_end + 2 <= size
                    and raw[topic_end] << 8 | raw[topic_end + 1] == size - topic_end - 2 < 32768
                    and topic_end < body_end + 129
                    and (not check_body or not body_size or check(raw[body_at:body_end]) & 0x7FFFFFFF == checksum)
                    and not (check_body and raw[-1] == 2 and record.has_own_checksum(raw))
                ):
                    yield start + place, size, raw
                    place += size
                    continue
        if (inside or not chunk) and inside + size > chunk_size:  # it reaches beyond the chunk
            chunk_end = max(min(place + _CHUNK, data_end), place + _BLANK_SIZE)
            chunk, chunk_at = buffer[place : min(chunk_end, end)], place
            chunk_size = len(chunk)
            check = record.short_crc32 if body_size < record.SHORT_BODY else record.crc32  # as for the last record
            advance(chunk_size)
            continue
        item = _item(buffer, path, start, place, file_size, check_body)
        yield item
        if item[2] is None:
            return
        place += item[1]


def _item(buffer: mmap.mmap, path: str, start: int, place: int, file_size: int, check_body: bool) -> LogItem:
    """Return the record at ``place``, or the blank there."""
    try:
        size = record.check_record(buffer, place, file_size, check_body=check_body)
    except RecordError as error:
        raise damage(path, start + place, error) from error
    return (start + place, size, buffer[place : place + size]) if size else (start + place, file_size - place, None)


def split(data: bytes, physical_offset: int) -> list[LogItem]:
    """Return the whole records in ``data``, which begins at ``physical_offset``, as `items` does."""
    records: list[LogItem] = []
    at = 0
    while at < len(data):
        size = SIZE_AND_MAGIC.unpack_from(data, at)[0]
        records.append((physical_offset + at, size, data[at : at + size]))
        at += size
    return records


def is_whole(raw: bytes, physical_offset: int) -> bool:
    """Return whether a sound record was copied to its last byte, over bytes that were zero before."""
    address = int.from_bytes(raw[record.PHYSICAL_OFFSET_AT : record.PHYSICAL_OFFSET_AT + 8], "big")
    _, _, topic_at, topic_end, properties_at, end = record.frame(raw, 0, len(raw))
    return address == physical_offset and 0 not in raw[topic_at:topic_end] and 0 not in raw[properties_at:end]


def damage(path: str, physical_offset: int, error: RecordError) -> CorruptionError:
    """Return the error about a record of the file at ``path``, with its place in the log."""
    kind = "checksum" if isinstance(error, BodyChecksumError) else "record"
    return CorruptionError(path, physical_offset, kind, error.reason)
