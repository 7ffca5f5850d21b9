"""Requests of producers, and replies.

Mirrors ``SendMessageProcessor``, ``EndTransactionProcessor`` and ``ReplyMessageProcessor``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Final

from librmq.broker import Broker
from librmq.clock import SystemClock, moves_by_itself
from librmq.errors import BrokerBusyError, BrokerUnreachableError, MalformedError, MessageIllegalError, RmqError
from librmq.java.lang import java_long
from librmq.message import Message, record
from librmq.message.batch import decode_batch
from librmq.message.ids import RecallHandle
from librmq.message.message import check_batch_size
from librmq.message.properties import PropertyName, decode_properties, encode_properties, is_half
from librmq.message.topics import NOT_FOR_SENDING, validate_client_topic
from librmq.protocol import (
    EndTransaction,
    ResponseCode,
    SendBatch,
    SendMessage,
    SendReply,
    SendResponse,
    SendTogether,
)
from librmq.runtime.locks import Lock
from librmq.wire.remoting._channels import Channel, ClientChannels, Handlers, RemotingCall, refused, served, tried
from librmq.wire.remoting._frames import Frame
from librmq.wire.remoting._headers import (
    REQUESTS,
    RefusedSendHeader,
    RequestCode,
    SendHeader,
    SentHeader,
)
from librmq.wire.remoting._request_codec import pushed_reply, sent_reply
from librmq.wire.remoting._running_info import Rates


def _shift_delivery(properties: dict[str, str], born_ms: int, now_ms: int) -> None:
    """Move a message's time of delivery from the client's clock to the broker's, which a test moves by hand.

    The client has computed it by the machine's clock, which showed ``born_ms``, unless that is 0.
    """
    deliver_ms = java_long(properties.get(PropertyName.TIMER_DELIVER_MS, ""))
    if deliver_ms is not None:  # text that is not a time needs no shift to the test's clock
        client_ms = born_ms or SystemClock().now_ms()
        properties[PropertyName.TIMER_DELIVER_MS] = str(max(deliver_ms - client_ms + now_ms, 0))


_SEND_BATCH: Final = int(RequestCode.SEND_BATCH_MESSAGE)
_OF_BROKERS: Final = record.INNER_BATCH | record.NEED_UNWRAP
"""Bits that a broker of 5.x sets for a batch that it keeps as one record; 4.9 knows none of them."""
SENDS: Final = frozenset({int(RequestCode.SEND_MESSAGE), int(RequestCode.SEND_MESSAGE_V2), _SEND_BATCH})
"""The codes of requests that `Sends.send_all` answers."""
_NONE: Final = (0, 0, 0)
_LARGE_BATCH: Final = 256 << 10
"""Bytes from which on batches are read one at a time."""


class Sends:
    """The sends of one server's clients. Thread-safe."""

    def __init__(self, broker: Broker, rates: Rates) -> None:
        self._broker = broker
        self._rates = rates
        self._now_ms = broker.runner.now_ms
        self._is_real_time = moves_by_itself(broker.runner.clock)
        self._batch_lock = Lock()  # a large batch takes fifty times its bytes in memory
        self.handlers: Handlers = served(None, EndTransaction)

    def send_all(self, channel: Channel, frames: Sequence[Frame]) -> list[tuple[Frame, bytes]]:
        """Store messages that came together; return the frames with their answers.

        Each step is taken for all of them before the next one, so that its code and data stay in the processor's cache:
        that saves a third of the time.
        """
        read = self._read_send
        with self._batch_lock if any(map(_is_large_batch, frames)) else nullcontext():
            requests = [tried(read, channel, frame) for frame in frames]
            begin_ms = self._now_ms()
            stored = self._store(channel, requests)
        answers: list[tuple[Frame, bytes]] = []
        counts: dict[str, tuple[int, int, int]] = {}
        for frame, request, response in zip(frames, requests, stored, strict=True):
            if isinstance(request, Exception):
                has_no_topic = frame.code != RequestCode.SEND_MESSAGE and not frame.fields.get("b")
                is_refused_send = has_no_topic or isinstance(request, MessageIllegalError)
                answers.append(
                    (frame, refused(channel, frame, request, RefusedSendHeader() if is_refused_send else None))
                )
                continue
            topic = request.messages[0].topic if isinstance(request, SendBatch) else request.message.topic
            if isinstance(response, Exception):
                answers.append((frame, _refused(channel, frame, response, topic)))
                continue
            response = self._with_handle(request, response)
            answers.append((frame, _answer(RemotingCall(channel, frame, None), response)))
            calls, messages, size = counts.get(topic, _NONE)
            counts[topic] = calls + 1, messages + len(response.offset_ids), size + len(frame.body)
        now_ms = self._now_ms()
        self._rates.took("put", now_ms - begin_ms)
        for topic, (calls, messages, size) in counts.items():
            self._rates.count("put", topic, now_ms, messages, size, calls)
        failed = sum(isinstance(response, Exception) for response in stored)
        if failed:
            self._rates.count("failed", "", now_ms, failed, 0, failed)
        return answers

    def _with_handle(self, request: SendMessage | SendBatch, response: SendResponse) -> SendResponse:
        """Add what recalls a message with a delivery time to the answer to its send."""
        if not isinstance(request, SendMessage) or PropertyName.TIMER_DELIVER_MS not in request.message.properties:
            return response
        properties, topic = request.message.properties, request.message.topic
        deliver_ms, message_id = properties[PropertyName.TIMER_DELIVER_MS], properties.get(PropertyName.UNIQUE_KEY, "")
        if not deliver_ms.isdecimal() or not message_id:
            return response
        return response._replace(
            recall_handle=RecallHandle(topic, self._broker.name, int(deliver_ms), message_id).text()
        )

    def _read_send(self, channel: Channel, frame: Frame) -> SendMessage | SendBatch:
        header = REQUESTS[RequestCode(frame.code)].read(frame.fields)
        return self.read_request(RemotingCall(channel, frame, header))

    def _store(
        self, channel: Channel, requests: Sequence[SendMessage | SendBatch | Exception]
    ) -> list[SendResponse | Exception]:
        """Store messages in their order, and single ones next to each other together; errors stay as they are."""
        store = channel.endpoint.call
        is_own = channel.endpoint is self._broker  # another endpoint watches each message
        stored: list[SendResponse | Exception] = []
        while left := requests[len(stored) :]:
            request = left[0]
            if is_own and isinstance(request, SendMessage) and len(left) > 1:
                together = tried(store, SendTogether(_messages(left)))
                stored += [together] if isinstance(together, Exception) else together
            else:
                stored.append(request if isinstance(request, Exception) else tried(store, request))
        return stored

    def read_request(self, call: RemotingCall) -> SendMessage | SendBatch:
        """Return what a frame asks the broker for."""
        header: SendHeader = call.header
        frame, peer = call.frame, call.channel.peer
        born_ms, properties = header.born_timestamp, decode_properties(header.properties)
        if not self._is_real_time:
            now_ms = self._now_ms()
            _shift_delivery(properties, born_ms, now_ms)
            born_ms = now_ms
        if not header.batch and frame.code != _SEND_BATCH:
            if header.sys_flag & record.UNQUEUED and not is_half(properties):
                raise MessageIllegalError(
                    f"topic {header.topic!r}: sys flag {header.sys_flag:#x} claims a half message: expected the "
                    f"property {PropertyName.TRANSACTION_PREPARED}, without which it is never delivered"
                )
            return SendMessage(
                group=header.producer_group,
                message=Message.from_parts(header.topic, frame.body, header.flag, properties),
                queue_id=header.queue_id,
                born_timestamp_ms=born_ms,
                born_host=peer,
                sys_flag=header.sys_flag & ~_OF_BROKERS,
                default_queues=header.default_topic_queue_nums,
                reconsume_times=header.reconsume_times,
                max_reconsume_times=header.max_reconsume_times,
                default_topic=header.default_topic,
            )
        check_batch_size(len(frame.body), self._broker.store.config.max_message_size)
        try:
            items = decode_batch(frame.body)
        except MessageIllegalError as error:
            raise MalformedError(str(error)) from None
        if not items:
            raise MalformedError(f"topic {header.topic!r}: expected at least one message in a batch")
        messages = tuple(
            Message.from_parts(header.topic, item.body, item.flag, properties | decode_properties(item.properties_raw))
            for item in items
        )
        return SendBatch(
            header.producer_group,
            messages,
            header.queue_id,
            born_ms,
            peer,
            header.default_topic_queue_nums,
            default_topic=header.default_topic,
        )

    def answer_send(
        self, call: RemotingCall, response: SendResponse, code: int = 0, remark: str | None = None
    ) -> bytes:
        """Return the frame of the broker's answer; ``code`` and ``remark`` are what went wrong besides."""
        self._rates.count("put", call.header.topic, self._now_ms(), len(response.offset_ids), len(call.frame.body))
        return _answer(call, response, code, remark)


