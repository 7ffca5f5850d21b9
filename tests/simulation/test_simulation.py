"""Days of the whole product from a seed, and that its judges see what is broken."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from librmq import Broker, DeliveredMessage, ManualRunner, SimpleConsumer, StoreConfig
from librmq.listener import ReconsumeLater
from librmq.testing import Kit
from tests.budget import examples, many
from tests.conftest import SlowBudget, StoreCopy
from tests.file_seams import CrashImages
from tests.programs import POSIX, environment
from tests.reference import existing, rows
from tests.simulation.promises import Record, broken_promises
from tests.simulation.world import Disk, World

# Faults are drawn until the end, and some wait for a send that does not come.
pytestmark = pytest.mark.filterwarnings("ignore:the fault .* never happened")

HALF_A_DAY: Any = {"days": 0.5, "steps": 150}


@many
@pytest.mark.parametrize("number", range(8))
def test_half_a_day_of_everything(number: int) -> None:
    World(f"quick {number}").run(**HALF_A_DAY)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(2))
def test_half_a_day_over_a_share(number: int) -> None:
    World(f"share {number}", over_share=True).run(**HALF_A_DAY)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["store-basic", "store-crash"])
def test_half_a_day_in_the_store_of_a_broker(name: str, store_copy: StoreCopy) -> None:
    config = rows(existing(name), "config")[0]
    sizes = StoreConfig(
        commitlog_file_size=config["commitlog_file_size"],
        consumequeue_file_size=config["consumequeue_file_size"],
        max_hash_slot_num=config["max_hash_slot_num"],
        max_index_num=config["max_index_num"],
    )
    last_ms = max(row["store_timestamp"] for row in rows(existing(name), "message"))
    World(name, begin_with=(store_copy(name), sizes, last_ms + 1000)).run(**HALF_A_DAY)


@pytest.mark.slow
def test_a_seed_repeats_its_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in another process."""
    texts = []
    for pid in (1, 65_000):
        monkeypatch.setattr("os.getpid", lambda pid=pid: pid)
        world = World("again")
        world.run(**HALF_A_DAY)
        texts.append((world.text(), dict(world.counts)))
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_weeks_of_everything(slow_budget: SlowBudget) -> None:
    for number in slow_budget.rounds(40, "weeks of everything", at_least=1):
        World(f"week {number}", over_share=number % 4 == 3).run()


# ---- processes that share a store


def run_shares(seed: str, *words: str) -> None:
    command = [sys.executable, "-m", "tests.simulation", "--shares", "--seed", seed, *words]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


@POSIX
@pytest.mark.slow
def test_shares_change_hands(slow_budget: SlowBudget) -> None:
    for number in slow_budget.rounds(100, "stores with eight changes of their owner"):
        run_shares(f"share {number}")


# ---- writers that append to one log by themselves


LINUX = pytest.mark.skipif("sys.platform != 'linux'", reason="only there peers append by themselves")


@LINUX
@pytest.mark.slow
def test_many_writers_die_and_others_go_on(tmp_path: Path, slow_budget: SlowBudget) -> None:
    from tests.simulation.writers import WritersWorld

    alone = deaths = 0
    for number in slow_budget.rounds(2_000, "logs with several writers, some of which die"):
        folder = tmp_path / str(number)
        folder.mkdir()
        world = WritersWorld(f"writers {number}", folder)
        world.run()
        alone, deaths = alone + world.alone, deaths + world.deaths
        shutil.rmtree(folder)
    assert alone
    assert deaths


# ---- the second judge


def send(name: str, offset: int, **more: Any) -> dict[str, Any]:
    place = {"topic": "orders", "queue_id": 0, "queue_offset": offset}
    return {"event": "send", "id": name, "outcome": "ok", "begin_ms": 0, "end_ms": 0, **place, **more}


def deliver(name: str, offset: int, at_ms: int, outcome: str = "ok") -> dict[str, Any]:
    place = {"topic": "orders", "queue_id": 0, "queue_offset": offset, "group": "billing"}
    return {"event": "deliver", "id": name, "outcome": outcome, "begin_ms": at_ms, "end_ms": at_ms, **place}


def judged(events: list[dict[str, Any]], *stored: str) -> list[str]:
    log = [Record("orders", 0, offset, name, 0) for offset, name in enumerate(stored) if name]
    return broken_promises(events, log, {"orders": ["billing"]}, ["billing"])


def test_the_second_judge_finds_nothing_in_a_good_run() -> None:
    events = [send("a", 0), send("b", 1), deliver("a", 0, 1, "retry"), deliver("a", 0, 2), deliver("b", 1, 3)]
    assert judged(events, "a", "b") == []
    assert judged([send("a", 0), {"event": "dead_letter", "id": "a", "group": "billing"}], "a") == []
    given_up = {"event": "discard", "id": "a", "at_ms": 9}
    assert judged([send("a", 0, half=True), given_up], "a") == [], "undecided halves are not visible"
    assert judged([send("a", 0, not_before_ms=1), send("a", 1), deliver("a", 0, 1)], "a", "a") == []


