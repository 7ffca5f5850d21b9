"""Requests of operators to one broker over TCP, which no single request of 4.x answers.

`ANSWERS` has them by class. Mirrors ``MQAdminImpl`` and ``DefaultMQAdminExtImpl``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Any, Final, TypeVar

from librmq.broker.groups import settings_in
from librmq.config import to_timestamp_ms
from librmq.errors import BrokerError, BrokerUnreachableError, ClientStateError, MalformedError
from librmq.message import MessageQueue
from librmq.message.lag import queue_lag
from librmq.protocol import (
    ConnectedClient,
    ConsumerOffsetsOf,
    DeleteGroup,
    DescribeClients,
    DescribeConnections,
    DescribeGroups,
    DescribeInstance,
    DescribeProgress,
    DescribeQueues,
    DescribeTopics,
    GroupProgress,
    GroupsBehind,
    GroupSettings,
    InstanceState,
    MessageModel,
    MoveGroup,
    PullMessage,
    PullStatus,
    QueueBounds,
    QueueData,
    QueueOffsetAt,
    ResetGroup,
    ResponseCode,
    SaveProgress,
    SetGroup,
    Subscription,
    TopicGroups,
    UpdateOffset,
)
from librmq.store.format.broker_tables import topic_type
from librmq.wire.remote._remote_broker import COMMIT_IGNORED, RemoteBroker
from librmq.wire.remoting._bodies import by_queue, number_in, queue_data_of, rows_in, table_in, text_in
from librmq.wire.remoting._headers import DURABLE_FIELD, RequestCode
from librmq.wire.remoting._request_codec import FORMS, check, frame_of
from librmq.wire.remoting._running_info import read_running_info, running_info_frame

T = TypeVar("T")
_PULLER: Final = "TOOLS_CONSUMER"
_NO_PROGRESS: Final = "consumer group"
"""In the reason of a broker that has no progress of a group; another one names the topic."""
_SAVED_WITHIN_S: Final = 20.0
"""Clients save their first progress within 10 s from their start."""
_LOOK_S: Final = 1.0


# ---- topics


def _describe_topics(broker: RemoteBroker, request: DescribeTopics) -> dict[str, QueueData]:
    def parse(body: Mapping[str, Any]) -> dict[str, QueueData]:
        rows = table_in(body, "topicConfigTable").items()
        return {
            topic: replace(queue_data_of(broker.name, row), message_type=topic_type(row))
            for topic, row in rows  # `queue_data_of` serves routes, which have no type
        }

    return broker.read(frame_of(RequestCode.GET_ALL_TOPIC_CONFIG), "the topics", parse)


def _describe_queues(broker: RemoteBroker, request: DescribeQueues) -> dict[MessageQueue, QueueBounds]:
    frame = frame_of(RequestCode.GET_TOPIC_STATS_INFO, request)
    names = ("minOffset", "maxOffset", "lastUpdateTimestamp")
    return broker.read(frame, "the queues of a topic", partial(_rows_by_queue, QueueBounds, names))


def _rows_by_queue(
    kind: Callable[[int, int, int], T], names: tuple[str, str, str], body: Mapping[str, Any]
) -> dict[MessageQueue, T]:
    rows = by_queue(body.get("offsetTable") or {})
    return {queue: kind(*(number_in(row, name) for name in names)) for queue, row in rows}


# ---- groups


def _describe_groups(broker: RemoteBroker, request: DescribeGroups) -> dict[str, GroupSettings]:
    def parse(body: Mapping[str, Any]) -> dict[str, GroupSettings]:
        rows = table_in(body, "subscriptionGroupTable")
        for row in rows.values():
            number_in(row, "retryMaxTimes")
        return {name: settings_in(name, row) for name, row in rows.items()}

    return broker.read(frame_of(RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG), "the groups", parse)


def _set_group(broker: RemoteBroker, request: SetGroup) -> None:
    """Change a group: a broker gives settings that a request leaves out their defaults."""
    rows = broker.group_rows()
    row = rows.get(request.group) or {**rows.get(request.like or "", {}), "groupName": request.group}
    check(broker.request(FORMS[SetGroup].write(SetGroup(request.group, {**row, **request.settings}))))


def _delete_group(broker: RemoteBroker, request: DeleteGroup) -> None:
    broker.await_left_pulls(request.group)
    check(broker.request(FORMS[DeleteGroup].write(request)))


def _describe_instance(broker: RemoteBroker, request: DescribeInstance) -> InstanceState:
    if not request.timeout_s:
        raise ClientStateError(f"{broker.name}: a client can't be asked without waiting")
    try:
        return read_running_info(request, broker.request_within(running_info_frame(request), request.timeout_s))
    except (BrokerUnreachableError, MalformedError) as error:  # the client is silent, which is no word about the broker
        raise ClientStateError(f"{broker.name}: client {request.client_id}: {error}") from error


def _describe_clients(broker: RemoteBroker, request: DescribeClients) -> tuple[ConnectedClient, ...]:
    """Return the clients of all groups, with a request for each consumer group."""
    producers = broker.read(frame_of(RequestCode.GET_ALL_PRODUCER_INFO), "the producers", _producers_in)
    consumers = [
        (client_id, group)
        for group in broker.group_rows()
        if (members := broker.connections(group)) is not None
        for client_id in members.client_ids
    ]
    return ConnectedClient._by_id(producers, consumers)


def _producers_in(body: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return pairs of a client id and a producer group."""
    table = body.get("data") or {}
    if not isinstance(table, dict):
        raise MalformedError(f"data: expected an object, found {table!r:.80}")
    return [(text_in(row, "clientId"), str(group)) for group in table for row in rows_in(table, group)]


