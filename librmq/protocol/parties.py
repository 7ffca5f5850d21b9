"""The parties: endpoints, which answer requests, and routes to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol, TypeVar

from librmq.message.hosts import Host
from librmq.message.topics import TopicType
from librmq.protocol.request import Request, value
from librmq.runtime.runner import Runner

R = TypeVar("R")

PERM_READ: Final = 4
PERM_WRITE: Final = 2
PERM_INHERIT: Final = 1

LOCAL_HOST: Final[Host] = ("127.0.0.1", 0)


class Endpoint(Protocol):
    """Answers requests."""

    def call(self, request: Request[R], /) -> R:
        """Answer a request without waiting for other clients. Thread-safe.

        Raises:
            BrokerError: The request is refused.
        """
        ...


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

    @property
    def runner(self) -> Runner:
        """The runner of all users of the route."""
        ...

    def topic_route(self, topic: str) -> tuple[QueueData, ...]:
        """Return the brokers that have ``topic``, by name; empty if none does."""
        ...

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
