"""Stores for the records of a dedup guard: their protocol, their keys, and two stores without a server.

`librmq.dedup` has the guard itself, and the states of a record.
"""

from __future__ import annotations

import enum
import hashlib
import os
import re
import sqlite3
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import lru_cache
from heapq import heappop, heappush
from os import PathLike
from typing import Any, Final, Literal, NamedTuple, Protocol, TypeVar
from urllib.parse import quote

from librmq.clock import Clock
from librmq.config import to_seconds
from librmq.errors import ConfigError, DedupStoreBusyError, DedupStoreError, StoreClosedError
from librmq.idempotence._drivers import StatementResult, is_refusal
from librmq.idempotence._sqltables import (
    KEY_LIMIT,
    PURGE_ROWS,
    check_name,
    let_writers_in,
    purge_statement,
    upgrade_tables,
)
from librmq.listener import Delivered
from librmq.override import override
from librmq.runtime import Background, critical
from librmq.runtime.closing import Closing
from librmq.runtime.event_log import EventLog
from librmq.runtime.locks import Inherited, Lock, call_in_child

# ruff: noqa: D102 (the methods of a store are described at DedupStore)


T = TypeVar("T")

_log = EventLog("librmq.dedup")

PURGE_INTERVAL: Final = 60.0


# --------------------------------------------------------------------------------------------------------------- keys

_UNSAFE: Final = re.compile(r"[^!-~]|[%#]")
_UNSAFE_SCOPE: Final = re.compile(r"[^!-~]|[%#:]")
_SAFE_CHARACTERS: Final = "".join(map(chr, range(33, 127))).replace("%", "").replace("#", "")


def dedup_key(application: str, topic: str, group: str, tag: str | None, key: str, *, limit: int = KEY_LIMIT) -> str:
    """Return the key of a record, ``application:topic:group:tag:key`` in printable ASCII, ``limit`` characters at most.

    Records that differ in any part have different keys: other characters are percent-encoded, and a longer key is cut
    and ends in ``#`` and the SHA-256 of the whole key.
    """
    text = _scope(application, topic, group, tag) + (
        quote(key, safe=_SAFE_CHARACTERS, errors="surrogatepass") if _UNSAFE.search(key) else key
    )
    if len(text) <= limit:
        return text
    return f"{text[: limit - 65]}#{hashlib.sha256(text.encode()).hexdigest()}"


@lru_cache(maxsize=1024)
def _scope(application: str, topic: str, group: str, tag: str | None) -> str:
    safe = _SAFE_CHARACTERS.replace(":", "")
    return "".join(
        (quote(part, safe=safe, errors="surrogatepass") if _UNSAFE_SCOPE.search(part) else part) + ":"
        for part in (application, topic, group, tag or "")
    )


def unique_id(message: Delivered) -> str:
    """Return the id that identifies a message: the producer's unique id, else the broker's first id.

    It is the same for all deliveries of one send. A message that was sent twice has two ids; use a business key for it.
    """
    return message.unique_key or message.properties.get("ORIGIN_MESSAGE_ID") or message.message_id


# ------------------------------------------------------------------------------------------------------------- stores


class Claim(enum.IntEnum):
    """The result of a claim."""

    NEW = 0
    """The caller holds the claim; there was no record."""
    TAKEN_OVER = 1
    """The caller holds the claim; the holder before did not end in time."""
    CONSUMING = 2
    """Another caller holds the claim."""
    CONSUMED = 3
    """The message was consumed."""


CLAIMS: Final[tuple[Claim, ...]] = tuple(Claim)


class DedupRecord(NamedTuple):
    """The record of a key."""

    consumed: bool
    """False while a listener consumes the message."""
    owner: str
    """The token of the claim."""
    expires_timestamp_ms: int
    """From this time on the record counts as absent."""


class DedupStore(Protocol):
    """Keeps records. Each call is atomic and thread-safe, and raises `DedupStoreError` if it fails.

    `dedup_key` makes the keys. ``owner`` is a new token for each claim. A call that is repeated with the same token,
    because its answer was lost, returns the same result. Times are milliseconds since 1970 by the caller's clock: the
    clocks of all callers must differ by much less than the duration of a claim.
    """

    blocking: bool
    """Whether a call can wait for a disk or a network, so that it must not run on an event loop."""

    def claim(self, key: str, owner: str, now_ms: int, expires_at_ms: int) -> Claim:
        """Claim ``key`` until ``expires_at_ms`` if there is no record, or an expired one."""

    def finish(self, key: str, owner: str, now_ms: int, expires_at_ms: int) -> bool:
        """Mark ``key`` as consumed until ``expires_at_ms``; return False if the claim is another's or expired."""

    def release(self, key: str, owner: str, now_ms: int) -> bool:
        """Remove the record; return False if the claim is not ``owner``'s or has expired."""

    def read(self, key: str, now_ms: int) -> DedupRecord | None:
        """Return the record unless it has expired. Only for logs, not for decisions."""

    def purge(self, now_ms: int, limit: int) -> int:
        """Delete at most ``limit`` records that have expired, and return their number."""