# ---- progress


def _describe_progress(broker: RemoteBroker, request: DescribeProgress) -> dict[MessageQueue, GroupProgress]:
    frame = frame_of(RequestCode.GET_CONSUME_STATS, request)
    names = ("brokerOffset", "consumerOffset", "lastTimestamp")
    return broker.read(frame, "the progress of a group", partial(_rows_by_queue, GroupProgress, names))


def _save_progress(broker: RemoteBroker) -> None:
    """Let the clients of this process save progress for the next look; those of others do so within seconds."""
    for beat in broker.heartbeats().values():
        for data in beat.consumers:
            with suppress(ClientStateError):  # it is leaving
                beat.client.call(SaveProgress(data.group))


def _groups_behind(broker: RemoteBroker, request: GroupsBehind) -> tuple[str, ...]:
    """Compare stored progress with the queues."""
    broker.introduce()
    _save_progress(broker)
    if broker.has_receives:
        frame = frame_of(RequestCode.GROUPS_BEHIND)
        return broker.read(frame, "the groups that are behind", lambda body: tuple(map(str, body["behind"])))
    behind = []
    for group in broker.group_rows():
        members = broker.connections(group)
        if members is None or members.model is MessageModel.BROADCASTING:
            continue
        for topic in members.subscriptions:
            try:
                progress = _describe_progress(broker, DescribeProgress(group, topic))
                bounds = _describe_queues(broker, DescribeQueues(topic))
            except BrokerError as error:
                if error.code != ResponseCode.TOPIC_NOT_EXIST:
                    raise
                continue
            for queue, (begin, end, _) in bounds.items():
                at = None if queue not in progress else progress[queue].queue_offset
                if lag := queue_lag(at, begin, end):
                    behind.append(f"group {group}: {lag} messages of {topic}/{queue.queue_id}")
    return tuple(behind)


def _move_group(broker: RemoteBroker, request: MoveGroup) -> dict[MessageQueue, int]:
    """Move a group: a running one by its broker, which orders its instances to continue there."""
    group, topic = request.group, request.topic
    is_running = not broker.has_receives and broker.connections(group) is not None
    moves_all = request.queue_id is None and not isinstance(request.to, int)
    if is_running and moves_all and not request.dry_run:
        timestamp_ms = to_timestamp_ms("to", request.to) if isinstance(request.to, datetime) else 0
        return _reset_running(broker, ResetGroup(group, topic, -1 if request.to == "end" else timestamp_ms))
    if is_running and not moves_all:
        raise BrokerError(
            ResponseCode.SYSTEM_ERROR,
            f"{broker.name}: group {group!r} runs, and a broker moves a running group only in all queues of a topic, "
            "to 'begin', 'end' or a time: stop its instances first, or name one of these",
        )
    bounds = _describe_queues(broker, DescribeQueues(topic))
    if request.queue_id is not None:
        bounds = {queue: part for queue, part in bounds.items() if queue.queue_id == request.queue_id}
        if not bounds:
            raise BrokerError(ResponseCode.SYSTEM_ERROR, f"topic {topic!r} has no queue {request.queue_id}")
    if request.dry_run:
        return {queue: _offset_of(broker, queue, part, request.to) for queue, part in bounds.items()}
    if broker.has_receives:
        return _move_at_owner(broker, request, bounds)
    if group not in broker.group_rows() and group not in broker.call(TopicGroups(topic)):
        raise BrokerError(ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, f"group {group!r} does not exist")
    offsets = {queue: _offset_of(broker, queue, part, request.to) for queue, part in bounds.items()}
    for queue, queue_offset in offsets.items():
        frame = FORMS[UpdateOffset].write(UpdateOffset(group, topic, queue.queue_id, queue_offset))
        frame.fields[DURABLE_FIELD] = "true"
        answer = check(broker.request(frame))
        # A broker of 5.x ignores commits between a reset and the next pull of the queue, but not another reset.
        if answer.remark == COMMIT_IGNORED:
            broker.call(ResetGroup(group, topic, -1, queue_id=queue.queue_id, queue_offset=queue_offset))
    return offsets


