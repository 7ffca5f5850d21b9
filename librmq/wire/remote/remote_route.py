"""The brokers that name servers know, as a `Route`: one name server is asked, and the next one when it fails.

Mirrors ``MQClientInstance`` and ``NettyRemotingClient``.
"""

from __future__ import annotations

import logging
import queue
import socket
import ssl
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

from librmq.broker import AdministeredRoute
from librmq.clock import moves_by_itself
from librmq.config import to_seconds
from librmq.errors import BrokerUnreachableError, ConfigError, MalformedError, NoRouteError, RmqError
from librmq.message.ids import Host
from librmq.override import override
from librmq.protocol import (
    PERM_WRITE,
    DeleteGroup,
    DeleteTopic,
    Endpoint,
    QueueData,
    Request,
    ResponseCode,
    SendsLater,
    Watchers,
)
from librmq.runtime import Runner, StateLog, Step, ThreadRunner, Work
from librmq.runtime.event_log import EventLog
from librmq.runtime.locks import is_held_here
from librmq.wire.remote._administration import ANSWERS
from librmq.wire.remote._connection import Requested, Transport
from librmq.wire.remote._dialing import AccessKeys, Connections, Dial, HostNames, OpenSocket, dial_by_tcp, split_address
from librmq.wire.remote._remote_broker import MASTER, BrokerGroup, RemoteBroker
from librmq.wire.remoting._bodies import broker_addresses, read_body, route_of
from librmq.wire.remoting._frames import Frame
from librmq.wire.remoting._headers import RequestCode, TopicHeader
from librmq.wire.remoting._request_codec import frame_of, refusal

_log = EventLog("librmq.wire")

R = TypeVar("R")

# ---- name servers

_MOST_BYTES = 1 << 20
"""In a route or a list of brokers; thousands of brokers fit."""


class LearntRoute(NamedTuple):
    """What a name server says of brokers, and of the queues of one topic."""

    brokers: Mapping[str, Mapping[int, str]]
    """Addresses by name and broker id; 0 is the master."""
    queues: tuple[QueueData, ...] = ()
    """By name of the broker."""


def addresses_of(text: str) -> tuple[str, ...]:
    """Return the addresses in ``host:port;host:port``."""
    addresses = (
        tuple(address.strip() for address in text.replace(",", ";").split(";") if address.strip()) if text else ()
    )
    for address in addresses:
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16 or "/" in host:
            raise ConfigError(f"address: expected host:port, or several with a ; between them, found {address!r:.80}")
    if not addresses:
        raise ConfigError("address: expected host:port of a name server, found none")
    return addresses


class NameServers:
    """The name servers. Thread-safe."""

    def __init__(
        self,
        addresses: Sequence[str],
        connections: Connections,
        timeout_s: float,
        prepare: Callable[[Iterable[str]], None],
    ) -> None:
        """``prepare`` is called with the brokers' addresses, before anything connects to it."""
        self._prepare = prepare
        self.addresses: tuple[str, ...] = tuple(addresses)
        self._connections = connections
        self._timeout_s = timeout_s
        self._at = 0

    def route_of(self, topic: str) -> LearntRoute:
        """Return the route of a topic; without queues if there is no such topic.

        Raises:
            BrokerUnreachableError: No name server answers.
            BrokerError: A name server refuses the request.
        """
        answer = self._ask(frame_of(RequestCode.GET_ROUTEINFO_BY_TOPIC, TopicHeader(topic)))
        if answer.code == ResponseCode.TOPIC_NOT_EXIST:
            return LearntRoute({})
        return self._read_route(answer, f"the route of {topic}", _usable_route)

    def all_brokers(self) -> LearntRoute:
        """Return the brokers of all clusters.

        Raises:
            BrokerUnreachableError: No name server answers.
            BrokerError: The server at the address is not a name server.
        """
        answer = self._ask(frame_of(RequestCode.GET_BROKER_CLUSTER_INFO))
        return self._read_route(
            answer, "the brokers", lambda body: LearntRoute(broker_addresses(body.get("brokerAddrTable")))
        )

    def _read_route(self, answer: Frame, what: str, parse: Any) -> LearntRoute:  # noqa: ANN401 a function of a parsed body
        if answer.code:
            raise refusal(answer)
        try:
            if len(answer.body) > _MOST_BYTES:  # reading it would take much longer than the time for an answer
                raise MalformedError(f"expected at most {_MOST_BYTES:,} bytes, found {len(answer.body):,}")
            route: LearntRoute = parse(read_body(answer.body, what))
        except MalformedError as error:
            raise BrokerUnreachableError(f"{self.addresses[self._at]}: {what} can't be read: {error}") from error
        self._prepare([address for addresses in route.brokers.values() for address in addresses.values()])
        return route

    def request_all(self, frame: Frame) -> None:
        """Send a request to every name server; log those that can't be reached."""
        for address in self.addresses:
            try:
                self._connections.get(address).request(frame, self._timeout_s)
            except RmqError as error:
                _log.warning("name server %(address)s does not answer: %(error)s", address=address, error=error)

    def _ask(self, frame: Frame) -> Frame:
        """Ask the name server that has answered last, and the others if it fails."""
        first, count = self._at, len(self.addresses)
        why = []
        for number in range(first, first + count):
            address = self.addresses[number % count]
            try:
                answer = self._connections.get(address).request(frame, self._timeout_s)
            except BrokerUnreachableError as error:
                why.append(str(error))
                self._prepare([address])  # its name may lead elsewhere by now
                continue
            self._at = number % count
            return answer
        raise BrokerUnreachableError(f"no name server answers: {'; '.join(why)}")


