"""The kit: a broker under a clock that the test moves, processes around it, and a history to assert on."""

from __future__ import annotations

import inspect
import os
import sys
import warnings
from collections.abc import Awaitable, Callable, Coroutine, Generator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any, Final, Self, TypedDict, TypeVar, Unpack

from librmq.broker import Broker, BrokerConfig
from librmq.client.producer import Producer
from librmq.clock import ManualClock
from librmq.config import StoreConfig
from librmq.consumer import PushConsumer
from librmq.errors import NotIdleError
from librmq.files.disk import DiskFiles
from librmq.files.memory import MemoryFiles
from librmq.files.seam import Files
from librmq.message.delay_levels import SCHEDULE_TOPIC
from librmq.message.message import MessageQueue, StoredMessage, retry_topic
from librmq.message.topics import dead_letter_topic
from librmq.protocol import ChannelClosed, Heartbeat, PullMessage, QueueData, SendResponse
from librmq.runtime.runner import Step, Work
from librmq.store.recovery.verify import verify
from librmq.testing.faults import Faults
from librmq.testing.history import Call, DeliveryAttempt, History, show
from librmq.testing.process import LIBRARY, ConsumerArguments, Process, ProducerArguments
from librmq.testing.turns import KitRunner, current_work, group_of
from librmq.testing.undelivered import Subscribed, UndeliveredWarning, nearest, undelivered

__all__ = ["Elapsed", "Kit", "NotAwaitedError", "ProcessStateError", "UnknownGroupError", "UnsoundStoreError"]

_T = TypeVar("_T")

_SETTLE_MS: Final = 120_000
_SMALL_FILES: Final = StoreConfig.tiny(commitlog_file_size=1 << 20, max_message_size=512 << 10)


class ProcessStateError(RuntimeError):
    """A process cannot do what the test asks: it has ended, or its own listener asks."""


class UnknownGroupError(LookupError):
    """The test asks for what happened to a group that none of its consumers has."""


class NotAwaitedError(AssertionError):
    """The test or a listener did not await what has to be awaited."""


class UnsoundStoreError(AssertionError):
    """The store that the broker leaves at the end of a test is damaged."""


@dataclass(frozen=True)
class Elapsed(Awaitable["Elapsed"]):
    """The time that has passed. A test in an event loop awaits it."""

    time: timedelta
    _rest: Callable[[], Awaitable[timedelta]] | None = None
    place: str = ""
    """The line of the test that has to await it; empty where nothing is left to await."""

    def __await__(self) -> Generator[Any, None, Elapsed]:
        if self._rest is None:
            return self
        return Elapsed((yield from self._rest().__await__()))


class KitSettings(TypedDict, total=False):
    """The settings of a `Kit`, as `librmq.testing.explore` and the marker ``rmq`` take them."""

    path: str | os.PathLike[str] | None
    broker_config: BrokerConfig | None
    store_config: StoreConfig | None
    now_ms: int


