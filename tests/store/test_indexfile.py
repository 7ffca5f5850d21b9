"""Index files on their own: bytes, limits, damage, and what a reader or successor sees between two writes."""

from __future__ import annotations

import mmap
import os
import struct
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from librmq.errors import ConfigError, CorruptionError, ReadOnlyError, StoreClosedError, StoreIOError
from librmq.files._disk import DiskFiles
from librmq.files._memory import MemoryFiles
from librmq.files.interface import File, Files, file_size
from librmq.java.lang import index_key_hash
from librmq.store.format import _keyindex as keyindex
from librmq.store.format._keyindex import KeyIndex
from librmq.store.format.indexfile import IndexFile, IndexHeader, file_length, geometry
from tests.budget import many, some
from tests.stores import in_memory

NOW = 1_795_150_492_070  # 2026-11-20 04:54:52.070 UTC
BEGIN = 1_700_000_000_000
TOPIC = "TopicTest"
# The first key has hash 0: at the start of the log its entry is all zeros.
KEYS = ["zp1Axdzf", *(f"k{n}" for n in range(5))]
HASHES = [index_key_hash(TOPIC, key) for key in KEYS]

Record = tuple[int, int, tuple[int, ...]]


def memory() -> MemoryFiles:
    files = MemoryFiles()
    files.make_folder("/store")
    return files


def open_index(files: Files, folder: str = "/store/index", **changes: object) -> KeyIndex:
    settings: dict[str, object] = {"slots": 4, "entries": 8, "now_ms": lambda: NOW, **changes}
    return KeyIndex.open(folder, files=files, **settings)  # type: ignore[arg-type]


def one_file(files: Files | None = None, slots: int = 4, entries: int = 16) -> IndexFile:
    return IndexFile.create("/store/one", slots, entries, files or memory())


def contents(files: Files, folder: str = "/store/index") -> dict[str, bytes]:
    return {entry.name: files.read(os.path.join(folder, entry.name)) for entry in files.list(folder)}


def found(file: IndexFile, key_hash: int, begin: int = 0, end: int = 2**63 - 1, most: int = 64) -> list[int]:
    offsets: list[int] = []
    file.query(key_hash, begin, end, most, offsets)
    return offsets


# ----------------------------------------------------------------------------------------------------- a file


@pytest.mark.parametrize(
    ("begin", "timestamp", "seconds"),
    [
        (BEGIN, BEGIN + 999, 0),
        (BEGIN, BEGIN + 1_000, 1),
        (BEGIN, BEGIN - 1, 0),
        (BEGIN, BEGIN - 5_000, 0),
        (1, 2**63 - 1, 2**31 - 1),
        (1, 1 + 1000 * (2**31 - 1), 2**31 - 1),
        (0, BEGIN, 0),
        (-5, BEGIN, 0),
        (2**63 - 1, -(2**63), 0),  # the difference overflows to 1
        (BEGIN, -(2**63), 2**31 - 1),  # the difference overflows to a large number
    ],
)
@pytest.mark.parametrize("as_block", [False, True])
def test_times_are_clamped(begin: int, timestamp: int, seconds: int, as_block: bool) -> None:
    index = open_index(memory())
    index.append_many([(0, begin, [1])])
    if as_block:
        index.append_block(np.array([5]), np.array([timestamp]), np.array([0]), np.array([1]))
    else:
        index.append_many([(5, timestamp, [1])])
    assert index.files[0].entries()["time_diff"].tolist() == [0, seconds]


