"""Time from a send to its listener: with threads, by hand, explored, delayed; compared with other brokers and queues.

"One in flight" sends a message and waits until its listener has run before it sends the next. A stream sends as fast as
it can and waits for the last message. In both, librmq's stores are on disk. dramatiq's StubBroker keeps messages in
memory, and litequeue in SQLite: put, get and done in one thread. No library that hands messages to another thread can
reach that where wake-ups are slow, so it is shown and not required. An append of librmq's and two bare `queue.Queue`
show the cost of storing a message and of a handover in both directions, and are the limit; the way back is such a queue
in all of them. By hand and exploring, stores are in memory.

Some targets are those of one code. Python code has to do 4 times StubBroker's stream, and the compiled core 6 times. A
delayed message may cost 3 appends of Python code, and 4 of the core, whose single append is compiled whole.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from queue import Empty, Queue
from typing import Any, Final

from benchmarks.frame import Bench, Case, Run, Target, Timed, main
from librmq.broker import Broker
from librmq.client.producer import Producer
from librmq.config import StoreConfig
from librmq.consumer import PullConsumer, PushConsumer, SimpleConsumer
from librmq.files._memory import MemoryFiles
from librmq.message.message import Message
from librmq.protocol import ConsumeFrom
from librmq.runtime import ManualRunner
from librmq.store import MessageStore

BODY: Final = b"x" * 128
SINGLE: Final = 4_000
STREAM: Final = 40_000
DELAYED: Final = 10_000
STORED: Final = 10_000
SETTLED: Final = 8_000


class Awaited:
    """Counter of messages that wakes a thread at a given number, by a queue as the bare ones have it."""

    def __init__(self) -> None:
        self._count = 0
        self._goal = sys.maxsize
        self._back = Queue[int]()

    def arrived(self, *_: object) -> None:
        self._count += 1
        if self._count == self._goal:
            self._back.put(self._goal)

    def sent(self, send: Callable[[Any], object], messages: list[Any]) -> None:
        """Send messages, and wait until all of them have arrived."""
        self._goal = self._count + len(messages)
        for message in messages:
            send(message)
        try:
            self._back.get(timeout=60)
        except Empty:
            raise TimeoutError(f"{self._count} of {self._goal} messages came") from None

    def timed(self, send: Callable[[Any], object], messages: list[Any], in_flight: int | None) -> Timed:
        """Send the first message, and then, timed, all of them, so many at a time."""
        self.sent(send, messages[:1])
        yield
        for begin in range(0, len(messages), in_flight or len(messages)):
            self.sent(send, messages[begin : begin + in_flight] if in_flight else messages)
        yield len(messages)


def make_messages(count: int, *, with_ids: bool = False, delay_level: int | None = None) -> list[Message]:
    """Make messages, for the store with the unique ids that a producer gives."""
    return [
        Message("T", BODY, tags="tag", keys=f"key-{number}", delay_level=delay_level,
                unique_key=f"{number:032X}" if with_ids else None)
        for number in range(count)
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- threads


def by_threads(bench: Bench, folder: Path, *, count: int, in_flight: int | None) -> Timed:
    """Send to a concurrent listener of a broker on disk."""
    awaited = Awaited()
    with Broker.open(folder / "broker", store_config=StoreConfig()) as broker:
        broker.create_topic("T", 4)
        consumer = PushConsumer(broker, group="readers", threads=4)
        consumer.subscribe("T")(awaited.arrived)
        consumer.start()
        producer = Producer(broker, "writers").start()
        yield from awaited.timed(producer.send, make_messages(bench.count(count)), in_flight)
        consumer.shutdown()


def stub_broker(bench: Bench, _: Path, *, count: int, in_flight: int | None) -> Timed:
    """Send to an actor of dramatiq, with a worker of four threads."""
    import dramatiq
    from dramatiq.brokers.stub import StubBroker

    broker, awaited = StubBroker(), Awaited()
    broker.emit_after("process_boot")
    declare: Any = dramatiq.actor
    actor = declare(lambda body: awaited.arrived(), broker=broker, actor_name="arrived")
    worker = dramatiq.Worker(broker, worker_threads=4)
    worker.start()
    try:
        yield from awaited.timed(actor.send, [BODY.decode()] * max(bench.count(count) // 4, 1), in_flight)
    finally:
        worker.stop()
        broker.close()


def litequeue(bench: Bench, folder: Path, *, count: int, in_flight: int | None) -> Timed:
    """Put, get and done."""
    from litequeue import LiteQueue

    queue, body, count = LiteQueue(folder / "litequeue.db"), BODY.decode(), max(bench.count(count) // 4, 1)
    queue.conn.execute("PRAGMA synchronous = OFF")
    yield
    for begin in range(0, count, in_flight or count):
        part = min(in_flight or count, count - begin)
        for _ in range(part):
            queue.put(body)
        for _ in range(part):
            message = queue.pop()
            assert message is not None
            queue.done(message.message_id)
    yield count
    queue.conn.close()


def bare_queues(bench: Bench, folder: Path, *, count: int) -> Timed:
    """Append each message, and pass it between two threads by two queues: what each broker on disk has to do."""
    there, back, messages = Queue[Message | None](), Queue[Message](), make_messages(bench.count(count), with_ids=True)

    def echo() -> None:
        while (message := there.get()) is not None:
            back.put(message)

    thread = threading.Thread(target=echo)
    thread.start()
    with MessageStore.open(folder / "store", StoreConfig()) as store:
        store.append(messages[0])
        yield
        for message in messages:
            store.append(message)
            there.put(message)
            back.get()
        yield len(messages)
        there.put(None)
        thread.join()


# ------------------------------------------------------------------------------------------ one by one, and settled


def one_by_one(bench: Bench, folder: Path, *, is_pull: bool) -> Timed:
    """Poll a message and commit, or receive it and acknowledge it, before the next one."""
    messages = make_messages(bench.count(SETTLED), with_ids=True)
    with Broker.open(folder / "broker", store_config=StoreConfig()) as broker:
        broker.create_topic("T", 1)
        for message in messages:
            broker.store.append(message)
        done = 0
        if is_pull:
            pull = PullConsumer(broker, "readers", pull_batch_size=1, auto_commit=False, consume_from=ConsumeFrom.FIRST)
            pull.subscribe("T")
            with pull:
                yield
                while done < len(messages):
                    done += len(pull.poll())
                    pull.commit()
                yield done
        else:
            with SimpleConsumer(broker, "readers") as simple:
                simple.subscribe("T")
                broker.reset_group("readers", "T", to="begin")
                yield
                while done < len(messages):
                    received = simple.receive(1)
                    simple.ack(*received)
                    done += len(received)
                yield done


def litequeue_taken(bench: Bench, folder: Path) -> Timed:
    """Take each message and note that it is done."""
    from litequeue import LiteQueue

    queue, count = LiteQueue(folder / "litequeue.db"), max(bench.count(SETTLED) // 4, 1)
    queue.conn.execute("PRAGMA synchronous = OFF")
    for _ in range(count):
        queue.put(BODY.decode())
    yield
    while (message := queue.pop()) is not None:
        queue.done(message.message_id)
    yield count
    queue.conn.close()


# -------------------------------------------------------------------------------------------------- by hand, explored


def by_hand(bench: Bench, _: Path) -> Timed:
    """Send with the manual runner, one message in flight, in memory."""
    runner, bodies, messages = ManualRunner(), list[object](), make_messages(bench.count(SINGLE))
    with Broker.open("/broker", store_config=StoreConfig(), files=MemoryFiles(), runner=runner) as broker:
        consumer = PushConsumer(broker, group="readers")
        consumer.subscribe("T")(bodies.append)
        consumer.start()
        producer = Producer(broker, "writers").start()
        producer.send(messages[0])
        runner.advance(1000)
        bodies.clear()
        yield
        for message in messages:
            producer.send(message)
            runner.advance()
        yield len(messages)
        assert len(bodies) == len(messages)
        consumer.shutdown()


def ten_messages(rmq: Any) -> None:
    """The explored test: ten messages, two of which fail once."""
    bodies: list[bytes] = []

    def listener(message: Any) -> None:
        bodies.append(message.body)
        if message.body in (b"3", b"7") and message.reconsume_times == 0:
            raise ValueError("once")

    rmq.consumer("readers", fail_fast=False).subscribe("T")(listener)
    producer = rmq.producer()
    for number in range(10):
        producer.send("T", b"%d" % number)
    rmq.advance(minutes=1)
    assert set(bodies) == {b"%d" % number for number in range(10)}


def explored(bench: Bench, _: Path) -> Timed:
    from librmq.testing.exploring._exploration import explore

    yield
    explore(ten_messages, bench.count(400))
    yield bench.count(400)


def from_store(bench: Bench, folder: Path) -> Timed:
    """Read a store, deliver its messages to a listener under the test's clock, and check history and store."""
    from librmq.testing import Kit

    messages = make_messages(bench.count(STORED), with_ids=True)
    with MessageStore.open(folder / "store", StoreConfig()) as store:
        for message in messages:
            store.append(message)
    bodies: list[bytes] = []
    yield
    with Kit.from_store(folder / "store", ["T"], ["readers"]) as rmq:
        rmq.consumer("readers").subscribe("T")(lambda message: bodies.append(message.body))
        rmq.run_until_idle()
    yield len(messages)
    assert len(bodies) == len(messages)


