"""Rolling files: names and lengths, positions, few mappings, reserving, flushing, clearing, deleting."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from librmq.errors import CorruptionError, ReadOnlyError, StoreIOError
from librmq.files._disk import DiskFiles
from librmq.files._memory import MemoryFiles
from librmq.files.interface import File, is_folder
from librmq.files.rolling import MappedFileQueue, MappingPool, file_name
from tests.file_seams import FailingFiles
from tests.interrupting import interrupted_at_call

SIZE = 64


class Recording(MemoryFiles):
    """Files that record calls and fail on request."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.failing = ""

    def note(self, call: str, path: str) -> None:
        self.calls.append(f"{call} {os.path.basename(path).lstrip('0') or '0'}")
        if self.calls[-1] == self.failing:
            raise StoreIOError(call, path, OSError(5, "told to fail"))

    def open(self, path: str, *, writable: bool = False, keep_descriptor: bool = False) -> File:
        self.note("open", path)
        return super().open(path, writable=writable, keep_descriptor=keep_descriptor)

    def flush(self, file: File, begin: int = 0, end: int | None = None) -> None:
        self.note("flush", file.path)

    def flush_folder(self, path: str) -> None:
        self.note("flush", path)

    def delete(self, path: str) -> None:
        self.note("delete", path)
        super().delete(path)

    def reserve(self, file: File, begin: int, end: int) -> None:
        self.note(f"reserve {begin} to {end} of", file.path)


def opened(files: MemoryFiles, size: int = SIZE, limit: int = 9, *, writable: bool = True) -> MappedFileQueue:
    return MappedFileQueue("/s", size, files, MappingPool(limit), writable=writable)


def made(files: MemoryFiles, count: int, first: int = 0, limit: int = 9) -> MappedFileQueue:
    """Return a sequence of some files, the n-th filled with the byte n."""
    files.make_folder("/s")
    queue = opened(files, limit=limit)
    for n in range(first, first + count):
        queue.create(n * SIZE).buffer[:] = bytes([n]) * SIZE
    return queue


# --------------------------------------------------------------------------- names, lengths, positions


@pytest.mark.parametrize(("position", "name"), [(0, "0" * 20), (1 << 62, "04611686018427387904")])
def test_names_have_20_digits(position: int, name: str) -> None:
    assert file_name(position) == name


def test_a_folder_that_does_not_exist_is_an_empty_sequence() -> None:
    files = MemoryFiles()
    queue = opened(files)
    assert (queue.starts, queue.begin, queue.end) == ([], 0, 0)
    assert queue.start_of(0) is None
    assert queue.file_at(0) is None
    queue.flush()
    assert not is_folder(files, "/s")


def test_positions_lead_to_files() -> None:
    files = MemoryFiles()
    made(files, 3, first=2)
    queue = opened(files, writable=False)
    assert (queue.starts, queue.begin, queue.end) == ([128, 192, 256], 128, 320)
    assert [queue.start_of(at) for at in (-1, 0, 127, 128, 191, 192, 319, 320)] == [
        None, None, None, 128, 128, 192, 256, None,
    ]  # fmt: skip
    found = queue.file_at(200)
    assert found is not None
    assert found.buffer[:] == b"\3" * SIZE
    assert found.path == queue.path(192) == f"/s/{192:020d}"


FOREIGN = [
    "x",
    "0",
    "9" * 20,
    "\u0660" * 20,  # digits, but not ASCII ones
    f"{65:020d}",
    f"{SIZE:021d}",
    f"{SIZE:020d}.tmp",
    f"{-SIZE:020d}",
    f"{1 << 63:020d}",
    f"{(1 << 63) - SIZE:020d}",
    f"{2 * SIZE:020d}",
]


@pytest.mark.parametrize("name", FOREIGN, ids=ascii)
def test_a_name_that_does_not_follow_is_reported(name: str) -> None:
    files = MemoryFiles()
    made(files, 1)
    files.write(f"/s/{name}", bytes(SIZE))
    with pytest.raises(CorruptionError) as told:
        opened(files)
    assert (told.value.file, told.value.kind) == (f"/s/{name}", "name")


