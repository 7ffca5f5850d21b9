"""The state table of local transactions, beside the naive ways to answer a check."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy
from sqlalchemy.orm import Session

from librmq import Broker, ManualRunner, Message, TransactionProducer, TransactionState
from librmq.clock import ManualClock
from librmq.errors import ConfigError, TransactionRefusedError
from librmq.idempotence import LocalTransactions
from librmq.idempotence._connections import Link
from librmq.idempotence._sessions import link_to
from tests.budget import many
from tests.idempotence.conftest import DATABASES, DRIVERS, Database

KINDS = ("driver", "session", "connection")
everywhere = pytest.mark.parametrize(("base", "kind"), [(base, kind) for base in DATABASES for kind in KINDS])

_orders = itertools.count()


class Crash(BaseException):
    """The process dies here."""


@contextmanager
def opened(place: Database, kind: str) -> Iterator[Any]:
    """Give a new connection; a process that dies closes it."""
    with ExitStack() as stack:
        if kind == "session":
            yield stack.enter_context(Session(place.engine))
        elif kind == "connection":
            yield stack.enter_context(place.engine.connect())
        else:
            connection = place.connect()
            stack.callback(connection.close)
            yield connection


class Shop:
    """A broker, a database, and producers that die and start again."""

    def __init__(self, place: Database) -> None:
        self.place = place
        self.local = LocalTransactions(place.engine)
        self.runner = ManualRunner()
        self.broker = Broker.temporary(runner=self.runner)
        self.producer = TransactionProducer(self.broker, "shop", self.local.check)
        self.name = f"order-{next(_orders)}"

    def insert(self, session: Any) -> None:
        link_to(session).execute("INSERT INTO effects (name) VALUES (:name)", name=self.name)

    def settle(self) -> None:
        """Let the broker ask about open transactions."""
        self.runner.advance(180_000)

    @property
    def outcome(self) -> tuple[int, int]:
        """The numbers of committed changes and of delivered messages."""
        return self.place.effects(self.name), len(list(self.broker.messages("orders")))

    def __enter__(self) -> Shop:
        return self

    def __exit__(self, *_: object) -> None:
        self.broker.close()


@pytest.fixture
def shop(database: Callable[[str], Database], base: str) -> Iterator[Shop]:
    with Shop(database(base)) as shop:
        yield shop


@everywhere
def test_change_and_message_come_together(shop: Shop, kind: str) -> None:
    with opened(shop.place, kind) as session, shop.local.transaction(shop.producer, message(), session):
        shop.insert(session)
    assert shop.outcome == (1, 1)
    with opened(shop.place, kind) as session:
        with suppress(ZeroDivisionError), shop.local.transaction(shop.producer, message(), session):
            shop.insert(session)
            raise ZeroDivisionError
        with shop.local.transaction(shop.producer, message(), session) as transaction:
            shop.insert(session)
            transaction.rollback()
    shop.settle()
    assert shop.outcome == (1, 1)


def message() -> Message:
    return Message("orders", b"one coat")


CALLS = {
    "half": (TransactionProducer, "_send_half"),
    "row": (LocalTransactions, "_write"),
    "change": (Shop, "insert"),
    "database's commit": (Link, "commit"),
    "end": (TransactionProducer, "_end_transaction"),
}


@many
@pytest.mark.parametrize("base", DATABASES)
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("call", CALLS)
def test_a_crash_at_any_call(shop: Shop, call: str, before: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process dies before or after each call that leaves it; the broker asks another producer."""
    owner, name = CALLS[call]
    call_through = getattr(owner, name)

    def crash(*arguments: Any, **more: Any) -> None:
        if not before:
            call_through(*arguments, **more)
        raise Crash

    with monkeypatch.context() as patch, suppress(Crash), opened(shop.place, "driver") as session:
        patch.setattr(owner, name, crash)
        with shop.local.transaction(shop.producer, message(), session):
            shop.insert(session)
    shop.settle()
    is_committed = call == "end" or (call == "database's commit" and not before)
    assert shop.outcome == ((1, 1) if is_committed else (0, 0))


