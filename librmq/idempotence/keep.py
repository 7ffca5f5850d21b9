"""How long results are kept."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from librmq.errors import ConfigError

__all__ = []
KEEP_CONSUMED: Final = 72 * 3600.0
"""Seconds for which a consumed message is remembered: as long as a broker keeps it."""


def milliseconds(what: str, value: float | timedelta) -> int:
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if not 0.001 <= seconds <= 1e10:
        raise ConfigError(f"{what}: expected seconds above 0, found {value!r}")
    return round(1000 * seconds)
