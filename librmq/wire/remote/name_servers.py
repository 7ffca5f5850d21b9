"""The name servers of a route: one is asked, and the next one when it fails. Mirrors ``NettyRemotingClient``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from librmq.errors import BrokerUnreachableError, ConfigError, MalformedError, RmqError
from librmq.protocol import PERM_WRITE, QueueData, ResponseCode
from librmq.runtime.event_log import EventLog
from librmq.wire.remote.connection import Connections
from librmq.wire.remoting.bodies import broker_addresses, read_body, route_of
from librmq.wire.remoting.codec import frame_of, refusal
from librmq.wire.remoting.frames import Frame
from librmq.wire.remoting.headers import RequestCode, RouteOfTopicHeader

_log = EventLog("librmq.wire")
_MASTER = 0
_MOST_BYTES = 1 << 20
"""In a route or a list of brokers; thousands of brokers fit."""


class LearntRoute(NamedTuple):
    """What a name server says of brokers, and of the queues of one topic."""

    brokers: Mapping[str, Mapping[int, str]]
    """Addresses by name and broker id; 0 is the master."""
    queues: tuple[QueueData, ...] = ()
    """By name of the broker."""


def addresses_of(text: str) -> tuple[str, ...]:
    """Return the addresses in ``host:port;host:port``.

    Raises:
        ConfigError: One is something else.
    """
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
        prepare: Callable[[Iterable[str]], None] = lambda addresses: None,
    ) -> None:
        """``prepare`` is called with the brokers' addresses, before anything connects to it."""
        self._prepare = prepare
        self.addresses = tuple(addresses)
        self._connections = connections
        self._timeout_s = timeout_s
        self._at = 0

    def topic(self, topic: str) -> LearntRoute:
        """Return the route of a topic; without queues if there is no such topic.

        Raises:
            BrokerUnreachableError: No name server answers.
            BrokerError: A name server refuses the request.
        """
        answer = self._ask(frame_of(RequestCode.GET_ROUTEINFO_BY_TOPIC, RouteOfTopicHeader(topic)))
        if answer.code == ResponseCode.TOPIC_NOT_EXIST:
            return LearntRoute({})
        return self._read(answer, f"the route of {topic}", _usable_route)

    def brokers(self) -> LearntRoute:
        """Return the brokers of all clusters.

        Raises:
            BrokerUnreachableError: No name server answers.
            BrokerError: The server at the address is no name server.
        """
        answer = self._ask(frame_of(RequestCode.GET_BROKER_CLUSTER_INFO))
        return self._read(answer, "the brokers", _brokers_of)

    def _read(self, answer: Frame, what: str, parse: Any) -> LearntRoute:  # noqa: ANN401 a function of a parsed body
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


def _brokers_of(body: Mapping[str, Any]) -> LearntRoute:
    return LearntRoute(broker_addresses(body.get("brokerAddrTable")))


def _usable_route(body: Mapping[str, Any]) -> LearntRoute:
    """Return a route without the queues of unknown brokers; brokers without a master take no messages."""
    brokers, queues = route_of(body)
    usable = [
        queue_data
        if _MASTER in brokers[queue_data.broker_name]
        else replace(queue_data, permission=queue_data.permission & ~PERM_WRITE)
        for queue_data in queues
        if queue_data.broker_name in brokers
    ]
    return LearntRoute(brokers, tuple(sorted(usable, key=lambda queue_data: queue_data.broker_name)))
