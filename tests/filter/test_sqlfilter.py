"""The filter language case by case, as specified and as in RocketMQ; findings, explanations, and the API."""

from __future__ import annotations

import pickle
import warnings
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

import pytest

from librmq.errors import FilterEvaluationError, FilterSyntaxError
from librmq.filter import FilterWarning, SqlFilter, _interpreter
from librmq.filter.parser import parse
from tests.budget import examples

UNKNOWN = None


def quiet(expression: str) -> SqlFilter:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FilterWarning)
        return SqlFilter(expression)


def in_arrow(sql: SqlFilter, properties: dict[str, str]) -> bool:
    """Return the answer of the Arrow kernels, or of the filter itself if Arrow is not installed."""
    if find_spec("pyarrow") is None:
        return sql.matches(properties)
    import pyarrow as pa

    maps = pa.array([list(properties.items())], pa.map_(pa.string(), pa.string()))
    (answer,) = sql.match_arrow(maps).to_pylist()
    return bool(answer)


@pytest.mark.parametrize(
    ("expression", "properties", "expected"),
    [
        # equality and missing properties
        ("a = 'x'", {}, UNKNOWN),
        ("'x' = a", {}, False),
        ("'x' <> a", {}, True),
        ("a = b", {}, True),
        ("a = b", {"b": "1"}, UNKNOWN),
        ("a = b", {"a": "1"}, False),
        ("a <> b", {"a": "1"}, True),
        ("a = -b", {"a": "1", "b": "1"}, False),
        ("a = -b", {"b": "1"}, True),
        ("-b = a", {"a": "1"}, UNKNOWN),
        ("-b = a", {}, True),
        ("a IS NULL", {"a": ""}, False),
        ("(a > 5) IS NULL", {}, True),
        ("5 IS NULL", {}, False),
        ("-a IS NULL", {"a": "5"}, True),
        # numbers
        ("5 = 5.0", {}, True),
        ("'5' = 5", {}, True),
        ("a = 5", {"a": "+5"}, True),
        ("a = 5", {"a": "000000000000000000000000000005"}, True),
        ("a = 5", {"a": "\u0665"}, True),
        ("a = -2147483648", {"a": "-2147483648"}, True),
        ("a < 3000000000", {"a": "9223372036854775807"}, False),
        ("a = 5.0", {"a": " 5d "}, True),
        ("a > 1.5", {"a": "NaN"}, True),
        ("a < 1.5", {"a": "NaN"}, False),
        ("a > 1.5", {"a": "1e400"}, True),
        ("a > 1.5", {"a": "0x1p99999"}, True),
        ("a < 1.5", {"a": "-0x1p99999"}, True),
        ("a = 8.0", {"a": "0x1p3"}, True),
        ("a < b", {"a": "-0.0", "b": "0.0"}, True),
        ("a >= b", {"a": "NaN", "b": "Infinity"}, True),
        ("a <= b", {"a": "NaN", "b": "NaN"}, True),
        ("a > b", {"a": "10", "b": "9"}, True),
        ("a < b", {"a": "-5", "b": "-3"}, True),
        ("a >= b", {"a": "-5", "b": "0"}, False),
        ("NOT (a < 5)", {"a": "5"}, True),
        ("NOT (a <= 5)", {"a": "5"}, False),
        ("NOT (a > 5)", {"a": "5"}, True),
        ("NOT (a >= 5)", {"a": "5"}, False),
        ("NOT (a = 5)", {"a": "5"}, False),
        ("NOT (a = 5)", {"a": "6"}, True),
        ("NOT (a = 5)", {}, UNKNOWN),
        ("NOT (a < b)", {"a": "5", "b": "5.0"}, True),
        ("NOT (a >= b)", {"a": "5", "b": "5.0"}, False),
        ("NOT (a < b)", {"a": "5"}, UNKNOWN),
        ("a = --5", {"a": "5"}, True),
        ("a BETWEEN 1 AND 10", {"a": "10"}, True),
        ("a NOT BETWEEN 10 AND 1", {"a": "5"}, True),
        ("a NOT BETWEEN 1 AND b", {"a": "0"}, True),
        # booleans
        ("a = TRUE", {"a": "tRuE"}, True),
        ("a = FALSE", {"a": "yes"}, True),
        ("a = TRUE", {}, UNKNOWN),
        ("TRUE = a", {}, False),
        ("(a = 5) = TRUE", {"a": "5"}, True),
        ("(a = 5) = (b = 5)", {}, True),
        ("(a = 5) = (b = 5)", {"b": "5"}, UNKNOWN),
        ("(a = 5) = (b = 5)", {"a": "6", "b": "6"}, True),
        ("(a = 5) = 5", {"a": "5"}, False),
        ("(a = 5) = 5", {}, UNKNOWN),
        ("5 = (a = 5)", {}, False),
        ("a = (b = 5)", {"a": "true", "b": "5"}, True),
        ("a = (b = 5)", {"a": "x", "b": "6"}, True),
        ("TRUE = (a = 5)", {}, False),
        ("TRUE = (a = 5)", {"a": "5"}, True),
        ("FALSE = (a = 5)", {}, False),
        ("FALSE = (a = 5)", {"a": "6"}, True),
        ("'false' = (a = 5)", {"a": "5"}, False),
        ("'x' = (a = 5)", {"a": "6"}, True),
        ("'TRUE' = (a = 5)", {"a": "5"}, True),
        ("-TRUE = (a = 5)", {}, True),
        ("-TRUE = (a = 5)", {"a": "5"}, UNKNOWN),
        ("(a = 5) = -TRUE", {"a": "5"}, False),
        ("a", {"a": "true"}, False),
        ("a", {}, UNKNOWN),
        ("NOT a", {"a": "x"}, True),
        # AND, OR
        ("a = 'x' AND b = 'x'", {"b": "y"}, False),
        ("a = 'x' OR b = 'x'", {"b": "x"}, True),
        ("a = 'x' OR b = 'x'", {"b": "y"}, UNKNOWN),
        ("(m = 'x' AND t > 5) OR z = 'q'", {"t": "6"}, UNKNOWN),
        ("(m = 'x' AND t > 5) OR z = 'q'", {"t": "6", "z": "q"}, True),
        ("NOT (m = 'x' OR t > 5)", {"t": "5"}, UNKNOWN),
        ("NOT (m = 'x' OR t > 5)", {"t": "5", "m": "y"}, True),
        ("a = 'y' AND b > 5", {"a": "x", "b": "x"}, False),
        ("a = 'x' OR b > 5", {"a": "x", "b": "x"}, True),
        # after a null, the right side of an order is ignored
        ("a > -(b > 5)", {"b": "x"}, UNKNOWN),
        ("a > -(b > 5) OR b = 'x'", {"b": "x"}, True),
        ("-a > -(b > 5) OR b = 'x'", {"b": "x"}, True),
        ("-a > -(b > 5)", {"a": "1", "b": "x"}, UNKNOWN),
        ("-(b > 5) > a", {"a": "1", "b": "1"}, UNKNOWN),
        ("9007199254740993 = 9007199254740992.0", {}, True),
        # IN
        ("a IN ('x', 'it''s')", {"a": "it's"}, True),
        ("a NOT IN ('x')", {}, UNKNOWN),
        ("a IN ('1', '2', '3', '4', '5', 'x')", {"a": "x"}, True),
        ("a NOT IN ('1', '2', '3', '4', '5', 'x')", {"a": "y"}, True),
        ("a NOT IN ('1', '2', '3', '4', '5', 'x')", {}, UNKNOWN),
        # the lexer
        ("a = 1 -- b\n AND b = 2", {"a": "1", "b": "2"}, True),
        ("a /* * / */ = 1", {"a": "1"}, True),
        ("a /* b */ = /* c */ 1", {"a": "1"}, True),
        ("a=1AND b=2", {"a": "1", "b": "2"}, True),
        ("contains = 'x'", {"contains": "x"}, True),
    ],
)
def test_answers(expression: str, properties: dict[str, str], expected: bool | None) -> None:
    sql = SqlFilter(expression)
    assert sql.evaluate(properties) is expected
    assert _interpreter.evaluate(parse(expression), properties) is expected
    assert sql.matches(properties) is (expected is True)
    assert in_arrow(sql, properties) is (expected is True)


