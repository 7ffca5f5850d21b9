"""Workers take turns in any order, die, fail, sleep and lose answers: how often does each effect happen?"""

from __future__ import annotations

import itertools
import types
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from librmq.clock import ManualClock
from librmq.dedup import DedupListener
from librmq.errors import DedupStoreError
from librmq.idempotence._transactional_tables import Transactional, transactional
from librmq.idempotence.stores import Claim, DedupStore, MemoryDedupStore
from librmq.listener import ReconsumeLater
from tests.budget import examples
from tests.idempotence.conftest import DATABASES, Database, Place
from tests.idempotence.test_listener import Delivery

WORKERS = 3
KEYS = 1
TIMEOUT = 100
KEEP = 1000

_runs = itertools.count()
workers = st.integers(0, WORKERS - 1)
keys = st.integers(0, KEYS - 1)


class Ask(NamedTuple):
    """A call at which a worker may pause."""

    call: Callable[[], Any]
    of_store: bool


@types.coroutine
def paused(call: Callable[[], Any], of_store: bool = True) -> Generator[Ask, Any, Any]:
    """Pause before a call, so that the machine decides when it is made and whether it fails."""
    return (yield Ask(call, of_store))


@pytest.fixture(autouse=True)
def _calls_of_stores_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncio.to_thread", paused)


def _send(answer: object, flow: Any) -> Any:
    return flow.send(answer)


class Failed(Exception):
    """The error that a listener raises."""


