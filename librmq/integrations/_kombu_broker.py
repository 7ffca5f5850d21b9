"""A shared store or a cluster as kombu uses it: each queue of kombu is a topic.

A temporary queue of a store, which ends by itself, has one of the topics ``kombu_temporary_1``, ``…_2`` and so on while
it exists. Its messages name the queue, so what a former queue has left in the topic is not received.
"""

from __future__ import annotations

import atexit
import os
import re
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any, Final
from urllib.parse import unquote

from kombu.exceptions import ChannelError

import librmq
from librmq.clock import SystemClock
from librmq.integrations._kombu_bindings import (
    TOPIC,
    ClusterBindings,
    FolderBindings,
    KombuRoute,
    to_json,
    topic_of,
)
from librmq.integrations._kombu_receivers import (
    EXPIRES,
    GROUP,
    QUEUE,
    ClusterReceiver,
    Receiver,
    ShareReceiver,
    group_of,
)
from librmq.message.lag import queue_lag
from librmq.message.topics import receive_retry_topic
from librmq.runtime.event_log import EventLog
from librmq.runtime.locks import Lock

_log = EventLog("librmq.integrations")
_clock: Final = SystemClock()
_VISIBILITY_S: Final = 3600
_LONGEST_VISIBILITY_S: Final = 12 * 3600
_CLEAN_S: Final = 600
"""Between two looks for queues that were deleted and have no message left in the log."""
_ANSWER_S: Final = 10
"""Time for an answer of the owner, which a machine can stop for seconds. A connection that counts as lost lets Celery
repeat what it acknowledges late. The owner's end takes no such time: it is seen at once."""
_LONGEST_DELAY: Final = timedelta(days=3)
"""What the timer of a store takes by default; for longer ones the worker waits for the rest."""
_MAX_PRIORITY: Final = 10
"""What Celery's pages recommend; each priority costs a queue of the topic."""
_NO_LIMIT: Final = (1 << 31) - 1


