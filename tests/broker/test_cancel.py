"""Messages that are cancelled while they wait, compared with a model: by levels, timer and relay, closed and killed."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from librmq import protocol
from librmq.broker import Broker, BrokerConfig
from librmq.client import TransactionProducer
from librmq.client.producer import Producer
from librmq.client.sender import SendResult
from librmq.clock import ManualClock
from librmq.cluster import Replica, promote_replica
from librmq.config import StoreConfig
from librmq.consumer import DeliveredMessage
from librmq.diagnosis import pending_messages, story
from librmq.errors import BrokerError, CorruptionError, MessageIllegalError
from librmq.files._memory import MemoryFiles
from librmq.files.interface import Files
from librmq.message.message import Message
from librmq.runtime import ManualRunner
from librmq.runtime.threads import ThreadRunner
from librmq.scheduling import waiting
from librmq.scheduling.timer_config import TimerConfig
from librmq.store import MessageStore
from librmq.store.format.documents import with_checksum, write_document
from librmq.testing import HistoryAnomalyError, Kit, Process, explore
from librmq.wire.remote.remote_route import connect
from librmq.wire.remoting import RemotingServer
from librmq.wire.remoting._frames import Frame, answer_to
from librmq.wire.remoting._request_codec import FORMS as FORMS_OF_REQUESTS
from tests.broker.parties import broker_directory, opened, send
from tests.budget import examples, some
from tests.cluster.replica_link import ReplicaLink
from tests.file_seams import CrashImages, RecordingFiles

DELAYS_S: Final = {"level": (1, 5, 10, 30), "timer": (2, 7, 41), "relay": (130, 200, 333)}
"""Seconds that a message waits: the wheel takes up to 120 s, and moves those beyond 20 s on."""
R = TypeVar("R")


def open_broker(files: Files, runner: ManualRunner, **fields: Any) -> Broker:
    timers = TimerConfig(slots_total=200, timer_roll_window_slot=20, timer_max_delay_sec=120, timer_log_file_size=4_000)
    return opened(files, runner, timers=timers, hops=True, **fields)


class CancelMachine(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.files, self.runner = MemoryFiles(), ManualRunner()
        self.sent: list[tuple[SendResult, int]] = []
        self.cancelled: set[str] = set()
        self.open()

    def open(self) -> None:
        self.broker = open_broker(self.files, self.runner)
        self.producer = Producer(self.broker, "p", instance_name="one")

    @rule(form=st.sampled_from(sorted(DELAYS_S)), choice=st.integers(0, 3), is_moment=st.booleans())
    def send(self, form: str, choice: int, is_moment: bool) -> None:
        seconds = DELAYS_S[form][choice % len(DELAYS_S[form])]
        at_ms = self.runner.now_ms() + 1000 * seconds
        message = Message("T", b"%d" % len(self.sent), delay=None if is_moment else seconds)
        if is_moment:
            message.properties["TIMER_DELIVER_MS"] = str(at_ms)
        self.sent.append((self.producer.send(message), at_ms))

    def delivered(self) -> set[str]:
        return {message.unique_key or "" for message in self.broker.messages("T")}

    @rule(choice=st.integers(0, 30), how=st.sampled_from(["producer", "receipt", "unique id", "offset id"]))
    def cancel(self, choice: int, how: str) -> None:
        if not self.sent:
            return
        receipt, _ = self.sent[choice % len(self.sent)]
        was_delivered = receipt.message_id in self.delivered()
        if how == "producer":
            result = self.producer.cancel(receipt)
        else:
            names: dict[str, Any] = {
                "receipt": receipt,
                "unique id": receipt.message_id,
                "offset id": receipt.offset_id,
            }
            result = self.broker.cancel(names[how])
        assert result.cancelled == (not was_delivered), result
        assert ("delivered already" in result.why) == was_delivered
        if result.cancelled:
            self.cancelled.add(receipt.message_id)

    @rule(milliseconds=st.sampled_from([1, 999, 1_000, 5_000, 31_000]))
    def pass_time(self, milliseconds: int) -> None:
        self.runner.advance(milliseconds)

    @rule(is_killed=st.booleans())
    def reopen(self, is_killed: bool) -> None:
        if is_killed:
            self.broker.abandon()
        else:
            self.producer.shutdown()
            self.broker.close()
        self.open()

    @invariant()
    def cancelled_ones_never_come_and_others_in_time(self) -> None:
        delivered, now_ms = self.delivered(), self.runner.now_ms()
        assert not delivered & self.cancelled
        for receipt, at_ms in self.sent:
            if receipt.message_id not in self.cancelled:
                assert receipt.message_id not in delivered or at_ms <= now_ms
                # Each reopening waits a second before it looks at its levels, and a relay continues from there.
                assert receipt.message_id in delivered or at_ms + 20_000 > now_ms

    def teardown(self) -> None:
        self.runner.advance(400_000)
        self.cancelled_ones_never_come_and_others_in_time()
        self.broker.close()


TestCancel = CancelMachine.TestCase
TestCancel.settings = settings(max_examples=examples(40), stateful_step_count=25, deadline=None)


# --- one at a time


@pytest.mark.parametrize("delay", [10, 12])
def test_an_id_stands_for_all_its_sends_so_far(delay: int) -> None:
    """A level, and a timer: all are due in the same second."""
    files, runner = MemoryFiles(), ManualRunner()
    with open_broker(files, runner) as broker, Producer(broker, "p") as producer:
        broker.create_topic("T", 1)
        message = Message("T", b"x", unique_key="order-7", delay=delay)
        assert producer.cancel(producer.send(message)).cancelled
        for _ in range(2):
            again = producer.send(message)
        assert list(broker.messages("T")) == []
        runner.advance(2_000)  # into the wheel
        assert len(list(pending_messages(broker.store))) == 2
        runner.advance(20_000)
        assert len(list(broker.messages("T"))) == 2
        result = producer.cancel(again)
        assert (result.cancelled, result.why) == (False, "delivered already: T/0 has it at 1")
        producer.send(message)
        assert producer.cancel(producer.send(message)).cancelled
        runner.advance(20_000)
        assert len(list(broker.messages("T"))) == 2


def test_a_coroutine_cancels() -> None:
    """While it waits, other coroutines of its loop run."""
    threads = ThreadRunner()
    with Broker.temporary(runner=threads) as broker, Producer(broker, "p") as producer:
        sent = producer.send("T", b"x", delay=3600)
        with threads.lock:  # the broker can't answer yet
            turns: list[int] = []

            async def cancel() -> protocol.CancelResult:
                task = asyncio.ensure_future(producer.cancel_async(sent))
                await asyncio.sleep(0)
                turns.append(len(turns))
                threads.lock.release()
                try:
                    return await task
                finally:
                    threads.lock.acquire()

            assert asyncio.run(cancel()).cancelled
        assert turns == [0]
        assert list(pending_messages(broker.store)) == []
    threads.shutdown()


def test_no_cancellation_outlives_the_tail_of_a_log() -> None:
    """After a power failure the file has a message whose record and successors the log has lost."""
    runner = ManualRunner()
    before, after = MemoryFiles(), MemoryFiles()
    for files in (before, after):
        with open_broker(files, runner) as broker:
            broker.create_topic("T", 1)
    message = Message("T", b"x", unique_key="order-7", delay=10)
    with open_broker(after, runner) as broker, Producer(broker, "p") as producer:
        assert producer.cancel(producer.send(message)).cancelled
        path = f"{broker.store.path}/librmq/cancelled.json"
        before.write(path, after.read(path))
    for _ in range(2):
        with open_broker(before, runner) as broker, Producer(broker, "p") as producer:
            if not list(pending_messages(broker.store)):
                producer.send(message)
            assert len(list(pending_messages(broker.store))) == 1
    with open_broker(before, runner) as broker:
        runner.advance(20_000)
        assert [message.unique_key for message in broker.messages("T")] == ["order-7"]


def test_a_repeated_cancellation_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[object] = []

    def count(path: str, files: Files, fields: Any) -> None:
        write_document(path, files, fields)
        written.append(fields)

    monkeypatch.setattr("librmq.scheduling.waiting.write_document", count)
    files, runner = MemoryFiles(), ManualRunner()
    with open_broker(files, runner) as broker, Producer(broker, "p") as producer:
        receipts = [producer.send("T", b"x", delay=10) for _ in range(3)]
        for receipt in receipts * 2:
            assert producer.cancel(receipt).cancelled
    with open_broker(files, runner) as broker:
        assert broker.cancel(receipts[0]).cancelled
    assert len(written) == 3


WAITS: Final[dict[str, Any]] = {
    "level": {"delay": 10},
    "timer": {"delay": 41},
    "rolled": {"delay": 100},
    "relay": {"delay": 333},
}
FORMS: Final = pytest.mark.parametrize("form", WAITS)


@FORMS
@pytest.mark.parametrize("is_killed", [False, True])
def test_story_and_what_is_pending(form: str, is_killed: bool) -> None:
    files, runner = MemoryFiles(), ManualRunner()
    broker = open_broker(files, runner)
    runner.advance(1_500)
    kept, taken = (Producer(broker, name).send("T", b"x", **WAITS[form]) for name in ("kept", "taken"))
    runner.advance(100)
    assert len(list(pending_messages(broker.store))) == 2  # by the files of a running broker
    runner.advance(24_900 if form in ("rolled", "relay") else 0)
    rows = {message.unique_key: message for message in pending_messages(broker.store, broker.tables)}
    due_ms = runner.now_ms() - (25_000 if form in ("rolled", "relay") else 100) + 1000 * int(WAITS[form]["delay"])
    for receipt in (kept, taken):
        row = rows[receipt.message_id]
        assert (row.kind, row.topic, row.target_topic) == (
            "timer" if form in ("timer", "rolled") else "delay",
            "T",
            "T",
        )
        assert row.due_ms is not None
        assert 0 <= row.due_ms - due_ms < (1_000 if form == "rolled" else 100)
    assert broker.cancel(taken).cancelled
    for _ in range(2):
        assert [message.unique_key for message in pending_messages(broker.store)] == [kept.message_id]
        told = [event.event for event in story(broker, taken.message_id)]
        assert told == ["delayed"] * (len(told) - 1) + ["cancelled"]
        if is_killed:
            broker.abandon()
        else:
            broker.close()
        broker = open_broker(files, runner)
    runner.advance(400_000)
    assert [message.unique_key for message in broker.messages("T")] == [kept.message_id]
    assert [event.event for event in story(broker, taken.message_id)].count("cancelled") == 1
    assert "delivered" in [event.event for event in story(broker, kept.message_id)]
    broker.close()


@FORMS
def test_without_the_file_levels_come_again(form: str) -> None:
    files, runner = MemoryFiles(), ManualRunner()
    with open_broker(files, runner) as broker:
        receipt = Producer(broker, "p").send("T", b"x", **WAITS[form])
        assert broker.cancel(receipt).cancelled
    files.delete("/b/librmq/cancelled.json")
    with open_broker(files, runner) as broker:
        runner.advance(400_000)
        assert len(list(broker.messages("T"))) == (0 if form in ("timer", "rolled") else 1)


@pytest.mark.parametrize(
    "rubbish",
    [
        b"",
        b"{",
        b"[]",
        with_checksum(b'{"version": 2, "number": 1, "messages": []}'),
        with_checksum(b'{"version": 1, "number": 1, "messages": [["a", "T", 0, 1, 2, "x", null]]}'),
        with_checksum(b'{"version": 1, "number": 1, "messages": [["a", "T"]]}'),
    ],
)
def test_file_that_is_damaged(rubbish: bytes) -> None:
    files = MemoryFiles()
    open_broker(files, ManualRunner()).close()
    files.write("/b/librmq/cancelled.json", rubbish)
    with pytest.raises(CorruptionError, match=r"cancelled\.json"):
        open_broker(files, ManualRunner())


def test_what_does_not_wait() -> None:
    runner = ManualRunner()
    with open_broker(MemoryFiles(), runner) as broker, Producer(broker, "p") as producer:
        plain = producer.send("T", b"x")
        assert producer.cancel(plain) == protocol.CancelResult(
            False, f"delivered already: T/{plain.queue.queue_id} has it at 0"
        )
        assert "no message" in broker.cancel("nothing").why
        batch = producer.send_batch([Message("T", b"a"), Message("T", b"b")])
        with pytest.raises(MessageIllegalError, match="a batch has no delay"):
            producer.cancel(batch)
        for receipt in (None, 7, b"id", object()):
            with pytest.raises(TypeError, match="receipt: expected what send returned, found"):
                broker.cancel(receipt)  # type: ignore[arg-type]
        with TransactionProducer(broker, "t", check=lambda message: protocol.TransactionState.UNKNOWN) as transactions:
            half = transactions.send_in_transaction(
                Message("T", b"half"), execute=lambda message, argument: protocol.TransactionState.UNKNOWN
            )
            why = "half messages can't be cancelled: roll the transaction back"
            assert transactions.cancel(half) == protocol.CancelResult(False, why)
        (first,) = [message for message in broker.messages("T") if message.unique_key == plain.message_id]
        broker.call(protocol.SendBack("g", first.physical_offset, 3))  # waits too, for its group
        assert not broker.cancel(plain).cancelled
        runner.advance(11_000)
        assert len(list(broker.messages("%RETRY%g"))) == 1


@FORMS
def test_delivered_before_a_kill_is_delivered_after_it(form: str) -> None:
    """The progress over the delivery is lost, so the first look at the log tells it."""
    files, runner = MemoryFiles(), ManualRunner()
    broker = open_broker(files, runner)
    receipt = Producer(broker, "p").send("T", b"x", **WAITS[form])
    runner.advance(1000 * WAITS[form]["delay"] + 900)
    while not list(broker.messages("T")):
        runner.advance(100)
    broker.abandon()
    with open_broker(files, runner) as broker:
        assert "delivered already" in broker.cancel(receipt.message_id).why
        assert "delivered already" in broker.cancel(receipt.offset_id).why


def test_a_message_without_an_id_and_one_that_is_sent_again() -> None:
    runner = ManualRunner()
    with open_broker(MemoryFiles(), runner) as broker:
        nameless = send(broker, "T", b"nameless", delay_level=3)
        assert broker.cancel(nameless.offset_ids[0]).cancelled
        with Producer(broker, "p") as producer:
            again = Message("T", b"again", unique_key="U1", delay=10)
            producer.send(again)
            twice = producer.send(again)  # as after a lost answer
            assert producer.cancel(twice).cancelled
            runner.advance(20_000)
            assert list(broker.messages("T")) == []
            producer.send(again)  # a new message, although it has the id
            runner.advance(20_000)
            assert [message.body for message in broker.messages("T")] == [b"again"]


def test_an_exact_level_is_taken_for_a_moment_too() -> None:
    runner = ManualRunner(ManualClock(1_700_000_000_000))
    files = broker_directory()
    with opened(files, runner) as broker, Producer(broker, "p") as producer:  # without timer and relay
        for deliver_at in (datetime.fromtimestamp(1_700_000_010, UTC), datetime.fromtimestamp(1_700_003_600, UTC)):
            producer.send("T", b"x", deliver_at=deliver_at)
        assert [message.due_ms for message in pending_messages(broker.store)] == [1_700_000_010_000, 1_700_003_600_000]
        with pytest.raises(
            MessageIllegalError, match=r"is to wait 11 s, which is no delay level .* where 4\.9 would not see it"
        ):
            producer.send("T", b"x", deliver_at=datetime.fromtimestamp(1_700_000_011, UTC))


def test_old_cancellations_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "_MOST_PASSED", 3)
    files, runner = MemoryFiles(), ManualRunner()
    with open_broker(files, runner) as broker, Producer(broker, "p") as producer:
        for _ in range(20):
            assert producer.cancel(producer.send("T", b"x", delay=5)).cancelled
            runner.advance(61_000)
        assert len(broker._deliveries._cancellations._by_name) <= 6
    assert len(json.loads(files.read("/b/librmq/cancelled.json"))["messages"]) <= 6


@pytest.mark.slow
def test_of_many_cancellations_each_writes_a_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever the process is killed, each id stays cancelled, with what was sent with it last."""
    monkeypatch.setattr(waiting, "_FEW", 2)
    written: list[int] = []

    def count(path: str, files: Files, fields: Any) -> None:
        write_document(path, files, fields)
        written.append(len(fields["messages"]))

    monkeypatch.setattr("librmq.scheduling.waiting.write_document", count)
    files, runner = MemoryFiles(), ManualRunner()
    for number in range(60):
        broker = open_broker(files, runner)
        producer = Producer(broker, "p")
        sent = producer.send(Message("T", b"x", unique_key=f"order-{number % 25}", delay=3600))
        assert producer.cancel(sent).cancelled
        broker.abandon()
        with MessageStore.open(broker.store.path, read_only=True, files=files) as store:
            assert list(pending_messages(store)) == []
    written.clear()
    with open_broker(files, runner) as broker, Producer(broker, "p") as producer:
        for _ in range(400):
            assert producer.cancel(producer.send("T", b"x", delay=3600)).cancelled
    assert sum(written) < 400 * 400 / 8


