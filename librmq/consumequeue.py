"""The queue of a topic: an entry of 20 bytes for each message, which points to the log.

    entry  physicalOffset  8   start of the message in the log
           size            4   its length there
           tagsCode        8   hash of its tags; or the address of an extension unit (`librmq.consumequeue_ext`);
                               or, on the schedule topic, the delivery time

Entry n of the queue is at position 20 · n of its files. The queue ends at the first entry with size 0. If a queue
starts above 0, the entries before its first one in that file are (0, 0x7fffffff, 0).

Mirrors 4.9.4's ``ConsumeQueue``.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Self

from librmq import consumequeue_entries as stored_entries
from librmq.consumequeue_entries import (
    BLOCK,
    ENTRY,
    ENTRY_SIZE,
    EXT_FILE_SIZE,
    HOLE_SIZE,
    PLACE,
    Entries,
    ExtUnit,
    QueueEntry,
    RollingEntries,
    entry_dtype,
    is_ext_address,
    places_and_sizes,
)
from librmq.errors import ConfigError, CorruptionError
from librmq.files import Advice, DiskFiles, Files
from librmq.files.rolling import MappedFileQueue, MappingPool
from librmq.override import override
from librmq.runtime import lazy_numpy as np

if TYPE_CHECKING:
    from librmq.consumequeue_ext import ConsumeQueueExt

__all__ = ["ConsumeQueue", "ExtUnit", "QueueEntry"]

FILE_SIZE: Final = 300_000 * ENTRY_SIZE
"""Length of a file in a 4.9 broker's store, in bytes."""
_RECOVERED_FILES: Final = 3
_READ_TOGETHER: Final = 64
"""Entries that a search for a message reads at a time."""
_FILLER_BLOCK: Final = 4096
_FILLER_SIZE: Final = HOLE_SIZE.to_bytes(4)
_pack = ENTRY.pack


