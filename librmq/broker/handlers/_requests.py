"""What answers each kind of request to a broker, and what is checked and locked before."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from librmq.broker._clients import Clients
from librmq.broker._context import BrokerContext, refused_by_replica
from librmq.broker._delayed_messages import Deliveries
from librmq.broker._progress import Progress
from librmq.broker.handlers._pull import PullHandler
from librmq.broker.handlers._send import SendHandler
from librmq.errors import BrokerUnreachableError, ClientStateError
from librmq.message.topics import validate_kept_names
from librmq.protocol import (
    Acknowledge,
    CancelMessage,
    CancelReceive,
    ChangeInvisible,
    ChangeSchedule,
    ChannelClosed,
    CheckSubscription,
    CleanUnusedTopics,
    ConsumerData,
    ConsumerIds,
    ConsumerOffsetsOf,
    CopyTables,
    CreateTopic,
    DeleteExpiredFiles,
    DeleteGroup,
    DeleteTopic,
    DescribeClients,
    DescribeConnections,
    DescribeGroups,
    DescribeInstance,
    DescribeLog,
    DescribeProgress,
    DescribeQueues,
    DescribeSchedules,
    DescribeTopics,
    EndTransaction,
    FollowLog,
    ForwardToDeadLetters,
    GroupsBehind,
    GroupSubscriptions,
    Heartbeat,
    HoldPlace,
    InstanceState,
    LeaveLog,
    LockQueues,
    MaxOffset,
    MinOffset,
    MoveGroup,
    PullMessage,
    QueryMessages,
    QueryOffset,
    QueueOffsetAt,
    Receive,
    Request,
    ResendLetters,
    ResetGroup,
    SaveProgress,
    SendBack,
    SendBatch,
    SendMessage,
    SendReply,
    SendTogether,
    SetGroup,
    StartGroup,
    TakeHandOuts,
    TopicGroups,
    UnlockQueues,
    Unregister,
    UpdateOffset,
    ViewMessage,
)
from librmq.runtime.closing import LaterPart

if TYPE_CHECKING:
    from librmq.broker._administration import Administration
    from librmq.broker._replication import Replication
    from librmq.broker._schedules import Schedules
    from librmq.broker._transactions import BrokerTransactions
    from librmq.broker.handlers._receive import ReceiveHandler

_Names = tuple[Iterable[str], Iterable[str]]


def _group_and_topic(request: Any) -> _Names:  # noqa: ANN401 (each of several kinds)
    return (request.group,), (request.topic,)


def _topics_of(data: ConsumerData) -> Iterator[str]:
    for key, subscription in data.subscriptions.items():
        yield key
        yield subscription.topic


_NAMED: Final[Mapping[type, Callable[[Any], _Names]]] = {
    Heartbeat: lambda request: (
        chain(request.producer_groups, (data.group for data in request.consumers)),
        chain.from_iterable(map(_topics_of, request.consumers)),
    ),
    LockQueues: lambda request: ((request.group,), {queue.topic for queue in request.queues}),
    **dict.fromkeys((UpdateOffset, StartGroup, MoveGroup, ResetGroup), _group_and_topic),
}
"""The groups and topics that a request adds to tables. Others name those in the tables, or check a name themselves."""
_REPLICATED: Final[tuple[type[Any], ...]] = (CancelMessage, StartGroup)


class _Answers(NamedTuple):
    """What answers requests, by their class."""

    free: dict[type[Any], Callable[[Any], object]]
    """These need no lock, or take what they need."""
    locked: dict[type[Any], Callable[[Any], object]]
    """These run under the runner's lock, on an open broker."""
    durable: dict[type[Any], Callable[[Any], object]]
    """These change tables under the lock; the changes are written before they are answered."""


