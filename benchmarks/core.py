"""The compiled core beside the Python code: the same work by two processes in turns, in processor time.

``python -m benchmarks.core [--rounds N] [--quick] [--write]``
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
from pathlib import Path
from typing import Final

from benchmarks.common import CHECKOUT, Bench, Measure, Row, Target, command, compare
from benchmarks.store import BATCH, PULL, SIZES, TOPIC, make_messages
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


WRITING: Final[dict[str, Work]] = {
    "single append": single,
    "single append, two threads": two_threads,
    f"batch append {BATCH}": batches,
}
READING: Final[dict[str, Work]] = {"scan with checksums": scan, f"pull {PULL}, with bodies": pulls}


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


def in_process(switch: str, count: int, scratch: Path) -> dict[str, float]:
    """Return the `rates` of a process with the core on or off."""
    variables = {**os.environ, "LIBRMQ_CORE": switch, "TMPDIR": str(scratch)}
    # The checkout comes last on the path, because an installed librmq may be the one to measure.
    program = (
        f"import json, sys; sys.path.append({str(CHECKOUT)!r}); "
        f"from benchmarks.core import rates; print(json.dumps(rates({count})))"
    )
    done = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True, check=True)
    made: dict[str, float] = json.loads(done.stdout)
    return made


def both(bench: Bench) -> list[Row]:
    """Compare all paths."""
    if not bench.has("librmq_core"):
        return []
    count = max(bench.count(COUNT), BATCH)
    measured = [
        (in_process("on", count, bench.scratch), in_process("off", count, bench.scratch)) for _ in range(bench.rounds)
    ]
    return [
        compare(path, case, "Python", [on[key] for on, _ in measured], [off[key] for _, off in measured], target)
        for path, target in TARGETS.items()
        for case in SIZES
        for key in [f"{path}|{case}"]
    ]


ROWS: Final[dict[str, Measure]] = {"core": both}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, show the table, and return the exit status."""
    return command("core", __doc__ or "", ROWS, ("librmq-core", "isal", "numpy"), arguments)


if __name__ == "__main__":
    sys.exit(main())
