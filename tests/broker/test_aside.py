"""Saving progress waits for the disk in a turn of its own, while other turns continue."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from librmq import protocol
from librmq.broker import Broker
from librmq.clock import ManualClock
from librmq.config import StoreConfig
from librmq.consumer import PushConsumer
from librmq.errors import FlushFailedError, StoreIOError
from librmq.files import MemoryFiles
from librmq.files.interface import file_size
from librmq.message import Message
from librmq.message.topics import SystemTopic
from librmq.runtime import ManualRunner
from librmq.runtime.runner import Turn
from librmq.scheduling.half_messages import CHECK_GROUP
from librmq.scheduling.relay import send_at
from librmq.scheduling.timer_config import TimerConfig
from librmq.scheduling.waiting import HOP_GROUP
from librmq.store.format.broker_tables import BrokerTables
from librmq.store.format.timerfiles import TimerCheckpoint, TimerLog
from tests.broker.parties import HOST, Listening, opened, send
from tests.file_seams import GatedFiles

WAIT_S = 30.0
WHEEL = TimerConfig(slots_total=86_400, timer_log_file_size=1024)


class Moving(ManualClock):
    """A manual clock that librmq treats like one that advances by itself, as it does with threads."""

    moves_by_itself = True

    def wait(self, event: threading.Event, seconds: float | None) -> bool:
        return event.wait(WAIT_S)


class Holding(ManualRunner):
    """A manual runner that delays work whose label contains ``held``, as a slow disk would."""

    held = ""

    def __init__(self) -> None:
        super().__init__(Moving())

    def _take_turns(self, until_ms: int) -> None:
        self._take_picked_turns(until_ms)

    def pick(self, options: Iterator[Turn]) -> Turn | None:
        return next((turn for turn in options if not self.held or self.held not in turn.label), None)

    def release(self) -> None:
        self.held = ""
        self.advance()


@pytest.fixture
def runner() -> Holding:
    return Holding()


@pytest.fixture
def files() -> MemoryFiles:
    return MemoryFiles()


def timed(broker: Broker) -> None:
    message = Message("T", b"timed")
    message.properties["TIMER_DELAY_SEC"] = "3600"
    broker.call(protocol.SendMessage("p", message, 0, broker.runner.now_ms(), HOST))


def carried(broker: Broker) -> None:
    message = send_at(Message("T", b"carried"), broker.runner.now_ms() + 36_000_000)
    broker.call(protocol.SendMessage("p", message, 0, broker.runner.now_ms(), HOST))


def prepare(broker: Broker, number: int = 0) -> tuple[int, int]:
    message = Message("T", b"%d" % number, unique_key=f"U{number}")
    message.properties |= {"TRAN_MSG": "true", "PGROUP": "p"}
    sent = broker.call(protocol.SendMessage("p", message, 0, broker.runner.now_ms(), HOST, 4))
    return sent.queue_offset, sent.physical_offset


def timer_checkpoint(files: MemoryFiles) -> int:
    found = TimerCheckpoint.read("/b", files)
    return 0 if found is None else found.queue_offset


@dataclass(frozen=True)
class Part:
    """A part of a broker that saves its progress: how to advance it by one, and how to read what was saved."""

    label: str
    settings: dict[str, Any]
    move: Callable[[Broker], object]
    saved: Callable[[Broker, MemoryFiles], int | None]


PARTS = [
    Part("saves its timers", {"timers": WHEEL}, timed, lambda _, files: timer_checkpoint(files)),
    Part(
        "flushes for its hops",
        {"hops": True},
        carried,
        lambda broker, _: broker.consumer_offset(HOP_GROUP, SystemTopic.HOP),
    ),
    Part(
        "flushes for its check",
        {},
        lambda broker: broker.call(
            protocol.EndTransaction("p", protocol.TransactionState.ROLLBACK, *prepare(broker), "")
        ),
        lambda broker, _: broker.consumer_offset(CHECK_GROUP, SystemTopic.HALF),
    ),
    Part(
        "flushes for its delays",
        {},
        lambda broker: send(broker, "T", delay_level=1),
        lambda _, files: BrokerTables.open("/b/config", files=files).delay_offset(1),
    ),
]
EACH_PART = pytest.mark.parametrize("part", PARTS, ids=lambda part: part.label.split()[-1])


@EACH_PART
def test_progress_is_saved_while_others_continue(part: Part, runner: Holding, files: MemoryFiles) -> None:
    with opened(files, runner, **part.settings) as broker:
        runner.held = part.label
        part.move(broker)
        runner.advance(120_000)
        assert not part.saved(broker, files)
        part.move(broker)
        runner.advance(120_000)
        assert [work.label for work in runner.ready] == [f"broker-a {part.label}"]  # one save at a time
        runner.release()
        assert part.saved(broker, files) == 1
        runner.advance(120_000)
        assert part.saved(broker, files) == 2


@EACH_PART
@pytest.mark.parametrize("lasts", [False, True])
def test_a_failed_save_is_retried_unless_it_lasts(
    part: Part, lasts: bool, runner: Holding, files: MemoryFiles, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(files, runner, **part.settings) as broker:
        error = OSError(errno.EIO, "no")
        failures: list[Exception] = [FlushFailedError(error) if lasts else StoreIOError("flush", "commitlog", error)]
        flush = broker.store.flush

        def fails_once() -> int:
            if failures:
                raise failures.pop()
            return flush()

        broker.store.flush = fails_once  # type: ignore[method-assign]
        part.move(broker)
        runner.advance(200_000)
        assert not failures
        assert bool(part.saved(broker, files)) != lasts
        said = "saving fails: a flush has failed" if lasts else "saving fails; next try in"
        assert caplog.text.count(said) == 1


@EACH_PART
@pytest.mark.parametrize("end", [Broker.close, Broker.abandon])
def test_a_save_overtaken_by_the_end_writes_nothing(
    part: Part, end: Callable[[Broker], None], runner: Holding, files: MemoryFiles
) -> None:
    """The files may belong to another broker by then, and `close` has already saved everything."""
    broker = opened(files, runner, **part.settings)
    runner.held = part.label
    part.move(broker)
    runner.advance(120_000)
    part.move(broker)
    runner.advance(120_000)
    end(broker)
    before = {entry.name: files.read(f"/b/config/{entry.name}") for entry in files.list("/b/config")}
    runner.release()
    assert before == {entry.name: files.read(f"/b/config/{entry.name}") for entry in files.list("/b/config")}
    if end is Broker.close:
        with opened(files, ManualRunner(), **part.settings) as again:
            assert part.saved(again, files) == (1 if "check" in part.label else 2)  # the check began no new pass


def test_a_timer_log_that_cannot_be_trimmed_is_so_later(
    runner: Holding, files: MemoryFiles, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log is trimmed after a checkpoint was written, and a failed trim is repeated."""
    trim, failures = TimerLog.trim, [1, 2]

    def fails_at_first(log: TimerLog, *arguments: Any) -> None:
        if failures:
            failures.pop()
            raise StoreIOError("delete", "timerlog", OSError(errno.EACCES, "no"))
        trim(log, *arguments)

    monkeypatch.setattr(TimerLog, "trim", fails_at_first)
    with opened(files, runner, timers=WHEEL) as broker:
        timed(broker)
        runner.advance(120_000)
    assert caplog.text.count("the timer's progress: saving fails; next try in") == 1
    assert not failures


