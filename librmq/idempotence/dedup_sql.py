"""Records of a dedup guard in any SQL database that SQLAlchemy supports: extra ``sql``.

On PostgreSQL, MySQL, MariaDB and SQLite each call is one statement in its own transaction. On other databases a claim
is an INSERT; if that finds a row, an UPDATE and a SELECT follow. Each decides alone, and no lock is held between them.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from librmq.clock import Clock
from librmq.errors import ConfigError, DedupStoreError, MissingExtraError
from librmq.idempotence.drivers import StatementResult, is_integrity_error, run
from librmq.idempotence.sqltables import upgrade_tables
from librmq.idempotence.stores import CLAIMS, Claim, DedupStatements, TableStore

# ruff: noqa: D102 (the methods of a store are described at DedupStore)


try:
    import sqlalchemy
    from sqlalchemy.exc import SQLAlchemyError
except ImportError as error:
    raise MissingExtraError("a dedup store in a SQL database", "sql") from error

if TYPE_CHECKING:  # for types alone, because importing it needs the extra ``bloom``
    from librmq.idempotence.seen_keys import SeenKeys

_ATTEMPTS: Final = 5
# Serialization failure, deadlock, a wait for a lock that was too long: by SQLSTATE and by MySQL's numbers.
_REPEATABLE: Final = frozenset({"40001", "40P01", 1213, 1205})


class SqlDedupStore(TableStore):
    """Records in the table ``table`` of a database; `librmq.idempotence.sqltables` has its columns. Thread-safe.

    ``engine`` is an ``Engine``, or a URL to create one from. The store sets its connections to commit each statement.
    With ``isolation_level="AUTOCOMMIT", pool_reset_on_return=None, skip_autocommit_rollback=True``, as for a URL, an
    engine needs one round trip for each call. `create` creates the table.

    On databases where a claim takes several statements, a ``prefilter`` saves two of the three statements for a
    duplicate: the store first looks up keys that the filter may have seen. ``clock`` is the time of guards that have
    none of their own.

    Raises:
        ConfigError: A prefilter would save nothing on this database.
        DedupStoreError: No engine can be created from the URL.
    """

    def __init__(
        self,
        engine: sqlalchemy.Engine | str,
        *,
        table: str = "rmq_dedup",
        prefilter: SeenKeys | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.clock = clock
        if isinstance(engine, str):
            try:
                engine = sqlalchemy.create_engine(
                    engine, isolation_level="AUTOCOMMIT", pool_reset_on_return=None, skip_autocommit_rollback=True
                )
            except (SQLAlchemyError, ImportError) as error:
                raise DedupStoreError(f"expected a URL of a database that SQLAlchemy supports: {error}") from error
            self._owned: sqlalchemy.Engine | None = engine
        else:
            self._owned = None
        self.engine = engine
        self.table = table
        driver: Any = engine.dialect.loaded_dbapi
        self._driver_error: Any = driver.Error
        self.statements = DedupStatements(table)
        self._prefilter: SeenKeys | None = None
        self._claim_with = super().claim
        if engine.dialect.name in ("mysql", "mariadb"):
            self._claim_with = self._claim_mysql
            self.statements.claim = _mysql_claim(table)
            self.statements.purge = f"DELETE FROM {table} WHERE expires_timestamp_ms <= :now_ms LIMIT :limit"
        elif engine.dialect.name not in ("postgresql", "sqlite"):
            self.use_portable_statements(prefilter)
            return
        if prefilter is not None:
            raise ConfigError(f"prefilter: expected None on {engine.dialect.name}, where a claim is one statement")

    def use_portable_statements(self, prefilter: SeenKeys | None = None) -> None:
        """Use statements that every database accepts, as for all databases not named above."""
        self._prefilter = prefilter
        self._claim_with = self._claim_step_by_step
        self.statements.purge = f"DELETE FROM {self.table} WHERE expires_timestamp_ms <= :now_ms"

    def create(self) -> SqlDedupStore:
        """Create the table, or upgrade it; call it at every start."""
        try:
            upgrade_tables(self.engine, dedup=self.table, messages=None, transactions=None, outbox=None)
        except SQLAlchemyError as error:
            raise DedupStoreError(f"{self.table}: {error}") from error
        return self

    def claim(self, key: str, owner: str, now_ms: int, expires_at_ms: int) -> Claim:
        return self._claim_with(key, owner, now_ms, expires_at_ms)

    def purge(self, now_ms: int, limit: int) -> int:
        if ":limit" in self.statements.purge:
            return super().purge(now_ms, limit)
        return self._execute(self.statements.purge, now_ms=now_ms).changed

    def close(self) -> None:
        """Close the connections, if the store created the engine."""
        if self._owned is not None:
            self._owned.dispose()

    # ---- claims

    def _claim_mysql(self, key: str, owner: str, now_ms: int, expires_at_ms: int) -> Claim:
        answer = self._execute(self.statements.claim, key=key, owner=owner, now_ms=now_ms, expires_at_ms=expires_at_ms)
        return CLAIMS[0 if answer.last_id == _REPEATED else answer.last_id]

    def _claim_step_by_step(self, key: str, owner: str, now_ms: int, expires_at_ms: int) -> Claim:
        if self._prefilter is not None and self._prefilter.add(key):
            record = self.read(key, now_ms)
            if record is not None and record.owner != owner:
                return Claim.CONSUMED if record.consumed else Claim.CONSUMING
        columns = "dedup_key, state, owner, claims, expires_timestamp_ms"
        with suppress(_RowExistsError):
            self._execute(
                f"INSERT INTO {self.table} ({columns}) VALUES (:key, 0, :owner, 1, :expires_at_ms)",
                key=key,
                owner=owner,
                expires_at_ms=expires_at_ms,
            )
            return Claim.NEW
        update = self._execute(
            f"UPDATE {self.table} SET state = 0, owner = :owner, claims = claims + 1, "
            "expires_timestamp_ms = :expires_at_ms WHERE dedup_key = :key "
            "AND (expires_timestamp_ms <= :now_ms OR owner = :owner)",
            key=key,
            owner=owner,
            now_ms=now_ms,
            expires_at_ms=expires_at_ms,
        )
        if update.changed:
            return Claim.TAKEN_OVER
        record = self.read(key, now_ms)
        # None: released or expired since. Another process had it until now, so the message is delivered again.
        return Claim.CONSUMED if record is not None and record.consumed else Claim.CONSUMING

    def _execute(self, statement: str, **parameters: str | int) -> StatementResult:
        for _ in range(_ATTEMPTS - 1):
            with suppress(_ConflictError):
                return self._try(statement, parameters)
        return self._try(statement, parameters)

    def _try(self, statement: str, parameters: Mapping[str, Any]) -> StatementResult:
        # Not with SQLAlchemy's own connections: their bookkeeping costs several times the round trip.
        dialect = self.engine.dialect
        try:
            pooled = self.engine.raw_connection()
        except (SQLAlchemyError, self._driver_error) as error:
            raise DedupStoreError(f"{self.table}: {error}") from error
        connection: Any = pooled.dbapi_connection
        try:
            if self._owned is None:
                dialect.set_isolation_level(connection, "AUTOCOMMIT")
            try:
                return run(connection, dialect.paramstyle, statement, parameters)
            finally:
                if self._owned is None:
                    dialect.reset_isolation_level(connection)
        except self._driver_error as error:
            if dialect.is_disconnect(error, connection, None):
                pooled.invalidate(error)
            if is_integrity_error(error):
                raise _RowExistsError(f"{self.table}: {error}") from error
            kind = _ConflictError if _is_repeatable(error) else DedupStoreError
            raise kind(f"{self.table}: {error}") from error
        except BaseException as error:  # a signal: the next statement must not read the answer of this one
            pooled.invalidate(error)
            raise
        finally:
            pooled.close()


class _RowExistsError(DedupStoreError):
    """An INSERT found a row with its key."""


class _ConflictError(DedupStoreError):
    """The database undid the statement because of a conflict."""


def _is_repeatable(error: Exception) -> bool:
    number = error.args[0] if error.args else None
    codes = (getattr(error, "sqlstate", None), getattr(error, "pgcode", None), number)
    return not _REPEATABLE.isdisjoint(code for code in codes if isinstance(code, str | int))


_REPEATED: Final = 4
"""Result of a claim that is repeated with the same token."""


def _mysql_claim(table: str) -> str:
    """Return the claim for MySQL, whose INSERT returns no rows: the result comes back as the last inserted id.

    MySQL assigns from left to right, and each assignment sees the earlier ones. The time, which shows whether the row
    was free, therefore changes last, if the owner is this caller by then.
    """
    free = "expires_timestamp_ms <= :now_ms OR owner = :owner"
    outcome = (
        f"CASE WHEN owner = :owner THEN {_REPEATED} WHEN expires_timestamp_ms <= :now_ms THEN 1 ELSE 2 + state END"
    )
    return (
        f"INSERT INTO {table} (dedup_key, state, owner, claims, expires_timestamp_ms) "
        "VALUES (:key, 0, :owner, 1, :expires_at_ms) ON DUPLICATE KEY UPDATE "
        f"claims = IF(LAST_INSERT_ID({outcome}) = 1, claims + 1, claims), "
        f"state = IF({free}, 0, state), "
        f"owner = IF({free}, :owner, owner), "
        "expires_timestamp_ms = IF(owner = :owner, :expires_at_ms, expires_timestamp_ms)"
    )
