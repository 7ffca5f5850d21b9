"""Small programs for the kit, which together use most of what brokers and clients do; each keeps every promise."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from errno import ENOSPC
from unittest import mock

from librmq import PullConsumer, SimpleConsumer
from librmq.broker import BrokerConfig
from librmq.client import TransactionProducer
from librmq.consumer import DeliveredMessage
from librmq.dedup import DedupListener
from librmq.errors import RmqError, StoreIOError
from librmq.idempotence.stores import MemoryDedupStore
from librmq.listener import DeadLetter, ReconsumeLater, SuspendQueue
from librmq.message.message import Message
from librmq.protocol import EndTransaction, TransactionState
from librmq.scheduling.timer_config import TimerConfig
from librmq.testing import Kit, Process, check_history


def ignore(message: DeliveredMessage) -> None:
    """Consume a message."""


def send(rmq: Kit, count: int = 1, delay_level: int | None = None) -> None:
    """Send messages to the topic; a producer of an application would send one again that fails."""
    for number in range(count):
        with suppress(RmqError):
            rmq.producer("shop").send(Message("orders", b"%d" % number, delay_level=delay_level))


def ordered_shop(process: Process) -> None:
    """Consume in order."""
    process.consumer("billing", orderly=True).subscribe("orders")(ignore)


def restart_broker(rmq: Kit) -> None:
    """Close the broker cleanly, and open it again."""
    rmq.broker.close()
    rmq.network.reopen("broker-a")


def billing(rmq: Kit) -> Process:
    """Return the process of a consumer."""
    return next(process for process in rmq.processes if not process.is_test and not process.dead)


def flow(rmq: Kit) -> None:
    """Messages to one queue, an answer that is lost, and a batch."""
    rmq.broker.create_topic("orders", 1)
    rmq.consumer("billing").subscribe("orders")(ignore)
    send(rmq, 3)
    rmq.faults.lose_answer()
    send(rmq)
    rmq.producer("shop").send_batch([Message("orders", b"%d" % number) for number in range(3)])
    rmq.advance(seconds=30)
    send(rmq, 3)
    rmq.advance(seconds=30)


def sends(rmq: Kit) -> None:
    """Messages without a consumer."""
    rmq.broker.create_topic("orders", 1)
    for _ in range(4):
        send(rmq)
        rmq.advance(ms=10)


def tags(rmq: Kit) -> None:
    """A group that selects some tags."""
    rmq.broker.create_topic("orders", 1)
    rmq.consumer("billing").subscribe("orders", tags="paid || shipped || settled by hand")(ignore)
    for tag in ("paid", "made", "shipped", "settled by hand"):
        rmq.producer("shop").send(Message("orders", b"x", tags=tag))
    rmq.advance(seconds=30)


def backlog(rmq: Kit) -> None:
    """Messages that wait for their consumer, whose listeners end in another order than they began."""
    rmq.broker.create_topic("orders", 1)
    rmq.faults.slow_listener("billing", 12)
    send(rmq, 6)
    rmq.consumer("billing").subscribe("orders")(ignore)
    rmq.advance(minutes=1)


def failures(rmq: Kit) -> None:
    """Listeners that fail once, always, or give up at once."""

    @rmq.consumer("billing", fail_fast=False, max_reconsume_times=2).subscribe("orders")
    def listener(message: DeliveredMessage) -> None:
        if message.body == b"0":
            raise DeadLetter
        if message.body == b"1" or (message.body == b"2" and not message.reconsume_times):
            raise ReconsumeLater

    rmq.broker.create_topic("orders", 1)
    send(rmq, 4)
    rmq.advance(minutes=3)


def order(rmq: Kit) -> None:
    """An ordered group with a listener that fails once, and one that takes its time."""
    failed: set[bytes] = set()

    @rmq.consumer("billing", orderly=True).subscribe("orders")
    def listener(message: DeliveredMessage) -> None:
        if message.body == b"1" and message.body not in failed:
            failed.add(message.body)
            raise SuspendQueue

    rmq.broker.create_topic("orders", 1)
    send(rmq, 4)
    rmq.faults.slow_listener("billing", 8, times=4)
    rmq.advance(seconds=4)
    send(rmq, 4)
    rmq.advance(minutes=1)


def order_gives_up(rmq: Kit) -> None:
    """An ordered group makes a dead letter of what fails three times."""

    @rmq.consumer("billing", orderly=True, max_reconsume_times=2, fail_fast=False).subscribe("orders")
    def listener(message: DeliveredMessage) -> None:
        if message.body == b"1":
            raise ReconsumeLater

    rmq.broker.create_topic("orders", 1)
    send(rmq, 4)
    rmq.advance(minutes=5)


def order_moves(rmq: Kit) -> None:
    """The queues of an ordered group move to another instance while a listener runs, and back."""
    rmq.broker.create_topic("orders", 2)
    first = rmq.app("billing", ordered_shop)
    rmq.advance(seconds=2)
    rmq.faults.slow_listener("billing", 30, times=4)
    send(rmq, 8)
    rmq.advance(seconds=1)
    other = rmq.join(first)
    rmq.advance(seconds=1)
    send(rmq, 4)
    rmq.advance(minutes=3)
    rmq.faults.slow_listener("billing", 5, times=4)
    send(rmq, 4)
    rmq.advance(seconds=1)
    rmq.restart(other)
    rmq.advance(minutes=2)


def order_is_lost(rmq: Kit) -> None:
    """The broker loses an instance of an ordered group that does not notice."""
    rmq.broker.create_topic("orders", 1)
    first = rmq.app("billing", ordered_shop)
    rmq.join(first)
    rmq.advance(seconds=2)
    rmq.faults.slow_listener("billing", 10, times=8)
    send(rmq, 8)
    rmq.advance(seconds=5)
    for process in list(rmq.processes):
        if not process.is_test and not process.dead:
            rmq.lose(process)
            rmq.advance(seconds=3)
    rmq.advance(minutes=3)


def instances(rmq: Kit) -> None:
    """Instances of a group come, shut down while a listener runs, and die."""

    def shop(process: Process) -> None:
        process.consumer("billing").subscribe("orders")(ignore)

    rmq.broker.create_topic("orders", 4)
    first = rmq.app("billing", shop)
    send(rmq, 8)
    rmq.advance(seconds=12)
    other = rmq.join(first)
    send(rmq, 8)
    rmq.advance(seconds=30)
    rmq.faults.slow_listener("billing", 3, times=4)
    send(rmq, 8)
    rmq.restart(other)
    send(rmq, 4)
    rmq.advance(minutes=1)
    rmq.faults.slow_listener("billing", 3, times=4)
    send(rmq, 8)
    rmq.crash(first)
    rmq.advance(minutes=3)


def delays(rmq: Kit) -> None:
    """Delay levels and times, with a restart of the broker in between."""
    rmq.broker.create_topic("orders", 1)
    rmq.consumer("billing").subscribe("orders")(ignore)
    for level in (1, 2, 2, 3):
        send(rmq, delay_level=level)
        rmq.advance(ms=700)
    rmq.advance(seconds=4)
    restart_broker(rmq)
    rmq.advance(seconds=40)
    send(rmq, delay_level=2)
    rmq.advance(seconds=2)
    restart_broker(rmq)
    rmq.advance(minutes=1)


def wrong_delay_progress(rmq: Kit) -> None:
    """The saved progress of a delay level is behind the end of its queue, as after the loss of a disk's end."""
    rmq.broker.create_topic("orders", 1)
    rmq.consumer("billing").subscribe("orders")(ignore)
    send(rmq, delay_level=1)
    rmq.advance(seconds=20)
    rmq.broker.close()
    path = os.path.join(rmq.path, "config", "delayOffset.json")
    rmq.files.write(path, rmq.files.read(path).replace(b"1:1", b"1:9"))
    rmq.network.reopen("broker-a")
    rmq.advance(seconds=40)
    send(rmq, delay_level=1)
    rmq.advance(minutes=2)


