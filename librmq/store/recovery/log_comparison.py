"""Comparison of queues and key index with the log, and their repair.

The log is the truth: each record defines the entry at its queue offset and its keys in the index. `Reconciliation`
walks over the log once, compares entries and keys with the records, and, for recovery, rewrites differences.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Final, NamedTuple

from librmq.commitlog import CommitLog
from librmq.consumequeue import ENTRY, ENTRY_SIZE, HOLE_SIZE, ConsumeQueue
from librmq.errors import CorruptionError, MessageIllegalError, NotAStoreError
from librmq.files.interface import Damage, Files, FolderEntry
from librmq.files.rolling import MappedFileQueue, MappingPool, file_name, list_starts
from librmq.java.lang import java_decode
from librmq.message import record as record_format
from librmq.message.delays import DelayLevels
from librmq.message.frames import LogItem
from librmq.message.message import StoredMessage
from librmq.message.properties import PROPERTY_INNER_NUM, split_keys
from librmq.message.topics import LIGHT_PREFIX, validate_queue
from librmq.runtime import lazy_numpy as np
from librmq.runtime.compiled_core import CORE
from librmq.store.engine.derivation import (
    MULTI_DISPATCH,
    BitmapOf,
    Derivation,
    DerivedBlock,
    KeyBlock,
    RawPending,
    derived_block,
    key_block,
    key_hashes,
    light_queues,
    topic_hash,
)
from librmq.store.engine.read import offset_at_place
from librmq.store.engine.store_parts import OpenQueue, QueueName, QueueState
from librmq.store.format import directory
from librmq.store.format._keyindex import KeyIndex
from librmq.store.format.broker_tables import BrokerTables
from librmq.store.format.indexfile import (
    HEADER_SIZE,
    SLOT_SIZE,
    IndexFile,
    IndexHeader,
    all_entry_seconds,
    entry_seconds,
)
from librmq.store.recovery._entry_check import ExpectedEntry, Strays, is_illegible, misaddressed
from librmq.store.recovery._queue_check import COMPARED, QueueCheck

# ---- queues after an unclean exit

# A small queue that is as the log says is read without a mapping, and left unopened. Mapping takes most of the time
# that an opened queue costs, and a store can have many thousands.

_LARGEST: Final = 1 << 16  # bytes of a file that are read at once; more are mapped
_LARGEST_KEPT: Final = 1 << 10  # bytes of each file that are kept from its listing


class UncleanQueues:
    """The queues of the store in folder ``path``."""

    def __init__(self, path: str, files: Files, file_size: int, pool: MappingPool) -> None:
        self._path = path
        self._files = files
        self._file_size = file_size
        self._pool = pool
        self._path_read = ""
        # The folder, and start and content of the only file, if it is one and was read.
        self._listed: dict[QueueName, tuple[str, int | None, bytes | None]] = {}
        self._left: set[str] = set()
        self._written: set[str] = set()
        self._overwritten: list[str] = []
        self.states: dict[QueueName, QueueState] = {}
        """Queues that agree with the log, and need not be opened."""
        self.uncovered_from: int | None = None
        """Place of the log from which on entries are written again; None: none are."""

    def list_files(self, name: QueueName) -> None:
        """List the files of a queue.

        Raises:
            CorruptionError: A file has a wrong name or length.
        """
        folder = directory.queue_folder(self._path, *name)
        only = self._files.read_sole_file(folder, self._file_size, _LARGEST)
        listed = self._files.list(folder) if only is None else [FolderEntry(only[0], self._file_size, False, True)]
        starts = list_starts(folder, self._file_size, listed)
        content = None if only is None or len(only[1]) > _LARGEST_KEPT else only[1]
        self._listed[name] = folder, starts[0] if len(starts) == 1 else None, content

    def has_begin_and_end(self, name: QueueName) -> bool:
        """Return whether a queue that is not opened yet has its first file, and room for more entries in its last."""
        folder, start, content = self._listed.get(name, ("", None, None))
        if start != 0:
            return False
        end = self._file_size - ENTRY_SIZE
        if content is not None:
            return len(content) <= end
        return not any(self._files.read_at(os.path.join(folder, file_name(0)), end, ENTRY_SIZE))

    def pop_files(self, name: QueueName) -> MappedFileQueue | None:
        """Return the files of a queue that is opened now; None if it was left as it is, or is not listed."""
        if name not in self._listed:
            return None
        folder, *_ = self._listed.pop(name)
        return MappedFileQueue(folder, self._file_size, self._files, self._pool)

    def read_stored(self, name: QueueName) -> tuple[bytes, int] | None:
        """Return the used bytes of a queue's only file and its first queue offset; None if it must be opened."""
        folder, start, stored = self._listed.get(name, ("", None, None))
        if start is None:
            return None
        self._path_read = f"{folder}{os.sep}{file_name(start)}"
        if stored is None:
            stored = self._files.read_used(self._path_read, _LARGEST)
        return None if stored is None else (stored, start // ENTRY_SIZE)

    def keep_unopened(self, name: QueueName, state: QueueState, first: int, entries: Sequence[bytes]) -> None:
        """Leave the queue unopened that was read last, and write its last entries again if need be.

        They begin at queue offset ``first``: the writer can have died before a flush, or after one that failed.
        """
        folder, start, _ = self._listed.pop(name)
        assert start is not None
        if entries and self.uncovered_from is not None and state.max_physic_offset > self.uncovered_from:
            path = self._path_read
            self._files.overwrite(path, first * ENTRY_SIZE - start, b"".join(entries))
            self._overwritten.append(path)
            self._written.add(folder)
        self._left.add(folder)
        self.states[name] = state

    def rewrite_entries(self, queue: ConsumeQueue, first: int) -> None:
        """Write entries of an opened queue again, as `keep_unopened` does; ``first`` is the first checked one."""
        begin = self.uncovered_from
        if begin is not None and queue.max_physic_offset > begin:
            queue.write_again(first if queue.max_offset - first < COMPARED else offset_at_place(queue, begin))
            self._written |= {queue.folder} if queue.ext is None else {queue.folder, queue.ext.folder}
        queue.unmap_all()

    def flush_overwritten(self) -> None:
        """Flush the files of unopened queues that were written again."""
        for path in self._overwritten:
            self._files.flush(self._files.open(path, writable=True))

    def folders(self, opened: Iterable[ConsumeQueue]) -> set[str]:
        """Return the folders that can have unflushed names, those of ``opened`` queues among them."""
        folders = set(self._left)
        for queue in opened:
            folders |= {queue.folder} if queue.ext is None else {queue.folder, queue.ext.folder}
        folders = set(filter(self._files.is_folder, folders))  # files can have been deleted from it
        for topic in map(os.path.dirname, self._written):
            folders |= {topic, os.path.dirname(topic)}
        return folders


# ---- queues


@dataclass(frozen=True, slots=True)
class Scope:
    """Selection of the records to compare with their queues: those from physical offset ``begin`` on."""

    begin: int
    all_of: frozenset[QueueName] = frozenset()
    """Queues whose records are all selected."""
    since: Mapping[QueueName, int] = field(default_factory=dict)
    """Begin of queues whose earlier records belong to a deleted topic, as physical offsets."""
    absent_before: int = 0
    """Physical offset below which records of queues without a folder are excluded, because the queue was deleted."""
    known_topics: frozenset[str] = frozenset()
    """The broker's topics: records of other topics are excluded if the queue has no folder. Empty: no such rule."""


class QueueChecks(dict[tuple[bytes, int], QueueCheck]):
    """The checks of all queues, by queue id and topic in a record's form."""

    def __init__(
        self,
        log: CommitLog,
        queues: MutableMapping[tuple[str, int], ConsumeQueue],
        open_queue: OpenQueue,
        scope: Scope,
        repair: bool,
        bitmap_of: BitmapOf | None,
        *,
        has_ext: bool = True,
        unclean: UncleanQueues | None = None,
    ) -> None:
        """Check ``queues``; `open_queue` makes missing ones.

        Without ``has_ext`` a queue is checked after its last record, so that each is opened once. ``unclean`` reads
        queues that were not opened, and hears of each check's end.
        """
        super().__init__()
        self.puts_off = not has_ext
        """Whether checks collect entries before they open their queue."""
        self._unclean = unclean
        self._bitmap_of = bitmap_of
        self._log = log
        self._queues = queues
        self._open_queue = open_queue
        self._scope = scope
        self._repair = repair
        self._new_queues: set[QueueName] = set()
        self._by_name: dict[tuple[str, int], QueueCheck] = {}
        self.strays = Strays()
        """Records that may be those of another queue."""
        self.renamed = False
        """Whether the topic of a record was corrected, with which its keys were indexed."""

    def make(self, topic_raw: bytes, queue_id: int, physical_offset: int) -> QueueCheck:
        """Return the check of a queue at its first record.

        Raises:
            CorruptionError: There can be no such queue.
        """
        topic = java_decode(topic_raw)
        check = self._by_name.get((topic, queue_id))  # different malformed topics can be decoded alike
        if check is None:
            try:
                validate_queue(topic, queue_id)
            except MessageIllegalError as error:
                path = self._log.sequence.path_at(physical_offset)
                raise CorruptionError(path, physical_offset, "record", f"its queue is impossible: {error}") from None
            check = self._new_check((topic, queue_id))
        self[topic_raw, queue_id] = check
        return check

    def queue(self, name: QueueName) -> ConsumeQueue:
        """Return the queue of that name, made if there is none."""
        queue = self._queues.get(name)
        if queue is None:
            queue = self._open_queue(*name)
            if self._repair:
                self._queues[name] = queue
                self._new_queues.add(name)
        return queue

    def _new_check(self, name: QueueName) -> QueueCheck:
        scope, absent = self._scope, name not in self._queues
        begin = since = self._log.begin if name in scope.all_of else scope.begin
        if name not in scope.all_of:
            since = scope.since.get(name, scope.absent_before if absent else begin)
            if absent and scope.known_topics and name[0] not in scope.known_topics:
                since = self._log.end
        is_complete = begin <= self._log.begin
        check = QueueCheck(self, self._log, name, max(begin, since), is_complete, self._repair, self._bitmap_of)
        self._by_name[name] = check
        if not self.puts_off:
            check.open_queue()
        return check

    def open_all(self) -> None:
        """Check every queue now, because a record outside of one count can belong to any other."""
        self.puts_off = False
        for check in sorted(self._by_name.values(), key=lambda check: len(check.entries)):
            check.open_queue()  # a single record first, because it can belong to another queue

    def finish_queues(self) -> Iterator[QueueCheck]:
        """Finish the checks of all queues after the last record, also of queues without records."""
        for name in list(self._queues):
            if name not in self._by_name:
                self._new_check(name)
        remaining = []
        for check in self._by_name.values():
            if self._agrees_unopened(check):
                yield check
            elif check.is_plain():
                self._finish_check(check)
                yield check
            else:
                remaining.append(check)
        if remaining:
            self.open_all()
        # Checks that wait for another record come last, because their record can belong to another queue.
        for check in sorted(remaining, key=lambda check: check.waits):
            self._finish_check(check)
            yield check

    def _agrees_unopened(self, check: QueueCheck) -> bool:
        """Return whether a queue need not be opened, because its bytes are what the records say."""
        if self._unclean is None or check.is_queue_open:
            return False
        stored = self._unclean.read_stored(check.name)
        state = None if stored is None else check.state_of(*stored)
        if state is not None:
            self._unclean.keep_unopened(check.name, state, check.first, check.entries)
        return state is not None

    def _finish_check(self, check: QueueCheck) -> None:
        check.finish_queue()
        if self._unclean is not None:
            self._unclean.rewrite_entries(check.queue, check.first)

    def remove_empty(self) -> None:
        """Remove queues without a record of their own."""
        for name in self._new_queues:
            if self._queues[name].max_offset == 0:
                del self._queues[name]


# ---- key index

# An index cannot be repaired in its middle, because its chains go through the whole file. Missing keys at the end are
# added; for any other difference the index is rebuilt.

_BLOCK: Final = 65_536
_CHUNK: Final = 1 << 20
_MOST_BETWEEN: Final = 10_000  # records without keys between two files


class _Run(NamedTuple):
    """The adjacent entries of the index for one record."""

    physical_offset: int
    hashes: list[int]
    seconds: list[int]
    file: IndexFile
    number: int
    before: IndexHeader | None
    """The header of the file before."""


def _runs(index: KeyIndex, begin: int, begin_file: IndexFile | None = None, begin_number: int = 1) -> Iterator[_Run]:
    """Yield the entries of records from ``begin`` on, record by record; those of one record can be in two files.

    ``begin_file`` and ``begin_number`` are the entry to begin with, by default the first one.
    """
    run: _Run | None = None
    for before, file in itertools.pairwise((None, *index.files)):
        assert file is not None
        header = None if before is None else before.header
        if file.header.end_physical_offset < begin or (begin_file is not None and file is not begin_file):
            continue
        number = file.first_from(begin) if begin_file is None else begin_number
        begin_file = None
        for first in range(number, file.header.index_count, COMPARED):
            block = file.entries(first, first + COMPARED)
            rows = zip(block["hash"].tolist(), block["physical"].tolist(), block["time_diff"].tolist(), strict=True)
            for number, (value, physical_offset, seconds) in enumerate(rows, first):
                if physical_offset < begin:
                    continue
                if run is None or run.physical_offset != physical_offset or run.file is not file:
                    if run is not None:
                        yield run
                    run = _Run(physical_offset, [], [], file, number, header)
                run.hashes.append(value)
                run.seconds.append(seconds)
    if run is not None:
        yield run


def missing_keys(index: KeyIndex, log: CommitLog, levels: DelayLevels) -> tuple[int, int] | None:
    """Return begin and end of the first part of the log between index files that has keys, None if there is none.

    The recovery of RocketMQ 4.9 can leave one: it deletes index files that the checkpoint does not cover, and indexes
    the log from a later place on. The call reads few records. A gap inside of a file it does not find.
    """
    derive = Derivation(levels).derive
    begin, indexed = log.begin, -1
    for file in index.files:
        header = file.header
        if header.index_count <= 1:
            continue
        records = log.scan(begin, min(header.begin_physical_offset, log.end), check_body=False)
        with suppress(CorruptionError):  # `verify` reports it
            for place, size, raw in itertools.islice(records, _MOST_BETWEEN):
                if raw is not None and place != indexed and any(derive(place, size, raw)[-2:]):
                    return place, header.begin_physical_offset
        indexed = header.end_physical_offset
        begin = max(begin, indexed)
    return None


class IndexCheck:
    """Comparison of the key index with the keys of the records, in the order of the log."""

    def __init__(self, index: KeyIndex, begin: int, log: CommitLog, is_complete: bool, repair: bool) -> None:
        self._log = log
        self.damages: list[Damage] = []
        self._index = index
        self._repair = repair
        self._begin = begin
        self._runs = _runs(index, begin)
        self._run = next(self._runs, None)
        self._following: tuple[IndexFile, int] | None = (
            None  # file and number of the next entry, after which run is old
        )
        self.records: list[RawPending] = []
        """The next records; call `compare_keys` when there are `COMPARED`."""
        self._missing: list[KeyBlock] = []
        self._lacking = 0
        self._at_end = False  # the index ends before the next record
        self._end = index.end_physical_offset
        self._none = all(file.header.index_count <= 1 for file in index.files)
        self.sound = not (self._none and self._end > begin)  # files show whether others existed before them
        """Whether the index can be completed; otherwise it must be rebuilt."""
        self._checked = index.files if is_complete else []  # rebuilt parts need no check
        for file in self._checked[:-1]:
            if not file.full:
                self.sound = False
                what = f"header: {file.header.index_count} of {file.max_entries}, and another file follows"
                self.damages.append(Damage(file.path, 36, "index", what))

        for before, file in itertools.pairwise(index.files):
            if file.header.index_count <= 1 and file.header != before.header.follower:
                self.sound = False  # it was torn when the first entry was added
                self.damages.append(Damage(file.path, 0, "index", "header: expected that of an empty file"))

    def compare_keys(self) -> None:
        """Compare the keys of the next records with the next entries."""
        records, self.records = self.records, []
        if not records or self._take(key_block(records)):
            return
        self._find_run()
        for number, record in enumerate(records):
            if self._at_end:
                self._add_missing(key_block(records[number:]))
                break
            self._compare_record(record)

    def pass_keys(self, keys: KeyBlock) -> bool:
        """Take the keys of the next records; return False, with no effect, if some entries are there and not theirs."""
        self.compare_keys()
        return self._take(keys)

    def _take(self, keys: KeyBlock) -> bool:
        if self._at_end or self._ends_before(int(keys.physical_offsets[0])):
            self._at_end = True
            self._add_missing(keys)
            return True
        return self._are_next(keys)

    def _ends_before(self, physical_offset: int) -> bool:
        return self._run is None and self._following is None and (physical_offset > self._end or self._none)

    def _find_run(self) -> None:
        if self._following is not None:
            self._runs = _runs(self._index, self._begin, *self._following)
            self._run, self._following = next(self._runs, None), None

    def _are_next(self, keys: KeyBlock) -> bool:
        """Return whether the next entries are those of all these records; then continue behind them.

        The first and the last entry of a file are left to `_compare_record`, which compares the header with them too.
        """
        if self._following is None and self._run is not None:
            self._following = self._run.file, self._run.number
        if not len(keys.key_hashes) and self._following is None:
            return not self._repair
        if self._following is None or self._following[1] == 1:
            return False
        file, begin = self._following
        header, end = file.header, begin + len(keys.key_hashes)
        if begin == end:
            return bool(file.entries(begin, begin + 1)["physical"] > keys.physical_offsets[-1])
        if end >= header.index_count:
            return False
        entries = file.entries(begin, end + 1)
        following, entries = entries[-1], entries[:-1]
        seconds = all_entry_seconds(keys.timestamps, header.begin_timestamp_ms)
        if not (
            following["physical"] > keys.physical_offsets[-1]
            and np.array_equal(entries["hash"], keys.key_hashes)
            and np.array_equal(entries["physical"], keys.physical_offsets[keys.record_of_key])
            and np.array_equal(entries["time_diff"], seconds[keys.record_of_key])
        ):
            return False
        self._following = file, end
        file.release_pages(begin, end)
        return True

    def _compare_record(self, record: RawPending) -> None:
        physical_offset, store_timestamp_ms, prefix_hash, raw_unique_key, raw_keys = record
        run = self._run
        if run is None:
            if self._ends_before(physical_offset):
                self._at_end = True
                self._add_missing(key_block([record]))
            return
        unique_key = None if raw_unique_key is None else java_decode(raw_unique_key)
        keys = None if raw_keys is None else java_decode(raw_keys)
        while run is not None and run.physical_offset < physical_offset:
            self._damaged(run, f"points to {run.physical_offset}, where there is no record with keys")
            run = self._run = next(self._runs, None)
        expected = key_hashes(prefix_hash, unique_key, keys)
        stored_hashes: list[int] = []
        last = run
        while run is not None and run.physical_offset == physical_offset:
            stored_hashes += run.hashes
            self._check_times(run, store_timestamp_ms)
            last = run
            run = self._run = next(self._runs, None)
        if stored_hashes == expected or last is None:
            return
        if set(stored_hashes) == set(expected) and not Counter(expected) - Counter(stored_hashes):
            return  # 4.9 indexes a record again after an unclean exit
        if stored_hashes and self._is_illegible(physical_offset):
            return
        if run is not None or not stored_hashes or stored_hashes != expected[: len(stored_hashes)]:
            self._damaged(last, f"keys of {physical_offset}: expected hashes {expected}, found {stored_hashes}")
        else:  # a crash came between the keys of the last indexed record
            texts = [*([unique_key] if unique_key else []), *split_keys(keys)][len(stored_hashes) :]
            keys_left = " ".join(texts).encode()
            self._add_missing(key_block([(physical_offset, store_timestamp_ms, prefix_hash, None, keys_left)]))

    def _is_illegible(self, physical_offset: int) -> bool:
        raw = self._log.read(physical_offset)
        return raw is not None and is_illegible(StoredMessage(raw))

    def _check_times(self, run: _Run, store_timestamp_ms: int) -> None:
        header, place = run.file.header, run.physical_offset
        seconds = entry_seconds(store_timestamp_ms, header.begin_timestamp_ms)
        times = [seconds] * len(run.seconds)
        if run.number == 1:  # it counts from the end of the file before it, which can be deleted
            before = run.before
            times[0] = run.seconds[0] if before is None else entry_seconds(store_timestamp_ms, before.end_timestamp_ms)
        if run.seconds != times:
            self._damaged(run, f"times of {place}: expected {seconds} s, found {run.seconds}")
        first, last = run.number == 1, run.number + len(run.hashes) == header.index_count
        if (first and header.begin_timestamp_ms != store_timestamp_ms) or (
            last and header.end_timestamp_ms != store_timestamp_ms
        ):
            span = f"{header.begin_timestamp_ms} to {header.end_timestamp_ms}"
            self._damaged(run, f"header: times {span}, the record at {place} was stored at {store_timestamp_ms}")

    def _add_missing(self, keys: KeyBlock) -> None:
        """Count records whose keys are missing, and keep a few of them until all entries were compared."""
        self._lacking += int(np.count_nonzero(np.diff(keys.record_of_key, prepend=-1)))
        self._missing.append(keys)
        if sum(len(block.physical_offsets) for block in self._missing) >= COMPARED:
            self._write_missing()

    def _write_missing(self) -> None:
        """Write missing keys if that completes the index."""
        if self._repair and self.sound:
            for keys in self._missing:
                self._index.append_block(*keys)
        self._missing.clear()

    def _damaged(self, run: _Run, what: str) -> None:
        self.sound = False
        if not self.damages or self.damages[-1].file != run.file.path:  # one for each file is enough
            position = run.file.entry_position(run.number)
            kind = "ahead" if run.physical_offset >= self._log.end else "entry"
            self.damages.append(Damage(run.file.path, position, kind, what, 20 * len(run.hashes)))

    def finish_index(self) -> None:
        """Finish after the last record."""
        self.compare_keys()
        self._find_run()
        while self._run is not None:
            self._damaged(self._run, f"points to {self._run.physical_offset}, where there is no record")
            self._run = next(self._runs, None)
        for file in self._checked:
            flaw = find_flaw(file)
            file.release_mapping()
            if flaw is not None:
                self.sound = False
                position, what = flaw
                self.damages.append(Damage(file.path, position, "index", what))
        files = self._index.files
        self._write_missing()
        if self._lacking:
            place = files[-1].path if files else self._index.folder
            self.damages.append(Damage(place, 0, "missing", f"lacks keys of the log's last {self._lacking} records"))


def find_flaw(file: IndexFile) -> tuple[int, str] | None:
    """Compare header, entries and slots, and return position and description of the first contradiction.

    This does not compare the entries with the log.
    """
    header = file.header
    count = header.index_count - 1
    newest = np.zeros(file.max_slots, np.int32)  # number of the newest entry of each slot so far
    before = 0
    if count:
        ends = tuple(int(file.entries(number, number + 1)["physical"][0]) for number in (1, count))
        if ends != (header.begin_physical_offset, header.end_physical_offset):
            return 16, f"header: physical offsets {header[2:4]}, the entries have {ends}"
    for begin in range(1, count + 1, _BLOCK):
        entries = file.entries(begin, begin + _BLOCK)
        places = entries["physical"]
        wrong = np.flatnonzero((entries["hash"] < 0) | (np.diff(places, prepend=before) < 0))
        if len(wrong):
            number = begin + int(wrong[0])
            return file.entry_position(number), f"entry {number}: hash or physical offset out of order"
        before = int(places[-1])
        numbers = np.arange(begin, begin + len(entries), dtype=np.int32)
        slots = entries["hash"] % file.max_slots
        previous = newest[slots]
        order = np.argsort(slots, kind="stable")
        again = np.flatnonzero(np.diff(slots[order]) == 0)
        previous[order[again + 1]] = numbers[order[again]]
        wrong = np.flatnonzero(previous != entries["previous"])
        if len(wrong):
            number = begin + int(wrong[0])
            actual, expected = int(entries["previous"][wrong[0]]), int(previous[wrong[0]])
            return file.entry_position(number) + 16, f"entry {number}: previous is {actual}, expected {expected}"
        newest[slots[order]] = numbers[order]  # the last entry of a slot counts
        file.release_pages(begin, begin + _BLOCK)
    table = file.slots()
    in_table = np.zeros_like(newest)
    in_table[table["slot"]] = table["number"]
    wrong = np.flatnonzero(in_table != newest)
    if len(wrong):
        slot = int(wrong[0])
        return HEADER_SIZE + SLOT_SIZE * slot, f"slot {slot} does not lead to the newest entry of its hash"
    if header.slot_count != len(table):
        return 32, f"header: {header.slot_count} slots are in use, found {len(table)}"
    for begin, end in ((0, 1), (count + 1, file.max_entries)):
        position = _first_byte(file, file.entry_position(begin), file.entry_position(end))
        if position is not None:
            return position, "expected zeros where no entry is"
    return None


def _first_byte(file: IndexFile, begin: int, end: int) -> int | None:
    end = file.used_end(begin, end)
    for at in range(begin, end, _CHUNK):
        block = file.file.buffer[at : min(end, at + _CHUNK)]
        used = block.lstrip(b"\0")
        if used:
            return at + len(block) - len(used)
    return None


def rebuild_index(log: CommitLog, index: KeyIndex, levels: DelayLevels) -> None:
    """Rebuild the whole key index."""
    for file in index.files:
        index.delete(file.name)
    derive = Derivation(levels).derive
    records: list[RawPending] = []

    def write(block: DerivedBlock | None) -> bool:
        if records:
            index.append_block(*key_block(records))
            records.clear()
        if block is not None:
            index.append_block(*block.keys)
        return True

    for place, size, raw in _unpassed(log, log.begin, log.end, write):
        if raw is None:
            continue
        _, _, _, topic, _, _, _, stored, _, unique, key = derive(place, size, raw)
        records.append((place, stored, topic_hash(topic), unique, key))
        if len(records) >= _BLOCK:
            write(None)
    write(None)


_pack_entry = ENTRY.pack
_LEAST_APART: Final = 256 if CORE.derive is None else 1
_MOST_APART: Final = 1 << 16
_WORTH_BLOCK: Final = 64
"""Number of records from which a block takes less time than a loop over them."""
_LARGEST_PLACE: Final = 1 << 63


def _unpassed(
    log: CommitLog, begin: int, end: int, passes: Callable[[DerivedBlock], bool], *, check_body: bool = False
) -> Iterator[LogItem]:
    """Yield the items of the log that are in no block that ``passes``."""
    at, most_apart = begin, _LEAST_APART
    while at < end:
        block = derived_block(log, at, end, COMPARED, check_body=check_body)
        block_end = at if block is None else block.end
        if block is not None and passes(block):
            log.release_read_pages(at, block_end)
            at = block_end
            if len(block.keys.physical_offsets) >= _WORTH_BLOCK:
                most_apart = _LEAST_APART
                continue
        before = at
        for number, (place, size, raw) in enumerate(log.scan(at, end, check_body=check_body), 1):
            yield place, size, raw
            at = place + size
            if number >= most_apart and at >= block_end:
                break
        if at == before:
            return
        most_apart = min(2 * most_apart, _MOST_APART)  # the blocks that follow can be like it


# ---- queues without a file

# A file of a queue that is missing in the middle is refused. One that is missing at an end leaves a queue that looks
# whole. Only then is the log searched for more of its records.


def lacking_queues(
    path: str,
    files: Files,
    log: CommitLog,
    queues: Mapping[QueueName, ConsumeQueue],
    levels: DelayLevels,
    until: int,
    has_begin_and_end: Callable[[QueueName], bool] = lambda _: False,
) -> frozenset[QueueName]:
    """Return the queues that lack a file with entries of records before physical offset ``until``.

    A queue can lack its only file, its first ones or its last ones. Retention deletes first files, and a broker deletes
    the folder of a queue with its topic, or when all its messages were deleted. So a queue without a folder counts only
    if a group has progress in it, and if another queue of the topic has an older entry.
    """
    spans = {name: _unknown_spans(queues[name], log, until) for name in queues if not has_begin_and_end(name)}
    with suppress(CorruptionError):  # a damaged table, which is reported where it is read
        tables = BrokerTables.open(os.path.join(path, directory.CONFIG), files=files)
        topics = {topic for topic, _ in queues}
        for (_, topic), offsets in tables.progress().items():
            absent = {(topic, queue_id) for queue_id, at in offsets.items() if at > 0} - queues.keys()
            if absent and topic in topics:
                first = _first_place([queues[name] for name in queues if name[0] == topic])
                spans.update({name: [(first, until)] for name in absent})
    searched = {(topic.encode(), queue_id): spans for (topic, queue_id), spans in spans.items() if spans}
    return frozenset((topic.decode(), queue_id) for topic, queue_id in _queues_with_records(log, searched, levels))


def _unknown_spans(queue: ConsumeQueue, log: CommitLog, until: int) -> list[tuple[int, int]]:
    """Return the spans of the log about which the files of a queue say nothing."""
    begin, end = queue.stored_begin, queue.max_offset
    if begin >= end:
        return [(log.begin, until)]
    spans = []
    if begin and queue.min_offset == begin:  # no entry is of a deleted message
        place, size, _ = ENTRY.unpack(queue.read(begin, 1))
        if place > log.begin and size != HOLE_SIZE:
            spans.append((log.begin, place))
    if not end * ENTRY_SIZE % queue.file_size and queue.max_physic_offset < until:
        spans.append((queue.max_physic_offset, until))
    return spans


def _first_place(queues: Iterable[ConsumeQueue]) -> int:
    """Return the place of the first message of several queues, of which holes know nothing."""
    firsts = [queue.entry(queue.min_offset) for queue in queues if queue.min_offset < queue.max_offset]
    return min((entry.physical_offset for entry in firsts if entry is not None), default=_LARGEST_PLACE)


def _queues_with_records(
    log: CommitLog, spans: Mapping[tuple[bytes, int], Sequence[tuple[int, int]]], levels: DelayLevels
) -> set[tuple[bytes, int]]:
    """Return the queues that have a record in one of their spans of the log."""
    with_records = set[tuple[bytes, int]]()
    begin = min((begin for places in spans.values() for begin, _ in places), default=0)
    end = max((end for places in spans.values() for _, end in places), default=0)
    has_light = any(topic.startswith(LIGHT_PREFIX.encode()) for topic, _ in spans)

    def passes(block: DerivedBlock) -> bool:
        return not has_light and all((topic, queue_id) not in spans for topic, queue_id, _, _ in block.queues)

    derive = Derivation(levels).derive
    with suppress(CorruptionError):  # other damage, which is found where it is read
        for place, size, raw in _unpassed(log, max(begin, log.begin), end, passes):
            if raw is None:
                continue
            _, _, _, topic, queue_id, _, code, _, properties, _, _ = derive(place, size, raw)
            names = {(topic, queue_id)} if code is not None else set()
            if has_light and MULTI_DISPATCH in properties:
                names |= {(name.encode(), light) for name, light, _ in light_queues(topic, queue_id, properties)}
            for name in names & spans.keys():
                if any(first <= place < last for first, last in spans[name]):
                    with_records.add(name)
            if len(with_records) == len(spans):
                break
    return with_records


@dataclass(slots=True, kw_only=True)
class Reconciliation:
    """Comparison of queues and index with the records of a log. With ``repair`` differences are rewritten."""

    log: CommitLog
    queues: MutableMapping[QueueName, ConsumeQueue]
    open_queue: OpenQueue
    """Makes a missing queue."""
    index: KeyIndex | None
    """None leaves the index out."""
    levels: DelayLevels
    repair: bool
    has_ext: bool = True
    bitmap_of: BitmapOf | None = None
    """Computes the bitmaps of rebuilt extension units."""
    before_rebuild: Callable[[], None] | None = None
    """Called before the index is rebuilt."""
    unclean: UncleanQueues | None = None
    bodies_from: int | None = None
    """From here on, bodies are compared with their checksums."""
    left_out: dict[QueueName, int] = field(default_factory=dict)
    """How many records of each queue the scope excluded."""

    def run(self, begin: int, scope: Scope | None = None) -> Iterator[Damage]:
        """Walk over the log from ``begin`` on, and yield the differences; ``scope`` excludes records for the queues.

        Raises:
            GapError: A queue lacks entries from before ``begin``, and cannot be repaired from there.
            CorruptionError: A record is unreadable or has an impossible queue.
            NotAStoreError: With ``repair``, a record is a batch of messages.
        """
        log, repair = self.log, self.repair
        begin = max(begin, log.begin)
        checks = QueueChecks(
            log, self.queues, self.open_queue, scope or Scope(begin), repair, self.bitmap_of,
            has_ext=self.has_ext, unclean=self.unclean,
        )  # fmt: skip
        keys = None if self.index is None else IndexCheck(self.index, begin, log, begin <= log.begin, repair)
        batches: dict[int, Damage] = {}  # by place, because a record with a damaged flag is derived twice
        derive = Derivation(self.levels, lambda place, batch: batches.update({place: self._batch(place, batch)})).derive
        has_light = any(topic.startswith(LIGHT_PREFIX) for topic, _ in self.queues)
        takes_blocks = not self.has_ext and not has_light
        scan = partial(_unpassed, log, passes=partial(_pass_block, checks, keys)) if takes_blocks else log.scan
        unchecked_end = log.end if self.bodies_from is None else max(begin, self.bodies_from)
        items = chain(scan(begin, unchecked_end, check_body=False), scan(unchecked_end, log.end, check_body=True))
        for place, item_size, raw in items:
            if raw is None:
                continue
            (
                physical_offset,
                size,
                address,
                topic,
                queue_id,
                queue_offset,
                code,
                stored,
                properties,
                unique,
                key,
            ) = derive(place, item_size, raw)
            check = checks.get((topic, queue_id)) or checks.make(topic, queue_id, physical_offset)
            if address != physical_offset:
                yield misaddressed(
                    log, physical_offset, record_format.PHYSICAL_OFFSET_AT, address, physical_offset, repair
                )
            if code is None and check.points_at(
                queue_offset, ExpectedEntry(_pack_entry(physical_offset, size, 0), stored, properties)
            ):
                raw, damage = self._correct_flag(place, raw)
                yield damage
                code, _, _, unique, key = derive(place, item_size, raw)[6:]
            if code is not None:
                entry = _pack_entry(physical_offset, size, code)
                if queue_offset == check.expected:  # as nearly always
                    check.expected = queue_offset + 1
                    entries = check.entries
                    entries.append(entry)
                    if len(entries) >= COMPARED:
                        check.take_over()
                else:
                    check.offer_entry(queue_offset, ExpectedEntry(entry, stored, properties))
                if has_light and MULTI_DISPATCH in properties:
                    for name, light_id, light_offset in light_queues(topic, queue_id, properties):
                        light = checks.make(name.encode(), light_id, physical_offset)
                        light.offer_light(light_offset, ExpectedEntry(entry, stored, properties))
            if keys is not None:
                records = keys.records
                records.append((physical_offset, stored, check.prefix_hash, unique, key))
                if len(records) >= COMPARED:
                    keys.compare_keys()
        yield from batches.values()
        yield from self._finish(checks, keys)

    def _correct_flag(self, place: int, raw: bytes) -> tuple[bytes, Damage]:
        """Return a prepared or rollback record as its queue's entry proves it to be, and the damage of its flag.

        No broker dispatches such a record. One flipped bit turns a dispatched type into one of these two, so clearing
        it restores the flag.
        """
        at, flag = record_format.SYS_FLAG_AT, StoredMessage(raw).sys_flag
        expected = flag & ~record_format.TRANSACTION_PREPARED
        field = expected.to_bytes(4, "big", signed=True)
        if self.repair:
            self.log.patch(place + at, field)
        what = f"system flag: expected {expected}, found {flag}, of a record that has a queue entry"
        damage = Damage(self.log.sequence.path_at(place), place, "record", what, len(field))
        return raw[:at] + field + raw[at + len(field) :], damage

    def _batch(self, place: int, batch: StoredMessage) -> Damage:
        path, number = self.log.sequence.path_at(place), batch.properties[PROPERTY_INNER_NUM]
        what = f"a batch of {number} messages of RocketMQ 5, which the files of queues show as one"
        if self.repair:
            raise NotAStoreError(
                f"{path}: at {place}: {what}: librmq reads such a store, and never writes to it. Copy its messages "
                "with `librmq extract`"
            )
        return Damage(path, place, "batch", what, batch.size)

    def _finish(self, checks: QueueChecks, keys: IndexCheck | None) -> Iterator[Damage]:
        for check in checks.finish_queues():
            if check.left_out:
                self.left_out[check.name] = check.left_out
            yield from check.damages
        checks.remove_empty()
        if self.index is None or keys is None:
            return
        keys.finish_index()
        yield from keys.damages
        if self.repair and (checks.renamed or not keys.sound):
            if self.before_rebuild is not None:
                self.before_rebuild()
            rebuild_index(self.log, self.index, self.levels)


def _pass_block(checks: QueueChecks, keys: IndexCheck | None, block: DerivedBlock) -> bool:
    """Take all records of a block together, if they continue their queues and the index."""
    continued = []
    for topic, queue_id, queue_offset, entries in block.queues:
        first = ENTRY.unpack_from(entries)[0]
        check = checks.get((topic, queue_id)) or checks.make(topic, queue_id, first)
        if check.expected != queue_offset and not check.claim(queue_offset, first):
            return False
        continued.append((check, entries))
    if keys is not None and not keys.pass_keys(block.keys):
        return False
    for check, entries in continued:
        check.take_entries(entries)
    return True
