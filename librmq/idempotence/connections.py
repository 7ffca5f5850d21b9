"""Connections of an application's database: statements and transactions, whatever library the connection is of.

A connection is a SQLAlchemy ``Session`` or ``Connection``, Django's ``connection``, or a connection of a DB-API driver.
This module imports SQLAlchemy and Django only for their own connections.
"""

# ruff: noqa: ANN401 (connections and producers are of libraries that have no common type)

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from inspect import iscoroutinefunction
from typing import Any, Final

from librmq.errors import ConfigError
from librmq.idempotence.drivers import (
    DRIVERS,
    Driver,
    StatementResult,
    TransactionStatus,
    driver_of,
    error_code,
    has_autocommit,
    is_integrity_error,
    is_temporary_error,
    run,
)


class _Plain:
    """A connection of a DB-API driver."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self.driver, self._style = driver_of(connection)
        self.dialect = self.driver.dialect

    def driver_connection(self) -> Any:
        return self.connection

    def execute(self, sql: str, parameters: Mapping[str, Any]) -> StatementResult:
        return run(self.connection, self._style, sql, parameters, self.driver.cursor)

    def commit(self) -> None:
        self.connection.commit()

    def rollback(self) -> None:
        self.connection.rollback()

    def status(self) -> TransactionStatus | None:
        return None if self.driver.status is None else self.driver.status(self.connection)

    def has_autocommit(self) -> bool:
        """Return whether the next statement is committed by itself."""
        return bool(self.driver.has_autocommit(self.connection)) and self.status() is not TransactionStatus.OPEN

    def transaction(self) -> object:
        """Return an object that stands for the open transaction, None if there is none; always the same if unknown."""
        return self


class _Alchemy:
    """A SQLAlchemy ``Session`` or ``Connection``."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self._is_session = hasattr(connection, "get_bind")
        bind = connection.get_bind() if self._is_session else connection
        self.dialect = "mysql" if bind.dialect.name == "mariadb" else bind.dialect.name

    def _core(self) -> Any:
        return self.connection.connection() if self._is_session else self.connection

    def driver_connection(self) -> Any:
        return self._core().connection.driver_connection

    @property
    def driver(self) -> Driver:
        return driver_of(self.driver_connection())[0]

    def execute(self, sql: str, parameters: Mapping[str, Any]) -> StatementResult:
        result = self.connection.execute(_text(sql), parameters)
        if result.returns_rows:
            return StatementResult(result.fetchall(), 0, 0)
        return StatementResult((), result.rowcount, result.lastrowid if self.dialect == "mysql" else 0)

    def commit(self) -> None:
        self.connection.commit()

    def rollback(self) -> None:
        has_begun = self._is_session or self.connection.in_transaction()
        self.connection.rollback()
        if has_begun or self.connection.invalidated:
            return
        # A commit that failed has ended the transaction for SQLAlchemy, and not for SQLite.
        connection = self.driver_connection()
        status = driver_of(connection)[0].status
        if status is not None and status(connection) is not TransactionStatus.IDLE:
            self.connection.connection.rollback()

    def status(self) -> TransactionStatus | None:
        if not self.connection.in_transaction():
            return TransactionStatus.IDLE
        connection = self.driver_connection()
        status = driver_of(connection)[0].status
        return None if status is None else status(connection)

    def has_autocommit(self) -> bool:
        core = self._core()
        fairy = core.connection
        by_itself = driver_of(fairy.driver_connection)[0].has_autocommit(fairy.driver_connection)
        if by_itself is None:  # SQLAlchemy gives asynchronous drivers the usual attributes
            by_itself = has_autocommit(fairy.dbapi_connection)
        if not by_itself or self.status() is TransactionStatus.OPEN:
            return False
        if not core.in_transaction():
            core.begin()  # an application can begin transactions by a statement, in SQLAlchemy's event `begin`
        return self.status() is not TransactionStatus.OPEN

    def transaction(self) -> object:
        return self.connection.get_transaction()


def _is_alchemy(connection: object) -> bool:
    return any(kind.__module__.startswith("sqlalchemy.") for kind in type(connection).__mro__)


@lru_cache(maxsize=256)
def _text(sql: str) -> Any:
    from sqlalchemy import text

    return text(sql)