def _usable_route(body: Mapping[str, Any]) -> LearntRoute:
    """Return a route without the queues of unknown brokers; brokers without a master take no messages."""
    brokers, queues = route_of(body)
    usable = [
        queue_data
        if MASTER in brokers[queue_data.broker_name]
        else replace(queue_data, permission=queue_data.permission & ~PERM_WRITE)
        for queue_data in queues
        if queue_data.broker_name in brokers
    ]
    return LearntRoute(brokers, tuple(sorted(usable, key=lambda queue_data: queue_data.broker_name)))


# ---- the route

POLL_MS: Final = 30_000
_SHARED_POLL_MS: Final = 1_000
BEAT_MS: Final = 30_000
REVIVE_MS: Final = 1_000
FORGET_MS: Final = 600_000
"""After this time a topic that does not exist is asked for only if a client uses it again."""
MOST_TOPICS: Final = 10_000
"""The topics whose routes are known; those asked for first are forgotten first, and asked for again when used."""


class _Link(SendsLater, Endpoint):
    """A broker since its last reconnection: a new link shows clients that the broker may have forgotten them."""

    __slots__ = ("_entry", "group")

    def __init__(self, group: BrokerGroup) -> None:
        self.group = group
        self._entry = group.entry

    @override
    def call(self, request: Request[R], /) -> R:
        """Pass a request to the broker."""
        answer: R = self._entry(request)
        return answer


