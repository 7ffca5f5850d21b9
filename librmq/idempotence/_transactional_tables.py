"""Tables that an application writes in its own transaction: of consumed messages, and of local transactions.

::

    with transactional(session, message, group="billing") as first:
        if first:
            session.execute(...)        # commits with the record, or not at all

The transaction inserts the record of the message first. A second delivery waits for that row. If the first commits, the
second finds the message consumed; if the first rolls back or dies, the second proceeds. So the effect happens once in
this database, as long as the record is kept. ``docs/dedup.md`` has the conditions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import lru_cache
from types import TracebackType
from typing import Any, Final

from librmq.client import CheckedMessage, OpenTransaction, TransactionProducer
from librmq.clock import Clock, default_clock
from librmq.config import wrong_kind
from librmq.errors import ConfigError, TransactionRefusedError
from librmq.idempotence._connections import Link, check_database, linked
from librmq.idempotence._drivers import TransactionStatus, is_temporary_error
from librmq.idempotence._sqltables import check_name, purge_expired
from librmq.idempotence.stores import KEEP_CONSUMED, dedup_key, to_milliseconds, unique_id
from librmq.message import Message
from librmq.protocol import TransactionState
from librmq.runtime.event_log import EventLog

# ruff: noqa: ANN401 (connections and producers are of libraries that have no common type)


_KEEP_MS: Final = to_milliseconds("keep", KEEP_CONSUMED)


def transactional(
    session: Any,
    message: Any,
    *,
    group: str,
    application: str = "",
    key: Callable[[Any], str | None] = unique_id,
    table: str = "rmq_messages",
    keep: float | timedelta = KEEP_CONSUMED,
    clock: Clock | None = None,
) -> Transactional:
    """Return a context manager that yields whether ``message`` is delivered for the first time.

    ``session`` is a SQLAlchemy ``Session`` or ``Connection``, a DB-API connection, or for ``async with`` a SQLAlchemy
    ``AsyncSession`` or ``AsyncConnection``, without an open transaction; or Django's ``connection``, in whose atomic
    blocks this one is a savepoint. Leaving the block commits; an exception rolls back and propagates. ``key``,
    ``group`` and ``application`` mean the same as for `librmq.dedup.DedupListener`; without a key every delivery
    counts as the first. `librmq.idempotence._sqltables.upgrade_tables` creates ``table``, and `purge_messages` deletes
    records that are older than ``keep``.

    Errors of the database's driver propagate, and the message is delivered again. As thread-safe as the session. On a
    plain connection of psycopg or psycopg2 a block must not roll back and go on: that commits an effect without its
    record, and is not noticed.

    Raises:
        ConfigError: An argument is refused; or, at the beginning of the block, the session has an open transaction, or
            commits each statement; or, at its end, the transaction has ended inside: the block has rolled it back, or
            has gone on after an error by which the database did. Nothing of the block is kept.
    """
    if not group:
        raise ConfigError("group: expected the consumer group's name, found none")
    check_name(table)
    if not callable(key):
        raise ConfigError(f"key: expected a function of a message, found {key!r:.100}")
    business_key = key(message)
    if business_key is not None and not isinstance(business_key, str):
        raise ConfigError(f"key: expected a text or None, found {business_key!r:.100}")
    record = None
    if business_key:
        record = dedup_key(application, message.topic, group, message.tags, business_key)
    keep_ms = _KEEP_MS if keep is KEEP_CONSUMED else to_milliseconds("keep", keep)
    expires_at_ms = (clock or default_clock()).now_ms() + keep_ms
    return Transactional(session, table, record, expires_at_ms)


@lru_cache(maxsize=64)
def _insert_message(table: str) -> str:
    return f"INSERT INTO {table} (dedup_key, expires_timestamp_ms) VALUES (:key, :expires_at_ms)"


class Transactional:
    """One transaction of `transactional`; ``with`` returns True at the first delivery of a message."""

    __slots__ = ("_expires_at_ms", "_key", "_link", "_session", "_table")

    def __init__(self, session: Any, table: str, key: str | None, expires_at_ms: int) -> None:
        self._session = session
        self._table = table
        self._key = key
        self._expires_at_ms = expires_at_ms

    def __enter__(self) -> bool:
        return self._begin(self._session)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(self._session, kind is None)

    async def __aenter__(self) -> bool:
        if not hasattr(self._session, "run_sync"):
            Link(self._session)  # This refuses a driver's asynchronous connection.
            raise ConfigError(f"{type(self._session).__name__} needs `with`, not `async with`")
        first: bool = await self._session.run_sync(self._begin)
        return first

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.run_sync(self._end, kind is None)

    def _begin(self, session: Any) -> bool:
        link = self._link = Link(session)
        link.begin_first()
        first = True
        if self._key is not None:
            insert = _insert_message(self._table)
            first = link.insert_first(
                insert, {"key": self._key, "expires_at_ms": self._expires_at_ms}, self._is_recorded
            )
        try:
            link.watch()
        except BaseException:
            link.rollback()
            raise
        return first

    def _is_recorded(self) -> bool:
        select = f"SELECT 1 FROM {self._table} WHERE dedup_key = :key"
        return bool(self._link.execute(select, key=self._key).rows)

    def _end(self, session: Any, is_complete: bool) -> None:
        link = self._link
        if not is_complete:
            link.rollback()
            return
        try:
            status = link.watched_status()
            has_ended = status is not TransactionStatus.OPEN and not (status is None and self._is_safe())
        except BaseException:
            with suppress(Exception):  # The first error is the one to see.
                link.rollback()
            raise
        if not has_ended:
            link.commit()
            return
        link.rollback()
        # A commit at the end of the block has kept both the record and the change.
        is_safe = status is TransactionStatus.IDLE and self._is_safe()
        link.rollback()
        if is_safe:
            return
        raise ConfigError(
            "the transaction has ended inside the block, and what the block changed is not kept: let errors of the "
            "database propagate, or run a statement that may fail in a savepoint; commit and roll back outside"
        )

    def _is_safe(self) -> bool:
        """Return whether the record is there, so that nothing is lost if the message is acknowledged."""
        return self._key is None or self._is_recorded()


def purge_messages(connection: Any, now_ms: int, *, table: str = "rmq_messages") -> int:
    """Delete the records of ``table`` that have expired, a thousand in each transaction; return their number.

    ``connection`` is a SQLAlchemy ``Engine``, ``Session`` or ``Connection``, Django's ``connection``, or a DB-API one.
    """
    return purge_expired(connection, check_name(table), "dedup_key", now_ms)


# ---- local transactions

_log = EventLog("librmq.producer")

_COMMITTED: Final = 1
_ROLLED_BACK: Final = 2
_TRANSACTION_REFUSED: Final = 1


class LocalTransactions:
    """The states of local transactions in a table of the application's database. Thread-safe.

    `check` is the check of a `TransactionProducer`; `transaction` runs the business change. Rows are kept for ``keep``,
    which must be longer than a broker keeps half messages (72 hours); `purge` deletes older rows.
    `librmq.idempotence.upgrade_tables` creates ``table``.

        with local.transaction(producer, message, session):     half message, then the row COMMITTED
            session.execute(...)                                commits with the row, or not at all
                                                                then the end of the half message
        check:  row COMMITTED → commit      row ROLLED_BACK → rollback
                no row → write ROLLED_BACK, which waits for a local transaction that has written its row

    The first row of a transaction decides: if a check writes it first, a late local transaction fails. So a message is
    delivered if and only if its change was committed, whatever process dies.
    """

    def __init__(
        self,
        database: Any,
        *,
        table: str = "rmq_transactions",
        keep: float | timedelta = timedelta(days=7),
        clock: Clock | None = None,
    ) -> None:
        """Take the database in which checks look: a SQLAlchemy ``Engine``, or a function that opens a connection.

        Raises:
            ConfigError: ``database`` is neither, the table's name would need quotes, or ``keep`` is not a duration.
        """
        check_database(database)
        self._database = database
        self._table = check_name(table)
        self._keep_ms = to_milliseconds("keep", keep)
        self._clock = clock

    @contextmanager
    def transaction(self, producer: TransactionProducer, message: Message, session: Any) -> Iterator[OpenTransaction]:
        """Send a half message, then run the block in a transaction of ``session`` that also writes the state.

        ``session`` is a SQLAlchemy ``Session`` or ``Connection``, Django's ``connection``, or a DB-API connection,
        without an open transaction or atomic block. Leaving the block commits both. An exception, or
        `OpenTransaction.rollback`, rolls both back; it propagates. If the outcome of the database's commit is unknown
        because it raised, or the block has committed before it raised, the broker asks `check`, and the error
        propagates too.

        Raises:
            ConfigError: The session has an open transaction, or commits each statement; nothing is sent. Or the block
                has rolled its transaction back, or gone on after an error that ended it; nothing is committed since.
            ClientError: The half message could not be stored; the block does not run.
            TransactionRefusedError: A transaction with this message's id has ended before; the block does not run.
            TypeError: The producer is not a `TransactionProducer`; nothing is sent.
        """
        if not isinstance(producer, TransactionProducer):
            raise wrong_kind("producer", producer, "a TransactionProducer")
        link = Link(session)
        link.check_can_begin()
        link.rollback()  # SQLAlchemy has begun a transaction to show its connection
        failure: Exception | None = None
        with producer.transaction(message) as opened:
            transaction_id, keeps = opened.sent.message_id, False
            try:
                link.begin()
                self._write_first(link, transaction_id)
                yield opened
                if opened.state is not TransactionState.ROLLBACK:
                    self._check_state(link, transaction_id)
                    keeps = True
            except Exception as error:
                failure = error
            except BaseException:
                link.rollback()
                raise
            try:
                if keeps:
                    link.commit()
                else:
                    link.rollback()
                    # The block itself may have committed.
                    is_committed = self._read(link, transaction_id) == _COMMITTED
                    link.rollback()
                    (opened.unknown if is_committed else opened.rollback)()
            except Exception as error:
                opened.unknown()
                failure = failure or error
        if failure is not None:
            raise failure

    def _check_state(self, link: Link, transaction_id: str) -> None:
        """Refuse to commit after the block unless the state still stands in the transaction that is open."""
        if link.status() is TransactionStatus.ABORTED:
            raise ConfigError(
                f"transaction {transaction_id}: the block has gone on after an error of the database, which undoes its "
                "state too: let the error propagate, or run a statement that may fail in a savepoint"
            )
        if self._read(link, transaction_id) != _COMMITTED:
            raise ConfigError(
                f"transaction {transaction_id}: a rollback in the block, or a deadlock after which it went on, has "
                "undone its state too: use a savepoint, or open another session"
            )

    def check(self, message: CheckedMessage) -> TransactionState:
        """Return the state of a transaction; one without a row is rolled back for good.

        Waits for a local transaction that is running, as long as the database waits for a row; then, and if the
        database can't be reached, the state is UNKNOWN, and the broker asks again.
        """
        connection = None if hasattr(self._database, "dialect") else self._database()
        try:
            with linked(connection or self._database) as link:
                try:
                    return self._state(link, message.message_id)
                finally:
                    link.rollback()
        except Exception as error:
            if not is_temporary_error(error):
                raise
            _log.warning(
                "transaction %(message_id)s: its state can't be read, and the broker asks again: %(error)s",
                message_id=message.message_id,
                error=error,
            )
            return TransactionState.UNKNOWN
        finally:
            if connection is not None:
                connection.close()

    def _state(self, link: Link, transaction_id: str) -> TransactionState:
        state = self._read(link, transaction_id)
        if state is None:
            link.rollback()  # A later SELECT of this transaction would not see rows of others.
            if self._write(link, transaction_id, _ROLLED_BACK):
                link.commit()
                return TransactionState.ROLLBACK
            state = self._read(link, transaction_id)
        return TransactionState.COMMIT if state == _COMMITTED else TransactionState.ROLLBACK

    def _read(self, link: Link, transaction_id: str) -> int | None:
        """Return the state in the row of a transaction, None if there is no row."""
        rows = link.execute(f"SELECT state FROM {self._table} WHERE transaction_id = :id", id=transaction_id).rows
        return int(rows[0][0]) if rows else None

    def _write_first(self, link: Link, transaction_id: str) -> None:
        """Insert the row of a local transaction; refuse it if there is one."""
        if not self._write(link, transaction_id, _COMMITTED):
            is_committed = self._read(link, transaction_id) == _COMMITTED
            what = "it was committed before" if is_committed else "a check has rolled it back before"
            raise TransactionRefusedError(_TRANSACTION_REFUSED, f"transaction {transaction_id}: {what}")

    def _write(self, link: Link, transaction_id: str, state: int) -> bool:
        """Insert the row of a transaction; return False, with nothing open, if there is one."""
        insert = (
            f"INSERT INTO {self._table} (transaction_id, state, expires_timestamp_ms) VALUES (:id, :state, :expires)"
        )
        row = {"id": transaction_id, "state": state, "expires": self._now_ms() + self._keep_ms}
        return link.insert_first(insert, row, lambda: self._read(link, transaction_id) is not None)

    def _now_ms(self) -> int:
        return (self._clock or default_clock()).now_ms()

    def purge(self, connection: Any) -> int:
        """Delete the rows that are older than ``keep``, a thousand in each transaction; return their number.

        ``connection`` is one of those that `purge_messages` takes.
        """
        return purge_expired(connection, self._table, "transaction_id", self._now_ms())
