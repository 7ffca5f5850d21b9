"""Tables of librmq in an application's database: names, columns and versions.

::

    rmq_dedup                                        one row for each claimed or consumed message
        dedup_key              VARCHAR(255)  PRIMARY KEY   ASCII, see `librmq.dedup.dedup_key`
        state                  SMALLINT      0 consuming, 1 consumed
        owner                  VARCHAR(64)   token of the claim
        claims                 INTEGER       number of claims; above 1, an earlier holder did not end in time
        expires_timestamp_ms   BIGINT        from then on the row counts as absent; indexed

    rmq_messages                                     one row for each message with its effect in the same database
        dedup_key              VARCHAR(255)  PRIMARY KEY   as above
        expires_timestamp_ms   BIGINT        from then on the row may be purged; from 2^62 on the effect has begun, or
                                             was committed in part, and the message is not consumed; indexed

    rmq_transactions                                 one row for each local transaction that has ended
        transaction_id         VARCHAR(255)  PRIMARY KEY   the unique id of its message
        state                  SMALLINT      1 committed, 2 rolled back
        expires_timestamp_ms   BIGINT        from then on the row may be purged; indexed

    rmq_outbox                                       one row for each message to send
        id                     BIGINT        PRIMARY KEY, counts up: the order of sending
        order_key              VARCHAR(255)  rows of one key are sent one after the other; NULL: in any order
        topic, properties      TEXT          properties as a JSON object of texts
        flag                   INTEGER
        body                   bytes
        state                  SMALLINT      0 to be sent, 1 sent
        owner                  VARCHAR(64)   token of the sender that claimed it
        attempts               INTEGER       number of failed sends
        due_timestamp_ms       BIGINT        no sender claims it earlier; indexed with state

    rmq_tables                                       two rows for each table
        table_name             VARCHAR(255)  PRIMARY KEY   the table's name; the same and " columns"
        version                INTEGER       the oldest version that may use the table; the version of its columns

The application chooses the names. A librmq uses a table whose oldest version it knows, so that processes with an older
one go on while others are restarted with a newer one, which has added a column.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import lru_cache
from typing import Any, Final
from zlib import crc32

from librmq.clock import SystemClock
from librmq.errors import ConfigError, StoreLockedError
from librmq.idempotence._connections import Link
from librmq.idempotence._drivers import Failure, TransactionStatus, failure_of, unknown_driver
from librmq.idempotence._sessions import linked
from librmq.runtime.event_log import EventLog

_log = EventLog("librmq.dedup")

KEY_LIMIT: Final = 255
"""The longest key that the tables take, in characters."""

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}(\.[A-Za-z_][A-Za-z0-9_]{0,62})?")


@lru_cache(maxsize=64)
def check_name(name: str) -> str:
    """Return a table's name, which may have a schema in front."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"table: expected a name of letters, digits and underscores, found {name!r:.100}")
    return name


PURGE_ROWS: Final = 1000
"""Rows that one statement deletes, so that others do not wait long for its locks."""
_PAUSE_S: Final = 0.002
_CLOCK: Final = SystemClock()
"""A pause is of real time, because a database has no other."""


def purge_statement(table: str, key: str, dialect: str) -> str:
    """Return a statement that deletes at most ``:limit`` expired rows, or all where the dialect has no LIMIT."""
    condition = "expires_timestamp_ms <= :now_ms"
    if dialect == "mysql":
        return f"DELETE FROM {table} WHERE {condition} LIMIT :limit"
    if dialect not in ("postgresql", "sqlite"):
        return f"DELETE FROM {table} WHERE {condition}"
    # The condition is there twice: a row may change after it was selected.
    return (
        f"DELETE FROM {table} WHERE {condition} AND {key} IN (SELECT {key} FROM {table} WHERE {condition} LIMIT :limit)"
    )


