"""What each naive order of message and local transaction can lose or invent, and why a half message can't.

Database and store face a crash after each step. Afterwards either both have the order, or neither has.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from librmq.clock import ManualClock
from librmq.files._memory import MemoryFiles
from librmq.message.message import Message
from librmq.store import MessageStore
from librmq.store.format.broker_tables import BrokerTables
from librmq.txn import Transactions
from tests.stores import ROOT, SMALL, START_MS, died


class Crash(BaseException):
    """The process dies here."""


class Shop:
    """Orders in SQLite and messages in a store; the process dies after this many steps."""

    def __init__(self, path: Path, dies_after: int) -> None:
        self.path = path
        self.steps_left = dies_after
        self.files = MemoryFiles()
        self.clock = ManualClock(START_MS)
        self.open()

    def open(self) -> None:
        self.database = sqlite3.connect(self.path)
        self.database.execute("CREATE TABLE IF NOT EXISTS orders (id TEXT PRIMARY KEY)")
        self.database.commit()
        self.store = MessageStore.open(ROOT, SMALL, files=self.files, clock=self.clock)
        tables = BrokerTables.open(f"{ROOT}/config", files=self.files)
        self.transactions = Transactions(self.store, tables)

    def step(self) -> None:
        if self.steps_left == 0:
            raise Crash
        self.steps_left -= 1

    def insert(self) -> None:
        self.step()
        self.database.execute("INSERT INTO orders VALUES ('o-1')")

    def commit(self) -> None:
        self.step()
        self.database.commit()

    def send(self) -> None:
        self.step()
        self.store.append(Message("orders", b"o-1"))

    def restart(self) -> None:
        """Restart the process after a crash; the database answers checks of half messages."""
        self.database.close()
        self.files = died(self.files)
        self.steps_left = 1_000
        self.open()
        for _ in range(3):
            self.clock.advance(minutes=1)
            for question in self.transactions.check.run_pass(self.clock.now_ms()).questions:
                half = question.half
                end = self.transactions.commit if self.is_ordered else self.transactions.rollback
                end(half.physical_offset, half.queue_offset, "shop")

    @property
    def is_ordered(self) -> bool:
        return bool(self.database.execute("SELECT count(*) FROM orders").fetchone()[0])

    @property
    def is_sent(self) -> bool:
        return any(message.topic == "orders" for message in self.store)


def commit_then_send(shop: Shop) -> None:
    shop.insert()
    shop.commit()
    shop.send()


def send_then_commit(shop: Shop) -> None:
    shop.send()
    shop.insert()
    shop.commit()


def send_within(shop: Shop) -> None:
    shop.insert()
    shop.send()
    shop.commit()


def with_a_half(shop: Shop) -> None:
    message = Message("orders", b"o-1", unique_key="o-1")
    message.properties |= {"TRAN_MSG": "true", "PGROUP": "shop"}
    shop.step()
    half = shop.transactions.prepare(message, 0)
    shop.insert()
    shop.commit()
    shop.step()
    shop.transactions.commit(half.physical_offset, half.queue_offset, "shop")


def outcomes(order: Callable[[Shop], None], path: Path) -> set[tuple[bool, bool]]:
    """Return, for a crash at each step, whether the order is in the database and whether the message came."""
    found = set()
    for dies_after in range(6):
        shop = Shop(path / f"{dies_after}.db", dies_after)
        with contextlib.suppress(Crash):
            order(shop)
        shop.restart()
        found.add((shop.is_ordered, shop.is_sent))
        shop.database.close()
    return found


@pytest.mark.parametrize(
    ("order", "broken"),
    [(commit_then_send, (True, False)), (send_then_commit, (False, True)), (send_within, (False, True))],
)
def test_naive_orders_break(order: Callable[[Shop], None], broken: tuple[bool, bool], tmp_path: Path) -> None:
    assert outcomes(order, tmp_path) == {(False, False), (True, True), broken}


def test_a_half_message_does_not(tmp_path: Path) -> None:
    assert outcomes(with_a_half, tmp_path) == {(False, False), (True, True)}
