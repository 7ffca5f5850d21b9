"""The dedup guard and its stores, compared with the bare statements that they execute.

A message costs a claim and a mark. The bare form runs the same two statements or commands on a plain connection of the
driver, with keys and parameters prepared.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import count as numbers
from pathlib import Path
from typing import Final

from benchmarks.frame import AbsentError, Bench, Case, Target, Timed, main
from librmq.idempotence.stores import DedupStatements, DedupStore, SqliteDedupStore

ON_FILES: Final = 20_000
ON_SERVERS: Final = 2_000
UNTIL_MS: Final = 1 << 45
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
        guarded.store.claim(key, OWNER, 0, UNTIL_MS)
        guarded.store.finish(key, OWNER, 0, UNTIL_MS)

    yield from _each_key(guarded.count, both)


def bare(guarded: Guarded, _: Path) -> Timed:
    yield from _each_key(guarded.count, guarded.bare)


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
                parameters = {"key": key, "owner": OWNER, "now_ms": 0, "expires_at_ms": UNTIL_MS}
                connection.execute(statements.claim, parameters).fetchall()
                connection.execute(statements.finish, parameters)

            yield Guarded(store, both, bench.count(ON_FILES))


def redis(bench: Bench) -> Iterator[Guarded]:
    """Yield the store of a Redis on this machine; its bare form is the minimum of two round trips, without a token."""
    from redis import Redis

    from librmq.idempotence.dedup_redis import RedisDedupStore
    from tests.idempotence.servers import STARTERS, Absent

    try:
        with STARTERS["redis"]() as server, closing(Redis.from_url(server.url)) as connection:

            def both(key: str) -> None:
                connection.set("bare:" + key, OWNER, nx=True, px=600_000)
                connection.set("bare:" + key, "consumed", px=600_000)

            yield Guarded(RedisDedupStore(connection), both, bench.count(ON_SERVERS))
    except Absent:
        raise AbsentError("a Redis server") from None


CASES: Final = [
    Case("claim and mark", claim_and_mark, "SQLite", bare, "the bare statements", Target(0.8, 0.95), setup=sqlite,
         limit=True),
    Case("claim and mark", claim_and_mark, "Redis", bare, "SET NX and SET", setup=redis, limit=True, needs=("redis",)),
]  # fmt: skip

if __name__ == "__main__":
    main("dedup", __doc__, CASES)
