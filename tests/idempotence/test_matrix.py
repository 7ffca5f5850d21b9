"""Sessions × what a block may do: whatever it is, the effect happens once, or the message is known as a dead letter.

A block writes a half, does what is in its name, and writes the other half; later deliveries only write. Each message is
delivered until it is acknowledged or a dead letter, and then once more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any, Final

import pytest

from librmq import Broker, ManualRunner, Message, TransactionProducer
from librmq.idempotence import LocalTransactions
from librmq.listener import DeadLetter
from tests.budget import many
from tests.idempotence.conftest import Database
from tests.idempotence.sessions import ALONE, SESSIONS, Opened
from tests.idempotence.test_listener import Delivery

DELIVERIES: Final = 4


class Failed(Exception):
    """The block has failed."""


class Block:
    """What a behaviour may use: the session, and the halves of the effect."""

    def __init__(self, opened: Opened, place: Database, name: str) -> None:
        self.opened = opened
        self.place = place
        self.name = name

    def write(self, half: str) -> None:
        self.opened.run(f"INSERT INTO effects (name) VALUES ('{self.name}-{half}')")

    def run(self, sql: str) -> Any:
        return self.opened.run(sql)

    def is_refused(self, sql: str) -> None:
        """Run a statement that fails, and go on."""
        with pytest.raises(Exception, match=r"."):
            self.run(sql)

    @property
    def scratch(self) -> str:
        return f"scratch_{self.name.replace('-', '_')}"


def between(misdeed: Callable[[Block], object], *, fails: bool = False) -> Callable[[Block], None]:
    """Return a behaviour that does something between the halves, and fails after it."""

    def behave(block: Block) -> None:
        block.write("a")
        misdeed(block)
        if fails:
            raise Failed
        block.write("b")

    return behave


def at_end(misdeed: Callable[[Block], object]) -> Callable[[Block], None]:
    def behave(block: Block) -> None:
        block.write("a")
        block.write("b")
        misdeed(block)

    return behave


def fail(_: object) -> None:
    raise Failed


def swallow_in_savepoint(block: Block) -> None:
    block.run("SAVEPOINT ours")
    swallow(block)
    block.run("ROLLBACK TO SAVEPOINT ours")


def swallow(block: Block) -> None:
    block.is_refused("INSERT INTO accounts (id, balance) VALUES ('taken', 1), ('taken', 2)")


def commit_and_roll_back(block: Block) -> None:
    block.opened.commit()
    block.write("c")
    block.opened.rollback()


def leave_unread(block: Block) -> None:
    block.unread = block.run("SELECT 1 UNION SELECT 2")  # type: ignore[attr-defined]


def execute_script(block: Block) -> None:
    driver = block.opened.driver()
    if hasattr(driver, "executescript"):
        driver.executescript("SELECT 1")
    else:
        block.opened.commit()


def create_table(block: Block) -> None:
    block.run(f"CREATE TABLE {block.scratch} (id INTEGER)")


def truncate(block: Block) -> None:
    block.run("TRUNCATE TABLE emptied")


def lock_tables(block: Block) -> None:
    block.run("LOCK TABLES effects WRITE, rmq_messages WRITE")
    block.run("UNLOCK TABLES")


def close(block: Block) -> None:
    block.opened.driver().close()


def end_by_server(block: Block) -> None:
    """End the connection as an operator does, or a restart."""
    if block.place.name == "postgresql":
        number = block.run("SELECT pg_backend_pid()").fetchone()[0]
        block.place.run(f"SELECT pg_terminate_backend({int(number)})")
    else:
        number = block.run("SELECT CONNECTION_ID()").fetchone()[0]
        block.place.run(f"KILL {int(number)}")


def roll_back_by_driver(block: Block) -> None:
    block.opened.driver().rollback()


@dataclass(frozen=True)
class Behaviour:
    act: Callable[[Block], object]
    bases: tuple[str, ...] = ("sqlite", "postgresql", "mysql")
    is_fine: tuple[str, ...] = ()
    """The databases on which the first delivery of such a block is acknowledged."""


ALL: Final = ("sqlite", "postgresql", "mysql")
SERVERS: Final = ("postgresql", "mysql")


def statement(sql: str) -> Callable[[Block], object]:
    return lambda block: block.run(sql)


BEHAVIOURS: Final = {
    "nothing": Behaviour(between(lambda _: None), is_fine=ALL),
    "fails-first": Behaviour(fail),
    "fails-between": Behaviour(between(fail)),
    "fails-last": Behaviour(at_end(fail)),
    "swallows-an-error": Behaviour(between(swallow), is_fine=("sqlite", "mysql")),
    "swallows-an-error-in-a-savepoint": Behaviour(between(swallow_in_savepoint), is_fine=ALL),
    "swallows-an-error-and-fails": Behaviour(between(swallow, fails=True)),
    "rolls-back": Behaviour(between(lambda block: block.opened.rollback())),
    "rolls-back-last": Behaviour(at_end(lambda block: block.opened.rollback())),
    "rolls-back-and-fails": Behaviour(between(lambda block: block.opened.rollback(), fails=True)),
    "rolls-back-by-sql": Behaviour(between(statement("ROLLBACK"))),
    "rolls-back-by-sql-and-chains": Behaviour(between(statement("ROLLBACK AND CHAIN")), SERVERS),
    "rolls-back-by-the-driver": Behaviour(between(roll_back_by_driver)),
    "commits": Behaviour(between(lambda block: block.opened.commit())),
    "commits-last": Behaviour(at_end(lambda block: block.opened.commit())),
    "commits-and-fails": Behaviour(between(lambda block: block.opened.commit(), fails=True)),
    "commits-by-sql": Behaviour(between(statement("COMMIT"))),
    "commits-by-sql-and-fails": Behaviour(between(statement("COMMIT"), fails=True)),
    "commits-by-sql-chains-and-fails": Behaviour(between(statement("COMMIT AND CHAIN"), fails=True), SERVERS),
    "commits-by-the-driver-and-fails": Behaviour(between(lambda block: block.opened.driver().commit(), fails=True)),
    "commits-and-rolls-back": Behaviour(between(commit_and_roll_back)),
    "commits-and-swallows": Behaviour(
        between(lambda block: (block.opened.commit(), swallow(block)))  # type: ignore[func-returns-value]
    ),
    "begins-again-and-fails": Behaviour(between(statement("START TRANSACTION"), fails=True), ("mysql",)),
    "creates-a-table": Behaviour(between(create_table)),
    "creates-a-table-and-fails": Behaviour(between(create_table, fails=True)),
    "truncates": Behaviour(between(truncate), SERVERS),
    "truncates-and-fails": Behaviour(between(truncate, fails=True), SERVERS),
    "locks-tables-and-fails": Behaviour(between(lock_tables, fails=True), ("mysql",)),
    "creates-an-index-and-fails": Behaviour(
        between(lambda block: block.run(f"CREATE INDEX {block.scratch} ON emptied (id)"), fails=True)
    ),
    "executes-a-script-and-fails": Behaviour(between(execute_script, fails=True), ("sqlite",)),
    "names-the-application": Behaviour(
        between(statement("SET application_name = 'ours'")), ("postgresql",), is_fine=("postgresql",)
    ),
    "names-the-application-and-fails": Behaviour(
        between(statement("SET application_name = 'ours'"), fails=True), ("postgresql",)
    ),
    "leaves-rows-unread": Behaviour(between(leave_unread)),
    "leaves-rows-unread-last": Behaviour(at_end(leave_unread)),
    "closes-the-connection": Behaviour(between(close)),
    "loses-the-connection": Behaviour(between(end_by_server), SERVERS),
}


ONE_BY_ONE: Final = ("peewee", "psycopg-transaction")
"""Sessions without whose own transaction each statement is committed: whether any was is not known."""


@pytest.fixture(scope="module")
def prepared(database: Callable[[str], Database]) -> Callable[[str], Database]:
    """``prepared("mysql")`` returns the database with the tables that blocks use."""
    done: set[str] = set()

    def get(base: str) -> Database:
        place = database(base)
        if base not in done:
            place.run("CREATE TABLE emptied (id INTEGER)")
            done.add(base)
        return place

    return get


def base_of(session: str) -> str:
    return session.partition("-")[0]


FEW: Final = (
    *("nothing", "fails-between", "swallows-an-error", "rolls-back", "commits-and-fails", "closes-the-connection"),
)
"""What is tried with sessions that lead to another one: only the way there is their own."""


def matrix(sessions: Iterable[str], wrappers: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return each session with each behaviour that its database has, and those that end like ``wrappers`` with few."""
    return [
        (session, behaviour)
        for session in sessions
        for behaviour in (FEW if session.endswith(wrappers) else BEHAVIOURS)
        if base_of(session) in BEHAVIOURS[behaviour].bases
    ]


