"""Connections of an application's database: statements and transactions, here on connections of DB-API drivers.

`librmq.idempotence._sessions` has those of libraries above the drivers, and chooses by the type of a connection.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Final

from librmq.errors import ConfigError
from librmq.idempotence._drivers import (
    IN_ABORTED_TRANSACTION,
    Driver,
    StatementResult,
    TransactionStatus,
    asynchronous,
    driver_of,
    error_code,
    execute_on,
    is_integrity_error,
    run_on,
    status_of,
    unknown_driver,
)
from librmq.override import override

_BEGIN: Final = {"sqlite": "BEGIN IMMEDIATE", "mysql": "START TRANSACTION"}
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
        ├── DriverLink       of a DB-API driver
        ├── AlchemyLink      SQLAlchemy's Session or Connection
        └── DjangoLink       Django's connection
    """

    # A link is made for each message, so these are of the class until they change.
    connection: Any
    dialect: str
    """Database, by SQLAlchemy's name; "mysql" for MariaDB too."""
    is_joined = False
    """Whether the transaction is the caller's, and its end too."""
    _scope: Any = None
    """What stands for the savepoint in the caller's transaction; None in a transaction of librmq's own."""
    _instead = ""
    """What to use in place of a connection that commits each statement."""
    _is_explicit = False
    _entered: tuple[int, ...] = ()
    """The connections for which this link has noted its block, by their ids."""

    def execute(self, sql: str, **parameters: Any) -> StatementResult:
        """Run one statement; its rows are tuples or can be read like tuples."""
        raise NotImplementedError

    def begin(self) -> None:
        """Begin a transaction, if the next statement would not do so; `commit` and `rollback` end it."""
        if self._has_autocommit():
            self.begin_by_statement()

    def begin_by_statement(self) -> None:
        """Begin a transaction by a statement, which on SQLite locks the file for writing."""
        self.execute(_BEGIN.get(self.dialect, "BEGIN"))
        self._is_explicit = True

    def commit(self) -> None:
        """Commit the transaction, or undo it if the commit raises: SQLite would keep it open and the file locked.

        In the caller's transaction release the savepoint.

        Raises:
            ConfigError: The transaction is open still, because something around it keeps it; or the savepoint is gone.
        """
        try:
            if self._scope is not None:
                scope, self._scope = self._scope, None
                try:
                    self._release(scope)
                except Exception as error:
                    self.is_joined = False
                    raise ConfigError(ENDED_INSIDE) from error
                return
            if self._is_explicit:
                self.execute("COMMIT")  # A connection of sqlite3 with autocommit=True ignores calls of commit.
                self._is_explicit = False
            self._commit()
        except BaseException:
            with suppress(Exception):  # The commit's error is the one to see.
                self.rollback()
            raise

    def rollback(self) -> None:
        """Undo the transaction, or what came after the savepoint.

        Without its savepoint the transaction is not the caller's any more, and is undone as a whole.
        """
        scope, self._scope = self._scope, None
        if scope is not None:
            try:
                self._roll_back_to(scope)
            except Exception:  # The drivers' errors for it differ.
                self.is_joined = False
                with suppress(Exception):  # psycopg refuses this within `connection.transaction()`.
                    self._rollback()
            return
        if self._is_explicit:
            self._is_explicit = False
            self.execute("ROLLBACK")
        self._rollback()

    def status(self) -> TransactionStatus | None:
        """Return the state of the connection's transaction without a statement; None if the driver does not show it."""
        raise NotImplementedError

    def is_aborted(self) -> bool:
        """Return whether an error has ended the transaction, as far as that shows without a statement."""
        return self.dialect == "postgresql" and self.status() is TransactionStatus.ABORTED

    def insert_first(self, sql: str, parameters: Mapping[str, Any], exists: Callable[[], bool]) -> bool:
        """Insert the first row of a transaction; after an error undo it, and return False if the row exists.

        ``exists`` reads the row: another constraint, such as a column that an application has added, can be violated.
        """
        try:
            self.change(sql, parameters)
        except BaseException as error:
            self.rollback()
            if not is_integrity_error(error):
                raise
            if self.is_joined:
                self._scope = self._set_savepoint()
            else:
                self.begin()
            if not exists():
                self.rollback()
                raise
            return False
        return True

    # ---- what a transaction needs

    def check_can_begin(self) -> None:
        status = self._status_before()
        if status is TransactionStatus.ABORTED:
            raise ConfigError("expected no open transaction, found one that an error has ended: roll back first")
        if status is _OPEN:
            hint = "; a connection with autocommit=False always has one: connect without that argument"
            raise ConfigError(
                "expected no open transaction: commit or roll back first, because librmq's row must come first"
                f"{hint if self.dialect == 'sqlite' else ''}"
            )
        self.check_no_autocommit()

    def begin_first(self) -> None:
        """Begin a transaction that no statement has begun; in an atomic block of Django's, set a savepoint."""
        self.check_can_begin()

    def join(self) -> None:
        """Set a savepoint in the transaction that the caller has begun, and leave its end to the caller."""
        status = self._status_before()
        # The question of a driver that does not show its transaction has begun one, if the caller had not.
        is_asked = self.dialect == "postgresql" and self.status() is None
        if status is not _OPEN and not (status is _IDLE and is_asked):
            what = "one that an error has ended" if status is TransactionStatus.ABORTED else "none"
            raise ConfigError(f"join: expected an open transaction, found {what}: begin it before the block")
        self._scope = self._set_savepoint()
        self.is_joined = True

    def check_no_autocommit(self) -> None:
        if self._has_autocommit():
            raise ConfigError(
                f"expected a connection without autocommit, found one that commits each statement{self._instead}"
            )

    # ---- what a connection tells without a statement

    def settle(self) -> None:
        """Read what the block has left unread, because the next statement would fail."""

    def reported_name(self) -> str | None:
        """Return the ``application_name`` that the server has reported; None if nothing is reported."""
        connection = self._driver_connection()
        report = driver_of(connection)[0].reported_name
        return None if report is None else report(connection)

    def commits_each(self) -> bool:
        """Return whether statements have been committed one by one since something has ended the transaction.

        So it is where a statement has begun it, and where a driver remembers that it has begun one.
        """
        connection = self._driver_connection()
        if self.dialect == "postgresql" and status_of(connection) is not None:
            self.execute("SELECT 1")
            return status_of(connection) is _IDLE
        return bool(driver_of(connection)[0].has_autocommit(connection)) and status_of(connection) is not _OPEN

    def _driver_connection(self) -> Any:
        raise NotImplementedError

    # ---- what differs

    def change(self, sql: str, parameters: Mapping[str, Any]) -> int:
        """Run one statement that returns no rows; return how many rows it has changed."""
        return self.execute(sql, **parameters).changed

    def fetch(self, sql: str, parameters: Mapping[str, Any]) -> Sequence[Sequence[Any]]:
        """Run one statement that returns rows; return them."""
        return self.execute(sql, **parameters).rows

    def _commit(self) -> None:
        self.connection.commit()

    def _rollback(self) -> None:
        self.connection.rollback()

    def alone(self) -> AbstractContextManager[Link]:
        """Return what runs a transaction of its own after the block, whatever is around it."""
        raise NotImplementedError

    def _status_before(self) -> TransactionStatus:
        """Return the state in which a transaction of librmq's would begin."""
        raise NotImplementedError

    def _has_autocommit(self) -> bool:
        raise NotImplementedError

    def _set_savepoint(self) -> Any:
        """Set a savepoint, and return what stands for it; by SQL its name, which differs from that of any around it."""
        name = f"rmq_{next(_savepoints)}"
        self.change(f"SAVEPOINT {name}", {})
        return name

    def _release(self, scope: Any) -> None:
        self.change(f"RELEASE SAVEPOINT {scope}", {})

    def _roll_back_to(self, scope: Any) -> None:
        self.change(f"ROLLBACK TO SAVEPOINT {scope}", {})
        self._release(scope)

    # ---- whose block it is

    def enter_block(self, worker: object, connection: Any = None) -> None:
        """Note that a block of ``worker``, a thread's number or a task, begins on ``connection`` or this link's."""
        if connection is None:
            connection = self.connection
        entry = (connection, worker)
        first = _blocks.setdefault(id(connection), entry)
        if first is entry:
            self._entered = (*self._entered, id(connection))
        elif first[1] != worker:
            names: dict[object, str] = {thread.ident: thread.name for thread in threading.enumerate()}
            name = first[1].get_name() if isinstance(first[1], asyncio.Task) else names.get(first[1], "another thread")
            raise ConfigError(
                f"session: {type(self.connection).__name__} is in a block of {name}: give each thread and task its own"
            )

    def leave_block(self) -> None:
        for connection in self._entered:
            del _blocks[connection]


