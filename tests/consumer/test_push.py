"""Concurrent push consumers: delivery, retries, progress, rebalancing, limits, timeouts, start and shutdown."""

from __future__ import annotations

import asyncio
import functools
import logging
import pickle
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any
from unittest.mock import Mock

import pytest

from librmq import protocol
from librmq.broker import Broker
from librmq.client import Operation
from librmq.client.client import Client
from librmq.client.producer import Producer
from librmq.consumer import ConsumerConfig, DeliveredMessage, PullConsumer, PushConsumer
from librmq.errors import (
    BrokerError,
    ClientStateError,
    ConfigError,
    FilterSyntaxError,
    GroupMismatchError,
    MessageIllegalError,
)
from librmq.listener import DeadLetter, DownstreamDown, ReconsumeLater
from librmq.message.message import Message, MessageQueue
from librmq.metrics import Metrics
from librmq.testing import Kit, Process, explore
from tests.consumer.parties import Noted, assigned, bodies, most_at_once, newest_takes_all, seam_of, send, subscribed
from tests.planted import send as send_to_end

T0 = MessageQueue("t", "broker-a", 0)


def fail(message: DeliveredMessage) -> None:
    raise ValueError("no stock")


def stored(rmq: Kit) -> int | None:
    return rmq.broker.consumer_offset("g", "t")


# ------------------------------------------------------------------------------------------------------------ delivery


def test_fields_that_a_listener_sees(one_queue: Kit) -> None:
    delivered: list[DeliveredMessage] = []
    subscribed(one_queue, delivered.append)
    result = send(one_queue, "a", "b", tags="x", keys=["k1", "k2"], properties={"color": "red"})[1]
    one_queue.run_until_idle()
    message = delivered[1]
    assert (message.topic, message.queue_id, message.queue_offset, message.queue) == ("t", 0, 1, T0)
    assert (message.broker_name, message.min_offset, message.max_offset) == ("broker-a", 0, 2)
    assert (message.message_id, message.offset_id) == (result.message_id, result.offset_id)
    assert (message.tags, message.keys, message.reconsume_times) == ("x", ("k1", "k2"), 0)
    assert message.transaction_id is None
    assert message.origin_message_id == message.message_id
    expected = {
        "color": "red",
        "MIN_OFFSET": "0",
        "MAX_OFFSET": "2",
        "CONSUME_START_TIME": str(one_queue.clock.now_ms()),
    }
    assert expected.items() <= dict(message.properties).items()
    copy = pickle.loads(pickle.dumps(message))
    assert (copy, copy.queue, copy.max_offset) == (message, message.queue, 2)
    assert "DeliveredMessage('t'" in repr(message)


def test_only_requested_tags_are_delivered(four_queues: Kit) -> None:
    subscribed(four_queues, filters={"tags": "Aa || C"})
    send(four_queues, "a", tags="Aa")
    send(four_queues, "b", tags="BB")  # has the same hash as Aa
    send(four_queues, "c", tags="C")
    send(four_queues, "d")
    four_queues.advance(seconds=20)
    assert sorted(bodies(four_queues)) == ["a", "c"]
    assert sum(four_queues.offsets("g").values()) == 4  # skipped messages count as consumed


def test_sql(one_queue: Kit) -> None:
    subscribed(one_queue, filters={"sql": "amount > 100"})
    for amount in ("50", "150"):
        send(one_queue, amount, properties={"amount": amount})
    one_queue.advance(seconds=30)
    assert bodies(one_queue) == ["150"]
    assert stored(one_queue) == 2


def test_a_batch_never_spans_two_pulls(one_queue: Kit) -> None:
    batches: list[list[str]] = []
    send(one_queue, *"abcdefgh")
    subscribed(
        one_queue, lambda messages: batches.append([m.body.decode() for m in messages]), batch_size=4, pull_batch_size=6
    )
    one_queue.run_until_idle()
    assert sorted(batches) == [list("abcd"), list("ef"), list("gh")]


@pytest.mark.parametrize(
    ("index", "again"), [(None, ""), (0, "bcd"), (1, "cd"), (3, ""), (99, ""), (-1, "abcd"), (-2, "abcd")]
)
def test_a_batch_listener_returns_the_last_consumed_index(one_queue: Kit, index: int | None, again: str) -> None:
    send(one_queue, *"abcd")
    consumer = subscribed(one_queue, lambda messages: None if messages[0].reconsume_times else index, batch_size=4)
    one_queue.advance(seconds=30)
    assert bodies(one_queue) == [*"abcd", *again]
    assert consumer.progress()[T0] == 4


def test_as_many_listeners_at_once_as_threads(one_queue: Kit) -> None:
    subscribed(one_queue, threads=3)
    one_queue.faults.slow_listener("g", 1, times=8)
    send(one_queue, *"abcdefgh")
    one_queue.advance(seconds=10)
    assert sorted(bodies(one_queue)) == list("abcdefgh")
    assert most_at_once(one_queue) == 3


# ----------------------------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize("error", [ReconsumeLater(), DownstreamDown("the bank")], ids=["failure", "rest"])
def test_a_message_that_went_back_at_the_consume_timeout_comes_once(one_queue: Kit, error: Exception) -> None:
    """Its listener ends later by an error, which neither sends it back nor keeps it once more."""

    def fail_at_first(message: DeliveredMessage) -> None:
        if not message.reconsume_times:
            raise error

    one_queue.consumer("g").subscribe("t", fail_at_first)
    one_queue.faults.slow_listener("g", 3600)
    send(one_queue, "a")
    one_queue.advance(hours=5)
    assert [delivery.attempt for delivery in one_queue.delivered("g")] == [0, 1]