class KombuBroker:
    """A shared store or a cluster, which all connections of this process use."""

    def __init__(self, url: str, takes_delays: bool) -> None:
        scheme, _, address = url.partition("://")
        self.is_cluster = scheme == "connect"
        self.takes_delays = takes_delays
        self.users = 0
        self._known: set[str] = set()
        self._has_warned = False
        self._clean_s = 0.0
        self.route: KombuRoute
        self.bindings: FolderBindings | ClusterBindings
        if self.is_cluster:
            if takes_delays:
                raise librmq.ConfigError("delayed_delivery: brokers of 4.x delay by levels only: leave it out")
            self.route = librmq.connect(_name_server(url, address))
            self.producer = librmq.Producer(self.route, GROUP).start()
            self.bindings = ClusterBindings(self.route, self.producer)
            return
        folder = _folder(url, address)
        # What is not named here is left to the applications that share the store.
        config = librmq.BrokerConfig(timers=librmq.TimerConfig()) if takes_delays else None
        self.route = librmq.share(folder, config, timeout=_ANSWER_S)
        self.route.set_group(GROUP, retry_max_times=_NO_LIMIT)
        self.producer = librmq.Producer(self.route, GROUP).start()
        self.bindings = FolderBindings(folder)

    def receiver(self, visibility_s: float | None, wake: Callable[[], None]) -> Receiver:
        """Return a new receiver for a connection, which calls ``wake`` from any thread when messages may be there."""
        if not self.is_cluster:
            return ShareReceiver(self.route, _VISIBILITY_S if visibility_s is None else visibility_s, wake)
        if visibility_s is not None and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "kombu: visibility_timeout has no effect in a cluster, which hides no messages: what a worker that "
                "ends has not acknowledged is delivered again at once"
            )
        return ClusterReceiver(self.route, self.producer, wake)

    def topic(self, queue: str) -> str:
        return next(iter(self.topics([queue])))

    def topics(self, queues: list[str]) -> dict[str, str]:
        """Return queues by their topics."""
        rows = self.bindings.read()["queues"] if isinstance(self.bindings, FolderBindings) else {}
        return {rows.get(queue, {}).get(TOPIC) or topic_of(queue): queue for queue in queues}

    def declare(self, queue: str, arguments: dict[str, Any], *, auto_delete: bool = False) -> None:
        """Make a queue's topic, and note its arguments."""
        priorities = arguments.get("x-max-priority")
        if priorities is not None and (type(priorities) is not int or not 0 <= priorities <= _MAX_PRIORITY):
            raise ChannelError(
                f"queue {queue!r}: x-max-priority: expected a whole number from 0 to {_MAX_PRIORITY}, "
                f"found {priorities!r:.80}"
            )
        with ExitStack() as held:
            if isinstance(self.bindings, FolderBindings):
                is_temporary = auto_delete or "x-expires" in arguments
                if "x-expires" in arguments:
                    held.callback(os.close, self.bindings.hold(queue))
                self._make(self.bindings, queue, arguments, is_temporary=is_temporary)
                return
            if priorities is not None:
                raise ChannelError(
                    f"queue {queue!r}: x-max-priority: a cluster's messages have no priorities: leave it out"
                )
            topic = topic_of(queue)
            if topic not in self._known and not self.has_queue(queue):
                self.route.create_topic(topic)
            self._known.add(topic)
            if arguments or queue in self.bindings.read()["queues"]:
                self.bindings.change("queue", queue, arguments)

    def _make(self, bindings: FolderBindings, queue: str, arguments: dict[str, Any], *, is_temporary: bool) -> None:
        """Create a queue's topic in the store, with a queue for each priority, and note the queue's arguments."""
        priorities = arguments.get("x-max-priority")
        with bindings.locked():
            before, topic = bindings.read()["queues"].get(queue, {}), self.topic(queue)
            if TOPIC in before:
                arguments = arguments | {TOPIC: topic}
            elif is_temporary and priorities is None and not self.route.queues(topic):
                topic = bindings.free_topic()
                arguments = arguments | {TOPIC: topic}
            self._create_topic(topic, priorities)
            if TOPIC in arguments and TOPIC not in before:
                self._skip_former(topic)
            # Last, so that a kill before leaves the topic to the next queue.
            if arguments or before:
                bindings.change_locked("queue", queue, arguments)
        self._known.add(topic)

    def _skip_former(self, topic: str) -> None:
        """Skip what the former queue of a topic has left, whose process was killed."""
        for name in (topic, receive_retry_topic(GROUP, topic)):
            if self.route.lag(GROUP, name):
                self.route.reset_group(GROUP, name, "end")

    def _create_topic(self, topic: str, priorities: int | None) -> None:
        """Create a topic of the store unless it exists, and let its group start at the beginning."""
        queues = 1 if priorities is None else 1 + priorities
        former = len(self.route.queues(topic))
        if former < queues:
            self.route.create_topic(topic, queues, message_type=None if priorities is None else "PRIORITY")
            if not former and not self.route.consumer_offsets(GROUP, topic):
                self.route.reset_group(GROUP, topic, "begin")

    def has_queue(self, queue: str) -> bool:
        """Return whether a queue exists; the route of its topic is known for a while after its deletion."""
        topic = self.topic(queue)
        return topic in self.route.topics() if self.is_cluster else bool(self.route.queues(topic))

    def put(self, queue: str, message: dict[str, Any]) -> None:
        """Store a message in a queue."""
        arguments = self.bindings.read()["queues"].get(queue, {}) if not self.is_cluster else {}
        topic = arguments.get(TOPIC) or topic_of(queue)
        if topic not in self._known:
            if TOPIC in arguments:
                self._create_topic(topic, None)  # again, if it was deleted by hand
                self._known.add(topic)
            else:
                self.declare(queue, arguments)
        properties, now_ms = message["properties"], _clock.now_ms()
        message_properties = {QUEUE: topic_of(queue)} if TOPIC in arguments else {}
        fields: dict[str, Any] = {"properties": message_properties}
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
            message_properties[EXPIRES] = str(now_ms + min(limits))
        body = to_json(message).encode()
        if len(body) > self.producer.config.max_message_size:
            raise librmq.MessageIllegalError(
                f"queue {queue!r}: the message has {len(body):,} bytes with its headers, of at most "
                f"{self.producer.config.max_message_size:,}: give the task the name of a file or of a database's "
                "row that has its data; task_compression='gzip' helps where they compress well"
            )
        self.producer.send(topic, body, **fields)

    def size(self, queue: str) -> int:
        """Return how many messages of a queue are not acknowledged."""
        topic = self.topic(queue)
        if self.is_cluster:  # a group that has not begun has no progress
            done = self.route.progress(group_of(topic), topic)
            bounds = self.route.queues(topic)
            return sum(
                queue_lag(done[at].queue_offset if at in done else None, row.min_offset, row.max_offset)
                for at, row in bounds.items()
            )
        return sum(self.route.lag(GROUP, name) for name in (topic, receive_retry_topic(GROUP, topic)))

    def skip(self, queue: str) -> int:
        """Move the progress of a queue in a cluster behind its messages; return their number."""
        topic = topic_of(queue)
        size = self.size(queue)
        if size:
            self.route.set_group(group_of(topic))
            self.route.reset_group(group_of(topic), topic, "end")
        return size

    def delete(self, queue: str) -> None:
        """Delete a queue with its bindings, and its topic unless the next temporary queue gets it."""
        topic = topic_of(queue)
        if topic == self.topic(queue):
            self._known.discard(topic)
            with suppress(librmq.BrokerError):  # another process was faster
                self.route.delete_topic(topic)
        self.bindings.change("delete queue", queue)
        if isinstance(self.bindings, FolderBindings):
            self.bindings.remove_note(queue)
            if (now_s := _clock.monotonic()) >= self._clean_s:
                self._clean_s = now_s + _CLEAN_S
                self.route.clean_unused_topics()  # those whose messages retention has deleted

    def close(self) -> None:
        """Close it after the last connection."""
        if isinstance(self.bindings, FolderBindings):
            self.bindings.close()
        self.producer.shutdown()
        self.route.close()


