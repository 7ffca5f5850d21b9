"""Who waits for the disk holds nobody else up: what saves progress waits without the runner's lock."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from librmq.broker import Broker, BrokerConfig
from librmq.config import StoreConfig
from librmq.consumer import PushConsumer
from librmq.errors import FlushFailedError, StoreIOError
from librmq.files import Files, MemoryFiles
from librmq.message import Message, MessageQueue
from librmq.message.topics import HALF_TOPIC, OP_TOPIC
from librmq.protocol import ConsumeFrom, EndTransaction, Heartbeat, MessageModel, SendMessage, TransactionState
from librmq.runtime.runner import Runner
from librmq.runtime.threads import ThreadRunner
from librmq.scheduling.half_messages import CHECK_GROUP
from librmq.scheduling.relay import HOP_GROUP, HOP_TOPIC, send_at
from librmq.scheduling.timer import TimerConfig
from librmq.store.format.timerfiles import TimerCheckpoint
from librmq.txn import TransactionConfig
from tests.broker.parties import HOST, Listening

WAIT_S = 30.0
HOUR_MS = 3_600_000
WHEEL = TimerConfig(slots_total=86_400, timer_log_file_size=1024, save_every_s=0)


class Gate:
    """Passed by those whom the test lets through."""

    def __init__(self) -> None:
        self.come, self.may = threading.Semaphore(0), threading.Semaphore(0)
        self.is_open = True
        self.failures: list[Exception] = []

    def pass_through(self) -> None:
        if not self.is_open:
            self.come.release()
            assert self.may.acquire(timeout=WAIT_S)
        if self.failures:
            raise self.failures.pop()

    @contextmanager
    def shut(self) -> Iterator[None]:
        """Shut until the end of the block."""
        self.is_open = False
        try:
            yield
        finally:
            self.is_open = True
            self.may.release()


class Gated(MemoryFiles):
    """Files of which one is written behind a gate."""

    def __init__(self, gate: Gate, name: str = "timercheck") -> None:
        super().__init__()
        self.gate = gate
        self.name = name

    def write(self, path: str, data: bytes) -> None:
        if path.endswith(self.name):
            self.gate.pass_through()
        super().write(path, data)


def opened(files: Files, runner: Runner | None = None, **settings: Any) -> Broker:
    return Broker.open("/b", BrokerConfig(**settings), files=files, runner=runner, store_config=StoreConfig.tiny())


def flush_behind(broker: Broker, gate: Gate) -> None:
    """Have the broker's steps flush the store behind a gate; the store's own thread does not come by."""
    flush = broker.store.flush

    def gated() -> int:
        gate.pass_through()
        return flush()

    broker.store.flush = gated  # type: ignore[method-assign]


def others_go_on(broker: Broker) -> bool:
    """Whether a step is run, and a listener, while somebody waits for the disk."""
    assert broker.runner.lock.acquire(timeout=WAIT_S)
    broker.runner.lock.release()
    return True


def eventually(broker: Broker, is_so: Callable[[], bool]) -> bool:
    """Whether it is so after some turn of others, each of which is waited for."""
    for _ in range(100_000):
        with broker.runner.lock:
            if is_so():
                return True
    return False


def timed(broker: Broker, body: bytes = b"x") -> None:
    message = Message("T", body, unique_key=body.decode())
    message.properties["TIMER_DELAY_SEC"] = str(HOUR_MS // 1000)
    broker.call(SendMessage("p", message, 0, broker.runner.now_ms(), HOST))


def checkpoint(files: Files) -> TimerCheckpoint:
    found = TimerCheckpoint.read("/b", files)
    assert found is not None
    return found


def test_timers_are_saved_while_others_go_on() -> None:
    gate = Gate()
    files = Gated(gate)
    with opened(files, timers=WHEEL) as broker:
        with gate.shut():
            timed(broker)
            assert gate.come.acquire(timeout=WAIT_S)
            assert others_go_on(broker)
            timed(broker, b"meanwhile")
        assert eventually(broker, lambda: files.size("/b/config/timercheck") is not None)
        assert eventually(broker, lambda: checkpoint(files).queue_offset == 2)


def test_timers_that_cannot_be_saved_are_saved_later(caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate()
    files = Gated(gate)
    settings = TimerConfig(slots_total=86_400, timer_log_file_size=1024, save_every_s=0, retry_s=0.001)
    with opened(files, timers=settings) as broker:
        with gate.shut():
            timed(broker)
            assert gate.come.acquire(timeout=WAIT_S)
            gate.failures.append(StoreIOError("write", "timercheck", OSError(errno.ENOSPC, "full")))
        assert eventually(broker, lambda: files.size("/b/config/timercheck") is not None)
    assert caplog.text.count("the timer's progress: saving fails, and is tried again") == 1


def test_a_timer_log_that_cannot_be_trimmed_keeps_nobody_busy(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a checkpoint that was written: it is tried again, and the step is not due for ever."""
    files = MemoryFiles()
    settings = TimerConfig(slots_total=86_400, timer_log_file_size=1024, save_every_s=0, retry_s=0.001)
    with opened(files, timers=settings) as broker:
        timers = broker._timers
        assert timers is not None
        trim, failures, trimmed = timers._slots.log.trim, [1, 2], threading.Event()

        def fails_at_first(before_ms: int) -> None:
            if failures:
                failures.pop()
                raise StoreIOError("delete", "timerlog", OSError(errno.EACCES, "no"))
            assert not trimmed.is_set(), "it was saved by then"
            trim(before_ms)
            trimmed.set()

        monkeypatch.setattr(timers._slots.log, "trim", fails_at_first)
        timed(broker)
        assert trimmed.wait(WAIT_S)
        assert others_go_on(broker)
    assert caplog.text.count("saving fails, and is tried again") == 1


