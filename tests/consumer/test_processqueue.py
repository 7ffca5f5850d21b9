"""The process queue: its progress in RocketMQ's examples, and its size in memory."""

from __future__ import annotations

import tracemalloc

from librmq.consumer import ProcessQueue
from librmq.message.message import MessageQueue, StoredMessage
from librmq.message.record import Record, encode_record

QUEUE = MessageQueue("t", "broker-a", 0)


def _messages(first: int, count: int, body: bytes = b"x", **more: str) -> list[StoredMessage]:
    raw = "\2".join(f"{name}\1{value}" for name, value in more.items()).encode()
    return [
        StoredMessage(encode_record(Record(topic="orders", queue_offset=at, body=body, properties_raw=raw)))
        for at in range(first, first + count)
    ]


def test_a_thousand_take_at_most_half_more_than_their_records() -> None:
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        messages = _messages(
            0, 1000, bytes(100), KEYS="order-4711", UNIQ_KEY="7F00000100002A9F0000000000000000", TAGS="a"
        )
        queue = ProcessQueue(QUEUE)
        for at in range(0, 1000, 32):
            queue.put(messages[at : at + 32], 0, 1000)
        records = sum(len(message.raw) for message in messages)
        del messages
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert len(queue) == 1000
    assert taken <= 1.5 * records