def timers(rmq: Kit) -> None:
    """Any time of delivery, with a restart of the broker in between."""
    rmq.broker.create_topic("orders", 1)
    rmq.consumer("billing").subscribe("orders")(ignore)
    for seconds in (3, 7, 7.5, 45):
        rmq.producer("shop").send(Message("orders", b"x", delay=seconds))
    rmq.advance(seconds=5)
    restart_broker(rmq)
    rmq.advance(minutes=2)


def transactions(rmq: Kit) -> None:
    """Transactions that commit, roll back, are asked about, and are given up; the broker is restarted in between."""
    answers = {b"1": TransactionState.COMMIT, b"2": TransactionState.ROLLBACK, b"3": None}
    producer = TransactionProducer(
        rmq.route, "sales", lambda message: answers.get(message.body) or TransactionState.UNKNOWN
    )
    rmq.broker.create_topic("orders", 1)
    rmq.consumer("billing").subscribe("orders")(ignore)

    def ends(state: TransactionState | None) -> None:
        producer.send_in_transaction(Message("orders", b"x"), execute=lambda message, arg: state)

    for state in (TransactionState.COMMIT, TransactionState.ROLLBACK, TransactionState.COMMIT):
        ends(state)
    for body in answers:
        producer.send_in_transaction(Message("orders", body), execute=lambda message, arg: None)
    rmq.advance(seconds=20)
    restart_broker(rmq)
    ends(TransactionState.COMMIT)
    rmq.advance(minutes=20)
    ends(TransactionState.ROLLBACK)
    rmq.advance(minutes=2)


