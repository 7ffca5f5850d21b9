"""Findings of a diagnosis, with evidence and a next step, and the thresholds for them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")
Severity = Literal["error", "warning", "info"]

_ORDER: Final[dict[str, int]] = {"error": 0, "warning": 1, "info": 2}


class Finding(NamedTuple):
    """A finding."""

    kind: str
    """Its kind, the same word in each release, such as ``progress-beyond-end``."""
    severity: Severity
    """``error``, ``warning`` or ``info``."""
    subject: str
    """Its subject, such as ``group billing, topic orders, queue 3``."""
    what: str
    """One sentence for people."""
    evidence: Mapping[str, Any]
    """The values behind it, by name; None for unknown ones."""
    next_step: str

    def to_row(self) -> dict[str, Any]:
        """Return the row that `librmq diagnose` prints."""
        return {
            "finding": self.kind,
            "severity": self.severity,
            "subject": self.subject,
            "what": self.what,
            "evidence": dict(self.evidence),
            "next": self.next_step,
        }


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Limits beyond which something is a finding."""

    normal_lag: int = 100
    """Messages of a group and topic; tens are normal."""
    large_lag: int = 10_000
    """Messages of a group and topic; a backlog that does not go away by itself."""
    old_s: float = 600.0
    """Age of the oldest unconsumed message."""
    stuck_s: float = 60.0
    """Time for which one message may hold the progress of its queue."""
    unchecked_s: float = 3600.0
    """Time for which a half message may wait for its first check after that is due."""
    clock_s: float = 3600.0
    """Time between the birth of a message and its storing."""
    uneven: float = 3.0
    """Size of one queue as a multiple of the mean of its topic's other queues."""
    retries: int = 3
    """Attempts at one message."""
    large_body: int = 128 << 10
    """Bytes of a body."""
    few_queues: int = 2
    """Number of queues that is too small for a busy topic."""
    busy_messages: int = 1_000
    """Number of messages that makes a topic busy."""
    key_share: float = 0.2
    """Share of a topic's messages that one key may have."""
    sampled: int = 10_000
    """Messages to sample if reading all would take long."""
    own: bool = False
    """Whether to include the broker's own groups and topics."""
    topics: frozenset[str] = field(default_factory=frozenset)
    """Important topics, whose warnings count as errors."""

    def _severity_of(self, topic: str) -> Severity:
        """Return how severe a warning about a topic is."""
        return "error" if topic in self.topics else "warning"


def grouped(values: Iterable[Value], key: Callable[[Value], Key]) -> dict[Key, list[Value]]:
    """Return values by their keys, in the order of the first value of each."""
    groups: dict[Key, list[Value]] = {}
    for value in values:
        groups.setdefault(key(value), []).append(value)
    return groups


def sample_evidence(looked_at: int, every: int) -> dict[str, Any]:
    """Return the evidence of a finding that looked at some of the messages."""
    return {"looked_at": looked_at, "sampled": looked_at < every}


def cut_evidence(is_cut: bool) -> dict[str, Any]:
    """Return the evidence of a finding whose list leaves something out; empty if it does not."""
    return {"cut": True} if is_cut else {}


_SIZES: Final = ("lag", "messages", "halves", "expired")


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """Sort findings by severity, damage first, then by the number of messages concerned, kind and subject."""
    return sorted(findings, key=finding_order)


def finding_order(finding: Finding) -> tuple[object, ...]:
    """Return the sort key of a finding, the worst first."""
    size = max(finding.evidence.get(name) or 0 for name in _SIZES)
    return _ORDER.get(finding.severity, len(_ORDER)), finding.kind != "damage", -size, finding.kind, finding.subject
