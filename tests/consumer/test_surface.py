"""Consumers as their users see them: subscribing, contexts, settings, errors of misuse."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from librmq.broker import Broker
from librmq.client.producer import Producer
from librmq.config import StoreConfig
from librmq.consumer import DeliveredMessage, PullConsumer, PushConsumer
from librmq.errors import BrokerError, ConfigError
from librmq.listener import ReconsumeLater
from librmq.runtime import ManualRunner
from librmq.testing import Kit
from tests.consumer.parties import send, subscribed


def started(rmq: Kit, **settings: Any) -> PushConsumer:
    consumer = rmq.consumer("g", **settings)
    consumer.subscribe("t2", lambda message: None)
    send(rmq, "a", topic="t2")  # starts the consumer
    return consumer


def test_subscribe_takes_the_listener_as_an_argument(one_queue: Kit) -> None:
    got: list[bytes] = []

    def listen(message: DeliveredMessage) -> None:
        got.append(message.body)

    consumer = started(one_queue)
    assert consumer.subscribe("t", listen) is listen
    send(one_queue, "a")
    one_queue.advance(seconds=1)
    assert got == [b"a"]


def test_several_listeners_of_a_topic_share_it_by_tag(one_queue: Kit) -> None:
    created: list[str] = []
    paid: list[str] = []
    consumer = started(one_queue, batch_size=4)
    consumer.subscribe("t", lambda messages: created.extend(one.body.decode() for one in messages), tags="created")
    failing = [1]

    @consumer.subscribe("t", tags="paid || refunded", batch=True)
    def pay(messages: list[DeliveredMessage]) -> None:
        paid.extend(one.body.decode() for one in messages)
        if failing and failing.pop():
            raise ReconsumeLater(delay_level=1)  # so that a redelivery finds its listener too

    for number, tag in enumerate(("created", "paid", "refunded", "chat", "created")):
        send(one_queue, f"{tag}{number}", tags=tag)
    one_queue.advance(seconds=30)
    assert created == ["created0", "created4"]
    assert sorted(paid) == ["paid1", "paid1", "refunded2"]
    assert consumer.subscriptions["t"].expression == "created || paid || refunded"


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        ({"tags": "a"}, {"tags": "b || a"}, "tag 'a' of topic 't' has a listener already"),
        ({"tags": "a"}, {}, r"topic 't' has a listener already: unsubscribe\('t'\) first"),
        ({}, {}, "topic 't' has a listener already"),
        ({"sql": "p = 1"}, {"tags": "a"}, "topic 't' has a listener already"),
    ],
)
def test_a_second_listener_never_replaces_the_first(
    one_queue: Kit, first: dict[str, str], second: dict[str, str], says: str
) -> None:
    consumer = one_queue.consumer("g")
    got: list[DeliveredMessage] = []
    consumer.subscribe("t", got.append, tags=first.get("tags"), sql=first.get("sql"))
    with pytest.raises(ConfigError, match=says):
        consumer.subscribe("t", print, tags=second.get("tags"), sql=second.get("sql"))
    consumer.unsubscribe("t")
    consumer.subscribe("t", got.append, tags=second.get("tags"), sql=second.get("sql"))


def test_a_predicate_lets_messages_pass_as_consumed(one_queue: Kit) -> None:
    consumer = one_queue.consumer("g")
    got: list[str] = []
    consumer.subscribe(
        "t", lambda m: got.append(m.body.decode()), predicate=lambda m: m.body != b"no", must_return=False
    )
    consumer.start()
    send(one_queue, "a", "no", "b")
    one_queue.advance(seconds=20)
    assert got == ["a", "b"]
    assert one_queue.broker.consumer_offset("g", "t") == 3


@pytest.mark.parametrize("answer", [0, -1, ReconsumeLater(delay_level=1, consumed=1)])
def test_a_predicate_and_a_batch_agree_on_consumption(one_queue: Kit, answer: int | Exception) -> None:
    """The index that a listener returns counts the messages that it got, which may be fewer than the whole batch."""
    calls: list[list[str]] = []

    def listen(messages: list[DeliveredMessage]) -> int | None:
        calls.append([one.body.decode() for one in messages])
        if len(calls) > 1:
            return None
        if isinstance(answer, Exception):
            raise answer
        return answer

    send(one_queue, "no1", "a", "no2", "b", "no3")
    consumer = one_queue.consumer("g", batch_size=8)
    consumer.subscribe("t", listen, predicate=lambda message: not message.body.startswith(b"no"))
    consumer.start()
    one_queue.advance(seconds=60)
    assert calls[0] == ["a", "b"]
    assert [body for call in calls[1:] for body in call] == (["a", "b"] if answer == -1 else ["b"])


@pytest.mark.anyio
async def test_async_contexts_start_and_shut_down() -> None:
    runner = ManualRunner()
    got: list[bytes] = []

    async def listen(message: DeliveredMessage) -> None:
        await asyncio.sleep(0)
        got.append(message.body)

    with Broker.temporary(runner=runner) as broker:
        consumer = PushConsumer(broker, "push")
        consumer.subscribe("T", listen, predicate=lambda message: message.body != b"no")
        async with consumer, Producer(broker, "shop") as producer:
            assert consumer.is_running
            await producer.send_async("T", b"no")
            await producer.send_async("T", b"yes")
            await runner.advance_async(1_000)
        assert got == [b"yes"]
        async with PullConsumer(broker, "pull", poll_timeout=timedelta(0)) as reader:
            reader.subscribe("T")
            assert len([message async for message in reader]) == 2
        assert not consumer.is_running
        assert sum(broker.consumer_offsets("pull", "T").values()) == 2
        assert await consumer.shutdown_async() is True
        assert producer.shutdown() is True


def test_single_messages_want_a_batch_size_of_one(one_queue: Kit) -> None:
    consumer = one_queue.consumer("g", batch_size=4)
    with pytest.raises(ConfigError, match="batch=False passes single messages, so batch_size must be 1"):
        consumer.subscribe("t", print, batch=False)


def test_redeliveries_of_several_topics_keep_to_their_listeners(one_queue: Kit) -> None:
    """A batch of the retry topic went to the listener for its first message's topic."""
    one_queue.broker.create_topic("u", 1)
    got: list[tuple[str, str]] = []
    consumer = one_queue.consumer("g", batch_size=8)

    def listener(topic: str) -> Callable[[list[DeliveredMessage]], None]:
        def listen(messages: list[DeliveredMessage]) -> None:
            got.extend((topic, one.body.decode()) for one in messages)
            if not messages[0].reconsume_times:
                raise ReconsumeLater(delay_level=1)

        return listen

    for topic in ("t", "u"):
        consumer.subscribe(topic, listener(topic))
    consumer.start()
    one_queue.advance(seconds=1)
    for number in range(3):
        send(one_queue, f"t{number}", topic="t", queue=0)
        send(one_queue, f"u{number}", topic="u", queue=0)
    one_queue.advance(seconds=30)
    assert len(got) == 12
    assert all(body.startswith(topic) for topic, body in got)


