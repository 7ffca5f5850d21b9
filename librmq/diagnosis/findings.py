"""What a diagnosis finds: findings with evidence and a next step, and the thresholds from which something is one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

__all__ = ["Finding", "Severity", "Thresholds", "worst_first"]

Severity = Literal["error", "warning", "info"]

_ORDER: Final[dict[Severity, int]] = {"error": 0, "warning": 1, "info": 2}


class Finding(NamedTuple):
    """One thing that deserves a look."""

    kind: str
    """What it is, the same word in each release, such as ``progress-beyond-end``."""
    severity: Severity
    subject: str
    """What it is about, such as ``group billing, topic orders, queue 3``."""
    what: str
    """One sentence for people."""
    evidence: Mapping[str, Any]
    """The values that it rests on, by name; None for what is unknown."""
    next_step: str
    """What to do next."""


@dataclass(frozen=True, slots=True)
class Thresholds:
    """From where on something is a finding."""

    normal_lag: int = 100
    """Messages of a group and topic; tens are normal."""
    large_lag: int = 10_000
    """Messages of a group and topic; a backlog that needs more than patience."""
    old_s: float = 600.0
    """Age of the oldest unconsumed message."""
    stuck_s: float = 60.0
    """How long one message may hold the progress of its queue."""
    uneven: float = 3.0
    """How many times the mean of its topic's queues one queue may have."""
    retries: int = 3
    """Attempts at one message, before it is worth a look."""
    large_body: int = 128 << 10
    """Bytes of a body."""
    few_queues: int = 2
    """Queues of a busy topic that are too few."""
    busy_messages: int = 1_000
    """Messages from which on a topic is busy."""
    key_share: float = 0.2
    """Share of a topic's messages that one key may have."""
    sampled: int = 10_000
    """Messages that are looked at where a look at all would take long."""
    own: bool = False
    """Whether the broker's own groups and topics are looked at too."""
    topics: frozenset[str] = field(default_factory=frozenset)
    """Topics that matter most: what is a warning elsewhere is an error there."""


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """Sort findings by severity, then by kind and subject."""
    return sorted(findings, key=lambda one: (_ORDER[one.severity], one.kind, one.subject))
