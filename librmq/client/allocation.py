"""Allocation of queues: strategies, and a client's own share.

Each client of a group computes its share independently, from the same queues and clients. The shares fit together only
if all clients use the same strategy and see the same lists. Strategies are pure functions of these lists and do not
sort; `own_share` does. Mirrors ``AllocateMessageQueueStrategy``, the classes in ``client.consumer.rebalance``, and the
middle of ``RebalanceImpl.rebalanceByTopic``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import lru_cache
from hashlib import md5
from typing import TYPE_CHECKING, Final, NamedTuple

from librmq.errors import AllocationError, ConfigError
from librmq.java.lang import utf16_order
from librmq.message import MessageQueue
from librmq.protocol import site_of
from librmq.runtime import lazy_numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

AllocationStrategy = Callable[[str, Sequence[MessageQueue], Sequence[str]], list[MessageQueue]]
"""``strategy(client_id, queues, clients)`` returns one client's queues, from all queues of a topic and all clients."""

LARGEST_RING: Final = 1 << 20
"""The most nodes of a ring of hashes."""


# --------------------------------------------------------------------------------------------------------- strategies


def _is_member(client_id: str, queues: Sequence[MessageQueue], clients: Sequence[str]) -> bool:
    """Return whether the client gets a share; `AllocationError` for arguments that no strategy accepts."""
    if not client_id:
        raise AllocationError("the client id is empty")
    if not queues:
        raise AllocationError("expected at least one queue to allocate")
    if not clients:
        raise AllocationError("expected at least one client to allocate queues to")
    return client_id in clients


def allocate_averagely(client_id: str, queues: Sequence[MessageQueue], clients: Sequence[str]) -> list[MessageQueue]:
    """Allocate neighbouring queues to each client, one more to the first: 0 1 2, 3 4 for five queues and two clients.

    With more clients than queues the last clients get none, nor does a client that is not among ``clients``. These
    rules, and the error, hold for all strategies except `allocate_by_config`.

    Raises:
        AllocationError: The client id, the queues or the clients are empty.
    """
    if not _is_member(client_id, queues, clients):
        return []
    index = clients.index(client_id)
    size, extra = divmod(len(queues), len(clients))
    begin = index * size + min(index, extra)
    return list(queues[begin : begin + size + (index < extra)])


def allocate_averagely_by_circle(
    client_id: str, queues: Sequence[MessageQueue], clients: Sequence[str]
) -> list[MessageQueue]:
    """Allocate queues in turn: 0 2 4, 1 3 for five queues and two clients."""
    if not _is_member(client_id, queues, clients):
        return []
    return list(queues[clients.index(client_id) :: len(clients)])


def allocate_by_config(queues: Iterable[MessageQueue]) -> AllocationStrategy:
    """Return a strategy that allocates these queues to every client, without any check."""
    fixed = tuple(queues)
    return lambda client_id, queues, clients: list(fixed)


def allocate_by_machine_room(rooms: Collection[str]) -> AllocationStrategy:
    """Return a strategy for brokers named ``room@broker``, which allocates only the queues in ``rooms``.

    Unlike `allocate_averagely` it deals the rest after equal shares from the end: 0 1 4, 2 3 for five queues and two
    clients.

    Raises:
        ConfigError: ``rooms`` is a single text.
    """
    if isinstance(rooms, str):  # whose letters would be rooms, and no client would get a queue
        raise ConfigError(f"rooms: expected names such as ['hz', 'sh'], found {rooms!r}")
    room_names = frozenset(rooms)

    def allocate(client_id: str, queues: Sequence[MessageQueue], clients: Sequence[str]) -> list[MessageQueue]:
        if not _is_member(client_id, queues, clients):
            return []
        within = [queue for queue in queues if _room_before_at(queue.broker_name) in room_names]
        index = clients.index(client_id)
        size, extra = divmod(len(within), len(clients))
        extra_at = size * len(clients) + index
        return within[index * size : (index + 1) * size] + within[extra_at : extra_at + (index < extra)]

    return allocate


def _room_before_at(broker_name: str) -> str | None:
    """Return the room of ``room@broker``, None for another form. As in 4.9, ``@`` at the end does not count."""
    room, *others = broker_name.rstrip("@").split("@")
    return room if len(others) == 1 else None


def room_before_dash(name: str) -> str | None:
    """Return the room of a broker or client that is named ``room-name``, None for another form."""
    room, dash, _ = name.partition("-")
    return room if dash else None


