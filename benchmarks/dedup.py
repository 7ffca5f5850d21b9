"""The dedup guard, the table of messages and the outbox, compared with the bare statements that they execute.

A message costs the guard a claim and a mark. A guarded message has a listener too, which does nothing. In
`transactional` it costs a record beside its effect, an update here, in one transaction. A sender of the outbox claims a
hundred rows by three statements, and marks them by one. The bare form runs the same statements or commands on a plain
connection of the driver, with keys and parameters prepared. Costs of `transactional`, and all on SQLite, are compared
by the processor's time of this process, in which no server counts. Round trips to a server are counted by a proxy.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import count as numbers
from pathlib import Path
from typing import Any, Final

from benchmarks.frame import Bench, Case, Part, Target, Timed, main, started_server
from librmq.clock import SystemClock
from librmq.dedup import DedupListener
from librmq.idempotence import Outbox, OutboxSender, transactional, upgrade_tables
from librmq.idempotence._drivers import rendered
from librmq.idempotence._transactional_tables import record_statements
from librmq.idempotence.stores import DedupStatements, DedupStore, SqliteDedupStore
from librmq.message.message import Message

ON_FILES: Final = 20_000
ON_SERVERS: Final = 2_000
UNTIL_MS: Final = 1 << 45
BEGUN: Final = 1 << 62
"""What stands in a record until its block has ended, on SQLite."""
CLAIM_MS: Final = 600_000
KEEP_MS: Final = 72 * 3_600_000
CLOCK: Final = SystemClock()
OWNER: Final = "0123456789abcdef01234567"
_prefix: Final = numbers()
"""Each run has keys of its own."""


@dataclass(frozen=True)
class Guarded:
    """A store, its bare form, and the number of messages."""

    store: DedupStore
    bare: Callable[[str], None]
    count: int


def claim_and_mark(guarded: Guarded, _: Path) -> Timed:
    """Claim and finish keys by the store."""

    def both(key: str) -> None:
        now_ms = CLOCK.now_ms()
        guarded.store.claim(key, OWNER, now_ms, now_ms + CLAIM_MS)
        guarded.store.finish(key, OWNER, now_ms, now_ms + KEEP_MS)

    yield from _each_key(guarded.count, both)


def guard(guarded: Guarded, _: Path) -> Timed:
    """Consume messages by a guarded listener."""
    run = next(_prefix)
    listener = DedupListener(lambda message: None, guarded.store, group="billing", clock=CLOCK)
    messages = [
        Delivery("orders", b"x", tags="paid", unique_key=f"{run}-{number:08d}") for number in range(guarded.count)
    ]
    yield
    for message in messages:
        listener(message)
    yield guarded.count


def bare(guarded: Guarded, _: Path) -> Timed:
    yield from _each_key(guarded.count, guarded.bare)


def _parameters(key: str) -> tuple[dict[str, str | int], dict[str, str | int]]:
    """Return the parameters of a claim and a mark, with the times that a guard gives them."""
    now_ms = CLOCK.now_ms()
    mark: dict[str, str | int] = {"key": key, "owner": OWNER, "now_ms": now_ms, "expires_at_ms": now_ms + KEEP_MS}
    return mark | {"expires_at_ms": now_ms + CLAIM_MS}, mark


def _each_key(count: int, both: Callable[[str], None]) -> Timed:
    run = next(_prefix)
    keys = [f"shop:orders:billing:paid:{run}-{number:08d}" for number in range(count)]
    yield
    for key in keys:
        both(key)
    yield count


def sqlite(bench: Bench) -> Iterator[Guarded]:
    """Yield the store that needs no server."""
    statements = DedupStatements("rmq_dedup")
    with bench.folder() as folder, SqliteDedupStore(folder / "ours.db") as store:
        SqliteDedupStore(folder / "bare.db").close()
        with closing(sqlite3.connect(folder / "bare.db", isolation_level=None)) as connection:
            connection.execute("PRAGMA synchronous = NORMAL")

            def both(key: str) -> None:
                claim, finish = _parameters(key)
                connection.execute(statements.claim, claim).fetchall()
                connection.execute(statements.finish, finish)

            yield Guarded(store, both, bench.count(ON_FILES))


def engine_of_an_application(bench: Bench) -> Iterator[Guarded]:
    """Yield the store of a PostgreSQL on this machine, on an engine whose connections commit transactions."""
    return server_of_records(bench, has_engine=True)


def server_of_records(bench: Bench, *, has_engine: bool = False) -> Iterator[Guarded]:
    """Yield the store of a PostgreSQL on this machine."""
    import psycopg
    from sqlalchemy import create_engine

    from librmq.idempotence._server_stores import SqlDedupStore

    statements = DedupStatements("rmq_dedup", "postgresql")
    claim, finish = (rendered(statement, "pyformat")[0] for statement in (statements.claim, statements.finish))
    with (
        started_server("PostgreSQL") as server,
        SqlDedupStore(create_engine(server.url) if has_engine else server.url) as store,
        closing(_connect(psycopg, server.port, autocommit=True)) as connection,
    ):
        store.create()
        cursor = connection.cursor()

        def both(key: str) -> None:
            parameters = _parameters(key)
            cursor.execute(claim, parameters[0])
            cursor.fetchall()
            cursor.execute(finish, parameters[1])

        yield Guarded(store, both, bench.count(ON_SERVERS))
        store.engine.dispose()


def _connect(psycopg: Any, port: int, *, autocommit: bool = False) -> Any:
    return psycopg.connect(host="127.0.0.1", port=port, user="rmq", dbname="postgres", autocommit=autocommit)


def redis(bench: Bench) -> Iterator[Guarded]:
    """Yield the store of a Redis on this machine; its bare form is the minimum of two round trips, without a token."""
    from redis import Redis

    from librmq.idempotence._server_stores import RedisDedupStore

    with started_server("Redis") as server, closing(Redis.from_url(server.url)) as connection:

        def both(key: str) -> None:
            connection.set("bare:" + key, OWNER, nx=True, px=600_000)
            connection.set("bare:" + key, "consumed", px=600_000)

        yield Guarded(RedisDedupStore(connection), both, bench.count(ON_SERVERS))


@dataclass(frozen=True)
class Consumed:
    """A connection, and the number of messages that are consumed on it."""

    connection: Any
    count: int
    insert: str
    """The statement that writes a record, in the driver's style of parameters; it returns a row on PostgreSQL."""
    finish: str


