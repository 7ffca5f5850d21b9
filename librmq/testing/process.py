"""A process of a test: what would be one in production, with clients of its own, which can die and start again.

It is a `Route`, so that an application that is given one in production is given a process here. Its clients speak to
the broker through it, which is where faults come in: nothing in producers or consumers knows of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from librmq.client.identity import Client
from librmq.client.producer import Producer
from librmq.consumer import PushConsumer
from librmq.errors import BrokerUnreachableError
from librmq.message.topics import RETRY_PREFIX
from librmq.protocol import (
    Endpoint,
    EndTransaction,
    Heartbeat,
    OffsetByTime,
    PullMessage,
    QueueData,
    Request,
    SendBack,
    SendBatch,
    SendMessage,
    UpdateOffset,
)
from librmq.runtime.runner import Runner, Work
from librmq.testing.history import show

if TYPE_CHECKING:
    from librmq.testing.kit import Kit

__all__ = ["Process", "ProcessDied"]

R = TypeVar("R")
LIBRARY: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
"""Where librmq's own code is, which no traceback of a test is about."""


class ProcessDied(BaseException):
    """The process in which this code runs has died: raised at its next call of librmq, and at any after that.

    Not an `Exception`, so that no handler takes it for an error; what stands in ``finally`` still runs.
    """


class Process:
    """One process: a `Route` for the producers and consumers in it. Made by `Kit.app` and `Kit.consumer`."""

    def __init__(self, kit: Kit, name: str, generation: int, host: str, factory: Callable[[Process], Any]) -> None:
        self.name = name
        self.generation = generation
        """1 for the first; one more after each restart."""
        self.label = name if generation == 1 else f"{name}~{generation}"
        """Name and generation, the same from run to run."""
        self.dead = False
        """It has died, or was shut down."""
        self.starts_again = True
        """Whether another one follows when it dies."""
        self.state: Any = None
        """What its factory returned."""
        self.skew_ms = 0
        """How far its clock is ahead."""
        self.factory = factory
        self.clients: dict[str, Client] = {}
        self.consumers: list[PushConsumer] = []
        """Those that were made by `consumer`."""
        self._kit = kit
        self._host = (host, 0)
        self._named = 0
        self._links: dict[str, _Link] = {}

    def __repr__(self) -> str:
        return f"Process({self.label!r}{', dead' if self.dead else ''})"

    # ---- what an application in it uses

    def producer(self, group: str = "producer", **settings: Any) -> Producer:
        """A producer in this process; ``settings`` are those of `Producer`."""
        producer = Producer(self, group, **settings)
        send_async = producer.send_async

        def noted(*arguments: Any, **fields: Any) -> Any:
            return self._kit.noted_async_call(send_async(*arguments, **fields), "send_async")

        producer.send_async = noted  # type: ignore[method-assign]
        return producer

    def consumer(self, group: str, **settings: Any) -> PushConsumer:
        """A consumer in this process, started when the factory has returned; ``settings`` are of `PushConsumer`."""
        settings.setdefault("files", self._kit.files)
        settings.setdefault("offsets_folder", self._kit.path + ".clients")
        consumer = PushConsumer(self, group, **settings)
        self.consumers.append(consumer)
        return consumer

    def background(self, call: Callable[[], Any], label: str = "background") -> None:
        """Run a function as a thread of this process would: at some later time, unless the process dies before."""
        runner = self._kit.runner
        with runner.lock:
            runner.submit(Work(f"{self.label} {label}", call, self._kit.ended_in_background, self))

    # ---- Route

    @property
    def runner(self) -> Runner:
        """Takes the turns of all processes."""
        return self._kit.runner

    def identity(self) -> tuple[tuple[str, int], str]:
        """Host and name for the next client in it: the same from run to run."""
        self._named += 1
        return self._host, self.label if self._named == 1 else f"{self.label}.{self._named}"

    def topic_route(self, topic: str) -> tuple[QueueData, ...]:
        return self._kit.topic_route(topic)

    def broker_names(self) -> tuple[str, ...]:
        return (self._kit.broker.name,)

    def endpoint(self, broker_name: str) -> Endpoint:
        link = self._links.get(broker_name)
        if link is None:
            self._kit.broker.endpoint(broker_name)  # raises where there is none
            link = self._links[broker_name] = _Link(self._kit, self, broker_name)
        return link

    def watch(self, changed: Callable[[], None]) -> Callable[[], None]:
        def unless_dead() -> None:
            if not self.dead:
                changed()

        return self._kit.watch(unless_dead)

    # ---- its end

    def die(self) -> None:
        """None of its turns is taken any more, and its calls raise `ProcessDied`."""
        self.dead = True
        for client in self.clients.values():
            client.dead = True

    def shut_down(self) -> None:
        """Shut all in it down as an application does that ends in order."""
        for client in list(self.clients.values()):
            for member in client.members():
                cast(Any, member).shutdown()
        self.die()


