"""Orderly push consumers: order, suspension, the most attempts, locks, takeovers, transactions over several calls."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from librmq import protocol
from librmq.consumer import DeliveredMessage, OrderlyResult, PushConsumer
from librmq.errors import BrokerError
from librmq.listener import DeadLetter, SuspendQueue
from librmq.message.message import MessageQueue
from librmq.testing import Kit
from tests.consumer.parties import (
    Noted,
    Seam,
    assigned,
    bodies,
    most_at_once,
    newest_takes_all,
    seam_of,
    send,
    subscribed,
)

T0 = MessageQueue("t", "broker-a", 0)


def ordered(rmq: Kit, listener: Any = lambda message: None, **settings: Any) -> PushConsumer:
    """Return an orderly consumer that has locked its queues, as it does 1 s after its start."""
    consumer = subscribed(rmq, listener, orderly=True, **settings)
    rmq.advance(seconds=1)
    return consumer


def unlocked(seam: Seam) -> set[MessageQueue]:
    return {queue for request in seam.asked if isinstance(request, protocol.UnlockQueues) for queue in request.queues}


def test_a_new_queue_is_consumed_in_order_without_a_wait(one_queue: Kit) -> None:
    subscribed(one_queue, orderly=True)
    send(one_queue, *"abcdef")
    one_queue.run_until_idle()
    assert bodies(one_queue) == list("abcdef")


def test_a_message_left_out_behind_the_last_one_is_passed(one_queue: Kit) -> None:
    """Otherwise the group is behind, and `join` waits, until another message comes."""
    rmq = one_queue
    subscribed(rmq, orderly=True, filters={"tags": "a"})
    rmq.producer().send("t", b"1", tags="a")
    rmq.producer().send("t", b"2", tags="b")
    rmq.advance(seconds=10)
    assert bodies(rmq) == ["1"]
    assert rmq.broker.lag("g") == 0


@pytest.mark.parametrize("is_killed", [False, True])
def test_no_lock_of_an_ended_broker_is_trusted(one_queue: Kit, is_killed: bool) -> None:
    """The next broker knows no locks, so that another client can have the queue. RocketMQ's trust theirs for 30 s."""
    rmq, other = one_queue, protocol.LockQueues("g", "other", frozenset((T0,)))
    listener = Noted(rmq, {"a": 5})
    ordered(rmq, listener)
    send(rmq, "a", "b")
    rmq.advance(seconds=1)
    attempts = len(bodies(rmq))
    assert 0 < attempts < 5
    if is_killed:
        rmq.crash_broker()
    else:
        rmq.broker.close()
        rmq.network.reopen("broker-a")
    assert rmq.broker.call(other) == {T0}
    rmq.advance(seconds=15)
    assert len(bodies(rmq)) == attempts
    rmq.broker.call(protocol.UnlockQueues("g", "other", other.queues))
    rmq.advance(seconds=40)
    assert bodies(rmq) == [*"aaaaaa", "b"]


def test_a_new_group_keeps_what_it_holds_while_its_broker_is_away(one_queue: Kit) -> None:
    """A broker knows no progress of a new group where the first messages of a queue were deleted."""
    rmq, seam = one_queue, seam_of(one_queue)
    seam.answers[protocol.QueryOffset] = None
    ordered(rmq, Noted(rmq, {"a": 5}), route=seam)
    send(rmq, "a", "b")
    rmq.advance(seconds=1)
    seam.cut(protocol.PullMessage)
    send(rmq, "c")
    rmq.advance(seconds=1)
    seam.cut()
    rmq.advance(seconds=40)
    assert bodies(rmq) == [*"aaaaaa", "b", "c"]


