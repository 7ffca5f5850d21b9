"""The service over one broker: its clients, and the calls of producers and consumers.

Mirrors the activities of 5.3.3's proxy (``org.apache.rocketmq.proxy.grpc.v2``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

from librmq.broker import Broker
from librmq.errors import RmqError
from librmq.runtime.event_log import EventLog
from librmq.wire.grpc.calls import Context, Endpoints, answers, client_id_of, header
from librmq.wire.grpc.codes import Code, Refusal
from librmq.wire.grpc.receives import Receives
from librmq.wire.grpc.routes import Routes
from librmq.wire.grpc.sends import Sends
from librmq.wire.grpc.sessions import Commands, Sessions

__all__ = ["Service"]

_log = EventLog("librmq.wire")


class Service:
    """The service over one broker. Thread-safe."""

    def __init__(
        self,
        broker: Broker,
        *,
        advertise: str | None,
        auto_create: bool,
        changed: Callable[[str, str, bool], None],
        endpoints: Endpoints | None = None,
    ) -> None:
        endpoints = endpoints or (lambda _: broker)
        self.sessions = Sessions(broker, changed, endpoints)
        self.routes = Routes(broker, advertise, auto_create)
        self.sends = Sends(broker, self.routes, self.sessions, endpoints)
        self.receives = Receives(broker, self.routes, self.sessions, endpoints)

    def is_settled(self) -> bool:
        """Return whether no client has anything to answer: push consumers wait, and no question is open."""
        return not self.sessions.has_open_question() and self.receives.is_settled()

    def close(self) -> None:
        """End all streams and renewals."""
        self.sessions.close()
        self.receives.close()

    def telemetry(self, requests: Iterator[Any], context: Context) -> Iterator[Any]:
        """Keep a client's stream: it tells its settings, and is asked about its transactions."""
        client_id = client_id_of(context)
        version = header(context, "x-mq-client-version")
        first = next(requests, None)
        if first is None:
            return
        stream = Commands()
        self._told(client_id, first, version, stream)
        reader = threading.Thread(
            target=self._read,
            args=(requests, client_id, version, stream),
            name=f"librmq telemetry {client_id}",
            daemon=True,
        )
        try:
            reader.start()  # before the first answer: the stream may be cut there, and the reader notices its end
        except RuntimeError:  # no thread is free
            self._stream_ended(client_id, stream)
            raise
        yield from stream

    def _told(self, client_id: str, command: Any, version: str, stream: Commands) -> None:  # noqa: ANN401
        if command.WhichOneof("command") != "settings":
            raise ValueError("expected settings as the first command of a client")
        self.sessions.take_settings(client_id, command.settings, version, stream)
        command.status.code = Code.OK
        command.status.message = "OK"
        stream.put(command)
        session = self.sessions.get(client_id)
        if session is not None and session.waits_late:
            stream.put_again(command)

    def _read(self, requests: Iterator[Any], client_id: str, version: str, stream: Commands) -> None:
        """Take what a client tells, until its stream ends; with its last stream it is gone."""
        try:
            for command in requests:
                if command.WhichOneof("command") == "settings":
                    self._told(client_id, command, version, stream)
        except Exception as error:  # the stream was cut, or the client tells nonsense
            _log.debug("client %(client)s: its stream has ended: %(error)s", client=client_id, error=error)
        finally:
            self._stream_ended(client_id, stream)

    def _stream_ended(self, client_id: str, stream: Commands) -> None:
        try:
            if self.sessions.stream_ended(client_id, stream):
                self.receives.client_gone(client_id)
        except RmqError as error:  # the broker was closed before
            _log.debug("client %(client)s left: %(error)s", client=client_id, error=error)

    @answers("HeartbeatResponse")
    def heartbeat(self, request: Any, context: Context, response: Any) -> None:  # noqa: ANN401
        """Say that a client lives."""
        if self.sessions.get(client_id_of(context)) is None:
            raise Refusal(Code.UNRECOGNIZED_CLIENT_TYPE, "the client has told no settings: it opens its stream first")

    @answers("NotifyClientTerminationResponse")
    def notify_client_termination(self, request: Any, context: Context, response: Any) -> None:  # noqa: ANN401
        """Take a client's good-bye."""
        client_id = client_id_of(context)
        if not self.sessions.leave(client_id):
            raise Refusal(Code.UNRECOGNIZED_CLIENT_TYPE, "the client has told no settings")
        self.receives.client_gone(client_id)
