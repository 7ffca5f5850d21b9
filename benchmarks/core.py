"""The compiled core beside the Python code, and against peers and limits of the machine.

Both codes do the same work in processes that take turns, in processor time. Peers and limits run in turns with the
compiled core in this process, as in `benchmarks.store`, by the clock: the core must be on.

Two threads share the interpreter's lock, so that they append at most as fast as one: half of twice one thread. More
would be possible only for what runs without the lock. The core keeps it: checksum and copy of a body of 16 KiB take
one microsecond, and handing the lock to another thread takes six. So two threads that free it for checksum and copy of
such a record, and do nothing else, reach less than half of twice one thread. Beside Python's two threads 3 is required,
less than beside its one: the core's two also wait for each other's lock.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import tempfile
import threading
import zlib
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

from benchmarks import peers, store
from benchmarks.frame import SIZES, AbsentError, Bench, Case, Part, Run, Setup, Target, Timed, last_line, main, measure
from benchmarks.peers import TOPIC, Load, make_load
from benchmarks.store import BATCH, PULL
from librmq.message.message import Message
from librmq.store import MessageStore

COUNT: Final = 51_200
NEEDS: Final = ("librmq.runtime._core", "isal")


def in_threads(load: Load, folder: Path, *, threads: int) -> Timed:
    """Append in threads, in turns; the rate of one counts twice."""
    with MessageStore.open(folder / "store") as opened:

        def run(share: Sequence[Message]) -> None:
            for message in share:
                opened.append(message)

        started = [threading.Thread(target=run, args=(load.messages[at::threads],)) for at in range(threads)]
        yield
        for thread in started:
            thread.start()
        for thread in started:
            thread.join()
        opened.read(TOPIC, 0, len(load.messages) - 1, 1)
        yield len(load.messages) * 2 / threads


def copy_in_threads(load: Load, folder: Path, *, threads: int) -> Timed:
    """Sum and copy records into a mapped file in memory, freeing the interpreter's lock; one thread counts twice."""
    ends = list(accumulate(map(len, load.raw), initial=0))
    records = list(zip(ends, load.raw, strict=False))
    copy = ctypes.CDLL(None).memmove
    copy.argtypes, copy.restype = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t), None
    with (folder / "raw").open("w+b") as file:
        file.write(b"".join(load.raw))
        file.flush()
        mapped = mmap.mmap(file.fileno(), ends[-1])
    mapped[:] = mapped[:]  # no first touch of a page is measured
    begin = ctypes.addressof(ctypes.c_char.from_buffer(mapped))

    def run(share: Sequence[tuple[int, bytes]]) -> None:
        for place, raw in share:
            zlib.crc32(raw)
            copy(begin + place, raw, len(raw))

    started = [threading.Thread(target=run, args=(records[at::threads],)) for at in range(threads)]
    yield
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    yield len(records) * 2 / threads


def scan(stored: Any, folder: Path) -> Timed:
    """Scan the whole log as `benchmarks.store` does; the unit is a record."""
    yield
    size = sum(map(itemgetter(1), stored.store.log.scan()))
    yield stored.count
    assert size == stored.end


two_threads, one_thread = partial(in_threads, threads=2), partial(in_threads, threads=1)
BOTH: Final[list[tuple[str, Run, Target, bool]]] = [
    ("scan with checksums", scan, Target(4), True),
    ("single append", store.append, Target(3.5), False),
    ("single append, two threads", two_threads, Target(3), False),
    (f"batch append {BATCH}", store.append_batches, Target(2.3), False),
    (f"pull {PULL}, with bodies", store.pull, Target(2), True),
]


def rates(scale: float, body_size: int) -> dict[str, float]:
    """Return messages a second of processor time by path."""
    load = partial(make_load, body_size=body_size, count=COUNT)
    stored = partial(store.readable, body_size=body_size, count=COUNT)
    cases = [Case(name, run, setup=stored if reads else load, cpu=True) for name, run, _, reads in BOTH]
    with tempfile.TemporaryDirectory() as scratch:
        rows, _ = measure(cases, Bench(1, Path(scratch), scale))
    return {row.name: row.measured for row in rows}


def rates_with(bench: Bench, folder: Path, *, switch: str, body_size: int) -> Any:
    """Return what `rates` returns in a process with the core on or off."""
    code = f"import json; from benchmarks import core; print(json.dumps(core.rates({bench.scale}, {body_size})))"
    return json.loads(last_line(code, LIBRMQ_CORE=switch, TMPDIR=str(folder)))


def with_core(bench: Bench, setup: Setup) -> Iterator[Any]:
    """Yield what another setup yields, if the core is on in this process."""
    with bench.folder() as folder, MessageStore.open(folder / "store") as opened:
        if opened.core != "compiled core":
            raise AbsentError("the compiled core (LIBRMQ_CORE=on)")
    yield from setup(bench)


def against_peers(detail: str, size: int) -> Iterator[Case]:
    """Yield the cases of a size that compare with the fastest peers, and with limits of the machine."""
    small = size == 128
    load = partial(with_core, setup=partial(make_load, body_size=size, count=80_000))
    stored = partial(with_core, setup=partial(store.readable, body_size=size, count=50_000))
    table: list[tuple[str, Run, str, Run, Target, str, Setup]] = [
        ("single append", store.append, "LMDB nosync, writable map", partial(peers.lmdb, writemap=True),
         Target(4) if small else store.LARGER["LMDB nosync, writable map"], "lmdb", load),
        ("single append", store.append, "raw write, unbuffered", peers.raw_write, Target(0.7 if small else 0.9),
         "os", load),
        (f"batch append {BATCH}", store.append_batches, "LMDB nosync, 256 in putmulti",
         partial(peers.lmdb_putmulti, size=BATCH), Target(1.5), "lmdb", load),
        ("single append, two threads", two_threads, "twice one thread", one_thread, Target(reach=0.5), "os", load),
        (f"pull {PULL}", store.pull, "raw slices of records", store.slice_records, Target(0.5 if small else 0.7),
         "os", stored),
        ("scan", store.scan, "raw crc32", store.crc32, Target(1.1 if small else 1.0), "os", stored),
    ]  # fmt: skip
    for name, run, against, peer, target, module, setup in table:
        unit, limit = "B/s" if name == "scan" else "msg/s", module == "os"
        yield Case(name, run, detail, peer, against, target, unit, setup, limit, needs=("librmq.runtime._core", module))


def cases() -> Iterator[Case]:
    both = {
        detail: [partial(rates_with, switch=switch, body_size=size) for switch in ("on", "off")]
        for detail, size in SIZES.items()
    }
    for name, _, target, _reads in BOTH:
        for detail, (on, off) in both.items():
            yield Case(name, Part(on, name), detail, Part(off, name), "Python", target, limit=True, needs=NEEDS)
    for detail, size in SIZES.items():
        yield from against_peers(detail, size)
    load = partial(with_core, setup=partial(make_load, body_size=16 << 10, count=8_000))
    copy_one, copy_two = (partial(copy_in_threads, threads=threads) for threads in (1, 2))
    for name, run, peer, target in (
        ("single append, two threads", two_threads, one_thread, Target(0.45, 0.5)),
        ("checksum and copy alone, two threads", copy_two, copy_one, Target()),
    ):
        yield Case(name, run, "16 KiB", peer, "twice one thread", target, setup=load, limit=True,
                   needs=("librmq.runtime._core",))  # fmt: skip


CASES: Final = list(cases())

if __name__ == "__main__":
    main("core", __doc__, CASES)
