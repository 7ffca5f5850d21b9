"""Extension units: the reference's bytes and addresses, rolling, finding the end, truncation, damage."""

from __future__ import annotations

import itertools
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from librmq.consumequeue import ConsumeQueue
from librmq.consumequeue_entries import ENTRY_SIZE, LAST_EXT_ADDRESS, ExtUnit, is_ext_address
from librmq.consumequeue_ext import ConsumeQueueExt, pack_unit
from librmq.errors import ConfigError, CorruptionError, ReadOnlyError, StoreClosedError, StoreError
from librmq.files._memory import MemoryFiles
from librmq.files.interface import Files, is_folder
from tests.reference import encoding, rows, store_folders

BASE = -(1 << 63)
SMALL = 64  # room for three units without a bitmap, or one with a bitmap of 14 bytes


def opened(files: Files, *, last_address: int | None = None, writable: bool = True) -> ConsumeQueueExt:
    return ConsumeQueueExt.open("/e", SMALL, files=files, writable=writable, last_address=last_address)


def queue_of(files: Files, ext_folder: str | None = "/e") -> ConsumeQueue:
    return ConsumeQueue.open("/q", 5 * ENTRY_SIZE, files=files, ext_folder=ext_folder, ext_file_size=SMALL)


def filled(files: Files, count: int) -> ConsumeQueue:
    """Return a queue of 10-byte messages, each with a unit of 20 bytes; three units fill a file of 64 bytes."""
    queue = queue_of(files)
    assert queue.ext is not None
    for n in range(count):
        queue.append(n, 10 * n, 10, queue.ext.put(n, 1000 + n, None))
    return queue


def contents(files: Files, folder: str = "/e") -> dict[str, bytes]:
    return {entry.name: files.read(f"{folder}/{entry.name}") for entry in files.list(folder)}


def spoil(files: Files, path: str, at: int, data: bytes) -> None:
    files.open(path, writable=True).buffer[at : at + len(data)] = data


# ---------------------------------------------------------------------------------------------- the reference


def test_units_are_the_references() -> None:
    files = MemoryFiles()
    ext = ConsumeQueueExt.open("/e", 4096, files=files)
    position = 0
    for row in encoding("cq_ext_unit"):
        bitmap = None if row["bitmap_hex"] is None else bytes.fromhex(row["bitmap_hex"])
        raw = pack_unit(row["tags_code"], row["msg_store_time"], bitmap)
        assert (raw.hex(), len(raw)) == (row["encoded_hex"], row["size"])
        address = ext.put(row["tags_code"], row["msg_store_time"], bitmap)
        assert address == BASE + position
        assert ext.get(address) == ExtUnit(row["tags_code"], row["msg_store_time"], bitmap, row["size"])
        position += len(raw)


def test_addresses_are_printed_as_in_the_reference() -> None:
    for row in encoding("ext_addr"):
        assert is_ext_address(row["value"]) == row["is_ext_addr"]


@pytest.mark.parametrize("folder", store_folders())
def test_storing_the_reference_timers_gives_its_files(folder: Path) -> None:
    (config,) = rows(folder, "config")
    clean = not config["abort_file_present"] and not (folder / "mutation.json").exists()
    with_units = [row for row in rows(folder, "cq") if row.get("ext")]
    for (topic, queue_id), group in itertools.groupby(with_units, lambda r: (r["topic"], r["queue_id"])):
        size = config["consumequeue_ext_file_size"]
        files = MemoryFiles()
        ours = ConsumeQueueExt.open("/e", size, files=files)
        path = folder.joinpath("store", "consumequeue_ext", topic, str(queue_id))
        theirs = ConsumeQueueExt.open(str(path), size, writable=False)
        for row in group:
            unit = row["ext"]
            bitmap = None if unit["bitmap_hex"] is None else bytes.fromhex(unit["bitmap_hex"])
            address = ours.put(unit["tags_code"], unit["msg_store_time"], bitmap)
            if clean:
                assert address == row["tags_code"]
                assert theirs.get(address) == ours.get(address)
        if clean:
            assert contents(files) == {file.name: file.read_bytes() for file in path.iterdir()}
            assert theirs.end == ours.end


