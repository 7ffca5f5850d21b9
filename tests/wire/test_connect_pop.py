"""Receives with an invisible time, and recalls, over `librmq.connect` by the requests of RocketMQ 5."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import librmq
from librmq import BrokerError, BrokerUnreachableError, RmqError
from librmq.clock import ManualClock, SystemClock
from librmq.errors import MalformedError, ReceiptError
from librmq.message.batch import BatchItem
from librmq.message.ids import Receipt
from librmq.message.record import Record, body_checksum, encode_record
from librmq.protocol import CancelReceive, ChangeInvisible, Receive, ReceiveResponse
from librmq.runtime.runner import AT_ONCE, Step
from librmq.runtime.threads import ThreadRunner
from librmq.wire.remote._pop_receives import PopReceives
from librmq.wire.remoting import RemotingServer, listen
from librmq.wire.remoting._bodies import write_body
from librmq.wire.remoting._frames import Frame, answer_to, encode
from librmq.wire.remoting._headers import RequestCode
from librmq.wire.remoting._pop import ack_frame, change_frame, pop_frame, read_popped
from tests.stores_of_5 import batch_record
from tests.wire.fake_servers import FakeServer
from tests.wire.remoting_client import RawClient
from tests.wire.test_connect import Served, served_with, until

served = served_with(queues=2)


class Standing(SystemClock):
    """A clock whose time of day a test moves, and apart from it the time that has passed."""

    passed_s = 0.0

    def __init__(self) -> None:
        self.time_ms = super().now_ms()

    def now_ms(self) -> int:
        return self.time_ms

    def monotonic(self) -> float:
        return self.passed_s


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


def test_an_answer_is_what_one_frame_holds() -> None:
    """The messages together are larger, and no message waits until its invisible time is over."""
    body = random.Random(0).randbytes(4_180_000)
    config = librmq.StoreConfig(max_transfer_bytes_in_memory=1 << 30, max_transfer_bytes_on_disk=1 << 30)
    with (
        librmq.Broker.temporary(store_config=config) as broker,
        RemotingServer(broker) as server,
        librmq.connect(server.address) as route,
        librmq.Producer(broker, "shop") as producer,
        librmq.SimpleConsumer(route, "g") as consumer,
    ):
        for topic, queues in (("wide", 5), ("deep", 1)):
            broker.create_topic(topic, queues)
            for number in range(5):
                producer.send(topic, body, keys="k", queue=number % queues)
        consumer.subscribe("wide")
        consumer.subscribe("deep")
        received: list[librmq.ReceivedMessage] = []
        while len(received) < 10:
            received += consumer.receive(32, invisible=3600, wait=0)
        assert {message.attempt for message in received} == {1}
        assert [message.queue_offset for message in route.messages("deep")] == [0, 1, 2, 3, 4]
        assert [message.queue_offset for message in route.find_by_key("deep", "k")] == [2, 3, 4]


def test_a_damaged_message_becomes_a_dead_letter_at_a_broker_that_compares(tmp_path: Path) -> None:
    """A POP has no field for the time to wait: the broker has its own."""
    clock = Standing()
    runner, listening = ThreadRunner(clock), listen()
    config = librmq.StoreConfig.tiny(store_host=f"127.0.0.1:{listening.getsockname()[1]}")
    with librmq.Broker.open(tmp_path / "s", store_config=config, runner=runner) as broker:
        broker.create_topic("orders", 1)
        with librmq.Producer(broker, "shop") as producer:
            for body in (b"first", b"second"):
                producer.send("orders", body)
        with (tmp_path / "s/commitlog" / f"{0:020}").open("r+b") as log:
            log.seek(log.read().index(b"first"))
            log.write(b"F")
        with (
            RemotingServer(broker, listening=listening) as server,
            librmq.connect(server.address) as route,
            librmq.SimpleConsumer(route, "g") as consumer,
        ):
            consumer.subscribe("orders")
            assert consumer.receive(16, invisible=30, wait=0) == []
            clock.time_ms += 60_000
            assert [message.body for message in consumer.receive(16, invisible=30, wait=0)] == [b"second"]
        (letter,) = broker.dead_letters("g")
        assert "checksum" in letter.properties["DEAD_LETTER_CAUSE"]
    assert runner.shutdown()


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
            known: dict[str, Any] = {"consumer_group": "g", "topic": "orders", "queue_id": -1, "born_time": 0}
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


def test_a_group_in_order_extends_and_acknowledges(served: Served) -> None:
    served.broker.create_topic("orders", 1)
    served.broker.set_group("g", is_ordered=True)
    send(served, b"a")
    with consumer_of(served) as consumer:
        (message,) = consumer.receive(1, invisible=30, wait=0)
        consumer.extend(message, 300)
        extended = message.receipt.split(" ")
        assert int(extended[2]) >= 300_000, "its time counts from the receive"
        consumer.ack(message)
        assert consumer.receive(1, wait=0) == []
        with pytest.raises(ReceiptError):
            consumer.extend(message, 300)
    assert served.broker.tables.progress()["g", "orders"] == {0: 1}


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


# ---- what the gRPC proxy of a broker does for its clients, and a broker does not


def test_a_message_that_is_never_acknowledged_becomes_a_dead_letter(served: Served) -> None:
    served.broker.set_group("g", retry_max_times=1)
    send(served, b"poison")
    with consumer_of(served) as consumer:
        for attempt in (1, 2):
            (message,) = consumer.receive(1, invisible=300, wait=30)
            assert (message.body, message.attempt) == (b"poison", attempt)
            consumer.extend(message, 0)
        until(lambda: consumer.receive(1, wait=0) == [] and served.broker.dead_letters("g") != [])
        assert consumer.receive(1, wait=0) == []
    (letter,) = served.broker.dead_letters("g")
    assert letter.body == b"poison"


def test_the_server_leaves_dead_letters_to_clients_as_a_broker_does(served: Served) -> None:
    served.broker.set_group("g", retry_max_times=0)
    send(served, b"a")
    request = Receive("", "g", "orders", 1, 300_000)
    with RawClient(served.server.port) as client:
        for attempt in (1, 2, 3):
            client.write(encode(pop_frame(request, 0, is_ordered=False)))
            (part,) = read_popped(request, served.broker.name, client.answer()).messages
            assert part.attempt == attempt
            client.write(
                encode(change_frame(ChangeInvisible("g", "orders", part.receipt, 0), Receipt.parse(part.receipt)))
            )
            assert client.answer().code == 0
    assert served.broker.dead_letters("g") == []


def test_a_receipt_whose_time_is_over_is_refused(served: Served) -> None:
    """A broker takes it, and would deliver the message again after its second delivery was acknowledged."""
    send(served, b"a", b"b", b"c")
    with consumer_of(served) as consumer:
        late = [message for _ in range(3) for message in consumer.receive(1, invisible=0.2, wait=0)]
        again = list[librmq.ReceivedMessage]()
        while len(again) < 3:
            again += consumer.receive(3, invisible=300, wait=30)
        with pytest.raises(ReceiptError, match="1 of 1 messages are no longer in flight"):
            consumer.ack(late[0])
        with pytest.raises(ReceiptError, match="its time is over"):
            consumer.extend(late[1], 30)
        with pytest.raises(ReceiptError, match="its time is over"):
            consumer.dead_letter(late[2])
        consumer.ack(*again)
        assert consumer.receive(3, invisible=300, wait=0) == []
    assert served.broker.dead_letters("g") == []


def test_late_receipts_succeed_at_the_server_as_at_a_broker(served: Served) -> None:
    send(served, b"a")
    request = Receive("", "g", "orders", 1, 1)
    with RawClient(served.server.port) as client:
        client.write(encode(pop_frame(request, 0, is_ordered=False)))
        (part,) = read_popped(request, served.broker.name, client.answer()).messages
        receipt = Receipt.parse(part.receipt)
        until(lambda: consumed_again(served))
        for frame in (
            ack_frame("g", "orders", receipt),
            change_frame(ChangeInvisible("g", "orders", part.receipt, 9_000), receipt),
        ):
            client.write(encode(frame))
            assert client.answer().code == 0
        client.write(encode(ack_frame("g", "orders", receipt._replace(queue_offset=7))))
        assert client.answer().code == 208


@pytest.mark.parametrize(("topic", "queue_offset", "code"), [("orders", 1, 208), ("ordres", 0, 17)])
def test_receipts_of_messages_that_no_queue_has_are_refused(
    served: Served, topic: str, queue_offset: int, code: int
) -> None:
    send(served, b"a")
    request = Receive("", "g", "orders", 1, 300_000)
    with RawClient(served.server.port) as client:
        client.write(encode(pop_frame(request, 0, is_ordered=False)))
        (part,) = read_popped(request, served.broker.name, client.answer()).messages
        receipt = Receipt.parse(part.receipt)._replace(queue_offset=queue_offset)
        for frame in (
            ack_frame("g", topic, receipt),
            change_frame(ChangeInvisible("g", topic, part.receipt, 9_000), receipt),
        ):
            client.write(encode(frame))
            assert client.answer().code == code


def consumed_again(served: Served) -> bool:
    with consumer_of(served) as consumer:
        return bool(consumer.receive(1, invisible=300, wait=0))


class Popping:
    """A broker whose clock is a year ahead of its clients', and whose next POP a test gives."""

    AHEAD_MS = 365 * 86_400_000

    def __init__(self) -> None:
        self.records = list[Record]()
        self.server = FakeServer(self._answer)
        self.clock = Standing()
        self.acknowledged = list[str]()
        self.sent_back = list[int]()

    def _answer(self, frame: Frame) -> Frame:
        now_ms = self.clock.now_ms() + self.AHEAD_MS
        if frame.code == RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG:
            return answer_to(frame, body=write_body({"subscriptionGroupTable": {"g": {"retryMaxTimes": 2}}}))
        if frame.code == RequestCode.POP_MESSAGE:
            records, self.records = self.records, []
            if not records:
                return answer_to(frame, 210, "no message")
            fields = {
                "popTime": now_ms,
                "invisibleTime": int(frame.fields["invisibleTime"]),
                "reviveQid": 3,
                "restNum": 0,
            }
            texts = {name: str(value) for name, value in fields.items()}
            begin = {"startOffsetInfo": f"0 0 {records[0].queue_offset}"}
            return answer_to(frame, fields=texts | begin, body=b"".join(map(encode_record, records)))
        if frame.code == RequestCode.ACK_MESSAGE:
            self.acknowledged.append(frame.fields["offset"])
        if frame.code == RequestCode.CONSUMER_SEND_MSG_BACK:
            self.sent_back.append(int(frame.fields["offset"]))
        if frame.code == RequestCode.CHANGE_MESSAGE_INVISIBLETIME:
            changed = {"popTime": str(now_ms), "invisibleTime": frame.fields["invisibleTime"], "reviveQid": "4"}
            return answer_to(frame, fields=changed)
        return answer_to(frame)


