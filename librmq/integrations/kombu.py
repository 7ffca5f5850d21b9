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
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from amqp.exceptions import ConsumerCancelled
from kombu.transport import TRANSPORT_ALIASES, virtual
from kombu.transport.base import to_rabbitmq_queue_arguments

import librmq
from librmq.clock import SystemClock
from librmq.integrations._kombu_bindings import FolderBindings
from librmq.integrations._kombu_broker import KombuBroker, brokers, check_delayed, check_visibility, warn_of_options
from librmq.integrations._kombu_receivers import AT_ONCE, Delivery, Receiver
from librmq.runtime import critical
from librmq.runtime.event_log import EventLog
from librmq.runtime.locks import Event, Lock

_log = EventLog("librmq.integrations")
_clock: Final = SystemClock()
_Arrived = tuple[str, Delivery]
_LONGEST_WAIT_S: Final = 1.0
_FILL_S: Final = 0.01
"""How long room for a few messages waits for more of it."""
_UNFILLED_S: Final = 1.0
"""How long room is used as it is, after some has waited for more in vain."""


# ---- what kombu asks


class QoS(virtual.QoS):
    """Acknowledges at the broker, which gives back what a connection leaves."""

    def ack(self, delivery_tag: str) -> None:
        """Acknowledge a message."""
        self._end(delivery_tag, requeue=False)

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        """End a message, or deliver it again."""
        self._end(delivery_tag, requeue)

    def _end(self, delivery_tag: str, requeue: bool) -> None:
        self.channel.end(delivery_tag, requeue)
        super().ack(delivery_tag)
        self.channel.signal_room()  # last, because the hub's thread may look at once

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
        self._temporary: set[str] = set()  # queues that end with their last consumer
        self.without_ack: set[str] = set()  # queues whose messages count as acknowledged when they are received
        self._held: dict[str, int] = {}
        self._least_prefetch = 0  # without the tasks whose time has not come, for each of which Celery adds one
        self.broker = connection.broker

    # ---- queues

    def _new_queue(self, queue: str, auto_delete: bool = False, **kwargs: Any) -> None:
        if auto_delete:
            self._temporary.add(queue)
        self._delete_expired()
        self.broker.declare(queue, kwargs.get("arguments") or {}, auto_delete=auto_delete)

    def prepare_queue_arguments(self, arguments: dict[str, Any] | None, **kwargs: Any) -> dict[str, Any]:
        """Return the arguments of a queue under the names that RabbitMQ gave them."""
        named: dict[str, Any] = to_rabbitmq_queue_arguments(arguments or {}, **kwargs)
        return named

    def _has_queue(self, queue: str, **kwargs: Any) -> bool:
        return self.broker.has_queue(queue)

    def _put(self, queue: str, message: dict[str, Any], **kwargs: Any) -> None:
        self.broker.put(queue, message)

    def _put_fanout(self, exchange: str, message: dict[str, Any], routing_key: str, **kwargs: Any) -> None:
        for queue in {row[2] for row in self.get_table(exchange)}:
            self._put(queue, message)

    def _size(self, queue: str) -> int:
        self._transport.flush()
        return self.broker.size(queue)

    def _purge(self, queue: str) -> int:
        topic, purged = self.broker.topic(queue), 0
        if not self._has_queue(queue):
            return 0
        if self.broker.is_cluster:
            return self.broker.skip(queue)
        while deliveries := self._transport.receive([queue], AT_ONCE):
            self._transport.receiver.acknowledge(*(delivery for _, delivery in deliveries))
            purged += len(deliveries)
        self._transport.receiver.leave(topic)
        return purged

    def queue_delete(self, queue: str, if_unused: bool = False, if_empty: bool = False, **kwargs: Any) -> None:
        """Delete a queue with its bindings and messages."""
        if if_empty and self._size(queue):
            return
        if self._has_queue(queue):
            self._purge(queue)
        self.broker.delete(queue)  # also without its topic: a process that was killed here left the bindings

    def _delete_expired(self) -> bool:
        """Delete queues that no client has used within their ``x-expires``; return whether there were any."""
        bindings, deleted = self.broker.bindings, False
        if not isinstance(bindings, FolderBindings):
            return False
        for queue in bindings.due():
            with bindings.expired(queue) as is_expired:
                if is_expired:
                    self.queue_delete(queue)
                    deleted = True
        return deleted

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
        table = self.broker.bindings.read()["tables"].get(exchange, [])
        return list(self.broker.bindings.read()["tables"].get(exchange, []) if self._delete_expired() else table)

    def queue_bind(
        self, queue: str, exchange: str | None = None, routing_key: str = "", arguments: Any = None, **kwargs: Any
    ) -> None:
        """Bind a queue in all processes; without what kombu remembers, because another one may have deleted it."""
        self._change_binding("bind", queue, exchange, routing_key, arguments)

    def queue_unbind(
        self, queue: str, exchange: str | None = None, routing_key: str = "", arguments: Any = None, **kwargs: Any
    ) -> None:
        """Remove a binding in all processes."""
        self._change_binding("unbind", queue, exchange, routing_key, arguments)

    def _change_binding(self, what: str, queue: str, exchange: str | None, routing_key: str, arguments: Any) -> None:
        exchange = exchange or "amq.direct"
        key, pattern, _ = self.typeof(exchange).prepare_bind(queue, exchange, routing_key, arguments)
        self.broker.bindings.change(what, exchange, key or "", pattern or "", queue)

    # ---- messages

    def basic_consume(self, queue: str, no_ack: bool, callback: Any, consumer_tag: str, **kwargs: Any) -> None:
        """Begin to consume a queue."""
        if no_ack:
            self.without_ack.add(queue)
        bindings = self.broker.bindings
        is_temporary = queue in self._temporary or "x-expires" in bindings.read()["queues"].get(queue, {})
        if isinstance(bindings, FolderBindings) and is_temporary and queue not in self._held:
            self._held[queue] = bindings.hold(queue)
        super().basic_consume(queue, no_ack, callback, consumer_tag, **kwargs)
        self.signal_room()

    def basic_qos(self, prefetch_size: int = 0, prefetch_count: int = 0, apply_global: bool = False) -> None:
        """Change how many messages the channel takes."""
        super().basic_qos(prefetch_size, prefetch_count, apply_global)
        self._least_prefetch = min(prefetch_count, self._least_prefetch or prefetch_count)
        self.signal_room()

    def basic_cancel(self, consumer_tag: str) -> None:
        """End a consumer; its messages in flight stay with the channel."""
        queue = self._tag_to_queue.get(consumer_tag)
        super().basic_cancel(consumer_tag)
        if queue is None or queue in self._active_queues:
            return
        self.without_ack.discard(queue)
        self._transport.leave(queue)
        bindings = self.broker.bindings
        if queue in self._held and isinstance(bindings, FolderBindings):
            os.utime(self._held[queue])
            os.close(self._held.pop(queue))
            if queue in self._temporary:
                self._delete_unused(bindings, queue)

    def _delete_unused(self, bindings: FolderBindings, queue: str) -> None:
        """Delete a queue whose last consumer has ended; its ``x-expires`` does so if the store can't be reached now."""
        try:
            with bindings.unused(queue) as is_unused:
                if is_unused:
                    self.queue_delete(queue)
        except librmq.RmqError as error:
            _log.warning("kombu: queue %(queue)s is not deleted: %(error)s", queue=queue, error=error)

    def basic_get(self, queue: str, no_ack: bool = False, **kwargs: Any) -> Any:
        """Return a message, or None if there is none."""
        received: list[_Arrived] = []
        with suppress(ConsumerCancelled):  # it was not declared, or is deleted
            received = self._transport.receive_within(queue, self._transport.requeue_wait())
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
            self._transport.flights[tag] = delivery
        return raw

    def _next_delivery_tag(self) -> str:
        return str(next(self._delivery_tags))

    def encode_body(self, body: Any, encoding: str | None = None) -> tuple[Any, str | None]:
        """Leave text as it is, which base64 makes a third longer."""
        return (body, None) if isinstance(body, str) else super().encode_body(body, encoding)

    def end(self, delivery_tag: str, requeue: bool) -> None:
        """Acknowledge a message in flight, or deliver it again."""
        delivery = self._transport.flights.pop(delivery_tag, None)
        if delivery is None or self._pid != os.getpid():  # a forked child has its parent's, and leaves them
            return
        if requeue:
            self._transport.requeue(delivery)
        else:
            self._transport.receiver.acknowledge(delivery, waits=self._transport.is_receiving)

    def signal_room(self) -> None:
        """Let callers that wait for room look again. Thread-safe."""
        if self._pid == os.getpid():
            self._transport.wake(but_hub=True)

    def room(self) -> int:
        """Return how many messages the channel takes now."""
        room = self.qos.can_consume_max_estimate() if self._active_queues else 0
        return AT_ONCE if room is None else room

    def may_wait(self, processes: int) -> bool:
        """Return whether there is some room, for less than half of the messages, and a pool has more than it runs."""
        room = self.room()
        return 0 < 2 * room < self._least_prefetch > room + processes

    @property
    def queues(self) -> list[str]:
        """The queues that the channel consumes."""
        queues: list[str] = self._active_queues
        return queues


