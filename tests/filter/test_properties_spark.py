"""Spark columns agree with the interpreter on random expressions and properties."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from tests.conftest import SlowBudget
from tests.filter.expressions import NAMES, properties
from tests.filter.test_properties import random_filter
from tests.filter.typed_columns import REFUSED, TYPED_CASES

pytestmark = pytest.mark.spark

FILTERS_A_JOB = 25


def agree(random: Random, messages: int) -> None:
    """Assert that Spark agrees on random filters over random messages, all in one job."""
    from pyspark.sql import functions as F  # noqa: N812

    from librmq.filter.spark_backend import to_column
    from tests.spark_session import assert_native, shared_session

    filters = [random_filter(random) for _ in range(FILTERS_A_JOB)]
    given = [properties(random) for _ in range(messages)]
    frame = shared_session().createDataFrame(list(enumerate(given)), "number int, props map<string,string>")
    frame = frame.select("number", "props", *(F.col("props").getItem(name).alias(name) for name in NAMES))
    texts = {name: F.col(name) for name in NAMES}
    # Half of the filters read a map, the others read one column for each property.
    columns = [
        to_column(sql.question, F.col("props") if i % 2 else texts).alias(f"c{i}") for i, sql in enumerate(filters)
    ]
    # Cached, so that Spark computes the columns from rows instead of folding the data into constants.
    answers = frame.cache().select("number", *columns)
    assert_native(answers)
    for row in answers.collect():
        for i, sql in enumerate(filters):
            assert row[1 + i] is sql.matches(given[row[0]]), (sql.selector.expression, given[row[0]])
    frame.unpersist()


def test_spark_agrees() -> None:
    agree(Random(1), 200)


@pytest.mark.slow
def test_spark_agrees_on_a_million_pairs(slow_budget: SlowBudget) -> None:
    messages = 2_000
    for number in slow_budget.rounds(1_000_000 // (messages * FILTERS_A_JOB), "jobs of 50,000 pairs"):
        agree(Random(number + 2), messages)


def test_columns_for_each_property() -> None:
    from pyspark.sql import functions as F  # noqa: N812

    from librmq.filter import SqlFilter
    from tests.spark_session import assert_native, shared_session

    frame = shared_session().createDataFrame([("7", "eu"), ("x", None), (None, "us")], "a string, r string").cache()
    sql = SqlFilter("(a > 5 OR r = 'us') AND missing IS NULL")
    column = sql.to_column({"a": F.col("a"), "r": F.col("r")})
    answers = frame.select(column)
    assert_native(answers)
    assert [row[0] for row in answers.collect()] == [True, False, True]
    # Spark may group by deterministic columns, and push them below other steps.
    assert frame.groupBy(column.alias("m")).count().count() == 2


def test_columns_count_as_the_text_of_senders(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `test_arrow` has it; a filter that is too large for a Spark column, and runs over Arrow, does the same."""
    from pyspark.errors import PySparkException
    from pyspark.sql import functions as F  # noqa: N812

    from librmq.filter import SqlFilter, spark_backend
    from librmq.spark import cause_of, match_sql
    from tests.spark_session import assert_native, shared_session

    cases = [case for case in TYPED_CASES if case.text is not REFUSED]
    schema = ", ".join(f"c{number} {case.spark}" for number, case in enumerate(cases))
    frame = shared_session().createDataFrame([tuple(case.value for case in cases)], schema).cache()
    columns = [
        SqlFilter(case.expression).to_column({"a": F.col(f"c{number}")}).alias(f"m{number}")
        for number, case in enumerate(cases)
    ]
    answers = frame.select(*columns)
    assert_native(answers)
    assert "raise_error" not in answers._jdf.queryExecution().optimizedPlan().toString()
    (row,) = answers.collect()
    for case, answer in zip(cases, row, strict=True):
        assert answer is SqlFilter(case.expression).matches({} if case.text is None else {"a": case.text}), case
    refused = [case for case in TYPED_CASES if case.text is REFUSED]
    schema = ", ".join(f"c{number} {case.spark}" for number, case in enumerate(refused))
    frame = shared_session().createDataFrame([tuple(case.value for case in refused)], schema)
    for number, case in enumerate(refused):
        with pytest.raises(PySparkException) as caught:
            frame.select(SqlFilter(case.expression).to_column({"a": F.col(f"c{number}")})).collect()
        expected = f"property a: expected strings, integers or booleans, found {case.spark}; cast it to string"
        assert cause_of(caught.value) == f"[RMQ_BAD_OPTION] {expected}"
    monkeypatch.setattr(spark_backend, "LARGEST", 0)
    numbers = shared_session().createDataFrame([(60, 60.0)], "i int, d double")
    assert numbers.select(match_sql({"a": "i"}, "a > 50")).collect() == [(True,)]
    with pytest.raises(PySparkException, match="property a: expected strings, integers or booleans, found double"):
        numbers.select(match_sql({"a": F.col("d")}, "a > 50")).collect()
    with pytest.raises(PySparkException) as caught:
        numbers.select(match_sql(F.create_map(F.lit("a"), "d"), "a > 50")).collect()
    assert (cause_of(caught.value) or "").startswith("[RMQ_BAD_OPTION] match_sql: the values of the map: expected str")


