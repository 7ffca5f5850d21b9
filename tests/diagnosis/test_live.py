"""Findings about a running broker: planted faults are found and named, a healthy group has none."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from librmq import Broker, ConsumeFrom, Producer, PushConsumer, ReconsumeLater
from librmq.client.allocation import allocate_averagely
from librmq.diagnosis import Thresholds, diagnose, held_progress
from librmq.message.message import MessageQueue
from librmq.testing import Kit

LIMITS = Thresholds(normal_lag=5, large_lag=1000, stuck_s=30)


def kinds(rmq: Kit | Broker) -> list[str]:
    return [one.kind for one in diagnose(rmq.broker if isinstance(rmq, Kit) else rmq, LIMITS)]


def nothing(message: object) -> None:
    pass


def started(rmq: Kit, group: str, *topics: str, **settings: object) -> PushConsumer:
    consumer = rmq.consumer(group, **settings)  # type: ignore[arg-type]
    for topic in topics:
        consumer.subscribe(topic, nothing)
    return consumer


def test_a_healthy_group_has_no_findings(rmq: Kit) -> None:
    rmq.broker.create_topic("T", 4)
    for _ in range(2):
        started(rmq, "G", "T")
    for _ in range(50):
        rmq.producer().send("T", b"x")
    rmq.advance(seconds=60)
    assert kinds(rmq) == []


def test_instances_that_subscribe_to_different_topics(rmq: Kit) -> None:
    rmq.broker.create_topic("A", 4)
    rmq.broker.create_topic("B", 4)
    started(rmq, "G", "A")
    started(rmq, "G", "A", "B")
    rmq.advance(seconds=60)
    (found,) = diagnose(rmq.broker, LIMITS)
    assert (found.kind, found.severity, found.subject) == ("subscriptions-differ", "error", "group G, topic B")
    assert len(found.evidence["without"]) == 1


def test_instances_with_different_tags(rmq: Kit) -> None:
    rmq.broker.create_topic("A", 4)
    for tag in ("red", "blue"):
        rmq.consumer("G").subscribe("A", nothing, tags=tag)
    rmq.advance(seconds=60)
    (found,) = diagnose(rmq.broker, LIMITS)
    assert found.kind == "subscriptions-differ"
    assert set(found.evidence["subscriptions"]) == {"tags 'red'", "tags 'blue'"}


def test_more_instances_than_queues(rmq: Kit) -> None:
    rmq.broker.create_topic("T", 2)
    for _ in range(3):
        started(rmq, "G", "T")
    rmq.advance(seconds=60)
    (found,) = diagnose(rmq.broker, LIMITS)
    assert (found.kind, found.severity, found.evidence["instances"]) == ("idle-instances", "info", 3)
    assert len(found.evidence["client_ids"]) == 1


def only_first_queue(client_id: str, queues: list[MessageQueue], clients: list[str]) -> list[MessageQueue]:
    return queues[:1] if client_id == clients[0] else []


def every_queue(client_id: str, queues: list[MessageQueue], clients: list[str]) -> list[MessageQueue]:
    return list(queues)


def first_takes_most(client_id: str, queues: list[MessageQueue], clients: list[str]) -> list[MessageQueue]:
    return queues[:-1] if client_id == clients[0] else queues[-1:]


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (only_first_queue, {"queues-without-owner", "idle-instances"}),
        (every_queue, {"queues-with-two-owners"}),
        (first_takes_most, {"uneven-shares"}),
        (allocate_averagely, set()),
    ],
)
def test_an_own_strategy(rmq: Kit, strategy: object, expected: set[str]) -> None:
    rmq.broker.create_topic("T", 4)
    for _ in range(2):
        started(rmq, "G", "T", strategy=strategy)
    rmq.advance(seconds=60)
    assert set(kinds(rmq)) - {"backlog"} == expected


def test_instances_of_different_modes(rmq: Kit) -> None:
    rmq.broker.create_topic("T", 4)
    started(rmq, "G", "T")
    started(rmq, "G", "T", orderly=True)
    rmq.advance(seconds=60)
    assert "order-differs" in kinds(rmq)


def test_a_group_that_does_not_run(rmq: Kit) -> None:
    rmq.broker.create_topic("T", 1)
    consumer = started(rmq, "G", "T")
    rmq.producer().send("T", b"x")
    rmq.advance(seconds=30)
    consumer.shutdown()
    assert kinds(rmq) == []
    rmq.producer().send("T", b"x")
    rmq.advance(seconds=1)
    assert kinds(rmq) == ["group-not-running"]


def test_an_orderly_message_that_fails_again_and_again(rmq: Kit) -> None:
    def fail(message: object) -> None:
        raise ReconsumeLater

    rmq.broker.create_topic("T", 1)
    rmq.consumer("G", orderly=True).subscribe("T", fail)
    ids = [rmq.producer().send("T", b"x").message_id for _ in range(3)]
    rmq.advance(seconds=90)
    (held,) = held_progress(rmq.broker)
    assert (held.message_id, held.behind) == (ids[0], 2)
    assert held.failures is not None
    assert held.failures >= 3
    assert "stuck-message" in kinds(rmq)


def test_a_paused_instance(rmq: Kit) -> None:
    rmq.broker.create_topic("T", 1)
    consumer = started(rmq, "G", "T")
    rmq.producer().send("T", b"x")
    rmq.advance(seconds=30)
    consumer.pause()
    for _ in range(20):
        rmq.producer().send("T", b"x")
    assert {"paused", "backlog"} <= set(kinds(rmq))


def test_a_key_that_many_messages_of_a_queue_share(rmq: Kit) -> None:
    rmq.broker.create_topic("T", 4)
    consumer = started(rmq, "G", "T")
    rmq.producer().send("T", b"x")
    rmq.advance(seconds=30)
    consumer.pause()
    for number in range(40):
        rmq.producer().send("T", b"x", keys="hot" if number % 8 else f"k{number}", queue=min(number % 8, 1))
    (found,) = [one for one in diagnose(rmq.broker, LIMITS) if one.kind == "hot-key"]
    assert found.evidence["key"] == "hot"


# --- with threads


@contextmanager
def threaded(group: str, listener: object, threads: int = 4) -> Iterator[Broker]:
    with Broker.temporary() as broker:
        broker.create_topic("T", 4)
        consumer = PushConsumer(broker, group, threads=threads, consume_from=ConsumeFrom.FIRST)
        consumer.subscribe("T", listener)  # type: ignore[call-overload]
        with consumer, Producer(broker, "p") as producer:
            for number in range(40):
                producer.send("T", b"x", keys=f"k{number}")
            yield broker


def test_a_stuck_listener_is_found_with_its_stack() -> None:
    entered, release = threading.Event(), threading.Event()

    def waits_for_a_door(message: object) -> None:
        entered.set()
        release.wait(60)

    with threaded("G", waits_for_a_door, 1) as broker:
        try:
            assert entered.wait(20)
            held = next(one for one in held_progress(broker) if one.stack)
            assert "waits_for_a_door" in " ".join(held.stack)
            assert held.thread is not None
            assert held.thread.startswith("librmq-")
            found = diagnose(broker, Thresholds(stuck_s=-1, normal_lag=5))
            stuck = next(one for one in found if one.kind == "stuck-message")
            assert stuck.evidence["message_id"] == held.message_id
            assert "too-few-threads" in {one.kind for one in found}
        finally:
            release.set()


def test_listeners_that_all_wait_at_one_place() -> None:
    release, arrived = threading.Event(), threading.Semaphore(0)

    def slow_database() -> None:
        arrived.release()
        release.wait(60)

    with threaded("G", lambda message: slow_database()) as broker:
        try:
            for _ in range(4):
                assert arrived.acquire(timeout=20)
            found = [one for one in diagnose(broker, LIMITS) if one.kind == "listeners-at-one-place"]
            assert [one.subject for one in found] == ["group G"]
            assert any("slow_database" in line for line in found[0].evidence["stack"])
        finally:
            release.set()
