"""Half messages in a broker: hidden, committed or rolled back, checked, discarded."""

from __future__ import annotations

from typing import Any

import pytest

from librmq.broker import Broker, BrokerConfig
from librmq.config import StoreConfig
from librmq.errors import BrokerError, DiskFullError, RmqError
from librmq.files import MemoryFiles
from librmq.message import Message
from librmq.metrics import Metrics
from librmq.protocol import (
    CheckTransaction,
    EndTransaction,
    Heartbeat,
    PullStatus,
    Request,
    ResponseCode,
    SendMessage,
    SendResponse,
    TransactionState,
)
from librmq.runtime import ManualRunner
from librmq.testing import Kit
from librmq.txn import TransactionConfig
from tests.broker.parties import HOST, Listening, opened, pull, send
from tests.lock_order import elsewhere

COMMIT, ROLLBACK, UNKNOWN = TransactionState.COMMIT, TransactionState.ROLLBACK, TransactionState.UNKNOWN


def prepare(broker: Broker, number: int = 0, topic: str = "T", queue_id: int = 1) -> SendResponse:
    message = Message(topic, b"%d" % number, tags="a", unique_key=f"U{number}", wait_store_ok=True)
    message.properties |= {"TRAN_MSG": "true", "PGROUP": "p"}
    now_ms = broker.runner.now_ms()
    return broker.call(SendMessage("p", message, queue_id, now_ms, HOST, 4))


def end(broker: Broker, half: SendResponse, state: TransactionState, group: str = "p") -> None:
    broker.call(EndTransaction(group, state, half.queue_offset, half.physical_offset, ""))


def producer(broker: Broker, client_id: str) -> Listening:
    client = Listening()
    broker.call(Heartbeat(client_id, client, frozenset({"p"}), ()))
    return client


def bodies(broker: Broker, topic: str = "T") -> list[bytes]:
    return [message.body for message in broker.messages(topic)]


def test_a_half_message_is_seen_once_it_is_committed(broker: Broker) -> None:
    woken: list[int] = []
    half = prepare(broker)
    assert bodies(broker) == []
    assert pull(broker, "T", queue_id=1, notify=lambda: woken.append(1)).status is PullStatus.HELD
    end(broker, half, UNKNOWN)
    assert woken == []
    end(broker, half, COMMIT)
    assert (bodies(broker), woken) == ([b"0"], [1])
    (final,) = broker.messages("T")
    assert (final.queue_id, final.sys_flag, final.prepared_transaction_offset) == (1, 8, half.physical_offset)
    end(broker, half, COMMIT)
    assert bodies(broker) == [b"0"]  # only once


