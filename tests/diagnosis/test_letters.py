"""Dead letters by cause: the exception that a consumer stored, or else what the record shows."""

from __future__ import annotations

from librmq import DeadLetter, ReconsumeLater
from librmq.diagnosis import dead_letter_causes, dead_letters, diagnose
from librmq.testing import Kit


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


def test_numbers_do_not_separate_causes(rmq: Kit) -> None:
    numbers = iter(range(100))

    def fail(message: object) -> None:
        raise DeadLetter(f"no customer {next(numbers)}")

    rmq.consumer("G").subscribe("orders", fail)
    for _ in range(5):
        rmq.producer().send("orders", b"x")
    rmq.advance(seconds=1)
    (cause,) = dead_letter_causes(rmq.broker)
    assert (cause.group, cause.original_topic, cause.messages) == ("G", "orders", 5)
    assert "no customer #" in cause.cause
    (found,) = diagnose(rmq.broker)
    assert (found.kind, found.evidence["messages"]) == ("dead-letters", 5)


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
