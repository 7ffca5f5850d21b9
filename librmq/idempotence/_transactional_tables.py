"""Tables that an application writes in its own transaction: of consumed messages, and of local transactions.

::

    with transactional(session, message, group="billing") as first:
        if first:
            session.execute(...)        # commits with the record, or not at all

The transaction inserts the record of the message first. A second delivery waits for that row. If the first commits, the
second finds the message consumed; if the first rolls back or dies, the second proceeds. So the effect happens once in
this database, as long as the record is kept. Other people's sessions can end the transaction inside the block:
`Transactional` tells. ``docs/dedup.md`` has the conditions.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import lru_cache
from threading import get_ident
from types import TracebackType
from typing import Any, Final, NamedTuple

from librmq.client import CheckedMessage, OpenTransaction, TransactionProducer
from librmq.clock import Clock, default_clock
from librmq.config import wrong_kind
from librmq.errors import ConfigError, DedupStoreBusyError, TransactionRefusedError
from librmq.idempotence._connections import ENDED_INSIDE, Link
from librmq.idempotence._drivers import IN_ABORTED_TRANSACTION, TransactionStatus, error_code, is_temporary_error
from librmq.idempotence._sessions import check_database, link_to, linked
from librmq.idempotence._sqltables import check_name, purge_expired, purge_now_and_then
from librmq.idempotence.stores import KEEP_CONSUMED, dedup_key, to_milliseconds, unique_id
from librmq.listener import DeadLetter
from librmq.message import Message
from librmq.protocol import TransactionState
from librmq.runtime.event_log import EventLog

_KEEP_MS: Final = to_milliseconds("keep", KEEP_CONSUMED)


def transactional(  # noqa: PLR0913 (each is a keyword, and most callers give one)
    session: Any,
    message: Any,
    *,
    group: str,
    application: str = "",
    key: Callable[[Any], str | None] = unique_id,
    table: str = "rmq_messages",
    keep: float | timedelta = KEEP_CONSUMED,
    clock: Clock | None = None,
    join: bool = False,
) -> Transactional:
    """Return a context manager that yields whether ``message`` is delivered for the first time.

    ``session`` is a SQLAlchemy ``Session``, ``scoped_session`` or ``Connection``, a DB-API connection, or for ``async
    with`` a SQLAlchemy ``AsyncSession`` or ``AsyncConnection``, without an open transaction; or Django's
    ``connection``, in whose atomic blocks this one is a savepoint. Leaving the block commits; an exception rolls back
    and propagates. With ``join`` the block is a savepoint in the transaction that the caller has begun, and ends:
    acknowledge the message after its commit.

    ``key``, ``group`` and ``application`` mean the same as for `librmq.dedup.DedupListener`; without a key every
    delivery counts as the first. `librmq.idempotence._sqltables.upgrade_tables` creates ``table``. Records that are
    older than ``keep`` are deleted now and then by later blocks; with your own ``clock`` call `purge_messages`.

    Errors of the database's driver propagate, and the message is delivered again. As thread-safe as the session, which
    can be in the block of one thread or task at a time.

    Raises:
        ConfigError: An argument is refused; or, at the beginning of the block, the session has an open transaction, or
            none with ``join``, or commits each statement, or is in another thread's block; or, at its end, the
            transaction has ended inside: the block has rolled it back, or has gone on after an error by which the
            database did. The error says whether anything of the block may be kept.
        DeadLetter: An earlier delivery was committed in part, and did not end.
    """
    if not group:
        raise ConfigError("group: expected the consumer group's name, found none")
    check_name(table)
    if not callable(key):
        raise ConfigError(f"key: expected a function of a message, found {key!r:.100}")
    business_key = key(message)
    if business_key is not None and not isinstance(business_key, str):
        raise ConfigError(f"key: expected a text or None, found {business_key!r:.100}")
    now_ms = (clock or default_clock()).now_ms()
    if business_key:
        record = dedup_key(application, message.topic, group, message.tags, business_key)
        until_ms = now_ms + (_KEEP_MS if keep is KEEP_CONSUMED else to_milliseconds("keep", keep))
    else:
        record, until_ms = f"{secrets.token_hex(16)}", now_ms
    block = _new_block(Transactional)  # One is made for each message: no call of its own.
    block._session = session
    block._table = table
    block._key = record
    block._joins = join
    block._until_ms = until_ms
    block._now_ms = now_ms if clock is None else None
    return block


_BEGUN: Final = 1 << 62
"""The least ``expires_timestamp_ms`` of a record whose block has begun, or was committed without its end."""
_TOKEN_BITS: Final = 60
_blocks = itertools.count()
_new_block: Final = object.__new__
_ANSWER: Final = 2_000_000_000
"""Least outcome of MySQL's INSERT, which comes back as an id: above the rows' own numbers, within what drivers take."""


class _Statements(NamedTuple):
    """The statements of a table of records, in the words of a database."""

    insert: str
    """It inserts the record, or leaves the one that is there."""
    read: str
    finish: str
    is_ours: str
    mark: str


@lru_cache(maxsize=64)
def record_statements(table: str, dialect: str) -> _Statements:
    """Return the statements of a table of records.

    ``dialect`` is "" where only the usual INSERT is known, and "reported" where PostgreSQL shows a transaction's end.
    """
    insert = f"INSERT INTO {table} (dedup_key, expires_timestamp_ms) VALUES (:key, :number)"
    read = f"SELECT expires_timestamp_ms FROM {table} WHERE dedup_key = :key"
    if dialect in ("sqlite", "postgresql"):
        insert += " ON CONFLICT (dedup_key) DO NOTHING"
    elif dialect == "mysql":
        # The outcome comes back as the last inserted id: found rows count as changed ones on some connections.
        insert += (
            f" ON DUPLICATE KEY UPDATE dedup_key = IF(LAST_INSERT_ID({_ANSWER} + CASE WHEN dedup_key <> :key THEN 2 "
            f"WHEN expires_timestamp_ms >= {_BEGUN} THEN 1 ELSE 0 END) > 0, dedup_key, dedup_key)"
        )
    elif dialect == "reported":
        # A row that another transaction commits while this one waits for it is in neither part of the union.
        insert = (
            f"WITH written AS ({insert} ON CONFLICT (dedup_key) DO NOTHING "
            "RETURNING set_config('application_name', :name, true), CAST(xmin AS text) AS writer) "
            f"SELECT writer, 0 FROM written UNION ALL SELECT NULL, expires_timestamp_ms FROM {table} "
            "WHERE dedup_key = :key"
        )
    return _Statements(
        insert,
        read,
        f"UPDATE {table} SET expires_timestamp_ms = :expires_at_ms WHERE dedup_key = :key "
        "AND expires_timestamp_ms = :number",
        f"SELECT 1 FROM {table} WHERE dedup_key = :key AND CAST(xmin AS text) = :writer",
        f"UPDATE {table} SET expires_timestamp_ms = :number WHERE dedup_key = :key AND CAST(xmin AS text) = :writer",
    )


class Transactional:
    """One transaction of `transactional`; ``with`` returns True at the first delivery of a message.

    It writes the record, and tells at the end whether the transaction is still that of the record. On PostgreSQL a
    setting that the INSERT makes for the transaction names it. The server reports the setting by itself, and also that
    the transaction's end, or a rollback to a savepoint before it, has undone it, so the answer costs no statement.
    Elsewhere statements such as those that change tables commit by themselves, or nothing is reported. There the record
    is inserted as begun, and finished at the end of the block: a committed record that was not finished shows that a
    part of the block was committed.
    """

    _session: Any
    _writer: Any
    _table: str
    _key: str
    _joins: bool
    _until_ms: int
    _now_ms: int | None
    """The time by which old records are purged; None if the application does that."""

    def __enter__(self) -> bool:
        return self._begin(self._session, get_ident())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(self._session, kind is None)

    async def __aenter__(self) -> bool:
        session = self._session
        if hasattr(session, "registry"):
            session = self._session = session.registry()  # of an async_scoped_session
        if not hasattr(session, "run_sync"):
            link_to(session)  # This refuses a driver's asynchronous connection.
            raise ConfigError(f"{type(session).__name__} needs `with`, not `async with`")
        first: bool = await session.run_sync(self._begin, asyncio.current_task())
        return first

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.run_sync(self._end, kind is None)

    def _begin(self, session: Any, worker: object) -> bool:
        link = self._link = link_to(session)
        link.enter_block(worker)
        try:
            if self._joins:
                link.join()
            else:
                link.begin_first()
            try:
                number = self._write(link)
            except BaseException:
                with suppress(Exception):  # The first error is the one to see.
                    link.rollback()
                raise
        except BaseException:
            link.leave_block()
            raise
        self._is_first = not number
        return not number

    def _end(self, _: Any, is_complete: bool) -> None:
        link, is_first = self._link, self._is_first
        try:
            if not is_complete:
                (self._undo if is_first else link.rollback)()
                return
            try:
                is_kept = self._is_kept(link) if is_first else not link.is_aborted()
                if is_kept:
                    link.commit()
            except ConfigError:  # The savepoint of the block is gone.
                with suppress(Exception):  # The first error is the one to see.
                    self._undo()
                raise
            except BaseException:  # Whether a commit that has failed was carried out is not known: the record stays.
                with suppress(Exception):
                    link.rollback()
                raise
            if not is_kept:
                part = "A part of the block may be kept, so the message becomes a dead letter"
                raise ConfigError(f"{ENDED_INSIDE}. {'Nothing of the block is kept' if self._undo() else part}")
            if is_first and self._now_ms is not None and not link.is_joined:
                purge_now_and_then(link, self._table, "dedup_key", self._key, self._now_ms)
        finally:
            link.leave_block()

    # ---- the record

    def _write(self, link: Link) -> int:
        """Write the record; return 0, or what stands in the record that is there."""
        key, dialect = self._key, link.dialect
        name = link.reported_name() if dialect == "postgresql" else None
        if name is not None:
            # It differs from that of this connection's earlier blocks. The application's own name stays readable in the
            # server's list of sessions.
            self._name = name = f"{name[:40]} librmq-{next(_blocks)}"
            self._statements = record_statements(self._table, "reported")
            rows = link.fetch(self._statements.insert, {"key": key, "number": self._until_ms, "name": name})
            self._writer, number = rows[0] if rows else (None, self._read(link))
        else:
            self._name = ""
            self._number = _BEGUN + random.getrandbits(_TOKEN_BITS)
            statements = self._statements = record_statements(self._table, dialect)
            parameters = {"key": key, "number": self._number}
            if dialect == "mysql":
                number = self._insert_on_mysql(link, parameters)
            elif dialect in ("sqlite", "postgresql"):
                number = 0 if link.change(statements.insert, parameters) == 1 else self._read(link)
            else:
                numbers: list[int | None] = [0]
                link.insert_first(statements.insert, parameters, lambda: self._finds(link, numbers))
                number = numbers[-1]
        if number is None:
            raise DedupStoreBusyError(f"{self._table}: the record {key!r} was deleted at this moment")
        if number >= _BEGUN:
            raise DeadLetter(
                f"{self._table}: an earlier delivery of the message was committed in part, because a statement of its "
                "block commits by itself, or the block has committed, and it did not end; complete the effect by hand. "
                f"The message is consumed again once the row {key!r} is deleted"
            )
        return int(number)

    def _insert_on_mysql(self, link: Link, parameters: dict[str, Any]) -> int:
        result = link.execute(self._statements.insert, **parameters)
        if result.last_id < _ANSWER:
            return 0
        if result.last_id == _ANSWER + 2:  # Another unique column of the application's has the conflict.
            link.execute(record_statements(self._table, "").insert, **parameters)
        return _BEGUN if result.last_id > _ANSWER else 1

    def _read(self, link: Link) -> int | None:
        rows = link.execute(self._statements.read, key=self._key).rows
        return int(rows[0][0]) if rows else None

    def _finds(self, link: Link, numbers: list[int | None]) -> bool:
        numbers.append(self._read(link))
        return numbers[-1] is not None

    def _is_kept(self, link: Link) -> bool:
        """Return whether the record commits with the transaction, or was committed by the block; finish it.

        Raises:
            Exception: The database does not answer.
        """
        if self._name and link.reported_name() == self._name:
            return True
        if link.dialect == "mysql":
            link.settle()
        if link.is_aborted():
            return False
        if not self._name:
            parameters = {"key": self._key, "number": self._number, "expires_at_ms": self._until_ms}
            return link.change(self._statements.finish, parameters) == 1
        # The block has set the name itself, or ended the transaction.
        try:
            return bool(link.execute(self._statements.is_ours, key=self._key, writer=self._writer).rows)
        except Exception as error:
            if error_code(error) == IN_ABORTED_TRANSACTION:
                return False
            raise

    def _undo(self) -> bool:
        """Roll back; return False if a part of the block is kept, which the record shows from now on."""
        link, has_ended, commits_each = self._link, True, False
        with suppress(Exception):  # A connection that is dead shows nothing.
            has_ended = not self._name or link.reported_name() != self._name
            commits_each = has_ended and link.commits_each()
        link.rollback()
        if link.is_joined or not (commits_each or (has_ended and self._name)):
            return True
        mark, is_kept = {"key": self._key, "number": _BEGUN}, False
        if self._name:
            with link.alone() as alone:
                is_kept = alone.execute(self._statements.mark, writer=self._writer, **mark).changed == 1
        if commits_each and not is_kept:  # What followed a rollback is kept, statement by statement.
            is_kept = True
            with suppress(Exception), link.alone() as alone:  # The record may be there.
                alone.execute(record_statements(self._table, "").insert, **mark)
        return not is_kept


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
    which must be longer than a broker keeps half messages (72 hours). Later transactions delete older rows now and
    then; with your own ``clock`` call `purge`.
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
                has rolled its transaction back, or gone on after an error that ended it; the error says whether what
                followed is kept.
            ClientError: The half message could not be stored; the block does not run.
            TransactionRefusedError: A transaction with this message's id has ended before; the block does not run.
            TypeError: The producer is not a `TransactionProducer`; nothing is sent.
        """
        if not isinstance(producer, TransactionProducer):
            raise wrong_kind("producer", producer, "a TransactionProducer")
        link = link_to(session)
        link.enter_block(get_ident())
        try:
            yield from self._transaction(producer, message, link)
        finally:
            link.leave_block()

    def _transaction(self, producer: TransactionProducer, message: Message, link: Link) -> Iterator[OpenTransaction]:
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
        if self._clock is None:
            purge_now_and_then(link, self._table, "transaction_id", transaction_id, self._now_ms())

    def _check_state(self, link: Link, transaction_id: str) -> None:
        """Refuse to commit after the block unless the state still stands in the transaction that is open."""
        if link.status() is TransactionStatus.ABORTED:
            raise ConfigError(
                f"transaction {transaction_id}: the block has gone on after an error of the database, which undoes its "
                "state too: let the error propagate, or run a statement that may fail in a savepoint"
            )
        if self._read(link, transaction_id) != _COMMITTED:
            hint = (
                ". What followed is kept, because the driver commits each statement since"
                if link.commits_each()
                else ""
            )
            raise ConfigError(
                f"transaction {transaction_id}: a rollback in the block, or a deadlock after which it went on, has "
                f"undone its state too: use a savepoint, or open another session{hint}"
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
        rows = link.execute(f"SELECT state FROM {self._table} WHERE transaction_id = :id", id=transaction_id).rows
        return int(rows[0][0]) if rows else None

    def _write_first(self, link: Link, transaction_id: str) -> None:
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
