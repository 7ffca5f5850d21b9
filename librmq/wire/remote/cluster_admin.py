"""Questions of people and tools to all brokers of a route. Mirrors ``DefaultMQAdminExt``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar

from librmq.errors import BrokerError, BrokerUnreachableError, MalformedError
from librmq.message.ids import format_host, parse_offset_message_id
from librmq.message.lag import queue_lag
from librmq.message.message import MessageQueue, StoredMessage
from librmq.protocol import (
    ConsumerData,
    CreateTopic,
    DeleteGroup,
    DeleteTopic,
    QueryMessages,
    QueryOffset,
    QueueData,
    QueueOffsetAt,
    ResetGroup,
    ResponseCode,
    SetGroup,
    UpdateOffset,
    ViewMessage,
)
from librmq.wire.remote.remote_broker import RemoteBroker
from librmq.wire.remote.remote_route import RemoteRoute
from librmq.wire.remoting.bodies import by_queue, number_in, queue_data_of, read_body, table_in, text_in
from librmq.wire.remoting.codec import FORMS, check, frame_of
from librmq.wire.remoting.frames import Frame
from librmq.wire.remoting.headers import GroupAndTopicHeader, RequestCode, TopicNameHeader, TopicOfClusterHeader

T = TypeVar("T")
Rows = Mapping[str, Mapping[str, Any]]
_MOST_FOUND = 64
_NO_PROGRESS = "consumer group"
"""In the reason of a broker that has no progress of a group; another one names the topic."""
_SAVED_WITHIN_S = 20.0
"""Clients save their first progress within 10 s from their start."""
_LOOK_S = 1.0


class QueueBounds(NamedTuple):
    """The messages of a queue at its broker."""

    min_offset: int
    max_offset: int
    """The queue offset of the next message."""
    last_timestamp_ms: int
    """Store time of the last message; 0 if there is none."""


class GroupProgress(NamedTuple):
    """The progress of a group in a queue."""

    max_offset: int
    """The queue offset of the next message at the broker."""
    queue_offset: int
    """The queue offset of the next message for the group."""
    last_timestamp_ms: int
    """Store time of the last consumed message; 0 if it is gone."""

    @property
    def lag(self) -> int:
        """Messages that the group has not consumed; those that are deleted count, because the broker sends no begin."""
        return queue_lag(self.queue_offset, 0, self.max_offset)


class ClusterAdmin:
    """Asks every broker of a route. Thread-safe; each call waits for its answers.

    Each method raises `BrokerUnreachableError` if a broker does not answer or its answer can't be read, and
    `BrokerError` if a broker refuses.
    """

    def __init__(self, route: RemoteRoute) -> None:
        self.route = route

    def _brokers(self) -> Iterator[RemoteBroker]:
        for name in self.route.broker_names():
            yield self.route.broker(name)

    def _read_answer(self, broker: RemoteBroker, frame: Frame, what: str, parse: Callable[[dict[str, Any]], T]) -> T:
        answer = check(broker.request(frame))
        try:
            return parse(read_body(answer.body, what))
        except MalformedError as error:
            raise BrokerUnreachableError(f"{broker.name}: {what} can't be read: {error}") from error

    # ---- topics

    def topics(self) -> dict[str, tuple[QueueData, ...]]:
        """Return the topics of all brokers with their queues, sorted, including the brokers' own."""
        queues: dict[str, list[QueueData]] = {}
        for broker in self._brokers():
            frame = frame_of(RequestCode.GET_ALL_TOPIC_CONFIG)
            rows = self._read_answer(broker, frame, "the topics", partial(_topics_in, broker.name))
            for topic, data in rows.items():
                queues.setdefault(topic, []).append(data)
        return {topic: tuple(queues[topic]) for topic in sorted(queues)}

    def create_topic(self, topic: str, queues: int = 8, *, broker_name: str | None = None) -> None:
        """Create a topic, or change its number of queues, at one broker or at all."""
        for broker in self._brokers():
            if broker_name in (None, broker.name):
                broker.call(CreateTopic(topic, queues, queues))

    def delete_topic(self, topic: str) -> None:
        """Delete a topic at all brokers and name servers. Its messages stay until retention deletes them."""
        for broker in self._brokers():
            broker.call(DeleteTopic(topic))
        self.route.name_servers.request_all(frame_of(RequestCode.DELETE_TOPIC_IN_NAMESRV, TopicOfClusterHeader(topic)))

    def queues(self, topic: str) -> dict[MessageQueue, QueueBounds]:
        """Return the queues of a topic, sorted, with the messages in each; empty if no broker has the topic."""
        frame = frame_of(RequestCode.GET_TOPIC_STATS_INFO, TopicNameHeader(topic))
        names = ("minOffset", "maxOffset", "lastUpdateTimestamp")
        return self._of_queues(frame, "the queues of a topic", QueueBounds, names, ResponseCode.TOPIC_NOT_EXIST)

    def _of_queues(
        self, frame: Frame, what: str, kind: Callable[[int, int, int], T], names: tuple[str, str, str], absent: int
    ) -> dict[MessageQueue, T]:
        """Return a table with a row for each queue; a broker that answers ``absent`` has none."""

        def parse(body: Mapping[str, Any]) -> dict[MessageQueue, T]:
            rows = by_queue(body.get("offsetTable") or {})
            return {queue: kind(*(number_in(row, name) for name in names)) for queue, row in rows}

        table: dict[MessageQueue, T] = {}
        for broker in self._brokers():
            try:
                table |= self._read_answer(broker, frame, what, parse)
            except BrokerError as error:
                if error.code != absent:
                    raise
        return dict(sorted(table.items()))

    # ---- groups

    def groups(self) -> dict[str, int]:
        """Return the consumer groups that the brokers know, sorted, each with its number of redeliveries."""
        redeliveries: dict[str, int] = {}
        for broker in self._brokers():
            redeliveries = self._read_groups(broker, _redeliveries_in) | redeliveries
        return dict(sorted(redeliveries.items()))

    def _read_groups(self, broker: RemoteBroker, parse: Callable[[dict[str, Any]], T]) -> T:
        return self._read_answer(broker, frame_of(RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG), "the groups", parse)

    def set_group(self, group: str, retry_max_times: int | None = None) -> None:
        """Create a consumer group, or change its number of redeliveries, at all brokers; other settings remain.

        None keeps the number; it is 16 in a new group.
        """
        changes = {} if retry_max_times is None else {"retryMaxTimes": retry_max_times}
        for broker in self._brokers():
            row = self._read_groups(broker, _group_rows_in).get(group, {})
            broker.call(SetGroup(group, {**row, **changes}))

    def delete_group(self, group: str, *, removes_progress: bool = False) -> None:
        """Delete a consumer group's settings at all brokers, and its progress if wanted."""
        for broker in self._brokers():
            broker.call(DeleteGroup(group, removes_progress))

    def clients(self, group: str) -> tuple[ConsumerData, tuple[str, ...]] | None:
        """Return a group as its clients describe it, with their ids; None if no client is online."""
        data: ConsumerData | None = None
        ids: dict[str, None] = {}
        for broker in self._brokers():
            members = broker.clients_of(group)
            if members is not None:
                data = data or members[0]
                ids |= dict.fromkeys(members[1])
        return None if data is None else (data, tuple(ids))

    def progress(self, group: str, topic: str | None = None) -> dict[MessageQueue, GroupProgress]:
        """Return a group's progress by queue, in one topic or in all that it consumes, sorted."""
        frame = frame_of(RequestCode.GET_CONSUME_STATS, GroupAndTopicHeader(group, topic))
        names = ("brokerOffset", "consumerOffset", "lastTimestamp")
        return self._of_queues(frame, "the progress of a group", GroupProgress, names, ResponseCode.TOPIC_NOT_EXIST)

    def groups_of(self, topic: str) -> tuple[str, ...]:
        """Return the groups that consume a topic or have progress in it, sorted."""
        groups: set[str] = set()
        for broker in self._brokers():
            groups.update(broker.groups_of(topic))
        return tuple(sorted(groups))

    def reset(self, group: str, topic: str, timestamp_ms: int, *, force: bool = True) -> dict[MessageQueue, int]:
        """Move a group's progress on a topic to a time (ms; -1 is the end), and return the new offsets by queue.

        Clients that are online continue there. Without ``force`` progress moves backwards only. A broker resets only a
        group that has saved progress of each queue, so this waits up to 20 s for clients that have just started.

        Raises:
            BrokerError: The group has saved no progress, or there is no such topic.
        """
        moved: dict[MessageQueue, int] = {}
        for broker in self._brokers():
            try:
                moved |= self._reset_online(broker, ResetGroup(group, topic, timestamp_ms, force))
            except BrokerError as error:
                if error.code != ResponseCode.CONSUMER_NOT_ONLINE:
                    raise
                moved.update(self._reset_offline(broker, group, topic, timestamp_ms, force))
        return dict(sorted(moved.items()))

    def _reset_online(self, broker: RemoteBroker, request: ResetGroup) -> Mapping[MessageQueue, int]:
        clock, never = self.route.runner.clock, threading.Event()
        deadline = clock.monotonic() + _SAVED_WITHIN_S
        while True:
            try:
                return broker.call(request)
            except BrokerError as error:
                if error.code != ResponseCode.SYSTEM_ERROR or _NO_PROGRESS not in str(error):
                    raise
                is_online = broker.clients_of(request.group) is not None
                if is_online and clock.monotonic() < deadline:
                    clock.wait(never, _LOOK_S)
                    continue
                what_next = "try again when they have" if is_online else "start a consumer of the group first"
                subject = "its clients have" if is_online else "the group has"
                raise BrokerError(
                    error.code,
                    f"{broker.name}: group {request.group!r} can't be reset in {request.topic!r}, because {subject} "
                    f"not saved progress of each queue: {what_next}",
                ) from error

    def _reset_offline(
        self, broker: RemoteBroker, group: str, topic: str, timestamp_ms: int, force: bool
    ) -> dict[MessageQueue, int]:
        moved = {}
        for queue, bounds in self.queues(topic).items():
            if queue.broker_name != broker.name:
                continue
            offset = bounds.max_offset
            if timestamp_ms >= 0:
                offset = broker.call(QueueOffsetAt(topic, queue.queue_id, timestamp_ms))
            before = broker.call(QueryOffset(group, topic, queue.queue_id))
            if force or before is None or offset <= before:
                broker.call(UpdateOffset(group, topic, queue.queue_id, offset))
                moved[queue] = offset
        return moved

    def connections(self) -> tuple[int, list[tuple[str, int]]]:
        """Return when the owner of a shared store began, and host and begin (ms) of each connection, the first first.

        `librmq.wire.unix_sockets.process_of_host` has the process of a host.
        """
        (broker,) = self._brokers()
        frame = frame_of(RequestCode.LIST_CONNECTIONS)
        return self._read_answer(broker, frame, "the connections", _connections_in)

    def tables(self, broker_name: str) -> tuple[Rows, Rows, Rows]:
        """Return a broker's rows of topics, of groups, and of offsets by ``topic@group``, as its slaves get them."""
        broker = self.route.broker(broker_name)
        topics = frame_of(RequestCode.GET_ALL_TOPIC_CONFIG)
        offsets = frame_of(RequestCode.GET_ALL_CONSUMER_OFFSET)
        return (
            self._read_answer(broker, topics, "the topics", partial(table_in, name="topicConfigTable")),
            self._read_groups(broker, _group_rows_in),
            self._read_answer(broker, offsets, "the progress of all groups", partial(table_in, name="offsetTable")),
        )

    # ---- messages

    def find_by_id(self, message_id: str, topic: str | None = None) -> StoredMessage | None:
        """Return the message with an offset id, or with ``topic`` the first one with a producer's unique id."""
        try:
            host, physical_offset = parse_offset_message_id(message_id)
        except MalformedError:
            host = None
        address = None if host is None else format_host(host)
        for broker in self._brokers():
            if broker.address == address:
                return broker.call(ViewMessage(physical_offset))
        messages = [] if topic is None else self.find_by_key(topic, message_id, is_unique=True)
        return next(iter(messages), None)

    def find_by_key(
        self, topic: str, key: str, *, max_messages: int = _MOST_FOUND, is_unique: bool = False
    ) -> list[StoredMessage]:
        """Return messages of a topic with a key, or with a producer's unique id, oldest first."""
        request = QueryMessages(topic, key, max_messages)
        messages: list[StoredMessage] = []
        for broker in self._brokers():
            frame = FORMS[QueryMessages].write(request)
            if is_unique:
                frame.fields["_UNIQUE_KEY_QUERY"] = "true"
            answer = broker.request(frame)
            try:
                messages += FORMS[QueryMessages].read(request, answer)
            except MalformedError as error:
                raise BrokerUnreachableError(f"{broker.name}: the messages can't be read: {error}") from error
        return sorted(messages, key=lambda message: message.store_timestamp_ms)[:max_messages]


def _topics_in(broker_name: str, body: Mapping[str, Any]) -> dict[str, QueueData]:
    return {topic: queue_data_of(broker_name, row) for topic, row in table_in(body, "topicConfigTable").items()}


def _group_rows_in(body: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return table_in(body, "subscriptionGroupTable")


def _redeliveries_in(body: Mapping[str, Any]) -> dict[str, int]:
    return {group: number_in(row, "retryMaxTimes") for group, row in _group_rows_in(body).items()}


def _connections_in(body: Mapping[str, Any]) -> tuple[int, list[tuple[str, int]]]:
    rows = body.get("connections") or []
    return number_in(body, "beginMs"), [(text_in(row, "host"), number_in(row, "beginMs")) for row in rows]
