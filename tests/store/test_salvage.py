"""Records after damage, the bytes that recovery cuts and keeps, and when opening refuses to cut."""

from __future__ import annotations

import errno
import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from librmq.clock import ManualClock
from librmq.errors import CorruptionError, NotAStoreError, StoreIOError
from librmq.files._disk import DiskFiles
from librmq.files._memory import MemoryFiles
from librmq.files.interface import Files, break_links
from librmq.files.rolling import MappedFileQueue, MappingPool
from librmq.message.message import Message, StoredMessage
from librmq.message.record import BODY_AT, MAGIC_AT, PHYSICAL_OFFSET_AT
from librmq.store import MessageStore
from librmq.store.format.documents import with_checksum
from librmq.store.recovery import salvage
from librmq.store.recovery._verify import verify
from librmq.store.recovery.salvage import Gap
from tests.budget import examples
from tests.file_seams import FailingFiles
from tests.reference import store_folders
from tests.stores import (
    ROOT,
    SMALL,
    START_MS,
    Contents,
    calls_failing,
    contents,
    died,
    fill,
    filled,
    from_disk,
    in_memory,
    on_disk,
    opened,
    served,
)

SALVAGE = "librmq/salvage"


def store_of(count: int = 80, seed: int = 1, *, clean: bool = True) -> Contents:
    """Return a store without librmq's own files."""
    return without_own(filled(SMALL, count, seed, clean=clean))


def without_own(found: Contents) -> Contents:
    return {path: data for path, data in found.items() if not path.startswith("librmq")}


def saved(files: Files, root: str = ROOT) -> dict[int, StoredMessage]:
    """Return sound records by physical offset; of two at the same offset, the later one."""
    return {
        item.physical_offset: item for item in salvage.salvaged_records(root, files) if isinstance(item, StoredMessage)
    }


def gaps(files: Files) -> list[Gap]:
    return [item for item in salvage.salvaged_records(ROOT, files) if isinstance(item, Gap)]


def log_of(found: Contents) -> Contents:
    return {path: data for path, data in found.items() if path.startswith("commitlog")}


def change(found: Contents, physical_offset: int, data: bytes, file_size: int = 4096) -> Contents:
    """Return the contents with other bytes at a place of the log."""
    path = f"commitlog/{physical_offset - physical_offset % file_size:020d}"
    before, at = found[path], physical_offset % file_size
    assert before is not None
    assert at + len(data) <= len(before)
    assert before[at : at + len(data)] != data
    return {**found, path: before[:at] + data + before[at + len(data) :]}


def with_body(files: Files, *, last: int) -> StoredMessage:
    """Return the ``last``-th record with a body, counted from the end."""
    found = [message for message in saved(files).values() if len(message.stored_body) >= 20]
    return found[-last]


# ----------------------------------------------------------------------------------------------- finding records


@pytest.mark.parametrize("clean", [True, False])
def test_a_sound_store_gives_all_its_records(clean: bool) -> None:
    files = in_memory(filled(SMALL, 60, clean=clean))
    with opened(files, read_only=True) as store:
        there = list(store)
    assert list(salvage.salvaged_records(ROOT, files)) == there


@pytest.mark.parametrize("folder", store_folders())
def test_real_stores_give_every_record_that_was_not_touched(folder: Path) -> None:
    found = from_disk(folder / "store")
    rng = random.Random(folder.name)
    paths = sorted(path for path, data in found.items() if data and path.startswith("commitlog/"))
    whole = saved(in_memory(found))
    for _ in range(5):
        path = rng.choice(paths)
        data = found[path]
        begin = rng.randrange(max(1, len(data.rstrip(b"\0"))))
        end = min(len(data), begin + rng.choice([1, 1, 10, 300]))
        spoilt = {
            **found,
            path: data[:begin] + rng.choice([bytes(end - begin), rng.randbytes(end - begin)]) + data[end:],
        }
        start = int(path.split("/")[1])
        untouched = {
            place: record
            for place, record in whole.items()
            if place + record.size <= start + begin or place >= start + end
        }
        there = saved(in_memory(spoilt))
        assert untouched.items() <= there.items(), (path, begin, end)
        assert len(there) <= len(whole)