@pytest.mark.parametrize(
    ("expression", "properties", "java_name", "term"),
    [
        ("a = 5", {"a": "5.0"}, "NumberFormatException", "a = 5"),
        ("a = 5", {"a": " 5"}, "NumberFormatException", "a = 5"),
        ("a = 5", {"a": ""}, "NumberFormatException", "a = 5"),
        ("a = 5", {"a": "3000000000"}, "NumberFormatException", "a = 5"),
        ("a = 5", {"a": "\U0001d7d3"}, "NumberFormatException", "a = 5"),
        ("a = 5.0", {"a": "infinity"}, "NumberFormatException", "a = 5.0"),
        ("a = 5.0", {"a": "1_0"}, "NumberFormatException", "a = 5.0"),
        ("a > b", {"a": "x", "b": "1"}, "NumberFormatException", "a > b"),
        ("'5.0' = 5", {}, "NumberFormatException", "'5.0' = 5"),
        ("TRUE = a", {"a": "true"}, "ClassCastException", "TRUE = a"),
        ("(b = 5) = a", {"a": "true", "b": "5"}, "ClassCastException", "(b = 5) = a"),
        ("b = 1 AND a BETWEEN 1 AND 9", {"a": "x", "b": "1"}, "NumberFormatException", "a >= 1"),
        # an UNKNOWN on the left of an AND does not skip the right side
        ("(m = 'x' AND t > 5) OR t = 'x'", {"t": "x"}, "NumberFormatException", "t > 5"),
        ("NOT (m = 'x' OR t > 5)", {"t": "x"}, "NumberFormatException", "t > 5"),
        ("-(a > 5) IS NULL", {"a": "x"}, "NumberFormatException", "(a > 5)"),
        ("b > -(a > 5)", {"a": "x", "b": "1"}, "NumberFormatException", "(a > 5)"),
        ("-(a > 5) > b", {"a": "x"}, "NumberFormatException", "(a > 5)"),
        ("5 = (a > 5)", {"a": "x"}, "NumberFormatException", "(a > 5)"),
        ("(a > 5) = 5", {"a": "x"}, "NumberFormatException", "(a > 5)"),
        ("-(a > 5) = (b > 5)", {"a": "x"}, "NumberFormatException", "(a > 5)"),
        ("(a > 5) IS NULL OR b = 'x'", {"a": "x", "b": "x"}, "NumberFormatException", "(a > 5)"),
        ("(m = 'x' AND a > b) OR a = 'x'", {"a": "x", "b": "1"}, "NumberFormatException", "a > b"),
        ("(m = 'x' AND TRUE = a) OR a = 'x'", {"a": "x"}, "ClassCastException", "TRUE = a"),
        ("(m = 'x' AND NOT (t > 5)) OR t = 'x'", {"t": "x"}, "NumberFormatException", "(t > 5)"),
        ("(NOT (m = 'x') AND t > 5) OR t = 'x'", {"t": "x"}, "NumberFormatException", "t > 5"),
        ("(m = 'x' AND (t = 'x') = t) OR t = 'x'", {"t": "x"}, "ClassCastException", "(t = 'x') = t"),
        ("((m = 'x') = (t = 'x') AND t > 5) OR t = 'x'", {"t": "x"}, "NumberFormatException", "t > 5"),
        ("NOT (m = 'x' OR NOT (t > 5))", {"t": "x"}, "NumberFormatException", "(t > 5)"),
    ],
)
def test_errors_name_the_term(expression: str, properties: dict[str, str], java_name: str, term: str) -> None:
    sql = SqlFilter(expression)
    assert sql.matches(properties) is False
    assert in_arrow(sql, properties) is False
    with pytest.raises(FilterEvaluationError) as caught:
        sql.evaluate(properties)
    assert caught.value.java_name == java_name
    assert caught.value.term == term
    explanation = sql.explain(properties)
    assert explanation.verdict == "ERROR"
    assert java_name in explanation.why
    assert explanation.decided_by in (term, expression)


