"""Cost of timers: stored and delivered, in single appends; delivery with any number pending; memory."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.common import CHECKOUT, Bench, Measure, Row, Run, Stopwatch, Target, command, compare, cost
from librmq.clock import ManualClock
from librmq.config import StoreConfig
from librmq.message.message import Message
from librmq.scheduling.timer import Timers
from librmq.scheduling.timer_config import TimerConfig
from librmq.store import MessageStore

TIMERS: Final = 10_000
PENDING: Final = 1_000_000
DAY_S: Final = 86_400
BODY: Final = b"x" * 128
SETTINGS: Final = TimerConfig(save_every_s=None)


def message(number: int, seconds: int | None) -> Message:
    made = Message("T", BODY, tags="tag", keys=f"key-{number}", unique_key=f"{number:032X}")
    if seconds is not None:
        made.properties["TIMER_DELAY_SEC"] = str(seconds)
    return made


def appends(count: int) -> Run:
    def run(folder: Path) -> float:
        made = [message(number, None) for number in range(count)]
        store = MessageStore.open(folder / "store", StoreConfig(), clock=ManualClock())
        with store, Stopwatch() as watch:
            for one in made:
                store.append(one)
        return count / watch.seconds

    return run


def fill(timers: Timers, clock: ManualClock, count: int, least_s: int, most_s: int) -> None:
    """Put messages into the wheel at random times, none of them due before the given time."""
    rng = random.Random(count)
    for number in range(count):
        timers.put(message(number, rng.randint(least_s, most_s)))
        if number % 1_000 == 999:
            timers.run_due(clock.now_ms())
    timers.run_due(clock.now_ms())


def deliver(timers: Timers, clock: ManualClock, seconds: int) -> None:
    """Let time pass from one due slot to the next."""
    until = clock.now_ms() + 1000 * seconds
    due = timers.run_due(clock.now_ms())
    while due is not None and due <= until:
        clock.move_to(due)
        due = timers.run_due(due)


def timed(count: int, waiting: int = 0, *, put: bool = True) -> Run:
    """Return messages per second that wait and are delivered within an hour, while others wait for the next day."""

    def run(folder: Path) -> float:
        clock = ManualClock()
        with MessageStore.open(folder / "store", StoreConfig(), clock=clock) as store:
            timers = Timers.open(store, SETTINGS)
            timers.put(message(0, 1))
            deliver(timers, clock, 2)  # creates the wheel
            fill(timers, clock, waiting, DAY_S // 2, DAY_S)
            if not put:
                fill(timers, clock, count, 1, 3600)
            with Stopwatch() as watch:
                if put:
                    fill(timers, clock, count, 1, 3600)
                deliver(timers, clock, 3_700)
            queue = store.queue("T", 0)
            if queue is None or queue.max_offset != count + 1:
                raise RuntimeError("not all were delivered")
        return count / watch.seconds

    return run


def stored_and_delivered(bench: Bench) -> list[Row]:
    """Measure a timer, stored and delivered, in single appends."""
    count = bench.count(TIMERS)
    rates = bench.interleave({"append": appends(count), "timer": timed(count)})
    return [cost("a timer, stored and delivered", "a single append", rates["timer"], rates["append"], unit="msg/s")]


def due(bench: Bench) -> list[Row]:
    """Measure the delivery of due timers, with and without many more that wait."""
    count = bench.count(TIMERS)
    rates = bench.interleave({"many": timed(count, 10 * count, put=False), "none": timed(count, put=False)})
    return [
        compare(
            f"{count:,} timers delivered", f"while {10 * count:,} wait", "the same while none do",
            rates["many"], rates["none"], limit=True,
        )
    ]  # fmt: skip


def memory(bench: Bench) -> list[Row]:
    """Measure how much more private memory a process needs with a million timers than with a thousand."""
    held = []
    for count in (1_000, bench.count(PENDING)):
        with bench.folder() as folder:
            # Last on the path, so that an installed librmq is measured.
            code = f"import sys; sys.path.append({str(CHECKOUT)!r}); from benchmarks.timers import weigh; weigh()"
            done = subprocess.run(
                [sys.executable, "-P", "-c", code, str(folder), str(count)],
                cwd=CHECKOUT, capture_output=True, text=True, check=True,
            )  # fmt: skip
            held.append(json.loads(done.stdout))
    more = (held[1] - held[0]) / (1 << 20)
    return [
        Row(f"{bench.count(PENDING):,} timers", "memory beside a thousand", "", more, "MiB", Target(64, at_most=True))
    ]


def weigh() -> None:
    """In a separate process, put timers into the wheel and print the private bytes."""
    folder, count = Path(sys.argv[1]), int(sys.argv[2])
    clock = ManualClock()
    with MessageStore.open(folder / "store", StoreConfig(), clock=clock) as store:
        timers = Timers.open(store, SETTINGS)
        fill(timers, clock, count, 1, DAY_S)
        timers = Timers.open(store, SETTINGS)
        deliver(timers, clock, 60)
        with open("/proc/self/status", encoding="ascii") as status:
            own = next(line for line in status if line.startswith("RssAnon"))
    print(1024 * int(own.split()[1]))


ROWS: Final[dict[str, Measure]] = {"timer": stored_and_delivered, "due": due, "memory": memory}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, show the table, and return the exit status."""
    return command("timers", __doc__ or "", ROWS, ("numpy",), arguments)


if __name__ == "__main__":
    sys.exit(main())
