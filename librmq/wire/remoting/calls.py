"""What all requests share: how they are read, and how errors are answered."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from librmq.errors import BrokerError, BrokerUnreachableError, MessageIllegalError, RmqError
from librmq.protocol import Request, ResponseCode
from librmq.wire.remoting.channels import Channel
from librmq.wire.remoting.codes import RequestCode
from librmq.wire.remoting.fields import from_fields, to_fields
from librmq.wire.remoting.frames import Frame, answer_to
from librmq.wire.remoting.headers import REQUESTS

__all__ = ["Handler", "Handlers", "RemotingCall", "answer_of", "refused"]

R = TypeVar("R")


class RemotingCall(NamedTuple):
    """One request."""

    channel: Channel
    frame: Frame
    header: Any
    """Of the class that `REQUESTS` names."""

    def ask(self, request: Request[R]) -> R:
        """Ask the broker for this client."""
        return self.channel.endpoint.call(request)

    def answer(self, header: object = None, *, body: bytes = b"", code: int = 0, remark: str | None = None) -> Frame:
        """Return an answer."""
        fields = {} if header is None else to_fields(header)
        return answer_to(self.frame, code, remark, fields=fields, body=body)


Handler = Callable[[RemotingCall], "Frame | None"]
"""Returns the answer; None if it comes later."""
Handlers = Mapping[RequestCode, Handler]


def answer_of(handlers: Handlers, channel: Channel, frame: Frame) -> Frame | None:
    """Return the answer to a request; None if it comes later or if none is expected."""
    try:
        code = RequestCode(frame.code)
        handler = handlers[code]
    except (ValueError, KeyError):
        remark = f" request type {frame.code} not supported"
        return answer_to(frame, ResponseCode.REQUEST_CODE_NOT_SUPPORTED, remark)
    form = REQUESTS[code]
    try:
        header = from_fields(form.header, frame.fields, by_letters=form.by_letters)
        return handler(RemotingCall(channel, frame, header))
    except RmqError as error:
        return refused(frame, error)


def refused(frame: Frame, error: RmqError) -> Frame:
    """Return the answer to a failed request."""
    return answer_to(frame, _code_of(error), str(error))


def _code_of(error: RmqError) -> int:
    if isinstance(error, BrokerError):
        return error.code
    if isinstance(error, MessageIllegalError):
        return ResponseCode.MESSAGE_ILLEGAL
    if isinstance(error, BrokerUnreachableError):
        return ResponseCode.SERVICE_NOT_AVAILABLE
    return ResponseCode.SYSTEM_ERROR
