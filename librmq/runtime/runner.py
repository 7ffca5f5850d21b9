"""Event loops: librmq's own steps and the user's code, run by threads or by hand.

::

    Step   librmq's own work: short, never blocks, runs no user code; under the runner's lock
    Work   user code (a listener, a check-back): without the lock; its outcome is applied under it

Broker and clients see six names of a runner: ``now_ms``, ``lock``, ``wake``, ``submit``, ``point``, ``choose`` (and
coroutines ``offload``). They neither sleep nor wait. A step returns its next due time, or None if another turn will
wake it. The usual order is due steps, ready work, then time. Runners differ only in how they pick the next turn.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from typing import Any, Final, Protocol, TypeGuard, TypeVar

from librmq.clock import Clock, moves_by_itself
from librmq.errors import RunnerError
from librmq.override import override
from librmq.runtime import _lazy_asyncio as asyncio
from librmq.runtime.locks import RLock

_T = TypeVar("_T")
NEVER: Final = 1 << 62
"""A time that never comes, in milliseconds."""
AT_ONCE: Final = -NEVER
"""A time that has always come, even for a clock set before 1970."""


def next_on_grid(now_ms: int, begin_ms: int, interval_ms: int) -> int:
    """Return the first time after ``now_ms`` on the grid through ``begin_ms`` with steps of ``interval_ms``."""
    return now_ms - (now_ms - begin_ms) % interval_ms + interval_ms


Aside = Callable[[Callable[[], object], Callable[[Exception | None], int | None]], None]
"""``aside(wait, done)`` runs ``wait()``, which waits for a disk, without blocking other turns. Then it runs
``done(error)`` as a step, which returns the time in ms of the next run."""


class Owner(Protocol):
    """Simulated process of a turn; turns of a dead process do not run."""

    dead: bool


class Step:
    """An internal turn. ``run_due(now_ms)`` does due work and returns the next due time, None if unknown.

    ``label`` is stable from run to run: process, group, topic, queue, but never a random id. ``at`` is the due time,
    None if another turn will wake the step.
    """

    __slots__ = ("at", "label", "owner", "run_due")

    def __init__(self, label: str, run_due: Callable[[int], int | None], owner: Owner | None = None) -> None:
        self.label: str = label
        self.run_due: Callable[[int], int | None] = run_due
        self.owner: Owner | None = owner
        self.at: int | None = None

    def go(self, runner: Runner) -> None:
        """Take the turn, under the runner's lock."""
        self.run(runner, runner.now_ms())

    def run(self, runner: Runner, now_ms: int) -> None:
        """Take the turn at a time, under the runner's lock."""
        # Clear the due time before the turn: a wake-up during the turn must make the step due again, although the turn
        # may have read the state before it.
        self.at = None
        if self.owner is None or not self.owner.dead:
            due = self.run_due(now_ms)
            if due is not None:
                runner.wake(self, due)

    @override
    def __repr__(self) -> str:
        return f"Step({self.label!r}, at={self.at})"


class Work:
    """A turn of user code: ``call()`` without the lock, then ``done(result, error)`` under it.

    ``call`` can return a coroutine, which runs on ``loop`` (None: a loop of the runner's own). ``about`` names its
    subjects; for a listener they are the addresses of the messages, broker's name and physical offset.
    """

    __slots__ = ("about", "call", "cancel", "done", "label", "loop", "owner", "task")

    group: str = ""
    """The consumer group whose listener is called; the worker that calls it has its name."""
    count: int = 1
    """The number of calls that it makes one after the other."""
    cancel: Callable[[], object]
    """Cancels the coroutine that ``call`` has returned, in its loop; set when it starts."""

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
        self.label: str = label
        self.call: Callable[[], object] = call
        self.done: Callable[[Any, Exception | None], None] = done
        self.owner: Owner | None = owner
        self.loop: asyncio.AbstractEventLoop | None = loop
        self.about: Sequence[tuple[str, int]] = about
        self.task: asyncio.Task[Any] | None = None
        """Runs the coroutine that ``call`` has returned."""

    def go(self, runner: Runner) -> None:
        """Take the turn."""
        runner.ready.remove(self)
        runner.perform(self)

    @override
    def __repr__(self) -> str:
        return f"Work({self.label!r})"


