"""Policies for a backlog: a plan changes nothing; a skip does what its plan says and can be replayed."""

from __future__ import annotations

import pytest

from librmq import ConfigError, diagnosis
from librmq.protocol import UpdateOffset
from librmq.testing import Kit


@pytest.fixture
def behind(rmq: Kit) -> Kit:
    """Return a group that has consumed none of 20 messages in two queues, sent 10 s apart."""
    rmq.broker.create_topic("T", 2)
    for number in range(20):
        rmq.producer().send("T", b"%d" % number, keys=f"k{number}", queue=number % 2)
        rmq.advance(seconds=10)
    rmq.broker.set_group("G")
    rmq.broker.reset_group("G", "T", "begin")
    return rmq


def ends(plan: diagnosis.Skip) -> dict[int, int]:
    return {one.queue_id: one.end for one in plan.queues}


def test_plans_by_age_by_lag_and_to_the_end(behind: Kit) -> None:
    broker = behind.broker
    assert ends(diagnosis.plan_skip(broker, "G", "T", to_end=True)) == {0: 10, 1: 10}
    assert ends(diagnosis.plan_skip(broker, "G", "T", lag_above=3)) == {0: 7, 1: 7}
    plan = diagnosis.plan_skip(broker, "G", "T", older_than=65)
    stored = [message.store_timestamp_ms for message in broker.messages("T")]
    now_ms = behind.clock.now_ms()
    assert plan.messages == sum(one < now_ms - 65_000 for one in stored) == 14
    assert diagnosis.lag(broker).total == 20
    assert diagnosis.plan_skip(broker, "G", "T", older_than=10_000).queues == ()


def test_a_skip_follows_its_plan_and_is_recorded(behind: Kit) -> None:
    plan = diagnosis.plan_skip(behind.broker, "G", "T", lag_above=3)
    done = diagnosis.skip(behind.broker, plan)
    assert behind.broker.consumer_offsets("G", "T") == {0: 7, 1: 7}
    assert done._replace(at_ms=None) == plan
    assert diagnosis.skipped(behind.broker) == [done]
    assert diagnosis.lag(behind.broker).total == 6


def test_a_second_group_replays_skipped_messages(behind: Kit) -> None:
    diagnosis.skip(behind.broker, diagnosis.plan_skip(behind.broker, "G", "T", to_end=True))
    (note,) = diagnosis.skipped(behind.broker)
    assert diagnosis.replay(behind.broker, note, "later") == 20
    seen: list[bytes] = []
    behind.consumer("later").subscribe("T", lambda message: seen.append(message.body))
    behind.advance(seconds=30)
    assert sorted(seen, key=int) == [b"%d" % number for number in range(20)]
    with pytest.raises(ConfigError, match="second group"):
        diagnosis.replay(behind.broker, note, "G")


def test_messages_are_set_aside_in_another_topic(behind: Kit) -> None:
    done = diagnosis.set_aside(behind.broker, diagnosis.plan_skip(behind.broker, "G", "T", lag_above=5), "T-aside")
    assert (done.aside, done.messages) == ("T-aside", 10)
    copies = list(behind.broker.messages("T-aside"))
    assert sorted(int(one.body) for one in copies) == list(range(10))
    assert {one.keys for one in copies} == {(f"k{number}",) for number in range(10)}
    assert diagnosis.lag(behind.broker, group="G").total == 10
    with pytest.raises(ConfigError, match="another"):
        diagnosis.set_aside(behind.broker, done, "T")


def test_a_group_continues_with_its_backlog_in_a_new_topic(behind: Kit) -> None:
    """The consumer gets each waiting message from the new topic, and new messages from the old one."""
    plan = diagnosis.plan_skip(behind.broker, "G", "T", to_end=True)
    assert diagnosis.move_to(behind.broker, plan, "T-backlog", queues=5).aside == "T-backlog"
    assert behind.broker.topics()["T-backlog"].read_queues == 5
    assert {one.topic: one.lag for one in diagnosis.lag(behind.broker, group="G").by_topic()} == {
        "T": 0,
        "T-backlog": 20,
    }
    seen: list[tuple[str, int]] = []
    consumer = behind.consumer("G")
    for topic in ("T", "T-backlog"):
        consumer.subscribe(topic, lambda message: seen.append((message.topic, int(message.body))))
    behind.producer().send("T", b"20")
    behind.advance(seconds=30)
    assert sorted(seen) == [("T", 20), *(("T-backlog", number) for number in range(20))]
    with pytest.raises(ConfigError, match="another"):
        diagnosis.move_to(behind.broker, plan, "T")


def test_a_group_continues_under_a_new_name(behind: Kit) -> None:
    behind.broker.reset_group("G", "T", 4)
    assert diagnosis.continue_as(behind.broker, "G", "G2", "T") == {0: 4, 1: 4}
    for wrong in (("none", "G3"), ("G", "G2")):
        with pytest.raises(ConfigError):
            diagnosis.continue_as(behind.broker, *wrong, "T")
    behind.broker.call(UpdateOffset("G", "T", 0, 99))
    assert diagnosis.continue_as(behind.broker, "G", "G3", "T") == {0: 10, 1: 4}


def test_an_outdated_plan_is_refused(behind: Kit) -> None:
    plan = diagnosis.plan_skip(behind.broker, "G", "T", lag_above=8)
    behind.broker.reset_group("G", "T", 5)
    with pytest.raises(ConfigError, match="make a new plan"):
        diagnosis.skip(behind.broker, plan)
    assert behind.broker.consumer_offsets("G", "T") == {0: 5, 1: 5}
    assert diagnosis.skipped(behind.broker) == []


def test_one_policy_at_a_time(behind: Kit) -> None:
    for wrong in ({}, {"to_end": True, "lag_above": 1}, {"older_than": -1}, {"lag_above": -1}):
        with pytest.raises(ConfigError):
            diagnosis.plan_skip(behind.broker, "G", "T", **wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no progress"):
        diagnosis.plan_skip(behind.broker, "other", "T", to_end=True)
