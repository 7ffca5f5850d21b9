"""Processes that share a store: sends of peers, and what they cost the owner, against TCP and other queues.

Owner, peers, servers and consumers are processes of their own, and the store is on disk. A peer of `librmq.share` is
compared with a client of `librmq.connect` at a `RemotingServer` of the same machine, with litequeue and huey in SQLite
from as many processes, and with the limit: an echo of the same bytes over a Unix socket. Bodies have 128 bytes. What is
under way is also compared with asyncio alone: the same bytes and 100 bytes of answer for each, without a store or a
codec.
"""

from __future__ import annotations

import asyncio
import json
import socket
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from benchmarks.frame import Bench, Case, Run, Target, main, program

BODY: Final = b"x" * 128
TOPIC: Final = "bench"
WINDOW: Final = 64
PACE: Final = 2_500
"""Sends a second of a peer beside the owner's."""
FRAME: Final = bytes(313) + BODY
"""As long as the frame that a peer sends for such a body."""


@contextmanager
def ready(call: str, *words: object) -> Iterator[Any]:
    """Start a function of this module in a process of its own, and wait until it is ready."""
    with program(f"share.{call}", *words) as process:
        process.stdout.readline()
        yield process


def ask(process: Any, kind: str, count: int) -> None:
    process.stdin.write(f"{kind} {count}\n")
    process.stdin.flush()


# ----------------------------------------------------------------------------------------------------------- processes


def sender(way: str, place: str) -> None:
    """Print the seconds in which this process does what each line of input names, as often as it says."""
    ways = {"litequeue": _litequeue, "huey": _huey, "echo": _echo, "bare": _bare}
    with ExitStack() as opened:
        do = ways.get(way, _of_route)(way, place, opened)
        print("ready", flush=True)
        for line in sys.stdin:
            kind, count = line.split()
            begin = time.perf_counter()
            answer = do(kind, int(count))
            print(json.dumps(time.perf_counter() - begin if answer is None else answer), flush=True)


async def by_window(send: Callable[[], Awaitable[None]], count: int) -> None:
    """Send from as many tasks as sends are under way, each one message after the other."""

    async def send_many() -> None:
        for _ in range(count // WINDOW):
            await send()

    await asyncio.gather(*(send_many() for _ in range(WINDOW)))


async def by_tasks(send: Callable[[], Awaitable[None]], count: int) -> None:
    """Send each message from a task of its own, and let a semaphore admit as many as are under way."""
    free = asyncio.Semaphore(WINDOW)

    async def send_one() -> None:
        async with free:
            await send()

    await asyncio.gather(*(send_one() for _ in range(count)))


def paced(send: Callable[[], object], count: int) -> None:
    begin = time.perf_counter()
    for number in range(count):
        send()
        time.sleep(max(0, begin + (number + 1) / PACE - time.perf_counter()))


def _of_route(way: str, place: str, opened: ExitStack) -> Any:
    import librmq

    route: Any = opened.enter_context(librmq.share(place) if way == "share" else librmq.connect(place))
    producer = opened.enter_context(librmq.Producer(route, "shop"))
    producer.send(TOPIC, BODY)
    times: list[float] = []
    listening: list[Any] = []

    def listen(message: Any) -> None:
        times.append(time.perf_counter() - float(message.body))

    async def send_async() -> None:
        await producer.send_async(TOPIC, BODY)

    def send(count: int) -> None:
        for _ in range(count):
            producer.send(TOPIC, BODY)

    def send_times(count: int) -> None:  # to the listener of another process
        for _ in range(count):
            producer.send("times", repr(time.perf_counter()).encode())
            time.sleep(0.002)

    def begin_listening(_: int) -> None:
        times.clear()
        if not listening:
            consumer = librmq.PushConsumer(route, "clock", consume_from=librmq.ConsumeFrom.FIRST)
            consumer.subscribe("times", listen)
            listening.append(opened.enter_context(consumer))

    def median(count: int) -> float:
        while len(times) < count:
            time.sleep(0.01)
        return 1000 * statistics.median(times)

    kinds: dict[str, Any] = {
        "send": send,
        "window": lambda count: asyncio.run(by_window(send_async, count)),
        "tasks": lambda count: asyncio.run(by_tasks(send_async, count)),
        "time": send_times,
        "pace": partial(paced, lambda: producer.send(TOPIC, BODY)),
        "take": _taking(route, producer, opened),
        "listen": begin_listening,
        "median": median,
    }
    return lambda kind, count: kinds[kind](count)


def _taking(route: Any, producer: Any, opened: ExitStack) -> Callable[[int], float]:
    """Return a function that sends messages, and returns the seconds in which they are received and acknowledged."""
    import librmq

    consumer = librmq.SimpleConsumer(route, "takers").start()
    opened.callback(consumer.shutdown)
    consumer.subscribe("taken")

    def take(count: int) -> float:
        consumer.receive(1, wait=0)  # a new group begins here
        for _ in range(count):
            producer.send("taken", BODY)
        begin, done = time.perf_counter(), 0
        while done < count:
            received = consumer.receive(1)
            consumer.ack(*received)
            done += len(received)
        return time.perf_counter() - begin

    return take


def _litequeue(way: str, place: str, opened: ExitStack) -> Any:
    from litequeue import LiteQueue

    queue = LiteQueue(place)
    text = BODY.decode()

    def do(kind: str, count: int) -> None:
        for _ in range(count):
            queue.put(text)

    return do


def _huey(way: str, place: str, opened: ExitStack) -> Any:
    from huey import SqliteHuey

    huey = SqliteHuey(filename=place, results=False, timeout=60)

    @huey.task()  # type: ignore[untyped-decorator]
    def charge(body: str) -> None:
        """Do nothing: only its enqueueing is measured."""

    text = BODY.decode()

    def do(kind: str, count: int) -> None:
        for _ in range(count):
            charge(text)

    return do


def _echo(way: str, place: str, opened: ExitStack) -> Any:
    connected = opened.enter_context(socket.socket(socket.AF_UNIX))
    connected.connect(place)

    def do(kind: str, count: int) -> None:
        for _ in range(count):
            connected.sendall(FRAME)
            connected.recv(4096)

    return do


class _Answers(asyncio.Protocol):
    """Frames of one connection, which begin with their length, each passed to a function."""

    def __init__(self, pass_on: Any) -> None:
        self._pass_on = pass_on
        self._held = b""
        self._frames: list[bytes] = []

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        data, begin = self._held + data, 0
        while len(data) - begin >= 4 and len(data) >= (end := begin + 4 + int.from_bytes(data[begin : begin + 4])):
            self._pass_on(self)
            begin = end
        self._held = data[begin:]

    def write(self, data: bytes) -> None:
        """Write bytes together with what else is written in this turn."""
        if not self._frames:
            asyncio.get_running_loop().call_soon(self._flush)
        self._frames.append(len(data).to_bytes(4) + data)

    def _flush(self) -> None:
        self._transport.write(b"".join(self._frames))
        self._frames.clear()


def _bare(way: str, place: str, opened: ExitStack) -> Any:
    async def pipeline(kind: str, count: int) -> None:
        loop, waiting = asyncio.get_running_loop(), deque[asyncio.Future[None]]()
        transport, server = await loop.create_unix_connection(
            lambda: _Answers(lambda _: waiting.popleft().set_result(None)), place
        )

        async def send() -> None:
            answer = loop.create_future()
            waiting.append(answer)
            server.write(FRAME)
            await answer

        await (by_window if kind == "window" else by_tasks)(send, count)
        transport.close()

    return lambda kind, count: asyncio.run(pipeline(kind, count))


async def _answer_bare(place: str) -> None:
    answer = bytes(100)
    await asyncio.get_running_loop().create_unix_server(lambda: _Answers(lambda client: client.write(answer)), place)
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)