class _Link:
    """A process's connection to a broker."""

    def __init__(self, kit: Kit, process: Process, broker_name: str) -> None:
        self._kit = kit
        self._process = process
        self._name = broker_name

    def call(self, request: Request[R], /) -> R:
        process, kit = self._process, self._kit
        if process.dead:
            raise ProcessDied(process.label)
        if kit.broker.dead:
            raise BrokerUnreachableError(f"{self._name} is down")
        if process.skew_ms:
            request = _skewed(request, process.skew_ms)
        if isinstance(request, SendMessage | SendBatch):
            return cast(R, self._send(request))
        if isinstance(request, Heartbeat):
            if isinstance(request.client, Client):
                process.clients[request.client_id] = request.client
            kit.noted_heartbeat(process, request)
        elif isinstance(request, PullMessage):
            kit.noted_pull(process, request)
        elif isinstance(request, SendBack):
            level = "dead letter" if request.delay_level < 0 else f"level {request.delay_level or 'by attempts'}"
            kit.note(f"{request.group}@{process.label}", f"sends a message back ({level})")
        elif isinstance(request, EndTransaction):
            kit.note(process.label, f"ends a transaction: {request.state.name.lower()}")
        elif isinstance(request, UpdateOffset) and request.queue_offset:
            place = f"{request.topic}/{request.queue_id}"
            kit.note(f"{request.group}@{process.label}", f"saves progress {place}:{request.queue_offset}")
        return kit.broker.call(request)

    def _send(self, request: SendMessage | SendBatch) -> Any:
        kit, process = self._kit, self._process
        first = request.message if isinstance(request, SendMessage) else request.messages[0]
        of_consumer = first.topic.startswith(RETRY_PREFIX)
        if not of_consumer:
            kit.before_send(process, first.topic)
            if process.dead:
                raise ProcessDied(process.label)
        response = kit.broker.call(request)
        count = 1 if isinstance(request, SendMessage) else len(request.messages)
        place = f"{first.topic}/{response.queue_id}:{response.queue_offset}"
        what = f"sends {place}" if count == 1 else f"sends {count} messages, the first is {place},"
        kit.note(process.label, lambda: f"{what} {show(first)}")
        if not of_consumer:
            kit.after_send(process, first.topic, response, count)
        return response


def _skewed(request: Any, skew_ms: int) -> Any:
    if isinstance(request, SendMessage | SendBatch):
        return replace(request, born_timestamp_ms=request.born_timestamp_ms + skew_ms)
    if isinstance(request, OffsetByTime):
        return replace(request, timestamp_ms=request.timestamp_ms + skew_ms)
    if isinstance(request, Heartbeat):
        consumers = tuple(
            replace(
                data,
                subscriptions={
                    topic: replace(one, version=one.version + skew_ms) for topic, one in data.subscriptions.items()
                },
            )
            for data in request.consumers
        )
        return replace(request, consumers=consumers)
    return request
