"""The calls that real files make to the operating system, in order: what reaches the device, and when."""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from librmq.broker import Broker
from librmq.client import Producer
from librmq.config import StoreConfig
from librmq.files._disk import DiskFiles, _on_pages
from librmq.files.interface import break_links, copy_file, make_folders
from librmq.message import Message
from librmq.protocol import SendStatus
from librmq.runtime import ManualRunner
from librmq.store import MessageStore

pytestmark = [pytest.mark.platform, pytest.mark.skipif(not hasattr(os, "fdatasync"), reason="needs fdatasync")]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record flushes and renames with the names of their files, and the sizes at each flush."""
    found: list[str] = []

    def noted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **fields: Any) -> Any:
            if "follow_symlinks" in fields:  # a new file gets its name
                return real(*arguments, **fields)
            if isinstance(arguments[0], int):
                path = Path(os.readlink(f"/proc/self/fd/{arguments[0]}"))
                size = "" if path.is_dir() else f" of {os.fstat(arguments[0]).st_size}"
                found.append(f"{name} {path.name}{size}")
            else:
                found.append(f"{name} {' '.join(os.path.basename(one) for one in arguments)}")
            return real(*arguments, **fields)

        return call

    for name in ("fsync", "fdatasync", "replace", "link"):
        monkeypatch.setattr(os, name, noted(name, getattr(os, name)))

    def on_pages(name: str) -> Callable[[Any, int, int, int], None]:
        def call(mapping: Any, begin: int, size: int, option: int) -> None:
            if name == "msync":
                found.append(f"msync {size} from {begin}")
            real(mapping, begin, size, option)

        real = _on_pages(name)
        return call

    monkeypatch.setattr("librmq.files._disk._on_pages", on_pages)
    return found


@pytest.mark.parametrize("keep_descriptor", [False, True])
def test_flush(tmp_path: Path, calls: list[str], keep_descriptor: bool) -> None:
    files = DiskFiles()
    file = files.create(str(tmp_path / "f"), 100, keep_descriptor=keep_descriptor)
    assert calls == []
    files.flush(file)
    assert calls == ["fdatasync f of 100"]
    files.flush_folder(str(tmp_path))
    assert calls[1:] == [f"fsync {tmp_path.name}"]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a part is flushed with its file")
def test_a_part_is_flushed(tmp_path: Path, calls: list[str]) -> None:
    """The system takes whole pages."""
    files = DiskFiles()
    file = files.create(str(tmp_path / "f"), 4 * mmap.PAGESIZE)
    file.buffer[: len(file.buffer)] = bytes([7]) * len(file.buffer)
    files.flush(file, mmap.PAGESIZE + 1, 2 * mmap.PAGESIZE + 3)
    assert calls == [f"msync {mmap.PAGESIZE + 3} from {mmap.PAGESIZE}"]


def test_a_small_file_is_replaced_once_the_new_is_durable(tmp_path: Path, calls: list[str]) -> None:
    DiskFiles().write(str(tmp_path / "f"), b"12345")
    assert calls == ["fsync f.tmp of 5", "replace f.tmp f", f"fsync {tmp_path.name}"]


def test_folders_get_their_names(tmp_path: Path, calls: list[str]) -> None:
    files = DiskFiles()
    make_folders(files, str(tmp_path / "a" / "b" / "c"))
    assert calls == ["fsync b", "fsync a", f"fsync {tmp_path.name}"]
    make_folders(files, str(tmp_path / "a" / "b" / "c"))
    assert calls[3:] == ["fsync b"]


def test_a_copy_is_flushed(tmp_path: Path, calls: list[str]) -> None:
    files = DiskFiles()
    file = files.create(str(tmp_path / "f"), 100)
    file.buffer[:5] = b"12345"
    copy_file(files, file, str(tmp_path / "g"), end=10)
    assert calls == ["fdatasync g of 10"]


def test_a_linked_file_is_replaced_by_a_durable_copy(tmp_path: Path, calls: list[str]) -> None:
    files = DiskFiles()
    folder = tmp_path / "folder"
    folder.mkdir()
    path, other = folder / "f", folder / "g"
    path.write_bytes(b"12345")
    assert not break_links(files, str(path))
    assert calls == []
    files.link(str(path), str(other))
    assert break_links(files, str(path))
    assert calls == ["link f g", "fsync f.tmp of 5", "replace f.tmp f", "fsync folder"]
    assert path.read_bytes() == other.read_bytes() == b"12345"


def test_what_is_deleted_on_closing_waits_for_no_device(calls: list[str]) -> None:
    """A temporary broker or store flushes nothing, also where each send says when it is on the device."""
    config = StoreConfig.tiny(durability="sync")
    with Broker.temporary(runner=ManualRunner(), store_config=config) as broker, Producer(broker, "p") as producer:
        assert producer.send("T", b"1").status is SendStatus.SEND_OK
        broker.store.flush()
    with MessageStore.temporary(config) as store:
        store.append(Message("T", b"1"))
        assert store.flush() == store.log.end
    assert calls
    assert [call for call in calls if call.startswith(("fsync", "fdatasync", "msync"))] == []
