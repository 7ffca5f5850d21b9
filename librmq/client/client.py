"""A client: the identity of producers and consumers towards the brokers of a route, its life cycle, and its routes.

Mirrors ``MQClientInstance``, ``ClientConfig.buildMQClientId`` and ``TopicPublishInfo``. Every producer and consumer
makes a client unless it gets one. A client of 4.9 repeats its heartbeat every 30 s. This one sends a heartbeat only
when something changes: at a start, and when subscriptions or brokers change. A broker that has removed the client gets
one at its next time on the grid of 30 s, which begins 1 s after the start.
"""

from __future__ import annotations

import enum
import functools
import itertools
import os
from collections.abc import Callable, Collection, Sequence
from random import Random
from typing import Any, Final, NamedTuple, Self, TypeAlias, TypeVar, cast

from librmq.client.operations import Watched
from librmq.config import check_kind
from librmq.errors import (
    AllocationError,
    BrokerBusyError,
    BrokerError,
    ClientError,
    ClientStateError,
    ConfigError,
    MessageIllegalError,
    NoRouteError,
)
from librmq.java.lang import string_hash
from librmq.message import Message, MessageQueue, UniqueIds
from librmq.message.ids import Host, encode_host
from librmq.message.properties import PropertyName
from librmq.message.topics import SystemTopic
from librmq.override import override
from librmq.protocol import (
    PERM_WRITE,
    CheckTransaction,
    ClientRemoved,
    ConsumerData,
    ConsumersChanged,
    Endpoint,
    Heartbeat,
    QueueData,
    ReplyArrived,
    Request,
    Route,
    Unregister,
    check_site,
    site_of,
)
from librmq.runtime import Runner, StateLog, Step, critical
from librmq.runtime.event_log import EventLog
from librmq.runtime.runner import next_on_grid

R = TypeVar("R")
FIRST_HEARTBEAT_MS: Final = 1_000
HEARTBEAT_MS: Final = 30_000

_log = EventLog("librmq.client")
_numbers = itertools.count(1)


class State(enum.Enum):
    """Stage of a producer's or consumer's life."""

    CREATED = "created"
    RUNNING = "running"
    START_FAILED = "start failed"
    SHUT_DOWN = "shut down"
    INHERITED = "with the parent of this forked process"


class LifeCycle:
    """Life of a producer or consumer, which refuses calls at the wrong stage. Thread-safe."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.state: State = State.CREATED

    @property
    def is_running(self) -> bool:
        """Whether it was started and not shut down."""
        return self.state is State.RUNNING

    @property
    def is_new(self) -> bool:
        """Whether it was neither started nor shut down."""
        return self.state is State.CREATED

    def start(self, action: Callable[[], None]) -> None:
        """Run ``action`` once."""
        if not self.is_new:
            raise ClientStateError(f"{self.what} is {self.state.value}: it can start only once; make a new one")
        self.state = State.START_FAILED
        action()
        self.state = State.RUNNING

    def fail_start(self) -> None:
        """Note that a start was interrupted, perhaps after its action."""
        self.state = State.START_FAILED

    def leave_to_parent(self) -> None:
        """Note in a forked child that its parent goes on with it."""
        self.state = State.INHERITED

    def shut_down(self) -> bool:
        """Note the end; return whether it was running."""
        was_running = self.is_running
        self.state = State.SHUT_DOWN
        return was_running

    def check_running(self, call: str) -> None:
        """Refuse ``call`` unless running."""
        if not self.is_running:
            advice = "call start() or open a with block first" if self.is_new else "create a new one"
            raise ClientStateError(f"{self.what} is {self.state.value}: {call} needs a running one: {advice}")


def client_of(route: Route, user: str, client: Client | None, instance_name: str | None) -> Client:
    """Return the identity of a new producer or consumer, whose class is ``user``: the given one, or a new one.

    Raises:
        ConfigError: Both ``client`` and ``instance_name`` are given, or the client is of another route.
        TypeError: ``route`` is not a `Route`, or ``client`` is not a `Client`.
    """
    if not all(hasattr(route, name) for name in ("endpoint", "topic_route", "runner")):
        advice, given = "", cast("object", route)
        if isinstance(given, str | os.PathLike):
            place = os.fspath(given)
            advice = f": open a folder with Broker.open({place!r}), reach a name server with librmq.connect({place!r})"
        raise TypeError(f"{user}: expected a route, such as a Broker or a RouteTable, found {route!r:.80}{advice}")
    check_kind("client", client, Client)
    if client is None:
        return Client(route, instance_name=instance_name)
    if instance_name is not None:
        raise ConfigError(f"instance_name: expected None with client, which has a name, found {instance_name!r:.80}")
    client._check_route(route)
    return client


class Member(Watched):
    """A producer or consumer as its client sees it; a ``with`` or ``async with`` block starts it and shuts it down."""

    client: Client
    group: str
    _answers_checks: bool = False
    """Whether it answers checks of transactions."""

    def start(self) -> Self:
        """Start."""
        raise NotImplementedError

    def shutdown(self) -> object:
        """Shut down. A repetition does nothing."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.shutdown()

    async def __aenter__(self) -> Self:
        return self.start()

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        await self.client.runner.offload(functools.partial(self.__exit__, kind))

    def consumer_data(self) -> ConsumerData | None:
        """Return the consumer's part of a heartbeat; None for a producer."""
        return None

    def answer(self, request: Request[R], /) -> R:
        """Answer a broker's request about the group; called under the runner's lock."""
        raise ClientStateError(f"{type(self).__name__} of group {self.group!r} answers no {type(request).__name__}")

    @property
    def keeps_order(self) -> bool:
        """Whether it promises to handle a queue's messages one after the other, in order."""
        return False


