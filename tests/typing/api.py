"""User-style code that only mypy looks at: what a user writes must type-check as it stands."""

from __future__ import annotations

from datetime import timedelta

from librmq.clock import Clock
from librmq.config import StoreConfig
from librmq.consumer import DeliveredMessage
from librmq.errors import CorruptionError, RmqError
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
    return [one.body for one in rmq.delivered("billing") if one.attempt > 1 and elapsed]


def explored() -> Exploration:
    return explore(bodies_of_orders, runs=10)


async def awaited(rmq: Kit) -> timedelta:
    return (await rmq.run_until_idle()).time


def log_file_size(config: StoreConfig) -> int:
    return config.commitlog_file_size
