"""Verification of a store, without changing a byte.

It finds unreadable records and bodies that do not match their checksum, bytes after the log's end, queues and index
that lack records, are ahead of the log or contradict it, files of a wrong length, folders that belong to no queue, and
a checkpoint later than the last record. It cannot find changes in a record's flag, times, hosts, reconsume times,
prepared offset and user properties. Only bodies have a checksum; topic, queue, offsets, tags and keys are checked by
the entries that point at the record.
"""

from __future__ import annotations

import os
import sys
from array import array
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from librmq.clock import SystemClock
from librmq.commitlog import CommitLog
from librmq.config import StoreConfig
from librmq.consumequeue import ConsumeQueue
from librmq.errors import CorruptionError, MissingExtraError, RecordError, RmqError
from librmq.files import Damage, DiskFiles, Files, MemoryFiles, OverlayFiles, file_size
from librmq.files.rolling import MappingPool
from librmq.java.lang import java_decode
from librmq.message import DelayLevels, StoredMessage
from librmq.message import record as record_format
from librmq.message.message import is_batch
from librmq.message.topics import SystemTopic
from librmq.runtime import lazy_numpy as np
from librmq.runtime.event_log import counted, held_back
from librmq.store.engine.derivation import Derivation, DerivedRecord
from librmq.store.engine.saved_state import read_closed_state
from librmq.store.engine.store_parts import PartFiles, QueueName, QueueTable
from librmq.store.format import directory
from librmq.store.format._checkpoint import Checkpoint
from librmq.store.format._keyindex import KeyIndex
from librmq.store.format.broker_tables import BrokerTables
from librmq.store.format.directory import has_abort, is_database
from librmq.store.format.documents import SETTINGS_FILE, damaged_documents, read_document
from librmq.store.format.group_page import GroupPage
from librmq.store.recovery._entry_check import misaddressed
from librmq.store.recovery._log_comparison import Reconciliation
from librmq.store.recovery._queue_check import GapError
from librmq.store.recovery._scope import Scope, dispatched, recreated
from librmq.store.recovery.missing_files import lacking_queues, missing_first_files
from librmq.store.recovery.open import load, readable_files, without_leftovers

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from librmq.store.format.rocksdb import StoredEntry

_T = TypeVar("_T")

_PASSES: Final = 4  # a running writer changes what is read

