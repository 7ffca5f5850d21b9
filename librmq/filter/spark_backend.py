"""Filters as Spark columns: native Catalyst expressions, deterministic, without Python at run time.

Integers: Spark's cast accepts blanks around a number, and only ASCII digits. If Spark casts a text to a number and back
to the same text, that number is right. A regular expression checks any other text. Doubles: Spark's cast is Java's, but
also accepts ``inf`` and ``nan`` in any case, so the text matters only for infinities and NaN. Spark orders NaN like
Java, but takes -0.0 for equal to 0.0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from librmq.errors import FilterError, MissingExtraError
from librmq.override import override

try:
    from pyspark.sql import Column
    from pyspark.sql import functions as F  # noqa: N812 - the usual name
except ImportError as error:
    raise MissingExtraError("a filter as a Spark column", "spark") from error

from librmq.filter._column_backend import COMPARE, JAVA_INTEGER, NEGATED, ColumnBackend, Condition
from librmq.filter._normal_form import (
    All,
    Missing,
    NumberIs,
    OrderOf,
    Question,
    SameText,
    TextIn,
    TextSearch,
    TextTrue,
    cheapest_first,
)
from librmq.filter.parser import JavaLong
from librmq.java.lang import OTHER_DIGITS

LARGEST: Final = 50_000
"""Most expressions in one column. An expression that occurs twice counts twice, because Spark copies it."""

DEEPEST: Final = 200


def to_column(question: Question, properties: Any) -> Any:
    """Return where ``question`` is TRUE, as a column ``matches`` that is never null.

    ``properties`` is a column of maps, or a mapping from names to columns of texts.

    Raises:
        FilterError: The column would be too large, as for long chains of ORs in ANDs in ORs over terms that can fail.
    """
    condition = _Spark(properties).selection(question)
    if condition.size > LARGEST or condition.depth > DEEPEST:
        reason = f"{condition.size} expressions, {condition.depth} levels; at most {LARGEST} and {DEEPEST}"
        raise FilterError(f"the filter is too large for a Spark column: {reason}")
    # Name the column: Spark's default name would be the whole expression.
    return condition.column().alias("matches")


@dataclass(frozen=True, slots=True)
class _Expression:
    """A Spark column that is not made yet, with its size and depth."""

    column: Callable[[], Column]
    size: int
    depth: int


def _expression(make: Callable[..., Column], *parts: _Expression) -> _Expression:
    cache: list[Column] = []

    def column() -> Column:
        if not cache:
            cache.append(make(*(part.column() for part in parts)))
        return cache[0]

    size = 1 + sum(part.size for part in parts)
    return _Expression(column, size, 1 + max((part.depth for part in parts), default=0))


def _never_null(condition: _Expression) -> _Expression:
    return _expression(lambda condition: F.coalesce(condition, F.lit(False)), condition)


def _balanced(join: Callable[[Column, Column], Column], parts: list[_Expression]) -> _Expression:
    """Join a chain as a shallow tree; plain ANDs and ORs can be grouped in any way."""
    while len(parts) > 1:
        pairs = [_expression(join, a, b) for a, b in zip(parts[::2], parts[1::2], strict=False)]
        parts = pairs + parts[len(parts) & ~1 :]
    return parts[0]


_DOUBLE: Final = r"[0-9]|\A[\x00-\x20]*[+-]?(?:NaN|Infinity)[\x00-\x20]*\z"
"""Strings cast to an infinity or NaN that Java parses in the same way."""


_EXACT: Final = ("void", "boolean", "tinyint", "smallint", "int", "bigint")
"""Types whose text in Spark is the one that senders write. Each language writes other numbers and times in its way."""


def _is_text(column: Column) -> Column:
    """Return whether the type of a column is one that counts, which Spark knows when it plans."""
    kind = F.typeof(column)
    return kind.isin(*_EXACT) | kind.rlike("^(string|char|varchar)")


def _refusal(name: str, column: Column) -> Column:
    text = (
        f"librmq.errors.FilterError: [RMQ_BAD_OPTION] property {name}: expected strings, integers or booleans, found "
    )
    return F.raise_error(F.concat(F.lit(text), F.typeof(column), F.lit("; cast it to string")))


def property_text(name: str, column: Column) -> Column:
    """Return a property as the text that the filter reads; it fails if its type has no text that senders write."""
    return F.when(_is_text(column), column.cast("string")).otherwise(_refusal(name, column))


class _Spark(ColumnBackend[_Expression]):
    def __init__(self, properties: Any) -> None:
        super().__init__()
        self._properties = properties
        self._texts: dict[str, _Expression] = {}
        self._checks: list[_Expression] = []
        """Where the types of the properties count; Spark removes a check that holds when it plans."""

    def selection(self, question: Question) -> _Expression:
        """Return where a whole question is TRUE, never null: a chain of ANDs, the cheapest first.

        Spark splits such a chain. It evaluates a term only where those before it hold, and pushes down what a source
        can decide, such as Parquet's statistics for a column of texts.
        """
        chain = cheapest_first(question)
        terms: list[_Expression] = []
        for term in chain.terms if isinstance(chain, All) else (chain,):
            condition = self.condition(term, "is_true")
            if isinstance(term, TextIn) and isinstance(self._properties, Mapping):
                terms += [_expression(lambda text: text.isNotNull(), self.property_column(term.name)), condition]
            elif isinstance(term, Missing):
                terms.append(condition)
            else:
                terms.append(_never_null(condition))
        return self.every([*self._checks, *terms])

    @override
    def literal(self, value: bool) -> _Expression:
        return _expression(lambda: F.lit(value))

    @override
    def every(self, conditions: Sequence[_Expression]) -> _Expression:
        return _balanced(lambda a, b: a & b, list(conditions))

    @override
    def some(self, conditions: Sequence[_Expression]) -> _Expression:
        return _balanced(lambda a, b: a | b, list(conditions)) if conditions else self.literal(False)

    @override
    def none(self, conditions: Sequence[_Expression]) -> _Expression:
        return _expression(lambda some: ~some, _never_null(self.some(conditions)))

    @override
    def first_match(self, branches: Sequence[tuple[_Expression, bool]]) -> _Expression:
        def make(*conditions: Column) -> Column:
            case: Any = F
            for condition, (_, value) in zip(conditions, branches, strict=True):
                case = case.when(condition, F.lit(value))
            last: Column = case.otherwise(F.lit(False))
            return last

        return _expression(make, *(condition for condition, _ in branches))

    @override
    def property_condition(self, question: Question, condition: Condition) -> _Expression:
        is_true = condition == "is_true"
        match question:
            case Missing():
                return _expression(
                    lambda text: text.isNull() if is_true else text.isNotNull(), self.property_column(question.name)
                )
            case TextIn():
                return self._text_in(question, is_true)
            case TextTrue():
                compare = COMPARE["=" if is_true else "<>"]
                return _expression(lambda text: compare(F.lower(text), "true"), self.property_column(question.name))
            case NumberIs():
                return self._number_is(question, condition)
            case SameText():
                return self._same_text(question, is_true)
            case OrderOf():
                return self._order_of(question, condition)
            case TextSearch():
                return self._search(question, is_true)
        raise AssertionError(question)

    def property_column(self, name: str) -> _Expression:
        """Return a property, null where missing."""
        if name not in self._texts:
            if isinstance(self._properties, Mapping) and name not in self._properties:
                self._texts[name] = _expression(lambda: F.lit(None).cast("string"))
            else:
                is_mapping = isinstance(self._properties, Mapping)
                value = _expression(lambda: self._properties[name] if is_mapping else self._properties.getItem(name))
                self._texts[name] = _expression(lambda value: value.cast("string"), value)
                check = _expression(
                    lambda value: F.when(_is_text(value), F.lit(True)).otherwise(_refusal(name, value)), value
                )
                self._checks.append(check)
        return self._texts[name]

    def _text_in(self, question: TextIn, is_true: bool) -> _Expression:
        if len(question.texts) == 1:
            compare = COMPARE["=" if is_true else "<>"]
            return _expression(lambda text: compare(text, question.texts[0]), self.property_column(question.name))
        matches = _expression(lambda text: text.isin(*question.texts), self.property_column(question.name))
        return matches if is_true else _expression(lambda matches: ~matches, matches)

    def _same_text(self, question: SameText, is_true: bool) -> _Expression:
        left, right = self.property_column(question.left), self.property_column(question.right)
        if is_true:
            return _expression(lambda a, b: a.eqNullSafe(b), left, right)
        return _expression(lambda a, b: a.isNotNull() & ~a.eqNullSafe(b), left, right)

    def _search(self, question: TextSearch, is_true: bool) -> _Expression:
        name = {"CONTAINS": "contains", "STARTSWITH": "startswith", "ENDSWITH": "endswith"}[question.kind]
        true = _expression(lambda text: getattr(text, name)(question.text), self.property_column(question.name))
        if question.negated:
            true = _expression(lambda matches: ~matches, true)
        return true if is_true else self.none([true])

    def _number_is(self, question: NumberIs, condition: Condition) -> _Expression:
        text, literal = self.property_column(question.name), question.number
        number = _doubles(text) if isinstance(literal, float) else _integers(text, type(literal))
        if condition == "is_error":
            return _expression(lambda text, number: text.isNotNull() & number.isNull(), text, number)
        compare = COMPARE[question.operator if condition == "is_true" else NEGATED[question.operator]]
        if isinstance(literal, float):
            return _expression(lambda number: compare(number, F.lit(literal)), number)
        return _compared_integer(text, compare, literal)

    def _order_of(self, question: OrderOf, condition: Condition) -> _Expression:
        left, right = self.property_column(question.left), self.property_column(question.right)
        a, b = _doubles(left), _doubles(right)
        if condition == "is_error":
            present = _expression(lambda left, right: left.isNotNull() & right.isNotNull(), left, right)
            return self.every([present, _expression(lambda a, b: a.isNull() | b.isNull(), a, b)])
        operator = question.operator if condition == "is_true" else NEGATED[question.operator]
        return _expression(lambda a, b: _java_order(operator, a, b), a, b)


def _integers(text: _Expression, kind: type) -> _Expression:
    """Return a property as an integer, null where it is missing or not an integer."""
    target = _TYPES[kind]

    def make(text: Column) -> Column:
        number = text.try_cast(target)
        return F.when(number.cast("string") == text, number).otherwise(_other_integers(text, target))

    return _sized(make, text, mentions=5, size=10)


def _other_integers(text: Column, target: str) -> Column:
    """Parse texts that Spark would write otherwise as Java's integers; null for a text that is none."""
    ascii_digits = "".join(str(value) * len(others) for value, others in enumerate(OTHER_DIGITS))
    return F.when(text.rlike(JAVA_INTEGER), F.translate(text, "".join(OTHER_DIGITS), ascii_digits).try_cast(target))


