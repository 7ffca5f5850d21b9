"""Runner with threads: one that sleeps until the next due time, and workers made on demand."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable, Collection, Coroutine
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, Final, TypeVar, cast

from librmq.clock import Clock, SystemClock, seconds_until, was_set_back
from librmq.config import to_seconds
from librmq.errors import LASTING, BrokerUnreachableError, RunnerClosedError
from librmq.override import override
from librmq.runtime import _lazy_asyncio as asyncio
from librmq.runtime.event_log import EventLog, StateLog
from librmq.runtime.locks import Inherited, Lock, Outside, RLock, is_held_here
from librmq.runtime.runner import AT_ONCE, NEVER, Runner, Step, Work, failure_of, is_coroutine, is_task_cancelled

_log = EventLog("librmq.runner")
_T = TypeVar("_T")
_NOT_APPLIED: Final = "%(work)s: its result could not be applied"
_SLICE_MS: Final = 5
"""Longest time in which a thread takes steps before it offers the lock to others."""
_YIELD_S: Final = 0.0005
_START_AGAIN_MS: Final = 1000
_CALLERS_MS: Final = 20
"""Time in which a caller has released the lock, and makes itself the calls of the application that waited for that."""
_MANY: Final = 32
_SWIFT_S: Final = 0.001
"""Listeners count as fast when one worker begins `_MANY` of them in this time."""
_FEW: Final = 50
_WATCH_S: Final = 0.005
"""They count as slow when fewer than `_FEW` begin in this time, the interpreter's switch interval."""


