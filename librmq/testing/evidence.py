"""A test's questions about its groups and topics, and those that it did not ask."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from librmq.broker import Broker
from librmq.message.delay_levels import SCHEDULE_TOPIC
from librmq.message.message import MessageQueue, StoredMessage, retry_topic
from librmq.message.topics import dead_letter_topic
from librmq.protocol import Heartbeat
from librmq.testing.history import Call, DeliveryAttempt, History, show
from librmq.testing.process import Process
from librmq.testing.undelivered import Subscribed, closest_name, undelivered

__all__ = ["Evidence", "UnknownGroupError"]


class UnknownGroupError(LookupError):
    """The test asks about a group that none of its consumers has."""


class _Scene(Protocol):
    """The parts of the kit that evidence needs."""

    broker: Broker

    @property
    def processes(self) -> Sequence[Process]: ...


class Evidence:
    """Answers from the broker and the history; records which topics were subscribed to, sent to and asked about."""

    def __init__(self, scene: _Scene, history: History) -> None:
        self._scene = scene
        self._history = history
        self._subscribed: dict[tuple[str, str], Subscribed] = {}
        self._sent_to: set[str] = set()
        self._looked_at: set[str] = set()

    # ---- what the kit notes

    def note_sent(self, topic: str) -> None:
        """Note that the test itself sends to a topic."""
        self._sent_to.add(topic)

    def note_heartbeat(self, request: Heartbeat, is_declared: bool) -> None:
        """Note the subscriptions of a process; ``is_declared`` if the test made its consumer itself."""
        for data in request.consumers:
            for topic, subscription in data.subscriptions.items():
                key = data.group, topic
                if key not in self._subscribed:
                    self._subscribed[key] = Subscribed(data.group, subscription, is_declared, data.kind == "pull")

    # ---- questions of the test: the methods of `Kit`

    def delivered(self, group: str) -> list[DeliveryAttempt]:
        """Return each delivery to the group's listeners, in order."""
        self._check_group(group)
        for one in self._subscribed.values():
            one.was_read |= one.group == group
        return list(self._history.delivered(group, self.message_at))

    def retries(self, group: str) -> list[StoredMessage]:
        """Return the messages that were sent back for the group, in order."""
        self._check_group(group)
        topic = retry_topic(group)
        found = [m for m in self._scene.broker.messages(SCHEDULE_TOPIC) if m.properties.get("REAL_TOPIC") == topic]
        return sorted(found, key=lambda message: message.physical_offset)

    def dead_letters(self, group: str) -> list[StoredMessage]:
        """Return the group's dead letters."""
        self._check_group(group)
        return self._scene.broker.dead_letters(group)

    def offsets(self, group: str) -> dict[MessageQueue, int]:
        """Return the group's progress at the broker."""
        self._check_group(group)
        broker = self._scene.broker
        return {
            MessageQueue(topic, broker.name, queue_id): queue_offset
            for topic in broker.topics()
            for queue_id, queue_offset in sorted(broker.consumer_offsets(group, topic).items())
        }

    def messages(self, topic: str) -> list[StoredMessage]:
        """Return the messages of a topic in log order."""
        self._looked_at.add(topic)
        return sorted(self._scene.broker.messages(topic), key=lambda message: message.physical_offset)

    def message_at(self, physical_offset: int) -> StoredMessage:
        """Return the message at a physical offset.

        Raises:
            LookupError: There is none.
        """
        message = self._scene.broker.store.message_at(physical_offset)
        if message is None:
            raise LookupError(f"there is no message at {physical_offset} any more")
        return message

    def about(self, call: Call) -> str:
        """Return the place and the messages of a listener's call, as the history shows them."""
        if self._scene.broker.dead:
            return call.where
        shown: list[str] = []
        for _, physical_offset in call.about:
            message = self.message_at(physical_offset)
            times = f", attempt {message.reconsume_times + 1}" if message.reconsume_times else ""
            shown.append(f"{show(message)}{times}")
        return f"{call.where} {', '.join(shown)}"

    def undelivered(self) -> list[str]:
        """Return a sentence for each subscription that matched nothing, and each topic without a group."""
        broker = self._scene.broker
        if broker.dead:
            return []
        for one in self._subscribed.values():
            one.was_read |= self._history.was_given(one.group, one.subscription.topic)

        def next_offset(group: str, message: StoredMessage) -> int:
            return broker.consumer_offsets(group, message.topic).get(message.queue_id, 0)

        topics = [topic for topic in broker.topics() if next(iter(broker.messages(topic)), None) is not None]
        return list(
            undelivered(
                self._subscribed.values(),
                topics,
                self._sent_to - self._looked_at,
                self._looked_at,
                lambda topic: list(broker.messages(topic)),
                next_offset,
            )
        )

    def _groups(self) -> Collection[str]:
        known = {name for name, _ in self._subscribed}
        return known | {consumer.group for process in self._scene.processes for consumer in process.consumers}

    def _check_group(self, group: str) -> None:
        known, broker = self._groups(), self._scene.broker
        if group in known or group in broker.groups() or dead_letter_topic(group) in broker.topics():
            return
        near = closest_name(group, known)
        raise UnknownGroupError(
            f"no consumer of this test has the group {group!r}"
            + (f"; did you mean {near!r}?" if near else f"; its groups are {', '.join(sorted(known)) or 'none'}")
        )
