"""The table of drivers: each entry is compared with what the driver does on its database."""

from __future__ import annotations

import asyncio
import sqlite3
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
from sqlalchemy.ext.asyncio import create_async_engine

from librmq.errors import ConfigError
from librmq.idempotence._connections import Link
from librmq.idempotence._drivers import DRIVERS as TABLE
from librmq.idempotence._drivers import (
    Failure,
    TransactionStatus,
    driver_of,
    error_code,
    failure_of,
    is_integrity_error,
    is_temporary_error,
)
from librmq.idempotence._sessions import link_to
from librmq.idempotence._sqltables import upgrade_tables
from librmq.idempotence._transactional_tables import purge_messages, transactional
from librmq.idempotence.outbox import Outbox
from librmq.message.message import Message
from tests.idempotence.conftest import DRIVERS, Database
from tests.idempotence.test_listener import Delivery

by_driver = pytest.mark.parametrize(("base", "driver"), DRIVERS)


@pytest.fixture
def connect(database: Callable[[str], Database], base: str, driver: str) -> Iterator[Callable[..., Any]]:
    """``connect(rows="dicts")`` returns a connection of the driver."""
    opened: list[Any] = []

    def make(rows: str = "") -> Any:
        opened.append(database(base).connect_by(driver, rows))
        return opened[-1]

    yield make
    for connection in opened:
        with suppress(Exception):
            connection.close()


def insert(link: Link, name: str) -> None:
    link.execute("INSERT INTO effects (name) VALUES (:name)", name=name)


@by_driver
def test_the_status_follows_the_transaction(connect: Callable[..., Any], base: str, name: str) -> None:
    link = link_to(connect())
    assert link.status() is TransactionStatus.IDLE
    for end in (link.commit, link.rollback):
        insert(link, name)
        assert link.status() is TransactionStatus.OPEN
        end()
        assert link.status() is TransactionStatus.IDLE
    insert(link, name)
    with suppress(Exception):
        link.execute("SELECT nothing FROM nowhere")
    assert link.status() is (TransactionStatus.ABORTED if base == "postgresql" else TransactionStatus.OPEN)
    link.rollback()
    assert link.status() is TransactionStatus.IDLE


def set_autocommit(connection: Any) -> None:
    """Let a driver's connection commit each statement."""
    if isinstance(connection, sqlite3.Connection):
        connection.isolation_level = None
    elif callable(connection.autocommit):
        connection.autocommit(True)
    else:
        connection.autocommit = True


@by_driver
def test_autocommit_is_seen(connect: Callable[..., Any], name: str) -> None:
    connection = connect()
    link = link_to(connection)
    link.check_no_autocommit()
    set_autocommit(connection)
    with pytest.raises(ConfigError, match="without autocommit"):
        link.check_no_autocommit()
    link.begin()
    link.check_no_autocommit()  # in a transaction that was begun by a statement
    insert(link, name)
    link.rollback()
    with pytest.raises(ConfigError, match="without autocommit"):
        link.check_no_autocommit()


@by_driver
@pytest.mark.parametrize("rows", ["", "dicts", "named"])
def test_rows_can_be_read_by_position(connect: Callable[..., Any], rows: str) -> None:
    assert tuple(link_to(connect(rows)).execute("SELECT :first, 2", first="1").rows[0]) == ("1", 2)


def errors_of(execute: Callable[[str], object], roll_back: Callable[[], object], name: str) -> dict[str, Exception]:
    """Return the errors of statements by what is wrong with them."""
    statements = {
        "duplicate": f"INSERT INTO accounts (id, balance) VALUES ('{name}', 1), ('{name}', 2)",
        "null": f"INSERT INTO accounts (id, balance) VALUES ('{name}', NULL)",
        "table": "SELECT 1 FROM nowhere",
        "column": "SELECT nowhere FROM accounts",
        "syntax": "SELEKT 1",
    }
    errors = {}
    for what, statement in statements.items():
        try:
            execute(statement)
        except Exception as error:
            errors[what] = error
        roll_back()
    return errors


def check_errors(errors: dict[str, Exception]) -> None:
    failures = {what: failure_of(error) for what, error in errors.items()}
    assert failures.pop("duplicate") is Failure.DUPLICATE
    assert failures == dict.fromkeys(("null", "table", "column", "syntax"), Failure.LASTING)


@by_driver
def test_errors_by_their_codes(connect: Callable[..., Any], name: str) -> None:
    link = link_to(connect())
    check_errors(errors_of(link.execute, link.rollback, name))