@pytest.mark.parametrize(
    ("expression", "position", "said"),
    [
        ("", 0, "expected"),
        ("a = ", 4, "the expression ends here"),
        ("a == 5", 3, "unexpected '='"),
        ("a = 'x", 4, "no closing quote"),
        ('a = "x"', 4, "single quotes"),
        ("a != 5", 2, "use <>"),
        ("a /* = 5", 2, "no end"),
        ("a = NULL", 4, "IS NULL"),
        ("a > 'x'", 4, "only numbers have an order"),
        ("a > TRUE", 4, "only numbers"),
        ("NOT a > 1", 0, "a condition has no order; NOT binds tighter"),
        ("NOT a IN ('x')", 0, "property on the left of IN; NOT binds tighter"),
        ("TRUE = 1", 7, "TRUE or FALSE"),
        ("a BETWEEN 10 AND 1", 17, "below the lower"),
        ("a BETWEEN 1.5 AND 1", 18, "below the lower"),
        ("a BETWEEN NULL AND 1", 10, "a number or a property"),
        ("5 IN ('x')", 0, "property on the left of IN"),
        ("a IN ()", 6, "a text in single quotes"),
        ("a AND 5", 6, "a condition"),
        ("-a", 0, "a condition"),
        ("a = 9223372036854775808", 4, "larger than 9223372036854775807"),
        ("a = 0.0", 4, "write 0"),
        ("a = 1e309", 4, "too large"),
        ("a = 1 !", 6, "unexpected '!'"),
        ("a = 1 'x", 6, "no closing quote"),
        ("a NOT 'x'", 6, "BETWEEN or IN"),
        ("a = \u00e9", 4, "unexpected"),
    ],
)
def test_syntax_errors_point(expression: str, position: int, said: str) -> None:
    with pytest.raises(FilterSyntaxError) as caught:
        SqlFilter(expression)
    assert (caught.value.expression, caught.value.position) == (expression, position)
    assert said in caught.value.reason
    lines = str(caught.value).splitlines()
    assert expression in str(caught.value)
    assert lines[-1] == "  " + " " * position + "^"


