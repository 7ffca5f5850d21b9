"""Cost of timers: stored and delivered, in single appends; delivery with any number pending; memory."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.frame import Bench, Case, Target, Timed, from_setup, last_line, main
from benchmarks.peers import TOPIC, append_alone, make_messages
from librmq.clock import ManualClock
from librmq.config import StoreConfig
from librmq.scheduling.timer import Timers
from librmq.scheduling.timer_config import TimerConfig
from librmq.store import MessageStore

TIMERS: Final = 10_000
PENDING: Final = 1_000_000
DAY_S: Final = 86_400
SETTINGS: Final = TimerConfig(save_every_s=None)


def fill(store: MessageStore, timers: Timers, clock: ManualClock, count: int, first_s: int, last_s: int) -> None:
    """Put messages into the wheel at random times between two."""
    rng = random.Random(count)
    for begin in range(0, count, 1_000):
        for message in make_messages(min(1_000, count - begin), first=begin):
            message.properties["TIMER_DELAY_SEC"] = str(rng.randint(first_s, last_s))
            waiting = timers.waiting_form(message, 0)
            assert waiting is not None
            store.append(waiting)
        timers.run_due(clock.now_ms())


def deliver(timers: Timers, clock: ManualClock, seconds: int) -> None:
    """Let time pass from one due slot to the next."""
    until = clock.now_ms() + 1000 * seconds
    due = timers.run_due(clock.now_ms())
    while due is not None and due <= until:
        clock.move_to(due)
        due = timers.run_due(due)


def timed(bench: Bench, folder: Path, *, waiting: int = 0, put: bool = True) -> Timed:
    """Put messages, and deliver them within an hour, while others wait for the next day."""
    count, clock = bench.count(TIMERS), ManualClock()
    with MessageStore.open(folder / "store", StoreConfig(), clock=clock) as store:
        timers = Timers(store, SETTINGS)
        fill(store, timers, clock, 1, 1, 1)
        deliver(timers, clock, 2)  # creates the wheel
        fill(store, timers, clock, waiting * count, DAY_S // 2, DAY_S)
        if not put:
            fill(store, timers, clock, count, 1, 3600)
        yield
        if put:
            fill(store, timers, clock, count, 1, 3600)
        deliver(timers, clock, 3_700)
        yield count
        queue = store.queue(TOPIC, 0)
        assert queue is not None
        assert queue.max_offset == count + 1


def weighed(bench: Bench) -> Iterator[float]:
    """Yield how much more private memory (MiB) a process needs with many timers than with a thousand."""
    weights = []
    with bench.folder() as folder:
        for count in (1_000, bench.count(PENDING)):
            code = "from benchmarks.timers import weigh; weigh()"
            weights.append(int(last_line(code, folder / str(count), count)))
    yield (weights[1] - weights[0]) / (1 << 20)


def weigh() -> None:
    """In a separate process, put timers into the wheel and print the private bytes."""
    clock = ManualClock()
    with MessageStore.open(sys.argv[1], StoreConfig(), clock=clock) as store:
        fill(store, Timers(store, SETTINGS), clock, int(sys.argv[2]), 1, DAY_S)
        deliver(Timers(store, SETTINGS), clock, 60)
        with open("/proc/self/status", encoding="ascii") as status:
            own = next(line for line in status if line.startswith("RssAnon"))
    print(1024 * int(own.split()[1]))


CASES: Final = [
    Case("a timer, stored and delivered", timed, "", partial(append_alone, count=TIMERS), "a single append",
         limit=True, is_cost=True),
    Case(f"{TIMERS:,} timers delivered", partial(timed, waiting=10, put=False), f"while {10 * TIMERS:,} wait",
         partial(timed, put=False), "the same while none do", limit=True),
    Case(f"{PENDING:,} timers", from_setup, "memory beside a thousand", target=Target(64, at_most=True), unit="MiB",
         setup=weighed),
]  # fmt: skip

if __name__ == "__main__":
    main("timers", __doc__, CASES)
