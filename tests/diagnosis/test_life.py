"""The story of a message: complete for recorded stores, and event by event where its fate is known."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

import librmq
from librmq.consumer import DeliveredMessage
from librmq.diagnosis import StoreView, StoryEvent, plan_skip, skip, story
from librmq.diagnosis.view import Source
from librmq.message.properties import PropertyName
from librmq.message.topics import SystemTopic
from librmq.store import MessageStore
from librmq.testing import Kit
from tests.budget import many
from tests.reference import folders, jsonl, store_folders
from tests.stores import SMALL


@many
@pytest.mark.parametrize("folder", [*folders("clients-"), *store_folders(), *folders("timer-")])
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
                ends = events[len(told) :]
                assert all(one.at_ms is None for one in ends)
                assert {one.event for one in ends} <= {"dead", "filtered", "skipped", "passed", "not_passed"}


@pytest.mark.parametrize("folder", folders("clients-t"))
def test_each_transaction_of_a_recording_has_one_end(folder: Path) -> None:
    with StoreView.open(folder / "store") as view:
        halves = {m.unique_key for m in view.store if PropertyName.TRANSACTION_PREPARED in m.properties}
        for key in halves - {None}:
            assert key is not None
            ends = Counter(one.event for one in story(view, key) if one.event in ("committed", "rolled_back"))
            assert len(ends) <= 1


NAMED = ("retried", "dead", "filtered", "skipped", "passed", "not_passed")


def events(rmq: Kit, name: str) -> list[str]:
    return [
        f"{one.event} {one.group}" if one.group is not None and one.event in NAMED else one.event
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
        raise librmq.ReconsumeLater

    rmq.consumer("G", max_reconsume_times=2).subscribe("orders", fail)
    sent = rmq.producer().send("orders", b"x")
    rmq.advance(seconds=120)
    assert events(rmq, sent.message_id) == [
        "stored", "delayed", "retried G", "delayed", "retried G", "dead G", "dead G", "dead G", "dead G",
    ]  # fmt: skip


def test_a_dead_letter_tells_its_cause(rmq: Kit) -> None:
    def fail(message: object) -> None:
        raise librmq.DeadLetter("no such customer")

    rmq.consumer("G").subscribe("orders", fail)
    sent = rmq.producer().send("orders", b"x")
    rmq.advance(seconds=1)
    letter, end = [one for one in story(rmq.broker, sent.message_id) if one.event == "dead"]
    assert "no such customer" in letter.note
    assert (end.at_ms, end.topic, end.group) == (None, "orders", "G")


def test_a_retry_that_succeeds_ends_passed(rmq: Kit) -> None:
    attempts: list[int] = []

    def fail_once(message: DeliveredMessage) -> None:
        attempts.append(message.reconsume_times)
        if len(attempts) == 1:
            raise librmq.ReconsumeLater

    rmq.consumer("G").subscribe("orders", fail_once)
    sent = rmq.producer().send("orders", b"x")
    rmq.advance(seconds=60)
    assert events(rmq, sent.message_id) == ["stored", "delayed", "retried G", "passed G", "passed G"]


def test_a_dead_letter_that_was_sent_again_and_consumed(rmq: Kit) -> None:
    seen: list[bytes] = []

    def fail_once(message: DeliveredMessage) -> None:
        seen.append(message.body)
        if len(seen) == 1:
            raise librmq.DeadLetter("no such customer")

    rmq.consumer("G").subscribe("orders", fail_once)
    sent = rmq.producer().send("orders", b"x")
    rmq.advance(seconds=1)
    assert rmq.broker.resend_dead_letters("G") == 1
    rmq.advance(seconds=20)
    assert len(seen) == 2
    assert events(rmq, sent.message_id)[-2:] == ["dead G", "passed G"]


def test_a_message_that_the_groups_filter_rejects(rmq: Kit, tmp_path: Path) -> None:
    """The running broker knows filters by SQL and by tags; its files only the registered ones, by SQL."""
    seen: list[bytes] = []
    with librmq.Broker.open(tmp_path / "store", runner=rmq.runner) as broker:
        producer = librmq.Producer(broker, "P")
        cheap = producer.send("orders", b"cheap", tags="b", properties={"price": "1"}).message_id
        dear = producer.send("orders", b"dear", tags="b", properties={"price": "9"}).message_id
        by_sql, by_tags = librmq.PushConsumer(broker, "sql"), librmq.PushConsumer(broker, "tags")
        by_sql.subscribe("orders", lambda message: seen.append(message.body), sql="price > 5")
        by_tags.subscribe("orders", lambda message: seen.append(message.body), tags="a")
        by_sql.start()
        by_tags.start()
        rmq.advance(seconds=20)
        assert seen == [b"dear"]
        assert ends(broker, cheap) == {"sql": "filtered", "tags": "filtered"}
        assert ends(broker, dear) == {"sql": "passed", "tags": "filtered"}
        (event,) = [one for one in story(broker, cheap) if one.group == "sql"]
        assert "price > 5" in event.note
        by_sql.shutdown()
        by_tags.shutdown()
        late = producer.send("orders", b"late", properties={"price": "1"}).message_id
    assert ends(tmp_path / "store", cheap) == {"sql": "filtered", "tags": "passed"}
    assert ends(tmp_path / "store", dear)["sql"] == "passed"
    assert ends(tmp_path / "store", late)["sql"] == "not_passed"


def ends(source: Source, name: str) -> dict[str | None, str]:
    """Return the last event of a message by group."""
    return {one.group: one.event for one in story(source, name) if one.at_ms is None}


@pytest.mark.parametrize("folder", folders("clients-sql-filter"))
def test_a_recorded_group_passed_what_it_got(folder: Path) -> None:
    delivered = {
        one["msgId"] for row in jsonl(folder / "events.jsonl") if row["kind"] == "deliver" and row["client"] == "c1"
        for one in row["msgs"]
    }  # fmt: skip
    with StoreView.open(folder / "store") as view:
        sent = {message.message_id for message in view.store if message.topic == "SqlTopic"}
        told = {one: ends(view, one)["g_sql1"] for one in sent}
    assert {one for one, end in told.items() if end == "passed"} == delivered
    assert {end for one, end in told.items() if one not in delivered} == {"filtered"}


def test_a_message_that_the_group_skipped(rmq: Kit) -> None:
    rmq.broker.set_group("G")
    sent = rmq.producer().send("orders", b"x")
    rmq.broker.reset_group("G", "orders", "begin")
    skip(rmq.broker, plan_skip(rmq.broker, "G", "orders", to_end=True))
    assert ends(rmq.broker, sent.message_id) == {"G": "skipped"}
    rmq.broker.reset_group("G", "orders", "begin")
    assert ends(rmq.broker, sent.message_id) == {"G": "not_passed"}


def transaction(
    rmq: Kit, state: librmq.TransactionState, later: librmq.TransactionState = librmq.TransactionState.UNKNOWN
) -> str:
    producer = librmq.TransactionProducer(rmq.route, "P", lambda message: later)
    result = producer.send_in_transaction(librmq.Message("orders", b"x"), execute=lambda message, argument: state)
    return result.sent.message_id


@pytest.mark.parametrize("state", [librmq.TransactionState.COMMIT, librmq.TransactionState.ROLLBACK])
def test_a_transaction_that_ends_at_once(rmq: Kit, state: librmq.TransactionState) -> None:
    end = {librmq.TransactionState.COMMIT: "committed", librmq.TransactionState.ROLLBACK: "rolled_back"}[state]
    assert events(rmq, transaction(rmq, state)) == ["half", end]


def test_a_transaction_that_is_checked_and_then_ends(rmq: Kit) -> None:
    name = transaction(rmq, librmq.TransactionState.UNKNOWN, librmq.TransactionState.ROLLBACK)
    rmq.advance(seconds=200)
    assert events(rmq, name) == ["half", "checked", "rolled_back"]


def test_a_transaction_that_is_given_up(rmq: Kit) -> None:
    name = transaction(rmq, librmq.TransactionState.UNKNOWN)
    rmq.advance(seconds=60 * 20)
    found = events(rmq, name)
    assert found == ["half", *["checked"] * 15, "given_up"]
    assert {one.group for one in story(rmq.broker, name)} == {"P"}


def test_a_duplicate_is_reported(rmq: Kit) -> None:
    for _ in range(2):
        rmq.broker.store.append(librmq.Message("orders", b"x", unique_key="U1"))
    first, second = story(rmq.broker, "U1")
    assert (first.event, first.note) == ("stored", "")
    assert "duplicate" in second.note


def test_all_messages_of_a_key(rmq: Kit) -> None:
    ids = [rmq.producer().send("orders", b"x", keys="k").message_id for _ in range(3)]
    found: list[StoryEvent] = story(rmq.broker, "k")
    assert [one.unique_key for one in found] == ids


def test_an_op_message_without_its_tag_ends_no_half(tmp_path: Path) -> None:
    with MessageStore.open(tmp_path / "store", SMALL) as store:
        half = librmq.Message(SystemTopic.HALF, b"x")
        half.properties.update({"UNIQ_KEY": "K", PropertyName.REAL_TOPIC: "orders"})
        store.append(half, 0)
        store.append(librmq.Message(SystemTopic.OP, b"0"), 0)
        assert [one.event for one in story(StoreView.over(store), "K")] == ["half"]


def test_the_traces_of_its_sender_are_in_the_note() -> None:
    """SkyWalking's header has its parts in Base64."""
    segment = "1-VFJBQ0U=-U0VH-3-c2hvcA==-aW5zdGFuY2U=-L29yZGVycw==-MTI3LjAuMC4x"
    with Kit() as rmq:
        properties = {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01", "sw8": segment}
        both = rmq.producer().send("orders", "1", properties=properties)
        broken_segment = segment.replace("VFJB", "%")
        broken = rmq.producer().send("orders", "2", properties={"traceparent": "00", "sw8": broken_segment})
        notes = [story(rmq.broker, sent.message_id)[0].note for sent in (both, broken)]
    assert notes == [f"trace {'ab' * 16}; SkyWalking trace TRACE", f"SkyWalking sw8 {broken_segment}"]
