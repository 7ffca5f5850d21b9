"""What librmq asks of other people's sessions before a block, and what it leaves to them."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, nullcontext, suppress
from pathlib import Path
from typing import Any

import duckdb
import pytest
import sqlalchemy
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.pool import QueuePool, StaticPool

from librmq import Message, Outbox
from librmq.errors import ConfigError
from librmq.idempotence import transactional, upgrade_tables
from tests.conftest import in_ci
from tests.idempotence.conftest import DATABASES, Database
from tests.idempotence.servers import Absent, Server, pgbouncer
from tests.idempotence.sessions import JOINED, SESSIONS, django_connection
from tests.idempotence.test_listener import message_of

# --- a pooler reports the transaction's end too


def test_a_rollback_behind_a_pooler_of_postgresql(
    server: Callable[[str], Server], database: Callable[[str], Database], name: str
) -> None:
    psycopg = importlib.import_module("psycopg")
    place = database("postgresql")
    with ExitStack() as stack:
        try:
            pooler = stack.enter_context(pgbouncer(server("postgresql")))
        except Absent as error:
            if in_ci():
                raise
            pytest.skip(str(error))
        address = f"host=127.0.0.1 port={pooler.port} user=rmq dbname=postgres application_name=shop"
        first, second = (
            stack.enter_context(closing(psycopg.connect(address, prepare_threshold=None))) for _ in range(2)
        )

        def deliver(connection: Any, *, rolls_back: bool) -> bool:
            with transactional(connection, message_of(name), group="billing") as is_first:
                if is_first:
                    connection.execute(f"INSERT INTO effects (name) VALUES ('{name}')")
                    if rolls_back:
                        connection.rollback()
                        connection.execute(f"INSERT INTO effects (name) VALUES ('{name}')")
            return bool(is_first)

        with pytest.raises(ConfigError, match="ended inside the block"):
            deliver(first, rolls_back=True)
        assert place.effects(name) == 0
        assert [deliver(connection, rolls_back=False) for connection in (second, first, second)] == [True, False, False]
        assert place.effects(name) == 1
        for connection in (first, second):
            assert connection.execute("SHOW application_name").fetchone() == ("shop",)
            connection.rollback()


@pytest.mark.parametrize("session", ["postgresql-psycopg", "postgresql-psycopg2", "postgresql-pg8000"])
def test_an_application_keeps_its_name(database: Callable[[str], Database], session: str, name: str) -> None:
    """Its name stays at the front of the one that the server's list shows during the block, and comes back."""
    place = database("postgresql")
    with SESSIONS[session](place) as opened:
        opened.run("SET application_name = 'shop'")
        opened.commit()
        with transactional(opened.session, message_of(name), group="billing"):
            ((shown,),) = opened.run("SHOW application_name").fetchall()
            assert shown.startswith("shop ")
        assert [tuple(row) for row in opened.run("SHOW application_name").fetchall()] == [("shop",)]


@pytest.mark.parametrize("driver", ["psycopg2"])
@pytest.mark.parametrize("base", ["postgresql"])
def test_a_driver_that_remembers_a_transaction_which_sql_has_ended(
    database: Callable[[str], Database], base: str, driver: str, name: str
) -> None:
    """It would begin none for the block, and each statement would be committed by itself."""
    place = database(base)
    with closing(place.connect_by(driver)) as connection:
        cursor = connection.cursor()
        cursor.execute("SELECT 1")
        cursor.execute("ROLLBACK")
        for fails in (True, False):
            with suppress(ZeroDivisionError), transactional(connection, message_of(name), group="billing") as first:
                assert first
                cursor.execute("INSERT INTO effects (name) VALUES (%s)", [name])
                if fails:
                    raise ZeroDivisionError
            assert place.effects(name) == int(not fails)


# --- what is refused before the block


@pytest.mark.parametrize("base", ["postgresql"])
def test_a_pipeline_is_refused(database: Callable[[str], Database], base: str, name: str) -> None:
    with closing(database(base).connect()) as connection:
        for joins in (False, True):
            with (
                connection.transaction() if joins else nullcontext(),
                connection.pipeline(),
                pytest.raises(ConfigError, match="pipeline mode"),
                transactional(connection, message_of(name), group="billing", join=joins),
            ):
                raise AssertionError("begun")
        with transactional(connection, message_of(name), group="billing") as first:
            assert first