def test_gaps_lie_between_the_records() -> None:
    found = store_of()
    whole = list(saved(in_memory(found)).values())
    spoilt, hit = found, [whole[10], whole[30], whole[31]]
    for record in hit:
        spoilt = change(spoilt, record.physical_offset + MAGIC_AT, b"\0")
    files = in_memory(spoilt)
    assert list(saved(files).values()) == [record for record in whole if record not in hit]
    assert [(gap.physical_offset, gap.size) for gap in gaps(files)] == [
        (hit[0].physical_offset, hit[0].size),
        (hit[1].physical_offset, hit[1].size + hit[2].size),
    ]


def test_a_stretch_of_zeros_is_a_gap() -> None:
    found = store_of()
    hit = list(saved(in_memory(found)).values())[20]
    files = in_memory(change(found, hit.physical_offset, bytes(hit.size)))
    assert [(gap.physical_offset, gap.size) for gap in gaps(files)] == [(hit.physical_offset, hit.size)]


def test_missing_or_cut_files_lose_only_their_content() -> None:
    found = store_of(120)
    whole = saved(in_memory(found))
    first, second, third = sorted(path for path, data in found.items() if data and path.startswith("commitlog/"))[1:4]
    data = found[third]
    damaged = {**found, third: data[:3000]}
    del damaged[first]
    files = in_memory(damaged)
    lost = {place for place in whole if 4096 <= place < 8192 or 12288 + 3000 < place + whole[place].size <= 16384}
    assert second.endswith("8192")
    assert saved(files).keys() == whole.keys() - lost
    assert (4096, 4096) in [(gap.physical_offset, gap.size) for gap in gaps(files)]


def test_a_record_that_names_another_place_is_corrected() -> None:
    found = store_of()
    record = list(saved(in_memory(found)).values())[12]
    spoilt = change(found, record.physical_offset + PHYSICAL_OFFSET_AT, b"\x7f")
    assert saved(in_memory(spoilt))[record.physical_offset] == record


def test_bytes_that_look_like_a_record_are_not_found() -> None:
    """The body of a damaged record contains whole records, but their stored offsets do not match."""
    files = MemoryFiles()
    with opened(files) as store:
        inner = store.append(Message("TopicA", b"x" * 50))
        raw = store.log.read(inner.physical_offset)
        assert raw is not None
        outer = store.append(Message("TopicA", b"before" + raw * 3 + b"\xda\xa3\x20\xa7" * 9))
        last = store.append(Message("TopicA", b"last"))
    found = change(contents(files), outer.physical_offset + BODY_AT, b"\0")
    files = in_memory(found)
    assert list(saved(files)) == [inner.physical_offset, last.physical_offset]
    sequence = MappedFileQueue(f"{ROOT}/commitlog", 4096, files, MappingPool(4), writable=False)
    assert salvage.find_record(sequence, outer.physical_offset) == last.physical_offset
    assert salvage.find_record(sequence, outer.physical_offset, last.physical_offset) is None
    assert salvage.find_record(sequence, outer.physical_offset, last.physical_offset + 1) == last.physical_offset
    assert salvage.find_record(sequence, outer.physical_offset, check_body=False) == outer.physical_offset
    assert salvage.find_record(sequence, last.physical_offset + 1) is None


def test_folders_that_are_not_stores_are_refused() -> None:
    with pytest.raises(NotAStoreError):
        list(salvage.salvaged_records("/nowhere", MemoryFiles()))


# --------------------------------------------------------------------------------------------- keeping cut bytes


def damaged_in_the_middle(seed: int = 1) -> tuple[Contents, int]:
    """Return a store with a wrong body in an older file, and its place."""
    found = store_of(120, seed)
    record = with_body(in_memory(found), last=60)
    return change(found, record.physical_offset + BODY_AT, b"\xff\x00\xff"), record.physical_offset


