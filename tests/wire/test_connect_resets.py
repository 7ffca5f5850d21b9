"""Resets of running groups over `librmq.connect`, as a broker of RocketMQ 5 does them.

It moves the group's progress, ignores commits, and tells a client once: by the answer to its next pull of a queue.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial

import pytest

import librmq
from librmq import Broker, ConsumeFrom, MessageQueue
from librmq.clock import ManualClock
from librmq.protocol import PullMessage, PullResponse, PullStatus, UpdateOffset
from librmq.wire.remote import RemoteRoute
from librmq.wire.remote._consumer_requests import LongPulls
from librmq.wire.remoting import RemotingServer
from librmq.wire.remoting._frames import Frame
from librmq.wire.remoting._headers import RequestCode
from tests.wire.remoting_client import RawClient
from tests.wire.test_connect import WAIT_S, Inbox, until
from tests.wire.test_connections import Answering

QUEUE = ("g", "orders", 0)


class Reset:
    """A broker that resets as 5.x does, with ten messages in one queue, and a route to it."""

    def __init__(self) -> None:
        self.stack = ExitStack()
        self.broker = self.stack.enter_context(Broker.temporary())
        self.broker.create_topic("orders", 1)
        self.broker.set_group("g")
        with librmq.Producer(self.broker, "shop") as producer:
            for number in range(10):
                producer.send("orders", b"%d" % number)
        self.server = self.stack.enter_context(RemotingServer(self.broker))
        self.server.resets_by_pull = True
        self.route = self.stack.enter_context(librmq.connect(self.server.address))
        self.admin = self.stack.enter_context(RawClient(self.server.port))

    def reset(self, timestamp_ms: int = 0) -> None:
        self.admin.ask(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, topic="orders", group="g", timestamp=timestamp_ms)

    def progress(self) -> int | None:
        return self.broker.consumer_offset("g", "orders")

    def end_hold(self) -> None:
        """Let the broker answer the pull that it holds."""
        self.server.release_pulls(QUEUE)


@pytest.fixture
def reset() -> Iterator[Reset]:
    made = Reset()
    with made.stack:
        yield made


def test_a_running_group_reads_again_after_a_reset(reset: Reset) -> None:
    inbox = Inbox(20)
    consumer = librmq.PushConsumer(reset.route, "g", consume_from=ConsumeFrom.FIRST)
    consumer.subscribe("orders", inbox)
    with consumer:
        until(lambda: len(inbox.bodies) == 10)
        reset.reset()
        reset.end_hold()
        assert sorted(inbox.wait()) == sorted(inbox.bodies[:10] * 2)
    assert reset.progress() == 10


@pytest.mark.parametrize("orderly", [False, True])
def test_a_reset_is_stored_before_a_running_listener_ends(reset: Reset, orderly: bool) -> None:
    """Its progress of before, which the broker ignored until then, would undo the reset."""
    is_running, may_end = threading.Event(), threading.Event()

    def listen(message: librmq.DeliveredMessage) -> None:
        is_running.set()
        may_end.wait(WAIT_S)

    reset.broker.call(UpdateOffset(*QUEUE, 9))
    consumer = librmq.PushConsumer(reset.route, "g", orderly=orderly)
    consumer.subscribe("orders", listen)
    with consumer:
        assert is_running.wait(WAIT_S)
        reset.reset()
        reset.end_hold()
        until(lambda: consumer.progress("orders") != {MessageQueue("orders", reset.broker.name, 0): 9})
        assert reset.progress() == 0
        may_end.set()


def test_a_second_reset_of_a_stopped_group_is_not_ignored(reset: Reset) -> None:
    """As a commit would be, until the first one has been pulled."""
    reset.reset()
    assert reset.progress() == 0
    reset.route.reset_group("g", "orders", to="end")
    assert reset.progress() == 10
    with librmq.PullConsumer(reset.route, "g") as consumer:
        consumer.subscribe("orders")
        assert consumer.poll(0.2) == []
        assert consumer.position(MessageQueue("orders", reset.broker.name, 0)) == 10


def test_a_heartbeat_with_other_subscriptions_loses_no_reset(reset: Reset) -> None:
    inbox = Inbox(20)
    consumer = librmq.PushConsumer(reset.route, "g", consume_from=ConsumeFrom.FIRST)
    consumer.subscribe("orders", inbox)
    with consumer:
        until(lambda: len(inbox.bodies) == 10)
        reset.reset()
        with reset.route.runner.lock:  # the answer of before arrives after the heartbeat
            consumer.subscribe("others", inbox)
            reset.end_hold()
        assert len(inbox.wait()) == 20


# ---- the answers of a broker, in any order


class Answers:
    """The pulls of a client in one queue, whose answers a test gives by number."""

    def __init__(self) -> None:
        self.line = Answering()
        self.woken = list[bool]()
        self.now_ms = ManualClock().now_ms()
        self.pauses = list[int]()
        self.pulls = LongPulls(
            "b", lambda: self.now_ms, lambda _: self.line, lambda call: call(), 3, lambda _, at: self.pauses.append(at)
        )
        self.assign()

    def assign(self) -> None:
        """Assign the queue to the client, perhaps again."""
        self.notify = partial(self.woken.append, True)

    def pull(self, offset: int, client_id: str = "c") -> PullResponse:
        return self.pulls.pull(PullMessage(client_id, "g", "t", 0, offset, notify=self.notify))

    def say(self, number: int, remark: str, next_offset: int, code: int = 21) -> None:
        fields = {"nextBeginOffset": str(next_offset), "minOffset": "0", "maxOffset": "9", "suggestWhichBrokerId": "0"}
        self.line.asked[number](Frame(code, fields, remark=remark))

    def stored(self, offset: int) -> int:
        """Return what is stored when the client stores a progress."""
        return self.pulls.after_reset(UpdateOffset("g", "t", 0, offset)).queue_offset


def test_a_reset_in_the_answer_to_a_replaced_pull_is_kept() -> None:
    answers = Answers()
    answers.pull(5)
    answers.pull(7)
    assert answers.stored(6) == 6
    answers.say(0, "OFFSET_RESET", 2)
    assert answers.woken
    assert answers.stored(6) == 2, "its progress of before would undo the reset"
    response = answers.pull(7)
    assert (response.status, response.next_offset) == (PullStatus.OFFSET_ILLEGAL, 2)
    assert answers.stored(3) == 3
    assert answers.pull(2).status is PullStatus.HELD
    assert len(answers.line.asked) == 3


def test_a_reset_that_comes_between_two_pulls_is_kept() -> None:
    answers = Answers()
    answers.pull(5)
    answers.pull(7)
    answers.say(1, "PULL_NOT_FOUND", 8, code=20)
    assert answers.pull(7).next_offset == 8
    answers.say(0, "OFFSET_RESET", 2)
    assert answers.pull(8).next_offset == 2


def test_other_answers_to_a_replaced_pull_are_dropped() -> None:
    answers = Answers()
    answers.pull(5)
    answers.pull(7)
    answers.say(0, "OFFSET_TOO_SMALL", 6)
    assert (answers.woken, answers.stored(6)) == ([], 6)
    assert answers.pull(7).status is PullStatus.HELD


def test_a_reset_of_a_queue_that_is_assigned_again_is_dropped() -> None:
    """The client has begun at the broker's progress, which another one may have moved far beyond the reset."""
    answers = Answers()
    answers.pull(5)
    answers.say(0, "OFFSET_RESET", 2)
    answers.assign()
    assert answers.pull(5).status is PullStatus.HELD
    assert (len(answers.line.asked), answers.stored(6)) == (2, 6), "the pull was sent again, as its answer is gone"


