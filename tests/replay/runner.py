"""A runner by hand that follows a recording: listeners end when the recorded ones did."""

from __future__ import annotations

import types
from collections.abc import Coroutine, Generator, Sequence
from typing import Any, TypeVar

from librmq.clock import ManualClock
from librmq.message import MessageQueue
from librmq.runner import ManualRunner, Work

__all__ = ["ReplayRunner", "until"]

T = TypeVar("T")


class ReplayRunner(ManualRunner):
    """Coroutines wait for events of the recording, named by their ``seq``; `resume` lets one go on."""

    def __init__(self, now_ms: int) -> None:
        super().__init__(ManualClock(now_ms))
        self.reached = -1
        """The ``seq`` of the last event that has happened."""
        self.first_queue: tuple[str, int] | None = None
        """Broker and queue where a producer begins that has no queue in turn yet."""
        self._waiting: dict[int, list[tuple[Work, Coroutine[Any, Any, object]]]] = {}

    def play_to(self, at_ms: int) -> None:
        """Take all turns up to a time."""
        self._take_turns(at_ms)
        self.manual_clock.move_to(max(at_ms, self.now_ms()))

    def resume(self, seq: int) -> None:
        """The event has happened: whoever waits for it goes on."""
        self.reached = max(self.reached, seq)
        for work, coroutine in self._waiting.pop(seq, []):
            self._go_on(work, coroutine)

    def choose(self, kind: str, options: Sequence[T]) -> T:
        if kind.startswith("first queue of ") and self.first_queue is not None:
            return self._first(options)
        return super().choose(kind, options)

    def _first(self, options: Sequence[T]) -> T:
        """The options count the queues of a topic by broker and number."""
        assert self.first_queue is not None
        broker_name, number = self.first_queue
        at = self.queues.index((broker_name, number)) if (broker_name, number) in self.queues else number
        return options[at % len(options)]

    queues: list[tuple[str, int]] = []
    """The queues of the topic that is sent to, as far as they are known."""

    def know(self, queues: Sequence[MessageQueue]) -> None:
        """These are the queues of the topic that is about to be sent to."""
        self.queues = [(queue.broker_name, queue.queue_id) for queue in queues]

    def _launch(self, work: Work, coroutine: Coroutine[Any, Any, object]) -> None:
        self._go_on(work, coroutine)

    def _go_on(self, work: Work, coroutine: Coroutine[Any, Any, object]) -> None:
        try:
            seq = coroutine.send(None)
            while seq <= self.reached:
                seq = coroutine.send(None)
        except StopIteration as end:
            self._finish(work, end.value, None)
        except Exception as error:
            self._finish(work, None, error)
        else:
            self._waiting.setdefault(seq, []).append((work, coroutine))


@types.coroutine
def until(seq: int) -> Generator[int, None, None]:
    """Wait for an event of the recording."""
    yield seq
