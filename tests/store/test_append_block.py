"""A large block written around the mapping reads back the same as one written by `copy_in`."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from librmq.commitlog import CommitLog
from librmq.errors import StoreIOError
from librmq.files._disk import DiskFiles
from librmq.files._memory import MemoryFiles
from librmq.files.interface import Files
from librmq.message import record
from tests.file_seams import FailingFiles, RecordingFiles

SIZE = 1 << 16


def records(count: int, first: int = 0) -> bytes:
    return b"".join(
        record.encode_record(record.Record(topic="T", body=b"%06d" % n)) for n in range(first, first + count)
    )


@pytest.mark.parametrize("files", [DiskFiles(), MemoryFiles()], ids=["disk", "memory"])
def test_the_buffer_shows_written_data(files: Files, tmp_path: Path) -> None:
    files_path = str(tmp_path / "f") if isinstance(files, DiskFiles) else "/f"
    for keep_descriptor in (False, True):
        path = f"{files_path}{keep_descriptor}"
        file = files.create(path, SIZE, keep_descriptor=keep_descriptor)
        file.buffer[0:4] = b"here"
        data = bytearray(range(256)) * 100
        files.overwrite(file, 4099, data)
        assert file.buffer[4099 : 4099 + len(data)] == data
        file.buffer[4100:4102] = b"xy"
        files.overwrite(file, 9000, b"z")
        for at in (-1, SIZE - 1):
            with pytest.raises((ValueError, IndexError)):
                files.overwrite(file, at, b"no")
        files.flush(file)
        expected = bytearray(SIZE)
        expected[0:4], expected[4099 : 4099 + len(data)], expected[4100:4102], expected[9000:9001] = (
            b"here", data, b"xy", b"z",
        )  # fmt: skip
        assert bytes(files.open(path).buffer) == expected


def test_a_log_of_blocks_is_that_of_records(tmp_path: Path) -> None:
    with CommitLog.open(tmp_path / "blocks", SIZE) as log, CommitLog.open(tmp_path / "plain", SIZE) as plain:
        for count in (1, 500, 300, 3, 400):
            data = records(count)
            places = {one.claim(len(data)) for one in (log, plain)}
            assert len(places) == 1
            log.append_block(data)
            plain.make_room(len(data))
            plain.copy_in(data, len(data))
            assert (log.end, log.last_write) == (plain.end, plain.last_write)
        assert log.end > SIZE  # the block continued in another file
        log.flush()
        plain.flush()
    files = {path.name: path.read_bytes() for path in (tmp_path / "plain").iterdir()}
    assert {path.name: path.read_bytes() for path in (tmp_path / "blocks").iterdir()} == files


def test_a_block_that_can_not_be_written_is_not_there() -> None:
    files = FailingFiles(MemoryFiles())
    with CommitLog.open("/log", SIZE, files=files) as log:
        log.append_block(records(3))
        end = log.end
        files.fail("overwrite", code=errno.EIO)
        with pytest.raises(StoreIOError):
            log.append_block(records(3))
        assert log.end == end
        log.append_block(records(3))
        assert log.end == 2 * end


def test_a_block_is_flushed_with_its_file() -> None:
    files = RecordingFiles()
    with CommitLog.open("/log", SIZE, files=files) as log:
        log.append_block(records(3))
        log.flush()
        files.trace.clear()
        log.append_block(records(3))
        log.flush()
        assert [event.call for event in files.trace if event.call != "write"] == ["flush"]
