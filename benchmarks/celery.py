"""Workers of Celery: tasks a second of a queue that is full, the latency of an idle worker, and what it costs.

A process sends the tasks and ends; then ``celery worker`` begins, which so owns the store of librmq. The rate
counts from the beginning of its first task to that of its last. In the rows "another process owns" a third process,
such as a web server, has the store: 1.5 times Redis is an aim there for a worker that has one task at a time until it
ends, because each task waits for an answer of that process, 0.2 of 0.55 ms. A task notes its time in a file. Redis
keeps nothing on disk.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks.frame import CHECKOUT, Bench, Case, Part, Target, from_setup, main
from benchmarks.kombu import ADDRESSES, redis_server

COUNTS: Final = {"SQLAlchemy": 200}
"""Tasks of a run; the others get 3,000, of which the first hundreds take longer."""
RECORD: Final = 16
_IDLE_S: Final = 5.0
_PATH: Final = f"import sys; sys.path.append({str(CHECKOUT)!r})"  # last, so that the installed librmq is measured
_WORKER: Final = f"{_PATH}; sys.argv[0] = 'celery'; from celery.__main__ import main; main()"
_SENDER: Final = f"{_PATH}; from benchmarks.celery_tasks import send; send(int(sys.argv[1]), float(sys.argv[2]))"
_OWNER: Final = f"{_PATH}; import librmq; librmq.share(sys.argv[1]); print('ready', flush=True); sys.stdin.read()"


class Celery:
    """A broker's URL, with programs that send to it and work for it."""

    def __init__(self, url: str, folder: Path, prefetch: int, *, late: bool) -> None:
        self.times = folder / "times"
        self._folder = folder
        self._environment = {
            **os.environ,
            "CELERY_BROKER": url,
            "CELERY_FOLDER": str(folder),
            "CELERY_LATE": "1" if late else "",
            "CELERY_PREFETCH": str(prefetch),
            "CELERY_TIMES": str(self.times),
        }

    def send(self, count: int, pause_s: float = 0) -> None:
        """Send tasks from a process of its own."""
        subprocess.run([sys.executable, "-c", _SENDER, str(count), str(pause_s)], env=self._environment, check=True)

    @contextmanager
    def worker(self, concurrency: int, pool: str) -> Iterator[int]:
        """Start a worker, and end it; yield its process."""
        words = ("-A", "benchmarks.celery_tasks", "worker", "-c", str(concurrency), "-P", pool, "-l", "ERROR")
        with open(self._folder / "log", "w") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", _WORKER, *words],
                cwd=self._folder,
                env=self._environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            yield process.pid
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)

    def wait(self, count: int, begin: int = 0) -> list[tuple[int, int]]:
        """Return when tasks began and were sent, in ns, once as many have run after the first ``begin``."""
        deadline = time.monotonic() + 300
        while not self.times.exists() or self.times.stat().st_size < (begin + count) * RECORD:
            if time.monotonic() > deadline:
                raise TimeoutError(f"a worker does not do its tasks: {(self._folder / 'log').read_text()}")
            time.sleep(0.02)
        data = self.times.read_bytes()
        rows = [data[at : at + RECORD] for at in range(begin * RECORD, len(data), RECORD)]
        return [(int.from_bytes(row[:8], "big"), int.from_bytes(row[8:], "big")) for row in rows]


