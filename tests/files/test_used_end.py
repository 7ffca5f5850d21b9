"""Finding the end of a file's bytes that are not zero."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import pytest

from librmq.files.disk import DiskFiles
from librmq.files.interface import Files, used_end, without_zeros
from librmq.files.memory import MemoryFiles, OverlayFiles

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
    assert used_end(files, file, 0, SIZE) == 0
    written = []
    for _ in range(40):
        at = rng.choice([0, SIZE - 1, 1 << 16, (1 << 16) - 1, rng.randrange(SIZE)])
        files.reserve(file, at, at + 1)
        file.buffer[at : at + 1] = b"x"
        written.append(at)
        begin = rng.randrange(SIZE)
        end = rng.randrange(begin, SIZE + 1)
        wanted = max((at + 1 for at in written if begin <= at < end), default=begin)
        assert used_end(files, file, begin, end) == wanted
        assert wanted <= max(begin, files.data_end(file, begin)) <= SIZE


def test_blocks_that_are_only_reserved_hold_no_data(tmp_path: Path) -> None:
    files = DiskFiles()
    file = files.create(str(tmp_path / "file"), SIZE)
    file.buffer[10:11] = b"x"
    files.reserve(file, 0, SIZE)
    files.flush(file)
    assert used_end(files, file, 0, SIZE) == 11


def test_a_disk_is_flushed_at_once_or_that_is_refused(tmp_path: Path) -> None:
    assert DiskFiles().flush_all(str(tmp_path)) in (True, False)
    assert DiskFiles().flush_all(str(tmp_path / "nothing")) is False


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
    assert files.read_sole_file(str(tmp_path), 8192, 100) is None
    file = files.create(str(tmp_path / "0"), 8192)
    file.buffer[4:8] = b"\0abc"
    assert files.read_sole_file(str(tmp_path), 8192, 8192) == ("0", b"\0\0\0\0\0abc")
    assert files.read_sole_file(str(tmp_path), 8192, 100) is None
    assert files.read_sole_file(str(tmp_path), 4096, 8192) is None
    files.create(str(tmp_path / "1"), 8192)
    assert files.read_sole_file(str(tmp_path), 8192, 8192) is None
    for name in ("link", "pipe", "folder"):
        (tmp_path / name).mkdir()
    (tmp_path / "link" / "1").symlink_to(tmp_path / "0")
    (tmp_path / "folder" / "1").mkdir()
    os.mkfifo(tmp_path / "pipe" / "1")
    for name in ("link", "pipe", "folder"):
        assert files.read_sole_file(str(tmp_path / name), 8192, 8192) is None


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
