"""What a process does that ``test_kills.py`` kills while it works."""

from __future__ import annotations

import os
import random
import sqlite3
from contextlib import closing, suppress
from typing import Any

import sqlalchemy

from librmq import Broker, ConsumeFrom, PushConsumer, TransactionProducer
from librmq.clock import Clock, ManualClock, SystemClock
from librmq.dedup import DedupListener
from librmq.idempotence._server_stores import RedisDedupStore, SqlDedupStore
from librmq.idempotence._transactional_tables import LocalTransactions, transactional
from librmq.idempotence.outbox import OutboxSender
from librmq.idempotence.stores import DedupStore, SqliteDedupStore
from librmq.listener import DeadLetter, ReconsumeLater
from librmq.message.message import Message


class Delivery(Message):
    """Return a message as a consumer would deliver it."""

    __slots__ = ()

    @property
    def unique_key(self) -> str | None:
        return self.properties["UNIQ_KEY"]

    @property
    def message_id(self) -> str:
        return self.properties["UNIQ_KEY"]


def open_store(name: str, url: str) -> DedupStore:
    if name == "sqlite":
        return SqliteDedupStore(url, timeout=60)
    if name == "redis":
        import redis

        return RedisDedupStore(redis.Redis.from_url(url))
    return SqlDedupStore(url)


def effect(path: str, group: str, name: str) -> None:
    """Append a row to a file that survives all processes."""
    with closing(sqlite3.connect(path, timeout=60, isolation_level=None)) as connection:
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute("INSERT INTO effects VALUES (?, ?)", (group, name))


class Guarded:
    """Writes guarded effects to a file."""

    def __init__(self, store: str, url: str, effects: str, group: str, clock: Clock) -> None:
        self.guard = DedupListener(
            lambda message: effect(effects, group, message.unique_key),
            open_store(store, url),
            group=group,
            clock=clock,
            when_store_fails="retry",
        )

    def deliver(self, name: str) -> None:
        self.guard(Delivery("orders", b"x", unique_key=name))

    def close(self) -> None:
        store: Any = self.guard.store
        (store.client if isinstance(store, RedisDedupStore) else store).close()


class Stepped(Guarded):
    """Writes three effects for each message, each in a step of its own."""

    def __init__(self, store: str, url: str, effects: str, group: str, clock: Clock) -> None:
        super().__init__(store, url, effects, group, clock)

        def consume(message: Delivery) -> None:
            for number in range(3):
                with self.guard.step(f"step {number}") as first:
                    if first:
                        effect(effects, group, str(3 * int(message.unique_key or 0) + number))

        self.guard.listener = consume


class Transactional:
    """Writes effects to the database of the message table."""

    def __init__(self, store: str, url: str, effects: str, group: str, clock: Clock) -> None:
        self.engine = sqlalchemy.create_engine(url)
        self.group = group

    def deliver(self, name: str) -> None:
        message = Delivery("orders", b"x", unique_key=name)
        with self.engine.connect() as connection, transactional(connection, message, group=self.group) as first:
            if first:
                insert = sqlalchemy.text("INSERT INTO effects (name) VALUES (:name)")
                connection.execute(insert, {"name": f"{self.group}/{name}"})

    def close(self) -> None:
        self.engine.dispose()


class Unguarded(Guarded):
    """Consumes without a guard when the store can't be reached, which a dead connection or a conflict does not show."""

    def __init__(self, store: str, url: str, effects: str, group: str, clock: Clock) -> None:
        super().__init__(store, url, effects, group, clock)
        self.guard = DedupListener(self.guard.listener, self.guard.store, group=group, clock=clock)


class Disturbed(Transactional):
    """Writes effects in blocks that swallow errors: expected duplicate keys, deadlocks, and dead connections."""

    def __init__(self, store: str, url: str, effects: str, group: str, clock: Clock) -> None:
        super().__init__(store, url, effects, group, clock)
        self.faults = random.Random(os.getpid())
        self.is_calm = isinstance(clock, ManualClock)

    def deliver(self, name: str) -> None:
        message = Delivery("orders", b"x", unique_key=name)
        with self.engine.connect() as connection, transactional(connection, message, group=self.group) as first:
            if first:
                self.change(connection, name)

    def change(self, connection: Any, name: str) -> None:
        self.disturb(connection)
        insert = sqlalchemy.text("INSERT INTO effects (name) VALUES (:name)")
        connection.execute(insert, {"name": f"{self.group}/{name}"})
        self.disturb(connection)

    def disturb(self, connection: Any) -> None:
        """Do what can fail, and go on."""
        fault = 9 if self.is_calm else self.faults.randrange(10)
        statements: list[str] = []
        if fault == 0:
            statements = ["INSERT INTO accounts VALUES ('taken', 0)"]
        elif fault in (1, 2):
            accounts = ["left", "right"][:: 1 if fault == 1 else -1]
            statements = [f"UPDATE accounts SET balance = balance + 1 WHERE id = '{account}'" for account in accounts]
        elif fault == 3:
            raise ValueError("the block fails")
        with suppress(sqlalchemy.exc.DBAPIError):
            for statement in statements:
                connection.execute(sqlalchemy.text(statement))


