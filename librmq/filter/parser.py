"""The tree of an SQL92 filter expression, and its parser, which accepts and refuses exactly what RocketMQ's does.

It mirrors ``SelectorParser`` of 4.9.4 (and 5.3's words CONTAINS, STARTSWITH, ENDSWITH). RocketMQ does not check for the
end of input: it stops at the first token that does not continue a whole expression, and ignores the rest, which the
lexer has not read. Its lexer takes the longest match at each place, whatever the grammar could use there. So lexer and
grammar are separate here too.

The tree mirrors ``org.apache.rocketmq.filter.expression`` of 4.9.4, which already reduces the language to few forms:
``a <> b`` is NOT (a = b), BETWEEN is ``>= AND <=``, NOT BETWEEN is ``< OR >``, IS NOT NULL is NOT (IS NULL), and unary
plus vanishes. A chain of AND or OR is one node with many terms, which changes no answer.

A node has its part of the expression (``start`` inclusive, ``end`` exclusive, in characters, with parentheses around
it) and the depth of the tree below it. Nodes are immutable and compared by identity.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import lark
from lark import Lark, Transformer, UnexpectedToken

from librmq.errors import FilterSyntaxError
from librmq.java.lang import INT_MAX, LONG_MAX

# ---- the tree

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


Dialect: TypeAlias = Literal["4.9", "5.3"]

MAX_DEPTH: Final = 2000
"""Most nested parentheses or operators. The broker's stack holds between 1,000 and 3,000."""

_WORDS_OF_5: Final = ("CONTAINS", "STARTSWITH", "ENDSWITH")
_READABLE: Final = {
    "$END": "the end",
    "BLOCK_COMMENT": "a comment",
    "ID": "a property",
    "STRING": "a text in single quotes",
    "INTEGER": "a number",
    "FLOAT": "a number",
    "EQ": "=",
    "NE": "<>",
    "GE": ">=",
    "LE": "<=",
    "GT": ">",
    "LT": "<",
    "PLUS": "+",
    "MINUS": "-",
    "COMMA": ",",
    "LPAR": "(",
    "RPAR": ")",
}


class Token(lark.Token):
    """A token of an expression with its place, in characters."""

    __slots__ = ()

    start_pos: int
    end_pos: int


@dataclass(frozen=True, slots=True)
class Selector:
    """A parsed expression; ``ignored_from`` is the start of the ignored rest, None if there is none."""

    expression: str
    root: Node
    ignored_from: int | None

    def source_of(self, node: Node) -> str:
        """Return a node in the words of the expression; halves of a BETWEEN as comparisons, IS NOT NULL without NOT."""
        if isinstance(node, Compare) and node.operator not in self.expression[node.left.end : node.right.start]:
            return f"{self.source_of(node.left)} {node.operator} {self.source_of(node.right)}"
        if isinstance(node, IsNull) and "NOT" in self.expression[node.operand.end : node.end].upper():
            return f"{self.source_of(node.operand)} IS NULL"
        return self.expression[node.start : node.end]

    def properties(self) -> list[str]:
        """Return the names of the properties that the expression reads, each once, in their order."""
        nodes = postorder(self.root)
        return list(dict.fromkeys(node.name for node in nodes if isinstance(node, Property)))

    def refuse_rest(self) -> None:
        """Refuse text after the whole expression, which the broker ignores."""
        if self.ignored_from is not None:
            ignored = self.expression[self.ignored_from : self.ignored_from + 40]
            reason = f"unexpected {ignored!r}; the expression ended before"
            raise FilterSyntaxError(self.expression, self.ignored_from, reason)


class _RefusedError(Exception):
    """The broker refuses a part of the expression when it builds the tree."""

    def __init__(self, position: int, reason: str) -> None:
        super().__init__(reason)
        self.position = position
        self.reason = reason


