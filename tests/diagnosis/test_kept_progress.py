"""Where progress went: its history, steps back, deleted groups, overdue delays, timers that lead nowhere."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from librmq import Broker, ManualClock, ManualRunner, Message, Producer, StoreConfig
from librmq.diagnosis import diagnose
from librmq.store.format.timerfiles import TimerLog, TimerWheel, slot_dtype
from tests.cli.stand import Shell, errors_of
from tests.reference import COMPACT, unpack

START_MS = 1_700_000_000_000
NEW = {
    "progress-stepped-back", "unlisted-group", "progress-beyond-end", "overdue", "timers-beyond-log", "stale-wheel",
}  # fmt: skip


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Make a closed store of a topic with two queues, read by ``G``."""
    runner = ManualRunner(ManualClock(START_MS))
    with Broker.open(tmp_path / "own", runner=runner, store_config=StoreConfig.tiny()) as broker:
        broker.create_topic("orders", 2)
        broker.set_group("G")
        producer = Producer(broker, "P")
        for number in range(20):
            producer.send("orders", b"x", queue=number % 2)
        broker.reset_group("G", "orders", "end")
    return tmp_path / "own"


def found(path: Path) -> dict[str, dict[str, Any]]:
    """Return the evidence of the findings of this module, by kind and subject."""
    return {
        f"{finding.kind} {finding.subject}": dict(finding.evidence) for finding in diagnose(path) if finding.kind in NEW
    }


def table(path: Path, name: str = "consumerOffset.json") -> Path:
    return path / "config" / name


def set_progress(path: Path, rows: dict[str, str], *, backup: bool = False) -> None:
    place = table(path)
    place = place.with_name(f"{place.name}.bak") if backup else place
    queues = {
        name: "{" + ",".join(f"{number}:{offset}" for number, offset in enumerate(text.split())) + "}"
        for name, text in rows.items()
    }
    place.write_text('{"offsetTable":{' + ",".join(f'"{name}":{text}' for name, text in queues.items()) + "}}")


def test_a_healthy_store_has_none_of_them(path: Path) -> None:
    assert found(path) == {}


@pytest.mark.parametrize(
    ("now", "backup", "messages", "queues"),
    [("10 3", "10 10", 7, [1]), ("0 0", "4 5", 9, [0, 1]), ("10", "10 10", 10, [1]), ("10 10", "9 10", None, [])],
)
def test_a_step_back_behind_the_backup(
    path: Path, now: str, backup: str, messages: int | None, queues: list[int]
) -> None:
    set_progress(path, {"orders@G": now, "deleted@G": "1"})
    set_progress(path, {"orders@G": backup, "deleted@G": "9 9"}, backup=True)
    evidence = found(path).get("progress-stepped-back group G, topic orders")
    if messages is None:
        assert evidence is None
    else:
        assert evidence is not None
        assert (evidence["messages"], evidence["queues"]) == (messages, len(queues))


def test_groups_that_the_table_lacks(path: Path, shell: Shell) -> None:
    groups = table(path, "subscriptionGroup.json")
    rows = json.loads(groups.read_text())
    del rows["subscriptionGroupTable"]["G"]
    groups.write_text(json.dumps(rows))
    set_progress(path, {"orders@G": "10 10", "gone@G": "3"})
    assert found(path)["unlisted-group group G"] == {
        "topics": ["gone", "orders"], "retries": 0, "deleted_topics": ["gone"],
    }  # fmt: skip
    (step,) = (finding.next_step for finding in diagnose(path) if finding.kind == "unlisted-group")
    assert step == "To remove what is left: librmq group delete STORE G; to keep it: librmq group create STORE G."
    assert shell("group", "create", path, "G").status == 0
    assert "unlisted-group group G" not in found(path)


