"""Connected clients: the groups that they produce and consume for, their subscriptions and filters.

A group has one set of subscriptions, from all of its instances; for a topic the one with the larger version counts. A
heartbeat removes the topics that it does not name. The members of a group are notified of changes. The locks of ordered
queues say which client of a group consumes a queue in order. All of this is in memory only. Mirrors
``ConsumerManager``, ``ConsumerGroupInfo``, ``ProducerManager``, ``ClientManageProcessor`` and
``ConsumerIdsChangeListener``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from librmq.broker._topics import Topics
from librmq.broker.groups import Groups, comparable, describe_differences
from librmq.broker.long_polling import HeldRequests
from librmq.config import wrong_kind
from librmq.errors import BrokerError, ClientStateError, ConfigError, RmqError
from librmq.message import MessageQueue, retry_topic
from librmq.protocol import (
    ChannelClosed,
    ClientRemoved,
    ConnectedClient,
    ConsumeFrom,
    ConsumerData,
    ConsumerIds,
    ConsumersChanged,
    GroupConnections,
    GroupSubscriptions,
    Heartbeat,
    LockQueues,
    MessageModel,
    Request,
    RequestHandler,
    ResponseCode,
    Subscription,
    UnlockQueues,
    Unregister,
)
from librmq.runtime import Runner, Step
from librmq.runtime.event_log import EventLog

_log = EventLog("librmq.broker")

if TYPE_CHECKING:
    from librmq.filter import Registrations
    from librmq.metrics import Metrics


@dataclass(slots=True)
class ConsumerGroup:
    """A consumer group with its running instances."""

    name: str
    kind: str
    model: MessageModel
    consume_from: ConsumeFrom
    clients: dict[str, RequestHandler] = field(default_factory=dict)
    """The clients by id, in the order in which they joined."""
    subscriptions_by_client: dict[str, Mapping[str, Subscription]] = field(default_factory=dict)
    """The last heartbeat data of each client, by client id."""
    subscriptions: dict[str, Subscription] = field(default_factory=dict)
    """By topic."""
    maximums: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By client id, for those that say it: when it was set, and the maximum of redeliveries (-1: the group's)."""

    @property
    def deciding_client(self) -> str | None:
        """The client whose maximum of redeliveries counts for the group: the one that set it last."""
        latest_first = reversed(self.maximums)  # of equal times, the client that joined last counts
        return max(latest_first, key=lambda client_id: self.maximums[client_id][0], default=None)

    @property
    def max_reconsume_times(self) -> int | None:
        """The maximum of redeliveries that counts for the group; None if no instance says one."""
        client_id = self.deciding_client
        return None if client_id is None else self.maximums[client_id][1]


