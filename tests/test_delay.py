"""Delivery of delayed messages: their times, their order, and messages that can't be delivered."""

from __future__ import annotations

import dataclasses
import errno
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from librmq.clock import ManualClock
from librmq.config import StoreConfig
from librmq.delay import COPIED_PROPERTIES, DelayConfig, DelaySchedule, Layout
from librmq.errors import StoreClosedError, StoreIOError
from librmq.files._memory import MemoryFiles
from librmq.files.interface import file_size
from librmq.message.message import Message
from librmq.message.properties import decode_properties, encode_properties, is_encoding_of, tags_code
from librmq.message.record import MULTI_TAGS, TRANSACTION_PREPARED, TRANSACTION_ROLLBACK
from librmq.message.topics import SystemTopic
from librmq.store.format.broker_tables import BrokerTables
from tests.bytime import NOW, Waiting
from tests.stores import ROOT, SMALL, SMALL_EXT, START_MS, died


def test_nothing_waits_nothing_is_due() -> None:
    waiting = Waiting()
    assert waiting.pass_to(10_000) is None
    waiting.store.append(Message("T", b"b"))
    assert waiting.pass_to(20_000) is None
    assert waiting.runs == []


@pytest.mark.parametrize(("put_at", "look_at"), [(0, 1000), (1, 1100), (50, 1100), (99, 1100), (100, 1100)])
def test_due_is_the_first_tick_at_or_after_the_time(put_at: int, look_at: int) -> None:
    waiting = Waiting()
    waiting.pass_to(put_at)
    result = waiting.put()
    assert waiting.schedule.due_for(1, result.store_timestamp_ms) == START_MS + look_at
    assert waiting.pass_to(look_at - 1) == look_at
    assert waiting.delivered() == []
    assert waiting.pass_to(look_at) is None
    assert waiting.delivered() == [(b"b", look_at)]
    assert waiting.runs == [look_at]


def test_the_first_tick_is_a_second_after_the_start() -> None:
    files = MemoryFiles()
    earlier = Waiting(files=files)
    earlier.put()
    earlier.store.close()
    waiting = Waiting(settings=DelayConfig(), files=files, at_ms=START_MS + 5_030)
    assert waiting.pass_to(5_050) == 6_030
    assert waiting.pass_to(6_029) == 6_030
    waiting.pass_to(6_030)
    assert waiting.delivered() == [(b"b", 6_030)]


def test_a_late_call_uses_the_last_tick_of_the_grid() -> None:
    waiting = Waiting()
    waiting.clock.advance(ms=50)
    waiting.put()
    waiting.clock.advance(ms=1_030)
    assert waiting.schedule.run_due(waiting.clock.now_ms()) == START_MS + 1_100
    assert waiting.delivered() == []


def test_a_delivered_message_is_the_one_that_was_sent() -> None:
    waiting = Waiting()
    properties = {"a": "1", "empty": ""}
    message = Message("T", b"body", tags="t", keys="k", flag=7, delay_level=1)
    message.properties |= properties
    waiting.store.append(
        message, 4, born_timestamp_ms=5, born_host=("10.0.0.1", 2), store_host=("fe80::1", 3), reconsume_times=2
    )
    waiting.pass_to(1_000)
    schedule, real = waiting.store
    assert (real.topic, real.queue_id, real.queue_offset, real.body) == ("T", 4, 0, b"body")
    same = ("flag", "born_timestamp_ms", "born_host", "store_host", "sys_flag", "reconsume_times", "body_crc")
    for name in same:
        assert getattr(real, name) == getattr(schedule, name)
    assert dict(real.properties) == dict(schedule.properties)
    assert b"empty" not in real.properties_raw  # records that are read have no empty values
    queue = waiting.store.queue("T", 4)
    assert queue is not None
    assert queue.entries()["tags_code"].tolist() == [tags_code("t")]
    assert [(message.physical_offset, result.queue_offset) for message, result in waiting.told] == [(0, 0)]


