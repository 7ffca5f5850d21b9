"""What all calls of the service share: the caller's id, and errors as a status."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from librmq.errors import RmqError
from librmq.protocol import Endpoint
from librmq.runtime.event_log import EventLog
from librmq.wire.grpc.codes import Code, Refusal, code_of
from librmq.wire.grpc.schema import message_class

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
    """Set a status to that of an error."""
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
    """Set the status of a response from those of its entries."""
    code = codes[0] if len(set(codes)) == 1 else Code.MULTIPLE_RESULTS
    status.code, status.message = code, code.name
