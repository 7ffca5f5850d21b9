"""Properties of allocation that hold for any queues and clients."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from librmq.client import allocation
from librmq.message.message import MessageQueue

ROOMS = ("r1", "r2", "r3")
QUEUES = st.lists(
    st.builds(MessageQueue, st.just("T"), st.sampled_from([f"{room}@b" for room in ROOMS]), st.integers(0, 30)),
    min_size=1,
    max_size=40,
    unique=True,
)
CLIENTS = st.lists(
    st.builds("{}@{}".format, st.sampled_from(ROOMS), st.integers(0, 20)), min_size=1, max_size=12, unique=True
)


def room(name: str) -> str:
    return name.partition("@")[0]


def nearby(inner: allocation.AllocationStrategy) -> allocation.AllocationStrategy:
    return allocation.allocate_machine_room_nearby(inner, lambda queue: room(queue.broker_name), room)


STRATEGIES: dict[str, allocation.AllocationStrategy] = {
    "averagely": allocation.allocate_averagely,
    "circle": allocation.allocate_averagely_by_circle,
    "rooms": allocation.allocate_by_machine_room(ROOMS),
    "hash": allocation.allocate_consistent_hash,
    "hash with one node": partial(allocation.allocate_consistent_hash, virtual_nodes=1),
    "nearby": nearby(allocation.allocate_averagely),
    "nearby, hash": nearby(allocation.allocate_consistent_hash),
}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES.keys())
@given(queues=QUEUES, clients=CLIENTS, data=st.data())
def test_each_queue_has_one_owner_in_any_order_of_asking(
    strategy: allocation.AllocationStrategy, queues: list[MessageQueue], clients: list[str], data: st.DataObject
) -> None:
    shares = []
    for client in clients:
        shares += allocation.own_share(
            client, data.draw(st.permutations(queues)), data.draw(st.permutations(clients)), strategy
        )
    assert sorted(shares) == sorted(queues)


@pytest.mark.parametrize("name", ["averagely", "circle", "rooms"])
@given(queues=QUEUES, clients=CLIENTS)
def test_equal_shares_differ_by_one_at_most(name: str, queues: list[MessageQueue], clients: list[str]) -> None:
    sizes = [len(allocation.own_share(client, queues, clients, STRATEGIES[name])) for client in clients]
    assert max(sizes) - min(sizes) <= 1


@given(queues=QUEUES, clients=CLIENTS)
def test_consistent_hash_moves_only_queues_of_a_leaver(queues: list[MessageQueue], clients: list[str]) -> None:
    rest = clients[1:]
    for client in rest:
        before = set(allocation.own_share(client, queues, clients, allocation.allocate_consistent_hash))
        assert before <= set(allocation.own_share(client, queues, rest, allocation.allocate_consistent_hash))


@given(queues=QUEUES, clients=CLIENTS)
def test_queues_stay_in_their_room_where_it_has_clients(queues: list[MessageQueue], clients: list[str]) -> None:
    manned = set(map(room, clients))
    for client in clients:
        for queue in allocation.own_share(client, queues, clients, STRATEGIES["nearby"]):
            assert room(queue.broker_name) == room(client) or room(queue.broker_name) not in manned
