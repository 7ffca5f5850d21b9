"""The index files of a folder as one index: the newest is written, all are searched. Mirrors ``IndexService``."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from itertools import chain
from typing import TYPE_CHECKING, Final

from librmq.clock import SystemClock
from librmq.errors import CorruptionError, ReadOnlyError, StoreClosedError, StoreIOError
from librmq.files import DiskFiles, Files, FolderEntry
from librmq.files.interface import make_folders
from librmq.java.lang import index_key_hash
from librmq.override import override
from librmq.runtime import lazy_numpy as np
from librmq.runtime.closing import Closing
from librmq.runtime.compiled_core import CORE
from librmq.runtime.locks import Lock
from librmq.store.format.indexfile import FRESH, IndexFile, check_geometry, file_length

if TYPE_CHECKING:
    from numpy.typing import NDArray

BLOCK = 80
"""Number of keys from which arrays are faster than a loop."""
_MAPPED: Final = 32
"""Number of files of a folder that stay mapped."""
_MAX_TIMESTAMP: Final = (1 << 63) - 1
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_LAST_MOMENT: Final = (datetime(9999, 12, 31, 23, 59, 59, 999000, UTC) - _EPOCH) // timedelta(milliseconds=1)


def _name(timestamp_ms: int) -> str:
    return f"{_EPOCH + timedelta(milliseconds=timestamp_ms):%Y%m%d%H%M%S}{timestamp_ms % 1000:03d}"


def _moment(name: str) -> int | None:
    """Return the time (ms) in a file's name, None for any other name."""
    if len(name) != 17 or not (name.isascii() and name.isdigit()):
        return None
    try:
        moment = datetime.strptime(name[:14] + "+0000", "%Y%m%d%H%M%S%z")
    except ValueError:
        return None
    return (moment - _EPOCH) // timedelta(milliseconds=1) + int(name[14:])


