"""Explanations of a filter's decision: every term with its values and its verdict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from librmq.errors import FilterEvaluationError
from librmq.filter import interpreter
from librmq.filter.parser import Selector
from librmq.filter.syntax import (
    And,
    Compare,
    Constant,
    In,
    IsNull,
    Negate,
    Node,
    Not,
    Or,
    Property,
    Search,
    Truth,
    Value,
    children,
    is_boolean,
)

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
        outcome = interpreter.evaluate(selector, properties, record)
    except FilterEvaluationError as error:
        outcome = error
    decisive = _decisive(selector.root, seen)
    return Explanation(
        matches=outcome is True,
        verdict=_verdict(outcome),
        decided_by=_short(selector.text(decisive)),
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
            parts.append(f"{_short(selector.text(child))} is {'null' if value is None else value}")
        else:
            parts.append(f"{_short(selector.text(child))} is {_verdict(value)}")
    return ", ".join(dict.fromkeys(parts))


def _lines(selector: Selector, seen: dict[int, _Outcome]) -> list[str]:
    rows: list[tuple[str, str, str]] = []
    pending = [(selector.root, 0)]
    while pending:
        node, level = pending.pop()
        label = "  " * level + _short(selector.text(node))
        if id(node) not in seen:
            rows.append((label, "-", "not evaluated"))
            continue
        leaf = isinstance(node, Compare | In | IsNull | Search | Truth)
        outcome = seen[id(node)]
        saw = _evaluated_values(selector, node, seen) if leaf else ""
        if leaf and isinstance(outcome, FilterEvaluationError) and outcome.term == selector.text(node):
            saw = f"{saw}: {outcome.reason}" if saw else outcome.reason
        rows.append((label, _verdict(outcome), saw))
        pending.extend((child, level + 1) for child in reversed(children(node)) if _is_term(child))
    width = min(max(len(label) for label, _, _ in rows), 2 * WIDTH)
    return [f"{label:<{width}}  {verdict:<7}  {saw}".rstrip() for label, verdict, saw in rows]


def _is_term(node: Node) -> bool:
    return is_boolean(node) and not isinstance(node, Constant)


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= WIDTH else f"{text[: WIDTH - 20]} … {text[-17:]}"
