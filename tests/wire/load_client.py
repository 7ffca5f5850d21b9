"""Official clients that a test kills: ``load_client.py send HOST:PORT FIRST END`` and ``… work HOST:PORT``.

Each prints one line per message: the sender when it was acknowledged, the worker when its listener has answered.
"""

from __future__ import annotations

import os
import sys
import threading
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
)

TOPIC, GROUP = "load", "workers"


def tell(number: int) -> None:
    os.write(1, b"%d\n" % number)  # one write, because many threads call this


class Works(MessageListener):  # type: ignore[misc]
    """Fails one message in ten at its first attempt."""

    def consume(self, message: Any) -> Any:
        number = int(message.body)
        if number % 10 == 3 and message.delivery_attempt == 1:
            return ConsumeResult.FAILURE
        tell(number)
        return ConsumeResult.SUCCESS


def send(address: str, first: int, end: int) -> None:
    producer = Producer(ClientConfiguration(address, Credentials()), (TOPIC,))
    producer.startup()
    for number in range(first, end):
        message = Message()
        message.topic, message.body, message.keys = TOPIC, str(number).encode(), f"k{number}"
        while True:
            try:
                producer.send(message)
                break
            except Exception as error:  # cut off; keep trying, like an application that does not give up
                print(repr(error), file=sys.stderr)
                threading.Event().wait(0.2)
        tell(number)
    producer.shutdown()


def work(address: str) -> None:
    consumer = PushConsumer(ClientConfiguration(address, Credentials()), GROUP, Works(), {TOPIC: FilterExpression()})
    consumer.startup()
    sys.stdin.read()  # runs until it is killed


if sys.argv[1] == "send":
    send(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
else:
    work(sys.argv[2])
