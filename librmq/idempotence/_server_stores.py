"""Records of a dedup guard on a server: in any SQL database that SQLAlchemy supports, or in Redis.

**SQL**, extra ``sql``: on PostgreSQL, MySQL, MariaDB and SQLite each call is one statement in its own transaction. On
other databases a claim is an INSERT; if that finds a row, an UPDATE and a SELECT follow. Each decides alone, and no
lock is held between them. `librmq.idempotence._sqltables` has the columns.

**Redis**, extra ``redis``: each call is one script, and so one round trip.

::

    MSGDEDUP:application:topic:group:tag:key  →  state:expires_timestamp_ms:owner        state 0 consuming, 1 consumed

The time in a record decides, by the clocks of the clients that share the server. The server's own expiry, a minute
later, only removes old records. A widespread layout, ``MSGDEDUP:application:topic[:tag]:key``, lacks the group: with
it, two groups of one application lose messages to each other.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, TypeVar

from librmq.clock import Clock
from librmq.errors import ConfigError, DedupStoreBusyError, DedupStoreError, MissingExtraError
from librmq.idempotence._autocommit import Autocommit
from librmq.idempotence._drivers import StatementResult, is_integrity_error, is_refusal
from librmq.idempotence._sqltables import upgrade_tables
from librmq.idempotence.stores import CLAIMS, Claim, DedupRecord, DedupStatements, TableStore
from librmq.override import override
from librmq.runtime.locks import Lock

if TYPE_CHECKING:  # for types alone, because importing them needs an extra
    import sqlalchemy
    from redis import Redis

T = TypeVar("T")


class SeenKeys:
    """Remembers at least the last ``capacity`` keys, in a few bytes each, and drops older ones. Thread-safe.

    Its Bloom filter answers "certainly new here" or "perhaps seen". It can't decide for the store: other processes have
    their own keys, and a restart loses them. It only chooses which statement the store runs first. ``error_rate`` is
    the fraction of new keys that count as possibly seen.

    Raises:
        ConfigError: An argument is out of range.
        MissingExtraError: The extra ``bloom`` is not installed.
    """

    def __init__(self, capacity: int = 1_000_000, error_rate: float = 0.001) -> None:
        if capacity < 1 or not 0 < error_rate < 1:
            raise ConfigError(f"expected a capacity of 1 or more and a rate below 1, found {capacity}, {error_rate}")
        self._capacity = capacity
        self._error_rate = error_rate
        try:
            from pybloom_live import ScalableBloomFilter
        except ImportError as error:
            raise MissingExtraError("a prefilter of keys", "bloom") from error
        self._kind: Any = ScalableBloomFilter
        self._lock = Lock()
        self._new: Any = self._filter()
        self._old: Any = self._filter()

    def _filter(self) -> Any:
        # A filter that grows, with half of the error rate, because two are searched.
        return self._kind(min(self._capacity, 1000), self._error_rate / 2)

    def __len__(self) -> int:
        """Return how many keys are remembered."""
        return len(self._new) + len(self._old)

    def add(self, key: str) -> bool:
        """Remember ``key``; return False if it was certainly not remembered before."""
        with self._lock:
            if self._new.add(key):
                return True
            if len(self._new) >= self._capacity:
                self._old, self._new = self._new, self._filter()
                return False
            return key in self._old


class SqlDedupStore(TableStore):
    """Records in the table ``table`` of a database; `librmq.idempotence._sqltables` has its columns. Thread-safe.

    ``engine`` is an ``Engine``, or a URL to create one from. The store uses connections that commit each statement, and
    gives them back as they were: between calls it keeps up to four of an engine's pool, while the pool has others and
    no listener of its events ``checkout`` and ``checkin``. `create` creates the table.

    On databases where a claim takes several statements, a ``prefilter`` saves two of the three statements for a
    duplicate: the store first looks up keys that the filter may have seen. ``clock`` is the time of guards that have
    none of their own.

    Raises:
        ConfigError: The engine needs an event loop, or a prefilter would save nothing on this database.
        MissingExtraError: The extra ``sql`` is not installed.
        DedupStoreError: No engine can be created from the URL.
    """

    def __init__(
        self,
        engine: sqlalchemy.Engine | sqlalchemy.URL | str,
        *,
        table: str = "rmq_dedup",
        prefilter: SeenKeys | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.clock = clock
        try:
            from sqlalchemy import URL, create_engine
            from sqlalchemy.exc import SQLAlchemyError
        except ImportError as error:
            raise MissingExtraError("a dedup store in a SQL database", "sql") from error
        self._owned: sqlalchemy.Engine | None = None
        if isinstance(engine, str | URL):
            try:
                engine = self._owned = create_engine(
                    engine, isolation_level="AUTOCOMMIT", pool_reset_on_return=None, skip_autocommit_rollback=True
                )
            except (SQLAlchemyError, ImportError) as error:
                raise DedupStoreError(f"expected a URL of a database that SQLAlchemy supports: {error}") from error
        if engine.dialect.is_async:
            raise ConfigError(
                f"engine: expected one with a driver that waits, such as postgresql+psycopg or mysql+pymysql, found "
                f"{engine.url!r} with {engine.dialect.driver}, which needs an event loop; a guard calls its store in a "
                "thread if the listener is a coroutine"
            )
        self.engine: sqlalchemy.Engine = engine
        self.table = table
        driver: Any = engine.dialect.loaded_dbapi
        self._errors: Any = (SQLAlchemyError, driver.Error)
        self._autocommit = Autocommit(engine)
        self.dialect: str = engine.dialect.name
        dialect = "mysql" if self.dialect == "mariadb" else self.dialect
        self.statements: DedupStatements = DedupStatements(table, dialect)
        self._is_portable = False
        self._prefilter: SeenKeys | None = None
        if dialect not in ("postgresql", "mysql", "sqlite"):
            self.use_portable_statements(prefilter)
        elif prefilter is not None:
            raise ConfigError(f"prefilter: expected None on {self.dialect}, where a claim is one statement")

    def use_portable_statements(self, prefilter: SeenKeys | None = None) -> None:
        """Use statements that every database accepts, as for all databases not named above."""
        self._is_portable = True
        self._prefilter = prefilter

    def create(self) -> SqlDedupStore:
        """Create the table, or upgrade it; call it at every start."""
        try:
            upgrade_tables(self.engine, dedup=self.table, messages=None, transactions=None, outbox=None)
        except self._errors as error:
            raise DedupStoreError(f"{self.table}: {error}") from error
        return self

    @override
    def claim(self, key: str, owner: str, now_ms: int, expires_at_ms: int) -> Claim:
        claim = self._claim_step_by_step if self._is_portable else super().claim
        return claim(key, owner, now_ms, expires_at_ms)

    @override
    def purge(self, now_ms: int, limit: int) -> int:
        if self._is_portable:
            return self._execute(self._portable_purge(now_ms, limit), {}).changed
        return super().purge(now_ms, limit)

    def _portable_purge(self, now_ms: int, limit: int) -> str:
        """Return the statement in the dialect's own words for a limit."""
        from sqlalchemy import column, delete, select, table

        schema, _, plain = self.table.rpartition(".")
        rows = table(plain, column("dedup_key"), column("expires_timestamp_ms"), schema=schema or None)
        has_expired = rows.c.expires_timestamp_ms <= now_ms
        keys = select(rows.c.dedup_key).where(has_expired).limit(limit)
        statement = delete(rows).where(has_expired, rows.c.dedup_key.in_(keys))
        return str(statement.compile(dialect=self.engine.dialect, compile_kwargs={"literal_binds": True}))

    @override
    def close(self) -> None:
        """Give the connections back to the engine, and close the engine if the store created it."""
        self._autocommit.close()
        if self._owned is not None:
            self._owned.dispose()

    # ---- claims

    def _claim_step_by_step(self, key: str, owner: str, now_ms: int, expires_at_ms: int) -> Claim:
        if self._prefilter is not None and self._prefilter.add(key):
            record = self.read(key, now_ms)
            if record is not None and record.owner != owner:
                return Claim.CONSUMED if record.consumed else Claim.CONSUMING
        columns = "dedup_key, state, owner, claims, expires_timestamp_ms"
        with suppress(_RowExistsError):
            self._execute(
                f"INSERT INTO {self.table} ({columns}) VALUES (:key, 0, :owner, 1, :expires_at_ms)",
                {"key": key, "owner": owner, "expires_at_ms": expires_at_ms},
            )
            return Claim.NEW
        update = self._execute(
            f"UPDATE {self.table} SET state = 0, owner = :owner, claims = claims + 1, "
            "expires_timestamp_ms = :expires_at_ms WHERE dedup_key = :key "
            "AND (expires_timestamp_ms <= :now_ms OR owner = :owner)",
            {"key": key, "owner": owner, "now_ms": now_ms, "expires_at_ms": expires_at_ms},
        )
        if update.changed:
            return Claim.TAKEN_OVER
        record = self.read(key, now_ms)
        # None: released or expired since. Another process had it until now, so the message is delivered again.
        return Claim.CONSUMED if record is not None and record.consumed else Claim.CONSUMING

    @override
    def _execute(self, statement: str, parameters: Mapping[str, str | int]) -> StatementResult:
        try:
            return self._autocommit.execute(statement, parameters)
        except self._errors as error:
            text = f"{self.table}: {error}"
            if is_integrity_error(error):
                raise _RowExistsError(text) from error
            raise (DedupStoreBusyError if is_refusal(error) else DedupStoreError)(text) from error


