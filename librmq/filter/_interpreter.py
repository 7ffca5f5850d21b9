"""A plain interpreter of filter trees: the meaning of the language, written to be read, not to be fast.

It mirrors ``evaluate`` of the classes in ``org.apache.rocketmq.filter.expression`` of 4.9.4. Tests compare the other
back-ends with it, and ``explain`` shows the values that it finds. It does not recurse, because a tree can be deeper
than Python's stack. `lint` names mistakes in an expression that compiles, but means something else than it seems to.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from librmq.errors import FilterEvaluationError
from librmq.filter.parser import (
    And,
    Compare,
    Constant,
    Dialect,
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
    children,
    is_boolean,
    postorder,
)
from librmq.java.lang import java_int, java_long, parse_double
from librmq.override import override

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
            return (yield from _until(node.terms, decisive=False))
        case Or():
            return (yield from _until(node.terms, decisive=True))
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


def _until(terms: tuple[Node, ...], *, decisive: bool) -> _Steps:
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


# ---- explanations

WIDTH: Final = 60

_Outcome: TypeAlias = Value | FilterEvaluationError


@dataclass(frozen=True, slots=True)
class Explanation:
    """The explanation of one decision; ``str(explanation)`` is its text."""

    matches: bool
    """The broker's decision: true only for the verdict TRUE."""
    verdict: str
    """``TRUE``, ``FALSE``, ``UNKNOWN`` or ``ERROR``."""
    decided_by: str
    """The term that decided, in the words of the expression."""
    why: str
    """The values that decided in that term."""
    tree: tuple[str, ...]
    """A line for each term: its text, its verdict and its values, or that it was not evaluated."""

    @override
    def __str__(self) -> str:
        head = f"{'match' if self.matches else 'no match'}: the filter is {self.verdict}"
        return "\n".join((head, f"decided by: {self.decided_by}", f"because {self.why}", "", *self.tree))


def explain(selector: Selector, properties: Mapping[str, str] | None) -> Explanation:
    """Evaluate ``selector`` for a message with ``properties``, and explain the result."""
    seen: dict[int, _Outcome] = {}

    def record(node: Node, outcome: _Outcome) -> None:
        seen[id(node)] = outcome

    outcome: _Outcome
    try:
        outcome = evaluate(selector, properties, record)
    except FilterEvaluationError as error:
        outcome = error
    decisive = _decisive(selector.root, seen)
    return Explanation(
        matches=outcome is True,
        verdict=_verdict(outcome),
        decided_by=_short(selector.source_of(decisive)),
        why=_why(selector, decisive, seen),
        tree=tuple(_lines(selector, seen)),
    )


def _verdict(outcome: _Outcome) -> str:
    if isinstance(outcome, FilterEvaluationError):
        return "ERROR"
    return "UNKNOWN" if outcome is None else str(outcome).upper()


def _decisive(node: Node, seen: dict[int, _Outcome]) -> Node:
    """Return the innermost term that alone gave the whole its verdict, or the first of several such terms."""
    while True:
        outcome = seen[id(node)]
        match node:
            case And() | Or():
                if outcome is isinstance(node, And):
                    return node  # all terms of an AND hold, or none of an OR
                node = next(term for term in node.terms if seen[id(term)] is outcome)
            case Not():
                node = node.operand
            case _:
                within = [child for child in children(node) if is_boolean(child)]
                failed = [child for child in within if isinstance(seen.get(id(child)), FilterEvaluationError)]
                if not failed:
                    return node
                node = failed[0]


def _why(selector: Selector, node: Node, seen: dict[int, _Outcome]) -> str:
    outcome = seen[id(node)]
    if isinstance(outcome, FilterEvaluationError):
        return f"{outcome.reason}: that is an error, so no match ({outcome.java_name})"
    match node:
        case And():
            return "all of its terms are TRUE"
        case Or():
            return "none of its terms is TRUE"
        case Truth():
            rule = "a bare property is UNKNOWN when missing, else FALSE, never TRUE"
            return f"{_evaluated_values(selector, node, seen)}; {rule}"
        case _:
            return f"{_evaluated_values(selector, node, seen) or 'it is written so'}; that is {_verdict(outcome)}"