def late_ends(rmq: Kit) -> None:
    """A producer commits what a check has committed before, and rolls back what a check has rolled back."""
    ends: list[EndTransaction] = []
    answers = {b"0": TransactionState.COMMIT, b"1": TransactionState.ROLLBACK}
    producer = TransactionProducer(rmq.route, "sales", lambda message: answers[message.body])
    rmq.broker.create_topic("orders", 1)
    rmq.consumer("billing").subscribe("orders")(ignore)
    for body in answers:
        sent = producer.send_in_transaction(Message("orders", body), execute=lambda message, arg: None)
        half = sent.sent
        place = int(half.offset_id[16:], 16)
        ends.append(EndTransaction("sales", answers[body], half.queue_offset, place, half.message_id))
    rmq.advance(minutes=2)
    for end in ends:
        with suppress(RmqError):
            rmq.route.endpoint("broker-a").call(end)
    rmq.advance(minutes=2)


def immunity(rmq: Kit) -> None:
    """Half messages with an immunity of their own, which ends at a check to the millisecond."""
    producer = TransactionProducer(rmq.route, "sales", lambda message: TransactionState.COMMIT)
    rmq.broker.create_topic("orders", 1)
    rmq.consumer("billing").subscribe("orders")(ignore)
    for _ in range(4):
        properties = {"CHECK_IMMUNITY_TIME_IN_SECONDS": "60"}
        producer.send_in_transaction(Message("orders", b"x", properties=properties), execute=lambda message, arg: None)
        rmq.advance(seconds=15)
    rmq.advance(minutes=10)


def receives(rmq: Kit) -> None:
    """Receives that are acknowledged, renewed and forgotten."""
    rmq.broker.create_topic("orders", 1)
    with SimpleConsumer(rmq.route, "billing") as consumer:
        consumer.subscribe("orders")
        consumer.receive(1, wait=0)
        send(rmq, 6)
        first, second, _ = consumer.receive(3, invisible=10)
        consumer.ack(second)
        consumer.extend(first, 30)
        rmq.advance(seconds=20)
        consumer.ack(first)
        while messages := consumer.receive(8, invisible=20):
            consumer.ack(*messages)
        rmq.advance(seconds=60)
        while messages := consumer.receive(8, invisible=20):
            consumer.ack(*messages)


