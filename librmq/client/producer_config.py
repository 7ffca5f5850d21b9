"""Settings of a producer."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, TypedDict

from librmq.config import Between, Config, Seconds

__all__ = ["ProducerConfig", "ProducerSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerConfig(Config):
    """Settings of a producer; the defaults are 4.9's. Durations are seconds, or a `timedelta` as keywords."""

    timeout: Annotated[float, Seconds()] = 3.0
    """Time for all tries of a send."""
    retries: Annotated[int, Between(0)] = 2
    """Further tries of `Producer.send` and `Producer.send_async`."""
    retry_another_broker_when_not_ok: bool = False
    """Try elsewhere when a message was stored, but not as well as asked (`SendStatus`)."""
    compress_from: Annotated[int, Between(0)] = 4096
    """Bodies of this many bytes and more are compressed."""
    max_message_size: Annotated[int, Between(0)] = 4 << 20
    """The longest body, in bytes."""
    default_topic_queues: Annotated[int, Between(0)] = 4
    """Queues of a topic that is made by the first send."""
    avoid_slow_brokers: bool = False
    """Keep away, for a while, from brokers that failed or were slow (`librmq.client.queue_selectors`)."""


class ProducerSettings(TypedDict, total=False):
    """Keywords of a `Producer`: the settings of `ProducerConfig`, for type checkers."""

    timeout: float | timedelta
    retries: int
    retry_another_broker_when_not_ok: bool
    compress_from: int
    max_message_size: int
    default_topic_queues: int
    avoid_slow_brokers: bool