class _Notices:
    """A thread that runs functions under the runner's lock, so that a connection's reader never waits for it."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run_calls, name="librmq route", daemon=True)
        self._thread.start()

    def later(self, call: Callable[[], None]) -> None:
        """Run a function soon."""
        self._queue.put(call)

    def _run_calls(self) -> None:
        while (call := self._queue.get()) is not None:
            try:
                with self._runner.lock:
                    call()
            except Exception as error:  # the thread has no caller
                _log.error("a notice of a broker failed: %(error)s", error=error, exc_info=error)

    def close(self) -> None:
        """Run what is queued, and end the thread."""
        self._queue.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join()


class RemoteRoute(AdministeredRoute):
    """A `Route` to the brokers of a cluster over TCP, made by `librmq.connect`. Thread-safe.

    Producers and consumers take it like a `Broker`. Close it after them.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        runner: Runner,
        dial: Dial,
        *,
        timeout_s: float,
        prepare: Callable[[Iterable[str]], None],
        at_close: ExitStack,
        is_shared: bool = False,
    ) -> None:
        """Ask the name servers for the brokers.

        Args:
            addresses: Name servers, each ``host:port``.
            runner: The runner of all users of the route.
            dial: Opens connections.
            timeout_s: Time for an answer.
            prepare: Called with the brokers' addresses, before anything connects to it; may wait.
            at_close: Closed with the route.
            is_shared: Whether the only broker owns a store that processes of this machine share: it has receives with
                an invisible time, and is asked for topics every second.

        Raises:
            BrokerUnreachableError: No name server answers.
            BrokerError: The server is not a name server.
        """
        self.runner: Runner = runner
        self._own_host: str | None = None
        self._is_shared = is_shared
        self._notices = _Notices(runner)
        self._later = self._notices.later
        self._timeout_s = timeout_s
        self._at_close = at_close
        self._poll_ms = _SHARED_POLL_MS if is_shared else POLL_MS
        self._dial = dial
        self._connections = Connections(
            self._dial_or_ask,
            runner.clock.monotonic,
            self._requested,
            self._lost,
            is_hurried=lambda: is_held_here(runner.lock),
            opened_late=self._late,
        )
        self.name_servers: NameServers = NameServers(addresses, self._connections, timeout_s, prepare)
        self._watchers = Watchers()
        self._links: dict[str, _Link] = {}
        self._topics: dict[str, tuple[QueueData, ...]] = {}
        self._asked: dict[str, int] = {}  # topics whose routes clients use, with the time when it was asked for
        self._is_closed = self._has_ended = False
        self._asking: set[str] = set()  # topics that are being asked for
        # Brokers to which a connection is missing, and whether they had it before.
        self._missing: dict[str, bool] = {}
        self._label = f"route {addresses[0]}"
        self._states = StateLog(_log, self._label)
        self._level = logging.DEBUG if is_shared else logging.WARNING  # a share says itself what its owner does
        self._polling = Step(f"{self._label} poll", self._poll_due)
        self._beating = Step(f"{self._label} heartbeats", lambda now_ms: self._beat(self._beating, BEAT_MS))
        self._reviving = Step(f"{self._label} reconnect", lambda now_ms: self._beat(self._reviving, REVIVE_MS))
        try:
            self._learn(self.name_servers.all_brokers())
        except BaseException:
            self.close()
            raise
        with runner.lock:
            now_ms = runner.now_ms()
            runner.wake(self._polling, now_ms + self._poll_ms)
            runner.wake(self._beating, now_ms + BEAT_MS)

    @override
    def __repr__(self) -> str:
        state = ", closed" if self._is_closed else ""
        return f"<RemoteRoute {';'.join(self.name_servers.addresses)}, brokers: {len(self._links)}{state}>"

    # ---- route

    @property
    @override
    def dead(self) -> bool:
        """Whether it is closed."""
        return self._is_closed

    @property
    @override
    def is_remote(self) -> bool:
        """True: `topic_route` asks a name server."""
        return True

    @property
    @override
    def own_host(self) -> str | None:
        """This machine's address towards the cluster, with which the ids of clients begin."""
        return self._own_host

    @override
    def topic_route(self, topic: str) -> tuple[QueueData, ...]:
        """Return the brokers that have ``topic``, by name; empty if none does. An unknown topic is asked for.

        Raises:
            BrokerUnreachableError: No name server answers, and nothing is known of the topic.
        """
        queues = self._topics.get(topic)
        if queues is not None:
            return queues
        self._refuse_if_closed()
        learnt = self.name_servers.route_of(topic)
        with self.runner.lock:
            changed = self._learn(learnt)
            if learnt.queues and topic not in self._topics:
                self._topics[topic] = learnt.queues
                changed |= topic in self._asked  # a consumer may wait for it
            changed |= self._note_asked(topic)
            if changed:
                self._watchers.notify()
        return learnt.queues

    @override
    def known_route(self, topic: str) -> tuple[QueueData, ...]:
        """Return what is known of a topic's route, without waiting, so also under the runner's lock.

        An unknown topic is asked for soon; watchers hear of it if it exists.
        """
        queues = self._topics.get(topic)
        if queues is None and not self._is_closed:
            if self._note_asked(topic):
                self._later(self._watchers.notify)
            self._later(lambda: self._ask_soon(topic))
        return queues or ()

    def known_topics(self) -> dict[str, tuple[QueueData, ...]]:
        """Return the topics whose routes are known."""
        return self._topics.copy()

    def _note_asked(self, topic: str) -> bool:
        """Note that a topic is in use, and remove others if there are too many; return whether one of them exists."""
        self._asked.pop(topic, None)
        self._asked[topic] = self.runner.now_ms()  # the last in order
        is_less = False
        while len(self._asked) > MOST_TOPICS:
            first = next(iter(self._asked))
            del self._asked[first]
            is_less |= self._topics.pop(first, None) is not None
        return is_less

    @override
    def broker_names(self) -> tuple[str, ...]:
        """Return the names of the brokers that the name servers know, sorted; none after `close`."""
        return () if self._is_closed else tuple(sorted(self._links))

    @override
    def endpoint(self, broker_name: str) -> Endpoint:
        """Return the broker of that name.

        Raises:
            NoRouteError: The name servers know of none.
        """
        return self._link(broker_name)

    @override
    def address(self, broker_name: str) -> Host | None:
        """Return host and port of a broker; None if the name servers know of none."""
        link = self._links.get(broker_name)
        if link is None:
            return None
        host, port = split_address(link.group.first_member.address)
        return host, int(port)

    def broker(self, broker_name: str) -> RemoteBroker:
        """Return the broker of that name, to ask it what clients never ask.

        Raises:
            NoRouteError: The name servers know of none.
        """
        return self._link(broker_name).group.first_member

    def _link(self, broker_name: str) -> _Link:
        link = self._links.get(broker_name)
        if link is None:
            names = ", ".join(self.broker_names()) or "none"
            raise NoRouteError(f"unknown broker {broker_name!r}; the name servers know {names}")
        return link

    @override
    def watch(self, changed: Callable[[], None]) -> Callable[[], None]:
        """Call ``changed`` under the runner's lock when brokers or topics change; call the result to stop.

        Raises:
            BrokerUnreachableError: The route is closed.
        """
        self._refuse_if_closed()
        return self._watchers.watch(changed)

    def _refuse_if_closed(self) -> None:
        if self._is_closed:
            raise BrokerUnreachableError("the route was closed; make a new one with librmq.connect")

    @override
    def _check_open(self) -> None:
        self._refuse_if_closed()
        super()._check_open()

    # ---- administration

    @override
    def _delete(self, request: DeleteTopic | DeleteGroup, absent: ResponseCode) -> None:
        super()._delete(request, absent)
        if isinstance(request, DeleteTopic):
            self.name_servers.request_all(frame_of(RequestCode.DELETE_TOPIC_IN_NAMESRV, TopicHeader(request.topic)))

    @override
    def _topic_changed(self, topic: str) -> None:
        if topic in self._asked:
            with suppress(RmqError):  # the next poll learns it
                self.refresh()

    # ---- name servers

    def refresh(self) -> None:
        """Ask the name servers now, instead of within 30 s, for the brokers and the topics in use. Waits.

        Raises:
            BrokerUnreachableError: No name server answers, or one has just started and knows no broker.
        """
        brokers, topics = self._look()
        with self.runner.lock:
            self._note_routes(brokers, topics)

    def _look(self) -> tuple[LearntRoute, dict[str, LearntRoute]]:
        brokers = self.name_servers.all_brokers()
        if self._links and not brokers.brokers:
            raise BrokerUnreachableError("the name server knows no broker yet; those known before are kept")
        return brokers, {topic: self.name_servers.route_of(topic) for topic in sorted(self._asked)}

    def _note_routes(self, brokers: LearntRoute, topics: Mapping[str, LearntRoute]) -> None:
        """Note what the name servers say, and notify the watchers of changes."""
        changed = self._learn(brokers)
        for topic, learnt in topics.items():
            changed |= self._learn(learnt)
            if self._topics.get(topic, ()) != learnt.queues:
                changed = True
                if learnt.queues:
                    self._topics[topic] = learnt.queues
                else:
                    self._topics.pop(topic, None)
        now_ms = self.runner.now_ms()
        for topic, asked_ms in list(self._asked.items()):
            if topic not in self._topics and not 0 <= now_ms - asked_ms < FORGET_MS:
                del self._asked[topic]
        in_use = {data.broker_name for queues in self._topics.values() for data in queues}
        for name in set(self._links) - set(brokers.brokers) - in_use:
            changed = True
            self._links.pop(name).group.close()
        if changed:
            self._watchers.notify()

    def _learn(self, learnt: LearntRoute) -> bool:
        """Note the addresses of brokers; return whether there are new ones."""
        is_new = False
        for name, addresses in learnt.brokers.items():
            link = self._links.get(name)
            group = BrokerGroup(name, partial(self._broker_at, name)) if link is None else link.group
            if group.move(addresses):
                self._links[name] = _Link(group)
                is_new = True
        return is_new

    def _broker_at(self, name: str, address: str) -> RemoteBroker:
        broker = RemoteBroker(
            name=name,
            address=address,
            transports=self._connections,
            runner=self.runner,
            later=self._later,
            stored=self._stored,
            timeout_s=self._timeout_s,
            answers=ANSWERS,
            name_servers=self.name_servers.addresses,
        )
        broker.has_receives = self._is_shared
        return broker

    def _stored(self, topic: str) -> None:
        """Ask for the route of a topic that a send has created, for consumers that wait for it."""
        if topic not in self._topics and topic in self._asked:
            self._later(lambda: self._ask_soon(topic))

    def _ask_soon(self, topic: str) -> None:
        if topic in self._topics or topic in self._asking or self._is_closed:
            return
        self._asking.add(topic)

        def ended(learnt: LearntRoute, error: Exception | None) -> None:
            self._asking.discard(topic)
            if error is None and learnt.queues and topic not in self._topics:
                self._topics[topic] = learnt.queues
                self._learn(learnt)
                self._watchers.notify()

        self.runner.submit(Work(f"{self._label}: route of {topic}", lambda: self.name_servers.route_of(topic), ended))

    def _poll_due(self, now_ms: int) -> int | None:
        if self._is_closed:
            return None

        def ended(answers: tuple[LearntRoute, dict[str, LearntRoute]], error: Exception | None) -> None:
            if error is not None:
                self._states.failing("asking the name servers", error, self._level)
            else:
                self._states.works("asking the name servers")
                self._note_routes(*answers)
            if not self._is_closed:
                self.runner.wake(self._polling, self.runner.now_ms() + self._poll_ms)

        self.runner.submit(Work(self._polling.label, self._look, ended))
        return None

    def _dial_or_ask(self, address: str, requested: Requested, lost: Callable[[Transport], None]) -> Transport:
        """Open a connection; if a broker can't be reached, let the name servers be asked where it is now.

        The pauses between tries to reach an address limit how often that is.
        """
        try:
            return self._dial(address, requested, lost)
        except BrokerUnreachableError:
            if address not in self.name_servers.addresses:
                self._later(self._poll_soon)
            raise

    def _poll_soon(self) -> None:
        if self._polling.at is not None and not self._is_closed:  # else the name servers are being asked
            self.runner.wake(self._polling)

    # ---- heartbeats, and connections that were lost

    def _beat(self, step: Step, again_ms: int) -> int | None:
        """Repeat the heartbeats, which reopens connections; notify the clients of brokers that are back."""
        missing = self._missing.copy()
        names = missing if step is self._reviving else self._links
        if self._is_closed or (step is self._reviving and not missing):
            return None
        groups = [link.group for name, link in sorted(self._links.items()) if name in names]

        def beat() -> set[str]:
            return {group.name for group in groups if group.beat()}

        def ended(arrived: set[str], error: Exception | None) -> None:
            if error is not None:
                self._states.failing("repeating heartbeats", error)
            elif back := arrived & missing.keys():
                for name in back:
                    # Consumers doubt what they know of a broker behind another link. One whose first connection opened
                    # late was not away.
                    if self._missing.pop(name, missing[name]) and (link := self._links.get(name)) is not None:
                        self._links[name] = _Link(link.group)
                    self._states.works(f"reaching {name}")
                self._watchers.notify()
            if not self._is_closed and (step is self._beating or self._missing):
                self.runner.wake(step, self.runner.now_ms() + again_ms)

        self.runner.submit(Work(step.label, beat, ended))
        return None

    def _lost(self, address: str, client_id: str, transport: Transport) -> None:
        error = BrokerUnreachableError(f"the connection to {address} has ended")
        self._revive_later(address, client_id, REVIVE_MS, error)

    def _late(self, address: str, client_id: str) -> None:
        """Send a heartbeat now that did not find the connection open."""
        self._revive_later(address, client_id, 0)

    def _revive_later(self, address: str, client_id: str, after_ms: int, error: Exception | None = None) -> None:
        if not client_id or self._is_closed:
            return

        def revive() -> None:
            names = {name for name, link in self._links.items() if link.group.member_of(address, client_id)}
            if names and not self._is_closed:
                if error is not None:
                    for name in names:
                        self._states.failing(f"reaching {name}", error, self._level)
                for name in names:
                    self._missing[name] = error is not None or self._missing.get(name, False)
                self.runner.wake(self._reviving, self.runner.now_ms() + after_ms)

        self._later(revive)

    def _requested(self, address: str, client_id: str, transport: Transport, frame: Frame) -> None:
        for link in list(self._links.values()):
            broker = link.group.member_of(address, client_id)
            if broker is not None:
                broker.requests.requested(client_id, transport, frame)
                return

    # ---- life

    @override
    def close(self) -> None:
        """Close all connections. Shut producers and consumers down first. A repetition completes an interrupted one."""
        with self.runner.lock:
            if self._has_ended:
                return
            self._is_closed = True
            links = list(self._links.values())
        for link in links:
            link.group.close()
        self._connections.close()
        self._notices.close()
        self._at_close.close()
        self._has_ended = True


