"""What a folder shows: its kind of store, its settings, and its queues."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from librmq.cli.commands.maintenance import broker_properties
from librmq.config import StoreConfig
from librmq.errors import ConfigError, CorruptionError, NotAStoreError
from librmq.files._disk import DiskFiles
from librmq.files._memory import MemoryFiles
from librmq.files.interface import FileStatus, FolderEntry
from librmq.store import MessageStore
from librmq.store.format import directory
from librmq.store.format.directory import StoreKind
from tests.file_seams import FailingFiles
from tests.reference import existing, rows, store_folders

ROOT = os.sep + "store"
TINY = StoreConfig.tiny()
UNLIMITED: dict[str, Any] = {"max_total_size": None, "file_reserved_hours": None}


def files_with(*names: str, sizes: dict[str, int] | None = None) -> MemoryFiles:
    """Return a store folder with empty files (or folders, if a name ends in /) and files of given sizes."""
    files = MemoryFiles()
    files.make_folder(ROOT)
    for name in [*names, *(sizes or {})]:
        path = os.path.join(ROOT, *name.rstrip("/").split("/"))
        if name.endswith("/"):
            files.make_folder(path)
        else:
            files.make_folder(os.path.dirname(path))
            files.write(path, b"\0" * (sizes or {}).get(name, 0))
    return files


def log_files(*starts: int, size: int = 1000) -> dict[str, int]:
    return {f"commitlog/{start:020d}": size for start in starts}


# --- kinds


@pytest.mark.parametrize(
    ("files", "kind"),
    [
        (MemoryFiles(), StoreKind.NEW),
        (files_with("config/topics.json", "lock", "abort", "notes.txt"), StoreKind.NEW),
        (files_with("consumequeue/", "index/"), StoreKind.NEW),
        (files_with("commitlog/"), StoreKind.V4),
        (files_with("commitlog/", "dledger-of-mine", "dledger-backup/old/"), StoreKind.V4),
        (files_with("commitlog/", "consumequeue/CURRENT"), StoreKind.V4),
        (files_with("commitlog/", "timerlog/"), StoreKind.V5),
        (files_with("commitlog/", "config/timercheck"), StoreKind.V5),
        (files_with("commitlog/", "consumequeue/rmq_sys_wheel_timer/0/"), StoreKind.V5),
        (files_with("commitlog/", "consumequeue/CURRENT", "consumequeue/MANIFEST-000004"), StoreKind.V5_ROCKSDB),
        (files_with("commitlog/", "consumequeue_rocksdb/"), StoreKind.V5_ROCKSDB),
        (files_with("commitlog/", "consumequeue/T/0/", "consumequeue_rocksdb/CURRENT"), StoreKind.V5_MIXED),
        (files_with("commitlog/", "batchconsumequeue/"), StoreKind.V4),
        (files_with("commitlog/", "batchconsumequeue/T/0/"), StoreKind.V5_BATCHES),
    ],
)
def test_kind(files: MemoryFiles, kind: StoreKind) -> None:
    assert directory.recognise(ROOT, files) is kind


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (files_with("commitlog/", "dledger-n0/data/"), "DLedger (dledger-n0)"),
        (files_with("dledger-n0/index/"), "DLedger (dledger-n0)"),
        (files_with("consumequeue/T/0/"), "a folder consumequeue but no commitlog"),
        (files_with("index/20240101000000000"), "a folder index but no commitlog"),
        (files_with("commitlog"), "commitlog: expected a folder, found a file"),
        (files_with(sizes=log_files(0, 2000, 4000)), "one of every 2 files"),
        (files_with(sizes=log_files(1000, 4000, 7000, 10000)), "one of every 3 files"),
    ],
)
def test_unsupported_stores_are_refused_by_name(files: MemoryFiles, said: str) -> None:
    with pytest.raises(NotAStoreError) as caught:
        directory.recognise(ROOT, files)
    assert said in str(caught.value)


def test_a_file_is_not_a_store() -> None:
    files = MemoryFiles()
    files.write(ROOT, b"text")
    with pytest.raises(NotAStoreError, match="expected the folder of a store, found a file"):
        directory.recognise(ROOT, files)


class ChangingFolder(DiskFiles):
    """The files of a folder in which another process makes a store, beginning with one of the looks at it."""

    def __init__(self, path: Path, first_look: int, steps_a_look: int) -> None:
        super().__init__()
        self.looks, self.first_look, self.steps_a_look = 0, first_look, steps_a_look
        names = ("", "config", "consumequeue/T/0", "commitlog", "index", "librmq/share")
        self.folders = [path / name for name in names]

    def look(self) -> None:
        self.looks += 1
        if self.looks >= self.first_look:
            for folder in self.folders[: self.steps_a_look]:
                folder.mkdir(parents=True, exist_ok=True)
            del self.folders[: self.steps_a_look]

    def status(self, path: str) -> FileStatus | None:
        self.look()
        return super().status(path)

    def list(self, path: str) -> list[FolderEntry]:
        self.look()
        return super().list(path)


@pytest.mark.parametrize("steps_a_look", [1, 2, 3, 6])
def test_a_store_that_another_process_makes_is_never_refused(tmp_path: Path, steps_a_look: int) -> None:
    first_look, looks = 1, 1
    while first_look <= looks:
        path = tmp_path / str(first_look)
        files = ChangingFolder(path, first_look, steps_a_look)
        assert directory.check_kind(str(path), files, writable=True) in (StoreKind.NEW, StoreKind.V4)
        first_look, looks = first_look + 1, files.looks


@pytest.mark.parametrize("starts", [(0, 1000, 3000), (0, 2000), (0, 1000, 2000, 5000)])
def test_a_gap_in_the_log_is_damage_rather_than_several_paths(starts: tuple[int, ...]) -> None:
    assert directory.recognise(ROOT, files_with(sizes=log_files(*starts))) is StoreKind.V4


def test_folders_and_the_ways_to_open_them() -> None:
    nothing, rocks = (MemoryFiles(), files_with("commitlog/", "consumequeue/CURRENT", "consumequeue/MANIFEST-1"))
    assert directory.check_kind(ROOT, nothing, writable=True) is StoreKind.NEW
    with pytest.raises(NotAStoreError, match="no folder commitlog"):
        directory.check_kind(ROOT, nothing)
    assert directory.check_kind(ROOT, rocks) is StoreKind.V5_ROCKSDB
    with pytest.raises(NotAStoreError, match="RocksDB: librmq reads it"):
        directory.check_kind(ROOT, rocks, writable=True)


@pytest.mark.parametrize("folder", store_folders())
def test_stores_of_rocketmq(folder: Path) -> None:
    assert directory.recognise(str(folder / "store"), DiskFiles()) is StoreKind.V4


def test_a_store_of_5() -> None:
    assert directory.recognise(str(existing("timer-5.3.3", "store")), DiskFiles()) is StoreKind.V5


# --- queues


def test_queues_are_sorted_by_topic_and_number() -> None:
    files = files_with(
        "consumequeue/b/10/", "consumequeue/b/9/", "consumequeue/a/2147483647/", "consumequeue/%RETRY%g/0/",
        "consumequeue/empty/", "consumequeue/.DS_Store", "consumequeue/a/.DS_Store",
    )  # fmt: skip
    assert directory.list_queues(ROOT, files) == [("%RETRY%g", 0), ("a", 2147483647), ("b", 9), ("b", 10)]


@pytest.mark.parametrize(
    "name", ["T/x", "T/01", "T/-1", "T/2147483648", "T/99999999999999999999999", "T/٣", "t" * 128, "主" * 43]
)
def test_a_folder_that_is_not_a_queue_is_damage(name: str) -> None:
    files = files_with(f"consumequeue/{name}/" if "/" in name else f"consumequeue/{name}/0/", "consumequeue/T/0/")
    with pytest.raises(CorruptionError) as caught:
        directory.list_queues(ROOT, files)
    assert (caught.value.file, caught.value.kind) == (os.path.join(ROOT, "consumequeue", *name.split("/")), "name")


def test_the_longest_topic() -> None:
    longest = ["t" * 127, "主" * 42, "%RETRY%" + "g" * 248, "%LMQ%" + "q" * 250]
    files = files_with(*(f"consumequeue/{topic}/0/" for topic in longest))
    assert len(directory.list_queues(ROOT, files)) == len(longest)


@pytest.mark.parametrize("folder", store_folders())
def test_queues_of_rocketmq(folder: Path) -> None:
    queues = rows(folder, "store")[0]["queues"]
    told = [(row["topic"], row["queue_id"]) for row in queues if row["max_offset"]]
    assert directory.list_queues(str(folder / "store"), DiskFiles()) == told


@pytest.mark.parametrize(
    ("text", "topics"),
    [
        (b'{"dataVersion":{},"topicConfigTable":{"T":{"perm":6},"%RETRY%g":{}}}', {"T", "%RETRY%g"}),
        (b"{}", set()),
        (b"", set()),
        (b"{", set()),
        (b"[]", set()),
        (b'{"topicConfigTable":5}', set()),
        (b"[" * 100_000, set()),
        (b"\xff", set()),
        (None, set()),
    ],
)
def test_topics_of_the_broker(text: bytes | None, topics: set[str]) -> None:
    files = files_with("config/")
    if text is not None:
        files.write(os.path.join(ROOT, "config", "topics.json"), text)
    assert directory.known_topics(ROOT, files) == topics


# --- settings


@pytest.mark.parametrize("folder", store_folders())
def test_settings_of_rocketmq(folder: Path) -> None:
    store, files = str(folder / "store"), DiskFiles()
    expected = StoreConfig.from_row(rows(folder, "config")[0] | UNLIMITED | {"flush_thorough_interval_s": 10})
    assert directory.infer_config(store, files) == expected
    directory.check_config(store, expected, files)


def test_a_new_store_has_embedded_sizes() -> None:
    assert directory.infer_config(ROOT, MemoryFiles()) == StoreConfig()
    told = directory.infer_config(ROOT, files_with(sizes=log_files(0, size=64 << 20)))
    # Another tool created the store, and its owner may want to keep everything.
    assert told == StoreConfig(**UNLIMITED, keep_unconsumed=False)


def test_an_empty_store_has_the_sizes_of_a_broker() -> None:
    files = files_with("commitlog/", "consumequeue/T/0/", "consumequeue_ext/", "index/")
    assert directory.infer_config(ROOT, files) == StoreConfig.broker(**UNLIMITED)
    directory.check_config(ROOT, TINY, files)


def test_each_setting_is_inferred_from_its_files() -> None:
    sizes = log_files(2000, 3000) | {
        "consumequeue/T/0/00000000000000000040": 40,
        "consumequeue_ext/T/0/00000000000000000000": 512,
        "index/20240101000000000": 40 + 84 * 7,
    }
    assert directory.infer_config(ROOT, files_with(sizes=sizes)) == StoreConfig.broker(
        commitlog_file_size=1000,
        consumequeue_file_size=40,
        enable_consumequeue_ext=True,
        consumequeue_ext_file_size=512,
        max_hash_slot_num=7,
        max_index_num=28,
        flush_thorough_interval_s=10,
        **UNLIMITED,
    )


@pytest.mark.parametrize(
    ("sizes", "length"),
    [
        (log_files(0, 1000, 2000) | log_files(3000, size=500), 1000),  # the last file is cut short
        (log_files(0, 1000) | log_files(2000, size=0), 1000),  # a crash before the last had a length
        (log_files(0, 1000, size=0), 1000),  # the distance between the names shows it
        (log_files(0, size=700), 700),  # the only hint is the file's own length
        (log_files(0, size=0), StoreConfig.broker().commitlog_file_size),
        (log_files(700, size=1000), StoreConfig.broker().commitlog_file_size),  # no file of that length starts at 700
        (log_files(0, size=100), StoreConfig.broker().commitlog_file_size),  # shorter than any record
    ],
)
def test_files_that_disagree_or_show_nothing(sizes: dict[str, int], length: int) -> None:
    assert directory.infer_config(ROOT, files_with(sizes=sizes)).commitlog_file_size == length


@pytest.mark.parametrize(("length", "next_length"), [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_a_gap_between_queue_files_hides_no_kept_size(length: int, next_length: int) -> None:
    """A power failure can take a file between two others, and the lengths of these."""
    files = MemoryFiles()
    MessageStore.open(ROOT, TINY, files=files).close()
    size = TINY.consumequeue_file_size
    files.make_folder(f"{ROOT}/consumequeue/T/0")
    files.write(f"{ROOT}/consumequeue/T/0/{0:020d}", bytes(size * length))
    files.write(f"{ROOT}/consumequeue/T/0/{2 * size:020d}", bytes(size * next_length))
    assert directory.infer_config(ROOT, files).consumequeue_file_size == size
    directory.check_config(ROOT, TINY, files)


def test_few_of_many_files_are_looked_at() -> None:
    """Opening checks the length of each file anyway, once; before that it only asks for sizes and the kind of store."""
    names = [f"commitlog/{4096 * number:020d}" for number in range(1000)]
    files = FailingFiles(files_with("commitlog/", sizes=dict.fromkeys(names, 4096)))
    assert directory.recognise(ROOT, files) is StoreKind.V4
    assert directory.infer_config(ROOT, files).commitlog_file_size == 4096
    assert files.calls["status"] < 200


def test_a_log_on_two_paths_is_refused_however_long_it_is() -> None:
    names = [f"commitlog/{8192 * number:020d}" for number in range(1000)]
    with pytest.raises(NotAStoreError, match="only one of every 2 files"):
        directory.recognise(ROOT, files_with("commitlog/", sizes=dict.fromkeys(names, 4096)))


def test_empty_extension_files_show_that_there_are_any() -> None:
    config = directory.infer_config(ROOT, files_with("commitlog/", "consumequeue_ext/T/0/00000000000000000000"))
    assert config == StoreConfig.broker(enable_consumequeue_ext=True, **UNLIMITED)


def test_lengths_of_no_setting_show_nothing() -> None:
    sizes = {"consumequeue/T/0/00000000000000000000": 3999, "index/20240101000000000": 5000, "index/x": 40}
    assert directory.infer_config(ROOT, files_with("commitlog/", sizes=sizes)) == StoreConfig.broker(**UNLIMITED)


@pytest.mark.parametrize(
    "change",
    [
        {"commitlog_file_size": 2000},
        {"consumequeue_file_size": 60},
        {"enable_consumequeue_ext": False},
        {"consumequeue_ext_file_size": 1024},
        {"max_hash_slot_num": 8},
        {"max_index_num": 27},
    ],
)
def test_settings_that_disagree_are_refused(change: dict[str, Any]) -> None:
    sizes = log_files(0, 1000) | {
        "consumequeue/T/0/00000000000000000000": 40,
        "consumequeue_ext/T/0/00000000000000000000": 512,
        "index/20240101000000000": 40 + 84 * 7,
    }
    files = files_with(sizes=sizes)
    config = directory.infer_config(ROOT, files)
    directory.check_config(ROOT, config, files)
    with pytest.raises(ConfigError, match=next(iter(change))):
        directory.check_config(ROOT, dataclasses.replace(config, **change), files)


def test_another_ratio_of_slots_with_the_same_length() -> None:
    """A different ratio of slots to entries is accepted if the file length stays the same."""
    files = files_with("commitlog/", sizes={"index/20240101000000000": 40 + 84 * 10})
    directory.check_config(ROOT, StoreConfig(max_hash_slot_num=5, max_index_num=41), files)


@given(
    st.dictionaries(
        st.sampled_from(["commitlog/", "consumequeue/T/0/", "consumequeue_ext/T/0/", "index/"]).flatmap(
            lambda folder: st.one_of(
                st.integers(0, 10**20 - 1).map(lambda start: f"{folder}{start:020d}"),
                st.text("0123456789abc.-", min_size=1, max_size=22).map(lambda name: f"{folder}n{name}"),
            )
        ),
        st.integers(0, 3000),
        max_size=8,
    )
)
def test_any_names_and_lengths_lead_to_settings(sizes: dict[str, int]) -> None:
    files = files_with(sizes=sizes)
    config = directory.infer_config(ROOT, files)
    directory.check_config(ROOT, config, files)


# --- broker.conf


def properties(text: str) -> dict[str, str]:
    """Read ASCII lines as ``java.util.Properties`` does, if their only escapes are \\uXXXX and \\\\."""
    text.encode("ascii")
    pairs = (line.split("=", 1) for line in text.splitlines())
    return {name: json.loads(f'"{value}"') for name, value in pairs}


def test_broker_conf_names_the_settings_of_file_sizes() -> None:
    conf = properties(broker_properties(ROOT, TINY))
    assert conf == {
        "storePathRootDir": os.path.abspath(ROOT),
        "storePathCommitLog": os.path.join(os.path.abspath(ROOT), "commitlog"),
        "mappedFileSizeCommitLog": "65536",
        "mappedFileSizeConsumeQueue": "4000",
        "enableConsumeQueueExt": "false",
        "enableCalcFilterBitMap": "false",
        "mappedFileSizeConsumeQueueExt": "1024",
        "maxHashSlotNum": "64",
        "maxIndexNum": "256",
        "maxMessageSize": str(TINY.max_message_size),
        "messageDelayLevel": TINY.message_delay_level,
        "enablePropertyFilter": "true",
    }


def test_broker_conf_survives_any_path() -> None:
    path = os.path.abspath(os.path.join(ROOT, "订单 𝄞 back\\slash"))
    assert properties(broker_properties(path, TINY))["storePathRootDir"] == path


@pytest.mark.parametrize("name", ["a,b", "a\nb", "a\x7fb"])
def test_a_path_that_a_broker_can_not_read_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="move the store elsewhere"):
        broker_properties(f"/stores/{name}", StoreConfig())
