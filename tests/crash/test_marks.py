"""After a kill, a recovery from the mark of the last flush leaves what a recovery without it leaves."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import pytest

from librmq.clock import ManualClock
from librmq.commitlog import CommitLog
from librmq.config import StoreConfig
from librmq.errors import StoreError, StoreIOError
from librmq.files._memory import OverlayFiles
from librmq.files.interface import file_size
from librmq.message.message import Message
from librmq.store import MessageStore, snapshot
from librmq.store.format.indexfile import ENTRY_SIZE, HEADER, HEADER_SIZE, IndexHeader, file_length, unpack_entry
from tests.budget import examples, many, some
from tests.crash.runs import BusyFiles, Recorded, record
from tests.file_seams import CrashImages, Event, FailingFiles
from tests.stores import (
    ROOT,
    SMALL,
    SMALL_EXT,
    START_MS,
    Contents,
    apply,
    contents,
    fill,
    in_memory,
    opened,
    served,
    with_contents,
    with_fields,
)

pytestmark = pytest.mark.usefixtures("mark_each_flush")
MARK = "librmq/flushed.json"
PLACE = f"{ROOT}/{MARK}"
PLAIN = replace(SMALL, commitlog_file_size=1 << 20, consumequeue_file_size=3 * 20, max_message_size=3000)
"""All records in one file of the log, as in a large store; several files of queues and index."""


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Where walks over a log began."""
    begins: list[int] = []
    walk = CommitLog.walk

    def note(log: CommitLog, begin: int, *arguments: Any) -> object:
        begins.append(begin)
        return walk(log, begin, *arguments)

    monkeypatch.setattr(CommitLog, "walk", note)
    return begins


class Found(NamedTuple):
    """What a recovery left, or its error."""

    error: str
    end: int = 0
    messages: Sequence[int] = ()
    ranges: Sequence[object] = ()
    keys: Sequence[object] = ()
    files: Contents | None = None
    is_sound: bool = True


def on_machine(found: Contents, machine: str = "here") -> BusyFiles:
    """Return files with these contents on a machine."""
    files = with_contents(BusyFiles(), found)
    files.trace.clear()
    files.machine = machine
    return files


def recovered(files: BusyFiles, config: StoreConfig, *, looks: bool = True) -> Found:
    """Recover, and return what was left."""
    try:
        store = opened(files, config)
    except StoreError as error:
        return Found(f"{type(error).__name__}: {error}")
    names = sorted(store.queues)
    ranges = [(*name, store.queue_range(*name)) for name in names]
    rows = (row for file in store.index.files for row in file.entries()[["hash", "physical"]].tolist())
    keys = [row for row in rows if row[1] >= store.log.begin]
    messages = sorted(served(store)) if looks else [message.physical_offset for message in store]
    end, is_sound = store.log.end, store.verify().sound if looks else True
    store.abandon()
    parts = {path: data for path, data in contents(files).items() if path.startswith(("commitlog/", "consumequeue/"))}
    return Found("", end, messages, ranges, keys, parts, is_sound)


def without_mark(found: Contents) -> Contents:
    return {path: data for path, data in found.items() if path != MARK}


def assert_same(found: Contents, config: StoreConfig, machine: str, what: object) -> tuple[BusyFiles, Found]:
    files = on_machine(found, machine)
    by_mark = recovered(files, config)
    wanted = recovered(on_machine(without_mark(found), machine), config)
    assert by_mark == wanted, what
    assert by_mark.is_sound, what
    return files, by_mark


# ------------------------------------------------------------------------------------------------------------- kills


def plain_run(number: int) -> Recorded:
    """Return a recorded run of a store without extension files, which has marks."""
    tries = (record(f"marks {number} {one}") for one in range(100))
    return next(recorded for recorded in tries if not recorded.config.enable_consumequeue_ext)