class GuardMachine(RuleBasedStateMachine):
    """The guard: each repeated effect has a reason that is in the table of guarantees."""

    store: DedupStore = MemoryDedupStore()

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.run = next(_runs)
        self.effects: Counter[int] = Counter()
        self.excuses: Counter[int] = Counter()
        self.flows: dict[int, Any] = {}
        self.asks: dict[int, Any] = {}
        self.asked_at: dict[int, int] = {}
        self.key_of: dict[int, int] = {}
        self.claimed_at: dict[int, int | None] = {}
        self.did: dict[int, bool] = {}
        """Return whether the worker's effect has happened."""
        self.consumed_at: dict[int, int] = {}
        self.acknowledged: set[int] = set()
        self.guards = [self.guard(worker) for worker in range(WORKERS)]

    def guard(self, worker: int) -> DedupListener:
        async def listener(message: Delivery) -> None:
            await paused(lambda: self._effect(worker), of_store=False)

        self.store.blocking = True  # so that a worker can pause at each call
        return DedupListener(
            listener,
            self.store,
            group=f"machine-{self.run}",
            consuming_timeout=TIMEOUT,
            keep_consumed=KEEP,
            clock=self.clock,
        )

    def _effect(self, worker: int) -> None:
        key = self.key_of[worker]
        claimed_at = self.claimed_at[worker]
        if claimed_at is None:
            self.excuses[key] += 1  # the worker had no guard
        elif self.clock.now_ms() >= claimed_at + 1000 * TIMEOUT:
            self.excuses[key] += 1  # after its claim has expired
        self.effects[key] += 1
        self.did[worker] = True

    def _go_on(self, worker: int, take: Callable[[Any], Any]) -> None:
        """Run the worker's flow until its next call."""
        try:
            self.asks[worker] = take(self.flows[worker])
            self.asked_at[worker] = self.clock.now_ms()  # a worker may sleep between this and its call
        except StopIteration:
            self.acknowledged.add(self.key_of[worker])
            self._forget(worker)
        except (ReconsumeLater, Failed):
            self._forget(worker)

    def _forget(self, worker: int) -> None:
        for of in (self.flows, self.asks, self.asked_at, self.key_of, self.claimed_at, self.did):
            of.pop(worker, None)

    def _is_marking(self, worker: int) -> bool:
        return self.did[worker] and self.asks[worker].of_store

    @precondition(lambda self: len(self.flows) < WORKERS)
    @rule(key=keys)
    def deliver(self, key: int) -> None:
        worker = next(worker for worker in range(WORKERS) if worker not in self.flows)
        self.key_of[worker], self.did[worker], self.claimed_at[worker] = key, False, None
        self.flows[worker] = self.guards[worker](Delivery("orders", b"x", unique_key=str(key)))
        self._go_on(worker, partial(_send, None))

    @precondition(lambda self: bool(self.flows))
    @rule(worker=workers)
    def turn(self, worker: int) -> None:
        """Make a worker's next call, and give it the answer."""
        self._turn(self._active(worker))

    @precondition(lambda self: bool(self.flows))
    @rule(worker=workers, turns=st.integers(2, 3))
    def turns(self, worker: int, turns: int) -> None:
        worker = self._active(worker)
        for _ in range(turns):
            if worker in self.flows:
                self._turn(worker)

    def _active(self, number: int) -> int:
        return sorted(self.flows)[number % len(self.flows)]

    def _turn(self, worker: int) -> None:
        ask, key, now_ms = self.asks[worker], self.key_of[worker], self.asked_at[worker]
        expired = self.consumed_at.get(key, now_ms) + 1000 * KEEP <= now_ms
        is_claim = ask.of_store and not self.did[worker] and self.claimed_at[worker] is None
        if is_claim:
            self.claimed_at[worker] = now_ms
        if self._is_marking(worker):
            is_late = now_ms >= (self.claimed_at[worker] or 0) + 1000 * TIMEOUT
            if is_late:
                self.excuses[key] += 1  # its mark comes after its claim has expired
            else:
                self.consumed_at[key] = now_ms
        answer = ask.call()
        if is_claim and int(answer) < 2:
            if expired:
                self.excuses[key] += 1  # the record has expired
                self.consumed_at.pop(key, None)
            # The claim may have been taken over from workers whose effects happened, but which did not set their mark.
            self.excuses[key] += sum(self.did[other] for other, its in self.key_of.items() if its == key)
        self._go_on(worker, lambda flow: flow.send(answer))

    @precondition(lambda self: bool(self.flows))
    @rule(worker=workers, after=st.booleans())
    def fail(self, worker: int, after: bool) -> None:
        """The listener raises an error, before or after its effect."""
        worker = self._active(worker)
        if self.asks[worker].of_store:
            return
        if after:
            self.asks[worker].call()
            self.excuses[self.key_of[worker]] += 1
        self._go_on(worker, lambda flow: flow.throw(Failed()))
        if worker in self.flows:  # the worker is releasing its claim
            answer = self.asks[worker].call()
            self._go_on(worker, lambda flow: flow.send(answer))
            while worker in self.flows:  # if it is too late for that, it also makes a call to say so
                answer = self.asks[worker].call()
                self._go_on(worker, partial(_send, answer))

    @precondition(lambda self: bool(self.flows))
    @rule(worker=workers, written=st.booleans())
    def lose_the_answer(self, worker: int, written: bool) -> None:
        """A call of the store fails, before or after its write."""
        worker = self._active(worker)
        if not self.asks[worker].of_store:
            return
        key = self.key_of[worker]
        if self._is_marking(worker):
            if not written:
                self.excuses[key] += 1
            elif self.asks[worker].call():
                self.consumed_at[key] = self.asked_at[worker]
            else:
                self.excuses[key] += 1
        elif written:
            self.asks[worker].call()
        self._go_on(worker, lambda flow: flow.throw(DedupStoreError("lost")))

    @precondition(lambda self: bool(self.flows))
    @rule(worker=workers)
    def die(self, worker: int) -> None:
        worker = self._active(worker)
        if self.did[worker]:
            self.excuses[self.key_of[worker]] += 1  # died between effect and mark
        self._forget(worker)

    @rule(seconds=st.sampled_from([1, TIMEOUT - 1, TIMEOUT, KEEP]))
    def time_passes(self, seconds: int) -> None:
        self.clock.advance(seconds=seconds)

    @rule()
    def purge(self) -> None:
        self.store.purge(self.clock.now_ms(), 1000)

    @invariant()
    def no_effect_without_an_excuse(self) -> None:
        for key, effects in self.effects.items():
            assert effects <= 1 + self.excuses[key], (key, effects, self.excuses[key])

    @invariant()
    def nothing_is_lost(self) -> None:
        assert all(self.effects[key] for key in self.acknowledged)


def check(machine: type[RuleBasedStateMachine], count: int, steps: int) -> None:
    drawn = settings(
        max_examples=examples(count), stateful_step_count=steps, deadline=None, suppress_health_check=list(HealthCheck)
    )
    run_state_machine_as_test(machine, settings=drawn)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "count"), [("memory", 100), ("sqlite", 40), ("postgresql", 10), ("mysql", 8), ("redis", 20)]
)
def test_no_effect_without_an_excuse(place: Callable[[str], Place], name: str, count: int) -> None:
    class Machine(GuardMachine):
        store = place(name).handle

    check(Machine, count, 40)


class Unfenced(MemoryDedupStore):
    """A holder whose claim has expired releases another worker's claim."""

    def release(self, key: str, owner: str, now_ms: int) -> bool:
        record = self.read(key, now_ms)
        return record is not None and super().release(key, record.owner, now_ms)


class Unchecked(MemoryDedupStore):
    """Looks first and then claims, so another worker can claim in between."""

    def claim(self, key: str, owner: str, now_ms: int, expires_at_ms: int) -> Claim:
        outcome = super().claim(key, owner, now_ms, expires_at_ms)
        return Claim.NEW if outcome is Claim.CONSUMING else outcome


