"""Message queues as values, and their order."""

from __future__ import annotations

import random

from librmq.message.message import MessageQueue


def test_a_queue_is_a_value() -> None:
    queue = MessageQueue("T", "broker-a", 3)
    assert str(queue) == "MessageQueue [topic=T, brokerName=broker-a, queueId=3]"
    assert queue == MessageQueue("T", "broker-a", 3)
    assert len({queue, MessageQueue("T", "broker-a", 3), MessageQueue("T", "broker-a", 4)}) == 2
    assert queue.java_hash == 1680488765


def test_queues_sort_by_utf16_units() -> None:
    ordered = [
        MessageQueue("A", "b", 10),
        MessageQueue("T", "a", 2),
        MessageQueue("T", "b", 1),
        MessageQueue("T\U0001f600", "a", 0),
        MessageQueue("T\uffee", "\U0001f600", 0),  # after it in UTF-16, but before it by code points
        MessageQueue("T\uffee", "\uffee", 0),
    ]
    shuffled = ordered[:]
    random.Random(5).shuffle(shuffled)
    assert sorted(shuffled) == ordered
    for at, one in enumerate(ordered):
        for place, other in enumerate(ordered):
            assert (one < other, one <= other, one > other, one >= other) == (
                at < place,
                at <= place,
                at > place,
                at >= place,
            )