def test_a_reset_of_a_client_that_no_longer_reads_moves_no_other_one() -> None:
    answers = Answers()
    answers.pull(5)
    answers.say(0, "OFFSET_RESET", 2)
    answers.pull(2, "another")
    assert answers.stored(6) == 6


def test_the_reset_of_a_client_that_has_left_is_dropped() -> None:
    answers = Answers()
    answers.pull(5)
    answers.pulls.drop_client("c", "g")
    answers.say(0, "OFFSET_RESET", 2)
    assert answers.stored(6) == 6
    assert answers.pull(5).status is PullStatus.HELD


def test_a_pause_between_pulls_ends_though_the_clock_was_set_back() -> None:
    answers = Answers()
    for number in range(11):
        answers.pull(5)
        if number == 10:
            answers.now_ms -= 3_600_000
        answers.say(number, "PULL_NOT_FOUND", 5, code=20)
    assert answers.pauses == [answers.now_ms + 100]


# ---- pull consumers


def test_a_polling_consumer_stores_what_it_reaches_again(reset: Reset, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "librmq.wire")
    with librmq.PullConsumer(reset.route, "g", consume_from=ConsumeFrom.FIRST, auto_commit=False) as consumer:
        consumer.subscribe("orders")
        assert len(polled(consumer)) == 10
        consumer.commit()
        assert reset.progress() == 10
        consumer.seek(MessageQueue("orders", reset.broker.name, 0), 9)
        reset.reset()
        assert reset.progress() == 0
        consumer.commit()
        assert reset.progress() == 0, "the broker ignores it"
        reset.route.runner.call_waiting()
        assert "progress of group g in orders/0 is not stored, because the group was reset" in caplog.text
        reset.end_hold()
        assert len(polled(consumer)) == 10
        consumer.commit()
        assert reset.progress() == 10


def polled(consumer: librmq.PullConsumer) -> list[bytes]:
    bodies = list[bytes]()
    for _ in range(10 * WAIT_S):
        bodies += [message.body for message in consumer.poll(0.1)]
        if len(bodies) >= 10:
            break
    return bodies


@pytest.mark.parametrize("over_tcp", [False, True])
def test_a_reset_that_is_sent_to_a_polling_consumer_is_stored_again(over_tcp: bool) -> None:
    """A broker of librmq moves the group's progress too, which the consumer had stored before."""
    with ExitStack() as stack:
        broker = stack.enter_context(Broker.temporary())
        broker.create_topic("orders", 1)
        with librmq.Producer(broker, "shop") as producer:
            for number in range(10):
                producer.send("orders", b"%d" % number)
        route: Broker | RemoteRoute = broker
        if over_tcp:
            route = stack.enter_context(librmq.connect(stack.enter_context(RemotingServer(broker)).address))
        consumer = librmq.PullConsumer(route, "g", consume_from=ConsumeFrom.FIRST)
        consumer.subscribe("orders")
        with consumer:
            assert len(polled(consumer)) == 10
            consumer.commit()
            broker.reset_group("g", "orders", "begin")
            assert len(polled(consumer)) == 10
        assert broker.consumer_offset("g", "orders") == 10
