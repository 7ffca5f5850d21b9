"""Cancel orders that are not paid within half an hour, using a delayed message and a manual clock.

    python examples/order_timeout.py

Each order sends a message that arrives after 30 minutes (delay level 16). Its listener then cancels the order if it is
still unpaid, in one statement.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing

from librmq import Broker, DeliveredMessage, ManualRunner, Producer, PushConsumer
from librmq.message import DEFAULT_LEVELS

IN_HALF_AN_HOUR = DEFAULT_LEVELS.delays_ms.index(30 * 60_000) + 1  # 16


def main() -> dict[str, str]:
    runner = ManualRunner()
    with Broker.temporary(runner=runner) as broker, closing(sqlite3.connect(":memory:")) as database:
        database.execute("CREATE TABLE orders (number TEXT PRIMARY KEY, state TEXT)")
        begin_ms = runner.now_ms()

        def tell(what: str) -> None:
            print(f"{(runner.now_ms() - begin_ms) / 60_000:5.1f} min  {what}")

        timeouts = PushConsumer(broker, "timeouts")

        @timeouts.subscribe("order-timeouts")
        def cancel_unpaid(message: DeliveredMessage) -> None:
            order = message.keys[0]
            changed = database.execute(
                "UPDATE orders SET state = 'cancelled' WHERE number = ? AND state = 'new'", (order,)
            ).rowcount
            tell(f"{order} {'was not paid: cancelled' if changed else 'was paid in time'}")

        timeouts.start()
        producer = Producer(broker, "shop")
        for order in ("order-1", "order-2"):
            database.execute("INSERT INTO orders VALUES (?, 'new')", (order,))
            producer.send("order-timeouts", b"is it paid?", keys=order, delay_level=IN_HALF_AN_HOUR)
            tell(f"{order} placed")

        runner.advance(29 * 60_000)
        database.execute("UPDATE orders SET state = 'paid' WHERE number = 'order-2'")
        tell("order-2 paid, in the last minute")
        runner.advance(2 * 60_000)

        timeouts.shutdown()
        return dict(database.execute("SELECT number, state FROM orders ORDER BY number"))


if __name__ == "__main__":
    main()
