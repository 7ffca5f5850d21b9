"""The checks of all queues against the log, and the order in which queues are opened for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field

from librmq.commitlog import CommitLog
from librmq.consumequeue import ConsumeQueue
from librmq.errors import CorruptionError, MessageIllegalError
from librmq.java.lang import java_decode, string_hash
from librmq.message.topics import validate_queue
from librmq.store.engine.dispatch import BitmapOf
from librmq.store.engine.open_store import OpenQueue, QueueName
from librmq.store.recovery.entry_check import Strays
from librmq.store.recovery.queue_check import QueueCheck
from librmq.store.recovery.unclean_queues import UncleanQueues


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
        self._prefix_hashes: dict[str, int] = {}
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
            check = self._check((topic, queue_id))
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

    def _check(self, name: QueueName) -> QueueCheck:
        scope, absent = self._scope, name not in self._queues
        begin = since = self._log.begin if name in scope.all_of else scope.begin
        if name not in scope.all_of:
            since = scope.since.get(name, scope.absent_before if absent else begin)
            if absent and scope.known_topics and name[0] not in scope.known_topics:
                since = self._log.end
        is_complete = begin <= self._log.begin
        prefix_hash = self._prefix_hashes.get(name[0])
        if prefix_hash is None:
            prefix_hash = self._prefix_hashes[name[0]] = string_hash(name[0] + "#")
        check = QueueCheck(
            self, self._log, name, max(begin, since), is_complete, self._repair, self._bitmap_of, prefix_hash
        )
        self._by_name[name] = check
        if not self.puts_off:
            check.open()
        return check

    def open_all(self) -> None:
        """Check every queue now, because a record outside of one count can belong to any other."""
        self.puts_off = False
        for check in sorted(self._by_name.values(), key=lambda check: len(check.entries)):
            check.open()  # a single record first, because it can belong to another queue

    def finish(self) -> Iterator[QueueCheck]:
        """Finish the checks of all queues after the last record, also of queues without records."""
        for name in list(self._queues):
            if name not in self._by_name:
                self._check(name)
        remaining = []
        for check in self._by_name.values():
            if self._agrees_unopened(check):
                yield check
            elif check.is_plain():
                self._finish(check)
                yield check
            else:
                remaining.append(check)
        if remaining:
            self.open_all()
        # Checks that wait for another record come last, because their record can belong to another queue.
        for check in sorted(remaining, key=lambda check: check.waits):
            self._finish(check)
            yield check

    def _agrees_unopened(self, check: QueueCheck) -> bool:
        """Return whether a queue need not be opened, because its bytes are what the records say."""
        if self._unclean is None or check.is_open:
            return False
        stored = self._unclean.read_stored(check.name)
        state = None if stored is None else check.state_of(*stored)
        if state is not None:
            self._unclean.keep_unopened(check.name, state, check.first, check.entries)
        return state is not None

    def _finish(self, check: QueueCheck) -> None:
        check.finish()
        if self._unclean is not None:
            self._unclean.rewrite_entries(check.queue, check.first)

    def remove_empty(self) -> None:
        """Remove queues without a record of their own."""
        for name in self._new_queues:
            if self._queues[name].max_offset == 0:
                del self._queues[name]