def let_writers_in() -> None:
    """Pause between two writes to a SQLite file.

    SQLite has no queue of writers: those that wait try again every few milliseconds, so one that goes on at once keeps
    them out until it has ended.
    """
    _CLOCK.wait(threading.Event(), _PAUSE_S)


def purge_expired(connection: Any, table: str, key: str, now_ms: int) -> int:
    with linked(connection) as link:
        statement = purge_statement(table, key, link.dialect)
        purged = 0
        while True:
            changed = link.execute(statement, now_ms=now_ms, limit=PURGE_ROWS).changed
            link.commit()
            purged += changed
            if changed < PURGE_ROWS or ":limit" not in statement:
                return purged
            if link.dialect == "sqlite":
                let_writers_in()


_PURGE_EVERY: Final = 256


def purge_now_and_then(link: Link, table: str, column: str, key: str, now_ms: int) -> None:
    """Delete expired rows after one key of ``column`` in 256, more of them than are written meanwhile.

    The key decides, so all processes and threads share the work, and none counts. The caller's effect is committed
    already, so an error is only logged.
    """
    if crc32(key.encode()) % _PURGE_EVERY:
        return
    try:
        link.begin()
        link.execute(purge_statement(table, column, link.dialect), now_ms=now_ms, limit=PURGE_ROWS)
        link.commit()
    except Exception as error:
        with suppress(Exception):
            link.rollback()
        _log.warning("%(table)s: old records could not be purged: %(error)s", table=table, error=error)


# ------------------------------------------------------------------------------------------------------------- schema

_Steps = Mapping[str, Sequence[str]]
"""Statements by dialect; "" for all others."""


def _indexed(columns: str, charset: str, indexes: Mapping[str, str], options: str = "") -> _Steps:
    within = "".join(f", INDEX {{plain}}_{name} ({fields})" for name, fields in indexes.items())
    return {
        "": (
            f"CREATE TABLE IF NOT EXISTS {{table}} ({columns}){options}",
            *(f"CREATE INDEX IF NOT EXISTS {{index}}_{name} ON {{on}} ({fields})" for name, fields in indexes.items()),
        ),
        # Keys differ by case and by each byte; the usual collations ignore that.
        "mysql": (
            f"CREATE TABLE IF NOT EXISTS {{table}} ({columns}{within}) "
            f"ENGINE=InnoDB CHARACTER SET {charset} COLLATE {charset}_bin",
        ),
    }


def _expiring(columns: str, charset: str) -> _Steps:
    columns += ", expires_timestamp_ms BIGINT NOT NULL"
    return _indexed(columns, charset, {"expires": "expires_timestamp_ms"}, "{options}")


_KEY: Final = "dedup_key VARCHAR(255) NOT NULL PRIMARY KEY"
_OUTBOX: Final = (
    "id {serial}, order_key VARCHAR(255), topic VARCHAR(255) NOT NULL, properties {text} NOT NULL, "
    "flag INTEGER NOT NULL, body {bytes} NOT NULL, state SMALLINT NOT NULL, owner VARCHAR(64) NOT NULL, "
    "attempts INTEGER NOT NULL, due_timestamp_ms BIGINT NOT NULL"
)

_TYPES: Final[Mapping[str, Mapping[str, str]]] = {
    "postgresql": {"serial": "BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY", "bytes": "BYTEA", "text": "TEXT"},
    "mysql": {"serial": "BIGINT AUTO_INCREMENT PRIMARY KEY", "bytes": "LONGBLOB", "text": "MEDIUMTEXT"},
    # AUTOINCREMENT never reuses an id, so ids stay in the order of rows after deletions.
    "": {"serial": "INTEGER PRIMARY KEY AUTOINCREMENT", "bytes": "BLOB", "text": "TEXT"},
}

