"""Schedules: each due time has exactly one message, over clocks that move, processes, restarts and kills."""

from __future__ import annotations

import logging
import os
import random
import sys
import time
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest

import librmq
from librmq import Broker, BrokerError, ConfigError, ManualClock, ManualRunner, MessageIllegalError, PushConsumer
from librmq.errors import MissingExtraError
from librmq.message import StoredMessage
from librmq.scheduling.schedules import ScheduleRule
from librmq.testing import Kit
from librmq.wire.remoting import RemotingServer
from tests.conftest import SlowBudget
from tests.programs import Fork

BERLIN = ZoneInfo("Europe/Berlin")
HOUR_MS = 3_600_000
START = datetime(2026, 1, 1, tzinfo=UTC)
START_MS = round(START.timestamp() * 1000)


def due_ms(message: StoredMessage) -> int:
    return int(message.properties["SCHEDULE_DUE_MS"])


def dues(broker: Broker, topic: str = "reports") -> list[int]:
    return sorted(map(due_ms, broker.messages(topic)))


def opened(path: Path, now_ms: int) -> tuple[Broker, ManualRunner]:
    runner = ManualRunner(ManualClock(now_ms))
    return Broker.open(path, runner=runner), runner


def test_a_day_of_cron_and_of_an_interval(rmq: Kit) -> None:
    broker = rmq.broker
    broker.set_schedule("daily", topic="reports", cron="30 6 * * *", timezone="Europe/Berlin", body="go")
    broker.set_schedule("beat", topic="health", every=timedelta(minutes=5), properties={"by": "test"})
    begin_ms = rmq.clock.now_ms()
    rmq.consumer("ops", consume_from=librmq.ConsumeFrom.FIRST).subscribe("health", lambda message: None)
    rmq.advance(hours=24)
    (report,) = broker.messages("reports")
    at = datetime.fromtimestamp(due_ms(report) / 1000, BERLIN)
    assert (at.hour, at.minute, report.body) == (6, 30, b"go")
    assert report.unique_key == ScheduleRule.message_id("daily", due_ms(report))
    assert len(report.unique_key) == 32
    assert dues(broker, "health") == [begin_ms + number * 300_000 for number in range(1, 289)]
    assert {message.properties["by"] for message in broker.messages("health")} == {"test"}
    assert {message.body for message in broker.messages("health")} == {b"beat"}
    assert len(rmq.delivered("ops")) == 288


def test_a_schedule_gives_its_topic_a_type(tmp_path: Path) -> None:
    broker, runner = opened(tmp_path / "s", START_MS)
    with broker:
        broker.create_topic("health", 3)
        for topic in ("health", "reports"):
            broker.set_schedule(topic, topic=topic, every=60, message_type="DELAY")
            broker.set_schedule(topic, topic=topic, every=60)
        types = {topic: broker.topics()[topic].message_type for topic in ("health", "reports")}
        assert types == {"health": "DELAY", "reports": "DELAY"}
        assert broker.topics()["health"].write_queues == 3
        with pytest.raises(BrokerError, match="message_type: expected one of"):
            broker.set_schedule("x", topic="new", every=60, message_type="SLOW")  # type: ignore[arg-type]
        assert "new" not in broker.topics()
        assert [schedule.name for schedule in broker.schedules()] == ["health", "reports"]
        runner.advance(60_000)
        assert len(dues(broker)) == 1


def test_a_year_takes_the_time_of_its_events() -> None:
    runner = ManualRunner(ManualClock(START_MS))
    with Broker.temporary(runner=runner) as broker:
        broker.set_schedule("daily", topic="reports", cron="30 6 * * *", timezone="Europe/Berlin", missed="all")
        runner.advance(365 * 24 * HOUR_MS)
        times = [datetime.fromtimestamp(at / 1000, BERLIN) for at in dues(broker)]
    assert [(at.hour, at.minute) for at in times] == [(6, 30)] * 365
    assert len({at.date() for at in times}) == 365


