"""Events of a history: what a line may hold, the rows that the rules judge, and each event as a sentence.

`EVENTS` describes them. The ones that are frequent become tuples, because a million dicts would take
more than a GiB.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from sys import intern
from typing import Any, Final, NamedTuple

from librmq.config import nearest
from librmq.errors import InputError
from librmq.formatting import printable
from librmq.override import override

Queue = tuple[str, str, int]
"""The topic that is read or written, the broker, and the number of a queue."""
MessageId = str | int

ENDLESS: Final = 1 << 63
"""The end of what does not end; no time of an event is as late."""
_BATCH: Final = 512
"""Lines that are parsed together: few enough for the processor's cache."""
_PLACE: Final = ("broker", "queue_id", "queue_offset")


class EventSchema(NamedTuple):
    """What a line of a history may hold."""

    required: tuple[str, ...]
    optional: tuple[str, ...] = ()
    words: Mapping[str, Sequence[str]] = {}
    """The values of fields that take one of a few words."""
    meaning: str = ""


_QUEUE_MARK: Final = ("process", "group", "topic", "broker", "queue_id", "at_ms")
_OUTCOMES: Final = ("ok", "failed", "unknown")
EVENTS: Final[Mapping[str, EventSchema]] = {
    "send": EventSchema(
        ("process", "id", "topic", "begin_ms", "end_ms", "outcome"),
        (*_PLACE, "not_before_ms", "sharding_key", "half"),
        {"outcome": _OUTCOMES},
        "one try of a producer. `failed`: nothing may be stored. With `ok` its place too, unless it is `half` (true) "
        "or has a delivery time, `not_before_ms`. A resend is another one with the same `id`",
    ),
    "end_transaction": EventSchema(
        ("process", "id", "begin_ms", "end_ms", "decision", "outcome"),
        words={"outcome": _OUTCOMES, "decision": ("commit", "rollback")},
        meaning="a producer ends its half message",
    ),
    "discard": EventSchema(("id", "at_ms"), meaning="the broker gave a half message up"),
    "deliver": EventSchema(
        ("process", "group", "id", "topic", *_PLACE, "attempt", "begin_ms"),
        ("end_ms", "outcome", "stored_in", "kept_ms"),
        {"outcome": ("ok", "retry", "died")},
        "a listener's call, a line for each message of a batch. The first `attempt` is 0; without `end_ms` and "
        "`outcome` it still runs; `stored_in` is the retry topic that it is read from; from `kept_ms` on no kill "
        "undoes its `ok`",
    ),
    "assign": EventSchema(_QUEUE_MARK, meaning="a queue becomes the process's"),
    "revoke": EventSchema(_QUEUE_MARK, meaning="a queue is taken from the process"),
    "commit": EventSchema(("group", "topic", *_PLACE, "at_ms"), meaning="progress: the next offset to read"),
    "dead_letter": EventSchema(("group", "id", "at_ms"), meaning="the group gave the message up"),
    "reset": EventSchema(
        ("group", "topic", "at_ms"),
        meaning="also a seek, a skip, deletion by retention, and a first start that is not at the first message",
    ),
    "crash": EventSchema(
        ("at_ms",),
        ("process", "broker", "since_ms"),
        meaning="a delivery of the process without an end died then; with `since_ms` the broker's machine lost its "
        "power, and the progress since then",
    ),
    "effect": EventSchema(("name", "key", "process", "at_ms"), meaning="what must happen once"),
    "group": EventSchema(
        ("group", "topics"),
        ("ordered", "max_attempts", "selects", "broadcast"),
        meaning="at most one a group, or the same in each process's file; `selects`: ids that its filter accepts",
    ),
    "drained": EventSchema(("group", "at_ms"), meaning="nothing waits for the group any more"),
}
_NAMES: Final = frozenset(("process", "id", "topic", "broker", "group", "stored_in", "name", "key", "sharding_key"))
_COUNTS: Final = frozenset(("queue_id", "queue_offset", "attempt", "max_attempts"))
_FLAGS: Final = frozenset(("half", "ordered", "broadcast"))
_LISTS: Final = {"topics": frozenset((str,)), "selects": frozenset((str, int))}
"""Types of the items of lists."""
_INTEGERS_TOO: Final = frozenset(("id", "key"))
"""Names that may be integers."""
_LARGEST: Final = 1 << 62
_WITH_SPANS: Final = frozenset(("send", "deliver", "end_transaction"))
"""Kinds of events that last: one event begins them and another ends them."""


# ---- rows: their fields begin with those that order them


