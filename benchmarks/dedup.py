"""The dedup guard and its stores, compared with the bare statements that they execute: ``python -m benchmarks.dedup``.

A message costs a claim and a mark. The bare form runs the same two statements or scripts on a plain connection of the
driver, with keys and parameters prepared. librmq's side is the two calls of the store, and a whole delivery through
`DedupListener` to a listener that does nothing.
"""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Final

from benchmarks.common import NO_TARGET, Bench, Measure, Row, Run, Stopwatch, Target, command, compare
from librmq.clock import SystemClock
from librmq.dedup import DedupListener
from librmq.idempotence.stores import DedupStatements, DedupStore, SqliteDedupStore
from librmq.message.message import Message

PACKAGES: Final = ("librmq", "SQLAlchemy", "psycopg", "PyMySQL", "redis")
ON_FILES: Final = 20_000
ON_SERVERS: Final = 2_000
LIST: Final = 32
UNTIL_MS: Final = 1 << 45
OWNER: Final = "0123456789abcdef01234567"


class Delivery(Message):
    """Make a message like a consumer's."""

    __slots__ = ()

    @property
    def unique_key(self) -> str | None:
        return self.properties["UNIQ_KEY"]

    @property
    def message_id(self) -> str:
        return self.properties["UNIQ_KEY"]


Two = Callable[[str], None]
"""Claims and marks one key."""


def _store(store: DedupStore) -> Two:
    def both(key: str) -> None:
        store.claim(key, OWNER, 0, UNTIL_MS)
        store.finish(key, OWNER, 0, UNTIL_MS)

    return both


def _timed(count: int, prefix: str, both: Two) -> float:
    keys = [f"shop:orders:billing:paid:{prefix}{number:08d}" for number in range(count)]
    with Stopwatch() as watch:
        for key in keys:
            both(key)
    return count / watch.seconds


def _delivered(count: int, prefix: str, store: DedupStore) -> float:
    guard = DedupListener(lambda message: None, store, group="billing", application="shop", clock=SystemClock())
    messages = [Delivery("orders", b"x", tags="paid", unique_key=f"{prefix}{number:08d}") for number in range(count)]
    with Stopwatch() as watch:
        for message in messages:
            guard(message)
    assert guard.counts.consumed == count
    return count / watch.seconds


def _delivered_in_lists(count: int, prefix: str, store: DedupStore) -> float:
    guard = DedupListener(
        lambda messages: None, store, group="lists", application="shop", clock=SystemClock(), batch=True
    )
    messages = [Delivery("orders", b"x", tags="paid", unique_key=f"{prefix}{number:08d}") for number in range(count)]
    with Stopwatch() as watch:
        for begin in range(0, count, LIST):
            guard(messages[begin : begin + LIST])
    assert guard.counts.consumed == count
    return count / watch.seconds


def _bare_sqlite(folder: Path, count: int) -> float:
    statements = DedupStatements("rmq_dedup")
    SqliteDedupStore(folder / "bare.db").close()
    with closing(sqlite3.connect(folder / "bare.db", isolation_level=None)) as connection:
        connection.execute("PRAGMA synchronous = NORMAL")

        def both(key: str) -> None:
            parameters = {"key": key, "owner": OWNER, "now_ms": 0, "expires_at_ms": UNTIL_MS}
            connection.execute(statements.claim, parameters).fetchall()
            connection.execute(statements.finish, parameters)

        return _timed(count, "", both)


def sqlite(bench: Bench) -> list[Row]:
    """Measure the store that needs no server."""
    count = bench.count(ON_FILES)

    def ours(folder: Path) -> float:
        with SqliteDedupStore(folder / "ours.db") as store:
            return _timed(count, "", _store(store))

    def guard(folder: Path) -> float:
        with SqliteDedupStore(folder / "ours.db") as store:
            return _delivered(count, "", store)

    rates = bench.interleave({"ours": ours, "guard": guard, "bare": lambda folder: _bare_sqlite(folder, count)})
    target = Target(0.8, 0.95)
    return [
        compare("claim and mark", "SQLite", "the bare statements", rates["ours"], rates["bare"], target, limit=True),
        compare("guarded delivery", "SQLite", "the bare statements", rates["guard"], rates["bare"], limit=True),
    ]


