"""The verdict on a test: what only its stores tell, and what is wrong in its history that the test did not expect."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from librmq.client.recorder import Event, id_of
from librmq.config import nearest
from librmq.consumer import PushConsumer
from librmq.consumer.base import Consumer
from librmq.errors import ConfigError, FilterSyntaxError
from librmq.filter import SQL92
from librmq.message import MessageQueue, StoredMessage, retry_topic
from librmq.message.topics import SystemTopic, TopicPrefix
from librmq.protocol import PERM_READ, Heartbeat, MessageModel
from librmq.scheduling.waiting import Cancellations
from librmq.testing._kit_runner import KitRunner, ProcessTable
from librmq.testing._process import KitParts
from librmq.testing.histories._history import HistoryLine
from librmq.testing.histories.anomalies import KINDS, Anomaly, check_history
from librmq.testing.histories.events import place_of, span_of

if TYPE_CHECKING:
    from librmq.testing._from_store import StoreStart

_TICK_MS = 1_000
"""What is due is delivered within this time."""
_SHOWN = 5
_WAITING_TOPICS = frozenset((SystemTopic.SCHEDULE, SystemTopic.HALF, SystemTopic.TIMER))


@dataclass(slots=True)
class _Group:
    """What the instances of a group have subscribed to."""

    kind: str
    model: MessageModel
    filters: dict[str, dict[tuple[str, str], None]] = field(default_factory=dict)
    """Types and expressions by topic."""


class Facts:
    """The events of a test that its clients do not see: groups, dead letters, given-up transactions, and rest."""

    def __init__(self, kit: KitParts, runner: KitRunner, table: ProcessTable, start: StoreStart | None) -> None:
        """``start`` is what the kit's store began with."""
        self._network = kit.network
        self._runner = runner
        self._table = table
        self._start = start
        self._history = kit.history()
        self._groups: dict[str, _Group] = {}

    def note_heartbeat(self, request: Heartbeat) -> None:
        """Note the subscriptions of a client."""
        for data in request.consumers:
            group = self._groups.setdefault(data.group, _Group(data.kind, data.model))
            for topic, subscription in data.subscriptions.items():
                if not topic.startswith(TopicPrefix.RETRY):
                    filters = group.filters.setdefault(topic, {})
                    filters[subscription.expression_type, subscription.expression] = None

    def is_broadcasting(self, group: str) -> bool:
        """Return whether each instance of a group gets all messages."""
        described = self._groups.get(group)
        return described is not None and described.model is MessageModel.BROADCASTING

    def events(self, now_ms: int) -> Iterator[Event]:
        """Yield the events, as of now."""
        network = self._network
        events = self._history.events
        letters = list(self._dead_letters())
        yield from (event for event, _ in letters)
        sent_ms = {event["id"]: event["begin_ms"] for event in events if event["event"] == "send"}
        sent = set(sent_ms)
        topics_by_id = {event["id"]: event["topic"] for event in events if event["event"] == "deliver"}
        topics_by_id.update((event["id"], topic) for event, topic in letters)
        start, begin_ms = self._start, self._history.begin_ms
        for name, topic in topics_by_id.items():  # in the store before, or sent to the broker without the kit's route
            copies = 0 if start is None else start.copies(name)
            for _ in range(copies or name not in sent):
                yield {
                    "event": "send",
                    "process": "outside",
                    "id": name,
                    "topic": topic,
                    "begin_ms": begin_ms,
                    "end_ms": begin_ms,
                    "outcome": "unknown",
                }
        if start is not None:
            yield from _earlier_attempts(events, sent)
        for name in network.by_name:
            store = network.store(name)
            for cancelled in Cancellations(store.path, store.files).rows():  # also those that the test itself cancelled
                if cancelled.at_ms >= sent_ms.get(cancelled.message_id, cancelled.at_ms):
                    self._history.cancels(cancelled.message_id, is_sure=True)
            if (SystemTopic.CHECK_MAX_TIME, 0) in store.queues:
                from librmq.diagnosis.pending import given_up_halves  # few tests need what it loads

                for half in given_up_halves(store):
                    yield {"event": "discard", "id": id_of(half), "at_ms": half.store_timestamp_ms}
        rules = {name: self._rules(name, described) for name, described in self._groups.items()}
        yield from rules.values()
        for name, described in self._groups.items():
            if self._is_drained(name, described):
                yield {"event": "drained", "group": name, "at_ms": now_ms}

    def _dead_letters(self) -> Iterator[tuple[Event, str]]:
        """Yield an event for each dead letter, and the topic of its first send."""
        network = self._network
        for name in network.by_name:
            for topic in sorted({topic for topic, _ in network.store(name).queues}):
                if topic.startswith(TopicPrefix.DEAD_LETTER):
                    group = topic.removeprefix(TopicPrefix.DEAD_LETTER)
                    for letter in network.messages(name, topic):
                        origin = letter.properties.get("RETRY_TOPIC") or topic
                        at_ms = letter.store_timestamp_ms
                        yield {"event": "dead_letter", "group": group, "id": id_of(letter), "at_ms": at_ms}, origin

    # ---- groups

    def _consumers(self, group: str) -> list[Consumer[Any]]:
        return [consumer for process in self._table.processes for consumer in process.made if consumer.group == group]

    def _rules(self, name: str, group: _Group) -> Event:
        event: Event = {"event": "group", "group": name, "topics": list(group.filters)}
        consumers = [consumer for consumer in self._consumers(name) if isinstance(consumer, PushConsumer)]
        if consumers and all(consumer.config.orderly and consumer.config.batch_size == 1 for consumer in consumers):
            event["ordered"] = True
        if group.model is MessageModel.BROADCASTING:
            event["broadcast"] = True
        if any(filters.keys() != {("TAG", "*")} for filters in group.filters.values()):
            event["selects"] = sorted(
                {
                    id_of(message)
                    for topic, filters in group.filters.items()
                    for broker_name in self._network.by_name
                    for message in _selected(self._network.messages(broker_name, topic), filters)
                }
            )
        return event

    def _is_drained(self, name: str, group: _Group) -> bool:
        """Return whether nothing waits for a group: all is consumed, and nothing comes later."""
        network = self._network
        consumers = [consumer for consumer in self._consumers(name) if consumer.is_running and not consumer.client.dead]
        if group.kind != "push" or not consumers or self._runner.running or network.cuts:
            return False
        if any(broker.dead for broker in network.by_name.values()) or any(
            not isinstance(consumer, PushConsumer) or consumer.is_paused for consumer in consumers
        ):
            return False
        topics = list(group.filters)
        if any(consumer.subscriptions.keys() - {retry_topic(name)} != set(topics) for consumer in consumers):
            return False
        if group.model is MessageModel.CLUSTERING:
            topics.append(retry_topic(name))
        return all(
            self._is_read(consumers, MessageQueue(topic, data.broker_name, queue_id))
            for topic in topics
            for data in network.table.topic_route(topic)
            if data.permission & PERM_READ
            for queue_id in range(data.read_queues)
        ) and not self._has_pending(topics)

    def _is_read(self, consumers: Sequence[Consumer[Any]], queue: MessageQueue) -> bool:
        begin, end = self._network.named(queue.broker_name).store.queue_range(queue.topic, queue.queue_id)
        readers = [assigned for consumer in consumers if (assigned := consumer.assigned.get(queue)) is not None]
        is_read = all(
            assigned.next_offset >= end and not len(assigned.messages) and not assigned.released for assigned in readers
        )
        return begin == 0 and bool(readers) and is_read

    def _has_pending(self, topics: Collection[str]) -> bool:
        now_ms = self._runner.now_ms()
        for broker in self._network.by_name.values():
            names = {topic for topic, _ in broker.store.queues}
            if SystemTopic.HOP in names:
                return True
            if names.isdisjoint(_WAITING_TOPICS):
                continue
            from librmq.diagnosis import pending_messages  # few tests need what it loads

            for message in pending_messages(broker.store, broker.tables):
                if message.kind == "given_up" or {message.topic, message.target_topic}.isdisjoint(topics):
                    continue
                # The table of what was delivered is some seconds old.
                if message.kind == "half" or message.due_ms is None or message.due_ms + _TICK_MS > now_ms:
                    return True
        return False


