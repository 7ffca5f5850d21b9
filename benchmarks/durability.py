"""Cost of waiting for the disk: sync appends, group commit, pipelined appends; opening, and the tail of latency.

``python -m benchmarks.durability [--rounds N] [--rows sync,group,…] [--quick] [--write]``
"""

from __future__ import annotations

import mmap
import os
import statistics
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from benchmarks import peers
from benchmarks.charts import NO_BREAK
from benchmarks.common import Bench, Measure, Row, Run, Stopwatch, Target, command, compare, rate
from benchmarks.store import SIZES, Load, make_load, make_messages
from librmq.config import StoreConfig
from librmq.files.memory import MemoryFiles
from librmq.files.seam import File
from librmq.message.message import Message
from librmq.message.record import BLANK_MAGIC, BLANK_SIZE, Record, body_checksum, encode_record
from librmq.store import MessageStore

SYNC: Final = StoreConfig(durability="sync")
PRODUCERS: Final = 32
WINDOWS: Final = {256: Target(12), 4096: Target(reach=20)}
FLUSH_S: Final = 0.001
"""Seconds of a flush on the simulated disk."""
OPENED: Final = {"64 MiB": 64 << 20, "1 GiB": 1 << 30, "10 GiB": 10 << 30}
FILE_SIZE: Final = 1 << 30
BODY: Final = 4 << 20
PACKAGES: Final = ("librmq", "numpy", "lmdb")


# --------------------------------------------------------------------------------------------------------- one producer


def raw_flushed(folder: Path, records: peers.Records) -> float:
    """Return the limit: ``pwrite`` and ``fdatasync`` of each record, into a file with allocated blocks."""
    size = sum(map(len, records.raw))
    descriptor = os.open(folder / "raw", os.O_RDWR | os.O_CREAT)
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
    os.fsync(descriptor)
    flush = os.fdatasync if hasattr(os, "fdatasync") else os.fsync
    at = 0
    with Stopwatch() as watch:
        for raw in records.raw:
            os.pwrite(descriptor, raw, at)
            flush(descriptor)
            at += len(raw)
    os.close(descriptor)
    return watch.seconds


@contextmanager
def ready_store(folder: Path, first: Message) -> Iterator[MessageStore]:
    """Open a store with ``sync`` that has its first message, and so its first files."""
    with MessageStore.open(folder / "store", SYNC) as store:
        store.append(first)
        yield store


def append_sync(folder: Path, load: Load) -> float:
    """Return messages a second, each on the device before the next."""
    with ready_store(folder, load.messages[0]) as store, Stopwatch() as watch:
        for message in load.messages:
            store.append(message)
    return load.count / watch.seconds


def sync_append(bench: Bench, case: str, body_size: int) -> list[Row]:
    """Measure one producer that waits for the device."""
    load = make_load(bench, body_size, 2_000)
    others = {
        "raw pwrite and fdatasync": peers.Peer("os", raw_flushed, Target(0.75, 0.9), limit=True),
        "SQLite, synchronous FULL": peers.Peer(
            "sqlite3",
            lambda folder, records: peers.sqlite_append(folder, records, synchronous="FULL"),
            Target(1.0, 1.2),
        ),
        "LMDB, synced": peers.Peer(
            "lmdb", lambda folder, records: peers.lmdb_append(folder, records, sync=True), Target(1.5, 2)
        ),
    }
    present = {name: peer for name, peer in others.items() if bench.has(peer.package)}
    rates = bench.interleave(
        {
            "librmq": lambda folder: append_sync(folder, load),
            **{name: peer.measure(load.records) for name, peer in present.items()},
        }
    )
    return [
        compare("sync append", case, name, rates["librmq"], rates[name], peer.target, limit=peer.limit)
        for name, peer in present.items()
    ]


# ------------------------------------------------------------------------------------------------------- many producers


