"""Every recorded filter case, allocation and bloom position inside Spark, through columns and SQL."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from librmq.client.allocation import allocate_by_config
from librmq.idempotence.stores import dedup_key as key_of_record
from tests.golden.test_filter import DIALECTS, compiling
from tests.reference import Row, document, existing, jsonl

pytestmark = pytest.mark.spark
pytest.importorskip("pyspark")

from pyspark.errors import IllegalArgumentException, PySparkException  # noqa: E402
from pyspark.sql import functions as F  # noqa: E402, N812

from librmq.errors import FilterSyntaxError  # noqa: E402
from librmq.java.lang import string_hash  # noqa: E402
from librmq.message.message import MessageQueue  # noqa: E402
from librmq.spark import (  # noqa: E402
    allocate,
    bloom_positions,
    dedup_key,
    match_sql,
    match_sql_5,
    match_sql_udf,
    match_tags,
    register,
    tags_code,
)
from librmq.spark._functions import register_functions  # noqa: E402
from librmq.spark.sessions import cause_of  # noqa: E402
from tests.spark_session import assert_native, shared_session  # noqa: E402

NAMES = {"4.9": "match_sql", "5.3": "match_sql_5"}


@pytest.fixture(scope="module")
def spark() -> Any:
    register(shared_session())
    return shared_session()


def test_every_filter_case_in_sql_text(spark: Any, figure: Callable[[str], None]) -> None:
    answered = 0
    for file, dialect in DIALECTS:
        rows = [row for row, _ in compiling(file, dialect)]
        schema = "number int, expr string, props map<string,string>"
        frame = spark.createDataFrame([(n, row["expr"], row["props"]) for n, row in enumerate(rows)], schema)
        frame.createOrReplaceTempView("cases")
        found = dict(map(tuple, spark.sql(f"select number, {NAMES[dialect]}(props, expr) from cases").collect()))
        assert [found[n] for n in range(len(rows))] == [row["match"] for row in rows]
        answered += len(rows)
    figure(f"filter, Spark SQL text: {answered} compiling cases answered by the Arrow back-end")


def test_a_named_filter_in_sql_text(spark: Any) -> None:
    frame = spark.createDataFrame([({"a": "7"},), ({"a": "x"},), ({},), (None,)], "props map<string,string>")
    frame.createOrReplaceTempView("named")
    spark.udf.register("large", match_sql_udf("a > 5"))
    found = spark.sql("SELECT large(props) FROM named").collect()
    assert found == frame.select(match_sql("props", "a > 5")).collect()
    assert [row[0] for row in found] == [True, False, False, False]
    assert frame.select(match_sql("props", "a > 5 OR b = 'a long expression'")).columns == ["match_sql"]


def test_a_literal_filter_in_sql_text_is_native(spark: Any) -> None:
    """It is the same column as in Python; an invalid expression is refused while Spark analyses the text."""
    rows = [({"a": "7", "b": "x y"}, "t"), ({"a": "x"}, None), ({}, "u"), (None, "t")]
    frame = spark.createDataFrame(rows, "props map<string,string>, tag string")
    frame.createOrReplaceTempView("literal")
    calls = ("match_sql(props, 'a > 5')", "match_sql_5(props, 'b CONTAINS ''x''')", "match_tags(tag, 't || v')")
    found = spark.sql(f"SELECT {', '.join(calls)} FROM literal")
    assert_native(found)
    assert len(set(found.columns)) == len(calls)
    columns = (match_sql("props", "a > 5"), match_sql_5("props", "b CONTAINS 'x'"), match_tags("tag", "t||v"))
    wanted = frame.select(*(column.alias(str(number)) for number, column in enumerate(columns)))
    assert list(map(tuple, found.collect())) == list(map(tuple, wanted.collect()))
    grouped = f"SELECT {calls[0]} AS big, count(*) AS n FROM literal WHERE {calls[2]} GROUP BY {calls[0]} ORDER BY big"
    assert list(map(tuple, spark.sql(grouped).collect())) == [(False, 1), (True, 1)]
    for wrong in ("match_sql(props, 'a > (')", "match_sql_5(props, 'a >')", "match_tags(tag, '||')"):
        for analyse in (partial(spark.sql, f"SELECT {wrong} FROM literal"), partial(frame.where, wrong)):
            with pytest.raises(IllegalArgumentException) as caught:
                analyse()
            assert len(str(caught.value)) < 300, "one sentence, without tracebacks of Python and Java"
            assert (cause_of(caught.value) or "").startswith("[RMQ_BAD_OPTION] ")


class OtherSpark:
    """A session whose JVM has no class of the name that builders need, as another version of Spark may have none."""

    def __init__(self, spark: Any) -> None:
        self._spark = spark
        jvm = spark.sparkContext._jvm
        org = SimpleNamespace(
            apache=SimpleNamespace(spark=SimpleNamespace(sql=SimpleNamespace(classic=jvm.org.apache.spark.elsewhere)))
        )
        self.sparkContext = SimpleNamespace(_jvm=SimpleNamespace(org=org), _gateway=None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._spark, name)


class ConnectedSpark:
    """A session without a JVM in reach, as one of Spark Connect."""

    def __init__(self, spark: Any) -> None:
        self.udf = spark.udf


@pytest.mark.parametrize("other", [OtherSpark, ConnectedSpark])
def test_without_builders_a_literal_filter_runs_over_arrow(spark: Any, other: Callable[[Any], Any]) -> None:
    """The answers are the same; an invalid expression is refused in the task."""
    own = spark.newSession()
    register_functions(other(own))
    frame = own.createDataFrame(
        [({"a": "7"}, "t"), ({"a": "x"}, None), ({}, "u")], "props map<string,string>, tag string"
    )
    frame.createOrReplaceTempView("literal")
    found = own.sql(
        "SELECT match_sql(props, 'a > 5'), match_sql_5(props, 'a > 5'), match_tags(tag, 't || v') FROM literal"
    )
    assert "ArrowEvalPython" in found._jdf.queryExecution().executedPlan().toString()
    assert list(map(tuple, found.collect())) == [(True, True, True), (False, False, False), (False, False, False)]
    wrong = own.sql("SELECT match_sql(props, 'a > (') FROM literal")
    with pytest.raises(PySparkException) as caught:
        wrong.collect()
    assert cause_of(caught.value) is not None


def test_an_invalid_expression_is_refused_immediately() -> None:
    refused = 0
    for file, dialect in DIALECTS:
        for row in jsonl(existing("filter", file)):
            if row["result"] == "PARSE_ERROR":
                with pytest.raises(FilterSyntaxError, match=r"\^"):
                    match_sql("props", row["expr"], dialect=dialect)
                with pytest.raises(FilterSyntaxError, match=r"\^"):
                    match_sql_udf(row["expr"], dialect=dialect)
                refused += 1
    assert refused


def test_an_expression_too_large_for_catalyst_runs_over_arrow(spark: Any) -> None:
    terms = " AND ".join(f"(a{n} > 1 OR (b{n} > 2 AND (c{n} > 3 OR d{n} > 4)))" for n in range(600))
    frame = spark.createDataFrame([({f"a{n}": "5" for n in range(600)},), ({"a0": "5"},)], "props map<string,string>")
    column = match_sql("props", terms)
    assert [row[0] for row in frame.select(column).collect()] == [True, False]


def test_every_allocation(spark: Any) -> None:
    rows = [row for row in jsonl(existing("allocate.jsonl")) if "strategy" in row and _is_askable(row)]
    schema = (
        "number int, queues array<struct<topic:string,brokerName:string,queueId:int>>, clients array<string>, "
        "client string"
    )
    frame = spark.createDataFrame(
        [(n, row["mqs"] and list(map(tuple, row["mqs"])), row["cids"], row["cid"]) for n, row in enumerate(rows)],
        schema,
    ).cache()
    by_strategy: dict[Any, list[int]] = {}
    for number, row in enumerate(rows):
        by_strategy.setdefault(_strategy(row), []).append(number)
    columns = [
        F.when(F.col("number").isin(numbers), allocate(
            allocate_by_config(MessageQueue(*one) for one in strategy) if isinstance(strategy, tuple) else strategy,
            "queues", "clients", "client"))
        for strategy, numbers in by_strategy.items()
    ]  # fmt: skip
    found = dict(map(tuple, frame.select("number", F.coalesce(*columns)).collect()))
    for number, row in enumerate(rows):
        share = found[number]
        assert (None if share is None else [list(one) for one in share]) == row.get("result"), row
    frame.unpersist()


def _is_askable(row: Row) -> bool:
    return not (row["strategy"] == "CONFIG" and row["config"] is None)


def _strategy(row: Row) -> Any:
    match row["strategy"]:
        case "CONFIG":
            return tuple(map(tuple, row["config"]))
        case "CONSISTENT_HASH" if "virtual_nodes" in row:
            return f"CONSISTENT_HASH:{row['virtual_nodes']}"
        case "MACHINE_ROOM":
            return f"MACHINE_ROOM:{','.join(row['consumer_idcs'])}"
        case "MACHINE_ROOM_NEARBY":
            return f"MACHINE_ROOM_NEARBY:{row['inner']}"
        case name:
            return name


def test_shares_of_all_clients_in_sql_text(spark: Any) -> None:
    queues = "transform(sequence(0, 4), i -> named_struct('topic', 'T', 'brokerName', 'b', 'queueId', i))"
    found = spark.sql(f"select allocate('AVG', {queues}, array('c0', 'c1'))").first()[0]
    assert {client: [one["queueId"] for one in share] for client, share in found.items()} == {
        "c0": [0, 1, 2],
        "c1": [3, 4],
    }


def test_every_bloom_position(spark: Any) -> None:
    cases = [
        (filter_["f"], filter_["n"], one["str"], one["bits"])
        for filter_ in document(existing("bloom.json"))["filters"]
        for one in filter_["positions"]
    ]
    rows = [(n, text, float(f), count) for n, (f, count, text, _) in enumerate(cases)]
    spark.createDataFrame(rows, "number int, t string, f double, n int").createOrReplaceTempView("texts")
    found = dict(map(tuple, spark.sql("select number, bloom_positions(t, f, n) from texts").collect()))
    assert [found[n] for n in range(len(cases))] == [bits for *_, bits in cases]


def test_tags(spark: Any) -> None:
    texts = ["TagA", "标签", "x" * 300, "\U0001d4b3", ""]
    frame = spark.createDataFrame([(text,) for text in texts] + [(None,)], "tags string")
    found = frame.select(tags_code("tags"), match_tags("tags", f"{texts[0]} || other")).collect()
    assert [row[0] for row in found] == [*map(string_hash, texts), 0]
    assert [row[1] for row in found] == [text == texts[0] for text in texts] + [False]
    frame.createOrReplaceTempView("tagged")
    assert [row[0] for row in spark.sql("select match_tags(tags, '*') from tagged").collect()] == [True] * len(found)


def test_dedup_keys(spark: Any) -> None:
    rows = [("T", "a", "order:1"), ("主题", None, "k 2"), ("T", "a", None), ("T", "a", "")]
    frame = spark.createDataFrame(rows, "topic string, tags string, key string")
    frame.createOrReplaceTempView("orders")
    wanted = [key_of_record("shop", topic, "billing", tag, key) if key else None for topic, tag, key in rows]
    found = frame.select(dedup_key("shop", "billing", "topic", "tags", "key")).collect()
    assert [row[0] for row in found] == wanted
    found = spark.sql("select dedup_key('shop', topic, 'billing', tags, key) from orders").collect()
    assert [row[0] for row in found] == wanted


def test_columns_have_the_names_of_their_functions(spark: Any) -> None:
    register_functions(spark)
    frame = spark.createDataFrame(
        [({"a": "7"}, "paid", "G#T")], "properties map<string,string>, tags string, text string"
    )
    columns = [
        match_sql("properties", "a > 5"),
        match_tags("tags", "paid"),
        tags_code("tags"),
        bloom_positions("text"),
        dedup_key("shop", "billing", "text", "tags", "text"),
    ]
    names = ["match_sql", "match_tags", "tags_code", "bloom_positions", "dedup_key"]
    assert frame.select(*columns).columns == names
    in_sql = frame.selectExpr("bloom_positions(text)", "bloom_positions(text, 20, 32)", "tags_code(tags)")
    assert in_sql.columns == ["bloom_positions(text)", "bloom_positions(text, 20, 32)", "tags_code(tags)"]
    row = in_sql.first()
    assert row is not None
    by_default = frame.select(bloom_positions("text")).first()
    assert by_default is not None
    assert row[0] == row[1] == by_default[0]
