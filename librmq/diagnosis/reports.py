"""Reports about stores or brokers: the rows about one store, its log files, and several stores in one report."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import chain
from typing import Any, Final
from zlib import crc32

import numpy as np
import numpy.typing as npt

from librmq.commitlog import CommitLog
from librmq.consumequeue_entries import HOLE_SIZE
from librmq.diagnosis._checks import (
    damage_finding,
    first_lost,
    is_verified,
    missing_key_findings,
    not_verified,
    other_findings,
    recoverable_finding,
    registered_filters,
    unverified_damage,
    verified_places,
)
from librmq.diagnosis._findings import Finding, Thresholds, worst_first
from librmq.diagnosis._lag_report import Lag, lag
from librmq.diagnosis._message_sums import KeyCounts, Traffic, count_filter, read_messages
from librmq.diagnosis.deadletters import DeadLetterCause, dead_letter_causes, dead_letters, sum_up_causes
from librmq.diagnosis.pending import PendingMessage, pending_messages
from librmq.diagnosis.report_rows import (
    DUE_BOUNDS_MS,
    LogFileUse,
    Report,
    ReportScope,
    StoreReport,
    TimeAxis,
    WaitingMessages,
)
from librmq.diagnosis.view import Shared, Source, StoreView, TopicSummary, topic_summaries, viewed
from librmq.errors import ConfigError, CorruptionError
from librmq.files import Damage, Files
from librmq.message import record
from librmq.message.properties import PropertyName
from librmq.message.topics import SystemTopic, group_of_retries, is_own_group
from librmq.runtime.event_log import advance
from librmq.store.engine.store_parts import QueueName
from librmq.store.format.directory import COMMITLOG

# ---- log files

_NEVER: Final = 1 << 62  # with room for sums
_ENTRIES_AT_ONCE: Final = 1 << 16


def _log_files(view: StoreView, group_lag: Lag) -> Iterator[LogFileUse]:
    """Yield a row per file of the log, oldest first; ``group_lag`` is the lag of all groups."""
    log, size = view.store.log, view.store.log.sequence.file_size
    first = log.begin // size
    count = max(0, -(-log.end // size) - first)
    messages, unread, last = (np.zeros(count, np.int64) for _ in range(3))
    for entries, is_unread in _entries(view, _unread_from(group_lag)):
        places, sizes = entries["physical_offset"].astype(np.int64), entries["size"]
        at = places // size - first
        is_here = (sizes > 0) & (sizes != HOLE_SIZE) & (at >= 0) & (at < count)
        messages += np.bincount(at[is_here], minlength=count)
        unread += np.bincount(at[is_here & is_unread], minlength=count)
        np.maximum.at(last, at[is_here], places[is_here])
    for number in range(count):
        begin = (first + number) * size
        time = log.store_timestamp_ms(int(last[number])) if messages[number] else None
        end = min(begin + size, log.end)
        data = log.data_at(max(begin, log.begin), record.FIXED_SIZE)
        counts = int(messages[number]), int(unread[number])
        yield LogFileUse(begin, end - max(begin, log.begin), *counts, time, f"{crc32(data):08x}")


def _entries(
    view: StoreView, unread_from: Mapping[QueueName, int]
) -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]]:
    """Yield the entries of all queues, those of many short queues together, and whether a group has yet to consume."""
    blocks, marks, size = list[npt.NDArray[Any]](), list[npt.NDArray[np.bool_]](), 0
    for name in view.ranges:
        with suppress(CorruptionError):  # verify reports it
            begin = unread_from.get(name, _NEVER)
            for first, block in view.store.queues[name].blocks():
                blocks.append(block)
                marks.append(np.arange(first, first + len(block)) >= begin)
                size += len(block)
                if size >= _ENTRIES_AT_ONCE:
                    yield np.concatenate(blocks), np.concatenate(marks)
                    blocks, marks, size = [], [], 0
    if blocks:
        yield np.concatenate(blocks), np.concatenate(marks)


def _unread_from(group_lag: Lag) -> dict[QueueName, int]:
    """Return for each queue the first queue offset that a group has yet to consume."""
    unread: dict[QueueName, int] = {}
    for row in group_lag:
        if row.lag:
            name = row.topic, row.queue_id
            start = row.max_offset - row.lag
            unread[name] = min(start, unread.get(name, start))
    return unread


# ---- one store

VERIFIED: Final = 300_000
"""Most messages for which a report runs ``verify`` by default, because it reads every record."""


def _topic_rows(view: StoreView, scope: ReportScope) -> tuple[TopicSummary, ...]:
    """Return the rows of `librmq topics`, without times that can't be read."""

    def times_of(queue: QueueName, offsets: range) -> tuple[int | None, int | None]:
        with suppress(CorruptionError):  # verify reports it
            return view.times_of(queue, offsets)
        return None, None

    return tuple(topic_summaries(view, filter(scope.has_topic, view.listed_topics), times_of))


