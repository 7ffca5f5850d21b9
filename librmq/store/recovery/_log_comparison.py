"""Comparison of queues and key index with the log, and their repair.

The log is the truth: each record defines the entry at its queue offset and its keys in the index. `Reconciliation`
walks over the log once. Each record goes to three takers: `FieldCheck` corrects its fields, `QueueChecks` compares its
entries and `IndexCheck` its keys. They rewrite what differs in parts that are open for writing, and only report it of
parts that are read. Small queues that agree with the log, as most do, are compared without a mapping.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Final

from librmq.commitlog import CommitLog
from librmq.consumequeue import ConsumeQueue
from librmq.consumequeue_entries import ENTRY, ENTRY_SIZE, entry_dtype
from librmq.errors import CorruptionError, MessageIllegalError, NotAStoreError
from librmq.files import Damage
from librmq.java.lang import java_decode
from librmq.message import DelayLevels, StoredMessage
from librmq.message import record as record_format
from librmq.message.properties import PropertyName
from librmq.message.topics import TopicPrefix, validate_queue
from librmq.runtime import lazy_numpy as np
from librmq.store.engine.derivation import BitmapOf, Derivation, DerivedBlock, DerivedRecord, walk
from librmq.store.engine.store_parts import OpenQueue, QueueName
from librmq.store.format._keyindex import KeyIndex
from librmq.store.recovery._entry_check import Stray, Strays, misaddressed, wrong_field
from librmq.store.recovery._index_check import IndexCheck, rebuild_index
from librmq.store.recovery._queue_check import GapError, QueueCheck
from librmq.store.recovery._scope import Scope

_pack_entry: Final = ENTRY.pack


class QueueChecks(dict[tuple[bytes, int], QueueCheck]):
    """The checks of all queues, by queue id and topic in a record's form."""

    def __init__(self, comparison: Reconciliation, scope: Scope) -> None:
        super().__init__()
        self.puts_off = not comparison.has_ext
        """Whether checks collect entries before they open their queue, so that each is opened once."""
        self._comparison = comparison
        self._log, self._queues = comparison.log, comparison.queues
        self._scope = scope
        self._new_queues: set[QueueName] = set()
        self._by_name: dict[tuple[str, int], QueueCheck] = {}
        self.strays = Strays(self.open_all)
        """Records that may be those of another queue."""
        self.has_light = any(topic.startswith(TopicPrefix.LIGHT) for topic, _ in self._queues)
        """Whether there are light queues, whose entries are those of records of other queues."""

    def check_of(self, record: DerivedRecord) -> QueueCheck:
        """Return the check of the queue that a record names, made at its first record.

        Raises:
            CorruptionError: There can be no such queue.
        """
        name = record.topic, record.queue_id
        return self.get(name) or self._make(*name, record.physical_offset)

    def take(self, record: DerivedRecord) -> None:
        """Take the next record of the log."""
        code = record.tags_code
        if code is None:
            return
        entry = _pack_entry(record.physical_offset, record.size, code)
        self.check_of(record).take(record.queue_offset, entry, record)
        if self.has_light:
            for name, light_id, light_offset in record.light_queues():
                self._make(name.encode(), light_id, record.physical_offset).take(light_offset, entry, record)

    def take_block(self, block: DerivedBlock, keys: IndexCheck | None) -> bool:
        """Take all records of a block, if they continue their queues and the index; otherwise take none of them."""
        continued = []
        for topic, queue_id, queue_offset, entries in block.queues:
            first = ENTRY.unpack_from(entries)[0]
            check = self.get((topic, queue_id)) or self._make(topic, queue_id, first)
            excluded = 0
            if first < check.begin:  # as in most blocks where one queue alone lacks its files
                places = np.frombuffer(entries, entry_dtype())["physical_offset"]
                excluded = int(np.searchsorted(places, check.begin))
            if excluded:
                if not check.left_out:
                    return False
                entries = entries[excluded * ENTRY_SIZE :]
                first = ENTRY.unpack_from(entries)[0] if entries else -1
            at = queue_offset + excluded
            if entries and at != check.expected and not check.claim(at, first):
                return False
            continued.append((check, excluded, entries))
        if keys is not None and not keys.take_block(block.keys):
            return False
        for check, excluded, entries in continued:
            check.left_out += excluded
            if entries:
                check.take_entries(entries)
        return True

    def _make(self, topic_raw: bytes, queue_id: int, physical_offset: int) -> QueueCheck:
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
            queue = self._queues[name] = self._comparison.open_queue(*name)
            self._new_queues.add(name)
        return queue

    def _new_check(self, name: QueueName) -> QueueCheck:
        scope, absent = self._scope, name not in self._queues
        begin = since = self._log.begin if name in scope.all_of else scope.begin
        if name not in scope.all_of:
            since = scope.since.get(name, scope.absent_before if absent else begin)
            if absent and scope.known_topics and name[0] not in scope.known_topics:
                since = self._log.end
        is_complete = (max(begin, since) if absent else begin) <= self._log.begin
        bitmap_of = self._comparison.bitmap_of
        check = QueueCheck(self.strays, self.queue, self._log, name, max(begin, since), is_complete, bitmap_of)
        self._by_name[name] = check
        if not self.puts_off:
            check.open_queue()
        return check

    def open_all(self) -> None:
        """Check every queue now, because a record outside of one count can belong to any other."""
        self.puts_off = False
        for check in sorted(self._by_name.values(), key=lambda check: len(check.entries)):
            check.open_queue()  # a single record comes first, because it can belong to another queue

    def finish_queues(self) -> Iterator[QueueCheck]:
        """Finish the checks of all queues after the last record, also of queues without records."""
        for name in list(self._queues):
            if name not in self._by_name:
                self._new_check(name)
        remaining = []
        for check in self._by_name.values():
            if check.agrees():
                self._end_check(check)
                yield check
            elif check.is_plain():
                check.finish_queue()
                self._end_check(check)
                yield check
            else:
                remaining.append(check)
        if remaining:
            self.open_all()
        # Checks that wait for another record come last, because their record can belong to another queue.
        for check in sorted(remaining, key=lambda check: check.undecided is not None):
            check.finish_queue()
            self._end_check(check)
            yield check

    def lost_messages(self) -> Iterator[Damage]:
        """Yield the entries whose record names another queue, which has no entry of it: their messages are lost.

        A record with two entries is no loss: a broker leaves entries behind the end of a queue that it has cut, and
        after a second kill it goes on behind them.
        """
        for check in self._by_name.values():
            for message, damage in check.lost:
                check_of_queue = self._by_name.get((message.topic, message.queue_id))
                if check_of_queue is None or not check_of_queue.had_entry_of(message):
                    yield damage

    def _end_check(self, check: QueueCheck) -> None:
        if self._comparison.after_check is not None:
            self._comparison.after_check(check.queue, check.first)
        check.queue.unmap_all()

    def remove_empty(self) -> None:
        """Remove queues without a record of their own."""
        for name in self._new_queues:
            if self._queues[name].max_offset == 0:
                del self._queues[name]


