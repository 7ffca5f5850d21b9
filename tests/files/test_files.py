"""The seam to files: one contract for disk, memory, recording and failing files; also locks and forks."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import random
import re
import socket
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from librmq import Broker, Producer
from librmq.errors import CorruptionError, StoreError, StoreIOError, StoreLockedError
from librmq.files._disk import DiskFiles
from librmq.files._memory import MemoryFiles, OverlayFiles, TemporaryFolder
from librmq.files.interface import (
    Advice,
    File,
    Files,
    confine,
    file_size,
    flush_all,
    is_folder,
    read_replaced,
    read_sole_file,
    without_zeros,
)
from librmq.files.lock import DiskLock
from librmq.store import MessageStore
from tests import own
from tests.file_seams import Event, FailingFiles, RecordingFiles
from tests.programs import start_program
from tests.stores import LISTS_DESCRIPTORS, no_descriptor_left

OURS = {
    "disk": DiskFiles,
    "memory": MemoryFiles,
    "recording": RecordingFiles,
    "failing": lambda: FailingFiles(DiskFiles()),
}


@pytest.fixture(params=own.params("files", OURS))
def files(request: pytest.FixtureRequest) -> Files:
    made: Files = request.param()
    return made


@pytest.fixture
def root(files: Files, tmp_path: Path) -> str:
    root = str(tmp_path / "a" / "b")
    files.make_folder(root)
    return root


def untouched(files: Files, path: str) -> bool:
    status = files.status(path)
    return status is not None and status.is_untouched


def names(files: Files, path: str) -> list[tuple[str, int, bool]]:
    return [(entry.name, entry.size, entry.is_folder) for entry in files.list(path)]


# ------------------------------------------------------------------------------------------------- one contract


@pytest.mark.requirement
def test_a_new_file_is_zero_and_keeps_written_bytes(files: Files, root: str) -> None:
    path = os.path.join(root, "f")
    file = files.create(path, 5000)
    assert (file.path, file.size, file.writable, len(file.buffer)) == (path, 5000, True, 5000)
    assert file.buffer[:] == bytes(5000)
    files.reserve(file, 100, 200)
    file.buffer[100:105] = b"hello"
    files.flush(file)
    files.flush_folder(root)
    assert files.open(path).buffer[99:106] == b"\0hello\0"
    assert file_size(files, path) == 5000
    assert files.read(path)[100:105] == b"hello"


@pytest.mark.requirement
@pytest.mark.parametrize(("begin", "end"), [(0, 50_000), (0, 0), (5000, 5001), (4096, 8192), (1, 49_999)])
def test_advice_about_pages_changes_no_byte(files: Files, root: str, begin: int, end: int) -> None:
    path, data = os.path.join(root, "f"), random.Random(1).randbytes(50_000)
    file = files.create(path, len(data))
    files.reserve(file, 0, len(data))
    file.advise(begin, end, Advice.RANDOM_READS)
    file.buffer[:] = data
    file.advise(begin, end, Advice.NO_USE)
    assert file.buffer[:] == data
    file.advise(begin, end, Advice.WRITES)
    file.advise(begin, end, Advice.NO_USE)
    files.flush(file)
    file.buffer[begin:end] = data[begin:end]
    assert files.read(path) == file.buffer[:] == data
    reader = files.open(path)
    for advice in Advice:
        reader.advise(begin, end, advice)
        assert reader.buffer[:] == data


@pytest.mark.requirement
def test_all_mappings_of_a_file_see_the_same(files: Files, root: str) -> None:
    path = os.path.join(root, "f")
    one = files.create(path, 100)
    other = files.open(path)
    another = files.open(path, writable=True, keep_descriptor=True)
    another.buffer[3:5] = b"xy"
    assert one.buffer[3:5] == other.buffer[3:5] == b"xy"
    assert (other.writable, another.writable) == (False, True)


@pytest.mark.requirement
def test_a_deleted_file_stays_readable_for_its_holders(files: Files, root: str) -> None:
    path = os.path.join(root, "f")
    file = files.create(path, 100)
    file.buffer[0:4] = b"data"
    view = memoryview(file.buffer)[0:4]
    files.delete(path)
    assert file_size(files, path) is None
    assert (file.buffer[0:4], bytes(view)) == (b"data", b"data")
    del file
    gc.collect()
    assert bytes(view) == b"data"
    again = files.create(path, 50)
    assert again.buffer[0:4] == bytes(4)


@pytest.mark.requirement
def test_files_are_made_in_folders_of_their_own(files: Files, root: str) -> None:
    folder = f"{root}/queues/T"
    files.make_files(folder, [("0/000", b"zero"), ("7/020", bytearray(b"seven"))], 40)
    assert [entry[:3] for entry in files.list(folder)] == [("0", 0, True), ("7", 0, True)]
    assert files.read(f"{folder}/0/000") == b"zero".ljust(40, b"\0")
    assert files.read(f"{folder}/7/020") == b"seven".ljust(40, b"\0")
    with pytest.raises(StoreIOError):
        files.make_files(folder, [("0/000", b"again")], 40)


@pytest.mark.requirement
def test_a_file_is_made_once(files: Files, root: str) -> None:
    path = os.path.join(root, "f")
    files.create(path, 10).buffer[0:1] = b"x"
    with pytest.raises(StoreIOError) as told:
        files.create(path, 20)
    assert (told.value.errno, told.value.filename, told.value.call) == (errno.EEXIST, path, "create")
    assert files.read(path) == b"x" + bytes(9)


@pytest.mark.requirement
@pytest.mark.parametrize("call", ["open", "create", "read", "write", "rename"])
def test_missing_files(files: Files, root: str, call: str) -> None:
    path = os.path.join(root, "none", "f")
    calls: dict[str, Callable[[], object]] = {
        "open": lambda: files.open(path),
        "create": lambda: files.create(path, 10),
        "read": lambda: files.read(path),
        "write": lambda: files.write(path, b"x"),
        "rename": lambda: files.rename(path, os.path.join(root, "g")),
    }
    with pytest.raises(StoreIOError) as told:
        calls[call]()
    assert told.value.errno == errno.ENOENT
    assert str(told.value.filename).startswith(root)
    assert str(path) in str(told.value)
    assert names(files, root) == []


@pytest.mark.requirement
def test_an_empty_file_is_not_mapped(files: Files, root: str) -> None:
    path = os.path.join(root, "f")
    files.write(path, b"")
    with pytest.raises(CorruptionError) as told:
        files.open(path)
    assert (told.value.file, told.value.offset, told.value.kind) == (path, 0, "size")


@pytest.mark.requirement
def test_lists_are_sorted_and_know_lengths(files: Files, root: str) -> None:
    assert names(files, os.path.join(root, "none")) == []
    files.create(os.path.join(root, "b"), 10)
    files.write(os.path.join(root, "c"), b"")
    files.make_folder(os.path.join(root, "a", "x"))
    files.make_folder(os.path.join(root, "a", "x"))
    files.write(os.path.join(root, "a", "y"), b"123")
    assert names(files, root) == [("a", 0, True), ("b", 10, False), ("c", 0, False)]
    assert names(files, os.path.join(root, "a")) == [("x", 0, True), ("y", 3, False)]
    assert [is_folder(files, os.path.join(root, name)) for name in "abz"] == [True, False, False]
    assert [file_size(files, os.path.join(root, name)) for name in "bcz"] == [10, 0, None]
    assert file_size(files, os.path.join(root, "b", "below-a-file")) is None
    assert not is_folder(files, os.path.join(root, "a\0"))


@pytest.mark.requirement
def test_delete_takes_files_folders_and_nothing(files: Files, root: str) -> None:
    for name in ("f", "folder/x/y", "folderish"):
        path = os.path.join(root, name)
        files.make_folder(os.path.dirname(path))
        files.write(path, b"data")
    files.delete(os.path.join(root, "folder"))
    files.delete(os.path.join(root, "f"))
    files.delete(os.path.join(root, "f"))
    assert names(files, root) == [("folderish", 4, False)]


@pytest.mark.requirement
def test_rename_replaces_and_moves_folders(files: Files, root: str) -> None:
    for name in ("a", "b", "folder/x"):
        files.make_folder(os.path.dirname(os.path.join(root, name)))
        files.write(os.path.join(root, name), name.encode())
    files.rename(os.path.join(root, "a"), os.path.join(root, "b"))
    files.rename(os.path.join(root, "folder"), os.path.join(root, "moved"))
    assert names(files, root) == [("b", 1, False), ("moved", 0, True)]
    assert files.read(os.path.join(root, "b")) == b"a"
    assert files.read(os.path.join(root, "moved", "x")) == b"folder/x"


@pytest.mark.requirement
def test_write_replaces_a_small_file(files: Files, root: str) -> None:
    path = os.path.join(root, "f")
    files.write(path, b"longer than the next")
    files.write(path, b"short")
    assert files.read(path) == b"short"
    assert names(files, root) == [("f", 5, False)]


@pytest.mark.requirement
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_write_whose_data_fail_leaves_nothing(files: Files, root: str, error: type[BaseException]) -> None:
    def parts() -> Iterator[bytes]:
        yield b"first"
        raise error

    path = os.path.join(root, "f")
    files.write(path, b"short")
    with pytest.raises(error):
        files.write(path, parts())
    assert names(files, root) == [("f", 5, False)]


@pytest.mark.requirement
def test_reading_is_bounded(files: Files, root: str) -> None:
    path = os.path.join(root, "f")
    files.write(path, b"12345")
    assert read_replaced(files, path, 5) == b"12345"
    with pytest.raises(CorruptionError) as told:
        read_replaced(files, path, 4)
    assert (told.value.file, told.value.kind) == (path, "size")


@pytest.mark.requirement
def test_one_lock_at_a_time(files: Files, root: str) -> None:
    path = os.path.join(root, "lock")
    assert files.lock_holder(path) is None
    held = files.lock(path)
    assert files.read(path) == b"lock"
    holder = files.lock_holder(path)
    assert holder is not None
    assert str(os.getpid()) in holder
    with pytest.raises(StoreLockedError, match=str(os.getpid())):
        files.lock(path)
    held.release()
    held.release()
    assert files.lock_holder(path) is None
    held = files.lock(path)
    assert not untouched(files, path)
    held.mark_untouched()
    held.release()
    held = files.lock(path)
    assert untouched(files, path)
    held.release()
    files.write(path, b"lock")  # as a broker does
    assert not untouched(files, path)
    assert files.read(path) == b"lock"


# --------------------------------------------------------------------------------------------------------- on disk


def test_files_are_made_behind_no_link(tmp_path: Path) -> None:
    files, outside = DiskFiles(), tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "queues" / "U").mkdir(parents=True)
    confine(files, str(tmp_path), "own", "queues")
    (tmp_path / "queues" / "T").symlink_to(outside)
    (tmp_path / "queues" / "U" / "0").symlink_to(outside)
    for topic, error in (("T", CorruptionError), ("U", StoreIOError)):
        with pytest.raises(error):
            files.make_files(f"{tmp_path}/queues/{topic}", [("0/000", b"zero")], 40)
    assert not list(outside.iterdir())


def test_files_are_made_with_the_times_of_others(tmp_path: Path) -> None:
    files, source = DiskFiles(), tmp_path / "source" / "0" / "000"
    source.parent.mkdir(parents=True)
    source.touch()
    os.utime(source, ns=(1_000_000_007, 2_000_000_009))
    made = tmp_path / "T"
    files.make_files(str(made), [("0/000", b"zero"), ("7/000", b"gone")], 40, times_of=str(tmp_path / "source"))
    assert [(made / f"{name}/000").stat().st_mtime_ns == 2_000_000_009 for name in (0, 7)] == [True, False]


def test_a_look_for_links_that_fails_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: str) -> Any:
        raise OSError(errno.EMFILE, "Too many open files", path)

    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(StoreIOError, match="list: Too many open files"):
        confine(DiskFiles(), str(tmp_path), "own")


@pytest.mark.platform
@pytest.mark.skipif(os.open not in os.supports_dir_fd, reason="opens no file below a descriptor")
@pytest.mark.parametrize("interrupted", [1, 2, 3])
def test_an_interrupt_on_the_way_to_a_file_closes_no_folder_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interrupted: int
) -> None:
    """A second close fails, or closes what another thread has opened meanwhile."""
    files = DiskFiles()
    confine(files, str(tmp_path), "own", "queues")
    files.make_folder(str(tmp_path / "queues" / "a"))
    close, closes = os.close, 0

    def close_and_interrupt(descriptor: int) -> None:
        nonlocal closes
        close(descriptor)
        closes += 1
        if closes == interrupted:
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "close", close_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        files.delete(str(tmp_path / "queues" / "a" / "f"))


def test_a_lock_file_deleted_after_a_look_has_no_holder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, look = tmp_path / "lock", os.stat
    path.write_bytes(b"lock")

    def look_before_deletion(place: Any, *args: Any, **options: Any) -> os.stat_result:
        status = look(place, *args, **options)
        if str(place) == str(path):
            path.unlink()
        return status

    monkeypatch.setattr(os, "stat", look_before_deletion)
    assert DiskFiles().lock_holder(str(path)) is None


@pytest.mark.skipif(sys.platform == "win32", reason="files can't be named within an open folder")
def test_a_lock_file_is_opened_in_the_folder_that_was_checked(tmp_path: Path) -> None:
    """A link that takes the folder's place meanwhile leads nowhere."""
    checked, elsewhere = tmp_path / "checked", tmp_path / "elsewhere"
    checked.mkdir()
    elsewhere.mkdir()
    folder = os.open(checked, os.O_RDONLY)
    try:
        checked.rename(tmp_path / "moved")
        checked.symlink_to(elsewhere)
        lock = DiskLock(str(checked / "lock"), folder)
    finally:
        os.close(folder)
    assert (tmp_path / "moved" / "lock").exists()
    assert not list(elsewhere.iterdir())
    with pytest.raises(StoreIOError, match="was deleted or replaced"):
        lock.check()
    lock.release()