# --- over the network


@pytest.mark.rmq(broker_config=BrokerConfig(timers=TimerConfig(), hops=True))
def test_over_tcp(rmq: Kit) -> None:
    broker = rmq.broker
    with (
        RemotingServer(broker) as server,
        connect(f"127.0.0.1:{server.port}") as route,
        Producer(route, "p") as producer,
    ):
        waiting_receipts = [producer.send("T", b"x", **fields) for fields in WAITS.values() if fields["delay"] != 333]
        plain = producer.send("T", b"plain")
        for _ in range(2):
            assert [producer.cancel(receipt).cancelled for receipt in waiting_receipts] == [True, True, True]
            assert "delivered already" in producer.cancel(plain).why
    rmq.advance(minutes=10)
    assert [message.body for message in broker.messages("T")] == [b"plain"]


def test_a_broker_without_cancel_refuses() -> None:
    answer = answer_to(
        Frame(31_007, {}), protocol.ResponseCode.REQUEST_CODE_NOT_SUPPORTED, " request type 31007 not supported"
    )
    with pytest.raises(
        BrokerError, match=r"with delay= or deliver_at=, not delay_level=.*librmq's brokers alone"
    ) as caught:
        FORMS_OF_REQUESTS[protocol.CancelMessage].read(protocol.CancelMessage("U1", "T"), answer)
    assert caught.value.code == protocol.ResponseCode.REQUEST_CODE_NOT_SUPPORTED