def test_cut_bytes_are_kept() -> None:
    found, place = damaged_in_the_middle()
    files = in_memory(found)
    before = list(salvage.salvaged_records(ROOT, files))
    with opened(files, thorough=True) as store:
        assert store.log.end == place
        (cut,) = (cut for cut in store.recovered if "commitlog" in cut.file)
    (kept,) = salvage.kept_cuts(ROOT, files)
    assert (kept.physical_offset, kept.size) == (place, cut.bytes)
    assert kept.records == sum(item.physical_offset > place for item in before)
    assert kept.why == cut.what
    after = list(salvage.salvaged_records(ROOT, files))
    assert [item for item in after if isinstance(item, StoredMessage)] == [
        item for item in before if isinstance(item, StoredMessage)
    ]
    assert [gap[:2] for gap in after if isinstance(gap, Gap)] == [gap[:2] for gap in before if isinstance(gap, Gap)]
    assert verify(ROOT, SMALL, files).sound


def test_kept_cuts_are_returned_with_new_records() -> None:
    found, place = damaged_in_the_middle()
    files = in_memory(found)
    whole = {item.raw for item in saved(files).values()}
    with opened(files, thorough=True) as store:
        result = store.append(Message("TopicA", b"in its place"))
    assert result.physical_offset == place
    there = [item for item in salvage.salvaged_records(ROOT, files) if isinstance(item, StoredMessage)]
    assert {item.raw for item in there} > whole
    assert len(there) == len(whole) + 1


def test_the_same_cut_twice_gives_its_records_once() -> None:
    found, _ = damaged_in_the_middle()
    files = in_memory(found)
    with opened(files, thorough=True):
        pass
    twice = in_memory({**found, **{path: data for path, data in contents(files).items() if path.startswith("librmq")}})
    whole = list(saved(twice).values())
    with opened(twice, thorough=True):
        pass
    assert len(salvage.kept_cuts(ROOT, twice)) == 2
    assert [item for item in salvage.salvaged_records(ROOT, twice) if isinstance(item, StoredMessage)] == whole


def test_a_torn_end_is_kept_too_and_zeros_are_not() -> None:
    found = store_of(40, clean=False)
    with opened(in_memory(found), read_only=True) as store:
        end = store.log.end
    torn = in_memory(change(found, end, b"\0\0\0\xaa\xda\xa3\x20\xa7torn"))
    with opened(torn):
        pass
    assert [(cut.physical_offset, cut.size, cut.records) for cut in salvage.kept_cuts(ROOT, torn)] == [(end, 12, 0)]
    whole = in_memory(found)
    with opened(whole):
        pass
    assert salvage.kept_cuts(ROOT, whole) == []


def test_of_cuts_without_a_record_the_newest_eight_are_kept() -> None:
    found, place = damaged_in_the_middle()
    files = in_memory(found)
    opened(files, thorough=True).close()
    for number in range(12):
        store = MessageStore.open(ROOT, SMALL, files=files, clock=ManualClock(START_MS + 10**9 + number))
        file = files.open(f"{ROOT}/commitlog/{store.log.end - store.log.end % 4096:020d}", writable=True)
        at = store.log.end % 4096
        store.abandon()
        file.buffer[at : at + 4] = b"torn"
    opened(files).close()
    cuts = salvage.kept_cuts(ROOT, files)
    assert [cut.records == 0 for cut in cuts] == [False] + [True] * 8
    assert cuts[0].physical_offset == place
    assert cuts[1].cut_timestamp_ms < cuts[-1].cut_timestamp_ms


def test_manifests_of_any_kind_do_no_harm() -> None:
    found, _ = damaged_in_the_middle()
    files = in_memory(found)
    opened(files, thorough=True).close()
    whole = saved(files)
    (kept,) = salvage.kept_cuts(ROOT, files)
    for text in (
        b"",
        b"[]",
        b"\xff",
        b"[" * 100_000,
        with_checksum(b'{"version": 2, "records": 0}'),
        with_checksum(b'{"version": 1, "records": "x"}'),
    ):
        files.write(f"{kept.path}/manifest.json", text)
        (again,) = salvage.kept_cuts(ROOT, files)
        assert (again.size, again.records, again.why) == (None, None, "")
        assert saved(files) == whole
    files.write(f"{ROOT}/{SALVAGE}/README", b"a file")
    files.make_folder(f"{ROOT}/{SALVAGE}/someone-else's")
    assert len(salvage.kept_cuts(ROOT, files)) == 1