@pytest.mark.parametrize(
    ("base", "driver"), [*DRIVERS, ("sqlite", "pysqlite"), ("postgresql", "asyncpg"), ("sqlite", "aiosqlite")]
)
def test_errors_of_sqlalchemy(database: Callable[[str], Database], base: str, driver: str, name: str) -> None:
    driver = driver.replace("sqlite3", "pysqlite")
    url = database(base).engine.url.set(drivername=f"{base}+{driver}")
    if driver not in ("asyncpg", "aiosqlite"):
        engine = sqlalchemy.create_engine(url)
        with engine.connect() as connection:
            link = link_to(connection)
            check_errors(errors_of(link.execute, link.rollback, name))
        engine.dispose()
        return

    async def run() -> None:
        engine = create_async_engine(url)
        async with engine.connect() as connection:

            def work(inner: Any) -> None:
                link = link_to(inner)
                check_errors(errors_of(link.execute, link.rollback, name))

            await connection.run_sync(work)
        await engine.dispose()

    asyncio.run(run())


def refused_connections() -> dict[str, Callable[[], Any]]:
    import psycopg
    import psycopg2
    import pymysql

    return {
        "psycopg": lambda: psycopg.connect("host=127.0.0.1 port=1 user=rmq"),
        "psycopg2": lambda: psycopg2.connect(host="127.0.0.1", port=1, user="rmq"),
        "pymysql": lambda: pymysql.connect(host="127.0.0.1", port=1),
        "sqlite3": lambda: sqlite3.connect("/nowhere/x.db"),
        "sqlalchemy": lambda: sqlalchemy.create_engine("postgresql+psycopg://rmq@127.0.0.1:1/x").connect(),
    }


@pytest.mark.parametrize("driver", ["psycopg", "psycopg2", "pymysql", "sqlite3", "sqlalchemy"])
def test_a_database_out_of_reach_is_temporary(driver: str) -> None:
    with pytest.raises(Exception) as raised:  # noqa: PT011 (each driver has a class of its own)
        refused_connections()[driver]()
    assert failure_of(raised.value) is Failure.TEMPORARY


@by_driver
def test_a_closed_connection_is_temporary(connect: Callable[..., Any], driver: str) -> None:
    connection = connect()
    link = link_to(connection)
    connection.close()
    with pytest.raises(Exception) as raised:  # noqa: PT011
        link.execute("SELECT 1")
    assert is_temporary_error(raised.value) or driver == "sqlite3"  # there it is an error of the program


def test_a_wait_for_a_locked_file_is_too_long(database: Callable[[str], Database], name: str) -> None:
    place = database("sqlite")
    with closing(place.connect()) as writer, closing(place.connect()) as other:
        other.execute("PRAGMA busy_timeout = 0")
        insert(link_to(writer), name)
        with pytest.raises(sqlite3.OperationalError) as raised:
            insert(link_to(other), name)
        assert failure_of(raised.value) is Failure.TOO_LONG
        writer.rollback()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (type("ProgrammingError", (Exception,), {})({"S": "ERROR", "C": "23505"}), "23505"),  # pg8000
        (type("IntegrityError", (Exception,), {"errno": 1062, "sqlstate": "23000"})("1062 (23000): …"), "1062"),
        (type("OperationalError", (Exception,), {})(2006, "MySQL server has gone away"), "2006"),
        (ConnectionResetError(104, "reset by peer"), None),
        (ValueError("abc"), None),
        (ValueError(), None),
    ],
)
def test_codes_of_other_drivers(error: Exception, code: str | None) -> None:
    assert error_code(error) == code
    assert is_integrity_error(error) is (code in ("23505", "1062"))


@pytest.mark.parametrize(
    ("attribute", "codes", "failure"),
    [
        ("sqlstate", "40001 40P01", Failure.CONFLICT),
        ("sqlstate", "55P03 57014", Failure.TOO_LONG),
        ("sqlstate", "25006", Failure.STALE),
        ("sqlstate", "26000 42P05", Failure.UNPREPARED),
        ("sqlstate", "08006 40003 53300 57P01", Failure.TEMPORARY),
        ("errno", "1213 1020", Failure.CONFLICT),
        ("errno", "1205 1969 3024 3572", Failure.TOO_LONG),
        ("errno", "1290 1792 1836", Failure.STALE),
        ("errno", "1040 2006 2013", Failure.TEMPORARY),
        ("sqlite_errorname", "SQLITE_BUSY SQLITE_BUSY_SNAPSHOT SQLITE_LOCKED_SHAREDCACHE", Failure.TOO_LONG),
        ("sqlite_errorname", "SQLITE_FULL SQLITE_IOERR_WRITE", Failure.TEMPORARY),
        ("sqlstate", "42501", Failure.LASTING),
    ],
)
def test_what_codes_mean(attribute: str, codes: str, failure: Failure) -> None:
    for code in codes.split():
        error = type("OperationalError", (Exception,), {attribute: code})()
        assert failure_of(error) is failure, code
        assert is_temporary_error(error) is (failure is not Failure.LASTING), code


