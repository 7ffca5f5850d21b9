"""Failures: what becomes of messages whose listener failed or whose process has ended, and of the consumer.

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

**Suspects** are messages that a process had begun when it ended by surprise. Each runs alone, to be convicted or
acquitted::

    begun ── the process ends ──> suspect ──> waits for its turn ──> runs alone ──> ends: as any other message
                                     ^                                    │
                                     └────── the process ends again ──────┘   counted; after ``max_process_deaths`` of
                                                                              these the message is a dead letter

While a suspect has its turn, this process begins no other message of its runner's brokers. A turn is bounded, so that
a long message that was in work at a restart does not keep the others waiting. Who runs beyond that, or can't get alone,
runs in company, where no end of the process counts.

**An end by SIGTERM's default action** runs no Python, and looks like a crash. Alone it makes no dead letter: the first
makes suspects, and only a message that is within its turn at three more of them becomes one. A process that handles the
signal, or ends by Ctrl-C, removes its marks.

RocketMQ has nothing like it: there a message that ends its consumer comes again without end.
"""

from __future__ import annotations

import atexit
import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeVar
from weakref import WeakSet

from librmq.listener import DeadLetter, DownstreamDown, consumed_before, returned_failure
from librmq.message import MessageQueue
from librmq.protocol import Place, Suspect, ended_cause
from librmq.runtime import Runner, Step
from librmq.runtime.closing import LaterPart
from librmq.runtime.runner import NEVER

if TYPE_CHECKING:
    from librmq.consumer._instance import Instance
    from librmq.consumer._listeners import Listener
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
            consumer._states.failing("what listeners call", error, again_ms=rest_ms)
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
            self._consumer._states.works("what listeners call")

    @property
    def _next_ms(self) -> int:
        ends = [end for _, end in self.times.values()]
        return min([*ends, *(item[0] for item in self._kept[:1])], default=NEVER)

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


# ---- suspects

TURN_MS: Final = 10_000
"""Time for which a turn waits until no other message is in work, and then the longest time alone, after the first end
of a process; both are twice as long after each further one."""
_MOST_DOUBLED: Final = 7


class EndsProcess(DeadLetter):
    """Why a message is a dead letter: processes have ended at it."""


def conviction(suspect: Suspect, place: Place | None, limit: int | None) -> EndsProcess | None:
    """Return why a suspect becomes a dead letter; None if it may run.

    A ``limit`` of 0 lets all run; None is the group's, which the queue's place has.
    """
    deaths = suspect.deaths_alone
    if limit is None:
        limit = 0 if place is None else place.max_process_deaths
    if not limit or deaths < limit:
        return None
    return EndsProcess(ended_cause(deaths, limit))


class Accused(Protocol):
    """A `Suspect`, or what stands for one that only the broker knows."""

    @property
    def deaths(self) -> int:
        """How often its process has ended by surprise."""

    def runs_alone(self, is_alone: bool) -> None:
        """Note whether it runs alone in its process from now on."""


class Member(Protocol):
    """A consumer whose messages a turn keeps waiting."""

    @property
    def in_work(self) -> int:
        """The number of messages, or of listeners, that have begun and not ended; 0 for a dead client."""

    def hold_back(self) -> None:
        """Begin no message from now on; call `Turns.look` when the last one in work has ended."""

    def go_on(self, now_ms: int) -> None:
        """Begin messages again."""

    def leave_marks(self) -> None:
        """Remove the marks of what has begun, because the process ends in order."""


@dataclass(slots=True, eq=False)
class Turn:
    """A suspect that waits to run, or runs."""

    suspect: Accused
    begin: Callable[[Turn, int], bool]
    """``begin(turn, now_ms)`` begins the message, and returns False if it needs no turn any more."""


