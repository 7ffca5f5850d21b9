"""The compiled core gives what the Python code gives; without it some of these tests skip."""

from __future__ import annotations

import gc
import mmap
import os
import struct
import subprocess
import sys
import weakref
import zlib
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from librmq.clock import ManualClock
from librmq.columns import reader
from librmq.columns.arrays import slices
from librmq.commitlog import CommitLog
from librmq.config import StoreConfig
from librmq.consumequeue import ConsumeQueue
from librmq.consumequeue_entries import ENTRY_SIZE, is_ext_address
from librmq.errors import CorruptionError, MessageIllegalError, RmqError
from librmq.files import File
from librmq.files._memory import MemoryFiles
from librmq.files.rolling import MappedFileQueue
from librmq.message import StoredMessage, StoredRecords, record
from librmq.message.message import Message
from librmq.message.record import DECOMPRESSED_LIMIT
from librmq.runtime import compiled_core
from librmq.store import MessageStore
from librmq.store.engine.derivation import COMPARED, key_block
from librmq.store.engine.dispatch import Dispatcher
from librmq.store.format._keyindex import KeyIndex
from librmq.store.format.indexfile import HEADER, IndexHeader, IndexWriter
from librmq.store.recovery._verify import verify
from tests.programs import POSIX
from tests.stores import ROOT, Contents, contents, in_memory

CORE = compiled_core.CORE.module


def needs_core(test: Any) -> Any:
    """Skip a test where the core is not installed or switched off."""
    return pytest.mark.platform(pytest.mark.skipif(CORE is None, reason=compiled_core.CORE.state)(test))


WITH_AND_WITHOUT: Final = ["pure"] if CORE is None else ["core", "pure"]
"""For tests of both codes: those that this run has."""


