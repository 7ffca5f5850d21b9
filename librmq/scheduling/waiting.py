"""Records that wait for their time: where they go, and when; which are the first of a producer's send, or cancelled.

::

    record in             goes to                  at
    SCHEDULE_TOPIC_XXXX   REAL_TOPIC, REAL_QID     the time in its queue entry
    rmq_sys_wheel_timer   REAL_TOPIC, REAL_QID     TIMER_DELIVER_MS, or its store time and TIMER_DELAY_MS or _SEC
    SYSTEM_SCHEDULE_MSG   SCHEDULE_TARGET_TOPIC,   SCHEDULE_TARGET_MS
                          SCHEDULE_TARGET_QID

A hop of the relay waits in the schedule topic with the properties of the last row.

Cancelled messages stand in ``librmq/cancelled.json`` of the store, which a broker of RocketMQ ignores::

    {"version": 1, "number",
     "messages": [[id, topic, physical offset, log end, store time, time, time of passing], …]}

The id is the unique id, or the offset id of a message without one; the place and store time are those of the record
that waited; the log's end at that time tells later messages of the same id apart. The last is null until the message
would have been delivered. Without the file, messages that wait in a delay level or the relay are delivered.

Of many messages, the last ones stand in ``librmq/cancelled-since.json``, so that not each cancellation writes all. It
counts while its ``number`` is that of the first file, which has all messages again after its next write.

A process that dies loses the progress of its last seconds, but not the records that it wrote. So before it writes a
copy of a record, `EarlierCopies` searches the log for one, by unique id, time of birth and number of deliveries.
Records that were written again on purpose have the same id, and keep copies of their own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from librmq.errors import CorruptionError, RecordError
from librmq.files import Files
from librmq.java.lang import java_int, java_long
from librmq.message import StoredMessage, record
from librmq.message.delays import deliver_time_ms
from librmq.message.properties import PropertyName
from librmq.message.topics import SystemTopic, TopicPrefix, is_system_topic
from librmq.runtime.event_log import EventLog
from librmq.runtime.locks import Lock
from librmq.store.format.documents import OWN_FOLDER, read_document, write_document

if TYPE_CHECKING:
    from librmq.store import MessageStore

_log = EventLog("librmq.delay")

HOP_GROUP: Final = "CID_SYSTEM_SCHEDULE_MSG"
"""The consumer group that has the relay's progress."""

_OF_GROUPS: Final = (TopicPrefix.RETRY, TopicPrefix.DEAD_LETTER)
PRECISION_MS: Final = 1000


class Destination(NamedTuple):
    """The queue that a message waits for."""

    topic: str
    """Empty if the record names none."""
    queue_id: int


def destination_of(message: StoredMessage) -> Destination:
    """Return where a record that waits, or an undecided half message, goes in the end."""
    properties = message.properties
    topic, queue_id = properties.get(PropertyName.REAL_TOPIC, ""), properties.get(PropertyName.REAL_QUEUE_ID)
    if SystemTopic.HOP in (topic, message.topic):
        topic, queue_id = properties.get(PropertyName.HOP_TOPIC, ""), properties.get(PropertyName.HOP_QUEUE_ID)
    return Destination(topic, java_int(queue_id or "0") or 0)


def own_time_ms(message: StoredMessage) -> int | None:
    """Return the time that a waiting record has among its properties (ms); None for one of a delay level.

    A message that a timer has moved on and that names a delay waits at most a second longer than this.
    """
    properties = message.properties
    if SystemTopic.HOP in (properties.get(PropertyName.REAL_TOPIC), message.topic):
        return java_long(properties.get(PropertyName.HOP_MS, ""))
    if message.topic != SystemTopic.TIMER:
        return None
    out_ms = java_long(properties.get(PropertyName.TIMER_OUT_MS, "0")) or 0
    if PropertyName.TIMER_ROLL_TIMES in properties:
        # The store time of such a record is that of its last turn, not of the send.
        return out_ms + PRECISION_MS
    return max(out_ms, deliver_time_ms(properties, message.store_timestamp_ms))


