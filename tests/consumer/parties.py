"""Consumers of the kit, and a seam for faults that the kit does not offer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from librmq.client.sender import SendResult
from librmq.consumer import DeliveredMessage, PullConsumer, PushConsumer
from librmq.errors import BrokerUnreachableError
from librmq.message.message import MessageQueue
from librmq.protocol import Endpoint, QueueData, Request, Route
from librmq.runtime.runner import Runner
from librmq.testing import Kit, Process

R = TypeVar("R")


class Seam(Route, Endpoint):
    """A process whose requests can fail: ``fail(request)`` may return an error for any request of its clients."""

    runner: Runner

    def __init__(self, process: Process) -> None:
        self.inner = process
        self.runner = process.runner
        self.fail: Callable[[Request[Any]], Exception | None] = lambda request: None
        self.answers: dict[type[Request[Any]], Any] = {}
        """Answers to give in place of the broker's, by kind of request."""
        self.asked: list[Request[Any]] = []

    def identity(self, instance_name: str | None) -> tuple[tuple[str, int], str]:
        return self.inner.identity(instance_name)

    def topic_route(self, topic: str) -> tuple[QueueData, ...]:
        return self.inner.topic_route(topic)

    def broker_names(self) -> tuple[str, ...]:
        return self.inner.broker_names()

    def endpoint(self, broker_name: str) -> Endpoint:
        self.inner.endpoint(broker_name)
        return self

    def watch(self, changed: Callable[[], None]) -> Callable[[], None]:
        return self.inner.watch(changed)

    def call(self, request: Request[R], /) -> R:
        self.asked.append(request)
        error = self.fail(request)
        if error is not None:
            raise error
        if type(request) in self.answers:
            return cast(R, self.answers[type(request)])
        return self.inner.endpoint(self.inner.broker_names()[0]).call(request)

    def cut(self, *kinds: type[Request[Any]]) -> None:
        """Leave these requests without an answer from now on, and answer all others."""
        self.fail = lambda request: BrokerUnreachableError("no answer") if isinstance(request, kinds) else None


def seam_of(rmq: Kit) -> Seam:
    """Return the seam of a new process whose listeners may fail."""
    seam: Seam = rmq.app("g", Seam, fail_fast=False).state
    return seam


def subscribed(
    rmq: Kit,
    listener: Callable[[Any], Any] = lambda message: None,
    *,
    group: str = "g",
    topic: str = "t",
    route: Seam | None = None,
    filters: dict[str, Any] | None = None,
    **settings: Any,
) -> PushConsumer:
    """Return a consumer of one topic in its own process, or a started one behind a seam. Its listener may fail."""
    made = PushConsumer(route, group, **settings) if route else rmq.consumer(group, fail_fast=False, **settings)
    made.subscribe(topic, listener, **filters or {})
    return made.start() if route else made


def send(rmq: Kit, *bodies: str, topic: str = "t", **fields: Any) -> list[SendResult]:
    return [rmq.producer().send(topic, body.encode(), **fields) for body in bodies]


def bodies(rmq: Kit, process: str | None = None, group: str = "g") -> list[str]:
    """Return the bodies that listeners of a group or of a process ("g" is the first, then "g-2") got, in order."""
    return [one.body.decode() for one in rmq.delivered(group) if process in (None, one.process)]


class Noted:
    """A listener that records each delivery's body, reconsume times and time, and fails ``fails`` times for a body."""

    def __init__(self, rmq: Kit, fails: dict[str, int] | None = None) -> None:
        self.rmq = rmq
        self.fails = fails or {}
        self.seen: list[tuple[str, int, int]] = []
        """Body, reconsume times, and milliseconds since `since` was called or the test began."""
        self.since_ms = rmq.clock.now_ms()

    def since(self) -> None:
        self.since_ms = self.rmq.clock.now_ms()

    def __call__(self, message: DeliveredMessage) -> None:
        body = message.body.decode()
        self.seen.append((body, message.reconsume_times, self.rmq.clock.now_ms() - self.since_ms))
        if self.fails.get(body):
            self.fails[body] -= 1
            raise ValueError("no")


def most_at_once(rmq: Kit) -> int:
    """Return the largest number of listeners that ran at the same time."""
    ran = rmq.delivered("g")
    return max(sum(one.began_ms <= at.began_ms < (one.ended_ms or 0) for one in ran) for at in ran)


def assigned(consumer: PushConsumer | PullConsumer, topic: str = "t") -> list[int]:
    return sorted(queue.queue_id for queue in consumer.assigned if queue.topic == topic)


def newest_takes_all(client_id: str, queues: Sequence[MessageQueue], clients: Sequence[str]) -> Sequence[MessageQueue]:
    """A strategy that gives all queues to the newest instance."""
    return queues if client_id == max(clients) else ()
