"""The server: the service over one broker, on a port, by threads, with its clients' streams.

Mirrors the activities of 5.3.3's proxy (``org.apache.rocketmq.proxy.grpc.v2``).
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any, Final

from librmq.broker import Broker
from librmq.config import to_seconds
from librmq.errors import ConfigError, MissingExtraError, RmqError
from librmq.message.ids import format_host, split_address
from librmq.override import override
from librmq.protocol import MAX_INVISIBLE_MS, Endpoint
from librmq.runtime.closing import Closing
from librmq.runtime.event_log import EventLog
from librmq.wire.certificates import server_context
from librmq.wire.grpc._protocol import (
    SERVICE,
    CallBounds,
    Code,
    Context,
    Endpoints,
    Refusal,
    answers,
    client_id_of,
    header,
    message_class,
)
from librmq.wire.grpc._receives import ReceiveLimits, Receives
from librmq.wire.grpc._sends import Routes, SendCalls
from librmq.wire.grpc._sessions import LONG_POLL_S, PUSH_CONSUMER, Commands, FormerClient, Sessions

_SETTINGS_S: Final = 10.0
_LIMITS: Final = ReceiveLimits()


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
        lost_groups: Collection[str] = (),
        limits: ReceiveLimits = _LIMITS,
    ) -> None:
        former = former or {}
        endpoints = endpoints or (lambda _: broker)
        self._silent = CallBounds("streams without settings", of_connection=64, of_address=96, in_all=128)
        self.sessions = Sessions(broker, changed, endpoints, former, lost_groups)
        self.routes = Routes(broker, advertise, auto_create)
        self.sends = SendCalls(broker, self.routes, self.sessions, endpoints)
        self.receives = Receives(broker, self.routes.ensure_topic, self.sessions, endpoints, former, limits)

    def is_settled(self) -> bool:
        """Return whether no client has anything to answer: push consumers wait, and no question is open."""
        return not self.missing_clients() and not self.sessions.has_open_question() and self.receives.is_settled()

    def clients(self) -> dict[str, FormerClient]:
        """Return the clients, as the next server takes them over."""
        return {
            client_id: client._replace(places=self.receives.polls.places(client_id)) if client.is_push else client
            for client_id, client in self.sessions.clients().items()
        }

    def missing_clients(self) -> list[str]:
        """Return the clients of the server before that are not back."""
        return list(dict.fromkeys([*self.sessions.silent(), *self.receives.polls.missing_clients()]))

    def close(self) -> None:
        """End all streams and renewals."""
        self.sessions.close()
        self.receives.close()

    def telemetry(self, requests: Iterator[Any], context: Context) -> Iterator[Any]:
        """Serve a client's stream, in which it sends its settings, and is asked about its transactions."""
        client_id = client_id_of(context)
        stream = Commands()
        words = requests, client_id, header(context, "x-mq-client-version"), stream
        with self._silent.hold(context.peer()):
            reader = threading.Thread(
                target=self._read_commands, args=words, name=f"librmq telemetry {client_id}", daemon=True
            )
            reader.start()  # it notices the end of the stream too
            if not stream.wait_for_first(_SETTINGS_S):
                raise ValueError(f"expected settings as the first command of a client, found none in {_SETTINGS_S:g} s")
        yield from stream

    def _accept(self, client_id: str, command: Any, version: str, stream: Commands) -> None:
        if command.WhichOneof("command") != "settings":
            raise ValueError("expected settings as the first command of a client")
        self.sessions.take_settings(client_id, command.settings, version, stream)
        command.status.code = Code.OK
        command.status.message = "OK"
        stream.enqueue(command)
        session = self.sessions.by_id.get(client_id)
        if session is not None and session.is_for_node:
            stream.enqueue_again(command)

    def _read_commands(self, requests: Iterator[Any], client_id: str, version: str, stream: Commands) -> None:
        """Read a client's commands until its stream ends; the end of its last stream removes the client."""
        is_first = True
        try:
            for command in requests:
                if is_first or command.WhichOneof("command") == "settings":
                    self._accept(client_id, command, version, stream)
                is_first = False
        except (ValueError, RmqError) as error:  # the commands make no sense
            stream.end_stream(error)
        except Exception as error:  # the stream was cut
            _log.debug("client %(client)s: its stream has ended: %(error)s", client=client_id, error=error)
        finally:
            self._stream_ended(client_id, stream)

    def _stream_ended(self, client_id: str, stream: Commands) -> None:
        try:
            stream.end_stream()
            if self.sessions.stream_ended(client_id, stream):
                self.receives.client_gone(client_id)
        except RmqError as error:  # the broker was closed before
            _log.debug("client %(client)s left: %(error)s", client=client_id, error=error)

    @answers("HeartbeatResponse")
    def heartbeat(self, request: Any, context: Context, response: Any) -> None:
        """Say that a client lives."""
        if request.client_type != PUSH_CONSUMER and request.group.name:  # a push consumer is back when it receives
            self.sessions.group_called(request.group.name)
        if self.sessions.by_id.get(client_id_of(context)) is None:
            raise Refusal(Code.UNRECOGNIZED_CLIENT_TYPE, "the client has sent no settings: it opens its stream first")

    @answers("NotifyClientTerminationResponse")
    def notify_client_termination(self, request: Any, context: Context, response: Any) -> None:
        client_id = client_id_of(context)
        was_known = self.sessions.remove_client(client_id, has_said_so=True)
        self.receives.client_gone(client_id)
        if not was_known:
            raise Refusal(Code.UNRECOGNIZED_CLIENT_TYPE, "the client has sent no settings")