@pytest.mark.parametrize("config", [SMALL, SMALL_EXT])
def test_many_together_go_each_to_its_own_queue(config: StoreConfig) -> None:
    """Messages are read and written together, even if all their fields differ and log files end between them."""
    waiting = Waiting(config)
    for number in range(150):
        message = Message(f"T{number % 3}", b"x" * (number * 7 % 300), keys=f"k{number}", flag=number, delay_level=1)
        message.properties["ü" * (number % 4)] = "ä"
        waiting.store.append(
            message,
            number % 2,
            born_timestamp_ms=number,
            born_host=("fe80::1" if number % 5 == 0 else "10.0.0.1", number),
            store_host=("fe80::2" if number % 7 == 0 else "10.0.0.2", number),
            sys_flag=MULTI_TAGS if number % 11 == 0 else 0,
            reconsume_times=number,
        )
    waiting.pass_to(1_000)
    assert waiting.schedule.progress == {1: 150}
    assert [waited.queue_offset for waited, _ in waiting.told] == list(range(150))
    same = ("body", "flag", "born_timestamp_ms", "born_host", "store_host", "sys_flag", "reconsume_times", "keys")
    for waited, result in waiting.told:
        real = waiting.store.message_at(result.physical_offset)
        assert real is not None
        assert (real.topic, str(real.queue_id)) == (waited.properties["REAL_TOPIC"], waited.properties["REAL_QID"])
        assert (real.queue_offset, real.size) == (result.queue_offset, result.size)
        assert [getattr(real, name) for name in same] == [getattr(waited, name) for name in same]
        assert real.properties_raw == encode_properties(waited.properties)
        assert waiting.store.find_by_key(real.topic, real.keys[0]) == [real]
    for topic in ("T0", "T1", "T2"):
        for queue_id in (0, 1):
            found = list(waiting.store.messages(topic, queue_id))
            assert [message.queue_offset for message in found] == list(range(25))
    assert waiting.store.verify().sound


NAMES = st.sampled_from(["REAL_TOPIC", "REAL_QID", "KEYS", "TAGS", "UNIQ_KEY", "DELAY", "a", "a.b", "ü", ""])
STORED = st.lists(st.tuples(NAMES, st.text("ab1\1\2ü", max_size=3)), max_size=7).map(
    lambda pairs: "\2".join(f"{name}\1{value}" for name, value in pairs).encode()
)


USUAL = st.dictionaries(NAMES.filter(str.isascii).filter(bool), st.text("ab1", min_size=1, max_size=3), min_size=1)


@given(USUAL.map(encode_properties), STORED)
def test_values_that_fit_a_layout_are_encoded_unchanged(first: bytes, second: bytes) -> None:
    known = decode_properties(first)
    assert is_encoding_of(first, known)
    layout = Layout(tuple(known))
    assert layout.values_of(first) is not None
    for raw in (first, second):
        found = layout.values_of(raw)
        if found is not None:
            properties = decode_properties(raw)
            assert found == tuple(map(properties.get, COPIED_PROPERTIES))
            assert encode_properties(properties) == raw


