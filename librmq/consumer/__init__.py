"""Consumers: messages brought to listeners, or fetched; mirrors ``org.apache.rocketmq.client.consumer``."""

from librmq.consumer.config import ConsumerConfig, PullConsumerConfig
from librmq.consumer.delivered import DeliveredMessage
from librmq.consumer.delivery import BlockedQueue, ConsumerCounts
from librmq.consumer.instance import ConsumeContext, ConsumeHook
from librmq.consumer.message_track import MessageTrack, TrackType, message_tracks, resend_dead_letters
from librmq.consumer.orderly import OrderlyResult
from librmq.consumer.processqueue import ProcessQueue
from librmq.consumer.pull import PullConsumer
from librmq.consumer.push import PushConsumer

__all__ = [
    "BlockedQueue",
    "ConsumeContext",
    "ConsumeHook",
    "ConsumerConfig",
    "ConsumerCounts",
    "DeliveredMessage",
    "MessageTrack",
    "OrderlyResult",
    "ProcessQueue",
    "PullConsumer",
    "PullConsumerConfig",
    "PushConsumer",
    "TrackType",
    "message_tracks",
    "resend_dead_letters",
]
