"""Snapshots of a store in use, restored stores, and new stores made from a damaged one's sound records."""

from __future__ import annotations

import errno
import os
import random
from itertools import permutations
from pathlib import Path

import pytest

from librmq.clock import ManualClock
from librmq.config import StoreConfig
from librmq.errors import (
    ConfigError,
    CorruptionError,
    MessageIllegalError,
    NotAStoreError,
    RmqError,
    StoreClosedError,
    StoreIOError,
    StoreLockedError,
)
from librmq.files._disk import DiskFiles
from librmq.files._memory import MemoryFiles
from librmq.files.interface import File, Files, file_size, is_folder
from librmq.message.message import Message, StoredMessage
from librmq.message.topics import validate_queue
from librmq.store import MessageStore
from librmq.store._snapshots import Snapshot, restore, snapshot
from librmq.store.engine.derivation import has_queue_entry
from librmq.store.engine.read import GetStatus
from librmq.store.extraction import rescue
from librmq.store.recovery import salvage
from librmq.store.recovery._verify import verify
from librmq.store.recovery.salvage import Gap
from tests.budget import examples, many, some
from tests.file_seams import FailingFiles
from tests.programs import start_program
from tests.reference import rows, store_folders
from tests.stores import (
    ROOT,
    SMALL,
    SMALL_EXT,
    START_MS,
    Contents,
    calls_failing,
    configs,
    contents,
    derived,
    fill,
    filled,
    from_disk,
    in_memory,
    on_disk,
    opened,
    served,
)

TARGET = "/snapshots/one"


def open_target(files: Files, target: str = TARGET, config: StoreConfig = SMALL) -> MessageStore:
    return MessageStore.open(target, config, files=files, clock=ManualClock(START_MS + 10**9))


def raws(store: MessageStore) -> dict[int, bytes]:
    return {message.physical_offset: message.raw for message in store}


# -------------------------------------------------------------------------------------- snapshots of a store at rest


@many
@configs
@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("count", [0, 1, 30, 300])
def test_a_snapshot_is_the_store(config: StoreConfig, clean: bool, count: int) -> None:
    found = filled(config, count, clean=clean)
    found["config/topics.json"] = b"{}"
    found["config/more/tables"] = b"x"
    files = in_memory(found)
    before = contents(files)
    with opened(files, config, read_only=True) as store:
        there, end = raws(store), store.log.end
        queues = {name: queue.max_offset for name, queue in store.queues.items()}
    made = snapshot(ROOT, TARGET, config, files=files)
    assert made[:3] == (TARGET, 0, end)
    assert contents(files) == before
    assert verify(TARGET, config, files).sound
    after = contents(files, TARGET)
    assert "abort" not in after
    assert (after["config/topics.json"], after["config/more/tables"]) == (b"{}", b"x")
    with open_target(files, config=config) as copy:
        assert copy.recovered == []
        assert raws(copy) == there
        served(copy)
        if clean:
            assert {name: queue.max_offset for name, queue in copy.queues.items()} == queues
        for n in range(30):
            copy.append(Message("TopicA", b"more", keys=f"m{n}"))
    assert contents(files) == before


@pytest.mark.parametrize("folder", store_folders())
def test_snapshots_of_real_stores(folder: Path, tmp_path: Path) -> None:
    config = StoreConfig.from_row(rows(folder, "config")[0])
    files = in_memory(from_disk(folder / "store"))
    opened(files, config, thorough=True).close()
    with opened(files, config, read_only=True) as store:
        there = raws(store)
        queues = {name: (queue.min_offset, queue.max_offset) for name, queue in store.queues.items()}
    snapshot(ROOT, TARGET, config, files=files)
    assert verify(TARGET, config, files).sound
    with open_target(files, config=config) as copy:
        assert raws(copy) == there
        assert {name: (queue.min_offset, queue.max_offset) for name, queue in copy.queues.items()} == queues


