"""Runner of the kit, which also records errors, sends and times of listeners, and the processes whose code it runs."""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any, Final, NoReturn, TypeVar

from librmq.clock import LAST_MS, ManualClock, SystemClock
from librmq.config import to_seconds, wrong_kind
from librmq.errors import EndlessLoopError, NotIdleError
from librmq.listener import DownstreamDown, ReconsumeLater, SuspendQueue
from librmq.message.properties import PropertyName
from librmq.override import override
from librmq.runtime import ManualRunner, Step, Work
from librmq.runtime.runner import Turn
from librmq.testing._process import A_PROCESS, LIBRARY, KitParts, Process, ProcessDied, ProcessStateError

LONGEST_CHAIN = 1_000

current_work: ContextVar[Work | None] = ContextVar("librmq.testing.current", default=None)
"""The running user code; None in the test itself."""


class KitRunner(ManualRunner):
    """A `ManualRunner` that reports user code to a kit, and stops at the first failure."""

    begins_at_once = False
    kit: KitParts
    process_table: ProcessTable
    settles_history = True
    """Whether the history is read after the broker has closed."""

    def __init__(self, clock: ManualClock | None = None) -> None:
        super().__init__(clock)
        self.failure: BaseException | None = None
        """The error that fails the test; after it no turn runs."""
        self.late: set[Work] = set()
        """Listeners that have done their work and return later."""
        self.left: set[Work] = set()
        """Listeners that wait, in threads of their own, for what the test holds."""
        self.slow_listeners: dict[str, list[int]] = {}
        """By group, the milliseconds after which its next listeners return."""
        self.called_groups: set[str] = set()
        """The groups whose listeners were called."""
        self._dying: Process | None = None
        self._works: dict[asyncio.Task[Any], Work] = {}
        self.kept_causes: dict[str, tuple[int, str, tuple[str, int]]] = {}
        """By unique id, what led to a message that a listener has kept for a later send."""
        self._depths: dict[tuple[str, int], tuple[int, str, tuple[str, int] | None]] = {}

    @property
    def has_tasks(self) -> bool:
        """Whether coroutines of listeners wait in the event loop."""
        return bool(self._tasks)

    def settles(self) -> bool:
        """Return whether exploring has caused a fault, from which the cluster needs time to recover."""
        return False

    def after(self, seconds: float | timedelta, label: str, call: Callable[[], object]) -> None:
        """Call a function after ``seconds``, immediately for 0."""
        delay_ms = round(1000 * to_seconds("seconds", seconds, maximum=LAST_MS / 1000))

        def do(now_ms: int) -> int | None:
            call()
            return None

        if not delay_ms:
            call()
        else:
            with self.lock:
                self.wake(Step(label, do), self.now_ms() + delay_ms)

    def unwind(self, process: Process) -> None:
        """End the running code of a dead process: its coroutines raise `ProcessDied` at their places."""
        for task, work in list(self._works.items()):
            if task in self._tasks and self.process_table.process_of(work) is process:
                task.cancel()

    def die_here(self, process: Process) -> NoReturn:
        """End the running user code, because its process dies; the process restarts once the code has ended."""
        process._die()
        self._dying = process
        raise ProcessDied(process.label)

    def crash_the_dying(self) -> None:
        """Restart the process that died within its own code."""
        dying, self._dying = self._dying, None
        if dying is not None:
            self.kit.died(dying)

    def take_turns(self, until_ms: int) -> None:
        """Take all turns up to a time; raise the error of a listener."""
        self._take_turns(until_ms)
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure

    @override
    def is_over(self) -> bool:
        """Return whether a failure has ended the run."""
        return self.failure is not None

    @override
    def perform(self, work: Work) -> None:
        """Run user code, unless its process is dead."""
        if is_dead(work):
            return
        try:
            self.run_code(work)
        finally:
            self.crash_the_dying()

    def run_code(self, work: Work) -> None:
        """Run user code until it ends, waits in an event loop, or dies with its process."""
        token = current_work.set(work)
        self.kit.history()._beginning = work  # its deliveries come next
        try:
            self._check_chain(work)
            super().perform(work)
        except ProcessDied:
            self.running.discard(work)
            self.kit.history()._listener_ends(self.now_ms(), work, "died")
        finally:
            current_work.reset(token)

    @override
    async def _run(self, work: Work, coroutine: Coroutine[Any, Any, object]) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._works[task] = work
        try:
            await super()._run(work, _until_death(work, coroutine))
        except ProcessDied:
            self.running.discard(work)
            self.kit.history()._listener_ends(self.now_ms(), work, "died")
        finally:
            del self._works[task]
            if asyncio.current_task() in self._tasks:
                self.crash_the_dying()

    @override
    def _finish(self, work: Work, result: object, error: Exception | None) -> None:
        wait_ms = 0
        if work.about:
            group = group_of(work)
            self.called_groups.add(group)
            slow = self.slow_listeners.get(group)
            wait_ms = slow.pop(0) if slow else 0
        if not wait_ms:
            self._end(work, result, error)
            return
        self.late.add(work)
        self.kit.note("fault", f"the listener of {group_of(work)} takes {wait_ms:,} ms")

        def end(now_ms: int) -> int | None:
            self.late.discard(work)
            self._end(work, result, error)
            return None

        with self.lock:
            self.wake(Step(f"{work.label} ends", end, work.owner), self.now_ms() + wait_ms)

    def _end(self, work: Work, result: object, error: Exception | None) -> None:
        if is_dead(work):
            outcome = "died"
        elif error is None:
            outcome = "returned"
        else:
            outcome = "later" if isinstance(error, ReconsumeLater | SuspendQueue) else "failed"
            outcome = "rests" if isinstance(error, DownstreamDown) else outcome
        self.kit.history()._listener_ends(self.now_ms(), work, outcome, error)
        if outcome == "failed" and error is not None and self.process_table.fails_fast(work) and self.failure is None:
            error.add_note(f"a listener's error fails the test: give fail_fast=False to {group_of(work)} for retries")
            self.failure = error
        super()._finish(work, result, error)

    # ---- chains: messages each sent by the listener of the one before

    def sent(self, broker_name: str, topic: str, physical_offset: int) -> None:
        """Note a stored message, sent by the running listener or by the test."""
        cause = None
        if self.kept_causes:
            with suppress(LookupError):
                cause = self.kept_causes.get(self.kit.network.message_at(broker_name, physical_offset).unique_key or "")
        cause = cause or self._cause()
        if cause is not None:
            depth, group, parent = cause
            self._depths[broker_name, physical_offset] = depth, f"{group} → {topic}", parent

    def kept(self, properties: dict[str, str]) -> None:
        """Note a message that the running listener keeps in an outbox; its cause is this listener, not the sender."""
        cause = self._cause()
        if cause is not None:
            self.kept_causes[properties[PropertyName.UNIQUE_KEY]] = cause

    def _cause(self) -> tuple[int, str, tuple[str, int]] | None:
        """Return the length of the chain, the group and the message of the running listener; None without one."""
        work = current_work.get()
        if work is None or not work.about:
            return None
        parent = max(work.about, key=self._depth)
        return self._depth(parent) + 1, group_of(work), parent

    def _depth(self, address: tuple[str, int]) -> int:
        """Return the length of the chain before a message; a committed one has that of its half."""
        if address not in self._depths:
            with suppress(LookupError):  # a committed message has the depth of its half
                half = address[0], self.kit.network.message_at(*address).prepared_transaction_offset
                if half in self._depths:
                    self._depths[address] = self._depths[half]
        return self._depths.get(address, (0,))[0]

    def _check_chain(self, work: Work) -> None:
        if not self._depths:
            return
        for address in work.about:
            if self._depth(address) > LONGEST_CHAIN:
                links: list[str] = []
                at: Any = address
                while at is not None and at in self._depths and len(links) < LONGEST_CHAIN:
                    _, link, at = self._depths[at]
                    links.append(link)
                kinds = list(dict.fromkeys(links))
                loop = ", ".join(kinds[:8]) + (", …" if len(kinds) > 8 else "")
                remedy = ""
                if abs(SystemClock().now_ms() - self.now_ms()) > 1_000:
                    remedy = (
                        "; a job that plans itself by datetime.now() is due at once, because that is not the kit's "
                        "time: give the kit datetime_too=True"
                    )
                raise EndlessLoopError(
                    f"{LONGEST_CHAIN:,} messages in a row, each sent by the listener of the one before "
                    f"(group → topic that it sends to): {loop}; the next is for {work.label}{remedy}"
                )


