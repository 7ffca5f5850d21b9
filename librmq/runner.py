"""Who takes the next turn: librmq's own steps and the user's code, run by threads or by hand.

::

    Step   librmq's own work: short, never blocks, runs no user code; under the runner's lock
    Work   user code (a listener, a check-back): without the lock; its outcome is applied under it

Broker and clients see six names of a runner: ``now_ms``, ``lock``, ``wake``, ``submit``, ``point``, ``choose`` (and
coroutines ``offload``). They neither sleep nor wait: a step says when it is due next, or None where it stands in the
list of whoever will wake it. The usual order is due steps, ready work, then time; the runners differ only in who takes
the next turn.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, Final, Protocol, TypeVar

from librmq.clock import Clock, ManualClock, SystemClock
from librmq.errors import EndlessLoopError, NotIdleError, RunnerClosedError, RunnerError

__all__ = ["ManualRunner", "Owner", "Runner", "Step", "ThreadRunner", "Work"]

_log = logging.getLogger("librmq.runner")
_T = TypeVar("_T")
_NEVER: Final = 1 << 62
_SLICE_MS: Final = 5
"""So long a thread takes one step after the other; then others get the lock."""
_YIELD_S: Final = 0.0005
_MOST_STEPS_AT_ONCE: Final = 1_000_000


class Owner(Protocol):
    """The process that a turn belongs to, as far as there are several in one: the turns of a dead one are not taken."""

    dead: bool


class Step:
    """A turn of librmq's own. ``run_due(now_ms)`` does what is due, and says when it is due next (None: unknown).

    ``label`` is stable from run to run: process, group, topic, queue; never an id that was drawn. ``at`` is when it is
    due, None where somebody will wake it.
    """

    __slots__ = ("at", "label", "owner", "run_due")

    def __init__(self, label: str, run_due: Callable[[int], int | None], owner: Owner | None = None) -> None:
        self.label = label
        self.run_due = run_due
        self.owner = owner
        self.at: int | None = None

    def go(self, runner: Runner) -> None:
        """Take the turn, under the runner's lock."""
        self.at = None  # first, so that whoever wakes it meanwhile counts
        if self.owner is None or not self.owner.dead:
            due = self.run_due(runner.now_ms())
            if due is not None:
                runner.wake(self, due)

    def __repr__(self) -> str:
        return f"Step({self.label!r}, at={self.at})"


class Work:
    """A turn of the user's: ``call()`` without the lock, then ``done(result, error)`` under it.

    ``call`` may return a coroutine, which runs on ``loop`` (None: one of the runner's own). ``about`` names what it
    works on (for a listener the addresses of the messages: broker's name and physical offset).
    """

    __slots__ = ("about", "call", "done", "label", "loop", "owner")

    def __init__(
        self,
        label: str,
        call: Callable[[], object],
        done: Callable[[Any, Exception | None], None],
        owner: Owner | None = None,
        *,
        loop: asyncio.AbstractEventLoop | None = None,
        about: Sequence[tuple[str, int]] = (),
    ) -> None:
        self.label = label
        self.call = call
        self.done = done
        self.owner = owner
        self.loop = loop
        self.about = about

    def go(self, runner: Runner) -> None:
        """Take the turn."""
        runner.ready.remove(self)
        runner.perform(self)

    def __repr__(self) -> str:
        return f"Work({self.label!r})"


