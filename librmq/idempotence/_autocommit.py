"""Statements that are transactions of their own, on the connections of an engine or of a function.

A statement that the database did not carry out is repeated here, so that no caller takes a moment's refusal for an
outage:

- on a connection that was dead (the server was restarted, or an idle connection was cut): on a fresh one; only a fresh
  connection that fails too shows that the database can't be reached;
- after a conflict with another transaction: after a pause, and on PostgreSQL at the isolation READ COMMITTED, at which
  a single statement has none;
- after a wait for a lock that was too long, or a statement's time limit: twice.
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final

from librmq.clock import SystemClock
from librmq.errors import ConfigError
from librmq.idempotence._connections import Link, driver_link
from librmq.idempotence._drivers import Failure, StatementResult, driver_of, error_code, failure_of, run_on
from librmq.idempotence._sessions import link_to

_TRIES: Final[Mapping[Failure, int]] = {
    Failure.CONFLICT: 10,
    Failure.TOO_LONG: 3,
    Failure.STALE: 32,
    Failure.UNPREPARED: 4,
}
_ENDED: Final = "57P01"
"""PostgreSQL's code for the end of one connection; where the server itself stops, it refuses the next one."""
_FIRST_USE: Final = "librmq.first_use"
_CURSOR: Final = "librmq.cursor"
_IDLE: Final = 4
"""The most connections that wait outside of their pool."""
_CLOCK: Final = SystemClock()
"""Pauses are of real time, because a database has no other."""


class _DeadConnectionError(Exception):
    """A connection that was opened earlier has failed."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error
        """The driver's error."""


class _Lent:
    """A connection of an engine that commits each statement, and a cursor for all of its statements."""

    __slots__ = ("connection", "cursor", "driver", "is_set", "pool", "pooled", "process", "since")

    def __init__(self, engine: Any) -> None:
        self.process = os.getpid()
        self.pool = engine.pool
        self.pooled = engine.raw_connection()
        info = self.pooled.info
        self.since: float = info.setdefault(_FIRST_USE, _CLOCK.monotonic())
        self.connection = self.pooled.dbapi_connection
        self.driver = driver_of(self.connection)[0]
        self.is_set = False
        """Whether it commits each statement only until it is given back."""
        self.cursor = info.get(_CURSOR)
        if self.cursor is None:  # The cursor is kept, because a driver prepares much for the first statement of each.
            self.cursor = info[_CURSOR] = self.driver.cursor(self.connection)

    def give_back(self, engine: Any) -> None:
        """Return the connection to its pool as it was."""
        dialect = engine.dialect
        if self.is_set:
            try:
                dialect.reset_isolation_level(self.connection)
            except dialect.loaded_dbapi.Error as error:  # The connection has died since.
                self.pooled.invalidate(error)
        self.pooled.close()


_INHERITED: Final[list[_Lent]] = []
"""Connections of a forked parent: even to collect them as garbage could send something in its sessions."""


def _empty(idle: deque[_Lent], end: Callable[[_Lent], object]) -> None:
    """End the use of all connections that wait, but for those of a forked parent."""
    with suppress(IndexError):
        while True:
            lent = idle.pop()
            if lent.process == os.getpid():
                end(lent)
            else:
                _INHERITED.append(lent)


