"""The tree of an SQL92 filter expression, which the parser builds and all other modules read.

It mirrors ``org.apache.rocketmq.filter.expression`` of 4.9.4, which already reduces the language to few forms: ``a <>
b`` is NOT (a = b), BETWEEN is ``>= AND <=``, NOT BETWEEN is ``< OR >``, IS NOT NULL is NOT (IS NULL), and unary plus
vanishes. A chain of AND or OR is one node with many terms, which changes no answer.

A node has its part of the expression (``start`` inclusive, ``end`` exclusive, in characters, with parentheses around
it) and the depth of the tree below it. Nodes are immutable and compared by identity.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Final, Literal, TypeAlias

Order: TypeAlias = Literal["=", "<", "<=", ">", ">="]
SearchKind: TypeAlias = Literal["CONTAINS", "STARTSWITH", "ENDSWITH"]


class JavaLong(int):
    """An integer literal too large for Java's int; a text compared with it is parsed as a long."""


Value: TypeAlias = bool | str | int | JavaLong | float | None
"""The value of an expression: NULL or UNKNOWN, Boolean, String, Integer, Long, Double."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Node:
    """Base of all nodes."""

    start: int
    end: int
    depth: int = field(init=False, default=1)

    def __post_init__(self) -> None:
        below = children(self)
        if below:
            object.__setattr__(self, "depth", 1 + max([child.depth for child in below]))


@dataclass(frozen=True, slots=True, eq=False)
class Property(Node):
    """The text of a property, or null."""

    name: str


@dataclass(frozen=True, slots=True, eq=False)
class Constant(Node):
    """A literal: NULL, TRUE, FALSE, a text, a number."""

    value: Value


@dataclass(frozen=True, slots=True, eq=False)
class Negate(Node):
    """Unary minus: null for anything but a number."""

    operand: Node


@dataclass(frozen=True, slots=True, eq=False)
class Compare(Node):
    """``=`` and the four orders; for BETWEEN two of them under an And."""

    operator: Order
    left: Node
    right: Node


@dataclass(frozen=True, slots=True, eq=False)
class IsNull(Node):
    """IS NULL: TRUE for null and UNKNOWN, else FALSE."""

    operand: Node


@dataclass(frozen=True, slots=True, eq=False)
class In(Node):
    """[NOT] IN; the broker accepts only a property as ``operand``."""

    operand: Property
    values: tuple[str, ...]
    negated: bool


@dataclass(frozen=True, slots=True, eq=False)
class Search(Node):
    """[NOT] CONTAINS, STARTSWITH, ENDSWITH of 5.x."""

    kind: SearchKind
    operand: Node
    text: str
    negated: bool


@dataclass(frozen=True, slots=True, eq=False)
class Truth(Node):
    """A bare property in place of a boolean: FALSE when present, UNKNOWN when missing."""

    operand: Property


@dataclass(frozen=True, slots=True, eq=False)
class Not(Node):
    """``NOT operand``."""

    operand: Node


@dataclass(frozen=True, slots=True, eq=False)
class And(Node):
    """Two terms or more, evaluated from the left until one is FALSE."""

    terms: tuple[Node, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Or(Node):
    """Two terms or more, evaluated from the left until one is TRUE."""

    terms: tuple[Node, ...]


_BOOLEAN: Final = (Compare, IsNull, In, Search, Truth, Not, And, Or)


def is_boolean(node: Node) -> bool:
    """Return whether the broker treats the node as a boolean expression; NULL counts as one."""
    return isinstance(node, _BOOLEAN) or (
        isinstance(node, Constant) and (node.value is None or isinstance(node.value, bool))
    )


def children(node: Node) -> tuple[Node, ...]:
    """Return the nodes right below, in the order of their evaluation."""
    match node:
        case And() | Or():
            return node.terms
        case Compare():
            return (node.left, node.right)
        case Negate() | IsNull() | In() | Search() | Truth() | Not():
            return (node.operand,)
        case _:
            return ()


def postorder(root: Node) -> Iterator[Node]:
    """Yield all nodes, children before parents, without recursion: a tree can be deeper than Python's stack."""
    pending = [(root, False)]
    while pending:
        node, seen = pending.pop()
        below = children(node)
        if seen or not below:
            yield node
        else:
            pending.append((node, True))
            pending.extend((child, False) for child in reversed(below))


def respan(node: Node, start: int, end: int) -> Node:
    """Return the same node for a longer part of the expression."""
    return replace(node, start=start, end=end)
