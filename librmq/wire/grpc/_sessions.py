"""Clients as the server knows them: their settings, their open stream, and what is asked of them.

Mirrors ``ClientActivity`` and ``GrpcClientSettingsManager`` of 5.3.3's proxy.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any, Final, NamedTuple, TypeVar, cast

from librmq.broker import Broker
from librmq.clock import SystemClock
from librmq.errors import RmqError
from librmq.protocol import (
    ChannelClosed,
    CheckTransaction,
    ConsumeFrom,
    ConsumerData,
    ConsumerOffsets,
    Heartbeat,
    MessageModel,
    Request,
    Subscription,
)
from librmq.runtime.event_log import EventLog
from librmq.runtime.locks import Lock, RLock
from librmq.wire.grpc._messages import MAX_BODY, check_group, check_retry_topic, to_message
from librmq.wire.grpc._protocol import Code, Endpoints, Refusal, message_class

# ---- commands of the server to a client

_MAX_COMMANDS: Final = 1_000
_MAX_SIZE: Final = 16 << 20
_AGAIN_S: Final = 0.2


class Commands:
    """The commands of one stream. Bounded: a client that does not read misses further commands. Thread-safe."""

    def __init__(self) -> None:
        self._lock = RLock()
        self._changed = threading.Condition(self._lock)  # never taken itself: Ctrl-C can leave a condition locked
        self._waiting: deque[tuple[Any, int]] = deque()
        self._size = 0
        self._has_ended = False
        self._error: Exception | None = None
        self._clock = SystemClock()
        self._again: tuple[Any, float] | None = None

    def enqueue(self, command: Any) -> bool:
        """Send a command; return False if it was dropped."""
        size = command.ByteSize()
        with self._lock:
            is_full = len(self._waiting) >= _MAX_COMMANDS or self._size + size > _MAX_SIZE
            if self._has_ended or (is_full and self._waiting):
                return False
            self._waiting.append((command, size))
            self._size += size
            self._changed.notify()
            return True

    def enqueue_again(self, command: Any) -> None:
        """Send a command again shortly."""
        with self._lock:
            self._again = command, self._clock.monotonic() + _AGAIN_S
            self._changed.notify()

    def end_stream(self, error: Exception | None = None) -> None:
        """End the stream after the commands in it are sent, with an error if one is given."""
        with self._lock:
            self._has_ended = True
            self._error = self._error or error
            self._changed.notify()

    def wait_for_first(self, seconds: float) -> bool:
        """Wait for a command or the end, with a timeout by the wall clock; return whether there is one."""
        with self._lock:
            return self._changed.wait_for(lambda: bool(self._waiting) or self._has_ended, seconds)

    def __iter__(self) -> Iterator[Any]:
        """Yield commands until the stream ends, waiting for each."""
        while True:
            with self._lock:
                while not self._waiting:
                    if self._error is not None:
                        raise self._error
                    if self._has_ended:
                        return
                    self._wait()
                command, size = self._waiting.popleft()
                self._size -= size
            yield command

    def _wait(self) -> None:
        if self._again is None:
            self._changed.wait()
            return
        command, due = self._again
        left = due - self._clock.monotonic()
        if left > 0:
            self._changed.wait(left)
        else:
            self._waiting.append((command, 0))
            self._again = None


R = TypeVar("R")
_log = EventLog("librmq.wire")

PRODUCER, PUSH_CONSUMER, SIMPLE_CONSUMER = 1, 2, 3
_LITE_CONSUMERS: Final = (5, 6)
_NODE_JS, _PYTHON = 8, 6
_MAX_SESSIONS: Final = 10_000
_MAX_SETTINGS_SIZE: Final = 256 << 10
_MAX_HALVES: Final = 100_000
_MAX_ASKED: Final = 10_000
_ANSWER_S: Final = 1.0
LONG_POLL_S: Final = 20
_NODE_POLL_S: Final = 5
"""A push consumer for Node waits for its long polls when it shuts down."""
RETRY_DELAYS_S: Final = (1, 5, 10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200)
_METRIC_FIXED: Final = (5, 1, 1)
_RETRIES: Final = 16
"""Of a group that the broker does not know yet."""

_TelemetryCommand = message_class("TelemetryCommand")


class Session:
    """One client. An `Endpoint` for the broker, which asks it about transactions. Thread-safe."""

    def __init__(self, sessions: Sessions, client_id: str, settings: Any) -> None:
        self._sessions = sessions
        self.client_id = client_id
        self.settings = settings
        self.half_topics: set[str] = set()
        """Topics of the half messages that it has sent."""
        self.streams: list[Commands] = []
        """Its open streams, the latest last: after a cut, the former one ends later."""

    @property
    def is_for_node(self) -> bool:
        """Whether it is a client for Node.

        It can miss its first settings, because it waits for them only after it has the routes of all its topics, and
        then for five minutes.
        """
        return bool(self.settings.user_agent.language == _NODE_JS)

    @property
    def group(self) -> str:
        """The consumer group; empty for a producer."""
        return str(self.settings.subscription.group.name)

    def call(self, request: Request[R], /) -> R:
        """Take what the broker asks; called under the runner's lock."""
        if isinstance(request, CheckTransaction):
            self._sessions.check_transaction(self, request)
        return cast(R, {} if isinstance(request, ConsumerOffsets) else None)

    def heartbeat(self) -> Heartbeat:
        """Return what the broker learns about the client."""
        settings = self.settings
        if not settings.HasField("subscription"):
            topics = {topic.name for topic in settings.publishing.topics} | self.half_topics
            return Heartbeat(self.client_id, self, frozenset(topics), ())
        subscriptions = {
            entry.topic.name: Subscription(
                entry.topic.name, entry.expression.expression or "*", "SQL92" if entry.expression.type == 2 else "TAG"
            )
            for entry in settings.subscription.subscriptions
        }
        data = ConsumerData(self.group, "simple", MessageModel.CLUSTERING, ConsumeFrom.LAST, subscriptions)
        return Heartbeat(self.client_id, self, frozenset(), (data,))