VERSIONS: Final[Mapping[str, Sequence[_Steps]]] = {
    "dedup": (
        _expiring(f"{_KEY}, state SMALLINT NOT NULL, owner VARCHAR(64) NOT NULL, claims INTEGER NOT NULL", "ascii"),
    ),
    "messages": (_expiring(_KEY, "ascii"),),
    "transactions": (
        _expiring("transaction_id VARCHAR(255) NOT NULL PRIMARY KEY, state SMALLINT NOT NULL", "utf8mb4"),
    ),
    "outbox": (_indexed(_OUTBOX, "utf8mb4", {"due": "state, due_timestamp_ms, id", "order": "order_key, state, id"}),),
}
"""Statements that lead from one version of a table to the next, by kind of table; the first create it."""
OLDEST: Final[dict[str, int]] = dict.fromkeys(VERSIONS, 1)
"""The oldest version that may use a table of the newest one, by kind of table; added columns leave it as it is."""


def upgrade_tables(
    connection: Any,
    *,
    dedup: str | None = "rmq_dedup",
    messages: str | None = "rmq_messages",
    transactions: str | None = "rmq_transactions",
    outbox: str | None = "rmq_outbox",
    versions: str = "rmq_tables",
) -> dict[str, int]:
    """Create the tables, or upgrade existing ones; return their versions. Call it at every start.

    Args:
        connection: A SQLAlchemy ``Engine``, ``Session`` or ``Connection``, Django's ``connection``, or a DB-API
            connection; it is committed.
        dedup: Name of the guard's table; None omits the table, as for the next three.
        messages: Name of the inbox's table.
        transactions: Name of the table of `librmq.idempotence.LocalTransactions`.
        outbox: Name of the outbox's table.
        versions: Name of the table of versions.

    Raises:
        ConfigError: This librmq is too old for a table, a name would have to be quoted, or the driver is unknown.
        StoreLockedError: Another process has been upgrading the tables for a minute; the error names its session.
    """
    named = {"dedup": dedup, "messages": messages, "transactions": transactions, "outbox": outbox}
    kinds = {check_name(name): kind for kind, name in named.items() if name is not None}
    names = [name.lower() for name in (*named.values(), check_name(versions)) if name is not None]
    if twice := {name for name in names if names.count(name) > 1}:  # Some databases ignore case.
        raise ConfigError(f"table {twice.pop()}: expected a name of its own for each table, also regardless of case")
    with linked(connection) as link:
        if not link.dialect:
            raise unknown_driver(link.connection, "its dialect of SQL")
        with _upgrade_lock(link):
            _run_steps(link, _VERSION_TABLE, versions)
            return {name: _upgrade_table(link, name, kind, versions) for name, kind in kinds.items()}


def _upgrade_table(link: Link, name: str, kind: str, versions: str) -> int:
    steps = VERSIONS[kind]
    rows = link.execute(
        f"SELECT table_name, version FROM {versions} WHERE table_name IN (:a, :b)", a=name, b=name + _COLUMNS
    )
    recorded_versions = {row[0]: int(row[1]) for row in rows.rows}
    oldest = recorded_versions.get(name, 0)
    version = recorded_versions.get(name + _COLUMNS, 0)
    if oldest > len(steps):
        raise ConfigError(
            f"table {name}: only a librmq that knows its version {oldest} may use it, this one knows {len(steps)}: "
            "install the one that the other processes have"
        )
    for step in steps[version:]:
        _run_steps(link, step, name)
    if version < len(steps):
        for row, number in ((name, max(oldest, OLDEST[kind])), (name + _COLUMNS, len(steps))):
            statement = f"UPDATE {versions} SET version = :version WHERE table_name = :name"
            if row not in recorded_versions:
                statement = f"INSERT INTO {versions} (table_name, version) VALUES (:name, :version)"
            link.execute(statement, name=row, version=number)
    return max(version, len(steps))


_COLUMNS: Final = " columns"
"""What follows a table's name in the row of its columns' version, which an older librmq does not read."""


