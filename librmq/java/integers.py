"""Read integers as Java does."""

from __future__ import annotations

import re

from librmq.java.hashing import _SIGN

__all__ = ["java_int", "java_long"]


_INTEGER = re.compile(r"([+-]?)(\d+)")


def java_int(text: str) -> int | None:
    """``Integer.parseInt(text)``, None where that throws: for blanks, underscores, or more than 32 bits.

    Decimal digits of any script will do, as there.
    """
    if len(text) < 10 and text.isascii() and text.isdigit():  # as nearly always
        return int(text)
    return _whole(text, _SIGN)


def java_long(text: str) -> int | None:
    """``Long.parseLong(text)``: `java_int` with 64 bits."""
    if len(text) < 19 and text.isascii() and text.isdigit():
        return int(text)
    return _whole(text, 1 << 63)


def _whole(text: str, limit: int) -> int | None:
    match = _INTEGER.fullmatch(text)
    if match is None or max(text) > "\uffff":  # Java looks at one UTF-16 unit at a time
        return None
    digits = match[2].lstrip("0")
    if len(digits) > 4000:  # int() refuses more
        return None
    value = int(match[1] + digits) if digits else 0
    return value if -limit <= value < limit else None