def test_no_descriptor_is_lost(tmp_path: Path) -> None:
    files = DiskFiles()
    gc.collect()  # releases what earlier tests left
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    for n in range(20):
        file = files.create(str(tmp_path / str(n)), 100, keep_descriptor=n % 2 == 0)
        files.reserve(file, 0, 100)
        files.flush(file)
        del file
    with pytest.raises(StoreIOError):
        files.create(str(tmp_path / "0"), 100)
    files.write(str(tmp_path / "empty"), b"")
    with pytest.raises(CorruptionError):
        files.open(str(tmp_path / "empty"))
    files.lock(str(tmp_path / "lock")).release()
    gc.collect()
    after = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    assert after == before


@LISTS_DESCRIPTORS
def test_a_file_that_can_not_be_given_away_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root gives what it makes to the owner of the folder, which a file system can refuse."""

    def refuse(made: int, *_: object) -> None:
        if stat.S_ISREG(os.fstat(made).st_mode):
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr("librmq.files._disk.give_to_owner", refuse)
    files, path = DiskFiles(), str(tmp_path / "f")
    calls: tuple[Callable[[], object], ...] = (
        lambda: files.make_files(str(tmp_path), [("0/000", b"zero")], 40),
        lambda: files.create(path, 40),
        lambda: files.write(path, b"zero"),
    )
    with no_descriptor_left():
        for call in calls:
            with pytest.raises(StoreIOError, match="Operation not permitted"):
                call()
            assert [path.name for path in tmp_path.rglob("*")] == ["0"]


@pytest.mark.parametrize("call", ["os.ftruncate", "mmap.mmap"])
def test_a_file_that_can_not_be_made_whole_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    path = str(tmp_path / "f")
    with monkeypatch.context() as patch:
        patch.setattr(f"librmq.files._disk.{call}", refuse)
        with pytest.raises(StoreIOError) as told:
            DiskFiles().create(path, 100)
    assert (told.value.errno, told.value.filename) == (errno.ENOMEM, path)
    assert names(DiskFiles(), str(tmp_path)) == []
    assert DiskFiles().create(path, 100).size == 100


@pytest.mark.parametrize(("system", "told"), [("linux", []), ("darwin", ["mapping"]), ("win32", ["mapping"])])
def test_a_flush_includes_changes_made_through_a_mapping(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system: str, told: list[str]
) -> None:
    """Only Linux writes out a file's mapped pages together with the file."""
    calls: list[str] = []

    class Mapping(mmap.mmap):
        def flush(self, *place: int | None) -> None:
            calls.append("mapping")

    disk, path = DiskFiles(), tmp_path / "f"
    path.write_bytes(bytes(100))
    with open(path, "rb+") as opened:
        file = File(str(path), Mapping(opened.fileno(), 100), 100, True)
    monkeypatch.setattr("librmq.files._disk.sys", SimpleNamespace(platform=system))
    disk.overwrite(file, 10, b"much")
    disk.flush(file)
    assert calls == told
    assert path.read_bytes()[10:14] == b"much"


