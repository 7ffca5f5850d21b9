"""Ctrl-C, sent as a real signal at each call, while the next file of a sequence is created."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from librmq.files.disk import DiskFiles
from librmq.files.rolling import MappedFileQueue, MappingPool
from tests.interrupting import interrupted_at_call


def test_a_file_of_an_interrupted_creation_is_recreated(tmp_path: Path) -> None:
    number, came = 0, True
    while came:
        pool = MappingPool(4)
        files = MappedFileQueue(str(tmp_path / f"{number}"), 4096, DiskFiles(), pool, durable=bool(number % 2))
        files.create(0)
        came = interrupted_at_call(number, partial(files.create, 4096))
        if 4096 not in files.starts:
            files.create(4096)
        assert files.starts == [0, 4096]
        files.file(4096).buffer[:4] = b"here"
        files.flush()
        again = MappedFileQueue(files.folder, 4096, DiskFiles(), pool)
        assert again.starts == [0, 4096]
        assert again.file(4096).buffer[:4] == b"here"
        number += 1
    assert number >= 5
