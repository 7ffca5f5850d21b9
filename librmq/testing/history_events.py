"""Events of a history: what a line may hold, and columns of the events for the checker.

`docs/histories.md` describes the events. A million of them as dicts would take more than a GiB, so each batch that is
read goes into arrays of integers at once: a name is its number in `Names`, `ABSENT` a field that is not there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, NamedTuple

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
_ROWS: Final = 1 << 14
"""Events of a kind that become columns together."""

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
        fields = {
            event: ("line", *schema.required, *schema.optional)
            for event, schema in _SCHEMAS.items()
            if event != "group"
        }
        self._values: dict[str, dict[str, list[Any]]] = {
            event: {name: [] for name in names} for event, names in fields.items()
        }
        self._columns: dict[str, dict[str, list[Integers]]] = {
            event: {name: [] for name in names} for event, names in fields.items()
        }

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
        self._place = lambda line: f"{name}: line {line - start}"
        is_cut = False
        while lines := list(islice(file, _BATCH)):
            numbers: Sequence[int] = range(self.lines + 1, self.lines + len(lines) + 1)
            self.lines += len(lines)
            try:
                events = _parse(b"[" + b",".join(lines) + b"]")
            except (ValueError, RecursionError):
                events = None
            if events is None or len(events) != len(lines):
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
        for event, columns in self._columns.items():
            table = {name: np.concatenate(parts) if parts else _NONE for name, parts in columns.items()}
            for name, column in table.items():
                if (field := _OF_TOPICS.get(name, name)) in ranks:
                    table[name] = ranks[field][column]
            tables[event] = table
        self._columns.clear()
        return tables

    def _extend(self, events: Sequence[Any], numbers: Sequence[int]) -> None:
        kinds: dict[str, tuple[list[Any], list[int]]] = {event: ([], []) for event in _SCHEMAS}
        try:
            for number, event in zip(numbers, events, strict=True):
                rows, lines = kinds[event["event"]]
                rows.append(event)
                lines.append(number)
            for kind, columns in self._values.items():
                rows, lines = kinds[kind]
                if rows:
                    columns["line"] += lines
                    for name in _SCHEMAS[kind].required:
                        columns[name] += [event[name] for event in rows]
                    for name in _SCHEMAS[kind].optional:
                        columns[name] += [event.get(name) for event in rows]
        except (KeyError, TypeError, AttributeError):
            self._refuse(zip(numbers, events, strict=True))
            raise
        for group, number in zip(*kinds["group"], strict=True):
            self._add_group(group, number)
        for kind, columns in self._values.items():
            if len(columns["line"]) >= _ROWS:
                self._append(kind, columns)

    def _refuse(self, events: Iterable[tuple[int, object]]) -> None:
        """Raise the error of the first event that is wrong."""
        for number, event in events:
            if (problem := problem_of(event)) is not None:
                raise InputError(f"{self._place(number)}: {problem}")

    def _add_group(self, group: Mapping[str, Any], line: int) -> None:
        self._refuse([(line, group)])
        name = group["group"]
        if name in self.groups:
            raise InputError(f"{self._place(line)}: group: a second one of {name!r:.80}; expected at most one a group")
        selects = group.get("selects")
        self.groups[name] = GroupRules(
            line,
            tuple(group["topics"]),
            group.get("ordered") is True,
            group.get("max_attempts"),
            None if selects is None else tuple(selects),
            group.get("broadcast") is True,
        )
        self.names["group"][name]

    def _flush(self) -> None:
        for kind, values in self._values.items():
            if values["line"]:
                self._append(kind, values)

    def _append(self, kind: str, values: dict[str, list[Any]]) -> None:
        """Make columns of the values of a kind of event."""
        schema = _SCHEMAS[kind]
        columns: dict[str, Integers] = {}
        try:
            columns = {name: self._column(name, values[name], schema) for name in ("line", *schema.required)}
            columns |= {name: self._optional_column(name, values[name], schema) for name in schema.optional}
            is_refused = _is_wrong(kind, columns)
        except (KeyError, TypeError, OverflowError):
            is_refused = True
        if is_refused:
            names = [name for name in values if name != "line"]
            rows = (
                {"event": kind, **dict(zip(names, row, strict=True))}
                for row in zip(*(values[name] for name in names), strict=True)
            )
            self._refuse(zip(values["line"], rows, strict=True))
        for name, column in columns.items():
            self._columns[kind][name].append(column)
            values[name].clear()

    def _column(self, name: str, values: Sequence[Any], schema: _Schema) -> Integers:
        if name in _NAMES:
            numbers = self.names[_OF_TOPICS.get(name, name)]
            return np.fromiter(map(numbers.__getitem__, values), np.int64, len(values))
        if name in schema.words:
            return np.fromiter(map(schema.words[name].__getitem__, values), np.int64, len(values))
        if {*map(type, values)} != {bool if name in _FLAGS else int}:
            raise TypeError
        return np.array(values, np.int64)

    def _optional_column(self, name: str, values: Sequence[Any], schema: _Schema) -> Integers:
        absent = values.count(None)
        if absent == 0:
            return self._column(name, values, schema)
        column = np.full(len(values), ABSENT if name in _COUNTS or name in _TIMES else -1)
        if absent < len(values):
            column[[value is not None for value in values]] = self._column(
                name, [value for value in values if value is not None], schema
            )
        return column


def _is_wrong(kind: str, columns: Table) -> bool:
    """Return whether fields of one of the events contradict each other, or a number is negative."""
    for name, column in columns.items():
        if name in _COUNTS or name in _TIMES:
            smallest = 0 if name in _COUNTS else -_LARGEST
            if np.any(column > _LARGEST) or np.any((column < smallest) & (column != ABSENT)):
                return True
    if kind == "deliver":
        is_running = columns["end_ms"] == ABSENT
        if np.any(is_running != (columns["outcome"] == -1)):
            return True
        return bool(np.any(~is_running & (columns["end_ms"] < columns["begin_ms"])))
    if kind == "send":
        needs_place = (columns["outcome"] == OK) & (columns["half"] != 1) & (columns["not_before_ms"] == ABSENT)
        lacks_place = (columns["broker"] == -1) | (columns["queue_id"] == ABSENT) | (columns["queue_offset"] == ABSENT)
        if np.any(needs_place & lacks_place):
            return True
    if "end_ms" in columns:
        return bool(np.any(columns["end_ms"] < columns["begin_ms"]))
    return kind == "crash" and bool(np.any((columns["process"] == -1) & (columns["broker"] == -1)))


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
    return _contradiction(kind, event)


def _contradiction(kind: str, event: Mapping[str, Any]) -> str | None:
    begin_ms, end_ms = event.get("begin_ms"), event.get("end_ms")
    if begin_ms is not None and end_ms is not None and end_ms < begin_ms:
        return f"{kind}: time runs backwards: end_ms is {end_ms}, before begin_ms, which is {begin_ms}"
    if kind == "deliver" and (end_ms is None) != (event.get("outcome") is None):
        return "deliver: end_ms and outcome belong together: a delivery that still runs has neither"
    if kind == "send" and event["outcome"] == "ok" and not event.get("half") and event.get("not_before_ms") is None:
        for name in _PLACE:
            if event.get(name) is None:
                return f"send: the outcome is 'ok', but the field {name!r} is missing"
    if kind == "crash" and event.get("process") is None and event.get("broker") is None:
        return "crash: expected a process or a broker"
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
    if type(value) is not int or not -_LARGEST <= value <= _LARGEST:
        return "a whole number"
    return "a number that is not negative" if name in _COUNTS and value < 0 else None