# ---- the server

try:
    import resource
except ImportError:  # pragma: no cover (Windows has no such limits)
    resource = None  # type: ignore[assignment]

try:
    import grpc
    from google.protobuf.message import DecodeError
except ImportError as error:  # pragma: no cover
    raise MissingExtraError("librmq.wire.grpc", "grpc") from error

_log = EventLog("librmq.wire")

_OF_ADDRESS: Final = 320
"""Calls of one address. A held receive and an open stream take a thread each; calls beyond are refused."""
_FOR_OTHERS: Final = 64
"""Further calls, for other addresses, and so many less for one connection."""
_MAX_BYTES: Final = 8 << 20
OPTIONS: Final = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", _MAX_BYTES),
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.max_metadata_size", 64 << 10),
    ("grpc.keepalive_time_ms", 30_000),  # a connection cut without a word ends after 50 s, not after 2 hours
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.ping_timeout_ms", 20_000),  # what newer versions go by
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 10_000),  # official clients hold a stream, and others connect again when they call
)
_CONNECTIONS: Final = 4_000
_METRICS_EXPORT: Final = "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export"


_LAST_PORT: Final = 65_535
_GRACE_S: Final = 0.5
_MOST_CALLS: Final = 16_384


class GrpcServer(Closing):
    """Serves one broker to official clients of RocketMQ 5. Thread-safe.

    Mirrors 5.3.3's proxy in local mode. Messages with a delivery time need a broker with timers, as
    every broker of a store that librmq made.
    """

    def __init__(  # noqa: PLR0913 (each is a choice of its own, by name)
        self,
        broker: Broker,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        advertise: str | None = None,
        tls: tuple[bytes, bytes] | None = None,
        auto_create: bool = True,
        changed: Callable[[str, str, bool], None] | None = None,
        endpoints: Callable[[str], Endpoint] | None = None,
        former: GrpcServer | None = None,
        lost_groups: Collection[str] = (),
        calls_of_address: int = _OF_ADDRESS,
        min_invisible: float | timedelta = _LIMITS.min_invisible_ms / 1000,
        min_polling: float | timedelta = _LIMITS.min_polling_s,
    ) -> None:
        """Listen, and answer from now on.

        Args:
            broker: What is served. Close the server before it.
            host: The address to listen on.
            port: The port; 0 takes a free one, see `port`.
            advertise: ``host:port`` that routes name; None is the address which each client has dialled.
            tls: Certificate chain and private key, in PEM, such as `certificates.self_signed` makes; None serves plain
                text.
            auto_create: Whether a topic is made when its route is asked for.
            changed: ``changed(client_id, group, is_connected)`` is called as clients come and go; a producer's group is
                empty.
            endpoints: What answers a client's requests, by its id; by default the broker. A wrapper can watch or fail
                them.
            former: The closed server that this one replaces: until its clients are back, `missing` names them, and
                `is_settled` is false.
            lost_groups: The groups of a server that was killed: until a client of theirs opens its stream, one that
                receives as push consumers do is taken for one, as `is_settled` needs it.
            calls_of_address: Open calls of one address; each takes a thread. A push consumer holds one for each queue
                that it reads, and one more. One connection has 64 less, if that leaves any, and all have 64 more.
            min_invisible: Seconds below which a receive's invisible time is refused, as by 5.3.3's proxy
                (``minInvisibleTimeMillsForRecv``).
            min_polling: Seconds that a receive's deadline must leave, as for 5.3.3's proxy
                (``grpcClientConsumerMinLongPollingTimeoutMillis``); 0 takes any.

        Raises:
            ConfigError: The port is taken, or an argument is not what it should be.
        """
        if not isinstance(broker, Broker):
            raise ConfigError(f"GrpcServer: expected a Broker, found {broker!r:.80}")
        if type(port) is not int or not 0 <= port <= _LAST_PORT:  # gRPC takes the remainder of larger ones
            raise ConfigError(f"port: expected 0 to {_LAST_PORT}, found {port!r:.80}")
        if type(calls_of_address) is not int or not 1 <= calls_of_address <= _MOST_CALLS:
            raise ConfigError(f"calls_of_address: expected 1 to {_MOST_CALLS}, found {calls_of_address!r:.80}")
        least_s = to_seconds("min_invisible", min_invisible, 0.001, MAX_INVISIBLE_MS / 1000)
        least_polling_s = to_seconds("min_polling", min_polling, 0, LONG_POLL_S)
        if tls is not None:
            server_context(*tls)  # gRPC reports no error of a bad pair
        if advertise is not None:
            split_address("advertise", advertise)
        self._service = Service(
            broker,
            advertise=advertise,
            auto_create=auto_create,
            changed=changed or (lambda *_: None),
            endpoints=endpoints,
            former=None if former is None else former._last_clients,
            lost_groups=lost_groups,
            limits=ReceiveLimits(round(1000 * least_s), least_polling_s),
        )
        self._last_clients: dict[str, FormerClient] = {}
        in_all = calls_of_address + _FOR_OTHERS
        self._pool = ThreadPoolExecutor(in_all, "librmq grpc")
        handlers = [_Handlers(self._service, calls_of_address)]
        options = (*OPTIONS, ("grpc.max_allowed_incoming_connections", _most_connections(in_all)))
        self._server = grpc.server(self._pool, options=options, maximum_concurrent_rpcs=in_all, handlers=handlers)
        self.host = host
        place = format_host((host, port))
        try:
            _check_port(host, port)
            if tls is None:
                self.port: int = self._server.add_insecure_port(place)
            else:
                chain, key = tls
                self.port = self._server.add_secure_port(place, grpc.ssl_server_credentials([(key, chain)]))
        except (OSError, RuntimeError, ValueError) as error:
            self._pool.shutdown(wait=False)
            raise ConfigError(f"can't listen on {place}: {error}; port 0 takes a free one") from error
        self._server.start()
        self._is_open = True
        _log.info("serving %(broker)s by gRPC on %(address)s", broker=broker.name, address=self.address)

    @property
    def address(self) -> str:
        """``host:port``, for the clients."""
        return format_host((self.host, self.port))

    @property
    def clients(self) -> int:
        """The number of connected clients."""
        return len(self._service.sessions)

    def is_settled(self) -> bool:
        """Return whether no client has work left until time passes.

        Then push consumers wait for messages and hold none, and no check of a transaction is pending.
        """
        return self._service.is_settled()

    def missing(self) -> list[str]:
        """Return the clients of the ``former`` server that are not back.

        A push consumer is back when it receives from all queues from which it received before, a producer that has sent
        half messages when the server can ask it about them, and any other client with its first call.
        """
        return self._service.missing_clients()

    def groups(self) -> frozenset[str]:
        """Return the ``lost_groups`` that are back: a client has received, or a simple one has sent a heartbeat."""
        return self._service.sessions.groups()

    @override
    def close(self, timeout: float = 5, *, grace: float = _GRACE_S) -> bool:
        """Answer no more calls. Closing again does nothing.

        Streams and waiting receives end at once as they usually do, and calls that run have ``grace`` seconds, because
        a client may take a stream that is reset for an error of its own. With 0 all calls are cut.

        Returns:
            Whether all calls have ended within ``timeout`` seconds. Others are abandoned.
        """
        if not self._is_open:
            return True
        self._is_open = False
        self._last_clients = self._service.clients()
        if grace > 0:
            self._service.receives.end_polls()
        self._service.close()
        stopping = threading.Thread(
            target=self._stop, args=(min(grace, timeout),), name="librmq grpc stop", daemon=True
        )
        stopping.start()
        stopping.join(timeout)
        if stopping.is_alive():
            _log.warning("calls by gRPC on %(address)s did not end, and are abandoned", address=self.address)
        return not stopping.is_alive()

    def _stop(self, grace: float) -> None:
        self._server.stop(grace or None).wait()
        self._pool.shutdown(wait=True)

    @override
    def __repr__(self) -> str:
        return f"<GrpcServer {self.address}{'' if self._is_open else ', closed'}>"


