"""Replies, which the broker passes to the requesting client and stores. Mirrors ``ReplyMessageProcessor``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from librmq.broker.context import BrokerContext
from librmq.errors import BrokerError, RmqError
from librmq.message.message import Message
from librmq.message.properties import PROPERTY_PUSH_REPLY_TIME, PROPERTY_REPLY_TO_CLIENT
from librmq.protocol import ReplyArrived, ResponseCode, SendMessage, SendReply, SendResponse


class ReplyPushes:
    """The replies at one broker. Thread-safe."""

    def __init__(self, context: BrokerContext, send: Callable[[SendMessage], SendResponse]) -> None:
        """``send`` stores a message."""
        self._name = context.name
        self._runner = context.runner
        self._registry = context.registry
        self._send = send

    def reply(self, request: SendReply) -> SendResponse:
        """Push a reply, and store it.

        Raises:
            BrokerError: It could not be pushed; it is stored nevertheless.
        """
        problem = self._push(request.send)
        response = self._send(request.send)
        if problem is not None:
            raise BrokerError(ResponseCode.SYSTEM_ERROR, problem)
        return response

    def _push(self, send: SendMessage) -> str | None:
        """Push a reply to the client that waits for it; return what went wrong."""
        message = send.message
        client_id = message.properties.get(PROPERTY_REPLY_TO_CLIENT)
        with self._runner.lock:
            client = None if client_id is None else self._registry.endpoint(client_id)
        if client is None:
            return f"{self._name}: the client {client_id} of the request is not connected here"
        properties = message.properties | {PROPERTY_PUSH_REPLY_TIME: str(self._runner.now_ms())}
        pushed = Message._from_parts(message.topic, message.body, message.flag, properties)
        try:
            client.call(ReplyArrived(replace(send, message=pushed)))
        except RmqError as error:
            return f"{self._name}: the client {client_id} of the request could not be reached: {error}"
        return None
