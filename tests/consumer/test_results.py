"""What listeners return: what other clients call a failure is one, and what says nothing is consumed with a warning."""

from __future__ import annotations

import enum
import logging
import sys
import threading
from pathlib import Path

import pytest

import librmq
from librmq import Broker, ClientStateError, ConfigError, Producer, PullConsumer, PushConsumer, StoreConfig, share
from librmq.consumer import DeliveredMessage
from librmq.dedup import DedupListener
from librmq.idempotence import MemoryDedupStore
from librmq.testing import Kit


class ConsumeResult(enum.Enum):
    SUCCESS = 0
    FAILURE = 1


class ConsumeStatus(enum.IntEnum):
    CONSUME_SUCCESS = 0
    RECONSUME_LATER = 1


FAILURES = [ConsumeResult.FAILURE, ConsumeStatus.RECONSUME_LATER, "RECONSUME_LATER", "SUSPEND"]


@pytest.mark.parametrize("result", FAILURES, ids=str)
@pytest.mark.parametrize("orderly", [False, True])
def test_a_failure_of_another_client_is_delivered_again(rmq: Kit, result: object, orderly: bool) -> None:
    answers = [result, None]
    rmq.consumer("billing", orderly=orderly).subscribe("orders", lambda message: answers.pop(0))
    rmq.producer().send("orders", "o-1")
    rmq.advance(minutes=1)
    assert [attempt.body for attempt in rmq.delivered("billing")] == [b"o-1"] * 2


@pytest.mark.parametrize("result", FAILURES, ids=str)
@pytest.mark.parametrize("as_list", [False, True])
def test_a_guard_takes_it_as_a_failure_too(rmq: Kit, result: object, as_list: bool) -> None:
    answers = [result, None]

    def bill(messages: object) -> object:
        return answers.pop(0)

    guard = DedupListener(bill, MemoryDedupStore(clock=rmq.clock), group="billing", batch=as_list)
    rmq.consumer("billing", batch_size=4 if as_list else 1).subscribe("orders", guard)
    rmq.producer().send("orders", "o-1")
    rmq.advance(minutes=1)
    assert answers == []


async def later(message: object) -> str:
    return "RECONSUME_LATER"


def test_a_coroutine_s_failure_becomes_a_dead_letter_with_its_cause(rmq: Kit) -> None:
    rmq.consumer("billing", max_reconsume_times=1).subscribe("orders", later)
    rmq.producer().send("orders", "o-1")
    rmq.advance(minutes=1)
    (letter,) = rmq.dead_letters("billing")
    assert "the listener returned RECONSUME_LATER" in str(letter.properties)


@pytest.mark.parametrize("result", [False, "done", 7, ConsumeResult.SUCCESS], ids=str)
def test_any_other_result_is_consumed_with_one_warning(
    rmq: Kit, result: object, caplog: pytest.LogCaptureFixture
) -> None:
    rmq.consumer("billing").subscribe("orders", lambda message: result)
    for body in ("o-1", "o-2", "o-3"):
        rmq.producer().send("orders", body)
    rmq.advance(minutes=1)
    assert len(rmq.delivered("billing")) == 3
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "returned" in warning.message
    assert "counts as consumed" in warning.message


@pytest.mark.parametrize("result", [None, True])
def test_what_says_consumed_is_not_warned_of(rmq: Kit, result: object, caplog: pytest.LogCaptureFixture) -> None:
    rmq.consumer("billing").subscribe("orders", lambda message: result)
    rmq.consumer("stock", batch_size=2).subscribe("orders", lambda messages: len(messages) - 1)
    rmq.producer().send("orders", "o-1")
    rmq.advance(minutes=1)
    assert not caplog.records


def test_where_a_listener_must_return_true_false_is_a_failure(rmq: Kit, caplog: pytest.LogCaptureFixture) -> None:
    answers = [False, True]
    rmq.consumer("billing").subscribe("orders", lambda message: answers.pop(0), must_return=True)
    rmq.producer().send("orders", "o-1")
    rmq.advance(minutes=1)
    assert answers == []
    assert "counts as consumed" not in caplog.text


