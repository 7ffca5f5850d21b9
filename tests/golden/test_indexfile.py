"""Index files compared with those of the broker. Tests of the command `ask` compare the answers to queries."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from librmq.config import StoreConfig
from librmq.files.memory import MemoryFiles
from librmq.java.hashing import index_key_hash
from librmq.store.format.index_layout import geometry
from librmq.store.format.indexfile import IndexFile
from librmq.store.format.keyindex import KeyIndex
from librmq.store.recovery.verify import verify
from tests.reference import existing, folders, jsonl, rows, store_folders
from tests.stores import ROOT, in_memory

NOW = 1_800_000_000_000
Record = tuple[int, int, list[int]]
Append = Callable[[KeyIndex, list[Record]], None]


def one_by_one(index: KeyIndex, records: list[Record]) -> None:
    for record in records:
        index.append(*record)


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


@cache
def can_be_foretold(folder: Path) -> bool:
    """Return whether a reference's index can be derived from its records, because neither was damaged later.

    After a recovery, RocketMQ may have indexed some keys twice; other tests check the search in that case.
    """
    (config,) = rows(folder, "config")
    if (folder / "mutation.json").exists():
        store = folder / "store"
        damage = verify(str(store), StoreConfig.from_row(config)).damage
        if any(item.kind != "ahead" and Path(item.file).parent != store / "commitlog" for item in damage):
            return False
        if rows(folder, "store")[0]["min_phy_offset"] or not config["abort_file_present"]:
            return False
    made = rows(folder, "index_file")
    if any(row["name"] not in stored(folder / "store") for row in made):
        return True  # files that a recovery rebuilt begin with a record
    wanted = Counter((key, place) for place, _, keys in records_of(folder) for key in keys)
    found = Counter((key, place) for row in made for key, place, *_ in row["entries_hash_phys_timediff_prev"])
    return all(found[pair] <= count for pair, count in wanted.items())


def stored(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((folder / "index").glob("*"))}


def open_index(files: MemoryFiles, slots: int, entries: int) -> KeyIndex:
    return KeyIndex.open(f"{ROOT}/index", slots=slots, entries=entries, files=files, now_ms=lambda: NOW)


def replayed(records: list[Record], append: Append, slots: int, entries: int) -> list[bytes]:
    """Return a new index of the records."""
    files = in_memory({"index": None})
    append(open_index(files, slots, entries), records)
    return [files.read(os.path.join(f"{ROOT}/index", entry.name)) for entry in files.list(f"{ROOT}/index")]


def pairs(found: Iterable[bytes], slots: int, entries: int, begin: int) -> list[tuple[int, int]]:
    """Return hash and place of all entries from ``begin`` on."""
    files = in_memory({f"index/{20_000_101_000_000_000 + n}": data for n, data in enumerate(found)})
    every = [file.entries() for file in open_index(files, slots, entries).files]
    kept = np.concatenate([one[one["physical"] >= begin] for one in every])
    pairs: list[tuple[int, int]] = kept[["hash", "physical"]].tolist()
    return pairs


@every_way
@pytest.mark.parametrize("folder", store_folders())
def test_replayed_bytes(folder: Path, append: Append) -> None:
    if not can_be_foretold(folder):
        return
    (config,) = rows(folder, "config")
    slots, entries = config["max_hash_slot_num"], config["max_index_num"]
    expected = list(stored(folder / "store").values())
    made = replayed(records_of(folder), append, slots, entries)
    if not config["abort_file_present"]:
        assert made == expected
        return
    # The rows describe the recovered log, but the last files on disk still contain the cut records.
    assert made[:-1] == expected[: len(made) - 1]
    begin, end = 40 + 4 * slots, len(made[-1].rstrip(b"\0"))
    assert made[-1][begin:end] == expected[len(made) - 1][begin:end]


@every_way
@pytest.mark.parametrize("folder", folders("clients-"))
def test_replayed_bytes_of_real_brokers(folder: Path, append: Append) -> None:
    expected = list(stored(folder / "store").values())
    found = geometry(len(expected[0]))
    assert found is not None
    records = list(records_of_clients(folder / "messages.jsonl"))
    made = replayed(records, append, *found)
    begin = records[0][0]
    if begin == 0:
        assert made == expected
    else:  # the first log files were deleted, and the index is older
        assert pairs(made, *found, begin) == pairs(expected, *found, begin)


@pytest.mark.parametrize("folder", [*store_folders(), *folders("clients-")])
def test_files_alone(folder: Path) -> None:
    """Only files whose length shows the number of slots and entries are checked."""
    if folder.name.startswith("store-"):
        (config,) = rows(folder, "config")
        if config["max_index_num"] != 4 * config["max_hash_slot_num"] or not can_be_foretold(folder):
            return
    for path in (existing(folder.name, "store", "index")).iterdir():
        with IndexFile.open(str(path)) as file:
            header, entries = file.header, file.entries()
            assert header.index_count == len(entries) + 1
            assert (file.max_slots, file.max_entries) == geometry(path.stat().st_size)
            if len(entries):
                assert header.begin_physical_offset == entries["physical"][0]
                assert header.end_physical_offset == entries["physical"][-1]
            assert len(file.slots()) == header.slot_count
