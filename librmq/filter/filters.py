"""Filters by SQL92 expression: `SqlFilter` serves a message, an Arrow column and a Spark column."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Final

from librmq.filter import interpreter
from librmq.filter._python_backend import EvaluationRefusedError, compile_evaluate, compile_match
from librmq.filter.interpreter import Explanation, Lint, explain, lint
from librmq.filter.normal_form import reduce
from librmq.filter.parser import Dialect, Selector, parse, refuse_rest
from librmq.override import override

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column


CACHED_FILTERS: Final = 512
CACHED_LENGTH: Final = 4096
"""Longer expressions are compiled each time, so the cache has a bounded size in memory."""


class FilterWarning(UserWarning):
    """The filter ignores text after a complete expression."""


class Compiled:
    """The part that all filters with the same expression and dialect share. Thread-safe."""

    def __init__(self, expression: str, dialect: Dialect) -> None:
        self.selector: Final[Selector] = parse(expression, dialect)
        self.question: Final = reduce(self.selector.root)
        self._answer_first = len(expression) > CACHED_LENGTH

    @cached_property
    def matches(self) -> Callable[[Mapping[str, str] | None], bool]:
        """Return the function that decides whether properties match."""
        return compile_match(self.question)

    @cached_property
    def _evaluate(self) -> object:
        return compile_evaluate(self.question)

    def evaluate(self, properties: Mapping[str, str] | None) -> bool | None:
        """Return whether properties match; None if that is unknown (SQL's NULL)."""
        if self._answer_first:  # compiling a long expression costs more than interpreting it once
            self._answer_first = False
            return interpreter.evaluate(self.selector, properties)
        try:
            return self._evaluate(properties)  # type: ignore[operator,no-any-return]
        except EvaluationRefusedError:
            pass
        return interpreter.evaluate(self.selector, properties)  # its error names the term that failed


def compiled(expression: str, dialect: Dialect = "4.9") -> Compiled:
    """Return the compiled form of an expression, from a bounded cache.

    Raises:
        FilterSyntaxError: The expression does not compile.
    """
    if not isinstance(expression, str):
        raise TypeError(f"a filter expression is a str, not {type(expression).__name__}")
    if len(expression) > CACHED_LENGTH:
        return Compiled(expression, dialect)
    return compiled_once(expression, dialect)


@lru_cache(maxsize=CACHED_FILTERS)
def compiled_once(expression: str, dialect: Dialect) -> Compiled:
    """Return the compiled expression, the same for every caller while it is cached."""
    return Compiled(expression, dialect)


class SqlFilter:
    """An SQL92 filter expression with exactly the decisions of RocketMQ's broker.

    ``dialect`` is ``"4.9"`` or ``"5.3"``, which adds [NOT] CONTAINS, STARTSWITH, ENDSWITH. The broker ignores text
    after a complete expression (``a = 1 garbage``). `SqlFilter` does too and issues a `FilterWarning`; ``strict=True``
    raises an error.

    ``matches(properties) -> bool`` is the broker's decision for a message with these properties, which are a mapping of
    strings or None. It is true for TRUE, and false for FALSE, UNKNOWN and an error.

    Immutable and thread-safe. Compiling takes less than a millisecond; a cache keeps compiled expressions.

    Raises:
        FilterSyntaxError: The expression does not compile; the error has the position and the expected tokens.
    """

    __slots__ = ("_compiled", "dialect", "expression", "matches", "strict")

    def __init__(self, expression: str, *, dialect: Dialect = "4.9", strict: bool = False) -> None:
        self._compiled: Final = compiled(expression, dialect)
        self.expression: Final = expression
        self.dialect: Final = dialect
        self.strict: Final = strict
        self.matches: Final = self._compiled.matches
        if strict:
            refuse_rest(self._compiled.selector)
        ignored_from = self._compiled.selector.ignored_from
        if ignored_from is not None:
            ignored = expression[ignored_from : ignored_from + 40]
            warnings.warn(f"the filter ignores {ignored!r}, as the broker does", FilterWarning, stacklevel=2)

    @override
    def __repr__(self) -> str:
        return f"SqlFilter({self.expression!r}, dialect={self.dialect!r}, strict={self.strict})"

    @override
    def __reduce__(self) -> tuple[object, ...]:
        """Send the filter to another process as its text."""
        return partial(SqlFilter, self.expression, dialect=self.dialect, strict=self.strict), ()

    def evaluate(self, properties: Mapping[str, str] | None) -> bool | None:
        """Return TRUE, FALSE, or UNKNOWN as None.

        Raises:
            FilterEvaluationError: The broker would raise an error; this one names the term.
        """
        return self._compiled.evaluate(properties)

    def match_arrow(self, properties: pa.MapArray | pa.RecordBatch) -> pa.BooleanArray:
        """Return ``matches`` for many messages at once, without nulls. Needs the extra ``arrow``.

        ``properties`` is a map array from string to string, in which a null is a message without properties. It can
        also be a record batch with a column for each property; a null or a missing column is a missing property.
        Integers and booleans count as the text that a sender writes for them.

        Raises:
            TypeError: The columns have other types.
        """
        from librmq.filter.arrow_backend import match_arrow

        return match_arrow(self._compiled.question, properties)

    def to_column(self, properties: Column | Mapping[str, Column]) -> Column:
        """Return ``matches`` as a Spark column that is never null. Needs the extra ``spark``.

        The column consists of native, deterministic expressions, and runs no Python. ``properties`` is a column of type
        map from string to string, or a mapping with a column for each property. Integers and booleans count as the
        text that a sender writes for them; a property of another type fails when a row is read.

        Raises:
            FilterError: The expression is too large for Spark.
        """
        from librmq.filter.spark_backend import to_column

        column: Column = to_column(self._compiled.question, properties)
        return column

    def explain(self, properties: Mapping[str, str] | None) -> Explanation:
        """Explain why a message with these properties matches or does not, term by term."""
        return explain(self._compiled.selector, properties)

    def lint(self) -> list[Lint]:
        """Return the mistakes found in this expression, from left to right."""
        return lint(self._compiled.selector, self.dialect)