def request_table(  # noqa: PLR0913 (each is a collaborator of its own)
    context: BrokerContext,
    replication: LaterPart[Replication],
    sending: SendHandler,
    pulling: PullHandler,
    receives: LaterPart[ReceiveHandler],
    transactions: LaterPart[BrokerTransactions],
    deliveries: Deliveries,
    administration: LaterPart[Administration],
    progress: Progress,
    schedules: Callable[[], Schedules],
) -> dict[type[Any], Callable[[Any], Any]]:
    """Return the function that answers each kind of request to one broker, by its class."""
    clients, locks, offsets, store = context.clients, context.locks, context.offsets, context.store

    # A replica refuses the requests in these, and in those that are durable.
    writes = _Answers(
        {
            SendMessage: sending.answer,
            SendTogether: sending.send_together,
            SendBatch: sending.send_batch,
            SendReply: sending.send_reply,
            SendBack: lambda request: sending.failed().send_back(request),
            ResendLetters: lambda request: sending.failed().resend(request),
            EndTransaction: lambda request: transactions().end_transaction(request),
            CancelMessage: deliveries.cancel,
            DescribeLog: lambda request: replication().describe(request),
            FollowLog: lambda request: replication().follow_log(request),
            LeaveLog: lambda request: replication().remove_replica(request),
        },
        {
            LockQueues: locks.lock_queues,
            UnlockQueues: locks.unlock_queues,
            Receive: lambda request: receives().receive(request),
            CancelReceive: lambda request: receives().cancel_receive(request),
            Acknowledge: lambda request: receives().acknowledge(request),
            ChangeInvisible: lambda request: receives().change(request),
            ForwardToDeadLetters: lambda request: receives().forward(request),
            CleanUnusedTopics: lambda request: administration().clean_unused_topics(request),
            DeleteExpiredFiles: lambda request: administration().delete_expired_files(request),
            CopyTables: lambda request: replication().snapshot_tables(request),
        },
        {
            CreateTopic: lambda request: administration().create_topic(request),
            DeleteTopic: lambda request: administration().delete_topic(request),
            SetGroup: lambda request: administration().set_group(request),
            DeleteGroup: lambda request: administration().delete_group(request),
            MoveGroup: progress.move,
            ResetGroup: progress.reset,
            StartGroup: progress.start,
            SaveProgress: lambda request: offsets.saving.save(),
            ChangeSchedule: lambda request: schedules().change(request),
        },
    )
    others = _Answers(
        {
            PullMessage: pulling.pull,
            CheckSubscription: pulling.check_subscription,
            DescribeInstance: partial(_describe_instance, context),
            ViewMessage: lambda request: administration().view_message(request),
            QueryMessages: lambda request: administration().query_messages(request),
            QueryOffset: progress.query_offset,
            MaxOffset: lambda request: store.queue_range(request.topic, request.queue_id)[1],
            MinOffset: lambda request: store.queue_range(request.topic, request.queue_id)[0],
            QueueOffsetAt: progress.queue_offset_at,
        },
        {
            TakeHandOuts: pulling.take_hand_outs,
            Unregister: partial(_unregister, receives, clients),
            Heartbeat: clients.register_client,
            ChannelClosed: partial(_channel_closed, context),
            ConsumerIds: clients.consumer_ids,
            GroupSubscriptions: clients.subscriptions,
            DescribeClients: lambda request: clients.connected(),
            DescribeConnections: lambda request: clients.connections(request.group),
            GroupsBehind: partial(_groups_behind, context, progress, deliveries),
            DescribeTopics: lambda request: administration().describe_topics(request),
            DescribeGroups: lambda request: dict(context.groups.by_name),
            UpdateOffset: progress.update,
            HoldPlace: progress.hold_place,
            TopicGroups: progress.groups,
            DescribeQueues: progress.describe_queues,
            DescribeProgress: progress.describe,
            ConsumerOffsetsOf: lambda request: dict(offsets.of_topic(request.group, request.topic)),
            DescribeSchedules: lambda request: schedules().describe(request),
        },
        {},
    )

    master, writing = context.config.replica_of, _wrapped(context, writes)
    for kind in _REPLICATED:
        writing[kind] = _replicated(writing[kind], replication)
    table = {**writing, **_wrapped(context, others)}
    for named, names_of in _NAMED.items():
        table[named] = _checked(context, names_of, table[named])
    return table if master is None else table | dict.fromkeys(writing, partial(_refuse, context.name, master))


def _refuse(name: str, master: str, request: Request[Any]) -> object:
    raise refused_by_replica(name, master, type(request))


def _wrapped(context: BrokerContext, answers: _Answers) -> dict[type[Any], Callable[[Any], object]]:
    return {
        **answers.free,
        **{kind: _locked(context, handler, writes=False) for kind, handler in answers.locked.items()},
        **{kind: _locked(context, handler, writes=True) for kind, handler in answers.durable.items()},
    }


def _locked(context: BrokerContext, handler: Callable[[Any], object], *, writes: bool) -> Callable[[Any], object]:
    runner, check_open = context.runner, context.life.check_open

    def handle(request: Request[Any]) -> object:
        with runner.lock:  # a forked child has another one
            check_open()
            answer = handler(request)
        if writes:
            context.writing.write()
        return answer

    return handle


def _replicated(handler: Callable[[Any], object], replication: LaterPart[Replication]) -> Callable[[Any], object]:
    """Wrap a handler: with synchronous replication, the replicas that answer have its changes when it returns."""

    def handle(request: Request[Any]) -> object:
        answer = handler(request)
        if replication.made is not None:
            replication.made.copy_tables_early()
        return answer

    return handle


def _checked(
    context: BrokerContext, names_of: Callable[[Any], _Names], handler: Callable[[Any], object]
) -> Callable[[Any], object]:
    """Wrap a handler behind the check of the names that a request adds to tables."""

    def handle(request: Request[Any]) -> object:
        groups, topics = names_of(request)
        validate_kept_names(
            (group for group in groups if group not in context.groups.by_name),
            (topic for topic in topics if topic not in context.topics.by_name),
        )
        return handler(request)

    return handle


# ---- answers by several parts


def _unregister(receives: LaterPart[ReceiveHandler], clients: Clients, request: Unregister) -> None:
    if receives.made is not None:
        receives.made.left(request)
    clients.unregister(request)


def _channel_closed(context: BrokerContext, request: ChannelClosed) -> None:
    if request.has_ended:
        context.locks.release(request.client_id)
    context.clients.channel_closed(request)


def _describe_instance(context: BrokerContext, request: DescribeInstance) -> InstanceState | None:
    with context.runner.lock:
        context.life.check_open()
        client = context.clients.instance(request.group, request.client_id)
        with suppress(BrokerUnreachableError):
            return client.call(DescribeInstance(request.group))
    try:
        return client.call(request)  # without the lock, because a client on a connection takes its time
    except BrokerUnreachableError as error:  # which is no word about a broker
        raise ClientStateError(str(error)) from error


def _groups_behind(
    context: BrokerContext, progress: Progress, deliveries: Deliveries, request: GroupsBehind
) -> tuple[str, ...]:
    behind = progress.behind()
    if behind:  # It may be behind only by messages that its filter lets through none of.
        context.held.answer_passed()
    schedule = None if context.config.replica_of is not None else deliveries.schedule.made
    if schedule is not None and schedule.has_due(context.runner.now_ms()):
        behind.append(GroupsBehind.DUE)
    return tuple(behind)
