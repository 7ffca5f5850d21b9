"""A broker, its clients and what listeners saw, under a clock that is moved by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar, cast

from librmq.broker import Broker
from librmq.client.producer import Producer, SendResult
from librmq.config import StoreConfig
from librmq.consumer import DeliveredMessage, PushConsumer
from librmq.errors import BrokerUnreachableError
from librmq.files.memory import MemoryFiles
from librmq.message.message import Message, MessageQueue
from librmq.protocol import Endpoint, QueueData, Request, Route
from librmq.runtime.manual import ManualRunner
from librmq.runtime.runner import Runner

R = TypeVar("R")


class Seen(NamedTuple):
    """One delivery."""

    consumer: str
    body: str
    queue: MessageQueue
    queue_offset: int
    reconsume_times: int
    at_ms: int


class Seam:
    """A route in front of another: ``fail(request)`` may return an error for a request of the clients."""

    def __init__(self, route: Route) -> None:
        self.inner = route
        self.runner: Runner = route.runner
        self.fail: Callable[[Request[Any]], Exception | None] = lambda request: None
        self.answers: dict[type[Request[Any]], Any] = {}
        """What is answered instead of the broker, by kind of request."""
        self.asked: list[Request[Any]] = []

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


class World:
    """One broker and the clients of one test."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        assert isinstance(broker.runner, ManualRunner)
        self.runner: ManualRunner = broker.runner
        self.producer = Producer(broker, "producers")
        self.producer.client.random = None  # it begins at queue 0
        self.seen: list[Seen] = []
        self.consumers: list[PushConsumer] = []

    def consumer(
        self,
        name: str = "c1",
        group: str = "g",
        topic: str | None = "t",
        listener: Callable[[Any], Any] = lambda message: None,
        route: Route | None = None,
        tags: str | None = None,
        sql: str | None = None,
        **settings: Any,
    ) -> PushConsumer:
        """A push consumer that notes what it sees and then calls ``listener``; not started."""
        consumer = PushConsumer(route or self.broker, group, instance_name=name, **settings)
        self.consumers.append(consumer)
        if topic is not None:

            @consumer.subscribe(topic, tags=tags, sql=sql)
            def note(messages: Any) -> Any:
                for message in messages if isinstance(messages, list) else [messages]:
                    self.note(name, message)
                return listener(messages)

        return consumer

    def note(self, name: str, message: DeliveredMessage) -> None:
        self.seen.append(
            Seen(
                name,
                message.body.decode(),
                message.queue,
                message.queue_offset,
                message.reconsume_times,
                self.runner.now_ms(),
            )
        )

    def send(self, *bodies: str, topic: str = "t", queue: int | None = None, **fields: Any) -> list[SendResult]:
        return [self.producer.send(Message(topic, body.encode(), **fields), queue=queue) for body in bodies]

    def advance(self, seconds: float = 0) -> None:
        self.runner.advance(round(seconds * 1000))

    def advance_steps(self) -> None:
        """Take librmq's own steps that are due, and ready work, from within a listener."""
        self.runner._take_turns(self.runner.now_ms())

    def bodies(self, consumer: str | None = None) -> list[str]:
        return [seen.body for seen in self.seen if consumer in (None, seen.consumer)]

    def assigned(self, consumer: PushConsumer, topic: str = "t") -> list[int]:
        return sorted(queue.queue_id for queue in consumer.assigned if queue.topic == topic)


@contextmanager
def world(queues: int = 4, runner: ManualRunner | None = None, **store: Any) -> Iterator[World]:
    config = StoreConfig(commitlog_file_size=1 << 20, max_total_size=1 << 30, **store)
    with Broker.open("/store", files=MemoryFiles(), store_config=config, runner=runner or ManualRunner()) as broker:
        broker.create_topic("t", queues)
        one = World(broker)
        yield one
        for consumer in one.consumers:
            consumer.shutdown()


def unreachable(*kinds: type[Request[Any]]) -> Callable[[Request[Any]], Exception | None]:
    """A ``fail`` for a `Seam`: these requests get no answer."""
    return lambda request: BrokerUnreachableError("no answer") if isinstance(request, kinds) else None