def test_a_queue_whose_messages_are_gone_keeps_its_offsets() -> None:
    files = MemoryFiles()
    with opened(files) as store:
        for _ in range(5):
            store.append(Message("Early", b"x"))
        for _ in range(60):
            store.append(Message("Late", b"y" * 100))
        store.flush()  # the deletion is durable
        store.log.delete_before(3 * 4096)
        assert store.log.begin == 3 * 4096
        made = store.snapshot(TARGET)
    assert made.begin == 3 * 4096
    with open_target(files) as copy:
        assert copy.read("Early", 0, 5).status in (GetStatus.OFFSET_OVERFLOW_ONE, GetStatus.NO_MESSAGE_IN_QUEUE)
        assert copy.append(Message("Early", b"x")).queue_offset == 5
    assert verify(TARGET, SMALL, files).sound


def test_zeros_in_properties_of_a_closed_store_are_copied() -> None:
    """After a crash they would count as words that were never written."""
    files = MemoryFiles()
    with MessageStore.open(ROOT, SMALL, files=files) as store:
        store.append(Message("TopicA", b""), properties_raw=b"a\1b\2cc\1" + bytes(1000))
        end = store.log.end
    assert snapshot(ROOT, TARGET, SMALL, files=files).end == end


def test_modification_times_are_kept(tmp_path: Path) -> None:
    """A broker uses them to find a queue file when it searches by time, and to delete log files.

    Linked files keep them too, and so do the store's own files.
    """
    on_disk(filled(SMALL_EXT, 120), tmp_path / "store")
    paths = [path for path in (tmp_path / "store").rglob("*") if path.is_file() and path.name.isdigit()]
    times = {path: START_MS // 1000 + number for number, path in enumerate(paths)}
    for path, time in times.items():
        os.utime(path, (time, time))
    snapshot(str(tmp_path / "store"), str(tmp_path / "one"), SMALL_EXT)
    restore(str(tmp_path / "one"), str(tmp_path / "back"), SMALL_EXT)
    for path, time in times.items():
        name = path.relative_to(tmp_path / "store")
        for copy in ("store", "one", "back"):
            if (tmp_path / copy / name).exists():  # index files that are not full are rebuilt
                assert (tmp_path / copy / name).stat().st_mtime == time, (copy, name)


def test_a_snapshot_in_its_own_store_is_refused(tmp_path: Path) -> None:
    on_disk(filled(SMALL, 20), tmp_path / "store")
    (tmp_path / "link").symlink_to(tmp_path / "store", target_is_directory=True)
    for target in ("store/copy", "link/config/copy"):
        with pytest.raises(ConfigError, match="is in the store; name a folder outside of it"):
            snapshot(str(tmp_path / "store"), str(tmp_path / target))
        assert not (tmp_path / target).exists()
    snapshot(str(tmp_path / "store"), str(tmp_path / "store-copy"))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
@pytest.mark.platform
def test_a_pipe_in_config_is_skipped(tmp_path: Path) -> None:
    on_disk({**filled(SMALL, 20), "config/topics.json": b"{}"}, tmp_path / "store")
    os.mkfifo(tmp_path / "store" / "config" / "pipe")
    os.mkfifo(tmp_path / "store" / "config" / "consumerOffset.json")
    snapshot(str(tmp_path / "store"), str(tmp_path / "one"))
    assert [path.name for path in (tmp_path / "one" / "config").iterdir()] == ["topics.json"]
    with pytest.raises(CorruptionError, match="regular file"):
        DiskFiles().read(str(tmp_path / "store" / "config" / "pipe"))


@many
@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("names", [("0" * 20, f"{80:020}"), ("0" * 20, f"{160:020}"), (f"{80:020}", f"{320:020}")])
@pytest.mark.parametrize("size", [80, 160, 320])
def test_a_copy_makes_queues_of_impossible_files_again(names: tuple[str, ...], size: int, clean: bool) -> None:
    found = filled(SMALL, 120, clean=clean)
    folder, content = "consumequeue/TopicA/0", found[f"consumequeue/TopicA/0/{0:020}"]
    kept = {path: data for path, data in found.items() if os.path.dirname(path) != folder}
    files = in_memory(kept | {f"{folder}/{name}": (content * 2)[:size] for name in names})
    snapshot(ROOT, TARGET, SMALL, files=files)
    assert verify(TARGET, SMALL, files).sound


@many
@pytest.mark.parametrize("clean", [True, False])
def test_a_snapshot_of_a_queue_whose_file_is_in_the_place_of_another_is_sound(clean: bool) -> None:
    """The log is the truth: it stays as it is, whatever the queue says of the offsets of its records."""
    found = filled(SMALL, 60, clean=clean)
    paths = sorted(path for path, data in found.items() if data is not None and path.startswith("consumequeue/"))
    for at, (source, other) in enumerate(some(list(permutations(paths, 2)))):
        moved = {**found, other: found[source]}
        if at % 2 or os.path.dirname(source) == os.path.dirname(other):
            del moved[source]
        files = in_memory(moved)
        snapshot(ROOT, TARGET, SMALL, files=files)
        assert verify(TARGET, SMALL, files).sound, (source, other)


def test_a_copy_leaves_out_files_whose_names_have_digits_of_another_script(tmp_path: Path) -> None:
    on_disk(filled(SMALL, 20), tmp_path / "store")
    for path in (tmp_path / "store" / "consumequeue").glob("*/*/" + "0" * 20):
        path.rename(path.parent / ("\N{ARABIC-INDIC DIGIT ZERO}" * 20))
    snapshot(str(tmp_path / "store"), str(tmp_path / "one"), SMALL)
    assert verify(str(tmp_path / "one")).sound


def test_full_files_are_linked_but_for_the_last_two(tmp_path: Path) -> None:
    on_disk(filled(SMALL, 120), tmp_path / "store")
    made = snapshot(str(tmp_path / "store"), str(tmp_path / "one"))
    log = sorted(path.name for path in (tmp_path / "store" / "commitlog").iterdir())
    assert (made.linked_files, made.copied_files) == (len(log) - 2, 2)
    for number, name in enumerate(log):
        same = (tmp_path / "store" / "commitlog" / name).samefile(tmp_path / "one" / "commitlog" / name)
        assert same is (number < len(log) - 2)
    assert all(path.stat().st_nlink == 1 for path in (tmp_path / "one" / "consumequeue").rglob("*") if path.is_file())
    assert verify(str(tmp_path / "one")).sound
    copied = snapshot(str(tmp_path / "store"), str(tmp_path / "two"), copy=True)
    assert (copied.linked_files, copied.copied_files) == (0, len(log))
    back = restore(str(tmp_path / "one"), str(tmp_path / "three"))
    assert back == Snapshot(str(tmp_path / "three"), 0, made.end, len(log), 0)
    one, three = (
        {path: data for path, data in derived(from_disk(tmp_path / name)).items() if not path.startswith("index/")}
        for name in ("one", "three")
    )
    assert one == three
    assert verify(str(tmp_path / "three")).sound


def test_later_changes_leave_the_snapshot_alone(tmp_path: Path) -> None:
    path, target = tmp_path / "store", tmp_path / "one"
    on_disk(filled(SMALL, 120), path)
    snapshot(str(path), str(target))
    before = from_disk(target)
    with open(path / "commitlog" / f"{4096:020d}", "r+b") as file:
        file.seek(10)
        data = file.read(200)
    spoilt = path / "commitlog" / f"{4096:020d}"
    changed = spoilt.read_bytes()
    spoilt.unlink()
    spoilt.write_bytes(changed[:10] + bytes(byte ^ 255 for byte in data) + changed[210:])
    with MessageStore.open(path, SMALL, thorough=True) as store:
        assert store.log.end == 4096
        for _ in range(60):
            store.append(Message("TopicA", b"new" * 40))
    assert from_disk(target) == before
    assert verify(str(target)).sound


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EPERM, errno.EMLINK])
def test_without_links_all_files_are_copied(code: int) -> None:
    files = in_memory(filled(SMALL, 120))
    failing = FailingFiles(files)
    for number in range(1, 50):
        failing.fail("link", number, code)
    made = snapshot(ROOT, TARGET, files=failing)
    assert made.linked_files == 0
    assert failing.calls["link"] > 3
    assert verify(TARGET, SMALL, files).sound