@pytest.mark.parametrize("base", DATABASES)
@pytest.mark.parametrize("is_done", [True, False])
def test_a_commit_of_unknown_outcome(shop: Shop, is_done: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection breaks during the commit; only the database has the outcome."""

    def commit(link: Link) -> None:
        (link.connection.commit if is_done else link.connection.rollback)()
        raise OSError("connection reset")

    def change() -> None:
        with opened(shop.place, "driver") as session, shop.local.transaction(shop.producer, message(), session):
            monkeypatch.setattr(Link, "commit", commit)
            shop.insert(session)

    with pytest.raises(OSError, match="connection reset"):
        change()
    monkeypatch.undo()
    assert shop.outcome == (int(is_done), 0)
    shop.settle()
    assert shop.outcome == (int(is_done), int(is_done))


by_driver = pytest.mark.parametrize(
    ("base", "driver", "kind"), [(base, driver, kind) for base, driver in DRIVERS for kind in KINDS]
)


@by_driver
def test_a_rollback_in_the_block_after_which_a_check_decides(shop: Shop, base: str, driver: str, kind: str) -> None:
    """A check takes the place of the row that a rollback, or a deadlock, has undone."""
    with shop.place.session(driver, kind) as session:

        def change() -> None:
            with shop.local.transaction(shop.producer, message(), session):
                shop.insert(session)
                session.rollback()
                shop.settle()
                shop.insert(session)

        with pytest.raises(ConfigError, match="undone its state"):
            change()
    shop.settle()
    assert shop.outcome == (0, 0)


@pytest.mark.parametrize("base", DATABASES)
def test_another_constraint_is_no_earlier_decision(shop: Shop, base: str) -> None:
    """An application has added a column: nothing is decided, and nothing is lost."""
    table = shop.name.replace("-", "_")
    columns = "transaction_id VARCHAR(255) PRIMARY KEY, state SMALLINT, expires_timestamp_ms BIGINT"
    shop.place.run(f"CREATE TABLE {table} ({columns}, tenant VARCHAR(9) DEFAULT 'none' UNIQUE)")
    shop.place.run(f"INSERT INTO {table} (transaction_id, state, expires_timestamp_ms) VALUES ('', 1, 1)")
    shop.local = LocalTransactions(shop.place.engine, table=table)
    with (
        opened(shop.place, "driver") as session,
        pytest.raises(Exception, match="tenant"),
        shop.local.transaction(shop.producer, message(), session),
    ):
        raise AssertionError("begun")
    with pytest.raises(Exception, match="tenant"):
        shop.local.check(next(iter(shop.broker.messages("RMQ_SYS_TRANS_HALF_TOPIC"))))  # type: ignore[arg-type]


@pytest.mark.parametrize("base", ["sqlite"])
def test_a_transaction_ends_once(shop: Shop) -> None:
    with opened(shop.place, "driver") as session:
        with shop.local.transaction(shop.producer, Message("orders", b"x", unique_key=shop.name), session):
            shop.insert(session)
        with (
            pytest.raises(TransactionRefusedError, match="it was committed before"),
            shop.local.transaction(shop.producer, Message("orders", b"x", unique_key=shop.name), session),
        ):
            raise AssertionError("begun")
    shop.settle()
    assert shop.outcome == (1, 1)


@pytest.mark.parametrize("base", DATABASES)
def test_a_check_before_the_row_decides(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    write = LocalTransactions._write

    def write_late(*arguments: Any) -> bool:
        monkeypatch.undo()
        shop.settle()
        return write(*arguments)

    monkeypatch.setattr(LocalTransactions, "_write", write_late)
    with (
        opened(shop.place, "driver") as session,
        pytest.raises(TransactionRefusedError, match="a check has rolled it back"),
        shop.local.transaction(shop.producer, message(), session),
    ):
        raise AssertionError("begun")
    shop.settle()
    assert shop.outcome == (0, 0)


@pytest.mark.parametrize("base", ["sqlite"])
def test_a_check_that_cannot_read(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    """A database that is locked is asked again later."""
    with (
        pytest.raises(Crash),
        opened(shop.place, "driver") as session,
        shop.local.transaction(shop.producer, message(), session),
    ):
        raise Crash
    url = shop.place.engine.url
    shop.local._database = sqlalchemy.create_engine(url, connect_args={"timeout": 0})
    with shop.place.engine.connect() as writer:
        writer.exec_driver_sql("BEGIN IMMEDIATE")
        shop.settle()
        assert list(shop.broker.messages("RMQ_SYS_TRANS_OP_HALF_TOPIC")) == []
    assert "its state can't be read" in caplog.text
    shop.settle()
    assert len(list(shop.broker.messages("RMQ_SYS_TRANS_OP_HALF_TOPIC"))) == 1
    assert shop.outcome == (0, 0)
    shop.local._database.dispose()


@pytest.mark.parametrize("base", ["sqlite"])
def test_what_is_refused(shop: Shop) -> None:
    for producer in (None, object()):
        with (
            opened(shop.place, "driver") as session,
            pytest.raises(TypeError, match="producer: expected a TransactionProducer"),
            shop.local.transaction(producer, message(), session),  # type: ignore[arg-type]
        ):
            raise AssertionError("begun")
    with opened(shop.place, "driver") as session:
        shop.insert(session)
        with (
            pytest.raises(ConfigError, match="no open transaction"),
            shop.local.transaction(shop.producer, message(), session),
        ):
            raise AssertionError("begun")
        session.rollback()
        session.isolation_level = None
        with (
            pytest.raises(ConfigError, match="without autocommit"),
            shop.local.transaction(shop.producer, message(), session),
        ):
            raise AssertionError("begun")
    assert list(shop.broker.messages("RMQ_SYS_TRANS_HALF_TOPIC")) == []
    with closing(shop.place.connect()) as connection:
        for database in ("sqlite:///shop.db", connection):
            with pytest.raises(ConfigError, match="expected an Engine or a function"):
                LocalTransactions(database)
    with pytest.raises(ConfigError, match="letters, digits"):
        LocalTransactions(shop.place.engine, table="my table")


@pytest.mark.parametrize("base", DATABASES)
def test_old_rows_are_purged(shop: Shop) -> None:
    clock = ManualClock()
    local = LocalTransactions(shop.place.connect, keep=timedelta(days=5), clock=clock)
    with opened(shop.place, "connection") as session:
        local.purge(session)
        with local.transaction(shop.producer, message(), session):
            pass
        assert local.purge(session) == 0
        clock.advance(days=5)
        assert local.purge(session) == 1


def test_old_rows_are_purged_by_later_transactions(database: Callable[[str], Database]) -> None:
    """The table grows no further, though the application never purges it; the rows of a check go too."""
    place = database("sqlite")
    with Shop(place) as shop, opened(place, "driver") as session:
        session.execute("INSERT INTO rmq_transactions VALUES ('of a check', 2, 1)")
        session.commit()
        for _ in range(3_000):
            with shop.local.transaction(shop.producer, message(), session):
                pass
            if not session.execute("SELECT 1 FROM rmq_transactions WHERE expires_timestamp_ms = 1").fetchall():
                break
        else:
            raise AssertionError("an old row is still there")
        assert session.execute("SELECT COUNT(*) FROM rmq_transactions").fetchone()[0] > 0


# --- naive ways to answer a check


class Naive(Shop):
    """A shop that crashes after each step of a naive way; ``way`` is a generator of steps."""

    def __init__(self, place: Database, way: Callable[[Naive], Iterator[None]], check: Callable[[Naive], bool]) -> None:
        self.memory: set[str] = set()
        super().__init__(place)
        self.producer.shutdown()
        self.way = way
        state = {True: TransactionState.COMMIT, False: TransactionState.ROLLBACK}
        self.producer = TransactionProducer(self.broker, "shop", lambda _: state[check(self)])

    def committed(self, table: str) -> bool:
        return bool(self.place.run(f"SELECT 1 FROM {table} WHERE name = :name", name=self.name))

    def outcome_after(self, steps: int) -> tuple[int, int]:
        """Die after this many steps, start again, and let the broker ask."""
        way = self.way(self)
        with suppress(Crash), self.producer.transaction(message()) as transaction:
            for number, _ in enumerate(way):
                if number == steps:
                    self.memory.clear()
                    raise Crash
                if number == 0 and steps == -1:  # slow: the broker asks in the middle
                    self.settle()
            transaction.unknown()
        self.settle()
        return self.outcome


def remembered(shop: Naive) -> Iterator[None]:
    """Keep the state in memory."""
    yield
    shop.place.run("INSERT INTO effects (name) VALUES (:name)", name=shop.name)
    shop.memory.add(shop.name)
    yield


def in_two_transactions(shop: Naive) -> Iterator[None]:
    """Commit the state after the change."""
    yield
    shop.place.run("INSERT INTO effects (name) VALUES (:name)", name=shop.name)
    yield
    shop.place.run("INSERT INTO accounts (id, balance) VALUES (:name, 1)", name=shop.name)
    yield


def read_without_a_row(shop: Naive) -> Iterator[None]:
    """Take a missing change for a rollback, although it can still come."""
    yield
    shop.place.run("INSERT INTO effects (name) VALUES (:name)", name=shop.name)
    yield


NAIVE: dict[str, tuple[Any, Callable[[Naive], bool], int]] = {
    "in memory": (remembered, lambda shop: shop.name in shop.memory, 1),
    "in two transactions": (
        in_two_transactions,
        lambda shop: bool(shop.place.run("SELECT 1 FROM accounts WHERE id = :name", name=shop.name)),
        1,
    ),
    "without a row": (read_without_a_row, lambda shop: shop.committed("effects"), -1),
}


@pytest.mark.parametrize("naive", NAIVE)
def test_naive_checks_lose_the_message(database: Callable[[str], Database], naive: str) -> None:
    """The change is committed, and no consumer hears of it."""
    way, check, steps = NAIVE[naive]
    shop = Naive(database("sqlite"), way, check)
    with shop:
        assert shop.outcome_after(steps) == (1, 0)
