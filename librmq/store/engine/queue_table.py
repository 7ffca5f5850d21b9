"""The queues of a store, opened when they are first asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import NamedTuple

from librmq.config import wrong_kind
from librmq.consumequeue import ConsumeQueue
from librmq.errors import CorruptionError

__all__ = ["OpenQueue", "QueueName", "QueueState", "QueueTable"]

QueueName = tuple[str, int]

OpenQueue = Callable[[str, int], ConsumeQueue]
"""From topic and queue id to the queue, opened; one that does not exist yet is empty."""


class QueueState(NamedTuple):
    """A queue as it was closed."""

    min_offset: int
    max_offset: int
    max_physic_offset: int


class QueueTable(MutableMapping[QueueName, ConsumeQueue]):
    """The queues of a store, opened when they are first asked for. Thread-safe as a dict is.

    Iterating and counting open none; `opened` gives those that are open.
    """

    def __init__(self, open_queue: OpenQueue, known: Mapping[QueueName, QueueState | None]) -> None:
        """``known`` are queues that need not be opened yet, as they were closed; None where that is not known."""
        self._open_queue = open_queue
        self._known = dict(known)
        self._open: dict[QueueName, ConsumeQueue] = {}

    def __repr__(self) -> str:
        return f"<QueueTable of {len(self)} queues>"

    def __getitem__(self, name: QueueName) -> ConsumeQueue:
        queue = self._open.get(name)
        if queue is not None:
            return queue
        state = self._known[name]
        queue = self._open_queue(*name)
        opened = self._open.get(name)
        if opened is not None:  # by another thread, which may have written to it since
            return opened
        if state is None:
            return self._open.setdefault(name, queue)
        if (queue.max_offset, queue.max_physic_offset) != state[1:]:
            path, position = queue.place_of(min(queue.max_offset, state.max_offset))
            found = f"it ends at queue offset {queue.max_offset}, and was closed at {state.max_offset}"
            raise CorruptionError(path, position, "entry", f"{found}: run librmq recover")
        queue.min_offset = max(queue.min_offset, state.min_offset)
        return self._open.setdefault(name, queue)

    def find(self, name: QueueName) -> ConsumeQueue | None:
        """Return the queue, or None; faster than `get`.

        Raises:
            TypeError: No queue can have this name.
        """
        queue = self._open.get(name)
        if queue is None:
            if name in self._known:
                return self[name]
            _check(name)
        return queue

    def __setitem__(self, name: QueueName, queue: ConsumeQueue) -> None:
        self._open[name] = queue

    def __delitem__(self, name: QueueName) -> None:
        del self._open[name]
        self._known.pop(name, None)

    def __iter__(self) -> Iterator[QueueName]:
        return iter([*self._open, *(name for name in self._known if name not in self._open)])

    def __len__(self) -> int:
        return len(self._open.keys() | self._known.keys())

    def __contains__(self, name: object) -> bool:
        return name in self._open or name in self._known

    def expect(self, name: QueueName, state: QueueState) -> None:
        """Note how a queue was found that need not be opened yet."""
        self._known[name] = state

    def opened(self) -> list[ConsumeQueue]:
        """Return the queues that are open."""
        return list(self._open.values())

    def states(self) -> dict[QueueName, QueueState]:
        """Return the state of every queue; one that was never opened is as it was closed."""
        opened = {
            name: QueueState(queue.min_offset, queue.max_offset, queue.max_physic_offset)
            for name, queue in self._open.items()
        }
        return {**{name: state for name, state in self._known.items() if state is not None}, **opened}


def _check(name: QueueName) -> None:
    topic, queue_id = name
    if not isinstance(topic, str):
        raise wrong_kind("topic", topic, "text")
    if not hasattr(queue_id, "__index__"):
        raise wrong_kind("queue_id", queue_id, "a whole number")
