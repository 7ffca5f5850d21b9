"""The route of clients that also read from replicas: while a master is down, and messages not in its memory.

Mirrors how clients of 4.9 choose between a master and its slaves (``PullAPIWrapper``, ``suggestWhichBrokerId``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from librmq.cluster._replica import Replica
from librmq.errors import BrokerUnreachableError, ConfigError, NoRouteError
from librmq.override import override
from librmq.protocol import (
    MEMBERSHIP,
    PERM_WRITE,
    REPLICA_READS,
    ChannelClosed,
    Endpoint,
    PullMessage,
    PullResponse,
    QueueData,
    Request,
    Route,
    RouteWrapper,
    Unregister,
    watch_all,
)

R = TypeVar("R")


class _Pair(Endpoint):
    """A master and its replica as one endpoint."""

    def __init__(self, master: Endpoint | None, replica: Replica) -> None:
        self.master = master
        self._replica = replica
        self._behind: set[tuple[str, str, str, int]] = set()  # pulls that ask the replica
        self._held: dict[tuple[str, str, str, int], Callable[[], None]] = {}  # pulls at the master

    @override
    def call(self, request: Request[R], /) -> R:
        kind = type(request)
        if kind is PullMessage:
            return cast(R, self._pull(cast(PullMessage, request)))
        if kind in MEMBERSHIP:
            if isinstance(request, Unregister | ChannelClosed):
                self._drop_pulls(request)
            return self._call_both(request)
        try:
            return self._call_master(request)
        except BrokerUnreachableError:
            if not issubclass(kind, REPLICA_READS) or self._replica.dead:
                raise
            return self._replica.broker.call(request)

    def _call_master(self, request: Request[R]) -> R:
        if self.master is None:
            raise BrokerUnreachableError(f"broker {self._replica.broker.name} is down: there is only its replica")
        return self.master.call(request)

    def _call_both(self, request: Request[R]) -> R:
        """Forward a client's request to both, so that the replica has its subscriptions when the master is gone."""
        if self._replica.dead:
            return self._call_master(request)
        answer = self._replica.broker.call(request)
        try:
            return self._call_master(request)
        except BrokerUnreachableError:
            return answer

    def _drop_pulls(self, request: Unregister | ChannelClosed) -> None:
        group = request.consumer_group if isinstance(request, Unregister) else None
        is_whole = isinstance(request, ChannelClosed)
        for key in (*self._held, *self._behind):
            if key[0] == request.client_id and (is_whole or key[1] == group):
                self._held.pop(key, None)
                self._behind.discard(key)

    def _pull(self, request: PullMessage) -> PullResponse:
        key = request.client_id, request.group, request.topic, request.queue_id
        has_replica = not self._replica.dead
        self._held.pop(key, None)
        response = None
        if key not in self._behind or not has_replica:
            if request.notify is not None:
                self._held[key] = request.notify  # it is noted first, as the master can die in the call
            try:
                response = self._call_master(request)
            except BrokerUnreachableError:
                if not has_replica:
                    raise
            finally:
                if response is None or not response.is_held:
                    self._held.pop(key, None)
        if response is None:
            response = self._replica.broker.call(request)
        if response.suggests_replica:
            self._behind.add(key)
        else:
            self._behind.discard(key)
        return response

    def master_is_gone(self) -> None:
        """Answer the pulls that the master held, so that their clients ask the replica."""
        for key in tuple(self._held):
            notify = self._held.pop(key, None)
            if notify is not None:
                notify()


class ReplicaRoute(RouteWrapper):
    """A `Route` over brokers and their replicas. Thread-safe.

    Consumers read from a replica while its master is unreachable. They also do so after a pull for messages so old
    that they are not in the master's memory, until they have caught up. Sends, locks and transactions need
    the master.
    """

    def __init__(self, route: Route, *replicas: Replica) -> None:
        """``route`` leads to the masters: a broker or a `RouteTable`.

        Raises:
            ConfigError: Two replicas have the same master, or a different runner.
        """
        super().__init__(route)
        self._replicas: dict[str, Replica] = {}
        self._pairs: dict[str, _Pair] = {}
        for replica in replicas:
            name = replica.broker.name
            if name in self._replicas:
                raise ConfigError(f"two replicas of broker {name!r}: expected one for each broker")
            if replica.runner is not route.runner:
                raise ConfigError(f"the replica of broker {name!r} has another runner: open both with one runner")
            self._replicas[name] = replica
        self.end: Callable[[], None] = watch_all((route,), self._changed)
        """Stop switching between masters and replicas."""

    @override
    def topic_route(self, topic: str) -> tuple[QueueData, ...]:
        """Return the brokers that have ``topic``, by name; queues of a replica without its master are read-only."""
        return self._with_replicas(topic, self._route.topic_route(topic))

    @override
    def known_route(self, topic: str) -> tuple[QueueData, ...]:
        """Return what is known of a topic's route without waiting, with the replicas as in `topic_route`."""
        return self._with_replicas(topic, self._route.known_route(topic))

    def _with_replicas(self, topic: str, queues: tuple[QueueData, ...]) -> tuple[QueueData, ...]:
        by_broker = {data.broker_name: data for data in queues}
        for name, replica in self._replicas.items():
            if name not in by_broker and not replica.dead:
                for data in replica.broker.topic_route(topic):
                    by_broker[name] = QueueData(name, data.read_queues, 0, data.permission & ~PERM_WRITE)
        return tuple(by_broker[name] for name in sorted(by_broker))

    @override
    def broker_names(self) -> tuple[str, ...]:
        """Return the names of the brokers whose master or replica is reachable, sorted."""
        alive = {name for name, replica in self._replicas.items() if not replica.dead}
        return tuple(sorted(alive.union(self._route.broker_names())))

    @override
    def endpoint(self, broker_name: str) -> Endpoint:
        """Return the broker with that name and its replica; `NoRouteError` if there is none."""
        replica = self._replicas.get(broker_name)
        if replica is None:
            return self._route.endpoint(broker_name)
        try:
            master: Endpoint | None = self._route.endpoint(broker_name)
        except NoRouteError:
            master = None
        pair = self._pairs.get(broker_name)
        if pair is None or pair.master is not master:  # a new endpoint shows clients that the broker was reopened
            pair = self._pairs[broker_name] = _Pair(master, replica)
        return pair

    @override
    def watch(self, changed: Callable[[], None]) -> Callable[[], None]:
        """Call ``changed`` under the runner's lock when brokers, topics or queues change; call the result to stop."""
        living = [replica for replica in self._replicas.values() if not replica.dead]
        return watch_all((self._route, *(replica.broker for replica in living)), changed)

    def _changed(self) -> None:
        alive = self._route.broker_names()
        for name, pair in tuple(self._pairs.items()):  # other threads add pairs
            if name not in alive:
                pair.master_is_gone()
