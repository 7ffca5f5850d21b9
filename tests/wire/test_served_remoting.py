"""The fixture `rmq_remoting`: clients of 4.x, at a broker whose clock and faults the test has in its hands."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import Any

import pytest

import librmq
from librmq.clock import SystemClock
from librmq.message.message import StoredMessage
from librmq.protocol import ResponseCode
from librmq.runtime.locks import Lock
from librmq.runtime.runner import Step
from librmq.testing import _served as served_module
from librmq.testing._served import NotSettledError, ServedKit
from librmq.wire.remoting._headers import RequestCode as Code
from tests.wire.remoting_client import RawClient


def port_of(served: ServedKit) -> int:
    """Return the port for clients of 4.x."""
    return int(served.address.rpartition(":")[2])


class PushClient:
    """A push consumer of one queue, reduced to what it says: it pulls, consumes, and commits with its next pull."""

    def __init__(self, served: ServedKit, group: str, topic: str, *, fails: bool = False) -> None:
        self._client = RawClient(port_of(served))
        self._group, self._fails = group, fails
        self.seen: list[tuple[bytes, int]] = []
        self._topics = topic, f"%RETRY%{group}"
        self._ended = threading.Event()
        self._lock = Lock()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> PushClient:
        self._client.beat("c-1", self._group, topics=self._topics)
        self._thread.start()
        return self

    def _run(self) -> None:
        with suppress(OSError):  # the connection can end between an answer and the next pull
            self._consume()

    def _consume(self) -> None:
        asked: dict[int, str] = {}
        offsets = dict.fromkeys(self._topics, 0)
        for topic in self._topics:
            asked[self._pull(topic, 0)] = topic
        while not self._ended.is_set():
            try:
                answer = self._client.answer()
            except AssertionError:  # the connection has ended
                return
            if answer.opaque not in asked:
                continue
            topic = asked.pop(answer.opaque)
            raw = answer.body
            while raw:
                one = StoredMessage(raw[: int.from_bytes(raw[:4], "big")])
                raw = raw[one.size :]
                self.seen.append((one.body, one.reconsume_times))
                if self._fails:
                    self._client.send(
                        Code.CONSUMER_SEND_MSG_BACK, offset=one.physical_offset, group=self._group, delay_level=0
                    )
            offsets[topic] = int(answer.fields.get("nextBeginOffset", offsets[topic]))
            asked[self._pull(topic, offsets[topic])] = topic

    def _pull(self, topic: str, offset: int) -> int:
        fields: dict[str, Any] = {"sys_flag": 3, "commit_offset": offset} if offset else {}
        return self._client.pull(self._group, topic, offset, 15_000, **fields)

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._client.close()
        self._thread.join(30)


@pytest.fixture
def client(rmq_remoting: ServedKit) -> Iterator[RawClient]:
    rmq_remoting.kit.broker.create_topic("t", 1)
    with RawClient(port_of(rmq_remoting)) as made:
        yield made


def test_hours_of_retries_pass_as_the_test_moves_the_clock(rmq_remoting: ServedKit, client: RawClient) -> None:
    with PushClient(rmq_remoting, "g", "t", fails=True) as consumer:
        client.put("t", b"x")
        rmq_remoting.settle()
        assert consumer.seen == [(b"x", 0)]
        rmq_remoting.advance(seconds=9.999)
        assert consumer.seen == [(b"x", 0)]
        rmq_remoting.advance(hours=8)
        assert consumer.seen == [(b"x", number) for number in range(17)]
        assert [letter.body for letter in rmq_remoting.kit.dead_letters("g")] == [b"x"]


def test_settling_waits_for_progress(rmq_remoting: ServedKit, client: RawClient) -> None:
    with PushClient(rmq_remoting, "g", "t"):
        for _ in range(20):
            client.put("t", b"x")
        rmq_remoting.settle()
        assert rmq_remoting.kit.broker.consumer_offset("g", "t") == 20
    assert {one.outcome for one in rmq_remoting.kit.delivered("g")} == {"returned"}


def test_a_consumer_that_does_not_pull_is_reported(
    rmq_remoting: ServedKit, client: RawClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_module, "_WAIT_S", 0.05)
    client.beat("c", "g", topics=("t",))
    client.put("t", b"x")
    with pytest.raises(NotSettledError, match="were not settled"):
        rmq_remoting.settle()
    assert rmq_remoting.kit.delivered("g") == []


def test_faults_reach_clients_of_4x(rmq_remoting: ServedKit, client: RawClient) -> None:
    faults = rmq_remoting.kit.faults
    faults.lose_answer("t")
    assert client.put("t", b"stored").code == 14
    faults.refuse_send("t", busy=True)
    assert client.put("t", b"refused").code == 2
    assert [one.body for one in rmq_remoting.kit.messages("t")] == [b"stored"]


def test_a_late_answer_comes_when_the_clock_is_moved(rmq_remoting: ServedKit, client: RawClient) -> None:
    rmq_remoting.kit.faults.late_answer(5, "t")
    waiting = threading.Thread(target=client.put, args=("t", b"x"), daemon=True)
    waiting.start()
    looked = threading.Event()
    while not rmq_remoting.kit.messages("t"):
        looked.wait(0.001)
    rmq_remoting.advance(seconds=4)
    assert waiting.is_alive()
    rmq_remoting.advance(seconds=2)
    waiting.join(60)
    assert not waiting.is_alive()


class Noticed:
    """A runner's lock that notices when a thread has to wait for it."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self.is_waited_for = threading.Event()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self.is_waited_for.set()
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_time_stands_still_between_a_message_and_its_fault(
    rmq_remoting: ServedKit, client: RawClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message is stored and visible, and a thread of the server is about to find that its answer is late."""
    faults, runner, is_stored = rmq_remoting.kit.faults, rmq_remoting.kit.runner, threading.Event()
    lock, take = Noticed(runner.lock), faults.take_delay_s
    monkeypatch.setattr(runner, "lock", lock)

    def take_later(*arguments: Any) -> float:
        is_stored.set()
        assert lock.is_waited_for.wait(60)
        return take(*arguments)

    monkeypatch.setattr(faults, "take_delay_s", take_later)
    faults.late_answer(5, "t")
    with ThreadPoolExecutor(1) as threads:
        sent = threads.submit(client.put, "t", b"x")
        assert is_stored.wait(60)
        rmq_remoting.advance(seconds=4)
        lock.is_waited_for.set()
        rmq_remoting.advance(seconds=2)
        assert sent.result(60).code == 0
    assert len(rmq_remoting.kit.messages("t")) == 1


def test_a_wake_up_by_a_thread_of_the_server_is_not_lost(
    rmq_remoting: ServedKit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step is among those that wait, and not marked as due yet."""
    kit, is_waking, ran = rmq_remoting.kit, threading.Event(), list[int]()
    kit.run_until_idle()
    lock = Noticed(kit.runner.lock)
    monkeypatch.setattr(kit.runner, "lock", lock)

    class Slow(Step):
        def __setattr__(self, name: str, value: object) -> None:
            if name == "at" and value is not None:
                is_waking.set()
                assert lock.is_waited_for.wait(60)
            super().__setattr__(name, value)

    def wake() -> None:
        with kit.runner.lock:
            kit.runner.wake(Slow("slow", ran.append))

    waking = threading.Thread(target=wake)
    waking.start()
    assert is_waking.wait(60)
    kit.advance(seconds=1)
    lock.is_waited_for.set()
    waking.join(60)
    kit.advance(seconds=1)
    assert len(ran) == 1


def test_a_cut_and_a_crash_lose_nothing(rmq_remoting: ServedKit, client: RawClient) -> None:
    client.put("t", b"one")
    port = port_of(rmq_remoting)
    rmq_remoting.cut_connections()
    assert client.has_ended()
    rmq_remoting.crash_broker()
    with RawClient(port) as again:
        assert again.put("t", b"two").fields["msgId"].startswith(f"7F000001{port:08X}")
    assert [one.body for one in rmq_remoting.kit.messages("t")] == [b"one", b"two"]


@pytest.mark.parametrize("fault", ["cut_connections", "crash_broker"])
def test_clients_are_awaited_after_a_fault(
    rmq_remoting: ServedKit, client: RawClient, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.beat("worker-7", "g", topics=("t",))
    client.beat("shop-7", producers=("p",))
    getattr(rmq_remoting, fault)()
    with RawClient(port_of(rmq_remoting)) as again, monkeypatch.context() as patched:
        patched.setattr(served_module, "_BACK_S", 0.05)
        again.beat("shop-7", producers=("p",))
        for call in rmq_remoting.settle, partial(rmq_remoting.advance, hours=1):
            with pytest.raises(NotSettledError, match=r"not back within 0\.05 s after the fault: worker-7\."):
                call()
        again.send(Code.UNREGISTER_CLIENT, clientID="worker-7", consumer_group="g")
        rmq_remoting.settle()


@pytest.mark.slow
def test_a_worker_that_connects_again_gets_what_was_sent(rmq_remoting: ServedKit) -> None:
    rmq_remoting.kit.broker.create_topic("t", 1)
    seen: list[bytes] = []
    with librmq.connect(rmq_remoting.address) as route:
        consumer = librmq.PushConsumer(route, "g", consume_from=librmq.ConsumeFrom.FIRST)
        consumer.subscribe("t", lambda message: seen.append(message.body))
        with consumer, librmq.Producer(route, "p") as producer:
            producer.send("t", b"before")
            rmq_remoting.settle()
            rmq_remoting.crash_broker(down=20)
            rmq_remoting.advance(seconds=20)
            producer.send("t", b"after")
            rmq_remoting.settle()
            assert seen[-1] == b"after"


@pytest.mark.parametrize("has_born_time", [True, False])
@pytest.mark.parametrize("code", [Code.SEND_MESSAGE, Code.SEND_MESSAGE_V2])
def test_a_delay_counts_from_the_born_time(
    rmq_remoting: ServedKit, client: RawClient, code: Code, has_born_time: bool
) -> None:
    rmq_remoting.kit.broker.create_topic("later", 1)
    rmq_remoting.advance(hours=8)
    now_ms = SystemClock().now_ms()
    fields: dict[str, Any] = {"producer_group": "p", "default_topic": "TBW102", "default_topic_queue_nums": 4}
    fields |= {"queue_id": 0, "sys_flag": 0, "born_timestamp": now_ms if has_born_time else 0, "flag": 0}
    properties = f"TIMER_DELIVER_MS\1{now_ms + 600_000}\2UNIQ_KEY\1u"
    assert client.call(code, b"x", topic="later", properties=properties, **fields).code == 0
    rmq_remoting.advance(minutes=9)
    assert rmq_remoting.kit.messages("later") == []
    rmq_remoting.advance(minutes=1, seconds=1)
    assert [one.body for one in rmq_remoting.kit.messages("later")] == [b"x"]


def test_a_time_of_delivery_with_too_many_digits_is_refused(rmq_remoting: ServedKit, client: RawClient) -> None:
    rmq_remoting.kit.broker.create_topic("later", 1)
    fields: dict[str, Any] = {"producer_group": "p", "default_topic": "TBW102", "default_topic_queue_nums": 4}
    fields |= {"queue_id": 0, "sys_flag": 0, "born_timestamp": 1, "flag": 0}
    properties = f"TIMER_DELIVER_MS\1{'9' * 5_000}\2UNIQ_KEY\1u"
    answer = client.call(Code.SEND_MESSAGE_V2, b"x", topic="later", properties=properties, **fields)
    assert answer.code == ResponseCode.MESSAGE_ILLEGAL
    assert answer.remark is not None
    assert re.fullmatch("TIMER_DELIVER_MS: .{1,200}", answer.remark)


def test_a_time_of_delivery_of_librmqs_own_client_counts_from_its_send(rmq_remoting: ServedKit) -> None:
    rmq_remoting.kit.broker.create_topic("later", 1)
    rmq_remoting.advance(hours=8)
    due = datetime.fromtimestamp(SystemClock().now_ms() / 1000 + 600, UTC)
    with librmq.connect(rmq_remoting.address) as route, librmq.Producer(route, "p") as producer:
        for number in range(3):  # from the second on, the server knows the form of the header
            producer.send("later", str(number), deliver_at=due)
    rmq_remoting.advance(minutes=9)
    assert rmq_remoting.kit.messages("later") == []
    rmq_remoting.advance(minutes=1, seconds=1)
    assert sorted(one.body for one in rmq_remoting.kit.messages("later")) == [b"0", b"1", b"2"]


def test_warnings_name_the_fixture(rmq_remoting: ServedKit, client: RawClient) -> None:
    client.put("t", b"x")
    assert rmq_remoting.kit.undelivered() == ["no group subscribes to 't': 1 message is in it"]
    client.beat("c", "g", topics=("t",))
    assert rmq_remoting.kit.undelivered() == [
        "g got nothing of 't': 1 message is not delivered yet: end the test with rmq_remoting.settle() or "
        "rmq_remoting.advance(…)"
    ]
    assert rmq_remoting.kit.delivered("g") == []


def test_a_check_is_awaited(rmq_remoting: ServedKit, client: RawClient) -> None:
    client.beat("c", producers=("p",))
    client.put("t", b"x", "TRAN_MSG\1true\2PGROUP\1p\2UNIQ_KEY\1u", sys_flag=4)

    def answer() -> None:
        asked = client.asked(Code.CHECK_TRANSACTION_STATE)
        fields = {"from_transaction_check": True, "commit_or_rollback": 8, "producer_group": "p"}
        offsets = {"tran_state_table_offset": int(asked.fields["tranStateTableOffset"])}
        offsets["commit_log_offset"] = int(asked.fields["commitLogOffset"])
        client.call(Code.END_TRANSACTION, **fields, **offsets)

    checking = threading.Thread(target=answer, daemon=True)
    checking.start()
    rmq_remoting.advance(minutes=2)
    checking.join(60)
    assert [one.body for one in rmq_remoting.kit.messages("t")] == [b"x"]


def test_the_history_shows_pulls_and_progress(rmq_remoting: ServedKit, client: RawClient) -> None:
    with PushClient(rmq_remoting, "g", "t"):
        client.put("t", b"a")
        rmq_remoting.settle()
    lines = [line.what for line in rmq_remoting.kit.history()]
    wanted = ["sends t/0:0 b'a'", "gets t/0:0 b'a'", "is done (t/0:0)"]
    assert [line for line in lines if line in wanted] == wanted


@pytest.mark.slow
def test_librmqs_own_client_keeps_up_with_the_moved_clock(rmq_remoting: ServedKit) -> None:
    """Over TCP, with a lost answer and a listener that fails: hours of retries pass, and nothing is lost."""
    rmq_remoting.kit.broker.create_topic("t", 2)
    seen: list[int] = []
    with librmq.connect(rmq_remoting.address) as route:
        consumer = librmq.PushConsumer(route, "g", consume_from=librmq.ConsumeFrom.FIRST)

        @consumer.subscribe("t")
        def fail(message: librmq.DeliveredMessage) -> None:
            seen.append(message.reconsume_times)
            raise librmq.ReconsumeLater

        with consumer, librmq.Producer(route, "p") as producer:
            rmq_remoting.kit.faults.lose_answer("t")
            producer.send("t", b"x")
            rmq_remoting.advance(hours=8)
    assert sorted(seen) == sorted([*range(17)] * 2)
    assert len({letter.unique_key for letter in rmq_remoting.kit.dead_letters("g")}) == 1
    assert len(rmq_remoting.kit.dead_letters("g")) == 2