class Client:
    """Identity of producers and consumers of distinct groups. Thread-safe.

    ``instance_name`` makes the id ``ip@instance_name``; without it the id is unique to this client. A broadcasting
    consumer keeps its progress under this id, so give it a stable name. With ``site``, or on a route of a site, the id
    is ``site-ip@instance_name``.

    Raises:
        ConfigError: ``instance_name`` has unprintable characters, or ``site`` has characters other than letters and
            digits.
    """

    def __init__(
        self, route: Route, *, instance_name: str | None = None, host: Host | None = None, site: str | None = None
    ) -> None:
        check_kind("instance_name", instance_name, str)
        if instance_name is not None and not (instance_name and instance_name.isprintable()):
            raise ConfigError(
                f"instance_name: expected printable characters, because it also names a file, "
                f"found {instance_name!r:.80}"
            )
        identity = route.identity(instance_name)  # a test's route gives its clients the same names in each run
        maker_name = None
        if identity is not None:
            host_of_route, maker_name = identity
            host, instance_name = host or host_of_route, instance_name or maker_name
        host = host or (route.own_host or "127.0.0.1", 0)  # a remote route has clients elsewhere
        self.site: str | None = site if site is not None else route.site
        """The site of the client, with which its id begins."""
        if self.site is not None:
            check_site(self.site)
        self.route = route
        self.runner: Runner = route.runner
        self.host = host
        self.dead = False
        """Set when the simulated process of the client has died; its turns no longer run."""
        self.has_stable_name: bool = instance_name is not None
        number = next(_numbers)
        name = instance_name or f"{os.getpid()}#{int(self.runner.clock.monotonic() * 1e9) + number}"
        self.client_id: str = f"{host[0]}@{name}" if self.site is None else f"{self.site}-{host[0]}@{name}"
        # The ids of a test are the same in each run; all others are random.
        address = encode_host((host[0], 0))[:-4]
        if identity is None:
            self.unique_ids: UniqueIds = UniqueIds(self.runner.now_ms, address)
        else:
            maker = string_hash(f"{host[0]}@{maker_name}")
            self.unique_ids = UniqueIds(self.runner.now_ms, address, maker, first=0, process=1)
        self.random: Random | None = Random() if identity is None else None
        """Chooses a producer's first queues; None in a kit, where the schedule and its seed choose."""
        self._producers: dict[str, Member] = {}
        self._consumers: dict[str, Member] = {}
        self.replies: dict[str, Callable[[ReplyArrived], None]] = {}
        """Receivers of the replies to this client's requests, by correlation id."""
        self.times_removed: int = 0
        """How often brokers have removed this client, and with it the pulls that they held."""
        self._joined_ms = 0
        self._registered: set[str] = set()  # the brokers that have this client's heartbeat
        self.refusals: dict[str, BrokerError] = {}
        """What brokers, by name, refused this client's last heartbeat with: they give its consumers nothing."""
        self._states = StateLog(_log.with_fields(client=self.client_id), self.client_id)
        self._unwatch: Callable[[], None] | None = None
        self._beat = Step(f"{self.client_id} heartbeat", self._send_heartbeats, self)
        route.noted_client(self)

    def join(self, member: Member) -> None:
        """Add a producer or consumer and notify the brokers.

        Raises:
            BrokerUnreachableError: The route is a single broker, which is closed.
            ClientStateError: The client already has one of that group.
        """
        with self.runner.lock:
            is_consumer = member.consumer_data() is not None
            members = self._consumers if is_consumer else self._producers
            if member.group in members:
                kind = "consumer" if is_consumer else "producer"
                raise ClientStateError(
                    f"client {self.client_id} already has a {kind} of group {member.group!r}: "
                    "a client has one instance of a group; make another Client"
                )
            unwatch = self.route.watch(self._route_changed)  # a closed broker refuses
            members[member.group] = member
            if self._unwatch is None:
                self._unwatch = unwatch
                self._joined_ms = self.runner.now_ms()
            else:
                unwatch()
            self.beat()

    def _check_route(self, route: Route) -> None:
        """Refuse a producer or consumer of another route, because its messages would go to this client's brokers."""
        if route is not self.route:
            raise ConfigError(
                f"client {self.client_id} belongs to another route ({self.route!r}, not {route!r}): "
                "make a Client of this route, or leave client= out"
            )

    @override
    def __repr__(self) -> str:
        return f"Client({self.client_id!r}, producers={sorted(self._producers)}, consumers={sorted(self._consumers)})"

    def members(self) -> list[Member]:
        """Return the producers and consumers of this client that have joined."""
        return [*self._producers.values(), *self._consumers.values()]

    def leave(self, member: Member) -> None:
        """Remove a producer or consumer and notify the brokers."""
        with self.runner.lock, critical:
            is_consumer = self._consumers.get(member.group) is member
            members = self._consumers if is_consumer else self._producers
            if members.get(member.group) is not member:
                return
            del members[member.group]
            request = Unregister(
                self.client_id,
                producer_group=None if is_consumer else member.group,
                consumer_group=member.group if is_consumer else None,
            )
            for name in self.route.broker_names():
                try:
                    self.route.endpoint(name).call(request)
                except ClientError as error:
                    _log.warning(
                        "%(client)s: %(broker)s refused %(request)s: %(error)s",
                        client=self.client_id,
                        broker=name,
                        request=type(request).__name__,
                        error=error,
                    )
            if not self._consumers and not self._producers and self._unwatch is not None:
                self._unwatch()
                self._unwatch = None

    def beat(self) -> None:
        """Send each broker a heartbeat now."""
        with self.runner.lock:
            self._registered.clear()
            self._send_heartbeats(self.runner.now_ms())

    def removed_by(self, broker_name: str) -> None:
        """Note that a broker, perhaps reopened, has removed this client; the next heartbeat registers it again."""
        with self.runner.lock:
            self.times_removed += 1
            self._registered.discard(broker_name)
            now = self.runner.now_ms()
            self.runner.wake(self._beat, self._next_beat(now))

    def _next_beat(self, now_ms: int) -> int:
        """Return the next time of a heartbeat in 4.9: 1 s after the start, then every 30 s."""
        first_ms = self._joined_ms + FIRST_HEARTBEAT_MS
        if self._joined_ms <= now_ms < first_ms:
            return first_ms
        return next_on_grid(now_ms, first_ms, HEARTBEAT_MS)

    def call(self, request: Request[R], /) -> R:
        """Pass a broker's request to the producer or consumer of its group."""
        if isinstance(request, ClientRemoved):
            if not self.dead:
                self.removed_by(request.broker_name)
            return cast("R", None)
        if isinstance(request, ReplyArrived):
            waiting = self.replies.pop(request.send.message.properties.get(PropertyName.CORRELATION_ID, ""), None)
            if waiting is not None and not self.dead:
                waiting(request)
            return cast("R", None)
        group = getattr(request, "group", None)
        with self.runner.lock:
            order = (self._producers, self._consumers)
            members = order if isinstance(request, CheckTransaction) else order[::-1]
            member = next((by_group[group] for by_group in members if group in by_group), None)
            if member is None or self.dead:
                raise ClientStateError(f"client {self.client_id} has no producer or consumer of group {group!r}")
            return member.answer(request)

    def _send_heartbeats(self, now_ms: int) -> None:
        consumers = tuple(data for member in self._consumers.values() if (data := member.consumer_data()) is not None)
        checking = frozenset(name for name, producer in self._producers.items() if producer._answers_checks)
        beat = Heartbeat(self.client_id, self, frozenset(self._producers), consumers, checking)
        for name in self.route.broker_names():
            if name not in self._registered:
                try:
                    self.route.endpoint(name).call(beat)
                except ClientError as error:
                    if isinstance(error, BrokerError) and not isinstance(error, BrokerBusyError):  # busy will pass
                        self.refusals[name] = error
                    self._states.failing(f"heartbeat to {name}", error)
                    self.runner.wake(self._beat, now_ms + HEARTBEAT_MS)
                else:
                    self._registered.add(name)
                    self.refusals.pop(name, None)
                    self._states.works(f"heartbeat to {name}")

    def _route_changed(self) -> None:
        names = set(self.route.broker_names())
        self._registered &= names
        for name in self.refusals.keys() - names:
            del self.refusals[name]
        if names - self._registered:
            now = self.runner.now_ms()
            self.runner.wake(self._beat, self._next_beat(now))
        for group, member in list(self._consumers.items()):
            member.answer(ConsumersChanged(group))


