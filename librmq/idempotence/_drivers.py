"""What librmq knows about each DB-API driver: its transactions, autocommit, rows, parameters, and codes of errors.

`DRIVERS` is the table of it. A driver without an answer there is asked by SQL where librmq knows its database, and is
refused where a wrong guess would break a promise (`librmq.idempotence._connections`).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from inspect import isawaitable, iscoroutine
from operator import methodcaller
from typing import Any, Final, NamedTuple, NoReturn

from librmq.errors import ConfigError

# ----------------------------------------------------------------------------------------------------- drivers


class TransactionStatus(Enum):
    """State of the transaction of a connection."""

    IDLE = "idle"
    """No transaction is open."""
    OPEN = "open"
    ABORTED = "aborted"
    """An error has ended the transaction: the database refuses statements, and takes a commit for a rollback."""


def has_autocommit(connection: Any) -> bool | None:
    """Return whether a connection commits each statement; None if it has neither of the usual attributes."""
    get = getattr(connection, "get_autocommit", None)
    value = get() if callable(get) else getattr(connection, "autocommit", None)
    return None if value is None or callable(value) else bool(value)


@dataclass(frozen=True, slots=True)
class Driver:
    """What the connections of a DB-API driver can do, and what they tell without a statement."""

    dialect: str
    """Database, by SQLAlchemy's name; "" if it is unknown."""
    status: Callable[[Any], TransactionStatus] | None = None
    """Return the state of a connection's transaction, without a statement; None: ask by SQL."""
    is_ready: Callable[[Any], bool] | None = None
    """Return whether the next statement begins a transaction, as far as one quick look shows; None: ask further."""
    has_autocommit: Callable[[Any], bool | None] = has_autocommit
    """Return whether a connection commits each statement outside of an explicit transaction; None: not known."""
    cursor: Callable[[Any], Any] = methodcaller("cursor")
    """Open a cursor whose rows are tuples, whatever rows the connection's own cursors return."""
    reported_name: Callable[[Any], str | None] | None = None
    """Return the ``application_name`` that PostgreSQL has reported by itself; None: nothing is reported."""
    settle: Callable[[Any], object] | None = None
    """Read what the application has left unread, because the next statement would fail."""
    commits_by_sql: bool = False
    """Whether a statement commits at fewer round trips than the connection's call."""
    is_async: bool = False
    """Whether its connections are used only through SQLAlchemy."""


_LIBPQ: Final = (
    TransactionStatus.IDLE,
    TransactionStatus.OPEN,  # A statement is running.
    TransactionStatus.OPEN,
    TransactionStatus.ABORTED,
    TransactionStatus.IDLE,  # The connection is broken, so the next statement raises.
)


def _psycopg_status(connection: Any) -> TransactionStatus:
    if connection.pgconn.pipeline_status:
        raise ConfigError(
            "psycopg's pipeline mode returns results only later: leave `with connection.pipeline()` first"
        )
    return _LIBPQ[connection.pgconn.transaction_status]


def _psycopg_is_ready(connection: Any) -> bool:
    pgconn = connection.pgconn
    return not (pgconn.transaction_status or pgconn.pipeline_status or connection.autocommit)


def _psycopg2_is_ready(connection: Any) -> bool:
    is_idle = connection.get_transaction_status() == 0
    if is_idle and connection.status == _PSYCOPG2_BEGUN:
        connection.rollback()  # SQL has ended the transaction that the driver remembers, so it would begin none.
    return is_idle and not connection.autocommit


_PSYCOPG2_BEGUN: Final = 2


def _status_by_attribute(connection: Any) -> TransactionStatus:
    return TransactionStatus.OPEN if connection.in_transaction else TransactionStatus.IDLE


if sys.version_info >= (3, 12):

    def _sqlite_autocommit(connection: Any) -> bool:
        mode = getattr(connection, "autocommit", -1)  # -1 is the legacy mode, the only one of aiosqlite
        return connection.isolation_level is None if mode == -1 else bool(mode)
else:

    def _sqlite_autocommit(connection: Any) -> bool:
        return connection.isolation_level is None


def _sqlite_is_ready(connection: Any) -> bool:
    return not (connection.in_transaction or _sqlite_autocommit(connection))


def _mysql_status(connection: Any) -> TransactionStatus:
    # An error's packet has no status, so a transaction that a deadlock has ended still counts as open here.
    return TransactionStatus.OPEN if connection.server_status & 1 else TransactionStatus.IDLE


