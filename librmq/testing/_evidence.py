"""Deliveries, progress and dead letters for a test's assertions, and what the test left unchecked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from librmq.broker import Broker
from librmq.consumer import PushConsumer
from librmq.consumer.base import Consumer
from librmq.errors import FilterSyntaxError, RmqError
from librmq.filter import SQL92, TagFilter
from librmq.message import MessageQueue, StoredMessage, dead_letter_topic
from librmq.message.topics import SystemTopic, TopicPrefix, is_user_topic
from librmq.protocol import Heartbeat, PullMessage, Receive, Received, SendResponse, Subscription
from librmq.runtime.event_log import counted
from librmq.testing._faults import Faults
from librmq.testing._kit_runner import KitRunner, ProcessTable, current_work
from librmq.testing._process import KitParts, Process, ProcessStateError
from librmq.testing.histories._history import Call, show
from librmq.testing.histories._verdict import Facts

if TYPE_CHECKING:
    from librmq.filter import PredicateCounts
    from librmq.testing._from_store import StoreStart

# ---- undelivered messages and unmatched subscriptions

_MOST_TAGS = 5


class UndeliveredWarning(UserWarning):
    """A test ended with messages that no listener got, a subscription that matched nothing, or an unused fault."""


@dataclass(slots=True)
class Subscribed:
    """One topic of one group, as its consumers subscribed."""

    group: str
    subscription: Subscription
    is_declared: bool
    """Whether the test made the consumer itself; an application may subscribe to more than a test sends."""
    was_read: bool = False
    """Whether a listener of the group got a message of the topic, or the application pulls itself."""


def closest_name(name: str, names: Iterable[str]) -> str | None:
    """Return the name most similar to ``name``, None if none is similar."""
    matches = get_close_matches(name, list(names), 1, 0.75)
    return matches[0] if matches else None


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
        self.facts: Facts = Facts(self.kit, self.runner, self.table, self.start)
        """What only the stores tell."""
        self._subscribed: dict[tuple[str, str], Subscribed] = {}
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
        if self.facts.is_broadcasting(request.group):  # each of its instances reads all queues
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
        self.facts.note_heartbeat(request)
        for data in request.consumers:
            for topic, subscription in data.subscriptions.items():
                if (key := (data.group, topic)) not in self._subscribed:
                    is_declared, was_read = process.name in self.declared, data.kind == "pull"
                    self._subscribed[key] = Subscribed(data.group, subscription, is_declared, was_read)

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
                shown = show(call.messages[number] if call.messages else self._network.message_at(*call.about[number]))
            except LookupError:  # retention has deleted it since
                shown = f"{event['id']}, deleted since"
            descriptions.append(f"{shown}{retry}")
        return f"{call.where} {', '.join(descriptions)}"

    def undelivered(self) -> list[str]:
        """Return a sentence for each thing that reached no listener, or was left open."""
        brokers = list(self._network.by_name.values())
        if any(broker.dead for broker in brokers):
            return []
        for subscriber in self._subscribed.values():
            name = subscriber.group, subscriber.subscription.topic
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

        subscribed_topics = {subscriber.subscription.topic for subscriber in self._subscribed.values()}
        sent = [topic for topic in topics if is_user_topic(topic)]
        unread = [topic for topic in sent if topic not in subscribed_topics and topic not in self.read_topics]
        suggested: set[str] = set()
        for subscriber in self._subscribed.values():
            topic = subscriber.subscription.topic
            if subscriber.was_read or topic.startswith(TopicPrefix.RETRY):
                continue
            begin = f"{subscriber.group} got nothing of {topic!r}: "
            if topic in sent:
                yield begin + self._why_none_of(brokers, messages(topic), subscriber)
            elif delayed := [m for m in messages(SystemTopic.SCHEDULE) if m.properties.get("REAL_TOPIC") == topic]:
                yield f"{begin}{_are(len(delayed))} still delayed: let time pass with {self.fixture}.advance(…)"
            elif near := closest_name(topic, unread):
                suggested.add(near)
                are = _are(len(messages(near)))
                yield f"{begin}none was sent to it; {are} in {near!r}, to which no group subscribes"
            elif subscriber.is_declared and sent:
                yield f"{begin}none was sent to it"
        for topic in unread:
            near = closest_name(topic, subscribed_topics)
            if topic not in suggested and (near or topic in self.sent_to):
                hint = f"; did you mean {near!r}?" if near else ""
                yield f"no group subscribes to {topic!r}: {_are(len(messages(topic)))} in it{hint}"

    def _why_none_of(self, brokers: Sequence[Broker], messages: Sequence[StoredMessage], subscriber: Subscribed) -> str:
        """Return why a group got none of the messages of a topic."""
        expression = subscriber.subscription.expression
        if subscriber.subscription.expression_type == SQL92:
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
            passing = [message for message in messages if TagFilter(expression).matches(message.tags)]
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

    def _consumers(self) -> Iterator[Consumer[Any]]:
        for process in self.table.processes:
            yield from process.made

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
        near = closest_name(group, groups)
        raise UnknownGroupError(
            f"no consumer of this test has the group {group!r}"
            + (f"; did you mean {near!r}?" if near else f"; its groups are {', '.join(sorted(groups)) or 'none'}")
        )
