"""A runner by hand: time passes when a test says so, and every order of turns is possible."""

from __future__ import annotations

import heapq
import inspect
import os
import weakref
from collections.abc import Callable, Coroutine, Iterator
from datetime import timedelta
from typing import Any, Final, TypeVar

from librmq.clock import ManualClock
from librmq.errors import EndlessLoopError, NotIdleError
from librmq.override import override
from librmq.runtime import _lazy_asyncio as asyncio
from librmq.runtime.runner import NEVER, Runner, Step, TimePasses, Turn, Work

_T = TypeVar("_T")
_MOST_STEPS_AT_ONCE: Final = 1_000_000
_PATIENCE_S: Final = 10
"""Seconds of real time in which one of the waiting coroutines has to end."""
_LOOP_PASSES: Final = 20
"""Turns of the event loop that other tasks get before time moves."""
_MOST_ROUNDS_AT_ONCE: Final = 100_000


class ManualRunner(Runner):
    """Runs all work in the calling thread, with a clock that stands still between calls of `advance`.

    Not thread-safe.
    """

    def __init__(self, clock: ManualClock | None = None) -> None:
        self.manual_clock: ManualClock = clock or ManualClock()
        super().__init__(self.manual_clock)
        self.paused: list[Work] = []
        """Paused work; only an explorer pauses any."""
        self._tasks: dict[asyncio.Task[None], Coroutine[Any, Any, object]] = {}
        self._async_runner: asyncio.Runner | None = None

    @override
    def __repr__(self) -> str:
        return f"<ManualRunner at {self.now_ms()} ms>"

    def options(self, until_ms: int) -> Iterator[Turn]:
        """Yield the possible next turns, the usual one first: due steps, ready work, paused work, time."""
        now = self.now_ms()
        top = self._top()
        if top is not None and (top.at or 0) <= now:
            yield top
            due = [entry for entry in self._heap if entry[0] <= now]
            for at, _, step in sorted(due) if len(due) > 1 else ():
                if step.at == at and step is not top:
                    yield step
        yield from list(self.ready)
        yield from list(self.paused)
        if self._tasks:
            return  # time stands while a coroutine runs, as it does while a function runs
        if self.ready or self.paused:
            later = [at for at, _, step in self._heap if step.at == at and now < at <= until_ms]
        else:
            later = [top.at] if top is not None and top.at is not None and now < top.at <= until_ms else []
        if later:
            yield TimePasses(min(later), self.manual_clock.move_to)

    def pick(self, options: Iterator[Turn]) -> Turn | None:
        """Return the turn to take; None ends the run."""
        return next(options, None)

    def is_over(self) -> bool:
        """Return whether no more turns may be taken, as after a failure in a test."""
        return False

    @override
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
        """Like `advance`; coroutines run on the calling event loop, and time stands while one of them runs.

        Before time moves, other tasks of the loop go on, which may wait for what a turn has done.

        Raises:
            EndlessLoopError: Turns and tasks follow each other without time passing.
            NotIdleError: No running coroutine ends within 10 seconds of real time.
        """
        until = self.now_ms() + ms
        await self.take_turns_async(until, self._take_turns)
        self.manual_clock.move_to(max(until, self.now_ms()))

    async def take_turns_async(self, until_ms: int, take: Callable[[int], object]) -> None:
        """Take all turns up to a time by ``take(until_ms)``; time moves when nothing else in the loop goes on.

        Raises:
            EndlessLoopError: Turns and tasks follow each other without time passing.
            NotIdleError: No running coroutine ends within 10 seconds of real time.
        """
        take(self.now_ms())
        rounds, at = 0, self.now_ms()
        while True:
            rounds = rounds + 1 if self.now_ms() == at else 0
            at = self.now_ms()
            if rounds > _MOST_ROUNDS_AT_ONCE:
                raise EndlessLoopError(
                    f"tasks of the event loop have caused turns {rounds:,} times without time passing: do messages "
                    "that one of them sends come back to it?"
                )
            if self._tasks:
                await self._wait_for_task()
                take(self.now_ms())
            elif await self._other_tasks_cause_turns():
                take(self.now_ms())
            elif (due := self.next_due_ms()) is not None and due <= until_ms:
                take(max(due, self.now_ms()))
            else:
                return

    async def _other_tasks_cause_turns(self) -> bool:
        """Let other tasks of the loop go on; return whether there is something to do now."""
        for _ in range(_LOOP_PASSES):
            await asyncio.sleep(0)
            due = self.next_due_ms()
            if self.ready or (due is not None and due <= self.now_ms()):
                return True
        return False

    async def _wait_for_task(self) -> None:
        done, _ = await asyncio.wait(self._tasks, timeout=_PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            labels = sorted(work.label for work in self.running)
            places = sorted({_place(coroutine) for coroutine in self._tasks.values()})
            raise NotIdleError(
                f"still running after {_PATIENCE_S} s of real time: {', '.join(labels[:5])}, waiting at "
                f"{', '.join(places[:5])}: time stands until listeners end, so they can't wait for later messages"
            )

    def _take_picked_turns(self, until_ms: int) -> None:
        """Take the turns that `pick` returns: the `_take_turns` of a runner that overrides `pick`."""
        steps, at = 0, self.now_ms()
        while (turn := self.pick(self.options(until_ms))) is not None:
            if isinstance(turn, Step):
                steps += 1
                self._take_step(turn, steps)
            else:
                turn.go(self)
            if self.now_ms() != at:
                steps, at = 0, self.now_ms()

    def _take_turns(self, until_ms: int) -> None:
        """Take the first of the `options` repeatedly, without making the others."""
        heap, ready, clock = self._heap, self.ready, self.manual_clock
        steps, now = 0, clock.now_ms()
        while not self.is_over():
            # Also by hand the lock is needed: other threads, such as a server's, may wake steps meanwhile.
            with self.lock:
                top = self._top() if heap else None
                at = NEVER if top is None else top.at or 0
                is_due = top is not None and at <= now
                if top is not None and is_due:
                    steps += 1
                    self._take_step(top, steps)
                elif not ready:
                    if at > until_ms or self._tasks:  # time stands while a coroutine runs
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

    @override
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
        self._tasks[task] = coroutine

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.pop(task, None)
            self.running.discard(work)
            coroutine.close()  # a task that was cancelled before its first step has not awaited it

        task.add_done_callback(ended)

    def shutdown(self, timeout: float | timedelta = 0) -> bool:
        """Close the event loop; return whether all work has ended. Does not wait."""
        if self._async_runner is not None:
            self._async_runner.close()
            self._async_runner = None
        return not self.running


def _place(coroutine: Coroutine[Any, Any, object]) -> str:
    """Return file and line at which the first of a coroutine's callers outside of librmq waits."""
    library = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    awaited: Any = coroutine
    while inspect.iscoroutine(awaited) and (frame := awaited.cr_frame) is not None:
        if not frame.f_code.co_filename.startswith(library):
            return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        awaited = awaited.cr_await
    return "an unknown place"
