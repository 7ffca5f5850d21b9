"""Round trips to a database, counted by a proxy: each is a time in which a consumer waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sqlalchemy

from librmq.clock import ManualClock
from librmq.idempotence import Outbox, OutboxSender, upgrade_tables
from librmq.message.message import Message
from tests.idempotence.conftest import Database
from tests.idempotence.servers import RoundTrips, Server, counted
from tests.idempotence.sessions import SESSIONS
from tests.idempotence.test_listener import Delivery


@pytest.fixture
def proxied(
    server: Callable[[str], Server], database: Callable[[str], Database], base: str
) -> Iterator[tuple[Database, RoundTrips]]:
    """Return a database behind a proxy."""
    place = database(base)
    with counted(server(base)) as trips:
        engine = sqlalchemy.create_engine(place.engine.url.set(port=trips.port))
        proxied = Database(base, place.url, engine, place.folder)
        yield proxied, trips
        proxied.close()


MOST = {
    "postgresql-psycopg": (4, 3),
    "postgresql-psycopg2": (4, 3),
    "postgresql-pg8000": (7, 6),
    "postgresql-psycopg-session": (4, 3),
    "mysql-pymysql": (4, 3),
    "mysql-mysqlclient": (5, 3),
    "mysql-mariadb": (5, 3),
}
"""By session: of a message with an effect of one statement, and of its duplicate."""


@pytest.mark.parametrize(
    ("base", "session"), [(session.partition("-")[0], session) for session in MOST if session in SESSIONS]
)
def test_round_trips_of_a_message(proxied: tuple[Database, RoundTrips], session: str, name: str) -> None:
    place, trips = proxied
    counts: list[int] = []
    with SESSIONS[session](place) as opened:
        for number in (0, 1, 1):
            before = trips.count
            message = Delivery("orders", b"x", unique_key=f"{name}-{number}")
            opened.deliver(message, lambda inner: inner.run(f"INSERT INTO effects (name) VALUES ('{name}')"))
            counts.append(trips.count - before)
    first, duplicate = MOST[session]
    assert counts[1] <= first  # The first message also prepares the connection.
    assert counts[2] <= duplicate


@pytest.mark.parametrize("base", ["postgresql", "mysql"])
def test_round_trips_of_a_sender(proxied: tuple[Database, RoundTrips], base: str, name: str) -> None:
    place, trips = proxied
    table, clock, sent = "outbox_" + name.replace("-", "_"), ManualClock(), []
    upgrade_tables(place.engine, dedup=None, messages=None, transactions=None, outbox=table)
    with place.engine.begin() as connection:
        for number in range(1000):
            Outbox(table=table, clock=clock).add(connection, Message("orders", b"x"), order_key=f"order-{number % 50}")

    class Producer:
        def send(self, message: Message) -> Any:
            sent.append(message)

    sender, before = OutboxSender(place.engine, Producer(), table=table, clock=clock), trips.count
    sender.run_due(clock.now_ms())
    assert sender.sent == len(sent) == 1000
    assert trips.count - before <= 60
