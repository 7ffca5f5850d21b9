"""The server and the client of the 4.x protocol, against a bare stub: parts of ``benchmarks.wire``.

Server, stub and load are processes of their own. The stub reads and writes the same frames by the same code, and does
nothing else. ``python -m benchmarks.wire_remoting stub|librmq FOLDER`` serves, and prints its port first.
"""

from __future__ import annotations

import json
import socket
import statistics
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Final, Self

from benchmarks.common import CHECKOUT, Bench, Measure, Row, Run, Target, compare, rate
from librmq.wire.remoting.frames import Frame, FrameReader, encode, to_fields
from librmq.wire.remoting.headers import PulledHeader, PullHeader, RequestCode, SendHeader, SentHeader

SENDS: Final = 5_000
PULLS: Final = 1_000
CLIENT_SENDS: Final = {"acknowledged": 2_000, "one-way": 8_000}
CLIENT_TARGETS: Final = {"acknowledged": 3_000, "one-way": 20_000}
WINDOW: Final = 64
PULL_WINDOW: Final = 8
BODY: Final = b"x" * 1024
TOPIC: Final = "bench"
_RECEIVED: Final = 256 << 10


def serve_bare(folder: Path) -> None:
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
    print(listening.getsockname()[1], flush=True)

    def answer(frame: Frame, pulled: bytes) -> bytes:
        fields, body = {}, bodies.get(frame.code, b"")
        if frame.code == RequestCode.SEND_MESSAGE_V2:
            fields = to_fields(SentHeader("7F0000010000269400000000000000FF", 0, 1))
        elif frame.code == RequestCode.PULL_MESSAGE:
            fields, body = to_fields(PulledHeader(32, 0, 32)), pulled
        return encode(Frame(0, fields, body, frame.opaque, None, 1, "JAVA"))

    def serve(connected: socket.socket) -> None:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        file = folder / "pulled"
        reader, kept, pulled = FrameReader(), [], file.read_bytes() if file.exists() else b""
        while received := connected.recv(_RECEIVED):
            frames = list(reader.feed(received))
            kept += [frame.body for frame in frames]
            if answers := b"".join([answer(frame, pulled) for frame in frames if not frame.is_one_way]):
                connected.sendall(answers)

    while True:
        connected, _ = listening.accept()
        threading.Thread(target=serve, args=(connected,), daemon=True).start()


def serve_librmq(folder: Path) -> None:
    """Serve a broker until standard input ends."""
    from librmq.broker import Broker
    from librmq.wire.remoting import RemotingServer

    with Broker.open(folder / "broker") as broker, RemotingServer(broker) as server:
        broker.create_topic(TOPIC, 4)
        print(server.port, flush=True)
        sys.stdin.read()


class Served:
    """A server's process."""

    def __init__(self, kind: str, folder: Path) -> None:
        # The checkout is the last place to import from, so that the installed librmq serves.
        code = (
            f"import sys, pathlib; sys.path.append({str(CHECKOUT)!r}); from benchmarks import wire_remoting; "
            f"wire_remoting.serve_{'bare' if kind == 'stub' else kind}(pathlib.Path(sys.argv[1]))"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", code, folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


def ask_all(port: int, requests: list[bytes], window: int) -> list[Frame]:
    """Send requests, of which so many are under way; return the last answers."""
    with socket.create_connection(("127.0.0.1", port)) as connected:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        reader, sent, done, last = FrameReader(), 0, 0, [Frame(0)]
        while done < len(requests):
            more = min(window - (sent - done), len(requests) - sent)
            if more > 0:
                connected.sendall(b"".join(requests[sent : sent + more]))
                sent += more
            if found := list(reader.feed(connected.recv(_RECEIVED))):
                done, last = done + len(found), found
        return last


def sends(count: int) -> list[bytes]:
    """Return requests that send messages."""
    made = []
    for number in range(count):
        properties = f"UNIQ_KEY\1{number:032X}\2WAIT\1true\2TAGS\1a"
        header = SendHeader("p", TOPIC, "TBW102", 4, number % 4, 0, 1_700_000_000_000, 0, properties)
        fields = to_fields(header, by_letters=True)
        made.append(encode(Frame(RequestCode.SEND_MESSAGE_V2, fields, BODY, number, language="JAVA")))
    return made


def pulls(count: int) -> list[bytes]:
    """Return requests that pull the first 32 messages of a queue."""
    header = PullHeader("g", TOPIC, 0, 0, 32, 4, 0, 0, 1, "*")
    frames = [Frame(RequestCode.PULL_MESSAGE, to_fields(header), b"", number) for number in range(count)]
    return [encode(frame) for frame in frames]


def server_part(requests: list[bytes], window: int, case: str, target: Target) -> Measure:
    """Return the part that compares the server with the stub, for some requests."""

    def part(bench: Bench) -> list[Row]:
        asked = requests[: bench.count(len(requests))]
        with ExitStack() as ends:
            folder = ends.enter_context(bench.folder())
            ours = ends.enter_context(Served("librmq", folder))
            ask_all(ours.port, sends(200), WINDOW)
            (folder / "pulled").write_bytes(ask_all(ours.port, pulls(1), 1)[0].body)
            bare = ends.enter_context(Served("stub", folder))

            def run_at(port: int) -> Run:
                def run(_: Path) -> float:
                    begin = time.perf_counter()
                    ask_all(port, asked, window)
                    return len(asked) / (time.perf_counter() - begin)

                return run

            rates = bench.interleave({"librmq": run_at(ours.port), "bare": run_at(bare.port)})
        return [compare("remoting", case, "a bare stub", rates["librmq"], rates["bare"], target, limit=True)]

    return part


def client_part(kind: str) -> Measure:
    """Return the part that measures sends of ``librmq.connect`` to the stub."""

    def part(bench: Bench) -> list[Row]:
        import librmq

        count = bench.count(CLIENT_SENDS[kind])
        with ExitStack() as ends:
            folder = ends.enter_context(bench.folder())
            bare = ends.enter_context(Served("stub", folder))
            route = ends.enter_context(librmq.connect(f"127.0.0.1:{bare.port}"))
            producer = ends.enter_context(librmq.Producer(route, "p"))
            send = producer.send if kind == "acknowledged" else producer.send_oneway

            def run(_: Path) -> float:
                begin = time.perf_counter()
                for _number in range(count):
                    send(TOPIC, BODY)
                return count / (time.perf_counter() - begin)

            rates = bench.interleave({"librmq": run})["librmq"]
        measured, target = statistics.median(rates), Target(CLIENT_TARGETS[kind])
        return [Row("librmq.connect", f"{kind} sends", "", measured, "/s", target, ours=rate(measured, "msg/s"))]

    return part


PARTS: Final[dict[str, Measure]] = {
    "remoting": server_part(sends(SENDS), WINDOW, "a send, 64 under way", Target(0.6)),
    "pull": server_part(pulls(PULLS), PULL_WINDOW, "a pull of 32 messages", Target(0.5)),
    "connect": client_part("acknowledged"),
    "oneway": client_part("one-way"),
}
