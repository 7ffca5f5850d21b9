"""A broker that drops resends: each kind of send, reopening and kills, compared with a model; and what passes."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from librmq.broker import Broker, BrokerConfig
from librmq.broker.handlers import _repeated_sends
from librmq.client import TransactionProducer
from librmq.client.producer import Producer
from librmq.config import StoreConfig
from librmq.consumer import DeliveredMessage
from librmq.errors import ConfigError
from librmq.files._memory import MemoryFiles
from librmq.message.message import Message
from librmq.message.topics import SystemTopic, retry_topic
from librmq.metrics import Metrics
from librmq.protocol import (
    INNER_PRODUCER,
    REPLAY_PRODUCER,
    EndTransaction,
    SendBack,
    SendBatch,
    SendMessage,
    SendResponse,
    SendTogether,
    TransactionState,
)
from librmq.runtime import ManualRunner
from librmq.scheduling.timer_config import TimerConfig
from librmq.scheduling.waiting import sent_to
from librmq.testing import Kit, Process, explore
from librmq.wire.remote.remote_route import connect
from librmq.wire.remoting import RemotingServer
from tests import planted
from tests.broker.parties import HOST, opened
from tests.budget import examples

WINDOW_S: Final = 60
FORMS: Final[dict[str, dict[str, Any]]] = {
    "plain": {},
    "level": {"delay_level": 3},
    "timer": {"properties": {"TIMER_DELAY_MS": "50000"}},
    "relay": {"properties": {"TIMER_DELAY_MS": "999000000"}},
    "half": {"properties": {"TRAN_MSG": "true", "PGROUP": "p"}},
}


def open_broker(files: MemoryFiles, runner: ManualRunner, **fields: Any) -> Broker:
    timers = TimerConfig(slots_total=200, timer_roll_window_slot=60)
    fields.setdefault("drop_resends_within", WINDOW_S)
    return opened(files, runner, timers=timers, hops=True, **fields)


def message_of(number: int, form: str, topic: str = "T") -> Message:
    fields = dict(FORMS[form])
    properties = fields.pop("properties", {})
    message = Message(topic, b"%d" % number, unique_key=f"U{number}", **fields)
    message.properties.update(properties)
    return message


def request_of(message: Message, queue_id: int = 0, group: str = "p", **fields: Any) -> SendMessage:
    return SendMessage(group, message, queue_id, 1_600_000_000_000, HOST, **fields)


def place(answer: SendResponse) -> tuple[int, int, int, tuple[str, ...]]:
    return answer.queue_id, answer.queue_offset, answer.physical_offset, answer.offset_ids


@dataclass
class First:
    at_ms: int
    answer: tuple[int, int, int, tuple[str, ...]]


class ResendMachine(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.files, self.runner = MemoryFiles(), ManualRunner()
        self.firsts: dict[tuple[str, int], First] = {}
        self.broker = open_broker(self.files, self.runner)
        self.broker.create_topic("T", 2)

    def first(self, topic: str, number: int) -> First | None:
        known = self.firsts.get((topic, number))
        is_recent = known is not None and self.runner.now_ms() - known.at_ms <= 1000 * WINDOW_S
        return known if is_recent else None

    def compare(self, topic: str, number: int, answer: tuple[int, int, int, tuple[str, ...]], at_ms: int) -> None:
        known = self.first(topic, number)
        if known is None:
            self.firsts[topic, number] = First(at_ms, answer)
        else:
            assert answer == known.answer

    @rule(number=st.integers(0, 5), form=st.sampled_from(sorted(FORMS)), queue_id=st.integers(-1, 1))
    def send(self, number: int, form: str, queue_id: int) -> None:
        at_ms, end = self.runner.now_ms(), self.broker.store.log.end
        name = "half of T" if form == "half" else "T"  # another message than one without a transaction
        known = self.first(name, number)
        answer = self.broker.call(request_of(message_of(number, form), queue_id))
        assert (self.broker.store.log.end == end) == (known is not None)
        self.compare(name, number, place(answer), at_ms)

    @rule(numbers=st.lists(st.integers(0, 5), min_size=1, max_size=4))
    def send_together(self, numbers: list[int]) -> None:
        requests, at_ms = [request_of(message_of(number, "plain")) for number in numbers], self.runner.now_ms()
        answers: list[SendResponse] = []
        while len(answers) < len(requests):  # as a server does
            answers += self.broker.call(SendTogether(requests[len(answers) :]))
        for number, answer in zip(numbers, answers, strict=True):
            self.compare("T", number, place(answer), at_ms)

    @rule(numbers=st.lists(st.integers(0, 5), min_size=1, max_size=4))
    def send_batch(self, numbers: list[int]) -> None:
        at_ms, end = self.runner.now_ms(), self.broker.store.log.end
        known = [self.first("T", number) for number in numbers]
        batch = SendBatch("p", tuple(message_of(number, "plain") for number in numbers), 1, at_ms, HOST)
        answer = self.broker.call(batch)
        assert (self.broker.store.log.end == end) == (None not in known)
        for number, offset_id in zip(numbers, answer.offset_ids, strict=True):
            record = self.broker.find_by_id(offset_id)
            assert record is not None
            before = self.first("T", number)
            if before is None:
                place_of_new = 1, record.queue_offset, record.physical_offset, (offset_id,)
                self.compare("T", number, place_of_new, at_ms)
            else:
                assert before.answer[3] == (offset_id,)

    @rule(group=st.sampled_from([INNER_PRODUCER, REPLAY_PRODUCER]), number=st.integers(0, 5))
    def send_again_on_purpose(self, group: str, number: int) -> None:
        if self.first("T", number) is None:  # after a reopening the copy would count as the first send
            return
        end = self.broker.store.log.end
        self.broker.call(request_of(message_of(number, "plain"), group=group))
        assert self.broker.store.log.end > end

    @rule(milliseconds=st.sampled_from([1, 20_000, 40_000]))
    def pass_time(self, milliseconds: int) -> None:
        self.runner.advance(milliseconds)
        if any(self.first(*name) is None for name in self.firsts):
            # After a reopening a late delivery counts as a send if its first record is too old: begin with new ids.
            self.broker.close()
            self.begin()

    @rule(is_killed=st.booleans())
    def reopen(self, is_killed: bool) -> None:
        if is_killed:
            self.broker.abandon()
        else:
            self.broker.close()
        self.broker = open_broker(self.files, self.runner)

    @invariant()
    def table_is_bounded(self) -> None:
        recent = self.broker._sending._recent
        assert recent is not None
        assert len(recent._recent) + len(recent._older) <= len(self.firsts) + 12

    def teardown(self) -> None:
        self.broker.close()


TestResends = ResendMachine.TestCase
TestResends.settings = settings(max_examples=examples(30), stateful_step_count=20, deadline=None)


# --- what passes, and what is counted


def test_windows_that_are_none() -> None:
    assert BrokerConfig(drop_resends_within=timedelta(minutes=2)).drop_resends_within == 120
    for value in (0, -1, "60", True, timedelta(0), float("nan")):
        with pytest.raises(ConfigError, match="drop_resends_within: expected seconds"):
            BrokerConfig(drop_resends_within=value)  # type: ignore[arg-type]


def test_off_by_default_and_for_messages_without_an_id() -> None:
    with opened() as broker:
        for _ in range(2):
            broker.call(request_of(message_of(1, "plain")))
        assert len(list(broker.messages("T"))) == 2
    with open_broker(MemoryFiles(), ManualRunner()) as broker:
        for topic in ("T", "T", "other"):
            broker.call(request_of(Message(topic, b"x")))
        broker.call(request_of(message_of(1, "plain")))
        broker.call(request_of(message_of(1, "plain", topic="other")))  # an id names a message of its topic
        assert (len(list(broker.messages("T"))), len(list(broker.messages("other")))) == (3, 2)


def test_window_ends() -> None:
    runner, metrics = ManualRunner(), Metrics()
    with Broker.open(
        "/b", BrokerConfig(drop_resends_within=10), files=MemoryFiles(), runner=runner, metrics=metrics
    ) as broker:
        first = broker.call(request_of(message_of(1, "plain")))
        runner.advance(10_000)
        assert broker.call(request_of(message_of(1, "plain"))) == first
        assert metrics.snapshot()["resend_ids"] == {(): 1}
        assert metrics.snapshot()["resends_dropped"] == {("T",): 1}
        runner.advance(1)
        second = broker.call(request_of(message_of(1, "plain")))
        assert second.queue_offset == first.queue_offset + 1
        assert broker.call(request_of(message_of(1, "plain"))) == second
        for number in range(100):
            runner.advance(1000)
            broker.call(request_of(message_of(10 + number, "plain")))
            assert metrics.snapshot()["resend_ids"][()] <= 22
    assert "resend_ids" not in metrics.snapshot()


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_repeated_sends, "_MOST_IDS", 20)
    metrics = Metrics()
    with Broker.open(
        "/b", BrokerConfig(drop_resends_within=10), files=MemoryFiles(), runner=ManualRunner(), metrics=metrics
    ) as broker:
        for number in range(50):
            broker.call(request_of(message_of(number, "plain")))
            assert metrics.snapshot()["resend_ids"][()] <= 20
        assert metrics.snapshot()["resend_ids_dropped"] == {(): 30}


@pytest.mark.parametrize("is_killed", [False, True])
def test_failures_and_deliveries_carry_the_id_and_pass(is_killed: bool) -> None:
    """A send-back, its delivery, a dead letter that is sent again, and a due level have the id of the first send."""
    files, runner = MemoryFiles(), ManualRunner()
    broker = open_broker(files, runner, drop_resends_within=86_400)
    broker.create_topic("T", 1)
    first = Producer(broker, "p").send(Message("T", b"x", unique_key="U1", delay=10))
    runner.advance(11_000)
    (message,) = broker.messages("T")
    broker.call(SendBack("g", message.physical_offset, 3))
    runner.advance(11_000)
    assert [retry.unique_key for retry in broker.messages(retry_topic("g"))] == ["U1"]
    broker.call(SendBack("g", message.physical_offset, -1))
    (letter,) = broker.dead_letters("g")
    assert broker.resend_dead_letters("g", [letter]) == 1
    assert len(list(broker.messages(retry_topic("g")))) == 2
    if is_killed:
        broker.abandon()
    else:
        broker.close()
    with open_broker(files, runner, drop_resends_within=86_400) as broker:
        again = broker.call(request_of(Message("T", b"x", unique_key="U1", delay_level=3)))
        assert again.offset_ids == (first.offset_id,)


def test_a_half_whose_answer_is_lost_is_one_transaction() -> None:
    runner = ManualRunner()
    with open_broker(MemoryFiles(), runner) as broker:
        answers = [broker.call(request_of(message_of(1, "half"))) for _ in range(2)]
        assert answers[0] == answers[1]
        assert len(list(broker.messages(SystemTopic.HALF))) == 1
        end = EndTransaction("p", TransactionState.COMMIT, answers[1].queue_offset, answers[1].physical_offset, "U1")
        broker.call(end)
        assert [message.unique_key for message in broker.messages("T")] == ["U1"]
        broker.call(request_of(message_of(1, "half")))
        assert len(list(broker.messages(SystemTopic.HALF))) == 1


@pytest.mark.parametrize("is_killed", [None, False, True])
def test_a_half_after_a_rollback_is_another_one(is_killed: bool | None) -> None:
    files, runner = MemoryFiles(), ManualRunner()
    broker = open_broker(files, runner)
    half = request_of(message_of(1, "half"))
    for state in (TransactionState.ROLLBACK, TransactionState.COMMIT):
        if is_killed is not None:
            broker.abandon() if is_killed else broker.close()
            broker = open_broker(files, runner)
        placed = broker.call(half)
        assert broker.call(half) == placed
        broker.call(EndTransaction("p", state, placed.queue_offset, placed.physical_offset, "U1"))
    assert broker.call(half) == placed
    assert [message.unique_key for message in broker.messages("T")] == ["U1"]
    assert len(list(broker.messages(SystemTopic.HALF))) == 2
    broker.close()


def test_a_half_of_another_group_or_of_none_is_another_one() -> None:
    with open_broker(MemoryFiles(), ManualRunner()) as broker:
        of_q = message_of(1, "half")
        of_q.properties["PGROUP"] = "q"
        for _ in range(2):
            for message in (message_of(1, "half"), of_q, message_of(1, "plain")):
                placed = broker.call(request_of(message))
                if message is of_q:
                    end = TransactionState.COMMIT, placed.queue_offset, placed.physical_offset, "U1"
                    broker.call(EndTransaction("q", *end))
        assert (len(list(broker.messages(SystemTopic.HALF))), len(list(broker.messages("T")))) == (2, 2)


@pytest.mark.parametrize("form", ["level", "timer", "relay"])
@pytest.mark.parametrize("is_reopened", [False, True])
def test_a_message_after_its_cancellation_is_another_one(form: str, is_reopened: bool) -> None:
    files, runner = MemoryFiles(), ManualRunner()
    broker = open_broker(files, runner, drop_resends_within=600)
    first = broker.call(request_of(message_of(1, form)))
    assert broker.cancel("U1").cancelled
    if is_reopened:
        broker.close()
        broker = open_broker(files, runner, drop_resends_within=600)
    runner.advance(2_000)  # a timer's deletion is of all messages of the id that are due in the same second
    second = broker.call(request_of(message_of(1, form)))
    assert second.physical_offset > first.physical_offset
    assert broker.call(request_of(message_of(1, form))) == second
    runner.advance(1_000_000_000)
    assert [message.unique_key for message in broker.messages("T")] == ["U1"]
    broker.close()


@pytest.mark.parametrize("durability", ["async", "sync"])
def test_threads_that_send_one_message_get_one_answer(tmp_path: Any, durability: Any) -> None:
    config = StoreConfig(commitlog_file_size=1 << 20, durability=durability)
    with Broker.open(tmp_path, BrokerConfig(drop_resends_within=60), store_config=config) as broker:
        for number in range(20):
            with ThreadPoolExecutor(4) as threads:
                request = request_of(message_of(number, "plain"))
                answers = list(threads.map(broker.call, [request] * 8))
            assert len({place(answer) for answer in answers}) == 1
        assert len(list(broker.messages("T"))) == 20


@pytest.mark.rmq(broker_config=BrokerConfig(drop_resends_within=60))
@pytest.mark.parametrize("over_tcp", [False, True])
def test_a_producer_that_loses_an_answer(rmq: Kit, over_tcp: bool) -> None:
    broker = rmq.broker
    with (
        RemotingServer(broker) as server,
        connect(f"127.0.0.1:{server.port}") as route,
        Producer(route if over_tcp else broker, "shop") as producer,
    ):
        message = Message("orders", b"coat", unique_key="ID-1")
        answers = {producer.send(message, queue=0)[1:] for _ in range(3)}
        assert len(answers) == 1
        batches = {producer.send_batch([message, Message("orders", b"hat", unique_key="ID-2")])[1:3] for _ in "ab"}
        assert len(batches) == 1
    assert [message.body for message in broker.messages("orders")] == [b"coat", b"hat"]


def test_one_record_of_a_message_is_its_send() -> None:
    """Deliveries, moved timers, checked halves, final messages, retries and dead letters are the broker's."""
    runner = ManualRunner()
    with open_broker(MemoryFiles(), runner) as broker:
        answers = [broker.call(request_of(message_of(number, form), 2)) for number, form in enumerate(FORMS)]
        half = request_of(message_of(10, "half"))
        TransactionProducer(broker, "p", check=lambda message: TransactionState.UNKNOWN)
        moved = message_of(11, "plain")
        moved.properties["TIMER_DELAY_MS"] = "150000"
        broker.call(request_of(moved, 2))
        assert broker.cancel("U11").cancelled
        broker._context.cancellations.replace(())  # so that the deletion and the message are moved on
        runner.advance(140_000)
        placed = broker.call(half)
        broker.call(EndTransaction("p", TransactionState.COMMIT, placed.queue_offset, placed.physical_offset, "U10"))
        for level in (1, -1):
            broker.call(SendBack("g", answers[0].physical_offset, level))
        runner.advance(1_000_000)
        sends = [(message.unique_key, sent_to(message)) for message in broker.store if sent_to(message) is not None]
        assert Counter(name for name, _ in sends) == dict.fromkeys(["U0", "U1", "U2", "U3", "U4", "U10", "U11"], 1)
        assert {place for _, place in sends} == {("T", 2), ("T", 0)}
        assert len(list(broker.store)) > len(sends) + 6


