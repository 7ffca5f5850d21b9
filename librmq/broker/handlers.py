"""The handlers of each kind of request to a broker."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeVar

from librmq.broker.administration import Administration, Progress
from librmq.broker.clients import Clients
from librmq.broker.context import BrokerContext
from librmq.broker.delayed_messages import DelayedSends, Deliveries
from librmq.broker.pull_handler import PullHandler
from librmq.broker.receive_handler import ReceiveHandler
from librmq.broker.registry import QueueLocks
from librmq.broker.replication import Replication
from librmq.broker.replies import ReplyPushes
from librmq.broker.send_handler import SendHandler
from librmq.broker.transactions import BrokerTransactions
from librmq.errors import BrokerError
from librmq.protocol import (
    Acknowledge,
    CancelReceive,
    ChangeInvisible,
    ChannelClosed,
    CheckSubscription,
    CleanUnusedTopics,
    ConsumerIds,
    CopyTables,
    CreateTopic,
    DeleteGroup,
    DeleteTopic,
    DescribeLog,
    EndTransaction,
    FollowLog,
    ForwardToDeadLetters,
    GroupSubscriptions,
    Heartbeat,
    LeaveLog,
    LockQueues,
    MaxOffset,
    MinOffset,
    PullMessage,
    QueryMessages,
    QueryOffset,
    QueueOffsetAt,
    Receive,
    Request,
    ResetGroup,
    ResponseCode,
    SendBack,
    SendBatch,
    SendMessage,
    SendPlain,
    SendReply,
    SetGroup,
    TopicGroups,
    UnlockQueues,
    Unregister,
    UpdateOffset,
    ViewMessage,
)

A = TypeVar("A")
Q = TypeVar("Q", bound=Request[Any])


_WRITES: Final = (
    *(SendMessage, SendPlain, SendBatch, SendReply, SendBack),
    *(EndTransaction, LockQueues, UnlockQueues, ResetGroup),
    *(Receive, CancelReceive, Acknowledge, ChangeInvisible, ForwardToDeadLetters),
    *(CreateTopic, DeleteTopic, CleanUnusedTopics, SetGroup),
    *(DescribeLog, FollowLog, LeaveLog, CopyTables),
)
"""Requests that a replica refuses."""


def _refuse(name: str, master: str, request: Request[Any]) -> None:
    raise BrokerError(
        ResponseCode.SERVICE_NOT_AVAILABLE,
        f"{name} is a replica of {master} and takes no {type(request).__name__}: ask {master}, or promote the replica",
    )


class Handlers:
    """The handlers of one broker, by the class of their requests."""

    def __init__(
        self,
        context: BrokerContext,
        deliveries: Deliveries,
        transactions: BrokerTransactions,
        check_open: Callable[[], None],
    ) -> None:
        """``check_open()`` raises once the broker is closed."""
        self._runner = context.runner
        self._writing = context.writing
        self._check_open = check_open
        store = context.store
        delayed = DelayedSends(
            store.levels, context.runner.now_ms, deliveries.timers, has_relay=deliveries.relay is not None
        )
        replication = self.replication = Replication(context, check_open)
        sending = self.sending = SendHandler(
            context, deliveries.arrivals, delayed, context.writing.write, replication, transactions.half_stored
        )
        pulling = PullHandler(context, sending, replication)
        locks = QueueLocks(round(1000 * context.config.lock_expiry_s))
        clients = Clients(context, locks, context.saving.filters_changed)
        progress = self.progress = Progress(context)
        receives = self.receives = ReceiveHandler(context, sending, progress, pulling.check_subscription)
        administration = Administration(context)
        self.by_request: dict[type, Callable[[Any], Any]] = {}
        answer, locked, durable = self._answer, self._locked, self._durable
        answer(SendMessage, sending.send)
        answer(SendPlain, sending.send_plain)
        answer(SendBatch, sending.send_batch)
        answer(SendReply, ReplyPushes(context, sending.send).reply)
        answer(SendBack, sending.failed.send_back)
        answer(EndTransaction, transactions.end_transaction)
        answer(PullMessage, pulling.pull)
        answer(CheckSubscription, pulling.check_subscription)
        answer(Receive, locked(receives.receive))
        answer(CancelReceive, locked(receives.cancel))
        answer(Acknowledge, locked(receives.acknowledge))
        answer(ChangeInvisible, locked(receives.change))
        answer(ForwardToDeadLetters, locked(receives.forward))
        answer(Heartbeat, locked(clients.heartbeat))
        answer(Unregister, locked(clients.unregister))
        answer(ChannelClosed, locked(clients.channel_closed))
        answer(ConsumerIds, locked(clients.consumer_ids))
        answer(GroupSubscriptions, locked(clients.subscriptions))
        answer(LockQueues, locked(clients.lock))
        answer(UnlockQueues, locked(clients.unlock))
        answer(QueryOffset, progress.query)
        answer(UpdateOffset, locked(progress.update))
        answer(MaxOffset, progress.queue_end)
        answer(MinOffset, progress.queue_begin)
        answer(QueueOffsetAt, progress.queue_offset_at)
        answer(ResetGroup, locked(progress.reset))
        answer(TopicGroups, locked(progress.groups))
        answer(CreateTopic, durable(administration.create_topic))
        answer(DeleteTopic, durable(administration.delete_topic))
        answer(CleanUnusedTopics, locked(administration.clean_unused_topics))
        answer(SetGroup, durable(administration.set_group))
        answer(DeleteGroup, durable(administration.delete_group))
        answer(ViewMessage, administration.view_message)
        answer(QueryMessages, administration.query_messages)
        answer(DescribeLog, replication.describe)
        answer(FollowLog, replication.follow_log)
        answer(LeaveLog, replication.remove_replica)
        answer(CopyTables, locked(replication.tables))
        master = context.config.replica_of
        if master is not None:
            for kind in _WRITES:
                self.by_request[kind] = partial(_refuse, context.name, master)

    def _answer(self, kind: type[Q], handler: Callable[[Q], object]) -> None:
        self.by_request[kind] = handler

    def _locked(self, handler: Callable[[Q], A]) -> Callable[[Q], A]:
        """Make a handler run under the runner's lock, on an open broker."""

        def handle(request: Q) -> A:
            with self._runner.lock:
                self._check_open()
                return handler(request)

        return handle

    def _durable(self, handler: Callable[[Q], A]) -> Callable[[Q], A]:
        """Wrap a handler like `_locked`; its changes of tables are durable when it returns."""
        handle = self._locked(handler)

        def handle_and_write(request: Q) -> A:
            answer = handle(request)
            self._writing.write()
            return answer

        return handle_and_write
