"""Make databases of RocksDB as brokers of 5.x write them, by the extra ``rocksdb``.

The forms are those of the sources of 5.3.3 (``RocksDBConsumerOffsetManager``, ``ConsumerOffsetManagerV2``,
``TopicConfigManagerV2``, ``SubscriptionGroupManagerV2``, ``RocksDBConsumeQueueTable``, ``PopConsumerRecord``), and for
``metadata`` of 5.4.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

FORMS = ("separate", "metadata", "rdb")
"""Ways in which 5.x keeps its tables in RocksDB."""

Tables = Mapping[str, Mapping[str, Any]]
"""Rows of ``topics``, ``groups`` and ``offsets``."""
_FAMILIES = {"topics": "topic", "groups": "subscriptionGroup", "offsets": "consumerOffset"}
_FOLDERS = {"topics": "topics", "groups": "subscriptionGroups", "offsets": "consumerOffsets"}
_TABLE_IDS = {"offsets": 1, "topics": 3, "groups": 4}


def write_database(folder: Path, families: Mapping[str, Mapping[bytes, bytes]], *, flushed: bool = True) -> None:
    """Write a database with these column families; unless ``flushed``, its rows are only in its own log."""
    rocksdict = pytest.importorskip("rocksdict")
    options = rocksdict.Options(raw_mode=True)
    options.create_if_missing(True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    database = rocksdict.Rdict(str(folder), options)
    for name, rows in families.items():
        family = (
            database if name == "default" else database.create_column_family(name, rocksdict.Options(raw_mode=True))
        )
        for key, value in rows.items():
            family[key] = value
        if flushed:
            family.flush()
    database.close()
    (folder / "rocksdict-config.json").unlink()


def write_tables(
    config: Path, form: str, tables: Tables, *, counter: int = 7, timestamp_ms: int = 1_700_000_000_000
) -> None:
    """Write the tables of a broker in one of `FORMS`."""
    version = {b"kvDataVersionKey": _json({"counter": counter, "stateVersion": 0, "timestamp": timestamp_ms})}
    if form == "rdb":
        rows = {}
        for name, table_id in _TABLE_IDS.items():
            rows[struct.pack(">BHB", 1, table_id, 1) + b"data_version"] = struct.pack(">qqq", 0, timestamp_ms, counter)
            for key, row in tables[name].items():
                rows |= _rows_of_v2(table_id, key, row)
        write_database(config / "rdb", {"default": rows})
        return
    contents = {
        name: {key.encode(): _json({"offsetTable": row} if name == "offsets" else row) for key, row in rows.items()}
        for name, rows in tables.items()
    }
    if form == "metadata":
        families: dict[str, Mapping[bytes, bytes]] = {"default": {}}
        for name, family in _FAMILIES.items():
            families |= {family: contents[name], f"{family}Version": version}
        write_database(config / "metadata", families)
        return
    for name, folder in _FOLDERS.items():
        write_database(config / folder, {"default": contents[name], "kvDataVersion": version, "forbidden": {}})


def _rows_of_v2(table_id: int, key: str, row: Mapping[Any, Any]) -> dict[bytes, bytes]:
    prefix = struct.pack(">BHB", 1, table_id, 2)
    if table_id != 1:
        return {prefix + _sized(key): b"\1" + _json(row)}
    topic, _, group = key.rpartition("@")
    start = prefix + _sized(group) + b"\1" + _sized(topic) + b"\1"
    return {start + struct.pack(">i", int(queue_id)): struct.pack(">q", at) for queue_id, at in row.items()}


def _sized(text: str) -> bytes:
    return struct.pack(">H", len(text.encode())) + text.encode()


def _json(value: object) -> bytes:
    return json.dumps(value).encode()


def write_queues(folder: Path, entries: Iterable[tuple[str, int, int, int, int, int, int]]) -> None:
    """Write entries of queues: topic, queue id, queue offset, physical offset, size, tags code, store time."""
    rows = {
        struct.pack(">I", len(topic.encode())) + b"\1" + topic.encode() + struct.pack(">BIBq", 1, queue_id, 1, at):
        struct.pack(">qiqq", *value)
        for topic, queue_id, at, *value in entries
    }  # fmt: skip
    write_database(folder, {"default": rows, "offset": {}})


def pop_row(
    group: str, topic: str, queue_id: int, queue_offset: int, received_ms: int, invisible_ms: int
) -> tuple[bytes, bytes]:
    """Return key and value of POP's record of a message in flight."""
    key = struct.pack(">q", received_ms + invisible_ms) + f"{group}@{topic}@".encode()
    value = {"popTime": received_ms, "groupId": group, "topicId": topic, "queueId": queue_id, "retryFlag": 0,
             "invisibleTime": invisible_ms, "offset": queue_offset, "attemptTimes": 0}  # fmt: skip
    return key + struct.pack(">i", queue_id) + b"@" + struct.pack(">q", queue_offset), _json(value)
