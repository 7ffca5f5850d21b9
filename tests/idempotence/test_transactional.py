"""The record and the business change in one transaction of the caller's."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

from librmq.clock import ManualClock
from librmq.errors import ConfigError
from librmq.idempotence.connections import Link
from librmq.idempotence.sqltables import upgrade_tables
from librmq.idempotence.transactional_tables import purge_messages, transactional
from tests.budget import many
from tests.idempotence.conftest import DATABASES, Database
from tests.idempotence.test_listener import Delivery

KINDS = ("driver", "session", "connection")


def message_of(name: str) -> Delivery:
    return Delivery("orders", b"x", unique_key=name)


def insert(session: Any, name: str) -> None:
    """Make the business change."""
    Link(session).execute("INSERT INTO effects (name) VALUES (:name)", name=name)


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


@everywhere
def test_the_effect_happens_once(
    opener: Callable[[str, str], Any], database: Callable[[str], Database], base: str, kind: str, name: str
) -> None:
    session = opener(base, kind)
    firsts = []
    for _ in range(3):
        with transactional(session, message_of(name), group="billing") as first:
            firsts.append(first)
            if first:
                insert(session, name)
    assert firsts == [True, False, False]
    assert database(base).effects(name) == 1
    with transactional(session, message_of(name), group="shipping") as first:
        assert first


@everywhere
def test_a_failure_undoes_both(
    opener: Callable[[str, str], Any], database: Callable[[str], Database], base: str, kind: str, name: str
) -> None:
    session = opener(base, kind)
    firsts = []

    def deliver() -> None:
        with transactional(session, message_of(name), group="billing") as first:
            firsts.append(first)
            insert(session, name)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        deliver()
    assert firsts == [True]
    assert database(base).effects(name) == 0
    with transactional(session, message_of(name), group="billing") as first:
        assert first
        insert(session, name)
    assert database(base).effects(name) == 1


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


ASYNC = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+psycopg_async"}


@pytest.mark.parametrize("base", ASYNC)
def test_with_an_async_session(database: Callable[[str], Database], base: str, name: str) -> None:
    place = database(base)

    async def run(work: Callable[[AsyncSession], Awaitable[None]]) -> None:
        engine = create_async_engine(place.engine.url.set(drivername=ASYNC[base]), poolclass=NullPool)
        async with AsyncSession(engine) as session:
            await work(session)
        await engine.dispose()

    async def fail(session: AsyncSession) -> None:
        async with transactional(session, message_of(name + "x"), group="billing"):
            await session.run_sync(insert, name + "x")
            raise ZeroDivisionError

    async def deliver(session: AsyncSession) -> None:
        firsts = []
        for _ in range(2):
            async with transactional(session, message_of(name), group="billing") as first:
                firsts.append(first)
                if first:
                    await session.run_sync(insert, name)
        assert firsts == [True, False]
        with pytest.raises(ZeroDivisionError):
            await fail(session)
        with pytest.raises(ConfigError, match="async with"), transactional(session, message_of(name), group="b"):
            pass

    asyncio.run(run(deliver))
    assert place.effects(name) == 1
    assert place.effects(name + "x") == 0


def test_synchronous_sessions_refuse_async_with(tmp_path: Path, name: str) -> None:
    async def deliver(connection: sqlite3.Connection) -> None:
        async with transactional(connection, message_of(name), group="billing"):
            pass

    with (
        closing(sqlite3.connect(tmp_path / "x.db")) as connection,
        pytest.raises(ConfigError, match="needs `with`"),
    ):
        asyncio.run(deliver(connection))


# --- conditions


@everywhere
def test_nothing_may_have_begun(opener: Callable[[str, str], Any], base: str, kind: str, name: str) -> None:
    if kind == "driver" and base != "sqlite":
        return  # these drivers do not report an open transaction
    session = opener(base, kind)
    insert(session, name)
    with (
        pytest.raises(ConfigError, match="expected no open transaction"),
        transactional(session, message_of(name), group="billing"),
    ):
        pass
    session.rollback()


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
        for each in (connection, connected, session):
            with pytest.raises(ConfigError, match="without autocommit"):
                transactional(each, message_of(name), group="billing").__enter__()


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


@everywhere
def test_without_a_key_each_delivery_is_a_first_one(
    opener: Callable[[str, str], Any], database: Callable[[str], Database], base: str, kind: str, name: str
) -> None:
    session = opener(base, kind)
    for _ in range(2):
        with transactional(session, message_of(name), group="billing", key=lambda message: None) as first:
            assert first
            insert(session, name)
    assert database(base).effects(name) == 2


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


def test_applications_with_one_table_are_kept_apart(database: Callable[[str], Database], name: str) -> None:
    with closing(database("sqlite").connect()) as connection:
        for application, expected in (("shop", True), ("shop", False), ("", True), ("store", True)):
            message = message_of(name)
            with transactional(connection, message, group="billing", application=application) as first:
                assert first is expected