_EFFECT: Final = "UPDATE accounts SET balance = balance - 1 WHERE id = 7"


def consume(consumed: Consumed, _: Path) -> Timed:
    """Consume messages, each with its effect, by `transactional`."""
    connection, clock = consumed.connection, CLOCK
    messages = _messages(consumed)
    yield
    for message in messages:
        with transactional(connection, message, group="billing", clock=clock) as first:
            if first:
                connection.execute(_EFFECT)
    yield consumed.count


def consume_bare(consumed: Consumed, _: Path) -> Timed:
    """Run the same statements."""
    connection, cursor, finish = consumed.connection, consumed.connection.cursor(), consumed.finish
    rows = [
        {
            "key": f":orders:billing::{message.unique_key}",
            "number": BEGUN if finish else UNTIL_MS,
            "name": f" librmq-{number}",
            "expires_at_ms": UNTIL_MS,
        }
        for number, message in enumerate(_messages(consumed))
    ]
    yield
    for row in rows:
        cursor.execute(consumed.insert, row)
        if not finish:
            cursor.fetchall()
        connection.execute(_EFFECT)
        if finish:
            cursor.execute(finish, row)
        connection.commit()
    yield consumed.count


def _messages(consumed: Consumed) -> list[Delivery]:
    run = next(_prefix)
    return [Delivery("orders", b"x", unique_key=f"{run}-{number:08d}") for number in range(consumed.count)]


class Delivery(Message):
    """A message as a consumer delivers it."""

    __slots__ = ()

    @property
    def unique_key(self) -> str | None:
        return self.properties["UNIQ_KEY"]


