"""Events of a history: what a line may hold, and columns of the events for the checker.

`docs/histories.md` describes the events. A million of them as dicts would take more than a GiB, so each batch that is
read goes into arrays of integers at once: a name is its number in `Names`, `ABSENT` a field that is not there.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from librmq.config import nearest
from librmq.errors import InputError

Integers = NDArray[np.int64]
Table = Mapping[str, Integers]
"""The columns of a kind of event by their names; ``line`` has the numbers of the lines."""

ABSENT: Final = -(1 << 63)
"""In place of a number that an event does not have; the number of an absent name is -1."""
ENDLESS: Final = (1 << 63) - 1
"""The end of what does not end."""
_BATCH: Final = 512
"""Lines that are parsed together: few enough for the processor's cache."""

OK, FAILED, UNKNOWN = range(3)
"""Outcomes of sends and of ends of transactions."""
ENDED_OK, ENDED_RETRY, ENDED_DIED, RUNNING = range(4)
"""Outcomes of deliveries."""
COMMIT, ROLLBACK = range(2)
"""Decisions of transactions."""

_PLACE: Final = ("broker", "queue_id", "queue_offset")
_OUTCOMES: Final = {"ok": OK, "failed": FAILED, "unknown": UNKNOWN}


class _Schema(NamedTuple):
    """The fields of a kind of event."""

    required: tuple[str, ...]
    optional: tuple[str, ...] = ()
    words: Mapping[str, Mapping[str, int]] = {}
    """The values of fields that take one of a few words."""


_QUEUE_MARK: Final = _Schema(("process", "group", "topic", "broker", "queue_id", "at_ms"))
_SCHEMAS: Final[Mapping[str, _Schema]] = {
    "send": _Schema(
        ("process", "id", "topic", "begin_ms", "end_ms", "outcome"),
        (*_PLACE, "not_before_ms", "sharding_key", "half"),
        {"outcome": _OUTCOMES},
    ),
    "end_transaction": _Schema(
        ("process", "id", "begin_ms", "end_ms", "decision", "outcome"),
        words={"outcome": _OUTCOMES, "decision": {"commit": COMMIT, "rollback": ROLLBACK}},
    ),
    "discard": _Schema(("id", "at_ms")),
    "deliver": _Schema(
        ("process", "group", "id", "topic", *_PLACE, "attempt", "begin_ms"),
        ("end_ms", "outcome", "stored_in"),
        {"outcome": {"ok": ENDED_OK, "retry": ENDED_RETRY, "died": ENDED_DIED}},
    ),
    "assign": _QUEUE_MARK,
    "revoke": _QUEUE_MARK,
    "commit": _Schema(("group", "topic", *_PLACE, "at_ms")),
    "dead_letter": _Schema(("group", "id", "at_ms")),
    "reset": _Schema(("group", "topic", "at_ms")),
    "crash": _Schema(("at_ms",), ("process", "broker")),
    "effect": _Schema(("name", "key", "process", "at_ms")),
    "group": _Schema(("group", "topics"), ("ordered", "max_attempts", "selects", "broadcast")),
    "drained": _Schema(("group", "at_ms")),
}
_NAMES: Final = frozenset(("process", "id", "topic", "broker", "group", "stored_in", "name", "key", "sharding_key"))
_OF_TOPICS: Final = {"stored_in": "topic"}
_COUNTS: Final = frozenset(("queue_id", "queue_offset", "attempt", "max_attempts"))
_TIMES: Final = frozenset(("begin_ms", "end_ms", "at_ms", "not_before_ms"))
_FLAGS: Final = frozenset(("half", "ordered", "broadcast"))
_INTEGERS_TOO: Final = frozenset(("id", "key"))
"""Names that may be integers."""
_LARGEST: Final = 1 << 62
_NONE: Final = np.zeros(0, np.int64)
_REQUIRED: Final = 0
"""In place of the number of an absent field: it must be there."""


@dataclass(frozen=True, slots=True)
class GroupRules:
    """What the event ``group`` says of a consumer group."""

    line: int
    topics: tuple[str, ...]
    ordered: bool
    max_attempts: int | None
    selects: tuple[str | int, ...] | None
    broadcast: bool


