"""The store compared with SQLite, LMDB, RocksDB, three queue libraries, and the limits of the machine."""

from __future__ import annotations

import mmap
import multiprocessing
import shutil
import struct
import subprocess
import sys
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from functools import cache, partial
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np

from benchmarks import peers
from benchmarks.frame import SIZES, Bench, Case, Part, Run, Target, Timed, last_line, main
from benchmarks.peers import TAG, TOPIC, Load, make_load
from librmq.consumequeue import ConsumeQueue
from librmq.consumequeue_entries import ENTRY_SIZE, entry_dtype
from librmq.message.message import Message
from librmq.message.record import BODY_AT, header_struct
from librmq.store import GetStatus, MessageStore
from librmq.store.engine.read import matching_entries

PULL: Final = 32
BATCH: Final = 256
CHUNK: Final = 1 << 20
ENTRIES: Final = 1_000_000
_SELECT: Final = f"SELECT * FROM record WHERE queue_offset >= ? ORDER BY queue_offset LIMIT {PULL}"
_CHECKSUM_AND_SIZE: Final = header_struct("body_crc", "body_length")
_spawn: Final = multiprocessing.get_context("spawn")


# --------------------------------------------------------------------------------------------------------------- append


def append(load: Load, folder: Path) -> Timed:
    """Append each message, until every one can be read and found by its keys."""
    with MessageStore.open(folder / "store") as store:
        append = store.append
        yield
        for message in load.messages:
            append(message)
        last = store.read(TOPIC, 0, len(load.messages) - 1, 1)  # pending queue entries and keys are written now
        yield len(load.messages)
    assert last.status is GetStatus.FOUND


def append_batches(load: Load, folder: Path) -> Timed:
    messages = load.messages
    with MessageStore.open(folder / "store") as store:
        yield
        for at in range(0, len(messages), BATCH):
            store.append_batch(messages[at : at + BATCH])
        last = store.read(TOPIC, 0, len(messages) - 1, 1)
        yield len(messages)
    assert last.status is GetStatus.FOUND


SINGLE: Final[list[tuple[str, Run, Target, str]]] = [
    ("SQLite, a row a transaction", partial(peers.sqlite, synchronous="NORMAL", share=8),
     Target(20, pure=Target(5, 8)), "sqlite3"),
    ("LMDB nosync", partial(peers.lmdb, share=4), Target(8, pure=Target(2, 3.3)), "lmdb"),
    ("LMDB nosync, writable map", partial(peers.lmdb, writemap=True), Target(4, pure=Target()), "lmdb"),
    ("RocksDB nosync", peers.rocksdb, Target(6, pure=Target(1.2, 1.6)), "rocksdict"),
    ("litequeue", partial(peers.litequeue, share=8), Target(15, pure=Target(4)), "litequeue"),
    ("diskcache", partial(peers.diskcache, share=16), Target(8), "diskcache"),
    ("persist-queue as it comes, syncing", partial(peers.persist_queue, synchronous="FULL", share=40), Target(25),
     "persistqueue"),
]  # fmt: skip
LARGER: Final = {
    "LMDB nosync, writable map": Target(3, 4, pure=Target()),
    "RocksDB nosync": Target(5, 6, pure=Target(1.2, 1.6)),
}
"""What is required at 1 KiB instead, where the new pages of the files take a large part of the time of all."""
BATCHED: Final[list[tuple[str, Run, Target, str]]] = [
    ("SQLite, 256 rows a transaction", partial(peers.sqlite, size=BATCH, synchronous="NORMAL"), Target(1.4, 1.8),
     "sqlite3"),
    ("LMDB nosync, 256 a transaction", partial(peers.lmdb, size=BATCH), Target(0.75, 0.95, pure=Target(0.7, 0.95)),
     "lmdb"),
    ("LMDB nosync, 256 in putmulti", partial(peers.lmdb_putmulti, size=BATCH), Target(1.5, pure=Target()), "lmdb"),
]  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------- read


def filled(bench: Bench, body_size: int, count: int) -> Iterator[tuple[Load, Path]]:
    """Yield a load, and a store that has its messages and is closed."""
    with bench.folder() as folder:
        for load in make_load(bench, body_size, count):
            with MessageStore.open(folder / "store") as store:
                for message in load.messages:
                    store.append(message)
            yield load, folder / "store"


