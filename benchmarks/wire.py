"""The official Python client against librmq, and against a bare stub that keeps messages in lists; the 4.x protocol.

Client, server and stub are processes of their own. A stub answers the same calls by the same code for frames, and does
nothing else: no log, no routes, no invisible times. Bodies have 1 KiB; asynchronous sends keep 64 under way. librmq's
broker has timers, and its store is on disk. Clients of the 4.x protocol are raw frames and `librmq.connect`.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from benchmarks import frame
from benchmarks.frame import Bench, Case, Run, Target, Timed, main
from librmq.broker import Broker, BrokerConfig
from librmq.scheduling.timer_config import TimerConfig
from librmq.wire.remoting._frames import Frame, FrameReader, encode, to_fields
from librmq.wire.remoting._headers import REQUESTS, PulledHeader, PullHeader, RequestCode, SendHeader, SentHeader

WINDOW: Final = 64
BODY: Final = b"x" * 1024
TOPIC: Final = "bench"
_OK: Final = 20000
_RECEIVED: Final = 256 << 10


program: Final = partial(frame.program, is_killed=True)


# ----------------------------------------------------------------------------------------------------------------- gRPC


class BareStub:
    def __init__(self) -> None:
        import grpc

        from librmq.wire.grpc._protocol import SERVICE, message_class

        self._message_class = message_class
        self._topics: dict[str, deque[Any]] = {}
        self._arrived = threading.Condition()
        handlers: dict[str, Any] = {}

        def handle(name: str, request: str, response: str, kind: Any, answer: Any) -> None:
            parse, serialize = message_class(request).FromString, message_class(response).SerializeToString
            handlers[f"/{SERVICE}/{name}"] = kind(answer, parse, serialize)

        for name, fill in (
            ("QueryRoute", self._route), ("QueryAssignment", self._assign), ("SendMessage", self._send),
            ("AckMessage", self._ack), ("Heartbeat", None), ("NotifyClientTermination", None),
        ):  # fmt: skip
            answer = self._answering(message_class(f"{name}Response"), fill)
            handle(name, f"{name}Request", f"{name}Response", grpc.unary_unary_rpc_method_handler, answer)
        handle("ReceiveMessage", "ReceiveMessageRequest", "ReceiveMessageResponse",
               grpc.unary_stream_rpc_method_handler, self._receive)  # fmt: skip
        command, streams = "TelemetryCommand", grpc.stream_stream_rpc_method_handler
        handle("Telemetry", command, command, streams, self._configure)

        class Handlers(grpc.GenericRpcHandler):  # type: ignore[misc]
            def service(self, details: Any) -> Any:
                return handlers.get(details.method)

        self._server = grpc.server(ThreadPoolExecutor(256), handlers=[Handlers()])
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def _answering(self, response_class: Any, fill: Any) -> Any:
        def answer(request: Any, context: object) -> Any:
            response = response_class()
            response.status.code = _OK
            if fill is not None:
                fill(request, response)
            return response

        return answer

    def _route(self, request: Any, response: Any) -> None:
        self._topics.setdefault(request.topic.name, deque())
        for number in range(8):
            queue = response.message_queues.add(id=number, permission=4, accept_message_types=[1, 2, 3, 4])
            queue.topic.name, queue.broker.name = request.topic.name, "bare"
            queue.broker.endpoints.CopyFrom(request.endpoints)

    def _assign(self, request: Any, response: Any) -> None:
        queue = response.assignments.add().message_queue
        queue.id, queue.permission, queue.topic.name, queue.broker.name = -1, 4, request.topic.name, "bare"
        queue.broker.endpoints.CopyFrom(request.endpoints)

    def _send(self, request: Any, response: Any) -> None:
        for message in request.messages:
            response.entries.add(message_id=message.system_properties.message_id).status.code = _OK
            self._topics[message.topic.name].append(message)
        with self._arrived:
            self._arrived.notify_all()

    def _ack(self, request: Any, response: Any) -> None:
        for entry in request.entries:
            response.entries.add(message_id=entry.message_id, receipt_handle=entry.receipt_handle).status.code = _OK

    def _receive(self, request: Any, context: object) -> Iterator[Any]:
        response, stored = self._message_class("ReceiveMessageResponse"), self._topics[request.message_queue.topic.name]
        with self._arrived:
            self._arrived.wait_for(lambda: bool(stored), 5)
            messages = [stored.popleft() for _ in range(min(len(stored), request.batch_size))]
        status = response()
        status.status.code = _OK if messages else 40401
        yield status
        for message in messages:
            system = message.system_properties
            system.receipt_handle, system.delivery_attempt = system.message_id, 1
            yield response(message=message)
        last = response()
        last.delivery_timestamp.GetCurrentTime()
        yield last

    def _configure(self, requests: Iterator[Any], context: object) -> Iterator[Any]:
        for command in requests:
            command.status.code = _OK
            settings = command.settings
            settings.publishing.max_body_size = 4 << 20
            settings.backoff_policy.max_attempts = 3
            if settings.client_type != 1:
                settings.subscription.receive_batch_size = 32
                settings.subscription.long_polling_timeout.FromSeconds(20)
                settings.backoff_policy.customized_backoff.next.add().FromSeconds(1)
            yield command

    def close(self) -> None:
        self._server.stop(None).wait()


def send_officially(producer: Any, topic: str, count: int, window: int = 1) -> float:
    """Send messages, so many at a time; return the seconds."""
    import rocketmq

    begin, pending = time.perf_counter(), deque[Any]()
    for _ in range(count):
        message = rocketmq.Message()
        message.topic, message.body = topic, BODY
        if window == 1:
            producer.send(message)
            continue
        if len(pending) == window:
            pending.popleft().result()
        pending.append(producer.send_async(message))
    for result in pending:
        result.result()
    return time.perf_counter() - begin


def official_client() -> None:
    """Read lines of address, kind and count, and print the seconds of each."""
    import rocketmq

    producers: dict[str, Any] = {}
    for number, line in enumerate(sys.stdin):
        address, kind, count = line.split()
        configuration, topic = rocketmq.ClientConfiguration(address, rocketmq.Credentials()), f"{kind}-{number}"
        if address not in producers:
            producers[address] = rocketmq.Producer(configuration, ("warm",))
            producers[address].startup()
            send_officially(producers[address], "warm", 20)
        send_officially(producers[address], f"{topic}-route", 1)
        seconds = send_officially(producers[address], topic, int(count), 1 if kind == "send" else WINDOW)
        print(seconds, flush=True)


def grpc_servers(bench: Bench) -> Iterator[Any]:
    """Yield the addresses of librmq's server and of the stub, with a client."""
    from librmq.wire.grpc import GrpcServer

    with (
        bench.folder() as folder,
        Broker.open(folder / "broker", BrokerConfig(timers=TimerConfig())) as broker,
        GrpcServer(broker) as server,
        program("wire.official_client", HOME=str(folder)) as client,
    ):
        bare = BareStub()
        yield SimpleNamespace(librmq=server.address, bare=bare.address, client=client, bench=bench)
        bare.close()


