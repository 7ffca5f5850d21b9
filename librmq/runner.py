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
import threading
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, Final, Protocol, TypeVar

from librmq.clock import Clock, ManualClock
from librmq.errors import EndlessLoopError, NotIdleError

__all__ = ["NEVER", "Aside", "ManualRunner", "Owner", "Runner", "Step", "Turn", "Work", "aside_by"]

_T = TypeVar("_T")
NEVER: Final = 1 << 62
"""A time that does not come, in milliseconds."""
_MOST_STEPS_AT_ONCE: Final = 1_000_000

Aside = Callable[[Callable[[], object], Callable[[Exception | None], int | None]], None]
"""``aside(wait, done)`` has ``wait()``, which waits for a disk, run while other things go on, and then ``done(error)``
where a step is run, which gives the time in ms at which that one wants to be run again."""


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
            try:
                heapq.heappush(self._heap, (at, next(self._count), step))
                step.at = at  # behind it: nothing is taken to be in the heap that is not
                self._signal(at)
            except BaseException:  # by Ctrl-C: it may be due by now, and nobody told
                self._signal(at)
                raise

    def submit(self, work: Work) -> None:
        """Let ``work`` run as soon as there is somebody for it. Under the lock."""
        try:
            self.ready.append(work)
            self._signal(0)
        except BaseException:
            self._signal(0)
            raise

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


def aside_by(runner: Runner, label: str, owner: Owner, wake: Callable[[int], None]) -> Aside | None:
    """Has a disk waited for without the runner's lock; ``wake(at_ms)`` wakes the step on whose behalf.

    None where time is moved by hand: nobody else would go on meanwhile.
    """
    if isinstance(runner.clock, ManualClock):
        return None

    def aside(wait: Callable[[], object], done: Callable[[Exception | None], int | None]) -> None:
        def ended(_: object, error: Exception | None) -> None:
            due = done(error)
            if due is not None:
                wake(due)

        runner.submit(Work(label, wait, ended, owner))

    return aside


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
            at = NEVER if top is None else top.at or 0
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