@pytest.mark.parametrize(
    ("cron", "begin", "expected"),
    [
        ("30 2 * * *", "2026-03-28T12:00", ["2026-03-29T03:00+02:00", "2026-03-30T02:30+02:00"]),
        ("30 2 * * *", "2026-10-24T12:00", ["2026-10-25T02:30+02:00", "2026-10-26T02:30+01:00"]),
        ("0 * * * *", "2026-10-25T01:30", ["2026-10-25T02:00+02:00", "2026-10-25T02:00+01:00"]),
        ("0 * * * *", "2026-03-29T00:30", ["2026-03-29T01:00+01:00", "2026-03-29T03:00+02:00"]),
    ],
)
def test_nights_when_clocks_change(cron: str, begin: str, expected: list[str]) -> None:
    begin_ms = round(datetime.fromisoformat(begin).replace(tzinfo=BERLIN).timestamp() * 1000)
    runner = ManualRunner(ManualClock(begin_ms))
    with Broker.temporary(runner=runner) as broker:
        broker.set_schedule("night", topic="reports", cron=cron, timezone="Europe/Berlin", missed="all")
        runner.advance(48 * HOUR_MS)
        times = [datetime.fromtimestamp(at / 1000, BERLIN).isoformat(timespec="minutes") for at in dues(broker)]
    assert times[:2] == expected


@pytest.mark.parametrize(
    ("missed", "expected"), [("once", [1, 6, 7]), ("skip", [1, 7]), ("all", [1, 2, 3, 4, 5, 6, 7])]
)
def test_due_times_of_a_pause(tmp_path: Path, missed: Any, expected: list[int]) -> None:
    broker, runner = opened(tmp_path, START_MS)
    broker.set_schedule("hourly", topic="reports", every=3600, missed=missed)
    runner.advance(HOUR_MS + 1)
    broker.close()
    broker, runner = opened(tmp_path, START_MS + 6 * HOUR_MS + 600_000)
    runner.advance(HOUR_MS)
    assert dues(broker) == [START_MS + hours * HOUR_MS for hours in expected]
    broker.close()


def test_pause_resume_and_delete(rmq: Kit) -> None:
    broker, begin_ms = rmq.broker, rmq.clock.now_ms()
    broker.set_schedule("hourly", topic="reports", every=3600)
    rmq.advance(hours=1)
    broker.pause_schedule("hourly")
    rmq.advance(hours=3)
    (schedule,) = broker.schedules()
    assert (schedule.name, schedule.topic, schedule.next, schedule.paused) == ("hourly", "reports", None, True)
    broker.set_schedule("hourly", topic="reports", every=3600)  # a deployment does not end the pause
    rmq.advance(hours=1)
    assert dues(broker) == [begin_ms + HOUR_MS]
    broker.resume_schedule("hourly")
    rmq.advance(minutes=1)
    assert dues(broker) == [begin_ms + HOUR_MS, begin_ms + 5 * HOUR_MS]
    (schedule,) = broker.schedules()
    assert schedule.next is not None
    assert schedule.last is not None
    assert schedule.next - schedule.last == timedelta(hours=1)
    broker.delete_schedule("hourly")
    rmq.advance(hours=3)
    assert broker.schedules() == ()
    assert len(dues(broker)) == 2
    with pytest.raises(BrokerError, match=r"hourly.*none of this name"):
        broker.delete_schedule("hourly")