def kills(trace: Sequence[Event], points: set[int], begin: Contents | None = None) -> Iterator[tuple[int, Contents]]:
    """Yield what a kill after each of these numbers of events leaves: all bytes that were written until then."""
    files = in_memory(begin or {})
    for number, event in enumerate(trace, 1):
        apply(files, event)
        if number in points:
            yield number, contents(files)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(examples(24)))
def test_kills_at_any_write_are_recovered_as_without_a_mark(number: int, walks: list[int]) -> None:
    """So are kills during that recovery, and kills right after it."""
    recorded, rng = plain_run(number), random.Random(number)
    config = recorded.config
    machine = next(
        json.loads(event.data)["machine"].partition(": ")[0] for event in recorded.trace if event.path.endswith(MARK)
    )
    points = {rng.randrange(len(recorded.trace)) for _ in range(examples(60))}
    used = 0
    for point, found in kills(recorded.trace, points):
        if recorded.is_rotten(point) or "abort" not in found:
            continue
        walks.clear()
        files, wanted = assert_same(found, config, machine, f"kill after {point}")
        mark = found.get(MARK)
        used += mark is not None and walks[0] == json.loads(mark)["last_record"]
        second = {rng.randrange(len(files.trace) + 1) for _ in range(3)} | {len(files.trace)}
        for point_2, found_2 in kills(files.trace, second, found):
            _, again = assert_same(found_2, config, machine, f"kills after {point} and {point_2}")
            assert (again.end, again.messages, again.keys) == (wanted.end, wanted.messages, wanted.keys)
    assert used or len(points) < 20


def promised(found: Contents, mark: dict[str, Any], config: StoreConfig) -> Contents:
    """Return the bytes of the log, of queue entries and of index entries before the end that a mark names."""
    end = mark["log_end"]
    parts: Contents = {}
    for path, data in found.items():
        folder, _, name = path.rpartition("/")
        if data and folder == "commitlog":
            parts[path] = data[: max(end - int(name), 0)]
        elif data and folder.startswith("consumequeue/"):
            rows = (data[at : at + 20] for at in range(0, len(data), 20))
            parts[path] = b"".join(row for row in rows if any(row) and int.from_bytes(row[:8], "big") < end)
        elif data and folder == "index" and name <= (mark["index_file"] or ""):
            entries = data[file_length(config.max_hash_slot_num, 1) :]
            rows = (entries[at : at + 20] for at in range(0, len(entries), 20))
            parts[path] = b"".join(row for row in rows if any(row) and unpack_entry(row)[1] < end)
    return {path: data for path, data in parts.items() if data}


@many
@pytest.mark.parametrize("number", some(range(9)))
def test_a_mark_comes_after_what_it_promises(number: int) -> None:
    """So log and queues would be right even if a mark counted after a loss of power, which it does not."""
    recorded = plain_run(number)
    config, images = recorded.config, CrashImages(recorded.trace)
    written = {at for at, event in enumerate(recorded.trace, 1) if (event.call, event.path) == ("replace", PLACE)}
    assert written
    for at, killed in kills(recorded.trace, written):
        mark = json.loads(killed[MARK] or b"")
        here = mark["machine"].partition(": ")[0]
        for seed in range(5):
            image = images.image(seed, at)
            found = {path.removeprefix(f"{ROOT}/"): data for path, data in image.contents.items() if path != ROOT}
            assert promised(found, mark, config) == promised(killed, mark, config), image
            if recorded.is_rotten(at):
                continue
            by_mark = recovered(on_machine(found, here), config, looks=False)
            wanted = recovered(on_machine(found, "restarted"), config, looks=False)
            assert by_mark._replace(keys=()) == wanted._replace(keys=()), image


# -------------------------------------------------------------------------------------------- files that have changed


class Killed(NamedTuple):
    """A killed store, and the same store at an earlier flush."""

    contents: Contents
    earlier: Contents