@pytest.mark.parametrize("system", ["linux", "darwin", "win32"])
def test_a_part_of_a_file_is_read_on_each_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system: str) -> None:
    (tmp_path / "full").write_bytes(b"0123456789")
    (tmp_path / "empty").touch()
    monkeypatch.setattr("librmq.files._disk.sys", SimpleNamespace(platform=system))
    files = DiskFiles()
    assert files.read(str(tmp_path / "full"), 2, 3) == b"234"
    assert files.read(str(tmp_path / "full"), 8, 100) == b"89"
    assert files.read(str(tmp_path / "full"), 7) == b"789"
    assert files.read(str(tmp_path / "empty"), 0, 100) == b""
    with pytest.raises(StoreIOError, match="missing"):
        files.read(str(tmp_path / "missing"), 0, 100)


def test_a_folder_is_not_mapped(tmp_path: Path) -> None:
    for writable in (False, True):
        with pytest.raises((CorruptionError, StoreIOError)) as told:
            DiskFiles().open(str(tmp_path), writable=writable)
        assert str(tmp_path) in str(told.value)


def test_links_are_followed_and_broken_ones_reported(tmp_path: Path) -> None:
    files = DiskFiles()
    (tmp_path / "s").mkdir()
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_bytes(b"12345")
    (tmp_path / "s" / "a").symlink_to(tmp_path / "folder")
    (tmp_path / "s" / "b").symlink_to(tmp_path / "file")
    assert names(files, str(tmp_path / "s")) == [("a", 0, True), ("b", 5, False)]
    (tmp_path / "s" / "c").symlink_to(tmp_path / "nowhere")
    with pytest.raises(StoreError, match="the target of this link is missing"):
        files.list(str(tmp_path / "s"))


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no number of their start")
def test_a_folder_made_in_place_of_a_deleted_one_has_another_identity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    answers = iter([b"1" * 8, b"1" * 8, b"2" * 8])
    monkeypatch.setattr(fcntl, "ioctl", lambda *_: next(answers))  # the number of the inode stays, as on ext4
    files = DiskFiles()
    first, again, other = (files.identity(str(tmp_path)) for _ in range(3))
    assert first == again != other

    def unknown(*_: object) -> bytes:
        raise OSError(errno.ENOTTY, "Inappropriate ioctl for device")  # as on tmpfs

    monkeypatch.setattr(fcntl, "ioctl", unknown)
    assert files.identity(str(tmp_path)) is not None