def _earlier_attempts(events: Sequence[Event], sent: Collection[str]) -> Iterator[Event]:
    """Yield the failed deliveries before the test, to which later attempts lead, of messages that it has not sent."""
    attempts: set[tuple[str, str, int]] = set()
    number = 0
    for event in events:
        if event["event"] != "deliver" or event["id"] in sent:
            continue
        before_ms = event["begin_ms"] - 1
        for attempt in range(event["attempt"]):
            if (event["group"], event["id"], attempt) not in attempts:
                attempts.add((event["group"], event["id"], attempt))
                yield {
                    **event, "process": "outside", "broker": "before the test", "queue_offset": number,
                    "attempt": attempt, "begin_ms": before_ms, "end_ms": before_ms, "outcome": "retry",
                }  # fmt: skip
                number += 1
        attempts.add((event["group"], event["id"], event["attempt"]))


def _selected(messages: Sequence[StoredMessage], filters: Collection[tuple[str, str]]) -> Iterator[StoredMessage]:
    """Yield the messages that all filters let through."""
    try:
        tests = [_test_of(kind, expression) for kind, expression in filters]
    except FilterSyntaxError:  # an official client's, which gets nothing
        return
    for message in messages:
        if all(matches(message) for matches in tests):
            yield message


def _test_of(kind: str, expression: str) -> Callable[[StoredMessage], bool]:
    if kind == SQL92:
        from librmq.filter import SqlFilter  # few tests need what it loads

        sql = SqlFilter(expression)
        return lambda message: sql.matches(message.properties)
    if expression in ("", "*"):
        return lambda message: True
    # Split by hand, because `TagFilter` is under test too.
    tags = {tag.strip() for tag in expression.split("||")} - {""}
    return lambda message: message.tags in tags


# ---- the verdict