class Send(NamedTuple):
    """One try to send a message. Sends compare in the order in which the rules count them."""

    begin_ms: int
    end_ms: int
    queue: Queue | tuple[()]
    """Where the message is stored, if that is known."""
    queue_offset: int
    id_text: str
    """The message as text: this and what follows orders what is equal in all that counts, and then the line."""
    topic: str
    process: str
    is_half: bool
    line: int
    id: MessageId
    outcome: str
    not_before_ms: int | None


class Delivery(NamedTuple):
    """One call of a listener. Deliveries compare in the order in which the rules count them."""

    begin_ms: int
    end_ms: int
    queue_offset: int
    attempt: int
    is_ok: bool
    """Whether it ended well: of what is equal in all that counts, this comes last."""
    group: str
    process: str
    queue: Queue
    id_text: str
    """The message as text, as in `Send`."""
    topic: str
    line: int
    id: MessageId
    outcome: str | None
    """None while it runs."""
    kept_ms: int
    """When its end was kept, which no kill undoes then; `ENDLESS` if it was not."""


class Commit(NamedTuple):
    """Progress that a group has saved. The rows of a queue compare in the order of time."""

    begin_ms: int
    queue_offset: int
    line: int
    group: str
    queue: Queue

    @property
    def end_ms(self) -> int:
        """The same time: a commit takes none."""
        return self.begin_ms


class TransactionEnd(NamedTuple):
    """One try to decide a transaction."""

    line: int
    id: MessageId
    begin_ms: int
    end_ms: int
    decision: str
    outcome: str


class Mark(NamedTuple):
    """Any event of the other kinds, which have one time."""

    at_ms: int
    line: int
    event: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class GroupRules:
    """What the event ``group`` says of a consumer group."""

    line: int
    topics: tuple[str, ...]
    ordered: bool
    max_attempts: int | None
    selects: frozenset[MessageId] | None
    broadcast: bool


