"""Saved progress never passes messages that a crash of the machine lost, whichever way the store recovers."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from librmq.broker import Broker, BrokerConfig
from librmq.cli import main
from librmq.client.producer import Producer
from librmq.config import StoreConfig
from librmq.consumer import PushConsumer
from librmq.files import MemoryFiles
from librmq.message import Message
from librmq.message.properties import PropertyName
from librmq.message.topics import SystemTopic
from librmq.protocol import Heartbeat, SendMessage, UpdateOffset
from librmq.runtime import ManualRunner
from librmq.scheduling.timer_config import TimerConfig
from tests.broker.parties import HOST, Listening
from tests.file_seams import CrashImages, RecordingFiles

SIZES = StoreConfig.tiny(commitlog_file_size=1 << 20)
TIMED = BrokerConfig(timers=TimerConfig(slots_total=1000, timer_log_file_size=1 << 16))


def opened(path: Path, runner: ManualRunner, settings: BrokerConfig | None = None) -> Broker:
    return Broker.open(path, settings, runner=runner, store_config=SIZES)


def lose_from(path: Path, physical_offset: int) -> None:
    """Leave a store as after a crash of the machine that lost the end of the log."""
    log = min((path / "commitlog").iterdir())
    data = log.read_bytes()
    log.write_bytes(data[:physical_offset] + bytes(len(data) - physical_offset))
    (path / "abort").touch()
    (path / "librmq" / "closed.json").unlink()


def recover(path: Path) -> None:
    assert main(["recover", str(path)]) == 0


def consume(broker: Broker, runner: ManualRunner, seen: list[bytes]) -> None:
    consumer = PushConsumer(broker, "g")
    consumer.subscribe("T")(lambda message: seen.append(message.body))
    consumer.start()
    runner.advance(60_000)
    consumer.shutdown()


@pytest.mark.parametrize("recovers_first", [False, True], ids=["broker", "recover"])
def test_messages_after_a_loss_are_all_consumed(tmp_path: Path, recovers_first: bool) -> None:
    runner, path, seen = ManualRunner(), tmp_path / "broker", list[bytes]()
    with opened(path, runner) as broker:
        broker.create_topic("T", 1)
        for number in range(100):
            Producer(broker, "p").send("T", str(number).encode())
        places = [message.physical_offset for message in broker.messages("T")]
        consume(broker, runner, seen)
        assert len(seen) == 100
    lose_from(path, places[50])
    if recovers_first:
        recover(path)
    seen.clear()
    with opened(path, runner) as broker:
        for number in range(80):
            Producer(broker, "p").send("T", f"new {number}".encode())
        consume(broker, runner, seen)
    assert seen == [f"new {number}".encode() for number in range(80)]


def half(number: int) -> Message:
    message = Message("T", str(number).encode(), unique_key=f"{number:032X}")
    message.properties |= {PropertyName.TRANSACTION_PREPARED: "true", PropertyName.PRODUCER_GROUP: "p"}
    return message


def prepare(broker: Broker, runner: ManualRunner, count: int) -> list[int]:
    call = broker.call
    return [call(SendMessage("p", half(n), 0, runner.now_ms(), HOST)).physical_offset for n in range(count)]


@pytest.mark.parametrize("recovers_first", [False, True], ids=["broker", "recover"])
def test_halves_after_a_loss_are_all_asked_about(tmp_path: Path, recovers_first: bool) -> None:
    runner, path, producer = ManualRunner(), tmp_path / "broker", Listening()
    with opened(path, runner) as broker:
        places = prepare(broker, runner, 100)
        broker.call(UpdateOffset("CID_RMQ_SYS_TRANS", SystemTopic.HALF, 0, 100))
    lose_from(path, places[50])
    if recovers_first:
        recover(path)
    with opened(path, runner) as broker:
        broker.call(Heartbeat("producer", producer, frozenset(("p",)), ()))
        prepare(broker, runner, 40)
        runner.advance(130_000)
    asked: list[Any] = producer.heard
    assert len({question.message.body for question in asked}) == 40


@pytest.mark.parametrize("recovers_first", [False, True], ids=["broker", "recover"])
def test_timed_messages_after_a_loss_come_in_their_time(tmp_path: Path, recovers_first: bool) -> None:
    runner, path = ManualRunner(), tmp_path / "broker"

    def send(broker: Broker, body: str, seconds: int) -> int:
        message = Message("T", body.encode())
        message.properties["TIMER_DELAY_SEC"] = str(seconds)
        return broker.call(SendMessage("p", message, 0, runner.now_ms(), HOST)).physical_offset

    with opened(path, runner, TIMED) as broker:
        places = [send(broker, f"old {number}", 100) for number in range(20)]
        runner.advance(3_000)
    lose_from(path, places[10])
    if recovers_first:
        recover(path)
    with opened(path, runner, TIMED) as broker:
        for number in range(15):
            send(broker, f"new {number}", 200)
        runner.advance(120_000)
        assert [m.body.decode() for m in broker.messages("T")] == [f"old {number}" for number in range(10)]
        runner.advance(120_000)
        assert len(list(broker.messages("T"))) == 25


@pytest.mark.slow
def test_a_retry_copy_is_durable_before_progress_passes_it() -> None:
    """Cut the power right after each save of the progress; unconsumed messages are delivered again."""
    files, runner = RecordingFiles(), ManualRunner()
    with Broker.open("/b", files=files, runner=runner, store_config=StoreConfig.tiny()) as broker:
        broker.create_topic("T", 1)
        consumer = PushConsumer(broker, "g")

        @consumer.subscribe("T")
        def fail(message: object) -> None:
            raise ValueError("fails")

        consumer.start()
        for number in range(6):
            Producer(broker, "p").send("T", str(number).encode())
            runner.advance(6_000)
        consumer.shutdown()
    saves = [
        at for at, event in enumerate(files.trace, 1) if event.call == "replace" and "consumerOffset" in event.path
    ]
    assert len(saves) >= 4
    images = CrashImages(files.trace)
    for crash_point, seed in itertools.product(saves, range(8)):
        after = MemoryFiles()
        images.image(seed, crash_point).write_to(after)
        with Broker.open("/b", files=after, runner=ManualRunner(), store_config=StoreConfig.tiny()) as again:
            passed = again.consumer_offset("g", "T") or 0
            waiting = {m.body for topic in ("SCHEDULE_TOPIC_XXXX", "%RETRY%g") for m in again.messages(topic)}
            assert waiting >= {str(number).encode() for number in range(passed)}