def test_leftovers_of_an_interrupted_copy_are_removed() -> None:
    found, place = damaged_in_the_middle()
    files = in_memory({**found, f"{SALVAGE}/{place:020d}-1.part/{place:020d}": b"half"})
    assert salvage.kept_cuts(ROOT, files) == []
    opened(files, thorough=True).close()
    assert [name for name in contents(files) if ".part" in name] == []


def error_of(call: Callable[[], object]) -> StoreIOError | None:
    try:
        call()
    except StoreIOError as error:
        return error
    return None


CHANGING = (*("create", "reserve", "flush", "flush_folder", "make_folder"), *("rename", "write", "link", "delete"))


@pytest.mark.slow
def test_nothing_is_lost_when_a_call_fails_while_cutting() -> None:
    found, _ = damaged_in_the_middle()
    whole = saved(in_memory(found))
    refused = 0
    files = in_memory(found)
    for call, failing in calls_failing(files, CHANGING, errno.EIO):
        for path in list(contents(files)):
            files.delete(f"{ROOT}/{path}")
        for path, data in found.items():
            files.make_folder(os.path.dirname(f"{ROOT}/{path}"))
            if data is None:
                files.make_folder(f"{ROOT}/{path}")
            else:
                files.write(f"{ROOT}/{path}", data)
        error = error_of(lambda seam=failing: opened(seam, thorough=True).close())  # type: ignore[misc]
        if error is not None:
            assert (error.call, error.errno) == (call, errno.EIO)
            refused += 1
            if not salvage.kept_cuts(ROOT, files):
                assert log_of(contents(files)) == log_of(found)
        assert {item.raw for item in saved(files).values()} == {item.raw for item in whole.values()}
        with opened(died(files), thorough=True) as store:
            served(store)
    assert refused > examples(20)


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP])
def test_without_links_whole_files_are_copied(code: int) -> None:
    found, _ = damaged_in_the_middle()
    files = in_memory(found)
    whole = list(saved(files).values())
    failing = FailingFiles(files)
    for number in range(1, 20):
        failing.fail("link", number, code)
    opened(failing, thorough=True).close()
    assert failing.calls["link"] > 1
    assert list(saved(files).values()) == whole


def test_on_disk_too(tmp_path: Path) -> None:
    found, place = damaged_in_the_middle()
    on_disk(found, tmp_path)
    whole = saved(in_memory(found))
    MessageStore.open(tmp_path, SMALL, thorough=True).close()
    (folder,) = (tmp_path / SALVAGE).iterdir()
    assert json.loads((folder / "manifest.json").read_text())["physical_offset"] == place
    assert {item.raw for item in saved(DiskFiles(), str(tmp_path)).values()} == {item.raw for item in whole.values()}
    assert verify(str(tmp_path)).sound


# ----------------------------------------------------------------------------------------------- refusing to cut

Damaged = Callable[[], tuple[Contents, int]]


def wrong_body(*, clean: bool) -> tuple[Contents, int]:
    found = store_of(80, 5, clean=clean)
    record = with_body(in_memory(found), last=4)
    return change(found, record.physical_offset + BODY_AT, b"\xff\x00\xff"), record.physical_offset


def wrong_size() -> tuple[Contents, int]:
    found = store_of(80, 5)
    record = with_body(in_memory(found), last=4)
    return change(found, record.physical_offset, b"\x7f"), record.physical_offset


def zeros_after_a_clean_exit() -> tuple[Contents, int]:
    found = store_of(80, 5)
    record = with_body(in_memory(found), last=4)
    return change(found, record.physical_offset, bytes(record.size)), record.physical_offset


def a_topic_that_is_none() -> tuple[Contents, int]:
    found = store_of(80, 5, clean=False)
    records = list(saved(in_memory(found)).values())
    record = next(message for message in reversed(records[:-1]) if message.topic == "TopicA")
    topic_at = record.raw.index(b"\x06TopicA")
    return change(found, record.physical_offset + topic_at + 2, b"/"), record.physical_offset


