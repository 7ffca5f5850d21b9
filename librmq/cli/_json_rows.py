"""Rows of input: JSON objects on standard input, a line each."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from typing import Any, Final

from librmq.errors import InputError

Row = dict[str, Any]

_LONGEST_LINE: Final = 64 << 20


def parse_object(text: str | bytes) -> Row:
    """Return a JSON object.

    Raises:
        InputError: The text is none.
    """
    try:
        value = json.loads(text, parse_constant=refuse_constant)
    except RecursionError:
        raise InputError("not JSON: nested too deep") from None
    except UnicodeDecodeError:
        raise InputError("not JSON: not UTF-8") from None
    except json.JSONDecodeError as error:
        raise InputError(f"not JSON: {error.msg} at character {error.pos}") from None
    except ValueError as error:
        raise InputError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InputError("expected a JSON object")
    return value


def refuse_constant(name: str) -> object:
    """Refuse a number of Python that JSON does not have, such as NaN."""
    raise ValueError(f"{name} is no JSON number")


def standard_input() -> Iterator[bytes]:
    """Return the lines of standard input, none if it is closed; a line that is far too long comes in parts."""
    if sys.stdin is None:
        return iter(())
    stream = sys.stdin.buffer
    return iter(lambda: stream.readline(_LONGEST_LINE + 1), b"")


def read_rows(lines: Iterable[bytes]) -> Iterator[tuple[int, Row]]:
    """Yield the JSON objects of lines with their numbers, without empty lines.

    Raises:
        InputError: A line has none; the error names the line.
    """
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if len(line) > _LONGEST_LINE:
            raise InputError(f"line {number}: longer than {_LONGEST_LINE} bytes")
        try:
            yield number, parse_object(line)
        except InputError as error:
            raise InputError(f"line {number}: {error}") from None