def _axis(rows: Iterable[TopicSummary], scope: ReportScope) -> TimeAxis | None:
    """Return intervals of the time between the first and the last wanted message; None without messages."""
    times = [time_ms for row in rows for time_ms in (row.min_timestamp_ms, row.max_timestamp_ms) if time_ms is not None]
    if not times:
        return None
    last = max(times) if scope.end_ms is None else min(max(times), scope.end_ms - 1)
    return TimeAxis.between(min(max(min(times), scope.begin_ms or 0), last), last)


def _verify(path: str, files: Files | None = None) -> tuple[tuple[Damage, ...], list[Damage]]:
    """Return what ``verify`` finds damaged and recoverable, with files relative to the store."""
    damage, recoverable = (
        [replace(place, file=os.path.relpath(place.file, path)) for place in places]
        for places in verified_places(path, files)
    )
    return tuple(damage), recoverable


def _broken_store(path: str, name: str, error: CorruptionError) -> StoreReport:
    """Return what is known about a store that cannot be opened."""
    damage, _ = _verify(path)
    findings = _damage_findings(name, damage, str(error))
    return StoreReport(
        store=name, path=path, is_sound=False, error=str(error), skipped=True, damage=damage, findings=findings
    )


def _with_messages(
    part: StoreReport, view: StoreView, scope: ReportScope, axis: TimeAxis, window_s: float
) -> StoreReport:
    """Return what a report says about a store with the sums over its messages."""
    if view.store.read_only:  # the findings' pages of queues and log would add to those of this pass
        for queue_name in view.ranges:
            view.store.queues[queue_name].unmap_all()
        view.store.log.release_read_pages(view.store.log.begin, view.store.log.end)
    traffic = Traffic(axis, KeyCounts(view.message_count(), window_s))
    unreadable = tuple(read_messages(view, scope, traffic))
    if unreadable and not part.damage:
        findings = (*_damage_findings(part.store, unreadable, None), *part.findings)
        part = replace(part, damage=unreadable, findings=findings, is_sound=False)
    return replace(
        part,
        skipped=part.skipped or bool(unreadable),
        traffic=tuple(traffic.rows(scope)),
        keys=tuple(traffic.keys.frequent()),
        repeated=tuple(traffic.keys.repeated()),
        filters=tuple(
            count_filter(view, scope, group, topic, expression)
            for group, topic, expression in registered_filters(view)
            if scope.has_group(group) and scope.has_topic(topic)
        ),
    )


