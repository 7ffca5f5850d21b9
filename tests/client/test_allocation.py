"""Shares of queues, and groups whose instances differ. ``tests/golden`` has RocketMQ's own results."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from librmq.broker.groups import describe_differences, group_differences
from librmq.client import allocation
from librmq.client.allocation import (
    AllocationStrategy,
    allocate_averagely,
    allocate_averagely_by_circle,
    allocate_by_config,
    allocate_by_machine_room,
    allocate_consistent_hash,
    allocate_machine_room_nearby,
    own_share,
)
from librmq.errors import AllocationError, ConfigError
from librmq.message.message import MessageQueue


def queues(count: int, broker: str = "b", topic: str = "T") -> list[MessageQueue]:
    return [MessageQueue(topic, broker, number) for number in range(count)]


def ids(share: Sequence[MessageQueue]) -> list[int]:
    return [queue.queue_id for queue in share]


def room(name: str) -> str:
    return name[:2]


NEARBY = allocate_machine_room_nearby(allocate_averagely, lambda queue: room(queue.broker_name), room)


def test_a_single_text_is_no_list_of_machine_rooms() -> None:
    with pytest.raises(ConfigError, match=r"expected names such as \['hz', 'sh'\], found 'r1'"):
        allocate_by_machine_room("r1")


@pytest.mark.parametrize(
    ("broker", "counts"), [("r@b", True), ("r@b@", True), ("r@", False), ("r@@b", False), ("@b", False)]
)
def test_a_machine_room_stands_before_the_only_at(broker: str, counts: bool) -> None:
    """The machine room is the text before the only @, because 4.9 splits names there."""
    assert bool(allocate_by_machine_room({"r"})("c", queues(1, broker), ["c"])) is counts


def test_names_of_rooms_are_in_the_order_of_utf_16() -> None:
    strategy = allocate_machine_room_nearby(allocate_averagely, lambda queue: queue.broker_name, lambda client: client)
    given = [*queues(1, "\uffee"), *queues(1, "\U0001f600")]
    assert [queue.broker_name for queue in strategy("c", given, ["c"])] == ["\U0001f600", "\uffee"]


STRATEGIES = [
    allocate_averagely,
    allocate_averagely_by_circle,
    allocate_by_machine_room({"r1"}),
    NEARBY,
    allocate_consistent_hash,
]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_arguments_that_no_strategy_accepts(strategy: AllocationStrategy) -> None:
    with pytest.raises(AllocationError, match="client id"):
        strategy("", [], [])
    with pytest.raises(AllocationError, match="at least one queue"):
        strategy("c", [], [])
    with pytest.raises(AllocationError, match="at least one client") as caught:
        strategy("c", queues(1), [])
    assert caught.value.java_name == "IllegalArgumentException"
    assert strategy("zz", queues(3), ["c"]) == []


def test_a_ring_is_kept_and_so_are_hashes_of_queues() -> None:
    allocation.hash_ring.cache_clear()
    allocation.queue_hash.cache_clear()
    clients = [f"c{number}" for number in range(7)]
    for client in clients:
        allocate_consistent_hash(client, queues(100), clients)
    assert allocation.hash_ring.cache_info().misses == 1
    assert allocation.queue_hash.cache_info().misses == 100


def test_a_ring_too_large_is_refused_before_it_is_made() -> None:
    with pytest.raises(ConfigError, match="too large"):
        allocate_consistent_hash("c", queues(1), ["c"], virtual_nodes=1 << 62)
    with pytest.raises(AllocationError, match="0 or more"):
        allocate_consistent_hash("c", queues(1), ["c"], virtual_nodes=-1)
    assert allocate_consistent_hash("c", queues(1), ["c"], virtual_nodes=0) == []


def test_a_client_listed_twice_has_twice_the_nodes() -> None:
    allocation.hash_ring.cache_clear()
    once, twice = allocation.hash_ring(("a", "b"), 20), allocation.hash_ring(("a", "b", "a"), 10)
    assert len(twice.hashes) == 30
    of_a = [node for node, owner in zip(once.hashes, once.owners, strict=False) if owner == once.numbers["a"]]
    of_a_twice = [node for node, owner in zip(twice.hashes, twice.owners, strict=False) if owner == twice.numbers["a"]]
    assert of_a == of_a_twice


def test_a_later_equal_hash_replaces_the_earlier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocation, "text_hash", lambda text: {"a-0": 5, "b-0": 5, "a-1": 6}[text])
    ring = allocation.hash_ring.__wrapped__(("a", "b"), 1)
    assert (ring.hashes.tolist(), ring.owners.tolist()) == ([5], [ring.numbers["b"]] * 2)
    # a has no node left, so its second occurrence starts at 0 again and takes the place back
    ring = allocation.hash_ring.__wrapped__(("a", "b", "a"), 1)
    assert (ring.hashes.tolist(), ring.owners.tolist()) == ([5], [ring.numbers["a"]] * 2)


def test_own_share_sorts_first_and_gives_each_queue_once() -> None:
    given = queues(10) + queues(3)
    random.Random(1).shuffle(given)
    assert ids(own_share("c2", given, ["c9", "c2"])) == [0, 1, 2, 3, 4]
    assert ids(own_share("\U0001f600", queues(2), ["\uffee", "\U0001f600"])) == [0]  # compared as UTF-16
    assert ids(own_share("c", given, [], allocate_by_config(queues(2) * 2))) == [0, 1]


# --- groups whose instances differ


def test_a_topic_of_one_instance_is_named() -> None:
    group = {"c1": {"A": "*"}, "c2": {"A": "*", "B": "*"}}
    (difference,) = group_differences(group)
    assert (difference.topic, difference.without, difference.subscriptions) == ("B", ("c1",), (("*", ("c2",)),))


def test_two_instances_with_a_topic_each_differ_on_both() -> None:
    group = {"c1": {"A": "*"}, "c2": {"B": "*"}}
    assert [difference.topic for difference in group_differences(group)] == ["A", "B"]


def test_differing_tags_are_reported() -> None:
    group = {"c2": {"A": "x"}, "c1": {"A": "y"}, "c3": {"A": "x"}}
    (difference,) = group_differences(group)
    assert difference.subscriptions == (("y", ("c1",)), ("x", ("c2", "c3")))
    assert "instances of group CG differ on A (c1: y; c2, c3: x)." in describe_differences("CG", group)


def test_an_equal_group_is_left_alone() -> None:
    group = {client: {"A": "x", "B": "*"} for client in ("c1", "c2")}
    assert group_differences(group) == []
    assert group_differences({}) == []
    assert not describe_differences("CG", group)
