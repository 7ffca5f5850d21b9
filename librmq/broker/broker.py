"""A broker in the process: a store, and what clients see of it.

Mirrors ``BrokerController`` and its processors. Topics, groups, progress and filters are kept in the broker's own files
in ``config``; clients, locks and held pulls in memory, as there.

::

    call(request) ── producers ──> sending    ──> store ──> holds: who waits for the message
                  ── consumers ──> pulling, progress, clients (registry, locks)
                  ── people    ──> topics, groups, store
    steps of the runner: delayed messages, held pulls whose time is over, saving what has changed, the store's flushes
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime, timedelta
from typing import Any, Final, Literal, Protocol, Self, TypeVar, cast

from librmq.broker.administration import Administration
from librmq.broker.answers import ConnectedClient, GroupConnections
from librmq.broker.arrivals import Arrivals
from librmq.broker.clients import Clients
from librmq.broker.config import BrokerConfig
from librmq.broker.context import BrokerContext
from librmq.broker.dead_letters import retry_of
from librmq.broker.delayed_sends import DelayedSends
from librmq.broker.groups import Groups
from librmq.broker.locks import QueueLocks
from librmq.broker.long_polling import Holds
from librmq.broker.persistence import DelayProgress, Saving, Writing
from librmq.broker.progress import Progress
from librmq.broker.pulling import PullHandler
from librmq.broker.readers import StoreReaders
from librmq.broker.registry import Registry
from librmq.broker.sending import Sending
from librmq.broker.topics import Topics
from librmq.broker.transactions import BrokerTransactions, CheckOffsets, DiscardHook
from librmq.clock import Clock, SystemClock, moves_by_itself
from librmq.config import StoreConfig, to_seconds
from librmq.delay import DelaySchedule
from librmq.errors import (
    BrokerError,
    BrokerUnreachableError,
    ConfigError,
    DiskFullError,
    FlushFailedError,
    GroupBehindError,
    MessageIllegalError,
    NoRouteError,
    RmqError,
    StoreClosedError,
    StoreError,
    StoreFullError,
    StoreLockedError,
)
from librmq.files.disk import DiskFiles, TemporaryFolder
from librmq.files.seam import Files
from librmq.lazy_exports import exported
from librmq.message.delay_levels import level_of_queue_id
from librmq.message.message import StoredMessage, dead_letter_topic
from librmq.message.topics import HALF_TOPIC
from librmq.metrics import Metrics
from librmq.protocol import (
    PERM_READ,
    PERM_WRITE,
    ChannelClosed,
    CheckSubscription,
    CleanUnusedTopics,
    ConsumerIds,
    CreateTopic,
    DeleteTopic,
    Endpoint,
    EndTransaction,
    GroupSubscriptions,
    Heartbeat,
    LockQueues,
    MaxOffset,
    MinOffset,
    OffsetByTime,
    PullMessage,
    QueryMessages,
    QueryOffset,
    QueueData,
    Request,
    ResetGroup,
    ResponseCode,
    SendBack,
    SendBatch,
    SendMessage,
    SetGroup,
    TopicGroups,
    UnlockQueues,
    Unregister,
    UpdateOffset,
    ViewMessage,
)
from librmq.runtime.runner import Aside, Runner, Step, aside_by
from librmq.runtime.threads import ThreadRunner
from librmq.scheduling.relay import HOP_TOPIC, HopProxy
from librmq.scheduling.timer import TIMER_TOPIC, Timers
from librmq.store import AppendResult, MessageStore
from librmq.store.format.broker_tables import BrokerTables

__all__ = ["Broker"]

A = TypeVar("A")
Q = TypeVar("Q", bound=Request[Any])
R = TypeVar("R")
_LOOK_FOR_LOCK_S: Final = 0.05
_LOOK_FOR_LEVEL_S: Final = 0.02


class _Reader(Protocol):
    """What `Broker.consume` needs of a consumer."""

    def subscribe(self, topic: str, *, tags: str | None = None, sql: str | None = None) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None: ...

    def __iter__(self) -> Iterator[StoredMessage]: ...


class Broker:
    """A broker of one process: an `Endpoint` that answers requests, and a `Route` of one. Thread-safe.

    Made by `open` or `temporary`; closed as a context manager. A handle is of no use in a child process after a fork.
    """

    name: str
    runner: Runner
    """Takes the turns of the broker and of its clients."""
    store: MessageStore
    config: BrokerConfig
    metrics: Metrics | None

    def __init__(self, *_: object, **__: object) -> None:
        raise TypeError("a broker is opened: Broker.open(path), or Broker.temporary() for a test")

    @classmethod
    def open(  # noqa: PLR0913 (what a user may choose)
        cls,
        path: str | os.PathLike[str],
        config: BrokerConfig | None = None,
        *,
        name: str = "broker-a",
        cluster_name: str = "DefaultCluster",
        store_config: StoreConfig | None = None,
        runner: Runner | None = None,
        clock: Clock | None = None,
        files: Files | None = None,
        metrics: Metrics | None = None,
        wait: float | timedelta = 0,
    ) -> Self:
        """Open the broker whose store is in ``path``; make a new one where there is nothing.

        Args:
            path: The store's folder.
            config: How the broker treats its clients.
            name: The broker's name in routes.
            cluster_name: What the broker writes into each message as its cluster.
            store_config: Sizes, durability and retention of the store.
            runner: Takes the turns of the broker and its clients; None makes threads, which end with the broker.
            clock: Of those threads; None is the system's.
            files: Where the files are; None is the disk.
            metrics: Counts what happens.
            wait: Seconds to wait for another process that has the store open for writing.

        Raises:
            StoreLockedError: another process has the store open for writing.
            ConfigError: settings are out of range, or disagree with the files.
            CorruptionError: a file of the store or of its configuration is damaged.
            NotAStoreError: the folder holds something else.
        """
        if config is not None and not isinstance(config, BrokerConfig):
            which = "store_config=" if isinstance(config, StoreConfig) else "a BrokerConfig"
            raise ConfigError(f"Broker.open(path, {type(config).__name__}(…)): expected {which}")
        deadline = SystemClock().monotonic() + to_seconds("wait", wait)
        while True:
            try:
                return cls._opened(path, config, name, cluster_name, store_config, runner, clock, files, metrics)
            except StoreLockedError:
                left = deadline - SystemClock().monotonic()
                if left <= 0:
                    raise
                SystemClock().wait(threading.Event(), min(left, _LOOK_FOR_LOCK_S))

    @classmethod
    def _opened(  # noqa: PLR0913 (those of `open`)
        cls,
        path: str | os.PathLike[str],
        config: BrokerConfig | None,
        name: str,
        cluster_name: str,
        store_config: StoreConfig | None,
        runner: Runner | None,
        clock: Clock | None,
        files: Files | None,
        metrics: Metrics | None,
    ) -> Self:
        broker = object.__new__(cls)
        with ExitStack() as undo:
            own = None
            if runner is None:
                own = runner = ThreadRunner(clock)
                undo.callback(own.close)
            broker._own_runner = own
            broker.metrics = metrics
            broker._open(os.fspath(path), config or BrokerConfig(), name, cluster_name, store_config, runner, files)
            undo.pop_all()
        return broker

    @classmethod
    def temporary(
        cls,
        config: BrokerConfig | None = None,
        *,
        name: str = "broker-a",
        cluster_name: str = "DefaultCluster",
        store_config: StoreConfig | None = None,
        runner: Runner | None = None,
        clock: Clock | None = None,
        metrics: Metrics | None = None,
    ) -> Self:
        """Open a new broker in a directory of its own that is deleted on closing; small files unless told else."""
        folder = TemporaryFolder()
        try:
            broker = cls.open(
                folder.name,
                config,
                name=name,
                cluster_name=cluster_name,
                store_config=store_config or StoreConfig(commitlog_file_size=4 << 20, max_total_size=1 << 30),
                runner=runner,
                clock=clock,
                metrics=metrics,
            )
        except BaseException:
            folder.delete()
            raise
        broker._temporary = folder
        return broker

    def _open(
        self,
        path: str,
        config: BrokerConfig,
        name: str,
        cluster_name: str,
        store_config: StoreConfig | None,
        runner: Runner,
        files: Files | None,
    ) -> None:
        self.name = name
        self.cluster_name = cluster_name
        self.config = config
        self.runner = runner
        self.dead = self.was_killed = False
        self._why_dead = "was closed"
        self._temporary: TemporaryFolder | None = None
        self._watchers: list[Callable[[], None]] = []
        now_ms = runner.now_ms()
        by_hand = not moves_by_itself(runner.clock)
        files = files or DiskFiles()
        tables = BrokerTables.open(os.path.join(path, "config"), files=files)
        self._registrations = tables.registrations(now_ms)
        self.store = MessageStore.open(
            path,
            store_config,
            files=files,
            clock=runner.clock,
            background=not by_hand,
            filters=self._registrations,
        )
        try:
            self._compose(tables, by_hand, now_ms)
            _open_brokers.add(self)
        except BaseException:
            self.store.close()
            raise

    def _compose(self, tables: BrokerTables, by_hand: bool, now_ms: int) -> None:
        self._by_hand = by_hand
        self._housekeeping = Step(f"{self.name} flushes its store", self.store.run_due, self)
        self._open_tables(tables)
        self._open_waiting(tables, now_ms)
        self._answer_requests()
        runner, store = self.runner, self.store
        self._show_gauges()
        with runner.lock:
            due = self._schedule.run_due(now_ms)
            if due is not None:
                runner.wake(self._delay, due)
            self._wake_timers()
            self._wake_hops()
            if (HALF_TOPIC, 0) in store.queues:
                self._transactions.prepared()

    def _open_tables(self, tables: BrokerTables) -> None:
        """Make what stands in the broker's files: topics, groups, progress, filters."""
        name, runner, config, store = self.name, self.runner, self.config, self.store
        aside = self._aside("writes its tables", lambda at: runner.wake(writing, at))
        self._writing = Writing(store.flush, runner.now_ms, lambda: runner.wake(writing), aside)
        writing = Step(f"{name} writes its tables", self._writing.run_due, self)
        save = self._writing.save
        self._topics = Topics(tables.topics, save, config, name, self.cluster_name, runner.now_ms, self._changed)
        self._groups = Groups(tables.groups, save, config.auto_create_group, runner.now_ms)
        self._saving = Saving(
            tables,
            self._writing,
            self._registrations,
            config.save_offsets_every_s,
            store.flush,
            runner.now_ms,
            lambda at: runner.wake(saving, at),
        )
        saving = Step(f"{name} saves progress", self._saving.run_due, self)
        self._offsets = self._saving.offsets
        with runner.lock:  # before anything goes on from its progress, as transactions and the relay do
            self._offsets.hold_back(lambda topic, queue_id: store.queue_range(topic, queue_id)[1])
        self._registry = Registry()
        sweep_ms = round(1000 * config.sweep_pulls_every_s)
        self._holds = Holds(sweep_ms, runner.now_ms, lambda at: runner.wake(holding, at))
        holding = Step(f"{name} answers held pulls", self._holds.run_due, self)
        self._context = BrokerContext(
            name,
            self.cluster_name,
            config,
            runner,
            store,
            self.metrics,
            self._topics,
            self._groups,
            self._offsets,
            self._registry,
            self._registrations,
            self._holds,
        )

    def _open_waiting(self, tables: BrokerTables, now_ms: int) -> None:
        """Make what carries messages to their time, and what tells of those that were stored."""
        name, runner, config, store = self.name, self.runner, self.config, self.store
        self._schedule = DelaySchedule(
            store,
            DelayProgress(tables, self._writing),
            now_ms,
            config.delay,
            delivered=self._delivered,
            aside=self._aside("flushes for its delays", lambda at: runner.wake(self._delay, at)),
        )
        self._delay = Step(f"{name} delivers delayed messages", self._schedule.run_due, self)
        self._timers: Timers | None = None
        if config.timers is not None:
            self._timers = Timers.open(
                store,
                config.timers,
                delivered=self._timed_out,
                aside=self._aside("saves its timers", lambda at: runner.wake(self._timing, at)),
            )
        self._timing = Step(f"{name} delivers what is due", self._run_timers, self)
        self._proxy: HopProxy | None = None
        if config.hops:
            self._proxy = HopProxy(
                store,
                CheckOffsets(self._offsets),
                delivered=self._hopped,
                make_topic=self._make_target,
                aside=self._aside("flushes for its hops", lambda at: runner.wake(self._hopping, at)),
            )
        self._hopping = Step(f"{name} sends on by levels", self._run_hops, self)
        wake_flush = self._wake_housekeeping if self._by_hand else None
        self._arrivals = Arrivals(runner, self._holds, self.metrics, self._delayed, wake_flush)
        self._transactions = BrokerTransactions(
            self._context,
            self._arrivals,
            lambda run_due: Step(f"{name} checks transactions", run_due, self),
            self._aside("flushes for its check", lambda at: self._transactions.wake(at)),
        )
        store.readers = StoreReaders(self._context, self._schedule, self._transactions, self._timers)
        self._arrivals.wake_by_topic = {
            HALF_TOPIC: self._transactions.prepared,
            TIMER_TOPIC: self._wake_timers,
            HOP_TOPIC: self._wake_hops,
        }

    def _answer_requests(self) -> None:
        """Say what answers which request."""
        context, locked, durable = self._context, self._locked, self._durable
        delayed_sends = DelayedSends(
            self.store.levels, self.runner.now_ms, self._timers, has_relay=self._proxy is not None
        )
        sending = self._sending = Sending(context, self._arrivals, delayed_sends, self._writing.write)
        pulling = PullHandler(context, sending)
        locks = QueueLocks(round(1000 * self.config.lock_expiry_s))
        clients = Clients(context, locks, self._saving.filters_changed)
        progress = self._progress = Progress(context)
        administration = Administration(context)
        self._handlers: dict[type, Callable[[Any], Any]] = {}
        answer = self._answer
        answer(SendMessage, sending.send)
        answer(SendBatch, sending.send_batch)
        answer(SendBack, sending.send_back)
        answer(EndTransaction, self._transactions.end)
        answer(PullMessage, pulling.pull)
        answer(CheckSubscription, pulling.check_subscription)
        answer(Heartbeat, locked(clients.heartbeat))
        answer(Unregister, locked(clients.unregister))
        answer(ChannelClosed, locked(clients.channel_closed))
        answer(ConsumerIds, locked(clients.consumer_ids))
        answer(GroupSubscriptions, locked(clients.subscriptions))
        answer(LockQueues, locked(clients.lock))
        answer(UnlockQueues, locked(clients.unlock))
        answer(QueryOffset, progress.query)
        answer(UpdateOffset, locked(progress.update))
        answer(MaxOffset, progress.end)
        answer(MinOffset, progress.begin)
        answer(OffsetByTime, progress.by_time)
        answer(ResetGroup, locked(progress.reset))
        answer(TopicGroups, locked(progress.groups))
        answer(CreateTopic, durable(administration.create_topic))
        answer(DeleteTopic, durable(administration.delete_topic))
        answer(CleanUnusedTopics, locked(administration.clean_unused_topics))
        answer(SetGroup, durable(administration.set_group))
        answer(ViewMessage, administration.view_message)
        answer(QueryMessages, administration.query_messages)

    def _answer(self, kind: type[Q], handler: Callable[[Q], object]) -> None:
        self._handlers[kind] = handler

    # ---- endpoint and route

    def call(self, request: Request[R], /) -> R:
        """Answer a request; `BrokerError` or `MessageIllegalError` if it is refused.

        `BrokerUnreachableError` once the broker is closed.
        """
        handler = self._handlers.get(type(request))
        if handler is None:
            raise BrokerError(
                ResponseCode.REQUEST_CODE_NOT_SUPPORTED, f"{self.name} does not know {type(request).__name__}"
            )
        try:
            answer: R = handler(request)
        except StoreError as error:
            raise self._refusal(error) from error
        return answer

    def _refusal(self, error: StoreError) -> RmqError:
        """Return what clients get for an error of the store."""
        if isinstance(error, StoreClosedError):
            return BrokerUnreachableError(f"{self.name} is closed: {self._closed() if self.dead else error}")
        if isinstance(error, DiskFullError | StoreFullError | FlushFailedError):
            return BrokerError(ResponseCode.SERVICE_NOT_AVAILABLE, f"{self.name}: {error}")
        return BrokerError(ResponseCode.SYSTEM_ERROR, f"{self.name}: {error}")

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except StoreError as error:
            raise self._refusal(error) from error

    def topic_route(self, topic: str) -> tuple[QueueData, ...]:
        """What the broker has of ``topic``; empty if nothing. Once it is closed: what it had."""
        found = self._topics.known.get(topic)
        if found is None:
            return ()
        return (QueueData(self.name, found.read_queues, found.write_queues, found.permission),)

    def broker_names(self) -> tuple[str, ...]:
        """Its own name, while it is open."""
        return () if self.dead else (self.name,)

    def endpoint(self, broker_name: str) -> Endpoint:
        """Itself; `NoRouteError` for any other name."""
        if broker_name != self.name:
            raise NoRouteError(f"there is no broker {broker_name!r}: this is {self.name!r}")
        return self

    def watch(self, changed: Callable[[], None]) -> Callable[[], None]:
        """Have ``changed`` called, under the runner's lock, when topics or their queues change, and when it closes.

        Gives a function that ends it.
        """

        def end() -> None:
            if changed in self._watchers:
                self._watchers.remove(changed)

        self._watchers.append(changed)
        return end

    def _changed(self) -> None:
        for changed in list(self._watchers):
            changed()

    def _locked(self, handler: Callable[[Q], A]) -> Callable[[Q], A]:
        """Make a handler run under the runner's lock, on an open broker."""

        def handle(request: Q) -> A:
            with self.runner.lock:
                self._check_open()
                return handler(request)

        return handle

    def _durable(self, handler: Callable[[Q], A]) -> Callable[[Q], A]:
        """Do as `_locked`; what the handler changes in the tables is durable when it returns."""
        handle = self._locked(handler)

        def handle_and_write(request: Q) -> A:
            answer = handle(request)
            self._writing.write()
            return answer

        return handle_and_write

    def _check_open(self) -> None:
        if self.dead:
            raise StoreClosedError(self._closed())

    def _closed(self) -> str:
        return f"{self.store.path}: this handle {self._why_dead}"

    # ---- for people

    def create_topic(
        self, topic: str, queues: int = 8, *, write_queues: int | None = None, permission: int = PERM_READ | PERM_WRITE
    ) -> None:
        """Make a topic of ``queues`` queues, or change it; nothing that is stored moves."""
        self.call(CreateTopic(topic, queues, queues if write_queues is None else write_queues, permission))

    def delete_topic(self, topic: str) -> None:
        """Forget a topic; its messages stay in the log until retention takes them.

        The files of its queues stay until `clean_unused_topics`.
        """
        self.call(DeleteTopic(topic))

    def clean_unused_topics(self) -> list[tuple[str, int]]:
        """Delete the queue files of topics that do not exist and have no messages in the log any more.

        Groups' progress in them is forgotten. Returns the queues: topic and queue id.
        """
        queues: tuple[tuple[str, int], ...] = self.call(CleanUnusedTopics())
        return list(queues)

    def set_group(self, group: str, *, retry_max_times: int = 16) -> None:
        """Make a consumer group, or change how often it retries."""
        self.call(SetGroup(group, retry_max_times))

    def topics(self) -> dict[str, QueueData]:
        """All topics, the broker's own among them, by name."""
        return {name: data for name in sorted(self._topics.known) for data in self.topic_route(name)}

    def groups(self) -> dict[str, int]:
        """All consumer groups, and how often each retries, by name."""
        return {name: group.retry_max_times for name, group in sorted(self._groups.known.items())}

    def find_by_id(self, message_id: str) -> StoredMessage | None:
        """Return the first record with an id: an offset id, or the unique id that a producer gave; None if none has."""
        with self._errors():
            return next(iter(self.store.find_by_id(message_id)), None)

    def find_by_key(self, topic: str, key: str, *, max_messages: int = 64) -> list[StoredMessage]:
        """Return the messages of a topic that have ``key`` as unique id or among their keys, in log order."""
        with self._errors():
            return self.store.find_by_key(topic, key, max_messages=max_messages)

    def resend_dead_letters(self, group: str, letters: Iterable[StoredMessage] | None = None) -> int:
        """Let a group have its dead letters once more, with all their retries; return how many.

        Each goes to the group's retry topic and is delivered at once; the dead letter stays where it is.

        Args:
            group: The consumer group.
            letters: Some of `dead_letters`; None takes all.

        Raises:
            ConfigError: a message is no dead letter of the group.
        """
        count = 0
        for letter in self.dead_letters(group) if letters is None else letters:
            if letter.topic != dead_letter_topic(group):
                raise ConfigError(f"{letter.message_id} of topic {letter.topic!r} is no dead letter of group {group!r}")
            self.call(retry_of(letter))
            count += 1
        return count

    def reset_group(
        self, group: str, topic: str, to: Literal["begin", "end"] | datetime | int, *, queue_id: int | None = None
    ) -> dict[int, int]:
        """Move a group's progress in a topic, whether the group runs or not; return the queue offsets by queue id.

        Args:
            group: The consumer group.
            topic: The topic.
            to: ``"begin"``, ``"end"``, the first message stored at or after a time (with a time zone), or a queue
                offset.
            queue_id: The only queue to move; None moves all.

        Raises:
            ConfigError: ``to`` is none of these.
            BrokerError: the topic or the queue does not exist.
        """
        with self._errors(), self.runner.lock:
            self._check_open()
            found = self._topics.known.get(topic)
            if found is None:
                raise BrokerError(ResponseCode.TOPIC_NOT_EXIST, f"topic {topic!r} does not exist")
            if queue_id is not None and not 0 <= queue_id < found.queues:
                raise BrokerError(
                    ResponseCode.SYSTEM_ERROR,
                    f"topic {topic!r} has {found.queues} queues: there is no queue {queue_id}",
                )
            queues = range(found.queues) if queue_id is None else (queue_id,)
            offsets = {each: self._offset_of(topic, each, to) for each in queues}
            self._progress.reset_to(group, topic, offsets)
            return offsets

    def _offset_of(self, topic: str, queue_id: int, to: str | datetime | int) -> int:
        begin, end = self.store.queue_range(topic, queue_id)
        if isinstance(to, datetime) and to.tzinfo is not None:
            return self._progress.offset_from(topic, queue_id, round(to.timestamp() * 1000))
        if type(to) is int and to >= 0:
            return min(max(to, begin), end)
        if to in ("begin", "end"):
            return begin if to == "begin" else end
        raise ConfigError(
            f"to: expected 'begin', 'end', a time with a time zone or a queue offset of at least 0, found {to!r:.80}"
        )

    def clients(self) -> tuple[ConnectedClient, ...]:
        """Return the clients that the broker knows, by id, with their groups."""
        with self._errors(), self.runner.lock:
            self._check_open()
            return self._registry.clients()

    def connections(self, group: str) -> GroupConnections | None:
        """Return the running instances of a consumer group and their subscriptions; None if there is none."""
        with self._errors(), self.runner.lock:
            self._check_open()
            return self._registry.connections(group)

    def join(self, timeout: float | timedelta = 30) -> None:
        """Wait until all running groups have consumed what is stored.

        Messages that wait for their time, retries among them, are not waited for.

        Args:
            timeout: Seconds. Where a test moves the clock, it is moved by up to as much.

        Raises:
            GroupBehindError: some group is not level by then; the message names the queues.
        """
        clock = self.runner.clock
        deadline = clock.monotonic() + to_seconds("timeout", timeout)
        while True:
            with self._errors(), self.runner.lock:
                self._check_open()
                behind = self._progress.behind()
            if not behind:
                return
            left = deadline - clock.monotonic()
            if left <= 0:
                raise GroupBehindError(f"{self.name}: not consumed in time: {'; '.join(behind[:8])}")
            self.runner.pass_time(min(left, _LOOK_FOR_LEVEL_S))

    def consume(
        self, topic: str, *, group: str, tags: str | None = None, sql: str | None = None
    ) -> Iterator[StoredMessage]:
        """Iterate over a topic as an instance of a consumer group, until no message comes for a poll's time.

        A message counts as consumed when the next one is asked for: where the loop is left early, the message that it
        was at comes again, to this group. For more control use `librmq.PullConsumer`.

        Raises:
            BrokerUnreachableError: the broker is closed.
            ConfigError: both ``tags`` and ``sql`` are given.
            FilterSyntaxError: the expression does not compile.
            MessageIllegalError: the topic or the group has a name that is refused.
        """
        with self._errors():
            self._check_open()
        make = cast("Callable[[Broker, str], _Reader]", exported("librmq", "PullConsumer"))  # it builds upon brokers
        consumer = make(self, group)
        consumer.subscribe(topic, tags=tags, sql=sql)
        return self._handed_out(consumer)

    @staticmethod
    def _handed_out(consumer: _Reader) -> Iterator[StoredMessage]:
        with consumer:  # a loop that is left early ends this block by an exception
            yield from consumer

    def forget(self, client_id: str) -> None:
        """A client is gone without a word: it leaves all its groups. Its queue locks expire by themselves."""
        self.call(ChannelClosed(client_id))

    def client_ids(self) -> tuple[str, ...]:
        """The ids of all clients that the broker knows, sorted."""
        with self.runner.lock:
            return self._registry.client_ids()

    def consumer_offset(self, group: str, topic: str, queue_id: int = 0) -> int | None:
        """A group's stored progress in a queue: the queue offset of its next message, None if there is none."""
        return self._offsets.get(group, topic, queue_id)

    def consumer_offsets(self, group: str, topic: str) -> dict[int, int]:
        """A group's stored progress in a topic, by queue id."""
        with self.runner.lock:
            return dict(self._offsets.of_topic(group, topic))

    def messages(self, topic: str) -> Iterator[StoredMessage]:
        """All messages of a topic, queue by queue."""
        for name, queue_id in sorted(name for name in self.store.queues if name[0] == topic):
            yield from self.store.messages(name, queue_id)

    @property
    def discard_hooks(self) -> list[DiscardHook]:
        """Called with each half message that a check gives up, and how often it had been checked."""
        return self._transactions.discard_hooks

    def dead_letters(self, group: str) -> list[StoredMessage]:
        """What a consumer group has given up."""
        return list(self.messages(dead_letter_topic(group)))

    # ---- turns and life

    def _delayed(self, level: int, store_timestamp_ms: int) -> int:
        self.runner.wake(self._delay, self._schedule.due_for(level, store_timestamp_ms))
        return self.store.levels.cap(level)

    def _delivered(self, waited: StoredMessage, topic: str, queue_id: int, result: AppendResult) -> None:
        # The properties are decoded only if a held pull asks for them.
        properties = waited.properties if (topic, queue_id) in self._holds.by_queue else {}
        self._arrivals.delivered(topic, queue_id, properties, result)
        if self.metrics is not None:
            self.metrics.count("delayed_out", level=str(level_of_queue_id(waited.queue_id)))

    def _wake_timers(self) -> None:
        if self._timers is not None:
            with self.runner.lock:
                self.runner.wake(self._timing)

    def _run_timers(self, now_ms: int) -> int | None:
        return None if self._timers is None else self._timers.run_due(now_ms)

    def _wake_hops(self) -> None:
        if self._proxy is not None:
            with self.runner.lock:
                self.runner.wake(self._hopping)

    def _run_hops(self, now_ms: int) -> int | None:
        if self._proxy is None:
            return None
        due = self._proxy.run_due(now_ms)
        delayed = self._schedule.run_due(now_ms)
        if delayed is not None:
            self.runner.wake(self._delay, delayed)
        return due

    def _make_target(self, topic: str, queue_id: int) -> None:
        """See that a topic has the queue: it may have been deleted since the message was sent."""
        with self.runner.lock:
            found = self._topics.ensure(topic, self.config.default_topic_queues)
        if not 0 <= queue_id < found.queues:
            raise MessageIllegalError(f"topic {topic!r} has {found.queues} queues: there is no queue {queue_id}")

    def _hopped(self, carried: StoredMessage, result: AppendResult) -> None:
        arrived = self.store.message_at(result.physical_offset)
        if arrived is not None:
            self._arrivals.delivered(arrived.topic, arrived.queue_id, arrived.properties, result)

    def _timed_out(self, waited: StoredMessage, result: AppendResult) -> None:
        properties = waited.properties
        self._arrivals.delivered(properties["REAL_TOPIC"], int(properties["REAL_QID"]), properties, result)

    def _aside(self, what: str, wake: Callable[[int], None]) -> Aside | None:
        return aside_by(self.runner, f"{self.name} {what}", self, wake)

    def _wake_housekeeping(self) -> None:
        """There is something to flush: by hand it is flushed by a step, else by a thread of the store."""
        if self._by_hand and self._housekeeping.at is None:
            at = self.runner.now_ms() + round(1000 * self.store.config.flush_interval_s)
            with self.runner.lock:
                self.runner.wake(self._housekeeping, at)

    def close(self) -> None:
        """Save all and close the store; clients have been shut down before. Closing again does nothing."""
        if not self._end(was_killed=False):
            return
        now_ms = self.runner.now_ms()
        with ExitStack() as last:
            last.callback(self._release)
            if self._temporary is not None:
                self._end_writing()
                last.callback(self.store.abandon, why="was closed")  # no other handle opens it
                return
            last.callback(self.store.close)
            last.callback(self._end_writing)
            with self.runner.lock, ExitStack() as saves:  # each of them, whatever becomes of the others
                saves.callback(self._saving.save_all, now_ms, self._closed())
                saves.callback(self._transactions.save)
                if self._proxy is not None:
                    saves.callback(self._proxy.save)
                if self._timers is not None:
                    saves.callback(self._timers.save)
                self._schedule.save(now_ms)

    def _end_writing(self) -> None:
        """Return when nothing is being written, and nothing will be."""
        self._writing.end(self._closed())
        if self._timers is not None:
            self._timers.let_go(self._closed())

    def abandon(self) -> None:
        """Let go of everything as a process does that is killed: what was not saved is lost, the next open recovers."""
        if self._end(was_killed=True):
            self._end_writing()
            try:
                self.store.abandon()
            finally:
                self._release()

    def _show_gauges(self) -> None:
        metrics = self.metrics
        if metrics is not None:
            store, held = self.store, self._holds.by_queue
            metrics.gauge("held_pulls", lambda: sum(map(len, list(held.values()))))
            metrics.gauge("log_bytes", lambda: store.log.end)
            metrics.gauge("disk_used", lambda: store.files.used_ratio(store.path))

    def _hide_gauges(self) -> None:
        if self.metrics is not None:
            for name in ("held_pulls", "log_bytes", "disk_used"):
                self.metrics.gauge(name, None)

    def _end(self, *, was_killed: bool) -> bool:
        """Take no more calls; false if that was so already."""
        with self.runner.lock:
            if self.dead:
                return False
            self.dead, self.was_killed = True, was_killed
            _open_brokers.discard(self)
            self._holds.by_queue.clear()
            self._hide_gauges()
            self._changed()
            return True

    def _release(self) -> None:
        if self._own_runner is not None:
            self._own_runner.close()
        if self._temporary is not None:
            self._temporary.delete()

    _own_runner: ThreadRunner | None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.runner.offload(self.close)

    def __repr__(self) -> str:
        return f"<Broker {self.name!r} in {self.store.path!r}{', closed' if self.dead else ''}>"

    def __reduce__(self) -> str:
        raise TypeError(
            f"{self!r} can't be pickled, nor can what holds it: one process owns a store; open consumers there"
        )


_open_brokers: weakref.WeakSet[Broker] = weakref.WeakSet()


def _after_fork() -> None:
    for broker in list(_open_brokers):
        broker.dead, broker._why_dead = True, "was opened before a fork: open the broker again in the child"
        broker._writing.let_go(broker._closed())
    _open_brokers.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
