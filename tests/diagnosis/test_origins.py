"""Messages that wait, by origin: new ones, deliveries of delays, and retries."""

from __future__ import annotations

from librmq import ReconsumeLater
from librmq.diagnosis import WaitingOrigins, waiting_origins
from librmq.testing import Kit


def test_new_delayed_and_retried_messages_count_apart(rmq: Kit) -> None:
    rmq.broker.create_topic("T", 2)

    def fail(message: object) -> None:
        raise ReconsumeLater

    consumer = rmq.consumer("G", fail_fast=False)
    consumer.subscribe("T", fail)
    rmq.producer().send("T", b"fails")
    rmq.advance(seconds=5)
    consumer.shutdown()
    for number in range(10):
        rmq.producer().send("T", b"%d" % number, delay=5 if number % 3 == 0 else None)
    rmq.advance(seconds=60)
    of_retries, of_topic = waiting_origins(rmq.broker)
    assert of_retries == WaitingOrigins("G", "%RETRY%G", 1, 1, 0, 0, 1)
    assert of_topic == WaitingOrigins("G", "T", 10, 10, 6, 4, 0)
    (sampled,) = waiting_origins(rmq.broker, topic="T", sampled=4)
    assert (sampled.lag, sampled.looked_at) == (10, 4)
    assert waiting_origins(rmq.broker, group="other") == []
