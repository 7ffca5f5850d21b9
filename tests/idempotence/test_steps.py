"""Steps of a guarded listener: done once for each message, wherever a run of the listener ends."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Coroutine, Generator
from typing import Any

import pytest

from librmq.clock import ManualClock
from librmq.dedup import DedupCounts, DedupListener
from librmq.errors import ConfigError
from librmq.idempotence.stores import DedupStore, MemoryDedupStore
from librmq.listener import ReconsumeLater
from tests.idempotence.test_listener import BrokenStore, Delivery, delivery
from tests.interrupting import at_each_call

STEPS = ("lock stock", "charge", "ship")
PLACES = [(place, step) for step in STEPS for place in ("before", "begun", "effect", "ended")]

_messages = itertools.count()


class Shop:
    """A guarded listener with three steps, whose run can end by an error at one place."""

    def __init__(self, store: DedupStore, **settings: Any) -> None:
        self.clock = ManualClock()
        self.effects: list[tuple[str | None, str]] = []
        self.first: list[bool] = []
        self.ends: dict[tuple[str, str], BaseException] = {}
        self.guard = DedupListener(self.consume, store, group="shop", clock=self.clock, **settings)

    def consume(self, message: Delivery) -> None:
        for step in STEPS:
            self.reach("before", step)
            with self.guard.step(step) as first:
                self.reach("begun", step)
                self.first.append(first)
                if first:
                    self.effects.append((message.unique_key, step))
                self.reach("effect", step)
            self.reach("ended", step)

    def reach(self, place: str, step: str) -> None:
        if (place, step) in self.ends:
            raise self.ends.pop((place, step))


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit()], ids=["failure", "crash"])
def test_a_retry_continues_behind_the_last_step(store: DedupStore, error: BaseException) -> None:
    """Only an effect after which its step did not end happens again."""
    for place, step in PLACES:
        shop, message = Shop(store), delivery(next(_messages))
        shop.ends[place, step] = error
        with pytest.raises(type(error)):
            shop.guard(message)
        shop.clock.advance(minutes=10)  # a crash keeps its claims until then
        shop.guard(message)
        shop.guard(message)
        repeated = [step] if place == "effect" else []
        assert [done for _, done in shop.effects] == sorted([*STEPS, *repeated], key=STEPS.index), (place, step)


def test_an_interrupt_at_any_call_repeats_one_step_at_most() -> None:
    shop = Shop(MemoryDedupStore())

    def consume() -> None:
        try:
            shop.guard(message)
        finally:
            shop.clock.advance(minutes=10)

    message = delivery(next(_messages))
    for interrupted in at_each_call(consume):
        if interrupted:
            shop.guard(message)
        counted = Counter(step for _, step in shop.effects)
        assert set(counted) == set(STEPS)
        assert counted.total() <= len(STEPS) + 1
        shop.effects.clear()
        message = delivery(next(_messages))


@pytest.mark.parametrize("as_list", [False, True])
def test_messages_have_steps_of_their_own(store: DedupStore, as_list: bool) -> None:
    shop = Shop(store)
    messages = [delivery(next(_messages)) for _ in range(2)]
    if as_list:
        shop.guard(messages)
    else:
        [shop.guard(message) for message in messages]
    assert shop.effects == [(message.unique_key, step) for message in messages for step in STEPS]
    assert shop.guard.counts == DedupCounts(consumed=2, steps=6)


def test_a_coroutine_has_steps(store: DedupStore) -> None:
    done: list[tuple[str | None, str]] = []
    fails = [ValueError("no")]

    async def consume(message: Delivery) -> None:
        for step in STEPS:
            async with guard.step(step) as first:
                await asyncio.sleep(0)
                if first:
                    done.append((message.unique_key, step))
            if step == STEPS[1] and fails:
                raise fails.pop()

    guard = DedupListener(consume, store, group="shop", clock=ManualClock())
    messages = [delivery(next(_messages)) for _ in range(3)]

    async def run() -> None:
        await asyncio.gather(*map(guard, messages), return_exceptions=True)
        await asyncio.gather(*map(guard, messages))

    asyncio.run(run())
    assert Counter(done) == Counter((message.unique_key, step) for message in messages for step in STEPS)
    assert guard.counts == DedupCounts(consumed=3, duplicates=2, released=1, steps=9, skipped_steps=2)


@pytest.mark.parametrize(("policy", "effects"), [("consume", 1), ("retry", 0)])
def test_a_failing_store_and_a_step(policy: Any, effects: int) -> None:
    """The guard's policy holds for its steps."""
    store = MemoryDedupStore()
    shop = Shop(store, when_store_fails=policy)
    broken = BrokenStore("claim")

    def consume(message: Delivery) -> None:
        store.claim = broken.claim  # type: ignore[method-assign]
        with shop.guard.step("charge") as first:
            assert first
            shop.effects.append((message.unique_key, "charge"))

    shop.guard.listener = consume
    if policy == "retry":
        with pytest.raises(ReconsumeLater, match="the dedup store failed"):
            shop.guard(delivery())
    else:
        shop.guard(delivery())
    assert len(shop.effects) == effects


