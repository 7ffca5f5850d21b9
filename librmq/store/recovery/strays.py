"""Records that a changed byte of their topic or queue id has taken away from their queue."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from librmq.store.engine.queue_table import QueueName
from librmq.store.recovery.entry_check import ExpectedEntry

__all__ = ["Stray", "Strays"]


class _Check(Protocol):
    """The check of a queue."""

    name: QueueName

    def give_away(self, entry: ExpectedEntry) -> None: ...


class Stray(NamedTuple):
    """A record that falls out of the count of the queue that it names."""

    check: _Check
    entry: ExpectedEntry


class Strays:
    """The records that fall out of the count of their queues, by queue offset."""

    def __init__(self) -> None:
        self._found: dict[int, dict[int, Stray]] = {}  # by queue offset and physical offset

    def add(self, queue_offset: int, stray: Stray) -> None:
        """Note a record that may be that of another queue, at the same queue offset."""
        self._found.setdefault(queue_offset, {})[stray.entry.physical_offset] = stray

    def drop(self, queue_offset: int, physical_offset: int) -> None:
        """Forget a record that turned out to be in its place."""
        found = self._found.get(queue_offset)
        if found is not None:
            found.pop(physical_offset, None)
            if not found:
                del self._found[queue_offset]

    def at(self, queue_offset: int, physical_offset: int) -> Stray | None:
        """Return the stray record that stands there, and forget it."""
        stray = self._found.get(queue_offset, {}).get(physical_offset)
        if stray is not None:
            self.drop(queue_offset, physical_offset)
        return stray

    def take(self, queue_offset: int, after: int, before: int, check: _Check) -> Stray | None:
        """Return a record between two physical offsets that a changed byte took away from the queue of ``check``.

        It names the same queue offset of a queue to which it is no use.
        """
        for physical_offset, stray in self._found.get(queue_offset, {}).items():
            if after < physical_offset < before and _is_one_byte_off(check.name, stray.check.name):
                self.drop(queue_offset, physical_offset)
                return stray
        return None


def _is_one_byte_off(one: QueueName, other: QueueName) -> bool:
    """Return whether one byte makes the name of one queue that of the other."""
    ours, theirs = (topic.encode() + queue_id.to_bytes(4, "big", signed=True) for topic, queue_id in (one, other))
    return len(ours) == len(theirs) and sum(a != b for a, b in zip(ours, theirs, strict=True)) == 1
