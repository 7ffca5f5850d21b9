"""The official Python client of ``benchmarks.wire``, in a process of its own.

It reads lines ``HOST:PORT KIND COUNT``, and prints the seconds of each.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
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
)

BODY = b"x" * 1024
WINDOW = 64


class Counts(MessageListener):  # type: ignore[misc]
    """Takes the time from the first message to the last."""

    def __init__(self, count: int) -> None:
        self.done = threading.Event()
        self.begin = self.end = 0.0
        self._left = count
        self._lock = threading.Lock()

    def consume(self, message: Message) -> ConsumeResult:
        with self._lock:
            self.begin = self.begin or time.perf_counter()
            self._left -= 1
            if self._left == 0:
                self.end = time.perf_counter()
                self.done.set()
        return ConsumeResult.SUCCESS


def message(topic: str) -> Message:
    made = Message()
    made.topic, made.body = topic, BODY
    return made


def sends(producer: Producer, topic: str, count: int) -> float:
    begin = time.perf_counter()
    for _ in range(count):
        producer.send(message(topic))
    return time.perf_counter() - begin


def async_sends(producer: Producer, topic: str, count: int) -> float:
    waiting: deque[Any] = deque()
    begin = time.perf_counter()
    for _ in range(count):
        if len(waiting) == WINDOW:
            waiting.popleft().result()
        waiting.append(producer.send_async(message(topic)))
    for one in waiting:
        one.result()
    return time.perf_counter() - begin


def pushes(configuration: ClientConfiguration, producer: Producer, topic: str, count: int) -> float:
    async_sends(producer, topic, count)
    listener = Counts(count)
    consumer = PushConsumer(configuration, f"g-{topic}", listener, {topic: FilterExpression()})
    consumer.startup()
    if not listener.done.wait(60):
        raise TimeoutError("not all messages came")
    consumer.shutdown()
    return listener.end - listener.begin


def receives(configuration: ClientConfiguration, producer: Producer, topic: str, count: int) -> float:
    async_sends(producer, topic, count)
    consumer = SimpleConsumer(configuration, f"g-{topic}", {topic: FilterExpression()}, 5)
    consumer.startup()
    begin, left = time.perf_counter(), count
    while left > 0:
        for one in consumer.receive(32, 60):
            consumer.ack(one)
            left -= 1
    seconds = time.perf_counter() - begin
    consumer.shutdown()
    return seconds


def main() -> None:
    producers: dict[str, Producer] = {}
    for number, line in enumerate(sys.stdin):
        address, kind, count = line.split()
        configuration, topic = ClientConfiguration(address, Credentials()), f"{kind}-{number}"
        if address not in producers:
            producers[address] = Producer(configuration, ("warm",))
            producers[address].startup()
            sends(producers[address], "warm", 20)
        producer = producers[address]
        producer.send(message(topic + "-route"))
        if kind in ("send", "async"):
            seconds = (sends if kind == "send" else async_sends)(producer, topic, int(count))
        else:
            seconds = (pushes if kind == "push" else receives)(configuration, producer, topic, int(count))
        print(seconds, flush=True)


main()