class Runner:
    """What all runners share: the heap of steps, the work that is ready and the work that runs."""

    now_ms: Callable[[], int]
    """The time of day in milliseconds since 1970 (UTC)."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.now_ms = clock.now_ms
        self.lock = threading.RLock()
        self.ready: deque[Work] = deque()
        """Work that waits for its turn."""
        self.running: set[Work] = set()
        """Work that has begun and not ended, coroutines that wait included."""
        self._heap: list[tuple[int, int, Step]] = []
        self._count = itertools.count()

    # ---- the six names

    def wake(self, step: Step, at: int = 0) -> None:
        """Let ``step`` be due at ``at`` (ms since 1970; 0: at once), unless it is due earlier. Under the lock."""
        if step.at is None or at < step.at:
            step.at = at
            heapq.heappush(self._heap, (at, next(self._count), step))
            self._signal(at)

    def submit(self, work: Work) -> None:
        """Let ``work`` run as soon as there is somebody for it. Under the lock."""
        self.ready.append(work)
        self._signal(0)

    def point(self, label: str) -> None:
        """Say that others may run here; called without the lock at each of librmq's calls within user code."""

    def choose(self, kind: str, options: Sequence[_T]) -> _T:
        """One of what the real thing may do; the first is the usual one."""
        return options[0]

    async def offload(self, call: Callable[[], _T]) -> _T:
        """Run what may wait for a disk, without blocking the event loop that this is awaited in."""
        return call()

    # ---- taking turns

    def perform(self, work: Work) -> None:
        """Run the user's code, without the lock, and apply its outcome. A `BaseException` goes up."""
        with self.lock:
            self.running.add(work)
        result: object = None
        error: Exception | None = None
        try:
            result = work.call()
        except Exception as raised:
            error = raised
        except BaseException as raised:
            self._escaped(work, raised)
            return
        if result is not None and asyncio.iscoroutine(result):
            self._launch(work, result)
        else:
            self._finish(work, result, error)

    def _escaped(self, work: Work, error: BaseException) -> None:
        """User code ended by what is no `Exception` (pytest.fail, Ctrl-C, SystemExit): it goes up."""
        with self.lock:
            self.running.discard(work)
        raise error

    def _finish(self, work: Work, result: object, error: Exception | None) -> None:
        with self.lock:
            self.running.discard(work)
            if work.owner is None or not work.owner.dead:
                work.done(result, error)

    def _launch(self, work: Work, coroutine: Coroutine[Any, Any, object]) -> None:
        raise NotImplementedError

    def _signal(self, at: int) -> None:
        """Something is due at ``at``."""

    def _top(self) -> Step | None:
        """The step that is due first; entries of steps that were woken for earlier, or have run, are stale."""
        heap = self._heap
        while heap and heap[0][2].at != heap[0][0]:
            heapq.heappop(heap)
        return heap[0][2] if heap else None


