"""The life of a message: each of its records in log order, then its end in each group.

::

    record in                        event
    a topic of producers             stored; committed with the flag of a transaction; delivered after a delay
    RMQ_SYS_TRANS_HALF_TOPIC         half; checked for a copy by a check
    RMQ_SYS_TRANS_OP_HALF_TOPIC      rolled_back, if there is no final message for the half
    TRANS_CHECK_MAX_TIME_TOPIC       given_up
    SCHEDULE_TOPIC_XXXX, the wheel   delayed; cancelled, by librmq/cancelled.json or by a deleting message of 5.x
    %RETRY%group                     retried
    %DLQ%group                       dead
    rmq_sys_REVIVE_LOG_cluster       delivered, if a group of 5.x received it by POP or changed its invisible time
    a topic of traces                sent, received, consumed, failed, ended, recalled: as the client recorded it, with
                                     the client's time and its instance

    end in a group    known by
    dead              a later record in the group's topic of dead letters
    not_passed        POP holds it; otherwise progress at or before the record, or none in its queue
    filtered          the group's filter in consumerFilter.json; for a running broker also its tags
    skipped           a note of `librmq.diagnosis.skip`
    passed            an acknowledgement of POP; otherwise progress behind the record, and none of the above; a folder
                      does not know filters by tags
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Collection, Iterator, Sequence
from typing import Final, Literal, NamedTuple

from librmq.clock import LAST_MS
from librmq.consumequeue import offset_at_place
from librmq.diagnosis._pop import PopAcknowledgement, PopCheckPoint, PopEvent, ReceiveName, pop_events, pop_holds
from librmq.diagnosis.deadletters import given_up
from librmq.diagnosis.pending import check_times
from librmq.diagnosis.view import Source, StoreView, viewed
from librmq.filter import TagFilter
from librmq.formatting import duration, moment
from librmq.message import StoredMessage, record, retry_topic
from librmq.message.delays import level_of_queue_id
from librmq.message.properties import PropertyName
from librmq.message.topics import (
    WAITING_TOPICS,
    SystemTopic,
    TopicPrefix,
    group_of_retries,
    is_user_topic,
    receive_retry_topic,
)
from librmq.message.traces import TraceReader, has_traces
from librmq.runtime.event_log import counted
from librmq.scheduling.half_messages import QUEUE, halves_of
from librmq.scheduling.schedules import ScheduleRule
from librmq.scheduling.waiting import Cancellation, Cancellations, destination_of
from librmq.store import MessageStore

EventKind = Literal[
    "stored", "half", "committed", "rolled_back", "checked", "given_up", "delayed", "delivered", "retried", "dead",
    "cancelled", "filtered", "skipped", "passed", "not_passed", "sent", "received", "consumed", "failed", "ended",
    "recalled",
]  # fmt: skip

_MOST: Final = 1 << 20


class StoryEvent(NamedTuple):
    """An event in the life of a message."""

    at_ms: int | None
    """Store time of the record, or of an acknowledgement; a client's time of what it has recorded; None for a group's
    progress, whose time is unknown."""
    event: EventKind
    """What happened."""
    topic: str
    """The topic of the record."""
    queue_id: int
    """Number of the record's queue."""
    queue_offset: int
    """Place of the record in its queue."""
    physical_offset: int
    """Place of the record in the log."""
    group: str | None
    """The consumer group of a retry, a dead letter or a progress; the producer group of a half."""
    note: str = ""
    """Details for people."""
    unique_key: str | None = None
    """The message, if several share a key."""


def story(source: Source, name: str, *, topic: str | None = None) -> list[StoryEvent]:
    """Return the events of the message with a unique id, an offset id or a key, in log order.

    The end of each record in each group with progress in its topic comes last: ``dead``, ``filtered``, ``skipped``,
    ``passed`` or ``not_passed``. If only traces have the id or key, they are the events. The result is empty if no
    record has it.

    Args:
        source: A running broker, the folder of a store, or a view of either.
        name: A unique id; else an offset id; else a key.
        topic: The topic of a key; None searches all.

    Raises:
        NotAStoreError: The folder holds no store.
        CorruptionError: A file is damaged.
        ConfigError: ``consumerFilter.json`` is malformed.
    """
    with viewed(source) as view:
        view.store.refresh()
        records = [message for message in _records(view, name, topic) if not has_traces(message)]
        received = pop_events(view, [message for message in records if _is_consumed(message)])
        events = [*_log_events(view, records), *_receives(received), *_traced(view, records, name, topic)]
        events.sort(key=lambda event: event.physical_offset)
        return events + list(_group_events(view, records, received))


