"""The extension of a queue: data for filters that need no log.

::

    unit  size            2   of the whole unit, 20 and more
          tagsCode        8
          storeTime       8   milliseconds
          bitmapLength    2
          bitmap          bitmapLength (14 by default; 0 if the topic had no filters)

Units follow each other from the start of a file. A unit that would leave fewer than 4 bytes goes to the next file, and
the short -1 marks the end of this one. In place of its tags code, an entry of the queue has the address of its unit:
its position minus 2^63. Real tags codes have 32 bits, so the two are distinct.

Mirrors 4.9.4's ``ConsumeQueueExt``.
"""

from __future__ import annotations

import struct
from typing import Final, Self

from librmq.consumequeue_entries import EXT_FILE_SIZE, LAST_EXT_ADDRESS, ExtUnit, RollingEntries, is_ext_address
from librmq.errors import ConfigError, CorruptionError
from librmq.files import DiskFiles, Files
from librmq.files.rolling import MappedFileQueue, MappingPool

__all__ = ["ConsumeQueueExt"]

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


class ConsumeQueueExt(RollingEntries):
    """The units of one queue. One thread can write while many read."""

    __slots__ = ("_end", "_hint")

    def __init__(self, files: MappedFileQueue, last_address: int | None) -> None:
        if not _UNIT.size + _END_ROOM <= files.file_size <= 1 << 31:
            raise ConfigError(f"extension file size: expected 24 bytes to 2 GiB, found {files.file_size}")
        super().__init__(files)
        self._hint = last_address
        self._end = -1  # not searched yet

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

    def get(self, address: int) -> ExtUnit:
        """Return the unit at ``address``.

        Raises:
            CorruptionError: There is none, or it is damaged.
            ValueError: ``address`` is not an address of such a file.
        """
        self._check_open()
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
