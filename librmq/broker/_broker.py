"""A broker in the process: a store, as clients see it.

Mirrors ``BrokerController`` and its processors. Topics, groups, progress and filters are kept in the broker's own files
in ``config``; clients, locks and held pulls in memory, as in 4.9.

::

    send(message) ── producers ──> sending    ──> store ──> held pulls that wait for the message
    call(request) ── others, on the wire too ──> sending
                  ── consumers ──> pulling, progress, clients, locks
                  ── operators ──> topics, groups, store
    steps of the runner: delayed messages, held pulls that time out, saving changes, the store's flushes
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar, Unpack

from librmq.broker._administered_route import StoreRoute
from librmq.broker._context import BrokerContext, BrokerLife
from librmq.broker._delayed_messages import Deliveries
from librmq.broker._progress import Progress, ResetHook, StoreReaders
from librmq.broker.config import BrokerConfig, OpenKeywords, Promises, check_settings
from librmq.broker.handlers._pull import told_end
from librmq.broker.handlers._requests import request_table
from librmq.broker.handlers._send import HELD_PROPERTIES, SendHandler
from librmq.clock import Clock, SystemClock, moves_by_itself
from librmq.config import StoreConfig, check_kind, to_seconds
from librmq.errors import BrokerError, ClientStateError, ConfigError, NoRouteError, StoreError, StoreLockedError
from librmq.files import DiskFiles, Files
from librmq.files.interface import fixed_path
from librmq.message import Message, StoredMessage
from librmq.message.ids import Host
from librmq.message.topics import SystemTopic
from librmq.override import override
from librmq.protocol import ChannelClosed, CopiedTables, Endpoint, QueueData, Request, ResponseCode, SendResponse
from librmq.runtime import Runner
from librmq.runtime.closing import LaterPart, opened_in_thread
from librmq.runtime.event_log import EventLog
from librmq.runtime.locks import check_reentry, is_held_here
from librmq.store import BrokerTables, MessageStore
from librmq.store.format.directory import has_abort, infer_config

if TYPE_CHECKING:
    from librmq.broker._replication import Replication
    from librmq.broker._transactions import BrokerTransactions, DiscardHook
    from librmq.broker.handlers._receive import ReceiveHandler
    from librmq.broker.long_polling import Arrivals
    from librmq.files import TemporaryFolder
    from librmq.metrics import Metrics
    from librmq.runtime import ThreadRunner

R = TypeVar("R")
_log = EventLog("librmq.broker")
_LOCK_RETRY_S: Final = 0.05


class Broker(StoreRoute, Endpoint):
    """A broker inside the process: an `Endpoint` that answers requests, and a `Route` to itself. Thread-safe.

    Created by `open` or `temporary`. As a context manager it closes at the end. A forked child cannot use the handle.
    """

    name: str
    runner: Runner
    """Runs the turns of the broker and of its clients."""
    store: MessageStore
    _config: BrokerConfig
    cluster_name: str
    metrics: Metrics | None
    discard_hooks: list[DiscardHook]
    """Functions called with each half message that a check discards, and its number of checks."""
    _life: BrokerLife
    _context: BrokerContext
    _deliveries: Deliveries
    _transactions: LaterPart[BrokerTransactions]
    _replication: LaterPart[Replication]
    _sending: SendHandler
    _progress: Progress
    _receives: LaterPart[ReceiveHandler]
    _answers: dict[type, Callable[[Any], Any]]
    _own_runner: ThreadRunner | None
    _temporary: TemporaryFolder | None
    _is_released = _is_ending = False

    def __init__(self, *_: object, **__: object) -> None:
        raise TypeError("open a broker with Broker.open(path), or with Broker.temporary() for a test")

    @property
    def config(self) -> BrokerConfig:
        """The settings, which count until the broker is opened with others."""
        return self._config

    @config.setter
    def config(self, config: object) -> None:
        raise ConfigError(
            f"config: a running broker keeps its settings: close it, then call Broker.open({self.store.path!r}, config)"
        )

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
        change_settings: bool = False,
    ) -> Self:
        """Open the broker whose store is in ``path``; create a new store if there is none.

        Args:
            path: The store's folder.
            config: Settings for its clients.
            name: The broker's name in routes.
            cluster_name: The cluster name in stored messages.
            store_config: Sizes, durability and retention of the store.
            runner: Runs the work of the broker and its clients; None starts threads, which end with the broker.
            clock: The clock of those threads; None is the system's.
            files: The file system; None is the disk.
            metrics: Counts events.
            wait: Seconds to wait for another process that has the store open for writing.
            change_settings: Whether timers, relay, transaction checks, delay levels and limits may be others than those
                that the store has recorded, which wait for messages that it has accepted.

        Raises:
            StoreLockedError: Another process has the store open for writing.
            ConfigError: Settings are out of range, contradict the files, or are not what the store has recorded.
            CorruptionError: A file of the store or of its configuration is damaged.
            NotAStoreError: The folder holds something else.
        """
        check_settings("Broker.open", path, config, name, cluster_name, metrics, store_config)
        check_kind("runner", runner, Runner, "ManualRunner() or ThreadRunner()")
        if files is not None and not hasattr(files, "create"):
            raise TypeError(f"files: expected a Files such as DiskFiles(), found {files!r:.80}")
        if runner is not None and clock is not None:
            raise ConfigError("Broker.open: expected runner= or clock=, found both: a runner has its own clock")
        config, files = config or BrokerConfig.defaults(), files or DiskFiles()
        folder = fixed_path(path, files)
        waiting = SystemClock()
        deadline = waiting.monotonic() + to_seconds("wait", wait)
        with ExitStack() as undo:
            own_runner = None
            if runner is None:
                from librmq.runtime import ThreadRunner  # tests by hand need none

                own_runner = runner = ThreadRunner(clock)
                undo.callback(own_runner.shutdown)
            while True:
                broker = object.__new__(cls)
                broker._own_runner, broker._temporary, broker.metrics = own_runner, None, metrics
                broker.name, broker.runner, broker.cluster_name = name, runner, cluster_name
                broker._life = BrokerLife(name, folder)
                try:
                    broker._open(
                        folder, Promises(store_config or StoreConfig.defaults(), config), files, change_settings
                    )
                    undo.pop_all()
                    return broker
                except StoreLockedError:
                    left = deadline - waiting.monotonic()
                    if left <= 0:
                        raise
                    waiting.wait(threading.Event(), min(left, _LOCK_RETRY_S))

    def _open(self, path: str, named: Promises, files: Files, changes: bool) -> None:
        """Open the store by what is named and recorded, and record what binds the messages that it accepts."""
        is_copy = named.broker.replica_of is not None  # a copy records no promises: its master keeps them
        recorded = Promises() if is_copy else Promises.read(path, files)
        if not changes:
            recorded.check(path, named.bound(), "open it with change_settings=True")
        opened = named.over(recorded).over(named, opens=True)
        store_config = opened.store if opened.store.named else None
        if not named.store.named and store_config is not None:
            store_config = infer_config(path, files).with_settings(recorded.over(Promises(), opens=True).named()[0])
        self._config = opened.broker
        self._open_store(path, store_config, files)
        if not is_copy:
            try:
                if recorded.is_replaced_by(Promises.read(path, files)):
                    raise StoreLockedError(f"{path}: another process has just changed the settings of the store")
                recorded.record(path, files, named if changes else named.bound(recorded))
            except BaseException:
                self._own_runner = None  # another try needs it
                self.close()
                raise

    def _open_store(self, path: str, store_config: StoreConfig | None, files: Files) -> None:
        """Open the store and the tables, make the parts, each after those that it uses, and start the steps.

        Raises the errors of `MessageStore.open`.
        """
        config, runner, life = self._config, self.runner, self._life
        is_master = config.replica_of is None
        tables = BrokerTables.open(os.path.join(path, "config"), files=files, takes_page=not is_master)
        for replaced in tables.replaced():
            _log.warning("%(what)s", what=replaced)
        from librmq.filter import BloomFilter  # loads a grammar that a client does without

        bloom = BloomFilter(config.bloom_error, config.expected_consumers)
        registrations = tables.registrations(runner.now_ms(), bloom)
        was_killed = has_abort(files, path)
        store = self.store = MessageStore.open(
            path,
            store_config,
            files=files,
            clock=runner.clock,
            background=moves_by_itself(runner.clock),
            filters=registrations,
            replica_of=config.replica_of,
        )
        try:
            if store.config.enable_consumequeue_ext:
                from librmq.consumequeue_ext import check_bitmap

                check_bitmap(bloom.bit_count, store.config.consumequeue_ext_file_size)
            counts = None
            if self.metrics is not None:
                from librmq.metrics import outside

                counts = outside(self.metrics)
            context = self._context = BrokerContext(
                life=life,
                runner=runner,
                cluster_name=self.cluster_name,
                config=config,
                store=store,
                metrics=counts,
                tables=tables,
                registrations=registrations,
                was_killed=was_killed,
            )
            life.release_lock = lambda: context.writing.refuse(life.why_dead)
            self._deliveries = deliveries = Deliveries(context)
            self.discard_hooks = []
            self._transactions = transactions = LaterPart(
                partial(_make_transactions, context, deliveries.arrivals, self.discard_hooks, runner.now_ms())
            )
            deliveries.arrivals.wake_by_topic[SystemTopic.HALF] = lambda: transactions().prepared()
            store.readers = StoreReaders(context, deliveries.schedule, transactions, deliveries.timers)
            self._replication = replication = LaterPart(partial(_make_replication, context))
            self._sending = sending = SendHandler(context, deliveries, replication, transactions)
            self._progress = progress = Progress(context)
            self._answers, self._receives, schedules = request_table(
                context, replication, sending, transactions, deliveries, progress
            )
            if is_master:
                with runner.lock:
                    deliveries.start()
                    if (page := context.offsets.page) is not None and page.received:
                        self._receives().start()
                    if tables.schedules.rows:
                        schedules().start()
                    if (SystemTopic.HALF, 0) in store.queues:
                        transactions().prepared()
            context.show_gauges(lambda: 0 if replication.made is None else replication.made.replica_count)
        except BaseException:
            with runner.lock:  # the caller's runner goes on, and has steps of this broker by now
                life.mark_ended(was_killed=True)
            store.close()
            raise

    @classmethod
    async def open_async(
        cls, path: str | os.PathLike[str], config: BrokerConfig | None = None, **settings: Unpack[OpenKeywords]
    ) -> Self:
        """Open like `open`, with the same settings, without blocking the event loop: a recovery can take long."""
        return await opened_in_thread(partial(cls.open, path, config, **settings))

    @classmethod
    def temporary(
        cls,
        config: BrokerConfig | None = None,
        *,
        name: str = "broker-a",
        store_config: StoreConfig | None = None,
        runner: Runner | None = None,
        metrics: Metrics | None = None,
    ) -> Self:
        """Open a new broker in a new directory that is deleted on closing.

        Its files are small by default. The largest batch that clients send, 4 MiB, fits into one. No call waits for the
        device: what is there outlives the process at most, also with ``durability="sync"``.
        """
        from librmq.files import TemporaryFolder

        folder = TemporaryFolder()
        try:
            broker = cls.open(
                folder.name,
                config,
                name=name,
                store_config=store_config or StoreConfig(commitlog_file_size=16 << 20, max_total_size=1 << 30),
                runner=runner,
                files=folder.files,
                metrics=metrics,
            )
        except BaseException:
            folder.delete()
            raise
        broker._temporary = folder
        return broker

    # ---- endpoint and route

    hands_over: bool = True
    has_page: bool = True

    @override
    def send(  # noqa: PLR0913 (what a client says of a message)
        self,
        group: str,
        message: Message,
        queue_id: int,
        born_timestamp_ms: int,
        born_host: Host,
        sys_flag: int = 0,
        default_queues: int = 4,
        timeout_ms: float | None = None,
        is_one_way: bool = False,
    ) -> SendResponse:
        """Store a message directly, as `call` stores that of a `SendMessage`; no other thread may use it meanwhile.

        Raises:
            BrokerError: The message is refused; ``code`` says why.
            MessageIllegalError: The message is refused before it reaches the store.
            BrokerUnreachableError: The broker is closed.
        """
        try:
            stored_queue_id, result = self._sending.put(
                group, message, queue_id, born_timestamp_ms, born_host, sys_flag, default_queues
            )
            return self._sending.confirmed(message, stored_queue_id, result)
        except StoreError as error:
            raise self._life.refusal(error) from error
        finally:
            if self.runner.waiting:
                self.runner.call_waiting()

    @override
    def call(self, request: Request[R], /) -> R:
        """Answer a request.

        Raises:
            BrokerError: The request is refused; ``code`` says why.
            MessageIllegalError: A message of the request is refused.
            BrokerUnreachableError: The broker is closed.
        """
        handler = self._answers.get(type(request))
        if handler is None:
            raise BrokerError(
                ResponseCode.REQUEST_CODE_NOT_SUPPORTED, f"{self.name} does not know {type(request).__name__}"
            )
        try:
            answer: R = handler(request)
        except StoreError as error:
            raise self._life.refusal(error) from error
        finally:
            if self.runner.waiting:
                self.runner.call_waiting()
        return answer

    def await_device(self, request: Request[R], answer: R) -> R:
        """Return an answer, with durability "sync" once the device has what it tells.

        This is for clients that outlive the machine. They would otherwise pass a message that a loss of power takes,
        and skip the next one in its place. Call it without the runner's lock, because it waits.

        Raises:
            BrokerError: A flush has failed.
            BrokerUnreachableError: The broker is closed.
        """
        try:
            self._context.await_device(lambda: told_end(self.store, request, answer))
        except StoreError as error:
            raise self._life.refusal(error) from error
        return answer

    @override
    def topic_route(self, topic: str) -> tuple[QueueData, ...]:
        """Return the broker's queues of ``topic``; empty if there are none. A closed broker returns the last ones."""
        config = self._context.topics.by_name.get(topic)
        return () if config is None else (config.at(self.name),)

    @override
    def broker_names(self) -> tuple[str, ...]:
        """Return the broker's name while it is open."""
        return () if self.dead else (self.name,)

    @override
    def endpoint(self, broker_name: str) -> Endpoint:
        """Return this broker; `NoRouteError` for another name."""
        if broker_name != self.name:
            raise NoRouteError(f"unknown broker {broker_name!r}; expected {self.name!r}")
        return self

    @override
    def watch(self, changed: Callable[[], None]) -> Callable[[], None]:
        """Call ``changed``, under the runner's lock, when topics or queues change, and when the broker closes.

        Return a function that ends this.

        Raises:
            BrokerUnreachableError: The broker is closed.
        """
        self._check_open()
        return self._life.watchers.watch(changed)

    # ---- administration, where the store is at hand

    @override
    def _check_open(self) -> None:
        if self._life.dead:
            with self._life.errors():
                self._life.check_open()

    @override
    def _endpoints(self) -> Iterator[tuple[str, Endpoint]]:
        yield self.name, self  # a closed broker is asked too, because its refusal says why

    def is_ordered(self, group: str) -> bool:
        """Return whether a consumer group receives in order, as `set_group` says."""
        settings = self._context.groups.by_name.get(group)
        return settings is not None and settings.is_ordered

    @override
    def _find_by_id(self, message_id: str) -> StoredMessage | None:
        with self._life.errors():
            return next(iter(self.store.find_by_id(message_id)), None)

    def shared_client_ids(self) -> frozenset[str]:
        """Return the ids that two clients use, which count as one client and consume the same queues."""
        with self._locked():
            return frozenset(self._context.clients.shared_ids)

    def remove_client(self, client_id: str) -> None:
        """Remove a lost client from all its groups. Its queue locks expire by themselves."""
        self.call(ChannelClosed(client_id))

    def await_members(self, seconds: float) -> None:
        """Let no group share its queues out for a time, in which the clients of a former broker register.

        Otherwise those that come first would take the queues of those that come later.
        """
        with self._locked():
            self._context.clients.await_members(round(1000 * seconds))

    @override
    def consumer_offset(self, group: str, topic: str, queue_id: int = 0) -> int | None:
        """Return a group's stored progress in a queue: the queue offset of its next message, None if there is none."""
        if self._life.dead or type(group) is not str or type(topic) is not str:
            return super().consumer_offset(group, topic, queue_id)  # which refuses it
        # This makes no request, because the wire and the kit ask for each queue.
        return self._context.offsets.consumer_offset(topic, group, queue_id)

    @property
    @override
    def tables(self) -> BrokerTables:
        """Topics, groups and progress as they are now; for reading, under the runner's lock."""
        self._context.offsets.adopt()
        return self._context.tables

    @override
    def _messages(self, topic: str) -> Iterator[StoredMessage]:
        self._check_open()  # it may have been closed since the call
        with self._life.errors():
            yield from self.store.topic_messages(topic)

    @property
    def takes_any_delay(self) -> bool:
        """Whether a message can wait for any time, not only for that of a delay level."""
        return self._deliveries.takes_any_delay

    @property
    def delay_offsets(self) -> dict[int, int]:
        """The queue offset of the next message to deliver, by delay level; `tables` has what is saved of it.

        A replica delivers nothing, and has its master's.
        """
        return self.tables.delays.rows if self._config.replica_of is not None else self._deliveries.schedule().progress

    @property
    def reset_hooks(self) -> list[ResetHook]:
        """Functions called with group and topic after each `reset_group`, under the runner's lock."""
        return self._progress.reset_hooks

    # ---- replication

    def copied(self, queues: Iterable[tuple[str, int]]) -> None:
        """Answer pulls that wait for messages of these queues, which `Writer.copy_log` has added to a replica."""
        self._deliveries.arrivals.copied(queues)

    def share_appends(self, path: str, bell: str, wait_s: float) -> None:
        """Let peers of a share append by a page at ``path``, where no promise of the store needs this process.

        They wake it by a socket at the path ``bell``. It waits at most ``wait_s`` for one that writes.
        """
        store, config = self.store, self.config
        if self._context.offsets.page is not None:
            self._context.offsets.page.is_needed = True
        if (
            store.config.enable_consumequeue_ext
            or config.drop_resends_within is not None
            or config.replication != "async"
            or config.replica_of is not None
        ):
            return
        settings = {"cluster_name": self._context.cluster_name, "bell": bell, "held": sorted(HELD_PROPERTIES)}
        try:
            shared = store.writer.share_appends(
                path, settings, self._followed, wait_s, lambda: is_held_here(self.runner.lock)
            )
        except (StoreError, OSError) as error:
            _log.warning(
                "%(path)s: peers of the share send by its owner, and can't append by themselves: %(error)s",
                path=store.path,
                error=error,
            )
        else:
            self.watch(shared.withdraw)

    def _followed(self, records: Mapping[tuple[str, int], tuple[int, int]]) -> None:
        """Note messages that peers have appended: their number in each queue, and the bytes of their records."""
        # First, because an error in a subclass of `Metrics` must not leave pulls waiting.
        self._deliveries.arrivals.copied(records)
        metrics = self._context.metrics
        if metrics is not None:
            for (topic, _), (count, size) in records.items():
                metrics.count("messages_in", count, topic=topic)
                metrics.count("bytes_in", size, topic=topic)

    def copy_topics(self, rows: Mapping[str, Any]) -> None:
        """Replace a replica's topics by its master's, durable when it returns. `copy_tables` must be called later."""
        self._context.topics.copy_rows(rows, self._context.writing.save_now)

    def copy_tables(self, tables: CopiedTables) -> None:
        """Replace a replica's groups and progress by its master's, and notify clients of changed topics.

        They are durable when it returns. `librmq.cluster.Replica` calls it.
        """
        with self._locked():
            self._context.copy_tables(tables)
        self._context.writing.write()

    # ---- turns and life

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Run a block under the runner's lock, on an open broker; errors of the store become errors for clients."""
        try:
            with self._life.errors(), self.runner.lock:
                self._life.check_open()
                yield
        finally:
            if self.runner.waiting:
                self.runner.call_waiting()

    @property
    @override
    def dead(self) -> bool:
        """Whether the broker accepts no more calls."""
        return self._life.dead

    @property
    def was_killed(self) -> bool:
        """Whether `abandon` ended the broker."""
        return self._life.was_killed

    @override
    def close(self) -> None:
        """Save everything and close the store. Shut down clients first. A second call completes an interrupted one.

        Raises:
            ClientStateError: A listener calls it, whose end it would wait for.
            StoreError: A signal handler calls it within an append that it has interrupted.
        """
        if self._own_runner is not None and self.runner.is_within():
            raise ClientStateError(
                f"{self.store.path}: a listener can't close the broker that runs it: set an event there, and let the "
                "code that opened the broker close it"
            )
        check_reentry()
        if not self.dead and self._replication.made is not None:
            self._replication.made.copy_tables_early(is_closing=True)
        with ExitStack() as last:
            with self.runner.lock:
                is_first = self._end_calls(was_killed=False)
                if self._is_released or self._is_ending or self.was_killed or self._life.is_inherited:
                    return
                # The reset is registered before the mark is set: an interrupt can come between any two statements.
                last.callback(setattr, self, "_is_ending", False)
                self._is_ending = True
            last.callback(self._release_runner)
            if self._temporary is not None:
                self._end_writes()
                last.callback(self.store.abandon, why="was closed")  # no other handle opens it
                return
            last.callback(self.store.close)
            last.callback(self._end_writes)
            if is_first:
                self._save()

    def abandon(self) -> None:
        """Release everything without saving, like a killed process; the next open recovers the store."""
        if self._end_calls(was_killed=True):
            self._end_writes()
            try:
                self.store.abandon()
            finally:
                self._release_runner()

    def _end_calls(self, *, was_killed: bool) -> bool:
        """Accept no more calls; return False after an earlier end."""
        with self.runner.lock:
            if self.dead:
                return False
            self._context.held.by_queue.clear()
            self._context.hide_gauges()
            self._life.mark_ended(was_killed=was_killed)
            return True

    def _save(self) -> None:
        """Save all progress, of each part even if another part fails."""
        is_replica = self._config.replica_of is not None
        with self.runner.lock, ExitStack() as saves:
            saves.callback(self._context.save_all)
            if (receives := self._receives.made) is not None:
                saves.callback(receives.end)
            if not is_replica:
                if (transactions := self._transactions.made) is not None:
                    saves.callback(transactions.save)
                self._deliveries.save()
        if not is_replica:  # after all progress was saved
            self._context.cancellations.write_passed(self.store.log.begin, self.runner.now_ms())

    def _end_writes(self) -> None:
        self._context.writing.end_writing(self._life.why_dead)
        self._context.offsets.end()
        self._deliveries.end_timer_writes(self._life.why_dead)

    def _release_runner(self) -> None:
        if self._own_runner is not None:
            self._own_runner.shutdown()
        if self._temporary is not None:
            self._temporary.delete()
        self._is_released = self.store.is_closed  # Ctrl-C can have come before the end of the close

    @override
    def __repr__(self) -> str:
        return f"<Broker {self.name!r} in {self.store.path!r}{', closed' if self.dead else ''}>"

    @override
    def __reduce__(self) -> str:
        raise TypeError(f"{self!r} can't be pickled, because one process owns a store; open consumers in that process")


# ---- parts that most brokers do without, each imported when it is made


def _make_transactions(
    context: BrokerContext, arrivals: Arrivals, discard_hooks: list[DiscardHook], start_ms: int
) -> BrokerTransactions:
    from librmq.broker._transactions import BrokerTransactions

    return BrokerTransactions(context, arrivals, discard_hooks, start_ms)


def _make_replication(context: BrokerContext) -> Replication:
    from librmq.broker._replication import Replication

    return Replication(context)
