"""The official Python client against librmq, and against a bare stub that keeps its messages in lists.

Client and server are processes of their own. The stub answers the same calls by the same gRPC server with the same
number of threads, and does nothing else: no log, no routes, no invisible times. Bodies have 1 KiB; asynchronous sends
keep 64 under way. librmq's broker has timers, and its store is on disk.

`benchmarks.wire_remoting` has the rows of the 4.x protocol, whose clients are raw frames and `librmq.connect`.

``python -m benchmarks.wire [--rounds N] [--rows send,async,push,receive,remoting,pull,connect,oneway] [--quick]``
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, Self

from benchmarks import wire_remoting
from benchmarks.common import CHECKOUT, Bench, Measure, Row, Run, Target, command, compare
from librmq.broker import Broker, BrokerConfig
from librmq.scheduling.timer_config import TimerConfig

COUNTS: Final = {"send": 2_000, "async": 4_000, "push": 3_000, "receive": 2_000}
CASES: Final = {
    "send": "a send",
    "async": "an asynchronous send",
    "push": "a message to a push consumer",
    "receive": "a receive and an acknowledgement",
}
PACKAGES: Final = ("librmq", "grpcio", "protobuf", "rocketmq-python-client")
_OK: Final = 20000
_POLL_S: Final = 5.0


class BareStub:
    """The calls of the service over lists in memory."""

    def __init__(self) -> None:
        import grpc

        from librmq.wire.grpc.schema import SERVICE, message_class

        self._message_class = message_class
        self._topics: dict[str, deque[Any]] = {}
        self._arrived = threading.Condition()
        handlers: dict[str, Any] = {}
        for name in (
            "QueryRoute",
            "QueryAssignment",
            "SendMessage",
            "AckMessage",
            "Heartbeat",
            "NotifyClientTermination",
        ):
            request, response = message_class(f"{name}Request"), message_class(f"{name}Response")
            handlers[f"/{SERVICE}/{name}"] = grpc.unary_unary_rpc_method_handler(
                self._answering(name, response), request.FromString, response.SerializeToString
            )
        request, response = message_class("ReceiveMessageRequest"), message_class("ReceiveMessageResponse")
        handlers[f"/{SERVICE}/ReceiveMessage"] = grpc.unary_stream_rpc_method_handler(
            self._receive, request.FromString, response.SerializeToString
        )
        command_class = message_class("TelemetryCommand")
        handlers[f"/{SERVICE}/Telemetry"] = grpc.stream_stream_rpc_method_handler(
            self._telemetry, command_class.FromString, command_class.SerializeToString
        )

        class Handlers(grpc.GenericRpcHandler):  # type: ignore[misc]
            def service(self, details: Any) -> Any:
                return handlers.get(details.method)

        self._server = grpc.server(ThreadPoolExecutor(256), handlers=[Handlers()])
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def _answering(self, name: str, response: Any) -> Any:
        fill = getattr(self, f"_{name}", None)

        def answer(request: Any, context: object) -> Any:
            made = response()
            made.status.code = _OK
            if fill is not None:
                fill(request, made)
            return made

        return answer

    def _QueryRoute(self, request: Any, response: Any) -> None:  # noqa: N802
        self._topics.setdefault(request.topic.name, deque())
        for number in range(8):
            queue = response.message_queues.add(id=number, permission=4, accept_message_types=[1, 2, 3, 4])
            queue.topic.name, queue.broker.name = request.topic.name, "bare"
            queue.broker.endpoints.CopyFrom(request.endpoints)

    def _QueryAssignment(self, request: Any, response: Any) -> None:  # noqa: N802
        queue = response.assignments.add().message_queue
        queue.id, queue.permission, queue.topic.name, queue.broker.name = -1, 4, request.topic.name, "bare"
        queue.broker.endpoints.CopyFrom(request.endpoints)

    def _SendMessage(self, request: Any, response: Any) -> None:  # noqa: N802
        for message in request.messages:
            entry = response.entries.add(message_id=message.system_properties.message_id)
            entry.status.code = _OK
            self._topics[message.topic.name].append(message)
        with self._arrived:
            self._arrived.notify_all()

    def _AckMessage(self, request: Any, response: Any) -> None:  # noqa: N802
        for entry in request.entries:
            made = response.entries.add(message_id=entry.message_id, receipt_handle=entry.receipt_handle)
            made.status.code = _OK

    def _receive(self, request: Any, context: object) -> Iterator[Any]:
        response = self._message_class("ReceiveMessageResponse")
        kept = self._topics[request.message_queue.topic.name]
        found: list[Any] = []
        with self._arrived:
            self._arrived.wait_for(lambda: bool(kept), _POLL_S)
            while kept and len(found) < request.batch_size:
                found.append(kept.popleft())
        status = response()
        status.status.code = _OK if found else 40401
        yield status
        for message in found:
            system = message.system_properties
            system.receipt_handle, system.delivery_attempt = system.message_id, 1
            yield response(message=message)
        last = response()
        last.delivery_timestamp.GetCurrentTime()
        yield last

    def _telemetry(self, requests: Iterator[Any], context: object) -> Iterator[Any]:
        for told in requests:
            told.status.code = _OK
            settings = told.settings
            settings.publishing.max_body_size = 4 << 20
            settings.backoff_policy.max_attempts = 3
            if settings.client_type != 1:
                settings.subscription.receive_batch_size = 32
                settings.subscription.long_polling_timeout.FromSeconds(20)
                settings.backoff_policy.customized_backoff.next.add().FromSeconds(1)
            yield told

    def close(self) -> None:
        self._server.stop(None).wait()


class Client:
    """The client's process."""

    def __init__(self, home: Path) -> None:
        import os

        self._process = subprocess.Popen(
            [sys.executable, CHECKOUT / "benchmarks" / "wire_client.py"],
            env={**os.environ, "HOME": str(home)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def rate(self, address: str, kind: str, count: int) -> float:
        """Return messages a second."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{address} {kind} {count}\n")
        self._process.stdin.flush()
        return count / float(self._process.stdout.readline())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


def measure(kind: str) -> Measure:
    """Return the part that compares one kind of call."""

    def part(bench: Bench) -> list[Row]:
        if not bench.has("rocketmq") or not bench.has("grpc"):
            return []
        from librmq.wire.grpc import GrpcServer

        count = bench.count(COUNTS[kind])
        with ExitStack() as ends:
            folder = ends.enter_context(bench.folder())
            broker = ends.enter_context(Broker.open(folder / "broker", BrokerConfig(timers=TimerConfig())))
            server = ends.enter_context(GrpcServer(broker))
            bare = BareStub()
            ends.callback(bare.close)
            client = ends.enter_context(Client(folder))

            def run_at(address: str) -> Run:
                return lambda _: client.rate(address, kind, count)

            rates = bench.interleave({"librmq": run_at(server.address), "bare": run_at(bare.address)})
        return [compare("gRPC", CASES[kind], "a bare stub", rates["librmq"], rates["bare"], Target(0.8), limit=True)]

    return part


ROWS: Final[dict[str, Measure]] = {**{kind: measure(kind) for kind in COUNTS}, **wire_remoting.PARTS}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, show the table, and return the exit status."""
    return command("wire", __doc__ or "", ROWS, PACKAGES, arguments)


if __name__ == "__main__":
    sys.exit(main())
