"""A simulated process of a test, with its own clients, which can die and start again.

A process is a `Route`: an application connects to it like to a broker. Faults act here, between a client and the
broker, so that producers and consumers need no code for them.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, Unpack, cast

from librmq.client import Client, Producer, SendResult
from librmq.client.operations import Watcher
from librmq.client.producer import ProducerArguments
from librmq.client.recorder import Recorder
from librmq.clock import ManualClock, SystemClock
from librmq.consumer import ConsumerConfig, DeliveredMessage, PushConsumer
from librmq.consumer.base import Consumer
from librmq.consumer.config import ConsumerKeywords
from librmq.files import Files
from librmq.message.topics import TopicPrefix
from librmq.override import override
from librmq.protocol import (
    Endpoint,
    EndTransaction,
    Heartbeat,
    PullMessage,
    PullResponse,
    PullStatus,
    QueueOffsetAt,
    Receive,
    Received,
    Request,
    Route,
    RouteWrapper,
    SendBack,
    SendBatch,
    SendMessage,
    SendResponse,
    UpdateOffset,
)
from librmq.runtime import Runner, Work
from librmq.testing._network import LinkEnd, Network
from librmq.testing.histories._history import History, show

if TYPE_CHECKING:
    from librmq.cluster import Replica
    from librmq.metrics import Metrics

R = TypeVar("R")
LIBRARY: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
"""The folder of librmq's own code, which tracebacks in tests leave out."""


class ConsumerArguments(ConsumerKeywords, total=False):
    """Keywords of a `PushConsumer`."""

    client: Client | None
    instance_name: str | None
    config: ConsumerConfig | None
    hooks: Iterable[Watcher]
    before_last_attempt: Callable[[DeliveredMessage], object] | None
    metrics: Metrics | None
    trace: bool | str


class ProcessDied(BaseException):
    """The process that runs this code has died; each of its later calls of librmq raises this.

    It is not an `Exception`, so no handler treats it as an error. ``finally`` blocks still run.
    """

    @override
    def __str__(self) -> str:
        return f"{self.args[0]}: the process has died in this test: its producers and consumers can't be used any more"


A_PROCESS: Final = "a Process, as rmq.app returns one"
"""What errors about an argument expect."""


class ProcessStateError(RuntimeError):
    """A process cannot do what the test asks: it has ended, cannot start, or makes the call in its own listener."""


class _Observer(Protocol):
    """Takes the reports of a process: `Evidence`."""

    def noted_pull(self, process: Process, request: PullMessage, broker_name: str) -> None: ...

    def noted_receive(
        self, process: Process, request: Receive, broker_name: str, messages: Sequence[Received]
    ) -> None: ...

    def noted_heartbeat(self, process: Process, request: Heartbeat) -> None: ...

    def before_send(self, process: Process, topic: str, broker_name: str) -> bool: ...

    def after_send(self, process: Process, topic: str, broker_name: str, response: SendResponse) -> None: ...

    def ended_in_background(self, result: object, error: Exception | None) -> None: ...


class KitParts(Protocol):
    """What the parts of a kit know of it."""

    clock: ManualClock
    files: Files
    path: str
    network: Network
    recorder: Recorder

    @property
    def runner(self) -> Runner:
        """The runner of all processes."""

    @property
    def observer(self) -> _Observer:
        """Takes the reports of processes."""

    def history(self) -> History:
        """Return the history."""

    def note(self, actor: str, what: str | Callable[[], str]) -> None:
        """Add a line to the history."""

    def later(self, seconds: float | timedelta, label: str, call: Callable[[], object]) -> None:
        """Call a function after ``seconds``; ``label`` says what it does."""

    def _noted_async_call(self, call: Coroutine[Any, Any, SendResult], what: str) -> Coroutine[Any, Any, SendResult]:
        """Record a coroutine that the test or a listener has to await."""

    def died(self, process: Process) -> object:
        """Let the brokers notice the death of a process."""