UNKNOWABLE = (
    "only bodies have a checksum: changes in the flag, times, hosts, reconsume times, prepared offset and user "
    "properties of records can't be found"
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a verification has found."""

    damage: tuple[Damage, ...]
    """What is lost, or is wrong so that no opening repairs it; any of it makes the store unsound."""
    recoverable: tuple[Damage, ...]
    """What a kill, or a copy of a running store, has left, and the next opening repairs without a loss."""
    notes: tuple[str, ...]
    """Remarks for people about what is odd, and no defect."""

    @property
    def sound(self) -> bool:
        """Whether nothing is damaged; the store can be recoverable."""
        return not self.damage


def verify(path: str | os.PathLike[str], config: StoreConfig | None = None, files: Files | None = None) -> Verdict:
    """Check the whole store in ``path``, without a lock and without changes.

    Without ``config`` the sizes come from the files. While a writer has the store open, queues and index may be behind
    its log.

    Raises:
        NotAStoreError: There is no store.
    """
    path, files = os.fspath(path), files or DiskFiles()
    kind = directory.recognise(path, files)
    if not kind.has_log:
        raise directory.no_store(path)
    holder = files.lock_holder(directory.lock_path(path))
    return verify_parts(path, config or directory.infer_config(path, files), files, holder)


def verify_parts(path: str, config: StoreConfig, files: Files, writer: str | None = None) -> Verdict:
    """Check with these settings; ``writer`` names the process whose log can be ahead, if any.

    Of a store that librmq only reads, only the log is checked, and queues in RocksDB if the extra ``rocksdb`` is there.
    """
    was_killed = writer is None and has_abort(files, path)
    kind, readable, recoverable = directory.recognise(path, files), files, list[Damage]()
    if was_killed and kind.derives_queues:
        with suppress(CorruptionError):
            readable, recoverable = without_leftovers(path, files)
    is_closed = writer is None and not was_killed
    check = _StoreCheck(path, config, readable, kind, closed=is_closed, written=writer is not None)
    damage = check.damage()
    notes = [UNKNOWABLE, *check.notes]
    for (topic, queue_id), count in sorted(check.left_out.items()):
        notes.append(f"queue {queue_id} of topic {topic} was deleted: {count} of its records are still in the log")
    if was_killed:
        notes.append("there is an abort marker: the store was not closed")
    if damage and was_killed:
        if kind.derives_queues:
            damage, behind = _judged_log(path, config, readable, damage)
            recoverable += behind
        else:
            damage, recoverable, note = _judged(path, config, files, kind, damage)
            notes += filter(None, [note])
    tables, damaged_tables = _read_tables(os.path.join(path, directory.CONFIG), files)
    damage += damaged_tables
    for error in (*damaged_documents(path, files), GroupPage.damage(files, path)):
        if error is not None:
            damage.append(Damage.of(error))
    notes += tables.replaced()
    notes += tables.topic_notes()
    if writer is not None:
        notes.append(f"{writer} is writing: queues and index may be behind the log")
        damage = [item for item in damage if item.kind not in ("missing", "ahead", "tail")]
        for _ in range(_PASSES - 1):
            if damage:  # a second look rules out bytes of a running write
                again = set(_StoreCheck(path, config, files, kind, closed=False, written=True).damage())
                damage = [item for item in damage if item in again]
    return Verdict(tuple(damage), tuple(recoverable), tuple(notes))


def _judged(
    path: str, config: StoreConfig, files: Files, kind: directory.StoreKind, damage: list[Damage]
) -> tuple[list[Damage], list[Damage], str]:
    """Divide the damage of a store that was not closed into what stays and what the next opening repairs, with a note.

    The opening is tried in memory, and what it leaves is checked. If it refuses the store, or if something is lost,
    everything stays. What it makes again stays too where no kill explains the damage.
    """
    from librmq.store.recovery._condition import condition_of  # a sound store needs none of it

    overlay = OverlayFiles(files)
    try:
        with held_back():
            parts = load(path, config, overlay, SystemClock())
    except RmqError:
        return damage, [], ""
    end, recovered = parts.log.end, parts.recovered
    # What it has cut is only there in the files as they were.
    before, _ = readable_files(path, files, config.commitlog_file_size)
    with PartFiles(path, config, before).open_log(scan_from=lambda _: end) as log:
        log.end, log.last_write = end, parts.log.last_write
        lost = [item for item in recovered.repairs if item.kind == directory.LOST]
        lost = [item for item in lost if os.path.dirname(item.file) != log.sequence.folder]
        as_found = replace(
            parts,
            log=log,
            checkpoint=Checkpoint.open(os.path.join(path, directory.CHECKPOINT), files=before),
            recovered=replace(recovered, repairs=lost),
        )
        condition = condition_of(path, as_found, config, files, is_written=False)
    parts.close()
    if condition.lost:
        places = {(item.file, item.offset) for item in damage}
        new = [item for item in condition.lost if (item.file, item.offset) not in places]
        return [*damage, *new], [], condition.note
    left = _StoreCheck(path, config, overlay, kind, closed=False, written=False).damage()
    files_left = {item.file for item in (*left, *recovered.repairs)}
    stays = [item for item in damage if item.file in files_left]
    stays += [item for item in left if item.file not in {item.file for item in stays}]
    return stays, [item for item in damage if item.file not in files_left], condition.note


def _judged_log(
    path: str, config: StoreConfig, files: Files, damage: list[Damage]
) -> tuple[list[Damage], list[Damage]]:
    """Do the same for a store that librmq only reads: a broker ends its log like librmq."""
    from librmq.store.recovery._condition import cut_before_records

    with suppress(CorruptionError), PartFiles(path, config, files).open_log() as log:
        if cut_before_records(log, ()) is None:
            folder, end = log.sequence.folder, log.end
            behind = [
                item
                for item in damage
                if os.path.dirname(item.file) == folder and item.offset >= end and item.kind != "ahead"
            ]
            return [item for item in damage if item not in behind], behind
    return damage, []


def _read_tables(folder: str, files: Files) -> tuple[BrokerTables, list[Damage]]:
    """Return the broker's tables, without those that can't be read, and the damage of these."""
    overlay = OverlayFiles(files)
    damage: list[Damage] = []
    while True:
        try:
            return BrokerTables.open(folder, files=overlay), damage
        except CorruptionError as error:
            path = error.file.removesuffix(".bak")
            if not any(file_size(overlay, place) for place in (path, f"{path}.bak")):
                raise
            effect = "can't open the store" if file_size(files, f"{path}.bak") else "starts without what the file had"
            damage.append(Damage(error.file, error.offset, error.kind, f"a broker {effect}: {error.what}"))
            for place in (path, f"{path}.bak"):
                overlay.delete(place)


class _StoreCheck:
    def __init__(
        self, path: str, config: StoreConfig, files: Files, kind: directory.StoreKind, *, closed: bool, written: bool
    ) -> None:
        self.left_out: dict[QueueName, int] = {}
        self.notes: list[str] = []
        self._kind, self._closed, self._written = kind, closed, written
        self._path = path
        self._config = config
        self._levels = DelayLevels.parse(config.message_delay_level)
        self._files = files
        self._part_files = PartFiles(path, config, files)
        self._pool = MappingPool(config.mapped_files)
        self._damages: list[Damage] = []
        self._closed_folders: set[str] = set()  # those of queues that can't be opened

    def damage(self) -> list[Damage]:
        """Return the damage. No file stays open: each mapping has a descriptor, and its owners refer to each other."""
        log = self._part(lambda: self._part_files.open_log(scan_from=lambda log: log.begin))
        if log is not None:
            with log:
                self._check(log)
        self._pool.unmap_all()
        return self._damages

    def _check(self, log: CommitLog) -> None:
        end = log.found_end
        if end.damage is not None and log.walk(end.physical_offset).damage is not None:  # so it is no running write
            if not self._written or not log.unfinished_at(end.physical_offset):
                self._add_damage(end.damage)
        else:
            at = end.physical_offset
            at += log.blank_at(at)  # a copy of another log can end after the blank of a file
            behind = log.data_behind(at)
            if behind:
                place = log.sequence.path_at(at)
                what = f"expected zeros after the last record, found {behind} bytes up to the last nonzero one"
                self._damages.append(Damage(place, at, "tail", what, behind))
        if self._kind.derives_queues:
            folders = [os.path.join(self._path, name) for name in _DATABASES]
            folders = [folder for folder in folders if is_database(folder, self._files)]
            queues_of_log = _QueuesOfLog(log, self._levels, keeps_rows=bool(folders))
            damages, notes, has_compared = _compare_queues(folders, queues_of_log, self._files)
            what = f"this is {self._kind.value}: only its log was checked{', and its queues in RocksDB' * has_compared}"
            self._damages += queues_of_log.damages + damages
            self.notes = [what, *queues_of_log.notes(), *notes]
            place = os.path.join(self._path, directory.CHECKPOINT)
            if self._closed or file_size(self._files, place):  # readers pass over an empty one after a kill
                checkpoint = self._part(lambda: Checkpoint.open(place, files=self._files))
                if checkpoint is not None and end.damage is None and not self._written:
                    self._covered(log, checkpoint)
            return
        if not self._written:
            missing, note = missing_first_files(self._path, log, self._files, self._config, was_closed=self._closed)
            self._damages += [] if missing is None else [missing]
            self.notes += [note] if note else []
        queues = self._queues()
        index = self._part(self._part_files.open_index)
        if queues is not None:
            self._derived(log, queues, index)
            if directory.has_timer(self._path, self._files):
                timers = self._part(lambda: _timer_damage(self._path, self._files, log, queues, is_closed=self._closed))
                if timers is not None:
                    self._add_damage(timers)
        if index is not None:
            index.release()
        stored = log.store_timestamp_ms(end.last_record) if end.last_record is not None else None
        self._checkpoint(max(stored or 0, 0))

    def _covered(self, log: CommitLog, checkpoint: Checkpoint) -> None:
        from librmq.store.recovery._condition import cut_before_covered

        cut, note = cut_before_covered(self._path, log, checkpoint, self._files, was_closed=self._closed)
        self._damages += [] if cut is None else [cut]
        self.notes += [note] if note else []

    def _part(self, open_part: Callable[[], _T]) -> _T | None:
        try:
            return open_part()
        except CorruptionError as error:
            self._add_damage(error)
            return None

    def _add_damage(self, error: CorruptionError) -> None:
        self._damages.append(Damage.of(error))

    def _queues(self) -> QueueTable | None:
        names = self._part(lambda: directory.list_queues(self._path, self._files))
        if names is None:
            return None
        queues = QueueTable(self._open_queue, dict.fromkeys(names))
        for name in names:
            queues[name] = self._open_queue(*name)
        return queues

    def _open_queue(self, topic: str, queue_id: int) -> ConsumeQueue:
        queue = self._part(lambda: self._part_files.open_queue(topic, queue_id, self._pool, reads_small=True))
        if queue is not None:
            return queue
        folder = directory.queue_folder(self._path, topic, queue_id)
        self._closed_folders.add(folder)  # its damage is reported, and what it lacks follows from that
        return ConsumeQueue.open(folder, self._config.consumequeue_file_size, files=MemoryFiles())

    def _derived(self, log: CommitLog, queues: QueueTable, index: KeyIndex | None) -> None:
        comparison = Reconciliation(
            log=log, queues=queues, open_queue=self._open_queue, index=index, levels=self._levels,
            has_ext=self._config.enable_consumequeue_ext, left_out=self.left_out,
        )  # fmt: skip
        scope = self._part(lambda: self._scope(log, queues))
        while scope is not None:
            damages = list[Damage]()
            try:
                damages.extend(comparison.run(log.begin, scope))
            except GapError as gap:  # later records show that its topic was not deleted
                scope = replace(scope, all_of=scope.all_of | {gap.name})
                continue
            except CorruptionError as error:
                damages.append(Damage.of(error))
            self._damages += [
                damage
                for damage in damages
                if self._closed_folders.isdisjoint((damage.file, os.path.dirname(damage.file)))
            ]
            return

    def _scope(self, log: CommitLog, queues: QueueTable) -> Scope:
        """Exclude the records of topics that were deleted on a broker."""
        scope = Scope(log.begin, since=recreated(queues, log))
        if not self._closed:
            return scope
        topics = frozenset(directory.known_topics(self._path, self._files))
        closed = read_closed_state(self._path, self._files)
        if closed is not None and closed.agrees_with(log):
            lost = frozenset(closed.queues) - queues.keys()
            return replace(scope, absent_before=closed.log_end, all_of=lost, known_topics=topics)

        until = dispatched(queues, log)
        lacking = lacking_queues(self._path, self._files, log, queues, self._levels, until)
        lost = lacking - queues.keys()
        return replace(scope, absent_before=until, all_of=lost, known_topics=topics)

    def _checkpoint(self, last_timestamp_ms: int) -> None:
        path = os.path.join(self._path, directory.CHECKPOINT)
        checkpoint = self._part(lambda: Checkpoint.open(path, files=self._files))
        if checkpoint is None:
            return
        for place, timestamp_ms in enumerate(checkpoint.times_ms):
            if timestamp_ms > last_timestamp_ms:
                what = f"expected at most {last_timestamp_ms}, the store time of the last record, found {timestamp_ms}"
                self._damages.append(Damage(path, 8 * place, "checkpoint", what, 8))


# ---- the timer


def _timer_damage(
    path: str, files: Files, log: CommitLog, queues: QueueTable, *, is_closed: bool
) -> CorruptionError | None:
    """Return what is wrong with the files of a timer; None if they agree with the messages that wait.

    The last units of a store that was not closed can lack, and the next opening makes them again.

    Raises:
        CorruptionError: A file has another length.
    """
    from librmq.store.format.timerfiles import TimerCheckpoint, TimerLog, TimerWheel, timer_entries, unit_damage

    named = None
    with suppress(CorruptionError):  # which is found for itself
        document = read_document(os.path.join(path, SETTINGS_FILE), files, {"broker": (dict,)})
        named = document and document["broker"].get("timers")
    named = named if isinstance(named, dict) else {}
    size = named.get("timer_log_file_size") or TimerLog.file_size_in(path, files)
    for wheel in TimerWheel.files_in(path, files):
        if wheel.damage is not None:
            return wheel.damage
    wheel_size = TimerWheel.size_in(path, files)
    expected = 2 * named.get("slots_total", 0) * TimerWheel.SLOT_SIZE
    if wheel_size and expected and wheel_size != expected:
        what = f"expected {expected} bytes, found {wheel_size}"
        return CorruptionError(TimerWheel.path_in(path), min(wheel_size, expected), "size", what)
    checkpoint = TimerCheckpoint.read(path, files)
    if is_closed and checkpoint is None and file_size(files, TimerCheckpoint.path_in(path)) == 0:
        return CorruptionError(TimerCheckpoint.path_in(path), 0, "size", "expected 4096 bytes, found 0")
    queue = queues.get((SystemTopic.TIMER, 0))
    if checkpoint is None or queue is None or not size:
        return None

    def message_of(physical_offset: int, size: int) -> StoredMessage | None:
        raw = log.read(physical_offset, size)
        return None if raw is None else StoredMessage(raw)

    units, end = (
        TimerLog(path, size, files=files, writable=False),
        checkpoint.queue_offset if is_closed else sys.maxsize,
    )
    return unit_damage(
        units, units.end_below(log.end, checkpoint.log_position), checkpoint.read_time_ms,
        timer_entries(queue, end, log.begin), log.begin, message_of, TimerWheel.slots_in(path, files),
        may_lack=not is_closed,
    )  # fmt: skip


# ---- queues in RocksDB

# A broker of 5.x flushes these queues seldom, and adds what is missing at their ends when it starts. It can have begun
# to keep them there after the log's first record. So only a difference between the first and the last entry of a queue
# is damage. Entries of records that retention has deleted stay until RocksDB compacts them.

_DATABASES: Final = (directory.CONSUMEQUEUE_ROCKSDB, directory.CONSUMEQUEUE)
_MOST_DAMAGE: Final = 1_000
_CHECKPOINT_TOPIC: Final = "CHECKPOINT_TOPIC"


class _Count(NamedTuple):
    """The count of a queue's records behind one of them."""

    due: int
    """The next queue offset."""
    outside: tuple[int, int, int] | None = None
    """Place of the record if it does not continue the count, its queue offset, and the one that was due."""
    if_misplaced: int = 0
    """The next queue offset if this record alone has a wrong one."""


class _QueuesOfLog:
    """Place and size of each message of each queue, by the log. Not thread-safe."""

    def __init__(self, log: CommitLog, levels: DelayLevels, *, keeps_rows: bool) -> None:
        """Read the whole log; rows take 24 bytes of memory for each message."""
        self.begin, self.end = log.begin, log.end
        self.damages: list[Damage] = []
        """Batches that can't be opened, and records with a wrong address or queue offset."""
        self._log = log
        self._counts: dict[tuple[bytes, int], _Count] = {}
        self._batches = self._inner = self._light = 0
        self._light_names: set[str] = set()
        self._queues = defaultdict[QueueName, "array[int]"](partial(array, "q"))  # three numbers a message
        derivation = Derivation(levels)
        for place, size, raw in log.scan(check_body=False):
            if raw is None:
                continue
            record, count = derivation.derive(place, size, raw), 1
            light = list(record.light_queues())
            self._light += bool(light)
            self._light_names.update(name for name, _, _ in light)
            if is_batch(message := StoredMessage(raw)):
                from librmq.message.batch import inner_messages  # 5.x alone stores such records

                try:
                    count = len(inner_messages(message))
                except RecordError as error:
                    self.damages.append(Damage(log.sequence.path_at(place), place, "record", error.reason, size))
                    continue
                self._batches, self._inner = self._batches + 1, self._inner + count
            if record.address != place:
                self.damages.append(misaddressed(log, place, record_format.PHYSICAL_OFFSET_AT, record.address, place))
            if record.tags_code is None:
                continue
            self._check_count(record, count)
            if not keeps_rows:
                continue
            queue = self._queues[java_decode(record.topic), record.queue_id]
            for number in range(count):
                queue.extend((record.queue_offset + number, place, size))
            for name, light_id, light_offset in light:
                self._queues[name, light_id].extend((light_offset, place, size))

    def _check_count(self, record: DerivedRecord, messages: int) -> None:
        """Note a record that is outside of its queue's count, which the next one continues; two are a jump."""
        name, first = (record.topic, record.queue_id), record.queue_offset
        before = self._counts.get(name, _Count(first))
        if before.outside is not None and first == before.if_misplaced != before.due:
            place, claimed, expected = before.outside
            self.damages.append(misaddressed(self._log, place, record_format.QUEUE_OFFSET_AT, claimed, expected))
        elif first != before.due:
            outside = record.physical_offset, first, before.due
            self._counts[name] = _Count(first + messages, outside, before.due + messages)
            return
        self._counts[name] = _Count(first + messages)

    def notes(self) -> list[str]:
        notes = [f"records of the log: {self._batches} batches with {self._inner} messages"]
        light = f"records of light queues: {self._light} of {len(self._light_names)} light queues"
        return notes + [light] * bool(self._light)

    def rows(self, name: QueueName) -> NDArray[np.int64]:
        """Return queue offset, place and size of the messages of a queue, in order of the queue offsets."""
        rows = np.array(self._queues.get(name, ()), np.int64).reshape(-1, 3)
        return rows[rows[:, 0].argsort(kind="stable")]  # written again by an earlier crash, or a copied log

    def names(self) -> set[QueueName]:
        return set(self._queues)


def _compare_queues(folders: Sequence[str], queues: _QueuesOfLog, files: Files) -> tuple[list[Damage], list[str], bool]:
    """Return where the queues in RocksDB differ from the log, remarks, and whether they were compared."""
    has_compared = False
    damages: list[Damage] = []
    notes: list[str] = []
    for folder in folders:
        try:
            _compare(folder, queues, files, damages, notes)
            has_compared = True
        except MissingExtraError as error:
            notes.append(f"its queues in RocksDB were not compared with the log: {error}")
        except CorruptionError as error:
            damages.append(Damage.of(error))
    return damages[:_MOST_DAMAGE], notes, has_compared


def _compare(folder: str, queues: _QueuesOfLog, files: Files, damages: list[Damage], notes: list[str]) -> None:
    from librmq.store.format.rocksdb import queue_entries

    count = behind = 0
    remaining = queues.names()
    for name, entries in groupby(queue_entries(folder, files), lambda entry: entry[:2]):
        if name[0] == _CHECKPOINT_TOPIC:
            continue
        remaining.discard(name)
        offsets, places, sizes = queues.rows(name).T.tolist()
        at, is_first = 0, True
        for entry in entries:
            count += 1
            while at < len(offsets) and offsets[at] < entry.queue_offset:
                if not is_first and len(damages) < _MOST_DAMAGE:
                    what = f"{_entry_name(name[0], name[1], offsets[at])}: no entry leads to the record at {places[at]}"
                    damages.append(Damage(folder, offsets[at], "missing", what, sizes[at]))
                at += 1
            records = []
            while at < len(offsets) and offsets[at] == entry.queue_offset:
                records.append((places[at], sizes[at]))
                at += 1
            if len(damages) < _MOST_DAMAGE and (damage := _damage_of(folder, entry, records, queues)) is not None:
                damages.append(damage)
            is_first = False
        behind += len(offsets) - at
    without = {name: len(queues.rows(name)) for name in remaining if name[0] != _CHECKPOINT_TOPIC}
    notes.append(f"queues in RocksDB: {count:,} entries compared with the log")
    if queues_without := sum(map(bool, without.values())):
        # Since 5.5.1 a setting of the broker says which queues it writes to RocksDB too.
        notes.append(
            f"{counted(queues_without, 'queue')} of the log, with {counted(sum(without.values()), 'record')}, have no "
            "entry in RocksDB: with rocksdbCQSelectiveDoubleWriteEnable a broker keeps them in files alone, otherwise "
            "it adds them at its start"
        )
    if behind:
        what = "have no entry in RocksDB yet: the broker adds them at its start"
        notes.append(f"{counted(behind, 'record')} of the log {what}")


def _entry_name(topic: str, queue_id: int, queue_offset: int) -> str:
    return f"{topic}, queue {queue_id}, queue offset {queue_offset}"


def _damage_of(folder: str, entry: StoredEntry, records: list[tuple[int, int]], queues: _QueuesOfLog) -> Damage | None:
    """Return what is wrong with an entry, by place and size of the records at its queue offset."""
    name = _entry_name(*entry[:3])
    if entry.physical_offset < queues.begin or (entry.physical_offset, entry.size) in records:
        return None
    if entry.physical_offset >= queues.end:
        what = f"{name}: the entry leads to {entry.physical_offset}, beyond the log's end at {queues.end}"
        return Damage(folder, entry.queue_offset, "ahead", what, entry.size)
    expected = f"{records[0][1]} bytes at {records[0][0]}" if records else "no such message"
    what = f"{name}: expected {expected} by the log, found {entry.size} bytes at {entry.physical_offset}"
    return Damage(folder, entry.queue_offset, "entry", what, entry.size)