class HistoryEvents:
    """The events of one history: add all of them, then judge the rows."""

    def __init__(self) -> None:
        self.sends: list[Send] = []
        self.deliveries: list[Delivery] = []
        self.commits: list[Commit] = []
        self.ends: list[TransactionEnd] = []
        self.marks: dict[str, list[Mark]] = {kind: [] for kind, schema in EVENTS.items() if "at_ms" in schema.required}
        """The other events by their kinds."""
        self.groups: dict[str, GroupRules] = {}
        """What is said of groups, by their names."""
        self.lines = 0
        """Number of lines so far."""
        self._place: Callable[[int], str] = "line {}".format
        self._groups_of_others: frozenset[str] = frozenset()
        """Groups that earlier files describe: each process of a group does."""
        self._queues: dict[Queue, Queue] = {}

    def add(self, events: Iterable[object]) -> None:
        """Add events, one a line.

        Raises:
            InputError: One is not an event of a history; the error names its line.
        """
        self._place = "line {}".format
        for event in events:
            self.lines += 1
            self._add(event, self.lines)

    def read(self, file: Iterator[bytes], name: str) -> bool:
        """Add the lines of a file. Return whether it ends in an incomplete line, which is left out.

        Raises:
            InputError: A line is not an event of a history; the error names the file and the line in it.
        """
        start = self.lines
        self._groups_of_others = frozenset(self.groups)
        self._place = lambda line: f"{name}: line {line - start}"
        is_cut = False
        while lines := list(islice(file, _BATCH)):
            numbers: Sequence[int] = range(self.lines + 1, self.lines + len(lines) + 1)
            self.lines += len(lines)
            try:
                events = _parse(b"[" + b",".join(lines) + b"]")
            except (ValueError, RecursionError):
                events = None
            is_line_each = all(line.lstrip().startswith(b"{") and line.rstrip().endswith(b"}") for line in lines)
            if events is None or len(events) != len(lines) or not is_line_each:
                events, numbers, is_cut = _parse_lines(lines, numbers, self._place)
            for number, event in zip(numbers, events, strict=True):
                self._add(event, number)
        return is_cut

    def _add(self, event: Any, line: int) -> None:  # noqa: ANN401 (what a caller has)
        if (problem := problem_of(event)) is not None:
            raise InputError(f"{self._place(line)}: {problem}")
        kind = event["event"]
        if kind == "send":
            self.sends.append(self._send(event, line))
        elif kind == "deliver":
            self.deliveries.append(self._delivery(event, line))
        elif kind == "commit":
            queue = self._queue(event, event["topic"])
            self.commits.append(Commit(event["at_ms"], event["queue_offset"], line, intern(event["group"]), queue))
        elif kind == "end_transaction":
            times = event["begin_ms"], event["end_ms"]
            self.ends.append(TransactionEnd(line, event["id"], *times, event["decision"], event["outcome"]))
        elif kind == "group":
            self._add_group(event, line)
        else:
            self.marks[kind].append(Mark(event["at_ms"], line, event))

    def _queue(self, event: Mapping[str, Any], topic: str) -> Queue:
        """Return the queue of an event, as one object for all events of it."""
        queue = (topic, event["broker"], event["queue_id"])
        return self._queues.setdefault(queue, queue)

    def _send(self, event: Mapping[str, Any], line: int) -> Send:
        is_half, not_before_ms = event.get("half") is True, event.get("not_before_ms")
        topic, offset = intern(event["topic"]), -1
        queue: Queue | tuple[()] = ()
        if event["outcome"] == "ok" and not is_half and not_before_ms is None:
            queue, offset = self._queue(event, topic), event["queue_offset"]
        return Send(
            begin_ms=event["begin_ms"],
            end_ms=event["end_ms"],
            queue=queue,
            queue_offset=offset,
            id_text=str(event["id"]),
            topic=topic,
            process=intern(event["process"]),
            is_half=is_half,
            line=line,
            id=event["id"],
            outcome=intern(event["outcome"]),
            not_before_ms=not_before_ms,
        )

    def _delivery(self, event: Mapping[str, Any], line: int) -> Delivery:
        end_ms, outcome, stored_in = event.get("end_ms"), event.get("outcome"), event.get("stored_in")
        kept_ms = event.get("kept_ms")
        topic = intern(event["topic"])
        return Delivery(
            begin_ms=event["begin_ms"],
            end_ms=ENDLESS if end_ms is None else end_ms,
            queue_offset=event["queue_offset"],
            attempt=event["attempt"],
            is_ok=outcome == "ok",
            group=intern(event["group"]),
            process=intern(event["process"]),
            queue=self._queue(event, topic if stored_in is None else stored_in),
            id_text=str(event["id"]),
            topic=topic,
            line=line,
            id=event["id"],
            outcome=None if outcome is None else intern(outcome),
            kept_ms=ENDLESS if kept_ms is None else kept_ms,
        )

    def _add_group(self, group: Mapping[str, Any], line: int) -> None:
        name = group["group"]
        selects = group.get("selects")
        rules = GroupRules(
            line,
            tuple(group["topics"]),
            group.get("ordered") is True,
            group.get("max_attempts"),
            None if selects is None else frozenset(selects),
            group.get("broadcast") is True,
        )
        if name in self.groups:
            if name in self._groups_of_others and replace(rules, line=self.groups[name].line) == self.groups[name]:
                return
            raise InputError(
                f"{self._place(line)}: group: a second one of {name!r:.80}; expected at most one a group, "
                "or the same in the file of each process"
            )
        self.groups[name] = rules


# ---- lines


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is no JSON number")


def _parse(text: bytes) -> Any:  # noqa: ANN401 (what JSON holds)
    return json.loads(text, parse_constant=_refuse_constant)


def _parse_lines(
    lines: Sequence[bytes], numbers: Sequence[int], place: Callable[[int], str]
) -> tuple[list[object], list[int], bool]:
    """Return the values of the lines that are not empty, their numbers, and whether the last line is incomplete."""
    events: list[object] = []
    line_numbers: list[int] = []
    for number, line in zip(numbers, lines, strict=True):
        if not line.strip():
            continue
        try:
            events.append(_parse(line))
            line_numbers.append(number)
        except (ValueError, RecursionError) as error:
            if number == numbers[-1] and not line.endswith(b"\n"):
                return events, line_numbers, True
            reason = {UnicodeDecodeError: "not UTF-8", RecursionError: "nested too deep"}.get(type(error), str(error))
            raise InputError(f"{place(number)}: not JSON: {reason}") from None
    return events, line_numbers, False


def span_of(event: Mapping[str, Any]) -> tuple[int, int | None]:
    """Return begin and end of an event that has a time; the end of a delivery that still runs is None."""
    if event["event"] in _WITH_SPANS:
        return event["begin_ms"], event.get("end_ms")
    return event["at_ms"], event["at_ms"]


def place_of(event: Mapping[str, Any], *, shows_broker: bool = True) -> str:
    """Return the place that an event names, as in ``orders/broker-b/0:3`` or ``orders/0:3``, as far as it has one."""
    topic = str(event.get("stored_in") or event["topic"])
    if event.get("queue_id") is None:
        return topic
    place = f"{topic}/{event['broker']}/{event['queue_id']}" if shows_broker else f"{topic}/{event['queue_id']}"
    return place if event.get("queue_offset") is None else f"{place}:{event['queue_offset']}"