def append_by_many(store: MessageStore, messages: Sequence[Message]) -> float:
    """Return messages a second of `PRODUCERS` threads that share the messages, each with its own queue."""
    begin, threads = threading.Barrier(PRODUCERS + 1), []

    def produce(number: int) -> None:
        mine = messages[number::PRODUCERS]
        begin.wait()
        for message in mine:
            store.append(message, number)

    for number in range(PRODUCERS):
        threads.append(threading.Thread(target=produce, args=(number,)))
        threads[-1].start()
    begin.wait()
    with Stopwatch() as watch:
        for thread in threads:
            thread.join()
    return len(messages) / watch.seconds


class SlowFiles(MemoryFiles):
    """Files in memory whose flushes of the log take as long as on a disk, with a count of them."""

    def __init__(self) -> None:
        super().__init__()
        self.flushes = 0

    def flush(self, file: File) -> None:
        if "commitlog" in file.path:
            self.flushes += 1
            time.sleep(FLUSH_S)


def group_commit(bench: Bench) -> list[Row]:
    """Measure producers that share flushes, on this disk and on a simulated one."""
    load = make_load(bench, 128, 16_000)
    few = load.records.first(500)

    def many(folder: Path) -> float:
        with ready_store(folder, load.messages[0]) as store:
            return append_by_many(store, load.messages)

    rates = bench.interleave({"librmq": many, "flushes": lambda folder: len(few.raw) / raw_flushed(folder, few)})
    shares = []

    def simulated(_: Path) -> float:
        files = SlowFiles()
        config = StoreConfig(durability="sync", commitlog_file_size=64 << 20)
        with MessageStore.open("/store", config, files=files) as store:
            store.append(load.messages[0])
            files.flushes = 0
            measured = append_by_many(store, load.messages)
            shares.append(load.count / files.flushes)
            return measured

    simulated_rates = bench.interleave({"librmq": simulated})["librmq"]
    shares = shares[1:]  # the warm-up
    case = f"{PRODUCERS} producers"
    return [
        compare("sync append", case, "flushes of the disk", rates["librmq"], rates["flushes"], Target(2), limit=True),
        Row(
            "sync append, flush of 1 ms simulated",
            case,
            "",
            statistics.median(shares),
            "messages a flush",
            Target(reach=PRODUCERS / 2),
            spread=f"{min(shares):.3g}–{max(shares):.3g}",
            ours=rate(statistics.median(simulated_rates), "msg/s"),
            other=f"{1 / FLUSH_S:,.0f}{NO_BREAK}flushes/s at most",
        ),
    ]


def append_pipelined(folder: Path, messages: Sequence[Message], window: int) -> float:
    """Return messages a second until all are acknowledged, with at most ``window`` open at a time."""
    with ready_store(folder, messages[0]) as store:
        submit, waiting = store.submit, deque[Callable[[], object]]()
        with Stopwatch() as watch:
            for message in messages:
                waiting.append(submit(message).wait)
                if len(waiting) >= window:
                    waiting.popleft()()
            while waiting:
                waiting.popleft()()
    return len(messages) / watch.seconds


def pipelined(bench: Bench) -> list[Row]:
    """Measure one producer that does not wait for the device."""
    load = make_load(bench, 128, 40_000)
    few = load.records.first(500)

    def run(window: int) -> Run:
        return lambda folder: append_pipelined(folder, load.messages, window)

    rates = bench.interleave(
        {
            "flushes": lambda folder: len(few.raw) / raw_flushed(folder, few),
            **{str(window): run(window) for window in WINDOWS},
        }
    )
    return [
        compare(
            "sync append, pipelined",
            f"window {window:,}",
            "flushes of the disk",
            rates[str(window)],
            rates["flushes"],
            target,
            limit=True,
        )
        for window, target in WINDOWS.items()
    ]


# -------------------------------------------------------------------------------------------------------------- opening