# -------------------------------------------------------------------------------------------------- appending


def test_a_unit_that_does_not_fit_goes_to_the_next_file() -> None:
    files = MemoryFiles()
    ext = opened(files)
    first = [ext.put(n, n, None) for n in range(2)]
    assert first == [BASE, BASE + 20]
    assert ext.put(2, 2, None) == BASE + 40  # leaves exactly the 4 bytes of the end mark
    assert ext.put(3, 3, b"x") == BASE + 64
    assert ext.put(4, 4, bytes(20)) == BASE + 128  # 43 bytes are left, 4 of them for the end mark
    assert ext.put(5, 5, bytes(40)) == BASE + 192
    assert contents(files)[f"{0:020d}"][60:] == b"\xff\xff\0\0"
    assert contents(files)[f"{64:020d}"][21:25] == b"\xff\xff\0\0"
    assert opened(files).end == ext.end == 192 + 60


@pytest.mark.parametrize(
    ("unit", "says"),
    [
        *(((1, 1, bytes(length)), "unit") for length in (41, 60, 32_748, 100_000)),
        *(((*numbers, None), "no unit can hold") for numbers in ((1 << 63, 0), (0, -(1 << 63) - 1))),
    ],
)
def test_what_no_unit_can_hold_is_refused(unit: tuple[int, int, bytes | None], says: str) -> None:
    files = MemoryFiles()
    with pytest.raises(ValueError, match=says):
        opened(files).put(*unit)
    assert not is_folder(files, "/e")


def test_no_unit_goes_where_no_address_reaches() -> None:
    files = MemoryFiles()
    start = (LAST_EXT_ADDRESS - BASE) // SMALL * SMALL
    files.make_folder("/e")
    files.create(f"/e/{start:020d}", SMALL)
    ext = opened(files)
    before = contents(files)
    assert is_ext_address(ext.put(1, 1, None))
    with pytest.raises(ValueError, match="no address is left"):
        ext.put(2, 2, bytes(40))
    assert before.keys() == contents(files).keys()


@pytest.mark.parametrize("size", [0, 23, (1 << 31) + 1])
def test_a_file_size_that_holds_no_unit_is_refused(size: int) -> None:
    with pytest.raises(ConfigError, match="extension file size"):
        ConsumeQueueExt.open("/e", size, files=MemoryFiles())


def test_closed_and_read_only() -> None:
    files = MemoryFiles()
    with opened(files) as ext:
        address = ext.put(1, 2, b"abc")
    with pytest.raises(StoreClosedError):
        ext.get(address)
    with pytest.raises(StoreClosedError):
        ext.put(1, 2, None)
    reader = opened(files, writable=False)
    assert reader.get(address) == (1, 2, b"abc", 23)
    for write in (lambda: reader.put(1, 2, None), reader.recover, reader.clear):
        with pytest.raises(ReadOnlyError):
            write()


# ---------------------------------------------------------------------------------------------------- the end


@pytest.mark.parametrize("count", range(11))
def test_the_end_is_found_with_and_without_the_last_address(count: int) -> None:
    files = MemoryFiles()
    ext = opened(files)
    addresses = [ext.put(n, n, bytes(n)) for n in range(count)]
    for last in [None, *addresses[-1:], *addresses[-2:-1], *addresses[:1], BASE + 7, LAST_EXT_ADDRESS]:
        if addresses:
            assert opened(files, last_address=last).end == ext.end
    again = opened(files, last_address=addresses[-1] if addresses else None)
    address = again.put(7, 7, b"seven")
    assert again.get(address) == (7, 7, b"seven", 25)
    assert [again.get(one).tags_code for one in addresses] == list(range(count))


