"""Output of rows: JSON lines for programs, tables for people."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from typing import Any, Final, Protocol, TextIO

from librmq.errors import MissingExtraError
from librmq.message.printable import UNSAFE, escape, printable

__all__ = ["JsonLines", "Output", "complain", "json_line", "open_output"]

DAMAGED: Final = 1
"""Exit status: the store is damaged."""
BAD_INPUT: Final = 2
"""Exit status: bad usage or bad input."""
INTERRUPTED: Final = 130
"""Exit status: ended by Ctrl-C."""

_UNSAFE_IN_JSON: Final = re.compile("[" + UNSAFE.replace("\x00-\x1f", "") + "]")  # JSON itself escapes those
_encode: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


class Output(Protocol):
    """Receiver of a command's rows."""

    def row(self, row: Mapping[str, Any]) -> None:
        """Print a row, now or when its table is full."""
        ...

    def flush(self) -> None:
        """Pass on every row so far; a table may wait until it is full."""
        ...

    def close(self) -> None:
        """Print all remaining rows."""
        ...


def json_line(row: Mapping[str, Any]) -> str:
    """Return a row as JSON on one line, with characters escaped that could control a terminal."""
    return _UNSAFE_IN_JSON.sub(escape, _encode(row))


class JsonLines:
    """Output with one JSON object on each line."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def row(self, row: Mapping[str, Any]) -> None:
        """Print a row."""
        self._stream.write(json_line(row) + "\n")

    def flush(self) -> None:
        """Pass on every row so far."""
        self._stream.flush()

    close = flush


def open_output(form: str | None, stream: TextIO) -> Output:
    """Return output in ``form`` (``table`` or ``jsonl``), or without one in the form that suits ``stream``.

    If the extra for tables is missing, a terminal gets JSON lines and a hint.

    Raises:
        MissingExtraError: The form is ``table``, and the extra for tables is missing.
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
    """Print a message on standard error, on as many lines as it has."""
    lines = (printable(line) for line in message.split("\n"))
    sys.stderr.write("".join(f"{line}\n" for line in lines))
    sys.stderr.flush()
