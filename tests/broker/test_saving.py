"""Tables are written without the runner's lock, the latest version wins, and changes take effect immediately."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from librmq.broker import Broker
from librmq.broker._offsets import TableWriter
from librmq.client.producer import Producer
from librmq.errors import BrokerError, BrokerUnreachableError, StoreClosedError, StoreIOError
from librmq.files._disk import DiskFiles
from librmq.files._memory import MemoryFiles
from librmq.files.interface import file_size
from librmq.message.message import Message
from librmq.protocol import LOCAL_HOST, PullMessage, SendMessage, UpdateOffset
from librmq.runtime import ManualRunner
from librmq.store.format.broker_tables import BrokerTables
from tests.file_seams import FailingFiles

WAIT_S = 30.0


class Gated(DiskFiles):
    """A disk that writes a small file when the test lets it."""

    def __init__(self) -> None:
        self.begun, self.may = threading.Event(), threading.Event()
        self.may.set()
        self.failure: OSError | None = None

    def write(self, path: str, data: bytes | Iterable[bytes]) -> None:
        self.begun.set()
        assert self.may.wait(WAIT_S)
        if self.failure is not None:
            raise StoreIOError("write", path, self.failure)
        super().write(path, data)


@pytest.fixture
def disk() -> Gated:
    return Gated()


@pytest.fixture
def broker(tmp_path: Path, disk: Gated) -> Iterator[Broker]:
    with Broker.open(tmp_path / "broker", files=disk) as opened:
        yield opened


def stored(broker: Broker) -> BrokerTables:
    return BrokerTables.open(f"{broker.store.path}/config")


def test_only_changes_of_topics_wait_for_the_disk(broker: Broker, disk: Gated) -> None:
    disk.begun.clear()
    disk.may.clear()
    making = threading.Thread(target=broker.create_topic, args=("T", 3))
    making.start()
    assert disk.begun.wait(WAIT_S)
    assert broker.runner.lock.acquire(timeout=WAIT_S)
    broker.runner.lock.release()
    assert broker.topics()["T"].read_queues == 3  # other requests see it
    assert making.is_alive()
    assert "T" not in stored(broker).topics.rows
    disk.may.set()
    making.join(WAIT_S)
    assert stored(broker).topics.rows["T"]["readQueueNums"] == 3


def test_a_topic_is_durable_before_its_first_message(broker: Broker, disk: Gated) -> None:
    disk.begun.clear()
    disk.may.clear()
    producer = Producer(broker, "writers").start()
    sending = threading.Thread(target=producer.send, args=(Message("T", b"first"),), kwargs={"timeout": WAIT_S})
    sending.start()
    assert disk.begun.wait(WAIT_S)
    assert broker.store.log.end == 0
    disk.may.set()
    sending.join(WAIT_S)
    assert [message.body for message in broker.messages("T")] == [b"first"]
    assert "T" in stored(broker).topics.rows


def test_a_refused_write_is_logged_and_repeated_later(broker: Broker, disk: Gated) -> None:
    disk.failure = OSError(errno.ENOSPC, "no space left")
    with pytest.raises(BrokerError, match="no space left"):
        broker.create_topic("T", 3)
    disk.failure = None
    broker.create_topic("U", 3)
    assert {"T", "U"} <= set(stored(broker).topics.rows)


def test_close_writes_unsaved_tables(tmp_path: Path, disk: Gated) -> None:
    broker = Broker.open(tmp_path / "broker", files=disk)
    disk.failure = OSError(errno.EIO, "broken")
    with pytest.raises(BrokerError, match="broken"):
        broker.create_topic("T", 3)
    disk.failure = None
    broker.close()
    assert "T" in stored(broker).topics.rows


def test_nothing_is_written_after_a_broker_was_abandoned(tmp_path: Path, disk: Gated) -> None:
    broker = Broker.open(tmp_path / "broker", files=disk)
    disk.failure = OSError(errno.EIO, "broken")
    with pytest.raises(BrokerError, match="broken"):
        broker.create_topic("T", 3)
    broker.abandon()
    disk.failure = None
    with pytest.raises(StoreClosedError):
        broker._context.writing.write()
    assert "T" not in stored(broker).topics.rows


def test_a_second_send_waits_for_the_topic_of_the_first(broker: Broker, disk: Gated) -> None:
    producers = [Producer(broker, f"writers-{number}").start() for number in range(2)]
    disk.begun.clear()
    disk.may.clear()
    sending = [
        threading.Thread(target=producer.send, args=(Message("T", b"first"),), kwargs={"timeout": WAIT_S})
        for producer in producers
    ]
    sending[0].start()
    assert disk.begun.wait(WAIT_S)
    asked = threading.Event()
    write = broker._context.writing.write

    def told() -> None:
        asked.set()
        write()

    broker._sending._write_tables = told
    sending[1].start()
    assert asked.wait(WAIT_S)
    assert broker.store.log.end == 0
    disk.may.set()
    for one in sending:
        one.join(WAIT_S)
    assert len(list(broker.messages("T"))) == 2


def test_no_batch_waits_for_progress_to_be_written(broker: Broker, disk: Gated) -> None:
    broker.create_topic("T", 1)
    producer = Producer(broker, "writers").start()
    producer.send("T", b"first")
    with broker.runner.lock:
        disk.begun.clear()
        disk.may.clear()
        broker.call(UpdateOffset("g", "T", 0, 1))
        broker._context.offsets.saving.save()
    assert disk.begun.wait(WAIT_S)
    sending = threading.Thread(target=producer.send_batch, args=([Message("T", b"second")],), daemon=True)
    sending.start()
    sending.join(WAIT_S)
    assert not sending.is_alive()
    disk.may.set()
    assert len(list(broker.messages("T"))) == 2


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("end", [Broker.close, Broker.abandon])
def test_calls_after_the_end_change_no_table(tmp_path: Path, end: Callable[[Broker], None], by_hand: bool) -> None:
    broker = Broker.open(tmp_path / "broker", runner=ManualRunner() if by_hand else None)
    broker.create_topic("T", 3)
    end(broker)
    with Broker.open(tmp_path / "broker") as again:
        again.create_topic("U", 3)
        with pytest.raises(BrokerUnreachableError):
            broker.call(SendMessage("writers", Message("V", b"late"), 0, 0, LOCAL_HOST))
        with pytest.raises(BrokerUnreachableError):
            broker.call(PullMessage("late", "late", "T", 0, 0))
        assert {"T", "U"} <= set(stored(again).topics.rows)
        assert "V" not in stored(again).topics.rows
        assert "late" not in stored(again).groups.rows


def test_a_change_overtaken_by_the_end_is_not_called_durable(tmp_path: Path, disk: Gated) -> None:
    """A change is not reported as durable if the broker ends before it is written."""
    broker = Broker.open(tmp_path / "broker", files=disk)
    held = threading.Event()
    write = broker._context.writing.write

    def late() -> None:
        held.set()
        assert disk.begun.wait(WAIT_S)
        write()

    broker._context.writing.write = late  # type: ignore[method-assign]
    failures: list[BaseException] = []

    def make() -> None:
        try:
            broker.create_topic("T", 3)
        except BrokerUnreachableError as error:
            failures.append(error)

    disk.begun.clear()
    making = threading.Thread(target=make)
    making.start()
    assert held.wait(WAIT_S)
    broker._context.writing.end_writing("was abandoned")
    disk.begun.set()
    making.join(WAIT_S)
    assert "was abandoned" in str(failures)
    broker.abandon()


class Turns:
    """The tables of a broker in memory; the test runs the turns that write them."""

    def __init__(self) -> None:
        self.files = FailingFiles(MemoryFiles())
        self.tables = BrokerTables.open("/config", files=self.files)
        self.now = 0
        self.woken = 0
        self.waiting: list[tuple[Callable[[], object], Callable[[Exception | None], int | None]]] = []
        self.writing = TableWriter(lambda: None, lambda: self.now, self.wake, lambda *turn: self.waiting.append(turn))

    def wake(self) -> None:
        self.woken += 1

    def set(self, queues: int) -> None:
        self.tables.set_topic("T", read_queues=queues, write_queues=queues, permission=6)
        self.writing.save(self.tables.topics, queues)

    def write_aside(self, now: int) -> int | None:
        """Run the step and the turn that it submits; return when the step is due again."""
        self.now = now
        assert self.writing.saver.run_due(now) is None
        wait, done = self.waiting.pop()
        try:
            wait()
        except StoreIOError as error:
            return done(error)
        return done(None)


def test_the_latest_pending_write_wins() -> None:
    turns = Turns()
    for queues in (1, 2):
        turns.set(queues)
    assert turns.woken
    assert file_size(turns.files, "/config/topics.json") is None
    turns.writing.write()
    assert turns.files.read("/config/topics.json").count(b'"readQueueNums":2') == 1
    assert turns.writing.saver.run_due(0) is None
    assert not turns.waiting  # nothing is left to write
    assert not file_size(turns.files, "/config/topics.json.bak")  # written once
    turns.set(3)
    turns.write_aside(1)
    assert turns.files.read("/config/topics.json").count(b'"readQueueNums":3') == 1


def test_a_refused_write_is_retried_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "librmq.runtime")
    turns = Turns()
    for number in (1, 2, 3):
        turns.files.fail("write", number)
    turns.set(1)
    assert [turns.write_aside(at) for at in (0, 10_000, 20_000)] == [10_000, 20_000, 30_000]
    assert turns.write_aside(30_000) is not None
    assert b'"T"' in turns.files.read("/config/topics.json")
    assert [line.message.partition(": ")[2].partition(";")[0] for line in caplog.records] == [
        "saving fails",
        "saving works again",
    ]
    assert len(caplog.records) == 2
