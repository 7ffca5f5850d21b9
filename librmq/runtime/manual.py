"""A runner without threads, under a clock that the caller moves."""

from __future__ import annotations

import asyncio
import heapq
import weakref
from collections.abc import Coroutine, Iterator
from datetime import timedelta
from typing import Any, Final

from librmq.clock import ManualClock
from librmq.errors import EndlessLoopError, NotIdleError
from librmq.runtime.runner import NEVER, Runner, Step, Turn, Work, _TimePasses

_MOST_STEPS_AT_ONCE: Final = 1_000_000


class ManualRunner(Runner):
    """Runs all work in the calling thread, with a clock that stands still between calls of `advance`.

    Not thread-safe.
    """

    def __init__(self, clock: ManualClock | None = None) -> None:
        self.manual_clock = clock or ManualClock()
        super().__init__(self.manual_clock)
        self.paused: list[Work] = []
        """Paused work; only an explorer pauses any."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._async_runner: asyncio.Runner | None = None

    def __repr__(self) -> str:
        return f"<ManualRunner at {self.now_ms()} ms>"

    def options(self, until_ms: int) -> Iterator[Turn]:
        """Yield the possible next turns, the usual one first: due steps, ready work, paused work, time."""
        now = self.now_ms()
        top = self._top()
        if top is not None and (top.at or 0) <= now:
            yield top
            for at, _, step in sorted(entry for entry in self._heap if entry[0] <= now):
                if step.at == at and step is not top:
                    yield step
        yield from list(self.ready)
        yield from list(self.paused)
        if self.ready or self.paused:
            later = [at for at, _, step in self._heap if step.at == at and now < at <= until_ms]
        else:
            later = [top.at] if top is not None and top.at is not None and now < top.at <= until_ms else []
        if later:
            yield _TimePasses(min(later), self.manual_clock.move_to)

    def pick(self, options: Iterator[Turn]) -> Turn | None:
        """Return the turn to take; None ends the run."""
        return next(options, None)

    def is_over(self) -> bool:
        """Return whether no more turns may be taken, as after a failure in a test."""
        return False

    def pass_time(self, seconds: float) -> None:
        """Move the clock, and take all turns that become due."""
        self.advance(round(1000 * seconds))

    def advance(self, ms: int = 0) -> None:
        """Let ``ms`` milliseconds pass, and take every turn that becomes due.

        Raises:
            EndlessLoopError: Turns follow each other without time passing.
            NotIdleError: A coroutine has not ended.
        """
        until = self.now_ms() + ms
        self._take_turns(until)
        if self.running:
            labels = sorted(work.label for work in self.running)
            raise NotIdleError(f"still running: {', '.join(labels[:5])}: in an event loop, await advance_async")
        self.manual_clock.move_to(max(until, self.now_ms()))

    async def advance_async(self, ms: int = 0) -> None:
        """Like `advance`; coroutines run on the calling event loop."""
        until = self.now_ms() + ms
        while True:
            self._take_turns(until)
            if not self._tasks:
                break
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        self.manual_clock.move_to(max(until, self.now_ms()))

    def next_due_ms(self) -> int | None:
        """Return when the next step is due, None if nothing is scheduled."""
        with self.lock:
            top = self._top()
            return None if top is None else top.at

    def _take_turns(self, until_ms: int) -> None:
        if type(self).pick is ManualRunner.pick:
            self._take_usual_turns(until_ms)
            return
        steps, at = 0, self.now_ms()
        while (turn := self.pick(self.options(until_ms))) is not None:
            if isinstance(turn, Step):
                steps += 1
                self._take_step(turn, steps)
            else:
                turn.go(self)
            if self.now_ms() != at:
                steps, at = 0, self.now_ms()

    def _take_usual_turns(self, until_ms: int) -> None:
        """Take the first of the `options` repeatedly, without making the others."""
        heap, ready, clock = self._heap, self.ready, self.manual_clock
        steps, now = 0, clock.now_ms()
        while not self.is_over():
            with self.lock:  # other threads may wake steps, for example a server's threads
                top = self._top() if heap else None
                at = NEVER if top is None else top.at or 0
                is_due = top is not None and at <= now
                if top is not None and is_due:
                    steps += 1
                    self._take_step(top, steps)
                elif not ready:
                    if at > until_ms:
                        return
                    clock.move_to(at)
            if ready and not is_due:
                ready[0].go(self)
            if clock.now_ms() != now:
                steps, now = 0, clock.now_ms()

    def _take_step(self, step: Step, steps: int) -> None:
        if steps > _MOST_STEPS_AT_ONCE:
            raise EndlessLoopError(f"{step.label}: {steps:,} turns without time passing")
        with self.lock:
            if self._heap and self._heap[0][2] is step:
                heapq.heappop(self._heap)
            step.go(self)

    def _launch(self, work: Work, coroutine: Coroutine[Any, Any, object]) -> None:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            if self._async_runner is None:
                self._async_runner = asyncio.Runner()
                weakref.finalize(self, self._async_runner.close)  # in case the runner is never shut down
            self._async_runner.run(self._run(work, coroutine))
            return
        task = loop.create_task(self._run(work, coroutine))
        work.cancel = task.cancel
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, work: Work, coroutine: Coroutine[Any, Any, object]) -> None:
        result: object = None
        error: Exception | None = None
        try:
            result = await coroutine
        except Exception as raised:
            error = raised
        except BaseException:
            self.running.discard(work)
            raise
        self._finish(work, result, error)

    def shutdown(self, timeout: float | timedelta = 0) -> bool:
        """Close the event loop; return whether all work has ended. Does not wait."""
        if self._async_runner is not None:
            self._async_runner.close()
            self._async_runner = None
        return not self.running
