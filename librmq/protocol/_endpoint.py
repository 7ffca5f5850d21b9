"""Endpoints and routes, and the codes of their refusals."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Protocol

from librmq.errors import BrokerUnreachableError, ConfigError
from librmq.message import Message
from librmq.message.ids import Host
from librmq.message.topics import TopicType
from librmq.override import override
from librmq.protocol._client_requests import SendMessage, SendResponse
from librmq.protocol._request import RequestHandler, value
from librmq.runtime import Runner

__all__ = [
    "LOCAL_HOST", "PERM_INHERIT", "PERM_READ", "PERM_WRITE", "Endpoint", "QueueData", "ResponseCode", "Route",
    "RouteWrapper", "SendsLater", "Watchers", "check_site", "site_of", "watch_all",
]  # fmt: skip
"""What `librmq.protocol` has of this module."""


class ResponseCode(enum.IntEnum):
    """Reason of a broker's refusal."""

    SYSTEM_ERROR = 1
    SYSTEM_BUSY = 2
    REQUEST_CODE_NOT_SUPPORTED = 3
    FLUSH_DISK_TIMEOUT = 10
    SLAVE_NOT_AVAILABLE = 11
    FLUSH_SLAVE_TIMEOUT = 12
    MESSAGE_ILLEGAL = 13
    SERVICE_NOT_AVAILABLE = 14
    NO_PERMISSION = 16
    TOPIC_NOT_EXIST = 17
    QUERY_NOT_FOUND = 22
    SUBSCRIPTION_PARSE_FAILED = 23
    SUBSCRIPTION_NOT_EXIST = 24
    SUBSCRIPTION_NOT_LATEST = 25
    SUBSCRIPTION_GROUP_NOT_EXIST = 26
    FILTER_DATA_NOT_EXIST = 27
    NO_BUYER_ID = 204
    NOT_IN_CURRENT_UNIT = 205
    CONSUMER_NOT_ONLINE = 206


# ---- endpoints and routes

PERM_READ: Final = 4
PERM_WRITE: Final = 2
PERM_INHERIT: Final = 1

LOCAL_HOST: Final[Host] = ("127.0.0.1", 0)


class Endpoint(RequestHandler, Protocol):
    """A broker, as its clients reach it. What stands between the two is another endpoint, which passes requests on."""

    __slots__ = ()

    hands_over: bool = False
    """Whether the broker calls `PullMessage.take`: only one in the process of its clients, with nothing between."""
    has_page: bool = False
    """Whether `HoldPlace` returns a place: at a broker in this process, or one whose store this process shares."""

    def send(  # noqa: PLR0913 (what a client says of a message)
        self,
        group: str,
        message: Message,
        queue_id: int,
        born_timestamp_ms: int,
        born_host: Host,
        sys_flag: int = 0,
        default_queues: int = 4,
        timeout_ms: float | None = None,
        is_one_way: bool = False,
    ) -> SendResponse:
        """Store a message as `SendMessage` does, whose fields these are. Thread-safe.

        By default this is a request, so a class that defines `call` alone sees all messages. A broker in the process of
        its clients stores the message directly.

        Raises:
            BrokerError: The message is refused.
        """
        return self.call(
            SendMessage(
                group,
                message,
                queue_id,
                born_timestamp_ms,
                born_host,
                sys_flag,
                default_queues,
                timeout_ms=timeout_ms,
                is_one_way=is_one_way,
            )
        )


class SendsLater:
    """Base class of endpoints that answer `SendLater`.

    It is inherited and not an attribute, because a wrapper that passes attributes on would claim what it can't do.
    """

    __slots__ = ()


@value
class QueueData:
    """The queues of a topic in one broker."""

    broker_name: str
    read_queues: int
    write_queues: int
    permission: int
    message_type: TopicType = "MIXED"
    """What official clients of 5.x may send; librmq's own may send everything."""


class Route(Protocol):
    """The brokers, their topics, and the runner of their clients."""

    if TYPE_CHECKING:  # at run time a property here would keep subclasses from having an attribute

        @property
        def runner(self) -> Runner:
            """The runner of all users of the route."""
            ...

    def topic_route(self, topic: str) -> tuple[QueueData, ...]:
        """Return the brokers that have ``topic``, by name; empty if none does."""
        ...

    def known_route(self, topic: str) -> tuple[QueueData, ...]:
        """Return what is known of a topic's route without waiting, so also under the runner's lock."""
        return self.topic_route(topic)

    def registered_route(self, topic: str) -> tuple[QueueData, ...]:
        """Return all brokers that have ``topic``, by name, including those that are down."""
        return self.topic_route(topic)

    def broker_names(self) -> tuple[str, ...]:
        """Return the names of the brokers that can be reached, sorted."""
        ...

    def endpoint(self, broker_name: str) -> Endpoint:
        """Return the broker of that name.

        Raises:
            NoRouteError: There is none.
        """
        ...

    def watch(self, changed: Callable[[], None]) -> Callable[[], None]:
        """Call ``changed`` under the runner's lock when brokers, topics or queues change.

        Return a function that ends this.

        Raises:
            BrokerUnreachableError: The route is a single broker, which is closed.
        """
        ...

    @property
    def is_remote(self) -> bool:
        """Whether `topic_route` can wait for an answer, so that consumers ask for `known_route` under the lock."""
        return False

    def address(self, broker_name: str) -> Host | None:
        """Return where clients reach a broker over the network; None for one on this machine."""
        return None

    @property
    def site(self) -> str | None:
        """The site of the clients on this route, with which their ids begin; None without sites."""
        return None

    @property
    def own_host(self) -> str | None:
        """This machine's address towards the brokers, with which client ids begin; None for the loopback address."""
        return None

    def identity(self, instance_name: str | None) -> tuple[Host, str] | None:
        """Return the host and name of the next client, if the route gives its clients the same in each run."""
        return None

    def noted_client(self, client: object) -> None:
        """Note a client that was made on this route, if it dies with a simulated process."""
        return None  # noqa: RET501 (without a statement a protocol's method counts as abstract)

    def noted_consumer(self, consumer: object) -> None:
        """Note a consumer that was made on this route, if the route records what its clients do."""
        return None  # noqa: RET501 (without a statement a protocol's method counts as abstract)


