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
from librmq.idempotence._drivers import (
    DRIVERS,
    StatementResult,
    TransactionStatus,
    driver_of,
    error_code,
    execute_on,
    has_autocommit,
    is_integrity_error,
    is_temporary_error,
    run,
    run_on,
    status_of,
)

_BEGIN: Final = {"sqlite": "BEGIN IMMEDIATE", "mysql": "START TRANSACTION"}
_SAVEPOINT: Final = "SAVEPOINT rmq_effect"
_RELEASE: Final = "RELEASE SAVEPOINT rmq_effect"
_IN_TRANSACTION: Final = {
    "postgresql": "SELECT 1 WHERE txid_current_if_assigned() IS NOT NULL",
    # It is an error while a transaction is open, and otherwise sets the default.
    "mysql": "SET TRANSACTION READ WRITE",
}
_OPEN: Final = TransactionStatus.OPEN
_IDLE: Final = TransactionStatus.IDLE


class Link:
    """A connection of the application: runs statements with ``:names`` in them, and begins and ends transactions.

    As thread-safe as the connection. Errors of its driver propagate.

        Link
        ├── _DriverLink      of a DB-API driver
        ├── _AlchemyLink     SQLAlchemy's Session or Connection
        └── _DjangoLink      Django's connection
    """

    __slots__ = ("_has_savepoint", "_is_explicit", "_transaction", "connection", "dialect")

    dialect: str
    """Database, by SQLAlchemy's name; "mysql" for MariaDB too."""

    def __new__(cls, connection: Any) -> Link:
        """Link to a connection by its type.

        Raises:
            ConfigError: ``connection`` is not a connection.
        """
        kind: Any = type(connection)
        return object.__new__(_kind(kind))

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self._is_explicit = False
        self._has_savepoint = False
        self._transaction: object = None

    def execute(self, sql: str, **parameters: Any) -> StatementResult:
        """Run one statement; its rows are tuples or can be read like tuples."""
        return self._run(sql, parameters)

    def begin(self) -> None:
        """Begin a transaction, if the next statement would not do so; `commit` and `rollback` end it."""
        if self._has_autocommit():
            self.begin_by_statement()

    def begin_by_statement(self) -> None:
        """Begin a transaction by a statement, which on SQLite locks the file for writing."""
        self._run(_BEGIN.get(self.dialect, "BEGIN"), {})
        self._is_explicit = True

    def commit(self) -> None:
        """Commit the transaction, or undo it if the commit raises: SQLite would keep it open and the file locked."""
        try:
            if self._is_explicit:
                self._run("COMMIT", {})  # A connection of sqlite3 with autocommit=True ignores calls of commit.
                self._is_explicit = False
            self._commit()
        except BaseException:
            with suppress(Exception):  # The commit's error is the one to see.
                self.rollback()
            raise

    def rollback(self) -> None:
        """Undo the transaction."""
        self._has_savepoint = False
        if self._is_explicit:
            self._is_explicit = False
            self._run("ROLLBACK", {})
        self._rollback()

    def status(self) -> TransactionStatus | None:
        """Return the state of the connection's transaction without a statement; None if the driver does not show it."""
        raise NotImplementedError

    def insert_first(self, sql: str, parameters: Mapping[str, Any], exists: Callable[[], bool]) -> bool:
        """Insert the first row of a transaction; after an error undo it, and return False if the row exists.

        ``exists`` reads the row: another constraint, such as a column that an application has added, can be violated.
        """
        try:
            self._write(sql, parameters)
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

    def check_can_begin(self) -> None:
        """Refuse a connection whose next statement would not begin a transaction.

        Raises:
            ConfigError: A transaction is open, each statement is committed, or librmq cannot find that out.
        """
        status = self._status_before()
        if status is TransactionStatus.ABORTED:
            raise ConfigError("expected no open transaction, found one that an error has ended: roll back first")
        if status is _OPEN:
            raise ConfigError(
                "expected no open transaction: commit or roll back first, because librmq's row must come first"
                f"{self._always_open()}"
            )
        self.check_no_autocommit()

    def begin_first(self) -> None:
        """Begin a transaction that no statement has begun; in an atomic block of Django's, set a savepoint.

        Raises:
            ConfigError: As for `check_can_begin`.
        """
        self.check_can_begin()

    def check_no_autocommit(self) -> None:
        """Refuse a connection that commits each statement.

        Raises:
            ConfigError: It does.
        """
        if self._has_autocommit():
            raise ConfigError("expected a connection without autocommit, found one that commits each statement")

    def watch(self) -> None:
        """Remember the transaction that is open, for `watched_status`; its first row has been written."""
        self._transaction = self._current()
        if self._needs_savepoint() and not self._has_savepoint:
            self._set_savepoint()

    def _set_savepoint(self) -> None:
        self._write(_SAVEPOINT, {})
        self._has_savepoint = True

    def watched_status(self) -> TransactionStatus | None:
        """Return OPEN if the transaction that `watch` has seen can be committed, ABORTED if another one is open.

        None means that librmq does not know this database, and the first row has to be read instead.

        Raises:
            Exception: The database does not answer.
        """
        status = self.status()
        if status is TransactionStatus.ABORTED or status is _IDLE:
            return status
        if self._current() is not self._transaction:
            return TransactionStatus.ABORTED
        if self._has_savepoint:
            return _OPEN if self._release() else TransactionStatus.ABORTED
        return status

    def _release(self) -> bool:
        """Release the savepoint of `watch`; return False if it is no longer there, or nothing can be committed."""
        try:
            self._write(_RELEASE, {})
        except Exception as error:
            if is_temporary_error(error):
                raise
            return False
        return True

    # ---- what differs

    def _run(self, sql: str, parameters: Mapping[str, Any]) -> StatementResult:
        raise NotImplementedError

    def _write(self, sql: str, parameters: Mapping[str, Any]) -> None:
        """Run one statement whose result is not asked for."""
        self._run(sql, parameters)

    def _commit(self) -> None:
        self.connection.commit()

    def _rollback(self) -> None:
        self.connection.rollback()

    def _status_before(self) -> TransactionStatus:
        """Return the state in which a transaction of librmq's would begin."""
        raise NotImplementedError

    def _always_open(self) -> str:
        """Return what to do if the connection is never without a transaction."""
        return ""

    def _has_autocommit(self) -> bool:
        """Return whether the next statement is committed by itself."""
        raise NotImplementedError

    def _needs_savepoint(self) -> bool:
        raise NotImplementedError

    def _current(self) -> object:
        """Return an object that stands for the open transaction, None if there is none; always the same if unknown."""
        return None


