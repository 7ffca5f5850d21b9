"""What answers each kind of request to a broker, and what is checked and locked before."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

from librmq import protocol
from librmq.broker._clients import Clients
from librmq.broker._context import BrokerContext, refused_by_replica
from librmq.broker._delayed_messages import Deliveries
from librmq.broker._progress import Progress
from librmq.broker.handlers._pull import PullHandler
from librmq.broker.handlers._send import SendHandler
from librmq.errors import BrokerUnreachableError, ClientStateError
from librmq.message.topics import validate_kept_names
from librmq.protocol import ConsumerData, InstanceState, Request
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
    protocol.Heartbeat: lambda request: (
        chain(request.producer_groups, (data.group for data in request.consumers)),
        chain.from_iterable(map(_topics_of, request.consumers)),
    ),
    protocol.LockQueues: lambda request: ((request.group,), {queue.topic for queue in request.queues}),
    **dict.fromkeys(
        (protocol.UpdateOffset, protocol.StartGroup, protocol.MoveGroup, protocol.ResetGroup), _group_and_topic
    ),
}
"""The groups and topics that a request adds to tables. Others name those in the tables, or check a name themselves."""
_REPLICATED: Final[tuple[type[Any], ...]] = (protocol.CancelMessage, protocol.StartGroup)


_Handlers = dict[type[Any], Callable[[Any], object]]
"""What answers requests, by their class."""


def request_table(
    context: BrokerContext,
    replication: LaterPart[Replication],
    sending: SendHandler,
    transactions: LaterPart[BrokerTransactions],
    deliveries: Deliveries,
    progress: Progress,
) -> tuple[dict[type[Any], Callable[[Any], Any]], LaterPart[ReceiveHandler], LaterPart[Schedules]]:
    """Return what answers requests, by their class, and the parts that receive and that send on schedules."""
    clients, locks, offsets, store = context.clients, context.locks, context.offsets, context.store

    @LaterPart
    def administration() -> Administration:
        from librmq.broker._administration import Administration

        return Administration(context)

    @LaterPart
    def schedules() -> Schedules:
        from librmq.broker._schedules import Schedules

        return Schedules(context, sending.put)

    @LaterPart
    def receives() -> ReceiveHandler:
        from librmq.broker.handlers._receive import ReceiveHandler

        return ReceiveHandler(context, sending, progress, partial(pulling.selection, by_text=True))

    pulling = PullHandler(context, sending, replication)

    # A replica refuses these.
    writing = _wrapped(
        context,
        {
            protocol.SendMessage: sending.answer,
            protocol.SendTogether: sending.send_together,
            protocol.SendBatch: sending.send_batch,
            protocol.SendReply: sending.send_reply,
            protocol.SendBack: lambda request: sending.failed().send_back(request),
            protocol.ResendLetters: lambda request: sending.failed().resend(request),
            protocol.EndTransaction: lambda request: transactions().end_transaction(request),
            protocol.CancelMessage: deliveries.cancel,
            protocol.DescribeLog: lambda request: replication().describe(request),
            protocol.FollowLog: lambda request: replication().follow_log(request),
            protocol.LeaveLog: lambda request: replication().remove_replica(request),
        },
        {
            protocol.LockQueues: locks.lock_queues,
            protocol.UnlockQueues: locks.unlock_queues,
            protocol.Receive: lambda request: receives().receive(request),
            protocol.CancelReceive: lambda request: receives().cancel_receive(request),
            protocol.Acknowledge: lambda request: receives().acknowledge(request),
            protocol.ChangeInvisible: lambda request: receives().change(request),
            protocol.ForwardToDeadLetters: lambda request: receives().forward(request),
            protocol.CleanUnusedTopics: lambda request: administration().clean_unused_topics(request),
            protocol.DeleteExpiredFiles: lambda request: administration().delete_expired_files(request),
            protocol.CopyTables: lambda request: replication().snapshot_tables(request),
        },
        {
            protocol.CreateTopic: lambda request: administration().create_topic(request),
            protocol.DeleteTopic: lambda request: administration().delete_topic(request),
            protocol.SetGroup: lambda request: administration().set_group(request),
            protocol.DeleteGroup: lambda request: administration().delete_group(request),
            protocol.MoveGroup: progress.move,
            protocol.ResetGroup: progress.reset,
            protocol.StartGroup: progress.start,
            protocol.SaveProgress: lambda request: offsets.saving.save(),
            protocol.ChangeSchedule: lambda request: schedules().change(request),
        },
    )
    others = _wrapped(
        context,
        {
            protocol.PullMessage: pulling.pull,
            protocol.CheckSubscription: pulling.check_subscription,
            protocol.DescribeInstance: partial(_describe_instance, context),
            protocol.ViewMessage: lambda request: administration().view_message(request),
            protocol.QueryMessages: lambda request: administration().query_messages(request),
            protocol.QueryOffset: progress.query_offset,
            protocol.MaxOffset: lambda request: store.queue_range(request.topic, request.queue_id)[1],
            protocol.MinOffset: lambda request: store.queue_range(request.topic, request.queue_id)[0],
            protocol.QueueOffsetAt: progress.queue_offset_at,
        },
        {
            protocol.TakeHandOuts: pulling.take_hand_outs,
            protocol.Unregister: partial(_unregister, receives, clients),
            protocol.Heartbeat: clients.register_client,
            protocol.ChannelClosed: partial(_channel_closed, context),
            protocol.ConsumerIds: clients.consumer_ids,
            protocol.GroupSubscriptions: clients.subscriptions,
            protocol.DescribeClients: lambda request: clients.connected(),
            protocol.DescribeConnections: lambda request: clients.connections(request.group),
            protocol.GroupsBehind: partial(_groups_behind, context, progress, deliveries),
            protocol.DescribeTopics: lambda request: administration().describe_topics(request),
            protocol.DescribeGroups: lambda request: dict(context.groups.by_name),
            protocol.UpdateOffset: progress.update,
            protocol.HoldPlace: progress.hold_place,
            protocol.TopicGroups: progress.groups,
            protocol.DescribeQueues: progress.describe_queues,
            protocol.DescribeProgress: progress.describe,
            protocol.ConsumerOffsetsOf: lambda request: dict(offsets.of_topic(request.group, request.topic)),
            protocol.DescribeSchedules: lambda request: schedules().describe(request),
        },
    )
    for kind in _REPLICATED:
        writing[kind] = _replicated(writing[kind], replication)
    table = writing | others
    for named, names_of in _NAMED.items():
        table[named] = _checked(context, names_of, table[named])
    if (master := context.config.replica_of) is not None:
        table |= dict.fromkeys(writing, partial(_refuse, context.name, master))
    return table, receives, schedules


def _refuse(name: str, master: str, request: Request[Any]) -> object:
    raise refused_by_replica(name, master, type(request))


def _wrapped(context: BrokerContext, free: _Handlers, locked: _Handlers, durable: _Handlers | None = None) -> _Handlers:
    """Wrap handlers by how they run.

    Those that are ``free`` take the locks that they need themselves. The others run under the runner's lock, on an open
    broker. Those that are ``durable`` change tables; the changes are written before they are answered.
    """
    wrapped = free | {kind: _locked(context, handler, writes=False) for kind, handler in locked.items()}
    return wrapped | {kind: _locked(context, handler, writes=True) for kind, handler in (durable or {}).items()}


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


def _unregister(receives: LaterPart[ReceiveHandler], clients: Clients, request: protocol.Unregister) -> None:
    if receives.made is not None:
        receives.made.left(request)
    clients.unregister(request)


def _channel_closed(context: BrokerContext, request: protocol.ChannelClosed) -> None:
    if request.has_ended:
        context.locks.release(request.client_id)
    context.clients.channel_closed(request)


def _describe_instance(context: BrokerContext, request: protocol.DescribeInstance) -> InstanceState | None:
    with context.runner.lock:
        context.life.check_open()
        client = context.clients.instance(request.group, request.client_id)
        with suppress(BrokerUnreachableError):
            return client.call(protocol.DescribeInstance(request.group))
    try:
        return client.call(request)  # without the lock, because a client on a connection takes its time
    except BrokerUnreachableError as error:  # which is no word about a broker
        raise ClientStateError(str(error)) from error


def _groups_behind(
    context: BrokerContext, progress: Progress, deliveries: Deliveries, request: protocol.GroupsBehind
) -> tuple[str, ...]:
    behind = progress.behind()
    if behind:  # It may be behind only by messages that its filter lets through none of.
        context.held.answer_passed()
    schedule = None if context.config.replica_of is not None else deliveries.schedule.made
    if schedule is not None and schedule.has_due(context.runner.now_ms()):
        behind.append(protocol.GroupsBehind.DUE)
    return tuple(behind)