def test_retries_then_dead_letter(rmq: Kit) -> None:
    """After 10 s, 30 s, 1 min, … 2 h, and then as a dead letter."""
    times = Noted(rmq, {"a": 17})
    subscribed(rmq, times)
    send(rmq, "a")
    rmq.advance(hours=5)
    waits = [10, 30, *range(60, 601, 60), 1200, 1800, 3600, 7200]
    assert [seen[1] for seen in times.seen] == list(range(17))
    for number, (_, _, at_ms) in enumerate(times.seen):
        due_ms = 1000 * sum(waits[:number])
        assert due_ms <= at_ms < due_ms + 100 * (number + 1)
    assert {one.message.topic for one in rmq.delivered("g")[1:]} == {"%RETRY%g"}
    assert [message.body for message in rmq.dead_letters("g")] == [b"a"]


def test_a_group_without_retry_queues_can_get_some(rmq: Kit) -> None:
    rmq.expect("lost")  # the first message
    rmq.broker.call(protocol.SetGroup("g", {"retryQueueNums": 0}))
    subscribed(rmq, Noted(rmq, {"a": 1, "b": 1}))
    send(rmq, "a")
    rmq.advance(minutes=1)
    assert bodies(rmq) == ["a"]
    rmq.broker.call(protocol.SetGroup("g", {"retryQueueNums": 1}))
    send(rmq, "b")
    rmq.advance(minutes=1)
    assert bodies(rmq) == ["a", "b", "b"]


def test_a_redelivery_shows_its_first_topic(one_queue: Kit) -> None:
    shown: list[tuple[str, str, str, str]] = []

    def listener(message: DeliveredMessage) -> None:
        shown.append((message.topic, message.message_id, message.origin_message_id, message.queue.topic))
        if len(shown) < 3:
            raise ReconsumeLater

    subscribed(one_queue, listener)
    sent = send(one_queue, "a")[0]
    one_queue.advance(seconds=100)
    assert shown[1:] == [("t", sent.message_id, sent.offset_id, "%RETRY%g")] * 2
    assert (shown[0][0], shown[0][1], shown[0][3]) == ("t", sent.message_id, "t")


def test_a_listener_chooses_a_level_or_a_dead_letter(one_queue: Kit) -> None:
    def listener(message: DeliveredMessage) -> None:
        if message.body == b"late" and not message.reconsume_times:
            raise ReconsumeLater(delay_level=2)
        if message.body == b"never":
            raise DeadLetter("broken")

    subscribed(one_queue, listener)
    send(one_queue, "late", "never")
    one_queue.advance(seconds=6)
    assert bodies(one_queue) == ["late", "never", "late"]
    assert 5000 <= one_queue.delivered("g")[2].began_ms <= 5100
    assert [message.body for message in one_queue.dead_letters("g")] == [b"never"]


def test_own_maximum_and_hook_before_the_last_attempt(one_queue: Kit) -> None:
    last: list[int] = []
    subscribed(one_queue, fail, max_reconsume_times=2, before_last_attempt=lambda m: last.append(m.reconsume_times))
    send(one_queue, "a")
    one_queue.advance(hours=1)
    assert [one.attempt for one in one_queue.delivered("g")] == [0, 1, 2]
    assert last == [2]
    assert len(one_queue.dead_letters("g")) == 1


def test_a_failed_send_back_is_retried_after_5_seconds(one_queue: Kit) -> None:
    seam, listener = seam_of(one_queue), Noted(one_queue, {"a": 2, "b": 2})
    seam.cut(protocol.SendBack)
    consumer = subscribed(one_queue, listener, route=seam)
    send(one_queue, "a")
    one_queue.advance(seconds=4)
    send(one_queue, "b")
    one_queue.advance(seconds=60)
    assert listener.seen == [
        ("a", 0, 0),
        ("b", 0, 4000),
        ("a", 1, 5000),
        ("b", 1, 9000),
        ("a", 2, 10000),
        ("b", 2, 14000),
    ]
    assert consumer.progress()[T0] == 2


def test_each_attempt_is_a_line_and_the_first_has_the_traceback(
    one_queue: Kit, caplog: pytest.LogCaptureFixture
) -> None:
    subscribed(one_queue, fail, max_reconsume_times=2)
    send(one_queue, "a", keys="o-1")
    with caplog.at_level(logging.WARNING, "librmq"):
        one_queue.advance(minutes=10)
    first, second, dead = caplog.records
    assert (first.levelname, second.levelname, dead.levelname) == ("WARNING", "WARNING", "ERROR")
    assert [bool(record.exc_info) for record in caplog.records] == [True, False, False]
    assert "g@g: attempt 1 of 3 on t/broker-a/0 at 0" in first.getMessage()
    assert "(ValueError: no stock), the next comes in 10 s" in first.getMessage()
    assert "attempt 2 of 3" in second.getMessage()
    assert second.getMessage().endswith("the next comes in 30 s")
    assert "(ValueError: no stock; failure 2 of its kind, at test_push.py:" in second.getMessage()
    assert "dead letter of group g: " in dead.getMessage()
    assert "key o-1, after 3 attempts: ValueError: no stock; failure 3 of its kind" in dead.getMessage()

    fields = ("rmq_group", "rmq_topic", "rmq_attempt")
    assert [dead.__dict__[name] for name in fields] == ["g", "t", 3]
    letter = one_queue.dead_letters("g")[0]
    assert letter.properties["DEAD_LETTER_CAUSE"] == "ValueError: no stock"


def test_failures_of_one_kind_have_one_traceback(one_queue: Kit, caplog: pytest.LogCaptureFixture) -> None:
    """A class and a line are a kind: another line, or another class, has a traceback of its own."""

    def listen(message: DeliveredMessage) -> None:
        if message.body == b"c":
            raise ValueError("another line")
        raise (KeyError if message.body == b"d" else ValueError)(message.body.decode())

    subscribed(one_queue, listen, max_reconsume_times=0)
    send(one_queue, "a", "b", "c", "d", "a")
    with caplog.at_level(logging.WARNING, "librmq"):
        one_queue.run_until_idle()
    assert [bool(record.exc_info) for record in caplog.records] == [True, False, True, True, False]
    assert [vars(record)["rmq_alike"] for record in caplog.records] == [1, 2, 1, 1, 3]