# ---- one client for each process


class ProcessClients:
    """The clients of one process under the rule before 4.9.1, to reproduce its mix-ups.

    The default instance name was the process id, so all producers and consumers that named no instance shared one
    ``MQClientInstance``, which used the brokers of the first. New code gives each client its own id. Mirrors
    ``MQClientManager`` of that time.

    A producer for cluster B gets the client of a consumer of cluster A, and its sends go to cluster A:

        clients = ProcessClients()
        consumer = PushConsumer(a, "billing", client=clients.client_for(a))
        client = clients.client_for(b)  # logs a warning, and is the client of a
        Producer(client.route, "shop", client=client).send("only-in-b", b"x")  # NoRouteError, or stored in a
    """

    def __init__(self) -> None:
        self._clients: dict[str, Client] = {}

    def client_for(self, route: Route, *, instance_name: str | None = None) -> Client:
        """Return the client with that name, by default the process id. The first call binds it to its ``route``."""
        name = str(os.getpid()) if instance_name is None else instance_name
        client = self._clients.get(name)
        if client is None:
            client = self._clients[name] = Client(route, instance_name=name)
        elif client.route is not route:
            _log.warning(
                "client %(client)s belongs to %(route)s already, and not to %(other_route)s: what uses it reaches the "
                "first one's brokers. Give each route an instance_name of its own",
                client=client.client_id,
                route=client.route,
                other_route=route,
            )
        return client


