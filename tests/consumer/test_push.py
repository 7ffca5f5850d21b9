"""Push consumers, concurrently: delivery, retries, progress, rebalancing, limits, timeouts, life."""

from __future__ import annotations

import asyncio
import logging
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from librmq.broker import Broker
from librmq.client.identity import Client
from librmq.client.producer import Producer
from librmq.clock import ManualClock
from librmq.cluster import RouteTable
from librmq.config import StoreConfig
from librmq.consumer import ConsumeContext, ConsumerConfig, DeliveredMessage, PullConsumer, PushConsumer
from librmq.errors import (
    ClientStateError,
    ConfigError,
    FilterSyntaxError,
    GroupMismatchError,
    MalformedError,
    MessageIllegalError,
    StoreIOError,
)
from librmq.files.memory import MemoryFiles
from librmq.listener import DeadLetter, ReconsumeLater
from librmq.message.message import MessageQueue
from librmq.metrics import Metrics
from librmq.protocol import (
    ConsumeFrom,
    ConsumerIds,
    MessageModel,
    PullMessage,
    QueryOffset,
    ResetGroup,
    SendBack,
    UpdateOffset,
)
from librmq.runtime.manual import ManualRunner
from librmq.runtime.threads import ThreadRunner
from tests.world import Seam, World, unreachable
from tests.world import world as make_world

RETRY = MessageQueue("%RETRY%g", "broker-a", 0)


@pytest.fixture
def world() -> Iterator[World]:
    with make_world() as world:
        yield world


@pytest.fixture
def one_queue() -> Iterator[World]:
    with make_world(1) as world:
        yield world


# ------------------------------------------------------------------------------------------------------------ delivery


def test_messages_come_to_the_listener_of_their_topic(world: World) -> None:
    world.broker.create_topic("other", 1)
    consumer = world.consumer("c1")
    others: list[DeliveredMessage] = []
    consumer.subscribe("other")(others.append)
    consumer.start()
    world.send("a", "b", tags="x", keys=["k1", "k2"], properties={"color": "red"})
    world.send("c", topic="other")
    world.advance()
    assert sorted(world.bodies()) == ["a", "b"]
    assert [message.body for message in others] == [b"c"]


def test_what_a_listener_sees(one_queue: World) -> None:
    delivered: list[DeliveredMessage] = []
    one_queue.consumer(listener=delivered.append).start()
    result = one_queue.send("a", "b", tags="x", keys="k1 k2", properties={"color": "red"})[1]
    one_queue.advance()
    message = delivered[1]
    assert (message.topic, message.queue_id, message.queue_offset) == ("t", 0, 1)
    assert message.queue == MessageQueue("t", "broker-a", 0)
    assert (message.broker_name, message.min_offset, message.max_offset) == ("broker-a", 0, 2)
    assert (message.message_id, message.offset_id) == (result.message_id, result.offset_id)
    assert (message.tags, message.keys, message.reconsume_times) == ("x", ("k1", "k2"), 0)
    assert message.transaction_id is None
    assert message.origin_message_id == message.message_id
    assert message.properties["color"] == "red"
    assert message.properties["MIN_OFFSET"] == "0"
    assert message.properties["MAX_OFFSET"] == "2"
    assert message.properties["CONSUME_START_TIME"] == str(one_queue.runner.now_ms())
    copy = pickle.loads(pickle.dumps(message))
    assert (copy, copy.queue, copy.max_offset) == (message, message.queue, 2)
    assert "DeliveredMessage('t'" in repr(message)


def test_only_tags_that_are_asked_for(world: World) -> None:
    world.consumer(tags="Aa || C").start()
    world.send("a", tags="Aa")
    world.send("b", tags="BB")  # the same hash as Aa
    world.send("c", tags="C")
    world.send("d")
    world.advance(20)
    assert sorted(world.bodies()) == ["a", "c"]
    assert sum(world.broker.consumer_offsets("g", "t").values()) == 4  # what was passed over counts as consumed


def test_sql() -> None:
    with make_world(1, enable_property_filter=True) as world:
        world.consumer(sql="amount > 100").start()
        for amount in ("50", "150"):
            world.send(amount, properties={"amount": amount})
        world.advance(30)
        assert world.bodies() == ["150"]
        assert world.broker.consumer_offset("g", "t") == 2


def test_a_batch_never_spans_two_pulls(one_queue: World) -> None:
    batches: list[list[str]] = []
    consumer = one_queue.consumer(topic=None, batch_size=4, pull_batch_size=6)
    consumer.subscribe("t")(lambda messages: batches.append([m.body.decode() for m in messages]))
    one_queue.send(*"abcdefgh")
    consumer.start()
    one_queue.advance()
    assert sorted(batches) == [list("abcd"), list("ef"), list("gh")]


@pytest.mark.parametrize(
    ("index", "again"), [(None, ""), (0, "bcd"), (1, "cd"), (3, ""), (99, ""), (-1, "abcd"), (-2, "abcd")]
)
def test_a_batch_listener_tells_what_is_consumed(one_queue: World, index: int | None, again: str) -> None:
    def listener(messages: list[DeliveredMessage]) -> int | None:
        return index if not messages[0].reconsume_times else None

    consumer = one_queue.consumer(listener=listener, batch_size=4)
    one_queue.send(*"abcd")
    consumer.start()
    one_queue.advance(30)
    assert one_queue.bodies() == [*"abcd", *again]
    assert consumer.progress()[MessageQueue("t", "broker-a", 0)] == 4


def test_nothing_returned_is_a_failure_where_asked_for(one_queue: World) -> None:
    """Where a result is asked for nothing returned is a failure."""
    answers = iter([None, False, True])
    consumer = one_queue.consumer(topic=None)
    consumer.subscribe("t", must_return=True)(lambda message: next(answers))
    consumer.start()
    one_queue.send("a")
    one_queue.advance(3600)
    assert (consumer.delivery.counts.delivered, consumer.delivery.counts.consumed) == (3, 1)


def test_as_many_listeners_at_once_as_threads(one_queue: World) -> None:
    consumer = one_queue.consumer(threads=3)
    one_queue.send(*"abcdefgh")
    consumer.start()
    with one_queue.runner.lock:
        for _ in range(10):  # steps only
            step = one_queue.runner._top()
            if step is None or (step.at or 0) > one_queue.runner.now_ms():
                break
            step.go(one_queue.runner)
    assert len(one_queue.runner.ready) == 3
    one_queue.advance()
    assert sorted(one_queue.bodies()) == list("abcdefgh")