def polls(rmq: Kit) -> None:
    """A pull consumer, which commits by itself, and is started again."""
    rmq.broker.create_topic("orders", 1)
    for _ in range(2):
        send(rmq, 6)
        with PullConsumer(rmq.route, "billing", pull_batch_size=2) as consumer:
            consumer.subscribe("orders")
            while consumer.poll(0):
                rmq.advance(seconds=6)


def crashes(rmq: Kit) -> None:
    """The broker dies, again and again."""
    rmq.broker.create_topic("orders", 1)
    rmq.consumer("billing").subscribe("orders")(ignore)
    for _ in range(3):
        send(rmq, 3)
        rmq.advance(seconds=4)
        send(rmq, 1, delay_level=1)
        rmq.crash_broker()
        rmq.advance(seconds=4)
        send(rmq, 2)
        rmq.advance(seconds=12)
    rmq.advance(minutes=1)


def kills(rmq: Kit) -> None:
    """A process is killed while its first listener runs, and the broker right after acknowledgements and listeners."""

    def shop(process: Process) -> None:
        process.consumer("billing").subscribe("orders")(ignore)

    rmq.network.has_pages = True
    rmq.broker.create_topic("orders", 1)
    process = rmq.app("billing", shop)
    send(rmq)
    rmq.advance(seconds=20)
    rmq.faults.slow_listener("billing", 30)
    send(rmq, 6)
    rmq.advance(seconds=1)
    rmq.crash(process)
    rmq.advance(seconds=30)
    with SimpleConsumer(rmq.route, "audit") as consumer:
        consumer.subscribe("orders")
        consumer.receive(1, wait=0)
        send(rmq, 6)
        rmq.advance(seconds=1)
        consumer.ack(*consumer.receive(6, invisible=10)[1:])
        rmq.crash_broker()
        for _ in range(9):
            rmq.advance(seconds=10)
            consumer.ack(*consumer.receive(8, invisible=10))


def torn_queue(rmq: Kit) -> None:
    """The machine of the broker dies with the last entries of a queue, and its records stay."""
    rmq.broker.create_topic("orders", 1)
    rmq.consumer("billing").subscribe("orders")(ignore)
    send(rmq, 3)
    rmq.advance(seconds=12)
    rmq.crash(billing(rmq), restart=False)
    send(rmq, 3)
    rmq.crash_broker(down=1)
    path = os.path.join(rmq.path, "consumequeue", "orders", "0", f"{0:020}")
    entries = rmq.files.read(path)
    rmq.files.write(path, entries[:80] + bytes(len(entries) - 80))
    rmq.advance(seconds=2)
    rmq.join(rmq.processes[-1])
    rmq.advance(seconds=40)
    send(rmq, 2)
    rmq.advance(minutes=1)


def delay_fails(rmq: Kit) -> None:
    """The disk refuses a delivery, once."""
    rmq.broker.create_topic("orders", 1)
    rmq.consumer("billing").subscribe("orders")(ignore)
    send(rmq, 3, delay_level=1)
    with mock.patch.object(type(rmq.broker.store.copies), "append", side_effect=_full_disk):
        rmq.advance(seconds=2)
    rmq.advance(minutes=1)


def _full_disk(*_: object) -> None:
    raise StoreIOError("write", "commitlog", OSError(ENOSPC, "no space"))


def restarts(rmq: Kit) -> None:
    """The broker shuts down and starts again while its consumer is away."""
    rmq.broker.create_topic("orders", 1)
    rmq.consumer("billing").subscribe("orders")(ignore)
    for _ in range(2):
        send(rmq, 4)
        rmq.advance(seconds=12)
        consumer = billing(rmq)
        consumer.shut_down()
        send(rmq, 2)
        restart_broker(rmq)
        rmq.join(consumer)
        rmq.advance(seconds=40)


