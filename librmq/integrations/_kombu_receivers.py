"""What takes messages for a connection of kombu, from a shared store or from a cluster."""

from __future__ import annotations

import json
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar, cast

from amqp.exceptions import ConsumerCancelled
from kombu.utils.json import loads

import librmq
from librmq.clock import SystemClock
from librmq.integrations._kombu_bindings import KombuRoute, topic_of
from librmq.protocol import ResponseCode
from librmq.runtime import critical
from librmq.runtime.event_log import EventLog, counted
from librmq.runtime.locks import Event, Lock

T = TypeVar("T")
_log = EventLog("librmq.integrations")
_clock: Final = SystemClock()
_loads: Final = json.JSONDecoder().decode
GROUP: Final = "kombu"
"""The consumer group of all workers in a shared store; in a cluster each queue has one of its own."""
EXPIRES: Final = "KOMBU_EXPIRES_MS"
QUEUE: Final = "KOMBU_QUEUE"
"""The property that names the queue of a message in a topic that queues use one after the other."""
AT_ONCE: Final = 32
_CLAIM_S: Final = 60.0
"""Longest time for which a receive hides messages: if its answer is lost, no process has them, or renews them."""
_LATEST_S: Final = 0.05
"""Longest time for which an acknowledgement waits for the next receive."""
_PAUSE_S: Final = 1.0
"""Between two tries of an acknowledgement or a renewal that failed."""
_POLL_S: Final = 0.05
"""Between two polls of the queues of a cluster."""


class Delivery(NamedTuple):
    """A message in flight."""

    message: librmq.DeliveredMessage
    attempt: int

    @property
    def is_expired(self) -> bool:
        """Whether the message was not received in its time."""
        if EXPIRES.encode() not in self.message.raw:  # most have no limit, and decoding all properties takes long
            return False
        expires_ms = self.message.properties.get(EXPIRES)
        return expires_ms is not None and int(expires_ms) <= _clock.now_ms()

    def is_of(self, queue: str) -> bool:
        """Whether the message was sent to this queue, and not to a former one with the same topic."""
        return QUEUE.encode() not in self.message.raw or self.message.properties.get(QUEUE) in (None, topic_of(queue))

    def read(self) -> dict[str, Any]:
        """Return the message as kombu has sent it."""
        text = self.message.body.decode()
        # kombu's reader looks at each object for a type that JSON does not have.
        raw: dict[str, Any] = loads(text) if '"__type__"' in text else _loads(text)
        return raw