@pytest.mark.parametrize("as_block", [False, True])
@pytest.mark.parametrize(
    ("damaged", "keys", "previous"),
    [
        (-3, [0], [0]),
        (99, [0], [0]),
        (1, [0], [1]),
        (2, [0], [2]),  # an entry's own number is accepted, as in 4.9
        (3, [0], [0]),
        (3, [1, 0], [0, 3]),
        (4, [1, 0], [0, 0]),
        (4, [0, 4], [0, 2]),
    ],
)
def test_slots_out_of_range_count_as_empty(damaged: int, keys: list[int], previous: list[int], as_block: bool) -> None:
    index = open_index(memory(), slots=4, entries=16)
    index.append_many([(10, BEGIN, [0])])
    (file,) = index.files
    file.file.buffer[40:44] = struct.pack(">i", damaged)
    if as_block:
        index.append_block(np.array([20]), np.array([BEGIN]), np.zeros(len(keys), np.int64), np.array(keys, np.int64))
    else:
        index.append_many([(20, BEGIN, keys)])
    assert file.entries()["previous"].tolist() == [0, *previous]
    assert file.header.slot_count == 1 + previous.count(0)


def test_geometry_of_a_length() -> None:
    assert geometry(file_length(5_000_000, 20_000_000)) == (5_000_000, 20_000_000)
    assert [geometry(length) for length in (0, 39, 40, 41, 123, 125)] == [None] * 6
    assert geometry(124) == (1, 4)


def test_wrong_lengths_and_geometries_are_refused() -> None:
    files = memory()
    one_file(files, 4, 15).close()
    with pytest.raises(CorruptionError) as caught:
        IndexFile.open("/store/one", files)
    assert (caught.value.file, caught.value.kind) == ("/store/one", "size")
    with pytest.raises(CorruptionError):
        IndexFile.open("/store/one", files, slots=4, entries=16)
    with pytest.raises(ConfigError):
        IndexFile.open("/store/one", files, slots=0, entries=15)
    with pytest.raises(ConfigError):
        IndexFile.create("/store/two", 4, 1, files)
    assert file_size(files, "/store/two") is None


@pytest.mark.parametrize(
    ("form", "place", "value"),
    [("i", 36, -1), ("i", 36, 17), ("i", 32, -1), ("i", 32, 3), ("q", 16, -1), ("q", 24, -1), ("q", 16, 99)],
)
def test_impossible_headers_are_refused(form: str, place: int, value: int) -> None:
    files = memory()
    file = one_file(files)
    file.put(1, 10, BEGIN)
    file.file.buffer[place : place + struct.calcsize(form)] = struct.pack(">" + form, value)
    for writable in (False, True):
        with pytest.raises(CorruptionError) as caught:
            IndexFile.open("/store/one", files, slots=4, entries=16, writable=writable)
        assert caught.value.kind == "header"


def test_a_place_before_the_last_is_refused() -> None:
    file = one_file()
    file.put(1, 10, BEGIN)
    with pytest.raises(ValueError, match="before the last"):
        file.put(1, 9, BEGIN)
    assert file.header.index_count == 2


def test_read_only_and_closed_handles_refuse() -> None:
    files = memory()
    one_file(files).close()
    file = IndexFile.open("/store/one", files, slots=4, entries=16)
    with pytest.raises(ReadOnlyError):
        file.put(1, 1, 1)
    with file:
        file.release_mapping()
        assert file.header.index_count == 1
    with pytest.raises(StoreClosedError):
        _ = file.header


# ------------------------------------------------------------------------------------------ queries of a file


def entry(file: IndexFile, number: int, **changes: int) -> None:
    at = 40 + 4 * file.max_slots + 20 * number
    stored = dict(
        zip(("hash", "physical", "time", "previous"), struct.unpack_from(">iqii", file.file.buffer, at), strict=True)
    )
    file.file.buffer[at : at + 20] = struct.pack(">iqii", *{**stored, **changes}.values())


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"previous": 0}, [4, 3]),
        ({"previous": -1}, [4, 3]),
        ({"previous": 99}, [4, 3]),
        ({"previous": 3}, [4, 3]),  # points to itself
        ({"previous": 1}, [4, 3, 1]),
        ({"previous": 5}, [4, 3, 0]),  # 4.9 follows a pointer to the next entry, which is still zero
        ({"time": -1}, [4]),
        ({"hash": 2}, [4, 2, 1]),
    ],
)  # fmt: skip
def test_damaged_chains_end_where_they_do_in_4_9(changes: dict[str, int], expected: list[int]) -> None:
    file = one_file(slots=1)
    for n in range(1, 5):
        file.put(0 if expected[-1] == 0 else 1, n, BEGIN)
    entry(file, 3, **changes)
    assert found(file, 0 if expected[-1] == 0 else 1) == expected


