"""Consumers: they call listeners, or are polled. Mirrors ``org.apache.rocketmq.client.consumer``.

Its face is what it exports, `base` with what consumers of all kinds have, `config`, and `listeners`; the parts of a
consumer (rebalancing, progress, calls of listeners, each kind of delivery) are inside.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from librmq.runtime.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from librmq.consumer._assignment import ProcessQueue as ProcessQueue
    from librmq.consumer._listeners import DeliveredMessage as DeliveredMessage
    from librmq.consumer._listeners import OrderlyResult as OrderlyResult
    from librmq.consumer._orderly import BlockedQueue as BlockedQueue
    from librmq.consumer._pull import PullConsumer as PullConsumer
    from librmq.consumer._push import PushConsumer as PushConsumer
    from librmq.consumer._simple import ReceivedMessage as ReceivedMessage
    from librmq.consumer._simple import SimpleConsumer as SimpleConsumer
    from librmq.consumer.config import ConsumerConfig as ConsumerConfig
    from librmq.consumer.config import PullConsumerConfig as PullConsumerConfig
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "librmq.consumer._assignment": ("ProcessQueue",),
            "librmq.consumer.config": ("ConsumerConfig", "PullConsumerConfig"),
            "librmq.consumer._listeners": ("DeliveredMessage", "OrderlyResult"),
            "librmq.consumer._orderly": ("BlockedQueue",),
            "librmq.consumer._pull": ("PullConsumer",),
            "librmq.consumer._push": ("PushConsumer",),
            "librmq.consumer._simple": ("ReceivedMessage", "SimpleConsumer"),
        },
    )
