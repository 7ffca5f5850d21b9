"""Cost against size: what a call costs while a store or the number of its queues grows.

Costs are processor time of the whole process, the least of the rounds, so that other work on the machine counts little.
Stores above a million messages are sparse: only their newest messages have bytes, the older files are holes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from benchmarks.frame import Bench, Case, Run, Setup, Target, Timed, main
from librmq.config import StoreConfig
from librmq.consumequeue_entries import ENTRY
from librmq.message.message import Message
from librmq.store import MessageStore

TOPIC: Final = "orders"
BODY: Final = b"x" * 128
BATCH: Final = 256
TAIL: Final = 1 << 18
"""Number of messages of a sparse store that have bytes, more than its last three files of the log."""
DENSE: Final = 1_000_000
"""The largest store without holes."""
CONFIG: Final = StoreConfig(
    commitlog_file_size=16 << 20, max_hash_slot_num=100_000, max_index_num=200_000, disk_refuse_ratio=100
)
CALLS: Final = 4_096
RECORD: Final = 260
"""About the size of a record."""


def make_messages(first: int, count: int) -> list[Message]:
    """Make messages with one key each."""
    return [Message(TOPIC, BODY, tags="paid", keys=f"k{number:09d}") for number in range(first, first + count)]


# ------------------------------------------------------------------------------------------------------------- messages


def filled(bench: Bench, count: int) -> Iterator[Path]:
    """Yield a closed store of some messages; if it is large, only the newest have bytes."""
    count = bench.count(count)
    holes, size, files = (max(0, count - TAIL) if count > DENSE else 0), CONFIG.commitlog_file_size, 0
    with bench.folder() as folder:
        path = folder / "store"
        with MessageStore.open(path, CONFIG) as store:
            if holes:
                files = holes * RECORD // size
                store.log.begin_at(files * size)
                lane = store.appender.lane(TOPIC, 0)
                lane.queue.append_many(holes - 1, ENTRY.pack(0, RECORD, 0))  # of a message that was deleted
                lane.next_queue_offset, store.appender.dispatcher.followed = holes, files * size
            for first in range(holes, count, BATCH):
                store.append_batch(make_messages(first, min(BATCH, count - first)))
        queue = path / "consumequeue" / TOPIC / "0"
        make_holes(path / "commitlog", size, files * size)
        if holes:
            name = min(os.listdir(queue))
            make_holes(queue, (queue / name).stat().st_size, int(name))
        yield path


def make_holes(folder: Path, size: int, end: int) -> None:
    """Make files of zeros without blocks in front of those that a folder has."""
    for start in range(0, end, size):
        with open(folder / f"{start:020d}", "wb") as file:
            file.truncate(size)


def opened(bench: Bench, count: int) -> Iterator[Any]:
    """Yield such a store open, with its first and last message that have bytes."""
    for path in filled(bench, count):
        with MessageStore.open(path, CONFIG) as store:
            end = bench.count(count)
            yield SimpleNamespace(store=store, first=max(0, end - TAIL), end=end, calls=bench.count(CALLS))


def append(stored: Any, _: Path) -> Timed:
    messages = make_messages(stored.store.queues[TOPIC, 0].max_offset, stored.calls)
    yield
    for message in messages:
        stored.store.append(message)
    yield stored.calls


def pull(stored: Any, _: Path) -> Timed:
    count, last = 0, max(stored.end - 32, 1)
    yield
    for at in range(stored.first, last, max(1, (last - stored.first) // 128)):
        count += len([message.body for message in stored.store.read(TOPIC, 0, at, 32).messages])
    yield count


def look_up(stored: Any, _: Path) -> Timed:
    places = range(stored.first, stored.end, max(1, (stored.end - stored.first) // 256))
    yield
    count = sum(len(stored.store.find_by_key(TOPIC, f"k{at:09d}", max_messages=1)) for at in places)
    yield count
    assert count == len(places)


def open_closed(path: Path, _: Path) -> Timed:
    yield
    store = MessageStore.open(path, CONFIG)
    yield 1
    store.close()


def open_killed(path: Path, _: Path) -> Timed:
    """Open a store that was killed after some appends."""
    store = MessageStore.open(path, CONFIG)
    store.append_batch([Message("last", BODY)] * BATCH)
    store.abandon()
    yield
    store = MessageStore.open(path, CONFIG)
    yield 1
    assert store.recovered
    store.close()


# --------------------------------------------------------------------------------------------------------------- queues


def queues(bench: Bench, count: int) -> Iterator[tuple[Path, list[tuple[str, int]]]]:
    """Yield a closed store with a message in each queue, and its queues."""
    places = [(f"T{number // 16}", number % 16) for number in range(bench.count(count))]
    with bench.folder() as folder:
        with MessageStore.open(folder / "store", CONFIG) as store:
            for topic, queue_id in places:
                store.append(Message(topic, BODY), queue_id)
        yield folder / "store", places


def queues_open(bench: Bench, count: int) -> Iterator[Any]:
    """Yield such a store open."""
    for path, places in queues(bench, count):
        with MessageStore.open(path, CONFIG) as store:
            yield SimpleNamespace(store=store, places=places, calls=bench.count(CALLS))


def append_dealt(dealt: Any, _: Path) -> Timed:
    """Append to the queues in turns, far from each other."""
    turns = [dealt.places[number * 7919 % len(dealt.places)] for number in range(dealt.calls)]
    messages = [(Message(topic, BODY), queue_id) for topic, queue_id in turns]
    yield
    for message, queue_id in messages:
        dealt.store.append(message, queue_id)
    dealt.store.appender.drain()
    yield len(messages)


def pull_dealt(dealt: Any, _: Path) -> Timed:
    yield
    for turn in range(0, 7919 * 500, 7919):
        dealt.store.read(*dealt.places[turn % len(dealt.places)], 0, 1)
    yield 500


def of_store(run: Run) -> Run:
    """Return a run of a store with queues that needs its folder only."""
    return lambda stored, folder: run(stored[0], folder)


MESSAGES: Final = (10_000, 100_000, 1_000_000, 10_000_000, 100_000_000)
QUEUES: Final = (1, 10, 100, 1_000, 10_000, 50_000)
STORED, DEALT = "messages in the store", "queues"
CURVES: Final[list[tuple[str, str, str, Sequence[int], Callable[..., Any], Run]]] = [
    ("one queue: lookup by key", STORED, "µs", MESSAGES, opened, look_up),
    ("one queue: pull of 32, a message", STORED, "µs", MESSAGES, opened, pull),
    ("one queue: append", STORED, "µs", MESSAGES, opened, append),
    ("opening the store: closed cleanly", STORED, "ms", MESSAGES, filled, open_closed),
    ("opening the store: after a kill", STORED, "ms", MESSAGES, filled, open_killed),
    ("calls dealt out over queues: append", DEALT, "µs", QUEUES, queues_open, append_dealt),
    ("calls dealt out over queues: pull of one message", DEALT, "µs", QUEUES, queues_open, pull_dealt),
    ("opening a store of queues: closed cleanly", DEALT, "ms", QUEUES, queues, of_store(open_closed)),
    ("opening a store of queues: after a kill", DEALT, "ms", QUEUES, queues, of_store(open_killed)),
]  # fmt: skip


def cases() -> Iterator[Case]:
    setups: dict[tuple[Any, int], Setup] = {}
    for name, size, unit, counts, setup, run in CURVES:
        target = Target(300, at_most=True) if name == "opening the store: closed cleanly" else Target()
        for count in counts:
            shared = setups.setdefault((setup, count), partial(setup, count=count))
            yield Case(name, run, f"{size}: {count:,}", target=target, unit=unit, setup=shared, cpu=True, figure=min)


CASES: Final = list(cases())

if __name__ == "__main__":
    main("growth", __doc__, CASES)