class _RowExistsError(DedupStoreError):
    """An INSERT found a row with its key."""


# ---- Redis

_MARGIN_MS: Final = 60_000

_READ: Final = """
local held = redis.call('GET', KEYS[1])
local state, expires, owner
if held then
    state, expires, owner = string.match(held, '^([01]):(%d+):(.+)$')
    if not state then return redis.error_reply('expected a record, found another value') end
end
"""
# ARGV: owner, now, and for the first two: expiry, milliseconds until the server may clear it away
_CLAIM: Final = (
    _READ
    + """
if held and owner ~= ARGV[1] and tonumber(expires) > tonumber(ARGV[2]) then return 2 + tonumber(state) end
redis.call('SET', KEYS[1], '0:' .. ARGV[3] .. ':' .. ARGV[1], 'PX', ARGV[4])
if held and owner ~= ARGV[1] then return 1 end
return 0
"""
)
_FINISH: Final = (
    _READ
    + """
if not held or owner ~= ARGV[1] or tonumber(expires) <= tonumber(ARGV[2]) then return 0 end
redis.call('SET', KEYS[1], '1:' .. ARGV[3] .. ':' .. ARGV[1], 'PX', ARGV[4])
return 1
"""
)
_RELEASE: Final = (
    _READ
    + """
if not held or owner ~= ARGV[1] or state ~= '0' or tonumber(expires) <= tonumber(ARGV[2]) then return 0 end
return redis.call('DEL', KEYS[1])
"""
)
_RECORD: Final = re.compile(rb"([01]):([0-9]+):(.+)")