def _most_connections(calls: int) -> int:
    """Return how many connections a server holds: half of the process's descriptors are left for the store's files."""
    connections = max(_CONNECTIONS, 2 * calls)
    if resource is None:
        return connections
    soft_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return connections if soft_limit == resource.RLIM_INFINITY else min(connections, max(soft_limit // 2, 1))


def _check_port(host: str, port: int) -> None:
    """Raise the error of the system for a port that is taken or a host that is not here; gRPC prints it besides."""
    errors = []
    for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        try:
            with socket.socket(family, kind, protocol) as probe:
                if os.name == "posix":  # as gRPC binds it: a port of connections that have ended is free
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
        except OSError as error:
            errors.append(error)
        else:
            return
    raise errors[0]


class _Handlers(grpc.GenericRpcHandler):  # type: ignore[misc]
    def __init__(self, service: Service, calls_of_address: int) -> None:
        self._by_name: dict[str, Any] = {}
        self._called = service.sessions.called
        self._calls = CallBounds(
            "calls",
            of_connection=max(calls_of_address - _FOR_OTHERS, 1),
            of_address=calls_of_address,
            in_all=calls_of_address + _FOR_OTHERS,
            option="GrpcServer(calls_of_address=…), at `librmq serve` --grpc-calls, allows more",
        )
        for name, call in (
            ("QueryRoute", service.routes.query_route),
            ("Heartbeat", service.heartbeat),
            ("SendMessage", service.sends.send_message),
            ("QueryAssignment", service.routes.query_assignment),
            ("AckMessage", service.receives.ack_message),
            ("ForwardMessageToDeadLetterQueue", service.receives.forward_to_dead_letters),
            ("EndTransaction", service.sends.end_transaction),
            ("NotifyClientTermination", service.notify_client_termination),
            ("ChangeInvisibleDuration", service.receives.change_invisible_duration),
            ("RecallMessage", service.sends.recall_message),
        ):
            request, response = message_class(f"{name}Request"), message_class(f"{name}Response")
            self._add_unary(name, call, request, response)
        response = message_class("ReceiveMessageResponse")
        request, receive = message_class("ReceiveMessageRequest"), service.receives.receive_message
        self._add_stream(
            "ReceiveMessage", lambda requests, call: receive(_parsed(requests, request, call), call), response
        )
        command = message_class("TelemetryCommand")
        self._add_stream("Telemetry", _refusing_nonsense(service.telemetry, command.FromString), command)
        # Some clients accept their settings only with an address for metrics, and export them here.
        self._by_name[_METRICS_EXPORT] = grpc.unary_unary_rpc_method_handler(lambda request, context: b"")

    # All requests are streams of bytes, which are the same on the wire. A call that sends no request is counted then,
    # because it reaches its function, and bytes that can't be parsed end it, which gRPC does for no stream.

    def _add_unary(self, name: str, call: Callable[..., Any], request: Any, response: Any) -> None:
        def handle(requests: Iterator[bytes], context: Any) -> Any:
            with _held(self._calls, context):
                return call(_parsed(requests, request, context), context)

        handler = grpc.stream_unary_rpc_method_handler(handle, None, response.SerializeToString)
        self._by_name[f"/{SERVICE}/{name}"] = handler

    def _add_stream(self, name: str, call: Callable[..., Any], response: Any) -> None:
        def handle(requests: Iterator[bytes], context: Any) -> Any:
            with _held(self._calls, context):
                yield from call(requests, context)

        handler = grpc.stream_stream_rpc_method_handler(handle, None, response.SerializeToString)
        self._by_name[f"/{SERVICE}/{name}"] = handler

    def service(self, details: Any) -> Any:
        """Return the handler of a call; None is answered as unimplemented."""
        for key, value in details.invocation_metadata or ():
            if key == "x-mq-client-id":
                self._called(str(value))
        return self._by_name.get(details.method)


@contextmanager
def _held(calls: CallBounds, context: Any) -> Iterator[None]:
    """Count a call while it runs; refuse it where its client has too many already."""
    with ExitStack() as stack:
        try:
            stack.enter_context(calls.hold(context.peer()))
        except Refusal as error:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        yield


def _parsed(requests: Iterator[bytes], request: Any, context: Any) -> Any:
    what = f"expected a {request.DESCRIPTOR.name}, found"
    for raw in requests:
        try:
            return request.FromString(raw)
        except DecodeError:
            context.abort(grpc.StatusCode.INTERNAL, f"{what} {len(raw):,} bytes that are none")  # as gRPC does
    return context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"{what} none")


def _refusing_nonsense(telemetry: Callable[..., Any], parse: Callable[[bytes], Any]) -> Callable[..., Any]:
    def parsed(requests: Iterator[bytes]) -> Iterator[Any]:
        for raw in requests:
            try:
                yield parse(raw)
            except DecodeError as error:
                raise ValueError(f"expected a TelemetryCommand, found {len(raw):,} bytes that are none") from error

    def handle(requests: Iterator[bytes], context: Any) -> Any:
        try:
            yield from telemetry(parsed(requests), context)
        except (ValueError, RmqError) as error:
            is_busy = isinstance(error, Refusal) and error.code is Code.TOO_MANY_REQUESTS
            status = grpc.StatusCode.RESOURCE_EXHAUSTED if is_busy else grpc.StatusCode.INVALID_ARGUMENT
            context.abort(status, str(error))

    return handle
