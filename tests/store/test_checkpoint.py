"""The bytes of the checkpoint, and the abort marker."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from librmq.errors import CorruptionError, ReadOnlyError
from librmq.files._disk import DiskFiles
from librmq.files._memory import MemoryFiles
from librmq.files.interface import Files, file_size
from librmq.store.format._checkpoint import CHECKPOINT_SIZE, Checkpoint
from librmq.store.format.directory import clear_abort, has_abort, set_abort
from tests.reference import existing, rows, store_folders


@pytest.fixture(params=["disk", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Files, str]:
    """Return a file system with some files and an empty folder."""
    files: Files = DiskFiles() if request.param == "disk" else MemoryFiles()
    root = str(tmp_path)
    files.make_folder(root)
    return files, root


def test_times_are_read_back(place: tuple[Files, str]) -> None:
    files, root = place
    path = os.path.join(root, "checkpoint")
    checkpoint = Checkpoint.open(path, files=files, writable=True)
    assert (checkpoint.physic_timestamp_ms, checkpoint.logics_timestamp_ms, checkpoint.index_timestamp_ms) == (0, 0, 0)
    assert file_size(files, path) is None
    checkpoint.physic_timestamp_ms = 1_700_000_000_001
    checkpoint.logics_timestamp_ms = 1_700_000_000_002
    checkpoint.index_timestamp_ms = 1_700_000_000_003
    checkpoint.flush()
    expected = struct.pack(">qqq", 1_700_000_000_001, 1_700_000_000_002, 1_700_000_000_003)
    assert files.read(path) == expected.ljust(CHECKPOINT_SIZE, b"\0")
    again = Checkpoint.open(path, files=files)
    assert again.physic_timestamp_ms == 1_700_000_000_001
    assert again.logics_timestamp_ms == 1_700_000_000_002
    assert again.index_timestamp_ms == 1_700_000_000_003


def test_fields_of_later_versions_are_kept(place: tuple[Files, str]) -> None:
    files, root = place
    path = os.path.join(root, "checkpoint")
    files.write(path, struct.pack(">qqqqq", 1, 2, 3, 4, 5).ljust(CHECKPOINT_SIZE, b"\0"))
    checkpoint = Checkpoint.open(path, files=files, writable=True)
    checkpoint.physic_timestamp_ms = 9
    checkpoint.flush()
    assert struct.unpack_from(">qqqqq", files.read(path)) == (9, 2, 3, 4, 5)


@pytest.mark.parametrize(
    ("times", "covered"), [((10_000, 12_000, 20_000), 7_000), ((12_000, 10_000, 5_000), 7_000), ((2_999, 10_000, 0), 0)]
)
def test_how_far_back_recovery_starts(place: tuple[Files, str], times: tuple[int, int, int], covered: int) -> None:
    files, root = place
    path = os.path.join(root, "checkpoint")
    files.write(path, struct.pack(">qqq", *times).ljust(CHECKPOINT_SIZE, b"\0"))
    assert Checkpoint.open(path, files=files).min_timestamp_ms == covered


@pytest.mark.parametrize("size", [0, 1, 24, CHECKPOINT_SIZE - 1, CHECKPOINT_SIZE + 1])
def test_another_length_is_damage(place: tuple[Files, str], size: int) -> None:
    files, root = place
    path = os.path.join(root, "checkpoint")
    files.write(path, bytes(size))
    with pytest.raises(CorruptionError) as caught:
        Checkpoint.open(path, files=files)
    assert (caught.value.file, caught.value.kind) == (path, "size")
    assert caught.value.offset == min(size, CHECKPOINT_SIZE)


@pytest.mark.parametrize("place_of_field", [0, 1, 2])
def test_a_time_before_1970_is_damage(place: tuple[Files, str], place_of_field: int) -> None:
    files, root = place
    path = os.path.join(root, "checkpoint")
    times = [1, 1, 1]
    times[place_of_field] = -1
    files.write(path, struct.pack(">qqq", *times).ljust(CHECKPOINT_SIZE, b"\0"))
    with pytest.raises(CorruptionError) as caught:
        Checkpoint.open(path, files=files)
    assert (caught.value.offset, caught.value.kind) == (8 * place_of_field, "header")


def test_only_a_writer_can_flush(place: tuple[Files, str]) -> None:
    files, root = place
    path = os.path.join(root, "checkpoint")
    checkpoint = Checkpoint.open(path, files=files)
    with pytest.raises(ReadOnlyError):
        checkpoint.flush()
    assert file_size(files, path) is None
    writer = Checkpoint.open(path, files=files, writable=True)
    writer.close()
    with pytest.raises(ReadOnlyError):
        writer.flush()


def test_abort_marker(place: tuple[Files, str]) -> None:
    files, root = place
    assert not has_abort(files, root)
    set_abort(files, root)
    set_abort(files, root)
    assert has_abort(files, root)
    assert [(entry.name, entry.size) for entry in files.list(root)] == [("abort", 0)]
    clear_abort(files, root)
    clear_abort(files, root)
    assert not has_abort(files, root)


@pytest.mark.parametrize("folder", store_folders())
def test_as_rocketmq_reads_it(folder: Path) -> None:
    """If no recovery runs, the values in memory agree with the file."""
    (config,) = rows(folder, "config")
    if config["abort_file_present"]:
        assert has_abort(DiskFiles(), str(folder / "store"))
        return
    loaded = rows(folder, "store")[0]
    checkpoint = Checkpoint.open(str(existing(folder.name, "store", "checkpoint")), files=DiskFiles())
    assert checkpoint.physic_timestamp_ms == loaded["checkpoint_physic_ts"]
    assert checkpoint.logics_timestamp_ms == loaded["checkpoint_logics_ts"]
    assert checkpoint.index_timestamp_ms == loaded["checkpoint_index_ts"]
