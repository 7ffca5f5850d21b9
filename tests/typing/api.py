"""User-style code that only mypy reads: a user's program must type-check as written."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from sqlite3 import Connection, connect

from librmq import Broker, Producer, PullConsumer
from librmq.clock import Clock
from librmq.config import StoreConfig
from librmq.consumer import DeliveredMessage
from librmq.dedup import DedupCounts, deduplicated
from librmq.errors import CorruptionError, RmqError
from librmq.idempotence import MemoryDedupStore, Outbox, OutboxSender, transactional
from librmq.message import Message
from librmq.testing import Exploration, Kit, explore


def where(error: CorruptionError) -> tuple[str, int, str]:
    return error.file, error.offset, error.kind


def is_ours(error: Exception) -> bool:
    return isinstance(error, RmqError)


def elapsed_ms(clock: Clock, begin_timestamp_ms: int) -> int:
    return clock.now_ms() - begin_timestamp_ms


def bodies_of_orders(rmq: Kit) -> list[bytes]:
    consumer = rmq.consumer("billing", fail_fast=False, orderly=True)

    @consumer.subscribe("orders")
    def charge(message: DeliveredMessage) -> None:
        rmq.checkpoint()

    rmq.producer().send("orders", b"x")
    elapsed: timedelta = rmq.advance(hours=5).time
    return [one.body for one in rmq.delivered("billing") if one.attempt > 0 and elapsed]


def explored() -> Exploration:
    return explore(bodies_of_orders, runs=10)


async def awaited(rmq: Kit) -> timedelta:
    return (await rmq.run_until_idle()).time


def log_file_size(config: StoreConfig) -> int:
    return config.commitlog_file_size


def guarded(rmq: Kit) -> DedupCounts:
    @deduplicated(MemoryDedupStore(), group="billing", key=lambda message: message.keys[0], clock=rmq.clock)
    def charge(message: DeliveredMessage) -> None:
        rmq.checkpoint()

    rmq.consumer("billing").subscribe("orders")(charge)
    return charge.counts


def in_one_transaction(shop: Connection, message: DeliveredMessage) -> bool:
    with transactional(shop, message, group="billing") as first:
        Outbox().add(shop, Message("invoices", message.body), order_key="o-1")
    return first


def sender(shop: str, rmq: Kit) -> OutboxSender:
    return OutboxSender(lambda: connect(shop), rmq.producer(), claim_timeout=timedelta(minutes=1)).start()


# --- the programs that README and docs begin with


def a_delay_and_a_time(producer: Producer) -> None:
    producer.send("orders", "one coat", delay=timedelta(minutes=30))
    producer.send("orders", b"one coat", delay=1.5)
    producer.send("orders", b"one coat", deliver_at=datetime(2030, 1, 1, tzinfo=UTC))


def polled(broker: Broker) -> list[bytes]:
    with PullConsumer(broker, "pictures") as reader:
        reader.assign(reader.queues("work"))
        return [message.body for message in reader.poll(timeout=5)]


async def inside_asyncio(path: str) -> None:
    async with Broker.open(path) as broker, Producer(broker, "shop") as producer:
        await producer.send_async("orders", b"x")