def test_a_dead_letter_without_room_for_its_cause_is_stored(one_queue: Kit) -> None:
    def listener(message: DeliveredMessage) -> None:
        raise DeadLetter("no\nway\1")

    subscribed(one_queue, listener)
    send(one_queue, "a", properties={"p": "x" * 32_000})
    send(one_queue, "b")
    one_queue.advance(seconds=1)
    first, second = one_queue.dead_letters("g")
    assert "DEAD_LETTER_CAUSE" not in first.properties
    assert second.properties["DEAD_LETTER_CAUSE"] == "DeadLetter: no way "


def test_a_redelivery_of_a_topic_without_listener_fails(one_queue: Kit) -> None:
    consumer = subscribed(one_queue, fail, max_reconsume_times=1)
    consumer.subscribe("u")(lambda message: None)
    send(one_queue, "a")
    send(one_queue, "b", topic="u")
    one_queue.run_until_idle()
    consumer.unsubscribe("t")
    one_queue.advance(minutes=1)
    assert [message.body for message in one_queue.dead_letters("g")] == [b"a"]


# ----------------------------------------------------------------------------------------------------------- progress


def test_the_smallest_that_is_not_consumed_holds_the_progress(one_queue: Kit) -> None:
    consumer = subscribed(one_queue)
    one_queue.faults.slow_listener("g", 20)
    send(one_queue, "stuck", *map(str, range(9)))
    one_queue.advance(seconds=19)
    assert len(bodies(one_queue)) == 10
    assert consumer.calls.running == 1
    assert consumer.progress()[T0] == 0
    one_queue.advance(seconds=1)
    assert consumer.progress()[T0] == 10


def test_progress_is_saved_after_10_seconds_then_every_5(one_queue: Kit) -> None:
    seam = seam_of(one_queue)
    subscribed(one_queue, route=seam)
    send(one_queue, "a")
    one_queue.advance(ms=9_999)
    assert not [request for request in seam.asked if isinstance(request, protocol.UpdateOffset)]
    one_queue.advance(ms=1)
    assert stored(one_queue) == 1
    del seam.asked[:]
    one_queue.advance(hours=1)
    assert seam.asked == []
    send(one_queue, "b")
    one_queue.advance(ms=4_999)
    assert stored(one_queue) == 1
    one_queue.advance(ms=1)
    assert stored(one_queue) == 2
    seam.cut(protocol.UpdateOffset)
    send(one_queue, "c")
    one_queue.advance(seconds=14)
    assert stored(one_queue) == 2
    seam.cut()
    one_queue.advance(seconds=1)
    assert stored(one_queue) == 3  # a message that was not stored is retried


def test_progress_travels_with_pulls(one_queue: Kit) -> None:
    subscribed(one_queue)
    for body in "ab":
        send(one_queue, body)
        one_queue.run_until_idle()
    assert stored(one_queue) == 1


def test_shutdown_saves_and_leaves(one_queue: Kit) -> None:
    consumer = subscribed(one_queue)
    send(one_queue, "a")
    one_queue.run_until_idle()
    assert consumer.shutdown()
    assert stored(one_queue) == 1
    assert one_queue.broker.call(protocol.ConsumerIds("g")) == ()
    assert consumer.shutdown()
    send(one_queue, "b")
    one_queue.advance(minutes=1)
    assert bodies(one_queue) == ["a"]
    subscribed(one_queue)
    one_queue.run_until_idle()
    assert bodies(one_queue, "g-2") == ["b"]


@pytest.mark.parametrize("begin", list(protocol.ConsumeFrom))
def test_a_new_group_reads_a_queue_that_is_in_memory(one_queue: Kit, begin: protocol.ConsumeFrom) -> None:
    send(one_queue, "a", "b")
    one_queue.advance(minutes=1)
    subscribed(one_queue, consume_from=begin, consume_from_timestamp_ms=one_queue.clock.now_ms())
    send(one_queue, "c")
    one_queue.run_until_idle()
    assert bodies(one_queue) == list("abc")


@pytest.mark.parametrize(
    ("begin", "expected"),
    [(protocol.ConsumeFrom.FIRST, "abc"), (protocol.ConsumeFrom.LAST, ""), (protocol.ConsumeFrom.TIMESTAMP, "bc")],
)
def test_the_setting_decides_without_stored_progress(
    one_queue: Kit, caplog: pytest.LogCaptureFixture, begin: protocol.ConsumeFrom, expected: str
) -> None:
    for body in "abc":
        time_ms = one_queue.clock.now_ms()
        send(one_queue, body)
        one_queue.advance(minutes=1)
    seam = seam_of(one_queue)
    seam.answers[protocol.QueryOffset] = None
    subscribed(one_queue, route=seam, consume_from=begin, consume_from_timestamp_ms=time_ms - 60_000)
    one_queue.advance(seconds=10)
    assert bodies(one_queue) == list(expected)
    warnings = [line for line in caplog.records if "consume_from" in line.getMessage()]
    skipped = 3 - len(expected)
    assert [(line.levelname, vars(line)["rmq_queue_id"], vars(line)["rmq_skipped"]) for line in warnings] == (
        [("WARNING", 0, skipped)] if skipped else []
    )


def test_progress_is_saved_while_pulls_are_refused(one_queue: Kit) -> None:
    seam, refusal = seam_of(one_queue), BrokerError(protocol.ResponseCode.NO_PERMISSION, "t can't be read")
    seam.fail = lambda request: refusal if isinstance(request, protocol.PullMessage) and request.queue_offset else None
    subscribed(one_queue, route=seam)
    one_queue.advance(ms=500)
    send(one_queue, "a")
    one_queue.run_until_idle()
    send(one_queue, "b")
    one_queue.advance(seconds=30)
    assert bodies(one_queue) == ["a"]
    assert stored(one_queue) == 1


