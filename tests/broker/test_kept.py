"""What was answered is kept: processes are killed right after an acknowledgement, a commit, a listener's return."""

from __future__ import annotations

import os
import re
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import librmq
from librmq import (
    Broker,
    BrokerConfig,
    ConsumeFrom,
    DeliveredMessage,
    ManualRunner,
    Message,
    Metrics,
    Producer,
    PullConsumer,
    PushConsumer,
    SimpleConsumer,
    record_history,
)
from librmq.broker import AdministeredRoute
from librmq.diagnosis import lag
from librmq.errors import ClientStateError
from librmq.protocol import PullMessage, Request, Route, UpdateOffset
from tests.conftest import StoreCopy
from tests.programs import Fork, in_child
from tests.wrapped_route import WrappedBrokers

pytestmark = pytest.mark.skipif("sys.platform != 'linux'", reason="only there a kill is told from a loss of power")

MESSAGES = 100


def opened(path: Path, *, is_shared: bool) -> AdministeredRoute:
    return librmq.share(path) if is_shared else Broker.open(path, BrokerConfig(save_offsets_every_s=3600))


def send(route: AdministeredRoute) -> None:
    route.create_topic("t", 1)
    with Producer(route, "p") as producer:
        for number in range(MESSAGES):
            producer.send("t", b"%d" % number)


def killed(work: Callable[[AdministeredRoute], None], path: Path, *, is_shared: bool = False) -> None:
    """Run a function in a process of its own, which is killed as soon as it returns."""

    with Fork(work_and_die, work, path, is_shared) as child:
        child.process.join()
        assert child.process.exitcode == -signal.SIGKILL


def work_and_die(work: Callable[[AdministeredRoute], None], path: Path, is_shared: bool) -> None:
    work(opened(path, is_shared=is_shared))
    os.kill(os.getpid(), signal.SIGKILL)


def acknowledge(route: AdministeredRoute) -> None:
    send(route)
    consumer = SimpleConsumer(route, "g").start()
    consumer.subscribe("t")
    route.reset_group("g", "t", to="begin")
    done = 0
    while done < MESSAGES:
        messages = consumer.receive(32)
        consumer.ack(*messages, durable=done == 0)
        done += len(messages)


def commit(route: AdministeredRoute) -> None:
    send(route)
    consumer = PullConsumer(route, "g", auto_commit=False, consume_from=ConsumeFrom.FIRST)
    consumer.subscribe("t")
    consumer.start()
    done = 0
    while done < MESSAGES:
        done += len(consumer.poll())
    consumer.commit()


def listen(route: AdministeredRoute, *, orderly: bool = False) -> None:
    send(route)
    consumer = PushConsumer(route, "g", orderly=orderly, consume_from=ConsumeFrom.FIRST)
    consumer.subscribe("t", lambda message: None)
    consumer.start()
    route.join()


def listen_in_order(route: AdministeredRoute) -> None:
    listen(route, orderly=True)


WAYS = [acknowledge, commit, listen, listen_in_order]


@pytest.mark.parametrize("work", WAYS)
@pytest.mark.parametrize("is_shared", [False, True])
def test_a_kill_repeats_nothing_that_was_answered(
    work: Callable[[AdministeredRoute], None], is_shared: bool, tmp_path: Path
) -> None:
    killed(work, tmp_path, is_shared=is_shared)
    with Broker.open(tmp_path) as broker:
        assert broker.consumer_offset("g", "t") == MESSAGES
        assert broker.lag("g", "t") == 0


def deliver_later(route: AdministeredRoute, *bodies: bytes) -> None:
    """Send messages with a delay level, and wait until a group has the last one."""
    arrived = threading.Event()
    bodies = bodies or tuple(b"%d" % number for number in range(10))
    route.create_topic("t", 1)
    consumer = PushConsumer(route, "g", consume_from=ConsumeFrom.FIRST)
    consumer.subscribe("t", lambda message: arrived.set() if message.body == bodies[-1] else None)
    with consumer, Producer(route, "p") as producer:
        for body in bodies:
            producer.send("t", body, delay_level=1)
        assert arrived.wait(60)


@pytest.mark.parametrize("work", [*WAYS, deliver_later])
def test_positions_are_on_the_page_alone_and_deliveries_in_the_log(
    work: Callable[[AdministeredRoute], None], tmp_path: Path
) -> None:
    killed(work, tmp_path)
    shutil.rmtree(tmp_path / "librmq" / "groups")
    with Broker.open(tmp_path) as broker:
        assert broker.consumer_offset("g", "t") != broker.store.queue_range("t", 0)[1]
        if work is deliver_later:
            deliver_later(broker, b"last")  # a level's messages are delivered in order
            assert broker.store.queue_range("t", 0)[1] == 11