# --- power failures and schedules


@pytest.mark.slow
@FORMS
def test_no_power_failure_brings_a_cancelled_message_back(form: str) -> None:
    files, runner = RecordingFiles(), ManualRunner(ManualClock(1_700_000_000_000))
    broker = open_broker(files, runner, store=replace(StoreConfig.tiny(), durability="sync"))
    producer = Producer(broker, "p", instance_name="one")
    answered: list[tuple[int, str]] = []
    kept: list[tuple[int, str]] = []
    for number in range(4):
        receipt = producer.send("T", b"%d" % number, **WAITS[form])
        runner.advance(1_300)
        if number % 2:
            assert producer.cancel(receipt).cancelled
            answered.append((len(files.trace), receipt.message_id))
        else:
            kept.append((len(files.trace), receipt.message_id))
    runner.advance(9_000)
    broker.abandon()
    images = CrashImages(files.trace)
    for crash_point in some(range(answered[0][0], len(images))):
        image = images.image(crash_point, crash_point)
        later = ManualRunner(ManualClock(runner.now_ms()))
        with open_broker(image.files(), later) as again:
            later.advance(500_000)
            delivered = {message.unique_key for message in again.messages("T")}
        assert not delivered & {name for at, name in answered if at <= crash_point}, image
        assert delivered >= {name for at, name in kept if at <= crash_point}, image


