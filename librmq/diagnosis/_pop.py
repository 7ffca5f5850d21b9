"""What POP of 5.x holds: messages that a group has received, with the time until which they are invisible to others.

::

    record of a revive topic                  tag    body, a JSON object
    check point, of one receive from a queue  ck     t topic, c group, q queue id, so first queue offset, pt time of the
                                                     receive, it invisible time (ms), n messages, d their offsets less
                                                     so (without it they are consecutive), bm bits of acknowledged ones
    acknowledgement                           ack    t, c, q, so, pt of the check point; ao queue offset
    several                                   bAck   t, c, q, so, pt of the check point; aol queue offsets
    all                                              bn name of the broker

    check point ──── waits in the timer topic ────> revive topic ──> acknowledged, or stored again in a retry topic
                     until a second before its       │
                     invisible time ends             └ the revive group's progress is the last offset that it has done
    acknowledgement ── until that time ends ──────> revive topic, behind its check point

A change of the invisible time is a new check point for one message, and an acknowledgement of the old one. An
acknowledgement without a check point in front of it has no effect: the check point is done, or the broker had it only
in memory (``enablePopBufferMerge``). Topics are those of the receive, so those of messages that came again are retry
topics. A broker with ``popConsumerKVServiceEnable`` has one record for each message in flight in RocksDB, in
``kvStore/`` (`librmq.store.format.rocksdb`), and deletes it at the acknowledgement, or when it has stored the message
again::

    popTime, invisibleTime (ms), groupId, topicId, queueId, offset    topicId is the topic of the receive, as above

Messages that are received in order have no records. The last receive from each queue is in a file::

    config/consumerOrderInfo.json  table: topic@group -> queue id -> popTime, i invisible time (ms), o first queue
                                   offset and the others less it, cm bits of acknowledged ones, ot queue offset -> time
                                   (ms) from which it is visible, if that was changed

Mirrors 5.3.3's ``PopCheckPoint``, ``AckMsg``, ``BatchAckMsg``, ``PopReviveService`` and ``ConsumerOrderInfoManager``.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import os
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias

from librmq.consumequeue import offset_at_place
from librmq.diagnosis._findings import Finding, Thresholds, grouped
from librmq.diagnosis.view import Source, StoreView, viewed
from librmq.errors import BodyCompressionError, CorruptionError, MalformedError, MessageIllegalError, MissingExtraError
from librmq.formatting import duration
from librmq.message import StoredMessage
from librmq.message.properties import PropertyName
from librmq.message.topics import SystemTopic, TopicPrefix, original_topic, receive_retry_topic, validate_queue
from librmq.runtime.event_log import counted
from librmq.scheduling.timer import waiting_timers
from librmq.store.format.broker_tables import ConfigTable, topic_and_group
from librmq.store.format.directory import CONFIG
from librmq.store.format.rocksdb import pop_records

REVIVE_GROUP: Final = "CID_RMQ_SYS_REVIVE_GROUP"
_CHECK_POINT: Final = "ck"
_ACKNOWLEDGEMENT: Final = "ack"
_BATCH: Final = "bAck"
_MOST: Final = 32  # messages of a check point: the broker's bits have no more
_LONGEST: Final = 255
_INT32: Final = 1 << 31
_INT64: Final = 1 << 63
_CROWD: Final = 10_000
"""This many messages that become visible in one millisecond are worth a finding."""
_ROCKSDB: Final = "kvStore"
_IN_ORDER: Final = os.path.join(CONFIG, "consumerOrderInfo.json")

ReceiveName: TypeAlias = tuple[str, str, int, int, int]
"""Names a receive from a queue: group, topic, queue id, first queue offset, time of the receive (ms)."""


# ---- records


class PopCheckPoint(NamedTuple):
    """A receive of messages of one queue."""

    name: ReceiveName
    """Its name, which acknowledgements repeat."""
    broker_name: str
    """The broker of the messages; another one's if it stands in for that broker."""
    visible_ms: int
    """Time from which the messages are visible again unless they are acknowledged."""
    offsets: tuple[int, ...]
    """Queue offsets of its messages."""
    acknowledged: frozenset[int]
    """Those that it says are acknowledged; a broker writes none."""
    is_put_again: bool
    """Whether a broker wrote it again, because it could not yet store the message in the retry topic."""


class PopAcknowledgement(NamedTuple):
    """The end of messages of a receive."""

    name: ReceiveName
    """The name of the check point."""
    broker_name: str
    """As in the check point, or empty."""
    offsets: tuple[int, ...]
    """Queue offsets of the acknowledged messages."""


