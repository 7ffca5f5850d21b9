"""Trial runs of operations, without changes on the disk."""

from __future__ import annotations

import errno
import os
import random
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from librmq.clock import ManualClock
from librmq.config import StoreConfig
from librmq.errors import CorruptionError, RmqError, StoreIOError, StoreLockedError
from librmq.files._disk import DiskFiles
from librmq.files._memory import MemoryFiles, OverlayFiles
from librmq.files.interface import Advice, Files, file_size, is_folder
from librmq.message.message import Message
from librmq.store import MessageStore
from librmq.store.recovery._verify import verify
from tests.budget import examples
from tests.crash.test_damage import spoil, subjects
from tests.stores import SMALL, START_MS, contents, filled, from_disk, on_disk


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    on_disk({"a": b"aaaa", "b": b"bbbb", "f/c": b"cccc", "f/empty": b"", "f/g/d": b"dddd"}, tmp_path)
    return tmp_path


def test_everything_is_seen_and_nothing_changed(folder: Path) -> None:
    before = from_disk(folder)
    disk, files = DiskFiles(), OverlayFiles()
    root = str(folder)
    assert contents(files, root) == before
    assert files.list(root) == disk.list(root)
    assert file_size(files, f"{root}/a") == 4
    assert is_folder(files, f"{root}/f/g")

    held = files.open(f"{root}/a")
    file = files.open(f"{root}/a", writable=True)
    files.reserve(file, 0, 4)
    file.buffer[1:3] = b"XY"
    files.flush(file)
    assert held.buffer[:] == files.read(f"{root}/a") == files.open(f"{root}/a").buffer[:] == b"aXYa"
    del held, file
    assert files.open(f"{root}/a").buffer[:] == b"aXYa"

    files.write(f"{root}/b", b"new")
    files.create(f"{root}/f/e", 3).buffer[:] = b"eee"
    files.delete(f"{root}/f/c")
    files.rename(f"{root}/f/g/d", f"{root}/d")
    files.make_folder(f"{root}/h/i")
    files.link(f"{root}/d", f"{root}/h/d")
    files.flush_folder(root)
    assert contents(files, root) == {
        "a": b"aXYa", "b": b"new", "d": b"dddd", "f": None, "f/e": b"eee", "f/empty": b"", "f/g": None,
        "h": None, "h/d": b"dddd", "h/i": None,
    }  # fmt: skip
    assert [files.names(f"{root}{below}") for below in ("", "/f", "/f/g", "/h")] == [
        ("a", "b", "d", "f", "h"), ("e", "empty", "g"), (), ("d", "i"),
    ]  # fmt: skip
    files.delete(f"{root}/f")
    assert not is_folder(files, f"{root}/f/g")
    assert files.list(f"{root}/f") == []
    files.make_folder(f"{root}/f")
    files.write(f"{root}/f/c", b"again")
    assert files.names(f"{root}/f") == tuple(entry.name for entry in files.list(f"{root}/f")) == ("c",)
    assert from_disk(folder) == before


def test_errors_are_those_of_the_disk(folder: Path) -> None:
    root = str(folder)
    files = OverlayFiles()
    for seam in (DiskFiles(), files):
        calls: list[Callable[[], object]] = [
            partial(seam.open, f"{root}/nothing"),
            partial(seam.read, f"{root}/nothing"),
            partial(seam.rename, f"{root}/nothing", f"{root}/x"),
            partial(seam.create, f"{root}/nowhere/x", 4),
            partial(seam.write, f"{root}/nowhere/x", b""),
        ]
        for call in calls:
            with pytest.raises(StoreIOError) as told:
                call()
            assert told.value.errno == errno.ENOENT
        with pytest.raises(StoreIOError) as told:
            seam.create(f"{root}/a", 4)
        assert told.value.errno == errno.EEXIST
        with pytest.raises(CorruptionError):
            seam.open(f"{root}/f/empty")
    files.delete(f"{root}/a")
    with pytest.raises(StoreIOError):
        files.open(f"{root}/a")
    files.create(f"{root}/a", 4)


def test_a_change_to_a_deleted_file_does_not_restore_it(folder: Path) -> None:
    files = OverlayFiles()
    file = files.open(f"{folder}/a", writable=True)
    files.delete(f"{folder}/a")
    file.buffer[:1] = b"X"
    assert file_size(files, f"{folder}/a") is None
    assert (folder / "a").read_bytes() == b"aaaa"