# -------------------------------------------------------------------------------------------------------------- delays


def append(bench: Bench, folder: Path) -> Timed:
    messages = make_messages(bench.count(DELAYED), with_ids=True)
    with MessageStore.open(folder / "store", StoreConfig()) as store:
        store.append(messages[0])
        yield
        for message in messages:
            store.append(message)
        yield len(messages)


def delay(bench: Bench, folder: Path) -> Timed:
    """Store messages with a delay and deliver them, without clients.

    The schedule gets a later time, so nothing waits until they are due. As during single appends, a thread of the store
    flushes.
    """
    messages = make_messages(bench.count(DELAYED), with_ids=True, delay_level=1)
    with Broker.open(folder / "broker", store_config=StoreConfig()) as broker:
        broker.create_topic("T", 1)
        yield
        for message in messages:
            broker.store.append(message)
        with broker.runner.lock:
            broker._deliveries.schedule().run_due(broker.runner.now_ms() + 2_000)
        yield len(messages)
        assert sum(1 for _ in broker.messages("T")) == len(messages)


single: Final[Run] = partial(by_threads, count=SINGLE, in_flight=1)
stream: Final[Run] = partial(by_threads, count=STREAM, in_flight=None)
put_and_get: Final[Run] = partial(litequeue, count=SINGLE, in_flight=1)
SETTLEMENTS: Final = {"poll and commit": True, "receive and acknowledge": False}
ONE_NAME, STREAM_NAME = "send to listener, one in flight", "send to listener, a stream"