def test_attempts_count_on_after_the_broker_was_away(one_queue: Kit) -> None:
    """Also behind messages that the tags leave out, up to which the progress is stored."""
    rmq, seam, listener = one_queue, seam_of(one_queue), Noted(one_queue, {"a": 5})
    ordered(rmq, listener, route=seam, filters={"tags": "wanted"})
    producer = rmq.producer()
    for body, tags in (("left out", "other"), ("a", "wanted")):
        producer.send("t", body, tags=tags)
    rmq.advance(seconds=1)
    seam.cut(protocol.PullMessage)
    producer.send("t", "b", tags="wanted")
    rmq.advance(seconds=1)
    seam.cut()
    rmq.advance(seconds=40)
    assert [(body, times) for body, times, _ in listener.seen] == [*(("a", times) for times in range(6)), ("b", 0)]


def test_a_refused_pull_is_repeated_after_a_pause(one_queue: Kit) -> None:
    """The consumer asks for its lock again after each, since the broker can be another."""
    seam = seam_of(one_queue)
    seam.answers[protocol.QueryOffset] = None
    ordered(one_queue, route=seam)
    refusal = BrokerError(protocol.ResponseCode.NO_PERMISSION, "not readable")
    seam.fail = lambda request: refusal if isinstance(request, protocol.PullMessage) else None
    send(one_queue, "a")
    seam.asked.clear()
    one_queue.advance(seconds=9)
    pulls = [request for request in seam.asked if isinstance(request, protocol.PullMessage) and request.topic == "t"]
    assert len(pulls) == 4
    seam.cut()
    one_queue.advance(seconds=3)
    assert bodies(one_queue) == ["a"]


def test_a_topic_that_the_first_send_makes_is_consumed_at_once(rmq: Kit) -> None:
    seen: list[bytes] = []
    rmq.consumer("g", orderly=True).subscribe("made-later")(lambda message: seen.append(message.body))
    rmq.advance(seconds=2)  # after the first periodic lock; the next comes 19 s later
    rmq.producer().send("made-later", b"x")
    rmq.advance(seconds=1)
    assert seen == [b"x"]


def test_a_failure_pauses_the_queue(one_queue: Kit) -> None:
    listener = Noted(one_queue, {"b": 2})
    ordered(one_queue, listener)
    listener.since()
    send(one_queue, *"abc")
    one_queue.advance(seconds=10)
    assert listener.seen == [("a", 0, 0), ("b", 0, 0), ("b", 1, 1000), ("b", 2, 2000), ("c", 0, 2000)]
    one_queue.advance(seconds=10)
    assert one_queue.offsets("g")[T0] == 3


def test_another_filter_leaves_out_what_blocks_the_queue(one_queue: Kit) -> None:
    consumer = ordered(one_queue, Noted(one_queue, {"a": 1000}))
    send(one_queue, "a", tags="broken")
    send(one_queue, "b", tags="sound")
    one_queue.advance(seconds=10)
    consumer.unsubscribe("t")
    seen: list[bytes] = []
    consumer.subscribe("t", lambda message: seen.append(message.body), tags="sound")
    one_queue.advance(seconds=30)
    assert seen == [b"b"]
    assert one_queue.offsets("g")[T0] == 2


@pytest.mark.parametrize(("seconds", "expected_ms"), [(0.3, 300), (0.001, 10), (100, 30_000), (None, 1000)])
def test_a_listener_chooses_the_pause(one_queue: Kit, seconds: float | None, expected_ms: int) -> None:
    def listener(message: DeliveredMessage) -> None:
        if not message.reconsume_times:
            raise SuspendQueue(seconds=seconds)

    ordered(one_queue, listener)
    send(one_queue, "a")
    one_queue.advance(seconds=60)
    first, second = one_queue.delivered("g")
    assert second.began_ms - first.began_ms == expected_ms


def test_a_batch_is_suspended_as_one(one_queue: Kit) -> None:
    def listener(messages: list[DeliveredMessage]) -> None:
        if any(message.body == b"b" and not message.reconsume_times for message in messages):
            raise ValueError("no")

    ordered(one_queue, listener, batch_size=3)
    send(one_queue, *"abcd")
    one_queue.advance(seconds=10)
    assert "".join(bodies(one_queue)) in ("aababcd", "abcabcd", "aabcdbcd", "ababcd", "abcdbcd")
    assert one_queue.offsets("g")[T0] == 4