class MemoryDedupStore:
    """Records in memory, for tests and for effects that end with the process. Thread-safe.

    ``clock`` is the time of guards that have none of their own.
    """

    blocking = False

    def __init__(self, *, clock: Clock | None = None) -> None:
        self.clock = clock
        self._records: dict[str, DedupRecord] = {}
        # This is a heap, in which a record's former expiries stay until they pass.
        self._expiries: list[tuple[int, str]] = []
        self._lock = Lock()
        _lock_owners.add(self)

    def claim(self, key: str, owner: str, now_ms: int, expires_at_ms: int) -> Claim:
        with self._lock:
            record = self._records.get(key)
            if record is not None and record.owner != owner and record.expires_timestamp_ms > now_ms:
                return Claim.CONSUMED if record.consumed else Claim.CONSUMING
            self._put_record(key, DedupRecord(consumed=False, owner=owner, expires_timestamp_ms=expires_at_ms))
            return Claim.NEW if record is None or record.owner == owner else Claim.TAKEN_OVER

    def finish(self, key: str, owner: str, now_ms: int, expires_at_ms: int) -> bool:
        with self._lock:
            if not self._is_held(key, owner, now_ms):
                return False
            self._put_record(key, DedupRecord(consumed=True, owner=owner, expires_timestamp_ms=expires_at_ms))
            return True

    def release(self, key: str, owner: str, now_ms: int) -> bool:
        with self._lock:
            if not self._is_held(key, owner, now_ms) or self._records[key].consumed:
                return False
            del self._records[key]
            return True

    def read(self, key: str, now_ms: int) -> DedupRecord | None:
        with self._lock:
            record = self._records.get(key)
            return record if record is not None and record.expires_timestamp_ms > now_ms else None

    def purge(self, now_ms: int, limit: int) -> int:
        purged, more = 0, True
        while more and purged < limit:  # Slices let other callers in between, and former expiries don't count.
            with self._lock:
                before = len(self._records)
                for _ in range(min(limit - purged, PURGE_ROWS)):
                    more = bool(self._expiries) and self._expiries[0][0] <= now_ms
                    if not more:
                        break
                    at_ms, key = self._expiries[0]
                    record = self._records.get(key)
                    if record is not None and record.expires_timestamp_ms == at_ms:
                        del self._records[key]
                    heappop(self._expiries)
                purged += before - len(self._records)
        return purged

    def __len__(self) -> int:
        """Return the number of records, expired ones included."""
        return len(self._records)

    @override
    def __repr__(self) -> str:
        with self._lock:
            consumed = sum(record.consumed for record in self._records.values())
        return f"<MemoryDedupStore: {consumed} keys consumed, {len(self._records) - consumed} being consumed>"

    def _put_record(self, key: str, record: DedupRecord) -> None:
        # In this order, so that Ctrl-C between them leaves no record that is never purged.
        heappush(self._expiries, (record.expires_timestamp_ms, key))
        self._records[key] = record

    def _is_held(self, key: str, owner: str, now_ms: int) -> bool:
        record = self._records.get(key)
        return record is not None and record.owner == owner and record.expires_timestamp_ms > now_ms


class DedupStatements:
    """The statements of a table of records; ``:names`` are their parameters.

    The claim of SQLite and PostgreSQL returns a row with its outcome. MySQL's INSERT returns no rows, so there the
    outcome comes back as the last inserted id.
    """

    def __init__(self, table: str, dialect: str = "sqlite") -> None:
        check_name(table)
        self.claim: str = (_claim_of_mysql if dialect == "mysql" else _claim)(table)
        mine = "dedup_key = :key AND owner = :owner AND expires_timestamp_ms > :now_ms"
        self.finish: str = f"UPDATE {table} SET state = 1, expires_timestamp_ms = :expires_at_ms WHERE {mine}"
        self.release: str = f"DELETE FROM {table} WHERE {mine} AND state = 0"
        self.read: str = (
            f"SELECT state, owner, expires_timestamp_ms FROM {table} "
            "WHERE dedup_key = :key AND expires_timestamp_ms > :now_ms"
        )
        self.purge: str = purge_statement(table, "dedup_key", dialect)


_REPEATED: Final = 4
"""Outcome of a claim at MySQL that is repeated with the same token."""


