"""A broker behind a route of a test, which sees and may change each request of its clients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from librmq.broker import Broker
from librmq.message.ids import Host
from librmq.protocol import Endpoint, QueueData, Request, Route
from librmq.runtime.runner import Runner


class WrappedRoute(Route, Endpoint):
    """A route to one broker, and its endpoint: ``pass_on(request, call)`` answers requests, as by ``call(request)``."""

    runner: Runner

    def __init__(self, broker: Broker, pass_on: Callable[[Request[Any], Callable[[Any], Any]], Any]) -> None:
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
