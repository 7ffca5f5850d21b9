"""Questions about a message, to which every expression is reduced for all back-ends.

Seven kinds ask about properties, five combine answers, and one has the same answer for every message. All types and
constants are resolved, so a back-end need not know the language. An answer is TRUE, FALSE, UNKNOWN, or an error;
``may_fail`` and ``may_be_unknown`` say which of them are possible.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from librmq.filter.syntax import Order, SearchKind


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
    """Is the property ``true``, in upper or lower case? UNKNOWN when missing."""

    name: str

    def __post_init__(self) -> None:
        _set(self, False, True)


@dataclass(frozen=True, slots=True, eq=False)
class NumberIs(Question):
    """How does the property compare with a literal of a number? UNKNOWN when missing.

    The property is read as a number of the literal's type: an int, a ``JavaLong``, or a finite float that is not zero.
    """

    name: str
    operator: Order
    number: int | float

    def __post_init__(self) -> None:
        _set(self, True, True)


@dataclass(frozen=True, slots=True, eq=False)
class SameText(Question):
    """Are two properties equal? TRUE if both are missing, UNKNOWN if the left is, FALSE if the right is."""

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
        _set(self, self.operand.may_fail, self.operand.may_be_unknown)


@dataclass(frozen=True, slots=True, eq=False)
class All(Question):
    """AND from the left: a FALSE hides the errors after it."""

    terms: tuple[Question, ...]

    def __post_init__(self) -> None:
        _set(self, any(term.may_fail for term in self.terms), any(term.may_be_unknown for term in self.terms))


@dataclass(frozen=True, slots=True, eq=False)
class AnyOf(Question):
    """OR from the left: a TRUE hides the errors after it."""

    terms: tuple[Question, ...]

    def __post_init__(self) -> None:
        _set(self, any(term.may_fail for term in self.terms), any(term.may_be_unknown for term in self.terms))


@dataclass(frozen=True, slots=True, eq=False)
class Mapped(Question):
    """Another answer for each answer; an error stays an error."""

    operand: Question
    when_true: Answer
    when_false: Answer
    when_unknown: Answer

    def __post_init__(self) -> None:
        outcomes = (self.when_true, self.when_false, self.when_unknown)
        _set(self, self.operand.may_fail, Answer.UNKNOWN in outcomes)


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
        _set(self, may_fail, self.left.may_be_unknown)


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