class ConsumeQueue(RollingEntries):
    """The entries of one queue. One thread can write while many read, without a lock.

    Numbers count entries unless stated otherwise; ranges from ``begin`` to ``end`` exclude ``end``.
    """

    __slots__ = ("_tail", "ext", "max_offset", "max_physic_offset", "min_offset")

    min_offset: int
    """The first queue offset that readers get."""
    max_offset: int
    """The queue offset of the next entry."""
    max_physic_offset: int
    """The end of the last entry's message in the log, -1 without entries."""
    ext: ConsumeQueueExt | None
    """The extension units, if the queue was opened with them."""
    _has_batches: bool = False
    """Whether entries next to each other can lead to one record, which has a message for each."""

    def __init__(self, files: MappedFileQueue, ext: tuple[str, int, Files, MappingPool] | None) -> None:
        super().__init__(files)
        self._tail = -1  # start of the file to append to
        self.max_offset = stored_entries.find_end(files) // ENTRY_SIZE
        self.min_offset = stored_entries.find_begin(files, self.max_offset)
        self.max_physic_offset = self._last_place()
        files.keep_little()
        self.ext = None
        if ext is not None:
            from librmq.consumequeue_ext import ConsumeQueueExt

            folder, file_size, disk, pool = ext
            last = self._tags_code(self.max_offset - 1)
            self.ext = ConsumeQueueExt.open(
                folder, file_size, files=disk, pool=pool, writable=files.writable,
                last_address=last if is_ext_address(last) else None,
            )  # fmt: skip

    @classmethod
    def open(
        cls,
        folder: str | os.PathLike[str],
        file_size: int = FILE_SIZE,
        *,
        files: Files | None = None,
        pool: MappingPool | None = None,
        writable: bool = True,
        ext_folder: str | None = None,
        ext_file_size: int = EXT_FILE_SIZE,
        reads_small: bool = False,
    ) -> Self:
        """Open the queue in ``folder``, which the first append makes if needed.

        With ``reads_small`` an only file of few bytes is read at once, and mapped when it is written or often read.

        This reads only the entries needed to find begin and end: some of the first file and of the last file in use.
        The end is found by bisection, because entries have no gaps (`recover` does not rely on that).

        Raises:
            CorruptionError: The folder has a file that does not belong there.
            ConfigError: ``file_size`` is not a multiple of 20.
        """
        if file_size % ENTRY_SIZE or not ENTRY_SIZE <= file_size <= 1 << 31:
            raise ConfigError(f"queue file size: expected a multiple of 20 up to 2 GiB, found {file_size}")
        files = files or DiskFiles()
        pool = pool or MappingPool(4)
        queue = MappedFileQueue(os.fspath(folder), file_size, files, pool, writable=writable, reads_small=reads_small)
        return cls(queue, None if ext_folder is None else (ext_folder, ext_file_size, files, pool))

    @override
    def __repr__(self) -> str:
        return f"<ConsumeQueue {self.folder} {self.min_offset} to {self.max_offset}>"

    @property
    def file_size(self) -> int:
        """The length of a file in bytes."""
        return self._files.file_size

    @property
    def stored_begin(self) -> int:
        """The first queue offset in the files; the messages below `min_offset` are deleted or never existed."""
        return self._files.begin // ENTRY_SIZE

    @property
    def stored_end(self) -> int:
        """The queue offset up to which the files have the entries."""
        return self.max_offset

    def what_is_missing(self) -> str | None:
        """Return what is missing of a queue without any file: its folder, or its files; None if it has a file."""
        if self._files.starts:
            return None
        return f"the {'files of the queue are' if self._files.has_folder else 'folder of the queue is'} missing"

    def place_of(self, queue_offset: int) -> tuple[str, int]:
        """Return the path of the file for an entry, and the entry's position in it, as the address of damage."""
        at = queue_offset * ENTRY_SIZE % self._files.file_size
        return self._files.path(queue_offset * ENTRY_SIZE - at), at

    # ------------------------------------------------------------------------------------------------ reading

    def entry(self, queue_offset: int) -> QueueEntry | None:
        """Return the entry at ``queue_offset``, None outside `min_offset` to `max_offset`.

        Raises:
            CorruptionError: The entry is damaged.
        """
        if not self.min_offset <= queue_offset < self.max_offset:
            return None
        raw = self.read(queue_offset, 1)
        if not raw:
            return None
        entry = QueueEntry._make(ENTRY.unpack(raw))
        if entry.size <= 0 or entry.physical_offset < 0:
            if queue_offset >= self.max_offset:
                return None  # truncated meanwhile
            raise self._damaged(queue_offset, entry.physical_offset, entry.size)
        return entry

    def read(self, queue_offset: int, count: int) -> bytes:
        """Return up to ``count`` stored entries from ``queue_offset`` on, at most to the end of their file.

        The result is empty outside `min_offset` to `max_offset`. Entries are not checked, so ``np.frombuffer(raw,
        entry_dtype())`` can have damaged ones.
        """
        end = self.max_offset
        if not self.min_offset <= queue_offset < end or count <= 0:
            return b""
        if queue_offset + count < end:
            end = queue_offset + count
        return self._raw(queue_offset * ENTRY_SIZE, end * ENTRY_SIZE)

    def first_message(self, queue_offset: int) -> tuple[int, int] | None:
        """Return queue offset and place of the first message with an entry from ``queue_offset`` on; None without one.

        Raises:
            CorruptionError: An entry is damaged.
        """
        while raw := self.read(queue_offset, _READ_TOGETHER):
            for place, size in zip(*places_and_sizes(raw), strict=True):
                if size != HOLE_SIZE:
                    return None if self.entry(queue_offset) is None else (queue_offset, place)
                queue_offset += 1
        return None

    def blocks(self, begin: int | None = None, end: int | None = None) -> Iterator[tuple[int, Entries]]:
        """Yield the entries from ``begin`` to ``end`` as ``(queue offset of the first, array)``.

        ``begin`` is by default `min_offset`, and at least `stored_begin`; ``end`` is by default, and at most,
        `max_offset`. Arrays are read-only copies.

        Raises:
            CorruptionError: An entry is damaged; the entries before it have been yielded.
        """
        end = self.max_offset if end is None else min(end, self.max_offset)
        for first, raw in self._chunks(self.min_offset if begin is None else begin, end):
            block = np.frombuffer(raw, entry_dtype())
            sound = stored_entries.count_sound(block)
            if sound == len(block):
                yield first, block
                continue
            if sound:
                yield first, block[:sound]
            if first + sound < self.max_offset:  # otherwise the queue was truncated meanwhile
                physical_offset, size, _ = block[sound].item()
                raise self._damaged(first + sound, physical_offset, size)
            return

    def entries(self, begin: int | None = None, end: int | None = None) -> Entries:
        """Return the entries of `blocks` in one array, a copy."""
        blocks = [block for _, block in self.blocks(begin, end)]
        return np.concatenate(blocks, dtype=entry_dtype()) if blocks else np.empty(0, entry_dtype())

    def has_expired(self, queue_offset: int, place: int, log_begin: int) -> bool:
        """Return whether retention has deleted the message of an entry that leads to ``place``.

        It leads below the log's first byte, ``log_begin``, and not before the entry before it. Any other entry without
        a record is damaged.
        """
        if not 0 <= place < log_begin:
            return False
        before = self._raw((queue_offset - 1) * ENTRY_SIZE, queue_offset * ENTRY_SIZE) if queue_offset else b""
        return not before or ENTRY.unpack(before)[0] <= place

    def next_file_offset(self, queue_offset: int) -> int:
        """Return the queue offset of the first entry after the file of ``queue_offset``."""
        per_file = self._files.file_size // ENTRY_SIZE
        return queue_offset - queue_offset % per_file + per_file

    def ext_unit(self, tags_code: int) -> ExtUnit | None:
        """Return the extension unit whose address is ``tags_code``; None if it is a plain code.

        The result is also None if the unit is unavailable: the queue was opened without extension, or the file is
        missing or damaged. Then RocketMQ evaluates the filter on the message itself. `ConsumeQueueExt.get` raises an
        error with the reason.
        """
        if self.ext is None or not is_ext_address(tags_code):
            return None
        try:
            return self.ext.get(tags_code)
        except CorruptionError:
            return None

    def queue_offset_at(self, timestamp_ms: int, store_timestamp_of: Callable[[int, int], int | None]) -> int:
        """Return the queue offset of the entry stored nearest to ``timestamp_ms`` (the earlier one on a tie).

        ``store_timestamp_of(physical_offset, size)`` returns the store time of a message in ms, None if retention
        deleted it. As in RocketMQ, the search covers only the first file whose last entry was stored at
        ``timestamp_ms`` or later, or else the last file. The result is `min_offset` if the queue is empty or all
        messages are deleted. The search needs one time for each file, and then some 18.
        """

        def stored(queue_offset: int) -> int | None:
            entry = self.entry(queue_offset)
            return (
                None
                if entry is None or entry.size == HOLE_SIZE
                else store_timestamp_of(entry.physical_offset, entry.size)
            )

        return self._nearest_in_time(stored, timestamp_ms)

    def _nearest_in_time(self, stored: Callable[[int], int | None], timestamp_ms: int) -> int:
        per_file = self._files.file_size // ENTRY_SIZE
        return stored_entries.nearest_in_time(stored, self.min_offset, self.max_offset, per_file, timestamp_ms)

    def _raw(self, position: int, end: int) -> bytes:
        """Return the bytes from ``position`` to ``end``, at most to the end of the file; empty if it was deleted."""
        if self._closed:
            self._check_open()
        return self._files.read(position, end)

    def _chunks(self, begin: int, end: int) -> Iterator[tuple[int, bytes]]:
        """Yield the unchecked bytes of entries ``begin`` to ``end``, one block of a file at a time."""
        begin = max(begin, self.stored_begin)
        while begin < end:
            raw = self._raw(begin * ENTRY_SIZE, min(end, begin + BLOCK) * ENTRY_SIZE)
            if raw:
                yield begin, raw
                begin += len(raw) // ENTRY_SIZE
            elif begin < self.stored_begin:
                begin = self.stored_begin  # files were deleted
            else:
                return

    def _damaged(self, queue_offset: int, physical_offset: int, size: int) -> CorruptionError:
        path, at = self.place_of(queue_offset)
        what = f"queue offset {queue_offset}: found physical offset {physical_offset} and size {size}"
        return CorruptionError(path, at, "entry", what)

    # ------------------------------------------------------------------------------------------ begin and end

    def _last_place(self) -> int:
        """Return `max_physic_offset` from the last entry."""
        if self.max_offset <= self.stored_begin:
            return -1
        return stored_entries.message_end(self._files, self.max_offset - 1)

    def _tags_code(self, queue_offset: int) -> int:
        raw = self._raw(queue_offset * ENTRY_SIZE, (queue_offset + 1) * ENTRY_SIZE)
        return int.from_bytes(raw[12:], "big", signed=True)

    def show_before(self, queue_offset: int) -> None:
        """Leave out the entries from ``queue_offset`` on, in a queue that is only read; the files stay unchanged."""
        self.max_offset = max(queue_offset, self.min_offset)
        last = self.entry(self.max_offset - 1)
        self.max_physic_offset = self._last_place() if last is None else last.physical_offset + last.size

    # ------------------------------------------------------------------------------------------ for the writer

    def append(self, queue_offset: int, physical_offset: int, size: int, tags_code: int) -> None:
        """Add the entry of the message at ``physical_offset`` of the log.

        ``queue_offset`` must be `max_offset`. In a queue without files it can be any number, which becomes the queue's
        start.

        Raises:
            CorruptionError: The queue offset is another; nothing is written.
            ValueError: An entry can't hold the numbers; nothing is written.
        """
        if physical_offset < 0 or size <= 0:
            raise ValueError(f"no entry can hold physical offset {physical_offset} and size {size}")
        try:
            raw = _pack(physical_offset, size, tags_code)
        except struct.error as error:
            raise ValueError(f"no entry can hold {physical_offset}, {size}, {tags_code}: {error}") from None
        position = queue_offset * ENTRY_SIZE
        if queue_offset != self.max_offset or position + ENTRY_SIZE > self._sure:
            self._prepare(queue_offset, ENTRY_SIZE)
        start = self._tail
        self._files.write(start, position - start, raw)
        self.max_physic_offset = physical_offset + size
        self.max_offset = queue_offset + 1

    def _correct(self, queue_offset: int, entry: bytes) -> None:
        """Write the right entry over a damaged one; entries that the queue does not have stay as they are."""
        self._check_writable()
        if self.stored_begin <= queue_offset < self.max_offset:
            start = self._files.start_of(queue_offset * ENTRY_SIZE)
            if start is not None:
                self._files.write(start, queue_offset * ENTRY_SIZE - start, entry)

    def append_many(self, queue_offset: int, entries: bytes) -> None:
        """Append packed entries (`ENTRY`), the first at ``queue_offset``, to as many files as needed.

        The entries are not checked. Raises the errors of `append`; if a new file can't be made, the entries in the file
        before it stay.
        """
        length = len(entries)
        position = queue_offset * ENTRY_SIZE
        if queue_offset == self.max_offset and position + length <= self._sure and not length % ENTRY_SIZE:
            if length:
                self._put_entry(queue_offset, entries)
            return
        if length % ENTRY_SIZE:
            raise ValueError(f"expected entries of {ENTRY_SIZE} bytes, found {length} bytes")
        file_size = self._files.file_size
        written = 0
        while written < length:
            end = min(length, written + file_size - (position + written) % file_size)
            first = queue_offset + written // ENTRY_SIZE
            self._prepare(first, end - written)
            self._put_entry(first, entries[written:end])
            written = end

    def has_room(self, count: int) -> bool:
        """Return whether ``count`` more entries fit into allocated blocks of the current file."""
        return (self.max_offset + count) * ENTRY_SIZE <= self._sure

    def _put_entry(self, queue_offset: int, entries: bytes) -> None:
        """Write entries that are known to fit, and show them to readers."""
        start = self._tail
        self._files.write(start, queue_offset * ENTRY_SIZE - start, entries)
        self._note_end(queue_offset, entries)

    def _note_end(self, queue_offset: int, entries: bytes | bytearray) -> None:
        physical_offset, size = PLACE.unpack_from(entries, len(entries) - ENTRY_SIZE)
        self.max_physic_offset = physical_offset + size
        self.max_offset = queue_offset + len(entries) // ENTRY_SIZE

    def _prepare(self, queue_offset: int, length: int) -> None:
        """Prepare a file and blocks for ``length`` bytes at ``queue_offset``, all in one file."""
        self._check_writable()
        files = self._files
        position = queue_offset * ENTRY_SIZE
        if not 0 <= position < (1 << 63) - files.file_size:
            raise ValueError(f"queue offset: expected one whose file is below 2^63, found {queue_offset}")
        start = position - position % files.file_size
        if not files.starts:
            files.create(start)
            files.reserve(start, 0, position - start + length)
            stored_entries.fill(files, start, position)
            self.min_offset = self.max_offset = queue_offset
        elif queue_offset != self.max_offset:
            path, at = self.place_of(self.max_offset)
            what = f"expected queue offset {self.max_offset}, found {queue_offset}"
            raise CorruptionError(path, at, "order", what)
        elif start == files.end:
            files.create(start)
        if start != self._tail:
            files.file(start).advise(position - start, files.file_size, Advice.RANDOM_READS)
        self._tail = start
        self._sure = start + files.reserve(start, position - start, position - start + length)

    def recover(self) -> int:
        """Check every entry of the last three files, and cut the queue at the first bad one.

        Everything after the end is cleared, in the extension too. Return the number of lost entries. Opening relies on
        entries without gaps; this method reads the files, which takes longer.
        """
        self._check_writable()
        before = self.max_offset
        per_file = self._files.file_size // ENTRY_SIZE
        begin = before - 1 - (before - 1) % per_file - (_RECOVERED_FILES - 1) * per_file
        end = self._first_bad(begin, before)
        if end is None:
            end = max(before, self.stored_begin)
        self._cut(end)
        return before - end

    def _first_bad(self, begin: int, end: int) -> int | None:
        return stored_entries.first_bad(self._chunks(begin, end))

    def truncate_after(self, physical_end: int) -> int:
        """Drop the last file's entries from the first one that reaches beyond ``physical_end`` of the log.

        If that is the file's first entry, delete the file and continue with the one before it. Bad entries count as
        beyond, filler does not. Return the number of dropped entries.
        """
        self._check_writable()
        before = end = self.max_offset
        per_file = self._files.file_size // ENTRY_SIZE
        while end > self.stored_begin:
            begin = end - 1 - (end - 1) % per_file
            beyond = stored_entries.first_beyond(self._chunks(begin, end), physical_end)
            if beyond is not None:
                end = beyond
            if beyond != begin:
                break
        if end < before:
            self._cut(end)
        return before - end

    def truncate_to(self, queue_offset: int) -> None:
        """Keep the entries below ``queue_offset``; clear the others, and delete files without entries.

        A queue whose first file starts above 0 keeps that file, and so its offsets; another queue becomes empty.
        """
        self._check_writable()
        if queue_offset < self.max_offset:
            self._cut(max(queue_offset, self.stored_begin))

    def clear(self) -> None:
        """Drop all entries, files and offsets: the next append sets the queue's start."""
        self._check_writable()
        self._sure = self.max_offset = self.min_offset = 0
        self.max_physic_offset = -1
        self._files.delete_from(0)
        if self.ext is not None:
            self.ext.clear()

    def data_behind_end(self) -> int:
        """Return the number of bytes from the end to the last nonzero byte, in all files."""
        return self._files.data_behind(self.max_offset * ENTRY_SIZE)

    def _cut(self, queue_offset: int) -> None:
        """End the queue at ``queue_offset``, and clear everything after it, in the extension too."""
        files = self._files
        position = queue_offset * ENTRY_SIZE
        self._sure = 0
        self.max_offset = queue_offset
        self.min_offset = min(self.min_offset, queue_offset)
        self.max_physic_offset = self._last_place()
        if position == files.begin > 0:
            files.delete_from(position + 1)
        else:
            files.delete_from(position)
        files.zero_from(position)
        if self.ext is not None:
            self._cut_ext(self.ext)

    def _cut_ext(self, ext: ConsumeQueueExt) -> None:
        """Drop the units after that of the last entry with a unit."""
        if ext.is_empty:
            return
        last = stored_entries.last_ext_address(self._chunks, self.stored_begin, self.max_offset)
        if last is None:
            ext.clear()
            return
        try:
            ext.truncate_after(last)
        except CorruptionError:  # the last address has no unit
            ext.recover()

    def advance(self, min_physical_offset: int) -> None:
        """Move `min_offset` to the first message at or after ``min_physical_offset``, the beginning of the log.

        The last entry of a file decides whether the file is passed; of the next one each entry counts. A queue whose
        messages are all deleted is empty: its beginning is its end. It also works on a queue that is open for reading.
        """
        low = max(self.min_offset, min(self.stored_begin, self.max_offset))
        while (following := self.next_file_offset(low)) < self.max_offset:
            physical_offset, size = stored_entries.place_at(self._files, (following - 1) * ENTRY_SIZE)
            if size <= 0 or not self.has_expired(following - 1, physical_offset, min_physical_offset):
                break
            low = following
        served = stored_entries.first_from(self._chunks(low, self.max_offset), min_physical_offset)
        self.min_offset = self._end_of_expired(low, self.max_offset if served is None else served, min_physical_offset)

    def _end_of_expired(self, begin: int, end: int, log_begin: int) -> int:
        """Return ``end``, or the first of the damaged entries right before it, whose messages can be in the log."""
        while end > begin and (raw := self._raw((end - 1) * ENTRY_SIZE, end * ENTRY_SIZE)):
            place, size, _ = ENTRY.unpack(raw)
            if size == HOLE_SIZE or self.has_expired(end - 1, place, log_begin):
                break
            end -= 1
        return end

    def trim(self, min_physical_offset: int) -> list[str]:
        """Call `advance`, delete the files before `min_offset`, also of units, and return their paths."""
        self._check_writable()
        self.advance(min_physical_offset)
        last = self._files.end - self._files.file_size
        deleted = self._files.delete_before(min(self.min_offset * ENTRY_SIZE, last))
        first = min(self.min_offset, self.max_offset - 1)  # the last entry keeps its unit, also if its message is gone
        if self.ext is not None and deleted and is_ext_address(code := self._tags_code(first)):
            with suppress(CorruptionError):  # without the unit of an address, no units can be deleted
                deleted += self.ext.truncate_before(code)
        return deleted

    def write_again(self, queue_offset: int) -> None:
        """Rewrite the entries from ``queue_offset`` on, and their units, so that the next `flush` includes them.

        For recovery: the writer may have died before a flush. Units without an entry can lie before those of the first
        entry, so units are rewritten from that of the entry before it.
        """
        self._files.write_again(queue_offset * ENTRY_SIZE, self.max_offset * ENTRY_SIZE)
        if self.ext is not None:
            self.ext.write_again(stored_entries.last_ext_address(self._chunks, self.stored_begin, queue_offset))

    @override
    def flush(self) -> None:
        """Flush all entries and all units of the extension to the device."""
        if self.ext is not None:
            self.ext.flush()
        self._files.flush()

    @override
    def note_flushed(self) -> None:
        """Note that everything has reached the device by other means than `flush`."""
        if self.ext is not None:
            self.ext.note_flushed()
        super().note_flushed()

    def keep_descriptors(self) -> None:
        """Keep a descriptor open with each mapping until `unmap_all`, which is faster for a short use."""
        self._files.keeps_descriptors = True

    def unmap_all(self) -> None:
        """Unmap all files, and keep no descriptor open with later mappings."""
        self._files.keeps_descriptors = False
        self._files.unmap_all()

    @override
    def close(self) -> None:
        """Flush and close; later calls are refused, a repetition does nothing."""
        super().close()
        if self.ext is not None:
            self.ext.close()