def test_full_files_that_may_not_be_written_are_copied() -> None:
    class Protected(FailingFiles):
        """Files of a log that is read-only, and so are further names of its files."""

        def __init__(self, files: Files) -> None:
            super().__init__(files)
            self.links = set[str]()

        def link(self, old: str, new: str) -> None:
            self._files.link(old, new)
            self.links.add(new)

        def delete(self, path: str) -> None:
            self._files.delete(path)
            self.links.discard(path)

        def open(self, path: str, *, writable: bool = False, keep_descriptor: bool = False) -> File:
            if writable and path in self.links:
                raise StoreIOError("open", path, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))
            return self._files.open(path, writable=writable, keep_descriptor=keep_descriptor)

    files = Protected(in_memory(filled(SMALL, 120)))
    made = snapshot(ROOT, TARGET, files=files)
    assert (made.linked_files, files.links) == (0, set())
    assert verify(TARGET, SMALL, files).sound


# -------------------------------------------------------------------------------------- snapshots of a store in use


WRITER = """
import sys
from librmq import Message, MessageStore, StoreConfig
config = StoreConfig.tiny(commitlog_file_size=8192, consumequeue_file_size=400)
with MessageStore.open(sys.argv[1], config) as store:
    for n in range(3000):
        result = store.append(Message("T", b"%d" % n + b"." * (n % 200), keys=f"k{n}", tags="a"), n % 3)
        sys.stdout.write(f"{result.physical_offset}\\n")
        sys.stdout.flush()
"""