def _on_server(
    bench: Bench, name: str, case: str, against: str, make: Callable[[ExitStack, Any], tuple[DedupStore, Two]]
) -> list[Row]:
    """Return the rows of a server started for them; none if it cannot start."""
    from tests.idempotence.servers import STARTERS, Absent

    count = bench.count(ON_SERVERS)
    with ExitStack() as stack:
        try:
            server = stack.enter_context(STARTERS[name]())
        except Absent:
            bench.absent.add(f"a {case} server")
            return []
        store, bare = make(stack, server)
        numbers = iter(range(1 << 30))

        def run(one: Callable[[str], float]) -> Run:
            return lambda _: one(f"{next(numbers)}-")

        rates = bench.interleave(
            {
                "ours": run(lambda prefix: _timed(count, prefix, _store(store))),
                "guard": run(lambda prefix: _delivered(count, prefix, store)),
                "lists": run(lambda prefix: _delivered_in_lists(count, prefix, store)),
                "bare": run(lambda prefix: _timed(count, prefix, bare)),
            }
        )
    return [
        compare(path, case, against, rates[ours], rates["bare"], NO_TARGET, limit=True)
        for path, ours in (
            ("claim and mark", "ours"),
            ("guarded delivery", "guard"),
            (f"guarded delivery, lists of {LIST}", "lists"),
        )
    ]


def _sql(stack: ExitStack, server: Any, connect: Callable[[], Any], style: str) -> tuple[DedupStore, Two]:
    from librmq.idempotence.dedup_sql import SqlDedupStore
    from librmq.idempotence.sqltables import rendered

    store = stack.enter_context(SqlDedupStore(server.url)).create()
    claim, _ = rendered(store.statements.claim, style)
    finish, _ = rendered(store.statements.finish, style)
    cursor = stack.enter_context(closing(connect())).cursor()

    def both(key: str) -> None:
        parameters = {"key": key, "owner": OWNER, "now_ms": 0, "expires_at_ms": UNTIL_MS}
        cursor.execute(claim, parameters)
        if cursor.description:
            cursor.fetchall()
        cursor.execute(finish, parameters)

    return store, both


def postgresql(bench: Bench) -> list[Row]:
    """Measure PostgreSQL on this machine, without flushes."""
    if not bench.has("psycopg") or not bench.has("sqlalchemy"):
        return []
    import psycopg

    def make(stack: ExitStack, server: Any) -> tuple[DedupStore, Two]:
        address = f"host=127.0.0.1 port={server.port} user=rmq dbname=postgres"
        return _sql(stack, server, lambda: psycopg.connect(address, autocommit=True), "pyformat")

    return _on_server(bench, "postgresql", "PostgreSQL", "the bare statements", make)


def mysql(bench: Bench) -> list[Row]:
    """Measure MariaDB on this machine, without flushes."""
    if not bench.has("pymysql") or not bench.has("sqlalchemy"):
        return []
    import pymysql

    def make(stack: ExitStack, server: Any) -> tuple[DedupStore, Two]:
        def connect() -> Any:
            return pymysql.connect(host="127.0.0.1", port=server.port, user="root", database="rmq", autocommit=True)

        return _sql(stack, server, connect, "pyformat")

    return _on_server(bench, "mysql", "MariaDB", "the bare statements", make)


def redis(bench: Bench) -> list[Row]:
    """Measure Redis on this machine, compared with the minimum cost of two round trips: SET NX and SET, unfenced."""
    if not bench.has("redis"):
        return []
    import redis as client

    from librmq.idempotence.dedup_redis import RedisDedupStore

    def make(stack: ExitStack, server: Any) -> tuple[DedupStore, Two]:
        connection = stack.enter_context(closing(client.Redis.from_url(server.url)))

        def both(key: str) -> None:
            connection.set("bare:" + key, OWNER, nx=True, px=600_000)
            connection.set("bare:" + key, "consumed", px=600_000)

        return RedisDedupStore(connection), both

    return _on_server(bench, "redis", "Redis", "SET NX and SET", make)


ROWS: Final[dict[str, Measure]] = {
    "sqlite": sqlite,
    "postgresql": postgresql,
    "mysql": mysql,
    "redis": redis,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, show the table, and return the exit status."""
    return command("dedup", __doc__ or "", ROWS, PACKAGES, arguments)


if __name__ == "__main__":
    sys.exit(main())