class ThreadRunner(Runner):
    """A runner with one thread that sleeps until the next due time, and workers for steps and user code.

    Thread-safe. `close` ends all threads. It does not work in a child process after a fork.

    A worker is *parked* (asleep), *searching* (checking for steps and ready work before it parks), or in user code. New
    due work wakes a worker only if no other is already searching or woken. If listeners are fast, a worker that leaves
    ready work behind wakes none either, because waking a thread takes longer than the work. The clock thread then
    checks every few milliseconds that the work does not wait for a slow listener.

    A worker that calls a listener is named after its group, ``ConsumeMessageThread_<group>_<number>`` as in
    RocketMQ, so that a dump of all threads can be searched by group. The numbers of a group begin with 1. A worker
    keeps its name until it gets other work, because a new name for each message takes time.

    A signal handler can raise in the main thread at any point. So waking a thread only releases the lock that it waits
    for, which is safe to repeat. Only the threads themselves change the counts.
    """

    def __init__(self, clock: Clock | None = None, *, max_threads: int = 512) -> None:
        super().__init__(clock or SystemClock())
        self._clock_turn = _turn()  # the lock that the clock thread waits for
        self._max_threads = max_threads
        self._threads: list[threading.Thread] = []
        self._parked: list[Lock] = []  # the lock of each parked worker; the last one wakes first
        self._searching = 0
        self._listener_names: dict[str, int] = {}  # number of workers of each name, while they are named after a group
        self._is_worker_woken = False  # a woken worker is about to search
        self._workers = 0
        self._holder_searches = False  # one of these threads holds the lock, and searches again before it waits
        self._sleeps_until = AT_ONCE  # while the clock thread is awake
        # Latest time at which a due time may have been found, since the clock was set back
        self._latest_ms = self.now_ms()
        self._begun = 0  # number of calls of user code that workers began
        self._is_swift = False
        self._is_watched = False  # whether the clock thread watches the workers
        self._seen_begun = 0  # value of `_begun` at the clock thread's last look
        self._many_since = 0.0  # times at which the last `_MANY` began
        self._stopping = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._clock_runs = False  # as seen by the callers that start it
        self._is_clock_there = False
        self._is_clock_missed = False  # no thread can be started
        self._is_start_refused = False
        self._states = StateLog(_log, "librmq")  # of steps that wait for another process or a store
        self._telling = Step("calls the application", self._tell_later)
        self._is_telling = False
        self.outside: Outside = Outside(lambda: is_held_here(self.lock), self._run_outside)
        self.waiting: Collection[object] = self.outside.calls
        _runners.add(self)

    @override
    def __repr__(self) -> str:
        state = "closed" if self._stopping else "open"
        return f"<ThreadRunner, {state}, threads: {self._workers} of {self._max_threads}>"

    def _start(self, target: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=target, name=f"librmq-{name}", daemon=True)
        # Note the thread before its start, because it can run although the start is interrupted.
        self._threads.append(thread)
        try:
            thread.start()
        except RuntimeError:
            self._threads.remove(thread)
            raise
        self._is_start_refused = False

    # ---- the application's code outside of the lock

    @override
    def call_waiting(self) -> None:
        """Make the application's calls that have waited for the release of the lock."""
        self.outside.run()

    def _run_outside(self) -> None:
        """Let a worker make the calls that wait: now for a thread of this runner, and later for a caller."""
        if self._holder_searches:
            self._tell_later(0)
        elif not self._stopping:
            self.wake(self._telling, self.now_ms() + _CALLERS_MS)

    def _tell_later(self, now_ms: int) -> int | None:
        if self.waiting and not self._is_telling:
            self._is_telling = True
            self.submit(Work(self._telling.label, self.outside.run, self._told))
        return None

    def _told(self, result: object, error: Exception | None) -> None:
        self._is_telling = False
        self._tell_later(0)

    @override
    def _signal(self, at: int) -> None:
        if self._holder_searches or self._stopping:
            return
        try:
            if at != AT_ONCE and at > (now := self.now_ms()):
                self._latest_ms = max(self._latest_ms, now)
                self._signal_clock(at)
            elif not self._searching and not self._is_worker_woken:
                self._wake_worker()
        except RuntimeError as error:
            # No thread can start. The caller's write stands, so the caller gets no error.
            was_refused, self._is_start_refused = self._is_start_refused, not self._clock_runs  # the line wakes a step
            if self._clock_runs:
                _release_turn(self._clock_turn)  # the clock thread runs the steps, and tries to start a worker again
            elif not was_refused:
                _log.error(
                    "no thread can be started (%(error)s), so nothing is delivered and no timed work is done until a "
                    "later call can start one; raise the limit of threads",
                    error=error,
                )

    def _signal_clock(self, at: int) -> None:
        if not self._clock_runs:
            self._start(self._run_clock, "clock")
            # Set this after the start, which can fail; otherwise no later caller would start the clock thread.
            self._clock_runs = True
        elif at < self._sleeps_until:
            _release_turn(self._clock_turn)

    def _wake_clock(self, at: int) -> bool:
        """Signal the clock thread for a worker; return False if no thread could start, so that it searches again."""
        try:
            self._signal_clock(at)
        except RuntimeError as error:
            if not self._is_clock_missed:
                _log.warning("the clock thread can't start, so a worker runs the steps: %(error)s", error=error)
            self._is_clock_missed = True
            return False
        return True

    def _wake_worker(self) -> None:
        if self._parked:
            _release_turn(self._parked[-1])
            self._is_worker_woken = True
        elif not self._workers or len(self._threads) < self._max_threads:  # the clock thread alone runs no user code
            self._start_worker()
        elif self._heap and self._heap[0][0] <= self.now_ms():
            self._wake_clock(AT_ONCE)  # every worker is in user code, so the clock thread runs steps

    def _start_worker(self) -> None:
        try:
            number = self._workers + 1
            self._start(partial(self._run_worker, number), f"worker-{number}")
        except RuntimeError as error:
            if not self._workers:
                raise
            _log.warning(
                "there will be no more than %(workers)d workers: %(error)s", workers=self._workers, error=error
            )
            self._max_threads = len(self._threads)
            self._wake_worker()
        else:
            self._is_worker_woken = True
            self._workers += 1

    def _run_steps(self, now: int) -> Step | None:
        """Take due steps for a slice of time that begins now, and return the next one, which can be due by then."""
        begin = now
        while (top := self._top()) is not None and (top.at or 0) <= now:
            if now - begin > _SLICE_MS:
                # After many steps in a row, offer the lock to other threads.
                break
            heapq.heappop(self._heap)
            if now > self._latest_ms:
                self._latest_ms = now
            try:
                top.run(self, now)
                if self._states.causes:
                    self._states.works(top.label)
            except BrokerUnreachableError as error:
                # Another process keeps the log of a share, so the step has to come again.
                self._states.failing(top.label, error, again_ms=_START_AGAIN_MS)
                self.wake(top, now + _START_AGAIN_MS)
            except LASTING as error:  # nothing to do until the store is reopened
                self._states.failing(top.label, error)
            except BaseException:
                # A thread of the runner has no caller to which an error could go, so log it and go on.
                _log.exception("%(step)s: an internal step failed", step=top.label)
            now = self.now_ms()
        return top

    def _reschedule_after_setback(self) -> None:
        """Make every waiting step due if the clock was set back."""
        now, latest = self.now_ms(), self._latest_ms
        if not was_set_back(latest, now):
            self._latest_ms = max(latest, now)
        else:
            self._latest_ms = now
            _log.warning(
                "the clock was set back by %(seconds)d s: everything that waits uses the new time",
                seconds=(latest - now) // 1000,
            )
            for _, _, step in list(self._heap):
                if step.at is not None and step.at > now:
                    step.at = now
                    heapq.heappush(self._heap, (now, next(self._count), step))

    def _run_clock(self) -> None:
        turn, lock = self._clock_turn, self.lock
        with lock:
            if self._is_clock_there:
                return  # its start was interrupted
            self._is_clock_there = True
            while not self._stopping:
                self._holder_searches = True
                self._reschedule_after_setback()
                top = self._run_steps(self.now_ms())
                self._holder_searches = False
                until = NEVER if top is None else top.at or 0
                if self.ready and not self._searching and not self._is_worker_woken and not self._is_watched:
                    try:
                        self._wake_worker()
                    except RuntimeError as error:
                        # The first worker could not start. That must not end this thread, which runs the steps.
                        _log.error("%(work)s waits for a thread: %(error)s", work=self.ready[0].label, error=error)
                        until = min(until, self.now_ms() + _START_AGAIN_MS)
                self._sleeps_until = until
                lock.release()
                was_woken = turn.acquire(timeout=self._sleep_s())
                goes_on = True
                # Without the lock, because waiting for it would slow a busy worker.
                while self._is_watched and not was_woken and (goes_on := self._goes_on()):
                    if self._sleeps_until <= self.now_ms():
                        break
                    was_woken = turn.acquire(timeout=self._sleep_s())
                lock.acquire()
                turn.acquire(blocking=False)  # released by a caller after the thread woke by itself
                self._sleeps_until = AT_ONCE
                if not goes_on:
                    self._is_watched = False
                    self._is_swift &= not self.ready

    def _sleep_s(self) -> float:
        """Return how long the clock thread can sleep, -1 without limit."""
        seconds = -1.0
        if self._sleeps_until < NEVER:
            now = self.now_ms()
            if was_set_back(self._latest_ms, now):  # since the steps were taken: look again at once
                now = self._sleeps_until
            seconds = max(_YIELD_S, seconds_until(self._sleeps_until, now))
        if self._is_watched:
            seconds = _WATCH_S if seconds < 0 else min(seconds, _WATCH_S)
        return seconds

    def _goes_on(self) -> bool:
        """Check whether a worker in user code has taken the work that was left to it."""
        begun = self._begun - self._seen_begun
        self._seen_begun = self._begun
        return begun >= _FEW if self.ready else begun > 0

    def _leave_ready_work(self) -> None:
        """Handle ready work that a worker leaves behind when it begins user code and no other thread is searching."""
        if not self._is_swift:
            self._wake_worker()
        else:
            self._is_watched, self._seen_begun = True, self._begun
            if self._clock_runs:
                _release_turn(self._clock_turn)
            elif not self._wake_clock(AT_ONCE):
                self._is_watched = self._is_swift = False
                self._wake_worker()

    def _run_worker(self, number: int) -> None:
        turn, thread, group = _turn(), threading.current_thread(), ""
        own_name = name = thread.name
        with self.lock:
            self._is_worker_woken = False
            self._searching += 1
            work = self._next_work(turn)
        while work is not None:
            result: object = None
            error: Exception | None = None
            if (new_group := work.group) != group:
                self._listener_names.pop(name, None)
                group = new_group
                name = thread.name = self._claim_name(number, group) if group else own_name
            try:
                result = work.call()
            except Exception as raised:
                error = raised
            except BaseException as raised:
                error = failure_of(work, raised)  # a thread has no caller to which it could go
            is_under_way = result is not None and is_coroutine(result)
            if is_under_way:
                try:
                    self._launch(work, cast("Coroutine[Any, Any, object]", result))
                except Exception as raised:  # its loop is missing or closed
                    is_under_way, result, error = False, None, raised
            with self.lock:
                self._searching += 1
                if not is_under_way:
                    self._holder_searches = True
                    try:
                        self._apply(work, result, error)
                    except BaseException:
                        _log.exception(_NOT_APPLIED, work=work.label)
                    self._holder_searches = False
                work = self._next_work(turn)

    def _claim_name(self, number: int, group: str) -> str:
        names = (f"ConsumeMessageThread_{group}_{listener_number}" for listener_number in itertools.count(1))
        return next(name for name in names if self._listener_names.setdefault(name, number) == number)

    def _next_work(self, turn: Lock) -> Work | None:
        """Take due steps, and return ready work or wait for some; None at the end."""
        lock, ready, heap, parked = self.lock, self.ready, self._heap, self._parked
        while not self._stopping:
            # The clock thread would take due steps later: it has to get interpreter and lock from busy listeners, and
            # sleeps on when the time of day is set forward.
            at, now = heap[0][0] if heap else NEVER, self.now_ms()
            if at <= now:
                self._holder_searches = True
                top = self._run_steps(now)
                self._holder_searches = False
                at = NEVER if top is None else top.at or 0
            has_clock = True
            if at < self._sleeps_until or (at < NEVER and not self._clock_runs):
                has_clock = self._wake_clock(at)
            # If listeners are fast one worker is enough; others would mostly wait for the lock.
            if ready and not (self._is_swift and (self._is_worker_woken or self._workers - len(parked) > 1)):
                work = ready.popleft()
                self.running.add(work)
                self._searching -= 1
                before = self._begun
                self._begun += work.count
                if self._begun // _MANY > before // _MANY:
                    begin, self._many_since = self._many_since, self.clock.monotonic()
                    self._is_swift |= self._many_since - begin < _SWIFT_S
                if ready and not self._searching and not self._is_worker_woken and not self._is_watched:
                    self._leave_ready_work()
                return work
            if not ready and (not has_clock or at <= now):  # what is due since then is the clock thread's
                lock.release()
                turn.acquire(timeout=_YIELD_S if has_clock else _WATCH_S)
                lock.acquire()
                continue
            self._searching -= 1
            if ready and not self._searching and not self._is_worker_woken and not self._is_watched:
                self._leave_ready_work()
            parked.append(turn)
            lock.release()
            turn.acquire()
            lock.acquire()
            if parked[-1] is turn:
                del parked[-1]
            else:
                parked.remove(turn)
            self._is_worker_woken = False
            self._searching += 1
        return None

    @override
    def _finish(self, work: Work, result: object, error: Exception | None) -> None:
        try:
            super()._finish(work, result, error)
        except Exception:
            _log.exception(_NOT_APPLIED, work=work.label)

    @override
    def _launch(self, work: Work, coroutine: Coroutine[Any, Any, object]) -> None:
        running = self._run(work, coroutine)
        try:
            loop = work.loop
            if loop is None or loop.is_closed():
                loop = self._own_loop()
            with self.lock:  # a canceller holds it too, and the coroutine may have begun by then
                work.cancel = asyncio.run_coroutine_threadsafe(running, loop).cancel
        except BaseException:
            running.close()
            coroutine.close()
            raise

    @override
    def _goes_up(self, work: Work, error: BaseException) -> bool:
        # asyncio ends the event loop, and so all its other listeners, by a SystemExit or KeyboardInterrupt of a task.
        # But in the main thread the latter may be the user's Ctrl-C, which is to end the application's loop.
        is_interrupted = threading.current_thread() is threading.main_thread() and isinstance(error, KeyboardInterrupt)
        goes_up = is_interrupted or (isinstance(error, asyncio.CancelledError) and is_task_cancelled())
        if goes_up:
            self._finish(work, None, failure_of(work, error))
        return goes_up

    @override
    async def offload(self, call: Callable[[], _T]) -> _T:
        """Run a function that can wait for a disk, without blocking the event loop of the caller."""
        return await asyncio.to_thread(call)

    def _own_loop(self) -> asyncio.AbstractEventLoop:
        with self.lock:
            if self._stopping:
                raise RunnerClosedError("the broker was closed: no listener starts any more")
            if self._loop is None:
                loop = asyncio.new_event_loop()

                def run() -> None:
                    asyncio.set_event_loop(loop)
                    # A task that a listener made can end the loop by a SystemExit, and a listener can stop it.
                    while not self._stopping:
                        try:
                            loop.run_forever()
                        except BaseException:
                            _log.exception("a task in the event loop of coroutine listeners ended by no Exception")
                    loop.close()

                try:
                    self._start(run, "asyncio")
                except RuntimeError:
                    loop.close()
                    raise
                self._loop = loop
            return self._loop

    def restart_after_fork(self) -> None:
        """Work again, with threads of its own, in a forked child; what waited stays with the parent."""
        for _, _, step in self._heap:
            step.at = None
        self._heap.clear()
        self.ready.clear()
        self._listener_names.clear()
        self._clock_turn, self._loop = _turn(), None
        self._searching = self._workers = 0
        self._is_worker_woken = self._holder_searches = self._is_watched = self._is_swift = False
        self._clock_runs = self._is_clock_there = self._is_clock_missed = self._is_start_refused = False
        self._sleeps_until, self._latest_ms = AT_ONCE, self.now_ms()
        self._stopping = self.is_inherited = False
        _runners.add(self)

    @override
    def is_within(self) -> bool:
        """Return whether the caller is in one of its threads, or in a coroutine that it runs."""
        return threading.current_thread() in self._threads or super().is_within()

    def shutdown(self, timeout: float | timedelta = 5) -> bool:
        """End the threads. Shut down clients first. A second call waits again.

        Returns:
            Whether all work has ended within ``timeout`` (seconds, or a `timedelta`); work that still runs is logged.
        """
        seconds = to_seconds("timeout", timeout)
        with self.lock:
            self._stopping = True
            for turn in (self._clock_turn, *self._parked):
                _release_turn(turn)
            if self._loop is not None and not self._loop.is_closed():
                with suppress(RuntimeError):  # its thread has closed it meanwhile
                    self._loop.call_soon_threadsafe(self._loop.stop)
        deadline = self.clock.monotonic() + seconds
        for thread in self._threads:
            if thread is not threading.current_thread() and thread.is_alive():
                thread.join(max(0.0, deadline - self.clock.monotonic()))
        self.outside.run()
        with self.lock:
            running = sorted(work.label for work in self.running)
        if running:
            _log.warning("still running after %(seconds)s s: %(running)s", seconds=seconds, running=", ".join(running))
        return not running


def _turn() -> Lock:
    """Return a held lock, at which one thread waits until another releases it."""
    turn = Lock()
    turn.acquire()
    return turn


def _release_turn(turn: Lock) -> None:
    """Wake the thread that waits for its turn; an interrupted caller repeats this. Under the lock."""
    if turn.locked():
        turn.release()


def _leave_to_parent(runner: ThreadRunner) -> None:
    runner._stopping = runner.is_inherited = True
    runner._threads.clear()
    runner.running.clear()
    runner.lock = RLock()  # a thread of the parent can hold it
    runner._parked.clear()
    _runners.discard(runner)


_runners: Final[Inherited[ThreadRunner]] = Inherited(_leave_to_parent)
