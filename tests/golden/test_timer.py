"""The timer of 5.x: results of the recorded puts, and its files."""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from librmq.cli import main
from librmq.clock import ManualClock
from librmq.config import StoreConfig
from librmq.files._disk import DiskFiles
from librmq.message.delays import TimerRefusedError
from librmq.message.message import Message, StoredMessage
from librmq.message.topics import SystemTopic
from librmq.scheduling.timer import Timers, waiting_timers
from librmq.scheduling.timer_config import TimerConfig
from librmq.store import MessageStore
from librmq.store.format.timerfiles import TimerCheckpoint, TimerLog, TimerWheel, Unit
from tests.bytime import put_timed
from tests.cases.load import run
from tests.reference import Row, folders, jsonl, rows

FREE = {"TIMER_DEQUEUE_MS", "TIMER_ENQUEUE_MS"}

timers = pytest.mark.parametrize("folder", folders("timer-"))


def settings_of(folder: Path) -> TimerConfig:
    found = TimerConfig.from_row({**rows(folder, "config")[0]})
    assert found is not None
    return found


def store_config(folder: Path) -> StoreConfig:
    folder_of_log = min((folder / "store" / "commitlog").iterdir())
    return StoreConfig(
        commitlog_file_size=folder_of_log.stat().st_size, consumequeue_file_size=4000,
        max_hash_slot_num=64, max_index_num=256,
    )  # fmt: skip


class Replayed:
    """Repeats the recorded puts, each at its time, and then moves to the time of the recording."""

    def __init__(self, folder: Path, path: Path) -> None:
        puts = rows(folder, "put")
        self.clock = ManualClock(puts[0]["at_ms"])
        self.settings = settings_of(folder)
        self.store = MessageStore.open(path, store_config(folder), clock=self.clock)
        self.timers = Timers(self.store, self.settings)
        self.results: list[Row] = []
        for number, row in enumerate(puts):
            self.pass_to(max(row["at_ms"], self.clock.now_ms()))
            self.results.append(self.put(number, row))
        self.pass_to(rows(folder, "timer_state")[-1]["at_ms"])
        self.timers.run_due(self.clock.now_ms())
        self.timers.save()
        self.messages = list(self.store)
        self.store.close()

    def pass_to(self, now_ms: int) -> None:
        due = self.timers.run_due(self.clock.now_ms())
        while due is not None and due <= now_ms:
            self.clock.move_to(max(due, self.clock.now_ms()))
            due = self.timers.run_due(self.clock.now_ms())
        self.clock.move_to(now_ms)

    def put(self, number: int, row: Row) -> Row:
        message = Message(row["real_topic"], f"timer body {number}".encode(), tags="TagA", unique_key=row["uniq_key"])
        message.properties |= dict(zip(row["props"][::2], row["props"][1::2], strict=True))
        try:
            result = put_timed(self.timers, message, 0)
        except TimerRefusedError:
            return {"status": "WHEEL_TIMER_MSG_ILLEGAL"}
        stored = self.store.message_at(result.physical_offset)
        assert stored is not None
        return {
            "to_topic": stored.topic,
            "timer_out_ms": stored.properties.get("TIMER_OUT_MS"),
            "status": "PUT_OK",
            "phys": result.physical_offset,
            "size": result.size,
            "queue_offset": result.queue_offset,
        }


def seen(message: StoredMessage) -> tuple[object, ...]:
    properties = sorted((name, value) for name, value in message.properties.items() if name not in FREE)
    return message.topic, message.queue_id, message.size, message.body, properties