class Process(LinkEnd, RouteWrapper):
    """One process: a `Route` for the producers and consumers in it. Created by `Kit.app` and `Kit.consumer`."""

    def __init__(
        self,
        kit: KitParts,
        name: str,
        generation: int,
        host: str,
        factory: Callable[[Process], object],
        site: str | None = None,
    ) -> None:
        LinkEnd.__init__(self, name, name if generation == 1 else f"{name}~{generation}")
        self.site = site
        self.generation = generation
        """1 for the first, one more after each restart."""
        self.is_test = False
        """Whether it is the test's own process, which no fault concerns."""
        self._starts_again = True
        """Whether another process replaces it when it dies."""
        self.state: Any = None
        """The result of its factory."""
        self._skew_ms = 0
        """Milliseconds by which its clock is ahead."""
        self._factory = factory
        self.clients: dict[Client, None] = {}
        """Its clients that brokers know, in order; two can have one id."""
        self.consumers: list[PushConsumer] = []
        """The consumers made by `consumer`."""
        self._made_clients: list[Client] = []
        self.made: list[Consumer[Any]] = []
        """All consumers in it, including those that its code made itself."""
        self._names = {self.label}
        self._kit = kit
        self._host = self._first_host = (host, 0)
        self._named = 0
        self.runner: Runner = kit.runner
        self._wrapped = {}
        self._masters = _Masters(kit, self)
        self._reads: RouteWrapper = self._masters
        self._replicas: tuple[Replica, ...] = ()

    @override
    def __repr__(self) -> str:
        return f"Process({self.label!r}{', dead' if self.dead else ''})"

    # ---- for an application in it

    def producer(self, group: str = "producer", **settings: Unpack[ProducerArguments]) -> Producer:
        """Return a producer in this process; ``settings`` are those of `Producer`."""
        producer = Producer(self, group, **settings)
        send_async = producer.send_async

        def noted(*arguments: Any, **fields: Any) -> Coroutine[Any, Any, SendResult]:  # noqa: ANN401 (as send_async)
            return self._kit._noted_async_call(send_async(*arguments, **fields), "send_async")

        producer.send_async = noted  # type: ignore[method-assign]
        return producer

    def consumer(self, group: str, **settings: Unpack[ConsumerArguments]) -> PushConsumer:
        """Return a consumer that starts once the factory has returned; ``settings`` are those of `PushConsumer`."""
        settings.setdefault("files", self._kit.files)
        consumer = PushConsumer(self, group, **settings)
        self.consumers.append(consumer)
        return consumer

    def background(self, call: Callable[[], Any], label: str = "background") -> None:
        """Run a function later, like a thread of this process, unless the process dies first.

        Raises:
            ProcessStateError: The process is dead: after a crash use the one that `Kit.crash` has returned.
        """
        if self.dead:
            raise ProcessStateError(
                f"{self.label} is dead, so it runs nothing: call `background` of the process that rmq.crash or "
                "rmq.restart has returned"
            )
        runner = self._kit.runner
        with runner.lock:
            runner.submit(Work(f"{self.label} {label}", call, self._kit.observer.ended_in_background, self))

    # ---- Route

    @override
    def identity(self, instance_name: str | None) -> tuple[tuple[str, int], str]:
        """Return host and name for the next client of the process; they are the same in each run.

        A client with an ``instance_name`` has the host of the first generation: it keeps its id through restarts.
        """
        self._named += 1
        host = self._host if instance_name is None else self._first_host
        return host, self.label if self._named == 1 else f"{self.label}.{self._named}"

    @override
    def noted_client(self, client: Any) -> None:  # noqa: ANN401 (any client)
        """Note a client that was made in the process, and dies with it, although no broker has heard of it."""
        self._made_clients.append(client)

    @override
    def noted_consumer(self, consumer: Any) -> None:  # noqa: ANN401 (any consumer)
        """Note a consumer that was made in the process."""
        self.made.append(consumer)
        self._names.add(self._kit.recorder.watch_consumer(self.label, consumer))

    @property
    @override
    def _route(self) -> Route:  # type: ignore[override]  # it follows the network
        """The route over the brokers and the replicas from which the process reads."""
        replicas = self._kit.network.replicas
        if replicas is not self._replicas:
            from librmq.cluster import ReplicaRoute  # few tests need what it loads

            if isinstance(self._reads, ReplicaRoute):
                self._reads.end()
            self._replicas = replicas
            self._reads = ReplicaRoute(self._masters, *replicas) if replicas else self._masters
        return self._reads

    @override
    def watch(self, changed: Callable[[], None]) -> Callable[[], None]:
        """Call ``changed`` whenever topics change while the process lives; return a function that ends this."""

        def unless_dead() -> None:
            if not self.dead:
                changed()

        return self._kit.network.table.watch(unless_dead)

    # ---- its end

    def names(self) -> set[str]:
        """Return the names that it has in the history: its own, and those of its consumers."""
        return {*self._names}

    def _die(self) -> None:
        """End all its turns, and make its calls raise `ProcessDied`."""
        self.dead = True
        for client in self._made_clients:
            client.dead = True

    def shut_down(self) -> None:
        """Shut its clients down, like an application that ends cleanly."""
        for client in list(self.clients):
            for member in client.members():
                cast(Any, member).shutdown()
        self._die()


