"""Queues and POP's records that a broker of 5.x keeps in RocksDB."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from librmq import Message, StoreConfig
from librmq.diagnosis import diagnose
from librmq.diagnosis._pop import pop_holds
from librmq.diagnosis.pending import pending_messages
from librmq.store import MessageStore, verify
from tests.rocksdb_stores import pop_row, write_database, write_queues
from tests.stores_of_5 import state_of

Entry = tuple[str, int, int, int, int, int, int]


@pytest.fixture
def stored(tmp_path: Path) -> tuple[Path, list[Entry]]:
    """Return a store whose queues are in no file yet, and their entries."""
    path = tmp_path / "store"
    with MessageStore.open(path, StoreConfig.tiny()) as store:
        for number in range(30):
            store.append(Message(("orders", "payments")[number % 2], b"body", keys=f"k{number}", tags="a"))
        entries = [
            (message.topic, message.queue_id, message.queue_offset, message.physical_offset, message.size, 97, 1)
            for message in store
        ]
    shutil.rmtree(path / "consumequeue")
    return path, entries


@pytest.mark.parametrize("folder", ["consumequeue", "consumequeue_rocksdb"])
def test_queues_in_rocksdb_agree_with_the_log(stored: tuple[Path, list[Entry]], folder: str) -> None:
    path, entries = stored
    write_queues(path / folder, entries[:-2])
    before = state_of(path)
    verdict = verify(path)
    assert verdict.sound
    assert "queues in RocksDB: 28 entries compared with the log" in verdict.notes
    assert any(note.startswith("2 records of the log have no entry in RocksDB yet") for note in verdict.notes)
    assert state_of(path) == before


def test_queues_that_rocksdb_lacks_are_no_damage(stored: tuple[Path, list[Entry]]) -> None:
    """Since 5.5.1 a broker can keep some queues in files alone."""
    path, entries = stored
    write_queues(path / "consumequeue_rocksdb", [entry for entry in entries if entry[0] == "orders"])
    verdict = verify(path)
    assert verdict.sound
    (note,) = [note for note in verdict.notes if "rocksdbCQSelectiveDoubleWriteEnable" in note]
    assert note.startswith(f"1 queue of the log, with {sum(entry[0] != 'orders' for entry in entries)} records")


def test_differences_of_queues_in_rocksdb_are_named(stored: tuple[Path, list[Entry]]) -> None:
    path, entries = stored
    orders = [entry for entry in entries if entry[0] == "orders"]
    wrong = (*orders[3][:3], orders[4][3], *orders[3][4:])
    beyond = ("orders", 0, 15, 1 << 40, 100, 97, 1)
    without_fifth = [entry for entry in entries if entry not in (orders[3], orders[5])]
    write_queues(path / "consumequeue_rocksdb", [*without_fifth, wrong, beyond])
    damage = {(item.kind, item.offset) for item in verify(path).damage}
    assert damage == {("entry", 3), ("missing", 5), ("ahead", 15)}


def test_without_the_extra_only_the_log_is_verified(
    stored: tuple[Path, list[Entry]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, entries = stored
    write_queues(path / "consumequeue_rocksdb", entries)
    monkeypatch.setitem(sys.modules, "rocksdict", None)
    verdict = verify(path)
    assert verdict.sound
    assert any("pip install 'librmq[rocksdb]'" in note for note in verdict.notes)


# ---- POP


def put_pop_records(path: Path, count: int = 3) -> int:
    """Add POP's records of messages in flight, and return when they are visible again."""
    with MessageStore.open(path, read_only=True) as store:
        now_ms = max(message.store_timestamp_ms for message in store)
    rows = dict(pop_row("G", "orders", 0, at, now_ms - 70_000, 60_000) for at in range(count))
    write_database(path / "kvStore", {"default": {}, "popState": rows})
    return now_ms - 10_000


def test_pop_records_in_rocksdb_are_held(stored: tuple[Path, list[Entry]]) -> None:
    path, entries = stored
    write_queues(path / "consumequeue_rocksdb", entries)
    due_ms = put_pop_records(path)
    before = state_of(path)
    held = pop_holds(path).held
    assert [(one.group, one.topic, one.queue_id, one.queue_offset, one.visible_ms) for one in held] == [
        ("G", "orders", 0, at, due_ms) for at in range(3)
    ]
    with MessageStore.open(path, read_only=True) as store:
        rows = [row for row in pending_messages(store) if row.kind == "pop"]
    assert [(row.topic, row.due_ms) for row in rows] == [("orders", due_ms)] * 3
    kinds = {finding.kind for finding in diagnose(path)}
    assert "unseen-pop-records" not in kinds
    assert state_of(path) == before


def test_many_check_points_of_one_time_are_a_finding(stored: tuple[Path, list[Entry]]) -> None:
    path, _ = stored
    put_pop_records(path, 10_000)
    (finding,) = [one for one in diagnose(path) if one.kind == "crowded-pop-time"]
    assert finding.evidence["messages"] == 10_000


def test_a_pop_record_that_no_broker_writes_is_named(stored: tuple[Path, list[Entry]]) -> None:
    path, _ = stored
    write_database(path / "kvStore", {"default": {}, "popState": {bytes(30): b"{}"}})
    assert "can't be used" in pop_holds(path).notes[0]


def test_without_the_extra_pop_records_are_unseen(
    stored: tuple[Path, list[Entry]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = stored
    put_pop_records(path)
    monkeypatch.setitem(sys.modules, "rocksdict", None)
    (finding,) = [one for one in diagnose(path) if one.kind == "unseen-pop-records"]
    assert "pip install 'librmq[rocksdb]'" in finding.what
