"""Conditions that Spark pushes to the source: with and without pushing the rows are the same."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from librmq import ManualClock, Message, MessageStore, StoreConfig

pytest.importorskip("pyspark")

from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringStartsWith,
)

from librmq.spark._options import parse_read_options
from librmq.spark._source import PushingReader, Reader, arrow_schema, schema_of
from tests.spark_session import shared_session

START_MS = 1_700_000_000_000
START = datetime.fromtimestamp(START_MS / 1000, UTC)
COUNT = 120
MESSAGES = ["topic", "queueId", "queueOffset", "storeTimestamp", "tags", "physicalOffset"]
ENTRIES = ["topic", "queueId", "queueOffset", "physicalOffset", "size"]

VALUES: dict[str, list[Any]] = {
    "topic": ["A", "B", "None"],
    "queueId": [0, 1, 2, -1],
    "queueOffset": [0, 1, 7, 25, COUNT, -1],
    "storeTimestamp": [START + timedelta(milliseconds=1500 * number) for number in (-1, 0, 1, 2, 33, 80, 1000)],
    "tags": ["x", "y", "x||y", "", "z "],
    "physicalOffset": [0, 3000, 1 << 40],
    "size": [0, 130, 131],
}
COMPARED: dict[type[Filter], Callable[[Any, Any], bool]] = {
    EqualTo: lambda a, b: a == b,
    GreaterThan: lambda a, b: a > b,
    GreaterThanOrEqual: lambda a, b: a >= b,
    LessThan: lambda a, b: a < b,
    LessThanOrEqual: lambda a, b: a <= b,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, clock = tmp_path_factory.mktemp("stores") / "a", ManualClock(START_MS)
    config = StoreConfig.tiny(commitlog_file_size=16384, max_message_size=8192)
    with MessageStore.open(path, config, clock=clock) as store:
        for number in range(COUNT):
            clock.advance(ms=1000)
            tag = ("x", "y", None, "z ")[number % 4]
            store.append(Message("AB"[number % 3 == 0], b"%d" % number, tags=tag), number % 2)
    return path


@pytest.mark.spark
def test_only_reports_of_damage_leave_the_tasks(folder: Path, tmp_path: Path) -> None:
    """A condition on the column of damage is pushed, and bodies are checked if the query has them."""
    path = tmp_path / "s"
    shutil.copytree(folder, path)
    with MessageStore.open(path, read_only=True) as opened:
        messages = list(opened)[:2]
    with open(path / "commitlog" / f"{0:020}", "r+b") as log:
        log.seek(messages[0].physical_offset)
        log.write(b"\xff" * 4)
        log.seek(messages[1].physical_offset + 88)  # the body
        log.write(b"?")

    def damaged(columns: str, **options: str) -> int:
        frame = shared_session().read.format("rocketmq").schema(f"{columns}, _corrupt_record string")
        found = frame.options(mode="PERMISSIVE", **options).load(str(path)).where("_corrupt_record IS NOT NULL")
        plan = found._jdf.queryExecution().executedPlan().toString()
        assert ("isnotnull" not in plan) == bool(options), plan
        return int(found.count())

    for columns, count in (
        ("topic string, body binary", 2),
        ("topic string", 1),
        ("queueOffset bigint, tags string", 1),
    ):
        assert damaged(columns) == damaged(columns, pushFilters="true") == count
    schema = arrow_schema(schema_of(["body", "_corrupt_record"]), options := parse_read_options(
        {"path": str(path), "mode": "PERMISSIVE"}))  # fmt: skip
    reader = PushingReader(options, schema)
    list(reader.pushFilters([IsNotNull(("_corrupt_record",))]))
    assert sum(batch.num_rows for part in reader.partitions() for batch in reader.read(part)) == 2


@st.composite
def filters(draw: st.DrawFn, names: list[str]) -> Filter:
    name = draw(st.sampled_from(names))
    one = st.sampled_from(VALUES[name])
    kind: Any = draw(st.sampled_from([*COMPARED, EqualNullSafe, In, IsNotNull, IsNull, StringStartsWith, Not]))
    if kind is In:
        return In((name,), tuple(draw(st.lists(one, max_size=3))))
    if kind in (IsNotNull, IsNull):
        return kind((name,))  # type: ignore[no-any-return]
    if kind is StringStartsWith:
        text = draw(st.sampled_from(["topic", "tags"] if "tags" in names else ["topic"]))
        return StringStartsWith((text,), draw(st.sampled_from(VALUES[text])))
    if kind is Not:
        return Not(EqualTo((name,), draw(one)))
    return kind((name,), draw(one))  # type: ignore[no-any-return]


def holds(filter_: Any, row: dict[str, Any]) -> bool:
    """Return whether a condition is true for a row, as Spark decides it."""
    if isinstance(filter_, Not):
        child: Any = filter_.child
        return row[child.attribute[0]] is not None and not holds(child, row)
    found = row[filter_.attribute[0]]
    if isinstance(filter_, IsNull):
        return found is None
    if isinstance(filter_, IsNotNull) or found is None:
        return found is not None
    if isinstance(filter_, In):
        return found in filter_.value
    if isinstance(filter_, StringStartsWith):
        return bool(found.startswith(filter_.value))
    return COMPARED.get(type(filter_), COMPARED[EqualTo])(found, filter_.value)


def rows_of(reader: Reader) -> list[dict[str, Any]]:
    found = [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]
    return sorted(found, key=lambda row: int(row["physicalOffset"]))


OPTIONS: list[dict[str, str]] = [
    {},
    {"topic": "A"},
    {"tags": "x || z "},
    {"startingTimestamp": str(START_MS + 40_000)},
    {"queueId": "1", "minPartitions": "3"},
    {"view": "log"},
    {"view": "queues"},
    {"view": "queues", "topicPattern": "B"},
]


@given(st.data())
def test_pushed_filters_select_as_filtering_does(folder: Path, data: st.DataObject) -> None:
    """The source applies what it takes, and Spark the rest."""
    given_options = data.draw(st.sampled_from(OPTIONS))
    options = parse_read_options({"path": str(folder), **given_options})
    names = ENTRIES if options.view == "queues" else MESSAGES
    conditions = data.draw(st.lists(filters(names), min_size=1, max_size=4))
    schema = arrow_schema(schema_of(names), options)
    pushing = PushingReader(options, schema)
    left = list(pushing.pushFilters(conditions))
    found = [row for row in rows_of(pushing) if all(holds(one, row) for one in left)]
    assert found == [row for row in rows_of(Reader(options, schema)) if all(holds(one, row) for one in conditions)]


@pytest.mark.spark
def test_a_frame_that_is_used_several_times(folder: Path) -> None:
    """Random conditions on one frame in one query, and then the frame without them."""
    spark, dice = shared_session(), random.Random(19)
    texts = (
        "topic = 'A'", "queueId IN (1, 5)", "queueOffset BETWEEN 3 AND 17", "tags = 'y'", "tags <=> 'x'",
        "(topic = 'B' OR queueOffset > 30)", f"storeTimestamp >= timestamp_millis({START_MS + 20_500})",
    )  # fmt: skip
    chosen = ["topic = 'A'", *(" AND ".join(dice.sample(texts, 2)) for _ in range(2))]
    columns = "topic string, queueId int, queueOffset bigint, storeTimestamp timestamp, tags string"
    frame = spark.read.format("rocketmq").schema(columns).load(str(folder))
    first, *others = (frame.where(text).withColumn("number", F.lit(number)) for number, text in enumerate(chosen))
    marked = first
    for one in others:
        marked = marked.union(one)
    rows = sorted((*tuple(row)[:3], row["number"]) for row in marked.collect())
    decided = frame.select("*", *(F.expr(text).alias(f"c{number}") for number, text in enumerate(chosen))).collect()
    assert len(decided) == COUNT
    wanted = [(*tuple(row)[:3], number) for row in decided for number in range(len(chosen)) if row[f"c{number}"]]
    assert rows == sorted(wanted)