def is_dead(turn: Turn) -> bool:
    """Return whether a turn belongs to a dead process."""
    return turn.owner is not None and turn.owner.dead


async def _until_death(work: Work, coroutine: Coroutine[Any, Any, object]) -> object:
    """Run a coroutine; after the death of its process it raises `ProcessDied` where it waits."""
    return await _steps_until_death(work, coroutine)


class _DiedWaiting(ProcessDied, asyncio.CancelledError):
    """`ProcessDied` where asyncio has to see a cancellation."""


_END_BY_CANCELLATION: Final = (asyncio.locks.__file__, asyncio.taskgroups.__file__)


def _death_of(work: Work, coroutine: Coroutine[Any, Any, object]) -> ProcessDied:
    """Return the error for a coroutine that waits in a dead process.

    Only a cancellation lets a lock of asyncio go on to the next waiter, which can be in the process that follows, and a
    group or `wait_for` end its tasks. It is not used elsewhere: a guard would give its claim back.
    """
    waiting: Any = coroutine
    while inspect.iscoroutine(waiting.cr_await):
        waiting = waiting.cr_await
    is_cancelled = waiting.cr_code.co_filename in _END_BY_CANCELLATION or waiting.cr_code is asyncio.wait_for.__code__
    return _DiedWaiting(work.label) if is_cancelled else ProcessDied(work.label)


