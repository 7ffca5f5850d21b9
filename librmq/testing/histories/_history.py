"""The history of a test, to read and to assert on, and its rows in the order in which rules count them.

`HistoryRows` also knows which message is in which row, and `Marks` what lies between two deliveries.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, TypeVar

from librmq.broker import Broker
from librmq.client.recorder import Event, id_of
from librmq.formatting import shown_body
from librmq.message import Message, StoredMessage
from librmq.message.properties import PropertyName
from librmq.override import override
from librmq.runtime import Work
from librmq.store import MessageStore
from librmq.testing.histories.events import (
    Commit,
    Delivery,
    HistoryEvents,
    HistoryLine,
    MessageId,
    Queue,
    Send,
    TransactionEnd,
    place_of,
)

_FIRST_LINES, _LAST_LINES = 50, 150
_OUTCOMES: Final[dict[str | None, str]] = {None: "running", "ok": "returned", "retry": "failed", "died": "died"}
"""Ends of deliveries without a listener, as `DeliveryAttempt` names them."""


@dataclass(slots=True)
class Call:
    """The deliveries of messages that were handed out together, as to one call of a listener."""

    events: list[Event]
    about: Sequence[tuple[str, int]]
    """Broker and physical offset of each message."""
    shows_broker: bool = False
    ended_ms: int | None = None
    """When the listener returned; its message can have been given back before."""
    outcome: str = ""
    """What the listener did; empty while it runs, and without a listener."""
    error: Exception | None = None
    messages: Sequence[StoredMessage] | None = None
    """What it got, if a broker with other messages has taken the place of the one that had them."""

    @property
    def actor(self) -> str:
        first = self.events[0]
        return f"{first['group']}@{first['process']}"

    @property
    def where(self) -> str:
        """Topic, queue and offset of the first message, as in ``orders/0:3``."""
        return place_of(self.events[0], shows_broker=self.shows_broker)


@dataclass(frozen=True, slots=True)
class DeliveryAttempt:
    """One delivery of a message to a listener."""

    message: StoredMessage
    """The delivered record; for a redelivery, the one in the group's retry topic."""
    group: str
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
    attempt: int = 0
    """Number of this delivery, as in `Kit.events`: 0 for the first, one higher after each time that the group has sent
    the message back."""

    @property
    def body(self) -> bytes:
        """The message's body."""
        return self.message.body

    @property
    def topic(self) -> str:
        """The topic of the first send."""
        return self.message.properties.get("RETRY_TOPIC") or self.message.topic