def _evaluated_values(selector: Selector, node: Node, seen: dict[int, _Outcome]) -> str:
    """Return the values that a term evaluated, except constants."""
    parts = []
    for child in children(node):
        if id(child) not in seen or isinstance(child, Constant):
            continue
        if isinstance(child, Negate) and isinstance(child.operand, Constant):
            continue
        value = seen[id(child)]
        if isinstance(value, FilterEvaluationError):
            continue
        if isinstance(child, Property):
            text = "missing" if value is None else _short(repr(value))
            parts.append(f"{child.name} is {text}")
        elif isinstance(child, Negate):
            parts.append(f"{_short(selector.source_of(child))} is {'null' if value is None else value}")
        else:
            parts.append(f"{_short(selector.source_of(child))} is {_verdict(value)}")
    return ", ".join(dict.fromkeys(parts))


def _lines(selector: Selector, seen: dict[int, _Outcome]) -> list[str]:
    rows: list[tuple[str, str, str]] = []
    pending = [(selector.root, 0)]
    while pending:
        node, level = pending.pop()
        label = "  " * level + _short(selector.source_of(node))
        if id(node) not in seen:
            rows.append((label, "-", "not evaluated"))
            continue
        leaf = isinstance(node, Compare | In | IsNull | Search | Truth)
        outcome = seen[id(node)]
        saw = _evaluated_values(selector, node, seen) if leaf else ""
        if leaf and isinstance(outcome, FilterEvaluationError) and outcome.term == selector.source_of(node):
            saw = f"{saw}: {outcome.reason}" if saw else outcome.reason
        rows.append((label, _verdict(outcome), saw))
        terms = [child for child in children(node) if is_boolean(child) and not isinstance(child, Constant)]
        pending.extend((term, level + 1) for term in reversed(terms))
    width = min(max(len(label) for label, _, _ in rows), 2 * WIDTH)
    return [f"{label:<{width}}  {verdict:<7}  {saw}".rstrip() for label, verdict, saw in rows]


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= WIDTH else f"{text[: WIDTH - 20]} … {text[-17:]}"


# ---- mistakes in expressions


@dataclass(frozen=True, slots=True, order=True)
class Lint:
    """One finding: from ``position`` to ``end`` (exclusive) in the expression, a short name, advice."""

    position: int
    """Its first character, counting from 0."""
    end: int
    """The character behind its last one."""
    rule: str
    """The short name of the finding."""
    advice: str
    """What to write instead."""

    @override
    def __str__(self) -> str:
        return f"at {self.position}: {self.advice} [{self.rule}]"


def lint(selector: Selector, dialect: Dialect) -> list[Lint]:
    """Return all findings, from left to right."""
    findings = [finding for node in postorder(selector.root) for finding in _findings(selector, node)]
    if selector.ignored_from is not None:
        ignored = selector.expression[selector.ignored_from :]
        advice = f"{ignored[:40]!r} is ignored: the expression ends before it"
        if dialect == "4.9" and ignored[:8].upper().startswith(("CONTAINS", "STARTSWI", "ENDSWITH")):
            advice += "; this word is an operator in the dialect 5.3 only"
        findings.append(Lint(selector.ignored_from, len(selector.expression), "ignored-rest", advice))
    return sorted(set(findings))


