"""Records that a changed byte of their topic or queue id has moved to another queue."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from librmq.store.engine.open_store import QueueName
from librmq.store.recovery.entry_check import ExpectedEntry


class _Check(Protocol):
    """The check of a queue."""

    name: QueueName

    def release(self, entry: ExpectedEntry) -> None: ...


class Stray(NamedTuple):
    """A record that does not fit the count of the queue in its fields."""

    check: _Check
    entry: ExpectedEntry


class Strays:
    """The records that do not fit the count of their queues, by queue offset."""

    def __init__(self) -> None:
        self._strays: dict[int, dict[int, Stray]] = {}  # by queue offset and physical offset

    def add(self, queue_offset: int, stray: Stray) -> None:
        """Note a record that can belong to another queue, at the same queue offset."""
        self._strays.setdefault(queue_offset, {})[stray.entry.physical_offset] = stray

    def remove(self, queue_offset: int, physical_offset: int) -> None:
        """Forget a record that is in its place after all."""
        strays = self._strays.get(queue_offset)
        if strays is not None:
            strays.pop(physical_offset, None)
            if not strays:
                del self._strays[queue_offset]

    def pop_at(self, queue_offset: int, physical_offset: int) -> Stray | None:
        """Return the stray record at this place, and forget it."""
        stray = self._strays.get(queue_offset, {}).get(physical_offset)
        if stray is not None:
            self.remove(queue_offset, physical_offset)
        return stray

    def pop_between(self, queue_offset: int, after: int, before: int, check: _Check) -> Stray | None:
        """Return a record between two physical offsets that a changed byte took from the queue of ``check``.

        It has the same queue offset in a queue that does not need it.
        """
        for physical_offset, stray in self._strays.get(queue_offset, {}).items():
            if after < physical_offset < before and _is_one_byte_off(check.name, stray.check.name):
                self.remove(queue_offset, physical_offset)
                return stray
        return None


def _is_one_byte_off(first: QueueName, second: QueueName) -> bool:
    """Return whether a change of one byte turns one queue's name into the other's."""
    ours, theirs = (topic.encode() + queue_id.to_bytes(4, "big", signed=True) for topic, queue_id in (first, second))
    return len(ours) == len(theirs) and sum(a != b for a, b in zip(ours, theirs, strict=True)) == 1
