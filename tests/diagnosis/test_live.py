"""Findings about a running broker: what `tests.diagnosis.test_planted_faults` does not plant, and the evidence."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from librmq import Broker, ConsumeFrom, Producer, PushConsumer, ReconsumeLater, SuspendQueue
from librmq.client import Client
from librmq.diagnosis import Finding, Thresholds, diagnose, held_progress
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


def test_instances_that_subscribe_to_different_topics(rmq: Kit) -> None:
    rmq.broker.create_topic("A", 4)
    rmq.broker.create_topic("B", 4)
    started(rmq, "G", "A")
    started(rmq, "G", "A", "B")
    rmq.advance(seconds=60)
    (found,) = diagnose(rmq.broker, LIMITS)
    assert (found.kind, found.severity, found.subject) == ("subscriptions-differ", "error", "group G, topic B")
    assert len(found.evidence["without"]) == 1
    assert found.evidence["queues_unread"] in ("0-1", "2-3")
    assert f"nothing reads queue {found.evidence['queues_unread']}" in found.what


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


def first_takes_most(client_id: str, queues: list[MessageQueue], clients: list[str]) -> list[MessageQueue]:
    return queues[:-1] if client_id == clients[0] else queues[-1:]


def test_uneven_shares(rmq: Kit) -> None:
    rmq.broker.create_topic("T", 4)
    for _ in range(2):
        started(rmq, "G", "T", strategy=first_takes_most)
    rmq.advance(seconds=60)
    assert kinds(rmq) == ["uneven-shares"]


@pytest.mark.parametrize(("groups", "expected"), [("GG", ["same"]), ("GH", [])])
def test_two_clients_of_one_id(rmq: Kit, groups: str, expected: list[str]) -> None:
    """In one group they count as one; in two groups, such as those of one process, each is a client of its own."""
    rmq.broker.create_topic("T", 4)
    for group in groups:
        consumer = PushConsumer(rmq.broker, group, client=Client(rmq.broker, instance_name="same"))
        consumer.subscribe("T", nothing)
        consumer.start()
    rmq.advance(seconds=60)
    found = [one for one in diagnose(rmq.broker, LIMITS) if one.kind == "shared-client-id"]
    assert [one.subject.rpartition("@")[2] for one in found] == expected


def four_instances(rmq: Kit, listener: Callable[[object], None] = nothing, **settings: object) -> list[PushConsumer]:
    """Start an instance for each of four queues, then send most messages to the last queue."""
    rmq.broker.create_topic("T", 4)
    made = [started(rmq, "G", **settings) for _ in range(4)]
    for consumer in made:
        consumer.subscribe("T", listener)
    rmq.advance(seconds=60)
    for number in range(40):
        rmq.producer().send("T", b"x", keys=f"k{number}", queue=3 if number > 3 else number)
    return made


def test_one_slow_listener(rmq: Kit) -> None:
    """The queue lags although its consumer holds messages, because the listener is still busy with the first."""

    def slow(message: object) -> None:
        if getattr(message, "queue_id", None) == 3:
            raise SuspendQueue

    four_instances(rmq, slow, orderly=True)
    rmq.advance(seconds=20)
    limits = Thresholds(normal_lag=5, stuck_s=1000, retries=1000)
    (found,) = [one for one in diagnose(rmq.broker, limits) if one.kind == "slow-listener"]
    assert found.subject == "group G, topic T, queue 3"
    assert found.evidence["lag"] == 37


def test_one_far_consumer(rmq: Kit) -> None:
    """The queue lags and its consumer holds no messages, because it pulls once an hour."""
    four_instances(rmq, pull_interval=3600, pull_batch_size=1)
    (found,) = [one for one in diagnose(rmq.broker, LIMITS) if one.kind == "far-consumer"]
    assert found.subject == "group G, topic T, queue 3"
    assert found.evidence["client_id"] is not None
    rmq.advance(hours=40)


def test_idle_listeners_while_messages_wait(rmq: Kit) -> None:
    """A paused instance is reported as paused, not as idle or far away."""
    made = four_instances(rmq, pull_interval=3600, pull_batch_size=1)
    assert "idle-with-backlog" not in kinds(rmq)  # within ten seconds of a burst
    rmq.advance(seconds=11)
    (found,) = [one for one in diagnose(rmq.broker, LIMITS) if one.kind == "idle-with-backlog"]
    assert found.evidence["listeners_running"] == 0
    for consumer in made:
        consumer.pause()
    told = set(kinds(rmq))
    assert "paused" in told
    assert not told & {"idle-with-backlog", "far-consumer"}
    for consumer in made:
        consumer.resume()
    rmq.advance(hours=40)


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
            assert entered.wait(60)
            held = next(one for one in held_progress(broker) if one.stack)
            assert "waits_for_a_door" in " ".join(held.stack)
            assert held.thread is not None
            assert held.thread.startswith("ConsumeMessageThread_G_")
            found = diagnose(broker, Thresholds(stuck_s=-1, normal_lag=5))
            stuck = next(one for one in found if one.kind == "stuck-message")
            assert stuck.evidence["message_id"] == held.message_id
            assert (stuck.subject, stuck.evidence["queue_id"]) == (f"group G, topic {held.topic}", held.queue_id)
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
                assert arrived.acquire(timeout=60)
            found = list[Finding]()
            while not found:  # until most of them have come from the semaphore to the event
                found = [one for one in diagnose(broker, LIMITS) if one.kind == "listeners-at-one-place"]
            assert [one.subject for one in found] == ["group G"]
            assert any("slow_database" in line for line in found[0].evidence["stack"])
            assert "slow_database: they all wait" in found[0].what  # not the line of threading.py where it waits
        finally:
            release.set()


@pytest.mark.parametrize("wrong", [None, 5, b"folder", ["folder"]])
def test_what_is_no_source_is_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match="source: expected a Broker, what share returned, the folder of a store"):
        diagnose(wrong)
