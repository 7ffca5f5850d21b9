"""The recorded stores through the data source return the rows that RocketMQ reported."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from librmq.message.batch import BatchItem
from librmq.message.record import Record
from tests.golden.recorded import expected, of_record
from tests.reference import existing, rows, store_folders
from tests.stores_of_5 import KINDS, add_database, batch_record, keep_queues_elsewhere, write_log

pytestmark = pytest.mark.spark
pytest.importorskip("pyspark")

from tests.spark_session import shared_session  # noqa: E402

RECORD = (
    "topic string, queueId int, queueOffset bigint, physicalOffset bigint, size int, bornTimestamp timestamp, "
    "storeTimestamp timestamp, tags string, keys string, uniqueKey string, properties map<string,string>, body binary, "
    "storedBody binary, propertiesString string, reconsumeTimes int, sysFlag int, flag int, bornHost string, "
    "storeHost string, preparedTransactionOffset bigint, bodyCrc bigint"
)


def read(store: Path, **options: str) -> Any:
    return shared_session().read.format("rocketmq").options(**options)


@pytest.mark.parametrize("folder", store_folders())
def test_the_log_is_the_recorded_one(folder: Path) -> None:
    frame = read(folder, view="log", minPartitions="3").schema(RECORD).load(str(folder / "store"))
    found = sorted(map(of_record, frame.collect()), key=lambda row: row["phys"])
    wanted = rows(folder, "message")
    assert [row["phys"] for row in found] == [row["phys"] for row in wanted]
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours == expected(theirs, ours)


@pytest.mark.parametrize("folder", store_folders())
def test_the_queues_are_the_recorded_ones(folder: Path) -> None:
    frame = read(folder, view="queues", minPartitions="3").load(str(folder / "store"))
    found = sorted(frame.collect(), key=lambda row: (row["topic"], row["queueId"], row["queueOffset"]))
    wanted = sorted(rows(folder, "cq"), key=lambda row: (row["topic"], row["queue_id"], row["offset"]))
    assert [tuple(row) for row in found] == [
        (row["topic"], row["queue_id"], row["offset"], row["phys"], row["size"], row["tags_code"]) for row in wanted
    ]


@pytest.mark.parametrize("folder", store_folders())
def test_messages_are_those_that_queue_entries_point_to(folder: Path) -> None:
    frame = read(folder, topicPattern=".*", minPartitions="3").schema(RECORD).load(str(folder / "store"))
    found = {(row["topic"], row["queue_id"], row["queue_offset"]): row for row in map(of_record, frame.collect())}
    by_place = {row["phys"]: row for row in rows(folder, "message")}
    wanted = rows(folder, "cq")
    assert len(found) == len(wanted)
    for entry in wanted:
        ours = found[entry["topic"], entry["queue_id"], entry["offset"]]
        assert ours == expected(by_place[entry["phys"]], ours)


@pytest.mark.parametrize("kind", KINDS)
def test_queues_of_5_are_read_like_files(tmp_path: Path, kind: str) -> None:
    def rows_of(view: str) -> list[Any]:
        columns = "topic string, queueId int, queueOffset bigint, physicalOffset bigint"
        frame = read(tmp_path, topicPattern=".*", view=view, minPartitions="3").schema(columns).load(str(store))
        return sorted(map(tuple, frame.collect()))

    store = tmp_path / "store"
    shutil.copytree(existing("store-basic", "store"), store)
    expected_rows = [rows_of(view) for view in ("messages", "log", "queues")]
    keep_queues_elsewhere(store, kind)
    assert [rows_of(view) for view in ("messages", "log", "queues")] == expected_rows


def test_batches_of_5_are_read_as_their_messages(tmp_path: Path) -> None:
    messages = [BatchItem(b"%d" % number) for number in range(5)]
    write_log(tmp_path, [batch_record(Record(topic="T"), messages), Record(topic="T", queue_offset=5, body=b"5")])
    add_database(tmp_path / "consumequeue")
    for view in ("messages", "log"):
        frame = read(tmp_path, view=view).load(str(tmp_path))
        assert frame.count() == 6
        assert sorted(bytes(row.body) for row in frame.select("body").collect()) == [b"%d" % at for at in range(6)]