def test_a_gap_is_reported_with_the_missing_file() -> None:
    files = MemoryFiles()
    made(files, 4)
    files.delete(f"/s/{SIZE:020d}")
    with pytest.raises(CorruptionError, match=f"expected {SIZE:020d} after {0:020d}"):
        opened(files)


def test_a_folder_is_not_a_file() -> None:
    files = MemoryFiles()
    files.make_folder(f"/s/{0:020d}")
    with pytest.raises(CorruptionError):
        opened(files)


@pytest.mark.parametrize("length", [0, 1, SIZE - 1, SIZE + 1])
def test_a_wrong_length_is_reported(length: int) -> None:
    files = MemoryFiles()
    made(files, 1)
    files.write(f"/s/{SIZE:020d}", bytes(length))
    with pytest.raises(CorruptionError, match=f"expected {SIZE} bytes, found {length}") as told:
        opened(files)
    assert (told.value.kind, told.value.offset) == ("size", min(length, SIZE))


def test_a_length_that_changed_since_is_reported() -> None:
    files = MemoryFiles()
    made(files, 2)
    queue = opened(files)
    files.write(f"/s/{SIZE:020d}", bytes(7))
    with pytest.raises(CorruptionError, match="found 7"):
        queue.file_at(SIZE)


def test_refreshing_shows_changes_by_another_process() -> None:
    files = MemoryFiles()
    queue = made(files, 1)
    reader = opened(files, writable=False)
    queue.create(SIZE)
    assert reader.end == SIZE
    reader.refresh()
    assert reader.end == 2 * SIZE


# ---------------------------------------------------------------------------------------- few mappings


def test_no_more_files_are_mapped_than_the_pool_allows() -> None:
    files = Recording()
    queue = made(files, 6, limit=2)
    assert sorted(queue.mapped) == [4 * SIZE, 5 * SIZE]
    held = queue.file(0)
    for n in range(6):
        assert queue.file(n * SIZE).buffer[0] == n
    assert len(queue.mapped) == 2
    held.buffer[0] = 77  # code that holds a file keeps using it
    assert queue.file(0).buffer[0] == 77
    queue.unmap_all()
    assert not queue.mapped


def test_the_pool_is_shared_and_lets_the_oldest_go() -> None:
    files = MemoryFiles()
    pool = MappingPool(3)
    queues = [MappedFileQueue(f"/{n}", SIZE, files, pool) for n in range(3)]
    for queue in queues:
        queue.create(0)
    queues[0].create(SIZE)
    assert [sorted(queue.mapped) for queue in queues] == [[SIZE], [0], [0]]


def test_a_file_that_is_mapped_again_stays_mapped(tmp_path: Path) -> None:
    queue = MappedFileQueue(str(tmp_path), SIZE, DiskFiles(), MappingPool(2))
    queue.create(0)
    for _ in range(3):
        queue.unmap(0)
        assert queue.file(0) is queue.file(0)


def test_descriptors_are_bounded_on_disk(tmp_path: Path) -> None:
    queue = MappedFileQueue(str(tmp_path), SIZE, DiskFiles(), MappingPool(3), durable=True)
    for n in range(20):
        queue.create(n * SIZE).buffer[0] = n
    for n in range(20):
        assert queue.file(n * SIZE).buffer[0] == n
    descriptors = [file.descriptor for file in queue.mapped.values()]
    assert len(descriptors) == 3
    assert min(descriptors) >= 0


def test_few_uses_of_an_unmapped_file_map_no_file(tmp_path: Path) -> None:
    """The bytes are those that mappings show, and a later flush includes them."""
    files, pool = FailingFiles(DiskFiles()), MappingPool(1)
    queue, other = (MappedFileQueue(str(tmp_path / name), SIZE, files, pool) for name in ("a", "b"))
    reader = queue.create(0)
    queue.flush()
    other.create(0)  # drops the only mapping
    for n in range(10):
        queue.write(0, n, bytes([n + 1]))
    assert queue.read(0, 20) == reader.buffer[:20] == bytes(range(1, 11)) + bytes(10)
    assert queue.read(SIZE - 1, SIZE + 3) == b"\0"
    assert queue.read(SIZE, SIZE + 1) == b""
    assert files.calls["open"] == 0
    queue.flush()
    queue.flush()
    assert files.calls["open"] == 1


