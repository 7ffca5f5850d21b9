"""Fixtures for the tests of dedup and outbox: servers that start once, and places for records."""

from __future__ import annotations

import importlib
import itertools
import sqlite3
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Final, TypeVar

import pytest
import redis
import sqlalchemy
from sqlalchemy.orm import Session

from librmq.idempotence._server_stores import RedisDedupStore, SqlDedupStore
from librmq.idempotence._sqltables import upgrade_tables
from librmq.idempotence.stores import DedupStore, MemoryDedupStore, SqliteDedupStore
from tests import own
from tests.conftest import in_ci
from tests.idempotence.servers import STARTERS, Absent, Server

STORES: Final = ("memory", "sqlite", "sql-sqlite", "sql-portable", "postgresql", "mysql", "redis")
"""All stores; those on SQLAlchemy are named by their dialect."""
DATABASES: Final = ("sqlite", "postgresql", "mysql")
DRIVERS: Final = (("sqlite", "sqlite3"), ("postgresql", "psycopg"), ("postgresql", "psycopg2"), ("mysql", "pymysql"))
"""DB-API drivers and their databases."""

_numbers = itertools.count()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests of one server in one process, so that each server starts once; the quick check starts none."""
    for item in items:
        if item.nodeid.startswith("tests/idempotence/"):
            name = next((name for name in STARTERS if name in item.name), "memory")
            item.add_marker(pytest.mark.xdist_group(f"dedup-{name}"))
            if name in STARTERS:
                item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def server() -> Iterator[Callable[[str], Server]]:
    """``server("postgresql")`` starts a server at its first call; it runs until the session ends."""
    running: dict[str, Server] = {}
    absent: dict[str, str] = {}
    with ExitStack() as stack:

        def get(name: str) -> Server:
            if name not in running and name not in absent:
                try:
                    running[name] = stack.enter_context(STARTERS[name]())
                except Absent as error:
                    absent[name] = str(error)
            if name in absent:
                problem = f"no {name} server: {absent[name]}"
                if in_ci():
                    pytest.fail(problem)
                pytest.skip(problem)
            return running[name]

        yield get


T = TypeVar("T")


def together(*calls: Callable[[], T]) -> list[T]:
    """Make calls at the same moment, each in its own thread; return their results, or raise one of their errors."""
    barrier = threading.Barrier(len(calls))

    def run(call: Callable[[], T]) -> T:
        barrier.wait()
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(run, calls))


@contextmanager
def connections() -> Iterator[list[sqlite3.Connection]]:
    """Collect the connections to SQLite, because only they can log the statements on a file."""
    made: list[sqlite3.Connection] = []
    connect = sqlite3.connect

    def noted(*arguments: Any, **more: Any) -> sqlite3.Connection:
        made.append(connect(*arguments, **more))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sqlite3, "connect", noted)
        yield made


class Place:
    """A place for records. `open` returns a new handle, like the one that each process has."""

    def __init__(self, name: str, folder: Path, server: Callable[[str], Server]) -> None:
        self.name = name
        self.server = server(name) if name in STARTERS else None
        self._stack = ExitStack()
        self._memory = MemoryDedupStore()
        self.path = folder / "records.db"

    def open(self) -> DedupStore:
        """Return a handle, which is closed at the end."""
        if self.name == "memory":
            return self._memory
        if self.name == "sqlite":
            return self._stack.enter_context(SqliteDedupStore(self.path))
        if self.name == "redis":
            assert self.server is not None
            return RedisDedupStore(self._stack.enter_context(closing(redis.Redis.from_url(self.server.url))))
        url = self.server.url if self.server is not None else f"sqlite:///{self.path}"
        store = self._stack.enter_context(SqlDedupStore(url))
        if self.server is None:
            sqlalchemy.event.listen(store.engine, "connect", _without_flushes)
        if self.name == "sql-portable":
            store.use_portable_statements()
        return store.create()

    @cached_property
    def handle(self) -> DedupStore:
        """The handle for tests that need only one."""
        return self.open()

    def close(self) -> None:
        self._stack.close()


@pytest.fixture(scope="session")
def place(
    server: Callable[[str], Server], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Place]]:
    """``place("redis")`` returns one place for the whole run; tests use different keys."""
    places: dict[str, Place] = {}

    def get(name: str) -> Place:
        if name not in places:
            places[name] = Place(name, tmp_path_factory.mktemp(name), server)
        return places[name]

    yield get
    for place in places.values():
        place.close()


@pytest.fixture(params=own.params("store", {name: name for name in STORES}))
def store(request: pytest.FixtureRequest, place: Callable[[str], Place]) -> DedupStore:
    if callable(request.param):
        made: DedupStore = request.param()
        return made
    return place(request.param).handle


@pytest.fixture
def key() -> str:
    """Return a key that no other test uses."""
    return f"shop:orders:billing::{next(_numbers)}"


# --- databases with application tables


class Database:
    """A database with librmq's tables and two of an application: ``accounts`` and ``effects``."""

    def __init__(self, name: str, url: str, engine: sqlalchemy.Engine, folder: Path) -> None:
        self.name = name
        self.url = url
        self.folder = folder
        self.engine = engine
        self._engines: dict[str, sqlalchemy.Engine] = {}

    def run(self, sql: str, **parameters: Any) -> list[tuple[Any, ...]]:
        """Run one statement, commit it, and return its rows."""
        with self.engine.begin() as connection:
            result = connection.execute(sqlalchemy.text(sql), parameters)
            return [tuple(row) for row in result] if result.returns_rows else []

    def connect(self) -> Any:
        """Return a plain DB-API connection."""
        if self.name == "sqlite":
            assert self.engine.url.database is not None
            connection = sqlite3.connect(self.engine.url.database)
            connection.execute("PRAGMA synchronous = OFF")
            return connection
        if self.name == "postgresql":
            import psycopg

            return psycopg.connect(f"host=127.0.0.1 port={self.engine.url.port} user=rmq dbname=postgres")
        import pymysql

        return pymysql.connect(host="127.0.0.1", port=self.engine.url.port or 0, user="root", database="rmq")

    def connect_by(self, driver: str, rows: str = "") -> Any:
        """Return a connection of a driver, whose cursors give ``rows`` "dicts" or of another kind."""
        port: Any = self.engine.url.port
        if driver.startswith("psycopg2"):
            import psycopg2
            import psycopg2.extras

            factory = {"dicts": psycopg2.extras.RealDictCursor, "named": psycopg2.extras.NamedTupleCursor}.get(rows)
            own: Any = psycopg2.extensions.connection
            if driver == "psycopg2-unreported":  # of a server or pooler that reports no settings
                own = type("Unreported", (own,), {"get_parameter_status": lambda self, name: None})
            address = {"host": "127.0.0.1", "port": port, "user": "rmq", "dbname": "postgres"}
            return psycopg2.connect(**address, cursor_factory=factory, connection_factory=own)
        if driver == "pg8000":
            return importlib.import_module("pg8000").connect("rmq", host="127.0.0.1", port=port, database="postgres")
        if driver in ("MySQLdb", "mysql.connector", "mariadb", "cymysql"):
            connect = importlib.import_module(driver).connect
            return connect(
                host="127.0.0.1", port=port, user="root", **{"db" if driver == "cymysql" else "database": "rmq"}
            )
        connection = self.connect()
        if not rows:
            return connection
        if driver == "sqlite3":
            connection.row_factory = sqlite3.Row if rows == "named" else lambda cursor, row: {"row": row}
        elif driver == "psycopg":
            from psycopg.rows import dict_row, namedtuple_row

            connection.row_factory = dict_row if rows == "dicts" else namedtuple_row
        else:
            from pymysql.cursors import DictCursor

            connection.cursorclass = DictCursor
        return connection

    def engine_of(self, driver: str) -> sqlalchemy.Engine:
        """Return SQLAlchemy's engine for a driver."""
        if driver not in self._engines:
            name = {"sqlite3": "pysqlite", "MySQLdb": "mysqldb"}.get(driver, driver)
            self._engines[driver] = sqlalchemy.create_engine(self.engine.url.set(drivername=f"{self.name}+{name}"))
        return self._engines[driver]

    @contextmanager
    def session(self, driver: str, kind: str) -> Iterator[Any]:
        """Open a "driver" connection, or a "session" or "connection" of SQLAlchemy, by a driver."""
        with ExitStack() as stack:
            if kind == "driver":
                connection = self.connect_by(driver)
                stack.callback(_close, connection)
                yield connection
                return
            engine = self.engine_of(driver)
            yield stack.enter_context(Session(engine) if kind == "session" else engine.connect())

    def close(self) -> None:
        for engine in (self.engine, *self._engines.values()):
            engine.dispose()

    def effects(self, name: str) -> int:
        """Return the number of effects with that name in the database."""
        return int(self.run("SELECT COUNT(*) FROM effects WHERE name = :name", name=name)[0][0])


