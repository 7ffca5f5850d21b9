"""Mistakes in a filter expression that compiles, but means something else than it seems to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from librmq.filter.interpreter import JavaError, equal, negated, ordered
from librmq.filter.parser import Dialect, Selector
from librmq.filter.syntax import (
    Compare,
    Constant,
    In,
    IsNull,
    Negate,
    Node,
    Not,
    Property,
    Search,
    Truth,
    Value,
    is_boolean,
    postorder,
)


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