def test_a_file_that_is_used_often_is_mapped(tmp_path: Path) -> None:
    """So a busy queue among thousands of others keeps its mapping most of the time."""
    files, pool = FailingFiles(DiskFiles()), MappingPool(1)
    queue, other = (MappedFileQueue(str(tmp_path / name), SIZE, files, pool) for name in ("a", "b"))
    queue.create(0)
    other.create(0)
    for _ in range(1000):
        queue.write(0, 5, b"abc")
        assert queue.read(5, 8) == b"abc"
    assert files.calls["open"] == 1


@pytest.mark.parametrize("size", [10, 5000])
def test_a_small_file_is_read_without_a_mapping_until_it_is_written(tmp_path: Path, size: int) -> None:
    """Read often it is mapped too, unless it is so short that it is kept in memory."""
    data, files, pool = bytes(range(1, 11)) * (size // 10), FailingFiles(DiskFiles()), MappingPool(4)
    MappedFileQueue(str(tmp_path), 8192, files, pool).create(0).buffer[:size] = data
    queue = MappedFileQueue(str(tmp_path), 8192, files, pool, reads_small=True)
    queue.keep_little()
    assert (queue.small, queue.data_behind(4), queue.used_end(0, 6000)) == (data, size - 4, 6000)
    assert queue.read(4, size + 4) == data[4:] + bytes(4)
    assert queue.read(8190, 8200) == bytes(2)
    queue.write_again(4, size)
    queue.flush()
    assert (queue.starts, queue.mapped, queue.small) == ([0], {}, data)
    for _ in range(100):
        assert queue.read(2, 4) == data[2:4]
    assert list(queue.mapped) == ([0] if size > 1024 else [])
    queue.write(0, 2, b"new")
    assert queue.small is None
    assert (queue.read(0, 6), queue.data_behind(0)) == (data[:2] + b"new" + data[5:6], size)
    queue.unmap_all()
    assert queue.read(0, 6) == data[:2] + b"new" + data[5:6]


@pytest.mark.parametrize("change", [MappedFileQueue.refresh, lambda queue: queue.create(SIZE).buffer[0]])
def test_a_small_file_is_not_taken_for_the_only_one_afterwards(
    tmp_path: Path, change: Callable[[MappedFileQueue], object]
) -> None:
    MappedFileQueue(str(tmp_path), SIZE, DiskFiles(), MappingPool(1)).create(0).buffer[3] = 7
    queue = MappedFileQueue(str(tmp_path), SIZE, DiskFiles(), MappingPool(1), reads_small=True)
    assert queue.small == b"\0\0\0\7"
    change(queue)
    assert queue.small is None
    assert (queue.read(0, 4), queue.data_behind(2)) == (b"\0\0\0\7", 2)


def test_a_small_file_that_a_snapshot_shares_is_not_written_again(tmp_path: Path) -> None:
    MappedFileQueue(str(tmp_path / "q"), SIZE, DiskFiles(), MappingPool(1)).create(0).buffer[3] = 7
    queue = MappedFileQueue(str(tmp_path / "q"), SIZE, DiskFiles(), MappingPool(1), reads_small=True)
    os.link(queue.path(0), tmp_path / "snapshot")
    os.utime(queue.path(0), ns=(1, 1))
    queue.write_again(0, 4)
    queue.flush()
    assert (tmp_path / "snapshot").stat().st_mtime_ns == 1


def test_the_length_of_an_unmapped_file_is_checked(tmp_path: Path) -> None:
    pool = MappingPool(1)
    queue, other = (MappedFileQueue(str(tmp_path / name), SIZE, DiskFiles(), pool) for name in ("a", "b"))
    queue.create(0)
    other.create(0)
    os.truncate(queue.path(0), 7)
    assert queue.read(0, 7) == bytes(7)
    with pytest.raises(CorruptionError, match="expected 64 bytes, found 7"):
        queue.read(0, 8)
    os.unlink(queue.path(0))
    with pytest.raises(StoreIOError):
        queue.read(0, 7)
    queue.delete_from(0)
    assert queue.read(0, 7) == b""


# --------------------------------------------------------------------------------------------- writing


@pytest.mark.parametrize("start", [0, SIZE, 3 * SIZE, 2 * SIZE + 1])
def test_only_the_next_file_can_be_made(start: int) -> None:
    queue = made(MemoryFiles(), 2)
    with pytest.raises(ValueError, match=f"expected {2 * SIZE} as the start of the next file, found {start}"):
        queue.create(start)


def test_nothing_is_written_through_a_reader() -> None:
    files = MemoryFiles()
    made(files, 2)
    queue = opened(files, writable=False)
    for write in (queue.create, queue.zero_from, queue.delete_from, queue.delete_before):
        with pytest.raises(ReadOnlyError):
            write(2 * SIZE)


@given(st.lists(st.tuples(st.integers(0, 60_000), st.integers(1, 9_000)), max_size=20))
def test_every_range_is_reserved_before_it_is_written(ranges: list[tuple[int, int]]) -> None:
    size = 65_536

    class Blocks(MemoryFiles):
        def __init__(self) -> None:
            super().__init__()
            self.sure: set[int] = set()

        def reserve(self, file: File, begin: int, end: int) -> None:
            assert 0 <= begin < end <= file.size
            self.sure |= set(range(begin, end))

    files = Blocks()
    queue = opened(files, size)
    queue.create(0)
    at = ranges[0][0] if ranges else 0
    for _, length in ranges:
        end = min(size, at + length)
        if end > at:
            assert end <= queue.reserve(0, at, end) <= size
            assert files.sure.issuperset(range(at, end))
            at = end


def test_reserving_takes_growing_steps() -> None:
    files = Recording()
    size = 1 << 22
    queue = opened(files, size)
    queue.create(0)
    for at in range(0, size, 20):
        queue.reserve(0, at, min(size, at + 20))
    assert 4 < len(files.calls) < 20
    assert files.calls[0] == "reserve 0 to 4096 of 0"
    assert files.calls[-1].split()[3] == str(size)


def test_a_file_after_a_full_one_is_reserved_at_once() -> None:
    """What has filled a file fills the next, so that no append waits for the device again and again."""
    size = 1 << 19
    files = Recording()
    queue = opened(files, size)
    for start in (0, size):
        queue.create(start)
    files.calls.clear()
    for at in range(0, size, 20):
        queue.reserve(size, at, min(size, at + 20))
    assert files.calls == [f"reserve 0 to {size} of {size}"]


def test_a_flush_covers_written_data_and_the_folder() -> None:
    files = Recording()
    queue = made(files, 3)
    for start in (0, SIZE, 0):
        queue.mark_dirty(start)
    queue.flush()
    assert files.calls == ["flush 0", "flush 64", "flush s"]
    queue.flush()
    assert len(files.calls) == 3
    queue.mark_dirty(2 * SIZE)
    queue.unmap_all()
    queue.flush()
    assert files.calls[3:] == ["open 128", "flush 128"]


def test_a_flush_covers_folders_of_a_failed_creation() -> None:
    recording = Recording()
    files = FailingFiles(recording)
    queue = MappedFileQueue("/s/topic/0", SIZE, files, MappingPool(9), writable=True)
    files.fail("create", 1, 28)
    with pytest.raises(StoreIOError, match="No space left"):
        queue.create(0)
    queue.create(0)
    queue.flush()
    assert recording.calls == ["flush 0", "flush s", "flush topic", "flush 0"]  # the root first, the folder last


@pytest.mark.parametrize("failing", ["flush 0", "flush 64", "flush s"])
def test_unflushed_files_stay_dirty(failing: str) -> None:
    files = Recording()
    queue = made(files, 2)
    queue.mark_dirty(0)
    queue.mark_dirty(SIZE)
    files.failing = failing
    with pytest.raises(StoreIOError, match="told to fail"):
        queue.flush()
    files.failing = ""
    before = files.calls.index(failing)
    del files.calls[:]
    queue.flush()
    assert files.calls == ["flush 0", "flush 64", "flush s"][before:]


def test_a_mark_made_during_a_flush_is_kept() -> None:
    class Writing(Recording):
        def flush(self, file: File, begin: int = 0, end: int | None = None) -> None:
            super().flush(file, begin, end)
            if len(self.calls) == 1:
                queue.mark_dirty(0)

    files = Writing()
    queue = made(files, 1)
    queue.mark_dirty(0)
    queue.flush()
    queue.flush()
    queue.flush()
    assert files.calls == ["flush 0", "flush s", "flush 0"]


def test_a_file_deleted_during_a_flush_is_not_a_failure() -> None:
    class Deleting(Recording):
        def flush(self, file: File, begin: int = 0, end: int | None = None) -> None:
            queue.delete_from(0)
            super().flush(file, begin, end)

    files = Deleting()
    files.failing = "flush 0"
    queue = made(files, 1)
    queue.mark_dirty(0)
    queue.flush()
    assert queue.starts == []


# ------------------------------------------------------------------------------- clearing and deleting


@pytest.mark.parametrize("position", [0, 1, 63, 64, 100, 127, 128, 500])
def test_zeros_go_to_the_end_of_the_file_only(position: int) -> None:
    files = Recording()
    queue = made(files, 3, first=0)
    queue.flush()
    del files.calls[:]
    before = b"".join(files.read(queue.path(start)) for start in queue.starts)
    queue.zero_from(position)
    after = b"".join(files.read(queue.path(start)) for start in queue.starts)
    end = position - position % SIZE + SIZE
    assert after == before if position >= 3 * SIZE else before[:position] + bytes(end - position) + before[end:]
    assert bool(files.calls) == (after != before)
    queue.flush()
    assert [call for call in files.calls if call.startswith("flush")] == (
        [f"flush {position // SIZE * SIZE}"] if after != before else []
    )


def test_files_are_deleted_from_either_end() -> None:
    files = MemoryFiles()
    queue = made(files, 6)
    assert queue.delete_before(SIZE - 1) == []
    assert queue.delete_before(2 * SIZE) == [queue.path(0), queue.path(SIZE)]
    assert queue.delete_from(5 * SIZE + 1) == []
    assert queue.delete_from(3 * SIZE + 1) == [queue.path(5 * SIZE), queue.path(4 * SIZE)]
    assert queue.starts == opened(files).starts == [2 * SIZE, 3 * SIZE]
    assert sorted(queue.mapped) == [2 * SIZE, 3 * SIZE]
    queue.create(4 * SIZE)
    assert queue.file(4 * SIZE).buffer[:] == bytes(SIZE)


def test_a_file_that_could_not_be_deleted_is_still_there() -> None:
    files = Recording()
    queue = made(files, 3)
    files.failing = "delete 64"
    with pytest.raises(StoreIOError):
        queue.delete_from(0)
    assert queue.starts == opened(files).starts == [0, SIZE]
    assert queue.file(SIZE).buffer[:] == b"\1" * SIZE


def test_a_reader_that_is_too_late_finds_nothing() -> None:
    class Late(Recording):
        def open(self, path: str, *, writable: bool = False, keep_descriptor: bool = False) -> File:
            queue.delete_before(SIZE)
            return super().open(path, writable=writable, keep_descriptor=keep_descriptor)

    files = Late()
    queue = made(files, 2)
    queue.unmap_all()
    assert queue.file_at(0) is None
    files.delete(queue.path(SIZE))
    with pytest.raises(StoreIOError):  # a file that is on the list but missing is an error
        queue.file_at(SIZE)


# Ctrl-C, sent as a real signal at each call, while the next file of a sequence is created.


def test_a_file_of_an_interrupted_creation_is_recreated(tmp_path: Path) -> None:
    number, came = 0, True
    while came:
        pool = MappingPool(4)
        files = MappedFileQueue(str(tmp_path / f"{number}"), 4096, DiskFiles(), pool, durable=bool(number % 2))
        files.create(0)
        came = interrupted_at_call(number, partial(files.create, 4096))
        if 4096 not in files.starts:
            files.create(4096)
        assert files.starts == [0, 4096]
        files.file(4096).buffer[:4] = b"here"
        files.flush()
        again = MappedFileQueue(files.folder, 4096, DiskFiles(), pool)
        assert again.starts == [0, 4096]
        assert again.file(4096).buffer[:4] == b"here"
        number += 1
    assert number >= 5