@types.coroutine
def _steps_until_death(work: Work, coroutine: Coroutine[Any, Any, object]) -> Generator[Any, Any, object]:
    step: Any = coroutine.send
    argument: Any = None
    if is_dead(work):  # it died before the event loop came to its coroutine
        step, argument = coroutine.throw, ProcessDied(work.label)
    while True:
        try:
            awaited = step(argument)
        except StopIteration as end:
            return end.value
        try:
            step, argument = coroutine.send, (yield awaited)
        except BaseException as error:
            step, argument = coroutine.throw, error
        if is_dead(work):
            step, argument = coroutine.throw, _death_of(work, coroutine)


def group_of(work: Work) -> str:
    """Return the consumer group of a listener's work."""
    return work.label.partition(" ")[0].partition("@")[0]


# ---- time of the kit

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

    @override
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
        has_others = _has_other_tasks()  # they may wait for what a listener does, and go on before time moves
        while True:
            at = until()
            self.take_turns(self.clock.now_ms() if has_others else at)
            if has_others or self.runner.has_tasks:
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
            await self.runner.take_turns_async(at, self.take_turns)
            self.clock.move_to(max(at, self.clock.now_ms()))
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
        if not self.runner.has_tasks and (waiting := self.runner.running - self.runner.late - self.runner.left):
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
        """Raise an error for calls that were not awaited."""
        forgotten = self.unawaited()
        self.end()
        if forgotten:
            raise NotAwaitedError("\n".join(forgotten))

    def unawaited(self) -> list[str]:
        """Return a sentence for each kind of call that was not awaited."""
        calls = [what for call, what in self._async_calls if inspect.getcoroutinestate(call) == "CORO_CREATED"]
        sent = [f"{', '.join(calls)} sent nothing: write `await` before the call"] if calls else []
        return [*self._unawaited_time(), *sent]

    def _unawaited_time(self) -> list[str]:
        return [] if self._unawaited is None else [
            f"the call that moves time at {self._unawaited.place} was not awaited, so that coroutines did not go on: "
            "write `await` before it"
        ]  # fmt: skip

    def end(self) -> None:
        """Forget the calls that were not awaited, so that Python does not warn of them in a later test."""
        calls, self._async_calls, self._unawaited = self._async_calls, [], None
        for call, _ in calls:
            if inspect.getcoroutinestate(call) == "CORO_CREATED":
                call.close()

    def _check_awaited(self) -> None:
        sentences, self._unawaited = self._unawaited_time(), None
        if sentences:
            raise NotAwaitedError(*sentences)


def _has_other_tasks() -> bool:
    """Return whether the caller runs in an event loop beside other tasks."""
    try:
        return len(asyncio.all_tasks()) > 1
    except RuntimeError:  # no event loop
        return False


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


# ---- processes


class ProcessTable:
    """All processes of a test, dead ones too, in the order in which they were made."""

    def __init__(self, new_process: Callable[..., Process], choose: Callable[[str, Sequence[str]], str]) -> None:
        """``new_process`` takes what `Process` takes behind its kit."""
        self.processes: list[Process] = []
        self._new_process = new_process
        self._choose = choose
        self.tolerated: set[str] = set()
        """Names of processes and groups whose failures are failed deliveries, as in production."""

    def make(
        self, name: str, factory: Callable[[Process], Any], generation: int = 1, site: str | None = None
    ) -> Process:
        """Return a new process, with a client id that sorts after the earlier ones or, if chosen so, before them."""
        count = len(self.processes)
        order = "after" if not count else self._choose(f"client ids of {name}", ("after", "before"))
        host = f"10.0.0.{254 - count % 150}" if order == "before" else f"10.0.1.{100 + count % 150}"
        process = self._new_process(name, generation, host, factory, site)
        before = next((earlier for earlier in self.processes if earlier.name == name), None)
        if before is not None:
            process._first_host = before._host
        self.processes.append(process)
        return process

    def free_name(self, name: str) -> str:
        """Return the name, with a number appended if a process already has that name."""
        names = {process.name for process in self.processes}
        number = 1
        while (free := name if number == 1 else f"{name}-{number}") in names:
            number += 1
        return free

    def living(self, process: Process) -> Process:
        """Return the process, or its restarted successor.

        Raises:
            ProcessStateError: It has ended without a successor.
            TypeError: It is not a process.
        """
        if not isinstance(process, Process):
            raise wrong_kind("process", process, A_PROCESS)
        for latest in reversed(self.processes):
            if latest.name == process.name and not latest.dead:
                return latest
        raise ProcessStateError(f"{process.name} has ended and was not restarted: name a living process")

    def process_of(self, work: Work) -> Process | None:
        """Return the process that runs this code."""
        for process in self.processes:
            if work.owner is process or work.owner in process.clients:
                return process
        return None

    def runs_now(self, process: Process) -> bool:
        """Return whether the process's own code runs now."""
        work = current_work.get()
        return work is not None and self.process_of(work) is process

    def fails_fast(self, work: Work) -> bool:
        """Return whether an error of this code fails the test."""
        process = work.label.partition(" ")[0].partition("@")[2].partition("~")[0].partition(".")[0]
        return group_of(work) not in self.tolerated and process not in self.tolerated
