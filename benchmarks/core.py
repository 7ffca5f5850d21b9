"""The compiled core beside the Python code, and against peers and limits of the machine.

Both codes do the same work by two processes in turns, in processor time. Peers and limits run in turns with the
compiled core in one process, as in `benchmarks.store`, by the clock.

``python -m benchmarks.core [--rounds N] [--rows core,peers] [--quick] [--write]``
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from benchmarks import peers, store
from benchmarks.common import CHECKOUT, Bench, Measure, Row, Stopwatch, Target, command, compare
from benchmarks.store import BATCH, PULL, SIZES, TOPIC, make_messages
from librmq.columns import reader
from librmq.message.message import Message
from librmq.store import MessageStore

Work = Callable[[MessageStore, Sequence[Message]], None]
"""Work on a store with these messages."""

COUNT: Final = 51_200
TARGETS: Final = {
    "scan with checksums": Target(4),
    "single append": Target(3.5),
    "single append, two threads": Target(5),
    f"batch append {BATCH}": Target(2.3),
    f"pull {PULL}, with bodies": Target(2),
    "all columns as Arrow": Target(),
}


def single(store: MessageStore, messages: Sequence[Message]) -> None:
    """Append each message."""
    append = store.append
    for message in messages:
        append(message)


def two_threads(store: MessageStore, messages: Sequence[Message]) -> None:
    """Append each message, every second one in another thread."""
    threads = [threading.Thread(target=single, args=(store, messages[number::2])) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def batches(store: MessageStore, messages: Sequence[Message]) -> None:
    """Append the messages in batches."""
    for at in range(0, len(messages), BATCH):
        store.append_batch(messages[at : at + BATCH])


def pulls(store: MessageStore, messages: Sequence[Message]) -> None:
    """Read the whole queue, with bodies."""
    at = found = 0
    while at < len(messages):
        result = store.read(TOPIC, 0, at, PULL)
        found += len([message.body for message in result.messages])
        at = result.next_offset
    if found != len(messages):
        raise RuntimeError(f"{found} of {len(messages)} messages were read")


def scan(store: MessageStore, messages: Sequence[Message]) -> None:
    """Scan the whole log."""
    if sum(1 for _ in store.log.scan()) != len(messages):
        raise RuntimeError("a scan found another number of records")


def columns(store: MessageStore, messages: Sequence[Message]) -> None:
    """Read the whole store as Arrow, with checksums."""
    if sum(batch.num_rows for batch in reader(store.path)) != len(messages):
        raise RuntimeError("a read found another number of messages")


WRITING: Final[dict[str, Work]] = {
    "single append": single,
    "single append, two threads": two_threads,
    f"batch append {BATCH}": batches,
}
COLUMNS: Final = "all columns as Arrow"
READING: Final[dict[str, Work]] = {"scan with checksums": scan, f"pull {PULL}, with bodies": pulls, COLUMNS: columns}


def rates(count: int) -> dict[str, float]:
    """Return messages a second of processor time, by path and size; the better of two runs."""
    found: dict[str, float] = {}
    for case, size in SIZES.items():
        messages = make_messages(size, count)
        for _ in range(2):
            for path, work in WRITING.items():
                with_store(work, messages, found, path, case)
    return found


def with_store(work: Work, messages: Sequence[Message], found: dict[str, float], path: str, case: str) -> None:
    """Measure a path of writing in a fresh store, until everything can be found, then paths of reading."""

    def note(path: str, begin: float) -> None:
        name = f"{path}|{case}"
        found[name] = max(found.get(name, 0), len(messages) / (time.process_time() - begin))

    folder = tempfile.mkdtemp()
    try:
        with MessageStore.open(Path(folder) / "store") as store:
            begin = time.process_time()
            work(store, messages)
            store.read(TOPIC, 0, len(messages) - 1, 1)
            store.find_by_key(TOPIC, messages[-1].keys[0])
            note(path, begin)
            for reading, read in READING.items() if work is batches else ():
                begin = time.process_time()
                read(store, messages)
                note(reading, begin)
    finally:
        shutil.rmtree(folder)


def in_process(switch: str, call: str, scratch: Path) -> Any:
    """Return what a call of this module returns in a process with the core on or off."""
    variables = {**os.environ, "LIBRMQ_CORE": switch, "TMPDIR": str(scratch)}
    # The checkout comes last on the path, because an installed librmq may be the one to measure.
    program = (
        f"import json, sys; sys.path.append({str(CHECKOUT)!r}); "
        f"from benchmarks import core; print(json.dumps(core.{call}))"
    )
    done = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def both(bench: Bench) -> list[Row]:
    """Compare all paths."""
    if not bench.has("librmq_core"):
        return []
    call = f"rates({max(bench.count(COUNT), BATCH)})"
    measured = [
        (in_process("on", call, bench.scratch), in_process("off", call, bench.scratch)) for _ in range(bench.rounds)
    ]
    return [
        compare(path, case, "Python", [on[key] for on, _ in measured], [off[key] for _, off in measured], target)
        for path, target in TARGETS.items()
        for case in SIZES
        for key in [f"{path}|{case}"]
    ]


def against_peers(bench: Bench) -> list[Row]:
    """Compare the compiled core with the fastest peers, and with limits of the machine."""
    if not bench.has("librmq_core"):
        return []
    found = in_process("on", f"peer_rows({bench.rounds}, {str(bench.scratch)!r}, {bench.scale})", bench.scratch)
    bench.absent.update(found["absent"])
    return [Row(**{**row, "target": Target(**row["target"])}) for row in found["rows"]]


def peer_rows(rounds: int, scratch: str, scale: float) -> dict[str, Any]:
    """Return the rows of `against_peers` and the packages that are absent, as JSON has them; the core must be on."""
    bench = Bench(rounds, Path(scratch), scale)
    rows: list[Row] = []
    for case, size in SIZES.items():
        single_peers = {
            "LMDB nosync, writable map": peers.Peer(
                "lmdb", lambda folder, records: peers.lmdb_append(folder, records, writemap=True), Target(3)
            ),
            "raw write, unbuffered": peers.Peer(
                "os", peers.raw_write, Target(1.1) if size == 128 else Target(), limit=True
            ),
        }
        batch_peers = {
            "LMDB nosync, 256 in putmulti": peers.Peer(
                "lmdb", lambda folder, records: peers.lmdb_bulk(folder, records, BATCH), Target(1.5)
            )
        }
        load = store.make_load(bench, size, 80_000)
        rows += store.against_peers(bench, "single append", case, load, store.append_all, single_peers)
        rows += store.against_peers(bench, f"batch append {BATCH}", case, load, store.append_batches, batch_peers)
        rows += two_producers(bench, case, load)
        limits = {
            "raw slices of records": Target(0.5 if size == 128 else 0.7),
            "raw crc32": Target(1.1 if size == 128 else 1.0),
        }
        read = [*store.pull(bench, case, size), *store.scan(bench, case, size)]
        rows += [replace(row, target=limits[row.against]) for row in read if row.against in limits]
    return {"rows": [asdict(row) for row in rows], "absent": sorted(bench.absent)}


def two_producers(bench: Bench, case: str, load: store.Load) -> list[Row]:
    """Compare two threads that append with twice the rate of one."""

    def by(work: Work, folder: Path) -> float:
        with MessageStore.open(folder / "store") as opened, Stopwatch() as watch:
            work(opened, load.messages)
            opened.read(TOPIC, 0, load.count - 1, 1)
        return load.count / watch.seconds

    rates = bench.interleave(
        {"two": lambda folder: by(two_threads, folder), "one": lambda folder: 2 * by(single, folder)}
    )
    return [
        compare("single append, two threads", case, "twice one thread", rates["two"], rates["one"], Target(0.75),
                limit=True)
    ]  # fmt: skip


ROWS: Final[dict[str, Measure]] = {"core": both, "peers": against_peers}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, show the table, and return the exit status."""
    return command("core", __doc__ or "", ROWS, ("librmq-core", "isal", "numpy", "lmdb", "pyarrow"), arguments)


if __name__ == "__main__":
    sys.exit(main())
