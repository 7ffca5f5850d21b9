"""A plain interpreter of filter trees: the meaning of the language, written to be read, not to be fast.

It mirrors ``evaluate`` of the classes in ``org.apache.rocketmq.filter.expression`` of 4.9.4. Tests compare the other
back-ends with it, and ``explain`` shows the values that it finds. It does not recurse, because a tree can be deeper
than Python's stack.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Generator, Mapping
from typing import TypeAlias

from librmq.errors import FilterEvaluationError
from librmq.filter.parser import (
    And,
    Compare,
    Constant,
    In,
    IsNull,
    JavaLong,
    Negate,
    Node,
    Not,
    Or,
    Order,
    Property,
    Search,
    SearchKind,
    Selector,
    Truth,
    Value,
)
from librmq.java.lang import java_int, java_long, parse_double

Seen: TypeAlias = Callable[[Node, "Value | FilterEvaluationError"], None]
"""Called with each evaluated node, and its value or the error that ended it."""

_Steps: TypeAlias = Generator[Node, Value, Value]


def evaluate(selector: Selector, properties: Mapping[str, str] | None, seen: Seen | None = None) -> bool | None:
    """Return TRUE, FALSE or UNKNOWN (None).

    Raises:
        FilterEvaluationError: The broker would raise; the error names the term.
    """
    waiting: list[tuple[Node, _Steps]] = []
    node, steps = selector.root, _steps(selector, selector.root, properties or {})
    answer: Value = None
    try:
        while True:
            try:
                operand = steps.send(answer)
            except StopIteration as done:
                answer = done.value
                if seen is not None:
                    seen(node, answer)
                if not waiting:
                    assert answer is None or isinstance(answer, bool)
                    return answer
                node, steps = waiting.pop()
            else:
                waiting.append((node, steps))
                node, steps, answer = operand, _steps(selector, operand, properties or {}), None
    except FilterEvaluationError as error:
        if seen is not None:
            seen(node, error)
            for above, _ in reversed(waiting):
                seen(above, error)
        raise


def _steps(selector: Selector, node: Node, properties: Mapping[str, str]) -> _Steps:  # noqa: C901 (a case for each kind of node)
    """Evaluate one node: yield each node below that it needs, receive that node's value by send, return its own."""
    match node:
        case Constant():
            return node.value
        case Property():
            return properties.get(node.name)
        case Truth():
            return None if (yield node.operand) is None else False
        case Negate():
            return negated((yield node.operand))
        case IsNull():
            return (yield node.operand) is None
        case Not():
            value = yield node.operand
            return None if value is None else not value
        case And():
            return (yield from _until(False, node.terms))
        case Or():
            return (yield from _until(True, node.terms))
        case In():
            text = yield node.operand
            return None if text is None else (text in node.values) is not node.negated
        case Search():
            text = yield node.operand
            if not isinstance(text, str) or not node.text:
                return False
            return searched(node.kind, text, node.text) is not node.negated
        case Compare():
            left = yield node.left
            if left is None and node.operator != "=":
                return None
            right = yield node.right
            try:
                return equal(left, right) if node.operator == "=" else ordered(node.operator, left, right)
            except JavaError as error:
                raise FilterEvaluationError(selector.source_of(node), error.java_name, error.reason) from None
        case _:
            raise AssertionError(node)


def _until(decisive: bool, terms: tuple[Node, ...]) -> _Steps:
    """Evaluate terms until one decides; an UNKNOWN neither decides nor hides an error after it."""
    result: bool | None = not decisive
    for term in terms:
        value = yield term
        if value is decisive:
            return decisive
        if value is None:
            result = None
    return result


def negated(value: Value) -> Value:
    """Negate a number, keeping its type; null for any other value."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return JavaLong(-value) if isinstance(value, JavaLong) else -value


class JavaError(Exception):
    """An error of the broker's evaluation: the class name of its exception, and the reason."""

    def __init__(self, java_name: str, reason: str) -> None:
        super().__init__(reason)
        self.java_name = java_name
        self.reason = reason


def equal(left: Value, right: Value) -> bool | None:
    """Return ``left = right``.

    Raises:
        JavaError: The broker would raise.
    """
    if left is None and right is None:
        return True
    if left is None:
        return None
    if right is None:
        return False
    if isinstance(left, str) and isinstance(right, str):
        return left == right
    return _compare("=", left, right)


def ordered(operator: Order, left: Value, right: Value) -> bool | None:
    """Return ``left < right``, or another order.

    Raises:
        JavaError: The broker would raise.
    """
    if left is None or right is None:
        return None
    if isinstance(left, str) and isinstance(right, str):
        return in_order(operator, _double(left), _double(right))
    return _compare(operator, left, right)


def _compare(operator: Order, left: Value, right: Value) -> bool:
    """Compare values that are not both texts: a text takes the other side's type; any other mixture counts as less."""
    if isinstance(left, bool) and isinstance(right, str):
        raise JavaError("ClassCastException", "a boolean on the left can't be compared with a text on the right")
    if isinstance(left, str):
        left = _converted(left, right)
    elif isinstance(right, str):
        right = _converted(right, left)
    assert isinstance(left, bool | int | float)
    assert isinstance(right, bool | int | float)
    if isinstance(left, bool) is not isinstance(right, bool):
        return operator in ("<", "<=")
    if isinstance(left, float) or isinstance(right, float):
        left, right = float(left), float(right)
    return in_order(operator, left, right)


def _converted(text: str, other: Value) -> bool | int | float:
    if isinstance(other, bool):
        return is_true(text)
    if isinstance(other, float):
        return _double(text)
    number = java_long(text) if isinstance(other, JavaLong) else java_int(text)
    if number is None:
        kind = "a long integer" if isinstance(other, JavaLong) else "an integer"
        raise JavaError("NumberFormatException", f"{reprlib.repr(text)} is not {kind}")
    return number


def _double(text: str) -> float:
    number = parse_double(text)
    if number is None:
        raise JavaError("NumberFormatException", f"{reprlib.repr(text)} is not a number")
    return number


def is_true(text: str) -> bool:
    """Parse a text like Java's ``Boolean.valueOf``."""
    return text.lower() == "true"


def searched(kind: SearchKind, text: str, part: str) -> bool:
    """Return whether ``text`` contains, starts with or ends with ``part``."""
    if kind == "CONTAINS":
        return part in text
    return text.startswith(part) if kind == "STARTSWITH" else text.endswith(part)


def in_order(operator: Order, left: float, right: float) -> bool:
    """Compare in Java's total order of doubles: NaN equals NaN and is above all numbers, -0.0 is below 0.0."""
    a, b = _sort_key(left), _sort_key(right)
    match operator:
        case "=":
            return a == b
        case "<":
            return a < b
        case "<=":
            return a <= b
        case ">":
            return a > b
        case ">=":
            return a >= b


def _sort_key(number: float) -> tuple[bool, float, bool]:
    if number != number:
        return (True, 0, True)
    return (False, number, not (number == 0 and math.copysign(1, number) < 0))
