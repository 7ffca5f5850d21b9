"""What the official Python client does, in a process of its own: ``official_client.py HOST:PORT``.

It writes its log under HOME, and starts threads that end with the process.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

from rocketmq import (
    ClientConfiguration,
    ConsumeResult,
    Credentials,
    FilterExpression,
    Message,
    MessageListener,
    Producer,
    PushConsumer,
    SimpleConsumer,
    TransactionChecker,
    TransactionResolution,
)


class Commits(TransactionChecker):  # type: ignore[misc]
    def check(self, message: Any) -> Any:
        return TransactionResolution.COMMIT


class FailsOnce(MessageListener):  # type: ignore[misc]
    def __init__(self) -> None:
        self.seen: list[tuple[bytes, int]] = []
        self.done = threading.Event()

    def consume(self, message: Any) -> Any:
        self.seen.append((message.body, message.delivery_attempt))
        if message.delivery_attempt == 1:
            return ConsumeResult.FAILURE
        self.done.set()
        return ConsumeResult.SUCCESS


def message(topic: str, body: bytes, **fields: Any) -> Any:
    made = Message()
    made.topic, made.body = topic, body
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def soon() -> int:
    return int(time.time()) + 2  # noqa: TID251 (as a user of the client writes it)


def received(consumer: Any, count: int) -> list[Any]:
    found: list[Any] = []
    while len(found) < count:
        for one in consumer.receive(32, 15):
            found.append(one)
            consumer.ack(one)
    return found


def main(address: str) -> None:
    configuration = ClientConfiguration(address, Credentials())
    producer = Producer(configuration, ("orders", "transfers", "jobs"), checker=Commits())
    producer.startup()
    consumer = SimpleConsumer(configuration, "readers", await_duration=5)
    consumer.startup()

    for number in range(50):
        sent = message("orders", str(number).encode(), tag="odd" if number % 2 else "even", keys=f"k{number}")
        sent.add_property("number", str(number))
        producer.send(sent)
    consumer.subscribe("orders", FilterExpression("odd"))
    found = received(consumer, 25)
    assert sorted(int(one.body) for one in found) == list(range(1, 50, 2))
    assert {one.properties["number"] for one in found} == {str(number) for number in range(1, 50, 2)}

    for number in range(10):
        producer.send(message("orders", str(number).encode(), tag="odd", message_group="one"))
    assert [one.body for one in received(consumer, 10)] == [str(number).encode() for number in range(10)]

    recalled = producer.send(message("orders", b"recalled", tag="odd", delivery_timestamp=soon()))
    assert producer.recall_message("orders", recalled.recall_handle) == recalled.message_id
    producer.send(message("orders", b"later", tag="odd", delivery_timestamp=soon()))
    assert [one.body for one in received(consumer, 1)] == [b"later"]

    consumer.unsubscribe("orders")
    consumer.subscribe("transfers", FilterExpression())
    for body, ends in ((b"committed", "commit"), (b"rolled back", "rollback")):
        transaction = producer.begin_transaction()
        producer.send(message("transfers", body), transaction)
        getattr(transaction, ends)()
    assert [one.body for one in received(consumer, 1)] == [b"committed"]

    listener = FailsOnce()
    pusher = PushConsumer(configuration, "workers", listener, {"jobs": FilterExpression()})
    pusher.startup()
    producer.send(message("jobs", b"job"))
    assert listener.done.wait(30)
    assert listener.seen == [(b"job", 1), (b"job", 2)]

    for client in (pusher, consumer, producer):
        client.shutdown()
    print("done")


main(sys.argv[1])