@timers
def test_recorded_puts_come_to_the_recorded_files(folder: Path, tmp_path: Path) -> None:
    replayed = Replayed(folder, tmp_path / "store")
    for ours, theirs in zip(replayed.results, rows(folder, "put"), strict=True):
        assert ours == {name: theirs.get(name) for name in ours}
    waiting = [(m.physical_offset, m.size) for m in replayed.messages if m.topic == SystemTopic.TIMER]
    assert waiting == [
        (row["phys"], row["size"]) for row in rows(folder, "message") if row["topic"] == SystemTopic.TIMER
    ]
    # Several threads of RocketMQ deliver the messages of a slot, so their order is arbitrary.
    delivered = [seen(message) for message in replayed.messages if message.topic != SystemTopic.TIMER]
    expected = [
        (
            row["topic"], row["queue_id"], row["size"], row["body"].encode(),
            sorted((name, value) for name, value in row["properties"].items() if name not in FREE),
        )
        for row in rows(folder, "message") if row["topic"] != SystemTopic.TIMER
    ]  # fmt: skip
    assert sorted(map(repr, delivered)) == sorted(map(repr, expected))
    for message in replayed.messages:
        if "TIMER_DEQUEUE_MS" in message.properties and message.topic != SystemTopic.TIMER:
            due = int(message.properties["TIMER_OUT_MS"]) + replayed.settings.timer_precision_ms
            assert message.store_timestamp_ms == due
    assert list(unit_rows(tmp_path / "store", replayed.settings)) == list(recorded_units(folder))
    slots = [(number, *slot) for number, slot in TimerWheel.read_slots(str(tmp_path / "store"), DiskFiles())]
    assert slots == recorded_slots(folder)
    checkpoint = TimerCheckpoint.read(str(tmp_path / "store"), DiskFiles())
    (row,) = rows(folder, "timercheck")
    assert checkpoint is not None
    assert checkpoint.read_time_ms == row["last_read_time_ms"]
    assert checkpoint.log_position == row["last_timer_log_flush_pos"]
    assert checkpoint.queue_offset == row["last_timer_queue_offset"]
    assert checkpoint.master_queue_offset == row["master_timer_queue_offset"]


def unit_rows(store: Path, settings: TimerConfig) -> Iterator[tuple[int, ...]]:
    """Return units and blanks, with the slot's time instead of write time and delay."""
    log = TimerLog(str(store), settings.timer_log_file_size, writable=False)
    for position, item in log.items():
        if isinstance(item, Unit):
            place = (item.physical_offset, item.message_size, item.topic_hash, item.reserved)
            yield (position, item.size, item.previous, item.magic, item.write_time_ms + item.delay_ms, *place)
        else:
            yield position, item


def recorded_units(folder: Path) -> Iterator[tuple[int, ...]]:
    found = sorted([*rows(folder, "timerlog_unit"), *rows(folder, "timerlog_blank")], key=lambda row: int(row["pos"]))
    for row in found:
        if row["type"] == "timerlog_unit":
            yield (
                row["pos"], row["size"], row["prev_pos"], row["magic"],
                row["curr_write_time_ms"] + row["delay_ms_rel"],
                row["offset_py"], row["size_py"], row["real_topic_hash"], row["reserved"],
            )  # fmt: skip
        else:
            yield row["pos"], row["size"]


def recorded_slots(folder: Path) -> list[tuple[int, ...]]:
    names = "index", "time_in_precision_units", "first_pos", "last_pos", "num", "magic"
    return [tuple(row[name] for name in names) for row in rows(folder, "wheel_slot")]


@timers
def test_files_are_read_as_recorded(folder: Path) -> None:
    store = folder / "store"
    assert list(unit_rows(store, settings_of(folder))) == list(recorded_units(folder))
    assert [(number, *slot) for number, slot in TimerWheel.read_slots(str(store), DiskFiles())] == recorded_slots(
        folder
    )
    checkpoint = TimerCheckpoint.read(str(store), DiskFiles())
    (row,) = rows(folder, "timercheck")
    assert checkpoint is not None
    assert [
        checkpoint.read_time_ms, checkpoint.log_position, checkpoint.queue_offset, checkpoint.master_queue_offset,
        checkpoint.state_version, checkpoint.version_timestamp_ms, checkpoint.version_counter,
    ] == [
        row[name] for name in (
            "last_read_time_ms", "last_timer_log_flush_pos", "last_timer_queue_offset", "master_timer_queue_offset",
            "data_version_state", "data_version_timestamp", "data_version_counter",
        )
    ]  # fmt: skip


