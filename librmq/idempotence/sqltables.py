"""Tables of librmq in an application's database: names, columns and versions, and statements for any connection.

::

    rmq_dedup                                        one row for each claimed or consumed message
        dedup_key              VARCHAR(255)  PRIMARY KEY   ASCII, see `librmq.dedup.dedup_key`
        state                  SMALLINT      0 consuming, 1 consumed
        owner                  VARCHAR(64)   token of the claim
        claims                 INTEGER       number of claims; above 1, an earlier holder did not end in time
        expires_timestamp_ms   BIGINT        from then on the row counts as absent; indexed

    rmq_messages                                     one row for each message with its effect in the same database
        dedup_key              VARCHAR(255)  PRIMARY KEY   as above
        expires_timestamp_ms   BIGINT        from then on the row may be purged; indexed

    rmq_transactions                                 one row for each local transaction that has ended
        transaction_id         VARCHAR(255)  PRIMARY KEY   the unique id of its message
        state                  SMALLINT      1 committed, 2 rolled back
        expires_timestamp_ms   BIGINT        from then on the row may be purged; indexed

    rmq_outbox                                       one row for each message to send
        id                     BIGINT        PRIMARY KEY, counts up: the order of sending
        order_key              VARCHAR(255)  rows of one key are sent one after the other; NULL: in any order
        topic, properties      TEXT          properties as a JSON object of texts
        flag                   INTEGER
        body                   bytes
        state                  SMALLINT      0 to be sent, 1 sent
        owner                  VARCHAR(64)   token of the sender that claimed it
        attempts               INTEGER       number of failed sends
        due_timestamp_ms       BIGINT        no sender claims it earlier; indexed with state

    rmq_tables                                       one row for each table
        table_name             VARCHAR(255)  PRIMARY KEY
        version                INTEGER

The application chooses the names. A connection is a SQLAlchemy ``Session`` or ``Connection``, or a connection of any
DB-API driver. This module imports SQLAlchemy only for SQLAlchemy's own connections.
"""

# ruff: noqa: ANN401 (connections and producers are of libraries that have no common type)

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Final, NamedTuple

from librmq.errors import ConfigError

KEY_LIMIT: Final = 255
"""The longest key that the tables take, in characters."""

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}(\.[A-Za-z_][A-Za-z0-9_]{0,62})?")
_PARAMETER: Final = re.compile(r"(?<![:\w]):([a-z_]+)")
_DIALECTS: Final = {
    "sqlite3": "sqlite",
    **dict.fromkeys(("psycopg", "psycopg2", "pg8000"), "postgresql"),
    **dict.fromkeys(("pymysql", "MySQLdb", "mysql", "mariadb", "cymysql"), "mysql"),
}


