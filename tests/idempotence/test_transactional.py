"""The record and the business change in one transaction of the caller's."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import aiosqlite
import asyncpg
import psycopg
import pytest
import sqlalchemy
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

from librmq.clock import ManualClock
from librmq.errors import ConfigError
from librmq.idempotence._sessions import link_to
from librmq.idempotence._sqltables import upgrade_tables
from librmq.idempotence._transactional_tables import purge_messages, transactional
from librmq.idempotence.outbox import Outbox
from librmq.message.message import Message
from tests.budget import many
from tests.idempotence.conftest import DATABASES, DRIVERS, Database
from tests.idempotence.test_listener import message_of

KINDS = ("driver", "session", "connection")


def insert(session: Any, name: str) -> None:
    """Make the business change."""
    link_to(session).execute("INSERT INTO effects (name) VALUES (:name)", name=name)


def suppressed(close: Callable[[], object]) -> None:
    with suppress(Exception):  # some drivers refuse to close twice
        close()


@pytest.fixture
def opener(database: Callable[[str], Database]) -> Iterator[Callable[[str, str], Any]]:
    """``opener("mysql", "session")`` returns a new connection of that kind."""
    with ExitStack() as stack:

        def make(name: str, kind: str) -> Any:
            place = database(name)
            if kind == "driver":
                connection = place.connect()
                stack.callback(suppressed, connection.close)
                return connection
            if kind == "session":
                return stack.enter_context(Session(place.engine))
            return stack.enter_context(place.engine.connect())

        yield make


everywhere = pytest.mark.parametrize(("base", "kind"), [(base, kind) for base in DATABASES for kind in KINDS])


@many
@pytest.mark.parametrize("ends_well", [True, False])
@everywhere
def test_a_second_delivery_waits_for_the_first(
    opener: Callable[[str, str], Any],
    database: Callable[[str], Database],
    base: str,
    kind: str,
    name: str,
    ends_well: bool,
) -> None:
    session = opener(base, kind)
    firsts: list[bool] = []

    def deliver_again() -> None:
        place = database(base)
        with closing(place.connect()) as other, transactional(other, message_of(name), group="billing") as first:
            firsts.append(first)
            if first:
                insert(other, name)

    thread = threading.Thread(target=deliver_again)
    try:
        with transactional(session, message_of(name), group="billing") as first:
            assert first
            thread.start()
            insert(session, name)
            assert firsts == []  # the second delivery waits for the record
            if not ends_well:
                raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    thread.join()
    assert firsts == [not ends_well]
    assert database(base).effects(name) == 1


# --- SQLAlchemy's asynchronous sessions


@pytest.mark.parametrize(
    ("base", "driver"), [("postgresql", "psycopg"), ("postgresql", "asyncpg"), ("sqlite", "aiosqlite")]
)
async def test_asynchronous_drivers_are_used_through_sqlalchemy(
    database: Callable[[str], Database], base: str, driver: str, name: str
) -> None:
    async def connect() -> Any:
        port = database(base).engine.url.port
        if driver == "aiosqlite":
            return await aiosqlite.connect(":memory:")
        if driver == "asyncpg":
            return await asyncpg.connect(host="127.0.0.1", port=port, user="rmq", database="postgres")
        return await psycopg.AsyncConnection.connect(f"host=127.0.0.1 port={port} user=rmq dbname=postgres")

    connection = await connect()
    for begin in (
        transactional(connection, message_of(name), group="b").__enter__,
        lambda: Outbox().add(connection, Message("orders", b"x")),
    ):
        with pytest.raises(ConfigError, match=r"expected .*SQLAlchemy"):
            begin()
    with pytest.raises(ConfigError, match=r"expected .*SQLAlchemy"):
        await transactional(connection, message_of(name), group="b").__aenter__()
    await connection.close()


async def test_what_an_async_session_refuses(database: Callable[[str], Database], name: str) -> None:
    engine = create_async_engine(database("sqlite").engine.url.set(drivername="sqlite+aiosqlite"), poolclass=NullPool)
    async with AsyncSession(engine) as session:
        with pytest.raises(ConfigError, match="async with"), transactional(session, message_of(name), group="b"):
            pass
        await session.run_sync(insert, name)
        with pytest.raises(ConfigError, match="expected no open transaction"):
            await transactional(session, message_of(name), group="billing").__aenter__()
    await engine.dispose()


def test_synchronous_sessions_refuse_async_with(tmp_path: Path, name: str) -> None:
    async def deliver(connection: sqlite3.Connection) -> None:
        async with transactional(connection, message_of(name), group="billing"):
            pass

    with closing(sqlite3.connect(tmp_path / "x.db")) as connection, pytest.raises(ConfigError, match="needs `with`"):
        asyncio.run(deliver(connection))


def test_old_records_are_purged_by_later_blocks(database: Callable[[str], Database], name: str) -> None:
    """The table grows no further, though the application never purges it."""
    with closing(database("sqlite").connect()) as connection:
        upgrade_tables(connection, dedup=None, transactions=None, outbox=None, messages="short")
        for number in range(2000):
            message = message_of(f"{name}-{number}")
            with transactional(connection, message, group="billing", table="short", keep=0.001) as first:
                assert first
        assert connection.execute("SELECT COUNT(*) FROM short").fetchone()[0] < 1900


# --- conditions


@pytest.mark.parametrize("base", DATABASES)
def test_each_statement_by_itself_is_refused(database: Callable[[str], Database], base: str, name: str) -> None:
    place = database(base)
    connection = place.connect()
    if base == "sqlite":
        connection.isolation_level = None
    elif base == "postgresql":
        connection.autocommit = True
    else:
        connection.autocommit(True)
    engine = place.engine.execution_options(isolation_level="AUTOCOMMIT")
    with closing(connection), engine.connect() as connected, Session(engine) as session:
        for session_like in (connection, connected, session):
            with pytest.raises(ConfigError, match="without autocommit"):
                transactional(session_like, message_of(name), group="billing").__enter__()


def test_values_that_are_not_connections_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="expected a session or connection, found int"):
        transactional(7, message_of(name), group="billing").__enter__()
    with pytest.raises(ConfigError, match="group"):
        transactional(7, message_of(name), group="")
    for key in ("order", 7, lambda message: 7):
        with pytest.raises(ConfigError, match="key: expected"):
            transactional(7, message_of(name), group="billing", key=key)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="table"):
        transactional(7, message_of(name), group="billing", table="x y")
    with pytest.raises(ConfigError, match="keep"):
        transactional(7, message_of(name), group="billing", keep=0)


def test_without_a_key_each_delivery_is_a_first_one(database: Callable[[str], Database], name: str) -> None:
    with closing(database("sqlite").connect()) as connection:
        for _ in range(2):
            with transactional(connection, message_of(name), group="billing", key=lambda message: None) as first:
                assert first


@everywhere
def test_other_errors_go_through(opener: Callable[[str, str], Any], base: str, kind: str, name: str) -> None:
    session = opener(base, kind)
    with pytest.raises(Exception, match=r"(?i)no such table|does not exist|doesn't exist") as raised:
        transactional(session, message_of(name), group="billing", table="nowhere").__enter__()
    assert isinstance(raised.value, SQLAlchemyError) == (kind != "driver")
    with transactional(session, message_of(name), group="billing") as first:  # the session can still be used
        assert first


@pytest.mark.parametrize("base", DATABASES)
def test_records_are_purged_when_they_expire(database: Callable[[str], Database], base: str, name: str) -> None:
    place, clock = database(base), ManualClock(1000)
    with closing(place.connect()) as connection:
        with transactional(connection, message_of(name), group="billing", keep=60, clock=clock) as first:
            assert first
        assert purge_messages(connection, 60_999) == 0
        with transactional(connection, message_of(name), group="billing", keep=60, clock=clock) as first:
            assert not first
        assert purge_messages(place.engine, 61_000) == 1
        with transactional(connection, message_of(name), group="billing", keep=60, clock=clock) as first:
            assert first


def test_the_table_can_be_chosen(tmp_path: Path, name: str) -> None:
    engine = sqlalchemy.create_engine(f"sqlite:///{tmp_path / 'x.db'}")
    assert upgrade_tables(engine, dedup=None, transactions=None, outbox=None, messages="seen") == {"seen": 1}
    for expected in (True, False):
        with (
            Session(engine) as session,
            transactional(session, message_of(name), group="billing", table="seen") as first,
        ):
            assert first is expected
    assert purge_messages(engine, 1 << 60, table="seen") == 1
    with Session(engine) as session, transactional(session, message_of(name), group="billing", table="seen") as first:
        assert first
    engine.dispose()


def test_groups_and_applications_with_one_table_are_kept_apart(database: Callable[[str], Database], name: str) -> None:
    with closing(database("sqlite").connect()) as connection:
        with transactional(connection, message_of(name), group="shipping") as first:
            assert first
        for application, expected in (("shop", True), ("shop", False), ("", True), ("store", True)):
            message = message_of(name)
            with transactional(connection, message, group="billing", application=application) as first:
                assert first is expected


# --- a transaction that ends inside the block


by_driver = pytest.mark.parametrize(
    ("base", "driver", "kind"), [(base, driver, kind) for base, driver in DRIVERS for kind in KINDS]
)


@pytest.fixture
def session(database: Callable[[str], Database], base: str, driver: str, kind: str) -> Iterator[Any]:
    """Return a new connection of that kind and driver."""
    with database(base).session(driver, kind) as session:
        yield session


def fail(session: Any, statement: str, name: str) -> None:
    """Run a statement that fails, and swallow its error."""
    with pytest.raises(Exception, match=r"."):
        link_to(session).execute(statement, name=name)


@pytest.mark.parametrize("base", ["mysql"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_deadlock_after_which_the_block_goes_on(
    database: Callable[[str], Database], base: str, kind: str, name: str
) -> None:
    """MySQL and MariaDB end the whole transaction, and a second delivery takes the record in between."""
    place = database(base)
    for number in range(8):
        place.run("INSERT INTO accounts (id, balance) VALUES (:id, 1)", id=f"{name}-{number}")
    update = "UPDATE accounts SET balance = balance + 1 WHERE id = :id"

    def deliver(session: Any, rival: Any) -> None:
        with transactional(session, message_of(name), group="billing"):
            insert(session, name)
            link_to(session).execute(update, id=f"{name}-0")
            link = link_to(rival)
            for number in range(1, 8):  # the database ends the smaller of two transactions
                link.execute(update, id=f"{name}-{number}")
            thread = threading.Thread(target=lambda: link.execute(update, id=f"{name}-0"))
            thread.start()
            with pytest.raises(Exception, match="Deadlock"):
                link_to(session).execute(update, id=f"{name}-1")
            thread.join()
            rival.rollback()
            with closing(place.connect()) as other, transactional(other, message_of(name), group="billing") as first:
                assert first
                insert(other, name)
            insert(session, name)

    with place.session("pymysql", kind) as session, closing(place.connect()) as rival:
        with pytest.raises(ConfigError, match="the transaction has ended inside the block"):
            deliver(session, rival)
        assert place.effects(name) == 1
        with transactional(session, message_of(name), group="billing") as first:
            assert not first


# --- what must not have begun


@by_driver
def test_an_open_transaction_is_refused(
    session: Any, database: Callable[[str], Database], base: str, name: str
) -> None:
    """Else a duplicate would roll the caller's earlier work back."""
    insert(session, name)
    with (
        pytest.raises(ConfigError, match="expected no open transaction"),
        transactional(session, message_of(name), group="billing"),
    ):
        raise AssertionError("begun")
    session.commit()
    assert database(base).effects(name) == 1


