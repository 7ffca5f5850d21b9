"""The entries of a queue as they lie in its files.

`librmq.consumequeue` draws an entry, and has the queue. Functions here take its files, or `Chunks` of its entries, and
say where these begin and end, and which are bad.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from librmq.errors import ReadOnlyError, StoreClosedError
from librmq.files import Buffer
from librmq.files.rolling import MappedFileQueue
from librmq.override import override
from librmq.runtime import lazy_numpy as np
from librmq.runtime.closing import Closing

if TYPE_CHECKING:
    import numpy.typing as npt

ENTRY: Final = struct.Struct(">qiq")
"""The fields of an entry: physical offset, size, tags code."""
ENTRY_SIZE: Final = 20
"""Bytes of an entry."""

Entries: TypeAlias = "npt.NDArray[Any]"
"""An array of entries, of type `entry_dtype`."""

_Mask: TypeAlias = "npt.NDArray[np.bool_]"

PLACE: Final = struct.Struct(">qi")  # the first two fields of an entry
_FILLER: Final = ENTRY.pack(0, 0x7FFFFFFF, 0)
_FILLER_PLACE: Final = (0, 0x7FFFFFFF)
HOLE_SIZE: Final = 0x7FFFFFFF
"""Size in an entry that points to no message: filler, or the entry of a message that recovery found lost."""
EXT_FILE_SIZE: Final = 48 << 20
"""Length of an extension file in a 4.9 broker's store, in bytes."""
LAST_EXT_ADDRESS: Final = -(1 << 31) - 1  # anything up to here is an address, anything above a tags code
BLOCK: Final = 65536  # entries that are read together

Chunks = Iterable[tuple[int, bytes]]
"""Runs of entries: the queue offset of the first one, and their bytes."""


@cache
def entry_dtype() -> np.dtype[np.void]:
    """Return the type of an array of entries."""
    return np.dtype([("physical_offset", ">i8"), ("size", ">i4"), ("tags_code", ">i8")])


class RollingEntries(Closing):
    """What a queue and its extension have in common: the files of one folder, which can be closed or only read."""

    __slots__ = ("_closed", "_files", "_sure", "folder")

    def __init__(self, files: MappedFileQueue) -> None:
        self.folder: str = files.folder
        """The folder of its files."""
        self._files = files
        self._closed = False
        self._sure = 0  # blocks of the written file are allocated up to this position; 0 until the first allocation

    @override
    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.folder}>"

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError(f"{self.folder} is closed")

    def _check_writable(self) -> None:
        if self._closed or not self._files.writable:
            self._check_open()
            raise ReadOnlyError(f"{self.folder} is open for reading only")

    def flush(self) -> None:
        """Flush everything to the device."""
        self._files.flush()

    def note_flushed(self) -> None:
        """Note that everything has reached the device by other means than `flush`."""
        self._files.take_marks()

    @override
    def close(self) -> None:
        """Flush and close; later calls are refused, a repetition does nothing."""
        if not self._closed:
            self.flush()
            self._closed = True
            self._files.unmap_all()
            self._sure = 0


class ExtUnit(NamedTuple):
    """The fields of a unit of a queue's extension."""

    tags_code: int
    """Hash code of the tag."""
    store_timestamp_ms: int
    """Store time of the message, in milliseconds since 1970."""
    bitmap: bytes | None
    """The groups whose filters select the message; None without one."""
    size: int
    """Length of the unit in bytes."""


def is_ext_address(tags_code: int) -> bool:
    """Return whether the ``tags_code`` of an entry is the address of a unit."""
    return tags_code <= LAST_EXT_ADDRESS


class QueueEntry(NamedTuple):
    """Place of a message in the log, and a code to filter it by."""

    physical_offset: int
    """Start of the record in the log."""
    size: int
    """Bytes of the record."""
    tags_code: int
    """Hash code of the tag, or the address of an extension unit; for a delayed message its delivery time, in
    milliseconds since 1970."""