@pytest.mark.parametrize(("number", "previous"), [(3, 4), (1, 4), (1, 3)])
def test_circles_are_reported(number: int, previous: int) -> None:
    file = one_file(slots=1)
    for n in range(1, 5):
        file.put(1, n, BEGIN)
    entry(file, number, previous=previous)
    with pytest.raises(CorruptionError) as caught:
        found(file, 1)
    assert (caught.value.kind, caught.value.offset) == ("entry", 44 + 20 * number)
    assert found(file, 1, most=2) == [4, 3]


def test_a_slot_beyond_the_file_is_not_followed() -> None:
    file = one_file(slots=1, entries=4)
    for n in range(3):
        file.put(1, n, BEGIN)
    file.file.buffer[40:44] = struct.pack(">i", 4)
    assert found(file, 1) == []


# ------------------------------------------------------------------------------------------ files of a folder


def test_names_are_times_and_never_twice() -> None:
    files = memory()
    now = [NOW]
    index = open_index(files, slots=1, entries=2, now_ms=lambda: now[0])
    for n, moment in enumerate((NOW, NOW, NOW - 5, NOW + 86_400_000)):
        now[0] = moment
        index.append_many([(n, BEGIN, [1])])
    assert [file.name for file in index.files] == [
        "20261120045452070",
        "20261120045452071",
        "20261120045452072",
        "20261121045452070",
    ]
    assert [file.name for file in open_index(files, slots=1, entries=2).files] == [f.name for f in index.files]


@pytest.mark.parametrize("moment", [-1, 10**18])
def test_any_time_names_a_file(moment: int) -> None:
    index = open_index(memory(), now_ms=lambda: moment)
    index.append_many([(0, BEGIN, [1])])
    assert len(index.files[0].name) == 17


def test_there_is_a_last_name() -> None:
    files = memory()
    index = open_index(files, slots=1, entries=2, now_ms=lambda: 10**18)
    index.append_many([(0, BEGIN, [1])])
    with pytest.raises(CorruptionError):
        index.append_many([(1, BEGIN, [1])])


def test_a_record_that_fills_a_file_makes_none() -> None:
    index = open_index(memory())
    index.append_many([(5, BEGIN, ()), (7, BEGIN + 1, [1] * 7)])
    assert len(index.files) == 1
    index.append_many([(9, BEGIN + 2, [2] * 9), (12, BEGIN + 3, ())])
    assert [file.header.index_count for file in index.files] == [8, 8, 3]
    assert index.full_timestamp_ms == BEGIN + 2
    assert (index.end_physical_offset, index.end_timestamp_ms) == (9, BEGIN + 2)
    assert index.last_record() == (9, 9)


def test_an_empty_folder() -> None:
    index = open_index(memory(), writable=False)
    assert index.query(TOPIC, "k") == []
    assert index.files == []
    assert (index.end_physical_offset, index.end_timestamp_ms, index.full_timestamp_ms) == (0, 0, 0)
    assert index.last_record() == (0, 0)
    with pytest.raises(ReadOnlyError):
        index.delete_before(0)
    with pytest.raises(ReadOnlyError):
        index.append_many([(0, 0, [])])
    index.close()
    index.close()
    with pytest.raises(StoreClosedError):
        index.query(TOPIC, "k")
    with pytest.raises(ConfigError):
        open_index(memory(), entries=1)


