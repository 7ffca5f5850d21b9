"""Everything that a report says about one store."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

import numpy as np

from librmq.diagnosis.checks import diagnose, registered_filters
from librmq.diagnosis.damage import damage_finding, message_count, not_verified, unverified_damage
from librmq.diagnosis.deadletters import dead_letter_causes, dead_letters, sum_up_causes
from librmq.diagnosis.findings import Finding, Thresholds
from librmq.diagnosis.group_lag import Lag, lag
from librmq.diagnosis.pending import PendingMessage, pending_messages
from librmq.diagnosis.survey.log_use import log_file_uses
from librmq.diagnosis.survey.message_sums import KeyCounts, ReportScope, TimeAxis, Traffic, count_filter, read_messages
from librmq.diagnosis.survey.model import (
    DUE_BOUNDS_MS,
    DamagedPlace,
    FilterMatch,
    GroupTopicLag,
    ReportedCause,
    ReportedFinding,
    ReportPart,
    StoreSummary,
    WaitingMessages,
)
from librmq.diagnosis.view import StoreView, is_own_group
from librmq.errors import CorruptionError
from librmq.message import record
from librmq.message.delay_levels import SCHEDULE_TOPIC
from librmq.message.topics import RETRY_PREFIX
from librmq.store.format.directory import COMMITLOG
from librmq.store.recovery.verify import MISSING_LOG, verify

VERIFIED: Final = 300_000
"""Most messages for which a report runs ``verify`` by default, because it reads every record."""


def find_time_range(view: StoreView, scope: ReportScope) -> tuple[int, int] | None:
    """Return the store times of the first and the last wanted message; None without messages."""
    times = []
    for name, state in view.ranges.items():
        if scope.has_topic(name[0]):
            with suppress(CorruptionError):
                queue = view.store.queues[name]
                for at in (state.min_offset, state.max_offset - 1):
                    entry = queue.entry(at)
                    time_ms = entry and view.store.log.store_timestamp_ms(entry.physical_offset, entry.size)
                    if time_ms is not None:
                        times.append(time_ms)
    if not times:
        return None
    last = max(times) if scope.end_ms is None else min(max(times), scope.end_ms - 1)
    return min(max(min(times), scope.begin_ms or 0), last), last


def _is_checked(view: StoreView, check: bool | None) -> bool:
    return message_count(view) <= VERIFIED if check is None else check


def passes_over(view: StoreView, check: bool | None) -> int:
    """Return the number of log bytes that a report reads; ``verify`` takes two passes."""
    return (view.store.log.end - view.store.log.begin) * (3 if _is_checked(view, check) else 1)


def _verify(path: str, name: str, view: StoreView | None = None) -> tuple[DamagedPlace, ...]:
    """Return what ``verify`` finds, with files relative to the store."""
    result = verify(path, files=None if view is None else view.store.files)
    return tuple(
        DamagedPlace(name, os.path.relpath(place.file, path), place.offset, place.kind, place.what)
        for place in result.damage
        if place.kind != MISSING_LOG  # a finding of its own
    )


def broken_store(path: str, name: str, error: CorruptionError) -> ReportPart:
    """Return what is known about a store that cannot be opened."""
    damage = _verify(path, name)
    summary = StoreSummary(name, path, None, None, False, str(error), 0, 0, None, None, skipped=True)
    return ReportPart(summary=summary, damage=damage, findings=_damage_findings(name, damage, str(error)))


def survey_store(
    view: StoreView,
    name: str,
    scope: ReportScope,
    axis: TimeAxis,
    *,
    limits: Thresholds,
    window_s: float,
    check: bool | None,
) -> ReportPart:
    """Return everything about a store.

    Args:
        view: The store.
        name: Its name in the report.
        scope: The part of it that the report is about.
        axis: The intervals of rates.
        limits: Limits above which something is a finding.
        window_s: Seconds between messages of one key that count as repeated.
        check: Whether to run ``verify``; None runs it for up to `VERIFIED` messages.
    """
    count = message_count(view)
    part = survey_findings(view, name, scope, limits=limits, check=_is_checked(view, check))
    if view.store.read_only:  # the findings' pages of queues would add to those of this pass
        for queue_name in view.ranges:
            view.store.queues[queue_name].keep_descriptors(False)
    traffic = Traffic(axis, KeyCounts(count, window_s))
    unreadable = read_messages(view, name, scope, traffic)
    damage = part.damage if part.damage else tuple(unreadable)
    findings = part.findings
    if damage and not part.damage:
        findings = (*_damage_findings(name, damage, None), *findings)
    topics = tuple(traffic.topics(name))
    summary = part.summary._replace(
        is_sound=False if damage else part.summary.is_sound,
        messages=sum(row.messages for row in topics),
        bytes=sum(row.bytes for row in topics),
        first_ms=min((row.first_ms for row in topics), default=None),
        last_ms=max((row.last_ms for row in topics), default=None),
        skipped=part.summary.skipped or bool(unreadable),
    )
    return replace(
        part,
        summary=summary,
        damage=damage,
        findings=findings,
        topics=topics,
        delays=tuple(traffic.delays(name)),
        retries=tuple(row for row in traffic.retries(name) if scope.has_group(row.group)),
        keys=tuple(traffic.keys.frequent(name)),
        repeated=tuple(traffic.keys.repeated(name)),
        filters=tuple(_filters(view, name, scope)),
    )


def survey_findings(view: StoreView, name: str, scope: ReportScope, *, limits: Thresholds, check: bool) -> ReportPart:
    """Return the part of a report that needs no pass over all messages."""
    path = view.store.path
    damage: tuple[DamagedPlace, ...] = ()
    if check:
        damage = _verify(path, name, view)
    group_lag = lag(view)
    findings = [
        _reported(name, finding)
        for finding in diagnose(view, limits, check=False)
        if finding.kind not in ("damage", "not-verified") and scope.has_subject(finding.subject)
    ]
    unchecked: list[ReportedFinding] = []
    if not check:
        missing = [_reported(name, finding)._replace(subject=f"store {name}") for finding in unverified_damage(view)]
        unchecked = [*missing, _reported(name, not_verified(f"store {name}", VERIFIED))]
    return ReportPart(
        summary=StoreSummary(
            name, path, view.owner, view.now_ms, not damage if check else None, None, 0, 0, None, None,
            skipped=view.store.cut_short is not None or any(finding.file.startswith(COMMITLOG) for finding in damage),
        ),
        damage=damage,
        findings=(*_damage_findings(name, damage, None), *findings, *unchecked),
        lags=tuple(_lags(view, name, scope, group_lag)),
        dead_letters=tuple(_causes(view, name, scope)),
        waiting=tuple(_waiting(view, name, scope)),
        log_files=tuple(log_file_uses(view, name, group_lag)),
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------- findings


def _reported(name: str, finding: Finding) -> ReportedFinding:
    evidence = json.loads(json.dumps(dict(finding.evidence), default=str))  # as it comes back from JSON
    return ReportedFinding(
        name, finding.kind, finding.severity, finding.subject, finding.what, evidence, finding.next_step
    )


def _damage_findings(name: str, damage: Sequence[DamagedPlace], error: str | None) -> tuple[ReportedFinding, ...]:
    if not damage and error is None:
        return ()
    return (_reported(name, damage_finding(f"store {name}", damage, error=error)),)


# --------------------------------------------------------------------------------------------------------- the parts


def _lags(view: StoreView, name: str, scope: ReportScope, group_lag: Lag) -> Iterator[GroupTopicLag]:
    instances: dict[str, int | None] = {}
    for columns in group_lag.topics:
        topic_lag = columns.sums()
        if (
            is_own_group(topic_lag.group)
            or topic_lag.topic == SCHEDULE_TOPIC
            or not scope.has_group(topic_lag.group)
            or not scope.has_topic(topic_lag.topic)
        ):
            continue
        if topic_lag.group not in instances:
            instances[topic_lag.group] = _instances(view, topic_lag.group)
        yield GroupTopicLag(
            name, topic_lag.group, topic_lag.topic, topic_lag.lag, topic_lag.oldest_timestamp_ms,
            view.age_s(topic_lag.oldest_timestamp_ms), topic_lag.without_progress, topic_lag.expired,
            instances[topic_lag.group], tuple(columns.queue_ids), tuple(columns.min_offsets),
            tuple(columns.max_offsets), tuple(columns.consumer_offsets), tuple(columns.lags),
        )  # fmt: skip


def _instances(view: StoreView, group: str) -> int | None:
    if view.broker is None:
        return None
    connections = view.broker.connections(group)
    return 0 if connections is None else len(connections.subscriptions_by_client)


def _causes(view: StoreView, name: str, scope: ReportScope) -> Iterator[ReportedCause]:
    causes = (
        sum_up_causes(cause for cause in dead_letters(view) if scope.has_time(cause.store_timestamp_ms))
        if scope.has_times
        else dead_letter_causes(view)
    )
    for cause in causes:
        if scope.has_group(cause.group) and scope.has_topic(cause.original_topic):
            yield ReportedCause(name, *cause)


def _waiting(view: StoreView, name: str, scope: ReportScope) -> Iterator[WaitingMessages]:
    rows: dict[tuple[str, str, str | None], WaitingMessages] = {}
    due: dict[tuple[str, str, str | None], Any] = {}
    now_ms = view.now_ms or 0
    for pending in pending_messages(view.store, view.tables):
        group = _group_of(view, pending)
        if not scope.has_topic(pending.topic) or (group is not None and not scope.has_group(group)):
            continue
        key: tuple[str, str, str | None] = pending.kind, pending.topic, group
        row = rows.get(key) or WaitingMessages(name, *key, 0, pending.due_ms, pending.due_ms, 0, ())
        if pending.due_ms is not None:
            bins = due.setdefault(key, np.zeros(len(DUE_BOUNDS_MS) + 1, np.int64))
            bins[np.searchsorted(DUE_BOUNDS_MS, pending.due_ms - now_ms, side="right")] += 1
            row = row._replace(
                first_due_ms=min(row.first_due_ms or pending.due_ms, pending.due_ms),
                last_due_ms=max(row.last_due_ms or pending.due_ms, pending.due_ms),
            )
        rows[key] = row._replace(messages=row.messages + 1, most_checks=max(row.most_checks, pending.checks))
    for key, row in sorted(rows.items(), key=lambda item: (-item[1].messages, str(item[0]))):
        yield row._replace(due=tuple(due[key].tolist()) if key in due else ())


def _group_of(view: StoreView, pending: PendingMessage) -> str | None:
    if pending.kind == "retry":
        return pending.target_topic.removeprefix(RETRY_PREFIX)
    if pending.kind not in ("half", "given_up"):
        return None
    message = view.store.message_at(pending.physical_offset)
    return None if message is None else message.properties.get(record.PROPERTY_PRODUCER_GROUP)


def _filters(view: StoreView, name: str, scope: ReportScope) -> Iterator[FilterMatch]:
    for group, topic, expression in registered_filters(view):
        if scope.has_group(group) and scope.has_topic(topic):
            yield count_filter(view, name, scope, group, topic, expression)