def unwritten(vouched_for: bool) -> tuple[Contents, int]:
    """Return the log after a power failure that lost one sector but not the records after it.

    If the checkpoint covers it, no crash can have caused this.
    All is in the last file, where recovery begins in either case.
    """
    for seed in range(100):
        found = store_of(80, seed, clean=False)
        records = list(saved(in_memory(found)).values())
        last = records[-1].physical_offset // 4096
        for record in records:
            begin = record.physical_offset
            sector = begin - begin % 512 + 512
            behind = [other for other in records if other.physical_offset >= sector + 512]
            in_body = begin + BODY_AT <= sector < begin + BODY_AT + len(record.stored_body)
            if begin // 4096 == last and in_body and behind:
                times = bytes(4096)
                if vouched_for:
                    times = (behind[0].store_timestamp_ms + 3000).to_bytes(8, "big") * 3 + bytes(4096 - 24)
                return {**change(found, sector, bytes(512)), "checkpoint": times}, begin
    raise AssertionError("no record reaches beyond a sector")


def a_topic_that_is_none_before_where_a_crash_is_looked_for() -> tuple[Contents, int]:
    """Damage the topic of a record from which the index is rebuilt, because the checkpoint does not cover it."""
    found = store_of(80, 5, clean=False)
    records = list(saved(in_memory(found)).values())
    begin = records[-1].physical_offset // 4096 * 4096 - 4096  # the file whose first record the checkpoint covers
    record = [message for message in records if message.physical_offset < begin][-1]
    topic = record.topic.encode()
    topic_at = record.raw.index(bytes((len(topic),)) + topic)
    return change(found, record.physical_offset + topic_at + 2, b"/"), record.physical_offset