def _records(view: StoreView, name: str, topic: str | None) -> list[StoredMessage]:
    """Return every record of the messages that ``name`` identifies, in log order."""
    store = view.store
    records = {message.physical_offset: message for message in store.find_by_id(name)}
    if not records:
        for topic_name in [topic] if topic is not None else list(view.topics):
            records |= {
                message.physical_offset: message for message in store.find_by_key(topic_name, name, max_messages=_MOST)
            }
    for message in list(records.values()):
        key = message.unique_key
        origin = message.properties.get(PropertyName.ORIGIN_MESSAGE_ID)
        if key is not None:
            if key != name:
                records |= {other.physical_offset: other for other in store.find_by_id(key)}
        else:  # only the first record's id connects the records
            first = origin or message.offset_id
            records |= {
                other.physical_offset: other
                for other in store.log.search(first.encode())
                if other.properties.get(PropertyName.ORIGIN_MESSAGE_ID) == first
            }
            records |= {other.physical_offset: other for other in store.find_by_id(first)}
    return [records[place] for place in sorted(records)]


def _is_consumed(message: StoredMessage) -> bool:
    topic = message.topic
    return (is_user_topic(topic) and topic != SystemTopic.HOP) or topic.startswith(TopicPrefix.RETRY)


def _log_events(view: StoreView, records: Sequence[StoredMessage]) -> Iterator[StoryEvent]:
    waiting: dict[str | None, list[str]] = {}  # targets of undelivered delays, by unique id
    seen: set[tuple[str, str]] = set()
    for message in records:
        topic, key = message.topic, message.unique_key
        if topic in WAITING_TOPICS:
            real = destination_of(message).topic
            if _is_commit(message):
                yield _event(message, "committed", None, f"for topic {real}, with a delay")
            if (
                PropertyName.TIMER_DELETE_KEY in message.properties
                and PropertyName.TIMER_ROLL_TIMES not in message.properties
            ):
                yield _event(message, "cancelled", *_delayed(message, real))
                continue
            waiting.setdefault(key, []).append(real)
            yield _event(message, "delayed", *_delayed(message, real))
            continue
        description = _broker_event(view, message)
        if description is None:
            is_delivery = topic in waiting.get(key, ())
            again = key is not None and (key, topic) in seen
            notes = ["a duplicate: this id was stored in this topic before"] if again else []
            if (schedule := message.properties.get(ScheduleRule.NAME_PROPERTY)) is not None:
                notes.append(f"by schedule {schedule}")
            note = "; ".join([*notes, *_traces_of(message)])
            event: EventKind = "delivered" if is_delivery else "committed" if _is_commit(message) else "stored"
            description = event, None, note
            seen.add((key or "", topic))
        if topic in waiting.get(key, ()):
            waiting[key].remove(topic)
        yield _event(message, *description)
    yield from _cancelled(view.store, records)
    yield from _rollbacks(view.store, records)


def _cancelled(store: MessageStore, records: Sequence[StoredMessage]) -> Iterator[StoryEvent]:
    """Yield the cancellations of records that wait, unless the log has them too."""
    cancellations = Cancellations(store.path, store.files)
    deleted = {message.unique_key for message in records if PropertyName.TIMER_DELETE_KEY in message.properties}
    last: dict[Cancellation, StoredMessage] = {}
    for message in records:
        cancelled = cancellations.of_message(message, store.past_ms) if message.topic in WAITING_TOPICS else None
        if cancelled is not None and message.unique_key not in deleted:
            last[cancelled] = message
    for cancelled, message in last.items():
        note = f"not delivered to topic {cancelled.topic}"
        yield _event(message, "cancelled", None, note)._replace(at_ms=cancelled.at_ms)


def _traces_of(message: StoredMessage) -> Iterator[str]:
    """Return the traces of OpenTelemetry (W3C) and SkyWalking to which the sender of a message belongs."""
    parts = message.properties.get("traceparent", "").split("-")
    if len(parts) >= 4 and len(parts[1]) == 32:
        yield f"trace {parts[1]}"
    # 1 or 0 for sampled, then in Base64 the trace's id, its segment, and what else SkyWalking says of the sender.
    segments = message.properties.get("sw8", "").split("-")
    if len(segments) == 8:
        try:
            yield f"SkyWalking trace {b64decode(segments[1], validate=True).decode()}"
        except ValueError:
            yield f"SkyWalking sw8 {message.properties['sw8']}"


