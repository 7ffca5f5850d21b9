"""Priorities of messages as of 5.4: one queue a priority, and receives that begin with the highest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from librmq.broker import Broker
from librmq.broker.handlers._receive import ReceiveHandler
from librmq.client import TransactionProducer
from librmq.client.producer import Producer
from librmq.client.queue_selectors import select_by_hash
from librmq.consumer import SimpleConsumer
from librmq.errors import BrokerError, MessageIllegalError, RmqError
from librmq.files._memory import MemoryFiles
from librmq.message.message import Message
from librmq.protocol import SendMessage, TransactionState
from librmq.runtime import ManualRunner
from librmq.testing import Kit, Process, explore
from tests.broker.parties import opened
from tests.budget import examples

HOST = ("127.0.0.1", 1)


@pytest.fixture
def broker(rmq: Kit) -> Broker:
    rmq.broker.create_topic("t", 4, message_type="PRIORITY")
    return rmq.broker


def stored_factor(broker: Broker) -> int:
    attributes = broker.tables.groups.rows["g"].get("attributes") or {}
    return int(attributes.get("priority.factor", 100))


def received(consumer: SimpleConsumer, most: int = 1) -> list[str]:
    messages = consumer.receive(most, wait=0)
    consumer.ack(*messages)
    return [message.body.decode() for message in messages]


# ---- sends


def test_a_priority_names_the_queue(rmq: Kit, broker: Broker) -> None:
    producer = rmq.producer()
    for priority, queue_id in ((0, 0), (2, 2), (3, 3), (4, 3), ((1 << 31) - 1, 3)):
        result = producer.send("t", b"x", priority=priority)
        assert (result.queue.queue_id, result.queue_offset) == (queue_id, result.queue_offset)
        stored = rmq.messages("t")[-1]
        assert (stored.queue_id, stored.priority) == (queue_id, priority)
        assert stored.properties["_SYS_MSG_PRIORITY_"] == str(priority)
    assert {producer.send("t", b"x").queue.queue_id for _ in range(8)} == {0, 1, 2, 3}  # without one in turn
    assert rmq.messages("t")[-1].priority is None
    producer.send_oneway("t", b"x", priority=1)
    assert rmq.messages("t")[-1].queue_id == 1


@pytest.mark.parametrize(
    ("properties", "queue_id", "keeps"),
    [
        ({"_SYS_MSG_PRIORITY_": "2"}, 2, True),
        ({"_SYS_MSG_PRIORITY_": "-1"}, 1, True),  # none, as in 5.4
        ({"_SYS_MSG_PRIORITY_": "high"}, 1, True),
        ({"_SYS_MSG_PRIORITY_": "2", "__SHARDINGKEY": "g"}, 1, False),
        ({"_SYS_MSG_PRIORITY_": "2", "DELAY": "1"}, 1, False),
        ({"_SYS_MSG_PRIORITY_": "2", "TRAN_MSG": "true", "PGROUP": "p"}, 1, False),
    ],
)
def test_other_types_of_messages_lose_their_priority(
    broker: Broker, properties: dict[str, str], queue_id: int, keeps: bool
) -> None:
    message = Message("t", b"x")
    message.properties.update(properties)
    response = broker.call(SendMessage("p", message, 1, 0, HOST))
    stored = broker.store.message_at(response.physical_offset)
    assert stored is not None
    assert response.queue_id == queue_id
    assert ("_SYS_MSG_PRIORITY_" in stored.properties) == keeps


def _transaction(rmq: Kit, message: Message) -> object:
    sender = TransactionProducer(rmq.route, "tx", lambda checked: TransactionState.COMMIT)
    return sender.send_in_transaction(message, execute=lambda message, arg: TransactionState.COMMIT)


REFUSED: list[tuple[Callable[[Kit], object], str]] = [
    (lambda rmq: Message("t", b"x", priority=-1), "priority: expected a whole number from 0 to 2147483647, found -1"),
    (lambda rmq: Message("t", b"x", priority=True), "priority: expected a whole number"),
    (lambda rmq: Message("t", b"x", priority=1 << 31), "priority: expected a whole number"),
    (lambda rmq: Message("t", b"x", priority=1, delay=5), "priority: expected None with a delay, found 1"),
    (lambda rmq: Message("t", b"x", priority=1, delay_level=2), "priority: expected None with a delay"),
    (
        lambda rmq: Message("t", b"x", priority=1, deliver_at=datetime(2030, 1, 1, tzinfo=UTC)),
        "priority: expected None with a delay",
    ),
    (lambda rmq: Message("t", b"x", properties={"_SYS_MSG_PRIORITY_": "1"}), "is not for users"),
    (lambda rmq: rmq.producer().send("t", b"x", priority=1, queue=2), "the message has a priority, which names"),
    (
        lambda rmq: rmq.producer().send("t", b"x", priority=1, selector=select_by_hash, arg="a"),
        "the message has a priority",
    ),
    (lambda rmq: rmq.producer().send_oneway("t", b"x", priority=1, queue=0), "the message has a priority"),
    (lambda rmq: rmq.producer().send_batch([Message("t", b"x", priority=1)]), "the message has a priority"),
    (lambda rmq: _transaction(rmq, Message("t", b"x", priority=1)), "transaction can't have a priority"),
]


@pytest.mark.parametrize(("attempt", "says"), REFUSED)
def test_bad_priorities_are_refused_before_anything_is_stored(
    rmq: Kit, broker: Broker, attempt: Callable[[Kit], object], says: str
) -> None:
    end = broker.store.log.end
    with pytest.raises(MessageIllegalError, match=says):
        attempt(rmq)
    assert broker.store.log.end == end


# ---- receives


def test_receives_begin_with_the_highest(rmq: Kit, broker: Broker) -> None:
    for priority in (1, 0, 3, 2, 0, 3):
        rmq.producer().send("t", str(priority), priority=priority)
    with SimpleConsumer(broker, "g") as consumer:
        consumer.subscribe("t")
        assert [*received(consumer), *received(consumer, 3)] == ["3", "3", "2", "1"]
        rmq.producer().send("t", "2", priority=2)
        assert received(consumer, 8) == ["2", "0", "0"]


def test_a_redelivery_comes_last(rmq: Kit, broker: Broker) -> None:
    """As with 5.4's default; its priority does not count in the retry topic."""
    with SimpleConsumer(broker, "g") as consumer:
        consumer.subscribe("t")
        rmq.producer().send("t", "again", priority=3)
        (first,) = consumer.receive(invisible=5, wait=0)
        assert first.priority == 3
        for priority in (0, 1):
            rmq.producer().send("t", str(priority), priority=priority)
        rmq.advance(seconds=6)
        assert [received(consumer)[0] for _ in range(3)] == ["1", "0", "again"]


