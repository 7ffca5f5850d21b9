"""The guard in front of real consumers, with the kit's clock and with explored schedules."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from contextvars import Context
from pathlib import Path
from typing import Any

import pytest

from librmq.client.queue_selectors import select_by_hash
from librmq.clock import SystemClock, default_clock
from librmq.consumer import DeliveredMessage, OrderlyResult
from librmq.dedup import DedupCounts, DedupListener
from librmq.errors import StoreLockedError
from librmq.idempotence._sqltables import upgrade_tables
from librmq.idempotence._transactional_tables import transactional
from librmq.idempotence.outbox import Outbox, OutboxSender
from librmq.idempotence.stores import DedupStore, MemoryDedupStore, SqliteDedupStore
from librmq.listener import DeadLetter, DownstreamDown, ReconsumeLater
from librmq.message.message import Message
from librmq.metrics import Metrics
from librmq.protocol import ConsumeFrom
from librmq.testing import Kit, Process, explore
from tests.budget import examples
from tests.planted import send


def order_of(message: DeliveredMessage) -> str:
    return message.keys[0]


def guard(rmq: Kit, listener: Callable[..., Any], store: DedupStore, **settings: Any) -> DedupListener:
    settings = {"key": order_of, "consuming_timeout": 60, **settings}
    return DedupListener(listener, store, group="billing", clock=rmq.clock, **settings)


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
@pytest.mark.parametrize("orderly", [False, True])
@pytest.mark.parametrize("is_async", [False, True])
def test_each_order_is_consumed_once(tmp_path: Path, kind: str, orderly: bool, is_async: bool) -> None:
    seen: list[str] = []

    def note(message: DeliveredMessage) -> None:
        seen.append(order_of(message))

    async def note_later(message: DeliveredMessage) -> None:
        note(message)

    store: Any = MemoryDedupStore() if kind == "memory" else SqliteDedupStore(tmp_path / "x.db")
    with Kit() as rmq:
        guarded = guard(rmq, note_later if is_async else note, store)
        rmq.consumer("billing", orderly=orderly).subscribe("orders")(guarded)
        for order in ("o-1", "o-2", "o-1", "o-2", "o-3"):
            rmq.producer().send(Message("orders", b"an order", keys=order))
        rmq.advance(minutes=5)
    assert sorted(seen) == ["o-1", "o-2", "o-3"]
    assert guarded.counts == DedupCounts(consumed=3, duplicates=2)
    if isinstance(store, SqliteDedupStore):
        store.close()


def test_a_retried_message_is_known_by_its_id() -> None:
    """Redeliveries are other records in another topic, but keep the usual key and scope of the first delivery."""
    tries: list[str] = []

    def fail_twice(message: DeliveredMessage) -> None:
        tries.append(message.topic)
        if len(tries) < 3:
            raise ReconsumeLater

    with Kit() as rmq:
        store = MemoryDedupStore()
        guarded = DedupListener(fail_twice, store, group="billing", clock=rmq.clock)
        rmq.consumer("billing").subscribe("orders")(guarded)
        rmq.producer().send(Message("orders", b"an order"))
        rmq.advance(minutes=5)
    assert tries == ["orders"] * 3
    assert guarded.counts == DedupCounts(consumed=1, released=2)
    assert len(store) == 1


@pytest.mark.parametrize("in_bulk", [False, True])
def test_a_batch_continues_where_it_stopped(in_bulk: bool) -> None:
    seen: list[str] = []
    refused = {"o-3"}

    def note(messages: Any) -> None:
        for number, message in enumerate(messages if in_bulk else [messages]):
            if order_of(message) in refused:
                refused.clear()
                raise ReconsumeLater(consumed=number)
            seen.append(order_of(message))

    with Kit() as rmq:
        guarded = guard(rmq, note, MemoryDedupStore(), batch=in_bulk)
        rmq.consumer("billing", batch_size=8).subscribe("orders")(guarded)
        for order in ("o-1", "o-2", "o-2", "o-3", "o-4"):
            rmq.producer().send(Message("orders", b"an order", keys=order), queue=0)
        rmq.advance(minutes=5)
    assert sorted(seen) == ["o-1", "o-2", "o-3", "o-4"]
    assert guarded.counts.consumed == 4


@pytest.mark.parametrize("in_bulk", [False, True])
@pytest.mark.parametrize(
    ("error", "causes"),
    [
        (DownstreamDown(seconds=60, consumed=1), set()),
        (DeadLetter("no order"), {"DeadLetter: no order"}),
        (ValueError("no order"), {"ValueError: no order"}),
    ],
)
def test_a_failure_in_a_batch_stays_what_it_is(error: Exception, causes: set[str], in_bulk: bool) -> None:
    failures = [error]

    def consume(messages: Any) -> None:
        for message in messages if in_bulk else [messages]:
            if order_of(message) == "o-2" and failures:
                raise failures.pop()

    with Kit() as rmq:
        for order in ("o-1", "o-2"):
            rmq.producer().send(Message("orders", b"an order", keys=order), queue=0)
        consumer = rmq.consumer(
            "billing", batch_size=8, fail_fast=False, consume_from=ConsumeFrom.FIRST, max_reconsume_times=0
        )
        consumer.subscribe("orders")(guard(rmq, consume, MemoryDedupStore(), batch=in_bulk))
        rmq.advance(minutes=5)
        assert {letter.properties["DEAD_LETTER_CAUSE"] for letter in rmq.dead_letters("billing")} == causes


@pytest.mark.parametrize("result", [OrderlyResult.ROLLBACK, None])
@pytest.mark.parametrize(("batch_size", "in_bulk"), [(1, False), (8, False), (8, True)])
def test_an_orderly_queue_passes_no_message_that_is_not_acknowledged(
    result: object, batch_size: int, in_bulk: bool
) -> None:
    seen: list[str] = []
    results = [result]

    def consume(messages: Any) -> object:
        orders = [order_of(message) for message in (messages if in_bulk else [messages])]
        if orders[-1] == "o-2" and results:
            return results.pop()
        seen.extend(orders)
        return True

    with Kit() as rmq:
        for order in ("o-1", "o-2"):
            rmq.producer().send(Message("orders", b"an order", keys=order), queue=0)
        consumer = rmq.consumer("billing", orderly=True, batch_size=batch_size, consume_from=ConsumeFrom.FIRST)
        consumer.subscribe("orders")(guard(rmq, consume, MemoryDedupStore(), batch=in_bulk, must_return=result is None))
        rmq.advance(minutes=5)
    assert seen == ["o-1", "o-2"]


def test_a_crash_while_consuming_makes_no_dead_letter() -> None:
    """The dead process has a claim for ten minutes; retries are delivered until it has expired."""
    seen: list[str] = []
    store = MemoryDedupStore()
    with Kit() as rmq:
        begun = rmq.clock.now_ms()
        store.claim(":orders:billing::o-1", "of a dead process", begun, begun + 600_000)
        metrics = Metrics()
        guarded = guard(
            rmq, lambda message: seen.append(order_of(message)), store, consuming_timeout=600, metrics=metrics
        )
        rmq.consumer("billing").subscribe("orders")(guarded)
        rmq.producer().send(Message("orders", b"an order", keys="o-1"))
        rmq.advance(minutes=9, seconds=59)
        assert seen == []
        rmq.advance(minutes=10)
    assert seen == ["o-1"]
    assert guarded.counts.taken_over == 1
    assert metrics.snapshot()["duplicates"] == {
        ("orders", "billing", "wait"): guarded.counts.busy,
        ("orders", "billing", "take over"): 1,
    }


# --- the outbox


@pytest.mark.parametrize("orderly", [False, True])
def test_from_an_outbox_through_a_broker_to_a_guard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, orderly: bool
) -> None:
    """A sender dies before its mark: all is sent again with the same unique ids, and the usual key drops it."""
    seen: list[bytes] = []
    path = tmp_path / "shop.db"
    with Kit() as rmq, closing(sqlite3.connect(path)) as shop:
        upgrade_tables(shop)
        guarded = DedupListener(
            lambda message: seen.append(message.body), MemoryDedupStore(), group="billing", clock=rmq.clock
        )
        rmq.consumer("billing", orderly=orderly).subscribe("orders")(guarded)
        producer = rmq.producer()

        def send_ordered(message: Message, order_key: str) -> object:
            return producer.send(message, selector=select_by_hash, arg=order_key)

        def sender() -> OutboxSender:
            return OutboxSender(lambda: sqlite3.connect(path), producer, send_ordered=send_ordered, clock=rmq.clock)

        def run(sender: OutboxSender) -> None:
            sender.run_due(rmq.clock.now_ms())
            rmq.advance(minutes=1)

        outbox = Outbox(clock=rmq.clock)
        for number in range(6):
            outbox.add(shop, Message("orders", b"%d" % number), order_key=f"o-{number % 2}" if orderly else None)
        shop.commit()

        dying = sender()
        monkeypatch.setattr(dying, "_mark", _die)
        with pytest.raises(SystemExit):
            run(dying)
        rmq.advance(minutes=1)
        assert len(seen) == 6
        run(sender())
        assert sorted(seen) == [b"%d" % number for number in range(6)]
        assert guarded.counts == DedupCounts(consumed=6, duplicates=6)
        if orderly:
            for key in (0, 1):
                assert [body for body in seen if int(body) % 2 == key] == [b"%d" % n for n in range(key, 6, 2)]


def _die(*_: object) -> None:
    raise SystemExit


# --- explored schedules


def book(rmq: Kit, guarded: bool) -> None:
    """Let a listener check for an order and then book it. Each order is sent twice, and any process may die."""
    booked: list[str] = []
    store = MemoryDedupStore()

    def shop(process: Process) -> None:
        def charge(message: DeliveredMessage) -> None:
            if order_of(message) not in booked:
                rmq.checkpoint("between look and insert")
                booked.append(order_of(message))

        process.consumer("billing").subscribe("orders")(guard(rmq, charge, store) if guarded else charge)

    rmq.app("shop", shop)
    for order in ("o-1", "o-2", "o-1", "o-2"):
        send(rmq.producer(), Message("orders", b"an order", keys=order))
    rmq.advance(minutes=10)
    assert sorted(booked) == ["o-1", "o-2"]


@pytest.mark.slow
def test_explored_schedules_pass_with_the_guard() -> None:
    runs = examples(400)
    result = explore(lambda rmq: book(rmq, True), runs=runs)
    assert result.runs > 0.75 * runs
    assert result.chosen["fault"] > runs / 20


def test_explored_schedules_fail_without_it() -> None:
    with Kit() as rmq:
        book(rmq, False)  # passes in the default order
    with pytest.raises(AssertionError):
        explore(lambda rmq: book(rmq, False), runs=200)


def test_tables_of_the_application_go_by_the_clock_of_the_kit(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    with closing(sqlite3.connect(path)) as database:
        upgrade_tables(database, dedup=None)
    outbox = Outbox()  # like one of an application's module

    def times(table: str, column: str) -> list[int]:
        with closing(sqlite3.connect(path)) as database:
            return [row[0] for row in database.execute(f"SELECT {column} FROM {table}")]

    with Kit() as rmq:
        begin_ms = rmq.clock.now_ms()

        @rmq.consumer("billing").subscribe("orders")
        def charge(message: DeliveredMessage) -> None:
            with closing(sqlite3.connect(path)) as database, transactional(database, message, group="billing", keep=60):
                outbox.add(database, Message("receipts", message.body))

        rmq.consumer("mail").subscribe("receipts")(lambda message: None)
        rmq.advance(minutes=5)
        rmq.producer().send("orders", b"o-1")
        rmq.run_until_idle()
        now_ms = rmq.clock.now_ms()
        assert now_ms == begin_ms + 300_000
        assert times("rmq_messages", "expires_timestamp_ms") == [now_ms + 60_000]
        assert times("rmq_outbox", "due_timestamp_ms") == [now_ms]
        sender = OutboxSender(lambda: sqlite3.connect(path), rmq.producer(), poll_interval=5)
        assert sender.run_due(now_ms) == now_ms + 5_000
        rmq.run_until_idle()
        assert [message.body for message in rmq.delivered("mail")] == [b"o-1"]
    assert isinstance(default_clock(), SystemClock)


def test_threads_that_the_kit_has_not_started_go_by_its_clock() -> None:
    """A session's event loop, or the thread of a web framework, began before the test."""
    with Kit() as rmq, closing(sqlite3.connect(":memory:")) as database:
        upgrade_tables(database)
        rmq.advance(hours=24)
        Context().run(lambda: Outbox().add(database, Message("orders", b"x")))
        assert database.execute("SELECT due_timestamp_ms FROM rmq_outbox").fetchall() == [(rmq.clock.now_ms(),)]
        with Kit() as other:
            assert default_clock() is other.clock
        assert Context().run(default_clock) is rmq.clock