def _broker_event(view: StoreView, message: StoredMessage) -> tuple[EventKind, str | None, str] | None:
    """Return event, group and note of a record in a topic that the broker writes; None for one of producers."""
    properties, topic = message.properties, message.topic
    if topic == SystemTopic.HALF:
        group, real = properties.get(PropertyName.PRODUCER_GROUP), properties.get(PropertyName.REAL_TOPIC)
        if PropertyName.TRANSACTION_PREPARED_QUEUE_OFFSET in properties or check_times(message):
            return "checked", group, f"check {check_times(message)} put it back"
        return "half", group, f"for topic {real}"
    if topic == SystemTopic.CHECK_MAX_TIME:
        return (
            "given_up",
            properties.get(PropertyName.PRODUCER_GROUP),
            f"after {counted(check_times(message), 'check')}",
        )
    if topic.startswith(TopicPrefix.DEAD_LETTER):
        attempts = f"after {counted(message.reconsume_times, 'attempt')}"
        cause = properties.get(PropertyName.DEAD_LETTER_CAUSE) or attempts
        return "dead", topic.removeprefix(TopicPrefix.DEAD_LETTER), cause
    if topic.startswith(TopicPrefix.RETRY):
        group = group_of_retries(topic, view.groups, view.topics)
        return "retried", group, f"attempt {message.reconsume_times + 1}"
    return None


def _delayed(message: StoredMessage, real: str) -> tuple[str | None, str]:
    """Return group and note of a record that waits for its time."""
    group = next(
        (
            real.removeprefix(prefix)
            for prefix in (TopicPrefix.RETRY, TopicPrefix.DEAD_LETTER)
            if real.startswith(prefix)
        ),
        None,
    )
    if PropertyName.TIMER_DELETE_KEY in message.properties:
        return group, "cancels a timer"
    level = f", level {level_of_queue_id(message.queue_id)}" if message.topic == SystemTopic.SCHEDULE else ""
    return group, f"for topic {real}{level}"


def _identity(message: StoredMessage) -> str:
    """Return the id that the records of one message share."""
    origin = message.properties.get(PropertyName.ORIGIN_MESSAGE_ID)
    return message.unique_key or origin or message.offset_id


def _is_commit(message: StoredMessage) -> bool:
    return message.sys_flag & record.TRANSACTION_MASK == record.TRANSACTION_COMMIT


def _rollbacks(store: MessageStore, records: Sequence[StoredMessage]) -> list[StoryEvent]:
    """Return the op messages of halves without a final message, the first for each transaction."""
    committed = {message.unique_key for message in records if _is_commit(message)}
    committed_halves = {message.prepared_transaction_offset for message in records if _is_commit(message)}
    halves = {
        message.queue_offset: message
        for message in records
        if message.topic == SystemTopic.HALF
        and message.physical_offset not in committed_halves
        and (message.unique_key is None or message.unique_key not in committed)
    }
    if not halves:
        return []
    events: dict[str | None, StoryEvent] = {}
    queue = store.queues.get((SystemTopic.OP, QUEUE))
    begin = min(message.physical_offset for message in halves.values())
    for op in () if queue is None else store.messages(SystemTopic.OP, QUEUE, offset_at_place(queue, begin)):
        for queue_offset in sorted(halves_of(op) & halves.keys()):
            half = halves[queue_offset]
            if half.unique_key not in events and op.physical_offset > half.physical_offset:
                group = half.properties.get(PropertyName.PRODUCER_GROUP)
                note = f"the half at queue offset {half.queue_offset}"
                events[half.unique_key] = _event(op, "rolled_back", group, note)._replace(unique_key=half.unique_key)
    return list(events.values())


