"""The commit log: every record of every topic, one after the other, in files of equal length.

    file   | record | record | ... | blank | (left as it is) |  one record never crosses files
    blank  | remaining length 4 | magic cbd43194 4 |            if the next did not fit
    mark   | number of bytes 4  | magic 756e646f 4 |            while records are written there

A record goes to the next file if its size + 8 is more than the rest of this one. The last file is zero after the log's
end. `librmq.message.record` draws the record itself. Mirrors 4.9.4's ``CommitLog``.

The mark is librmq's own. Several records are copied into the file at once, and a kill can leave any part of that copy.
Until all of them are there, the mark replaces size and magic of the first, so readers and recovery end the log there.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final, Self

from librmq import commitlog_frames as frames
from librmq.clock import SystemClock
from librmq.commitlog_frames import LogItem
from librmq.commitlog_reader import LogEnd, LogReader
from librmq.errors import ConfigError, CorruptionError, MessageIllegalError, RecordError, StoreClosedError
from librmq.files import DiskFiles, Files
from librmq.files.interface import without_zeros
from librmq.files.rolling import MappedFileQueue, MappingPool
from librmq.message import Message, StoredMessage, record
from librmq.message.properties import encode_properties
from librmq.message.topics import validate_topic
from librmq.override import override
from librmq.runtime.closing import Closing
from librmq.runtime.locks import Lock

__all__ = ["CommitLog", "LogEnd"]

_BLANK_SIZE: Final = record.BLANK_SIZE
_SMALLEST_FILE: Final = 256
_MAPPED_FILES: Final = 32
_FIRST_PAGES: Final = 64 << 10
"""Bytes of a new file that are prepared for the producer that begins it."""
_MAX_TOUCHED: Final = 32 << 20
_PAGED: Final = 256 << 10
_SETTLED: Final = 64 << 10
"""Bytes that a flush writes together for the first time. The file system's journal notes that a block of them has been
written, which is another write of the device."""
_WORTH_UNMAPPING: Final = 1 << 20
"""Number of bytes to flush from which it is faster to unmap their pages first."""


def _no_check() -> None:
    """Check nothing: the log has no lock."""


def _record_of(message: Message) -> bytes:
    """Return the record of a message that is born and stored now."""
    validate_topic(message.topic)
    if message._delays is not None:
        raise MessageIllegalError("a log has no clock for delay= or deliver_at=: expected a message without a delay")
    now_ms = SystemClock().now_ms()
    return record.encode_record(
        record.Record(
            topic=message.topic,
            flag=message.flag,
            born_timestamp_ms=now_ms,
            store_timestamp_ms=now_ms,
            body=message.body,
            body_crc=record.body_checksum(message.body),
            properties_raw=encode_properties(message.properties),
        )
    )


class CommitLog(LogReader, Closing):
    """The log of a store, to append, read and scan.

    One thread can append or truncate (`MessageStore` serialises its producers) while any number of threads read:
    everything below ``end`` is complete. A deleted file stays readable for running reads.
    """

    end: int  # It is declared again, because pyright takes no type from a base for what a method assigns.
    found_end: LogEnd
    """The end of the log when it was opened, and the bytes there."""

    def __init__(self, sequence: MappedFileQueue) -> None:
        self._is_closed = False
        super().__init__(sequence)
        self._file_end = -1  # end of the file that is written
        self.fits: int = -1
        """Physical offset up to which records go to `end`; longer ones need a `claim`."""
        self.sure: int = -1
        """Physical offset up to which blocks are allocated too, so that `append` only copies."""
        self._reserved = -1
        self._making = Lock()  # held while the next file is made, which another thread can do ahead
        self._prepared = -1  # up to this physical offset pages are ready
        self._flushed = -1  # up to this physical offset the last flush went
        self._flushed_start = -1  # start of the file of which only what follows is left to flush
        self._found_start = -1  # start of the file that was there to go on in: old bytes may wait for the device
        self._settled = -1  # up to this physical offset blocks have been written once
        self.found_end = LogEnd(self.end, None)
        self.last_write: int | None = None
        """Begin of this handle's last write, of one record or several."""
        self.check_owner: Callable[[], object] = _no_check
        """Called before a write reaches another file; raises if another process may write here too."""
        self.check_turn: Callable[[], object] = _no_check
        """Called before a write beyond `fits`; raises if other processes may write here at this moment."""

    @classmethod
    def open(
        cls,
        folder: str | os.PathLike[str],
        file_size: int = 1 << 30,
        *,
        files: Files | None = None,
        writable: bool = True,
        scan_from: Callable[[CommitLog], int] | None = None,
        on_record: Callable[[CommitLog, int, bytes], None] | None = None,
    ) -> Self:
        """Open the log in ``folder``, which need not exist yet.

        A walk from the physical offset that ``scan_from`` returns finds the end; the default is the third last file, as
        after a clean exit. ``on_record`` is that of `walk`. Nothing is changed: the caller can `truncate` the bytes
        after the end.

        Raises:
            ConfigError: ``file_size`` is not a number of bytes, or is below 256.
            CorruptionError: A name or a length is wrong.
        """
        if type(file_size) is not int or file_size < _SMALLEST_FILE:
            raise ConfigError(
                f"file_size: expected a whole number of at least {_SMALLEST_FILE}, found {file_size!r:.80}"
            )
        pool = MappingPool(_MAPPED_FILES)
        sequence = MappedFileQueue(
            os.fspath(folder), file_size, files or DiskFiles(), pool, writable=writable, durable=writable
        )
        log = cls(sequence)
        if sequence.starts:
            log.found_end = log.walk((scan_from or CommitLog.third_last_file)(log), on_record)
            log.end = log.found_end.physical_offset
            log.last_write = log.found_end.last_record
        log._flushed = log.end
        log._resume()
        log._found_start = log._file_start
        return log

    def _resume(self) -> None:
        """Find the file to write next."""
        self._flushed_start = -1
        start = self._sequence.start_of(self.end)
        self._buffer = None
        if start is None:
            self._file_start = self._file_end = self._reserved = -1
        else:
            self._file_start, self._file_end, self._reserved = start, start + self.file_size, -1
            if self._sequence.writable:
                self._buffer = self._sequence.file(start).buffer
        self.fits = self._file_end - _BLANK_SIZE
        self.sure = -1

    @property
    def file_start(self) -> int:
        """Start of the file that is written, -1 without one."""
        return self._file_start

    @property
    def unflushed(self) -> int:
        """Bytes behind the last flush."""
        return max(self.end - self._flushed, 0)

    # -------------------------------------------------------------------------------------------------------- append

    def claim(self, size: int) -> int:
        """Return the physical offset for ``size`` bytes, in the next file if they do not fit into this one.

        Raises:
            MessageIllegalError: They fit into no file.
        """
        if self.end + size > self.fits:
            self.check_turn()
        end = self.end
        if end + size <= self.fits:
            return end
        if size + _BLANK_SIZE > self.file_size:
            raise MessageIllegalError(
                f"a log file of {self.file_size} bytes takes records of at most {self.file_size - _BLANK_SIZE} bytes, "
                f"found {size}"
            )
        return self._next_file()

    def append(self, item: Message | StoredMessage | bytes | bytearray) -> int:
        """Append a message or records, in the next file if they do not fit into this one; return their place.

        ``item`` is a `Message`, which is written as born and stored now, with queue id and queue offset 0; a
        `StoredMessage`; or the bytes of one or more records. Records are written unchanged but for physical offsets.

        Raises:
            MessageIllegalError: ``item`` is neither, or fits into no file; nothing is written.
            StoreIOError: There is no space; nothing is written.
            StoreClosedError: The log is closed.
        """
        if self._is_closed:
            raise StoreClosedError(f"{self._sequence.folder} is closed")
        if isinstance(item, Message):
            item = _record_of(item)
        elif isinstance(item, StoredMessage):
            item = item.raw
        if not item or not isinstance(item, bytes | bytearray):
            raise MessageIllegalError(f"expected a message or the bytes of records, found {item!r:.80}")
        data = bytearray(item)
        size, at = len(data), 0
        begin = self.claim(size)
        while at < size:
            try:
                length = record.check_record(data, at, size, check_body=True)
            except RecordError as error:
                raise MessageIllegalError(f"expected a message or whole records: {error.reason}") from error
            if not length:
                raise MessageIllegalError("expected a message or whole records, found the blank that ends a file")
            place = at + record.PHYSICAL_OFFSET_AT
            data[place : place + 8] = (begin + at).to_bytes(8, "big")
            at += length
        if self.end + size > self.sure:
            self.make_room(size)
        self.copy_in(data, size)
        return begin

    def copy_in(self, data: bytes | bytearray, size: int) -> None:
        """Write ``data`` of ``size`` bytes, for which `sure` or `make_room` guarantees room."""
        begin = self.end
        at = begin - self._file_start
        self._buffer[at : at + size] = data  # type: ignore[index]
        self.last_write = begin
        self.end = begin + size

    def copy_many_in(self, data: bytes, size: int) -> None:
        """Write records side by side like `copy_in`; a kill leaves all of them, or a mark for `unfinished_at`."""
        assert self._buffer is not None
        begin = self.end
        frames.write_records(self._buffer, begin - self._file_start, data)
        self.last_write = begin
        self.end = begin + size

    def make_room(self, size: int) -> None:
        """Make a file and blocks for ``size`` bytes at the place that `claim` returned, before `copy_in` beyond `sure`.

        Raises:
            StoreIOError: There is no space.
        """
        if self.end + size > self.fits:
            self._roll(size)
        at = self.end - self._file_start
        if at + size > self._reserved:
            self._reserved = self._sequence.reserve(self._file_start, at, at + size)
        self.sure = min(self.fits, self._file_start + self._reserved)

    def append_block(self, data: bytes | bytearray) -> None:
        """Append some MiB at once, faster than `append`, and begin to send them to the device."""
        size = len(data)
        if self.end + size + _BLANK_SIZE > self._file_end:
            self._roll(size)
        self._sequence.put(self._file_start, self.end - self._file_start, data)
        self._sequence.mark_dirty(self._file_start)
        self.last_write = self.end
        self.end += size

    def close_to_writes(self) -> int:
        """Let each write ask `check_turn`; return the value of `sure`, which `open_to_writes` takes."""
        sure, self.fits, self.sure = self.sure, -1, -1
        return sure

    def open_to_writes(self, sure: int) -> None:
        """Let writes go to the end of the file again, up to ``sure`` without a call."""
        self.fits, self.sure = self._file_end - _BLANK_SIZE, sure

    def continue_at(self, end: int, sure: int) -> None:
        """Let the next write go to ``end``, up to which other processes have written, in the file of ``sure``."""
        if not self._file_start <= end <= sure <= self._file_end:
            self._sequence.refresh()
            self.end = end
            self._resume()
        self.end = end
        self.fits = self.sure = sure

    def drop_mappings(self) -> None:
        """Open the files again at the next `continue_at`, because another process may have replaced them."""
        self._sequence.unmap_all()
        self._file_start = self._file_end = -1
        self._buffer = None

    def keep_or_clear(self, begin: int, end: int, queue_offset: int) -> int:
        """Return where the record ends that a writer has copied to ``begin`` before it died.

        If it is not whole, or has another ``queue_offset``, write and flush zeros up to ``end``, and return ``begin``.
        """
        assert self._buffer is not None
        at, limit = begin - self._file_start, end - self._file_start
        try:
            size = record.check_record(self._buffer, at, limit, check_body=True)
            raw = self._buffer[at : at + size]
            number = raw[record.QUEUE_OFFSET_AT : record.QUEUE_OFFSET_AT + 8]
            if size and frames.is_whole(raw, begin) and int.from_bytes(number) == queue_offset:
                return begin + size
        except RecordError:
            pass
        self._buffer[at:limit] = bytes(limit - at)
        # A power cut could otherwise leave parts of both records here, which no recovery can tell from damage.
        self._sequence.flush_part(self._file_start, begin, end)
        return begin

    def begin_at(self, physical_offset: int) -> None:
        """Let a log without files begin at ``physical_offset``, the start of a file; for the copy of another log."""
        self._make(physical_offset)
        self.end = self._flushed = physical_offset
        self._resume()

    def append_copy(self, data: bytes, *, is_checked: bool = False) -> list[LogItem]:
        """Append bytes of another log as they are, whole records and blanks of one file; return them as `scan` does.

        ``is_checked`` says that they are whole records, without a blank, because another open log has them.

        Raises:
            CorruptionError: The bytes are not whole records of one file; nothing is appended.
            StoreIOError: There is no space; nothing is appended.
        """
        size = len(data)
        if self._file_start < 0 or self.end == self._file_end:
            self._roll(size)
        start, at = self._file_start, self.end - self._file_start
        used = data if is_checked else without_zeros(data)
        if at + len(used) > self._reserved:
            self._reserved = self._sequence.reserve(start, at, min(at + len(used), self.file_size))
            self.sure = min(self.fits, start + self._reserved)
        assert self._buffer is not None
        frames.write_records(self._buffer, at, used)
        if is_checked:
            items = frames.split(data, self.end)
        else:
            try:
                items = list(self._items(self._sequence.file(start), start, at, at + size, True))
                if sum(item[1] for item in items) != size:
                    what = f"expected whole records in {size} copied bytes"
                    raise CorruptionError(self._sequence.path(start), self.end, "record", what)
            except (CorruptionError, IndexError):
                self._buffer[at : at + len(used)] = bytes(len(used))
                raise
        self._sequence.mark_dirty(start)
        self.last_write = self.end
        self.end += size
        return items

    def _next_file(self) -> int:
        sequence = self._sequence
        if self._file_start >= 0:
            return self._file_end
        if sequence.starts and self.end not in (sequence.starts[-1], sequence.end):
            raise CorruptionError(sequence.folder, self.end, "record", "expected the log's end in one of its files")
        return self.end

    def _roll(self, size: int) -> None:
        """Begin the next file for ``size`` bytes, after a blank in this one."""
        sequence, end, following = self._sequence, self.end, self._next_file()
        self.check_owner()
        # First the steps that can fail, so that a full disk leaves the log unchanged.
        self._make(following)
        sequence.reserve(following, 0, size)
        if size <= _FIRST_PAGES:  # the first write to other pages takes 2 ms: the kernel zeros 2 MiB around it
            sequence.touch(following, 0, min(_FIRST_PAGES, self.file_size))
        if self._file_start >= 0 and end < self._file_end:
            at, remaining = end - self._file_start, self._file_end - end
            if at + _BLANK_SIZE > self._reserved:
                self._reserved = sequence.reserve(self._file_start, at, at + _BLANK_SIZE)
            assert self._buffer is not None
            self._buffer[at : at + _BLANK_SIZE] = frames.blank(remaining)
            sequence.mark_dirty(self._file_start)
        self.end = following
        self._resume()

    def prepare(self, ahead: int) -> None:
        """Prepare blocks and pages up to ``ahead`` bytes after the end, including the next file.

        A thread beside the producers calls this, so that they do not wait for the device or for first touches.
        """
        sequence, end = self._sequence, self.end
        if sequence.start_of(end) is None:
            return
        ready_end = min(end + ahead, end + 2 * self.file_size)
        # During a part no thread of the process gets new memory, and perhaps none this core. After each, however, this
        # thread waits for the interpreter of a busy producer, which therefore needs large parts.
        part = _PAGED if end - max(self._prepared, self._flushed) < _PAGED else _MAX_TOUCHED
        while (at := max(self.end, self._prepared)) < ready_end:
            start, written = at - at % self.file_size, self.end
            if start not in sequence.starts and not self._make(start):
                return
            step = min(ready_end, at + part, start + self.file_size)
            sequence.touch(start, at - start, step - start)
            self._prepared = step
            part = _PAGED if self.end - written < _PAGED else _MAX_TOUCHED

    def _make(self, start: int) -> bool:
        """Make the next file unless it exists; return False if ``start`` is not the next."""
        sequence = self._sequence
        with self._making:
            if start in sequence.starts:
                return True
            if sequence.starts and start != sequence.end:
                return False
            self.check_owner()
            sequence.create(start)
            return True

    def flush(self) -> int:
        """Flush everything appended before the call, and return the physical offset up to which it is on the device."""
        end, start, flushed = self.end, self._file_start, self._flushed
        if start >= 0 and end - flushed > _WORTH_UNMAPPING:
            self._sequence.unmap_pages(flushed, end)
        begin = max(flushed, start)
        if start >= 0 and begin <= end and (begin == start != self._found_start or start == self._flushed_start):
            # Prepared pages count as written. A flush of them too would make the device write zeros, and the producer
            # wait for each of the pages again, up to the end of that flush.
            through = end
            if end > self._settled:
                through = self._settled = min(end - end % -_SETTLED, start + self.file_size)
            self._sequence.flush_part(start, begin, through)
        else:
            if start >= 0:
                self._sequence.mark_dirty(start)
            self._sequence.flush()
        self._flushed, self._flushed_start = end, start if start == self._file_start else -1
        return end

    def truncate(self, physical_offset: int) -> list[str]:
        """Cut the log at ``physical_offset``: write zeros after it, delete later files, and return their paths."""
        deleted = self._sequence.delete_from(physical_offset + 1)
        if physical_offset < self._sequence.end:
            if self.unfinished_at(physical_offset):
                # The mark says why sound records can be behind it. So it goes last: a kill in between would leave them
                # without it, and the next recovery would refuse to cut them.
                self._sequence.zero_from(physical_offset + _BLANK_SIZE)
            self._sequence.zero_from(physical_offset)
        self._prepared = -1
        self.last_write = None
        self.end = physical_offset
        self._resume()
        return deleted

    def patch(self, physical_offset: int, data: bytes) -> None:
        """Overwrite a field of a record in place; for recovery."""
        start = physical_offset - physical_offset % self.file_size
        at = physical_offset - start
        if self._sequence.break_links(start):
            self._resume()
        self._sequence.file(start).buffer[at : at + len(data)] = data
        self._sequence.mark_dirty(start)

    def delete_before(self, physical_offset: int) -> list[str]:
        """Delete the files that end at or before ``physical_offset``, except the last, and return their paths."""
        last = self._sequence.starts[-1] if self._sequence.starts else 0
        return self._sequence.delete_before(min(physical_offset, last))

    @override
    def close(self) -> None:
        """Release the files; referenced parts stay readable."""
        self._is_closed = True
        self._buffer = None
        self._file_start = self._file_end = -1
        self._sequence.unmap_all()
