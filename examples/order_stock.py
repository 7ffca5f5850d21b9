"""Keep an order and the stock in two databases consistent, using a transaction message. On SQLite.

    python examples/order_stock.py

The shop writes an order into its database, and the warehouse takes the goods out of its own. The second happens if, and
only if, the first was committed, although neither knows the other, and although the shop dies between the two at the
end. The program moves the clock by hand, so the minute until the broker asks the shop passes immediately.
"""

from __future__ import annotations

import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path

from librmq import (
    Broker,
    CheckedMessage,
    DeliveredMessage,
    ManualRunner,
    Message,
    PushConsumer,
    Route,
    TransactionProducer,
    TransactionState,
)
from librmq.idempotence import transactional, upgrade_tables


class Shop:
    """A shop that sells on credit, up to 100."""

    def __init__(self, route: Route, database: Path) -> None:
        self.database = database
        self.dies = False
        self.producer = TransactionProducer(route, "shop", self.check, execute=self.book).start()
        with closing(self.connect()) as connection:
            connection.execute("CREATE TABLE IF NOT EXISTS orders (number TEXT PRIMARY KEY, total INTEGER, state TEXT)")

    def connect(self) -> sqlite3.Connection:
        return sqlite3.connect(self.database, isolation_level=None)

    def order(self, number: str, total: int) -> None:
        result = self.producer.send_in_transaction(Message("orders", b"coat", keys=number), total)
        print(f"shop: {number} over {total}: {result.state.name}")

    def book(self, message: Message, total: object) -> TransactionState:
        """Run the local transaction. The broker gets the result, and asks `check` if it is UNKNOWN."""
        assert isinstance(total, int)
        state = "booked" if total <= 100 else "refused"
        with closing(self.connect()) as connection:
            connection.execute("INSERT INTO orders VALUES (?, ?, ?)", (message.keys[0], total, state))
        if self.dies:
            print("shop: the power fails: the order is in the database, but the broker does not know it")
            return TransactionState.UNKNOWN
        return TransactionState.COMMIT if state == "booked" else TransactionState.ROLLBACK

    def check(self, message: CheckedMessage) -> TransactionState:
        """Insert a row if there is none, so that a late transaction fails: the first of the two to write decides."""
        with closing(self.connect()) as connection:
            connection.execute("INSERT OR IGNORE INTO orders VALUES (?, 0, 'refused')", message.keys)
            (state,) = connection.execute("SELECT state FROM orders WHERE number = ?", message.keys).fetchone()
        print(f"shop: asked about {message.keys[0]}: {state}")
        return TransactionState.COMMIT if state == "booked" else TransactionState.ROLLBACK


class Warehouse:
    """A warehouse that applies each message once: one transaction covers its record and the change of stock."""

    def __init__(self, route: Route, database: Path) -> None:
        self.connection = sqlite3.connect(database, check_same_thread=False)
        upgrade_tables(self.connection)
        self.connection.execute("CREATE TABLE stock (product TEXT PRIMARY KEY, number INTEGER)")
        self.connection.execute("INSERT INTO stock VALUES ('coat', 10)")
        self.connection.commit()
        self.consumer = PushConsumer(route, "warehouse", threads=1)
        self.consumer.subscribe("orders")(self.take)
        self.consumer.start()

    def take(self, message: DeliveredMessage) -> None:
        with transactional(self.connection, message, group="warehouse") as first:
            if first:
                product = message.body.decode()
                self.connection.execute("UPDATE stock SET number = number - 1 WHERE product = ?", (product,))
                print(f"warehouse: one {product} for {message.keys[0]}")


def main(folder: Path) -> tuple[list[str], int]:
    runner = ManualRunner()
    with Broker.temporary(runner=runner) as broker:
        warehouse = Warehouse(broker, folder / "warehouse.db")
        shop = Shop(broker, folder / "shop.db")
        shop.order("order-1", 80)
        shop.order("order-2", 300)
        shop.dies = True
        shop.order("order-3", 20)
        shop.producer.shutdown()
        runner.advance(1_000)

        print("a minute later, after a restart of the shop")
        shop = Shop(broker, folder / "shop.db")
        runner.advance(2 * 60_000)

        with closing(shop.connect()) as connection:
            booked = [number for (number,) in connection.execute("SELECT number FROM orders WHERE state = 'booked'")]
        (left,) = warehouse.connection.execute("SELECT number FROM stock").fetchone()
        print(f"booked: {', '.join(booked)}; coats left: {left} of 10")
        warehouse.consumer.shutdown()
        warehouse.connection.close()
        return booked, left


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder))