class HistoryAnomalyError(AssertionError):
    """The history of a test breaks a promise of RocketMQ, or keeps one that the test expects to be broken."""


def check_kinds(kinds: Collection[str]) -> None:
    """Refuse names that are not kinds of anomalies."""
    if unknown := sorted(set(kinds) - set(KINDS)):
        near = nearest(unknown[0], KINDS)
        hint = f"; did you mean {near!r}?" if near else f": expected one of {', '.join(KINDS)}"
        raise ConfigError(f"no anomaly is called {unknown[0]!r}{hint}")


def history_problem(events: Sequence[Event], expected: Collection[str], begin_ms: int, fixture: str) -> str:
    """Return what is wrong with a history, with the events that show it; empty if all is as expected."""
    found = check_history(events)
    missing = sorted(set(expected) - {anomaly.anomaly for anomaly in found})
    if missing:
        return (
            f"the test expects the anomaly {missing[0]!r}, and its history has none: remove it from {fixture}.expect, "
            "or let the test cause it"
        )
    surprises = [
        anomaly
        for anomaly in found
        if anomaly.anomaly not in expected
        and not _is_of_a_moment(anomaly, events)
        and not (anomaly.anomaly == "repeat" and _has_rested(anomaly, events))
    ]
    if not surprises:
        return ""
    count = "1 anomaly" if len(surprises) == 1 else f"{len(surprises):,} anomalies"
    lines = [f"the history of the test has {count} that no fault explains:"]
    for anomaly in surprises[:_SHOWN]:
        lines.append(f"{anomaly.anomaly}: {anomaly.what}")
        lines += [f"  {sentence(events[number - 1], begin_ms)}" for number in anomaly.events]
    if len(surprises) > _SHOWN:
        lines.append(f"… {len(surprises) - _SHOWN:,} more")
    lines.append(f"a test about such an anomaly declares it: {fixture}.expect({surprises[0].anomaly!r})")
    return "\n".join(lines)


def _is_of_a_moment(anomaly: Anomaly, events: Sequence[Event]) -> bool:
    """Return whether attempts skip one only because they come at one millisecond, where the offset orders them.

    A test can receive a message, make it visible, and receive it from the retry topic, where its offset may be lower.
    """
    if anomaly.anomaly != "attempts":
        return False
    attempts = [
        (event["begin_ms"], event.get("end_ms", math.inf), event["attempt"])
        for event in events
        if event["event"] == "deliver" and (event["id"], event["group"]) == (anomaly.id, anomaly.group)
    ]
    highest = -1
    for *_, attempt in sorted(attempts):
        if attempt > highest + 1:
            return False
        highest = max(highest, attempt)
    return True


def _has_rested(anomaly: Anomaly, events: Sequence[Event]) -> bool:
    """Return whether a message came again to its listener after a rest, which the rules take for a resend.

    A rest (`DownstreamDown`) counts as no attempt, so the same place gives the same attempt again.
    """
    rested: set[tuple[object, ...]] = set()
    deliveries = [event for event in events if event["event"] == "deliver"]
    for event in sorted(deliveries, key=lambda event: event["begin_ms"]):
        if (event["id"], event["group"]) == (anomaly.id, anomaly.group):
            place = (place_of(event), event["attempt"])
            if place in rested:
                return True
            if event.get("outcome") == "retry":
                rested.add(place)
    return False


def sentence(event: Event, begin_ms: int) -> str:
    """Return one event as a line with its time since ``begin_ms``."""
    kind: str = event["event"]
    at_ms, end_ms = (begin_ms, None) if kind == "group" else span_of(event)
    actor: str = event["process"] if "process" in event else event.get("broker", "")
    if "group" in event and "process" in event:
        actor = f"{event['group']}@{actor}"
    elif kind in ("commit", "dead_letter", "reset", "group", "drained"):
        actor = event["group"]
    texts: dict[str, Callable[[], str]] = {
        "send": lambda: f"sends {event['id']} to {place_of(event)}: {event['outcome']}",
        "end_transaction": lambda: f"ends the transaction of {event['id']}: {event['decision']}, {event['outcome']}",
        "discard": lambda: f"the broker gives the half message {event['id']} up",
        "deliver": lambda: (
            f"gets {event['id']} from {place_of(event)}, attempt {event['attempt']}: {event.get('outcome', 'running')}"
        ),
        "assign": lambda: f"takes {place_of(event)}",
        "revoke": lambda: f"releases {place_of(event)}",
        "commit": lambda: f"saves progress {place_of(event)}",
        "dead_letter": lambda: f"{event['id']} is a dead letter",
        "reset": lambda: f"its progress in {event['topic']} is moved",
        "crash": lambda: "dies",
        "effect": lambda: f"does {event['name']} for {event['key']}",
        "group": lambda: f"consumes {', '.join(event['topics'])}",
        "drained": lambda: "nothing waits for it any more",
    }
    until = "" if end_ms in (None, at_ms) else f", until {(end_ms - begin_ms) / 1000:,.3f} s"
    return str(HistoryLine(at_ms - begin_ms, actor, texts[kind]() + until))