def cancelled_stays_cancelled(rmq: Kit) -> None:
    """Cancel one of two reminders, while instances and the broker die."""
    seen: list[bytes] = []

    def shop(process: Process) -> None:
        @process.consumer("billing").subscribe("reminders")
        def remind(message: DeliveredMessage) -> None:
            rmq.checkpoint("at work")
            seen.append(message.body)

    rmq.app("shop", shop)
    rmq.broker.create_topic("reminders", 1)
    producer = rmq.producer()
    kept, taken = (producer.send("reminders", body, delay=10) for body in (b"kept", b"taken"))
    rmq.advance(seconds=2)
    assert producer.cancel(taken).cancelled
    rmq.advance(seconds=2)
    rmq.crash_broker()
    rmq.advance(minutes=3)
    assert b"taken" not in seen
    assert b"kept" in seen
    assert not producer.cancel(kept).cancelled


def test_no_schedule_delivers_a_cancelled_message() -> None:
    result = explore(cancelled_stays_cancelled, runs=examples(50))
    assert result.chosen["fault"] > 0


@pytest.mark.parametrize("by_test", [False, True])
def test_history_tells_that_a_cancelled_message_came(monkeypatch: pytest.MonkeyPatch, by_test: bool) -> None:
    def run(is_broken: bool) -> None:
        with Kit() as rmq:
            consumer = rmq.consumer("billing")
            consumer.subscribe("reminders", lambda message: None)
            receipt = rmq.producer().send("reminders", b"x", delay=10)
            assert (rmq.broker if by_test else rmq.producer()).cancel(receipt).cancelled
            if is_broken:
                monkeypatch.setattr(waiting.Cancellations, "skips", lambda self, message, now_ms: False)
                rmq.broker._deliveries.schedule()._is_cancelled = None
            rmq.advance(minutes=1)
            assert len(rmq.delivered("billing")) == is_broken

    run(False)
    with pytest.raises(HistoryAnomalyError, match="aborted"):
        run(True)


