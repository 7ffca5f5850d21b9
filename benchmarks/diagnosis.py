"""Cost of lag and reports: whole processes.

A store of 1,000 queues with 20 messages each, and 1 or 100 groups with progress in every queue: 1,000 and 100,000 rows.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import random
import shutil
import struct
import subprocess
import sys
import tarfile
import zlib
from binascii import b2a_base64
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Final

from benchmarks.frame import CHECKOUT, Bench, Case, Part, Run, Setup, Target, Timed, from_setup, last_line, main
from librmq.config import StoreConfig
from librmq.message import Message
from librmq.store import MessageStore
from librmq.store.format.broker_tables import BrokerTables

TOPICS: Final = 10
QUEUES: Final = 100
MESSAGES: Final = 20
MANY: Final = 400_000
"""Messages that are reported."""
TEN_MILLION: Final = 10_000_000
MANY_QUEUES: Final = 24_000
MEMORY: Final = Path("/dev/shm")


def progress(bench: Bench, groups: int) -> Iterator[tuple[str, int]]:
    """Yield a store in whose queues groups have progress, and the number of rows of its lag."""
    config, rng = StoreConfig(commitlog_file_size=64 << 20, consumequeue_file_size=20_000), random.Random(1)
    topics = [f"T{number}" for number in range(max(1, round(TOPICS * bench.scale)))]
    with bench.folder() as folder:
        path = str(folder / "store")
        with MessageStore.open(path, config, background=False) as store:
            for _ in range(MESSAGES):
                for topic in topics:
                    for queue_id in range(QUEUES):
                        store.append(Message(topic, b"x" * 50), queue_id)
        tables = BrokerTables.open(os.path.join(path, "config"))
        for group in range(groups):
            for topic in topics:
                offsets = {queue_id: rng.randrange(MESSAGES + 1) for queue_id in range(QUEUES)}
                tables.offsets.set(f"{topic}@G{group}", offsets)
        tables.persist(1)
        yield path, groups * len(topics) * QUEUES


def process(given: tuple[str, int], _: Path, *, words: Sequence[str]) -> Timed:
    """Run a whole command, its start included."""
    yield
    subprocess.run((sys.executable, "-m", "librmq", *words, given[0]), check=True, stdout=subprocess.DEVNULL)
    yield 1


# -------------------------------------------------------------------------------------------------------------- reports


def reported(bench: Bench) -> Iterator[tuple[str, int]]:
    """Yield a store of messages with keys, and their number."""
    count = round(MANY * bench.scale)
    with bench.folder() as folder:
        path = str(folder / "store")
        with MessageStore.open(path, StoreConfig(commitlog_file_size=256 << 20), background=False) as store:
            for number in range(count):
                store.append(Message(f"T{number % 4}", b"x" * 40, keys=f"order-{number % 100_003}"), number % 8)
        yield path, count


def report_in_process(given: tuple[str, int], _: Path, *, messages: int) -> Timed:
    """Make a report, with ``messages`` as the units of which there are so many."""
    from librmq.console import render_page
    from librmq.diagnosis import report

    path, count = given
    yield
    answer = report(path, check=False)
    render_page(answer)
    answer.to_json()
    yield count / messages


REPORT: Final = """
import resource, sys, time
from librmq.cli import main
begin = time.perf_counter()
main(["report", sys.argv[1], "-o", sys.argv[2]])
print(time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def report_process(given: tuple[str, int], folder: Path) -> dict[str, float]:
    """Return the seconds of a report in a process of its own, without its start, and its peak in MiB."""
    seconds, peak = map(float, last_line(REPORT, given[0], folder / "report.html").split())
    return {"seconds": seconds, "peak": peak / 1024}


def report_peak(bench: Bench) -> Iterator[dict[str, float]]:
    with bench.folder() as folder:
        for given in reported(bench):
            yield report_process(given, folder)


def demo(bench: Bench) -> Iterator[tuple[str, int]]:
    archive = CHECKOUT / "tests" / "data" / "store-basic.tar.xz"
    with bench.folder() as folder, tarfile.open(archive, "r:xz") as packed:
        packed.extractall(folder, filter="data")
        yield str(folder / "store-basic" / "store"), 0


# ------------------------------------------------------------------------------------------------------------- commands


def stored(bench: Bench, topics: int, full: int, size: int) -> Iterator[tuple[str, float]]:
    """Yield a store of messages in 8 queues of each topic, and how much of the ``full`` number it has.

    It is in memory where that can be: the time of an ext4 for the same calls differs by five times between rounds.
    """
    count, config = bench.count(full), StoreConfig(commitlog_file_size=512 << 20)
    with replace(bench, scratch=MEMORY if MEMORY.exists() else bench.scratch).folder() as folder:
        path = str(folder / "store")
        with MessageStore.open(path, config, background=False) as store:
            for number in range(count):
                store.append(Message(f"T{number // 8 % topics}", b"x" * size, keys=f"order-{number}"), number % 8)
        yield path, count / full


def command(given: tuple[str, float], _: Path, *, words: Sequence[str], into: Sequence[str] | None = None) -> Timed:
    """Run a command in this process, whose output goes nowhere; with ``into`` it makes a new store."""
    from librmq.cli import main

    made = Path(given[0]).with_name("made")
    target = [] if into is None else [*into, str(made)]
    with open(os.devnull, "w", encoding="utf-8") as out, redirect_stdout(out), redirect_stderr(out):
        yield
        main([*words[:1], given[0], *target, *words[1:]])
        yield given[1]
    shutil.rmtree(made, ignore_errors=True)


# A process inherits the peak that `resource` tells from the one that starts it, which has the whole store mapped.
EXPORT: Final = """
import re, sys
from librmq.cli import main
assert main(["export", sys.argv[1], "-o", sys.argv[2]]) == 0
print(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
"""


def export_peak(bench: Bench, suffix: str) -> Iterator[dict[str, float]]:
    """Yield the peak of an export of bodies of 60 KB, 253 MB of them, in MiB."""
    for path, _ in stored(bench, 4, 4_200, 60_000):
        yield {"peak": int(last_line(EXPORT, path, f"{path}-export{suffix}")) / 1024}


def bare_rows(given: tuple[str, float], _: Path) -> Timed:
    """Do what any loop over records must do to print them: unpack, checksum, digest, split, encode, write."""
    header = struct.Struct(">iiiiiqqiq8sq8siqi")
    yield
    with open(next(Path(given[0], "commitlog").iterdir()), "rb") as file, open(os.devnull, "w") as out:
        log, at = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), 0
        while size := int.from_bytes(log[at : at + 4], "big"):
            raw = log[at : at + size]
            (_, magic, crc, queue, flag, offset, place, kind, born, host, stored, store, times, prepared, length) = (
                header.unpack_from(raw)
            )
            body, topic_end = raw[88 : 88 + length], 89 + length + raw[88 + length]
            words = raw[topic_end + 2 :].decode().replace("\2", "\1").split("\1")
            values = json.dumps(dict(zip(words[::2], words[1::2], strict=False)))
            out.write(
                f"{at},{size},{zlib.crc32(body) & 0x7FFFFFFF == crc},{magic:08x},{crc},{raw[89 + length : topic_end]!r}"
                f",{queue},{flag},{offset},{place},{kind},{born},{host.hex()},{stored},{store.hex()},{times},{prepared},"
                f"{b2a_base64(body, newline=False).decode()},{values},{hashlib.sha1(raw).hexdigest()}\n"
            )
            at += size
    yield given[1]


