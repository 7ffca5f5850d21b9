"""The transport of kombu beside kombu's own: messages put, and messages got and acknowledged, as Celery does both.

Each process has a connection and a queue of its own by ``SimpleQueue``, in one folder, database or server for all. The
processes begin a step together, and it ends with the slowest. librmq and the folder's files survive the process; Redis
and the memory of a process are as they are without settings. Bodies have 128 characters.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.frame import Bench, Case, Part, Target, main, program, with_server

BODY: Final = "x" * 128
COUNTS: Final = {"SQLAlchemy": 30, "filesystem": 600}
"""Messages of a process; the others get 2,000."""


def worker(url: str, folder: str, queue_name: str) -> None:
    """Put, or get and acknowledge, as many messages as each line of input says, and print when it is done."""
    import kombu

    import librmq.integrations.kombu  # noqa: F401  it registers librmq://

    names = ("data_folder_in", "data_folder_out", "control_folder")
    options = dict.fromkeys(names, folder) if url.startswith("filesystem") else {}
    with kombu.Connection(url, transport_options=options) as connection:
        queue = connection.SimpleQueue(queue_name)
        queue.put(BODY)
        queue.get(timeout=20).ack()
        print("ready", flush=True)
        for line in sys.stdin:
            kind, count = line.split()
            for _ in range(int(count)):
                if kind == "put":
                    queue.put(BODY)
                else:
                    queue.get(timeout=20).ack()
            print("done", flush=True)
        queue.close()


def rates(address: Callable[[Path], str], processes: int, count: int, bench: Bench, folder: Path) -> dict[str, float]:
    """Return messages a second of both steps, by all processes together."""
    share = bench.count(count) // processes or 1
    with ExitStack() as opened:
        workers = []
        for number in range(processes):
            workers.append(opened.enter_context(program("kombu.worker", address(folder), folder, f"queue{number}")))
            assert workers[-1].stdout.readline() == "ready\n"
        figures = {}
        for kind in ("put", "get and acknowledge"):
            begin = time.perf_counter()
            for process in workers:
                process.stdin.write(f"{kind.split()[0]} {share}\n")
                process.stdin.flush()
            for process in workers:
                assert process.stdout.readline() == "done\n"
            figures[kind] = share * processes / (time.perf_counter() - begin)
    return figures


redis_server: Final = partial(with_server, kind="Redis")
ADDRESSES: Final[dict[str, Callable[[Path], str]]] = {
    "librmq": lambda folder: f"librmq://{folder}/store",
    "filesystem": lambda folder: "filesystem://",
    "SQLAlchemy": lambda folder: f"sqla+sqlite:///{folder}/queue.db",
    "memory": lambda folder: "memory://",
}


def _cases() -> Iterator[Case]:
    for processes in (1, 4):

        def in_folder(name: str, bench: Bench, folder: Path, *, many: int = processes) -> dict[str, float]:
            return rates(ADDRESSES[name], many, COUNTS.get(name, 2_000), bench, folder)

        def ours(both: tuple[Bench, str], folder: Path, *, many: int = processes) -> dict[str, float]:
            return rates(ADDRESSES["librmq"], many, 2_000, both[0], folder)

        def redis(both: tuple[Bench, str], folder: Path, *, many: int = processes) -> dict[str, float]:
            return rates(lambda _: both[1], many, 2_000, both[0], folder)

        runs = {name: partial(in_folder, name) for name in ADDRESSES}
        words = "one process" if processes == 1 else "four processes"
        for kind in ("put", "get and acknowledge"):
            for name in ("filesystem", "SQLAlchemy", "memory"):
                target = Target(3) if name == "filesystem" else Target()
                if name != "memory" or processes == 1:
                    yield Case(kind, Part(runs["librmq"], kind), words, Part(runs[name], kind), name, target,
                               needs=("kombu", "sqlalchemy"))  # fmt: skip
            yield Case(kind, Part(ours, kind), words, Part(redis, kind), "Redis", Target(0.5), setup=redis_server,
                       needs=("kombu", "redis"))  # fmt: skip


CASES: Final = list(_cases())

if __name__ == "__main__":
    main("kombu", __doc__, CASES)
