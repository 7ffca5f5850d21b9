"""Where rows go: JSON lines for programs, tables for people."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from typing import Any, Final, Protocol, TextIO

from librmq.errors import MissingExtraError

__all__ = ["JsonLines", "Output", "complain", "json_line", "open_output", "printable"]

# What a terminal could take for a command, or show in another order than it stands; half a pair is no text.
_UNSAFE: Final = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_UNSAFE_IN_JSON: Final = re.compile(_UNSAFE.pattern.replace("\x00-\x1f", ""))
_encode: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


class Output(Protocol):
    """Takes the rows of a command."""

    def row(self, row: Mapping[str, Any]) -> None:
        """Print a row, now or when its table is full."""
        ...

    def flush(self) -> None:
        """Let programs see every row so far; a table may wait."""
        ...

    def close(self) -> None:
        """Print whatever was not printed."""
        ...


def printable(text: str) -> str:
    """Text from elsewhere, safe to show: control characters as escapes."""
    return _UNSAFE.sub(_escape, text)


def _escape(found: re.Match[str]) -> str:
    return f"\\u{ord(found[0]):04x}"


def json_line(row: Mapping[str, Any]) -> str:
    """A row as JSON on one line: Unicode as it is, but for what a terminal could take for a command."""
    return _UNSAFE_IN_JSON.sub(_escape, _encode(row))


class JsonLines:
    """One JSON object a line."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def row(self, row: Mapping[str, Any]) -> None:
        self._stream.write(json_line(row) + "\n")

    def flush(self) -> None:
        self._stream.flush()

    close = flush


def open_output(form: str | None, stream: TextIO) -> Output:
    """Output in the ``form`` asked for (``table`` or ``jsonl``), or in the one that suits ``stream``.

    `MissingExtraError` for a table without what draws it; a terminal then gets JSON lines, and a hint.
    """
    if form == "jsonl" or (form is None and not stream.isatty()):
        return JsonLines(stream)
    try:
        from librmq.cli.table import Table
    except ImportError:
        missing = MissingExtraError("a table", "cli")
        if form == "table":
            raise missing from None
        complain(f"hint: {missing}")
        return JsonLines(stream)
    return Table(stream)


def complain(message: str) -> None:
    """Say something on standard error, on as many lines as ``message`` has."""
    lines = (printable(line) for line in message.split("\n"))
    sys.stderr.write("".join(f"{line}\n" for line in lines))
    sys.stderr.flush()
