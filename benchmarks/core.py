"""The compiled core beside the Python code, and against peers and limits of the machine.

Both codes do the same work in processes that take turns, in processor time. Peers and limits run in turns with the
compiled core in this process, as in `benchmarks.store`, by the clock: the core must be on.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks import peers, store
from benchmarks.frame import CHECKOUT, SIZES, AbsentError, Bench, Case, Part, Run, Setup, Target, Timed, main
from benchmarks.peers import TOPIC, Load, make_load, make_messages
from benchmarks.store import BATCH, PULL
from librmq.columns import reader
from librmq.message.message import Message
from librmq.store import MessageStore

COUNT: Final = 51_200
NEEDS: Final = ("librmq_core", "isal", "pyarrow")


def single(opened: MessageStore, messages: Sequence[Message]) -> None:
    """Append each message."""
    for message in messages:
        opened.append(message)


def two_threads(opened: MessageStore, messages: Sequence[Message]) -> None:
    """Append each message, every second one in another thread."""
    threads = [threading.Thread(target=single, args=(opened, messages[number::2])) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def batches(opened: MessageStore, messages: Sequence[Message]) -> None:
    """Append the messages in batches."""
    for at in range(0, len(messages), BATCH):
        opened.append_batch(messages[at : at + BATCH])


def pulls(opened: MessageStore, messages: Sequence[Message]) -> None:
    """Read the whole queue, with bodies."""
    at = count = 0
    while at < len(messages):
        result = opened.read(TOPIC, 0, at, PULL)
        count += len([message.body for message in result.messages])
        at = result.next_offset
    assert count == len(messages)


def scan(opened: MessageStore, messages: Sequence[Message]) -> None:
    """Scan the whole log."""
    assert sum(1 for _ in opened.log.scan()) == len(messages)


def columns(opened: MessageStore, messages: Sequence[Message]) -> None:
    """Read the whole store as Arrow, with checksums."""
    assert sum(batch.num_rows for batch in reader(opened.path)) == len(messages)


Work = Callable[[MessageStore, Sequence[Message]], None]
WRITING: Final[list[tuple[str, Work, Target]]] = [
    ("single append", single, Target(3.5)),
    ("single append, two threads", two_threads, Target(5)),
    (f"batch append {BATCH}", batches, Target(2.3)),
]
READING: Final[list[tuple[str, Work, Target]]] = [
    ("scan with checksums", scan, Target(4)),
    (f"pull {PULL}, with bodies", pulls, Target(2)),
    ("all columns as Arrow", columns, Target()),
]


def rates(count: int, body_size: int) -> dict[str, float]:
    """Return messages a second of processor time by path, the better of two runs; the last store is read."""
    messages, figures = make_messages(count, body_size), dict[str, float]()

    def note(path: str, begin: float) -> None:
        figures[path] = max(figures.get(path, 0), count / (time.process_time() - begin))

    for path, work, _ in WRITING * 2:
        with tempfile.TemporaryDirectory() as folder, MessageStore.open(Path(folder) / "store") as opened:
            begin = time.process_time()
            work(opened, messages)
            opened.read(TOPIC, 0, count - 1, 1)
            opened.find_by_key(TOPIC, messages[-1].keys[0])
            note(path, begin)
            for name, read, _ in READING if work is batches else ():
                begin = time.process_time()
                read(opened, messages)
                note(name, begin)
    return figures


def rates_with(bench: Bench, folder: Path, *, switch: str, body_size: int) -> Any:
    """Return what `rates` returns in a process with the core on or off."""
    # The checkout comes last on the path, because an installed librmq may be the one to measure.
    program = (
        f"import json, sys; sys.path.append({str(CHECKOUT)!r}); from benchmarks import core; "
        f"print(json.dumps(core.rates({max(bench.count(COUNT), BATCH)}, {body_size})))"
    )
    variables = {**os.environ, "LIBRMQ_CORE": switch, "TMPDIR": str(folder)}
    done = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def with_core(bench: Bench, setup: Setup) -> Iterator[Any]:
    """Yield what another setup yields, if the core is on in this process."""
    with bench.folder() as folder, MessageStore.open(folder / "store") as opened:
        if not opened.core:
            raise AbsentError("the compiled core (LIBRMQ_CORE=on)")
    yield from setup(bench)


def by_threads(load: Load, folder: Path, *, work: Work, threads: int) -> Timed:
    """Append in one thread, whose rate counts twice, or in two."""
    with MessageStore.open(folder / "store") as opened:
        yield
        work(opened, load.messages)
        opened.read(TOPIC, 0, len(load.messages) - 1, 1)
        yield len(load.messages) * 2 / threads


def against_peers(detail: str, size: int) -> Iterator[Case]:
    """Yield the cases of a size that compare with the fastest peers, and with limits of the machine."""
    small = size == 128
    load = partial(with_core, setup=partial(make_load, body_size=size, count=80_000))
    stored = partial(with_core, setup=partial(store.readable, body_size=size, count=50_000))
    two, one = partial(by_threads, work=two_threads, threads=2), partial(by_threads, work=single, threads=1)
    table: list[tuple[str, Run, str, Run, Target, str, Setup]] = [
        ("single append", store.append, "LMDB nosync, writable map", partial(peers.lmdb, writemap=True), Target(3),
         "lmdb", load),
        ("single append", store.append, "raw write, unbuffered", peers.raw_write, Target(1.1 if small else None),
         "os", load),
        (f"batch append {BATCH}", store.append_batches, "LMDB nosync, 256 in putmulti",
         partial(peers.lmdb_putmulti, size=BATCH), Target(1.5), "lmdb", load),
        ("single append, two threads", two, "twice one thread", one, Target(0.75), "os", load),
        (f"pull {PULL}", store.pull, "raw slices of records", store.slice_records, Target(0.5 if small else 0.7),
         "os", stored),
        ("scan", store.scan, "raw crc32", store.crc32, Target(1.1 if small else 1.0), "os", stored),
    ]  # fmt: skip
    for name, run, against, peer, target, module, setup in table:
        unit, limit = "B/s" if name == "scan" else "msg/s", module == "os"
        yield Case(name, run, detail, peer, against, target, unit, setup, limit, needs=("librmq_core", module))


def cases() -> Iterator[Case]:
    """Yield all cases in the order of their table."""
    both = {
        detail: [partial(rates_with, switch=switch, body_size=size) for switch in ("on", "off")]
        for detail, size in SIZES.items()
    }
    for name, _, target in (*READING[:1], *WRITING, *READING[1:]):
        for detail, (on, off) in both.items():
            yield Case(name, Part(on, name), detail, Part(off, name), "Python", target, limit=True, needs=NEEDS)
    for detail, size in SIZES.items():
        yield from against_peers(detail, size)


CASES: Final = list(cases())

if __name__ == "__main__":
    main("core", __doc__, CASES)
