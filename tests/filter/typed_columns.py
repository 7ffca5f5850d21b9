"""Properties in columns that are no strings: the text that a filter reads, or that their type is refused."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any, Final, NamedTuple

REFUSED: Final = "refused"


class TypedCase(NamedTuple):
    """One value, and the text that the broker's decision is about; None for a missing property."""

    spark: str
    """The type in Spark."""
    arrow: str
    """The alias of the type in Arrow; empty for the one of Python's value."""
    value: Any
    text: str | None
    expression: str


TYPED_CASES: Final = (
    TypedCase("int", "int32", 60, "60", "a > 50"),
    TypedCase("int", "int32", 60, "60", "a > 59.5"),
    TypedCase("int", "int32", 60, "60", "a = '60'"),
    TypedCase("int", "int32", None, None, "a IS NULL"),
    TypedCase("bigint", "int64", -(1 << 40), "-1099511627776", "a < 0"),
    TypedCase("tinyint", "int8", 7, "7", "a BETWEEN 1 AND 6"),
    TypedCase("boolean", "bool", True, "true", "a = TRUE"),
    TypedCase("boolean", "bool", False, "false", "a = TRUE"),
    TypedCase("boolean", "bool", False, "false", "a = 'false'"),
    TypedCase("double", "double", 60.0, REFUSED, "a > 50"),
    TypedCase("float", "float", 60.5, REFUSED, "a > 50"),
    TypedCase("decimal(10,2)", "", Decimal("60.50"), REFUSED, "a > 50.0"),
    TypedCase("date", "", date(2026, 11, 20), REFUSED, "a = '2026-11-20'"),
    TypedCase("timestamp", "", datetime(2026, 11, 20, tzinfo=UTC), REFUSED, "a IS NOT NULL"),
    TypedCase("binary", "", b"60", REFUSED, "a > 50"),
)
