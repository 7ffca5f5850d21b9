"""Settings of a replica."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from librmq.config import Between, Config, Seconds

__all__ = ["ReplicaConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaConfig(Config):
    """Times and sizes of a replica's following."""

    follow_after_s: Annotated[float, Seconds()] = 0.05
    """Time from an append of the master to the copy, which many messages share. Sends with ``sync`` skip it."""
    copy_tables_every_s: Annotated[float, Seconds()] = 10
    """Interval at which changed topics, groups and progress are copied."""
    retry_after_s: Annotated[float, Seconds()] = 5
    """Time to the next attempt after the master could not be reached; it doubles up to a minute."""
    look_every_s: Annotated[float, Seconds()] = 0.1
    """Interval at which the files of another process's store are looked at, which can't notify."""
    chunk_size: Annotated[int, Between(256)] = 1 << 20
    """Most bytes of one copy, except for a longer record."""
