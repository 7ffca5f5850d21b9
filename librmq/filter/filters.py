"""Filters by SQL92 expression: `SqlFilter` serves a message, an Arrow column and a Spark column.

For a message a filter is generated Python: one flat expression over its properties. Each question is written in one of
three modes. In the modes IS_TRUE and IS_FALSE it becomes a Python condition that holds if the answer is TRUE (FALSE),
and raises where the broker does. Most filters need only these two modes: NOT exchanges them, and the chain of ANDs at
the top does not distinguish FALSE, UNKNOWN and an error. The mode VALUE gives True, False or None. An AND below an OR
or a NOT needs it, because it continues after an UNKNOWN and can then reach an error.

Python's parser refuses deep nesting. So every few levels a subtree becomes a function of its own, and a loop writes
these functions.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cached_property, lru_cache, partial
from itertools import count
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, cast

from librmq.filter import _interpreter
from librmq.filter._interpreter import Explanation, Lint, explain, in_order, lint, searched
from librmq.filter._normal_form import (
    All,
    Always,
    Answer,
    AnyOf,
    Mapped,
    Missing,
    Negation,
    NumberIs,
    OrderOf,
    Question,
    SameAnswer,
    SameText,
    TextIn,
    TextSearch,
    TextTrue,
    below,
    cheapest_first,
    names,
    reduce,
)
from librmq.filter.parser import Dialect, JavaLong, Order, Selector, parse
from librmq.java.lang import java_int, java_long, parse_double
from librmq.override import override

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column

Properties: TypeAlias = Mapping[str, str] | None
Match: TypeAlias = Callable[[Properties], bool]
Evaluate: TypeAlias = Callable[[Properties], "bool | None"]
_Mode: TypeAlias = Literal["is_true", "is_false", "value"]

LEVELS_PER_FUNCTION: Final = 20
REMEMBERED_NUMBERS: Final = 1024
"""Number of parsed texts that a filter caches for each property that it reads as a number."""


class EvaluationRefusedError(Exception):
    """The broker would raise here; the interpreter finds the term."""


def compile_match(question: Question) -> Match:
    """Compile to the broker's decision: true only for TRUE; false for FALSE, UNKNOWN and errors."""
    return cast("Match", _Writer().function(question, "is_true", on_error="return False"))


def compile_evaluate(question: Question) -> Evaluate:
    """Compile to TRUE, FALSE or UNKNOWN (None); where the broker raises, the result raises `EvaluationRefusedError`."""
    return cast("Evaluate", _Writer().function(question, "value", on_error="raise"))


_NAN: Final = float("nan")


class _Reader:
    """Parses one property as a number, and caches the first texts.

    ``numbers.get(text) or read(text)`` is the number. A missing property (None) is NaN, and a comparison with it fails.
    """

    def __init__(self, kind: type) -> None:
        parse, digits = _PARSERS[kind]
        numbers: dict[str | None, float] = {None: _NAN}

        def read(text: str) -> float:
            number: float | None
            if len(text) < digits and text.isascii() and text.isdigit():
                number = int(text)
            else:
                number = parse(text)
                if number is None:
                    raise EvaluationRefusedError
            if len(numbers) <= REMEMBERED_NUMBERS and len(text) <= 20:
                numbers[text] = number
            return number

        self.numbers: Final = numbers
        self.read: Final = read


def _double(text: str) -> float | None:
    """Return a double to compare with a finite literal: infinity for NaN, which Java orders above every number."""
    number = parse_double(text)
    return float("inf") if number is not None and number != number else number


# For each type of literal: the parser, and the number of ASCII digits below which int() does the same.
_PARSERS: Final[dict[type, tuple[Callable[[str], float | None], int]]] = {
    int: (java_int, 10),
    JavaLong: (java_long, 19),
    float: (_double, 16),
}


def _in_order(operator: Order, left: str, right: str) -> bool:
    a, b = parse_double(left), parse_double(right)
    if a is None or b is None:
        raise EvaluationRefusedError
    return in_order(operator, a, b)


