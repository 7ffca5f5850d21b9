"""If the clock is set back by an hour, or to before 1970, waiting messages are still delivered in time."""

from __future__ import annotations

import queue
from collections.abc import Iterator

import pytest

from librmq import connect
from librmq.broker import Broker, BrokerConfig
from librmq.client.producer import Producer
from librmq.clock import ManualClock
from librmq.config import StoreConfig
from librmq.consumer import DeliveredMessage, PushConsumer
from librmq.delay import DelayConfig
from librmq.files import MemoryFiles
from librmq.listener import SuspendQueue
from librmq.message import Message, MessageQueue
from librmq.protocol import LockQueues
from librmq.runtime import ManualRunner
from librmq.wire.remoting import RemotingServer
from tests.clocks import Adjusted

WAIT_S = 30.0
HOUR_MS = 3_600_000


@pytest.fixture
def clock() -> Adjusted:
    return Adjusted()


@pytest.fixture
def broker(clock: Adjusted) -> Iterator[Broker]:
    settings = BrokerConfig(delay=DelayConfig(first_look_s=0), save_offsets_every_s=0.5)
    store = StoreConfig.tiny(message_delay_level="1s 1s 1s 1s")
    with Broker.open("/b", settings, files=MemoryFiles(), clock=clock, store_config=store) as opened:
        yield opened


@pytest.mark.parametrize("start_ms", [-10 * 365 * 24 * HOUR_MS, -5_000])
def test_before_1970_messages_are_consumed(start_ms: int) -> None:
    """Before 1970, no step of the broker or of a consumer ran (issue 14, 2.5)."""
    files = MemoryFiles()
    seen: list[bytes] = []
    for clock in (ManualClock(start_ms), ManualClock(start_ms + HOUR_MS)):
        seen.clear()
        runner = ManualRunner(clock)
        with Broker.open("/b", files=files, runner=runner) as broker:
            consumer = PushConsumer(broker, "g")
            consumer.subscribe("T", lambda message: seen.append(message.body))
            consumer.start()
            producer = Producer(broker, "p")
            producer.send("T", b"now")
            producer.send("T", b"later", delay=10)
            runner.advance(9_000)
            assert seen == [b"now"]
            runner.advance(2_000)
            assert seen == [b"now", b"later"]
            consumer.shutdown()


def test_a_delayed_message_and_a_retry_come_now(broker: Broker, clock: Adjusted) -> None:
    seen: queue.Queue[bytes] = queue.Queue()
    consumer = PushConsumer(broker, "g")

    @consumer.subscribe("T")
    def listen(message: DeliveredMessage) -> None:
        seen.put(message.body)
        if message.body == b"retried" and not message.reconsume_times:
            raise ValueError("the first time")

    consumer.start()
    producer = Producer(broker, "p")
    producer.send("T", b"retried")
    assert seen.get(timeout=WAIT_S) == b"retried"
    producer.send(Message("T", b"delayed", delay_level=1))
    clock.ahead_ms = -HOUR_MS
    assert {seen.get(timeout=WAIT_S), seen.get(timeout=WAIT_S)} == {b"retried", b"delayed"}
    consumer.shutdown()


def test_a_suspended_queue_continues_now(broker: Broker, clock: Adjusted) -> None:
    seen: queue.Queue[int] = queue.Queue()
    attempts: list[int] = []
    consumer = PushConsumer(broker, "g", orderly=True)

    @consumer.subscribe("T")
    def listen(message: DeliveredMessage) -> None:
        attempts.append(1)
        seen.put(1)
        if len(attempts) == 1:
            raise SuspendQueue

    Producer(broker, "p").send("T", b"x")
    consumer.start()
    seen.get(timeout=WAIT_S)
    clock.ahead_ms = -HOUR_MS
    seen.get(timeout=WAIT_S)
    consumer.shutdown()


def test_a_lock_does_not_outlive_its_expiry(broker: Broker, clock: Adjusted) -> None:
    queues = frozenset((MessageQueue("T", broker.name, 0),))
    assert broker.call(LockQueues("g", "c1", queues)) == queues
    clock.ahead_ms = -HOUR_MS
    assert not broker.call(LockQueues("g", "c2", queues))
    clock.ahead_ms = 61_000 - HOUR_MS
    assert broker.call(LockQueues("g", "c2", queues)) == queues


def test_messages_over_tcp_keep_the_order_of_the_log(broker: Broker, clock: Adjusted) -> None:
    with RemotingServer(broker) as server, connect(server.address) as route, Producer(route, "shop") as producer:
        route.create_topic("orders", 2)
        bodies = [b"%d" % number for number in range(6)]
        for number, body in enumerate(bodies):
            clock.ahead_ms = -HOUR_MS if number in (2, 3) else 0
            producer.send("orders", body, keys="k", queue=number % 2)
        assert [message.body for message in route.messages("orders")] == bodies
        for place in (broker, route):
            assert [message.body for message in place.find_by_key("orders", "k")] == bodies
            assert [message.body for message in place.find_by_key("orders", "k", max_messages=2)] == bodies[-2:]
