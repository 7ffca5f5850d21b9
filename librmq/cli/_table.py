"""Tables on a terminal, drawn by rich, the extra ``cli``."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Set
from itertools import chain
from typing import Any, Final, Literal, TextIO

import rich.box
import rich.console
import rich.table
import rich.text

from librmq.formatting import date_of, duration, printable, size
from librmq.override import override

Row = Mapping[str, Any]
Column = str | tuple[str, str | Callable[[Row], object]]
"""A field, or a title with a field or with a function of the row."""

_ROWS: Final = 500
_WIDTH_OF_FILES: Final = 10_000  # nothing is folded
_LONGEST_CELL: Final = 200
_LONGEST_TEXT: Final = 10_000
_GAP: Final = 3
"""Cells between two columns."""
_LEAST_TEXT: Final = 8
_LEAST_BODY: Final = 18
_NARROW: Final = 135
_WIDEST_RECORD: Final = 80
"""Cells of a single row that has no declared columns; a wider one is a list of its fields, on any terminal."""
_ON_ONE_LINE: Final = frozenset(("body", "stored", "when", "min", "max", "oldest", "due"))


def local_time(time_ms: int) -> str | int:
    """Return a time in the machine's zone, which it names; the number where no calendar has the time."""
    date = date_of(time_ms, is_local=True)
    if date is None:
        return time_ms
    text = date.isoformat(" ", "milliseconds")
    return f"{text.removesuffix('+00:00')}Z" if text.endswith("+00:00") else text


def _time(name: str) -> Callable[[Row], object]:
    def show(row: Row) -> object:
        time_ms = row.get(name)
        return local_time(time_ms) if isinstance(time_ms, int) else time_ms

    return show


def _part_of_time(name: str, begin: int, end: int) -> Callable[[Row], object]:
    return lambda row: str(_time(name)(row) or "")[begin:end]


def _place(row: Row) -> str:
    return f"{row.get('topic')}:{row.get('queue_id')}:{row.get('queue_offset')}"


def _queue(row: Row) -> str:
    return f"{row.get('topic')}:{row.get('queue_id')}"


def _known(name: str, text_of: Callable[[Any], str], otherwise: str) -> Callable[[Row], str]:
    """Return the function that shows a field, or says what it means that there is none."""
    return lambda row: otherwise if row.get(name) is None else text_of(row[name])


def _duration(name: str) -> Callable[[Row], str]:
    return _known(name, duration, "never, or unknown")


def _rounded(name: str) -> Callable[[Row], str]:
    return _known(name, "{:,.1f}".format, "unknown")


def _size(name: str) -> Callable[[Row], object]:
    return lambda row: size(row.get(name))


def _unread_by(row: Row) -> str:
    return ", ".join(group or "delay levels" for group in row["unread_by"])


def _property(name: str) -> Callable[[Row], object]:
    return lambda row: row.get("properties", {}).get(name)


def _drained(row: Row) -> str:
    if row["consumed_per_s"] is None:
        return "unknown"
    return "never" if row["drain_s"] is None else duration(row["drain_s"])


def _titled(column: Column) -> tuple[str, Callable[[Row], object]]:
    """Return the title of a column, and the function that gets its cell of a row; fields of times are in ms."""
    title, field = (column, column) if isinstance(column, str) else column
    if not isinstance(field, str):
        return title, field
    title = title.removesuffix("_timestamp_ms").removesuffix("_ms").replace("_", " ")
    is_time = field.endswith("_ms") or field == "store_timestamp"
    return title, _time(field) if is_time else lambda row: row.get(field)