class Autocommit:
    """Runs statements, each in a transaction of its own. As thread-safe as ``database``.

    ``database`` is a SQLAlchemy ``Engine`` or ``AsyncEngine``, or a function that opens a connection, which is kept
    until `close`. Connections of an engine are set to commit each statement. Up to four of them stay so outside of
    their pool, while the pool has others. A caller in one thread that ``holds`` keeps one until `close`.

    A statement must do the same if it is repeated: an answer that was lost does not show whether it was carried out.
    """

    def __init__(self, database: Any, *, holds: bool = False) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        """The event loop in which the statements of an ``AsyncEngine`` run."""
        self._database = database
        self._holds = holds
        self._held: _Lent | None = None
        self._connection: Any = None
        self._idle: deque[_Lent] = deque()
        self._dead_at = -1.0
        if hasattr(database, "sync_engine"):
            self._attempt = self._in_loop
        elif hasattr(database, "dialect"):
            self._attempt = self._on_engine
            self._driver_error: type[Exception] = database.dialect.loaded_dbapi.Error
            self._style: str = database.dialect.paramstyle
            if not holds:
                self._follow(database)
        else:
            self._attempt = self._on_connection

    def execute(self, sql: str, parameters: Mapping[str, Any]) -> StatementResult:
        """Run one statement, with ``:names`` of parameters in it.

        The driver's error propagates, after the last of several tries if another one could have succeeded.
        """
        tries = 0
        reason: Failure | None = None
        while True:
            tries += 1
            try:
                return self._attempt(sql, parameters, reason)
            except _DeadConnectionError as dead:
                reason = Failure.STALE
                if tries >= _TRIES[reason]:
                    raise dead.error from None
            except Exception as error:
                # A server that ends a connection as it is set up can be reached.
                reason = Failure.STALE if error_code(error) == _ENDED else failure_of(error)
                if tries >= _TRIES.get(reason, 0):
                    raise
                _CLOCK.wait(threading.Event(), random.uniform(0, 0.002 * 2 ** min(tries, 6)))

    def close(self) -> None:
        if self._idle:
            _empty(self._idle, self._give_back)
        lent, self._held = self._held, None
        if lent is not None:
            self._give_back(lent)
        connection, self._connection = self._connection, None
        close = getattr(connection, "close", None)
        if close is not None:
            close()

    def _follow(self, engine: Any) -> None:
        """Keep idle connections no longer than this object and the engine's pool."""
        from sqlalchemy import event

        idle = self._idle
        # The application must not get a connection that commits each statement, even if `close` is not called.
        weakref.finalize(self, _empty, idle, lambda lent: lent.give_back(engine)).atexit = False
        event.listen(engine, "engine_disposed", lambda _: _empty(idle, lambda lent: lent.pooled.invalidate()))

    def _give_back(self, lent: _Lent) -> None:
        lent.give_back(self._database)

    # ---- on an engine, without SQLAlchemy's own connections: their bookkeeping costs several times the round trip

    def _on_engine(self, sql: str, parameters: Mapping[str, Any], reason: Failure | None) -> StatementResult:
        lent, self._held = self._held or self._lend(), None
        try:
            if reason is Failure.UNPREPARED:
                lent.connection.prepare_threshold = None  # for psycopg, the only driver that prepares by itself
            elif reason is Failure.CONFLICT:
                return _transact(driver_link(lent.connection), sql, parameters, reason)
            return run_on(lent.cursor, self._style, sql, parameters)
        except self._driver_error as error:
            self._refuse_if_dead(lent, error)
            raise
        except BaseException as error:  # After a signal the next statement must not read the answer of this one.
            lent.pooled.invalidate(error)
            raise
        finally:
            if lent.pooled.dbapi_connection is not None:
                self._keep(lent)

    def _keep(self, lent: _Lent) -> None:
        if self._holds:
            self._held = lent
        # To set a connection and a pool's own code take as long as such a statement, so some wait here for the next.
        elif len(self._idle) < _IDLE and lent.pool is self._database.pool and _has_others(lent.pool):
            self._idle.append(lent)
        else:
            self._give_back(lent)

    def _lend(self) -> _Lent:
        """Return a connection that is not older than the last one that was dead, as far as this object has used it."""
        while True:
            try:
                lent = self._idle.pop()
                if lent.process != os.getpid():
                    _INHERITED.append(lent)
                    continue
            except IndexError:
                lent = _Lent(self._database)
            if lent.since <= self._dead_at:
                lent.pooled.invalidate()
                continue
            if not lent.is_set and not lent.driver.has_autocommit(lent.connection):
                self._set_autocommit(lent)
            return lent

    def _set_autocommit(self, lent: _Lent) -> None:
        dialect = self._database.dialect
        try:
            dialect.set_isolation_level(lent.connection, "AUTOCOMMIT")
            lent.is_set = True
        except self._driver_error as error:
            self._refuse_if_dead(lent, error)
            lent.pooled.invalidate(error)
            raise

    def _refuse_if_dead(self, lent: _Lent, error: Exception) -> None:
        failure = failure_of(error)
        # Without a code it comes from the driver, whose connection may not have noticed yet that it is dead.
        is_dead = failure is Failure.STALE or (failure is Failure.TEMPORARY and error_code(error) is None)
        if is_dead or self._database.dialect.is_disconnect(error, lent.connection, None):
            lent.pooled.invalidate(error)
            self._dead_at = _CLOCK.monotonic()
            raise _DeadConnectionError(error) from error

    # ---- on a connection of the application's function

    def _on_connection(self, sql: str, parameters: Mapping[str, Any], reason: Failure | None) -> StatementResult:
        is_fresh = self._connection is None
        if is_fresh:
            self._connection = self._database()
        link = link_to(self._connection)
        try:
            return _transact(link, sql, parameters, reason)
        except Exception as error:
            if failure_of(error) in (Failure.STALE, Failure.TEMPORARY):
                self.close()
                if is_fresh:
                    raise
                raise _DeadConnectionError(error) from error
            raise

    # ---- in an event loop

    def _in_loop(self, sql: str, parameters: Mapping[str, Any], reason: Failure | None) -> StatementResult:
        if self.loop is None:
            raise ConfigError("database: an AsyncEngine works in an event loop: await start_async or run_due_async")
        return asyncio.run_coroutine_threadsafe(self._await(sql, parameters, reason), self.loop).result()

    async def _await(self, sql: str, parameters: Mapping[str, Any], reason: Failure | None) -> StatementResult:
        async with self._database.connect() as connection:
            try:
                result: StatementResult = await connection.run_sync(
                    lambda inner: _transact(link_to(inner), sql, parameters, reason)
                )
            except Exception as error:
                if getattr(error, "connection_invalidated", False):
                    raise _DeadConnectionError(error) from error
                raise
            return result


def _has_others(pool: Any) -> bool:
    """Return whether a pool can do without one of its connections, and no application's hook has to see each use."""
    return (
        type(pool).__name__ == "QueuePool"
        and pool.checkedout() < pool.size()
        and not pool.dispatch.checkout
        and not pool.dispatch.checkin
    )


def _transact(link: Link, sql: str, parameters: Mapping[str, Any], reason: Failure | None) -> StatementResult:
    try:
        if reason is Failure.CONFLICT and link.dialect == "postgresql":
            link.begin()
            link.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
        result = link.execute(sql, **parameters)
        link.commit()
    except BaseException:
        with suppress(Exception):  # The error of the statement is the one to see.
            link.rollback()
        raise
    return result
