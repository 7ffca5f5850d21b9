"""Cost of waiting for the disk: sync appends, group commit, pipelined appends."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks import peers
from benchmarks.frame import SIZES, Case, Target, Timed, main
from benchmarks.peers import Load, make_load
from librmq.config import StoreConfig
from librmq.files._memory import MemoryFiles
from librmq.files.interface import File
from librmq.message.message import Message
from librmq.store import MessageStore

SYNC: Final = StoreConfig(durability="sync")
PRODUCERS: Final = 32
FLUSH_S: Final = 0.001
"""Seconds of a flush on the simulated disk."""


# ------------------------------------------------------------------------------------------------------------ producers


def append_sync(load: Load, folder: Path) -> Timed:
    """Append each message, which is on the device before the next."""
    with MessageStore.open(folder / "store", SYNC) as store:
        store.append(load.messages[0])  # creates the first files
        yield
        for message in load.messages:
            store.append(message)
        yield len(load.messages)


def append_by_many(store: MessageStore, messages: Sequence[Message]) -> Timed:
    """Append in threads that share the messages, each with its own queue."""
    store.append(messages[0])
    begin, threads = threading.Barrier(PRODUCERS + 1), []

    def produce(number: int) -> None:
        share = messages[number::PRODUCERS]
        begin.wait()
        for message in share:
            store.append(message, number)

    for number in range(PRODUCERS):
        threads.append(threading.Thread(target=produce, args=(number,)))
        threads[-1].start()
    begin.wait()
    yield
    for thread in threads:
        thread.join()
    yield len(messages)


def group_commit(load: Load, folder: Path) -> Timed:
    """Append in many threads, on this disk."""
    with MessageStore.open(folder / "store", SYNC) as store:
        yield from append_by_many(store, load.messages)


class SlowFiles(MemoryFiles):
    """Files in memory whose flushes of the log take as long as on a disk, with a count of them."""

    def __init__(self) -> None:
        super().__init__()
        self.flushes = 0

    def flush(self, file: File, begin: int = 0, end: int | None = None) -> None:
        if "commitlog" in file.path:
            self.flushes += 1
            time.sleep(FLUSH_S)


def messages_a_flush(load: Load, _: Path) -> float:
    """Append in many threads, on the simulated disk; return the messages that share a flush."""
    files, config = SlowFiles(), StoreConfig(durability="sync", commitlog_file_size=64 << 20)
    with MessageStore.open("/store", config, files=files) as store:
        for _step in append_by_many(store, load.messages):
            pass
        return len(load.messages) / files.flushes


def append_pipelined(load: Load, folder: Path, *, window: int) -> Timed:
    """Append until all are acknowledged, with at most ``window`` open at a time."""
    with MessageStore.open(folder / "store", SYNC) as store:
        store.append(load.messages[0])
        submit, pending = store.submit, deque[Callable[[], object]]()
        yield
        for message in load.messages:
            pending.append(submit(message).wait)
            if len(pending) >= window:
                pending.popleft()()
        while pending:
            pending.popleft()()
        yield len(load.messages)


def cases() -> Iterator[Case]:
    name = "sync append"
    for detail, size in SIZES.items():
        setup = partial(make_load, body_size=size, count=2_000)
        sqlite, lmdb = partial(peers.sqlite, synchronous="FULL"), partial(peers.lmdb, sync=True)
        yield Case(name, append_sync, detail, peers.raw_flushed, "raw pwrite and fdatasync", Target(0.75, 0.9),
                   setup=setup, limit=True)  # fmt: skip
        yield Case(name, append_sync, detail, sqlite, "SQLite, synchronous FULL", Target(1.0, 1.2), setup=setup)
        yield Case(name, append_sync, detail, lmdb, "LMDB, synced", Target(1.5, 2), setup=setup, needs=("lmdb",))
    grouped, flushes = partial(make_load, body_size=128, count=16_000), partial(peers.raw_flushed, most=500)
    detail, against = f"{PRODUCERS} producers", "flushes of the disk"
    yield Case(name, group_commit, detail, flushes, against, Target(2), setup=grouped, limit=True)
    yield Case(f"{name}, flush of 1 ms simulated", messages_a_flush, detail, target=Target(reach=PRODUCERS / 2),
               unit="messages a flush", setup=grouped)  # fmt: skip
    setup = partial(make_load, body_size=128, count=40_000)
    for window, target in ((256, Target(12)), (4096, Target(reach=20))):
        run = partial(append_pipelined, window=window)
        yield Case(f"{name}, pipelined", run, f"window {window:,}", flushes, against, target, setup=setup, limit=True)


CASES: Final = list(cases())

if __name__ == "__main__":
    main("durability", __doc__, CASES, both=True)
