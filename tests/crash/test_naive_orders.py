"""A row in a database and a message about it: what each order of the two loses, and that a transaction loses nothing.

Each way of placing an order is let die at every of its steps, and meets a database or a broker that refuses. A consumer
compares each message with the database when it comes, and everything with everything in the end.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import pytest

from librmq.broker import Broker
from librmq.config import StoreConfig
from librmq.consumer import DeliveredMessage, PushConsumer
from librmq.errors import BrokerError
from librmq.message import Message
from librmq.producer import Producer
from librmq.protocol import Route, TransactionState
from librmq.runner import ManualRunner
from librmq.testing import Kit, Process, explore
from librmq.transactionproducer import CheckedMessage, TransactionProducer

SMALL = StoreConfig.tiny()
ORDER = "order-1"
LOST = "an order of which nobody hears"
PREMATURE = "a message about an order that is not there"


class Shop:
    """An application over a database of rows and a broker. ``step(label)`` is a place where it may die."""

    def __init__(self, route: Route, database: Path, step: Callable[[str], None]) -> None:
        self.step = step
        self.connection = sqlite3.connect(database, isolation_level=None, check_same_thread=False)
        self.producer = Producer(route, "shop")
        self.transactions = TransactionProducer(route, "shop-transactions", self.check).start()

    def begin(self) -> None:
        self.connection.execute("BEGIN")
        self.connection.execute("INSERT INTO orders VALUES (?)", (ORDER,))
        self.step("written")

    def commit(self) -> None:
        self.step("commit")
        self.connection.execute("COMMIT")
        self.step("committed")

    def send(self) -> None:
        self.producer.send(message())
        self.step("sent")

    def check(self, half: CheckedMessage) -> TransactionState:
        found = self.connection.execute("SELECT 1 FROM orders WHERE number = ?", half.keys).fetchone()
        return TransactionState.COMMIT if found else TransactionState.ROLLBACK


def message() -> Message:
    return Message("orders", b"a coat", keys=ORDER)


def commit_then_send(shop: Shop) -> None:
    shop.begin()
    shop.commit()
    shop.send()


def send_then_commit(shop: Shop) -> None:
    shop.send()
    shop.begin()
    shop.commit()


def send_within_the_local_transaction(shop: Shop) -> None:
    shop.begin()
    shop.send()
    shop.commit()


def send_in_transaction(shop: Shop) -> None:
    with shop.transactions.transaction(message()):
        shop.begin()
        shop.commit()


Way = Callable[[Shop], None]

LOSES: dict[Way, set[str]] = {
    commit_then_send: {LOST},
    send_then_commit: {PREMATURE},
    send_within_the_local_transaction: {PREMATURE},
    send_in_transaction: set(),
}
WAYS = pytest.mark.parametrize("way", LOSES, ids=lambda way: way.__name__)


class Died(BaseException):
    """The process is gone."""


class MortalRunner(ManualRunner):
    """Takes a process away at the n-th of its points, librmq's own among them."""

    def __init__(self, dies_at: int, fails_at: str = "") -> None:
        super().__init__()
        self.dies_at = dies_at
        self.fails_at = fails_at
        self.met: list[str] = []
        self.placing = False

    def point(self, label: str) -> None:
        if not self.placing:
            return
        self.met.append(label)
        if len(self.met) == self.dies_at:
            raise Died(label)
        if label == self.fails_at:
            raise sqlite3.IntegrityError("refused") if label == "commit" else BrokerError(1, "refused")
        self.placing = False
        self.advance(100)  # meanwhile others go on
        self.placing = True


class Observer:
    """A consumer in another process, which looks into the same database."""

    def __init__(self, database: Path) -> None:
        self.connection = sqlite3.connect(database, isolation_level=None, check_same_thread=False)
        self.connection.execute("PRAGMA journal_mode=WAL")  # it reads while another writes
        self.connection.execute("CREATE TABLE IF NOT EXISTS orders (number TEXT PRIMARY KEY)")
        self.heard: set[str] = set()
        self.seen: set[str] = set()

    def consume(self, broker: Route) -> None:
        consumer = PushConsumer(broker, "observer")
        consumer.subscribe("orders")(self.hear)
        consumer.start()

    def hear(self, one: DeliveredMessage) -> None:
        self.heard.add(one.keys[0])
        if one.keys[0] not in self.orders():
            self.seen.add(PREMATURE)

    def orders(self) -> set[str]:
        return {number for (number,) in self.connection.execute("SELECT number FROM orders")}

    def verdict(self) -> set[str]:
        return self.seen | ({LOST} if self.orders() - self.heard else set())


