"""Clients that join and leave, and notification of their groups' members.

Mirrors ``ClientManageProcessor``, ``ConsumerIdsChangeListener`` and the locking half of ``AdminBrokerProcessor``.
Called under the runner's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from librmq.broker.context import BrokerContext
from librmq.broker.registry import Changes, QueueLocks, comparable, describe_differences
from librmq.errors import RmqError
from librmq.message.message import MessageQueue, retry_topic
from librmq.protocol import (
    ChannelClosed,
    ClientRemoved,
    ConsumerData,
    ConsumerIds,
    ConsumersChanged,
    Endpoint,
    GroupSubscriptions,
    Heartbeat,
    LockQueues,
    Request,
    Subscription,
    UnlockQueues,
    Unregister,
)
from librmq.runtime.event_log import EventLog

_log = EventLog("librmq.broker")


class Clients:
    """The clients of one broker, their filters and their queue locks."""

    def __init__(self, context: BrokerContext, locks: QueueLocks, filters_changed: Callable[[], None]) -> None:
        """``filters_changed()`` is called when the groups' filters may have changed."""
        self._broker_name = context.name
        self._runner = context.runner
        self._topics = context.topics
        self._groups = context.groups
        self._registry = context.registry
        self._registrations = context.registrations
        self._held_pulls = context.held_pulls
        self._metrics = context.metrics
        self._locks = locks
        self._filters_changed = filters_changed
        self._differences: dict[str, str] = {}  # by group, as last logged
        self._compared: dict[str, dict[str, dict[str, str]]] = {}  # the subscriptions of its members, by group
        self._settings: dict[str, set[str]] = {}  # by group, those that were logged

    def heartbeat(self, request: Heartbeat) -> None:
        """Register a client; make the groups of its consumers, and their retry topics."""
        for data in request.consumers:
            group = self._groups.get_or_create(data.group)
            # At least one queue, because a group without any can get some later, and the topic stays as it is.
            self._topics.ensure(retry_topic(group.name), max(group.retry_queues, 1))
        self._warn_of_same_id(request)
        for data in request.consumers:
            self._warn_of_settings(request.client_id, data)
        changes = self._registry.heartbeat(request)
        now = self._runner.now_ms()
        for data in request.consumers:
            for subscription in data.subscriptions.values():
                self._registrations.register(
                    subscription.topic,
                    data.group,
                    subscription.expression,
                    subscription.expression_type,
                    subscription.version,
                    now,
                )
            self._registrations.keep_topics(data.group, set(data.subscriptions), now)
            self._warn_of_differences(data.group, request.client_id)
        self._filters_changed()
        self._notify_members(changes)

    def _warn_of_same_id(self, request: Heartbeat) -> None:
        """Log once that two clients use one id and therefore count as one."""
        client_id = request.client_id
        registered = self._registry.endpoint(client_id)
        if registered is not None and registered is not request.client and client_id not in self._registry.shared_ids:
            self._registry.shared_ids.add(client_id)
            _log.warning(
                "%(broker)s: two clients use the id %(client)s. They count as one, and consume the same queues: "
                "give each a "
                "different instance_name, or shut the other down first",
                broker=self._broker_name,
                client=client_id,
            )

    def _warn_of_settings(self, client_id: str, data: ConsumerData) -> None:
        """Log once that an instance changes settings that count for its whole group."""
        group = self._registry.consumers.get(data.group)
        if group is None or group.clients.keys() <= {client_id}:
            self._settings.pop(data.group, None)
            return
        before = f"{group.kind}, {group.model.value}, from {group.consume_from.value}"
        now = f"{data.kind}, {data.model.value}, from {data.consume_from.value}"
        logged = self._settings.setdefault(data.group, {before})
        if now not in logged:
            logged.add(now)
            _log.warning(
                "%(broker)s: group %(group)s is now %(settings)s, as client %(client)s says; before it was "
                "%(former_settings)s. The last heartbeat counts for the whole group: give all instances the same "
                "settings",
                broker=self._broker_name,
                group=data.group,
                settings=now,
                client=client_id,
                former_settings=before,
            )

    def _warn_of_differences(self, group: str, client_id: str) -> None:
        """Log each time the group's instances begin or cease to have different subscriptions."""
        subscriptions, previous = self._registry.consumers[group].subscriptions_by_client, self._compared.get(group, {})
        # Only this client's subscriptions are read again, because each member of a large group sends heartbeats.
        compared = {
            member: previous[member] if member in previous and member != client_id else comparable(topics)
            for member, topics in subscriptions.items()
        }
        self._compared[group] = compared
        first = compared[client_id]
        differs = any(other != first for other in compared.values())
        differences = describe_differences(group, compared) if differs else ""
        if differences != self._differences.get(group, ""):
            if differences:
                _log.warning(
                    "%(broker)s: %(differences)s", broker=self._broker_name, differences=differences, group=group
                )
            else:
                _log.info(
                    "%(broker)s: all instances of group %(group)s subscribe to the same again",
                    broker=self._broker_name,
                    group=group,
                )
            self._differences[group] = differences

    def unregister(self, request: Unregister) -> None:
        """Remove a client from a group, with its held pulls there."""
        if request.consumer_group is not None:
            self._held_pulls.remove_client(request.client_id, request.consumer_group)
        changes = self._registry.leave_groups(request.client_id, request.producer_group, request.consumer_group)
        if self._registry.endpoint(request.client_id) is None:
            self._registry.shared_ids.discard(request.client_id)
        self._notify_members(changes)

    def channel_closed(self, request: ChannelClosed) -> None:
        """Remove a lost client from all its groups. Its locks expire by themselves.

        If it is alive, its next heartbeat registers it again, as in 4.9. Its pulls continue until then.
        """
        client = self._registry.endpoint(request.client_id)
        self._registry.shared_ids.discard(request.client_id)
        changes = self._registry.remove_client(request.client_id)
        self._held_pulls.remove_client(request.client_id)
        if client is not None:
            self._call(client, ClientRemoved(self._broker_name))
        self._notify_members(changes)

    def consumer_ids(self, request: ConsumerIds) -> tuple[str, ...]:
        """Return the members of a consumer group."""
        group = self._registry.consumers.get(request.group)
        return () if group is None else tuple(group.clients)

    def subscriptions(self, request: GroupSubscriptions) -> Mapping[str, Mapping[str, Subscription]]:
        """Return the last heartbeat data of each member of a consumer group."""
        group = self._registry.consumers.get(request.group)
        return {} if group is None else dict(group.subscriptions_by_client)

    def lock(self, request: LockQueues) -> frozenset[MessageQueue]:
        """Lock queues for a member; return the queues that it holds then."""
        return self._locks.lock(request.group, request.client_id, request.queues, self._runner.now_ms())

    def unlock(self, request: UnlockQueues) -> None:
        """Release locks."""
        self._locks.unlock(request.group, request.client_id, request.queues)

    def _notify_members(self, changes: Changes) -> None:
        """Notify the members of changed groups, so that they rebalance, and mark the filters of ended groups dead."""
        now = self._runner.now_ms()
        for name in changes.ended:
            self._differences.pop(name, None)
            self._compared.pop(name, None)
            self._registrations.unregister(name, now)
            self._filters_changed()
            if self._metrics is not None:
                self._metrics.gauge("clients", None, group=name)
        for name in changes.changed:
            if name not in self._registry.consumers:
                continue  # an earlier notification made its last client leave
            clients = list(self._registry.consumers[name].clients.values())
            if self._metrics is not None:
                self._metrics.gauge("clients", len(clients), group=name)
            for client in clients:
                self._call(client, ConsumersChanged(name))

    @staticmethod
    def _call(client: Endpoint, request: Request[None]) -> None:
        try:
            client.call(request)
        except RmqError as error:  # the client is leaving
            _log.info("%(request)s: a client could not be notified: %(error)s", request=request, error=error)