def _consumed(connection: Any, count: int, dialect: str, style: str) -> Consumed:
    upgrade_tables(connection)
    connection.execute("CREATE TABLE accounts (id INTEGER PRIMARY KEY, balance INTEGER)")
    connection.execute("INSERT INTO accounts VALUES (7, 0)")
    connection.commit()
    statements = record_statements("rmq_messages", dialect)
    finish = "" if dialect == "reported" else rendered(statements.finish, style)[0]
    return Consumed(connection, count, rendered(statements.insert, style)[0], finish)


def sqlite_file(bench: Bench) -> Iterator[Consumed]:
    """Yield a file with a write-ahead log."""
    with bench.folder() as folder, closing(sqlite3.connect(folder / "shop.db")) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        yield _consumed(connection, bench.count(ON_FILES), "sqlite", "named")


def postgresql(bench: Bench) -> Iterator[Consumed]:
    """Yield a connection of psycopg to a PostgreSQL on this machine."""
    import psycopg

    with (
        started_server("PostgreSQL") as server,
        closing(_connect(psycopg, server.port)) as connection,
    ):
        yield _consumed(connection, bench.count(ON_SERVERS), "reported", "pyformat")


@dataclass(frozen=True)
class Rows:
    """A database with an outbox, a plain connection to it, and the number of rows in each run."""

    engine: Any
    connection: Any
    count: int


class _Taker:
    """A producer whose sends cost nothing."""

    def send(self, message: Message) -> None:
        pass


def _filled(rows: Rows) -> str:
    table = f"outbox_{next(_prefix)}"
    upgrade_tables(rows.engine, dedup=None, messages=None, transactions=None, outbox=table)
    outbox = Outbox(table=table, clock=CLOCK)
    with rows.engine.begin() as connection:
        for number in range(rows.count):
            outbox.add(connection, Message("orders", b"x" * 100), order_key=f"order-{number % 50}")
    return table


def send(rows: Rows, _: Path) -> Timed:
    """Send the rows of an outbox."""
    sender = OutboxSender(rows.engine, _Taker(), table=_filled(rows), clock=CLOCK)
    yield
    sender.run_due(CLOCK.now_ms())
    yield sender.sent


def send_bare(rows: Rows, _: Path) -> Timed:
    """Run the same statements."""
    table, cursor = _filled(rows), rows.connection.cursor()
    page = (
        "SELECT candidate.id, order_key, due_timestamp_ms, (SELECT earlier.id "
        f"FROM {table} earlier WHERE earlier.order_key = candidate.order_key AND earlier.state = 0 "
        "AND earlier.id < candidate.id ORDER BY earlier.id DESC LIMIT 1) AS id_before "
        f"FROM {table} candidate WHERE state = 0 AND due_timestamp_ms <= %s "
        "ORDER BY candidate.due_timestamp_ms, candidate.id LIMIT 100"
    )
    claim = f"UPDATE {table} SET owner = %s, due_timestamp_ms = %s WHERE id = ANY(%s) AND state = 0"
    read = (
        f"SELECT id, topic, properties, flag, body FROM {table} WHERE id = ANY(%s) AND owner = %s AND state = 0 "
        "ORDER BY id"
    )
    mark = f"UPDATE {table} SET state = 1, due_timestamp_ms = %s WHERE id = ANY(%s) AND state = 0 AND owner = %s"
    yield
    while ids := [row[0] for row in cursor.execute(page, (UNTIL_MS,)).fetchall()]:
        cursor.execute(claim, (OWNER, UNTIL_MS, ids))
        sent = [row[0] for row in cursor.execute(read, (ids, OWNER)).fetchall()]
        cursor.execute(mark, (UNTIL_MS, sent, OWNER))
    yield rows.count


def outbox_on_postgresql(bench: Bench) -> Iterator[Rows]:
    """Yield an engine and a plain connection to a PostgreSQL on this machine."""
    import psycopg
    from sqlalchemy import create_engine

    with (
        started_server("PostgreSQL") as server,
        closing(_connect(psycopg, server.port, autocommit=True)) as connection,
    ):
        engine = create_engine(server.url)
        yield Rows(engine, connection, bench.count(ON_SERVERS))
        engine.dispose()