def sent_to(message: StoredMessage) -> Destination | None:
    """Return the queue of a producer's send that a record is the first of; None for a record that a broker made.

    A broker makes deliveries, hops, retries, dead letters, checked halves, final messages, op messages and the like.
    """
    properties, topic = message.properties, message.topic
    is_made = (
        message.reconsume_times
        or message.sys_flag & record.TRANSACTION_MASK == record.TRANSACTION_COMMIT
        or PropertyName.TIMER_DELETE_KEY in properties
        or PropertyName.TIMER_ROLL_TIMES in properties
        or PropertyName.TRANSACTION_PREPARED_QUEUE_OFFSET in properties
        or PropertyName.TRANSACTION_CHECK_TIMES in properties
    )
    real = properties.get(PropertyName.REAL_TOPIC)
    if is_made or real == SystemTopic.HOP:
        return None
    if topic in (SystemTopic.SCHEDULE, SystemTopic.TIMER, SystemTopic.HALF) or (
        topic == SystemTopic.HOP and real is None
    ):
        destination = destination_of(message)
    elif real is None and not is_system_topic(topic):
        destination = Destination(topic, message.queue_id)
    else:
        return None
    return None if destination.topic.startswith(_OF_GROUPS) else destination


# ---- cancelled messages

_MOST_PASSED: Final = 4096
"""Number of passed messages that are kept for `librmq.diagnosis.story`."""
_SAVED_MS: Final = 60_000
"""Time after which all progress over a passed message is saved."""
_MAX_SIZE: Final = 1 << 30
_FEW: Final = 256
"""Number of cancellations that are written as a whole each time."""


class Cancellation(NamedTuple):
    """A message that was cancelled while it waited."""

    message_id: str
    topic: str
    """The topic that it waited for."""
    physical_offset: int
    """The place of the record that waited."""
    end: int
    """The end of the log at that time."""
    store_timestamp_ms: int
    at_ms: int
    """Time of the cancellation."""
    passed_ms: int | None = None
    """Time at which it would have been delivered; None until then."""


