"""Time from a send to its listener: with threads, by hand, explored, delayed; compared with other brokers and queues.

"One in flight" sends a message and waits until its listener has run before it sends the next. A stream sends as fast as
it can and waits for the last message. In both, librmq's stores are on disk. dramatiq's StubBroker keeps messages in
memory, and litequeue in SQLite (put, get and done, in one thread, without a handover). Two bare `queue.Queue` show the
cost of a handover in both directions. By hand and exploring, stores are in memory.

``python -m benchmarks.clients [--rounds N] [--rows one,stream,…] [--quick] [--write]``
"""

from __future__ import annotations

import logging
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from typing import Any, Final

from benchmarks.common import Bench, Measure, Row, Run, Stopwatch, Target, command, compare, cost, rate
from librmq.broker import Broker
from librmq.client.producer import Producer
from librmq.config import StoreConfig
from librmq.consumer import PushConsumer
from librmq.files.memory import MemoryFiles
from librmq.message.message import Message
from librmq.runtime.runner import ManualRunner
from librmq.store import MessageStore

BODY: Final = b"x" * 128
PACKAGES: Final = ("librmq", "numpy", "sortedcontainers", "dramatiq", "litequeue")
IDLE_S: Final = 5.0


class Awaited:
    """Counter of messages that wakes a thread at a given number."""

    def __init__(self) -> None:
        self._count = 0
        self._wanted = sys.maxsize
        self._reached = threading.Event()

    def arrived(self, *_: object) -> None:
        self._count += 1
        if self._count == self._wanted:
            self._reached.set()

    def expect(self, count: int) -> None:
        self._reached.clear()
        self._wanted = self._count + count

    def wait(self) -> None:
        if not self._reached.wait(60):
            raise TimeoutError(f"{self._count} of {self._wanted} messages came")


@contextmanager
def one_consumer(folder: Path, listener: Callable[[Any], object], threads: int) -> Iterator[Producer]:
    """Open a broker on disk with a running consumer and a producer whose first message was delivered."""
    with Broker.open(folder / "broker", store_config=StoreConfig()) as broker:
        broker.create_topic("T", 4)
        consumer = PushConsumer(broker, group="readers", threads=threads)
        consumer.subscribe("T")(listener)
        consumer.start()
        producer = Producer(broker, "writers").start()
        yield producer
        consumer.shutdown()


def messages(count: int) -> list[Message]:
    return [Message("T", BODY, tags="tag", keys=f"key-{number}") for number in range(count)]


# ------------------------------------------------------------------------------------------------------------ threads


def librmq_threads(count: int, *, in_flight: int) -> Run:
    """Return messages a second from send to listener."""

    def run(folder: Path) -> float:
        awaited = Awaited()
        with one_consumer(folder, awaited.arrived, 4) as producer:
            made = messages(count)
            awaited.expect(1)
            producer.send(made[0])
            awaited.wait()
            with Stopwatch() as watch:
                for begin in range(0, count, in_flight):
                    part = made[begin : begin + in_flight]
                    awaited.expect(len(part))
                    for message in part:
                        producer.send(message)
                    awaited.wait()
            return count / watch.seconds

    return run


def stub_broker(count: int, *, in_flight: int) -> Run:
    """Return the same for dramatiq, with an actor and a worker of four threads."""

    def run(folder: Path) -> float:
        import dramatiq
        from dramatiq.brokers.stub import StubBroker

        broker = StubBroker()
        broker.emit_after("process_boot")
        awaited = Awaited()

        def arrived(body: str) -> None:
            awaited.arrived()

        declare: Any = dramatiq.actor
        actor = declare(arrived, broker=broker, actor_name="arrived")
        worker = dramatiq.Worker(broker, worker_threads=4)
        worker.start()
        try:
            body = BODY.decode()
            awaited.expect(1)
            actor.send(body)
            awaited.wait()
            with Stopwatch() as watch:
                for begin in range(0, count, in_flight):
                    part = min(in_flight, count - begin)
                    awaited.expect(part)
                    for _ in range(part):
                        actor.send(body)
                    awaited.wait()
        finally:
            worker.stop()
            broker.close()
        return count / watch.seconds

    return run