class FormerClient(NamedTuple):
    """A client of the server before, which is expected to return. It keeps its id."""

    group: str
    """The consumer group; empty for a producer."""
    is_push: bool
    """Whether it is a push consumer. Some receive again long before they open a stream, so its settings are kept."""
    needs_stream: bool
    """Whether it has sent half messages, so that the broker's questions must reach it."""
    places: frozenset[tuple[str, int]] = frozenset()
    """The topics and queue ids from which a push consumer has received."""


class Sessions:
    """All clients of one server. Thread-safe."""

    def __init__(
        self,
        broker: Broker,
        changed: Callable[[str, str, bool], None],
        endpoints: Endpoints,
        former: Mapping[str, FormerClient],
        lost_groups: Collection[str],
    ) -> None:
        """``changed(client_id, group, is_connected)`` is called as clients come and go; a producer's group is empty.

        ``lost_groups`` are those of a server that was killed: clients of theirs return by `adopt`.
        """
        self._lost_groups = frozenset(lost_groups)
        self._former = dict(former)
        self._silent = set(former)  # former clients that have not returned
        self._broker = broker
        self._changed = changed
        self._endpoints = endpoints
        self._lock = Lock()
        self._reporting = RLock()  # taken before the runner's lock
        self.by_id: dict[str, Session] = {}
        """The clients that have sent their settings."""
        self._groups: set[str] = set()  # lost groups that are back
        self._halves: dict[str, tuple[str, int, int]] = {}
        self._asked: dict[str, float] = {}
        self._clock = SystemClock()

    def __len__(self) -> int:
        return len(self.by_id)

    def push_consumers(self) -> list[str]:
        """Return the ids of the push consumers, and of the server before."""
        with self._lock:
            client_ids = {
                session.client_id for session in self.by_id.values() if session.settings.client_type == PUSH_CONSUMER
            }
            return list(client_ids.union(name for name, client in self._former.items() if client.is_push))

    def is_known(self, client_id: str) -> bool:
        """Return whether a client has sent its settings, to this server or the one before."""
        return client_id in self.by_id or client_id in self._former

    def called(self, client_id: str) -> None:
        """Note that a client makes a call; with it most former clients are back."""
        former = self._former.get(client_id)  # another thread may be taking its settings
        if former is not None and not former.needs_stream:
            self._silent.discard(client_id)

    def adopt(self, client_id: str, group: str) -> bool:
        """Take an unknown client that receives as push consumers do for one of a lost group; return whether it is.

        Some clients open their stream again minutes after they have received.
        """
        with self._lock:
            if group not in self._lost_groups or client_id in self.by_id or len(self._former) >= _MAX_SESSIONS:
                return False
            self._former.setdefault(client_id, FormerClient(group, is_push=True, needs_stream=False))
            return True

    def group_called(self, group: str) -> None:
        """Note that a client of a lost group has made a call, as clients do long before they open a stream again."""
        if group in self._lost_groups:
            with self._lock:
                self._groups.add(group)

    def groups(self) -> frozenset[str]:
        """Return the lost groups that are back, since a client of theirs has made a call."""
        with self._lock:
            return frozenset(self._groups)

    def silent(self) -> list[str]:
        """Return the former clients that have not made the call with which they are back."""
        return list(self._silent)

    def clients(self) -> dict[str, FormerClient]:
        """Return the clients, as the next server takes them over."""
        with self._lock:
            return self._former | {
                session.client_id: FormerClient(
                    session.group, session.settings.client_type == PUSH_CONSUMER, bool(session.half_topics)
                )
                for session in self.by_id.values()
            }

    def take_settings(self, client_id: str, settings: Any, version: str, stream: Commands) -> None:
        """Note a client's settings from a stream, and complete them for the answer."""
        which = settings.WhichOneof("pub_sub")
        if which is None:
            raise ValueError("settings: expected publishing or subscription")
        if settings.client_type in _LITE_CONSUMERS:
            raise ValueError("settings: lite topics are not served, so neither are their consumers")
        if settings.ByteSize() > _MAX_SETTINGS_SIZE:
            raise ValueError(f"settings: expected at most {_MAX_SETTINGS_SIZE} bytes, found {settings.ByteSize()}")
        if which == "subscription":
            group = check_group(settings.subscription.group.name)
            for entry in settings.subscription.subscriptions:
                check_retry_topic(self._broker, group, entry.topic.name)
        self._complete(settings, version)
        with self._lock:
            session = self.by_id.get(client_id)
            is_new = session is None
            if session is None:
                if len(self.by_id) >= _MAX_SESSIONS:
                    raise Refusal(Code.TOO_MANY_REQUESTS, f"{_MAX_SESSIONS} clients are connected already")
                session = self.by_id[client_id] = Session(self, client_id, settings)
            session.settings = settings
            if stream not in session.streams:
                session.streams.append(stream)
            self._silent.discard(client_id)
            self._former.pop(client_id, None)
        try:
            self._report_client(client_id)
        except RmqError:
            self.stream_ended(client_id, stream)
            raise
        if is_new:
            _log.info("client %(client)s connected: %(group)s", client=client_id, group=session.group or "a producer")
            self._report(session, is_connected=True)

    def stream_ended(self, client_id: str, stream: Commands) -> bool:
        """Note that a stream has ended; return whether it was the client's last, so that the client is gone."""
        stream.end_stream()
        with self._lock:
            session = self.by_id.get(client_id)
            if session is None or stream not in session.streams:
                return False
            session.streams.remove(stream)
            if session.streams:
                return False
        return self.remove_client(client_id)

    def remove_client(self, client_id: str, *, has_said_so: bool = False) -> bool:
        """Remove a client; return whether it was known.

        A client for Node that has said so ends its stream itself: if the server did, it would open another one.
        """
        with self._lock:
            self._silent.discard(client_id)
            self._former.pop(client_id, None)
            session = self.by_id.pop(client_id, None)
            if session is None:
                return False
            streams, session.streams = session.streams, []
        for stream in [] if has_said_so and session.is_for_node else streams:
            stream.end_stream()
        _log.info("client %(client)s left", client=client_id)
        try:
            self._report_client(client_id)
        finally:
            self._report(session, is_connected=False)
        return True

    def _report(self, session: Session, *, is_connected: bool) -> None:
        """Call ``changed``; its errors do not reach the client."""
        try:
            self._changed(session.client_id, session.group, is_connected)
        except Exception:
            _log.exception("reporting client %(client)s failed", client=session.client_id)

    def _report_client(self, client_id: str) -> None:
        """Report a client to the broker as it is now, so that the last call is right whatever their order."""
        with self._reporting:
            session = self.by_id.get(client_id)
            self._endpoints(client_id).call(ChannelClosed(client_id) if session is None else session.heartbeat())

    def close(self) -> None:
        """End all streams, and remove the clients from the broker."""
        for client_id in list(self.by_id):
            with suppress(RmqError):  # the broker was closed before
                self.remove_client(client_id)

    # ---- transactions

    def sent_half(self, session: Session | None, transaction_id: str, topic: str, queue_offset: int, at: int) -> None:
        """Note where a half message is, by its transaction."""
        self.note_half(transaction_id, (topic, queue_offset, at))
        if session is not None and topic not in session.half_topics:
            session.half_topics.add(topic)
            self._report_client(session.client_id)

    def half(self, transaction_id: str, *, ends: bool) -> tuple[str, int, int]:
        """Return the producer group, queue offset and physical offset of a half message; once if its transaction ends.

        An answer that its outcome is unknown yet ends nothing: the producer commits or rolls back later.
        """
        if not transaction_id:
            raise Refusal(Code.INVALID_TRANSACTION_ID, "transaction_id is empty")
        with self._lock:
            half = self._halves.pop(transaction_id, None) if ends else self._halves.get(transaction_id)
            self._asked.pop(transaction_id, None)
        if half is None:
            raise Refusal(
                Code.INTERNAL_SERVER_ERROR,
                f"transaction {transaction_id!r:.80} is not known: it has ended, or is older than this server. The "
                "check of transactions asks about it",
            )
        return half

    def check_transaction(self, session: Session, request: CheckTransaction) -> None:
        """Ask a producer about a half message."""
        half = request.message
        topic = half.properties.get("REAL_TOPIC", half.topic)
        self.note_half(request.transaction_id, (request.group, half.queue_offset, half.physical_offset))
        command = _TelemetryCommand()
        orphan = command.recover_orphaned_transaction_command
        orphan.message.CopyFrom(to_message(half, topic))
        orphan.transaction_id = request.transaction_id
        with self._lock:
            stream = session.streams[-1] if session.streams else None
            self._asked[request.transaction_id] = self._clock.monotonic()
            while len(self._asked) > _MAX_ASKED:
                del self._asked[next(iter(self._asked))]
        if stream is None or not stream.enqueue(command):
            _log.warning(
                "client %(client)s does not read: a question about a transaction is dropped", client=session.client_id
            )

    def has_open_question(self) -> bool:
        """Return whether a client was asked about a transaction and may still answer: it has a second."""
        since = self._clock.monotonic() - _ANSWER_S
        with self._lock:
            self._asked = {name: at for name, at in self._asked.items() if at > since}
            return bool(self._asked)

    def note_half(self, transaction_id: str, place: tuple[str, int, int]) -> None:
        with self._lock:
            self._halves[transaction_id] = place
            while len(self._halves) > _MAX_HALVES:
                del self._halves[next(iter(self._halves))]

    # ---- settings

    def _complete(self, settings: Any, version: str) -> None:
        """Fill in what the service decides, as 5.3.3 does by its defaults."""
        settings.metric.on = False
        if settings.HasField("publishing"):
            backoff = settings.backoff_policy
            backoff.max_attempts = 3
            backoff.exponential_backoff.initial.FromMilliseconds(10)
            backoff.exponential_backoff.max.FromSeconds(1)
            backoff.exponential_backoff.multiplier = 2
            settings.publishing.max_body_size = MAX_BODY
            settings.publishing.validate_message_type = True
            return
        self._complete_subscription(settings)
        is_push = settings.client_type == PUSH_CONSUMER
        if is_push and settings.user_agent.language == _PYTHON and version_parts(version) < _METRIC_FIXED:
            settings.metric.on = True  # without it these clients never take their settings
            settings.metric.endpoints.CopyFrom(settings.access_point)

    def _complete_subscription(self, settings: Any) -> None:
        subscription, backoff = settings.subscription, settings.backoff_policy
        group = subscription.group.name
        subscription.fifo = self._broker.is_ordered(group)
        subscription.receive_batch_size = 32
        is_node = settings.user_agent.language == _NODE_JS
        subscription.long_polling_timeout.FromSeconds(_NODE_POLL_S if is_node else LONG_POLL_S)
        backoff.max_attempts = max(1, self._broker.groups().get(group, _RETRIES) + 1)
        if is_node:  # it knows no other
            backoff.exponential_backoff.initial.FromSeconds(RETRY_DELAYS_S[0])
            backoff.exponential_backoff.max.FromSeconds(RETRY_DELAYS_S[-1])
            backoff.exponential_backoff.multiplier = 2
        else:
            del backoff.customized_backoff.next[:]
            for seconds in RETRY_DELAYS_S:
                backoff.customized_backoff.next.add().FromSeconds(seconds)


def version_parts(version: str) -> tuple[int, ...]:
    """Return the numbers of a client's version, such as ``5.1.2``."""
    return tuple(int(part) for part in version.split(".") if part.isdecimal())