@FORMS
def test_a_store_that_is_closed(form: str) -> None:
    """A broker without timer and relay cancels there what one with both has left, as the command does."""
    files, runner = MemoryFiles(), ManualRunner()
    with open_broker(files, runner) as broker:
        receipt = Producer(broker, "p").send("T", b"x", **WAITS[form])
        runner.advance(2_000)
    with opened(files, runner) as broker:
        assert broker.cancel(receipt.message_id).cancelled
    with open_broker(files, runner) as broker:
        runner.advance(400_000)
        assert list(broker.messages("T")) == []
        assert broker.cancel(receipt.message_id).cancelled


@pytest.mark.parametrize("few", [256, 1])
def test_a_replica_and_a_snapshot_have_it(few: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "_FEW", few)
    runner = ManualRunner()
    with Broker.open(tmp_path / "a", runner=runner) as broker, Producer(broker, "p") as producer:
        receipts = [producer.send("T", b"x", delay=10) for _ in range(8)]
        with Replica.open(tmp_path / "b", of=broker) as replica:
            assert all(producer.cancel(receipt).cancelled for receipt in receipts[:5])
            runner.advance(0)
            assert all(producer.cancel(receipt).cancelled for receipt in receipts[5:])
            runner.advance(9_000)
            assert replica.lag_bytes == 0
            broker.store.snapshot(tmp_path / "c")
            runner.advance(5_000)
    promote_replica(tmp_path / "b")
    for copy in "bc":
        with Broker.open(tmp_path / copy, runner=ManualRunner(ManualClock(runner.now_ms()))) as again:
            again.runner.advance(30_000)  # type: ignore[attr-defined]
            assert list(again.messages("T")) == []