@dataclass(eq=False, repr=False)
class Clients:
    """The clients of one broker, their groups and filters. Called under the runner's lock."""

    broker_name: str
    runner: Runner
    topics: Topics
    groups: Groups
    registrations: Registrations
    held: HeldRequests
    metrics: Metrics | None
    filters_changed: Callable[[], None]
    """Called when the groups' filters may have changed."""

    def __post_init__(self) -> None:
        self.consumers: dict[str, ConsumerGroup] = {}
        """Consumer groups with members, by name."""
        self.producers: dict[str, dict[str, RequestHandler]] = {}
        """By group and client id; those with a member."""
        self.shared_ids: set[str] = set()
        """Ids that two clients use."""
        self.retry_owners: dict[str, str] = {}
        """Groups that receive messages, by their retry topics of each topic."""
        self._log = _log.with_fields(broker=self.broker_name)
        self._differences: dict[str, str] = {}  # differences by group, as last logged
        self._compared: dict[str, dict[str, dict[str, str]]] = {}  # the subscriptions of its members, by group
        self._settings: dict[str, set[str]] = {}  # settings by group that were logged
        self._awaits_members = False
        self._answers_checks: dict[str, dict[str, bool]] = {}  # whether clients answer, by producer group and client id
        self._mixed: set[str] = set()  # producer groups of both kinds that were logged

    def register_client(self, request: Heartbeat) -> None:
        for data in request.consumers:
            retries = retry_topic(data.group)
            if retries in data.subscriptions and (owner := self.retry_owners.get(retries, data.group)) != data.group:
                raise BrokerError(
                    ResponseCode.NO_PERMISSION,
                    f"group {data.group!r} can't consume: its retry topic {retries!r} belongs to group {owner!r}, "
                    "which receives, and each would get the other's messages; give one of the groups another name",
                )
            group = self.groups.get_or_create(data.group)
            # The topic gets at least one queue, because it stays as it is when a group without any gets some later.
            self.topics.ensure(retry_topic(group.name), max(group.retry_queues, 1))
        self._warn_of_same_id(request)
        for data in request.consumers:
            self._warn_of_settings(request.client_id, data)
        changed = self._register(request)
        now = self.runner.now_ms()
        for data in request.consumers:
            for subscription in data.subscriptions.values():
                if not subscription.is_by_tags:
                    self.registrations.register(
                        subscription.topic,
                        data.group,
                        subscription.expression,
                        subscription.expression_type,
                        subscription.version,
                        now,
                    )
            self.registrations.keep_topics(data.group, set(data.subscriptions), now)
            self._warn_of_differences(data.group, request.client_id)
        self.filters_changed()
        self.held.rules_changed()
        self._notify_members(changed)

    def _register(self, request: Heartbeat) -> list[str]:
        """Register a client's groups in place of its former ones; return the consumer groups that changed."""
        client_id, client = request.client_id, request.client
        # Another client of this id, such as the producer of a consumer's process, stays in its own groups.
        producing = [name for name, clients in self.producers.items() if clients.get(client_id) is client]
        consuming = [name for name, group in self.consumers.items() if group.clients.get(client_id) is client]
        for name in request.producer_groups:
            self.producers.setdefault(name, {})[client_id] = request.client
            if request.checking_groups is not None:
                self._answers_checks.setdefault(name, {})[client_id] = name in request.checking_groups
                self._warn_of_ordinary_producer(name)
        self._leave_producers(client_id, [name for name in producing if name not in request.producer_groups])
        joined = [data.group for data in request.consumers if self._join(client_id, request.client, data)]
        groups = {data.group for data in request.consumers}
        return joined + self._leave_consumers(client_id, [name for name in consuming if name not in groups])

    def _warn_of_same_id(self, request: Heartbeat) -> None:
        """Log once that two clients of one id are in one group, and therefore count as one."""
        client_id = request.client_id
        registered = [self.producers.get(name, {}).get(client_id) for name in request.producer_groups]
        for data in request.consumers:
            group = self.consumers.get(data.group)
            registered.append(None if group is None else group.clients.get(client_id))
        is_shared = any(client is not None and client is not request.client for client in registered)
        if is_shared and client_id not in self.shared_ids:
            self.shared_ids.add(client_id)
            self._log.warning(
                "%(broker)s: two clients use the id %(client)s. They count as one, and consume the same queues: "
                "give each a "
                "different instance_name, or shut the other down first",
                client=client_id,
            )

    def _warn_of_settings(self, client_id: str, data: ConsumerData) -> None:
        """Log once that an instance changes settings that count for its whole group."""
        group = self.consumers.get(data.group)
        if group is None or group.clients.keys() <= {client_id}:
            self._settings.pop(data.group, None)
            return
        before = f"{group.kind}, {group.model.value}, from {group.consume_from.value}"
        now = f"{data.kind}, {data.model.value}, from {data.consume_from.value}"
        logged = self._settings.setdefault(data.group, {before})
        if now not in logged:
            logged.add(now)
            self._log.warning(
                "%(broker)s: group %(group)s is now %(settings)s, as client %(client)s says; before it was "
                "%(former_settings)s. The last heartbeat counts for the whole group: give all instances the same "
                "settings",
                group=data.group,
                settings=now,
                client=client_id,
                former_settings=before,
            )

    def _warn_of_maximum(self, group: ConsumerGroup, former: str | None, former_maximum: int | None) -> None:
        """Log that an instance decides now that a message of the group is delivered again less or more often."""
        client_id, maximum = group.deciding_client, group.max_reconsume_times
        if maximum == former_maximum:
            return
        others = {other: of_other for other, (_, of_other) in group.maximums.items() if of_other != maximum}
        if others:
            other = former if former in others else next(iter(others))
            self._log.warning(
                "%(broker)s: group %(group)s: client %(client)s has max_reconsume_times=%(maximum)s and client "
                "%(former_client)s has %(former_maximum)s. The one that was started or configured last decides, so "
                "%(maximum)s counts for the whole group: give all instances the same",
                group=group.name,
                client=client_id,
                maximum=_maximum_text(maximum),
                former_client=other,
                former_maximum=_maximum_text(others[other]),
            )

    def _warn_of_ordinary_producer(self, name: str) -> None:
        """Log once that a group has producers that answer checks of transactions, and others that can't."""
        by_client = self._answers_checks[name]
        answering = sorted(client_id for client_id, answers in by_client.items() if answers)
        ordinary = sorted(client_id for client_id, answers in by_client.items() if not answers)
        if not (answering and ordinary):
            self._mixed.discard(name)
        elif name not in self._mixed:
            self._mixed.add(name)
            self._log.warning(
                "%(broker)s: producer group %(group)s has the ordinary producer %(client)s beside %(answering)s, which "
                "sends transactions: the broker asks any producer of the group for the state of a transaction, and an "
                "ordinary one can't answer. Give it a group of its own",
                group=name,
                client=", ".join(ordinary),
                answering=", ".join(answering),
            )

    def _warn_of_differences(self, group: str, client_id: str) -> None:
        """Log each time the group's instances begin or cease to have different subscriptions."""
        subscriptions, previous = self.consumers[group].subscriptions_by_client, self._compared.get(group, {})
        # Only this client's subscriptions are read again, because each member of a large group sends heartbeats.
        compared = {
            member: previous[member] if member in previous and member != client_id else comparable(topics)
            for member, topics in subscriptions.items()
        }
        self._compared[group] = compared
        if self.consumers[group].kind == "simple":  # they share no queues, so each may receive from topics of its own
            every = {topic: text for topics in compared.values() for topic, text in topics.items()}
            compared = {member: every | topics for member, topics in compared.items()}
        first = compared[client_id]
        differs = any(other != first for other in compared.values())
        differences = describe_differences(group, compared) if differs else ""
        if differences != self._differences.get(group, ""):
            if differences:
                self._log.warning("%(broker)s: %(differences)s", differences=differences, group=group)
            else:
                self._log.info("%(broker)s: all instances of group %(group)s subscribe to the same again", group=group)
            self._differences[group] = differences

    def unregister(self, request: Unregister) -> None:
        client_id = request.client_id
        changed: list[str] = []
        if request.producer_group is not None:
            self._leave_producers(client_id, [request.producer_group])
        if request.consumer_group is not None:
            self.held.remove_client(client_id, request.consumer_group)
            changed = self._leave_consumers(client_id, [request.consumer_group])
        if self.endpoint(client_id) is None:
            self.shared_ids.discard(client_id)
        self._notify_members(changed)

    def channel_closed(self, request: ChannelClosed) -> None:
        """Remove a lost client from all its groups. `QueueLocks` are released first if its process has ended.

        If it is alive, its next heartbeat registers it again, as in 4.9. Its pulls continue until then.
        """
        client_id = request.client_id
        by_group = (*self.producers.values(), *(group.clients for group in self.consumers.values()))
        lost = list(dict.fromkeys(clients[client_id] for clients in by_group if client_id in clients))
        self.shared_ids.discard(client_id)
        self._leave_producers(client_id, list(self.producers))
        changed = self._leave_consumers(client_id, list(self.consumers))
        self.held.remove_client(client_id)
        for client in lost:
            self._call(client, ClientRemoved(self.broker_name))
        self._notify_members(changed)

    def await_members(self, ms: int) -> None:
        """Let the clients of a former broker register before any group shares its queues out."""
        self._awaits_members = True
        self.runner.wake(Step(f"{self.broker_name} members", self._end_wait), self.runner.now_ms() + ms)

    def _end_wait(self, now_ms: int) -> None:
        self._awaits_members = False
        for name in list(self.consumers):
            self.notify_group(name, ConsumersChanged(name))

    def consumer_ids(self, request: ConsumerIds) -> tuple[str, ...]:
        """Return the members of a consumer group.

        Raises:
            BrokerError: The broker has just opened, and awaits those of a former one; it will notify all.
        """
        if self._awaits_members:
            raise BrokerError(
                ResponseCode.SERVICE_NOT_AVAILABLE, f"{self.broker_name} has just opened and awaits the members"
            )
        group = self.consumers.get(request.group)
        return () if group is None else tuple(group.clients)

    def subscriptions(self, request: GroupSubscriptions) -> Mapping[str, Mapping[str, Subscription]]:
        group = self.consumers.get(request.group)
        return {} if group is None else dict(group.subscriptions_by_client)

    def _join(self, client_id: str, client: RequestHandler, data: ConsumerData) -> bool:
        group = self.consumers.get(data.group)
        if group is None:
            group = self.consumers[data.group] = ConsumerGroup(data.group, data.kind, data.model, data.consume_from)
        group.kind, group.model, group.consume_from = data.kind, data.model, data.consume_from
        is_new = client_id not in group.clients
        group.clients[client_id] = client
        group.subscriptions_by_client[client_id] = data.subscriptions
        former, former_maximum = group.deciding_client, group.max_reconsume_times
        if data.max_reconsume_times is not None:
            group.maximums[client_id] = data.set_timestamp_ms, data.max_reconsume_times
        self._warn_of_maximum(group, former, former_maximum)
        has_maximum_changed = group.max_reconsume_times != former_maximum
        return _subscribe(group.subscriptions, data.subscriptions) or is_new or has_maximum_changed

    def _leave_producers(self, client_id: str, names: Iterable[str]) -> None:
        for name in names:
            clients = self.producers.get(name)
            if clients is not None and clients.pop(client_id, None) is not None and not clients:
                del self.producers[name]
            kinds = self._answers_checks.get(name)
            if kinds is not None and kinds.pop(client_id, None) is not None:
                self._warn_of_ordinary_producer(name)
                if not kinds:
                    del self._answers_checks[name]

    def _leave_consumers(self, client_id: str, names: Iterable[str]) -> list[str]:
        left = []
        for name in names:
            group = self.consumers.get(name)
            if group is None or group.clients.pop(client_id, None) is None:
                continue
            del group.subscriptions_by_client[client_id]
            group.maximums.pop(client_id, None)
            if not group.clients:
                del self.consumers[name]
                self.held.rules_changed()
            left.append(name)
        return left

    def _notify_members(self, changed: Sequence[str]) -> None:
        """Mark the filters of ended groups dead; notify the members of changed ones, so that they rebalance."""
        now = self.runner.now_ms()
        for name in [name for name in changed if name not in self.consumers]:
            self._differences.pop(name, None)
            self._compared.pop(name, None)
            self.registrations.unregister(name, now)
            self.filters_changed()
            if self.metrics is not None:
                self.metrics.gauge("clients", None, group=name)
        for name in changed:
            if name not in self.consumers:
                continue  # it has ended, perhaps by an earlier notification
            if self.metrics is not None:
                self.metrics.gauge("clients", len(self.consumers[name].clients), group=name)
            self.notify_group(name, ConsumersChanged(name, self.consumers[name].max_reconsume_times))

    def notify_group(self, name: str, request: Request[None], except_for: str | None = None) -> None:
        group = self.consumers.get(name)
        for client_id, client in () if group is None else tuple(group.clients.items()):
            if client_id != except_for:
                self._call(client, request)

    @staticmethod
    def _call(client: RequestHandler, request: Request[None]) -> None:
        try:
            client.call(request)
        except RmqError as error:  # the client is leaving
            _log.info("%(request)s: a client could not be notified: %(error)s", request=request, error=error)

    # ---- queries

    def endpoint(self, client_id: str) -> RequestHandler | None:
        for clients in (*self.producers.values(), *(group.clients for group in self.consumers.values())):
            if client_id in clients:
                return clients[client_id]
        return None

    def connected(self) -> tuple[ConnectedClient, ...]:
        return ConnectedClient._by_id(
            ((client_id, name) for name, clients in self.producers.items() for client_id in clients),
            ((client_id, name) for name, group in self.consumers.items() for client_id in group.clients),
        )

    def connections(self, name: str) -> GroupConnections | None:
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

    def instance(self, name: str, client_id: str) -> RequestHandler:
        group = self.consumers.get(name)
        client = None if group is None else group.clients.get(client_id)
        if client is None:
            raise ClientStateError(f"client {client_id!r} is not in group {name!r}")
        return client