def _traced(view: StoreView, records: Sequence[StoredMessage], name: str, topic: str | None) -> Iterator[StoryEvent]:
    """Yield what clients have recorded about the messages of these records.

    The store of the traces need not be that of the messages: without a record, ``name`` and ``topic`` name them.
    """
    names = {name for message in records for name in (message.unique_key, message.offset_id) if name is not None}
    if not (topics := view.trace_topics):
        return
    if not records:
        traces = TraceReader().traces(_by_keys(view, topics, [name]).values())
        is_named = (trace for trace in traces if name == trace.id or name in (trace.keys or "").split())
        names = {trace.id for trace in is_named if topic is None or trace.topic in (None, topic)}
    stored = _by_keys(view, topics, names)
    for trace in TraceReader().traces(stored[place] for place in sorted(stored)):
        if trace.id not in names:
            continue
        event: EventKind = "failed" if trace.succeeded is False else trace.trace
        parts = [f"by {trace.instance}"]
        if event == "failed":
            parts.append(
                {"sent": "the send failed", "recalled": "the recall failed"}.get(trace.trace, "in the listener")
            )
        parts += [part for part in (trace.result,) if part is not None]
        if trace.took_s is not None:
            parts.append(f"after {duration(trace.took_s)}")
        if trace.retries:
            parts.append(f"attempt {trace.retries + 1}")
        message = stored[trace.physical_offset]
        yield _event(message, event, trace.group, ", ".join(parts))._replace(at_ms=trace.at_ms, unique_key=trace.id)


def _by_keys(view: StoreView, topics: Sequence[str], names: Collection[str]) -> dict[int, StoredMessage]:
    """Return the messages of some topics that have one of these keys, by their places."""
    return {
        message.physical_offset: message
        for name in names
        for topic in topics
        for message in view.store.find_by_key(topic, name, max_messages=_MOST)
    }


def _receives(received: Sequence[PopEvent]) -> Iterator[StoryEvent]:
    """Yield an event for each receive of a message by POP, and for each change of its invisible time."""
    ends_ms: dict[tuple[str, int], int] = {}
    for message, stored, content in received:
        if isinstance(content, PopCheckPoint) and not content.is_put_again:
            group, received_ms = content.name[0], content.name[-1]
            end_ms = ends_ms.get((group, message.physical_offset))
            ends_ms[group, message.physical_offset] = content.visible_ms
            what = "received by POP" if end_ms is None or end_ms <= received_ms else "its invisible time was changed"
            place = f"queue offset {message.queue_offset} of topic {message.topic}"
            note = f"{what}, {place}; invisible until {moment(content.visible_ms)}"
            yield _event(stored, "delivered", group, note)._replace(unique_key=message.unique_key)


def _group_events(
    view: StoreView, records: Sequence[StoredMessage], received: Sequence[PopEvent]
) -> Iterator[StoryEvent]:
    """Yield, for each record that groups consume, what became of it in each group."""
    consumed = [message for message in records if _is_consumed(message)]
    topics = {message.topic for message in consumed}
    progress_by_name = view._progress_in(topics)
    names = {(event.content.name[0], event.message.topic) for event in received} | progress_by_name.keys()
    groups = sorted(name for name in names if name[1] in topics)
    if groups:
        outcomes = _Outcomes(view, records, received)
        for message in consumed:
            for group, topic in groups:
                if topic == message.topic:
                    progress = progress_by_name.get((group, topic), {}).get(message.queue_id)
                    event, note, at_ms = outcomes.outcome_of(group, message, progress)
                    if event is not None:
                        yield _event(message, event, group, note)._replace(at_ms=at_ms)


def _acknowledgements(received: Sequence[PopEvent]) -> dict[tuple[str, int], int]:
    """Return when groups acknowledged messages, by group and physical offset; earlier receives do not count."""
    last: dict[tuple[str, int], ReceiveName] = {}
    for message, _, content in received:
        key = content.name[0], message.physical_offset
        last[key] = max(last.get(key, content.name), content.name, key=lambda name: name[-1])
    return {
        (content.name[0], message.physical_offset): stored.store_timestamp_ms
        for message, stored, content in received
        if isinstance(content, PopAcknowledgement) and content.name == last[content.name[0], message.physical_offset]
    }


def _retry_topics(group: str, topic: str) -> tuple[str, ...]:
    """Return the topics in which a group gets a message of a topic again."""
    if topic.startswith(TopicPrefix.RETRY):
        return topic, retry_topic(group)
    return retry_topic(group), receive_retry_topic(group, topic), receive_retry_topic(group, topic, v2=True)