@pytest.fixture
def three_files() -> KeyIndex:
    """Return an index of three files with seven, seven and two entries, at places 0, 10, 20, … and one second apart."""
    index = open_index(memory())
    index.append_many([(10 * n, BEGIN + 1000 * n, (HASHES[0],)) for n in range(16)])
    return index


def test_files_are_deleted_by_name(three_files: KeyIndex) -> None:
    paths = [file.path for file in three_files.files]
    assert [three_files.delete(file.name) for file in reversed(three_files.files[1:])] == [paths[2], paths[1]]
    three_files.append_many([(55, BEGIN, [1])])  # before the end of the remaining files
    assert three_files.end_physical_offset == 60
    assert [file.header.index_count for file in three_files.files] == [8, 1]
    with pytest.raises(ValueError, match="no index file"):
        three_files.delete("nothing")
    assert three_files.delete(three_files.files[0].name) == paths[0]
    assert three_files.delete(three_files.files[0].name)
    assert three_files.files == []
    three_files.append_many([(0, BEGIN, [1])])
    assert three_files.last_record() == (0, 1)


def test_names_in_the_folder(tmp_path: Path) -> None:
    files = DiskFiles()
    folder = tmp_path / "index"
    with open_index(files, str(folder)) as index:
        index.append_many([(0, BEGIN, [1])])
    (folder / "notes.txt").write_text("not a number: passed over")
    (folder / "folder").mkdir()
    assert len(open_index(files, str(folder)).files) == 1
    for name in ("2026112004545207", "20261320045452070", "20261120045460070", "99", "202611200454520701"):
        (folder / name).write_bytes(bytes(file_length(4, 8)))
        with pytest.raises(CorruptionError) as caught:
            open_index(files, str(folder))
        assert (caught.value.file, caught.value.kind) == (str(folder / name), "name")
        (folder / name).unlink()
    (folder / "20261120045452099").mkdir()
    with pytest.raises(CorruptionError):
        open_index(files, str(folder))


@pytest.mark.parametrize("length", [0, 1, file_length(4, 8) - 1, file_length(4, 8) + 1])
def test_lengths_in_the_folder(tmp_path: Path, length: int) -> None:
    path = tmp_path / "20261120045452070"
    path.write_bytes(bytes(length))
    with pytest.raises(CorruptionError) as caught:
        open_index(DiskFiles(), str(tmp_path))
    assert (caught.value.file, caught.value.kind) == (str(path), "size")


def test_the_default_file_is_sparse(tmp_path: Path) -> None:
    with KeyIndex.open(str(tmp_path / "index"), now_ms=lambda: NOW) as index:
        index.append_many([(2**40, BEGIN, HASHES)])
        index.append_many([(2**40 + 1, BEGIN, HASHES[:2])])
        assert index.query(TOPIC, KEYS[1]) == [2**40 + 1, 2**40]
        path = index.files[0].path
    status = Path(path).stat()
    assert status.st_size == 40 + 4 * 5_000_000 + 20 * 20_000_000
    assert status.st_blocks * 512 < 30 << 20
    with IndexFile.open(path) as file:
        assert file.entries()["hash"].tolist() == [*HASHES, *HASHES[:2]]
        assert len(file.slots()) == len(HASHES)


def test_few_files_are_mapped_at_a_time(tmp_path: Path) -> None:
    def mapped() -> int:
        return sum(file._file is not None for file in index.files)

    with open_index(DiskFiles(), str(tmp_path), entries=2) as index:
        index.append_many([(n, BEGIN, HASHES[:1]) for n in range(200)])
        assert len(index.files) == 200
        assert mapped() <= 32
        assert len(index.query(TOPIC, KEYS[0], max_results=500)) == 200
        assert mapped() <= 32
    with open_index(DiskFiles(), str(tmp_path), entries=2, writable=False) as index:
        assert mapped() <= 32
        assert index.last_record() == (199, 1)


