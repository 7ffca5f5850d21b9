"""Halves that checks have given up: listed until they are committed or rolled back, which is final."""

from __future__ import annotations

import pytest

from librmq import Message, TransactionProducer, TransactionState
from librmq.diagnosis import decide_half, diagnose, given_up, story
from librmq.errors import TransactionRefusedError
from librmq.testing import Kit


@pytest.fixture
def halves(rmq: Kit) -> list[str]:
    """Return the ids of three halves that were given up."""
    producer = TransactionProducer(rmq.route, "P", lambda message: TransactionState.UNKNOWN)
    ids = [
        producer.send_in_transaction(
            Message("orders", b"%d" % number), execute=lambda message, argument: TransactionState.UNKNOWN
        ).sent.message_id
        for number in range(3)
    ]
    rmq.advance(seconds=60 * 20)
    return ids


def test_they_are_listed_and_found(rmq: Kit, halves: list[str]) -> None:
    found = given_up(rmq.broker)
    assert [(one.group, one.topic, one.unique_key, one.checks) for one in found] == [
        ("P", "orders", name, 15) for name in halves
    ]
    assert all(one.can_be_decided for one in found)
    assert [(one.kind, one.evidence["halves"]) for one in diagnose(rmq.broker)] == [("given-up-halves", 3)]


def test_decided_later(rmq: Kit, halves: list[str]) -> None:
    first, second, third = given_up(rmq.broker)
    decide_half(rmq.broker, first.physical_offset, commit=True)
    decide_half(rmq.broker, second.physical_offset, commit=False)
    assert given_up(rmq.broker) == [third]
    assert [message.body for message in rmq.broker.messages("orders")] == [b"0"]
    assert [one.event for one in story(rmq.broker, halves[0])][-1] == "committed"
    assert [one.event for one in story(rmq.broker, halves[1])][-1] == "rolled_back"


def test_a_decision_is_made_once(rmq: Kit, halves: list[str]) -> None:
    place = given_up(rmq.broker)[0].physical_offset
    decide_half(rmq.broker, place, commit=False)
    with pytest.raises(TransactionRefusedError, match="expected an undecided half"):
        decide_half(rmq.broker, place, commit=True)
    assert list(rmq.broker.messages("orders")) == []


def test_decisions_outlive_the_broker(rmq: Kit, halves: list[str]) -> None:
    for one in given_up(rmq.broker)[:2]:
        decide_half(rmq.broker, one.physical_offset, commit=False)
    rmq.crash_broker()
    rmq.advance(seconds=300)
    assert [one.unique_key for one in given_up(rmq.broker)] == halves[2:]