# ---- connecting over TCP


def connect(
    address: str,
    *,
    timeout: float | timedelta = 3,
    tls: ssl.SSLContext | None = None,
    access_key: str | None = None,
    secret_key: str | None = None,
    security_token: str | None = None,
    runner: Runner | None = None,
    open_socket: OpenSocket = socket.create_connection,
) -> RemoteRoute:
    """Return a route to a cluster, which producers and consumers take like a `Broker`; close it after them.

    Args:
        address: ``host:port`` of a name server, or of several with ``;`` between them.
        timeout: Time for each answer, in seconds or as a `timedelta`.
        tls: Context of a client, such as `ssl.create_default_context()`; None for plain text.
        access_key: Name of the key that signs requests; None where the brokers ask for none.
        secret_key: Its secret.
        security_token: A temporary token that belongs to the key.
        runner: Runs listeners and steps; None makes one, which is closed with the route.
        open_socket: ``open_socket((host, port), timeout)`` opens each connection; another one can go through a proxy.

    Raises:
        BrokerUnreachableError: No name server answers.
        BrokerError: The server at the address is not a name server.
        ConfigError: An argument is invalid.
    """
    if not isinstance(address, str):
        raise ConfigError(f"address: expected host:port of a name server, found {address!r:.80}")
    addresses = addresses_of(address)
    timeout_s = to_seconds("timeout", timeout)
    if timeout_s <= 0:
        raise ConfigError(f"timeout: expected more than 0 seconds, found {timeout_s:g}")
    if tls is not None and not isinstance(tls, ssl.SSLContext):
        raise ConfigError(f"tls: expected an ssl.SSLContext, found {tls!r:.80}: use ssl.create_default_context()")
    keys = None
    if access_key is not None or secret_key is not None or security_token is not None:
        keys = AccessKeys(access_key or "", secret_key or "", security_token)
    if runner is not None and not moves_by_itself(runner.clock):
        raise ConfigError("runner: expected one whose time passes by itself, such as a ThreadRunner")
    with ExitStack() as stack:
        if runner is None:
            runner = own_runner = ThreadRunner()
            stack.callback(own_runner.shutdown)
        names = HostNames(timeout_s, runner.clock)
        dial = dial_by_tcp(tls, keys, timeout_s, names.resolve, open_socket)
        opened = ExitStack()
        route = RemoteRoute(
            addresses,
            runner,
            dial,
            timeout_s=timeout_s,
            prepare=names.resolve_all,
            at_close=opened,
        )
        route._own_host = _own_host(addresses, names)
        opened.push(stack.pop_all())
    return route


def _own_host(addresses: Sequence[str], names: HostNames) -> str | None:
    """Return this machine's address towards the name servers; None if it has none."""
    for address in addresses:
        host, port = split_address(address)
        with suppress(OSError, BrokerUnreachableError):
            number = names.resolve(host)[0]
            family = socket.AF_INET6 if ":" in number else socket.AF_INET
            with socket.socket(family, socket.SOCK_DGRAM) as asking:
                asking.connect((number, int(port)))  # sends nothing
                return str(asking.getsockname()[0]).partition("%")[0]
    return None