def _move_at_owner(
    broker: RemoteBroker, request: MoveGroup, bounds: Mapping[MessageQueue, QueueBounds]
) -> dict[MessageQueue, int]:
    moved: dict[MessageQueue, int] = {}
    for queue, part in bounds.items():
        target = _offset_of(broker, queue, part, request.to)
        reset = ResetGroup(request.group, request.topic, -1, queue_id=queue.queue_id, queue_offset=target)
        offsets = broker.call(reset)
        moved.update(offsets)
    return moved


def _offset_of(broker: RemoteBroker, queue: MessageQueue, bounds: QueueBounds, to: str | datetime | int) -> int:
    begin, end = bounds.min_offset, bounds.max_offset
    if isinstance(to, int):
        return min(max(to, begin), end)
    if not isinstance(to, datetime):
        return begin if to == "begin" else end
    timestamp_ms = to_timestamp_ms("to", to)
    first = max(broker.call(QueueOffsetAt(queue.topic, queue.queue_id, timestamp_ms)), begin)
    if first >= end:
        return end
    everything = Subscription(queue.topic, "*")
    answer = broker.call(PullMessage("", _PULLER, queue.topic, queue.queue_id, first, 1, everything))
    if answer.status is PullStatus.FOUND and answer.messages[0].store_timestamp_ms < timestamp_ms:
        return first + 1  # a broker answers with the nearest message, which can be older
    return first


def _reset_running(broker: RemoteBroker, request: ResetGroup) -> dict[MessageQueue, int]:
    """Move a running group; wait for instances that have just started, until they have saved progress."""
    clock, never = broker.clock, threading.Event()
    deadline = clock.monotonic() + _SAVED_WITHIN_S
    while True:
        try:
            offsets = broker.call(request)
            return dict(offsets)
        except BrokerError as error:
            if error.code != ResponseCode.SYSTEM_ERROR or _NO_PROGRESS not in str(error):
                raise
            is_online = broker.connections(request.group) is not None
            if is_online and clock.monotonic() < deadline:
                _save_progress(broker)
                clock.wait(never, _LOOK_S)
                continue
            what_next = "try again when they have" if is_online else "start a consumer of the group first"
            subject = "its clients have" if is_online else "the group has"
            raise BrokerError(
                error.code,
                f"{broker.name}: group {request.group!r} can't be reset in {request.topic!r}, because {subject} "
                f"not saved progress of each queue: {what_next}",
            ) from error


# ---- a shared store


def connections(broker: RemoteBroker) -> tuple[int, list[tuple[str, int]]]:
    """Return when the owner of a shared store started, and host and start (ms) of each connection, the first first.

    `process_of_host` has the process of a host.
    """

    def parse(body: Mapping[str, Any]) -> tuple[int, list[tuple[str, int]]]:
        rows = rows_in(body, "connections")
        return number_in(body, "beginMs"), [(text_in(row, "host"), number_in(row, "beginMs")) for row in rows]

    return broker.read(frame_of(RequestCode.LIST_CONNECTIONS), "the connections", parse)


ANSWERS: Final[Mapping[type[Any], Callable[[RemoteBroker, Any], Any]]] = {
    DescribeTopics: _describe_topics,
    DescribeQueues: _describe_queues,
    DescribeGroups: _describe_groups,
    SetGroup: _set_group,
    DeleteGroup: _delete_group,
    DescribeConnections: lambda broker, request: broker.connections(request.group),
    DescribeInstance: _describe_instance,
    DescribeClients: _describe_clients,
    DescribeProgress: _describe_progress,
    ConsumerOffsetsOf: lambda broker, request: broker.all_offsets().get(f"{request.topic}@{request.group}", {}),
    GroupsBehind: _groups_behind,
    MoveGroup: _move_group,
}
"""What asks a broker, by class of request."""