def _compared_integer(text: _Expression, compare: Callable[[Any, Any], Any], literal: int) -> _Expression:
    """Compare an integer; a text that Spark cannot cast is parsed again only where its value could match."""
    target = _TYPES[type(literal)]

    def make(text: Column) -> Column:
        number = text.try_cast(target)
        value = F.lit(int(literal)).cast(target)
        holds = F.coalesce(compare(number, value), compare(_other_integers(text, target), value))
        return holds & ((number.cast("string") == text) | text.rlike(JAVA_INTEGER))

    return _sized(make, text, mentions=5, size=14)


_TYPES: Final[dict[type, str]] = {int: "int", JavaLong: "bigint"}


def _sized(make: Callable[[Column], Column], text: _Expression, mentions: int, size: int) -> _Expression:
    """Return an expression that mentions ``text`` several times."""
    return _Expression(_expression(make, text).column, size + mentions * text.size, text.depth + 5)


def _doubles(text: _Expression) -> _Expression:
    """Return a property as a double, null where it is missing or not a number."""

    def make(text: Column) -> Column:
        number = text.try_cast("double")
        return F.when(F.abs(number) < float("inf"), number).when(text.rlike(_DOUBLE), number)

    return _sized(make, text, mentions=3, size=6)


def _java_order(operator: str, a: Column, b: Column) -> Column:
    """Compare in Java's order of doubles, in which -0.0 is below 0.0."""
    zeros = (a == 0.0) & (b == 0.0)
    ranks = [F.when(number.cast("string") == "-0.0", 0).otherwise(1) for number in (a, b)]
    compare = COMPARE[operator]
    return F.when(zeros, compare(*ranks)).otherwise(compare(a, b))