def test_a_failure_within_a_run_of_a_fast_listener_ends_no_other_message() -> None:
    done: list[int] = []
    failed: set[int] = set()
    all_done = threading.Event()

    def listen(message: DeliveredMessage) -> object:
        number = int(message.body)
        if number % 500 == 0 and number not in failed:
            failed.add(number)
            return "FAILURE"
        done.append(number)
        if len(done) == 2_000:
            all_done.set()
        return None

    levels = StoreConfig(message_delay_level="1s " * 18)
    with Broker.temporary(store_config=levels) as broker, Producer(broker) as producer:
        for number in range(2_000):
            producer.send("orders", f"{number}")
        consumer = PushConsumer(broker, "billing", start_at="first")
        consumer.subscribe("orders", listen)
        with consumer:
            assert all_done.wait(60)
    assert sorted(done) == list(range(2_000))
    assert failed == {0, 500, 1_000, 1_500}


# ---- words that lead on


def test_settings_of_a_subscription_are_refused_with_their_place(rmq: Kit) -> None:
    with pytest.raises(ConfigError, match=r"batch: a setting of each subscription.*give it to subscribe"):
        PushConsumer(rmq.route, "billing", batch=True)  # type: ignore[call-arg]


def test_a_near_keyword_of_a_message_is_named(rmq: Kit) -> None:
    with pytest.raises(TypeError, match=r"tag: .*did you mean tags\?"):
        rmq.producer().send("orders", "o-1", tag="new")  # type: ignore[call-arg]


def test_the_error_of_a_listener_says_how_a_test_gets_retries() -> None:
    def fail(message: object) -> None:
        raise OSError("down")

    with Kit(check=False) as kit:
        kit.consumer("billing").subscribe("orders", fail)
        kit.producer().send("orders", "o-1")
        with pytest.raises(OSError, match="down") as caught:
            kit.run_until_idle()
        assert "fail_fast=False" in " ".join(caught.value.__notes__)


# ---- a listener that closes what runs it


def test_a_listener_that_shuts_its_consumer_down_gets_the_remedy(rmq: Kit) -> None:
    errors: list[str] = []
    consumer = rmq.consumer("billing")

    @consumer.subscribe("orders")
    def stop(message: object) -> None:
        with pytest.raises(ClientStateError) as caught:
            consumer.shutdown()
        errors.append(str(caught.value))

    rmq.producer().send("orders", "o-1")
    rmq.run_until_idle()
    assert "can't shut down in its own listener" in errors[0]
    assert "set an event" in errors[0]


@pytest.mark.parametrize("what", ["shutdown", "shutdown_async", "close"])
def test_a_coroutine_that_closes_what_runs_it_gets_the_remedy(what: str) -> None:
    errors: list[str] = []
    done = threading.Event()
    with Broker.temporary() as broker, Producer(broker) as producer:
        consumer = PushConsumer(broker, "billing", start_at="first")

        @consumer.subscribe("orders")
        async def stop(message: object) -> None:
            try:
                if what == "close":
                    broker.close()
                elif what == "shutdown":
                    consumer.shutdown()
                else:
                    await consumer.shutdown_async()
            except ClientStateError as error:
                errors.append(str(error))
            done.set()

        producer.send("orders", "o-1")
        with consumer:
            assert done.wait(30)
    assert "set an event there" in errors[0]


@pytest.mark.parametrize("is_coroutine", [False, True])
def test_a_listener_that_closes_the_share_that_runs_it_gets_the_remedy(tmp_path: Path, is_coroutine: bool) -> None:
    errors: list[str] = []
    done = threading.Event()
    with share(tmp_path / "store") as shared, Producer(shared) as producer:
        consumer = PushConsumer(shared, "billing", start_at="first")

        def stop(message: object) -> None:
            try:
                shared.close()
            except ClientStateError as error:
                errors.append(str(error))
            done.set()

        async def stop_async(message: object) -> None:
            stop(message)

        consumer.subscribe("orders", stop_async if is_coroutine else stop)
        producer.send("orders", "o-1")
        with consumer:
            assert done.wait(30)
        assert producer.send("orders", "o-2").queue.topic == "orders"
    assert "a listener can't close the share" in errors[0]
    assert "set an event there" in errors[0]


@pytest.mark.skipif(sys.platform == "win32", reason="no Unix domain sockets with credentials")
def test_a_poll_that_does_not_wait_finds_what_is_there_in_a_peer_too(tmp_path: Path) -> None:
    with librmq.share(tmp_path) as owner, librmq.share(tmp_path) as peer, Producer(owner) as producer:
        queue = producer.send("orders", "0").queue
        with PullConsumer(peer, "billing") as consumer:
            consumer.assign([queue])
            consumer.seek_to_begin(queue)
            for number in range(1, 40):
                assert [message.body for message in consumer.poll(timeout=0)] == [f"{number - 1}".encode()]
                producer.send("orders", f"{number}", queue=queue)