@pytest.mark.parametrize("replication", ["sync", "async"])
def test_a_replica_that_is_promoted_right_after_it(replication: Literal["sync", "async"]) -> None:
    files, runner = MemoryFiles(), ManualRunner()
    broker = opened(files, runner, replication=replication)
    replica = Replica.open("/replica", of=broker)
    with Producer(broker, "p") as producer:
        receipts = [producer.send("T", b"x", delay=10) for _ in range(2)]
        runner.pass_time(0.1)
        assert all(producer.cancel(receipt).cancelled for receipt in receipts)
    if replication == "async":
        runner.pass_time(0.1)
    broker.abandon()
    replica.abandon()
    promote_replica("/replica", files=files)
    with Broker.open("/replica", runner=runner, files=files) as promoted:
        runner.advance(30_000)
        assert list(promoted.messages("T")) == []


class EarlyCopies(ReplicaLink):
    """Leads to a master, and keeps the answers to early copies, each after a call of ``at_copy``."""

    def __init__(self, master: Broker) -> None:
        super().__init__(master, ManualClock(0))
        self.answers: list[protocol.CopiedTables] = []
        self.at_copy: Callable[[], object] = lambda: None

    def call(self, request: protocol.Request[R], /) -> R:
        if isinstance(request, protocol.CopyTables) and request.is_early:
            self.at_copy()
        answer = super().call(request)
        if isinstance(answer, protocol.CopiedTables) and isinstance(request, protocol.CopyTables) and request.is_early:
            self.answers.append(answer)
        return answer


