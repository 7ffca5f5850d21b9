"""Choosing a message's queue. ``tests/golden`` has RocketMQ's choices by hash."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import pytest

from librmq.client.client import QueueSelector, RoundRobin
from librmq.client.queue_selectors import (
    BrokerLatencies,
    key_hash,
    select_at_random,
    select_by_consistent_hash,
    select_by_hash,
    select_by_remainder,
    select_by_room,
)
from librmq.clock import ManualClock
from librmq.errors import AllocationError, ConfigError
from librmq.java.lang import long_hash
from librmq.message.message import Message, MessageQueue
from librmq.message.topics import moved_keys
from tests.budget import many

MESSAGE = Message("T", b"")
A = [MessageQueue("T", "a", number) for number in range(3)]
B = [MessageQueue("T", "b", number) for number in range(3)]


@pytest.mark.parametrize(
    ("key", "code"),
    [
        ("order-1", -1207111310),
        (5, 5),
        (-1, -1),
        (-(1 << 31), -(1 << 31)),
        (1 << 32, 1),
        (-(1 << 63), -(1 << 31)),
        (1.5, 1073217536),
        (0.0, 0),
        (-0.0, -(1 << 31)),
        (math.nan, 2146959360),
        (True, 1231),
        (False, 1237),
        (MessageQueue("T", "a", 0), MessageQueue("T", "a", 0).java_hash),
    ],
)
def test_hashes_of_keys_are_those_of_java(key: object, code: int) -> None:
    assert key_hash(key) == code


def test_a_negative_number_as_a_long() -> None:
    assert key_hash(long_hash(-1)) == 0


@pytest.mark.parametrize(
    ("key", "java_name"),
    [(None, "NullPointerException"), (b"x", "IllegalArgumentException"), (1 << 63, "IllegalArgumentException")],
)
def test_no_queue_without_a_key_to_hash(key: object, java_name: str) -> None:
    with pytest.raises(AllocationError) as caught:
        select_by_hash(A, MESSAGE, key)
    assert caught.value.java_name == java_name


def test_the_remainder_loses_the_sign_of_the_hash() -> None:
    """The remainder has the sign of the hash, which is then dropped."""
    assert select_by_hash(A, MESSAGE, -(1 << 31)) == A[2]
    assert select_by_hash(A, MESSAGE, -4) == A[1]


def test_neighbouring_numbers_go_to_neighbouring_queues() -> None:
    assert [select_by_remainder(A, MESSAGE, number) for number in range(4)] == [*A, A[0]]
    for key in (-1, True, "1", None):
        with pytest.raises(AllocationError):
            select_by_remainder(A, MESSAGE, key)


def test_random_choices_are_those_of_the_dice() -> None:
    """Random choices come from the given dice and reach every queue."""
    select = select_at_random(Random(7))
    chosen = [select(A, MESSAGE, None) for _ in range(50)]
    assert set(chosen) == set(A)
    again = select_at_random(Random(7))
    assert chosen == [again(A, MESSAGE, None) for _ in range(50)]


def test_a_room_narrows_the_choice_if_it_has_queues() -> None:
    def select(*rooms: str) -> MessageQueue:
        return select_by_room(rooms, lambda queue: queue.broker_name, select_by_remainder)(A + B, MESSAGE, 4)

    assert select("b") == B[1]
    assert select("a", "b") == B[1]
    assert select("c") == B[1]  # no queue is in c, so this is the fifth of all queues
    assert select("a") == A[1]


KEYS = [f"order-{number}" for number in range(5000)]


@many
@pytest.mark.parametrize("virtual_nodes", [50, 100, 400])
@pytest.mark.parametrize("before", [1, 3, 8])
def test_ring_moves_only_keys_of_the_new_queue(virtual_nodes: int, before: int) -> None:
    queues = [MessageQueue("T", f"broker-{number % 2}", number) for number in range(before + 1)]
    select = select_by_consistent_hash(virtual_nodes)
    shuffled = Random(before).sample(queues, len(queues))
    chosen = {key: select(queues, MESSAGE, key) for key in KEYS}
    assert chosen == {key: select(shuffled, MESSAGE, key) for key in KEYS}
    moved = {key for key, queue in chosen.items() if select(queues[:-1], MESSAGE, key) != queue}
    assert moved == {key for key, queue in chosen.items() if queue == queues[-1]}
    assert 0.4 / (before + 1) < len(moved) / len(KEYS) < 1.8 / (before + 1)
    assert select(queues, MESSAGE, 7) == select_by_consistent_hash(virtual_nodes)(queues, MESSAGE, 7)


@pytest.mark.parametrize("virtual_nodes", [0, -1, (1 << 20) + 1, True, 1.5, "10", None])
def test_nodes_that_no_ring_has(virtual_nodes: Any) -> None:
    with pytest.raises(ConfigError, match="virtual_nodes: expected a whole number from 1 to 1048576, found"):
        select_by_consistent_hash(virtual_nodes)
    with pytest.raises(ConfigError, match="a ring of 1048576 nodes for each of 3 queues is too large"):
        select_by_consistent_hash(1 << 20)(A, MESSAGE, 1)
    with pytest.raises(AllocationError, match="expected a text, number or bool"):
        select_by_consistent_hash()(A, MESSAGE, b"x")


@pytest.mark.parametrize(("before", "after"), [(1, 2), (4, 8), (8, 9), (6, 9), (7, 7)])
def test_share_of_keys_that_growth_moves_by_hash(before: int, after: int) -> None:
    queues = [MessageQueue("T", "a", number) for number in range(after)]
    moved = [
        key
        for key in range(before * after)
        if select_by_hash(queues, MESSAGE, key) != select_by_hash(queues[:before], MESSAGE, key)
    ]
    assert len(moved) / (before * after) == pytest.approx(moved_keys(before, after))


@pytest.mark.parametrize(
    "select", [select_by_hash, select_by_remainder, select_by_consistent_hash(), select_at_random(Random(1))]
)
def test_nothing_to_choose_from(select: QueueSelector) -> None:
    with pytest.raises(AllocationError):
        select([], MESSAGE, 1)
    with pytest.raises(AllocationError):
        select_by_room({"a"}, lambda queue: queue.broker_name, select)([], MESSAGE, 1)


# --- in turn


def test_one_queue_after_the_other() -> None:
    turns = RoundRobin(5)
    assert [turns.next_queue(A) for _ in range(4)] == [A[2], A[0], A[1], A[2]]


def test_a_failed_broker_is_passed_over_if_there_is_another() -> None:
    turns = RoundRobin()
    assert [turns.next_queue(A + B, "a") for _ in range(3)] == B
    assert turns.next_queue(A, "a") in A
    with pytest.raises(AllocationError):
        turns.next_queue([])


# --- away from slow brokers


@pytest.mark.parametrize(
    ("latency_ms", "away_s"),
    [(0, 0), (549, 0), (550, 30), (999, 30), (1_000, 60), (2_000, 120), (3_000, 180), (14_999, 180), (15_000, 600)],
)
def test_a_slow_broker_is_avoided_for_a_while(latency_ms: int, away_s: int) -> None:
    clock = ManualClock()
    latencies = BrokerLatencies(clock.now_ms)
    latencies.report("a", latency_ms)
    assert latencies.is_available("a") is (away_s == 0)
    clock.advance(ms=max(0, away_s * 1000 - 1))
    assert latencies.is_available("a") is (away_s == 0)
    clock.advance(ms=1)
    assert latencies.is_available("a")
    assert latencies.is_available("never heard of")


def test_a_failed_send_counts_as_30_seconds() -> None:
    clock = ManualClock()
    latencies = BrokerLatencies(clock.now_ms)
    latencies.report("a", 3, failed=True)
    clock.advance(seconds=599)
    assert not latencies.is_available("a")
    latencies.report("a", 3)
    assert latencies.is_available("a")


def test_queues_of_available_brokers_take_turns() -> None:
    latencies = BrokerLatencies(ManualClock().now_ms)
    latencies.report("a", 700)
    turns = RoundRobin()
    chosen = [latencies.next_queue(A + B, turns) for _ in range(6)]
    assert set(chosen) <= set(B)
    with pytest.raises(AllocationError):
        latencies.next_queue([], turns)


def test_without_available_broker_the_better_half_take_turns() -> None:
    clock = ManualClock()
    latencies = BrokerLatencies(clock.now_ms)
    given = [MessageQueue("T", broker, number) for broker in "abcd" for number in range(2)]
    for broker, latency_ms in (("a", 3_000), ("b", 600), ("c", 15_000), ("d", 1_000)):
        latencies.report(broker, latency_ms)
    chosen = [latencies.next_queue(given, RoundRobin(turn)) for turn in range(8)]
    assert {queue.broker_name for queue in chosen} == {"b", "d"}
    assert {queue.queue_id for queue in chosen} == {0, 1}


def test_a_broker_that_lost_its_queues_is_forgotten() -> None:
    latencies = BrokerLatencies(ManualClock().now_ms)
    latencies.report("gone", 600)
    latencies.report("a", 700)
    assert not latencies.is_available("gone")
    assert latencies.next_queue(A, RoundRobin()) in A
    assert latencies.is_available("gone")
    assert not latencies.is_available("a")
