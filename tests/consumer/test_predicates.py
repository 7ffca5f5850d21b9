"""An application's own predicate on push, pull and simple consumers: policies, budgets, metrics."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from librmq.broker import Broker
from librmq.client.producer import Producer
from librmq.consumer import DeliveredMessage, PullConsumer, PushConsumer, SimpleConsumer
from librmq.errors import ConfigError
from librmq.filter import Policy, WatchedPredicate
from librmq.message.message import Message
from librmq.metrics import Metrics
from librmq.protocol import ConsumeFrom
from librmq.testing import Kit, Process, explore
from tests.consumer.parties import send
from tests.planted import send as send_to_end


def watched(rmq: Kit, on_error: Policy) -> WatchedPredicate[Any]:
    return WatchedPredicate(judge_raising, clock=rmq.clock, budget=1, on_error=on_error)


def judge_raising(message: DeliveredMessage) -> bool:
    if message.body == b"!":
        raise ValueError("no stock")
    return message.body.isalpha()


def outcomes(metrics: Metrics) -> dict[str, float]:
    return {labels[2]: value for labels, value in metrics.snapshot()["predicate_calls"].items()}


POLICIES = [(Policy.SKIP, ["a", "b"]), (Policy.DELIVER, ["a", "!", "b"]), (Policy.STOP, ["a", "b"])]


@pytest.mark.parametrize(("on_error", "expected"), POLICIES)
@pytest.mark.parametrize("orderly", [False, True])
def test_policies_of_a_push_consumer(one_queue: Kit, on_error: Policy, expected: list[str], orderly: bool) -> None:
    metrics, got = Metrics(), []
    settings = {"fail_fast": False, "max_reconsume_times": 1, "orderly": orderly}
    consumer = one_queue.consumer("g", metrics=metrics, **settings)  # type: ignore[arg-type]
    predicate = watched(one_queue, on_error)
    consumer.subscribe("t", lambda message: got.append(message.body.decode()), predicate=predicate)
    send(one_queue, "a", "!", "1", "b")
    one_queue.advance(minutes=2)
    assert got == expected
    assert one_queue.broker.consumer_offset("g", "t") == 4
    assert [letter.body for letter in one_queue.dead_letters("g")] == [b"!"] * (on_error is Policy.STOP)
    assert outcomes(metrics) == {"match": 2, "no match": 1, "error": 1 + (on_error is Policy.STOP)}
    assert predicate.counts.failed == 1 + (on_error is Policy.STOP)


@pytest.mark.parametrize(("on_error", "expected"), POLICIES)
@pytest.mark.parametrize("form", ["poll", "for", "async"])
def test_policies_of_a_pull_consumer(one_queue: Kit, on_error: Policy, expected: list[str], form: str) -> None:
    metrics, got = Metrics(), []
    send(one_queue, "a", "!", "1", "b")
    consumer = PullConsumer(one_queue.broker, "g", metrics=metrics, consume_from=ConsumeFrom.FIRST, poll_timeout=0)
    consumer.subscribe("t", predicate=watched(one_queue, on_error))

    async def read() -> list[DeliveredMessage]:
        return [message async for message in consumer]

    def rounds() -> list[DeliveredMessage]:
        if form == "poll":
            return consumer.poll(0)
        return asyncio.run(read()) if form == "async" else list(consumer)

    with consumer:
        (queue,) = consumer.queues("t")
        if on_error is Policy.STOP and form == "poll":
            got += rounds()
        if on_error is Policy.STOP:
            for _ in range(2):
                with pytest.raises(ValueError, match="no stock"):
                    got.extend(consumer if form == "for" else rounds())
            if form == "async":
                assert consumer.position(queue) == 1
                consumer.seek(queue, 0)
                got += [message for message in consumer.poll(0) if message.body == b"a"]
            assert consumer.position(queue) == 1
            consumer.seek(queue, 2)
        got += rounds()
        assert consumer.position(queue) == 4
    assert [message.body.decode() for message in got] == expected
    assert one_queue.broker.consumer_offset("g", "t") == 4
    assert outcomes(metrics)["no match"] == 1


@pytest.mark.parametrize(("on_error", "expected"), [*POLICIES[:2], (Policy.STOP, ["a", "b"])])
def test_policies_of_a_simple_consumer(one_queue: Kit, on_error: Policy, expected: list[str]) -> None:
    metrics = Metrics()
    one_queue.broker.set_group("g", retry_max_times=1)
    with SimpleConsumer(one_queue.broker, "g", metrics=metrics) as consumer:
        consumer.subscribe("t", predicate=watched(one_queue, on_error))
        send(one_queue, "1", "2", "a", "!", "b")
        got = consumer.receive(2, wait=1) + consumer.receive(wait=1)  # the first two are not wanted
        consumer.ack(*got)
        assert [message.body.decode() for message in got] == expected
        for _ in range(4):
            one_queue.advance(seconds=70)
            assert consumer.receive(wait=0) == []
    assert [letter.body for letter in one_queue.dead_letters("g")] == [b"!"] * (on_error is Policy.STOP)
    assert outcomes(metrics)["no match"] == 2


def test_a_predicate_of_assigned_queues(four_queues: Kit) -> None:
    send(four_queues, *"a1b2c3")
    with PullConsumer(four_queues.broker, "g", poll_timeout=0) as consumer:
        queues = consumer.queues("t")
        consumer.assign(queues, predicate=lambda message: message.body.isalpha())
        for queue in queues:
            consumer.seek_to_begin(queue)
        assert sorted(message.body for message in consumer) == [b"a", b"b", b"c"]
        consumer.assign(queues)
        for queue in queues:
            consumer.seek_to_begin(queue)
        assert len(list(consumer)) == 6


@pytest.mark.parametrize("wrong", [3, "body", asyncio.sleep, lambda: True, lambda message, group: True])
def test_what_is_no_predicate_is_refused(one_queue: Kit, wrong: Any) -> None:
    broker = one_queue.broker
    subscribes: list[Callable[..., object]] = [
        PullConsumer(broker, "g").subscribe,
        SimpleConsumer(broker, "g").subscribe,
        lambda topic, predicate: PushConsumer(broker, "g").subscribe(topic, print, predicate=predicate),
    ]
    for subscribe in subscribes:
        with pytest.raises(ConfigError, match="predicate: expected a plain function"):
            subscribe("t", predicate=wrong)
    stopping = watched(one_queue, Policy.STOP)
    with pytest.raises(ConfigError, match="its listener takes single messages: subscribe it with batch=False"):
        PushConsumer(broker, "g", batch_size=4).subscribe("t", print, predicate=stopping)
    with pytest.raises(ConfigError, match="for reads of a store, found STOP"):
        broker.store.matching(predicate=stopping)
    with pytest.raises(ConfigError, match="a slow predicate has raised nothing"):
        WatchedPredicate(judge_raising, budget=1, over_budget=Policy.STOP)


@pytest.mark.parametrize(("over_budget", "expected"), [(Policy.AS_ANSWERED, 3), (Policy.SKIP, 1), (Policy.DELIVER, 4)])
def test_slow_predicates_follow_their_policy(one_queue: Kit, over_budget: Policy, expected: int) -> None:
    def slow(message: DeliveredMessage) -> bool:
        if message.body != b"z":
            one_queue.clock.move_to(one_queue.clock.now_ms() + 20)
        return message.body.isalpha()

    metrics, got = Metrics(), []
    predicate = WatchedPredicate(slow, clock=one_queue.clock, budget=0.01, over_budget=over_budget)
    consumer = one_queue.consumer("g", metrics=metrics)
    consumer.subscribe("t", lambda message: got.append(message), predicate=predicate)
    send(one_queue, *"za1b")
    one_queue.advance(seconds=20)
    assert len(got) == expected
    assert outcomes(metrics) == {"match": 1, "slow": 3}
    assert predicate.counts.over_budget == 3


@pytest.mark.parametrize("kind", ["push", "pull"])
def test_a_slow_predicate_stops_no_other_message(kind: str) -> None:
    """It holds no lock: a producer sends, and other listeners run, while it thinks."""
    release, thinking, done = threading.Event(), threading.Event(), threading.Event()

    def think(message: DeliveredMessage) -> bool:
        if message.body == b"slow":
            thinking.set()
            return release.wait(60)
        return True

    with Broker.temporary() as broker:
        broker.create_topic("t", 1)
        producer = Producer(broker, "p")
        push = PushConsumer(broker, "other", threads=2)
        push.subscribe("t", lambda message: done.set() if message.body == b"late" else None, predicate=think)
        reader = threading.Thread()
        if kind == "pull":
            pull = PullConsumer(broker, "g").start()
            pull.subscribe("t", predicate=think)
            reader = threading.Thread(target=lambda: pull.poll(60))
            reader.start()
            push = PushConsumer(broker, "other", threads=2)
            push.subscribe("t", lambda message: done.set() if message.body == b"late" else None)
        push.start()
        producer.send("t", b"slow")
        assert thinking.wait(60)
        producer.send("t", b"late")
        assert done.wait(60)
        release.set()
        if kind == "pull":
            reader.join(60)
            pull.shutdown()
        push.shutdown()


# ------------------------------------------------------------------------------------------------------------ schedules


def predicates_that_raise(rmq: Kit) -> None:
    """One message lets predicates raise twice; processes die and answers are lost, and nothing stays away."""
    pushed: set[bytes] = set()
    polled: set[bytes] = set()
    raised = [0]

    def shop(process: Process) -> None:
        def choose(message: DeliveredMessage) -> bool:
            rmq.checkpoint("judges")
            if message.body == b"5" and not message.reconsume_times:
                raise ValueError("no stock")
            return message.body != b"3"

        predicate = WatchedPredicate(choose, clock=process.runner.clock, budget=1, on_error=Policy.STOP)
        consumer = process.consumer("billing")
        consumer.subscribe("orders", lambda message: pushed.add(message.body), predicate=predicate)

    rmq.broker.create_topic("orders", queues=1)
    rmq.app("shop", shop, fail_fast=False)
    for number in range(8):
        send_to_end(rmq.producer(), Message("orders", b"%d" % number), 0)
    rmq.advance(minutes=3)

    def unsure(message: DeliveredMessage) -> bool:
        if message.body == b"5" and raised[0] < 2:
            raised[0] += 1
            raise ValueError("no stock")
        return message.body != b"3"

    reader = PullConsumer(rmq.broker, "report", consume_from=ConsumeFrom.FIRST, pull_batch_size=3, poll_timeout=0)
    reader.subscribe("orders", predicate=WatchedPredicate(unsure, budget=1, on_error=Policy.STOP))
    with reader:
        for _ in range(12):
            try:
                polled.update(message.body for message in reader.poll(0))
            except ValueError:
                rmq.advance(seconds=1)
    expected = {b"%d" % number for number in range(8) if number != 3}
    assert (pushed, polled) == (expected, expected)


@pytest.mark.parametrize("in_a_loop", [False, True])
def test_what_a_poll_passes_over_is_consumed_in_a_history(rmq: Kit, in_a_loop: bool) -> None:
    """As what a listener's predicate leaves out; the kit took the progress past it for a loss."""
    rmq.broker.create_topic("t", 1)
    send(rmq, *"abcd")
    with PullConsumer(rmq.route, "g", consume_from=ConsumeFrom.FIRST, poll_timeout=0) as reader:
        reader.subscribe("t", predicate=lambda message: message.body in b"bd")
        rmq.advance(seconds=30)
        polled = list(reader) if in_a_loop else reader.poll(0)
        assert [message.body for message in polled] == [b"b", b"d"]
    assert rmq.broker.lag("g") == 0


@pytest.mark.slow
def test_no_schedule_loses_what_a_predicate_raised_on() -> None:
    result = explore(predicates_that_raise, runs=60)
    assert result.chosen["fault"] > 5


@pytest.mark.slow
def test_a_poll_that_passes_over_an_error_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PullConsumer, "_stop_before", lambda consumer, message: None)
    with pytest.raises(AssertionError):
        explore(predicates_that_raise, runs=5)
