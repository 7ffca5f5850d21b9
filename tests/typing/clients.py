"""User-style code with producers and consumers, which only type checkers read.

Correct code must pass. Wrong code carries an ignore. Both checkers report an ignore that is not needed, so each of
these lines proves that the mistake is found.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from librmq.broker import Broker
from librmq.client import Producer, TransactionProducer
from librmq.consumer import DeliveredMessage, PullConsumer, PushConsumer
from librmq.message.message import StoredMessage
from librmq.protocol import ConsumeFrom, TransactionState


def right(broker: Broker) -> None:
    consumer = PushConsumer(
        broker,
        "billing",
        orderly=True,
        max_reconsume_times=3,
        consume_from=ConsumeFrom.FIRST,
        suspend_time=timedelta(1),
    )

    @consumer.subscribe("orders", tags="created || paid")
    def charge(message: DeliveredMessage) -> None:
        print(message.body)

    async def ship(messages: list[DeliveredMessage]) -> int:
        return len(messages) - 1

    def note(message: StoredMessage) -> bool:
        return bool(message.tags)

    def anything(message: Any) -> object:
        return message

    consumer.subscribe("parcels", ship, batch=True)
    consumer.subscribe("notes", note, predicate=lambda message: message.keys != ())
    consumer.subscribe("things", anything, sql="a = 1")
    with consumer, Producer(broker, "shop", timeout=1, retries=0) as producer:
        producer.send("orders", b"x", tags="created", keys="o-1")
        producer.send_oneway("orders", json={"total": 3}, delay=timedelta(minutes=1))
    with PullConsumer(broker, "report", poll_timeout=0.5, auto_commit=False) as reader:
        bodies: list[bytes] = [message.body for message in reader]
        assert bodies
    TransactionProducer(broker, "shop", lambda message: TransactionState.COMMIT, retries=1).shutdown()


async def right_in_a_loop(broker: Broker) -> bool:
    async with PullConsumer(broker, "report") as reader:
        async for message in reader:
            print(message.body)
    return await reader.shutdown_async()


def wrong(broker: Broker) -> None:
    PushConsumer(broker, "billing", max_retries=3)  # type: ignore[call-arg]
    PushConsumer(broker, "billing", threads="3")  # type: ignore[arg-type]
    PushConsumer("data", "billing")  # type: ignore[arg-type]
    PullConsumer(broker, "billing", poll_wait=1)  # type: ignore[call-arg]
    Producer(broker, "shop", tries=3)  # type: ignore[call-arg]
    TransactionProducer(broker, "shop", lambda message: TransactionState.COMMIT, tries=3)  # type: ignore[call-arg]

    consumer = PushConsumer(broker, "billing")

    def of_text(message: str) -> None:
        print(message)

    def of_two(message: DeliveredMessage, context: object) -> None:
        print(message, context)

    consumer.subscribe("orders", tag="created")  # type: ignore[call-overload]
    consumer.subscribe("orders", of_text)  # type: ignore[type-var]
    consumer.subscribe("orders", of_two)  # type: ignore[type-var]
    consumer.subscribe("orders")(of_two)  # type: ignore[type-var]
    Producer(broker, "shop").send("orders", b"x", tag="created")  # type: ignore[call-arg]
