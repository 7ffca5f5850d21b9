"""The store compared with SQLite, LMDB, RocksDB, three queue libraries, and the limits of the machine.

``python -m benchmarks.store [--rounds N] [--rows append,pull,…] [--quick] [--write]``
"""

from __future__ import annotations

import mmap
import multiprocessing
import shutil
import sqlite3
import struct
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import repeat
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from benchmarks import footprint, peers
from benchmarks.common import Bench, Measure, Row, Run, Stopwatch, Target, command, compare
from librmq.consumequeue import ConsumeQueue, ExtUnit, entry_dtype
from librmq.message.message import Message, StoredMessage
from librmq.store import GetStatus, MessageStore

TOPIC: Final = "orders"
TAG: Final = "paid"
PULL: Final = 32
BATCH: Final = 256
SIZES: Final = {"128 B": 128, "1 KiB": 1024}
CHUNK: Final = 1 << 20
ENTRIES: Final = 65_536
PACKAGES: Final = ("librmq", "numpy", "lmdb", "rocksdict", "litequeue", "diskcache", "persist-queue")

_SELECT: Final = f"SELECT * FROM record WHERE queue_offset >= ? ORDER BY queue_offset LIMIT {PULL}"
_spawn: Final = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Load:
    """Messages, and the same messages as finished records."""

    messages: list[Message]
    records: peers.Records

    @property
    def count(self) -> int:
        return len(self.messages)


def make_messages(body_size: int, count: int) -> list[Message]:
    """Make messages with a unique id, a key, a tag and two properties."""
    body = (bytes(range(256)) * 4)[:body_size]
    return [
        Message(
            TOPIC,
            body,
            tags=TAG,
            keys=f"order-{number:08d}",
            properties={"region": "eu-west-1", "amount": "1234"},
            unique_key=f"7F0000010BB8{number:020X}",
        )
        for number in range(count)
    ]


def make_load(bench: Bench, body_size: int, usual: int) -> Load:
    messages = make_messages(body_size, bench.count(usual))
    with bench.folder() as folder, MessageStore.open(folder / "store") as store:
        store.append(messages[0])
        tags_code = next(iter(store)).tags_code
        for message in messages[1:]:
            store.append(message)
        raw = [message.raw for message in store]
    unique_keys = [message.unique_key or "" for message in messages]
    return Load(messages, peers.Records(raw, unique_keys, [message.keys[0] for message in messages], tags_code))


@contextmanager
def filled_store(bench: Bench, messages: Sequence[Message]) -> Iterator[Path]:
    """Make a cleanly closed store with ``messages``."""
    with bench.folder() as folder:
        with MessageStore.open(folder / "store") as store:
            for message in messages:
                store.append(message)
        yield folder / "store"


# --------------------------------------------------------------------------------------------------------------- append


def append_all(folder: Path, messages: Sequence[Message]) -> float:
    """Return the seconds of single appends until every message can be read and found by its keys."""
    with MessageStore.open(folder / "store") as store:
        append = store.append
        with Stopwatch() as watch:
            for message in messages:
                append(message)
            last = store.read(TOPIC, 0, len(messages) - 1, 1)  # pending queue entries and keys are written now
        assert last.status is GetStatus.FOUND
        return watch.seconds


def append_batches(folder: Path, messages: Sequence[Message]) -> float:
    """Return the same for batches."""
    with MessageStore.open(folder / "store") as store:
        append_batch = store.append_batch
        with Stopwatch() as watch:
            for at in range(0, len(messages), BATCH):
                append_batch(messages[at : at + BATCH])
            last = store.read(TOPIC, 0, len(messages) - 1, 1)
        assert last.status is GetStatus.FOUND
        return watch.seconds


def against_peers(
    bench: Bench,
    path: str,
    case: str,
    load: Load,
    ours: Callable[[Path, Sequence[Message]], float],
    others: dict[str, peers.Peer],
) -> list[Row]:
    """Compare appends of librmq with those of others."""
    present = {name: peer for name, peer in others.items() if bench.has(peer.package)}
    rates = bench.interleave(
        {
            "librmq": lambda folder: load.count / ours(folder, load.messages),
            **{name: peer.measure(load.records) for name, peer in present.items()},
        }
    )
    return [
        compare(path, case, name, rates["librmq"], rates[name], peer.target, limit=peer.limit)
        for name, peer in present.items()
    ]


