"""Move changes from one database to another exactly once, although every message is delivered twice.

    python examples/exactly_once.py

A shop writes each order and the message about it in one transaction (the outbox). A sender appends the messages to a
log, which stands for the broker; it could also send them to a real cluster. Billing reads the log twice from the start,
as after a crash. A message table and a guard drop the duplicates.
"""

from __future__ import annotations

import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path

from librmq import Message, MessageStore, StoreConfig, StoredMessage
from librmq.dedup import deduplicated
from librmq.idempotence import Outbox, OutboxSender, SqliteDedupStore, transactional, upgrade_tables


class LogProducer:
    """A producer is any object with ``send``. An exception, or a status other than SEND_OK, means not sent."""

    def __init__(self, log: MessageStore) -> None:
        self._log = log

    def send(self, message: Message) -> None:
        self._log.append(message)


def main(folder: Path) -> None:
    shop, billing = folder / "shop.db", folder / "billing.db"
    with (
        MessageStore.open(folder / "log", StoreConfig()) as log,
        closing(sqlite3.connect(shop)) as orders,
        closing(sqlite3.connect(billing)) as accounts,
        SqliteDedupStore(folder / "mails.db") as mails,
    ):
        upgrade_tables(orders)
        upgrade_tables(accounts)
        orders.execute("CREATE TABLE orders (number INTEGER, total INTEGER)")
        accounts.execute("CREATE TABLE invoices (number TEXT, total INTEGER)")
        accounts.commit()

        # Both the order and the message about it are written, or none.
        outbox = Outbox()
        for number, total in ((1, 40), (2, 25)):
            orders.execute("INSERT INTO orders VALUES (?, ?)", (number, total))
            outbox.add(orders, Message("orders", str(total).encode(), keys=f"order-{number}"))
            orders.commit()
        outbox.add(orders, Message("orders", b"never", keys="order-3"))
        orders.rollback()

        sender = OutboxSender(lambda: sqlite3.connect(shop), LogProducer(log))
        sender.run_due(0)  # or start(), which runs a thread
        print(f"{sender.sent} messages sent")

        def bill(message: StoredMessage) -> None:
            """Change a database: once, whatever fails."""
            with transactional(accounts, message, group="billing") as first:
                if first:
                    accounts.execute("INSERT INTO invoices VALUES (?, ?)", (message.keys[0], int(message.body)))

        @deduplicated(mails, group="mails", key=lambda message: " ".join(message.keys))
        def write_mail(message: StoredMessage) -> None:
            """Act elsewhere: once, unless the process dies right after it."""
            print(f"  mail: {message.keys[0]} costs {message.body.decode()}")

        for delivery in ("first delivery", "again, from the start"):
            print(delivery)
            for message in log.read("orders", 0, 0).messages:
                bill(message)
                write_mail(message)

        for number, total in accounts.execute("SELECT number, total FROM invoices ORDER BY number"):
            print(f"invoice for {number}: {total}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder))