def test_a_link_to_itself(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "loop").symlink_to(tmp_path / "s" / "loop")
    with pytest.raises(StoreError, match="loop"):
        DiskFiles().list(str(tmp_path / "s"))


HOLD = """
import sys
from librmq.files import DiskFiles
held = DiskFiles().lock(sys.argv[1])
print("held", flush=True)
sys.stdin.read()
"""


def test_a_lock_held_by_another_process_names_it(tmp_path: Path) -> None:
    path, files = str(tmp_path / "lock"), DiskFiles()
    with start_program(HOLD, path) as other:
        assert other.stdout.readline() == "held\n"
        assert files.lock_holder(path) == f"process {other.pid}"
        with pytest.raises(StoreLockedError, match=str(other.pid)):
            files.lock(path)
        other.communicate()
    assert other.returncode == 0
    assert files.lock_holder(path) is None
    files.lock(path).release()


@pytest.mark.skipif("sys.platform != 'linux'", reason="only there peers hold locks beside an owner's")
def test_a_lock_that_peers_hold_too_names_its_owner(tmp_path: Path) -> None:
    path, files = str(tmp_path / "lock"), DiskFiles(has_peers=True)
    program = HOLD.replace("DiskFiles()", "DiskFiles(has_peers=True)").replace("print(", "held.hold_folder(); print(")
    with start_program(program, path) as other:
        assert other.stdout.readline() == "held\n"
        peer = files.lock_as_peer(path)
        assert files.lock_holder(path) == f"process {other.pid}"
        with pytest.raises(StoreLockedError, match=str(other.pid)):
            DiskFiles().lock(path)
        other.communicate()
    assert files.lock_holder(path) == f"this process (pid {os.getpid()})"  # a peer's, until the next owner comes
    peer.release()
    assert files.lock_holder(path) is None