@pytest.mark.parametrize(("factor", "highest"), [(100, 20), (50, 15), (0, 10), (None, 20)])
def test_a_factor_lets_no_priority_starve(rmq: Kit, broker: Broker, factor: int | None, highest: int) -> None:
    broker.create_topic("two", 2, message_type="PRIORITY")
    broker.set_group("g", priority_factor=factor, retry_max_times=3)
    for number in range(300):
        rmq.producer().send("two", str(number % 2), priority=number % 2)
    with SimpleConsumer(broker, "g") as consumer:
        consumer.subscribe("two")
        counts = Counter(received(consumer)[0] for _ in range(100))
    assert counts["1"] == 5 * highest
    broker.set_group("g", is_ordered=False)  # keeps the factor
    assert stored_factor(broker) == (100 if factor is None else factor)


@pytest.mark.parametrize("factor", [-1, 101, 2.5, "many"])
def test_bad_factors_are_refused(broker: Broker, factor: Any) -> None:
    with pytest.raises(BrokerError, match="priority_factor: expected a whole number from 0 to 100"):
        broker.set_group("g", priority_factor=factor)


def test_other_topics_and_groups_in_order_take_queues_in_turn(rmq: Kit, broker: Broker) -> None:
    broker.create_topic("plain", 4)
    for topic in ("t", "plain"):
        for priority in (0, 3):
            rmq.producer().send(topic, str(priority), priority=priority)
    broker.set_group("ordered", is_ordered=True)
    for group, topic in (("g", "plain"), ("ordered", "t")):
        with SimpleConsumer(broker, group) as consumer:
            consumer.subscribe(topic)
            assert [*received(consumer), *received(consumer)] == ["0", "3"]