class _DriverLink(Link):
    """A link to a connection of a DB-API driver, also to one of a SQLAlchemy engine's pool."""

    __slots__ = ("_cursor", "_driver", "_style")

    def __init__(self, connection: Any) -> None:
        # A link is made for each message: no call of a base, and a statement costs little more than the driver's own.
        self.connection = connection = getattr(connection, "dbapi_connection", connection)
        self._is_explicit = False
        self._has_savepoint = False
        self._transaction = None
        self._driver, self._style = driver_of(connection)
        if not self._driver.dialect and not (hasattr(connection, "cursor") and hasattr(connection, "commit")):
            raise ConfigError(f"session: expected a session or connection, found {type(connection).__name__}")
        self.dialect = self._driver.dialect
        self._cursor: Any = None

    def _run(self, sql: str, parameters: Mapping[str, Any]) -> StatementResult:
        if self._cursor is None:
            self._cursor = self._driver.cursor(self.connection)
        return run_on(self._cursor, self._style, sql, parameters)

    def _write(self, sql: str, parameters: Mapping[str, Any]) -> None:
        cursor = self._cursor
        if cursor is None:
            cursor = self._cursor = self._driver.cursor(self.connection)
        if parameters:
            execute_on(cursor, self._style, sql, parameters)
        else:
            cursor.execute(sql)

    def begin_first(self) -> None:
        status, connection = self._driver.status, self.connection
        if status is None or status(connection) is not _IDLE or self._driver.has_autocommit(connection):
            self.check_can_begin()  # This asks further, and refuses.
        if self._driver.begins_by_savepoint(connection):
            self._set_savepoint()

    def status(self) -> TransactionStatus | None:
        return None if self._driver.status is None else self._driver.status(self.connection)

    def _status_before(self) -> TransactionStatus:
        if self._driver.status is not None:
            return self._driver.status(self.connection)
        statement = _IN_TRANSACTION.get(self.dialect)
        if statement is None:
            raise self._unknown("an open transaction")
        try:
            is_open = bool(self._run(statement, {}).rows)
        except Exception as error:
            code = error_code(error)
            if code not in ("25P02", "1568"):
                raise
            return TransactionStatus.ABORTED if code == "25P02" else _OPEN
        if not is_open:
            self._rollback()
        return _OPEN if is_open else _IDLE

    def _unknown(self, what: str) -> ConfigError:
        return ConfigError(
            f"librmq does not know how {type(self.connection).__module__} shows {what}: expected a connection of "
            f"{', '.join(sorted(DRIVERS))}, of SQLAlchemy, or of Django"
        )

    def check_no_autocommit(self) -> None:
        if not self.dialect and self._driver.has_autocommit(self.connection) is None:
            raise self._unknown("that it commits each statement")
        super().check_no_autocommit()

    def _always_open(self) -> str:
        if self.dialect == "sqlite" and getattr(self.connection, "autocommit", None) is False:
            return "; a connection with autocommit=False always has one: connect without that argument"
        return ""

    def _has_autocommit(self) -> bool:
        return bool(self._driver.has_autocommit(self.connection)) and self.status() is not _OPEN

    def _needs_savepoint(self) -> bool:
        return self._driver.needs_savepoint


