"""The timer: when it delivers, refuses, deletes and rolls, and its files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from librmq.clock import ManualClock
from librmq.config import StoreConfig
from librmq.diagnosis.pending import pending_messages
from librmq.errors import ConfigError, CorruptionError, MessageIllegalError
from librmq.files._memory import MemoryFiles
from librmq.message.delays import TimerRefusedError, delete_key, is_timed
from librmq.message.message import Message
from librmq.message.topics import SystemTopic
from librmq.scheduling.timer_config import TimerConfig
from librmq.store.format.timerfiles import TimerCheckpoint, TimerLog, TimerWheel, Unit
from librmq.store.recovery._verify import verify
from tests.budget import many
from tests.bytime import TINY, Wheel, put_timed
from tests.stores import ROOT, SMALL, START_MS, contents, died

# --- delivery times


def test_a_store_without_timers_is_left_as_it_is() -> None:
    wheel = Wheel()
    before = contents(wheel.files)
    assert wheel.pass_to(100_000) is None
    wheel.save()
    assert contents(wheel.files) == before
    assert wheel.runs == []


@pytest.mark.parametrize(
    ("at", "delay", "out", "comes"),
    [
        (0, 1, -1_000, 0),  # its slot has passed when it reaches the wheel, so it is delivered immediately
        (0, 999, 0, 1_000),
        (0, 1_000, 0, 1_000),
        (0, 1_001, 1_000, 2_000),
        (1, 999, 0, 1_000),
        (1, 1_000, 1_000, 2_000),
        (999, 1, 0, 1_000),
        (500, 10_000, 10_000, 11_000),
    ],
)
def test_the_slot_of_a_time_and_when_it_is_emptied(at: int, delay: int, out: int, comes: int) -> None:
    wheel = Wheel()
    wheel.clock.advance(ms=at)
    if (at, delay) == (0, 1):
        out, comes = 0, 1_000
    stored = wheel.store.message_at(wheel.put(TIMER_DELAY_MS=delay).physical_offset)
    assert stored is not None
    assert stored.topic == SystemTopic.TIMER
    assert stored.properties["TIMER_OUT_MS"] == str(START_MS + out)
    wheel.pass_to(max(comes - 1, at))
    assert wheel.delivered() == []
    wheel.pass_to(20_000)
    assert wheel.delivered() == [(b"b", comes)]
    assert comes >= at + delay


def test_late_messages_skip_the_wheel() -> None:
    wheel = Wheel()
    message = Message("T", b"late")
    message.properties["TIMER_DELAY_SEC"] = "2"
    put_timed(wheel.timers, message)
    wheel.clock.advance(ms=5_500)
    wheel.timers.run_due(wheel.clock.now_ms())
    assert wheel.delivered() == [(b"late", 5_500)]
    assert wheel.told[0][0].topic == SystemTopic.TIMER
    (delivered,) = (m for m in wheel.store if m.topic == "T")
    assert delivered.properties["TIMER_ENQUEUE_MS"] == str((1 << 63) - 1)
    wheel.save()
    again = wheel.after_kill()
    again.pass_to(60_000)
    assert again.delivered() == [(b"late", 5_500)]  # only once: the delivery is noted although there is no wheel yet


@pytest.mark.parametrize(
    ("properties", "out"),
    [
        ({"TIMER_DELAY_SEC": 5, "TIMER_DELAY_MS": 90_000, "TIMER_DELIVER_MS": 1}, 4_000),
        ({"TIMER_DELAY_MS": 5_500, "TIMER_DELIVER_MS": 1}, 5_000),
        ({"TIMER_DELIVER_MS": START_MS + 7_250}, 7_000),
        ({"TIMER_DELIVER_MS": START_MS + 7_000}, 6_000),
        ({"TIMER_DELIVER_MS": START_MS}, None),
        ({"TIMER_DELAY_SEC": 0}, None),
        ({"TIMER_DELAY_MS": -5}, None),
    ],
)
def test_the_property_that_wins(properties: dict[str, Any], out: int | None) -> None:
    wheel = Wheel()
    stored = wheel.store.message_at(wheel.put(**properties).physical_offset)
    assert stored is not None
    if out is None:
        assert (stored.topic, stored.queue_id) == ("T", 2)
        assert "TIMER_OUT_MS" not in stored.properties
    else:
        assert (stored.topic, stored.properties["TIMER_OUT_MS"]) == (SystemTopic.TIMER, str(START_MS + out))
        assert (stored.properties["REAL_TOPIC"], stored.properties["REAL_QID"]) == ("T", "2")


@pytest.mark.parametrize(
    "properties",
    [
        {"TIMER_DELAY_SEC": "abc"},
        {"TIMER_DELAY_SEC": ""},
        {"TIMER_DELAY_SEC": 10_001},
        {"TIMER_DELAY_SEC": 1 << 62},
        {"TIMER_DELIVER_MS": START_MS, "TIMER_DEL_UNIQKEY": "T+U"},
    ],
)
def test_refused_messages(properties: dict[str, Any]) -> None:
    wheel = Wheel()
    with pytest.raises(TimerRefusedError):
        wheel.put(**properties)
    assert wheel.store.log.end == 0


def test_impossible_topics_are_refused() -> None:
    message = Message("a/b", b"")
    message.properties["TIMER_DELAY_SEC"] = "5"
    with pytest.raises(MessageIllegalError, match="can't be the name of a folder"):
        put_timed(Wheel().timers, message)


def test_a_delay_level_takes_precedence() -> None:
    assert not is_timed({"DELAY": "1", "TIMER_DELAY_SEC": "5"})
    assert not is_timed({"TIMER_DELAY_SEC": "5", "TIMER_OUT_MS": "1"})
    assert is_timed({"DELAY": "0", "TIMER_DELAY_SEC": "5"})


def test_a_delivered_message_is_the_one_that_was_sent() -> None:
    wheel = Wheel()
    message = Message("T", b"body", tags="t", keys="k", flag=7, unique_key="U")
    message.properties["TIMER_DELAY_SEC"] = "3"
    put_timed(wheel.timers, message, 4, born_timestamp_ms=5, born_host=("10.0.0.1", 2), reconsume_times=2)
    wheel.pass_to(10_000)
    waited, real = wheel.store
    assert (real.topic, real.queue_id, real.body) == ("T", 4, b"body")
    for name in ("flag", "born_timestamp_ms", "born_host", "store_host", "sys_flag", "reconsume_times"):
        assert getattr(real, name) == getattr(waited, name)
    own = {"TIMER_ENQUEUE_MS": str(START_MS), "TIMER_DEQUEUE_MS": str(START_MS + 3_000)}
    assert real.properties == {**waited.properties, **own}
    assert real.properties_raw.endswith(b"\x02")


def test_messages_are_delivered_in_order_of_time() -> None:
    wheel = Wheel()
    seconds = [(number * 37) % 91 + 1 for number in range(200)]
    for number, second in enumerate(seconds):
        wheel.put(str(number).encode(), key=None, TIMER_DELAY_SEC=second)
    assert wheel.pass_to(100_000) is None
    expected = sorted((1000 * second, number) for number, second in enumerate(seconds))
    assert wheel.delivered() == [(str(number).encode(), due) for due, number in expected]
    assert wheel.runs == sorted({1000 * second for second in seconds})


@pytest.mark.slow
def test_a_thousand_messages_over_a_week() -> None:
    wheel = Wheel(
        TimerConfig(timer_max_delay_sec=7 * 86_400, timer_roll_window_slot=7 * 86_400), config=StoreConfig.tiny()
    )
    for number in range(1_000):
        wheel.put(str(number).encode(), TIMER_DELAY_SEC=1 + number * 600)
    wheel.pass_to(8 * 86_400_000)
    assert [at for _, at in wheel.delivered()] == [1000 + number * 600_000 for number in range(1_000)]


def test_many_new_messages_take_several_steps() -> None:
    wheel = Wheel(replace(TINY, most_at_once=32))
    for number in range(100):
        message = Message("T", b"%d" % number)
        message.properties["TIMER_DELAY_SEC"] = "5"
        put_timed(wheel.timers, message)
    now = wheel.clock.now_ms()
    turns = 1
    while wheel.timers.run_due(now) == now:
        turns += 1
    assert turns == 4
    wheel.pass_to(10_000)
    assert len(wheel.delivered()) == 100


# --- rolls


def test_messages_beyond_the_window_roll() -> None:
    wheel = Wheel()
    wheel.put(TIMER_DELAY_SEC=430)
    assert wheel.pass_to(500_000) is None
    assert wheel.delivered() == [(b"b", 430_000)]
    assert [m.properties["TIMER_ROLL_TIMES"] for m in wheel.rolled()] == ["1", "2", "3", "4"]
    assert {m.properties["TIMER_OUT_MS"] for m in wheel.rolled()} == {str(START_MS + 429_000)}
    assert wheel.runs == [101_000, 202_000, 303_000, 354_000, 430_000]  # the last roll is half the window


def test_a_deletion_rolls_with_its_message() -> None:
    wheel = Wheel()
    wheel.put(b"stays", key="S", TIMER_DELAY_SEC=250)
    wheel.put(b"gone", key="G", TIMER_DELAY_SEC=250)
    wheel.clock.advance(ms=3_000)
    wheel.put(b"delete", key="D", TIMER_DELIVER_MS=START_MS + 250_000, TIMER_DEL_UNIQKEY=delete_key("T", "G"))
    wheel.pass_to(300_000)
    assert wheel.delivered() == [(b"stays", 250_000)]


# --- deletions


@pytest.mark.parametrize(
    ("key", "deliver", "gone"),
    [
        (delete_key("T", "U"), 10_500, True),
        (delete_key("T", "U"), 10_001, True),  # in the same slot
        (delete_key("T", "U"), 9_500, False),  # in an earlier slot, which is empty when the message arrives
        (delete_key("T", "U"), 11_500, False),  # too late
        (delete_key("T", "V"), 10_500, False),
        ("U", 10_500, True),  # as brokers from 5.4 on write it
        ("T-U", 10_500, False),
    ],
)
@pytest.mark.parametrize("at", [0, 9_000])
def test_deletion(at: int, key: str, deliver: int, gone: bool) -> None:
    wheel = Wheel()
    wheel.put(TIMER_DELIVER_MS=START_MS + 10_500)
    wheel.pass_to(at)
    wheel.put(b"delete", key="D", TIMER_DELIVER_MS=START_MS + deliver, TIMER_DEL_UNIQKEY=key)
    wheel.pass_to(60_000)
    assert wheel.delivered() == ([] if gone else [(b"b", 11_000)])


def test_a_deletion_stored_before_its_message() -> None:
    wheel = Wheel()
    wheel.put(b"delete", key="D", TIMER_DELIVER_MS=START_MS + 10_500, TIMER_DEL_UNIQKEY="T+U")
    wheel.put(TIMER_DELIVER_MS=START_MS + 10_500)
    wheel.put(b"other", key=None, TIMER_DELIVER_MS=START_MS + 10_500)
    assert [slot.messages for _, slot in TimerWheel.read_slots(ROOT, wheel.files)] == [1]
    wheel.pass_to(60_000)
    assert wheel.delivered() == [(b"other", 11_000)]


def test_a_deletion_that_comes_too_late_does_nothing() -> None:
    wheel = Wheel()
    message = Message("T", b"delete")
    message.properties |= {"TIMER_DELAY_SEC": "2", "TIMER_DEL_UNIQKEY": "T+U"}
    put_timed(wheel.timers, message)
    wheel.clock.advance(ms=60_000)
    wheel.timers.run_due(wheel.clock.now_ms())
    assert wheel.delivered() == []


# --- files


def test_settings_of_a_row() -> None:
    row = {"type": "config", "version": "5.3.3", "timer_precision_ms": 500, "slots_total": 1000}
    assert TimerConfig.from_row(row) == TimerConfig(timer_precision_ms=500, slots_total=1000)
    assert TimerConfig.from_row({"commitlog_file_size": 5}) is None
    assert TimerConfig().window_slots == 172_800
    assert TimerConfig(timer_roll_window_slot=10**6).window_slots == 604_740


def test_settings_that_disagree_with_the_files() -> None:
    wheel = Wheel()
    wheel.put(TIMER_DELAY_SEC=5)
    wheel.save()
    wheel.store.close()
    assert TimerConfig.of_store(ROOT, wheel.files) == TimerConfig(timer_log_file_size=1024, slots_total=300)
    with pytest.raises(ConfigError, match="timer_log_file_size"):
        Wheel(TimerConfig(slots_total=300), files=wheel.files)
    with pytest.raises(CorruptionError):
        Wheel(TimerConfig(slots_total=301, timer_log_file_size=1024), files=died(wheel.files))


def test_another_precision() -> None:
    wheel = Wheel(TimerConfig(slots_total=300, timer_precision_ms=100, timer_log_file_size=1024))
    wheel.put(TIMER_DELAY_MS=1_230)
    wheel.put(TIMER_DELAY_MS=1_200)
    assert wheel.pass_to(5_000) is None
    assert [at for _, at in wheel.delivered()] == [1_200, 1_300]


def test_the_checkpoint_is_saved_after_a_while() -> None:
    wheel = Wheel(TimerConfig(slots_total=300, timer_log_file_size=1024, save_every_s=1))
    wheel.put(TIMER_DELAY_SEC=5)
    assert TimerCheckpoint.read(ROOT, wheel.files) is None
    assert wheel.pass_to(4_999) == 5_000
    checkpoint = TimerCheckpoint.read(ROOT, wheel.files)
    assert checkpoint is not None
    assert (checkpoint.queue_offset, checkpoint.log_position, checkpoint.version_counter) == (1, 52, 1)
    assert wheel.pass_to(100_000) is None
    assert wheel.runs == [1_000, 5_000, 6_000]
    checkpoint = TimerCheckpoint.read(ROOT, wheel.files)
    assert checkpoint is not None
    assert checkpoint.read_time_ms == START_MS + 6_000


def test_opening_again_changes_nothing() -> None:
    wheel = Wheel()
    for number in range(30):
        wheel.put(TIMER_DELAY_SEC=number + 1)
    wheel.pass_to(10_000)
    wheel.save()
    wheel.store.close()
    before = contents(wheel.files)
    again = Wheel(files=wheel.files, at_ms=START_MS + 10_500)
    again.store.close()
    timer = {name for name in before if name.startswith("timer") or name.endswith("timercheck")}
    assert {name: contents(again.files)[name] for name in timer} == {name: before[name] for name in timer}


@pytest.mark.parametrize("saved", [False, True])
def test_a_kill_loses_nothing_and_nothing_is_early(saved: bool) -> None:
    wheel = Wheel()
    for number in range(60):
        wheel.put(str(number).encode(), TIMER_DELAY_SEC=number % 30 + 1)
        if number == 30 and saved:
            wheel.save()
    wheel.pass_to(15_000)
    again = wheel.after_kill()
    again.pass_to(100_000)
    due = {str(number).encode(): (number % 30 + 1) * 1000 for number in range(60)}
    assert {body for body, _ in again.delivered()} == set(due)
    assert all(at >= due[body] for body, at in again.delivered())


def test_a_wheel_that_is_lost_is_rebuilt() -> None:
    wheel = Wheel()
    for number in range(40):
        wheel.put(str(number).encode(), TIMER_DELAY_SEC=number % 20 + 1)
    wheel.pass_to(5_000)
    wheel.save()
    slots = [slot for _, slot in TimerWheel.read_slots(ROOT, wheel.files) if slot.time * 1000 > START_MS + 4_999]
    files = died(wheel.files)
    files.delete(TimerWheel.path_in(ROOT))
    again = Wheel(files=files, at_ms=START_MS + 5_000)
    assert [slot for _, slot in TimerWheel.read_slots(ROOT, files)] == slots
    again.pass_to(60_000)
    assert len(again.delivered()) == 40


def test_units_behind_the_checkpoint_are_cut_and_made_again() -> None:
    wheel = Wheel()
    wheel.put(b"one", TIMER_DELAY_SEC=5)
    wheel.save()
    wheel.put(b"two", TIMER_DELAY_SEC=5)
    again = wheel.after_kill()
    log = TimerLog(ROOT, 1024, files=again.files, writable=False)
    assert len(list(log.items())) == 1
    again.pass_to(60_000)
    assert [body for body, _ in again.delivered()] == [b"one", b"two"]


def test_a_queue_offset_ahead_of_the_log_that_was_flushed() -> None:
    """RocketMQ leaves such a file when it is killed."""
    wheel = Wheel()
    wheel.put(b"one", TIMER_DELAY_SEC=5)
    wheel.save()
    wheel.put(b"two", TIMER_DELAY_SEC=5)
    files = died(wheel.files)
    checkpoint = TimerCheckpoint.read(ROOT, files)
    assert checkpoint is not None
    checkpoint.queue_offset = checkpoint.master_queue_offset = 2
    checkpoint.write(ROOT, files)
    again = Wheel(files=files)
    again.pass_to(60_000)
    assert [body for body, _ in again.delivered()] == [b"one", b"two"]


@pytest.mark.parametrize("topic", [SystemTopic.HALF, SystemTopic.SCHEDULE, SystemTopic.TIMER])
def test_nothing_is_delivered_to_a_topic_of_the_store_itself(topic: str, caplog: pytest.LogCaptureFixture) -> None:
    """There a message would be a prepared transaction that no producer sent, or wait for ever."""
    wheel = Wheel()
    stored = Message(SystemTopic.TIMER, b"from elsewhere")
    stored.properties |= {"REAL_TOPIC": topic, "REAL_QID": "0", "TIMER_OUT_MS": str(START_MS + 1000)}
    wheel.store.append(stored)
    wheel.pass_to(5000)
    assert [message.body for message in wheel.store] == [b"from elsewhere"]
    assert f"expected a topic for delivery, found {topic}" in caplog.text


def test_a_queue_offset_that_the_queue_does_not_have(caplog: pytest.LogCaptureFixture) -> None:
    wheel = Wheel()
    TimerCheckpoint(queue_offset=9, read_time_ms=START_MS).write(ROOT, wheel.files)
    again = wheel.after_kill()
    again.put(TIMER_DELAY_SEC=5)
    again.pass_to(60_000)
    assert "queue offset was 9" in caplog.text


def test_a_recovery_that_cuts_the_queue_skips_no_later_message() -> None:
    """A new message has the place that the timer has passed."""
    wheel = Wheel()
    place = wheel.put(b"cut", TIMER_DELAY_SEC=50).physical_offset
    wheel.files.open(f"{ROOT}/commitlog/{0:020d}", writable=True).buffer[place + 4 : place + 8] = b"torn"
    wheel.store.recover()
    wheel.timers.run_due(wheel.clock.now_ms())
    wheel.put(b"new", TIMER_DELAY_SEC=5)
    wheel.pass_to(20_000)
    assert b"new" in [body for body, _ in wheel.delivered()]


def test_a_checkpoint_of_another_length() -> None:
    wheel = Wheel()
    wheel.files.make_folder(f"{ROOT}/config")
    wheel.files.write(TimerCheckpoint.path_in(ROOT), b"short")
    with pytest.raises(CorruptionError, match="timercheck"):
        wheel.after_kill()


def test_chains_that_lead_nowhere_terminate(caplog: pytest.LogCaptureFixture) -> None:
    wheel = Wheel()
    for _ in range(3):
        wheel.put(TIMER_DELAY_SEC=5)
    log = wheel.timers._slots.log
    unit = log.unit(52)
    assert unit is not None
    end, log.end = log.end, 52
    log.append(unit._replace(previous=104))
    log.end = end
    wheel.pass_to(10_000)
    assert len(wheel.delivered()) == 2
    assert "which is not before it" in caplog.text


@many
@pytest.mark.parametrize("closed", [True, False], ids=["closed", "killed"])
@pytest.mark.parametrize("number", [0, 2, 5], ids=["delivered long ago", "the last delivered", "waiting"])
@pytest.mark.parametrize(
    ("at", "bit"),
    [(0, 20), (4, 9), (12, 1), (12, 2), (16, 20), (24, 15), (28, 2), (28, 40), (36, 3)],
    ids=["size", "previous", "magic", "deletes", "time", "delay", "place", "far place", "message size"],
)
def test_a_changed_bit_of_a_unit_delays_no_message(
    at: int, bit: int, number: int, closed: bool, tmp_path: Path
) -> None:
    """Each unit has a message in the timer's topic: count, place and time show what is wrong."""
    wheel = Wheel(folder=tmp_path)
    for second in (1, 2, 3, 10, 20, 20, 30):
        wheel.put(b"%d" % second, key=f"U{second}", TIMER_DELAY_SEC=second)
    wheel.pass_to(5000)
    wheel.save()
    wheel.store.close() if closed else wheel.store.abandon()
    size = 8 if at in (4, 16, 28) else 4
    place = 52 * number + at
    with (tmp_path / f"timerlog/{0:020d}").open("r+b") as file:
        file.seek(place)
        value = int.from_bytes(file.read(size)) ^ 1 << bit
        file.seek(place)
        file.write(value.to_bytes(size))
    if closed and (number == 5 or at in (0, 28, 36)):
        assert [damage.kind for damage in verify(tmp_path, SMALL).damage] == ["unit"]
    again = Wheel(folder=tmp_path, at_ms=START_MS + 5000)
    again.pass_to(60_000)
    delivered = [(int(body), at_ms // 1000) for body, at_ms in again.delivered()]
    assert sorted(delivered) == [(second, second) for second in (1, 2, 3, 10, 20, 20, 30)]


@many
@pytest.mark.parametrize("closed", [True, False], ids=["closed", "killed"])
@pytest.mark.parametrize("delay_s", [1, 14, 20, 99])
@pytest.mark.parametrize("rolled", [1, 3], ids=["alone in its slot", "last of its slot"])
def test_a_shrunk_delay_of_a_unit_that_rolls_delays_no_message(
    rolled: int, delay_s: int, closed: bool, tmp_path: Path
) -> None:
    """Its message does not say in which slot it waits for its roll, but the wheel does."""
    wheel = Wheel(folder=tmp_path)
    for number in range(rolled):
        wheel.put(b"%d" % number, key=f"U{number}", TIMER_DELAY_SEC=430)
    wheel.put(b"soon", key="soon", TIMER_DELAY_SEC=15)
    wheel.pass_to(20_000)
    wheel.save()
    wheel.store.close() if closed else wheel.store.abandon()
    with (tmp_path / f"timerlog/{0:020d}").open("r+b") as file:
        file.seek(52 * (rolled - 1) + 24)
        file.write((1000 * delay_s).to_bytes(4))
    if closed and delay_s < 19:
        assert [damage.kind for damage in verify(tmp_path, SMALL).damage] == ["unit"]
    again = Wheel(folder=tmp_path, at_ms=START_MS + 20_000)
    again.pass_to(500_000)
    assert again.delivered() == [(b"soon", 15_000), *((b"%d" % number, 430_000) for number in range(rolled))]


def test_a_file_of_the_timer_log_goes_with_its_messages() -> None:
    """As in 5.3.3, this happens once the commit log begins after every record that the file names."""
    wheel = Wheel()
    for number in range(200):
        wheel.put(str(number).encode(), TIMER_DELAY_SEC=5)
        wheel.pass_to(number * 1000)
        wheel.save()
    starts = [entry.name for entry in wheel.files.list(f"{ROOT}/timerlog")]
    assert len(starts) == 200 // 19 + 1
    wheel.pass_to(300_000)
    assert len(wheel.delivered()) == 200
    assert len(wheel.after_kill().delivered()) == 200
    wheel.store.log.delete_before(wheel.store.log.end // 4096 * 4096)
    wheel.put(b"last", TIMER_DELAY_SEC=5)
    wheel.save()
    assert len(wheel.files.list(f"{ROOT}/timerlog")) < len(starts) // 2


def test_units_and_blanks_are_read_back() -> None:
    files = MemoryFiles()
    files.make_folder(ROOT)
    log = TimerLog(ROOT, 52 * 3 + 20, files=files)
    unit = Unit(52, -1, 1, START_MS, 1000, 5, 91, -7, 0)
    positions = [log.append(unit._replace(physical_offset=number)) for number in range(7)]
    assert positions == [0, 52, 104, 176, 228, 280, 352]
    found = list(log.items())
    assert [position for position, item in found if isinstance(item, Unit)] == positions
    assert [(position, item) for position, item in found if isinstance(item, int)] == [(156, 20), (332, 20)]
    assert [at for at, block in log.blocks(log.end) for at in range(at, at + 52 * len(block), 52)] == positions
    assert not log.resume(log.end)
    assert log.resume(228)
    assert [position for position, _ in log.items()] == [0, 52, 104, 156, 176]
    assert log.unit(10_000) is None


# --- errors and clocks


def test_a_clock_that_is_set_back_delivers_at_the_new_time() -> None:
    wheel = Wheel()
    wheel.put(b"before", TIMER_DELAY_SEC=20)
    wheel.pass_to(10_000)
    wheel.clock = wheel.store.clock = ManualClock(START_MS - 60_000)
    wheel.store.appender.now_ms = wheel.clock.now_ms
    wheel.put(b"after", TIMER_DELAY_SEC=5)
    wheel.pass_to(-55_001)
    assert wheel.delivered() == []
    wheel.pass_to(60_000)
    assert wheel.delivered() == [(b"after", -55_000), (b"before", 20_000)]


def test_a_message_that_rolls_after_the_clock_was_set_back_is_sound() -> None:
    """The slot of its roll is at a time before its send."""
    wheel = Wheel()
    message = Message("T", b"b")
    message.properties["TIMER_DELAY_SEC"] = "430"
    put_timed(wheel.timers, message)
    wheel.store.close()
    wheel = Wheel(files=wheel.files, at_ms=START_MS - 300_000)
    wheel.timers.run_due(wheel.clock.now_ms())
    wheel.save()
    assert [message.due_ms for message in pending_messages(wheel.store)] == [START_MS + 430_000]


def test_a_clock_that_is_set_back_while_a_slot_is_emptied() -> None:
    wheel = Wheel(replace(TINY, most_at_once=2))
    for number in range(5):
        wheel.put(str(number).encode(), TIMER_DELAY_SEC=5)
    wheel.clock.advance(ms=5_000)
    assert wheel.timers.run_due(wheel.clock.now_ms()) == START_MS + 5_000
    wheel.clock = wheel.store.clock = ManualClock(START_MS)
    wheel.store.appender.now_ms = wheel.clock.now_ms
    wheel.put(b"late", TIMER_DELAY_SEC=5)
    wheel.pass_to(60_000)
    assert sorted(body for body, _ in wheel.delivered()) == [b"0", b"1", b"2", b"3", b"4", b"late"]
    assert wheel.delivered()[-1] == (b"late", 5_000)
