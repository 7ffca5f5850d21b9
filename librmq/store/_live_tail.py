"""Read-only parts of a store that another process writes to: its files, and the entries and keys that they lack.

A writer acknowledges a record when it is in the log, and updates queues and index in batches. This module takes missing
entries and keys from the log, and holds them until the files have them. Files appear and disappear meanwhile: a file of
length 0 does not count yet, and a deleted file was the oldest.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import suppress
from operator import itemgetter
from typing import Final, TypeVar

from librmq.commitlog import CommitLog
from librmq.config import StoreConfig
from librmq.consumequeue import ConsumeQueue
from librmq.consumequeue_entries import ENTRY_SIZE, entry_dtype, place_at
from librmq.consumequeue_ext import ConsumeQueueExt
from librmq.errors import CorruptionError, MessageIllegalError, NotAStoreError, StoreIOError
from librmq.files import File, Files, FolderEntry, is_folder
from librmq.files.rolling import MappedFileQueue, MappingPool
from librmq.java.lang import java_decode
from librmq.message import DelayLevels, StoredMessage
from librmq.message import record as record_format
from librmq.message.message import is_batch
from librmq.message.topics import validate_queue
from librmq.override import override
from librmq.runtime import lazy_numpy as np
from librmq.runtime.locks import RLock
from librmq.store.engine.derivation import FEW, Derivation, DerivedBlock, block_of_records
from librmq.store.engine.dispatch import Dispatcher
from librmq.store.engine.store_parts import OpenQueue, Parts, QueueName, QueueTable
from librmq.store.format import directory
from librmq.store.format._checkpoint import Checkpoint
from librmq.store.format._keyindex import KeyIndex
from librmq.store.format.directory import has_abort
from librmq.store.format.indexfile import IndexFile, IndexHeader, file_length
from librmq.store.recovery.open import readable_files

T = TypeVar("T")

KEPT: Final = 4096
"""Most entries, and most records with keys, to hold, unless the writer is further behind."""
ATTEMPTS: Final = 20
"""Most repetitions of a listing after the deletion of a listed file."""
GLANCE: Final = 128
"""Number of bytes that identify a record: all but its text."""
_FLAG_AT: Final = record_format.SYS_FLAG_AT + 3
"""Place of the lowest byte of a record's sys flag."""
_LOG_FILES_MAPPED: Final = 32
_MAX_TIMESTAMP: Final = (1 << 63) - 1


def _without_unfinished(entries: list[FolderEntry], size: int) -> list[FolderEntry]:
    """Return the entries without files at the end that are being made and have no length yet."""
    end = len(entries)
    while end and not entries[end - 1].is_folder and entries[end - 1].size < size:
        end -= 1
    return entries[:end]


def _repeated(look: Callable[[], T], *errors: type[Exception]) -> T:
    """Return what ``look()`` returns; repeat it after errors, as of a file that was deleted since it was listed."""
    for _ in range(ATTEMPTS):
        with suppress(*errors):
            return look()
    return look()


class LiveSequence(MappedFileQueue):
    """Files that another process makes and deletes; a request for an unknown file lists them again."""

    __slots__ = ()

    @override
    def _listed(self) -> list[FolderEntry]:
        return _without_unfinished(super()._listed(), self.file_size)

    @override
    def _list(self) -> list[int]:
        return _repeated(super()._list, CorruptionError, StoreIOError)

    @override
    def file_at(self, position: int) -> File | None:
        """Return the file with a position; list the folder again where the writer may have added it."""
        start = self.start_of(position)
        if start is None and position >= self.end:
            self.refresh()
            start = self.start_of(position)
        if start is None:
            return None
        try:
            return self.file(start)
        except (StoreIOError, CorruptionError):
            self.refresh()
            if start in self.starts:
                raise
            return None


class QueueWithTail(ConsumeQueue):
    """A queue whose last entries are in memory. One thread adds entries while others read."""

    __slots__ = ("_held",)

    _held: tuple[int, bytearray]
    """A queue offset and the entries from it on; one value, so that readers need no lock."""

    @property
    @override
    def stored_end(self) -> int:
        """The queue offset from which on entries are in memory."""
        return self._held[0]

    def extend(self, entries: bytes | bytearray) -> None:
        """Add packed entries at the end, in memory only."""
        if entries:
            self._held[1].extend(entries)
            self._note_end(self.max_offset, entries)

    @override
    def _raw(self, position: int, end: int) -> bytes:
        first, held = self._held
        end = min(end, position - position % self.file_size + self.file_size)
        middle = first * ENTRY_SIZE
        if end <= middle:
            return super()._raw(position, end)
        self._check_open()
        if position >= middle:
            return bytes(held[position - middle : end - middle])
        stored = super()._raw(position, middle)
        return stored + held[: end - middle] if stored else stored


