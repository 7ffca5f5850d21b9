"""Snapshots of stores of RocketMQ 5: what librmq only reads is copied as it is, so that its broker can continue it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from librmq import Message, StoreConfig
from librmq.diagnosis._pop import pop_holds
from librmq.store import MessageStore, restore, snapshot, verify
from librmq.store.format.broker_tables import BrokerTables
from tests.budget import many
from tests.reference import existing, unpack
from tests.rocksdb_stores import FORMS, pop_row, write_database, write_queues, write_tables
from tests.stores_of_5 import KINDS, keep_queues_elsewhere, state_of


def filled(path: Path) -> list[tuple[str, int, int, int, int, int, int]]:
    """Make a store of several log files, and return its entries."""
    with MessageStore.open(path, StoreConfig.tiny()) as store:
        for number in range(300):
            store.append(Message("orders", b"body", keys=f"k{number}"))
        return [
            (message.topic, message.queue_id, message.queue_offset, message.physical_offset, message.size, 0, 1)
            for message in store
        ]


def raws(path: Path) -> list[bytes]:
    with MessageStore.open(path, read_only=True) as store:
        return [message.raw for message in store]


@pytest.mark.parametrize("kind", KINDS)
def test_a_store_whose_queues_librmq_derives(tmp_path: Path, kind: str) -> None:
    path, target = tmp_path / "store", tmp_path / "copy"
    filled(path)
    keep_queues_elsewhere(path, kind)
    before = state_of(path)
    made = snapshot(str(path), str(target))
    assert state_of(path).keys() == before.keys()
    assert {name: state[1] for name, state in state_of(path).items()} == {
        name: state[1] for name, state in before.items()
    }
    assert raws(target) == raws(path)
    assert made.end > 0
    assert verify(target).sound
    assert {file.name for file in (target / "consumequeue").rglob("MANIFEST-*")} == {
        file.name for file in (path / "consumequeue").rglob("MANIFEST-*")
    }
    restore(str(target), str(tmp_path / "again"))
    assert raws(tmp_path / "again") == raws(path)


def test_queues_of_batches(tmp_path: Path) -> None:
    path, target = tmp_path / "store", tmp_path / "copy"
    filled(path)
    queue = path / "batchconsumequeue" / "batches" / "0"
    queue.mkdir(parents=True)
    (queue / ("0" * 20)).write_bytes(bytes(range(46)))
    snapshot(str(path), str(target))
    assert raws(target) == raws(path)
    assert (target / queue.relative_to(path) / ("0" * 20)).read_bytes() == bytes(range(46))
    assert verify(target).sound


def test_a_compacted_topic(tmp_path: Path) -> None:
    path, target = tmp_path / "store", tmp_path / "copy"
    filled(path)
    log = path / "compaction" / "compactionLog" / "orders" / "0" / ("0" * 20)
    log.parent.mkdir(parents=True)
    log.write_bytes(b"compacted")
    (path / "config").mkdir(exist_ok=True)
    row = {"topicName": "orders", "perm": 6, "attributes": {"cleanup.policy": "COMPACTION"}}
    (path / "config" / "topics.json").write_text(json.dumps({"topicConfigTable": {"orders": row}}))
    snapshot(str(path), str(target))
    assert raws(target) == raws(path)
    assert (target / log.relative_to(path)).read_bytes() == b"compacted"
    assert any("orders is compacted" in note for note in verify(target).notes)


@many
@pytest.mark.parametrize("form", FORMS)
def test_databases_are_copied_as_a_whole(tmp_path: Path, form: str) -> None:
    path, target = tmp_path / "store", tmp_path / "copy"
    entries = filled(path)
    shutil.rmtree(path / "consumequeue")
    write_queues(path / "consumequeue_rocksdb", entries)
    tables: dict[str, dict[str, Any]] = {
        "topics": {"orders": {"topicName": "orders", "perm": 6}},
        "groups": {},
        "offsets": {"orders@g": {"0": 9}},
    }
    write_tables(path / "config", form, tables)
    write_database(path / "kvStore", {"default": {}, "popState": dict([pop_row("g", "orders", 0, 8, 1, 60_000)])})
    before = state_of(path)
    snapshot(str(path), str(target))
    assert {name: state[1] for name, state in state_of(path).items()} == {
        name: state[1] for name, state in before.items()
    }
    copied = BrokerTables.open(str(target / "config"))
    assert (copied.consumer_offset("orders", "g", 0), set(copied.topics.rows)) == (9, {"orders"})
    assert len(pop_holds(target).held) == 1
    assert not list(target.rglob("LOCK")), "the lock of a running broker"
    verdict = verify(target)
    assert verdict.sound
    assert "queues in RocksDB: 300 entries compared with the log" in verdict.notes


@pytest.mark.slow
@pytest.mark.parametrize("archive", ["st-fq.tar.xz", "tx3.tar.xz"])
def test_stores_that_a_broker_of_5_wrote(tmp_path: Path, archive: str) -> None:
    unpack(existing("store-5.3.3", archive), tmp_path)
    (path,) = {log.parent for log in tmp_path.rglob("commitlog")}
    (path / "timerwheel.104").write_bytes(bytes(64))
    snapshot(str(path), str(tmp_path / "copy"))
    assert (tmp_path / "copy" / "timerwheel.104").read_bytes() == bytes(64)
    assert raws(tmp_path / "copy") == raws(path)
    assert verify(tmp_path / "copy").sound == verify(path).sound
