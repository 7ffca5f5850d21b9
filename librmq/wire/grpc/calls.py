"""What all calls of the service share: the caller's id, errors as status codes, and bounds."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Protocol

from librmq.errors import (
    BrokerBusyError,
    BrokerError,
    FilterSyntaxError,
    MessageIllegalError,
    NoRouteError,
    ReceiptError,
    RmqError,
)
from librmq.protocol import Endpoint, ResponseCode, SendStatus
from librmq.runtime.event_log import EventLog
from librmq.runtime.locks import Lock
from librmq.wire.grpc.schema import message_class

# ---- status codes


class Code(enum.IntEnum):
    """A status code, as the service numbers them."""

    OK = 20000
    MULTIPLE_RESULTS = 30000
    BAD_REQUEST = 40000
    ILLEGAL_TOPIC = 40002
    ILLEGAL_CONSUMER_GROUP = 40003
    ILLEGAL_MESSAGE_TAG = 40004
    ILLEGAL_MESSAGE_KEY = 40005
    ILLEGAL_MESSAGE_GROUP = 40006
    ILLEGAL_MESSAGE_PROPERTY_KEY = 40007
    INVALID_TRANSACTION_ID = 40008
    ILLEGAL_MESSAGE_ID = 40009
    ILLEGAL_FILTER_EXPRESSION = 40010
    ILLEGAL_INVISIBLE_TIME = 40011
    ILLEGAL_DELIVERY_TIME = 40012
    INVALID_RECEIPT_HANDLE = 40013
    MESSAGE_PROPERTY_CONFLICT_WITH_TYPE = 40014
    UNRECOGNIZED_CLIENT_TYPE = 40015
    MESSAGE_CORRUPTED = 40016
    CLIENT_ID_REQUIRED = 40017
    ILLEGAL_POLLING_TIME = 40018
    FORBIDDEN = 40300
    MESSAGE_NOT_FOUND = 40401
    TOPIC_NOT_FOUND = 40402
    CONSUMER_GROUP_NOT_FOUND = 40403
    MESSAGE_BODY_TOO_LARGE = 41301
    MESSAGE_BODY_EMPTY = 41302
    TOO_MANY_REQUESTS = 42900
    MESSAGE_PROPERTIES_TOO_LARGE = 43101
    INTERNAL_SERVER_ERROR = 50001
    HA_NOT_AVAILABLE = 50002
    NOT_IMPLEMENTED = 50100
    MASTER_PERSISTENCE_TIMEOUT = 50401
    SLAVE_PERSISTENCE_TIMEOUT = 50402


SEND_CODES: Final = {
    SendStatus.SEND_OK: Code.OK,
    SendStatus.FLUSH_DISK_TIMEOUT: Code.MASTER_PERSISTENCE_TIMEOUT,
    SendStatus.FLUSH_SLAVE_TIMEOUT: Code.SLAVE_PERSISTENCE_TIMEOUT,
    SendStatus.SLAVE_NOT_AVAILABLE: Code.HA_NOT_AVAILABLE,
}
_BY_RESPONSE: Final = {
    ResponseCode.NO_PERMISSION: Code.FORBIDDEN,
    ResponseCode.TOPIC_NOT_EXIST: Code.TOPIC_NOT_FOUND,
    ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST: Code.CONSUMER_GROUP_NOT_FOUND,
    ResponseCode.SUBSCRIPTION_PARSE_FAILED: Code.ILLEGAL_FILTER_EXPRESSION,
    ResponseCode.SYSTEM_BUSY: Code.TOO_MANY_REQUESTS,
    ResponseCode.REQUEST_CODE_NOT_SUPPORTED: Code.NOT_IMPLEMENTED,
}


class Refusal(RmqError):
    """A request that the service refuses, with the code for its client."""

    def __init__(self, code: Code, remark: str) -> None:
        super().__init__(remark)
        self.code = code


def code_of(error: RmqError) -> Code:
    """Return the code for an error of librmq."""
    if isinstance(error, Refusal):
        return error.code
    if isinstance(error, ReceiptError):
        return Code.INVALID_RECEIPT_HANDLE
    if isinstance(error, BrokerBusyError):
        return Code.TOO_MANY_REQUESTS
    if isinstance(error, FilterSyntaxError):
        return Code.ILLEGAL_FILTER_EXPRESSION
    if isinstance(error, NoRouteError):
        return Code.TOPIC_NOT_FOUND
    if isinstance(error, MessageIllegalError):
        return Code.BAD_REQUEST
    if isinstance(error, BrokerError):
        return _BY_RESPONSE.get(ResponseCode(error.code), Code.INTERNAL_SERVER_ERROR)
    return Code.INTERNAL_SERVER_ERROR


_log = EventLog("librmq.wire")


Endpoints = Callable[[str], Endpoint]
"""The object that answers a client's requests, by the client's id."""


class Context(Protocol):
    """The part of a gRPC call that the service uses."""

    def invocation_metadata(self) -> Any:  # noqa: ANN401
        """Return the headers, as pairs."""
        ...

    def peer(self) -> str:
        """Return the client's end of the connection, such as ``ipv4:10.0.0.7:51234``."""
        ...

    def time_remaining(self) -> float | None:
        """Return the seconds until the client's deadline; None if it has none."""
        ...

    def is_active(self) -> bool:
        """Return whether the client still waits for the answer."""
        ...

    def add_callback(self, callback: Callable[[], None]) -> bool:
        """Register a function to call when the call ends."""
        ...