def test_a_timer_says_once_that_its_store_takes_no_more(caplog: pytest.LogCaptureFixture) -> None:
    """A timer of a store that takes nothing more says so once."""
    gate = Gate()
    with opened(Gated(gate), timers=WHEEL) as broker:
        with gate.shut():
            timed(broker)
            assert gate.come.acquire(timeout=WAIT_S)
            gate.failures.append(FlushFailedError(OSError(errno.EIO, "broken")))
        assert eventually(broker, lambda: "the timer's progress: saving fails: a flush has failed" in caplog.text)


def test_closing_waits_for_a_save_and_writes_a_later_one() -> None:
    """Closing waits for a save that is under way and writes a later one."""
    gate = Gate()
    files = Gated(gate)
    broker = opened(files, timers=WHEEL)
    closing = threading.Thread(target=broker.close)
    with gate.shut():
        timed(broker)
        assert gate.come.acquire(timeout=WAIT_S)
        timed(broker, b"meanwhile")
        timers = broker._timers
        assert timers is not None
        assert eventually(broker, lambda: timers._queue_offset == 2)
        gate.is_open = True
        closing.start()
    closing.join(WAIT_S)
    assert not closing.is_alive()
    assert checkpoint(files).queue_offset == 2


def test_a_broker_that_is_closed_saves_what_it_can() -> None:
    """A failure to save one thing keeps nothing else from being saved."""
    gate = Gate()
    files = Gated(gate)
    broker = opened(files, timers=replace(WHEEL, save_every_s=None))
    broker.create_topic("T", 1)
    timed(broker)
    broker.call(SendMessage("p", Message("T", b"x"), 0, 1, HOST))
    with broker.runner.lock:
        broker._offsets.set("G", "T", 0, 1)
        gate.failures.append(StoreIOError("write", "timercheck", OSError(errno.ENOSPC, "full")))
        assert broker._timers is not None
        broker._timers._changes += 1
    with pytest.raises(StoreIOError):
        broker.close()
    with opened(files, timers=WHEEL) as again:
        assert again.consumer_offset("G", "T") == 1