@dataclass(slots=True)
class History:
    """Events in order. ``str()`` has a line for each, or only for the first and last ones if there are very many."""

    begin_ms: int
    """Start of the test, in milliseconds since 1970."""
    shows_brokers: bool = False
    """Whether queues are shown with their broker, as in ``orders/broker-b/0``."""
    calls: list[Call] = field(default_factory=list)
    """Calls of listeners, in order of their beginning."""
    events: list[Event] = field(default_factory=list)
    """What clients and brokers did, as `check_history` judges it; a delivery gets its end later."""
    about: Callable[[Call], str] = lambda call: call.where
    """Returns place and messages of a call, as a line shows them."""
    _notes: list[tuple[int, str, str | Callable[[], str]]] = field(default_factory=list)
    _open: dict[int, Call] = field(default_factory=dict)
    _promotions: Counter[str] = field(default_factory=Counter)
    _beginning: Work | None = None

    def note(self, now_ms: int, actor: str, what: str | Callable[[], str]) -> None:
        """Add an event; a function is called when the history is read."""
        self._notes.append((now_ms - self.begin_ms, actor, what))

    # ---- events

    def begins(self, event: Event) -> None:
        """Take an event."""
        self.events.append(event)

    def ends(self, event: Event, *, is_last: bool = True) -> None:
        """Take the end of an event, which is in it."""

    def delivers(self, events: list[Event], messages: Sequence[StoredMessage], *, calls_listener: bool) -> None:
        """Take the deliveries of messages that are handed out together."""
        self.events += events
        broker_name = events[0]["broker"]
        about = [(broker_name, message.physical_offset) for message in messages]
        call = Call(events, about, self.shows_brokers)
        self.calls.append(call)
        if calls_listener:
            if self._beginning is not None:
                self._open[id(self._beginning)] = call
            self._notes.append((events[0]["begin_ms"] - self.begin_ms, call.actor, lambda: f"gets {self.about(call)}"))

    def cancels(self, name: str, *, is_sure: bool = False) -> None:
        """Note that a message was taken back, so that nothing is promised for it; if that is sure, it must not come."""
        sends = [event for event in self.events if event["event"] == "send" and event["id"] == name]
        is_sure &= all(event["outcome"] != "unknown" for event in sends)  # another broker may have a copy
        _withdraw(sends)
        for event in sends if is_sure else ():
            event["outcome"] = "failed"

    def promoted(self, broker: Broker, master: MessageStore) -> None:
        """Note that a copy has become a broker that lacks the last records of the store of its master.

        An acknowledgement covers that if the send has waited for the copy; any other message may be stored or not. What
        was read of those records was in queues that the broker does not have: in the history they are another broker's.
        """
        self._promotions[broker.name] += 1
        retired_name = f"{broker.name}~{self._promotions[broker.name]}"
        missing = [message for message in master if message.physical_offset >= broker.store.log.end]
        is_sync = broker.config.replication == "sync"
        ids = {
            id_of(message) for message in missing if not is_sync or message.properties.get(PropertyName.WAIT) == "false"
        }
        kinds = ("send", "end_transaction")
        _withdraw(event for event in self.events if event["event"] in kinds and event["id"] in ids)
        for event in self.events:
            if event.get("broker") == broker.name and "queue_offset" in event and event["event"] != "send":
                _, end = broker.store.queue_range(event.get("stored_in") or event["topic"], event["queue_id"])
                if event["queue_offset"] - (event["event"] == "commit") >= end:
                    event["broker"] = retired_name

    def _listener_ends(self, now_ms: int, work: Work, outcome: str, error: Exception | None = None) -> None:
        """Note the end of a listener; ``outcome`` is one of those of `DeliveryAttempt`."""
        call = self._open.pop(id(work), None)
        if call is not None:
            call.ended_ms, call.outcome, call.error = now_ms - self.begin_ms, outcome, error
            text = f"{outcome}: {error!r}" if error is not None else outcome
            self.note(now_ms, call.actor, f"{text} ({call.where})")

    def place(self, topic: str, broker_name: str, queue_id: int, queue_offset: int | None = None) -> str:
        """Return a queue, or a place in it, as the history shows it."""
        place = {"topic": topic, "broker": broker_name, "queue_id": queue_id, "queue_offset": queue_offset}
        return place_of(place, shows_broker=self.shows_brokers)

    def delivered(self, group: str, message_at: Callable[[str, int], StoredMessage]) -> Iterator[DeliveryAttempt]:
        """Yield each message that was handed out to the group, in order."""
        for call in self.calls:
            for number, event in enumerate(call.events):
                if event["group"] != group:
                    break
                end_ms = call.ended_ms
                if not call.outcome and "end_ms" in event:
                    end_ms = event["end_ms"] - self.begin_ms
                yield DeliveryAttempt(
                    message=call.messages[number] if call.messages else message_at(*call.about[number]),
                    group=group,
                    process=event["process"],
                    began_ms=event["begin_ms"] - self.begin_ms,
                    ended_ms=end_ms,
                    outcome=call.outcome or _OUTCOMES[event.get("outcome")],
                    error=call.error,
                    broker_name=call.about[number][0],
                    attempt=event["attempt"],
                )

    def _keep_messages(self, message_at: Callable[[str, int], StoredMessage]) -> None:
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

    @override
    def __str__(self) -> str:
        lines = list(map(str, self))
        if (left_out := len(lines) - _FIRST_LINES - _LAST_LINES) > 1:
            lines[_FIRST_LINES:-_LAST_LINES] = [f"             … {left_out:,} more"]
        return "\n".join(lines)