def without_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the store run its Python code."""
    for module in ("message.frames", "store.engine.derivation"):
        monkeypatch.setattr(f"librmq.{module}.CORE", compiled_core.PURE)


@needs_core
@given(st.binary(max_size=200), st.lists(st.tuples(st.integers(0, 200), st.integers(0, 200)), max_size=9))
def test_parts_side_by_side_are_those_of_arrow(data: bytes, parts: list[tuple[int, int]]) -> None:
    """Also empty ones, ones that overlap, and ones at the end of the data."""
    pairs = [sorted(min(place, len(data)) for place in part) for part in parts]
    begins, ends = np.array(pairs, np.int64).reshape(-1, 2).T
    assert slices(np.frombuffer(data, np.uint8), begins, ends).to_pylist() == [data[a:b] for a, b in pairs]
    for wrong in ([-1, 1], [1, 0], [0, len(data) + 1]):
        with pytest.raises(ValueError, match="parts of the data"):
            CORE.slices(data, *np.array([wrong], np.int64).T.copy())


HEADS = st.binary(min_size=88, max_size=88)


@needs_core
@given(st.binary(max_size=9), st.lists(HEADS, max_size=30))
def test_numbers_of_headers_are_those_of_numpy(before: bytes, heads: list[bytes]) -> None:
    """At any place; one from which not all bytes are there is refused."""
    raw = np.frombuffer(before + b"".join(heads), np.uint8)
    places = len(before) + 88 * np.arange(len(heads))
    names = [name for name, code in record.LAYOUT.items() if code != "8s"]
    expected = record.headers_at(raw, places)
    found = record.fields_at(raw, places[::-1], names)
    assert {name: column[::-1].tolist() for name, column in found.items()} == {
        name: expected[name].tolist() for name in names
    }
    for wrong in (-1, len(raw) - 87):
        with pytest.raises(IndexError, match=str(wrong)):
            CORE.fields(raw, np.array([wrong]), b"\4\124", b"\4\4")
    with pytest.raises(ValueError, match="4 or 8"):
        CORE.fields(raw, places, b"\0", b"\2")


CODES = (
    st.integers(-2, 2)
    | st.integers(-(1 << 31) - 2, -(1 << 31))
    | st.integers(1, 1 << 30).map(lambda high: high << 32 | 1)
)


@needs_core
@given(st.lists(CODES, max_size=40), st.sets(st.integers(-2, 2), max_size=3))
def test_entries_are_chosen_by_32_bits_of_their_codes(codes: list[int], wanted: set[int]) -> None:
    """Unless one has an address in place of a code."""
    entries = b"".join(struct.pack(">qiq", 0, 100, code) for code in codes)
    found = CORE.with_codes(entries, np.array(sorted(wanted), np.int32).tobytes())
    low = np.array(codes, np.int64).astype(np.int32).tolist()
    assert found == (
        None if any(map(is_ext_address, codes)) else [number for number, code in enumerate(low) if code in wanted]
    )


@needs_core
@given(st.binary(max_size=300), st.integers(0, 5))
def test_checksums_are_those_of_zlib(data: bytes, times: int) -> None:
    data *= 3**times
    assert [CORE.crc32(data, folds) for folds in range(3)] == [zlib.crc32(data)] * 3


PLACES = st.integers(-5, 210) | st.sampled_from([-(1 << 63), (1 << 63) - 1])


@needs_core
@given(st.binary(max_size=200), st.lists(st.tuples(PLACES, PLACES), max_size=9))
def test_checksums_of_parts_are_those_of_zlib(data: bytes, parts: list[tuple[int, int]]) -> None:
    """A part that is not within the data has none."""
    begins, ends = np.array(parts, np.int64).reshape(-1, 2).T.copy()
    found = np.frombuffer(CORE.checksums(data, begins, ends), np.uint32).tolist()
    assert found == [zlib.crc32(data[a:b]) if 0 <= a < b <= len(data) else 0 for a, b in parts]
    with pytest.raises(ValueError, match="arrays of one length"):
        CORE.checksums(data, begins, np.append(ends, 0))


@needs_core
def test_columns_find_wrong_bodies_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with MessageStore.open(tmp_path, StoreConfig.tiny()) as store:
        places = [store.append(Message("T", b"body %d" % number)).physical_offset for number in range(50)]
    with (tmp_path / "commitlog" / ("0" * 20)).open("r+b") as file:
        for number in (7, 23):
            file.seek(places[number] + 90)
            file.write(b"!")
    before = CORE.counts()["checksums"]
    compiled = reader(tmp_path, mode="PERMISSIVE").read_all()
    assert CORE.counts()["checksums"] == before + 50
    assert compiled.num_rows - compiled["body"].null_count == 48
    monkeypatch.setattr("librmq.columns.decoding.CORE", compiled_core.PURE)
    assert reader(tmp_path, mode="PERMISSIVE").read_all() == compiled


def filled(sizes: list[int], file_size: int = 1 << 16) -> tuple[MemoryFiles, StoreConfig]:
    """Return the files of a store with a message for each size, some of them unusual."""
    files, config = MemoryFiles(), StoreConfig.tiny(commitlog_file_size=file_size)
    clock = ManualClock(1_700_000_000_000)
    with MessageStore.open("/store", config, files=files, clock=clock, background=False) as store:
        for number, size in enumerate(sizes):
            message = Message(
                "T" * (1 + number % 30), b"x" * size, tags="a", keys="k", properties={"p": "q" * (1 + size % 7)}
            )
            if number % 11 == 5:
                message.properties["DELAY"] = "3"
            host = ("::1", 1) if number % 13 == 7 else None
            store.append(message, number % 3, born_host=host)
    return files, config


def scanned(files: MemoryFiles, config: StoreConfig, **options: Any) -> tuple[list[Any], str]:
    """Return what a scan yields, and where and why it ends."""
    log = CommitLog.open("/store/commitlog", config.commitlog_file_size, files=files, writable=False)
    found = []
    try:
        for item in log.scan(**options):
            found.append(item)
    except CorruptionError as error:
        return found, f"{error.offset} {error.kind} {error.what}"
    return found, str(log.found_end)


FLIPS = st.lists(st.tuples(st.sampled_from(["log", "queue", "index"]), st.integers(0, 60_000), st.integers(0, 255)))


@needs_core
@given(st.lists(st.integers(0, 2000), min_size=1, max_size=60), FLIPS, st.booleans())
def test_verdicts_are_equal(sizes: list[int], flips: list[tuple[str, int, int]], keeps_keys: bool) -> None:
    """With and without the core, of whole stores and damaged ones; the counter shows that the compiled code ran."""
    files, config = filled(sizes)
    with MessageStore.open("/store", config, files=files, background=False) as store:
        store.append_batch([Message("T", b"x", tags=f"t{n}", keys=["k", "l"] if keeps_keys else []) for n in range(99)])
        store.append_batch([Message("T", b"x", keys=key) for key in ("é", "k" * 300)])
    folders = {"log": "/store/commitlog", "queue": "/store/consumequeue/T/0", "index": "/store/index"}
    for folder, at, value in flips:
        entry = files.list(folders[folder])[0]
        files.open(f"{folders[folder]}/{entry.name}").buffer[at % min(entry.size, 20_000)] = value
    before = CORE.counts()["derive"]
    compiled = verify("/store", config, files)
    if not flips:
        assert compiled.sound
        assert CORE.counts()["derive"] - before > 50
    for compared in (16, COMPARED):
        with pytest.MonkeyPatch.context() as patch:
            without_core(patch)
            for module in ("engine.derivation", "recovery._index_check"):
                patch.setattr(f"librmq.store.{module}.COMPARED", compared)  # fewer, so that arrays are worth it
            patch.setattr("librmq.store.engine.derivation._LEAST_APART", 1)
            assert verify("/store", config, files) == compiled


def repaired(before: Contents, config: StoreConfig) -> tuple[Contents, str]:
    """Return what an opening and a close make of a store, and why it was refused."""
    files, refusal = in_memory(before), ""
    try:
        with MessageStore.open(ROOT, config, files=files, background=False, clock=ManualClock(10**12)):
            pass
    except RmqError as error:
        refusal = str(error)
    return contents(files), refusal


@needs_core
def test_few_usual_records_in_a_row_are_not_derived_together() -> None:
    """A block has a fixed cost, so it has to be of many records."""
    files, config = filled([])
    with MessageStore.open("/store", config, files=files, background=False) as store:
        for number in range(1000):
            store.append(Message("T", b"x", tags="é" if number % 2 else "e"))
    before = CORE.counts()["derive"]
    assert verify("/store", config, files).sound
    assert CORE.counts()["derive"] - before < 20


@needs_core
@settings(deadline=None)
@given(
    st.lists(st.integers(0, 2000), min_size=1, max_size=60),
    st.lists(st.sampled_from(["consumequeue/T", "consumequeue", "index", "librmq/closed"])),
    st.lists(st.tuples(st.sampled_from(["log", "index"]), st.integers(0, 20_000), st.integers(0, 255)), max_size=2),
)
def test_repairs_are_equal(sizes: list[int], lost: list[str], flips: list[tuple[str, int, int]]) -> None:
    """Of stores that lack queues or the index, and of damaged ones; the counter shows that the compiled code ran."""
    files, config = filled(sizes)
    before = {
        path: data for path, data in contents(files).items()
        if not any(path.startswith(name) for name in lost)
    }  # fmt: skip
    for folder, at, value in flips:
        for path, data in before.items():
            if path.startswith({"log": "commitlog/", "index": "index/"}[folder]) and data:
                before[path] = data[: at % len(data)] + bytes([value]) + data[at % len(data) + 1 :]
    derived = CORE.counts()["derive"]
    compiled = repaired(before, config)
    if not flips and "consumequeue" in lost:
        assert CORE.counts()["derive"] > derived
    with pytest.MonkeyPatch.context() as patch:
        without_core(patch)
        assert repaired(before, config) == compiled


@needs_core
@given(
    st.lists(st.integers(0, 2000), min_size=1, max_size=60),
    st.lists(st.tuples(st.integers(0, 60_000), st.integers(0, 255)), max_size=3),
    st.booleans(),
)
def test_scans_are_equal(sizes: list[int], flips: list[tuple[int, int]], check_body: bool) -> None:
    """Over whole logs and damaged ones; the counter shows that the compiled code ran."""
    files, config = filled(sizes)
    buffer = files.open("/store/commitlog/" + "0" * 20).buffer
    for at, value in flips:
        buffer[at] = value
    before = CORE.counts()["records"]
    compiled = scanned(files, config, check_body=check_body)
    if not flips:
        assert CORE.counts()["records"] > before
    with pytest.MonkeyPatch.context() as patch:
        without_core(patch)
        assert scanned(files, config, check_body=check_body) == compiled


def pulled(store: MessageStore, most: int) -> list[Any]:
    """Return the messages of all queues with their bodies, and the errors of reads."""
    found: list[Any] = []
    for (topic, queue_id), queue in sorted(store.queues.items()):
        for at in range(0, queue.max_offset + 2, most):
            try:
                result = store.read(topic, queue_id, at, most)
                found.append((result.status, result.next_offset, result.total_size))
                found += [(message.raw, message.body) for message in result.messages]
            except RmqError as error:
                found.append(str(error))
    return found


def pulled_damaged(sizes: list[int], flips: list[tuple[int, int]], most: int) -> list[Any]:
    """Return what is pulled from a view whose log is damaged after it was opened; each pull can refresh it."""
    files, config = filled(sizes)
    with MessageStore.open("/store", config, files=files, read_only=True) as store:
        buffer = store.log.sequence.file(0).buffer
        for at, value in flips:
            buffer[at] = value
        return pulled(store, most)


@needs_core
@settings(deadline=None)
@example([0], [(84, 1), (109, 1)], 1)
@given(
    st.lists(st.integers(0, 2000), min_size=1, max_size=60),
    st.lists(st.tuples(st.integers(0, 60_000), st.integers(0, 255)), max_size=3),
    st.integers(1, 40),
)
def test_pulls_are_equal(sizes: list[int], flips: list[tuple[int, int]], most: int) -> None:
    """Of whole logs and damaged ones; the counter shows that the compiled code ran."""
    before = CORE.counts()["pull"]
    compiled = pulled_damaged(sizes, flips, most)
    if not flips:
        assert CORE.counts()["pull"] > before
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("librmq.store.engine.read._read", None)
        patch.setattr("librmq.store.engine.read._pull", None)
        assert pulled_damaged(sizes, flips, most) == compiled


@needs_core
@given(st.binary(min_size=91, max_size=300), st.integers(0, 400))
def test_bodies_are_equal(raw: bytes, length: int) -> None:
    """Also of bytes that are no record, or claim a body that is longer than they are."""
    for flags in (0, 1, 16, 32, 0x101):
        data = raw[:36] + flags.to_bytes(4, "big") + raw[40:84] + length.to_bytes(4, "big") + raw[88:]
        message, said = StoredMessage(data), list[Any]()
        for compiled in (True, False):
            try:
                said.append(message.body if compiled else message.decompressed_body(DECOMPRESSED_LIMIT))
            except RmqError as error:
                said.append(type(error))
        if not flags & 49 and length < len(data) - 90:
            assert said[0] == data[88 : 88 + length]
        else:
            assert said[0] == said[1]


@needs_core
@given(st.lists(st.tuples(st.integers(-5, 4200), st.integers(-5, 300)), min_size=1, max_size=8), st.integers(0, 40))
def test_pulls_stay_within_the_file(entries: list[tuple[int, int]], start: int) -> None:
    """Whatever queue entries claim."""
    buffer = mmap.mmap(-1, 4096)
    for queue_offset, (place, size) in enumerate(entries, 7):
        if 0 <= place - start <= 4000 and size > record.FIXED_SIZE:
            made = plain_record(size, place, queue_offset)[: 4096 - (place - start)]
            buffer[place - start : place - start + len(made)] = made
    raw = b"".join(struct.pack(">qiq", place, size, 0) for place, size in entries)
    for end in (start + 4096, start + 100, start + 5000):
        found = CORE.pull(raw, buffer, start, end, len(entries), 1 << 20, "T", 0, 7)
        if found is not None:
            assert [len(message.raw) for message in found[0]] == [size for _, size in entries]
            assert end <= start + 4096
        joined = None if found is None else (b"".join(message.raw for message in found[0]), len(entries))
        assert CORE.pull(raw, buffer, start, end, len(entries), 1 << 20, "T", 0, 7, True) == joined
        if start == 0:
            log = Log(end, 4096, {0: SimpleNamespace(buffer=buffer)})
            limits = SimpleNamespace(memory=1 << 40, most=((32, 1 << 20),) * 2)
            result = CORE.read(log, queue_with(raw), 7, len(entries), limits, 0, 99, ("T", 0))
            within = CORE.pull(raw, buffer, 0, min(end, 4096), len(entries), 1 << 20, "T", 0, 7)
            assert (None if result is None else (result.messages, result.total_size)) == within
            assert result is None or (result.next_offset, result.max_offset) == (7 + len(entries), 99)


def plain_record(size: int, physical_offset: int, queue_offset: int) -> bytes:
    """Return a record of queue 0 of topic T."""
    body = bytes(size - record.FIXED_SIZE - 1)
    fields = record.Record(
        topic="T",
        queue_offset=queue_offset,
        physical_offset=physical_offset,
        body=body,
        body_crc=record.body_checksum(body),
    )
    return record.encode_record(fields)


@needs_core
@given(st.integers(92, 300), st.integers(0, 1 << 40), st.integers(0, 1 << 40), st.integers(0, 300 * 8))
def test_a_flipped_bit_makes_a_record_unusual(size: int, place: int, queue_offset: int, bit: int) -> None:
    """Except in fields that no checksum covers, and that say nothing of its place."""
    raw = bytearray(plain_record(size, place, queue_offset))
    assert CORE.is_stored(bytes(raw), place, queue_offset, 0, "T")
    assert not CORE.is_stored(bytes(raw), place + 1, queue_offset, 0, "T")
    assert not CORE.is_stored(bytes(raw), place, queue_offset, 1, "T")
    assert not CORE.is_stored(bytes(raw), place, queue_offset, 1 << 40, "T")
    assert not CORE.is_stored(bytes(raw), place, queue_offset, 0, "TT")
    at = bit // 8 % size
    raw[at] ^= 1 << bit % 8
    is_of_place = at < 16 or 20 <= at < 36 or at >= 84 or (at == 39 and bit % 8 in (4, 5))
    assert CORE.is_stored(bytes(raw), place, queue_offset, 0, "T") == (not is_of_place or (8 <= at < 12 and size == 92))


def queue_with(entries: bytes, *, is_closed: bool = False) -> ConsumeQueue:
    """Return a queue whose second file begins with ``entries``, at queue offset 7, and has 20 of them."""
    buffer = mmap.mmap(-1, 20 * ENTRY_SIZE)
    buffer[: len(entries)] = entries
    queue, files = object.__new__(ConsumeQueue), object.__new__(MappedFileQueue)
    files.mapped, files.file_size = {7 * ENTRY_SIZE: File("", buffer, len(buffer), True)}, 7 * ENTRY_SIZE
    queue._files, queue._closed = files, is_closed
    return queue


@needs_core
@given(
    st.integers(-(1 << 70), 1 << 70) | st.integers(-3, 30) | st.just(9.0),
    st.integers(-(1 << 70), 1 << 70) | st.integers(-3, 70) | st.just(None),
)
def test_a_compiled_read_takes_entries_from_their_file_only(queue_offset: Any, max_messages: Any) -> None:
    """Whatever is asked for; what has other types is left to the Python code, and so is a closed queue."""
    records = [plain_record(100, 100 * number, 7 + number) for number in range(20)]
    buffer = mmap.mmap(-1, 4096)
    buffer[: 100 * 20] = b"".join(records)
    log = Log(4096, 4096, {0: SimpleNamespace(buffer=buffer)})
    limits = SimpleNamespace(memory=9999, most=((9, 500),) * 2)
    queue = queue_with(b"".join(struct.pack(">qiq", 100 * number, 100, 0) for number in range(20)))
    result = CORE.read(log, queue, queue_offset, max_messages, limits, 7, 99, ("T", 0))
    if type(queue_offset) is type(max_messages) is int and 7 <= queue_offset < 14 and abs(max_messages) < 1 << 63:
        count = min(max(max_messages, 1), 5)
        assert [message.raw for message in result.messages] == records[queue_offset - 7 : queue_offset - 7 + count]
        assert result.next_offset == queue_offset + count
        assert result.total_size == 100 * count
    else:
        assert result is None
    assert CORE.read(log, queue_with(b"", is_closed=True), 7, 1, limits, 7, 99, ("T", 0)) is None


class Log(compiled_core.LogState):
    """What a compiled read needs of a log."""

    def __init__(self, end: int, file_size: int, mapped: dict[int, Any]) -> None:
        self.end, self.file_size, self._mapped, self._looks, self._looked_at = end, file_size, mapped, 0, -1


def test_a_scan_changes_no_item_that_is_kept() -> None:
    """Although items, and the bytes of records, that the caller has dropped can serve again."""
    files, config = filled([40] * 70)
    with MessageStore.open("/store", config, files=files) as store:
        expected = [(place, size, bytes(bytearray(raw or b""))) for place, size, raw in store.log.scan()]
        kept = dict[int, Any]()
        for number, item in enumerate(store.log.scan()):
            assert item[2] is None or hash(item[2]) == hash(expected[number][2])
            if number % 3:
                kept[number] = item if number % 3 == 1 else item[2]
        for number, value in kept.items():
            place, size, raw = expected[number]
            assert value in ((place, size, raw or None), raw or None)


def test_a_read_changes_no_message_that_is_kept(tmp_path: Path) -> None:
    """Although messages, and their bytes, that the caller has dropped can serve again."""
    with MessageStore.open(tmp_path / "store") as store:
        for number in range(140):
            store.append(Message("T", b"%d" % (number % 7) * (5000 if number % 7 == 2 else 40 + number % 3 // 2)))
        expected = [bytes(bytearray(message.raw)) for message in store]
        kept = dict[tuple[int, int], Any]()
        for turn in range(3):
            at = 0
            while at < len(expected):
                result = store.read("T", 0, at)
                for number, message in enumerate(result.messages, at):
                    assert (message.topic, hash(message.raw)) == ("T", hash(expected[number]))
                    if number % 5 < 3:
                        kept[turn, number] = (message, message.raw, memoryview(message.raw))[number % 5]
                at = result.next_offset
        for (_, number), value in kept.items():
            assert getattr(value, "raw", value) == expected[number]


@needs_core
def test_messages_need_no_collector() -> None:
    """Those of a class that inherits from theirs do, because it can have fields that refer to other objects."""

    class Inheriting(StoredMessage):
        __slots__ = ("__weakref__", "other")

        other: Any

    message, inheriting = StoredMessage(bytes(91)), Inheriting(bytes(91))
    assert (gc.is_tracked(message), gc.is_tracked(inheriting)) == (False, True)
    inheriting.other, freed = inheriting, weakref.ref(inheriting)
    del inheriting
    gc.collect()
    assert freed() is None


@needs_core
@pytest.mark.parametrize("tags", [None, "a"])
def test_joined_records_are_those_of_a_usual_read(tmp_path: Path, tags: str | None) -> None:
    """Also of a read with a filter, whose messages are not joined."""
    with MessageStore.open(tmp_path / "store", StoreConfig.tiny()) as store:
        for number in range(9):
            store.append(Message("T", bytes(10 * number), tags="a" if number % 2 else "b"))
        matching = store.matching(tags=tags)
        usual = store.read("T", 0, 1, 6, matching)
        joined = store.read("T", 0, 1, 6, matching, joined=True)
        assert isinstance(joined.messages, StoredRecords) == (tags is None)
        assert len(joined.messages) == len(usual.messages) > 0
        assert list(joined.messages) == usual.messages
        assert joined.messages[-1] == usual.messages[-1]
        assert (joined.status, joined.next_offset, joined.max_offset) == (usual.status, usual.next_offset, 9)
        assert joined.total_size == usual.total_size


@needs_core
def test_a_pull_from_a_closed_mapping_keeps_collection() -> None:
    """A refused pull does not leave the garbage collector of the process off."""
    buffer = mmap.mmap(-1, 4096)
    buffer.close()
    with pytest.raises(ValueError, match="closed"):
        CORE.pull(struct.pack(">qiq", 0, 100, 0), buffer, 0, 4096, 1, 1 << 20, "T", 0, 0)
    assert gc.isenabled()


@needs_core
@given(st.binary(max_size=400), st.binary(max_size=120), st.integers(0, 500))
def test_arbitrary_bytes_are_no_records(head: bytes, tail: bytes, inside: int) -> None:
    """The compiled reading never goes beyond its bytes, whatever lengths they claim."""

    def unusual(place: int) -> tuple[int, int, None]:
        return place, len(data), None

    for size in (91, 92, 120, 1 << 20, 0xFFFFFFFF):
        data = head + size.to_bytes(4, "big") + b"\xda\xa3\x20\xa7" + tail
        for end in (len(data), len(data) + 1000):
            items = CORE.Items(data, 0, inside, end, end, False, unusual, lambda done: None)
            assert all(raw is None or len(raw) == length for _, length, raw in items)


def test_a_store_says_which_code_runs() -> None:
    with MessageStore.open("/store", StoreConfig.tiny(), files=MemoryFiles()) as store:
        assert store.core == ("compiled core" if CORE else compiled_core.CORE.state)


def said_with(variable: str, first: str = "") -> str:
    """Return which code another process runs with this value of the variable, or the error that it ends with."""
    program = f"{first}\nfrom librmq.runtime.compiled_core import CORE\nprint(CORE.state)"
    variables = {**os.environ, "LIBRMQ_CORE": variable}
    ended = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True, check=False)
    return ended.stdout or ended.stderr.splitlines()[-1]


def test_a_variable_switches_the_core_off() -> None:
    assert said_with("off") == "pure Python, because LIBRMQ_CORE is off\n"


OPENED = (
    "import logging, sys\nfrom librmq import MessageStore\nfrom librmq.files import MemoryFiles\n"
    "logging.basicConfig(level=logging.INFO, stream=sys.stdout)\n"
    "for name in 'ab': MessageStore.open(name, files=MemoryFiles()).close()"
)
WITHOUT_CORE = "import sys; sys.modules['librmq.runtime._core'] = None"
WITHOUT_LOCK = "import sys; sys._is_gil_enabled = lambda: False"


def test_one_log_line_says_that_python_runs() -> None:
    line = "INFO:librmq.store:hot paths run in pure Python, because LIBRMQ_CORE is off"
    assert said_with("off", OPENED).splitlines()[:-1] == [line]


@POSIX
def test_one_warning_says_that_an_installation_lacks_the_core() -> None:
    line = (
        "WARNING:librmq.store:hot paths run in pure Python, because this installation was built without the compiled "
        "core; docs/performance.md says how to get it"
    )
    assert said_with("", f"{WITHOUT_CORE}\n{OPENED}").splitlines()[:-1] == [line]


def test_a_free_threaded_build_runs_python_code() -> None:
    reason = "the compiled core needs the interpreter lock"
    assert said_with("", WITHOUT_LOCK) == f"pure Python, because {reason}\n"
    assert f"LIBRMQ_CORE is on, but {reason}; " in said_with("on", WITHOUT_LOCK)


def test_a_required_core_that_is_missing_is_an_error() -> None:
    error = "librmq.errors.ConfigError: LIBRMQ_CORE is on, but this installation was built without the compiled core; "
    assert said_with("on", WITHOUT_CORE).startswith(error)


def test_an_unknown_value_of_the_variable_is_an_error() -> None:
    assert "LIBRMQ_CORE is 'maybe', and must be 'on', 'off' or unset" in said_with("maybe")


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("API = 0", "has API 0, and not"),
        ("", "has API None, and not"),
        ("raise ImportError('undefined symbol: x')", "can't be loaded: undefined symbol: x"),
    ],
)
def test_another_api_is_refused(tmp_path: Path, module: str, said: str) -> None:
    """As where a build left the core of another version, or of another machine."""
    (file := tmp_path / "core.py").write_text(module, "utf-8")
    first = (
        "import sys\nfrom importlib.util import spec_from_file_location\n"
        f"class Finder: find_spec = lambda name, *_: spec_from_file_location(name, {str(file)!r}) if "
        "name == 'librmq.runtime._core' else None\nsys.meta_path.insert(0, Finder)"
    )
    assert f"pure Python, because the compiled core {said}" in said_with("", first)
    assert f"LIBRMQ_CORE is on, but the compiled core {said}" in said_with("on", first)


@needs_core
def test_usual_appends_are_compiled(tmp_path: Path) -> None:
    """All but those that open the queue, write entries and keys, or make room."""
    with MessageStore.open(tmp_path / "store") as store:
        before = CORE.counts()["append"]
        for number in range(10_000):
            store.append(Message("T", b"x" * 100, tags="a", keys=f"k{number}", properties={"p": "q"}))
        assert CORE.counts()["append"] - before > 9_700
        assert [store.read("T", 0, at, 1).messages[0].keys for at in (0, 9_999)] == [("k0",), ("k9999",)]


@needs_core
def test_usual_batches_are_compiled(tmp_path: Path) -> None:
    with MessageStore.open(tmp_path / "store") as store:
        before = CORE.counts()["append"]
        for _ in range(100):
            store.append_batch([Message("T", b"x" * 100, tags="a", keys=f"k{number}") for number in range(100)])
        assert CORE.counts()["append"] - before > 9_000
        assert store.queues["T", 0].max_offset == 10_000


@needs_core
def test_batches_for_which_blocks_are_allocated_are_compiled(tmp_path: Path) -> None:
    """All but the one that opens the queue."""
    with MessageStore.open(tmp_path / "store", background=False) as store:
        before = CORE.counts()["append"]
        for _ in range(40):
            store.append_batch([Message("T", b"x" * 1024)] * 256)
        assert CORE.counts()["append"] - before == 39 * 256


@needs_core
def test_a_batch_that_waits_for_the_lock_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with MessageStore.open("/store", StoreConfig.tiny(), files=MemoryFiles(), background=False) as store:
        store.append(Message("T", b"x"))
        for others in ([], [None], [Message("T", b"y")] * 2):
            messages: list[Any] = [Message("T", b"x")]

            def release(messages: list[Any] = messages, others: list[Any] = others) -> None:
                messages[:] = others
                store.appender.lock.mutex.release()

            monkeypatch.setattr(store.appender.lock, "yield_to_waiters", release)
            store.appender.lock.mutex.acquire()
            before = CORE.counts()["append"]
            with suppress(MessageIllegalError, TypeError):
                store.append_batch(messages)
            assert CORE.counts()["append"] - before == (2 if len(others) == 2 else 0)
            assert not store.appender.lock.mutex.locked()
        assert store.queues["T", 0].max_offset == 3


@needs_core
def test_a_batch_that_is_emptied_while_room_is_made_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with MessageStore.open("/store", StoreConfig.tiny(), files=MemoryFiles(), background=False) as store:
        messages = [Message("T", b"x")]
        for _ in range(2):
            store.append_batch(messages)  # the first one opens the queue
        monkeypatch.setattr(store.appender, "make_room", lambda size: messages.clear())
        monkeypatch.setattr(store.log, "sure", store.log.end)
        with pytest.raises(MessageIllegalError):
            store.append_batch(messages)


@needs_core
@pytest.mark.parametrize("count", [3, Dispatcher.BATCH, 300])
def test_batches_are_stored_alike(count: int) -> None:
    """Whatever the messages are, and whether entries and keys are written at once; here most have many keys."""
    config = StoreConfig.tiny(commitlog_file_size=1 << 23, max_message_size=1 << 22, max_index_num=6000)
    keys = ("", "k", "é k", " ".join(f"k{number}" for number in range(20)))

    def message(at: int, size: int) -> Message:
        message = Message("T", b"x" * size)
        message.properties.update({"KEYS": keys[at % 4], "UNIQ_KEY": f"u{at}" * (at % 3), "TAGS": f"é{at}"})
        return message

    stored = []
    for compiled in (True, False):
        files = MemoryFiles()
        with MessageStore.open(ROOT, config, files=files, clock=ManualClock(), background=False) as store:
            store.append(message(0, 0))
            store.log.prepare(4 << 20)
            store.append(message(0, 1 << 20))  # the log knows the room now
            assert store.find_by_key("T", "k") == [], "nothing is collected now"
            append, before = store.append_batch if compiled else store.appender.append_batch, CORE.counts()["append"]
            results = [append([message(at, 37 * at % 9000) for at in range(count)]) for _ in range(2)]
            assert CORE.counts()["append"] - before == (2 * count if compiled else 0)
        stored.append((results, contents(files)))
    assert stored[0] == stored[1]


@needs_core
def test_appends_that_wait_for_the_device_are_compiled() -> None:
    config = StoreConfig.tiny(durability="sync")
    with MessageStore.open("/store", config, files=MemoryFiles(), background=False) as store:
        store.append(Message("T", b"x"))
        before = CORE.counts()["append"]
        for append in (store.append, lambda message: store.append_batch([message])):
            append(Message("T", b"x"))
            assert store.appender.flushed == store.log.end
        flushed = store.appender.flushed
        store.append(Message("T", b"x"), wait=False)
        assert store.appender.flushed == flushed < store.log.end
        assert CORE.counts()["append"] - before == 3


FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "born_timestamp_ms": st.none() | st.integers(0, 1 << 62) | st.sampled_from([-1, 1 << 63, True]),
        "born_host": st.sampled_from(
            [None, ("10.0.0.1", 7), b"\n\0\0\1\0\0\0\7", ("::1", 7), ["10.0.0.1", 7], ("x", 7)]
        ),
        "store_host": st.sampled_from([None, b"\x7f\0\0\1\0\0\x2a\x9f", ("10.0.0.2", 9)]),
        "sys_flag": st.sampled_from([0, 2, 8, 10, 1, 4, 12, 16, 32, -1, 1 << 31, 1 << 64, "8"]),
        "reconsume_times": st.integers(0, 16) | st.sampled_from([-1, 1 << 31, None]),
        "prepared_transaction_offset": st.integers(0, 1 << 62) | st.sampled_from([-1, 1 << 63, 1.5]),
    },
)


@needs_core
@settings(deadline=None)
@given(st.lists(FIELDS, min_size=1, max_size=5))
def test_fields_of_a_broker_are_stored_or_refused_alike(given_fields: list[dict[str, Any]]) -> None:
    said = []
    for compiled in (True, False):
        with MessageStore.open(
            "/store", StoreConfig.tiny(), files=MemoryFiles(), clock=ManualClock(), background=False
        ) as store:
            results: list[object] = []
            for fields in [{}, *given_fields]:
                try:
                    append = store.append if compiled else store.appender.append
                    results.append(append(Message("T", b"x", tags="a", keys="k"), **fields))
                except (RmqError, TypeError) as error:
                    results.append((type(error), str(error)))
            said.append((results, [message.raw for message in store]))
    assert said[0] == said[1]


@needs_core
def test_sends_and_transactions_of_a_broker_are_compiled() -> None:
    with MessageStore.open("/store", StoreConfig.tiny(), files=MemoryFiles(), background=False) as store:
        fields: list[Any] = [
            {"born_timestamp_ms": 5, "born_host": ("10.0.0.1", 7), "sys_flag": 0, "reconsume_times": 0},
            {"sys_flag": 8, "prepared_transaction_offset": 90, "wait": False},
        ]
        store.append(Message("T", b"x"))
        before = CORE.counts()["append"]
        for values in fields:
            store.append(Message("T", b"x"), **values)
        assert CORE.counts()["append"] - before == 2


@needs_core
@pytest.mark.parametrize(
    "changed",
    [
        {"body": "text"},
        {"topic": 5},
        {"flag": 1 << 31},
        {"properties": {"a": 1}},
        {"properties": {"a": "b\2c"}},
        {"properties": {"a": "\ud800"}},
    ],
)
def test_what_is_refused_is_refused_alike(changed: dict[str, Any]) -> None:
    """A message that was changed after it was made; the refused append has no effect."""
    with MessageStore.open("/store", StoreConfig.tiny(), files=MemoryFiles(), background=False) as store:
        message = Message("T", b"x", properties={"a": "b"})
        end = store.append(message).size
        for name, value in changed.items():
            setattr(message, name, value)
        said = []
        for append in (store.append, store.appender.append):
            with pytest.raises((RmqError, TypeError, AttributeError)) as caught:
                append(message)
            said.append((caught.type, str(caught.value)))
        assert said[0] == said[1]
        assert store.log.end == end


@needs_core
def test_a_message_that_changes_meanwhile_is_looked_at_again() -> None:
    """As by another thread, while the clock runs Python code."""
    with MessageStore.open(
        "/store", StoreConfig.tiny(), files=MemoryFiles(), clock=ManualClock(), background=False
    ) as store:
        for append in (store.append, lambda message: store.append_batch([message])):
            message: Any = Message("T", b"sound")
            append(message)

            def change(frame: Any, event: str, _: object, message: Any = message) -> None:
                if event == "call" and frame.f_code.co_name == "now_ms":
                    message.body = "no bytes"

            end = store.log.end
            before = sys.getprofile()
            sys.setprofile(change)
            try:
                with pytest.raises(TypeError):
                    append(message)
            finally:
                sys.setprofile(before)
            assert store.log.end == end


@needs_core
def test_names_of_another_type_are_unusual() -> None:
    """Comparing them could run Python code."""

    class Name(str):
        __slots__ = ()

    with MessageStore.open("/store", StoreConfig.tiny(), files=MemoryFiles(), background=False) as store:
        appended = []
        for name in ("p", "p", Name("p"), "p"):
            before = CORE.counts()["append"]
            result = store.append(Message("T", b"x", properties={name: "q"}))
            appended.append(CORE.counts()["append"] - before)
            assert hash(result) == hash(tuple(result))
        assert appended == [0, 1, 0, 1]
        messages = store.read("T", 0, 0, 4).messages
        assert [message.properties for message in messages] == [{"p": "q"}] * 4


KEYS = st.none() | st.sampled_from(["", "k", "k1 k2", " a  b ", "ключ", "\U0001f600", "x" * 200])


@needs_core
@given(st.lists(st.tuples(st.integers(-(1 << 31), 1 << 31), KEYS, KEYS), min_size=1, max_size=40))
def test_hashes_of_keys_are_equal(keys: list[tuple[int, str | None, str | None]]) -> None:
    def stored(text: str | None) -> bytes | None:
        return None if text is None else text.encode()

    records = [(100 * n, 7 * n, prefix, stored(one), stored(two)) for n, (prefix, one, two) in enumerate(keys)]
    compiled = [array.tolist() for array in key_block(records)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("librmq.store.engine.derivation.CORE", compiled_core.PURE)
        assert [array.tolist() for array in key_block(records)] == compiled


@needs_core
@given(st.lists(st.integers(0, 20), min_size=1, max_size=9), st.lists(st.integers(0, 20), min_size=1, max_size=9))
def test_keys_that_a_kill_left_are_taken_back(counted: list[int], left: list[int]) -> None:
    """The compiled writer has written entries and slots, and died before the header that counts them."""
    slots, room = 7, 30
    buffer = mmap.mmap(-1, 40 + 4 * slots + 20 * room)
    writer = IndexWriter(IndexHeader(1000, 1000, 0, 0, 0, 1), slots)
    for hashes, is_counted in ((counted, True), (left, False)):
        places = np.arange(len(hashes)) * 100 + 100 * writer.count
        arrays = places, places + 1000, np.array(hashes, np.int64)
        if is_counted:
            writer.put_block(buffer, *arrays)
            before = buffer[:]
        else:
            CORE.put_entries(buffer, slots, writer.count, *arrays, writer.begin_timestamp, 0)
    assert buffer[:] != before
    assert IndexWriter(IndexHeader(*HEADER.unpack(buffer[:40])), slots).take_back(buffer, room)
    assert buffer[:] == before


@needs_core
@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), min_size=1, max_size=12), st.integers(0, 5))
def test_blocks_of_keys_are_written_alike(records: list[tuple[int, int]], before: int) -> None:
    """Also where a record is before another one, or before those that are in the index; such keys are left out."""
    owners = [number for number, (_, keys) in enumerate(records) for _ in range(keys)]
    folders = []
    for patched in (compiled_core.CORE, compiled_core.PURE):
        files = MemoryFiles()
        with pytest.MonkeyPatch.context() as patch, KeyIndex.open("/index", slots=7, entries=30, files=files) as index:
            patch.setattr("librmq.store.format._keyindex.CORE", patched)
            index.append_many([(before, 1000, [1])])
            places, times = np.array([place for place, _ in records]), np.arange(len(records)) + 2000
            index.append_block(places, times, np.array(owners, np.int64), np.arange(len(owners)))
        folders.append(sorted(str(data) for data in contents(files, "/index").values()))
    assert folders[0] == folders[1]
    with pytest.raises(ValueError, match="arrays of one length"):
        CORE.spread(places, times[:-1], np.array(owners, np.int64), 0)


@needs_core
def test_a_result_that_is_kept_does_not_change() -> None:
    """The compiled append uses a result again that its caller dropped."""
    with MessageStore.open("/store", StoreConfig.tiny(), files=MemoryFiles(), background=False) as store:
        kept = [store.append(Message("T", b"x")) for _ in range(3)]
        for number in range(9):
            store.append(Message("T", b"y"))
            kept.append(store.append(Message("T", b"z" * number)))
        assert [result.queue_offset for result in kept] == [0, 1, 2, *range(4, 22, 2)]
        assert len({hash(result) for result in kept}) == 12


@needs_core
@pytest.mark.parametrize("is_batch", [False, True])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_log_near_its_last_place_refuses_alike(is_batch: bool, is_compiled: bool) -> None:
    """The place behind a record of 9,000 bytes is beyond 64 bits; it is refused by its length, not by its place."""
    files, size = MemoryFiles(), 4096
    files.make_folder("/store/commitlog")
    files.write(f"/store/commitlog/{(1 << 63) - 2 * size:020d}", bytes(size))
    config = StoreConfig.tiny(commitlog_file_size=size)
    with MessageStore.open("/store", config, files=files, clock=ManualClock(), background=False) as store:

        def append(body: bytes) -> None:
            message = Message("T", body, tags="a", keys="k")
            appender = store if is_compiled else store.appender
            if is_batch:
                appender.append_batch([message])
            else:
                appender.append(message)

        append(b"first")
        end = store.log.end
        assert end > (1 << 63) - 2 * size
        with pytest.raises(MessageIllegalError, match="a log file of 4096 bytes"):
            append(bytes(9000))
        assert store.log.end == end
        append(b"second")
        assert [message.body for message in store] == [b"first", b"second"]
