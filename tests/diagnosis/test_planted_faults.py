"""Faults planted at random, several in one store: each is found, and nothing else is.

Each fault has its own group and topic, so a finding about any other group is false.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Final, NamedTuple

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from librmq import DeadLetter, MessageModel, PushConsumer, ReconsumeLater
from librmq.client.allocation import allocate_averagely, allocate_averagely_by_circle
from librmq.diagnosis import Thresholds, diagnose
from librmq.message.message import MessageQueue
from librmq.testing import Kit
from librmq.testing._evidence import UndeliveredWarning
from tests.budget import examples

LIMITS: Final = Thresholds(normal_lag=5, large_lag=1000, old_s=600, stuck_s=30)
LAGS: Final = frozenset(("backlog", "uneven-lag", "hot-key"))
"""Other findings that a backlog may cause."""


class Planted(NamedTuple):
    """Planted faults: the findings that must appear, and those that may."""

    expected: frozenset[str]
    allowed: frozenset[str] = frozenset()


class Place(NamedTuple):
    """A group, a topic, and two numbers drawn for them."""

    rmq: Kit
    group: str
    topic: str
    queues: int
    messages: int

    def start(self, listener: Callable[[object], object] = lambda message: None, **settings: object) -> PushConsumer:
        consumer = self.rmq.consumer(self.group, fail_fast=False, **settings)  # type: ignore[arg-type]
        consumer.subscribe(self.topic, listener)
        return consumer

    def send(self) -> None:
        for number in range(self.messages):
            self.rmq.producer().send(self.topic, b"x", keys=f"k{number}", queue=number % self.queues)


def healthy(place: Place) -> Planted:
    for _ in range(place.queues):
        place.start()
    place.send()
    return Planted(frozenset())


def unlike_topics(place: Place) -> Planted:
    place.start()
    place.start().subscribe(f"{place.topic}-2", lambda message: None)
    return Planted(frozenset(("subscriptions-differ",)))


def unlike_tags(place: Place) -> Planted:
    for tags in ("a", "b"):
        place.rmq.consumer(place.group).subscribe(place.topic, lambda message: None, tags=tags)
    return Planted(frozenset(("subscriptions-differ",)))


def too_many_instances(place: Place) -> Planted:
    for _ in range(place.queues + 1):
        place.start()
    return Planted(frozenset(("idle-instances",)))


def unlike_models(place: Place) -> Planted:
    place.start()
    place.start(model=MessageModel.BROADCASTING, instance_name=f"stable-{place.group}")
    return Planted(
        frozenset(("model-differs",)), frozenset(("subscriptions-differ", "queues-with-two-owners", "uneven-shares"))
    )


def unlike_orders(place: Place) -> Planted:
    place.start()
    place.start(orderly=True)
    return Planted(frozenset(("order-differs",)))


def unlike_strategies(place: Place) -> Planted:
    place.start(strategy=allocate_averagely)
    place.start(strategy=allocate_averagely_by_circle)
    shares = ("queues-without-owner", "queues-with-two-owners", "uneven-shares", "idle-instances")
    return Planted(frozenset(("strategy-differs",)), frozenset(shares))


def all_to_all(client_id: str, queues: list[MessageQueue], clients: list[str]) -> list[MessageQueue]:
    return list(queues)


def two_owners(place: Place) -> Planted:
    for _ in range(2):
        place.start(strategy=all_to_all)
    return Planted(frozenset(("queues-with-two-owners",)))


def none_of_the_last(client_id: str, queues: list[MessageQueue], clients: list[str]) -> list[MessageQueue]:
    return list(queues[:-1])


def no_owner(place: Place) -> Planted:
    place.start(strategy=none_of_the_last)
    return Planted(frozenset(("queues-without-owner",)))


def not_running(place: Place) -> Planted:
    consumer = place.start()
    place.rmq.advance(seconds=30)
    place.send()
    place.rmq.advance(seconds=10)
    consumer.shutdown()
    place.send()
    return Planted(frozenset(("group-not-running",)), LAGS)


def paused(place: Place) -> Planted:
    consumer = place.start()
    place.rmq.advance(seconds=30)
    place.send()
    place.rmq.advance(seconds=10)
    consumer.pause()
    place.send()
    place.send()
    return Planted(frozenset(("paused", "backlog")), LAGS)


def dead_letters(place: Place) -> Planted:
    def fail(message: object) -> None:
        raise DeadLetter("of no use")

    place.start(fail)
    place.rmq.advance(seconds=30)
    place.send()
    return Planted(frozenset(("dead-letters",)))


def stuck(place: Place) -> Planted:
    def fail(message: object) -> None:
        raise ReconsumeLater

    place.start(fail, orderly=True)
    place.rmq.advance(seconds=30)
    place.send()
    return Planted(frozenset(("stuck-message",)), LAGS)


def beyond_the_end(place: Place) -> Planted:
    place.send()
    place.rmq.advance(seconds=1)
    offsets = place.rmq.broker.tables.offsets
    offsets.set(f"{place.topic}@{place.group}", {0: place.messages + 100})
    return Planted(frozenset(("progress-beyond-end",)), LAGS | {"group-not-running"})


FAULTS: Final = (
    unlike_topics, unlike_tags, too_many_instances, unlike_models, unlike_orders, unlike_strategies, two_owners,
    no_owner, not_running, paused, dead_letters, stuck, beyond_the_end,
)  # fmt: skip


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(
        st.tuples(st.sampled_from((healthy, *FAULTS)), st.integers(2, 6), st.integers(6, 30)), min_size=1, max_size=5
    )
)
@example([(plant, 4, 20) for plant in (healthy, *FAULTS)])
def test_each_finding_finds_its_own_and_nothing_else(drawn: list[tuple[Callable[[Place], Planted], int, int]]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UndeliveredWarning)
        with Kit() as rmq:
            planted: dict[str, Planted] = {}
            for number, (plant, queues, messages) in enumerate(drawn):
                group, topic = f"G{number}", f"T{number}"
                rmq.broker.create_topic(topic, queues)
                planted[group] = plant(Place(rmq, group, topic, queues, messages))
            rmq.advance(seconds=60)
            found: dict[str, set[str]] = {group: set() for group in planted}
            for one in diagnose(rmq.broker, LIMITS):
                found[one.subject.removeprefix("group ").partition(",")[0]].add(one.kind)
            for group, (expected, allowed) in planted.items():
                assert expected <= found[group] <= expected | allowed, (group, found)
