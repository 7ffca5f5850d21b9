"""What the transport of kombu asks of a shared store or a cluster: queues, bindings, and messages in flight.

Each queue of kombu is a topic. Bindings of exchanges to queues are in ``librmq/kombu/`` of a store's folder, and in the
topic ``kombu_bindings`` of a cluster.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import re
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, cast
from urllib.parse import unquote

from amqp.exceptions import ConsumerCancelled
from kombu.exceptions import ChannelError
from kombu.utils.json import JSONEncoder, loads

import librmq
from librmq.clock import SystemClock
from librmq.protocol import ResponseCode
from librmq.runtime.event_log import EventLog
from librmq.runtime.locks import Event, Lock, critical
from librmq.wire.remote.remote_route import RemoteRoute
from librmq.wire.share import SharedBroker

if sys.platform != "win32":
    import fcntl

_log = EventLog("librmq.integrations")
_clock: Final = SystemClock()
_dumps: Final = JSONEncoder().encode
_loads: Final = json.JSONDecoder().decode

KombuRoute: TypeAlias = "SharedBroker | RemoteRoute"
GROUP: Final = "kombu"
"""The consumer group of all workers in a shared store; in a cluster each queue has one of its own."""
_EXPIRES: Final = "KOMBU_EXPIRES_MS"
_BINDINGS: Final = "kombu_bindings"
AT_ONCE: Final = 32
VISIBILITY_S: Final = 3600
_POLL_S: Final = 0.05
"""Between two polls of the queues of a cluster."""
_SAVE_S: Final = 0.2
"""Between two saves of what is acknowledged."""
_LONGEST_DELAY: Final = timedelta(days=3)
"""What the timer of a store takes by default; for longer ones the worker waits for the rest."""
_MAX_PRIORITY: Final = 9
_NO_LIMIT: Final = (1 << 31) - 1


def topic_of(queue: str) -> str:
    """Return the topic of a queue: its name where it can be one, else the beginning and a hash."""
    if re.fullmatch(r"[a-zA-Z0-9_-]{1,60}", queue):
        return f"kombu-{queue}"
    begin = re.sub(r"[^a-zA-Z0-9_-]", "-", queue)[:40]
    return f"kombu-{begin}-{hashlib.sha256(queue.encode()).hexdigest()[:12]}"


# ---- bindings of all processes


class _Table:
    """Exchanges, their bindings, and the arguments of queues."""

    def __init__(self, rows: dict[str, Any] | None = None) -> None:
        self.rows: dict[str, Any] = {"types": {}, "tables": {}, "queues": {}} if rows is None else rows

    def apply(self, change: list[Any]) -> bool:
        """Make a change; return whether it was one."""
        before = _dumps(self.rows)
        types, tables, queues = self.rows["types"], self.rows["tables"], self.rows["queues"]
        kind, name, *values = change
        if kind == "exchange":
            types[name] = values[0]
        elif kind == "delete exchange":
            types.pop(name, None)
            tables.pop(name, None)
        elif kind == "queue":
            queues[name] = values[0]
        elif kind == "delete queue":
            queues.pop(name, None)
            for exchange in tables:
                tables[exchange] = [row for row in tables[exchange] if row[2] != name]
        elif kind == "bind" and values not in tables.setdefault(name, []):
            tables[name].append(values)
        elif kind == "unbind" and values in tables.get(name, []):
            tables[name].remove(values)
        return bool(_dumps(self.rows) != before)


class FolderBindings:
    """The table in a file of the store's folder, and which queues have consumers."""

    def __init__(self, folder: str) -> None:
        self._folder = os.path.join(folder, "librmq", "kombu")
        os.makedirs(self._folder, mode=0o700, exist_ok=True)
        self._path = os.path.join(self._folder, "bindings.json")
        self._seen: tuple[int, int, int] | None = None
        self._rows = _Table().rows

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Exclude the other processes and threads."""
        with open(os.path.join(self._folder, "lock"), "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def read(self) -> dict[str, Any]:
        """Return the rows of the table."""
        try:
            status = os.stat(self._path)
        except FileNotFoundError:
            return _Table().rows
        seen = status.st_mtime_ns, status.st_size, status.st_ino
        if seen != self._seen:
            with open(self._path, encoding="utf-8") as file:
                self._rows = loads(file.read())
            self._seen = seen
        return self._rows

    def change(self, *change: Any) -> None:
        """Make a change in all processes."""
        with self.locked():
            table = _Table(loads(_dumps(self.read())))
            if not table.apply(list(change)):
                return
            with open(f"{self._path}.new", "w", encoding="utf-8") as file:
                file.write(_dumps(table.rows))
                file.flush()
                os.fsync(file.fileno())
            os.replace(f"{self._path}.new", self._path)

    # A consumer holds a lock on the file of a queue that expires; its time counts from the file's last change. A
    # process that deletes the queue excludes others by the same lock until everything of the queue is gone.

    def _used_path(self, queue: str) -> str:
        return os.path.join(self._folder, f"used-{topic_of(queue)}")

    def hold(self, queue: str) -> int:
        """Note that a queue is used until the returned file is closed, or the process ends."""
        while True:
            file = os.open(self._used_path(queue), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(file, fcntl.LOCK_SH)
            if os.fstat(file).st_nlink:  # else the queue was deleted meanwhile
                os.utime(file)
                return file
            os.close(file)

    @contextmanager
    def expired(self, queue: str) -> Iterator[bool]:
        """Yield whether no client has used a queue for its ``x-expires``; then none can declare it meanwhile."""
        expires_ms = self.read()["queues"].get(queue, {}).get("x-expires")
        if expires_ms is None:
            yield False
            return
        with ExitStack() as opened:
            is_expired = False
            with suppress(FileNotFoundError, BlockingIOError):
                file = opened.enter_context(open(self._used_path(queue), "rb"))
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                status = os.fstat(file.fileno())
                used_ms = status.st_mtime_ns // 1_000_000
                is_expired = bool(status.st_nlink) and used_ms + expires_ms <= _clock.now_ms()
            yield is_expired

    def forget(self, queue: str) -> None:
        """Remove what was noted of a deleted queue."""
        with suppress(FileNotFoundError):
            os.unlink(self._used_path(queue))


class ClusterBindings:
    """The table as the sum of the changes in a topic, each repeated by its process while the queue is declared."""

    def __init__(self, route: KombuRoute, producer: librmq.Producer) -> None:
        self._route = route
        self._producer = producer
        self._ends: dict[Any, int] = {}
        self._rows = _Table().rows
        if not route.topic_route(_BINDINGS):
            route.create_topic(_BINDINGS, 1)

    def read(self) -> dict[str, Any]:
        """Return the rows of the table."""
        ends = {queue: bounds.max_offset for queue, bounds in self._route.queues(_BINDINGS).items()}
        if ends != self._ends:
            table = _Table()
            for message in self._route.messages(_BINDINGS):
                table.apply(loads(message.body))
            self._rows, self._ends = table.rows, ends
        return self._rows

    def change(self, *change: Any) -> None:
        """Make a change in all processes."""
        if _Table(loads(_dumps(self.read()))).apply(list(change)):
            self._producer.send(_BINDINGS, _dumps(list(change)).encode())


# ---- receiving


class Delivery(NamedTuple):
    """A message in flight."""

    message: librmq.DeliveredMessage
    attempt: int

    @property
    def is_expired(self) -> bool:
        """Whether the message was not received in its time."""
        if _EXPIRES.encode() not in self.message.raw:  # most have no limit, and decoding all properties takes long
            return False
        expires_ms = self.message.properties.get(_EXPIRES)
        return expires_ms is not None and int(expires_ms) <= _clock.now_ms()

    def read(self) -> dict[str, Any]:
        """Return the message as kombu has sent it."""
        text = self.message.body.decode()
        # kombu's reader looks at each object for a type that JSON does not have.
        raw: dict[str, Any] = loads(text) if '"__type__"' in text else _loads(text)
        return raw


class Receiver(Protocol):
    """Takes messages for one connection. Acknowledgements may come from other threads."""

    def receive(self, topics: Sequence[str], most: int) -> list[Delivery]:
        """Return messages of one of the topics; without any, call ``wake`` once there may be some.

        Raises:
            ConsumerCancelled: A topic was deleted; Celery connects then, and declares it, again.
        """

    def acknowledge(self, *deliveries: Delivery) -> None:
        """End messages."""

    def requeue(self, delivery: Delivery) -> None:
        """Deliver a message again, to any consumer."""

    def leave(self, topic: str) -> None:
        """Stop receiving from a topic."""

    def close(self) -> None:
        """Leave all groups."""


class _ShareReceiver:
    """Receives messages that are invisible to others for a time, which is renewed while this process has them."""

    def __init__(self, route: KombuRoute, visibility_s: float, wake: Callable[[], None]) -> None:
        self._consumer = librmq.SimpleConsumer(route, GROUP).start()
        self._now_ms = route.runner.now_ms
        self._visibility_s = visibility_s
        self._wake = wake
        self._waiting: set[str] = set()
        """Topics without a message, of which the broker will notify this process."""
        self._turn = 0
        self._in_flight: dict[str, librmq.ReceivedMessage] = {}  # by receipt
        self._closed = Event()
        self._renewing: threading.Thread | None = None

    def receive(self, topics: Sequence[str], most: int) -> list[Delivery]:
        self._turn += 1  # so that a busy queue keeps no other waiting
        for number in range(len(topics)):
            topic = topics[(self._turn + number) % len(topics)]
            if topic not in self._waiting and (messages := self._receive_from(topic, min(most, AT_ONCE))):
                return [Delivery(message, message.attempt) for message in messages]
        return []

    def _receive_from(self, topic: str, most: int) -> list[librmq.ReceivedMessage]:
        def notify() -> None:
            self._waiting.discard(topic)
            self._wake()

        self._waiting.add(topic)  # before the request, because the notification can come during it
        messages: list[librmq.ReceivedMessage] = []
        is_held = False
        try:
            if topic not in self._consumer.subscriptions:
                self._consumer.subscribe(topic)
            messages = self._consumer.receive_or_notify(topic, most, notify, invisible=self._visibility_s)
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
        for message in messages:
            self._in_flight[message.receipt] = message
        if messages and self._renewing is None:
            self._renewing = threading.Thread(target=self._renew, name="librmq-kombu-renew", daemon=True)
            self._renewing.start()
        return messages

    def _renew(self) -> None:
        """Keep messages invisible while this process has them, so that those of a killed one only come again."""
        while not _clock.wait(self._closed, self._visibility_s / 3):
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

    def acknowledge(self, *deliveries: Delivery) -> None:
        messages = [cast("librmq.ReceivedMessage", delivery.message) for delivery in deliveries]
        for message in messages:
            self._in_flight.pop(message.receipt, None)
        try:
            self._consumer.ack_one_way(*messages)
        except librmq.ReceiptError as error:
            _log.warning("kombu: acknowledged after visibility_timeout, so it is done twice: %(error)s", error=error)

    def requeue(self, delivery: Delivery) -> None:
        message = cast("librmq.ReceivedMessage", delivery.message)
        self._in_flight.pop(message.receipt, None)
        with suppress(librmq.ReceiptError):  # its time is over: it is delivered again already
            self._consumer.extend(message, 0)

    def leave(self, topic: str) -> None:
        self._consumer.unsubscribe(topic)
        self._waiting.discard(topic)

    def close(self) -> None:
        self._closed.set()
        self._consumer.shutdown()
        if self._renewing is not None:
            self._renewing.join()


def _deleted(topic: str) -> ConsumerCancelled:
    return ConsumerCancelled(f"a queue was deleted while it had a consumer: {topic}")


class _ClusterReceiver:
    """Pulls messages, because brokers of 4.x hide none: the progress of a queue waits for its first message in flight.

    Where a process ends, or the group's instances change, all messages after that one are delivered again. A thread of
    its own pulls, because a broker that does not answer must not hold up the worker.
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

    def receive(self, topics: Sequence[str], most: int) -> list[Delivery]:
        error, self._error = self._error, None
        if error is not None:
            raise error
        ready = [self._ready[topic] for topic in topics if self._ready[topic]]
        if ready:
            return [row.popleft() for row in ready for _ in range(min(len(row), max(1, most // len(ready))))][:most]
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
            while not self._closed.is_set() and (wanted := set(self._wanted)):
                try:
                    has_more = [topic for topic in wanted if self._poll(topic)]
                except Exception as error:  # the next receive raises it
                    self._error, has_more = error, list(wanted)
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

    def acknowledge(self, *deliveries: Delivery) -> None:
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
        properties = {name: value for name, value in delivery.message.properties.items() if name == _EXPIRES}
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


def group_of(topic: str) -> str:
    """Return the consumer group of a queue in a cluster, whose groups have one subscription each."""
    return f"{GROUP}_{topic}"


# ---- the broker of a process


class KombuBroker:
    """A shared store or a cluster, which all connections of this process use."""

    def __init__(self, url: str, takes_delays: bool) -> None:
        scheme, _, address = url.partition("://")
        self.is_cluster = scheme == "connect"
        self.takes_delays = takes_delays
        self.users = 0
        self._known: set[str] = set()
        self.route: KombuRoute
        self.bindings: FolderBindings | ClusterBindings
        if self.is_cluster:
            if takes_delays:
                raise librmq.ConfigError("delayed_delivery: brokers of 4.x delay by levels only: leave it out")
            self.route = librmq.connect(address.rstrip("/"))
            self.producer = librmq.Producer(self.route, GROUP).start()
            self.bindings = ClusterBindings(self.route, self.producer)
            return
        folder = unquote(address)
        if not os.path.isabs(folder):
            raise librmq.ConfigError(
                f"{url}: expected librmq:///absolute/path/of/folder, or librmq+connect://host:port of a name server"
            )
        # After a kill of the owner, tasks that were acknowledged since the last save run again: so it saves often.
        config = librmq.BrokerConfig(
            save_offsets_every_s=_SAVE_S, timers=librmq.TimerConfig() if takes_delays else None
        )
        self.route = librmq.share(folder, config)
        self.route.set_group(GROUP, retry_max_times=_NO_LIMIT)
        self.producer = librmq.Producer(self.route, GROUP).start()
        self.bindings = FolderBindings(folder)

    def receiver(self, visibility_s: float, wake: Callable[[], None]) -> Receiver:
        """Return a new receiver for a connection, which calls ``wake`` from any thread when messages may be there."""
        if self.is_cluster:
            return _ClusterReceiver(self.route, self.producer, wake)
        return _ShareReceiver(self.route, visibility_s, wake)

    def group(self, topic: str) -> str:
        """Return the group of a queue's workers."""
        return group_of(topic) if self.is_cluster else GROUP

    def declare(self, queue: str, arguments: dict[str, Any]) -> None:
        """Make a queue's topic, and note its arguments."""
        topic, priorities = topic_of(queue), arguments.get("x-max-priority")
        with ExitStack() as held:
            if isinstance(self.bindings, FolderBindings):
                if "x-expires" in arguments:
                    held.callback(os.close, self.bindings.hold(queue))
                self._make(self.bindings, topic, priorities)
            elif priorities is not None:
                raise ChannelError(
                    f"queue {queue!r}: x-max-priority: a cluster's messages have no priorities: leave it out"
                )
            elif topic not in self._known and not self.has_topic(topic):
                self.route.create_topic(topic)
            self._known.add(topic)
            if arguments or queue in self.bindings.read()["queues"]:
                self.bindings.change("queue", queue, arguments)

    def _make(self, bindings: FolderBindings, topic: str, priorities: int | None) -> None:
        """Create a topic in the store, with a queue for each priority, and let its group start at the beginning."""
        queues = 1 if priorities is None else 1 + max(1, min(priorities, _MAX_PRIORITY))
        with bindings.locked():
            former = len(self.route.queues(topic))
            if former < queues:
                self.route.create_topic(topic, queues, message_type=None if priorities is None else "PRIORITY")
                if not former and not self.route.consumer_offsets(GROUP, topic):
                    self.route.reset_group(GROUP, topic, "begin")

    def has_topic(self, topic: str) -> bool:
        """Return whether a topic exists; its route is known for a while after its deletion."""
        return topic in self.route.topics() if self.is_cluster else bool(self.route.queues(topic))

    def put(self, queue: str, message: dict[str, Any]) -> None:
        """Store a message in a queue."""
        topic = topic_of(queue)
        arguments = self.bindings.read()["queues"].get(queue, {}) if not self.is_cluster else {}
        if topic not in self._known:
            self.declare(queue, arguments)
        properties, now_ms = message["properties"], _clock.now_ms()
        fields: dict[str, Any] = {}
        eta = _eta(message) if self.takes_delays else None
        if "x-max-priority" in arguments:
            fields["priority"] = max(0, min(int(properties.get("priority") or 0), arguments["x-max-priority"]))
        elif eta is not None:
            now = datetime.fromtimestamp(now_ms / 1000, UTC)
            if eta > now + timedelta(seconds=1):
                fields["deliver_at"] = min(eta, now + _LONGEST_DELAY)
                now_ms = round(fields["deliver_at"].timestamp() * 1000)
        limits = [int(limit) for limit in (properties.get("expiration"), arguments.get("x-message-ttl")) if limit]
        if limits:
            fields["properties"] = {_EXPIRES: str(now_ms + min(limits))}
        self.producer.send(topic, _dumps(message).encode(), **fields)

    def size(self, queue: str) -> int:
        """Return how many messages of a queue are not acknowledged."""
        topic = topic_of(queue)
        if self.is_cluster:  # a group that has not begun has no progress
            done = self.route.progress(self.group(topic), topic)
            bounds = self.route.queues(topic)
            return sum(
                row.max_offset - max(row.min_offset, done[at].queue_offset if at in done else 0)
                for at, row in bounds.items()
            )
        progress = self.route.progress(GROUP)
        names = {topic, f"%RETRY%{GROUP}_{topic}"}
        return sum(progress[at].lag for at in progress if at.topic in names)

    def skip(self, queue: str) -> int:
        """Move the progress of a queue in a cluster behind its messages; return their number."""
        topic = topic_of(queue)
        size = self.size(queue)
        if size:
            self.route.set_group(self.group(topic))
            self.route.reset_group(self.group(topic), topic, "end")
        return size

    def delete(self, queue: str) -> None:
        """Delete a queue's topic and its bindings."""
        topic = topic_of(queue)
        self._known.discard(topic)
        with suppress(librmq.BrokerError):  # another process was faster
            self.route.delete_topic(topic)
        self.bindings.change("delete queue", queue)
        if isinstance(self.bindings, FolderBindings):
            self.bindings.forget(queue)

    def close(self) -> None:
        """Close it after the last connection."""
        self.producer.shutdown()
        self.route.close()


def _eta(message: dict[str, Any]) -> datetime | None:
    """Return the time before which a task of Celery does not begin."""
    eta = message.get("headers", {}).get("eta")
    if not isinstance(eta, str):
        return None
    time = datetime.fromisoformat(eta)
    return time if time.tzinfo is not None else time.replace(tzinfo=UTC)


class Brokers:
    """The brokers of this process, by URL."""

    def __init__(self) -> None:
        self.inherited()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.inherited)
        atexit.register(self.close)

    def inherited(self) -> None:
        """Begin without brokers, as in a forked child."""
        self._lock = Lock()
        self._open: dict[tuple[str, bool], KombuBroker] = {}

    def enter(self, url: str, takes_delays: bool) -> KombuBroker:
        """Return the broker of a URL for one more connection."""
        with self._lock:
            broker = self._open.get((url, takes_delays))
            if broker is None:
                broker = self._open[url, takes_delays] = KombuBroker(url, takes_delays)
            broker.users += 1
            return broker

    def leave(self, broker: KombuBroker) -> None:
        """End one connection; the last one closes the broker."""
        with self._lock:
            broker.users -= 1
            keys = [key for key, value in self._open.items() if value is broker and not broker.users]
            for key in keys:
                self._open.pop(key).close()

    def close(self) -> None:
        """Close all brokers at the end of the process, so that another one takes the stores over at once."""
        with self._lock:
            while self._open:
                self._open.popitem()[1].close()


brokers: Final = Brokers()