def test_derived_connections_and_proxies_have_the_driver_of_their_base() -> None:
    class Ours(sqlite3.Connection):
        pass

    class Proxy:
        def __init__(self, wrapped: Any) -> None:
            self.wrapped = wrapped

        @property  # type: ignore[misc]
        def __class__(self) -> type:
            return type(self.wrapped)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.wrapped, name)

    with closing(sqlite3.connect(":memory:", factory=Ours)) as connection:
        for sqlite in (connection, Proxy(connection)):
            assert driver_of(sqlite)[0] is TABLE["sqlite3"]
            assert link_to(sqlite).status() is TransactionStatus.IDLE


# --- drivers that do not show their transactions


class Silent:
    """A connection of a driver that has the usual methods, and no attribute that shows a transaction."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self.autocommit = False

    def cursor(self, *_: Any) -> Any:
        return self._connection.cursor()

    def commit(self) -> None:
        self._connection.commit()

    def rollback(self) -> None:
        self._connection.rollback()


SILENT = [("mysql", "MySQLdb")]


@pytest.fixture
def silent(
    database: Callable[[str], Database], base: str, driver: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], Any]]:
    """``silent()`` returns a connection that counts as one of the driver."""
    monkeypatch.setitem(sys.modules, driver, types.SimpleNamespace(paramstyle="format"))
    kind = type("Connection", (Silent,), {"__module__": driver})
    opened: list[Any] = []

    def make() -> Any:
        opened.append(database(base).connect())
        return kind(opened[-1])

    yield make
    for connection in opened:
        connection.close()


@pytest.mark.parametrize(("base", "driver"), SILENT)
def test_a_driver_that_shows_nothing_is_asked_by_sql(
    database: Callable[[str], Database], silent: Callable[[], Any], base: str, driver: str, name: str
) -> None:
    place, connection = database(base), silent()
    link = link_to(connection)
    assert link.status() is None
    link.check_can_begin()
    insert(link, name)
    with pytest.raises(ConfigError, match="expected no open transaction"):
        link.check_can_begin()
    link.rollback()

    def deliver(how: str) -> bool:
        with transactional(connection, Delivery("orders", b"x", unique_key=name), group="billing") as first:
            if how == "rollback":
                insert(link, name)
                connection.rollback()
            if first:
                insert(link, name)
        return first

    with pytest.raises(ConfigError, match="ended inside the block"):
        deliver("rollback")
    assert place.effects(name) == 0
    assert [deliver("") for _ in range(2)] == [True, False]
    assert place.effects(name) == 1
    connection.autocommit = True
    with pytest.raises(ConfigError, match="without autocommit"):
        deliver("")


def test_a_driver_that_is_not_known_is_refused(database: Callable[[str], Database], name: str) -> None:
    with closing(database("sqlite").connect()) as connection:
        session = Silent(connection)
        with (
            pytest.raises(ConfigError, match=r"does not know how .* shows an open transaction"),
            transactional(session, Delivery("orders", b"x", unique_key=name), group="billing"),
        ):
            raise AssertionError("begun")
        Outbox().add(session, Message("orders", b"x"))
        del session.autocommit
        with pytest.raises(ConfigError, match=r"does not know how .* shows that it commits each statement"):
            Outbox().add(session, Message("orders", b"x"))


@pytest.mark.platform
@pytest.mark.skipif(sys.version_info < (3, 12), reason="Python 3.12 has these connections")
@pytest.mark.parametrize("autocommit", [True, False])
def test_the_autocommit_of_sqlite(tmp_path: Path, autocommit: Any, name: str) -> None:
    """With True a commit by a call does nothing, and with False a transaction is always open."""
    arguments: Any = {"autocommit": autocommit}
    message = Delivery("orders", b"x", unique_key=name)
    with (
        closing(sqlite3.connect(tmp_path / "x.db", **arguments)) as connection,
        closing(sqlite3.connect(tmp_path / "x.db", timeout=0)) as other,
    ):
        upgrade_tables(connection)
        other.execute("CREATE TABLE effects (name)")  # which needs the file for itself
        purge_messages(connection, 0)
        expected = "without autocommit" if autocommit else "always has one: connect without that argument"
        with pytest.raises(ConfigError, match=expected), transactional(connection, message, group="billing"):
            raise AssertionError("begun")
        if autocommit:
            with pytest.raises(ConfigError, match="without autocommit"):
                Outbox().add(connection, message)
        else:
            Outbox().add(connection, message)
            connection.commit()
        assert len(other.execute("SELECT * FROM rmq_outbox").fetchall()) == int(not autocommit)