class CountingFiles(MemoryFiles):
    """Files that count flushes, and refuse to allocate or flush on request."""

    def __init__(self) -> None:
        super().__init__()
        self.flushed: list[str] = []
        self.fails = False

    def flush(self, file: File, begin: int = 0, end: int | None = None) -> None:
        self._refuse("flush", file.path)
        self.flushed.append(file.path)

    def flush_folder(self, path: str) -> None:
        self._refuse("flush the folder", path)
        self.flushed.append(path)

    def reserve(self, file: File, begin: int, end: int) -> None:
        self._refuse("allocate", file.path)
        assert 0 <= begin < end <= file.size

    def _refuse(self, call: str, path: str) -> None:
        if self.fails:
            raise StoreIOError(call, path, OSError(28, "No space left on device"))


def test_flush_covers_exactly_what_was_written() -> None:
    files = CountingFiles()
    files.make_folder("/store/index")
    index = open_index(files)
    index.append_many([(n, BEGIN, HASHES) for n in range(2)])
    paths = [file.path for file in index.files]
    files.fails = True
    with pytest.raises(StoreIOError):
        index.flush()
    files.fails = False
    index.flush()
    assert files.flushed == ["/store", *paths, "/store/index"]  # the folder's name once, before its first file
    index.flush()
    index.append_many([(9, BEGIN, [])])
    index.append_many([(9, BEGIN, [1])])
    index.flush()
    assert files.flushed == ["/store", *paths, "/store/index", paths[1]]
    index.close()
    assert len(files.flushed) == 5


def test_a_full_disk_leaves_nothing_behind() -> None:
    files = CountingFiles()
    index = open_index(files, entries=2000)
    files.fails = True
    with pytest.raises(StoreIOError):
        index.append_many([(0, BEGIN, [1])])
    assert index.files == []
    assert files.list("/store/index") == []
    files.fails = False
    index.append_many([(0, BEGIN, [1])])
    before = contents(files)
    files.fails = True
    for records in ([(1, BEGIN, [2] * 210)], [(1, BEGIN, [2] * 600)]):
        with pytest.raises(StoreIOError):
            index.append_many(records)
        assert contents(files) == before
    files.fails = False
    index.append_many([(1, BEGIN, [2] * 600)])
    assert index.last_record() == (1, 600)


# ------------------------------------------------------------------------------------- between any two writes


class WatchedBuffer(mmap.mmap):
    """A buffer that calls ``before_write`` before each assignment to a slice."""

    before_write: Callable[[], None]

    def __setitem__(self, key: int | slice, value: int | bytes) -> None:  # type: ignore[override]
        self.before_write()
        super().__setitem__(key, value)  # type: ignore[index, assignment]


class WatchedFiles(MemoryFiles):
    """Files in memory that call ``watch`` before each write."""

    def __init__(self, watch: Callable[[], None]) -> None:
        super().__init__()
        self.make_folder("/store")
        self.watch = watch

    def create(self, path: str, size: int, *, keep_descriptor: bool = False) -> File:
        file = super().create(path, size)
        buffer = WatchedBuffer(-1, size)
        buffer.before_write = lambda: self.watch()
        file.buffer = buffer
        return file


def copy_of(found: dict[str, bytes]) -> MemoryFiles:
    return in_memory({f"index/{name}": data for name, data in found.items()})


def batches(sizes: Sequence[int]) -> list[list[Record]]:
    """Return records with none to three keys each; some keys share a slot, and every place and time differs."""
    result, number = [], 0
    for size in sizes:
        batch = []
        for _ in range(size):
            keys = tuple(HASHES[(number * 5 + n) % len(HASHES)] for n in range((2, 2, 1, 0, 3)[number % 5]))
            batch.append((100 * number, BEGIN + 700 * number, keys))
            number += 1
        result.append(batch)
    return result


def append_all(index: KeyIndex, batches: Iterable[Sequence[Record]]) -> None:
    for batch in batches:
        index.append_many(batch)