def _claim(table: str) -> str:
    """Return the claim for SQLite and PostgreSQL: it decides and answers, and a record that is not free stays."""
    free = "held.expires_timestamp_ms <= :now_ms OR held.owner = :owner"
    return (
        f"INSERT INTO {table} AS held (dedup_key, state, owner, claims, expires_timestamp_ms) "
        "VALUES (:key, 0, :owner, 1, :expires_at_ms) ON CONFLICT (dedup_key) DO UPDATE SET "
        f"state = CASE WHEN {free} THEN 0 ELSE held.state END, "
        f"owner = CASE WHEN {free} THEN :owner ELSE held.owner END, "
        f"claims = CASE WHEN ({free}) AND held.owner <> :owner THEN held.claims + 1 ELSE held.claims END, "
        f"expires_timestamp_ms = CASE WHEN {free} THEN :expires_at_ms ELSE held.expires_timestamp_ms END "
        "RETURNING CASE WHEN owner <> :owner THEN 2 + state WHEN claims > 1 THEN 1 ELSE 0 END"
    )


def _claim_of_mysql(table: str) -> str:
    """Return the claim for MySQL.

    MySQL assigns from left to right, and each assignment sees the earlier ones. The time, which shows whether the row
    was free, therefore changes last, if the owner is this caller by then.
    """
    free = "expires_timestamp_ms <= :now_ms OR owner = :owner"
    outcome = (
        f"CASE WHEN owner = :owner THEN {_REPEATED} WHEN expires_timestamp_ms <= :now_ms THEN 1 ELSE 2 + state END"
    )
    return (
        f"INSERT INTO {table} (dedup_key, state, owner, claims, expires_timestamp_ms) "
        "VALUES (:key, 0, :owner, 1, :expires_at_ms) ON DUPLICATE KEY UPDATE "
        f"claims = IF(LAST_INSERT_ID({outcome}) = 1, claims + 1, claims), "
        f"state = IF({free}, 0, state), "
        f"owner = IF({free}, :owner, owner), "
        "expires_timestamp_ms = IF(owner = :owner, :expires_at_ms, expires_timestamp_ms)"
    )


class TableStore(Closing, ABC):
    """A store whose calls are the statements of a table of records."""

    blocking = True
    dialect = "sqlite"
    statements: DedupStatements

    @abstractmethod
    def _execute(self, statement: str, parameters: Mapping[str, str | int]) -> StatementResult:
        """Run one statement in a transaction of its own."""

    @abstractmethod
    @override
    def close(self) -> None:
        """Close the connections."""

    def claim(self, key: str, owner: str, now_ms: int, expires_at_ms: int) -> Claim:
        answer = self._execute(
            self.statements.claim, {"key": key, "owner": owner, "now_ms": now_ms, "expires_at_ms": expires_at_ms}
        )
        outcome: int = answer.rows[0][0] if answer.rows else answer.last_id
        return Claim.NEW if outcome == _REPEATED else CLAIMS[outcome]

    def finish(self, key: str, owner: str, now_ms: int, expires_at_ms: int) -> bool:
        answer = self._execute(
            self.statements.finish, {"key": key, "owner": owner, "now_ms": now_ms, "expires_at_ms": expires_at_ms}
        )
        return answer.changed == 1

    def release(self, key: str, owner: str, now_ms: int) -> bool:
        return self._execute(self.statements.release, {"key": key, "owner": owner, "now_ms": now_ms}).changed == 1

    def read(self, key: str, now_ms: int) -> DedupRecord | None:
        rows = self._execute(self.statements.read, {"key": key, "now_ms": now_ms}).rows
        return DedupRecord(bool(rows[0][0]), rows[0][1], rows[0][2]) if rows else None

    def purge(self, now_ms: int, limit: int) -> int:
        purged = self._execute(self.statements.purge, {"now_ms": now_ms, "limit": limit}).changed
        if purged and self.dialect == "sqlite":
            let_writers_in()
        return purged


