"""The history of a test, to read and to assert on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from librmq.message.message import Message, StoredMessage
from librmq.message.printable import printable
from librmq.runtime.runner import Work

_SHOWN_BYTES = 40
_FIRST_LINES, _LAST_LINES = 50, 150


class HistoryLine(NamedTuple):
    """One line of a history: when, who, and what."""

    at_ms: int
    """Milliseconds since the start of the test."""
    who: str
    """The process or part that did it."""
    what: str
    """What it did."""

    def __str__(self) -> str:
        return f"{self.at_ms / 1000:12,.3f} s  {self.who:<16} {printable(self.what)}"


@dataclass(slots=True)
class Call:
    """One call of a listener."""

    group: str
    process: str
    where: str
    """Topic, queue and offset, as in ``orders/0:3``."""
    about: Sequence[tuple[str, int]]
    began_ms: int
    ended_ms: int | None = None
    outcome: str = "running"
    error: Exception | None = None
    messages: Sequence[StoredMessage] | None = None
    """What it got, if a broker with other messages has taken the place of the one that had them."""


@dataclass(frozen=True, slots=True)
class DeliveryAttempt:
    """One delivery of a message to a listener."""

    message: StoredMessage
    """The delivered record; for a redelivery, the one in the group's retry topic."""
    group: str
    """The consumer group."""
    process: str
    """The process of the listener."""
    began_ms: int
    """Begin, in milliseconds since the start of the test."""
    ended_ms: int | None
    """End, in milliseconds since the start of the test; None while the listener runs."""
    outcome: str
    """``returned``, ``later`` or ``rests`` (the listener requested it), ``failed``, ``died`` or ``running``."""
    error: Exception | None = None
    """The error of the listener."""
    broker_name: str = "broker-a"
    """The broker that the message came from."""

    @property
    def body(self) -> bytes:
        """The message's body."""
        return self.message.body

    @property
    def topic(self) -> str:
        """The topic of the first send."""
        return self.message.properties.get("RETRY_TOPIC") or self.message.topic

    @property
    def attempt(self) -> int:
        """Number of this delivery: 1 for the first, one higher each time the group has sent the message back."""
        return self.message.reconsume_times + 1


@dataclass(slots=True)
class History:
    """Events in order. ``str()`` has a line for each, or only for the first and last ones if there are very many."""

    begin_ms: int
    """Start of the test, in milliseconds since 1970."""
    shows_brokers: bool = False
    """Whether queues are shown with their broker, as in ``orders/broker-b/0``."""
    calls: list[Call] = field(default_factory=list)
    """Calls of listeners, in order of their begin."""
    _notes: list[tuple[int, str, str | Callable[[], str]]] = field(default_factory=list)
    _open: dict[int, Call] = field(default_factory=dict)

    def note(self, now_ms: int, actor: str, what: str | Callable[[], str]) -> None:
        """Add an event; a function is called when the history is read."""
        self._notes.append((now_ms - self.begin_ms, actor, what))

    def begin(self, now_ms: int, work: Work, about: Callable[[Call], str]) -> Call | None:
        """Note the call of a listener; return None for other work."""
        if not work.about:
            return None
        actor, _, place_and_offset = work.label.partition(" ")
        place, _, queue_offset = place_and_offset.rpartition(" ")
        topic, broker_name, queue_id = place.rsplit("/", 2) if place.count("/") > 1 else (place, "", "")
        group, _, process = actor.partition("@")
        where = f"{self.place(topic, broker_name, queue_id)}:{queue_offset}"
        call = Call(group, process, where, work.about, now_ms - self.begin_ms)
        self.calls.append(call)
        self._open[id(work)] = call
        self.note(now_ms, actor, lambda: f"gets {about(call)}")
        return call

    def begin_remote(
        self, now_ms: int, group: str, process: str, where: str, message: tuple[str, StoredMessage]
    ) -> Call:
        """Note a delivery to a client over the wire, which the caller ends."""
        broker_name, stored = message
        call = Call(group, process, where, ((broker_name, stored.physical_offset),), now_ms - self.begin_ms)
        self.calls.append(call)
        return call

    def end(self, now_ms: int, work: Work, outcome: str, error: Exception | None = None) -> None:
        """Note the end of a listener."""
        call = self._open.pop(id(work), None)
        if call is not None:
            call.ended_ms, call.outcome, call.error = now_ms - self.begin_ms, outcome, error
            text = f"{outcome}: {error!r}" if error is not None else outcome
            self.note(now_ms, work.label.partition(" ")[0], f"{text} ({call.where})")

    def place(self, topic: str, broker_name: str, queue_id: int | str) -> str:
        """Return a queue as the history shows it."""
        return f"{topic}/{broker_name}/{queue_id}" if self.shows_brokers else f"{topic}/{queue_id}"

    def delivered(self, group: str, message_at: Callable[[str, int], StoredMessage]) -> Iterator[DeliveryAttempt]:
        """Yield each message of each call of a group's listeners, in order."""
        for call in self.calls:
            if call.group == group:
                for number, (broker_name, physical_offset) in enumerate(call.about):
                    yield DeliveryAttempt(
                        call.messages[number] if call.messages else message_at(broker_name, physical_offset),
                        group,
                        call.process,
                        call.began_ms,
                        call.ended_ms,
                        call.outcome,
                        call.error,
                        broker_name,
                    )

    def has_delivered(self, group: str, topic: str) -> bool:
        """Return whether a listener of the group got a message of the topic."""
        return any(call.group == group and call.where.startswith(f"{topic}/") for call in self.calls)

    def keep_messages(self, message_at: Callable[[str, int], StoredMessage]) -> None:
        """Read the messages of all calls, before another broker replaces the one that has them."""
        for call in self.calls:
            if call.messages is None:
                call.messages = [message_at(*address) for address in call.about]
        self.settle()

    def settle(self) -> None:
        """Read everything that is otherwise read on demand, because the broker is about to close."""
        self._notes = [(at_ms, actor, what if isinstance(what, str) else what()) for at_ms, actor, what in self._notes]

    def __iter__(self) -> Iterator[HistoryLine]:
        for at_ms, actor, what in self._notes:
            yield HistoryLine(at_ms, actor, what if isinstance(what, str) else what())

    def __len__(self) -> int:
        return len(self._notes)

    def __str__(self) -> str:
        lines = list(map(str, self))
        if (left_out := len(lines) - _FIRST_LINES - _LAST_LINES) > 1:
            lines[_FIRST_LINES:-_LAST_LINES] = [f"             … {left_out:,} more"]
        return "\n".join(lines)


def show(message: Message | StoredMessage) -> str:
    """Return body and tag of a message, shortened."""
    body = message.body
    text = repr(body) if len(body) <= _SHOWN_BYTES else f"{body[:_SHOWN_BYTES]!r}… ({len(body):,} bytes)"
    tags = message.properties.get("TAGS")
    return f"{text} [{tags}]" if tags else text