def _asyncpg_status(connection: Any) -> TransactionStatus:
    # It counts an aborted transaction as open, in which the next statement fails.
    return TransactionStatus.OPEN if connection.is_in_transaction() else TransactionStatus.IDLE


_NAME: Final = "application_name"


def _psycopg_name(connection: Any) -> str | None:
    name = connection.pgconn.parameter_status(b"application_name")
    return None if name is None else name.decode("utf-8", "replace")


def _sqlite_cursor(connection: Any) -> Any:
    cursor = connection.cursor()
    if connection.row_factory is not None:
        cursor.row_factory = None
    return cursor


def _psycopg_cursor(connection: Any) -> Any:
    # It is kept with its connection: the first statement of a cursor costs half as much again as a later one.
    attributes = vars(connection)
    cursor = attributes.get(_KEPT_CURSOR)
    if cursor is None:
        cursor = attributes[_KEPT_CURSOR] = connection.cursor(row_factory=sys.modules["psycopg"].rows.tuple_row)
    return cursor


_KEPT_CURSOR: Final = "_librmq_cursor"


def _mysql_cursor(connection: Any) -> Any:
    for kind in type(connection).__mro__:
        if cursors := sys.modules.get(f"{kind.__module__.partition('.')[0]}.cursors"):
            return connection.cursor(cursors.Cursor)
    return connection.cursor()


DRIVERS: Final[Mapping[str, Driver]] = {
    "sqlite3": Driver("sqlite", _status_by_attribute, _sqlite_is_ready, _sqlite_autocommit, _sqlite_cursor),
    "psycopg": Driver(
        "postgresql", _psycopg_status, _psycopg_is_ready, cursor=_psycopg_cursor, reported_name=_psycopg_name
    ),
    "psycopg2": Driver(
        "postgresql",
        lambda connection: _LIBPQ[connection.get_transaction_status()],
        _psycopg2_is_ready,
        cursor=lambda connection: connection.cursor(cursor_factory=sys.modules["psycopg2"].extensions.cursor),
        reported_name=lambda connection: connection.get_parameter_status(_NAME),
    ),
    "pg8000": Driver(
        "postgresql", reported_name=lambda connection: connection.parameter_statuses.get(_NAME), commits_by_sql=True
    ),
    "pymysql": Driver("mysql", _mysql_status, cursor=_mysql_cursor),
    "MySQLdb": Driver("mysql", cursor=_mysql_cursor),
    "mysql": Driver(
        "mysql",
        _status_by_attribute,
        settle=lambda connection: connection.unread_result and connection.consume_results(),
    ),
    **dict.fromkeys(("cymysql", "mariadb"), Driver("mysql", _mysql_status)),
    "aiosqlite": Driver("sqlite", _status_by_attribute, has_autocommit=_sqlite_autocommit, is_async=True),
    "asyncpg": Driver(
        "postgresql",
        _asyncpg_status,
        reported_name=lambda connection: getattr(connection.get_settings(), _NAME, None),
        is_async=True,
    ),
    **dict.fromkeys(("aiomysql", "asyncmy"), Driver("mysql", _mysql_status, is_async=True)),
}
"""Drivers by the name of their package."""


def asynchronous(kind: type) -> ConfigError:
    return ConfigError(
        f"session: {kind.__module__}'s {kind.__name__} is asynchronous: expected an AsyncConnection or AsyncSession of "
        "SQLAlchemy"
    )


def unknown_driver(connection: Any, what: str) -> ConfigError:
    return ConfigError(
        f"librmq does not know how {type(connection).__module__} shows {what}: expected a connection of "
        f"{', '.join(sorted(name for name in DRIVERS if not DRIVERS[name].is_async))}, of SQLAlchemy, or of Django"
    )


def _checked_cursor(connection: Any) -> Any:
    cursor = connection.cursor()
    if isawaitable(cursor):
        _refuse_awaitable(cursor, type(connection))
    return cursor


def _refuse_awaitable(pending: Any, kind: type) -> NoReturn:
    close = getattr(pending, "close", None)
    if iscoroutine(pending) and callable(close):
        close()  # else Python warns that it was never awaited
    raise asynchronous(kind)


_UNKNOWN: Final = Driver("", cursor=_checked_cursor)


@lru_cache(maxsize=256)
def driver_of_type(kind: Any) -> tuple[Driver, str]:
    """Return the driver of a type of connections, which an application may have derived, and its parameter style."""
    for base in kind.__mro__:
        driver = DRIVERS.get(base.__module__.partition(".")[0])
        if driver is not None:
            return driver, _parameter_style(base.__module__)
    return _UNKNOWN, _parameter_style(kind.__module__)