def single_append(bench: Bench, case: str, body_size: int) -> list[Row]:
    """Measure single appends, with queue and index."""
    others = {
        "SQLite, a row a transaction": peers.Peer(
            "sqlite3",
            lambda folder, records: peers.sqlite_append(folder, records, synchronous="NORMAL"),
            Target(5, 8),
            8,
        ),
        "SQLite, synchronous OFF": peers.Peer("sqlite3", peers.sqlite_append, share=4),
        "LMDB nosync": peers.Peer("lmdb", peers.lmdb_append, Target(2.5, 3.3), 4),
        "LMDB nosync, writable map": peers.Peer(
            "lmdb", lambda folder, records: peers.lmdb_append(folder, records, writemap=True)
        ),
        "RocksDB nosync": peers.Peer(
            "rocksdict", lambda folder, records: peers.rocksdb_batches(folder, records, 1), Target(1.2, 1.6)
        ),
        "litequeue": peers.Peer("litequeue", peers.litequeue_append, Target(5), 8),
        "diskcache": peers.Peer("diskcache", peers.diskcache_append, Target(8), 16),
        "persist-queue": peers.Peer("persistqueue", peers.persist_queue_append, share=8),
        "persist-queue as it comes, syncing": peers.Peer(
            "persistqueue",
            lambda folder, records: peers.persist_queue_append(folder, records, synchronous="FULL"),
            Target(25),
            40,
        ),
        "raw write, unbuffered": peers.Peer(
            "os", peers.raw_write, Target(0.20 if body_size == 128 else 0.28, 0.35), limit=True
        ),
    }
    load = make_load(bench, body_size, 80_000)
    return against_peers(bench, "single append", case, load, append_all, others)


def batch_append(bench: Bench, case: str, body_size: int) -> list[Row]:
    """Measure batches of 256, with queue and index."""
    others = {
        "SQLite, 256 rows a transaction": peers.Peer(
            "sqlite3",
            lambda folder, records: peers.sqlite_batches(folder, records, BATCH, synchronous="NORMAL"),
            Target(1.4, 1.8),
        ),
        "SQLite, 256 rows, synchronous OFF": peers.Peer(
            "sqlite3", lambda folder, records: peers.sqlite_batches(folder, records, BATCH)
        ),
        "LMDB nosync, 256 a transaction": peers.Peer(
            "lmdb", lambda folder, records: peers.lmdb_batches(folder, records, BATCH), Target(0.75, 0.95)
        ),
        "LMDB nosync, 256 in putmulti": peers.Peer(
            "lmdb", lambda folder, records: peers.lmdb_bulk(folder, records, BATCH)
        ),
        "RocksDB nosync, 256 a batch": peers.Peer(
            "rocksdict", lambda folder, records: peers.rocksdb_batches(folder, records, BATCH)
        ),
    }
    load = make_load(bench, body_size, 320 * BATCH)
    return against_peers(bench, f"batch append {BATCH}", case, load, append_batches, others)


# ----------------------------------------------------------------------------------------------------------------- read


def _pull_librmq(store: MessageStore, count: int) -> float:
    queue_offset = found = 0
    with Stopwatch() as watch:
        while queue_offset < count:
            result = store.read(TOPIC, 0, queue_offset, PULL)
            bodies = [message.body for message in result.messages]
            found += len(bodies)
            queue_offset = result.next_offset
    assert found == count
    return count / watch.seconds


def _pull_sqlite(connection: sqlite3.Connection, count: int) -> float:
    execute = connection.execute
    queue_offset = found = 0
    with Stopwatch() as watch:
        while queue_offset < count:
            taken = execute(_SELECT, (queue_offset,)).fetchall()
            found += len(taken)
            queue_offset = taken[-1][0] + 1
    assert found == count
    return count / watch.seconds


def _slice_records(raw: mmap.mmap, places: Sequence[tuple[int, int]]) -> float:
    with Stopwatch() as watch:
        for at in range(0, len(places), PULL):
            taken = [raw[begin:end] for begin, end in places[at : at + PULL]]
    assert taken
    return len(places) / watch.seconds


def pull(bench: Bench, case: str, body_size: int) -> list[Row]:
    """Measure reads of a whole queue, 32 messages a call, with bodies."""
    load = make_load(bench, body_size, 40_000)
    places, end = [], 0
    for raw in load.records.raw:
        places.append((end, end + len(raw)))
        end += len(raw)
    with (
        filled_store(bench, load.messages) as path,
        MessageStore.open(path, read_only=True) as store,
        closing(peers.sqlite_table(path.parent)) as table,
        open(path.parent / "raw", "w+b") as file,
    ):
        peers.sqlite_fill(table, load.records)
        file.write(b"".join(load.records.raw))
        file.flush()
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            rates = bench.interleave(
                {
                    "librmq": lambda _: _pull_librmq(store, load.count),
                    "sqlite": lambda _: _pull_sqlite(table, load.count),
                    "slices": lambda _: _slice_records(mapped, places),
                }
            )
    ours = rates["librmq"]
    target = Target(0.20, 0.30) if body_size == 128 else Target(0.30, 0.50)
    return [
        compare(f"pull {PULL}", case, "SQLite rows", ours, rates["sqlite"], Target(1.1, 1.8)),
        compare(f"pull {PULL}", case, "raw slices of records", ours, rates["slices"], target, limit=True),
    ]