class Kit:
    """A broker, a clock that stands still until it is moved, and processes that send and consume.

    A context manager: at its end the broker is closed, and its store must be sound. The store is in memory unless
    ``path`` names a folder. Nothing sleeps and nothing runs in between: `advance`, `run_until_idle` and `run_for` take
    all turns, in the thread that calls them. Not thread-safe.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        broker_config: BrokerConfig | None = None,
        store_config: StoreConfig | None = None,
        now_ms: int = 1_700_000_000_000,
        runner: KitRunner | None = None,
        check: bool = True,
    ) -> None:
        """Open the broker; ``check`` False leaves out the look at the store at the end."""
        self.clock = runner.manual_clock if runner is not None else ManualClock(now_ms)
        """The time, which `advance` moves."""
        self.runner = runner or KitRunner(self.clock)
        self.runner.kit = self
        self.files: Files = MemoryFiles() if path is None else DiskFiles()
        self.path = os.path.join(os.sep, "rmq") if path is None else os.fspath(path)
        """The broker's directory."""
        self.faults = Faults(self)
        """Faults on request."""
        self.processes: list[Process] = []
        """All processes of the test, dead ones too."""
        self._broker_config = broker_config
        self._store_config = store_config or _SMALL_FILES
        self._check = check
        self._history = History(self.clock.now_ms())
        self._tolerated: set[str] = set()
        self._watchers: list[Callable[[], None]] = []
        self._routes: dict[str, tuple[QueueData, ...]] = {}
        self._unstarted: list[PushConsumer] = []
        self._producers: dict[str, Producer] = {}
        self._pulled_by: dict[tuple[str, str, int], str] = {}
        self._is_new = False
        self._closed = False
        self._declared: set[str] = set()
        self._looked_at: set[str] = set()
        self._sent_to: set[str] = set()
        self._subscribed: dict[tuple[str, str], Subscribed] = {}
        self._async_calls: list[tuple[Coroutine[Any, Any, object], str]] = []
        self._rest_of: Elapsed | None = None
        self._open_broker()
        self._test = self._process("test", lambda process: None)

    broker: Broker
    """The broker, replaced by `crash_broker`."""

    def _open_broker(self) -> None:
        self.broker = Broker.open(
            self.path,
            self._broker_config,
            store_config=self._store_config,
            runner=self.runner,
            files=self.files,
        )
        self.broker.watch(self._changed)

    # ---- who sends and consumes

    @property
    def route(self) -> Process:
        """The test's own process, for clients that it makes itself; takes the place of the broker in production."""
        return self._test

    def producer(self, group: str = "test", **settings: Unpack[ProducerArguments]) -> Producer:
        """Return the test's own producer of a group; with ``settings``, those of `Producer`, a new one."""
        found = None if settings else self._producers.get(group)
        if found is None:
            found = self._test.producer(group, **settings)
            if not settings:
                self._producers[group] = found
        return found

    def consumer(self, group: str, *, fail_fast: bool = True, **settings: Unpack[ConsumerArguments]) -> PushConsumer:
        """Return a consumer in a process of its own, which starts with the next send or when time moves.

        ``settings`` are those of `PushConsumer`. What its listeners raise fails the test, `ReconsumeLater` and
        `SuspendQueue` excepted; with ``fail_fast`` False it is a failed delivery, as in production.
        """
        made: list[PushConsumer] = []

        def again(process: Process) -> PushConsumer:
            consumer = process.consumer(group, **settings)
            if made:  # a restarted or a further one: with the listeners of the first
                consumer.subscribe_like(made[0])
            else:
                made.append(consumer)
            return consumer

        if not fail_fast:
            self._tolerated.add(group)
        process = self._process(self._free_name(group), again)
        self._declared.add(process.name)
        process.state = again(process)
        self._unstarted += process.consumers
        return made[0]

    def app(self, name: str, factory: Callable[[Process], Any], *, fail_fast: bool = True) -> Process:
        """Return a process that ``factory(process)`` sets up, now and after each restart.

        The process is a route: an application connects to it as to a broker. What the factory returns is its ``state``.
        """
        process = self._process(self._free_name(name), factory)
        if not fail_fast:
            self._tolerated.add(process.name)
        self._set_up(process)
        self._is_new = True
        return process

    def _process(self, name: str, factory: Callable[[Process], Any], generation: int = 1) -> Process:
        count = len(self.processes)
        order = "after" if not count else self.runner.choose(f"client ids of {name}", ("after", "before"))
        host = f"10.0.0.{254 - count % 150}" if order == "before" else f"10.0.1.{100 + count % 150}"
        process = Process(self, name, generation, host, factory)
        self.processes.append(process)
        return process

    def _free_name(self, name: str) -> str:
        names = {process.name for process in self.processes}
        number = 1
        while (free := name if number == 1 else f"{name}-{number}") in names:
            number += 1
        return free

    def _set_up(self, process: Process) -> None:
        process.state = process.factory(process)
        for consumer in process.consumers:
            consumer.start()

    def _start(self) -> None:
        """Start the consumers that were only declared, and let new ones take their queues."""
        while self._unstarted:
            consumer = self._unstarted.pop(0)
            if not consumer.is_running and not consumer.client.dead:
                consumer.start()
                self._is_new = True
        if self._is_new:
            self._is_new = False
            self._take_turns(self.clock.now_ms())

    # ---- time

    def advance(self, *, hours: float = 0, minutes: float = 0, seconds: float = 0, ms: int = 0) -> Elapsed:
        """Let time pass, and do all that is due on the way. In an event loop: ``await`` it.

        Raises:
            NotIdleError: A coroutine waits for something that does not come.
        """
        until = self.clock.now_ms() + ms + round(1000 * (seconds + 60 * (minutes + 60 * hours)))
        return self._run(lambda: until)

    def run_until_idle(self) -> Elapsed:
        """Do all that can be done now, while time stands still.

        Where an explored schedule has made something fail, up to two minutes pass, in which a cluster recovers: the
        locks of a dead process end, a member that was lost is back.
        """
        return self._run(lambda: self.clock.now_ms() + (_SETTLE_MS if self.runner.settles() else 0))

    def run_for(self, *, hours: float = 0, minutes: float = 0, seconds: float = 0, ms: int = 0) -> Elapsed:
        """Let at most this time pass, only as far as something is due; return how much it was."""
        end = self.clock.now_ms() + ms + round(1000 * (seconds + 60 * (minutes + 60 * hours)))

        def until() -> int:
            due = self.runner.next_due_ms()
            return due if due is not None and self.clock.now_ms() < due <= end else self.clock.now_ms()

        return self._run(until, again=True)

    def _run(self, until: Callable[[], int], again: bool = False) -> Elapsed:
        self._check_awaited()
        begin = self.clock.now_ms()
        self._start()
        while True:
            at = until()
            self._take_turns(at)
            if self.runner.has_tasks:
                rest = partial(self._rest, until, at, begin, again)
                self._rest_of = Elapsed(timedelta(0), rest, _place_of_caller())
                return self._rest_of
            self.clock.move_to(max(at, self.clock.now_ms()))
            if not again or until() <= self.clock.now_ms():
                return Elapsed(timedelta(milliseconds=self.clock.now_ms() - begin))

    def _check_awaited(self) -> None:
        """Raise `NotAwaitedError` where the rest of `advance` and its like was left undone."""
        elapsed, self._rest_of = self._rest_of, None
        if elapsed is not None:
            raise NotAwaitedError(
                f"the call that moves time at {elapsed.place} was not awaited, so that coroutines of listeners did not "
                "end: write `await` before it"
            )

    async def _rest(self, until: Callable[[], int], at: int, begin: int, again: bool) -> timedelta:
        self._rest_of = None
        while True:
            await self.runner.advance_async(max(0, at - self.clock.now_ms()))
            self._take_turns(at)
            if self.runner.has_tasks:
                continue
            at = until() if again else at
            if not again or at <= self.clock.now_ms():
                return timedelta(milliseconds=self.clock.now_ms() - begin)

    def _take_turns(self, until_ms: int) -> None:
        __tracebackhide__ = True
        try:
            self.runner.take_turns(until_ms)
        except Exception as error:
            raise error.with_traceback(_own_traceback(error)) from error.__cause__
        if not self.runner.has_tasks and (waiting := self.runner.running - self.runner.late):
            labels = sorted(work.label for work in waiting)
            raise NotIdleError(f"still running: {', '.join(labels[:5])}")

    def checkpoint(self, label: str = "checkpoint") -> None:
        """Mark a place in a listener where others may run, as at every send. Only exploring heeds it."""
        self.runner.point(label)

    # ---- faults of processes and of the broker

    def crash(self, process: Process, *, restart: bool = True) -> None:
        """Let a process die: what it had not saved is lost. It starts again with fresh state unless ``restart`` is off.

        Within a listener of that process the listener ends at this call, as by a signal.
        """
        process = self._living(process)
        self.note("fault", f"{process.label} dies" + (" and starts again" if restart else ""))
        process.starts_again = restart
        if self._runs_now(process):
            self.runner.die_here(process)
        process.die()
        self.died(process)

    def died(self, process: Process) -> None:
        """Let the broker see that a process has died, and start the process again unless it is to stay dead."""
        self.runner.unwind(process)
        if not self.broker.dead:
            for client_id in process.clients:
                self.broker.forget(client_id)
        if process.starts_again:
            self._again(process)

    def _runs_now(self, process: Process) -> bool:
        work = current_work()
        return work is not None and self.process_of(work) is process

    def _living(self, process: Process) -> Process:
        """Return the process, or the one that was started again in its place."""
        for one in reversed(self.processes):
            if one.name == process.name and not one.dead:
                return one
        raise ProcessStateError(f"{process.name} has ended and was not started again: nothing is left of it to fail")

    def restart(self, process: Process) -> Process:
        """Shut a process down in order and start it again with fresh state; return the new one."""
        process = self._living(process)
        if self._runs_now(process):
            raise ProcessStateError(
                f"{process.label} can't shut down in order within its own listener, for which it would wait: "
                "call rmq.crash there, or rmq.restart in the test"
            )
        self.note("fault", f"{process.label} shuts down in order and starts again")
        process.shut_down()
        return self._again(process)

    def join(self, process: Process) -> Process:
        """Start one more process like this one, and return it."""
        other = self._process(self._free_name(process.name), process.factory)
        if process.name in self._tolerated:
            self._tolerated.add(other.name)
        self.note("fault", f"{other.label} joins, made like {process.label}")
        self._set_up(other)
        return other

    def lose(self, process: Process) -> None:
        """Let the broker lose a process that does not notice: others take its queues while it still consumes.

        The process is back at the next of its heartbeats, which are 30 s apart.
        """
        process = self._living(process)
        self.note("fault", f"{process.label} is lost to the broker, and does not know")
        for client_id in process.clients:
            self.broker.call(ChannelClosed(client_id))

    def crash_broker(self, *, down: float | timedelta = 0) -> None:
        """Let the broker die and open it again after ``down`` seconds, with all that it had acknowledged."""
        self.note("fault", "the broker dies")
        self.broker.abandon()
        self._changed()
        seconds = down.total_seconds() if isinstance(down, timedelta) else down

        def open_again(now_ms: int) -> int | None:
            self._open_broker()
            self.note("fault", "the broker is back")
            self._pulled_by.clear()
            for process in self.processes:
                for client in [] if process.dead else process.clients.values():
                    client.forgotten_by(self.broker.name)
            self._changed()
            return None

        if not seconds:
            open_again(self.clock.now_ms())
        else:
            with self.runner.lock:
                self.runner.wake(Step("the broker is back", open_again), self.clock.now_ms() + round(1000 * seconds))

    def _again(self, process: Process) -> Process:
        new = self._process(process.name, process.factory, process.generation + 1)
        self._set_up(new)
        return new

    # ---- what happened

    def delivered(self, group: str) -> list[DeliveryAttempt]:
        """Return each message that a listener of the group was given, once for each time, in order.

        Raises:
            UnknownGroupError: No consumer of the test has this group.
        """
        self._check_group(group)
        for one in self._subscribed.values():
            one.was_read |= one.group == group
        return list(self._history.delivered(group, self._message_at))

    def retries(self, group: str) -> list[StoredMessage]:
        """Return each message that was sent back for the group to be delivered again, in order, as it waits or waited.

        Raises:
            UnknownGroupError: No consumer of the test has this group.
        """
        self._check_group(group)
        topic = retry_topic(group)
        found = [m for m in self.broker.messages(SCHEDULE_TOPIC) if m.properties.get("REAL_TOPIC") == topic]
        return sorted(found, key=lambda message: message.physical_offset)

    def dead_letters(self, group: str) -> list[StoredMessage]:
        """Return what the group has given up.

        Raises:
            UnknownGroupError: No consumer of the test has this group.
        """
        self._check_group(group)
        return self.broker.dead_letters(group)

    def offsets(self, group: str) -> dict[MessageQueue, int]:
        """Return the group's progress as the broker has it: by queue, the offset of the next message.

        Raises:
            UnknownGroupError: No consumer of the test has this group.
        """
        self._check_group(group)
        name = self.broker.name
        return {
            MessageQueue(topic, name, queue_id): queue_offset
            for topic in self.broker.topics()
            for queue_id, queue_offset in sorted(self.broker.consumer_offsets(group, topic).items())
        }

    def messages(self, topic: str) -> list[StoredMessage]:
        """Return all messages of a topic, in the order in which they were stored."""
        self._looked_at.add(topic)
        return sorted(self.broker.messages(topic), key=lambda message: message.physical_offset)

    def history(self) -> History:
        """Return what happened so far; ``print`` it."""
        return self._history

    def undelivered(self) -> list[str]:
        """Return a sentence for each subscription that matched nothing, and each topic that no group subscribes to.

        A test that passes says them as an `UndeliveredWarning`, a test that fails shows them. Left out are topics that
        the test has read by `messages`, groups that it has asked about by `delivered`, and topics to which only the
        application sends, unless their name is almost one that is subscribed to.
        """
        if self.broker.dead:
            return []
        for one in self._subscribed.values():
            one.was_read |= self._history.was_given(one.group, one.subscription.topic)

        def next_offset(group: str, message: StoredMessage) -> int:
            return self.broker.consumer_offsets(group, message.topic).get(message.queue_id, 0)

        topics = [topic for topic in self.broker.topics() if next(iter(self.broker.messages(topic)), None) is not None]
        return list(
            undelivered(
                self._subscribed.values(),
                topics,
                self._sent_to - self._looked_at,
                self._looked_at,
                lambda topic: list(self.broker.messages(topic)),
                next_offset,
            )
        )

    def _check_group(self, group: str) -> None:
        known = {name for name, _ in self._subscribed}
        known |= {consumer.group for process in self.processes for consumer in process.consumers}
        if group in known or group in self.broker.groups() or dead_letter_topic(group) in self.broker.topics():
            return
        near = nearest(group, known)
        raise UnknownGroupError(
            f"no consumer of this test has the group {group!r}"
            + (f"; did you mean {near!r}?" if near else f"; its groups are {', '.join(sorted(known)) or 'none'}")
        )

    def _message_at(self, physical_offset: int) -> StoredMessage:
        message = self.broker.store.message_at(physical_offset)
        if message is None:
            raise LookupError(f"there is no message at {physical_offset} any more")
        return message

    # ---- what runner, processes and faults tell

    def note(self, who: str, what: str | Callable[[], str]) -> None:
        """Add a line to the history."""
        self._history.note(self.clock.now_ms(), who, what)

    def noted_pull(self, process: Process, request: PullMessage) -> None:
        """See a pull; a process that takes a queue over is worth a line of the history."""
        place = request.group, request.topic, request.queue_id
        if self._pulled_by.get(place) != process.label:
            before = self._pulled_by.get(place)
            self._pulled_by[place] = process.label
            if before is not None:
                where = f"{request.topic}/{request.queue_id}"
                self.note(f"{request.group}@{process.label}", f"takes {where} over at {request.queue_offset}")

    def noted_heartbeat(self, process: Process, request: Heartbeat) -> None:
        """Send the subscriptions of a process to the broker."""
        for data in request.consumers:
            for topic, subscription in data.subscriptions.items():
                key = data.group, topic
                if key not in self._subscribed:
                    is_declared = process.name in self._declared
                    self._subscribed[key] = Subscribed(data.group, subscription, is_declared, data.kind == "pull")

    def noted_async_call(self, call: Coroutine[Any, Any, _T], what: str) -> Coroutine[Any, Any, _T]:
        """Remember a coroutine that the test or a listener has to await; `close` looks."""
        self._async_calls = [one for one in self._async_calls if inspect.getcoroutinestate(one[0]) != "CORO_CLOSED"]
        self._async_calls.append((call, f"{what} at {_place_of_caller()}"))
        return call

    def before_send(self, process: Process, topic: str) -> None:
        """Record a message before it is stored; refuse it if a fault says so."""
        if current_work() is None:
            self._start()
        if process is self._test:
            self._sent_to.add(topic)
        self.faults.before_send(process, topic)

    def after_send(self, process: Process, topic: str, response: SendResponse, count: int) -> None:
        """Record a stored message or batch; lose or delay the answer if a fault says so."""
        if current_work() is not None:
            name = self.broker.name
            for offset_id in response.offset_ids:
                self.runner.sent(name, topic, int(offset_id[-16:], 16))
        self.faults.after_send(process, topic, response)

    def listener_begins(self, work: Work) -> None:
        """See user code begin."""
        self._history.begin(self.clock.now_ms(), work, self._about)

    def listener_ends(self, work: Work, outcome: str, error: Exception | None) -> None:
        """See user code end."""
        self._history.end(self.clock.now_ms(), work, outcome, error)

    def fails_fast(self, work: Work) -> bool:
        """Return whether what this code raises fails the test."""
        process = work.label.partition(" ")[0].partition("@")[2].partition("~")[0].partition(".")[0]
        return group_of(work) not in self._tolerated and process not in self._tolerated

    def ended_in_background(self, result: object, error: Exception | None) -> None:
        """Take what became of a call by `Process.background`; its error fails the test."""
        if error is not None and self.runner.failure is None:
            self.runner.failure = error

    def let_others_run(self) -> None:
        """Do all work that is due now, before the test continues."""
        self._start()
        self._take_turns(self.clock.now_ms())

    def process_of(self, work: Work) -> Process | None:
        """Return the process whose code this is."""
        for process in self.processes:
            if work.owner is process or any(work.owner is client for client in process.clients.values()):
                return process
        return None

    def _about(self, call: Call) -> str:
        shown: list[str] = []
        if self.broker.dead:
            return call.where
        for _, physical_offset in call.about:
            message = self._message_at(physical_offset)
            times = f", attempt {message.reconsume_times + 1}" if message.reconsume_times else ""
            shown.append(f"{show(message)}{times}")
        return f"{call.where} {', '.join(shown)}"

    def topic_route(self, topic: str) -> tuple[QueueData, ...]:
        """Return the queues of a topic; while the broker is down, those that were known before."""
        if self.broker.dead:
            return self._routes.get(topic, ())
        found = self._routes[topic] = self.broker.topic_route(topic)
        return found

    def watch(self, changed: Callable[[], None]) -> Callable[[], None]:
        """Call ``changed`` when topics change and when the broker is opened again; return what ends that."""
        self._watchers.append(changed)
        return lambda: self._watchers.remove(changed) if changed in self._watchers else None

    def _changed(self) -> None:
        for changed in list(self._watchers):
            changed()

    # ---- its end

    def close(self) -> None:
        """End all processes, close the broker and check its store. Closing again does nothing.

        Warns (`UndeliveredWarning`) of what `undelivered` says.

        Raises:
            UnsoundStoreError: The store is damaged.
            NotAwaitedError: A call that has to be awaited was not.
        """
        if self._closed:
            return
        if not self._check:
            self._check_all_awaited()
            self.abandon()
            return
        try:
            self._check_all_awaited()
        finally:
            self._end()
        if self.broker.dead:
            self._open_broker()
        left = self.undelivered()
        self.broker.close()
        damage = verify(self.path, self._store_config, self.files).damage
        if damage:
            lines = "\n".join(f"{one.file} at {one.offset}: {one.what}" for one in damage[:10])
            raise UnsoundStoreError(f"the broker's store is not sound:\n{lines}")
        if left:
            warnings.warn("\n".join(left), UndeliveredWarning, stacklevel=2)

    def _check_all_awaited(self) -> None:
        self._check_awaited()
        calls, self._async_calls = self._async_calls, []
        forgotten = [what for call, what in calls if inspect.getcoroutinestate(call) == "CORO_CREATED"]
        for call, _ in calls:
            call.close()
        if forgotten:
            raise NotAwaitedError(f"nothing was sent by {', '.join(forgotten)}: write `await` before it")

    def abandon(self) -> None:
        """End everything without a look at the store, as after a failure."""
        if not self._closed:
            if self.runner.settles_history:
                self._history.settle()
            self._end()
            self.broker.abandon()

    def _end(self) -> None:
        self._closed = True
        for process in self.processes:
            process.die()
        self.runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            error.add_note("\n".join([f"what happened:\n{self._history}", *self.undelivered()]))
            self.abandon()
        else:
            self.close()


def _place_of_caller() -> str:
    """Return file and line of the user's code that has called."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(LIBRARY) and frame.f_back is not None:
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def _own_traceback(error: BaseException) -> TracebackType | None:
    """Return the traceback from the user's code on, if it has any."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_frame.f_code.co_filename.startswith(LIBRARY):
        traceback = traceback.tb_next
    return traceback or error.__traceback__