class _Outcomes:
    """What became of records in consumer groups: dead letters, receives, filters, skips and progress."""

    def __init__(self, view: StoreView, records: Sequence[StoredMessage], received: Sequence[PopEvent]) -> None:
        from librmq.diagnosis._skips import skipped  # loads asyncio

        self._view = view
        self._records = records
        self._held = {held[:4]: held for held in pop_holds(view).held}
        self._acknowledged_ms = _acknowledgements(received)
        self._skips = skipped(view)
        # So late a load lets a group that lived at the last save count as alive.
        self._registrations = view.tables.registrations(LAST_MS) if view.broker is None else view.broker.store.filters

    def outcome_of(
        self, group: str, message: StoredMessage, progress: int | None
    ) -> tuple[EventKind | None, str, int | None]:
        """Return the last event of a record in a group, with a note and the time of an acknowledgement.

        The event is None if it is unknown. ``progress`` is that in its queue.
        """
        held = self._held.get((group, message.topic, message.queue_id, message.queue_offset))
        if held is not None:
            due = held.visible_ms <= (self._view.now_ms or 0)
            end = "was to be delivered again at" if due else "invisible until"
            return "not_passed", f"received by POP and not acknowledged; {end} {moment(held.visible_ms)}", None
        acknowledged_ms = self._acknowledged_ms.get((group, message.physical_offset))
        event, note = self._other_outcome(group, message, progress, acknowledged_ms is not None)
        if event == "not_passed" and self._view.store.past_ms is not None:
            return None, note, None  # the group's progress at that time is unknown
        return event, note, acknowledged_ms if event == "passed" else None

    def _other_outcome(
        self, group: str, message: StoredMessage, progress: int | None, is_acknowledged: bool
    ) -> tuple[EventKind, str]:
        letter = self._later_copy(message, TopicPrefix.DEAD_LETTER + group)
        if letter is not None:
            return "dead", f"its dead letter is at {letter.physical_offset}"
        if is_acknowledged:
            return "passed", "received by POP and acknowledged"
        filtered = self._rejection(group, message)
        if progress is None or progress <= message.queue_offset:
            place = "the group has no progress in this queue" if progress is None else f"its progress is {progress}"
            return "not_passed", f"{place}; {filtered}" if filtered else place
        if filtered:
            return "filtered", filtered
        if self._later_copy(message, *_retry_topics(group, message.topic)) is not None:
            return "passed", f"it failed, and came again as a retry; its progress is {progress}"
        for skip in self._skips:
            if (skip.group, skip.topic) == (group, message.topic) and any(
                queue.queue_id == message.queue_id and queue.begin <= message.queue_offset < queue.end
                for queue in skip.queues
            ):
                copied = "" if skip.aside is None else f", and copied to {skip.aside}"
                return "skipped", f"by the policy: {skip.policy}{copied}"
        return "passed", f"its progress is {progress}"

    def _later_copy(self, message: StoredMessage, *topics: str) -> StoredMessage | None:
        """Return the first later record of this message in a group's topics of retries or dead letters, if any."""
        for copy in self._records:
            real = copy.properties.get(PropertyName.REAL_TOPIC) if copy.topic in WAITING_TOPICS else copy.topic
            if (
                real in topics
                and copy.physical_offset > message.physical_offset
                and _identity(copy) == _identity(message)
            ):
                origin = given_up("", copy).original_topic
                if message.topic.startswith(TopicPrefix.RETRY) or origin in (message.topic, copy.topic):
                    return copy
        return None

    def _rejection(self, group: str, message: StoredMessage) -> str:
        """Return which filter of a group rejects a record; empty if none is known to."""
        broker = self._view.broker
        connections = None if broker is None else broker.connections(group)
        subscription = None if connections is None else connections.subscriptions.get(message.topic)
        if subscription is not None and subscription.is_by_tags:
            tags = TagFilter(subscription.expression)
            return "" if tags.matches(message.tags) else f"the group's tags are {subscription.expression}"
        registration = None if self._registrations is None else self._registrations.get(message.topic, group)
        if registration is None or registration.matches(message.properties):
            return ""
        if registration.dead and registration.dead_timestamp_ms < message.store_timestamp_ms:
            return ""  # the group had ended this subscription, and may have had another one
        return f"the group's registered filter is {registration.expression}"


def _event(message: StoredMessage, event: EventKind, group: str | None, note: str) -> StoryEvent:
    return StoryEvent(
        at_ms=message.store_timestamp_ms, event=event, topic=message.topic, queue_id=message.queue_id,
        queue_offset=message.queue_offset, physical_offset=message.physical_offset, group=group, note=note,
        unique_key=message.unique_key,
    )  # fmt: skip