def test_a_kit_that_does_not_open_leaves_the_clock_of_all_others(tmp_path: Path) -> None:
    with Kit(tmp_path / "store"), pytest.raises(StoreLockedError):
        Kit(tmp_path / "store")
    assert isinstance(default_clock(), SystemClock)


# --- a sender that is started, under a clock that the test moves


def add(connect: Callable[[], sqlite3.Connection], *bodies: bytes) -> None:
    with closing(connect()) as database:
        for body in bodies:
            Outbox().add(database, Message("orders", body))
        database.commit()


@pytest.fixture
def connect(tmp_path: Path) -> Callable[[], sqlite3.Connection]:
    with closing(sqlite3.connect(tmp_path / "shop.db")) as database:
        upgrade_tables(database)
    return lambda: sqlite3.connect(tmp_path / "shop.db")


def test_advance_sends_what_a_started_sender_has_to_send(rmq: Kit, connect: Callable[[], sqlite3.Connection]) -> None:
    rmq.consumer("billing").subscribe("orders", lambda message: None)
    with OutboxSender(connect, rmq.producer()).start() as sender:
        assert sender.start() is sender
        add(connect, b"o-1")
        rmq.run_until_idle()
        assert [one.body for one in rmq.delivered("billing")] == [b"o-1"]
        rmq.advance(hours=8)
        add(connect, b"o-2", b"o-3")
        rmq.advance(seconds=1)
        assert [one.body for one in rmq.delivered("billing")] == [b"o-1", b"o-2", b"o-3"]
    add(connect, b"o-4")
    rmq.advance(hours=1)
    assert len(rmq.messages("orders")) == 3


