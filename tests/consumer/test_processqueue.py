"""The process queue: progress and size in RocketMQ's examples, and compared with a plain sorted dict."""

from __future__ import annotations

import tracemalloc

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from librmq.consumer import DeliveredMessage, ProcessQueue
from librmq.message.message import MessageQueue, StoredMessage
from librmq.message.record import Record, encode_record
from tests.budget import examples

QUEUE = MessageQueue("t", "broker-a", 0)


def record(queue_offset: int, size: int) -> StoredMessage:
    return StoredMessage(encode_record(Record(topic="t", queue_offset=queue_offset, body=bytes(size))))


class ProcessQueueMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.real = ProcessQueue(QUEUE)
        self.waiting: dict[int, int] = {}  # queue offset -> size of the body
        self.begun: dict[int, int] = {}
        self.taken: dict[int, DeliveredMessage] = {}
        self.bounds: dict[int, tuple[int, int]] = {}
        self.largest = -1

    @rule(gaps=st.lists(st.integers(1, 4), max_size=6), back=st.integers(0, 3), size=st.integers(0, 9))
    def pull(self, gaps: list[int], back: int, size: int) -> None:
        """Filtered messages leave gaps; messages that are pulled twice are ignored."""
        queue_offset = max(-1, self.largest - back)
        offsets = []
        for gap in gaps:
            queue_offset += gap
            offsets.append(queue_offset)
        new = [one for one in offsets if one > self.largest]
        bounds = (0, (offsets[-1] if offsets else 0) + 7)
        assert self.real.put([record(one, size) for one in offsets], *bounds) == len(new)
        for one in new:
            self.waiting[one] = size
            self.bounds[one] = bounds
        self.largest = max([self.largest, *new])

    @rule(count=st.integers(1, 4))
    def pass_over(self, count: int) -> None:
        """A filter leaves out what is behind the last pulled message."""
        self.largest += count
        self.real.pass_to(self.largest + 1)

    @rule(most=st.integers(1, 5))
    def take(self, most: int) -> None:
        messages = self.real.take(most)
        expected = sorted(self.waiting)[:most]
        assert [message.queue_offset for message in messages] == expected
        assert [(m.min_offset, m.max_offset) for m in messages] == [self.bounds[one] for one in expected]
        for message in messages:
            self.begun[message.queue_offset] = self.waiting.pop(message.queue_offset)
            self.taken[message.queue_offset] = message

    @precondition(lambda self: not self.waiting)
    @rule(gap=st.integers(-1, 3), size=st.integers(0, 9))
    def begin(self, gap: int, size: int) -> None:
        """Pull a message and begin it immediately, unless the queue already had it."""
        queue_offset = max(0, self.largest + gap)
        bounds = (1, queue_offset + 3)
        messages = self.real.put_and_take([record(queue_offset, size).raw], bounds)
        if queue_offset <= self.largest:
            assert not messages
            return
        (message,) = messages
        assert (message.queue_offset, message.min_offset, message.max_offset) == (queue_offset, *bounds)
        self.begun[queue_offset], self.taken[queue_offset] = size, message
        self.bounds[queue_offset], self.largest = bounds, queue_offset

    @precondition(lambda self: self.taken.keys() - self.waiting.keys())
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        """Remove some started messages, some of which may already have ended."""
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.taken.keys() - self.waiting.keys())), unique=True))
        held = bool(self.waiting or self.begun)
        progress = self.real.remove([self.taken[one] for one in chosen])
        for one in chosen:
            self.begun.pop(one, None)
        assert progress == (self.progress() if held else None)

    @rule(count=st.integers(1, 3))
    def put_back(self, count: int) -> None:
        offsets = sorted(self.begun)[-count:]
        self.real.put_back([self.taken[one] for one in offsets])
        for one in offsets:
            self.waiting[one] = self.begun.pop(one)

    @rule()
    def commit(self) -> None:
        begun = len(self.begun)
        self.begun.clear()
        assert self.real.commit() == (self.progress() if begun else None)

    @rule()
    def roll_back(self) -> None:
        self.real.roll_back()
        self.waiting.update(self.begun)
        self.begun.clear()

    @rule()
    def clear(self) -> None:
        self.real.drop_all()
        self.waiting.clear()
        self.begun.clear()
        self.largest = -1

    def progress(self) -> int:
        return min([*self.waiting, *self.begun], default=self.largest + 1)

    @invariant()
    def agrees(self) -> None:
        both = sorted([*self.waiting, *self.begun])
        assert len(self.real) == len(both)
        assert (self.real.waiting, self.real.begun) == (len(self.waiting), len(self.begun))
        assert self.real.first == (both[0] if both else None)
        assert self.real.span == (both[-1] - both[0] if both else 0)
        assert self.real.progress == self.progress()
        assert self.real.size == sum(self.waiting.values()) + sum(self.begun.values())


TestProcessQueue = ProcessQueueMachine.TestCase
TestProcessQueue.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)


# The process queue: its progress in RocketMQ's examples, and its size in memory.


def _messages(first: int, count: int, body: bytes = b"x", **more: str) -> list[StoredMessage]:
    raw = "\2".join(f"{name}\1{value}" for name, value in more.items()).encode()
    return [
        StoredMessage(encode_record(Record(topic="orders", queue_offset=at, body=body, properties_raw=raw)))
        for at in range(first, first + count)
    ]


def test_a_thousand_take_300_bytes_each_beside_their_records() -> None:
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
    assert taken <= records + 300 * 1000