def both_claim(machine: GuardMachine) -> None:
    machine.deliver(key=0)
    machine.deliver(key=0)
    for worker in (0, 1, 0, 1):
        if len(machine.flows) > worker:
            machine.turn(worker=worker)


def the_first_gives_up_too_late(machine: GuardMachine) -> None:
    machine.deliver(key=0)
    machine.turn(worker=0)
    machine.time_passes(seconds=TIMEOUT)
    machine.deliver(key=0)
    machine.turn(worker=1)
    machine.fail(worker=0, after=False)
    machine.deliver(key=0)
    for worker in (0, 0, 1):
        if len(machine.flows) > worker:
            machine.turn(worker=worker)


@pytest.mark.parametrize(("kind", "schedule"), [(Unfenced, the_first_gives_up_too_late), (Unchecked, both_claim)])
def test_a_store_that_is_wrong_is_found(kind: type[MemoryDedupStore], schedule: Callable[[GuardMachine], None]) -> None:
    """The machine's assertions fail for a broken guard, and hold for the real one with the same schedule."""
    for store in (MemoryDedupStore(), kind()):
        machine = GuardMachine()
        machine.store = store
        machine.guards = [machine.guard(worker) for worker in range(WORKERS)]
        schedule(machine)
        if isinstance(store, kind):
            with pytest.raises(AssertionError):
                machine.no_effect_without_an_excuse()
        else:
            machine.no_effect_without_an_excuse()


class TransactionalMachine(RuleBasedStateMachine):
    """With the message table an effect happens once, in every schedule."""

    place: Database

    def __init__(self) -> None:
        super().__init__()
        self.run = next(_runs)
        self.clock = ManualClock()
        self.connections: dict[int, Any] = {}
        self.blocks: dict[int, Transactional] = {}
        self.key_of: dict[int, int] = {}
        self.acknowledged: set[int] = set()

    def _connect(self) -> Any:
        """A connection that does not wait for others. A listener that would have to wait is repeated."""
        connection = self.place.connect()
        if self.place.name == "sqlite":
            connection.execute("PRAGMA busy_timeout = 0")
        elif self.place.name == "postgresql":
            connection.execute("SET lock_timeout = '1ms'")
            connection.commit()
        else:
            connection.cursor().execute("SET SESSION innodb_lock_wait_timeout = 0")
        return connection

    def _name(self, key: int) -> str:
        return f"machine-{self.run}-{key}"

    def _end(self, worker: int) -> None:
        self.connections.pop(worker).close()
        del self.blocks[worker], self.key_of[worker]

    @rule(worker=workers, key=keys)
    def begin(self, worker: int, key: int) -> None:
        if worker in self.blocks:
            return
        connection = self._connect()
        block = transactional(
            connection, Delivery("orders", b"x", unique_key=self._name(key)), group="machine", clock=self.clock
        )
        try:
            first = block.__enter__()
            if first:
                connection.cursor().execute(f"INSERT INTO effects (name) VALUES ('{self._name(key)}')")
        except Exception:  # another connection has it, so the listener is repeated
            with suppress(Exception):
                connection.rollback()
            connection.close()
            return
        self.connections[worker], self.blocks[worker], self.key_of[worker] = connection, block, key

    @precondition(lambda self: bool(self.blocks))
    @rule(worker=workers, answered=st.booleans())
    def commit(self, worker: int, answered: bool) -> None:
        if worker not in self.blocks:
            return
        self.blocks[worker].__exit__(None, None, None)
        if answered:
            self.acknowledged.add(self.key_of[worker])
        self._end(worker)

    @precondition(lambda self: bool(self.blocks))
    @rule(worker=workers)
    def fail(self, worker: int) -> None:
        if worker in self.blocks:
            self.blocks[worker].__exit__(Failed, Failed(), None)
            self._end(worker)

    @precondition(lambda self: bool(self.blocks))
    @rule(worker=workers)
    def die(self, worker: int) -> None:
        if worker in self.blocks:
            self._end(worker)

    @rule(seconds=st.sampled_from([1, TIMEOUT]))
    def time_passes(self, seconds: int) -> None:
        self.clock.advance(seconds=seconds)

    @invariant()
    def at_most_once(self) -> None:
        for key in range(KEYS):
            effects = self.place.effects(self._name(key))
            assert effects <= 1
            assert effects == 1 or key not in self.acknowledged

    def teardown(self) -> None:
        for worker in list(self.connections):
            self._end(worker)


@pytest.mark.slow
@pytest.mark.parametrize(("base", "count"), list(zip(DATABASES, (30, 6, 5), strict=True)))
def test_once_under_every_schedule(database: Callable[[str], Database], base: str, count: int) -> None:
    class Machine(TransactionalMachine):
        place = database(base)

    check(Machine, count, 25)