def test_levels_that_are_overdue(tmp_path: Path) -> None:
    clock = ManualClock(START_MS)
    with Broker.open(tmp_path / "own", runner=ManualRunner(clock), store_config=StoreConfig.tiny()) as broker:
        broker.create_topic("orders", 1)
        producer = Producer(broker, "P")
        for _ in range(3):
            producer.send("orders", b"x", delay=10)
        broker.runner.advance(600_000)  # type: ignore[attr-defined]
        producer.send("orders", b"last")
    assert found(tmp_path / "own") == {}
    level = 3  # 10 s
    delays = table(tmp_path / "own", "delayOffset.json")
    delays.write_text(f'{{"offsetTable":{{{level}:1}}}}')
    assert found(tmp_path / "own")["overdue delay level 3"] == {
        "level": level, "messages": 2, "due_timestamp_ms": START_MS + 10_000, "late_s": 590.0,
    }  # fmt: skip


def test_progress_of_a_level_beyond_its_end(path: Path) -> None:
    clock = ManualClock(START_MS)
    with Broker.open(path, runner=ManualRunner(clock)) as broker:
        Producer(broker, "P").send("orders", b"x", delay=10)
    table(path, "delayOffset.json").write_text('{"offsetTable":{3:5,4:1}}')
    assert found(path) == {
        "progress-beyond-end delay level 3": {"consumer_offset": 5, "max_offset": 1, "messages": 4},
        "progress-beyond-end delay level 4": {"consumer_offset": 1, "max_offset": 0, "messages": 1},
    }
    with Broker.open(path, runner=ManualRunner(clock)) as broker:  # it sets the progress to the end
        before = broker.store.queue_range("orders", 0)[1] + broker.store.queue_range("orders", 1)[1]
        for delay in (10, 30):
            Producer(broker, "P").send("orders", b"later", delay=delay)
        broker.runner.advance(60_000)  # type: ignore[attr-defined]
        after = broker.store.queue_range("orders", 0)[1] + broker.store.queue_range("orders", 1)[1]
        assert after - before == 2
    assert found(path) == {}


@pytest.fixture
def timers(tmp_path: Path) -> Path:
    """Make a closed store with four timers that wait, and a last message much later than the first."""
    clock = ManualClock(START_MS)
    with Broker.open(tmp_path / "timers", runner=ManualRunner(clock), store_config=StoreConfig.tiny()) as broker:
        broker.create_topic("orders", 1)
        producer = Producer(broker, "P")
        for number in range(4):
            producer.send("orders", b"x", delay=7301 + number)
        broker.runner.advance(3_600_000)  # type: ignore[attr-defined]
        producer.send("orders", b"last")
    return tmp_path / "timers"