@cache
def killed_store(seed: int = 1) -> Killed:
    files, clock = BusyFiles(), ManualClock(START_MS)
    files.machine = "here"
    store = MessageStore.open(ROOT, PLAIN, files=files, clock=clock)
    fill(store, clock, random.Random(seed), 60)
    store.flush()
    earlier = contents(files)
    fill(store, clock, random.Random(seed + 1), 140)
    clock.advance(seconds=60)
    store.flush()
    fill(store, clock, random.Random(seed + 2), 20)
    store.abandon()
    return Killed(contents(files), earlier)


def first_and_last(found: Contents, folder: str) -> tuple[str, str]:
    names = sorted(path for path, data in found.items() if path.startswith(folder) and data is not None)
    assert len(names) > 1, folder
    return names[0], names[-1]


def put_back(folder: str) -> Callable[[Killed], Contents]:
    def change(store: Killed) -> Contents:
        kept = {path: data for path, data in store.contents.items() if not path.startswith(folder)}
        return kept | {path: data for path, data in store.earlier.items() if path.startswith(folder)}

    return change


def delete(folder: str) -> Callable[[Killed], Contents]:
    return lambda store: {path: data for path, data in store.contents.items() if not path.startswith(folder)}


def delete_one(folder: str, which: int) -> Callable[[Killed], Contents]:
    def change(store: Killed) -> Contents:
        name = first_and_last(store.contents, folder)[which]
        return {path: data for path, data in store.contents.items() if path != name}

    return change


def put_back_first(folder: str) -> Callable[[Killed], Contents]:
    """Put only the first file of a folder back, from when it was not full."""

    def change(store: Killed) -> Contents:
        name, _ = first_and_last(store.contents, folder)
        data = bytearray(store.contents[name] or b"")
        if folder == "index":
            header = IndexHeader(*HEADER.unpack(data[:HEADER_SIZE]))
            data[:HEADER_SIZE] = HEADER.pack(*header._replace(index_count=header.index_count - 1))
        else:
            data[-ENTRY_SIZE:] = bytes(ENTRY_SIZE)
        return store.contents | {name: bytes(data)}

    return change


def torn_index_header(store: Killed) -> Contents:
    """Return what a kill between the halves of a header's write leaves: its end without its count."""
    _, name = first_and_last(store.contents, "index")
    data = bytearray(store.contents[name] or b"")
    header = IndexHeader(*HEADER.unpack(data[:HEADER_SIZE]))
    count = header.index_count
    while unpack_entry(data, file_length(PLAIN.max_hash_slot_num, count - 1))[1] == header.end_physical_offset:
        count -= 1
    assert count > 1
    data[:HEADER_SIZE] = HEADER.pack(*header._replace(index_count=count))
    return store.contents | {name: bytes(data)}


def mark_of_another_store(store: Killed) -> Contents:
    return store.contents | {MARK: killed_store(9).contents[MARK]}


def marked(**fields: object) -> Callable[[Killed], Contents]:
    def change(store: Killed) -> Contents:
        return store.contents | {MARK: with_fields(store.contents[MARK], **fields)}

    return change


