"""Deadlines of what waits, in order of time: of held requests, and of messages that are invisible."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

from sortedcontainers import SortedList

K = TypeVar("K", bound=Hashable)


class Deadlines(Generic[K]):
    """Keys in order of their deadlines in ms, first set first among equal ones. A key has one. Not thread-safe.

    `set`, `discard` and each key of `pop_due` cost O(log n), and a discarded key leaves nothing behind.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count()  # so that keys need no order
        self._entries: dict[K, tuple[int, int, K]] = {}
        self._in_order: SortedList[tuple[int, int, K]] = SortedList()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def first_ms(self) -> int | None:
        """The earliest deadline."""
        return self._in_order[0][0] if self._in_order else None

    def set(self, key: K, at_ms: int) -> None:
        """Give a key a deadline, in place of its former one."""
        if key in self._entries:
            self.discard(key)
        entry = self._entries[key] = at_ms, next(self._numbers), key
        self._in_order.add(entry)

    def discard(self, key: K) -> None:
        """Remove a key, if it has a deadline."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._in_order.remove(entry)

    def pop_due(self, now_ms: int) -> Iterator[K]:
        """Remove and yield the keys that are due; the caller may change deadlines meanwhile."""
        while self._in_order and self._in_order[0][0] <= now_ms:
            _, _, key = self._in_order.pop(0)
            del self._entries[key]
            yield key

    def pop_all(self) -> Iterator[K]:
        """Remove and yield all keys by time."""
        while self._in_order:
            yield from self.pop_due(self._in_order[0][0])