class _Masters(RouteWrapper):
    """The route of a process over the brokers alone."""

    def __init__(self, kit: KitParts, process: Process) -> None:
        self.runner = kit.runner
        self._kit = kit
        self._process = process
        self._connections: dict[str, _Connection] = {}

    @property
    @override
    def _route(self) -> Route:  # type: ignore[override]  # a cluster has another table
        return self._kit.network.table

    @override
    def broker_names(self) -> tuple[str, ...]:
        return self._kit.network.names_for(self._process)

    @override
    def endpoint(self, broker_name: str) -> Endpoint:
        connection = self._connections.get(broker_name)
        if connection is None:
            self._kit.network.named(broker_name)
            connection = self._connections[broker_name] = _Connection(self._kit, self._process, broker_name)
        return connection


class _Connection(Endpoint):
    def __init__(self, kit: KitParts, process: Process, broker_name: str) -> None:
        self._kit = kit
        self._process = process
        self._name = broker_name
        self.has_page = kit.network.has_pages
        self._pulls: dict[tuple[str, str, str, int], bool] = {}  # pulls on their way, and whether they have arrived

    @override
    def call(self, request: Request[R], /) -> R:
        """Record a request, and pass it to the broker."""
        process, kit = self._process, self._kit
        if process.dead:
            raise ProcessDied(process.label)
        if process._skew_ms:
            request = _skewed(request, process._skew_ms)
        return kit.recorder.call(process.label, self._name, request, self._pass_on, has_page=self.has_page)

    def _pass_on(self, request: Request[R]) -> R:
        """Pass a request to the broker, with notes and faults."""
        process, kit = self._process, self._kit
        broker = kit.network.reached(process, self._name)
        if isinstance(request, SendMessage | SendBatch):
            return cast(R, self._send(request, broker))
        if isinstance(request, Heartbeat):
            if isinstance(request.client, Client):
                process.clients[request.client] = None
            kit.observer.noted_heartbeat(process, request)
        elif isinstance(request, PullMessage):
            if not self._has_arrived(request):
                offset = request.queue_offset
                return cast(R, PullResponse(PullStatus.HELD, offset, 0, 0, is_held=True))
            kit.observer.noted_pull(process, request, self._name)
        elif isinstance(request, SendBack):
            level = "dead letter" if request.delay_level < 0 else f"level {request.delay_level or 'by attempts'}"
            kit.note(f"{request.group}@{process.label}", f"sends a message back ({level})")
        elif isinstance(request, EndTransaction):
            kit.note(process.label, f"ends a transaction: {request.state.name.lower()}")
        elif isinstance(request, UpdateOffset) and request.queue_offset:
            place = kit.history().place(request.topic, self._name, request.queue_id, request.queue_offset)
            kit.note(f"{request.group}@{process.label}", f"saves progress {place}")
        # The process outlives the broker's machine.
        answer = kit.network.by_name[self._name].await_device(request, broker.call(request))
        if isinstance(request, Receive):
            kit.observer.noted_receive(process, request, self._name, cast(Any, answer).messages)
        return answer

    def _has_arrived(self, request: PullMessage) -> bool:
        """Return whether a pull has crossed its link; otherwise notify its client when it has."""
        kit, process, notify = self._kit, self._process, request.notify
        place = request.client_id, request.group, request.topic, request.queue_id
        is_new = place not in self._pulls
        if self._pulls.pop(place, False):
            return True
        seconds = kit.network.latency(process, self._name)
        if not seconds or notify is None:
            return True
        self._pulls[place] = False

        def arrives() -> None:
            self._pulls[place] = True
            notify()

        if is_new:
            kit.later(seconds, f"{process.label} pulls {self._name}", arrives)
        return False

    def _send(self, request: SendMessage | SendBatch, broker: Endpoint) -> SendResponse:
        kit, process = self._kit, self._process
        kit.clock.advance(seconds=kit.network.latency(process, self._name))
        first = request.message if isinstance(request, SendMessage) else request.messages[0]
        of_consumer = first.topic.startswith(TopicPrefix.RETRY)
        at_ms = first.deliver_at_ms
        if at_ms is not None and SystemClock().now_ms() < at_ms <= kit.clock.now_ms():
            warnings.warn(
                f"topic {first.topic}: deliver_at is past for the kit's clock, and is not for the machine's: code that "
                "asks datetime.now() does not see the kit's time; give the kit datetime_too=True, let the code ask a "
                "clock that the test passes, or send by delay=",
                stacklevel=2,
            )
        is_repeated = False
        if not of_consumer:
            is_repeated = kit.observer.before_send(process, first.topic, self._name)
            if process.dead:
                raise ProcessDied(process.label)
        has_frames = is_repeated and kit.network.repeat_frame(is_repeated=True)
        try:
            response = broker.call(request)
        finally:
            if has_frames:
                kit.network.repeat_frame(is_repeated=False)
        if is_repeated:  # for the history a send of its own
            again: Callable[[Any], Any] = (lambda request: response) if has_frames else broker.call
            kit.recorder.call(process.label, self._name, request, again)
        count = 1 if isinstance(request, SendMessage) else len(request.messages)
        place = kit.history().place(first.topic, self._name, response.queue_id, response.queue_offset)
        what = f"sends {place}" if count == 1 else f"sends {count} messages, the first is {place},"
        kit.note(process.label, lambda: f"{what} {show(first)}")
        if not of_consumer:
            kit.observer.after_send(process, first.topic, self._name, response)
        return response


def _skewed(request: Request[R], skew_ms: int) -> Request[R]:
    """Return the request with the times of a clock that is wrong by ``skew_ms``."""
    skewed: Request[Any] = request
    if isinstance(request, SendMessage | SendBatch):
        skewed = replace(request, born_timestamp_ms=request.born_timestamp_ms + skew_ms)
    elif isinstance(request, QueueOffsetAt):
        skewed = replace(request, timestamp_ms=request.timestamp_ms + skew_ms)
    elif isinstance(request, Heartbeat):
        consumers = []
        for data in request.consumers:
            subscriptions = {
                topic: replace(subscription, version=subscription.version + skew_ms)
                for topic, subscription in data.subscriptions.items()
            }
            consumers.append(replace(data, subscriptions=subscriptions))
        skewed = replace(request, consumers=tuple(consumers))
    return skewed
