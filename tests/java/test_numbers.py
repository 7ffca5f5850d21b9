"""Strings that Java accepts as numbers, and strings that it refuses."""

from __future__ import annotations

import math

import pytest

from librmq.java.lang import (
    INT_MAX,
    INT_MIN,
    LONG_MAX,
    LONG_MIN,
    digit_translation,
    java_int,
    java_long,
    parse_double,
)

INTEGERS = {"7": 7, "+7": 7, "-7": -7, "007": 7, "-0": 0, "0" * 30 + "5": 5, "\u0663\u096a": 34}
EDGES = [number for edge in (INT_MIN, INT_MAX, LONG_MIN, LONG_MAX) for number in (edge - 1, edge, edge + 1)]
REFUSED = ["", "+", "--5", " 5", "5 ", "1_0", "\u00b2", "\U0001d7d3", "0x5", "5.0", "1" * 20, "1" * 5000]


@pytest.mark.parametrize("text", [*INTEGERS, *map(str, EDGES), *REFUSED])
def test_integers(text: str) -> None:
    value = INTEGERS.get(text) if text in INTEGERS or text in REFUSED else int(text)
    assert java_int(text) == (value if value is not None and INT_MIN <= value <= INT_MAX else None)
    assert java_long(text) == (value if value is not None and LONG_MIN <= value <= LONG_MAX else None)


def test_digits_of_other_scripts_are_translated() -> None:
    others, digits = digit_translation()
    assert not others.isascii()
    assert [java_int(digit) for digit in others] == [int(digit) for digit in digits]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5", 5.0), ("5f", 5.0), ("-.5D", -0.5), ("1e3", 1000.0), (" 5\t", 5.0), ("0x1.8p1", 3.0), ("-0x1p3f", -8.0),
        ("NaN", math.nan), ("+Infinity", math.inf), ("-Infinity", -math.inf), ("0x1p99999", math.inf),
        ("-0x1p99999", -math.inf), ("1e999", math.inf), ("", None), ("inf", None), ("nan", None), ("1_0", None),
        ("\u00a05", None), ("0x1", None), ("\u0663", None), (".", None), ("5ff", None), ("Infinityf", None),
    ],
)  # fmt: skip
def test_doubles(text: str, value: float | None) -> None:
    found = parse_double(text)
    assert found == value or (value is not None and math.isnan(value) and found is not None and math.isnan(found))
