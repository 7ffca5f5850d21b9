"""``librmq spark``, ``report --spark`` and ``doctor``, on the shared session in this process."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from librmq import ManualClock, Message, MessageStore, StoreConfig
from librmq.cli import main

pytest.importorskip("pyspark")

from tests.spark_session import shared_session

START_MS = 1_700_000_000_000


@pytest.fixture
def store(tmp_path: Path) -> Path:
    clock = ManualClock(START_MS)
    with MessageStore.open(tmp_path / "store", StoreConfig.tiny(), clock=clock) as opened:
        for number in range(30):
            clock.advance(ms=1000)
            opened.append(Message("%DLQ%g" if number % 10 == 0 else "T", b"secret body", keys=f"k{number % 7}"), 0)
    config = tmp_path / "store" / "config"
    config.mkdir(exist_ok=True)
    (config / "consumerOffset.json").write_text('{"offsetTable":{"T@g":{0:20}}}')
    return tmp_path / "store"


def rows(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.spark
def test_pipelines_by_name(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shared_session()
    assert main(["spark", "run", "backlog", str(store)]) == 0
    (row,) = rows(capsys)
    assert main(["spark", "run", "backlog", str(store), "--group", "gg", "--topic", "T"]) == 0
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == "note: there is no group 'gg'; did you mean 'g'?\n"
    assert (row["group"], row["topic"], row["lag"], row["oldest"]) == ("g", "T", 7, "2023-11-14T22:13:44.000Z")
    assert row["offset"] == 20
    out = tmp_path / "out"
    words = ["spark", "run", "duplicates", str(store), "--set", "window=7.5", "--out", str(out)]
    assert main(words) == 0
    assert rows(capsys)[0]["rows"] > 0
    assert list(out.glob("*.parquet"))
    assert main(words) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert main([*words, "--overwrite"]) == 0
    assert main([*words, "--append"]) == 2
    assert "holds one result, without runs" in capsys.readouterr().err
    assert main([*words[:-1], str(store), "--overwrite"]) == 2
    assert "holds no whole result of Spark" in capsys.readouterr().err
    for bad, text in (
        (["spark", "run", "backlogs", str(store)], "did you mean backlog"),
        (["spark", "run", "backlog", str(store), "--set", "x=1"], "no setting 'x'"),
        (["spark", "run", "backlog", str(tmp_path)], "no store"),
    ):
        assert main(bad) == 2
        assert text in capsys.readouterr().err


@pytest.mark.spark
def test_runs_are_kept_beside_each_other(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Even runs without rows, of which a partitioned one has no file."""
    out = tmp_path / "out"
    words = ["spark", "run", "backlog", str(store), "--out", str(out), "--append", "--partition-by", "topic"]
    for more, number in (([], 1), (["--group", "other"], 0), ([], 1)):
        assert main([*words, *more]) == 0
        (row,) = rows(capsys)
        assert (row["rows"], Path(row["out"]).parent) == (number, out)
    whole = shared_session().read.parquet(str(out))
    assert {"run", "topic"} < {*whole.columns}
    assert whole.select("run", "topic").distinct().count() == 2