def driver_of(connection: Any) -> tuple[Driver, str]:
    kind: Any = type(connection)
    driver = driver_of_type(kind)
    # The proxies of tracing libraries show the class of the connection behind them.
    return driver if driver[0] is not _UNKNOWN else driver_of_type(connection.__class__)


def status_of(connection: Any) -> TransactionStatus | None:
    """Return the state of a DB-API connection's transaction; None if its driver does not show it."""
    status = driver_of(connection)[0].status
    return None if status is None else status(connection)


def _parameter_style(module: str) -> str:
    """Return the parameter style of the driver that has a connection's ``module``, from it or a package above it."""
    while module:
        style = getattr(sys.modules.get(module), "paramstyle", None)
        if isinstance(style, str):
            return style
        module = module.rpartition(".")[0]
    return "qmark"


# ------------------------------------------------------------------------------------------------------ errors


class Failure(Enum):
    """What an error of a database means for the statement that raised it."""

    DUPLICATE = "duplicate"
    """A row with the same key exists."""
    CONFLICT = "conflict"
    """The database undid the statement, or its transaction, because of another transaction."""
    TOO_LONG = "too long"
    """The statement waited for a lock, or ran, longer than the database or the driver allows."""
    STALE = "stale"
    """The connection answers, and serves no longer: its server is read-only since a failover."""
    UNPREPARED = "unprepared"
    """A pooler changed the server of the connection, and its prepared statements do not fit those of that server."""
    TEMPORARY = "temporary"
    """The database can't be reached, stops, or is overloaded. Another try may succeed."""
    LASTING = "lasting"
    """Another try fails too: the statement, the schema, the rights, or the row is wrong."""


def _by_code(failure: Failure, codes: str) -> dict[str, Failure]:
    return dict.fromkeys(codes.split(), failure)


_FAILURES: Final[Mapping[str, Failure]] = {
    # SQLSTATEs of PostgreSQL, or their first two characters
    **_by_code(Failure.DUPLICATE, "23505"),
    **_by_code(Failure.CONFLICT, "40001 40P01"),
    **_by_code(Failure.TOO_LONG, "55P03 57014"),
    **_by_code(Failure.STALE, "25006"),
    **_by_code(Failure.UNPREPARED, "26000 42P05"),
    **_by_code(Failure.TEMPORARY, "08 25P03 40 53 57 58"),
    # numbers of MySQL and MariaDB
    **_by_code(Failure.DUPLICATE, "1062 1586"),
    **_by_code(Failure.CONFLICT, "1020 1213"),
    **_by_code(Failure.TOO_LONG, "1205 1969 3024 3572"),
    **_by_code(Failure.STALE, "1290 1792 1836"),
    **_by_code(
        Failure.TEMPORARY,
        "0 1040 1053 1129 1152 1158 1159 1160 1161 1184 1203 1226 1317 1927 2002 2003 2006 2013 2014 2055 4031",
    ),
    # names of SQLite, or their first two words
    **_by_code(Failure.DUPLICATE, "SQLITE_CONSTRAINT_PRIMARYKEY SQLITE_CONSTRAINT_UNIQUE SQLITE_CONSTRAINT_ROWID"),
    **_by_code(Failure.TOO_LONG, "SQLITE_BUSY SQLITE_LOCKED"),
    **_by_code(
        Failure.TEMPORARY,
        "SQLITE_CANTOPEN SQLITE_FULL SQLITE_INTERRUPT SQLITE_IOERR SQLITE_NOMEM SQLITE_PROTOCOL SQLITE_READONLY",
    ),
}


def error_code(error: BaseException) -> str | None:
    """Return the code of a driver's error: an SQLSTATE, a number of MySQL, or SQLite's name; None if it has none.

    SQLAlchemy's and Django's errors have the code of the driver's error that they stand for.
    """
    if type(error).__module__ == "django.db.utils":
        error = error.__cause__ or error
    error = getattr(error, "orig", None) or error
    argument = error.args[0] if error.args else None
    if isinstance(error, OSError):
        return None  # Its number is the operating system's.
    if isinstance(argument, dict):
        argument = argument.get("C")  # pg8000
    attributes = ("sqlite_errorname", "errno", "sqlstate", "pgcode")
    codes = [argument if isinstance(argument, int) else None, *(getattr(error, name, None) for name in attributes)]
    codes.append(argument if isinstance(argument, str) and len(argument) == _SQLSTATE_LENGTH else None)
    return next((str(code) for code in codes if isinstance(code, str | int) and not isinstance(code, bool)), None)


