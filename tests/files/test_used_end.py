"""Where the bytes of a file end that are not zero."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from librmq.files.disk import DiskFiles
from librmq.files.memory import MemoryFiles
from librmq.files.seam import Files, used_end

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
