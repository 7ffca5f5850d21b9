"""The connected clients: the groups that they produce and consume for, and each group's subscriptions.

Mirrors ``ConsumerManager``, ``ConsumerGroupInfo`` and ``ProducerManager``. A group has one set of subscriptions, from
all of its instances; for a topic the one with the larger version counts. A heartbeat removes the topics that it does
not name. In memory only; called under the runner's lock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from librmq.errors import RmqError
from librmq.java.hashing import utf16_order
from librmq.message.message import MessageQueue
from librmq.protocol import (
    ConsumeFrom,
    ConsumerData,
    DescribeInstance,
    Endpoint,
    Heartbeat,
    InstanceState,
    MessageModel,
    Subscription,
)


@dataclass(frozen=True, slots=True)
class ConnectedClient:
    """A client that the broker knows from its heartbeats."""

    client_id: str
    """Id of the client."""
    producer_groups: tuple[str, ...]
    """Sorted."""
    consumer_groups: tuple[str, ...]
    """Sorted."""


@dataclass(frozen=True, slots=True)
class GroupConnections:
    """The running instances of a consumer group."""

    group: str
    """Name of the group."""
    kind: str
    """``push`` or ``pull``."""
    model: MessageModel
    """Whether the instances share the messages, or each gets all."""
    consume_from: ConsumeFrom
    """Where a queue without progress begins."""
    subscriptions: Mapping[str, Subscription]
    """The group's subscriptions by topic."""
    client_ids: tuple[str, ...]
    """Client ids in the order in which the instances joined."""
    subscriptions_by_client: Mapping[str, Mapping[str, Subscription]]
    """The subscriptions of each instance, by topic."""


@dataclass(slots=True)
class ConsumerGroup:
    """A consumer group with its running instances."""

    name: str
    kind: str
    model: MessageModel
    consume_from: ConsumeFrom
    clients: dict[str, Endpoint] = field(default_factory=dict)
    """The clients by id, in the order in which they joined."""
    subscriptions_by_client: dict[str, Mapping[str, Subscription]] = field(default_factory=dict)
    """The last heartbeat data of each client, by client id."""
    subscriptions: dict[str, Subscription] = field(default_factory=dict)
    """By topic."""


@dataclass(slots=True)
class Changes:
    """Changes by a request."""

    changed: list[str] = field(default_factory=list)
    """Groups whose members or topics have changed."""
    ended: list[str] = field(default_factory=list)
    """Groups whose last member has left."""