@contextmanager
def owner(store: Path) -> Iterator[None]:
    """Let a process of its own share a store."""
    with subprocess.Popen([sys.executable, "-c", _OWNER, str(store)], stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield
        process.communicate()


def rate(celery: Celery, concurrency: int, count: int, pool: str = "prefork") -> float:
    """Return tasks a second."""
    celery.send(count)
    with celery.worker(concurrency, pool):
        begins = [begin for begin, _ in celery.wait(count)]
    return (count - 1) * 1e9 / max(max(begins) - min(begins), 1)


def _ticks(process: int) -> int:
    """Return the processor time of a process and its children."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return int(fields[11]) + int(fields[12]) + sum(_ticks(int(child)) for child in children)


def idle(celery: Celery, bench: Bench) -> dict[str, float]:
    """Return the median latency of tasks that come one by one, and the processor time of a worker without any."""
    count = max(bench.count(100), 5)
    with celery.worker(1, "prefork") as process:
        celery.send(1)
        celery.wait(1)
        celery.send(count, 0.03)
        latency_s = statistics.median(begin - sent for begin, sent in celery.wait(count, 1)) / 1e9
        time.sleep(0.5)
        before, seconds = _ticks(process), _IDLE_S * bench.scale
        time.sleep(seconds)
        used_s = (_ticks(process) - before) / os.sysconf("SC_CLK_TCK")
    return {"latency": latency_s, "idle": 100 * used_s / seconds}


def _resident(process: int) -> float:
    """Return the memory of a process in MiB, without the pages of the mapped files, which the system takes back."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024


def growth(bench: Bench) -> Iterator[float]:
    """Yield by how much 100,000 tasks let a worker grow that owns the store, after the first 20,000."""
    first, count = bench.count(20_000), bench.count(100_000)
    with bench.folder() as folder:
        celery = Celery(ADDRESSES["librmq"](folder), folder, 4, late=False)
        with celery.worker(2, "prefork") as process:
            celery.send(first)
            celery.wait(first)
            before = _resident(process)
            celery.send(count)
            celery.wait(count, first)
            yield max(_resident(process) - before, 0)


class Work(NamedTuple):
    """A run: a worker for a full queue."""

    broker: str
    concurrency: int
    prefetch: int
    late: bool
    pool: str = "prefork"
    is_peer: bool = False
    """Whether another process owns the store."""

    def run(self, both: tuple[Bench, str], folder: Path) -> float:
        """Return tasks a second."""
        bench, redis = both
        url = redis if self.broker == "Redis" else ADDRESSES[self.broker](folder)
        celery = Celery(url, folder, self.prefetch, late=self.late)
        count = max(bench.count(COUNTS.get(self.broker, 3_000)), 2)
        with owner(folder / "store") if self.is_peer else nullcontext():
            return rate(celery, self.concurrency, count, self.pool)


def _idle(broker: str, both: tuple[Bench, str], folder: Path) -> dict[str, float]:
    url = both[1] if broker == "Redis" else ADDRESSES[broker](folder)
    return idle(Celery(url, folder, 4, late=False), both[0])


def _works() -> Iterator[tuple[str, Work, Target]]:
    for concurrency in (1, 2):
        for prefetch in (1, 4):
            for late in (False, True):
                words = f"-c {concurrency}, prefetch {prefetch}, {'late' if late else 'early'}"
                yield words, Work("librmq", concurrency, prefetch, late), Target(1.5)
                work = Work("librmq", concurrency, prefetch, late, is_peer=True)
                waits = (concurrency, prefetch, late) == (1, 1, True)
                yield f"{words}, another process owns", work, Target(1.25, 1.5) if waits else Target(1.5)
    for pool in ("threads", "gevent"):
        words, work = f"-P {pool}, -c 2, prefetch 4, late", Work("librmq", 2, 4, True, pool)
        yield words, work, Target(1.5)
        yield f"{words}, another process owns", work._replace(is_peer=True), Target(1.5)


def _cases() -> Iterator[Case]:
    runs: dict[Work, Callable[[tuple[Bench, str], Path], float]] = {}

    def run(work: Work) -> Callable[[tuple[Bench, str], Path], float]:
        return runs.setdefault(work, work.run)  # one run a round, in however many rows

    for words, work, target in _works():
        peer = run(work._replace(broker="Redis", is_peer=False))
        needs = ("celery", "redis", *(["gevent"] if work.pool == "gevent" else []))
        yield Case("tasks", run(work), words, peer, "Redis", target, "tasks/s", redis_server, needs=needs)
    work = Work("librmq", 2, 4, False)
    for name in ("filesystem", "SQLAlchemy"):
        peer = run(work._replace(broker=name))
        yield Case("tasks", run(work), "-c 2, prefetch 4, early", peer, name, Target(), "tasks/s", redis_server,
                   needs=("celery", "redis", "sqlalchemy"))  # fmt: skip
    ours, redis = partial(_idle, "librmq"), partial(_idle, "Redis")
    needs = ("celery", "redis")
    yield Case("latency of an idle worker", Part(ours, "latency"), "-c 1", Part(redis, "latency"), "Redis",
               Target(1, at_most=True), "s", redis_server, needs=needs)  # fmt: skip
    yield Case("processor time of an idle worker", Part(ours, "idle"), "-c 1", target=Target(1, at_most=True),
               unit="% of a core", setup=redis_server, needs=needs)  # fmt: skip
    yield Case("growth of the owner by 100,000 tasks", from_setup, "-c 2", target=Target(8, at_most=True), unit="MiB",
               setup=growth, needs=("celery",))  # fmt: skip


CASES: Final = list(_cases())

if __name__ == "__main__":
    main("celery", __doc__, CASES)
