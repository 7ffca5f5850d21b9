"""The names that packages export are pinned here, beside those of the root in `test_public_api`."""

from __future__ import annotations

from importlib import import_module

import pytest

EXPORTS = {
    "client": [
        "CheckedMessage",
        "Client",
        "Producer",
        "ProducerConfig",
        "SendResult",
        "TransactionProducer",
        "TransactionResult",
        "select_by_hash",
        "select_by_remainder",
    ],
    "consumer": [
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
    ],
    "diagnosis": ["PendingMessage", "pending_messages"],
    "idempotence": [
        "Claim",
        "DedupRecord",
        "DedupStore",
        "MemoryDedupStore",
        "Outbox",
        "OutboxSender",
        "RedisDedupStore",
        "SeenKeys",
        "SqlDedupStore",
        "SqliteDedupStore",
        "Transactional",
        "dedup_key",
        "purge_messages",
        "purge_step",
        "transactional",
        "unique_id",
        "upgrade_tables",
    ],
    "testing": [
        "CrashImages",
        "DeliveryAttempt",
        "Elapsed",
        "Event",
        "Exploration",
        "FailingFiles",
        "Faults",
        "History",
        "HistoryLine",
        "Image",
        "Kit",
        "NotAwaitedError",
        "Process",
        "ProcessDied",
        "ProcessStateError",
        "RecordingFiles",
        "UndeliveredWarning",
        "UnknownGroupError",
        "UnsoundStoreError",
        "explore",
    ],
}


@pytest.mark.parametrize("package", EXPORTS)
def test_a_package_exports_the_pinned_names(package: str) -> None:
    module = import_module(f"librmq.{package}")
    assert module.__all__ == EXPORTS[package]
    assert [name for name in module.__all__ if not hasattr(module, name)] == []
    assert (module.__doc__ or "").count("\n\n") <= 1