def test_the_caret_stands_below_its_place_on_a_terminal() -> None:
    for expression, column in (("a\t= '\u6c34\u6c34' AND !", 15), ("a = 'e\u0301\x00' ! 1", 9), ("\n\ta == 1", 4)):
        with pytest.raises(FilterSyntaxError) as caught:
            SqlFilter(expression)
        _, shown, caret = str(caught.value).splitlines()
        assert caret == "  " + " " * column + "^"
        assert shown.isprintable()


def test_an_expression_must_be_a_string() -> None:
    for wrong in (None, 5, b"a = 1", ["a = 1"]):
        with pytest.raises(TypeError, match="a filter expression is a str"):
            SqlFilter(wrong)  # type: ignore[arg-type]


def test_long_expressions_answer_alike_at_first_and_later() -> None:
    text = " AND ".join(["a > 5", *(f"b{n} IS NULL" for n in range(600))])
    for properties, expected in (({"a": "6"}, True), ({"a": "5"}, False), ({}, None)):
        sql = SqlFilter(text)
        assert [sql.evaluate(properties) for _ in range(3)] == [expected] * 3
    failing = SqlFilter(text)
    for _ in range(3):
        with pytest.raises(FilterEvaluationError, match="a > 5"):
            failing.evaluate({"a": "x"})


def test_dialects() -> None:
    new = SqlFilter("a CONTAINS 'b' AND a NOT STARTSWITH 'b' AND a endswith 'c'", dialect="5.3")
    assert new.matches({"a": "abc"}) is True
    assert new.matches({"a": "bc"}) is False
    assert new.matches({}) is False
    for expression, properties, expected in (
        ("a NOT CONTAINS 'x'", {"a": ""}, True),
        ("a NOT CONTAINS 'x'", {}, False),
        ("a NOT CONTAINS ''", {"a": "y"}, False),
        ("a CONTAINS ''", {"a": "y"}, False),
        ("NOT (a CONTAINS 'x')", {}, True),
        ("'abc' CONTAINS 'b'", {}, True),
        ("5 CONTAINS '5'", {}, False),
        ("(a = 1) NOT CONTAINS 'x'", {"a": "1"}, False),
        ("-a ENDSWITH 'x'", {"a": "x"}, False),
    ):
        assert SqlFilter(expression, dialect="5.3").evaluate(properties) is expected, expression
    for expression in ("(a > 1) CONTAINS 'x'", "-(a > 1) CONTAINS 'x'"):
        with pytest.raises(FilterEvaluationError):
            SqlFilter(expression, dialect="5.3").evaluate({"a": "x"})
    with pytest.raises(FilterSyntaxError):
        SqlFilter("contains = 'x'", dialect="5.3")
    with pytest.raises(ValueError, match=r"4\.9"):
        SqlFilter("a = 1", dialect="6")  # type: ignore[arg-type]