_savepoints = itertools.count()
_blocks: dict[int, tuple[Any, object]] = {}
"""Connections in a block, by their ids, which no other object has while the connection is kept here."""
ENDED_INSIDE: Final = (
    "the transaction has ended inside the block: let errors of the database propagate, or run a statement that may "
    "fail in a savepoint; commit and roll back outside"
)
STILL_OPEN: Final = (
    "the transaction is still open after its commit, so nothing is sure to be kept: commit what is around it, or give "
    "a connection without an open transaction"
)


class DriverLink(Link):
    """A link to a connection of a DB-API driver."""

    _cursor: Any = None

    def __init__(self, driver: Driver, style: str, connection: Any) -> None:
        if driver.is_async:
            raise asynchronous(type(connection))
        if not driver.dialect and not (hasattr(connection, "cursor") and hasattr(connection, "commit")):
            raise ConfigError(f"session: expected a session or connection, found {type(connection).__name__}")
        self._driver = driver
        self._style = style
        self.connection = connection
        self.dialect = driver.dialect

    @override
    def execute(self, sql: str, **parameters: Any) -> StatementResult:
        if self._cursor is None:
            self._cursor = self._driver.cursor(self.connection)
        return run_on(self._cursor, self._style, sql, parameters)

    @override
    def change(self, sql: str, parameters: Mapping[str, Any]) -> int:
        if self._cursor is None:
            self._cursor = self._driver.cursor(self.connection)
        execute_on(self._cursor, self._style, sql, parameters)
        changed: int = self._cursor.rowcount
        return changed

    @override
    def fetch(self, sql: str, parameters: Mapping[str, Any]) -> Sequence[Sequence[Any]]:
        # Some drivers make the description of a result, which `run_on` looks at, only when they are asked for it.
        cursor = self._cursor = self._driver.cursor(self.connection)
        execute_on(cursor, self._style, sql, parameters)
        rows: Sequence[Sequence[Any]] = cursor.fetchall()
        return rows

    @override
    def begin_first(self) -> None:
        is_ready = self._driver.is_ready
        if is_ready is None or not is_ready(self.connection):
            self.check_can_begin()

    @override
    def _commit(self) -> None:
        if self._driver.commits_by_sql:
            self.execute("COMMIT")
        else:
            self.connection.commit()

    @override
    def settle(self) -> None:
        if self._driver.settle is not None:
            self._driver.settle(self.connection)

    @override
    def _driver_connection(self) -> Any:
        return self.connection

    @contextmanager
    @override
    def alone(self) -> Iterator[Link]:
        # By SQL, because psycopg refuses calls that end a transaction within `connection.transaction()`.
        with suppress(Exception):
            self.execute("ROLLBACK")
        try:
            yield self
            self.execute("COMMIT")
        finally:
            with suppress(Exception):  # The driver may remember that it has begun a transaction.
                self._rollback()

    @override
    def status(self) -> TransactionStatus | None:
        return None if self._driver.status is None else self._driver.status(self.connection)

    @override
    def _status_before(self) -> TransactionStatus:
        if self._driver.status is not None:
            return self._driver.status(self.connection)
        statement = _IN_TRANSACTION.get(self.dialect)
        if statement is None:
            raise unknown_driver(self.connection, "an open transaction")
        try:
            is_open = bool(self.execute(statement).rows)
        except Exception as error:
            code = error_code(error)
            if code not in (IN_ABORTED_TRANSACTION, "1568"):
                raise
            return TransactionStatus.ABORTED if code == IN_ABORTED_TRANSACTION else _OPEN
        # The transaction that PostgreSQL has begun for the question is left open, and goes on as the block's.
        return _OPEN if is_open else _IDLE

    @override
    def _has_autocommit(self) -> bool:
        commits_each = self._driver.has_autocommit(self.connection)
        if commits_each is None and not self.dialect:
            raise unknown_driver(self.connection, "that it commits each statement")
        return bool(commits_each) and self.status() is not _OPEN


def driver_link(connection: Any) -> DriverLink:
    """Return a link to a connection of a DB-API driver, also to one of a SQLAlchemy engine's pool."""
    connection = getattr(connection, "dbapi_connection", connection)
    return DriverLink(*driver_of(connection), connection)