def test_at_its_own_maximum_a_message_becomes_a_dead_letter(one_queue: Kit, caplog: pytest.LogCaptureFixture) -> None:
    last: list[str] = []
    seam = seam_of(one_queue)
    ordered(
        one_queue,
        Noted(one_queue, {"bad": 99}),
        max_reconsume_times=2,
        route=seam,
        before_last_attempt=lambda message: last.append(message.body.decode()),
    )
    send(one_queue, "bad", "good", keys="k")
    one_queue.advance(seconds=3)
    assert bodies(one_queue) == ["bad", "bad", "bad", "good"]
    assert last == ["bad"]
    sent = next(request for request in seam.asked if isinstance(request, protocol.SendMessage))
    properties = sent.message.properties
    assert (sent.group, sent.message.topic, sent.reconsume_times, sent.max_reconsume_times) == (
        "CLIENT_INNER_PRODUCER",
        "%RETRY%g",
        2,
        2,
    )
    assert (properties["RETRY_TOPIC"], properties["RECONSUME_TIME"], properties["DELAY"]) == ("t", "2", "5")
    assert properties["ORIGIN_MESSAGE_ID"] == properties["UNIQ_KEY"]
    assert "dead letter of group g, which is there after delay level 5: t/broker-a/0 at 0" in caplog.text
    one_queue.advance(seconds=55)
    assert one_queue.dead_letters("g") == []
    one_queue.advance(seconds=5)
    assert [message.body for message in one_queue.dead_letters("g")] == [b"bad"]


def test_a_batch_goes_on_without_its_dead_letters(one_queue: Kit) -> None:
    """RocketMQ's client delivers them again with the batch, and makes them dead letters at each of its failures."""
    calls: list[list[tuple[bytes, int]]] = []

    def listener(messages: list[DeliveredMessage]) -> None:
        calls.append([(message.body, message.reconsume_times) for message in messages])
        raise ValueError("no")

    ordered(one_queue, listener, batch_size=3, max_reconsume_times=1)
    send(one_queue, "a")
    one_queue.advance(ms=500)
    send(one_queue, *"bc")
    one_queue.advance(seconds=60)
    assert calls == [[(b"a", 0)], [(b"a", 1), (b"b", 0), (b"c", 0)], [(b"b", 1), (b"c", 1)]]
    assert [message.body for message in one_queue.dead_letters("g")] == [b"a", b"b", b"c"]
    assert one_queue.offsets("g")[T0] == 3


def test_dead_letter_ends_an_orderly_message_immediately(one_queue: Kit, caplog: pytest.LogCaptureFixture) -> None:
    """An orderly consumer retried ``raise DeadLetter`` forever (issue 14, 1.10)."""

    def listen(message: DeliveredMessage) -> None:
        if message.body == b"bad":
            raise DeadLetter("unknown customer") if message.reconsume_times == 1 else ValueError("not yet")

    ordered(one_queue, listen)
    send(one_queue, "bad", "good", keys="k")
    with caplog.at_level(logging.WARNING, "librmq"):
        one_queue.advance(seconds=2)
    assert bodies(one_queue) == ["bad", "bad", "good"]
    letter = one_queue.dead_letters("g")[0]
    assert (letter.body, letter.reconsume_times) == (b"bad", 2)
    assert letter.properties["DEAD_LETTER_CAUSE"] == "DeadLetter: unknown customer"
    retry, *_, dead = caplog.records
    assert "attempt 1 on t/broker-a/0 at 0" in retry.getMessage()
    assert retry.getMessage().endswith("the next comes in 1 s")
    assert retry.exc_info
    assert dead.levelname == "ERROR"
    assert "key k, after 2 attempts: DeadLetter: unknown customer" in dead.getMessage()


def test_an_unsent_dead_letter_keeps_the_queue_waiting(one_queue: Kit) -> None:
    seam = seam_of(one_queue)
    seam.cut(protocol.SendMessage)
    ordered(one_queue, Noted(one_queue, {"bad": 3}), max_reconsume_times=0, route=seam)
    send(one_queue, "bad", "good")
    one_queue.advance(seconds=10)
    assert bodies(one_queue) == ["bad", "bad", "bad", "bad", "good"]
    assert one_queue.dead_letters("g") == []