def parse_record(message: StoredMessage) -> PopCheckPoint | PopAcknowledgement:
    """Return what a record of a revive topic says."""
    tag = message.tags
    if tag not in (_CHECK_POINT, _ACKNOWLEDGEMENT, _BATCH):
        raise MalformedError(f"tag: expected ck, ack or bAck, found {tag!r:.80}")
    try:
        row = json.loads(message.body.decode())
    except (ValueError, RecursionError, BodyCompressionError) as error:
        raise MalformedError(f"body: expected a JSON object: {error!s:.120}") from None
    if not isinstance(row, dict):
        raise MalformedError(f"body: expected a JSON object, found {row!r:.80}")
    return _check_point(row) if tag == _CHECK_POINT else _acknowledgement(row, is_batch=tag == _BATCH)


def _check_point(row: dict[str, Any]) -> PopCheckPoint:
    name, count = _name(row), _number("n", row.get("n"), _MOST + 1)
    gaps = row.get("d")
    if gaps in (None, []):
        gaps = list(range(count))
    if not isinstance(gaps, list) or len(gaps) != count:
        raise MalformedError(f"d: expected {counted(count, 'number')}, as n says, found {gaps!r:.80}")
    offsets = tuple(_number("so and d", name[3] + _number("d", gap, _INT32)) for gap in gaps)
    if len(set(offsets)) != count:
        raise MalformedError(f"d: expected different numbers, found {gaps!r:.80}")
    bits = row.get("bm", 0)
    if type(bits) is not int or not -_INT32 <= bits < _INT32 or bits % (2 * _INT32) >> count:
        raise MalformedError(f"bm: expected bits of {counted(count, 'message')}, found {bits!r:.80}")
    visible_ms = _number("pt and it", name[4] + _number("it", row.get("it")))
    acknowledged = frozenset(offset for at, offset in enumerate(offsets) if bits >> at & 1)
    return PopCheckPoint(name, _broker_name(row), visible_ms, offsets, acknowledged, row.get("rp") is not None)


_LONG_NAMES: Final = {
    "ackOffset": "ao", "ackOffsetList": "aol", "startOffset": "so", "consumerGroup": "c", "topic": "t", "queueId": "q",
    "popTime": "pt", "brokerName": "bn",
}  # fmt: skip
"""Names in acknowledgements of older brokers."""


def _acknowledgement(row: dict[str, Any], *, is_batch: bool) -> PopAcknowledgement:
    row = {_LONG_NAMES.get(name, name): value for name, value in row.items()}
    offsets = row.get("aol") if is_batch else [row.get("ao")]
    if not isinstance(offsets, list):
        raise MalformedError(f"aol: expected a list of queue offsets, found {offsets!r:.80}")
    what = "aol" if is_batch else "ao"
    return PopAcknowledgement(_name(row), _broker_name(row), tuple(_number(what, offset) for offset in offsets))


def _name(row: dict[str, Any]) -> ReceiveName:
    group, topic = _text("c", row.get("c")), _text("t", row.get("t"))
    try:
        validate_queue(topic, 0)
    except MessageIllegalError as error:
        raise MalformedError(f"t: {error}") from None
    queue_id = _number("q", row.get("q"), _INT32)
    return group, topic, queue_id, _number("so", row.get("so")), _number("pt", row.get("pt"))


def _broker_name(row: dict[str, Any]) -> str:
    name = row.get("bn")
    return _text("bn", name) if name else ""


def _text(what: str, value: object) -> str:
    if not isinstance(value, str) or not value.isprintable() or not 0 < len(value) <= _LONGEST:
        raise MalformedError(f"{what}: expected a name, found {value!r:.80}")
    return value


def _number(what: str, value: object, end: int = _INT64) -> int:
    if type(value) is not int or not 0 <= value < end:
        raise MalformedError(f"{what}: expected a number from 0 to {end - 1}, found {value!r:.80}")
    return value


# ---- what is held


class HeldMessage(NamedTuple):
    """A message that a group has received and not acknowledged."""

    group: str
    topic: str
    """The topic of the receive: one of producers, or the group's retry topic."""
    queue_id: int
    """Number of the queue."""
    queue_offset: int
    """Place of the message in the queue."""
    received_ms: int
    """Time of the receive, or of the last change of the invisible time."""
    visible_ms: int
    """Time from which it is visible again: it is overdue from then on until the broker stores it in a retry topic."""
    physical_offset: int | None
    """The place of the check point in the log; None for a message received in order, or with its record in RocksDB.

    Lag counts one that was received in order too, and it stays in its queue: in flight as long as it is invisible.
    """

    @property
    def revived_topic(self) -> str:
        """The topic in which the group gets it again, without ``enableRetryTopicV2``."""
        if self.physical_offset is None or self.topic.startswith(TopicPrefix.RETRY):
            return self.topic
        return receive_retry_topic(self.group, self.topic)

    @property
    def original_topic(self) -> str:
        """The topic of the send."""
        return original_topic(self.group, self.topic)


