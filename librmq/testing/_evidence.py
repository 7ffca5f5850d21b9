"""Deliveries, progress and dead letters for a test, what it left unchecked, and what is wrong in its history.

`Evidence` knows what processes have reported and what only the stores tell; `history_problem` says what is wrong in the
history that the test did not expect.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from librmq.broker import Broker
from librmq.client.recorder import Event, id_of
from librmq.config import nearest
from librmq.consumer import PushConsumer
from librmq.consumer.base import Consumer
from librmq.errors import ConfigError, FilterSyntaxError, RmqError
from librmq.filter import SQL92
from librmq.message import MessageQueue, StoredMessage, dead_letter_topic, retry_topic
from librmq.message.topics import SystemTopic, TopicPrefix, is_user_topic
from librmq.protocol import (
    PERM_READ,
    ConsumerData,
    Heartbeat,
    MessageModel,
    PullMessage,
    Receive,
    Received,
    SendResponse,
)
from librmq.runtime.event_log import counted
from librmq.scheduling.waiting import Cancellations
from librmq.testing._faults import Faults
from librmq.testing._kit_runner import KitRunner, ProcessTable, current_work
from librmq.testing._process import KitParts, Process, ProcessStateError
from librmq.testing.histories._history import Call, show
from librmq.testing.histories.anomalies import KINDS, Anomaly, check_history
from librmq.testing.histories.events import place_of, sentence

if TYPE_CHECKING:
    from librmq.filter import PredicateCounts
    from librmq.testing._from_store import StoreStart

# ---- undelivered messages and unmatched subscriptions

_MOST_TAGS = 5
_TICK_MS = 1_000
"""What is due is delivered within this time."""
_SHOWN = 5
_ALIKE = 0.75
"""Likeness of names, such as of topics, from which one may stand for the other."""
_WAITING_TOPICS = frozenset((SystemTopic.SCHEDULE, SystemTopic.HALF, SystemTopic.TIMER))


class UndeliveredWarning(UserWarning):
    """A test ended with messages that no listener got, a subscription that matched nothing, or an unused fault."""


@dataclass(slots=True)
class Subscribed:
    """One topic of one group, as its consumers subscribed."""

    group: str
    topic: str
    is_declared: bool
    """Whether the test made the consumer itself; an application may subscribe to more than a test sends."""
    was_read: bool = False
    """Whether a listener of the group got a message of the topic, or the application pulls itself."""
    filters: dict[tuple[str, str], None] = field(default_factory=dict)
    """Types and expressions of the subscriptions of its instances."""


def _are(number: int, noun: str = "message") -> str:
    return f"{counted(number, noun)} {'is' if number == 1 else 'are'}"


class UnknownGroupError(LookupError):
    """The test asks about a group that none of its consumers has."""


@dataclass(eq=False, repr=False)
class Evidence:
    """Takes the reports of a kit's processes, and answers the test from the broker and the history. Not thread-safe.

    It records which topics were subscribed to, sent to and asked about.
    """

    kit: KitParts
    runner: KitRunner
    table: ProcessTable
    faults: Faults
    start: StoreStart | None
    """What the kit's store began with."""
    start_consumers: Callable[[], None]
    """Starts the consumers that the test has declared, before the test sends."""

    def __post_init__(self) -> None:
        self._network = self.kit.network
        self._history = self.kit.history()
        self._history.about = self.about
        self._subscribed: dict[tuple[str, str], Subscribed] = {}
        self._first_data: dict[str, ConsumerData] = {}  # what the first heartbeat said of each group
        self.sent_to: set[str] = set()
        """The topics to which the test itself sends."""
        self.read_topics: set[str] = set()
        """The topics whose messages the test has read."""
        self._checked_groups: set[str] = set()  # groups whose deliveries the test has asked for
        self.fixture: str = "rmq"
        """The name of the fixture that the test uses, for advice."""
        self.pulled_by: dict[tuple[str, str, str, int], str] = {}
        """Which process pulls a queue of a group."""
        self.declared: set[str] = set()
        """The names of processes whose consumers the test has made itself."""

    # ---- reports of processes

    def noted_pull(self, process: Process, request: PullMessage, broker_name: str) -> None:
        """Note a pull; the history gets a line when a process takes over a queue."""
        data = self._first_data.get(request.group)
        if data is not None and data.model is MessageModel.BROADCASTING:  # each of its instances reads all queues
            return
        place = request.group, request.topic, broker_name, request.queue_id
        if self.pulled_by.get(place) != process.label:
            before = self.pulled_by.get(place)
            self.pulled_by[place] = process.label
            if before is not None:
                queue = MessageQueue(request.topic, broker_name, request.queue_id)
                self.kit.recorder.assigned("assign", process.label, request.group, queue)  # two read it after a fault
                where = self._history.place(request.topic, broker_name, request.queue_id)
                self.kit.note(f"{request.group}@{process.label}", f"takes over {where} at {request.queue_offset}")

    def noted_receive(self, process: Process, request: Receive, broker_name: str, messages: Sequence[Received]) -> None:
        """Note what a simple consumer received."""
        for received in messages:
            self.note_received(request.group, request.topic)
            message = received.message
            where = self._history.place(message.topic, broker_name, message.queue_id, message.queue_offset)
            retry = f", retry {received.attempt - 1}" if received.attempt > 1 else ""
            self.kit.note(f"{request.group}@{process.label}", f"receives {where} {show(message)}{retry}")

    def noted_heartbeat(self, process: Process, request: Heartbeat) -> None:
        """Note the subscriptions of a process's consumers."""
        for data in request.consumers:
            self._first_data.setdefault(data.group, data)
            for topic, subscription in data.subscriptions.items():
                if (key := (data.group, topic)) not in self._subscribed:
                    is_declared, was_read = process.name in self.declared, data.kind == "pull"
                    self._subscribed[key] = Subscribed(*key, is_declared, was_read)
                self._subscribed[key].filters[subscription.expression_type, subscription.expression] = None

    def before_send(self, process: Process, topic: str, broker_name: str) -> bool:
        """Record a message before it is stored; refuse it if a fault is due, or return whether it comes twice."""
        if current_work.get() is None:
            try:
                self.start_consumers()
            except RmqError as error:  # as it is, the producer would take it for an answer to its send, and try again
                raise ProcessStateError(f"a consumer that the test declared can't start: {error}") from error
        if process.is_test:
            self.sent_to.add(topic)
        return self.faults._before_send(process, topic, broker_name)

    def after_send(self, process: Process, topic: str, broker_name: str, response: SendResponse) -> None:
        """Record a stored message or batch; lose or delay the answer if a fault is due."""
        if current_work.get() is not None or self.runner.kept_causes:
            for offset_id in response.offset_ids:
                self.runner.sent(broker_name, topic, int(offset_id[-16:], 16))
        self.faults._lose(process, topic, broker_name, response)
        self.kit.clock.advance(seconds=self.faults.take_delay_s(process, topic, broker_name))

    def ended_in_background(self, result: object, error: Exception | None) -> None:
        """Fail the test with the error of a function that `Process.background` ran."""
        if error is not None and self.runner.failure is None:
            self.runner.failure = error

    def note_received(self, group: str, topic: str) -> None:
        """Note that a client of the group got a message of the topic by its own request."""
        if (group, topic) in self._subscribed:
            self._subscribed[group, topic].was_read = True
        else:
            self.read_topics.add(topic)

    # ---- questions of the test

    def note_checked(self, group: str) -> None:
        """Note that the test asks what the group's listeners got."""
        self.check_group(group)
        self._checked_groups.add(group)
        for subscriber in self._subscribed.values():
            subscriber.was_read |= subscriber.group == group

    def about(self, call: Call) -> str:
        """Return the place and the messages of a listener's call, as the history shows them."""
        descriptions: list[str] = []
        for number, event in enumerate(call.events):
            retry = f", retry {event['attempt']}" if event["attempt"] else ""
            try:
                text = show(call.messages[number] if call.messages else self._network.message_at(*call.about[number]))
            except LookupError:  # retention has deleted it since
                text = f"{event['id']}, deleted since"
            descriptions.append(f"{text}{retry}")
        return f"{call.where} {', '.join(descriptions)}"

    def undelivered(self) -> list[str]:
        """Return a sentence for each thing that reached no listener, or was left open."""
        brokers = list(self._network.by_name.values())
        if any(broker.dead for broker in brokers):
            return []
        for subscriber in self._subscribed.values():
            name = subscriber.group, subscriber.topic
            events = (event for call in self._history.calls for event in call.events)
            subscriber.was_read |= any((event["group"], event["topic"]) == name for event in events)

        topics = [
            topic
            for topic in dict.fromkeys(topic for broker in brokers for topic in broker.topics())
            if any(next(iter(broker.messages(topic)), None) is not None for broker in brokers)
        ]
        return [
            *self._never_started(topics),
            *self._unread(brokers, topics),
            *self._dropped(),
            *self._open_transactions(brokers),
        ]

    def _unread(self, brokers: Sequence[Broker], topics: Sequence[str]) -> Iterator[str]:
        """Yield a sentence for each subscription that matched nothing, and each topic to which no group subscribes."""

        def messages(topic: str) -> list[StoredMessage]:
            return [message for broker in brokers for message in broker.messages(topic)]

        subscribed_topics = {topic for _, topic in self._subscribed}
        sent = [topic for topic in topics if is_user_topic(topic)]
        unread = [topic for topic in sent if topic not in subscribed_topics and topic not in self.read_topics]
        suggested: set[str] = set()
        for subscriber in self._subscribed.values():
            topic = subscriber.topic
            if subscriber.was_read or topic.startswith(TopicPrefix.RETRY):
                continue
            begin = f"{subscriber.group} got nothing of {topic!r}: "
            if topic in sent:
                yield begin + self._why_none_of(brokers, messages(topic), subscriber)
            elif delayed := [m for m in messages(SystemTopic.SCHEDULE) if m.properties.get("REAL_TOPIC") == topic]:
                yield f"{begin}{_are(len(delayed))} still delayed: let time pass with {self.fixture}.advance(…)"
            elif near := nearest(topic, unread, _ALIKE):
                suggested.add(near)
                are = _are(len(messages(near)))
                yield f"{begin}none was sent to it; {are} in {near!r}, to which no group subscribes"
            elif subscriber.is_declared and sent:
                yield f"{begin}none was sent to it"
        for topic in unread:
            near = nearest(topic, subscribed_topics, _ALIKE)
            if topic not in suggested and (near or topic in self.sent_to):
                hint = f"; did you mean {near!r}?" if near else ""
                yield f"no group subscribes to {topic!r}: {_are(len(messages(topic)))} in it{hint}"

    def _why_none_of(self, brokers: Sequence[Broker], messages: Sequence[StoredMessage], subscriber: Subscribed) -> str:
        """Return why a group got none of the messages of a topic."""
        kind, expression = next(iter(subscriber.filters))
        if kind == SQL92:
            from librmq.filter import SqlFilter  # few tests need what it loads

            try:
                sql = SqlFilter(expression)
            except FilterSyntaxError as error:  # only official clients send it; librmq's own refuse it
                return f"its filter {expression!r} is not valid, at character {error.position + 1:,}: {error.reason}"
            reasons = [(message, sql.explain(message.properties)) for message in messages]
            passing = [message for message, reason in reasons if reason.matches]
            first = reasons[0][1]
            why = f"{first.decided_by} decides for the first, because {first.why}"
        else:
            tags = list(dict.fromkeys(repr(message.tags) for message in messages))
            passing = list(_selected(messages, [(kind, expression)]))
            why = f"their tags are {', '.join(tags[:_MOST_TAGS])}" + (", …" if len(tags) > _MOST_TAGS else "")
        if not passing:
            return f"its filter {expression!r} matches none of the {len(messages):,} there: {why}"

        def next_offset(message: StoredMessage) -> int:
            topic, group = message.topic, subscriber.group
            return max(broker.consumer_offsets(group, topic).get(message.queue_id, 0) for broker in brokers)

        if all(message.queue_offset < next_offset(message) for message in passing):
            older = "older than the group, which started behind them (consume_from, or its progress)"
            return f"{_are(len(passing))} {older}"
        idle = "run_until_idle()" if self.fixture == "rmq" else "settle()"
        end = f"end the test with {self.fixture}.{idle} or {self.fixture}.advance(…)"
        return f"{_are(len(passing))} not delivered yet: {end}"

    def _never_started(self, topics: Collection[str]) -> Iterator[str]:
        missed: dict[str, set[str]] = {}
        started: set[str] = set()
        for consumer in self._consumers():
            missed.setdefault(consumer.group, set()).update(consumer.subscriptions.keys() & set(topics))
            if consumer.was_started:
                started.add(consumer.group)
        for group, of_group in missed.items():
            if group not in started and (names := ", ".join(map(repr, sorted(of_group - self.read_topics)))):
                yield f"{group} got nothing of {names}: its consumer was never started, call its start()"

    def _dropped(self) -> Iterator[str]:
        counts: dict[tuple[str, str], list[PredicateCounts]] = {}
        for consumer in self._consumers():
            if isinstance(consumer, PushConsumer):
                for topic, predicate in consumer.predicates:
                    counts.setdefault((consumer.group, topic), []).append(predicate.counts)
        for (group, topic), of_group in counts.items():
            calls = sum(count.calls for count in of_group)
            if calls and group not in self._checked_groups and not any(count.matched for count in of_group):
                errors = sum(count.failed for count in of_group)
                raised = f"; it raised an error on {errors:,} of them" if errors else ""
                yield f"the predicate of {group} dropped all {calls:,} messages of {topic!r} that it saw{raised}"

    def _open_transactions(self, brokers: Sequence[Broker]) -> Iterator[str]:
        for broker in brokers:
            if next(iter(broker.messages(SystemTopic.HALF)), None) is None:
                continue
            from librmq.diagnosis.pending import open_halves  # few tests need what it loads

            halves = [half for _, half in open_halves(broker.store, broker.tables)]
            for topic, count in Counter(half.properties.get("REAL_TOPIC", "") for half in halves).items():
                if topic in self.read_topics:
                    continue
                yield (
                    f"{_are(count, 'transaction')} open, with messages to {topic!r}: commit or roll back, or let the "
                    f"broker ask the producer with {self.fixture}.advance(…)"
                )

    def _consumers(self, group: str | None = None) -> list[Consumer[Any]]:
        return [
            consumer for process in self.table.processes for consumer in process.made if group in (None, consumer.group)
        ]

    def _groups(self) -> Collection[str]:
        subscribed_groups = {name for name, _ in self._subscribed}
        return subscribed_groups | {
            consumer.group for process in self.table.processes for consumer in process.consumers
        }

    def check_group(self, group: str) -> None:
        """Raise `UnknownGroupError` if no consumer of the test has the group."""
        groups, letters = self._groups(), dead_letter_topic(group)
        if group in groups or any(
            group in broker.groups() or letters in broker.topics() for broker in self._network.by_name.values()
        ):
            return
        near = nearest(group, groups, _ALIKE)
        raise UnknownGroupError(
            f"no consumer of this test has the group {group!r}"
            + (f"; did you mean {near!r}?" if near else f"; its groups are {', '.join(sorted(groups)) or 'none'}")
        )

    # ---- what only the stores tell

    def events(self, now_ms: int) -> Iterator[Event]:
        """Yield the events that no client sees, as of now: groups, dead letters, given-up transactions, and rest."""
        network = self._network
        events = self._history.events
        letters = list(self._dead_letters())
        yield from (event for event, _ in letters)
        sent_ms = {event["id"]: event["begin_ms"] for event in events if event["event"] == "send"}
        sent = set(sent_ms)
        topics_by_id = {event["id"]: event["topic"] for event in events if event["event"] == "deliver"}
        topics_by_id.update((event["id"], topic) for event, topic in letters)
        start, begin_ms = self.start, self._history.begin_ms
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
        yield from [self._rules(data) for data in self._first_data.values()]
        for name, data in self._first_data.items():
            if self._is_drained(data):
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

    def _filters(self, group: str) -> dict[str, dict[tuple[str, str], None]]:
        """Return types and expressions of a group's subscriptions, by topic."""
        return {
            topic: subscribed.filters
            for (name, topic), subscribed in self._subscribed.items()
            if name == group and not topic.startswith(TopicPrefix.RETRY)
        }

    def _rules(self, data: ConsumerData) -> Event:
        name, filters_by_topic = data.group, self._filters(data.group)
        event: Event = {"event": "group", "group": name, "topics": list(filters_by_topic)}
        consumers = [consumer for consumer in self._consumers(name) if isinstance(consumer, PushConsumer)]
        if consumers and all(consumer.config.orderly and consumer.config.batch_size == 1 for consumer in consumers):
            event["ordered"] = True
        if data.model is MessageModel.BROADCASTING:
            event["broadcast"] = True
        if any(filters.keys() != {("TAG", "*")} for filters in filters_by_topic.values()):
            event["selects"] = sorted(
                {
                    id_of(message)
                    for topic, filters in filters_by_topic.items()
                    for broker_name in self._network.by_name
                    for message in _selected(self._network.messages(broker_name, topic), filters)
                }
            )
        return event

    def _is_drained(self, data: ConsumerData) -> bool:
        """Return whether nothing waits for a group: all is consumed, and nothing comes later."""
        name, network = data.group, self._network
        consumers = [consumer for consumer in self._consumers(name) if consumer.is_running and not consumer.client.dead]
        if data.kind != "push" or not consumers or self.runner.running or network.cuts:
            return False
        if any(broker.dead for broker in network.by_name.values()) or any(
            not isinstance(consumer, PushConsumer) or consumer.is_paused for consumer in consumers
        ):
            return False
        topics = list(self._filters(name))
        if any(consumer.subscriptions.keys() - {retry_topic(name)} != set(topics) for consumer in consumers):
            return False
        if data.model is MessageModel.CLUSTERING:
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
        now_ms = self.runner.now_ms()
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
    anomalies = check_history(events)
    missing = sorted(set(expected) - {anomaly.anomaly for anomaly in anomalies})
    if missing:
        return (
            f"the test expects the anomaly {missing[0]!r}, and its history has none: remove it from {fixture}.expect, "
            "or let the test cause it"
        )
    surprises = [
        anomaly
        for anomaly in anomalies
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