class HistoryLine(NamedTuple):
    """One line of a history: when, who, and what."""

    at_ms: int
    """Milliseconds since the start of the test."""
    who: str
    """The process or part that did it."""
    what: str
    """What it did."""

    @override
    def __str__(self) -> str:
        return f"{self.at_ms / 1000:12,.3f} s  {self.who:<16} {printable(self.what)}"


def sentence(event: Mapping[str, Any], begin_ms: int) -> str:
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


class _Field(NamedTuple):
    name: str
    is_required: bool
    types: frozenset[type]
    smallest: int | None
    """The smallest of the numbers that may stand there."""
    words: Sequence[str] | None

    def takes(self, value: Any) -> bool:  # noqa: ANN401 (what JSON holds)
        """Return whether a value may stand here."""
        if type(value) not in self.types:
            return False
        if self.words is not None:
            return value in self.words
        if self.smallest is not None:
            return bool(self.smallest <= value <= _LARGEST)
        return self.name not in _LISTS or all(type(item) in _LISTS[self.name] for item in value)

    def expected(self, value: object) -> str:
        """Return what should stand here in place of a value."""
        if self.words is not None:
            return " or ".join(self.words)
        if self.name in _LISTS:
            return "a list of texts"
        if self.name in _FLAGS:
            return "true or false"
        if self.name in _NAMES:
            return "a text"
        return "a whole number" if type(value) is not int else f"a number from {self.smallest} to {_LARGEST}"


def _field(name: str, schema: EventSchema) -> _Field:
    kinds: set[type] = {int}
    if name in schema.words:
        kinds = {str}
    elif name in _LISTS:
        kinds = {list, tuple}
    elif name in _FLAGS:
        kinds = {bool}
    elif name in _NAMES:
        kinds = {str, int} if name in _INTEGERS_TOO else {str}
    is_number = kinds == {int}
    smallest = (0 if name in _COUNTS else -_LARGEST) if is_number else None
    return _Field(name, name in schema.required, frozenset(kinds), smallest, schema.words.get(name))


_FIELDS: Final = {
    kind: tuple(_field(name, schema) for name in (*schema.required, *schema.optional))
    for kind, schema in EVENTS.items()
}


def problem_of(event: object) -> str | None:
    """Return what is wrong with an event; None if nothing is."""
    if type(event) is not dict and not isinstance(event, Mapping):
        return "expected a JSON object"
    kind = event.get("event")
    fields = _FIELDS.get(kind) if isinstance(kind, str) else None
    if fields is None:
        if "event" not in event:
            return "the field 'event' is missing"
        near = nearest(kind, EVENTS) if isinstance(kind, str) else None
        hint = f"did you mean {near!r}?" if near is not None else f"expected one of {', '.join(EVENTS)}"
        return f"unknown event {kind!r:.80}; {hint}"
    for field in fields:
        value = event.get(field.name)
        if value is None:
            if not field.is_required:
                continue
            if field.name not in event:
                return f"{kind}: the field {field.name!r} is missing"
        if not field.takes(value):
            return f"{kind}: {field.name}: expected {field.expected(value)}, found {value!r:.80}"
    problem = _contradiction(event)
    return None if problem is None else f"{kind}: {problem}"


def _contradiction(event: Mapping[str, Any]) -> str | None:
    """Return how fields of an event contradict each other; None if they do not."""
    kind, end_ms, outcome = event["event"], event.get("end_ms"), event.get("outcome")
    if kind in _WITH_SPANS and end_ms is not None and end_ms < event["begin_ms"]:
        return "time runs backwards: end_ms is before begin_ms"
    if kind == "deliver" and (end_ms is None) != (outcome is None):
        return "end_ms and outcome belong together: a delivery that still runs has neither"
    if kind == "deliver" and event.get("kept_ms") is not None and (outcome != "ok" or event["kept_ms"] < end_ms):
        return "kept_ms: expected the outcome 'ok', and no time before end_ms"
    if kind == "send" and outcome == "ok" and event.get("half") is not True and event.get("not_before_ms") is None:
        for name in _PLACE:
            if event.get(name) is None:
                return f"the outcome is 'ok', but the field {name!r} is missing"
    if kind == "crash" and event.get("process") is None and event.get("broker") is None:
        return "expected a process or a broker"
    return None