def answers(name: str) -> Callable[[Any], Any]:
    """Make a method report its errors as a status, in the response type with that name."""
    response_type = message_class(name)

    def decorate(method: Any) -> Any:  # noqa: ANN401
        def call(self: Any, request: Any, context: Context) -> Any:  # noqa: ANN401
            response = response_type()
            response.status.code = Code.OK
            response.status.message = "OK"
            try:
                method(self, request, context, response)
            except RmqError as error:
                _leave_status(response)
                refuse(response.status, error)
            except Exception as error:
                _log.exception("the call %(call)s failed", call=name)
                refuse(response.status, error)
            return response

        return call

    return decorate


def _leave_status(response: Any) -> None:  # noqa: ANN401
    """Clear a response except for its status."""
    for field, _ in response.ListFields():
        if field.name != "status":
            response.ClearField(field.name)


def refuse(status: Any, error: Exception) -> None:  # noqa: ANN401
    """Set a status by an error."""
    status.code = code_of(error) if isinstance(error, RmqError) else Code.INTERNAL_SERVER_ERROR
    status.message = str(error)


def client_id_of(context: Context) -> str:
    """Return the id of the calling client."""
    client_id = header(context, "x-mq-client-id")
    if not client_id:
        raise Refusal(Code.CLIENT_ID_REQUIRED, "the header x-mq-client-id is missing")
    return client_id


def header(context: Context, name: str) -> str:
    """Return a header of a call; an empty string if it is missing."""
    return next((str(value) for key, value in context.invocation_metadata() or () if key == name), "")


def sum_up(status: Any, codes: list[Code]) -> None:  # noqa: ANN401
    """Set the status of a response from the codes of its entries."""
    code = codes[0] if len(set(codes)) == 1 else Code.MULTIPLE_RESULTS
    status.code, status.message = code, code.name


# ---- bounds


class CallBounds:
    """Counts calls by connection, by address and in all. Thread-safe."""

    def __init__(self, what: str, *, of_connection: int, of_address: int, in_all: int) -> None:
        """Bound calls, which errors call ``what``, to these numbers at a time."""
        self._what = what
        self._bounds = of_connection, of_address, in_all
        self._held: Counter[str] = Counter()
        self._lock = Lock()

    @contextmanager
    def hold(self, peer: str) -> Iterator[None]:
        """Count a call of ``peer``, such as ``ipv4:10.0.0.7:51234``, for as long as the block runs.

        Raises:
            Refusal: There are as many calls already.
        """
        names = peer, peer.rpartition(":")[0] + ":", ""
        with self._lock:
            for name, bound in zip(names, self._bounds, strict=True):
                if self._held[name] >= bound:
                    scope = "in all" if not name else f"of {name.rstrip(':')}"
                    raise Refusal(
                        Code.TOO_MANY_REQUESTS, f"{bound} {self._what} {scope} are open already; end some first"
                    )
            self._held.update(names)
        try:
            yield
        finally:
            with self._lock:
                self._held -= Counter(names)  # drops names at 0
