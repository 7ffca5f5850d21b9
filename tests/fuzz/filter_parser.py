"""The properties of the parser of filter expressions that hold for any string, and strings that resemble expressions.

The target ``filter`` of `tests.fuzz.formats` checks them, led by code coverage.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from librmq.errors import FilterEvaluationError, FilterSyntaxError
from librmq.filter import _interpreter
from librmq.filter._interpreter import explain, lint
from librmq.filter._normal_form import reduce
from librmq.filter.filters import compile_match
from librmq.filter.parser import Dialect, parse, postorder
from tests.filter.expressions import NAMES, NUMBERS, TEXT_LITERALS, TEXTS, expression

__all__ = ["check", "mutants"]

PIECES = (
    *NAMES,
    *NUMBERS,
    *TEXT_LITERALS,
    *("AND", "OR", "NOT", "IN", "BETWEEN", "IS", "NULL", "TRUE", "FALSE", "CONTAINS", "STARTSWITH", "ENDSWITH"),
    *("=", "<>", "<", "<=", ">", ">=", "+", "-", "--", "(", ")", ",", "'", '"', "/*", "*/", "!", "#", ".", "\\"),
    *(" ", "\t", "\n", "\r", "\f", "\x0b", "\x00", "\u00a0", "\u0665", "\u017f", "\ud800", "\U0001d7d3"),
)
MESSAGES: tuple[dict[str, str] | None, ...] = (
    None,
    {},
    *(dict.fromkeys(NAMES, text) for text in ("5", "x", "5.0", "true", "NaN")),
)


def check(text: str, dialect: Dialect = "4.9") -> bool:
    """Return whether ``text`` compiles; raise ``AssertionError`` if a property of all strings does not hold."""
    try:
        selector = parse(text, dialect)
    except FilterSyntaxError as error:
        _check_fault(error, text)
        return False
    nodes = list(postorder(selector.root))
    assert len(nodes) <= 3 * len(text) + 3, "the tree grows faster than the text"  # BETWEEN doubles its operand
    assert all(0 <= node.start <= node.end <= len(text) for node in nodes)
    if selector.ignored_from is not None:
        assert 0 < selector.ignored_from < len(text)
        whole = parse(text[: selector.ignored_from], dialect)  # the ignored text makes no difference
        assert [type(node) for node in postorder(whole.root)] == [type(node) for node in nodes]
    matches = compile_match(reduce(selector.root))
    for message in MESSAGES:
        verdict: object
        try:
            verdict = _interpreter.evaluate(selector, message)
        except FilterEvaluationError:
            verdict = "error"
        assert matches(message) is (verdict is True), (text, message)
        assert explain(selector, message).matches is (verdict is True)
    for finding in lint(selector, dialect):
        assert 0 <= finding.position <= finding.end <= len(text)
    return True


def _check_fault(fault: FilterSyntaxError, text: str) -> None:
    assert fault.expression == text
    assert 0 <= fault.position <= len(text)
    assert str(fault).endswith("^")
    assert len(str(fault)) < 1_000


def mutants(random: Random) -> Iterator[tuple[str, Dialect]]:
    """Yield strings that resemble expressions, without end."""
    while True:
        dialect: Dialect = random.choice(("4.9", "5.3"))
        text = expression(random, dialect, random.choice((0, 1, 2, 4)))
        for _ in range(random.choice((0, 1, 1, 2, 5))):
            text = _changed(random, text, dialect)
        yield text, dialect


def _changed(random: Random, text: str, dialect: str) -> str:
    at, to = sorted(random.randrange(len(text) + 1) for _ in range(2))
    match random.randrange(7):
        case 0:  # insert a piece
            return f"{text[:at]}{random.choice(PIECES)}{text[at:]}"
        case 1:  # delete a part
            return text[:at] + text[min(to, at + 9) :]
        case 2:  # repeat a part
            return text[:to] + text[at:]
        case 3:  # put a part in parentheses
            return f"{text[:at]}({text[at:to]}){text[to:]}"
        case 4:  # replace the end with that of another expression
            return text[:at] + expression(random, dialect, 1)[at % 7 :]
        case 5:  # put in a string literal of the wrong kind
            return f"{text[:at]}'{random.choice(TEXTS)}'{text[to:]}"
        case _:  # repeat a piece many times
            return text[:at] + random.choice(PIECES) * random.choice((2, 30, 3000)) + text[at:]
