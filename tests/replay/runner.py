"""A manual runner that follows a recording: its listeners end when the recorded ones did."""

from __future__ import annotations

import types
from collections.abc import Callable, Coroutine, Generator, Iterator, Sequence
from typing import Any, TypeVar

from librmq.clock import ManualClock
from librmq.runtime import ManualRunner
from librmq.runtime.runner import Step, Turn, Work

__all__ = ["ReplayRunner", "until"]

T = TypeVar("T")


class ReplayRunner(ManualRunner):
    """Coroutines wait for events of the recording, given by ``seq``; `resume` continues those of one event."""

    def __init__(self, now_ms: int) -> None:
        super().__init__(ManualClock(now_ms))
        self.reached = -1
        """The ``seq`` of the last event that has happened."""
        self.before_turn: Callable[[], None] | None = None
        """Called before each turn."""
        self._first_queue: tuple[str, int] | None = None
        self._queues: list[tuple[str, int]] = []
        self._waiting: dict[int, list[tuple[Work, Coroutine[Any, Any, object]]]] = {}

    def play_to(self, at_ms: int) -> None:
        """Take all turns that are due up to a time."""
        self._take_turns(at_ms)
        self.manual_clock.move_to(max(at_ms, self.now_ms()))

    def resume(self, seq: int) -> None:
        """Note that the event has happened, and continue the work that waits for it."""
        self.reached = max(self.reached, seq)
        for work, coroutine in self._waiting.pop(seq, []):
            self._go_on(work, coroutine)

    def begin_at(self, queue: tuple[str, int], queues: list[tuple[str, int]]) -> None:
        """Let a producer without a next queue start at this queue of a topic, given by broker and number."""
        self._first_queue, self._queues = queue, queues

    def choose(self, kind: str, options: Sequence[T]) -> T:
        if not kind.startswith("first queue of ") or self._first_queue is None:
            return super().choose(kind, options)
        options = sorted(options)  # type: ignore[type-var]  # they are numbers, from a random one on
        known = self._queues
        at = known.index(self._first_queue) if self._first_queue in known else self._first_queue[1]
        return options[at % len(options)]

    def _take_turns(self, until_ms: int) -> None:
        self._take_picked_turns(until_ms)

    def pick(self, options: Iterator[Turn]) -> Turn | None:
        if self.before_turn is not None:
            self.before_turn()
        return super().pick(options)

    def _launch(self, work: Work, coroutine: Coroutine[Any, Any, object]) -> None:
        self._go_on(work, coroutine)

    def _go_on(self, work: Work, coroutine: Coroutine[Any, Any, object]) -> None:
        try:
            seq, at_ms = coroutine.send(None)
            while seq <= self.reached and at_ms <= self.now_ms():
                seq, at_ms = coroutine.send(None)
        except StopIteration as end:
            self._finish(work, end.value, None)
        except Exception as error:
            self._finish(work, None, error)
        else:
            if seq > self.reached:
                self._waiting.setdefault(seq, []).append((work, coroutine))
            else:
                self.wake(Step(f"{work.label} goes on", lambda now_ms: self._go_on(work, coroutine)), at_ms)


@types.coroutine
def until(seq: int = -1, at_ms: int = 0) -> Generator[tuple[int, int], None, None]:
    """Wait until an event of the recording, or until a time."""
    yield seq, at_ms
