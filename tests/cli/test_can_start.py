"""``can-start``: whether a broker starts on a store, by the rules of its version, and what recovery reads and cuts."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path
from typing import Any

import pytest

from librmq import Broker, ManualClock, ManualRunner, Message, MessageStore, Producer, RmqError, StoreConfig
from tests.budget import many
from tests.cli.stand import Shell, errors_of, files_of
from tests.cli.test_damage_by_command import DAMAGES, by_broker, sound
from tests.reference import COMPACT, existing, unpack

__all__ = ["sound"]  # a fixture

START_MS = 1_700_000_000_000
SIZE = 4096


def can_start(shell: Shell, path: Path, status: int | None = None) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return the verdict and the broker's reasons by file, and check that no byte has changed."""
    before = files_of(path)
    answer = shell("can-start", path)
    row = answer.rows[0]
    expected = int(row["broker"] in ("loses", "refuses") or row["librmq"] == "refuses")
    assert answer.status == (expected if status is None else status), answer
    assert files_of(path) == before
    assert not errors_of("can-start", *answer.rows)
    first, *reasons = answer.rows
    assert f"RocketMQ {first['version']}" in answer.said
    order = ["refuses", "loses", "repairs", "reads", "starts"]
    verdicts = [order.index(reason["verdict"]) for reason in reasons]
    assert verdicts == sorted(verdicts)
    return first, {reason["file"]: reason for reason in reasons if reason["opener"] == "broker"}


@pytest.fixture
def own(shell: Shell) -> Path:
    """Return a closed store of six log files, and of tables."""
    path = shell.folder / "own"
    clock = ManualClock(START_MS)
    config = StoreConfig.tiny(commitlog_file_size=SIZE, consumequeue_file_size=400, max_index_num=16)
    with Broker.open(path, runner=ManualRunner(clock), store_config=config) as broker:
        broker.create_topic("T", 1)
        broker.set_group("G")
        broker.reset_group("G", "T", "begin")
        for number in range(60):
            broker.store.append(Message("T", bytes(300), keys=f"k{number}"))
            clock.advance(seconds=1)
    return path