def of_handovers(rate: float) -> Target:
    """Return the share of the limit that is required, by how often it hands over in a second.

    Where threads wake up slowly, the two wake-ups are most of the time, and librmq's work is little beside them. 0.1
    less is required of Python code, which works longer beside the same wake-ups.
    """
    share = 0.30 + 0.45 * min(max((50_000 - rate) / 20_000, 0), 1)
    return Target(share, 0.9, pure=Target(share - 0.1, 0.75))


CASES: Final = [
    Case(ONE_NAME, single, "", partial(stub_broker, count=SINGLE, in_flight=1), "dramatiq StubBroker", Target(1.5, 2.5),
         needs=("dramatiq",)),
    Case(ONE_NAME, single, "", put_and_get, "litequeue", Target(reach=1.5), needs=("litequeue",)),
    Case(ONE_NAME, single, "", partial(bare_queues, count=SINGLE), "an append and two queue.Queue", of_handovers,
         limit=True),
    Case(STREAM_NAME, stream, "", partial(stub_broker, count=STREAM, in_flight=None), "dramatiq StubBroker",
         Target(6, 15, pure=Target(4, 5)), needs=("dramatiq",)),
    Case(STREAM_NAME, stream, "", partial(litequeue, count=STREAM, in_flight=None), "litequeue", Target(10, 20),
         needs=("litequeue",)),
    *(
        Case(name, partial(one_by_one, is_pull=is_pull), "one by one", litequeue_taken, "litequeue", Target(1),
             needs=("litequeue",))
        for name, is_pull in SETTLEMENTS.items()
    ),
    *(
        Case(name, partial(one_by_one, is_pull=is_pull), "one by one", append, "a single append", limit=True)
        for name, is_pull in SETTLEMENTS.items()
    ),
    Case("send to listener by hand", by_hand, "one in flight", single, "librmq by threads", Target(3, 4)),
    Case("send to listener by hand", by_hand, "one in flight", put_and_get, "litequeue", Target(reach=5),
         needs=("litequeue",)),
    Case("explored schedules", explored, "ten messages", target=Target(200, 1000), unit="/s"),
    Case("a store to its listener, in a test", from_store, "10,000 messages", target=Target(5_000)),
    Case("a delayed message, stored and delivered", delay, "", append, "a single append",
         Target(4, 3, at_most=True, pure=Target(3, 2.3, at_most=True)), limit=True, is_cost=True),
]  # fmt: skip

if __name__ == "__main__":
    main("clients", __doc__, CASES, both=True)