# --- explored


def stored_once(rmq: Kit) -> None:
    """Send orders through lost answers, requests that arrive twice, and a crash of the broker."""
    rmq.broker.create_topic("orders", 2)

    def shop(process: Process) -> None:
        @process.consumer("billing").subscribe("orders")
        def charge(message: DeliveredMessage) -> None:
            rmq.checkpoint("at work")

    rmq.app("shop", shop)
    rmq.faults.lose_answer("orders", times=2)
    rmq.faults.repeat_request("orders")
    for number in range(3):
        planted.send(rmq.producer(), Message("orders", b"%d" % number, unique_key=f"U{number}"), number % 2)
        if number == 1:
            rmq.crash_broker()
    rmq.advance(minutes=1)
    keys = [message.unique_key or "" for message in rmq.broker.messages("orders")]
    assert sorted(keys) == ["U0", "U1", "U2"], f"stored twice: {keys}"


def test_no_schedule_stores_an_order_twice() -> None:
    result = explore(stored_once, runs=examples(100), broker_config=BrokerConfig(drop_resends_within=600))
    assert result.chosen["fault"] > 5


def test_a_broker_that_keeps_resends_stores_an_order_twice() -> None:
    with pytest.raises(AssertionError, match="stored twice"):
        explore(stored_once, runs=20)