class Registry:
    """The clients of one broker."""

    def __init__(self) -> None:
        self.consumers: dict[str, ConsumerGroup] = {}
        """Consumer groups with members, by name."""
        self.producers: dict[str, dict[str, Endpoint]] = {}
        """By group and client id; those with a member."""
        self.shared_ids: set[str] = set()
        """Ids that two clients use."""

    def heartbeat(self, beat: Heartbeat) -> Changes:
        """Register a client's groups in place of its former ones."""
        changes = Changes()
        for name in beat.producer_groups:
            self.producers.setdefault(name, {})[beat.client_id] = beat.client
        self._leave_producers(beat.client_id, self.producers.keys() - beat.producer_groups)
        for data in beat.consumers:
            if self._join(beat.client_id, beat.client, data):
                changes.changed.append(data.group)
        groups = {data.group for data in beat.consumers}
        self._leave_consumers(beat.client_id, [name for name in self.consumers if name not in groups], changes)
        return changes

    def leave_groups(self, client_id: str, producer_group: str | None, consumer_group: str | None) -> Changes:
        """Remove a client from a group, as producer or consumer or both."""
        changes = Changes()
        if producer_group is not None:
            self._leave_producers(client_id, [producer_group])
        if consumer_group is not None:
            self._leave_consumers(client_id, [consumer_group], changes)
        return changes

    def remove_client(self, client_id: str) -> Changes:
        """Remove a lost client from all its groups."""
        changes = Changes()
        self._leave_producers(client_id, list(self.producers))
        self._leave_consumers(client_id, list(self.consumers), changes)
        return changes

    def endpoint(self, client_id: str) -> Endpoint | None:
        """Return the client of an id, None if it is unknown."""
        for clients in (*self.producers.values(), *(group.clients for group in self.consumers.values())):
            if client_id in clients:
                return clients[client_id]
        return None

    def clients(self) -> tuple[ConnectedClient, ...]:
        """Return all clients, by id."""
        groups: dict[str, tuple[set[str], set[str]]] = {}
        for name, clients in self.producers.items():
            for client_id in clients:
                groups.setdefault(client_id, (set(), set()))[0].add(name)
        for name, group in self.consumers.items():
            for client_id in group.clients:
                groups.setdefault(client_id, (set(), set()))[1].add(name)
        return tuple(
            ConnectedClient(client_id, tuple(sorted(producers)), tuple(sorted(consumers)))
            for client_id, (producers, consumers) in sorted(groups.items())
        )

    def connections(self, name: str) -> GroupConnections | None:
        """Return the running instances of a consumer group; None if it has none."""
        group = self.consumers.get(name)
        if group is None:
            return None
        return GroupConnections(
            name,
            group.kind,
            group.model,
            group.consume_from,
            dict(group.subscriptions),
            tuple(group.clients),
            dict(group.subscriptions_by_client),
        )

    def instances(self, name: str) -> dict[str, InstanceState | None]:
        """Return the state of each instance of a consumer group by client id; None for one that does not answer."""
        states: dict[str, InstanceState | None] = {}
        group = self.consumers.get(name)
        for client_id, client in [] if group is None else list(group.clients.items()):
            try:
                states[client_id] = client.call(DescribeInstance(name))
            except RmqError:  # it is leaving, or of another kind
                states[client_id] = None
        return states

    def client_ids(self) -> tuple[str, ...]:
        """Return the ids of all clients, sorted."""
        ids = {client_id for clients in self.producers.values() for client_id in clients}
        return tuple(sorted(ids.union(*(group.clients for group in self.consumers.values()))))

    def _join(self, client_id: str, client: Endpoint, data: ConsumerData) -> bool:
        """Note a consumer, and return whether its group has changed."""
        group = self.consumers.get(data.group)
        if group is None:
            group = self.consumers[data.group] = ConsumerGroup(data.group, data.kind, data.model, data.consume_from)
        group.kind, group.model, group.consume_from = data.kind, data.model, data.consume_from
        is_new = client_id not in group.clients
        group.clients[client_id] = client
        group.subscriptions_by_client[client_id] = data.subscriptions
        return _subscribe(group.subscriptions, data.subscriptions) or is_new

    def _leave_producers(self, client_id: str, names: Iterable[str]) -> None:
        for name in names:
            clients = self.producers.get(name)
            if clients is not None and clients.pop(client_id, None) is not None and not clients:
                del self.producers[name]

    def _leave_consumers(self, client_id: str, names: Iterable[str], changes: Changes) -> None:
        for name in names:
            group = self.consumers.get(name)
            if group is None or group.clients.pop(client_id, None) is None:
                continue
            del group.subscriptions_by_client[client_id]
            if group.clients:
                changes.changed.append(name)
            else:
                del self.consumers[name]
                changes.ended.append(name)


def _subscribe(group_topics: dict[str, Subscription], topics: Mapping[str, Subscription]) -> bool:
    """Merge an instance's subscriptions into its group's, and return whether the group's topics have changed."""
    before = group_topics.keys() | ()
    for topic, subscription in topics.items():
        old = group_topics.get(topic)
        if old is None or subscription.version > old.version:
            group_topics[topic] = subscription
    for topic in before - topics.keys():
        del group_topics[topic]
    return group_topics.keys() != before


# ---- differences between subscriptions


