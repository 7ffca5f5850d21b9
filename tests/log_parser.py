"""A small parser of a log, written from the format alone: what librmq reads of damaged stores is compared with it."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import NamedTuple

_MAGIC, _BLANK = 0xDAA320A7, 0xCBD43194


class Parsed(NamedTuple):
    """A record: where it is, its queue, and whether its body fits its checksum."""

    at: int
    size: int
    topic: str
    queue_id: int
    is_sound: bool


class ParsedLog(NamedTuple):
    """The records up to the first unreadable place, and all that can be found behind it."""

    kept: list[Parsed]
    behind: list[Parsed]


def _record(data: bytes, at: int, start: int) -> Parsed | None:
    """Return the record at a place of a file, None if there is none."""
    if at + 91 > len(data):
        return None
    size, magic, crc, queue_id = struct.unpack_from(">IIIi", data, at)
    if magic != _MAGIC or not 91 <= size <= len(data) - at or struct.unpack_from(">q", data, at + 28)[0] != start + at:
        return None
    (length,) = struct.unpack_from(">i", data, at + 84)
    end = at + 88 + length
    if length < 0 or end + 3 > at + size:
        return None
    topic_end = end + 1 + data[end]
    if topic_end + 2 + struct.unpack_from(">H", data, topic_end)[0] != at + size:
        return None
    is_sound = zlib.crc32(data[at + 88 : end]) & 0x7FFFFFFF == crc
    return Parsed(start + at, size, data[end + 1 : topic_end].decode(), queue_id, is_sound)


def parse(store: Path) -> ParsedLog:
    """Parse the log of a store of IPv4 hosts and short topics."""
    files = sorted(
        (path for path in (store / "commitlog").iterdir() if path.name.isdigit()), key=lambda path: path.name
    )
    kept: list[Parsed] = []
    behind: list[Parsed] = []
    is_whole, expected = True, None
    for path in files:
        data, start = path.read_bytes(), int(path.name)
        is_whole = is_whole and expected in (None, start)
        expected = start + len(data)
        at = 0
        while at + 8 <= len(data):
            record = _record(data, at, start)
            if record is not None:
                is_whole = is_whole and record.is_sound
                (kept if is_whole else behind).append(record)
                at += record.size
            elif struct.unpack_from(">I", data, at + 4)[0] == _BLANK and is_whole:
                break
            else:
                is_whole = False
                at += 1
    return ParsedLog(kept, behind)