def test_new_units_do_not_take_addresses_that_lost_their_files() -> None:
    files = MemoryFiles()
    queue = filled(files, 10)
    files.delete("/e")
    queue = queue_of(files)
    assert queue.ext is not None
    last = queue.entries()["tags_code"][-1]
    address = queue.ext.put(99, 99, None)
    assert address > last
    queue.append(10, 100, 10, address)
    assert queue.ext_unit(int(last)) is None
    assert queue.ext_unit(address) == (99, 99, None, 20)


def test_recovery_clears_bytes_after_the_end() -> None:
    files = MemoryFiles()
    ext = opened(files)
    ext.put(1, 1, None)
    spoil(files, f"/e/{0:020d}", 22, b"left over")
    assert opened(files).recover() == 20
    assert contents(files)[f"{0:020d}"][20:] == bytes(44)
    assert opened(MemoryFiles()).recover() == 0


# --------------------------------------------------------------------------------------------- with its queue


def test_entries_lead_to_their_units() -> None:
    files = MemoryFiles()
    queue = filled(files, 12)
    assert queue.ext_unit(77) is None
    for one in (queue, queue_of(files)):
        codes = one.entries()["tags_code"].tolist()
        assert [one.ext_unit(code) for code in codes] == [(n, 1000 + n, None, 20) for n in range(12)]
    off = queue_of(files, ext_folder=None)
    assert off.ext is None
    assert off.ext_unit(codes[0]) is None


def test_opening_makes_no_folder_for_the_units() -> None:
    files = MemoryFiles()
    queue_of(files).close()
    assert not is_folder(files, "/e")


@pytest.mark.parametrize("keep", range(13))
def test_units_are_cut_with_their_entries(keep: int) -> None:
    files, expected = MemoryFiles(), MemoryFiles()
    queue = filled(files, 12)
    assert queue.ext is not None
    queue.ext.put(99, 99, None)  # a crash prevented the entry of this unit
    queue.truncate_to(keep) if keep < 12 else queue.recover()
    other = filled(expected, keep)
    assert contents(files) == contents(expected)
    assert contents(files, "/q") == contents(expected, "/q")
    assert other.ext is not None
    assert queue.ext.put(5, 5, b"5") == other.ext.put(5, 5, b"5")


def test_cutting_finds_the_last_unit_behind_plain_codes() -> None:
    files = MemoryFiles()
    queue = filled(files, 7)
    assert queue.ext is not None
    end = queue.ext.end
    for n in range(7, 12):
        queue.append(n, 10 * n, 10, n)
    queue.ext.put(99, 99, None)
    queue.truncate_to(11)
    assert queue.ext.end == end
    queue.truncate_to(0)
    assert queue.ext.is_empty