@pytest.mark.parametrize("base", ["postgresql"])
@pytest.mark.parametrize("driver", ["psycopg", "psycopg2"])
def test_an_aborted_transaction_is_refused(
    database: Callable[[str], Database], base: str, driver: str, name: str
) -> None:
    with database(base).session(driver, "driver") as session:
        fail(session, "SELECT :name FROM nowhere", name)
        with (
            pytest.raises(ConfigError, match="found one that an error has ended: roll back first"),
            transactional(session, message_of(name), group="billing"),
        ):
            raise AssertionError("begun")


# --- other constraints than the record's


@by_driver
@pytest.mark.parametrize("column", ["tenant VARCHAR(9) NOT NULL", "tenant VARCHAR(9) DEFAULT 'none' UNIQUE"])
def test_another_constraint_is_no_duplicate(
    session: Any, database: Callable[[str], Database], column: str, base: str, name: str
) -> None:
    """An application has added a column; a new message is not taken for one that was consumed before."""
    table, place = name.replace("-", "_"), database(base)
    place.run(f"CREATE TABLE {table} (dedup_key VARCHAR(255) PRIMARY KEY, expires_timestamp_ms BIGINT, {column})")
    insert_record = f"INSERT INTO {table} (dedup_key, expires_timestamp_ms, tenant) VALUES (:key, 1, 'none')"
    place.run(insert_record, key=f":orders:billing::{name}")
    if "UNIQUE" in column:  # elsewhere the database looks at a value that is missing before the key
        with transactional(session, message_of(name), group="billing", table=table) as first:
            assert not first
    with (
        pytest.raises(Exception, match="tenant"),
        transactional(session, message_of(name + "b"), group="billing", table=table),
    ):
        raise AssertionError("begun")
    with transactional(session, message_of(name), group="billing") as first:  # the session can still be used
        assert first


