"""How often an effect happens after each failure: every cell of the table in ``docs/dedup.md``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import Any, Final, Protocol

import pytest

from librmq.clock import ManualClock
from librmq.dedup import DedupListener
from librmq.errors import DedupStoreError
from librmq.idempotence._connections import Link
from librmq.idempotence._transactional_tables import purge_messages, transactional
from librmq.idempotence.stores import Claim, DedupRecord, DedupStore, unique_id
from librmq.listener import ReconsumeLater
from tests.budget import many
from tests.idempotence.conftest import DATABASES, Database, Place
from tests.idempotence.test_listener import Delivery
from tests.reference import CHECKOUT

GUARDED: Final = ("memory", "sqlite", "postgresql", "mysql", "redis")
"""The stores of the guard."""


def table() -> dict[str, dict[str, str]]:
    """The outcomes by event and store."""
    text = (
        (CHECKOUT / "docs" / "dedup.md").read_text("utf-8").partition("## What is guaranteed")[2].partition("\n## ")[0]
    )
    lines = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    titles, _, *rows = [[cell.strip(" *") for cell in line] for line in lines]
    assert titles[1:] == ["the guard", "transactional"]
    return {what: {**dict.fromkeys(GUARDED, guarded), "transactional": inside} for what, guarded, inside in rows}


TABLE: Final = table()


class Died(BaseException):
    """The process is dead and does nothing more."""


def business_key(message: Delivery) -> str:
    return message.keys[0]


class World(Protocol):
    """One message, its consumer, and the places of records and effects."""

    clock: ManualClock
    key: Callable[[Any], str | None]
    when_store_fails: str
    unique_key: str

    def deliver(self, fault: str = "", meanwhile: Callable[[], object] | None = None, ahead: float = 0) -> None:
        """Deliver the message; raise an error unless it is acknowledged."""
        ...

    def forget(self) -> None:
        """Let the store lose its last records, and anything that is lost with them."""
        ...

    def effects(self) -> int:
        """Return how often the effect has happened."""
        ...


class Faulty:
    """A store in which some calls fail."""

    blocking = False

    def __init__(self, store: DedupStore, fault: str) -> None:
        self.store = store
        self.fault = fault

    def claim(self, key: str, owner: str, now_ms: int, expires_at_ms: int) -> Claim:
        if self.fault == "dies before claim":
            raise Died
        if self.fault == "unreachable":
            raise DedupStoreError("unreachable")
        claim = self.store.claim(key, owner, now_ms, expires_at_ms)
        if self.fault == "claim's answer lost":
            raise DedupStoreError("answer lost")
        return claim

    def finish(self, key: str, owner: str, now_ms: int, expires_at_ms: int) -> bool:
        if self.fault == "dies before mark":
            raise Died
        if self.fault in ("unreachable", "mark not written"):
            raise DedupStoreError("unreachable")
        done = self.store.finish(key, owner, now_ms, expires_at_ms)
        if self.fault == "mark's answer lost":
            raise DedupStoreError("answer lost")
        if self.fault == "dies after mark":
            raise Died
        return done

    def release(self, key: str, owner: str, now_ms: int) -> bool:
        return self.store.release(key, owner, now_ms)

    def read(self, key: str, now_ms: int) -> DedupRecord | None:
        return self.store.read(key, now_ms)

    def purge(self, now_ms: int, limit: int) -> int:
        return self.store.purge(now_ms, limit)


class GuardedWorld:
    """A guard in front of an effect in another system."""

    def __init__(self, place: Place, name: str) -> None:
        self.place = place
        self.name = name
        self.clock = ManualClock()
        self.key: Callable[[Any], str | None] = unique_id
        self.when_store_fails = "consume"
        self.unique_key = name
        self.forgotten = 0
        self._effects = 0

    def deliver(self, fault: str = "", meanwhile: Callable[[], object] | None = None, ahead: float = 0) -> None:
        def consume(message: Delivery) -> None:
            if fault == "dies before effect":
                raise Died
            if fault == "fails before effect":
                raise ValueError
            if meanwhile is not None:
                meanwhile()
            self._effects += 1
            if fault == "fails after effect":
                raise ValueError

        clock = ManualClock(self.clock.now_ms() + round(1000 * ahead)) if ahead else self.clock
        guard = DedupListener(
            consume,
            Faulty(self.place.handle, fault),
            group=f"billing-{self.forgotten}",
            key=self.key,
            clock=clock,
            when_store_fails=self.when_store_fails,  # type: ignore[arg-type]
        )
        guard(Delivery("orders", b"x", unique_key=self.unique_key, keys=self.name))

    def forget(self) -> None:
        self.forgotten += 1  # no record with that scope exists

    def effects(self) -> int:
        return self._effects


class TransactionalWorld:
    """An effect in the same database as the message table."""

    def __init__(self, place: Database, name: str) -> None:
        self.place = place
        self.name = name
        self.clock = ManualClock()
        self.key: Callable[[Any], str | None] = unique_id
        self.when_store_fails = ""
        self.unique_key = name

    def deliver(self, fault: str = "", meanwhile: Callable[[], object] | None = None, ahead: float = 0) -> None:  # noqa: C901 (a fault each)
        if fault == "dies before claim":
            raise Died
        if fault == "unreachable":
            raise ConnectionRefusedError
        message = Delivery("orders", b"x", unique_key=self.unique_key, keys=self.name)
        clock = ManualClock(self.clock.now_ms() + round(1000 * ahead)) if ahead else self.clock
        with closing(self.place.connect()) as connection, ExitStack() as stack:
            purge_messages(connection, clock.now_ms())
            if fault == "mark's answer lost":
                stack.enter_context(lost_answer_of_commit())
            with transactional(connection, message, group="billing", key=self.key, clock=clock) as first:
                if fault == "dies before effect":
                    raise Died
                if fault == "claim's answer lost":
                    raise ConnectionResetError
                if fault == "fails before effect":
                    raise ValueError
                if meanwhile is not None:
                    meanwhile()
                if first:
                    connection.cursor().execute(f"INSERT INTO effects (name) VALUES ('{self.name}')")
                if fault == "dies before mark":
                    raise Died
                if fault == "mark not written":
                    raise ConnectionResetError
                if fault == "fails after effect":
                    raise ValueError
        if fault == "dies after mark":
            raise Died

    def forget(self) -> None:
        self.place.run("DELETE FROM effects WHERE name = :name", name=self.name)
        self.place.run("DELETE FROM rmq_messages WHERE dedup_key LIKE :name", name=f"%:{self.name}")

    def effects(self) -> int:
        return self.place.effects(self.name)


@contextmanager
def lost_answer_of_commit() -> Iterator[None]:
    """Let each commit of librmq's fail after the database has carried it out."""
    commit = Link.commit

    def commit_unheard(link: Link) -> None:
        commit(link)
        raise ConnectionResetError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Link, "commit", commit_unheard)
        yield


