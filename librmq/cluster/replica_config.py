"""Settings of a replica."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from librmq.config import Between, Config, Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaConfig(Config):
    """Times and sizes that control how a replica follows."""

    follow_after_s: Annotated[float, Seconds()] = 0.05
    """Time from the master's append to the copy, which many messages share. Sends with ``sync`` do not wait for it."""
    copy_tables_every_s: Annotated[float, Seconds()] = 10
    """Interval at which changed topics, groups and progress are copied."""
    retry_after_s: Annotated[float, Seconds()] = 5
    """Time to the next attempt if the master is unreachable; it doubles up to a minute."""
    look_every_s: Annotated[float, Seconds()] = 0.1
    """Interval between checks of the files of another process's store, which can't notify."""
    chunk_size: Annotated[int, Between(256)] = 1 << 20
    """Most bytes in one copy, except for a longer record."""