class LiveQueue(QueueWithTail):
    """A queue whose last entries can be missing in its files."""

    __slots__ = ()

    def __init__(
        self, files: LiveSequence, ext: LiveSequence | None, log_end: int, first: int, unwritten: bytearray
    ) -> None:
        """Take the files up to entries for ``log_end``, and further entries from queue offset ``first`` on."""
        super().__init__(files, None)
        self.ext = None if ext is None else ConsumeQueueExt(ext, None)
        # The writer can be ahead of the known log.
        stored = range(self.min_offset, self.max_offset)
        end = self.min_offset + bisect_left(
            stored, True, key=lambda at: sum(place_at(files, at * ENTRY_SIZE)) > log_end
        )
        if unwritten and end <= self.stored_begin:  # it has no file, or an empty one
            self.min_offset = end = first
        elif unwritten and first <= end:  # those in memory are certainly complete
            end = first
            self.min_offset = min(self.min_offset, end)
        self.max_offset = end
        self.max_physic_offset = self._last_place()
        self._held = end, bytearray()
        if first == end:
            self.extend(unwritten)

    def catch_up(self) -> int:
        """Drop entries that the files have by now, and return the number of the others."""
        first, unwritten = self._held
        self._files.unmap_all()  # a recovery can have deleted a file and made another with its name
        while unwritten:
            raw = ConsumeQueue._raw(self, first * ENTRY_SIZE, first * ENTRY_SIZE + len(unwritten))
            stored = np.frombuffer(raw, entry_dtype())
            expected = np.frombuffer(unwritten, entry_dtype(), len(stored))
            same = (stored["physical_offset"] == expected["physical_offset"]) & (stored["size"] == expected["size"])
            count = len(same) if same.all() else int(same.argmin())
            if count and stored["tags_code"][count - 1] != expected["tags_code"][count - 1]:
                # It can be an address, or be incomplete; it is complete if another entry follows.
                count -= place_at(self._files, (first + count) * ENTRY_SIZE)[1] <= 0
            first, unwritten = first + count, unwritten[count * ENTRY_SIZE :]
            if not count or count < len(stored):
                break
        self._held = first, unwritten
        return len(unwritten) // ENTRY_SIZE

    def follow_begin(self, log_begin: int) -> None:
        """Drop entries whose records are deleted from the log."""
        self._files.refresh()
        self.advance(log_begin)


class LiveQueues(QueueTable):
    """The queues of a store that another process writes to: those with a folder or with entries in memory."""

    def __init__(self, path: str, config: StoreConfig, files: Files, log: CommitLog) -> None:
        super().__init__(self.open_queue, {})
        self._path = path
        self._config = config
        self._files = files
        self._log = log
        self._pool = MappingPool(config.mapped_files)
        self._guard = RLock()  # held while a queue is opened or added to
        self._unwritten: dict[QueueName, tuple[int, bytearray]] = {}
        self._kept = 0

    def open_queue(self, topic: str, queue_id: int) -> LiveQueue:
        """Reopen the queue; the caller holds the guard if another thread can know the queue."""

        def sequence(size: int, *, ext: bool) -> LiveSequence:
            folder = directory.queue_folder(self._path, topic, queue_id, ext=ext)
            return LiveSequence(folder, size, self._files, self._pool, writable=False)

        config = self._config
        files = sequence(config.consumequeue_file_size, ext=False)
        ext = sequence(config.consumequeue_ext_file_size, ext=True) if config.enable_consumequeue_ext else None
        queue = LiveQueue(files, ext, self._log.end, *self._unwritten.get((topic, queue_id), (0, bytearray())))
        queue.advance(self._log.begin)
        self._unwritten.pop((topic, queue_id), None)
        return queue

    @override
    def find(self, name: QueueName) -> ConsumeQueue | None:
        """Return a queue, opened on first use; None if there is none."""
        queue = self._open.get(name)
        if queue is None:
            with self._guard:
                queue = self._open.get(name) or _repeated(lambda: self._open_if_there(name), StoreIOError)
        return queue

    def _open_if_there(self, name: QueueName) -> LiveQueue | None:
        """Open a queue and keep it open; None if it was deleted meanwhile."""
        if name not in self:
            return None
        queue = self._open[name] = self.open_queue(*name)
        return queue

    @override
    def __getitem__(self, name: QueueName) -> ConsumeQueue:
        queue = self.find(name)
        if queue is None:
            raise KeyError(name)
        return queue

    @override
    def __contains__(self, name: object) -> bool:
        if name in self._open or name in self._unwritten:
            return True
        match name:
            case (str() as topic, int() as queue_id):
                with suppress(MessageIllegalError):
                    validate_queue(topic, queue_id)
                    return self._has_folder((topic, queue_id))
        return False

    def _has_folder(self, name: QueueName) -> bool:
        return is_folder(self._files, directory.queue_folder(self._path, *name))

    @override
    def __iter__(self) -> Iterator[QueueName]:
        listed = directory.list_queues(self._path, self._files)
        with self._guard:
            for name in self._open.keys() - listed:
                if self._open[name].what_is_missing() is None and not self._has_folder(name):
                    del self._open[name]  # a broker has deleted the topic
            names = {*self._open, *self._unwritten}
        return iter(sorted(names.union(listed)))

    @override
    def __len__(self) -> int:
        return sum(1 for _ in self)

    def follow_begin(self) -> None:
        """Drop entries whose records are deleted from the log, in open queues."""
        with self._guard:
            for queue in self._open.values():
                assert isinstance(queue, LiveQueue)
                queue.follow_begin(self._log.begin)

    def publish(self, block: DerivedBlock) -> None:
        """Move the log's end behind some records, and add their entries to queues."""
        with self._guard:
            self._log.end = block.end
            for topic, queue_id, first, entries in filter(itemgetter(3), block.queues):
                name = java_decode(topic), queue_id
                self._kept += len(entries) // ENTRY_SIZE
                queue = self._open.get(name)
                if isinstance(queue, LiveQueue) and queue.max_offset == first:
                    queue.extend(entries)
                    continue
                with suppress(MessageIllegalError):  # damage: it fits into no queue
                    validate_queue(*name)
                    self._open.pop(name, None)  # the topic was created again; the next request opens the queue
                    begin, before = self._unwritten.get(name, (-1, bytearray()))
                    if begin + len(before) // ENTRY_SIZE == first:
                        before += entries
                    else:
                        self._unwritten[name] = first, bytearray(entries)
            if self._kept > KEPT:
                for name in list(self._unwritten):
                    self.find(name)
                self._kept = sum(queue.catch_up() for queue in self._open.values() if isinstance(queue, LiveQueue))