def torn_mark(store: Killed) -> Contents:
    mark = store.contents[MARK]
    assert mark is not None
    return store.contents | {MARK: mark[: len(mark) // 2]}


def damaged_record(store: Killed) -> Contents:
    path = f"commitlog/{0:020d}"
    log, at = bytearray(store.contents[path] or b""), json.loads(store.contents[MARK] or b"")["last_record"]
    log[at + 60] ^= 1
    return store.contents | {path: bytes(log)}


def recovered_by_a_broker(store: Killed) -> Contents:
    """Move the index to other files, as a broker's recovery makes those again that the checkpoint does not cover."""
    index = [path for path in store.contents if path.startswith("index/")]
    names = {path: f"index/{int(path.removeprefix('index/')) + 1}" for path in index}
    return {names.get(path, path): data for path, data in store.contents.items()}


def without_index_from_the_mark(store: Killed) -> Contents:
    newest = "index/" + json.loads(store.contents[MARK] or b"")["index_file"]
    return {path: data for path, data in store.contents.items() if not newest <= path < "indey"}


CHANGES: dict[str, tuple[Callable[[Killed], Contents], str]] = {
    "nothing": (lambda store: store.contents, ""),
    "mark deleted": (delete(MARK), ""),
    "queue put back": (put_back("consumequeue/TopicA/0"), "queue 0 of topic TopicA lacks entries"),
    "first file of a queue put back": (
        put_back_first("consumequeue/TopicA/0"),
        "queue 0 of topic TopicA lacks entries",
    ),
    "queue deleted": (delete("consumequeue/TopicA/0"), "queue 0 of topic TopicA lacks entries"),
    "topic deleted": (delete("consumequeue/TopicA"), "queue 0 of topic TopicA lacks entries"),
    "first file of a queue deleted": (delete_one("consumequeue/TopicA/0", 0), "queue 0 of topic TopicA lacks entries"),
    "last file of a queue deleted": (delete_one("consumequeue/TopicA/0", 1), "queue 0 of topic TopicA lacks entries"),
    "index put back": (put_back("index"), "the key index lacks"),
    "first index file put back": (put_back_first("index"), "the key index lacks"),
    "index header torn": (torn_index_header, "does not fit its entries"),
    "index deleted": (delete("index"), "the key index lacks"),
    "first index file deleted": (delete_one("index", 0), "the key index lacks"),
    "last index file deleted": (without_index_from_the_mark, "the key index lacks"),
    "index recovered by a broker": (recovered_by_a_broker, "the key index lacks"),
    "log put back": (put_back("commitlog"), "the log has another record"),
    "last record damaged": (damaged_record, "the log has another record"),
    "checkpoint put back": (put_back("checkpoint"), ""),
    "mark of another store": (mark_of_another_store, "the log has another record"),
    "mark of an earlier flush": (lambda store: store.contents | {MARK: store.earlier[MARK]}, ""),
    "mark torn": (torn_mark, "is unreadable"),
    "mark of another machine": (marked(machine="there: /store"), "before a restart of the machine"),
    "mark with an impossible queue": (marked(queues=[["../../a", 0, 0, 1, 2]]), "is unreadable"),
    "mark with a number below 0": (marked(last_record=-5), "is unreadable"),
    "mark without a record": (marked(last_record=None), "names no record"),
    "mark of a later version": (marked(version=2), "is unreadable"),
}


@many
@pytest.mark.parametrize("name", some(list(CHANGES)))
def test_a_mark_that_the_files_contradict_does_not_count(
    name: str, walks: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    change, why = CHANGES[name]
    found = change(killed_store())
    files = on_machine(found, "here")
    by_mark = recovered(files, PLAIN)
    (warning,) = [entry.getMessage() for entry in caplog.records if "recovered in" in entry.getMessage()] or [""]
    assert why in warning
    assert ("the mark of the last flush did not count" in warning) == bool(why)
    used = not why and MARK in found
    assert walks[0] == (json.loads(found[MARK] or b"")["last_record"] if used else 0)
    assert by_mark == recovered(on_machine(without_mark(found)), PLAIN)
    if file_size(files, PLACE) is not None:  # one of the recovered store
        assert json.loads(files.read(PLACE))["log_end"] == by_mark.end


def test_damage_before_the_mark_is_found_by_verify() -> None:
    """As in files before the one where a recovery begins without a mark."""
    found = killed_store().contents
    path = f"commitlog/{0:020d}"
    log = bytearray(found[path] or b"")
    at = next(m.physical_offset for m in opened(in_memory(found), PLAIN, read_only=True) if len(m.body) > 50)
    log[at + 100] ^= 1
    with opened(on_machine(found | {path: bytes(log)}), PLAIN) as store:
        first = store.verify().damage[0]
        assert (first.kind, first.offset) == ("checksum", at)


# ------------------------------------------------------------------------------------------------------ life of a mark


def test_a_mark_is_deleted_before_a_recovery_changes_anything() -> None:
    files = on_machine(killed_store().contents)
    opened(files, PLAIN, thorough=True).abandon()
    changes = [(event.call, event.path) for event in files.trace if "flush" not in event.call]
    assert changes[0] == ("delete", PLACE)
    assert [call for call, path in changes if path == PLACE] == ["delete", "replace"]


def test_a_closed_store_has_no_mark() -> None:
    files = on_machine(killed_store().contents)
    with opened(files, PLAIN) as store:
        assert file_size(files, PLACE) is not None
        store.append(Message("TopicA", b"more"))
        store.flush()
    assert file_size(files, PLACE) is None


def test_a_clean_store_ignores_a_mark() -> None:
    killed = killed_store()
    files = on_machine(killed.contents)
    opened(files, PLAIN).close()
    files.write(PLACE, killed.contents[MARK] or b"")
    store = opened(files, PLAIN)
    assert store.recovered == []
    mark = json.loads(files.read(PLACE))
    assert mark["log_end"] == store.log.end


@pytest.mark.parametrize("read", ["read-only", "overlay", "snapshot"])
def test_what_only_reads_leaves_the_mark(read: str, walks: list[int]) -> None:
    found = killed_store().contents
    files = on_machine(found)
    if read == "read-only":
        opened(files, PLAIN, read_only=True).close()
    elif read == "overlay":
        opened(OverlayFiles(files), PLAIN).close()
    else:
        snapshot(ROOT, "/copy", files=files, clock=ManualClock(START_MS))
        assert file_size(files, f"/copy/{MARK}") is None
    assert walks[0] == 0
    assert files.read(PLACE) == found[MARK]


def test_a_failed_flush_withdraws_the_mark() -> None:
    disk = on_machine(killed_store().contents)
    store = opened(disk, PLAIN)
    failing = FailingFiles(disk)
    store.append(Message("TopicA", b"more", keys="k"))
    for file in store.index.files:
        file._files = failing
    failing.fail("flush")
    with pytest.raises(StoreIOError):
        store.flush()
    assert file_size(disk, PLACE) is None


def test_stores_with_extension_files_have_no_mark() -> None:
    files = BusyFiles()
    store = MessageStore.open(ROOT, SMALL_EXT, files=files, clock=ManualClock(START_MS))
    store.append(Message("TopicA", b"body"))
    store.flush()
    assert file_size(files, PLACE) is None


@pytest.mark.parametrize("keys", [[], ["k"]])
def test_a_queue_without_later_records_keeps_its_entries(keys: list[str], walks: list[int]) -> None:
    """Nothing after the mark leads to it, nor is there an index without keys."""
    files = BusyFiles()
    store = MessageStore.open(ROOT, SMALL, files=files, clock=ManualClock(START_MS))
    store.append(Message("Quiet", b"body"))
    for _ in range(40):
        store.append(Message("TopicA", b"body", keys=keys))
    store.flush()
    store.append(Message("TopicA", b"body", keys=keys))
    store.abandon()
    mark = json.loads(files.read(PLACE))
    store = opened(files)
    assert walks == [mark["last_record"]]
    assert (store.queue_range("Quiet", 0), store.queue_range("TopicA", 0)) == ((0, 1), (0, 41))
    assert len(store.find_by_key("TopicA", "k")) == 41 * len(keys)
    assert store.verify().sound


def test_deleted_log_files_lead_to_a_new_mark() -> None:
    files, clock = BusyFiles(), ManualClock(START_MS)
    config = replace(SMALL, max_total_size=3 * SMALL.commitlog_file_size)
    store = MessageStore.open(ROOT, config, files=files, clock=clock)
    fill(store, clock, random.Random(1), 100)
    store.flush()
    store.run_due(clock.now_ms())
    assert store.log.begin > 0
    store.append(Message("TopicA", b"more"))
    store.flush()
    assert json.loads(files.read(PLACE))["log_begin"] == store.log.begin