def test_trailing_text_is_ignored_with_a_warning_or_refused() -> None:
    with pytest.warns(FilterWarning, match="garbage"):
        sql = SqlFilter("a = 1 garbage !!!")
    assert sql.matches({"a": "1"}) is True
    with pytest.raises(FilterSyntaxError, match="garbage"):
        SqlFilter("a = 1 garbage", strict=True)
    assert quiet("a = 05").matches({"a": "0"}) is True
    assert parse("a = 1 )").ignored_from == 6
    assert parse("a = 0L").ignored_from == 5
    assert SqlFilter("a = 1 -- c\n", strict=True).matches({"a": "1"}) is True


def test_no_properties_at_all() -> None:
    assert SqlFilter("a IS NULL").matches(None) is True
    assert SqlFilter("a = 1").evaluate(None) is None
    assert "missing" in str(SqlFilter("a = 1").explain(None))
    with pytest.raises(AttributeError):
        SqlFilter("a = 1").matches([])  # type: ignore[arg-type]


def test_many_values_of_a_number_are_not_kept() -> None:
    sql = SqlFilter("a > 5 AND a < 3000000000 AND a > 1.5")
    for number in range(5_000):
        assert sql.matches({"a": str(number)}) is (number > 5)
    assert sql.matches({"a": "7" + " " * 50}) is False


def test_filters_are_shared_and_bounded() -> None:
    from librmq.filter.filters import CACHED_FILTERS, compiled, compiled_once

    assert compiled("a = 'shared'") is compiled("a = 'shared'")
    assert compiled("a = 'shared'", "5.3") is not compiled("a = 'shared'")
    assert compiled_once.cache_info().maxsize == CACHED_FILTERS
    long = "a = 'x' OR " * 1_000 + "a = 'y'"
    assert compiled(long) is not compiled(long)


def test_filters_travel_as_text() -> None:
    sql = pickle.loads(pickle.dumps(SqlFilter("a CONTAINS 'x'", dialect="5.3", strict=True)))
    assert (sql.expression, sql.dialect, sql.strict) == ("a CONTAINS 'x'", "5.3", True)
    assert sql.matches({"a": "x"})
    assert repr(sql) == """SqlFilter("a CONTAINS 'x'", dialect='5.3', strict=True)"""


def test_many_threads_use_one_filter() -> None:
    sql = SqlFilter("a > 50 AND (b = 'x' OR c > 1.5) AND NOT (d = 3000000000)")

    def work(seed: int) -> None:
        for n in range(2_000):
            number = (seed * 7919 + n) % 3_000
            assert sql.matches({"a": str(number), "b": "x", "d": "1"}) is (number > 50)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))


@pytest.mark.parametrize(
    ("expression", "position", "rule"),
    [
        ("price > 5", 8, "integer-literal"),
        ("price = -5", 8, "integer-literal"),
        ("5 < price", 0, "integer-literal"),
        ("a <> b", 5, "missing-is-different"),
        ("a <> b", 5, "bare-word"),
        ("NOT a = 'x'", 0, "not-binds-tighter"),
        ("NOT a IS NULL", 0, "not-binds-tighter"),
        ("region = eu", 9, "bare-word"),
        ("a = 'x' AND eu", 12, "bare-word"),
        ("(a = 'x') = 5", 0, "type-mismatch"),
        ("5 = (a = 'x')", 0, "type-mismatch"),
        ("1 = TRUE", 0, "constant"),
        ("'5.0' = 5", 0, "constant"),
        ("TRUE = a", 0, "boolean-on-the-left"),
        ("a = -b", 4, "always-null"),
        ("a = ''", 0, "empty-text"),
        ("a IN ('')", 0, "empty-text"),
        ("a = 'x' garbage", 8, "ignored-rest"),
    ],
)
def test_findings(expression: str, position: int, rule: str) -> None:
    findings = quiet(expression).lint()
    assert (position, rule) in [(finding.position, finding.rule) for finding in findings]
    assert findings == sorted(findings)
    assert all(str(finding.position) in str(finding) for finding in findings)


