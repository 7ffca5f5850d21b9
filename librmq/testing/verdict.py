"""The verdict on a test: what only its stores tell, and what is wrong in its history that the test did not expect."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from librmq.broker import Broker
from librmq.client.recorder import Event, id_of
from librmq.consumer import PushConsumer
from librmq.consumer.base import Consumer
from librmq.diagnosis.pending import given_up_halves, pending_messages
from librmq.errors import FilterSyntaxError
from librmq.filter import SQL92, SqlFilter, TagFilter
from librmq.message.delay_levels import SCHEDULE_TOPIC
from librmq.message.message import MessageQueue, StoredMessage, retry_topic
from librmq.message.topics import CHECK_MAX_TIME_TOPIC, DEAD_LETTER_PREFIX, HALF_TOPIC, RETRY_PREFIX
from librmq.protocol import PERM_READ, Heartbeat, MessageModel
from librmq.scheduling.relay import HOP_TOPIC
from librmq.scheduling.timer_config import TIMER_TOPIC
from librmq.testing.history import History
from librmq.testing.kit_runner import KitRunner
from librmq.testing.network import Network
from librmq.testing.process import Process

_TICK_MS = 1_000
"""What is due is delivered within this time."""
_WAITING_TOPICS = frozenset((SCHEDULE_TOPIC, HALF_TOPIC, TIMER_TOPIC))


class _Scene(Protocol):
    """The parts of the kit that tell the facts."""

    network: Network
    runner: KitRunner

    def brokers(self) -> Sequence[Broker]: ...

    @property
    def processes(self) -> Sequence[Process]: ...


@dataclass(slots=True)
class _Group:
    """What the instances of a group have subscribed to."""

    kind: str
    model: MessageModel
    filters: dict[str, dict[tuple[str, str], None]] = field(default_factory=dict)
    """Types and expressions by topic."""


class Facts:
    """The events of a test that its clients do not see: groups, dead letters, given-up transactions, and rest."""

    def __init__(self, scene: _Scene, history: History) -> None:
        self._scene = scene
        self._history = history
        self._groups: dict[str, _Group] = {}

    def note_heartbeat(self, request: Heartbeat) -> None:
        """Note the subscriptions of a client."""
        for data in request.consumers:
            group = self._groups.setdefault(data.group, _Group(data.kind, data.model))
            for topic, subscription in data.subscriptions.items():
                if not topic.startswith(RETRY_PREFIX):
                    filters = group.filters.setdefault(topic, {})
                    filters[subscription.expression_type, subscription.expression] = None

    def events(self, now_ms: int) -> Iterator[Event]:
        """Yield the events, as of now."""
        network = self._scene.network
        events = self._history.events
        sent = {event["id"] for event in events if event["event"] == "send"}
        outside = {event["id"]: event for event in events if event["event"] == "deliver" and event["id"] not in sent}
        for event in outside.values():  # in the store before, or sent to the broker without a client of the kit
            yield {
                "event": "send",
                "process": "outside",
                "id": event["id"],
                "topic": event["topic"],
                "begin_ms": self._history.begin_ms,
                "end_ms": self._history.begin_ms,
                "outcome": "unknown",
            }
        for name in network.by_name:
            store = network.store(name)
            topics = {topic for topic, _ in store.queues}
            for topic in sorted(topics):
                if topic.startswith(DEAD_LETTER_PREFIX):
                    group = topic.removeprefix(DEAD_LETTER_PREFIX)
                    for letter in network.messages(name, topic):
                        at_ms = letter.store_timestamp_ms
                        yield {"event": "dead_letter", "group": group, "id": id_of(letter), "at_ms": at_ms}
            if CHECK_MAX_TIME_TOPIC in topics:
                for half in given_up_halves(store):
                    yield {"event": "discard", "id": id_of(half), "at_ms": half.store_timestamp_ms}
        for name, described in self._groups.items():
            rules = self._rules(name, described)
            yield rules
            if self._is_drained(name, described):
                yield {"event": "drained", "group": name, "at_ms": now_ms}

    # ---- groups

    def _consumers(self, group: str) -> list[Consumer[Any]]:
        return [consumer for process in self._scene.processes for consumer in process.made if consumer.group == group]

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
                    for broker_name in self._scene.network.by_name
                    for message in _selected(self._scene.network.messages(broker_name, topic), filters)
                }
            )
        return event

    def _is_drained(self, name: str, group: _Group) -> bool:
        """Return whether nothing waits for a group: all is consumed, and nothing comes later."""
        scene, network = self._scene, self._scene.network
        consumers = [consumer for consumer in self._consumers(name) if consumer.is_running and not consumer.client.dead]
        if group.kind != "push" or not consumers or scene.runner.running or network.has_cuts:
            return False
        if any(broker.dead for broker in scene.brokers()) or any(
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
            for data in network.topic_route(topic)
            if data.permission & PERM_READ
            for queue_id in range(data.read_queues)
        ) and not self._has_pending(topics)

    def _is_read(self, consumers: Sequence[Consumer[Any]], queue: MessageQueue) -> bool:
        begin, end = self._scene.network.named(queue.broker_name).store.queue_range(queue.topic, queue.queue_id)
        readers = [assigned for consumer in consumers if (assigned := consumer.assigned.get(queue)) is not None]
        is_read = all(
            assigned.next_offset >= end and not len(assigned.messages) and not assigned.released for assigned in readers
        )
        return begin == 0 and bool(readers) and is_read

    def _has_pending(self, topics: Collection[str]) -> bool:
        now_ms = self._scene.runner.now_ms()
        for broker in self._scene.brokers():
            names = {topic for topic, _ in broker.store.queues}
            if HOP_TOPIC in names:
                return True
            if names.isdisjoint(_WAITING_TOPICS):
                continue
            for message in pending_messages(broker.store, broker.tables):
                if message.kind == "given_up" or {message.topic, message.target_topic}.isdisjoint(topics):
                    continue
                # The table of what was delivered is some seconds old.
                if message.kind == "half" or message.due_ms is None or message.due_ms + _TICK_MS > now_ms:
                    return True
        return False


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
        sql = SqlFilter(expression)
        return lambda message: sql.matches(message.properties)
    tags = TagFilter(expression)
    return lambda message: tags.matches(message.tags)
