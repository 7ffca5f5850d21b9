"""A fuzzer on the parser of filter expressions, and its properties for any text.

From the root of the checkout: ``python -m tests.fuzz.filter_parser [libFuzzer options]``, such as
``-max_total_time=60``; it needs the package ``atheris``, which leads it by what the code covers. Without atheris
`mutants` changes expressions blindly; the slow tests run that.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from random import Random
from typing import Any

from librmq.errors import FilterEvaluationError, FilterSyntaxError
from librmq.filter import interpreter
from librmq.filter.explain import explain
from librmq.filter.lint import lint
from librmq.filter.parser import Dialect, parse
from librmq.filter.python_backend import compile_match
from librmq.filter.reduction import reduce
from librmq.filter.syntax import postorder
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
    """Whether ``text`` compiles; ``AssertionError`` where anything does not hold of it that holds of all texts."""
    try:
        selector = parse(text, dialect)
    except FilterSyntaxError as error:
        _check_fault(error, text)
        return False
    nodes = list(postorder(selector.root))
    assert len(nodes) <= 3 * len(text) + 3, "the tree grows faster than the text"  # BETWEEN has its operand twice
    assert all(0 <= node.start <= node.end <= len(text) for node in nodes)
    if selector.ignored_from is not None:
        assert 0 < selector.ignored_from < len(text)
        whole = parse(text[: selector.ignored_from], dialect)  # the ignored text makes no difference
        assert [type(node) for node in postorder(whole.root)] == [type(node) for node in nodes]
    matches = compile_match(reduce(selector.root))
    for message in MESSAGES:
        verdict: object
        try:
            verdict = interpreter.evaluate(selector, message)
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
    """Texts near to expressions, without end."""
    while True:
        dialect: Dialect = random.choice(("4.9", "5.3"))
        text = expression(random, dialect, random.choice((0, 1, 2, 4)))
        for _ in range(random.choice((0, 1, 1, 2, 5))):
            text = _changed(random, text, dialect)
        yield text, dialect


def _changed(random: Random, text: str, dialect: str) -> str:
    at, to = sorted(random.randrange(len(text) + 1) for _ in range(2))
    match random.randrange(7):
        case 0:  # a piece comes in
            return f"{text[:at]}{random.choice(PIECES)}{text[at:]}"
        case 1:  # a part falls out
            return text[:at] + text[min(to, at + 9) :]
        case 2:  # a part occurs twice
            return text[:to] + text[at:]
        case 3:  # a part is put in parentheses
            return f"{text[:at]}({text[at:to]}){text[to:]}"
        case 4:  # the end is another expression's
            return text[:at] + expression(random, dialect, 1)[at % 7 :]
        case 5:  # a text of the wrong kind
            return f"{text[:at]}'{random.choice(TEXTS)}'{text[to:]}"
        case _:  # a long row of the same
            return text[:at] + random.choice(PIECES) * random.choice((2, 30, 3000)) + text[at:]


def main() -> None:
    import atheris  # type: ignore[import,unused-ignore]

    def once(data: bytes) -> Any:
        given = atheris.FuzzedDataProvider(data)
        dialect: Dialect = "5.3" if given.ConsumeBool() else "4.9"
        check(given.ConsumeUnicode(4096), dialect)

    atheris.instrument_all()
    atheris.Setup(sys.argv, once)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