# ----------------------------------------------------------------------------------------------------------- failures


def test_retries_then_dead_letter(world: World) -> None:
    """After 10 s, 30 s, 1 min, … 2 h; then the dead letters."""

    def fail(message: DeliveredMessage) -> None:
        raise ReconsumeLater("not yet")

    world.consumer(listener=fail).start()
    world.send("a")
    begin = world.runner.now_ms()
    world.advance(5 * 3600)
    waits = "10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"
    seconds = [int(wait[:-1]) * {"s": 1, "m": 60, "h": 3600}[wait[-1]] for wait in waits.split()]
    due = [sum(seconds[:times]) * 1000 for times in range(17)]
    assert [seen.reconsume_times for seen in world.seen] == list(range(17))
    for seen, due_ms in zip(world.seen, due, strict=True):
        assert due_ms <= seen.at_ms - begin < due_ms + 100 * (seen.reconsume_times + 1)
    assert {seen.queue for seen in world.seen[1:]} == {RETRY}
    assert [message.body for message in world.broker.dead_letters("g")] == [b"a"]


def test_a_redelivery_shows_its_first_topic(one_queue: World) -> None:
    shown: list[tuple[str, str, str, str]] = []

    def listener(message: DeliveredMessage) -> None:
        shown.append((message.topic, message.message_id, message.origin_message_id, message.queue.topic))
        if len(shown) < 3:
            raise ValueError("no")

    one_queue.consumer(listener=listener).start()
    sent = one_queue.send("a")[0]
    one_queue.advance(100)
    assert [row[0] for row in shown] == ["t", "t", "t"]
    assert {row[1] for row in shown} == {sent.message_id}
    assert [row[2] for row in shown[1:]] == [sent.offset_id] * 2
    assert [row[3] for row in shown] == ["t", "%RETRY%g", "%RETRY%g"]


def test_a_level_of_its_own_and_the_dead_letters_at_once(one_queue: World) -> None:
    def listener(message: DeliveredMessage) -> None:
        if message.body == b"late" and not message.reconsume_times:
            raise ReconsumeLater(delay_level=2)
        if message.body == b"never":
            raise DeadLetter("broken")

    one_queue.consumer(listener=listener).start()
    begin = one_queue.runner.now_ms()
    one_queue.send("late", "never")
    one_queue.advance(6)
    assert one_queue.bodies() == ["late", "never", "late"]
    assert 5000 <= one_queue.seen[2].at_ms - begin <= 5100
    assert [message.body for message in one_queue.broker.dead_letters("g")] == [b"never"]


def test_own_maximum_and_the_hook_before_the_last_attempt(one_queue: World) -> None:
    last: list[int] = []

    def fail(message: DeliveredMessage) -> None:
        raise ValueError("no")

    consumer = one_queue.consumer(
        listener=fail, max_reconsume_times=2, before_last_attempt=lambda m: last.append(m.reconsume_times)
    )
    consumer.start()
    one_queue.send("a")
    one_queue.advance(3600)
    assert [seen.reconsume_times for seen in one_queue.seen] == [0, 1, 2]
    assert last == [2]
    assert len(one_queue.broker.dead_letters("g")) == 1


def test_what_cannot_be_sent_back_comes_again_after_5_seconds(one_queue: World) -> None:
    """What cannot be sent back is delivered again after 5 seconds."""
    seam = Seam(one_queue.broker)
    seam.fail = unreachable(SendBack)

    def listener(message: DeliveredMessage) -> None:
        if message.reconsume_times < 2:
            raise ValueError("no")

    consumer = one_queue.consumer(listener=listener, route=seam)
    consumer.start()
    begin = one_queue.runner.now_ms()
    one_queue.send("a")
    one_queue.advance(4)
    one_queue.send("b")
    one_queue.advance(60)
    assert [(s.body, s.reconsume_times, s.at_ms - begin) for s in one_queue.seen] == [
        ("a", 0, 0),
        ("b", 0, 4000),
        ("a", 1, 5000),
        ("b", 1, 9000),
        ("a", 2, 10000),
        ("b", 2, 14000),
    ]
    assert consumer.progress()[MessageQueue("t", "broker-a", 0)] == 2