class _Signal:
    """A pipe that wakes kombu's hub. Thread-safe."""

    def __init__(self) -> None:
        self.reader, self._writer = os.pipe()
        os.set_blocking(self.reader, False)
        os.set_blocking(self._writer, False)
        self._lock = Lock()
        self._is_open = True
        self.hub_thread = threading.get_ident()
        self.is_due = True
        """Whether the hub's next turn looks for messages."""
        self.is_filling = self.is_filled = False
        """Whether a look waits for more room, and whether there was a look with enough of it since."""
        self.fills_from_s = 0.0
        """The time from which room waits for more."""
        self.processes = 0
        """How many processes the worker's pool has, as far as is seen."""
        self.leave_loop: Callable[[], None]

    def set(self) -> None:
        """Let the hub look again, unless the pipe is closed: another file can have its descriptor by then."""
        with critical, self._lock, suppress(BlockingIOError):  # the pipe is full, so the hub will look
            if self._is_open:
                os.write(self._writer, b"1")

    def clear(self) -> None:
        """Take what the pipe holds."""
        with suppress(BlockingIOError):
            os.read(self.reader, 4096)

    def end_filling(self) -> None:
        """Let the hub look, whether there is enough room or not."""
        if not self.is_filled:
            self.fills_from_s = _clock.monotonic() + _UNFILLED_S
        self.is_due, self.is_filling = True, False

    def close(self) -> None:
        """Leave the hub, and close the pipe."""
        self.leave_loop()
        with critical, self._lock:
            self._is_open = False
            os.close(self.reader)
            os.close(self._writer)