@pytest.mark.parametrize(
    "expression",
    [
        "a = 'x' AND (b > 1.5 OR NOT (c IN ('x', 'y')))",
        "(NOT (a = 'x')) IS NULL",
        "a IS NOT NULL AND b = TRUE",
        "a > b",
        "a <> 'x'",
    ],
)
def test_nothing_to_find(expression: str) -> None:
    assert SqlFilter(expression).lint() == []


@pytest.mark.slow
def test_long_expressions() -> None:
    """Expressions with tens of thousands of terms compile, and answer as short ones do."""
    count = examples(20_000) // 2 * 2  # so that the last one compares numbers
    texts = quiet(" OR ".join(f"a = '{n}'" for n in range(count)))
    assert [texts.matches({"a": str(n)}) for n in (0, count - 1, count)] == [True, True, False]
    assert texts.evaluate({"a": "x"}) is False
    assert texts.evaluate({"b": "0"}) is None
    mixed = quiet(" OR ".join(f"p{n} > {n}" if n % 2 else f"p{n} = 'x' OR p{n} = 'y'" for n in range(count)))
    last = count - 1
    assert mixed.matches({f"p{last}": str(count)})
    assert mixed.matches({"p8": "y"})
    assert not mixed.matches({"p8": "z", f"p{last}": "5"})
    assert not mixed.matches({"p1": "no number", "p8": "y"})  # an error ends the evaluation, as in the broker
    assert mixed.matches({"p0": "x", "p1": "no number"})


def test_findings_of_5() -> None:
    rules = [finding.rule for finding in SqlFilter("a CONTAINS '' OR (a = 'x') CONTAINS 'x'", dialect="5.3").lint()]
    assert rules == ["always-false", "always-false"]
    (finding,) = quiet("a CONTAINS 'x'").lint()[-1:]
    assert finding.rule == "ignored-rest"
    assert "5.3" in finding.advice


def test_a_negated_term_is_explained_without_its_negation() -> None:
    """The line under it has the opposite verdict, so it needs other words."""
    explanation = SqlFilter("a IS NOT NULL AND b <> 'x'").explain({"a": "1", "b": "x"})
    assert (explanation.decided_by, explanation.why) == ("b = 'x'", "b is 'x'; that is TRUE")
    assert [tuple(line.rsplit(None, 1)[0].split()) for line in SqlFilter("a is not null").explain({}).tree] == [
        ("a", "is", "not", "null"),
        ("a", "IS", "NULL", "TRUE", "a", "is"),
    ]


def test_explanations_show_every_term() -> None:
    sql = SqlFilter("a > 5 AND (region = 'eu' OR b BETWEEN 1 AND 10) AND c = 'x'")
    explanation = sql.explain({"a": "7", "region": "us", "b": "50"})
    assert (explanation.matches, explanation.verdict) == (False, "FALSE")
    assert explanation.decided_by == "(region = 'eu' OR b BETWEEN 1 AND 10)"
    lines = [line.split() for line in explanation.tree]
    assert [line[-3:] for line in lines if line[:3] == ["region", "=", "'eu'"]] == [["region", "is", "'us'"]]
    assert any(line[:3] == ["b", "<=", "10"] and "FALSE" in line for line in lines)
    assert any(line[:3] == ["c", "=", "'x'"] and line[-2:] == ["not", "evaluated"] for line in lines)
    missing = sql.explain({"a": "7"})
    assert (missing.verdict, missing.decided_by) == ("UNKNOWN", "region = 'eu'")
    assert "region is missing" in missing.why
    found = sql.explain({"a": "7", "region": "eu", "c": "x"})
    assert found.matches
    assert str(found).startswith("match: the filter is TRUE")
