"""The story of a message: complete for recorded stores, and event by event where its fate is known."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from librmq import DeadLetter, Message, ReconsumeLater, TransactionProducer, TransactionState
from librmq.diagnosis import StoreView, StoryEvent, story
from librmq.message import record
from librmq.message.topics import HALF_TOPIC, OP_TOPIC
from librmq.store import MessageStore
from librmq.testing import Kit
from tests.reference import folders
from tests.stores import SMALL


@pytest.mark.many
@pytest.mark.parametrize("folder", [*folders("clients-"), *folders("store-"), *folders("timer-")])
def test_every_record_is_in_the_story_of_its_message(folder: Path) -> None:
    for path in sorted(folder.glob("store*")):
        if not path.is_dir():
            continue
        with StoreView.open(path) as view:
            records: dict[str, list[int]] = {}
            for message in view.store:
                if message.unique_key is not None:
                    records.setdefault(message.unique_key, []).append(message.physical_offset)
            for key in [*records][:60]:
                events = story(view, key)
                told = [one for one in events if one.at_ms is not None]
                assert {one.physical_offset for one in told} >= set(records[key])
                assert [one.physical_offset for one in told] == sorted(one.physical_offset for one in told)
                assert [one.event for one in events[len(told) :]] == [
                    one.event for one in events if one.event in ("passed", "not_passed")
                ]


@pytest.mark.parametrize("folder", folders("clients-t"))
def test_each_transaction_of_a_recording_has_one_end(folder: Path) -> None:
    with StoreView.open(folder / "store") as view:
        halves = {m.unique_key for m in view.store if record.PROPERTY_TRANSACTION_PREPARED in m.properties}
        for key in halves - {None}:
            assert key is not None
            ends = Counter(one.event for one in story(view, key) if one.event in ("committed", "rolled_back"))
            assert len(ends) <= 1


def events(rmq: Kit, name: str) -> list[str]:
    return [
        f"{one.event} {one.group}" if one.event in ("passed", "not_passed", "retried", "dead") else one.event
        for one in story(rmq.broker, name)
    ]


def test_a_plain_message_and_the_groups_that_passed_it(rmq: Kit) -> None:
    seen: list[bytes] = []
    rmq.consumer("fast").subscribe("orders", lambda message: seen.append(message.body))
    sent = rmq.producer().send("orders", b"x")
    rmq.advance(seconds=20)  # its progress is stored by then
    rmq.broker.set_group("slow")
    rmq.broker.reset_group("slow", "orders", "begin")
    assert events(rmq, sent.message_id) == ["stored", "passed fast", "not_passed slow"]


def test_a_message_without_groups_has_its_record_alone(rmq: Kit) -> None:
    sent = rmq.producer().send("orders", b"x", keys="k7")
    assert events(rmq, sent.message_id) == ["stored"]
    assert [one.unique_key for one in story(rmq.broker, "k7")] == [sent.message_id]
    assert story(rmq.broker, "k8") == []
    assert story(rmq.broker, "k7", topic="other") == []


def test_by_offset_id(rmq: Kit) -> None:
    sent = rmq.producer().send("orders", b"x")
    (message,) = rmq.broker.store.find_by_id(sent.message_id)
    assert [one.event for one in story(rmq.broker, message.offset_id)] == ["stored"]


def test_a_delayed_message(rmq: Kit) -> None:
    sent = rmq.producer().send("orders", b"x", delay=5)
    assert events(rmq, sent.message_id) == ["delayed"]
    rmq.advance(seconds=7)
    assert events(rmq, sent.message_id) == ["delayed", "delivered"]


def test_retries_up_to_the_dead_letter(rmq: Kit) -> None:
    def fail(message: object) -> None:
        raise ReconsumeLater

    rmq.consumer("G", max_reconsume_times=2).subscribe("orders", fail)
    sent = rmq.producer().send("orders", b"x")
    rmq.advance(seconds=120)
    assert events(rmq, sent.message_id) == [
        "stored", "delayed", "retried G", "delayed", "retried G", "dead G", "passed G", "passed G", "passed G",
    ]  # fmt: skip


def test_a_dead_letter_tells_its_cause(rmq: Kit) -> None:
    def fail(message: object) -> None:
        raise DeadLetter("no such customer")

    rmq.consumer("G").subscribe("orders", fail)
    sent = rmq.producer().send("orders", b"x")
    rmq.advance(seconds=1)
    (dead,) = [one for one in story(rmq.broker, sent.message_id) if one.event == "dead"]
    assert "no such customer" in dead.note


def transaction(rmq: Kit, state: TransactionState, later: TransactionState = TransactionState.UNKNOWN) -> str:
    producer = TransactionProducer(rmq.route, "P", lambda message: later)
    result = producer.send_in_transaction(Message("orders", b"x"), execute=lambda message, argument: state)
    return result.sent.message_id


@pytest.mark.parametrize("state", [TransactionState.COMMIT, TransactionState.ROLLBACK])
def test_a_transaction_that_ends_at_once(rmq: Kit, state: TransactionState) -> None:
    end = {TransactionState.COMMIT: "committed", TransactionState.ROLLBACK: "rolled_back"}[state]
    assert events(rmq, transaction(rmq, state)) == ["half", end]


def test_a_transaction_that_is_checked_and_then_ends(rmq: Kit) -> None:
    name = transaction(rmq, TransactionState.UNKNOWN, TransactionState.ROLLBACK)
    rmq.advance(seconds=200)
    assert events(rmq, name) == ["half", "checked", "rolled_back"]


def test_a_transaction_that_is_given_up(rmq: Kit) -> None:
    name = transaction(rmq, TransactionState.UNKNOWN)
    rmq.advance(seconds=60 * 20)
    found = events(rmq, name)
    assert found == ["half", *["checked"] * 15, "given_up"]
    assert {one.group for one in story(rmq.broker, name)} == {"P"}


def test_a_duplicate_is_reported(rmq: Kit) -> None:
    for _ in range(2):
        rmq.broker.store.append(Message("orders", b"x", unique_key="U1"))
    first, second = story(rmq.broker, "U1")
    assert (first.event, first.note) == ("stored", "")
    assert "duplicate" in second.note


def test_all_messages_of_a_key(rmq: Kit) -> None:
    ids = [rmq.producer().send("orders", b"x", keys="k").message_id for _ in range(3)]
    found: list[StoryEvent] = story(rmq.broker, "k")
    assert [one.unique_key for one in found] == ids


def test_an_op_message_without_its_tag_ends_no_half(tmp_path: Path) -> None:
    with MessageStore.open(tmp_path / "store", SMALL) as store:
        half = Message(HALF_TOPIC, b"x")
        half.properties.update({"UNIQ_KEY": "K", record.PROPERTY_REAL_TOPIC: "orders"})
        store.append(half, 0)
        store.append(Message(OP_TOPIC, b"0"), 0)
        assert [one.event for one in story(StoreView.over(store), "K")] == ["half"]