def litequeue(count: int, *, in_flight: int) -> Run:
    """Put, get and done."""

    def run(folder: Path) -> float:
        from litequeue import LiteQueue

        queue = LiteQueue(folder / "litequeue.db")
        queue.conn.execute("PRAGMA synchronous = OFF")
        body = BODY.decode()
        with Stopwatch() as watch:
            for begin in range(0, count, in_flight):
                part = min(in_flight, count - begin)
                for _ in range(part):
                    queue.put(body)
                for _ in range(part):
                    taken = queue.pop()
                    assert taken is not None
                    queue.done(taken.message_id)
        queue.conn.close()
        return count / watch.seconds

    return run


def bare_queues(count: int) -> Run:
    """Return round trips a second between two threads by two queues, the cost of a handover without any work."""

    def run(folder: Path) -> float:
        there: Queue[int | None] = Queue()
        back: Queue[int] = Queue()

        def echo() -> None:
            while (number := there.get()) is not None:
                back.put(number)

        thread = threading.Thread(target=echo)
        thread.start()
        try:
            with Stopwatch() as watch:
                for number in range(count):
                    there.put(number)
                    back.get()
        finally:
            there.put(None)
            thread.join()
        return count / watch.seconds

    return run


def to_listener(bench: Bench, path: str, count: int, in_flight: int, targets: tuple[Target, Target]) -> list[Row]:
    variants = {"librmq": librmq_threads(count, in_flight=in_flight)}
    if bench.has("dramatiq"):
        variants["dramatiq StubBroker"] = stub_broker(max(count // 4, 1), in_flight=in_flight)
    if bench.has("litequeue"):
        variants["litequeue"] = litequeue(max(count // 4, 1), in_flight=in_flight)
    if in_flight == 1:
        variants["two bare queue.Queue"] = bare_queues(count)
    rates = bench.interleave(variants)
    rows = [
        compare(path, "", other, rates["librmq"], rates[other], target)
        for other, target in zip(("dramatiq StubBroker", "litequeue"), targets, strict=True)
        if other in rates
    ]
    if in_flight == 1:
        other = "two bare queue.Queue"
        rows.append(compare(path, "", other, rates["librmq"], rates[other], limit=True))
    return rows


def one_in_flight(bench: Bench) -> list[Row]:
    """Measure one message at a time: send, listener, next message."""
    return to_listener(
        bench, "send to listener, one in flight", bench.count(4_000), 1, (Target(1.5, 2.5), Target(3, 5))
    )


def stream(bench: Bench) -> list[Row]:
    """Measure messages sent as fast as possible, until the last listener has run."""
    count = bench.count(40_000)
    return to_listener(bench, "send to listener, a stream", count, count, (Target(4, 5), Target(10, 20)))


# ------------------------------------------------------------------------------------------------- by hand, explored


def by_hand(count: int) -> Run:
    """Return messages a second with the manual runner, one in flight, in memory."""

    def run(_: Path) -> float:
        runner = ManualRunner()
        seen: list[object] = []
        with Broker.open("/broker", store_config=StoreConfig(), files=MemoryFiles(), runner=runner) as broker:
            consumer = PushConsumer(broker, group="readers")
            consumer.subscribe("T")(seen.append)
            consumer.start()
            producer = Producer(broker, "writers").start()
            made = messages(count)
            producer.send(made[0])
            runner.advance(1000)
            seen.clear()
            with Stopwatch() as watch:
                for message in made:
                    producer.send(message)
                    runner.advance()
            if len(seen) != count:
                raise RuntimeError(f"{len(seen)} of {count} messages came")
            consumer.shutdown()
        return count / watch.seconds

    return run


def hand(bench: Bench) -> list[Row]:
    """Compare the manual runner with threads, one message in flight."""
    count = bench.count(4_000)
    rates = bench.interleave({"by hand": by_hand(count), "threads": librmq_threads(count, in_flight=1)})
    return [
        compare(
            "send to listener by hand", "one in flight", "librmq by threads", rates["by hand"], rates["threads"],
            Target(3, 4),
        )
    ]  # fmt: skip


def ten_messages(rmq: Any) -> None:
    """The explored test: ten messages, two of which fail once."""
    seen: list[bytes] = []

    def listener(message: Any) -> None:
        seen.append(message.body)
        if message.body in (b"3", b"7") and message.reconsume_times == 0:
            raise ValueError("once")

    rmq.consumer("readers", fail_fast=False).subscribe("T")(listener)
    producer = rmq.producer()
    for number in range(10):
        producer.send("T", b"%d" % number)
    rmq.advance(minutes=1)
    if set(seen) != {b"%d" % number for number in range(10)}:
        raise AssertionError(f"lost: {seen}")


def explored(bench: Bench) -> list[Row]:
    """Measure schedules a second of a test with ten messages."""
    from librmq.testing.exploration import explore

    runs = bench.count(400)
    logging.getLogger("librmq").setLevel(logging.CRITICAL)
    rates = []
    for number in range(bench.rounds + 1):
        with Stopwatch() as watch:
            explore(ten_messages, runs)
        if number:
            rates.append(runs / watch.seconds)
    measured = statistics.median(rates)
    return [
        Row("explored schedules", "ten messages", "", measured, "/s", Target(200, 1000), ours=rate(measured, "runs/s"))
    ]


# -------------------------------------------------------------------------------------------------------- what it costs


def to_store(count: int, delay_level: int = 0) -> list[Message]:
    """Return messages with unique ids, as a producer passes them to the store."""
    return [
        Message("T", BODY, tags="tag", keys=f"key-{number}", delay_level=delay_level, unique_key=f"{number:032X}")
        for number in range(count)
    ]


def single_appends(count: int) -> Run:
    """Return messages a second that a bare store appends."""

    def run(folder: Path) -> float:
        made = to_store(count)
        with MessageStore.open(folder / "store", StoreConfig()) as store:
            store.append(made[0])
            with Stopwatch() as watch:
                for message in made:
                    store.append(message)
        return count / watch.seconds

    return run


def delayed_messages(count: int) -> Run:
    """Return messages a second that are stored with a delay and delivered, without clients.

    The schedule gets a later time, so nothing waits until they are due. As during single appends, a thread of the store
    flushes.
    """

    def run(folder: Path) -> float:
        made = to_store(count, delay_level=1)
        with Broker.open(folder / "broker", store_config=StoreConfig()) as broker:
            broker.create_topic("T", 1)
            with Stopwatch() as watch:
                for message in made:
                    broker.store.append(message)
                with broker.runner.lock:
                    broker._parts.deliveries.schedule.run_due(broker.runner.now_ms() + 2_000)
            if sum(1 for _ in broker.messages("T")) != count:
                raise RuntimeError("not all were delivered")
        return count / watch.seconds

    return run


def delayed(bench: Bench) -> list[Row]:
    """Compare a delayed message, stored and delivered, with single appends."""
    count = bench.count(10_000)
    rates = bench.interleave({"append": single_appends(count), "delayed": delayed_messages(count)})
    return [
        cost(
            "a delayed message, stored and delivered",
            "a single append",
            rates["delayed"],
            rates["append"],
            Target(3, 2.3, at_most=True),
            unit="msg/s",
        )
    ]


def idle(bench: Bench) -> list[Row]:
    """Measure the share of a core that twenty idle consumers use."""
    with bench.folder() as folder, Broker.open(folder / "broker", store_config=StoreConfig()) as broker:
        broker.create_topic("T", 4)
        consumers = [PushConsumer(broker, group=f"group-{number}") for number in range(20)]
        for consumer in consumers:
            consumer.subscribe("T")(lambda message: None)
            consumer.start()
        time.sleep(1)
        begin = time.process_time()
        time.sleep(IDLE_S * bench.scale)
        share = 100 * (time.process_time() - begin) / (IDLE_S * bench.scale)
        for consumer in consumers:
            consumer.shutdown()
    return [Row("an idle application with 20 consumers", "", "", share, "% of a core", Target(1, at_most=True))]


ROWS: Final[dict[str, Measure]] = {
    "one": one_in_flight,
    "stream": stream,
    "hand": hand,
    "explored": explored,
    "delayed": delayed,
    "idle": idle,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, show the table, and return the exit status."""
    return command("clients", __doc__ or "", ROWS, PACKAGES, arguments)


if __name__ == "__main__":
    sys.exit(main())