class Runner:
    """Base of all runners: the heap of steps, ready work and running work."""

    now_ms: Callable[[], int]
    """The time of day in milliseconds since 1970 (UTC)."""
    begins_at_once = True
    """Whether the turn that stores a message may also begin it for a listener. In a kit that takes turns of its own,
    among which an explorer chooses."""
    progress_home: tuple[str, Any] | None = None
    """Folder, and the `Files` that write it, for the progress that instances keep themselves; None: the user's home."""

    def __init__(self, clock: Clock) -> None:
        if not callable(getattr(clock, "monotonic", None)):
            raise TypeError(f"clock: expected a Clock such as ManualClock(), found {clock!r:.80}")
        self.clock = clock
        self.now_ms = clock.now_ms
        self.lock: RLock = RLock()
        self.ready: deque[Work] = deque()
        """Work that waits for a turn."""
        self.running: set[Work] = set()
        """Work that has begun and not ended, including waiting coroutines."""
        self.is_inherited = False
        """Reset in a child process after a fork: the threads belong to the parent, and running work never ends here."""
        self.waiting: Collection[object] = ()
        """The application's calls that wait for the release of the lock, for `call_waiting`."""
        self.shared: dict[type[Any], object] = {}
        """What the clients of this runner have together, by class."""
        self._heap: list[tuple[int, int, Step]] = []
        self._count = itertools.count()

    # ---- the six names

    def wake(self, step: Step, at: int = AT_ONCE) -> None:
        """Make ``step`` due at ``at`` (ms since 1970), unless it is due earlier. Under the lock."""
        if step.at is None or at < step.at:
            try:
                heapq.heappush(self._heap, (at, next(self._count), step))
                # Note the time after the push. If Ctrl-C comes in between, the heap has an entry too many, which is
                # passed over; the other way round, the step would count as due and never run.
                step.at = at
                self._signal(at)
            except BaseException:
                # After Ctrl-C the step may be in the heap without a signal, so threads that wait would sleep past it.
                self._signal(at)
                raise

    def submit(self, work: Work) -> None:
        """Run ``work`` as soon as a thread is free. Under the lock."""
        try:
            self.ready.append(work)
            self._signal(AT_ONCE)
        except BaseException:
            self._signal(AT_ONCE)
            raise

    def point(self, label: str) -> None:
        """Let other turns run here; called without the lock at each of librmq's calls within user code."""

    def choose(self, kind: str, options: Sequence[_T]) -> _T:
        """Return one of several legal choices; the first is the usual one."""
        return options[0]

    async def offload(self, call: Callable[[], _T]) -> _T:
        """Run a function that can wait for a disk, without blocking the event loop of the caller."""
        return call()

    def pass_time(self, seconds: float) -> None:
        """Let time pass for a caller that waits for other turns. Without the lock."""
        self.clock.wait(threading.Event(), seconds)

    # ---- taking turns

    def perform(self, work: Work) -> None:
        """Run user code without the lock, and apply its result. A `BaseException` propagates."""
        with self.lock:
            self.running.add(work)
        result: object = None
        error: Exception | None = None
        try:
            result = self._call(work)
        except Exception as raised:
            error = raised
        except BaseException:  # pytest.fail, Ctrl-C, the death of its process in a test
            # Raised again without a name: a frame that names it would keep all of the code's variables alive, such as
            # a connection with an open transaction.
            with self.lock:
                self.running.discard(work)
            raise
        if result is not None and is_coroutine(result):
            self._launch(work, result)
        else:
            self._finish(work, result, error)

    def _call(self, work: Work) -> object:
        return work.call()

    def _finish(self, work: Work, result: object, error: Exception | None) -> None:
        with self.lock:
            self._apply(work, result, error)

    def _apply(self, work: Work, result: object, error: Exception | None) -> None:
        # The result of a process that died in a test is dropped: after a crash nothing could apply it.
        self.running.discard(work)
        if work.owner is None or not work.owner.dead:
            work.done(result, error)

    def _launch(self, work: Work, coroutine: Coroutine[Any, Any, object]) -> None:
        raise NotImplementedError

    async def _run(self, work: Work, coroutine: Coroutine[Any, Any, object]) -> None:
        work.task = asyncio.current_task()
        result: object = None
        error: Exception | None = None
        try:
            result = await coroutine
        except Exception as raised:
            error = raised
        except BaseException as raised:
            if self._goes_up(work, raised):
                raise
            error = failure_of(work, raised)
        self._finish(work, result, error)

    def _goes_up(self, work: Work, error: BaseException) -> bool:
        """Return whether an error that is not an `Exception` ends a coroutine's task, and the work without a result.

        A listener that awaits a cancelled task fails, as by any other exception. If its own task was cancelled, by a
        shutdown or the end of its event loop, it has no result.
        """
        is_dead = work.owner is not None and work.owner.dead
        goes_up = is_dead or not isinstance(error, asyncio.CancelledError) or is_task_cancelled()
        if goes_up:
            self.running.discard(work)
        return goes_up

    def _signal(self, at: int) -> None:
        """Note that a step is due at ``at``."""

    def runs_here(self, works: Iterable[Work]) -> bool:
        """Return whether one of these is a coroutine that the calling task runs."""
        tasks = [work.task for work in works if work.task is not None]
        if not tasks:
            return False
        try:
            return asyncio.current_task() in tasks
        except RuntimeError:  # There is no event loop.
            return False

    def is_within(self) -> bool:
        """Return whether the caller is code that this runner runs, and whose end a shutdown would wait for."""
        return self.runs_here(list(self.running))

    def call_waiting(self) -> None:
        """Make the application's calls that have waited for the release of the lock."""

    def next_due_ms(self) -> int | None:
        """Return when the next step is due, None if nothing is scheduled."""
        with self.lock:
            top = self._top()
            return None if top is None else top.at

    def _top(self) -> Step | None:
        """Return the step that is due first. Entries of steps that were woken earlier, or have run, are outdated."""
        heap = self._heap
        while heap and heap[0][2].at != heap[0][0]:
            heapq.heappop(heap)
        return heap[0][2] if heap else None