# --- a file that readers keep busy


@pytest.fixture
def busy(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Any, sqlite3.Connection]]:
    """Return a session of each kind on a file without a write-ahead log, where a reader keeps a commit out."""
    url = f"sqlite:///{tmp_path / 'x.db'}"
    engine = sqlalchemy.create_engine(url, connect_args={"timeout": 0})
    upgrade_tables(engine)
    kind = request.param
    with ExitStack() as stack:
        reader = stack.enter_context(closing(sqlite3.connect(tmp_path / "x.db", timeout=0)))
        reader.execute("CREATE TABLE effects (name)")
        if kind == "driver":
            yield stack.enter_context(closing(sqlite3.connect(tmp_path / "x.db", timeout=0))), reader
        else:
            yield stack.enter_context(Session(engine) if kind == "session" else engine.connect()), reader
    engine.dispose()


@pytest.mark.parametrize("busy", KINDS, indirect=True)
def test_a_commit_that_a_reader_keeps_out(busy: tuple[Any, sqlite3.Connection], name: str) -> None:
    """The transaction is undone, so the next delivery can begin, and other writers are not locked out."""
    session, reader = busy

    def deliver() -> None:
        with transactional(session, message_of(name), group="billing") as first:
            assert first
            insert(session, name)

    reader.execute("BEGIN")
    reader.execute("SELECT * FROM effects").fetchall()
    for _ in range(2):
        with pytest.raises(Exception, match="database is locked"):
            deliver()
    reader.execute("INSERT INTO effects VALUES ('of another')")
    reader.commit()
    deliver()
    assert reader.execute("SELECT name FROM effects").fetchall() == [("of another",), (name,)]


