"""Queues: the reference's bytes, begin and end, truncation, retention, search by time, damage."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from librmq.consumequeue import ConsumeQueue, QueueEntry
from librmq.consumequeue_entries import ENTRY, ENTRY_SIZE, Entries, entry_dtype
from librmq.errors import ConfigError, CorruptionError, ReadOnlyError, StoreClosedError, StoreError
from librmq.files._disk import DiskFiles
from librmq.files._memory import MemoryFiles
from librmq.files.interface import File, Files, is_folder
from librmq.files.rolling import MappingPool
from tests.reference import Row, rows, store_folders
from tests.stores import OpenedFiles

SMALL = 5 * ENTRY_SIZE


def packed(entries: Iterable[tuple[int, int, int]]) -> bytes:
    return b"".join(ENTRY.pack(*entry) for entry in entries)


def numbered(begin: int, end: int) -> list[tuple[int, int, int]]:
    """Return entries of 10-byte messages; entry ``n`` is at physical offset ``10 * n``."""
    return [(10 * n, 10, n) for n in range(begin, end)]


def opened(files: Files, folder: str = "/q", size: int = SMALL, *, writable: bool = True) -> ConsumeQueue:
    return ConsumeQueue.open(folder, size, files=files, writable=writable)


def filled(files: Files, begin: int, end: int, size: int = SMALL) -> ConsumeQueue:
    queue = opened(files, size=size)
    queue.append_many(begin, packed(numbered(begin, end)))
    return queue


def contents(files: Files, folder: str = "/q") -> dict[str, bytes]:
    return {entry.name: files.read(f"{folder}/{entry.name}") for entry in files.list(folder)}


def spoil(files: Files, path: str, at: int, data: bytes) -> None:
    files.open(path, writable=True).buffer[at : at + len(data)] = data


# ---------------------------------------------------------------------------------------------- the reference


def by_queue(folder: Path) -> dict[tuple[str, int], list[Row]]:
    """Return the entries that RocketMQ reports for each queue, in order."""
    key: Callable[[Row], tuple[str, int]] = lambda row: (row["topic"], row["queue_id"])  # noqa: E731
    return {name: list(group) for name, group in itertools.groupby(rows(folder, "cq"), key)}


def raw_entries(entries: list[Row]) -> bytes:
    return packed((row["phys"], row["size"], row["tags_code"]) for row in entries)


def untouched(folder: Path) -> bool:
    """Return whether the files are as RocketMQ left them after a clean exit."""
    (config,) = rows(folder, "config")
    return not config["abort_file_present"] and not (folder / "mutation.json").exists()


@pytest.mark.parametrize("folder", store_folders())
@pytest.mark.parametrize("at_once", [True, False], ids=["batch", "single"])
def test_appending_the_reference_entries_gives_its_files(folder: Path, at_once: bool) -> None:
    (config,) = rows(folder, "config")
    for (topic, queue_id), entries in by_queue(folder).items():
        files = MemoryFiles()
        queue = opened(files, size=config["consumequeue_file_size"])
        first = entries[0]["offset"]
        if at_once:
            queue.append_many(first, raw_entries(entries))
        else:
            for row in entries:
                queue.append(row["offset"], row["phys"], row["size"], row["tags_code"])
        assert queue.max_offset == entries[-1]["offset"] + 1
        assert queue.max_physic_offset == entries[-1]["phys"] + entries[-1]["size"]
        if untouched(folder):
            theirs = folder / "store" / "consumequeue" / topic / str(queue_id)
            assert contents(files) == {path.name: path.read_bytes() for path in theirs.iterdir()}


# ---------------------------------------------------------------------------------------------- begin and end


def test_a_new_queue_leaves_no_trace_until_its_first_append() -> None:
    files = MemoryFiles()
    queue = opened(files)
    assert (queue.min_offset, queue.max_offset, queue.max_physic_offset) == (0, 0, -1)
    assert queue.entry(0) is None
    assert queue.read(0, 9) == b""
    assert len(queue.entries()) == 0
    assert queue.truncate_after(0) == 0
    assert queue.trim(99) == []
    queue.close()
    assert not is_folder(files, "/q")


def test_a_file_made_ahead_is_used() -> None:
    files = MemoryFiles()
    filled(files, 0, 5)
    files.create(f"/q/{SMALL:020d}", SMALL)
    queue = opened(files)
    assert queue.max_offset == 5
    queue.append_many(5, packed(numbered(5, 12)))
    assert opened(files).entries().tobytes() == packed(numbered(0, 12))


def test_opening_reads_a_few_entries_only(tmp_path: Path) -> None:
    files = OpenedFiles(DiskFiles())
    size = 100 * ENTRY_SIZE
    ConsumeQueue.open(str(tmp_path), size, files=files).append_many(0, packed(numbered(0, 1950)))
    files.paths.clear()
    queue = ConsumeQueue.open(str(tmp_path), size, files=files)
    assert (queue.max_offset, len(files.paths)) == (1950, 2)  # the first file and the last


def test_positions_beyond_31_and_40_bits(tmp_path: Path) -> None:
    begin = (1 << 41) // ENTRY_SIZE
    with ConsumeQueue.open(str(tmp_path / "q"), SMALL) as queue:
        queue.append(begin, 1 << 50, 7, -5)
    with ConsumeQueue.open(str(tmp_path / "q"), SMALL) as queue:
        assert queue.entry(begin) == (1 << 50, 7, -5)
        assert queue.max_physic_offset == (1 << 50) + 7


def test_a_queue_on_disk_is_closed_and_continued(tmp_path: Path) -> None:
    folder = str(tmp_path / "topic" / "0")
    with ConsumeQueue.open(folder, SMALL) as queue:
        queue.append_many(0, packed(numbered(0, 3)))
    with pytest.raises(StoreClosedError):
        queue.append(3, 30, 10, 3)
    with pytest.raises(StoreClosedError):
        queue.read(0, 1)
    queue.close()
    with ConsumeQueue.open(folder, SMALL) as queue:
        queue.append_many(3, packed(numbered(3, 13)))
        queue.flush()
        assert queue.entries().tobytes() == packed(numbered(0, 13))


# ---------------------------------------------------------------------------------------------------- reading


def test_a_read_ends_with_its_file() -> None:
    queue = filled(MemoryFiles(), 0, 12)
    assert queue.read(3, 9) == packed(numbered(3, 5))
    assert queue.read(5, 3) == packed(numbered(5, 8))
    assert queue.read(10, 9) == packed(numbered(10, 12))
    assert queue.read(12, 9) == queue.read(-1, 9) == queue.read(3, 0) == queue.read(3, -1) == b""
    assert [queue.next_file_offset(n) for n in (0, 4, 5, 12)] == [5, 5, 10, 15]


def test_blocks_and_entries_cover_a_range() -> None:
    queue = filled(MemoryFiles(), 7, 22)
    assert queue.entries(9, 21).tobytes() == packed(numbered(9, 21))
    assert queue.entries(21, 99).tolist() == [(210, 10, 21)]
    assert queue.entries(30).dtype == entry_dtype()
    firsts = [first for first, _ in queue.blocks()]
    assert firsts == [7, 10, 15, 20]
    assert np.flatnonzero(queue.entries()["tags_code"] == 12).tolist() == [5]


def test_blocks_are_bounded() -> None:
    queue = filled(MemoryFiles(), 0, 140_000, size=150_000 * ENTRY_SIZE)
    assert [(first, len(block)) for first, block in queue.blocks()] == [(0, 65536), (65536, 65536), (131072, 8928)]


# -------------------------------------------------------------------------------------------------- appending


@pytest.mark.parametrize("queue_offset", [0, 2, 4, 8, -1])
def test_an_entry_out_of_order_is_refused(queue_offset: int) -> None:
    files = MemoryFiles()
    queue = filled(files, 0, 3)
    before = contents(files)
    attempts: list[Callable[[], None]] = [
        lambda: queue.append(queue_offset, 0, 1, 0),
        lambda: queue.append_many(queue_offset, packed([(0, 1, 0)])),
    ]
    for attempt in attempts:
        with pytest.raises((CorruptionError, ValueError), match=f"{queue_offset}"):
            attempt()
    assert contents(files) == before
    assert queue.max_offset == 3


def test_both_numbers_are_named() -> None:
    with pytest.raises(CorruptionError, match="expected queue offset 3, found 8"):
        filled(MemoryFiles(), 0, 3).append(8, 80, 10, 0)


BAD_ENTRIES = ((-1, 1, 0), (0, 0, 0), (0, -1, 0), (1 << 63, 1, 0), (0, 1 << 31, 0), (0, 1, 1 << 63))
BAD_OFFSETS = (-1, -5, 1 << 63, (1 << 63) // ENTRY_SIZE, 1 << 80)


@pytest.mark.parametrize(
    ("append", "says"),
    [
        *((lambda queue, entry=entry: queue.append(0, *entry), "no entry can hold") for entry in BAD_ENTRIES),
        *((lambda queue, at=at: queue.append(at, 0, 1, 0), "queue offset: expected one") for at in BAD_OFFSETS),
        (lambda queue: queue.append_many(0, bytes(21)), "21 bytes"),
    ],
)
def test_what_no_file_can_hold_is_refused(append: Callable[[ConsumeQueue], object], says: str) -> None:
    files = MemoryFiles()
    with pytest.raises(ValueError, match=says):
        append(opened(files))
    opened(files).append_many(0, b"")
    assert not is_folder(files, "/q")


@pytest.mark.parametrize("size", [0, -20, 19, 30, (1 << 31) + 20])
def test_a_file_size_of_half_entries_is_refused(size: int) -> None:
    with pytest.raises(ConfigError, match="multiple of 20"):
        opened(MemoryFiles(), size=size)


def test_blocks_are_reserved_before_they_are_written() -> None:
    class Reserving(MemoryFiles):
        def __init__(self) -> None:
            super().__init__()
            self.reserved: dict[str, int] = {}
            self.calls = 0

        def reserve(self, file: File, begin: int, end: int) -> None:
            assert begin <= self.reserved.get(file.path, begin)
            self.reserved[file.path] = end
            self.calls += 1

    files = Reserving()
    size = 1000 * ENTRY_SIZE
    queue = opened(files, size=size)
    for n in range(5, 1500):
        queue.append(n, 10 * n, 10, n)
        at = n * ENTRY_SIZE % size
        assert files.reserved[queue.place_of(n)[0]] >= at + ENTRY_SIZE
    assert files.calls < 20


def test_a_queue_for_reading_is_not_written() -> None:
    files = MemoryFiles()
    filled(files, 0, 8)
    before = contents(files)
    queue = opened(files, writable=False)
    writes: list[Callable[[], object]] = [
        lambda: queue.append(8, 80, 10, 8),
        lambda: queue.append_many(8, packed(numbered(8, 9))),
        lambda: queue.truncate_to(2),
        lambda: queue.truncate_after(20),
        lambda: queue.trim(60),
        queue.recover,
    ]
    for write in writes:
        with pytest.raises(ReadOnlyError):
            write()
    queue.advance(30)
    assert (queue.min_offset, queue.max_offset) == (3, 8)
    queue.advance(60)  # the first file's messages are all gone
    assert (queue.min_offset, queue.max_offset) == (6, 8)
    assert contents(files) == before


# ------------------------------------------------------------------------------------------------- truncating


def test_truncation_stops_at_an_invalid_entry() -> None:
    files = MemoryFiles()
    filled(files, 0, 9)
    spoil(files, f"/q/{SMALL:020d}", ENTRY_SIZE, struct.pack(">q", -1))
    queue = opened(files)
    queue.truncate_after(1000)
    assert queue.entries().tobytes() == packed(numbered(0, 6))


def test_recovery_finds_the_first_gap_and_clears_the_rest() -> None:
    files = MemoryFiles()
    filled(files, 0, 24)
    spoil(files, f"/q/{2 * SMALL:020d}", 2 * ENTRY_SIZE, bytes(12))
    queue = opened(files)
    assert queue.max_offset == 24
    assert queue.recover() == 12
    expected = MemoryFiles()
    filled(expected, 0, 12)
    assert contents(files) == contents(expected)
    assert queue.recover() == 0


def test_a_cleared_queue_starts_over() -> None:
    files = MemoryFiles()
    queue = filled(files, 7, 22)
    queue.clear()
    assert (queue.min_offset, queue.max_offset, queue.max_physic_offset, contents(files)) == (0, 0, -1, {})
    queue.append(3, 30, 10, 3)
    assert queue.entries().tolist() == [(30, 10, 3)]


@pytest.mark.parametrize(("at", "found"), [(None, 0), (40, 1), (99, 60), (100, 61), (199, 160)])
def test_bytes_after_the_end_are_counted(at: int | None, found: int) -> None:
    files = MemoryFiles()
    filled(files, 0, 2)
    files.create(f"/q/{SMALL:020d}", SMALL)
    if at is not None:
        spoil(files, f"/q/{at // SMALL * SMALL:020d}", at % SMALL, b"x")
    queue = opened(files)
    assert queue.max_offset == 2
    assert queue.data_behind_end() == found


# -------------------------------------------------------------------------------------------------- retention


def test_the_minimum_skips_filler_and_never_goes_back() -> None:
    queue = filled(MemoryFiles(), 7, 12)
    queue.advance(0)
    assert queue.min_offset == 7
    queue.advance(90)
    queue.advance(-5)
    assert queue.min_offset == 9
    queue.advance(1 << 70)  # all messages are gone
    assert (queue.min_offset, queue.max_offset) == (12, 12)


# ---------------------------------------------------------------------------------------------------- by time


def by_time(queue: ConsumeQueue, times: list[int | None], timestamp_ms: int) -> int:
    return queue.queue_offset_at(timestamp_ms, lambda physical_offset, _: times[physical_offset // 10])


def test_a_file_that_ends_at_the_time_is_the_one() -> None:
    queue = filled(MemoryFiles(), 0, 10)
    times: list[int | None] = [100, 110, 120, 130, 140, 140, 140, 140, 140, 150]
    assert by_time(queue, times, 140) == 4


def test_messages_that_are_gone_count_as_earlier() -> None:
    queue = filled(MemoryFiles(), 0, 12)
    times: list[int | None] = [None] * 7 + [100, 110, 120, 130, 140]
    assert by_time(queue, times, 0) == 7
    assert by_time(queue, times, 111) == 8
    assert by_time(queue, [None] * 12, 111) == 10
    assert by_time(opened(MemoryFiles()), [], 5) == 0


# ----------------------------------------------------------------------------------------------------- damage


@pytest.mark.parametrize(("physical_offset", "size"), [(-1, 10), (50, 0), (50, -3), (-(1 << 63), -(1 << 31))])
def test_a_bad_entry_in_the_middle_is_reported_with_its_place(physical_offset: int, size: int) -> None:
    files = MemoryFiles()
    filled(files, 0, 14)
    spoil(files, f"/q/{SMALL:020d}", ENTRY_SIZE, struct.pack(">qi", physical_offset, size))
    queue = opened(files)
    assert queue.max_offset == 14
    with pytest.raises(CorruptionError, match="queue offset 6") as told:
        queue.entry(6)
    assert (told.value.file, told.value.offset) == (f"/q/{SMALL:020d}", ENTRY_SIZE)
    found: list[Entries] = []
    with pytest.raises(CorruptionError):
        found.extend(block for _, block in queue.blocks())
    assert b"".join(block.tobytes() for block in found) == packed(numbered(0, 6))
    with pytest.raises(CorruptionError):
        queue.entries()
    assert queue.entry(7) == QueueEntry(70, 10, 7)


operations = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["truncate_after", "trim", "advance"]), st.integers(-9, 200)),
        st.tuples(st.just("advance"), st.integers(-(1 << 63), 1 << 64)),
        st.tuples(st.just("truncate_after"), st.integers(-(1 << 63), 1 << 64)),
        st.tuples(st.just("truncate_to"), st.integers(-9, 40)),
        st.tuples(st.sampled_from(["recover", "reopen", "append"]), st.just(0)),
    ),
    max_size=6,
)


@given(
    st.lists(st.binary(min_size=SMALL, max_size=SMALL), max_size=3),
    st.lists(st.tuples(st.integers(0, 299), st.binary(max_size=20)), max_size=6),
    st.integers(0, 3),
    operations,
)
@example([], [(0, bytes(12)), (125, bytes(7))], 0, [("append", 0)])
def test_arbitrary_files_raise_only_store_errors(
    rubbish: list[bytes], patches: list[tuple[int, bytes]], begin: int, steps: list[tuple[str, int]]
) -> None:
    files = MemoryFiles()
    if rubbish:
        files.make_folder("/q")
        for n, raw in enumerate(rubbish):
            path = f"/q/{(begin + n) * SMALL:020d}"
            files.create(path, SMALL).buffer[:] = raw
    else:
        filled(files, 0, 15)
        for at, data in patches:
            spoil(files, f"/q/{at // SMALL * SMALL:020d}", at % SMALL, data[: SMALL - at % SMALL])
    queue = opened(files)
    for name, argument in [*steps, ("reopen", 0)]:
        try:
            if name == "reopen":
                queue = opened(files)
            elif name == "append":
                queue.append(queue.max_offset, 5, 5, 5)
            elif name == "recover":
                queue.recover()
            else:
                getattr(queue, name)(argument)
            assert 0 <= queue.min_offset <= queue.max_offset <= 30 + len(steps)
            queue.queue_offset_at(100, lambda physical_offset, _: physical_offset % 1000)
            for n in range(-1, queue.max_offset + 1):
                queue.read(n, 100)
                queue.entry(n)
            queue.entries()
        except StoreError:
            pass
    looked_from = (queue.max_offset - 1) // 5 * 5 - 10  # the last three files
    queue.recover()
    sound_from = min(max(looked_from, queue.stored_begin), queue.max_offset)
    assert len(queue.entries(sound_from)) == queue.max_offset - sound_from
    assert opened(files).max_offset == queue.max_offset


# ------------------------------------------------------------------------------------------------ many queues


def test_many_queues_share_few_mappings(tmp_path: Path) -> None:
    pool = MappingPool(8)
    queues = [ConsumeQueue.open(str(tmp_path / str(n)), SMALL, pool=pool) for n in range(60)]
    for n, queue in enumerate(queues):
        queue.append_many(0, packed(numbered(0, 7 + n % 5)))
    for n, queue in enumerate(queues):
        queue.append(7 + n % 5, 1000, 1, 1)
        assert queue.entries(0, 7).tobytes() == packed(numbered(0, 7))
    assert sum(len(queue._files.mapped) for queue in queues) <= 8
    assert not hasattr(queues[0], "__dict__")


def test_a_reader_sees_only_whole_entries_during_writes() -> None:
    import threading

    files = MemoryFiles()
    queue = opened(files, size=1000 * ENTRY_SIZE)
    wrong: list[object] = []
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            end = queue.max_offset
            last = queue.entry(end - 1)
            if end and (last is None or last != (10 * (end - 1), 10, end - 1)):
                wrong.append((end, last))

    reader = threading.Thread(target=look)
    reader.start()
    for n in range(0, 20_000, 4):
        queue.append(n, 10 * n, 10, n)
        queue.append_many(n + 1, packed(numbered(n + 1, n + 4)))
    done.set()
    reader.join()
    assert not wrong