LOCK_WAIT_S = 60.0
"""Time that an upgrade waits for another one."""
_LOCK: Final = 8206115107  # PostgreSQL knows an advisory lock by a number, which no application should use by chance.
_HOLDER: Final = {
    "postgresql": "SELECT activity.pid, application_name, client_addr, state, state_change FROM pg_locks held "
    "JOIN pg_stat_activity activity ON activity.pid = held.pid WHERE locktype = 'advisory' AND granted "
    f"AND classid = {_LOCK >> 32} AND objid = {_LOCK & 0xFFFFFFFF}",
    "mysql": "SELECT id, user, host, command, time FROM information_schema.processlist "
    "WHERE id = IS_USED_LOCK('rmq_tables')",
}


@contextmanager
def _upgrade_lock(link: Link) -> Iterator[None]:
    link.commit()
    take = {"postgresql": _postgresql_lock, "mysql": _mysql_lock, "sqlite": _sqlite_lock}.get(link.dialect, nullcontext)
    with take(link):
        try:
            yield
            link.commit()
        except BaseException:
            link.rollback()
            raise


@contextmanager
def _postgresql_lock(link: Link) -> Iterator[None]:
    # A lock of the transaction: one of the session would stay on the server's connection behind a pooler.
    link.begin()
    try:
        link.execute(f"SET LOCAL lock_timeout = {max(1, round(1000 * LOCK_WAIT_S))}")
        link.execute(f"SELECT pg_advisory_xact_lock({_LOCK})")
    except Exception as error:
        link.rollback()
        if failure_of(error) is Failure.TOO_LONG:
            raise _locked(link) from error
        raise
    yield


@contextmanager
def _mysql_lock(link: Link) -> Iterator[None]:
    # A lock of the session, because statements that change tables commit.
    if link.execute(f"SELECT GET_LOCK('rmq_tables', {LOCK_WAIT_S})").rows[0][0] != 1:
        raise _locked(link)
    try:
        yield
    finally:
        link.execute("SELECT RELEASE_LOCK('rmq_tables')")
        link.commit()


@contextmanager
def _sqlite_lock(link: Link) -> Iterator[None]:
    # sqlite3 begins no transaction for a statement that changes tables, unless it always has one.
    if link.status() is TransactionStatus.OPEN:
        yield
        return
    link.begin_by_statement()
    yield


def _locked(link: Link) -> StoreLockedError:
    """Return the error of an upgrade that waited for too long, with the sessions that it waited for."""
    rows = link.execute(_HOLDER[link.dialect]).rows
    link.rollback()
    holders = ", ".join("session {} ({})".format(row[0], ", ".join(str(value) for value in row[1:])) for row in rows)
    how = "pg_terminate_backend" if link.dialect == "postgresql" else "KILL"
    return StoreLockedError(
        f"librmq's tables could not be upgraded, because another upgrade has had the lock for {LOCK_WAIT_S:g} s: "
        f"{holders or 'it has ended since'}; try again, or end that session by {how} if it does not end by itself"
    )


_VERSION_TABLE: Final[_Steps] = {
    "": (
        "CREATE TABLE IF NOT EXISTS {table} (table_name VARCHAR(255) NOT NULL PRIMARY KEY, version INTEGER NOT NULL)"
        "{options}",
    ),
}


_IN_INDEX: Final = 55
"""Characters of a table's name that an index's has, of 64 at MySQL, and of 63 at PostgreSQL, which ignores the rest."""


def _run_steps(link: Link, steps: _Steps, table: str) -> None:
    types = _TYPES.get(link.dialect, _TYPES[""])
    schema, dot, on = table.rpartition(".")
    plain = on[:_IN_INDEX]
    index, on = (schema + dot + plain, on) if link.dialect == "sqlite" else (plain, table)  # which names the schema
    options = {"sqlite": " WITHOUT ROWID", "mysql": " CHARACTER SET ascii COLLATE ascii_bin"}.get(link.dialect, "")
    for statement in steps.get(link.dialect, steps[""]):
        link.execute(statement.format(table=table, plain=plain, index=index, on=on, options=options, **types))