def zero(path: Path, at: int, count: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(bytes(count))


def test_a_closed_store_starts_after_three_files(shell: Shell, own: Path) -> None:
    row, reasons = can_start(shell, own, 0)
    assert (row["version"], row["broker"], row["librmq"], row["closed_cleanly"]) == ("4.9", "starts", "starts", True)
    assert not reasons
    logs = sorted((own / "commitlog").iterdir())
    assert row["recovery_file"] == f"commitlog/{logs[-3].name}"
    with MessageStore.open(own, read_only=True) as store:
        assert row["log_end"] == store.log.end
    assert row["recovery_bytes"] == len(b"".join(path.read_bytes() for path in logs[-3:]).rstrip(b"\0"))
    assert row["read_s"] == pytest.approx(row["recovery_bytes"] / row["read_bytes_per_s"], rel=0.01)
    assert (row["cut_bytes"], row["recover_cuts"]) == (0, 0)


def test_after_a_kill_the_checkpoint_decides_where_it_reads(shell: Shell, own: Path) -> None:
    (own / "abort").touch()
    shutil.rmtree(own / "librmq")
    logs = sorted((own / "commitlog").iterdir())
    firsts = [struct.unpack_from(">q", path.read_bytes(), 56)[0] for path in logs]
    checkpoint = own / "checkpoint"
    rest = checkpoint.read_bytes()[16:]
    for number in range(1, 4):
        checkpoint.write_bytes(struct.pack(">qq", firsts[number] + 3000, firsts[number] + 3000) + rest)
        assert can_start(shell, own)[0]["recovery_file"] == f"commitlog/{logs[number].name}"
        checkpoint.write_bytes(struct.pack(">qq", firsts[number] + 2999, firsts[number] + 9999) + rest)
        assert can_start(shell, own)[0]["recovery_file"] == f"commitlog/{logs[number - 1].name}"


def test_a_checkpoint_without_times_reads_everything(shell: Shell, own: Path) -> None:
    (own / "abort").touch()
    zero(own / "checkpoint", 0, 24)
    row, reasons = can_start(shell, own, 0)
    assert (row["broker"], row["recovery_file"]) == ("repairs", f"commitlog/{0:020}")
    assert "reads the whole log" in reasons["checkpoint"]["what"]


def test_index_files_that_a_kill_costs(shell: Shell, own: Path) -> None:
    (own / "abort").touch()
    logs = sorted((own / "commitlog").iterdir())
    first_ms = struct.unpack_from(">q", logs[-2].read_bytes(), 56)[0]
    (own / "checkpoint").write_bytes(struct.pack(">qqq", first_ms + 3000, first_ms + 3000, 0).ljust(4096, b"\0"))
    row, reasons = can_start(shell, own, 1)
    assert row["broker"] == "loses"
    assert "keys of messages from 0 to" in reasons["index"]["what"]
    assert "recover" in reasons["index"]["next"]


@pytest.mark.parametrize("closed", [True, False])
def test_sound_records_behind_a_damaged_one_are_lost(shell: Shell, own: Path, closed: bool) -> None:
    if not closed:
        (own / "abort").touch()
        zero(own / "checkpoint", 0, 24)
    last = sorted((own / "commitlog").iterdir())[-2]
    zero(last, 0, 40)
    row, reasons = can_start(shell, own, 1)
    # librmq reads only the last record of a store that it has closed itself.
    assert (row["broker"], row["librmq"]) == ("loses", "starts" if closed else "refuses")
    assert row["log_end"] <= int(last.name)
    assert row["cut_bytes"] > 0
    (reason,) = [reason for file, reason in reasons.items() if file.startswith("commitlog")]
    assert "salvage" in reason["next"]


def test_damage_before_the_walk_of_a_closed_store_is_not_met(shell: Shell, own: Path) -> None:
    zero(own / "commitlog" / f"{0:020}", 0, 40)
    assert can_start(shell, own, 0)[0]["broker"] == "starts"
    (own / "abort").touch()
    zero(own / "checkpoint", 0, 24)
    row, _ = can_start(shell, own, 1)
    assert (row["broker"], row["log_end"]) == ("loses", 0)


@many
@pytest.mark.parametrize(
    ("name", "backup", "verdict"),
    [
        ("{", b'{"offsetTable":{}}', "repairs"),
        ("", b'{"offsetTable":{}}', "repairs"),
        ("{", None, "loses"),
        ("{", b"{", "refuses"),
        (None, b"{", "refuses"),
        (None, None, "loses"),
    ],
)
def test_tables_and_their_backups(
    shell: Shell, own: Path, name: str | None, backup: bytes | None, verdict: str
) -> None:
    table = own / "config" / "consumerOffset.json"
    table.with_name("consumerOffset.json.bak").unlink(missing_ok=True)
    table.unlink()
    if name is not None:
        table.write_text(name)
    if backup is not None:
        table.with_name("consumerOffset.json.bak").write_bytes(backup)
    row, reasons = can_start(shell, own, int(verdict != "repairs"))
    assert row["broker"] == verdict
    (reason,) = reasons.values()
    assert reason["file"].startswith("config/consumerOffset.json")
    assert reason["next"]


@many
@pytest.mark.parametrize(
    ("place", "length", "verdict"),
    [
        ("commitlog/00000000000000090112", 0, "refuses"),
        ("commitlog/00000000000000000000", 100, "refuses"),
        ("commitlog/notes", SIZE, "refuses"),
        ("consumequeue/T/0/00000000000000000400", 100, "refuses"),
        ("consumequeue/T/0/00000000000000090000", 0, "refuses"),
        ("consumequeue/T/notes", 10, "starts"),
        ("checkpoint", 10, "starts"),
    ],
)
def test_files_of_a_wrong_length(shell: Shell, own: Path, place: str, length: int, verdict: str) -> None:
    (own / place).write_bytes(bytes(length))
    answer = shell("can-start", own)
    row, *reasons = answer.rows
    assert row["broker"] == verdict
    files = {reason["file"]: reason for reason in reasons if reason["opener"] == "broker"}
    assert (place in files) == (verdict == "refuses")
    if verdict == "refuses":
        assert files[place]["next"]
        assert answer.status == 1


def test_a_gap_in_the_log_is_lost(shell: Shell, own: Path) -> None:
    (own / "commitlog" / f"{SIZE:020}").unlink()
    row, reasons = can_start(shell, own, 1)
    assert row["broker"] == "loses"
    assert f"commitlog/{2 * SIZE:020}" in reasons


def test_a_store_in_use_refuses_a_second_broker(shell: Shell, own: Path) -> None:
    with MessageStore.open(own):
        row, *reasons = shell("can-start", own).rows
    assert row["broker"] == "refuses"
    assert any(reason["file"] == "lock" for reason in reasons)


def test_5_deletes_a_last_file_of_length_zero(shell: Shell) -> None:
    unpack(COMPACT / "stores" / "rocketmq-5.3.3.tar.xz", shell.folder / "old")
    store = shell.folder / "old" / "store"
    assert can_start(shell, store, 0)[0]["version"] == "5.3"
    log = sorted((store / "commitlog").iterdir())[-1]
    following = store / "commitlog" / f"{int(log.name) + log.stat().st_size:020}"
    following.touch()
    row, reasons = can_start(shell, store)
    assert (row["broker"], row["librmq"]) == ("repairs", "refuses")  # `librmq recover` deletes the file
    assert reasons[f"commitlog/{following.name}"]["verdict"] == "repairs"
    (store / "timerwheel").write_bytes(bytes(100))
    row, reasons = can_start(shell, store, 1)
    assert (row["broker"], reasons["timerwheel"]["verdict"]) == ("refuses", "refuses")
    (store / "timerwheel").unlink()
    (store / "timerwheel.104").write_bytes(bytes(100))
    row, reasons = can_start(shell, store, 1)
    assert (row["broker"], reasons["timerwheel.104"]["verdict"]) == ("refuses", "refuses")
    (store / "timerwheel.208").write_bytes(bytes(128))  # a broker reads the last one only
    assert "timerwheel.104" not in can_start(shell, store)[1]


def test_a_store_of_5_that_has_only_a_timer(shell: Shell) -> None:
    unpack(existing("store-5.3.3", "tx3.tar.xz"), shell.folder)
    row, _ = can_start(shell, shell.folder / "tx3", 0)
    assert (row["version"], row["broker"]) == ("5.3", "repairs")


def test_the_store_of_a_killed_broker(shell: Shell) -> None:
    store = shutil.copytree(existing("store-crash", "store"), shell.folder / "crashed")
    row, _ = can_start(shell, store, 0)
    assert (row["broker"], row["librmq"], row["log_end"], row["cut_bytes"]) == ("repairs", "repairs", 87985, 550)


@pytest.mark.slow
@pytest.mark.parametrize("closed", [True, False])
def test_large_logs_are_judged_without_a_trial(shell: Shell, closed: bool) -> None:
    path = shell.folder / "large"
    with MessageStore.open(path, StoreConfig.tiny(commitlog_file_size=65 << 20)) as store:
        for number in range(10):
            store.append(Message("T", bytes(300), keys=f"k{number}"))
    if not closed:
        (path / "abort").touch()
        zero(path / "checkpoint", 0, 24)
    row, _ = can_start(shell, path, 0)
    assert (row["librmq"], row["recover_cuts"]) == (("starts", 0) if closed else ("repairs", None))
    said = shell("can-start", path).said
    assert "not compared with the log, which is above 64 MiB: librmq verify does that" in said
    log = path / "commitlog" / f"{0:020}"
    with log.open("rb") as file:
        (first_size,) = struct.unpack(">i", file.read(4))
    zero(log, first_size, 40)
    row, _ = can_start(shell, path, 1)
    assert row["broker"] == "loses"
    assert row["librmq"] == ("starts" if closed else "refuses")


@many
@pytest.mark.parametrize("name", DAMAGES)
def test_the_verdict_about_librmq_is_what_an_opening_does(shell: Shell, sound: Path, name: str) -> None:
    path = shutil.copytree(sound, shell.folder / "s")
    DAMAGES[name](path)
    row, *reasons = shell("can-start", path).rows
    was_killed = (path / "abort").exists()
    try:
        with Broker.open(path, runner=ManualRunner(ManualClock(START_MS))) as broker:
            opened = "repairs" if broker.store.recovered or was_killed else "starts"
    except RmqError:
        opened = "refuses"
    assert row["librmq"] == opened
    assert opened != "refuses" or any(reason["opener"] == "librmq" for reason in reasons)


@many
@pytest.mark.parametrize(
    "table", ["topics.json", "consumerOffset.json", "subscriptionGroup.json", "delayOffset.json", "consumerFilter.json"]
)
def test_librmq_refuses_a_table_that_is_unreadable_with_its_backup(shell: Shell, own: Path, table: str) -> None:
    for name in (table, f"{table}.bak"):
        (own / "config" / name).write_text("{broken")
    row, *reasons = shell("can-start", own).rows
    with pytest.raises(RmqError):
        Broker.open(own, runner=ManualRunner())
    assert (row["broker"], row["librmq"]) == ("refuses", "refuses")
    assert [reason["opener"] for reason in reasons if reason["file"] == f"config/{table}"] == ["broker", "librmq"]


@pytest.mark.parametrize(("made_by", "what"), [("librmq", "file"), ("librmq", "folder"), ("a broker", "file")])
def test_a_broker_reads_on_behind_a_queue_that_is_missing(shell: Shell, sound: Path, made_by: str, what: str) -> None:
    path = shutil.copytree(sound, shell.folder / "s")
    if made_by == "a broker":
        by_broker(path)
    folder = path / "consumequeue" / "%DLQ%G"
    shutil.rmtree(folder / "0")
    if what == "file":
        (folder / "0").mkdir()
    row, reasons = can_start(shell, path, 1)
    assert row["broker"] == "loses"
    (reason,) = [reason for file, reason in reasons.items() if file.startswith("consumequeue/%DLQ%G")]
    assert "behind 1 message" in reason["what"]
    assert "recover" in reason["next"]


def test_a_broker_reads_on_behind_an_entry_that_is_lost(shell: Shell, sound: Path) -> None:
    path = shutil.copytree(sound, shell.folder / "s")
    DAMAGES["the last entry of a queue lost"](path)
    row, reasons = can_start(shell, path, 1)
    assert row["broker"] == "loses"
    assert "behind 1 message" in next(iter(reasons.values()))["what"]


@pytest.mark.parametrize("closed", [True, False])
def test_a_broker_makes_all_queues_again_if_none_is_left(shell: Shell, sound: Path, closed: bool) -> None:
    path = shutil.copytree(sound, shell.folder / "s")
    shutil.rmtree(path / "consumequeue")
    if not closed:
        (path / "abort").touch()
        first_ms = struct.unpack_from(">q", sorted((path / "commitlog").iterdir())[2].read_bytes(), 56)[0] + 3000
        (path / "checkpoint").write_bytes(struct.pack(">qq", first_ms, first_ms).ljust(4096, b"\0"))
    _, reasons = can_start(shell, path)
    queues = [reason["verdict"] for file, reason in reasons.items() if file.startswith("consumequeue")]
    assert set(queues) >= ({"repairs"} if closed else {"loses"})
    # After a kill a broker puts into the queues what its recovery reads.
    assert ("loses" in queues) == (not closed)


def test_without_a_delayed_message_the_progress_of_levels_costs_nothing(shell: Shell, own: Path) -> None:
    (own / "config" / "delayOffset.json").unlink(missing_ok=True)
    (own / "config" / "delayOffset.json.bak").unlink(missing_ok=True)
    assert can_start(shell, own, 0)[0]["broker"] == "starts"
    (own / "config" / "delayOffset.json").write_text("{broken")
    row, _ = can_start(shell, own, 1)
    assert (row["broker"], row["librmq"]) == ("repairs", "refuses")


def test_5_stops_at_an_empty_last_file_of_a_queue(shell: Shell) -> None:
    """It is the state of RocketMQ's #9728: the entry's page, and its message, did not reach the device."""
    unpack(COMPACT / "stores" / "rocketmq-5.3.3.tar.xz", shell.folder / "old")
    store = shell.folder / "old" / "store"
    with MessageStore.open(store) as opened:
        size = opened.config.consumequeue_file_size // 20
        while opened.queue_range("filled", 0)[1] < size:
            opened.append(Message("filled", b"entry of a full file"))
        other = opened.append(Message("other", b"not in its queue yet"))
    shutil.rmtree(store / "librmq")
    queue = store / "consumequeue" / "other" / "0" / f"{0:020}"
    queue.write_bytes(bytes(queue.stat().st_size))
    empty = store / "consumequeue" / "filled" / "0" / f"{size * 20:020}"
    empty.write_bytes(bytes(size * 20))
    row, reasons = can_start(shell, store, 1)
    assert row["broker"] == "refuses"
    assert "9728" in reasons[f"consumequeue/filled/0/{empty.name}"]["what"]
    assert other.queue_offset == 0
    empty.unlink()
    assert can_start(shell, store)[0]["broker"] != "refuses"


@pytest.mark.slow
def test_queues_of_batches_are_in_files(shell: Shell) -> None:
    unpack(existing("store-5.3.3", "bcq.tar.xz"), shell.folder)
    row, reasons = can_start(shell, shell.folder / "bcq")
    assert row["recovery_file"] is not None
    assert not any("RocksDB" in reason["what"] for reason in reasons.values())


@pytest.mark.parametrize("large", [False, True])
def test_keys_that_no_file_of_the_index_has_are_lost(shell: Shell, large: bool) -> None:
    """A broker notes no state at its close, and indexes nothing again at its start."""
    path = shell.folder / "keys"
    config = StoreConfig.tiny(commitlog_file_size=(65 << 20) if large else 1 << 16, max_index_num=16)
    clock = ManualClock(START_MS)
    with MessageStore.open(path, config, clock=clock) as store:
        for number in range(60):
            store.append(Message("T", b"x", keys=f"k{number}"))
            clock.advance(seconds=1)
    shutil.rmtree(path / "librmq")
    assert can_start(shell, path, 0)[0]["broker"] == "starts"
    max((path / "index").iterdir()).unlink()
    row, reasons = can_start(shell, path, 1)
    assert (row["broker"], row["condition"]) == ("loses", None if large else "damaged")
    (reason,) = reasons.values()
    assert reason["file"].startswith("index")
    assert "recover" in reason["next"]
    assert "missing-keys" in [row["finding"] for row in shell("diagnose", path, "--no-verify").rows]


def test_a_timer_whose_progress_is_beyond_its_end_loses_messages(shell: Shell) -> None:
    path = shell.folder / "timers"
    with Broker.open(path, runner=ManualRunner(ManualClock(START_MS)), store_config=StoreConfig.tiny()) as broker:
        broker.create_topic("orders", 1)
        for _ in range(4):
            Producer(broker, "p").send("orders", b"x", delay=7301)
        broker.runner.pass_time(60)
    assert can_start(shell, path, 0)[0]["librmq"] == "starts"
    with (path / "config" / "timercheck").open("r+b") as file:
        file.seek(16)
        file.write(struct.pack(">q", 500))
    row, reasons = can_start(shell, path, 1)
    assert (row["broker"], row["librmq"]) == ("loses", "loses")
    assert "496 messages that wait may be lost" in reasons["config/timercheck"]["what"]
