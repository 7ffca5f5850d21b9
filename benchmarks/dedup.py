"""The dedup guard and its stores, compared with the bare statements that they execute.

A message costs a claim and a mark. The bare form runs the same two statements or commands on a plain connection of the
driver, with keys and parameters prepared. librmq's side is the two calls of the store, and a whole delivery through
`DedupListener` to a listener that does nothing.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import count as numbers
from pathlib import Path
from typing import Any, Final

from benchmarks.frame import AbsentError, Bench, Case, Target, Timed, main
from librmq.clock import SystemClock
from librmq.dedup import DedupListener
from librmq.idempotence.stores import DedupStatements, DedupStore, SqliteDedupStore
from librmq.message.message import Message

ON_FILES: Final = 20_000
ON_SERVERS: Final = 2_000
LIST: Final = 32
UNTIL_MS: Final = 1 << 45
OWNER: Final = "0123456789abcdef01234567"
_prefix: Final = numbers()
"""Each run has keys of its own."""


class Delivery(Message):
    """A message as a consumer has it."""

    __slots__ = ()

    @property
    def unique_key(self) -> str | None:
        return self.properties["UNIQ_KEY"]

    @property
    def message_id(self) -> str:
        return self.properties["UNIQ_KEY"]


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


def deliver(guarded: Guarded, _: Path, *, size: int = 1) -> Timed:
    """Deliver messages to a guarded listener, one by one or in lists."""
    guard = DedupListener(
        lambda messages: None, guarded.store, group=f"lists of {size}", application="shop", clock=SystemClock(),
        batch=size > 1,
    )  # fmt: skip
    run = next(_prefix)
    messages = [
        Delivery("orders", b"x", tags="paid", unique_key=f"{run}-{number:08d}") for number in range(guarded.count)
    ]
    calls: list[Any] = [messages[at : at + size] for at in range(0, guarded.count, size)] if size > 1 else messages
    yield
    for call in calls:
        guard(call)
    yield guarded.count
    assert guard.counts.consumed == guarded.count


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
    Case("guarded delivery", deliver, "SQLite", bare, "the bare statements", setup=sqlite, limit=True),
    Case("claim and mark", claim_and_mark, "Redis", bare, "SET NX and SET", setup=redis, limit=True, needs=("redis",)),
    Case(f"guarded delivery, lists of {LIST}", partial(deliver, size=LIST), "Redis", bare, "SET NX and SET",
         setup=redis, limit=True, needs=("redis",)),
]  # fmt: skip

if __name__ == "__main__":
    main("dedup", __doc__, CASES)
