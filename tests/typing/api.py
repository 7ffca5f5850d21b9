"""User-style code that only mypy looks at: what a user writes must type-check as it stands."""

from __future__ import annotations

from librmq.clock import Clock
from librmq.config import StoreConfig
from librmq.errors import CorruptionError, RmqError


def where(error: CorruptionError) -> tuple[str, int, str]:
    return error.file, error.offset, error.kind


def is_ours(error: Exception) -> bool:
    return isinstance(error, RmqError)


def elapsed_ms(clock: Clock, begin_timestamp_ms: int) -> int:
    return clock.now_ms() - begin_timestamp_ms


def log_file_size(config: StoreConfig) -> int:
    return config.commitlog_file_size
