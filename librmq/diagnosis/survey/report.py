"""Reports about stores or brokers: everything about one store, its log files, and several in one report."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import chain
from typing import Any, Final
from zlib import crc32

import numpy as np
import numpy.typing as npt

from librmq.commitlog import CommitLog
from librmq.consumequeue import ENTRY_SIZE, HOLE_SIZE, entry_dtype
from librmq.diagnosis._checks import (
    damage_finding,
    is_verified,
    missing_key_findings,
    not_verified,
    other_findings,
    recoverable_finding,
    registered_filters,
    unverified_damage,
    verified_places,
)
from librmq.diagnosis._findings import Finding, Thresholds, finding_order
from librmq.diagnosis._lag_report import Lag, lag
from librmq.diagnosis.deadletters import dead_letter_causes, dead_letters, sum_up_causes
from librmq.diagnosis.pending import PendingMessage, pending_messages
from librmq.diagnosis.survey.message_sums import (
    KeyCounts,
    ReportScope,
    TimeAxis,
    Traffic,
    count_filter,
    read_messages,
)
from librmq.diagnosis.survey.model import (
    DUE_BOUNDS_MS,
    ROW_NAMES,
    DamagedPlace,
    FilterMatch,
    GroupTopicLag,
    LogFileUse,
    Report,
    ReportedCause,
    ReportedFinding,
    ReportPart,
    StoreSummary,
    WaitingMessages,
)
from librmq.diagnosis.view import Source, StoreView, viewed
from librmq.errors import ConfigError, CorruptionError
from librmq.files import Damage, Files
from librmq.message import record
from librmq.message.properties import PropertyName
from librmq.message.topics import SystemTopic, group_of_retries, is_own_group
from librmq.runtime.event_log import advance
from librmq.store.engine.store_parts import QueueName
from librmq.store.format.directory import COMMITLOG

# ------------------------------------------------------------------------------------------------------------ log files

_NEVER: Final = 1 << 62  # with room for sums
_ENTRIES_AT_ONCE: Final = 1 << 16


def log_file_uses(view: StoreView, name: str, group_lag: Lag) -> Iterator[LogFileUse]:
    """Yield a row per file of the log, oldest first; ``group_lag`` is the lag of all groups."""
    log, size = view.store.log, view.store.log.sequence.file_size
    first = log.begin // size
    count = max(0, -(-log.end // size) - first)
    messages, unread, last = (np.zeros(count, np.int64) for _ in range(3))
    unread_from = _unread_from(group_lag)
    for places, sizes, is_unread in _entries(view, unread_from):
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
        yield LogFileUse(
            name, begin, end - max(begin, log.begin), int(messages[number]), int(unread[number]), time,
            f"{crc32(data):08x}",
        )  # fmt: skip


Block = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.bool_]]
"""Physical offsets and sizes of messages, and whether a group has yet to consume them."""


def _entries(view: StoreView, unread_from: dict[QueueName, int]) -> Iterator[Block]:
    """Yield the entries of all queues, those of many short queues together."""
    raws, firsts, starts, size = list[bytes](), list[int](), list[int](), 0
    for name in view.ranges:
        with suppress(CorruptionError):  # verify reports it
            queue = view.store.queues[name]
            at = queue.min_offset
            while raw := queue.read(at, _ENTRIES_AT_ONCE):
                raws.append(raw)
                firsts.append(at)
                starts.append(unread_from.get(name, _NEVER))
                size += len(raw)
                at += len(raw) // ENTRY_SIZE
                if size >= _ENTRIES_AT_ONCE * ENTRY_SIZE:
                    yield _block(raws, firsts, starts)
                    raws, firsts, starts, size = [], [], [], 0
    yield _block(raws, firsts, starts)


def _block(raws: list[bytes], firsts: list[int], starts: list[int]) -> Block:
    """Return pieces of queues as columns, given the first queue offset of each, and the first unread one there."""
    entries = np.frombuffer(b"".join(raws), entry_dtype())
    counts = np.fromiter(map(len, raws), np.int64, len(raws)) // ENTRY_SIZE
    # The number of an entry among all, less that of the first one of its piece, is its number in the piece.
    unread = np.array(starts, np.int64) - np.array(firsts, np.int64) + np.cumsum(counts) - counts
    is_unread = np.arange(len(entries)) >= np.repeat(unread, counts)
    return entries["physical_offset"].astype(np.int64), entries["size"].astype(np.int64), is_unread


def _unread_from(group_lag: Lag) -> dict[QueueName, int]:
    """Return for each queue the first queue offset that a group has yet to consume."""
    unread: dict[QueueName, int] = {}
    for row in group_lag:
        if row.lag:
            name = row.topic, row.queue_id
            start = row.max_offset - row.lag
            unread[name] = min(start, unread.get(name, start))
    return unread


VERIFIED: Final = 300_000
"""Most messages for which a report runs ``verify`` by default, because it reads every record."""


def find_time_range(view: StoreView, scope: ReportScope) -> tuple[int, int] | None:
    """Return the least and the greatest store time of the wanted messages; None without messages."""
    times = list[int]()
    for name, state in view.ranges.items():
        if scope.has_topic(name[0]):
            with suppress(CorruptionError):  # verify reports it
                of_queue = view.times_of(name, range(state.min_offset, state.max_offset))
                times += (time_ms for time_ms in of_queue if time_ms is not None)
    if not times:
        return None
    last = max(times) if scope.end_ms is None else min(max(times), scope.end_ms - 1)
    return min(max(min(times), scope.begin_ms or 0), last), last


def _verify(path: str, name: str, files: Files | None = None) -> tuple[tuple[DamagedPlace, ...], list[DamagedPlace]]:
    """Return what ``verify`` finds damaged and recoverable, with files relative to the store."""

    def reported(places: Sequence[Damage]) -> Iterator[DamagedPlace]:
        for place in places:
            yield DamagedPlace(name, os.path.relpath(place.file, path), place.offset, place.kind, place.what)

    damage, recoverable = verified_places(path, files)
    return tuple(reported(damage)), list(reported(recoverable))


def broken_store(path: str, name: str, error: CorruptionError) -> ReportPart:
    """Return what is known about a store that cannot be opened."""
    damage, _ = _verify(path, name)
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
    count = view.message_count()
    part = survey_findings(view, name, scope, limits=limits, check=is_verified(view, check, VERIFIED))
    if view.store.read_only:  # the findings' pages of queues and log would add to those of this pass
        for queue_name in view.ranges:
            view.store.queues[queue_name].unmap_all()
        view.store.log.release_read_pages(view.store.log.begin, view.store.log.end)
    traffic = Traffic(axis, KeyCounts(count, window_s))
    unreadable = read_messages(view, name, scope, traffic)
    damage = part.damage if part.damage else tuple(unreadable)
    findings = part.findings
    if damage and not part.damage:
        findings = (*_damage_findings(name, damage, None), *findings)
    topics = tuple(traffic.stored_topics(name))
    summary = part.summary._replace(
        is_sound=False if damage else part.summary.is_sound,
        records=sum(row.messages for row in topics),
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
    damage, recoverable = _verify(path, name, view.store.files) if check else ((), [])
    group_lag = lag(view)
    keys = () if view.is_live else missing_key_findings(view)
    findings = [
        _reported(name, finding)
        for finding in chain(keys, other_findings(view, limits, group_lag))
        if scope.has_subject(finding.subject)
    ]
    unchecked = [_reported(name, recoverable_finding(f"store {name}", recoverable))] if recoverable else []
    if not check:
        missing = [_reported(name, finding)._replace(subject=f"store {name}") for finding in unverified_damage(view)]
        unchecked = [*missing, _reported(name, not_verified(f"store {name}", VERIFIED))]
    return ReportPart(
        summary=StoreSummary(
            name, path, view.owner, view.now_ms, not damage if check else None, None, 0, 0, None, None,
            skipped=bool(view.store.condition.damage) or any(_is_inside(view.store.log, place) for place in damage),
            recoverable=len(recoverable),
        ),
        damage=damage,
        findings=(*_damage_findings(name, damage, None), *findings, *unchecked),
        lags=tuple(_lags(view, name, scope, group_lag)),
        dead_letters=tuple(_causes(view, name, scope)),
        waiting=tuple(_waiting(view, name, scope)),
        log_files=tuple(log_file_uses(view, name, group_lag)),
    )  # fmt: skip


def _is_inside(log: CommitLog, place: DamagedPlace) -> bool:
    """Return whether a damaged place is in the log, and not where a recovery ends it."""
    folder, name = os.path.split(place.file)
    return folder == COMMITLOG and (not name.isdigit() or max(int(name), place.offset) < log.end)


# ---------------------------------------------------------------------------------------------------------- findings


def _reported(name: str, finding: Finding) -> ReportedFinding:
    evidence = json.loads(json.dumps(dict(finding.evidence), default=str))  # as it comes back from JSON
    return ReportedFinding(name, *finding._replace(evidence=evidence))


def _damage_findings(name: str, damage: Sequence[DamagedPlace], error: str | None) -> tuple[ReportedFinding, ...]:
    if not damage and error is None:
        return ()
    return (_reported(name, damage_finding(f"store {name}", damage, error=error)),)


# --------------------------------------------------------------------------------------------------------- the parts


def _lags(view: StoreView, name: str, scope: ReportScope, group_lag: Lag) -> Iterator[GroupTopicLag]:
    instances: dict[str, int | None] = {}
    for columns, topic_lag in zip(group_lag.topics, group_lag.by_topic(), strict=True):
        if (
            is_own_group(topic_lag.group)
            or topic_lag.topic == SystemTopic.SCHEDULE
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
    if pending.kind in ("retry", "pop"):
        return group_of_retries(pending.target_topic, view.groups, view.topics)
    if pending.kind not in ("half", "given_up"):
        return None
    message = view.store.message_at(pending.physical_offset)
    return None if message is None else message.properties.get(PropertyName.PRODUCER_GROUP)


def _filters(view: StoreView, name: str, scope: ReportScope) -> Iterator[FilterMatch]:
    for group, topic, expression in registered_filters(view):
        if scope.has_group(group) and scope.has_topic(topic):
            yield count_filter(view, name, scope, group, topic, expression)


# ----------------------------------------------------------------------------------------- reports about several stores

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

    `render_page` renders it as a page, ``to_json`` as JSON. One pass reads the headers and keys of all messages. Memory
    use does not grow with their number: beyond 200,000 messages, figures about keys are estimates and say so.

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
        ranges = [time_range for view in sound_views if (time_range := find_time_range(view, scope))]
        axis = None
        if ranges:
            axis = TimeAxis.between(min(begin_ms for begin_ms, _ in ranges), max(end_ms for _, end_ms in ranges))

        def part(path: str, view: StoreView | CorruptionError) -> ReportPart:
            if isinstance(view, CorruptionError):
                return broken_store(path, names[path], view)
            try:
                return survey_store(
                    view, names[path], scope, axis or TimeAxis(0, 1000, 1), limits=limits, window_s=window_s,
                    check=check,
                )  # fmt: skip
            except CorruptionError as error:
                return broken_store(path, names[path], error)

        parts = [part(path, view) for path, view in views.items()]
    return join_parts(parts, axis, scope, title=title, window_s=window_s)


def join_parts(
    parts: Sequence[ReportPart], axis: TimeAxis | None, scope: ReportScope, *, title: str | None, window_s: float
) -> Report:
    """Combine the reports about several stores in one."""
    names = ", ".join(part.summary.store for part in parts)
    rows: dict[str, Any] = {
        name: tuple(row for part in parts for row in getattr(part, name)) for name in ROW_NAMES if name != "findings"
    }
    findings = sorted(
        (finding for part in parts for finding in part.findings),
        key=lambda finding: (
            *finding_order(finding.kind, finding.severity, finding.subject, finding.evidence),
            finding.store,
        ),
    )
    return Report(
        title=title or (f"The store {names}" if len(parts) == 1 else f"{len(parts)} stores"),
        only=dict(scope.names),
        window_s=window_s,
        begin_ms=None if axis is None else axis.begin_ms,
        interval_ms=1000 if axis is None else axis.interval_ms,
        stores=tuple(part.summary for part in parts),
        findings=tuple(findings),
        **rows,
    )


def short_names(paths: Sequence[str]) -> dict[str, str]:
    """Return the part of each path that distinguishes it, such as ``broker-a`` for ``/data/broker-a/store``.

    Raises:
        ConfigError: A path occurs twice.
    """
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
    return source.store.path


def _open(source: Source, opened: ExitStack) -> StoreView | CorruptionError:
    """Return a view of a source that ``opened`` closes, or the error of a store that is too damaged to open."""
    try:
        return opened.enter_context(viewed(source))
    except CorruptionError as error:
        return error