# --- what happens


def one_fault(fault: str) -> Callable[[World], None]:
    def happen(world: World) -> None:
        with suppress(Exception, Died):
            world.deliver(fault)

    return happen


def duplicate_meanwhile(world: World) -> None:
    def duplicate() -> None:
        # In a database the duplicate waits for the first one's record. Another test covers that
        # (test_a_second_delivery_waits_for_the_first).
        if isinstance(world, GuardedWorld):
            with pytest.raises(ReconsumeLater):
                world.deliver()

    world.deliver(meanwhile=duplicate)


def late_duplicate(seconds: float, ahead: float) -> Callable[[World], None]:
    def happen(world: World) -> None:
        def duplicate() -> None:
            world.clock.advance(seconds=seconds)
            if isinstance(world, GuardedWorld):
                world.deliver(ahead=ahead)

        world.deliver(meanwhile=duplicate)

    return happen


def unreachable(policy: str) -> Callable[[World], None]:
    def happen(world: World) -> None:
        world.when_store_fails = policy or world.when_store_fails
        with suppress(ConnectionRefusedError, ReconsumeLater):
            world.deliver("unreachable")

    return happen


def loses_records(world: World) -> None:
    world.deliver()
    world.forget()


def expired(world: World) -> None:
    world.deliver()
    world.clock.advance(hours=72)


def sent_twice(by_business_key: bool) -> Callable[[World], None]:
    def happen(world: World) -> None:
        if by_business_key:
            world.key = business_key
        world.deliver()
        world.unique_key += "-again"

    return happen


HAPPENINGS: Final[dict[str, Callable[[World], None]]] = {
    "nothing; a duplicate comes afterwards": lambda world: world.deliver(),
    "a duplicate while the listener runs": duplicate_meanwhile,
    "the process dies before the claim": one_fault("dies before claim"),
    "the process dies between claim and effect": one_fault("dies before effect"),
    "the process dies between effect and mark": one_fault("dies before mark"),
    "the process dies after the mark, before the message is acknowledged": one_fault("dies after mark"),
    "the listener fails before its effect": one_fault("fails before effect"),
    "the listener fails after its effect": one_fault("fails after effect"),
    "the listener takes longer than its claim, and a duplicate arrives": late_duplicate(600, 0),
    "another consumer's clock is ahead by more than the claim": late_duplicate(0, 601),
    "the store is unreachable, and messages are consumed anyway": unreachable("consume"),
    "the store is unreachable, and messages are delivered later": unreachable("retry"),
    "the claim is written, but its answer is lost": one_fault("claim's answer lost"),
    "the mark is not written": one_fault("mark not written"),
    "the mark is written, but its answer is lost": one_fault("mark's answer lost"),
    "the store loses its last records (restart of memory, power failure, restored backup)": loses_records,
    "a duplicate arrives after the record has expired": expired,
    "the producer sends twice, and the key is the unique id": sent_twice(False),
    "the producer sends twice, and the key is a business key": sent_twice(True),
}


def test_the_table_lists_the_tested_cases() -> None:
    assert list(TABLE) == list(HAPPENINGS)
    assert {store for row in TABLE.values() for store in row} == {
        "memory",
        "sqlite",
        "postgresql",
        "mysql",
        "redis",
        "transactional",
    }


CELLS: Final = [
    (what, store, base)
    for what, row in TABLE.items()
    for store in row
    for base in (DATABASES if store == "transactional" else ("",))
]


@many
@pytest.mark.parametrize(("what", "store", "base"), CELLS, ids=lambda part: str(part)[:60])
def test_how_often_the_effect_happens(
    what: str, store: str, base: str, place: Callable[[str], Place], database: Callable[[str], Database], name: str
) -> None:
    world: World = TransactionalWorld(database(base), name) if base else GuardedWorld(place(store), name)
    HAPPENINGS[what](world)
    for _ in range(12):  # it is delivered again every minute until it is acknowledged
        try:
            world.deliver()
            break
        except ReconsumeLater:
            world.clock.advance(minutes=1)
    else:
        pytest.fail("the message would become a dead letter")
    world.deliver()
    assert {"once": 1, "twice": 2}[TABLE[what][store]] == world.effects()
