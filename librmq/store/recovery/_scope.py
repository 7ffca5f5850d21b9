"""Which records of the log are compared with their queues."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from librmq.commitlog import CommitLog
from librmq.consumequeue import ConsumeQueue
from librmq.consumequeue_entries import ENTRY, HOLE_SIZE
from librmq.store.engine.store_parts import QueueName
from librmq.store.recovery._entry_check import record_at


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


def recreated(queues: Mapping[QueueName, ConsumeQueue], log: CommitLog) -> dict[QueueName, int]:
    """Return the beginning of the records of each queue that counts from 0 again, by its first entry.

    A topic deleted on a broker leaves its records in the log. A new topic of that name counts from 0 again.
    """
    begins = {}
    for name, queue in queues.items():
        raw = queue.read(0, 1) if queue.stored_begin == 0 else b""
        place, size, _ = ENTRY.unpack(raw) if raw else (-1, 0, 0)
        message = record_at(log, place, size) if place > log.begin and size != HOLE_SIZE else None
        if message is not None and (message.topic, message.queue_id, message.queue_offset) == (*name, 0):
            begins[name] = place
    return begins


def dispatched(queues: Mapping[QueueName, ConsumeQueue], log: CommitLog) -> int:
    """Return the place up to which the log was dispatched, whatever happened to some queues since."""
    return max([log.begin, *(queue.max_physic_offset for queue in queues.values())])
