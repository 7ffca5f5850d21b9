"""What delay levels and timers have in common: many due messages, undeliverable ones, full disks, settings."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import pytest

from librmq.errors import ConfigError, DiskFullError, FlushFailedError
from librmq.message.topics import SystemTopic
from librmq.scheduling.timer_config import TimerConfig
from tests.bytime import NOW, TINY, ByTime, Waiting, Wheel
from tests.stores import START_MS

BOTH = pytest.mark.parametrize("part", [Waiting, Wheel])


def with_settings(part: type[ByTime], **changes: Any) -> ByTime:
    if part is Wheel:
        return Wheel(dataclasses.replace(TINY, **changes))
    return Waiting(settings=dataclasses.replace(NOW, **changes))


@BOTH
def test_many_at_one_time_take_several_turns(part: type[ByTime]) -> None:
    waiting = with_settings(part, most_at_once=10)
    for number in range(25):
        waiting.put_soon(b"%d" % number)
    waiting.pass_to(999)
    waiting.runs.clear()
    waiting.pass_to(1_000)
    assert waiting.runs == [1_000] * 3
    assert [body for body, _ in waiting.delivered()] == [b"%d" % number for number in range(25)]


@BOTH
@pytest.mark.parametrize("now_ms", ["x", None, 1.5, []])
def test_a_step_runs_at_a_whole_number(part: type[ByTime], now_ms: Any) -> None:
    with pytest.raises(TypeError, match="now_ms: expected milliseconds since 1970, a whole number, found"):
        part().run_due(now_ms)


PLACE = {"REAL_TOPIC": "T", "REAL_QID": "0"}
NOW_OUT = {"TIMER_OUT_MS": str(START_MS)}


@pytest.mark.parametrize(
    ("part", "properties", "said"),
    [
        (
            Waiting,
            {"REAL_TOPIC": SystemTopic.HALF, "REAL_QID": "0"},
            "expected a topic for delivery, found RMQ_SYS_TRANS_HALF_TOPIC",
        ),
        (
            Waiting,
            {"REAL_TOPIC": SystemTopic.SCHEDULE, "REAL_QID": "0"},
            "expected a topic for delivery, found SCHEDULE",
        ),
        (Waiting, {"REAL_TOPIC": "T"}, "REAL_QID: expected a queue id, found None"),
        (Waiting, {"REAL_TOPIC": "T", "REAL_QID": "-1"}, "queue id"),
        (Waiting, {"REAL_QID": "0"}, "topic: expected a name"),
        (Waiting, {"REAL_TOPIC": "a/b", "REAL_QID": "0"}, "can't be the name of a folder"),
        (Wheel, PLACE, "TIMER_OUT_MS: expected a time"),
        (Wheel, PLACE | {"TIMER_OUT_MS": "x"}, "TIMER_OUT_MS: expected a time"),
        (Wheel, {"REAL_TOPIC": "T"} | NOW_OUT, "queue id"),
        (Wheel, {"REAL_QID": "0"} | NOW_OUT, "topic: expected a name"),
        (Wheel, PLACE | {"REAL_TOPIC": SystemTopic.TIMER} | NOW_OUT, "expected a topic for delivery"),
        (
            Wheel,
            PLACE | {"REAL_TOPIC": SystemTopic.HALF, "TIMER_OUT_MS": str(START_MS - 5_000)},
            "expected a topic for delivery",
        ),
    ],
)
def test_undeliverable_messages_are_dropped_with_an_error(
    part: type[ByTime], properties: dict[str, str], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    waiting = part()
    waiting.put_raw(**properties)
    waiting.put_soon()
    waiting.pass_to(10_000)
    assert waiting.delivered() == [(b"b", 1_000)]
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert "queue offset 0, physical offset 0 is dropped: " in record.message
    assert said in record.message


@BOTH
def test_a_damaged_record_is_skipped(part: type[ByTime], caplog: pytest.LogCaptureFixture) -> None:
    waiting = part()
    waiting.put_soon()
    waiting.put_soon(b"sound")
    waiting.store.flush()
    waiting.store.log.patch(4, b"oops")
    waiting.pass_to(10_000)
    assert caplog.records[0].levelno == logging.ERROR
    assert [message.body for message in waiting.store.messages("T", 2)] == [b"sound"]


@BOTH
def test_messages_deleted_by_retention_are_skipped(part: type[ByTime]) -> None:
    waiting = part()
    for _ in range(40):
        waiting.put_soon(bytes(100))
    waiting.store.flush()
    waiting.store.log.delete_before(4096)
    waiting.pass_to(20_000)
    gone = waiting.told[0][0].queue_offset
    assert 0 < gone < 40
    assert [message.queue_offset for message, _ in waiting.told] == list(range(gone, 40))


def failing_once(error: Exception, call: Callable[..., Any]) -> Callable[..., Any]:
    left = [error]

    def fail(*args: Any, **fields: Any) -> Any:
        if left:
            raise left.pop()
        return call(*args, **fields)

    return fail


@BOTH
def test_a_full_disk_is_retried_later(
    part: type[ByTime], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    waiting = part()
    waiting.put_soon()
    writer = getattr(waiting.store, part.appends[0])
    monkeypatch.setattr(writer, part.appends[1], failing_once(DiskFullError("full"), getattr(writer, part.appends[1])))
    waiting.pass_to(60_000)
    assert waiting.delivered() == [(b"b", 11_000)]
    assert caplog.text.count("next try in 10000 ms: full") == 1


@BOTH
def test_a_failed_flush_is_reported(part: type[ByTime], monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = with_settings(part, save_every_s=0)
    monkeypatch.setattr(waiting.store, "flush", failing_once(FlushFailedError(OSError()), waiting.store.flush))
    with pytest.raises(FlushFailedError):  # noqa: PT012 (timers save when a message is put)
        waiting.put_soon()
        waiting.pass_to(1_000)


def test_a_window_that_is_longer_than_a_unit_can_express_is_refused() -> None:
    with pytest.raises(ConfigError, match="window"):
        TimerConfig(timer_precision_ms=86_400_000)
