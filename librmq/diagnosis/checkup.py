"""All findings about a store or a broker, worst first."""

from __future__ import annotations

from librmq.diagnosis.damage import damage_findings, missing_log_findings, unlisted_topic_findings
from librmq.diagnosis.deadletters import dead_letter_findings
from librmq.diagnosis.findings import Finding, Thresholds, worst_first
from librmq.diagnosis.group_lag import lag, lag_findings
from librmq.diagnosis.instances import consistency_findings, stuck_findings
from librmq.diagnosis.pending import half_findings
from librmq.diagnosis.samples import sample_findings
from librmq.diagnosis.view import Source, viewed


def diagnose(source: Source, thresholds: Thresholds | None = None, *, check: bool | None = None) -> list[Finding]:
    """Return the findings about a store, worst first; empty for a healthy one that is verified.

    Args:
        source: A running broker, the folder of a store, or a view of either. For a folder in use, progress
            can be some seconds old. Instances, threads and held messages are known only for a running broker.
        thresholds: Limits beyond which something is a finding.
        check: Whether to compare queues and index of a folder with its log; by default of up to 30,000 messages. Every
            record is read without it too.

    Raises:
        NotAStoreError: The folder holds no store.
        CorruptionError: A file is damaged in a way that no crash explains; ``librmq verify`` says more.
    """
    limits = thresholds or Thresholds()
    with viewed(source) as view:
        group_lag = lag(view)
        return worst_first(
            [
                *damage_findings(view, check),
                *missing_log_findings(view),
                *unlisted_topic_findings(view),
                *lag_findings(view, limits, group_lag=group_lag),
                *consistency_findings(view, limits, group_lag=group_lag),
                *stuck_findings(view, limits, group_lag=group_lag),
                *dead_letter_findings(view, limits),
                *half_findings(view, limits),
                *sample_findings(view, limits),
            ]
        )