def _withdraw(events: Iterable[Event]) -> None:
    """Let events count as such that happened or not."""
    for event in events:
        if event["outcome"] == "ok":
            event["outcome"] = "unknown"
            for name in ("broker", "queue_id", "queue_offset"):
                event.pop(name, None)


def show(message: Message | StoredMessage) -> str:
    """Return body and tag of a message, shortened."""
    text, tags = shown_body(message.body), message.properties.get("TAGS")
    return f"{text} [{tags}]" if tags else text


_Row = TypeVar("_Row", Send, Delivery, Commit)


def falls(
    rows: Sequence[_Row],
    marks_ms: Iterable[int],
    counts: Callable[[_Row], bool] = lambda row: True,
    *,
    is_equal_a_fall: bool = False,
) -> Iterator[tuple[_Row, _Row]]:
    """Yield rows that begin after one had ended with a larger offset, with that row, where no mark lies between.

    Args:
        rows: The rows of one queue, by their begins.
        marks_ms: The times of the marks.
        counts: Whether a row that has ended counts.
        is_equal_a_fall: Whether the same offset is wrong too.
    """
    highest = -1
    for row in rows:
        if row.queue_offset < highest + is_equal_a_fall:
            break
        highest = row.queue_offset
    else:
        return
    marks = sorted(marks_ms)
    ended = sorted(filter(counts, rows), key=lambda row: row.end_ms)
    done, era, best = 0, 0, None
    for row in rows:
        while done < len(ended) and ended[done].end_ms < row.begin_ms:
            first, done = ended[done], done + 1
            first_era = bisect_left(marks, first.end_ms)
            if best is None or first_era > era or first.queue_offset >= best.queue_offset:
                era, best = first_era, first
        is_fall = best is not None and best.queue_offset + is_equal_a_fall > row.queue_offset
        if best is not None and is_fall and bisect_right(marks, row.begin_ms) == era:
            yield row, best


def by_key(rows: Iterable[Any], key: Callable[[Any], Any]) -> dict[Any, list[Any]]:
    """Return rows by a key, in their order."""
    groups: dict[Any, list[Any]] = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)
    return groups