def places_and_sizes(raw: bytes) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the physical offsets and sizes of packed entries; for some tens of entries faster than arrays."""
    numbers = _places(len(raw) // ENTRY_SIZE)(raw)
    return numbers[::2], numbers[1::2]


@lru_cache(maxsize=64)
def _places(count: int) -> Callable[[bytes], tuple[int, ...]]:
    return struct.Struct(">" + count * "qi8x").unpack


def place_at(files: MappedFileQueue, position: int) -> tuple[int, int]:
    """Return physical offset and size of the entry at ``position``; (0, 0) without a file."""
    raw = files.read(position, position + PLACE.size)
    physical_offset, size = PLACE.unpack(raw) if raw else (0, 0)
    return physical_offset, size


def find_end(files: MappedFileQueue) -> int:
    """Return the position after the last entry, by bisection of the last file with an entry."""
    for start in reversed(files.starts):
        buffer, end = files.content(start)
        if isinstance(buffer, bytes):  # the last entry can end in zeros
            buffer = buffer.ljust(end + ENTRY_SIZE, b"\0")
        if _counts(buffer, 0):
            # entry `low` is valid, entry `high` is not
            low, high = 0, -(-end // ENTRY_SIZE)
            while high - low > 1:
                middle = (low + high) // 2
                physical_offset, size = PLACE.unpack_from(buffer, middle * ENTRY_SIZE)
                if physical_offset >= 0 and size > 0:
                    low = middle
                else:
                    high = middle
            return start + high * ENTRY_SIZE
    return files.begin


def find_begin(files: MappedFileQueue, end: int) -> int:
    """Return the first queue offset that is not filler; the queue ends at ``end``."""
    low = files.begin // ENTRY_SIZE
    high = min(low + files.file_size // ENTRY_SIZE, end)
    if low == high or place_at(files, low * ENTRY_SIZE) != _FILLER_PLACE:
        return low
    while low < high:  # entries below `low` are filler, `high` is not
        middle = (low + high) // 2
        if place_at(files, middle * ENTRY_SIZE) == _FILLER_PLACE:
            low = middle + 1
        else:
            high = middle
    return low


def message_end(files: MappedFileQueue, queue_offset: int) -> int:
    """Return where in the log the message of an entry ends, -1 if the entry points to none."""
    physical_offset, size = place_at(files, queue_offset * ENTRY_SIZE)
    if physical_offset < 0 or size <= 0 or size == HOLE_SIZE:
        return -1
    return physical_offset + size


def fill(files: MappedFileQueue, start: int, end: int) -> None:
    """Fill the first file up to its first entry, if the queue does not start with the file."""
    buffer = files.file(start).buffer
    for at in range(0, end - start, BLOCK * ENTRY_SIZE):
        until = min(end - start, at + BLOCK * ENTRY_SIZE)
        buffer[at:until] = _FILLER * ((until - at) // ENTRY_SIZE)


def count_sound(block: Entries) -> int:
    """Return the number of entries before the first bad one."""
    bad = _ends(block)
    return int(bad.argmax()) if bad.any() else len(block)


def first_bad(chunks: Chunks) -> int | None:
    """Return the queue offset of the first bad entry."""
    for first, raw in chunks:
        block = np.frombuffer(raw, entry_dtype())
        sound = count_sound(block)
        if sound < len(block):
            return first + sound
    return None


def first_beyond(chunks: Chunks, physical_end: int) -> int | None:
    """Return the queue offset of the first entry that is bad or reaches beyond ``physical_end``; no filler."""
    limit = max(min(physical_end, (1 << 63) - 1), -1)
    for first, raw in chunks:
        block = np.frombuffer(raw, entry_dtype())
        beyond = _ends(block) | (block["physical_offset"] > limit - block["size"].astype(np.int64))
        beyond &= block["size"] != HOLE_SIZE
        if beyond.any():
            return first + int(beyond.argmax())
    return None


def first_from(chunks: Chunks, physical_offset: int) -> int | None:
    """Return the queue offset of the first entry that points to ``physical_offset`` or behind it."""
    limit = max(0, min(physical_offset, (1 << 63) - 1))
    for first, raw in chunks:
        is_beyond = np.frombuffer(raw, entry_dtype())["physical_offset"] >= limit
        if is_beyond.any():
            return first + int(is_beyond.argmax())
    return None


def last_ext_address(chunks: Callable[[int, int], Chunks], begin: int, end: int) -> int | None:
    """Return the address in the last entry from ``begin`` to ``end`` that has one, nearly always the last entry."""
    while end > begin:
        low = max(end - BLOCK, begin)
        for _, raw in reversed(list(chunks(low, end))):
            codes = np.frombuffer(raw, entry_dtype())["tags_code"]
            addresses = codes[codes <= LAST_EXT_ADDRESS]
            if addresses.size:
                return int(addresses[-1])
        end = low
    return None


def nearest_in_time(stored: Callable[[int], int | None], low: int, end: int, per_file: int, timestamp_ms: int) -> int:
    """Return the queue offset from ``low`` to ``end`` whose time is nearest; `ConsumeQueue.queue_offset_at` says how.

    ``stored`` returns the time of an entry, None if it has none.
    """
    while (following := low - low % per_file + per_file) < end:
        last = stored(following - 1)
        if last is not None and last >= timestamp_ms:
            break
        low = following
    begin, high = low, min(following, end) - 1
    earlier: tuple[int, int] | None = None
    later: tuple[int, int] | None = None
    while low <= high:
        middle = (low + high) // 2
        time = stored(middle)
        if time == timestamp_ms:
            return middle
        if time is None:
            low = middle + 1
        elif time > timestamp_ms:
            high, later = middle - 1, (middle, time)
        else:
            low, earlier = middle + 1, (middle, time)
    if earlier is None:
        return begin if later is None else later[0]
    if later is None or timestamp_ms - earlier[1] <= later[1] - timestamp_ms:
        return earlier[0]
    return later[0]


def _counts(buffer: Buffer | bytes, at: int) -> bool:
    physical_offset, size = PLACE.unpack_from(buffer, at)
    return bool(physical_offset >= 0 and size > 0)


def _ends(block: Entries) -> _Mask:
    """Return which entries end a queue in RocketMQ."""
    mask: _Mask = (block["size"] <= 0) | (block["physical_offset"] < 0)
    return mask