def test_each_attempt_is_a_line_and_the_first_has_the_traceback(
    one_queue: World, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(message: DeliveredMessage) -> None:
        raise ValueError("no stock")

    one_queue.consumer(listener=fail, max_reconsume_times=2).start()
    one_queue.send("a", keys="o-1")
    with caplog.at_level(logging.WARNING, "librmq"):
        one_queue.advance(600)
    first, second, dead = caplog.records
    assert (first.levelname, second.levelname, dead.levelname) == ("WARNING", "WARNING", "ERROR")
    assert [bool(record.exc_info) for record in caplog.records] == [True, False, False]
    assert "g@c1: attempt 1 of 3 on t/broker-a/0 at 0" in first.getMessage()
    assert "(ValueError: no stock), the next comes in 10 s" in first.getMessage()
    assert "attempt 2 of 3" in second.getMessage()
    assert second.getMessage().endswith("the next comes in 30 s")
    assert "dead letter of group g: " in dead.getMessage()
    assert dead.getMessage().endswith("key o-1, after 3 attempts: ValueError: no stock")
    fields = ("rmq_group", "rmq_topic", "rmq_attempt")
    assert [dead.__dict__[name] for name in fields] == ["g", "t", 3]
    letter = one_queue.broker.dead_letters("g")[0]
    assert letter.properties["DEAD_LETTER_CAUSE"] == "ValueError: no stock"


def test_a_dead_letter_without_room_for_its_cause_is_stored(one_queue: World) -> None:
    def fail(message: DeliveredMessage) -> None:
        raise DeadLetter("no\nway\1")

    one_queue.consumer(listener=fail).start()
    one_queue.send("a", properties={"p": "x" * 32_000})
    one_queue.send("b")
    one_queue.advance(1)
    first, second = one_queue.broker.dead_letters("g")
    assert "DEAD_LETTER_CAUSE" not in first.properties
    assert second.properties["DEAD_LETTER_CAUSE"] == "DeadLetter: no way "


def test_a_redelivery_of_a_topic_without_listener_fails(one_queue: World) -> None:
    """A redelivery whose topic has no listener any more fails."""
    one_queue.broker.create_topic("u", 1)

    def fail(message: DeliveredMessage) -> None:
        raise ValueError("no")

    consumer = one_queue.consumer(listener=fail, max_reconsume_times=1)
    consumer.subscribe("u")(lambda message: None)
    consumer.start()
    one_queue.send("a")
    one_queue.advance()
    consumer.unsubscribe("t")
    one_queue.advance(60)
    assert [message.body for message in one_queue.broker.dead_letters("g")] == [b"a"]


# ----------------------------------------------------------------------------------------------------------- progress


def test_the_smallest_that_is_not_consumed_holds_the_progress(one_queue: World) -> None:
    """1001–1010 done gives 1011; with the first one stuck 1001, then at once 1011."""

    async def run() -> None:
        release = asyncio.Event()

        async def listener(message: DeliveredMessage) -> None:
            if message.body == b"stuck":
                await release.wait()

        consumer = one_queue.consumer(topic=None)
        consumer.subscribe("t")(listener)
        consumer.start()
        one_queue.send("stuck", *map(str, range(9)))
        task = asyncio.ensure_future(one_queue.runner.advance_async(0))
        for _ in range(50):
            await asyncio.sleep(0)
        assert consumer.delivery.running == 1
        assert consumer.delivery.counts.consumed == 9
        assert consumer.progress()[MessageQueue("t", "broker-a", 0)] == 0
        release.set()
        await task
        assert consumer.progress()[MessageQueue("t", "broker-a", 0)] == 10

    asyncio.run(run())


def test_progress_passes_what_the_filter_drops_behind_a_message(one_queue: World) -> None:
    consumer = one_queue.consumer(tags="a")
    consumer.start()
    one_queue.send("a", tags="a")
    one_queue.send("b", tags="b")  # comes with the same pull, behind what the listener gets
    one_queue.advance(30)
    assert consumer.progress("t") == {MessageQueue("t", "broker-a", 0): 2}
    assert one_queue.broker.consumer_offset("g", "t") == 2


def test_progress_is_saved_after_10_seconds_then_every_5(one_queue: World) -> None:
    """Progress is saved from 10 seconds on every 5 when there is any."""
    seam = Seam(one_queue.broker)
    one_queue.consumer(route=seam).start()
    one_queue.send("a")
    one_queue.advance(9.999)
    assert not [request for request in seam.asked if isinstance(request, UpdateOffset)]
    one_queue.advance(0.001)
    assert one_queue.broker.consumer_offset("g", "t") == 1
    del seam.asked[:]
    one_queue.advance(3600)
    assert seam.asked == []
    one_queue.send("b")
    one_queue.advance(4.999)
    assert one_queue.broker.consumer_offset("g", "t") == 1
    one_queue.advance(0.001)
    assert one_queue.broker.consumer_offset("g", "t") == 2


def test_progress_travels_with_pulls(one_queue: World) -> None:
    one_queue.consumer().start()
    one_queue.send("a")
    one_queue.advance()
    one_queue.send("b")
    one_queue.advance()
    assert one_queue.broker.consumer_offset("g", "t") == 1


def test_progress_that_is_not_stored_is_tried_again(one_queue: World) -> None:
    seam = Seam(one_queue.broker)
    seam.fail = unreachable(UpdateOffset)
    one_queue.consumer(route=seam).start()
    one_queue.send("a")
    one_queue.advance(14)
    seam.fail = unreachable()
    one_queue.advance(1)
    assert one_queue.broker.consumer_offset("g", "t") == 1


def test_shutdown_saves_and_leaves(one_queue: World) -> None:
    consumer = one_queue.consumer()
    consumer.start()
    one_queue.send("a")
    one_queue.advance()
    assert consumer.shutdown()
    assert one_queue.broker.consumer_offset("g", "t") == 1
    assert one_queue.broker.call(ConsumerIds("g")) == ()
    assert consumer.shutdown()
    one_queue.send("b")
    one_queue.advance(60)
    assert one_queue.bodies() == ["a"]
    again = one_queue.consumer("c2")
    again.start()
    one_queue.advance()
    assert one_queue.bodies("c2") == ["b"]


@pytest.mark.parametrize(
    ("begin", "expected"),
    [(ConsumeFrom.FIRST, "abc"), (ConsumeFrom.LAST, "abc"), (ConsumeFrom.TIMESTAMP, "abc")],
)
def test_a_new_group_reads_a_queue_that_is_in_memory(one_queue: World, begin: ConsumeFrom, expected: str) -> None:
    """A new group reads a queue whose first message is in memory."""
    one_queue.send("a", "b")
    one_queue.advance(60)
    one_queue.consumer(consume_from=begin, consume_from_timestamp_ms=one_queue.runner.now_ms()).start()
    one_queue.send("c")
    one_queue.advance()
    assert one_queue.bodies() == list(expected)


@pytest.mark.parametrize(
    ("begin", "expected"), [(ConsumeFrom.FIRST, "abc"), (ConsumeFrom.LAST, ""), (ConsumeFrom.TIMESTAMP, "bc")]
)
def test_where_nothing_is_stored_the_setting_decides(one_queue: World, begin: ConsumeFrom, expected: str) -> None:
    seam = Seam(one_queue.broker)
    one_queue.send("a")
    one_queue.advance(60)
    one_queue.send("b")
    time_ms = one_queue.runner.now_ms()
    one_queue.advance(60)
    one_queue.send("c")
    seam.answers[QueryOffset] = None
    one_queue.consumer(route=seam, consume_from=begin, consume_from_timestamp_ms=time_ms).start()
    one_queue.advance(10)
    assert one_queue.bodies() == list(expected)


def test_an_offset_that_the_queue_does_not_have_is_corrected(one_queue: World) -> None:
    """The queue is let go, the corrected offset stored after 10 s, the queue taken again at the next rebalance."""
    one_queue.send("a", "b")
    one_queue.broker.call(UpdateOffset("g", "t", 0, 99))
    consumer = one_queue.consumer()
    begin = one_queue.runner.now_ms()
    consumer.start()
    one_queue.advance(10)
    assert one_queue.broker.consumer_offset("g", "t") == 2
    assert one_queue.assigned(consumer) == []
    one_queue.send("c")
    one_queue.advance(60)
    assert [(seen.body, seen.at_ms - begin) for seen in one_queue.seen] == [("c", 20_000)]


def test_reset_of_a_running_group(one_queue: World) -> None:
    one_queue.send("a")
    one_queue.advance(60)
    time_ms = one_queue.runner.now_ms()
    one_queue.send("b", "c")
    consumer = one_queue.consumer()
    consumer.start()
    one_queue.advance(30)
    one_queue.seen.clear()
    one_queue.broker.call(ResetGroup("g", "t", time_ms))
    one_queue.advance(9)
    assert one_queue.bodies() == []
    one_queue.advance(2)
    assert one_queue.bodies() == ["b", "c"]
    one_queue.broker.call(ResetGroup("g", "t", -1))
    one_queue.advance(30)
    one_queue.send("d")
    one_queue.advance()
    assert one_queue.bodies() == ["b", "c", "d"]


# -------------------------------------------------------------------------------------------------------- broadcasting


def _broadcasting(world: World, name: str, files: MemoryFiles, **more: Any) -> PushConsumer:
    return world.consumer(
        name,
        model=MessageModel.BROADCASTING,
        consume_from=ConsumeFrom.FIRST,
        offsets_folder="/offsets",
        files=files,
        **more,
    )


def test_broadcasting_keeps_its_progress_in_a_file(one_queue: World) -> None:
    files = MemoryFiles()
    files.make_folder("/offsets")
    first, second = (_broadcasting(one_queue, name, files) for name in ("b1", "b2"))
    first.start()
    second.start()
    one_queue.send("a", "b")
    one_queue.advance(9.9)
    path = "/offsets/127.0.0.1@b1/g/offsets.json"
    assert files.size(path) is None
    one_queue.advance(0.1)
    assert files.read(path).decode() == (
        '{\n\t"offsetTable":{{\n\t\t\t"brokerName":"broker-a",\n\t\t\t"queueId":0,\n\t\t\t"topic":"t"\n\t\t}:2\n\t}\n}'
    )
    first.shutdown()
    one_queue.send("c")
    one_queue.advance()
    again = _broadcasting(one_queue, "b1", files)
    again.start()
    one_queue.advance()
    assert one_queue.bodies("b1") == ["a", "b", "c"]
    assert one_queue.bodies("b2") == ["a", "b", "c"]
    assert one_queue.broker.consumer_offsets("g", "t") == {}


def test_broadcasting_drops_failures(one_queue: World) -> None:
    files = MemoryFiles()
    files.make_folder("/offsets")

    def fail(message: DeliveredMessage) -> None:
        raise ReconsumeLater

    consumer = _broadcasting(one_queue, "b1", files, listener=fail)
    consumer.start()
    one_queue.send("a")
    one_queue.advance(3600)
    assert one_queue.bodies() == ["a"]
    assert consumer.delivery.counts.dropped == 1


@pytest.mark.parametrize("text", ["", "{", "[]", '{"offsetTable":{"a":1}}', '{"offsetTable":3}'])
def test_unreadable_local_progress_is_taken_from_the_copy(one_queue: World, text: str) -> None:
    """Local progress that cannot be read is refused or taken from the copy."""
    files = MemoryFiles()
    files.make_folder("/offsets")
    consumer = _broadcasting(one_queue, "b1", files)
    consumer.start()
    for body in "ab":
        one_queue.send(body)
        one_queue.advance(10)
    consumer.shutdown()
    path = "/offsets/127.0.0.1@b1/g/offsets.json"
    files.write(path, text.encode())
    _broadcasting(one_queue, "b1", files).start()
    one_queue.advance()
    assert one_queue.bodies() == ["a", "b", "b"]
    files.write(path, b"{")
    files.write(path + ".bak", b"{")
    with pytest.raises(MalformedError, match=r"offsets\.json"):
        _broadcasting(one_queue, "b1", files).start()


def test_progress_that_no_file_takes_is_written_later(one_queue: World) -> None:
    """Progress that no file takes is written later and keeps no reader in the group."""
    files = _FullDisk()
    files.make_folder("/offsets")
    consumer = _broadcasting(one_queue, "b1", files)
    consumer.start()
    one_queue.send("a")
    files.is_full = True
    one_queue.advance(12)
    files.is_full = False
    one_queue.advance(3)
    path = "/offsets/127.0.0.1@b1/g/offsets.json"
    assert b":1" in files.read(path)
    one_queue.send("b")
    one_queue.advance()
    files.is_full = True
    assert consumer.shutdown()
    assert b":1" in files.read(path)
    assert one_queue.broker.call(ConsumerIds("g")) == ()


class _FullDisk(MemoryFiles):
    is_full = False

    def write(self, path: str, data: bytes) -> None:
        if self.is_full:
            raise StoreIOError("write", path, OSError(28, "no space left"))
        super().write(path, data)


def test_what_fails_at_the_end_keeps_nobody_in_the_group(one_queue: World, monkeypatch: pytest.MonkeyPatch) -> None:
    consumer = one_queue.consumer()
    consumer.start()
    one_queue.advance()

    def fail() -> None:
        raise RuntimeError("oops")

    monkeypatch.setattr(consumer.delivery, "end", fail)
    with pytest.raises(RuntimeError, match="oops"):
        consumer.shutdown()
    assert one_queue.broker.call(ConsumerIds("g")) == ()
    assert not consumer.assigned


# --------------------------------------------------------------------------------------------------------- rebalancing


def test_queues_are_shared_out_when_members_come_and_go(world: World) -> None:
    first, second, third = (world.consumer(name) for name in ("c1", "c2", "c3"))
    first.start()
    world.advance()
    assert world.assigned(first) == [0, 1, 2, 3]
    second.start()
    third.start()
    world.advance()
    assert [world.assigned(one) for one in (first, second, third)] == [[0, 1], [2], [3]]
    second.shutdown()
    world.advance()
    assert [world.assigned(one) for one in (first, third)] == [[0, 1], [2, 3]]


def test_a_member_without_a_queue(one_queue: World) -> None:
    first, second = (one_queue.consumer(name) for name in ("c1", "c2"))
    first.start()
    second.start()
    one_queue.send("a")
    one_queue.advance()
    assert (one_queue.bodies("c1"), one_queue.bodies("c2")) == (["a"], [])


def test_a_queue_lost_while_its_listener_runs_repeats(one_queue: World) -> None:
    """The overlap that real rebalancing has."""
    second = one_queue.consumer("a-first")

    def listener(message: DeliveredMessage) -> None:
        second.start()
        one_queue.advance_steps()

    consumer = one_queue.consumer("b-later", listener=listener)
    consumer.start()
    one_queue.send("a")
    one_queue.advance()
    assert one_queue.bodies() == ["a", "a"]
    assert one_queue.assigned(consumer) == []


def test_a_topic_that_is_made_later_is_noticed(world: World) -> None:
    world.consumer(topic="later", consume_from=ConsumeFrom.FIRST).start()
    world.advance(100)
    world.send("a", topic="later")
    world.advance()
    assert world.bodies() == ["a"]


def test_more_queues_are_noticed(one_queue: World) -> None:
    consumer = one_queue.consumer()
    consumer.start()
    one_queue.advance()
    one_queue.broker.create_topic("t", 3)
    one_queue.advance()
    assert one_queue.assigned(consumer) == [0, 1, 2]


def test_what_was_open_is_looked_at_on_the_grid_of_20_seconds(one_queue: World) -> None:
    seam = Seam(one_queue.broker)
    seam.fail = unreachable(ConsumerIds)
    consumer = one_queue.consumer(route=seam)
    consumer.start()
    one_queue.advance(19)
    assert one_queue.assigned(consumer) == []
    seam.fail = unreachable(QueryOffset)
    one_queue.advance(20)
    assert one_queue.assigned(consumer) == []
    seam.fail = unreachable()
    one_queue.advance(0.999)
    assert one_queue.assigned(consumer) == []
    one_queue.advance(0.001)
    assert one_queue.assigned(consumer) == [0]


def test_instances_that_differ_leave_queues_unowned(world: World) -> None:
    """The trap as it is: one of four queues of B is read, as A alone is what the other one subscribes to."""
    world.broker.create_topic("B", 2)
    first = world.consumer("c1")
    second = world.consumer("c2")
    second.subscribe("B")(lambda message: world.note("c2", message))
    first.start()
    second.start()
    world.advance()
    assert world.assigned(second, "B") == [1]


def test_the_guard_refuses_a_group_that_differs(world: World) -> None:
    world.consumer("c1", tags="x").start()
    with pytest.raises(GroupMismatchError, match="c1"):
        world.consumer("c2", tags="y", guard=True).start()
    world.consumer("c3", tags="x", guard=True).start()


# --------------------------------------------------------------------------------------------------------- flow control


def _held_most(world: World, consumer: PushConsumer) -> int:
    return max(len(assigned.messages) for assigned in consumer.assigned.values())


@pytest.mark.parametrize(
    ("settings", "most"),
    [
        ({"max_held_messages": 10, "pull_batch_size": 8}, 18),
        ({"max_held_bytes": 8 * 100, "pull_batch_size": 8}, 16),
        ({"max_held_messages_of_topic": 20, "pull_batch_size": 8}, 18),
    ],
)
def test_pulling_stops_above_a_limit_and_goes_on_below(one_queue: World, settings: dict[str, Any], most: int) -> None:
    peak = 0

    def listener(message: DeliveredMessage) -> None:
        nonlocal peak
        peak = max(peak, _held_most(one_queue, consumer))

    consumer = one_queue.consumer(listener=listener, threads=1, **settings)
    one_queue.send(*(f"{number:0100}" for number in range(60)))
    consumer.start()
    one_queue.advance(1)
    assert len(one_queue.seen) == 60
    assert peak == most


def test_pulling_stops_while_offsets_span_too_much(one_queue: World) -> None:
    """As in the original, a message that is stuck alone spans nothing."""
    at_pulls: list[int] = []
    most: list[int] = []
    seam = Seam(one_queue.broker)

    def note(request: Any) -> None:
        if isinstance(request, PullMessage) and request.topic == "t":
            at_pulls.append(
                next(assigned.messages.span for assigned in consumer.assigned.values() if assigned.queue.topic == "t")
            )

    seam.fail = note

    async def run() -> None:
        release = asyncio.Event()

        async def listener(message: DeliveredMessage) -> None:
            most.append(max(assigned.messages.span for assigned in consumer.assigned.values()))
            if message.queue_offset == 0:
                await release.wait()

        consumer.subscribe("t")(listener)
        one_queue.send(*map(str, range(60)))
        consumer.start()
        task = asyncio.ensure_future(one_queue.runner.advance_async(0))
        for _ in range(300):
            await asyncio.sleep(0)
        release.set()
        await task

    consumer = one_queue.consumer(topic=None, route=seam, max_span=20, pull_batch_size=8, threads=2)
    asyncio.run(run())
    assert len(most) == 60
    assert max(most) > 20 >= max(at_pulls)


def test_instances_that_differ_are_told_of_once_a_change(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """Two instances with different subscriptions lost messages without a word (issue 14, 2.2)."""
    with caplog.at_level(logging.WARNING, "librmq"):
        world.consumer("c1", tags="a").start()
        world.advance(1)
        assert caplog.records == []
        other = world.consumer("c2", tags="b")
        other.start()
        world.advance(100)
        for who in ("g@c1", "g@c2"):
            told = [
                record for record in caplog.records if record.getMessage().startswith(f"{who}: instances of group g")
            ]
            assert len(told) == 1
            assert told[0].levelname == "WARNING"
            assert "give every instance the same subscriptions" in told[0].getMessage()
        caplog.clear()
        other.shutdown()
        world.consumer("c3", tags="a").start()
        world.advance(100)
        assert caplog.records == []


def test_two_clients_of_one_id_are_named(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.consumer("c1").start()
    with caplog.at_level(logging.WARNING, "librmq"):
        world.consumer("c1").start()
    assert "client id 127.0.0.1@c1 at broker-a already" in caplog.text
    assert "an instance_name of its own" in caplog.text


def test_a_client_of_another_route_is_named(world: World) -> None:
    with Broker.temporary(runner=world.runner) as other:
        client = Client(other, instance_name="elsewhere")
        for make in (PushConsumer, PullConsumer, Producer):
            with pytest.raises(ConfigError, match="@elsewhere belongs to another route"):
                make(world.broker, "g", client=client)


@pytest.mark.parametrize("start", list(ConsumeFrom))
def test_broadcasting_gets_the_message_that_makes_its_topic(world: World, tmp_path: Path, start: ConsumeFrom) -> None:
    """The first send to a new topic made queues whose first message never came (issue 14, 2.4)."""
    settings: dict[str, Any] = {"model": MessageModel.BROADCASTING, "consume_from": start}
    world.consumer("c1", topic="new", offsets_folder=str(tmp_path), **settings).start()
    world.send("before the first rebalance", topic="new", queue=0)
    world.advance(1)
    world.send("after it", topic="new", queue=1)
    world.advance(1)
    world.broker.create_topic("new", 6)
    world.send("in a queue that is new", topic="new", queue=5)
    world.advance(1)
    assert world.bodies() == ["before the first rebalance", "after it", "in a queue that is new"]


def test_broadcasting_leaves_out_what_was_there(world: World, tmp_path: Path) -> None:
    world.send("old", queue=0)
    world.consumer("c1", model=MessageModel.BROADCASTING, offsets_folder=str(tmp_path)).start()
    world.advance(1)
    world.send("new", queue=0)
    world.advance(1)
    assert world.bodies() == ["new"]


def test_a_broker_that_is_cut_off_is_a_line_a_topic(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """A cut broker of 8 queues made 269 warnings a minute (issue 14, 5.1)."""
    seam = Seam(world.broker)
    world.consumer(route=seam).start()
    world.advance(1)
    seam.fail = unreachable(PullMessage, UpdateOffset, ConsumerIds)
    for number, body in enumerate("abcd"):
        world.send(body, queue=number)
    with caplog.at_level(logging.INFO, "librmq.consumer"):
        world.advance(60)
        assert [record.getMessage() for record in caplog.records if record.levelno > logging.INFO] == [
            "g@c1: pulling t/broker-a/0 fails: no answer",
            "g@c1: storing progress at broker-a fails: no answer",
        ]
        seam.fail = lambda request: None
        world.advance(4)
    assert sorted(world.bodies()) == ["a", "b", "c", "d"]
    assert "g@c1: pulling t works again" in caplog.text


def test_pause_and_resume(one_queue: World) -> None:
    consumer = one_queue.consumer()
    consumer.start()
    one_queue.advance()
    consumer.pause()
    one_queue.send("a")
    one_queue.advance(3600)
    assert one_queue.bodies() == []
    consumer.resume()
    one_queue.advance()
    assert one_queue.bodies() == ["a"]


def test_a_pull_that_fails_is_tried_again_after_3_seconds(one_queue: World) -> None:
    seam = Seam(one_queue.broker)
    seam.fail = unreachable(PullMessage)
    one_queue.consumer(route=seam).start()
    one_queue.send("a")
    one_queue.advance(2.9)
    seam.fail = unreachable()
    one_queue.advance(0.1)
    assert one_queue.bodies() == ["a"]


# ------------------------------------------------------------------------------------------------------------- timeout


def test_a_message_that_is_stuck_goes_back(one_queue: World) -> None:
    async def run() -> None:
        release = asyncio.Event()

        async def listener(message: DeliveredMessage) -> None:
            one_queue.note("c1", message)
            if message.body == b"stuck" and not message.reconsume_times:
                await release.wait()

        consumer = one_queue.consumer(topic=None, consume_timeout=60)
        consumer.subscribe("t")(listener)
        consumer.start()
        one_queue.send("stuck", "other")
        manual = one_queue.runner
        for _ in range(140):
            manual._take_turns(manual.now_ms() + 1000)  # a coroutine waits all the time
            manual.manual_clock.move_to(manual.now_ms() + 1000)
            await asyncio.sleep(0)
        release.set()
        await manual.advance_async(1)
        assert [seen.body for seen in one_queue.seen] == ["stuck", "other", "stuck"]
        assert one_queue.seen[2].reconsume_times == 1
        assert consumer.progress()[MessageQueue("t", "broker-a", 0)] == 2

    asyncio.run(run())


# ---------------------------------------------------------------------------------------------------------------- life


def test_life() -> None:
    with make_world() as world:
        consumer = world.consumer(topic=None)
        with pytest.raises(ConfigError, match="subscribe a listener"):
            consumer.start()
        consumer = world.consumer()
        assert not consumer.is_running
        with consumer:
            assert consumer.is_running
            with pytest.raises(ClientStateError, match="starts once"):
                consumer.start()
            twin = PushConsumer(world.broker, "g", client=consumer.client)
            twin.subscribe("t")(print)
            with pytest.raises(ClientStateError, match="already"):
                twin.start()
            with pytest.raises(ClientStateError, match="start failed"):
                twin.start()
        assert "shut down" in repr(consumer)


def test_bad_settings() -> None:
    with make_world() as world:
        broker = world.broker
        with pytest.raises(ConfigError, match="did you mean threads"):
            PushConsumer(broker, "g", thread=3)  # type: ignore[call-arg]
        for name in ("threads", "batch_size", "pull_batch_size"):
            bad: dict[str, Any] = {name: 0}
            with pytest.raises(ConfigError, match=name):
                PushConsumer(broker, "g", **bad)
        with pytest.raises(ConfigError, match="model"):
            PushConsumer(broker, "g", model="CLUSTERING")  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="strategy"):
            ConsumerConfig(strategy=3)  # type: ignore[arg-type]
        with pytest.raises(MessageIllegalError, match="group"):
            PushConsumer(broker, "a b")
        consumer = PushConsumer(broker, "g")
        with pytest.raises(MessageIllegalError, match="topic"):
            consumer.subscribe("a b")
        with pytest.raises(FilterSyntaxError):
            consumer.subscribe("t", sql="a >")
        with pytest.raises(ConfigError, match="either tags or sql"):
            consumer.subscribe("t", tags="a", sql="b = 1")
        with pytest.raises(ConfigError, match="function"):
            consumer.subscribe("t")(3)  # type: ignore[type-var]


def test_hooks_see_each_delivery(one_queue: World) -> None:
    log: list[object] = []

    def hook(context: ConsumeContext) -> Any:
        log.append((context.group, context.queue.topic, [m.body for m in context.messages]))
        return lambda result, error: log.append((result, repr(error)))

    def listener(message: DeliveredMessage) -> str:
        if message.body == b"b":
            raise ValueError("no")
        return "done"

    one_queue.consumer(listener=listener, hooks=[hook], threads=1).start()
    one_queue.send("a", "b")
    one_queue.advance()
    assert log == [
        ("g", "t", [b"a"]),
        ("done", "None"),
        ("g", "t", [b"b"]),
        (None, "ValueError('no')"),
    ]


def test_time_passes_quickly_while_nothing_happens(world: World) -> None:
    consumers = [world.consumer(f"c{number}") for number in range(3)]
    for consumer in consumers:
        consumer.start()
    world.send("a")
    world.advance(1000)
    labels: list[str] = []
    original = world.runner.pick
    world.runner.pick = lambda options: _noting(labels, original(options))  # type: ignore[method-assign]
    world.advance(24 * 3600)
    assert [label for label in labels if "g@" in label] == []


def _noting(labels: list[str], turn: Any) -> Any:
    if turn is not None:
        labels.append(turn.label)
    return turn


# ------------------------------------------------------------------------------------------------------------- asyncio


def test_coroutines_run_on_the_loop_of_the_start() -> None:
    async def run() -> None:
        loops = []
        with Broker.temporary() as broker:
            consumer = PushConsumer(broker, "g", consume_from=ConsumeFrom.FIRST)
            arrived = asyncio.Event()

            @consumer.subscribe("t")
            async def listen(message: DeliveredMessage) -> None:
                loops.append(asyncio.get_running_loop())
                arrived.set()

            consumer.start()
            producer = Producer(broker, "p")
            await producer.send_async("t", b"a")
            await asyncio.wait_for(arrived.wait(), 20)
            assert await consumer.shutdown_async()
            assert loops == [asyncio.get_running_loop()]
            assert broker.consumer_offset("g", "t", 0) in (None, 0, 1)

    asyncio.run(run())


# ------------------------------------------------------------------------------------------------------------- threads


@pytest.mark.parametrize("orderly", [False, True])
def test_threads(orderly: bool) -> None:
    before = set(threading.enumerate())
    broker = Broker.temporary()
    total, seen, done = 3000, [], threading.Event()
    with broker:
        consumer = PushConsumer(broker, "g", orderly=orderly, threads=4)

        @consumer.subscribe("t")
        def listen(message: DeliveredMessage) -> None:
            seen.append((message.queue, message.queue_offset))
            if len(seen) >= total:
                done.set()

        producer = Producer(broker, "p")
        producer.send("t", b"x")
        consumer.start()
        senders = [
            threading.Thread(target=lambda: [producer.send("t", b"x") for _ in range((total - 1) // 2)])
            for _ in range(2)
        ]
        for sender in senders:
            sender.start()
        for sender in senders:
            sender.join()
        producer.send("t", b"x")
        assert done.wait(60)
        assert consumer.shutdown()
        assert sorted(seen) == sorted(set(seen))
        if orderly:
            for queue in {queue for queue, _ in seen}:
                offsets = [offset for one, offset in seen if one == queue]
                assert offsets == sorted(offsets)
        assert sum(broker.consumer_offsets("g", "t").values()) == len(seen)
    assert set(threading.enumerate()) <= before


def test_a_shutdown_waits_within_its_bound() -> None:
    release, begun = threading.Event(), threading.Event()
    with Broker.temporary() as broker:
        consumer = PushConsumer(broker, "g")

        @consumer.subscribe("t")
        def listen(message: DeliveredMessage) -> None:
            begun.set()
            release.wait(60)

        Producer(broker, "p").send("t", b"x")
        consumer.start()
        assert begun.wait(60)
        assert consumer.shutdown(timeout=0.01) is False
        assert broker.consumer_offset("g", "t", 0) in (None, 0)  # it comes again
        release.set()


def test_an_interrupted_shutdown_leaves_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shutdown that is interrupted leaves the group all the same."""
    release, begun = threading.Event(), threading.Event()
    with Broker.temporary() as broker:
        broker.create_topic("t", 1)
        consumer = PushConsumer(broker, "g", threads=1)

        @consumer.subscribe("t")
        def listen(message: DeliveredMessage) -> None:
            if message.body == b"second":
                begun.set()
                release.wait(60)

        producer = Producer(broker, "p")
        for body in (b"first", b"second"):
            producer.send("t", body)
        consumer.start()
        assert begun.wait(60)

        def interrupted(*arguments: object) -> bool:
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(broker.runner.clock, "wait", interrupted)
            with pytest.raises(KeyboardInterrupt):
                consumer.shutdown()
        assert broker.consumer_offset("g", "t", 0) == 1
        assert broker.call(ConsumerIds("g")) == ()
        release.set()


def test_an_idle_consumer_takes_no_turns() -> None:
    runner = ThreadRunner(ManualClock())
    try:
        with Broker.temporary(runner=runner) as broker, runner.lock:
            consumer = PushConsumer(broker, "g")
            consumer.subscribe("t")(print)
            consumer.start()
            assert consumer.rebalancing.step.at == 0
    finally:
        runner.close()


# ------------------------------------------------------------------------------------------------------------- metrics


@pytest.mark.parametrize("orderly", [False, True])
def test_metrics(one_queue: World, orderly: bool) -> None:
    metrics = Metrics()

    def listener(message: DeliveredMessage) -> None:
        if message.body == b"b" and not message.reconsume_times:
            raise ValueError("no")

    consumer = one_queue.consumer(listener=listener, metrics=metrics, orderly=orderly)
    consumer.start()
    one_queue.advance(1)
    one_queue.send(*"abc")
    one_queue.advance(30)
    values = metrics.snapshot()
    consumed = values["consumed"]
    if orderly:
        assert consumed == {("t", "g", "success"): 3, ("t", "g", "suspend"): 1}
    else:
        assert consumed == {("t", "g", "success"): 2, ("t", "g", "later"): 1, ("%RETRY%g", "g", "success"): 1}
    assert values["queues"]["t", "g"] == 1
    assert values["lag"]["t", "g"] == values["waiting_messages"]["t", "g"] == values["waiting_bytes"]["t", "g"] == 0
    assert values["rebalances"]["t", "g"] == 1
    assert values["pulls"]["t", "g", "FOUND"] >= 1
    assert values["consume_seconds"]["t", "g"] == 0
    consumer.pause()
    one_queue.send("d")
    one_queue.advance(1)
    one_queue.send("e", "f")
    assert metrics.snapshot()["lag"]["t", "g"] in (2, 3)
    consumer.shutdown()
    assert "queues" not in metrics.snapshot()


def test_gauges_of_a_groups_instances_add_up(world: World) -> None:
    metrics = Metrics()
    first, second = (world.consumer(name, metrics=metrics) for name in ("c1", "c2"))
    first.start()
    second.start()
    world.advance(1)
    assert metrics.snapshot()["queues"]["t", "g"] == 4
    second.shutdown()
    world.advance(1)
    assert metrics.snapshot()["queues"]["t", "g"] == 4
    first.unsubscribe("t")
    first.shutdown()
    assert "queues" not in metrics.snapshot()


# ------------------------------------------------------------------------------------------------------ brokers change


def test_a_forgotten_member_is_told_and_pulls_again(one_queue: World) -> None:
    """A member that was forgotten is told again and pulls again."""
    consumer = one_queue.consumer()
    consumer.start()
    one_queue.advance(1)
    one_queue.broker.forget(consumer.client.client_id)
    one_queue.send("a")
    one_queue.advance(29)
    assert one_queue.bodies() == []
    one_queue.advance(1)
    assert one_queue.bodies() == ["a"]


@pytest.mark.parametrize("has_another", [False, True])
def test_a_forgotten_client_finds_out_by_itself(one_queue: World, has_another: bool) -> None:
    """Nobody tells it: its pull is answered, and it asks again."""
    consumer = one_queue.consumer("c1")
    consumer.start()
    if has_another:
        one_queue.consumer("c2").start()
    one_queue.advance(1)
    one_queue.broker.forget(consumer.client.client_id)
    one_queue.send("at once")
    one_queue.advance()
    assert one_queue.bodies("c1") == (["at once"] if has_another else [])  # without a member there is no subscription
    one_queue.advance(31)
    del one_queue.seen[:]
    one_queue.send("later")
    one_queue.advance()
    assert one_queue.bodies() == ["later"]
    ids: tuple[str, ...] = one_queue.broker.call(ConsumerIds("g"))
    assert consumer.client.client_id in ids


def test_members_that_come_do_not_disturb_pulls(one_queue: World) -> None:
    seam = Seam(one_queue.broker)
    one_queue.consumer("a", route=seam).start()
    one_queue.advance(20)
    del seam.asked[:]
    one_queue.consumer("b").start()
    one_queue.advance()
    assert not [request for request in seam.asked if isinstance(request, PullMessage)]


def test_a_broker_that_is_opened_anew() -> None:
    runner, files = ManualRunner(), MemoryFiles()
    config = StoreConfig(commitlog_file_size=1 << 20, max_total_size=1 << 30)

    def opened() -> Broker:
        return Broker.open("/store", files=files, store_config=config, runner=runner)

    broker = opened()
    broker.create_topic("t", 1)
    routes = RouteTable(broker)
    got: list[bytes] = []
    consumer = PushConsumer(routes, "g", instance_name="c1")
    consumer.subscribe("t")(lambda message: got.append(message.body))
    consumer.start()
    producer = Producer(routes, "p")
    producer.send("t", b"a")
    runner.advance(10_000)
    broker.close()
    runner.advance(1_000)
    broker = opened()
    routes.add(broker)
    producer.send("t", b"b")
    runner.advance(60_000)
    assert got == [b"a", b"b"]
    consumer.shutdown()
    assert broker.consumer_offset("g", "t") == 2
    broker.close()


def test_a_strategy_that_fails_leaves_queues_where_they_are(one_queue: World, caplog: pytest.LogCaptureFixture) -> None:
    broken = False

    def strategy(client_id: str, queues: Any, clients: Any) -> Any:
        if broken:
            raise RuntimeError("oops")
        return list(queues)

    consumer = one_queue.consumer(strategy=strategy)
    consumer.start()
    one_queue.advance()
    broken = True
    one_queue.broker.create_topic("t", 2)
    one_queue.advance()
    assert one_queue.assigned(consumer) == [0]
    assert "sharing out the queues of t fails: oops" in caplog.text
    broken = False
    one_queue.advance(19)
    assert one_queue.assigned(consumer) == [0]
    one_queue.advance(1)
    assert one_queue.assigned(consumer) == [0, 1]


def test_a_lost_pull_is_made_again_after_120_seconds(one_queue: World) -> None:
    """A queue whose pull was lost is made again after 120 seconds."""
    seam = Seam(one_queue.broker)
    consumer = one_queue.consumer(route=seam)
    consumer.start()
    one_queue.advance(30)
    queue = MessageQueue("t", "broker-a", 0)
    before = consumer.assigned[queue]
    seam.fail = lambda request: RuntimeError("oops") if isinstance(request, PullMessage) else None
    one_queue.send("a")
    with pytest.raises(RuntimeError, match="oops"):
        one_queue.advance()
    seam.fail = unreachable()
    one_queue.advance(129)  # the first of the 20 s behind 30 + 120 is 160
    assert one_queue.bodies() == []
    assert consumer.assigned[queue] is before
    one_queue.advance(1)
    assert one_queue.bodies() == ["a"]
    assert consumer.assigned[queue] is not before
    one_queue.advance(60)
    asked = len(seam.asked)
    one_queue.advance(86_400)  # the pull that the broker holds is not lost
    assert len(seam.asked) == asked


def test_a_topic_may_be_added_while_it_runs(one_queue: World) -> None:
    consumer = one_queue.consumer()
    consumer.start()
    one_queue.advance()
    one_queue.broker.create_topic("u", 1)
    got: list[bytes] = []
    consumer.subscribe("u")(lambda message: got.append(message.body))
    one_queue.send("a", topic="u")
    one_queue.advance()
    assert got == [b"a"]


def test_broadcasting_on_disk(one_queue: World, tmp_path: Path) -> None:
    for _ in range(2):
        consumer = one_queue.consumer(
            "b1", model=MessageModel.BROADCASTING, consume_from=ConsumeFrom.FIRST, offsets_folder=str(tmp_path)
        )
        consumer.start()
        one_queue.send("a")
        one_queue.advance(10)
        consumer.shutdown()
    assert one_queue.bodies() == ["a", "a"]
    assert (tmp_path / "127.0.0.1@b1" / "g" / "offsets.json").stat().st_size
    with pytest.raises(ConfigError, match="no name of a folder"):
        one_queue.consumer("../b1", model=MessageModel.BROADCASTING, offsets_folder=str(tmp_path)).start()
