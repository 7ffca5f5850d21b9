"""Cost of transactions: a committed one, in single appends; a check pass, by pending transactions and by history."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.common import Bench, Measure, Row, Run, Stopwatch, Target, command, compare, cost
from librmq.clock import ManualClock
from librmq.config import StoreConfig
from librmq.message.message import Message
from librmq.store import MessageStore
from librmq.store.format.broker_tables import BrokerTables
from librmq.txn import Transactions

TRANSACTIONS: Final = 20_000
PENDING: Final = 20_000
BODY: Final = b"x" * 128


def messages(count: int) -> list[Message]:
    made = []
    for number in range(count):
        message = Message(
            "T", BODY, tags="tag", keys=f"key-{number}", properties={"a": "1", "b": "2"}, unique_key=f"{number:032X}"
        )
        message.properties |= {"TRAN_MSG": "true", "PGROUP": "group"}
        made.append(message)
    return made


def appends(count: int) -> Run:
    def run(folder: Path) -> float:
        made = messages(count)
        store = MessageStore.open(folder / "store", StoreConfig(), clock=ManualClock())
        with store, Stopwatch() as watch:
            for message in made:
                store.append(message)
        return count / watch.seconds

    return run


def commits(count: int) -> Run:
    def run(folder: Path) -> float:
        made, clock = messages(count), ManualClock()
        with MessageStore.open(folder / "store", StoreConfig(), clock=clock) as store:
            transactions = Transactions(store, BrokerTables.open(str(folder / "config")), clock.now_ms())
            with Stopwatch() as watch:
                for message in made:
                    half = transactions.prepare(message, 0)
                    transactions.commit(half.physical_offset, half.queue_offset, "group")
        return count / watch.seconds

    return run


def committed(bench: Bench) -> list[Row]:
    """Measure a committed transaction (half, final and op message) in single appends."""
    count = bench.count(TRANSACTIONS)
    rates = bench.interleave({"append": appends(count), "commit": commits(count)})
    return [
        cost(
            "a committed transaction",
            "a single append",
            rates["commit"],
            rates["append"],
            Target(4, 3.2, at_most=True),
            unit="/s",
        )
    ]


def passes(pending: int, ended: int) -> Run:
    """Return half messages checked per second, in a pass after a history of ended transactions."""

    def run(folder: Path) -> float:
        clock = ManualClock()
        made = messages(pending + ended)
        with MessageStore.open(folder / "store", StoreConfig(), clock=clock) as store:
            transactions = Transactions(store, BrokerTables.open(str(folder / "config")), clock.now_ms())
            for message in made[:ended]:
                half = transactions.prepare(message, 0)
                transactions.rollback(half.physical_offset, half.queue_offset, "group")
            clock.advance(minutes=1)
            transactions.check(clock.now_ms())
            for message in made[ended:]:
                transactions.prepare(message, 0)
            clock.advance(minutes=1)
            with Stopwatch() as watch:
                questions = transactions.check(clock.now_ms()).questions
            if len(questions) != pending:
                raise RuntimeError(f"{len(questions)} of {pending} were asked about")
        return pending / watch.seconds

    return run


def check(bench: Bench) -> list[Row]:
    """Measure a check pass over pending transactions, with and without a long history."""
    count = bench.count(PENDING)
    rates = bench.interleave({"history": passes(count, 5 * count), "none": passes(count, 0)})
    against = "the same without it"
    return [
        compare(
            f"a check pass over {count:,} halves", f"behind {5 * count:,} that have ended", against,
            rates["history"], rates["none"], Target(0.8), unit="/s", limit=True,
        )
    ]  # fmt: skip


ROWS: Final[dict[str, Measure]] = {"committed": committed, "check": check}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, show the table, and return the exit status."""
    return command("transactions", __doc__ or "", ROWS, ("numpy",), arguments)


if __name__ == "__main__":
    sys.exit(main())