def test_a_started_sender_tries_again_what_was_refused(rmq: Kit, connect: Callable[[], sqlite3.Connection]) -> None:
    rmq.faults.refuse_send("orders", busy=True)
    with OutboxSender(connect, rmq.producer()).start() as sender:
        add(connect, b"o-1")
        rmq.run_until_idle()
        assert (sender.sent, sender.failed) == (0, 1)
        rmq.advance(seconds=2)
        assert (sender.sent, [message.body for message in rmq.messages("orders")]) == (1, [b"o-1"])


def test_a_started_sender_tries_a_database_again_that_was_away_for_long(
    rmq: Kit, connect: Callable[[], sqlite3.Connection]
) -> None:
    is_away = False

    def connect_unless_away() -> sqlite3.Connection:
        if is_away:
            raise sqlite3.OperationalError("unable to open database file")
        return connect()

    with OutboxSender(connect_unless_away, rmq.producer()).start() as sender:
        is_away = True
        add(connect, b"o-1")
        rmq.advance(minutes=10)
        assert sender.sent == 0
        is_away = False
        rmq.advance(seconds=2)
        assert sender.sent == 1


def test_a_started_sender_dies_with_its_process(rmq: Kit, connect: Callable[[], sqlite3.Connection]) -> None:
    """What the dead one had claimed is sent by its successor, when the claim is over."""
    senders = []

    def shop(broker: Process) -> None:
        senders.append(OutboxSender(connect, broker.producer()).start())

    process = rmq.app("shop", shop)
    rmq.run_until_idle()
    process = rmq.crash(process) or process
    add(connect, b"o-1")
    rmq.advance(minutes=2)
    assert [sender.sent for sender in senders] == [0, 1]
    rmq.crash(process, restart=False)
    add(connect, b"o-2")
    rmq.advance(hours=1)
    assert [sender.sent for sender in senders] == [0, 1]