@pytest.mark.slow
@pytest.mark.platform
@pytest.mark.skipif("sys.platform == 'win32'", reason="files in use can't be opened there")
def test_another_process_continues_writing(tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    child = start_program(WRITER, path)
    known: list[int] = []
    for number in range(3):
        while len(known) < 300 * (number + 1):
            known.append(int(child.stdout.readline()))
        target = str(tmp_path / f"{number}")
        made = snapshot(path, target)
        assert made.end > known[-1]
        assert verify(target).sound
        with MessageStore.open(target) as copy:
            assert copy.recovered == []
            assert set(known) <= set(served(copy))
    known += [int(line) for line in child.stdout]
    assert child.wait() == 0
    child.communicate()
    assert len(known) == 3000
    assert verify(path).sound


def test_a_new_file_without_a_record_is_left_out(tmp_path: Path) -> None:
    """A writer has ended a file of the log, and not yet begun the next one."""
    path, size = str(tmp_path / "store"), StoreConfig.tiny().commitlog_file_size
    with MessageStore.open(path, StoreConfig.tiny()) as store:
        while store.append(Message("T", b"x" * 100)).physical_offset < size:
            pass
    for file in (tmp_path / "store" / "commitlog").iterdir():
        if int(file.name) >= size:
            file.write_bytes(bytes(size))
    made = snapshot(path, str(tmp_path / "target"))
    assert size - 1000 < made.end < size
    assert verify(made.path).sound


class Expiring(MemoryFiles):
    """Files that delete the oldest ones of log, queues and index when a log file is opened for the ``nth`` time."""

    nth = 0

    def open(self, path: str, *, writable: bool = False, keep_descriptor: bool = False) -> File:
        if path.startswith(f"{ROOT}/commitlog/"):
            self.nth -= 1
            if self.nth == 0:
                self.expire()
        return super().open(path, writable=writable, keep_descriptor=keep_descriptor)

    def expire(self) -> None:
        folders: dict[str, list[str]] = {}
        for name in sorted(contents(self)):
            if os.path.basename(name).isdigit() and file_size(self, f"{ROOT}/{name}"):
                folders.setdefault(os.path.dirname(name), []).append(name)
        for names in folders.values():
            for name in names[: len(names) // 2]:
                self.delete(f"{ROOT}/{name}")


@pytest.mark.slow
@pytest.mark.parametrize("nth", range(1, 12))
def test_retention_continues_meanwhile(nth: int) -> None:
    files, config = Expiring(), SMALL_EXT if nth % 2 else SMALL
    files.make_folder(ROOT)
    for path, data in filled(config, 200).items():
        files.make_folder(os.path.dirname(f"{ROOT}/{path}"))
        if data is not None:
            files.write(f"{ROOT}/{path}", data)
    files.nth = nth
    made = snapshot(ROOT, TARGET, config, files=files)
    assert files.nth <= 0
    assert verify(TARGET, config, files).sound
    with opened(files, config, read_only=True) as left, open_target(files, config=config) as copy:
        assert raws(left).items() <= raws(copy).items()
        assert copy.log.begin == made.begin <= left.log.begin
        assert copy.log.end == left.log.end
        served(copy)


def test_a_read_only_handle_looks_again() -> None:
    files = MemoryFiles()
    with opened(files) as store:
        store.append(Message("T", b"1"))
        with opened(files, read_only=True) as reader:
            store.append(Message("T", b"2"))
            reader.snapshot(TARGET)
    with open_target(files) as copy:
        assert [message.body for message in copy] == [b"1", b"2"]
    with pytest.raises(StoreClosedError):
        store.snapshot(TARGET)


# ------------------------------------------------------------------------------------------------------- refusals


def nothing_left(files: Files) -> bool:
    return not is_folder(files, TARGET) and not is_folder(files, f"{TARGET}.part")


CALLS = ("open", "create", "reserve", "flush", "flush_folder", "make_folder", "rename", "write", "read", "list", "lock")


@pytest.mark.slow
def test_any_failed_call_leaves_the_store_unchanged() -> None:
    files = in_memory({**filled(SMALL, 60), "config/topics.json": b"{}"})
    before = contents(files)
    failed = 0
    for _, failing in calls_failing(files, CALLS, errno.ENOSPC):
        try:
            snapshot(ROOT, TARGET, SMALL, files=failing)
        except RmqError:
            failed += 1
            assert not is_folder(files, TARGET) or verify(TARGET, SMALL, files).sound  # only the last flush failed
        else:
            assert verify(TARGET, SMALL, files).sound
        assert not is_folder(files, f"{TARGET}.part")
        files.delete(TARGET)
        assert contents(files) == before
    assert failed > examples(100)


def test_a_target_in_use_is_refused(tmp_path: Path) -> None:
    files = in_memory(filled(SMALL, 10))
    files.make_folder(TARGET)
    snapshot(ROOT, TARGET, files=files)
    before = contents(files, TARGET)
    with pytest.raises(StoreIOError, match="it is not empty"):
        snapshot(ROOT, TARGET, files=files)
    assert contents(files, TARGET) == before
    files.write("/snapshots/file", b"")
    with pytest.raises(StoreIOError):
        snapshot(ROOT, "/snapshots/file", files=files)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    (tmp_path / "empty").mkdir()
    on_disk(filled(SMALL, 10), tmp_path / "store")
    with pytest.raises(StoreIOError):
        snapshot(str(tmp_path / "store"), str(tmp_path / "full"))
    snapshot(str(tmp_path / "store"), str(tmp_path / "empty") + os.sep)
    assert verify(str(tmp_path / "empty")).sound
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "full", "store"]


def test_only_leftovers_of_a_dead_process_are_removed() -> None:
    files = in_memory(filled(SMALL, 40))
    files.make_folder(f"{TARGET}.part/commitlog")
    files.write(f"{TARGET}.part/commitlog/{0:020d}", b"half")
    lock = files.lock(f"{TARGET}.part/lock")
    with pytest.raises(StoreLockedError):
        snapshot(ROOT, TARGET, files=files)
    assert files.read(f"{TARGET}.part/commitlog/{0:020d}") == b"half"
    lock.release()
    snapshot(ROOT, TARGET, files=files)
    assert verify(TARGET, SMALL, files).sound
    assert not is_folder(files, f"{TARGET}.part")


@pytest.mark.parametrize("which", [0, -1])
@pytest.mark.parametrize("in_use", [False, True])
def test_a_damaged_log_is_not_snapshotted(which: int, in_use: bool) -> None:
    files = in_memory(filled(SMALL, 120))
    path = sorted(path for path in contents(files) if path.startswith("commitlog/"))[which]
    store = opened(files)
    if not in_use:
        store.close()
    files.open(f"{ROOT}/{path}", writable=True).buffer[10:60] = b"\xff" * 50
    with pytest.raises(CorruptionError, match="before a snapshot") as told:
        store.snapshot(TARGET) if in_use else snapshot(ROOT, TARGET, files=files)
    assert (told.value.file, told.value.offset) == (f"{ROOT}/{path}", int(path.split("/")[1]))
    assert nothing_left(files)
    store.close()


def test_a_log_file_of_a_wrong_length_is_reported_by_its_name() -> None:
    found = filled(SMALL, 60)
    path = f"commitlog/{4096:020d}"
    data = found[path]
    files = in_memory({**found, path: data[:-1]})
    for end in (None, lambda: 3 * 4096):
        with pytest.raises(CorruptionError) as told:
            snapshot(ROOT, TARGET, SMALL, files=files, end=end)
        assert told.value.file == f"{ROOT}/{path}"
        assert nothing_left(files)


def test_other_kinds_of_stores_are_refused() -> None:
    files = in_memory({**filled(SMALL, 10), "dledger-n0/data/00000000000000000000": b"x"})
    with pytest.raises(NotAStoreError, match="DLedger"):
        snapshot(ROOT, TARGET, files=files)
    with pytest.raises(NotAStoreError):
        snapshot("/nowhere", TARGET, files=files)
    assert nothing_left(files)


# ------------------------------------------------------------------------------------------------------- rescuing


def spoilt(found: Contents, rng: random.Random, times: int, least: int = 1) -> Contents:
    """Return the log damaged in some places."""
    found = dict(found)
    for _ in range(times):
        path = rng.choice(sorted(path for path, data in found.items() if data and path.startswith("commitlog/")))
        data = found[path]
        begin = rng.randrange(max(1, len(data.rstrip(b"\0"))))
        end = min(len(data), begin + rng.choice([least, 20, 400]))
        found[path] = data[:begin] + rng.randbytes(end - begin) + data[end:]
    return found


def names_a_queue(message: StoredMessage) -> bool:
    try:
        validate_queue(message.topic, message.queue_id)
    except MessageIllegalError:
        return False
    return True


def without_places(message: StoredMessage) -> tuple[object, ...]:
    return (message.topic, message.queue_id, message.stored_body, message.properties_raw, message.store_timestamp_ms)


@many
@configs
@pytest.mark.parametrize("seed", range(6))
def test_every_sound_record_is_copied_to_a_new_store(config: StoreConfig, seed: int) -> None:
    rng = random.Random(seed)
    files = in_memory(spoilt(filled(config, 120, seed), rng, 1 + seed % 3, least=8))
    before = contents(files)
    found = list(salvage.salvaged_records(ROOT, files))
    wanted = [item for item in found if isinstance(item, StoredMessage) and names_a_queue(item)]
    told: list[Gap] = []
    made = rescue(ROOT, TARGET, config, files=files, tell=told.append)
    assert contents(files) == before
    assert (made.path, made.records + made.gaps) == (TARGET, len(found))
    assert len(told) == made.gaps
    assert verify(TARGET, config, files).sound
    with open_target(files, config=config) as store:
        assert store.recovered == []
        there = list(store)
        assert [without_places(message) for message in there] == [without_places(message) for message in wanted]
        for name in {(message.topic, message.queue_id) for message in there if has_queue_entry(message.sys_flag)}:
            offsets = [m.queue_offset for m in there if (m.topic, m.queue_id) == name and has_queue_entry(m.sys_flag)]
            assert offsets == sorted(set(offsets))
        served(store)


def test_queue_offsets_stay_where_they_can() -> None:
    found = filled(SMALL, 120)
    files = in_memory(found)
    with opened(files, read_only=True) as store:
        queue_offsets = [message.queue_offset for message in store]
    rescue(ROOT, TARGET, SMALL, files=files)
    with open_target(files) as copy:
        assert [message.queue_offset for message in copy] == queue_offsets
        assert [message.physical_offset for message in copy] == list(raws(copy))
    assert {path: data for path, data in contents(files, TARGET).items() if path.startswith("commitlog/")} == {
        path: data for path, data in found.items() if path.startswith("commitlog/")
    }


def test_cut_records_follow_their_replacements() -> None:
    files = MemoryFiles()
    with opened(files) as store:
        bodies = [b"%d" % n * 30 for n in range(10)]
        results = [store.append(Message("T", body)) for body in bodies]
    path = f"{ROOT}/commitlog/{0:020d}"
    at = results[4].physical_offset + 90
    files.open(path, writable=True).buffer[at : at + 2] = b"??"
    with opened(files, thorough=True) as store:
        assert store.append(Message("T", b"later")).queue_offset == 4
    told: list[Gap] = []
    made = rescue(ROOT, TARGET, SMALL, files=files, tell=told.append)
    assert (made.records, made.gaps) == (10, 1)
    assert (told[0].physical_offset, told[0].size) == (results[4].physical_offset, results[4].size)
    with open_target(files) as copy:
        messages = list(copy)
        assert [message.body for message in messages] == [*bodies[:4], b"later", *bodies[5:]]
        assert [message.queue_offset for message in messages] == list(range(10))


def test_records_that_name_no_queue_are_skipped() -> None:
    files = MemoryFiles()
    with opened(files) as store:
        first = store.append(Message("Topic", b"1"))
        store.append(Message("Topic", b"2"))
    path = f"{ROOT}/commitlog/{0:020d}"
    buffer = files.open(path, writable=True).buffer
    at = buffer.find(b"Topic")
    buffer[at + 1 : at + 2] = b"/"
    told: list[Gap] = []
    assert rescue(ROOT, TARGET, SMALL, files=files, tell=told.append).records == 1
    assert [(gap.physical_offset, gap.size) for gap in told] == [(first.physical_offset, first.size)]
    assert "can't be the name of a folder" in told[0].what


@pytest.mark.slow
def test_a_full_disk_leaves_no_partial_rescued_store() -> None:
    files = in_memory(spoilt(filled(SMALL, 60), random.Random(1), 2))
    for number in range(1, 200):
        failing = FailingFiles(files)
        failing.fail("reserve", number)
        try:
            rescue(ROOT, TARGET, SMALL, files=failing)
        except StoreIOError:
            assert nothing_left(files)
            continue
        assert number > 5
        return
    raise AssertionError("it never came to an end")


def test_a_store_on_disk(tmp_path: Path) -> None:
    on_disk(spoilt(filled(SMALL, 60), random.Random(2), 2), tmp_path / "store")
    wanted = sum(isinstance(item, StoredMessage) for item in salvage.salvaged_records(str(tmp_path / "store")))
    made = rescue(str(tmp_path / "store"), str(tmp_path / "new"), files=DiskFiles())
    assert made.records == wanted
    assert verify(str(tmp_path / "new")).sound


def test_filling_a_restored_store_continues() -> None:
    files = in_memory(filled(SMALL, 80))
    snapshot(ROOT, TARGET, files=files)
    restore(TARGET, "/back", files=files)
    clock = ManualClock(START_MS + 10**9)
    with MessageStore.open("/back", SMALL, files=files, clock=clock) as store:
        fill(store, clock, random.Random(9), 40)
        assert len(served(store)) >= 120
    assert verify("/back", SMALL, files).sound
    assert verify(TARGET, SMALL, files).sound
