"""Push consumers, orderly: order, suspension, the maximum, locks, taking over, transactions of several calls."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from librmq.consumer import DeliveredMessage, OrderlyResult, PushConsumer
from librmq.consumer.orderly import OrderlyDelivery
from librmq.files.memory import MemoryFiles
from librmq.listener import DeadLetter, SuspendQueue
from librmq.message.message import MessageQueue
from librmq.protocol import ConsumeFrom, LockQueues, MessageModel, Request, SendMessage, UnlockQueues
from tests.world import Seam, World, unreachable
from tests.world import world as make_world

T0 = MessageQueue("t", "broker-a", 0)


@pytest.fixture
def world() -> Iterator[World]:
    with make_world(1) as world:
        yield world


def _ordered(world: World, name: str = "c1", **settings: Any) -> PushConsumer:
    return world.consumer(name, orderly=True, **settings)


def _unlocked(seam: Seam) -> set[MessageQueue]:
    return {queue for request in seam.asked if isinstance(request, UnlockQueues) for queue in request.queues}


def _fail_times(times: dict[str, int]) -> Any:
    def listener(message: DeliveredMessage) -> None:
        left = times.get(message.body.decode(), 0)
        if left:
            times[message.body.decode()] = left - 1
            raise ValueError("no")

    return listener


def test_a_queue_is_consumed_in_order_from_the_first_lock_on(world: World) -> None:
    """The periodic lock comes 1 s after the start."""
    world.send(*"abcdef")
    begin = world.runner.now_ms()
    _ordered(world).start()
    world.advance(0.999)
    assert world.bodies() == []
    world.advance(0.001)
    assert world.bodies() == list("abcdef")
    assert {seen.at_ms - begin for seen in world.seen} == {1000}


def test_a_failure_lets_the_queue_rest_in_place(world: World) -> None:
    _ordered(world, listener=_fail_times({"b": 2})).start()
    world.advance(1)
    begin = world.runner.now_ms()
    world.send(*"abc")
    world.advance(10)
    assert [(seen.body, seen.reconsume_times, seen.at_ms - begin) for seen in world.seen] == [
        ("a", 0, 0),
        ("b", 0, 0),
        ("b", 1, 1000),
        ("b", 2, 2000),
        ("c", 0, 2000),
    ]
    world.advance(10)
    assert world.broker.consumer_offset("g", "t") == 3


@pytest.mark.parametrize(("seconds", "expected_ms"), [(0.3, 300), (0.001, 10), (100, 30_000), (None, 1000)])
def test_a_listener_says_how_long(world: World, seconds: float | None, expected_ms: int) -> None:
    def listener(message: DeliveredMessage) -> None:
        if not message.reconsume_times:
            raise SuspendQueue(seconds=seconds)

    _ordered(world, listener=listener).start()
    world.advance(1)
    world.send("a")
    world.advance(60)
    assert world.seen[1].at_ms - world.seen[0].at_ms == expected_ms


def test_a_batch_is_suspended_as_one(world: World) -> None:
    def listener(messages: list[DeliveredMessage]) -> None:
        if any(message.body == b"b" and not message.reconsume_times for message in messages):
            raise ValueError("no")

    _ordered(world, listener=listener, batch_size=3).start()
    world.advance(1)
    world.send(*"abcd")
    world.advance(10)
    bodies = "".join(world.bodies())
    assert bodies in ("aababcd", "abcabcd", "aabcdbcd", "ababcd", "abcdbcd")
    assert world.broker.consumer_offset("g", "t") == 4


def test_at_its_own_maximum_a_message_becomes_a_dead_letter(world: World) -> None:
    last: list[str] = []
    seam = Seam(world.broker)
    _ordered(
        world,
        listener=_fail_times({"bad": 99}),
        max_reconsume_times=2,
        route=seam,
        before_last_attempt=lambda message: last.append(message.body.decode()),
    ).start()
    world.advance(1)
    world.send("bad", "good", keys="k")
    world.advance(3)
    assert world.bodies() == ["bad", "bad", "bad", "good"]
    assert last == ["bad"]
    sent = next(request for request in seam.asked if isinstance(request, SendMessage))
    properties = sent.message.properties
    assert (sent.group, sent.message.topic, sent.reconsume_times, sent.max_reconsume_times) == (
        "CLIENT_INNER_PRODUCER",
        "%RETRY%g",
        2,
        2,
    )
    assert (properties["RETRY_TOPIC"], properties["RECONSUME_TIME"], properties["DELAY"]) == ("t", "2", "5")
    assert properties["ORIGIN_MESSAGE_ID"] == properties["UNIQ_KEY"]
    world.advance(100)
    assert [message.body for message in world.broker.dead_letters("g")] == [b"bad"]


def test_dead_letter_ends_an_orderly_message_at_once(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """``raise DeadLetter`` was retried for ever by an orderly consumer (issue 14, 1.10)."""

    def listen(message: DeliveredMessage) -> None:
        if message.body == b"bad" and message.reconsume_times == 1:
            raise DeadLetter("unknown customer")
        if message.body == b"bad":
            raise ValueError("not yet")

    _ordered(world, listener=listen).start()
    world.advance(1)
    world.send("bad", "good", keys="k")
    with caplog.at_level(logging.WARNING, "librmq"):
        world.advance(2)
    assert world.bodies() == ["bad", "bad", "good"]
    letter = world.broker.dead_letters("g")[0]
    assert (letter.body, letter.reconsume_times) == (b"bad", 2)
    assert letter.properties["DEAD_LETTER_CAUSE"] == "DeadLetter: unknown customer"
    retry, *_, dead = caplog.records
    assert "attempt 1 on t/broker-a/0 at 0" in retry.getMessage()
    assert retry.getMessage().endswith("the next comes in 1 s")
    assert retry.exc_info
    assert dead.levelname == "ERROR"
    assert "key k, after 2 attempts: DeadLetter: unknown customer" in dead.getMessage()


def test_an_unsent_dead_letter_keeps_the_queue_waiting(world: World) -> None:
    """A dead letter that cannot be sent keeps the queue waiting."""
    seam = Seam(world.broker)
    seam.fail = unreachable(SendMessage)
    _ordered(world, listener=_fail_times({"bad": 3}), max_reconsume_times=0, route=seam).start()
    world.advance(1)
    world.send("bad", "good")
    world.advance(10)
    assert world.bodies() == ["bad", "bad", "bad", "bad", "good"]
    assert world.broker.dead_letters("g") == []


def test_without_a_maximum_it_never_ends_and_is_reported(world: World, caplog: pytest.LogCaptureFixture) -> None:
    consumer = _ordered(world, listener=_fail_times({"bad": 10**9}))
    consumer.start()
    world.advance(1)
    sent = world.send("bad", "good")[0]
    with caplog.at_level(logging.WARNING, "librmq"):
        world.advance(40.5)
    assert set(world.bodies()) == {"bad"}
    assert consumer.blocked_queues() == [(T0, 0, sent.message_id, 41)]
    blocked = [record.getMessage() for record in caplog.records if "is blocked at 0" in record.getMessage()]
    assert len(blocked) == 6  # the 1st, 2nd, 4th, 8th, 16th, 32nd time


def test_several_calls_committed_together(world: World) -> None:
    results: list[Any] = [OrderlyResult.HOLD, OrderlyResult.ROLLBACK, OrderlyResult.HOLD, OrderlyResult.COMMIT, None]
    answers = iter(results)
    consumer = _ordered(world, listener=lambda message: next(answers))
    consumer.start()
    world.advance(1)
    world.send(*"ab")
    world.advance()
    assert consumer.progress()[T0] == 0
    world.advance(1)
    assert world.bodies() == list("abab")
    assert [seen.reconsume_times for seen in world.seen] == [0] * 4
    assert consumer.progress()[T0] == 2


def test_as_many_queues_at_once_as_threads() -> None:
    with make_world(4) as world:
        most = 0

        def listener(message: DeliveredMessage) -> None:
            nonlocal most
            most = max(most, consumer.delivery.running)

        consumer = _ordered(world, threads=2, listener=listener)
        consumer.start()
        world.advance(1)
        for queue in range(4):
            for number in range(5):
                world.send(str(number), queue=queue)
        world.advance()
        assert len(world.seen) == 20
        assert most == 2


def test_a_takeover_waits_for_the_periodic_lock(world: World) -> None:
    first, second = _ordered(world, "b"), _ordered(world, "a")
    first.start()
    world.advance(1)
    world.send("1")
    world.advance(4)
    begin = world.runner.now_ms()
    second.start()
    world.advance()
    world.send("2")
    world.advance(30)
    assert world.bodies("b") == ["1"]
    assert world.bodies("a") == ["2"]
    assert world.seen[1].at_ms - begin == 1000


def test_a_queue_in_mid_message_is_kept_until_its_listener_ends(world: World) -> None:
    second = _ordered(world, "a")

    def listener(message: DeliveredMessage) -> None:
        if not second.is_running:
            second.start()
            world.advance_steps()
            assert world.assigned(second) == []
            assert world.assigned(first) == [0]

    first = _ordered(world, "b", listener=listener)
    first.start()
    world.advance(1)
    world.send("1", "2")
    world.advance()
    assert world.assigned(first) == []
    world.advance(60)
    assert world.bodies("b") == ["1"]
    assert world.bodies("a") == ["1", "2"]  # the progress was saved before the listener ended


def test_a_queue_with_messages_is_unlocked_later(world: World) -> None:
    seam = Seam(world.broker)
    first = _ordered(world, "b", listener=_fail_times({"1": 99}), route=seam)
    first.start()
    world.advance(1)
    world.send("1", "2")
    world.advance(0.5)
    second = _ordered(world, "a")
    second.start()
    begin = world.runner.now_ms()
    world.advance(19.9)
    assert T0 not in _unlocked(seam)
    assert world.bodies("a") == []
    world.advance(60)
    assert world.bodies("a") == ["1", "2"]
    assert begin + 20_000 <= world.seen[-1].at_ms <= begin + 45_000


def test_a_returned_queue_is_not_unlocked_by_what_is_late(world: World) -> None:
    """A queue that comes back is not unlocked by what is late."""
    seam = Seam(world.broker)
    first = _ordered(world, "b", listener=_fail_times({"1": 40}), route=seam)
    first.start()
    world.advance(1)
    world.send("1", "2")
    world.advance(0.5)
    second = _ordered(world, "a")
    second.start()
    world.advance()
    second.shutdown()
    world.advance(100)
    assert T0 not in _unlocked(seam)
    assert world.bodies("b")[-2:] == ["1", "2"]


def test_an_idle_lock_is_renewed_when_it_is_needed(world: World) -> None:
    seam = Seam(world.broker)
    _ordered(world, route=seam).start()
    world.advance(5)
    del seam.asked[:]
    world.advance(3600)
    assert [request for request in seam.asked if isinstance(request, LockQueues)] == []
    begin = world.runner.now_ms()
    world.send("a")
    world.advance()
    assert [(seen.body, seen.at_ms) for seen in world.seen] == [("a", begin)]


def test_a_lock_that_could_not_be_renewed_is_asked_for_again(world: World) -> None:
    """A message comes while the broker does not answer: it is not left lying until the next one."""
    seam = Seam(world.broker)
    _ordered(world, route=seam).start()
    world.advance(100)  # nothing is to do: the lock is older than it is trusted
    seam.fail = unreachable(LockQueues)
    begin = world.runner.now_ms()
    world.send("a")
    world.advance(10)
    assert world.bodies() == []
    seam.fail = unreachable()
    world.advance(10)
    assert [(seen.body, seen.at_ms - begin) for seen in world.seen] == [("a", 12_000)]


def test_after_a_lost_lock_a_client_goes_on_behind_others(world: World) -> None:
    """It hears nothing for minutes, and another has consumed meanwhile."""
    seam = Seam(world.broker)
    first = _ordered(world, "a", route=seam)
    first.start()
    world.advance(1)
    world.send("1")
    world.advance()
    seam.fail = unreachable(Request)
    world.broker.forget(first.client.client_id)
    second = _ordered(world, "b")
    second.start()
    world.advance(100)
    world.send("2", "3")
    world.advance(100)
    assert world.bodies("b") == ["1", "2", "3"]  # that 1 was consumed could not be stored
    seam.fail = unreachable()
    first.client.forgotten_by("broker-a")
    world.advance(60)
    assert world.assigned(first) == [0]
    second.shutdown()
    world.send("4")
    world.advance(100)
    assert world.bodies("a") == ["1", "4"]


@pytest.mark.parametrize("locked", [True, False])
def test_with_the_lock_switched_off_the_order_is_mixed_up(world: World, locked: bool) -> None:
    """A queue is lost while its listener runs: the other one waits for the lock, or, without, overtakes it."""
    ended: list[str] = []
    second = _ordered(
        world, "a", lock_queues=locked, listener=lambda message: ended.append(f"a{message.body.decode()}")
    )

    def listener(message: DeliveredMessage) -> None:
        if not second.is_running:
            second.start()
            world.advance_steps()
        ended.append(f"b{message.body.decode()}")

    _ordered(world, "b", lock_queues=locked, listener=listener).start()
    world.advance(1)
    world.send("1", "2")
    world.advance(60)
    assert ended == (["b1", "a1", "a2"] if locked else ["a1", "a2", "b1"])


def test_broadcasting_in_order_needs_no_lock(world: World) -> None:
    seam, files = Seam(world.broker), MemoryFiles()
    files.make_folder("/offsets")
    _ordered(
        world,
        model=MessageModel.BROADCASTING,
        consume_from=ConsumeFrom.FIRST,
        listener=_fail_times({"1": 2}),
        max_reconsume_times=1,
        files=files,
        offsets_folder="/offsets",
        route=seam,
    ).start()
    world.send("1", "2")
    world.advance(10)
    assert world.bodies() == ["1", "1", "2"]
    assert not [request for request in seam.asked if isinstance(request, LockQueues)]


def test_shutdown_gives_the_locks_back(world: World) -> None:
    consumer = _ordered(world)
    consumer.start()
    world.advance(1)
    consumer.shutdown()
    got = world.broker.call(LockQueues("g", "other", frozenset((T0,))))
    assert got == {T0}
    assert isinstance(consumer.delivery, OrderlyDelivery)