class _Django:
    """Django's ``connection``, by its own API: its transactions are the blocks of ``transaction.atomic``."""

    def __init__(self, connection: Any) -> None:
        from django.db import connections

        # `django.db.connection` stands for the connection that each thread has.
        is_wrapper = hasattr(type(connection), "in_atomic_block") or "in_atomic_block" in vars(connection)
        self.connection = connection if is_wrapper else connections[connection.alias]
        self.dialect: str = self.connection.vendor
        self._atomic: Any = None

    def driver_connection(self) -> Any:
        self.connection.ensure_connection()
        return self.connection.connection

    @property
    def driver(self) -> Driver:
        return driver_of(self.driver_connection())[0]

    def execute(self, sql: str, parameters: Mapping[str, Any]) -> StatementResult:
        return run(self.connection, "format", sql, parameters)

    def begin(self) -> None:
        """Enter an atomic block: a transaction, or a savepoint of the block around it."""
        from django.db.transaction import atomic

        self._atomic = atomic(using=self.connection.alias)
        self._atomic.__enter__()

    def commit(self) -> None:
        atomic, self._atomic = self._atomic, None
        if atomic is not None:
            atomic.__exit__(None, None, None)
        elif not self.connection.in_atomic_block:  # which commits with the block around it
            self.connection.commit()

    def rollback(self) -> None:
        atomic, self._atomic = self._atomic, None
        if atomic is not None:
            atomic.__exit__(ConfigError, ConfigError("rolled back"), None)
        elif not self.connection.in_atomic_block:
            self.connection.rollback()

    def status(self) -> TransactionStatus | None:
        if self.connection.needs_rollback:
            return TransactionStatus.ABORTED
        if not self.connection.in_atomic_block and self.connection.get_autocommit():
            return TransactionStatus.IDLE
        connection = self.driver_connection()
        status = driver_of(connection)[0].status
        return None if status is None else status(connection)

    def has_autocommit(self) -> bool:
        return not self.connection.in_atomic_block and bool(self.connection.get_autocommit())

    def transaction(self) -> object:
        return self


def _is_django(connection: object) -> bool:
    kinds = {kind.__module__ for kind in type(connection).__mro__}
    return "django.utils.connection" in kinds or "django.db.backends.base.base" in kinds


_SAVEPOINT: Final = "rmq_effect"
_BEGIN: Final = {"sqlite": "BEGIN IMMEDIATE", "mysql": "START TRANSACTION"}
_IN_TRANSACTION: Final = {
    "postgresql": "SELECT 1 WHERE txid_current_if_assigned() IS NOT NULL",
    "mysql": "SET TRANSACTION READ WRITE",  # which is an error while a transaction is open, and the default else
}