def parse(expression: str, dialect: Dialect = "4.9") -> Selector:
    """Return the tree of ``expression``. Time and memory are linear in its length. Thread-safe.

    Raises:
        FilterSyntaxError: The expression does not compile.
    """
    if dialect not in ("4.9", "5.3"):
        raise ValueError(f"dialect: expected '4.9' or '5.3', found {dialect!r}")
    names = _WORDS_OF_5 if dialect == "4.9" else ()
    run: Any = _grammar().parser.parse_interactive("")  # Lark declares no types of its methods
    trailing: Token | None = None
    nesting = 0
    try:
        for token in _tokens(expression):
            if token.type in names:
                token.type = "ID"
            elif token.type == "LPAR":
                nesting += 1
                if nesting > MAX_DEPTH:
                    raise _RefusedError(token.start_pos, f"more than {MAX_DEPTH} parentheses in one another")
            elif token.type == "RPAR":
                nesting -= 1
            try:
                run.feed_token(token)
            except UnexpectedToken:
                trailing = token
                break
        try:
            root = _boolean(run.feed_eof())
        except UnexpectedToken as error:
            problem = "the expression ends here" if trailing is None else f"unexpected {str(trailing)[:40]!r}"
            position = len(expression) if trailing is None else trailing.start_pos
            raise _RefusedError(position, f"{problem}; expected {_expected(error.expected, dialect)}") from None
    except _RefusedError as refused:
        raise FilterSyntaxError(expression, refused.position, refused.reason) from None
    return Selector(expression, root, None if trailing is None else trailing.start_pos)


def _unreadable(expression: str, position: int) -> str:
    """Return the reason why no token can be read."""
    if expression[position] == "'":
        return "this text has no closing quote"
    if expression.startswith("/*", position):
        return "this comment has no end"
    if expression[position] == '"':
        return "unexpected '\"': texts stand in single quotes"
    if expression.startswith(("!=", "=="), position):
        return f"unexpected {expression[position : position + 2]!r}: use <> and ="
    return f"unexpected {expression[position]!r}"


def _expected(terminals: Any, dialect: Dialect) -> str:  # noqa: ANN401 (lark's sets)
    names = {
        _READABLE.get(name, name)
        for name in (terminal.lstrip("_") for terminal in terminals)
        if dialect == "5.3" or name not in _WORDS_OF_5
    }
    return " or ".join(sorted(names, key=lambda name: (not name[:2].islower(), name)))


class _Grammar(NamedTuple):
    """The grammar as Lark compiles it, and its tokens as patterns."""

    parser: Lark
    with_comments: re.Pattern[str]
    without_line_comments: re.Pattern[str]


def _tokens(expression: str) -> Iterator[Token]:
    """Yield the tokens; `_RefusedError` where no token can be read."""
    grammar = _grammar()
    # Searching for the end of a line after each -- would take quadratic time on many minus signs.
    last_line_end = max(expression.rfind("\n"), expression.rfind("\r"))
    with_comments, without = grammar.with_comments.match, grammar.without_line_comments.match
    place, end = 0, len(expression)
    while place < end:
        match = with_comments(expression, place) if place < last_line_end else without(expression, place)
        if match is None:
            raise _RefusedError(place, _unreadable(expression, place))
        kind = match.lastgroup
        place = match.end()
        if kind not in _IGNORED:
            assert kind is not None
            start = match.start(kind)
            yield Token(kind, expression[start:place], start_pos=start, end_pos=place)


_IGNORED: Final = frozenset(("LINE_COMMENT", "BLOCK_COMMENT", "SPACE"))