@pytest.mark.parametrize("work", WAYS)
def test_a_kill_of_a_peer_repeats_nothing_that_was_answered(
    work: Callable[[AdministeredRoute], None], tmp_path: Path
) -> None:
    with librmq.share(tmp_path) as owner:
        killed(work, tmp_path, is_shared=True)
        assert owner.consumer_offset("g", "t") == MESSAGES


def test_a_command_sees_what_was_answered_before_a_kill(tmp_path: Path) -> None:
    killed(listen, tmp_path)
    assert lag(tmp_path, group="g").total == 0


def test_all_who_are_asked_where_a_group_is_say_the_same() -> None:
    metrics = Metrics()
    with Broker.temporary(BrokerConfig(save_offsets_every_s=3600), metrics=metrics) as broker:
        listen(broker)
        assert broker.lag("g", "t") == 0
        assert metrics.snapshot()["group_lag"]["t", "g"] == 0


def acknowledge_behind_the_first(route: AdministeredRoute) -> None:
    """Acknowledge all but the first message, which another consumer has."""
    send(route)
    consumer = SimpleConsumer(route, "g").start()
    consumer.subscribe("t")
    route.reset_group("g", "t", to="begin")
    left = consumer.receive(1, invisible=0.001)
    assert left[0].attempt == 1
    done = 0
    while done < MESSAGES - 1:
        messages = consumer.receive(32)
        wanted = [message for message in messages if message.body != b"0"]
        consumer.ack(*wanted)
        done += len(wanted)


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_kill_keeps_acknowledgements_behind_a_message_in_flight(is_shared: bool, tmp_path: Path) -> None:
    killed(acknowledge_behind_the_first, tmp_path, is_shared=is_shared)
    with Broker.open(tmp_path) as broker, SimpleConsumer(broker, "g") as consumer:
        consumer.subscribe("t")
        bodies = []
        while messages := consumer.receive(32, wait=0.2):
            bodies += [message.body for message in messages]
        assert bodies in ([], [b"0"])


def receive_one(route: AdministeredRoute) -> None:
    consumer = SimpleConsumer(route, "g").start()
    consumer.subscribe("t")
    assert consumer.receive(1, invisible=0.001, wait=20)


def send_one(route: AdministeredRoute) -> None:
    route.create_topic("t", 1)
    Producer(route, "p").send("t", b"it ends its process")
    receive_one(route)


def test_attempts_count_over_the_ends_of_their_processes(tmp_path: Path) -> None:
    killed(send_one, tmp_path)
    killed(receive_one, tmp_path)
    with Broker.open(tmp_path) as broker, SimpleConsumer(broker, "g") as consumer:
        consumer.subscribe("t")
        (message,) = consumer.receive(wait=20)
        assert message.attempt == 3


def listen_and_stop_at(route: AdministeredRoute, path: Path) -> None:
    """Let ten messages of a hundred wait in their listeners, and write the others into a file."""
    route.create_topic("t", 1)
    waiting, others = threading.Barrier(11), threading.Semaphore(0)
    lines = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def listen(message: DeliveredMessage) -> None:
        if int(message.body) % 10 == 0:
            waiting.wait()
            threading.Event().wait()
        os.write(lines, message.body + b"\n")
        others.release()

    consumer = PushConsumer(route, "g", threads=16)
    consumer.subscribe("t", listen)
    consumer.start()
    with Producer(route, "p") as producer:
        for number in range(MESSAGES):
            producer.send("t", b"%d" % number)
    for _ in range(90):
        assert others.acquire(timeout=30)
    waiting.wait()
    with route.runner.lock:  # the last ones are applied
        pass


def listen_and_die(path: Path, lines: Path, is_shared: bool) -> None:
    listen_and_stop_at(opened(path, is_shared=is_shared), lines)
    os.kill(os.getpid(), signal.SIGKILL)


def consume_what_was_in_work(path: Path) -> None:
    """Consume after `listen_and_stop_at` and a kill: only what was in work then comes again."""
    again: list[int] = []
    with Broker.open(path) as broker:
        consumer = PushConsumer(broker, "g")
        consumer.subscribe("t", lambda message: again.append(int(message.body)))
        with consumer:
            broker.join()
    assert len([number for number in again if number % 10]) <= 16 - 10
    assert {number for number in again if not number % 10} == set(range(0, MESSAGES, 10))


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_kill_repeats_what_was_in_work_and_nothing_else(is_shared: bool, tmp_path: Path) -> None:
    with Fork(listen_and_die, tmp_path / "s", tmp_path / "lines", is_shared) as child:
        child.process.join()
        assert child.process.exitcode == -signal.SIGKILL
    done = sorted(map(int, (tmp_path / "lines").read_text().split()))
    assert done == [number for number in range(MESSAGES) if number % 10]
    consume_what_was_in_work(tmp_path / "s")


