"""Test the message logic of an application, without a server or sleeping, with retries and crashes on request.

    pytest examples/test_message_logic.py                the fixture `rmq` comes with librmq
    python -m unittest examples/test_message_logic.py    the same without pytest

The application is `Billing`, which would normally be in its own module. It does not know about the tests.
"""

from __future__ import annotations

import unittest

import pytest

from librmq import DeliveredMessage, Producer, PushConsumer, ReconsumeLater, Route
from librmq.testing import Kit


class Billing:
    """A service that charges orders and sends receipts; ``accounts`` and ``charged`` stand for a database."""

    def __init__(self, route: Route, accounts: dict[str, int], charged: dict[str, int]) -> None:
        self.accounts = accounts
        self.charged = charged
        self.producer = Producer(route, "billing")
        self.consumer = PushConsumer(route, "billing", max_reconsume_times=3)
        self.consumer.subscribe("orders", tags="created")(self.charge)
        self.consumer.start()

    def charge(self, message: DeliveredMessage) -> None:
        order, customer, amount = message.keys[0], message.properties["customer"], int(message.body)
        if order in self.charged:
            return  # a duplicate
        if self.accounts[customer] < amount:
            raise ReconsumeLater("not enough money", delay_level=3)  # in 10 s
        self.accounts[customer] -= amount
        self.charged[order] = amount
        self.producer.send("receipts", b"paid", keys=order)


def order(rmq: Kit, amount: int, customer: str = "ada") -> None:
    rmq.producer().send("orders", b"%d" % amount, tags="created", keys="o-1", properties={"customer": customer})


def test_an_order_is_charged(rmq: Kit) -> None:
    accounts = {"ada": 100}
    rmq.app("billing", lambda route: Billing(route, accounts, {}))
    order(rmq, 30)
    rmq.run_until_idle()
    assert accounts == {"ada": 70}
    assert [message.keys for message in rmq.messages("receipts")] == [("o-1",)]


def test_messages_with_another_tag_are_ignored(rmq: Kit) -> None:
    charged: dict[str, int] = {}
    rmq.app("billing", lambda route: Billing(route, {"ada": 100}, charged))
    rmq.producer().send("orders", b"30", tags="cancelled", keys="o-1", properties={"customer": "ada"})
    rmq.run_until_idle()
    assert rmq.delivered("billing") == []
    assert charged == {}


def test_a_customer_without_money_is_asked_again(rmq: Kit) -> None:
    accounts = {"ada": 0}
    rmq.app("billing", lambda route: Billing(route, accounts, {}))
    order(rmq, 30)
    rmq.advance(seconds=5)
    accounts["ada"] = 50  # payday
    rmq.advance(seconds=10)
    assert accounts == {"ada": 20}
    assert [(one.attempt, one.outcome) for one in rmq.delivered("billing")] == [(0, "later"), (1, "returned")]


def test_unpaid_orders_become_dead_letters(rmq: Kit) -> None:
    rmq.app("billing", lambda route: Billing(route, {"ada": 0}, {}))
    order(rmq, 30)
    rmq.advance(hours=1)  # takes no time
    assert [message.keys for message in rmq.dead_letters("billing")] == [("o-1",)]


def test_a_bug_in_a_listener_fails_the_test(rmq: Kit) -> None:
    rmq.app("billing", lambda route: Billing(route, {"ada": 100}, {}))
    order(rmq, 30, customer="bob")
    with pytest.raises(KeyError, match="bob"):  # with the listener's own traceback
        rmq.run_until_idle()


def test_a_redelivery_after_a_crash_charges_once(rmq: Kit) -> None:
    accounts, charged = {"ada": 100}, dict[str, int]()
    billing = rmq.app("billing", lambda route: Billing(route, accounts, charged))
    order(rmq, 30)
    rmq.run_until_idle()
    rmq.crash(billing)  # before it stored its progress in the broker
    rmq.run_until_idle()
    assert len(rmq.delivered("billing")) == 2
    assert accounts == {"ada": 70}


@pytest.mark.rmq_explore(runs=100)
def test_no_schedule_charges_a_customer_twice(rmq: Kit) -> None:
    """Run under a hundred schedules, with crashes, rebalances and lost answers in any order."""
    accounts, charged = {"ada": 100}, dict[str, int]()
    rmq.app("billing", lambda route: Billing(route, accounts, charged))
    order(rmq, 30)
    rmq.run_until_idle()
    assert accounts["ada"] == 70


class BillingTest(unittest.TestCase):
    """Use `Kit` instead of the fixture, without pytest."""

    def test_an_order_is_charged(self) -> None:
        accounts = {"ada": 100}
        with Kit() as rmq:
            rmq.app("billing", lambda route: Billing(route, accounts, {}))
            order(rmq, 30)
            rmq.run_until_idle()
            assert [message.keys for message in rmq.messages("receipts")] == [("o-1",)]
        assert accounts == {"ada": 70}
