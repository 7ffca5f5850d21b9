"""The log on its own: append, roll, read, scan, find the end, truncate; large offsets and full disks."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from librmq import Message
from librmq.commitlog import CommitLog
from librmq.errors import (
    ConfigError,
    CorruptionError,
    MessageIllegalError,
    ReadOnlyError,
    StoreClosedError,
    StoreIOError,
)
from librmq.files._disk import DiskFiles
from librmq.files._memory import MemoryFiles
from librmq.files.interface import Advice, File, Files
from librmq.message.record import BLANK_MAGIC, STORE_TIMESTAMP_AT, Record, body_checksum, encode_record
from tests.file_seams import FailingFiles, RecordingFiles
from tests.stores import OpenedFiles

FOLDER = "/log"
SIZE = 1024


def record(place: int, body: bytes = b"body", **fields: object) -> bytes:
    """Return the bytes of a valid record at the physical offset ``place``."""
    record = Record(
        topic="T",
        physical_offset=place,
        store_timestamp_ms=1_700_000_000_000 + place,
        body=body,
        body_crc=body_checksum(body),
        properties_raw=b"a\1b",
    )
    for name, value in fields.items():
        setattr(record, name, value)
    return encode_record(record)


SMALLEST = len(record(0, b""))


def put(log: CommitLog, size: int) -> int:
    """Append a record of ``size`` bytes, and return its physical offset."""
    place = log.claim(size)
    log.append(record(place, bytes([size % 251]) * (size - SMALLEST)))
    return place


def opened(files: Files, size: int = SIZE, folder: str = FOLDER, *, writable: bool = True) -> CommitLog:
    return CommitLog.open(folder, size, files=files, writable=writable)


def items(log: CommitLog) -> list[tuple[int, int, bool]]:
    return [(place, size, raw is not None) for place, size, raw in log.scan()]


# ------------------------------------------------------------------------------------------------ append and roll


def test_a_log_begins_with_its_first_record() -> None:
    files = MemoryFiles()
    log = opened(files)
    assert (log.begin, log.end, list(log.scan())) == (0, 0, [])
    assert files.list(FOLDER) == []
    assert put(log, 200) == 0
    assert (log.begin, log.end) == (0, 200)
    assert [(entry.name, entry.size) for entry in files.list(FOLDER)] == [("0" * 20, SIZE)]


@pytest.mark.parametrize("rest", range(7, 12))
def test_eight_bytes_stay_free_at_the_end_of_a_file(rest: int) -> None:
    """A record goes to the next file if its size plus 8 exceeds the space left in the current one."""
    files = MemoryFiles()
    log = opened(files)
    put(log, 500)
    place = put(log, SIZE - 500 - rest)
    first = files.read(f"{FOLDER}/{0:020d}")
    if rest >= 8:
        assert (place, log.end) == (500, SIZE - rest)
        assert first[SIZE - rest :] == bytes(rest)
        assert put(log, SMALLEST) == SIZE
        first = files.read(f"{FOLDER}/{0:020d}")
        assert first[SIZE - rest :][:8] == struct.pack(">II", rest, BLANK_MAGIC)
        assert first[SIZE - rest + 8 :] == bytes(rest - 8)
    else:
        assert place == SIZE
        assert first[500:508] == struct.pack(">II", SIZE - 500, BLANK_MAGIC)
        assert first[508:] == bytes(SIZE - 508)
    assert opened(files).end == log.end


def test_several_records_move_as_a_whole() -> None:
    files = MemoryFiles()
    log = opened(files)
    put(log, 800)
    place = log.claim(200 + SMALLEST)
    log.append(record(place, bytes(200 - SMALLEST)) + record(place + 200, b""))
    assert items(log) == [(0, 800, True), (800, 224, False), (1024, 200, True), (1224, SMALLEST, True)]


def test_claiming_changes_nothing() -> None:
    files = RecordingFiles()
    log = opened(files)
    put(log, 800)
    before = len(files.trace)
    assert log.claim(300) == SIZE
    assert log.claim(100) == 800
    with pytest.raises(MessageIllegalError, match="at most 1016"):
        log.claim(SIZE - 7)
    assert log.claim(SIZE - 8) == SIZE
    assert (len(files.trace), log.end) == (before, 800)


@pytest.mark.parametrize("fill", [0, 500, SIZE - 8])
def test_a_record_larger_than_a_file_is_refused(fill: int) -> None:
    files = MemoryFiles()
    log = opened(files)
    if fill:
        put(log, fill)
    with pytest.raises(MessageIllegalError):
        log.claim(SIZE - 7)
    assert log.end == fill
    assert put(log, SIZE - 8) == (SIZE if fill else 0)


@pytest.mark.parametrize("call", ["create", "reserve"])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_full_disk_leaves_the_log_as_it_was(call: str, number: int) -> None:
    memory = MemoryFiles()
    files = FailingFiles(memory)
    log = opened(files)
    files.fail(call, number)
    places: list[tuple[int, int]] = []
    failed = 0
    while len(places) < 40:
        size = SMALLEST + 37 * len(places) % 300
        before = log.end, [place for place, _, sound in items(log) if sound]
        try:
            places.append((put(log, size), size))
        except StoreIOError:
            failed += 1
            assert (log.end, [place for place, _, sound in items(log) if sound]) == before
            again = opened(memory, writable=False)
            assert (again.end, again.found_end.damage) == (log.end, None)
    assert failed == 1
    assert [(place, size) for place, size, sound in items(log) if sound] == places
    assert items(opened(memory)) == items(log)


def test_only_many_pages_are_unmapped_before_they_are_flushed() -> None:
    calls: list[tuple[str, int, int]] = []

    class Released(File):
        def advise(self, begin: int, end: int, advice: Advice) -> None:
            if advice is Advice.NO_USE:
                calls.append((self.path[-2:], begin, end))

    class Flushed(MemoryFiles):
        _file_type = Released

        def flush(self, file: File, begin: int = 0, end: int | None = None) -> None:
            calls.append((file.path[-2:], -1, -1))

    files = Flushed()
    log = opened(files, 3 << 20)
    put(log, 1000)
    log.flush()
    put(log, 1 << 20)
    assert all(begin < 0 for _, begin, _ in calls)
    put(log, 1000)
    log.prepare(1 << 20)
    calls.clear()
    end = log.end
    log.flush()
    assert calls == [("00", 1000, end), ("00", -1, -1)]
    put(log, 1000)
    calls.clear()
    log.flush()
    assert calls == [("00", -1, -1)]
    put(log, 1 << 20)
    put(log, 1 << 20)
    calls.clear()
    log.flush()
    assert [(name, begin) for name, begin, _ in calls] == [("00", end + 1000), ("28", 0), ("00", -1), ("28", -1)]


def test_a_flush_leaves_prepared_pages_to_the_producer() -> None:
    """The device writes few zeros, and the kernel takes few pages away that the producer is about to write."""
    files = RecordingFiles()
    log, part = opened(files, 1 << 20), 64 << 10

    def flushed() -> list[tuple[int, int]]:
        files.trace.clear()
        end = log.flush()
        assert end == log.end
        return [(begin, int.from_bytes(part)) for call, _, begin, part in files.trace if call == "flush"]

    put(log, 1000)
    log.prepare(1 << 18)
    assert flushed() == [(0, part)], "a part that the device writes for the first time"
    log = opened(files, 1 << 20)
    put(log, 5000)
    assert flushed() == [(0, 0)], "the whole file, in which older records may wait for the device"
    put(log, 5000)
    assert flushed() == [(6000, part)]
    put(log, part)
    assert flushed() == [(11_000, 2 * part)]
    put(log, 100)
    log.truncate(5000)
    put(log, 300)
    assert flushed() == [(0, 0)], "what the log lost is flushed too"
    log.patch(100, b"x")
    put(log, 200)
    assert flushed() == [(0, 0)], "what was patched lies elsewhere"
    put(log, 1_040_000)
    put(log, 100_000)
    assert flushed() == [(0, 0), (0, 2 * part)], "the file before, which got its blank, and a part of the new one"
    put(log, 200)
    assert flushed() == [(100_000, 100_200)]
    put(log, 900_000)
    assert flushed() == [(100_200, 16 * part)]
    log.truncate(log.file_start)
    log = opened(files, 1 << 20)
    put(log, 100)
    assert flushed() == [(0, 0)], "the process that cut the log died before it flushed the file"


def test_a_flush_reaches_every_file_and_the_folder() -> None:
    files = RecordingFiles()
    log = opened(files)
    for _ in range(5):
        put(log, 600)
    made = [event for event in files.trace if event.call not in ("write", "make_folder")]
    assert [event.call for event in made] == ["create", "flush", "flush_folder", "flush_folder"] + 4 * [
        *("create", "flush", "flush_folder")
    ]  # a new file is flushed before it is written to, the first one with its folder
    files.trace.clear()
    assert log.flush() == log.end
    flushed = {event.path for event in files.trace if event.call == "flush"}
    assert flushed == {f"{FOLDER}/{n * SIZE:020d}" for n in range(5)}
    assert not [event for event in files.trace if event.call == "flush_folder"]
    put(log, 100)
    files.trace.clear()
    log.flush()
    assert [(event.call, event.path) for event in files.trace] == [("flush", f"{FOLDER}/{4 * SIZE:020d}")]


def test_blocks_are_there_before_they_are_written() -> None:
    class Reserved(RecordingFiles):
        def __init__(self) -> None:
            super().__init__()
            self.upto: dict[str, set[int]] = {}

        def reserve(self, file: object, begin: int, end: int) -> None:
            self.upto.setdefault(file.path, set()).update(range(begin, end))  # type: ignore[attr-defined]

    files = Reserved()
    log = opened(files, 16384)
    for n in range(200):
        put(log, SMALLEST + n)
    for event in files.trace:
        if event.call == "write":
            assert set(range(event.offset, event.offset + len(event.data))) <= files.upto[event.path]


# ---------------------------------------------------------------------------------------------------------- reading


@pytest.fixture
def files() -> MemoryFiles:
    """Return files with a log of three files; its records are at 0, 300, 600, 1024, 1424 and 2048."""
    files = MemoryFiles()
    log = opened(files)
    for size in (300, 300, 300, 400, 400, 300):
        put(log, size)
    return files


def test_read_and_scan_agree(files: MemoryFiles) -> None:
    log = opened(files, writable=False)
    found = [item for item in log.scan() if item[2] is not None]
    assert [place for place, _, _ in found] == [0, 300, 600, 1024, 1424, 2048]
    for place, size, raw in found:
        assert raw == log.read(place) == log.read(place, size)
        message = log.message(place)
        assert message is not None
        assert (message.raw, message.physical_offset) == (raw, place)
        assert log.store_timestamp_ms(place) == 1_700_000_000_000 + place
    assert [place for place, _, _ in log.scan(600, 1400)] == [600, 900, 1024]
    assert next(log.scan(900)) == (900, 124, None)
    assert list(log.scan(log.end)) == []


@pytest.mark.parametrize("place", [-1, -(1 << 63), 2348, 2047 + 1024, 1 << 62])
def test_outside_of_the_log_there_is_nothing(files: MemoryFiles, place: int) -> None:
    log = opened(files, writable=False)
    assert (log.read(place), log.message(place), log.store_timestamp_ms(place)) == (None, None, None)


@pytest.mark.parametrize("place", [1, 299, 900, 904, 1020, 1023, 1025])
def test_where_no_record_begins(files: MemoryFiles, place: int) -> None:
    log = opened(files, writable=False)
    for call in (log.read, log.message):
        with pytest.raises(CorruptionError) as told:
            call(place)
        assert (told.value.offset, told.value.kind) == (place, "record")
        assert told.value.file == f"{FOLDER}/{place - place % SIZE:020d}"
    assert log.store_timestamp_ms(place) is None


def test_a_record_of_another_size_is_damage(files: MemoryFiles) -> None:
    log = opened(files, writable=False)
    with pytest.raises(CorruptionError, match="301"):
        log.read(300, 301)
    assert log.store_timestamp_ms(300, 301) is None


@pytest.mark.parametrize(("at", "kind"), [(310, "record"), (300 + 90, "checksum"), (303, "record")])
def test_damage_is_reported_with_its_place(files: MemoryFiles, at: int, kind: str) -> None:
    buffer = files.open(f"{FOLDER}/{0:020d}", writable=True).buffer
    if at == 310:
        buffer[384:388] = b"\x7f\xff\xff\xff"  # the body's length
    else:
        buffer[at : at + 1] = bytes([buffer[at] ^ 1])
    log = opened(files, writable=False)
    assert log.found_end.physical_offset == 300
    assert log.found_end.damage is not None
    assert (log.found_end.damage.offset, log.found_end.damage.kind) == (300, kind)
    assert log.found_end.last_record == 0
    assert [place for place, _, _ in log.scan()] == [0]
    log.end = 2348
    seen = []
    with pytest.raises(CorruptionError) as told:
        seen += list(log.scan())
    assert (told.value.offset, told.value.kind) == (300, kind)
    with pytest.raises(CorruptionError):
        log.message(300)
    if kind == "checksum":
        assert [place for place, _, _ in log.scan(check_body=False)] == [0, 300, 600, 900, 1024, 1424, 1824, 2048]


def test_a_size_below_that_of_a_record_is_damage(files: MemoryFiles) -> None:
    log = opened(files, writable=False)
    files.open(f"{FOLDER}/{0:020d}", writable=True).buffer[300:304] = struct.pack(">I", 20)
    with pytest.raises(CorruptionError):
        log.read(300)
    with pytest.raises(CorruptionError):
        log.read(300, 20)


# ------------------------------------------------------------------------------------------------- opening, truncating


def test_opening_changes_nothing_and_continues(files: MemoryFiles) -> None:
    before = {entry.name: files.read(f"{FOLDER}/{entry.name}") for entry in files.list(FOLDER)}
    log = opened(files)
    assert (log.begin, log.end) == (0, 2348)
    assert {name: files.read(f"{FOLDER}/{name}") for name in before} == before
    assert put(log, 200) == 2348
    assert put(log, 700) == 3072


def test_only_the_last_three_files_are_walked() -> None:
    files = RecordingFiles()
    log = opened(files)
    for _ in range(20):
        put(log, 900)
    asked = OpenedFiles(files)
    again = opened(asked)
    assert (again.begin, again.end) == (0, log.end)
    assert sorted(set(asked.paths)) == [f"{FOLDER}/{n * SIZE:020d}" for n in (17, 18, 19)]


def test_a_reader_can_end_where_the_log_ended_although_the_writer_writes_on() -> None:
    files = MemoryFiles()
    writer = opened(files)
    put(writer, 300)
    reader = opened(files, writable=False)
    end = put(writer, 300)
    found = []
    for place, size, _ in reader.follow(end):
        found.append(place)
        reader.end = place + size
        put(writer, 200)
    assert found == []
    end = writer.end
    for place, size, _ in reader.follow(end):
        found.append(place)
        reader.end = place + size
        put(writer, 100)
    assert (found, reader.end) == ([300], end)
    assert next(reader.follow())[0] == end


def test_a_record_that_reaches_beyond_a_readers_end_is_not_read() -> None:
    files = MemoryFiles()
    writer = opened(files)
    put(writer, 300)
    reader = opened(files, writable=False)
    reader.end = writer.end - 1
    assert reader.read(0) is None
    reader.end = writer.end
    assert len(reader.read(0) or b"") == 300


@pytest.mark.parametrize("at", [(32 << 20) - 4, 32 << 20, (32 << 20) - 17])
def test_a_text_is_found_wherever_it_lies(at: int) -> None:
    """A search looks at pieces of 32 MiB, and the text may lie across the border of two."""
    log = opened(MemoryFiles(), 64 << 20)
    put(log, at - 188)
    place = log.claim(SMALLEST + 117)
    raw = record(place, b"x" * 100 + b"needle in the log")
    assert place + raw.find(b"needle") == at
    log.append(raw)
    (found,) = log.search(b"needle in the log")
    assert found.body.endswith(b"needle in the log")
    assert list(log.search(b"needle in a haystack")) == []


def test_a_log_whose_last_files_are_empty(files: MemoryFiles) -> None:
    """RocketMQ 4.9 creates the next file ahead of time."""
    for n in (3, 4):
        files.create(f"{FOLDER}/{n * SIZE:020d}", SIZE)
    log = opened(files)
    assert log.end == 2348
    assert put(log, 900) == 3072
    assert put(log, 900) == 4096
    assert put(log, 900) == 5120


def test_a_file_that_begins_with_half_a_record_is_not_taken_for_an_older_one() -> None:
    """A crash can leave the first words of a record, and with them the first half of its time."""
    files = MemoryFiles()
    log = opened(files)
    put(log, 900)
    put(log, 200)
    assert log.file_before(1_700_000_000_000 + SIZE) == SIZE
    assert log.file_before(1_700_000_000_000) == 0
    begin = record(SIZE)[: STORE_TIMESTAMP_AT + 4]
    files.write(f"{FOLDER}/{SIZE:020d}", begin + bytes(SIZE - len(begin)))
    assert opened(files).file_before(1_700_000_000_000) == 0


@pytest.mark.parametrize("rest", [1, 7])
def test_a_record_that_leaves_no_room_for_a_blank_is_damage(rest: int) -> None:
    """No writer ends a record there, and behind it neither a record nor a blank can follow."""
    files = MemoryFiles()
    first = record(0)
    last = record(len(first), bytes(SIZE - len(first) - SMALLEST - rest))
    files.make_folder(FOLDER)
    files.write(f"{FOLDER}/{0:020d}", first + last + bytes(rest))
    log = opened(files)
    log.end = 0
    assert [at for at, _, _ in log.follow(len(first))] == [0]
    log.end = len(first)
    assert list(log.follow()) == []
    log = opened(files)
    assert log.end == len(first)
    assert log.found_end.last_record == 0
    assert log.found_end.damage is not None
    assert f"expected 8 bytes behind it for a blank, found {rest}" in str(log.found_end.damage)
    log.truncate(log.end)
    assert put(log, 100) == len(first)
    assert [at for at, _, _ in opened(files).scan()] == [0, len(first)]
    put(log, 900)
    files.write(f"{FOLDER}/{SIZE:020d}", record(SIZE, bytes(SIZE - SMALLEST - rest)) + bytes(rest))
    found = opened(files).found_end
    assert (found.physical_offset, found.last_record) == (SIZE, len(first))


def test_a_log_that_ends_with_a_blank_writes_it_again() -> None:
    files = MemoryFiles()
    log = opened(files)
    put(log, 300)
    put(log, 800)
    files.delete(f"{FOLDER}/{SIZE:020d}")
    again = opened(files)
    assert (again.end, again.found_end.damage) == (300, None)
    assert put(again, 800) == SIZE
    assert items(again) == [(0, 300, True), (300, 724, False), (1024, 800, True)]


@pytest.mark.parametrize("at", [0, 300, 900, 1024, 1424, 2048, 2348])
def test_truncating_leaves_zeros_and_a_log_that_continues(files: MemoryFiles, at: int) -> None:
    log = opened(files)
    gone = log.truncate(at)
    assert log.end == at
    assert gone == [f"{FOLDER}/{n * SIZE:020d}" for n in (2, 1) if n * SIZE > at]
    assert log.data_behind(at) == 0
    kept = [item for item in items(log) if item[0] + item[1] <= at]
    again = opened(files)
    assert again.found_end.damage is None
    assert again.end == at
    assert items(again) == kept
    assert put(log, 200) == at if at % SIZE + 208 <= SIZE else SIZE * (at // SIZE + 1)
    assert items(opened(files))[: len(kept)] == kept


def test_data_behind_counts_to_the_last_byte_that_is_not_zero(files: MemoryFiles) -> None:
    log = opened(files)
    assert log.data_behind(log.end) == 0
    files.open(f"{FOLDER}/{2048:020d}", writable=True).buffer[500:501] = b"x"
    assert log.data_behind(2348) == 2048 + 501 - 2348
    files.create(f"{FOLDER}/{3072:020d}", SIZE).buffer[3:4] = b"x"
    assert opened(files).data_behind(2348) == 3072 + 4 - 2348
    assert log.data_behind(0) > 0


def test_files_go_from_the_front_but_never_the_last(files: MemoryFiles) -> None:
    log = opened(files)
    assert log.delete_before(1500) == [f"{FOLDER}/{0:020d}"]
    assert (log.begin, log.read(300)) == (1024, None)
    assert [place for place, _, _ in items(log)] == [1024, 1424, 1824, 2048]
    assert log.delete_before(1 << 60) == [f"{FOLDER}/{1024:020d}"]
    assert log.begin == 2048
    assert opened(files).begin == 2048
    assert opened(MemoryFiles()).delete_before(1 << 60) == []


def test_a_log_that_only_reads_writes_nothing(files: MemoryFiles) -> None:
    log = opened(files, writable=False)
    with pytest.raises(ReadOnlyError):
        log.truncate(0)
    assert log.end == 2348


@pytest.mark.parametrize("name", ["x", f"{100:020d}", f"{9 * SIZE:020d}", "0" * 19])
def test_foreign_names_are_refused(files: MemoryFiles, name: str) -> None:
    files.write(f"{FOLDER}/{name}", bytes(SIZE))
    with pytest.raises(CorruptionError) as told:
        opened(files)
    assert (told.value.file, told.value.kind) == (f"{FOLDER}/{name}", "name")


# -------------------------------------------------------------------------------------------------- large offsets


@pytest.mark.parametrize("start", [(1 << 31) - SIZE, 1 << 31, 1 << 32, 1 << 40, (1 << 62)])
def test_offsets_beyond_2_31_and_2_40(tmp_path: Path, start: int) -> None:
    files = DiskFiles()
    file = files.create(str(tmp_path / f"{start:020d}"), SIZE)
    del file
    log = CommitLog.open(str(tmp_path), SIZE)
    assert (log.begin, log.end) == (start, start)
    places = [put(log, 400) for _ in range(5)]
    assert places == [start, start + 400, start + 1024, start + 1424, start + 2048]
    log.flush()
    log.close()
    with CommitLog.open(str(tmp_path), SIZE) as log:
        assert (log.begin, log.end) == (start, start + 2448)
        for place in places:
            message = log.message(place)
            assert message is not None
            assert message.physical_offset == place
        log.truncate(start + 1424)
        assert put(log, 500) == start + 1424


def test_a_large_sparse_file(tmp_path: Path) -> None:
    size = 1 << 30
    start = size << 10
    with CommitLog.open(str(tmp_path), size) as log:
        DiskFiles().create(str(tmp_path / f"{start:020d}"), size)
    with CommitLog.open(str(tmp_path), size) as log:
        put(log, 400)
        log.flush()
        assert log.end == start + 400
    found = os.stat(tmp_path / f"{start:020d}")
    assert found.st_size == size
    assert found.st_blocks * 512 < 8 << 20
    with CommitLog.open(str(tmp_path), size, writable=False) as log:
        assert [place for place, _, _ in items(log)] == [start]


# ------------------------------------------------------------------------------------------------- what it takes


def test_a_message_and_records_are_appended_by_value(tmp_path: Path) -> None:
    with CommitLog.open(tmp_path / "log", SIZE) as log:
        first = log.append(Message("orders", b"one", tags="paid", keys="k1", properties={"a": "b"}))
        second = log.append(next(iter(log)))
        third = log.append(record(0) + record(7))
        stored = list(log)
    assert [message.physical_offset for message in stored] == [first, second, third, third + len(record(0))]
    assert [(message.topic, message.body) for message in stored[:2]] == 2 * [("orders", b"one")]
    assert stored[1].properties == stored[0].properties == {"a": "b", "TAGS": "paid", "KEYS": "k1"}


@pytest.mark.parametrize(
    "item",
    [
        b"",
        b"xxx",
        b"x" * 200,
        bytes(200),
        None,
        3,
        "text",
        record(0)[:-1],
        record(0) + b"x",
        b"\0" * 91,
        Message("T", b"x", delay=3),
        Message("a/b", b"x"),
    ],
)
def test_a_log_takes_records_alone(item: object) -> None:
    log = opened(MemoryFiles())
    place = log.append(record(0))
    with pytest.raises(MessageIllegalError, match=r"expected|topic"):
        log.append(item)  # type: ignore[arg-type]
    assert log.append(Message("T", b"next")) == place + len(record(0))


def test_a_log_alone_refuses_what_is_no_record(tmp_path: Path) -> None:
    for size in (0, -1, 255, "1024", None, 1024.0, True):
        with pytest.raises(ConfigError, match="file_size: expected a whole number of at least 256"):
            CommitLog.open(tmp_path, size)  # type: ignore[arg-type]
    with CommitLog.open(tmp_path, 1 << 16) as log:
        log.append(Message("t", b"x"))
        end = log.end
        for item, reason in ((b"xxx", "whole records: expected a record of at least 91 bytes"), ("x", "found 'x'")):
            with pytest.raises(MessageIllegalError, match=reason):
                log.append(item)  # type: ignore[arg-type]
        assert log.end == end
    with pytest.raises(StoreClosedError, match="is closed"):
        log.append(Message("t", b"x"))
    with CommitLog.open(tmp_path, 1 << 16) as log:
        assert [message.body for message in log] == [b"x"]