class HistoryRows:
    """The rows of a history, with sends and deliveries in order."""

    def __init__(self, history: HistoryEvents) -> None:
        self.groups, self.marks = history.groups, history.marks
        self.ends: list[TransactionEnd] = history.ends
        self.sends: list[Send] = sorted(history.sends)
        self.commits: list[Commit] = sorted(history.commits)
        self._crash_lines: dict[int, tuple[int, int]] = {}
        """Begin, and line of the crash, of deliveries that end by it, by their lines."""
        crashes = self.crashes("process")
        self.deliveries: list[Delivery] = sorted(
            row if row.outcome is not None else self._died(row, crashes.get(row.process, ()))
            for row in history.deliveries
        )
        self.sends_by_id: dict[MessageId, list[Send]] = defaultdict(list)
        for send in self.sends:
            self.sends_by_id[send.id].append(send)
        self.ends_by_id: dict[MessageId, list[TransactionEnd]] = defaultdict(list)
        for end in self.ends:
            self.ends_by_id[end.id].append(end)

    def _died(self, row: Delivery, crashes: Sequence[tuple[int, int]]) -> Delivery:
        """Return a delivery without an end, which a later crash of its process ends."""
        number = bisect_left(crashes, (row.begin_ms, 0))
        if number == len(crashes):
            return row
        at_ms, line = crashes[number]
        self._crash_lines[row.line] = (row.begin_ms, line)
        return row._replace(end_ms=at_ms, outcome="died")

    def crashes(self, field: str) -> dict[str, list[tuple[int, int]]]:
        """Return the times and lines of crashes by process or broker, in order."""
        crashes: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for at_ms, line, event in sorted(self.marks["crash"], key=lambda mark: mark[:2]):
            if event.get(field) is not None:
                crashes[event[field]].append((at_ms, line))
        return crashes

    @cached_property
    def crashes_ms(self) -> list[int]:
        """The times of all crashes."""
        return [mark.at_ms for mark in self.marks["crash"]]

    @cached_property
    def resets_ms(self) -> dict[tuple[str, str], list[int]]:
        """The times of resets by group and topic, in order."""
        resets: dict[tuple[str, str], list[int]] = defaultdict(list)
        for mark in self.marks["reset"]:
            resets[mark.event["group"], mark.event["topic"]].append(mark.at_ms)
        return {key: sorted(times) for key, times in resets.items()}

    @cached_property
    def assigns_ms(self) -> dict[tuple[str, Queue], list[int]]:
        """The times of assignments by group and queue."""
        return self.moves_ms("assign")

    def moves_ms(self, *kinds: str) -> dict[tuple[str, Queue], list[int]]:
        """Return the times of assignments or revocations by group and queue, in order."""
        moves: dict[tuple[str, Queue], list[int]] = defaultdict(list)
        for kind in kinds:
            for at_ms, _, event in self.marks[kind]:
                moves[event["group"], (event["topic"], event["broker"], event["queue_id"])].append(at_ms)
        return {key: sorted(times) for key, times in moves.items()}

    def shared_ms(self) -> dict[tuple[str, Queue], list[int]]:
        """Return when queues got a second reader and lost it, in turn, by group and queue.

        Ordered groups are left out, whose queues have locks, and broadcasting ones, which share all.
        """
        moves: dict[tuple[str, Queue], list[tuple[int, str, str]]] = defaultdict(list)
        for kind in ("assign", "revoke"):
            for at_ms, _, event in self.marks[kind]:
                rules = self.groups.get(event["group"])
                if rules is None or not (rules.ordered or rules.broadcast):
                    queue = (event["topic"], event["broker"], event["queue_id"])
                    moves[event["group"], queue].append((at_ms, kind, event["process"]))
        crashes = [
            (at_ms, "crash", process) for process, times in self.crashes("process").items() for at_ms, _ in times
        ]
        shared = {queue: _times_shared(sorted([*queue_moves, *crashes])) for queue, queue_moves in moves.items()}
        return {queue: times for queue, times in shared.items() if times}

    def stored(self, message: MessageId) -> list[Send]:
        """Return the sends of a message that did not fail."""
        return [send for send in self.sends_by_id.get(message, ()) if send.outcome != "failed"]

    def support(self, message: MessageId) -> list[int]:
        """Return the lines without which a delivered message would be a phantom, aborted or early."""
        stored = self.stored(message)
        if not stored:
            return [send.line for send in self.sends_by_id.get(message, ())[:1]]
        first = min(stored, key=lambda send: (max(0, send.not_before_ms or 0), send.is_half))
        lines = [first.line]
        if first.is_half:
            plain = [send for send in stored if not send.is_half]
            commits = [
                end for end in self.ends_by_id.get(message, ()) if end.decision == "commit" and end.outcome != "failed"
            ]
            if plain:
                lines.append(plain[0].line)
            elif commits:
                lines.append(min(commits, key=lambda end: end.begin_ms).line)
        return lines

    @cached_property
    def _begins_ms(self) -> Mapping[int, int]:
        return {row.line: row.begin_ms for row in self.deliveries}

    def with_crashes(self, kind: str, lines: Iterable[int]) -> set[int]:
        """Return lines with the crashes that end a delivery among them, where its end counts."""
        evidence = set(lines)
        if self._crash_lines.keys().isdisjoint(evidence):
            return evidence
        begins = [self._begins_ms[line] for line in evidence if line in self._begins_ms]
        for line in evidence & self._crash_lines.keys():
            begin_ms, crash_line = self._crash_lines[line]
            if kind == "repeat" or begins.count(begin_ms) > 1:
                evidence.add(crash_line)
        return evidence