def test_an_offset_that_the_queue_does_not_have_is_corrected(one_queue: Kit) -> None:
    """The offset that the broker names is stored at once, and the queue is taken again there."""
    send(one_queue, "a", "b")
    one_queue.broker.call(protocol.UpdateOffset("g", "t", 0, 99))
    consumer = subscribed(one_queue)
    one_queue.advance(ms=500)
    assert stored(one_queue) == 2
    assert assigned(consumer) == [0]
    send(one_queue, "c")
    one_queue.advance(ms=500)
    assert [one.body for one in one_queue.delivered("g")] == [b"c"]


def test_an_offset_that_is_never_right_is_corrected_at_once_only_once(one_queue: Kit) -> None:
    seam, pulled_ms = seam_of(one_queue), list[int]()
    seam.answers[protocol.PullMessage] = protocol.PullResponse(protocol.PullStatus.OFFSET_ILLEGAL, 5, 0, 5)

    def note(request: protocol.Request[Any]) -> None:
        if isinstance(request, protocol.PullMessage) and request.topic == "t":
            pulled_ms.append(one_queue.clock.now_ms())

    seam.fail = note
    subscribed(one_queue, route=seam)
    begin_ms = one_queue.clock.now_ms()
    one_queue.advance(seconds=59)
    assert [at_ms - begin_ms for at_ms in pulled_ms] == [0, 0, 20_000, 20_000, 40_000, 40_000]
    assert stored(one_queue) == 5


def test_reset_of_a_running_group(one_queue: Kit) -> None:
    send(one_queue, "a")
    one_queue.advance(minutes=1)
    time_ms = one_queue.clock.now_ms()
    send(one_queue, "b", "c")
    subscribed(one_queue)
    one_queue.advance(seconds=30)
    assert bodies(one_queue) == ["a", "b", "c"]
    one_queue.broker.call(protocol.ResetGroup("g", "t", time_ms))
    one_queue.advance(seconds=9)
    assert bodies(one_queue)[3:] == []
    one_queue.advance(seconds=2)
    assert bodies(one_queue)[3:] == ["b", "c"]
    one_queue.broker.call(protocol.ResetGroup("g", "t", -1))
    one_queue.advance(seconds=30)
    send(one_queue, "d")
    one_queue.run_until_idle()
    assert bodies(one_queue)[5:] == ["d"]