def _without_messages(
    view: StoreView,
    name: str,
    scope: ReportScope,
    topics: Iterable[TopicSummary],
    limits: Thresholds,
    *,
    check: bool,
) -> StoreReport:
    """Return what a report says about a store without a pass over all messages."""
    path, log, every_lag = view.store.path, view.store.log, lag(view)
    damage, recoverable = _verify(path, view.store.files) if check else ((), [])
    keys = () if view.is_live else missing_key_findings(view)
    findings = [
        finding
        for finding in chain(keys, other_findings(view, limits, every_lag))
        if scope.has_subject(finding.subject)
    ]
    if recoverable:
        findings.append(recoverable_finding(f"store {name}", recoverable))
    if not check:
        findings += [finding._replace(subject=f"store {name}") for finding in unverified_damage(view)]
        findings.append(not_verified(f"store {name}", VERIFIED))
    rows = tuple(
        row
        for row in every_lag
        if not is_own_group(row.group)
        and row.topic != SystemTopic.SCHEDULE
        and scope.has_group(row.group)
        and scope.has_topic(row.topic)
    )
    return StoreReport(
        store=name,
        path=path,
        owner=view.owner,
        now_ms=view.now_ms,
        is_sound=not damage if check else None,
        skipped=bool(view.store.condition.damage) or any(_is_inside(log, place) for place in damage),
        recoverable=len(recoverable),
        instances=_instances(view, {row.group for row in rows}),
        damage=damage,
        findings=(
            *_damage_findings(name, damage, first_lost(view) if damage else None),
            *map(_readable, worst_first(findings)),
        ),
        lag=rows,
        topics=tuple(topics),
        dead_letters=tuple(_causes(view, scope)),
        waiting=tuple(_waiting(view, scope)),
        log_files=tuple(_log_files(view, every_lag)),
    )


def summary_of(path: str, name: str, scope: ReportScope) -> StoreReport:
    """Return what a report says about a folder without a pass over all messages."""
    try:
        with StoreView.open(path) as view:
            topics = _topic_rows(view, scope)
            return _without_messages(view, name, scope, topics, Thresholds(), check=True)
    except CorruptionError as error:
        return _broken_store(path, name, error)


def _is_inside(log: CommitLog, place: Damage) -> bool:
    """Return whether a damaged place is in the log, and not where a recovery ends it."""
    folder, name = os.path.split(place.file)
    return folder == COMMITLOG and (not name.isdigit() or max(int(name), place.offset) < log.end)


def _readable(finding: Finding) -> Finding:
    """Return a finding whose evidence is as it comes back from JSON."""
    return finding._replace(evidence=json.loads(json.dumps(dict(finding.evidence), default=str)))


def _damage_findings(name: str, damage: Sequence[Damage], error: str | None) -> tuple[Finding, ...]:
    if not damage and error is None:
        return ()
    return (_readable(damage_finding(f"store {name}", damage, error=error)),)


def _instances(view: StoreView, groups: Iterable[str]) -> dict[str, int] | None:
    route = view.route
    if route is None:
        return None
    connections = {group: route.connections(group) for group in sorted(groups)}
    return {group: 0 if row is None else len(row.subscriptions_by_client) for group, row in connections.items()}


def _causes(view: StoreView, scope: ReportScope) -> Iterator[DeadLetterCause]:
    causes = (
        sum_up_causes(cause for cause in dead_letters(view) if scope.has_time(cause.store_timestamp_ms))
        if scope.has_times
        else dead_letter_causes(view)
    )
    return (cause for cause in causes if scope.has_group(cause.group) and scope.has_topic(cause.original_topic))


def _waiting(view: StoreView, scope: ReportScope) -> Iterator[WaitingMessages]:
    rows: dict[tuple[str, str, str | None], WaitingMessages] = {}
    due: dict[tuple[str, str, str | None], Any] = {}
    now_ms = view.now_ms or 0
    for pending in pending_messages(view.store, view.tables):
        group = _group_of(view, pending)
        if not scope.has_topic(pending.topic) or (group is not None and not scope.has_group(group)):
            continue
        key: tuple[str, str, str | None] = pending.kind, pending.topic, group
        row = rows.get(key) or WaitingMessages(*key, 0, pending.due_ms, pending.due_ms, 0, ())
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
    if pending.kind in ("retry", "pop"):
        return group_of_retries(pending.target_topic, view.groups, view.topics)
    if pending.kind not in ("half", "given_up"):
        return None
    message = view.store.message_at(pending.physical_offset)
    return None if message is None else message.properties.get(PropertyName.PRODUCER_GROUP)


# ---- several stores

WINDOW_S: Final = 3600.0


