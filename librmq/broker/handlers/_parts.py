"""The handler of each kind of request to a broker, and the composition of its parts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from itertools import chain
from typing import Any, Final, TypeVar

from librmq.broker._administration import Administration, Progress, StoreReaders
from librmq.broker._context import BrokerContext, BrokerLife
from librmq.broker._delayed_messages import Deliveries
from librmq.broker._replication import Replication, refused_by_replica
from librmq.broker._transactions import BrokerTransactions
from librmq.broker.config import BrokerConfig
from librmq.broker.handlers._pull import PullHandler
from librmq.broker.handlers._receive import ReceiveHandler
from librmq.broker.handlers._send import SendHandler
from librmq.clock import moves_by_itself
from librmq.config import StoreConfig
from librmq.consumequeue_ext import check_bitmap
from librmq.files import Files
from librmq.message.lag import queue_lag
from librmq.message.topics import SystemTopic, is_own_group, validate_kept_names
from librmq.metrics import Metrics
from librmq.protocol import (
    Acknowledge,
    CancelMessage,
    CancelReceive,
    ChangeInvisible,
    ChannelClosed,
    CheckSubscription,
    CleanUnusedTopics,
    ConsumerData,
    ConsumerIds,
    CopyTables,
    DeleteExpiredFiles,
    DescribeClients,
    DescribeConnections,
    DescribeLog,
    EndTransaction,
    FollowLog,
    ForwardToDeadLetters,
    GroupsBehind,
    GroupSubscriptions,
    Heartbeat,
    LeaveLog,
    LockQueues,
    MoveGroup,
    PullMessage,
    Receive,
    Request,
    ResendLetters,
    ResetGroup,
    SendBack,
    SendBatch,
    SendMessage,
    SendReply,
    SendTogether,
    StartGroup,
    UnlockQueues,
    Unregister,
    UpdateOffset,
)
from librmq.runtime import Runner
from librmq.runtime.event_log import EventLog
from librmq.store import BrokerTables, MessageStore
from librmq.store.format.directory import has_abort

_log = EventLog("librmq.broker")

A = TypeVar("A")
Q = TypeVar("Q", bound=Request[Any])


_WRITES: Final = (
    *(SendMessage, SendTogether, SendBatch, SendReply, SendBack),
    *(CancelMessage, EndTransaction, LockQueues, UnlockQueues, MoveGroup, ResetGroup, StartGroup),
    *(Receive, CancelReceive, Acknowledge, ChangeInvisible, ForwardToDeadLetters),
    *(CleanUnusedTopics, DeleteExpiredFiles, ResendLetters),
    *(DescribeLog, FollowLog, LeaveLog, CopyTables),
)
"""Requests that a replica refuses."""


_Names = tuple[Iterable[str], Iterable[str]]


def _group_and_topic(request: Any) -> _Names:  # noqa: ANN401 (each of several kinds)
    return (request.group,), (request.topic,)


def _names_of_client(request: Heartbeat) -> _Names:
    groups = chain(request.producer_groups, (data.group for data in request.consumers))
    return groups, {topic for data in request.consumers for topic in _topics_of(data)}


def _topics_of(data: ConsumerData) -> Iterator[str]:
    for key, subscription in data.subscriptions.items():
        yield key
        yield subscription.topic


_NAMED: Final[Mapping[type, Callable[[Any], _Names]]] = {
    Heartbeat: _names_of_client,
    LockQueues: lambda request: ((request.group,), {queue.topic for queue in request.queues}),
    **dict.fromkeys((UpdateOffset, StartGroup, MoveGroup, ResetGroup), _group_and_topic),
}
"""The groups and topics that a request adds to tables. Others name those in the tables, or check a name themselves."""


def _refuse(name: str, master: str, request: Request[Any]) -> None:
    raise refused_by_replica(name, master, type(request))


class BrokerParts:
    """The parts of one broker: its store, the handlers of its requests by their class, and its scheduled steps."""

    def __init__(
        self,
        life: BrokerLife,
        runner: Runner,
        cluster_name: str,
        config: BrokerConfig,
        store_config: StoreConfig | None,
        files: Files,
        metrics: Metrics | None,
    ) -> None:
        """Open the store and the tables, and start the steps. Raises the errors of `MessageStore.open`."""
        self._life = life
        self._runner, path = runner, life.path
        self._metrics = metrics
        by_hand = not moves_by_itself(runner.clock)
        tables = BrokerTables.open(os.path.join(path, "config"), files=files)
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
            background=not by_hand,
            filters=registrations,
            replica_of=config.replica_of,
        )
        self._is_replica = config.replica_of is not None
        self._flush_ms = round(1000 * store.config.flush_interval_s)
        try:
            if store.config.enable_consumequeue_ext:
                check_bitmap(bloom.bit_count, store.config.consumequeue_ext_file_size)
            context = self.context = BrokerContext(
                life,
                runner,
                cluster_name,
                config,
                store,
                metrics,
                tables,
                registrations,
                was_killed=was_killed,
            )
            life.release_lock = lambda: context.writing.refuse(life.why_dead)
            self._housekeeping = context.step("flushes its store", store.run_due)
            self.deliveries = Deliveries(context, self._wake_housekeeping if by_hand else None)
            self.transactions = BrokerTransactions(context, self.deliveries.arrivals)
            store.readers = StoreReaders(context, self.deliveries.schedule, self.transactions, self.deliveries.timers)
            wake = partial(runner.wake, self._housekeeping) if by_hand else lambda: None
            self.replication = Replication(context)
            self.sending = SendHandler(
                context,
                self.deliveries,
                self.replication,
                self.transactions.half_stored,
                self.transactions.is_rolled_back,
            )
            self.pulling = PullHandler(context, self.sending, self.replication)
            self.progress = Progress(context)
            self.receives = ReceiveHandler(context, self.sending, self.progress, self.pulling.check_subscription)
            self.by_request: dict[type, Callable[[Any], Any]] = {}
            self._answer_all(wake)
            self._show_gauges()
            if not self._is_replica:
                with runner.lock:
                    self.deliveries.start()
                    self.receives.start()
                    if (SystemTopic.HALF, 0) in store.queues:
                        self.transactions.prepared()
            life.mark_open()
        except BaseException:
            store.close()
            raise

    def _answer_all(self, wake: Callable[[], None]) -> None:
        """Add the handler of each kind of request."""
        context, transactions, administration = self.context, self.transactions, Administration(self.context, wake)
        sending, receives, progress, replication = self.sending, self.receives, self.progress, self.replication
        pulling, clients = self.pulling, context.clients
        answer, locked, durable = self._set_handler, self._locked, self._durable
        answer(SendMessage, sending.answer)
        answer(SendTogether, sending.send_together)
        answer(SendBatch, sending.send_batch)
        answer(SendReply, sending.send_reply)
        answer(SendBack, sending.failed.send_back)
        answer(ResendLetters, sending.failed.resend)
        answer(EndTransaction, transactions.end_transaction)
        answer(CancelMessage, self._replicated(self.deliveries.cancel))
        answer(PullMessage, pulling.pull)
        answer(CheckSubscription, pulling.check_subscription)
        answer(Receive, locked(receives.receive))
        answer(CancelReceive, locked(receives.cancel_receive))
        answer(Acknowledge, locked(receives.acknowledge))
        answer(ChangeInvisible, locked(receives.change))
        answer(ForwardToDeadLetters, locked(receives.forward))
        answer(Heartbeat, locked(clients.register_client))
        answer(Unregister, locked(clients.unregister))
        answer(ChannelClosed, locked(clients.channel_closed))
        answer(ConsumerIds, locked(clients.consumer_ids))
        answer(GroupSubscriptions, locked(clients.subscriptions))
        answer(LockQueues, locked(context.locks.lock_queues))
        answer(UnlockQueues, locked(context.locks.unlock_queues))
        answer(StartGroup, self._replicated(durable(progress.start)))
        answer(DescribeClients, locked(lambda request: clients.connected()))
        answer(DescribeConnections, locked(lambda request: clients.connections(request.group)))
        answer(GroupsBehind, locked(self._groups_behind))
        for free, under_lock, with_writing in (administration.handlers, progress.handlers):
            for kind, handler in free.items():
                answer(kind, handler)
            for kind, handler in under_lock.items():
                answer(kind, locked(handler))
            for kind, handler in with_writing.items():
                answer(kind, durable(handler))
        answer(DescribeLog, replication.describe)
        answer(FollowLog, replication.follow_log)
        answer(LeaveLog, replication.remove_replica)
        answer(CopyTables, locked(replication.snapshot_tables))
        master = context.config.replica_of
        if master is not None:
            for kind in (*_WRITES, *administration.handlers.durable):
                self.by_request[kind] = partial(_refuse, context.name, master)

    def _groups_behind(self, request: GroupsBehind) -> tuple[str, ...]:
        """Return the queues with messages that a running group has not consumed."""
        behind = self.progress.behind()
        if behind:  # It may be behind only by messages that its filter lets through none of.
            self.context.held.answer_passed()
        return tuple(behind)

    def _set_handler(self, kind: type[Q], handler: Callable[[Q], object]) -> None:
        """Add the handler of a kind of request, behind the check of the names that it adds to tables."""
        names_of = _NAMED.get(kind)

        def handle(request: Q) -> object:
            assert names_of is not None
            groups, topics = names_of(request)
            validate_kept_names(
                (group for group in groups if group not in self.context.groups.by_name),
                (topic for topic in topics if topic not in self.context.topics.by_name),
            )
            return handler(request)

        self.by_request[kind] = handler if names_of is None else handle

    def _locked(self, handler: Callable[[Q], A]) -> Callable[[Q], A]:
        """Make a handler run under the runner's lock, on an open broker."""

        def handle(request: Q) -> A:
            with self._runner.lock:
                self._life.check_open()
                return handler(request)

        return handle

    def _durable(self, handler: Callable[[Q], A]) -> Callable[[Q], A]:
        """Wrap a handler like `_locked`; its changes of tables are durable when it returns."""
        handle = self._locked(handler)

        def handle_and_write(request: Q) -> A:
            answer = handle(request)
            self.context.writing.write()
            return answer

        return handle_and_write

    def _replicated(self, handler: Callable[[Q], A]) -> Callable[[Q], A]:
        """Wrap a handler: with synchronous replication, the replicas that answer have its changes when it returns."""

        def handle_and_copy(request: Q) -> A:
            answer = handler(request)
            self.replication.copy_tables_early()
            return answer

        return handle_and_copy

    def _wake_housekeeping(self) -> None:
        """Flush by a step under a manual clock."""
        at = self._runner.now_ms() + self._flush_ms
        if self._housekeeping.at is None or at < self._housekeeping.at:  # a flush of queues can be due much later
            with self._runner.lock:
                self._runner.wake(self._housekeeping, at)

    def stop_serving(self) -> None:
        """Drop held pulls and hide the gauges. Under the runner's lock."""
        self.context.held.drop_all()
        if self._metrics is not None:
            for name in ("held_pulls", "log_bytes", "disk_used", "replicas", "resend_ids"):
                self._metrics.gauge(name, None)
            self._metrics.observe("group_lag", None)

    def save(self) -> None:
        """Save all progress, of each part even if another part fails."""
        with self._runner.lock, ExitStack() as saves:
            saves.callback(self.context.saving.save_all, self._life.why_dead)
            if not self._is_replica:
                saves.callback(self.transactions.save)
                saves.callback(self.receives.saved.save_all)
                self.deliveries.save()
        if not self._is_replica:
            self.deliveries.write_passed()

    def end_all_writes(self) -> None:
        """End all writes; return when none is running."""
        self.context.writing.end_writing(self._life.why_dead)
        self.deliveries.end_timer_writes(self._life.why_dead)

    def _show_gauges(self) -> None:
        metrics = self._metrics
        if metrics is not None:
            store, held = self.store, self.context.held.by_queue
            metrics.gauge("held_pulls", lambda: sum(map(len, list(held.values()))))
            metrics.gauge("replicas", lambda: self.replication.replica_count)
            metrics.gauge("log_bytes", lambda: store.log.end)
            metrics.gauge("disk_used", lambda: store.files.used_ratio(store.path))
            metrics.observe("group_lag", self._lags)

    def _lags(self) -> dict[tuple[str, ...], float]:
        """Return the lag of each group of users in each topic with progress, whether it has consumers or not."""
        lags: dict[tuple[str, ...], float] = {}
        with self._runner.lock:
            progress = {place: dict(offsets) for place, offsets in self.context.tables.progress().items()}
            queues = {name: topic.read_queues for name, topic in self.context.topics.by_name.items()}
        for (group, topic), offsets in progress.items():
            if topic in queues and not is_own_group(group):
                lags[topic, group] = sum(
                    queue_lag(offsets.get(queue_id), *self.store.queue_range(topic, queue_id))
                    for queue_id in range(queues[topic])
                )
        return lags
