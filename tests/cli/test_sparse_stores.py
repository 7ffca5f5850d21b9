"""Commands that read take no room in a file system that keeps files in memory, whose holes a mapping would fill."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from librmq import Broker, Message, StoreConfig
from tests.budget import many
from tests.cli.stand import Shell

SIZE = 64 << 20


def blocks(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_blocks for path in folder.rglob("*") if path.is_file()}


def make_sparse(path: Path) -> None:
    """Write a file again without its blocks of zeros."""
    raw = path.read_bytes()
    copy = path.with_suffix(".new")
    with copy.open("wb") as file:
        for at in range(0, len(raw.rstrip(b"\0")), 4096):
            if any(raw[at : at + 4096]):
                file.seek(at)
                file.write(raw[at : at + 4096])
        file.truncate(len(raw))
    copy.rename(path)


@pytest.fixture(scope="module", params=["closed", "killed"])
def sparse(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a store whose log file is nearly all holes."""
    folder = tmp_path_factory.mktemp("sparse")
    if Path("/dev/shm").is_dir():  # other file systems give a hole that is read no room
        folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    path = folder / "store"
    with Broker.open(path, store_config=StoreConfig(commitlog_file_size=SIZE)) as broker:
        broker.create_topic("T", 2)
        broker.set_group("G")
        broker.reset_group("G", "T", "begin")
        for number in range(300):
            broker.store.append(Message("T", b"%d" % number, keys=f"k{number}"), number % 2)
    for file in (path / "commitlog").iterdir():
        make_sparse(file)
        if file.stat().st_blocks * 512 > SIZE // 2:
            pytest.skip("the file system has no holes")
    for kind in ("index", "consumequeue"):
        for file in (path / kind).rglob("[0-9]*"):
            if file.is_file():
                make_sparse(file)
    if request.param == "killed":
        (path / "abort").touch()
    yield path
    shutil.rmtree(folder)


READS = [
    "can-start", "count", "dead-letters", "diagnose --verify", "dump", "expiring", "export -o out.jsonl",
    "extract -o small", "groups", "lag", "pending", "progress", "query --topic T --key missing", "queue T 0", "queues",
    "recover --dry-run", "report --out r.html", "salvage --into saved", "show", "show --key k7", "snapshot copy",
    "stats", "story k7", "story missing", "tail --topic T", "timers", "topics", "traces", "verify",
]  # fmt: skip


@many
@pytest.mark.skipif(not hasattr(os, "SEEK_DATA"), reason="holes can't be found here")
@pytest.mark.parametrize("words", READS)
def test_a_read_fills_no_holes(sparse: Path, shell: Shell, words: str) -> None:
    before = blocks(sparse)
    command, *others = words.split()
    if command == "report":
        pytest.importorskip("jinja2")
    assert shell(command, sparse, *others).status == 0
    assert blocks(sparse) == before
