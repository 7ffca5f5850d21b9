"""RocketMQ's storage engine and client semantics as one embeddable library, with no broker to run."""

from __future__ import annotations

from librmq.broker import Broker, BrokerSettings
from librmq.checkpoint import Checkpoint
from librmq.clock import Clock, ManualClock, SystemClock
from librmq.commitlog import CommitLog
from librmq.config import StoreConfig
from librmq.consumequeue import ConsumeQueue
from librmq.errors import (
    BodyCompressionError,
    ConfigError,
    CorruptionError,
    DiskFullError,
    FilterError,
    FilterEvaluationError,
    FilterSyntaxError,
    FlushFailedError,
    MessageIllegalError,
    MissingExtraError,
    NotAStoreError,
    ReadOnlyError,
    RecordError,
    RmqError,
    StoreClosedError,
    StoreError,
    StoreIOError,
    StoreLockedError,
)
from librmq.files import DiskFiles, MemoryFiles
from librmq.flushing import Acknowledgement
from librmq.indexfile import IndexFile
from librmq.keyindex import KeyIndex
from librmq.message import Message, StoredMessage, split_batch
from librmq.store import AppendResult, GetStatus, MessageFilter, MessageStore, ReadResult

__all__ = [
    "Acknowledgement",
    "AppendResult",
    "BodyCompressionError",
    "Broker",
    "BrokerSettings",
    "Checkpoint",
    "Clock",
    "CommitLog",
    "ConfigError",
    "ConsumeQueue",
    "CorruptionError",
    "DiskFiles",
    "DiskFullError",
    "FilterError",
    "FilterEvaluationError",
    "FilterSyntaxError",
    "FlushFailedError",
    "GetStatus",
    "IndexFile",
    "KeyIndex",
    "ManualClock",
    "MemoryFiles",
    "Message",
    "MessageFilter",
    "MessageIllegalError",
    "MessageStore",
    "MissingExtraError",
    "NotAStoreError",
    "ReadOnlyError",
    "ReadResult",
    "RecordError",
    "RmqError",
    "StoreClosedError",
    "StoreConfig",
    "StoreError",
    "StoreIOError",
    "StoreLockedError",
    "StoredMessage",
    "SystemClock",
    "split_batch",
]
