"""One scenario with the official Python client of RocketMQ 5: ``client_of_5.py HOST:PORT TOPIC SCENARIO``."""

from __future__ import annotations

import sys
import time
from typing import Any

import rocketmq
from rocketmq.v5.exception import IllegalArgumentException


class Commits(rocketmq.TransactionChecker):  # type: ignore[misc]
    def check(self, message: Any) -> Any:
        return rocketmq.TransactionResolution.COMMIT


class Stand:
    """A producer and a consumer of one topic."""

    def __init__(self, address: str, topic: str, tag: str) -> None:
        configuration = rocketmq.ClientConfiguration(address, rocketmq.Credentials())
        self._topic = topic
        self.producer = rocketmq.Producer(configuration, (topic,), checker=Commits())
        self.producer.startup()
        self.consumer = rocketmq.SimpleConsumer(configuration, f"{topic}-readers", await_duration=5)
        self.consumer.startup()
        self.consumer.subscribe(topic, rocketmq.FilterExpression(tag))

    def send(self, body: str, *transaction: Any, **fields: Any) -> None:
        message = rocketmq.Message()
        message.topic, message.body = self._topic, body.encode()
        for name, value in fields.items():
            setattr(message, name, value)
        self.producer.send(message, *transaction)

    def receive(self, count: int) -> list[str]:
        bodies: list[str] = []
        for _ in range(20):
            for message in self.consumer.receive(32, 60):
                bodies.append(message.body.decode())
                self.consumer.ack(message)
            if len(bodies) >= count:
                break
        return bodies


def send_and_receive(stand: Stand) -> None:
    for number in range(20):
        stand.send(str(number))
    assert sorted(map(int, stand.receive(20))) == list(range(20))


def tags(stand: Stand) -> None:
    for number in range(10):
        stand.send(str(number), tag="ab"[number % 2])
    assert sorted(map(int, stand.receive(5))) == [0, 2, 4, 6, 8]


def in_order(stand: Stand) -> None:
    for number in range(10):
        stand.send(str(number), message_group="one")
    assert stand.receive(10) == [str(number) for number in range(10)]


def delay(stand: Stand) -> None:
    due = int(time.time()) + 3  # noqa: TID251 (as a user of the client writes it)
    stand.send("later", delivery_timestamp=due)
    assert stand.receive(1) == ["later"]
    assert time.time() > due - 1  # noqa: TID251


def transactions(stand: Stand) -> None:
    for body in ("committed", "rolled back"):
        transaction = stand.producer.begin_transaction()
        stand.send(body, transaction)
        transaction.commit() if body == "committed" else transaction.rollback()
    assert stand.receive(1) == ["committed"]


def priorities(stand: Stand) -> None:
    for priority in (0, 9, 1):
        stand.send(str(priority), priority=priority)
    assert stand.receive(3) == ["9", "1", "0"]


def lite_message(stand: Stand) -> None:
    """A topic that is not of type LITE refuses it."""
    refused = ""
    try:
        stand.send("x", lite_topic="one")
    except IllegalArgumentException as error:
        refused = str(error)
    assert "message_type:LITE" in refused


SCENARIOS = {
    "send and receive": send_and_receive,
    "tags": tags,
    "order of a message group": in_order,
    "delay": delay,
    "transactions": transactions,
    "priorities": priorities,
    "lite message, at another topic": lite_message,
}


def main(address: str, topic: str, scenario: str) -> None:
    stand = Stand(address, topic, "a" if scenario == "tags" else "*")
    SCENARIOS[scenario](stand)
    stand.consumer.shutdown()
    stand.producer.shutdown()
    print("done")


main(*sys.argv[1:])