def leave_much(path: Path, lines: Path) -> None:
    """Move a group, acknowledge behind a message, and let listeners wait, with a table that is not saved meanwhile."""
    broker = opened(path, is_shared=False)
    assert isinstance(broker, Broker)
    for number in range(16):  # each of the four queues has three already
        broker.send("p", Message("RetryTopic", b""), number % 4, 0, ("127.0.0.1", 0))
    broker.set_group("received")
    consumer = SimpleConsumer(broker, "received").start()
    consumer.subscribe("RetryTopic")
    broker.reset_group("received", "RetryTopic", to="begin")
    messages = consumer.receive(32)
    consumer.ack(*(message for message in messages if message.queue_offset))
    for queue_id, queue_offset in enumerate((4, 5, 6)):
        broker.call(UpdateOffset("g_retry", "RetryTopic", queue_id, queue_offset))
    listen_and_stop_at(broker, lines)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def two_readers() -> Iterator[tuple[PullConsumer, PullConsumer, ManualRunner]]:
    """Open a queue of six messages, and return a reader that has it, and one that is to have it."""
    with Broker.temporary(runner=(runner := ManualRunner())) as broker, Producer(broker, "p") as producer:
        broker.create_topic("t", 1)
        for number in range(6):
            producer.send("t", b"%d" % number)
        settings: dict[str, Any] = {"pull_batch_size": 1, "auto_commit": False, "consume_from": ConsumeFrom.FIRST}
        former, new = (PullConsumer(broker, "g", instance_name=name, **settings) for name in ("b", "a"))
        for consumer in (former, new):
            consumer.subscribe("t")
        yield former.start(), new, runner


def polled(consumer: PullConsumer) -> list[int]:
    return [int(message.body) for message in consumer.poll(0)]


def test_a_queue_that_changes_hands_repeats_what_was_in_work(
    two_readers: tuple[PullConsumer, PullConsumer, ManualRunner],
) -> None:
    """Neither what the former reader would take before its rebalance, nor what it ends before the new one's poll."""
    former, new, runner = two_readers
    assert polled(former) == [0]
    former.commit()
    assert polled(former) == [1]
    new.start()
    assert former.assignment == new.assignment != ()
    assert polled(former) == [], "it is the new one's, although no rebalance has told so"
    former.commit()
    assert polled(new) == [2], "what has ended meanwhile does not come again"
    runner.advance(0)
    assert former.assignment == ()
    new.shutdown()
    runner.advance(0)
    assert polled(former) == [2]


def test_a_reader_takes_a_queue_back_that_another_one_had(
    two_readers: tuple[PullConsumer, PullConsumer, ManualRunner],
) -> None:
    former, new, runner = two_readers
    new.start()
    new.shutdown()
    assert polled(former) == [], "it does not know yet that the other one has left"
    runner.advance(0)
    assert polled(former) == [0]


def test_a_broker_s_table_wins_for_the_queues_that_it_has_moved(store_copy: StoreCopy, tmp_path: Path) -> None:
    """Librmq and a broker have a folder in turns; what the broker's table has as before stays as librmq answered."""
    path, lines = store_copy("clients-retry-dlq"), tmp_path / "lines"
    table = path / "config" / "consumerOffset.json"
    with Fork(leave_much, path, lines) as child:
        child.process.join()
        assert child.process.exitcode == -signal.SIGKILL
    for moved, expected in [("0:3,1:3,2:1", (4, 5, 1, 3)), ("0:2,1:5,2:1", (2, 5, 1, 3))]:
        text = re.sub(r'("RetryTopic@g_retry":\{)0:\d+,1:\d+,2:\d+', rf"\g<1>{moved}", table.read_text())
        table.with_suffix(".json.bak").write_bytes(table.read_bytes())
        table.write_text(text)  # as a broker does whose consumers, or a person, have moved a group
        assert lag(path, group="g_retry", topic="RetryTopic").total == 4 * 7 - sum(expected)
        with Broker.open(path) as broker:
            assert tuple(broker.consumer_offset("g_retry", "RetryTopic", queue) for queue in range(4)) == expected
            broker.call(UpdateOffset("g_retry", "RetryTopic", 0, 4))
    with Broker.open(path) as broker, SimpleConsumer(broker, "received") as consumer:
        consumer.subscribe("RetryTopic")
        assert {message.queue_offset for message in consumer.receive(32, wait=0)} <= {0}
    consume_what_was_in_work(path)