@pytest.mark.parametrize("session", ["sqlite-session", "postgresql-psycopg-transaction", "mysql-pymysql"])
def test_a_connection_in_a_block_of_another_thread_is_refused(
    database: Callable[[str], Database], session: str, name: str
) -> None:
    refused: list[Exception] = []

    def intrude(connection: Any, joins: bool) -> None:
        try:
            transactional(connection, message_of(name + "b"), group="billing", join=joins).__enter__()
        except Exception as error:
            refused.append(error)

    with SESSIONS[session](database(session.partition("-")[0])) as opened:
        joins = opened.around is not None
        for _ in range(2):
            with (
                opened.around() if opened.around is not None else nullcontext(),
                transactional(opened.session, message_of(name), group="billing", join=joins),
            ):
                thread = threading.Thread(target=intrude, args=(opened.session, joins))
                thread.start()
                thread.join()
        assert [type(error) for error in refused] == [ConfigError] * 2
        assert "is in a block of MainThread" in str(refused[0])


def test_sessions_of_one_connection_in_two_threads(name: str) -> None:
    """Each would commit half of the other's block; a database in memory has one connection for all sessions."""
    engine = sqlalchemy.create_engine("sqlite://", poolclass=StaticPool, connect_args={"check_same_thread": False})
    upgrade_tables(engine)
    refused: list[str] = []

    def intrude() -> None:
        session = Session(engine)
        try:
            transactional(session, message_of(name + "b"), group="billing").__enter__()
        except ConfigError as error:
            refused.append(str(error))

    with Session(engine) as session, transactional(session, message_of(name), group="billing") as first:
        assert first
        thread = threading.Thread(target=intrude)
        thread.start()
        thread.join()
    assert len(refused) == 1
    assert "is in a block of MainThread" in refused[0]
    with Session(engine) as session, transactional(session, message_of(name + "b"), group="billing") as first:
        assert first
    engine.dispose()


def test_a_connection_goes_from_one_block_to_another_by_the_pool(tmp_path: Path, name: str) -> None:
    """It is in the pool again before the block of a session has ended."""
    engine = sqlalchemy.create_engine(f"sqlite:///{tmp_path}/shop.db", poolclass=QueuePool, pool_size=1, max_overflow=0)
    upgrade_tables(engine)

    def deliver(key: str) -> bool:
        with Session(engine) as session, transactional(session, message_of(key), group="billing") as first:
            return bool(first)

    with ThreadPoolExecutor(1) as pool, Session(engine) as session:
        others: list[bool] = []
        sqlalchemy.event.listen(
            session,
            "after_transaction_end",
            lambda *_: others.append(pool.submit(deliver, name + "b").result()),
            once=True,
        )
        with transactional(session, message_of(name), group="billing") as first:
            assert first
        assert others == [True]
    engine.dispose()


@pytest.mark.parametrize("base", DATABASES)
def test_a_session_within_a_transaction_of_its_connection_is_refused(
    database: Callable[[str], Database], base: str, name: str
) -> None:
    """Its commit would commit nothing, and the message would be acknowledged."""
    with database(base).engine.connect() as connection, connection.begin():
        with (
            Session(bind=connection) as session,
            pytest.raises(ConfigError, match="expected no open transaction"),
            transactional(session, message_of(name), group="billing"),
        ):
            raise AssertionError("begun")
        with (
            Session(bind=connection) as session,
            transactional(session, message_of(name), group="billing", join=True) as first,
        ):
            assert first


class Pending:
    """A result that has to be awaited."""

    def __await__(self) -> Any:
        yield


class Unknown:
    """A connection of an asynchronous driver that librmq does not know."""

    autocommit = False

    def __init__(self, *, awaits_cursor: bool = False) -> None:
        self._awaits_cursor = awaits_cursor

    def cursor(self) -> Any:
        return Pending() if self._awaits_cursor else self

    def execute(self, *_: object) -> Any:
        return Pending()

    def commit(self) -> None: ...

    def rollback(self) -> None: ...


@pytest.mark.parametrize("awaits_cursor", [False, True])
def test_an_unknown_asynchronous_driver_is_refused(awaits_cursor: bool) -> None:
    with pytest.raises(ConfigError, match="is asynchronous: expected an AsyncConnection"):
        Outbox().add(Unknown(awaits_cursor=awaits_cursor), Message("orders", b"x"))


@pytest.mark.parametrize("driver", ["asyncmy", "aiomysql"])
@pytest.mark.parametrize("base", ["mysql"])
async def test_asynchronous_drivers_of_mysql_are_refused(
    database: Callable[[str], Database], base: str, driver: str
) -> None:
    url = database(base).engine.url
    connection = await pytest.importorskip(driver).connect(host="127.0.0.1", port=url.port, user="root", db="rmq")
    for use in (lambda: Outbox().add(connection, Message("orders", b"x")), lambda: upgrade_tables(connection)):
        with pytest.raises(ConfigError, match="is asynchronous: expected an AsyncConnection"):
            use()
    connection.close()


def test_a_database_that_is_not_known_gets_no_tables() -> None:
    """The refusal names drivers that are taken, and none that is refused too."""
    with closing(duckdb.connect()) as connection:
        with pytest.raises(ConfigError, match=r"does not know how .*duckdb shows its dialect of SQL") as raised:
            upgrade_tables(connection)
        assert "psycopg2" in str(raised.value)
        assert "asyncpg" not in str(raised.value)
        assert connection.execute("SHOW TABLES").fetchall() == []