class ThreadRunner(Runner):
    """Runs by threads: one that sleeps until the next due time, and workers, made on demand, for steps and user code.

    Thread-safe. `close` ends all of them. Of no use in a child process after a fork.
    """

    def __init__(self, clock: Clock | None = None, *, max_threads: int = 512) -> None:
        super().__init__(clock or SystemClock())
        self._clock_turn = threading.Condition(self.lock)
        self._worker_turn = threading.Condition(self.lock)
        self._max_threads = max_threads
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._workers = 0
        self._sleeps_until = 0  # 0 while the clock thread is awake
        self._stopping = False
        self._mine = threading.local()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._clock_runs = False
        _runners.add(self)

    def _start(self, target: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=target, name=f"librmq-{name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _signal(self, at: int) -> None:
        if self._stopping or getattr(self._mine, "takes_turns", False):
            return  # this thread looks again before it waits
        if at > 0 and at > self.now_ms():
            if not self._clock_runs:
                self._clock_runs = True
                self._start(self._run_clock, "clock")
            elif at < self._sleeps_until:
                self._clock_turn.notify()
        elif self._idle:
            self._worker_turn.notify()
        elif self._workers > len(self.running):
            pass  # one of them is about to look again
        elif len(self._threads) < self._max_threads:
            self._workers += 1
            self._start(self._run_worker, f"worker-{self._workers}")
        elif not self.ready and self._clock_runs:
            self._clock_turn.notify()  # every worker is in user code: steps go on

    def _run_steps(self) -> Step | None:
        """Take the due steps, for a slice of time; gives the next one, which may be due by then."""
        begin = self.now_ms()
        while (top := self._top()) is not None and (top.at or 0) <= (now := self.now_ms()):
            if now - begin > _SLICE_MS:
                break  # a long backlog: others want the lock too
            heapq.heappop(self._heap)
            try:
                top.go(self)
            except Exception:
                _log.exception("%s: librmq's own step has failed", top.label)
        return top

    def _run_clock(self) -> None:
        mine = self._mine
        with self.lock:
            while not self._stopping:
                mine.takes_turns = True
                top = self._run_steps()
                mine.takes_turns = False
                if self.ready:
                    self._signal(0)
                at = _NEVER if top is None else top.at or 0
                self._sleeps_until = at
                self._clock_turn.wait(None if top is None else max(_YIELD_S, (at - self.now_ms()) / 1000))
                self._sleeps_until = 0

    def _run_worker(self) -> None:
        mine = self._mine
        mine.is_worker = True
        while True:
            with self.lock:
                while True:
                    if self._stopping:
                        return
                    mine.takes_turns = True
                    top = self._run_steps()
                    mine.takes_turns = False
                    if top is not None and top.at is not None:
                        self._signal_clock(top.at)
                    if self.ready:
                        break
                    if top is not None and (top.at or 0) <= self.now_ms():
                        self._worker_turn.wait(_YIELD_S)
                        continue
                    self._idle += 1
                    self._worker_turn.wait()
                    self._idle -= 1
                work = self.ready.popleft()
                self.running.add(work)  # so that this worker counts as busy
                if self.ready:
                    self._signal(0)  # somebody else for the rest
            self.perform(work)

    def _escaped(self, work: Work, error: BaseException) -> None:
        """Of a thread of ours nobody takes it: it is a failure of the listener like any other."""
        failure = RunnerError(f"{work.label}: ended by {type(error).__name__}: {error}")
        failure.__cause__ = error
        self._finish(work, None, failure)

    def _signal_clock(self, at: int) -> None:
        if not self._clock_runs:
            self._clock_runs = True
            self._start(self._run_clock, "clock")
        elif at < self._sleeps_until:
            self._clock_turn.notify()

    def _finish(self, work: Work, result: object, error: Exception | None) -> None:
        mine = self._mine
        before = getattr(mine, "takes_turns", False)
        mine.takes_turns = getattr(mine, "is_worker", False)  # a worker looks at what is ready itself
        try:
            super()._finish(work, result, error)
        finally:
            mine.takes_turns = before

    def _launch(self, work: Work, coroutine: Coroutine[Any, Any, object]) -> None:
        async def run() -> None:
            result: object = None
            error: Exception | None = None
            try:
                result = await coroutine
            except Exception as raised:
                error = raised
            except BaseException as raised:
                self._escaped(work, raised)
                raise
            self._finish(work, result, error)

        loop = work.loop
        if loop is None or loop.is_closed():
            loop = self._own_loop()
        asyncio.run_coroutine_threadsafe(run(), loop)

    async def offload(self, call: Callable[[], _T]) -> _T:
        """Run what may wait for a disk, without blocking the event loop that this is awaited in."""
        return await asyncio.to_thread(call)

    def _own_loop(self) -> asyncio.AbstractEventLoop:
        with self.lock:
            if self._stopping:
                raise RunnerClosedError("the broker was closed: no listener starts any more")
            if self._loop is None:
                loop = self._loop = asyncio.new_event_loop()

                def run() -> None:
                    asyncio.set_event_loop(loop)
                    try:
                        loop.run_forever()
                    finally:
                        loop.close()

                self._start(run, "asyncio")
            return self._loop

    def close(self, timeout: float = 5.0) -> list[str]:
        """End the threads; clients have been shut down before. Gives the labels of work that runs on after ``timeout``.

        Waits at most ``timeout`` seconds in all.
        """
        with self.lock:
            self._stopping = True
            self._clock_turn.notify_all()
            self._worker_turn.notify_all()
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._loop.stop)
        deadline = self.clock.monotonic() + timeout
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - self.clock.monotonic()))
        with self.lock:
            return sorted(work.label for work in self.running)


class _TimePasses:
    """The last option of a runner by hand: let time pass up to the next due step."""

    __slots__ = ("at", "label")

    def __init__(self, at: int) -> None:
        self.at = at
        self.label = "time"

    def go(self, runner: Runner) -> None:
        clock = runner.clock
        assert isinstance(clock, ManualClock)
        clock.move_to(max(self.at, clock.now_ms()))