def test_querying_a_lock_does_not_release_it(tmp_path: Path) -> None:
    path, files = str(tmp_path / "lock"), DiskFiles()
    held = files.lock(path)
    assert files.lock_holder(path) is not None
    with pytest.raises(StoreLockedError):
        files.lock(path)
    program = "import sys; from librmq.files import DiskFiles; print(DiskFiles().lock_holder(sys.argv[1]))"
    with start_program(program, path) as other:
        assert other.communicate()[0] == f"process {os.getpid()}\n"
    held.release()


def test_a_lock_is_the_same_through_links(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "linked").symlink_to(tmp_path / "s")
    held = DiskFiles().lock(str(tmp_path / "s" / "lock"))
    with pytest.raises(StoreLockedError):
        DiskFiles().lock(str(tmp_path / "linked" / "lock"))
    held.release()


# ------------------------------------------------------------------------------------------ recording and failing


def test_a_trace_tells_all_that_changes_files_in_order() -> None:
    files = RecordingFiles()
    files.make_folder("/s")
    file = files.create("/s/f", 8)
    file.buffer[2:4] = b"ab"
    file.buffer[7] = 0x21
    files.flush(file)
    files.flush_folder("/s")
    files.write("/s/g", b"small")
    files.rename("/s/g", "/s/h")
    files.open("/s/h", writable=True).buffer[0:1] = b"S"
    files.delete("/s/f")
    files.open("/s/h")
    files.list("/s")
    assert [event for event in files.trace if (event.call, event.data) != ("write", b"small")] == [
        Event("make_folder", "/s"),
        Event("create", "/s/f", 8),
        Event("write", "/s/f", 2, b"ab"),
        Event("write", "/s/f", 7, b"!"),
        Event("flush", "/s/f"),
        Event("flush_folder", "/s"),
        Event("replace", "/s/g", 0, b"small"),
        Event("rename", "/s/g", 0, b"/s/h"),
        Event("write", "/s/h", 0, b"S"),
        Event("delete", "/s/f"),
    ]