class FieldCheck:
    """Check of the fields that no checksum covers, and their correction in a writable log, record by record."""

    def __init__(self, log: CommitLog, checks: QueueChecks, levels: DelayLevels) -> None:
        self._log = log
        self._checks = checks
        self._derive = Derivation(levels, self._note_batch).derive
        self.damages: list[Damage] = []
        """What was found since the caller last cleared the list."""
        self.batches: dict[int, Damage] = {}
        """Batches by place, because a record with a damaged flag is derived twice."""

    def derive(self, place: int, size: int, raw: bytes) -> DerivedRecord:
        """Return what the record at ``place`` defines, with its fields corrected.

        Raises:
            CorruptionError: It names a queue that can't be.
            NotAStoreError: It is a batch of messages, and the log is writable.
        """
        record = self._derive(place, size, raw)
        check = self._checks.check_of(record)
        if record.address != place:
            at = record_format.PHYSICAL_OFFSET_AT
            self.damages.append(misaddressed(self._log, place, at, record.address, place))
        if record.tags_code is None and check.points_at(record.queue_offset, _pack_entry(place, size, 0)):
            record = self._derive(place, size, self._correct_flag(place, raw))
        return record

    def _correct_flag(self, place: int, raw: bytes) -> bytes:
        """Return a prepared or rollback record as its queue's entry proves it to be.

        No broker dispatches such a record. One flipped bit turns a dispatched type into one of these two, so clearing
        it restores the flag.
        """
        at, flag = record_format.SYS_FLAG_AT, StoredMessage(raw).sys_flag
        expected = flag & ~record_format.TRANSACTION_PREPARED
        field = expected.to_bytes(4, "big", signed=True)
        what = f"system flag: expected {expected}, found {flag}, of a record that has a queue entry"
        self.damages.append(wrong_field(self._log, place, at, field, what))
        return raw[:at] + field + raw[at + len(field) :]

    def _note_batch(self, place: int, batch: StoredMessage) -> None:
        path, number = self._log.sequence.path_at(place), batch.properties[PropertyName.INNER_NUM]
        what = f"a batch of {number} messages of RocketMQ 5, which the files of queues show as one"
        if self._log.sequence.writable:
            raise NotAStoreError(
                f"{path}: at {place}: {what}: librmq reads such a store, and never writes to it. Copy its messages "
                "with `librmq extract`"
            )
        self.batches[place] = Damage(path, place, "batch", what, batch.size)


