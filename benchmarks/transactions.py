"""Cost of transactions: a committed one, in appends; a check pass, by pending transactions and by history.

A committed transaction writes three records, half, final and op message; these appended alone are its limit.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.frame import Bench, Case, Target, Timed, main
from benchmarks.peers import TOPIC, append_alone, make_messages
from librmq.clock import ManualClock
from librmq.config import StoreConfig
from librmq.message import Message, record
from librmq.message.topics import SystemTopic
from librmq.store import MessageStore
from librmq.store.format.broker_tables import BrokerTables
from librmq.txn import Transactions

COUNT: Final = 20_000
HALF: Final = {"TRAN_MSG": "true", "PGROUP": "group"}
"""Properties of messages of a transaction."""


def commits(bench: Bench, folder: Path) -> Timed:
    """Commit a transaction for each message: half, final and op message."""
    messages, clock = make_messages(bench.count(COUNT), added=HALF), ManualClock()
    with MessageStore.open(folder / "store", StoreConfig(), clock=clock) as store:
        transactions = Transactions(store, BrokerTables.open(str(folder / "config")))
        yield
        for message in messages:
            half = transactions.prepare(message, 0)
            transactions.commit(half.physical_offset, half.queue_offset, "group")
        yield len(messages)


def three_records(bench: Bench, folder: Path) -> Timed:
    """Append half, final and op messages, which are made before."""
    added, commit = HALF | {"REAL_TOPIC": TOPIC, "REAL_QID": "0"}, record.TRANSACTION_COMMIT
    finals, halves = (make_messages(bench.count(COUNT), added=added) for _ in range(2))
    for half in halves:
        half.topic = SystemTopic.HALF
    ops = [Message(SystemTopic.OP, b"%d" % number, tags="d") for number in range(len(halves))]
    with MessageStore.open(folder / "store", StoreConfig(), clock=ManualClock()) as store:
        yield
        for half, final, op in zip(halves, finals, ops, strict=True):
            stored = store.append(half)
            store.append(final, sys_flag=commit, prepared_transaction_offset=stored.physical_offset)
            store.append(op)
        yield len(halves)


def check(bench: Bench, folder: Path, *, ended: int) -> Timed:
    """Check pending half messages, in a pass after a history of ended transactions."""
    clock, pending, ended = ManualClock(), bench.count(COUNT), bench.count(ended) if ended else 0
    messages = make_messages(pending + ended, added=HALF)
    with MessageStore.open(folder / "store", StoreConfig(), clock=clock) as store:
        transactions = Transactions(store, BrokerTables.open(str(folder / "config")))
        for message in messages[:ended]:
            half = transactions.prepare(message, 0)
            transactions.rollback(half.physical_offset, half.queue_offset, "group")
        clock.advance(minutes=1)
        transactions.check.run_pass(clock.now_ms())
        for message in messages[ended:]:
            transactions.prepare(message, 0)
        clock.advance(minutes=1)
        yield
        questions = transactions.check.run_pass(clock.now_ms()).questions
        yield pending
    assert len(questions) == pending


CASES: Final = [
    Case("a committed transaction", commits, "", partial(append_alone, count=COUNT, added=HALF), "a single append",
         Target(reach=4, at_most=True, pure=Target(4, 3.2, at_most=True)), limit=True, is_cost=True),
    Case("a committed transaction", commits, "", three_records, "its three records alone",
         Target(1.75, 1.5, at_most=True, pure=Target(1.35, 1.2, at_most=True)), limit=True, is_cost=True),
    Case(f"a check pass over {COUNT:,} halves", partial(check, ended=5 * COUNT),
         f"behind {5 * COUNT:,} that have ended", partial(check, ended=0), "the same without it", Target(0.8), "/s",
         limit=True),
]  # fmt: skip

if __name__ == "__main__":
    main("transactions", __doc__, CASES)