def test_failing_files_fail_once_on_request() -> None:
    files = FailingFiles(MemoryFiles())
    files.make_folder("/s")
    files.fail("create", 2)
    files.fail("flush", code=errno.EIO)
    file = files.create("/s/a", 10)
    with pytest.raises(StoreIOError, match=re.escape(os.strerror(errno.ENOSPC))) as told:
        files.create("/s/b", 10)
    assert (told.value.errno, told.value.filename) == (errno.ENOSPC, "/s/b")
    assert file_size(files, "/s/b") is None
    files.create("/s/b", 10)
    with pytest.raises(StoreIOError, match=re.escape(os.strerror(errno.EIO))):
        files.flush(file)
    files.flush(file)
    assert (files.calls["create"], files.calls["flush"], files.calls["open"]) == (3, 2, 0)


def test_no_python_code_runs_when_a_file_is_released(tmp_path: Path) -> None:
    """If a signal handler raises in a finalizer, Python drops the exception, and a Ctrl-C would be lost."""
    disk, memory, called = DiskFiles(), MemoryFiles(), list[object]()
    memory.make_folder("/m")
    held = [disk.create(str(tmp_path / "file"), 4096), memory.create("/m/file", 4096)]
    memory.delete("/m/file")
    sys.setprofile(lambda frame, event, arg: called.append(frame.f_code) if event == "call" else None)
    held.clear()
    sys.setprofile(None)
    assert called == []


# Finding the end of a file's bytes that are not zero.


SIZE = 3 << 20


