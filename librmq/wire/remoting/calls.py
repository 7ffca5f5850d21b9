"""What all requests share: how they are read, and how errors are answered."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

from librmq.errors import (
    BrokerError,
    BrokerUnreachableError,
    DiskFullError,
    MessageIllegalError,
    RmqError,
    StoreFullError,
)
from librmq.protocol import Request, ResponseCode
from librmq.runtime.event_log import EventLog
from librmq.wire.remoting.channels import Channel
from librmq.wire.remoting.codec import FORMS, Form
from librmq.wire.remoting.frames import Frame, answer_to, encode, encode_answer, from_fields, to_fields, to_text
from librmq.wire.remoting.headers import ERROR_FIELD, REQUESTS, RequestCode, RequestForm

R = TypeVar("R")
T = TypeVar("T")
_log = EventLog("librmq.wire")


class RemotingCall(NamedTuple):
    """One request."""

    channel: Channel
    frame: Frame
    header: Any
    """Of the class that `REQUESTS` names."""

    def call_broker(self, request: Request[R]) -> R:
        """Ask the broker for this client."""
        return self.channel.endpoint.call(request)

    def answer(self, header: object = None, *, body: bytes = b"", code: int = 0, remark: str | None = None) -> bytes:
        """Return the bytes of an answer.

        Raises:
            MalformedError: It does not fit into a frame.
        """
        if self.frame.is_binary:
            fields = {} if header is None else to_fields(header)
            return encode(answer_to(self.frame, code, remark, fields=fields, body=body))
        return encode_answer(self.frame, code, remark, "" if header is None else to_text(header), (body,))

    def serve(self, form: Form, ask: Callable[[Any], Any] | None = None) -> bytes:
        """Pass the request to the broker, by ``ask`` or for this client, and return the bytes of its answer."""
        request = form.parse(self.header, self.frame.body)
        reply = form.reply(request, (ask or self.call_broker)(request))
        return self.answer(reply.header, body=reply.body, code=reply.code, remark=reply.remark)

    def answer_with(self, header: object, records: Sequence[bytes], *, code: int, remark: str) -> bytes:
        """Return the bytes of an answer whose body has these records one after the other; as `answer` does."""
        if self.frame.is_binary:
            return self.answer(header, body=b"".join(records), code=code, remark=remark)
        return encode_answer(self.frame, code, remark, to_text(header), records)


Handler = Callable[[RemotingCall], "bytes | None"]
"""Returns the bytes of the answer; None if it comes later."""
Handlers = Mapping[RequestCode, Handler]
Answering = Mapping[int, tuple[Handler, RequestForm]]
"""The handler and the form of each request, by its code."""


def served(ask: Callable[[Any], Any] | None, *kinds: type[Request[Any]]) -> Handlers:
    """Return the handlers of requests that go to the broker as they are, by ``ask`` or for the client."""
    return {FORMS[kind].code: partial(RemotingCall.serve, form=FORMS[kind], ask=ask) for kind in kinds}


def answering(parts: Iterable[Handlers]) -> Answering:
    """Return the handlers of all parts, with the forms of their requests."""
    return {int(code): (handler, REQUESTS[code]) for part in parts for code, handler in part.items()}


def answer_of(handlers: Answering, channel: Channel, frame: Frame) -> bytes | None:
    """Return the bytes of the answer to a request; None if it comes later or if none is expected."""
    try:
        handler, form = handlers[frame.code]
    except KeyError:
        remark = f" request type {frame.code} not supported"
        return encode(answer_to(frame, ResponseCode.REQUEST_CODE_NOT_SUPPORTED, remark))
    try:
        header = from_fields(form.header, frame.fields, by_letters=form.by_letters)
        return handler(RemotingCall(channel, frame, header))
    except Exception as error:
        return refused(frame, error)


def tried(step: Callable[..., T], *arguments: object) -> T | Exception:
    """Return the result of a step, or its error."""
    try:
        return step(*arguments)
    except Exception as error:
        return error


def refused(frame: Frame, error: Exception, header: object = None, *, code: int | None = None) -> bytes:
    """Return the bytes of the answer to a failed request; ``code`` replaces the code of an error of librmq."""
    if isinstance(error, RmqError):
        fields = {} if header is None else to_fields(header)
        for kind in (DiskFullError, StoreFullError):
            if isinstance(error, kind):
                fields[ERROR_FIELD] = kind.__name__
        return encode(answer_to(frame, _code_of(error) if code is None else code, str(error), fields=fields))
    _log.error("the request %(code)s failed", code=frame.code, exc_info=error)
    return encode(answer_to(frame, ResponseCode.SYSTEM_ERROR, f"{type(error).__name__}: {error}"))


def _code_of(error: RmqError) -> int:
    if isinstance(error, BrokerError):
        return error.code
    if isinstance(error, MessageIllegalError):
        return ResponseCode.MESSAGE_ILLEGAL
    if isinstance(error, BrokerUnreachableError):
        return ResponseCode.SERVICE_NOT_AVAILABLE
    return ResponseCode.SYSTEM_ERROR