def test_a_step_does_not_begin_after_its_claim() -> None:
    """Another consumer may have begun the message again."""
    shop = Shop(MemoryDedupStore(), consuming_timeout=60)

    def consume(message: Delivery) -> None:
        shop.clock.advance(minutes=1)
        with shop.guard.step("charge"):
            raise AssertionError("begun")

    shop.guard.listener = consume
    with pytest.raises(ReconsumeLater, match="after the message's claim has expired"):
        shop.guard(delivery())


def test_a_step_that_ends_after_its_claim_is_recorded(store: DedupStore) -> None:
    """No other consumer has taken it over, so that the retry does not do it again."""
    shop, message = Shop(store, consuming_timeout=60), delivery(next(_messages))
    late = [True]

    def consume(message: Delivery) -> None:
        with shop.guard.step("charge") as first:
            if first:
                shop.effects.append((message.unique_key, "charge"))
            if late:
                late.clear()
                shop.clock.advance(minutes=2)

    shop.guard.listener = consume
    shop.guard(message)
    shop.guard(message)
    assert len(shop.effects) == 1


def test_no_key_is_that_of_a_step() -> None:
    shop = Shop(MemoryDedupStore(), key=lambda message: message.unique_key.replace("-", "\0"))
    shop.guard.listener = lambda message: shop.effects.append(
        (message.unique_key, str(shop.guard.step("b").__enter__()))
    )
    for name in ("a", "a-b"):
        shop.guard(Delivery("orders", b"x", unique_key=name))
    assert shop.effects == [("a", "True"), ("a-b", "True")]


def test_steps_in_the_wrong_place() -> None:
    shop, other = Shop(MemoryDedupStore()), Shop(MemoryDedupStore())

    def expect(guard: DedupListener, name: str, match: str) -> None:
        with pytest.raises(ConfigError, match=match), guard.step(name):
            raise AssertionError("begun")

    def consume(message: Delivery) -> None:
        with shop.guard.step("charge"):
            expect(shop.guard, "charge", "this run of the listener had it already")
        for name in ("", "a\0b", 5):
            expect(shop.guard, name, "step: expected a name, which is text without NUL")  # type: ignore[arg-type]
        expect(other.guard, "charge", "a running listener of this guard")

    shop.guard.listener = consume
    shop.guard(delivery())
    expect(shop.guard, "charge", "a running listener of this guard")
    batch = DedupListener(
        lambda messages: expect(batch, "charge", "for a single message"), MemoryDedupStore(), group="shop", batch=True
    )
    batch([delivery(1), delivery(2)])


def test_a_message_without_a_key_has_no_records() -> None:
    shop = Shop(MemoryDedupStore(), key=lambda message: None)
    shop.guard(delivery())
    shop.guard(delivery())
    assert len(shop.effects) == 2 * len(STEPS)
    assert shop.guard.counts == DedupCounts()


class Pause:
    """What a coroutine waits for until it is resumed."""

    def __await__(self) -> Generator[None]:
        yield


def paused() -> tuple[DedupListener, Callable[[], Coroutine[None, None, None]]]:
    """Return a guard, and what makes a coroutine of its listener, which has one step after a pause."""

    async def consume(message: Delivery) -> None:
        await Pause()
        async with guard.step("charge") as first:
            assert first

    guard = DedupListener(consume, MemoryDedupStore(), group="paused", clock=ManualClock())
    return guard, lambda: guard(delivery(next(_messages)))


def test_coroutines_in_turns_have_steps_of_their_own() -> None:
    """They have no tasks, and so one context."""
    _, begin = paused()
    coroutines = [begin(), begin()]
    for coroutine in coroutines:
        coroutine.send(None)
    for coroutine in coroutines:
        with pytest.raises(StopIteration):
            coroutine.send(None)


def test_the_end_of_a_forgotten_coroutine_leaves_a_listener_its_steps() -> None:
    """The garbage collector ends it at any line of another listener."""
    _, begin = paused()
    forgotten = begin()
    forgotten.send(None)

    def consume(message: Delivery) -> None:
        with guard.step("charge") as first:
            assert first
            forgotten.close()
        with guard.step("ship") as first:
            assert first

    guard = DedupListener(consume, MemoryDedupStore(), group="shop", clock=ManualClock())
    guard(delivery(next(_messages)))