WRAPPERS: Final = ("scoped", "sqlmodel", "flask")
LIKE_BLOCKS: Final = (*WRAPPERS, "connection", "psycopg2-session", "pg8000-session", "mysqlclient-session")
"""Local transactions use the same links as blocks, so that they try each driver and each library once."""


@many
@pytest.mark.parametrize(("session", "behaviour"), matrix(SESSIONS, WRAPPERS))
def test_whatever_a_block_does(prepared: Callable[[str], Database], session: str, behaviour: str, name: str) -> None:
    base = base_of(session)
    place, what, is_acknowledged, deliveries = prepared(base), BEHAVIOURS[behaviour], False, 0

    def deliver(act: Callable[[Block], object]) -> None:
        with SESSIONS[session](place) as opened:
            opened.deliver(Delivery("orders", b"x", unique_key=name), lambda inner: act(Block(inner, place, name)))

    is_dead = False
    while not is_acknowledged and not is_dead and deliveries < DELIVERIES:
        deliveries += 1
        with suppress(Exception):
            try:
                deliver(what.act if deliveries == 1 else BEHAVIOURS["nothing"].act)
                is_acknowledged = True
            except DeadLetter:
                is_dead = True
    try:
        deliver(BEHAVIOURS["nothing"].act)
    except DeadLetter:
        assert is_dead
    halves = [place.effects(f"{name}-{half}") for half in "ab"]
    if is_dead:
        assert max(halves) == 1 or (session.endswith(ONE_BY_ONE) and behaviour.startswith("rolls-back"))
    else:
        assert (is_acknowledged, halves) == (True, [1, 1])
    if base in what.is_fine:
        assert deliveries == 1