def append_from(index: KeyIndex, records: Iterable[Record]) -> None:
    """Continue as a recovery does: from the last indexed record, skipping its keys that are already indexed."""
    physical, keys = index.last_record()
    for record in records:
        if record[0] == physical:
            index.append_many([(record[0], record[1], record[2][keys:])])
        elif record[0] > physical:
            index.append_many([record])


BATCHES = batches([1, 1, 3, 9, 1, 12, 2])


@pytest.fixture(params=[2, 1000], ids=["arrays", "loop"])
def _both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keyindex, "BLOCK", request.param)


@many
@pytest.mark.usefixtures("_both_ways")
@pytest.mark.parametrize(("slots", "entries"), [(3, 128), (4, 8), (1, 2), (1000, 16)])
def test_a_successor_continues_after_a_death_between_writes(slots: int, entries: int) -> None:
    images: list[dict[str, bytes]] = []
    files = WatchedFiles(lambda: images.append(contents(files)))
    append_all(open_index(files, slots=slots, entries=entries), BATCHES)
    expected = contents(files)
    records = [record for batch in BATCHES for record in batch]
    assert len(images) > 20
    for image in some(images):
        after = copy_of(image)
        append_from(open_index(after, slots=slots, entries=entries), records)
        assert contents(after) == expected


@pytest.mark.usefixtures("_both_ways")
@pytest.mark.parametrize(("slots", "entries"), [(3, 128), (1000, 128)])
def test_entries_without_their_header_are_removed(slots: int, entries: int) -> None:
    images: list[dict[str, bytes]] = []
    files = WatchedFiles(lambda: images.append(contents(files)))
    index = open_index(files, slots=slots, entries=entries)
    for batch in BATCHES:
        before = contents(files)
        images.clear()
        index.append_many(batch)
        for image in images:
            if before:
                after = copy_of(image)
                open_index(after, slots=slots, entries=entries)
                assert contents(after) == before


@pytest.mark.slow
@pytest.mark.usefixtures("_both_ways")
@pytest.mark.parametrize(("slots", "entries"), [(3, 128), (1000, 16)])
def test_a_write_that_fails_can_be_repeated(slots: int, entries: int) -> None:
    calm = memory()
    append_all(open_index(calm, slots=slots, entries=entries), BATCHES)
    records = [record for batch in BATCHES for record in batch]
    total = 0

    def count() -> None:
        nonlocal total
        total += 1

    append_all(open_index(WatchedFiles(count), slots=slots, entries=entries), BATCHES)
    for failing in range(total):
        left = failing

        def fail() -> None:
            nonlocal left
            left -= 1
            if left == -1:
                raise RuntimeError("this write fails")

        files = WatchedFiles(fail)
        index = open_index(files, slots=slots, entries=entries)
        with pytest.raises(RuntimeError):
            append_all(index, BATCHES)
        append_from(index, records)
        assert contents(files) == contents(calm)


@pytest.mark.usefixtures("_both_ways")
@pytest.mark.parametrize(("slots", "entries"), [(3, 128), (4, 8)])
def test_readers_miss_nothing_between_two_writes(slots: int, entries: int) -> None:
    old: list[list[int]] = [[] for _ in KEYS]
    seen = 0

    def look() -> None:
        nonlocal seen
        for key, before in zip(KEYS, old, strict=True):
            now = index.query(TOPIC, key)
            assert now[len(now) - len(before) :] == before
            assert now == sorted(now, reverse=True)
            seen += 1

    files = WatchedFiles(lambda: None)
    index = open_index(files, slots=slots, entries=entries)
    files.watch = look
    for batch in BATCHES:
        index.append_many(batch)
        old = [index.query(TOPIC, key) for key in KEYS]
    assert seen > 100
    assert all(old)