def make_sparse(path: Path, size: int, file_size: int) -> int:
    """Write a sparse log of about ``size`` bytes, in records with bodies of zeros; return their number."""
    body = bytes(min(BODY, size // 4, file_size // 4))
    checksum, record_size = body_checksum(body), Record(topic="large", body=body).size
    folder = path / "commitlog"
    folder.mkdir(parents=True)
    in_file = (file_size - BLANK_SIZE) // record_size
    count = max(size // record_size, 1)
    for first in range(0, count, in_file):
        start = first // in_file * file_size
        with open(folder / f"{start:020d}", "wb", buffering=0) as file:
            file.truncate(file_size)
            for number in range(first, min(first + in_file, count)):
                at = (number - first) * record_size
                record = Record(
                    topic="large",
                    queue_offset=number,
                    physical_offset=start + at,
                    store_timestamp_ms=1_700_000_000_000 + number,
                    body=body,
                    body_crc=checksum,
                )
                data = encode_record(record)
                for begin, end in ((0, 88), (88 + len(body), len(data))):  # around the body
                    file.seek(at + begin)
                    file.write(data[begin:end])
            if first + in_file < count:
                at = in_file * record_size
                file.seek(at)
                file.write(struct.pack(">II", file_size - at, BLANK_MAGIC))
    return count


def opening(bench: Bench) -> list[Row]:
    """Measure the opening of cleanly closed stores of growing size, with sparse logs."""
    file_size = bench.count(FILE_SIZE)
    config = StoreConfig(
        commitlog_file_size=file_size, max_hash_slot_num=10_000, max_index_num=40_000, disk_refuse_ratio=100
    )
    seconds: dict[str, list[float]] = {}
    with bench.folder() as folder:
        for case, size in OPENED.items():
            count = make_sparse(folder / case, bench.count(size), file_size)
            with MessageStore.open(folder / case, config, thorough=True) as store:
                assert store.queues["large", 0].max_offset == count
            seconds[case] = []

        def once(case: str) -> Run:
            def run(_: Path) -> float:
                with Stopwatch() as watch:
                    store = MessageStore.open(folder / case, config)
                store.close()
                return watch.seconds

            return run

        seconds = bench.interleave({case: once(case) for case in OPENED})
    rows = []
    for case, found in seconds.items():
        took = statistics.median(found)
        rows.append(
            Row("opening, closed cleanly", case, "", took, "s", Target(0.3, at_most=True), ours=rate(took, "s"))
        )
    small, *_, large = OPENED
    rows.append(
        compare(
            "opening, closed cleanly",
            large,
            f"opening {small}",
            seconds[large],
            seconds[small],
            Target(reach=2, at_most=True),
            unit="s",
            limit=True,
        )
    )
    return rows


# ----------------------------------------------------------------------------------------------- opening after a kill


KILLED: Final = {
    "embedded sizes": (StoreConfig(disk_refuse_ratio=100), 8, 14_000, Target(0.3, at_most=True)),
    "embedded sizes, a full file": (StoreConfig(disk_refuse_ratio=100), 8, 66_000, Target(1.5, at_most=True)),
    "a broker's sizes": (StoreConfig.broker(disk_refuse_ratio=100), 8, 14_000, Target(1.5, at_most=True)),
    "4,000 queues": (StoreConfig(disk_refuse_ratio=100), 4_000, 16_000, Target(0.5, at_most=True)),
    "50,000 queues": (StoreConfig(disk_refuse_ratio=100), 50_000, 100_000, Target(5, at_most=True)),
}


def make_killed(path: Path, config: StoreConfig, queues: int, count: int) -> None:
    """Make a store as a kill before its first flush leaves it, with ``count`` messages dealt out over queues."""
    body = bytes(850 if queues < 100 else 100)
    each, rest = divmod(count, queues)
    store = MessageStore.open(path, config)
    for queue in range(queues):
        topic, queue_id = f"T{queue // 16}", queue % 16
        left = each + (queue < rest)
        while left:
            size = min(left, 2 if queues > 100 else 500)
            store.append_batch([Message(topic, body, keys=f"k{queue}-{left - n}") for n in range(size)], queue_id)
            left -= size
    store.abandon()
    (path / "checkpoint").unlink(missing_ok=True)


def killed(bench: Bench) -> list[Row]:
    """Measure the opening of a store after a kill, with a log of about 14 MB or many queues.

    Each store is made once. A recovery makes its checkpoint alone, which is deleted for the next round.
    """
    rows = []
    for case, (config, queues, messages, target) in KILLED.items():
        with bench.folder() as folder:
            path = folder / "store"
            make_killed(path, config, queues, bench.count(messages))

            def once(_: Path, config: StoreConfig = config, path: Path = path) -> float:
                (path / "checkpoint").unlink(missing_ok=True)
                with Stopwatch() as watch:
                    store = MessageStore.open(path, config)
                assert store.recovered
                store.abandon()
                return watch.seconds

            took = statistics.median(bench.interleave({case: once})[case])
        rows.append(Row("opening, after a kill", case, "", took, "s", target, ours=rate(took, "s")))
    return rows


# -------------------------------------------------------------------------------------------------------------- latency


SHARES: Final = {"p99": 0.99, "p99.9": 0.999, "p99.99": 0.9999}
PACE_NS: Final = 3000
"""Number of writes of the bare loop, as many as the store's."""


def raw_writes(folder: Path, data: bytes, count: int, *, touched: bool) -> list[int]:
    """Return the time (ns) of each write of a loop that only writes ``data``: the latency of the machine itself.

    The file is mapped and has its blocks, with ``touched`` also its pages; no other thread runs.
    """
    took, clock, size = [], time.perf_counter_ns, len(data)
    descriptor = os.open(folder / "raw", os.O_RDWR | os.O_CREAT)
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size * count)
    os.truncate(descriptor, size * count)
    with mmap.mmap(descriptor, size * count) as buffer:
        os.close(descriptor)
        if touched:
            buffer[:] = bytes(len(buffer))
        for at in range(0, size * count, size):
            begin = clock()
            buffer[at : at + size] = data
            end = clock()
            took.append(end - begin)
            while clock() < begin + PACE_NS:
                pass
    return took


def latency(bench: Bench) -> list[Row]:
    """Measure single appends in async: the slowest compared with the median, and with the slowest of a bare loop."""
    messages = make_messages(1024, min(bench.count(200_000), 50_000))
    count = bench.count(200_000)
    record = make_load(bench, 1024, 1).records.raw[0]
    found: dict[str, list[float]] = {}

    def note(name: str, took: list[int]) -> float:
        took.sort()
        found.setdefault(f"{name}, median", []).append(took[len(took) // 2] / 1e9)
        for share, part in SHARES.items():
            found.setdefault(f"{name}, {share}", []).append(took[min(int(part * len(took)), len(took) - 1)] / 1e9)
        return len(took) / sum(took)

    def run(folder: Path) -> float:
        took = []
        clock, number = time.perf_counter_ns, 0
        with MessageStore.open(folder / "store") as store:
            append = store.append
            append(messages[0])
            for number in range(count):
                message = messages[number % len(messages)]
                begin = clock()
                append(message)
                took.append(clock() - begin)
        return note("single append", took)

    bench.interleave(
        {
            "librmq": run,
            "raw": lambda folder: note("raw mapped write", raw_writes(folder, record, count, touched=False)),
            "touched": lambda folder: note("raw, pages touched", raw_writes(folder, record, count, touched=True)),
        }
    )
    # Compare the raw writes with the store's median too: the share of the machine alone.
    names = [*(f"single append, {share}" for share in SHARES), "raw mapped write, p99.99", "raw, pages touched, p99.99"]
    targets = {"single append, p99.99": Target(50, 15, at_most=True)}
    return [
        compare(
            f"latency of {name}",
            "1 KiB",
            "the median",
            found[name][1:],
            found["single append, median"][1:],
            targets.get(name, Target()),
            unit="s",
            limit=True,
        )
        for name in names
    ]


# -------------------------------------------------------------------------------------------------------------- command


def _each_size(bench: Bench) -> list[Row]:
    return [row for case, body_size in SIZES.items() for row in sync_append(bench, case, body_size)]


ROWS: Final[dict[str, Measure]] = {
    "sync": _each_size,
    "group": group_commit,
    "pipelined": pipelined,
    "opening": opening,
    "killed": killed,
    "latency": latency,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, show the table, and return the exit status."""
    return command("durability", __doc__ or "", ROWS, PACKAGES, arguments)


if __name__ == "__main__":
    sys.exit(main())
