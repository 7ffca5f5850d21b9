"""Texts for people: of numbers, durations, sizes, times and ids of queues, and safe ones of what came from elsewhere.

A safe text has no command of a terminal, no other order in a log, and no formula of a spreadsheet.
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from functools import cache
from typing import Final

UNKNOWN: Final = "unknown"
NAMED: Final = 20
"""The most queues, or ranges of queue ids, that a text names."""

_OPTION: Final = re.compile(r"(?<![\w-])--?[A-Za-z][\w-]*")
_DURATIONS: Final = ((86_400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s"))


def number(value: float | None) -> str:
    """Return ``12,345``; fractions are rounded to three significant digits."""
    if value is None:
        return UNKNOWN
    return f"{value:,}" if isinstance(value, int) else f"{value:,.0f}" if abs(value) >= 100 else f"{value:,.3g}"


def sent_again(letters: int | None) -> str:
    """Return the note beside a number of dead letters: how many others were sent again; None if that is unknown."""
    if letters is None:
        return "with those that were sent again, which brokers do not note"
    return f"{number(letters)} more {'was' if letters == 1 else 'were'} sent again" if letters else ""


def duration(seconds: float | None) -> str:
    """Return ``350 ms``, ``7.2 s``, ``3 min 20 s``, ``5 h 12 min`` or ``12 d 3 h``."""
    if seconds is None:
        return UNKNOWN
    sign, seconds = "−" * (seconds < 0), abs(seconds)
    if seconds >= 60:
        rounded = round(seconds)
        for unit, name, below, below_name in _DURATIONS:
            if rounded >= unit:
                remainder = rounded % unit // below
                return f"{sign}{rounded // unit:,} {name}" + f" {remainder} {below_name}" * (remainder > 0)
    if seconds >= 1 or not seconds:
        return f"{sign}{seconds:.3g} s"
    return f"{sign}{seconds * 1000:.3g} ms" if seconds >= 0.001 else f"{sign}under 1 ms"


def size(value: float | None) -> str:
    """Return a number of bytes as ``1.5 MiB``."""
    if value is None:
        return UNKNOWN
    units = iter(("B", "KiB", "MiB", "GiB", "TiB"))
    unit = next(units)
    while value >= 1024 and unit != "TiB":
        value, unit = value / 1024, next(units)
    return f"{value:,.0f} {unit}" if value >= 10 or unit == "B" else f"{value:,.1f} {unit}"


def rate(per_s: float | None) -> str:
    """Return a rate as ``120 a second``, ``3 a minute`` or ``2 an hour``."""
    if per_s is None:
        return UNKNOWN
    for factor, name in ((1, "a second"), (60, "a minute"), (3600, "an hour")):
        if per_s * factor >= 1 or name == "an hour":
            return f"{number(float(per_s * factor))} {name}" if per_s else "none"
    raise AssertionError


def percent(share: float | None) -> str:
    """Return a share as ``3.2 %``."""
    return UNKNOWN if share is None else f"{share * 100:.3g} %"


def date_of(timestamp_ms: int, *, is_local: bool = False) -> datetime | None:
    """Return a time as a date in UTC, or in the machine's zone; None where no calendar has the time."""
    try:
        date = datetime.fromtimestamp(timestamp_ms / 1000, UTC)
        return date.astimezone() if is_local else date
    except (ValueError, OverflowError, OSError):
        return None


def moment(timestamp_ms: int | None) -> str:
    """Return a time as ``2026-11-20 08:00:00`` in UTC; a number if it is outside the calendar."""
    if timestamp_ms is None:
        return UNKNOWN
    date = date_of(timestamp_ms)
    return f"{timestamp_ms} ms" if date is None else f"{date:%Y-%m-%d %H:%M:%S}"


def exact_moment(timestamp_ms: int) -> str:
    """Return a time as ``2026-11-20 08:00:00.120 UTC``; a number if it is outside the calendar."""
    text = moment(timestamp_ms)
    return text if text.endswith("ms") else f"{text}.{timestamp_ms % 1000:03} UTC"


def span(first_ms: int | None, last_ms: int | None) -> str:
    """Return two times as ``2026-11-20 08:00 – 09:30``, with seconds if these are needed to distinguish them."""
    first, last = moment(first_ms), moment(last_ms)
    if first[:16] != last[:16]:
        first, last = first[:16], last[:16]
    return first if first == last else f"{first} – {last[11:] if first[:10] == last[:10] else last}"


def id_ranges(ids: Iterable[int]) -> str:
    """Return queue ids for people and for ``--queue``, such as ``0,3,5-9``; of many ranges the first."""
    ranges: list[list[int]] = []
    for queue_id in sorted(ids):
        if ranges and ranges[-1][1] == queue_id - 1:
            ranges[-1][1] = queue_id
        else:
            ranges.append([queue_id, queue_id])
    texts = [f"{first}" if first == last else f"{first}-{last}" for first, last in ranges[:NAMED]]
    return ",".join([*texts, *(["…"] if len(ranges) > NAMED else [])])