class UnusableRecord(NamedTuple):
    """A record of a revive topic, or a row of the file of receives in order, that says nothing about a message."""

    physical_offset: int | None
    """Its place in the log; None for a row."""
    what: str
    """What is wrong with it."""


@dataclass
class PopHolds:
    """What POP holds of a store at one moment."""

    held: list[HeldMessage] = field(default_factory=list)
    """The messages that were received and not acknowledged, those that are visible first in front."""
    unusable: list[UnusableRecord] = field(default_factory=list)
    """Records that no broker writes: what they are about is not in `held`."""
    lone_acknowledgements: int = 0
    """Acknowledged messages without a check point; they are not in `held` either."""

    def counts(self) -> Counter[tuple[str | int | None, ...]]:
        """Return the numbers of held messages by ``(group,)``, ``(group, topic)`` and ``(group, topic, queue_id)``."""
        return Counter(message[:length] for message in self.held for length in (1, 2, 3))

    @property
    def notes(self) -> list[str]:
        """Sentences about records that do not count."""
        notes = []
        if self.unusable:
            place, what = self.unusable[0]
            first = "the first" if place is None else f"the first at {place}"
            notes.append(
                f"{counted(len(self.unusable), 'record')} of POP can't be used and do not count, {first}: {what}"
            )
        if self.lone_acknowledgements:
            notes.append(
                f"{counted(self.lone_acknowledgements, 'acknowledgement')} of POP without a check point do not count: "
                "the broker is done with it, or had it only in memory"
            )
        return notes


def pop_holds(source: Source) -> PopHolds:
    """Return what POP holds: the messages that were received and not acknowledged.

    Messages that are visible again count as revived if the progress of the revive group is unknown: in a store at an
    earlier moment, or if RocksDB has it.

    Raises:
        NotAStoreError: The folder holds no store.
        CorruptionError: A file is damaged.
    """
    with viewed(source) as view:
        topics, receives = view.revive_topics, _Receives()
        is_past = view.store.past_ms is not None
        if topics:
            for message in _stored_records(view, topics, 0) if is_past else _waiting_records(view, topics):
                receives.add_record(message)
            receives.hold_visible_after(-1 if view.unknown_progress is None and not is_past else view.now_ms or 0)
        holds = receives.holds
        if not is_past:
            for row in _receives_in_order(view):
                if isinstance(row, UnusableRecord):
                    holds.unusable.append(row)
                elif row.visible_ms > (view.now_ms or 0):
                    holds.held.append(row)
            for row in _records_of_database(view):
                (holds.unusable if isinstance(row, UnusableRecord) else holds.held).append(row)  # type: ignore[arg-type]
        holds.held.sort(key=lambda message: (message.visible_ms, message[:4]))
        return holds


class _Receives:
    """The check points of records in the order in which the broker gets them, less what is acknowledged."""

    def __init__(self) -> None:
        self.holds = PopHolds()
        self._points: dict[tuple[ReceiveName, str], tuple[PopCheckPoint, int, set[int]]] = {}
        # The first check point's broker name, because some acknowledgements have none.
        self._broker_names: dict[ReceiveName, str] = {}

    def add_record(self, message: StoredMessage) -> None:
        place = message.physical_offset
        try:
            parsed = parse_record(message)
        except MalformedError as error:
            self.holds.unusable.append(UnusableRecord(place, str(error)))
            return
        if isinstance(parsed, PopCheckPoint):
            key = parsed.name, parsed.broker_name
            self._broker_names.setdefault(*key)
            # The timer's progress can be older than what it has delivered. A second delivery is a new check point.
            if message.topic != SystemTopic.TIMER or key not in self._points or self._points[key][0] != parsed:
                self._points[key] = parsed, place, set(parsed.offsets) - parsed.acknowledged
            return
        point = self._points.get((parsed.name, parsed.broker_name or self._broker_names.get(parsed.name, "")))
        if point is None:
            self.holds.lone_acknowledgements += len(parsed.offsets)
            return
        check_point, at, held = point
        for offset in parsed.offsets:
            if offset not in check_point.offsets:
                self.holds.unusable.append(
                    UnusableRecord(place, f"queue offset {offset} is not in the check point at {at}")
                )
        held.difference_update(parsed.offsets)

    def hold_visible_after(self, after_ms: int) -> None:
        """Fill in the held messages that are visible after a time."""
        first: dict[tuple[str, str, int, int], HeldMessage] = {}
        for check_point, place, offsets in self._points.values():
            group, topic, queue_id, _, received_ms = check_point.name
            for offset in offsets if check_point.visible_ms > after_ms else ():
                message = HeldMessage(group, topic, queue_id, offset, received_ms, check_point.visible_ms, place)
                earlier = first.setdefault(message[:4], message)
                if message.visible_ms < earlier.visible_ms:
                    first[message[:4]] = message
        self.holds.held = list(first.values())


