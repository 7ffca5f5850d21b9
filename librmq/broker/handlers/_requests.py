"""What answers each kind of request to a broker, and what is checked and locked before."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Any, Final, TypeVar

from librmq.broker._administration import Administration, Handlers, Progress
from librmq.broker._clients import Clients
from librmq.broker._context import BrokerContext
from librmq.broker._delayed_messages import Deliveries
from librmq.broker._replication import Replication, refused_by_replica
from librmq.broker._transactions import BrokerTransactions
from librmq.broker.handlers._pull import PullHandler
from librmq.broker.handlers._receive import ReceiveHandler
from librmq.broker.handlers._send import SendHandler
from librmq.errors import BrokerUnreachableError, ClientStateError
from librmq.message.topics import validate_kept_names
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
    DescribeInstance,
    DescribeLog,
    EndTransaction,
    FollowLog,
    ForwardToDeadLetters,
    GroupsBehind,
    GroupSubscriptions,
    Heartbeat,
    InstanceState,
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
    TakeHandOuts,
    UnlockQueues,
    Unregister,
    UpdateOffset,
)

A = TypeVar("A")
Q = TypeVar("Q", bound=Request[Any])


_WRITES: Final = (
    *(SendMessage, SendTogether, SendBatch, SendReply, SendBack),
    *(CancelMessage, EndTransaction, LockQueues, UnlockQueues, StartGroup),
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


def _unregister(receives: ReceiveHandler, clients: Clients, request: Unregister) -> None:
    receives.left(request)
    clients.unregister(request)


def _refuse(name: str, master: str, request: Request[Any]) -> None:
    raise refused_by_replica(name, master, type(request))


class RequestTable:
    """The function that answers each kind of request to one broker, by its class."""

    def __init__(self, context: BrokerContext, replication: Replication) -> None:
        """Return an empty table."""
        self.answers: dict[type, Callable[[Any], Any]] = {}
        self._context = context
        self._replication = replication

    def add_messages(
        self, sending: SendHandler, pulling: PullHandler, receives: ReceiveHandler, transactions: BrokerTransactions
    ) -> None:
        """Add the requests that store, pull and receive messages."""
        answer, locked = self._add, self._locked
        answer(SendMessage, sending.answer)
        answer(SendTogether, sending.send_together)
        answer(SendBatch, sending.send_batch)
        answer(SendReply, sending.send_reply)
        answer(SendBack, sending.failed.send_back)
        answer(ResendLetters, sending.failed.resend)
        answer(EndTransaction, transactions.end_transaction)
        answer(PullMessage, pulling.pull)
        answer(CheckSubscription, pulling.check_subscription)
        answer(TakeHandOuts, self._locked(pulling.take_hand_outs))
        answer(Unregister, locked(partial(_unregister, receives, self._context.clients)))
        answer(Receive, locked(receives.receive))
        answer(CancelReceive, locked(receives.cancel_receive))
        answer(Acknowledge, locked(receives.acknowledge))
        answer(ChangeInvisible, locked(receives.change))
        answer(ForwardToDeadLetters, locked(receives.forward))

    def add_clients(self) -> None:
        """Add what clients say and ask of themselves and of their groups."""
        clients, locks, answer, locked = self._context.clients, self._context.locks, self._add, self._locked
        answer(Heartbeat, locked(clients.register_client))
        answer(ChannelClosed, locked(clients.channel_closed))
        answer(ConsumerIds, locked(clients.consumer_ids))
        answer(GroupSubscriptions, locked(clients.subscriptions))
        answer(LockQueues, locked(locks.lock_queues))
        answer(UnlockQueues, locked(locks.unlock_queues))
        answer(DescribeClients, locked(lambda request: clients.connected()))
        answer(DescribeConnections, locked(lambda request: clients.connections(request.group)))
        answer(DescribeInstance, self._describe_instance)

    def _describe_instance(self, request: DescribeInstance) -> InstanceState | None:
        with self._context.runner.lock:
            self._context.life.check_open()
            client = self._context.clients.instance(request.group, request.client_id)
            with suppress(BrokerUnreachableError):
                return client.call(DescribeInstance(request.group))
        try:
            return client.call(request)  # without the lock, because a client on a connection takes its time
        except BrokerUnreachableError as error:  # which is no word about a broker
            raise ClientStateError(str(error)) from error

    def add_administration(
        self, administration: Administration, progress: Progress, schedules: Handlers, deliveries: Deliveries
    ) -> None:
        """Add the requests about topics, groups and their progress, and those of replicas."""
        answer, replication = self._add, self._replication
        answer(CancelMessage, self._replicated(deliveries.cancel))
        answer(StartGroup, self._replicated(self._durable(progress.start)))
        answer(GroupsBehind, self._locked(partial(self._groups_behind, progress)))
        for free, under_lock, with_writing in (administration.handlers, progress.handlers, schedules):
            for kind, handler in free.items():
                answer(kind, handler)
            for kind, handler in under_lock.items():
                answer(kind, self._locked(handler))
            for kind, handler in with_writing.items():
                answer(kind, self._durable(handler))
        answer(DescribeLog, replication.describe)
        answer(FollowLog, replication.follow_log)
        answer(LeaveLog, replication.remove_replica)
        answer(CopyTables, self._locked(replication.snapshot_tables))
        master = self._context.config.replica_of
        if master is not None:
            for kind in (*_WRITES, *administration.handlers.durable, *progress.handlers.durable, *schedules.durable):
                self.answers[kind] = partial(_refuse, self._context.name, master)

    def _groups_behind(self, progress: Progress, request: GroupsBehind) -> tuple[str, ...]:
        """Return the queues with messages that a running group has not consumed."""
        behind = progress.behind()
        if behind:  # It may be behind only by messages that its filter lets through none of.
            self._context.held.answer_passed()
        return tuple(behind)

    def _add(self, kind: type[Q], handler: Callable[[Q], object]) -> None:
        """Add the handler of a kind of request, behind the check of the names that it adds to tables."""
        names_of = _NAMED.get(kind)

        def handle(request: Q) -> object:
            assert names_of is not None
            groups, topics = names_of(request)
            validate_kept_names(
                (group for group in groups if group not in self._context.groups.by_name),
                (topic for topic in topics if topic not in self._context.topics.by_name),
            )
            return handler(request)

        self.answers[kind] = handler if names_of is None else handle

    def _locked(self, handler: Callable[[Q], A]) -> Callable[[Q], A]:
        """Make a handler run under the runner's lock, on an open broker."""

        def handle(request: Q) -> A:
            with self._context.runner.lock:
                self._context.life.check_open()
                return handler(request)

        return handle

    def _durable(self, handler: Callable[[Q], A]) -> Callable[[Q], A]:
        """Wrap a handler like `_locked`; its changes of tables are durable when it returns."""
        handle = self._locked(handler)

        def handle_and_write(request: Q) -> A:
            answer = handle(request)
            self._context.writing.write()
            return answer

        return handle_and_write

    def _replicated(self, handler: Callable[[Q], A]) -> Callable[[Q], A]:
        """Wrap a handler: with synchronous replication, the replicas that answer have its changes when it returns."""

        def handle_and_copy(request: Q) -> A:
            answer = handler(request)
            self._replication.copy_tables_early()
            return answer

        return handle_and_copy
