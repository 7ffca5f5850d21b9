"""Verification of a store, without changing a byte.

It finds unreadable records and bodies that do not match their checksum, bytes after the log's end, queues and index
that lack records, are ahead of the log or contradict it, files of a wrong length, folders that belong to no queue, and
a checkpoint later than the last record. It cannot find changes in a record's flag, times, hosts, reconsume times and
prepared offset. Only bodies have a checksum; topic, queue, offsets, tags and keys are checked by the entries that point
at the record.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from librmq.commitlog import CommitLog
from librmq.config import StoreConfig
from librmq.consumequeue import ConsumeQueue
from librmq.errors import CorruptionError, RecordError
from librmq.files.disk import DiskFiles
from librmq.files.interface import Damage, Files
from librmq.files.memory import MemoryFiles
from librmq.files.rolling import MappingPool
from librmq.message.batch import inner_messages, is_batch
from librmq.message.delays import DelayLevels
from librmq.message.message import StoredMessage
from librmq.store.engine.dispatch import MULTI_DISPATCH, light_queues
from librmq.store.engine.read import recreated_queues
from librmq.store.engine.store_parts import PartFiles, QueueName
from librmq.store.format import directory
from librmq.store.format.broker_tables import BrokerTables, compaction_note, is_compacted
from librmq.store.format.checkpoint import Checkpoint, has_abort
from librmq.store.format.keyindex import KeyIndex
from librmq.store.recovery.check import Reconciliation, Scope
from librmq.store.recovery.rocksdb_check import compare_queues
from librmq.store.recovery.state import judge_begin, read_closed_state

_T = TypeVar("_T")

_PASSES: Final = 4  # for a store with a running writer

UNKNOWABLE = (
    "only bodies have a checksum: changes in the flag, times, hosts, reconsume times and prepared offset of records "
    "can't be found"
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a verification has found."""

    damage: tuple[Damage, ...]
    """Defects; any of them makes the store unsound."""
    notes: tuple[str, ...]
    """Remarks for people."""

    @property
    def sound(self) -> bool:
        """Whether nothing is damaged."""
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
    closed = writer is None and not has_abort(files, path)
    kind = directory.recognise(path, files)
    options = {"closed": closed, "written": writer is not None, "log_only": kind.derives_queues}
    check = _StoreCheck(path, config, files, **options)
    damage = check.damage()
    notes = [UNKNOWABLE]
    if kind.derives_queues:
        notes.append(
            f"this is {kind.value}: only its log was checked{', and its queues in RocksDB' * check.has_compared}"
        )
        notes.append(f"records of the log: {check.batches} batches with {check.inner} messages")
        if check.light:
            notes.append(f"records of light queues: {check.light} of {len(check.light_queues)} light queues")
    notes += check.notes
    for (topic, queue_id), count in sorted(check.left_out.items()):
        notes.append(f"queue {queue_id} of topic {topic} was deleted: {count} of its records are still in the log")
    if has_abort(files, path) and writer is None:
        notes.append("there is an abort marker: the store was not closed")
    try:
        tables = BrokerTables.open(os.path.join(path, directory.CONFIG), files=files)
        notes += tables.replaced()
        notes += map(compaction_note, sorted(topic for topic, row in tables.topics.rows.items() if is_compacted(row)))
    except CorruptionError as error:
        has_backup = files.size(error.file if error.file.endswith(".bak") else f"{error.file}.bak")
        effect = "a broker can't open the store" if has_backup else "a broker starts without what the file had"
        what = f"{effect}: {error.what}: restore the file from a copy, or move it away"
        damage.append(Damage(error.file, error.offset, error.kind, what))
    if writer is not None:
        notes.append(f"{writer} is writing: queues and index may be behind the log")
        damage = [item for item in damage if item.kind not in ("missing", "ahead", "tail")]
        for _ in range(_PASSES - 1):
            if damage:  # a second look rules out bytes of a running write
                again = set(_StoreCheck(path, config, files, **{**options, "closed": False}).damage())
                damage = [item for item in damage if item in again]
    return Verdict(tuple(damage), tuple(notes))