def _receives_in_order(view: StoreView) -> Iterator[HeldMessage | UnusableRecord]:
    """Yield the messages of the last receive in order from each queue that are not acknowledged."""
    path = os.path.join(view.store.path, _IN_ORDER)
    try:
        rows = ConfigTable(path, "table", dict, versioned=False, files=view.store.files).rows
    except CorruptionError as error:
        yield UnusableRecord(None, str(error))
        return
    for name, queues in rows.items():
        topic, group = topic_and_group(str(name)) or ("", str(name))
        for queue_id, row in queues.items() if isinstance(queues, dict) else [(None, queues)]:
            try:
                for message in _in_order(group, topic, queue_id, row):
                    if message.queue_offset >= view.progress.get((group, topic), {}).get(message.queue_id, 0):
                        yield message
            except MalformedError as error:
                yield UnusableRecord(None, f"{_IN_ORDER}: {name!s:.80}: {error}")


def _records_of_database(view: StoreView) -> Iterator[HeldMessage | UnusableRecord]:
    """Yield the messages in flight that the broker keeps in RocksDB; nothing without the extra ``rocksdb``."""
    try:
        for visible_ms, row in pop_records(os.path.join(view.store.path, _ROCKSDB), view.store.files):
            try:
                yield HeldMessage(
                    _text("groupId", row.get("groupId")),
                    _text("topicId", row.get("topicId")),
                    _number("queueId", row.get("queueId"), _INT32),
                    _number("offset", row.get("offset")),
                    _number("popTime", row.get("popTime")),
                    visible_ms,
                    None,
                )
            except MalformedError as error:
                yield UnusableRecord(None, f"{_ROCKSDB}: {error}")
    except MissingExtraError:
        return  # `pop_findings` reports it
    except CorruptionError as error:
        yield UnusableRecord(None, str(error))


def _in_order(group: str, topic: str, queue_id: object, row: object) -> list[HeldMessage]:
    if not isinstance(row, dict):
        raise MalformedError(f"expected an object for each queue, found {row!r:.80}")
    received_ms, gaps, bits, times = (
        _number("popTime", row.get("popTime")),
        row.get("o"),
        row.get("cm", 0),
        row.get("ot"),
    )
    if not isinstance(gaps, list) or type(bits) is not int or not isinstance(times or {}, dict):
        raise MalformedError("o, cm, ot: expected a list, a number and an object")
    gaps = [_number("o", gap) for gap in gaps]
    offsets = [_number("o", gap if not at else gaps[0] + gap) for at, gap in enumerate(gaps)]
    ends = {str(offset): end for offset, end in (times or {}).items()}
    end_ms = _number("popTime and i", received_ms + _number("i", row.get("i") or 0))
    name = _text("group", group), _text("topic", topic), _number("queue id", queue_id, _INT32)
    return [
        HeldMessage(*name, offset, received_ms, _number("ot", ends.get(str(offset), end_ms)), None)
        for at, offset in enumerate(offsets)
        if not bits >> at & 1
    ]


def _waiting_records(view: StoreView, topics: Collection[str]) -> Iterator[StoredMessage]:
    """Yield the records with which the broker is not done, in the order in which it gets them."""
    store = view.store
    for topic in topics:
        done = view.progress.get((REVIVE_GROUP, topic), {})
        for queue_id in view.topics.get(topic, ()):
            begin = max(done.get(queue_id, -1) + 1, view.ranges[topic, queue_id].min_offset)
            yield from store.messages(topic, queue_id, begin)
    timers = sorted(waiting_timers(store, topics), key=lambda item: (item[0], item[1].physical_offset))
    yield from (message for _, message in timers)