@pytest.mark.usefixtures("_both_ways")
def test_a_write_that_ends_during_a_read_hides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader sees the new slot but the header from before the write."""
    at_header, go_on = threading.Semaphore(0), threading.Semaphore(0)
    writes = 0
    last = -1

    def hold_the_header_up() -> None:
        nonlocal writes
        writes += 1
        if writes == last:
            at_header.release()
            go_on.acquire()

    def with_two() -> KeyIndex:
        files = WatchedFiles(lambda: None)
        index = open_index(files, slots=3, entries=128)
        index.append_many([(100, BEGIN, HASHES[1:2]), (200, BEGIN, HASHES[1:2])])
        files.watch = hold_the_header_up
        return index

    two_more = [(300, BEGIN, HASHES[1:2]), (400, BEGIN, HASHES[1:2])]
    with_two().append_many(two_more)
    writes, last = 0, writes  # the header is written last
    index = with_two()
    (file,) = index.files
    header = IndexFile.header
    writer = threading.Thread(target=index.append_many, args=(two_more,))
    writer.start()
    at_header.acquire()

    def slow_header(file: IndexFile) -> IndexHeader:
        before = header.__get__(file)
        go_on.release()
        writer.join()
        assert isinstance(before, IndexHeader)
        return before

    with monkeypatch.context() as patch:
        patch.setattr(IndexFile, "header", property(slow_header))
        now = found(file, HASHES[1])
    assert now[-2:] == [200, 100]


def test_a_wrong_count_loses_nothing() -> None:
    """A damaged header counts too few entries; those after it are not taken for an interrupted write."""
    files = memory()
    with open_index(files, entries=64) as index:
        index.append_many([(n, BEGIN, HASHES) for n in range(8)])
        index.files[0].file.buffer[32:40] = struct.pack(">ii", 1, 5)
    before = contents(files)
    open_index(files, entries=64).close()
    assert contents(files) == before


def test_keys_are_strings(tmp_path: Path) -> None:
    with KeyIndex.open(tmp_path, slots=10, entries=20) as index:
        index.append("orders", ["a", "größe"], 100, BEGIN)
        index.append("other", ["a"], 200, BEGIN)
        index.append("orders", [], 300, BEGIN)
        index.append("orders", ["a"], 400, BEGIN)
        assert index.query("orders", "a") == [400, 100]
        assert [index.query("orders", "größe"), index.query("other", "a")] == [[100], [200]]
        for topic, keys in (("orders", "a"), ("orders", [b"a"]), ("orders", [1]), (b"orders", ["a"])):
            with pytest.raises(TypeError, match="expected a topic and a sequence of keys as text"):
                index.append(topic, keys, 500, BEGIN)  # type: ignore[arg-type]
        questions: list[tuple[Any, Any]] = [(b"orders", "a"), ("orders", b"a"), ("orders", None)]
        for question in questions:
            with pytest.raises(TypeError, match="expected a topic and a key as text"):
                index.query(*question)
        wrong: list[tuple[Any, ...]] = [("", ["a"], 500, BEGIN), ("t", [""], 500, BEGIN), ("t", ["a"], -1, BEGIN)]
        wrong += [
            ("t", ["a"], "500", BEGIN),
            ("t", ["a"], 500, 1.5),
            ("t", ["a"], 1 << 70, BEGIN),
            ("t", ["a"], 500, -1),
        ]
        for values in wrong:
            with pytest.raises(ValueError, match="expected"):
                index.append(*values)
        assert index.last_record() == (400, 1)


def test_an_index_alone_refuses_what_is_no_geometry(tmp_path: Path) -> None:
    wrong: list[tuple[Any, Any]] = [(0, 20), (10, 1), ("10", 20), (10, 20.0), (1.5, 20), (None, 20)]
    for slots, entries in wrong:
        with pytest.raises(ConfigError, match="expected at least 1 slot and 2 entries"):
            KeyIndex.open(tmp_path, slots=slots, entries=entries)
    assert list(tmp_path.iterdir()) == []