class Copying:
    """A synchronous master with its replica, a producer, and messages that wait."""

    def __init__(self, messages: int = 4, **fields: Any) -> None:
        self.files, self.runner = MemoryFiles(), ManualRunner()
        self.broker = opened(self.files, self.runner, **{"replication": "sync", **fields})
        self.broker.create_topic("T", 1)
        self.broker.call(protocol.UpdateOffset("other", "T", 0, 0))
        self.link = EarlyCopies(self.broker)
        self.replica = Replica.open("/replica", of=self.link, files=self.files, runner=self.runner)
        self.producer = Producer(self.broker, "p")
        self.ids = [self.producer.send("T", b"x", delay=10).message_id for _ in range(messages)]

    def delivered_after_promotion(self) -> int:
        self.replica.abandon()
        promote_replica("/replica", files=self.files)
        with Broker.open("/replica", runner=self.runner, files=self.files) as promoted:
            self.runner.advance(30_000)
            return len(list(promoted.messages("T")))


def test_a_replica_copies_early_only_what_it_lacks(caplog: pytest.LogCaptureFixture) -> None:
    few = Copying()
    broker, link, ids = few.broker, few.link, few.ids
    start = protocol.StartGroup("g", "T", 0, 0)
    assert broker.call(protocol.CancelMessage(ids[0], dry_run=True)).cancelled
    assert not broker.cancel("unknown").cancelled
    assert link.answers == []
    assert broker.cancel(ids[0]).cancelled
    assert broker.call(start) is protocol.StartOutcome.MOVED
    assert [list(answer.offsets) for answer in link.answers] == [[], ["T@g"]]
    assert broker.cancel(ids[0]).cancelled
    assert broker.call(start) is protocol.StartOutcome.MOVED_BEFORE
    assert len(link.answers) == 2
    caplog.set_level(logging.INFO, "librmq.broker")
    link.cut()
    for message_id in ids[1:3]:
        assert broker.cancel(message_id).cancelled
    link.restore()
    assert broker.cancel(ids[1]).cancelled  # again, as after a lost answer
    assert [len(answer.cancelled) for answer in link.answers] == [1, 1, 3]
    lines = [(line.levelname, line.getMessage()) for line in caplog.records if line.name == "librmq.broker"]
    assert lines == [
        (
            "WARNING",
            "/replica: the replica lacks a cancellation or the start of a group, because it has not copied it in time; "
            "a promotion before its next copy undoes it",
        ),
        ("INFO", "/replica: the replica has all cancellations and starts of groups again"),
    ]
    broker.abandon()
    assert few.delivered_after_promotion() == 1


def test_one_copy_serves_all_who_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    few = Copying(8)
    begun, all_wait = list[None](), threading.Event()
    copy = few.broker._replication().copy_tables_early

    def counted() -> None:
        begun.append(None)
        if len(begun) == len(few.ids):
            all_wait.set()
        copy()

    monkeypatch.setattr(few.broker._replication(), "copy_tables_early", counted)
    few.link.at_copy = lambda: all_wait.wait(60)
    with ThreadPoolExecutor(len(few.ids)) as pool:
        list(pool.map(few.broker.cancel, few.ids))
    assert [len(answer.cancelled) for answer in few.link.answers] == [8]
    few.broker.abandon()
    assert few.delivered_after_promotion() == 0


def test_a_master_that_closes_sends_what_waits() -> None:
    few = Copying(replication="async")
    assert all(few.broker.cancel(message_id).cancelled for message_id in few.ids)
    few.replica.follow()
    assert all(few.broker.cancel(few.producer.send("T", b"x", delay=10).message_id).cancelled for _ in range(2))
    assert few.link.answers == []
    few.broker.close()
    assert [len(answer.cancelled) for answer in few.link.answers] == [6]
    assert few.delivered_after_promotion() == 0


def test_a_replica_that_closes_while_it_copies_early(caplog: pytest.LogCaptureFixture) -> None:
    few = Copying()
    few.link.at_copy = few.replica.close
    assert few.broker.cancel(few.ids[0]).cancelled
    assert [line.getMessage() for line in caplog.records] == []
    few.broker.close()


def test_a_failing_disk_of_a_replica_fails_no_cancellation(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = Copying()

    def refuse(_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(few.replica.broker, "copy_tables", refuse)
        assert few.broker.cancel(few.ids[0]).cancelled
    assert "tables of the master could not be copied: [Errno 28]" in caplog.records[0].getMessage()
    assert few.broker.cancel(few.ids[1]).cancelled
    few.broker.abandon()
    assert few.delivered_after_promotion() == 2


def test_a_cancellation_that_only_memory_has_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting.Cancellations, "write", lambda self, *args: None)
    with pytest.raises(AssertionError, match="taken"):
        explore(cancelled_stays_cancelled, runs=20)