def record_of(body: bytes, queue_offset: int, **fields: Any) -> Record:
    known: dict[str, Any] = {"topic": "orders", "body": body, "physical_offset": 1000 * queue_offset}
    made = Record(**{**known, "queue_offset": queue_offset, **fields})
    return replace(made, body_crc=body_checksum(made.body))


@pytest.fixture
def popping() -> Iterator[tuple[Popping, librmq.SimpleConsumer]]:
    made = Popping()
    runner = ThreadRunner(made.clock)
    with (
        made.server,
        librmq.connect(made.server.address, runner=runner) as route,
        librmq.SimpleConsumer(route, "g") as consumer,
    ):
        consumer.subscribe("orders", tags="a")
        yield made, consumer
    assert runner.shutdown()


def test_the_time_of_a_receipt_is_judged_by_the_brokers_clock(popping: tuple[Popping, librmq.SimpleConsumer]) -> None:
    broker, consumer = popping
    broker.records = [record_of(b"1", number, properties_raw=b"TAGS\1a") for number in range(2)]
    first, second = consumer.receive(2, invisible=30, wait=0)
    broker.clock.time_ms += 3_600_000  # as after a laptop's sleep
    broker.clock.passed_s += 29.5
    consumer.ack(first)
    broker.clock.passed_s += 0.5
    with pytest.raises(ReceiptError):
        consumer.ack(second)
    assert broker.acknowledged == ["0"]