@dataclass(slots=True, kw_only=True)
class Reconciliation:
    """Comparison of queues and index with the records of a log. Differences are rewritten if the parts are writable."""

    log: CommitLog
    queues: MutableMapping[QueueName, ConsumeQueue]
    open_queue: OpenQueue
    """Makes a missing queue."""
    index: KeyIndex | None
    """None leaves the index out."""
    levels: DelayLevels
    has_ext: bool = True
    bitmap_of: BitmapOf | None = None
    """Computes the bitmaps of rebuilt extension units."""
    before_rebuild: Callable[[], None] | None = None
    """Called before the index is rebuilt."""
    after_check: Callable[[ConsumeQueue, int], object] | None = None
    """Called with each queue that was checked, and its first checked queue offset."""
    is_thorough: bool = True
    """Whether a flag counts as damaged that only the numbers around it speak against. Recovery after a kill leaves such
    a record alone, because a flag that is wrongly corrected hides a message."""
    bodies_from: int | None = None
    """From here on, bodies are compared with their checksums."""
    left_out: dict[QueueName, int] = field(default_factory=dict)
    """How many records of each queue the scope excluded."""

    def run(self, begin: int, scope: Scope | None = None) -> Iterator[Damage]:
        """Walk over the log from ``begin`` on, and yield the differences; ``scope`` excludes records for the queues.

        Raises:
            GapError: A queue lacks entries from before ``begin``, and cannot be repaired from there.
            CorruptionError: A record is unreadable or has an impossible queue.
            NotAStoreError: A record is a batch of messages, and the log is writable.
        """
        log = self.log
        begin = max(begin, log.begin)
        checks = QueueChecks(self, scope or Scope(begin))
        keys = None if self.index is None else IndexCheck(self.index, begin, log, begin <= log.begin)
        fields = FieldCheck(log, checks, self.levels)
        in_blocks = not self.has_ext and not checks.has_light
        bodies_from = log.end if self.bodies_from is None else max(begin, self.bodies_from)
        try:
            for stretch in chain(
                walk(log, begin, bodies_from, in_blocks=in_blocks),
                walk(log, bodies_from, log.end, check_body=True, in_blocks=in_blocks),
            ):
                if stretch.block is not None and checks.take_block(stretch.block, keys):
                    continue
                for item in stretch.records():
                    record = fields.derive(*item)
                    if fields.damages:
                        # An error can end the walk, and what was corrected before it stays corrected.
                        yield from fields.damages
                        fields.damages.clear()
                    checks.take(record)
                    if keys is not None:
                        keys.take(record)
            yield from fields.batches.values()
            yield from self._finish(checks, keys)
        except GapError:
            yield from checks.lost_messages()  # whose entries can be cut by now, so that the next run can't tell
            raise
        finally:
            checks.remove_empty()

    def _undispatched(self, stray: Stray) -> Damage:
        """Return the damaged flag of a record without an entry, whose flag says that it has one; correct it to repair.

        A broker numbers a prepared or rolled-back record 0 and gives it no entry. The first message of a topic that was
        made again is numbered 0 too, but then the next one is number 1, and not the one after those before it.
        """
        place, at = stray.entry.physical_offset, record_format.SYS_FLAG_AT
        flag = int.from_bytes(self.log.data_at(place + at, 4), "big", signed=True)
        expected = flag | record_format.TRANSACTION_PREPARED
        what = f"system flag: expected {expected}, found {flag}, of a record that has no queue entry"
        return wrong_field(self.log, place, at, expected.to_bytes(4, "big", signed=True), what)

    def _finish(self, checks: QueueChecks, keys: IndexCheck | None) -> Iterator[Damage]:
        has_lost = False
        for check in checks.finish_queues():
            if check.left_out:
                self.left_out[check.name] = check.left_out
            yield from check.damages
            has_lost |= bool(check.lost)
        if has_lost:
            yield from checks.lost_messages()
        for stray in checks.strays.passed_first() if self.is_thorough else ():
            yield self._undispatched(stray)
        if self.index is None or keys is None:
            return
        keys.finish_index()
        yield from keys.damages
        if self.index.writable and (checks.strays.renamed or not keys.sound):
            if self.before_rebuild is not None:
                self.before_rebuild()
            rebuild_index(self.log, self.index, self.levels)
