"""Text from elsewhere, made safe for a terminal, a log and a spreadsheet: no command, no other order, no formula."""

from __future__ import annotations

import re
from typing import Final

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
