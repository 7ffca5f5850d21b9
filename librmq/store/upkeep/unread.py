"""Tell which messages of a log file some group has not consumed yet.

A store knows no groups. A broker tells it by `Readers` how far each reader of a queue has come: consumer groups, and
those of its own parts that bring messages to their time. Retention asks before it deletes a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, Protocol

from librmq.consumequeue import ConsumeQueue
from librmq.message.topics import is_system_topic
from librmq.store.recovery.queue_search import first_at

__all__ = ["Readers", "Unread", "UnreadInFile", "remedy", "unread_between"]

FindQueue = Callable[[str, int], ConsumeQueue | None]


class Unread(NamedTuple):
    """How far a reader has come in a queue."""

    group: str
    topic: str
    queue_id: int
    queue_offset: int
    """The first message that the reader may still need."""
    has_passed: Callable[[int], bool] | None = None
    """Whether a queue offset from there on is not needed any more; None needs all of them."""


class UnreadInFile(NamedTuple):
    """What a reader still needs of a part of the log."""

    reader: Unread
    queue_offset: int
    """The first message."""
    messages: int


class Readers(Protocol):
    """What retention asks of a broker. Called by any thread, without a lock of the store."""

    def unread(self, before: int) -> Iterable[Unread]:
        """Return how far each reader has come, by queue; what is stored at or behind ``before`` is not asked for."""
        ...

    def lost(self, unread: UnreadInFile) -> None:
        """Note that messages were deleted before their reader had come to them."""
        ...


def unread_between(readers: Readers, find: FindQueue, begin: int, end: int) -> Iterator[UnreadInFile]:
    """Find what is stored from physical offset ``begin`` to ``end`` and not consumed yet, reader by reader."""
    for reader in readers.unread(end):
        queue = find(reader.topic, reader.queue_id)
        if queue is None:
            continue
        low = max(reader.queue_offset, queue.min_offset)
        found = range(max(low, first_at(queue, begin)), first_at(queue, end))
        if reader.has_passed is None:
            if found:
                yield UnreadInFile(reader, found.start, len(found))
            continue
        needed = [queue_offset for queue_offset in found if not reader.has_passed(queue_offset)]
        if needed:
            yield UnreadInFile(reader, needed[0], len(needed))


def remedy(unread: Unread) -> str:
    """Return what lets a reader's messages go."""
    if is_system_topic(unread.topic) or unread.group.startswith("CID_SYSTEM_"):
        return "they go when their time has come or their transaction has ended"
    return f"let the group consume, or pass over them by broker.reset_group({unread.group!r}, {unread.topic!r}, 'end')"
