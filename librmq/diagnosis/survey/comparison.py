"""Changes since an earlier report: new, gone and worse findings, lag, rates, and the time to drain."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from librmq.diagnosis.survey.model import ROW_NAMES, GroupLagChange, GroupTopicLag, Report, ReportedFinding


class Comparison(NamedTuple):
    """The changes between two reports."""

    earlier: Report
    """The report to compare with; a store of it that the later report has too is named as there."""
    added: tuple[ReportedFinding, ...]
    """Findings that the earlier report lacks."""
    removed: tuple[ReportedFinding, ...]
    """Findings that only the earlier report has."""
    changed: tuple[tuple[ReportedFinding, ReportedFinding], ...]
    """The earlier and the current finding of one kind about one subject."""
    lags: tuple[GroupLagChange, ...]
    """The largest growth comes first."""


def compare(earlier: Report, later: Report) -> Comparison:
    """Return what has changed. Findings are the same if their store, kind and subject are equal.

    Stores are the same if their logs are, whatever their folders are called: a file of both begins with the same record
    at the same place. If retention has deleted all common files, stores of one name are the same.
    """
    earlier = _named_as(later, earlier)
    before, now = _by_subject(earlier), _by_subject(later)
    return Comparison(
        earlier,
        tuple(finding for key, finding in now.items() if key not in before),
        tuple(finding for key, finding in before.items() if key not in now),
        tuple(
            (before[key], finding)
            for key, finding in now.items()
            if key in before and (finding.severity, finding.what) != (before[key].severity, before[key].what)
        ),
        tuple(
            sorted(
                _lag_changes(earlier, later),
                key=lambda finding: ((finding.before or 0) - (finding.lag or 0), finding[:3]),
            )
        ),
    )


def _named_as(later: Report, earlier: Report) -> Report:
    """Return a report whose stores have the names of their logs in a later one."""
    then, now = _log_starts(earlier), _log_starts(later)
    names: dict[str, str] = {}
    for name, starts in now.items():
        same = [old for old in then if old not in names and then[old].items() & starts.items()]
        if same:
            names[name if name in same else same[0]] = name
    for name in now.keys() - set(names.values()):
        if name in then and name not in names and not then[name].keys() & now[name].keys():
            names[name] = name

    def renamed(row: Any) -> Any:  # noqa: ANN401 (a row of any kind)
        name = names.get(row.store, f"{row.store} (earlier)" if row.store in now else row.store)
        if isinstance(row, ReportedFinding) and row.subject == f"store {row.store}":
            row = row._replace(subject=f"store {name}")
        return row._replace(store=name)

    rows: dict[str, Any] = {part: tuple(map(renamed, getattr(earlier, part))) for part in ("stores", *ROW_NAMES)}
    return replace(earlier, **rows)


def _log_starts(report: Report) -> dict[str, dict[int, str]]:
    """Return for each store the first record of each log file, by its physical offset."""
    starts: dict[str, dict[int, str]] = {store.store: {} for store in report.stores}
    for file in report.log_files:
        starts.setdefault(file.store, {})[file.physical_offset] = file.first
    return starts


def _by_subject(report: Report) -> dict[tuple[str, ...], ReportedFinding]:
    findings: dict[tuple[str, ...], ReportedFinding] = {}
    for finding in report.findings:
        cause = str(finding.evidence.get("cause", ""))  # one subject can have several causes
        findings[finding.store, finding.kind, finding.subject, cause] = finding
    return findings


def _lag_changes(earlier: Report, later: Report) -> Iterator[GroupLagChange]:
    before = {row[:3]: row for row in earlier.lags}
    times = {row.store: row.now_ms for row in earlier.stores}
    seconds = {
        row.store: (row.now_ms - (times[row.store] or 0)) / 1000
        for row in later.stores
        if row.now_ms is not None and times.get(row.store) is not None
    }
    for row in later.lags:
        yield _lag_change(before.pop(row[:3], None), row, seconds.get(row.store))
    for old in before.values():
        yield GroupLagChange(*old[:3], old.lag, None, None, None, None, None)


def _lag_change(old: GroupTopicLag | None, row: GroupTopicLag, seconds: float | None) -> GroupLagChange:
    if old is None or seconds is None or seconds <= 0:
        return GroupLagChange(*row[:3], None if old is None else old.lag, row.lag, seconds, None, None, None)
    offsets = zip(old.queue_ids, old.min_offsets, old.max_offsets, old.consumer_offsets, strict=True)
    queues = {queue_id: offsets for queue_id, *offsets in offsets}
    stored, consumed, has_progress = 0, 0, False
    for queue_id, end, offset in zip(row.queue_ids, row.max_offsets, row.consumer_offsets, strict=True):
        if queue_id in queues:
            begin, end_then, offset_then = queues[queue_id]
            stored += max(0, end - (end_then or 0))
            if offset is not None:
                has_progress = True
                consumed += max(0, offset - max(offset_then or 0, begin or 0))
    gain = (consumed - stored) / seconds if has_progress else 0.0
    drain_s = 0.0 if not row.lag else row.lag / gain if gain > 0 else None
    consumed_per_s = consumed / seconds if has_progress else None
    return GroupLagChange(*row[:3], old.lag, row.lag, seconds, stored / seconds, consumed_per_s, drain_s)