# ---- for the store


def files_of(queue: ConsumeQueue) -> MappedFileQueue:
    """Return the files of a queue without those of its extension."""
    return queue._files


def begin_together(entries_of: Sequence[tuple[ConsumeQueue, bytes]]) -> None:
    """Make queues of one topic with their first entries, from queue offset 0 on, which fit into one file.

    The queues have no file and no extension.

    Raises:
        StoreIOError: There is no space; the queues stay as they are.
    """
    MappedFileQueue.create_together([(files_of(queue), entries) for queue, entries in entries_of])
    for queue, entries in entries_of:
        queue._note_end(0, entries)


def offset_at_place(queue: ConsumeQueue, physical_offset: int) -> int:
    """Return the first queue offset whose message is at or after ``physical_offset``, by bisection.

    The search first goes back from the end in growing steps, because the place is mostly there, so few files are
    mapped.
    """
    low, high = queue.min_offset, queue.max_offset
    step = 1
    while low < high:
        middle = max(low, high - step) if step else (low + high) // 2
        at = _behind_filler(queue, middle, high)
        raw = queue.read(at, 1) if at < high else b""
        if not raw or ENTRY.unpack(raw)[0] >= physical_offset:
            high, step = middle, 2 * step
        else:
            low, step = at + 1, 0
    return _behind_filler(queue, low, queue.max_offset)


def _behind_filler(queue: ConsumeQueue, queue_offset: int, end: int) -> int:
    """Return the first entry from ``queue_offset`` to ``end`` that is not filler."""
    while queue_offset < end and queue.read(queue_offset, 1)[8:12] == _FILLER_SIZE:
        raw = queue.read(queue_offset, min(_FILLER_BLOCK, end - queue_offset))
        others = np.flatnonzero(np.frombuffer(raw, entry_dtype())["size"] != HOLE_SIZE)
        queue_offset += int(others[0]) if len(others) else len(raw) // ENTRY_SIZE
    return queue_offset
