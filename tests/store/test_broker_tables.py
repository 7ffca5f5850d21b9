"""The broker's tables: created, changed, written, read back, and damaged."""

from __future__ import annotations

from pathlib import Path

import pytest

from librmq.errors import CorruptionError
from librmq.files._memory import MemoryFiles
from librmq.files.interface import FileStatus
from librmq.java import json as java_json
from librmq.store.format import directory
from librmq.store.format.broker_tables import BrokerTables, group_row

NAMES = ("consumerFilter", "consumerOffset", "delayOffset", "subscriptionGroup", "topics")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "config"


def test_a_groups_other_settings_remain(tmp_path: Path) -> None:
    tables = BrokerTables.open(str(tmp_path))
    tables.groups.set("G", {**group_row("G"), "consumeEnable": False})
    tables.set_group("G", retry_max_times=3)
    assert tables.groups.rows["G"] == {**group_row("G", 3), "consumeEnable": False}


def persisted(folder: Path) -> BrokerTables:
    """Return tables with one row of each kind, written at 7 ms."""
    config = BrokerTables.open(str(folder))
    config.set_topic("T", read_queues=4, write_queues=2, permission=6)
    config.set_group("G", retry_max_times=3)
    config.set_consumer_offset("T", "G", 2, 7)
    config.set_delay_offset(18, 5)
    config.persist(7)
    return config


def read(folder: Path, name: str) -> str:
    return (folder / f"{name}.json").read_text()


def test_empty_tables_are_files_too(folder: Path) -> None:
    BrokerTables.open(str(folder)).persist(1)
    assert sorted(path.name for path in folder.iterdir()) == [f"{name}.json" for name in NAMES]
    assert read(folder, "delayOffset") == '{\n\t"offsetTable":{}\n}'
    assert '"counter":0' in read(folder, "topics")


def test_opening_changes_nothing(folder: Path) -> None:
    BrokerTables.open(str(folder))
    assert not folder.exists()


def test_rows_are_written_as_the_broker_does(folder: Path) -> None:
    persisted(folder)
    assert java_json.loads(read(folder, "topics")) == {
        "dataVersion": {"counter": 1, "timestamp": 7},
        "topicConfigTable": {
            "T": {
                "order": False, "perm": 6, "readQueueNums": 4, "topicFilterType": "SINGLE_TAG",
                "topicName": "T", "topicSysFlag": 0, "writeQueueNums": 2,
            }
        },
    }  # fmt: skip
    assert java_json.loads(read(folder, "subscriptionGroup"))["subscriptionGroupTable"]["G"]["retryMaxTimes"] == 3
    assert read(folder, "consumerOffset") == '{\n\t"offsetTable":{\n\t\t"T@G":{2:7\n\t\t}\n\t}\n}'
    assert read(folder, "delayOffset") == '{\n\t"offsetTable":{18:5\n\t}\n}'


def test_offsets_are_read_back(folder: Path) -> None:
    persisted(folder)
    config = BrokerTables.open(str(folder))
    assert (config.consumer_offset("T", "G", 2), config.consumer_offset("T", "G", 0)) == (7, None)
    assert config.consumer_offset("G", "T", 2) is None
    assert (config.delay_offset(18), config.delay_offset(1)) == (5, 0)
    config.set_consumer_offset("T", "G", 0, 1)
    assert (config.consumer_offset("T", "G", 2), config.consumer_offset("T", "G", 0)) == (7, 1)


def test_offsets_by_text_are_read_as_numbers(folder: Path) -> None:
    folder.mkdir()
    (folder / "consumerOffset.json").write_text('{"offsetTable":{"T@G":{"2":7}}}')
    assert BrokerTables.open(str(folder)).consumer_offset("T", "G", 2) == 7