class Cancellations:
    """The cancelled messages of a store.

    `write`, `of_message` and `of_id` are thread-safe; the other methods need one caller at a time.
    """

    def __init__(self, path: str, files: Files) -> None:
        """Read the file of the store in ``path``; `CorruptionError` if it holds something else."""
        self._path = os.path.join(path, OWN_FOLDER, "cancelled.json")
        self._since_path = os.path.join(path, OWN_FOLDER, "cancelled-since.json")
        self._files = files
        self._lock = Lock()
        self._by_name: dict[tuple[str, str], Cancellation] = {}
        self.version = 0
        """Number of messages that `add` cancelled."""
        self._durable_version = 0
        # It is read before the file that replaces it, which another process can write meanwhile.
        since_number, since = self._read(self._since_path)
        self._number, rows = self._read(self._path)
        self._since = since if since_number == self._number else {}  # since the first file was written
        self._by_name = rows | self._since

    def _read(self, path: str) -> tuple[int, dict[tuple[str, str], Cancellation]]:
        """Return the number and the cancellations in a file; 0 and none if it is missing."""
        fields = read_document(path, self._files, {"number": (int,), "messages": (list,)}, max_size=_MAX_SIZE)
        if fields is None:
            return 0, {}
        try:
            return fields["number"], {row[:2]: row for row in map(_checked, fields["messages"])}
        except (TypeError, ValueError) as error:
            why = f"{error}; without the file, cancelled messages are delivered"
            raise CorruptionError(path, 0, "config", why) from None

    def rows(self) -> list[Cancellation]:
        """Return all cancellations."""
        return list(self._by_name.values())

    def replace(self, rows: Iterable[Sequence[Any]]) -> bool:
        """Replace all cancellations by these rows of the file; return whether they differ."""
        before, self._by_name = self._by_name, {}
        for row in rows:
            self._keep(_checked(row))
        return self._by_name != before

    def truncate(self, log_end: int) -> bool:
        """Let no cancellation reach beyond the end of a log that lost its tail; return whether any did.

        Otherwise a later message of the same id would count as cancelled.
        """
        return self.replace([row._replace(end=min(row.end, log_end)) for row in self._by_name.values()])

    def _keep(self, cancellation: Cancellation) -> None:
        self._by_name[cancellation[:2]] = cancellation

    def of_message(self, message: StoredMessage, by_ms: int | None = None) -> Cancellation | None:
        """Return the cancellation of a record that waits, None if it is not cancelled, or not ``by_ms`` yet."""
        if not self._by_name:
            return None
        cancellation = self.of_id(message.unique_key or message.offset_id, destination_of(message).topic)
        if cancellation is None or message.physical_offset >= cancellation.end:
            return None
        if by_ms is not None and cancellation.at_ms > by_ms:
            return None
        is_record = cancellation.store_timestamp_ms == message.store_timestamp_ms
        if message.unique_key is None and not is_record:
            return None  # Another record took the place after the log was cut.
        return cancellation

    def of_id(self, message_id: str, topic: str) -> Cancellation | None:
        """Return the last cancellation of a message for a topic, by unique id or by offset id."""
        return self._by_name.get((message_id, topic))

    def skips(self, message: StoredMessage, now_ms: int) -> bool:
        """Return whether a message whose time has come is not to be delivered, and note that it has passed."""
        if not self._by_name:
            return False
        cancellation = self.of_message(message)
        if cancellation is not None and message.physical_offset >= cancellation.physical_offset:
            self._keep(cancellation._replace(passed_ms=now_ms))
        return cancellation is not None

    def add(self, message: StoredMessage, log_end: int, now_ms: int) -> None:
        """Cancel the message of a record that waits; `write` makes it durable."""
        message_id, topic = message.unique_key or message.offset_id, destination_of(message).topic
        stored_ms = message.store_timestamp_ms
        self._keep(Cancellation(message_id, topic, message.physical_offset, log_end, stored_ms, now_ms))
        self._since[message_id, topic] = self._by_name[message_id, topic]
        self.version += 1

    def is_durable(self, version: int) -> bool:
        """Return whether the file has all messages that were cancelled up to a `version`. Thread-safe."""
        return self._durable_version >= version

    def write(self, log_begin: int, now_ms: int, version: int | None = None) -> None:
        """Write the file without deleted and old passed messages, or what is new; durable when it returns.

        Nothing is written if the file has all messages up to ``version``, as after another thread's write.

        Raises:
            StoreIOError: The disk refuses.
        """
        with self._lock:
            if version is not None and self.is_durable(version):
                return
            version_now = self.version  # It is read before the rows, so that it never counts a message that they lack.
            since = dict(self._since)
            if version is not None and len(self._by_name) > _FEW and len(since) ** 2 < 2 * len(self._by_name):
                rows = list(since.values())
                write_document(self._since_path, self._files, {"number": self._number, "messages": rows})
                self._durable_version = version_now
                return
            in_log = [row for row in list(self._by_name.values()) if row.end > log_begin]
            passed = [row for row in in_log if row.passed_ms is not None and row.passed_ms + _SAVED_MS < now_ms]
            dropped = set(passed[:-_MOST_PASSED])
            rows = [row for row in in_log if row not in dropped]
            write_document(self._path, self._files, {"number": self._number + 1, "messages": rows})
            self._durable_version, self._number = version_now, self._number + 1
            for name, row in since.items():
                if self._since.get(name) is row:
                    del self._since[name]
            for name, row in list(self._by_name.items()):
                if row in dropped or row.end <= log_begin:
                    self._by_name.pop(name, None)

    def write_passed(self, log_begin: int, now_ms: int) -> None:
        """Write which messages have passed, if there are any."""
        if any(row.passed_ms is not None for row in self._by_name.values()):
            self.write(log_begin, now_ms)