class ShareReceiver:
    """Receives messages that are invisible to others for a time, which is renewed while this process has them.

    Takes them for one connection; acknowledgements may come from other threads.
    """

    def __init__(self, route: KombuRoute, visibility_s: float, wake: Callable[[], None]) -> None:
        self._consumer = librmq.SimpleConsumer(route, GROUP).start()
        self._now_ms = route.runner.now_ms
        self._visibility_s = visibility_s
        self._claim_s = min(visibility_s, _CLAIM_S)
        self._wake = wake
        self._waiting: set[str] = set()
        """Topics without a message, of which the broker will notify this process."""
        self._turn = 0
        self._in_flight: dict[str, librmq.ReceivedMessage] = {}  # by receipt
        self._done: deque[librmq.ReceivedMessage] = deque()
        """Processed messages that the next receive acknowledges."""
        self._has_done = Event()
        self._closed = Event()
        self._keeping: threading.Thread | None = None

    def receive(self, topics: Sequence[str], limit: int) -> list[Delivery]:
        """Return messages of one of the topics; without any, call ``wake`` once there may be some.

        Raises:
            ConsumerCancelled: A topic was deleted; Celery connects then, and declares it, again.
        """
        self._turn += 1  # so that a busy queue keeps no other waiting
        for number in range(len(topics)):
            topic = topics[(self._turn + number) % len(topics)]
            if topic not in self._waiting and (messages := self._receive_from(topic, min(limit, AT_ONCE))):
                return [Delivery(message, message.attempt) for message in messages]
        return []

    def _receive_from(self, topic: str, limit: int) -> list[librmq.ReceivedMessage]:
        def notify() -> None:
            self._waiting.discard(topic)
            self._wake()

        self._waiting.add(topic)  # before the request, because the notification can come during it
        messages: list[librmq.ReceivedMessage] = []
        is_held = False
        try:
            if topic not in self._consumer.subscriptions:
                self._consumer.subscribe(topic)
            messages = self._with_done(
                lambda done: self._consumer.receive_or_notify(
                    topic, limit, notify, invisible=self._claim_s, acknowledge=done
                )
            )
            is_held = not messages
        except librmq.BrokerError as error:  # of another process, where this one still knows the topic's route
            if error.code != ResponseCode.TOPIC_NOT_EXIST:
                raise
            raise _deleted(topic) from error
        except librmq.NoRouteError as error:
            raise _deleted(topic) from error
        except librmq.ClientStateError:
            if topic in self._consumer.subscriptions:
                raise
            return []  # a signal handler has cancelled the consumer during the request
        finally:
            if not is_held:
                self._waiting.discard(topic)
        messages = self._confirmed(messages)
        for message in messages:
            self._in_flight[message.receipt] = message
        if messages and self._keeping is None:
            self._keeping = threading.Thread(target=self._keep, name="librmq-kombu-keep", daemon=True)
            self._keeping.start()
        return messages

    def _confirmed(self, messages: list[librmq.ReceivedMessage]) -> list[librmq.ReceivedMessage]:
        """Return the messages that are still hidden: this process can have been stopped before it read the answer."""
        confirmed, late_ms = list[librmq.ReceivedMessage](), self._now_ms() + 500 * self._claim_s
        try:
            for message in messages:
                if message.visible_timestamp_ms <= late_ms:
                    self._consumer.renew(message, self._claim_s)
                confirmed.append(message)
        except librmq.RmqError as error:
            _log.info("kombu: received too late, so that messages come again: %(error)s", error=error)
            self._wake()  # the broker has answered, and notifies of nothing
        return confirmed

    def _keep(self) -> None:
        """Renew messages in time, and send acknowledgements that no receive takes along."""
        renew_s = _clock.monotonic() + self._claim_s / 3
        while not self._closed.is_set():
            if _clock.wait(self._has_done, max(0.0, renew_s - _clock.monotonic())):
                self._has_done.clear()
                _clock.wait(self._closed, _LATEST_S)
                try:
                    self.flush()
                except librmq.RmqError as error:
                    _log.warning("kombu: a message is not acknowledged, trying again: %(error)s", error=error)
                    _clock.wait(self._closed, _PAUSE_S)
            if (begin_s := _clock.monotonic()) >= renew_s:
                renew_s = begin_s + self._claim_s / 3 if self._renew() else _clock.monotonic() + _PAUSE_S

    def _renew(self) -> bool:
        """Keep messages invisible while this process has them, so that those of a killed one only come again.

        Return False if the owner does not answer: it is asked again soon, and until then for no other message.
        """
        limit_ms = self._now_ms() + 1000 * self._visibility_s * 2 / 3
        for receipt, message in list(self._in_flight.items()):
            if message.visible_timestamp_ms > limit_ms or receipt not in self._in_flight:
                continue
            try:
                self._consumer.renew(message, self._visibility_s)
            except librmq.ReceiptError as error:
                if self._in_flight.pop(receipt, None) is not None:  # else it was acknowledged meanwhile
                    _log.warning(
                        "kombu: a message is not hidden any more, and may be done twice: %(error)s", error=error
                    )
            except librmq.RmqError as error:
                _log.warning("kombu: a message is not renewed, trying again: %(error)s", error=error)
                if isinstance(error, librmq.BrokerUnreachableError):
                    return False
        return True

    def acknowledge(self, *deliveries: Delivery, waits: bool = False) -> None:
        """End messages, at once; with ``waits`` the next receive or `flush` says so, or a thread after a moment."""
        for delivery in deliveries:
            message = cast("librmq.ReceivedMessage", delivery.message)
            self._in_flight.pop(message.receipt, None)
            self._done.append(message)
            waits = waits and message.visible_timestamp_ms > self._now_ms()
        if waits:
            self._has_done.set()
        else:
            self.flush()

    def flush(self) -> None:
        """Send the acknowledgements that wait."""
        if not self._done:
            return
        self._with_done(self._acknowledge)

    def _acknowledge(self, done: list[librmq.ReceivedMessage]) -> None:
        try:
            self._consumer.ack_one_way(*done)
        except librmq.ReceiptError as error:
            _log.warning("kombu: a message may be done twice: %(error)s", error=error)

    def _with_done(self, call: Callable[[list[librmq.ReceivedMessage]], T]) -> T:
        """Pass on the messages to acknowledge, which wait on if that fails."""
        done: list[librmq.ReceivedMessage] = []
        try:
            with suppress(IndexError):  # Another thread can take them at the same time.
                while self._done:
                    done.append(self._done.popleft())
            return call(done)
        except BaseException:
            self._done.extend(done)
            self._has_done.set()
            raise

    def requeue(self, delivery: Delivery) -> None:
        """Deliver a message again, to any consumer."""
        message = cast("librmq.ReceivedMessage", delivery.message)
        self._in_flight.pop(message.receipt, None)
        with suppress(librmq.ReceiptError):  # its time is over: it is delivered again already
            self._consumer.extend(message, 0)

    def leave(self, topic: str) -> None:
        """Stop receiving from a topic."""
        self.flush()
        self._consumer.unsubscribe(topic)
        self._waiting.discard(topic)

    def close(self) -> None:
        """Leave all groups."""
        self._closed.set()
        self._has_done.set()
        if self._keeping is not None:
            self._keeping.join()  # First, because it can have taken acknowledgements, which it puts back if they fail.
        try:
            self.flush()
        except librmq.RmqError as error:
            _log.warning(
                "kombu: %(many)s come again: %(error)s", many=counted(len(self._done), "processed message"), error=error
            )
        self._consumer.shutdown()


