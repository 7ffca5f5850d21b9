"""Walks over a store's queues from the newest message on, and what brokers answer where their logs are elsewhere.

A story has the records that the brokers find by the message's unique id, and the progress of groups. What waits is what
the delay levels hold, which the brokers' own levels could make longer than the default ones that are taken here, and
the newest messages of RocketMQ 5's timer.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, Final, Literal

from librmq.broker import AdministeredRoute
from librmq.diagnosis import ClusterView, GivenUpMessage, PendingMessage, StoreView, StoryEvent, View
from librmq.diagnosis.deadletters import given_up
from librmq.diagnosis.pending import pending_of, scheduled
from librmq.errors import BrokerError, CorruptionError
from librmq.formatting import number
from librmq.java.lang import java_int
from librmq.message import DEFAULT_LEVELS, MessageQueue, StoredMessage, dead_letter_topic, retry_topic
from librmq.message.delays import delete_key
from librmq.message.properties import PropertyName, cause_of
from librmq.message.topics import SystemTopic, TopicPrefix
from librmq.protocol import QueryMessages, ResponseCode
from librmq.scheduling.waiting import own_time_ms
from librmq.wire.remote import RemoteRoute

QUEUES: Final = 25
"""Queues that are read; of more those with the newest messages."""


def freshest(view: View[Any], runs: dict[Any, range]) -> dict[Any, range]:
    """Return the queues that a page reads: of many, those with the newest messages."""
    if len(runs) <= QUEUES:
        return runs
    return dict(heapq.nlargest(QUEUES, runs.items(), key=lambda run: view.stored_at(run[0], run[1].stop - 1) or 0))


def backwards(view: View[Any], runs: Mapping[Any, range]) -> Iterator[tuple[Any, StoredMessage]]:
    """Yield the messages of some queues, the newest first, each with its queue."""

    def of_queue(queue: Any, ids: range) -> Iterator[tuple[Any, StoredMessage]]:
        for message in queue_backwards(view, queue, ids, len(ids)):
            yield queue, message

    walks = (of_queue(queue, ids) for queue, ids in runs.items())
    return heapq.merge(*walks, key=lambda found: -found[1].store_timestamp_ms)


def newest_letters(view: View[Any], group: str, limit: int) -> list[tuple[StoredMessage, GivenUpMessage]]:
    """Return the newest dead letters of a group, the last one first."""
    times = view.resent_times
    runs = {queue: ids for queue, ids in view.queues(dead_letter_topic(group)).items() if ids}
    newest = islice(backwards(view, freshest(view, runs)), limit)
    return [(message, given_up(group, message, times)) for _, message in newest]


def queue_backwards(view: View[Any], queue: Any, ids: range, limit: int) -> Iterator[StoredMessage]:
    """Yield the messages of a queue, the newest first, about ``limit`` of them."""
    end = ids.stop
    while end > ids.start and ids.stop - end < limit:
        begin = max(ids.start, end - min(limit, 32))
        yield from reversed(_readable(view, queue, range(begin, end)))
        end = begin


def _readable(view: View[Any], queue: Any, offsets: range) -> list[StoredMessage]:
    """Return the messages of a queue without damaged ones, which the place tells."""
    try:
        return list(view.messages(queue, offsets))
    except CorruptionError as error:
        if not isinstance(view, StoreView):
            raise
        if len(offsets) == 1:
            view.store.log.leave_out(error)
            return []
    return [message for at in offsets for message in _readable(view, queue, range(at, at + 1))]


NOT_IN_STORY: Final = (
    "By requests to the brokers. Checks of a transaction, what POP did, filters, cancellations and traces need the "
    "log: give the console the folder of the store."
)
NOT_WAITING: Final = (
    "By requests to the brokers: what waits in a delay level, by the default delays, and among the newest messages of "
    "the timer. Halves, the relay and POP need the log: give the console the folder of the store, or run librmq "
    "pending on the broker's machine."
)
_Event = Literal["stored", "half", "delayed", "retried", "dead", "passed", "not_passed"]
_BEFORE_DELIVERY: Final = (SystemTopic.SCHEDULE, SystemTopic.TIMER, SystemTopic.HALF)
_MOST_RECORDS: Final = 64
LETTERS: Final = 500
"""Dead letters of a group that a page looks at."""


def story_by_requests(route: AdministeredRoute, message: StoredMessage) -> list[StoryEvent]:
    """Return the records of a message in order of their times, then its end in each group of its topic."""
    sent_to = message.properties.get(PropertyName.RETRY_TOPIC) or message.topic
    if sent_to in _BEFORE_DELIVERY:
        sent_to = message.properties.get(PropertyName.REAL_TOPIC, sent_to)
    groups = route.groups_of(sent_to)
    topics = {sent_to: "", **dict.fromkeys(_BEFORE_DELIVERY, "")}
    topics |= {name: group for group in groups for name in (retry_topic(group), dead_letter_topic(group))}
    records = [
        (broker, record, group) for topic, group in topics.items() for broker, record in _records(route, topic, message)
    ]
    records.sort(key=lambda entry: (entry[1].store_timestamp_ms, entry[1].physical_offset))
    events = [_event(record, _kind(record), group, record.store_timestamp_ms) for _, record, group in records]
    dead = {group for _, record, group in records if record.topic.startswith(TopicPrefix.DEAD_LETTER)}
    for group in groups:
        progress = route.progress(group)
        for broker, record, _ in records:
            at = progress.get(MessageQueue(record.topic, broker, record.queue_id))
            if at is not None:
                end: _Event = "passed" if at.queue_offset > record.queue_offset else "not_passed"
                note = f"its progress is {number(at.queue_offset)}"
                events.append(_event(record, "dead" if group in dead else end, group, None, note))
    return events


def _records(route: AdministeredRoute, topic: str, message: StoredMessage) -> Iterator[tuple[str, StoredMessage]]:
    """Yield the records of a message in a topic, each with its broker."""
    key = message.unique_key
    for broker in route.broker_names() if key else ():
        try:
            answer = route.endpoint(broker).call(QueryMessages(topic, key or "", _MOST_RECORDS, is_unique=True))
        except BrokerError as error:
            if error.code != ResponseCode.TOPIC_NOT_EXIST:
                raise
            continue
        yield from ((broker, record) for record in answer if record.unique_key == key)


def _kind(record: StoredMessage) -> _Event:
    kinds: dict[str, _Event] = {
        SystemTopic.SCHEDULE: "delayed", SystemTopic.TIMER: "delayed", SystemTopic.HALF: "half",
    }  # fmt: skip
    if record.topic.startswith(TopicPrefix.RETRY):
        return "retried"
    return "dead" if record.topic.startswith(TopicPrefix.DEAD_LETTER) else kinds.get(record.topic, "stored")


def _event(record: StoredMessage, kind: _Event, group: str, at_ms: int | None, note: str | None = None) -> StoryEvent:
    if note is None and at_ms is not None:
        notes = {
            "dead": lambda: cause_of(record.properties, record.reconsume_times),
            "retried": lambda: f"attempt {record.reconsume_times + 1}",
            "delayed": lambda: f"for topic {record.properties.get(PropertyName.REAL_TOPIC, '')}",
        }
        note = notes[kind]() if kind in notes else ""
    place = record.topic, record.queue_id, record.queue_offset, record.physical_offset
    return StoryEvent(at_ms, kind, *place, group or None, note or "", record.unique_key)


def waiting_by_requests(view: View[Any], now_ms: int, most: int) -> list[tuple[PendingMessage, StoredMessage | None]]:
    """Return what waits of so many of the newest messages of each delay level and of the timer, sorted by time."""
    waiting: list[tuple[PendingMessage, StoredMessage | None]] = []
    for queue, offsets in view.queues(SystemTopic.SCHEDULE).items():
        # The messages of a level become due in the order of its queue, so the last ones are those that wait.
        for message in queue_backwards(view, queue, offsets, most):
            level = java_int(message.properties.get(PropertyName.DELAY, "")) or queue.queue_id + 1
            due_ms = message.store_timestamp_ms + DEFAULT_LEVELS.delay_ms(level)
            if due_ms <= now_ms:
                break
            waiting.append((pending_of("delay", due_ms, message), message))
    for queue, offsets in view.queues(SystemTopic.TIMER).items():
        known = set[
            str | None
        ]()  # those that a later record has cancelled, or stored again for the next part of its time
        for message in queue_backwards(view, queue, offsets, most):
            cancelled = message.properties.get(PropertyName.TIMER_DELETE_KEY)
            key, target = message.unique_key, message.properties.get(PropertyName.REAL_TOPIC, "")
            due_ms = own_time_ms(message) or 0
            is_last = key is None or known.isdisjoint((key, delete_key(target, key)))
            if cancelled is None and is_last and due_ms > now_ms and not target.startswith(TopicPrefix.REVIVE):
                waiting.append((pending_of("timer", due_ms, message), message))
            known.add(cancelled or key)
    if isinstance(view, ClusterView) and "schedule" not in kinds_not_asked(view):
        waiting += ((pending, None) for pending in scheduled(view.route.schedules()))
    return sorted(waiting, key=lambda waits: waits[0].due_ms or 0)


def kinds_not_asked(view: View[Any]) -> tuple[str, ...]:
    """Return the kinds of waiting messages for which no request asks; RocketMQ's protocol has no schedules."""
    is_remote = not isinstance(view, ClusterView) or isinstance(view.route, RemoteRoute)
    return ("half", "given_up", "pop", *(("schedule",) if is_remote else ()))
