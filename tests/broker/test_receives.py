"""Receives with an invisible time: delivery, acknowledgement and redelivery."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from librmq import (
    Broker,
    BrokerConfig,
    BrokerError,
    ClientStateError,
    ConfigError,
    ConsumeFrom,
    ManualClock,
    ManualRunner,
    MessageIllegalError,
    NoRouteError,
    Producer,
    PullConsumer,
    PushConsumer,
    ReceiptError,
    RmqError,
    SimpleConsumer,
    StoreConfig,
    StoreError,
)
from librmq.broker._offsets import TableWriter
from librmq.broker.handlers._receive import ReceiveHandler
from librmq.broker.long_polling import Deadlines, HeldRequests
from librmq.errors import GroupBehindError
from librmq.files import DiskFiles
from librmq.message.ids import IN_ORDER, Receipt
from librmq.protocol import Acknowledge, CancelReceive, ChangeInvisible, Receive, Received, SendBack, Subscription
from librmq.store import MessageStore, verify
from librmq.testing import Kit


@pytest.fixture
def broker(rmq: Kit) -> Broker:
    rmq.broker.create_topic("t", 1)
    return rmq.broker


def send(broker: Broker, *bodies: str, tags: str | None = None) -> None:
    with Producer(broker, "p") as producer:
        for body in bodies:
            producer.send("t", body, tags=tags)


def receive(broker: Broker, most: int = 32, invisible_ms: int = 10_000, **more: object) -> list[Received]:
    return list(broker.call(Receive("c", "g", "t", most, invisible_ms, **more)).messages)  # type: ignore[arg-type]


def bodies(found: list[Received]) -> list[str]:
    return [one.message.body.decode() for one in found]


def test_message_is_hidden_and_becomes_visible_again(rmq: Kit, broker: Broker) -> None:
    send(broker, "a", "b")
    first = receive(broker)
    assert bodies(first) == ["a", "b"]
    rmq.advance(seconds=9.999)
    assert receive(broker) == []
    rmq.advance(seconds=0.001)
    again = receive(broker)
    assert [(one.attempt, one.stored_topic, one.message.topic) for one in again] == [(2, *["%RETRY%g_t"] * 2)] * 2
    assert [one.message.properties["1ST_POP_TIME"] for one in again] == [first[0].receipt.split(" ")[1]] * 2
    assert again[0].message.born_timestamp_ms == first[0].message.born_timestamp_ms


def test_receipt_is_good_until_its_time_is_over(rmq: Kit, broker: Broker) -> None:
    send(broker, "a", "b")
    a, b = receive(broker)
    assert broker.call(Acknowledge("g", "t", (a.receipt,))) == (True,)
    assert broker.call(Acknowledge("g", "t", (a.receipt,))) == (True,)
    rmq.advance(seconds=10)
    assert broker.call(Acknowledge("g", "t", (a.receipt, b.receipt))) == (False, False)
    with pytest.raises(ReceiptError, match="no longer in flight"):
        broker.call(ChangeInvisible("g", "t", b.receipt, 1000))


@pytest.mark.parametrize(
    "text", ["", "x", "1 2 3", "0 1 2 0 0 other-broker 0 0 0", "0 1 2 0 0 broker-a 0 -1 0", "é " * 9]
)
def test_text_that_is_not_a_receipt_is_refused(broker: Broker, text: str) -> None:
    assert broker.call(Acknowledge("g", "t", (text,))) == (False,)
    with pytest.raises(ReceiptError, match="is not a receipt"):
        broker.call(ChangeInvisible("g", "t", text, 1000))


@pytest.mark.parametrize("broker_name", ["broker-a", "a broker with blanks"])
def test_receipt_is_read_back(broker_name: str) -> None:
    receipt = Receipt(0, 1, 2, IN_ORDER, "0", broker_name, 3, 4, 5)
    assert Receipt.parse(str(receipt)) == receipt


def test_change_moves_the_time_and_gives_a_new_receipt(rmq: Kit, broker: Broker) -> None:
    send(broker, "a")
    (a,) = receive(broker)
    rmq.advance(seconds=5)
    receipt = broker.call(ChangeInvisible("g", "t", a.receipt, 20_000))
    assert receipt != a.receipt
    assert broker.call(Acknowledge("g", "t", (a.receipt,))) == (True,)  # an old receipt has no effect
    rmq.advance(seconds=19.999)
    assert receive(broker) == []
    rmq.advance(seconds=0.001)
    assert [one.attempt for one in receive(broker)] == [2]


def test_message_is_dead_after_the_retries_of_its_group(rmq: Kit, broker: Broker) -> None:
    broker.set_group("g", retry_max_times=2)
    send(broker, "a")
    attempts = []
    for _ in range(5):
        attempts += [one.attempt for one in receive(broker)]
        rmq.advance(seconds=10)
    assert attempts == [1, 2, 3]
    (letter,) = rmq.dead_letters("g")
    assert letter.body == b"a"


def test_receives_take_queues_in_turn(rmq: Kit) -> None:
    rmq.broker.create_topic("t", 4)
    with Producer(rmq.route, "p") as producer:
        for number in range(40):
            producer.send("t", str(number))
    queues = [[one.message.queue_id for one in receive(rmq.broker, 5)] for _ in range(4)]
    assert sorted(found[0] for found in queues) == [0, 1, 2, 3]


def test_tags_are_exact_and_others_are_passed(broker: Broker) -> None:
    send(broker, "a", tags="AaAa")
    send(broker, "b", tags="BBBB")  # has the same hash
    send(broker, "c", tags="AaAa")
    found = receive(broker, subscription=Subscription("t", "AaAa"))
    assert bodies(found) == ["a", "c"]
    broker.call(Acknowledge("g", "t", tuple(one.receipt for one in found)))
    assert broker.consumer_offset("g", "t", 0) == 3


def test_join_waits_for_messages_that_are_visible_again(rmq: Kit, broker: Broker) -> None:
    send(broker, "a")
    with SimpleConsumer(broker, "g") as consumer:
        consumer.subscribe("t")
        consumer.receive(invisible=10, wait=0)
        with pytest.raises(GroupBehindError, match="group g: 1 messages of t/0"):
            broker.join(timeout=1)
        rmq.advance(seconds=10)
        with pytest.raises(GroupBehindError, match="group g: 1 messages of %RETRY%g_t/0"):
            broker.join(timeout=1)
        consumer.ack(*consumer.receive(invisible=10, wait=0))
        broker.join(timeout=1)


@pytest.mark.parametrize("attempts", [1, 2])
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("running", [False, True])
def test_dead_letters_sent_again_are_received(
    rmq: Kit, broker: Broker, attempts: int, ordered: bool, running: bool
) -> None:
    broker.set_group("g", is_ordered=ordered)
    send(broker, "a")
    with SimpleConsumer(broker, "g") as consumer:
        consumer.subscribe("t")
        for _ in range(attempts):
            rmq.advance(seconds=10)
            (message,) = consumer.receive(invisible=10, wait=0)
        consumer.dead_letter(message, "no address")
        sent = [broker.resend_dead_letters("g") for _ in range(2)] if running else []
    sent = sent or [broker.resend_dead_letters("g") for _ in range(2)]
    assert sent == [1, 0]
    assert (broker.lag("g"), "g_t" in broker.groups()) == (1, False)
    with SimpleConsumer(broker, "g") as consumer:
        consumer.subscribe("t")
        (again,) = consumer.receive(wait=0)
        assert (again.body, again.topic, again.attempt) == (b"a", "t", 1)
        consumer.ack(again)
    assert broker.lag("g") == 0


# ---- in order


@pytest.fixture
def in_order(broker: Broker) -> Broker:
    broker.set_group("g", retry_max_times=3, is_ordered=True)
    return broker


def test_queue_in_order_waits_for_its_messages(rmq: Kit, in_order: Broker) -> None:
    send(in_order, "a", "b", "c")
    a, b = receive(in_order, 2)
    assert receive(in_order, 2) == []
    in_order.call(Acknowledge("g", "t", (a.receipt,)))
    assert receive(in_order, 2) == []
    in_order.call(Acknowledge("g", "t", (b.receipt,)))
    assert bodies(receive(in_order, 2)) == ["c"]
    assert ("%RETRY%g_t", 0) not in in_order.store.queues


def test_a_group_that_becomes_ordered_gets_its_earlier_retries(rmq: Kit, broker: Broker) -> None:
    send(broker, "a")
    receive(broker)
    rmq.advance(seconds=10)
    broker.set_group("g", retry_max_times=2, is_ordered=True)
    for attempt in (2, 3):
        (a,) = receive(broker)
        assert (a.message.body, a.attempt, receive(broker)) == (b"a", attempt, [])
        rmq.advance(seconds=10)
    assert receive(broker) == []
    assert [letter.body for letter in broker.dead_letters("g")] == [b"a"]


def test_queue_in_order_is_read_again_from_the_first(rmq: Kit, in_order: Broker) -> None:
    send(in_order, "a", "b", "c", "d")
    _, b, _ = receive(in_order, 3)
    in_order.call(Acknowledge("g", "t", (b.receipt,)))
    rmq.advance(seconds=10)
    again = receive(in_order, 4)
    assert [(one.message.body, one.attempt) for one in again] == [(b"a", 2), (b"b", 2), (b"c", 2), (b"d", 1)]
    in_order.call(Acknowledge("g", "t", (again[0].receipt, again[2].receipt)))
    assert in_order.consumer_offset("g", "t", 0) == 1


def test_repeated_attempt_in_order_gets_the_same(in_order: Broker) -> None:
    send(in_order, "a", "b")
    first = receive(in_order, 1, attempt_id="one")
    assert receive(in_order, 1, attempt_id="one") == first
    assert receive(in_order, 1, attempt_id="two") == []


def test_acknowledged_message_behind_a_failing_one_is_dead_with_it(rmq: Kit, in_order: Broker) -> None:
    """So does 5.3.3, whose proxy counts the deliveries of both."""
    send(in_order, "a", "b", "c")
    for _ in range(4):
        _, b = receive(in_order, 2)
        assert in_order.call(Acknowledge("g", "t", (b.receipt,))) == (True,)
        rmq.advance(seconds=10)
    assert [(one.message.body, one.attempt) for one in receive(in_order, 3)] == [(b"c", 1)]
    assert [letter.body for letter in rmq.dead_letters("g")] == [b"a", b"b"]


# ---- held


@pytest.mark.parametrize("most", [0, 1])
def test_message_stored_while_a_receive_is_being_held_ends_it(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    hold, woken = HeldRequests.hold_receive, list[int]()

    def send_first(*arguments: object) -> None:
        send(broker, "a")
        hold(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(HeldRequests, "hold_receive", send_first)
    answer = broker.call(Receive("c", "g", "t", most, notify=lambda: woken.append(1)))
    assert (len(answer.messages), answer.is_held, woken) == ((1, False, []) if most else (0, True, [1]))


def test_cancelled_receive_is_not_woken(rmq: Kit, broker: Broker) -> None:
    woken: list[int] = []

    def notify() -> None:
        woken.append(1)

    assert broker.call(Receive("c", "g", "t", notify=notify)).is_held
    broker.call(CancelReceive(notify))
    send(broker, "a")
    assert woken == []


def test_two_receives_of_a_client_are_both_woken(broker: Broker) -> None:
    woken: list[str] = []
    for name in ("one", "two"):
        assert broker.call(Receive("c", "g", "t", notify=lambda name=name: woken.append(name))).is_held  # type: ignore[misc]
    send(broker, "a")
    assert sorted(woken) == ["one", "two"]


def test_held_receive_in_order_is_woken_when_all_is_done(rmq: Kit, in_order: Broker) -> None:
    send(in_order, "a", "b")
    a, b = receive(in_order)
    in_order.call(ChangeInvisible("g", "t", a.receipt, 0))
    rmq.advance(ms=1)
    woken: list[int] = []
    request = Receive("c", "g", "t", notify=lambda: woken.append(1))
    assert in_order.call(request).is_held
    in_order.call(Acknowledge("g", "t", (b.receipt,)))
    assert woken == [1]
    assert bodies(list(in_order.call(request).messages)) == ["a", "b"]


def test_held_receive_is_woken_when_a_full_queue_has_room(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("librmq.broker.handlers._receive.MAX_IN_FLIGHT", 2)
    send(broker, "a", "b", "c")
    a, _ = receive(broker)
    woken: list[int] = []
    request = Receive("c", "g", "t", notify=lambda: woken.append(1))
    assert broker.call(request).is_held
    assert broker.call(request).is_held
    (record,) = caplog.records
    assert "group g has received 2 messages of topic t, queue 0, without acknowledging them" in record.getMessage()
    broker.call(Acknowledge("g", "t", (a.receipt,)))
    assert woken == [1]
    assert bodies(list(broker.call(request).messages)) == ["c"]


def test_receive_reads_on_behind_many_others(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A receive is not held while unread messages remain, because no new message might arrive to end the hold."""
    monkeypatch.setattr("librmq.broker.handlers._receive._READS_WITHOUT_MESSAGE", 1)
    send(broker, *["other"] * 2000, tags="other")
    send(broker, "wanted", tags="wanted")
    with SimpleConsumer(broker, "g") as consumer:
        consumer.subscribe("t", tags="wanted")
        assert [message.body for message in consumer.receive()] == [b"wanted"]