# --- a transaction of the caller's


@pytest.mark.parametrize("session", JOINED)
def test_the_caller_ends_the_transaction_that_a_block_joins(
    database: Callable[[str], Database], session: str, name: str
) -> None:
    place = database(session.partition("-")[0])

    def consume(opened: Any, *, fails: bool = False) -> bool:
        with transactional(opened.session, message_of(name), group="billing", join=True) as first:
            if first:
                opened.run(f"INSERT INTO effects (name) VALUES ('{name}')")
            if fails:
                raise ZeroDivisionError
        return first

    with SESSIONS[session](place) as opened:
        with suppress(ZeroDivisionError), opened.around():
            assert consume(opened)
            raise ZeroDivisionError
        assert place.effects(name) == 0
    with SESSIONS[session](place) as opened, opened.around():
        opened.run(f"INSERT INTO effects (name) VALUES ('{name}-before')")
        with suppress(ZeroDivisionError):
            consume(opened, fails=True)
        assert [consume(opened) for _ in range(2)] == [True, False]
    assert (place.effects(name), place.effects(f"{name}-before")) == (1, 1)
    with SESSIONS[session](place) as opened, suppress(ZeroDivisionError), opened.around():
        opened.run(f"INSERT INTO effects (name) VALUES ('{name}-undone')")
        assert not consume(opened)
        raise ZeroDivisionError
    assert place.effects(f"{name}-undone") == 0


@pytest.mark.parametrize("session", JOINED)
def test_blocks_within_a_block(database: Callable[[str], Database], session: str, name: str) -> None:
    place = database(session.partition("-")[0])
    with SESSIONS[session](place) as opened, opened.around():
        for expected in (True, False):
            with (
                transactional(opened.session, message_of(name), group="billing", join=True) as outer,
                transactional(opened.session, message_of(name + "b"), group="billing", join=True) as inner,
            ):
                assert (outer, inner) == (expected, expected)


@pytest.mark.parametrize(
    "session", ["sqlite-sqlite3", "sqlite-django", "postgresql-psycopg", "postgresql-psycopg-session", "mysql-pymysql"]
)
def test_joining_needs_an_open_transaction(database: Callable[[str], Database], session: str, name: str) -> None:
    with (
        SESSIONS[session](database(session.partition("-")[0])) as opened,
        pytest.raises(ConfigError, match=r"join: expected .* found none"),
        transactional(opened.session, message_of(name), group="billing", join=True),
    ):
        raise AssertionError("begun")


def test_a_session_of_sqlite_joins_before_its_driver_has_begun(database: Callable[[str], Database], name: str) -> None:
    """Else the driver would begin its transaction with the savepoint, and commit it with that."""
    place = database("sqlite")
    with suppress(ZeroDivisionError), sessionmaker(place.engine).begin() as session:
        with transactional(session, message_of(name), group="billing", join=True):
            session.execute(sqlalchemy.text(f"INSERT INTO effects (name) VALUES ('{name}')"))
        raise ZeroDivisionError
    assert place.effects(name) == 0


# --- Django


def end_connection(place: Database, connection: Any) -> None:
    """End an idle connection of an application, as a restart of the server or an idle night does."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()" if place.name == "postgresql" else "SELECT CONNECTION_ID()")
        number = int(cursor.fetchone()[0])
    place.run(f"SELECT pg_terminate_backend({number})" if place.name == "postgresql" else f"KILL {number}")


@pytest.mark.parametrize("base", ["postgresql", "mysql"])
@pytest.mark.parametrize("reads_before", [False, True])
def test_a_consumer_with_django_survives_the_end_of_its_connection(
    database: Callable[[str], Database], base: str, reads_before: bool, name: str
) -> None:
    """Only Django's requests close a connection that has failed; a thread of a consumer would have it for ever."""
    place = database(base)
    with django_connection(place, CONN_MAX_AGE=None) as connection:
        from librmq.integrations.django import fresh_connections

        def consume(number: int) -> None:
            then = fresh_connections(None)
            if reads_before:
                with connection.cursor() as cursor:
                    cursor.execute("SELECT 1")
            with transactional(connection, message_of(f"{name}-{number}"), group="billing") as first:
                if first:
                    with connection.cursor() as cursor:
                        cursor.execute("INSERT INTO effects (name) VALUES (%s)", [name])
            then(None, None)

        consume(0)
        end_connection(place, connection)
        failures = 0
        for number in range(1, 4):
            try:
                consume(number)
            except Exception:
                failures += 1
                consume(number)
        assert failures <= 1
        assert place.effects(name) == 4
