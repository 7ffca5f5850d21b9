"""What an expression asks of a message: its tree reduced to a few kinds of questions for all back-ends.

The type of every operand is known before any message is: a literal has one, a property is a text or missing,
a comparison is a boolean. So every comparison is resolved here to one kind of question, with constants worked
out and the property on the left; what is left to a back-end are seven questions about properties and five
ways to combine answers. An answer is TRUE, FALSE, UNKNOWN, or an error; ``may_fail`` and ``may_be_unknown``
say what is possible.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, TypeAlias

from librmq.filter.interpreter import JavaError, equal, is_true, negated, ordered, searched
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
    Order,
    Property,
    Search,
    SearchKind,
    Truth,
    Value,
    children,
    postorder,
)

__all__ = [
    "All",
    "Always",
    "Answer",
    "AnyOf",
    "Mapped",
    "Missing",
    "Negation",
    "NumberIs",
    "OrderOf",
    "Question",
    "SameAnswer",
    "SameText",
    "TextIn",
    "TextSearch",
    "TextTrue",
    "below",
    "cheapest_first",
    "names",
    "reduce",
]


class Answer(Enum):
    """What a question can come to, an error apart."""

    TRUE = "TRUE"
    FALSE = "FALSE"
    UNKNOWN = "UNKNOWN"
    ERROR = "ERROR"

    @staticmethod
    def of(value: bool | None) -> Answer:
        """Return the answer for a value of SQL."""
        return Answer.UNKNOWN if value is None else Answer.TRUE if value else Answer.FALSE


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """What all questions have."""

    may_fail: bool = field(init=False, default=False)
    may_be_unknown: bool = field(init=False, default=False)


def _set(question: Question, may_fail: bool, may_be_unknown: bool) -> None:
    object.__setattr__(question, "may_fail", may_fail)
    object.__setattr__(question, "may_be_unknown", may_be_unknown)


@dataclass(frozen=True, slots=True, eq=False)
class Always(Question):
    """The same answer for every message."""

    answer: Answer

    def __post_init__(self) -> None:
        _set(self, self.answer is Answer.ERROR, self.answer is Answer.UNKNOWN)


@dataclass(frozen=True, slots=True, eq=False)
class Missing(Question):
    """Is there no such property?"""

    name: str


@dataclass(frozen=True, slots=True, eq=False)
class TextIn(Question):
    """Is the property one of these texts? UNKNOWN when missing."""

    name: str
    texts: tuple[str, ...]

    def __post_init__(self) -> None:
        _set(self, False, True)


@dataclass(frozen=True, slots=True, eq=False)
class TextTrue(Question):
    """Is the property ``true`` in any case? UNKNOWN when missing."""

    name: str

    def __post_init__(self) -> None:
        _set(self, False, True)


@dataclass(frozen=True, slots=True, eq=False)
class NumberIs(Question):
    """How does the property, read as a number of the literal's type, compare with it? UNKNOWN when missing.

    The literal is an int, a ``JavaLong``, or a float that is finite and not zero.
    """

    name: str
    operator: Order
    number: int | float

    def __post_init__(self) -> None:
        _set(self, True, True)


@dataclass(frozen=True, slots=True, eq=False)
class SameText(Question):
    """Are two properties equal? Both missing: TRUE; the left: UNKNOWN; the right: FALSE."""

    left: str
    right: str

    def __post_init__(self) -> None:
        _set(self, False, True)


@dataclass(frozen=True, slots=True, eq=False)
class OrderOf(Question):
    """How do two properties compare, both read as doubles? UNKNOWN when either is missing."""

    left: str
    operator: Order
    right: str

    def __post_init__(self) -> None:
        _set(self, True, True)


@dataclass(frozen=True, slots=True, eq=False)
class TextSearch(Question):
    """Does the property contain ``text`` (not empty), begin or end so? FALSE when missing, even negated."""

    name: str
    kind: SearchKind
    text: str
    negated: bool


@dataclass(frozen=True, slots=True, eq=False)
class Negation(Question):
    """TRUE for FALSE and the reverse; UNKNOWN and errors stay."""

    of: Question

    def __post_init__(self) -> None:
        _set(self, self.of.may_fail, self.of.may_be_unknown)


@dataclass(frozen=True, slots=True, eq=False)
class All(Question):
    """AND from the left: an error counts only when no FALSE stands before it."""

    of: tuple[Question, ...]

    def __post_init__(self) -> None:
        _set(self, any(term.may_fail for term in self.of), any(term.may_be_unknown for term in self.of))


@dataclass(frozen=True, slots=True, eq=False)
class AnyOf(Question):
    """OR from the left: an error counts only when no TRUE stands before it."""

    of: tuple[Question, ...]

    def __post_init__(self) -> None:
        _set(self, any(term.may_fail for term in self.of), any(term.may_be_unknown for term in self.of))


@dataclass(frozen=True, slots=True, eq=False)
class Mapped(Question):
    """Another answer for each answer; an error stays one."""

    of: Question
    when_true: Answer
    when_false: Answer
    when_unknown: Answer

    def __post_init__(self) -> None:
        outcomes = (self.when_true, self.when_false, self.when_unknown)
        _set(self, self.of.may_fail, Answer.UNKNOWN in outcomes)


@dataclass(frozen=True, slots=True, eq=False)
class SameAnswer(Question):
    """Two booleans compared; both are always asked.

    Both UNKNOWN: TRUE; only the left: UNKNOWN; only the right: FALSE.

    ``clash``: two that are known are an error (a boolean on the left, a text on the right).
    """

    left: Question
    right: Question
    clash: bool

    def __post_init__(self) -> None:
        may_fail = self.clash or self.left.may_fail or self.right.may_fail
        _set(self, may_fail, self.left.may_be_unknown)


def below(question: Question) -> tuple[Question, ...]:
    """Return the questions right below, in the order in which they are asked."""
    match question:
        case All() | AnyOf():
            return question.of
        case Negation() | Mapped():
            return (question.of,)
        case SameAnswer():
            return (question.left, question.right)
        case _:
            return ()


def names(root: Question) -> Iterator[str]:
    """Yield each property that the expression reads, with repetitions."""
    pending = [root]
    while pending:
        question = pending.pop()
        match question:
            case Missing() | TextIn() | TextTrue() | NumberIs() | TextSearch():
                yield question.name
            case SameText() | OrderOf():
                yield question.left
                yield question.right
        pending.extend(below(question))


def cheapest_first(question: Question) -> Question:
    """Sort a chain of ANDs by cost, where only TRUE matters: any other answer ends it, in any order."""
    if not isinstance(question, All):
        return question
    terms: list[Question] = []
    pending: list[Question] = [question]
    while pending:
        term = pending.pop()
        if isinstance(term, All):
            pending.extend(reversed(term.of))
        else:
            terms.append(term)
    return All(tuple(sorted(terms, key=_cost)))


def _cost(question: Question) -> int:
    """Return what a question costs, roughly; a number read counts most."""
    pending, cost = [question], 0
    while pending:
        part = pending.pop()
        match part:
            case NumberIs():
                cost += 4
            case OrderOf():
                cost += 20
            case Missing() | TextIn() | SameText():
                cost += 1
            case TextTrue() | TextSearch():
                cost += 2
        pending.extend(below(part))
    return cost


TRUE: Final = Always(Answer.TRUE)
FALSE: Final = Always(Answer.FALSE)
UNKNOWN: Final = Always(Answer.UNKNOWN)
ERROR: Final = Always(Answer.ERROR)

_FLIPPED: Final[dict[Order, Order]] = {"=": "=", "<": ">", "<=": ">=", ">": "<", ">=": "<="}


@dataclass(frozen=True, slots=True)
class _Known:
    """An operand whose value is known."""

    value: Value


@dataclass(frozen=True, slots=True)
class _NullAfter:
    """Minus of a boolean: null, once the boolean was worked out without an error."""

    question: Question


_Operand: TypeAlias = "Property | _Known | _NullAfter | Question"


def reduce(root: Node) -> Question:
    """Return the question that a whole expression asks."""
    found: dict[int, _Operand] = {}
    for node in postorder(root):
        found[id(node)] = _reduced(node, [found[id(child)] for child in children(node)])
    return _asked(found[id(root)])


def _asked(operand: _Operand) -> Question:
    """Return an operand where a boolean is wanted."""
    if isinstance(operand, _Known):
        assert operand.value is None or isinstance(operand.value, bool)
        return Always(Answer.of(operand.value))
    assert isinstance(operand, Question)
    return operand


def _reduced(node: Node, operands: list[_Operand]) -> _Operand:
    match node:
        case Property():
            return node
        case Constant():
            return _Known(node.value)
        case Negate():
            return _minus(operands[0])
        case And():
            return All(tuple(map(_asked, operands)))
        case Or():
            return _any_of(list(map(_asked, operands)))
        case Not():
            return _negation(_asked(operands[0]))
        case Truth():  # FALSE when present, UNKNOWN when missing
            return All((Missing(node.operand.name), UNKNOWN))
        case In():
            question = TextIn(node.operand.name, node.values)
            return Negation(question) if node.negated else question
        case IsNull():
            return _is_null(operands[0])
        case Search():
            return _search(node, operands[0])
        case Compare():
            left, right = operands
            return _equal(left, right) if node.operator == "=" else _ordered(node.operator, left, right)
        case _:
            raise AssertionError(node)


def _any_of(terms: list[Question]) -> Question:
    """Join terms by OR; neighbours that ask for texts of one property become one question, as if by IN."""
    joined: list[Question] = []
    texts: list[str] = []
    for number, term in enumerate(terms):
        if not isinstance(term, TextIn):
            joined.append(term)
            continue
        texts += term.texts
        following = terms[number + 1] if number + 1 < len(terms) else None
        if not (isinstance(following, TextIn) and following.name == term.name):
            joined.append(TextIn(term.name, tuple(texts)))
            texts = []
    return AnyOf(tuple(joined)) if len(joined) > 1 else joined[0]


def _negation(question: Question) -> Question:
    return question.of if isinstance(question, Negation) else Negation(question)


def _minus(operand: _Operand) -> _Operand:
    match operand:
        case _Known():
            return _Known(negated(operand.value))
        case _NullAfter():
            return operand
        case Question():
            return _NullAfter(operand)
        case _:
            return _Known(None)


def _after(question: Question, then: Question) -> Question:
    """Return ``then``, unless working out ``question`` fails."""
    if not question.may_fail:
        return then
    return All((Mapped(question, Answer.TRUE, Answer.TRUE, Answer.TRUE), then))


def _is_null(operand: _Operand) -> Question:
    match operand:
        case _Known():
            return Always(Answer.of(operand.value is None))
        case _NullAfter():
            return _after(operand.question, TRUE)
        case Question():
            return Mapped(operand, Answer.FALSE, Answer.FALSE, Answer.TRUE)
        case Property():
            return Missing(operand.name)
    raise AssertionError(operand)


def _search(node: Search, operand: _Operand) -> Question:
    match operand:
        case Property() if node.text:
            return TextSearch(operand.name, node.kind, node.text, node.negated)
        case _Known(str(text)) if node.text:
            return Always(Answer.of(searched(node.kind, text, node.text) is not node.negated))
        case _NullAfter():
            return _after(operand.question, FALSE)
        case Question():
            return _after(operand, FALSE)
        case _:
            return FALSE


def _equal(left: _Operand, right: _Operand) -> Question:  # noqa: C901 (a case for each pair of types)
    for side in (left, right):
        if isinstance(side, _NullAfter):
            null = _Known(None)
            return _after(side.question, _equal(null if side is left else left, null if side is right else right))
    match left, right:
        case _Known(), _Known():
            try:
                return Always(Answer.of(equal(left.value, right.value)))
            except JavaError:
                return ERROR
        case Property(), _Known():
            return _property_is(left.name, right.value)
        case _Known(), Property():
            return _value_is_property(left.value, right.name)
        case Property(), Property():
            return SameText(left.name, right.name)
        case Question(), _Known():
            return _answer_is(left, right.value)
        case _Known(), Question():
            return _value_is_answer(left.value, right)
        case Question(), Property():
            return SameAnswer(left, TextTrue(right.name), clash=True)
        case Property(), Question():
            return SameAnswer(TextTrue(left.name), right, clash=False)
        case Question(), Question():
            return SameAnswer(left, right, clash=False)
    raise AssertionError(left, right)


def _property_is(name: str, value: Value) -> Question:
    match value:
        case None:
            return Missing(name)
        case bool():
            return TextTrue(name) if value else Negation(TextTrue(name))
        case str():
            return TextIn(name, (value,))
        case _:
            return NumberIs(name, "=", value)


def _value_is_property(value: Value, name: str) -> Question:
    match value:
        case None:  # TRUE when missing, UNKNOWN when present
            return AnyOf((Missing(name), UNKNOWN))
        case bool():
            return SameAnswer(Always(Answer.of(value)), TextTrue(name), clash=True)
        case _:  # FALSE, not UNKNOWN, when missing
            return All((Negation(Missing(name)), _property_is(name, value)))


def _answer_is(question: Question, value: Value) -> Question:
    match value:
        case None:
            return _is_null(question)
        case bool():
            return question if value else _negation(question)
        case str():
            return SameAnswer(question, TRUE, clash=True)
        case _:
            return Mapped(question, Answer.FALSE, Answer.FALSE, Answer.UNKNOWN)


def _value_is_answer(value: Value, question: Question) -> Question:
    match value:
        case None:
            return Mapped(question, Answer.UNKNOWN, Answer.UNKNOWN, Answer.TRUE)
        case str():
            return _value_is_answer(is_true(value), question)
        case bool():
            return Mapped(question, Answer.of(value), Answer.of(not value), Answer.FALSE)
        case _:
            return _after(question, FALSE)


def _ordered(operator: Order, left: _Operand, right: _Operand) -> Question:
    match left, right:
        case _Known(), _Known():
            try:
                return Always(Answer.of(ordered(operator, left.value, right.value)))
            except JavaError:
                return ERROR
        case (_Known(None), _) | (Property(), _Known(None)):
            return UNKNOWN
        case _NullAfter(), _:  # after a null the right is not looked at
            return _after(left.question, UNKNOWN)
        case _Known(), _NullAfter():
            return _after(right.question, UNKNOWN)
        case Property(), _NullAfter():
            return All((AnyOf((Missing(left.name), _after(right.question, TRUE))), UNKNOWN))
        case Property(), Property():
            return OrderOf(left.name, operator, right.name)
        case Property(), _Known():
            return _number_is(left.name, operator, right.value)
        case _Known(), Property():
            return _number_is(right.name, _FLIPPED[operator], left.value)
    raise AssertionError(left, right)


def _number_is(name: str, operator: Order, number: Value) -> Question:
    assert isinstance(number, int | float)
    return NumberIs(name, operator, number)
