"""The entries of a queue as they lie in its files, and the extension of a queue: data for filters that need no log.

::

    unit  size            2   of the whole unit, 20 and more
          tagsCode        8
          storeTime       8   milliseconds
          bitmapLength    2
          bitmap          bitmapLength (14 by default; 0 if the topic had no filters)

Units follow each other from the start of a file. A unit that would leave fewer than 4 bytes goes to the next file, and
the short -1 marks the end of this one. In place of its tags code, an entry of the queue has the address of its unit:
its position minus 2^63. Real tags codes have 32 bits, so the two are distinct.

Mirrors 4.9.4's ``ConsumeQueueExt``. `librmq.consumequeue` draws an entry, and has the queue. Functions here take its
files, or `Chunks` of its entries, and say where these begin and end, and which are bad.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self, TypeAlias

from librmq.errors import ConfigError, CorruptionError, ReadOnlyError, StoreClosedError
from librmq.files import Buffer, DiskFiles, Files
from librmq.files.rolling import MappedFileQueue, MappingPool
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
    file = files.file_at(position)
    if file is None:
        return 0, 0
    physical_offset, size = PLACE.unpack_from(file.buffer, position % file.size)
    return physical_offset, size


def find_end(files: MappedFileQueue) -> int:
    """Return the position after the last entry, by bisection of the last file with an entry."""
    for start in reversed(files.starts):
        file = files.file(start)
        buffer = file.buffer
        if _counts(buffer, 0):
            # entry `low` is valid, entry `high` is not
            low, high = 0, -(-file.data_end() // ENTRY_SIZE)
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


def _counts(buffer: Buffer, at: int) -> bool:
    physical_offset, size = PLACE.unpack_from(buffer, at)
    return bool(physical_offset >= 0 and size > 0)


def _ends(block: Entries) -> _Mask:
    """Return which entries end a queue in RocketMQ."""
    mask: _Mask = (block["size"] <= 0) | (block["physical_offset"] < 0)
    return mask


# ---- the extension

_UNIT: Final = struct.Struct(">hqqh")
_SIZE: Final = struct.Struct(">h")
_END_MARK: Final = b"\xff\xff"
_END_ROOM: Final = 4  # bytes at the end of a file that no unit reaches
_BASE: Final = -(1 << 63)


def pack_unit(tags_code: int, store_timestamp_ms: int, bitmap: bytes | None) -> bytes:
    """Encode a unit.

    Raises:
        ValueError: A number exceeds 64 bits, or the bitmap 32,747 bytes.
    """
    bitmap = bitmap or b""
    try:
        return _UNIT.pack(_UNIT.size + len(bitmap), tags_code, store_timestamp_ms, len(bitmap)) + bitmap
    except struct.error as error:
        what = f"{tags_code}, {store_timestamp_ms} and a bitmap of {len(bitmap)} bytes"
        raise ValueError(f"no unit can hold {what}: {error}") from None


def check_bitmap(bit_count: int, file_size: int) -> None:
    """Refuse bitmaps whose units fit into no extension file.

    Raises:
        ConfigError: The file is too small.
    """
    size = _UNIT.size + (bit_count + 7) // 8 + _END_ROOM
    if size > file_size:
        raise ConfigError(
            f"bitmaps of {bit_count} bits do not fit into extension files of {file_size} bytes: lower "
            f"expected_consumers or raise bloom_error, or open the store with consumequeue_ext_file_size={size} or more"
        )


class ConsumeQueueExt(Closing):
    """The units of one queue. One thread can write while many read."""

    __slots__ = ("_closed", "_end", "_files", "_hint", "_sure")

    def __init__(self, files: MappedFileQueue, last_address: int | None) -> None:
        if not _UNIT.size + _END_ROOM <= files.file_size <= 1 << 31:
            raise ConfigError(f"extension file size: expected 24 bytes to 2 GiB, found {files.file_size}")
        self._files = files
        self._hint = last_address
        self._end = -1  # not searched yet
        self._sure = 0  # up to this position the written file has blocks
        self._closed = False

    @classmethod
    def open(
        cls,
        folder: str,
        file_size: int = EXT_FILE_SIZE,
        *,
        files: Files | None = None,
        pool: MappingPool | None = None,
        writable: bool = True,
        last_address: int | None = None,
    ) -> Self:
        """Open the units in ``folder``, which need not exist yet; reads the folder's listing only.

        ``last_address`` is the newest address in use, if known. The end is then searched from there and not from the
        start of the last file. If all files are deleted, new ones begin after it, so that old addresses never lead to
        new units.

        Raises:
            CorruptionError: The folder holds an impossible file.
        """
        files = files or DiskFiles()
        pool = pool or MappingPool(4)
        return cls(MappedFileQueue(folder, file_size, files, pool, writable=writable), last_address)

    @override
    def __repr__(self) -> str:
        return f"<ConsumeQueueExt {self._files.folder}>"

    def get(self, address: int) -> ExtUnit:
        """Return the unit at ``address``.

        Raises:
            CorruptionError: There is none, or it is damaged.
            ValueError: ``address`` is not an address of such a file.
        """
        if self._closed:
            raise StoreClosedError(f"{self._files.folder} is closed")
        if not _BASE <= address <= LAST_EXT_ADDRESS:
            raise ValueError(f"address: expected that of an extension unit, found {address}")
        position = address - _BASE
        at = position % self._files.file_size
        file = self._files.file_at(position)
        if file is None:
            path = self._files.path(position - at)
            raise CorruptionError(path, at, "unit", "expected this file, to which a queue entry points")
        room = file.size - at
        if room < _UNIT.size:
            raise CorruptionError(file.path, at, "unit", f"no unit fits in the last {room} bytes of a file")
        size, tags_code, store_timestamp_ms, length = _UNIT.unpack_from(file.buffer, at)
        if size != _UNIT.size + length or length < 0 or size > room:
            what = f"expected a unit of 20 to {room} bytes, found size {size} with a bitmap of {length}"
            raise CorruptionError(file.path, at, "unit", what)
        bitmap = file.buffer[at + _UNIT.size : at + size] if length else None
        return ExtUnit(tags_code, store_timestamp_ms, bitmap, size)

    @property
    def folder(self) -> str:
        """The folder of its files."""
        return self._files.folder

    @property
    def is_empty(self) -> bool:
        """Whether there is no file."""
        return not self._files.starts

    @property
    def begin(self) -> int:
        """The position of the first file's first byte."""
        return self._files.begin

    @property
    def end(self) -> int:
        """The position after the last unit, where the next one goes if it fits; searched once."""
        if self._end < 0:
            self._end = self._find_end()
        return self._end

    def _find_end(self) -> int:
        starts = self._files.starts
        if self._hint is not None:
            position = self._hint - _BASE
            if not starts:
                return position - position % self._files.file_size + self._files.file_size
            if self._files.start_of(position) == starts[-1]:
                try:
                    return self._walk(position + self.get(self._hint).size)
                except CorruptionError:
                    pass
        return self._walk_back()

    def _walk_back(self) -> int:
        """Find the end by a walk through the last file with a unit."""
        for start in reversed(self._files.starts):
            if (end := self._walk(start)) > start:
                return end
        return self._files.begin

    def _walk(self, position: int) -> int:
        """Skip from unit to unit within a file, and return their end, which can be the mark of a full file."""
        start = position - position % self._files.file_size
        file = self._files.file(start)
        buffer, read, at, last = file.buffer, _SIZE.unpack_from, position - start, file.size - _END_ROOM
        while at <= last:
            (size,) = read(buffer, at)
            if size < _UNIT.size or at + size > last:
                break
            at += size
        return start + at

    # ------------------------------------------------------------------------------------------- for the writer

    def put(self, tags_code: int, store_timestamp_ms: int, bitmap: bytes | None) -> int:
        """Append a unit, and return its address, the tags code for its entry.

        Raises:
            ValueError: The unit fits into no file, or no address is left; nothing is written.
        """
        unit = pack_unit(tags_code, store_timestamp_ms, bitmap)
        file_size = self._files.file_size
        if len(unit) > file_size - _END_ROOM:
            raise ValueError(f"a unit of {len(unit)} bytes does not fit in a file of {file_size}")
        position = self.end
        room = file_size - position % file_size - _END_ROOM
        target = position if len(unit) <= room else position + room + _END_ROOM
        address = target + _BASE
        if not is_ext_address(address + len(unit)):
            raise ValueError(f"{self._files.folder}: no address is left at {target}")
        if target != position:
            self._write(position, _END_MARK)
        self._write(target, unit)
        self._end = target + len(unit)
        return address

    def _write(self, position: int, data: bytes) -> None:
        files = self._files
        start = position - position % files.file_size
        at, end = position - start, position - start + len(data)
        if position + len(data) > self._sure:
            self._check_writable()
            if not files.starts or start == files.end:
                files.create(start)
            self._sure = start + files.reserve(start, at, end)
        files.write(start, at, data)

    def recover(self) -> int:
        """Search the end from the last file's start on, clear everything after it, and return the end."""
        if self._files.starts:
            self._cut(self._walk_back())
        return self.end

    def truncate_after(self, max_address: int) -> None:
        """Drop the units after the one at ``max_address``.

        Raises:
            CorruptionError: There is no such unit.
        """
        self._cut(max_address - _BASE + self.get(max_address).size)

    def truncate_before(self, min_address: int) -> list[str]:
        """Delete the files that end before the unit at ``min_address``, and return their paths.

        Raises:
            CorruptionError: There is no such unit.
        """
        self._check_writable()
        self.get(min_address)
        # in order, because a gap would hide which files to delete
        return self._files.delete_before(min_address - _BASE, in_order=True)

    def clear(self) -> None:
        """Drop all units."""
        self._check_writable()
        self._files.delete_from(0)
        self._hint = None
        self._end = self._sure = 0

    def _cut(self, position: int) -> None:
        self._check_writable()
        self._sure = 0
        self._end = position
        if position % self._files.file_size or position == self._files.begin:
            self._files.delete_from(position + 1)
            self._files.zero_from(position)
        else:
            self._files.delete_from(position)

    def write_again(self, address: int | None) -> None:
        """Write the units from ``address`` on, by default all, again, so that `flush` includes them."""
        self._files.write_again(self.begin if address is None else address - _BASE, self.end)

    def _check_writable(self) -> None:
        if self._closed:
            raise StoreClosedError(f"{self._files.folder} is closed")
        if not self._files.writable:
            raise ReadOnlyError(f"{self._files.folder} is open for reading only")

    def flush(self) -> None:
        """Flush all units to the device."""
        self._files.flush()

    def note_flushed(self) -> None:
        """Note that everything is on the device, flushed by another call than `flush`."""
        self._files.take_marks()

    @override
    def close(self) -> None:
        """Flush, and refuse later calls; a repetition does nothing."""
        if not self._closed:
            self._files.flush()
            self._closed = True
            self._files.unmap_all()
            self._sure = 0