def test_without_a_maximum_retries_never_end(one_queue: Kit, caplog: pytest.LogCaptureFixture) -> None:
    consumer = ordered(one_queue, Noted(one_queue, {"bad": 10**9}))
    sent = send(one_queue, "bad", "good")[0]
    with caplog.at_level(logging.WARNING, "librmq"):
        one_queue.advance(seconds=40.5)
    assert set(bodies(one_queue)) == {"bad"}
    assert consumer.blocked_queues() == [(T0, 0, sent.message_id, 41)]
    blocked = [record.getMessage() for record in caplog.records if "is blocked at 0" in record.getMessage()]
    assert len(blocked) == 6  # the 1st, 2nd, 4th, 8th, 16th and 32nd attempt


def test_several_calls_committed_together(one_queue: Kit) -> None:
    results: list[Any] = [OrderlyResult.HOLD, OrderlyResult.ROLLBACK, OrderlyResult.HOLD, OrderlyResult.COMMIT, None]
    times: list[int] = []

    def listener(message: DeliveredMessage) -> Any:
        times.append(message.reconsume_times)
        return results.pop(0)

    consumer = ordered(one_queue, listener)
    send(one_queue, *"ab")
    one_queue.run_until_idle()
    assert consumer.progress()[T0] == 0
    one_queue.advance(seconds=1)
    assert bodies(one_queue) == list("abab")
    assert times == [0] * 4
    assert consumer.progress()[T0] == 2


def test_as_many_parallel_queues_as_threads(four_queues: Kit) -> None:
    ordered(four_queues, threads=2)
    four_queues.faults.slow_listener("g", 1, times=20)
    for queue in range(4):
        send(four_queues, *map(str, range(5)), queue=queue)
    four_queues.advance(minutes=1)
    assert len(bodies(four_queues)) == 20
    assert most_at_once(four_queues) == 2


def test_a_takeover_waits_for_the_periodic_lock(one_queue: Kit) -> None:
    ordered(one_queue, strategy=newest_takes_all)
    send(one_queue, "1")
    one_queue.advance(seconds=4)
    subscribed(one_queue, orderly=True, strategy=newest_takes_all)
    one_queue.run_until_idle()
    send(one_queue, "2")
    one_queue.advance(seconds=30)
    assert bodies(one_queue, "g") == ["1"]
    assert bodies(one_queue, "g-2") == ["2"]
    assert one_queue.delivered("g")[1].began_ms == 6000


@pytest.mark.parametrize("locked", [True, False])
def test_the_lock_keeps_a_queue_lost_during_a_message(one_queue: Kit, locked: bool) -> None:
    """With the lock, the next instance waits until the listener has ended; without it, it does not wait."""
    settings: dict[str, Any] = {"strategy": newest_takes_all, "lock_queues": locked}
    first = ordered(one_queue, **settings)
    one_queue.faults.slow_listener("g", 5)
    send(one_queue, "1", "2")
    one_queue.run_until_idle()
    second = subscribed(one_queue, orderly=True, **settings)
    one_queue.advance(seconds=4)
    assert assigned(second) == ([] if locked else [0])
    one_queue.advance(seconds=60)
    assert (assigned(first), assigned(second)) == ([], [0])
    ended = sorted(one_queue.delivered("g"), key=lambda one: one.ended_ms or 0)
    assert [f"{one.process} {one.body.decode()}" for one in ended] == (
        ["g 1", "g-2 1", "g-2 2"] if locked else ["g-2 1", "g-2 2", "g 1"]
    )