class KeyIndex(Closing):
    """The index files of a folder, usable alone.

    One thread can append and delete while others query. Any thread can flush. Only few files are mapped at a time.
    """

    def __init__(
        self,
        folder: str,
        slots: int,
        entries: int,
        files: Files,
        now_ms: Callable[[], int],
        writable: bool,
    ) -> None:
        """Call `open` instead, which finds the files."""
        self.folder = folder
        self.max_slots = slots
        self.max_entries = entries
        self.writable = writable
        self._files = files
        self._now_ms = now_ms
        self._log_end: int | None = None
        self._closed = False
        self._folder_dirty = False
        self._guard = Lock()
        self._mapped: deque[IndexFile] = deque()
        self._list = self._open_all()  # replaced, never changed: readers take no lock
        self._tail: IndexFile | None = self._list[-1] if self._list and writable else None

    @classmethod
    def open(
        cls,
        folder: str | os.PathLike[str],
        *,
        slots: int = 5_000_000,
        entries: int = 20_000_000,
        files: Files | None = None,
        now_ms: Callable[[], int] | None = None,
        writable: bool = True,
    ) -> KeyIndex:
        """Open the files of a folder, which need not exist yet. ``now_ms`` (the system's clock) names new files.

        As in 4.9, names that are not numbers are ignored.

        Raises:
            CorruptionError: A number is not a time, a file has another length, or a header is impossible.
        """
        check_geometry(slots, entries)
        return cls(os.fspath(folder), slots, entries, files or DiskFiles(), now_ms or SystemClock().now_ms, writable)

    def _open_all(self) -> list[IndexFile]:
        length, opened = file_length(self.max_slots, self.max_entries), []
        for entry in self._list_entries():
            if not (entry.name.isascii() and entry.name.isdigit()):
                continue
            path = os.path.join(self.folder, entry.name)
            if entry.is_folder or _moment(entry.name) is None:
                raise CorruptionError(path, 0, "name", "expected a file named by its time in 17 digits")
            if entry.size != length:
                raise CorruptionError(
                    path, min(entry.size, length), "size", f"expected {length} bytes, found {entry.size}"
                )
            opened.append(self._open_file(path))
        if self.writable and len(opened) > 1 and opened[-1].header == FRESH:
            opened[-1]._begin_after(opened[-2].header)  # the process that made it died before it set its beginning
        return opened

    def _list_entries(self) -> list[FolderEntry]:
        return self._files.list(self.folder)

    def _open_file(self, path: str) -> IndexFile:
        return IndexFile.open(
            path,
            self._files,
            slots=self.max_slots,
            entries=self.max_entries,
            writable=self.writable,
            on_map=self._bound_mapped,
        )

    def _bound_mapped(self, file: IndexFile) -> None:
        with self._guard:
            self._mapped.append(file)
            while len(self._mapped) > _MAPPED:
                self._mapped.popleft().release_mapping()

    @property
    def files(self) -> list[IndexFile]:
        """The files, the oldest first."""
        return list(self._list)

    @property
    def end_physical_offset(self) -> int:
        """The place of the last indexed record, which is the newest file's end; 0 without files."""
        files = self._list
        return files[-1].header.end_physical_offset if files else 0

    @property
    def end_timestamp_ms(self) -> int:
        """The store time of the last indexed record, which is the newest file's end; 0 without files."""
        files = self._list
        return files[-1].header.end_timestamp_ms if files else 0

    @property
    def full_timestamp_ms(self) -> int:
        """The end time of the newest full file, 0 for none; after a flush it is the checkpoint's time of the index."""
        for file in reversed(self._list):
            if file.full:
                return file.header.end_timestamp_ms
        return 0

    def last_record(self) -> tuple[int, int]:
        """Return the place of the last indexed record, and the number of its entries.

        Appending continues from that record without indexing a key twice, if that many of its keys are left out.
        """
        physical, keys = self.end_physical_offset, 0
        for file in reversed(self._list):
            number = file.header.index_count
            while number > 1:
                begin = max(1, number - 1024)
                others = np.flatnonzero(file.entries(begin, number)["physical"] != physical)
                if len(others):
                    return physical, keys + number - begin - 1 - int(others[-1])
                keys += number - begin
                number = begin
        return physical, keys

    def query(
        self, topic: str, key: str, begin_ms: int = 0, end_ms: int = _MAX_TIMESTAMP, max_results: int = 64
    ) -> list[int]:
        """Return physical offsets of a topic's records with a key, stored from ``begin_ms`` to ``end_ms``.

        The newest come first, at most ``max_results``. As in 4.9, records of other keys with the same hash are among
        them, and a record that was indexed twice occurs twice. The search ends at the newest file that begins before
        ``begin_ms``. Thread-safe.

        Raises:
            TypeError: The topic or the key is not a text.
        """
        self._check_open()
        texts: tuple[object, ...] = (topic, key)
        if not (isinstance(texts[0], str) and isinstance(texts[1], str)):
            raise TypeError(f"expected a topic and a key as text, found {topic!r:.40} and {key!r:.40}")
        key_hash = index_key_hash(topic, key)
        places = self._find(key_hash, begin_ms, end_ms, max_results)
        if self._log_end is None:
            return places
        limit = max_results
        while True:
            before = [place for place in places if place < self._log_end]
            if len(before) >= max_results or len(places) < limit:
                return before[:max_results]
            limit *= 2
            places = self._find(key_hash, begin_ms, end_ms, limit)

    def _show_before(self, log_end: int) -> None:
        """Leave out records from the physical offset ``log_end`` on, as if they were not indexed yet."""
        self._log_end = log_end

    def _find(self, key_hash: int, begin_ms: int, end_ms: int, max_results: int) -> list[int]:
        places: list[int] = []
        for file in reversed(self._list):
            try:
                first_ms = file.query(key_hash, begin_ms, end_ms, max_results, places)
            except StoreIOError:
                if file in self._list:
                    raise
                continue  # the file was deleted meanwhile
            if first_ms < begin_ms or len(places) >= max_results:
                break
        return places

    # ------------------------------------------------------------------------------------------ for the writer

    def append(self, topic: str, keys: Sequence[str], physical_offset: int, store_timestamp_ms: int) -> None:
        """Add one record of a topic with its keys in order.

        Records come in log order, those without keys too; one before the last indexed record is skipped.

        Raises:
            TypeError: ``topic`` or one of the keys is not a text, or ``keys`` is a single one.
            ValueError: The topic or a key is empty, or a number is none from 0 on.
        """
        one_or_more: object = keys
        is_list = isinstance(one_or_more, Sequence) and not isinstance(one_or_more, str)
        texts: tuple[object, ...] = (topic, *keys) if is_list else (None,)
        if not all(isinstance(text, str) for text in texts):
            raise TypeError(f"expected a topic and a sequence of keys as text, found {topic!r:.40} and {keys!r:.40}")
        if "" in texts:
            raise ValueError(f"expected a topic and keys that are not empty, found {topic!r:.40} and {keys!r:.40}")
        for name, number in (("physical_offset", physical_offset), ("store_timestamp_ms", store_timestamp_ms)):
            if type(number) is not int or not 0 <= number <= _MAX_TIMESTAMP:
                raise ValueError(f"{name}: expected a whole number from 0 to {_MAX_TIMESTAMP}, found {number!r:.80}")
        self.append_many([(physical_offset, store_timestamp_ms, [index_key_hash(topic, key) for key in keys])])

    def append_many(self, records: Sequence[tuple[int, int, Sequence[int]]]) -> None:
        """Add records in log order: tuples of physical offset, store time (ms) and key hashes."""
        if not records:
            return
        tail, keys = self._tail or self._room(), sum([len(record[2]) for record in records])
        if tail.count + keys < tail.max_entries and keys < BLOCK:
            if keys:
                tail._put_many(records, keys)
            return
        hashes = [record[2] for record in records]
        self.append_block(
            np.array([record[0] for record in records], np.int64),
            np.array([record[1] for record in records], np.int64),
            np.repeat(np.arange(len(records)), [len(keys) for keys in hashes]),
            np.fromiter(chain.from_iterable(hashes), np.int64),
        )

    def append_block(
        self,
        physical_offsets: NDArray[np.int64],
        timestamps: NDArray[np.int64],
        record_of_key: NDArray[np.int64],
        key_hashes: NDArray[np.int64],
    ) -> None:
        """Add many records at once, in log order.

        ``physical_offsets`` and ``timestamps`` (ms) have one value for each record, with or without keys;
        ``key_hashes`` and ``record_of_key`` (ascending indices into the other two) one for each key.
        """
        records = len(physical_offsets)
        if not records:
            return
        tail = self._room()
        # All arrays have 64 bits, because narrower ones would overflow.
        places, stored, record_of_key, hashes = (
            np.ascontiguousarray(numbers, np.int64)
            for numbers in (physical_offsets, timestamps, record_of_key, key_hashes)
        )
        spread = None if CORE.spread is None else CORE.spread(places, stored, record_of_key, tail.end_physical)
        physical, times = (
            (places[record_of_key], stored[record_of_key])
            if spread is None
            else (np.frombuffer(spread[0], np.int64), np.frombuffer(spread[1], np.int64))
        )
        if spread is None and len(hashes) and (physical[0] < tail.end_physical or (physical[1:] < physical[:-1]).any()):
            keep = physical >= np.maximum(np.maximum.accumulate(physical), tail.end_physical)
            record_of_key, physical = record_of_key[keep], physical[keep]
            times, hashes = times[keep], hashes[keep]
        begin, keys = 0, len(hashes)
        while begin < keys:
            tail = self._room()
            end = min(keys, begin + tail.max_entries - tail.count)
            tail.put_block(physical[begin:end], times[begin:end], hashes[begin:end])
            begin = end
        if keys and record_of_key[-1] < records - 1:
            self._room()  # If the file is full now, make the next one here, because the next record needs it.

    def _room(self) -> IndexFile:
        """Return the newest file, or a new one if it is full."""
        self._check_writable()
        tail = self._tail
        if tail is not None and tail.count < tail.max_entries:
            return tail
        moment = min(max(self._now_ms(), 0), _LAST_MOMENT)
        if tail is None:
            make_folders(self._files, self.folder)
        else:  # a file is never made before the others, because names define their order
            moment = max(moment, (_moment(tail.name) or 0) + 1)
            if moment > _LAST_MOMENT:
                raise CorruptionError(tail.path, 0, "name", "expected a name that leaves room for a later file")
        tail = IndexFile.create(
            os.path.join(self.folder, _name(moment)),
            self.max_slots,
            self.max_entries,
            self._files,
            after=tail.header if tail is not None else None,
            on_map=self._bound_mapped,
        )
        with self._guard:
            self._folder_dirty = True
        self._list = [*self._list, tail]
        self._tail = tail
        return tail

    def delete_before(self, physical_offset: int) -> list[str]:
        """Delete files that end before ``physical_offset``, except the newest, and return their paths."""
        self._check_writable()
        deleted = []
        for file in self._list[:-1]:
            if file.header.end_physical_offset >= physical_offset:
                break
            deleted.append(self._delete(file))
        return deleted

    def delete(self, name: str) -> str:
        """Delete the file with this name, and return its path.

        Raises:
            ValueError: There is no such file.
        """
        self._check_writable()
        for file in self._list:
            if file.name == name:
                return self._delete(file)
        raise ValueError(f"{self.folder}: no index file {name!r}")

    def _delete(self, file: IndexFile) -> str:
        self._list = [other for other in self._list if other is not file]
        self._tail = self._list[-1] if self._list else None
        self._files.delete(file.path)
        file.release_mapping()  # its blocks become free when the last reader has finished
        with self._guard:
            self._folder_dirty = True
        return file.path

    def flush(self) -> None:
        """Flush everything written before the call to the device."""
        for file in self._list:
            try:
                file.flush()
            except StoreIOError:
                if file in self._list:
                    raise
        with self._guard:
            folder_dirty, self._folder_dirty = self._folder_dirty, False
        if folder_dirty:
            try:
                self._files.flush_folder(self.folder)
            except BaseException:
                with self._guard:
                    self._folder_dirty = True
                raise

    @override
    def close(self) -> None:
        """Flush and release the files."""
        if not self._closed:
            self.flush()
            for file in self._list:
                file.close()
            self.release()

    def release(self) -> None:
        """Release the files; what was not flushed may be lost."""
        self._closed = True
        self._tail = None
        for file in self._list:
            file.release_mapping()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError(f"{self.folder} is closed")

    def _check_writable(self) -> None:
        self._check_open()
        if not self.writable:
            raise ReadOnlyError(f"{self.folder} is open for reading only")