def carried(broker: Broker) -> None:
    message = send_at(Message("T", b"x"), broker.runner.now_ms() + HOUR_MS)
    broker.call(SendMessage("p", message, 0, broker.runner.now_ms(), HOST))


def note_soon(broker: Broker, gate: Gate) -> None:
    """Let the progress of hops be noted at once, behind a flush that waits at the gate."""
    flush_behind(broker, gate)
    assert broker._proxy is not None
    broker._proxy._saver._every_ms = broker._proxy._saver._retry_ms = 1


def test_the_progress_of_hops_is_noted_while_others_go_on() -> None:
    gate = Gate()
    with opened(MemoryFiles(), hops=True) as broker:
        note_soon(broker, gate)
        with gate.shut():
            carried(broker)
            assert gate.come.acquire(timeout=WAIT_S)
            assert others_go_on(broker)
            assert broker.consumer_offset(HOP_GROUP, HOP_TOPIC) is None
        assert eventually(broker, lambda: broker.consumer_offset(HOP_GROUP, HOP_TOPIC) == 1)


def test_a_flush_for_hops_that_fails_is_tried_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()
    with opened(MemoryFiles(), hops=True) as broker:
        note_soon(broker, gate)
        with gate.shut():
            carried(broker)
            assert gate.come.acquire(timeout=WAIT_S)
            gate.failures.append(StoreIOError("flush", "commitlog", OSError(errno.EIO, "no")))
        assert eventually(broker, lambda: "how far the relay has come: saving fails" in caplog.text)
        assert eventually(broker, lambda: broker.consumer_offset(HOP_GROUP, HOP_TOPIC) == 1)


def prepare(broker: Broker, number: int) -> tuple[int, int]:
    message = Message("T", b"%d" % number, unique_key=f"U{number}")
    message.properties |= {"TRAN_MSG": "true", "PGROUP": "p"}
    sent = broker.call(SendMessage("p", message, 0, broker.runner.now_ms(), HOST, 4))
    return sent.queue_offset, sent.physical_offset


def test_the_end_of_a_check_is_noted_while_others_go_on() -> None:
    gate = Gate()
    settings = TransactionConfig(interval_s=0.001, timeout_s=3600)
    with opened(MemoryFiles(), transactions=settings) as broker:
        flush_behind(broker, gate)
        with gate.shut():
            ended = prepare(broker, 0)
            broker.call(EndTransaction("p", TransactionState.ROLLBACK, *ended, ""))
            assert gate.come.acquire(timeout=WAIT_S)
            assert others_go_on(broker)
            late = prepare(broker, 1)
            broker.call(EndTransaction("p", TransactionState.COMMIT, *late, ""))
            assert [message.body for message in broker.messages("T")] == [b"1"]
            assert broker.consumer_offset(CHECK_GROUP, HALF_TOPIC) is None
        assert eventually(broker, lambda: broker.consumer_offset(CHECK_GROUP, HALF_TOPIC) == 2)
        assert eventually(broker, lambda: broker.consumer_offset(CHECK_GROUP, OP_TOPIC) == 2)


def test_nothing_is_delivered_twice_while_a_check_is_noted() -> None:
    """The halves that a check has put back count as judged, though its progress is not noted yet."""
    gate = Gate()
    settings = TransactionConfig(interval_s=0.001, timeout_s=0)
    with opened(MemoryFiles(), transactions=settings) as broker:
        flush_behind(broker, gate)
        broker.call(Heartbeat("producer", Listening(), frozenset({"p"}), ()))
        with gate.shut():
            half = prepare(broker, 0)
            assert gate.come.acquire(timeout=WAIT_S)
            assert broker.store.queue_range(HALF_TOPIC, 0)[1] == 2  # it was put back
            for _ in range(2):
                broker.call(EndTransaction("p", TransactionState.COMMIT, *half, ""))
            assert [message.body for message in broker.messages("T")] == [b"0"]
            assert broker.store.queue_range(OP_TOPIC, 0)[1] == 1  # of the copy
        assert eventually(broker, lambda: broker.consumer_offset(CHECK_GROUP, HALF_TOPIC) == 2)


