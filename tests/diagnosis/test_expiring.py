"""Messages that retention deletes soon: as many as retention then deletes, at the time that was said."""

from __future__ import annotations

from pathlib import Path

import pytest

from librmq import Broker, ConfigError, ManualClock, ManualRunner, Producer, StoreConfig
from librmq.diagnosis import ExpiringMessages, expiring, lag

HOUR_MS = 3_600_000
CONFIG = StoreConfig.tiny(
    commitlog_file_size=4096,
    max_message_size=2048,
    file_reserved_hours=72,
    delete_when=";".join(map(str, range(24))),
    keep_unconsumed=False,
)
"""A log file holds four messages of this test."""
RESERVED_S = 72 * 3600.0


def deleted(broker: Broker) -> dict[tuple[str, str], int]:
    return {(row.group, row.topic): row.expired for row in lag(broker).by_topic() if row.expired}


def test_retention_deletes_what_expires_at_the_given_time(tmp_path: Path) -> None:
    runner = ManualRunner(ManualClock(1_700_000_000_000))
    with Broker.open(tmp_path / "store", store_config=CONFIG, runner=runner) as broker:
        broker.create_topic("orders", 2)
        broker.create_topic("mails", 1)
        producer = Producer(broker, "P")
        for number in range(40):  # ten hours, and so ten files
            producer.send("mails" if number % 5 == 4 else "orders", bytes(800))
            runner.advance(HOUR_MS // 4)
        for group in ("slow", "late"):
            broker.set_group(group)
            broker.reset_group(group, "orders", "begin")
        broker.reset_group("late", "mails", "begin")
        broker.reset_group("slow", "orders", 6, queue_id=0)
        assert expiring(broker, reserved_s=RESERVED_S, within_s=61 * 3600) == []
        runner.advance(60 * HOUR_MS)
        until_ms = runner.now_ms() + 6 * HOUR_MS
        rows = expiring(broker, reserved_s=RESERVED_S, within_s=6 * 3600)
        assert {(row.group, row.topic) for row in rows} == {("slow", "orders"), ("late", "orders"), ("late", "mails")}
        assert [row.first_at_ms for row in rows] == sorted(row.first_at_ms for row in rows)
        assert all(row.bytes > 800 * row.messages for row in rows)
        assert deleted(broker) == {}
        begin = broker.store.log.begin
        runner.advance(rows[0].first_at_ms - runner.now_ms() - 1)
        assert broker.store.log.begin == begin
        runner.advance(1000)
        assert broker.store.log.begin > begin
        runner.advance(until_ms - runner.now_ms() + 1000)
        assert deleted(broker) == {(row.group, row.topic): row.messages for row in rows}


def test_a_folder_counts_from_its_last_message(tmp_path: Path) -> None:
    runner = ManualRunner(ManualClock(1_700_000_000_000))
    with Broker.open(tmp_path / "store", store_config=CONFIG, runner=runner) as broker:
        broker.create_topic("orders", 1)
        broker.set_group("G")
        broker.reset_group("G", "orders", "begin")
        producer = Producer(broker, "P")
        for _ in range(9):  # two files and the one that stays
            producer.send("orders", bytes(800))
        first_ms = runner.now_ms()
        runner.advance(70 * HOUR_MS)
        producer.send("orders", b"last")
        broker.reset_group("G", "orders", 1)
    (row,) = expiring(tmp_path / "store", reserved_s=RESERVED_S, within_s=6 * 3600)
    assert row == ExpiringMessages("G", "orders", 7, row.bytes, first_ms + 72 * HOUR_MS)
    assert expiring(tmp_path / "store", reserved_s=RESERVED_S, within_s=3600) == []


def test_topics_that_no_group_has_read_expire_too(tmp_path: Path) -> None:
    runner = ManualRunner(ManualClock(1_700_000_000_000))
    with Broker.open(tmp_path / "store", store_config=CONFIG, runner=runner) as broker:
        broker.create_topic("unread", 2)
        producer = Producer(broker, "P")
        for number in range(9):
            producer.send("unread", bytes(800), queue=number % 2)
        (row,) = expiring(broker, reserved_s=0, within_s=0)
        assert (row.group, row.topic, row.messages) == (None, "unread", 8)
        broker.set_group("G")
        broker.reset_group("G", "unread", "begin")
        assert {row.group for row in expiring(broker, reserved_s=0, within_s=0)} == {"G"}


def test_times_are_not_negative(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="within_s=-1"):
        expiring(tmp_path, reserved_s=0, within_s=-1)