def owner(way: str, place: str) -> None:
    """Own a store, or echo bytes, until the input ends; the owner's own sends are measured like those of others."""
    if way == "echo":
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(place)
        listening.listen()
        print("ready", flush=True)
        while True:
            connected, _ = listening.accept()
            threading.Thread(target=_answer, args=(connected,), daemon=True).start()
    if way == "bare":
        asyncio.run(_answer_bare(place))
        return
    if way == "share":
        sender(way, place)
        return
    import librmq
    from librmq.wire.remoting import RemotingServer

    with librmq.Broker.open(place) as broker, RemotingServer(broker) as server:
        Path(f"{place}.address").write_text(server.address, "utf-8")
        print("ready", flush=True)
        sys.stdin.read()


def _answer(connected: socket.socket) -> None:
    while received := connected.recv(4096):
        connected.sendall(received)


# ------------------------------------------------------------------------------------------------------------ the cases


def processes(bench: Bench) -> Iterator[Any]:
    """Yield two clients of each way, beside an owner each."""
    with bench.folder() as folder, ExitStack() as opened:
        owners, clients = {}, {}
        for way in ("share", "connect", "litequeue", "huey", "echo", "bare"):
            place = str(folder / way)
            if way in ("share", "connect", "bare"):
                owners[way] = opened.enter_context(ready("owner", way, place))
            elif way == "echo":
                echoing = ready("owner", way, place)
                process = echoing.__enter__()
                opened.callback(process.kill)
                owners[way] = process
            if way == "connect":
                place = Path(f"{place}.address").read_text("utf-8")
            clients[way] = [opened.enter_context(ready("sender", way, place)) for _ in range(2)]
        alone = opened.enter_context(ready("owner", "share", folder / "alone"))
        yield SimpleNamespace(owners=owners, clients=clients, alone=alone, bench=bench)


