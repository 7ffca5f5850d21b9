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
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Final, NamedTuple, Self

from librmq.clock import SystemClock
from librmq.errors import ConfigError, CorruptionError, MessageIllegalError, RecordError, StoreClosedError
from librmq.files import Buffer, Damage, DiskFiles, File, Files
from librmq.files.interface import without_zeros
from librmq.files.rolling import MappedFileQueue, MappingPool
from librmq.message import Message, StoredMessage, frames, record
from librmq.message.properties import encode_properties
from librmq.message.topics import validate_topic
from librmq.override import override
from librmq.runtime.closing import Closing
from librmq.runtime.compiled_core import LogState
from librmq.runtime.locks import Lock

__all__ = ["CommitLog"]

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
        self.sequence: MappedFileQueue = sequence
        """The files."""
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
        self.gaps: Sequence[Damage] = ()
        """For a reader: what the files lack between other bytes, where a read finds no record, and files of others."""

    @property
    def begin(self) -> int:
        """Physical offset of the oldest existing record."""
        return self.sequence.begin

    def is_missing(self, physical_offset: int) -> bool:
        """Return whether the files lack this byte, between others that they have."""
        return any(gap.offset <= physical_offset < gap.offset + gap.bytes for gap in self.gaps)

    def third_last_file(self) -> int:
        """Return the start of the third last file, or of the first; after a clean exit all before it is sound."""
        starts = self.sequence.starts
        return starts[max(0, len(starts) - 3)] if starts else self.begin

    def unfinished_at(self, physical_offset: int) -> int:
        """Return how many bytes a writer was or is writing at ``physical_offset``, 0 if there is no mark of that."""
        head = self.data_at(physical_offset, _BLANK_SIZE)
        return frames.unfinished_size(head, self.file_size - physical_offset % self.file_size)

    def data_behind(self, physical_offset: int) -> int:
        """Return the number of bytes from ``physical_offset`` to the last nonzero one, in all existing files."""
        return self.sequence.data_behind(physical_offset)

    def blank_at(self, physical_offset: int) -> int:
        """Return the size of the blank at ``physical_offset`` that fills its file, 0 if there is none."""
        left = -physical_offset % self.file_size
        is_blank = left >= _BLANK_SIZE and self.data_at(physical_offset, _BLANK_SIZE) == frames.blank(left)
        return left if is_blank else 0

    def read(self, physical_offset: int, size: int | None = None) -> bytes | None:
        """Return the raw record at ``physical_offset``, None where the log has none any more.

        That is below its first byte, which retention deletes, and in `gaps`.

        Without ``size``, which is that of the entry that leads there, None is also returned behind the log's end.

        Raises:
            CorruptionError: The bytes are not a record, or one of another ``size``.
        """
        at = physical_offset % self.file_size
        start = physical_offset - at
        is_written = physical_offset + (_BLANK_SIZE if size is None else max(size, 0)) <= self.end
        file = (self._mapped.get(start) or self.sequence.file_at(start)) if is_written else None
        if file is None:
            starts = self.sequence.starts  # asked last, because a file can have been deleted since it was looked up
            if size is None or (starts and 0 <= physical_offset < starts[0]):
                return None
            path, what = self.sequence.path(max(start, 0)), f"a record of {size} bytes from {self.begin} to {self.end}"
            raise CorruptionError(path, physical_offset, "record", f"expected {what}, where the log is")
        self._note_looks(physical_offset, physical_offset, 1)
        if at + _BLANK_SIZE > self.file_size:
            raise CorruptionError(file.path, physical_offset, "record", "expected a record, found the end of the file")
        length, magic = frames.SIZE_AND_MAGIC.unpack_from(file.buffer, at)
        if (
            magic not in record.MAGICS
            or (size is not None and length != size)
            or not record.FIXED_SIZE <= length <= self.file_size - at
        ):
            if self.is_missing(physical_offset):
                return None
            kind = "a record" if size is None else f"a record of {size} bytes"
            actual = f"one of {length} bytes" if magic in record.MAGICS else f"magic {magic:08x}, which no record has"
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
        file = self.sequence.file_at(physical_offset)  # not a mapping of a file that a recovery has deleted
        return b"" if file is None else file.buffer[at : min(at + size, self.file_size)]

    def message(self, physical_offset: int) -> StoredMessage | None:
        """Return the checked message at ``physical_offset``, None if the log has no bytes there.

        Raises:
            CorruptionError: There is no sound record.
        """
        raw = self.read(physical_offset)
        return None if raw is None else StoredMessage(self.sound(raw, physical_offset))

    def sound(self, raw: bytes, physical_offset: int) -> bytes:
        """Return a record whose body matches its checksum.

        Raises:
            CorruptionError: It does not, or the bytes are no record.
        """
        try:
            record.check_record(raw, 0, len(raw), check_body=True)
        except RecordError as error:
            raise frames.damage(self.sequence.path_at(physical_offset), physical_offset, error) from error
        return raw

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
        if not self.is_missing(error.offset):  # its user learns of `gaps` at the beginning
            self.unreadable = self.unreadable or error

    def scan(
        self, begin: int | None = None, end: int | None = None, *, check_body: bool = True
    ) -> Iterator[frames.LogItem]:
        """Yield records and blanks from ``begin``, by default the oldest, up to ``end``, by default the log's end.

        ``begin`` must be the start of a record. Another call can continue the walk behind damage.

        Raises:
            CorruptionError: The next bytes are not a record, or its body does not match its checksum.
        """
        return chain.from_iterable(self._files(begin, end, check_body))  # quicker than a generator over both

    def _files(self, begin: int | None, end: int | None, check_body: bool) -> Iterator[Iterator[frames.LogItem]]:
        limit = self.end if end is None else end
        at = self.begin if begin is None else begin
        file_size = self.file_size
        while at < limit:
            start = at - at % file_size
            file = self.sequence.file_at(start)
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
        for start in self.sequence.starts:
            if not self._file_contains(start, text):
                continue
            released = start
            for place, _, raw in self.scan(start, min(start + self.file_size, self.end), check_body=False):
                if place - released > _MOST_HELD:
                    self.release_read_pages(released, place)
                    released = place
                if raw is not None and text in raw:
                    yield self.message(place) or StoredMessage(raw)

    def _file_contains(self, start: int, text: bytes) -> bool:
        """Look for a text in pieces, which overlap, so that no more pages are held than those of one."""
        file = self.sequence.file_at(start)
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
        sequence = self.sequence  # whose pages a writer gives up too, because this comes before its appends
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
        self.sequence.release_read_pages(begin, end)

    def follow(self, until: int | None = None) -> Iterator[tuple[int, int, bytes]]:
        """Yield the records that another process has written after `end`; the caller moves `end` past each of them.

        ``until`` ends it there, although the other process writes on.

        Only complete records are returned. A writer copies a record over zeros from its first byte to its last. So it
        is complete if another record follows, or if its text is complete: topic and properties contain no zeros, the
        lengths agree, and the body matches its checksum. Other bytes count as a record that is being copied.
        """
        at = self.end
        while (until is None or at < until) and (file := self.sequence.file_at(at)) is not None:
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
        file = self.sequence.file(start)
        raw = file.buffer[: record.FIXED_SIZE] if file.data_end() else b""
        if raw and frames.SIZE_AND_MAGIC.unpack_from(raw)[1] in record.MAGICS:
            return record.store_timestamp_ms(raw)
        if start < self.end:
            self.leave_out(CorruptionError(self.sequence.path(start), start, "record", "the file begins with none"))
        return None

    def file_before(self, timestamp_ms: int) -> int:
        """Return the start of the newest file whose first record was stored by a time; the log's start if none.

        A record that a crash has left incomplete does not count, because it can have half of its time.
        """
        for start in reversed(self.sequence.starts):
            stored = self.first_store_timestamp_ms(start)
            if stored and stored <= timestamp_ms and self._begins_with_record(start):
                return max(start, self.begin)
        return self.begin

    def _begins_with_record(self, start: int) -> bool:
        try:
            return record.check_record(self.sequence.file(start).buffer, 0, self.file_size, check_body=True) > 0
        except RecordError:
            return False

    def _items(self, file: File, start: int, place: int, end: int, check_body: bool) -> Iterator[frames.LogItem]:
        """Yield the items of the file at ``start``; see `frames.items`."""
        path, data_end = self.sequence.path(start), file.data_end()
        return frames.items(file.buffer, path, start, place, end, self.file_size, check_body, data_end)


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
        """Begin of this handle's last write, or of what it has adopted: one record or several."""
        self.check_owner: Callable[[], object] = lambda: None
        """Called before a write reaches another file; raises if another process may write here too."""
        self.check_turn: Callable[[], object] | None = None
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
        start = self.sequence.start_of(self.end)
        # Map the file before anything changes, because a signal can interrupt this in a peer of a share.
        buffer = self.sequence.file(start).buffer if start is not None and self.sequence.writable else None
        self._flushed_start, self._buffer = -1, None
        if start is None:
            self._file_start = self._file_end = self._reserved = -1
        else:
            self._file_start, self._file_end, self._reserved = start, start + self.file_size, -1
        self._buffer = buffer
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
        if self.check_turn is not None and self.end + size > self.fits:
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
            raise StoreClosedError(f"{self.sequence.folder} is closed")
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
            self._reserved = self.sequence.reserve(self._file_start, at, at + size)
        self.sure = min(self.fits, self._file_start + self._reserved)

    def append_block(self, data: bytes | bytearray) -> None:
        """Append some MiB at once, faster than `append`, and begin to send them to the device."""
        size = len(data)
        if self.end + size + _BLANK_SIZE > self._file_end:
            self._roll(size)
        self.sequence.put(self._file_start, self.end - self._file_start, data)
        self.sequence.mark_dirty(self._file_start)
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
            self.sequence.refresh()
            self.end = end
            self._resume()
        self.end = end
        self.fits = self.sure = sure

    def drop_mappings(self) -> None:
        """Open the files again at the next `continue_at`, because another process may have replaced them."""
        self.sequence.unmap_all()
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
        self.sequence.flush_part(self._file_start, begin, end)
        return begin

    def begin_at(self, physical_offset: int) -> None:
        """Let a log without files begin at ``physical_offset``, the start of a file; for the copy of another log."""
        self._make(physical_offset)
        self.end = self._flushed = physical_offset
        self._resume()

    def append_copy(self, data: bytes, *, is_checked: bool = False) -> None:
        """Append bytes of another log as they are, whole records and blanks of one file.

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
            self._reserved = self.sequence.reserve(start, at, min(at + len(used), self.file_size))
            self.sure = min(self.fits, start + self._reserved)
        assert self._buffer is not None
        frames.write_records(self._buffer, at, used)
        if not is_checked:
            try:
                items = self._items(self.sequence.file(start), start, at, at + size, True)
                if sum(item[1] for item in items) != size:
                    what = f"expected whole records in {size} copied bytes"
                    raise CorruptionError(self.sequence.path(start), self.end, "record", what)
            except (CorruptionError, IndexError):
                self._buffer[at : at + len(used)] = bytes(len(used))
                raise
        self.sequence.mark_dirty(start)
        self.last_write = self.end
        self.end += size

    def _next_file(self) -> int:
        sequence = self.sequence
        if self._file_start >= 0:
            return self._file_end
        if sequence.starts and self.end not in (sequence.starts[-1], sequence.end):
            raise CorruptionError(sequence.folder, self.end, "record", "expected the log's end in one of its files")
        return self.end

    def _roll(self, size: int) -> None:
        """Begin the next file for ``size`` bytes, after a blank in this one."""
        sequence, end, following = self.sequence, self.end, self._next_file()
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
        sequence, end = self.sequence, self.end
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
        sequence = self.sequence
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
            self.sequence.unmap_pages(flushed, end)
        begin = max(flushed, start)
        if start >= 0 and begin <= end and (begin == start != self._found_start or start == self._flushed_start):
            # Prepared pages count as written. A flush of them too would make the device write zeros, and the producer
            # wait for each of the pages again, up to the end of that flush.
            through = end
            if end > self._settled:
                through = self._settled = min(end - end % -_SETTLED, start + self.file_size)
            self.sequence.flush_part(start, begin, through)
        else:
            if start >= 0:
                self.sequence.mark_dirty(start)
            self.sequence.flush()
        self._flushed, self._flushed_start = end, start if start == self._file_start else -1
        return end

    def truncate(self, physical_offset: int) -> list[str]:
        """Cut the log at ``physical_offset``: write zeros after it, delete later files, and return their paths."""
        deleted = self.sequence.delete_from(physical_offset + 1)
        if physical_offset < self.sequence.end:
            if self.unfinished_at(physical_offset):
                # The mark says why sound records can be behind it. So it goes last: a kill in between would leave them
                # without it, and the next recovery would refuse to cut them.
                self.sequence.zero_from(physical_offset + _BLANK_SIZE)
            self.sequence.zero_from(physical_offset)
        self._prepared = -1
        self.last_write = None
        self.end = physical_offset
        self._resume()
        return deleted

    def patch(self, physical_offset: int, data: bytes) -> None:
        """Overwrite a field of a record in place; for recovery."""
        start = physical_offset - physical_offset % self.file_size
        at = physical_offset - start
        if self.sequence.break_links(start):
            self._resume()
        self.sequence.file(start).buffer[at : at + len(data)] = data
        self.sequence.mark_dirty(start)

    def delete_before(self, physical_offset: int) -> list[str]:
        """Delete the files that end at or before ``physical_offset``, except the last, and return their paths."""
        last = self.sequence.starts[-1] if self.sequence.starts else 0
        return self.sequence.delete_before(min(physical_offset, last))

    @override
    def close(self) -> None:
        """Release the files; referenced parts stay readable."""
        self._is_closed = True
        self._buffer = None
        self._file_start = self._file_end = -1
        self.sequence.unmap_all()
