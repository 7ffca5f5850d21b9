"""Sessions of libraries above the drivers: SQLAlchemy's and Django's, and the choice of a link by a connection's type.

This module imports SQLAlchemy and Django only for their own connections.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import lru_cache, partial
from inspect import iscoroutinefunction
from typing import Any

from librmq.errors import ConfigError
from librmq.idempotence._connections import ENDED_INSIDE, STILL_OPEN, DriverLink, Link, driver_link
from librmq.idempotence._drivers import (
    StatementResult,
    TransactionStatus,
    asynchronous,
    driver_of,
    driver_of_type,
    has_autocommit,
    run_on,
    status_of,
)
from librmq.override import override

_OPEN = TransactionStatus.OPEN
_IDLE = TransactionStatus.IDLE


class AlchemyLink(Link):
    """A link to a SQLAlchemy ``Session`` or ``Connection``."""

    _worker: object = None

    def __init__(self, connection: Any) -> None:
        if hasattr(connection, "registry"):
            connection = connection.registry()  # of a scoped session
        if hasattr(connection, "run_sync"):
            raise _awaits(type(connection))
        self.connection = connection
        self._is_session = hasattr(connection, "get_bind")
        self._bind = connection.get_bind() if self._is_session else connection
        name: str = self._bind.dialect.name
        self.dialect = "mysql" if name == "mariadb" else name

    @override
    def enter_block(self, worker: object, connection: Any = None) -> None:
        super().enter_block(worker, connection)
        self._worker = worker

    @override
    def begin(self) -> None:
        super().begin()
        self._begin_at_once()

    @override
    def begin_first(self) -> None:
        super().begin_first()
        self._begin_at_once()

    def _begin_at_once(self) -> None:
        if not self.connection.in_transaction():
            self.connection.begin()
        self._enter_driver()

    def _enter_driver(self) -> None:
        # Several sessions share what the application has bound them to, and the connection of a StaticPool. Other pools
        # give a connection to another thread or task at the commit, which is before the end of the block.
        from sqlalchemy.pool import StaticPool

        is_bound = hasattr(self._bind, "in_transaction")
        if self._worker is not None and (is_bound or isinstance(self._bind.engine.pool, StaticPool)):
            self.enter_block(self._worker, self._driver_connection())

    def _core(self) -> Any:
        return self.connection.connection() if self._is_session else self.connection

    def _pooled(self) -> Any:
        return self._core().connection

    @override
    def execute(self, sql: str, **parameters: Any) -> StatementResult:
        result = self.connection.execute(_text(sql), parameters)
        if result.returns_rows:
            return StatementResult(result.fetchall(), 0, 0)
        return StatementResult((), result.rowcount, result.lastrowid if self.dialect == "mysql" else 0)

    @override
    def _rollback(self) -> None:
        has_begun = self._is_session or self.connection.in_transaction()
        self.connection.rollback()
        if has_begun or self.connection.invalidated:
            return
        # A commit that failed has ended the transaction for SQLAlchemy, and not for SQLite.
        pooled = self._pooled()
        if status_of(pooled.driver_connection) not in (None, _IDLE):
            pooled.rollback()

    @contextmanager
    @override
    def alone(self) -> Iterator[Link]:
        # Within `with session.begin()` SQLAlchemy runs nothing more once the block has ended the transaction.
        with self._bind.engine.begin() as connection:
            yield AlchemyLink(connection)

    @override
    def status(self) -> TransactionStatus | None:
        if not self.connection.in_transaction():
            return _IDLE
        return status_of(self._driver_connection())

    @override
    def _status_before(self) -> TransactionStatus:
        # A session within the transaction of the connection that it was given would commit nothing.
        is_within = self._is_session and hasattr(self._bind, "in_transaction") and self._bind.in_transaction()
        return _OPEN if is_within or self.connection.in_transaction() else _IDLE

    @override
    def _commit(self) -> None:
        self.connection.commit()
        if self.connection.in_transaction():
            raise ConfigError(STILL_OPEN)

    @override
    def _set_savepoint(self) -> Any:
        self._enter_driver()
        if self.dialect == "sqlite" and self.status() is _IDLE:
            self.execute("BEGIN")  # else the driver's transaction would begin, and end, with the savepoint
        return self.connection.begin_nested()

    @override
    def _release(self, scope: Any) -> None:
        scope.commit()

    @override
    def _roll_back_to(self, scope: Any) -> None:
        scope.rollback()

    @override
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

    @override
    def _driver_connection(self) -> Any:
        return self._pooled().driver_connection


@lru_cache(maxsize=256)
def _text(sql: str) -> Any:
    from sqlalchemy import text

    return text(sql)


class DjangoLink(Link):
    """A link to Django's ``connection``, by its own API: its transactions are the blocks of ``transaction.atomic``."""

    _instead = ": use transaction.atomic()"
    _atomic: Any = None

    def __init__(self, connection: Any) -> None:
        from django.db import connections

        # `django.db.connection` stands for the connection that each thread has.
        is_wrapper = "in_atomic_block" in vars(connection)
        self.connection = connection if is_wrapper else connections[connection.alias]
        self.dialect = self.connection.vendor

    @override
    def execute(self, sql: str, **parameters: Any) -> StatementResult:
        with self.connection.cursor() as cursor:
            return run_on(cursor, "format", sql, parameters)

    @override
    def begin(self) -> None:
        """Enter an atomic block: a transaction, or a savepoint of the block around it."""
        from django.db import connections
        from django.db.transaction import atomic

        if self.connection is not connections[self.connection.alias]:  # a copy, which has no atomic blocks
            super().begin()
            return
        self.is_joined = self.connection.in_atomic_block
        self._atomic = atomic(using=self.connection.alias)
        self._atomic.__enter__()

    @override
    def begin_first(self) -> None:
        connection = self.connection
        if not connection.in_atomic_block:
            if connection.connection is None or connection.get_autocommit() == connection.settings_dict["AUTOCOMMIT"]:
                self.check_can_begin()
                # Only Django's requests close a connection that has failed, or is as old as CONN_MAX_AGE allows.
                connection.close_if_unusable_or_obsolete()
            self.check_can_begin()
        self.begin()

    @override
    def join(self) -> None:
        if self._status_before() is not _OPEN:
            raise ConfigError("join: expected a block of transaction.atomic() around this one, found none")
        self.begin()

    @override
    def _set_savepoint(self) -> None:
        self.begin()

    @override
    def _commit(self) -> None:
        atomic, self._atomic = self._atomic, None
        if atomic is not None:
            try:
                atomic.__exit__(None, None, None)
            except Exception as error:
                if self.is_joined or self._is_manual():  # It was a savepoint, which is gone.
                    raise ConfigError(ENDED_INSIDE) from error
                raise
        if self._is_manual() or (atomic is None and not self.connection.in_atomic_block):
            self.connection.commit()  # Otherwise it commits with the block around it, or has with its own.
        if not self.connection.in_atomic_block and status_of(self._driver_connection()) is _OPEN:
            raise ConfigError(STILL_OPEN)

    @override
    def _rollback(self) -> None:
        atomic, self._atomic = self._atomic, None
        if atomic is not None:
            atomic.__exit__(ConfigError, ConfigError("rolled back"), None)
        if self._is_manual() or (atomic is None and not self.connection.in_atomic_block):
            self.connection.rollback()
        if self.connection.in_atomic_block and self.connection.needs_rollback:
            self.is_joined = False  # The savepoint is gone.

    @override
    def alone(self) -> AbstractContextManager[Link]:
        return driver_link(self._driver_connection()).alone()

    @override
    def is_aborted(self) -> bool:
        return bool(self.connection.needs_rollback) or super().is_aborted()

    def _is_manual(self) -> bool:
        """Return whether the application commits by itself, as with the setting ``AUTOCOMMIT: False``."""
        return not self.connection.in_atomic_block and not self.connection.get_autocommit()

    @override
    def status(self) -> TransactionStatus | None:
        if self.connection.needs_rollback:
            return TransactionStatus.ABORTED
        if self._has_autocommit():
            return _IDLE
        return status_of(self._driver_connection())

    @override
    def _status_before(self) -> TransactionStatus:
        if self.connection.in_atomic_block:
            return _OPEN
        return driver_link(self._driver_connection())._status_before() if self._is_manual() else _IDLE

    @override
    def check_can_begin(self) -> None:
        if self.connection.in_atomic_block or self._is_manual():
            super().check_can_begin()

    @override
    def _has_autocommit(self) -> bool:
        return not self.connection.in_atomic_block and bool(self.connection.get_autocommit())

    @override
    def _driver_connection(self) -> Any:
        self.connection.ensure_connection()
        return self.connection.connection


