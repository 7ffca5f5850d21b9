"""Dead letters by cause: the exception that a consumer stored, or else what the record shows."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from librmq import DeadLetter, Message, MessageStore, ReconsumeLater, StoreConfig
from librmq.console import render_page
from librmq.diagnosis import dead_letter_causes, dead_letters, diagnose, report
from librmq.diagnosis.view import StoreView, group_summaries
from librmq.files._memory import MemoryFiles
from librmq.testing import Kit

CASES: list[tuple[dict[str, str], int, str, str]] = [
    # properties, reconsume times: topic, cause
    ({}, 0, "%DLQ%G", "never retried"),
    ({"RETRY_TOPIC": "orders"}, 1, "orders", "never retried"),
    ({"RETRY_TOPIC": "orders"}, 2, "orders", "retries used up"),
    ({"RETRY_TOPIC": "", "DLQ_ORIGIN_TOPIC": "paid"}, 16, "paid", "retries used up"),
    ({"RETRY_TOPIC": "orders", "DLQ_ORIGIN_TOPIC": "paid"}, 16, "orders", "retries used up"),
    ({"RETRY_TOPIC": "%RETRY%G_orders"}, 3, "orders", "retries used up"),
    ({"RETRY_TOPIC": "%RETRY%H_orders"}, 3, "%RETRY%H_orders", "retries used up"),
    ({"RECONSUME_TIME": "3"}, 1, "%DLQ%G", "ordered, retries used up"),
    ({"RECONSUME_TIME": "three"}, 1, "%DLQ%G", "never retried"),
    ({"RECONSUME_TIME": "99999999999"}, 2, "%DLQ%G", "retries used up"),
    ({"DEAD_LETTER_CAUSE": "", "RECONSUME_TIME": "3"}, 1, "%DLQ%G", "ordered, retries used up"),
    ({"DEAD_LETTER_CAUSE": "KeyError: 4711 at 0x7f3a"}, 1, "%DLQ%G", "KeyError: # at #"),
    ({"DEAD_LETTER_CAUSE": "no order DEADBEEF01", "RECONSUME_TIME": "3"}, 9, "%DLQ%G", "no order #"),
]
"""Dead letters of the group G, for a store and for Spark's expressions."""


@pytest.mark.parametrize(("properties", "reconsume_times", "topic", "cause"), CASES)
def test_origin_and_cause(properties: dict[str, str], reconsume_times: int, topic: str, cause: str) -> None:
    files = MemoryFiles()
    with MessageStore.open("/s", StoreConfig.tiny(), files=files) as store:
        letter = Message("%DLQ%G", b"x")
        letter.properties.update(properties)
        store.append(letter, reconsume_times=reconsume_times)
        (row,) = dead_letter_causes(StoreView.over(store))
    assert (row.group, row.original_topic, row.cause) == ("G", topic, cause)


def test_letters_with_their_causes(rmq: Kit) -> None:
    def fail(message: object) -> None:
        raise DeadLetter("no customer 4711")

    rmq.consumer("G").subscribe("orders", fail)
    sent = rmq.producer().send("orders", b"x")
    rmq.advance(seconds=1)
    (letter,) = dead_letters(rmq.broker)
    assert (letter.group, letter.original_topic, letter.unique_key) == ("G", "orders", sent.message_id)
    assert "no customer 4711" in letter.cause
    assert dead_letters(rmq.broker, group="other") == []


def test_used_up_retries_count_each_attempt(rmq: Kit) -> None:
    def fail(message: object) -> None:
        raise ReconsumeLater

    rmq.consumer("G", max_reconsume_times=1).subscribe("orders", fail)
    rmq.producer().send("orders", b"x")
    rmq.advance(seconds=60)
    (cause,) = dead_letter_causes(rmq.broker)
    assert (cause.messages, cause.most_times) == (1, 2)
    assert cause.first_timestamp_ms == cause.last_timestamp_ms


def test_rare_causes_share_a_finding(rmq: Kit) -> None:
    causes = iter(f"no {'customer' * number}" for number in (1, 1, 2, 3, 4, 5, 6, 7))

    def fail(message: object) -> None:
        raise DeadLetter(next(causes))

    rmq.consumer("G").subscribe("orders", fail)
    for _ in range(8):
        rmq.producer().send("orders", b"x")
    rmq.advance(seconds=1)
    found = diagnose(rmq.broker)
    assert sorted((one.evidence["causes"], one.evidence["messages"]) for one in found) == [(1, 1)] * 4 + [
        (1, 2),
        (2, 2),
    ]


def test_letters_that_were_sent_again_wait_no_more(rmq: Kit) -> None:
    causes = iter(["no stock", "no stock", "no stock", "no money"])

    def fail(message: object) -> None:
        raise DeadLetter(next(causes))

    consumer = rmq.consumer("G")
    consumer.subscribe("orders", fail)
    for _ in range(4):
        rmq.producer().send("orders", b"x")
        rmq.advance(seconds=10)
    consumer.shutdown()
    before = datetime.fromtimestamp(rmq.clock.now_ms() / 1000, UTC)
    rmq.advance(seconds=10)
    letters = rmq.dead_letters("G")
    assert rmq.broker.resend_dead_letters("G", letters[:2]) == 2

    money, stock = dead_letter_causes(rmq.broker)
    assert [(cause.messages, cause.resent) for cause in (money, stock)] == [(1, 0), (1, 2)]
    assert stock.first_timestamp_ms == stock.last_timestamp_ms == letters[2].store_timestamp_ms
    found = [finding for finding in diagnose(rmq.broker) if finding.kind == "dead-letters"]
    assert [(finding.evidence["messages"], finding.evidence["resent"]) for finding in found] == [(1, 0), (1, 2)]
    assert found[1].what.endswith("no stock. 2 more were sent again.")
    (summary,) = group_summaries(StoreView.of(rmq.broker), includes_own=False)
    assert (summary.dead_letters, summary.resent) == (2, 2)

    assert rmq.broker.resend_dead_letters("G") == 2
    assert [(cause.messages, cause.resent) for cause in dead_letter_causes(rmq.broker)] == [(0, 1), (0, 3)]
    assert [finding for finding in diagnose(rmq.broker) if finding.kind == "dead-letters"] == []
    page = render_page(report(rmq.broker))
    assert "4 more were sent again" in page

    store = rmq.broker.store
    with MessageStore.open(store.path, store.config, files=store.files, read_only=True, at=before) as past:
        assert sum(cause.messages for cause in dead_letter_causes(StoreView.over(past))) == 4
