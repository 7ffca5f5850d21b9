"""Settings of a producer."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Literal, TypedDict

from librmq.config import Between, Config, Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerConfig(Config):
    """Settings of a producer; the defaults are 4.9's. Durations are seconds, or a `timedelta` as keywords."""

    timeout: Annotated[float, Seconds()] = 3.0
    """Time for all tries of a send."""
    retries: Annotated[int, Between(0)] = 2
    """Further tries of `Producer.send` and `Producer.send_async`."""
    retry_another_broker_when_not_ok: bool = False
    """Try another broker if a message was stored with less durability than asked (`SendStatus`)."""
    compress_from: Annotated[int, Between(0)] = 4096
    """Bodies of at least this many bytes are compressed."""
    max_message_size: Annotated[int, Between(0)] = 4 << 20
    """The longest body, in bytes."""
    default_topic_queues: Annotated[int, Between(0)] = 4
    """Number of queues of a topic that the first send makes."""
    avoid_slow_brokers: bool = False
    """Avoid brokers for a while after a failure or a slow answer (`librmq.client.queue_selectors`)."""
    nearby: bool = False
    """Send to the brokers of the client's own site, and to others only if these fail."""
    if_broker_down: Literal["refuse", "another"] | None = None
    """How a send with a selector continues while the broker of the selected queue fails: ``refuse`` keeps each key in
    its queue and raises, ``another`` selects among the queues of other brokers. None is 4.9's: refuse until clients
    notice that the broker is gone, then another."""


class ProducerKeywords(TypedDict, total=False):
    """Keywords of a `Producer`: the settings of `ProducerConfig`, for type checkers."""

    timeout: float | timedelta
    retries: int
    retry_another_broker_when_not_ok: bool
    compress_from: int
    max_message_size: int
    default_topic_queues: int
    avoid_slow_brokers: bool
    nearby: bool
    if_broker_down: Literal["refuse", "another"] | None