QueueSelector: TypeAlias = Callable[[Sequence[MessageQueue], Message, Any], MessageQueue]
"""``selector(queues, message, key)`` returns one of the queues, as those of `librmq.client.queue_selectors` do."""


class RoundRobin:
    """One queue after the other, from number ``begin`` on. Thread-safe."""

    def __init__(self, begin: int = 0) -> None:
        self.numbers: itertools.count[int] = itertools.count(begin)
        """The turns to come; counting is one step for the interpreter, so threads may share it."""

    def next_queue(self, queues: Sequence[MessageQueue], tried: Sequence[str] = ()) -> MessageQueue:
        """Return the next queue, if possible not of the broker ``tried`` last; `AllocationError` without queues."""
        if not queues:
            raise AllocationError("there are no queues to choose from")
        if tried:
            for _ in queues:
                queue = queues[next(self.numbers) % len(queues)]
                if queue.broker_name != tried[-1]:
                    return queue
        return queues[next(self.numbers) % len(queues)]


class TopicQueues(NamedTuple):
    """The writable queues of a topic, and their turns."""

    queues: tuple[MessageQueue, ...]
    turns: RoundRobin
    near: tuple[MessageQueue, ...]
    """The queues at the client's own site."""


class PublishRoutes:
    """A producer's cache of its route: queues by topic, brokers by name. Thread-safe."""

    def __init__(self, client: Client, group: str, default_topic_queues: int) -> None:
        """``default_topic_queues`` is the number of queues of a topic that its first send creates."""
        self.topics: dict[str, TopicQueues] = {}
        """The topics looked up since the last change of the route."""
        self.endpoints: dict[str, Endpoint] = {}
        """The brokers looked up since then."""
        self._topics_before: dict[str, TopicQueues] = {}  # the route can have changed since
        self.client = client
        self._route = client.route
        self._runner = client.runner
        self.group = group
        self.default_topic_queues = default_topic_queues
        self._version = 0

    def drop_routes(self) -> None:
        """Clear the cache, under the runner's lock; a topic that stays the same keeps its turn."""
        self._version += 1
        self._topics_before.update(self.topics)
        self.topics.clear()
        self.endpoints.clear()

    def endpoint(self, broker_name: str) -> Endpoint:
        """Return the broker of that name, and cache it."""
        version = self._version
        endpoint = self._route.endpoint(broker_name)
        with self._runner.lock:
            if version == self._version:  # otherwise the endpoint can be outdated
                self.endpoints[broker_name] = endpoint
        return endpoint

    def queues(self, topic: str) -> TopicQueues:
        """Return the queues of a topic, and cache them."""
        topic_queues = self.topics.get(topic)
        if topic_queues is not None:
            return topic_queues
        version = self._version
        data = self._route.topic_route(topic)
        is_new = not data
        if is_new:
            data = self._route.topic_route(SystemTopic.AUTO_CREATE)
        queues = _writable(topic, data, self.default_topic_queues if is_new else None)
        if not queues:
            brokers = ", ".join(self._route.broker_names())
            if not brokers:
                why = "the route has no broker: start one, or look at the address of the name server"
            elif is_new:
                why = "no broker has it, and none makes it at the first send; create it, as by Broker.create_topic"
            else:
                why = "none lets it be written"
            hint = f" (brokers: {brokers})" if brokers else ""
            raise NoRouteError(f"topic {topic!r}, requested by producer group {self.group!r}: {why}{hint}")
        before = self._topics_before.pop(topic, None)
        if before is not None and before.queues == queues:
            turns = before.turns  # another topic has changed, so this one keeps its turn
        else:
            count, random = len(queues), self.client.random
            begin = 0 if random is None else random.randrange(count)
            turns = RoundRobin(self._runner.choose(f"first queue of {topic}", [*range(begin, count), *range(begin)]))
        site = self.client.site
        near = () if site is None else tuple(queue for queue in queues if site_of(queue.broker_name) == site)
        topic_queues = TopicQueues(queues, turns, near)
        with self._runner.lock:
            if not is_new and version == self._version:  # the created topic can have another number of queues
                self.topics[topic] = topic_queues
        return topic_queues

    def named_queue(self, topic: str, queue: MessageQueue | int) -> MessageQueue:
        """Return the queue that a caller names; its number is enough if only one broker has the topic."""
        if isinstance(queue, MessageQueue):
            if queue.topic != topic:
                raise MessageIllegalError(f"queue: expected one of topic {topic!r}, found one of {queue.topic!r}")
            return queue
        if type(queue) is not int or queue < 0:
            raise MessageIllegalError(
                f"queue: expected a MessageQueue or a queue's number, from 0, found {queue!r:.80}"
            )
        names = [data.broker_name for data in self._route.topic_route(topic)] or list(self._route.broker_names())
        if len(names) != 1:
            raise NoRouteError(f"queue {queue} of topic {topic!r}: {len(names)} brokers have it; give a MessageQueue")
        return MessageQueue(topic, names[0], queue)

    def selected(
        self,
        message: Message,
        selector: QueueSelector,
        arg: object,
        if_broker_down: str | None = None,
        tried: Collection[str] = (),
    ) -> MessageQueue:
        """Return the queue that a selector chooses.

        With ``if_broker_down`` ``refuse`` it chooses among the queues of all brokers, including unreachable ones. With
        ``another`` brokers that were ``tried`` are left out while others remain.
        """
        if not callable(selector):
            raise MessageIllegalError(f"selector: expected a function, found {selector!r:.80}")
        topic = message.topic
        queues = self.queues(topic).queues
        if if_broker_down == "refuse":
            queues = _writable(topic, self._route.registered_route(topic)) or queues
        elif tried:
            queues = tuple(queue for queue in queues if queue.broker_name not in tried) or queues
        choice = selector(queues, message, arg)
        if choice not in queues:
            raise MessageIllegalError(
                f"topic {topic!r}: the selector chose {choice!r:.200}, which is not one of the {len(queues)} queues"
            )
        return choice


def _writable(topic: str, data: Collection[QueueData], limit: int | None = None) -> tuple[MessageQueue, ...]:
    """Return the queues of brokers that let the topic be written, sorted, at most ``limit`` of each broker."""
    return tuple(
        MessageQueue(topic, broker.broker_name, number)
        for broker in sorted(data, key=lambda entry: entry.broker_name)
        if broker.permission & PERM_WRITE
        for number in range(broker.write_queues if limit is None else min(broker.write_queues, limit))
    )