class _AlchemyLink(Link):
    """A link to a SQLAlchemy ``Session`` or ``Connection``."""

    __slots__ = ("_is_session",)

    def __init__(self, connection: Any) -> None:
        super().__init__(connection)
        self._is_session = hasattr(connection, "get_bind")
        name: str = (connection.get_bind() if self._is_session else connection).dialect.name
        self.dialect = "mysql" if name == "mariadb" else name

    def begin(self) -> None:
        super().begin()
        self._begin_at_once()

    def begin_first(self) -> None:
        super().begin_first()
        self._begin_at_once()

    def _begin_at_once(self) -> None:
        if not self.connection.in_transaction():
            self.connection.begin()

    def _core(self) -> Any:
        return self.connection.connection() if self._is_session else self.connection

    def _pooled(self) -> Any:
        return self._core().connection

    def _run(self, sql: str, parameters: Mapping[str, Any]) -> StatementResult:
        result = self.connection.execute(_text(sql), parameters)
        if result.returns_rows:
            return StatementResult(result.fetchall(), 0, 0)
        return StatementResult((), result.rowcount, result.lastrowid if self.dialect == "mysql" else 0)

    def _rollback(self) -> None:
        has_begun = self._is_session or self.connection.in_transaction()
        self.connection.rollback()
        if has_begun or self.connection.invalidated:
            return
        # A commit that failed has ended the transaction for SQLAlchemy, and not for SQLite.
        pooled = self._pooled()
        if status_of(pooled.driver_connection) not in (None, _IDLE):
            pooled.rollback()

    def status(self) -> TransactionStatus | None:
        if not self.connection.in_transaction():
            return _IDLE
        return status_of(self._pooled().driver_connection)

    def _status_before(self) -> TransactionStatus:
        return _OPEN if self.connection.in_transaction() else _IDLE

    def _has_autocommit(self) -> bool:
        core = self._core()
        driver_connection = core.connection.driver_connection
        by_itself = driver_of(driver_connection)[0].has_autocommit(driver_connection)
        if by_itself is None:  # SQLAlchemy gives asynchronous drivers the usual attributes
            by_itself = has_autocommit(core.connection.dbapi_connection)
        if not by_itself or self.status() is _OPEN:
            return False
        if not core.in_transaction():
            core.begin()  # An application can begin transactions by a statement, in SQLAlchemy's event `begin`.
        return self.status() is not _OPEN

    def _needs_savepoint(self) -> bool:
        return driver_of(self._pooled().driver_connection)[0].needs_savepoint

    def _current(self) -> object:
        return self.connection.get_transaction()