def _is_large_batch(frame: Frame) -> bool:
    fields = frame.fields
    is_batch = frame.code == _SEND_BATCH or "true" in (fields.get("m"), fields.get("batch"))
    return is_batch and len(frame.body) > _LARGE_BATCH


def _messages(requests: Iterable[object]) -> list[SendMessage]:
    """Return the requests up to the first that has other than one message."""
    messages = []
    for request in requests:
        if not isinstance(request, SendMessage):
            break
        messages.append(request)
    return messages


def _refused(channel: Channel, frame: Frame, error: Exception, topic: str) -> bytes:
    if isinstance(error, BrokerBusyError):
        return refused(channel, frame, error)
    code = _code_of_topic(topic) if isinstance(error, MessageIllegalError) else None
    return refused(channel, frame, error, RefusedSendHeader(), code=code)


def _code_of_topic(topic: str) -> ResponseCode | None:
    """Return the code that 4.9 has for a topic that takes no sends; None if the topic is valid."""
    if topic in NOT_FOR_SENDING:
        return ResponseCode.NO_PERMISSION
    try:
        validate_client_topic(topic)
    except MessageIllegalError:
        return ResponseCode.SYSTEM_ERROR
    return None


def _answer(call: RemotingCall, response: SendResponse, code: int = 0, remark: str | None = None) -> bytes:
    reply = sent_reply(response, code, remark)
    return call.answer(reply.header, code=reply.code, remark=reply.remark)