def live(folder: Path, way: Way, dies_at: int = 0, fails_at: str = "") -> tuple[set[str], list[str]]:
    """Place an order, die or meet a refusal, and come again; returns what went wrong, and the points that were met."""
    folder.mkdir()
    observer = Observer(folder / "shop.db")
    runner = MortalRunner(dies_at, fails_at)
    with closing(observer.connection):
        broker = Broker.open(folder / "store", store_config=SMALL, runner=runner)
        observer.consume(broker)
        broker.create_topic("orders", 1)
        shop = Shop(broker, folder / "shop.db", runner.point)
        runner.placing = True
        with suppress(Died, sqlite3.Error, BrokerError):
            way(shop)
        runner.placing = False
        shop.connection.close()  # what was not committed is undone
        broker.abandon()

        later = ManualRunner(runner.manual_clock)
        with Broker.open(folder / "store", store_config=SMALL, runner=later) as broker:
            observer.consume(broker)
            shop = Shop(broker, folder / "shop.db", later.point)
            later.advance(5 * 60_000)
            shop.connection.close()
        return observer.verdict(), runner.met


@WAYS
def test_what_is_lost_when_the_process_dies_or_is_refused(tmp_path: Path, way: Way) -> None:
    _, points = live(tmp_path / "well", way)
    met: set[str] = set()
    for number, point in enumerate(points, 1):
        verdict, until = live(tmp_path / f"dies at {number}", way, dies_at=number)
        assert until[-1] == point
        met |= verdict
    for refused in ("commit", "send orders"):
        verdict, until = live(tmp_path / f"refuses {refused}", way, fails_at=refused)
        assert refused in until
        met |= verdict
    assert met == LOSES[way]


def test_a_message_sent_before_the_commit_comes_before_the_order_is_there(tmp_path: Path) -> None:
    """Nothing fails: the consumer is just quicker than the commit."""
    for way in (send_then_commit, send_within_the_local_transaction, send_in_transaction):
        assert live(tmp_path / way.__name__, way)[0] == LOSES[way]


class Rows:
    """A database that outlives processes, for schedules by the thousand."""

    def __init__(self) -> None:
        self.orders: set[str] = set()
        self.asked = False


class ExploredShop(Shop):
    """The same application over `Rows`."""

    def __init__(self, process: Process, rows: Rows, step: Callable[[str], None]) -> None:
        self.rows = rows
        self.step = step
        self.producer = Producer(process, "shop")
        self.transactions = TransactionProducer(process, "shop-transactions", self.check).start()

    def begin(self) -> None:
        self.step("written")

    def commit(self) -> None:
        self.step("commit")
        self.rows.orders.add(ORDER)
        self.step("committed")

    def check(self, half: CheckedMessage) -> TransactionState:
        return TransactionState.COMMIT if half.keys[0] in self.rows.orders else TransactionState.ROLLBACK


def agrees(way: Way) -> Callable[[Kit], None]:
    """A test that the order and its message agree, to be explored."""

    def test(rmq: Kit) -> None:
        rows = Rows()
        heard: set[str] = set()

        @rmq.consumer("observer").subscribe("orders")
        def hear(one: DeliveredMessage) -> None:
            heard.add(one.keys[0])
            assert one.keys[0] in rows.orders, PREMATURE

        def start(process: Process) -> None:
            shop = ExploredShop(process, rows, rmq.checkpoint)
            if not rows.asked:  # nobody asks a second time
                rows.asked = True
                process.background(lambda: way(shop))

        rmq.app("shop", start)
        rmq.run_until_idle()
        rmq.advance(minutes=5)
        assert rows.orders <= heard, LOST

    return test


@pytest.mark.parametrize("way", [way for way, loses in LOSES.items() if loses], ids=lambda way: way.__name__)
def test_exploring_finds_what_a_naive_order_loses(way: Way) -> None:
    with pytest.raises(AssertionError) as caught:
        explore(agrees(way), runs=200)
    assert str(caught.value).partition("\n")[0] in LOSES[way]


def test_exploring_finds_nothing_that_a_transaction_loses() -> None:
    assert explore(agrees(send_in_transaction), runs=150).found is None