def readable(bench: Bench, body_size: int, count: int) -> Iterator[Any]:
    """Yield an open store, a table of SQLite and a mapped file with the same records, and two more processes."""
    for load, path in filled(bench, body_size, count):
        ends = np.cumsum([len(raw) for raw in load.raw]).tolist()
        (path.parent / "raw").write_bytes(b"".join(load.raw))
        with (
            MessageStore.open(path, read_only=True) as store,
            closing(peers.sqlite_table(path.parent)) as table,
            open(path.parent / "raw", "rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
            ProcessPoolExecutor(2, _spawn) as processes,
        ):
            table.executemany(peers._INSERT, load.rows(1))
            yield SimpleNamespace(
                count=len(load.raw), path=path, store=store, table=table, mapped=mapped, processes=processes,
                places=list(zip([0, *ends], ends, strict=False)), end=store.log.end,
                middle=store.read(TOPIC, 0, len(load.raw) // 2, 1).messages[0].physical_offset,
            )  # fmt: skip


def pull(stored: Any, _: Path) -> Timed:
    """Read a whole queue, 32 messages a call, with bodies."""
    queue_offset = count = 0
    yield
    while queue_offset < stored.count:
        result = stored.store.read(TOPIC, 0, queue_offset, PULL)
        bodies = [message.body for message in result.messages]
        count += len(bodies)
        queue_offset = result.next_offset
    yield stored.count
    assert count == stored.count


def pull_sqlite(stored: Any, _: Path) -> Timed:
    execute, queue_offset, count = stored.table.execute, 0, 0
    yield
    while queue_offset < stored.count:
        rows = execute(_SELECT, (queue_offset,)).fetchall()
        count += len(rows)
        queue_offset = rows[-1][0] + 1
    yield stored.count
    assert count == stored.count


def slice_records(stored: Any, _: Path) -> Timed:
    """Cut the records out of a mapped file, at known places."""
    raw, places = stored.mapped, stored.places
    yield
    for at in range(0, len(places), PULL):
        records = [raw[begin:end] for begin, end in places[at : at + PULL]]
    yield len(places)
    assert records


def compare_records(stored: Any, _: Path) -> Timed:
    """Cut the records out of a mapped file, at known places, and compare their bodies with their checksums."""
    raw, places, unpack, crc32 = stored.mapped, stored.places, _CHECKSUM_AND_SIZE.unpack_from, zlib.crc32
    yield
    count = 0
    for begin, end in places:
        record = raw[begin:end]
        checksum, size = unpack(record)
        count += crc32(record[BODY_AT : BODY_AT + size]) & 0x7FFFFFFF == checksum
    yield len(places)
    assert count == len(places)


def scan(stored: Any, _: Path) -> Timed:
    """Scan the log, and add up the sizes of records, at which no Python code runs for each of them."""
    yield
    size = sum(map(itemgetter(1), stored.store.log.scan(0, stored.end)))
    yield stored.end
    assert size == stored.end


def crc32(stored: Any, _: Path) -> Timed:
    with (
        open(stored.store.log.sequence.path(0), "rb") as file,
        mmap.mmap(file.fileno(), stored.end, access=mmap.ACCESS_READ) as mapped,
        memoryview(mapped) as view,
    ):
        yield
        for at in range(0, stored.end, CHUNK):
            zlib.crc32(view[at : at + CHUNK])
        yield stored.end


def scan_in_processes(stored: Any, _: Path, *, two: bool) -> Timed:
    """Scan the log in another process, or a half of it in each of two."""
    parts = [(0, stored.middle), (stored.middle, stored.end)] if two else [(0, stored.end)]
    yield
    sizes = [stored.processes.submit(size_of_records, stored.path, *part) for part in parts]
    total = sum(size.result() for size in sizes)
    yield stored.end
    assert total == stored.end


def size_of_records(path: Path, begin: int, end: int) -> int:
    return sum(map(itemgetter(1), _opened(path).log.scan(begin, end)))


_opened: Final = cache(partial(MessageStore.open, read_only=True))
"""Opens a store once in a process."""


def rebuild(stored: tuple[Load, Path], _: Path) -> Timed:
    """Open a store without its queues and its index, until they are complete again."""
    load, path = stored
    for name in ("consumequeue", "index"):
        shutil.rmtree(path / name)
    yield
    store = MessageStore.open(path)
    yield len(load.messages)
    with store:
        assert store.queues[TOPIC, 0].max_offset == len(load.messages)
        assert len(store.find_by_key(TOPIC, load.messages[-1].keys[0])) == 1


def append_again(stored: tuple[Load, Path], folder: Path) -> Timed:
    return append(stored[0], folder)


# ----------------------------------------------------------------------------------------------------------------- tags


def tagged(bench: Bench, count: int) -> Iterator[Any]:
    """Yield a queue in which one entry in a hundred has a tag, that tag's code, and the filter for it."""
    with bench.folder() as folder, MessageStore.open(folder / "store") as store:
        for number in range(count):
            store.append(Message(TOPIC, b"", tags="rare" if number % 100 == 0 else TAG))
        code = store.read(TOPIC, 0, 0, 1).messages[0].tags_code
        yield SimpleNamespace(queue=store.queues[TOPIC, 0], code=code, matching=store.matching(tags="rare"),
                              times=bench.count(200_000) // count + 1)  # fmt: skip


def select(tags: Any, _: Path, *, places_of: Callable[[Any, bytes], list[int]]) -> Timed:
    """Find the entries with the tag, again and again for long enough to measure."""
    queue, end = tags.queue, tags.queue.max_offset
    yield
    for _round in range(tags.times):
        count = at = 0
        while at < end:
            raw = queue.read(at, 65_536)
            count += len(places_of(tags, raw))
            at += len(raw) // ENTRY_SIZE
    yield end * tags.times
    assert count == end // 100


def places_in_array(tags: Any, raw: bytes) -> list[int]:
    """Find entries by the code of a read with a filter, before it reads a message."""
    return matching_entries(tags.queue, raw, tags.matching)


def places_by_numpy(tags: Any, raw: bytes) -> list[int]:
    """Find the same at the limit of numpy: nothing but the operations on arrays."""
    codes = np.frombuffer(raw, entry_dtype())["tags_code"].astype(np.int64)
    found: list[int] = (codes.astype(np.int32) == tags.code).nonzero()[0].tolist()
    return found


def places_in_loop(tags: Any, raw: bytes) -> list[int]:
    """Find the same in a loop over unpacked entries."""
    return [at for at, (_, _, code) in enumerate(struct.iter_unpack(">qiq", raw)) if code == tags.code]


# ------------------------------------------------------------------------------------------------------------ footprint


def long_queue(bench: Bench) -> Iterator[Path]:
    """Yield the folder of a queue with a million entries."""
    count, entry = bench.count(ENTRIES), struct.pack(">qiq", 0, 325, 42)
    with bench.folder() as folder:
        with ConsumeQueue.open(str(folder / "queue")) as queue:
            for begin in range(0, count, 100_000):
                queue.append_many(begin, entry * min(100_000, count - begin))
        yield folder / "queue"


def weigh(folder: Path, _: Path) -> dict[str, float]:
    """Return what a process that has read all entries holds (bytes an entry) and has mapped (MiB)."""
    with ProcessPoolExecutor(1, _spawn) as processes:
        return processes.submit(weigh_queue, str(folder)).result()


def weigh_queue(folder: str) -> dict[str, float]:
    """Read all entries of a queue, and weigh this process."""
    tracemalloc.start()
    before, mapped, is_inside = tracemalloc.get_traced_memory()[0], 0, False
    with ConsumeQueue.open(folder, writable=False) as queue:
        entries = sum(len(block) for _, block in queue.blocks())
        held = tracemalloc.get_traced_memory()[0] - before
        smaps = Path("/proc/self/smaps")
        for line in smaps.read_text("utf-8").splitlines() if smaps.exists() else ():
            if not line.split(" ", 1)[0].endswith(":"):
                is_inside = folder in line
            elif is_inside and line.startswith("Rss:"):
                mapped += int(line.split()[1]) * 1024
    return {"held": held / entries, "mapped": mapped / (1 << 20)}


IMPORT: Final = "import time; begin = time.perf_counter(); import {}; print(time.perf_counter() - begin)"


def start(_: Bench, folder: Path, *, code: str) -> float:
    """Return the seconds that a new interpreter reports."""
    return float(last_line(code))


def show_help(_: Bench, folder: Path) -> Timed:
    yield
    subprocess.run([sys.executable, "-m", "librmq", "--help"], stdout=subprocess.DEVNULL, check=True)
    yield 1


import_packages: Final = partial(start, code=IMPORT.format("numpy, sortedcontainers, lark"))


def reading(detail: str, size: int) -> Iterator[Case]:
    """Yield the cases that read a store, for a size of bodies."""
    setup = partial(readable, body_size=size, count=50_000)
    scanned, sliced = Target(1.0, 1.3, pure=Target(0.25, 0.28)), Target(0.7, 0.8, pure=Target(0.25, 0.50))
    if size == 128:
        scanned, sliced = Target(1.1, 1.3, pure=Target(0.09, 0.12)), Target(0.5, 0.8, pure=Target(0.13, 0.30))
    one, two = partial(scan_in_processes, two=False), partial(scan_in_processes, two=True)
    yield Case(f"pull {PULL}", pull, detail, pull_sqlite, "SQLite rows", Target(1.1, 1.8), setup=setup)
    yield Case(f"pull {PULL}", pull, detail, slice_records, "raw slices of records", sliced, setup=setup, limit=True)
    compared = Target(1.5, pure=Target())
    yield Case(f"pull {PULL}", pull, detail, compare_records, "raw slices, compared", compared, setup=setup, limit=True)
    yield Case("scan", scan, detail, crc32, "raw crc32", scanned, "B/s", setup, limit=True)
    yield Case("scan, two processes", two, detail, one, "one process", Target(reach=1.9), "B/s", setup, limit=True)


def cases() -> Iterator[Case]:
    for name, run, table in (("single append", append, SINGLE), (f"batch append {BATCH}", append_batches, BATCHED)):
        for detail, size in SIZES.items():
            setup = partial(make_load, body_size=size, count=320 * BATCH)
            for against, peer, target, module in table:
                required = target if size == 128 else LARGER.get(against, target)
                yield Case(name, run, detail, peer, against, required, setup=setup, needs=(module,))
            if table is SINGLE:
                target = Target(0.7, pure=Target(0.12, 0.35)) if size == 128 else Target(0.9, pure=Target(0.20, 0.35))
                yield Case(name, run, detail, peers.raw_write, "raw write, unbuffered", target, setup=setup, limit=True)
    for detail, size in SIZES.items():
        yield from reading(detail, size)
    for detail, size in SIZES.items():
        yield Case("rebuild", rebuild, detail, append_again, "single append by librmq", Target(1, 1.3),
                   setup=partial(filled, body_size=size, count=80_000), limit=True)  # fmt: skip
    array, loop, by_numpy = (
        partial(select, places_of=places_of) for places_of in (places_in_array, places_in_loop, places_by_numpy)
    )
    for count in (1_000, 100_000):
        detail, unit, setup = f"{count:,} entries", "entries/s", partial(tagged, count=count)
        against, wanted = "a loop over unpacked entries", Target(20, 60)
        if count == 1_000:  # numpy alone is some 24 times as fast there, and the limit of Python code
            yield Case("tag scan", array, detail, by_numpy, "numpy alone", Target(pure=Target(0.7)), unit, setup,
                       limit=True)  # fmt: skip
            wanted = Target(20, 60, pure=Target())
        yield Case("tag scan", array, detail, loop, against, wanted, unit, setup)
    for name, part, unit, bound in (
        ("queue, Python objects held", "held", "B an entry", 1), ("queue, mapped and resident", "mapped", "MiB", 20)
    ):  # fmt: skip
        yield Case(name, Part(weigh, part), f"{ENTRIES:,} entries", target=Target(bound, at_most=True), unit=unit,
                   setup=long_queue)  # fmt: skip
    for module in ("librmq", "librmq.store._store"):
        yield Case(f"import {module}", partial(start, code=IMPORT.format(module)), "", import_packages,
                   "import numpy, sortedcontainers, lark", Target(1.5, at_most=True), "s", limit=True)  # fmt: skip
    most = Target(0.3, at_most=True)
    yield Case("librmq --help", show_help, target=most, unit="s")


CASES: Final = list(cases())

if __name__ == "__main__":
    main("store", __doc__, CASES, both=True)
