"""RocketMQ's storage engine and client semantics as one embeddable library, with no broker to run.

This module exports what applications use. `librmq.store` has the rest of the store, `librmq.runtime` the rest of the
runners, and `librmq.errors` all errors.
"""

from __future__ import annotations

from librmq.runtime.lazy_exports import lazy_exports

TYPE_CHECKING = False  # the name of `typing`, without importing that for it
__version__ = "0.1.0"

if TYPE_CHECKING:
    from librmq.broker import Broker as Broker
    from librmq.broker import BrokerConfig as BrokerConfig
    from librmq.client import CheckedMessage as CheckedMessage
    from librmq.client import Producer as Producer
    from librmq.client import SendResult as SendResult
    from librmq.client import TransactionProducer as TransactionProducer
    from librmq.client import TransactionResult as TransactionResult
    from librmq.client import select_by_hash as select_by_hash
    from librmq.client.queue_selectors import select_by_consistent_hash as select_by_consistent_hash
    from librmq.client.recorded_route import record_history as record_history
    from librmq.clock import ManualClock as ManualClock
    from librmq.cluster import Cluster as Cluster
    from librmq.cluster import RouteTable as RouteTable
    from librmq.config import StoreConfig as StoreConfig
    from librmq.config import TransactionConfig as TransactionConfig
    from librmq.consumer import ConsumerConfig as ConsumerConfig
    from librmq.consumer import DeliveredMessage as DeliveredMessage
    from librmq.consumer import PullConsumer as PullConsumer
    from librmq.consumer import PushConsumer as PushConsumer
    from librmq.consumer import ReceivedMessage as ReceivedMessage
    from librmq.consumer import SimpleConsumer as SimpleConsumer
    from librmq.dedup import deduplicated as deduplicated
    from librmq.errors import BrokerBusyError as BrokerBusyError
    from librmq.errors import BrokerError as BrokerError
    from librmq.errors import BrokerUnreachableError as BrokerUnreachableError
    from librmq.errors import ClientStateError as ClientStateError
    from librmq.errors import ConfigError as ConfigError
    from librmq.errors import CorruptionError as CorruptionError
    from librmq.errors import DiskFullError as DiskFullError
    from librmq.errors import FilterError as FilterError
    from librmq.errors import FlushFailedError as FlushFailedError
    from librmq.errors import MessageIllegalError as MessageIllegalError
    from librmq.errors import MissingExtraError as MissingExtraError
    from librmq.errors import NoRouteError as NoRouteError
    from librmq.errors import ReceiptError as ReceiptError
    from librmq.errors import RmqError as RmqError
    from librmq.errors import SendTimeoutError as SendTimeoutError
    from librmq.errors import StoreClosedError as StoreClosedError
    from librmq.errors import StoreError as StoreError
    from librmq.errors import StoreFullError as StoreFullError
    from librmq.errors import StoreLockedError as StoreLockedError
    from librmq.idempotence import MemoryDedupStore as MemoryDedupStore
    from librmq.idempotence import Outbox as Outbox
    from librmq.idempotence import OutboxSender as OutboxSender
    from librmq.idempotence import SqliteDedupStore as SqliteDedupStore
    from librmq.listener import DeadLetter as DeadLetter
    from librmq.listener import DownstreamDown as DownstreamDown
    from librmq.listener import ReconsumeLater as ReconsumeLater
    from librmq.listener import SuspendQueue as SuspendQueue
    from librmq.message import Message as Message
    from librmq.message import MessageQueue as MessageQueue
    from librmq.message import StoredMessage as StoredMessage
    from librmq.message import split_batch as split_batch
    from librmq.metrics import Metrics as Metrics
    from librmq.protocol import CancelResult as CancelResult
    from librmq.protocol import ConsumeFrom as ConsumeFrom
    from librmq.protocol import MessageModel as MessageModel
    from librmq.protocol import Route as Route
    from librmq.protocol import SendStatus as SendStatus
    from librmq.protocol import TransactionState as TransactionState
    from librmq.runtime import ManualRunner as ManualRunner
    from librmq.runtime import ThreadRunner as ThreadRunner
    from librmq.scheduling.timer_config import TimerConfig as TimerConfig
    from librmq.store import MessageStore as MessageStore
    from librmq.wire.remote import connect as connect
    from librmq.wire.share import SharedBroker as SharedBroker
    from librmq.wire.share import share as share
    from librmq.wire.share import share_async as share_async
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "librmq.broker": ("Broker", "BrokerConfig"),
            "librmq.client": ("CheckedMessage", "TransactionProducer", "TransactionResult"),
            "librmq.client.producer": ("Producer",),
            "librmq.client.queue_selectors": ("select_by_consistent_hash", "select_by_hash"),
            "librmq.client.recorded_route": ("record_history",),
            "librmq.client.sender": ("SendResult",),
            "librmq.clock": ("ManualClock",),
            "librmq.cluster": ("Cluster", "RouteTable"),
            "librmq.config": ("StoreConfig", "TransactionConfig"),
            "librmq.consumer": (
                "ConsumerConfig",
                "DeliveredMessage",
                "PullConsumer",
                "PushConsumer",
                "ReceivedMessage",
                "SimpleConsumer",
            ),
            "librmq.dedup": ("deduplicated",),
            "librmq.errors": (
                "BrokerBusyError",
                "BrokerError",
                "BrokerUnreachableError",
                "ClientStateError",
                "ConfigError",
                "CorruptionError",
                "DiskFullError",
                "FilterError",
                "FlushFailedError",
                "MessageIllegalError",
                "MissingExtraError",
                "NoRouteError",
                "ReceiptError",
                "RmqError",
                "SendTimeoutError",
                "StoreClosedError",
                "StoreError",
                "StoreFullError",
                "StoreLockedError",
            ),
            "librmq.idempotence.outbox": ("Outbox", "OutboxSender"),
            "librmq.idempotence.stores": ("MemoryDedupStore", "SqliteDedupStore"),
            "librmq.listener": ("DeadLetter", "DownstreamDown", "ReconsumeLater", "SuspendQueue"),
            "librmq.message.batch": ("split_batch",),
            "librmq.message.message": ("Message", "MessageQueue", "StoredMessage"),
            "librmq.metrics": ("Metrics",),
            "librmq.protocol": (
                "CancelResult",
                "ConsumeFrom",
                "MessageModel",
                "Route",
                "SendStatus",
                "TransactionState",
            ),
            "librmq.runtime.manual": ("ManualRunner",),
            "librmq.runtime.threads": ("ThreadRunner",),
            "librmq.scheduling.timer_config": ("TimerConfig",),
            "librmq.store": ("MessageStore",),
            "librmq.wire.remote.remote_route": ("connect",),
            "librmq.wire.share": (
                "SharedBroker",
                "share",
                "share_async",
            ),
        },
    )