class SqliteDedupStore(TableStore):
    """Records in a SQLite file with a write-ahead log, for the processes of one machine. Thread-safe.

    With ``durability`` "async" a record survives the process immediately, and the machine after SQLite's next
    checkpoint; with "sync" it survives both immediately, at the cost of one disk flush per call. If the file stays
    locked for ``timeout`` seconds, a call raises `DedupStoreBusyError`. ``clock`` is the time of guards that have none
    of their own. After a fork a child has to open its own.
    """

    def __init__(
        self,
        path: str | PathLike[str],
        *,
        table: str = "rmq_dedup",
        durability: Literal["async", "sync"] = "async",
        timeout: float = 5.0,
        clock: Clock | None = None,
    ) -> None:
        self.clock = clock
        if sqlite3.sqlite_version_info < (3, 35):
            raise ConfigError(
                f"SQLite {sqlite3.sqlite_version}: expected at least 3.35: run a Python that was built with it"
            )
        if durability not in ("async", "sync"):
            raise ConfigError(f"durability: expected 'async' or 'sync', found {durability!r}")
        self.statements: DedupStatements = DedupStatements(table)
        self._lock = Lock()
        self._process = os.getpid()
        self._connection: sqlite3.Connection | None = None
        self.path: str = os.fspath(path)
        try:
            connection = sqlite3.connect(path, timeout=timeout, isolation_level=None, check_same_thread=False)
            try:
                connection.execute("PRAGMA journal_mode = WAL")
                connection.execute(f"PRAGMA synchronous = {'FULL' if durability == 'sync' else 'NORMAL'}")
                upgrade_tables(connection, dedup=table, messages=None, transactions=None, outbox=None)
            except BaseException:
                connection.close()
                raise
        except sqlite3.Error as error:
            raise self._failure(error) from error
        self._connection = connection

    @override
    def close(self) -> None:
        """Close the file. Closing again, or in a forked child, does nothing."""
        if self._process != os.getpid():
            return
        with critical, self._lock:
            connection, self._connection = self._connection, None
            if connection is not None:
                connection.close()

    @override
    def _execute(self, statement: str, parameters: Mapping[str, str | int]) -> StatementResult:
        # Before the lock: in a forked child a thread of the parent may hold it for good.
        if self._process != os.getpid():
            raise StoreClosedError(f"{self.path}: this handle was opened before a fork: open another one in the child")
        with self._lock:
            if self._connection is None:
                raise StoreClosedError(f"{self.path}: this handle was closed: open another one")
            try:
                cursor = self._connection.execute(statement, parameters)
                try:
                    return StatementResult(cursor.fetchall() if cursor.description else (), cursor.rowcount, 0)
                finally:  # An open statement would keep the file locked after a signal.
                    cursor.close()
            except sqlite3.Error as error:
                raise self._failure(error) from error

    def _failure(self, error: sqlite3.Error) -> DedupStoreError:
        return (DedupStoreBusyError if is_refusal(error) else DedupStoreError)(f"{self.path}: {error}")


# ------------------------------------------------------------------------------------------------------------ purging


def purge_step(store: DedupStore, every: float = PURGE_INTERVAL) -> Callable[[int], int]:
    """Return a step ``run_due(now_ms) -> next_due_ms`` that deletes expired records every ``every`` seconds.

    A call deletes at most 1,000 records, so that other callers do not wait long. While there are more, it is due
    immediately.
    """

    def run_due(now_ms: int) -> int:
        try:
            if store.purge(now_ms, PURGE_ROWS) >= PURGE_ROWS:
                return now_ms
        except DedupStoreError as error:
            _log.warning("expired records could not be purged: %(error)s", error=error)
        return now_ms + round(1000 * every)

    return run_due


_backgrounds: weakref.WeakKeyDictionary[Any, Background] = weakref.WeakKeyDictionary()
_backgrounds_lock = Lock()


def run_in_background(owner: T, step: Callable[[T, int], int | None], clock: Clock, name: str) -> None:
    """Start a thread, one for each owner, that calls ``step(owner, now_ms)`` when it is due while ``owner`` lives."""
    if owner in _backgrounds:
        return
    with critical, _backgrounds_lock:
        if owner in _backgrounds:
            return
        weak = weakref.ref(owner)

        def run_due(now_ms: int) -> int | None:
            held = weak()
            return None if held is None else step(held, now_ms)

        background = _backgrounds[owner] = Background(run_due, clock, name)
        weakref.finalize(owner, background.stop).atexit = False


def _after_fork() -> None:
    global _backgrounds_lock
    _backgrounds_lock = Lock()
    _backgrounds.clear()  # Its threads are the parent's.


call_in_child(_after_fork)

_lock_owners: Final[Inherited[Any]] = Inherited(lambda owner: setattr(owner, "_lock", Lock()))
"""Objects whose ``_lock`` is replaced in a forked child: a thread of the parent may hold it."""


# ---- times

KEEP_CONSUMED: Final = 72 * 3600.0
"""Seconds for which a consumed message is recorded: as long as a broker keeps the message."""
LONGEST: Final = 1e10
"""The longest duration, in seconds."""


def to_milliseconds(name: str, value: float | timedelta) -> int:
    """Return a duration of at least a millisecond, given in seconds or as a `timedelta`, in milliseconds."""
    return round(1000 * to_seconds(name, value, 0.001, LONGEST))