class _StoreCheck:
    """One check of a store."""

    def __init__(
        self, path: str, config: StoreConfig, files: Files, *, closed: bool, written: bool, log_only: bool
    ) -> None:
        self.left_out: dict[QueueName, int] = {}
        self.batches = self.inner = self.light = 0
        self.light_queues: set[str] = set()
        self.notes: list[str] = []
        self.has_compared = False
        self._closed, self._written, self._log_only = closed, written, log_only
        self._path = path
        self._config = config
        self._files = files
        self._part_files = PartFiles(path, config, files)
        self._pool = MappingPool(config.mapped_files)
        self._damages: list[Damage] = []
        self._closed_folders: set[str] = set()  # those of queues that can't be opened

    def damage(self) -> list[Damage]:
        log = self._part(lambda: self._part_files.open_log(scan_from=lambda log: log.begin))
        if log is None:
            return self._damages
        end = log.found_end
        if end.damage is not None and log.walk(end.physical_offset).damage is not None:  # no running write
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
        if self._log_only:
            self._batches(log)
            levels = DelayLevels.parse(self._config.message_delay_level)
            damages, self.notes, self.has_compared = compare_queues(self._path, log, levels, self._files)
            self._damages += damages
            return self._damages
        if not self._written:
            self._first_files(log)
        queues = self._queues()
        index = self._part(self._part_files.open_index)
        if queues is not None:
            self._derived(log, queues, index)
        stored = log.store_timestamp_ms(end.last_record) if end.last_record is not None else None
        self._checkpoint(max(stored or 0, 0))
        return self._damages

    def _batches(self, log: CommitLog) -> None:
        """Count batches and records of light queues, and note batches that can't be opened."""
        for place, size, raw in log.scan(check_body=False):
            if raw is None:
                continue
            message = StoredMessage(raw)
            if MULTI_DISPATCH in message.properties_raw:
                topic = message.topic.encode("utf-8", "replace")
                names = list(light_queues(topic, message.queue_id, message.properties_raw))
                self.light += bool(names)
                self.light_queues.update(name for name, _, _ in names)
            if not is_batch(message):
                continue
            try:
                self.inner += len(inner_messages(message))
                self.batches += 1
            except RecordError as error:
                self._damages.append(Damage(log.sequence.path_at(place), place, "record", error.reason, size))

    def _first_files(self, log: CommitLog) -> None:
        """Note that the log has lost its first files, or may have."""
        damage, note = judge_begin(self._path, log, self._files, self._config, was_closed=self._closed)
        if damage is not None:
            self._damages.append(damage)
        elif note:
            self.notes.append(note)

    def _part(self, open_part: Callable[[], _T]) -> _T | None:
        try:
            return open_part()
        except CorruptionError as error:
            self._add_damage(error)
            return None

    def _add_damage(self, error: CorruptionError) -> None:
        self._damages.append(Damage(error.file, error.offset, error.kind, error.what))

    def _queues(self) -> dict[tuple[str, int], ConsumeQueue] | None:
        names = self._part(lambda: directory.list_queues(self._path, self._files))
        if names is None:
            return None
        queues = {}
        for topic, queue_id in names:
            queue = self._part(lambda place=(topic, queue_id): self._open_queue(*place))  # type: ignore[misc]
            if queue is None:  # its damage is reported, and what it lacks follows from that
                self._closed_folders.add(directory.queue_folder(self._path, topic, queue_id))
            queues[topic, queue_id] = queue or ConsumeQueue.open(
                directory.queue_folder(self._path, topic, queue_id),
                self._config.consumequeue_file_size,
                files=MemoryFiles(),
            )
        return queues

    def _open_queue(self, topic: str, queue_id: int) -> ConsumeQueue:
        return self._part_files.open_queue(topic, queue_id, self._pool)

    def _derived(self, log: CommitLog, queues: dict[tuple[str, int], ConsumeQueue], index: KeyIndex | None) -> None:
        levels = DelayLevels.parse(self._config.message_delay_level)
        try:
            scope, begin = self._scope(log, queues), log.begin
            comparison = Reconciliation(
                log=log, queues=queues, open_queue=self._open_queue, index=index, levels=levels, repair=False,
                has_ext=self._config.enable_consumequeue_ext, left_out=self.left_out,
            )  # fmt: skip
            damages = comparison.run(begin, scope)
            self._damages.extend(
                damage for damage in damages if os.path.dirname(damage.file) not in self._closed_folders
            )
        except CorruptionError as error:
            self._add_damage(error)

    def _scope(self, log: CommitLog, queues: dict[QueueName, ConsumeQueue]) -> Scope:
        """Exclude the records of topics that were deleted on a broker."""
        scope = Scope(log.begin, since=recreated_queues(log, queues))
        if not self._closed:
            return scope
        topics = frozenset(directory.known_topics(self._path, self._files))
        closed = read_closed_state(self._path, self._files)
        if closed is not None and closed.agrees_with(log):
            lost = frozenset(closed.queues) - queues.keys()
            return replace(scope, absent_before=closed.log_end, all_of=lost, known_topics=topics)
        dispatched = max((queue.max_physic_offset for queue in queues.values()), default=log.begin)
        return replace(scope, absent_before=dispatched, known_topics=topics)

    def _checkpoint(self, last_timestamp_ms: int) -> None:
        path = os.path.join(self._path, directory.CHECKPOINT)
        checkpoint = self._part(lambda: Checkpoint.open(path, files=self._files))
        if checkpoint is None:
            return
        for place, timestamp_ms in enumerate(checkpoint.times_ms):
            if timestamp_ms > last_timestamp_ms:
                what = f"expected at most {last_timestamp_ms}, the store time of the last record, found {timestamp_ms}"
                self._damages.append(Damage(path, 8 * place, "checkpoint", what, 8))
