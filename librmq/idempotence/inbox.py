"""The transactional message table: the record of a message and its effect, in one transaction.

::

    with transactional(session, message, group="billing") as first:
        if first:
            session.execute(...)        # commits with the record, or not at all

The transaction inserts the record first. A second delivery waits for that row. If the first commits, the second finds
the message consumed; if the first rolls back or dies, the second proceeds. So the effect happens once in this database,
as long as the record is kept. ``docs/dedup.md`` has the conditions.
"""

# ruff: noqa: ANN401 (connections and producers are of libraries that have no common type)

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import Any

from librmq.clock import Clock, SystemClock
from librmq.errors import ConfigError
from librmq.idempotence.sqltables import Link, check_name, is_integrity_error, linked
from librmq.idempotence.stores import KEEP_CONSUMED, dedup_key, to_milliseconds, unique_id


def transactional(
    session: Any,
    message: Any,
    *,
    group: str,
    application: str = "",
    key: Callable[[Any], str | None] = unique_id,
    table: str = "rmq_messages",
    keep: float | timedelta = KEEP_CONSUMED,
    clock: Clock | None = None,
) -> Transactional:
    """Return a context manager that yields whether ``message`` is delivered for the first time.

    ``session`` is a SQLAlchemy ``Session`` or ``Connection``, a DB-API connection, or for ``async with`` a SQLAlchemy
    ``AsyncSession`` or ``AsyncConnection``, without an open transaction. Leaving the block commits; an exception rolls
    back and propagates. ``key``, ``group`` and ``application`` mean the same as for `librmq.dedup.DedupListener`;
    without a key every delivery counts as the first. `librmq.idempotence.sqltables.upgrade_tables` creates ``table``,
    and `purge_messages` deletes records that are older than ``keep``.

    Errors of the database's driver propagate, and the message is delivered again. As thread-safe as the session.

    Raises:
        ConfigError: The session has an open transaction, or commits each statement.
    """
    if not group:
        raise ConfigError("group: expected the consumer group's name, found none")
    check_name(table)
    business_key = key(message)
    record = None
    if business_key:
        record = dedup_key(application, message.topic, group, message.tags, business_key)
    expires_at_ms = (clock or SystemClock()).now_ms() + to_milliseconds("keep", keep)
    return Transactional(session, table, record, expires_at_ms)


class Transactional:
    """One transaction of `transactional`; ``with`` returns True at the first delivery of a message."""

    def __init__(self, session: Any, table: str, key: str | None, expires_at_ms: int) -> None:
        self._session = session
        self._table = table
        self._key = key
        self._expires_at_ms = expires_at_ms

    def __enter__(self) -> bool:
        return self._begin(self._session)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._session.commit()
        else:
            self._session.rollback()

    async def __aenter__(self) -> bool:
        if not hasattr(self._session, "run_sync"):
            raise ConfigError(f"{type(self._session).__name__} needs `with`, not `async with`")
        first: bool = await self._session.run_sync(self._begin)
        return first

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            await self._session.commit()
        else:
            await self._session.rollback()

    def _begin(self, session: Any) -> bool:
        if hasattr(session, "run_sync"):
            raise ConfigError(f"{type(session).__name__} needs `async with`, not `with`")
        link = Link(session)
        if link.in_transaction:
            raise ConfigError(
                "expected no open transaction: commit or roll back first, because the record must come first"
            )
        link.check_transactions()
        if self._key is None:
            return True
        try:
            link.execute(
                f"INSERT INTO {self._table} (dedup_key, expires_timestamp_ms) VALUES (:key, :expires_at_ms)",
                key=self._key,
                expires_at_ms=self._expires_at_ms,
            )
        except BaseException as error:
            link.rollback()  # the record was the first statement
            if is_integrity_error(error):
                return False
            raise
        return True


def purge_messages(connection: Any, now_ms: int, *, table: str = "rmq_messages") -> int:
    """Delete the records of ``table`` that have expired, and commit; return their number.

    ``connection`` is a SQLAlchemy ``Engine``, ``Session`` or ``Connection``, or a DB-API connection.
    """
    check_name(table)
    with linked(connection) as link:
        purged = link.execute(f"DELETE FROM {table} WHERE expires_timestamp_ms <= :now_ms", now_ms=now_ms).changed
        link.commit()
        return purged