def _close(connection: Any) -> None:
    with suppress(Exception):  # some drivers refuse to close twice
        connection.close()


def _without_flushes(connection: Any, _: object) -> None:
    """Flushes are unnecessary, because no test cuts the power."""
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = OFF")


@pytest.fixture(scope="session")
def database(
    server: Callable[[str], Server], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Database]]:
    """``database("mysql")`` returns one database for the whole run."""
    databases: dict[str, Database] = {}

    def get(name: str) -> Database:
        if name not in databases:
            folder = tmp_path_factory.mktemp("db")
            url = server(name).url if name in STARTERS else f"sqlite:///{folder / 'shop.db'}"
            engine = sqlalchemy.create_engine(url)
            if name == "sqlite":
                sqlalchemy.event.listen(engine, "connect", _without_flushes)
            upgrade_tables(engine)
            database = databases[name] = Database(name, url, engine, folder)
            database.run("CREATE TABLE effects (name VARCHAR(100) NOT NULL)")
            database.run("CREATE TABLE accounts (id VARCHAR(100) NOT NULL PRIMARY KEY, balance INTEGER NOT NULL)")
        return databases[name]

    yield get
    for database in databases.values():
        database.close()


@pytest.fixture
def name() -> str:
    """Return a name that no other test uses, for keys, effects and accounts."""
    return f"name-{next(_numbers)}"
