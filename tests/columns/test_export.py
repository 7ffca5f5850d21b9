"""Messages as Parquet, CSV and JSON lines: their content, and that an export is whole or absent."""

from __future__ import annotations

import base64
import contextlib
import csv
import errno
import json
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from librmq import ManualClock, Message, MessageStore, StoreConfig
from librmq.cli import main
from librmq.errors import ConfigError, CorruptionError, NotAStoreError, StoreIOError
from librmq.runtime.event_log import watched
from tests.programs import run_program

pytest.importorskip("pyarrow")

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from librmq.columns import _exports as exports
from librmq.columns import export, reader
from librmq.columns.record_batches import batches_of

START_MS = 1_700_000_000_000
CONFIG = StoreConfig.tiny()


def fill(folder: Path, numbers: range) -> None:
    """Append messages an hour apart to two topics of two queues; every seventh body is not valid UTF-8."""
    clock = ManualClock(START_MS + 3_600_000 * numbers.start)
    with MessageStore.open(folder, CONFIG, clock=clock) as store:
        for number in numbers:
            clock.advance(ms=3_600_000)
            body = b"\xff%d" % number if number % 7 == 0 else b'"%d", \xe2\x82\xac' % number
            message = Message("AB"[number % 2], body, tags=f"t{number % 3}", properties={"n": str(number)})
            store.append(message, number // 2 % 2)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    fill(tmp_path / "store", range(60))
    return tmp_path / "store"


def rows(out: Path) -> list[dict[str, Any]]:
    """Return the rows of an export in the order of the log."""
    if out.suffix == ".jsonl":
        found = [json.loads(line) for line in out.read_bytes().splitlines()]
    elif out.suffix == ".csv":
        with open(out, newline="") as file:
            found = list(csv.DictReader(file))
    else:
        names = {name for _, _, names in os.walk(out) for name in names if not name.startswith("_")}
        assert all(name.endswith(".parquet") for name in names)
        found = ds.dataset(out, partitioning="hive").to_table().to_pylist()
    return sorted(found, key=lambda row: int(row["physicalOffset"]))


def numbers(out: Path) -> list[int]:
    return [int(str(dict(row["properties"])["n"] if not isinstance(row["properties"], str) else
                    json.loads(row["properties"])["n"])) for row in rows(out)]  # fmt: skip


OUTS = ["out.jsonl", "out.csv", "out"]


@pytest.mark.parametrize("name", OUTS)
def test_an_export_holds_all_messages(store: Path, tmp_path: Path, name: str) -> None:
    made = export(store, tmp_path / name)
    assert (made.path, made.rows, made.files) == (str(tmp_path / name), 60, 1)
    assert numbers(tmp_path / name) == list(range(60))


@pytest.mark.parametrize("name", ["out.jsonl", "out.csv"])
def test_times_that_no_calendar_has(tmp_path: Path, name: str) -> None:
    """A client may send any time of birth; imported, the messages have it again."""
    times = [START_MS, (1 << 63) // 1000 - 1, -(1 << 62) // 1000, 253_402_300_800_000]
    with MessageStore.open(tmp_path / "store", CONFIG) as store:
        for time in times:
            store.append(Message("T", b"x"), born_timestamp_ms=time)
    export(tmp_path / "store", tmp_path / name)
    told = [row["bornTimestamp"] for row in rows(tmp_path / name)]
    assert told == ["2023-11-14T22:13:20.000Z", *map(str, times[1:])]
    assert main(["import", str(tmp_path / "copy"), str(tmp_path / name)]) == 0
    with MessageStore.open(tmp_path / "copy", read_only=True) as store:
        assert [message.born_timestamp_ms for message in store] == times


@pytest.mark.parametrize("name", OUTS)
def test_a_store_with_a_damaged_queue(
    store: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The export fails, or has all messages by the log and a row that tells; a repair makes the queue again."""
    (file,) = (store / "consumequeue" / "A" / "0").iterdir()
    os.truncate(file, 30)
    columns = ["topic", "physicalOffset", "properties", "_corrupt_record"]
    with pytest.raises(CorruptionError, match="found 30"):
        export(store, tmp_path / name, columns=columns)
    assert main(["export", str(store), "-o", str(tmp_path / f"other-{name}")]) == 1
    assert "librmq recover makes the file again" in capsys.readouterr().err
    settings: dict[str, Any] = {"partition_by": ["topic", "date"]} if name == "out" else {}
    told = tmp_path / f"told-{name}"
    assert export(store, told, mode="PERMISSIVE", columns=columns, **settings).rows == 60 + 1
    text = "".join(
        map(str, ds.dataset(told).to_table().to_pylist()) if name == "out" else told.read_text().splitlines()
    )
    assert text.count("found 30") == 1
    main(["recover", str(store)])
    assert export(store, tmp_path / name, columns=["physicalOffset", "properties"]).rows == 60
    assert numbers(tmp_path / name) == list(range(60))


@pytest.mark.parametrize("name", OUTS)
def test_damaged_records_are_reported_or_counted(store: Path, tmp_path: Path, name: str) -> None:
    """Bodies 6, 25 and 26 are damaged, one of a topic's first messages and two neighbours."""
    places = reader(store, columns=["physicalOffset"]).read_all()["physicalOffset"].to_pylist()
    damaged = [6, 25, 26]
    for number in damaged:
        start = places[number] % CONFIG.commitlog_file_size
        with open(store / "commitlog" / f"{places[number] - start:020d}", "r+b") as file:
            file.seek(start + 88)
            file.write(b"!")
    with pytest.raises(CorruptionError, match="checksum"):
        export(store, tmp_path / f"failed-{name}")
    columns = ["physicalOffset", "properties", "body"]
    made = export(store, tmp_path / name, mode="DROPMALFORMED", columns=columns)
    assert (made.rows, made.damaged) == (57, 3)
    assert numbers(tmp_path / name) == [number for number in range(60) if number not in damaged]
    out = tmp_path / f"1-{name}"
    made = export(store, out, mode="PERMISSIVE", columns=[*columns, "_corrupt_record"])
    assert (made.rows, made.damaged) == (60, 3)
    told = [int(row["physicalOffset"]) for row in rows(out) if row["_corrupt_record"]]
    assert told == [places[number] for number in damaged]


@pytest.mark.parametrize("condition", [{"filter": pc.field("tags") == "t1"}, {"grep": "^"}])
def test_a_condition_hides_no_damage(store: Path, tmp_path: Path, condition: dict[str, Any]) -> None:
    """A condition can't be decided for a record that can't be read, so the record is reported or counted."""
    place = reader(store, columns=["physicalOffset"]).read_all()["physicalOffset"][7].as_py()
    start = place % CONFIG.commitlog_file_size
    with open(store / "commitlog" / f"{place - start:020d}", "r+b") as file:
        file.seek(start + 88)
        file.write(b"!")
    (queue,) = (store / "consumequeue" / "A" / "0").iterdir()
    os.truncate(queue, 30)
    settings: dict[str, Any] = {"columns": ["body", "_corrupt_record"], **condition}
    made = export(store, tmp_path / "dropped", mode="DROPMALFORMED", **settings)
    assert made.damaged == 2
    made = export(store, tmp_path / "told", mode="PERMISSIVE", **settings)
    assert made.damaged == 2
    told = ds.dataset(tmp_path / "told").to_table()["_corrupt_record"].drop_null().to_pylist()
    assert sorted(one.partition(": at ")[0] for one in told) == sorted(
        [str(queue), str(store / "commitlog" / f"{place - start:020d}")]
    )


@pytest.mark.parametrize("name", OUTS)
def test_a_writer_appends_during_an_export(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An export holds what was acknowledged before it began, each message once."""
    monkeypatch.setattr(exports, "_STEP_BYTES", 1)
    clock, appended = ManualClock(START_MS), 0
    with MessageStore.open(tmp_path / "store", CONFIG, clock=clock, background=False) as store:

        def append(count: int) -> None:
            nonlocal appended
            for _ in range(count):
                store.append(Message("AB"[appended % 2], bytes(500), properties={"n": str(appended)}), 0)
                appended += 1

        def meanwhile(done: int, total: int | None) -> None:
            if total is not None:
                append(40)

        append(100)
        before = appended
        with watched(meanwhile):
            made = export(store.path, tmp_path / name)
        assert appended > made.rows >= before
        assert numbers(tmp_path / name) == list(range(made.rows))
        assert export(store.path, tmp_path / f"all-{name}").rows == appended


@pytest.mark.parametrize("partition_by", [(), ("topic",)])
def test_an_export_reads_few_batches_ahead(
    store: Path, tmp_path: Path, partition_by: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A source that is always faster than the writer is at most 64 MiB ahead of it, whatever its size."""
    done, ahead = 0, [0]

    def endless(*arguments: Any, **settings: Any) -> pa.RecordBatchReader:
        small = next(batches_of(*arguments, **settings))
        bodies = pa.array([bytes((8 << 20) // len(small))] * len(small), pa.binary())
        large = small.set_column(small.schema.names.index("body"), "body", bodies)

        def batches() -> Iterator[pa.RecordBatch]:
            for number in range(24):
                ahead.append(number + 1 - done)
                yield large

        return pa.RecordBatchReader.from_batches(large.schema, batches())

    def finished(_: int, total: int | None) -> None:
        nonlocal done
        done += total is not None

    monkeypatch.setattr(exports, "batches_of", endless)
    monkeypatch.setattr(exports, "_STEP_BYTES", 1)  # a step for each batch
    with watched(finished):
        export(store, tmp_path / "out", partition_by=partition_by)
    assert done == 24
    assert max(ahead) <= 8 + 2, "those ahead, the one being written, and the next"


def test_bodies_and_times_of_texts(store: Path, tmp_path: Path) -> None:
    export(store, tmp_path / "out.csv", columns=["body", "storeTimestamp", "physicalOffset", "properties"])
    export(store, tmp_path / "out.jsonl", columns=["body", "storeTimestamp", "physicalOffset", "properties"])
    for number, (line, cells) in enumerate(zip(rows(tmp_path / "out.jsonl"), rows(tmp_path / "out.csv"), strict=True)):
        if number % 7:
            assert line["body"] == cells["body"] == f'"{number}", €'
        else:
            assert base64.b64decode(line["body_b64"]) == base64.b64decode(cells["body_b64"]) == b"\xff%d" % number
            assert "body" not in line
        assert line["properties"] == json.loads(cells["properties"]) == {"n": str(number), "TAGS": f"t{number % 3}"}
        assert line["storeTimestamp"] == cells["storeTimestamp"]
    assert rows(tmp_path / "out.jsonl")[0]["storeTimestamp"] == "2023-11-14T23:13:20.000Z"


def test_parquet_in_folders(store: Path, tmp_path: Path) -> None:
    export(store, tmp_path / "out", partition_by=["topic", "date"], columns=["topic", "queueOffset", "physicalOffset"])
    assert sorted(os.listdir(tmp_path / "out" / "topic=A")) == ["date=2023-11-14", "date=2023-11-15",
                                                               "date=2023-11-16", "date=2023-11-17"]  # fmt: skip
    assert [row["topic"] for row in rows(tmp_path / "out")] == ["A", "B"] * 30


def test_rows_in_folders_wait_in_bounded_memory(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of many folders are written in parts, to files of which few are open at a time."""
    monkeypatch.setattr(exports, "_OF_FOLDERS", (1, 1))
    monkeypatch.setattr(exports, "_FOLDERS_OPEN", 2)
    monkeypatch.setattr("librmq.columns._read.BATCH_ROWS", 7)
    export(store, tmp_path / "out", partition_by=["queueId", "topic"])
    folders = [tmp_path / "out" / f"queueId={queue_id}" / f"topic={topic}" for queue_id in (0, 1) for topic in "AB"]
    assert len(list((tmp_path / "out").rglob("*.parquet"))) > len(folders)
    for folder in folders:
        files = sorted(folder.iterdir())
        offsets = [offset for file in files for offset in pq.ParquetFile(file).read()["queueOffset"].to_pylist()]
        assert offsets == list(range(15))
    assert numbers(tmp_path / "out") == list(range(60))


@pytest.mark.slow
def test_rows_of_a_folder_keep_their_order(tmp_path: Path) -> None:
    with MessageStore.open(tmp_path / "store", CONFIG, clock=ManualClock(START_MS)) as store:
        for number in range(2_400):
            store.append(Message(f"T{number % 3}", bytes(900)), number % 12 // 3)
    export(tmp_path / "store", tmp_path / "out", partition_by=["topic", "queueId"])
    for file in (tmp_path / "out").rglob("*.parquet"):
        offsets = pq.read_table(file, columns=["queueOffset"], partitioning=None)["queueOffset"].to_pylist()
        assert offsets == list(range(200))


@pytest.mark.parametrize("name", OUTS)
def test_a_later_export_has_the_rest(store: Path, tmp_path: Path, name: str) -> None:
    """What was stored since goes to a path of its own; the first one stays as it is."""
    until = START_MS + 3_600_000 * 61
    fill(store, range(60, 70))
    assert export(store, tmp_path / f"1-{name}", until=until).rows == 60
    before = rows(tmp_path / f"1-{name}")
    with pytest.raises(ConfigError, match=r"exists; name a path that does not exist .* with since"):
        export(store, tmp_path / f"1-{name}", since=until)
    assert export(store, tmp_path / f"2-{name}", since=until).rows == 10
    assert rows(tmp_path / f"1-{name}") == before
    assert numbers(tmp_path / f"2-{name}") == list(range(60, 70))


KILLED = """
import os, sys
from librmq.columns import _exports as exports
exports._STEP_BYTES = 1
from librmq.columns import export
left = [0]
def dying(call):
    def run(*arguments, **settings):
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), 9)
        return call(*arguments, **settings)
    return run
os.rename = dying(os.rename)
os.fsync = dying(os.fsync)
for left[0] in range(4):
    child = os.fork()
    if not child:
        export(sys.argv[1], sys.argv[2])
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), os.path.exists(sys.argv[2]), flush=True)
"""
"""Runs an export in four processes: the first dies at its first flush or rename, the second at its second, …"""


@pytest.mark.slow
@pytest.mark.parametrize("name", OUTS)
def test_a_killed_export_is_whole_or_absent(store: Path, tmp_path: Path, name: str) -> None:
    fill(store, range(60, 200))
    for line in run_program(KILLED, store, tmp_path / name).stdout.splitlines():
        status, exists = line.split()
        assert int(status) in (-signal.SIGKILL, 0, 1)
        if exists == "True":
            break
    else:
        export(store, tmp_path / name)
    assert numbers(tmp_path / name) == list(range(200))


def test_an_export_refuses_wrong_settings(store: Path, tmp_path: Path) -> None:
    export(store, tmp_path / "out.csv")
    (tmp_path / "mine.csv").write_text("a,b\n")
    with pytest.raises(ConfigError, match="exists; name a path that does not exist"):
        export(store, tmp_path / "mine.csv")
    assert (tmp_path / "mine.csv").read_text() == "a,b\n"
    with pytest.raises(ConfigError, match="partition_by"):
        export(store, tmp_path / "out2", partition_by=["tags"])
    assert export(store, tmp_path / "by_topic", partition_by="topic").files > 1
    with pytest.raises(ConfigError, match="view: an export reads"):
        export(store, tmp_path / "out2", view="log")
    with pytest.raises(ConfigError, match="fail_on_data_loss: an export reads"):
        export(store, tmp_path / "out2", fail_on_data_loss=False)
    with pytest.raises(ConfigError, match="store: expected one store"):
        export([store], tmp_path / "out2")  # type: ignore[arg-type]
    for kind in ("json", "xml", "bz2"):
        with pytest.raises(ConfigError, match=rf"out: \.{kind} is no format"):
            export(store, tmp_path / f"out.{kind}")
    (tmp_path / "orders.old").mkdir()
    for folder in ("orders.old", "orders.2026", "orders.v2"):
        assert export(store, tmp_path / folder).files == len(list((tmp_path / folder).iterdir())) > 0
    assert not (tmp_path / "out2").exists()


@pytest.mark.parametrize("name", OUTS)
def test_a_refused_export_writes_nothing(store: Path, tmp_path: Path, name: str) -> None:
    """Without a store, into the store itself (also through a link), and beside files that are no export."""
    (tmp_path / "link").symlink_to(store)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / name).mkdir()
    (tmp_path / "taken" / name / "file").touch()

    def files() -> list[Path]:
        return sorted(tmp_path.rglob("*")) + sorted(store.rglob("*"))

    before = files()
    for refused, out in (
        (tmp_path, tmp_path / "new" / name),
        (store, store / name),
        (store, store),
        (store, tmp_path / "link" / name),
        (tmp_path / "link", store / name),
        (store, tmp_path / "taken" / name),
    ):
        with pytest.raises((ConfigError, NotAStoreError)):
            export(refused, out)
    assert files() == before


@pytest.mark.parametrize("name", ["out.jsonl", "out.csv"])
def test_texts_keep_every_body(tmp_path: Path, name: str) -> None:
    bodies = [b"", b"a\rb", b"a\nb", b"\r\n", b"\0", b'"', b'a,"b"', b"\xff\r", "\u2028€".encode(), b"'", b" x "]
    with MessageStore.open(tmp_path / "store", CONFIG, clock=ManualClock(START_MS)) as store:
        for body in bodies:
            store.append(Message("T", body, properties={"p": "\r\n,"}), 0)
    export(tmp_path / "store", tmp_path / name)
    found = rows(tmp_path / name)
    assert [
        base64.b64decode(row["body_b64"]) if row.get("body_b64") else (row["body"] or "").encode() for row in found
    ] == bodies
    kept = [
        row["properties"] if isinstance(row["properties"], dict) else json.loads(row["properties"]) for row in found
    ]
    assert {row["p"] for row in kept} == {"\r\n,"}


def test_json_lines_are_those_of_python(tmp_path: Path) -> None:
    texts = ["", 'a"b\\\\', "\0\x1f\x7f", "\b\f\n\r\t", "€\u2028\U0001f600", "\\\\u0041"]
    bodies = [*(text.encode() for text in texts), b"\xff", b'\xed\xa0\x80"']
    with MessageStore.open(tmp_path / "store", CONFIG, clock=ManualClock(START_MS)) as store:
        for number, body in enumerate(bodies):
            text = texts[number % len(texts)]
            store.append(Message("T", body, properties={f"n{text}": text} if text else {}), 0)
    columns = ["topic", "queueId", "body", "properties", "keys", "bornHost", "propertiesString"]
    export(tmp_path / "store", tmp_path / "out.jsonl", columns=columns)
    lines = (tmp_path / "out.jsonl").read_bytes().decode().split("\n")
    found = [json.loads(line) for line in lines[:-1]]
    encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
    assert [encode(row) for row in found] == lines[:-1]
    read = reader(tmp_path / "store", columns=columns).read_all().to_pylist()
    for row, expected in zip(found, read, strict=True):
        body = expected.pop("body")
        assert (base64.b64decode(row.pop("body_b64")) if "body_b64" in row else row.pop("body").encode()) == body
        assert row == expected | {"properties": dict(expected["properties"])}


@contextlib.contextmanager
def largest_file(size: int) -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("name", OUTS)
def test_a_full_disk_leaves_nothing(store: Path, tmp_path: Path, name: str) -> None:
    fill(store, range(60, 1500))
    before = sorted(tmp_path.iterdir())
    with largest_file(8192), pytest.raises(StoreIOError, match=f"{name}: export: ") as failed:
        export(store, tmp_path / name)
    assert failed.value.errno in (errno.EFBIG, errno.ENOSPC)
    assert sorted(tmp_path.iterdir()) == before
    export(store, tmp_path / name)
    assert numbers(tmp_path / name) == list(range(1500))


@pytest.mark.parametrize("name", OUTS)
def test_the_slower_of_two_exports_to_one_place_is_refused(store: Path, tmp_path: Path, name: str) -> None:
    faster: list[int] = []

    def again(done: int, total: int | None) -> None:
        if total is not None and not faster:
            faster.append(0)
            faster[0] = export(store, tmp_path / name).rows

    with watched(again), pytest.raises(ConfigError, match="exists; name a path"):
        export(store, tmp_path / name)
    assert faster == [60]
    assert numbers(tmp_path / name) == list(range(60))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([name, "store"])


def test_a_place_that_cannot_be_written(store: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreIOError, match="file"):
        export(store, tmp_path / "file" / "lake")


@pytest.mark.slow
def test_the_command(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "out"
    assert main(["export", str(store), "--format", "jsonl", "-o", str(out), "--topic", "A", "--tag", "t1"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "type": "export",
        "path": str(out),
        "rows": 10,
        "files": 1,
        "skipped": False,
    }
    assert len(out.read_text().splitlines()) == 10
    assert main(["export", str(store), "-o", str(tmp_path / "lake"), "--partition-by", "topic"]) == 0
    assert numbers(tmp_path / "lake") == list(range(60))
    assert main(["export", str(store), "-o", str(tmp_path / "none"), "--topic", "AA"]) == 0
    assert caplog.messages == [f"topic 'AA' has no queue in {store}; did you mean 'A'?"]
    assert main(["export", str(store), "-o", str(tmp_path / "x"), "--columns", "nothing"]) == 2
    assert "no column 'nothing'" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "lake"), "-o", str(tmp_path / "y")]) == 2


@pytest.mark.parametrize("flush", [False, True])
def test_an_open_store_is_exported(tmp_path: Path, flush: bool) -> None:
    with MessageStore.open(tmp_path / "store", CONFIG, clock=ManualClock(START_MS), background=False) as store:
        for number in range(10):
            store.append(Message("T", b"%d" % number), number % 2)
        if flush:
            store.flush()
        assert export(store.path, tmp_path / "out.jsonl").rows == 10
    assert len(rows(tmp_path / "out.jsonl")) == 10
