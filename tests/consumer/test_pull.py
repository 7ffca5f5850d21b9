"""Pull consumers: subscribing and assigning, polling, positions, progress, and misuse."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import Any

import pytest

from librmq import ConsumeFrom, ManualRunner, protocol
from librmq.broker import Broker
from librmq.client.producer import Producer
from librmq.consumer import PullConsumer
from librmq.errors import ClientStateError, NoRouteError
from librmq.message.message import MessageQueue
from librmq.testing import Kit
from tests.consumer.parties import Seam, seam_of, send
from tests.interrupting import at_each_call

QUEUES = [MessageQueue("t", "broker-a", number) for number in range(3)]


@pytest.fixture
def filled(rmq: Kit) -> Kit:
    """Store ten messages in each of three queues; every second one has tag b."""
    rmq.broker.create_topic("t", 3)
    for number in range(30):
        send(rmq, str(number), queue=number % 3, tags="ab"[number // 3 % 2])
        rmq.advance(seconds=1)
    return rmq


def reader(rmq: Kit, name: str = "l1", **settings: Any) -> PullConsumer:
    return PullConsumer(rmq.route, "g", instance_name=name, **settings)


def subscribed(rmq: Kit, name: str = "l1", **settings: Any) -> PullConsumer:
    consumer = reader(rmq, name, **settings)
    consumer.subscribe("t")
    return consumer.start()


def reading(rmq: Kit, queues: int, **settings: Any) -> PullConsumer:
    """Return a started consumer of the first queues."""
    consumer = reader(rmq, "l1", **settings)
    consumer.assign(QUEUES[:queues])
    return consumer.start()


def polled(consumer: PullConsumer) -> list[tuple[int, int]]:
    return [(message.queue.queue_id, message.queue_offset) for message in consumer]


def test_topics_and_queues_may_be_chosen_after_the_start(filled: Kit) -> None:
    with reader(filled) as consumer:
        assert consumer.poll() == []
        consumer.subscribe("t", tags="a")
        assert len(polled(consumer)) == 15
    with reader(filled, "l2") as consumer:
        consumer.assign(QUEUES[:1])
        assert polled(consumer) == []


def test_a_subscribed_consumer_shares_queues(filled: Kit) -> None:
    first, second = reader(filled, "l1"), reader(filled, "l2")
    for consumer in (first, second):
        consumer.subscribe("t")
        consumer.start()
    filled.run_until_idle()
    assert first.assignment == tuple(QUEUES[:2])
    assert second.assignment == tuple(QUEUES[2:])
    assert len(polled(first)) == 20
    assert len(polled(second)) == 10
    second.shutdown()
    filled.run_until_idle()
    assert first.assignment == tuple(QUEUES)
    send(filled, "x", queue=2)
    assert polled(first) == [(2, 10)]
    first.shutdown()
    assert filled.broker.consumer_offsets("g", "t") == {0: 10, 1: 10, 2: 11}


def test_a_poll_gives_messages_of_one_queue(filled: Kit) -> None:
    consumer = reader(filled, pull_batch_size=4)
    consumer.subscribe("t", tags="b")
    consumer.start()
    polls = []
    while messages := consumer.poll():
        polls.append([(message.queue.queue_id, message.queue_offset) for message in messages])
    assert all(len({queue for queue, _ in poll}) == 1 for poll in polls)
    assert sorted(row for poll in polls for row in poll) == [(q, o) for q in range(3) for o in range(1, 10, 2)]
    assert [poll[0][0] for poll in polls[:3]] == [0, 1, 2]


class CountedLock:
    """Wraps the lock of a runner, and counts how often it is taken."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.depth, self.times = inner, 0, 0

    def __enter__(self) -> None:
        self.inner.acquire()
        self.depth += 1
        self.times += self.depth == 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1
        self.inner.release()


class PassesOver(Seam):
    """Answers pulls like a broker that checks three messages at a time and finds no match."""

    def call(self, request: protocol.Request[Any], /) -> Any:
        if isinstance(request, protocol.PullMessage) and request.queue_offset < 9:
            self.fail(request)
            return protocol.PullResponse(protocol.PullStatus.NO_MATCHED_MESSAGE, request.queue_offset + 3, 0, 10)
        return super().call(request)