def _scan(store: MessageStore, begin: int, end: int) -> int:
    records = 0
    for _ in store.log.scan(begin, end):
        records += 1
    return records


def _crc32(path: str, size: int) -> float:
    with (
        open(path, "rb") as file,
        mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as mapped,
        memoryview(mapped) as view,
        Stopwatch() as watch,
    ):
        for at in range(0, size, CHUNK):
            zlib.crc32(view[at : at + CHUNK])
    return size / watch.seconds


def _scanner(pipe: Connection, path: Path) -> None:
    """Scan the ranges that arrive, until None arrives."""
    with MessageStore.open(path, read_only=True) as store:
        pipe.send(0)
        while (wanted := pipe.recv()) is not None:
            pipe.send(_scan(store, *wanted))


def scan(bench: Bench, case: str, body_size: int) -> list[Row]:
    """Measure a scan of the whole log that compares each body with its checksum."""
    messages = make_messages(body_size, bench.count(100_000 if body_size == 128 else 50_000))
    with filled_store(bench, messages) as path, MessageStore.open(path, read_only=True) as store:
        end, count = store.log.end, len(messages)
        middle = store.read(TOPIC, 0, count // 2, 1).messages[0].physical_offset
        file = store.log.sequence.path(0)

        def here(_: Path) -> float:
            with Stopwatch() as watch:
                found = _scan(store, 0, end)
            assert found == count
            return end / watch.seconds

        with _scanners(path) as pipes:

            def in_processes(*parts: tuple[int, int]) -> float:
                with Stopwatch() as watch:
                    for pipe, part in zip(pipes, parts, strict=False):
                        pipe.send(part)
                    found = sum(pipe.recv() for pipe, _ in zip(pipes, parts, strict=False))
                assert found == count
                return parts[-1][1] / watch.seconds

            rates = bench.interleave(
                {
                    "librmq": here,
                    "crc32": lambda _: _crc32(file, end),
                    "one": lambda _: in_processes((0, end)),
                    "two": lambda _: in_processes((0, middle), (middle, end)),
                }
            )
    target = Target(0.09, 0.12) if body_size == 128 else Target(0.25, 0.28)
    return [
        compare("scan", case, "raw crc32", rates["librmq"], rates["crc32"], target, unit="B/s", limit=True),
        compare(
            "scan, two processes",
            case,
            "one process",
            rates["two"],
            rates["one"],
            Target(reach=1.9),
            unit="B/s",
            limit=True,
        ),
    ]


@contextmanager
def _scanners(path: Path) -> Iterator[list[Connection]]:
    """Start two processes of `_scanner`, and wait until they are ready."""
    pipes, processes = [], []
    for _ in range(2):
        mine, theirs = _spawn.Pipe()
        process = _spawn.Process(target=_scanner, args=(theirs, path), daemon=True)
        process.start()
        theirs.close()
        pipes.append(mine)
        processes.append(process)
    try:
        for pipe in pipes:
            pipe.recv()
        yield pipes
        for pipe in pipes:
            pipe.send(None)
    finally:
        for pipe, process in zip(pipes, processes, strict=True):
            pipe.close()
            process.join()


# -------------------------------------------------------------------------------------------------------------- rebuild


def _rebuild(path: Path, count: int) -> float:
    """Measure the opening of a store without its queues and its index."""
    for name in ("consumequeue", "index"):
        shutil.rmtree(path / name)
    with Stopwatch() as watch:
        store = MessageStore.open(path)
    with store:
        assert store.queues[TOPIC, 0].max_offset == count
        assert len(store.find_by_key(TOPIC, f"order-{count - 1:08d}")) == 1
    return count / watch.seconds


def rebuild(bench: Bench, case: str, body_size: int) -> list[Row]:
    """Compare a rebuild of queues and index from the log with appending the same messages."""
    messages = make_messages(body_size, bench.count(80_000))
    count = len(messages)
    with filled_store(bench, messages) as path:
        rates = bench.interleave(
            {
                "rebuild": lambda _: _rebuild(path, count),
                "append": lambda folder: count / append_all(folder, messages),
            }
        )
    target = Target(1, 1.3)
    return [compare("rebuild", case, "single append by librmq", rates["rebuild"], rates["append"], target, limit=True)]


# ----------------------------------------------------------------------------------------------------- ----------- tags


class _TagFilter:
    """The messages of one tag."""

    def __init__(self, tags_code: int) -> None:
        self._tags_code = tags_code

    def match_entries(
        self, tags_codes: npt.NDArray[np.int64], units: Sequence[ExtUnit | None] | None
    ) -> npt.NDArray[np.bool_]:
        matching: npt.NDArray[np.bool_] = tags_codes == self._tags_code
        return matching

    def match_message(self, message: StoredMessage) -> bool:
        return message.tags_code == self._tags_code


def _loop_over_entries(queue: ConsumeQueue, wanted: int) -> list[int]:
    found: list[int] = []
    first, end = queue.min_offset, queue.max_offset
    while first < end:
        raw = queue.read(first, end - first)
        codes = enumerate(struct.iter_unpack(">qiq", raw), first)
        found += [at for at, (_, _, code) in codes if code == wanted]
        first += len(raw) // entry_dtype().itemsize
    return found


def _select_in_arrays(queue: ConsumeQueue, wanted: int) -> list[int]:
    """Check entries like a read with a filter, before it reads a message."""
    found: list[int] = []
    first, end = queue.min_offset, queue.max_offset
    while first < end:
        entries = np.frombuffer(queue.read(first, ENTRIES), entry_dtype())
        places = (entries["tags_code"] == wanted).nonzero()[0]
        if first:
            places += first
        found += places.tolist()
        first += len(entries)
    return found


def _read_filtered(store: MessageStore, matching: _TagFilter, end: int) -> int:
    queue_offset = found = 0
    while queue_offset < end:
        result = store.read(TOPIC, 0, queue_offset, PULL, matching)
        found += len(result.messages)
        queue_offset = result.next_offset
    return found


def _repeated(take: Callable[[], int], expected: int, count: int, repeats: int) -> Run:
    """Repeat ``take``, which checks ``count`` entries and finds ``expected`` of them long enough to measure."""

    def run(folder: Path) -> float:
        with Stopwatch() as watch:
            for _ in repeat(None, repeats):
                found = take()
        assert found == expected
        return count * repeats / watch.seconds

    return run


def tag_scan(bench: Bench, count: int) -> list[Row]:
    """Measure finding the entries with a tag that one in a hundred has."""
    repeats = bench.count(200_000) // count + 1
    with bench.folder() as folder, MessageStore.open(folder / "store") as store:
        for number in range(count):
            store.append(Message(TOPIC, b"", tags="rare" if number % 100 == 0 else TAG))
        wanted = store.read(TOPIC, 0, 0, 1).messages[0].tags_code
        queue, nothing = store.queues[TOPIC, 0], _TagFilter(-1)
        selected = count // 100
        rates = bench.interleave(
            {
                "arrays": _repeated(lambda: len(_select_in_arrays(queue, wanted)), selected, count, repeats),
                "loop": _repeated(lambda: len(_loop_over_entries(queue, wanted)), selected, count, repeats),
                "read": _repeated(lambda: _read_filtered(store, nothing, count), 0, count, repeats),
            }
        )
    case, against, loop = f"{count:,} entries", "a loop over unpacked entries", rates["loop"]
    return [
        compare("tag scan", case, against, rates["arrays"], loop, Target(20, 60), unit="entries/s"),
        compare("read() with a filter, no match", case, against, rates["read"], loop, unit="entries/s"),
    ]


def tag_scans(bench: Bench) -> list[Row]:
    """Measure the scan over the smallest relevant number of entries, and over many."""
    return [row for count in (1_000, max(bench.count(100_000), 2_000)) for row in tag_scan(bench, count)]


# -------------------------------------------------------------------------------------------------------------- command


def _each_size(measure: Callable[[Bench, str, int], list[Row]]) -> Measure:
    def rows(bench: Bench) -> list[Row]:
        return [row for case, body_size in SIZES.items() for row in measure(bench, case, body_size)]

    return rows


ROWS: Final[dict[str, Measure]] = {
    "append": _each_size(single_append),
    "batch": _each_size(batch_append),
    "pull": _each_size(pull),
    "scan": _each_size(scan),
    "rebuild": _each_size(rebuild),
    "tags": tag_scans,
    "memory": footprint.memory,
    "import": footprint.start,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, show the table, and return the exit status."""
    return command("store", __doc__ or "", ROWS, PACKAGES, arguments)


if __name__ == "__main__":
    sys.exit(main())