class TopicDifference(NamedTuple):
    """A topic for which the instances of a group have different subscriptions. Clients are sorted."""

    topic: str
    without: tuple[str, ...]
    """The clients that do not subscribe to it. They are allocated queues nevertheless, which stay unread."""
    subscriptions: tuple[tuple[Any, tuple[str, ...]], ...]
    """Each subscription with its clients. A message that the owner of its queue does not select is skipped."""

    def __str__(self) -> str:
        parts = [f"{', '.join(clients)}: {subscription}" for subscription, clients in self.subscriptions]
        if self.without:
            parts.append(f"{', '.join(self.without)}: not at all")
        return f"{self.topic} ({'; '.join(parts)})"


def group_differences(subscriptions: Mapping[str, Mapping[str, Any]]) -> list[TopicDifference]:
    """Return the topics with different subscriptions, sorted; empty if the instances fit together.

    ``subscriptions`` is ``{client id: {topic: subscription}}``. Subscriptions are compared by ``==``, so leave out
    harmless differences, such as versions.
    """
    clients = sorted(subscriptions, key=utf16_order)
    differences = []
    for topic in sorted({topic for topics in subscriptions.values() for topic in topics}, key=utf16_order):
        without = tuple(client for client in clients if topic not in subscriptions[client])
        kinds: list[tuple[Any, list[str]]] = []
        for client in clients:
            if topic in subscriptions[client]:
                subscription = subscriptions[client][topic]
                same = next((members for kind, members in kinds if kind == subscription), None)
                if same is None:
                    kinds.append((subscription, [client]))
                else:
                    same.append(client)
        if without or len(kinds) > 1:
            differences.append(
                TopicDifference(topic, without, tuple((kind, tuple(subscribers)) for kind, subscribers in kinds))
            )
    return differences


def describe_differences(group: str, subscriptions: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a sentence about the differences in ``group`` and the remedy; empty if there are none."""
    differences = group_differences(subscriptions)
    if not differences:
        return ""
    return (
        f"instances of group {group} differ on {'; '.join(map(str, differences))}. Queues stay unread or messages are "
        "skipped: give every instance the same subscriptions, or those that differ a new group name"
    )


def comparable(subscriptions: Mapping[str, Subscription]) -> dict[str, str]:
    """Return subscriptions by topic as `group_differences` compares them: without what may differ."""
    return {topic: _description(subscription) for topic, subscription in subscriptions.items()}


def _description(subscription: Subscription) -> str:
    if subscription.expression_type not in ("", "TAG"):
        return f"sql {subscription.expression!r}"
    return "all messages" if subscription.expression == "*" else f"tags {subscription.expression!r}"


# ---- queue locks


class QueueLocks:
    """Which client of a group consumes a queue in order, in memory. Called under the runner's lock.

    Each use checks whether a lock has expired. Mirrors ``RebalanceLockManager``.
    """

    def __init__(self, expiry_ms: int) -> None:
        self._expiry_ms = expiry_ms
        self._held: dict[tuple[str, MessageQueue], tuple[str, int]] = {}  # client id, time of the last renewal

    def holder(self, group: str, queue: MessageQueue, now_ms: int) -> str | None:
        """Return the id of the client that holds the queue, None if there is none."""
        held = self._held.get((group, queue))
        if held is None or now_ms - held[1] > self._expiry_ms:
            return None
        if held[1] > now_ms:  # the clock was set back: this must not prolong the lock
            self._held[group, queue] = held[0], now_ms
        return held[0]

    def lock(self, group: str, client_id: str, queues: Iterable[MessageQueue], now_ms: int) -> frozenset[MessageQueue]:
        """Lock queues or renew their locks, and return the queues that the client holds then."""
        locked = frozenset(queue for queue in queues if self.holder(group, queue, now_ms) in (None, client_id))
        for queue in locked:
            self._held[group, queue] = client_id, now_ms
        return locked

    def unlock(self, group: str, client_id: str, queues: Iterable[MessageQueue]) -> None:
        """Release the client's locks."""
        for queue in queues:
            held = self._held.get((group, queue))
            if held is not None and held[0] == client_id:
                del self._held[group, queue]
