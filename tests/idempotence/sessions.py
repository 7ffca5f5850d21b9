"""Sessions of other people's libraries, as `transactional` takes them: a new one is a line in `SESSIONS`.

Those of a driver or library that is not installed are left out.
"""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import sqlalchemy
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker
from sqlalchemy.pool import NullPool

from librmq.idempotence import transactional
from tests.django_project import configure
from tests.idempotence.conftest import Database


@dataclass
class Opened:
    """A session, and what an application does with it."""

    session: Any
    run: Callable[[str], Any]
    """Run a statement by the library's own call."""
    rollback: Callable[[], object]
    commit: Callable[[], object]
    driver: Callable[[], Any]
    """Return the connection of the driver, or what SQLAlchemy makes of an asynchronous one."""
    around: Callable[[], AbstractContextManager[Any]] | None = None
    """Begin a transaction of the caller's, in which the block joins."""

    def deliver(self, message: Any, work: Callable[[Opened], object]) -> bool:
        """Consume a message in a transaction; return whether it was the first time."""
        joins = self.around is not None
        with (
            nullcontext() if self.around is None else self.around(),
            transactional(self.session, message, group="billing", join=joins) as first,
        ):
            if first:
                work(self)
        return first


Open = Callable[[Database], AbstractContextManager[Any]]


def _of_driver(name: str, *, joins: bool = False) -> Open:
    """Return what opens a connection of a DB-API driver."""

    @contextmanager
    def open_connection(place: Database) -> Iterator[Opened]:
        connection = place.connect_by(name)

        def run(sql: str) -> Any:
            cursor = connection.cursor()
            cursor.execute(sql)
            return cursor

        @contextmanager
        def transaction() -> Iterator[None]:
            run("SELECT 1" if place.name == "postgresql" else "BEGIN")
            try:
                yield
            except BaseException:
                connection.rollback()
                raise
            connection.commit()

        try:
            yield Opened(
                connection,
                run,
                connection.rollback,
                connection.commit,
                lambda: connection,
                transaction if joins else None,
            )
        finally:
            with suppress(Exception):  # some drivers refuse to close twice
                connection.close()

    return open_connection


@contextmanager
def _psycopg_transaction(place: Database) -> Iterator[Opened]:
    with closing(place.connect_by("psycopg")) as connection:
        connection.autocommit = True
        yield Opened(
            connection,
            connection.execute,
            connection.rollback,
            connection.commit,
            lambda: connection,
            connection.transaction,
        )


def _alchemy(session: Any, around: Callable[[], AbstractContextManager[Any]] | None = None) -> Opened:
    """Return what an application does with a session or connection of SQLAlchemy."""

    def driver() -> Any:
        core = session if isinstance(session, sqlalchemy.Connection) else session.connection()
        return core.connection.dbapi_connection

    return Opened(
        session, lambda sql: session.execute(sqlalchemy.text(sql)), session.rollback, session.commit, driver, around
    )


def _of_alchemy(driver: str, kind: str) -> Open:
    """Return what opens a session of SQLAlchemy of some kind, by a driver."""

    @contextmanager
    def open_session(place: Database) -> Iterator[Opened]:
        engine = place.engine_of(driver)
        with ExitStack() as stack:
            if kind == "session":
                yield _alchemy(stack.enter_context(Session(engine)))
            elif kind == "connection":
                yield _alchemy(stack.enter_context(engine.connect()))
            elif kind == "scoped":
                registry = scoped_session(sessionmaker(engine))
                stack.callback(registry.remove)
                yield _alchemy(registry)
            elif kind == "sqlmodel":
                yield _alchemy(stack.enter_context(importlib.import_module("sqlmodel").Session(engine)))
            elif kind == "joined":
                session = stack.enter_context(Session(engine))
                yield _alchemy(session, session.begin)
            else:
                isolated = engine.connect().execution_options(isolation_level="SERIALIZABLE")
                connection = stack.enter_context(isolated)
                yield _alchemy(connection, connection.begin)

    return open_session


@contextmanager
def _flask(place: Database) -> Iterator[Opened]:
    flask, extension = importlib.import_module("flask"), importlib.import_module("flask_sqlalchemy")
    app = flask.Flask("shop")
    url = place.engine.url.render_as_string(hide_password=False)
    app.config |= {"SQLALCHEMY_DATABASE_URI": url, "SQLALCHEMY_ENGINE_OPTIONS": {"poolclass": NullPool}}
    db = extension.SQLAlchemy(app)
    with app.app_context():
        yield _alchemy(db.session)