@pytest.mark.parametrize("greatest", [1 << 48, (1 << 63) - 1])
def test_the_greatest_number_skips_a_queue(tmp_path: Path, greatest: int) -> None:
    """Clients of 4.x store it, and it is in the tables of their brokers."""
    table, name = tmp_path / "config" / "consumerOffset.json", ("g", "t", 0)
    with Broker.open(tmp_path) as broker, Producer(broker, "p") as producer:
        producer.send("t", b"x", queue=0)
        broker.set_group("g")
        broker.call(UpdateOffset(*name, greatest))
        assert broker.lag("g", "t") == 0
    table.write_text(f'{{"offsetTable":{{"t@g":{{0:{greatest}}}}}}}')
    shutil.rmtree(tmp_path / "librmq")  # as a folder that only a broker had
    with Broker.open(tmp_path) as broker:
        assert broker.consumer_offset(*name) == 1


class _Late(WrappedBrokers):
    """A route whose broker gets what a client says of its progress only when it has gone on, as behind a slow peer."""

    def __init__(self, route: Route) -> None:
        super().__init__(route, self._keep_progress)
        self.late: list[UpdateOffset] = []

    def _keep_progress(self, request: Request[Any], call: Callable[[Any], Any]) -> Any:
        if isinstance(request, UpdateOffset):
            self.late.append(request)
        elif isinstance(request, PullMessage) and request.commit_offset is not None:
            self.late.append(UpdateOffset(request.group, request.topic, request.queue_id, request.commit_offset))
            request = replace(request, commit_offset=None)
        return call(request)


def listen_one_by_one(route: Route) -> None:
    done = threading.Event()
    consumer = PushConsumer(route, "g", orderly=True, batch_size=1, pull_batch_size=1, consume_from=ConsumeFrom.FIRST)
    consumer.subscribe("t", lambda message: done.set() if message.body == b"%d" % (MESSAGES - 1) else None)
    with consumer:
        assert done.wait(60)


def commit_one_by_one(route: Route) -> None:
    consumer = PullConsumer(route, "g", auto_commit=False, pull_batch_size=1, consume_from=ConsumeFrom.FIRST)
    consumer.subscribe("t")
    with consumer:
        for _ in range(MESSAGES):
            assert consumer.poll(timeout=60)
            consumer.commit()


def test_a_commit_beside_the_page_asks_the_broker_nothing(tmp_path: Path) -> None:
    with Broker.open(tmp_path) as broker:
        send(broker)
        route = _Late(broker)
        commit_one_by_one(route)
        assert not route.late
        assert broker.lag("g", "t") == 0


@pytest.mark.parametrize("is_shared", [False, True], ids=["broker", "share"])
def test_a_forked_child_polls_and_commits_nothing(is_shared: bool, tmp_path: Path) -> None:
    with opened(tmp_path, is_shared=is_shared) as route:
        send(route)
        consumer = PullConsumer(route, "g", auto_commit=False, consume_from=ConsumeFrom.FIRST)
        consumer.subscribe("t")
        with consumer:
            while not consumer.poll():
                pass
            before = route.lag("g", "t")

            def use() -> None:
                for call in (consumer.poll, consumer.commit):
                    with pytest.raises(ClientStateError, match="with the parent of this forked process"):
                        call()

            in_child(use)
            assert route.lag("g", "t") == before


def seek_and_poll(route: AdministeredRoute) -> None:
    send(route)
    consumer = PullConsumer(route, "g", consume_from=ConsumeFrom.FIRST)
    consumer.subscribe("t")
    consumer.start()
    while not consumer.assignment:
        consumer.poll(1)
    consumer.seek(consumer.assignment[0], MESSAGES // 2)
    done = MESSAGES // 2
    while done < MESSAGES:
        done += len(consumer.poll())
    consumer.poll(0)


def test_a_kill_repeats_nothing_that_polls_have_passed_after_a_seek(tmp_path: Path) -> None:
    killed(seek_and_poll, tmp_path)
    with Broker.open(tmp_path) as broker:
        assert broker.lag("g", "t") == 0


def consume_late(path: Path, consume: Callable[[Route], None], is_recorded: bool) -> None:
    """Consume, and then let the owner get all that was said of the progress, in the worst order."""
    with librmq.share(path, wait=60) as shared:
        route = _Late(shared)
        consume(record_history(route, path / "history") if is_recorded else route)
        assert route.late, "the owner saves no table before its end"
        assert len(route.late) < MESSAGES, "each commit asks the owner"
        for request in reversed(route.late):
            shared.endpoint("broker-a").call(request)
    print("done", flush=True)


@pytest.mark.parametrize("is_recorded", [False, True])
@pytest.mark.parametrize("consume", [listen_one_by_one, commit_one_by_one])
def test_progress_that_comes_late_to_the_owner_moves_nothing_back(
    consume: Callable[[Route], None], is_recorded: bool, tmp_path: Path
) -> None:
    with librmq.share(tmp_path) as owner:
        send(owner)
        with Fork(consume_late, tmp_path, consume, is_recorded) as peer:
            assert peer.stdout.readline() == "done\n"
            assert owner.lag("g", "t") == 0