def test_a_poll_that_passes_over_messages_yields_the_lock(filled: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two checks of one queue, other threads can take the lock."""
    lock = CountedLock(filled.runner.lock)
    seam = PassesOver(filled.route)
    consumer = PullConsumer(seam, "g")
    consumer.assign(QUEUES[:2])
    consumer.start()
    monkeypatch.setattr(filled.runner, "lock", lock)
    asked: list[tuple[int, int, int]] = []

    def note(request: protocol.Request[Any]) -> None:
        if isinstance(request, protocol.PullMessage):
            asked.append((lock.times, request.queue_id, request.queue_offset))

    seam.fail = note
    assert [message.queue_offset for message in consumer.poll(0)] == [9]
    first = asked[0][0]
    assert asked == [(first + at // 3, queue_id, at) for at in (0, 3, 6, 9) for queue_id in (0, 1)][:-1]
    monkeypatch.undo()


def test_each_poll_commits_messages_of_earlier_polls(filled: Kit) -> None:
    consumer = subscribed(filled)
    consumer.poll()
    filled.advance(seconds=20)
    assert filled.broker.consumer_offset("g", "t", 0) == 0
    consumer.poll()
    filled.advance(seconds=5)
    assert filled.broker.consumer_offset("g", "t", 0) == 10


@pytest.mark.parametrize("left_by", ["break", "exception"])
def test_a_loop_left_early_loses_nothing(filled: Kit, left_by: str) -> None:
    """The next poll, by this consumer or another, returns the messages that the loop did not get (issue 14, 1.7)."""
    consumer = reader(filled)
    consumer.assign(QUEUES)
    handled: list[bytes] = []

    def leave_early() -> None:
        with consumer:
            for message in consumer:
                if len(handled) == 13:
                    if left_by == "break":
                        handled.append(message.body)
                        break
                    raise RuntimeError("in the middle of the 14th")
                handled.append(message.body)

    with pytest.raises(RuntimeError) if left_by == "exception" else nullcontext():
        leave_early()
    again = reader(filled, "l2")
    again.assign(QUEUES)
    with again:
        handled += [message.body for message in again]
    assert sorted(map(int, handled)) == list(range(30))


def test_the_next_poll_continues_a_loop_left_early(filled: Kit) -> None:
    consumer = reader(filled, pull_batch_size=10)
    consumer.assign(QUEUES[:1])
    with consumer:
        for message in consumer:
            if message.queue_offset == 3:
                break
        assert consumer.position(QUEUES[0]) == 4
        assert [message.queue_offset for message in consumer.poll()] == list(range(4, 10))


def test_a_seek_within_a_loop_counts_immediately(filled: Kit) -> None:
    consumer = reader(filled)
    consumer.assign(QUEUES[:1])
    seen = []
    with consumer:
        for message in consumer:
            seen.append(message.queue_offset)
            if seen == [0, 1]:
                consumer.seek(QUEUES[0], 7)
    assert seen == [0, 1, 7, 8, 9]


def test_an_offset_beyond_the_end_is_neither_sought_nor_committed(filled: Kit) -> None:
    consumer = reader(filled)
    consumer.assign(QUEUES[:1])
    with consumer:
        with pytest.raises(
            ClientStateError, match="offsets 0 to 10, not 1795802400000; queue_offset_at finds that of a time"
        ):
            consumer.seek(QUEUES[0], 1_795_802_400_000)
        with pytest.raises(ClientStateError, match="not 1795802400000"):
            consumer.commit({QUEUES[0]: 1_795_802_400_000})
        assert consumer.position(QUEUES[0]) == 0


def test_a_poll_that_is_interrupted_loses_nothing(filled: Kit) -> None:
    consumer = reading(filled, 1)
    polled: list[Any] = []
    interrupted = 0
    for came in at_each_call(lambda: polled.append(consumer.poll())):
        if came:
            interrupted += 1
            messages = polled.pop() if polled else consumer.poll()
            assert [message.queue_offset for message in messages] == list(range(10))
            consumer.seek(QUEUES[0], 0)
    assert interrupted >= 20


def test_without_auto_commit_nothing_is_stored_but_by_commit(filled: Kit) -> None:
    consumer = reading(filled, 2, auto_commit=False)
    polled(consumer)
    filled.advance(seconds=60)
    consumer.commit({QUEUES[0]: 7})
    assert (consumer.committed(QUEUES[0]), filled.broker.consumer_offset("g", "t", 0)) == (7, 7)
    consumer.shutdown()
    assert filled.broker.consumer_offset("g", "t", 1) in (None, 0)
    again = reading(filled, 1)
    assert polled(again) == [(0, 7), (0, 8), (0, 9)]
    again.commit()
    assert again.committed(QUEUES[0]) == 10


def test_positions(filled: Kit) -> None:
    consumer = reader(filled, auto_commit=False)
    assert consumer.queues("t") == QUEUES
    consumer.assign(QUEUES[:2])
    consumer.start()
    assert consumer.assignment == tuple(QUEUES[:2])
    consumer.seek(QUEUES[0], 3)
    assert consumer.position(QUEUES[0]) == 3
    assert polled(consumer)[:1] == [(0, 3)]
    assert polled(consumer) == []
    consumer.seek_to_begin(QUEUES[1])
    assert len(polled(consumer)) == 10
    consumer.seek_to_end(QUEUES[1])
    assert consumer.position(QUEUES[1]) == 10
    for queue_offset in (-1, 11, 1000):
        with pytest.raises(ClientStateError, match="has offsets 0 to 10"):
            consumer.seek(QUEUES[1], queue_offset)
    with pytest.raises(ClientStateError, match="does not read"):
        consumer.seek(QUEUES[2], 0)
    with pytest.raises(ClientStateError, match="does not read"):
        consumer.commit({QUEUES[2]: 0})
    stored_ms = filled.messages("t")[0].store_timestamp_ms
    assert consumer.queue_offset_at(QUEUES[0], 0) == 0
    assert consumer.queue_offset_at(QUEUES[0], stored_ms + 6000) == 2
    assert consumer.queue_offset_at(QUEUES[0], filled.clock.now_ms() + 3_600_000) == 9
    consumer.assign(QUEUES[1:])
    assert consumer.assignment == tuple(QUEUES[1:])


def test_pause_and_resume(filled: Kit) -> None:
    consumer = reading(filled, 3)
    consumer.pause(QUEUES[:2])
    assert {queue for queue, _ in polled(consumer)} == {2}
    consumer.resume(QUEUES[:1])
    assert {queue for queue, _ in polled(consumer)} == {0}


def test_misuse(filled: Kit) -> None:
    consumer = reader(filled)
    with pytest.raises(ClientStateError, match="created"):
        consumer.poll()
    consumer.subscribe("t")
    with pytest.raises(ClientStateError, match="exclude each other"):
        consumer.assign(QUEUES)
    consumer.start()
    with pytest.raises(ClientStateError, match="start only once"):
        consumer.start()
    consumer.shutdown()
    with pytest.raises(ClientStateError, match="shut down"):
        consumer.poll()
    assert "shut down" in repr(consumer)
    other = reader(filled)
    other.assign(QUEUES)
    with pytest.raises(ClientStateError, match="exclude each other"):
        other.subscribe("t")


@pytest.mark.parametrize("chosen", [{"tags": "b"}, {"sql": "TAGS = 'b'"}])
def test_assigned_queues_are_read_by_a_filter(filled: Kit, chosen: dict[str, Any]) -> None:
    consumer = reader(filled, consume_from=protocol.ConsumeFrom.FIRST)
    consumer.assign(QUEUES[1:2], **chosen)
    with consumer:
        assert [(message.tags, message.queue.queue_id) for message in consumer] == [("b", 1)] * 5


@pytest.mark.parametrize("offsets", [3, "x", [QUEUES[0]], {QUEUES[0]: "1"}, {QUEUES[0]: -1}])
def test_wrong_queues_and_offsets_are_reported(filled: Kit, offsets: Any) -> None:
    consumer: Any = reading(filled, 1)
    with pytest.raises(TypeError, match=r"expected .*queue offset.*, found"):
        consumer.commit(offsets)
    for use in (consumer.pause, consumer.resume, consumer.assign):
        for queues in (3, QUEUES[0], [3]):
            with pytest.raises(TypeError, match="queues: expected a list of MessageQueue, found"):
                use(queues)
    with pytest.raises(TypeError, match="queue: expected a MessageQueue, found 3"):
        consumer.committed(3)
    with pytest.raises(ClientStateError, match="not '1'"):
        consumer.seek(QUEUES[0], "1")


def test_a_queue_of_an_unknown_broker(filled: Kit) -> None:
    consumer = reader(filled)
    consumer.assign([MessageQueue("t", "elsewhere", 0)])
    with pytest.raises(NoRouteError, match="elsewhere"):
        consumer.start()
    assert filled.broker.call(protocol.ConsumerIds("g")) == ()
    assert consumer.assignment == ()
    filled.advance(seconds=60)
    again = reader(filled)  # has the same name
    again.subscribe("t")
    again.start()
    with pytest.raises(ClientStateError, match="start only once"):
        again.start()
    assert filled.broker.call(protocol.ConsumerIds("g")) == (again.client.client_id,)


def test_faults(filled: Kit) -> None:
    seam = seam_of(filled)
    consumer = PullConsumer(seam, "g")
    consumer.assign(QUEUES[:1])
    consumer.start()
    seam.cut(protocol.PullMessage, protocol.UpdateOffset)
    assert consumer.poll() == []
    with pytest.raises(ClientStateError, match="not stored"):
        consumer.commit({QUEUES[0]: 3})
    seam.cut()
    assert len(consumer.poll()) == 10


def test_a_position_that_the_queue_does_not_have(filled: Kit) -> None:
    filled.broker.call(protocol.UpdateOffset("g", "t", 0, 99))
    consumer = reading(filled, 1)
    assert polled(consumer) == []
    send(filled, "x", queue=0)
    assert polled(consumer) == [(0, 10)]


@pytest.mark.parametrize("moves", [False, True])
def test_a_corrected_position_is_stored(filled: Kit, moves: bool) -> None:
    filled.broker.call(protocol.UpdateOffset("g", "t", 0, 99))
    consumer = subscribed(filled)
    assert len(polled(consumer)) == 20
    send(filled, "x", queue=0)
    filled.advance(seconds=1)
    assert polled(consumer) == [(0, 10)]
    if moves:
        subscribed(filled, "l0")
    filled.advance(seconds=20)
    assert consumer.assignment == tuple(QUEUES[2:] if moves else QUEUES)
    assert filled.broker.consumer_offset("g", "t", 0) == 11


@pytest.mark.parametrize("saves", [False, True])
def test_a_position_set_back_is_stored_when_its_queue_moves(filled: Kit, saves: bool) -> None:
    """Also if progress could be saved in between."""
    consumer = subscribed(filled, pull_batch_size=2)
    assert len(polled(consumer)) == 30
    if not saves:
        consumer.commit()
    consumer.seek(QUEUES[0], 4)
    if saves:
        filled.advance(seconds=20)
        assert filled.broker.consumer_offsets("g", "t") == {1: 10, 2: 10}
    assert [message.queue_offset for _ in range(2) for message in consumer.poll()] == [4, 5, 6, 7]
    subscribed(filled, "l0")
    filled.run_until_idle()
    assert consumer.assignment == tuple(QUEUES[2:])
    assert filled.broker.consumer_offset("g", "t", 0) == 6


def test_reset_of_a_running_group(filled: Kit) -> None:
    consumer = subscribed(filled, consume_from=protocol.ConsumeFrom.FIRST)
    assert len(polled(consumer)) == 30
    filled.advance(seconds=20)
    filled.broker.call(protocol.ResetGroup("g", "t", 0))
    assert len(polled(consumer)) == 30


def test_a_poll_waits_for_the_first_message() -> None:
    with Broker.temporary() as broker:
        broker.create_topic("t", 2)
        consumer = PullConsumer(broker, "g")
        consumer.subscribe("t")
        with consumer:
            assert consumer.poll(0) == []
            producer = Producer(broker, "p")
            sender = threading.Thread(target=lambda: producer.send("t", b"late"))
            sender.start()
            assert [message.body for message in consumer.poll(60)] == [b"late"]
            sender.join()


def test_queues_come_back_from_a_member_that_joins_and_leaves_at_once() -> None:
    runner = ManualRunner()
    with Broker.temporary(runner=runner) as broker, Producer(broker, "shop") as shop:
        broker.create_topic("T", 4)
        for number in range(4):
            shop.send("T", str(number))
        stays, leaves = (
            PullConsumer(broker, "g", instance_name=name, consume_from=ConsumeFrom.FIRST) for name in ("i1", "i2")
        )
        for consumer in (stays, leaves):
            consumer.subscribe("T")
            consumer.start()
        leaves.shutdown()
        runner.advance(40_000)
        assert len([message for _ in range(4) for message in stays.poll(0)]) == 4
        stays.shutdown()
