"""Index files compared with those of the broker. Tests of the command `ask` compare the answers to queries."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest

from librmq.files._memory import MemoryFiles
from librmq.java.lang import index_key_hash
from librmq.store.format._keyindex import KeyIndex
from librmq.store.format.indexfile import IndexFile, geometry
from tests.budget import many
from tests.golden.recorded import left_sound
from tests.reference import existing, folders, jsonl, rows, store_folders
from tests.stores import ROOT, in_memory

NOW = 1_800_000_000_000
Record = tuple[int, int, list[int]]
Append = Callable[[KeyIndex, list[Record]], None]


def one_by_one(index: KeyIndex, records: list[Record]) -> None:
    for record in records:
        index.append_many([record])


def by_64(index: KeyIndex, records: list[Record]) -> None:
    for begin in range(0, len(records), 64):
        index.append_many(records[begin : begin + 64])


def at_once(index: KeyIndex, records: list[Record]) -> None:
    index.append_block(
        np.array([record[0] for record in records]),
        np.array([record[1] for record in records]),
        np.repeat(np.arange(len(records)), [len(record[2]) for record in records]),
        np.array([key for record in records for key in record[2]], np.int64),
    )


every_way = pytest.mark.parametrize("append", [one_by_one, by_64, at_once])


def hashes(topic: str, sys_flag: int, unique_key: str | None, keys: str | None) -> list[int]:
    """Return the hashes of a record's keys, in the order of RocketMQ's builder."""
    if sys_flag & 12 == 12:  # the transaction was rolled back
        return []
    names = [] if unique_key is None else [unique_key]
    return [index_key_hash(topic, key) for key in names + [key for key in (keys or "").split(" ") if key]]


def records_of(folder: Path) -> list[Record]:
    return [
        (
            row["phys"],
            row["store_timestamp"],
            hashes(row["topic"], row["sys_flag"], row["dispatch_uniq_key"], row["dispatch_keys"]),
        )
        for row in rows(folder, "message")
    ]


def records_of_clients(path: Path) -> Iterator[Record]:
    for row in jsonl(path):
        if row["kind"] == "message":
            properties = row["properties"]
            keys = hashes(row["topic"], row["sysFlag"], properties.get("UNIQ_KEY"), properties.get("KEYS"))
            yield row["commitLogOffset"], row["storeTimestamp"], keys


def stored(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((folder / "index").glob("*"))}


def open_index(files: MemoryFiles, slots: int, entries: int) -> KeyIndex:
    return KeyIndex.open(f"{ROOT}/index", slots=slots, entries=entries, files=files, now_ms=lambda: NOW)


def replayed(records: list[Record], append: Append, slots: int, entries: int) -> list[bytes]:
    """Return a new index of the records."""
    files = in_memory({"index": None})
    append(open_index(files, slots, entries), records)
    return [files.read(os.path.join(f"{ROOT}/index", entry.name)) for entry in files.list(f"{ROOT}/index")]


def pairs(contents: Iterable[bytes], slots: int, entries: int, begin: int) -> list[tuple[int, int]]:
    """Return hash and place of all entries from ``begin`` on."""
    files = in_memory({f"index/{20_000_101_000_000_000 + n}": data for n, data in enumerate(contents)})
    every = [file.entries() for file in open_index(files, slots, entries).files]
    kept = np.concatenate([entries_[entries_["physical"] >= begin] for entries_ in every])
    pairs: list[tuple[int, int]] = kept[["hash", "physical"]].tolist()
    return pairs


@every_way
@pytest.mark.parametrize("folder", store_folders())
def test_replayed_bytes(folder: Path, append: Append) -> None:
    """Records of a store that was closed cleanly give its index, byte for byte."""
    if not left_sound(folder):
        return  # the files are older than the rows; the test below takes each recorded file by its entries
    (config,) = rows(folder, "config")
    assert_same_index(
        records_of(folder), stored(folder / "store"), append, config["max_hash_slot_num"], config["max_index_num"]
    )


@many
@every_way
@pytest.mark.parametrize("folder", folders("clients-"))
def test_replayed_bytes_of_real_brokers(folder: Path, append: Append) -> None:
    expected = stored(folder / "store")
    sizes = geometry(len(next(iter(expected.values()))))
    assert sizes is not None
    assert_same_index(list(records_of_clients(folder / "messages.jsonl")), expected, append, *sizes)


def assert_same_index(
    records: list[Record], expected: dict[str, bytes], append: Append, slots: int, entries: int
) -> None:
    replay = replayed(records, append, slots, entries)
    begin = records[0][0]
    if begin == 0:
        assert replay == list(expected.values())
    else:  # the first log files were deleted, and the index is older
        assert pairs(replay, slots, entries, begin) == pairs(expected.values(), slots, entries, begin)


@every_way
@pytest.mark.parametrize("folder", store_folders())
def test_recorded_index_files(folder: Path, append: Append) -> None:
    """The keys of each recorded file, in their recorded order, give its header, entries, and slots.

    This holds after any crash and recovery: RocketMQ 4.9 may index a record twice, or leave one out.
    """
    (config,) = rows(folder, "config")
    times = {row["phys"]: row["store_timestamp"] for row in rows(folder, "message")}
    for row in rows(folder, "index_file"):
        begin_ms = row["begin_timestamp"]
        limits = {row["end_phy_offset"]: row["end_timestamp"], row["begin_phy_offset"]: begin_ms}
        records: list[Record] = []
        for key_hash, physical, seconds, _ in row["entries_hash_phys_timediff_prev"]:
            if records and records[-1][0] == physical:
                records[-1][2].append(key_hash)
            else:  # a record that is no longer in the log has the time of its entry
                time = times.get(physical, limits.get(physical, begin_ms + 1000 * seconds))
                records.append((physical, time, [key_hash]))
        slots, entries = config["max_hash_slot_num"], config["max_index_num"]
        files = in_memory({"index": None})
        index = open_index(files, slots, entries)
        append(index, records)
        (file,) = index.files
        header = file.header
        assert (header.begin_timestamp_ms, header.end_timestamp_ms) == (begin_ms, row["end_timestamp"])
        assert (header.begin_physical_offset, header.end_physical_offset) == (
            row["begin_phy_offset"],
            row["end_phy_offset"],
        )
        assert (header.slot_count, header.index_count) == (row["hash_slot_count"], row["index_count"])
        assert [list(entry) for entry in file.entries().tolist()] == row["entries_hash_phys_timediff_prev"]
        assert {str(slot): number for slot, number in file.slots().tolist()} == row["slots"]


@pytest.mark.parametrize("folder", folders("clients-"))
def test_files_alone(folder: Path) -> None:
    for path in (existing(folder.name, "store", "index")).iterdir():
        with IndexFile.open(str(path)) as file:
            header, entries = file.header, file.entries()
            assert header.index_count == len(entries) + 1
            assert (file.max_slots, file.max_entries) == geometry(path.stat().st_size)
            if len(entries):
                assert header.begin_physical_offset == entries["physical"][0]
                assert header.end_physical_offset == entries["physical"][-1]
            assert len(file.slots()) == header.slot_count