def test_filters_are_replaced_as_a_whole(folder: Path) -> None:
    config = BrokerTables.open(str(folder))
    config.set_filters({"A": {"topic": "A"}})
    config.set_filters({"B": {"topic": "B"}})
    config.persist(1)
    assert BrokerTables.open(str(folder)).filters == {"B": {"topic": "B"}}


def test_only_changes_are_written_and_counted(folder: Path) -> None:
    config = persisted(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    config.persist(8)
    BrokerTables.open(str(folder)).persist(9)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    config.set_topic("U", read_queues=1, write_queues=1, permission=6)
    config.set_topic("T", read_queues=1, write_queues=1, permission=4)
    config.persist(10)
    assert java_json.loads(read(folder, "topics"))["dataVersion"] == {"counter": 3, "timestamp": 10}
    assert (folder / "topics.json.bak").read_bytes() == before["topics.json"]
    assert sorted(path.name for path in folder.iterdir()) == sorted([*before, "topics.json.bak"])


def test_unknown_values_are_kept(folder: Path) -> None:
    text = '{\n\t"dataVersion":{\n\t\t"counter":1,\n\t\t"stateVersion":5,\n\t\t"timestamp":2\n\t},\n\t"new":[1,2],\n\t"topicConfigTable":{\n\t\t"T":{\n\t\t\t"attributes":{}\n\t\t}\n\t}\n}'  # fmt: skip  # noqa: E501
    folder.mkdir()
    (folder / "topics.json").write_text(text)
    config = BrokerTables.open(str(folder))
    config.persist(9)
    assert read(folder, "topics") == text
    config.set_topic("U", read_queues=1, write_queues=1, permission=6)
    config.persist(9)
    document = java_json.loads(read(folder, "topics"))
    assert document["new"] == [1, 2]
    assert document["topicConfigTable"]["T"] == {"attributes": {}}
    assert document["dataVersion"] == {"counter": 2, "stateVersion": 5, "timestamp": 9}


DAMAGED = ["{", "[]", '{"offsetTable":[]}', '{"offsetTable":{"T@G":5}}', '{"offsetTable":{"T@G":{"x":1}}}',
           '{"offsetTable":{"T@G":{1:"x"}}}', '{"offsetTable":{"T@G":{1:true}}}',
           '{"offsetTable\x7f":{"T@G":{2:7}}}', '{"dataVersion":{}}']  # fmt: skip


@pytest.mark.parametrize("text", ["", *DAMAGED])
def test_the_backup_stands_in_for_a_damaged_file(folder: Path, text: str) -> None:
    config = persisted(folder)
    config.set_consumer_offset("T", "G", 2, 8)
    config.persist(8)
    backup = (folder / "consumerOffset.json.bak").read_bytes()
    (folder / "consumerOffset.json").write_text(text)
    again = BrokerTables.open(str(folder))
    assert again.consumer_offset("T", "G", 2) == 7
    again.persist(9)
    assert read(folder, "consumerOffset").encode() == backup
    assert (folder / "consumerOffset.json.bak").read_bytes() == backup  # not replaced by the damaged content


@pytest.mark.parametrize("text", DAMAGED)
def test_a_damaged_file_without_backup_is_reported(folder: Path, text: str) -> None:
    folder.mkdir()
    (folder / "consumerOffset.json").write_text(text)
    with pytest.raises(CorruptionError) as told:
        BrokerTables.open(str(folder))
    assert told.value.file == str(folder / "consumerOffset.json")
    assert told.value.kind == "config"


@pytest.mark.parametrize("text", ['{"topicConfigTable":{"T":1}}', '{"dataVersion":{"counter":"x"}}'])
def test_rows_of_a_wrong_kind(folder: Path, text: str) -> None:
    folder.mkdir()
    (folder / "topics.json").write_text(text)
    with pytest.raises(CorruptionError):
        BrokerTables.open(str(folder))


def test_nulls_count_as_absent(folder: Path) -> None:
    folder.mkdir()
    (folder / "topics.json").write_text('{"dataVersion":null,"topicConfigTable":null}')
    config = BrokerTables.open(str(folder))
    config.set_topic("T", read_queues=1, write_queues=1, permission=6)
    config.persist(3)
    assert java_json.loads(read(folder, "topics"))["dataVersion"] == {"counter": 1, "timestamp": 3}


def test_in_memory() -> None:
    files = MemoryFiles()
    config = BrokerTables.open("/store/config", files=files)
    config.set_delay_offset(1, 2)
    config.persist(1)
    assert BrokerTables.open("/store/config", files=files).delay_offset(1) == 2


def test_equal_rows_are_written_each_as_it_is() -> None:
    files = MemoryFiles()
    tables = BrokerTables.open("/config", files=files)
    for number, order in enumerate([True, 1, 1.0, [True], None]):
        tables.topics.set(f"T{number}", {"order": order})
    tables.persist(0)
    again = BrokerTables.open("/config", files=files)
    assert repr([row["order"] for row in again.topics.rows.values()]) == "[True, 1, 1.0, [True], None]"
    tables.topics.set("T0", {"order": False})
    tables.persist(0)
    assert BrokerTables.open("/config", files=files).topics.rows["T0"] == {"order": False}


class Replacing(MemoryFiles):
    """The files of a broker that replaces a table after each look at it: the file is gone, and its backup is there."""

    def status(self, path: str) -> FileStatus | None:
        status = super().status(path)
        if status is not None and status.size and path.endswith(".json"):
            self.write(path + ".bak", self.read(path))
            self.delete(path)
        return status


def test_a_table_that_a_broker_replaces_is_read_from_its_backup() -> None:
    files = Replacing()
    for folder in ("config", "timerwheel", "commitlog"):
        files.make_folder(f"/s/{folder}")
    topics = b'{"topicConfigTable":{"T":{"topicName":"T"}}}'
    files.write("/s/config/topics.json", topics)
    files.write("/s/config/consumerOffset.json", b'{"offsetTable":{"T@g":{0:7}}}')
    tables = BrokerTables.open("/s/config", files=files)
    assert (list(tables.topics.rows), tables.offsets.rows) == (["T"], {"T@g": {0: 7}})
    for look in (directory.recognise, directory.known_topics, directory.broker_names):
        files.write("/s/config/topics.json", topics)
        look("/s", files)


def test_keys_that_name_no_topic_and_group_are_kept_and_no_groups(folder: Path) -> None:
    config = persisted(folder)
    keys = ["x", "", "@", "a@", "@b", "a@b@c", "5"]
    for key in keys:
        config.offsets.set(key, {0: 3})
    config.persist(8)
    tables = BrokerTables.open(str(folder))
    assert tables.progress() == {("G", "T"): {2: 7}}
    assert tables.offsets.unnamed() == keys
    tables.set_consumer_offset("T", "G", 2, 8)
    tables.persist(9)
    rows = BrokerTables.open(str(folder)).offsets.rows
    assert [(key, rows[key]) for key in keys] == [(key, {0: 3}) for key in keys]


def test_a_row_that_no_file_can_hold_is_named_and_the_rest_is_saved(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tables = persisted(folder)
    tables.set_topic("bad\ud800", read_queues=4, write_queues=2, permission=6)
    tables.groups.set("H", {**group_row("H"), "attributes": {"a": object()}})
    tables.offsets.set("T@bad\udfff", {0: 3})
    tables.set_consumer_offset("T", "G", 2, 9)
    for now_ms in (8, 9):
        tables.persist(now_ms)
    saved = BrokerTables.open(str(folder))
    assert (list(saved.topics.rows), list(saved.groups.rows)) == (["T"], ["G"])
    assert saved.progress() == {("G", "T"): {2: 9}}
    assert [record.rmq_key for record in caplog.records] == ["'bad\\ud800'", "'H'", "'T@bad\\udfff'"]  # type: ignore[attr-defined]
