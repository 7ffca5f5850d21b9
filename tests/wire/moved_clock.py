"""The official Python client in its own process, while the test moves the clock; prints its results as JSON."""

from __future__ import annotations

import json
from typing import Any

import rocketmq

from librmq import BrokerConfig, TimerConfig
from librmq.clock import SystemClock
from librmq.testing import Kit
from librmq.testing._served import ServedKit

attempts: list[tuple[float, int]] = []
checks: list[float] = []
kit = Kit(now_ms=SystemClock().now_ms(), broker_config=BrokerConfig(timers=TimerConfig()))
begin_ms = kit.clock.now_ms()


def seconds() -> float:
    return (kit.clock.now_ms() - begin_ms) / 1000


class Commits(rocketmq.TransactionChecker):  # type: ignore[misc]
    def check(self, message: Any) -> Any:
        checks.append(seconds())
        return rocketmq.TransactionResolution.COMMIT


class Fails(rocketmq.MessageListener):  # type: ignore[misc]
    def consume(self, message: Any) -> Any:
        attempts.append((seconds(), message.delivery_attempt))
        return rocketmq.ConsumeResult.FAILURE


def message(topic: str) -> Any:
    made = rocketmq.Message()
    made.topic, made.body = topic, b"x"
    return made


with kit, ServedKit(kit) as served:
    configuration = rocketmq.ClientConfiguration(served.address, rocketmq.Credentials())
    producer = rocketmq.Producer(configuration, ("t", "tx"), checker=Commits())
    producer.startup()
    pusher = rocketmq.PushConsumer(configuration, "g", Fails(), {"t": rocketmq.FilterExpression()})
    pusher.startup()
    served.settle()
    producer.send(message("t"))
    clock = SystemClock()
    wall = clock.monotonic()
    served.advance(hours=8)
    wall = clock.monotonic() - wall
    dead = [letter.body.decode() for letter in kit.broker.dead_letters("g")]
    producer.send(message("tx"), producer.begin_transaction())
    sent = seconds()
    served.advance(minutes=10)
    committed = [one.body.decode() for one in kit.broker.messages("tx")]
    kit.faults.lose_answer("lost", times=2)
    receipt = producer.send(message("lost"))
    ids = {one.unique_key for one in kit.messages("lost")}
    stored = len(kit.messages("lost"))
    kit.faults.refuse_send("lost", busy=True)
    try:
        producer.send(message("lost"))
        refused = ""
    except Exception as error:
        refused = repr(error)
    pusher.shutdown()
    producer.shutdown()
checked = [at - sent for at in checks]


def one_message() -> float:
    """Return the seconds that a test with a producer, a simple consumer and one message takes."""
    begin = clock.monotonic()
    small = Kit(now_ms=clock.now_ms(), broker_config=BrokerConfig(timers=TimerConfig()))
    with small, ServedKit(small) as served:
        configuration = rocketmq.ClientConfiguration(served.address, rocketmq.Credentials())
        sender = rocketmq.Producer(configuration, ("t",))
        receiver = rocketmq.SimpleConsumer(configuration, "g", {"t": rocketmq.FilterExpression()}, 5)
        sender.startup()
        receiver.startup()
        sender.send(message("t"))
        (found,) = receiver.receive(1, 15)
        receiver.ack(found)
        receiver.shutdown()
        sender.shutdown()
    return clock.monotonic() - begin


found = {
    "attempts": attempts,
    "dead": dead,
    "checks": checked,
    "committed": committed,
    "wall": wall,
    "one_message": min(one_message() for _ in range(3)),
    "stored": stored,
    "ids": sorted(str(one) for one in ids),
    "sent": receipt.message_id,
    "refused": refused,
    "history": str(kit.history()).splitlines(),
}
print(json.dumps(found))
