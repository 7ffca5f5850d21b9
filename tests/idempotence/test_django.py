"""Django's connection: the outbox, the message table and local transactions in blocks of ``transaction.atomic``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from typing import Any

import pytest
from django.db import DatabaseError, IntegrityError, connections
from django.db.transaction import atomic
from django.utils.connection import ConnectionProxy

from librmq import Broker, ManualRunner, Message, Outbox, OutboxSender, TransactionProducer
from librmq.errors import ConfigError
from librmq.idempotence import LocalTransactions, purge_messages, transactional, upgrade_tables
from tests.django_project import configure
from tests.idempotence.conftest import Database
from tests.idempotence.test_listener import message_of

ALIAS = "librmq_shop"
BASES = ("sqlite", "postgresql")

pytestmark = pytest.mark.parametrize("base", BASES)


@pytest.fixture
def place(
    database: Callable[[str], Database], base: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Database]:
    """Give the database to Django under the alias of these tests."""
    configure(tmp_path_factory.mktemp("django"))
    place = database(base)
    url = place.engine.url
    setting = {"ENGINE": "django.db.backends.sqlite3", "NAME": url.database}
    if base == "postgresql":
        setting = {"ENGINE": "django.db.backends.postgresql", "NAME": "postgres", "USER": "rmq", "HOST": "127.0.0.1"}
        setting["PORT"] = str(url.port)
    settings = connections.configure_settings({"default": setting})["default"]
    connections.settings[ALIAS] = settings
    yield place
    connections[ALIAS].close()
    del connections[ALIAS]
    del connections.settings[ALIAS]


@pytest.fixture(params=["connection", "proxy"])
def connection(place: Database, request: pytest.FixtureRequest) -> Any:
    """Return the connection of this thread, and what `django.db.connection` is."""
    return connections[ALIAS] if request.param == "connection" else ConnectionProxy(connections, ALIAS)


def execute(connection: Any, statement: str, name: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(statement, [name])


def insert(connection: Any, name: str) -> None:
    execute(connection, "INSERT INTO effects (name) VALUES (%s)", name)


def insert_account(connection: Any, name: str) -> None:
    execute(connection, "INSERT INTO accounts (id, balance) VALUES (%s, 1)", name)


def test_the_tables_are_created(connection: Any, name: str) -> None:
    names = {kind: f"{kind}_{name.replace('-', '_')}" for kind in ("dedup", "messages", "transactions", "outbox")}
    for _ in range(2):
        versions = upgrade_tables(connection, **names, versions="versions_" + name.replace("-", "_"))
        assert versions == dict.fromkeys(names.values(), 1)
    assert connection.get_autocommit()


# --- the outbox


def test_a_message_commits_with_the_block(connection: Any, place: Database, name: str) -> None:
    outbox = Outbox()
    with atomic(ALIAS):
        insert(connection, name)
        outbox.add(connection, Message("orders", name.encode()), order_key=name)
    with suppress(ZeroDivisionError), atomic(ALIAS):
        outbox.add(connection, Message("orders", b"never"), order_key=name)
        raise ZeroDivisionError
    with pytest.raises(ConfigError, match=r"commits each statement: use transaction.atomic\(\)"):
        outbox.add(connection, Message("orders", b"alone"), order_key=name)
    sent: list[bytes] = []

    class Producer:
        def send(self, message: Message) -> None:
            sent.append(message.body)

    OutboxSender(place.connect, Producer()).run_due(0)
    assert name.encode() in sent
    assert not {b"never", b"alone"} & set(sent)


# --- the message table


def deliver(connection: Any, name: str, fails: bool = False) -> bool:
    with transactional(connection, message_of(name), group="billing") as first:
        if first:
            insert(connection, name)
        if fails:
            raise ZeroDivisionError
    return first


def test_the_effect_happens_once(connection: Any, place: Database, name: str) -> None:
    with pytest.raises(ZeroDivisionError):
        deliver(connection, name, fails=True)
    assert place.effects(name) == 0
    assert [deliver(connection, name) for _ in range(3)] == [True, False, False]
    assert place.effects(name) == 1
    assert connection.get_autocommit()
    assert not connection.in_atomic_block
    assert purge_messages(connection, 1 << 60) >= 1
    assert deliver(connection, name)


def test_inside_an_atomic_block(connection: Any, place: Database, name: str) -> None:
    """The block is a savepoint: record and effect commit with the block around it, or not at all."""
    with suppress(ZeroDivisionError), atomic(ALIAS):
        assert deliver(connection, name)
        raise ZeroDivisionError
    assert place.effects(name) == 0
    with atomic(ALIAS):
        insert_account(connection, name)
        with suppress(ZeroDivisionError):
            deliver(connection, name, fails=True)
        assert deliver(connection, name)
        assert not deliver(connection, name)
    assert place.effects(name) == 1
    assert place.run("SELECT balance FROM accounts WHERE id = :name", name=name) == [(1,)]
    with atomic(ALIAS):
        assert not deliver(connection, name)


def swallow(connection: Any, name: str, how: str) -> None:
    """Run a statement that fails, in one of the ways of Django's applications, and go on."""
    savepoint = {"atomic": True, "save": False}.get(how)
    if savepoint is None:
        with pytest.raises(IntegrityError):
            insert_account(connection, name)
        return
    with pytest.raises(IntegrityError), atomic(ALIAS, savepoint=savepoint):
        insert_account(connection, name)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("how", ["cursor", "save", "atomic"])