@pytest.mark.parametrize("busy", KINDS, indirect=True)
def test_a_statement_that_a_writer_keeps_out(busy: tuple[Any, sqlite3.Connection], name: str) -> None:
    """Nothing stays open after the purge, nor after the beginning, that found the file locked."""
    session, writer = busy
    writer.execute("BEGIN IMMEDIATE")
    for _ in range(2):
        with pytest.raises(Exception, match="database is locked"):
            purge_messages(session, 0)
    with pytest.raises(Exception, match="database is locked"):
        transactional(session, message_of(name), group="billing").__enter__()
    writer.rollback()
    with transactional(session, message_of(name), group="billing") as first:
        assert first


@pytest.mark.parametrize("level", ["DEFERRED", "IMMEDIATE", "EXCLUSIVE"])
def test_the_transactions_of_sqlite(tmp_path: Path, level: Any, name: str) -> None:
    """A connection's own kind of transaction is kept, and nothing of it stays open."""
    with (
        closing(sqlite3.connect(tmp_path / "x.db", isolation_level=level)) as connection,
        closing(sqlite3.connect(tmp_path / "x.db", timeout=0)) as reader,
    ):
        upgrade_tables(connection)
        for expected in (True, False):
            with transactional(connection, message_of(name), group="billing") as first:
                assert first is expected
                if level == "EXCLUSIVE":
                    with pytest.raises(sqlite3.OperationalError, match="locked"):
                        reader.execute("SELECT * FROM rmq_messages")
                else:
                    assert len(reader.execute("SELECT * FROM rmq_messages").fetchall()) == int(not first)
            assert not connection.in_transaction


@pytest.mark.parametrize("kind", ["session", "connection"])
def test_transactions_that_an_event_of_sqlalchemy_begins(tmp_path: Path, kind: str, name: str) -> None:
    """By itself the driver would commit each statement: SQLAlchemy's documentation has this recipe for SQLite."""
    engine = sqlalchemy.create_engine(f"sqlite:///{tmp_path / 'x.db'}")
    upgrade_tables(engine)

    @sqlalchemy.event.listens_for(engine, "connect")
    def connect(connection: Any, _: object) -> None:
        connection.isolation_level = None

    @sqlalchemy.event.listens_for(engine, "begin")
    def begin(connection: Any) -> None:
        connection.exec_driver_sql("BEGIN")

    engine.dispose()
    for expected in (True, False):
        with (
            Session(engine) if kind == "session" else engine.connect() as session,
            transactional(session, message_of(name), group="billing") as first,
        ):
            assert first is expected
            Outbox().add(session, Message("orders", b"x"))
    with engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT COUNT(*) FROM rmq_outbox").scalar_one() == 2
    engine.dispose()
