"""A transport of kombu, by which Celery keeps its tasks in a folder, or in a RocketMQ cluster.

::

    Celery(broker="librmq:///absolute/path/of/folder")    a store that all processes of a machine share
    Celery(broker="librmq+connect://host:9876")           a cluster, by its name server

Importing this module registers the scheme. Each queue of kombu is a topic, and all workers are one consumer group::

    publisher ── exchange ── bindings ──> queue = topic ──receive──> worker: in flight for visibility_timeout
                                             ^                          │ acknowledge: done
                                             └── requeue, or its time is over

A process opens the folder or the cluster at its first connection, also after a fork, and closes it with the last one.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, Final, NamedTuple

from amqp.exceptions import ConsumerCancelled
from kombu.transport import TRANSPORT_ALIASES, virtual
from kombu.transport.base import to_rabbitmq_queue_arguments

import librmq
from librmq.clock import SystemClock
from librmq.integrations.kombu_broker import (
    AT_ONCE,
    Delivery,
    FolderBindings,
    KombuBroker,
    Receiver,
    brokers,
    topic_of,
)
from librmq.runtime.locks import Event

_clock: Final = SystemClock()
_Arrived = tuple[str, Delivery]
_LONGEST_WAIT_S: Final = 1.0
_FULL_WAIT_S: Final = 0.05
"""Between two looks for control messages while a channel waits for acknowledgements; one of them ends the wait."""


# ---- what kombu asks


class QoS(virtual.QoS):
    """Acknowledges at the broker, which gives back what a connection leaves."""

    def ack(self, delivery_tag: str) -> None:
        """Acknowledge a message."""
        self.channel.end(delivery_tag, requeue=False)
        super().ack(delivery_tag)

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        """End a message, or deliver it again."""
        self.channel.end(delivery_tag, requeue=requeue)
        super().ack(delivery_tag)

    def restore_unacked(self) -> list[Any]:
        """Give all messages in flight back."""
        self._flush()
        for tag in list(self._delivered):
            with suppress(librmq.RmqError):  # it comes again by itself when its time is over
                self.channel.end(tag, requeue=True)
        self._delivered.clear()
        return []


class Channel(virtual.Channel):
    """A channel whose queues are topics."""

    supports_fanout = True
    QoS = QoS

    def __init__(self, connection: Transport, **kwargs: Any) -> None:
        super().__init__(connection, **kwargs)
        self._pid = os.getpid()
        self._transport = connection
        self._flights: dict[str, Delivery] = {}
        self._without_ack: set[str] = set()
        self._held: dict[str, int] = {}
        self.broker = connection.broker

    # ---- queues

    def _new_queue(self, queue: str, **kwargs: Any) -> None:
        self._delete_expired(self.broker.bindings.read()["queues"])
        self.broker.declare(queue, kwargs.get("arguments") or {})

    def prepare_queue_arguments(self, arguments: dict[str, Any] | None, **kwargs: Any) -> dict[str, Any]:
        """Return the arguments of a queue under the names that RabbitMQ gave them."""
        named: dict[str, Any] = to_rabbitmq_queue_arguments(arguments or {}, **kwargs)
        return named

    def _has_queue(self, queue: str, **kwargs: Any) -> bool:
        return self.broker.has_topic(topic_of(queue))

    def _put(self, queue: str, message: dict[str, Any], **kwargs: Any) -> None:
        self.broker.put(queue, message)

    def _put_fanout(self, exchange: str, message: dict[str, Any], routing_key: str, **kwargs: Any) -> None:
        for queue in {row[2] for row in self.get_table(exchange)}:
            self._put(queue, message)

    def _size(self, queue: str) -> int:
        return self.broker.size(queue)

    def _purge(self, queue: str) -> int:
        topic, purged = topic_of(queue), 0
        if not self._has_queue(queue):
            return 0
        if self.broker.is_cluster:
            return self.broker.skip(queue)
        while deliveries := self._transport.receiver.receive(frozenset((topic,)), AT_ONCE, 0):
            self._transport.receiver.acknowledge(*deliveries)
            purged += sum(not delivery.is_expired for delivery in deliveries)
        self._transport.receiver.leave(topic)
        return purged

    def queue_delete(self, queue: str, if_unused: bool = False, if_empty: bool = False, **kwargs: Any) -> None:
        """Delete a queue with its bindings and messages."""
        if if_empty and self._size(queue):
            return
        if self._has_queue(queue):
            self._purge(queue)
        self.broker.delete(queue)  # also without its topic: a process that was killed here left the bindings
        self.state.queue_bindings_delete(queue)

    def _delete_expired(self, queues: dict[str, dict[str, Any]]) -> bool:
        """Delete those queues that no client has used for the ``x-expires`` in their arguments."""
        bindings = self.broker.bindings
        if not isinstance(bindings, FolderBindings):
            return False
        deleted = 0
        for queue in [queue for queue in queues if "x-expires" in queues[queue]]:
            with bindings.expired(queue) as is_expired:
                if is_expired:
                    self.queue_delete(queue)
                    deleted += 1
        return bool(deleted)

    # ---- exchanges

    def exchange_declare(self, exchange: str | None = None, type: str = "direct", **kwargs: Any) -> None:
        """Declare an exchange for all processes."""
        super().exchange_declare(exchange, type, **kwargs)
        if not kwargs.get("passive"):
            self.broker.bindings.change("exchange", exchange or f"amq.{type}", type or "direct")

    def exchange_delete(self, exchange: str, if_unused: bool = False, nowait: bool = False) -> None:
        """Delete an exchange and its bindings."""
        super().exchange_delete(exchange, if_unused, nowait)
        self.broker.bindings.change("delete exchange", exchange)

    def typeof(self, exchange: str, default: str = "direct") -> Any:
        """Return the type of an exchange, which any process has declared."""
        if exchange not in self.state.exchanges:
            default = self.broker.bindings.read()["types"].get(exchange, default)
        return super().typeof(exchange, default)

    def get_table(self, exchange: str) -> list[list[str]]:
        """Return the bindings of an exchange."""
        rows = self.broker.bindings.read()
        table, queues = rows["tables"].get(exchange, []), rows["queues"]
        if self._delete_expired({row[2]: queues[row[2]] for row in table if row[2] in queues}):
            table = self.broker.bindings.read()["tables"].get(exchange, [])
        return list(table)

    def _queue_bind(self, exchange: str, routing_key: str, pattern: str | None, queue: str) -> None:
        self.broker.bindings.change("bind", exchange, routing_key or "", pattern or "", queue)

    def queue_unbind(
        self, queue: str, exchange: str | None = None, routing_key: str = "", arguments: Any = None, **kwargs: Any
    ) -> None:
        """Remove a binding in all processes."""
        exchange = exchange or "amq.direct"
        self.state.binding_delete(queue, exchange, routing_key)
        key, pattern, _ = self.typeof(exchange).prepare_bind(queue, exchange, routing_key, arguments)
        self.broker.bindings.change("unbind", exchange, key or "", pattern or "", queue)

    # ---- messages

    def basic_consume(self, queue: str, no_ack: bool, callback: Any, consumer_tag: str, **kwargs: Any) -> None:
        """Begin to consume a queue."""
        if no_ack:
            self._without_ack.add(queue)
        bindings = self.broker.bindings
        expires = "x-expires" in bindings.read()["queues"].get(queue, {})
        if isinstance(bindings, FolderBindings) and expires and queue not in self._held:
            self._held[queue] = bindings.hold(queue)
        super().basic_consume(queue, no_ack, callback, consumer_tag, **kwargs)

    def basic_cancel(self, consumer_tag: str) -> None:
        """End a consumer; its messages in flight stay with the channel."""
        queue = self._tag_to_queue.get(consumer_tag)
        super().basic_cancel(consumer_tag)
        if queue is None or queue in self._active_queues:
            return
        self._without_ack.discard(queue)
        self._transport.leave(queue)
        if queue in self._held and isinstance(self.broker.bindings, FolderBindings):
            os.utime(self._held[queue])
            os.close(self._held.pop(queue))

    def basic_get(self, queue: str, no_ack: bool = False, **kwargs: Any) -> Any:
        """Return a message, or None if there is none."""
        received: list[_Arrived] = []
        with suppress(ConsumerCancelled):  # it was not declared, or is deleted
            received = self._transport.receive([queue], 1, self._transport.requeue_wait())
        for _, delivery in received:
            message = self.Message(self.begin(delivery, no_ack), channel=self)
            if not no_ack:
                self.qos.append(message, message.delivery_tag)
            return message
        return None

    def begin(self, delivery: Delivery, no_ack: bool) -> dict[str, Any]:
        """Return a received message as kombu has it; its tag is new, because a fanout shares the sender's."""
        raw = delivery.read()
        tag = raw["properties"]["delivery_tag"] = self._next_delivery_tag()
        if delivery.attempt > 1:
            raw["redelivered"] = raw["properties"]["delivery_info"]["redelivered"] = True
        if no_ack:
            self._transport.receiver.acknowledge(delivery)
        else:
            self._flights[tag] = delivery
        return raw

    def _next_delivery_tag(self) -> str:
        return str(next(self._delivery_tags))

    def takes_without_ack(self, queue: str) -> bool:
        """Return whether messages of a queue count as acknowledged when they are received."""
        return queue in self._without_ack

    def end(self, delivery_tag: str, requeue: bool) -> None:
        """Acknowledge a message in flight, or deliver it again."""
        delivery = self._flights.pop(delivery_tag, None)
        if delivery is None or self._pid != os.getpid():  # a forked child has its parent's, and leaves them
            return
        if requeue:
            self._transport.requeue(delivery)
        else:
            self._transport.receiver.acknowledge(delivery)
        self._transport.signal_room()

    def room(self) -> int:
        """Return how many messages the channel takes now."""
        if not self._active_queues or not self.qos.can_consume():
            return 0
        return self.qos.can_consume_max_estimate() or AT_ONCE

    @property
    def queues(self) -> list[str]:
        """The queues that the channel consumes."""
        queues: list[str] = self._active_queues
        return queues