class RouteWrapper(Route):
    """A route over another one, to which it leaves all that a subclass does not define."""

    def __init__(self, route: Route) -> None:
        self._route = route
        self.runner: Runner = route.runner
        """The runner of all users of the route."""
        self._wrapped: dict[str, tuple[Endpoint, Endpoint]] = {}  # each broker, and what stands before it

    @override
    def topic_route(self, topic: str) -> tuple[QueueData, ...]:
        """Return the brokers that have ``topic``, by name; empty if none does."""
        return self._route.topic_route(topic)

    @override
    def known_route(self, topic: str) -> tuple[QueueData, ...]:
        """Return what is known of a topic's route without waiting, so also under the runner's lock."""
        return self._route.known_route(topic)

    @override
    def registered_route(self, topic: str) -> tuple[QueueData, ...]:
        """Return all brokers that have ``topic``, by name, including those that are down."""
        return self._route.registered_route(topic)

    @override
    def broker_names(self) -> tuple[str, ...]:
        """Return the names of the brokers that can be reached, sorted."""
        return self._route.broker_names()

    @override
    def endpoint(self, broker_name: str) -> Endpoint:
        """Return the broker of that name as `wrap` returns it; `NoRouteError` if there is none."""
        broker = self._route.endpoint(broker_name)
        wrapped = self._wrapped.get(broker_name)
        if wrapped is None or wrapped[0] is not broker:  # a new endpoint shows clients that the broker was reopened
            wrapped = self._wrapped[broker_name] = broker, self.wrap(broker_name, broker)
        return wrapped[1]

    def wrap(self, broker_name: str, broker: Endpoint) -> Endpoint:
        """Return what stands before a broker; called once for each, and again after it was reopened."""
        return broker

    @override
    def watch(self, changed: Callable[[], None]) -> Callable[[], None]:
        """Call ``changed`` under the runner's lock at each change of the route; call the result to stop."""
        return self._route.watch(changed)

    @property
    @override
    def is_remote(self) -> bool:
        """Whether `topic_route` can wait for an answer."""
        return self._route.is_remote

    @override
    def address(self, broker_name: str) -> Host | None:
        """Return where clients reach a broker over the network; None for one on this machine."""
        return self._route.address(broker_name)

    @property
    @override
    def site(self) -> str | None:
        """The site of the clients on this route; None without sites."""
        return self._route.site

    @property
    @override
    def own_host(self) -> str | None:
        """This machine's address towards the brokers; None for the loopback address."""
        return self._route.own_host

    @override
    def identity(self, instance_name: str | None) -> tuple[Host, str] | None:
        """Return the host and name of the next client, if the route gives its clients the same in each run."""
        return self._route.identity(instance_name)

    @override
    def noted_client(self, client: object) -> None:
        """Note a client that was made on this route."""
        self._route.noted_client(client)

    @override
    def noted_consumer(self, consumer: object) -> None:
        """Note a consumer that was made on this route."""
        self._route.noted_consumer(consumer)


# ---- sites: brokers and clients belong to the one that their name begins with (``hz-broker-a``, ``hz-10.0.0.1@pay``)


def site_of(name: str) -> str | None:
    """Return the site of a broker's name or a client id, the text before its first ``-``; None without a site."""
    site, dash, _ = name.partition("-")
    return site if dash and site.isalnum() else None


def check_site(site: object) -> None:
    """Refuse a site name that cannot begin an id.

    Raises:
        ConfigError: The site has other characters than letters and digits.
    """
    if not isinstance(site, str) or not site.isalnum():
        raise ConfigError(f"site: expected letters and digits, found {site!r:.80}")


# ---- changes of routes


def watch_all(routes: Iterable[Route], changed: Callable[[], None]) -> Callable[[], None]:
    """Call ``changed`` at each change of some routes; return a function that stops this."""
    unwatchers = []
    for route in routes:
        with suppress(BrokerUnreachableError):  # of a closed broker, which changes no more
            unwatchers.append(route.watch(changed))

    def unwatch_all() -> None:
        for unwatch in unwatchers:
            unwatch()

    return unwatch_all


class Watchers:
    """Functions to call when something changes, in the order in which they were added. False if there are none."""

    __slots__ = ("_functions",)

    def __init__(self) -> None:
        self._functions: list[Callable[[], None]] = []

    def __len__(self) -> int:
        return len(self._functions)

    def watch(self, changed: Callable[[], None]) -> Callable[[], None]:
        """Call ``changed`` at each change; return a function that stops this, and may be called repeatedly."""

        def unwatch() -> None:
            if changed in self._functions:
                self._functions.remove(changed)

        self._functions.append(changed)
        return unwatch

    def notify(self) -> None:
        """Call the functions. A function that is added meanwhile is called at the next change."""
        for changed in list(self._functions):
            changed()
