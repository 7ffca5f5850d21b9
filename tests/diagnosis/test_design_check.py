"""The design check finds each planted flaw, and nothing in a sound design."""

from __future__ import annotations

import random

import pytest

from librmq.diagnosis import Thresholds, design_check, topic_volumes
from librmq.testing import Kit

LIMITS = Thresholds(busy_messages=50, large_body=1000)


def kinds(rmq: Kit) -> list[str]:
    return [one.kind for one in design_check(rmq.broker, LIMITS)]


@pytest.fixture
def sound(rmq: Kit) -> Kit:
    rmq.broker.create_topic("T", 4)
    for number in range(80):
        rmq.producer().send("T", b"x" * random.Random(number).randrange(900), keys=f"k{number}")
    rmq.broker.set_group("G")
    rmq.broker.reset_group("G", "T", "end")
    return rmq


def test_a_sound_design_has_no_findings(sound: Kit) -> None:
    assert kinds(sound) == []


def test_volumes_count_stored_messages(sound: Kit) -> None:
    (volume,) = topic_volumes(sound.broker)
    records = [message.size for message in sound.broker.messages("T")]
    assert volume == ("T", 4, 80, sum(records), max(records), 20)


def test_few_queues_for_many_messages(sound: Kit) -> None:
    sound.broker.create_topic("Narrow", 1)
    for _ in range(60):
        sound.producer().send("Narrow", b"x")
    assert kinds(sound) == ["few-queues"]


def test_one_queue_with_most_of_a_topic(sound: Kit) -> None:
    """The mean is over all queues, so seven that are empty do not hide the one that has everything."""
    sound.broker.create_topic("Skewed", 8)
    for number in range(60):
        sound.producer().send("Skewed", b"x", queue=number % 20 and 3)
    (found,) = design_check(sound.broker, LIMITS)
    assert (found.kind, found.subject) == ("skewed-queues", "topic Skewed")
    assert found.evidence["queues"] == 8


def test_large_bodies(sound: Kit) -> None:
    sound.producer().send("T", random.Random(1).randbytes(1500))
    assert kinds(sound) == ["large-bodies"]


def test_mixed_kinds(sound: Kit) -> None:
    sound.producer().send("T", b"x", delay=1)
    sound.advance(seconds=3)
    assert kinds(sound) == ["mixed-kinds"]


def test_a_frequent_key_is_found(sound: Kit) -> None:
    for _ in range(40):
        sound.producer().send("T", b"x", keys="hot")
    (found,) = design_check(sound.broker, LIMITS)
    assert (found.kind, found.evidence["key"]) == ("skewed-key", "hot")


def test_tags_of_unlike_volume(sound: Kit) -> None:
    """A rare tag waits behind a frequent one; tags of like volume are sound."""
    for tag, count in (("browsed", 99), ("paid", 1)):
        for _ in range(count):
            sound.producer().send("T", b"x", tags=tag)
    assert kinds(sound) == []
    sound.producer().send("T", b"x", tags="browsed")
    (found,) = design_check(sound.broker, LIMITS)
    assert (found.kind, found.subject, found.evidence["tags"]) == (
        "uneven-tags",
        "topic T",
        {"browsed": 100, "paid": 1},
    )
    assert "the tag paid: in a backlog" in found.what


def test_a_group_over_topics_of_unlike_size(sound: Kit) -> None:
    sound.broker.create_topic("Other", 2)
    sound.producer().send("Other", b"x")
    sound.broker.reset_group("G", "Other", "begin")
    (found,) = design_check(sound.broker, LIMITS)
    assert (found.kind, found.severity) == ("group-over-topics", "info")
    for _ in range(40):
        sound.producer().send("T", b"x")
    (found,) = design_check(sound.broker, LIMITS)
    assert found.severity == "warning"
