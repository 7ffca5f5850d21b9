"""Queue selectors: by key, by a ring of hashes, at random, by room, in turn, or away from failing and slow brokers.

A selector is a function ``selector(queues, message, key) -> queue``. It gets the queues of a topic, the message, and
the argument of the send. Mirrors ``client.producer.selector``, ``TopicPublishInfo``, ``MQFaultStrategy`` and
``LatencyFaultToleranceImpl``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from librmq.client.allocation import LARGEST_RING, text_hash
from librmq.client.client import QueueSelector, RoundRobin
from librmq.client.operations import Ended, Operation
from librmq.errors import AllocationError, ConfigError
from librmq.java.lang import number_hash, string_hash
from librmq.message import Message, MessageQueue
from librmq.runtime.locks import Lock

if TYPE_CHECKING:
    from random import Random

_AVOIDANCE: Final = (
    (15_000, 600_000),
    (3_000, 180_000),
    (2_000, 120_000),
    (1_000, 60_000),
    (550, 30_000),
    (100, 0),
    (50, 0),
)
"""``(latency, away)`` in ms: how long to avoid a broker after a send with that latency; slowest first."""

_FAILED_LATENCY_MS: Final = 30_000


def key_hash(key: object) -> int:
    """Return Java's ``hashCode`` of a key: text, bool, float (a ``Double``), whole number or `MessageQueue`.

    A number of 32 bits counts as an ``Integer``, a larger one as a ``Long``. They differ for negative numbers: to
    choose the queue of a Java client with a negative ``Long`` key, pass ``long_hash(key)`` of `librmq.client` as the
    key.

    Raises:
        AllocationError: The key has another type, or is None.
    """
    match key:
        case str():
            return string_hash(key)
        case int() | float() if (code := number_hash(key)) is not None:
            return code
        case MessageQueue():
            return key.java_hash
        case None:
            raise AllocationError("arg: expected a key to choose the queue by, found None", "NullPointerException")
    raise AllocationError(f"arg: expected a text, number or bool to choose the queue by, found {key!r:.80}")


def select_by_hash(queues: Sequence[MessageQueue], message: Message, key: object) -> MessageQueue:
    """Return the same queue for equal keys while their number stays; `AllocationError` without queues or key."""
    return queues[abs(_remainder(key_hash(key), queues))]


def select_by_remainder(queues: Sequence[MessageQueue], message: Message, key: object) -> MessageQueue:
    """Return the queue at the remainder of a number of at least 0: consecutive numbers get consecutive queues."""
    if isinstance(key, bool) or not isinstance(key, int) or key < 0:
        raise AllocationError(f"arg: expected a whole number of 0 or more to choose the queue by, found {key!r:.80}")
    return queues[_remainder(key, queues)]


def _remainder(number: int, queues: Sequence[MessageQueue]) -> int:
    """Return Java's remainder, which has the sign of ``number``."""
    if not queues:
        raise AllocationError("there are no queues to choose from", "ArithmeticException")
    remainder = abs(number) % len(queues)
    return -remainder if number < 0 else remainder


def select_by_consistent_hash(virtual_nodes: int = 100) -> QueueSelector:
    """Return a selector that gives a key the next queue on a ring of hashes, so few keys move if queues are added.

    From 8 to 9 queues about a ninth of the keys move, all to the new queue; with `select_by_hash` eight ninths move.
    The order of the queues does not matter, and topics with the same brokers and queues share their choice. More
    ``virtual_nodes`` for each queue make the shares more even. Keys are those of `key_hash`. Thread-safe.

    Raises:
        ConfigError: The number of nodes is not 1 to 1,048,576. The selector raises it for a ring with more nodes.
    """
    if type(virtual_nodes) is not int or not 1 <= virtual_nodes <= LARGEST_RING:
        raise ConfigError(
            f"virtual_nodes: expected a whole number from 1 to {LARGEST_RING}, found {virtual_nodes!r:.80}"
        )

    def select(queues: Sequence[MessageQueue], message: Message, key: object) -> MessageQueue:
        places, owners = _queue_ring(tuple(queues), virtual_nodes)
        return owners[bisect_left(places, text_hash(str(key_hash(key)))) % len(places)]

    return select