def _findings(selector: Selector, node: Node) -> Iterator[Lint]:
    match node:
        case Compare():
            yield from _comparison(node)
            yield from _loose_not(selector, node, node.left)
        case IsNull():
            yield from _loose_not(selector, node, node.operand)
        case Search():
            yield from _loose_not(selector, node, node.operand)
            if not node.text:
                yield _at(node, "always-false", "an empty text is never found: this is always FALSE")
            elif not isinstance(node.operand, Property | Constant):
                yield _at(node, "always-false", "only a text can be searched: this is always FALSE")
        case Not(operand=Compare(operator="=") as within) if (node.start, node.end) == (
            within.start,
            within.end,
        ):
            if isinstance(within.right, Property):
                name = within.right.name
                advice = f"TRUE when {name} is missing and the left side is not; add AND {name} IS NOT NULL"
                yield _at(within.right, "missing-is-different", advice)
        case Truth():
            name = node.operand.name
            advice = f"a bare property is never TRUE: write {name} = TRUE or {name} IS NOT NULL, or quote '{name}'"
            yield _at(node, "bare-word", advice)
        case Negate() if _kind(node.operand) != "number" and not isinstance(node.operand, Negate):
            yield _at(node, "always-null", "minus of anything but a number in the expression is NULL")
        case In() if set(node.values) == {""}:
            yield _at(node, "empty-text", _EMPTY)


_EMPTY: Final = "a stored message has no empty properties: write IS NULL for a missing one"
_Kind: TypeAlias = Literal["number", "text", "boolean", "null", "property"]


def _at(node: Node, rule: str, advice: str) -> Lint:
    return Lint(node.start, node.end, rule, advice)


def _loose_not(selector: Selector, node: Node, left: Node) -> Iterator[Lint]:
    if isinstance(left, Not) and selector.expression[left.start] in "nN":
        comparison = selector.expression[left.operand.start : node.end]
        advice = f"NOT binds tighter than this comparison: write NOT ({comparison}), or put (NOT …) in parentheses"
        yield _at(left, "not-binds-tighter", advice)


def _constant(node: Node) -> tuple[Value] | None:
    """Return the value of an operand without properties, in a tuple."""
    signs = 0
    while isinstance(node, Negate):
        signs += 1
        node = node.operand
    if not isinstance(node, Constant):
        return None
    value = node.value
    for _ in range(min(signs, 2 - signs % 2)):
        value = negated(value)
    return (value,)


def _kind(node: Node) -> _Kind:
    constant = _constant(node)
    if constant is None:
        if isinstance(node, Property):
            return "property"
        return "boolean" if is_boolean(node) else "null"
    match constant[0]:
        case None:
            return "null"
        case bool():
            return "boolean"
        case str():
            return "text"
        case _:
            return "number"


def _comparison(node: Compare) -> Iterator[Lint]:
    left, right = _constant(node.left), _constant(node.right)
    if left is not None and right is not None:
        try:
            verdict = equal(left[0], right[0]) if node.operator == "=" else ordered(node.operator, left[0], right[0])
            outcome = "UNKNOWN" if verdict is None else str(verdict).upper()
        except JavaError:
            outcome = "an error, so no match"
        yield _at(node, "constant", f"this does not depend on any property: it is always {outcome}")
        return
    kinds = (_kind(node.left), _kind(node.right))
    if "property" in kinds and "number" in kinds:
        side, constant = (node.right, right) if left is None else (node.left, left)
        if constant is not None and isinstance(constant[0], int):
            advice = f"a property with decimals ('{constant[0]}.0') is an error against an integer, so no match"
            if constant[0] != 0:  # a zero with decimals is refused as a literal
                advice += f": write {constant[0]}.0 if it may have them"
            yield _at(side, "integer-literal", advice)
    elif kinds == ("property", "property") and node.operator == "=":
        assert isinstance(node.right, Property)
        name = node.right.name
        yield _at(node.right, "bare-word", f"{name} is the name of a property: write '{name}' if the text is meant")
    elif kinds[0] == "boolean" and kinds[1] in ("property", "text"):
        advice = "a boolean on the left of a text is an error, so no match: put the boolean on the right"
        yield _at(node, "boolean-on-the-left", advice)
    elif set(kinds) == {"boolean", "number"}:
        yield _at(node, "type-mismatch", "a boolean never equals a number: this is never TRUE")
    elif "" in (left or right or ()) and "property" in kinds:
        yield _at(node, "empty-text", _EMPTY)