@pytest.fixture(params=["disk", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Files, str]:
    if request.param == "disk":
        return DiskFiles(), str(tmp_path / "file")
    return MemoryFiles(), "/file"


def test_the_end_is_behind_the_last_byte_that_is_not_zero(place: tuple[Files, str]) -> None:
    files, path = place
    rng = random.Random(1)
    file = files.create(path, SIZE)
    assert file.used_end(0, SIZE) == 0
    written = []
    for _ in range(40):
        at = rng.choice([0, SIZE - 1, 1 << 16, (1 << 16) - 1, rng.randrange(SIZE)])
        files.reserve(file, at, at + 1)
        file.buffer[at : at + 1] = b"x"
        written.append(at)
        begin = rng.randrange(SIZE)
        end = rng.randrange(begin, SIZE + 1)
        wanted = max((at + 1 for at in written if begin <= at < end), default=begin)
        assert file.used_end(begin, end) == wanted
        assert wanted <= max(begin, file.data_end(begin)) <= SIZE


def test_blocks_that_are_only_reserved_hold_no_data(tmp_path: Path) -> None:
    files = DiskFiles()
    file = files.create(str(tmp_path / "file"), SIZE)
    file.buffer[10:11] = b"x"
    files.reserve(file, 0, SIZE)
    files.flush(file)
    assert file.used_end(0, SIZE) == 11


def test_a_disk_is_flushed_at_once_or_that_is_refused(tmp_path: Path) -> None:
    assert flush_all(DiskFiles(), str(tmp_path)) in (True, False)
    assert flush_all(DiskFiles(), str(tmp_path), str(tmp_path / "nothing")) is False


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a file may not have the changes of its mapping")
def test_used_bytes_are_read_and_written_without_a_mapping(place: tuple[Files, str]) -> None:
    files, path = place
    file = files.create(path, 8192)
    assert files.read_used(path, 8192) == b""
    files.reserve(file, 0, 5000)
    file.buffer[4:8] = b"\0abc"
    assert files.read_used(path, 8192) == b"\0\0\0\0\0abc"
    files.overwrite(path, 4999, b"xy")
    assert file.buffer[4998:5002] == b"\0xy\0"
    assert files.read_used(path, 8192) == file.buffer[:5001]
    assert files.read_used(path, 5000) is None
    if isinstance(files, DiskFiles):
        overlay = OverlayFiles()
        assert overlay.read_used(path, 8192) == file.buffer[:5001]
        overlay.open(path, writable=True).buffer[5001:5002] = b"z"
        assert overlay.read_used(path, 8192) == file.buffer[:5001] + b"z"
        assert files.read_used(path, 8192) == file.buffer[:5001]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a file may not have the changes of its mapping")
def test_the_sole_file_of_a_folder_is_read(tmp_path: Path) -> None:
    files = DiskFiles()
    assert read_sole_file(files, str(tmp_path), 8192, 100) is None
    file = files.create(str(tmp_path / "0"), 8192)
    file.buffer[4:8] = b"\0abc"
    assert read_sole_file(files, str(tmp_path), 8192, 8192) == ("0", b"\0\0\0\0\0abc")
    assert read_sole_file(files, str(tmp_path), 8192, 100) is None
    assert read_sole_file(files, str(tmp_path), 4096, 8192) is None
    assert files.read_used(str(tmp_path / "0"), 7, 8192, is_whole=False) == b"\0\0\0\0\0ab"
    assert files.read_used(str(tmp_path / "0"), 100, 8192, is_whole=False) == b"\0\0\0\0\0abc"
    assert files.read_used(str(tmp_path / "0"), 100, 4096, is_whole=False) is None
    files.create(str(tmp_path / "1"), 8192)
    assert read_sole_file(files, str(tmp_path), 8192, 8192) is None
    for name in ("link", "pipe", "folder"):
        (tmp_path / name).mkdir()
    (tmp_path / "link" / "1").symlink_to(tmp_path / "0")
    (tmp_path / "folder" / "1").mkdir()
    os.mkfifo(tmp_path / "pipe" / "1")
    for name in ("link", "pipe", "folder"):
        assert read_sole_file(files, str(tmp_path / name), 8192, 8192) is None


def test_a_link_is_not_read_without_a_mapping(tmp_path: Path) -> None:
    """The link is reported by the opening that follows."""
    (tmp_path / "file").write_bytes(b"data")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert DiskFiles().read_used(str(tmp_path / "link"), 100) is None


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 128, 1000, 4096])
def test_zeros_at_the_end_go_and_no_others(size: int) -> None:
    for used in {0, min(1, size), size // 2, max(size - 1, 0), size}:
        data = bytes(max(used - 1, 0)) + b"x" * min(used, 1) + bytes(size - used)
        assert without_zeros(data) == data.rstrip(b"\0")


def test_a_temporary_folder_is_deleted_beside_late_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As at the end of a process that has not closed its broker."""
    folder = TemporaryFolder()
    late = [Path(folder.name) / "one", Path(folder.name) / "two"]

    def remove(path: str, **arguments: Any) -> None:
        if late:
            late.pop().write_bytes(b"x")
        rmdir(path, **arguments)

    rmdir = os.rmdir
    monkeypatch.setattr(os, "rmdir", remove)
    folder.delete()
    assert not os.path.exists(folder.name)


def test_a_temporary_folder_that_stays_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: str, **_: Any) -> None:
        raise PermissionError(13, "Permission denied", path)

    folder = TemporaryFolder()
    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", refuse)
        folder.delete()
    os.rmdir(folder.name)
    assert [line.getMessage() for line in caplog.records] == [
        f"{folder.name}: the temporary folder could not be deleted: [Errno 13] Permission denied: {folder.name!r}"
    ]


def test_what_root_keeps_for_itself_is_no_room(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(total=100, used=30, free=50))
    assert DiskFiles().used_ratio(str(tmp_path)) == 30 / 80
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(total=0, used=0, free=0))
    assert DiskFiles().used_ratio(str(tmp_path)) == 0


@pytest.mark.platform
@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
@pytest.mark.parametrize("what", ["pipe", "socket"])
def test_each_way_to_open_refuses_what_is_no_regular_file(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = str(tmp_path / "place")
    if what == "pipe":
        os.mkfifo(place)
    else:
        monkeypatch.chdir(tmp_path)  # the path can be too long for a socket
        with socket.socket(socket.AF_UNIX) as server:
            server.bind("place")
    files = DiskFiles()
    ways: list[Callable[[], object]] = [
        lambda: files.open(place), lambda: files.open(place, writable=True), lambda: files.read(place),
        lambda: files.read(place, 0, 1), lambda: files.read_used(place, 1), lambda: files.lock(place),
        lambda: files.overwrite(place, 0, b"x"), lambda: files.lock_holder(place),
    ]  # fmt: skip
    for way in ways:
        with pytest.raises(CorruptionError, match="expected a regular file"):
            way()
    assert read_sole_file(files, str(tmp_path), 0, 1) is None


as_root = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give files away")


@as_root
def test_a_refusal_names_the_user_whose_the_folder_is(tmp_path: Path) -> None:
    with MessageStore.open(tmp_path / "store"):
        pass
    tmp_path.chmod(0o700)
    os.seteuid(65534)
    try:
        with pytest.raises(StoreIOError, match=r"Permission denied: .* belongs to user root \(0\), .*65534") as raised:
            MessageStore.open(tmp_path / "store", read_only=True)
    finally:
        os.seteuid(0)
    assert raised.value.errno == errno.EACCES


@as_root
def test_what_root_makes_belongs_to_the_owner_of_the_folder(tmp_path: Path) -> None:
    os.chown(tmp_path, 12345, 12346)
    with Broker.open(tmp_path / "of user" / "store") as broker, Producer(broker, "p") as producer:
        producer.send("orders", b"x", delay=77)
    made = [tmp_path / "of user", *(tmp_path / "of user").rglob("*")]
    assert len(made) > 20
    assert {(path.stat().st_uid, path.stat().st_gid) for path in made} == {(12345, 12346)}


@as_root
def test_root_gives_nothing_away_that_the_owner_of_the_folder_has_linked_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret, folder, store = tmp_path / "secret", tmp_path / "of root", tmp_path / "store"
    secret.write_bytes(b"secret")
    folder.mkdir()
    store.mkdir()
    os.chown(store, 12345, 12346)
    os.link(secret, store / "lock")
    with MessageStore.open(store):
        pass
    make = os.mkdir

    def make_and_replace(name: str, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        make(name, mode, dir_fd=dir_fd)
        os.rmdir(name, dir_fd=dir_fd)
        os.symlink(folder, name, dir_fd=dir_fd)

    monkeypatch.setattr(os, "mkdir", make_and_replace)
    with pytest.raises(StoreIOError):
        DiskFiles().make_folder(str(store / "queues"))
    assert (secret.stat().st_uid, folder.stat().st_uid) == (0, 0)