@pytest.mark.parametrize("kind", [PushConsumer, PullConsumer])
def test_a_path_is_not_a_route(kind: Any) -> None:
    with pytest.raises(TypeError, match=r"expected a route, such as a Broker .* Broker\.open\('data'\)"):
        kind("data", "g")
    with pytest.raises(TypeError, match="expected a route"):
        kind(3, "g")


def test_durations_are_seconds_or_timedeltas(one_queue: Kit) -> None:
    consumer = subscribed(one_queue, suspend_time=timedelta(milliseconds=1500), shutdown_timeout=2)
    assert (consumer.config.suspend_time, consumer.config.shutdown_timeout) == (1.5, 2)
    with pytest.raises(ConfigError, match="suspend_time"):
        subscribed(one_queue, suspend_time=timedelta(seconds=-1))
    consumer.start()
    assert consumer.shutdown(timedelta(seconds=1)) is True
    with PullConsumer(one_queue.broker, "p") as reader:
        assert reader.poll(timedelta(0)) == []


def test_consumers_have_a_useful_repr(one_queue: Kit) -> None:
    consumer = subscribed(one_queue)
    assert repr(consumer) == "<PushConsumer g@g, created, topics: t, queues: 0>"
    consumer.start()
    one_queue.advance(seconds=1)
    assert repr(consumer) == "<PushConsumer g@g, running, topics: t, queues: 2>"
    assert repr(consumer.client) == "Client('10.0.1.101@g', producers=[], consumers=['g'])"
    assert repr(PullConsumer(one_queue.broker, "p")) == "<PullConsumer p, created, topics: none, queues: 0>"


@pytest.mark.rmq(store_config=StoreConfig.tiny(enable_property_filter=False))
@pytest.mark.parametrize("kind", [PushConsumer, PullConsumer])
def test_sql_that_a_broker_does_not_serve_is_refused(one_queue: Kit, kind: Any) -> None:
    """The consumer started and got no messages, and the log filled with errors (issue 14, 2.1)."""
    consumer = kind(one_queue.broker, "g")
    if kind is PushConsumer:
        consumer.subscribe("t", print, sql="p = 1")
    else:
        consumer.subscribe("t", sql="p = 1")
    with pytest.raises(BrokerError, match="enable_property_filter"):
        consumer.start()
    running = PullConsumer(one_queue.broker, "g2").start()
    with pytest.raises(BrokerError, match="enable_property_filter"):
        running.subscribe("t", sql="p = 1")
    running.shutdown()


def test_a_start_without_listener_can_be_repaired(one_queue: Kit) -> None:
    """A failed start made the consumer unusable."""
    consumer = one_queue.consumer("g")
    got: list[DeliveredMessage] = []
    with (
        pytest.raises(ConfigError, match=r"subscribe a listener to a topic before start\(\) or the with block"),
        consumer,
    ):
        pass
    consumer.subscribe("t", got.append)
    with consumer:
        send(one_queue, "a")
        one_queue.advance(seconds=5)
    assert [message.body for message in got] == [b"a"]


@pytest.mark.parametrize("filters", [{"tags": 3}, {"sql": ["a = 1"]}])
def test_a_filter_that_is_not_a_string_is_refused(one_queue: Kit, filters: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="expected text, found"):
        one_queue.consumer("g").subscribe("t", print, **filters)


def test_a_start_is_one_line_however_many_queues(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "librmq.consumer")
    runner = ManualRunner()
    with Broker.temporary(runner=runner) as broker:
        broker.create_topic("orders", 16)
        consumer = PushConsumer(broker, "billing")
        consumer.subscribe("orders", lambda message: None)
        with consumer:
            runner.advance(1000)
            lines = [record.getMessage() for record in caplog.records]
    (line,) = [line for line in lines if ": consumes " in line]
    assert line.endswith("consumes 17 queues of %RETRY%billing, orders: 17 taken, 0 released")
