"""Index files that are damaged, or hold any bytes: only damage is raised, with its place and kind."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from librmq.errors import CorruptionError
from librmq.files._memory import MemoryFiles
from librmq.java.lang import index_key_hash
from librmq.store.format._keyindex import KeyIndex
from librmq.store.format.indexfile import file_length

START = 1_700_000_000_000
TOPIC = "TopicTest"
# The first key has the hash without an absolute value; the next two share a hash.
KEYS = ["zp1Axdzf", "Aa", "BB", *(f"k{n}" for n in range(7))]
HASHES = [index_key_hash(TOPIC, key) for key in KEYS]
NEWEST = (1 << 63) - 1
SLOTS, ENTRIES = 4, 16
LENGTH = file_length(SLOTS, ENTRIES)


def write_sound() -> bytes:
    """Return what the first file of an index holds that is written usually."""
    files = MemoryFiles()
    index = KeyIndex.open("/index", slots=SLOTS, entries=ENTRIES, files=files, now_ms=lambda: START)
    index.append_many([(100 * number, START + 700 * number, HASHES[number % 4 : number % 7]) for number in range(9)])
    index.flush()
    index.close()
    return files.read(f"/index/{min(entry.name for entry in files.list('/index'))}")


SOUND = write_sound()

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
    files.write("/index/20231114221320000", SOUND)
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
        index.append_many([(end, START, HASHES[:2])])
        index.append_many([(end, START, HASHES)])
        index.append_block(np.full(9, end), np.full(9, START), np.arange(9), np.array(HASHES[:9]))
        index.append_many([(min(end + 1, NEWEST), -(1 << 63), HASHES)])
        index.append_many([(min(end + 1, NEWEST), NEWEST, HASHES)])
        index.flush()
        index.delete_before(5)
    else:
        assert files.read("/index/20231114221320001") == data
    index.close()


@given(damage, st.booleans())
def test_damaged_files(changes: list[tuple[int, bytes]], writable: bool) -> None:
    data = bytearray(SOUND)
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
