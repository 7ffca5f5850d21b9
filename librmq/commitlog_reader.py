"""Reading a commit log: records by place, walks over files, and what another process writes behind the end.

`librmq.commitlog` draws the files and writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Final, NamedTuple, Self

from librmq import commitlog_frames as frames
from librmq.commitlog_frames import MAGICS, SIZE_AND_MAGIC, LogItem
from librmq.errors import CorruptionError, RecordError
from librmq.files import Buffer, File
from librmq.files.rolling import MappedFileQueue
from librmq.message import StoredMessage, record
from librmq.runtime.compiled_core import LogState

_BLANK_SIZE: Final = record.BLANK_SIZE
_MOST_HELD: Final = 32 << 20
"""Bytes of a file whose pages a walk holds at most."""
_MOST_LOOKS: Final = 1024
"""Looks after which the pages of the log are released: up to then they can map 64 MiB."""


class LogEnd(NamedTuple):
    """The end of a walk."""

    physical_offset: int
    """Place where the walk ended."""
    damage: CorruptionError | None
    """The fault of the bytes there; None for zeros or the end of a file."""
    last_record: int | None = None
    """Start of the last record of the walk."""


class LogReader(LogState):
    """The reading side of a `librmq.commitlog.CommitLog`. Thread-safe below ``end``."""

    def __init__(self, sequence: MappedFileQueue) -> None:
        self._sequence = sequence
        self._mapped = sequence.mapped
        self.file_size: int = sequence.file_size
        self.end: int = sequence.begin
        """Physical offset after the last record."""
        self._file_start = -1
        self._buffer: Buffer | None = None
        # How many stretches of 64 KiB reads may have mapped, as Linux does at a first touch, and the last one.
        self._looks = 0
        self._looked_at = -1
        self.unreadable: CorruptionError | None = None
        """The first place that was left out because no record is there, as a caller knew of one."""

    @property
    def begin(self) -> int:
        """Physical offset of the oldest existing record."""
        return self._sequence.begin

    @property
    def sequence(self) -> MappedFileQueue:
        """The files."""
        return self._sequence

    def third_last_file(self) -> int:
        """Return the start of the third last file, or of the first; after a clean exit all before it is sound."""
        starts = self._sequence.starts
        return starts[max(0, len(starts) - 3)] if starts else self.begin

    def unfinished_at(self, physical_offset: int) -> int:
        """Return how many bytes a writer was or is writing at ``physical_offset``, 0 if there is no mark of that."""
        head = self.data_at(physical_offset, _BLANK_SIZE)
        return frames.unfinished_size(head, self.file_size - physical_offset % self.file_size)

    def data_behind(self, physical_offset: int) -> int:
        """Return the number of bytes from ``physical_offset`` to the last nonzero one, in all existing files."""
        return self._sequence.data_behind(physical_offset)

    def blank_at(self, physical_offset: int) -> int:
        """Return the size of the blank at ``physical_offset`` that fills its file, 0 if there is none."""
        left = -physical_offset % self.file_size
        is_blank = left >= _BLANK_SIZE and self.data_at(physical_offset, _BLANK_SIZE) == frames.blank(left)
        return left if is_blank else 0

    def read(self, physical_offset: int, size: int | None = None) -> bytes | None:
        """Return the raw record at ``physical_offset``, None below the log's first byte: retention has deleted it.

        Without ``size``, which is that of the entry that leads there, None is also returned behind the log's end.

        Raises:
            CorruptionError: The bytes are not a record, or one of another ``size``.
        """
        at = physical_offset % self.file_size
        start = physical_offset - at
        is_written = physical_offset + (_BLANK_SIZE if size is None else max(size, 0)) <= self.end
        file = (self._mapped.get(start) or self._sequence.file_at(start)) if is_written else None
        if file is None:
            starts = self._sequence.starts  # asked last, because a file can have been deleted since it was looked up
            if size is None or (starts and 0 <= physical_offset < starts[0]):
                return None
            path, what = self._sequence.path(max(start, 0)), f"a record of {size} bytes from {self.begin} to {self.end}"
            raise CorruptionError(path, physical_offset, "record", f"expected {what}, where the log is")
        self._note_looks(physical_offset, physical_offset, 1)
        if at + _BLANK_SIZE > self.file_size:
            raise CorruptionError(file.path, physical_offset, "record", "expected a record, found the end of the file")
        length, magic = SIZE_AND_MAGIC.unpack_from(file.buffer, at)
        if (
            magic not in MAGICS
            or (size is not None and length != size)
            or not record.FIXED_SIZE <= length <= self.file_size - at
        ):
            kind = "a record" if size is None else f"a record of {size} bytes"
            actual = f"one of {length} bytes" if magic in MAGICS else f"magic {magic:08x}, which no record has"
            raise CorruptionError(file.path, physical_offset, "record", f"expected {kind}, found {actual}")
        if physical_offset + length > self.end:
            return None
        return file.buffer[at : at + length]

    def data_at(self, physical_offset: int, size: int) -> bytes:
        """Return bytes of the log, records or not, within one file; empty if there is no file."""
        buffer, at = self._buffer, physical_offset % self.file_size
        if buffer is not None and physical_offset - at == self._file_start:
            data = buffer[at : min(at + size, self.file_size)]
            if self._buffer is buffer:  # no other thread has begun the next file
                return data
        file = self._sequence.file_at(physical_offset)  # not a mapping of a file that a recovery has deleted
        return b"" if file is None else file.buffer[at : min(at + size, self.file_size)]

    def message(self, physical_offset: int, *, check_body: bool = True) -> StoredMessage | None:
        """Return the checked message at ``physical_offset``, None if the log has no bytes there.

        Its body is checked only with ``check_body``.

        Raises:
            CorruptionError: There is no sound record.
        """
        raw = self.read(physical_offset)
        if raw is None:
            return None
        try:
            record.check_record(raw, 0, len(raw), check_body=check_body)
        except RecordError as error:
            path = self._sequence.path(physical_offset - physical_offset % self.file_size)
            raise frames.damage(path, physical_offset, error) from error
        return StoredMessage(raw)

    def store_timestamp_ms(self, physical_offset: int, size: int | None = None) -> int | None:
        """Return the store time of the record at ``physical_offset``, None if there is no record."""
        try:
            raw = self.read(physical_offset, size)
        except CorruptionError as error:
            self.leave_out(error)
            return None
        return None if raw is None or len(raw) < record.FIXED_SIZE else record.store_timestamp_ms(raw)

    def leave_out(self, error: CorruptionError) -> None:
        """Note that a caller reads on behind a damaged record, so that its user learns of it at the end."""
        self.unreadable = self.unreadable or error

    def scan(self, begin: int | None = None, end: int | None = None, *, check_body: bool = True) -> Iterator[LogItem]:
        """Yield records and blanks from ``begin``, by default the oldest, up to ``end``, by default the log's end.

        ``begin`` must be the start of a record. Another call can continue the walk behind damage.

        Raises:
            CorruptionError: The next bytes are not a record, or its body does not match its checksum.
        """
        return chain.from_iterable(self._files(begin, end, check_body))  # quicker than a generator over both

    def _files(self, begin: int | None, end: int | None, check_body: bool) -> Iterator[Iterator[LogItem]]:
        limit = self.end if end is None else min(end, self.end)
        at = self.begin if begin is None else begin
        file_size = self.file_size
        while at < limit:
            start = at - at % file_size
            file = self._sequence.file_at(start)
            if file is None:
                if at >= self.begin:
                    return
                at = self.begin  # files were deleted
                continue
            yield self._items(file, start, at - start, min(limit - start, file_size), check_body)
            self.release_read_pages(start, start + file_size)
            at = start + file_size

    def __iter__(self) -> Iterator[StoredMessage]:
        """Yield all messages in log order.

        Raises:
            CorruptionError: A record can't be read.
        """
        return (StoredMessage(raw) for _, _, raw in self.scan() if raw is not None)

    def search(self, text: bytes) -> Iterator[StoredMessage]:
        """Yield the messages whose records contain ``text``, in log order, from the whole log.

        Raises:
            CorruptionError: One is damaged, or the bytes before it are no record.
        """
        for start in self._sequence.starts:
            if not self._file_contains(start, text):
                continue
            released = start
            for place, _, raw in self.scan(start, start + self.file_size, check_body=False):
                if place - released > _MOST_HELD:
                    self.release_read_pages(released, place)
                    released = place
                if raw is not None and text in raw:
                    yield self.message(place) or StoredMessage(raw)

    def _file_contains(self, start: int, text: bytes) -> bool:
        """Look for a text in pieces, which overlap, so that no more pages are held than those of one."""
        file = self._sequence.file_at(start)
        if file is None:
            return False  # retention has deleted it since the search began
        end = min(self.end - start, file.data_end())
        for at in range(0, end, _MOST_HELD):
            piece_end = at + _MOST_HELD
            is_found = file.buffer.find(text, at, min(piece_end + len(text) - 1, end)) >= 0
            self.release_read_pages(start + at, start + piece_end)
            if is_found:
                return True
        return False

    def walk(self, begin: int, on_record: Callable[[Self, int, bytes], None] | None = None) -> LogEnd:
        """Walk over the records from ``begin`` in all existing files, and return their end, without changes.

        ``on_record`` is called with the log, the place and the bytes of each record.
        """
        sequence = self._sequence  # whose pages a writer gives up too, because this comes before its appends
        at, last, released = begin, None, begin
        while (start := sequence.start_of(at)) is not None:
            file, first, before = sequence.file(start), at - start, last
            items = self._items(file, start, first, self.file_size, True)
            # Only the compiled core's reader can skip.
            skip = None if on_record is not None else getattr(items, "skip", None)
            try:
                while True:
                    if skip is not None:
                        record_at, end = skip()
                        if record_at >= 0:
                            sequence.unmap_pages(at, start + end)
                            last, at = start + record_at, start + end
                            continue
                    item = next(items, None)
                    if item is None or (raw := item[2]) is None:
                        break
                    last, size, _ = item
                    at = last + size
                    if at - released > _MOST_HELD:
                        sequence.unmap_pages(released, at)
                        released = at
                    if on_record is not None:
                        on_record(self, last, raw)
            except CorruptionError as error:
                place = error.offset - start
                if self.file_size - _BLANK_SIZE < place and last is not None:
                    what = f"expected {_BLANK_SIZE} bytes behind it for a blank, found {self.file_size - place}"
                    for item in self._items(file, start, first, last - start, False):
                        before = item[0]
                    return LogEnd(last, CorruptionError(sequence.path(start), last, "record", what), before)
                zeros = not any(file.buffer[place : place + _BLANK_SIZE])
                return LogEnd(error.offset, None if zeros else error, last)
            if start + self.file_size not in sequence.starts:
                break  # the blank of the last file can be written again
            sequence.unmap_pages(start, start + self.file_size)
            at = released = start + self.file_size
        return LogEnd(at, None, last)

    def _note_looks(self, first: int, last: int, count: int) -> None:
        """Count what a read of ``count`` records maps, the first and last of which begin here.

        Releases what is mapped, from time to time: reads far apart would map as much memory as the log has.
        """
        stretch = first >> 16
        self._looks += (stretch != self._looked_at) + min(count - 1, abs((last >> 16) - stretch))
        self._looked_at = last >> 16
        if self._looks >= _MOST_LOOKS:
            self._looks = 0
            self.release_read_pages(self.begin, self.end)

    def release_read_pages(self, begin: int, end: int) -> None:
        """Release mapped pages that a scan has read, so that it does not hold those of the whole log."""
        self._sequence.release_read_pages(begin, end)

    def follow(self, until: int | None = None) -> Iterator[tuple[int, int, bytes]]:
        """Yield the records that another process has written after `end`; the caller moves `end` past each of them.

        ``until`` ends it there, although the other process writes on.

        Only complete records are returned. A writer copies a record over zeros from its first byte to its last. So it
        is complete if another record follows, or if its text is complete: topic and properties contain no zeros, the
        lengths agree, and the body matches its checksum. Other bytes count as a record that is being copied.
        """
        at = self.end
        while (until is None or at < until) and (file := self._sequence.file_at(at)) is not None:
            buffer, place = file.buffer, at % self.file_size
            if not any(buffer[place : place + _BLANK_SIZE]):
                return
            try:
                size = record.check_record(buffer, place, self.file_size, check_body=True)
            except RecordError:
                return
            if size:
                following = place + size
                if 0 < self.file_size - following < _BLANK_SIZE:
                    return  # `walk` takes it for damage
                raw = buffer[place:following]
                if not any(buffer[following : following + _BLANK_SIZE]) and not frames.is_whole(raw, at):
                    return
                yield at, size, raw
                at += size
            else:
                at += self.file_size - place

    def first_store_timestamp_ms(self, start: int) -> int | None:
        """Return the store time of the first record of the file at ``start``, None if the file starts without one."""
        # Reading a hole would fill it in a file system that lies in memory.
        file = self._sequence.file(start)
        raw = file.buffer[: record.FIXED_SIZE] if file.data_end() else b""
        if raw and SIZE_AND_MAGIC.unpack_from(raw)[1] in MAGICS:
            return record.store_timestamp_ms(raw)
        if start < self.end:
            self.leave_out(CorruptionError(self._sequence.path(start), start, "record", "the file begins with none"))
        return None

    def file_before(self, timestamp_ms: int) -> int:
        """Return the start of the newest file whose first record was stored by a time; the log's start if none.

        A record that a crash has left incomplete does not count, because it can have half of its time.
        """
        for start in reversed(self._sequence.starts):
            stored = self.first_store_timestamp_ms(start)
            if stored and stored <= timestamp_ms and self._begins_with_record(start):
                return max(start, self.begin)
        return self.begin

    def _begins_with_record(self, start: int) -> bool:
        try:
            return record.check_record(self._sequence.file(start).buffer, 0, self.file_size, check_body=True) > 0
        except RecordError:
            return False

    def _items(self, file: File, start: int, place: int, end: int, check_body: bool) -> Iterator[LogItem]:
        """Yield the items of the file at ``start``; see `frames.items`."""
        path, data_end = self._sequence.path(start), file.data_end()
        return frames.items(file.buffer, path, start, place, end, self.file_size, check_body, data_end)