def test_a_message_that_is_sent_again_with_its_id_is_warned_of(
    broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        end(broker, prepare(broker), COMMIT)
    assert bodies(broker) == [b"0"]
    assert [record.message.partition(",")[0] for record in caplog.records if record.levelname == "WARNING"] == [
        "group p: the message of transaction U0 was delivered before"
    ]


def test_producers_are_asked_in_turn_and_their_answer_counts(rmq: Kit, broker: Broker) -> None:
    one, two = producer(broker, "c1"), producer(broker, "c2")
    for number in range(2):
        prepare(broker, number)
    rmq.advance(ms=61_000)
    asked = [*one.heard, *two.heard]
    assert [type(request) for request in asked] == [CheckTransaction] * 2
    assert len(one.heard) == len(two.heard) == 1
    for request in asked:
        assert isinstance(request, CheckTransaction)
        assert (request.group, request.broker_name) == ("p", "broker-a")
        copy = request.message
        assert request.transaction_id == copy.unique_key
        state = COMMIT if copy.body == b"1" else ROLLBACK
        broker.call(EndTransaction("p", state, copy.queue_offset, copy.physical_offset, "", from_check=True))
    assert bodies(broker) == [b"1"]
    rmq.advance(ms=3_600_000)
    assert len(one.heard) + len(two.heard) == 2
    assert rmq.runner.next_due_ms() is None


def test_checks_come_every_minute_from_the_opening_on(rmq: Kit, broker: Broker) -> None:
    """Also if the first half message comes later."""
    client = producer(broker, "c1")
    rmq.advance(ms=50_000)
    prepare(broker)
    rmq.advance(ms=9_999)
    assert not client.heard
    rmq.advance(ms=1)
    assert [type(request) for request in client.heard] == [CheckTransaction]


QUICK = TransactionConfig(interval_s=3, timeout_s=2, check_max=3)


@pytest.mark.rmq(broker_config=BrokerConfig(transactions=QUICK))
def test_a_half_message_is_given_up_after_its_checks(rmq: Kit, broker: Broker) -> None:
    client = producer(broker, "c1")
    prepare(broker)
    rmq.advance(ms=60_000)
    assert [type(request) for request in client.heard] == [CheckTransaction] * 3
    assert bodies(broker, "TRANS_CHECK_MAX_TIME_TOPIC") == [b"0"]
    assert {"TRANS_CHECK_MAX_TIME_TOPIC", "RMQ_SYS_TRANS_HALF_TOPIC"} <= broker.topics().keys()
    assert "RMQ_SYS_TRANS_OP_HALF_TOPIC" not in broker.topics()
    assert rmq.runner.next_due_ms() is None


@pytest.mark.rmq(broker_config=BrokerConfig(transactions=QUICK))
def test_a_check_that_reaches_no_producer_does_not_count(
    rmq: Kit, broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    prepare(broker)
    before = broker.store.log.end
    rmq.advance(ms=3_600_000)
    assert broker.store.log.end == before  # and it writes nothing
    assert [record.getMessage()[:28] for record in caplog.records] == ["producer group p can't be as"]
    client = producer(broker, "c1")
    rmq.advance(ms=3_000 * 3)
    assert len(client.heard) == 3
    assert bodies(broker, "TRANS_CHECK_MAX_TIME_TOPIC") == []
    rmq.advance(ms=3_000)
    assert bodies(broker, "TRANS_CHECK_MAX_TIME_TOPIC") == [b"0"]


@pytest.mark.rmq(broker_config=BrokerConfig(transactions=QUICK))
def test_halves_without_a_producer_delay_no_others(rmq: Kit, broker: Broker) -> None:
    alone = Message("T", b"alone", unique_key="A")
    alone.properties |= {"TRAN_MSG": "true", "PGROUP": "gone"}
    broker.call(SendMessage("gone", alone, 0, rmq.clock.now_ms(), HOST))
    client = producer(broker, "c1")
    prepare(broker)
    rmq.advance(ms=60_000)
    assert len(client.heard) == 3
    assert bodies(broker, "TRANS_CHECK_MAX_TIME_TOPIC") == [b"0"]
    broker.call(Heartbeat("c2", client, frozenset({"p", "gone"}), ()))
    rmq.advance(ms=3_000)
    request = client.heard[-1]
    assert isinstance(request, CheckTransaction)
    assert (request.group, request.message.properties["TRANSACTION_CHECK_TIMES"]) == ("gone", "1")


@pytest.mark.rmq(broker_config=BrokerConfig(transactions=QUICK))
def test_a_refused_check_does_not_count(rmq: Kit, broker: Broker, caplog: pytest.LogCaptureFixture) -> None:
    class Ordinary(Listening):
        def call(self, request: Request[Any], /) -> Any:
            super().call(request)
            raise RmqError("no transaction producer")

    ordinary = Ordinary()
    broker.call(Heartbeat("c1", ordinary, frozenset({"p"}), ()))
    prepare(broker)
    rmq.advance(ms=60_000)
    assert len(ordinary.heard) > 10
    assert bodies(broker, "TRANS_CHECK_MAX_TIME_TOPIC") == []
    assert len(caplog.records) == 1
    other = producer(broker, "c2")
    rmq.advance(ms=3_000)
    assert len(other.heard) == 1


@pytest.mark.rmq(broker_config=BrokerConfig(transactions=QUICK))
def test_a_producer_that_fails_in_a_check_ends_no_check(
    rmq: Kit, broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    class Fails(Listening):
        def call(self, request: Request[Any], /) -> Any:
            super().call(request)
            raise RuntimeError("cannot schedule new futures after shutdown")

    client = Fails()
    broker.call(Heartbeat("c1", client, frozenset({"p"}), ()))
    for number in range(2):
        prepare(broker, number)
    rmq.advance(ms=60_000)
    assert len(client.heard) == 6
    assert "cannot schedule new futures" in caplog.text
    assert bodies(broker, "TRANS_CHECK_MAX_TIME_TOPIC") == [b"0", b"1"]


def test_a_half_message_outlives_its_broker(rmq: Kit) -> None:
    half, other = prepare(rmq.broker), prepare(rmq.broker, 1)
    end(rmq.broker, half, COMMIT)
    rmq.crash_broker()
    client = producer(rmq.broker, "c1")
    rmq.advance(seconds=121)
    (request,) = client.heard[:1]
    assert isinstance(request, CheckTransaction)
    assert request.message.body == b"1"
    end(rmq.broker, other, COMMIT)
    rmq.advance(minutes=1)
    assert sorted(bodies(rmq.broker)) == [b"0", b"1"]


def expired(broker: Broker) -> None:
    """Let retention delete everything in the log."""
    store = broker.store
    end = store.log.end
    while store.log.end - end < 2 * store.config.commitlog_file_size:
        send(broker, "filling", bytes(1000))
    store.flush()
    store.writer.retention.delete_before(
        end - end % store.config.commitlog_file_size + store.config.commitlog_file_size
    )
    assert store.log.begin >= end


@pytest.mark.parametrize("state", [COMMIT, ROLLBACK])
@pytest.mark.parametrize("has_metrics", [False, True])
def test_the_end_of_a_deleted_half_is_refused(state: TransactionState, has_metrics: bool) -> None:
    """Retention has deleted the half."""
    files, runner = MemoryFiles(), ManualRunner()
    broker = opened(files, runner)
    half, other = prepare(broker), prepare(broker, 1)
    broker.close()
    settings = StoreConfig.tiny(keep_unconsumed=False)
    metrics = Metrics() if has_metrics else None
    with Broker.open("/b", files=files, runner=runner, store_config=settings, metrics=metrics) as again:
        expired(again)
        before = again.store.log.end
        for one in (half, other):
            with pytest.raises(BrokerError, match="Find prepared transaction message failed") as caught:
                end(again, one, state)
            assert caught.value.code == ResponseCode.SYSTEM_ERROR
        assert again.store.log.end == before
        assert bodies(again) == []
        runner.advance(200_000)  # the check continues after the deleted half
        late = prepare(again, 2)
        end(again, late, COMMIT)
        assert bodies(again) == [b"2"]


@pytest.mark.rmq(store_config=StoreConfig.tiny(keep_unconsumed=False))
def test_a_message_is_seen_though_its_half_then_expires(broker: Broker) -> None:
    """Pulls are notified of a message even if retention deletes its half at that moment."""
    woken: list[int] = []
    half = prepare(broker)
    assert pull(broker, "T", queue_id=1, notify=lambda: woken.append(1)).status is PullStatus.HELD
    again = broker.store.copies.append_again

    def taken(*arguments: Any, **fields: Any) -> Any:
        result = again(*arguments, **fields)
        with elsewhere():
            expired(broker)
        return result

    broker.store.copies.append_again = taken  # type: ignore[method-assign]
    end(broker, half, COMMIT)
    assert broker.store.message_at(half.physical_offset) is None
    assert woken == [1]


def test_a_delivered_message_is_seen_though_the_end_fails(rmq: Kit, broker: Broker) -> None:
    """Pulls are notified of a delivered message even if the end of the transaction fails afterwards."""
    woken: list[int] = []
    half = prepare(broker)
    assert pull(broker, "T", queue_id=1, notify=lambda: woken.append(1)).status is PullStatus.HELD
    append, store = broker.store.append, broker.store

    def refuse(message: Message, *arguments: Any, **fields: Any) -> Any:
        if message.topic == "RMQ_SYS_TRANS_OP_HALF_TOPIC":
            raise DiskFullError("full")
        return append(message, *arguments, **fields)

    store.append = refuse  # type: ignore[method-assign]
    with pytest.raises(BrokerError) as caught:
        end(broker, half, COMMIT)
    assert caught.value.code == ResponseCode.SERVICE_NOT_AVAILABLE
    store.append = append  # type: ignore[method-assign]
    assert (bodies(broker), woken) == ([b"0"], [1])
    end(broker, half, COMMIT)  # repeated
    assert bodies(broker) == [b"0"]
    rmq.advance(ms=3_600_000)
    assert bodies(broker, "TRANS_CHECK_MAX_TIME_TOPIC") == []