def check_name(name: str) -> str:
    """Return a table's name, which may have a schema in front.

    Raises:
        ConfigError: The name would have to be quoted.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(f"table: expected a name of letters, digits and underscores, found {name!r:.100}")
    return name


class StatementResult(NamedTuple):
    """Result of a statement."""

    rows: Sequence[Sequence[Any]]
    changed: int
    """Number of rows that changed."""
    last_id: int
    """The last inserted id, as MySQL defines it."""


class Link:
    """A connection of the application: runs statements with ``:names`` in them, and ends transactions.

    As thread-safe as the connection. Errors of its driver propagate.
    """

    __slots__ = ("_alchemy", "_style", "connection", "dialect")

    def __init__(self, connection: Any) -> None:
        """Take a connection.

        Raises:
            ConfigError: ``connection`` is not a connection.
        """
        self.connection = connection
        self._alchemy = _is_alchemy(connection)
        if self._alchemy:
            bind = connection.get_bind() if hasattr(connection, "get_bind") else connection
            self.dialect = _dialect(bind.dialect.name)
            self._style = ""
            return
        if not callable(getattr(connection, "cursor", None)) or not callable(getattr(connection, "commit", None)):
            raise ConfigError(f"session: expected a session or connection, found {type(connection).__name__}")
        module = type(connection).__module__
        driver = module.partition(".")[0]
        self.dialect = _DIALECTS.get(driver, driver)
        self._style = _parameter_style(module)

    def execute(self, sql: str, **parameters: Any) -> StatementResult:
        """Run one statement."""
        if self._alchemy:
            result = self.connection.execute(_text(sql), parameters)
            if result.returns_rows:
                return StatementResult(result.fetchall(), 0, 0)
            return StatementResult((), result.rowcount, result.lastrowid if self.dialect == "mysql" else 0)
        return run(self.connection, self._style, sql, parameters)

    def commit(self) -> None:
        """Commit the transaction."""
        self.connection.commit()

    def rollback(self) -> None:
        """Undo the transaction."""
        self.connection.rollback()

    def insert_first(self, sql: str, **parameters: Any) -> bool:
        """Insert the first row of a transaction; after an error undo it, and return False if the row exists."""
        try:
            self.execute(sql, **parameters)
        except BaseException as error:
            self.rollback()
            if is_integrity_error(error):
                return False
            raise
        return True

    def check_can_begin(self) -> None:
        """Refuse a connection whose next statement would not begin a transaction.

        Raises:
            ConfigError: A transaction is open, or each statement is committed.
        """
        value = getattr(self.connection, "in_transaction", False)
        if value() if callable(value) else value:
            raise ConfigError(
                "expected no open transaction: commit or roll back first, because librmq's row must come first"
            )
        driver = self.connection
        if self._alchemy:
            connection = driver.connection() if hasattr(driver, "get_bind") else driver
            driver = connection.connection.dbapi_connection
        get = getattr(driver, "get_autocommit", None)
        value = get() if callable(get) else getattr(driver, "autocommit", False)
        has_autocommit = value is True or value == 1
        if self.dialect == "sqlite" and getattr(driver, "autocommit", -1) == -1:
            # sqlite3's legacy mode, the only one before 3.12, shows it by the isolation level.
            has_autocommit = driver.isolation_level is None
        if has_autocommit:
            raise ConfigError("expected a connection without autocommit, found one that commits each statement")


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


def purge_expired(connection: Any, table: str, now_ms: int) -> int:
    """Delete the rows of a table that have expired, and commit; return their number."""
    with linked(connection) as link:
        purged = link.execute(f"DELETE FROM {table} WHERE expires_timestamp_ms <= :now_ms", now_ms=now_ms).changed
        link.commit()
        return purged


def is_integrity_error(error: BaseException) -> bool:
    """Return whether the error of a driver, or of SQLAlchemy, says that the row exists already."""
    return any(kind.__name__ == "IntegrityError" for kind in type(error).__mro__)


_TEMPORARY: Final = frozenset({"OperationalError", "InterfaceError", "InternalError", "TimeoutError", "OSError"})
_LACKING: Final = re.compile(r"no such (table|column)|unknown column", re.IGNORECASE)


def is_temporary_error(error: BaseException) -> bool:
    """Return whether another try may succeed: a database that cannot be reached, or is locked or busy."""
    names = {kind.__name__ for kind in type(error).__mro__}
    # SQLite and MySQL report a missing table or column as an operational error.
    return not _TEMPORARY.isdisjoint(names) and not _LACKING.search(str(error))


def _is_alchemy(connection: object) -> bool:
    return any(kind.__module__.startswith("sqlalchemy.") for kind in type(connection).__mro__)


def _dialect(name: str) -> str:
    return "mysql" if name == "mariadb" else name


@lru_cache(maxsize=256)
def _text(sql: str) -> Any:
    from sqlalchemy import text

    return text(sql)


def _parameter_style(module: str) -> str:
    """Return the parameter style of the driver that has a connection's ``module``, from it or a package above it."""
    while module:
        style = getattr(sys.modules.get(module), "paramstyle", None)
        if isinstance(style, str):
            return style
        module = module.rpartition(".")[0]
    return "qmark"


def run(connection: Any, style: str, sql: str, parameters: Mapping[str, Any]) -> StatementResult:
    """Run one statement on a connection of a driver that takes parameters in ``style``."""
    statement, names = rendered(sql, style)
    cursor = connection.cursor()
    try:
        cursor.execute(
            statement, parameters if style in ("named", "pyformat") else tuple(parameters[name] for name in names)
        )
        rows = cursor.fetchall() if cursor.description else ()
        last_id = getattr(cursor, "lastrowid", 0)
        return StatementResult(rows, cursor.rowcount, last_id if isinstance(last_id, int) else 0)
    finally:
        cursor.close()