def test_broken_queue_hides_no_messages_of_another(rmq: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    broker = rmq.broker
    broker.create_topic("t", 2)
    with Producer(broker, "p") as producer:
        for queue in producer.queues("t"):
            producer.send("t", "a", queue=queue)
    read = broker.store.read

    def fails_once(topic: str, queue_id: int, *rest: object, **options: object) -> object:
        if queue_id == 1:
            raise StoreError("queue 1 is broken")
        return read(topic, queue_id, *rest, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(broker.store, "read", fails_once)
    found = []
    for _ in range(2):  # each receive starts at a different queue
        with suppress(RmqError):
            found += receive(broker)
    assert [one.message.queue_id for one in found] == [0]


# ---- life


def test_flights_survive_a_restart_in_a_file_of_their_own(tmp_path: Path) -> None:
    runner = ManualRunner(ManualClock(1_700_000_000_000))
    broker = Broker.open(tmp_path / "b", runner=runner, store_config=StoreConfig.tiny())
    broker.create_topic("t", 1)
    send(broker, "a", "b", "c")
    a, b = receive(broker, 2)
    broker.close()
    broker = Broker.open(tmp_path / "b", runner=runner)
    assert bodies(receive(broker)) == ["c"]
    assert broker.call(Acknowledge("g", "t", (a.receipt,))) == (True,)
    runner.advance(10_000)
    assert sorted(bodies(receive(broker))) == ["b", "c"]
    assert broker.call(Acknowledge("g", "t", (b.receipt,))) == (False,)
    broker.close()
    assert not verify(tmp_path / "b").damage


def test_the_close_waits_for_a_save_of_what_is_in_flight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_end = threading.Event(), threading.Event()
    overlaps: list[str] = []

    class Held(DiskFiles):
        """Files that hold the first write of what is in flight."""

        def write(self, path: str, data: bytes | Iterable[bytes]) -> None:
            if "groups.saved" in path:
                if begun.is_set() and not may_end.is_set():
                    overlaps.append(path)
                    may_end.set()
                begun.set()
                may_end.wait()
            super().write(path, data)

    end_writing = TableWriter.end_writing

    def end(writer: TableWriter, why: str) -> None:
        may_end.set()
        end_writing(writer, why)

    monkeypatch.setattr(TableWriter, "end_writing", end)
    with (
        Broker.open(tmp_path, BrokerConfig(save_offsets_every_s=0.01), files=Held()) as broker,
        Producer(broker, "p") as producer,
        SimpleConsumer(broker, "g") as consumer,
    ):
        consumer.subscribe("T")
        producer.send("T", b"1")
        producer.send("T", b"2")
        consumer.receive(1)
        assert begun.wait(20)
        consumer.receive(1)
    assert not overlaps


@pytest.mark.parametrize("is_acknowledged_first", [True, False])
def test_order_survives_a_restart(tmp_path: Path, is_acknowledged_first: bool) -> None:
    runner = ManualRunner(ManualClock(1_700_000_000_000))
    broker = Broker.open(tmp_path / "b", runner=runner, store_config=StoreConfig.tiny())
    broker.create_topic("t", 1)
    broker.set_group("g", is_ordered=True)
    send(broker, "a", "b", "c")
    _, b, _ = receive(broker)
    broker.call(Acknowledge("g", "t", (b.receipt,)))
    runner.advance(10_000)
    (a,) = receive(broker, 1)
    if is_acknowledged_first:
        broker.call(Acknowledge("g", "t", (a.receipt,)))
    broker.close()
    with Broker.open(tmp_path / "b", runner=runner) as broker:
        if not is_acknowledged_first:
            broker.call(Acknowledge("g", "t", (a.receipt,)))
        assert [(one.message.body, one.attempt) for one in receive(broker)] == [(b"b", 2), (b"c", 2)]


@pytest.mark.parametrize("content", [None, b"", b"{", bytes(10_000)])
def test_messages_in_flight_come_again_without_the_file(tmp_path: Path, content: bytes | None) -> None:
    runner = ManualRunner(ManualClock(1_700_000_000_000))
    broker = Broker.open(tmp_path / "b", runner=runner, store_config=StoreConfig.tiny())
    broker.create_topic("t", 1)
    send(broker, "a", "b")
    (a,) = receive(broker, 1)
    broker.close()
    place = tmp_path / "b" / "librmq" / "groups.saved"
    assert place.stat().st_size
    if content is None:
        place.unlink()
    else:
        place.write_bytes(content)
    with Broker.open(tmp_path / "b", runner=runner) as broker:
        assert broker.call(Acknowledge("g", "t", (a.receipt,))) == (False,)  # because it comes again
        assert bodies(receive(broker)) == ["a", "b"]


@pytest.mark.parametrize("is_acknowledged", [True, False])
def test_reset_of_the_group_outlasts_messages_in_flight(rmq: Kit, broker: Broker, is_acknowledged: bool) -> None:
    send(broker, "a", "b", "c")
    a, b, _ = receive(broker)
    broker.call(Acknowledge("g", "t", (a.receipt,)))
    broker.reset_group("g", "t", 0)
    if is_acknowledged:
        assert broker.call(Acknowledge("g", "t", (b.receipt,))) == (False,)
    else:
        rmq.advance(seconds=10)
    assert broker.consumer_offset("g", "t", 0) == 0
    assert bodies(receive(broker)) == ["a", "b", "c"]
    assert ("%RETRY%g_t", 0) not in broker.store.queues


def test_reset_to_a_message_in_flight_delivers_what_was_acknowledged_behind_it(broker: Broker) -> None:
    send(broker, "a", "b")
    _, b = receive(broker)
    broker.call(Acknowledge("g", "t", (b.receipt,)))
    assert broker.consumer_offset("g", "t", 0) == 0
    broker.reset_group("g", "t", 0)
    assert bodies(receive(broker)) == ["a", "b"]


def test_letters_are_not_sent_to_a_group_that_pulls(broker: Broker) -> None:
    """It reads no retry topic, so they would be noted as sent, and read by no consumer."""
    send(broker, "a")
    consumer = PullConsumer(broker, "g", consume_from=ConsumeFrom.FIRST)
    consumer.subscribe("t")
    with consumer:
        broker.call(SendBack("g", consumer.poll(0)[0].physical_offset, -1, 0))
        with pytest.raises(BrokerError, match="group 'g' pulls, and reads no retries"):
            broker.resend_dead_letters("g")


def test_times_of_finished_messages_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    due: list[Deadlines[Any]] = []
    make = ReceiveHandler.__init__

    def noting(self: ReceiveHandler, *parts: Any) -> None:
        make(self, *parts)
        due.append(self._visible)

    monkeypatch.setattr(ReceiveHandler, "__init__", noting)
    with Broker.temporary(runner=ManualRunner(ManualClock(1_700_000_000_000))) as broker:
        broker.create_topic("t", 1)
        for _ in range(40):
            send(broker, *["a"] * 32)
            found = receive(broker, invisible_ms=12 * 3_600_000)
            broker.call(Acknowledge("g", "t", tuple(one.receipt for one in found)))
        send(broker, "last")
        (last,) = receive(broker)
        receipt = last.receipt
        for milliseconds in range(2000):
            receipt = broker.call(ChangeInvisible("g", "t", receipt, 10_000 + milliseconds))
        assert len(due[0]) == 1
        broker.runner.advance(12_000)  # type: ignore[attr-defined]
        assert [one.attempt for one in receive(broker)] == [2]


class Adjusted(ManualClock):
    ahead_ms = 0

    def now_ms(self) -> int:
        return super().now_ms() + self.ahead_ms

    def move_to(self, now_ms: int) -> None:
        super().move_to(now_ms - self.ahead_ms)


def test_clock_set_back_hides_no_longer_than_asked() -> None:
    clock = Adjusted(1_700_000_000_000)
    runner = ManualRunner(clock)
    with Broker.temporary(runner=runner) as broker:
        broker.create_topic("t", 1)
        send(broker, "a")
        receive(broker, invisible_ms=10_000)
        clock.ahead_ms = -3_600_000
        assert receive(broker) == []
        runner.advance(10_000)
        assert [one.attempt for one in receive(broker)] == [2]


def test_a_group_without_order_at_a_fifo_topic_is_named_once(broker: Broker, caplog: pytest.LogCaptureFixture) -> None:
    broker.create_topic("steps", 1, message_type="FIFO")
    broker.set_group("ordered", is_ordered=True)
    with caplog.at_level(logging.WARNING):
        for group, topic in (("g", "steps"), ("g", "t"), ("ordered", "steps"), ("g", "steps")):
            broker.call(Receive("c", group, topic, 32, 10_000))
    (warning,) = caplog.records
    assert "topic steps is of type FIFO, and group g receives from it without order" in warning.getMessage()


def test_group_that_also_pulls_is_named_once(rmq: Kit, broker: Broker, caplog: pytest.LogCaptureFixture) -> None:
    consumer = PushConsumer(rmq.route, "g")
    consumer.subscribe("t", lambda message: None)
    consumer.start()
    with caplog.at_level(logging.WARNING):
        receive(broker)
        receive(broker)
    assert [record.getMessage() for record in caplog.records if "both move one progress" in record.getMessage()] != []
    assert len(caplog.records) == 1
    consumer.shutdown()


@pytest.mark.parametrize(
    ("request_", "match"),
    [
        (Receive("c", "g", "missing"), "'missing' does not exist"),
        (Receive("c", "g", "t", 0), "max_messages: expected 1 to 32, found 0"),
        (Receive("c", "g", "t", 33), "max_messages: expected 1 to 32, found 33"),
        (Receive("c", "g", "t", 1, 0), "invisible_ms: expected 1 to 43200000, found 0"),
        (Receive("c", "g" * 119, "t"), "together have more than 119 bytes"),
        (Receive("c", "g", "t", subscription=Subscription("t", "a >", "SQL92")), "topic 't'"),
    ],
)
@pytest.mark.rmq(store_config=StoreConfig(enable_property_filter=True))
def test_refused_receive_says_why(broker: Broker, request_: Receive, match: str) -> None:
    with pytest.raises((BrokerError, MessageIllegalError), match=match):
        broker.call(request_)


# ---- the consumer


def test_consumer_receives_extends_and_acknowledges(rmq: Kit, broker: Broker) -> None:
    send(broker, "a", "b", "c")
    with SimpleConsumer(broker, "g") as consumer:
        consumer.subscribe("t")
        a, b, c = consumer.receive(invisible=30)
        consumer.ack(a)
        consumer.extend(b, 60)
        consumer.dead_letter(c, "not wanted")
        rmq.advance(seconds=59)
        assert consumer.receive() == []
        rmq.advance(seconds=1)
        (again,) = consumer.receive()
        assert (again.topic, again.body, again.attempt, again.reconsume_times) == ("t", b"b", 2, 1)
    assert [letter.body for letter in rmq.dead_letters("g")] == [b"c"]


def test_a_consumer_without_a_message_is_notified_once(rmq: Kit, broker: Broker) -> None:
    broker.create_topic("u", 1)
    notes: list[str] = []
    with SimpleConsumer(broker, "g") as consumer:
        consumer.subscribe("t")
        consumer.subscribe("u")
        for topic in ("t", "u"):
            assert consumer.receive_or_notify(topic, 1, partial(notes.append, topic)) == []
        send(broker, "a", "b")
        assert notes == ["t"]
        (message,) = consumer.receive_or_notify("t", 1, lambda: notes.append("t"), invisible=10)
        (other,) = consumer.receive_or_notify("t", 1, lambda: notes.append("t"), invisible=600)
        assert consumer.receive_or_notify("t", 1, lambda: notes.append("again")) == []
        rmq.advance(seconds=10)
        assert "again" in notes, "it was not acknowledged in its time"
        consumer.ack(other)
        (message,) = consumer.receive_or_notify("t", 1, lambda: notes.append("t"))
        assert (message.body, message.attempt) == (b"a", 2)
        consumer.unsubscribe("u")
        with pytest.raises(ClientStateError, match="no subscription of u"):
            consumer.receive_or_notify("u", 1, lambda: None)
        consumer.subscribe("missing")
        with pytest.raises(NoRouteError, match="topic 'missing' has no queue to read"):
            consumer.receive_or_notify("missing", 1, lambda: None)
    assert notes.count("again") == 1


def test_a_receive_acknowledges_before_it_looks_for_messages(broker: Broker) -> None:
    broker.create_topic("u", 1)
    broker.set_group("g", is_ordered=True)
    send(broker, "a", "b")
    with SimpleConsumer(broker, "g") as consumer:
        consumer.subscribe("t")
        consumer.subscribe("u")
        (first,) = consumer.receive_or_notify("t", 1, lambda: None)
        (second,) = consumer.receive_or_notify("t", 1, lambda: None, acknowledge=[first])
        assert (first.body, second.body) == (b"a", b"b")
        assert broker.lag("g", "t") == 1
        assert consumer.receive_or_notify("u", 1, lambda: None, acknowledge=[second, first]) == []
        assert broker.lag("g", "t") == 0


@pytest.mark.parametrize("topic", ["t", "u"])
def test_a_receive_warns_of_what_it_acknowledges_too_late(
    rmq: Kit, broker: Broker, caplog: pytest.LogCaptureFixture, topic: str
) -> None:
    """It receives all the same: the messages are done, and a second try would be late too."""
    broker.create_topic("u", 1)
    send(broker, "a", "b")
    with SimpleConsumer(broker, "g") as consumer:
        consumer.subscribe("t")
        consumer.subscribe("u")
        late, done = consumer.receive(2, invisible=10)
        consumer.extend(done, 100)
        rmq.advance(seconds=10)
        rmq.producer().send(topic, b"next")
        messages = consumer.receive_or_notify(topic, 32, lambda: None, acknowledge=[late, done])
        assert b"next" in [message.body for message in messages]
        assert f"1 of 2 messages are no longer in flight, first {late.message_id}" in caplog.text
        rmq.advance(seconds=100)
        again = [message.body for message in consumer.receive_or_notify("t", 32, lambda: None)]
        assert b"a" in again
        assert b"b" not in again


def test_a_renewed_message_can_be_acknowledged_by_its_first_receipt(rmq: Kit, broker: Broker) -> None:
    send(broker, "a")
    with SimpleConsumer(broker, "g") as consumer:
        consumer.subscribe("t")
        (message,) = consumer.receive(invisible=10)
        receipt = message.receipt
        for _ in range(5):
            rmq.advance(seconds=6)
            consumer.renew(message, 10)
            assert consumer.receive(wait=0) == []
        assert message.receipt == receipt
        consumer.ack(message)
        with pytest.raises(ReceiptError):
            consumer.renew(message, 10)
        with pytest.raises(ReceiptError, match=r"were acknowledged before, or .* Acknowledge each once"):
            consumer.ack(message)
        rmq.advance(seconds=60)
        assert consumer.receive(wait=0) == []


@pytest.mark.parametrize("ordered", [False, True])
def test_an_extension_by_zero_is_visible_to_the_next_receive(broker: Broker, ordered: bool) -> None:
    broker.set_group("g", is_ordered=ordered)
    send(broker, "a")
    with SimpleConsumer(broker, "g") as consumer:
        consumer.subscribe("t")
        for attempt in (1, 2, 3):
            (message,) = consumer.receive(wait=0)
            assert message.attempt == attempt
            consumer.extend(message, 0)


def test_an_extension_by_zero_is_visible_on_real_time() -> None:
    with Broker.temporary() as broker, SimpleConsumer(broker, "g") as consumer:
        broker.create_topic("t", 1)
        consumer.subscribe("t")
        send(broker, "a")
        (message,) = consumer.receive()
        for _ in range(14):
            consumer.extend(message, 0)
            (message,) = consumer.receive(wait=0)
        assert message.attempt == 15


def test_names_without_room_for_a_retry_topic_are_refused_by_subscribe(broker: Broker) -> None:
    """`receive` refused them, after the consumer had joined. A group in order has no retry topic."""
    group, topic = "g" * 60, "t" * 60
    broker.create_topic(topic, 1)
    with SimpleConsumer(broker, group) as consumer:
        with pytest.raises(MessageIllegalError, match=r"together have more than 119 bytes.* make the group ordered"):
            consumer.subscribe(topic)
        consumer.subscribe(topic[1:])
        assert consumer.receive(wait=0) == []
        broker.set_group(group, is_ordered=True)
        consumer.subscribe(topic)
        with Producer(broker, "p") as producer:
            producer.send(topic, "a")
        assert [message.body for message in consumer.receive(wait=0)] == [b"a"]


def test_late_acknowledgement_names_the_message(rmq: Kit, broker: Broker) -> None:
    send(broker, "a", "b")
    with SimpleConsumer(broker, "g") as consumer:
        consumer.subscribe("t")
        a, b = consumer.receive(invisible=1)
        consumer.extend(b, 60)
        rmq.advance(seconds=1)
        with pytest.raises(ReceiptError, match=f"1 of 2 messages are no longer in flight, first {a.message_id}"):
            consumer.ack(a, b)
        assert broker.consumer_offset("g", "t", 0) == 2


def test_consumer_waits_for_a_topic_and_a_message() -> None:
    with Broker.temporary() as broker, SimpleConsumer(broker, "g") as consumer:
        consumer.subscribe("t")
        threading.Thread(target=send, args=(broker, "a")).start()
        (message,) = consumer.receive(wait=30)
        consumer.ack(message)


def test_shutdown_ends_a_receive_that_waits() -> None:
    with Broker.temporary() as broker:
        broker.create_topic("t", 1)
        consumer = SimpleConsumer(broker, "g").start()
        consumer.subscribe("t")
        threading.Thread(target=consumer.shutdown).start()
        with suppress(ClientStateError):  # the shutdown may come first, so that the receive is refused
            assert consumer.receive(wait=30) == []


def test_consumer_receives_from_several_topics(rmq: Kit, broker: Broker) -> None:
    broker.create_topic("u", 1)
    with Producer(broker, "p") as producer:
        for number in range(3):
            producer.send("t", f"t{number}")
            producer.send("u", f"u{number}")
    with SimpleConsumer(broker, "g") as consumer:
        consumer.subscribe("t")
        consumer.subscribe("u")
        found = [message.body for _ in range(6) for message in consumer.receive(1)]
    assert sorted(found) == [b"t0", b"t1", b"t2", b"u0", b"u1", b"u2"]


def test_misuse_of_the_consumer_says_what_to_do(broker: Broker) -> None:
    consumer = SimpleConsumer(broker, "g")
    with pytest.raises(ClientStateError, match=r"receive .* a running one"):
        consumer.receive()
    consumer.start()
    with pytest.raises(ClientStateError, match=r"call subscribe\(topic\) first"):
        consumer.receive()
    with pytest.raises(ConfigError, match="expected tags or sql"):
        consumer.subscribe("t", tags="a", sql="b = 1")
    consumer.shutdown()
    consumer.shutdown()


def test_store_after_receives_is_one_of_rocketmq(tmp_path: Path) -> None:
    """The store has only the records that 5.x writes for its users: messages, redeliveries, dead letters."""
    runner = ManualRunner(ManualClock(1_700_000_000_000))
    broker = Broker.open(tmp_path / "b", runner=runner, store_config=StoreConfig.tiny())
    broker.create_topic("t", 1)
    broker.set_group("g", retry_max_times=1)
    send(broker, "a", "b")
    for _ in range(4):
        receive(broker)
        runner.advance(10_000)
    broker.close()
    with MessageStore.open(tmp_path / "b", read_only=True) as store:
        assert [(message.topic, message.body, message.reconsume_times) for message in store] == [
            ("t", b"a", 0),
            ("t", b"b", 0),
            ("%RETRY%g_t", b"a", 1),
            ("%RETRY%g_t", b"b", 1),
            ("%RETRY%g_t", b"a", 2),
            ("%RETRY%g_t", b"b", 2),
            ("%DLQ%g", b"a", 3),
            ("%DLQ%g", b"b", 3),
        ]


def test_mistakes_of_a_simple_consumer_are_named(broker: Broker) -> None:
    with SimpleConsumer(broker, "g") as consumer:
        consumer.subscribe("T")
        broker.create_topic("T", 1)
        with Producer(broker, "p") as producer:
            producer.send("T", b"x")
        for invisible in (0, 43_201):
            with pytest.raises(ConfigError, match=r"^invisible: .* from 0\.001 to 43200\.0"):
                consumer.receive(invisible=invisible)
        messages = consumer.receive(wait=0)
        with pytest.raises(ConfigError, match=r"^invisible: .* from 0 to 43200\.0"):
            consumer.extend(messages[0], 43_201)
        with pytest.raises(TypeError, match=r"ack: expected received messages, as in .* ack\(\*messages\)"):
            consumer.ack(messages)  # type: ignore[arg-type]
        consumer.ack(*messages)


def test_processes_that_die_after_an_opening_leave_one_copy(tmp_path: Path) -> None:
    clock = ManualClock()

    def opened() -> tuple[Broker, ManualRunner]:
        runner = ManualRunner(clock)
        return Broker.open(tmp_path, runner=runner, store_config=StoreConfig.tiny()), runner

    broker, runner = opened()
    broker.create_topic("t", 1)
    send(broker, *"abc")
    received = receive(broker)
    runner.advance(6_000)  # what is in flight is saved
    broker.call(Acknowledge("g", "t", (received[0].receipt,)))
    broker.abandon()
    clock.advance(minutes=1)
    for _ in range(5):
        broker, runner = opened()
        runner.advance(1_000)
        broker.abandon()
    broker, runner = opened()
    runner.advance(10_000)
    assert sorted(bodies(receive(broker))) == ["b", "c"]  # the acknowledgement of the other one is kept
    broker.close()


@pytest.mark.parametrize("restarts", [False, True])
def test_a_message_that_a_reset_delivers_again_is_stored_again_after_a_kill(tmp_path: Path, restarts: bool) -> None:
    runner = ManualRunner()
    broker = Broker.open(tmp_path, runner=runner)
    broker.create_topic("t", 1)
    send(broker, "a")
    receive(broker)
    runner.advance(10_000)
    (copy,) = receive(broker)
    broker.call(Acknowledge("g", "t", (copy.receipt,)))
    runner.advance(6_000)
    if restarts:
        broker.reset_group("g", "t", "begin")
        runner.advance(6_000)
    broker.abandon()
    broker = Broker.open(tmp_path, runner=runner)
    if not restarts:
        broker.reset_group("g", "t", "begin")
    assert [(received.attempt, received.message.topic) for received in receive(broker)] == [(1, "t")]
    runner.advance(10_000)
    assert [received.attempt for received in receive(broker)] == [2]
    broker.close()


@pytest.mark.parametrize("receives_first", [True, False])
def test_a_group_that_pulls_and_one_that_receives_share_no_retry_topic(
    rmq: Kit, broker: Broker, caplog: pytest.LogCaptureFixture, receives_first: bool
) -> None:
    """Messages of topic ``t`` that group ``g`` receives again are in the retry topic of a group ``g_t``."""
    send(broker, "a")
    consumer = PushConsumer(broker, "g_t")
    consumer.subscribe("u", lambda message: None)
    if receives_first:
        assert len(receive(broker)) == 1
    with consumer:
        if receives_first:
            rmq.advance(minutes=1)
            assert [one.attempt for one in receive(broker)] == [2]
            assert "retry topic '%RETRY%g_t' belongs to group 'g', which receives" in caplog.text
        else:
            with pytest.raises(BrokerError, match="retry topic '%RETRY%g_t' belongs to group 'g_t'"):
                receive(broker)


def test_a_retry_topic_belongs_to_its_group_after_a_restart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The group that has its name has come first, but the messages in it are another group's."""
    runner = ManualRunner()
    broker = Broker.open(tmp_path, runner=runner)
    broker.create_topic("t", 1)
    send(broker, "a")
    receive(broker)
    runner.advance(10_000)
    broker.close()
    with Broker.open(tmp_path, runner=runner) as broker:
        consumer = PushConsumer(broker, "g_t")
        consumer.subscribe("u", lambda message: None)
        with consumer:
            assert "retry topic '%RETRY%g_t' belongs to group 'g', which receives" in caplog.text
            assert [received.attempt for received in receive(broker)] == [2]