Turn = Step | Work | _TimePasses


class ManualRunner(Runner):
    """Runs by hand, in the thread that asks, under a clock that stands still between: `advance` takes all turns.

    Not thread-safe.
    """

    def __init__(self, clock: ManualClock | None = None) -> None:
        self.manual_clock = clock or ManualClock()
        super().__init__(self.manual_clock)
        self.paused: list[Work] = []
        """Work that has begun and lets others go first; only what explores has any."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._async_runner: asyncio.Runner | None = None

    def options(self, until_ms: int) -> Iterator[Turn]:
        """The turns that may come next, the usual one first: due steps, ready work, paused work, time."""
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
            yield _TimePasses(min(later))

    def pick(self, options: Iterator[Turn]) -> Turn | None:
        """The turn to take; None ends the run."""
        return next(options, None)

    def advance(self, ms: int = 0) -> None:
        """Let ``ms`` milliseconds pass, and take every turn that is due on the way.

        `EndlessLoopError` where turns follow each other without time passing, `NotIdleError` where a coroutine has not
        ended.
        """
        until = self.now_ms() + ms
        self._take_turns(until)
        if self.running:
            labels = sorted(work.label for work in self.running)
            raise NotIdleError(f"still running: {', '.join(labels[:5])}")
        self.manual_clock.move_to(max(until, self.now_ms()))

    async def advance_async(self, ms: int = 0) -> None:
        """As `advance`; coroutines run on the loop that this is awaited in."""
        until = self.now_ms() + ms
        while True:
            self._take_turns(until)
            if not self._tasks:
                break
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        self.manual_clock.move_to(max(until, self.now_ms()))

    def next_due_ms(self) -> int | None:
        """When the next step is due, None where nothing will happen by itself."""
        top = self._top()
        return None if top is None else top.at

    def _usual(self, until_ms: int) -> Turn | None:
        """The first of the `options`, without making the others."""
        top = self._top()
        if top is not None and (top.at or 0) <= self.now_ms():
            return top
        if self.ready:
            return self.ready[0]
        if self.paused:
            return self.paused[0]
        if top is not None and top.at is not None and top.at <= until_ms:
            return _TimePasses(top.at)
        return None

    def _take_turns(self, until_ms: int) -> None:
        is_usual = type(self).pick is ManualRunner.pick
        taken, at = 0, self.now_ms()
        while (turn := self._usual(until_ms) if is_usual else self.pick(self.options(until_ms))) is not None:
            if isinstance(turn, Step):
                taken += 1
                if taken > _MOST_STEPS_AT_ONCE:
                    raise EndlessLoopError(f"{turn.label}: {taken:,} turns without time passing")
                with self.lock:
                    if self._heap and self._heap[0][2] is turn:
                        heapq.heappop(self._heap)
                    turn.go(self)
            else:
                turn.go(self)
            if self.now_ms() != at:
                taken, at = 0, self.now_ms()

    def _launch(self, work: Work, coroutine: Coroutine[Any, Any, object]) -> None:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            if self._async_runner is None:
                self._async_runner = asyncio.Runner()
                weakref.finalize(self, self._async_runner.close)  # for those who never close this
            self._async_runner.run(self._run(work, coroutine))
            return
        task = loop.create_task(self._run(work, coroutine))
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

    def close(self, timeout: float = 0.0) -> list[str]:
        """Let go of the loop; gives the labels of work that has not ended."""
        if self._async_runner is not None:
            self._async_runner.close()
            self._async_runner = None
        return sorted(work.label for work in self.running)


_runners: weakref.WeakSet[ThreadRunner] = weakref.WeakSet()


def _after_fork() -> None:
    for runner in list(_runners):  # its threads are the parent's
        runner._stopping = True
        runner._threads.clear()
        runner.running.clear()
        runner.lock = threading.RLock()  # some thread of the parent may hold it
        runner._clock_turn = threading.Condition(runner.lock)
        runner._worker_turn = threading.Condition(runner.lock)
    _runners.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
