"""Weights of listeners: which of the messages that wait for a thread begins next."""

from __future__ import annotations

from collections import deque
from typing import Final

from librmq.consumer._assignment import AssignedQueue
from librmq.consumer._listeners import DeliveredMessage
from librmq.errors import ConfigError

MAX_WEIGHT: Final = 1000


def check_weight(topic: str, weight: object, orderly: bool) -> None:
    """Refuse a weight that a subscription can't have.

    Raises:
        ConfigError: It is out of range, or the consumer is orderly.
    """
    if weight is None:
        return
    if type(weight) is not int or not 1 <= weight <= MAX_WEIGHT:
        raise ConfigError(
            f"topic {topic!r}: weight: expected a whole number from 1 to {MAX_WEIGHT}, found {weight!r:.80}"
        )
    if orderly:
        raise ConfigError(
            f"topic {topic!r}: weight: an orderly consumer delivers each queue in its order, so no message can "
            "overtake another: leave weight out, or send important messages to a topic of their own"
        )


class Pulled:
    """Messages of one pull that wait for a listener; a batch never mixes pulls."""

    __slots__ = ("assigned", "count", "messages", "weight")

    def __init__(self, assigned: AssignedQueue, count: int, messages: list[DeliveredMessage] | None = None) -> None:
        self.assigned = assigned
        self.count = count
        self.messages = messages
        """A batch that was taken from its queue and is lined up, in place of messages that wait in the queue."""
        self.weight = 1
        """Its lane in the backlog."""


_COST: Final = 1 << 40
"""What a message of weight 1 costs, in units of virtual time."""


class Backlog:
    """What waits for a thread: in the order of the pulls within a weight, and by share between weights.

    Start-time fair queueing: each weight has the virtual time at which its next message starts, which moves by 1/weight
    with each message; the earliest begins. A weight that had nothing to wait for starts at the present virtual time, so
    its first message begins next, and it can't save up its share. While two weights wait, the numbers of their
    messages that have begun, each divided by its weight, differ by at most the sum of one batch of each. O(weights) a
    message.
    """

    __slots__ = ("_now", "_starts", "lanes")

    def __init__(self) -> None:
        self.lanes: dict[int, deque[Pulled]] = {}
        """By weight; without empty ones."""
        self._starts: dict[int, int] = {}
        self._now = 0

    def append(self, pulled: Pulled, weight: int, *, is_first: bool = False) -> None:
        """Add messages to the end of their lane, or to its beginning."""
        pulled.weight = weight
        lane = self.lanes.get(weight)
        if lane is None:
            lane = self.lanes[weight] = deque()
            self._starts[weight] = max(self._starts.get(weight, 0), self._now)
        if is_first:
            lane.appendleft(pulled)
        else:
            lane.append(pulled)

    def first(self) -> Pulled:
        """Return what begins next; of equal starts the larger weight's."""
        lanes = self.lanes
        if len(lanes) == 1:
            return next(iter(lanes.values()))[0]
        return lanes[min(lanes, key=lambda weight: (self._starts[weight], -weight))][0]

    def remove(self, pulled: Pulled) -> None:
        """Remove what begins next."""
        lane = self.lanes[pulled.weight]
        lane.popleft()
        if not lane:
            del self.lanes[pulled.weight]

    def charge(self, weight: int, count: int) -> None:
        """Count messages that begin."""
        self._now = self._starts[weight]
        self._starts[weight] += count * _COST // weight

    def take_all(self) -> list[Pulled]:
        """Remove and return everything."""
        contents = [pulled for weight in sorted(self.lanes, reverse=True) for pulled in self.lanes[weight]]
        self.lanes.clear()
        return contents


def batches_of(assigned: AssignedQueue, messages: list[DeliveredMessage], size: int) -> list[Pulled]:
    """Return batches of at most ``size`` messages, which are taken from their queue."""
    parts = (messages[start : start + size] for start in range(0, len(messages), size))
    return [Pulled(assigned, len(part), part) for part in parts]
