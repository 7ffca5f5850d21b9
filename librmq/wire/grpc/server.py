"""The server: the service on a port, by threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any, Final, Self

from librmq.broker import Broker
from librmq.errors import ConfigError, MissingExtraError, RmqError
from librmq.protocol import Endpoint
from librmq.runtime.event_log import EventLog
from librmq.wire.certificates import server_context
from librmq.wire.grpc.calls import CallBounds, Code, Refusal
from librmq.wire.grpc.schema import SERVICE, message_class
from librmq.wire.grpc.service import Service
from librmq.wire.grpc.sessions import FormerClient

try:
    import grpc
    from google.protobuf.message import DecodeError
except ImportError as error:  # pragma: no cover
    raise MissingExtraError("librmq.wire.grpc", "grpc") from error

_log = EventLog("librmq.wire")

_THREADS: Final = 384
"""A held receive and an open stream take one each; calls beyond are refused."""
_OF_CONNECTION: Final = 256
_OF_ADDRESS: Final = 320
"""The rest is for other addresses."""
_MAX_BYTES: Final = 8 << 20
_OPTIONS: Final = (
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
)
_METRICS_EXPORT: Final = "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export"


_LAST_PORT: Final = 65_535


class GrpcServer:
    """Serves one broker to official clients of RocketMQ 5. Thread-safe.

    Mirrors 5.3.3's proxy in local mode. Messages with a delivery time need a broker with timers:
    ``BrokerConfig(timers=TimerConfig())``.
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

        Raises:
            ConfigError: The port is taken, or an argument is not what it should be.
        """
        if not isinstance(broker, Broker):
            raise ConfigError(f"GrpcServer: expected a Broker, found {broker!r:.80}")
        if type(port) is not int or not 0 <= port <= _LAST_PORT:  # gRPC takes the remainder of larger ones
            raise ConfigError(f"port: expected 0 to {_LAST_PORT}, found {port!r:.80}")
        if tls is not None:
            server_context(*tls)  # gRPC reports no error of a bad pair
        if advertise is not None and not advertise.rpartition(":")[2].isdecimal():
            raise ConfigError(f"advertise: expected host:port, found {advertise!r:.80}")
        self._service = Service(
            broker,
            advertise=advertise,
            auto_create=auto_create,
            changed=changed or (lambda *_: None),
            endpoints=endpoints,
            former=None if former is None else former._last_clients,
        )
        self._last_clients: dict[str, FormerClient] = {}
        self._pool = ThreadPoolExecutor(_THREADS, "librmq grpc")
        self._server = grpc.server(
            self._pool, options=_OPTIONS, maximum_concurrent_rpcs=_THREADS, handlers=[_Handlers(self._service)]
        )
        self.host = host
        place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if tls is None:
                self.port: int = self._server.add_insecure_port(place)
            else:
                chain, key = tls
                self.port = self._server.add_secure_port(place, grpc.ssl_server_credentials([(key, chain)]))
        except (RuntimeError, ValueError) as error:
            self._pool.shutdown(wait=False)
            raise ConfigError(f"can't listen on {place}: {error}") from error
        self._server.start()
        self._is_open = True
        _log.info("serving %(broker)s by gRPC on %(address)s", broker=broker.name, address=self.address)

    @property
    def address(self) -> str:
        """``host:port``, for the clients."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

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
        return self._service.missing()

    def close(self, timeout: float = 5) -> bool:
        """Answer no more calls. Closing again does nothing.

        Returns:
            Whether all calls have ended within ``timeout`` seconds. Others are abandoned.
        """
        if not self._is_open:
            return True
        self._is_open = False
        self._last_clients = self._service.clients()
        self._service.close()
        stopping = threading.Thread(target=self._stop, name="librmq grpc stop", daemon=True)
        stopping.start()
        stopping.join(timeout)
        if stopping.is_alive():
            _log.warning("calls by gRPC on %(address)s did not end, and are abandoned", address=self.address)
        return not stopping.is_alive()

    def _stop(self) -> None:
        self._server.stop(grace=None).wait()
        self._pool.shutdown(wait=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<GrpcServer {self.address}{'' if self._is_open else ', closed'}>"


class _Handlers(grpc.GenericRpcHandler):  # type: ignore[misc]
    """The calls by their names."""

    def __init__(self, service: Service) -> None:
        self._by_name: dict[str, Any] = {}
        self._called = service.sessions.called
        self._calls = CallBounds("calls", of_connection=_OF_CONNECTION, of_address=_OF_ADDRESS, in_all=_THREADS)
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

    def _add_unary(self, name: str, call: Callable[..., Any], request: Any, response: Any) -> None:  # noqa: ANN401
        def handle(requests: Iterator[bytes], context: Any) -> Any:  # noqa: ANN401
            with _held(self._calls, context):
                return call(_parsed(requests, request, context), context)

        handler = grpc.stream_unary_rpc_method_handler(handle, None, response.SerializeToString)
        self._by_name[f"/{SERVICE}/{name}"] = handler

    def _add_stream(self, name: str, call: Callable[..., Any], response: Any) -> None:  # noqa: ANN401
        def handle(requests: Iterator[bytes], context: Any) -> Any:  # noqa: ANN401
            with _held(self._calls, context):
                yield from call(requests, context)

        handler = grpc.stream_stream_rpc_method_handler(handle, None, response.SerializeToString)
        self._by_name[f"/{SERVICE}/{name}"] = handler

    def service(self, details: Any) -> Any:  # noqa: ANN401
        """Return the handler of a call; None is answered as unimplemented."""
        for key, value in details.invocation_metadata or ():
            if key == "x-mq-client-id":
                self._called(str(value))
        return self._by_name.get(details.method)


@contextmanager
def _held(calls: CallBounds, context: Any) -> Iterator[None]:  # noqa: ANN401
    """Count a call while it runs; refuse it where its client has too many already."""
    with ExitStack() as stack:
        try:
            stack.enter_context(calls.hold(context.peer()))
        except Refusal as error:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        yield


def _parsed(requests: Iterator[bytes], request: Any, context: Any) -> Any:  # noqa: ANN401
    """Return the request of a call that has one."""
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

    def handle(requests: Iterator[bytes], context: Any) -> Any:  # noqa: ANN401
        try:
            yield from telemetry(parsed(requests), context)
        except (ValueError, RmqError) as error:
            is_busy = isinstance(error, Refusal) and error.code is Code.TOO_MANY_REQUESTS
            status = grpc.StatusCode.RESOURCE_EXHAUSTED if is_busy else grpc.StatusCode.INVALID_ARGUMENT
            context.abort(status, str(error))

    return handle
