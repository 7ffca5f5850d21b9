"""Time that one append or one message takes at worst, at a fixed rate: percentiles up to the slowest of all.

Each call has a time at which it is due, and its latency counts from then: where one call is late, so are those that
wait behind it, and none is left out (coordinated omission). "One in: 10,000" is the latency that one call of ten
thousand exceeds, p99.99; the last line is the maximum. The first tenth of the calls, in which a new store creates its
files, does not count.

A call of nothing shows what the machine takes away: hypervisor, other programs, late timers. A raw write copies a
record into a mapped file whose blocks exist, as an append does with its record. A bare queue passes numbers to another
thread, as a send does with its message. The machine has to be idle: a thread that waits for a core adds milliseconds
to each of these. Until a call is due, its thread sleeps, so that other threads have the interpreter and a core.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import queue
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.frame import Bench, Case, Part, Run, Target, main
from benchmarks.peers import make_messages
from librmq.broker import Broker
from librmq.client.producer import Producer
from librmq.config import StoreConfig
from librmq.consumer import DeliveredMessage, PushConsumer
from librmq.message.message import Message
from librmq.store import MessageStore

RATES: Final = 10_000, 50_000
SECONDS: Final = 2
SPIN_NS: Final = 20_000
"""A sleep ends this long before a call is due, because it ends too late."""
SHARES: Final = 2, 100, 1_000, 10_000
SLOWEST: Final = 10_000
MAXIMUM: Final = "slowest"
BODY_SIZE: Final = 1024
TARGETS: Final = {
    (10_000, "send to listener", 2): Target(reach=100, at_most=True),
    (50_000, "send to listener", 100): Target(reach=5_000, at_most=True),
}
"""Aims in µs, by calls a second, case and share."""
BESIDE: Final = (
    (10_000, "append", "raw mapped write", SLOWEST, 1),
    (10_000, "send to listener", "bare queue to a thread", 2, 2.1),
    (10_000, "send to listener", "bare queue to a thread", SLOWEST, 2),
    (50_000, "send to listener", "bare queue to a thread", SLOWEST, 4),
)
"""What half of the calls, or the slowest of 10,000, may take: a multiple of the machine's limit in the same rounds."""


def at_rate(call: Callable[[int], object], count: int, rate: int, *, spin_ns: int = SPIN_NS) -> array[int]:
    """Make a call when it is due, or as soon as the one before it has ended; return when each was due, in ns."""
    clock, sleep, due = time.perf_counter_ns, time.sleep, array("q")
    wake_in_time()
    begin = clock() + 1_000_000
    for number in range(count):
        at = begin + number * 1_000_000_000 // rate
        due.append(at)
        while (left := at - clock()) > 0:
            if left > spin_ns:
                sleep((left - spin_ns) / 1e9)
        call(number)
    return due


def wake_in_time() -> None:
    """Let sleeps of this thread end 50 µs earlier: Linux delays them to end several together."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(29, 1, 0, 0, 0)  # PR_SET_TIMERSLACK, in ns


def percentiles(latencies: list[int]) -> dict[str, float]:
    """Return the microseconds that one call in so many exceeds."""
    latencies.sort()
    figures = {f"{share:,}": latencies[-(len(latencies) // share) - 1] / 1e3 for share in SHARES}
    return figures | {MAXIMUM: latencies[-1] / 1e3}


def latencies(due: array[int], ended: array[int]) -> dict[str, float]:
    """Return the percentiles of all calls but the first tenth."""
    every = [end - at for at, end in zip(due, ended, strict=True)]
    return percentiles(every[len(every) // 10 :])


def append(bench: Bench, folder: Path, *, rate: int) -> dict[str, float]:
    """Append messages, while the store's thread makes room and flushes."""
    messages, ended, clock = make_messages(10_000, BODY_SIZE), array("q"), time.perf_counter_ns
    with MessageStore.open(folder / "store") as store:
        store.append(messages[0])

        def call(number: int) -> None:
            store.append(messages[number % 10_000])
            ended.append(clock())

        return latencies(at_rate(call, bench.count(SECONDS * rate), rate), ended)


