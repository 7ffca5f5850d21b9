"""The kit: a broker under a clock that the test moves, processes around it, and a history to assert on."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from datetime import timedelta
from functools import partial
from inspect import iscoroutine, isgenerator
from traceback import format_exception
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, TypedDict, TypeVar, Unpack

from librmq.broker import Broker, BrokerConfig
from librmq.client import Producer
from librmq.client.operations import observe_kept
from librmq.client.producer import ProducerArguments
from librmq.client.recorder import Event, Recorder
from librmq.clock import LAST_MS, ManualClock, SystemClock, replace_default_clock
from librmq.cluster import Cluster
from librmq.config import StoreConfig, check_now, to_seconds, wrong_kind
from librmq.consumer import PushConsumer
from librmq.errors import ConfigError, MissingExtraError
from librmq.files import DiskFiles, Files, MemoryFiles
from librmq.message import MessageQueue, StoredMessage, dead_letter_topic, retry_topic
from librmq.message.topics import SystemTopic
from librmq.protocol import check_site, site_of
from librmq.testing._evidence import Evidence, HistoryAnomalyError, UndeliveredWarning, check_kinds, history_problem
from librmq.testing._faults import Faults
from librmq.testing._kit_runner import Driver, Elapsed, KitRunner, ProcessTable, current_work
from librmq.testing._network import FOLDER, SMALL_FILES, Frames, Network, broker_names, machine_ms
from librmq.testing._process import A_PROCESS, ConsumerArguments, Process, ProcessStateError
from librmq.testing.histories._history import DeliveryAttempt, History

if TYPE_CHECKING:
    from librmq.cluster import ReplicaConfig
    from librmq.testing._from_store import GroupNames, StoreStart
    from librmq.testing._replica import KitReplica

_T = TypeVar("_T")

_SETTLE_MS: Final = 120_000


class UnsoundStoreError(AssertionError):
    """The store that the broker left at the end of a test is damaged."""


class BrokerKeywords(TypedDict, total=False):
    """The settings of a `Kit` that say nothing of messages."""

    broker_config: BrokerConfig | None
    store_config: StoreConfig | None
    now_ms: int
    """The time at which the clock begins, in milliseconds since 1970; not before the last message of ``store``."""
    over_tcp: bool
    over_share: bool
    datetime_too: bool


class KitKeywords(BrokerKeywords, total=False):
    """The settings of a `Kit`, as `librmq.testing.explore` and the marker ``rmq`` take them."""

    path: str | os.PathLike[str] | None
    store: str | os.PathLike[str] | StoreStart | None
    topics: Collection[str] | None
    groups: GroupNames | None


class Kit:
    """A broker, a clock that stands still until it is moved, and processes that send and consume.

    A context manager: at its end the broker is closed, and its store must be sound. The store is in memory unless
    ``path`` names a folder. Nothing sleeps and nothing runs in the background: `advance`, `run_until_idle` and
    `run_for` take all turns in the calling thread. Not thread-safe.
    """

    def __init__(  # noqa: PLR0913 (what a test may choose)
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        store: str | os.PathLike[str] | StoreStart | None = None,
        topics: Collection[str] | None = None,
        groups: GroupNames | None = None,
        broker_config: BrokerConfig | None = None,
        store_config: StoreConfig | None = None,
        now_ms: int | None = None,
        over_tcp: bool = False,
        over_share: bool = False,
        datetime_too: bool = False,
        runner: KitRunner | None = None,
        check: bool = True,
        files: Files | None = None,
    ) -> None:
        """The broker is open from now on.

        With ``store`` it begins with ``topics`` and ``groups`` of another store, see `from_store`. With ``over_tcp``
        requests of clients cross a TCP connection as frames of 4.x, with ``over_share`` the socket of a peer of
        `librmq.share`. The clock begins at ``now_ms``, by default behind the last message of ``store``, or at
        the machine's time in whole seconds. With ``check`` False the store is not verified at the end.
        ``files``, such as `MemoryFiles`, holds the store in place of the disk. With ``datetime_too`` the kit's time is
        what ``datetime.now()`` and ``time.time()`` return in the whole program, until the end of the kit.

        Raises:
            MissingExtraError: ``datetime_too`` needs the extra ``datetime``.
        """
        if datetime_too:
            _time_machine()  # its error comes before anything is made
        if over_tcp and over_share:
            raise ConfigError("over_tcp and over_share: expected one of them, found both")
        start = starting_store(store, topics, groups, store_config)
        begin_ms = begin_of(start, now_ms)
        self.clock: ManualClock = runner.manual_clock if runner is not None else ManualClock(begin_ms)
        """The time, which `advance` moves."""
        self.clock.move_to(max(begin_ms, self.clock.now_ms()))
        self.runner: KitRunner = runner or KitRunner(self.clock)
        self.runner.kit = self
        self.start: StoreStart | None = start
        """What the kit's store began with; None for an empty one."""
        self.files: Files = DiskFiles() if files is None else files
        self.path: str = FOLDER if path is None else os.fspath(path)
        """The store's folder."""
        if path is None:
            self.files = MemoryFiles() if start is None else start.files()
        elif start is not None:
            start.copy_to(self.path)
        self.runner.progress_home = self.path + ".clients", self.files
        self._check = check
        self._expected: set[str] = set()
        self._history = History(self.clock.now_ms())
        self.recorder: Recorder = Recorder(self.clock.now_ms, self._history, describes_groups=False)
        """Turns what clients and brokers do into the events of the history."""
        self._table: ProcessTable = ProcessTable(partial(Process, self), self.runner.choose)
        self.runner.process_table = self._table
        self.faults: Faults = Faults(self, self.runner, self._table)
        """Faults on request."""
        self._unstarted: list[PushConsumer] = []
        self._producers: dict[tuple[str, str | None], Producer] = {}
        self._is_new = False
        self._closed = False
        self._driver = Driver(self.runner, self._start)
        config = store_config or (SMALL_FILES if start is None else start.config)
        frames: Frames | None = "share" if over_share else "tcp" if over_tcp else None
        self.network: Network = Network(
            self.path, self.files, self.runner, broker_config, config, self._note_broker, frames
        )
        self.observer: Evidence = Evidence(self, self.runner, self._table, self.faults, start, self._start)
        """What processes report to."""
        self._watch_resets()
        self._test = self._table.make("test", lambda process: None)
        self._test.is_test = True
        self._tests: dict[str | None, Process] = {None: self._test}
        # Last, because nothing would end them after an error above: a kit that does not open is never closed.
        self._end_default_clock = replace_default_clock(self.clock)
        self._end_observing_kept = observe_kept(self.runner.kept)
        self._end_datetime = _let_datetime_follow(self.clock) if datetime_too else None

    @classmethod
    def from_store(
        cls,
        path: str | os.PathLike[str],
        topics: Collection[str] | None = None,
        groups: GroupNames | None = None,
        **settings: Unpack[BrokerKeywords],
    ) -> Self:
        """Return a kit that begins with messages of the store in ``path``, which is only read.

        The store can be a broker's folder, in use or not, a snapshot, or one that `librmq.store.extract` made. Its
        messages are copied into a small store, with other physical offsets, and queue offsets from 0 on. The clock
        stands behind the store's last message.

        Args:
            path: The folder of the store.
            topics: The topics whose messages are there; None means all topics of producers, without dead letters.
            groups: The groups that continue from their recorded progress, with their retries and the delayed messages
                that wait; in a queue without progress they begin with its first message. A mapping gives a group other
                progress: ``"begin"``, ``"end"``, a time with a time zone, a queue offset of the source, or such
                offsets by topic and queue id; then its earlier retries are left out. None means all groups.
            settings: Those of the class. The sizes of files follow from the messages.

        Raises:
            NotAStoreError: There is no store, or one of another kind.
            CorruptionError: The store is damaged where messages are needed, or ends before sound records.
            ConfigError: The store has no such topic, a progress or a setting is wrong, or a recorded progress is in
                RocksDB, and so unknown.
            MessageIllegalError: A group's name is not valid.
        """
        return cls(store=path, topics=topics, groups=groups, **settings)

    @property
    def processes(self) -> list[Process]:
        """All processes of the test, including dead ones."""
        return self._table.processes

    # ---- brokers

    @property
    def broker(self) -> Broker:
        """The broker, or the first one of a cluster; another object after `crash_broker`."""
        return self.network.first

    def brokers(self) -> tuple[Broker, ...]:
        """Return all brokers by name."""
        return tuple(self.network.by_name.values())

    def cluster(self, *, brokers: int | Iterable[str] = 2, sites: Sequence[str] = ()) -> Cluster:
        """Replace the broker by a cluster, before anything else is done, and return the cluster.

        ``brokers`` is their number, at each of the ``sites`` if there are any, or their names.

        Raises:
            ConfigError: Brokers of one name, sites that no broker serves, or names that cannot be.
            ProcessStateError: The test has made clients already, or has a cluster.
        """
        names = broker_names(brokers, sites)
        if self.start is not None:
            raise ProcessStateError("a test that begins with a store has the one broker of that store: no rmq.cluster")
        if self.network.is_cluster or self.network.copies or self._has_clients():
            raise ProcessStateError("rmq.cluster replaces the broker: call it once, before clients and topics are made")
        cluster = self.network.make_cluster(names)
        self._history.shows_brokers = len(names) > 1
        self._watch_resets()
        return cluster

    def replica(
        self,
        of: str | None = None,
        *,
        sync: bool = False,
        site: str | None = None,
        config: ReplicaConfig | None = None,
    ) -> KitReplica:
        """Return a new replica of a broker, the first one by default, at a site.

        Consumers read from it while they cannot reach the broker. With ``sync`` sends wait for a replica; the broker is
        reopened for that, before anything else is done. Its name, ``broker-a-copy`` or ``sh-hz-broker-a-copy``, is an
        end of links.

        Raises:
            ProcessStateError: ``sync`` comes too late.
            ConfigError: The site's name is invalid, or the broker has a replica there.
        """
        network = self.network
        master = network.first if of is None else network.named(of)
        if site is not None:
            check_site(site)
        name = f"{master.name}-copy" if site is None else f"{site}-{master.name}-copy"
        if any(copy.name == name for copy in network.copies):
            raise ConfigError(f"broker {master.name} has the replica {name}: name another site")
        if sync and self._has_clients():
            raise ProcessStateError("rmq.replica(sync=True) reopens the broker: call it before clients are made")
        if sync:
            network.wait_for_replicas(master.name)
        from librmq.testing._replica import KitReplica  # few tests need what it loads

        replica = KitReplica(self, self.runner, self.observer, master.name, name, config)
        network.add_copy(replica)
        return replica

    def _has_clients(self) -> bool:
        return len(self.processes) > 1 or bool(self._producers or self._test.clients)

    # ---- senders and consumers

    @property
    def route(self) -> Process:
        """The test's own process, as the route for clients that the test creates."""
        return self._test

    def producer(
        self, group: str = "test", *, site: str | None = None, **settings: Unpack[ProducerArguments]
    ) -> Producer:
        """Return the test's own producer of a group, or with ``settings``, those of `Producer`, a new one."""
        producer = None if settings else self._producers.get((group, site))
        if producer is None:
            producer = self._test_at(site).producer(group, **settings)
            if not settings:
                self._producers[group, site] = producer
        return producer

    def _test_at(self, site: str | None) -> Process:
        process = self._tests.get(site)
        if process is None:
            process = self._tests[site] = self._table.make(f"test-{site}", lambda process: None, site=site)
            process.is_test = True
        return process

    def console(self, *, allow_changes: bool = False) -> Callable[..., Any]:
        """Return pages about the kit's broker, an ASGI application, at the clock that the test moves.

        Raises:
            MissingExtraError: The extra ``console`` is not installed.
        """
        from librmq.console import console  # loads a web framework

        # Only the test reaches it.
        return console(self.broker, allow_changes=allow_changes, behind_proxy=True)

    def consumer(
        self, group: str, *, site: str | None = None, fail_fast: bool = True, **settings: Unpack[ConsumerArguments]
    ) -> PushConsumer:
        """Return a consumer in its own process, at a site, which starts with the next send or when time moves.

        ``settings`` are those of `PushConsumer`. Errors of its listeners fail the test, except `ReconsumeLater` and
        `SuspendQueue`; with ``fail_fast`` False they are failed deliveries, as in production.
        """
        consumers: list[PushConsumer] = []

        def again(process: Process) -> PushConsumer:
            consumer = process.consumer(group, **settings)
            if consumers:  # a restarted or added one gets the listeners of the first
                consumer.subscribe_like(consumers[0])
            else:
                consumers.append(consumer)
            return consumer

        if not fail_fast:
            self._table.tolerated.add(group)
        process = self._table.make(self._table.free_name(group), again, site=site)
        self.observer.declared.add(process.name)
        process.state = again(process)
        self._unstarted += process.consumers
        return consumers[0]

    def app(
        self, name: str, factory: Callable[[Process], Any], *, site: str | None = None, fail_fast: bool = True
    ) -> Process:
        """Return a process, at a site, that ``factory(process)`` sets up, now and after each restart.

        The process is a route: an application connects to it as to a broker. The factory's result is its ``state``.
        """
        process = self._table.make(self._table.free_name(name), factory, site=site)
        if not fail_fast:
            self._table.tolerated.add(process.name)
        self._set_up(process)
        self._is_new = True
        return process

    def _outside_process(self, name: str) -> Process:
        """Return a process whose code the kit does not run, such as a client over the wire."""
        process = self._table.make(self._table.free_name(name), lambda process: None)
        process._starts_again = False
        return process

    def _set_up(self, process: Process) -> None:
        process.state = process._factory(process)
        if iscoroutine(process.state) or isgenerator(process.state):
            process.state.close()
            raise ConfigError(
                f"app {process.name!r}: expected a function that sets the process up, found one of which nothing would "
                "run, with async or yield: make it a plain function; listeners may be coroutines"
            )
        for consumer in process.consumers:
            consumer.start()

    def _start(self) -> None:
        """Start declared consumers, and let new ones take their queues."""
        while self._unstarted:
            consumer = self._unstarted.pop(0)
            if not consumer.was_started and not consumer.client.dead:
                consumer.start()
                self._is_new = True
        if self._is_new:
            self._is_new = False
            self._driver.take_turns(self.clock.now_ms())

    # ---- time

    def advance(self, *, hours: float = 0, minutes: float = 0, seconds: float = 0, ms: int = 0) -> Elapsed:
        """Let time pass, and do everything that becomes due. In an event loop, ``await`` the call.

        Raises:
            NotIdleError: A coroutine waits for something that does not happen.
            ConfigError: The time is below 0, or no number, or the clock would pass the year 9999.
        """
        until = time_after(self.clock.now_ms(), hours, minutes, seconds, ms)
        return self._driver.run(lambda: until)

    def run_until_idle(self) -> Elapsed:
        """Do everything that can be done now, while time stands still.

        If an explored schedule has caused a fault, up to two minutes pass, in which a cluster recovers: the locks of a
        dead process expire, and a lost member returns.
        """
        return self._driver.run(lambda: self.clock.now_ms() + (_SETTLE_MS if self.runner.settles() else 0))

    def run_for(self, *, hours: float = 0, minutes: float = 0, seconds: float = 0, ms: int = 0) -> Elapsed:
        """Let time pass up to this limit, but only while something is due; return the passed time."""
        end = time_after(self.clock.now_ms(), hours, minutes, seconds, ms)

        def until() -> int:
            due = self.runner.next_due_ms()
            return due if due is not None and self.clock.now_ms() < due <= end else self.clock.now_ms()

        return self._driver.run(until, again=True)

    def later(self, seconds: float | timedelta, label: str, call: Callable[[], object]) -> None:
        """Call a function after ``seconds``; ``label`` says what it does."""
        self.runner.after(seconds, label, call)

    def checkpoint(self, label: str = "checkpoint") -> None:
        """Mark a place in a listener where other turns can run, as at every send. It only affects exploring."""
        self.runner.point(label)

    # ---- faults of processes and of the broker

    def crash(self, process: Process, *, restart: bool = True) -> Process | None:
        """Let a process die without saving its state, and start it again with fresh state if ``restart`` is true.

        Return the new process, None without ``restart``. Called within a listener of that process, it ends the
        listener, like a signal.
        """
        process = self._table.living(process)
        self.note("fault", f"{process.label} dies" + (" and starts again" if restart else ""))
        process._starts_again = restart
        if self._table.runs_now(process):
            self.runner.die_here(process)
        process._die()
        return self.died(process)

    def died(self, process: Process) -> Process | None:
        """Let the broker notice the death of a process; return its successor unless it must stay dead."""
        self.recorder.crashed(process.names())
        self.runner.unwind(process)
        self._unregister_clients(process)
        return self._again(process) if process._starts_again else None

    def restart(self, process: Process) -> Process:
        """Shut a process down cleanly and start it again with fresh state; return the new one."""
        process = self._table.living(process)
        if self._table.runs_now(process):
            raise ProcessStateError(
                f"{process.label} can't shut down within its own listener, because the shutdown would wait for it: "
                "call rmq.crash there, or rmq.restart in the test"
            )
        self.note("fault", f"{process.label} shuts down and starts again")
        process.shut_down()
        self.recorder.died(process.names())
        return self._again(process)

    def join(self, process: Process) -> Process:
        """Start one more process like this one, and return it."""
        if not isinstance(process, Process):
            raise wrong_kind("process", process, A_PROCESS)
        other = self._table.make(self._table.free_name(process.name), process._factory, site=process.site)
        if process.name in self._table.tolerated:
            self._table.tolerated.add(other.name)
        self.note("fault", f"{other.label} joins, made like {process.label}")
        self._set_up(other)
        return other

    def lose(self, process: Process) -> None:
        """Let the brokers lose a process that does not notice: others get its queues while it still consumes.

        The process returns at its next heartbeat, which it sends every 30 s.
        """
        process = self._table.living(process)
        self.note("fault", f"{process.label} is lost to the broker, and does not notice")
        self._unregister_clients(process)

    def _unregister_clients(self, process: Process) -> None:
        for broker in self.brokers():
            for client in () if broker.dead else process.clients:
                broker.remove_client(client.client_id)

    def crash_broker(self, name: str | None = None, *, down: float | timedelta = 0) -> None:
        """Let a broker die and open it again after ``down`` seconds, with all acknowledged messages."""
        to_seconds("down", down, maximum=LAST_MS / 1000)
        broker = self.broker if name is None else self.network.named(name)
        label = broker.name if self.network.is_cluster else "the broker"
        self.note("fault", f"{label} dies")
        self.recorder.broker_crashed(broker.name)
        broker.abandon()

        def open_again() -> None:
            if self.network.named(broker.name) is broker:  # nothing else has reopened it
                self.network.reopen(broker.name)

        self.runner.after(down, f"{label} is back", open_again)

    def _note_broker(self, name: str, is_new: bool) -> None:
        """Let clients register with a broker that was added or reopened. Called under the runner's lock."""
        if self._closed:
            return
        self._watch_resets()
        label = name if self.network.is_cluster else "the broker"
        self.note("fault", f"{label} {'joins' if is_new else 'is back'}")
        self.observer.pulled_by.clear()  # a queue that moves to the new broker is no takeover
        for process in self.processes:
            for client in [] if process.dead else process.clients:
                client.removed_by(name)

    def _watch_resets(self) -> None:
        for broker in self.brokers():
            if self.recorder.reset not in broker.reset_hooks:
                broker.reset_hooks.append(self.recorder.reset)

    def lose_site(self, site: str, *, down: float | timedelta) -> None:
        """Let all brokers and processes of a site die, and start them again after ``down`` seconds.

        Called within a listener of the site, it ends the listener, like `crash`.

        Raises:
            ConfigError: No broker is at this site.
        """
        seconds = to_seconds("down", down, maximum=LAST_MS / 1000)
        brokers = [broker for broker in self.network.at(site) if not broker.dead]
        lost = [
            process for process in self.processes if process.site == site and not process.dead and not process.is_test
        ]
        caller = next((process for process in lost if self._table.runs_now(process)), None)
        is_back_now = not round(1000 * seconds)
        for broker in brokers:
            self.crash_broker(broker.name, down=down)
        for process in lost:
            if process is not caller:
                self.crash(process, restart=False)
        for copy in self.network.copies:
            if site_of(copy.name) == site and not copy.dead:
                copy.crash(down=seconds)

        def start_again() -> None:
            for process in lost:
                if process is not caller or not is_back_now:
                    process._starts_again = True
                    self._again(process)

        self.runner.after(down, f"site {site} is back", start_again)
        if caller is not None:  # last, because it ends the listener that calls
            self.crash(caller, restart=is_back_now)

    def _again(self, process: Process) -> Process:
        new = self._table.make(process.name, process._factory, process.generation + 1, process.site)
        self._set_up(new)
        return new

    # ---- results

    def delivered(self, group: str) -> list[DeliveryAttempt]:
        """Return each message that a listener of the group got, once for each delivery, in order.

        Raises:
            UnknownGroupError: No consumer of the test has this group.
        """
        self.observer.note_checked(group)
        return list(self._history.delivered(group, self.network.message_at))

    def retries(self, group: str) -> list[StoredMessage]:
        """Return each message that was sent back for redelivery to the group, in order, as stored for the retry.

        Raises:
            UnknownGroupError: No consumer of the test has this group.
        """
        self.observer.check_group(group)
        topic = retry_topic(group)
        return [m for m in self.network.in_order(SystemTopic.SCHEDULE) if m.properties.get("REAL_TOPIC") == topic]

    def dead_letters(self, group: str) -> list[StoredMessage]:
        """Return the group's dead letters.

        Raises:
            UnknownGroupError: No consumer of the test has this group.
        """
        self.observer.check_group(group)
        network, topic = self.network, dead_letter_topic(group)
        return [letter for name in network.by_name for letter in network.messages(name, topic)]

    def offsets(self, group: str) -> dict[MessageQueue, int]:
        """Return the group's progress at the broker: by queue, the offset of the next message.

        Raises:
            UnknownGroupError: No consumer of the test has this group.
        """
        self.observer.check_group(group)
        return {
            MessageQueue(topic, broker.name, queue_id): queue_offset
            for broker in self.brokers()
            for topic in broker.topics()
            for queue_id, queue_offset in sorted(broker.consumer_offsets(group, topic).items())
        }

    def messages(self, topic: str) -> list[StoredMessage]:
        """Return all messages of a topic, in the order in which they were stored."""
        self.observer.read_topics.add(topic)
        return self.network.in_order(topic)

    def history(self) -> History:
        """Return the history; ``print`` shows it."""
        return self._history

    def events(self) -> list[Event]:
        """Return what clients and brokers have done so far, as events for `check_history`."""
        self.recorder.end_invisible_times()
        return [*self._history.events, *self.observer.events(self.clock.now_ms())]

    def expect(self, *anomalies: str) -> None:
        """Declare the anomalies of the history that the test is about, such as ``"repeat"``; others fail the test.

        Without one of them the test fails.

        Raises:
            ConfigError: An anomaly of this name does not exist.
        """
        check_kinds(anomalies)
        self._expected.update(anomalies)

    def effect(self, name: str, key: str) -> None:
        """Record something that must happen once for ``name`` and ``key``, such as a payment of an order."""
        for what, text in (("name", name), ("key", key)):
            if not isinstance(text, str):
                raise wrong_kind(what, text, "a text")
        work = current_work.get()
        process = None if work is None else self._table.process_of(work)
        label = (process or self._test).label
        self.recorder.add_event("effect", name=name, key=key, process=label, at_ms=self.clock.now_ms())

    def undelivered(self) -> list[str]:
        """Return a sentence for each subscription that matched nothing, topic without a group, and unused fault.

        A passing test issues them as an `UndeliveredWarning`, a failing test shows them. Excluded are topics that the
        test has read with `messages`, groups that it has passed to `delivered`, and topics to which only the
        application sends, unless their name is similar to a subscribed one.
        """
        return [*self.observer.undelivered(), *self.faults._missed()]

    def _account(self) -> str:
        """Return the history, the sentences of `undelivered`, and calls that were not awaited, to show with a failure.

        It raises nothing, so that the failure itself is always shown: where a part fails, its error is in the text.
        """

        def sentences() -> str:
            return "\n".join([*self.undelivered(), *self._driver.unawaited()])

        parts: list[str] = []
        for text_of in (self._history.__str__, sentences):
            try:
                parts.append(text_of())
            except Exception as error:
                parts.append("".join(["librmq failed to describe the test:\n", *format_exception(error)]))
        return "\n".join(filter(None, parts))

    # ---- called by runner, processes, faults and observer

    def note(self, actor: str, what: str | Callable[[], str]) -> None:
        """Add a line to the history."""
        self._history.note(self.clock.now_ms(), actor, what)

    def _noted_async_call(self, call: Coroutine[Any, Any, _T], what: str) -> Coroutine[Any, Any, _T]:
        """Record a coroutine that the test or a listener has to await; `close` checks it."""
        return self._driver.noted_async_call(call, what)

    def _let_others_run(self) -> None:
        """Do all due work before the test continues."""
        self._start()
        self._driver.take_turns(self.clock.now_ms())

    # ---- its end

    def close(self) -> None:
        """End all processes, close the broker, check its store and the history. A second call does nothing.

        Issues an `UndeliveredWarning` with the sentences of `undelivered`.

        Raises:
            UnsoundStoreError: The store is damaged.
            HistoryAnomalyError: The history has an anomaly that the test does not expect, or lacks one that it does.
            NotAwaitedError: A call was not awaited.
        """
        if self._closed:
            return
        self._check_history()
        if not self._check:
            self._driver.check_awaited()
            self.abandon()
            return
        try:
            self._driver.check_awaited()
        finally:
            self._end()
        for broker in self.brokers():
            if broker.dead:
                self.network.reopen(broker.name)
        for copy in self.network.copies:
            if copy.dead:
                copy.open()
        left = self.undelivered()
        self.network.close()
        damage = self.network.damage()
        if damage:
            raise UnsoundStoreError("the broker's store is not sound:\n" + "\n".join(damage[:10]))
        if left:
            warnings.warn("\n".join(left), UndeliveredWarning, stacklevel=2)

    def _check_history(self) -> None:
        problem = history_problem(self.events(), self._expected, self._history.begin_ms, self.observer.fixture)
        if problem:
            error = HistoryAnomalyError(problem)
            if self.runner.settles_history:  # otherwise the explorer reads the history, and then ends the run
                error.add_note(f"what happened:\n{self._account()}")
                self.abandon()
            raise error

    def abandon(self) -> None:
        """End everything without verifying the store, as after a failure."""
        if not self._closed:
            if self.runner.settles_history:
                self._history.settle()
            self._end()
            self.network.abandon()

    def _end(self) -> None:
        self._closed = True
        for process in self.processes:
            process._die()
        self._driver.end()
        self.runner.shutdown()
        self._end_default_clock()
        self._end_observing_kept()
        if self._end_datetime is not None:
            self._end_datetime()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            error.add_note(f"what happened:\n{self._account()}")
            self.abandon()
        else:
            self.close()


