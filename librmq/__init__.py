"""RocketMQ's storage engine and client semantics as one embeddable library, with no broker to run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from librmq.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from librmq.broker import Broker as Broker
    from librmq.broker import BrokerConfig as BrokerConfig
    from librmq.client.identity import Client as Client
    from librmq.client.producer import Producer as Producer
    from librmq.client.producer import ProducerConfig as ProducerConfig
    from librmq.client.producer import SendResult as SendResult
    from librmq.client.queue_selectors import select_by_hash as select_by_hash
    from librmq.client.queue_selectors import select_by_remainder as select_by_remainder
    from librmq.client.transactions import CheckedMessage as CheckedMessage
    from librmq.client.transactions import TransactionProducer as TransactionProducer
    from librmq.client.transactions import TransactionResult as TransactionResult
    from librmq.clock import Clock as Clock
    from librmq.clock import ManualClock as ManualClock
    from librmq.clock import SystemClock as SystemClock
    from librmq.cluster import RouteTable as RouteTable
    from librmq.commitlog import CommitLog as CommitLog
    from librmq.config import StoreConfig as StoreConfig
    from librmq.consumequeue import ConsumeQueue as ConsumeQueue
    from librmq.consumer import ConsumerConfig as ConsumerConfig
    from librmq.consumer import DeliveredMessage as DeliveredMessage
    from librmq.consumer import PullConsumer as PullConsumer
    from librmq.consumer import PullConsumerConfig as PullConsumerConfig
    from librmq.consumer import PushConsumer as PushConsumer
    from librmq.dedup import DedupListener as DedupListener
    from librmq.dedup import deduplicated as deduplicated
    from librmq.errors import AllocationError as AllocationError
    from librmq.errors import BodyChecksumError as BodyChecksumError
    from librmq.errors import BodyCompressionError as BodyCompressionError
    from librmq.errors import BrokerBusyError as BrokerBusyError
    from librmq.errors import BrokerError as BrokerError
    from librmq.errors import BrokerUnreachableError as BrokerUnreachableError
    from librmq.errors import ClientError as ClientError
    from librmq.errors import ClientStateError as ClientStateError
    from librmq.errors import ConfigError as ConfigError
    from librmq.errors import CorruptionError as CorruptionError
    from librmq.errors import DedupStoreError as DedupStoreError
    from librmq.errors import DiskFullError as DiskFullError
    from librmq.errors import EndlessLoopError as EndlessLoopError
    from librmq.errors import FilterError as FilterError
    from librmq.errors import FilterEvaluationError as FilterEvaluationError
    from librmq.errors import FilterSyntaxError as FilterSyntaxError
    from librmq.errors import FlushFailedError as FlushFailedError
    from librmq.errors import GroupMismatchError as GroupMismatchError
    from librmq.errors import InputError as InputError
    from librmq.errors import LargeBodyError as LargeBodyError
    from librmq.errors import MalformedError as MalformedError
    from librmq.errors import MessageIllegalError as MessageIllegalError
    from librmq.errors import MissingExtraError as MissingExtraError
    from librmq.errors import NoRouteError as NoRouteError
    from librmq.errors import NotAStoreError as NotAStoreError
    from librmq.errors import NotIdleError as NotIdleError
    from librmq.errors import ReadOnlyError as ReadOnlyError
    from librmq.errors import RecordError as RecordError
    from librmq.errors import RmqError as RmqError
    from librmq.errors import RunnerClosedError as RunnerClosedError
    from librmq.errors import RunnerError as RunnerError
    from librmq.errors import SendTimeoutError as SendTimeoutError
    from librmq.errors import StoreClosedError as StoreClosedError
    from librmq.errors import StoreError as StoreError
    from librmq.errors import StoreIOError as StoreIOError
    from librmq.errors import StoreLockedError as StoreLockedError
    from librmq.errors import TransactionRefusedError as TransactionRefusedError
    from librmq.files.disk import DiskFiles as DiskFiles
    from librmq.files.memory import MemoryFiles as MemoryFiles
    from librmq.idempotence.outbox import Outbox as Outbox
    from librmq.idempotence.outbox import OutboxSender as OutboxSender
    from librmq.idempotence.stores import MemoryDedupStore as MemoryDedupStore
    from librmq.idempotence.stores import SqliteDedupStore as SqliteDedupStore
    from librmq.listener import DeadLetter as DeadLetter
    from librmq.listener import ReconsumeLater as ReconsumeLater
    from librmq.listener import SuspendQueue as SuspendQueue
    from librmq.message.batch import split_batch as split_batch
    from librmq.message.message import Message as Message
    from librmq.message.message import MessageQueue as MessageQueue
    from librmq.message.message import StoredMessage as StoredMessage
    from librmq.metrics import Metrics as Metrics
    from librmq.protocol import ConsumeFrom as ConsumeFrom
    from librmq.protocol import MessageModel as MessageModel
    from librmq.protocol import SendStatus as SendStatus
    from librmq.protocol import TransactionState as TransactionState
    from librmq.runtime.manual import ManualRunner as ManualRunner
    from librmq.runtime.threads import ThreadRunner as ThreadRunner
    from librmq.store import AppendResult as AppendResult
    from librmq.store import GetStatus as GetStatus
    from librmq.store import MessageFilter as MessageFilter
    from librmq.store import MessageStore as MessageStore
    from librmq.store import ReadResult as ReadResult
    from librmq.store.engine.group_commit import Acknowledgement as Acknowledgement
    from librmq.store.format.checkpoint import Checkpoint as Checkpoint
    from librmq.store.format.indexfile import IndexFile as IndexFile
    from librmq.store.format.keyindex import KeyIndex as KeyIndex
    from librmq.txn import TransactionConfig as TransactionConfig

_MODULES = {
    "broker": ("Broker", "BrokerConfig"),
    "client.identity": ("Client",),
    "client.producer": ("Producer", "ProducerConfig", "SendResult"),
    "client.queue_selectors": ("select_by_hash", "select_by_remainder"),
    "client.transactions": ("CheckedMessage", "TransactionProducer", "TransactionResult"),
    "clock": ("Clock", "ManualClock", "SystemClock"),
    "cluster": ("RouteTable",),
    "commitlog": ("CommitLog",),
    "config": ("StoreConfig",),
    "consumequeue": ("ConsumeQueue",),
    "consumer": ("ConsumerConfig", "DeliveredMessage", "PullConsumer", "PullConsumerConfig", "PushConsumer"),
    "dedup": ("DedupListener", "deduplicated"),
    "errors": (
        "AllocationError",
        "BodyChecksumError",
        "BodyCompressionError",
        "BrokerBusyError",
        "BrokerError",
        "BrokerUnreachableError",
        "ClientError",
        "ClientStateError",
        "ConfigError",
        "CorruptionError",
        "DedupStoreError",
        "DiskFullError",
        "EndlessLoopError",
        "FilterError",
        "FilterEvaluationError",
        "FilterSyntaxError",
        "FlushFailedError",
        "GroupMismatchError",
        "InputError",
        "LargeBodyError",
        "MalformedError",
        "MessageIllegalError",
        "MissingExtraError",
        "NoRouteError",
        "NotAStoreError",
        "NotIdleError",
        "ReadOnlyError",
        "RecordError",
        "RmqError",
        "RunnerClosedError",
        "RunnerError",
        "SendTimeoutError",
        "StoreClosedError",
        "StoreError",
        "StoreIOError",
        "StoreLockedError",
        "TransactionRefusedError",
    ),
    "files.disk": ("DiskFiles",),
    "files.memory": ("MemoryFiles",),
    "idempotence.outbox": ("Outbox", "OutboxSender"),
    "idempotence.stores": ("MemoryDedupStore", "SqliteDedupStore"),
    "listener": ("DeadLetter", "ReconsumeLater", "SuspendQueue"),
    "message.batch": ("split_batch",),
    "message.message": ("Message", "MessageQueue", "StoredMessage"),
    "metrics": ("Metrics",),
    "protocol": ("ConsumeFrom", "MessageModel", "SendStatus", "TransactionState"),
    "runtime.manual": ("ManualRunner",),
    "runtime.threads": ("ThreadRunner",),
    "store": ("AppendResult", "GetStatus", "MessageFilter", "MessageStore", "ReadResult"),
    "store.engine.group_commit": ("Acknowledgement",),
    "store.format.checkpoint": ("Checkpoint",),
    "store.format.indexfile": ("IndexFile",),
    "store.format.keyindex": ("KeyIndex",),
    "txn": ("TransactionConfig",),
}
if not TYPE_CHECKING:  # else a checker would take any name for granted
    __getattr__, __dir__, __all__ = lazy_exports(__name__, _MODULES)
