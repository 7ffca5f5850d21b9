"""Use the official Python client in its own process: ``official_client.py HOST:PORT [tls]``.

The client writes its log below HOME, and starts threads that end with the process.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import rocketmq


class Commits(rocketmq.TransactionChecker):  # type: ignore[misc]
    def check(self, message: Any) -> Any:
        return rocketmq.TransactionResolution.COMMIT


class Listens(rocketmq.MessageListener):  # type: ignore[misc]
    """Fails "bad" always, and bodies that end in a question mark at the first attempt."""

    def __init__(self, count: int) -> None:
        self.seen: list[tuple[str, int]] = []
        self.done = threading.Event()
        self._count = count

    def consume(self, message: Any) -> Any:
        body = message.body.decode()
        is_first = all(body != other for other, _ in self.seen)
        self.seen.append((body, message.delivery_attempt))
        if len(self.seen) == self._count:
            self.done.set()
        fails = body == "bad" or (body.endswith("?") and is_first)
        return rocketmq.ConsumeResult.FAILURE if fails else rocketmq.ConsumeResult.SUCCESS


def message(topic: str, body: bytes, **fields: Any) -> Any:
    made = rocketmq.Message()
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


def main(address: str, *words: str) -> None:
    configuration = rocketmq.ClientConfiguration(address, rocketmq.Credentials())
    tls = {"tls_enable": True} if words else {}
    producer = rocketmq.Producer(configuration, ("orders", "transfers", "jobs", "steps"), checker=Commits(), **tls)
    producer.startup()
    listener, in_order = Listens(4), Listens(6)
    pushers = [
        rocketmq.PushConsumer(configuration, "workers", listener, {"jobs": rocketmq.FilterExpression()}, **tls),
        rocketmq.PushConsumer(configuration, "in-order", in_order, {"steps": rocketmq.FilterExpression()}, **tls),
    ]
    for pusher in pushers:
        pusher.startup()
    for body in (b"job?", b"bad"):
        producer.send(message("jobs", body))
    for body in (b"1", b"2?", b"bad", b"3"):
        producer.send(message("steps", body, message_group="one"))
    consumer = rocketmq.SimpleConsumer(configuration, "readers", await_duration=5, **tls)
    consumer.startup()

    for number in range(50):
        sent = message("orders", str(number).encode(), tag="odd" if number % 2 else "even", keys=f"k{number}")
        sent.add_property("number", str(number))
        producer.send(sent)
    consumer.subscribe("orders", rocketmq.FilterExpression("odd"))
    found = received(consumer, 25)
    assert sorted(int(one.body) for one in found) == list(range(1, 50, 2))
    if found[0].properties:  # clients before 5.1 drop these
        assert {one.properties["number"] for one in found} == {str(number) for number in range(1, 50, 2)}

    for number in range(10):
        producer.send(message("orders", str(number).encode(), tag="odd", message_group="one"))
    assert [one.body for one in received(consumer, 10)] == [str(number).encode() for number in range(10)]

    later = message("orders", b"recalled", tag="odd", delivery_timestamp=soon())
    recalled = producer.send(later)
    assert producer.recall_message("orders", recalled.recall_handle) == recalled.message_id
    producer.send(message("orders", b"later", tag="odd", delivery_timestamp=soon()))
    assert [one.body for one in received(consumer, 1)] == [b"later"]

    consumer.unsubscribe("orders")
    consumer.subscribe("transfers", rocketmq.FilterExpression())
    for body, ends in ((b"committed", "commit"), (b"rolled back", "rollback"), (b"orphan", None)):
        transaction = producer.begin_transaction()
        producer.send(message("transfers", body), transaction)
        if ends is not None:
            getattr(transaction, ends)()
    assert {one.body for one in received(consumer, 2)} == {b"committed", b"orphan"}

    assert listener.done.wait(30)
    assert sorted(listener.seen) == [("bad", 1), ("bad", 2), ("job?", 1), ("job?", 2)]
    assert in_order.done.wait(30)
    assert [body for body, _ in in_order.seen] == ["1", "2?", "2?", "bad", "bad", "3"]

    for client in (*pushers, consumer, producer):
        client.shutdown()
    print("done")


main(*sys.argv[1:])