@cache
def _grammar() -> _Grammar:
    text = files(__package__).joinpath("sql92.lark").read_text("utf-8")
    parser = Lark(text, parser="lalr", lexer="basic", transformer=_Builder(), maybe_placeholders=False)
    # At each place the longest match wins, words and comments first, as in Lark's own lexer.
    order = sorted(
        parser.terminals,
        key=lambda term: (-term.priority, -term.pattern.max_width, -len(term.pattern.value), term.name),
    )
    patterns = [(term.name, f"(?P<{term.name}>{term.pattern.to_regexp()})") for term in order]
    return _Grammar(
        parser,
        re.compile("[ \\t\\n\\r\\f]*(?:" + "|".join(text for _, text in patterns) + ")"),
        re.compile("[ \\t\\n\\r\\f]*(?:" + "|".join(text for name, text in patterns if name != "LINE_COMMENT") + ")"),
    )


def _boolean(node: Node) -> Node:
    """Return a node as a boolean: a bare property counts as one, numbers and texts do not."""
    if isinstance(node, Property):
        return Truth(node, start=node.start, end=node.end)
    if not is_boolean(node):
        raise _RefusedError(node.start, "expected a condition, such as a = 1")
    return node


def _checked(node: Node) -> Node:
    if node.depth > MAX_DEPTH:
        raise _RefusedError(node.start, f"more than {MAX_DEPTH} operators nested in one another")
    return node


_TIGHT: Final = "; NOT binds tighter than what follows: write NOT (…), or NOT before IN and BETWEEN"


def _orderable(node: Node) -> None:
    """Refuse an operand that has no order."""
    if isinstance(node, Constant):
        if isinstance(node.value, bool) or not isinstance(node.value, int | float):
            raise _RefusedError(node.start, "expected a number or a property: only numbers have an order")
    elif is_boolean(node):
        hint = _TIGHT if isinstance(node, Not) else ""
        raise _RefusedError(node.start, f"expected a number or a property: a condition has no order{hint}")


def _compare(operator: Any, left: Node, right: Node) -> Compare:  # noqa: ANN401 (lark's token)
    _orderable(left)
    _orderable(right)
    return Compare(operator, left, right, start=left.start, end=right.end)


def _equal(left: Node, right: Node) -> Compare:
    for side in (left, right):
        if isinstance(side, Constant) and side.value is None:
            raise _RefusedError(side.start, "expected a value: write IS NULL to ask for NULL")
    match left, right:
        case Constant(value=bool()), Constant(value=other) if not isinstance(other, bool):
            raise _RefusedError(right.start, "expected TRUE or FALSE: the left side is a boolean")
    return Compare("=", left, right, start=left.start, end=right.end)


def _negated(node: Node) -> Not:
    return Not(node, start=node.start, end=node.end)


def _in(children: list[Any], negated: bool) -> In:
    operand = children[0]
    if not isinstance(operand, Property):
        hint = _TIGHT if isinstance(operand, Not) else ""
        raise _RefusedError(operand.start, f"expected a property on the left of IN{hint}")
    values = tuple(_unquoted(child) for child in children[1:] if child.__class__ is Token and child.type == "STRING")
    return In(operand, values, negated, start=operand.start, end=children[-1].end_pos)


def _search(children: list[Any], negated: bool) -> Search:
    word, text = children[-2:]
    operand = children[0]
    return Search(word.type, operand, _unquoted(text), negated, start=operand.start, end=text.end_pos)


def _unquoted(token: Token) -> str:
    return token[1:-1].replace("''", "'")


def _integer(token: Token) -> Value:
    digits = token.rstrip("lL")
    value = int(digits) if len(digits) <= 19 else LONG_MAX + 1
    if value > LONG_MAX:
        raise _RefusedError(token.start_pos, f"this integer is larger than {LONG_MAX}")
    return value if value <= INT_MAX else JavaLong(value)


def _float(token: Token) -> Value:
    value = float(token)
    if value == 0:
        raise _RefusedError(token.start_pos, "a zero with a decimal point is refused: write 0")
    if value == float("inf"):
        raise _RefusedError(token.start_pos, "this number is too large")
    return value