def test_invented_property_names_cost_no_layout_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repair 4: messages with 1,500 different property names each once blocked the runner for seconds."""
    made: list[str] = []
    compiled = re.compile
    waiting = Waiting(StoreConfig.tiny())
    for number in range(20):
        names = {f"{number}-{name}": "v" for name in range(1_500)}
        waiting.store.append(Message("T", b"%d" % number, properties=names, delay_level=1))

    def compile_and_note(text: str) -> re.Pattern[str]:
        made.append(text)
        return compiled(text)

    monkeypatch.setattr(re, "compile", compile_and_note)
    waiting.pass_to(2_000)
    assert [body for body, _ in waiting.delivered()] == [b"%d" % number for number in range(20)]
    assert made == []


def test_a_record_of_the_schedule_has_its_delivery_time_in_its_entry() -> None:
    """Also if its properties are encoded before, as those of a commit are."""
    waiting = Waiting()
    raw = encode_properties({"DELAY": "2", "REAL_TOPIC": "T", "REAL_QID": "2", "TAGS": "t"})
    waiting.store.append(Message(SystemTopic.SCHEDULE, b"x"), 1, properties_raw=raw)
    queue = waiting.store.queue(SystemTopic.SCHEDULE, 1)
    assert queue is not None
    assert queue.entries()["tags_code"].tolist() == [START_MS + 5_000]


@pytest.mark.parametrize("bits", [TRANSACTION_PREPARED, TRANSACTION_ROLLBACK])
def test_an_uncommitted_message_is_stored_invisibly(bits: int) -> None:
    """A message whose transaction is not committed is stored where no reader sees it."""
    waiting = Waiting()
    raw = encode_properties({"DELAY": "1", "REAL_TOPIC": "T", "REAL_QID": "2", "KEYS": "k"})
    result = waiting.store.append(Message(SystemTopic.SCHEDULE, b"half"), 0, properties_raw=raw, sys_flag=bits)
    waiting.put()
    queue = waiting.store.queue(SystemTopic.SCHEDULE, 0)
    assert queue is not None
    queue.truncate_to(0)  # the store writes no entry for it, so the test makes one
    queue.append(0, result.physical_offset, result.size, START_MS + 1_000)
    waiting.pass_to(1_000)
    assert waiting.delivered() == [(b"half", 1_000)]
    assert list(waiting.store.messages("T", 2)) == []
    is_found = len(waiting.store.find_by_key("T", "k"))
    assert is_found == (bits == TRANSACTION_PREPARED)


def test_a_disk_full_between_two_files_repeats_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    waiting = Waiting()
    for number in range(40):
        waiting.put(str(number).encode() * 100)
    log, write = waiting.store.log, waiting.store.log.copy_many_in
    calls = 0

    def copy_many_in(data: bytes, size: int) -> None:
        nonlocal calls
        calls += 1
        if calls in (6, 7):
            raise StoreIOError("reserve", "commitlog", OSError(errno.ENOSPC, "no space left"))
        write(data, size)

    monkeypatch.setattr(log, "copy_many_in", copy_many_in)
    waiting.pass_to(1_000)
    written = len(waiting.told)
    assert 0 < written < 40
    assert waiting.schedule.progress == {1: written}
    assert "level 1 fails; next try in 10000 ms" in caplog.text
    waiting.pass_to(11_000)
    assert [body for body, _ in waiting.delivered()] == [str(number).encode() * 100 for number in range(40)]


def test_a_thousand_messages_over_a_year() -> None:
    levels = " ".join(f"{days}d" for days in range(1, 366))
    waiting = Waiting(StoreConfig.tiny(message_delay_level=levels))
    expected = []
    for number in range(1_000):
        level = number * 37 % 365 + 1
        waiting.put(str(number).encode(), level)
        expected.append((level * 86_400_000, number))
    assert waiting.pass_to(366 * 86_400_000) is None
    assert waiting.delivered() == [(str(number).encode(), due) for due, number in sorted(expected)]
    assert len(waiting.runs) == 365


def test_the_rest_of_many_is_due_immediately() -> None:
    """Messages that one step leaves over are due immediately, even between two regular steps."""
    waiting = Waiting(settings=dataclasses.replace(NOW, most_at_once=10))
    for number in range(25):
        waiting.put(str(number).encode())
    waiting.clock.advance(ms=1_003)  # threads are a little late
    now_ms = waiting.clock.now_ms()
    dues = [waiting.schedule.run_due(now_ms) for _ in range(3)]
    assert all(due is not None and due <= now_ms for due in dues[:2])
    assert dues[2] is None
    assert len(waiting.delivered()) == 25


def test_progress_is_saved_after_a_while_and_not_lost() -> None:
    waiting = Waiting(settings=dataclasses.replace(NOW, save_every_s=10))
    waiting.put()
    waiting.put(level=2)
    assert waiting.pass_to(10_999) == 11_000
    assert file_size(waiting.files, f"{ROOT}/config/delayOffset.json") is None
    assert waiting.pass_to(11_000) is None
    assert waiting.files.read(f"{ROOT}/config/delayOffset.json") == b'{\n\t"offsetTable":{1:1,2:1\n\t}\n}'
    assert waiting.runs == [1_000, 5_000, 11_000]
    waiting.put()
    waiting.schedule.save(0)  # nothing to save
    waiting.pass_to(12_000)
    waiting.schedule.save(waiting.clock.now_ms())
    assert BrokerTables.open(f"{ROOT}/config", files=waiting.files).delay_offset(1) == 2


def test_a_restart_continues_from_the_saved_progress() -> None:
    waiting = Waiting()
    for number in range(3):
        waiting.put(str(number).encode())
        waiting.clock.advance(ms=1_000)
    waiting.pass_to(3_000)
    assert [body for body, _ in waiting.delivered()] == [b"0", b"1", b"2"]
    again = Waiting(files=died(waiting.files), at_ms=START_MS + 4_000)
    again.pass_to(4_000)
    assert [body for body, _ in again.delivered()] == [b"0", b"1", b"2"] * 2  # nothing was saved: repeated, not lost
    again.schedule.save(0)
    last = Waiting(files=died(again.files), at_ms=START_MS + 5_000)
    assert last.pass_to(5_000) is None
    assert len(last.delivered()) == 6


def test_a_restart_among_many_messages_repeats_none_with_an_id() -> None:
    """Messages of one kind, of which many are read and written together."""
    waiting = Waiting(settings=dataclasses.replace(NOW, most_at_once=40))
    bodies = [b"%d" % number for number in range(120)]
    for body in bodies[:100]:
        waiting.store.append(Message("T", body, unique_key=f"U{body!r}", delay_level=1))
    waiting.clock.advance(ms=1_000)
    waiting.run_due(START_MS + 1_000)
    assert [body for body, _ in waiting.delivered()] == bodies[:40]
    again = Waiting(files=died(waiting.files), at_ms=START_MS + 1_000)
    for body in bodies[100:]:
        again.store.append(Message("T", body, unique_key=f"U{body!r}", delay_level=1))
    again.pass_to(2_000)
    assert [body for body, _ in again.delivered()] == bodies


def test_cancelled_messages_among_many_are_left_out() -> None:
    waiting = Waiting(StoreConfig.tiny(commitlog_file_size=1 << 20))
    cancelled = {b"%d" % number for number in range(3, 200, 70)}
    waiting.schedule = DelaySchedule(
        waiting.store, waiting.offsets, START_MS, NOW,
        delivered=waiting.tell, is_cancelled=lambda message, now_ms: message.body in cancelled,
    )  # fmt: skip
    for number in range(200):
        waiting.put(b"%d" % number)
    waiting.pass_to(1_000)
    expected = [body for number in range(200) if (body := b"%d" % number) not in cancelled]
    assert [body for body, _ in waiting.delivered()] == [message.body for message, _ in waiting.told] == expected
    assert waiting.schedule.progress == {1: 200}


@pytest.mark.parametrize(("stored", "delivered"), [(-5, 3), (9, 0)])
def test_a_progress_that_the_queue_does_not_have_is_corrected(
    stored: int, delivered: int, caplog: pytest.LogCaptureFixture
) -> None:
    waiting = Waiting()
    for _ in range(3):
        waiting.put()
    waiting.offsets.set_delay_offset(1, stored)
    waiting.schedule = DelaySchedule(waiting.store, waiting.offsets, START_MS, NOW)
    waiting.pass_to(1_000)
    assert len(waiting.delivered()) == delivered
    assert waiting.schedule.progress == {1: 3}
    assert f"the progress was {stored}" in caplog.text


def test_progress_of_a_deleted_queue_starts_over() -> None:
    waiting = Waiting()
    waiting.offsets.set_delay_offset(1, 5)
    waiting.schedule = DelaySchedule(waiting.store, waiting.offsets, START_MS, NOW)
    waiting.pass_to(0)
    waiting.put()
    waiting.pass_to(1_000)
    assert len(waiting.delivered()) == 1


def reopened(waiting: Waiting, levels: str) -> Waiting:
    waiting.store.close()
    return Waiting(dataclasses.replace(SMALL, message_delay_level=levels), files=waiting.files, at_ms=START_MS)


@pytest.mark.parametrize(
    ("level", "later", "due"),
    [(2, "1s 2s", 0), (2, "1s 60s", 5_000), (4, "1s 5s", 30_000)],
    ids=["shorter: immediately", "longer: at the old time", "removed: at its time"],
)
def test_messages_wait_through_a_change_of_levels(level: int, later: str, due: int) -> None:
    waiting = Waiting()
    waiting.put(level=level)
    again = reopened(waiting, later)
    if due:
        assert again.pass_to(due - 1) == due
    assert again.pass_to(due) is None
    assert again.delivered() == [(b"b", due)]


def test_a_clock_that_is_set_back() -> None:
    waiting = Waiting(at_ms=START_MS + 60_000)
    waiting.put(level=5)
    waiting.clock = waiting.store.clock = ManualClock(START_MS)
    assert waiting.schedule.run_due(START_MS + 60_000) == START_MS + 120_000
    waiting.schedule.run_due(START_MS)
    assert len(waiting.delivered()) == 1  # at this level, a wait of more than a minute can't be right


def test_in_a_store_with_extension_files() -> None:
    waiting = Waiting(SMALL_EXT)
    for _ in range(3):
        waiting.put()
    assert waiting.pass_to(999) == 1_000
    waiting.pass_to(1_000)
    assert len(waiting.delivered()) == 3


def test_a_lost_extension_unit_is_made_from_the_record(caplog: pytest.LogCaptureFixture) -> None:
    waiting = Waiting(SMALL_EXT)
    waiting.put()
    queue = waiting.store.queue(SystemTopic.SCHEDULE, 0)
    assert queue is not None
    assert queue.ext is not None
    queue.ext.clear()
    assert waiting.pass_to(999) == 1_000
    waiting.pass_to(1_000)
    assert len(waiting.delivered()) == 1
    assert "no extension unit" in caplog.text


def test_the_hash_of_the_tags_is_not_a_time() -> None:
    """When RocketMQ 4.9 recovers after a crash, it stores the hash in place of the time, and then delivers early."""
    waiting = Waiting()
    waiting.store.append(Message("T", b"b", tags="t", delay_level=2), 2)
    queue = waiting.store.queue(SystemTopic.SCHEDULE, 1)
    assert queue is not None
    place, size, _ = queue.entry(0) or (0, 0, 0)
    queue.truncate_to(0)
    queue.append(0, place, size, tags_code("t"))
    assert waiting.pass_to(4_999) == 5_000
    waiting.pass_to(5_000)
    assert waiting.delivered() == [(b"b", 5_000)]


def test_a_store_that_accepts_nothing_is_reported() -> None:
    waiting = Waiting()
    waiting.put()
    waiting.store.close()
    with pytest.raises(StoreClosedError):
        waiting.schedule.run_due(START_MS + 1_000)
