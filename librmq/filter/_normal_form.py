"""The normal form of an expression, which all back-ends read: questions about a message.

Seven kinds ask about properties, five combine answers, and one has the same answer for every message. All types and
constants are resolved, so a back-end need not know the language. An answer is TRUE, FALSE, UNKNOWN, or an error;
``may_fail`` and ``may_be_unknown`` say which of them are possible.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, TypeAlias

from librmq.filter._interpreter import JavaError, equal, is_true, negated, ordered, searched
from librmq.filter.parser import (
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


class Answer(Enum):
    """The possible answers to a question."""

    TRUE = "TRUE"
    FALSE = "FALSE"
    UNKNOWN = "UNKNOWN"
    ERROR = "ERROR"

    @staticmethod
    def from_value(value: bool | None) -> Answer:
        """Return the answer for a value of SQL."""
        return Answer.UNKNOWN if value is None else Answer.TRUE if value else Answer.FALSE


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """Base of all questions."""

    may_fail: bool = field(init=False, default=False)
    may_be_unknown: bool = field(init=False, default=False)


def _set(question: Question, *, may_fail: bool, may_be_unknown: bool) -> None:
    object.__setattr__(question, "may_fail", may_fail)
    object.__setattr__(question, "may_be_unknown", may_be_unknown)


@dataclass(frozen=True, slots=True, eq=False)
class Always(Question):
    """The same answer for every message."""

    answer: Answer

    def __post_init__(self) -> None:
        _set(self, may_fail=self.answer is Answer.ERROR, may_be_unknown=self.answer is Answer.UNKNOWN)


@dataclass(frozen=True, slots=True, eq=False)
class Missing(Question):
    """Is there no such property?"""

    name: str


@dataclass(frozen=True, slots=True, eq=False)
class TextIn(Question):
    """Is the property one of these texts? UNKNOWN when missing."""

    name: str
    texts: tuple[str, ...]
    may_be_unknown: bool = field(init=False, default=True)


@dataclass(frozen=True, slots=True, eq=False)
class TextTrue(Question):
    """Is the property ``true``, in upper or lower case? UNKNOWN when missing."""

    name: str
    may_be_unknown: bool = field(init=False, default=True)


@dataclass(frozen=True, slots=True, eq=False)
class NumberIs(Question):
    """How does the property compare with a literal of a number? UNKNOWN when missing.

    The property is read as a number of the literal's type: an int, a ``JavaLong``, or a finite float that is not zero.
    """

    name: str
    operator: Order
    number: int | float
    may_fail: bool = field(init=False, default=True)
    may_be_unknown: bool = field(init=False, default=True)


@dataclass(frozen=True, slots=True, eq=False)
class SameText(Question):
    """Are two properties equal? TRUE if both are missing, UNKNOWN if the left is, FALSE if the right is."""

    left: str
    right: str
    may_be_unknown: bool = field(init=False, default=True)


@dataclass(frozen=True, slots=True, eq=False)
class OrderOf(Question):
    """How do two properties compare, both read as doubles? UNKNOWN when either is missing."""

    left: str
    operator: Order
    right: str
    may_fail: bool = field(init=False, default=True)
    may_be_unknown: bool = field(init=False, default=True)


@dataclass(frozen=True, slots=True, eq=False)
class TextSearch(Question):
    """Does the property contain ``text`` (not empty), or begin or end with it? FALSE when missing, even if negated."""

    name: str
    kind: SearchKind
    text: str
    negated: bool


@dataclass(frozen=True, slots=True, eq=False)
class Negation(Question):
    """TRUE for FALSE and FALSE for TRUE; UNKNOWN and errors stay."""

    operand: Question

    def __post_init__(self) -> None:
        _set(self, may_fail=self.operand.may_fail, may_be_unknown=self.operand.may_be_unknown)


@dataclass(frozen=True, slots=True, eq=False)
class _Chain(Question):
    terms: tuple[Question, ...]

    def __post_init__(self) -> None:
        may_fail = any(term.may_fail for term in self.terms)
        _set(self, may_fail=may_fail, may_be_unknown=any(term.may_be_unknown for term in self.terms))


@dataclass(frozen=True, slots=True, eq=False)
class All(_Chain):
    """AND from the left: a FALSE hides the errors after it."""


@dataclass(frozen=True, slots=True, eq=False)
class AnyOf(_Chain):
    """OR from the left: a TRUE hides the errors after it."""


@dataclass(frozen=True, slots=True, eq=False)
class Mapped(Question):
    """Another answer for each answer; an error stays an error."""

    operand: Question
    when_true: Answer
    when_false: Answer
    when_unknown: Answer

    def __post_init__(self) -> None:
        outcomes = (self.when_true, self.when_false, self.when_unknown)
        _set(self, may_fail=self.operand.may_fail, may_be_unknown=Answer.UNKNOWN in outcomes)


@dataclass(frozen=True, slots=True, eq=False)
class SameAnswer(Question):
    """Are two booleans equal? Both are always evaluated.

    TRUE if both are UNKNOWN, UNKNOWN if only the left is, FALSE if only the right is. With ``clash``, two known values
    are an error: a boolean is on the left, a text on the right.
    """

    left: Question
    right: Question
    clash: bool

    def __post_init__(self) -> None:
        may_fail = self.clash or self.left.may_fail or self.right.may_fail
        _set(self, may_fail=may_fail, may_be_unknown=self.left.may_be_unknown)


def below(question: Question) -> tuple[Question, ...]:
    """Return the questions right below, in the order of their evaluation."""
    match question:
        case All() | AnyOf():
            return question.terms
        case Negation() | Mapped():
            return (question.operand,)
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
    """Sort a chain of ANDs by cost, for callers to whom only TRUE matters: any other answer ends the chain."""
    if not isinstance(question, All):
        return question
    terms: list[Question] = []
    pending: list[Question] = [question]
    while pending:
        term = pending.pop()
        if isinstance(term, All):
            pending.extend(reversed(term.terms))
        else:
            terms.append(term)
    return All(tuple(sorted(terms, key=_cost)))


def _cost(question: Question) -> int:
    """Return a rough cost; reading a number counts most."""
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


# ---- reduction of an expression's tree

# Every operand has a type before any message arrives: a literal has its own, a property is a text or missing, a
# comparison is a boolean. So each comparison becomes one kind of question, with constants worked out and the property
# on the left.

TRUE: Final = Always(Answer.TRUE)
FALSE: Final = Always(Answer.FALSE)
UNKNOWN: Final = Always(Answer.UNKNOWN)
ERROR: Final = Always(Answer.ERROR)

_FLIPPED: Final[dict[Order, Order]] = {"=": "=", "<": ">", "<=": ">=", ">": "<", ">=": "<="}


@dataclass(frozen=True, slots=True)
class _Literal:
    value: Value


@dataclass(frozen=True, slots=True)
class _NullAfter:
    """Minus of a boolean: null, unless evaluating the boolean fails."""

    question: Question


_Operand: TypeAlias = "Property | _Literal | _NullAfter | Question"


def reduce(root: Node) -> Question:
    """Reduce a whole expression to one question."""
    operands: dict[int, _Operand] = {}
    for node in postorder(root):
        operands[id(node)] = _reduced(node, [operands[id(child)] for child in children(node)])
    return _as_question(operands[id(root)])


def _as_question(operand: _Operand) -> Question:
    """Return an operand as a question, in a place that needs a boolean."""
    if isinstance(operand, _Literal):
        assert operand.value is None or isinstance(operand.value, bool)
        return Always(Answer.from_value(operand.value))
    assert isinstance(operand, Question)
    return operand


def _reduced(node: Node, operands: list[_Operand]) -> _Operand:
    match node:
        case Property():
            return node
        case Constant():
            return _Literal(node.value)
        case Negate():
            return _minus(operands[0])
        case And():
            return All(tuple(map(_as_question, operands)))
        case Or():
            return _any_of(list(map(_as_question, operands)))
        case Not():
            return _negation(_as_question(operands[0]))
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
    """Join terms by OR; neighbours that compare one property with texts become one question, like IN."""
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
    return question.operand if isinstance(question, Negation) else Negation(question)


def _minus(operand: _Operand) -> _Operand:
    match operand:
        case _Literal():
            return _Literal(negated(operand.value))
        case _NullAfter():
            return operand
        case Question():
            return _NullAfter(operand)
        case _:
            return _Literal(None)


def _after(question: Question, then: Question) -> Question:
    """Return ``then``, unless evaluating ``question`` fails."""
    if not question.may_fail:
        return then
    return All((Mapped(question, Answer.TRUE, Answer.TRUE, Answer.TRUE), then))


def _is_null(operand: _Operand) -> Question:
    match operand:
        case _Literal():
            return Always(Answer.from_value(operand.value is None))
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
        case _Literal(str(text)) if node.text:
            return Always(Answer.from_value(searched(node.kind, text, node.text) is not node.negated))
        case _NullAfter():
            return _after(operand.question, FALSE)
        case Question():
            return _after(operand, FALSE)
        case _:
            return FALSE


def _equal(left: _Operand, right: _Operand) -> Question:  # noqa: C901 (a case for each pair of types)
    for side in (left, right):
        if isinstance(side, _NullAfter):
            null = _Literal(None)
            return _after(side.question, _equal(null if side is left else left, null if side is right else right))
    match left, right:
        case _Literal(), _Literal():
            try:
                return Always(Answer.from_value(equal(left.value, right.value)))
            except JavaError:
                return ERROR
        case Property(), _Literal():
            return _property_is(left.name, right.value)
        case _Literal(), Property():
            return _value_is_property(left.value, right.name)
        case Property(), Property():
            return SameText(left.name, right.name)
        case Question(), _Literal():
            return _answer_is(left, right.value)
        case _Literal(), Question():
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
            return SameAnswer(Always(Answer.from_value(value)), TextTrue(name), clash=True)
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
            return Mapped(question, Answer.from_value(value), Answer.from_value(not value), Answer.FALSE)
        case _:
            return _after(question, FALSE)


def _ordered(operator: Order, left: _Operand, right: _Operand) -> Question:
    match left, right:
        case _Literal(), _Literal():
            try:
                return Always(Answer.from_value(ordered(operator, left.value, right.value)))
            except JavaError:
                return ERROR
        case (_Literal(None), _) | (Property(), _Literal(None)):
            return UNKNOWN
        case _NullAfter(), _:  # the broker ignores the right side of a null
            return _after(left.question, UNKNOWN)
        case _Literal(), _NullAfter():
            return _after(right.question, UNKNOWN)
        case Property(), _NullAfter():
            return All((AnyOf((Missing(left.name), _after(right.question, TRUE))), UNKNOWN))
        case Property(), Property():
            return OrderOf(left.name, operator, right.name)
        case Property(), _Literal():
            return _number_is(left.name, operator, right.value)
        case _Literal(), Property():
            return _number_is(right.name, _FLIPPED[operator], left.value)
    raise AssertionError(left, right)


def _number_is(name: str, operator: Order, number: Value) -> Question:
    assert isinstance(number, int | float)
    return NumberIs(name, operator, number)
