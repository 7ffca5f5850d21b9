"""What a broker asks of its clients: frames to requests of `librmq.protocol`, and results to answers.

Also the heartbeats of clients that share an id. Mirrors ``ClientRemotingProcessor``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any, Final, TypeVar

from librmq.errors import ClientStateError, MalformedError, RmqError
from librmq.message import Message, MessageQueue, StoredMessage
from librmq.message.ids import parse_host
from librmq.message.properties import PropertyName, decode_properties
from librmq.protocol import (
    LOCAL_HOST,
    CheckTransaction,
    ConsumeDirectly,
    ConsumerOffsets,
    ConsumersChanged,
    DescribeInstance,
    DirectlyConsumed,
    Heartbeat,
    ReplyArrived,
    Request,
    ResetGroup,
    ResetOffsets,
    ResponseCode,
    SaveProgress,
    SendMessage,
    Unregister,
)
from librmq.runtime.event_log import EventLog
from librmq.runtime.locks import Lock
from librmq.wire.remote._connection import Transport
from librmq.wire.remoting._bodies import (
    messages_of,
    offsets_of,
    queue_key,
    read_body,
    unwrapped,
    write_body,
)
from librmq.wire.remoting._frames import Frame, answer_to
from librmq.wire.remoting._headers import (
    REQUESTS,
    CheckTransactionHeader,
    ClientOfGroupHeader,
    ClientStatusHeader,
    PushedReplyHeader,
    RequestCode,
)
from librmq.wire.remoting._running_info import running_info_body

R = TypeVar("R")
_log = EventLog("librmq.wire")
_MOST_WAITING: Final = 256 << 20  # bytes of a broker's requests
_REQUEST_SIZE: Final = 1 << 10  # without its body

_Send = Callable[[Frame], None]


@dataclass(eq=False, repr=False)
class ClientRequests:
    """Answers one broker's requests to the clients of a route. Thread-safe."""

    broker_name: str
    client: Callable[[str], Heartbeat | None]
    """Returns the last heartbeat of a client; None if it has left."""
    notify_receive: Callable[[int], None]
    """Lets the receive with this number ask again."""
    later: Callable[[Callable[[], None]], None]
    """Runs a function under the runner's lock, soon."""
    name_servers: tuple[str, ...]
    """Addresses, which a client's description names."""

    def __post_init__(self) -> None:
        self._lock = Lock()
        self._waiting = 0
        self._answers: dict[int, Callable[[Heartbeat, Any, Frame, _Send], None]] = {
            RequestCode.NOTIFY_CONSUMER_IDS_CHANGED: self._consumers_changed,
            RequestCode.CHECK_TRANSACTION_STATE: self._check_transaction,
            RequestCode.RESET_CONSUMER_CLIENT_OFFSET: self._reset,
            RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT: self._report_progress,
            RequestCode.GET_CONSUMER_RUNNING_INFO: self._describe,
            RequestCode.CONSUME_MESSAGE_DIRECTLY: self._consume,
            RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT: self._reply,
            RequestCode.NOTIFY_RECEIVE: lambda beat, header, frame, send: self.notify_receive(header.hold),
        }

    def requested(self, client_id: str, transport: Transport, frame: Frame) -> None:
        """Pass a request to the client whose connection it is; close one with too many of them."""
        size = _REQUEST_SIZE + len(frame.body)
        with self._lock:
            is_too_much = self._waiting + size > _MOST_WAITING
            self._waiting += 0 if is_too_much else size
        if is_too_much:
            transport.close()
            return

        def answer() -> None:
            with self._lock:
                self._waiting -= size
            self._answer_frame(client_id, frame, transport.send_answer)

        self.later(answer)

    def _answer_frame(self, client_id: str, frame: Frame, send: _Send) -> None:
        if frame.is_one_way:
            send = _nothing
        beat, answer = self.client(client_id), self._answers.get(frame.code)
        if beat is None or answer is None:
            remark = f"request type {frame.code} not supported"
            send(answer_to(frame, ResponseCode.REQUEST_CODE_NOT_SUPPORTED, remark))
            return
        try:
            answer(beat, REQUESTS[RequestCode(frame.code)].read(frame.fields), frame, send)
        except RmqError as error:
            _log.debug(
                "%(client)s: request %(code)d of %(broker)s: %(error)s",
                client=client_id,
                code=frame.code,
                broker=self.broker_name,
                error=error,
            )
            send(answer_to(frame, ResponseCode.SYSTEM_ERROR, str(error)))

    # ---- answers

    def _consumers_changed(self, beat: Heartbeat, request: ConsumersChanged, frame: Frame, send: _Send) -> None:
        beat.client.call(request)
        send(answer_to(frame))

    def _check_transaction(self, beat: Heartbeat, header: CheckTransactionHeader, frame: Frame, send: _Send) -> None:
        half = _message_of(frame, "a check of a transaction")
        group = half.properties.get(PropertyName.PRODUCER_GROUP, "")
        beat.client.call(CheckTransaction(group, half, header.transaction_id or half.message_id, self.broker_name))
        send(answer_to(frame))

    def _reset(self, beat: Heartbeat, reset: ResetGroup, frame: Frame, send: _Send) -> None:
        table = read_body(frame.body, "a reset").get("offsetTable") or {}
        offsets = {queue: offset for queue, offset in offsets_of(table).items() if queue.topic == reset.topic}
        beat.client.call(ResetOffsets(reset.group, reset.topic, offsets))
        send(answer_to(frame))

    def _report_progress(self, beat: Heartbeat, header: ClientStatusHeader, frame: Frame, send: _Send) -> None:
        try:
            progress: Mapping[MessageQueue, int] = beat.client.call(ConsumerOffsets(header.group, header.topic))
        except ClientStateError:  # it does not consume in the group, and has no progress
            progress = {}
        table = {queue_key(queue): offset for queue, offset in sorted(progress.items())}
        send(answer_to(frame, body=write_body({"consumerTable": {}, "messageQueueTable": table})))

    def _describe(self, beat: Heartbeat, header: ClientOfGroupHeader, frame: Frame, send: _Send) -> None:
        state = beat.client.call(DescribeInstance(header.consumer_group))
        subscriptions = {data.group: data.subscriptions for data in beat.consumers}.get(state.group, {})
        body = running_info_body(state, subscriptions, self.name_servers, header.jstack_enable)
        send(answer_to(frame, body=body))

    def _consume(self, beat: Heartbeat, header: ClientOfGroupHeader, frame: Frame, send: _Send) -> None:
        message = _message_of(frame, "a message to consume")

        def ended(consumed: DirectlyConsumed) -> None:
            row: dict[str, object] = {
                "autoCommit": True,
                "consumeResult": consumed.result.value,
                "order": consumed.is_orderly,
                "spentTimeMills": consumed.took_ms,
            }
            if consumed.remark is not None:
                row["remark"] = consumed.remark
            self.later(partial(send, answer_to(frame, body=write_body(row))))

        name = header.broker_name or self.broker_name
        beat.client.call(ConsumeDirectly(header.consumer_group, message, name, ended))

    def _reply(self, beat: Heartbeat, header: PushedReplyHeader, frame: Frame, send: _Send) -> None:
        reply = Message.from_parts(header.topic, frame.body, header.flag, decode_properties(header.properties))
        sent = SendMessage(
            header.producer_group,
            reply,
            header.queue_id,
            header.born_timestamp,
            parse_host(header.born_host) if header.born_host else LOCAL_HOST,
            header.sys_flag,
        )
        beat.client.call(ReplyArrived(sent))
        send(answer_to(frame))