@lru_cache(maxsize=64)
def _queue_ring(queues: tuple[MessageQueue, ...], virtual_nodes: int) -> tuple[list[int], list[MessageQueue]]:
    """Return the places of all nodes, ascending, and the queue of each."""
    if not queues:
        raise AllocationError("there are no queues to choose from")
    if virtual_nodes * len(queues) > LARGEST_RING:
        raise ConfigError(f"a ring of {virtual_nodes} nodes for each of {len(queues)} queues is too large")
    nodes = {
        text_hash(f"{queue.broker_name}-{queue.queue_id}-{number}"): queue
        for queue in sorted(queues, key=MessageQueue.sort_key)
        for number in range(virtual_nodes)
    }
    places = sorted(nodes)
    return places, [nodes[place] for place in places]


def select_at_random(random: Random) -> QueueSelector:
    """Return a selector that draws from ``random``."""

    def select(queues: Sequence[MessageQueue], message: Message, key: object) -> MessageQueue:
        if not queues:
            raise AllocationError("there are no queues to choose from")
        return queues[random.randrange(len(queues))]

    return select


def select_by_room(
    rooms: Collection[str], queue_room: Callable[[MessageQueue], str | None], then: QueueSelector
) -> QueueSelector:
    """Return a selector by ``then`` among the queues in ``rooms``, or among all queues if there are none."""
    room_names = frozenset(rooms)

    def select(queues: Sequence[MessageQueue], message: Message, key: object) -> MessageQueue:
        return then([queue for queue in queues if queue_room(queue) in room_names] or queues, message, key)

    return select


@dataclass(slots=True)
class _Latency:
    latency_ms: int
    away_until_ms: int


class BrokerLatencies:
    """The latencies of brokers, which decide which brokers to avoid for a while. Thread-safe.

    ``now_ms`` returns the time.
    """

    def __init__(self, now_ms: Callable[[], int]) -> None:
        self._now_ms = now_ms
        self._brokers: dict[str, _Latency] = {}
        self._turns = RoundRobin()
        self._lock = Lock()

    def report(self, broker_name: str, latency_ms: int, *, failed: bool = False) -> None:
        """Record the latency of a send; a failed one counts as 30 s."""
        counted_ms = _FAILED_LATENCY_MS if failed else latency_ms
        away_ms = next((away for threshold_ms, away in _AVOIDANCE if counted_ms >= threshold_ms), 0)
        with self._lock:
            self._brokers[broker_name] = _Latency(latency_ms, self._now_ms() + away_ms)

    def watch(self, operation: Operation) -> Ended | None:
        """Record the latency of each try of a send."""
        queue = operation.queue
        if queue is None:
            return None
        begin_ms = self._now_ms()

        def tried(result: object, error: BaseException | None) -> None:
            if result is not None or error is not None:
                self.report(queue.broker_name, self._now_ms() - begin_ms, failed=error is not None)

        return tried

    def is_available(self, broker_name: str) -> bool:
        """Return whether a broker is not being avoided; an unknown one is not."""
        latency = self._brokers.get(broker_name)
        return latency is None or self._now_ms() >= latency.away_until_ms

    def next_queue(self, queues: Sequence[MessageQueue], turns: RoundRobin) -> MessageQueue:
        """Return the next queue of an available broker; without any, of one in the better half.

        The latency of a broker without queues is dropped. `AllocationError` without queues.
        """
        if not queues:
            raise AllocationError("there are no queues to choose from")
        begin = next(turns.numbers)
        for at in range(begin, begin + len(queues)):
            queue = queues[at % len(queues)]
            if self.is_available(queue.broker_name):
                return queue
        best = self._fallback_broker()
        of_best = [queue for queue in queues if queue.broker_name == best]
        if of_best:
            return of_best[next(turns.numbers) % len(of_best)]
        with self._lock:
            self._brokers.pop(best, None)
        return turns.next_queue(queues)

    def _fallback_broker(self) -> str:
        """Return in turn one of the better half of brokers: available first, then by latency and end of avoidance."""
        now_ms = self._now_ms()
        with self._lock:
            brokers = list(self._brokers.items())
        brokers.sort(key=lambda item: (now_ms < item[1].away_until_ms, item[1].latency_ms, item[1].away_until_ms))
        return brokers[next(self._turns.numbers) % max(1, len(brokers) // 2)][0]
