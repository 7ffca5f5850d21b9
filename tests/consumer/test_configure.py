"""Settings that change while a consumer or producer runs: at once, without losing a message, or refused."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier
from typing import Any

import pytest

from librmq.broker import Broker, BrokerConfig
from librmq.client.producer import Producer
from librmq.client.sender import ProducerConfig
from librmq.consumer import ConsumerConfig, DeliveredMessage, PullConsumer, PushConsumer, SimpleConsumer
from librmq.consumer._concurrent import Backlog
from librmq.consumer.config import PullConsumerConfig
from librmq.errors import ConfigError
from librmq.message.message import Message
from librmq.protocol import ConsumeFrom, MessageModel
from librmq.testing import Kit, Process, explore
from tests.consumer.parties import bodies, send, subscribed
from tests.planted import send as send_to_end


def test_more_threads_begin_at_once(one_queue: Kit) -> None:
    consumer = subscribed(one_queue, threads=1)
    one_queue.faults.slow_listener("g", 100)
    send(one_queue, *"abcdef")
    one_queue.advance(seconds=1)
    assert bodies(one_queue) == ["a"]
    consumer.configure(threads=4)
    assert consumer.config.threads == 4
    one_queue.advance(seconds=1)
    assert bodies(one_queue) == [*"abcdef"]
    consumer.configure(threads=1)
    one_queue.faults.slow_listener("g", 50)
    send(one_queue, "g", "h")
    one_queue.advance(seconds=1)
    assert bodies(one_queue) == [*"abcdef"]  # the slow "a" is one of one
    one_queue.advance(minutes=3)
    assert bodies(one_queue) == [*"abcdefgh"]


@pytest.mark.parametrize("weights", [(None, None), (1, 8)])
def test_other_batches_of_what_waits(one_queue: Kit, weights: tuple[int | None, int | None]) -> None:
    sizes: list[int] = []
    consumer = one_queue.consumer("g", batch_size=4, threads=1)

    def listen(messages: list[DeliveredMessage]) -> None:
        sizes.append(len(messages))
        if len(sizes) == 1:
            consumer.configure(batch_size=2)
        if len(sizes) == 3:
            consumer.configure(batch_size=16)

    consumer.subscribe("t", listen, weight=weights[0])
    consumer.subscribe("other", listen, weight=weights[1])
    send(one_queue, "one", topic="other")
    send(one_queue, *map(str, range(30)))
    one_queue.advance(seconds=20)
    calls = [size for size in sizes if size > 1]
    assert calls[0] <= 4
    assert calls[1] == 2
    assert max(calls) > 4
    assert sum(sizes) == 31
    assert one_queue.broker.consumer_offset("g", "t") == 30


def test_limits_of_pulls_hold_at_once(one_queue: Kit) -> None:
    consumer = subscribed(one_queue, threads=1, max_held_messages=5, pull_batch_size=2)
    one_queue.faults.slow_listener("g", 100)
    send(one_queue, *map(str, range(40)))
    one_queue.advance(seconds=1)
    (assigned,) = (assigned for assigned in consumer.assigned.values() if not assigned.is_retry)
    assert (len(assigned.messages), assigned.throttled) == (6, True)
    consumer.configure(max_held_messages=11, pull_batch_size=4)
    one_queue.advance(seconds=1)
    assert (len(assigned.messages), assigned.throttled) == (14, True)
    consumer.configure(max_held_messages_of_topic=2)
    one_queue.advance(minutes=2)
    assert len(bodies(one_queue)) == 40


def test_pulls_that_rest_use_the_new_interval(one_queue: Kit) -> None:
    consumer = subscribed(one_queue, pull_interval=500)
    send(one_queue, "a")
    one_queue.advance(seconds=1)
    send(one_queue, "b")
    one_queue.advance(seconds=1)
    assert bodies(one_queue) == ["a"]
    consumer.configure(pull_interval=0)
    one_queue.advance(seconds=1)
    assert bodies(one_queue) == ["a", "b"]


def test_a_shorter_consume_timeout_counts_for_running_listeners(one_queue: Kit) -> None:
    consumer = subscribed(one_queue)
    one_queue.faults.slow_listener("g", 3_000)
    send(one_queue, "stuck")
    one_queue.advance(seconds=5)
    consumer.configure(consume_timeout=30)
    one_queue.advance(seconds=100)
    assert bodies(one_queue) == ["stuck", "stuck"]


@pytest.mark.parametrize(("setting", "attempts"), [({"suspend_time": 10}, 7), ({"max_reconsume_times": 3}, 4)])
def test_an_orderly_consumer_changes_too(one_queue: Kit, setting: dict[str, Any], attempts: int) -> None:
    def fail(message: DeliveredMessage) -> None:
        raise ValueError("no stock")

    consumer = subscribed(one_queue, fail, orderly=True, suspend_time=30)
    send(one_queue, "a")
    one_queue.advance(seconds=1)
    consumer.configure(suspend_time=1)
    consumer.configure(**setting)
    one_queue.advance(seconds=30 + 55)
    assert len(bodies(one_queue)) == attempts


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model": MessageModel.BROADCASTING}, "model: push consumer of group 'g' can't change it from"),
    ({"consume_from": ConsumeFrom.FIRST}, "it says where the group starts"),
    ({"orderly": True}, "held now were pulled for the other kind of delivery: make another consumer"),
    ({"strategy": lambda *given: ()}, "share the queues by one strategy"),
    ({"threads": 3, "guard": True}, "guard: .*it is checked at the start"),
    ({"threads": 0}, "threads: expected a whole number of at least 1, found 0"),
    ({"thread": 3}, "did you mean threads"),
    ({"batch_size": 2}, "the listener of topic 't' takes single messages, found 2: subscribe it with batch=True"),
]


@pytest.mark.parametrize(("settings", "says"), REFUSED)
@pytest.mark.parametrize("started", [False, True])
def test_what_can_not_change_is_refused(one_queue: Kit, settings: dict[str, Any], says: str, started: bool) -> None:
    consumer = subscribed(one_queue)
    before = consumer.config
    if started:
        one_queue.advance(seconds=1)
    with pytest.raises(ConfigError, match=says):
        consumer.configure(**settings)
    if not says.endswith(("found 0", "threads")):
        with pytest.raises(ConfigError, match=says):
            consumer.config = replace(before, **settings)
    assert consumer.config is before is consumer.delivery.config


def test_assigning_the_settings_changes_them(one_queue: Kit) -> None:
    consumer = subscribed(one_queue, threads=1)
    consumer.config = replace(consumer.config, threads=7)
    assert consumer.delivery.config.threads == 7
    others: list[Any] = [None, {}, ProducerConfig(), PullConsumerConfig()]
    for other in others:
        with pytest.raises(ConfigError, match="config: expected a ConsumerConfig, found"):
            consumer.config = other
    assert isinstance(consumer.config, ConsumerConfig)
    assert consumer.config.threads == 7


def test_a_pull_consumer_changes_with_the_next_poll(one_queue: Kit) -> None:
    send(one_queue, *"abcdefgh")
    with PullConsumer(one_queue.broker, "g", pull_batch_size=2, consume_from=ConsumeFrom.FIRST) as consumer:
        consumer.subscribe("t")
        assert len(consumer.poll(0)) == 2
        consumer.configure(pull_batch_size=4, auto_commit=False)
        assert len(consumer.poll(0)) == 4
        names: list[Any] = ["threads", "batch_size", "max_held_messages", "pull_interval"]
        for name in names:
            change: dict[str, Any] = {name: 7}
            with pytest.raises(ConfigError, match=f"{name}: .*a pull consumer has no listeners"):
                consumer.configure(**change)
            with pytest.raises(ConfigError, match=f"{name}: .*a pull consumer has no listeners"):
                PullConsumer(one_queue.broker, "g", **change)
        assert consumer.config.threads == 20
    assert one_queue.broker.consumer_offset("g", "t") == 0  # the later polls commit nothing


def test_a_simple_consumer_has_no_settings(one_queue: Kit) -> None:
    consumer: Any = SimpleConsumer(one_queue.broker, "g")
    with pytest.raises(ConfigError, match="has no settings: receive takes"):
        consumer.config = 5
    assert not hasattr(consumer, "config")


# ------------------------------------------------------------------------------------------------------------ producers


def test_a_producer_changes_with_the_next_send(rmq: Kit) -> None:
    producer = Producer(rmq.broker, "p", compress_from=10)
    assert rmq.messages(producer.send("t", b"x" * 50).queue.topic)[0].sys_flag
    producer.configure(compress_from=1000, default_topic_queues=2, max_message_size=60, retries=0)
    producer.send("t", b"x" * 50)
    assert sorted(bool(message.sys_flag) for message in rmq.messages("t")) == [False, True]
    producer.send("u", b"x")
    assert [data.write_queues for data in rmq.broker.topic_route("u")] == [2]
    with pytest.raises(Exception, match="60"):
        producer.send("t", b"x" * 61)
    producer.configure(avoid_slow_brokers=True)
    assert producer.sender.latencies is not None
    producer.config = replace(producer.config, avoid_slow_brokers=False)
    assert producer.sender.latencies is None


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"timeout": -1}, "timeout: expected seconds"),
        ({"retry": 1}, "did you mean retries"),
        ({"nearby": True}, "nearby: the client has no site"),
    ],
)
def test_a_refused_setting_of_a_producer_changes_nothing(rmq: Kit, settings: dict[str, Any], says: str) -> None:
    producer = Producer(rmq.broker, "p")
    before = producer.config
    with pytest.raises(ConfigError, match=says):
        producer.configure(**settings)
    with pytest.raises(ConfigError, match="expected a ProducerConfig, found dict"):
        producer.config = {}  # type: ignore[assignment]
    assert producer.config is before is producer.sender.config


def test_changes_at_the_same_time_are_all_made() -> None:
    def change(barrier: Barrier, changed: Any, **settings: Any) -> None:
        barrier.wait()
        changed.configure(**settings)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with Broker.temporary() as broker, ThreadPoolExecutor(2) as threads:
            pull, producer = PullConsumer(broker, "pull"), Producer(broker, "p")
            push = PushConsumer(broker, "push")
            for number in range(1, 100):
                for changed, names in (
                    (push, ("threads", "max_held_messages")),
                    (pull, ("pull_batch_size", "poll_timeout")),
                    (producer, ("retries", "timeout")),
                ):
                    barrier = Barrier(2)
                    ends = [threads.submit(change, barrier, changed, **{name: number}) for name in names]
                    for end in ends:
                        end.result()
                    assert [getattr(changed.config, name) for name in names] == [number, number]
    finally:
        sys.setswitchinterval(interval)


# ------------------------------------------------------------------------------------------------------------ schedules


def settings_that_change(rmq: Kit) -> None:
    """A consumer changes its settings at every third message, while processes die and answers are lost."""
    seen: set[bytes] = set()
    changes: list[dict[str, Any]] = [
        {"threads": 1, "batch_size": 3},
        {"threads": 5, "max_held_messages": 1},
        {"batch_size": 1, "pull_batch_size": 2},
        {"max_held_messages": 100, "pull_interval": 0.5},
    ]

    def shop(process: Process) -> None:
        consumer: PushConsumer = process.consumer("billing", threads=2, batch_size=2, pull_batch_size=5)
        calls: list[int] = []

        def listen(messages: list[DeliveredMessage]) -> None:
            calls.append(len(messages))
            rmq.checkpoint("before the change")
            if len(calls) % 3 == 1:
                consumer.configure(**changes[len(calls) // 3 % len(changes)])
            rmq.checkpoint("after the change")
            seen.update(message.body for message in messages)

        consumer.subscribe("orders", listen, tags="paid", weight=3)
        consumer.subscribe("orders", listen, weight=1)

    rmq.broker.create_topic("orders", queues=2)
    rmq.app("shop", shop)
    for number in range(16):
        tag = "paid" if number % 3 else "free"
        send_to_end(rmq.producer(), Message("orders", b"%d" % number, tags=tag), number % 2)
    rmq.advance(minutes=5)
    assert seen == {b"%d" % number for number in range(16)}


@pytest.mark.slow
def test_no_schedule_loses_a_message_to_a_change() -> None:
    result = explore(settings_that_change, runs=150)
    assert result.chosen["fault"] > 20


def _forget(backlog: Backlog) -> list[Any]:
    backlog.lanes.clear()
    return []


def _half(backlog: Backlog) -> list[Any]:
    waiting = [pulled for lane in backlog.lanes.values() for pulled in lane]
    backlog.lanes.clear()
    return waiting[::2]


@pytest.mark.slow
@pytest.mark.parametrize("planted", [_forget, _half])
def test_a_change_that_loses_what_waits_is_noticed(monkeypatch: pytest.MonkeyPatch, planted: Any) -> None:
    monkeypatch.setattr(Backlog, "take_all", planted)
    with pytest.raises(AssertionError):
        explore(settings_that_change, runs=30)


def test_settings_of_a_running_broker_are_refused(rmq: Kit) -> None:
    with pytest.raises(ConfigError, match=r"a running broker keeps its settings: close it, then call Broker\.open"):
        rmq.broker.config = BrokerConfig()