@lru_cache(maxsize=256)
def _text(sql: str) -> Any:
    from sqlalchemy import text

    return text(sql)


class _DjangoLink(Link):
    """A link to Django's ``connection``, by its own API: its transactions are the blocks of ``transaction.atomic``."""

    __slots__ = ("_atomic",)

    def __init__(self, connection: Any) -> None:
        from django.db import connections

        # `django.db.connection` stands for the connection that each thread has.
        is_wrapper = "in_atomic_block" in vars(connection)
        super().__init__(connection if is_wrapper else connections[connection.alias])
        self.dialect = self.connection.vendor
        self._atomic: Any = None

    def _run(self, sql: str, parameters: Mapping[str, Any]) -> StatementResult:
        return run(self.connection, "format", sql, parameters)

    def begin(self) -> None:
        """Enter an atomic block: a transaction, or a savepoint of the block around it."""
        from django.db.transaction import atomic

        self._atomic = atomic(using=self.connection.alias)
        self._atomic.__enter__()

    def begin_first(self) -> None:
        self.begin()

    def _commit(self) -> None:
        atomic, self._atomic = self._atomic, None
        if atomic is not None:
            atomic.__exit__(None, None, None)
        elif not self.connection.in_atomic_block:  # Otherwise it commits with the block around it.
            self.connection.commit()

    def _rollback(self) -> None:
        atomic, self._atomic = self._atomic, None
        if atomic is not None:
            atomic.__exit__(ConfigError, ConfigError("rolled back"), None)
        elif not self.connection.in_atomic_block:
            self.connection.rollback()

    def status(self) -> TransactionStatus | None:
        if self.connection.needs_rollback:
            return TransactionStatus.ABORTED
        if self._has_autocommit():
            return _IDLE
        return status_of(self._driver_connection())

    def _status_before(self) -> TransactionStatus:
        return _OPEN if self.connection.in_atomic_block else _IDLE

    def check_can_begin(self) -> None:
        if self.connection.in_atomic_block:
            super().check_can_begin()

    def check_no_autocommit(self) -> None:
        if self._has_autocommit():
            raise ConfigError(
                "expected a connection without autocommit, found one that commits each statement: use "
                "transaction.atomic()"
            )

    def _has_autocommit(self) -> bool:
        return not self.connection.in_atomic_block and bool(self.connection.get_autocommit())

    def _driver_connection(self) -> Any:
        self.connection.ensure_connection()
        return self.connection.connection

    def _needs_savepoint(self) -> bool:
        return driver_of(self._driver_connection())[0].needs_savepoint


@lru_cache(maxsize=256)
def _kind(kind: Any) -> type[Link]:
    """Return what links to connections of a type."""
    modules = {base.__module__ for base in kind.__mro__}
    if "django.utils.connection" in modules or "django.db.backends.base.base" in modules:
        return _DjangoLink
    if hasattr(kind, "run_sync"):
        raise ConfigError(f"{kind.__name__} is asynchronous: expected `async with`, or a method for coroutines")
    if any(module.startswith("sqlalchemy.") for module in modules) and not hasattr(kind, "dbapi_connection"):
        return _AlchemyLink
    if iscoroutinefunction(getattr(kind, "close", None)):
        raise ConfigError(
            f"session: {kind.__module__}'s connection is asynchronous: expected an AsyncConnection or AsyncSession of "
            "SQLAlchemy"
        )
    return _DriverLink


@contextmanager
def linked(connection: Any) -> Iterator[Link]:
    """Link to a connection, or to a new connection of a SQLAlchemy ``Engine``, for a transaction of librmq's own.

    An error undoes it: even a statement that found a SQLite file locked leaves a transaction open.
    """
    if hasattr(connection, "dialect") and hasattr(connection, "connect"):  # an engine
        with connection.connect() as opened:
            yield Link(opened)
        return
    link = Link(connection)
    try:
        yield link
    except BaseException:
        with suppress(Exception):  # The first error is the one to see.
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