def report(
    sources: Source | Sequence[Source],
    *,
    title: str | None = None,
    only: Mapping[str, str | None] | None = None,
    thresholds: Thresholds | None = None,
    window_s: float = WINDOW_S,
    check: bool | None = None,
) -> Report:
    """Return a report about a store, a running broker, or several of them as brokers of one cluster.

    `librmq.console.render_page` renders it as a page, ``to_json`` as JSON. One pass reads the headers and keys of all
    messages. Memory use does not grow with their number: beyond 200,000 messages, figures about keys are estimates and
    say so.

    Args:
        sources: Folders of stores, running brokers, or views.
        title: The heading.
        only: The part to report about: ``topic`` and ``group`` (names separated by commas), ``tags`` (such as
            ``"created || paid"``), ``since`` and ``until`` (store times in milliseconds, ``until`` exclusive).
        thresholds: Limits above which something is a finding.
        window_s: Seconds between messages of one key that count as repeated.
        check: Whether to run ``verify``; by default for stores of up to 300,000 messages.

    Raises:
        NotAStoreError: A folder holds no store.
        ConfigError: There is no source, or one occurs twice.
        FilterSyntaxError: ``tags`` does not compile.
    """
    every_source: list[Source] = (
        list(sources) if isinstance(sources, Sequence) and not isinstance(sources, str) else [sources]
    )
    if not every_source:
        raise ConfigError("report: expected a store, found none")
    scope = ReportScope.from_settings(only or {})
    limits = thresholds or Thresholds()
    names = short_names([_path(source) for source in every_source])
    with ExitStack() as opened:
        views = {_path(source): _open(source, opened) for source in every_source}
        sound_views = [view for view in views.values() if isinstance(view, StoreView)]
        passes = ((view.store.log, 3 if is_verified(view, check, VERIFIED) else 1) for view in sound_views)
        advance(0, sum(count * (log.end - log.begin) for log, count in passes))  # verify takes two
        topics = {view.store.path: _topic_rows(view, scope) for view in sound_views}
        axis = _axis(chain.from_iterable(topics.values()), scope)

        def part(path: str, view: StoreView | CorruptionError) -> StoreReport:
            if isinstance(view, CorruptionError):
                return _broken_store(path, names[path], view)
            try:
                verifies = is_verified(view, check, VERIFIED)
                part = _without_messages(view, names[path], scope, topics[view.store.path], limits, check=verifies)
                part = _with_messages(part, view, scope, axis or TimeAxis(0, 1000, 1), window_s)
                return replace(part, path=path)  # as it was named, where the view has its whole path
            except CorruptionError as error:
                return _broken_store(path, names[path], error)

        parts = [part(path, view) for path, view in views.items()]
    return joined(parts, axis, scope, title=title, window_s=window_s)


def joined(
    parts: Sequence[StoreReport], axis: TimeAxis | None, scope: ReportScope, *, title: str | None, window_s: float
) -> Report:
    """Return the report about several stores."""
    return Report(
        title=title or (f"The store {parts[0].store}" if len(parts) == 1 else f"{len(parts)} stores"),
        only=dict(scope.names),
        window_s=window_s,
        begin_ms=None if axis is None else axis.begin_ms,
        interval_ms=1000 if axis is None else axis.interval_ms,
        stores=tuple(parts),
    )


def short_names(paths: Sequence[str]) -> dict[str, str]:
    """Return the part of each path that distinguishes it, such as ``broker-a`` for ``/data/broker-a/store``."""
    ends = [os.path.abspath(path).rstrip("/").split("/") for path in paths]
    if len(set(map(tuple, ends))) < len(ends):
        raise ConfigError(f"report: expected different stores, found one twice among {', '.join(paths)}")
    while len(ends) > 1 and all(len(end) > 1 for end in ends) and len({end[-1] for end in ends}) == 1:
        ends = [end[:-1] for end in ends]
    parts = 1
    while len({tuple(end[-parts:]) for end in ends}) < len(ends):
        parts += 1
    return {path: "/".join(end[-parts:]) or path for path, end in zip(paths, ends, strict=True)}


def _path(source: Source) -> str:
    if isinstance(source, str | os.PathLike):
        return os.fspath(source)
    return source.path if isinstance(source, Shared) else source.store.path


def _open(source: Source, opened: ExitStack) -> StoreView | CorruptionError:
    """Return a view of a source that ``opened`` closes, or the error of a store that is too damaged to open."""
    try:
        return opened.enter_context(viewed(source))
    except CorruptionError as error:
        return error