class Transport(virtual.Transport):
    """A connection of kombu.

    Options: ``visibility_timeout``, the seconds after which the messages of a process that was killed are delivered
    again, and ``delayed_delivery``, which lets the store instead of the worker wait for ``countdown`` and ``eta``.
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
        self.flights: dict[str, Delivery] = {}
        """The messages in flight by delivery tag: kombu rejects one by another channel if its own ends meanwhile."""
        self._pid = os.getpid()
        self._requeued_s = -_LONGEST_WAIT_S
        self._quiet: set[str] = set()
        """Queues without messages, of which the receiver calls `wake`."""
        self._signal: _Signal | None = None
        self._changed = Event()  # set when there may be messages, or room for them
        self._is_draining = False

    def driver_version(self) -> str:
        """Return the version of librmq."""
        return librmq.__version__

    @property
    def broker(self) -> KombuBroker:
        """The broker, which the first use opens."""
        if self._broker is None:
            options = self.client.transport_options
            check_visibility(options.get("visibility_timeout"))
            warn_of_options(frozenset(options))
            self._broker = brokers.enter(self.client.hostname, check_delayed(options.get("delayed_delivery")))
        return self._broker

    @property
    def receiver(self) -> Receiver:
        """What takes messages, which the first use starts."""
        if self._receiver is None:
            visibility_s = check_visibility(self.client.transport_options.get("visibility_timeout"))
            self._receiver = self.broker.receiver(visibility_s, self.wake)
        return self._receiver

    def receive(self, queues: list[str], max_messages: int) -> list[_Arrived]:
        """Return messages with their queues, without those that have expired; without any, `wake` is called in time."""
        by_topic = self.broker.topics(queues)
        while deliveries := self.receiver.receive(list(by_topic), max_messages):
            received, outdated, others = list[_Arrived](), list[Delivery](), list[Delivery]()
            for delivery in deliveries:
                queue = by_topic[delivery.message.topic]
                if not delivery.is_of(queue) and self.broker.topic(queue) != delivery.message.topic:
                    others.append(delivery)
                elif delivery.is_expired or not delivery.is_of(queue):
                    outdated.append(delivery)
                else:
                    received.append((queue, delivery))
            if outdated:
                self.receiver.acknowledge(*outdated)
            for delivery in others:  # their queue got the topic after this one was deleted, during the request
                self.receiver.requeue(delivery)
            if others:
                self.wake()
            if received or others:
                return received
        return []

    def receive_within(self, queue: str, wait_s: float) -> list[_Arrived]:
        """Return at most one message; wait for it."""
        deadline = _clock.monotonic() + wait_s
        while True:
            self._changed.clear()
            received = self.receive([queue], 1)
            left = deadline - _clock.monotonic()
            if received or left <= 0 or not _clock.wait(self._changed, left):
                return received

    def requeue(self, delivery: Delivery) -> None:
        """Deliver a message again."""
        self.receiver.requeue(delivery)
        self._requeued_s = _clock.monotonic()

    def flush(self) -> None:
        """Send acknowledgements with which no receive has gone."""
        if self._receiver is not None:
            self._receiver.flush()

    def requeue_wait(self) -> float:
        """Return how long the next get waits: the broker stores a requeued message again a moment later."""
        wait_s = max(0.0, self._requeued_s + _LONGEST_WAIT_S - _clock.monotonic())
        self._requeued_s = -_LONGEST_WAIT_S
        return wait_s

    def leave(self, queue: str) -> None:
        """Stop receiving from a queue, and give back what is not delivered yet."""
        if self._pid != os.getpid():
            return
        self._quiet.discard(queue)
        if self._receiver is not None:
            self._give_back(queue)
            self._receiver.leave(self.broker.topic(queue))

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
        while True:
            self._changed.clear()
            self._quiet.clear()
            if self._take():
                return
            left = _LONGEST_WAIT_S if deadline is None else min(deadline - _clock.monotonic(), _LONGEST_WAIT_S)
            if left <= 0:
                raise TimeoutError
            self._is_draining = True
            try:
                _clock.wait(self._changed, left)
            finally:
                self._is_draining = False

    def _take(self) -> int:
        """Receive what the channels have room for, and deliver it; return the number of messages."""
        if not self._arrived:
            queues, room = self._wanted()
            if queues:
                received = self.receive(queues, room)
                self._arrived.extend(received)
                self._quiet.update([] if received else queues)
        self.flush()
        return self._deliver_arrived()

    def _wanted(self) -> tuple[list[str], int]:
        """Return the queues of channels with room, unless all are without messages, and how many messages to take."""
        ready = [(channel, room) for channel in self.channels if (room := channel.room())]
        queues = [queue for channel, _ in ready for queue in channel.queues]
        return ([], 0) if self._quiet.issuperset(queues) else (queues, min(room for _, room in ready))

    def _deliver_arrived(self) -> int:
        delivered = 0
        while True:
            try:
                queue, delivery = self._arrived.popleft()
            except IndexError:  # nothing is left, perhaps because a signal handler has cancelled the consumer
                return delivered
            delivered += 1
            channel = next((channel for channel in self.channels if queue in channel.queues), None)
            if channel is None:
                self.receiver.requeue(delivery)
            else:
                self._deliver(channel.begin(delivery, queue in channel.without_ack), queue)

    def register_with_event_loop(self, connection: Any, loop: Any) -> None:
        """Let kombu's hub receive whenever it turns, and wake it when messages may be there."""
        signal = self._signal = _Signal()
        is_turning = False

        def woken() -> None:
            signal.clear()
            self._look_again()

        def others() -> None:
            # The turns of a hub have no order, and a worker's pool passes its tasks on in its turn. The turn of another
            # connection comes back here.
            nonlocal is_turning
            is_turning = True
            try:
                for other in loop.on_tick - {turn}:
                    other()
            finally:
                is_turning = False
            # A pool that has a task for an idle process lets the hub write to all processes that are not written to.
            signal.processes = max(signal.processes, len(loop.consolidate))

        def turn() -> None:
            signal.hub_thread = threading.get_ident()
            if is_turning:
                return
            if not signal.processes:
                others()
            if not signal.is_due:
                return
            delivered = 0 if self._waits_for_room(signal, loop) else self._take()
            signal.is_due = False
            if delivered:
                others()
                if self._wanted()[0]:
                    signal.set()

        def leave() -> None:
            loop.on_tick.discard(turn)
            loop.remove_reader(signal.reader)
            idle.cancel()

        signal.leave_loop = leave
        loop.add_reader(signal.reader, woken)
        loop.on_tick.add(turn)
        # An idle hub turns once a second, so that its worker looks whether it is to stop.
        idle = loop.call_repeatedly(_LONGEST_WAIT_S, self._look_again)

    def _waits_for_room(self, signal: _Signal, loop: Any) -> bool:
        """Return whether a look waits until the acknowledgements and the room of several tasks take one request.

        It waits a moment only: what the worker has may be kept from running, as by a limit of the rate of its tasks.
        """
        may_wait = signal.processes > 0 and any(channel.may_wait(signal.processes) for channel in self.channels)
        if not may_wait or _clock.monotonic() < signal.fills_from_s:
            signal.is_filled = not may_wait
            return False
        if not signal.is_filling:
            signal.is_filling, signal.is_filled = True, False
            loop.call_later(_FILL_S, signal.end_filling)
            signal.set()  # the hub has looked already how long it waits
        return True

    def _look_again(self) -> None:
        """Let the hub's next turn look at all queues."""
        self._quiet.clear()
        if self._signal is not None:
            self._signal.is_due = True

    @property
    def is_receiving(self) -> bool:
        """Whether a hub, or a thread that waits for events, receives once `wake` is called."""
        return self._signal is not None or self._is_draining

    def wake(self, *, but_hub: bool = False) -> None:
        """Let callers that wait look again; ``but_hub`` leaves out the hub's thread, which looks. Thread-safe."""
        self._changed.set()
        signal = self._signal
        if signal is not None:
            signal.is_due = True
            if not (but_hub and signal.hub_thread == threading.get_ident()):
                signal.set()

    def close_connection(self, connection: Any) -> None:
        """Give back what is in flight, and close the broker if no other connection of the process uses it."""
        signal, self._signal = self._signal, None
        if self._pid == os.getpid():
            if signal is not None:
                signal.close()
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