def test_columns_are_never_null() -> None:
    from pyspark.sql import functions as F  # noqa: N812

    from librmq.filter import SqlFilter
    from tests.spark_session import shared_session

    rows = [
        ("7", "eu"),
        (" 7", "eu"),
        ("\u0667", "us"),
        ("+7", "eu"),
        ("3", "eu"),
        ("x", "us"),
        (None, "eu"),
        ("7", None),
    ]
    frame = shared_session().createDataFrame(rows, "a string, r string")
    columns = {"a": F.col("a"), "r": F.col("r")}
    for text in ("a > 5 AND r IN ('eu', 'us')", "(r = 'eu' OR r = 'us') AND (a > 5 AND a < 9)", "r IN ('eu', 'us')"):
        sql = SqlFilter(text)
        answers = [row[0] for row in frame.cache().select(sql.to_column(columns)).collect()]
        messages = [{name: value for name, value in zip("ar", row, strict=True) if value is not None} for row in rows]
        assert answers == [sql.matches(message) for message in messages]
    frame.unpersist()


def test_a_source_is_asked_only_for_known_values(tmp_path: Path) -> None:
    from pyspark.sql import functions as F  # noqa: N812

    from librmq.filter import SqlFilter
    from tests.spark_session import shared_session

    path = str(tmp_path / "rows")
    shared_session().createDataFrame([("7", "eu"), (None, None)], "a string, r string").write.parquet(path)
    stored = shared_session().read.parquet(path)
    found = stored.where(SqlFilter("a > 5 AND r IN ('eu', 'us')").to_column({"a": F.col("a"), "r": F.col("r")}))
    assert "PushedFilters: [IsNotNull(r), In(r, [eu,us])]" in found._jdf.queryExecution().executedPlan().toString()
    assert found.count() == 1


def test_long_chains_stay_shallow() -> None:
    from librmq.filter import SqlFilter
    from tests.spark_session import shared_session

    frame = shared_session().createDataFrame([({"a": "7"},)], "props map<string,string>").cache()
    for text, expected in (
        (" AND ".join(["a = '7'"] * 1_000), True),  # a comparison of text has the fewest parts
        (" OR ".join([*["a = 'x'"] * 299, "a > 5"]), True),
        (" OR ".join([f"a = {n}" for n in range(60)]), True),
    ):
        column = SqlFilter(text).to_column(frame["props"])
        assert [row[0] for row in frame.select(column).collect()] == [expected]


def test_too_large_values_are_named() -> None:
    from librmq.errors import FilterError
    from librmq.filter import SqlFilter
    from tests.spark_session import shared_session

    frame = shared_session().createDataFrame([({"a": "7"},)], "props map<string,string>")
    text = "a = 1"
    for n in range(100):
        text = f"({text} OR b{n} > {n}) AND a < {n} OR c = {n}"
    with pytest.raises(FilterError, match="too large"):
        SqlFilter(text).to_column(frame["props"])