def test_the_same_again_changes_nothing_and_another_text_says_so_once(
    rmq: Kit, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    begin_ms = rmq.clock.now_ms()
    for _ in range(3):
        rmq.broker.set_schedule("beat", topic="health", every=3600)
        rmq.advance(minutes=40)
    assert dues(rmq.broker, "health") == [begin_ms + HOUR_MS, begin_ms + 2 * HOUR_MS]
    assert "is replaced" not in caplog.text
    for _ in range(2):
        rmq.broker.set_schedule("beat", topic="health", every=1800)
    assert caplog.text.count("schedule beat is replaced") == 1


def test_until(rmq: Kit) -> None:
    end = datetime.fromtimestamp(rmq.clock.now_ms() / 1000, UTC) + timedelta(hours=2)
    rmq.broker.set_schedule("hourly", topic="reports", every=3600, until=end)
    rmq.advance(hours=9)
    assert len(dues(rmq.broker)) == 2
    assert rmq.broker.schedules()[0].next is None


def test_a_clock_that_jumps_repeats_nothing_and_is_soon_right(tmp_path: Path) -> None:
    broker, runner = opened(tmp_path, START_MS)
    broker.set_schedule("hourly", topic="reports", every=3600)
    runner.advance(HOUR_MS + 1)
    broker.close()
    broker, runner = opened(tmp_path, START_MS + 200 * HOUR_MS)  # a time that is wrong
    runner.advance(1)
    broker.close()
    broker, runner = opened(tmp_path, START_MS + HOUR_MS + 2)
    runner.advance(3 * HOUR_MS)
    runner.advance(196 * HOUR_MS)
    broker.close()
    broker, runner = opened(tmp_path, START_MS + 200 * HOUR_MS)
    assert dues(broker) == [START_MS + hours * HOUR_MS for hours in range(1, 201)]
    broker.close()


def test_a_kit_s_crash_repeats_nothing(rmq: Kit) -> None:
    begin_ms = rmq.clock.now_ms()
    rmq.broker.set_schedule("hourly", topic="reports", every=3600, missed="all")
    for _ in range(5):
        rmq.advance(hours=1)
        rmq.crash_broker(down=1800)
        rmq.advance(hours=1)
    assert dues(rmq.broker) == [begin_ms + hours * HOUR_MS for hours in range(1, 11)]


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ({"cron": "61 * * * *"}, "cron: expected five fields.*'61"),
        ({"cron": "0 6 * * *", "timezone": "Mars"}, "timezone: expected a name such as.*'Mars'"),
        ({}, "either cron= or every=, found neither"),
        ({"cron": "0 6 * * *", "every": 5}, "either cron= or every=, found both"),
        ({"every": 0.01}, "every: expected seconds"),
        ({"every": 60, "missed": "never"}, "missed: expected one of once, skip, all"),
        ({"every": 60, "timezone": "Europe/Berlin"}, "timezone: only cron="),
        ({"every": 60, "name": " "}, "name: expected text"),
        ({"every": 60, "until": datetime(2026, 1, 1)}, "until: expected a time with a time zone"),
        ({"every": 60, "properties": {"SCHEDULE": "x"}}, "properties: SCHEDULE"),
    ],
)
def test_what_is_wrong_is_refused_before_anything_is_kept(rmq: Kit, wrong: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        rmq.broker.set_schedule(**{"name": "n", "topic": "t", **wrong})
    assert rmq.broker.schedules() == ()


def test_what_can_not_be_sent_is_refused(rmq: Kit) -> None:
    with pytest.raises(MessageIllegalError):
        rmq.broker.set_schedule("n", topic="no topic", every=60)
    with pytest.raises(MessageIllegalError):
        rmq.broker.set_schedule("n", topic="t", every=60, properties={"KEYS": "x"})
    with pytest.raises(MessageIllegalError, match="is the broker's own"):
        rmq.broker.set_schedule("n", topic="SCHEDULE_TOPIC_XXXX", every=60)
    with pytest.raises(MessageIllegalError, match="the body has"):
        rmq.broker.set_schedule("n", topic="t", every=60, body=bytes(rmq.broker.store.config.max_message_size + 1))
    with pytest.raises(MessageIllegalError, match="more than 32,767 bytes of properties"):
        rmq.broker.set_schedule("n", topic="t", every=60, properties={"a": "x" * 32_700})
    assert rmq.broker.schedules() == ()


def test_without_the_extra_an_error_names_it(rmq: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cronsim", None)
    with pytest.raises(MissingExtraError, match=r"librmq\[cron\]"):
        rmq.broker.set_schedule("n", topic="t", cron="0 6 * * *")
    rmq.broker.set_schedule("n", topic="t", every=60)


@pytest.mark.skipif(sys.platform == "win32", reason="no Unix domain sockets with credentials")
def test_any_process_of_a_share_sets_them(tmp_path: Path) -> None:
    with librmq.share(tmp_path) as owner, librmq.share(tmp_path) as peer:
        peer.set_schedule("beat", topic="health", every=0.2)
        owner.set_schedule("beat", topic="health", every=0.2)
        (schedule,) = peer.schedules()
        assert (schedule,) == owner.schedules()
        assert schedule.name == "beat"
        with pytest.raises(BrokerError, match="none of this name"):
            peer.pause_schedule("other")
        received: list[int] = []
        consumer = PushConsumer(peer, "ops", start_at="first")
        done = librmq.runtime.locks.Event()

        @consumer.subscribe("health")
        def listen(message: StoredMessage) -> None:
            received.append(due_ms(message))
            if len(received) == 3:
                done.set()

        with consumer:
            assert done.wait(30)
        peer.delete_schedule("beat")
        assert len(set(received)) == len(received)


def test_over_connect_they_are_refused_with_the_reason() -> None:
    with (
        Broker.temporary() as broker,
        RemotingServer(broker) as server,
        librmq.connect(server.address) as route,
        pytest.raises(ConfigError, match="RocketMQ has no schedules"),
    ):
        route.set_schedule("n", topic="t", every=60)


# ---- kills


def live(path: Path, begin_ms: int, end_ms: int) -> None:
    """Open the store in a process of its own, say the schedules, and move the clock until a kill or the end."""
    broker, runner = opened(path, begin_ms)
    say(broker)
    while runner.now_ms() < end_ms:
        runner.advance(600_000)
        os.write(1, f"{runner.now_ms()}\n".encode())
    broker.close()
    os.write(1, b"end\n")


def say(broker: Broker) -> None:
    broker.set_schedule("hourly", topic="reports", every=3600, missed="all")
    broker.set_schedule("cron", topic="nights", cron="30 2 * * *", timezone="Europe/Berlin", missed="all")


@pytest.mark.platform
@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that can be killed")
def test_a_year_with_a_thousand_kills(tmp_path: Path, slow_budget: SlowBudget) -> None:
    rng, store = random.Random(7), tmp_path / "store"
    broker, _ = opened(store, START_MS)
    say(broker)
    broker.close()
    now_ms = START_MS
    for _ in slow_budget.rounds(1000, "kills", at_least=6):
        part_ms = round(8.76 * HOUR_MS)
        until_ms = now_ms + part_ms
        with Fork(live, store, now_ms, until_ms + 100 * HOUR_MS) as child:
            for line in child.stdout:
                now_ms = int(line)
                if now_ms >= until_ms or rng.random() < 0.02:
                    break
            time.sleep(rng.random() * 0.004)  # noqa: TID251 (the kill comes anywhere in the next step)
            os.kill(child.process.pid or 0, 9)
            now_ms = max([now_ms, *(int(line) for line in child.stdout)])
        now_ms += rng.choice([0, 0, 1, 2]) * 600_000
    with Fork(live, store, now_ms, now_ms + HOUR_MS) as child:
        *_, end_ms, last = child.stdout
        assert last == "end\n"
    broker, _ = opened(store, int(end_ms))
    with broker:
        assert Counter(dues(broker)) == Counter(range(START_MS + HOUR_MS, int(end_ms) + 1, HOUR_MS))
        nights = dues(broker, "nights")
        days = {datetime.fromtimestamp(at / 1000, BERLIN).date() for at in nights}
        assert len(days) == len(nights)
        assert len(nights) == (max(days) - min(days)).days + 1