_QUEUE: Final[list[Column]] = ["topic", ("queue", "queue_id")]
_COLUMNS: Final[dict[str, list[Column]]] = {
    "message": [
        ("physical offset", "phys"), "size", *_QUEUE, "queue_offset", ("stored", "store_timestamp"),
        ("tags", _property("TAGS")), ("keys", _property("KEYS")), ("unique id", _property("UNIQ_KEY")),
        ("checksum", lambda row: "right" if row.get("crc_ok") else "WRONG"),
    ],
    "shown": [
        *_QUEUE, ("offset", "queue_offset"), ("stored", "store_timestamp"), ("tags", _property("TAGS")),
        ("keys", _property("KEYS")),
        ("id", lambda row: row.get("dispatch_uniq_key") or row.get("msg_id")), "body",
    ],
    "shown, narrow": [
        ("place", _place), ("stored", _part_of_time("store_timestamp", 5, 19)), ("tags", _property("TAGS")),
        ("keys", _property("KEYS")), "body",
    ],
    "lag, narrow": [
        "group", ("queue", _queue), "lag",
        ("oldest", _part_of_time("oldest_timestamp_ms", 0, 19)),
    ],
    "topics, narrow": [
        "topic", "kind", "queues", "messages",
        ("min", _part_of_time("min_timestamp_ms", 0, 16)),
        ("max", _part_of_time("max_timestamp_ms", 0, 16)),
    ],
    "topics, narrowest": ["topic", "kind", "queues", "messages", ("max", _part_of_time("max_timestamp_ms", 0, 10))],
    "event, narrow": [
        ("when", _part_of_time("at_ms", 5, 19)), "event", "group", ("place", _place), "note",
    ],
    "progress, narrow": [
        "source", ("at", _part_of_time("at_ms", 5, 19)), "group", ("queue", _queue), ("offset", "queue_offset"),
        "before",
    ],
    "progress, narrowest": ["source", "group", ("queue", _queue), ("offset", "queue_offset")],
    "blank": [("physical offset", "phys"), "size", ("", lambda row: "end of file")],
    "cq": [
        ("queue offset", "offset"), ("physical offset", "phys"), "size", ("tags code", "tags_code_hex"),
        ("extension", lambda row: row.get("ext", {}).get("bitmap_hex")),
    ],
    "queue": [*_QUEUE, "min_offset", "max_offset", ("log up to", "max_physic_offset")],
    "finding": ["severity", "finding", ("about", "subject"), "what", "next"],
    "event": [("when", "at_ms"), "event", "group", *_QUEUE, ("offset", "queue_offset"), "note"],
    "event, several": [
        ("message", "unique_key"), ("when", "at_ms"), "event", "group",
        ("queue", _place), "note",
    ],
    "scenario": [
        "scenario", ("drained in", _duration("drain_s")), ("at best", _duration("low_s")),
        ("at worst", _duration("high_s")), ("a new message waits", _duration("new_wait_s")),
        ("in the best queue", _duration("shortest_new_wait_s")),
        ("speed-up", lambda row: "" if row.get("speed_up") is None else f"{row['speed_up']:.2f}x"),
        "bound_by", "advice",
    ],
    "rate": [
        "group", "topic", ("over", _duration("seconds")), ("in/s", _rounded("stored_per_s")),
        ("out/s", _rounded("consumed_per_s")), ("waiting", "lag"), ("gone in", _drained),
    ],
    "group": [
        "group", "lag", ("in/s", _rounded("stored_per_s")), ("out/s", _rounded("consumed_per_s")),
        ("gone in", _drained), "instances",
    ],
    "instance": ["instance", "group", "busy", "threads", "queues", "held", "state"],
    "listener": [
        ("message", lambda row: row["keys"] or row["message_id"]), ("for", _duration("for_s")), ("stands at", "place"),
        "group", "thread",
    ],
    "gap": [("physical offset", "phys"), "size", "file", "what"],
    "disk": [
        ("log", _size("log_bytes")), ("queues", _size("queue_bytes")), ("index", _size("index_bytes")),
        ("timers", _size("timer_bytes")), ("others", _size("other_bytes")), ("allocated", _size("allocated_bytes")),
        ("disk used", lambda row: f"{row['used_ratio']:.1%}"),
    ],
    "threshold": [("at", lambda row: f"{row['ratio']:.0%}"), ("bytes left", _size("free_bytes")), "effect"],
    "topic": ["topic", "kind", "messages", ("bytes", _size("bytes")), ("unread", _size("unread_bytes"))],
    "file": [
        "file", ("ended", "end_timestamp_ms"), ("age", _duration("age_s")), ("deleted at", "delete_at_ms"),
        ("unread by", _unread_by), "why",
    ],
    "file, narrow": ["file", ("unread by", _unread_by), "why"],
    "start": [
        "version", "broker", "librmq", "closed_cleanly", "condition", "recovery_file",
        ("to read", _size("recovery_bytes")), ("read in a second", _size("read_bytes_per_s")),
        ("time to read", _duration("read_s")), "log_end", ("cut by the broker", _size("cut_bytes")), "recover_cuts",
    ],
    "reason": ["opener", "verdict", "file", "what", "next"],
}  # fmt: skip
"""Columns of the kinds of rows; other rows have a column for each field."""
_BY_FIELD: Final = {
    "body": "shown",
    "max_physic_offset": "queue",
    "finding": "finding",
    "consumer_offset": "lag",
    "event": "event",
    "scenario": "scenario",
    "consumed_per_s": "rate",
    "max_timestamp_ms": "topics",
    "source": "progress",
}
"""What rows with a field are."""
_WHOLE_NAMES: Final = {
    "progress": frozenset(["group", "queue"]), "topics": frozenset(["topic"]), "topic": frozenset(["topic"]),
    "file": frozenset(["file"]), "damage": frozenset(["file"]), "cut": frozenset(["file"]), "gap": frozenset(["file"]),
}  # fmt: skip
"""Columns with names that are not broken, by the kind of rows."""
_PARAGRAPHS: Final = frozenset(("finding", "reason"))
"""Kinds of rows that end with sentences, which a narrow terminal shows below each other."""
_COMMAND: Final = re.compile(r"(?<![`\w])(?=`?librmq [a-z-]+ )")
"""Before a command in the text of a next step."""
_STYLES: Final = {
    "error": "bold red", "WRONG": "bold red", "dead": "red",
    "warning": "yellow", "not_passed": "yellow", "info": "cyan",
}  # fmt: skip
"""Colours of whole cells; NO_COLOR switches all styles off."""
# Rows whose main content is a list: shown as a heading, then the list's rows.
_LISTS: Final = {"disk": ("thresholds", "threshold"), "verify": ("damage", "damage"), "store": ("queues", "queue")}