def failure_of(work: Work, error: BaseException) -> RunnerError:
    """Return an error that is not an `Exception` as a failure of the listener."""
    failure = RunnerError(f"{work.label}: ended by {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


def is_coroutine(result: object) -> TypeGuard[Coroutine[Any, Any, object]]:
    """Return whether a call has returned a coroutine, which is still to run."""
    return hasattr(result, "send") and isinstance(result, Coroutine)


def is_task_cancelled() -> bool:
    """Return whether another task, or the event loop, has cancelled the running task."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def aside_by(runner: Runner, label: str, owner: Owner, wake: Callable[[int], None]) -> Aside | None:
    """Return a function that waits for a disk without the runner's lock; ``wake(at_ms)`` wakes the step it serves.

    None if time is moved by hand, because no other turn could run meanwhile.
    """
    if not moves_by_itself(runner.clock):
        return None

    def aside(wait: Callable[[], object], done: Callable[[Exception | None], int | None]) -> None:
        def ended(_: object, error: Exception | None) -> None:
            due = done(error)
            if due is not None:
                wake(due)

        runner.submit(Work(label, wait, ended, owner))

    return aside


class BackgroundTurns:
    """Calls a step when it is due or woken, as `Background` does, in turns of a runner in place of a thread."""

    def __init__(self, step: Callable[[int], int | None], runner: Runner, label: str, owner: Owner) -> None:
        """Make the step due at once; it runs without the runner's lock, and dies with its owner."""
        self._call = step
        self._runner = runner
        self._owner = owner
        self._stopped = False
        self._step = Step(label, self._begin, owner)
        self.wake()

    def wake(self) -> None:
        """Let the step run now."""
        with self._runner.lock:
            if not self._stopped:
                self._runner.wake(self._step)

    def stop(self) -> None:
        """Begin the step no more."""
        self._stopped = True

    def _begin(self, now_ms: int) -> None:
        if not self._stopped:
            self._runner.submit(Work(self._step.label, lambda: self._call(now_ms), self._end, self._owner))

    def _end(self, due: int | None, error: Exception | None) -> None:
        if error is not None:
            raise error
        if due is not None and not self._stopped:
            self._runner.wake(self._step, due)


class TimePasses:
    """Last choice of a runner by hand: let time pass up to the next due step."""

    __slots__ = ("_move_to", "at", "label")
    owner: Owner | None = None

    def __init__(self, at: int, move_to: Callable[[int], None]) -> None:
        self.at: int = at
        self.label: str = "time"
        self._move_to = move_to

    def go(self, runner: Runner) -> None:
        """Take the turn."""
        self._move_to(max(self.at, runner.now_ms()))


Turn = Step | Work | TimePasses