def allocate_machine_room_nearby(
    inner: AllocationStrategy,
    queue_room: Callable[[MessageQueue], str | None],
    client_room: Callable[[str], str | None],
) -> AllocationStrategy:
    """Return a strategy that keeps queues in their machine room.

    ``inner`` allocates the queues of a room to the clients in it, or to all clients if the room has none. The strategy
    raises `AllocationError` for a queue or client without a room.
    """

    def allocate(client_id: str, queues: Sequence[MessageQueue], clients: Sequence[str]) -> list[MessageQueue]:
        if not _is_member(client_id, queues, clients):
            return []
        queues_by_room: dict[str, list[MessageQueue]] = {}
        for queue in queues:
            room = queue_room(queue)
            if not room:
                raise AllocationError(f"no machine room is known for {queue}; by site, name brokers as 'hz-broker-a'")
            queues_by_room.setdefault(room, []).append(queue)
        clients_by_room: dict[str, list[str]] = {}
        for client in clients:
            room = client_room(client)
            if not room:
                raise AllocationError(
                    f"no machine room is known for client {client!r}; by site, give it a route as cluster.at('hz')"
                )
            clients_by_room.setdefault(room, []).append(client)
        own_room = next(room for room, members in clients_by_room.items() if client_id in members)
        share: list[MessageQueue] = []
        if own_room in queues_by_room:
            share += inner(client_id, queues_by_room[own_room], clients_by_room[own_room])
        for room in sorted(queues_by_room.keys() - clients_by_room.keys(), key=utf16_order):
            share += inner(client_id, queues_by_room[room], clients)
        return share

    return allocate


def allocate_by_site(inner: AllocationStrategy = allocate_averagely) -> AllocationStrategy:
    """Return a strategy that keeps queues at their site, which names of brokers and clients contain (`site_of`).

    ``inner`` allocates the queues of a site to the clients there, or to all clients if the site has none. The strategy
    raises `AllocationError` for a broker or client without a site.
    """
    return allocate_machine_room_nearby(inner, lambda queue: site_of(queue.broker_name), site_of)


def allocate_consistent_hash(
    client_id: str, queues: Sequence[MessageQueue], clients: Sequence[str], *, virtual_nodes: int = 10
) -> list[MessageQueue]:
    """Allocate each queue to the next client on a ring of hashes, so that few queues move when clients join or leave.

    More ``virtual_nodes`` for each client (set by ``functools.partial``) make shares more even; with 0 no client gets a
    queue. Rings and hashes of queues are cached.

    Raises:
        AllocationError: As for `allocate_averagely`, and for a negative number of nodes.
        ConfigError: The ring would have over a million nodes.
    """
    if virtual_nodes < 0:
        raise AllocationError(f"virtual_nodes: expected 0 or more, found {virtual_nodes}")
    if not _is_member(client_id, queues, clients) or not virtual_nodes:
        return []
    ring = hash_ring(tuple(clients), virtual_nodes)
    hashes = np.fromiter(map(queue_hash, queues), np.uint32, len(queues))
    owners = ring.owners[np.searchsorted(ring.hashes, hashes)]
    return [queues[at] for at in np.flatnonzero(owners == ring.numbers[client_id]).tolist()]


class _Ring(NamedTuple):
    hashes: npt.NDArray[np.uint32]
    """Places of the nodes, ascending."""
    owners: npt.NDArray[np.intp]
    """The number of each node's client; at the end the first node's client again, for places after the last node."""
    numbers: dict[str, int]


@lru_cache(maxsize=16)
def hash_ring(clients: tuple[str, ...], virtual_nodes: int) -> _Ring:
    """Return the nodes of clients by their hashes. Cached, because each client of a group asks for the same."""
    if virtual_nodes * len(clients) > LARGEST_RING:
        raise ConfigError(f"a ring of {virtual_nodes} nodes for each of {len(clients)} clients is too large")
    nodes: dict[int, str] = {}
    held: Counter[str] = Counter()
    for client in clients:
        begin = held[client]  # not 0 for a client that is listed twice
        for number in range(begin, begin + virtual_nodes):
            place = text_hash(f"{client}-{number}")
            if place in nodes:
                held[nodes[place]] -= 1
            nodes[place] = client
            held[client] += 1
    numbers = {client: number for number, client in enumerate(held)}
    places = sorted(nodes)
    owners = [numbers[nodes[place]] for place in places]
    return _Ring(np.array(places, np.uint32), np.array([*owners, owners[0]], np.intp), numbers)


def text_hash(text: str) -> int:
    """Return the place of a text on a ring: the first 32 bits of its MD5, as ``ConsistentHashRouter`` computes it."""
    return int.from_bytes(md5(text.encode("utf-8", "replace"), usedforsecurity=False).digest()[:4], "big")


@lru_cache(maxsize=1 << 16)
def queue_hash(queue: MessageQueue) -> int:
    """Return the place of a queue on the ring. Cached, because it is the same at each rebalance."""
    return text_hash(str(queue))


# ---------------------------------------------------------------------------------------------------------- own share


def own_share(
    client_id: str,
    queues: Iterable[MessageQueue],
    clients: Iterable[str],
    strategy: AllocationStrategy = allocate_averagely,
) -> list[MessageQueue]:
    """Return the queues of a topic for ``client_id``: queues and clients are sorted as in 4.9, then allocated.

    Each queue occurs once. A client whose strategy raises keeps its present queues.

    Raises:
        AllocationError: The strategy can't allocate, for example without queues or clients.
    """
    in_order = sorted(set(queues), key=MessageQueue.sort_key)
    return list(dict.fromkeys(strategy(client_id, in_order, sorted(clients, key=utf16_order))))