def test_an_error_that_the_block_swallows(
    connection: Any, place: Database, base: str, how: str, nested: bool, name: str
) -> None:
    """Django rolls a marked block back in silence, as PostgreSQL does an aborted one; a block of its own is sound."""
    place.run("INSERT INTO accounts (id, balance) VALUES (:name, 1)", name=name)

    def consume() -> None:
        with transactional(connection, message_of(name), group="billing") as first:
            assert first
            insert(connection, name)
            swallow(connection, name, how)

    is_sound = how == "atomic" or (how == "cursor" and base == "sqlite")
    with around(nested):
        if is_sound:
            consume()
        else:
            with pytest.raises(ConfigError, match="the transaction has ended inside the block"):
                consume()
    assert place.effects(name) == int(is_sound)
    assert deliver(connection, name) is not is_sound
    assert place.effects(name) == 1


@contextmanager
def around(nested: bool) -> Iterator[None]:
    if not nested:
        yield
        return
    with atomic(ALIAS):
        yield


# --- local transactions


def test_change_and_message_come_together(connection: Any, place: Database, name: str) -> None:
    runner = ManualRunner()
    with closing(Broker.temporary(runner=runner)) as broker:
        local = LocalTransactions(partial(connections[ALIAS].copy, ALIAS))
        producer = TransactionProducer(broker, "shop", local.check)

        def change(fails: bool) -> None:
            with local.transaction(producer, Message("orders", b"x"), connection) as opened:
                insert(connection, name)
                if fails:
                    raise ZeroDivisionError
                opened.unknown()  # so that the broker asks

        change(fails=False)
        with suppress(ZeroDivisionError):
            change(fails=True)
        runner.advance(180_000)
        assert len(list(broker.messages("orders"))) == place.effects(name) == 1
        with (
            atomic(ALIAS),
            pytest.raises(ConfigError, match="expected no open transaction"),
            local.transaction(producer, Message("orders", b"x"), connection),
        ):
            raise AssertionError("begun")
        assert local.purge(connection) == 0


@pytest.mark.parametrize("how", ["cursor", "save"])
def test_a_change_that_is_undone_sends_nothing(
    connection: Any, place: Database, base: str, how: str, name: str
) -> None:
    place.run("INSERT INTO accounts (id, balance) VALUES (:name, 1)", name=name)
    runner = ManualRunner()
    with closing(Broker.temporary(runner=runner)) as broker:
        local = LocalTransactions(place.engine)
        producer = TransactionProducer(broker, "shop", local.check)
        with suppress(ConfigError, DatabaseError), local.transaction(producer, Message("orders", b"x"), connection):
            insert(connection, name)
            swallow(connection, name, how)
        runner.advance(180_000)
        is_sound = how == "cursor" and base == "sqlite"
        assert (place.effects(name), len(list(broker.messages("orders")))) == (is_sound, is_sound)