class Ending(Disturbed):
    """Writes two halves of each effect in blocks that end their transaction between them; notes dead letters."""

    def __init__(self, store: str, url: str, effects: str, group: str, clock: Clock) -> None:
        super().__init__(store, url, effects, group, clock)
        self.effects = effects

    def deliver(self, name: str) -> None:
        try:
            super().deliver(name)
        except DeadLetter:
            effect(self.effects, self.group, name)

    def change(self, connection: Any, name: str) -> None:
        insert = sqlalchemy.text("INSERT INTO effects (name) VALUES (:name)")
        connection.execute(insert, {"name": f"{self.group}/{name}a"})
        if not self.is_calm:
            self.end(connection)
        connection.execute(insert, {"name": f"{self.group}/{name}b"})

    def end(self, connection: Any) -> None:
        """Roll back or commit, by a call or by a statement; a process that dies after a commit leaves half of a block.

        On PostgreSQL that is not noticed, so there nothing is committed.
        """
        fault = self.faults.randrange(8)
        base = self.engine.dialect.name
        if fault == 0:
            connection.rollback()
        elif fault == 1:
            connection.execute(sqlalchemy.text("ROLLBACK"))
        elif fault == 2 and base != "postgresql":
            connection.commit()
        elif fault == 3 and base == "mysql":
            connection.execute(sqlalchemy.text("CREATE TABLE IF NOT EXISTS committing (id INTEGER)"))
        if self.faults.randrange(4) == 0:
            raise ValueError("the block fails")


class Announced(Disturbed):
    """Sends half messages to a broker of its own, changes the database, and writes what is delivered to the file."""

    def __init__(self, store: str, url: str, effects: str, group: str, clock: Clock) -> None:
        super().__init__(store, url, effects, group, clock)
        self.local = LocalTransactions(self.engine)
        self.broker = Broker.temporary()
        self.producer = TransactionProducer(self.broker, "shop", self.local.check)
        self.consumer = PushConsumer(self.broker, "billing", consume_from=ConsumeFrom.FIRST)
        self.consumer.subscribe("orders", lambda message: effect(effects, group, message.body.decode()))
        self.consumer.start()
        self.count = 0

    def deliver(self, name: str) -> None:
        self.count += 1
        name = f"{name}/{os.getpid()}-{self.count}"
        message = Message("orders", f"{self.group}/{name}".encode())
        with self.engine.connect() as connection, self.local.transaction(self.producer, message, connection):
            self.change(connection, name)

    def close(self) -> None:
        self.broker.join(30)
        self.consumer.shutdown()
        self.broker.close()
        super().close()


class Sender:
    """Sends the messages of an outbox to the file."""

    def __init__(self, store: str, url: str, effects: str, group: str, clock: Clock) -> None:
        self.effects = effects
        self.group = group
        self.engine = sqlalchemy.create_engine(url)
        self.sender = OutboxSender(self.engine, self, table=group, clock=clock)
        self.clock = clock

    def send(self, message: Message) -> None:
        effect(self.effects, self.group, message.body.decode())
        print("sent", flush=True)

    def deliver(self, name: str) -> None:
        self.sender.run_due(self.clock.now_ms())

    def close(self) -> None:
        self.engine.dispose()


MODES: dict[str, Any] = {"guarded": Guarded, "stepped": Stepped, "transactional": Transactional, "outbox": Sender}
MODES |= {"unguarded": Unguarded, "disturbed": Disturbed, "announced": Announced}
MODES |= {"ending": Ending}


def work(mode: str, store: str, url: str, effects: str, group: str, seed: int, count: int) -> None:
    """Consume messages 0 to ``count`` − 1 repeatedly, in an order of its own, and print a line for each."""
    consumer = MODES[mode](store, url, effects, group, SystemClock())
    order = random.Random(seed)
    names = [str(number) for number in range(count)]
    while True:
        order.shuffle(names)
        for name in names:
            with suppress(ReconsumeLater, ValueError, sqlalchemy.exc.SQLAlchemyError):  # a ConfigError is a ValueError
                consumer.deliver(name)
            print(name, flush=True)