@lru_cache(maxsize=256)
def _link_of(kind: Any) -> Callable[[Any], Link]:
    modules = {base.__module__ for base in kind.__mro__}
    if "django.utils.connection" in modules or "django.db.backends.base.base" in modules:
        return DjangoLink
    if hasattr(kind, "run_sync"):
        raise _awaits(kind)
    if hasattr(kind, "dbapi_connection"):
        return driver_link
    if any(module.startswith("sqlalchemy.") for module in modules):
        return AlchemyLink
    if iscoroutinefunction(getattr(kind, "close", None)):
        raise asynchronous(kind)
    driver, style = driver_of_type(kind)
    return partial(DriverLink, driver, style) if driver.dialect else driver_link


def link_to(connection: Any) -> Link:
    """Link to a connection by its type."""
    kind: Any = type(connection)
    return _link_of(kind)(connection)


def _awaits(kind: type) -> ConfigError:
    return ConfigError(f"{kind.__name__} is asynchronous: expected `async with`, or a method for coroutines")


@contextmanager
def linked(connection: Any) -> Iterator[Link]:
    """Link to a connection, or to a new connection of a SQLAlchemy ``Engine``, for a transaction of librmq's own.

    An error undoes it: even a statement that found a SQLite file locked leaves a transaction open.
    """
    if hasattr(connection, "dialect") and hasattr(connection, "connect"):  # an engine
        with connection.connect() as opened:
            yield AlchemyLink(opened)
        return
    link = link_to(connection)
    try:
        yield link
    except BaseException:
        with suppress(Exception):  # The first error is the one to see.
            link.rollback()
        raise


def check_database(database: Any) -> None:
    """Refuse anything but a SQLAlchemy ``Engine`` or a function that opens a connection, before a thread uses it."""
    if hasattr(database, "dialect") and hasattr(database, "connect"):
        return
    if not callable(database) or hasattr(database, "cursor") or hasattr(database, "execute"):
        raise ConfigError(
            f"database: expected an Engine or a function that opens a connection, found {database!r:.100}"
        )
