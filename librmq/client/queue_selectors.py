"""Which queue a message is sent to: by key, at random, by room, in turn, away from brokers that fail or are slow.

A selector is a function ``selector(queues, message, key) -> queue`` of the queues of a topic, what is sent, and
whatever the caller gave along. Mirrors ``client.producer.selector``, ``TopicPublishInfo``, ``MQFaultStrategy`` and
``LatencyFaultToleranceImpl``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import Any, Final

from librmq.errors import AllocationError
from librmq.java.hashing import boolean_hash, double_hash, long_hash, string_hash
from librmq.message.message import Message, MessageQueue

__all__ = [
    "AVOIDANCE_TABLE",
    "BrokerLatencies",
    "QueueSelector",
    "RoundRobin",
    "key_hash",
    "select_at_random",
    "select_by_hash",
    "select_by_remainder",
    "select_by_room",
]

QueueSelector = Callable[[Sequence[MessageQueue], Message, Any], MessageQueue]

AVOIDANCE_TABLE: Final = (
    (15_000, 600_000),
    (3_000, 180_000),
    (2_000, 120_000),
    (1_000, 60_000),
    (550, 30_000),
    (100, 0),
    (50, 0),
)
"""``(latency, away)`` in milliseconds: how long a broker is avoided after a send that took that long; slowest first."""

_FAILED_LATENCY_MS: Final = 30_000


def key_hash(key: object) -> int:
    """Java's ``hashCode`` of a key: text, bool, float (a ``Double``), whole number, `MessageQueue`.

    A number of 32 bits is taken for an ``Integer``, a larger one for a ``Long``. They differ for negative numbers:
    to send where a Java client sends for a negative ``Long`` key, give ``javahash.long_hash(key)`` for the key.
    `AllocationError` for anything else, None included.
    """
    match key:
        case str():
            return string_hash(key)
        case bool():
            return boolean_hash(key)
        case int() if -(1 << 31) <= key < 1 << 31:
            return key
        case int() if -(1 << 63) <= key < 1 << 63:
            return long_hash(key)
        case float():
            return double_hash(key)
        case MessageQueue():
            return key.java_hash
        case None:
            raise AllocationError("no key to choose a queue by", "NullPointerException")
    raise AllocationError(f"expected a text, number or bool to choose a queue by, found {key!r:.80}")


def select_by_hash(queues: Sequence[MessageQueue], message: Message, key: object) -> MessageQueue:
    """The same queue for equal keys, as long as the number of queues stays; `AllocationError` without queues or key."""
    return queues[abs(_remainder(key_hash(key), queues))]


def select_by_remainder(queues: Sequence[MessageQueue], message: Message, key: object) -> MessageQueue:
    """The queue at the remainder of a number that is not negative: neighbouring numbers to neighbouring queues."""
    if isinstance(key, bool) or not isinstance(key, int) or key < 0:
        raise AllocationError(f"expected a whole number of 0 or more to choose a queue by, found {key!r:.80}")
    return queues[_remainder(key, queues)]


def _remainder(number: int, queues: Sequence[MessageQueue]) -> int:
    """As Java has it: with the sign of ``number``."""
    if not queues:
        raise AllocationError("there are no queues to choose from", "ArithmeticException")
    remainder = abs(number) % len(queues)
    return -remainder if number < 0 else remainder


def select_at_random(random: Random) -> QueueSelector:
    """A selector that throws ``random``'s dice."""

    def select(queues: Sequence[MessageQueue], message: Message, key: object) -> MessageQueue:
        if not queues:
            raise AllocationError("there are no queues to choose from")
        return queues[random.randrange(len(queues))]

    return select


def select_by_room(
    rooms: Collection[str], queue_room: Callable[[MessageQueue], str | None], then: QueueSelector
) -> QueueSelector:
    """A selector that lets ``then`` choose among the queues in ``rooms``, or among all where those have none."""
    known = frozenset(rooms)

    def select(queues: Sequence[MessageQueue], message: Message, key: object) -> MessageQueue:
        return then([queue for queue in queues if queue_room(queue) in known] or queues, message, key)

    return select


class RoundRobin:
    """One queue after the other. Thread-safe; ``begin`` is where it starts, at random in a producer."""

    def __init__(self, begin: int = 0) -> None:
        self._turns = count(begin)  # counting is one step for the interpreter

    def turn(self) -> int:
        """The next number."""
        return next(self._turns)

    def choose(self, queues: Sequence[MessageQueue], failed_broker: str | None = None) -> MessageQueue:
        """The next queue, of another broker than the one that just failed if there is one; `AllocationError`: none."""
        if not queues:
            raise AllocationError("there are no queues to choose from")
        if failed_broker is not None:
            for _ in queues:
                queue = queues[self.turn() % len(queues)]
                if queue.broker_name != failed_broker:
                    return queue
        return queues[next(self._turns) % len(queues)]


@dataclass(slots=True)
class _Latency:
    latency_ms: int
    away_until_ms: int


class BrokerLatencies:
    """How long brokers took to answer, and so which are avoided for a while. Thread-safe.

    ``now_ms`` tells the time; ``table`` is in the form of `AVOIDANCE_TABLE`.
    """

    def __init__(self, now_ms: Callable[[], int], table: Sequence[tuple[int, int]] = AVOIDANCE_TABLE) -> None:
        self._now_ms = now_ms
        self._table = sorted(table, reverse=True)
        self._brokers: dict[str, _Latency] = {}
        self._turns = RoundRobin()
        self._lock = threading.Lock()

    def report(self, broker_name: str, latency_ms: int, *, failed: bool = False) -> None:
        """Record the latency of a send; a failed one counts as 30 s."""
        judged = _FAILED_LATENCY_MS if failed else latency_ms
        away_ms = next((away for least, away in self._table if judged >= least), 0)
        with self._lock:
            self._brokers[broker_name] = _Latency(latency_ms, self._now_ms() + away_ms)

    def is_available(self, broker_name: str) -> bool:
        """Whether a broker is not avoided now; one that was never heard of is not."""
        known = self._brokers.get(broker_name)
        return known is None or self._now_ms() >= known.away_until_ms

    def choose(self, queues: Sequence[MessageQueue], turns: RoundRobin) -> MessageQueue:
        """The next queue of a broker that is available; if none is, the next one of a broker of the better half.

        A broker that is known and has no queue any more is forgotten. `AllocationError` without queues.
        """
        if not queues:
            raise AllocationError("there are no queues to choose from")
        begin = turns.turn()
        for at in range(begin, begin + len(queues)):
            queue = queues[at % len(queues)]
            if self.is_available(queue.broker_name):
                return queue
        best = self._least_bad()
        of_best = [queue for queue in queues if queue.broker_name == best]
        if of_best:
            return of_best[turns.turn() % len(of_best)]
        with self._lock:
            self._brokers.pop(best, None)
        return turns.choose(queues)

    def _least_bad(self) -> str:
        """In turn one of the better half of all known brokers: available first, then by latency, then by when back."""
        now_ms = self._now_ms()
        with self._lock:
            known = list(self._brokers.items())
        known.sort(key=lambda item: (now_ms < item[1].away_until_ms, item[1].latency_ms, item[1].away_until_ms))
        return known[self._turns.turn() % max(1, len(known) // 2)][0]