def _of_async_alchemy(driver: str, kind: str) -> Open:
    """Return what opens an asynchronous session of SQLAlchemy, whose block runs in an event loop of its own."""

    class AsyncOpened:
        def __init__(self, place: Database) -> None:
            self.place = place

        def deliver(self, message: Any, work: Callable[[Opened], object]) -> bool:
            return asyncio.run(self._deliver(message, work))

        async def _deliver(self, message: Any, work: Callable[[Opened], object]) -> bool:
            url = self.place.engine.url.set(drivername=f"{self.place.name}+{driver}")
            if self.place.name == "mysql":
                url = url.set(query={})
            engine = create_async_engine(url, poolclass=NullPool)
            session: Any
            if kind == "connection":
                session = engine.connect()
            elif kind == "scoped":
                session = async_scoped_session(async_sessionmaker(engine), asyncio.current_task)
            else:
                session = AsyncSession(engine)
            used = session() if kind == "scoped" else session
            async with used, transactional(session, message, group="billing") as first:
                if first:
                    await used.run_sync(lambda inner: work(_alchemy(inner)))
            await engine.dispose()
            return first

    return lambda place: nullcontext(AsyncOpened(place))


ALIAS: Final = "librmq_matrix"


def django_settings(place: Database, **more: Any) -> dict[str, Any]:
    url = place.engine.url
    if place.name == "sqlite":
        return {"ENGINE": "django.db.backends.sqlite3", "NAME": url.database, **more}
    engine = f"django.db.backends.{place.name}"
    if place.name == "mysql" and find_spec("MySQLdb") is None:
        pymysql: Any = importlib.import_module("pymysql")
        pymysql.version_info = (2, 2, 7, "final", 0)  # what Django asks of mysqlclient
        sys.modules.setdefault("MySQLdb", pymysql)
    own = {"HOST": "127.0.0.1", "PORT": str(url.port), "USER": url.username, "NAME": url.database}
    return {"ENGINE": engine, **own, **more}


@contextmanager
def django_connection(place: Database, alias: str = ALIAS, **more: Any) -> Iterator[Any]:
    """Give a database to Django under an alias, and yield its connection."""
    from django.db import connections

    configure(Path(place.folder))
    connections.settings[alias] = connections.configure_settings({"default": django_settings(place, **more)})["default"]
    connection = connections[alias]
    try:
        yield connection
    finally:
        connection.close()
        del connections[alias]
        del connections.settings[alias]


def _of_django(*, joins: bool = False, **settings: Any) -> Open:
    @contextmanager
    def open_connection(place: Database) -> Iterator[Opened]:
        from django.db.transaction import atomic

        with django_connection(place, **settings) as connection:

            def run(sql: str) -> Any:
                cursor = connection.cursor()
                cursor.execute(sql)
                return cursor

            around = partial(atomic, ALIAS) if joins else None
            yield Opened(connection, run, connection.rollback, connection.commit, lambda: connection.connection, around)

    return open_connection


@contextmanager
def _peewee(place: Database) -> Iterator[Opened]:
    peewee = importlib.import_module("peewee")
    url = place.engine.url
    if place.name == "sqlite":
        db = peewee.SqliteDatabase(url.database)
    else:
        kind = peewee.PostgresqlDatabase if place.name == "postgresql" else peewee.MySQLDatabase
        db = kind(url.database, host="127.0.0.1", port=url.port, user=url.username)
    with closing(db):
        db.connect()
        yield Opened(db.connection(), db.execute_sql, db.rollback, db.commit, db.connection, db.atomic)