@pytest.mark.parametrize("base", [DiskFiles(), MemoryFiles()], ids=["disk", "memory"])
def test_unmapping_loses_no_change(base: Files, tmp_path: Path) -> None:
    base.make_folder(str(tmp_path))
    path, data = f"{tmp_path}/a", random.Random(1).randbytes(20_000)
    base.create(path, len(data)).buffer[:] = data
    files = OverlayFiles(None if isinstance(base, DiskFiles) else base)
    file = files.open(path, writable=True)
    file.advise(0, len(data), Advice.NO_USE)
    assert file.buffer[:] == data
    file.buffer[5000:5001] = b"X"
    file.advise(0, len(data), Advice.NO_USE)
    assert file.buffer[:] == files.open(path).buffer[:] == data[:5000] + b"X" + data[5001:]


@pytest.mark.skipif(sys.platform != "linux", reason="the system does not list the pages of a mapping")
def test_a_read_only_scan_leaves_no_pages_in_memory(tmp_path: Path) -> None:
    with MessageStore.open(tmp_path, StoreConfig(commitlog_file_size=4 << 20), background=False) as store:
        for number in range(60):
            store.append(Message("T", bytes((number,)) * 50_000))
    with MessageStore.open(tmp_path, read_only=True) as store:
        for _ in range(2):
            assert [message.body[0] for message in store] == list(range(60))
            assert resident_kb(tmp_path / "commitlog") < 200


def resident_kb(folder: Path) -> int:
    maps = Path("/proc/self/smaps").read_text()
    sizes = re.findall(rf"{re.escape(str(folder))}/(?:.*\n)+?Rss: *(\d+) kB", maps)
    assert sizes
    return sum(map(int, sizes))


@pytest.mark.skipif(sys.platform != "linux", reason="the system does not list the pages of a mapping")
def test_a_look_at_a_killed_store_holds_few_pages_of_its_log(tmp_path: Path) -> None:
    store = MessageStore.open(tmp_path, StoreConfig(commitlog_file_size=4 << 20), background=False)
    for number in range(600):
        store.append(Message("T", bytes((number % 256,)) * 50_000))
    store.abandon()
    with MessageStore.open(tmp_path, read_only=True) as reader:
        assert reader.queues["T", 0].max_offset == 600
        assert resident_kb(tmp_path / "commitlog") < 9_000


def test_the_lock_of_another_process_is_respected(tmp_path: Path) -> None:
    with MessageStore.open(tmp_path, SMALL) as store:
        store.append(Message("T", b"x"))
        with pytest.raises(StoreLockedError):
            MessageStore.open(tmp_path, SMALL, files=OverlayFiles())
    files = OverlayFiles()
    with MessageStore.open(tmp_path, SMALL, files=files):
        assert files.lock_holder(f"{tmp_path}/lock")
        MessageStore.open(tmp_path, SMALL).close()


def test_a_store_is_continued_in_memory_only(tmp_path: Path) -> None:
    on_disk(filled(SMALL, 60), tmp_path)
    before = from_disk(tmp_path)
    files = OverlayFiles()
    with MessageStore.open(tmp_path, SMALL, files=files, clock=ManualClock(START_MS + 10**9)) as store:
        for n in range(50):
            store.append(Message("TopicA", b"x" * 90, keys=f"k{n}"))
        assert len(store.find_by_key("TopicA", "k49")) == 1
        end = store.log.end
    assert verify(str(tmp_path), SMALL, files).sound
    with MessageStore.open(tmp_path, SMALL, files=files, read_only=True) as store:
        assert store.log.end == end
    assert from_disk(tmp_path) == before


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_preview_agrees_with_the_recovery(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    for number in range(examples(6)):
        for which, subject in enumerate(subjects()):
            folder = tmp_path / f"{number}-{which}"
            on_disk(spoil(subject, rng).found, folder)
            before = from_disk(folder)
            overlay = OverlayFiles()
            tried = outcome(folder, subject.config, overlay)
            assert from_disk(folder) == before
            assert outcome(folder, subject.config, DiskFiles()) == tried
            assert contents(overlay, str(folder)) == contents(DiskFiles(), str(folder))


def outcome(folder: Path, config: StoreConfig, files: Files) -> object:
    """Return the error of a recovery, or its cuts and the queues that it leaves."""
    clock = ManualClock(START_MS + 10**9)
    try:
        with MessageStore.open(os.fspath(folder), config, thorough=True, files=files, clock=clock) as store:
            queues = sorted((name, queue.min_offset, queue.max_offset) for name, queue in store.queues.items())
            return store.recovered, store.log.begin, store.log.end, queues
    except RmqError as error:
        return str(error)