def rate_of(given: Any, _: Path, *, way: str, kind: str = "send", count: int, senders: int = 1) -> float:
    """Return the sends a second, or what ``kind`` does, of some processes together."""
    count = given.bench.count(count)
    working = given.clients[way][:senders]
    for process in working:
        ask(process, kind, count)
    return senders * count / max(float(process.stdout.readline()) for process in working)


def own_rate(given: Any, _: Path, *, is_shared: bool, count: int, pause_s: float = 0) -> float:
    """Return the sends a second of an owner, with peers that have sent, or without any, after a pause."""
    count, process = given.bench.count(count), given.owners["share"] if is_shared else given.alone
    if is_shared:
        ask(given.clients["share"][0], "send", 100)
        given.clients["share"][0].stdout.readline()
    time.sleep(pause_s)
    ask(process, "send", count)
    return count / float(process.stdout.readline())


def own_rate_beside(given: Any, _: Path, *, count: int) -> float:
    """Return the sends a second of an owner while two peers send `PACE` a second each."""
    count, peers = given.bench.count(count), given.clients["share"]
    for peer in peers:
        ask(peer, "send", 100)
        peer.stdout.readline()
    for peer in peers:
        ask(peer, "pace", round(PACE * (count / 20_000 + 0.5)))  # for longer than the owner takes
    time.sleep(0.1)
    ask(given.owners["share"], "send", count)
    took_s = float(given.owners["share"].stdout.readline())
    for peer in peers:
        peer.stdout.readline()
    return count / took_s


def latency(given: Any, _: Path, *, way: str, count: int) -> float:
    """Return the median from a send of a process to the listener of another one, in ms."""
    count, (first, second) = given.bench.count(count), given.clients[way]
    ask(second, "listen", 0)
    second.stdout.readline()
    ask(first, "time", count)
    first.stdout.readline()
    ask(second, "median", count)
    return float(second.stdout.readline())


def cases() -> Iterator[Case]:
    def sends(way: str, senders: int = 1, kind: str = "send") -> Run:
        # Many, because peers append by themselves only after their first sends; few where that takes seconds.
        count = 4_000 if kind == "send" and way in ("connect", "huey") else 19_200
        return partial(rate_of, way=way, kind=kind, count=count, senders=senders)

    one, two, lite = sends("share"), sends("share", 2), sends("litequeue", 2)
    case = partial(Case, "a peer's sends", setup=processes)
    yield case(one, "one by one", target=Target(10_000), unit="/s")
    yield case(one, "one by one", sends("connect"), "TCP", Target(1), limit=True)
    yield case(one, "one by one", sends("echo"), "an echo over the socket", limit=True)
    yield case(two, "by two peers", target=Target(120_000, pure=Target(60_000)), unit="/s")
    # Nothing is required here, because what two echoes reach changes by two to four times from run to run.
    yield case(two, "by two peers", sends("echo", 2), "an echo over the socket", limit=True)
    yield case(two, "by two peers", sends("connect", 2), "TCP", limit=True)
    yield case(two, "by two peers", lite, "litequeue from two", Target(2), needs=("litequeue",))
    yield case(two, "by two peers", sends("huey", 2), "huey from two", Target(2), needs=("huey",))
    for kind, name in (("window", f"{WINDOW} under way"), ("tasks", f"{WINDOW} under way, a task for each message")):
        pipelined = sends("share", kind=kind)
        yield case(pipelined, name, target=Target(reach=40_000 if kind == "window" else None), unit="/s")
        yield case(pipelined, name, sends("connect", kind=kind), "TCP", limit=True)
        yield case(pipelined, name, sends("bare", kind=kind), "asyncio alone", limit=True)
        yield case(pipelined, name, lite, "litequeue from two", Target(1.5 if kind == "window" else None),
                   needs=("litequeue",))  # fmt: skip
    taken = partial(rate_of, way="share", kind="take", count=2_000)
    case = partial(Case, "a peer receives and acknowledges", taken, "one by one", setup=processes)
    yield case(sends("echo"), "an echo over the socket", limit=True)
    yield case(partial(taken, way="connect"), "TCP", limit=True)
    shared, connected = (partial(latency, way=way, count=200) for way in ("share", "connect"))
    yield Case("peer to peer", shared, "send to listener, median", target=Target(1, at_most=True), unit="ms",
               setup=processes)  # fmt: skip
    yield Case("peer to peer", shared, "send to listener, median", connected, "TCP", unit="ms", limit=True,
               setup=processes)  # fmt: skip
    with_peers, alone = (partial(own_rate, is_shared=is_shared, count=20_000) for is_shared in (True, False))
    for run, name, target in (
        (partial(with_peers, pause_s=1.5), "with idle peers", Target(0.95)),
        (with_peers, "right after a peer's sends", Target()),
        (partial(own_rate_beside, count=20_000), f"beside peers that send {2 * PACE:,} a second", Target(0.9)),
    ):
        yield Case("the owner's sends", run, name, alone, "no peers", target, limit=True, setup=processes)


CASES: Final = list(cases())

if __name__ == "__main__":
    main("share", __doc__, CASES)
