"""Mark an order as paid in three ways, and show the effect of a duplicate on each.

    python examples/idempotence.py [URL]      (a SQLite file unless a SQLAlchemy URL names a database)

The work for a message takes a second, and its duplicate comes 100 ms after it. The program moves the clock by hand.
"""

from __future__ import annotations

import heapq
import sys
import tempfile
from collections.abc import Callable, Iterator

from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool

from librmq import ManualClock

Way = Callable[[Connection, int], Iterator[float]]
"""Consumes "order N is paid" on its own connection; yields the seconds that its work takes."""


def check_then_act(connection: Connection, order: int) -> Iterator[float]:
    """Wrong: between the check and the act, another delivery checks too."""
    state = connection.execute(text("SELECT state FROM orders WHERE id = :id"), {"id": order}).scalar_one()
    connection.rollback()
    if state == "paid":
        return
    yield 1.0
    connection.execute(text("INSERT INTO charges (order_id) VALUES (:id)"), {"id": order})
    connection.execute(text("UPDATE orders SET state = 'paid' WHERE id = :id"), {"id": order})
    connection.commit()


def conditional_update(connection: Connection, order: int) -> Iterator[float]:
    """Right: the statement names the expected state, so only one of two deliveries changes a row."""
    yield 1.0
    paid = text("UPDATE orders SET state = 'paid' WHERE id = :id AND state = 'new'")
    if connection.execute(paid, {"id": order}).rowcount:
        connection.execute(text("INSERT INTO charges (order_id) VALUES (:id)"), {"id": order})
    connection.commit()


def select_for_update(connection: Connection, order: int) -> Iterator[float]:
    """Right: the check locks the row, so another delivery waits until this one has committed."""
    return _locked(connection, order, "FOR UPDATE")


def select_for_update_nowait(connection: Connection, order: int) -> Iterator[float]:
    """Right: like `select_for_update`, but the other delivery fails immediately instead of waiting, and is retried."""
    return _locked(connection, order, "FOR UPDATE NOWAIT")


def _locked(connection: Connection, order: int, how: str) -> Iterator[float]:
    found = connection.execute(text(f"SELECT state FROM orders WHERE id = :id {how}"), {"id": order})
    if found.scalar_one() == "new":
        yield 1.0
        connection.execute(text("INSERT INTO charges (order_id) VALUES (:id)"), {"id": order})
        connection.execute(text("UPDATE orders SET state = 'paid' WHERE id = :id"), {"id": order})
    connection.commit()


def deliver_twice(engine: Engine, way: Way, order: int, clock: ManualClock) -> int:
    """Deliver a message and its duplicate, and retry a failed delivery after 10 s; return the number of charges."""
    due: list[tuple[int, int, Connection, Iterator[float]]] = []
    for number in (0, 1):
        connection = engine.connect()
        heapq.heappush(due, (clock.now_ms() + 100 * number, number, connection, way(connection, order)))
    while due:
        at_ms, number, connection, delivery = heapq.heappop(due)
        clock.move_to(at_ms)
        try:
            heapq.heappush(due, (at_ms + round(1000 * next(delivery)), number, connection, delivery))
        except StopIteration:
            connection.close()
        except DBAPIError:
            connection.rollback()
            heapq.heappush(due, (at_ms + 10_000, number, connection, way(connection, order)))
    with engine.connect() as connection:
        count = connection.execute(text("SELECT COUNT(*) FROM charges WHERE order_id = :id"), {"id": order})
        return int(count.scalar_one())


def make_tables(engine: Engine, orders: int) -> None:
    """Create new orders, numbered from 0, without charges."""
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE orders (id INTEGER NOT NULL PRIMARY KEY, state VARCHAR(10) NOT NULL)"))
        connection.execute(text("CREATE TABLE charges (order_id INTEGER NOT NULL)"))
        for order in range(orders):
            connection.execute(text("INSERT INTO orders (id, state) VALUES (:id, 'new')"), {"id": order})


def main(url: str) -> None:
    engine = create_engine(url, poolclass=NullPool)
    make_tables(engine, 3)
    clock = ManualClock()
    ways: list[Way] = [check_then_act, conditional_update]
    if engine.dialect.name == "sqlite":
        print("SQLite has no SELECT … FOR UPDATE: one writer at a time locks the file")
    else:
        ways.append(select_for_update_nowait)
    for order, way in enumerate(ways):
        print(f"{way.__name__}: charged {deliver_twice(engine, way, order, clock)} times")
    engine.dispose()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(f"sqlite:///{folder}/shop.db")
