"""Failures: what becomes of messages whose listener failed, and of the consumer.

::

    result of the listener       concurrent                             orderly
    it returns                   consumed                               consumed
    an index of a batch          the messages after it are sent back    consumed
    not True, where it must      sent back                              the queue is suspended
    FAILURE, RECONSUME_LATER     sent back                              the queue is suspended
    ReconsumeLater               sent back, with its delay level        suspended; below level 0 a dead letter
    SuspendQueue                 sent back                              suspended for its seconds
    DownstreamDown               the consumer or the queue rests; this counts as no failure
    any other exception          sent back                              suspended
    after the last attempt       the broker makes a dead letter         the consumer sends a dead letter
    while broadcasting           dropped                                dropped after the last attempt

`librmq.broker.retries` stores what is sent back: for a later delivery, or as a dead letter.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from librmq.consumer._instance import Instance
from librmq.consumer._listeners import Listener
from librmq.listener import DownstreamDown, consumed_before, returned_failure
from librmq.message import MessageQueue
from librmq.runtime import Step
from librmq.runtime.closing import LaterPart
from librmq.runtime.runner import NEVER

if TYPE_CHECKING:
    from librmq.consumer._retries import Retries

T = TypeVar("T")
REDELIVERY_MS: Final = 5_000
"""Pause before a message that no broker accepted back is delivered again."""
_MAX_CAUSE: Final = 500  # The cause shares the room of a record's properties, 32,767 bytes, with those of the message.


def outcome(listener: Listener, count: int, result: object, error: Exception | None) -> tuple[int, Exception | None]:
    """Return how many of ``count`` messages are consumed, and why the others failed (None: not acknowledged)."""
    if error is None and result is not None and result is not True:
        error = returned_failure(result)
    if error is not None:
        consumed = consumed_before(error) if listener.as_list else 0
        return min(max(0, consumed), count), error
    if listener.as_list and isinstance(result, int) and not isinstance(result, bool):
        if result < -1:
            return 0, ValueError(f"the listener returned {result}: expected the index of a message, or -1 for none")
        return min(result + 1, count), None
    return 0 if listener.must_return and result is not True else count, None


def cause_of(error: Exception | None) -> str:
    """Return an exception as one line for a property; None stands for a missing acknowledgement."""
    if error is None:
        return "the listener did not acknowledge it"
    text = str(error)
    name = type(error).__name__
    line = f"{name}: {text}" if text else name
    return "".join(char if char.isprintable() else " " for char in line[:_MAX_CAUSE])


def later_retries(consumer: Instance) -> LaterPart[Retries]:
    def make() -> Retries:
        from librmq.consumer._retries import Retries

        return Retries(consumer)

    return LaterPart(make)


# ---- what waits for a time


class Rests(Generic[T]):
    """What waits for a time in one consumer, and what is kept meanwhile. Called under the runner's lock.

    The whole consumer or a queue rests while a service that listeners call is down, or the queue is suspended. Failed
    messages that no broker has accepted back are kept for a time of their own.
    """

    def __init__(self, consumer: Instance, resumed: Callable[[int, list[T]], None]) -> None:
        """``resumed(now_ms, due)`` is called when rests end, with what was kept for them."""
        self._consumer = consumer
        self._resumed = resumed
        self.times: dict[MessageQueue | None, tuple[int, int]] = {}
        """Start and end of the rest of each queue; None is the whole consumer."""
        # A heap of the end of the wait, a number that keeps the order of equal ends, and the start.
        self._kept: list[tuple[int, int, int, T]] = []
        self._number = 0
        self.is_probing: bool = False
        """Whether the next call decides if the whole consumer continues."""
        self._step = Step(f"{consumer._label} resume", self._end_rests, consumer.client)

    def __contains__(self, queue: MessageQueue) -> bool:
        return bool(self.times) and (None in self.times or queue in self.times)

    def begin_rest(self, error: DownstreamDown, queue: MessageQueue) -> int:
        """Begin a rest and return its length in milliseconds; only the first in a row is logged as a warning."""
        consumer, rest_ms = self._consumer, max(1, round(1000 * error.seconds))
        self.is_probing |= not error.only_queue
        if not consumer._stopping:
            consumer._states.failing(("downstream",), "what listeners call", error, again_ms=rest_ms)
        consumer._note("rest", queue.topic)
        self.rest(queue if error.only_queue else None, rest_ms)
        return rest_ms

    def rest(self, queue: MessageQueue | None, milliseconds: int) -> None:
        now_ms = self._consumer.runner.now_ms()
        self.times[queue] = now_ms, max(now_ms + milliseconds, self.times.get(queue, (0, 0))[1])
        self._wake()

    def keep(self, item: T, begin_ms: int, end_ms: int) -> None:
        self._number += 1
        heappush(self._kept, (end_ms, self._number, begin_ms, item))
        self._wake()

    def _wake(self) -> None:
        self._consumer.runner.wake(self._step, self._next_ms)

    def succeeded(self) -> None:
        """Note a successful call, which ends the probing."""
        if not self.times:
            self.is_probing = False
            self._consumer._states.works(("downstream",), "what listeners call")

    @property
    def _next_ms(self) -> int:
        ends = [end for _, end in self.times.values()]
        return min([*ends, *(kept[0] for kept in self._kept[:1])], default=NEVER)

    def _end_rests(self, now_ms: int) -> int | None:
        # A time that has not come ends too if it is before the start: the clock was set back.
        for queue, (begin, end) in list(self.times.items()):
            if not begin <= now_ms < end:
                del self.times[queue]
        due: list[T] = []
        while self._kept and not self._kept[0][2] <= now_ms < self._kept[0][0]:
            due.append(heappop(self._kept)[3])
        self._resumed(now_ms, due)
        return self._next_ms if self.times or self._kept else None
