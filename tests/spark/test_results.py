"""Results of pipelines in folders: runs beside each other, partitions, and incremental runs."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from librmq import ManualClock, Message, MessageStore, StoreConfig

pytestmark = pytest.mark.spark
pytest.importorskip("pyspark")

from librmq import columns  # noqa: E402
from librmq.columns.options import DataLossError  # noqa: E402
from librmq.errors import ConfigError, StoreLockedError  # noqa: E402
from librmq.spark.pipelines import PIPELINES, run  # noqa: E402
from librmq.spark.results import run_incrementally, write_result  # noqa: E402
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


def test_runs_are_kept_beside_each_other(tmp_path: Path) -> None:
    frame = shared_session().createDataFrame([("a", 1), ("b", 2)], "topic string, n int")
    out = str(tmp_path / "out")
    killed = tmp_path / "out" / "_unfinished-run=1"
    killed.mkdir(parents=True)
    first = write_result(frame, out, append=True, partition_by=["topic"])
    assert not killed.exists()
    assert Path(first).parent == tmp_path / "out"
    assert (Path(first) / "topic=a").is_dir()
    write_result(frame, out, append=True, partition_by=["topic"])
    whole = shared_session().read.parquet(out)
    assert sorted(whole.columns) == ["n", "run", "topic"]
    assert whole.groupBy("topic").count().where("count = 2").count() == 2
    before = sorted((tmp_path / "out").rglob("*"))
    refused: list[tuple[Any, dict[str, Any], str]] = [
        (frame, {}, r"partition_by: the earlier runs in .* are partitioned by topic; use the same"),
        (frame, {"partition_by": ["n"]}, "are partitioned by topic"),
        (frame.withColumnRenamed("n", "m"), {"partition_by": ["topic"]}, "the columns n, topic, this one topic, m;"),
    ]
    for other, settings, text in refused:
        with pytest.raises(ConfigError, match=text):
            write_result(other, out, append=True, **settings)
    assert sorted((tmp_path / "out").rglob("*")) == before
    plain = str(tmp_path / "plain")
    for overwrite in (False, True):
        write_result(frame, plain, overwrite=overwrite)
    assert kept(plain) == [("a", 1), ("b", 2)]
    for again, words in ((out, {}), (plain, {"append": True}), (plain + "2", {"partition_by": ["x"]})):
        with pytest.raises(ConfigError, match=r"exists|one result|partition_by"):
            write_result(frame, again, **words)


def test_a_partitioned_result_without_rows(tmp_path: Path) -> None:
    """It shows its columns; beside runs with rows it does no harm."""
    spark = shared_session()
    frame = spark.createDataFrame([("a", 1)], "topic string, n int")
    plain, runs = str(tmp_path / "plain"), str(tmp_path / "runs")
    write_result(frame.limit(0), plain, partition_by=["topic"])
    assert sorted(spark.read.parquet(plain).columns) == ["n", "topic"]
    assert not kept(plain)
    for each in (frame.limit(0), frame, frame.limit(0)):
        write_result(each, runs, append=True, partition_by=["topic"])
    assert [(row[0], row[2]) for row in kept(runs)] == [(1, "a")]


def test_no_result_replaces_anything_else(tmp_path: Path) -> None:
    """Not a store, not a file, nor folders that happen to have the names of those of incremental runs."""
    store = add(tmp_path / "store", 0, 3)
    (tmp_path / "mine" / "messages" / "archive").mkdir(parents=True)
    (tmp_path / "file").touch()
    before = sorted(tmp_path.rglob("*"))
    frame: Any = SimpleNamespace(columns=["topic"])  # refused before anything is written
    ways: list[dict[str, Any]] = [{"overwrite": True}, {"append": True}]
    for name in ("store", "mine", "file"):
        for words in ways:
            with pytest.raises(ConfigError, match=r"no result of a pipeline|expected a folder"):
                write_result(frame, str(tmp_path / name), **words)
    for name in ("store", "mine"):
        with pytest.raises(ConfigError, match="no result of a pipeline; name another folder"):
            run_incrementally(frame, "skew", str(store), str(tmp_path / name))
    assert sorted(tmp_path.rglob("*")) == before


def test_incremental_runs_equal_a_whole_run(tmp_path: Path) -> None:
    """Messages of earlier runs may be gone from the store; new topics and stores are read from their start."""
    spark, out = shared_session(), str(tmp_path / "out")
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
        ([path], {}, "name all stores"),
        ([path, other], {"window": "5"}, "keep them, or name another folder"),
        ([path, other], {"starting_offsets": "{}"}, "chooses the offsets"),
    ):
        with pytest.raises(ConfigError, match=text):
            incremental(*paths, **settings)
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
    with pytest.raises(DataLossError, match=r"topic 'Late', queue 0: it is new since the last run, but begins at"):
        run_incrementally(spark, "duplicates", [str(path), str(other)], out)


class Rows:
    """A frame that writes one file without Spark."""

    def __init__(self, content: str) -> None:
        self.columns = ["topic"]
        self._content = content

    @property
    def write(self) -> Rows:
        return self

    def partitionBy(self, *_: str) -> Rows:  # noqa: N802 (Spark's)
        return self

    def parquet(self, folder: str) -> None:
        os.mkdir(folder)
        Path(folder, "part-0.parquet").write_text(self._content)


class Killed(BaseException):
    """Ends a run like a signal: nothing handles it."""


def write(content: str, out: Path, **ways: Any) -> str:
    frame: Any = Rows(content)
    return write_result(frame, str(out), **ways)


def test_a_half_deleted_result_does_not_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run was killed while it deleted the former result, and then the user moved the new one away."""
    out, delete = tmp_path / "out", shutil.rmtree
    write("old", out)

    def killed(folder: str, **settings: Any) -> None:
        if os.path.isdir(folder):
            for file in Path(folder).iterdir():
                file.unlink()
            raise Killed
        delete(folder, **settings)

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(Killed):
        write("new", out, overwrite=True)
    monkeypatch.setattr(shutil, "rmtree", delete)
    assert (out / "part-0.parquet").read_text() == "new"
    out.rename(tmp_path / "mine")
    write("newest", out)
    assert (out / "part-0.parquet").read_text() == "newest"
    assert sorted(os.listdir(tmp_path)) == ["mine", "out"]


