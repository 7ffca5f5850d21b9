"""Index files against a model that does what the code of 4.9.4 says, one key at a time; and files of random bytes."""

from __future__ import annotations

import shutil
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from librmq.errors import CorruptionError
from librmq.files._disk import DiskFiles
from librmq.files._memory import MemoryFiles
from librmq.files.interface import Files
from librmq.java.lang import index_key_hash
from librmq.store.format import _keyindex as keyindex
from librmq.store.format._keyindex import KeyIndex
from librmq.store.format.indexfile import file_length
from tests.budget import examples

START = 1_700_000_000_000
TOPIC = "TopicTest"
# The first key has the hash without an absolute value; the next two share a hash.
KEYS = ["zp1Axdzf", "Aa", "BB", *(f"k{n}" for n in range(7))]
HASHES = {key: index_key_hash(TOPIC, key) for key in KEYS}
NEWEST = (1 << 63) - 1

Record = tuple[int, int, list[int]]


@dataclass
class ModelFile:
    """A model of one file, made of plain lists."""

    slots: int
    entries: int
    begin_timestamp: int = 0
    end_timestamp: int = 0
    begin_physical: int = 0
    end_physical: int = 0
    lists: dict[int, list[tuple[int, int, int, int]]] = field(default_factory=dict)
    """For each slot the number, hash, place and seconds of its entries."""
    count: int = 1

    def put(self, key_hash: int, physical: int, timestamp: int) -> None:
        begin = self.begin_timestamp
        seconds = min(max((timestamp - begin) // 1000, 0), 2**31 - 1) if begin > 0 else 0
        self.lists.setdefault(key_hash % self.slots, []).append((self.count, key_hash, physical, seconds))
        if self.count == 1:
            self.begin_timestamp, self.begin_physical = timestamp, physical
        self.count += 1
        self.end_timestamp, self.end_physical = timestamp, physical

    def data(self) -> bytes:
        slots = [0] * self.slots
        entries = [bytes(20)] * self.entries
        for slot, chain in self.lists.items():
            previous = 0
            for number, key_hash, physical, seconds in chain:
                entries[number] = struct.pack(">iqii", key_hash, physical, seconds, previous)
                previous = slots[slot] = number
        header = struct.pack(
            ">qqqqii",
            self.begin_timestamp,
            self.end_timestamp,
            self.begin_physical,
            self.end_physical,
            len(self.lists),
            self.count if self.count > 1 else 0,
        )
        return header + struct.pack(f">{self.slots}i", *slots) + b"".join(entries)


class Model:
    """A model of all files of a folder."""

    def __init__(self, slots: int, entries: int) -> None:
        self.slots = slots
        self.entries = entries
        self.files: list[ModelFile] = []

    def _room(self) -> ModelFile:
        if not self.files or self.files[-1].count >= self.entries:
            new = ModelFile(self.slots, self.entries)
            if self.files:
                last = self.files[-1]
                new.begin_timestamp = new.end_timestamp = max(last.end_timestamp, 0)
                new.begin_physical = new.end_physical = last.end_physical
            self.files.append(new)
        return self.files[-1]

    def append(self, physical: int, timestamp: int, hashes: list[int]) -> None:
        if physical < self._room().end_physical:
            return
        for key_hash in hashes:
            self._room().put(key_hash, physical, timestamp)

    def query(self, key_hash: int, begin: int, end: int, most: int) -> list[int]:
        found: list[int] = []
        for file in reversed(self.files):
            first, last = file.begin_timestamp, file.end_timestamp
            if (begin < first and end > last) or first <= begin <= last or first <= end <= last:
                for _, entry_hash, physical, seconds in reversed(file.lists.get(key_hash % self.slots, [])):
                    if len(found) >= most:
                        break
                    timestamp = first + 1000 * seconds
                    if entry_hash == key_hash and begin <= timestamp <= end:
                        found.append(physical)
                    if timestamp < begin:
                        break
            if first < begin or len(found) >= most:
                break
        return found


# Differences of place and time between consecutive records: some are negative, some zero.
STEPS = st.tuples(
    st.one_of(st.integers(0, 300), st.sampled_from([-200, 0, 0, 1 << 40])),
    st.one_of(st.integers(0, 5_000), st.sampled_from([-10_000, -1, 0, 0, 1 << 42])),
    st.lists(st.sampled_from(KEYS), max_size=5),
)


class IndexMachine(RuleBasedStateMachine):
    """A `KeyIndex` and its model side by side."""

    def make_files(self) -> tuple[Files, str]:
        return MemoryFiles(), "/index"

    @initialize(
        geometry=st.sampled_from([(4, 8), (1, 2), (3, 5), (64, 256), (1000, 64)]), block=st.sampled_from([1, 4, 240])
    )
    def begin(self, geometry: tuple[int, int], block: int) -> None:
        self.usual_block = keyindex.BLOCK
        keyindex.BLOCK = block
        self.files, self.folder = self.make_files()
        self.model = Model(*geometry)
        self.physical, self.timestamp = 0, START
        self.index = self.open()

    def open(self) -> KeyIndex:
        return KeyIndex.open(
            self.folder, slots=self.model.slots, entries=self.model.entries, files=self.files, now_ms=lambda: START
        )

    def records(self, steps: list[tuple[int, int, list[str]]]) -> list[Record]:
        made = []
        for forward, later, keys in steps:
            self.physical = max(self.physical + forward, 0)
            self.timestamp = min(self.timestamp + later, 1 << 60)
            made.append((self.physical, self.timestamp, [HASHES[key] for key in keys]))
        for record in made:
            self.model.append(*record)
        return made

    @rule(step=STEPS)
    def append(self, step: tuple[int, int, list[str]]) -> None:
        self.index.append_many([self.records([step])[0]])

    @rule(steps=st.lists(STEPS, max_size=12))
    def append_many(self, steps: list[tuple[int, int, list[str]]]) -> None:
        self.index.append_many(self.records(steps))

    @rule(steps=st.lists(STEPS, max_size=30))
    def append_block(self, steps: list[tuple[int, int, list[str]]]) -> None:
        made = self.records(steps)
        self.index.append_block(
            np.array([record[0] for record in made], np.int64),
            np.array([record[1] for record in made], np.int64),
            np.array([n for n, record in enumerate(made) for _ in record[2]], np.int64),
            np.array([key for record in made for key in record[2]], np.int32),
        )

    @rule()
    def reopen(self) -> None:
        self.index.close()
        self.index = self.open()

    @precondition(lambda self: len(self.model.files) > 3)
    @rule(share=st.floats(0, 1))
    def delete_before(self, share: float) -> None:
        physical = int(share * (self.model.files[-1].end_physical + 1))
        while len(self.model.files) > 1 and self.model.files[0].end_physical < physical:
            del self.model.files[0]
        self.index.delete_before(physical)

    @rule(
        key=st.sampled_from([*KEYS, "none"]),
        begin=st.one_of(st.just(0), st.integers(-5_000, 90_000).map(lambda later: START + later)),
        end=st.one_of(st.just(NEWEST), st.integers(-5_000, 90_000).map(lambda later: START + later)),
        most=st.sampled_from([64, 3, 1, 0]),
    )
    def query(self, key: str, begin: int, end: int, most: int) -> None:
        expected = self.model.query(index_key_hash(TOPIC, key), begin, end, most)
        assert self.index.query(TOPIC, key, begin, end, most) == expected

    @invariant()
    def same_bytes(self) -> None:
        if not hasattr(self, "index"):
            return
        found = [self.files.read(file.path) for file in self.index.files]
        assert found == [file.data() for file in self.model.files]
        assert [entry.name for entry in self.files.list(self.folder)] == [f.name for f in self.index.files]
        last = self.model.files[-1] if self.model.files else ModelFile(1, 2)
        assert self.index.end_physical_offset == last.end_physical
        assert self.index.end_timestamp_ms == last.end_timestamp

    def teardown(self) -> None:
        if hasattr(self, "index"):
            keyindex.BLOCK = self.usual_block
            self.index.close()


class DiskIndexMachine(IndexMachine):
    """The same machine with real files."""

    def make_files(self) -> tuple[Files, str]:
        self.home = tempfile.mkdtemp(prefix="librmq-test-")
        return DiskFiles(), str(Path(self.home) / "index")

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "home"):
            shutil.rmtree(self.home)


TestIndexInMemory = IndexMachine.TestCase
TestIndexInMemory.settings = settings(max_examples=examples(60), stateful_step_count=25)
TestIndexOnDisk = DiskIndexMachine.TestCase
TestIndexOnDisk.settings = settings(max_examples=examples(15), stateful_step_count=20)


SLOTS, ENTRIES = 4, 16
LENGTH = file_length(SLOTS, ENTRIES)
SOUND = Model(SLOTS, ENTRIES)
for number in range(9):
    SOUND.append(100 * number, START + 700 * number, list(HASHES.values())[number % 4 : number % 7])

small = st.integers(-2, 18).map(lambda value: value.to_bytes(4, "big", signed=True))
damage = st.lists(
    st.tuples(
        st.one_of(st.integers(0, LENGTH - 1), st.integers(0, LENGTH // 4 - 1).map(lambda word: 4 * word)),
        st.one_of(small, st.binary(min_size=1, max_size=8)),
    ),
    min_size=1,
    max_size=12,
)


@contextmanager
def damage_told(file: str, *kinds: str) -> Iterator[None]:
    """Check that what happens inside raises only a `CorruptionError` that names this file and a kind."""
    try:
        yield
    except CorruptionError as error:
        if error.file != file or error.kind not in kinds:
            raise


def use_all(data: bytes, writable: bool) -> None:
    """Call everything that can be called on an index whose newest file holds ``data``."""
    files = MemoryFiles()
    files.make_folder("/index")
    files.write("/index/20231114221320000", SOUND.files[0].data())
    files.write("/index/20231114221320001", data)
    index = KeyIndex.open("/index", slots=SLOTS, entries=ENTRIES, files=files, now_ms=lambda: START, writable=writable)
    index.last_record()
    for file in index.files:
        file.entries()
        file.slots()
    for key in KEYS:
        for begin, end in ((0, NEWEST), (START, START + 3_000)):
            with damage_told("/index/20231114221320001", "entry"):
                assert len(index.query(TOPIC, key, begin, end, 1000)) <= 1000
    if writable:
        end = index.end_physical_offset
        hashes = list(HASHES.values())
        index.append_many([(end, START, hashes[:2])])
        index.append_many([(end, START, hashes)])
        index.append_block(np.full(9, end), np.full(9, START), np.arange(9), np.array(hashes[:9]))
        index.append_many([(min(end + 1, NEWEST), -(1 << 63), hashes)])
        index.append_many([(min(end + 1, NEWEST), NEWEST, hashes)])
        index.flush()
        index.delete_before(5)
    else:
        assert files.read("/index/20231114221320001") == data
    index.close()


@given(damage, st.booleans())
def test_damaged_files(changes: list[tuple[int, bytes]], writable: bool) -> None:
    data = bytearray(SOUND.files[0].data())
    for place, value in changes:
        data[place : place + len(value)] = value
    with damage_told("/index/20231114221320001", "header"):
        use_all(bytes(data[:LENGTH]).ljust(LENGTH, b"\0"), writable)


@given(st.binary(min_size=LENGTH - 40, max_size=LENGTH - 40), st.integers(0, ENTRIES), st.booleans())
def test_rubbish_behind_a_sound_header(data: bytes, count: int, writable: bool) -> None:
    header = struct.pack(">qqqqii", START, START + 9_000, 0, 4_000, min(count, 1), count)
    use_all(header + data, writable)


@given(st.binary(max_size=2 * LENGTH))
def test_any_bytes(data: bytes) -> None:
    with damage_told("/index/20231114221320001", "size", "header"):
        use_all(data, writable=True)
