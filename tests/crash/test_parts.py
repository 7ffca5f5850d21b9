"""After a part of a store is flushed or closed, a crash loses nothing of it; files are deleted one by one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from librmq import Message
from librmq.commitlog import CommitLog
from librmq.consumequeue import ConsumeQueue, begin_together
from librmq.consumequeue_entries import ENTRY
from librmq.errors import StoreIOError
from librmq.files.interface import Files
from librmq.files.rolling import MappedFileQueue, MappingPool
from librmq.store.engine._durability import flush_all
from librmq.store.format._keyindex import KeyIndex
from librmq.store.format.directory import clear_abort, set_abort
from librmq.store.format.indexfile import FRESH, IndexFile
from librmq.store.recovery._index_check import find_flaw
from tests.crash.runs import assert_settled
from tests.file_seams import CrashImages, FailingFiles, RecordingFiles, on_a_disk
from tests.stores import START_MS

LOG_FILE = 1024
BODY = 400 - 91 - 1  # of a record of 400 bytes with a topic of one


# -------------------------------------------------------------------------------------------------------- the log


def log_of(files: RecordingFiles, count: int) -> CommitLog:
    log = CommitLog.open("/s/log", LOG_FILE, files=files)
    for _ in range(count):
        log.append(Message("T", bytes(BODY)))
    return log


LOG_CHANGES: dict[str, Callable[[CommitLog], object]] = {
    "appended": lambda log: None,
    "patched": lambda log: log.patch(5, b"other"),
    "truncated": lambda log: log.truncate(LOG_FILE + 10),
    "deleted": lambda log: log.delete_before(LOG_FILE),
}


@pytest.mark.parametrize("change", LOG_CHANGES)
@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_the_log(change: str, count: int) -> None:
    files = on_a_disk("/s")
    log = log_of(files, count)
    log.flush()
    assert_settled(files)
    LOG_CHANGES[change](log)
    log.flush()
    assert_settled(files)


# ------------------------------------------------------------------------------------------------------- a queue


def queue_of(files: Files, count: int = 0, queue_id: int = 0) -> ConsumeQueue:
    """Return a queue with files of five entries and of three units; every entry has a unit."""
    folder, ext_folder = f"/s/q/T/{queue_id}", f"/s/e/T/{queue_id}"
    queue = ConsumeQueue.open(folder, 100, files=files, ext_folder=ext_folder, ext_file_size=64)
    append(queue, count)
    return queue


def append(queue: ConsumeQueue, count: int) -> None:
    assert queue.ext is not None
    for number in range(queue.max_offset, queue.max_offset + count):
        queue.append(number, 10 * number, 10, queue.ext.put(number, START_MS, None))


def append_many(queue: ConsumeQueue) -> None:
    begin = queue.max_offset
    queue.append_many(begin, b"".join(ENTRY.pack(10 * number, 10, 0) for number in range(begin, begin + 7)))


QUEUE_CHANGES: dict[str, Callable[[ConsumeQueue], object]] = {
    "appended": lambda queue: append(queue, 3),
    "appended many": append_many,
    "truncated": lambda queue: queue.truncate_to(7),
    "truncated by place": lambda queue: queue.truncate_after(65),
    "cleared": lambda queue: queue.clear(),
    "trimmed": lambda queue: queue.trim(90),
}


@pytest.mark.parametrize("change", QUEUE_CHANGES)
@pytest.mark.parametrize("end", [ConsumeQueue.flush, ConsumeQueue.close])
def test_a_queue(change: str, end: Callable[[ConsumeQueue], None]) -> None:
    files = on_a_disk("/s")
    queue = queue_of(files, 12)
    queue.flush()
    assert_settled(files)
    QUEUE_CHANGES[change](queue)
    end(queue)
    assert_settled(files)


def test_units_that_are_closed_alone() -> None:
    files = on_a_disk("/s")
    queue = queue_of(files)
    assert queue.ext is not None
    queue.ext.put(1, START_MS, None)
    queue.ext.close()
    assert_settled(files)


@pytest.mark.parametrize("units_of_none", [0, 4])
@pytest.mark.parametrize("vouched", [0, 4])
def test_units_of_a_dead_writer_are_written_again(vouched: int, units_of_none: int) -> None:
    """Units without entries come first, because their writer died before it wrote those."""
    files = on_a_disk("/s")
    queue = queue_of(files, vouched)
    queue.flush()
    assert queue.ext is not None
    for number in range(units_of_none):
        queue.ext.put(number, START_MS, None)
    append(queue, 4)
    again = queue_of(files)
    again.write_again(vouched)
    again.flush()
    for path in ("/s", "/s/q", "/s/q/T", "/s/e", "/s/e/T"):
        files.flush_folder(path)
    assert_settled(files)


@pytest.mark.parametrize("device", ["flushes", "can't", "fails"])
def test_many_new_queues(device: str) -> None:
    """They are made together, and flushed with the whole device where that is possible."""
    files = on_a_disk("/s")
    queues = [ConsumeQueue.open(f"/s/q/T/{queue_id}", 100, files=files) for queue_id in range(80)]
    begin_together([(queue, ENTRY.pack(10, 10, 0) * 2) for queue in queues])
    unflushed = set(queues)

    def flush_disks(*folders: str) -> bool:
        assert set(folders) == {queue.folder for queue in queues}
        if device == "fails":
            raise StoreIOError("flush", "/s", OSError())
        queues[0].append(2, 20, 10, 0)  # as another thread does meanwhile
        if device == "flushes":
            for queue in queues:
                files.flush(files.open(f"{queue.folder}/{0:020d}"))
                files.flush_folder(queue.folder)
            for folder in ("/s/q/T", "/s/q", "/s"):
                files.flush_folder(folder)
        return device == "flushes"

    if device == "fails":
        with pytest.raises(StoreIOError):
            flush_all(unflushed, flush_disks)
        assert unflushed == set(queues)
        device = "can't"
    flush_all(unflushed, flush_disks)
    assert unflushed == set()
    assert [queue.max_offset for queue in queues] == [3, *[2] * 79]
    queues[0].flush()
    assert_settled(files)


# ------------------------------------------------------------------------------------------------------ the index


def index_of(files: Files, now_ms: int = START_MS) -> KeyIndex:
    """Return an index with files of seven entries."""
    return KeyIndex.open("/s/index", slots=3, entries=8, files=files, now_ms=lambda: now_ms)


INDEX_CHANGES: dict[str, Callable[[KeyIndex], object]] = {
    "appended": lambda index: index.append_many([(100, START_MS, (1, 2)), (200, START_MS, (3,))]),
    "a file is full": lambda index: index.append_many([(100, START_MS, range(7)), (200, START_MS, (1, 2))]),
    "a file is empty": lambda index: index.append_many([(100, START_MS, range(7)), (200, START_MS, ())]),
    "deleted": lambda index: index.delete(index.files[0].name),
}


@pytest.mark.parametrize("change", INDEX_CHANGES)
@pytest.mark.parametrize("end", [KeyIndex.flush, KeyIndex.close])
def test_the_index(change: str, end: Callable[[KeyIndex], None]) -> None:
    files = on_a_disk("/s")
    index = index_of(files)
    index.append_many([(10, START_MS, (1, 2, 3))])
    index.flush()
    assert_settled(files)
    INDEX_CHANGES[change](index)
    end(index)
    assert_settled(files)


def test_a_file_of_the_index_alone() -> None:
    files = on_a_disk("/s")
    file = IndexFile.create("/s/20231114221320000", 3, 8, files)
    file.put(1, 10, START_MS)
    file.close()
    files.flush_folder("/s")
    assert_settled(files)


def test_a_file_of_the_index_without_an_entry() -> None:
    files = on_a_disk("/s")
    index = index_of(files)
    index.append_many([(10, START_MS, range(7)), (20, START_MS, ())])
    index.flush()
    assert [file.header.index_count for file in index.files] == [8, 1]
    assert index.files[1].header != FRESH
    assert_settled(files)


def test_entries_that_are_taken_back_are_gone() -> None:
    files = on_a_disk("/s")
    index = index_of(files)
    index.append_many([(10, START_MS, (1, 2, 3))])
    header = index.files[0].file.buffer[:40]
    index.append_many([(20, START_MS, (4, 5))])
    index.flush()
    index.files[0].file.buffer[:40] = header  # the writer died before the header counted them
    files.flush(index.files[0].file)
    index_of(files, START_MS + 1).flush()
    assert find_flaw(index.files[0]) is None
    assert_settled(files)


# -------------------------------------------------------------------------------------------- a failed flush


@pytest.mark.parametrize("make", [lambda files: queue_of(files, 12), lambda files: index_of(files)])
def test_names_that_were_not_flushed_are_flushed_next(make: Callable[[Files], ConsumeQueue | KeyIndex]) -> None:
    count = 1
    while True:
        disk = on_a_disk("/s")
        files = FailingFiles(disk)
        part = make(files)
        if isinstance(part, KeyIndex):
            part.append_many([(10, START_MS, range(7)), (20, START_MS, range(3))])
        made = files.calls["flush_folder"]
        files.fail("flush_folder", count)
        try:
            part.flush()
        except StoreIOError:
            part.flush()
            assert_settled(disk)
            count += 1
        else:
            assert count > files.calls["flush_folder"] - made > 0
            return


# ------------------------------------------------------------------------------------------------------ the marker


def test_the_marker() -> None:
    files = on_a_disk("/s")
    set_abort(files, "/s")
    assert_settled(files)
    clear_abort(files, "/s")
    assert_settled(files)


# ---------------------------------------------------------------------------------------- deleting one by one


DELETIONS: dict[str, Callable[[MappedFileQueue], object]] = {
    "from": lambda queue: queue.delete_from(64),
    "before": lambda queue: queue.delete_before(5 * 64),
}


@pytest.mark.parametrize("deletion", DELETIONS)
def test_no_crash_leaves_a_gap_where_files_are_deleted_in_order(deletion: str) -> None:
    files = on_a_disk("/s")
    queue = six_files(files)
    assert_no_gap(files, lambda: DELETIONS[deletion](queue))
    assert len(queue.starts) == 1


def test_no_crash_leaves_a_gap_after_a_process_that_died_amid_deletions() -> None:
    files = on_a_disk("/s")
    six_files(files).delete_from(5 * 64)
    queue = MappedFileQueue("/s/f", 64, files, MappingPool(9), durable=True)
    assert_no_gap(files, lambda: queue.delete_from(4 * 64))


def test_units_are_deleted_in_order() -> None:
    files = on_a_disk("/s")
    six_files(files)
    queue = MappedFileQueue("/s/f", 64, files, MappingPool(9))
    assert_no_gap(files, lambda: queue.delete_before(5 * 64, in_order=True))
    assert queue.starts == [5 * 64]


def six_files(files: RecordingFiles) -> MappedFileQueue:
    queue = MappedFileQueue("/s/f", 64, files, MappingPool(9), durable=True)
    for start in range(0, 6 * 64, 64):
        queue.create(start)
    return queue


def assert_no_gap(files: RecordingFiles, do: Callable[[], object]) -> None:
    begin = len(files.trace)
    do()
    images = CrashImages(files.trace)
    for crash_point in range(begin, len(images)):
        for seed in range(20):
            MappedFileQueue("/s/f", 64, images.image(seed, crash_point).files(), MappingPool(9))


@pytest.mark.parametrize("count", [1, 3])
def test_no_crash_leaves_a_gap_where_files_are_made_in_order(count: int) -> None:
    files = on_a_disk("/s")
    queue = MappedFileQueue("/s/f", 64, files, MappingPool(9), durable=True)
    for start in range(0, count * 64, 64):
        queue.create(start)
        assert_settled(files)
    images = CrashImages(files.trace)
    for crash_point in range(len(images)):
        for seed in range(20):
            found = images.image(seed, crash_point).files()
            sizes = [entry.size for entry in found.list("/s/f")]
            assert sizes[:-1] == [64] * len(sizes[:-1])
