"""A broker opens folders of real brokers, and stores what real clients sent as the real brokers did."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from librmq.broker import Broker, BrokerConfig
from librmq.config import StoreConfig
from librmq.errors import MessageIllegalError
from librmq.files._memory import MemoryFiles
from librmq.java import json as java_json
from librmq.message import record
from librmq.message.message import Message, StoredMessage
from librmq.message.properties import decode_properties
from librmq.message.topics import NOT_FOR_SENDING, SystemTopic
from librmq.protocol import SendBack, SendBatch, SendMessage
from librmq.runtime import ManualRunner
from librmq.store import MessageStore
from librmq.store.recovery._verify import verify
from tests.budget import many
from tests.conftest import StoreCopy
from tests.reference import Row, folders, jsonl, rows, store_folders

CLIENT_FOLDERS = folders("clients-")


def read_config(folder: Path) -> dict[str, Any]:
    return {path.name: java_json.loads(path.read_bytes()) for path in (folder / "config").glob("*.json")}


@many
@pytest.mark.parametrize("folder", [*CLIENT_FOLDERS, *store_folders()])
def test_a_real_brokers_folder_is_opened_and_kept(folder: Path, store_copy: StoreCopy) -> None:
    copy = store_copy(folder)
    before = read_config(copy)
    runner = ManualRunner()
    is_run = folder.name.startswith("clients-")
    config = None if is_run else StoreConfig.from_row(rows(folder, "config")[0])
    if (folder / "mutation.json").exists():
        MessageStore.open(copy, config, thorough=True).close()
    with Broker.open(copy, runner=runner, config=BrokerConfig(), store_config=config) as broker:
        assert broker.topics().keys() >= before["topics.json"]["topicConfigTable"].keys()
        for name, row in before["topics.json"]["topicConfigTable"].items():
            data = broker.topics()[name]
            assert (data.read_queues, data.write_queues, data.permission) == (
                row["readQueueNums"],
                row["writeQueueNums"],
                row["perm"],
            )
        for name, offsets in before.get("consumerOffset.json", {"offsetTable": {}})["offsetTable"].items():
            topic, group = name.split("@")
            for queue_id in offsets:  # when the data were made, one offset was set beyond the end of its queue
                offsets[queue_id] = min(offsets[queue_id], broker.store.queue_range(topic, queue_id)[1])
            assert broker.consumer_offsets(group, topic) == offsets
    after = read_config(copy)
    for name in ("consumerOffset.json", "delayOffset.json"):
        if name in before:
            assert after[name] == before[name]
    for name, table in (("topics.json", "topicConfigTable"), ("subscriptionGroup.json", "subscriptionGroupTable")):
        assert after[name][table].items() >= before.get(name, {table: {}})[table].items()
    if "consumerFilter.json" in before:
        assert after["consumerFilter.json"].keys() == before["consumerFilter.json"].keys()
        expected = before["consumerFilter.json"]["filterDataByTopic"]
        assert after["consumerFilter.json"]["filterDataByTopic"].keys() <= expected.keys()


@many
@pytest.mark.parametrize("folder", CLIENT_FOLDERS)
def test_a_real_brokers_folder_is_sound(folder: Path, store_copy: StoreCopy) -> None:
    """Its settings are not known: some of these brokers had other delay levels."""
    assert verify(str(store_copy(folder))).damage == ()


def delay_levels(folder: Path) -> str:
    for line in (folder / "scenario.md").read_text().splitlines():
        if line.strip().startswith("messageDelayLevel="):
            return line.strip().partition("=")[2]
    return StoreConfig().message_delay_level


def born(row: Row) -> tuple[int, tuple[str, int]]:
    host, port = row["bornHost"].rsplit(":", 1)
    return row["bornTimestamp"], (host, int(port))


def message_of(row: Row, topic: str, *without: str) -> Message:
    """Return the message that the client sent: the record without the properties that a broker adds."""
    message = Message(topic, row["body"].encode(), flag=row["flag"])
    message.properties = decode_properties(row["properties_raw"])
    for name in ("CLUSTER", *without):
        message.properties.pop(name, None)
    if row["topic"] != SystemTopic.SCHEDULE:  # in this topic it is stored as it was sent
        message.properties.setdefault("WAIT", "true")
    return message


def send(broker: Broker, row: Row, topic: str, queue_id: int, *without: str, **fields: Any) -> None:
    broker.call(SendMessage("g", message_of(row, topic, *without), queue_id, *born(row), **fields))


def send_back(broker: Broker, row: Row, rows: Sequence[Row]) -> str | None:
    """Let a consumer fail on the message of ``row``; return the id of its first record, or None if that is unknown."""
    properties = row["properties"]
    times, origin = row["reconsumeTimes"], properties["ORIGIN_MESSAGE_ID"]
    source = next(
        one
        for one in rows
        if one["kind"] == "message"
        and one["reconsumeTimes"] == times - 1
        and one["topic"] != SystemTopic.SCHEDULE
        and origin in (one["offsetMsgId"], one["properties"].get("ORIGIN_MESSAGE_ID"))
    )
    stored = broker.store.append(
        Message(source["topic"], source["body"].encode(), flag=source["flag"]),
        source["queueId"],
        properties_raw=source["properties_raw"].encode(),
        born_timestamp_ms=born(source)[0],
        born_host=born(source)[1],
        sys_flag=source["sysFlag"] & ~record.COMPRESSED,
        reconsume_times=source["reconsumeTimes"],
    )
    topic = properties["REAL_TOPIC"] if row["topic"] == SystemTopic.SCHEDULE else row["topic"]
    if topic.startswith("%DLQ%"):
        broker.call(SendBack(topic.removeprefix("%DLQ%"), stored.physical_offset, -1))
    else:
        broker.call(SendBack(topic.removeprefix("%RETRY%"), stored.physical_offset, int(properties["DELAY"])))
    return None if "ORIGIN_MESSAGE_ID" in source["properties"] else stored.offset_id


@many
@pytest.mark.parametrize("folder", CLIENT_FOLDERS)
def test_messages_of_real_clients_are_stored_alike(folder: Path) -> None:
    rows = jsonl(folder / "messages.jsonl")
    runner = ManualRunner()
    config = StoreConfig(message_delay_level=delay_levels(folder))
    compared = 0
    with Broker.open("/broker", runner=runner, files=MemoryFiles(), store_config=config) as broker:
        for row in rows:
            if row["kind"] != "message" or "bodyCutFrom" in row or row["sysFlag"] & record.TRANSACTION_MASK:
                continue
            topic, properties, raw = row["topic"], row["properties"], row["properties_raw"]
            is_copy = "REAL_TOPIC" in properties and topic not in (SystemTopic.SCHEDULE, SystemTopic.HALF)
            if "CLUSTER" not in properties or is_copy or "TRANSACTION_CHECK_TIMES" in properties:
                continue  # scheduled writes of the broker
            sent_to = properties.get("REAL_TOPIC", topic)
            if sent_to not in broker.topics() and not sent_to.startswith("%"):
                broker.create_topic(sent_to, 64)
            if sent_to in NOT_FOR_SENDING:
                with pytest.raises(MessageIllegalError):
                    send(broker, row, sent_to, row["queueId"])
                continue
            end, first_id = broker.store.log.end, None
            if "RECONSUME_TIME" in properties:
                group = sent_to.removeprefix("%DLQ%")
                times, most = int(properties["RECONSUME_TIME"]), int(properties["MAX_RECONSUME_TIMES"])
                fields = {"reconsume_times": times, "max_reconsume_times": most}
                send(broker, row, f"%RETRY%{group}", 0, "REAL_TOPIC", "REAL_QID", **fields)
            elif "ORIGIN_MESSAGE_ID" in properties:
                first_id = send_back(broker, row, rows)
                end += row_size(broker, end)
            elif raw.count("WAIT\1") == 2:
                message = message_of(row, topic)
                message.properties = decode_properties(raw[: raw.rindex("\2CLUSTER")])
                broker.call(SendBatch("g", (message,), row["queueId"], *born(row)))
            else:
                queue_id = int(properties.get("REAL_QID", row["queueId"]))
                send(broker, row, sent_to, queue_id, "REAL_TOPIC", "REAL_QID")
            stored = broker.store.message_at(end)
            assert stored is not None
            found = stored.properties_raw.decode()
            if first_id is not None:
                found = found.replace(first_id, properties["ORIGIN_MESSAGE_ID"])
            assert found == raw
            assert (stored.topic, stored.queue_id, stored.flag) == (topic, row["queueId"], row["flag"])
            assert stored.reconsume_times == row["reconsumeTimes"]
            assert (stored.born_timestamp_ms, stored.born_host) == born(row)
            compared += 1
            if topic == SystemTopic.SCHEDULE:
                check_delivery(broker, runner, stored)
    assert compared


def row_size(broker: Broker, physical_offset: int) -> int:
    message = broker.store.message_at(physical_offset)
    assert message is not None
    return message.size


def check_delivery(broker: Broker, runner: ManualRunner, waiting: StoredMessage) -> None:
    """Check that a delayed message is delivered on time and unchanged."""
    end = broker.store.log.end
    runner.advance(3_600_000)
    delivered = broker.store.message_at(end)
    assert delivered is not None
    assert delivered.topic == waiting.properties["REAL_TOPIC"]
    assert delivered.properties_raw == waiting.properties_raw
    due_ms = broker.store.levels.deliver_timestamp_ms(waiting.queue_id + 1, waiting.store_timestamp_ms)
    assert due_ms <= delivered.store_timestamp_ms < due_ms + 100


@many
@pytest.mark.parametrize("folder", CLIENT_FOLDERS)
def test_a_new_broker_has_the_tables_of_a_real_one(folder: Path) -> None:
    real = read_config(folder / "store")
    files = MemoryFiles()
    Broker.open("/broker", runner=ManualRunner(), files=files, store_config=StoreConfig.tiny()).close()
    for name, table in (("topics.json", "topicConfigTable"), ("subscriptionGroup.json", "subscriptionGroupTable")):
        text = files.read(f"/broker/config/{name}")
        made = java_json.loads(text)[table]
        assert made.items() <= real[name][table].items()
        assert text.decode() == java_json.dumps(java_json.loads(text))