class Marks:
    """Assignments, revocations, crashes and resets, which explain repeats, with sorted times."""

    def __init__(self, history: HistoryRows) -> None:
        self._resets = history.resets_ms
        self._moves = history.moves_ms("assign", "revoke")
        self._shared = history.shared_ms()
        self._queues = {queue: [*times] for queue, times in self._moves.items()}
        members: dict[str, set[str]] = defaultdict(set)
        for mark in history.marks["assign"]:
            members[mark.event["group"]].add(mark.event["process"])
        for row in history.deliveries:
            members[row.group].add(row.process)
            if self._is_read_by_two(row):
                insort(self._queues[row.group, row.queue], row.begin_ms)
        crashes = history.crashes("process")
        self._processes = {
            group: sorted(at_ms for process in processes for at_ms, _ in crashes.get(process, ()))
            for group, processes in members.items()
        }
        self._brokers = {broker: [at_ms for at_ms, _ in times] for broker, times in history.crashes("broker").items()}
        self._losses: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for at_ms, _, event in history.marks["crash"]:
            if event.get("broker") is not None and event.get("since_ms") is not None:
                self._losses[event["broker"]].append((at_ms, event["since_ms"]))
        self._commits = history.commits

    def _is_read_by_two(self, row: Delivery) -> bool:
        """Return whether another process reads the queue too, because one was lost without noticing.

        Both deliver what they have fetched.
        """
        times = self._shared.get((row.group, row.queue), ())
        return bool(times) and 1 in (bisect_left(times, row.begin_ms) % 2, bisect_right(times, row.begin_ms) % 2)

    def lies_between(self, row: Delivery, queues: Iterable[Queue], first_ms: int) -> bool:
        """Return whether one lies between the first delivery of a message in a group and ``row``.

        ``queues`` are those that the message was delivered from until then.
        """
        times = [
            self._processes.get(row.group, ()),
            *(self._queues.get((row.group, queue), ()) for queue in queues),
            *(self._brokers.get(queue[1], ()) for queue in queues),
            self._resets.get((row.group, row.topic), ()),
            self._resets.get((row.group, row.queue[0]), ()),
        ]
        return any(_has_one(every, first_ms, row.begin_ms) for every in times)

    def is_kept(self, row: Delivery, until_ms: int) -> bool:
        """Return whether the end of a delivery was kept before a time.

        Not if its queue went to another process meanwhile, which got what was in work.
        """
        moves = self._moves.get((row.group, row.queue), ())
        return (
            row.kept_ms < until_ms
            and not _has_one(moves, row.begin_ms + 1, row.kept_ms)
            and not self._is_read_by_two(row)
        )

    def undo(self, earlier: Delivery, row: Delivery) -> bool:
        """Return whether a reset, or a loss of power, explains that ``row`` begins after an end that was kept."""
        resets = (self._resets.get((row.group, topic), ()) for topic in {row.topic, row.queue[0], earlier.queue[0]})
        return any(_has_one(times, earlier.kept_ms, row.begin_ms) for times in resets) or any(
            earlier.kept_ms <= at_ms <= row.begin_ms and not self._has_passed(earlier, since_ms)
            for at_ms, since_ms in self._losses.get(earlier.queue[1], ())
        )

    def _has_passed(self, row: Delivery, at_ms: int) -> bool:
        """Return whether progress had passed a message at a time."""
        return any(
            commit.begin_ms <= at_ms and commit.queue_offset > row.queue_offset
            for commit in self._commits
            if (commit.group, commit.queue) == (row.group, row.queue)
        )


def _has_one(times: Sequence[int], begin_ms: int, end_ms: int) -> bool:
    """Return whether one of some sorted times lies between two."""
    after = bisect_left(times, begin_ms)
    return after < len(times) and times[after] <= end_ms


def _times_shared(moves: Sequence[tuple[int, str, str]]) -> list[int]:
    """Return when a queue got a second reader and lost it, in turn."""
    readers: Counter[str] = Counter()  # a process can have two instances of the group
    times: list[int] = []
    for at_ms, kind, process in moves:
        if kind == "assign":
            readers[process] += 1
        elif kind == "crash":
            del readers[process]
        else:
            readers[process] = max(0, readers[process] - 1)
        if len(times) % 2 != (readers.total() > 1):
            times.append(at_ms)
    return times
