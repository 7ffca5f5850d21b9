"""Clients as the server knows them: their connections, and the broker's requests to them.

Mirrors ``ClientHousekeepingService`` and ``Broker2Client``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final, NamedTuple, TypeVar, cast

from librmq.broker import Broker
from librmq.errors import BrokerUnreachableError, MalformedError, RmqError
from librmq.java.lang import java_int
from librmq.message import record
from librmq.message.ids import format_host
from librmq.message.properties import encode_properties
from librmq.message.topics import AUTO_CREATE_TOPIC
from librmq.protocol import (
    ChannelClosed,
    CheckTransaction,
    ClientRemoved,
    ConsumerOffsets,
    ConsumersChanged,
    DescribeInstance,
    Heartbeat,
    ReplyArrived,
    Request,
    ResetOffsets,
    SendMessage,
    Unregister,
)
from librmq.runtime.event_log import EventLog
from librmq.runtime.locks import Lock
from librmq.wire.remoting.bodies import heartbeat_of, queue_key, write_body
from librmq.wire.remoting.channels import Channel
from librmq.wire.remoting.frames import Frame, to_fields
from librmq.wire.remoting.headers import (
    CheckTransactionHeader,
    ConsumerGroupHeader,
    PushedReplyHeader,
    RequestCode,
    ResetOffsetHeader,
)

R = TypeVar("R")
_log = EventLog("librmq.wire")

_MOST_IDS: Final = 1_000
"""The client ids of one connection."""


class ClientChannel(NamedTuple):
    """One client, according to its last heartbeat."""

    client_id: str
    channel: Channel
    language: str
    version: int
    beat_ms: int

    @property
    def address(self) -> str:
        """The client's own address and port."""
        return f"{self.channel.peer[0]}:{self.channel.peer[1]}"


class _Client:
    """A client as the broker's endpoint. Called under the runner's lock, so it never waits."""

    def __init__(self, channel: Channel, store_host: str) -> None:
        self.channel = channel
        self._store_host = store_host

    def call(self, request: Request[R], /) -> R:
        match request:
            case ConsumersChanged(group):
                header: object = ConsumerGroupHeader(group)
                self._send(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, header)
            case CheckTransaction():
                self._check(request)
            case ResetOffsets(group, topic, offsets):
                table = {queue_key(queue): offset for queue, offset in offsets.items()}
                header = ResetOffsetHeader(topic, group, -1, True)
                self._send(RequestCode.RESET_CONSUMER_CLIENT_OFFSET, header, write_body({"offsetTable": table}))
            case ReplyArrived(send):
                self._push(send)
            case ConsumerOffsets():
                return cast(R, {})
            case ClientRemoved():
                self.channel.close()  # as in 4.9; the client registers again over a new connection
            case DescribeInstance():
                raise BrokerUnreachableError("a client of the wire can't be asked without waiting")
        return cast(R, None)

    def _push(self, send: SendMessage) -> None:
        message = send.message
        header = PushedReplyHeader(
            send.group,
            message.topic,
            AUTO_CREATE_TOPIC,
            send.default_queues,
            send.queue_id,
            send.sys_flag,
            send.born_timestamp_ms,
            message.flag,
            encode_properties(message.properties).decode(),
            born_host=format_host(send.born_host),
            store_host=self._store_host,
            store_timestamp=send.born_timestamp_ms,
        )
        self._send(RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT, header, message.body)

    def _send(self, code: RequestCode, header: object, body: bytes = b"") -> None:
        self.channel.send_one_way(Frame(code, to_fields(header), body))

    def _check(self, request: CheckTransaction) -> None:
        half = request.message
        header = CheckTransactionHeader(
            half.queue_offset,
            half.physical_offset,
            half.unique_key or "",
            request.transaction_id,
            half.offset_id,
        )
        topic = half.properties.get(record.PROPERTY_REAL_TOPIC, half.topic)
        queue_id = java_int(half.properties.get(record.PROPERTY_REAL_QUEUE_ID, "")) or 0
        real = replace(record.decode_record(half.raw), topic=topic, queue_id=queue_id)
        self._send(RequestCode.CHECK_TRANSACTION_STATE, header, record.encode_record(real))


class ClientChannels:
    """All clients of one server. Thread-safe."""

    def __init__(self, broker: Broker, changed: Callable[[str, str, bool], None]) -> None:
        """``changed(client_id, group, is_connected)`` is called as clients come and go; a producer's group is empty."""
        self._broker = broker
        self._changed = changed
        self._lock = Lock()
        self._by_id: dict[str, tuple[ClientChannel, _Client]] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def get(self, client_id: str) -> ClientChannel | None:
        """Return a client that has sent a heartbeat and not left."""
        entry = self._by_id.get(client_id)
        return None if entry is None else entry[0]

    def heartbeat(self, channel: Channel, frame: Frame) -> None:
        """Register a client with its groups."""
        client_id, producers, consumers = heartbeat_of(frame.body)
        if not client_id:
            return
        with self._lock:  # also during the broker's call, so that a connection ends either before or after it
            if client_id not in channel.client_ids and len(channel.client_ids) >= _MOST_IDS:
                raise MalformedError(f"a connection with more than {_MOST_IDS} client ids")
            entry = self._by_id.get(client_id)
            client = (
                entry[1]
                if entry is not None and entry[0].channel is channel
                else _Client(channel, self._broker.store.config.store_host)
            )
            channel.endpoint.call(Heartbeat(client_id, client, producers, consumers))
            session = ClientChannel(client_id, channel, frame.language, frame.version, self._broker.runner.now_ms())
            self._by_id[client_id] = session, client
            channel.client_ids.add(client_id)
        if entry is None:
            groups = [data.group for data in consumers]
            for group in groups or [""]:
                self._changed(client_id, group, True)

    def leave(self, channel: Channel, client_id: str, producer_group: str | None, consumer_group: str | None) -> None:
        """Remove a client from a group, unless it has another connection by now."""
        entry = self._by_id.get(client_id)
        if entry is not None and entry[0].channel is not channel:
            return
        channel.endpoint.call(Unregister(client_id, producer_group or None, consumer_group or None))

    def closed(self, channel: Channel) -> None:
        """Remove the clients of a connection that has ended, unless they have another one by now."""
        for client_id in list(channel.client_ids):
            with self._lock:
                entry = self._by_id.get(client_id)
                if entry is None or entry[0].channel is not channel:
                    continue
                del self._by_id[client_id]
                try:
                    channel.endpoint.call(ChannelClosed(client_id))
                except RmqError as error:  # the broker was closed earlier
                    _log.debug("client %(client)s left: %(error)s", client=client_id, error=error)
            self._changed(client_id, "", False)