@lru_cache(maxsize=256)
def rendered(sql: str, style: str) -> tuple[str, tuple[str, ...]]:
    """Return ``sql`` in a driver's style of parameters, and the parameters' names in order of occurrence."""
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

    return _PARAMETER.sub(placeholder, sql), tuple(names)


# ------------------------------------------------------------------------------------------------------------- schema

_Steps = Mapping[str, Sequence[str]]
"""Statements by dialect; "" for all others."""


def _expiring(columns: str, charset: str) -> _Steps:
    """Return the statements that create a table whose rows expire."""
    columns += ", expires_timestamp_ms BIGINT NOT NULL"
    return {
        "": (
            f"CREATE TABLE IF NOT EXISTS {{table}} ({columns}){{options}}",
            "CREATE INDEX IF NOT EXISTS {plain}_expires ON {table} (expires_timestamp_ms)",
        ),
        # Keys differ by case and by each byte; the usual collations ignore that.
        "mysql": (
            f"CREATE TABLE IF NOT EXISTS {{table}} ({columns}, INDEX {{plain}}_expires (expires_timestamp_ms)) "
            f"ENGINE=InnoDB CHARACTER SET {charset} COLLATE {charset}_bin",
        ),
    }


_KEY: Final = "dedup_key VARCHAR(255) NOT NULL PRIMARY KEY"
_OUTBOX_COLUMNS: Final = (
    "order_key VARCHAR(255), topic VARCHAR(255) NOT NULL, properties {text} NOT NULL, flag INTEGER NOT NULL, "
    "body {bytes} NOT NULL, state SMALLINT NOT NULL, owner VARCHAR(64) NOT NULL, attempts INTEGER NOT NULL, "
    "due_timestamp_ms BIGINT NOT NULL"
)
_OUTBOX: Final[_Steps] = {
    "": (
        "CREATE TABLE IF NOT EXISTS {table} (id {serial}, " + _OUTBOX_COLUMNS + ")",
        "CREATE INDEX IF NOT EXISTS {plain}_due ON {table} (state, due_timestamp_ms, id)",
        "CREATE INDEX IF NOT EXISTS {plain}_order ON {table} (order_key, state, id)",
    ),
    "mysql": (
        "CREATE TABLE IF NOT EXISTS {table} (id {serial}, " + _OUTBOX_COLUMNS + ", "
        "INDEX {plain}_due (state, due_timestamp_ms, id), INDEX {plain}_order (order_key, state, id)"
        ") ENGINE=InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin",
    ),
}

_TYPES: Final[Mapping[str, Mapping[str, str]]] = {
    "postgresql": {"serial": "BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY", "bytes": "BYTEA", "text": "TEXT"},
    "mysql": {"serial": "BIGINT AUTO_INCREMENT PRIMARY KEY", "bytes": "LONGBLOB", "text": "MEDIUMTEXT"},
    # AUTOINCREMENT never reuses an id, so ids stay in the order of rows after deletions.
    "": {"serial": "INTEGER PRIMARY KEY AUTOINCREMENT", "bytes": "BLOB", "text": "TEXT"},
}

VERSIONS: Final[Mapping[str, Sequence[_Steps]]] = {
    "dedup": (
        _expiring(f"{_KEY}, state SMALLINT NOT NULL, owner VARCHAR(64) NOT NULL, claims INTEGER NOT NULL", "ascii"),
    ),
    "messages": (_expiring(_KEY, "ascii"),),
    "transactions": (
        _expiring("transaction_id VARCHAR(255) NOT NULL PRIMARY KEY, state SMALLINT NOT NULL", "utf8mb4"),
    ),
    "outbox": (_OUTBOX,),
}
"""Statements that lead from one version of a table to the next, by kind of table; the first create it."""


