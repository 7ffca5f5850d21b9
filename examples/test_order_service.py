"""Tests of ``order_service.py``: its rules by the kit, its pages by HTTP, and payments of an official client.

pytest examples/test_order_service.py
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import order_service
import pytest
import sqlalchemy

from librmq import Broker, ManualRunner, Producer, Route
from librmq.testing import Kit, ServedKit


class Shop:
    """The service in a test, with a database of its own."""

    def __init__(self, rmq: Kit, folder: Path) -> None:
        self.database = sqlalchemy.create_engine(f"sqlite:///{folder}/orders.db")
        self.rmq = rmq
        self.process = rmq.app("shop", self._start)

    def _start(self, broker: Route) -> order_service.OrderService:
        self.service = order_service.OrderService(self.database, broker)
        self.service.start()
        return self.service

    def place(self, number: str) -> None:
        self.service.place(number, "coat")
        self.rmq.run_until_idle()

    def causes(self) -> list[str]:
        return [letter.properties["DEAD_LETTER_CAUSE"] for letter in self.rmq.dead_letters("order-payments")]


@pytest.fixture
def shop(rmq: Kit, tmp_path: Path) -> Iterator[Shop]:
    made = Shop(rmq, tmp_path)
    yield made
    made.database.dispose()


def test_an_order_is_announced_and_paid(rmq: Kit, shop: Shop) -> None:
    rmq.consumer("warehouse").subscribe("orders", lambda message: None)
    shop.place("o-1")
    rmq.producer().send("payments", b"o-1")
    rmq.advance(hours=1)
    assert shop.service.state("o-1") == "paid"
    assert [one.message.json() for one in rmq.delivered("warehouse")] == [{"number": "o-1", "product": "coat"}]


def test_an_order_that_is_not_paid_is_cancelled(rmq: Kit, shop: Shop) -> None:
    shop.place("o-1")
    rmq.advance(minutes=29)
    assert shop.service.state("o-1") == "placed"
    rmq.advance(minutes=2)
    assert shop.service.state("o-1") == "cancelled"


def test_a_payment_counts_once_though_it_comes_twice(rmq: Kit, shop: Shop) -> None:
    shop.place("o-1")
    rmq.faults.lose_answer("payments")  # so it is sent again
    rmq.producer().send("payments", b"o-1")
    rmq.advance(minutes=31)
    assert [one.outcome for one in rmq.delivered("order-payments")] == ["returned", "returned"]
    assert (shop.service.state("o-1"), shop.causes()) == ("paid", [])


def test_a_payment_that_is_late_or_wrong_is_a_dead_letter(rmq: Kit, shop: Shop) -> None:
    shop.place("o-1")
    rmq.advance(minutes=31)
    for number in (b"o-1", b"o-9"):
        rmq.producer().send("payments", number)
        rmq.run_until_idle()
    assert shop.causes() == [
        "DeadLetter: order o-1 is not to be paid: it is cancelled",
        "DeadLetter: there is no order o-9",
    ]


def test_a_crash_loses_no_message_of_the_outbox(rmq: Kit, shop: Shop) -> None:
    rmq.consumer("warehouse").subscribe("orders", lambda message: None)
    shop.service.place("o-1", "coat")
    rmq.crash(shop.process)  # the order is committed, and nothing is sent yet
    rmq.advance(minutes=31)
    assert len(rmq.delivered("warehouse")) == 1


async def call_the_pages(tmp_path: Path) -> None:
    runner = ManualRunner()
    with Broker.temporary(runner=runner) as broker, Producer(broker, "bank") as bank:
        app = order_service.make_app(f"sqlite:///{tmp_path}/orders.db", broker=broker)
        transport = httpx.ASGITransport(app)
        async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://s") as web:
            bank.send("payments", b"o-1")
            runner.advance(1_000)
            page = (await web.get("/dead-letters")).text
            assert "<td>o-1<td>DeadLetter: there is no order o-1" in page
            assert (await web.post("/orders/o-1", params={"product": "coat"})).status_code == 202
            assert (await web.post("/dead-letters")).json() == {"sent": 1}
            runner.advance(1_000)
            assert (await web.get("/orders/o-1")).json() == {"number": "o-1", "state": "paid"}
            assert (await web.get("/orders/o-2")).status_code == 404
            assert 'librmq_consumed_total{group="order-payments"' in (await web.get("/metrics")).text


def test_the_pages(tmp_path: Path) -> None:
    asyncio.run(call_the_pages(tmp_path))


def test_a_payment_by_an_official_client(rmq_grpc: ServedKit, tmp_path: Path) -> None:
    """The bank uses RocketMQ's own client; the test moves the clock of both."""
    rocketmq = pytest.importorskip("rocketmq")
    shop = Shop(rmq_grpc.kit, tmp_path)
    shop.place("o-1")
    bank = rocketmq.Producer(rocketmq.ClientConfiguration(rmq_grpc.address, rocketmq.Credentials()), ("payments",))
    bank.startup()
    try:
        message = rocketmq.Message()
        message.topic, message.body = "payments", b"o-1"
        bank.send(message)
    finally:
        bank.shutdown()
    rmq_grpc.advance(minutes=31)
    assert shop.service.state("o-1") == "paid"
    shop.database.dispose()