@pytest.mark.parametrize("comes_back", [False, True])
def test_a_queue_with_messages_is_unlocked_later(one_queue: Kit, comes_back: bool) -> None:
    """After 20 s, or not at all if the queue has come back by then."""
    seam = seam_of(one_queue)
    ordered(one_queue, Noted(one_queue, {"1": 40}), route=seam, strategy=newest_takes_all)
    send(one_queue, "1", "2")
    one_queue.advance(seconds=0.5)
    second = subscribed(one_queue, orderly=True, strategy=newest_takes_all)
    one_queue.run_until_idle()
    if comes_back:
        second.shutdown()
    one_queue.advance(seconds=19.9)
    assert T0 not in unlocked(seam)
    assert bodies(one_queue, "g-2") == []
    one_queue.advance(seconds=80)
    if comes_back:
        assert T0 not in unlocked(seam)
        assert bodies(one_queue, "g")[-2:] == ["1", "2"]
    else:
        assert bodies(one_queue, "g-2") == ["1", "2"]
        assert 21_500 <= one_queue.delivered("g")[-1].began_ms <= 46_500


def test_an_idle_lock_is_renewed_when_it_is_needed(one_queue: Kit) -> None:
    """A message that arrives while the broker does not answer is delivered without waiting for another message."""
    seam, listener = seam_of(one_queue), Noted(one_queue)
    ordered(one_queue, listener, route=seam)
    one_queue.advance(seconds=4)
    del seam.asked[:]
    one_queue.advance(hours=1)  # no work: the lock is now too old to be trusted
    assert [request for request in seam.asked if isinstance(request, protocol.LockQueues)] == []
    listener.since()
    send(one_queue, "a")
    one_queue.run_until_idle()
    one_queue.advance(seconds=100)
    seam.cut(protocol.LockQueues)
    listener.since()
    send(one_queue, "b")
    one_queue.advance(seconds=10)
    assert bodies(one_queue) == ["a"]
    seam.cut()
    one_queue.advance(seconds=10)
    assert listener.seen == [("a", 0, 0), ("b", 0, 12_000)]


def test_after_a_lost_lock_a_client_continues_behind_others(one_queue: Kit) -> None:
    """The client is cut off for minutes, while another instance consumes."""
    seam = seam_of(one_queue)
    first = ordered(one_queue, route=seam)
    send(one_queue, "1")
    one_queue.run_until_idle()
    seam.cut(protocol.Request)
    one_queue.lose(seam.inner)
    second = subscribed(one_queue, orderly=True)
    one_queue.advance(seconds=100)
    send(one_queue, "2", "3")
    one_queue.advance(seconds=100)
    assert bodies(one_queue, "g-2") == ["1", "2", "3"]  # the progress past 1 could not be stored
    seam.cut()
    first.client.removed_by("broker-a")
    one_queue.advance(seconds=60)
    assert assigned(first) == [0]
    second.shutdown()
    send(one_queue, "4")
    one_queue.advance(seconds=100)
    assert bodies(one_queue, "g") == ["1", "4"]


def test_broadcasting_in_order_needs_no_lock(one_queue: Kit) -> None:
    seam = seam_of(one_queue)
    subscribed(
        one_queue,
        Noted(one_queue, {"1": 2}),
        orderly=True,
        model=protocol.MessageModel.BROADCASTING,
        consume_from=protocol.ConsumeFrom.FIRST,
        max_reconsume_times=1,
        files=one_queue.files,
        offsets_folder="/offsets",
        route=seam,
    )
    send(one_queue, "1", "2")
    one_queue.advance(seconds=10)
    assert bodies(one_queue) == ["1", "1", "2"]
    assert not [request for request in seam.asked if isinstance(request, protocol.LockQueues)]


@pytest.mark.parametrize("is_cut", [False, True])
def test_shutdown_releases_the_locks(one_queue: Kit, is_cut: bool, caplog: pytest.LogCaptureFixture) -> None:
    seam = seam_of(one_queue)
    consumer = ordered(one_queue, route=seam)
    if is_cut:
        seam.cut(protocol.UnlockQueues, protocol.Unregister)
    assert consumer.shutdown()
    assert one_queue.broker.call(protocol.LockQueues("g", "other", frozenset((T0,)))) == (set() if is_cut else {T0})
    failure = "g@g: could not release locks at broker-a, where they end within a minute: no answer"
    assert (failure in caplog.text) == is_cut
    assert ("broker-a refused Unregister: no answer" in caplog.text) == is_cut
