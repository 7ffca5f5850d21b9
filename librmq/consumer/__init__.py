"""Consumers: messages brought to listeners, or fetched; mirrors ``org.apache.rocketmq.client.consumer``."""

from librmq.consumer.config import ConsumerConfig, PullConsumerConfig
from librmq.consumer.delivered import DeliveredMessage
from librmq.consumer.delivery import BlockedQueue, ConsumeContext, ConsumeHook, ConsumerCounts
from librmq.consumer.orderly import Transaction
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
    "ProcessQueue",
    "PullConsumer",
    "PullConsumerConfig",
    "PushConsumer",
    "Transaction",
]