class LiveIndexFile(IndexFile):
    """An index file that another process writes.

    The writer writes entries before the slots that lead to them, and the header last. So each slot leads to an entry.
    """

    __slots__ = ()

    @override
    def _load_header(self) -> None:
        super()._load_header()
        self._announced = self.max_entries

    @property
    @override
    def header(self) -> IndexHeader:
        """Read the header; repeat that while a broker is writing it."""
        for _ in range(ATTEMPTS):  # a broker writes its fields one by one
            with suppress(CorruptionError):
                return super().header
        return super().header


class LiveIndex(KeyIndex):
    """The index files of a store that another process writes to."""

    def __init__(self, folder: str, slots: int, entries: int, files: Files) -> None:
        self._list = []
        super().__init__(folder, slots, entries, files, lambda: 0, False)

    @override
    def _list_entries(self) -> list[FolderEntry]:
        return _without_unfinished(super()._list_entries(), file_length(self.max_slots, self.max_entries))

    @override
    def _open_file(self, path: str) -> IndexFile:
        for file in self._list:
            if file.path == path:
                return file
        return LiveIndexFile.open(
            path, self._files, slots=self.max_slots, entries=self.max_entries, on_map=self._bound_mapped
        )

    def refresh(self) -> None:
        """List the files again."""
        self._list = _repeated(self._open_all, StoreIOError)

    @override
    def query(
        self, topic: str, key: str, begin_ms: int = 0, end_ms: int = _MAX_TIMESTAMP, max_results: int = 64
    ) -> list[int]:
        """Return physical offsets of records with a key, as the files have them."""
        try:
            return super().query(topic, key, begin_ms, end_ms, max_results)
        except StoreIOError:  # the file was deleted meanwhile
            self.refresh()
            return super().query(topic, key, begin_ms, end_ms, max_results)


