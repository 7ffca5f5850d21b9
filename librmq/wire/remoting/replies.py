"""Replies: what a consumer answers to the sender of a request is pushed to that sender, and stored.

Mirrors ``ReplyMessageProcessor``.
"""

from __future__ import annotations

from typing import Final

from librmq.broker import Broker
from librmq.errors import BrokerUnreachableError, MalformedError, RmqError
from librmq.message.ids import format_host
from librmq.message.properties import (
    PROPERTY_PUSH_REPLY_TIME,
    PROPERTY_REPLY_TO_CLIENT,
    decode_properties,
    encode_properties,
)
from librmq.protocol import ResponseCode, SendBatch, SendReply
from librmq.wire.remoting.calls import Handlers, RemotingCall, refused
from librmq.wire.remoting.client_channels import ClientChannels
from librmq.wire.remoting.frames import Frame, to_fields
from librmq.wire.remoting.headers import PushedReplyHeader, RequestCode, SendHeader, SentHeader
from librmq.wire.remoting.producing import Producing

_PUSH_S: Final = 3.0


class Replies:
    """The replies of one server's clients. Thread-safe."""

    def __init__(self, broker: Broker, sessions: ClientChannels, producing: Producing) -> None:
        self._broker = broker
        self._sessions = sessions
        self._producing = producing
        self.handlers: Handlers = {
            RequestCode.SEND_REPLY_MESSAGE: self._reply,
            RequestCode.SEND_REPLY_MESSAGE_V2: self._reply,
        }

    def _reply(self, call: RemotingCall) -> None:
        """Push and store a reply, and answer later, so that the pushed client may be the same connection."""

        def reply() -> None:
            try:
                answer = self._answer(call)
            except RmqError as error:
                answer = refused(call.frame, error)
            if not call.frame.is_one_way:
                call.channel.write(answer)

        call.channel.run_later(reply)

    def _answer(self, call: RemotingCall) -> bytes:
        header: SendHeader = call.header
        client_id = decode_properties(header.properties).get(PROPERTY_REPLY_TO_CLIENT, "")
        if self._sessions.get(client_id) is None and client_id in self._broker.client_ids():  # in this process
            sent = self._producing.request(call)
            if isinstance(sent, SendBatch):
                raise MalformedError("a reply: expected one message, found a batch")
            return self._producing.answer(call, call.call_broker(SendReply(sent)))
        problem = self._push(call, header)
        code = 0 if problem is None else ResponseCode.SYSTEM_ERROR
        try:
            return self._producing.answer(call, call.call_broker(self._producing.request(call)), code, problem)
        except RmqError:  # as at a broker, the reply has arrived, and is only not kept
            return call.answer(SentHeader("0", max(header.queue_id, 0), 0), code=code, remark=problem)

    def _push(self, call: RemotingCall, header: SendHeader) -> str | None:
        """Push a reply to the client that waits for it; return what went wrong."""
        properties = decode_properties(header.properties)
        client_id = properties.get(PROPERTY_REPLY_TO_CLIENT)
        if client_id is None:
            return f"reply message properties[{PROPERTY_REPLY_TO_CLIENT}] is null"
        session = self._sessions.get(client_id)
        if session is None:
            return f"push reply message fail, channel of <{client_id}> not found."
        now_ms = self._broker.runner.now_ms()
        pushed = PushedReplyHeader(
            header.producer_group,
            header.topic,
            header.default_topic,
            header.default_topic_queue_nums,
            header.queue_id,
            header.sys_flag,
            header.born_timestamp,
            header.flag,
            encode_properties(properties | {PROPERTY_PUSH_REPLY_TIME: str(now_ms)}).decode(),
            header.reconsume_times,
            header.unit_mode,
            format_host(call.channel.peer),
            self._broker.store.config.store_host,
            now_ms,
        )
        frame = Frame(RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT, to_fields(pushed), call.frame.body)
        try:
            answer = session.channel.request(frame, _PUSH_S)
        except BrokerUnreachableError as error:
            return f"push reply message to {client_id} fail: {error}"
        return None if answer.code == 0 else f"push reply message to {client_id} fail: {answer.remark}"
