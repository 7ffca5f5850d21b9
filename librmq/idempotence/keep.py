"""How long records are kept, and durations in milliseconds."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from librmq.config import to_seconds

KEEP_CONSUMED: Final = 72 * 3600.0
"""Seconds for which a consumed message is recorded: as long as a broker keeps the message."""
LONGEST: Final = 1e10
"""The longest duration, in seconds."""


def to_milliseconds(name: str, value: float | timedelta) -> int:
    """Return a duration of at least a millisecond, given in seconds or as a `timedelta`, in milliseconds.

    Raises:
        ConfigError: It is neither, or out of range.
    """
    return round(1000 * to_seconds(name, value, 0.001, LONGEST))