_ALL: Final[dict[str, tuple[str, Open]]] = {
    "sqlite-sqlite3": ("", _of_driver("sqlite3")),
    "sqlite-sqlite3-joined": ("", _of_driver("sqlite3", joins=True)),
    "sqlite-session": ("", _of_alchemy("sqlite3", "session")),
    "sqlite-connection": ("", _of_alchemy("sqlite3", "connection")),
    "sqlite-scoped": ("", _of_alchemy("sqlite3", "scoped")),
    "sqlite-joined": ("", _of_alchemy("sqlite3", "joined")),
    "sqlite-sqlmodel": ("sqlmodel", _of_alchemy("sqlite3", "sqlmodel")),
    "sqlite-flask": ("flask_sqlalchemy", _flask),
    "sqlite-aiosqlite-session": ("aiosqlite", _of_async_alchemy("aiosqlite", "session")),
    "sqlite-aiosqlite-scoped": ("aiosqlite", _of_async_alchemy("aiosqlite", "scoped")),
    "sqlite-django": ("django", _of_django()),
    "sqlite-django-nested": ("django", _of_django(joins=True)),
    "sqlite-peewee": ("peewee", _peewee),
    "postgresql-psycopg": ("psycopg", _of_driver("psycopg")),
    "postgresql-psycopg-joined": ("psycopg", _of_driver("psycopg", joins=True)),
    "postgresql-psycopg-transaction": ("psycopg", _psycopg_transaction),
    "postgresql-psycopg2": ("psycopg2", _of_driver("psycopg2")),
    "postgresql-unreported": ("psycopg2", _of_driver("psycopg2-unreported")),
    "postgresql-unreported-joined": ("psycopg2", _of_driver("psycopg2-unreported", joins=True)),
    "postgresql-pg8000": ("pg8000", _of_driver("pg8000")),
    "postgresql-pg8000-joined": ("pg8000", _of_driver("pg8000", joins=True)),
    "postgresql-psycopg-session": ("psycopg", _of_alchemy("psycopg", "session")),
    "postgresql-psycopg-connection": ("psycopg", _of_alchemy("psycopg", "connection")),
    "postgresql-psycopg2-session": ("psycopg2", _of_alchemy("psycopg2", "session")),
    "postgresql-psycopg2-connection": ("psycopg2", _of_alchemy("psycopg2", "connection")),
    "postgresql-pg8000-session": ("pg8000", _of_alchemy("pg8000", "session")),
    "postgresql-scoped": ("psycopg", _of_alchemy("psycopg", "scoped")),
    "postgresql-sqlmodel": ("sqlmodel", _of_alchemy("psycopg", "sqlmodel")),
    "postgresql-flask": ("flask_sqlalchemy", _flask),
    "postgresql-begin": ("psycopg", _of_alchemy("psycopg", "joined")),
    "postgresql-isolated": ("psycopg", _of_alchemy("psycopg", "isolated")),
    "postgresql-psycopg-async": ("psycopg", _of_async_alchemy("psycopg_async", "session")),
    "postgresql-asyncpg-session": ("asyncpg", _of_async_alchemy("asyncpg", "session")),
    "postgresql-asyncpg-connection": ("asyncpg", _of_async_alchemy("asyncpg", "connection")),
    "postgresql-django": ("django", _of_django()),
    "postgresql-django-nested": ("django", _of_django(joins=True)),
    "postgresql-django-manual": ("django", _of_django(AUTOCOMMIT=False)),
    "postgresql-peewee": ("peewee", _peewee),
    "mysql-pymysql": ("pymysql", _of_driver("pymysql")),
    "mysql-pymysql-joined": ("pymysql", _of_driver("pymysql", joins=True)),
    "mysql-mysqlclient": ("MySQLdb", _of_driver("MySQLdb")),
    "mysql-connector": ("mysql.connector", _of_driver("mysql.connector")),
    "mysql-mariadb": ("mariadb", _of_driver("mariadb")),
    "mysql-cymysql": ("cymysql", _of_driver("cymysql")),
    "mysql-session": ("pymysql", _of_alchemy("pymysql", "session")),
    "mysql-connection": ("pymysql", _of_alchemy("pymysql", "connection")),
    "mysql-mysqlclient-session": ("MySQLdb", _of_alchemy("MySQLdb", "session")),
    "mysql-joined": ("pymysql", _of_alchemy("pymysql", "joined")),
    "mysql-asyncmy": ("asyncmy", _of_async_alchemy("asyncmy", "session")),
    "mysql-aiomysql": ("aiomysql", _of_async_alchemy("aiomysql", "connection")),
    "mysql-django": ("django", _of_django()),
    "mysql-django-nested": ("django", _of_django(joins=True)),
    "mysql-django-manual": ("django", _of_django(AUTOCOMMIT=False)),
    "mysql-peewee": ("peewee", _peewee),
}


def _is_installed(module: str) -> bool:
    try:
        return not module or find_spec(module) is not None
    except ModuleNotFoundError:  # the package above it
        return False


SESSIONS: Final[dict[str, Open]] = {name: opens for name, (module, opens) in _ALL.items() if _is_installed(module)}
"""By name, which begins with the database."""
JOINED: Final = [
    name for name in SESSIONS if name.endswith(("joined", "begin", "isolated", "peewee", "nested", "transaction"))
]
"""Those of which the block is in a transaction of the caller's."""
ALONE: Final = [name for name in SESSIONS if name not in JOINED and not any(word in name for word in ("aio", "async"))]
"""Those whose transaction librmq begins, without an event loop."""