def test_a_message_whose_tag_only_has_a_wanted_hash_is_acknowledged(
    popping: tuple[Popping, librmq.SimpleConsumer],
) -> None:
    broker, consumer = popping
    broker.records = [record_of(b"1", 0, properties_raw=b"TAGS\1other"), record_of(b"2", 1, properties_raw=b"TAGS\1a")]
    assert [message.body for message in consumer.receive(2, wait=0)] == [b"2"]
    assert broker.acknowledged == ["0"]


def test_a_batch_is_received_as_its_messages_and_acknowledged_with_the_last(
    popping: tuple[Popping, librmq.SimpleConsumer],
) -> None:
    broker, consumer = popping
    items = [BatchItem(b"%d" % number, 0, b"TAGS\1a\2KEYS\1k-%d" % number) for number in range(3)]
    broker.records = [batch_record(record_of(b"", 4), items)]
    broker.records = [replace(record, body_crc=body_checksum(record.body)) for record in broker.records]
    messages = consumer.receive(8, invisible=30, wait=0)
    assert [(message.body, message.queue_offset, message.keys) for message in messages] == [
        (b"0", 4, ("k-0",)), (b"1", 5, ("k-1",)), (b"2", 6, ("k-2",)),
    ]  # fmt: skip
    consumer.ack(messages[2], messages[0])
    consumer.ack(messages[0])
    assert broker.acknowledged == [], "it would take the rest out of its queue"
    consumer.extend(messages[1], 60)
    broker.clock.time_ms += 59_000
    broker.clock.passed_s += 59
    consumer.ack(messages[1])
    assert broker.acknowledged == ["4"]