@pytest.mark.parametrize(
    ("events", "stored", "what"),
    [
        ([send("a", 0), deliver("a", 0, 1)], ["b"], "which holds b"),
        ([send("a", 1), deliver("a", 1, 1)], ["x"], "which holds None"),
        ([send("a", 0), deliver("a", 0, 1, "retry")], ["a"], "never consumed"),
        ([send("a", 0, half=True)], ["a"], "neither decided nor given up"),
        ([send("a", 0, not_before_ms=1), deliver("a", 0, 1)], ["a", "a"], "delivered 2 times"),
        ([send("a", 0), send("b", 1), deliver("b", 1, 1), deliver("a", 0, 2)], ["a", "b"], "out of order"),
    ],
)
def test_the_second_judge_finds(events: list[dict[str, Any]], stored: list[str], what: str) -> None:
    found = judged(events, *stored)
    assert len(found) == 1
    assert re.search(what, found[0])


# ---- what the simulation has found


def test_a_pull_waits_while_a_full_disk_refuses_queue_entries() -> None:
    """The log takes a message whose queue has no file yet; pulls behind it were answered and repeated without end."""
    disk = Disk()
    with Kit("/sim", files=disk, store_config=StoreConfig.tiny(durability="sync")) as rmq:
        for topic in ("first", "second"):
            rmq.broker.create_topic(topic, 1)
        rmq.consumer("billing").subscribe("second", lambda message: None)
        rmq.producer().send("second", b"there is a file")
        rmq.run_until_idle()
        disk.is_full = True
        for topic in ("first", "second", "second"):
            rmq.producer().send(topic, b"no room for a file")
        rmq.advance(seconds=30)
        disk.is_full = False
        rmq.advance(seconds=30)
        assert [event["queue_offset"] for event in rmq.events() if event["event"] == "deliver"] == [0, 1, 2]
        rmq.messages("first")


@pytest.mark.parametrize("seed", range(examples(16)))
def test_a_message_that_failed_comes_again_after_a_power_cut(seed: int) -> None:
    """With durability "sync": the copy for the retry is on the device before the group passes the message."""
    disk = Disk()
    with Kit("/sim", files=disk, store_config=StoreConfig.tiny(durability="sync")) as rmq:
        attempts = []

        def fail_once(message: DeliveredMessage) -> None:
            attempts.append(message.reconsume_times)
            if not message.reconsume_times:
                raise ReconsumeLater("once")

        rmq.consumer("billing").subscribe("orders", fail_once)
        rmq.producer().send("orders", b"o-1")
        rmq.run_until_idle()
        rmq.crash_broker(down=1)
        disk.cut_power(f"cut {seed}")
        rmq.advance(minutes=1)
        assert attempts == [0, 1]


@pytest.mark.parametrize("seed", range(examples(16)))
def test_a_consumer_passes_no_message_that_a_power_cut_takes(seed: int) -> None:
    """With durability "sync": it would skip the next one, which gets the place of the lost one."""
    disk = Disk()
    with Kit("/sim", files=disk, store_config=StoreConfig.tiny(durability="sync")) as rmq:
        rmq.broker.create_topic("orders", 1)
        rmq.consumer("billing").subscribe("orders", lambda message: None)
        producer = rmq.producer()
        producer.send("orders", b"early", wait_store_ok=False)  # as the copies of timers, for whose flush nothing waits
        rmq.run_until_idle()
        rmq.crash_broker(down=1)
        disk.cut_power(f"cut {seed}")
        rmq.later(1, "the shop sends", lambda: producer.send("orders", b"acknowledged"))
        rmq.advance(minutes=1)
        assert rmq.delivered("billing")[-1].body == b"acknowledged"


def test_a_history_shows_messages_that_retention_has_deleted() -> None:
    with Kit(store_config=StoreConfig.tiny(commitlog_file_size=4096, max_total_size=16384)) as rmq:
        rmq.consumer("billing").subscribe("orders", lambda message: None)
        for _ in range(40):
            rmq.producer().send("orders", bytes(1000))
            rmq.advance(minutes=1)
        assert len(rmq.messages("orders")) < 40
        assert "deleted since" in str(rmq.history())


def test_a_store_is_not_full_for_ever_of_receives_that_came_again() -> None:
    """Their topic, of a group and a topic, counted as that of a group of this name, which never consumes."""
    config = StoreConfig.tiny(commitlog_file_size=4096, max_total_size=16384)
    with Kit(store_config=config) as rmq:
        mailer = rmq.app("mailer", lambda process: SimpleConsumer(process, "mailer")).state
        mailer.subscribe("reminders")
        mailer.start()
        for number in range(60):
            rmq.producer().send("reminders", bytes(1000))
            for message in mailer.receive(16, invisible=30):
                if number or message.reconsume_times:  # the first one comes again
                    mailer.ack(message)
            rmq.advance(minutes=1)


def test_a_store_whose_making_lost_power_is_librmqs_own() -> None:
    """A folder with a log and without settings counts as a broker's, whose retention deletes unread messages."""
    disk = Disk()
    with Broker.open("/sim", runner=ManualRunner(), files=disk):
        pass
    images = CrashImages(disk.trace)
    for crash_point in range(len(disk.trace) + 1):
        for seed in range(4):
            contents = images.image(seed, crash_point).contents
            assert "/sim/commitlog" not in contents or contents["/sim/librmq/config.json"]
