"""Requests of a producer, and the replies to them.

::

    requester ── message ──> topic ──> consumer of the topic
        ^                                    │ Producer.reply
        └── the broker pushes <── reply topic of the cluster

A reply belongs to its request by the correlation id. It reaches the requester through a broker to which the requester
sends heartbeats. Mirrors ``DefaultMQProducerImpl.request`` and ``MessageUtil``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from librmq.client.client import Client
from librmq.client.sender import SendResult
from librmq.clock import moves_by_itself
from librmq.errors import BrokerError, BrokerUnreachableError, MessageIllegalError, SendTimeoutError
from librmq.message import Message, MessageQueue, StoredMessage, record
from librmq.message.properties import PropertyName
from librmq.message.topics import reply_topic
from librmq.protocol import ReplyArrived, ResponseCode, SendMessage, SendReply
from librmq.runtime.locks import Event

_REPLY: Final = "reply"
_STEP_S: Final = 0.1
"""Time that passes at once on a clock that stands still."""
_MOST_BODY: Final = 64 << 20


def send_request(
    client: Client, message: Message, timeout_s: float, send: Callable[[Message, float], object]
) -> Message:
    """Send a message as a request by ``send(message, seconds)``, and wait for its reply."""
    clock, runner = client.runner.clock, client.runner
    deadline = clock.monotonic() + timeout_s
    correlation_id = client.unique_ids.next()
    message.properties[PropertyName.CORRELATION_ID] = correlation_id
    message.properties[PropertyName.REPLY_TO_CLIENT] = client.client_id
    message.properties[PropertyName.TTL] = str(round(1000 * timeout_s))
    arrived, replies = Event(), list[ReplyArrived]()

    def waiting(reply: ReplyArrived) -> None:
        replies.append(reply)
        arrived.set()

    client.replies[correlation_id] = waiting
    try:
        send(message, timeout_s)
        while not arrived.is_set() and (left := deadline - clock.monotonic()) > 0:
            if moves_by_itself(clock):
                clock.wait(arrived, left)
            else:
                runner.pass_time(min(_STEP_S, left))
    finally:
        client.replies.pop(correlation_id, None)
    if not replies:
        raise SendTimeoutError(
            f"topic {message.topic!r}: no reply to the request {correlation_id} came within {timeout_s:g} s; "
            "the request is stored, so a consumer may still handle it"
        )
    sent = replies[0].send
    body = record.decompress_body(sent.message.body, sent.sys_flag, _MOST_BODY)
    return Message.from_parts(sent.message.topic, body, sent.message.flag, dict(sent.message.properties))


def reply_properties(request: StoredMessage) -> tuple[str, dict[str, str]]:
    names = (PropertyName.CORRELATION_ID, PropertyName.REPLY_TO_CLIENT, PropertyName.TTL)
    request_properties = request.properties
    for name in (*names, PropertyName.CLUSTER):
        if name not in request_properties:
            raise MessageIllegalError(
                f"message {request.message_id} is no request, because it has no property {name}: "
                "reply only to what Producer.request has sent"
            )
    properties = {name: request_properties[name] for name in names} | {PropertyName.MESSAGE_TYPE: _REPLY}
    return reply_topic(request_properties[PropertyName.CLUSTER]), properties


def reply(client: Client, group: str, message: Message, first_broker: str | None, timeout_ms: float) -> SendResult:
    """Send a reply over the broker that has the request, and over others if the requester is not connected there.

    Raises:
        BrokerError: The requester is connected to no broker; the reply is stored.
        BrokerUnreachableError: No broker can be reached.
    """
    route, runner = client.route, client.runner
    names = sorted(route.broker_names(), key=lambda name: (name != first_broker, name))
    begin_ms = runner.now_ms()
    failure: BrokerError | BrokerUnreachableError = BrokerUnreachableError(
        f"topic {message.topic!r}: the route has no broker, so the reply was not sent"
    )
    for name in names:
        now_ms = runner.now_ms()
        left_ms = begin_ms + timeout_ms - now_ms
        if left_ms < 0:
            break
        runner.point(f"reply {message.topic}")
        send = SendMessage(group, message, 0, now_ms, client.host, timeout_ms=left_ms)
        try:
            response = route.endpoint(name).call(SendReply(send))
        except BrokerUnreachableError as error:
            failure = error
        except BrokerError as error:
            if error.code != ResponseCode.SYSTEM_ERROR:
                raise
            failure = error
        else:
            queue = MessageQueue(message.topic, name, response.queue_id)
            unique_id, offset_id = message.properties[PropertyName.UNIQUE_KEY], response.offset_ids[0]
            return SendResult(response.status, unique_id, offset_id, queue, response.queue_offset)
    raise failure