def _time_machine() -> ModuleType:
    try:
        import time_machine  # only kits that move it need it
    except ImportError:
        raise MissingExtraError("Kit(datetime_too=True)", "datetime") from None
    return time_machine


def _let_datetime_follow(clock: ManualClock) -> Callable[[], object]:
    """Let the time of the whole program follow a clock; return a function that ends this."""
    travel = _time_machine().travel(clock.now_ms() // 1000, tick=False)
    machine = travel.start()

    def follow(now_ms: int) -> None:
        machine.shift(timedelta(milliseconds=now_ms - SystemClock().now_ms()))  # exact, unlike a float of seconds

    follow(clock.now_ms())
    clock.followers.append(follow)
    end: Callable[[], object] = travel.stop
    return end


def starting_store(
    store: str | os.PathLike[str] | StoreStart | None,
    topics: Collection[str] | None,
    groups: GroupNames | None,
    store_config: StoreConfig | None,
) -> StoreStart | None:
    """Return what a kit begins with; None without a store."""
    if store is not None:
        from librmq.testing._from_store import StoreStart  # most tests begin with an empty store

        return store if isinstance(store, StoreStart) else StoreStart.read(store, topics, groups, store_config)
    if topics is not None or groups is not None:
        raise ConfigError("topics and groups: expected store= with them, the folder of the store that has them")
    return None


def begin_of(start: StoreStart | None, now_ms: int | None) -> int:
    """Return the time at which a kit begins."""
    earliest_ms = machine_ms() if start is None else start.now_ms
    if now_ms is not None:
        check_now(now_ms)
        if not 0 <= now_ms <= LAST_MS:
            raise ConfigError(f"now_ms: expected milliseconds from 1970 to the year 9999, found {now_ms}")
    if start is not None and now_ms is not None and now_ms < earliest_ms:
        raise ConfigError(
            f"now_ms: expected a time after the store's last message, from {earliest_ms} on, found {now_ms}"
        )
    return earliest_ms if now_ms is None else now_ms


def time_after(now_ms: int, hours: float, minutes: float, seconds: float, ms: int) -> int:
    """Return the time in ms to which a clock moves.

    Raises:
        ConfigError: It is before ``now_ms`` or after the year 9999, or a part is not a number.
    """
    parts = {"hours": hours, "minutes": minutes, "seconds": seconds, "ms": ms}
    for name, value in parts.items():
        if type(value) not in (int, float) or value != value:
            raise ConfigError(f"{name}: expected a number, found {value!r:.80}")
        if abs(value) > LAST_MS:  # the sum of larger ones can be no number
            raise ConfigError(f"{name}: expected at most the time to the year 9999, found {value!r:.80}")
    until_ms = now_ms + round(ms + 1000 * (seconds + 60 * (minutes + 60 * hours)))
    if until_ms < now_ms:
        raise ConfigError(f"time can't go back: expected at least 0 ms, found {until_ms - now_ms:,}")
    if until_ms > LAST_MS:
        raise ConfigError(f"time: expected to move it to the year 9999 at most, found {until_ms - now_ms:,} ms more")
    return until_ms