def test_the_end_of_a_broker_notes_what_a_check_has_done() -> None:
    gate, files = Gate(), MemoryFiles()
    settings = TransactionConfig(interval_s=0.001, timeout_s=3600)
    runner = ThreadRunner()
    broker = opened(files, runner, transactions=settings)
    flush_behind(broker, gate)
    with gate.shut():
        broker.call(EndTransaction("p", TransactionState.ROLLBACK, *prepare(broker, 0), ""))
        assert gate.come.acquire(timeout=WAIT_S)
        gate.is_open = True
        broker.close()
    assert runner.close() == []
    with opened(files, transactions=settings) as again:
        assert again.consumer_offset(CHECK_GROUP, HALF_TOPIC) == 1


def test_broadcast_progress_is_written_while_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    """A broadcasting consumer writes its progress while others go on."""
    gate = Gate()
    files = Gated(gate, "offsets.json")
    with opened(MemoryFiles()) as broker:
        broker.create_topic("T", 1)
        seen = threading.Semaphore(0)
        consumer = PushConsumer(
            broker,
            "G",
            instance_name="one",
            model=MessageModel.BROADCASTING,
            consume_from=ConsumeFrom.FIRST,
            offsets_folder="/offsets",
            files=files,
        )
        consumer.subscribe("T")(lambda message: seen.release())
        consumer.start()
        queue = MessageQueue("T", broker.name, 0)

        def consumed(number: int) -> None:
            broker.call(SendMessage("p", Message("T", b"x"), 0, 1, HOST))
            assert seen.acquire(timeout=WAIT_S)
            assert eventually(broker, lambda: consumer.progress().get(queue) == number)

        def stored() -> bool:
            return consumer.assigned[queue].told == consumer.assigned[queue].progress

        def save() -> int | None:
            with broker.runner.lock:
                return consumer._save_due(broker.runner.now_ms())

        consumed(1)
        with gate.shut():
            assert save() is not None
            assert gate.come.acquire(timeout=WAIT_S)
            assert others_go_on(broker)
            consumed(2)
            assert save() is not None  # one at a time
        assert eventually(broker, lambda: consumer.assigned[queue].told == 1)
        gate.failures.append(StoreIOError("write", "offsets.json", OSError(errno.ENOSPC, "full")))
        assert save() is not None
        assert eventually(broker, lambda: "offsets.json fails" in caplog.text)
        assert save() is not None
        assert eventually(broker, stored)
        assert save() is None
        consumed(3)
        consumer.shutdown()
        assert b":3" in files.read(f"/offsets/{consumer.client.client_id}/G/offsets.json")


def test_ends_of_transactions_share_a_flush() -> None:
    """With sync durability an end waits for the device, and nobody waits for that end."""
    gate = Gate()
    with Broker.open("/b", files=MemoryFiles(), store_config=StoreConfig.tiny(durability="sync")) as broker:
        halves = [prepare(broker, number) for number in range(3)]
        commit = broker.store._commit
        flush = commit._flush

        def gated() -> int:
            end = flush()
            gate.pass_through()
            return end

        commit._flush = gated
        request = [EndTransaction("p", TransactionState.COMMIT, *half, "") for half in halves]
        ending = [threading.Thread(target=broker.call, args=(one,)) for one in request]
        with gate.shut():
            for thread in ending:
                thread.start()
            assert gate.come.acquire(timeout=WAIT_S)
            assert eventually(broker, lambda: len(list(broker.messages("T"))) == 3)
            assert others_go_on(broker)
            assert broker._transactions._lock.acquire(timeout=WAIT_S)
            broker._transactions._lock.release()
            assert all(thread.is_alive() for thread in ending)
        for thread in ending:
            thread.join(WAIT_S)
            assert not thread.is_alive()
