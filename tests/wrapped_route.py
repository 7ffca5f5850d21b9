"""Brokers behind a route of a test, which sees and may change each request of its clients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar, cast

from librmq.broker import Broker
from librmq.message.ids import Host
from librmq.override import override
from librmq.protocol import Endpoint, QueueData, Request, Route, RouteWrapper
from librmq.runtime.runner import Runner

R = TypeVar("R")

PassOn: TypeAlias = Callable[[Request[Any], Callable[[Any], Any]], Any]
"""Answers a request, as by calling what is given with it."""


class WrappedRoute(Route, Endpoint):
    """A route to one broker, and its endpoint: ``pass_on(request, call)`` answers requests, as by ``call(request)``."""

    runner: Runner

    def __init__(self, broker: Broker, pass_on: PassOn) -> None:
        self.broker = broker
        self.runner = broker.runner
        self._pass_on = pass_on

    def topic_route(self, topic: str) -> tuple[QueueData, ...]:
        return self.broker.topic_route(topic)

    def broker_names(self) -> tuple[str, ...]:
        return self.broker.broker_names()

    def endpoint(self, broker_name: str) -> Endpoint:
        self.broker.endpoint(broker_name)
        return self

    def watch(self, changed: Callable[[], None]) -> Callable[[], None]:
        return self.broker.watch(changed)

    def identity(self, instance_name: str | None) -> tuple[Host, str]:
        """Name clients as a kit does, so that producers start with the first queue."""
        return ("127.0.0.1", 0), instance_name or "client"

    def call(self, request: Request[Any], /) -> Any:
        return self._pass_on(request, self.broker.call)


class WrappedBrokers(RouteWrapper):
    """A route to the brokers of another one: ``pass_on(request, call)`` answers requests to each of them."""

    def __init__(self, route: Route, pass_on: PassOn) -> None:
        super().__init__(route)
        self._pass_on = pass_on

    @override
    def wrap(self, broker_name: str, broker: Endpoint) -> Endpoint:
        return _WrappedBroker(broker, self._pass_on)


class _WrappedBroker(Endpoint):
    has_page = True

    def __init__(self, behind: Endpoint, pass_on: PassOn) -> None:
        self._behind, self._pass_on = behind, pass_on

    @override
    def call(self, request: Request[R], /) -> R:
        return cast("R", self._pass_on(request, self._behind.call))