def _maximum_text(maximum: int | None) -> str:
    return "None (the group's)" if maximum in (None, -1) else str(maximum)


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


# ---- the locks of ordered queues


class QueueLocks:
    """Which client of a group consumes a queue in order, in memory. Called under the runner's lock.

    Each use checks whether a lock has expired, so no step has to run for a client that is lost. Mirrors
    ``RebalanceLockManager`` and the locking half of ``AdminBrokerProcessor``.
    """

    def __init__(self, expiry_ms: int, now_ms: Callable[[], int]) -> None:
        """Return a table without locks; each expires ``expiry_ms`` after its last renewal, by ``now_ms()``.

        Raises:
            ConfigError: ``expiry_ms`` is not a whole number of at least 0.
            TypeError: ``now_ms`` is not a function.
        """
        if type(expiry_ms) is not int or expiry_ms < 0:
            raise ConfigError(f"expiry_ms: expected a whole number of at least 0, found {expiry_ms!r:.80}")
        if not callable(now_ms):
            raise wrong_kind("now_ms", now_ms, "a function that returns milliseconds")
        self._expiry_ms = expiry_ms
        self._now_ms = now_ms
        self._held: dict[tuple[str, MessageQueue], tuple[str, int]] = {}  # client id, time of the last renewal
        self._groups_by_topic: dict[str, set[str]] = {}
        """The groups that have locked queues of a topic, also those whose clients have left since."""
        self._noted_group: Callable[[str, str], None] | None = None
        """Called with a topic and a group that it is added to."""

    def _holder(self, group: str, queue: MessageQueue, now_ms: int) -> str | None:
        """Return the id of the client that holds the queue, None if there is none."""
        held = self._held.get((group, queue))
        if held is None or now_ms - held[1] > self._expiry_ms:
            return None
        if held[1] > now_ms:
            # The clock was set back. Count from its new time, because the lock of a lost client would otherwise last
            # until the clock has come back to its old time.
            self._held[group, queue] = held[0], now_ms
        return held[0]

    def lock_queues(self, request: LockQueues) -> frozenset[MessageQueue]:
        """Lock queues or renew their locks, and return the queues that the client holds then."""
        group, client_id, now_ms = request.group, request.client_id, self._now_ms()
        locked = frozenset(queue for queue in request.queues if self._holder(group, queue, now_ms) in (None, client_id))
        for queue in locked:
            before = self._held.get((group, queue), (client_id, now_ms))
            if before[0] != client_id:
                _log.info(
                    "group %(group)s: client %(client_id)s takes over %(topic)s/%(queue_id)d, whose lock %(before)s "
                    "last renewed %(ago_ms)d ms ago",
                    group=group,
                    client_id=client_id,
                    topic=queue.topic,
                    queue_id=queue.queue_id,
                    before=before[0],
                    ago_ms=now_ms - before[1],
                )
            self._held[group, queue] = client_id, now_ms
            groups = self._groups_by_topic.setdefault(queue.topic, set())
            if group not in groups:
                groups.add(group)
                if self._noted_group is not None:
                    self._noted_group(queue.topic, group)
        return locked

    def release(self, client_id: str) -> None:
        """Release all locks of a client whose process has ended."""
        for key in [key for key, (holder, _) in self._held.items() if holder == client_id]:
            del self._held[key]

    def unlock_queues(self, request: UnlockQueues) -> None:
        """Release the client's locks."""
        for queue in request.queues:
            held = self._held.get((request.group, queue))
            if held is not None and held[0] == request.client_id:
                del self._held[request.group, queue]