@pytest.mark.parametrize("gone", range(13))
def test_units_are_trimmed_with_their_entries(gone: int) -> None:
    files = MemoryFiles()
    queue = filled(files, 12)
    queue.flush()
    paths = queue.trim(10 * gone)
    first = min(gone, 11) if gone < 12 else 10
    names = [f"/q/{n * 100:020d}" for n in range(first // 5)]
    if names:
        names += [f"/e/{n * 64:020d}" for n in range(first // 3)]
    assert paths == names
    assert queue.min_offset == gone
    for n in range(gone, 12):
        entry = queue.entry(n)
        assert entry is not None
        assert queue.ext_unit(entry.tags_code) == (n, 1000 + n, None, 20)
    with pytest.raises(CorruptionError):
        opened(files).truncate_before(BASE + (1 << 40))


# ----------------------------------------------------------------------------------------------------- damage


@pytest.mark.parametrize("value", [0, 5, LAST_EXT_ADDRESS + 1, -(1 << 64)])
def test_a_tags_code_is_not_an_address(value: int) -> None:
    with pytest.raises(ValueError, match="address: expected"):
        opened(MemoryFiles()).get(value)


@pytest.mark.parametrize(
    ("address", "path", "offset"),
    [
        (BASE + 640, f"/e/{640:020d}", 0),
        (BASE + 20, f"/e/{0:020d}", 20),
        (BASE + 60, f"/e/{0:020d}", 60),
        (LAST_EXT_ADDRESS, None, (LAST_EXT_ADDRESS - BASE) % SMALL),
    ],
)
def test_an_address_that_points_nowhere_is_reported(address: int, path: str | None, offset: int) -> None:
    files = MemoryFiles()
    ext = opened(files)
    ext.put(1, 1, None)
    for attempt in (ext.get, ext.truncate_after, ext.truncate_before):
        with pytest.raises(CorruptionError) as told:
            attempt(address)
        assert told.value.offset == offset
        assert path is None or told.value.file == path
    assert ext.get(BASE) == (1, 1, None, 20)


@pytest.mark.parametrize("size", [0, -1, 1, 19, 21, 32767, -32768])
def test_a_unit_of_impossible_size_is_reported(size: int) -> None:
    files = MemoryFiles()
    ext = opened(files)
    ext.put(1, 1, None)
    spoil(files, f"/e/{0:020d}", 0, size.to_bytes(2, "big", signed=True))
    with pytest.raises(CorruptionError):
        ext.get(BASE)
    assert 0 <= opened(files).end <= SMALL
    queue = ConsumeQueue.open("/q", 100, files=files, ext_folder="/e", ext_file_size=SMALL)
    assert queue.ext_unit(BASE) is None


@given(
    st.lists(st.binary(min_size=SMALL, max_size=SMALL), max_size=3),
    st.lists(st.tuples(st.integers(0, 255), st.sampled_from([b"\0", b"\xff", b"\x14", b"\x80", b"\x7f"])), max_size=8),
    st.integers(-1, 300),
    st.lists(
        st.tuples(st.sampled_from(["put", "after", "before", "recover", "clear"]), st.integers(0, 300)), max_size=5
    ),
)
def test_arbitrary_files_raise_only_store_errors(
    rubbish: list[bytes], patches: list[tuple[int, bytes]], hint: int, steps: list[tuple[str, int]]
) -> None:
    files = MemoryFiles()
    if rubbish:
        files.make_folder("/e")
        for n, raw in enumerate(rubbish):
            files.create(f"/e/{n * SMALL:020d}", SMALL).buffer[:] = raw
    else:
        filled(files, 12)
        for at, data in patches:
            spoil(files, f"/e/{at // SMALL * SMALL:020d}", at % SMALL, data)
    ext = opened(files, last_address=None if hint < 0 else BASE + hint)
    for name, argument in steps:
        with suppress(StoreError):
            if name == "put":
                bitmap = bytes(argument % 30)
                address = ext.put(argument, argument, bitmap)
                assert ext.get(address) == (argument, argument, bitmap or None, 20 + len(bitmap))
            elif name == "after":
                ext.truncate_after(BASE + argument)
            elif name == "before":
                ext.truncate_before(BASE + argument)
            elif name == "recover":
                ext.recover()
            else:
                ext.clear()
    for position in range(0, 400, 7):
        with suppress(StoreError):
            ext.get(BASE + position)
    end = ext.recover()
    assert opened(files).end == end or not contents(files)
    ext.get(ext.put(1, 1, b"1"))


@given(st.lists(st.integers(0, 40), max_size=30), st.integers(64, 200))
def test_every_unit_is_read_back(lengths: list[int], size: int) -> None:
    files = MemoryFiles()
    ext = ConsumeQueueExt.open("/e", size, files=files)
    units = [(n - 5, n * n, bytes([n]) * length) for n, length in enumerate(lengths)]
    addresses = [ext.put(*unit) for unit in units]
    again = ConsumeQueueExt.open("/e", size, files=files, writable=False)
    assert addresses == sorted(set(addresses))
    for address, (tags_code, time, bitmap) in zip(addresses, units, strict=True):
        assert again.get(address) == (tags_code, time, bitmap or None, 20 + len(bitmap))
    assert again.end == ext.end