def official(given: Any, _: Path, *, server: str, kind: str, count: int) -> float:
    """Return messages a second of the official client."""
    count = given.bench.count(count)
    given.client.stdin.write(f"{getattr(given, server)} {kind} {count}\n")
    given.client.stdin.flush()
    return count / float(given.client.stdout.readline())


# ------------------------------------------------------------------------------------------------------------- remoting


def serve_bare(folder: str) -> None:
    """Answer sends and pulls from memory; each pull with the bytes of the file ``pulled``, if it is there."""
    listening = socket.create_server(("127.0.0.1", 0))
    address = "{}:{}".format(*listening.getsockname())
    broker = {"brokerAddrs": {"0": address}, "brokerName": "bare", "cluster": "DefaultCluster"}
    queues = {"brokerName": "bare", "perm": 6, "readQueueNums": 4, "writeQueueNums": 4, "topicSysFlag": 0}
    route = {"brokerDatas": [broker], "filterServerTable": {}, "queueDatas": [queues]}
    clusters = {"brokerAddrTable": {"bare": broker}, "clusterAddrTable": {"DefaultCluster": ["bare"]}}
    bodies = {
        int(RequestCode.GET_ROUTEINFO_BY_TOPIC): json.dumps(route).encode(),
        int(RequestCode.GET_BROKER_CLUSTER_INFO): json.dumps(clusters).encode(),
    }
    file = Path(folder) / "pulled"
    print(listening.getsockname()[1], flush=True)

    def answer(frame: Frame, pulled: bytes) -> bytes:
        fields, body = {}, bodies.get(frame.code, b"")
        if frame.code == RequestCode.SEND_MESSAGE_V2:
            fields = to_fields(SentHeader("7F0000010000269400000000000000FF", 0, 1))
        elif frame.code == RequestCode.PULL_MESSAGE:
            fields, body = to_fields(PulledHeader(32, 0, 32)), pulled
        return encode(Frame(0, fields, body, frame.opaque, None, 1, "JAVA"))

    def serve(connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        reader, stored, pulled = FrameReader(), [], file.read_bytes() if file.exists() else b""
        while received := connection.recv(_RECEIVED):
            frames = list(reader.feed(received))
            stored += [frame.body for frame in frames]
            if answers := b"".join([answer(frame, pulled) for frame in frames if not frame.is_one_way]):
                connection.sendall(answers)

    while True:
        connection, _ = listening.accept()
        threading.Thread(target=serve, args=(connection,), daemon=True).start()


def serve_librmq(folder: str) -> None:
    """Serve a broker until standard input ends."""
    from librmq.wire.remoting import RemotingServer

    with Broker.open(Path(folder) / "broker") as broker, RemotingServer(broker) as server:
        broker.create_topic(TOPIC, 4)
        print(server.port, flush=True)
        sys.stdin.read()


def request_all(port: int, requests: list[bytes], window: int) -> list[Frame]:
    """Send requests, of which so many are under way; return the last answers."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        reader, sent, done, last = FrameReader(), 0, 0, [Frame(0)]
        while done < len(requests):
            more = min(window - (sent - done), len(requests) - sent)
            if more > 0:
                connection.sendall(b"".join(requests[sent : sent + more]))
                sent += more
            if answers := list(reader.feed(connection.recv(_RECEIVED))):
                done, last = done + len(answers), answers
        return last


def sends(count: int) -> list[bytes]:
    requests = []
    for number in range(count):
        properties = f"UNIQ_KEY\1{number:032X}\2WAIT\1true\2TAGS\1a"
        header = SendHeader("p", TOPIC, "TBW102", 4, number % 4, 0, 1_700_000_000_000, 0, properties)
        fields = REQUESTS[RequestCode.SEND_MESSAGE_V2].write(header)
        requests.append(encode(Frame(RequestCode.SEND_MESSAGE_V2, fields, BODY, number, language="JAVA")))
    return requests


def pulls(count: int) -> list[bytes]:
    """Return requests that pull the first 32 messages of a queue."""
    header = PullHeader("g", TOPIC, 0, 0, 32, 4, 0, 0, 1, "*")
    frames = [Frame(RequestCode.PULL_MESSAGE, to_fields(header), b"", number) for number in range(count)]
    return [encode(frame) for frame in frames]


def remoting_servers(bench: Bench) -> Iterator[Any]:
    """Yield the ports of librmq's server and of the stub, which has the bytes of a pull, and two kinds of requests."""
    with bench.folder() as folder, program("wire.serve_librmq", folder) as librmq:
        port = int(librmq.stdout.readline())
        request_all(port, sends(200), WINDOW)
        (folder / "pulled").write_bytes(request_all(port, pulls(1), 1)[0].body)
        with program("wire.serve_bare", folder) as bare:
            requests = {"send": (sends(bench.count(5_000)), WINDOW), "pull": (pulls(bench.count(1_000)), 8)}
            yield SimpleNamespace(librmq=port, bare=int(bare.stdout.readline()), requests=requests, bench=bench)


def remote(given: Any, _: Path, *, server: str, kind: str) -> Timed:
    requests, window = given.requests[kind]
    yield
    request_all(getattr(given, server), requests, window)
    yield len(requests)


def connected(given: Any, _: Path, *, count: int, one_way: bool) -> Timed:
    import librmq

    count = given.bench.count(count)
    with librmq.connect(f"127.0.0.1:{given.bare}") as route, librmq.Producer(route, "p") as producer:
        send: Any = producer.send_oneway if one_way else producer.send
        send(TOPIC, BODY)
        yield
        for _number in range(count):
            send(TOPIC, BODY)
        yield count


def cases() -> Iterator[Case]:
    for detail, kind, count in (("a send", "send", 2_000), ("an asynchronous send", "async", 4_000)):
        ours, bare = (partial(official, server=server, kind=kind, count=count) for server in ("librmq", "bare"))
        yield Case("gRPC", ours, detail, bare, "a bare stub", Target(0.8), setup=grpc_servers, limit=True,
                   needs=("rocketmq", "grpc"))  # fmt: skip
    for detail, kind, target in (("a send, 64 under way", "send", 0.6), ("a pull of 32 messages", "pull", 0.5)):
        both: list[Run] = [partial(remote, server=server, kind=kind) for server in ("librmq", "bare")]
        yield Case("remoting", both[0], detail, both[1], "a bare stub", Target(target), setup=remoting_servers,
                   limit=True)  # fmt: skip
    for detail, run, target in (
        ("acknowledged sends", partial(connected, count=2_000, one_way=False), 3_000),
        ("one-way sends", partial(connected, count=8_000, one_way=True), 20_000),
    ):
        yield Case("librmq.connect", run, detail, target=Target(target), unit="/s", setup=remoting_servers)


CASES: Final = list(cases())

if __name__ == "__main__":
    main("wire", __doc__, CASES)
