"""All findings about a store or a broker, worst first."""

from __future__ import annotations

from librmq.diagnosis.backlog import lag_findings
from librmq.diagnosis.findings import Finding, Thresholds, worst_first
from librmq.diagnosis.letters import dead_letter_findings
from librmq.diagnosis.view import Source, viewed

__all__ = ["diagnose"]

_CHECKS = (lag_findings, dead_letter_findings)


def diagnose(source: Source, thresholds: Thresholds | None = None) -> list[Finding]:
    """Return what deserves a look in a store, worst first; empty for a healthy one.

    Args:
        source: A running broker, the folder of a store, or a view of either. Of a folder that a process uses, progress
            can be some seconds old. Instances, threads and held messages are known of a running broker alone.
        thresholds: From where on something is a finding.

    Raises:
        NotAStoreError: the folder holds no store.
        CorruptionError: a file is damaged in a way that no crash explains; ``librmq verify`` says more.
    """
    limits = thresholds or Thresholds()
    with viewed(source) as view:
        return worst_first(finding for check in _CHECKS for finding in check(view, limits))
