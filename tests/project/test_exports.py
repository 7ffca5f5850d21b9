"""Pin the names that packages export; `test_public_api` pins those of `librmq` itself."""

from __future__ import annotations

from importlib import import_module

import pytest

from librmq.lazy_exports import exported

EXPORTS = {
    "client": [
        "CheckedMessage",
        "Client",
        "ProcessClients",
        "Producer",
        "ProducerConfig",
        "SendResult",
        "TransactionProducer",
        "TransactionResult",
        "select_by_hash",
        "select_by_remainder",
    ],
    "cluster": [
        "Cluster",
        "Replica",
        "ReplicaConfig",
        "ReplicaRoute",
        "RouteTable",
        "RoutedClient",
        "SiteRoute",
        "SiteRouter",
        "StoredMaster",
        "Switch",
        "promote_replica",
        "site_of",
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
        "ReceivedMessage",
        "SimpleConsumer",
        "TrackType",
        "message_tracks",
        "resend_dead_letters",
    ],
    "diagnosis": [
        "Alarm",
        "Comparison",
        "Consumption",
        "DeadLetterCause",
        "Estimate",
        "ExpiringMessages",
        "Finding",
        "GivenUpHalf",
        "GivenUpMessage",
        "GroupLag",
        "GroupRate",
        "HeldMessage",
        "HeldProgress",
        "Lag",
        "PendingMessage",
        "PopHolds",
        "QueueLag",
        "Replay",
        "Report",
        "Scenario",
        "Skip",
        "SkippedQueue",
        "StoreView",
        "StoryEvent",
        "Thresholds",
        "TopicLag",
        "TopicProgress",
        "TopicVolume",
        "UnusableRecord",
        "WaitingOrigins",
        "Watch",
        "compare",
        "consumption_of",
        "continue_as",
        "dead_letter_causes",
        "dead_letters",
        "decide_half",
        "design_check",
        "diagnose",
        "estimate",
        "expiring",
        "given_up",
        "held_progress",
        "lag",
        "move_to",
        "pending_messages",
        "plan_continue_as",
        "plan_replay",
        "plan_skip",
        "pop_holds",
        "render_page",
        "replay",
        "report",
        "set_aside",
        "skip",
        "skipped",
        "story",
        "topic_volumes",
        "waiting_origins",
        "watch",
        "what_if",
    ],
    "idempotence": [
        "Claim",
        "DedupRecord",
        "DedupStore",
        "LocalTransactions",
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
        "Anomaly",
        "CrashImages",
        "DeliveryAttempt",
        "Elapsed",
        "Event",
        "Exploration",
        "FailingFiles",
        "Faults",
        "History",
        "HistoryAnomalyError",
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
        "check_history",
        "explore",
    ],
    "wire.remote": ["ClusterAdmin", "GroupProgress", "QueueBounds", "RemoteRoute", "connect"],
}


@pytest.mark.parametrize("package", EXPORTS)
def test_a_package_exports_the_pinned_names(package: str) -> None:
    module = import_module(f"librmq.{package}")
    assert module.__all__ == EXPORTS[package]
    assert [name for name in module.__all__ if not hasattr(module, name)] == []
    assert (module.__doc__ or "").count("\n\n") <= 1


def test_a_lower_layer_asks_for_a_public_name() -> None:
    """`Broker.consume` returns a consumer, although the broker's modules do not import one."""
    import_module("librmq")
    assert exported("librmq", "PullConsumer") is import_module("librmq.consumer").PullConsumer
    with pytest.raises(AttributeError, match="no attribute 'Member'"):
        exported("librmq", "Member")
    with pytest.raises(KeyError):
        exported("librmq.nowhere", "hashing")