_SQLSTATE_LENGTH: Final = 5
IN_ABORTED_TRANSACTION: Final = "25P02"
"""PostgreSQL's code for a statement after an error of the transaction."""
_REFUSALS: Final = frozenset({Failure.CONFLICT, Failure.TOO_LONG, Failure.STALE, Failure.UNPREPARED})
_TEMPORARY_KINDS: Final = frozenset({"OperationalError", "InterfaceError", "InternalError", "TimeoutError", "OSError"})


def failure_of(error: BaseException) -> Failure:
    """Return what an error of a driver, of SQLAlchemy, or of Django means, by its code; without one by its class."""
    code = error_code(error)
    if code is not None:
        family = code[:2] if len(code) == _SQLSTATE_LENGTH else "_".join(code.split("_")[:2])
        failure = _FAILURES.get(code) or _FAILURES.get(family)
        if failure is not None:
            return failure
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if code is None and "IntegrityError" in kinds:
        return Failure.DUPLICATE
    # Drivers raise errors without a code where there is no server to give one, above all in `connect`.
    return Failure.TEMPORARY if code is None and not _TEMPORARY_KINDS.isdisjoint(kinds) else Failure.LASTING


def is_integrity_error(error: BaseException) -> bool:
    """Return whether the error of a driver, of SQLAlchemy, or of Django says that a row violates a constraint."""
    is_of_class = any(kind.__name__ == "IntegrityError" for kind in type(error).__mro__)
    # The driver pg8000 has one class for all of its errors.
    return is_of_class or failure_of(error) is Failure.DUPLICATE


def is_refusal(error: BaseException) -> bool:
    """Return whether a database that answers did not carry a statement out, and may do so at another try."""
    return failure_of(error) in _REFUSALS


def is_temporary_error(error: BaseException) -> bool:
    """Return whether another try may succeed: a database that cannot be reached, or is locked or busy."""
    return failure_of(error) not in (Failure.DUPLICATE, Failure.LASTING)


# ------------------------------------------------------------------------------------------------- statements


class StatementResult(NamedTuple):
    rows: Sequence[Sequence[Any]]
    changed: int
    """Number of rows that changed."""
    last_id: int
    """The last inserted id, as MySQL defines it."""


_PARAMETER: Final = re.compile(r"(?<![:\w]):([a-z_]+)")


def run_on(cursor: Any, style: str, sql: str, parameters: Mapping[str, Any]) -> StatementResult:
    """Run one statement on a cursor of a driver that takes parameters in ``style``."""
    answer = execute_on(cursor, style, sql, parameters)
    if answer is not cursor and type(answer) not in _USUAL_ANSWERS and isawaitable(answer):
        _refuse_awaitable(answer, type(cursor))
    if not cursor.description:
        last_id = getattr(cursor, "lastrowid", 0)
        return StatementResult((), cursor.rowcount, last_id if isinstance(last_id, int) else 0)
    rows = cursor.fetchall()
    if rows and type(rows[0]) is not tuple and isinstance(rows[0], Mapping):
        columns = [column[0] for column in cursor.description]
        rows = [tuple(row[column] for column in columns) for row in rows]
    return StatementResult(rows, cursor.rowcount, 0)


_USUAL_ANSWERS: Final = frozenset({int, type(None)})


def execute_on(cursor: Any, style: str, sql: str, parameters: Mapping[str, Any]) -> Any:
    """Run one statement whose result is not asked for; return what the driver does, which differs."""
    statement, names = rendered(sql, style)
    if names is None:
        return cursor.execute(statement, parameters)
    return cursor.execute(statement, tuple(map(parameters.__getitem__, names))) if names else cursor.execute(statement)


@lru_cache(maxsize=256)
def rendered(sql: str, style: str) -> tuple[str, tuple[str, ...] | None]:
    """Return ``sql`` in a driver's style of parameters, and their names in order; None if it takes them by name."""
    names: list[str] = []

    def placeholder(match: re.Match[str]) -> str:
        names.append(match[1])
        if style == "qmark":
            return "?"
        if style == "format":
            return "%s"
        if style == "pyformat":
            return f"%({match[1]})s"
        return f":{match[1]}" if style == "named" else f":{len(names)}"

    statement = _PARAMETER.sub(placeholder, sql)
    return statement, None if names and style in ("named", "pyformat") else tuple(names)