class _Wanted(NamedTuple):
    queues: list[str]
    """The queues of channels that take more messages."""
    most: int
    is_full: bool
    """Whether a channel takes no more before a message is acknowledged."""


class _Pump:
    """A thread that receives what the hub's thread wants, and signals it by a pipe, which the hub reads.

    It receives again only after the hub has looked, because what it delivers changes what the channels take.
    """

    def __init__(
        self,
        receive: Callable[[list[str], int, float], list[_Arrived]],
        stop: Callable[[], None],
        arrived: deque[_Arrived],
    ) -> None:
        self._receive = receive
        self._stop = stop
        self._arrived = arrived
        self._condition = threading.Condition()
        self._wanted: _Wanted | None = None
        self._error: Exception | None = None
        self._is_receiving = self._is_closing = False
        self.leave_loop: Callable[[], None] | None = None
        self.signal, self._write = os.pipe()
        os.set_blocking(self.signal, False)
        os.set_blocking(self._write, False)
        self._thread = threading.Thread(target=self._run, name="librmq-kombu", daemon=True)
        self._thread.start()

    def want(self, wanted: _Wanted) -> None:
        """Receive this next, unless what arrived before is not delivered yet."""
        with self._condition:
            self._wanted = None if self._arrived else wanted
            self._condition.notify()

    def write_signal(self) -> None:
        """Let the hub look again. Thread-safe."""
        with suppress(BlockingIOError, OSError):  # the pipe is full, so the hub will look; or it is closed
            os.write(self._write, b"1")

    def read_signal(self) -> None:
        """Take what the pipe holds."""
        with suppress(BlockingIOError):
            os.read(self.signal, 4096)

    def raise_error(self) -> None:
        """Raise what ended the last receive in the hub's thread, which then connects again."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    @contextmanager
    def paused(self) -> Iterator[None]:
        """End the receive that runs, and hold the next one until the hub has looked."""
        with self._condition:
            self._wanted = None
            while self._is_receiving:
                self._stop()  # more than once, because it ends nothing before the receive waits
                self._condition.wait(_FULL_WAIT_S)
            yield

    def close(self) -> None:
        """Leave the hub, end the thread and its receive, and close the pipe."""
        if self.leave_loop is not None:
            self.leave_loop()
        with self.paused():
            self._is_closing = True
            self._condition.notify()
        self._thread.join()
        os.close(self.signal)
        os.close(self._write)

    def _run(self) -> None:
        while True:
            with self._condition:
                while not self._is_closing and (self._wanted is None or not self._wanted.queues):
                    self._condition.wait()
                if self._is_closing:
                    return
                wanted, self._is_receiving = self._wanted, True
            assert wanted is not None
            received: list[_Arrived] = []
            try:
                received = self._receive(
                    wanted.queues, wanted.most, _FULL_WAIT_S if wanted.is_full else _LONGEST_WAIT_S
                )
            except Exception as error:
                self._error = error
            with self._condition:
                self._is_receiving = False
                if received or self._error is not None:
                    self._arrived.extend(received)
                    self._wanted = None
                self._condition.notify()
            if received or self._error is not None or not wanted.is_full:
                self.write_signal()  # an idle hub looks once a second whether its worker is to stop


class Transport(virtual.Transport):
    """A connection of kombu.

    Options: ``visibility_timeout`` in seconds, after which a message that is not acknowledged is delivered again, and
    ``delayed_delivery``, which lets the store instead of the worker wait for ``countdown`` and ``eta``.
    """

    Channel = Channel
    can_parse_url = True
    driver_type = driver_name = "librmq"
    implements = virtual.Transport.implements.extend(
        asynchronous=True, exchange_type=frozenset(("direct", "topic", "fanout")), heartbeats=False
    )
    connection_errors = (
        *virtual.Transport.connection_errors,
        librmq.BrokerUnreachableError,
        librmq.SendTimeoutError,
        librmq.StoreLockedError,
    )
    channel_errors = (*virtual.Transport.channel_errors, librmq.BrokerError)

    def __init__(self, client: Any, **kwargs: Any) -> None:
        super().__init__(client, **kwargs)
        self._broker: KombuBroker | None = None
        self._receiver: Receiver | None = None
        self._arrived: deque[tuple[str, Delivery]] = deque()
        self._pid = os.getpid()
        self._requeued_s = -_LONGEST_WAIT_S
        self._pump: _Pump | None = None
        self._room = Event()  # set when a message is acknowledged

    def driver_version(self) -> str:
        """Return the version of librmq."""
        return librmq.__version__

    @property
    def broker(self) -> KombuBroker:
        """The broker, which the first use opens."""
        if self._broker is None:
            options = self.client.transport_options
            self._broker = brokers.enter(self.client.hostname, bool(options.get("delayed_delivery")))
        return self._broker

    @property
    def receiver(self) -> Receiver:
        """What takes messages, which the first use starts."""
        if self._receiver is None:
            self._receiver = self.broker.receiver(self.client.transport_options.get("visibility_timeout"))
        return self._receiver

    def receive(self, queues: list[str], max_messages: int, wait: float) -> list[tuple[str, Delivery]]:
        """Return messages with their queues, without those that have expired."""
        by_topic = {topic_of(queue): queue for queue in queues}
        deliveries = self.receiver.receive(frozenset(by_topic), max_messages, wait)
        expired = [delivery for delivery in deliveries if delivery.is_expired]
        if expired:
            self.receiver.acknowledge(*expired)
        return [(by_topic[delivery.message.topic], delivery) for delivery in deliveries if delivery not in expired]

    def _stop_receive(self) -> None:
        if self._receiver is not None:
            self._receiver.stop()

    def requeue(self, delivery: Delivery) -> None:
        """Deliver a message again."""
        self.receiver.requeue(delivery)
        self._requeued_s = _clock.monotonic()

    def requeue_wait(self) -> float:
        """Return how long the next get waits: the broker stores a requeued message again a moment later."""
        wait_s = max(0.0, self._requeued_s + _LONGEST_WAIT_S - _clock.monotonic())
        self._requeued_s = -_LONGEST_WAIT_S
        return wait_s

    def leave(self, queue: str) -> None:
        """Stop receiving from a queue, and give back what is not delivered yet."""
        if self._pid != os.getpid():
            return
        with nullcontext() if self._pump is None else self._pump.paused():
            if self._receiver is None:
                return
            self._give_back(queue)
            self._receiver.leave(topic_of(queue))

    def _give_back(self, *queues: str) -> None:
        """Return undelivered messages of these queues to the broker."""
        for pair in [pair for pair in self._arrived if pair[0] in queues]:
            try:
                self._arrived.remove(pair)
            except ValueError:  # a signal handler has given it back
                continue
            with suppress(librmq.RmqError):
                self.receiver.requeue(pair[1])

    def drain_events(self, connection: Any, timeout: float | None = None) -> None:
        """Deliver the messages of one receive; raise `socket.timeout` if none arrives in time."""
        deadline = None if timeout is None else _clock.monotonic() + timeout
        while not self._arrived:
            self._room.clear()
            left = _LONGEST_WAIT_S if deadline is None else min(deadline - _clock.monotonic(), _LONGEST_WAIT_S)
            wanted = self._wanted()
            if wanted.queues:
                wait = 0 if wanted.is_full else max(left, 0)
                self._arrived.extend(self.receive(wanted.queues, wanted.most, wait))
            if self._arrived:
                break
            if left <= 0:
                raise TimeoutError
            if wanted.is_full:
                _clock.wait(self._room, min(left, _FULL_WAIT_S))
        self._deliver_arrived()

    def _wanted(self) -> _Wanted:
        consuming = [channel for channel in self.channels if channel.queues]
        ready = [(channel, room) for channel in consuming if (room := channel.room())]
        queues = [queue for channel, _ in ready for queue in channel.queues]
        max_messages = min((room for _, room in ready), default=0)
        return _Wanted(queues, max_messages, len(ready) < len(consuming) or not consuming)

    def _deliver_arrived(self) -> None:
        while True:
            try:
                queue, delivery = self._arrived.popleft()
            except IndexError:  # nothing is left, perhaps because a signal handler has cancelled the consumer
                return
            channel = next((channel for channel in self.channels if queue in channel.queues), None)
            if channel is None:
                self.receiver.requeue(delivery)
            else:
                self._deliver(channel.begin(delivery, channel.takes_without_ack(queue)), queue)

    def register_with_event_loop(self, connection: Any, loop: Any) -> None:
        """Let a thread receive and kombu's hub deliver, so that a worker with busy processes can be controlled."""
        pump = self._pump = _Pump(self.receive, self._stop_receive, self._arrived)

        def arrived() -> None:
            pump.read_signal()
            self._deliver_arrived()
            pump.raise_error()

        def look() -> None:
            pump.want(self._wanted())

        def leave() -> None:
            loop.on_tick.discard(look)
            loop.remove_reader(pump.signal)

        pump.leave_loop = leave
        loop.add_reader(pump.signal, arrived)
        loop.on_tick.add(look)

    def signal_room(self) -> None:
        """Let callers that wait for room look again. Thread-safe."""
        self._room.set()
        if self._pump is not None:
            self._pump.write_signal()

    def close_connection(self, connection: Any) -> None:
        """Give back what is in flight, and close the broker if no other connection of the process uses it."""
        pump, self._pump = self._pump, None
        if self._pid == os.getpid():
            if pump is not None:
                pump.close()
            self._give_back(*(queue for queue, _ in self._arrived))
        super().close_connection(connection)
        receiver, broker = self._receiver, self._broker
        self._receiver = self._broker = None
        if self._pid != os.getpid():
            return
        if receiver is not None:
            receiver.close()
        if broker is not None:
            brokers.leave(broker)


TRANSPORT_ALIASES["librmq"] = f"{__name__}:Transport"
