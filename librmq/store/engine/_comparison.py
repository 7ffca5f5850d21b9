"""Comparison of a writing store's queues with the log in the background, after a kill or an entry that disagreed."""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Final

from librmq.consumequeue import ConsumeQueue
from librmq.errors import CorruptionError
from librmq.message import StoredMessage
from librmq.runtime.event_log import EventLog, counted
from librmq.store.engine._entry_checks import EntryChecks
from librmq.store.engine.derivation import has_queue_entry
from librmq.store.engine.read import read_queue
from librmq.store.engine.store_parts import Parts, QueueName

_log = EventLog("librmq.store")

_READ: Final = 32
_READS: Final = 32
"""Reads of one turn."""
_PAUSE_MS: Final = 20
"""Time between two turns, so that the comparison takes a small part of a processor and of a device."""


class Comparison:
    """The entries that are to be compared. Not thread-safe, except for `add`."""

    def __init__(self, parts: Parts, checks: EntryChecks) -> None:
        self._parts = parts
        self._checks = checks
        self._waiting: dict[QueueName, int] = {}
        """The queues, with the physical offset from which on their entries need no comparison."""
        self._added: deque[QueueName] = deque()
        """Queues that other threads have added."""
        self._queue: ConsumeQueue | None = None
        """The first of them, once it is begun."""
        self._at = 0
        self._unreadable: list[CorruptionError] = []
        self._ends: dict[QueueName, int] = {}
        """Where queues end of which the recovery saw no record: last entries that became zeros leave no trace there."""
        self._searched = parts.recovered.compared_from
        """Where the search of the log for records behind these ends goes on."""

    def add_older(self) -> None:
        """Compare what the recovery did not look at: entries of records before `Recovered.compared_from`."""
        parts = self._parts
        self._waiting.update(dict.fromkeys(parts.queues, parts.recovered.compared_from))
        if not parts.recovered.knows_ends:
            states = parts.queues.states().items()
            idle = {
                name: state for name, state in states if 0 < state.max_physic_offset <= parts.recovered.compared_from
            }
            self._ends = {name: state.max_offset for name, state in idle.items()}
            self._searched = min((state.max_physic_offset for state in idle.values()), default=self._searched)

    def add(self, name: QueueName) -> None:
        """Compare a whole queue."""
        self._added.append(name)

    def run_due(self, now_ms: int) -> int | None:
        """Compare the next entries, and return the time of the next turn, None if nothing is left."""
        for _ in range(_READS):
            while self._added:
                self._waiting[self._added.popleft()] = self._parts.log.end
            name = next(iter(self._waiting), None)
            if name is None:
                return now_ms + _PAUSE_MS if self._search() else None
            if not self._compare(name, self._waiting[name]):
                self._report(name)
                self._queue = None
                del self._waiting[name]
        return now_ms + _PAUSE_MS

    def _compare(self, name: QueueName, end: int) -> bool:
        """Read some messages of a queue, which checks their entries; return whether there are more before ``end``."""
        try:
            queue = self._queue
            if queue is None:
                queue = self._queue = self._open(name)
                self._at = queue.min_offset
            result = read_queue(self._checks, queue, name, self._at, _READ, None)
        except CorruptionError as error:
            self._unreadable.append(error)
            self._at += 1
            return self._queue is not None and self._at < self._queue.max_offset
        before, self._at = self._at, result.next_offset
        is_behind = bool(result.messages) and result.messages[-1].physical_offset >= end
        return before < self._at < queue.max_offset and not is_behind

    def _search(self) -> bool:
        """Search the next records for ones of which their queue lacks the entries; return whether there are more."""
        log, end = self._parts.log, min(self._parts.recovered.compared_from, self._parts.log.end)
        begin = self._searched = max(self._searched, log.begin)
        if not self._ends or begin >= end:
            return False
        try:
            for at, size, raw in islice(log.scan(begin, end, check_body=False), _READS * _READ):
                self._searched = at + size
                if raw is None or not has_queue_entry(StoredMessage(raw).sys_flag):
                    continue
                message = StoredMessage(raw)
                name = message.topic, message.queue_id
                if message.queue_offset >= self._ends.get(name, message.queue_offset + 1):
                    del self._ends[name]
                    _log.error(
                        "%(topic)s/%(queue_id)d lacks the entries of messages that the log has, from "
                        "%(physical_offset)d on; librmq recover makes them again",
                        topic=name[0],
                        queue_id=name[1],
                        physical_offset=at,
                    )
        except CorruptionError as error:
            self._ends = {}
            _log.error("%(error)s: queues can lack entries of the records behind it", error=error)
        return begin < self._searched

    def _open(self, name: QueueName) -> ConsumeQueue:
        """Return a queue; one that is not in use is not kept open, because a store can have many thousands."""
        parts = self._parts
        if parts.queues.is_open(name):
            return parts.queues[name]
        queue = parts.open_queue(*name)
        queue.advance(parts.log.begin)
        return queue

    def _report(self, name: QueueName) -> None:
        if self._unreadable:
            topic, queue_id = name
            _log.error(
                "%(topic)s/%(queue_id)d: %(_messages)s can't be read, the first because of %(error)s",
                topic=topic,
                queue_id=queue_id,
                _messages=counted(len(self._unreadable), "message"),
                error=self._unreadable[0],
            )
            self._unreadable = []
