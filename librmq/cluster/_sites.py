"""Routes for the clients of one site: of brokers that they can reach, and those that are cut off."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from librmq.errors import BrokerUnreachableError
from librmq.protocol import Endpoint, QueueData, Request, Route
from librmq.runtime import Runner

R = TypeVar("R")


class _SiteLink(Endpoint):
    __slots__ = ("_broker_name", "_call", "_cut", "_site", "behind")

    def __init__(self, behind: Endpoint, broker_name: str, site: str, cut: set[str]) -> None:
        self.behind = behind
        self._call = behind.call
        self._broker_name = broker_name
        self._site = site
        self._cut = cut

    def call(self, request: Request[R], /) -> R:
        if self._broker_name in self._cut:
            raise BrokerUnreachableError(f"broker {self._broker_name} cannot be reached from site {self._site}")
        return self._call(request)


class SiteRoute(Route):
    """A `Route` for the clients of one site, whose ids begin with its name. Created by `RouteTable.at`. Thread-safe."""

    runner: Runner

    def __init__(self, table: Route, site: str) -> None:
        self._site = site
        self.cut: set[str] = set()
        """Names of the brokers that this site cannot reach."""
        self.runner = table.runner
        self._table = table
        self._links: dict[str, _SiteLink] = {}

    @property
    def site(self) -> str:
        """The name of the site, with which the ids of clients on this route begin."""
        return self._site

    def topic_route(self, topic: str) -> tuple[QueueData, ...]:
        """Return the brokers that have ``topic``, by name, except brokers that clients have noticed to be down."""
        return self._table.topic_route(topic)

    def registered_route(self, topic: str) -> tuple[QueueData, ...]:
        """Return all brokers that have ``topic``, by name, including those that are down."""
        return self._table.registered_route(topic)

    def broker_names(self) -> tuple[str, ...]:
        """Return the names of the brokers that this site can reach, sorted."""
        return tuple(name for name in self._table.broker_names() if name not in self.cut)

    def endpoint(self, broker_name: str) -> Endpoint:
        """Return the broker with that name. Its calls raise `BrokerUnreachableError` while its link is cut."""
        behind = self._table.endpoint(broker_name)
        link = self._links.get(broker_name)
        if link is None or link.behind is not behind:  # a new endpoint shows clients that the broker was reopened
            link = self._links[broker_name] = _SiteLink(behind, broker_name, self.site, self.cut)
        return link

    def watch(self, changed: Callable[[], None]) -> Callable[[], None]:
        """Call ``changed`` under the runner's lock at each change of the route; call the result to stop."""
        return self._table.watch(changed)

    def __repr__(self) -> str:
        return f"<SiteRoute {self.site!r} of {self._table!r}>"
