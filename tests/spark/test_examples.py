"""The Spark examples, run on the shared session."""

from __future__ import annotations

import runpy
import signal
from pathlib import Path
from typing import Any

import pytest

from librmq import Message, MessageStore, StoreConfig
from tests.reference import CHECKOUT, reference

pytestmark = pytest.mark.spark
pytest.importorskip("pyspark")

from tests.spark_session import shared_session  # noqa: E402

EXAMPLES = CHECKOUT / "examples" / "spark"


def example(name: str, *arguments: object) -> int:
    main = runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]
    return int(main([str(argument) for argument in arguments]))


def store(name: str) -> Path:
    path = reference().folder / name / "store"
    if not path.is_dir():
        pytest.skip(f"reference data: no {name}")
    return path


def test_every_example_is_run() -> None:
    names = {path.stem for path in EXAMPLES.glob("*.py")} - {"lake_tables"}  # by `tests.project.test_lake_recipes`
    assert all(f'"{name}"' in Path(__file__).read_text() for name in names), names


def test_find_the_lost_order(capsys: pytest.CaptureFixture[str]) -> None:
    shared_session()
    assert example("find_lost_order", "key14", store("store-basic")) == 0
    out = capsys.readouterr().out
    with MessageStore.open(store("store-basic"), read_only=True) as opened:
        there = [
            (topic, queue_id, at)
            for (topic, queue_id), queue in opened.queues.items()
            for at in range(queue.min_offset, queue.max_offset)
            if (entry := queue.entry(at)) and (found := opened.message_at(entry.physical_offset))
            and ("key14" in found.keys or found.unique_key == "key14")
        ]  # fmt: skip
    assert out.endswith(f"{len(there)} found\n")
    for topic, queue_id, at in there:
        assert f"{topic} queue {queue_id}, number {at}\n" in out
    assert example("find_lost_order", "no such key", store("store-basic")) == 0
    assert "never stored" in capsys.readouterr().out
    assert example("find_lost_order") == 2


def test_filter_a_table_of_the_lake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spark: Any = shared_session()
    rows = [({"a": str(n), "color": ("red", "blue")[n % 2]},) for n in range(20)]
    spark.createDataFrame(rows, "properties map<string,string>").write.parquet(str(tmp_path / "table"))
    spark.createDataFrame([(str(n), "red") for n in range(4, 9)], "a string, color string").write.parquet(
        str(tmp_path / "flat")
    )
    path = store("clients-sql-filter")
    assert example("filter_lake_table", path, "SqlTopic", "g_sql1", tmp_path / "table", tmp_path / "out") == 0
    assert capsys.readouterr().out == "a > 5 AND color = 'red': 7 of 20 rows match\n"
    assert example("filter_lake_table", path, "SqlTopic", "g_sql1", tmp_path / "flat", tmp_path / "out2") == 0
    assert "3 of 5 rows" in capsys.readouterr().out
    doubles = spark.read.parquet(str(tmp_path / "flat")).selectExpr("cast(a AS double) AS a", "color")
    doubles.write.parquet(str(tmp_path / "doubles"))
    assert example("filter_lake_table", path, "SqlTopic", "g_sql1", tmp_path / "doubles", tmp_path / "out4") == 1
    assert "property a: expected strings, integers or booleans, found double; cast" in capsys.readouterr().err
    assert example("filter_lake_table", path, "SqlTopic", "nobody", tmp_path / "table", tmp_path / "out3") == 1
    assert "has no SQL filter" in capsys.readouterr().err


def test_replay_yesterdays_dead_letters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = store("clients-retry-dlq"), tmp_path / "target"
    with MessageStore.open(source, read_only=True) as opened:
        letters = [message for message in opened if message.topic == "%DLQ%g_retry"]
    day = f"{_utc(letters[0].store_timestamp_ms):%Y-%m-%d}"
    for _ in range(2):
        assert example("replay_dead_letters", source, "g_retry", day, target) == 0
    assert "dead letters of g_retry" in capsys.readouterr().out
    with MessageStore.open(target, read_only=True) as opened:
        again = list(opened)
    assert sorted(message.body for message in again) == sorted(message.body for message in letters)
    assert {message.topic for message in again} == {"RetryTopic"}
    assert {message.unique_key for message in again} == {message.unique_key for message in letters}
    assert not any("RETRY_TOPIC" in message.properties for message in again)


def _utc(timestamp_ms: int) -> Any:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(timestamp_ms / 1000, UTC)


def test_the_last_step_of_the_demo(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("jinja2")
    shared_session()
    for name, total in ("shop", "80"), ("day", "250"):
        with MessageStore.open(tmp_path / name, StoreConfig.tiny()) as opened:
            opened.append(Message("sales", total.encode(), tags="card", properties={"total": total}))
    monkeypatch.syspath_prepend(CHECKOUT / "examples")
    main = runpy.run_path(str(CHECKOUT / "examples" / "demo_report.py"))["main"]
    before = signal.getsignal(signal.SIGINT)
    assert main([str(tmp_path)]) == 0
    assert signal.getsignal(signal.SIGINT) is before
    assert "  → sales: 250\n" in capsys.readouterr().out
    assert "<svg" in (tmp_path / "report.html").read_text("utf-8")