def _literal(read: Callable[[Token], Value]) -> Any:  # noqa: ANN401 (lark's rule)
    def build(self: Any, children: list[Token]) -> Constant:  # noqa: ANN401 (lark's transformer)
        (token,) = children
        return Constant(read(token), start=token.start_pos, end=token.end_pos)

    return build


class _Builder(Transformer[Any, Node]):
    """A method for each rule of the grammar, called while parsing, so a deep tree is never walked."""

    text = _literal(_unquoted)
    integer = _literal(_integer)
    float = _literal(_float)
    true = _literal(lambda token: True)
    false = _literal(lambda token: False)
    null = _literal(lambda token: None)

    def property(self, children: list[Token]) -> Node:
        (token,) = children
        return Property(str(token), start=token.start_pos, end=token.end_pos)

    def group(self, children: list[Any]) -> Node:
        left, node, right = children
        longer: Node = replace(node, start=left.start_pos, end=right.end_pos)
        return longer

    def plus(self, children: list[Any]) -> Node:
        sign, node = children
        longer: Node = replace(node, start=sign.start_pos, end=node.end)
        return longer

    def minus(self, children: list[Any]) -> Node:
        sign, node = children
        return _checked(Negate(node, start=sign.start_pos, end=node.end))

    def negation(self, children: list[Any]) -> Node:
        word, node = children
        return _checked(Not(_boolean(node), start=word.start_pos, end=node.end))

    def conjunction(self, children: list[Node]) -> Node:
        terms = [
            part for term in map(_boolean, children) for part in (term.terms if isinstance(term, And) else (term,))
        ]
        return _checked(And(tuple(terms), start=children[0].start, end=children[-1].end))

    def disjunction(self, children: list[Node]) -> Node:
        terms = [part for term in map(_boolean, children) for part in (term.terms if isinstance(term, Or) else (term,))]
        return _checked(Or(tuple(terms), start=children[0].start, end=children[-1].end))

    def equal(self, children: list[Any]) -> Node:
        return _checked(_equal(children[0], children[2]))

    def not_equal(self, children: list[Any]) -> Node:
        return _checked(_negated(_equal(children[0], children[2])))

    def is_null(self, children: list[Any]) -> Node:
        node, word = children
        return _checked(IsNull(node, start=node.start, end=word.end_pos))

    def is_not_null(self, children: list[Any]) -> Node:
        node, _, word = children
        return _checked(_negated(IsNull(node, start=node.start, end=word.end_pos)))

    def order(self, children: list[Any]) -> Node:
        left, operator, right = children
        return _checked(_compare(str(operator), left, right))

    def between(self, children: list[Any]) -> Node:
        value, low, high = children
        if isinstance(low, Constant) and isinstance(high, Constant):
            # The broker refuses bounds of a wrong type in any case. Numbers of all types compare by value, as doubles
            # if one of them is a double.
            _orderable(low)
            _orderable(high)
            bounds = (low.value, high.value)
            if any(isinstance(bound, float) for bound in bounds):
                bounds = (float(bounds[0]), float(bounds[1]))  # type: ignore[arg-type]
            if bounds[1] < bounds[0]:  # type: ignore[operator]
                raise _RefusedError(high.start, "the upper bound of BETWEEN is below the lower one")
        terms = (_compare(">=", value, low), _compare("<=", value, high))
        return _checked(And(terms, start=value.start, end=high.end))

    def not_between(self, children: list[Any]) -> Node:
        value, _, low, high = children
        terms = (_compare("<", value, low), _compare(">", value, high))
        return _checked(Or(terms, start=value.start, end=high.end))

    def in_list(self, children: list[Any]) -> Node:
        return _in(children, negated=False)

    def not_in_list(self, children: list[Any]) -> Node:
        return _in(children, negated=True)

    def search(self, children: list[Any]) -> Node:
        return _checked(_search(children, negated=False))

    def not_search(self, children: list[Any]) -> Node:
        return _checked(_search(children, negated=True))