def failover(rmq: Kit) -> None:
    """A synchronous replica takes the place of its master."""
    rmq.cluster(brokers=1).create_topic("orders", 1)
    replica = rmq.replica(sync=True)
    send(rmq, 3)
    rmq.consumer("billing").subscribe("orders")(ignore)
    rmq.advance(seconds=15)
    rmq.faults.cut("broker-a", replica.name, seconds=5)
    send(rmq)
    rmq.advance(seconds=20)
    send(rmq, 3)
    rmq.faults.cut("broker-a", replica.name)
    send(rmq)
    rmq.crash_broker(down=600)
    replica.promote()
    rmq.faults.heal("broker-a", replica.name)
    rmq.advance(seconds=5)
    send(rmq, 2)
    rmq.advance(minutes=2)


def failover_of_new_topic(rmq: Kit) -> None:
    """A master dies right after the first messages of a topic, and its synchronous replica takes its place."""
    master = rmq.cluster(brokers=1).broker("broker-a")
    replica = rmq.replica(sync=True)
    rmq.consumer("billing").subscribe("orders")(ignore)
    rmq.advance(seconds=15)
    rmq.network.named(master.name).create_topic("orders", 1)
    send(rmq, 3)
    rmq.crash_broker(down=600)
    replica.promote()
    rmq.advance(minutes=2)


def failover_of_cancel(rmq: Kit) -> None:
    """A master dies right after a cancellation, and its synchronous replica takes its place."""
    master = rmq.cluster(brokers=1).broker("broker-a")
    replica = rmq.replica(sync=True)
    rmq.network.named(master.name).create_topic("orders", 1)
    rmq.consumer("billing").subscribe("orders")(ignore)
    receipt = rmq.producer("shop").send("orders", b"later", delay=60)
    rmq.advance(seconds=15)
    assert rmq.producer("shop").cancel(receipt).cancelled
    rmq.crash_broker(down=600)
    replica.promote()
    rmq.advance(minutes=2)


def once(rmq: Kit) -> None:
    """A guarded effect, while its process dies and messages come twice."""
    store = MemoryDedupStore()

    def charge(message: DeliveredMessage) -> None:
        rmq.effect("charge", message.keys[0])

    guarded = DedupListener(charge, store, group="billing", clock=rmq.clock, key=lambda message: message.keys[0])

    def shop(process: Process) -> None:
        process.consumer("billing").subscribe("orders")(guarded)

    rmq.broker.create_topic("orders", 1)
    process = rmq.app("billing", shop)
    for key in ("1", "2", "1"):
        rmq.producer("shop").send(Message("orders", b"x", keys=key))
    rmq.advance(seconds=2)
    rmq.crash(process)
    rmq.advance(minutes=2)


SETTINGS: dict[str, BrokerConfig] = {"timers": BrokerConfig(timers=TimerConfig(timer_log_file_size=1 << 16))}
"""Settings of the broker, for programs that need some."""
PROGRAMS: dict[str, Callable[[Kit], None]] = {
    program.__name__: program
    for program in (
        backlog,
        crashes,
        late_ends,
        sends,
        tags,
        torn_queue,
        delay_fails,
        immunity,
        wrong_delay_progress,
        delays,
        failover,
        failover_of_cancel,
        failover_of_new_topic,
        failures,
        flow,
        kills,
        instances,
        once,
        order,
        order_gives_up,
        order_is_lost,
        order_moves,
        polls,
        receives,
        restarts,
        timers,
        transactions,
    )
}


def anomalies_of(name: str) -> list[str]:
    """Run a program, and return the kinds of anomalies in its history, each once."""
    rmq = Kit(broker_config=SETTINGS.get(name), now_ms=1_700_000_000_000)
    failure = None
    try:
        PROGRAMS[name](rmq)
    except Exception as error:
        failure = error
    try:
        found = check_history(rmq.events())
    finally:
        rmq.abandon()
    if failure is not None and not found:
        raise failure
    return list(dict.fromkeys(anomaly.anomaly for anomaly in found))
