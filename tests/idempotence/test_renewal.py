"""Claims of listeners that take longer than ``consuming_timeout``."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from librmq.clock import ManualClock
from librmq.dedup import DedupListener
from librmq.errors import ConfigError, DedupStoreError
from librmq.idempotence.stores import Claim, DedupStore, MemoryDedupStore
from librmq.listener import ReconsumeLater
from tests.idempotence.test_listener import message_of


class Rival:
    """Another consumer of the same group; it notes what it is told."""

    def __init__(self, store: DedupStore, clock: ManualClock) -> None:
        self.outcomes: list[str] = []
        self._guard = DedupListener(lambda message: None, store, group="billing", clock=clock)

    def try_to_consume(self, name: str) -> None:
        before = self._guard.counts.taken_over
        try:
            self._guard(message_of(name))
        except ReconsumeLater:
            self.outcomes.append("busy")
        else:
            self.outcomes.append("taken over" if self._guard.counts.taken_over > before else "duplicate")


def test_a_renewed_claim_keeps_others_away(store: DedupStore, name: str) -> None:
    clock = ManualClock()
    rival = Rival(store, clock)

    def consume(message: Any) -> None:
        for _ in range(3):
            clock.advance(seconds=400)
            guard.renew()
        rival.try_to_consume(name)

    guard = DedupListener(consume, store, group="billing", clock=clock)
    guard(message_of(name))
    rival.try_to_consume(name)
    assert rival.outcomes == ["busy", "duplicate"]
    assert (guard.counts.consumed, guard.counts.lost) == (1, 0)


@pytest.mark.parametrize("is_async", [False, True])
def test_the_claims_of_a_list_are_renewed(is_async: bool) -> None:
    clock, store = ManualClock(), MemoryDedupStore()
    rival = Rival(store, clock)

    def look() -> None:
        clock.advance(seconds=400)
        for name in "ab":
            rival.try_to_consume(name)

    def consume(messages: Any) -> None:
        clock.advance(seconds=400)
        guard.renew()
        look()

    async def consume_async(messages: Any) -> None:
        clock.advance(seconds=400)
        await guard.renew()
        look()

    listener = consume_async if is_async else consume
    guard = DedupListener(listener, store, group="billing", clock=clock, batch=True)
    result = guard([message_of("a"), message_of("b")])
    if is_async:
        asyncio.run(result)
    assert rival.outcomes == ["busy", "busy"]
    assert guard.counts.consumed == 2


def test_steps_go_by_the_renewed_claim() -> None:
    clock, store = ManualClock(), MemoryDedupStore()

    def consume(message: Any) -> None:
        clock.advance(seconds=400)
        guard.renew()
        clock.advance(seconds=400)
        with guard.step("charge") as first:
            assert first

    guard = DedupListener(consume, store, group="billing", clock=clock)
    guard(message_of("a"))
    assert (guard.counts.consumed, guard.counts.steps) == (1, 1)


def test_a_claim_that_another_consumer_has_taken_over_is_not_renewed() -> None:
    clock, store = ManualClock(), MemoryDedupStore()
    rival = Rival(store, clock)

    def consume(message: Any) -> None:
        clock.advance(seconds=601)
        rival.try_to_consume("a")
        guard.renew()

    guard = DedupListener(consume, store, group="billing", clock=clock)
    with pytest.raises(ReconsumeLater, match="another consumer has taken it over"):
        guard(message_of("a"))
    assert rival.outcomes == ["taken over"]
    assert guard(message_of("a")) is True
    assert guard.counts.duplicates == 1


@pytest.mark.parametrize("when_store_fails", ["consume", "retry"])
def test_a_store_that_fails_at_a_renewal(when_store_fails: Any) -> None:
    class Failing(MemoryDedupStore):
        calls = 0

        def claim(self, key: str, owner: str, now_ms: int, expires_at_ms: int) -> Claim:
            self.calls += 1
            if self.calls == 2:
                raise DedupStoreError("out of reach")
            return super().claim(key, owner, now_ms, expires_at_ms)

    guard = DedupListener(
        lambda message: guard.renew(),
        Failing(),
        group="billing",
        clock=ManualClock(),
        when_store_fails=when_store_fails,
    )
    if when_store_fails == "retry":
        with pytest.raises(ReconsumeLater, match="out of reach"):
            guard(message_of("a"))
    guard(message_of("a"))
    assert guard.counts.consumed == 1


def test_only_a_running_listener_renews() -> None:
    guard = DedupListener(lambda message: other.renew(), MemoryDedupStore(), group="billing", clock=ManualClock())
    other = DedupListener(lambda message: None, MemoryDedupStore(), group="billing", clock=ManualClock())
    with pytest.raises(ConfigError, match="expected a running listener of this guard"):
        guard.renew()
    with pytest.raises(ConfigError, match="expected a running listener of this guard"):
        guard(message_of("a"))
    guard = DedupListener(
        lambda message: guard.renew(),
        MemoryDedupStore(),
        group="billing",
        clock=ManualClock(),
        key=lambda message: None,
    )
    guard(message_of("a"))  # It has no claim.


class Observed(MemoryDedupStore):
    """A store that says when a claim is renewed, and lets a renewal wait for a mark that must not come."""

    blocking = True

    def __init__(self) -> None:
        super().__init__()
        self.renewals = 0
        self.is_renewed = threading.Event()
        self.is_marked = threading.Event()
        self.marks_within_renewals = 0
        self._is_renewing = False

    def claim(self, key: str, owner: str, now_ms: int, expires_at_ms: int) -> Claim:
        record = self.read(key, now_ms)
        if record is None or record.owner != owner:
            return super().claim(key, owner, now_ms, expires_at_ms)
        self._is_renewing = True
        self.renewals += 1
        self.is_renewed.set()
        self.is_marked.wait(0.2)
        outcome = super().claim(key, owner, now_ms, expires_at_ms)
        self._is_renewing = False
        return outcome

    def finish(self, key: str, owner: str, now_ms: int, expires_at_ms: int) -> bool:
        self.marks_within_renewals += self._is_renewing
        self.is_marked.set()
        return super().finish(key, owner, now_ms, expires_at_ms)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_thread_renews_until_the_listener_has_ended(is_async: bool) -> None:
    """A renewal that arrived after the mark would make the message one that is being consumed."""
    store = Observed()

    def consume(message: Any) -> None:
        assert store.is_renewed.wait(60)

    async def consume_async(message: Any) -> None:
        assert await asyncio.to_thread(store.is_renewed.wait, 60)

    guard = DedupListener(
        consume_async if is_async else consume, store, group="billing", consuming_timeout=3, renews=True
    )
    result = guard(message_of("a"))
    if is_async:
        asyncio.run(result)
    assert guard.counts.consumed == 1
    assert store.renewals >= 1
    assert store.marks_within_renewals == 0
    assert guard(message_of("a")) is True if not is_async else asyncio.run(guard(message_of("a"))) is True
    assert guard.counts.duplicates == 1