# ---- replies, which are pushed to the sender of the request, and stored

_PUSH_S: Final = 3.0


class Replies:
    """The replies of one server's clients. Thread-safe."""

    def __init__(self, broker: Broker, sessions: ClientChannels, sends: Sends) -> None:
        self._broker = broker
        self._sessions = sessions
        self._sends = sends
        self.handlers: Handlers = {
            RequestCode.SEND_REPLY_MESSAGE: self._reply,
            RequestCode.SEND_REPLY_MESSAGE_V2: self._reply,
        }

    def _reply(self, call: RemotingCall) -> None:
        """Push and store a reply, and answer later, so that the pushed client may be the same connection."""

        def reply() -> None:
            try:
                answer = self._answer_reply(call)
            except RmqError as error:
                answer = refused(call.channel, call.frame, error)
            call.write_later(answer)

        call.channel.run_later(reply)

    def _answer_reply(self, call: RemotingCall) -> bytes:
        header: SendHeader = call.header
        client_id = decode_properties(header.properties).get(PropertyName.REPLY_TO_CLIENT, "")
        is_elsewhere = self._sessions.by_id.get(client_id) is None
        if is_elsewhere and any(client.client_id == client_id for client in self._broker.clients()):  # in this process
            sent = self._sends.read_request(call)
            if isinstance(sent, SendBatch):
                raise MalformedError("a reply: expected one message, found a batch")
            return self._sends.answer_send(call, call.call_broker(SendReply(sent)))
        problem = self._push(call, header)
        code = 0 if problem is None else ResponseCode.SYSTEM_ERROR
        try:
            return self._sends.answer_send(call, call.call_broker(self._sends.read_request(call)), code, problem)
        except RmqError:  # as at a broker, the reply has arrived, and is only not kept
            return call.answer(SentHeader("0", max(header.queue_id, 0), 0), code=code, remark=problem)

    def _push(self, call: RemotingCall, header: SendHeader) -> str | None:
        """Push a reply to the client that waits for it; return what went wrong."""
        properties = decode_properties(header.properties)
        client_id = properties.get(PropertyName.REPLY_TO_CLIENT)
        if client_id is None:
            return f"reply message properties[{PropertyName.REPLY_TO_CLIENT}] is null"
        session = self._sessions.by_id.get(client_id)
        if session is None:
            return f"push reply message fail, channel of <{client_id}> not found."
        now_ms = self._broker.runner.now_ms()
        text = encode_properties(properties | {PropertyName.PUSH_REPLY_TIME: str(now_ms)}).decode()
        store_host = self._broker.store.config.store_host
        frame = pushed_reply(replace(header, properties=text), call.frame.body, call.channel.peer, store_host, now_ms)
        try:
            answer = session.channel.request(frame, _PUSH_S)
        except BrokerUnreachableError as error:
            return f"push reply message to {client_id} fail: {error}"
        return None if answer.code == 0 else f"push reply message to {client_id} fail: {answer.remark}"