def send(bench: Bench, folder: Path, *, rate: int) -> dict[str, float]:
    """Make and send messages; each ends when its listener begins, in another thread."""
    count, clock, body = bench.count(SECONDS * rate), time.perf_counter_ns, bytes(BODY_SIZE - 8)
    ended, left, is_over = array("q", bytes(8 * count)), iter(range(count)), threading.Event()

    def listener(message: DeliveredMessage) -> None:
        ended[int.from_bytes(message.body[:8])] = clock()
        if next(left) == count - 1:
            is_over.set()

    with Broker.open(folder / "broker", store_config=StoreConfig()) as broker, Producer(broker, "writers") as producer:
        broker.create_topic("T", 4)
        consumer = PushConsumer(broker, group="readers", threads=4)
        consumer.subscribe("T", listener)
        with consumer:
            due = at_rate(lambda n: producer.send(Message("T", n.to_bytes(8) + body)), count, rate, spin_ns=0)
            if not is_over.wait(60):
                raise TimeoutError(f"{count - next(left)} of {count} messages did not come")
    return latencies(due, ended)


def nothing(bench: Bench, folder: Path, *, rate: int) -> dict[str, float]:
    """Note the time of each call."""
    ended, clock = array("q"), time.perf_counter_ns
    return latencies(at_rate(lambda _: ended.append(clock()), bench.count(SECONDS * rate), rate), ended)


def put(bench: Bench, folder: Path, *, rate: int) -> dict[str, float]:
    """Pass numbers to another thread."""
    count, ended, clock = bench.count(SECONDS * rate), array("q"), time.perf_counter_ns
    numbers: queue.SimpleQueue[int] = queue.SimpleQueue()

    def get() -> None:
        for _ in range(count):
            numbers.get()
            ended.append(clock())

    thread = threading.Thread(target=get)
    thread.start()
    due = at_rate(numbers.put, count, rate, spin_ns=0)
    thread.join()
    return latencies(due, ended)


def write(bench: Bench, folder: Path, *, rate: int) -> dict[str, float]:
    """Copy records into a mapped file."""
    count, ended, clock, data = bench.count(SECONDS * rate), array("q"), time.perf_counter_ns, bytes(1221)
    with (folder / "raw").open("w+b") as file:
        os.posix_fallocate(file.fileno(), 0, len(data) * count)
        buffer = mmap.mmap(file.fileno(), 0)

    def call(number: int) -> None:
        at = number * len(data)
        buffer[at : at + len(data)] = data
        ended.append(clock())

    return latencies(at_rate(call, count, rate), ended)


def cases() -> Iterator[Case]:
    runs: tuple[tuple[str, Callable[..., dict[str, float]]], ...] = (
        ("nothing", nothing),
        ("raw mapped write", write),
        ("append", append),
        ("bare queue to a thread", put),
        ("send to listener", send),
    )
    figures_of: dict[tuple[int, str], Run] = {}
    for rate in RATES:
        for name, run in runs:
            figures = partial(run, rate=rate)
            for share in (*SHARES, None):
                one_in = share or rate * SECONDS * 9 // 10
                part = Part(figures, f"{share:,}" if share else MAXIMUM)
                yield Case(f"{rate:,} a second: {name}", part, f"one in: {one_in:,}", unit="µs",
                           target=TARGETS.get((rate, name, one_in), Target()))  # fmt: skip
                figures_of[rate, name] = figures
    for rate, name, against, share, most in BESIDE:
        ours, other = (Part(figures_of[rate, run], f"{share:,}") for run in (name, against))
        yield Case(f"{rate:,} a second: {name}", ours, f"one in: {share:,}", other, against,
                   Target(most, at_most=True, pure=Target()), "µs", limit=True)  # fmt: skip


CASES: Final = list(cases())

if __name__ == "__main__":
    main("tail", __doc__, CASES)