def _refuse_rest(url: str, address: str, allowed: str) -> None:
    """Refuse parts of a URL that would become a part of a name."""
    for sign, what, name in (("?", "a query", "%3F"), ("#", "a fragment", "%23")):
        if sign in address:
            raise librmq.ConfigError(
                f"{url}: has {what}, which means nothing here: options belong into broker_transport_options; in a name "
                f"of a folder write {sign} as {name}. Expected {allowed}"
            )


def _folder(url: str, address: str) -> str:
    allowed = "librmq:///absolute/path/of/folder, or librmq+connect://host:port of a name server"
    _refuse_rest(url, address, allowed)
    if address.lstrip("/").startswith("~"):
        raise librmq.ConfigError(
            f'{url}: ~ means no home folder in a URL: write f"librmq://{{Path.home()}}/…", or %7E for a name that '
            f"begins with it. Expected {allowed}"
        )
    if re.match(r"/?[A-Za-z]:(/|\\|$)", address):
        raise librmq.ConfigError(f"{url}: a drive: a store is shared on Linux and macOS only. Expected {allowed}")
    folder = unquote(address)
    if not os.path.isabs(folder):
        raise librmq.ConfigError(f"{url}: expected {allowed}")
    return folder


def _name_server(url: str, address: str) -> str:
    allowed = "librmq+connect://host:port of a name server"
    _refuse_rest(url, address, allowed)
    host = address.rstrip("/")
    if "/" in host or not host:
        raise librmq.ConfigError(f"{url}: a cluster has no path. Expected {allowed}")
    return host


_OPTIONS: Final = ("delayed_delivery", "visibility_timeout")
_OPTIONS_OF_KOMBU: Final = frozenset({
    *("max_retries", "interval_start", "interval_step", "interval_max", "connect_retries_timeout"),
    *("errback", "callback", "body_encoding", "deadletter_queue", "timeout", "retry_errors"),
})  # fmt: skip


@cache
def warn_of_options(names: frozenset[str]) -> None:
    """Warn once of transport options that nothing reads: a misspelt one, or one of another transport."""
    unknown = sorted(map(str, names - _OPTIONS_OF_KOMBU - {*_OPTIONS}))
    if unknown:
        _log.warning(
            "kombu: broker_transport_options: %(unknown)s: no effect with librmq, which knows %(known)s",
            unknown=", ".join(map(repr, unknown)),
            known=" and ".join(_OPTIONS),
        )


def check_delayed(value: Any) -> bool:
    """Return whether ``delayed_delivery`` is on; a text such as ``"false"`` would be."""
    if value is not None and not isinstance(value, bool):
        raise librmq.ConfigError(f"delayed_delivery: expected True or False, found {value!r:.80}")
    return bool(value)


def check_visibility(seconds: Any) -> float | None:
    """Return a ``visibility_timeout``; None if there is none."""
    if seconds is None:
        return None
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 1 <= seconds <= _LONGEST_VISIBILITY_S:
        raise librmq.ConfigError(
            f"visibility_timeout: expected seconds from 1 to {_LONGEST_VISIBILITY_S} (12 h), found {seconds!r:.80}. "
            "It need not exceed the longest task, because a worker that lives keeps its tasks hidden"
        )
    return float(seconds)


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
