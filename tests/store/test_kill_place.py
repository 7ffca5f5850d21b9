"""After a kill, recovery begins where the last flush had completed log, queues and index, while the machine is up."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from librmq import Message, MessageStore, StoreConfig
from librmq.commitlog import CommitLog
from librmq.files.disk import DiskFiles
from librmq.store.format.checkpoint import read_last_flush
from librmq.store.recovery.verify import verify
from tests.conftest import SlowBudget
from tests.programs import start_program

PROGRAM = """
    import sys, librmq
    store = librmq.MessageStore.open(sys.argv[1], librmq.StoreConfig(**eval(sys.argv[2])))
    first, chance = store.queue_range("orders", 0)[1], __import__("random").Random(sys.argv[3])
    for number in range(first, 1 << 30):
        store.append(librmq.Message("orders", bytes(chance.randrange(3000)), keys=f"k{number}"), 0)
        store.append(librmq.Message(f"t{chance.randrange(5)}", b"x"), chance.randrange(3))
        if chance.random() < 0.02:
            store.flush()
        print(number, flush=True)
"""
SIZES: Any = {"commitlog_file_size": 1 << 20, "max_hash_slot_num": 100, "max_index_num": 400}


def grow_until_killed(path: Path, messages: int, seed: str) -> int:
    """Let a process write, and kill it; return the number of the last message that it had acknowledged."""
    with start_program(PROGRAM, path, repr(SIZES), seed) as writer:
        assert writer.stdout is not None
        last = -1
        for _ in range(messages):
            last = int(writer.stdout.readline())
        writer.kill()
        rest = writer.stdout.read().splitlines(True)
        return int(rest[-1]) if rest and rest[-1].endswith("\n") else int(rest[-2]) if len(rest) > 1 else last


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Where walks over a log begin."""
    begins: list[int] = []
    walk = CommitLog.walk

    def note(log: CommitLog, begin: int, *arguments: object) -> object:
        begins.append(begin)
        return walk(log, begin, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(CommitLog, "walk", note)
    return begins


def kill_again_and_again(path: Path, walks: list[int], rounds: Iterable[int]) -> None:
    chance = random.Random(7)
    for number in rounds:
        last = grow_until_killed(path, chance.randrange(1, 300), str(number))
        settled = read_last_flush(str(path), DiskFiles())
        walks.clear()
        with MessageStore.open(path, StoreConfig(**SIZES)) as store:
            if settled is not None:
                assert walks[0] >= settled.last_record
            end = store.queue_range("orders", 0)[1]
            assert last < end <= last + 2, "lost, or invented"
            for one in {0, last, end - 1, *(chance.randrange(end) for _ in range(20))}:
                (message,) = store.find_by_key("orders", f"k{one}")
                assert message.queue_offset == one
        assert verify(str(path), StoreConfig(**SIZES), DiskFiles()).damage == ()


def test_kills_lose_nothing(tmp_path: Path, walks: list[int]) -> None:
    kill_again_and_again(tmp_path / "store", walks, range(3))


@pytest.mark.slow
def test_many_kills_lose_nothing(tmp_path: Path, walks: list[int], slow_budget: SlowBudget) -> None:
    kill_again_and_again(tmp_path / "store", walks, slow_budget.rounds(200, "kills of writers", at_least=3))


def copied(path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return Path(shutil.copytree(path, path.with_name("copy")))


def restarted(path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    identity = DiskFiles.identity
    monkeypatch.setattr(DiskFiles, "identity", lambda files, path: f"another boot {identity(files, path)}")
    return path


def rewritten(path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The log was cut before the place, and has other records now."""
    settled = read_last_flush(str(path), DiskFiles())
    assert settled is not None
    with open(path / "commitlog" / f"{0:020}", "r+b") as log:
        log.seek(settled.last_record)
        log.write(bytes(settled.log_end - settled.last_record))
    return path


def torn(path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (path / "librmq" / "flushed.json").write_bytes(b'{"version": 1, "machine"')
    return path


@pytest.mark.parametrize("change", [copied, restarted, rewritten, torn])
def test_the_place_counts_here_only(
    tmp_path: Path, walks: list[int], monkeypatch: pytest.MonkeyPatch, change: Callable[..., Path]
) -> None:
    program = """
        import os, sys, librmq
        store = librmq.MessageStore.open(sys.argv[1])
        for number in range(10):
            store.append(librmq.Message("orders", b"%d" % number, keys=f"k{number}"))
        store.flush()
        os._exit(9)
    """
    with start_program(program, tmp_path / "store") as writer:
        writer.communicate()
    path = change(tmp_path / "store", monkeypatch)
    with MessageStore.open(path) as store:
        assert walks[0] == 0
        count = 9 if change is rewritten else 10
        assert [message.body for message in store] == [b"%d" % number for number in range(count)]
        store.append(Message("orders", b"next"))
