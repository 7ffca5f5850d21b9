"""Messages that wait: for a time, a transaction or a retry, or for a group that has not consumed them.

`pending_messages` finds open and discarded half messages, delayed messages, retries, timers, and what POP of 5.x holds.
`expiring` finds the unconsumed messages that retention deletes soon, and `waiting_origins` counts where unconsumed
messages come from.

All are read from the broker's files, without a broker or beside a running one. `pending_messages` collects no messages:
its memory grows only by a bit for each half message, some bytes for each open one and each timer, and what POP holds.

A half that 15 checks could not end goes to ``TRANS_CHECK_MAX_TIME_TOPIC``, and no producer is asked again. A later
decision delivers or drops the message, and writes an op message for its end.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from types import MappingProxyType
from typing import Final, Literal, NamedTuple

from librmq.commitlog import CommitLog
from librmq.config import TransactionConfig
from librmq.consumequeue import ConsumeQueue, offset_at_place
from librmq.consumequeue_entries import ENTRY, HOLE_SIZE, is_ext_address
from librmq.diagnosis._findings import Finding, Thresholds, grouped
from librmq.diagnosis._lag_report import QueueLag, lag
from librmq.diagnosis._pop import PopHolds, pop_holds
from librmq.diagnosis.view import Source, StoreView, viewed
from librmq.errors import ConfigError, CorruptionError
from librmq.formatting import duration
from librmq.java.lang import java_int, java_long
from librmq.message import StoredMessage, record, retry_topic
from librmq.message.delays import level_of_queue_id
from librmq.message.properties import PropertyName
from librmq.message.topics import SystemTopic, TopicPrefix, is_user_topic
from librmq.runtime.event_log import counted
from librmq.scheduling import Schedule
from librmq.scheduling.half_messages import QUEUE, EndedHalves, halves_of, transaction_of
from librmq.scheduling.schedules import ScheduleRule
from librmq.scheduling.timer import waiting_timers
from librmq.scheduling.waiting import HOP_GROUP, Cancellations, destination_of, own_time_ms
from librmq.store import BrokerTables, MessageStore
from librmq.store.engine.derivation import derived_tags_code
from librmq.store.engine.store_parts import QueueName
from librmq.store.retention import first_behind, last_timestamp_ms

Kind = Literal["half", "given_up", "delay", "retry", "timer", "pop", "schedule"]

_SAME_KEY: Final = 4096
_PUT_BACK: Final = frozenset((PropertyName.TRANSACTION_CHECK_TIMES, PropertyName.TRANSACTION_PREPARED_QUEUE_OFFSET))
"""A half that a check has put back, as a copy of an earlier one, has one of these."""
_TIMEOUT_MS: Final = round(1000 * TransactionConfig().timeout_s)


class PendingMessage(NamedTuple):
    """A waiting message."""

    kind: Kind
    """What it is: ``half``, ``given_up`` (a discarded half), ``delay``, ``retry``, ``timer``, ``pop`` (received by a
    group, and not acknowledged) or ``schedule`` (the next message of one)."""
    topic: str
    """The topic of the send."""
    target_topic: str
    """The topic of its delivery: for a retry that of the group, for ``pop`` its retry topic, else the same."""
    due_ms: int | None
    """The time of its delivery; for a half, of the first check; None for a discarded one; for ``pop``, the end of the
    invisible time."""
    unique_key: str | None
    """The unique id; None if the message has none, or is deleted."""
    physical_offset: int
    """The place of the waiting record; for ``pop`` of the message, or if it is deleted, of the check point; -1 for
    ``schedule``, whose message is not stored yet."""
    checks: int
    """The number of checks of a half; 0 for other kinds."""


def pending_messages(
    store: MessageStore,
    tables: BrokerTables | None = None,
    *,
    kind: Kind | None = None,
    topic: str | None = None,
    holds: PopHolds | None = None,
) -> Iterator[PendingMessage]:
    """Yield the messages that wait in a store, grouped by kind; delayed messages and timers are sorted by time.

    ``kind`` and ``topic`` select. ``tables`` are the broker's tables, by default those in the store's folder. Their
    progress can be some seconds behind a running broker, so messages that were just delivered can still be listed.
    Retries are those that wait in the schedule topic for their next attempt, sorted by time with the delayed messages.
    ``holds`` is what POP holds, if already known.
    Cancelled messages are left out. A message of the relay has the kind ``delay``, and its own time.

    Raises:
        CorruptionError: A file is unreadable.
    """
    view = StoreView.over(store, tables)
    tables = view.tables
    store.refresh()
    finders: tuple[tuple[Kind, Callable[[], Iterator[tuple[int | None, StoredMessage]]]], ...] = (
        ("half", lambda: open_halves(store, tables)),
        ("given_up", lambda: ((None, half) for half in given_up_halves(store))),
        ("delay", lambda: _delays(view)),
        ("timer", lambda: _timers(store)),
    )
    cancellations = Cancellations(store.path, store.files)
    for finder_kind, find in finders:
        if kind in (None, finder_kind) or (kind == "retry" and finder_kind == "delay"):
            for due_ms, message in find():
                if cancellations.of_message(message, store.past_ms) is not None:
                    continue
                pending = pending_of(finder_kind, due_ms, message)
                if kind in (None, pending.kind) and topic in (None, pending.topic, pending.target_topic):
                    yield pending
    if kind in (None, "schedule") and store.past_ms is None:
        for pending in scheduled(Schedule.of_row(name, row) for name, row in sorted(tables.schedules.rows.items())):
            if topic in (None, pending.topic):
                yield pending
    if kind in (None, "pop"):
        for pending in _received(view, holds or pop_holds(view)):
            if topic in (None, pending.topic, pending.target_topic):
                yield pending


def scheduled(schedules: Iterable[Schedule]) -> Iterator[PendingMessage]:
    """Yield the next message of each schedule."""
    for schedule in schedules:
        if (due_ms := schedule.next_ms) is not None:
            unique_key = ScheduleRule.message_id(schedule.name, due_ms)
            yield PendingMessage("schedule", schedule.topic, schedule.topic, due_ms, unique_key, -1, 0)


def _received(view: StoreView, holds: PopHolds) -> Iterator[PendingMessage]:
    """Yield the messages that POP holds, in the order of `PopHolds.held`."""
    for held in holds.held:
        message = view.message(held.topic, held.queue_id, held.queue_offset)
        place = held.physical_offset if message is None else message.physical_offset
        if place is not None:
            key = None if message is None else message.unique_key
            yield PendingMessage("pop", held.original_topic, held.revived_topic, held.visible_ms, key, place, 0)


def pending_of(kind: Kind, due_ms: int | None, message: StoredMessage) -> PendingMessage:
    """Return a record that waits; a message of a delay level or the timer is a retry if it goes to a group."""
    target = topic = destination_of(message).topic
    if target.startswith((TopicPrefix.RETRY, TopicPrefix.DEAD_LETTER)):
        kind, topic = "retry", message.properties.get(PropertyName.RETRY_TOPIC) or target
    return PendingMessage(
        kind, topic, target, due_ms, message.unique_key, message.physical_offset,
        check_times(message) if kind in ("half", "given_up") else 0,
    )  # fmt: skip


def _origin_of_half(half: StoredMessage) -> tuple[str, str]:
    return half.properties.get(PropertyName.PRODUCER_GROUP, ""), half.properties.get(PropertyName.REAL_TOPIC, "")


def check_times(half: StoredMessage) -> int:
    """Return how many checks have asked about a half message."""
    return java_int(half.properties.get(PropertyName.TRANSACTION_CHECK_TIMES, "0")) or 0


def given_up_halves(store: MessageStore) -> Iterator[StoredMessage]:
    """Yield the undecided half messages that checks have discarded."""
    ended: set[int] | None = None
    for half in store.messages(SystemTopic.CHECK_MAX_TIME):
        if ended is None:
            ended = {queue_offset for op in store.messages(SystemTopic.OP) for queue_offset in halves_of(op)}
        has_op = any(copy.queue_offset in ended for copy in family_of_half(store, half))
        if not has_op and not _has_final(store, half):
            yield half


def _has_final(store: MessageStore, half: StoredMessage) -> bool:
    """Return whether the transaction of a half was committed; a delayed message waits in the schedule topic first."""
    key, topic = half.unique_key, half.properties.get(PropertyName.REAL_TOPIC, "")
    return key is not None and any(
        message.sys_flag & record.TRANSACTION_MASK == record.TRANSACTION_COMMIT
        for topic_name in (topic, SystemTopic.SCHEDULE)
        for message in store.find_by_key(topic_name, key, max_messages=_SAME_KEY)
    )


def family_of_half(store: MessageStore, half: StoredMessage) -> list[StoredMessage]:
    """Return a discarded half message and its copies in the half topic, in log order."""
    key = half.unique_key
    return [] if key is None else store.find_by_key(SystemTopic.HALF, key, max_messages=_SAME_KEY)


def open_halves(store: MessageStore, tables: BrokerTables) -> Iterator[tuple[int, StoredMessage]]:
    """Yield the transactions without an end: the last half of each, with the time of its first check.

    A check puts a copy of a half at the end of the queue. A crash can take back the progress that has passed the half.

    Raises:
        CorruptionError: A file is unreadable.
    """
    ended = EndedHalves(store, tables)
    places: dict[tuple[object, ...], int] = {}
    for half in store.messages(SystemTopic.HALF, QUEUE, ended.progress(SystemTopic.HALF)):
        name = transaction_of(half)
        has_ended = half.queue_offset in ended
        if places.pop(name, None) is None and not has_ended and not _PUT_BACK.isdisjoint(half.properties):
            family = family_of_half(store, half)  # an end of any of them can come before a copy
            has_ended = any(member.queue_offset in ended and transaction_of(member) == name for member in family)
        if not has_ended:
            places[name] = half.physical_offset
    for discarded in store.messages(SystemTopic.CHECK_MAX_TIME) if places else ():
        name = transaction_of(discarded)
        if places.get(name, discarded.physical_offset) < discarded.physical_offset:
            del places[name]
    for place in places.values():
        last = store.message_at(place)
        if last is None:
            continue  # retention deleted it meanwhile
        immunity_s = java_long(last.properties.get(PropertyName.CHECK_IMMUNITY_TIME, "-1"))
        yield (
            last.born_timestamp_ms + (_TIMEOUT_MS if immunity_s is None or immunity_s == -1 else 1000 * immunity_s),
            last,
        )


def _delays(view: StoreView) -> Iterator[tuple[int, StoredMessage]]:
    store, tables = view.store, view.tables
    delivered_ms = store.past_ms if view.unknown_delays is None else view.now_ms  # no progress says more

    def of_level(queue_id: int) -> Iterator[tuple[int, int, StoredMessage]]:
        queue = store.queue(SystemTopic.SCHEDULE, queue_id)
        begin = tables.delay_offset(level_of_queue_id(queue_id))
        for message in store.messages(SystemTopic.SCHEDULE, queue_id, begin):
            due_ms = _due(store, queue, message)
            if delivered_ms is None or due_ms > delivered_ms:  # earlier ones count as delivered
                yield due_ms, message.physical_offset, message

    levels = sorted(queue_id for topic, queue_id in store.queues if topic == SystemTopic.SCHEDULE)
    relayed: list[tuple[int, int]] = []  # times and places, because a hop is due before its message
    latest: dict[str | None, int] = {}  # the places of those that the saved progress of the relay has not passed
    if store.past_ms is None:
        for message in store.messages(
            SystemTopic.HOP, QUEUE, tables.consumer_offset(SystemTopic.HOP, HOP_GROUP, QUEUE) or 0
        ):
            latest[message.unique_key] = message.physical_offset
            heapq.heappush(relayed, (own_time_ms(message) or 0, message.physical_offset))
    for due_ms, physical_offset, message in heapq.merge(*map(of_level, levels)):
        while relayed and relayed[0][0] <= due_ms:
            yield from _at_place(store, heapq.heappop(relayed), latest)
        own_ms = own_time_ms(message)
        if own_ms is None:
            yield due_ms, message
        else:
            heapq.heappush(relayed, (own_ms, physical_offset))
            if message.unique_key in latest:
                latest[message.unique_key] = physical_offset
    for place in sorted(relayed):
        yield from _at_place(store, place, latest)


def _at_place(
    store: MessageStore, place: tuple[int, int], latest: Mapping[str | None, int] = MappingProxyType({})
) -> Iterator[tuple[int, StoredMessage]]:
    """Yield the message of a time and a place, unless it has a later place."""
    due_ms, physical_offset = place
    message = store.message_at(physical_offset)
    if message is not None and (
        message.unique_key is None or latest.get(message.unique_key, physical_offset) == physical_offset
    ):
        yield due_ms, message


def _due(store: MessageStore, queue: ConsumeQueue | None, message: StoredMessage) -> int:
    """Return the delivery time of a delayed message: that of its queue entry, if the record can have waited for it."""
    raw = b"" if queue is None else queue.read(message.queue_offset, 1)
    code = int(ENTRY.unpack(raw)[2]) if raw else 0
    if queue is not None and is_ext_address(code):
        unit = queue.ext_unit(code)
        code = 0 if unit is None else unit.tags_code
    wait_ms = code - message.store_timestamp_ms  # a level is a whole number of seconds
    is_time = not -(1 << 31) <= code < 1 << 31 and wait_ms >= 0 and wait_ms % 1000 == 0
    return code if is_time else derived_tags_code(message, store.levels)


def _timers(store: MessageStore) -> Iterator[tuple[int, StoredMessage]]:
    """Yield the waiting timers without the records of POP."""
    places = sorted(
        (due_ms if (own_ms := own_time_ms(message)) is None else own_ms, message.physical_offset)
        for due_ms, message in waiting_timers(store)
        if not message.properties.get(PropertyName.REAL_TOPIC, "").startswith(TopicPrefix.REVIVE)
    )
    for place in places:
        yield from _at_place(store, place)


# ---- kinds of messages


def kind_of(message: StoredMessage) -> Literal["plain", "delayed", "transactional"]:
    """Return the kind of a message in a topic of producers."""
    properties = message.properties
    if message.sys_flag & record.TRANSACTION_MASK or properties.get(PropertyName.TRANSACTION_PREPARED) == "true":
        return "transactional"
    return "delayed" if PropertyName.REAL_TOPIC in properties else "plain"


# ---- discarded half messages


class GivenUpHalf(NamedTuple):
    """An undecided half message that checks have discarded."""

    group: str
    """The producer group."""
    topic: str
    """The topic of the message."""
    unique_key: str | None
    """The unique id; None if the message has none."""
    checks: int
    """Number of checks."""
    born_timestamp_ms: int
    """Time of the send, in milliseconds since 1970."""
    given_up_timestamp_ms: int
    """Time at which the last check discarded it."""
    physical_offset: int
    """The place of the record in the topic of discarded halves."""
    can_be_decided: bool
    """Whether the log still has its half."""


def given_up(source: Source) -> list[GivenUpHalf]:
    """Return the undecided half messages that checks have discarded, in log order.

    Raises:
        NotAStoreError: The folder holds no store.
        CorruptionError: A file is damaged.
    """
    with viewed(source) as view:
        return [
            GivenUpHalf(
                *_origin_of_half(half),
                half.unique_key,
                check_times(half),
                half.born_timestamp_ms,
                half.store_timestamp_ms,
                half.physical_offset,
                bool(family_of_half(view.store, half)),
            )
            for half in given_up_halves(view.store)
        ]


def half_findings(view: StoreView, limits: Thresholds) -> Iterator[Finding]:
    """Yield the findings about halves of each producer group and topic: given up, or never checked."""
    yield from _unchecked_findings(view, limits)
    for (group, topic), halves in grouped(given_up(view), lambda half: (half.group, half.topic)).items():
        yield Finding(
            "given-up-halves", limits._severity_of(topic), f"producer group {group}, topic {topic}",
            f"Checks have given up {counted(len(halves), 'half message')}, without commit or rollback.",
            {"halves": len(halves), "checks": max(half.checks for half in halves),
             "first_timestamp_ms": min(half.given_up_timestamp_ms for half in halves),
             "last_timestamp_ms": max(half.given_up_timestamp_ms for half in halves),
             "physical_offset": halves[-1].physical_offset},
            "Look up the transactions in the producer's database, then commit or roll back each: librmq decide STORE "
            "OFFSET, or decide_half.",
        )  # fmt: skip


def _unchecked_findings(view: StoreView, limits: Thresholds) -> Iterator[Finding]:
    """Yield the halves that no check has asked about, though it was due long ago."""
    unchecked = (
        (due_ms, half)
        for check_ms, half in open_halves(view.store, view.tables)
        # The producer's clock can be wrong.
        if (view.age_s(due_ms := max(check_ms, half.store_timestamp_ms)) or 0) > limits.unchecked_s
        and not check_times(half)
    )
    for (group, topic), halves in grouped(unchecked, lambda pair: _origin_of_half(pair[1])).items():
        due_ms, oldest = min(halves, key=lambda pair: pair[0])
        yield Finding(
            "unchecked-halves", limits._severity_of(topic), f"producer group {group}, topic {topic}",
            f"{counted(len(halves), 'half message')} without commit or rollback, and never checked; the first check "
            f"was due {duration(view.age_s(due_ms))} ago.",
            {"halves": len(halves), "first_timestamp_ms": oldest.store_timestamp_ms,
             "last_timestamp_ms": max(half.store_timestamp_ms for _, half in halves), "due_timestamp_ms": due_ms,
             "physical_offset": oldest.physical_offset},
            "Start the broker, which checks them, and a transaction producer of this group, which answers.",
        )  # fmt: skip


# ---- waiting retries of a group


def waiting_retries(
    store: MessageStore, tables: BrokerTables, group: str, topic: str | None = None
) -> Iterator[StoredMessage]:
    """Yield the retries that a group has not consumed, those in its retry topic, or in ``topic``, first."""
    topic = topic or retry_topic(group)
    for row in lag(StoreView.over(store, tables), group=group, topic=topic, times=False):
        begin = row.next_offset
        yield from store.messages(topic, row.queue_id, begin, row.max_offset)
    for pending in pending_messages(store, tables, kind="retry", topic=topic):
        message = store.message_at(pending.physical_offset)
        if pending.target_topic == topic and message is not None:
            yield message


# ---- unconsumed messages


class ExpiringMessages(NamedTuple):
    """The unconsumed messages of a group in a topic that retention would delete soon."""

    group: str | None
    """The consumer group; None stands for all messages of a topic that no group has ever read."""
    topic: str
    messages: int
    """Number of unconsumed messages in the log files that expire."""
    bytes: int
    """Size of their records."""
    first_at_ms: int
    """Time at which the first of these files expires, in milliseconds since 1970; in the past for an expired one."""


def expiring(source: Source, *, reserved_s: float, within_s: float) -> list[ExpiringMessages]:
    """Return the unconsumed messages that retention by age would delete soon, the first to expire first.

    Retention deletes whole log files, the oldest first: a file goes when its last record is older than the reserved
    time, and the file with the log's last record stays. Settings such as the hour of deletion, the log's largest size
    and ``keep_unconsumed`` are not considered.

    Args:
        source: A running broker, the folder of a store, or a view of either. The time of a folder that no process
            uses is that of its last message.
        reserved_s: Seconds after its last record at which a log file expires.
        within_s: Only files that expire within this many seconds.

    Raises:
        ConfigError: A number of seconds is negative.
        NotAStoreError: The folder holds no store.
        CorruptionError: A file is damaged.
    """
    if reserved_s < 0 or within_s < 0:
        raise ConfigError(f"expiring: expected 0 seconds or more, found {reserved_s=} and {within_s=}")
    with viewed(source) as view:
        log, latest_ms = view.store.log, (view.now_ms or 0) + round(1000 * (within_s - reserved_s))
        last_ms = cache(lambda start: last_timestamp_ms(log, start))
        end = _end_of_expired(log, latest_ms, last_ms)
        rows: dict[tuple[str | None, str], ExpiringMessages] = {}
        unread: list[tuple[str | None, QueueName, int]] = [
            (row.group, (row.topic, row.queue_id), row.next_offset)
            for row in lag(view, times=False)
            if row.lag  # otherwise its queue can be gone
        ]
        for topic in never_read_topics(view):
            unread += [(None, name, offsets.start) for name, offsets in view.queues(topic).items()]
        for group, (topic, queue_id), begin in unread:
            queue = view.store.queues[topic, queue_id]
            entries = queue.entries(begin, max(begin, offset_at_place(queue, end)))
            entries = entries[entries["size"] != HOLE_SIZE]
            if len(entries):
                start = int(entries["physical_offset"][0]) // log.file_size * log.file_size
                at_ms, size = last_ms(start) + round(1000 * reserved_s), int(entries["size"].sum(dtype="i8"))
                sums = rows.get((group, topic), ExpiringMessages(group, topic, 0, 0, at_ms))
                rows[group, topic] = sums._replace(
                    messages=sums.messages + len(entries),
                    bytes=sums.bytes + size,
                    first_at_ms=min(sums.first_at_ms, at_ms),
                )
        return sorted(rows.values(), key=lambda row: (row.first_at_ms, -row.messages, row.group or "", row.topic))


def never_read_topics(view: StoreView) -> list[str]:
    """Return the topics of users that no group has read; none if the progress of groups is unknown.

    Broadcasting consumers keep their progress elsewhere, and do not count.
    """
    if view.unknown_progress is not None:
        return []
    read = {topic for _, topic in view.progress}
    return [
        topic
        for topic in view.topics
        if topic not in read and is_user_topic(topic) and not topic.startswith(TopicPrefix.LIGHT)
    ]


def _end_of_expired(log: CommitLog, latest_ms: int, last_ms: Callable[[int], int]) -> int:
    """Return the end of the last log file whose last record is not later than ``latest_ms``; the log's begin if none.

    A file is walked through only if its first record and that of the next file disagree.
    """
    end = log.begin
    for start in log.sequence.starts:
        first = log.first_store_timestamp_ms(start)
        if start + log.file_size >= log.end or (first is not None and first > latest_ms):
            break
        following = first_behind(log, start)
        if (following is None or following > latest_ms) and last_ms(start) > latest_ms:
            break
        end = start + log.file_size
    return end


# ---- origins of unconsumed messages


class WaitingOrigins(NamedTuple):
    """The origins of the messages of a topic that a group has left to consume."""

    group: str
    topic: str
    lag: int
    """All of them."""
    looked_at: int
    """Those whose origin was looked up; the next three add up to it."""
    new: int
    """Messages of producers, those of a committed transaction among them."""
    delayed: int
    """Deliveries after a delay or at a time."""
    retried: int
    """Retries, on which the group has failed before."""
    sampled: bool = False
    """Whether some of the messages were not looked up."""


def waiting_origins(
    source: Source, *, group: str | None = None, topic: str | None = None, sampled: int = 10_000
) -> list[WaitingOrigins]:
    """Return the origins of the messages that groups have left to consume, for each topic with any.

    Args:
        source: A running broker, the folder of a store, or a view of either.
        group: Only this group.
        topic: Only this topic.
        sampled: The most messages to read of each group and topic, the oldest of each queue.

    Raises:
        NotAStoreError: The folder holds no store.
        CorruptionError: A file is damaged.
    """
    with viewed(source) as view:
        rows = (row for row in lag(view, group=group, topic=topic, times=False) if row.lag)
        by_topic = grouped(rows, lambda row: (row.group, row.topic))
        return [_origins(view, *name, rows_of_topic, sampled) for name, rows_of_topic in by_topic.items()]


def _origins(view: StoreView, group: str, topic: str, rows: list[QueueLag], sampled: int) -> WaitingOrigins:
    total = sum(row.lag for row in rows)
    if topic.startswith(TopicPrefix.RETRY):
        return WaitingOrigins(group, topic, total, total, 0, 0, total)
    kinds: Counter[str] = Counter()
    for row in rows:
        begin = row.next_offset
        count = row.lag if total <= sampled else max(1, row.lag * sampled // total)
        with suppress(CorruptionError):
            kinds.update(map(kind_of, view.store.messages(topic, row.queue_id, begin, begin + count)))
    delayed = kinds["delayed"]
    return WaitingOrigins(
        group=group,
        topic=topic,
        lag=total,
        looked_at=kinds.total(),
        new=kinds.total() - delayed,
        delayed=delayed,
        retried=0,
        sampled=kinds.total() < total,
    )
