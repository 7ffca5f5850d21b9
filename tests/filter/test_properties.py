"""The interpreter, generated Python and Arrow agree on random expressions and properties; rubbish does no harm."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from librmq.errors import FilterEvaluationError, FilterSyntaxError
from librmq.filter import SqlFilter, _interpreter
from librmq.filter._interpreter import explain, lint
from librmq.filter.filters import Compiled
from librmq.filter.parser import Dialect, parse
from librmq.java.lang import java_int, java_long, parse_double
from tests.budget import examples, some
from tests.conftest import SlowBudget
from tests.filter.expressions import NAMES, TEXTS, expression, properties
from tests.fuzz.filter_parser import PIECES, check

pa = pytest.importorskip("pyarrow")
from librmq.filter._arrow_backend import match_arrow  # noqa: E402 - only with pyarrow

MESSAGES = 25
MAPS = pa.map_(pa.string(), pa.string())


def random_filter(random: Random) -> Compiled:
    dialect: Dialect = random.choice(("4.9", "5.3"))
    while True:
        try:
            return Compiled(expression(random, dialect, random.choice((1, 2, 3, 4))), dialect)
        except FilterSyntaxError:
            continue


def verdict(sql: Compiled, message: dict[str, str] | None, *, by_interpreter: bool) -> object:
    try:
        return _interpreter.evaluate(sql.selector, message) if by_interpreter else sql.evaluate(message)
    except FilterEvaluationError as error:
        return error.java_name


def agree(sql: Compiled, messages: list[dict[str, str] | None]) -> None:
    """Assert that the interpreter, both forms of generated Python, and Arrow on a map and on columns agree."""
    text = sql.selector.expression
    decisions = []
    for message in messages:
        expected = verdict(sql, message, by_interpreter=True)
        assert verdict(sql, message, by_interpreter=False) is expected or (
            verdict(sql, message, by_interpreter=False) == expected and isinstance(expected, str)
        ), (text, message)
        assert sql.matches(message) is (expected is True), (text, message)
        decisions.append(expected is True)
    maps = pa.array([None if message is None else list(message.items()) for message in messages], MAPS)
    assert match_arrow(sql.question, maps).to_pylist() == decisions, text
    columns = [pa.array([(message or {}).get(name) for message in messages], pa.string()) for name in NAMES]
    batch = pa.RecordBatch.from_arrays(columns, names=list(NAMES))
    assert match_arrow(sql.question, batch).to_pylist() == decisions, text


@given(st.randoms(use_true_random=False))
def test_all_back_ends_agree(random: Random) -> None:
    messages = [properties(random) for _ in range(MESSAGES)]
    for _ in range(3):
        agree(random_filter(random), messages)


@pytest.mark.slow
def test_all_back_ends_agree_on_a_million_pairs(slow_budget: SlowBudget) -> None:
    filters_a_round = 4
    for number in slow_budget.rounds(1_000_000 // (filters_a_round * MESSAGES), "rounds of 100 pairs"):
        random = Random(number)
        messages = [properties(random) for _ in range(MESSAGES)]
        for _ in range(filters_a_round):
            agree(random_filter(random), messages)


@given(st.randoms(use_true_random=False))
def test_explanations_and_findings_of_any_expression(random: Random) -> None:
    sql = random_filter(random)
    message = properties(random)
    expected = verdict(sql, message, by_interpreter=True)
    explanation = explain(sql.selector, message)
    names = {True: "TRUE", False: "FALSE", None: "UNKNOWN"}
    assert explanation.verdict == names.get(expected, "ERROR")  # type: ignore[call-overload]
    assert len(explanation.tree) >= 1
    for finding in lint(sql.selector, "5.3"):
        assert 0 <= finding.position <= finding.end <= len(sql.selector.expression)
        assert finding.advice


@pytest.mark.slow
@given(
    st.lists(st.sampled_from(PIECES), max_size=40).map(" ".join) | st.text(max_size=60), st.sampled_from(["4.9", "5.3"])
)
@example("a I\u017f NULL", "4.9")
@settings(max_examples=examples(500))
def test_rubbish_compiles_or_points_at_its_fault(text: str, dialect: Dialect) -> None:
    check(text, dialect)


HUGE = {
    "open parentheses": "(" * 100_000,
    "parentheses": "(" * 50_000 + "a = 1" + ")" * 50_000,
    "minus signs": "-" * 100_000,
    "minus signs after an operator": "a = " + "-" * 100_000 + "5",
    "minus signs and a late line end": "a = " + "-" * 100_000 + "\n5",
    "plus signs": "a = " + "+" * 100_000 + "5",
    "25,000 NOTs": "NOT " * 25_000 + "a",
    "10,000 ANDs": " AND ".join(f"p{i} = 'x'" for i in range(10_000)),
    "10,000 numbers": " AND ".join(f"p{i} > {i}" for i in range(10_000)),
    "10,000 ORs": " OR ".join(f"p{i} = {i}" for i in range(10_000)),
    "10,000 values": "a IN (" + ", ".join(f"'{i}'" for i in range(10_000)) + ")",
    "comparisons of comparisons": "a" + " = 1" * 25_000,
    "double minus in many terms": " AND ".join(["a = --5"] * 9_000),
    "quotes": "a = '" + "''" * 50_000,
    "an open comment": "a = 1 /*" + "* " * 50_000,
    "a long name": "a" * 100_000,
    "a long number": "a = " + "1" * 100_000,
    "1,999 levels": "NOT (" * 1_998 + "a" + ")" * 1_998,
    "lists in lists": "a IN (" * 20_000,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", some([*HUGE]))
def test_huge_expressions_are_answered_or_refused(name: str) -> None:
    refusal = None
    try:
        sql = Compiled(HUGE[name], "4.9")
    except FilterSyntaxError as error:
        refusal = str(error)
    if refusal is not None:
        assert len(refusal) < 1_000
        return
    message = {"a": "5", "p1": "x"}
    assert isinstance(sql.matches(message), bool)
    verdict(sql, message, by_interpreter=False)
    assert explain(sql.selector, message).matches is sql.matches(message)
    maps = pa.array([list(message.items())], MAPS)
    if len(HUGE[name]) < 10_000:
        assert match_arrow(sql.question, maps).to_pylist() == [sql.matches(message)]


@pytest.mark.slow
def test_depths_that_rocketmq_takes() -> None:
    for text in (
        "(" * 1_000 + "a = 1" + ")" * 1_000,
        " AND ".join(["a = 1"] * 1_000),
        "NOT (" * 1_000 + "a = 1" + ")" * 1_000,
        "(a = 1 AND (b = 2 OR " * 500 + "a = 1" + "))" * 500,
        "NOT (" + "(a = 2 OR (a = 1 AND " * 400 + "a = 2" + "))" * 400 + ")",
    ):
        sql = SqlFilter(text)
        assert sql.matches({"a": "1"}) is True
        assert sql.evaluate({"a": "1"}) is True
        assert sql.match_arrow(pa.array([[("a", "1")]], MAPS)).to_pylist() == [True]
    with pytest.raises(FilterSyntaxError, match="parentheses"):
        parse("(" * 3_000 + "a = 1" + ")" * 3_000)


@given(st.lists(st.sampled_from(TEXTS) | st.text("0123456789.+-eEpPxXaAfFdDNI \t_\u0665", max_size=12)))
def test_arrow_reads_numbers_as_java(texts: list[str]) -> None:
    from librmq.filter import _arrow_backend as arrow_backend
    from librmq.filter.parser import JavaLong

    column = pa.array(texts, pa.string())
    readings: tuple[tuple[Callable[[str], float | None], Any], ...] = (
        (java_int, arrow_backend.integers_of(column, int)),
        (java_long, arrow_backend.integers_of(column, JavaLong)),
        (parse_double, arrow_backend.doubles_of(column)),
    )
    for parse_text, (numbers, failed) in readings:
        expected = [parse_text(text) for text in texts]
        assert repr(numbers.to_pylist()).replace("-nan", "nan") == repr(expected)
        if failed is False:
            assert None not in expected
        else:
            assert failed.to_pylist() == [number is None for number in expected]