def upgrade_tables(
    connection: Any,
    *,
    dedup: str | None = "rmq_dedup",
    messages: str | None = "rmq_messages",
    transactions: str | None = "rmq_transactions",
    outbox: str | None = "rmq_outbox",
    versions: str = "rmq_tables",
) -> dict[str, int]:
    """Create the tables, or upgrade existing ones; return their versions. Call it at every start.

    Args:
        connection: A SQLAlchemy ``Engine``, ``Session`` or ``Connection``, or a DB-API connection; it is committed.
        dedup: Name of the guard's table; None omits the table, as for the next three.
        messages: Name of the inbox's table.
        transactions: Name of the table of `librmq.idempotence.LocalTransactions`.
        outbox: Name of the outbox's table.
        versions: Name of the table of versions.

    Raises:
        ConfigError: A newer librmq created a table, or a name would have to be quoted.
    """
    named = {"dedup": dedup, "messages": messages, "transactions": transactions, "outbox": outbox}
    kinds = {check_name(name): kind for kind, name in named.items() if name is not None}
    check_name(versions)
    with linked(connection) as link:
        return _upgrade(link, kinds, versions)


@contextmanager
def linked(connection: Any) -> Iterator[Link]:
    """Link to a connection, or to a new connection of a SQLAlchemy ``Engine``."""
    if _is_alchemy(connection) and hasattr(connection, "connect"):  # an engine
        with connection.connect() as opened:
            yield Link(opened)
    else:
        yield Link(connection)


def _upgrade(link: Link, kinds: Mapping[str, str], versions: str) -> dict[str, int]:
    with _upgrade_lock(link):
        _run_steps(link, _VERSION_TABLE, versions)
        for name, kind in kinds.items():
            steps = VERSIONS[kind]
            rows = link.execute(f"SELECT version FROM {versions} WHERE table_name = :name", name=name).rows
            version = int(rows[0][0]) if rows else 0
            if version > len(steps):
                raise ConfigError(
                    f"table {name} is of version {version}, this librmq knows {len(steps)}: a newer librmq made it"
                )
            for step in steps[version:]:
                _run_steps(link, step, name)
            if not rows:
                insert = f"INSERT INTO {versions} (table_name, version) VALUES (:name, :version)"
                link.execute(insert, name=name, version=len(steps))
            elif version < len(steps):
                update = f"UPDATE {versions} SET version = :version WHERE table_name = :name"
                link.execute(update, name=name, version=len(steps))
    return {name: len(VERSIONS[kind]) for name, kind in kinds.items()}


@contextmanager
def _upgrade_lock(link: Link) -> Iterator[None]:
    """Keep other processes from upgrading the tables at the same time; some databases commit each such statement."""
    begin, end, undo = _LOCKS.get(link.dialect, ("", "", ""))
    link.commit()
    if begin:
        link.execute(begin)
    try:
        yield
        if link.dialect != "sqlite":
            link.commit()
    except BaseException:
        if link.dialect != "sqlite":
            link.rollback()
        if undo:
            link.execute(undo)
        raise
    else:
        if end:
            link.execute(end)
    finally:
        link.commit()


_LOCKS: Final = {
    "sqlite": ("BEGIN IMMEDIATE", "COMMIT", "ROLLBACK"),
    "mysql": (
        "SELECT GET_LOCK('rmq_tables', 60)",
        "SELECT RELEASE_LOCK('rmq_tables')",
        "SELECT RELEASE_LOCK('rmq_tables')",
    ),
    "postgresql": (
        "SELECT pg_advisory_lock(8206115107)",
        "SELECT pg_advisory_unlock(8206115107)",
        "SELECT pg_advisory_unlock(8206115107)",
    ),
}


_VERSION_TABLE: Final[_Steps] = {
    "": (
        "CREATE TABLE IF NOT EXISTS {table} (table_name VARCHAR(255) NOT NULL PRIMARY KEY, version INTEGER NOT NULL)",
    ),
}


def _run_steps(link: Link, steps: _Steps, table: str) -> None:
    types = _TYPES.get(link.dialect, _TYPES[""])
    plain = table.rpartition(".")[2]
    options = " WITHOUT ROWID" if link.dialect == "sqlite" else ""
    for statement in steps.get(link.dialect, steps[""]):
        link.execute(statement.format(table=table, plain=plain, options=options, **types))