def test_type_and_factor_survive() -> None:
    files, runner = MemoryFiles(), ManualRunner()
    with opened(files, runner) as broker:
        broker.create_topic("t", 2, message_type="PRIORITY")
        broker.set_group("g", priority_factor=30)
        Producer(broker, "p").send("t", b"x", priority=1)
    with opened(files, runner) as broker:
        assert broker.topics()["t"].message_type == "PRIORITY"
        assert stored_factor(broker) == 30
        assert [message.priority for message in broker.messages("t")] == [1]


@given(st.lists(st.one_of(st.integers(0, 5), st.none()), max_size=40))
@settings(max_examples=examples(60))
def test_receives_agree_with_a_sorted_list(events: list[int | None]) -> None:
    """A number sends a message of that priority; None receives one."""
    waiting: list[tuple[int, int]] = []
    with Broker.temporary(runner=ManualRunner()) as broker, SimpleConsumer(broker, "g") as consumer:
        broker.create_topic("t", 4, message_type="PRIORITY")
        consumer.subscribe("t")
        producer = Producer(broker, "p")
        for number, priority in enumerate([*events, *[None] * len(events)]):
            if priority is not None:
                producer.send("t", str(number), priority=priority)
                waiting.append((-min(priority, 3), number))
            else:
                waiting.sort()
                assert received(consumer) == [str(number) for _, number in waiting[:1]]
                del waiting[:1]


# ---- schedules


def highest_first(rmq: Kit) -> None:
    """Processes send and receive while they die, and answers are lost; what comes first comes by priority."""
    rmq.broker.create_topic("orders", 3, message_type="PRIORITY")
    sent: list[int] = []
    seen: list[tuple[int, int]] = []

    def shop(process: Process) -> None:
        def send() -> None:
            producer = Producer(process, "shop")
            for number in range(len(sent), 6):
                with suppress(RmqError):
                    producer.send("orders", str(number % 3), priority=number % 3)
                sent.append(number)

        process.background(send)

    def report(process: Process) -> None:
        def receive() -> None:
            with suppress(RmqError), SimpleConsumer(process, "report") as consumer:
                consumer.subscribe("orders")
                for _ in range(20):
                    rmq.checkpoint("receives")
                    for message in consumer.receive(2, wait=0, invisible=3_000):
                        seen.append((int(message.body), message.attempt))
                        consumer.ack(message)

        process.background(receive)

    rmq.app("shop", shop)
    rmq.advance(minutes=1)
    stored = {message.priority for message in rmq.messages("orders")}
    rmq.app("report", report)
    rmq.advance(minutes=1)
    firsts = [priority for priority, attempt in seen if attempt == 1]
    assert firsts == sorted(firsts, reverse=True)
    assert {priority for priority, _ in seen} <= stored


@pytest.mark.slow
def test_no_schedule_breaks_the_order_of_priorities() -> None:
    result = explore(highest_first, runs=60)
    assert result.chosen["fault"] > 5


@pytest.mark.slow
def test_queues_in_turn_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    in_turn = ReceiveHandler.queues_in_turn

    def rotated(handler: ReceiveHandler, group: Any, topic: Any, retries: str) -> list[tuple[str, int]]:
        queues = in_turn(handler, group, topic, retries)
        return queues[1:] + queues[:1]

    monkeypatch.setattr(ReceiveHandler, "queues_in_turn", rotated)
    with pytest.raises(AssertionError):
        explore(highest_first, runs=5)
