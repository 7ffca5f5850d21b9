"""A guard in front of a listener: what it passes on, drops and logs."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest

from librmq.clock import ManualClock
from librmq.consumer import OrderlyResult
from librmq.dedup import DedupCounts, DedupListener, deduplicated
from librmq.errors import ConfigError, DedupStoreError
from librmq.idempotence.stores import MemoryDedupStore, SqliteDedupStore, unique_id
from librmq.listener import ReconsumeLater, SuspendQueue
from librmq.message.message import Message
from tests.idempotence.conftest import together


class Delivery(Message):
    """Return a message as a consumer would deliver it."""

    __slots__ = ()

    @property
    def unique_key(self) -> str | None:
        return self.properties.get("UNIQ_KEY")

    @property
    def message_id(self) -> str:
        return self.unique_key or "offset-id"


def message_of(name: str) -> Delivery:
    return Delivery("orders", b"x", unique_key=name)


def delivery(number: int = 1, *, topic: str = "orders", tags: str | None = "paid") -> Delivery:
    return Delivery(topic, b"x", tags=tags, unique_key=f"ID{number}", keys=f"invoice-{number}")


class BrokenStore(MemoryDedupStore):
    """A store that fails on request."""

    def __init__(self, *broken: str) -> None:
        super().__init__()
        for name in broken:
            setattr(self, name, self._fail)

    def _fail(self, *_: object) -> None:
        raise DedupStoreError("no server answers")


class Guarded:
    """A guarded listener that records what it consumed; ``then`` is called in addition."""

    def __init__(self, store: MemoryDedupStore | None = None, **settings: Any) -> None:
        self.seen: list[str] = []
        self.then: Callable[[], object] = lambda: None
        self.clock = ManualClock()
        self.store = MemoryDedupStore() if store is None else store
        self.guard = self.another(**settings)

    def another(self, **settings: Any) -> DedupListener:
        """Return another guard on the same store, like one in another process."""
        settings = {"group": "billing", "clock": self.clock, **settings}
        return DedupListener(self.consume, self.store, **settings)

    def consume(self, message: Delivery) -> str:
        self.seen.append(unique_id(message))
        self.then()
        return "done"


# --- one message


def test_a_message_is_consumed_once() -> None:
    guarded = Guarded()
    assert guarded.guard(delivery(1)) == "done"
    assert guarded.guard(delivery(1)) is True
    assert guarded.guard(delivery(2)) == "done"
    assert guarded.seen == ["ID1", "ID2"]
    assert guarded.guard.counts == DedupCounts(consumed=2, duplicates=1)


def test_a_duplicate_while_it_is_being_consumed_comes_later() -> None:
    guarded = Guarded()
    caught = []

    def meanwhile() -> None:
        with pytest.raises(ReconsumeLater, match="another consumer is consuming it") as raised:
            guarded.another()(delivery(1))
        caught.append(raised.value.delay_level)

    guarded.then = meanwhile
    guarded.guard(delivery(1))
    assert guarded.seen == ["ID1"]
    assert caught == [0]


@pytest.mark.parametrize("failure", [ValueError("no"), ReconsumeLater(delay_level=3), SuspendQueue(seconds=2)])
def test_a_failure_releases(failure: Exception) -> None:
    guarded = Guarded()

    def fail() -> None:
        raise failure

    guarded.then = fail
    with pytest.raises(type(failure)) as raised:
        guarded.guard(delivery(1))
    assert raised.value is failure
    guarded.then = lambda: None
    assert guarded.guard(delivery(1)) == "done"
    assert guarded.seen == ["ID1", "ID1"]
    assert guarded.guard.counts == DedupCounts(consumed=1, released=1)


def test_the_claim_of_a_crash_is_taken_over_when_it_expires(caplog: pytest.LogCaptureFixture) -> None:
    guarded = Guarded(consuming_timeout=timedelta(minutes=5))

    def crash() -> None:
        raise SystemExit

    guarded.then = crash
    with pytest.raises(SystemExit):
        guarded.guard(delivery(1))
    guarded.then = lambda: None
    other = guarded.another()
    with pytest.raises(ReconsumeLater):
        other(delivery(1))
    guarded.clock.advance(ms=299_999)
    with pytest.raises(ReconsumeLater):
        other(delivery(1))
    guarded.clock.advance(ms=1)
    assert other(delivery(1)) == "done"
    assert other.counts == DedupCounts(consumed=1, busy=2, taken_over=1)
    assert "taken over from a consumer that did not end in time" in caplog.text


def test_consumed_messages_are_forgotten_in_time() -> None:
    guarded = Guarded(keep_consumed=60)
    guarded.guard(delivery(1))
    guarded.clock.advance(ms=59_999)
    guarded.guard(delivery(1))
    guarded.clock.advance(ms=1)
    guarded.guard(delivery(1))
    assert guarded.seen == ["ID1", "ID1"]


@pytest.mark.parametrize(
    ("meanwhile", "told"),
    [
        ("nothing", "no other consumer has taken it over"),
        ("claimed", "another is consuming it"),
        ("consumed", "another has consumed it too"),
        ("unknown", "its present state is unknown"),
    ],
)
def test_the_fate_of_a_lost_claim_is_logged(meanwhile: str, told: str, caplog: pytest.LogCaptureFixture) -> None:
    store = BrokenStore(*(["read"] if meanwhile == "unknown" else []))
    guarded = Guarded(store, consuming_timeout=10)
    other = guarded.another()
    results: list[object] = []

    def inner() -> None:
        guarded.then = lambda: None
        guarded.clock.advance(seconds=10)
        if meanwhile == "claimed":
            store.claim(":orders:billing:paid:ID1", "b1", guarded.clock.now_ms(), guarded.clock.now_ms() + 1000)
        elif meanwhile == "consumed":
            results.append(other(delivery(1)))

    guarded.then = inner
    assert guarded.guard(delivery(1)) == "done"  # the listener's result is returned
    assert guarded.guard.counts == DedupCounts(lost=1)
    assert f"later than 10000 ms after its claim: {told}" in caplog.text


def test_a_lost_claim_of_a_listener_that_failed_is_reported_too(caplog: pytest.LogCaptureFixture) -> None:
    guarded = Guarded(consuming_timeout=10)

    def fail_late() -> None:
        guarded.clock.advance(seconds=10)
        raise ValueError("late")

    guarded.then = fail_late
    with pytest.raises(ValueError, match="late"):
        guarded.guard(delivery(1))
    assert guarded.guard.counts == DedupCounts(lost=1)
    assert "failed, but later than" in caplog.text


# --- keys and scopes


def test_the_key_is_a_function() -> None:
    guarded = Guarded(key=lambda message: message.keys[0])
    first, again = delivery(1), delivery(1)
    again.properties["UNIQ_KEY"] = "sent twice"
    guarded.guard(first)
    guarded.guard(again)
    assert guarded.seen == ["ID1"]


@pytest.mark.parametrize("nothing", [None, ""])
def test_messages_without_a_key_are_not_guarded(nothing: str | None) -> None:
    guarded = Guarded(key=lambda message: nothing)
    guarded.guard(delivery(1))
    guarded.guard(delivery(1))
    assert guarded.seen == ["ID1", "ID1"]
    assert guarded.guard.counts == DedupCounts()
    assert len(guarded.store) == 0


def test_a_key_that_is_not_a_string_is_refused() -> None:
    guarded = Guarded(key=lambda message: 7)
    with pytest.raises(ConfigError, match="key: expected a text or None, found 7"):
        guarded.guard(delivery(1))
    assert guarded.seen == []


def test_applications_topics_groups_and_tags_are_kept_apart() -> None:
    guarded = Guarded()
    guarded.guard(delivery(1))
    guarded.another(group="shipping")(delivery(1))
    guarded.another(application="shop")(delivery(1))
    guarded.guard(delivery(1, topic="returns"))
    guarded.guard(delivery(1, tags="open"))
    guarded.guard(delivery(1, tags=None))
    assert guarded.seen == ["ID1"] * 6
    guarded.guard(delivery(1, tags=None))
    assert guarded.seen == ["ID1"] * 6


def test_the_usual_key_is_that_of_all_deliveries() -> None:
    message = Delivery("orders", b"x")
    assert unique_id(message) == "offset-id"
    message.properties["ORIGIN_MESSAGE_ID"] = "the first offset-id"
    assert unique_id(message) == "the first offset-id"
    message.properties["UNIQ_KEY"] = "ID1"
    assert unique_id(message) == "ID1"


# --- the store is unreachable


def test_without_an_answer_to_the_claim_messages_are_consumed(caplog: pytest.LogCaptureFixture) -> None:
    guarded = Guarded(BrokenStore("claim"))
    assert guarded.guard(delivery(1)) == "done"
    assert guarded.guard(delivery(1)) == "done"
    assert guarded.guard.counts == DedupCounts(unguarded=2)
    assert (
        "orders:billing:paid:ID1: consumed without a guard, because the dedup store failed: no server answers"
        in caplog.text
    )


def test_without_an_answer_to_the_claim_messages_may_come_later(caplog: pytest.LogCaptureFixture) -> None:
    guarded = Guarded(BrokenStore("claim"), when_store_fails="retry")
    with pytest.raises(ReconsumeLater, match="the dedup store failed") as raised:
        guarded.guard(delivery(1))
    assert isinstance(raised.value.__cause__, DedupStoreError)
    assert guarded.seen == []
    assert guarded.guard.counts == DedupCounts(postponed=1)
    assert "delivered again later, because the dedup store failed: no server answers" in caplog.text


def test_a_mark_that_fails_keeps_the_result(caplog: pytest.LogCaptureFixture) -> None:
    guarded = Guarded(BrokenStore("finish", "release"))
    assert guarded.guard(delivery(1)) == "done"
    assert "consumed, but could not be marked so: no server answers" in caplog.text

    def fail() -> None:
        raise ValueError("no")

    guarded.then = fail
    with pytest.raises(ValueError, match="no"):
        guarded.guard(delivery(2))
    assert "failed, but could not be released: no server answers" in caplog.text
    assert guarded.guard.counts == DedupCounts(unmarked=2)


# --- asynchronous listeners


def test_an_async_listener_is_guarded_until_it_has_ended(tmp_path: Any) -> None:
    seen: list[str] = []
    clock = ManualClock()

    file = SqliteDedupStore(tmp_path / "x.db")
    for store in (MemoryDedupStore(), file):
        seen.clear()
        going_on = asyncio.Event()

        async def consume(message: Delivery, going_on: asyncio.Event = going_on) -> str:
            await going_on.wait()
            seen.append(unique_id(message))
            return "done"

        guard = DedupListener(consume, store, group="billing", clock=clock)

        async def run(guard: DedupListener = guard, going_on: asyncio.Event = going_on) -> None:
            first = asyncio.create_task(guard(delivery(1)))
            while not guard.store.read(":orders:billing:paid:ID1", clock.now_ms()):
                await asyncio.sleep(0)
            with pytest.raises(ReconsumeLater):
                await guard(delivery(1))
            going_on.set()
            assert await first == "done"
            assert await guard(delivery(1)) is True

        asyncio.run(run())
        assert seen == ["ID1"]
        assert guard.counts == DedupCounts(consumed=1, duplicates=1, busy=1)
    file.close()


def test_a_coroutine_is_awaited_before_the_mark() -> None:
    store, clock = MemoryDedupStore(), ManualClock()
    seen = []

    async def work() -> str:
        seen.append(store.read(":orders:billing:paid:ID1", clock.now_ms()))
        return "done"

    guard = DedupListener(lambda message: work(), store, group="billing", clock=clock)
    assert asyncio.run(guard(delivery(1))) == "done"
    assert [record.consumed for record in seen if record] == [False]
    assert guard.counts == DedupCounts(consumed=1)


def test_an_object_whose_call_is_a_coroutine() -> None:
    class Listener:
        async def __call__(self, message: Delivery) -> str:
            return "done"

    guard = DedupListener(Listener(), MemoryDedupStore(), group="billing", clock=ManualClock())
    assert asyncio.run(guard(delivery(1))) == "done"
    assert guard.counts == DedupCounts(consumed=1)


@pytest.mark.parametrize("plain", [False, True])
def test_a_cancelled_listener_releases(plain: bool) -> None:
    async def consume(message: Delivery) -> None:
        await asyncio.Event().wait()

    listener: Callable[..., Any] = (lambda message: consume(message)) if plain else consume
    guard = DedupListener(listener, MemoryDedupStore(), group="billing", clock=ManualClock())

    async def run() -> None:
        task = asyncio.ensure_future(guard(delivery(1)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert guard.counts == DedupCounts(released=1)


def test_an_async_failure_releases() -> None:
    async def consume(message: Delivery) -> None:
        raise ValueError("no")

    guard = DedupListener(consume, MemoryDedupStore(), group="billing", clock=ManualClock())
    with pytest.raises(ValueError, match="no"):
        asyncio.run(guard(delivery(1)))
    assert guard.counts == DedupCounts(released=1)


# --- several messages


def numbers(messages: Iterable[Delivery]) -> list[str]:
    return [unique_id(message) for message in messages]


def test_a_list_is_consumed_one_by_one_up_to_the_first_failure() -> None:
    guarded = Guarded()

    def fail_third() -> None:
        if guarded.seen[-1] == "ID3":
            raise ReconsumeLater("not yet", delay_level=4)

    guarded.then = fail_third
    with pytest.raises(ReconsumeLater, match="not yet") as raised:
        guarded.guard([delivery(number) for number in (1, 2, 3, 4)])
    assert (raised.value.consumed, raised.value.delay_level) == (2, 4)
    assert guarded.seen == ["ID1", "ID2", "ID3"]
    with pytest.raises(ReconsumeLater) as raised:
        guarded.guard([delivery(3), delivery(4)])
    assert raised.value.consumed == 0
    guarded.then = lambda: None
    assert guarded.guard([delivery(3), delivery(4)]) is True
    assert guarded.seen == ["ID1", "ID2", "ID3", "ID3", "ID3", "ID4"]


class Batches:
    """A guarded listener for lists of messages."""

    def __init__(self, **settings: Any) -> None:
        self.seen: list[list[str]] = []
        self.then: Callable[[], object] = lambda: None
        self.clock = ManualClock()
        self.store = MemoryDedupStore()
        self.guard = DedupListener(self.consume, self.store, group="billing", clock=self.clock, batch=True, **settings)

    def consume(self, messages: list[Delivery]) -> str:
        self.seen.append(numbers(messages))
        self.then()
        return "done"

    def hold(self, number: int) -> None:
        """Claim a message for another consumer."""
        now_ms = self.clock.now_ms()
        self.store.claim(f":orders:billing:paid:ID{number}", "b1", now_ms, now_ms + 1000)

    def give(self, *numbers: int) -> int | None:
        """Deliver messages; return how many were consumed, None for all."""
        try:
            result = self.guard([delivery(number) for number in numbers])
        except ReconsumeLater as later:
            return later.consumed
        return None if result is True else result + 1


def test_a_listener_of_lists_gets_only_new_messages() -> None:
    batches = Batches()
    assert batches.give(1, 2) is None
    assert batches.give(2, 3, 1, 4) is None
    assert batches.give(1, 2) is None
    assert batches.seen == [["ID1", "ID2"], ["ID3", "ID4"]]
    assert batches.guard.counts == DedupCounts(consumed=4, duplicates=4)


def test_a_list_stops_at_a_message_claimed_by_another() -> None:
    batches = Batches()
    batches.hold(3)
    assert batches.give(1, 2, 3, 4) == 2
    assert batches.seen == [["ID1", "ID2"]]
    assert batches.give(3, 4) == 0
    assert batches.give(1, 3) == 1
    assert batches.seen == [["ID1", "ID2"]]


def test_the_same_message_twice_in_a_list_stops_it() -> None:
    batches = Batches()
    assert batches.give(1, 1, 2) == 1
    assert batches.give(1, 2) is None
    assert batches.seen == [["ID1"], ["ID2"]]


def test_a_failure_of_a_list_releases_all_of_it() -> None:
    batches = Batches()

    def fail() -> None:
        raise ValueError("no")

    batches.then = fail
    with pytest.raises(ValueError, match="no"):
        batches.guard([delivery(1), delivery(2)])
    assert len(batches.store) == 0
    batches.then = lambda: None
    assert batches.give(1, 2) is None


def test_a_list_may_be_consumed_in_part() -> None:
    batches = Batches()
    assert batches.give(1, 3) is None

    def part() -> None:
        raise ReconsumeLater("the rest later", delay_level=2, consumed=1)

    batches.then = part
    assert batches.give(1, 2, 3, 4, 5) == 3  # redelivery starts with 4
    batches.then = lambda: None
    assert batches.give(4, 5) is None
    assert batches.seen == [["ID1", "ID3"], ["ID2", "ID4", "ID5"], ["ID4", "ID5"]]


def test_a_list_is_given_back_when_a_key_is_wrong() -> None:
    batches = Batches(key=lambda message: 7 if unique_id(message) == "ID2" else unique_id(message))
    with pytest.raises(ConfigError):
        batches.guard([delivery(1), delivery(2)])
    assert len(batches.store) == 0


def test_a_list_may_be_consumed_up_to_an_index() -> None:
    batches = Batches()
    results: list[object] = [1, -1, 7]
    batches.guard.listener = lambda messages: results.pop(0)
    assert batches.give(1, 2, 3, 4) == 2
    assert batches.give(1, 3, 4) == 1
    assert batches.give(3, 4) is None
    results.append(-2)
    with pytest.raises(ValueError, match="returned -2"):
        batches.guard([delivery(5)])
    assert batches.guard.counts == DedupCounts(consumed=4, duplicates=1, released=5)


@pytest.mark.parametrize("policy", ["consume", "retry"])
def test_a_list_whose_claims_can_not_be_asked_for(policy: str) -> None:
    seen: list[list[str]] = []
    store = BrokenStore("claim")
    guard = DedupListener(
        lambda messages: seen.append(numbers(messages)),
        store,
        group="billing",
        batch=True,
        when_store_fails=policy,  # type: ignore[arg-type]
        clock=ManualClock(),
    )
    if policy == "consume":
        assert guard([delivery(1), delivery(2)]) is True
        assert seen == [["ID1", "ID2"]]
        assert guard.counts == DedupCounts(unguarded=2)
    else:
        with pytest.raises(ReconsumeLater) as raised:
            guard([delivery(1), delivery(2)])
        assert raised.value.consumed == 0
        assert seen == []
        assert guard.counts == DedupCounts(postponed=2)


def test_an_async_list_is_claimed_together() -> None:
    async def consume(messages: list[Delivery]) -> None:
        await asyncio.sleep(0)

    guard = DedupListener(consume, MemoryDedupStore(), group="billing", batch=True, clock=ManualClock())
    assert asyncio.run(guard([delivery(1), delivery(2)])) is True
    assert guard.counts == DedupCounts(consumed=2)


# --- a listener's results


@pytest.mark.parametrize("batch", [False, True])
def test_where_only_true_means_consumed(batch: bool) -> None:
    results: list[object] = [None, False, True]
    guard = DedupListener(
        lambda message: results.pop(0),
        MemoryDedupStore(),
        group="billing",
        must_return=True,
        batch=batch,
        clock=ManualClock(),
    )
    message = [delivery(1)] if batch else delivery(1)
    for _ in range(2):
        with pytest.raises(ReconsumeLater, match="did not acknowledge"):
            guard(message)
    assert guard(message) is guard(message) is True
    assert guard.counts == DedupCounts(consumed=1, duplicates=1, released=2)


def test_one_by_one_where_only_true_means_consumed() -> None:
    guarded = Guarded(must_return=True)
    guarded.guard.listener = lambda message: unique_id(message) != "ID2"
    with pytest.raises(ReconsumeLater) as raised:
        guarded.guard([delivery(1), delivery(2), delivery(3)])
    assert raised.value.consumed == 1
    assert guarded.guard.counts == DedupCounts(consumed=1, released=1)


@pytest.mark.parametrize("batch", [False, True])
def test_rolled_back_messages_are_released(batch: bool) -> None:
    results = [OrderlyResult.ROLLBACK, OrderlyResult.HOLD, OrderlyResult.COMMIT]
    guard = DedupListener(
        lambda message: results.pop(0), MemoryDedupStore(), group="billing", batch=batch, clock=ManualClock()
    )
    message = [delivery(1)] if batch else delivery(1)
    assert guard(message) is OrderlyResult.ROLLBACK
    with pytest.raises(ConfigError, match="can't return HOLD for several"):
        guard(message)
    guard(message)
    assert guard.counts == DedupCounts(consumed=1, released=2)


# --- creating a guard


def test_as_a_decorator() -> None:
    seen = []

    @deduplicated(MemoryDedupStore(), group="billing", clock=ManualClock(), key=lambda message: message.keys[0])
    def consume(message: Delivery) -> None:
        seen.append(message)

    consume(delivery(1))
    consume(delivery(1))
    assert len(seen) == 1
    assert consume.counts == DedupCounts(consumed=1, duplicates=1)


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"group": ""}, "group"),
        ({"consuming_timeout": 0}, "consuming_timeout"),
        ({"consuming_timeout": timedelta(0)}, "consuming_timeout"),
        ({"keep_consumed": -1}, "keep_consumed"),
        ({"keep_consumed": float("nan")}, "keep_consumed"),
        ({"when_store_fails": "panic"}, "when_store_fails"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        DedupListener(print, MemoryDedupStore(), **{"group": "billing", **settings})


def test_without_a_clock_of_the_callers_a_thread_purges(monkeypatch: pytest.MonkeyPatch) -> None:
    purged = threading.Event()

    class Store(MemoryDedupStore):
        def purge(self, now_ms: int, limit: int) -> int:
            purged.set()
            return 0

    earlier = threading.enumerate()

    def purgers() -> list[threading.Thread]:
        threads = [thread for thread in threading.enumerate() if thread not in earlier]
        return [thread for thread in threads if thread.name == "librmq-dedup-purge"]

    store = Store()
    guards = [DedupListener(lambda message: None, store, group="billing") for _ in range(2)]
    for guard in guards:
        guard(delivery(1))
    assert purged.wait(30)

    (thread,) = purgers()
    del store, guards, guard
    gc.collect()
    thread.join(30)
    assert purgers() == []


def test_threads_are_counted_right() -> None:
    guarded = Guarded()

    def consume(part: int) -> None:
        for number in range(200):
            guarded.guard(delivery(1000 * part + number))

    together(*[partial(consume, part) for part in range(4)])
    assert guarded.guard.counts == DedupCounts(consumed=800)


def test_what_is_no_function_is_refused_before_a_message_comes() -> None:
    make: Any = DedupListener
    with pytest.raises(ConfigError, match="listener: expected a function of a message, found None"):
        make(None, MemoryDedupStore(), group="g")
    with pytest.raises(ConfigError, match="key: expected a function of a message, found 'order'"):
        make(print, MemoryDedupStore(), group="g", key="order")
    with pytest.raises(ConfigError, match=r"listener: the function .* is called with one message, or a list"):
        make(lambda: None, MemoryDedupStore(), group="g")
    with pytest.raises(ConfigError, match=r"key: the function .* is called with one message"):
        make(print, MemoryDedupStore(), group="g", key=lambda: "order")


def test_a_listener_that_is_a_generator_cannot_be_guarded() -> None:
    def listener(message: Any) -> Any:
        yield

    with pytest.raises(ConfigError, match="is a generator, whose body a call does not run"):
        DedupListener(listener, MemoryDedupStore(), group="g")