class Turns:
    """The turns of the suspects of one runner's consumers, one after the other. Called under the runner's lock."""

    def __init__(self, runner: Runner) -> None:
        self.members: list[Member] = []
        self.process: int = os.getpid()
        self._runner = runner
        self._waiting: deque[Turn] = deque()
        self._present: Turn | None = None
        self._is_alone = False
        self._until_ms = 0
        self._step = Step("turns of suspects", self._run_due)
        _all.add(self)

    @classmethod
    def of(cls, runner: Runner) -> Turns:
        """Return the turns that the consumers of a runner share."""
        turns = runner.shared.get(cls)
        if not isinstance(turns, Turns):
            turns = runner.shared[cls] = Turns(runner)
        return turns

    def join(self, member: Member) -> None:
        self.members.append(member)
        if self._present is not None:
            member.hold_back()

    def leave(self, member: Member) -> None:
        """Remove a consumer; its turns are passed over by ``begin``."""
        with suppress(ValueError):
            self.members.remove(member)
        if self._present is not None:
            self.look()

    def ask(self, turn: Turn) -> None:
        """Let a suspect run when it is its turn; nothing else begins before it."""
        self._waiting.append(turn)
        if self._present is None:
            self._next(self._runner.now_ms())
        self.look()

    def begin_now(self, turn: Turn) -> None:
        """Let a suspect whose turn has passed have one from now on, if no message is in work and no other turn waits.

        A consumer that asks for messages rarely comes after its turn, and what it has processed meanwhile can have kept
        the turn from beginning.
        """
        if self._present is None and not any(member.in_work for member in self.members):
            now_ms = self._runner.now_ms()
            self._hold_for(turn, now_ms)
            self._begin_alone(turn, now_ms)
            self.look()

    def look(self) -> None:
        """Look soon whether a turn can begin."""
        self._runner.wake(self._step)

    def ended(self, turn: Turn) -> None:
        """Note that a suspect has ended; others begin, or the next one."""
        turn.suspect.runs_alone(False)
        if turn is self._present:
            self._present = None
            if not self._waiting:
                self._let_go(self._runner.now_ms())
        self.look()

    def _let_go(self, now_ms: int) -> None:
        for member in list(self.members):
            member.go_on(now_ms)

    def _run_due(self, now_ms: int) -> int | None:
        while (turn := self._present or self._next(now_ms)) is not None:
            is_over = not now_ms < self._until_ms <= now_ms + (TURN_MS << _MOST_DOUBLED)
            if self._is_alone and is_over:
                self.ended(turn)  # It goes on in company. The next one waits for its end.
            elif not self._is_alone and not any(member.in_work for member in self.members):
                self._begin_alone(turn, now_ms)
            elif is_over:
                self._begin_in_company(now_ms)
            else:
                return self._until_ms
        return None

    def _next(self, now_ms: int) -> Turn | None:
        if not self._waiting:
            return None
        turn = self._waiting.popleft()
        self._hold_for(turn, now_ms)
        return turn

    def _hold_for(self, turn: Turn, now_ms: int) -> None:
        self._present, self._is_alone, self._until_ms = turn, False, now_ms + _longest_ms(turn)
        for member in self.members:
            member.hold_back()

    def _begin_alone(self, turn: Turn, now_ms: int) -> None:
        self._is_alone, self._until_ms = True, now_ms + _longest_ms(turn)
        turn.suspect.runs_alone(True)
        if not turn.begin(turn, now_ms):
            self.ended(turn)

    def _begin_in_company(self, now_ms: int) -> None:
        """Begin all suspects that wait: what is in work would keep each of them from being alone."""
        turn, self._present = self._present, None
        waiting = [turn, *self._waiting] if turn is not None else []
        self._waiting.clear()
        for turn in waiting:
            turn.begin(turn, now_ms)
        self._let_go(now_ms)


def _longest_ms(turn: Turn) -> int:
    return TURN_MS << min(max(turn.suspect.deaths - 1, 0), _MOST_DOUBLED)


_all: Final[WeakSet[Turns]] = WeakSet()


@atexit.register
def _end_in_order() -> None:
    """Remove the marks of consumers that this process has not shut down: it ends by itself, and no message ends it."""
    for turns in list(_all):
        if turns.process == os.getpid():
            for member in list(turns.members):
                member.leave_marks()
