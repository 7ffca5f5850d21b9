"""Foreign content in a store's folder: unknown names, links, pipes, and files in place of folders."""

from __future__ import annotations

import errno
import os
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from librmq import Broker
from librmq.cli._main import main
from librmq.errors import CorruptionError, NotAStoreError, StoreError, StoreIOError
from librmq.files._disk import DiskFiles
from librmq.files._memory import MemoryFiles
from librmq.files.interface import FolderEntry
from librmq.message.message import Message
from librmq.store import MessageStore
from librmq.store.recovery._verify import verify
from tests.budget import many
from tests.stores import SMALL, filled, served


def refused(path: Path, *, is_readable: bool = False) -> str:
    """Check that opening raises an error of librmq and changes nothing; return the error's message."""
    before = sorted(str(entry) for entry in path.rglob("*") if entry.name != "lock") if path.is_dir() else []
    for more in ({}, {"thorough": True}, *([] if is_readable else [{"read_only": True}])):
        with pytest.raises(StoreError) as told:
            MessageStore.open(path, SMALL, **more)  # type: ignore[arg-type]
    assert str(path) in str(told.value)
    if path.is_dir():
        assert sorted(str(entry) for entry in path.rglob("*") if entry.name != "lock") == before
    with suppress(StoreError):
        assert not verify(str(path), SMALL).sound
    return str(told.value)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a sound store on disk."""
    path = tmp_path / "store"
    for name, data in filled(SMALL, 40, seed=8).items():
        if data is None:
            (path / name).mkdir(parents=True, exist_ok=True)
        else:
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes(data)
    return path


def test_folders_that_are_not_stores(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(NotAStoreError):
        MessageStore.open(tmp_path / "file")
    with pytest.raises(NotAStoreError):
        MessageStore.open(tmp_path / "none", read_only=True)
    assert not (tmp_path / "none").exists()
    (tmp_path / "half" / "consumequeue" / "T" / "0").mkdir(parents=True)
    with pytest.raises(NotAStoreError):
        MessageStore.open(tmp_path / "half")
    assert os.listdir(tmp_path / "half") == ["consumequeue"]
    for path in ("file", "none", "half"):
        with pytest.raises(NotAStoreError):
            verify(str(tmp_path / path))


FILES = "commitlog/x", "commitlog/00000000000000000001", "index/123"
FOLDERS = (
    "commitlog/folder",
    "index/1234",
    "consumequeue/TopicA/x",
    "consumequeue/TopicA/01",
    "consumequeue/TopicA/-1",
    "consumequeue/TopicA/2147483648",
    "consumequeue/" + "t" * 128,
    "consumequeue/TopicA/0/folder",
)
LINKS = (
    "commitlog/00000000000000999424",
    "index/20200101000000000",
    "consumequeue/T",
    "consumequeue/TopicA/9",
    "consumequeue/TopicA/0/00000000000000099840",
)


@pytest.mark.platform
@pytest.mark.skipif(os.name == "nt", reason="making a link needs a right")
def test_a_broken_link_hides_no_lack_of_a_log(tmp_path: Path) -> None:
    (tmp_path / "away").symlink_to("missing")
    with pytest.raises(NotAStoreError, match="no store: it has no folder commitlog"):
        MessageStore.open(tmp_path, read_only=True)
    (tmp_path / "commitlog").symlink_to("missing")
    with pytest.raises(CorruptionError, match="the target of this link is missing"):
        MessageStore.open(tmp_path, read_only=True)


@many
@pytest.mark.parametrize("name", [*FILES, *FOLDERS, *LINKS])
def test_foreign_files_in_a_store_are_refused(folder: Path, name: str) -> None:
    """Files and folders with wrong names, and dangling links."""
    path = folder / name
    if name in FILES:
        path.write_bytes(bytes(4096))
    elif name in FOLDERS:
        path.mkdir()
    else:
        path.symlink_to(folder / "nowhere")
    is_readable = name.startswith("commitlog/") and name not in LINKS
    assert name in refused(folder, is_readable=is_readable) or name in LINKS
    assert path.is_symlink() or name not in LINKS
    if is_readable:  # a reader passes over what is none of the log, and says so
        with MessageStore.open(folder, SMALL, read_only=True) as store:
            (damage,) = store.condition.damage
            assert (damage.file, damage.kind, len(list(store))) == (str(path), "name", 40)


@pytest.mark.parametrize(
    "name", ["README", "consumequeue/note.txt", "consumequeue/TopicA/note.txt", "index/note.txt", "config/x", "other/y"]
)
def test_harmless_files_are_left_alone(folder: Path, name: str) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(b"")
    assert verify(str(folder), SMALL).sound
    with MessageStore.open(folder, SMALL) as store:
        assert len(served(store)) == 40
    with MessageStore.open(folder, SMALL, thorough=True) as store:
        assert store.recovered == []
    assert (folder / name).read_bytes() == b""


@pytest.mark.platform
@pytest.mark.skipif(sys.platform == "win32", reason="names are no bytes")
def test_names_that_are_not_strings(folder: Path) -> None:
    os.mkdir(os.fsencode(folder) + b"/consumequeue/\xff\xfe")
    refused(folder)
    assert not verify(str(folder), SMALL).sound


PARTS = ("commitlog", "consumequeue", "index", "consumequeue/TopicA", "consumequeue/TopicA/0")


def linked(folder: Path, part: str, target: Path) -> Path:
    """Let a part of a store be a link to what it was."""
    (folder / part).rename(target)
    (folder / part).symlink_to(target)
    return target


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.platform
@pytest.mark.skipif(os.name == "nt", reason="making a link needs a right")
@pytest.mark.parametrize("part", PARTS)
def test_parts_may_be_links_where_the_caller_allows_it(folder: Path, part: str, tmp_path: Path) -> None:
    linked(folder, part, tmp_path / "elsewhere")
    with MessageStore.open(folder, SMALL, files=DiskFiles(follow_links=True)) as store:
        assert store.recovered == []
        assert len(served(store)) == 40
        store.append(Message("TopicA", b"more"))
    assert verify(str(folder), SMALL).sound


def _append(folder: Path) -> None:
    with MessageStore.open(folder, SMALL) as store:
        for number in range(200):
            store.append(Message("TopicA", b"%d" % number * 100, keys=["k"]))


def _recover(folder: Path) -> None:
    with MessageStore.open(folder, SMALL, thorough=True) as store:
        store.append(Message("TopicA", b"more", keys=["k"]))


def _open_broker(folder: Path) -> None:
    with Broker.open(folder) as broker:
        broker.create_topic("TopicB")


def _commit_job(folder: Path) -> None:
    pytest.importorskip("pyspark")
    from librmq.spark._write import commit

    commit(str(folder), "job", [], str(folder), ordered=False, keep_note=True)


WRITERS: dict[str, Callable[[Path], object]] = {
    "append": _append,
    "recover": _recover,
    "broker": _open_broker,
    "command": lambda folder: run_refused("topic", "create", str(folder), "TopicB"),
    "import": lambda folder: run_refused("import", str(folder), "missing.jsonl"),
    "reset": lambda folder: run_refused("reset", str(folder), "--group", "g", "--topic", "TopicA", "--to", "end"),
    "skip": lambda folder: run_refused("skip", str(folder), "--group", "g", "--topic", "TopicA"),
    "settings": lambda folder: run_refused("settings", str(folder), "--set", "durability=sync"),
    "recover command": lambda folder: run_refused("recover", str(folder)),
    "job": _commit_job,
}


def run_refused(*words: str) -> None:
    status = main(list(words))
    if status:
        raise CorruptionError("command", 0, "name", f"a symbolic link: status {status}")


@many
@pytest.mark.platform
@pytest.mark.skipif(os.name == "nt", reason="making a link needs a right")
@pytest.mark.parametrize("part", ["commitlog", "consumequeue", "index", "config", "librmq"])
@pytest.mark.parametrize("writer", WRITERS)
def test_no_writer_follows_a_link_out_of_the_store(folder: Path, part: str, writer: str, tmp_path: Path) -> None:
    with Broker.open(folder) as broker:
        broker.create_topic("TopicA")
    target = linked(folder, part, tmp_path / "elsewhere")
    before, inside = contents(target), contents(folder)
    with pytest.raises(CorruptionError, match="a symbolic link"):
        WRITERS[writer](folder)
    assert contents(target) == before
    assert contents(folder) == inside, "refused before a byte is written"


DEEP = (
    "consumequeue/TopicA",
    "consumequeue/TopicA/0",
    "consumequeue/TopicA/0/00000000000000000000",
    "commitlog/00000000000000000000",
    "config/topics.json",
    "librmq/share",
    "librmq/spark",
    "librmq/salvage",
)


@many
@pytest.mark.platform
@pytest.mark.skipif(os.name == "nt", reason="making a link needs a right")
@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("part", DEEP)
def test_a_link_deep_in_the_store_is_refused_before_any_write(
    folder: Path, part: str, writer: str, tmp_path: Path
) -> None:
    with Broker.open(folder) as broker:
        broker.create_topic("TopicA")
    if not (folder / part).exists():
        (folder / part).mkdir(parents=True)
    target = linked(folder, part, tmp_path / "elsewhere")
    before, inside = target.read_bytes() if target.is_file() else contents(target), contents(folder)
    with pytest.raises(CorruptionError, match="a symbolic link"):
        WRITERS[writer](folder)
    assert (target.read_bytes() if target.is_file() else contents(target)) == before
    assert contents(folder) == inside, "refused before a byte is written"


@pytest.mark.platform
@pytest.mark.skipif(os.name == "nt", reason="making a link needs a right")
@pytest.mark.parametrize("part", ["", "librmq", "commitlog"])
@pytest.mark.parametrize(
    "words",
    [
        ("snapshot", "{}", "{}"),
        ("restore", "{}", "{}"),
        ("salvage", "{}", "--into", "{}"),
        ("extract", "{}", "-o", "{}"),
    ],
)
def test_a_new_store_is_not_made_behind_a_link(folder: Path, words: tuple[str, ...], part: str, tmp_path: Path) -> None:
    outside, target = tmp_path / "elsewhere", tmp_path / "new"
    outside.mkdir()
    (target / part).parent.mkdir(exist_ok=True)
    (target / part).symlink_to(outside)
    paths = iter((str(folder), str(target)))
    status = main([next(paths) if word == "{}" else word for word in words])
    assert list(outside.iterdir()) == []
    assert (status == 0) == (not part), "a link to an empty folder is replaced by the new store"
    assert target.is_symlink() is False


@pytest.mark.platform
@pytest.mark.skipif(os.name == "nt", reason="making a link needs a right")
def test_links_below_librmqs_own_folder_are_never_followed(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (folder / "librmq").mkdir(exist_ok=True)
    files = DiskFiles(follow_links=True)
    with MessageStore.open(folder, SMALL, files=files):
        (folder / "librmq" / "spark").symlink_to(tmp_path / "elsewhere")
        for write in (
            files.make_folder,
            lambda path: files.write(f"{path}/x", b""),
            lambda path: files.create(path + "/y", 1),
        ):
            with pytest.raises(CorruptionError, match="follows none below its own folder"):
                write(str(folder / "librmq" / "spark"))
    before = contents(folder)
    with pytest.raises(CorruptionError, match="follows none below its own folder"):
        MessageStore.open(folder, SMALL, files=files)
    assert contents(folder) == before
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.platform
@pytest.mark.skipif(os.name == "nt", reason="making a link needs a right")
def test_a_store_that_is_a_link_is_written(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder)
    _append(tmp_path / "link")
    assert verify(str(folder), SMALL).sound


def test_a_store_made_while_its_folder_is_looked_at() -> None:
    """Several processes open a new store at once: one lists it before the log is there, and again after."""

    class Late(MemoryFiles):
        """Files that another process makes after the first look."""

        def __init__(self, made_after: int) -> None:
            super().__init__()
            self.looks, self.made_after = 0, made_after

        def list(self, path: str) -> list[FolderEntry]:
            entries = super().list(path)
            if path == "/store":
                self.looks += 1
                if self.looks == self.made_after:
                    for name in ("commitlog", "consumequeue/TopicA/0"):
                        self.make_folder(f"/store/{name}")
            return entries

    for made_after in (1, 2):
        files = Late(made_after)
        files.make_folder("/store")
        with MessageStore.open("/store", SMALL, files=files) as store:
            store.append(Message("TopicA", b"first"))


@pytest.mark.parametrize(
    "place",
    ["commitlog/00000000000000000000", "consumequeue/TopicA/0/00000000000000000000", "checkpoint", "lock", "index"],
)
def test_a_folder_or_file_in_place_of_the_other(folder: Path, place: str) -> None:
    path = folder / place
    if path.is_dir():
        path.rename(folder / "old")
        path.write_bytes(b"x")
    else:
        path.unlink(missing_ok=True)
        path.mkdir()
    with pytest.raises(StoreError, match=place.split("/")[0]):
        MessageStore.open(folder, SMALL)
    with pytest.raises(StoreError, match=place.split("/")[0]):
        MessageStore.open(folder, SMALL, thorough=True)
    with suppress(StoreError):
        assert place == "lock" or not verify(str(folder), SMALL).sound
    assert path.exists()


@many
@pytest.mark.platform
@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
@pytest.mark.parametrize(
    "place",
    [
        "commitlog/00000000000000999424", "index/20200101000000000", "lock", "checkpoint", "abort",
        "config/topics.json", "librmq/closed.json", "librmq/config.json",
    ],
)  # fmt: skip
@pytest.mark.parametrize("what", ["pipe", "socket"])
def test_a_pipe_or_a_socket_does_not_hang(folder: Path, place: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / place).unlink(missing_ok=True)
    (folder / place).parent.mkdir(exist_ok=True)
    if what == "pipe":
        os.mkfifo(folder / place)
    else:
        monkeypatch.chdir((folder / place).parent)  # the path can be too long for one
        with socket.socket(socket.AF_UNIX) as server:
            server.bind((folder / place).name)
    with suppress(StoreError):
        Broker.open(folder, store_config=SMALL).close()
    with suppress(StoreError):
        verify(str(folder), SMALL)
    with suppress(StoreError):
        MessageStore.open(folder, SMALL, read_only=True).close()


@pytest.mark.platform
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="everything is readable to root")
@pytest.mark.parametrize("place", ["commitlog", "commitlog/00000000000000000000", "consumequeue/TopicA/0", "index"])
def test_unreadable_files_are_reported(folder: Path, place: str) -> None:
    (folder / place).chmod(0)
    try:
        with pytest.raises(StoreIOError) as told, MessageStore.open(folder, SMALL) as store:
            list(store)
        assert told.value.errno == errno.EACCES
    finally:
        (folder / place).chmod(0o755)