def test_a_second_run_does_not_come_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither of the two renames, at any of which OUT seems to have lost its result."""
    out, rename, refused = tmp_path / "out", os.rename, []

    def with_second(source: str, target: str) -> None:
        for ways in ({"overwrite": True}, {"append": True}, {}):
            with pytest.raises((StoreLockedError, ConfigError)) as raised:
                write("second", out, **ways)
            refused.append(raised.type)
        rename(source, target)

    write("old", out)
    monkeypatch.setattr(os, "rename", with_second)
    write("new", out, overwrite=True)
    monkeypatch.setattr(os, "rename", rename)
    assert (out / "part-0.parquet").read_text() == "new"
    assert refused[3:6] == [StoreLockedError] * 3
    assert os.listdir(tmp_path) == ["out"]


def test_a_replacement_killed_at_any_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The next run finds the former result or the new one, whatever it is asked to do with it."""
    rename = os.rename
    cases = [("old", False), ("old", True), ("new", False), ("new", False)]
    for number, (kept_content, is_told) in enumerate(cases):
        out = tmp_path / str(number) / "out"
        write("old", out)
        left = [number]

        def counted(source: str, target: str, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            rename(source, target)

        monkeypatch.setattr(os, "rename", counted)
        with pytest.raises(Killed) if number < 3 else contextlib.nullcontext():
            write("new", out, overwrite=True)
        monkeypatch.setattr(os, "rename", rename)
        caplog.clear()
        with pytest.raises(ConfigError, match="exists"):
            write("plain", out)
        assert [file.read_text() for file in out.glob("*.parquet")] == [kept_content]
        assert any("restored the former" in line for line in caplog.messages) == is_told
        with pytest.raises(ConfigError, match="one result, without runs"):
            write("run", out, append=True)
        write("newest", out, overwrite=True)
        assert [file.read_text() for file in out.glob("*.parquet")] == ["newest"]
        assert os.listdir(out.parent) == ["out"]


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
    assert number > 5
    left[0] = 100
    assert kept(out / "latest") == sorted(rows(run(spark, "skew", str(path))), key=str)