def _is_true(text: str) -> bool:
    return len(text) == 4 and text.lower() == "true"


def _same(left: bool | None, right: bool | None) -> bool | None:
    if left is None:
        return True if right is None else None
    return left is right


def _clash(left: bool | None, right: bool | None) -> bool | None:
    if left is not None and right is not None:
        raise EvaluationRefusedError
    return _same(left, right)


def _fail() -> bool:
    raise EvaluationRefusedError


_NEGATED: Final[dict[Order, str]] = {"=": "!=", "<": ">=", "<=": ">", ">": "<=", ">=": "<"}
_OTHER: Final[dict[_Mode, _Mode]] = {"is_true": "is_false", "is_false": "is_true", "value": "value"}


class _Writer:
    def __init__(self) -> None:
        self.namespace: dict[str, Any] = {
            "Refused": EvaluationRefusedError,
            "in_order": _in_order,
            "is_true": _is_true,
            "searched": searched,
            "same": _same,
            "clash": _clash,
            "fail": _fail,
            "NOTHING": {},
        }
        self.readers: dict[tuple[str, type], tuple[str, str]] = {}
        self.fresh = count()
        self.loaded: dict[str, str] = {}
        self.later: list[tuple[str, Question, _Mode]] = []

    def function(self, question: Question, mode: _Mode, on_error: str) -> Any:  # noqa: ANN401 (compiled)
        """Return the filter's function, from properties (None: none at all) to a verdict."""
        if mode == "is_true":
            question = cheapest_first(question)
        uses = Counter(names(question))
        self.loaded = {name: f"t{i}" for i, (name, n) in enumerate(uses.items()) if n > 1}
        if mode == "is_true" and isinstance(question, All):
            result = " and ".join(self.write(term, mode, 1) for term in question.terms)
        else:
            result = self.write(question, mode, 0)
        loads = "".join(f"        {variable} = p.get({name!r})\n" for name, variable in self.loaded.items())
        source = [
            "def filter(p):\n"
            "    try:\n"
            f"{loads}"
            f"        return {result}\n"
            "    except Refused:\n"
            f"        {on_error}\n"
            "    except AttributeError:\n"
            "        if p is None:\n"
            "            return filter(NOTHING)\n"
            "        raise\n"
        ]
        self.loaded = {}
        while self.later:
            name, part, part_mode = self.later.pop()
            source.append(f"def {name}(p):\n    return {self.write(part, part_mode, 0)}\n")
        exec(compile("".join(source), "<filter>", "exec"), self.namespace)
        return self.namespace["filter"]

    def write(self, question: Question, mode: _Mode, level: int) -> str:  # noqa: C901 (a case for each question)
        """Write a Python expression, in parentheses if it needs them."""
        if level >= LEVELS_PER_FUNCTION and below(question):
            name = f"f{next(self.fresh)}"
            self.later.append((name, question, mode))
            return f"{name}(p)"
        match question:
            case Always():
                return self.always(question, mode)
            case Missing():
                return f"({self.load(question.name)} is {'not ' if mode == 'is_false' else ''}None)"
            case TextIn():
                return self.text_in(question, mode)
            case TextTrue():
                return self.present_test(question.name, mode, "is_true({0})", "not is_true({0})")
            case NumberIs():
                return self.number_is(question, mode)
            case SameText():
                return self.same_text(question, mode)
            case OrderOf():
                return self.order_of(question, mode)
            case TextSearch():
                return self.search_test(question, mode)
            case Negation():
                return self.negation(question, mode, level)
            case All():
                return self.chain(question.terms, mode, level, decisive="is_false")
            case AnyOf():
                return self.chain(question.terms, mode, level, decisive="is_true")
            case Mapped():
                return self.mapped(question, mode, level)
            case SameAnswer():
                return self.same_answer(question, mode, level)
        raise AssertionError(question)

    # --- questions about properties

    def load(self, name: str) -> str:
        return self.loaded.get(name) or f"p.get({name!r})"

    def present_test(self, name: str, mode: _Mode, when_true: str, when_false: str) -> str:
        """Return a test of a text ({0} in it) that is UNKNOWN for a missing text."""
        if name in self.loaded:
            text = first = self.loaded[name]
        else:
            text = f"v{next(self.fresh)}"
            first = f"({text} := p.get({name!r}))"
        if mode == "value":
            return f"(None if {first} is None else {when_true.format(text)})"
        test = when_true if mode == "is_true" else when_false
        return f"({first} is not None and {test.format(text)})"

    def always(self, question: Always, mode: _Mode) -> str:
        match question.answer:
            case Answer.ERROR:
                return "fail()"
            case Answer.UNKNOWN:
                return "None" if mode == "value" else "False"
            case _:
                return str((question.answer is Answer.FALSE) is (mode == "is_false"))

    def text_in(self, question: TextIn, mode: _Mode) -> str:
        if mode == "is_false":  # with None among the texts, a missing property fails the test
            return f"({self.load(question.name)} not in {self.constant(frozenset((*question.texts, None)))})"
        if len(question.texts) == 1:
            test = f"== {self.constant(question.texts[0])}"
        else:
            test = f"in {self.constant(frozenset(question.texts))}"
        if mode == "is_true":
            return f"({self.load(question.name)} {test})"
        return self.present_test(question.name, mode, f"{{0}} {test}", "")

    def number_is(self, question: NumberIs, mode: _Mode) -> str:
        kind = type(question.number)
        if (question.name, kind) not in self.readers:
            reader = _Reader(kind)
            self.readers[question.name, kind] = (self.constant(reader.numbers), self.constant(reader.read))
        numbers, read = self.readers[question.name, kind]
        number = repr(int(question.number) if kind is JavaLong else question.number)
        operator: str = "==" if question.operator == "=" else question.operator
        tested = f"({numbers}.get({{0}}) or {read}({{0}}))"
        if mode == "value":
            return self.present_test(question.name, mode, f"{tested} {operator} {number}", "")
        operator = operator if mode == "is_true" else _NEGATED[question.operator]
        if operator == "!=":  # NaN, which stands for a missing property, passes this comparison alone
            return self.present_test(question.name, mode, "", f"{tested} != {number}")
        if question.name in self.loaded:
            return f"({tested.format(self.loaded[question.name])} {operator} {number})"
        text = f"v{next(self.fresh)}"
        return f"(({numbers}.get({text} := p.get({question.name!r})) or {read}({text})) {operator} {number})"

    def same_text(self, question: SameText, mode: _Mode) -> str:
        left, right = f"v{next(self.fresh)}", f"v{next(self.fresh)}"
        a, b = self.load(question.left), self.load(question.right)
        match mode:
            case "is_true":
                return f"({a} == {b})"
            case "is_false":
                return f"(({left} := {a}) is not None and {left} != {b})"
            case _:
                return (
                    f"({left} == {right} if (({left} := {a}), ({right} := {b}))[0] is not None"
                    f" else True if {right} is None else None)"
                )

    def order_of(self, question: OrderOf, mode: _Mode) -> str:
        left, right = f"v{next(self.fresh)}", f"v{next(self.fresh)}"
        a, b = self.load(question.left), self.load(question.right)
        either = f"({left} := {a}) is None or ({right} := {b}) is None"
        test = f"in_order({question.operator!r}, {left}, {right})"
        match mode:
            case "is_true":
                return f"(False if {either} else {test})"
            case "is_false":
                return f"(False if {either} else not {test})"
            case _:
                return f"(None if {either} else {test})"

    def search_test(self, question: TextSearch, mode: _Mode) -> str:
        text = self.constant(question.text)
        tests = {
            "CONTAINS": f"{text} in {{0}}",
            "STARTSWITH": f"{{0}}.startswith({text})",
            "ENDSWITH": f"{{0}}.endswith({text})",
        }
        test = f"not {tests[question.kind]}" if question.negated else tests[question.kind]
        hit = self.present_test(question.name, "is_true", f"({test})", "")
        return f"(not {hit})" if mode == "is_false" else hit

    # --- answers combined

    def negation(self, question: Negation, mode: _Mode, level: int) -> str:
        if mode != "value":
            return self.write(question.operand, _OTHER[mode], level)
        if not question.may_be_unknown:
            return self.write(question.operand, "is_false", level)
        variable = f"v{next(self.fresh)}"
        value = self.write(question.operand, mode, level + 1)
        return f"(None if ({variable} := {value}) is None else not {variable})"

    def chain(self, terms: tuple[Question, ...], mode: _Mode, level: int, decisive: _Mode) -> str:
        """Write an AND, which FALSE decides, or an OR, which TRUE decides."""
        if mode == "value":
            return self.chain_value(terms, level, decisive)
        if mode == decisive:
            return f"({' or '.join(self.write(term, mode, level + 1) for term in terms)})"
        tests, ends = [], []
        last_that_may_fail = max((i for i, term in enumerate(terms) if term.may_fail), default=-1)
        for i, term in enumerate(terms):
            if term.may_be_unknown and i < last_that_may_fail:
                variable = f"v{next(self.fresh)}"
                decided = decisive == "is_true"
                tests.append(f"({variable} := {self.write(term, 'value', level + 1)}) is not {decided}")
                ends.append(f"{variable} is not None")
            else:
                tests.append(self.write(term, mode, level + 1))
        return f"({' and '.join(tests + ends)})"

    def chain_value(self, terms: tuple[Question, ...], level: int, decisive: _Mode) -> str:
        decided = decisive == "is_true"
        tests, unknown = [], []
        for term in terms:
            if term.may_be_unknown:
                variable = f"v{next(self.fresh)}"
                tests.append(f"({variable} := {self.write(term, 'value', level + 1)}) is {decided}")
                unknown.append(f"{variable} is None")
            else:
                tests.append(self.write(term, decisive, level + 1))
        otherwise = f"None if {' or '.join(unknown)} else {not decided}" if unknown else f"{not decided}"
        return f"({decided} if {' or '.join(tests)} else {otherwise})"

    def mapped(self, question: Mapped, mode: _Mode, level: int) -> str:
        outcomes = {True: question.when_true, False: question.when_false, None: question.when_unknown}
        if mode == "value":
            table = {value: _VALUES[outcome] for value, outcome in outcomes.items()}
        else:
            answer = Answer.TRUE if mode == "is_true" else Answer.FALSE
            table = {value: outcome is answer for value, outcome in outcomes.items()}
        return f"{self.constant(table)}[{self.write(question.operand, 'value', level + 1)}]"

    def same_answer(self, question: SameAnswer, mode: _Mode, level: int) -> str:
        left = self.write(question.left, "value", level + 1)
        right = self.write(question.right, "value", level + 1)
        call = f"{'clash' if question.clash else 'same'}({left}, {right})"
        return call if mode == "value" else f"({call} is {mode == 'is_true'})"

    def constant(self, value: object) -> str:
        name = f"k{next(self.fresh)}"
        self.namespace[name] = value
        return name


_VALUES: Final = {Answer.TRUE: True, Answer.FALSE: False, Answer.UNKNOWN: None}


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

    def match_arrow(self, properties: pa.MapArray | pa.RecordBatch) -> pa.BooleanArray:
        """Return ``matches`` for many messages at once, as `SqlFilter.match_arrow`."""
        from librmq.filter._arrow_backend import match_arrow

        return match_arrow(self.question, properties)

    @cached_property
    def _evaluate(self) -> object:
        return compile_evaluate(self.question)

    def evaluate(self, properties: Mapping[str, str] | None) -> bool | None:
        """Return whether properties match; None if that is unknown (SQL's NULL)."""
        if self._answer_first:  # compiling a long expression costs more than interpreting it once
            self._answer_first = False
            return _interpreter.evaluate(self.selector, properties)
        try:
            return self._evaluate(properties)  # type: ignore[operator,no-any-return]
        except EvaluationRefusedError:
            pass
        return _interpreter.evaluate(self.selector, properties)  # its error names the term that failed


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
            self._compiled.selector.refuse_rest()
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
        return self._compiled.match_arrow(properties)

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
