"""Time for the kit: takes turns up to a time, and finds calls that a test in an event loop did not await."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Awaitable, Callable, Coroutine, Generator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from librmq.errors import NotIdleError
from librmq.testing.kit_runner import KitRunner
from librmq.testing.process import LIBRARY

_T = TypeVar("_T")


class NotAwaitedError(AssertionError):
    """The test or a listener did not await a call."""


@dataclass(frozen=True)
class Elapsed(Awaitable["Elapsed"]):
    """The time that has passed. In an event loop, a test has to await it."""

    time: timedelta
    """How far the clock has moved."""
    _resume: Callable[[], Awaitable[timedelta]] | None = None
    place: str = ""
    """The line of the test that has to await it; empty if nothing is left to await."""

    def __await__(self) -> Generator[Any, None, Elapsed]:
        if self._resume is None:
            return self
        return Elapsed((yield from self._resume().__await__()))


class Driver:
    """Moves a kit's clock and takes its turns; ``start`` is called first, to start declared consumers."""

    def __init__(self, runner: KitRunner, start: Callable[[], None]) -> None:
        self.runner = runner
        self.clock = runner.manual_clock
        self._start = start
        self._unawaited: Elapsed | None = None
        self._async_calls: list[tuple[Coroutine[Any, Any, object], str]] = []

    def run(self, until: Callable[[], int], *, again: bool = False) -> Elapsed:
        """Take all turns up to the time that ``until()`` returns; with ``again``, repeat until time no longer moves."""
        self._check_awaited()
        begin = self.clock.now_ms()
        self._start()
        while True:
            at = until()
            self.take_turns(at)
            if self.runner.has_tasks:
                resume = partial(self._resume, until, at, begin, again)
                self._unawaited = Elapsed(timedelta(0), resume, _place_of_caller())
                return self._unawaited
            self.clock.move_to(max(at, self.clock.now_ms()))
            if not again or until() <= self.clock.now_ms():
                return Elapsed(timedelta(milliseconds=self.clock.now_ms() - begin))

    async def _resume(self, until: Callable[[], int], at: int, begin: int, again: bool) -> timedelta:
        """Finish `run` in the test's event loop, where coroutines of listeners continue."""
        self._unawaited = None
        while True:
            await self.runner.advance_async(max(0, at - self.clock.now_ms()))
            self.take_turns(at)
            if self.runner.has_tasks:
                continue
            at = until() if again else at
            if not again or at <= self.clock.now_ms():
                return timedelta(milliseconds=self.clock.now_ms() - begin)

    def take_turns(self, until_ms: int) -> None:
        """Take all turns up to a time; raise a listener's error, with a traceback of the user's code only."""
        __tracebackhide__ = True
        try:
            self.runner.take_turns(until_ms)
        except Exception as error:
            raise error.with_traceback(_own_traceback(error)) from error.__cause__
        if not self.runner.has_tasks and (waiting := self.runner.running - self.runner.late):
            labels = sorted(work.label for work in waiting)
            raise NotIdleError(f"still running: {', '.join(labels[:5])}")

    def noted_async_call(self, call: Coroutine[Any, Any, _T], what: str) -> Coroutine[Any, Any, _T]:
        """Record a coroutine that the test or a listener has to await, and return it."""
        self._async_calls = [
            entry for entry in self._async_calls if inspect.getcoroutinestate(entry[0]) != "CORO_CLOSED"
        ]
        self._async_calls.append((call, f"{what} at {_place_of_caller()}"))
        return call

    def check_awaited(self) -> None:
        """Look for calls that were not awaited.

        Raises:
            NotAwaitedError: A call was not awaited; the message names its line.
        """
        self._check_awaited()
        calls, self._async_calls = self._async_calls, []
        forgotten = [what for call, what in calls if inspect.getcoroutinestate(call) == "CORO_CREATED"]
        for call, _ in calls:
            call.close()
        if forgotten:
            raise NotAwaitedError(f"{', '.join(forgotten)} sent nothing: write `await` before the call")

    def _check_awaited(self) -> None:
        elapsed, self._unawaited = self._unawaited, None
        if elapsed is not None:
            raise NotAwaitedError(
                f"the call that moves time at {elapsed.place} was not awaited, so that coroutines of listeners did not "
                "end: write `await` before it"
            )


def _place_of_caller() -> str:
    """Return file and line of the calling user code."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(LIBRARY) and frame.f_back is not None:
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def _own_traceback(error: BaseException) -> TracebackType | None:
    """Return the traceback from the user's code on, or the whole one if none of it is user code."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_frame.f_code.co_filename.startswith(LIBRARY):
        traceback = traceback.tb_next
    return traceback or error.__traceback__
