"""Incremental runs of pipelines, and the columns of their results."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from librmq import ManualClock, Message, MessageStore, StoreConfig

pytestmark = pytest.mark.spark
pytest.importorskip("pyspark")

from librmq import columns  # noqa: E402
from librmq.columns.options import DataLossError  # noqa: E402
from librmq.errors import ConfigError  # noqa: E402
from librmq.spark import run_incrementally  # noqa: E402
from librmq.spark.pipelines import PIPELINES, run  # noqa: E402
from tests.spark_session import shared_session  # noqa: E402

CONFIG = StoreConfig.tiny(commitlog_file_size=8192, max_message_size=4096)


def add(path: Path, first: int, count: int, topic: str = "T") -> Path:
    clock = ManualClock(1_700_000_000_000 + 1000 * first)
    with MessageStore.open(path, CONFIG, clock=clock) as store:
        for number in range(first, first + count):
            clock.advance(ms=1000)
            store.append(Message(topic, b"x" * 200, keys=f"k{number % 7}"), number % 2)
    return path


def rows(frame: Any) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in frame.collect()]


def kept(path: Path | str) -> list[tuple[Any, ...]]:
    """Return the rows of Parquet in some fixed order."""
    return sorted(rows(shared_session().read.parquet(str(path))), key=str)


def test_results_have_the_documented_columns(tmp_path: Path) -> None:
    """Each pipeline, also when it finds nothing."""
    spark = shared_session()
    path = add(tmp_path / "s", 0, 3)
    spark.createDataFrame([("k1",)], "id string").write.parquet(str(tmp_path / "rows"))
    settings = {"reconcile": {"rows": str(tmp_path / "rows"), "key": "id"}}
    for name, pipeline in PIPELINES.items():
        if name == "duplicates-approximate":
            pytest.importorskip("pybloom_live")
        found = run(spark, name, str(path), settings.get(name)).schema
        types = ", ".join(f"{field.name} {field.dataType.simpleString()}" for field in found)
        assert types == pipeline.columns, name


def test_no_run_touches_anything_else(tmp_path: Path) -> None:
    """Not a store, nor folders that happen to have the names of those of incremental runs."""
    store = add(tmp_path / "store", 0, 3)
    (tmp_path / "mine" / "messages" / "archive").mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    for name in ("store", "mine"):
        with pytest.raises(ConfigError, match="holds no incremental runs; name another folder"):
            run_incrementally(shared_session(), "skew", str(store), str(tmp_path / name))
    assert sorted(tmp_path.rglob("*")) == before


def test_incremental_runs_equal_a_whole_run(tmp_path: Path) -> None:
    """Messages of earlier runs may be gone from the store; new topics and stores are read from their start."""
    spark, out = shared_session(), str(tmp_path / "out")
    os.mkdir(out)  # an empty folder is as good as none
    path = add(tmp_path / "s", 0, 40)
    whole = add(tmp_path / "w", 0, 40)

    def incremental(*paths: Path, **settings: str) -> int:
        return run_incrementally(spark, "duplicates", [str(one) for one in paths], out, settings).messages

    assert incremental(path) == 40
    assert incremental(path) == 0
    for store in (path, whole):
        add(store, 40, 10)
        add(store, 50, 4, "New")
    oldest = min((path / "commitlog").iterdir())
    oldest.unlink()
    (path / "librmq" / "closed.json").unlink()  # as if a broker had deleted it: librmq would note the new begin
    assert incremental(path) == 14
    names = [name for name in run(spark, "duplicates", str(whole)).columns if name != "store"]
    expected = run(spark, "duplicates", str(whole)).select(names)
    found = spark.read.parquet(f"{out}/latest").select(names)
    assert sorted(rows(found), key=str) == sorted(rows(expected), key=str)
    other = add(tmp_path / "other", 0, 3, "Elsewhere")
    assert incremental(path, other) == 3
    for paths, settings, text in (
        ([path, other], {"window": "5"}, "keep them, or name another folder"),
        ([path, other], {"starting_offsets": "{}"}, "chooses the offsets"),
    ):
        with pytest.raises(ConfigError, match=text):
            incremental(*paths, **settings)
    with pytest.raises(DataLossError, match="/other: this store was read, and none of the named folders holds it now"):
        incremental(path)
    with pytest.raises(ConfigError, match="present state"):
        run_incrementally(spark, "backlog", str(path), str(tmp_path / "o2"))
    assert len(list((tmp_path / "out" / "runs").iterdir())) <= 2
    add(path, 54, 100)
    for file in sorted((path / "commitlog").iterdir())[:-1]:
        file.unlink()
    (path / "librmq" / "closed.json").unlink()
    with pytest.raises(DataLossError, match="damaged=skip"):
        incremental(path, other)
    state = tmp_path / "out" / "latest" / "_librmq_run.json"
    found = json.loads(state.read_text())
    found["ends"][str(other)]["Elsewhere"]["0"] = 1000  # the queue was created again since
    state.write_text(json.dumps(found))
    left = columns.reader(path, topic="T", columns=["queueId"]).read_all().num_rows
    last = run_incrementally(spark, "duplicates", [str(path), str(other)], out, {"damaged": "skip"})
    assert last.messages == left + 2
    assert last.lost == 100 - left
    marks = spark.read.parquet(last.path).select("store", "skipped").distinct().collect()
    assert {tuple(row) for row in marks if row["store"] == str(path)} == {(str(path), True)}
    add(path, 154, 100, "Late")
    for file in sorted((path / "commitlog").iterdir())[:-1]:
        file.unlink()
    (path / "librmq" / "closed.json").unlink()
    with pytest.raises(DataLossError, match=r"topic 'Late', queue 0: it is new, but begins at"):
        run_incrementally(spark, "duplicates", [str(path), str(other)], out)


def test_incremental_runs_know_what_they_have_read(tmp_path: Path) -> None:
    """A renamed store goes on; another store in its folder is a loss, or by the setting read from its start."""
    spark, out, path = shared_session(), str(tmp_path / "out"), add(tmp_path / "s", 0, 20)

    def incremental(**settings: str) -> tuple[int, int]:
        found = run_incrementally(spark, "skew", str(path), out, settings)
        result = spark.read.parquet(found.path)
        assert {row["store"] for row in result.collect()} == {str(path)}
        return found.messages, result.groupBy().sum("messages").first()[0]

    assert incremental() == (20, 20)
    path = add(path.rename(tmp_path / "moved"), 20, 5)
    assert incremental() == (5, 25)
    shutil.rmtree(path)
    add(path, 100, 35)
    with pytest.raises(DataLossError, match=r"its log has another record at .* holds another store"):
        incremental()
    assert incremental(damaged="skip") == (35, 60)
    assert incremental() == (0, 60)


def test_a_topic_that_is_created_again_between_incremental_runs(tmp_path: Path) -> None:
    """It is a loss, though it has more messages than were read; by the setting it is read from its start."""
    spark, out, path = shared_session(), str(tmp_path / "out"), add(tmp_path / "s", 0, 20)

    def incremental(**settings: str) -> tuple[int, int]:
        found = run_incrementally(spark, "skew", str(path), out, {"topic": "T", **settings})
        return found.messages, spark.read.parquet(found.path).groupBy().sum("messages").first()[0]

    assert incremental() == (20, 20)
    add(path, 20, 60, "Other")
    for file in sorted((path / "commitlog").iterdir())[:-1]:
        file.unlink()
    (path / "librmq" / "closed.json").unlink()
    with MessageStore.open(path) as store:
        assert store.clean_unused_topics(["Other"]) == [("T", 0), ("T", 1)]
    add(path, 100, 30)
    with pytest.raises(DataLossError, match="topic 'T', queue 0: offset 9 is another message than the last one"):
        incremental()
    assert incremental(damaged="skip") == (30, 50)
    assert incremental() == (0, 50)


class Killed(BaseException):
    """Ends a run like a signal: nothing handles it."""


@pytest.mark.slow
def test_an_incremental_run_killed_at_any_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result stays that of the last whole run; the next run gives what no kill would have given."""
    spark, out = shared_session(), tmp_path / "out"
    path = add(tmp_path / "s", 0, 20)

    left = [0]

    def counted(action: Any) -> Any:
        def called(*arguments: Any, **keywords: Any) -> Any:
            if str(out) in str(arguments[-1]):
                left[0] -= 1
                if left[0] < 0:
                    raise Killed
            return action(*arguments, **keywords)

        return called

    run_incrementally(spark, "skew", str(path), str(out))
    for name in ("rename", "replace", "symlink"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    for number in range(20):
        add(path, 20 + number, 1)
        before, left[0] = kept(out / "latest"), number
        try:
            run_incrementally(spark, "skew", str(path), str(out))
            break
        except Killed:
            assert kept(out / "latest") == before
    assert number == 3
    left[0] = 100
    assert kept(out / "latest") == sorted(rows(run(spark, "skew", str(path))), key=str)