def test_a_closed_broker_saves_as_much_as_possible() -> None:
    """If one part cannot be saved, the others still are."""

    class Refusing(MemoryFiles):
        refuses = False

        def write(self, path: str, data: bytes | Iterable[bytes]) -> None:
            if self.refuses and path.endswith("timercheck"):
                raise StoreIOError("write", "timercheck", OSError(errno.ENOSPC, "full"))
            super().write(path, data)

    files, runner = Refusing(), ManualRunner()
    broker = opened(files, runner, timers=WHEEL)
    send(broker, "T")
    timed(broker)
    runner.advance(1)
    broker.call(protocol.UpdateOffset("G", "T", 0, 1))
    files.refuses = True
    with pytest.raises(StoreIOError):
        broker.close()
    files.refuses = False
    with opened(files, runner, timers=WHEEL) as again:
        assert again.consumer_offset("G", "T") == 1


def test_nothing_is_delivered_twice_while_a_check_is_noted(runner: Holding, files: MemoryFiles) -> None:
    """Halves that a check has copied count as handled even before its progress is saved."""
    with opened(files, runner) as broker:
        broker.call(protocol.Heartbeat("producer", Listening(), frozenset({"p"}), ()))
        runner.held = "flushes for its check"
        half = prepare(broker)
        runner.advance(120_000)
        assert broker.store.queue_range(SystemTopic.HALF, 0)[1] == 2  # the check has copied it
        for _ in range(2):
            broker.call(protocol.EndTransaction("p", protocol.TransactionState.COMMIT, *half, ""))
        assert [message.body for message in broker.messages("T")] == [b"0"]
        assert broker.store.queue_range(SystemTopic.OP, 0)[1] == 1  # for the copy
        runner.release()
        runner.advance(120_000)
        assert broker.consumer_offset(CHECK_GROUP, SystemTopic.HALF) == 2