def _checked(row: Any) -> Cancellation:  # noqa: ANN401 (of JSON)
    cancellation = Cancellation(*row)
    for value, kind in zip(cancellation, (str, str, int, int, int, int, int | None), strict=True):
        if not isinstance(value, kind):
            raise ValueError(f"expected a cancelled message, found {row!r:.200}")
    return cancellation


# ---- what an earlier run wrote

_MAX_RECORDS: Final = 4096  # A client can send any number of messages with one id, so a search has an end.
_ROUTE_PROPERTIES: Final = (PropertyName.TIMER_ROLL_TIMES, PropertyName.REAL_TOPIC, PropertyName.REAL_QUEUE_ID)
"""Properties that differ between records on different routes, such as the retries of two groups in one queue."""


class EarlierCopies:
    """The copies that are in the log when it is opened. Not thread-safe if the calls are ``in_order``."""

    def __init__(self, store: MessageStore, end: int, *, in_order: bool = True) -> None:
        """``end`` is the log's end before this run wrote to it.

        With ``in_order`` the copies were written in the order of the calls, so the first without a copy is the last.
        """
        self._store = store
        self._end = end
        self._in_order = in_order
        self._is_over = end <= store.log.begin

    def concerns(self, physical_offset: int) -> bool:
        """Return whether a record can have a copy."""
        return physical_offset < self._end and not self._is_over

    def has(
        self,
        message: StoredMessage,
        topics: tuple[str, ...],
        accepts: Callable[[StoredMessage], bool],
        deliveries: int = 0,
    ) -> bool:
        """Return whether a copy of a record is in one of ``topics``; False in doubt.

        A copy has ``deliveries`` more deliveries than the record, and ``accepts(copy)`` is true. In doubt are records
        without a unique id, and equal records if this one may have no copy.
        """
        if not message.unique_key or not self.concerns(message.physical_offset):
            return False
        try:
            return self._has(message, topics, accepts, deliveries)
        except (CorruptionError, RecordError) as error:
            _log.warning(
                "the log can't show whether %(message_id)s was delivered before the crash, so it is delivered again: "
                "%(error)s",
                message_id=message.unique_key,
                error=error,
            )
            return False

    def _has(
        self,
        message: StoredMessage,
        topics: tuple[str, ...],
        accepts: Callable[[StoredMessage], bool],
        deliveries: int,
    ) -> bool:
        times = message.reconsume_times
        copies = [
            copy.physical_offset
            for topic in topics
            for copy in self.records_like(message, topic)
            if copy.reconsume_times == times + deliveries and accepts(copy)
        ]
        if not any(place > message.physical_offset for place in copies):
            self._is_over = self._in_order
            return False
        route = list(map(message.properties.get, _ROUTE_PROPERTIES))
        equal = sorted(
            record.physical_offset
            for record in self.records_like(message, message.topic)
            if record.reconsume_times == times and list(map(record.properties.get, _ROUTE_PROPERTIES)) == route
        )
        if message.physical_offset not in equal:  # The index lacks keys here, so the copy stays in doubt.
            return False
        # Several records can be the origin of a copy, such as those of a send whose answer was lost. All up to one of
        # them have theirs if as many copies follow the first before the next record begins.
        rank = equal.index(message.physical_offset)
        return any(
            sum(equal[0] < place < end for place in copies) >= count
            for count, end in enumerate([*equal[1:], self._end], 1)
            if count > rank
        )

    def records_like(self, message: StoredMessage, topic: str) -> list[StoredMessage]:
        """Return the records of a topic in the log at the opening that have the id and the birth of a message."""
        if not message.unique_key:
            return []
        return [
            record
            for record in self._store.find_by_key(topic, message.unique_key, max_messages=_MAX_RECORDS)
            if record.unique_key == message.unique_key
            and record.physical_offset < self._end
            and record.born_timestamp_ms == message.born_timestamp_ms
        ]