REFUSED: dict[str, Damaged] = {
    "wrong body": lambda: wrong_body(clean=True),
    "wrong body in a store that was not closed": lambda: wrong_body(clean=False),
    "wrong size": wrong_size,
    "zeros": zeros_after_a_clean_exit,
    "topic": a_topic_that_is_none,
    "older topic": a_topic_that_is_none_before_where_a_crash_is_looked_for,
    "a sector that was vouched for": lambda: unwritten(vouched_for=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", REFUSED)
def test_opening_refuses_to_cut_sound_records(what: str) -> None:
    found, place = REFUSED[what]()
    files = in_memory(found)
    before = contents(files)
    with pytest.raises(CorruptionError, match=f"librmq recover {ROOT}") as told:
        opened(files)
    assert told.value.offset == place
    assert told.value.file == f"{ROOT}/commitlog/{place - place % 4096:020d}"
    assert contents(files) == before
    with opened(files, read_only=True) as store:
        assert store.log.end == place or what.endswith("topic")
    assert contents(files) == before
    whole = saved(files)
    with opened(files, thorough=True) as store:
        assert store.log.end == place
        assert any(cut.offset == place for cut in store.recovered)
        served(store)
    assert saved(files) == whole
    with opened(files) as store:
        store.append(Message("TopicA", b"more"))
    assert verify(ROOT, SMALL, files).sound


def test_records_behind_an_unwritten_gap_are_cut_and_kept() -> None:
    found, place = unwritten(vouched_for=False)
    files = in_memory(found)
    whole = saved(files)
    with opened(files) as store:
        assert store.log.end == place
        served(store)
    (kept,) = salvage.kept_cuts(ROOT, files)
    assert kept.physical_offset == place
    assert kept.records
    assert saved(files) == whole


def test_an_open_store_cuts_on_demand() -> None:
    files = in_memory(store_of(80, 5))
    with opened(files) as store:
        record = with_body(files, last=4)
        path = f"{ROOT}/commitlog/{record.physical_offset - record.physical_offset % 4096:020d}"
        at = record.physical_offset % 4096 + BODY_AT
        files.open(path, writable=True).buffer[at : at + 3] = b"\xff\x00\xff"
        assert store.recover()
        assert store.log.end == record.physical_offset
    assert [cut.physical_offset for cut in salvage.kept_cuts(ROOT, files)] == [record.physical_offset]


# ----------------------------------------------------------------------------------------------------- linked files


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_linked_file_is_copied_before_it_is_changed(on_disk: bool, tmp_path: Path) -> None:
    files: Files = DiskFiles() if on_disk else MemoryFiles()
    folder = str(tmp_path / "s" / "commitlog") if on_disk else "/s/commitlog"
    files.make_folder(folder)
    path, other = f"{folder}/a", os.path.join(os.path.dirname(folder), "b")
    file = files.create(path, 100)
    file.buffer[:4] = b"once"
    assert not break_links(files, path)
    files.link(path, other)
    with pytest.raises(StoreIOError):
        files.link(path, other)
    with pytest.raises(StoreIOError):
        files.link(f"{folder}/nothing", f"{folder}/c")
    assert break_links(files, path)
    assert not break_links(files, path)
    files.open(path, writable=True).buffer[:4] = b"then"
    assert (files.read(path)[:4], files.read(other)[:4]) == (b"then", b"once")
    assert {entry.name for entry in files.list(os.path.dirname(folder))} == {"b", "commitlog"}


def test_a_linked_file_is_copied_where_it_is(tmp_path: Path) -> None:
    """An operator keeps the log on another disk, behind a link that `follow_links` allows, unlike links of files."""
    files = DiskFiles(follow_links=True)
    elsewhere, store = tmp_path / "elsewhere" / "log", tmp_path / "s"
    for folder in (elsewhere, store):
        folder.mkdir(parents=True)
    (store / "commitlog").symlink_to(elsewhere)
    files.confine(str(store), "librmq", "commitlog")
    name = f"{0:020d}"
    (elsewhere / name).write_bytes(b"once")
    os.link(elsewhere / name, tmp_path / "snapshot")
    assert break_links(files, str(store / "commitlog" / name))
    (elsewhere / name).write_bytes(b"then")
    assert ((tmp_path / "snapshot").read_bytes(), (store / "commitlog").is_symlink()) == (b"once", True)
    assert [path.name for path in tmp_path.rglob("*.tmp")] == []
    os.link(elsewhere / name, tmp_path / "b")
    (elsewhere / "link").symlink_to(elsewhere / name)
    with pytest.raises(CorruptionError, match="a symbolic link"):
        break_links(files, str(store / "commitlog" / "link"))


def test_cutting_and_repairing_spare_linked_files() -> None:
    """Give each of the log's oldest files a second name, as a snapshot does."""
    found = store_of(120)
    record = with_body(in_memory(found), last=60)
    at = record.physical_offset
    for place, data in ((at + BODY_AT, b"\xff\x00\xff"), (at + PHYSICAL_OFFSET_AT, b"\x7f")):
        files = in_memory(change(found, place, data))
        files.make_folder("/other")
        for path in sorted(path for path, stored in found.items() if stored and path.startswith("commitlog/"))[:-2]:
            files.link(f"{ROOT}/{path}", f"/other/{os.path.basename(path)}")
        before = contents(files, "/other")
        with opened(files, thorough=True) as store:
            assert store.recovered
            for n in range(40):
                store.append(Message("TopicA", b"more" * 20, keys=f"k{n}"))
            served(store)
        assert contents(files, "/other") == before


def test_filling_continues_after_a_cut() -> None:
    found, _ = damaged_in_the_middle(seed=3)
    files = in_memory(found)
    clock = ManualClock(START_MS + 10**9)
    with MessageStore.open(ROOT, SMALL, files=files, clock=clock, thorough=True) as store:
        fill(store, clock, random.Random(1), 30)
        served(store)
    assert verify(ROOT, SMALL, files).sound


@pytest.mark.parametrize("start", [1 << 63, 10**20 - 65_536])
def test_a_log_file_with_an_impossible_position_is_a_gap(start: int) -> None:
    """Repair 4: no record can be at such a position."""
    found = store_of(5)
    name = next(path for path in found if path.startswith("commitlog/"))
    found[f"commitlog/{start:020d}"] = found.pop(name)
    files = in_memory(found)
    assert list(saved(files)) == []
    assert [gap.what for gap in gaps(files) if "2^63" in gap.what]