def test_broadcast_progress_is_written_while_others_continue(
    runner: Holding, files: MemoryFiles, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(files, runner) as broker:
        broker.create_topic("T", 1)
        seen: list[int] = []
        consumer = PushConsumer(
            broker,
            "G",
            instance_name="one",
            model=protocol.MessageModel.BROADCASTING,
            consume_from=protocol.ConsumeFrom.FIRST,
            offsets_folder="/offsets",
            files=files,
        )
        consumer.subscribe("T", lambda message: seen.append(message.queue_offset))
        consumer.start()
        path = f"/offsets/{consumer.client.client_id}/G/offsets.json"
        runner.held = "writes progress"
        for _ in range(2):
            send(broker, "T")
            runner.advance(20_000)
        assert seen == [0, 1]
        assert len(runner.ready) == 1  # one save at a time
        assert file_size(files, path) is None
        runner.release()
        assert b":1" in files.read(path)
        runner.advance(20_000)
        assert b":2" in files.read(path)
        send(broker, "T")
        with monkeypatch.context() as patched:
            patched.setattr(files, "write", refuses)
            runner.advance(20_000)
        assert b":2" in files.read(path)
        assert "offsets.json: saving fails; next try in 2000 ms: " in caplog.text
        consumer.shutdown()
        assert b":3" in files.read(path)


def refuses(path: str, data: bytes) -> None:
    raise StoreIOError("write", path, OSError(errno.ENOSPC, "full"))


def test_ends_of_transactions_share_a_flush() -> None:
    """With sync durability, the end of a transaction waits for the device, but other ends do not wait for it."""
    files = GatedFiles()
    with Broker.open("/b", files=files, store_config=StoreConfig.tiny(durability="sync")) as broker:
        halves = [prepare(broker, number) for number in range(3)]
        files.come.clear()
        files.gate.clear()
        requests = [protocol.EndTransaction("p", protocol.TransactionState.COMMIT, *half, "") for half in halves]
        ending = [threading.Thread(target=broker.call, args=(one,)) for one in requests]
        for thread in ending:
            thread.start()
        assert files.come.wait(WAIT_S)
        while len(list(broker.messages("T"))) < 3:  # all three are written, though the first flush still waits
            assert broker.runner.lock.acquire(timeout=WAIT_S)
            broker.runner.lock.release()
        assert all(thread.is_alive() for thread in ending)
        files.gate.set()
        for thread in ending:
            thread.join(WAIT_S)
            assert not thread.is_alive()