class RedisDedupStore:
    """Records in a Redis server. Thread-safe, like ``client``.

    ``client`` is a ``redis.Redis``; set its timeouts, since a listener waits for it. Every key begins with ``prefix``.
    ``clock`` is the time of guards that have none of their own.
    Messages whose records the server loses (memory policy, failover, no append-only file) are consumed again.

    Raises:
        ConfigError: The client is one for asyncio.
        MissingExtraError: The extra ``redis`` is not installed.
    """

    blocking = True

    def __init__(self, client: Redis, *, prefix: str = "MSGDEDUP:", clock: Clock | None = None) -> None:
        try:
            from redis import exceptions
        except ImportError as error:
            raise MissingExtraError("a dedup store in Redis", "redis") from error
        if inspect.iscoroutinefunction(getattr(client, "execute_command", None)):
            kind = type(client)
            raise ConfigError(
                f"client: expected one that waits, redis.Redis, found {kind.__module__}.{kind.__name__}; "
                "a guard calls its store in a thread if the listener is a coroutine"
            )
        self._errors: Any = exceptions
        self.clock = clock
        self.client = client
        self.prefix = prefix
        self._scripts = {
            "claim": client.register_script(_CLAIM),
            "finish": client.register_script(_FINISH),
            "release": client.register_script(_RELEASE),
        }

    def claim(self, key: str, owner: str, now_ms: int, expires_at_ms: int) -> Claim:
        outcome = self._run("claim", key, owner, now_ms, expires_at_ms, _lifetime_ms(now_ms, expires_at_ms))
        return CLAIMS[outcome]

    def finish(self, key: str, owner: str, now_ms: int, expires_at_ms: int) -> bool:
        lifetime_ms = _lifetime_ms(now_ms, expires_at_ms)
        return self._run("finish", key, owner, now_ms, expires_at_ms, lifetime_ms) == 1

    def release(self, key: str, owner: str, now_ms: int) -> bool:
        return self._run("release", key, owner, now_ms) == 1

    def read(self, key: str, now_ms: int) -> DedupRecord | None:
        value: Any = self._answered(key, lambda: self.client.get(self.prefix + key))
        if value is None:
            return None
        match = _RECORD.fullmatch(value.encode() if isinstance(value, str) else value)
        if match is None:
            raise DedupStoreError(f"{self.prefix}{key}: expected a record, found another value")
        record = DedupRecord(match[1] == b"1", match[3].decode(), int(match[2]))
        return record if record.expires_timestamp_ms > now_ms else None

    def purge(self, now_ms: int, limit: int) -> int:
        """Do nothing: the server removes expired records."""
        return 0

    def many(self, operations: Sequence[tuple[str, tuple[Any, ...]]]) -> list[Any]:
        """Make several calls in one round trip; return the result or the error of each.

        ``operations`` are names and arguments. Each call is atomic.
        """

        def ask() -> list[Any]:
            pipeline = self.client.pipeline(transaction=False)
            for name, (key, *arguments) in operations:
                if name == "read":  # A read is rare, and is sent separately below.
                    continue
                if name != "release":
                    arguments.append(_lifetime_ms(arguments[1], arguments[2]))
                pipeline.evalsha(self._scripts[name].sha, 1, self.prefix + key, *arguments)
            return pipeline.execute(raise_on_error=False)

        answers = self._answered("", ask)
        replies = iter(answers)
        return [self._answer(name, arguments, replies) for name, arguments in operations]

    def _answer(self, name: str, arguments: tuple[Any, ...], replies: Iterator[Any]) -> object:
        answer: Any = None if name == "read" else next(replies)
        if name == "read" or isinstance(answer, self._errors.NoScriptError):
            try:
                return getattr(self, name)(*arguments)
            except DedupStoreError as error:
                return error
        if isinstance(answer, self._errors.RedisError):
            return self._failure(arguments[0], answer)
        return CLAIMS[answer] if name == "claim" else answer == 1

    def _run(self, name: str, key: str, *arguments: str | int) -> int:
        outcome: int = self._answered(key, lambda: self._scripts[name](keys=(self.prefix + key,), args=arguments))
        return outcome

    def _answered(self, key: str, ask: Callable[[], T]) -> T:
        """Return the answer to a call, which is repeated on a fresh connection if the one that it had was dead."""
        try:
            try:
                return ask()
            except self._errors.ConnectionError:  # The server was restarted, or an idle connection was cut.
                return ask()
        except self._errors.RedisError as error:
            raise self._failure(key, error) from error

    def _failure(self, key: str, error: Exception) -> DedupStoreError:
        return DedupStoreError(f"{self.prefix}{key}: {error}")


def _lifetime_ms(now_ms: int, expires_at_ms: int) -> int:
    return max(1, expires_at_ms - now_ms) + _MARGIN_MS