def patch(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def test_timers_that_are_overdue(timers: Path) -> None:
    assert found(timers) == {}
    log = next((timers / "timerlog").iterdir())
    write_ms, delay_ms = struct.unpack_from(">qi", log.read_bytes(), 16)
    patch(log, 28 - 4, struct.pack(">i", delay_ms - 5_400_000))
    patch(table(timers, "timercheck"), 0, struct.pack(">q", START_MS))
    evidence = found(timers)["overdue timer"]
    due_ms = write_ms + delay_ms - 5_400_000
    assert (evidence["messages"], evidence["due_timestamp_ms"]) == (1, due_ms)


def test_progress_of_the_timer_beyond_its_end(timers: Path) -> None:
    patch(table(timers, "timercheck"), 16, struct.pack(">q", 9))
    assert found(timers) == {"progress-beyond-end timer": {"consumer_offset": 9, "max_offset": 4, "messages": 5}}


def test_units_that_name_messages_beyond_the_log(timers: Path) -> None:
    log = next((timers / "timerlog").iterdir())
    patch(log, 2 * TimerLog.UNIT_SIZE + 28, struct.pack(">q", 1 << 40))
    evidence = found(timers)["timers-beyond-log timer"]
    assert (evidence["units"], evidence["position"]) == (1, 2 * TimerLog.UNIT_SIZE)


def test_a_wheel_that_leads_nowhere(timers: Path) -> None:
    wheel = timers / "timerwheel"
    data = wheel.read_bytes()
    slot = next(at for at in range(0, len(data), TimerWheel.SLOT_SIZE) if any(data[at : at + TimerWheel.SLOT_SIZE]))
    patch(wheel, slot + 16, struct.pack(">q", 1 << 30))
    evidence = found(timers)["stale-wheel timer"]
    assert evidence["slots"] == 1


def slots_of(shell: Shell, path: Path, status: int = 0) -> list[dict[str, Any]]:
    answer = shell("timers", path)
    assert answer.status == status
    return [row for row in answer.rows if row["type"] == "wheel_slot"]


def older_wheel(path: Path, units: int) -> bytes:
    """Return the wheel without the slots of the units from a number on; each has a slot of its own."""
    slots = np.fromfile(path / "timerwheel", slot_dtype())
    slots[slots["last"] >= units * TimerLog.UNIT_SIZE] = 0
    return slots.tobytes()


@pytest.mark.slow
def test_the_newest_of_wheel_and_snapshots_is_read(timers: Path, shell: Shell) -> None:
    wheel = timers / "timerwheel"
    slots = slots_of(shell, timers)
    assert len(slots) == 4
    (timers / f"timerwheel.{TimerLog.UNIT_SIZE}").write_bytes(older_wheel(timers, 1))
    (timers / f"timerwheel.{2 * TimerLog.UNIT_SIZE}").write_bytes(older_wheel(timers, 2))
    assert slots_of(shell, timers) == slots  # the wheel is newer than its snapshots
    assert found(timers) == {}

    old = older_wheel(timers, 1)
    wheel.rename(timers / f"timerwheel.{4 * TimerLog.UNIT_SIZE}")
    assert slots_of(shell, timers) == slots
    assert found(timers) == {}
    wheel.write_bytes(old)  # a broker that loads snapshots no longer writes the wheel
    assert slots_of(shell, timers) == slots
    evidence = found(timers)["stale-wheel timer"]
    assert (evidence["newest"], evidence["bytes_behind"]) == (f"timerwheel.{4 * TimerLog.UNIT_SIZE}", 0)

    (timers / f"timerwheel.{4 * TimerLog.UNIT_SIZE}").unlink()
    assert len(slots_of(shell, timers)) == 2
    assert found(timers)["stale-wheel timer"]["bytes_behind"] == 2 * TimerLog.UNIT_SIZE
    assert len(shell("pending", timers, "--kind", "timer").rows) == 4  # by the timer log


def test_a_wheel_that_a_broker_does_not_complete(timers: Path) -> None:
    (timers / f"timerwheel.{3 * TimerLog.UNIT_SIZE}").write_bytes(older_wheel(timers, 1))
    (timers / "timerwheel").unlink()
    (finding,) = (finding for finding in diagnose(timers) if finding.kind == "stale-wheel")
    assert (finding.severity, finding.evidence["bytes_behind"]) == ("warning", 3 * TimerLog.UNIT_SIZE)
    assert f"only from {3 * TimerLog.UNIT_SIZE} on" in finding.what


def test_a_damaged_snapshot_of_the_wheel(timers: Path, shell: Shell) -> None:
    slots = slots_of(shell, timers)
    snapshot = timers / f"timerwheel.{4 * TimerLog.UNIT_SIZE}"
    snapshot.write_bytes(bytes(100))
    answer = shell("timers", timers)
    assert answer.status == 1
    assert snapshot.name in answer.said
    assert [row for row in answer.rows if row["type"] == "wheel_slot"] == slots
    assert answer.rows[-1]["type"] == "timercheck"
    assert set(found(timers)) == {f"stale-wheel {snapshot.name}"}


@pytest.mark.slow
def test_librmq_continues_with_snapshots(timers: Path, shell: Shell) -> None:
    before = (timers / "timerwheel").read_bytes()
    (timers / "timerwheel").write_bytes(older_wheel(timers, 1))
    for units in (2, 4, 5):  # a crash of the machine took the last unit from the timer log, not from its snapshot
        (timers / f"timerwheel.{units * TimerLog.UNIT_SIZE}").write_bytes(
            before if units > 2 else older_wheel(timers, 2)
        )
    clock = ManualClock(START_MS + 3_600_000)
    with Broker.open(timers, runner=ManualRunner(clock)) as broker:
        assert sorted(entry.name for entry in timers.glob("timerwheel.*")) == [
            f"timerwheel.{2 * TimerLog.UNIT_SIZE}", f"timerwheel.{4 * TimerLog.UNIT_SIZE}",
        ]  # fmt: skip
        assert (timers / "timerwheel").read_bytes() == before
        broker.runner.advance(3_800_000)  # type: ignore[attr-defined]
        assert len(list(broker.messages("orders"))) == 5


@pytest.mark.slow
def test_only_snapshots_of_the_wheel_are_left(timers: Path, shell: Shell) -> None:
    (timers / "timerwheel").rename(timers / f"timerwheel.{4 * TimerLog.UNIT_SIZE}")
    slots = slots_of(shell, timers)
    with Broker.open(timers, runner=ManualRunner(ManualClock(START_MS + 3_600_000))):
        pass
    wheel, snapshot = timers / "timerwheel", timers / f"timerwheel.{4 * TimerLog.UNIT_SIZE}"
    assert wheel.stat().st_size == snapshot.stat().st_size
    assert slots_of(shell, timers) == slots


def test_history(path: Path, shell: Shell) -> None:
    set_progress(path, {"orders@G": "10 3"})
    set_progress(path, {"orders@G": "10 9"}, backup=True)
    before = shutil.copytree(path, path.parent / "before")
    set_progress(before, {"orders@G": "2 2"})
    answer = shell("progress", path, "--group", "G", "--beside", before)
    assert answer.status == 0
    assert not errors_of("progress", *answer.rows)
    assert [(row["source"], row["queue_id"], row["queue_offset"]) for row in answer.rows] == [
        ("beside", 0, 2), ("backup", 0, 10), ("file", 0, 10), ("beside", 1, 2), ("backup", 1, 9), ("file", 1, 3),
    ]  # fmt: skip
    assert shell("progress", path, "--group", "nobody").rows == []
    answer = shell("progress", path, "--beside", "absent")
    assert (answer.status, answer.said) == (2, "librmq progress: absent: no store: it has no folder commitlog\n")


def test_moves_that_a_broker_recorded(path: Path, shell: Shell) -> None:
    event = {
        "consumerGroup": "G", "messageQueue": {"brokerName": "b", "queueId": 1, "topic": "orders"},
        "offsetNew": 0, "offsetRequest": 12,
    }  # fmt: skip
    with Broker.open(path, runner=ManualRunner(ManualClock(START_MS + 5000))) as broker:
        broker.store.append(Message("OFFSET_MOVED_EVENT", json.dumps(event).encode(), tags="G", keys="G"))
        broker.store.append(Message("OFFSET_MOVED_EVENT", b"no event"))
    (row,) = [row for row in shell("progress", path).rows if row["source"] == "moved"]
    assert (row["group"], row["topic"], row["queue_id"]) == ("G", "orders", 1)
    assert (row["queue_offset"], row["before"], row["at_ms"]) == (0, 12, START_MS + 5000)


@pytest.mark.slow
def test_a_brokers_store_has_no_such_findings(tmp_path: Path) -> None:
    unpack(COMPACT / "stores" / "rocketmq-5.3.3.tar.xz", tmp_path)
    assert not any(kind.startswith(("stale", "timers-beyond", "progress")) for kind in found(tmp_path / "store"))