ROLLBACKS: Final = ("rolls-back-by-sql", "rolls-back-by-the-driver")
"""After them a driver that Django or psycopg2 has told to begin no transaction commits statements one by one."""


@many
@pytest.mark.parametrize(("session", "behaviour"), matrix(ALONE, LIKE_BLOCKS))
def test_whatever_a_local_transaction_does(
    prepared: Callable[[str], Database], session: str, behaviour: str, name: str
) -> None:
    """The message comes if and only if something of the block is kept: its end, or a commit inside, decides."""
    place, runner = prepared(base_of(session)), ManualRunner()
    with closing(Broker.temporary(runner=runner)) as broker:
        local = LocalTransactions(place.engine)
        producer = TransactionProducer(broker, "shop", local.check)
        failure = ""
        try:
            with (
                SESSIONS[session](place) as opened,
                local.transaction(producer, Message("orders", b"x"), opened.session),
            ):
                BEHAVIOURS[behaviour].act(Block(opened, place, name))
        except Exception as error:
            failure = str(error)
        runner.advance(180_000)
        messages = len(list(broker.messages("orders")))
    halves = [place.effects(f"{name}-{half}") for half in "ab"]
    if "What followed is kept" in failure:
        assert (messages, halves, behaviour in ROLLBACKS) == (0, [0, 1], True)
    else:
        assert messages == max(halves)
    if base_of(session) in BEHAVIOURS[behaviour].is_fine:
        assert halves == [1, 1]
