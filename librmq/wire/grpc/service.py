"""The service over one broker: its clients, and the calls of producers and consumers.

Mirrors the activities of 5.3.3's proxy (``org.apache.rocketmq.proxy.grpc.v2``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from librmq.broker import Broker
from librmq.errors import RmqError
from librmq.runtime.event_log import EventLog
from librmq.wire.grpc.calls import CallBounds, Code, Context, Endpoints, Refusal, answers, client_id_of, header
from librmq.wire.grpc.receives import Receives
from librmq.wire.grpc.routes import Routes
from librmq.wire.grpc.sends import Sends
from librmq.wire.grpc.sessions import Commands, FormerClient, Sessions

_log = EventLog("librmq.wire")

_SETTINGS_S: Final = 10.0


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
        former: Mapping[str, FormerClient] | None = None,
    ) -> None:
        former = former or {}
        endpoints = endpoints or (lambda _: broker)
        self._silent = CallBounds("streams without settings", of_connection=64, of_address=96, in_all=128)
        self.sessions = Sessions(broker, changed, endpoints, former)
        self.routes = Routes(broker, advertise, auto_create)
        self.sends = Sends(broker, self.routes, self.sessions, endpoints)
        self.receives = Receives(broker, self.routes, self.sessions, endpoints, former)

    def is_settled(self) -> bool:
        """Return whether no client has anything to answer: push consumers wait, and no question is open."""
        return not self.missing() and not self.sessions.has_open_question() and self.receives.is_settled()

    def clients(self) -> dict[str, FormerClient]:
        """Return the clients, as the next server takes them over."""
        return {
            client_id: client._replace(places=self.receives.polls.places(client_id)) if client.is_push else client
            for client_id, client in self.sessions.clients().items()
        }

    def missing(self) -> list[str]:
        """Return the clients of the server before that are not back."""
        return list(dict.fromkeys([*self.sessions.silent(), *self.receives.polls.missing()]))

    def close(self) -> None:
        """End all streams and renewals."""
        self.sessions.close()
        self.receives.close()

    def telemetry(self, requests: Iterator[Any], context: Context) -> Iterator[Any]:
        """Keep a client's stream: it tells its settings, and is asked about its transactions."""
        client_id = client_id_of(context)
        stream = Commands()
        words = requests, client_id, header(context, "x-mq-client-version"), stream
        with self._silent.hold(context.peer()):
            reader = threading.Thread(target=self._read, args=words, name=f"librmq telemetry {client_id}", daemon=True)
            reader.start()  # it notices the end of the stream too
            if not stream.wait_for_first(_SETTINGS_S):
                raise ValueError(f"expected settings as the first command of a client, found none in {_SETTINGS_S:g} s")
        yield from stream

    def _accept(self, client_id: str, command: Any, version: str, stream: Commands) -> None:  # noqa: ANN401
        if command.WhichOneof("command") != "settings":
            raise ValueError("expected settings as the first command of a client")
        self.sessions.take_settings(client_id, command.settings, version, stream)
        command.status.code = Code.OK
        command.status.message = "OK"
        stream.put(command)
        session = self.sessions.get(client_id)
        if session is not None and session.is_for_node:
            stream.put_again(command)

    def _read(self, requests: Iterator[Any], client_id: str, version: str, stream: Commands) -> None:
        """Take what a client tells, until its stream ends; with its last stream it is gone."""
        is_first = True
        try:
            for command in requests:
                if is_first or command.WhichOneof("command") == "settings":
                    self._accept(client_id, command, version, stream)
                is_first = False
        except (ValueError, RmqError) as error:  # the client tells nonsense
            stream.end(error)
        except Exception as error:  # the stream was cut
            _log.debug("client %(client)s: its stream has ended: %(error)s", client=client_id, error=error)
        finally:
            self._stream_ended(client_id, stream)

    def _stream_ended(self, client_id: str, stream: Commands) -> None:
        try:
            stream.end()
            if self.sessions.stream_ended(client_id, stream):
                self.receives.client_gone(client_id)
        except RmqError as error:  # the broker was closed before
            _log.debug("client %(client)s left: %(error)s", client=client_id, error=error)

    @answers("HeartbeatResponse")
    def heartbeat(self, request: Any, context: Context, response: Any) -> None:  # noqa: ANN401
        """Say that a client lives."""
        if self.sessions.get(client_id_of(context)) is None:
            raise Refusal(Code.UNRECOGNIZED_CLIENT_TYPE, "the client has sent no settings: it opens its stream first")

    @answers("NotifyClientTerminationResponse")
    def notify_client_termination(self, request: Any, context: Context, response: Any) -> None:  # noqa: ANN401
        """Take a client's good-bye."""
        client_id = client_id_of(context)
        was_known = self.sessions.leave(client_id, has_said_so=True)
        self.receives.client_gone(client_id)
        if not was_known:
            raise Refusal(Code.UNRECOGNIZED_CLIENT_TYPE, "the client has sent no settings")