class Link:
    """A connection of the application: runs statements with ``:names`` in them, and ends transactions.

    As thread-safe as the connection. Errors of its driver propagate.
    """

    __slots__ = ("_access", "_has_savepoint", "_is_explicit", "_transaction", "connection", "dialect")

    def __init__(self, connection: Any) -> None:
        """Take a connection.

        Raises:
            ConfigError: ``connection`` is not a connection.
        """
        self.connection = connection
        self._access: _Plain | _Alchemy | _Django
        if _is_alchemy(connection) and not hasattr(connection, "dbapi_connection"):
            self._access = _Alchemy(connection)
        elif _is_django(connection):
            self._access = _Django(connection)
        else:
            driver_connection = getattr(connection, "dbapi_connection", connection)  # that of an engine's pool
            commit = getattr(driver_connection, "commit", None)
            if iscoroutinefunction(getattr(driver_connection, "close", None)):
                raise ConfigError(
                    f"session: {type(driver_connection).__module__}'s connection is asynchronous: expected an "
                    "AsyncConnection or AsyncSession of SQLAlchemy"
                )
            if not callable(getattr(driver_connection, "cursor", None)) or not callable(commit):
                raise ConfigError(f"session: expected a session or connection, found {type(connection).__name__}")
            self._access = _Plain(driver_connection)
        self.dialect = self._access.dialect
        self._is_explicit = False
        self._has_savepoint = False
        self._transaction: object = None

    def execute(self, sql: str, **parameters: Any) -> StatementResult:
        """Run one statement; its rows are tuples or can be read like tuples."""
        return self._access.execute(sql, parameters)

    def begin(self) -> None:
        """Begin a transaction, if the next statement would not do so; `commit` and `rollback` end it."""
        if isinstance(self._access, _Django):
            self._access.begin()
        elif self._access.has_autocommit():
            self.execute(_BEGIN.get(self.dialect, "BEGIN"))
            self._is_explicit = True
        elif isinstance(self._access, _Alchemy) and not self.connection.in_transaction():
            self.connection.begin()

    def commit(self) -> None:
        """Commit the transaction, or undo it if the commit raises: SQLite would keep it open and the file locked."""
        try:
            if self._is_explicit:
                self.execute("COMMIT")
            else:
                self._access.commit()
        except BaseException:
            with suppress(Exception):  # the commit's error is the one to see
                self.rollback()
            raise
        self._is_explicit = False

    def rollback(self) -> None:
        """Undo the transaction."""
        if self._is_explicit:
            self._is_explicit = False
            self.execute("ROLLBACK")
        else:
            self._access.rollback()

    def status(self) -> TransactionStatus | None:
        """Return the state of the connection's transaction without a statement; None if the driver does not show it."""
        return self._access.status()

    def insert_first(self, sql: str, exists: Callable[[], bool], **parameters: Any) -> bool:
        """Insert the first row of a transaction; after an error undo it, and return False if the row exists.

        ``exists`` reads the row: another constraint, such as a column that an application has added, can be violated.
        """
        try:
            self.execute(sql, **parameters)
        except BaseException as error:
            self.rollback()
            if not is_integrity_error(error):
                raise
            self.begin()
            if not exists():
                self.rollback()
                raise
            return False
        return True

    # ---- what a transaction needs

    def check_can_begin(self, *, may_nest: bool = False) -> None:
        """Refuse a connection whose next statement would not begin a transaction.

        Args:
            may_nest: Whether Django's connection may be in an atomic block, in which `begin` sets a savepoint.

        Raises:
            ConfigError: A transaction is open, each statement is committed, or librmq cannot find that out.
        """
        if isinstance(self._access, _Django):
            status = TransactionStatus.IDLE if may_nest or not self._access.connection.in_atomic_block else None
            status = status or TransactionStatus.OPEN
        elif isinstance(self._access, _Alchemy):
            is_open = self.connection.in_transaction()
            status = TransactionStatus.OPEN if is_open else TransactionStatus.IDLE
        else:
            status = self._access.status() or self._asked_status()
        if status is TransactionStatus.ABORTED:
            raise ConfigError("expected no open transaction, found one that an error has ended: roll back first")
        if status is TransactionStatus.OPEN:
            raise ConfigError(
                "expected no open transaction: commit or roll back first, because librmq's row must come first"
            )
        if not isinstance(self._access, _Django):
            self.check_no_autocommit()

    def _asked_status(self) -> TransactionStatus:
        """Ask the database for the state of a transaction."""
        statement = _IN_TRANSACTION.get(self.dialect)
        if statement is None:
            raise ConfigError(
                f"librmq does not know how {type(self.connection).__module__} shows an open transaction: expected a "
                f"connection of {', '.join(sorted(DRIVERS))}, of SQLAlchemy, or of Django"
            )
        try:
            is_open = bool(self.execute(statement).rows)
        except Exception as error:
            code = error_code(error)
            if code == "25P02":
                return TransactionStatus.ABORTED
            if code != "1568":
                raise
            return TransactionStatus.OPEN
        if not is_open:
            self._access.rollback()
        return TransactionStatus.OPEN if is_open else TransactionStatus.IDLE

    def check_no_autocommit(self) -> None:
        """Refuse a connection that commits each statement.

        Raises:
            ConfigError: It does.
        """
        if self._access.has_autocommit():
            hint = ": use transaction.atomic()" if isinstance(self._access, _Django) else ""
            raise ConfigError(f"expected a connection without autocommit, found one that commits each statement{hint}")

    def watch(self) -> None:
        """Remember the transaction that is open, for `watched_status`; its first row has been written.

        MySQL and SQLite can end a whole transaction by an error, and the next statement begins another one. Only a
        savepoint tells them apart.
        """
        self._transaction = self._access.transaction()
        self._has_savepoint = self.dialect in ("mysql", "sqlite") or (
            self.dialect == "postgresql" and self._access.driver.status is None
        )
        if self._has_savepoint:
            self.execute(f"SAVEPOINT {_SAVEPOINT}")

    @property
    def is_watched(self) -> bool:
        """Whether `watched_status` is certain; on databases that librmq does not know, the first row has to be read."""
        return self._has_savepoint or self._access.status() is not None

    def watched_status(self) -> TransactionStatus:
        """Return OPEN if the transaction that `watch` has seen can be committed, ABORTED if another one is open.

        Raises:
            Exception: The database does not answer.
        """
        status = self._access.status()
        if status in (TransactionStatus.ABORTED, TransactionStatus.IDLE):
            return status
        if self._access.transaction() is not self._transaction:
            return TransactionStatus.ABORTED
        if self._has_savepoint:
            try:
                self.execute(f"RELEASE SAVEPOINT {_SAVEPOINT}")
            except Exception as error:
                if is_temporary_error(error):
                    raise
                return TransactionStatus.ABORTED
        return TransactionStatus.OPEN


@contextmanager
def linked(connection: Any) -> Iterator[Link]:
    """Link to a connection, or to a new connection of a SQLAlchemy ``Engine``, for a transaction of librmq's own.

    An error undoes it: even a statement that found a SQLite file locked leaves a transaction open.
    """
    if _is_alchemy(connection) and hasattr(connection, "connect"):  # an engine
        with connection.connect() as opened:
            yield Link(opened)
        return
    link = Link(connection)
    try:
        yield link
    except BaseException:
        with suppress(Exception):  # the first error is the one to see
            link.rollback()
        raise


def check_database(database: Any) -> None:
    """Refuse anything but a SQLAlchemy ``Engine`` or a function that opens a connection, before a thread uses it.

    Raises:
        ConfigError: It is neither.
    """
    if hasattr(database, "dialect") and hasattr(database, "connect"):
        return
    if not callable(database) or hasattr(database, "cursor") or hasattr(database, "execute"):
        raise ConfigError(
            f"database: expected an Engine or a function that opens a connection, found {database!r:.100}"
        )