def short(text: str, longest: int = 64) -> str:
    """Return ``text``, with its middle left out if it is long."""
    return text if len(text) <= longest else f"{text[: longest * 2 // 3]}…{text[-(longest // 3 - 1) :]}"


def visible(text: str) -> str:
    """Return ``text`` with escape codes for characters that could hide or reorder text."""
    return "".join(
        character if unicodedata.category(character)[0] != "C" else f"\\u{ord(character):04x}" for character in text
    )


def options_unbroken(text: str) -> str:
    """Return ``text`` as HTML with a span around each option of a command, such as ``--group``.

    A browser would break a line behind the dashes. The class ``option``, which each style sheet has, forbids it. A
    character that only forbids the break would be copied with the command.
    """
    from html import escape  # loads all names of characters, which commands do without

    return _OPTION.sub(r'<span class="option">\g<0></span>', escape(text))


# ---- frames


@cache
def _libraries() -> tuple[str, ...]:
    """Return the folders of code that is not the application's."""
    import sysconfig

    names = ("stdlib", "platstdlib", "purelib", "platlib")
    folders = {os.path.join(sysconfig.get_path(name), "") for name in names}
    return (*folders, os.path.join(os.path.dirname(__file__), ""))


def innermost_frame(stack: Sequence[str]) -> str:
    """Return the innermost frame of the application's own code, or just the innermost one; empty without frames."""
    frames = (frame for frame in reversed(stack) if not frame.startswith(_libraries()))
    return next(frames, stack[-1] if stack else "")


# ---- what came from elsewhere

UNSAFE: Final = (
    "\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u2064\u2066-\u2069\ud800-\udfff\ufeff"
)
"""Control characters, marks that change the direction of what follows or have no width, halves of surrogate pairs.

Those of no width that scripts and joined pictures need, U+200C and U+200D, are not among them.
"""
_UNSAFE: Final = re.compile(f"[{UNSAFE}]")
_UNSAFE_IN_LINES: Final = re.compile("[" + UNSAFE.replace("\x00-\x1f", r"\x00-\x08\x0b-\x1f") + "]")


def printable(text: str) -> str:
    """Return ``text`` with each unsafe character as its escape, as JSON writes it."""
    return text if text.isprintable() else _UNSAFE.sub(escape, text)


def printable_lines(text: str) -> str:
    """Return ``text`` like `printable`, with its tabs and ends of lines."""
    return text if text.isprintable() else _UNSAFE_IN_LINES.sub(escape, text)


def escape(match: re.Match[str]) -> str:
    """Return the escape of the matched character."""
    return f"\\u{ord(match[0]):04x}"


# A backslash that would look like the beginning of an escape is escaped too.
_ESCAPED_IN_CELL: Final = re.compile(_UNSAFE.pattern + r"|\\(?=u[0-9a-f]{4})")
_ESCAPE: Final = re.compile(r"\\u([0-9a-f]{4})")
_FORMULA: Final = re.compile(r"(?!-[0-9]+\Z)'*[=+\-@\t\r\n]")
_GUARDED: Final = re.compile(r"'+[=+\-@\t\r\n]")


def is_safe_in_cell(text: str) -> bool:
    """Return whether a text needs no escape in a cell of CSV."""
    return (text.isascii() and text.isprintable()) or _UNSAFE.search(text) is None


def guarded(text: str) -> str:
    """Return ``text`` with a quote before it if a spreadsheet could read it as a formula."""
    return f"'{text}" if _FORMULA.match(text) else text


def unguarded(text: str) -> str:
    """Return the text that `guarded` got."""
    return text[1:] if _GUARDED.match(text) else text


def cell(text: str) -> str:
    """Return a cell of CSV: guarded, with each unsafe character as its escape."""
    escaped = text
    if "\\" not in text:  # as most are; the separators of properties are escaped without a look at each
        escaped = text.replace("\1", r"\u0001").replace("\2", r"\u0002")
    is_safe = escaped.isascii() and escaped.isprintable() and "\\u" not in text
    return guarded(escaped if is_safe else _ESCAPED_IN_CELL.sub(escape, text))


def cell_text(text: str) -> str:
    """Return the text that `cell` got."""

    def character(match: re.Match[str]) -> str:
        character = chr(int(match[1], 16))
        return character if character == "\\" or _UNSAFE.match(character) else match[0]

    return _ESCAPE.sub(character, unguarded(text))


def shown_body(body: bytes) -> str:
    """Return a body as representations show it: cut if it is long."""
    return repr(body) if len(body) <= 64 else f"{body[:48]!r}… ({len(body):,} bytes)"