class _Console(rich.console.Console):
    @override
    def on_broken_pipe(self) -> None:
        """Leave a broken pipe to the command; rich would end the process with status 1."""
        raise BrokenPipeError


class Table:
    """Output that draws rows as tables, some hundreds at a time; rows of another type begin another table."""

    def __init__(self, stream: TextIO) -> None:
        width = None if stream.isatty() or os.environ.get("COLUMNS") else _WIDTH_OF_FILES
        system: Literal["auto"] | None = None if os.environ.get("NO_COLOR") else "auto"  # rich would keep bold
        self._console = _Console(
            file=stream, width=width, highlight=False, markup=False, emoji=False, color_system=system
        )
        self._kind = ""
        self._rows: list[Row] = []
        self._is_begun = False

    def row(self, row: Row) -> None:
        """Take a row; a full table is drawn."""
        named = next((kind for field, kind in _BY_FIELD.items() if field in row), "other")
        kind = named if named == "shown" else str(row.get("type") or named)
        if kind in _LISTS:
            self._add_list(kind, row)
        else:
            self._add_row(kind, row)

    def _add_list(self, kind: str, row: Row) -> None:
        name, kind_of_rows = _LISTS[kind]
        others = "cut", "recoverable"
        scalars = {key: value for key, value in row.items() if key not in (name, *others, "topic_queue_table")}
        self._add_row(kind if kind in _COLUMNS else "rest", scalars)
        for item in row.get(name, ()):
            self._add_row(kind_of_rows, item)
        for kind_of_others in others:
            for item in row.get(kind_of_others, ()):
                self._add_row(kind_of_others, item)

    def _add_row(self, kind: str, row: Row) -> None:
        if kind != self._kind or len(self._rows) >= _ROWS:
            self.close()
            self._kind = kind
        self._rows.append(row)

    def flush(self) -> None:
        """A table is drawn when it is full."""

    def draw(self) -> None:
        """Draw the rows so far, below what was drawn before."""
        self._draw(header=not self._is_begun)

    def close(self) -> None:
        """Draw the remaining rows."""
        self._draw(header=True)

    def _draw(self, *, header: bool) -> None:
        rows, self._rows = self._rows, []
        if not rows:
            return
        self._is_begun = True
        kind = self._kind
        messages = {row.get("unique_key") for row in rows} - {None}
        if kind == "event" and len(messages) > 1:
            kind = "event, several"
        is_narrow = self._console.width < _NARROW and f"{kind}, narrow" in _COLUMNS
        unbroken = _ON_ONE_LINE | _WHOLE_NAMES.get(kind, frozenset())
        longest = _LONGEST_TEXT if kind in _PARAGRAPHS else _LONGEST_CELL
        for form in (f"{kind}, narrow", f"{kind}, narrowest", kind) if is_narrow else (kind,):
            declared = _COLUMNS.get(form)
            if declared is None and form != kind:
                continue
            columns = [_titled(column) for column in declared or dict.fromkeys(chain(*rows))]
            titles = [title for title, _ in columns]
            values = [[show(row) for _, show in columns] for row in rows]
            cells = [
                [rich.text.Text(cell, _STYLES.get(cell, "")) for cell in (_cell(value, longest) for value in line)]
                for line in values
            ]
            numbers = [all(isinstance(line[place], int) for line in values) for place in range(len(titles))]
            widths = self._widths(titles, cells, numbers, unbroken)
            if widths is not None:
                break
        is_wide = (
            len(rows) == 1
            and (declared is None or kind == "start")
            and sum(widths or ()) + _GAP * len(titles) > _WIDEST_RECORD
        )
        if widths is None or is_wide:
            self._draw_lists(titles, cells)
            return
        if kind in _PARAGRAPHS and any(line[-1].cell_len > widths[-1] for line in cells):
            for line in cells:
                self._draw_finding(line)
            return
        table = rich.table.Table(box=rich.box.SIMPLE_HEAD if header else None, pad_edge=False, show_header=header)
        for title, is_number, width in zip(titles, numbers, widths, strict=True):
            overflow: Literal["ellipsis", "fold"] = "ellipsis" if title in unbroken else "fold"
            table.add_column(
                title, justify="right" if is_number else "left", overflow=overflow, width=width,
                no_wrap=title in unbroken,
            )  # fmt: skip
        for drawn in cells:
            table.add_row(*drawn)
        self._console.print(table)

    def _widths(
        self, titles: list[str], cells: list[list[rich.text.Text]], numbers: list[bool], unbroken: Set[str]
    ) -> list[int] | None:
        """Return the width of each column, None if they do not fit; columns in ``unbroken`` are not broken."""
        widths, ideal = [], []
        for at, title in enumerate(titles):
            longest = max(line[at].cell_len for line in cells)
            word = max(rich.text.Text(word).cell_len for word in (title or " ").split(" "))
            is_whole = numbers[at] or (title in unbroken and title != "body")
            min_width = _LEAST_BODY if title == "body" else _LEAST_TEXT
            widths.append(max(word, longest if is_whole else min(longest, min_width)))
            ideal.append(max(longest, len(title)))
        left = self._console.width - sum(widths) - _GAP * len(titles)
        if left < 0:
            return None
        needs = sorted((want - width, at) for at, (want, width) in enumerate(zip(ideal, widths, strict=True)))
        for place, (need, at) in enumerate(needs):  # a fair share each; what one does not need is for the others
            more = min(need, left // (len(needs) - place))
            widths[at] += more
            left -= more
        return widths

    def _draw_finding(self, cells: list[rich.text.Text]) -> None:
        """Draw a finding as paragraphs, with each command in a line of its own, to be copied as it is."""
        *heading, what, step = cells
        self._console.print(rich.text.Text("  ").join(heading))
        self._console.print(what)
        for part in filter(None, map(str.strip, _COMMAND.split(step.plain))):
            self._console.print(part, soft_wrap=part.startswith(("librmq ", "`librmq ")))
        self._console.print()

    def _draw_lists(self, titles: list[str], cells: list[list[rich.text.Text]]) -> None:
        for line in cells:
            table = rich.table.Table(box=None, pad_edge=False, show_header=False)
            table.add_column(no_wrap=True, style="bold")
            table.add_column(overflow="fold")
            for title, cell in zip(titles, line, strict=True):
                table.add_row(title, cell)
            self._console.print(table)
            self._console.print()


def _cell(value: object, longest: int) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{round(value, 6):.4g}"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return printable(text if len(text) <= longest else f"{text[:longest]}…")