def test_a_failing_shutdown_still_leaves_the_group(one_queue: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    consumer = subscribed(one_queue, orderly=True)
    one_queue.run_until_idle()

    def oops() -> None:
        raise RuntimeError("oops")

    monkeypatch.setattr(consumer.locks, "release_all", oops)
    with pytest.raises(RuntimeError, match="oops"):
        consumer.shutdown()
    assert one_queue.broker.call(protocol.ConsumerIds("g")) == ()
    assert not consumer.assigned


# --------------------------------------------------------------------------------------------------------- rebalancing


def test_queues_are_reallocated_when_members_change(four_queues: Kit) -> None:
    first = subscribed(four_queues)
    four_queues.run_until_idle()
    assert assigned(first) == [0, 1, 2, 3]
    second, third = (subscribed(four_queues) for _ in range(2))
    four_queues.run_until_idle()
    assert [assigned(one) for one in (first, second, third)] == [[0, 1], [2], [3]]
    second.shutdown()
    four_queues.run_until_idle()
    assert [assigned(one) for one in (first, third)] == [[0, 1], [2, 3]]


def test_a_queue_lost_while_its_listener_runs_repeats(one_queue: Kit) -> None:
    """Rebalancing really overlaps like this."""
    first = subscribed(one_queue, strategy=newest_takes_all)
    one_queue.faults.slow_listener("g", 1)
    send(one_queue, "a")
    one_queue.run_until_idle()
    subscribed(one_queue, strategy=newest_takes_all)
    one_queue.advance(seconds=1)
    assert [(one.process, one.body) for one in one_queue.delivered("g")] == [("g", b"a"), ("g-2", b"a")]
    assert assigned(first) == []


def test_a_topic_that_is_created_later_is_noticed(rmq: Kit) -> None:
    subscribed(rmq, topic="later", consume_from=protocol.ConsumeFrom.FIRST)
    rmq.advance(seconds=100)
    send(rmq, "a", topic="later")
    rmq.run_until_idle()
    assert bodies(rmq) == ["a"]


def test_topics_and_queues_may_be_added_while_it_runs(one_queue: Kit) -> None:
    consumer = subscribed(one_queue)
    one_queue.run_until_idle()
    one_queue.broker.create_topic("t", 3)
    one_queue.run_until_idle()
    assert assigned(consumer) == [0, 1, 2]
    one_queue.broker.create_topic("u", 1)
    consumer.subscribe("u")(lambda message: None)
    send(one_queue, "a", topic="u")
    one_queue.run_until_idle()
    assert bodies(one_queue) == ["a"]


def test_open_questions_are_repeated_every_20_seconds(one_queue: Kit) -> None:
    seam = seam_of(one_queue)
    seam.cut(protocol.ConsumerIds)
    consumer = subscribed(one_queue, route=seam)
    one_queue.advance(seconds=19)
    assert assigned(consumer) == []
    seam.cut(protocol.QueryOffset)
    one_queue.advance(seconds=20)
    assert assigned(consumer) == []
    seam.cut()
    one_queue.advance(ms=999)
    assert assigned(consumer) == []
    one_queue.advance(ms=1)
    assert assigned(consumer) == [0]


def test_instances_that_differ_leave_queues_unowned(four_queues: Kit) -> None:
    """Only one of B's four queues is read, because the other instance subscribes only to A."""
    four_queues.broker.create_topic("B", 2)
    subscribed(four_queues)
    second = subscribed(four_queues)
    second.subscribe("B")(lambda message: None)
    four_queues.run_until_idle()
    assert assigned(second, "B") == [1]


def test_the_guard_refuses_a_group_that_differs(rmq: Kit) -> None:
    subscribed(rmq, filters={"tags": "x"})
    rmq.run_until_idle()
    with pytest.raises(GroupMismatchError, match=r"10\.0\.1\.101@g"):
        subscribed(rmq, filters={"tags": "y"}, guard=True).start()
    subscribed(rmq, filters={"tags": "x"}, guard=True).start()


def test_instances_that_differ_are_reported_once_a_change(four_queues: Kit, caplog: pytest.LogCaptureFixture) -> None:
    """Two instances with different subscriptions lost messages silently (issue 14, 2.2)."""
    with caplog.at_level(logging.WARNING, "librmq"):
        subscribed(four_queues, filters={"tags": "a"})
        four_queues.advance(seconds=1)
        assert caplog.records == []
        other = subscribed(four_queues, filters={"tags": "b"})
        four_queues.advance(seconds=100)
        (told,) = caplog.records
        assert told.levelname == "WARNING"
        assert "(10.0.1.101@g: tags 'a'; 10.0.1.102@g-2: tags 'b')" in told.getMessage()
        assert "give every instance the same subscriptions" in told.getMessage()
        caplog.clear()
        other.shutdown()
        subscribed(four_queues, filters={"tags": "a"})
        four_queues.advance(seconds=100)
        assert caplog.records == []


def test_a_client_of_another_route_is_named(rmq: Kit) -> None:
    client = Client(rmq.route, instance_name="elsewhere")
    for make in (PushConsumer, PullConsumer, Producer):
        with pytest.raises(ConfigError, match="@elsewhere belongs to another route"):
            make(rmq.broker, "g", client=client)


# --------------------------------------------------------------------------------------------------------- flow control


@pytest.mark.parametrize(
    ("settings", "most"),
    [
        ({"max_held_messages": 10, "pull_batch_size": 8}, 18),
        ({"max_held_bytes": 8 * 100, "pull_batch_size": 8}, 16),
        ({"max_held_messages_of_topic": 20, "pull_batch_size": 8}, 18),
    ],
)
def test_pulling_stops_above_a_limit_and_continues_below(one_queue: Kit, settings: dict[str, Any], most: int) -> None:
    metrics, waiting = Metrics(), list[float]()
    send(one_queue, *(f"{number:0100}" for number in range(60)))
    subscribed(
        one_queue,
        lambda message: waiting.append(metrics.snapshot()["waiting_messages"]["t", "g"]),
        threads=1,
        metrics=metrics,
        **settings,
    )
    one_queue.advance(seconds=1)
    assert len(waiting) == 60
    assert max(waiting) == most


def test_pulling_stops_while_offsets_span_too_much(one_queue: Kit) -> None:
    """As in RocketMQ 4.9, a single stuck message has no span."""
    spans: list[int] = []
    seam = seam_of(one_queue)

    def note(request: Any) -> None:
        if isinstance(request, protocol.PullMessage) and request.topic == "t":
            spans.append(consumer.assigned[T0].messages.span)

    seam.fail = note
    one_queue.faults.slow_listener("g", 60)
    one_queue.faults.slow_listener("g", 1, times=59)
    send(one_queue, *map(str, range(60)))
    consumer = subscribed(one_queue, route=seam, max_span=20, pull_batch_size=8, threads=2)
    one_queue.advance(minutes=2)
    assert len(bodies(one_queue)) == 60
    assert max(spans) in range(12, 21)


def test_pause_and_resume(one_queue: Kit) -> None:
    consumer = subscribed(one_queue)
    one_queue.run_until_idle()
    consumer.pause()
    send(one_queue, "a")
    one_queue.advance(hours=1)
    assert bodies(one_queue) == []
    consumer.resume()
    one_queue.run_until_idle()
    assert bodies(one_queue) == ["a"]


@pytest.mark.parametrize(("sent_s", "again_s"), [(1, 1809), (899, 911)])
def test_a_stuck_message_comes_again_after_15_to_30_minutes(one_queue: Kit, sent_s: int, again_s: int) -> None:
    """The consumer looks every 15 min, and the retry waits 10 s."""
    subscribed(one_queue)
    one_queue.advance(seconds=sent_s)
    one_queue.faults.slow_listener("g", 7200)
    send(one_queue, "stuck")
    one_queue.advance(hours=1)
    first, again = one_queue.delivered("g")
    assert again.began_ms - first.began_ms == 1000 * again_s


# ---------------------------------------------------------------------------------------------------------------- life


def test_life(rmq: Kit) -> None:
    with pytest.raises(ConfigError, match="subscribe a listener"):
        PushConsumer(rmq.broker, "g").start()
    consumer = PushConsumer(rmq.broker, "g")
    consumer.subscribe("t", print)
    assert not consumer.is_running
    with consumer:
        assert consumer.is_running
        with pytest.raises(ClientStateError, match="start only once"):
            consumer.start()
        twin = PushConsumer(rmq.broker, "g", client=consumer.client)
        twin.subscribe("t")(print)
        with pytest.raises(ClientStateError, match="already"):
            twin.start()
        with pytest.raises(ClientStateError, match="start failed"):
            twin.start()
    assert "shut down" in repr(consumer)


def test_bad_settings(rmq: Kit) -> None:
    broker = rmq.broker
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


async def _async_generator(message: DeliveredMessage) -> AsyncIterator[DeliveredMessage]:
    yield message


class _Generator:
    def __call__(self, message: DeliveredMessage) -> Iterator[DeliveredMessage]:
        yield message


@pytest.mark.parametrize("listener", [_Generator(), _Generator().__call__, _async_generator])
def test_a_listener_that_is_a_generator_is_refused(one_queue: Kit, listener: Callable[..., object]) -> None:
    """A call runs nothing of it, so every message would count as consumed."""
    consumer = PushConsumer(one_queue.broker, "g")
    with pytest.raises(ConfigError, match=r"topic 't': the listener .* is a generator.*remove `yield`"):
        consumer.subscribe("t", listener)
    consumer.subscribe("t", lambda message: None)


class _Shop:
    def ship(self, message: DeliveredMessage) -> None: ...

    def ship_with(self, message: DeliveredMessage, carrier: str) -> None: ...

    async def __call__(self, message: DeliveredMessage) -> None: ...


def _with_connection(function: Callable[[DeliveredMessage, str], None]) -> Callable[[DeliveredMessage], None]:
    """A decorator that adds an argument, as an application's does that opens a database connection."""

    @functools.wraps(function)
    def connected(message: DeliveredMessage) -> None:
        function(message, "connection")

    return connected


async def _no_argument() -> None: ...


@pytest.mark.parametrize(
    ("listener", "takes"),
    [
        (lambda: None, r"\(\)"),
        (_no_argument, r"\(\)"),
        (_Shop().ship_with, r"\(message: .*, carrier: .*\)"),
        (_Shop.ship, r"\(self, message: .*\)"),
    ],
)
def test_a_listener_that_cannot_take_a_message_is_refused(
    one_queue: Kit, listener: Callable[..., object], takes: str
) -> None:
    """Otherwise every delivery would fail, up to the dead letters."""
    consumer = PushConsumer(one_queue.broker, "g")
    with pytest.raises(ConfigError, match=rf"topic 't': the listener <.*> takes {takes}, but it is called with one me"):
        consumer.subscribe("t", listener)
    with pytest.raises(ConfigError, match="called with a list of messages"):
        consumer.subscribe("t", listener, batch=True)
    assert not consumer.subscriptions


@pytest.mark.parametrize(
    "listener",
    [
        _Shop(),
        _Shop().ship,
        functools.partial(_Shop().ship_with, carrier="post"),
        _with_connection(_Shop().ship_with),
        print,
        [].append,
        type,
        Mock(),
        lambda *arguments: None,
        lambda message, attempt=1, **rest: None,
    ],
)
def test_a_listener_that_can_take_a_message_passes(one_queue: Kit, listener: Callable[..., object]) -> None:
    PushConsumer(one_queue.broker, "g").subscribe("t", listener)


def test_functions_that_a_consumer_calls_take_their_argument(one_queue: Kit) -> None:
    make: Any = PushConsumer
    with pytest.raises(ConfigError, match=r"hooks: the function .* is called with an Operation"):
        make(one_queue.broker, "g", hooks=[lambda: None])
    with pytest.raises(ConfigError, match=r"before_last_attempt: the function .* is called with one message"):
        make(one_queue.broker, "g", before_last_attempt=lambda: None)


def test_hooks_see_each_delivery(one_queue: Kit) -> None:
    log: list[object] = []

    def hook(context: Operation) -> Any:
        log.append((context.group, context.topic, [m.body for m in context.messages]))
        return lambda result, error: log.append((result, repr(error)))

    def listener(message: DeliveredMessage) -> str:
        if message.body == b"b":
            raise ValueError("no")
        return "done"

    subscribed(one_queue, listener, hooks=[hook], threads=1)
    send(one_queue, "a", "b")
    one_queue.run_until_idle()
    assert log == [("g", "t", [b"a"]), ("done", "None"), ("g", "t", [b"b"]), (None, "ValueError('no')")]


def test_nothing_is_due_while_nothing_happens(four_queues: Kit) -> None:
    for _ in range(3):
        subscribed(four_queues)
    send(four_queues, "a")
    four_queues.advance(seconds=1000)
    assert four_queues.run_for(hours=24).time.total_seconds() == 0
    assert bodies(four_queues) == ["a"]


# -------------------------------------------------------------------------------------------------- asyncio and threads


async def test_coroutines_run_on_the_loop_of_the_start() -> None:
    loops = []
    with Broker.temporary() as broker:
        consumer = PushConsumer(broker, "g", consume_from=protocol.ConsumeFrom.FIRST)
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


@pytest.mark.slow
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


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_shutdown_ends_beside_a_stuck_listener(interrupted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shutdown waits for its timeout; even if it is interrupted, the consumer leaves its group."""
    release, begun = threading.Event(), threading.Event()
    with Broker.temporary() as broker:
        broker.create_topic("t", 1)
        consumer = PushConsumer(broker, "g", threads=1)

        @consumer.subscribe("t")
        def listen(message: DeliveredMessage) -> None:
            if message.body == b"second":
                begun.set()
                release.wait(60)

        for body in (b"first", b"second"):
            Producer(broker, "p").send("t", body)
        consumer.start()
        assert begun.wait(60)

        clock = broker.runner.clock
        wait = clock.wait

        def interrupts(event: threading.Event, seconds: float | None) -> bool:
            if threading.current_thread() is threading.main_thread():
                raise KeyboardInterrupt
            return wait(event, seconds)  # the store's thread waits by the same clock

        if interrupted:
            with monkeypatch.context() as patched:
                patched.setattr(clock, "wait", interrupts)
                with pytest.raises(KeyboardInterrupt):
                    consumer.shutdown()
        else:
            assert consumer.shutdown(timeout=0.01) is False
        assert broker.consumer_offset("g", "t", 0) == 1  # the second message is delivered again
        assert broker.call(protocol.ConsumerIds("g")) == ()
        release.set()


# ------------------------------------------------------------------------------------------------------------- metrics


@pytest.mark.parametrize("orderly", [False, True])
def test_metrics(one_queue: Kit, orderly: bool) -> None:
    metrics = Metrics()
    consumer = subscribed(one_queue, Noted(one_queue, {"b": 1}), metrics=metrics, orderly=orderly)
    one_queue.advance(seconds=1)
    send(one_queue, *"abc")
    one_queue.advance(seconds=30)
    values = metrics.snapshot()
    if orderly:
        assert values["consumed"] == {("t", "g", "success"): 3, ("t", "g", "suspend"): 1}
    else:
        assert values["consumed"] == {("t", "g", "success"): 2, ("t", "g", "later"): 1, ("%RETRY%g", "g", "success"): 1}
    assert values["queues"]["t", "g"] == 1
    assert values["lag"]["t", "g"] == values["waiting_messages"]["t", "g"] == values["waiting_bytes"]["t", "g"] == 0
    assert values["rebalances"]["t", "g"] == 1
    assert values["pulls"]["t", "g", "FOUND"] >= 1
    assert values["consume_seconds"]["t", "g"] == 0
    consumer.pause()
    send(one_queue, "d")
    one_queue.advance(seconds=1)
    send(one_queue, "e", "f")
    assert metrics.snapshot()["lag"]["t", "g"] in (2, 3)
    consumer.shutdown()
    assert "queues" not in metrics.snapshot()


def test_the_lag_at_a_broker_that_is_away_is_unknown(one_queue: Kit) -> None:
    """Not 0, which would show that all is consumed just when nothing can be; and the question holds no lock."""
    metrics, seam, held = Metrics(), seam_of(one_queue), list[bool]()

    def try_lock() -> None:
        is_free = seam.runner.lock.acquire(blocking=False)
        held.append(not is_free)
        if is_free:
            seam.runner.lock.release()

    def note(request: object) -> None:
        if isinstance(request, protocol.MaxOffset):
            other = threading.Thread(target=try_lock)
            other.start()
            other.join()

    consumer = subscribed(one_queue, route=seam, metrics=metrics)
    one_queue.advance(seconds=1)
    seam.fail = note
    assert metrics.snapshot()["lag"]["t", "g"] == 0
    assert set(held) == {False}
    seam.cut(protocol.MaxOffset)
    values = metrics.snapshot()
    assert "lag" not in values
    assert values["waiting_messages"]["t", "g"] == 0
    consumer.shutdown()


def test_gauges_of_a_groups_instances_add_up(four_queues: Kit) -> None:
    metrics = Metrics()
    first, second = (subscribed(four_queues, metrics=metrics) for _ in range(2))
    four_queues.advance(seconds=1)
    assert metrics.snapshot()["queues"]["t", "g"] == 4
    second.shutdown()
    four_queues.advance(seconds=1)
    assert metrics.snapshot()["queues"]["t", "g"] == 4
    first.unsubscribe("t")
    first.shutdown()
    assert "queues" not in metrics.snapshot()


# ------------------------------------------------------------------------------ brokers that change or are unreachable


def test_a_cut_broker_logs_one_line_a_topic(four_queues: Kit, caplog: pytest.LogCaptureFixture) -> None:
    """A consumer cut off from a broker with 8 queues logged 269 warnings a minute (issue 14, 5.1)."""
    seam = seam_of(four_queues)
    subscribed(four_queues, route=seam)
    four_queues.advance(seconds=1)
    seam.cut(protocol.PullMessage, protocol.UpdateOffset, protocol.ConsumerIds)
    send(four_queues, *"abcd")
    with caplog.at_level(logging.INFO, "librmq.consumer"):
        four_queues.advance(minutes=1)
        assert [record.getMessage() for record in caplog.records if record.levelno > logging.INFO] == [
            "g@g: pulling t/broker-a/0 fails: no answer",
            "g@g: storing progress at broker-a fails: no answer",
        ]
        seam.cut()
        four_queues.advance(seconds=4)
    assert sorted(bodies(four_queues)) == ["a", "b", "c", "d"]
    assert "g@g: pulling t/broker-a/0 works again" in caplog.text


@pytest.mark.parametrize("is_busy", [False, True])
def test_a_broker_that_is_back_ends_the_failure_of_storing_on_its_page(
    is_busy: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with Kit() as rmq:
        rmq.network.has_pages = True
        rmq.broker.create_topic("t", 1)
        rmq.consumer("g").subscribe("t", lambda message: rmq.crash_broker(down=30) if message.body == b"last" else None)
        rmq.advance(seconds=15)
        send(rmq, "last")
        with caplog.at_level(logging.INFO, "librmq.consumer"):
            rmq.advance(seconds=29)
            assert "storing progress at broker-a fails" in caplog.text
            for _ in range(300):
                rmq.advance(ms=100)
                if is_busy and not rmq.broker.dead:
                    send(rmq, "more")
        assert "storing progress at broker-a works again" in caplog.text


def test_a_pull_that_fails_is_retried_after_3_seconds(one_queue: Kit) -> None:
    seam = seam_of(one_queue)
    seam.cut(protocol.PullMessage)
    subscribed(one_queue, route=seam)
    send(one_queue, "a")
    one_queue.advance(ms=2_900)
    seam.cut()
    one_queue.advance(ms=100)
    assert bodies(one_queue) == ["a"]


@pytest.mark.parametrize("has_another", [False, True])
def test_a_forgotten_client_notices_it(one_queue: Kit, has_another: bool) -> None:
    """Its pull is answered, and it registers again: now if the group has other members, else at its next heartbeat."""
    consumer = subscribed(one_queue)
    if has_another:
        subscribed(one_queue)
    one_queue.advance(seconds=1)
    one_queue.broker.remove_client(consumer.client.client_id)
    send(one_queue, "at once")
    one_queue.advance(seconds=29)
    assert bodies(one_queue, "g") == (["at once"] if has_another else [])  # a group without members has no subscription
    one_queue.advance(seconds=2)
    assert "at once" in bodies(one_queue, "g")
    send(one_queue, "later")
    one_queue.run_until_idle()
    assert bodies(one_queue)[-1] == "later"
    ids: tuple[str, ...] = one_queue.broker.call(protocol.ConsumerIds("g"))
    assert consumer.client.client_id in ids


def test_joining_members_do_not_disturb_pulls(one_queue: Kit) -> None:
    seam = seam_of(one_queue)
    subscribed(one_queue, route=seam)
    one_queue.advance(seconds=20)
    del seam.asked[:]
    subscribed(one_queue)
    one_queue.run_until_idle()
    assert not [request for request in seam.asked if isinstance(request, protocol.PullMessage)]


def test_a_failing_strategy_moves_no_queue(one_queue: Kit, caplog: pytest.LogCaptureFixture) -> None:
    broken = False

    def strategy(client_id: str, queues: Any, clients: Any) -> Any:
        if broken:
            raise RuntimeError("oops")
        return list(queues)

    consumer = subscribed(one_queue, strategy=strategy)
    one_queue.run_until_idle()
    broken = True
    one_queue.broker.create_topic("t", 2)
    one_queue.run_until_idle()
    assert assigned(consumer) == [0]
    assert "sharing out the queues of t fails: oops" in caplog.text
    broken = False
    one_queue.advance(seconds=19)
    assert assigned(consumer) == [0]
    one_queue.advance(seconds=1)
    assert assigned(consumer) == [0, 1]


def test_a_lost_pull_is_repeated_after_120_seconds(one_queue: Kit) -> None:
    seam = seam_of(one_queue)
    consumer = subscribed(one_queue, route=seam)
    one_queue.advance(seconds=30)
    before = consumer.assigned[T0]
    seam.fail = lambda request: RuntimeError("oops") if isinstance(request, protocol.PullMessage) else None
    send(one_queue, "a")
    with pytest.raises(RuntimeError, match="oops"):
        one_queue.run_until_idle()
    seam.cut()
    one_queue.advance(seconds=129)  # every 20 s; the first one after 30 + 120 s is at 160 s
    assert bodies(one_queue) == []
    assert consumer.assigned[T0] is before
    one_queue.advance(seconds=1)
    assert bodies(one_queue) == ["a"]
    assert consumer.assigned[T0] is not before
    one_queue.advance(minutes=1)
    asked = len(seam.asked)
    one_queue.advance(hours=24)  # the pull that the broker holds is kept
    assert len(seam.asked) == asked


# ------------------------------------------------------------------------------------------------- groups that differ


@pytest.mark.parametrize("orderly", [False, True])
@pytest.mark.parametrize(("first", "second", "attempts"), [(3, 1, 2), (1, 3, 4), (2, 2, 3)])
def test_the_instance_that_starts_last_decides_the_redeliveries(
    four_queues: Kit, caplog: pytest.LogCaptureFixture, first: int, second: int, attempts: int, orderly: bool
) -> None:
    tried: list[bytes] = []

    def attempt(message: DeliveredMessage) -> None:
        tried.append(message.body)
        raise ValueError("no stock")

    settings: dict[str, Any] = {"orderly": orderly, "suspend_time": 1}
    subscribed(four_queues, attempt, max_reconsume_times=first, **settings)
    four_queues.advance(seconds=5)
    subscribed(four_queues, attempt, max_reconsume_times=second, **settings)
    four_queues.advance(seconds=60)
    send(four_queues, *map(str, range(8)))
    four_queues.advance(minutes=10)
    assert {body: tried.count(body) for body in tried} == {b"%d" % number: attempts for number in range(8)}
    assert len(four_queues.dead_letters("g")) == 8
    lines = [record.getMessage() for record in caplog.records if "max_reconsume_times" in record.getMessage()]
    assert len(lines) == (first != second)
    assert all(f"max_reconsume_times={second} and client" in line and f"has {first}." in line for line in lines)


def test_the_redeliveries_of_a_group_that_changes(one_queue: Kit, caplog: pytest.LogCaptureFixture) -> None:
    """A change while it runs counts like a start; when the deciding instance leaves, the last of the others decides."""
    one = subscribed(one_queue, fail, max_reconsume_times=5)
    one_queue.advance(seconds=5)
    other = subscribed(one_queue, fail)
    one_queue.advance(seconds=5)
    assert (one.max_reconsume_times, other.max_reconsume_times) == (None, None)
    one.configure(max_reconsume_times=2)
    assert (one.max_reconsume_times, other.max_reconsume_times) == (2, 2)
    one.configure(max_reconsume_times=3)
    assert (one.max_reconsume_times, other.max_reconsume_times) == (3, 3)
    one.shutdown()
    assert other.max_reconsume_times is None
    lines = [record.getMessage() for record in caplog.records if "max_reconsume_times" in record.getMessage()]
    assert len(lines) == 3
    assert "max_reconsume_times=None (the group's) and client" in lines[0]
    assert "max_reconsume_times=3 and client" in lines[2]
    assert "has None (the group's)." in lines[2]


def instances_that_differ(rmq: Kit) -> None:
    """Two instances start, die and come back with their own maximum; those that live agree on the last one's."""

    def shop(maximum: int) -> Callable[[Process], PushConsumer]:
        def run(process: Process) -> PushConsumer:
            consumer = process.consumer("billing", max_reconsume_times=maximum)
            consumer.subscribe("orders", lambda message: None)
            return consumer

        return run

    rmq.broker.create_topic("orders", 2)
    rmq.app("old", shop(3))
    for number in range(4):
        send_to_end(rmq.producer(), Message("orders", b"%d" % number), number % 2)
    rmq.advance(seconds=5)
    rmq.app("new", shop(1))
    rmq.advance(minutes=3)
    living = [process.state for process in rmq.processes if not process.dead and process.state is not None]
    (maximum,) = {consumer.max_reconsume_times for consumer in living}
    latest_ms = max(consumer.started_ms for consumer in living)
    assert maximum in [one.config.max_reconsume_times for one in living if one.started_ms == latest_ms]


@pytest.mark.slow
def test_instances_agree_on_the_redeliveries_in_any_schedule() -> None:
    result = explore(instances_that_differ, runs=60)
    assert result.chosen["fault"] > 5


@pytest.mark.slow
def test_instances_that_each_go_by_their_own_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PushConsumer, "max_reconsume_times", property(lambda one: one.config.max_reconsume_times))
    with pytest.raises(ValueError, match="too many values to unpack"):
        explore(instances_that_differ, runs=5)


def orders_of_two_instances(rmq: Kit) -> None:
    """A second instance joins while the first one consumes."""

    def shop(process: Process) -> None:
        process.consumer("billing").subscribe("orders")(lambda message: rmq.checkpoint("at work"))

    rmq.broker.create_topic("orders", queues=2)
    first = rmq.app("shop", shop)
    for number in range(4):
        for queue in range(2):
            send_to_end(rmq.producer(), Message("orders", b"%d" % number), queue)
        if number == 1:
            rmq.join(first)
    rmq.advance(minutes=1)


@pytest.mark.slow
def test_progress_never_goes_back_when_a_queue_moves() -> None:
    """The history of each run has no anomaly."""
    assert explore(orders_of_two_instances, runs=200).chosen["pause"]
