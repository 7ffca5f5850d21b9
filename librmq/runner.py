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
from typing import Any, Final, Protocol, TypeVar, cast

from librmq.clock import Clock, ManualClock, SystemClock
from librmq.errors import EndlessLoopError, NotIdleError, RunnerClosedError, RunnerError

__all__ = ["ManualRunner", "Owner", "Runner", "Step", "ThreadRunner", "Work"]

_log = logging.getLogger("librmq.runner")
_T = TypeVar("_T")
_NEVER: Final = 1 << 62
_SLICE_MS: Final = 5
"""So long a thread takes one step after the other; then others get the lock."""
_YIELD_S: Final = 0.0005
_WATCH_S: Final = 0.001
_MANY: Final = 32
"""Listeners are swift when so many begin within `_WATCH_S`,"""
_FEW: Final = 10
"""and are not when it is fewer than that."""
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
            self._apply(work, result, error)

    def _apply(self, work: Work, result: object, error: Exception | None) -> None:
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

    A worker is *parked* (it waits for its turn), *looking* (awake, and it looks at steps and ready work before it
    parks), or in user code. Whoever makes something due rouses a worker only if none is looking. Where listeners are
    swift, a worker that leaves ready work behind rouses nobody either, since waking a thread takes longer than what it
    would do: the clock thread then sees to it, every millisecond, that the work does not wait for a listener that is
    swift no more.
    """

    def __init__(self, clock: Clock | None = None, *, max_threads: int = 512) -> None:
        super().__init__(clock or SystemClock())
        self._clock_turn = threading.Condition(self.lock)
        self._max_threads = max_threads
        self._threads: list[threading.Thread] = []
        self._parked: list[threading.Lock] = []  # of each parked worker the lock that it waits for; the last goes first
        self._looking = 0
        self._workers = 0
        self._holder_looks = False  # whoever holds the lock is a thread of ours that looks again before it waits
        self._sleeps_until = 0  # 0 while the clock thread is awake
        self._begun = 0  # how often a worker has begun with user code
        self._is_swift = False
        self._is_watched = False  # by the clock thread, which has
        self._seen_begun = 0  # seen so many then
        self._many_since = 0.0  # when the last `_MANY` began
        self._stopping = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._clock_runs = False
        _runners.add(self)

    def _start(self, target: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=target, name=f"librmq-{name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _signal(self, at: int) -> None:
        if self._holder_looks or self._stopping:
            return
        if at > 0 and at > self.now_ms():
            self._signal_clock(at)
        elif not self._looking:
            self._rouse()

    def _signal_clock(self, at: int) -> None:
        if not self._clock_runs:
            self._clock_runs = True
            self._start(self._run_clock, "clock")
        elif at < self._sleeps_until:
            self._clock_turn.notify()

    def _rouse(self) -> None:
        """Have one more worker look."""
        if self._parked:
            self._looking += 1
            self._parked.pop().release()
        elif len(self._threads) < self._max_threads:
            self._looking += 1
            self._workers += 1
            self._start(self._run_worker, f"worker-{self._workers}")
        elif not self.ready and self._clock_runs:
            self._clock_turn.notify()  # every worker is in user code: steps go on

    def _run_steps(self) -> Step | None:
        """Take the due steps, for a slice of time; gives the next one, which may be due by then."""
        begin = now = self.now_ms()
        while (top := self._top()) is not None and (top.at or 0) <= now:
            if now - begin > _SLICE_MS:
                break  # a long backlog: others want the lock too
            heapq.heappop(self._heap)
            try:
                top.go(self)
            except Exception:
                _log.exception("%s: librmq's own step has failed", top.label)
            now = self.now_ms()
        return top

    def _run_clock(self) -> None:
        with self.lock:
            while not self._stopping:
                self._holder_looks = True
                top = self._run_steps()
                self._holder_looks = False
                if self.ready and not self._looking and not self._is_watched:
                    self._rouse()
                wait_s = None
                self._sleeps_until = _NEVER
                if top is not None:
                    self._sleeps_until = top.at or 0
                    wait_s = max(_YIELD_S, (self._sleeps_until - self.now_ms()) / 1000)
                if self._is_watched:
                    wait_s = _WATCH_S if wait_s is None else min(wait_s, _WATCH_S)
                was_told = self._clock_turn.wait(wait_s)
                self._sleeps_until = 0
                if self._is_watched and not was_told:
                    self._look_at_the_swift()

    def _look_at_the_swift(self) -> None:
        """See whether what was left to a worker in user code is taken."""
        if not self.ready:
            self._is_watched = False
        elif self._begun - self._seen_begun < _FEW:
            self._is_watched = self._is_swift = False
        self._seen_begun = self._begun

    def _leave_ready_work(self) -> None:
        """A worker is about to begin with user code, there is more, and no other is looking."""
        if not self._is_swift:
            self._rouse()
        elif not self._is_watched:
            self._is_watched, self._seen_begun = True, self._begun
            if self._clock_runs:
                self._clock_turn.notify()
            else:
                self._signal_clock(0)

    def _run_worker(self) -> None:
        turn = threading.Lock()
        turn.acquire()
        with self.lock:
            work = self._next_work(turn)
        while work is not None:
            result: object = None
            error: Exception | None = None
            try:
                result = work.call()
            except Exception as raised:
                error = raised
            except BaseException as raised:
                error = _failure(work, raised)
            is_under_way = result is not None and asyncio.iscoroutine(result)
            if is_under_way:
                self._launch(work, cast("Coroutine[Any, Any, object]", result))
            with self.lock:
                self._looking += 1
                if not is_under_way:
                    self._holder_looks = True
                    try:
                        self._apply(work, result, error)
                    finally:
                        self._holder_looks = False
                work = self._next_work(turn)

    def _next_work(self, turn: threading.Lock) -> Work | None:
        """Take the due steps, and what is ready or will be; None when all ends."""
        lock, ready = self.lock, self.ready
        while not self._stopping:
            self._holder_looks = True
            top = self._run_steps()
            self._holder_looks = False
            if top is not None and top.at is not None:
                self._signal_clock(top.at)
            if ready and not (self._is_swift and self._looking > 1):
                work = ready.popleft()
                self.running.add(work)
                self._looking -= 1
                self._begun += 1
                if not self._begun % _MANY:
                    begin, self._many_since = self._many_since, self.clock.monotonic()
                    self._is_swift |= self._many_since - begin < _WATCH_S
                if ready and not self._looking:
                    self._leave_ready_work()
                return work
            if not ready and top is not None and (top.at or 0) <= self.now_ms():
                seconds = _YIELD_S
            else:
                seconds = -1
                self._looking -= 1
                self._parked.append(turn)
            lock.release()
            turn.acquire(timeout=seconds)
            lock.acquire()
        return None

    def _launch(self, work: Work, coroutine: Coroutine[Any, Any, object]) -> None:
        async def run() -> None:
            result: object = None
            error: Exception | None = None
            try:
                result = await coroutine
            except Exception as raised:
                error = raised
            except BaseException as raised:
                self._finish(work, None, _failure(work, raised))
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
            while self._parked:
                self._parked.pop().release()
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._loop.stop)
        deadline = self.clock.monotonic() + timeout
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - self.clock.monotonic()))
        with self.lock:
            return sorted(work.label for work in self.running)


def _failure(work: Work, error: BaseException) -> RunnerError:
    """Of a thread of ours nobody takes what is no `Exception`: it is a failure of the listener like any other."""
    failure = RunnerError(f"{work.label}: ended by {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


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

    def _take_turns(self, until_ms: int) -> None:
        if type(self).pick is ManualRunner.pick:
            self._take_usual_turns(until_ms)
            return
        taken, at = 0, self.now_ms()
        while (turn := self.pick(self.options(until_ms))) is not None:
            if isinstance(turn, Step):
                taken += 1
                self._take_step(turn, taken)
            else:
                turn.go(self)
            if self.now_ms() != at:
                taken, at = 0, self.now_ms()

    def _take_usual_turns(self, until_ms: int) -> None:
        """Take the first of the `options` again and again, without making the others."""
        heap, ready, clock = self._heap, self.ready, self.manual_clock
        taken, now = 0, clock.now_ms()
        while True:
            top = self._top() if heap else None
            at = _NEVER if top is None else top.at or 0
            if top is not None and at <= now:
                taken += 1
                self._take_step(top, taken)
            elif ready:
                ready[0].go(self)
            elif at <= until_ms:
                clock.move_to(at)
            else:
                return
            if clock.now_ms() != now:
                taken, now = 0, clock.now_ms()

    def _take_step(self, step: Step, taken: int) -> None:
        if taken > _MOST_STEPS_AT_ONCE:
            raise EndlessLoopError(f"{step.label}: {taken:,} turns without time passing")
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
        runner._parked.clear()
    _runners.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
