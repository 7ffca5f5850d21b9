"""Receives with an invisible time, and recalls, over `librmq.connect` by the requests of RocketMQ 5."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime

import pytest

import librmq
from librmq import BrokerError, BrokerUnreachableError, RmqError
from librmq.clock import SystemClock
from librmq.errors import MalformedError, ReceiptError
from librmq.protocol import CancelReceive, Receive, ReceiveResponse
from librmq.runtime.runner import AT_ONCE, Step
from librmq.runtime.threads import ThreadRunner
from librmq.wire.remote.consumer_requests import PopReceives
from librmq.wire.remoting.bodies import write_body
from librmq.wire.remoting.frames import Frame, answer_to, encode
from librmq.wire.remoting.headers import RequestCode
from librmq.wire.remoting.pop import pop_frame, read_popped
from tests.wire.fake_servers import FakeServer
from tests.wire.remoting_client import RawClient
from tests.wire.test_connect import Served


@pytest.fixture
def served() -> Iterator[Served]:
    made = Served()
    with made.stack:
        made.broker.create_topic("orders", 2)
        yield made


def consumer_of(served: Served, tags: str | None = None) -> librmq.SimpleConsumer:
    consumer = librmq.SimpleConsumer(served.route, "g")
    consumer.subscribe("orders", tags=tags)
    return consumer


def send(served: Served, *bodies: bytes, tags: str = "") -> None:
    with librmq.Producer(served.route, "shop") as producer:
        for body in bodies:
            producer.send("orders", body, tags=tags)


def test_messages_are_received_and_acknowledged_by_pop(served: Served) -> None:
    send(served, b"a", b"b", b"c")
    with consumer_of(served) as consumer:
        received = consumer.receive(16, invisible=30, wait=0)
        assert sorted(message.body for message in received) == [b"a", b"b", b"c"]
        assert {message.attempt for message in received} == {1}
        consumer.ack(*received)
        assert consumer.receive(16, invisible=30, wait=0) == []
    assert sum(served.broker.tables.progress()["g", "orders"].values()) == 3


def test_a_filter_counts(served: Served) -> None:
    send(served, b"no", tags="other")
    send(served, b"yes", tags="wanted")
    with consumer_of(served, tags="wanted") as consumer:
        assert [message.body for message in consumer.receive(16, invisible=30, wait=0)] == [b"yes"]


def test_a_wait_ends_with_a_message(served: Served) -> None:
    with consumer_of(served) as consumer:
        assert consumer.receive(1, invisible=30, wait=0) == []
        send(served, b"later")
        assert [message.body for message in consumer.receive(1, invisible=30, wait=10)] == [b"later"]


def notified(served: Served, poll_ms: int, group: str = "g") -> Frame:
    """Send a NOTIFICATION, and return its answer."""
    fields = {"consumerGroup": group, "topic": "orders", "queueId": "-1", "pollTime": str(poll_ms), "bornTime": "0"}
    return served.route.broker(served.broker.name).request(Frame(RequestCode.NOTIFICATION, fields))


def test_a_notification_says_whether_a_receive_finds_messages_and_takes_none(served: Served) -> None:
    assert notified(served, 0).fields["hasMsg"] == "false"
    send(served, b"a")
    assert notified(served, 10_000).fields["hasMsg"] == "true"
    with consumer_of(served) as consumer:
        (message,) = consumer.receive(16, invisible=30, wait=0)
        assert (message.body, message.attempt) == (b"a", 1)
        assert notified(served, 1).fields["hasMsg"] == "false", "what is in flight is not there"


def test_notifications_end_in_turn_by_one_step(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, steps = served.broker.runner, list[Step]()
    wake = runner.wake

    def note(step: Step, at: int = AT_ONCE) -> None:
        steps.append(step)
        wake(step, at)

    monkeypatch.setattr(runner, "wake", note)
    with RawClient(served.server.port) as client:

        def hold(*polls_ms: int) -> list[int]:
            known = {"consumer_group": "g", "topic": "orders", "queue_id": -1, "born_time": 0}
            return [client.send(RequestCode.NOTIFICATION, poll_time=poll_ms, **known) for poll_ms in polls_ms]

        long, short = hold(40, 1)
        answers = {(answer.opaque, answer.fields["hasMsg"]) for answer in (client.answer(), client.answer())}
        assert answers == {(short, "false"), (long, "false")}
        numbers = hold(20_000, 20_000, 20_000)
        client.beat("c")  # they are held before it is answered
        send(served, b"a")
        assert sorted(client.answer().opaque for _ in numbers) == numbers
    assert len({step for step in steps if "notifications" in step.label}) == 1


def test_a_receive_that_no_longer_waits_takes_no_message(served: Served) -> None:
    broker, woken = served.route.broker(served.broker.name), threading.Event()

    def receive() -> ReceiveResponse:
        return broker.call(Receive("c", "g", "orders", 1, 30_000, notify=notify))

    def notify() -> None:
        woken.set()

    assert receive().is_held
    broker.call(CancelReceive(notify))
    assert receive().is_held, "joins the notification that the broker holds"
    send(served, b"a")
    assert woken.wait(10)
    (received,) = receive().messages
    assert (received.message.body, received.attempt) == (b"a", 1)


@pytest.mark.parametrize("is_ordered", [False, True])
def test_a_receive_says_whether_its_group_is_in_order(is_ordered: bool) -> None:
    def answer(frame: Frame) -> Frame:
        if frame.code != RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG:
            return answer_to(frame, 210, "no message")
        groups = {"g": {"groupName": "g", "consumeMessageOrderly": is_ordered}}
        return answer_to(frame, body=write_body({"subscriptionGroupTable": groups}))

    broker = FakeServer(answer)
    route = librmq.connect(broker.address)
    with broker, route, librmq.SimpleConsumer(route, "g") as consumer:
        consumer.subscribe("orders")
        assert consumer.receive(1, wait=0) == []
    (pop,) = [frame for frame in broker.asked if frame.code == RequestCode.POP_MESSAGE]
    assert pop.fields["order"] == str(is_ordered).lower()


class Standing(SystemClock):
    """A clock whose time of day a test moves."""

    def __init__(self) -> None:
        self.time_ms = super().now_ms()

    def now_ms(self) -> int:
        return self.time_ms


def test_a_group_without_settings_is_not_asked_for_with_each_receive() -> None:
    table: dict[str, object] = {}

    def answer(frame: Frame) -> Frame:
        if frame.code != RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG:
            return answer_to(frame, 210, "no message")
        return answer_to(frame, body=write_body({"subscriptionGroupTable": table}))

    clock = Standing()
    runner = ThreadRunner(clock)
    with FakeServer(answer) as server, librmq.connect(server.address, runner=runner) as route:
        broker = route.endpoint("fake")

        def receive() -> tuple[int, str]:
            broker.call(Receive("c", "g", "orders"))
            codes = [frame.code for frame in server.asked]
            return codes.count(RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG), server.asked[-1].fields["order"]

        assert [receive() for _ in range(3)] == [(1, "false")] * 3
        table["g"] = {"groupName": "g", "consumeMessageOrderly": True}
        clock.time_ms += 3_000
        assert receive() == (2, "true")
        clock.time_ms += 3_600_000
        assert receive() == (2, "true")
    assert runner.shutdown()


def test_a_group_in_order_receives_in_order(served: Served) -> None:
    served.broker.create_topic("orders", 1)
    served.broker.set_group("g", is_ordered=True)
    send(served, b"a", b"b", b"c")
    with consumer_of(served) as consumer:
        got = []
        while batch := consumer.receive(1, invisible=30, wait=0):
            assert consumer.receive(1, invisible=30, wait=0) == [], "the queue waits for an acknowledgement"
            got += [message.body for message in batch]
            consumer.ack(*batch)
    assert got == [b"a", b"b", b"c"]


def test_an_answer_of_a_group_in_order_counts_attempts(served: Served) -> None:
    """By message, as brokers of 5.3 say it, else by queue, as older ones do."""
    served.broker.create_topic("orders", 1)
    served.broker.set_group("g", is_ordered=True)
    send(served, b"a", b"b", b"c")
    request = Receive("", "g", "orders", 3, 30_000)
    client = RawClient(served.server.port)
    served.stack.callback(client.close)
    client.write(encode(pop_frame(request, 0, is_ordered=True)))
    answer = client.answer()
    assert answer.fields["orderCountInfo"] == "0 0 0", "received for the first time"

    def attempts(counts: str) -> list[int]:
        told = replace(answer, fields={**answer.fields, "orderCountInfo": counts})
        return [part.attempt for part in read_popped(request, "b", told).messages]

    assert attempts("0 qo0%0 2;0 0 0") == [3, 1, 1]
    assert attempts("0 0 4") == [5, 5, 5]
    with pytest.raises(MalformedError, match="orderCountInfo: '0 x'"):
        attempts("0 x")


def test_a_message_comes_again_after_its_time_was_changed(served: Served) -> None:
    send(served, b"a")
    with consumer_of(served) as consumer:
        (first,) = consumer.receive(1, invisible=300, wait=0)
        consumer.extend(first, 1)
        (again,) = consumer.receive(1, invisible=300, wait=30)
        assert (again.body, again.attempt, again.topic) == (b"a", 2, "orders")
        with pytest.raises(ReceiptError):
            consumer.extend(first, 10)
        consumer.extend(again, 400)
        consumer.ack(again)
        assert consumer.receive(1, invisible=300, wait=0) == []


def test_a_received_message_becomes_a_dead_letter(served: Served) -> None:
    send(served, b"poison")
    with consumer_of(served) as consumer:
        (message,) = consumer.receive(1, invisible=300, wait=0)
        consumer.dead_letter(message, "can't be read")
    (letter,) = served.broker.dead_letters("g")
    assert letter.body == b"poison"


class Asking:
    """The receives at a broker that has no messages; ``later`` is what runs soon."""

    def __init__(self) -> None:
        self.now_ms = 0
        self.later: list[Callable[[], None]] = []
        self.sent: list[Callable[[Frame | RmqError], None]] = []
        self.ends_send: Callable[[], None] | None = None
        self.receives = PopReceives(
            "b",
            lambda: self.now_ms,
            lambda frame: answer_to(frame, 210, "no message"),
            self._send,
            self.later.append,
            lambda call, due_ms: None,
            lambda group: False,
        )

    def _send(self, frame: Frame, ended: Callable[[Frame | RmqError], None]) -> None:
        self.sent.append(ended)
        if self.ends_send is not None:
            self.ends_send()

    def receive(self, notify: Callable[[], None]) -> None:
        assert self.receives.receive(Receive("c", "g", "orders", notify=notify)).is_held

    def run_later(self) -> None:
        for call in self.later:
            call()


def test_a_failed_send_wakes_the_waits_that_joined_it() -> None:
    asking, woken = Asking(), list[str]()

    def fail() -> None:
        asking.ends_send = None
        asking.receive(lambda: woken.append("second"))
        raise BrokerUnreachableError("gone")

    asking.ends_send = fail
    with pytest.raises(BrokerUnreachableError):
        asking.receive(lambda: woken.append("first"))
    asking.run_later()
    assert (len(asking.sent), woken) == (1, ["second"])


def test_the_waits_of_a_lost_notification_move_to_the_next() -> None:
    asking, woken = Asking(), list[str]()

    def cancelled() -> None:
        woken.append("cancelled")

    asking.receive(lambda: woken.append("first"))
    asking.receive(cancelled)
    asking.now_ms = 30_000
    asking.receive(lambda: woken.append("second"))
    asking.receives.cancel(CancelReceive(cancelled))
    _, answered = asking.sent
    asking.now_ms = 40_000
    answered(Frame(0))
    asking.run_later()
    assert woken == ["first", "second"]


# ---- recall


def in_a_while() -> datetime:
    return datetime.fromtimestamp(SystemClock().now_ms() / 1000 + 5000, UTC)  # the length of no delay level


@pytest.fixture
def timed() -> Iterator[Served]:
    made = Served()
    with made.stack:
        made.broker.create_topic("orders", 1)
        yield made


def test_a_message_with_a_delivery_time_is_recalled(timed: Served) -> None:
    with librmq.Producer(timed.route, "shop") as producer:
        sent = producer.send("orders", b"x", deliver_at=in_a_while())
        assert sent.recall_handle is not None
        assert producer.cancel(sent).cancelled
        assert producer.cancel(sent).cancelled, "a second time"
    assert list(timed.broker.messages("orders")) == []


def test_a_handle_of_another_topic_is_refused(timed: Served) -> None:
    with librmq.Producer(timed.route, "shop") as producer:
        sent = producer.send("orders", b"x", deliver_at=in_a_while())
    timed.broker.create_topic("others", 1)
    frame = Frame(RequestCode.RECALL_MESSAGE, {"topic": "others", "recallHandle": str(sent.recall_handle)})
    answer = timed.route.broker(timed.broker.name).request(frame)
    assert (answer.code, "no handle of 'others'" in str(answer.remark)) == (604, True)


# ---- brokers without these requests


def test_a_broker_without_pop_is_named_with_its_version() -> None:
    def answer(frame: Frame) -> Frame:
        answered = answer_to(frame, 3, "request type not supported")
        answered.version = 399  # of 4.9.3
        return answered

    broker = FakeServer(answer)
    route = librmq.connect(broker.address)
    with route, librmq.SimpleConsumer(route, "g") as consumer:
        consumer.subscribe("orders")
        with pytest.raises(BrokerError, match=r"is a broker of RocketMQ 4\.9\.3, which has no POP"):
            consumer.receive(1, wait=0)