class Names(dict[Any, int]):
    """Numbers of names, in the order in which they occur. A name of another type raises `TypeError`."""

    def __init__(self, *types: type) -> None:
        self._types = types

    def __missing__(self, name: object) -> int:
        if type(name) not in self._types:
            raise TypeError
        self[name] = number = len(self)
        return number


class _Field(NamedTuple):
    """How the values of a field become a column."""

    name: str
    names: str | None
    """The names whose numbers stand in the column."""
    words: Mapping[str, int] | None
    """The numbers of words; None for numbers and flags, which are of ``types``."""
    types: frozenset[type]
    absent: int

    @classmethod
    def of(cls, name: str, schema: _Schema) -> Self:
        types: frozenset[type] = frozenset((bool if name in _FLAGS else int,))
        absent = _REQUIRED
        if name in schema.optional:
            absent = ABSENT if name in _COUNTS or name in _TIMES else -1
            types |= {type(None)}
        names = _OF_TOPICS.get(name, name) if name in _NAMES else None
        return cls(name, names, schema.words.get(name), types, absent)

    def column(self, values: list[Any], names: Mapping[str, Names]) -> Integers:
        """Return the numbers of values.

        Raises:
            KeyError, TypeError, OverflowError: A value has the wrong type, or is out of range.
        """
        absent = values.count(None) if self.absent != _REQUIRED else 0
        if absent == len(values):
            return np.full(absent, self.absent)
        numbers = self.words if self.names is None else names[self.names]
        if numbers is None:
            if not self.types.issuperset(map(type, values)):
                raise TypeError
            present = [value for value in values if value is not None] if absent else values
            if min(present) < _smallest(self.name) or max(present) > _LARGEST:
                raise OverflowError
        if absent:
            encode = int if numbers is None else numbers.__getitem__
            values = [self.absent if value is None else encode(value) for value in values]
        elif numbers is not None:
            values = [*map(numbers.__getitem__, values)]
        return np.array(values, np.int64)


_FIELDS: Final = {
    event: tuple(_Field.of(name, schema) for name in (*schema.required, *schema.optional))
    for event, schema in _SCHEMAS.items()
    if event != "group"
}


