"""Numbers parsed from texts as in Java (``Integer.valueOf``, ``Long.valueOf``, ``Double.valueOf``).

An integer is an optional ASCII sign and decimal digits of the basic multilingual plane, in the range of its type. For a
double, control characters and spaces around the text are removed. It then has one of these forms:

::

    [sign] NaN | Infinity
    [sign] digits [. digits] [e [sign] digits] [f|d]          ASCII digits, at least one before the exponent
    [sign] 0x hex digits [. hex digits] p [sign] digits [f|d]

Python's ``int`` and ``float`` accept other texts (underscores, other spaces, ``inf``) and refuse some (``5d``,
hexadecimal).
"""

from __future__ import annotations

import re
from typing import Final

INT_MIN: Final = -(2**31)
INT_MAX: Final = 2**31 - 1
LONG_MIN: Final = -(2**63)
LONG_MAX: Final = 2**63 - 1

# The zeros of all runs of ten decimal digits in the basic multilingual plane. It is a table, not unicodedata, so that
# every version of Python, Arrow and Spark agrees on it. Java reads UTF-16 units, and has no digits beyond the plane.
DIGIT_ZEROS: Final = (
    "\u0030\u0660\u06f0\u07c0\u0966\u09e6\u0a66\u0ae6\u0b66\u0be6\u0c66\u0ce6\u0d66\u0de6\u0e50\u0ed0\u0f20\u1040"
    "\u1090\u17e0\u1810\u1946\u19d0\u1a80\u1a90\u1b50\u1bb0\u1c40\u1c50\ua620\ua8d0\ua900\ua9d0\ua9f0\uaa50\uabf0"
    "\uff10"
)
DECIMAL_DIGITS: Final = "".join(f"{zero}-{chr(ord(zero) + 9)}" for zero in DIGIT_ZEROS)
"""All of them, for a class of a regular expression."""

_INTEGER: Final = re.compile(rf"([+-]?)([{DECIMAL_DIGITS}]+)")
_TO_ASCII: Final = {ord(zero) + value: str(value) for zero in DIGIT_ZEROS for value in range(10)}

_TRIMMED: Final = "".join(map(chr, range(0x21)))
_DECIMAL: Final = re.compile(r"[+-]?(?:NaN|Infinity|((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)[fFdD]?)")
_HEXADECIMAL: Final = re.compile(r"([+-]?0[xX](?:[0-9a-fA-F]+\.?|[0-9a-fA-F]*\.[0-9a-fA-F]+)[pP][+-]?[0-9]+)[fFdD]?")


def digit_translation() -> tuple[str, str]:
    """Return all decimal digits beyond ASCII, and the ASCII digit of each, in the same order."""
    others = [(chr(code), digit) for code, digit in _TO_ASCII.items() if code > 0x7F]
    return "".join(char for char, _ in others), "".join(digit for _, digit in others)


def java_int(text: str) -> int | None:
    """Return ``Integer.parseInt(text)``, None if Java throws NumberFormatException."""
    if len(text) < 10 and text.isascii() and text.isdigit():  # the usual text
        return int(text)
    return _parse_integer(text, INT_MIN, INT_MAX)


def java_long(text: str) -> int | None:
    """Return ``Long.parseLong(text)``, None if Java throws NumberFormatException."""
    if len(text) < 19 and text.isascii() and text.isdigit():
        return int(text)
    return _parse_integer(text, LONG_MIN, LONG_MAX)


def _parse_integer(text: str, smallest: int, largest: int) -> int | None:
    match = _INTEGER.fullmatch(text)
    if match is None:
        return None
    sign, digits = match.groups()
    significant = digits.translate(_TO_ASCII).lstrip("0")
    if len(significant) > 19:  # beyond 64 bits, and int() refuses more than 4,300 digits
        return None
    value = int(sign + (significant or "0"))
    return value if smallest <= value <= largest else None


def parse_double(text: str) -> float | None:
    """Return ``Double.valueOf(text)``, None if Java throws NumberFormatException."""
    text = text.strip(_TRIMMED)
    match = _DECIMAL.fullmatch(text)
    if match is not None:
        return float(text.rstrip("fFdD") if match.group(1) else text)
    match = _HEXADECIMAL.fullmatch(text)
    if match is None:
        return None
    try:
        return float.fromhex(match.group(1))
    except OverflowError:
        return float("-inf") if text.startswith("-") else float("inf")