def _stored_records(view: StoreView, topics: Collection[str], begin: int) -> Iterator[StoredMessage]:
    """Yield all records from a physical offset on in log order, each once: the timer stores them again."""
    queues = [(topic, queue_id) for topic in (SystemTopic.TIMER, *topics) for queue_id in view.topics.get(topic, ())]
    records = heapq.merge(
        *(view.store.messages(*queue, offset_at_place(view.store.queues[queue], begin)) for queue in queues),
        key=lambda message: message.physical_offset,
    )
    seen: set[bytes] = set()
    for message in records:
        is_record = message.topic != SystemTopic.TIMER or message.properties.get(PropertyName.REAL_TOPIC) in topics
        if is_record and (digest := hashlib.blake2b(message.stored_body, digest_size=16).digest()) not in seen:
            seen.add(digest)
            yield message


class PopEvent(NamedTuple):
    """A receive or an acknowledgement of a message."""

    message: StoredMessage
    record: StoredMessage
    """The first record of it in the log."""
    content: PopCheckPoint | PopAcknowledgement
    """What the record says."""


def pop_events(view: StoreView, messages: Sequence[StoredMessage]) -> list[PopEvent]:
    """Return what the log says about receives of messages, in log order."""
    topics = view.revive_topics
    if not topics or not messages:
        return []
    queues: dict[tuple[str, int], dict[int, StoredMessage]] = {}
    for message in messages:
        queues.setdefault((message.topic, message.queue_id), {})[message.queue_offset] = message
    begin = min(message.physical_offset for message in messages)
    events = []
    for stored in _stored_records(view, topics, begin):
        try:
            content = parse_record(stored)
        except MalformedError:
            continue  # `pop_holds` reports it
        by_offset = queues.get(content.name[1:3], {})
        events += [PopEvent(by_offset[offset], stored, content) for offset in content.offsets if offset in by_offset]
    return events


# ---- findings


def pop_findings(view: StoreView, limits: Thresholds) -> Iterator[Finding]:
    """Yield the findings about messages that were not revived, and about what can't be seen."""
    holds, now_ms = pop_holds(view), view.now_ms or 0
    overdue = (message for message in holds.held if message.visible_ms + 1000 * limits.stuck_s < now_ms)
    for (group, topic), messages in grouped(overdue, lambda message: (message.group, message.topic)).items():
        first = messages[0]
        yield Finding(
            "not-revived", limits._severity_of(topic), f"group {group}, topic {topic}",
            f"{counted(len(messages), 'message')} of POP not acknowledged in time and not delivered again, the first "
            f"due {duration(view.age_s(first.visible_ms))} ago.",
            {"messages": len(messages), "due_timestamp_ms": first.visible_ms,
             "received_timestamp_ms": first.received_ms, "queue_id": first.queue_id,
             "queue_offset": first.queue_offset, "physical_offset": first.physical_offset},
            "Let the broker run with timerWheelEnable=true: its revive service stores them in a retry topic. A broker "
            "that was stopped catches up.",
        )  # fmt: skip
    if holds.unusable:
        yield Finding(
            "unusable-pop-records",
            "warning",
            f"store {view.store.path}",
            f"{holds.notes[0]}.",
            {"records": len(holds.unusable), "physical_offset": holds.unusable[0].physical_offset,
             "lone_acknowledgements": holds.lone_acknowledgements},
            "librmq show STORE --topic rmq_sys_REVIVE_LOG_… shows them. What they are about is not in pending or lag.",
        )  # fmt: skip
    crowded = Counter((message.visible_ms, message.group) for message in holds.held)
    for (visible_ms, group), together in crowded.items():
        if together >= _CROWD:
            yield Finding(
                "crowded-pop-time", "info", f"group {group}",
                f"{counted(together, 'message')} of POP become visible again in one millisecond: the broker revives "
                "them together, and later ones wait.",
                {"messages": together, "due_timestamp_ms": visible_ms},
                "Acknowledge messages as they are handled, or receive fewer at once with different invisible times.",
            )  # fmt: skip
    try:
        next(pop_records(os.path.join(view.store.path, _ROCKSDB), view.store.files), None)
    except (MissingExtraError, CorruptionError) as error:
        yield Finding(
            "unseen-pop-records", "info", f"store {view.store.path}",
            "The broker keeps messages in flight in RocksDB (popConsumerKVServiceEnable), which was not "
            f"read: {error}.",
            {"folder": _ROCKSDB},
            "Messages in flight are missing in pending, lag and story; RocketMQ's mqadmin exportPopRecord lists them.",
        )  # fmt: skip
