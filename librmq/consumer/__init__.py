"""Consumers: they call listeners, or are polled. Mirrors ``org.apache.rocketmq.client.consumer``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from librmq.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from librmq.consumer.assignment import ProcessQueue as ProcessQueue
    from librmq.consumer.config import ConsumerConfig as ConsumerConfig
    from librmq.consumer.config import PullConsumerConfig as PullConsumerConfig
    from librmq.consumer.instance import BlockedQueue as BlockedQueue
    from librmq.consumer.instance import ConsumeContext as ConsumeContext
    from librmq.consumer.instance import ConsumeHook as ConsumeHook
    from librmq.consumer.instance import ConsumerCounts as ConsumerCounts
    from librmq.consumer.listeners import DeliveredMessage as DeliveredMessage
    from librmq.consumer.orderly import OrderlyResult as OrderlyResult
    from librmq.consumer.pull import PullConsumer as PullConsumer
    from librmq.consumer.push import PushConsumer as PushConsumer
    from librmq.consumer.simple import ReceivedMessage as ReceivedMessage
    from librmq.consumer.simple import SimpleConsumer as SimpleConsumer
    from librmq.consumer.tracks import MessageTrack as MessageTrack
    from librmq.consumer.tracks import TrackType as TrackType
    from librmq.consumer.tracks import message_tracks as message_tracks
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "librmq.consumer.assignment": ("ProcessQueue",),
            "librmq.consumer.config": ("ConsumerConfig", "PullConsumerConfig"),
            "librmq.consumer.tracks": ("MessageTrack", "TrackType", "message_tracks"),
            "librmq.consumer.instance": ("BlockedQueue", "ConsumeContext", "ConsumeHook", "ConsumerCounts"),
            "librmq.consumer.listeners": ("DeliveredMessage",),
            "librmq.consumer.orderly": ("OrderlyResult",),
            "librmq.consumer.pull": ("PullConsumer",),
            "librmq.consumer.push": ("PushConsumer",),
            "librmq.consumer.simple": ("ReceivedMessage", "SimpleConsumer"),
        },
    )
