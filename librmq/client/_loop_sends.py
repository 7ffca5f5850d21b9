"""The sends of an event loop to brokers in other processes."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final, cast

from librmq.errors import BrokerUnreachableError, RmqError
from librmq.protocol import Endpoint, PendingSend, SendLater, SendMessage, SendResponse

if TYPE_CHECKING:
    import asyncio

_LOOK_AGAIN_S: Final = 0.1


class _Pending(PendingSend):
    __slots__ = ("answer", "deadline", "together")

    def __init__(self, send: SendMessage, answer: asyncio.Future[SendResponse | None], deadline: float) -> None:
        super().__init__(send)
        self.answer = answer
        self.deadline = deadline
        self.together: SendLater | None = None


class LoopSends:
    """Sends of one event loop: those that begin in one turn go out together, and their outcomes come together.

    Two to three times as many messages a second pass than by a thread for each send, which would wait for its answer.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._unsent: dict[Endpoint, list[_Pending]] = {}
        self._under_way: set[_Pending] = set()
        self._next_look = math.inf
        self._look: asyncio.TimerHandle | None = None
        self._ended: deque[Sequence[PendingSend]] = deque()
        self._is_woken = False
        """Whether the loop is about to take what has ended."""

    def begin(self, endpoint: Endpoint, send: SendMessage, timeout_ms: float) -> asyncio.Future[SendResponse | None]:
        """Return the outcome to come of a send; None if the caller has to send the message by itself."""
        loop = self.loop
        answer: asyncio.Future[SendResponse | None] = loop.create_future()
        now = loop.time()
        deadline = now + timeout_ms / 1000
        pending = _Pending(send, answer, deadline)
        self._under_way.add(pending)
        if not self._unsent:
            loop.call_soon(self._send)
        self._unsent.setdefault(endpoint, []).append(pending)
        # Plan the look again also if its time is past: the exception of a signal's handler can have ended it at its
        # begin.
        if deadline < self._next_look or self._next_look < now:
            former, self._look = self._look, loop.call_at(deadline, self._end_late)
            self._next_look = deadline
            if former is not None:
                former.cancel()
        return answer

    def _send(self) -> None:
        unsent, self._unsent = self._unsent, {}
        try:
            for endpoint, sends in unsent.items():
                open_sends = [pending for pending in sends if not pending.answer.done()]
                # Cancelled sends are not sent, and no outcome will remove them.
                if len(open_sends) < len(sends):
                    self._under_way.difference_update(set(sends).difference(open_sends))
                together = SendLater(open_sends, self._note_ends)
                for pending in open_sends:
                    pending.together = together
                # An error here belongs to one message of many. The caller sends each again by itself, and gets the
                # error of its own.
                with suppress(RmqError):
                    if not open_sends or endpoint.call(together):
                        unsent[endpoint] = []
        finally:
            for sends in unsent.values():
                for pending in sends:
                    self._end(pending, None)

    def _note_ends(self, sends: Sequence[PendingSend]) -> None:
        self._ended.append(sends)
        # One wake-up serves all ends until the loop takes them. The flag is cleared before they are taken, so an end
        # that is noted meanwhile wakes the loop again.
        if not self._is_woken:
            self._is_woken = True
            # A closed loop has no coroutine that could wait for the outcome.
            with suppress(RuntimeError):
                self.loop.call_soon_threadsafe(self._take_ended)

    def _take_ended(self) -> None:
        self._is_woken = False
        while self._ended:
            for pending in self._ended[0]:
                self._end(cast("_Pending", pending), pending.outcome)
            # Remove the entry after its sends have ended. The exception of a signal's handler can come in between, and
            # a removed entry would leave coroutines waiting for good.
            self._ended.popleft()

    def _end(self, pending: _Pending, outcome: SendResponse | RmqError | None) -> None:
        answer = pending.answer
        # An answer that is done was cancelled, or has its error.
        if not answer.done():
            if isinstance(outcome, BrokerUnreachableError) and pending.together is not None:
                outcome = pending.together.explain(outcome)
            if isinstance(outcome, RmqError):
                answer.set_exception(outcome)
            else:
                answer.set_result(outcome)
        self._under_way.discard(pending)

    def _end_late(self) -> None:
        now = self.loop.time()
        # Take what is left over here: usually its own turn comes, but the exception of a signal's handler can have
        # ended that.
        if self._ended or self._unsent:
            self._take_ended()
            self._send()
        for pending in [pending for pending in self._under_way if pending.deadline <= now]:
            error = None if pending.together is None else pending.together.give_up(pending)
            if error is not None or pending.together is None:
                self._end(pending, error)
            else:  # its outcome is about to come, or its endpoint is about to pass it on
                pending.deadline = now + _LOOK_AGAIN_S
        self._next_look = min((pending.deadline for pending in self._under_way), default=math.inf)
        if self._next_look < math.inf:
            self._look = self.loop.call_at(self._next_look, self._end_late)