class FollowedParts:
    """Parts that follow a log to which another process writes. One thread at a time opens it and calls its methods."""

    parts: Parts

    def __init__(self, path: str, config: StoreConfig, files: Files, *, is_written: bool) -> None:
        files, gaps = readable_files(path, files, config.commitlog_file_size, is_written=is_written)
        self._levels = DelayLevels.parse(config.message_delay_level)
        self._derivation = Derivation(self._levels, self._on_batch)
        self._checkpoint = Checkpoint.open(os.path.join(path, directory.CHECKPOINT), files=files)
        pool = MappingPool(_LOG_FILES_MAPPED)
        folder = os.path.join(path, directory.COMMITLOG)
        log = CommitLog(LiveSequence(folder, config.commitlog_file_size, files, pool, writable=False))
        log.gaps = gaps
        self._log = log
        self._last: tuple[int, bytes] | None = None  # place and first bytes of the last record
        self._begin = log.begin
        self._walk_begin = (
            log.file_before(self._checkpoint.min_timestamp_ms) if has_abort(files, path) else log.third_last_file()
        )  # because the records before it reached the device

    def _make_parts(self, queues: QueueTable, index: KeyIndex, open_queue: OpenQueue) -> None:
        self.parts = Parts(self._levels, self._log, queues, index, self._checkpoint, Dispatcher(index), open_queue)

    def has_lost_end(self) -> bool:
        """List the log's files again, and return whether its known end is deleted or cut."""
        log = self._log
        log.sequence.refresh()
        for start in log.sequence.starts:
            if start + log.file_size > log.end:  # a recovery can have deleted it and made another with its name
                log.sequence.unmap(start)
        if log.begin > log.end or self._last is None:
            return log.begin > log.end
        place, raw = self._last
        return log.data_at(place, len(raw)) != raw

    def follow_log(self) -> bool:
        """Take in changes up to the last listing, and return whether there are any."""
        log, is_changed = self._log, self._walk_on()
        if log.begin != self._begin:
            self._begin = log.begin
            self._follow_begin()
            return True
        return is_changed

    def _walk_on(self, until: int | None = None) -> bool:
        """Take in the whole records behind the log's end, and return whether there are any."""
        log, begin = self._log, self._log.end
        few, end = list[tuple[int, int, bytes]](), begin
        for place, size, raw in log.follow(until):
            if len(few) < FEW:
                few.append((place, size, raw))
            end = place + size
        if few:
            self._last = place, raw[:GLANCE]
        if len(few) >= FEW:
            for block in self._derivation.blocks(log, begin, end, self._is_whole):
                self._take(block)
        elif few:
            self._take(block_of_records([self._derivation.derive(*item) for item in few]))
        return end > begin

    def _is_whole(self, begin: int, end: int) -> bool:
        """Return whether the queue entries of usual records are all that they define; see `Derivation.blocks`."""
        return True

    def _on_batch(self, place: int, batch: StoredMessage) -> None:
        """Take in a batch of 5.x, before the other records of its block."""

    def _take(self, block: DerivedBlock) -> None:
        """Take in what the next records define, and move the log's end behind them."""
        raise NotImplementedError

    def _follow_begin(self) -> None:
        """Drop entries whose records are deleted from the log."""
        for queue in self.parts.queues.opened():
            queue.advance(self._log.begin)

    def complete(self) -> None:
        """Take in the keys too, if that was put off."""


class LiveParts(FollowedParts):
    """The parts of a store that another process writes to, with its files."""

    def __init__(self, path: str, config: StoreConfig, files: Files) -> None:
        """Open the parts.

        Raises:
            NotAStoreError: A record is a batch of 5.x, which the files of queues show as one message; `follow_log`
                raises it too.
        """
        super().__init__(path, config, files, is_written=True)
        self._index = LiveIndex(
            os.path.join(path, directory.INDEX), config.max_hash_slot_num, config.max_index_num, files
        )
        self._queues = LiveQueues(path, config, files, self._log)
        self._make_parts(self._queues, self._index, self._queues.open_queue)
        # Take the entries and keys that queues and index can lack. A record is indexed after its entry, in log order,
        # so queues lack nothing below the last indexed record.
        log, begin = self._log, self._walk_begin
        walk = log.walk(begin, self._refuse_batch)
        end = walk.physical_offset  # behind it a writer that is faster than this could be followed without an end
        log.end = max(begin, min(self._index.end_physical_offset, end))
        self._walk_on(end)
        if walk.last_record is not None and log.end < walk.last_record:  # the index leads to no record
            log.end = begin
            self._walk_on(end)
        if self._last is None and walk.last_record is not None:
            self._last = walk.last_record, log.data_at(walk.last_record, GLANCE)

    @override
    def follow_log(self) -> bool:
        self._index.refresh()
        return super().follow_log()

    @override
    def _take(self, block: DerivedBlock) -> None:
        dispatcher = self.parts.dispatcher
        dispatcher.collect(block)  # first, because the other step can fail after it has moved the log's end
        self._queues.publish(block)
        dispatcher.forget_first(KEPT)

    @override
    def _follow_begin(self) -> None:
        self._queues.follow_begin()

    @override
    def _on_batch(self, place: int, batch: StoredMessage) -> None:
        raise NotAStoreError(f"at {place}: a batch of messages of RocketMQ 5, which the files of queues show as one")

    def _refuse_batch(self, _: CommitLog, place: int, raw: bytes) -> None:
        if raw[_FLAG_AT] & record_format.INNER_BATCH and is_batch(StoredMessage(raw)):
            self._on_batch(place, StoredMessage(raw))