class HistoryEvents:
    """The events of one history: add all of them, then take ``tables()``."""

    def __init__(self) -> None:
        self.names = {
            name: Names(str, int) if name in _INTEGERS_TOO else Names(str)
            for name in ("process", "id", "topic", "broker", "group", "name", "key", "sharding_key")
        }
        self.groups: dict[str, GroupRules] = {}
        """What is said of groups, by their names."""
        self.lines = 0
        """Number of lines so far."""
        self._place: Callable[[int], str] = "line {}".format
        self._groups_of_others: frozenset[str] = frozenset()
        """Groups that earlier files describe: each process of a group does."""
        self._columns: dict[str, dict[str, list[Integers]]] = {}
        """The parts of columns, by the kinds of events that there are."""
        self._checked: dict[str, int] = {}

    def add(self, events: Iterable[object]) -> None:
        """Add events, one a line.

        Raises:
            InputError: One is not an event of a history; the error names its line.
        """
        self._place = "line {}".format
        remaining = iter(events)
        while batch := list(islice(remaining, _BATCH)):
            numbers = range(self.lines + 1, self.lines + len(batch) + 1)
            self.lines += len(batch)
            self._extend(batch, numbers)
        self._flush()

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
            self._extend(events, numbers)
        self._flush()
        return is_cut

    def tables(self) -> dict[str, Table]:
        """Return the events by their kinds, once. Names other than ids and keys get numbers in alphabetical order."""
        ranks = {}
        for field in ("process", "topic", "broker", "group"):
            names = self.names[field]
            ranks[field] = np.full(len(names) + 1, -1)  # the last one is that of the number -1
            for rank, name in enumerate(sorted(names)):
                ranks[field][names[name]] = rank
                names[name] = rank
        tables: dict[str, Table] = {}
        for event, fields in _FIELDS.items():
            if event not in self._columns:
                tables[event] = dict.fromkeys(("line", *(field.name for field in fields)), _NONE)
                continue
            table = self._table(event, 0)
            for name, column in table.items():
                if (field := _OF_TOPICS.get(name, name)) in ranks:
                    table[name] = ranks[field][column]
            tables[event] = table
        return tables

    def _table(self, kind: str, begin: int) -> dict[str, Integers]:
        """Return the rows of a kind of event from the part ``begin`` on, which become one part."""
        table = {}
        for name, parts in self._columns[kind].items():
            if len(parts) - begin != 1:
                parts[begin:] = [np.concatenate(parts[begin:])]
            table[name] = parts[begin]
        return table

    def _extend(self, events: Sequence[Any], numbers: Sequence[int]) -> None:
        kinds: dict[str, tuple[list[Any], list[int]]] = {event: ([], []) for event in _SCHEMAS}
        try:
            for number, event in zip(numbers, events, strict=True):
                rows, lines = kinds[event["event"]]
                rows.append(event)
                lines.append(number)
            for kind, fields in _FIELDS.items():
                rows, lines = kinds[kind]
                if not rows:
                    continue
                columns = self._columns.setdefault(kind, {"line": [], **{field.name: [] for field in fields}})
                columns["line"].append(np.array(lines))
                for field in fields:
                    name = field.name
                    if field.absent == _REQUIRED:
                        values = [event[name] for event in rows]
                    else:
                        values = [event.get(name) for event in rows]
                    columns[name].append(field.column(values, self.names))
        except (KeyError, TypeError, AttributeError, OverflowError):
            self._refuse(zip(numbers, events, strict=True))
            raise
        for group, number in zip(*kinds["group"], strict=True):
            self._add_group(group, number)

    def _refuse(self, events: Iterable[tuple[int, object]]) -> None:
        """Raise the error of the first event that is wrong."""
        for number, event in events:
            if (problem := problem_of(event)) is not None:
                raise InputError(f"{self._place(number)}: {problem}")

    def _add_group(self, group: Mapping[str, Any], line: int) -> None:
        self._refuse([(line, group)])
        name = group["group"]
        selects = group.get("selects")
        rules = GroupRules(
            line,
            tuple(group["topics"]),
            group.get("ordered") is True,
            group.get("max_attempts"),
            None if selects is None else tuple(selects),
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
        self.names["group"][name]

    def _flush(self) -> None:
        """Check the numbers of what was added, and fields against each other.

        Raises:
            InputError: An event is wrong; the error names the first one.
        """
        problems = []
        for kind, columns in self._columns.items():
            begin = self._checked.get(kind, 0)
            if len(columns["line"]) == begin:
                continue  # nothing was added
            table = self._table(kind, begin)
            self._checked[kind] = len(columns["line"])
            problems += [(int(table["line"][row]), f"{kind}: {problem}") for row, problem in _problems(kind, table)]
        if problems:
            line, problem = min(problems)
            raise InputError(f"{self._place(line)}: {problem}")


def _problems(kind: str, table: Table) -> Iterator[tuple[int, str]]:
    """Yield for each check the first row that it refuses, and why."""
    checks: list[tuple[NDArray[np.bool_], str]] = []
    if "end_ms" in table:
        is_over = table["end_ms"] != ABSENT
        checks.append(
            (is_over & (table["end_ms"] < table["begin_ms"]), "time runs backwards: end_ms is before begin_ms")
        )
        if kind == "deliver":
            problem = "end_ms and outcome belong together: a delivery that still runs has neither"
            checks.append((is_over != (table["outcome"] >= 0), problem))
    if kind == "send":
        needs_place = (table["outcome"] == OK) & (table["half"] != 1) & (table["not_before_ms"] == ABSENT)
        checks += [
            (needs_place & (table[name] < 0), f"the outcome is 'ok', but the field {name!r} is missing")
            for name in _PLACE
        ]
    if kind == "crash":
        checks.append(((table["process"] < 0) & (table["broker"] < 0), "expected a process or a broker"))
    for is_wrong, problem in checks:
        if is_wrong.any():
            yield int(np.argmax(is_wrong)), problem


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
    kept: list[int] = []
    for number, line in zip(numbers, lines, strict=True):
        if not line.strip():
            continue
        try:
            events.append(_parse(line))
            kept.append(number)
        except (ValueError, RecursionError) as error:
            if number == numbers[-1] and not line.endswith(b"\n"):
                return events, kept, True
            reason = {UnicodeDecodeError: "not UTF-8", RecursionError: "nested too deep"}.get(type(error), str(error))
            raise InputError(f"{place(number)}: not JSON: {reason}") from None
    return events, kept, False


def span_of(event: Mapping[str, Any]) -> tuple[int, int | None]:
    """Return begin and end of an event that has a time; the end of a delivery that still runs is None."""
    if "begin_ms" in _SCHEMAS[event["event"]].required:
        return event["begin_ms"], event.get("end_ms")
    return event["at_ms"], event["at_ms"]


def problem_of(event: object) -> str | None:
    """Return what is wrong with an event; None if nothing is."""
    if not isinstance(event, dict):
        return "expected a JSON object"
    kind = event.get("event")
    schema = _SCHEMAS.get(kind) if isinstance(kind, str) else None
    if schema is None or not isinstance(kind, str):
        if "event" not in event:
            return "the field 'event' is missing"
        near = nearest(kind, _SCHEMAS) if isinstance(kind, str) else None
        hint = f"did you mean {near!r}?" if near is not None else f"expected one of {', '.join(_SCHEMAS)}"
        return f"unknown event {kind!r:.80}; {hint}"
    for name in (*schema.required, *schema.optional):
        value = event.get(name)
        if value is None and name not in schema.required:
            continue
        if name not in event:
            return f"{kind}: the field {name!r} is missing"
        if (expected := _expected(name, value, schema)) is not None:
            return f"{kind}: {name}: expected {expected}, found {value!r:.80}"
    return None


def _expected(name: str, value: object, schema: _Schema) -> str | None:
    """Return what should stand in a field in place of ``value``; None if ``value`` may."""
    if name in schema.words:
        return None if isinstance(value, str) and value in schema.words[name] else " or ".join(schema.words[name])
    if name in ("topics", "selects"):
        types = (str, int) if name == "selects" else (str,)
        is_list = isinstance(value, list | tuple) and all(type(item) in types for item in value)
        return None if is_list else "a list of texts"
    if name in _FLAGS:
        return None if isinstance(value, bool) else "true or false"
    if name in _NAMES:
        is_name = type(value) is str or (name in _INTEGERS_TOO and type(value) is int)
        return None if is_name else "a text"
    if type(value) is not int:
        return "a whole number"
    smallest = _smallest(name)
    return None if smallest <= value <= _LARGEST else f"a number from {smallest} to {_LARGEST}"


def _smallest(name: str) -> int:
    """Return the smallest number that may stand in a field."""
    return 0 if name in _COUNTS else -_LARGEST


# ---- queues that two processes read

_Queue = tuple[str, str, str, int]
"""A group, and a queue that it reads."""


class SharedQueues:
    """Queues that two processes read at once, because one was lost without noticing.

    Both deliver what they have fetched. So with each delivery from such a queue a recorder says who reads it: `marks`.
    """

    def __init__(self, events: Iterable[Mapping[str, Any]], is_ordered: Callable[[str], bool]) -> None:
        """Find them in ``events``, of which assignments, revocations and crashes count.

        Queues of ordered groups, which ``is_ordered(group)`` tells, have locks.
        """
        moves: dict[_Queue, list[tuple[int, str, str]]] = defaultdict(list)
        crashes = []
        for event in events:
            kind = event["event"]
            if kind in ("assign", "revoke"):
                moves[_queue_of(event)].append((event["at_ms"], kind, event["process"]))
            elif kind == "crash" and "process" in event:
                crashes.append((event["at_ms"], kind, event["process"]))
        self._times: dict[_Queue, list[tuple[int, float]]] = {}
        for queue, queue_moves in moves.items():
            times = _times_shared(sorted([*queue_moves, *crashes]))
            if times and not is_ordered(queue[0]):
                self._times[queue] = list(zip(times[::2], [*times[1::2], float("inf")], strict=False))

    def marks(self, deliveries: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield the events that a process reads a queue, for deliveries from those that another process reads too."""
        for delivery in deliveries if self._times else ():
            queue, begin_ms = _queue_of(delivery), delivery["begin_ms"]
            if any(begin <= begin_ms <= end for begin, end in self._times.get(queue, ())):
                fields = dict(zip(("group", "topic", "broker", "queue_id"), queue, strict=True))
                yield {"event": "assign", "process": delivery["process"], **fields, "at_ms": begin_ms}


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


def _queue_of(event: Mapping[str, Any]) -> _Queue:
    return event["group"], event.get("stored_in") or event["topic"], event["broker"], event["queue_id"]