@timers
def test_load_replays_the_puts(folder: Path, tmp_path: Path) -> None:
    """The puts give the recorded rows and the timer's files. A second run gives the same bytes."""
    operations = []
    for number, row in enumerate(rows(folder, "put")):
        properties = dict(zip(row["props"][::2], row["props"][1::2], strict=True))
        operations.append({
            "op": "put", "topic": row["real_topic"], "queueId": 0, "tags": "TagA", "uniqKey": row["uniq_key"],
            "props": properties, "body": f"timer body {number}", "at_ms": row["at_ms"],
        })  # fmt: skip
    operations.append({"op": "persist", "at_ms": rows(folder, "timer_state")[-1]["at_ms"]})
    found = []
    for name in ("one", "other"):
        answers: list[Row] = []
        run(
            tmp_path / name, store_config(folder), map(json.dumps, operations), answers.append,
            warn=lambda reason: None, timer=settings_of(folder),
        )  # fmt: skip
        for ours, theirs in zip(answers[:-1], rows(folder, "put"), strict=True):
            shared = ("status", "phys", "queue_offset") if "phys" in ours else ("status",)
            assert {key: ours[key] for key in shared} == {key: theirs[key] for key in shared}
            assert ours.get("wrote_bytes") == theirs.get("size")
        assert list(unit_rows(tmp_path / name, settings_of(folder))) == list(recorded_units(folder))
        slots = [(number, *slot) for number, slot in TimerWheel.read_slots(str(tmp_path / name), DiskFiles())]
        assert slots == recorded_slots(folder)
        found.append(
            {
                str(path.relative_to(tmp_path / name)): hashlib.sha1(path.read_bytes()).digest()
                for path in (tmp_path / name).rglob("*")
                if path.is_file() and path.name != "retention.json"  # it names its folder
            }
        )
    assert found[0] == found[1]


@timers
def test_the_command_prints_the_recorded_rows(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["timers", str(folder / "store")]) == 0
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    types = ("timerlog_unit", "timerlog_blank", "wheel_slot", "timercheck")
    expected = [row for row in jsonl(folder / "expected.jsonl") if row["type"] in types]
    assert printed == expected
    assert list(map(list, printed)) == list(map(list, expected))


def copied(folder: Path, path: Path) -> Path:
    """Return a copy of the recorded store with its wheel unpacked, as the broker had it."""
    shutil.copytree(folder / "store", path, copy_function=shutil.copyfile)
    packed = path / "timerwheel.gz"
    (path / "timerwheel").write_bytes(gzip.decompress(packed.read_bytes()))
    packed.unlink()
    return path


@pytest.mark.slow
@timers
def test_a_recorded_store_is_continued(folder: Path, tmp_path: Path) -> None:
    path = copied(folder, tmp_path / "store")
    wheel, log = (path / "timerwheel").read_bytes(), (path / "timerlog" / f"{0:020}").read_bytes()
    clock = ManualClock(rows(folder, "timer_state")[-1]["at_ms"])
    with MessageStore.open(path, store_config(folder), clock=clock) as store:
        found = Timers(store, settings_of(folder))
        assert (path / "timerwheel").read_bytes() == wheel
        assert (path / "timerlog" / f"{0:020}").read_bytes() == log
        waiting = [(due, message.unique_key) for due, message in waiting_timers(store)]
        due = found.run_due(clock.now_ms())
        while due is not None:
            clock.move_to(max(due, clock.now_ms()))
            due = found.run_due(clock.now_ms())
        later = {
            message.unique_key: message.store_timestamp_ms
            for message in store
            if message.topic != SystemTopic.TIMER
            and message.store_timestamp_ms > rows(folder, "timer_state")[-1]["at_ms"]
        }
    assert waiting
    assert later == {key: due + settings_of(folder).timer_precision_ms for due, key in waiting}