@dataclass(frozen=True)
class Counted:
    """Connections through a proxy that counts round trips."""

    connect: Callable[[], Any]
    trips: Any


def _behind_a_proxy(kind: str, connect: Callable[[int], Any]) -> Iterator[Counted]:
    from tests.idempotence.servers import counted

    with started_server(kind) as server, counted(server) as trips:
        with closing(connect(trips.port)) as connection:
            upgrade_tables(connection)
            connection.cursor().execute("CREATE TABLE accounts (id INTEGER PRIMARY KEY, balance INTEGER)")
            connection.commit()
        yield Counted(lambda: connect(trips.port), trips)


def psycopg_behind_a_proxy(bench: Bench) -> Iterator[Counted]:
    """Yield connections of psycopg."""
    import psycopg

    yield from _behind_a_proxy("PostgreSQL", lambda port: _connect(psycopg, port))


def pymysql_behind_a_proxy(bench: Bench) -> Iterator[Counted]:
    """Yield connections of PyMySQL."""
    import pymysql

    yield from _behind_a_proxy(
        "MySQL", lambda port: pymysql.connect(host="127.0.0.1", port=port, user="root", database="rmq")
    )


def round_trips(counted: Counted, _: Path) -> dict[str, float]:
    """Count the round trips of a message and of its duplicate."""
    run, counts = next(_prefix), []
    with closing(counted.connect()) as connection:
        for number in (0, 1, 1):  # The first message also prepares the connection.
            before = counted.trips.count
            message = Delivery("orders", b"x", unique_key=f"{run}-{number}")
            with transactional(connection, message, group="billing", clock=CLOCK) as first:
                if first:
                    connection.cursor().execute(_EFFECT)
            counts.append(counted.trips.count - before)
    return {"message": counts[1], "duplicate": counts[2]}


def _trips(detail: str, setup: Any, message: int, duplicate: int, needs: str) -> list[Case]:
    return [
        Case(f"a {name} and its effect" if name == "message" else "a duplicate", Part(round_trips, name), detail,
             unit="round trips", target=Target(most, at_most=True), setup=setup, needs=(needs,))
        for name, most in (("message", message), ("duplicate", duplicate))
    ]  # fmt: skip


CASES: Final = [
    Case("a message and its effect", consume, "SQLite", consume_bare, "the bare statements", Target(0.8, 0.8),
         setup=sqlite_file, limit=True, cpu=True),
    Case("a message and its effect", consume, "PostgreSQL", consume_bare, "the bare statements", Target(0.8, 0.9),
         setup=postgresql, limit=True, cpu=True, needs=("psycopg",)),
    Case("claim and mark", claim_and_mark, "SQLite", bare, "the bare statements", Target(0.8, 0.95), setup=sqlite,
         limit=True, cpu=True),
    Case("guarded listener", guard, "SQLite", bare, "the bare statements", Target(0.8), setup=sqlite, limit=True,
         cpu=True),
    Case("claim and mark", claim_and_mark, "PostgreSQL", bare, "the bare statements", Target(0.8),
         setup=server_of_records, limit=True, needs=("psycopg", "sqlalchemy")),
    Case("guarded listener", guard, "PostgreSQL, an application's engine", bare, "the bare statements", Target(0.8),
         setup=engine_of_an_application, limit=True, needs=("psycopg", "sqlalchemy")),
    Case("send an outbox", send, "PostgreSQL, 50 order keys", send_bare, "the bare statements", Target(0.8),
         setup=outbox_on_postgresql, limit=True, needs=("psycopg", "sqlalchemy")),
    *_trips("psycopg", psycopg_behind_a_proxy, 4, 3, "psycopg"),
    *_trips("PyMySQL", pymysql_behind_a_proxy, 5, 3, "pymysql"),
    Case("claim and mark", claim_and_mark, "Redis", bare, "SET NX and SET", setup=redis, limit=True, needs=("redis",)),
]  # fmt: skip

if __name__ == "__main__":
    main("dedup", __doc__, CASES)