@pytest.mark.spark
def test_a_pipeline_says_what_it_leaves_out(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shared_session()
    words = ["spark", "run", "skew", str(store), "--set", "damaged=skip"]
    assert main(words) == 0
    assert "left out" not in capsys.readouterr().err
    with MessageStore.open(store, read_only=True) as opened:
        places = [message.physical_offset for message in opened][5:7]
    with open(store / "commitlog" / f"{0:020}", "r+b") as log:
        for place in places:
            log.seek(place)
            log.write(b"\xff" * 4)
    for more in ([], ["--out", str(tmp_path / "out")], ["--out", str(tmp_path / "again"), "--incremental"]):
        assert main([*words, *more]) == 0
        said = capsys.readouterr()
        assert f"note: 2 damaged places left out of the result, the first: {store}/commitlog/" in said.err
        assert f"at {places[0]}: " in said.err
        assert not more or json.loads(said.out)["left_out"] == 2
    assert main([*words, *more]) == 0
    said = capsys.readouterr()
    assert "left out" not in said.err
    assert (json.loads(said.out)["left_out"], json.loads(said.out)["messages"]) == (0, 0)


@pytest.mark.spark
def test_a_damaged_queue_counts_as_left_out(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Even if an incremental run has nothing to read."""
    shared_session()
    words = ["spark", "run", "skew", str(store), "--set", "damaged=skip", "--out", str(tmp_path / "out")]
    assert main([*words, "--incremental"]) == 0
    assert json.loads(capsys.readouterr().out)["left_out"] == 0
    (file,) = (store / "consumequeue" / "T" / "0").iterdir()
    os.truncate(file, 30)
    assert main([*words, "--incremental"]) == 0
    said = capsys.readouterr()
    assert (json.loads(said.out)["left_out"], json.loads(said.out)["messages"]) == (1, 0)
    assert f"note: 1 damaged place left out of the result, the first: {file}: " in said.err


@pytest.mark.spark
def test_only_what_a_result_lacks_counts_as_left_out(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Duplicates are looked for among first sends, so a damaged dead letter is not missing."""
    shared_session()
    with MessageStore.open(store, read_only=True) as opened:
        place = next(message.physical_offset for message in opened if message.topic == "%DLQ%g")
    with open(store / "commitlog" / f"{0:020}", "r+b") as log:
        log.seek(place)
        log.write(b"\xff" * 4)
    for pipeline, count in (("duplicates", 0), ("skew", 1)):
        assert main(["spark", "run", pipeline, str(store), "--set", "damaged=skip"]) == 0
        assert capsys.readouterr().err.count("1 damaged place left out") == count


@pytest.mark.spark
def test_every_row_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shared_session()
    with MessageStore.open(tmp_path / "store", StoreConfig.tiny(commitlog_file_size=1 << 20)) as opened:
        for number in range(1203):
            opened.append(Message(f"T{number % 20}", b"x", keys=f"k{number}"))
    assert main(["spark", "run", "skew", str(tmp_path / "store"), "--set", "by=key"]) == 0
    assert len({row["key"] for row in rows(capsys)}) == 1203


@pytest.mark.spark
def test_the_report_is_the_same_with_spark(store: Path, tmp_path: Path) -> None:
    """This includes a damaged store and a part of a store."""
    pytest.importorskip("jinja2")
    from librmq.diagnosis import Report

    shared_session()
    other = tmp_path / "other" / "store"
    shutil.copytree(store, other)
    with MessageStore.open(other, StoreConfig.tiny(), clock=ManualClock(START_MS + 60_000)) as opened:
        for topic in ("BenchmarkTest", "SELF_TEST_TOPIC", "RMQ_SYS_MINE"):
            opened.append_batch([Message(topic, b"x", keys="again")] * 3)  # only those of the last are repeated keys
    with MessageStore.open(other, read_only=True) as opened:
        place = list(opened)[7].physical_offset
    with open(other / "commitlog" / f"{0:020}", "r+b") as log:
        log.seek(place + 89)
        log.write(b"!")

    def made(name: str, *words: str) -> tuple[Report, str]:
        page = tmp_path / f"{name}.html"
        assert main(["report", *words, "--out", str(page)]) == (1 if str(other) in words else 0)  # it is damaged
        return Report.from_json((tmp_path / f"{name}.json").read_text()), page.read_text()

    part = [str(store), "--topic", "T", "--until", str(START_MS + 9500)]
    for words in ([str(other)], part):
        assert made("a", *words, "--spark") == made("b", *words)


def test_list_and_doctor(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["spark", "list"]) == 0
    assert {row["pipeline"] for row in rows(capsys)} >= {"backlog", "reconcile", "retention"}
    main(["doctor"])
    assert {row["check"] for row in rows(capsys)} >= {"python", "spark", "java"}
    from librmq.errors import MissingExtraError

    def absent() -> None:
        raise MissingExtraError("Spark from Python lacks the package pyspark and", "spark")

    monkeypatch.setattr(sys.modules["librmq.spark.sessions"], "require", absent)
    assert main(["doctor"]) == 2
    assert "librmq[spark]" in capsys.readouterr().err
