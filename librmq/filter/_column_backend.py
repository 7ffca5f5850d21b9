"""The broker's answers as two-valued conditions, for back-ends that evaluate columns and have no exceptions.

A question has three conditions: its answer is TRUE, it is FALSE, or it is an ERROR. Where none holds, the answer is
UNKNOWN. Each condition is built from conditions of the questions below. Only the needed ones are built: most filters
need IS_TRUE alone. A null in a condition counts as false.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Final, Generic, Literal, TypeAlias, TypeVar, cast

from librmq.filter._normal_form import (
    All,
    Always,
    Answer,
    AnyOf,
    Mapped,
    Negation,
    Question,
    SameAnswer,
)
from librmq.filter.parser import Order
from librmq.java.lang import DECIMAL_DIGITS

C = TypeVar("C")

COMPARE: Final[Mapping[str, Callable[[Any, Any], Any]]] = {
    "=": operator.eq,
    "<>": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
NEGATED: Final[Mapping[Order, str]] = {"=": "<>", "<": ">=", "<=": ">", ">": "<=", ">=": "<"}

JAVA_INTEGER: Final = rf"\A[+-]?[{DECIMAL_DIGITS}]+\z"
"""Texts that Java parses as integers, whatever their range."""

Condition: TypeAlias = Literal["is_true", "is_false", "is_error"]

_Part: TypeAlias = tuple[Question, Condition]
_Steps: TypeAlias = Generator[_Part, C, C]


class ColumnBackend(ABC, Generic[C]):
    """Conditions over columns, of type ``C``. Use one object for one evaluation; not thread-safe."""

    def __init__(self) -> None:
        self._conditions: dict[tuple[int, Condition], C] = {}

    # --- what a back-end provides

    @abstractmethod
    def literal(self, value: bool) -> C:
        """Return the same value for every row."""

    @abstractmethod
    def every(self, conditions: Sequence[C]) -> C:
        """Return where all conditions hold."""

    @abstractmethod
    def some(self, conditions: Sequence[C]) -> C:
        """Return where at least one condition holds."""

    @abstractmethod
    def none(self, conditions: Sequence[C]) -> C:
        """Return where no condition holds; never null."""

    @abstractmethod
    def first_match(self, branches: Sequence[tuple[C, bool]]) -> C:
        """Return the value of the first condition that holds; false where none does."""

    @abstractmethod
    def property_condition(self, question: Question, condition: Condition) -> C:
        """Return the condition of a question about properties."""

    # --- the rules, written once

    def condition(self, question: Question, condition: Condition) -> C:
        """Return the condition of a whole question, without recursion: a tree can be deeper than Python's stack."""
        waiting = [((id(question), condition), self._steps(question, condition))]
        answer: Any = None
        while waiting:
            key, steps = waiting[-1]
            try:
                part = steps.send(answer)
            except StopIteration as done:
                answer = self._conditions[key] = done.value
                waiting.pop()
            else:
                key = (id(part[0]), part[1])
                answer = self._conditions.get(key)
                if answer is None:
                    waiting.append((key, self._steps(*part)))
        return cast("C", answer)

    def _steps(self, question: Question, condition: Condition) -> _Steps[C]:
        """Make one condition: yield each part that it needs, receive that part by send, return the whole."""
        if condition == "is_error" and not question.may_fail:
            return self.literal(False)
        match question:
            case Always():
                return self.literal(question.answer is _ANSWERS[condition])
            case Negation():
                return (yield question.operand, _OPPOSITE[condition])
            case All():
                return (yield from self._chain(question.terms, condition, decisive="is_false"))
            case AnyOf():
                return (yield from self._chain(question.terms, condition, decisive="is_true"))
            case Mapped():
                return (yield from self._mapped(question, condition))
            case SameAnswer():
                return (yield from self._same(question, condition))
            case _:
                return self.property_condition(question, condition)

    def _chain(self, terms: tuple[Question, ...], condition: Condition, decisive: Condition) -> _Steps[C]:
        if condition not in (decisive, "is_error"):
            conditions = []
            for term in terms:
                conditions.append((yield term, condition))
            return self.every(conditions)
        branches: list[tuple[C, bool]] = []
        last_that_may_fail = max((i for i, term in enumerate(terms) if term.may_fail), default=-1)
        for i, term in enumerate(terms):
            if condition == decisive:
                branches.append(((yield term, decisive), True))
                if term.may_fail and i < len(terms) - 1:
                    branches.append(((yield term, "is_error"), False))
            else:
                if term.may_fail:
                    branches.append(((yield term, "is_error"), True))
                if i < last_that_may_fail:
                    branches.append(((yield term, decisive), False))
        if all(value for _, value in branches):
            return self.some([test for test, _ in branches])
        return self.first_match(branches)

    def _mapped(self, question: Mapped, condition: Condition) -> _Steps[C]:
        if condition == "is_error":
            return (yield question.operand, "is_error")
        answer = _ANSWERS[condition]
        conditions = []
        if question.when_true is answer:
            conditions.append((yield question.operand, "is_true"))
        if question.when_false is answer:
            conditions.append((yield question.operand, "is_false"))
        if question.when_unknown is answer:
            conditions.append((yield from self._unknown(question.operand)))
        return self.some(conditions)

    def _same(self, question: SameAnswer, condition: Condition) -> _Steps[C]:
        left, right = question.left, question.right
        if condition == "is_error":
            conditions = [(yield left, "is_error"), (yield right, "is_error")]
            if question.clash:
                conditions.append(self.every([(yield from self._decided(left)), (yield from self._decided(right))]))
            return self.some(conditions)
        right_unknown = yield from self._unknown(right)
        if condition == "is_true":
            pairs = [((yield from self._unknown(left)), right_unknown)]
        else:
            pairs = [((yield from self._decided(left)), right_unknown)]
        if not question.clash:
            other: Condition = "is_true" if condition == "is_true" else "is_false"
            pairs.append(((yield left, "is_true"), (yield right, other)))
            pairs.append(((yield left, "is_false"), (yield right, _OPPOSITE[other])))
        return self.some([self.every(pair) for pair in pairs])

    def _decided(self, question: Question) -> _Steps[C]:
        return self.some([(yield question, "is_true"), (yield question, "is_false")])

    def _unknown(self, question: Question) -> _Steps[C]:
        if not question.may_be_unknown:
            return self.literal(False)
        return self.none([(yield question, "is_true"), (yield question, "is_false"), (yield question, "is_error")])


_ANSWERS: dict[Condition, Answer] = {
    "is_true": Answer.TRUE,
    "is_false": Answer.FALSE,
    "is_error": Answer.ERROR,
}
_OPPOSITE: dict[Condition, Condition] = {
    "is_true": "is_false",
    "is_false": "is_true",
    "is_error": "is_error",
}