def _nothing(frame: Frame) -> None:
    """Send no answer, because the broker waits for none."""


def _message_of(frame: Frame, what: str) -> StoredMessage:
    messages = [message for stored in messages_of(frame.body) for message in unwrapped(stored)]
    if len(messages) != 1:
        raise MalformedError(f"{what}: expected one message, found {len(messages)}")
    return messages[0]


# ---- heartbeats of clients that share an id

# A connection belongs to an id, and a broker takes the last heartbeat of a connection for all that its client does. So
# clients of one id, such as the producer and the consumer of one ``instance_name``, send theirs as one, as Java's
# `MQClientInstance` does for the producers and consumers of its process.

_OF_CONSUMERS = ConsumersChanged | ResetOffsets | ConsumerOffsets | SaveProgress | DescribeInstance | ConsumeDirectly


class _ClientsOfOneId:
    """Passes a request on to the client of its group; one without a group goes to all."""

    def __init__(self, heartbeats: Iterable[Heartbeat]) -> None:
        self.heartbeats = tuple(heartbeats)

    def call(self, request: Request[R], /) -> R:
        answers = [beat.client.call(request) for beat in self.heartbeats if _is_for(request, beat)]
        if not answers:
            raise ClientStateError(f"{self.heartbeats[0].client_id} is in no group that {request} names")
        return answers[-1]


def join(before: Heartbeat | None, heartbeat: Heartbeat) -> Heartbeat:
    """Return what an id stands for after a heartbeat, which takes its groups over from other clients of the id."""
    others = [] if before is None else [part for part in _parts(before) if part.client is not heartbeat.client]
    for group in heartbeat.producer_groups:
        others = [left for part in others if (left := leave(part, Unregister(part.client_id, group)))]
    for data in heartbeat.consumers:
        leaving = Unregister(heartbeat.client_id, consumer_group=data.group)
        others = [left for part in others if (left := leave(part, leaving))]
    return _joined([*others, *_parts(heartbeat)])


def leave(heartbeat: Heartbeat, request: Unregister) -> Heartbeat | None:
    """Return a heartbeat without the group that its client leaves; None if it has no other."""
    left = []
    for part in _parts(heartbeat):
        producers = part.producer_groups - {request.producer_group}
        consumers = tuple(data for data in part.consumers if data.group != request.consumer_group)
        if producers or consumers:
            left.append(replace(part, producer_groups=producers, consumers=consumers))
    return _joined(left) if left else None


def _parts(heartbeat: Heartbeat) -> tuple[Heartbeat, ...]:
    client = heartbeat.client
    return client.heartbeats if isinstance(client, _ClientsOfOneId) else (heartbeat,)


def _joined(parts: list[Heartbeat]) -> Heartbeat:
    if len(parts) == 1:
        return parts[0]
    checking = [part.checking_groups for part in parts if part.checking_groups is not None]
    return Heartbeat(
        parts[0].client_id,
        _ClientsOfOneId(parts),
        frozenset[str]().union(*(part.producer_groups for part in parts)),
        tuple(data for part in parts for data in part.consumers),
        reduce(frozenset.union, checking) if checking else None,
    )


def _is_for(request: Request[Any], heartbeat: Heartbeat) -> bool:
    if isinstance(request, CheckTransaction):
        return request.group in heartbeat.producer_groups
    if isinstance(request, _OF_CONSUMERS):
        return any(data.group == request.group for data in heartbeat.consumers)
    return True
