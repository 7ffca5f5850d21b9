"""Transaction producers: deliveries, when the local transaction runs, and which producer is checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from librmq.broker import Broker, BrokerConfig
from librmq.client import CheckedMessage, TransactionProducer
from librmq.client.producer import Producer
from librmq.consumer import PushConsumer
from librmq.errors import BrokerUnreachableError, ClientError, ConfigError, MessageIllegalError
from librmq.message.message import Message
from librmq.message.topics import SystemTopic
from librmq.protocol import EndTransaction, Route, SendMessage, SendStatus, TransactionState
from librmq.runtime import ManualRunner
from librmq.testing import Kit
from librmq.txn import TransactionConfig
from tests.client.test_producer import Cluster
from tests.wrapped_route import WrappedRoute

COMMIT, ROLLBACK, UNKNOWN = TransactionState.COMMIT, TransactionState.ROLLBACK, TransactionState.UNKNOWN
MINUTE = 60_000


class Shop:
    """A broker, a consumer of topic T, and a record of what happened."""

    def __init__(self, broker: Broker) -> None:
        assert isinstance(broker.runner, ManualRunner)
        self.broker, self.runner = broker, broker.runner
        self.route: Route = broker
        self.delivered: list[bytes] = []
        self.checked: list[tuple[bytes, int]] = []
        self.answers: dict[bytes, Any] = {}
        broker.create_topic("T", 1)
        consumer = PushConsumer(broker, group="readers")
        consumer.subscribe("T")(lambda message: self.delivered.append(message.body))
        consumer.start()

    def check(self, message: CheckedMessage) -> Any:
        assert message.topic == "T"
        self.checked.append((message.body, message.check_times))
        answer = self.answers.get(message.body)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def producer(self, **settings: Any) -> TransactionProducer:
        return TransactionProducer(self.route, "shop", self.check, **settings)

    def topic(self, name: str) -> list[bytes]:
        return [message.body for message in self.broker.messages(name)]


@pytest.fixture
def shop() -> Iterator[Shop]:
    with Broker.temporary(runner=ManualRunner()) as broker:
        yield Shop(broker)


def says(state: Any) -> Callable[[Message, Any], Any]:
    return lambda message, arg: state


def fails(message: Message, arg: Any) -> TransactionState:
    raise ValueError("the database is gone")


def test_a_committed_message_is_delivered_and_no_other(shop: Shop) -> None:
    producer = shop.producer()
    for body, said in ((b"yes", COMMIT), (b"no", ROLLBACK), (b"?", UNKNOWN), (b"None", None)):
        result = producer.send_in_transaction(Message("T", body), execute=says(said))
        assert result.sent.status is SendStatus.SEND_OK
    failed = producer.send_in_transaction(Message("T", b"failed"), execute=fails)
    assert failed.state is UNKNOWN
    shop.runner.advance(1000)
    assert shop.delivered == [b"yes"]
    assert len(shop.topic(SystemTopic.HALF)) == 5
    assert shop.topic(SystemTopic.OP) == [b"0", b"1"]


def test_the_local_transaction_sees_message_and_argument(shop: Shop) -> None:
    seen: list[Any] = []

    def execute(message: Message, arg: Any) -> TransactionState:
        seen.append((message.topic, message.body, message.unique_key, arg))
        return COMMIT

    result = shop.producer(execute=execute).send_in_transaction(Message("T", b"x"), {"id": 7})
    assert seen == [("T", b"x", result.sent.message_id, {"id": 7})]


def test_a_block_commits_or_rolls_back(shop: Shop) -> None:
    producer = shop.producer()
    with producer.transaction(Message("T", b"well")):
        pass
    with pytest.raises(ValueError, match="badly"), producer.transaction(Message("T", b"badly")):
        raise ValueError("badly")
    with producer.transaction(Message("T", b"taken back")) as opened:
        opened.rollback()
    with producer.transaction(Message("T", b"left open")) as opened:
        opened.unknown()
    shop.runner.advance(1000)
    assert shop.delivered == [b"well"]
    shop.answers[b"left open"] = COMMIT
    shop.runner.advance(2 * MINUTE)
    assert shop.delivered == [b"well", b"left open"]
    assert shop.checked == [(b"left open", 1)]


def test_unknown_outcomes_are_checked_until_discarded(shop: Shop) -> None:
    discarded: list[tuple[bytes, int]] = []
    shop.broker.discard_hooks.append(lambda half, times: discarded.append((half.body, times)))
    producer = shop.producer()
    producer.send_in_transaction(Message("T", b"later"), execute=says(UNKNOWN))
    producer.send_in_transaction(Message("T", b"never"), execute=says(UNKNOWN))
    shop.answers[b"never"] = ValueError("no answer")
    shop.runner.advance(3 * MINUTE)
    shop.answers[b"later"] = COMMIT
    shop.runner.advance(60 * MINUTE)
    assert shop.delivered == [b"later"]
    assert [times for body, times in shop.checked if body == b"never"] == list(range(1, 16))
    assert discarded == [(b"never", 15)]
    assert shop.topic(SystemTopic.CHECK_MAX_TIME) == [b"never"]


def test_a_producer_made_after_a_restart_is_asked(shop: Shop) -> None:
    """The producer joined only with its first send, so its halves were discarded without a check (issue 14, 1.14)."""
    with shop.producer(execute=says(UNKNOWN)) as before:
        before.send_in_transaction(Message("T", b"sent before"))
    shop.answers[b"sent before"] = COMMIT
    after = shop.producer()
    shop.runner.advance(3 * MINUTE)
    assert shop.delivered == [b"sent before"]
    after.shutdown()


def test_any_producer_of_the_group_is_asked_in_turn(shop: Shop) -> None:
    asked: list[str] = []
    first = TransactionProducer(shop.broker, "shop", lambda message: asked.append("first"))
    second = TransactionProducer(shop.broker, "shop", lambda message: asked.append("second"))
    other = TransactionProducer(shop.broker, "others", lambda message: asked.append("other"))
    for producer in (first, second, other):
        producer.start()
    first.send_in_transaction(Message("T", b"x"), execute=says(UNKNOWN))
    shop.runner.advance(5 * MINUTE)
    assert asked[:4] in (["first", "second"] * 2, ["second", "first"] * 2)
    second.shutdown()
    asked.clear()
    shop.runner.advance(3 * MINUTE)
    assert set(asked) == {"first"}


def test_an_ordinary_producer_of_the_group_cannot_answer(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    producer = shop.producer()
    producer.send_in_transaction(Message("T", b"x"), execute=says(UNKNOWN))
    producer.shutdown()
    Producer(shop.broker, "shop").start()
    shop.runner.advance(2 * MINUTE)
    assert "can't be asked about its open transactions" in caplog.text


def test_a_pool_of_the_user_runs_checks(shop: Shop) -> None:
    with ThreadPoolExecutor(1) as pool:
        producer = shop.producer(check_pool=pool)
        producer.send_in_transaction(Message("T", b"x"), execute=says(UNKNOWN))
        shop.answers[b"x"] = COMMIT
        shop.runner.advance(2 * MINUTE)
    shop.runner.advance(1000)
    assert shop.delivered == [b"x"]


def test_a_coroutine_function_checks(shop: Shop) -> None:
    async def check(message: CheckedMessage) -> TransactionState:
        return COMMIT

    TransactionProducer(shop.broker, "shop", check).send_in_transaction(Message("T", b"x"), execute=says(UNKNOWN))
    shop.runner.advance(2 * MINUTE)
    assert shop.delivered == [b"x"]


def test_nothing_runs_without_a_stored_half(shop: Shop) -> None:
    ran: list[Any] = []

    def execute(message: Message, arg: Any) -> TransactionState:
        ran.append(message)
        return COMMIT

    cluster = Cluster(shop.broker, fail=lambda name: BrokerUnreachableError("gone"))
    producer = TransactionProducer(cluster, "shop", shop.check, execute=execute)
    with pytest.raises(BrokerUnreachableError):
        producer.send_in_transaction(Message("T", b"x"))
    with pytest.raises(BrokerUnreachableError), producer.transaction(Message("T", b"x")):
        ran.append("block")
    assert ran == []


def test_a_half_stored_less_durably_is_rolled_back(shop: Shop) -> None:
    def answered(request: Any, call: Callable[[Any], Any]) -> Any:
        response = call(request)
        if isinstance(request, SendMessage):
            return response._replace(status=SendStatus.FLUSH_DISK_TIMEOUT)
        return response

    shop.route = WrappedRoute(shop.broker, answered)
    producer = shop.producer(execute=fails)
    assert producer.send_in_transaction(Message("T", b"x")).state is ROLLBACK
    with pytest.raises(ClientError, match="nothing ran"), producer.transaction(Message("T", b"x")):
        raise AssertionError
    shop.runner.advance(10 * MINUTE)
    assert (shop.delivered, shop.checked) == ([], [])


def test_a_lost_end_is_checked(shop: Shop) -> None:
    def losing(request: Any, call: Callable[[Any], Any]) -> Any:
        if isinstance(request, EndTransaction) and not request.from_check:
            raise BrokerUnreachableError("gone")
        return call(request)

    shop.route = WrappedRoute(shop.broker, losing)
    shop.producer().send_in_transaction(Message("T", b"x"), execute=says(COMMIT))
    shop.runner.advance(1000)
    assert shop.delivered == []
    shop.answers[b"x"] = COMMIT
    shop.runner.advance(2 * MINUTE)
    assert shop.delivered == [b"x"]


@pytest.mark.parametrize("at_once", [True, False])
def test_a_lost_answer_to_a_half_does_not_deliver_twice(shop: Shop, at_once: bool) -> None:
    """The producer sends the half again, and commits at once or when it is asked."""
    sends: list[SendMessage] = []

    def losing(request: Any, call: Callable[[Any], Any]) -> Any:
        answer = call(request)
        if isinstance(request, SendMessage):
            sends.append(request)
            if len(sends) == 1:
                shop.runner.advance(1000)
                raise BrokerUnreachableError("the answer is lost")
        return answer

    shop.broker.create_topic("T", 4)
    shop.route = WrappedRoute(shop.broker, losing)
    shop.answers[b"x"] = COMMIT
    shop.producer().send_in_transaction(Message("T", b"x"), execute=says(COMMIT if at_once else UNKNOWN))
    shop.runner.advance(10 * MINUTE)
    assert sends[0].born_timestamp_ms != sends[1].born_timestamp_ms
    assert sends[0].queue_id != sends[1].queue_id
    assert shop.delivered == [b"x"]


def test_limits(shop: Shop) -> None:
    producer = shop.producer()
    with pytest.raises(MessageIllegalError, match="delayed"):
        producer.send_in_transaction(Message("T", b"x", delay_level=3), execute=says(COMMIT))
    with pytest.raises(ConfigError, match="execute"):
        producer.send_in_transaction(Message("T", b"x"))
    with pytest.raises(ConfigError, match="check"):
        TransactionProducer(shop.broker, "shop", None)  # type: ignore[arg-type]
    assert shop.topic(SystemTopic.HALF) == []


def test_settings_decide_when_and_how_often() -> None:
    settings = BrokerConfig(transactions=TransactionConfig(timeout_s=2, interval_s=3, check_max=3))
    with Broker.temporary(settings, runner=ManualRunner()) as broker:
        shop = Shop(broker)
        shop.producer().send_in_transaction(Message("T", b"x"), execute=says(UNKNOWN))
        shop.runner.advance(20_000)
        assert [times for _, times in shop.checked] == [1, 2, 3]
        assert shop.topic(SystemTopic.CHECK_MAX_TIME) == [b"x"]


def test_a_year_with_a_decided_transaction_is_short(shop: Shop) -> None:
    shop.producer().send_in_transaction(Message("T", b"x"), execute=says(COMMIT))
    turns = 0

    class Counting(ManualRunner):
        def _take_turns(self, until_ms: int) -> None:
            self._take_picked_turns(until_ms)

        def pick(self, options: Any) -> Any:
            nonlocal turns
            turns += 1
            return super().pick(options)

    shop.runner.__class__ = Counting
    shop.runner.advance(365 * 24 * 60 * MINUTE)
    assert turns < 200


# ------------------------------------------------------------------------------------------------- groups that differ


@pytest.mark.parametrize("first", ["ordinary", "transactional"])
def test_an_ordinary_producer_in_a_transactional_group_is_named(
    rmq: Kit, caplog: pytest.LogCaptureFixture, first: str
) -> None:
    def warnings() -> list[str]:
        return [record.getMessage() for record in caplog.records if "ordinary" in record.getMessage()]

    def ordinary() -> Producer:
        return Producer(rmq.broker, "shop", instance_name="plain").start()

    def transactional() -> TransactionProducer:
        return TransactionProducer(rmq.broker, "shop", lambda message: TransactionState.COMMIT, instance_name="tx")

    plain = ordinary() if first == "ordinary" else None
    sender = transactional()
    assert len(warnings()) == (plain is not None)
    plain = plain or ordinary()
    (warning,) = warnings()
    assert "producer group shop has the ordinary producer" in warning
    assert plain.client.client_id in warning
    assert sender.client.client_id in warning
    sender.client.beat()
    plain.client.beat()
    assert len(warnings()) == 1
    plain.shutdown()
    ordinary()
    assert len(warnings()) == 2  # it joined again
    Producer(rmq.broker, "other").start()
    assert len(warnings()) == 2