def test_a_batch_becomes_one_dead_letter(popping: tuple[Popping, librmq.SimpleConsumer]) -> None:
    broker, consumer = popping
    items = [BatchItem(b"%d" % number, 0, b"TAGS\1a") for number in range(3)]
    record = batch_record(record_of(b"", 4, reconsume_times=3), items)
    broker.records = [replace(record, body_crc=body_checksum(record.body))]
    assert consumer.receive(8, invisible=30, wait=0) == []
    assert (broker.sent_back, broker.acknowledged) == ([4000], ["4"])


class Asking:
    """The receives at a broker that has no messages; ``later`` is what runs soon."""

    def __init__(self) -> None:
        self.clock = ManualClock(0)
        self.later: list[Callable[[], None]] = []
        self.sent: list[Callable[[Frame | RmqError], None]] = []
        self.ends_send: Callable[[], None] | None = None
        self.receives = PopReceives(
            "b",
            self.clock,
            lambda frame: answer_to(frame, 210, "no message"),
            self._send,
            self.later.append,
            lambda call, due_ms: None,
            lambda group: False,
            lambda group: None,
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
    asking.clock.move_to(30_000)
    asking.receive(lambda: woken.append("second"))
    asking.receives.cancel(CancelReceive(cancelled))
    _, answered = asking.sent
    asking.clock.move_to(40_000)
    answered(Frame(0))
    asking.run_later()
    assert woken == ["first", "second"]


# ---- recall


def in_a_while() -> datetime:
    return datetime.fromtimestamp(SystemClock().now_ms() / 1000 + 5000, UTC)  # the length of no delay level


timed = served_with(queues=1)


def test_a_message_with_a_delivery_time_is_recalled(timed: Served) -> None:
    with librmq.Producer(timed.route, "shop") as producer:
        sent = producer.send("orders", b"x", deliver_at=in_a_while())
        assert sent.recall_handle is not None
        assert producer.cancel(sent).cancelled
        assert producer.cancel(sent).cancelled, "a second time"
        frame = Frame(RequestCode.RECALL_MESSAGE, {"topic": "orders", "recallHandle": sent.recall_handle})
        assert timed.route.broker(timed.broker.name).request(frame).fields == {"msgId": sent.message_id}
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