def _deleted(topic: str) -> ConsumerCancelled:
    return ConsumerCancelled(f"a queue was deleted while it had a consumer: {topic}")


class ClusterReceiver:
    """Pulls messages, because brokers of 4.x hide none: the progress of a queue waits for its first message in flight.

    Where a process ends, or the group's instances change, all messages after that one are delivered again. A thread of
    its own pulls, because a broker that does not answer must not hold up the worker. It has the methods of
    `ShareReceiver`.
    """

    def __init__(self, route: KombuRoute, producer: librmq.Producer, wake: Callable[[], None]) -> None:
        self._route = route
        self._producer = producer
        self._wake = wake
        self._lock = Lock()
        self._consumers: dict[str, librmq.PullConsumer] = {}
        self._ready: defaultdict[str, deque[Delivery]] = defaultdict(deque)
        self._flights: defaultdict[librmq.MessageQueue, dict[int, bool]] = defaultdict(dict)  # offset: is done
        self._left: set[str] = set()
        self._wanted: set[str] = set()
        self._polling = Lock()  # no consumer is shut down meanwhile
        self._error: Exception | None = None
        self._changed = Event()
        self._closed = Event()
        self._pulling: threading.Thread | None = None

    def receive(self, topics: Sequence[str], limit: int) -> list[Delivery]:
        error, self._error = self._error, None
        if error is not None:
            raise error
        ready = [self._ready[topic] for topic in topics if self._ready[topic]]
        if ready:
            return [row.popleft() for row in ready for _ in range(min(len(row), max(1, limit // len(ready))))][:limit]
        with self._lock:
            self._left.difference_update(topics)
            self._wanted.update(topics)
        if self._pulling is None:
            self._pulling = threading.Thread(target=self._pull, name="librmq-kombu", daemon=True)
            self._pulling.start()
        self._changed.set()
        return []

    def _pull(self) -> None:
        """Pull from the topics that a receive has found empty, until one has messages."""
        while not self._closed.is_set():
            _clock.wait(self._changed, None)
            self._changed.clear()
            while not self._closed.is_set() and (topics := set(self._wanted)):
                try:
                    has_more = [topic for topic in topics if self._poll(topic)]
                except Exception as error:  # the next receive raises it
                    self._error, has_more = error, list(topics)
                if has_more:
                    with self._lock:
                        self._wanted.clear()
                    self._wake()
                else:
                    _clock.wait(self._changed, _POLL_S)
                    self._changed.clear()

    def _poll(self, topic: str) -> bool:
        """Pull once; return whether a receive finds messages."""
        with self._polling:
            if topic not in self._wanted:  # its consumer was cancelled meanwhile
                return False
            if topic not in self._consumers:
                consumer = librmq.PullConsumer(
                    self._route,
                    group_of(topic),
                    consume_from=librmq.ConsumeFrom.FIRST,
                    auto_commit=False,
                    pull_batch_size=AT_ONCE,
                )
                consumer.subscribe(topic)
                self._consumers[topic] = consumer.start()
            for message in [] if self._ready[topic] else self._consumers[topic].poll(0):
                with critical, self._lock:
                    is_new = message.queue_offset not in self._flights[message.queue]
                    self._flights[message.queue].setdefault(message.queue_offset, False)
                if is_new:
                    self._ready[topic].append(Delivery(message, 1))
            return bool(self._ready[topic])

    def flush(self) -> None:
        pass  # No acknowledgement waits.

    def acknowledge(self, *deliveries: Delivery, waits: bool = False) -> None:
        for delivery in deliveries:
            with critical:  # a signal handler's commit is behind this one
                self._acknowledge(delivery.message.queue, delivery.message.queue_offset)

    def _acknowledge(self, queue: librmq.MessageQueue, offset: int) -> None:
        with self._lock:
            flights = self._flights[queue]
            flights[offset] = True
            end = 0
            for first in sorted(flights):
                if not flights[first]:
                    break
                del flights[first]
                end = first + 1
        consumer = self._consumers.get(queue.topic)
        if end and consumer is not None and queue in consumer.assignment:
            with suppress(librmq.RmqError):  # another instance has the queue since then, and its messages again
                consumer.commit({queue: end})
        self._end_left(queue.topic)

    def requeue(self, delivery: Delivery) -> None:
        properties = {name: value for name, value in delivery.message.properties.items() if name == EXPIRES}
        self._producer.send(delivery.message.topic, delivery.message.body, properties=properties)
        self.acknowledge(delivery)

    def leave(self, topic: str) -> None:
        self._left.add(topic)
        self._wanted.discard(topic)
        self._end_left(topic)

    def _end_left(self, topic: str) -> None:
        """Leave the group of a topic once its messages are acknowledged, for which its consumer must run."""
        if topic not in self._left:
            return
        with self._polling:
            with critical, self._lock:
                undone = sum(
                    not is_done
                    for queue, row in self._flights.items()
                    if queue.topic == topic
                    for is_done in row.values()
                )
                if topic not in self._left or undone > len(self._ready[topic]):
                    return
                self._left.discard(topic)
                self._ready.pop(topic, None)
                for queue in [queue for queue in self._flights if queue.topic == topic]:
                    del self._flights[queue]
                consumer = self._consumers.pop(topic, None)
            if consumer is not None:
                consumer.shutdown()

    def close(self) -> None:
        self._closed.set()
        self._changed.set()
        if self._pulling is not None:
            self._pulling.join()
        for consumer in self._consumers.values():
            consumer.shutdown()
        self._consumers.clear()


Receiver: TypeAlias = ShareReceiver | ClusterReceiver


def group_of(topic: str) -> str:
    """Return the consumer group of a queue in a cluster, whose groups have one subscription each."""
    return f"{GROUP}_{topic}"