def bare_queues(given: tuple[str, float], _: Path) -> Timed:
    """Make the folders and files of the queues, with what is in them, by a loop over the calls of the system."""
    folder, entries = f"{given[0]}-bare", bytes(20)
    yield
    for topic in range(round(given[1] * MANY_QUEUES / 8)):
        os.makedirs(f"{folder}/T{topic}")
        for queue_id in range(8):
            queue = f"{folder}/T{topic}/{queue_id}"
            os.mkdir(queue)
            file = os.open(f"{queue}/00000000000000000000", os.O_CREAT | os.O_RDWR)
            os.ftruncate(file, 6_000_000)
            os.write(file, entries)
            os.close(file)
    yield given[1]
    shutil.rmtree(folder)


def command_cases() -> Iterator[Case]:
    dump = partial(command, words=("dump",))
    large, small = partial(stored, topics=4, full=253_000, size=890), partial(stored, topics=4, full=MANY, size=40)
    queues = partial(stored, topics=MANY_QUEUES // 8, full=MANY_QUEUES, size=50)
    cost = partial(Case, "commands", limit=True, cpu=True, unit="s")
    yield Case("commands", dump, "dump of 253 MB", target=Target(5, at_most=True), cpu=True, unit="s", setup=large)
    for detail, setup, most in (("messages of 1,000 B", large, 1.25), ("messages of 150 B", small, 1.35)):
        yield cost(dump, f"dump, {detail}", bare_rows, "a bare loop", Target(most, at_most=True), setup=setup)
    for suffix in (".jsonl", ".csv", ""):
        yield Case("commands", Part(from_setup, "peak"), f"export of bodies of 60 KB{suffix and f' to {suffix}'}, peak",
                   target=Target(300, at_most=True), unit="MiB", setup=partial(export_peak, suffix=suffix),
                   needs=("pyarrow",))  # fmt: skip
    for words, into, most in ((("salvage",), ("--into",), 4), (("snapshot", "--copy"), (), 10)):
        run = partial(command, words=words, into=into)
        yield cost(run, f"{words[0]} of 24,000 queues", bare_queues, "a bare loop that makes the files",
                   Target(most, at_most=True), setup=queues)  # fmt: skip


def cases() -> Iterator[Case]:
    progress_of = cache(lambda groups: partial(progress, groups=groups))
    for groups, words, detail, most in (
        (1, ("lag",), "1,000 rows", 0.3),
        (1, ("lag", "--by", "group"), "1,000 rows, by group", 0.3),
        (100, ("lag",), "100,000 rows", 1.5),
        (100, ("lag", "--by", "group"), "100,000 rows, by group", 0.5),
    ):
        ours, target = partial(process, words=words), Target(most, at_most=True)
        yield Case("lag", ours, f"{detail}, start included", target=target, unit="s", setup=progress_of(groups))
    rows: list[tuple[str, Run | Part, float, str, Setup]] = [
        (f"{TEN_MILLION:,} messages at that rate", partial(report_in_process, messages=TEN_MILLION), 60, "s", reported),
        (f"{MANY:,} messages, peak of the process", Part(from_setup, "peak"), 300, "MiB", report_peak),
        ("the demo's store", Part(report_process, "seconds"), 2, "s", demo),
    ]
    for detail, run, bound, unit, store in rows:
        yield Case("report", run, detail, target=Target(bound, at_most=True), unit=unit, setup=store,
                   needs=("pyarrow",))  # fmt: skip
    yield from command_cases()


CASES: Final = list(cases())

if __name__ == "__main__":
    main("diagnosis", __doc__, CASES)
