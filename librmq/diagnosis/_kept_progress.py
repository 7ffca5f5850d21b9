"""Where the progress of groups went: its history, steps back, deleted groups, and delays that are overdue.

::

    source of progress        what it is
    file                      consumerOffset.json now; for a running broker its table
    backup                    consumerOffset.json.bak: the save before the last
    moved                     a broker's record in OFFSET_MOVED_EVENT: a pull asked for a place that does not exist, and
                              the group went on elsewhere
    skipped                   a note of `librmq.diagnosis.skip`
    beside                    the file of another folder: a snapshot, an earlier copy

A broker saves progress every 5 seconds, and keeps the save before it as backup. So a value in the file that is below
the backup's was set by hand, by a client that started without its progress, or by a start with an empty table.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Final, Literal, NamedTuple

import numpy as np

from librmq.consumequeue_entries import HOLE_SIZE
from librmq.diagnosis._findings import Finding, Thresholds, cut_evidence
from librmq.diagnosis.view import Source, StoreView, viewed
from librmq.errors import CorruptionError, MalformedError
from librmq.formatting import NAMED, duration, id_ranges, moment
from librmq.java import json as java_json
from librmq.message import retry_topic
from librmq.message.delays import level_of_queue_id, queue_id_of_level
from librmq.message.topics import SystemTopic, is_own_group
from librmq.runtime.event_log import counted
from librmq.store import BrokerTables
from librmq.store.engine.store_parts import QueueState
from librmq.store.format import directory
from librmq.store.format.broker_tables import progress_of
from librmq.store.format.timerfiles import TimerCheckpoint, TimerLog, TimerWheel

ProgressSource = Literal["file", "backup", "moved", "skipped", "beside"]
_OVERDUE_S: Final = 60.0
_POSITION: Final = 1 << 62


class KeptProgress(NamedTuple):
    """The progress of a group in a queue, as one source has it."""

    source: ProgressSource
    """Where it comes from, as the module says."""
    at_ms: int | None
    """When it was so; None if the source does not say."""
    group: str
    """The consumer group."""
    topic: str
    """The topic."""
    queue_id: int
    """Number of the queue."""
    queue_offset: int
    """The queue offset of the next message."""
    before: int | None
    """The offset before it, of a move or a skip; None for other sources."""
    note: str
    """The file, or the policy of a skip."""


def progress_history(source: Source, *, beside: tuple[str, ...] = ()) -> list[KeptProgress]:
    """Return what is known about the progress of groups over time, by group, topic and queue.

    Args:
        source: A running broker, the folder of a store, or a view of either.
        beside: Folders of other stores, such as snapshots, whose progress is to be compared.

    Raises:
        NotAStoreError: A folder holds no store.
        CorruptionError: A file is damaged.
    """
    from librmq.diagnosis._skips import skipped  # loads asyncio

    order = {name: place for place, name in enumerate(("beside", "skipped", "moved", "backup", "file"))}
    with viewed(source) as view:
        rows = [*_moves(view)]
        tables = view.tables
        for skip in skipped(view):
            rows += [
                KeptProgress(
                    source="skipped", at_ms=skip.at_ms, group=skip.group, topic=skip.topic, queue_id=queue.queue_id,
                    queue_offset=queue.end, before=queue.begin, note=skip.policy,
                )
                for queue in skip.queues
            ]  # fmt: skip
        name, backup = os.path.basename(tables.offsets.path), progress_of(tables.offsets.backup_rows())
        rows += _rows("backup", backup, None, f"{name}.bak")
        rows += _rows("file", view.progress, tables.offsets.saved_ms or None, name)
        for folder in beside:
            directory.check_kind(folder, view.store.files)
            other = BrokerTables.open(os.path.join(folder, directory.CONFIG), files=view.store.files).offsets
            rows += _rows("beside", progress_of(other.rows), other.saved_ms or None, folder)
    return sorted(rows, key=lambda row: (row.group, row.topic, row.queue_id, row.at_ms or 0, order[row.source]))


def _rows(
    source: ProgressSource, progress: Mapping[tuple[str, str], dict[int, int]], at_ms: int | None, note: str
) -> Iterator[KeptProgress]:
    for (group, topic), offsets in progress.items():
        for queue_id, queue_offset in offsets.items():
            yield KeptProgress(
                source=source, at_ms=at_ms, group=group, topic=topic, queue_id=queue_id, queue_offset=queue_offset,
                before=None, note=note,
            )  # fmt: skip


def _moves(view: StoreView) -> Iterator[KeptProgress]:
    """Yield the records of brokers about places that did not exist."""
    for queue_id in view.topics.get(SystemTopic.OFFSET_MOVED, ()):
        for message in view.store.messages(SystemTopic.OFFSET_MOVED, queue_id):
            try:
                event = java_json.loads(message.body or b"")
                queue = event["messageQueue"]
                row = KeptProgress(
                    source="moved", at_ms=message.store_timestamp_ms, group=str(event["consumerGroup"]),
                    topic=str(queue["topic"]), queue_id=int(queue["queueId"]), queue_offset=int(event["offsetNew"]),
                    before=int(event["offsetRequest"]), note=SystemTopic.OFFSET_MOVED,
                )  # fmt: skip
            except (MalformedError, KeyError, TypeError, ValueError):
                continue  # no record of a broker
            yield row


# ---- findings


def kept_progress_findings(view: StoreView, limits: Thresholds) -> Iterator[Finding]:
    """Yield the findings about steps back, deleted groups, progress beyond an end, and what is overdue."""
    if not view.is_live:
        yield from _step_findings(view, limits)
        yield from _unlisted_group_findings(view, limits)
    yield from beyond_end_findings(view)
    yield from _overdue_levels(view)
    yield from _timer_findings(view)


def _step_findings(view: StoreView, limits: Thresholds) -> Iterator[Finding]:
    """Yield the topics in which the stored progress of a group is behind its backup."""
    offsets = view.tables.offsets
    if offsets.replaced is not None or view.store.past_ms is not None:
        return
    backup = progress_of(offsets.backup_rows())
    for (group, topic), before in sorted(backup.items()):
        if is_own_group(group) and not limits.own:
            continue
        now = view.progress.get((group, topic), {})
        steps = {
            queue_id: (queue_offset, now.get(queue_id))
            for queue_id, queue_offset in before.items()
            if (topic, queue_id) in view.ranges and queue_offset > now.get(queue_id, 0)
        }
        if not steps:
            continue
        again = sum(
            max(0, old - max(new or 0, view.ranges[topic, queue_id].min_offset))
            for queue_id, (old, new) in steps.items()
        )
        lost = [queue_id for queue_id, (_, new) in steps.items() if new is None]
        how = "lacks it" if len(lost) == len(steps) else "is behind it"
        yield Finding(
            "progress-stepped-back", limits._severity_of(topic), f"group {group}, topic {topic}",
            f"The backup of the progress has {counted(len(steps), 'queue')} further on, and the file {how}: "
            f"{counted(again, 'message')} would come again.",
            {"messages": again, "queues": len(steps), "queue_ids": id_ranges(steps), "lost": len(lost)},
            "Unless an operator reset it on purpose, set the group to the offsets of "
            f"{os.path.basename(offsets.path)}.bak, which librmq progress STORE prints: "
            "librmq reset STORE --to OFFSET --queue ID.",
        )  # fmt: skip


def _unlisted_group_findings(view: StoreView, limits: Thresholds) -> Iterator[Finding]:
    """Yield the groups that have progress or retries, and are missing in the broker's table of groups."""
    table = view.tables.groups
    # A broker with configManagerVersion=v2 does not store the groups that it makes by itself.
    if not table.is_stored or view.store.past_ms is not None or view.tables.database is not None:
        return
    topics: defaultdict[str, list[str]] = defaultdict(list)
    for group, topic in view.progress:
        topics[group].append(topic)
    for group in view.groups:
        if group in table.rows or (is_own_group(group) and not limits.own):
            continue
        retries = view.message_count(retry_topic(group))
        missing = sorted(topic for topic in topics[group] if topic not in view.topics
                         and topic not in view.tables.topics.rows)  # fmt: skip
        yield Finding(
            "unlisted-group", "info", f"group {group}",
            "subscriptionGroup.json does not have the group, which was deleted or never made there: left are progress "
            f"in {counted(len(topics[group]), 'topic')} and {counted(retries, 'message')} of retries.",
            {"topics": sorted(topics[group])[:NAMED], "retries": retries, "deleted_topics": missing[:NAMED],
             **cut_evidence(max(len(topics[group]), len(missing)) > NAMED)},
            f"To remove what is left: librmq group delete STORE {group}; to keep it: librmq group create STORE "
            f"{group}.",
        )  # fmt: skip


def beyond_end_findings(view: StoreView) -> Iterator[Finding]:
    """Yield the delay levels, and the timer, whose progress is beyond the end of their queue."""
    # If the log is cut short, its damage is the finding.
    if view.store.past_ms is not None or view.store.condition.lost:
        return
    for level, queue_offset in sorted(view.tables.delays.rows.items()) if view.unknown_delays is None else ():
        state = view.ranges.get((SystemTopic.SCHEDULE, queue_id_of_level(level)))
        yield from _beyond_end(f"delay level {level}", directory.CONFIG + "/delayOffset.json", queue_offset, state)
    with suppress(CorruptionError):  # `can-start` and `timers` name it
        checkpoint = TimerCheckpoint.read(view.store.path, view.store.files)
        if checkpoint is not None and view.owner is None:
            state = view.ranges.get((SystemTopic.TIMER, 0))
            yield from _beyond_end("timer", directory.CONFIG + "/timercheck", checkpoint.queue_offset, state)


def _beyond_end(subject: str, file: str, queue_offset: int, state: QueueState | None) -> Iterator[Finding]:
    end = 0 if state is None else state.max_offset
    if queue_offset > end:
        yield Finding(
            "progress-beyond-end", "error", subject,
            f"The progress {queue_offset} in {file} is beyond the end {end} of the queue: "
            f"{counted(queue_offset - end, 'message')} that wait may be lost, or not delivered.",
            {"consumer_offset": queue_offset, "max_offset": end, "messages": queue_offset - end},
            "Find out first whether the log lost its end: librmq verify STORE. A broker and Broker.open set the "
            "progress to the end when they start.",
        )  # fmt: skip


def _overdue_levels(view: StoreView) -> Iterator[Finding]:
    """Yield the delay levels whose messages were due long before the store's last message."""
    if view.unknown_delays is not None or view.store.past_ms is not None or (now_ms := view.now_ms) is None:
        return
    for queue_id in view.topics.get(SystemTopic.SCHEDULE, ()):
        level = level_of_queue_id(queue_id)
        begin, overdue, first_ms = view.tables.delay_offset(level), 0, None
        for first, block in view.store.queues[SystemTopic.SCHEDULE, queue_id].blocks():
            if first + len(block) <= begin:
                continue
            block = block[max(0, begin - first) :]
            due = block["tags_code"][(block["size"] != HOLE_SIZE) & (block["tags_code"] > 1 << 31)]
            overdue_times = due[due < now_ms - _OVERDUE_S * 1000]
            overdue += len(overdue_times)
            if len(overdue_times):
                first_ms = int(overdue_times.min()) if first_ms is None else min(first_ms, int(overdue_times.min()))
        if first_ms is not None:
            yield Finding(
                "overdue", "warning", f"delay level {level}",
                f"{counted(overdue, 'message')} not delivered, the first {duration((now_ms - first_ms) / 1000)} "
                f"after its time, {moment(first_ms)} UTC.",
                {"level": level, "messages": overdue, "due_timestamp_ms": first_ms,
             "late_s": (now_ms - first_ms) / 1000},
                "See whether the broker runs as a master, since slaves deliver nothing, and whether delayOffset.json "
                "names an offset of this store.",
            )  # fmt: skip


def _timer_findings(view: StoreView) -> Iterator[Finding]:
    """Yield what is wrong with the timer: late messages, entries past the log's end, a wheel that does not fit."""
    store = view.store
    size = TimerLog.file_size_in(store.path, store.files)
    if store.past_ms is not None or SystemTopic.TIMER not in view.topics or not size:
        return
    log = TimerLog(store.path, size, files=store.files, writable=False)
    checkpoint = TimerCheckpoint.read(store.path, store.files) or TimerCheckpoint()
    read_ms, now_ms = checkpoint.read_time_ms, view.now_ms
    late = beyond = 0
    first_ms = first_beyond = None
    end, last_waiting = 0, -1
    for position, block in log.blocks(_POSITION):
        times = block["write_time_ms"].astype(np.int64) + block["delay_ms"]
        waits = times >= read_ms
        places = block["physical_offset"].astype(np.int64) + block["message_size"]
        out = np.flatnonzero(places > store.log.end)
        beyond += len(out)
        if len(out) and first_beyond is None:
            first_beyond = position + int(out[0]) * TimerLog.UNIT_SIZE
        if now_ms is not None:
            overdue = times[waits & (times < now_ms - _OVERDUE_S * 1000) & (block["magic"] == 1)]
            late += len(overdue)
            if len(overdue):
                first_ms = int(overdue.min()) if first_ms is None else min(first_ms, int(overdue.min()))
        if waits.any():
            last_waiting = position + int(np.flatnonzero(waits)[-1]) * TimerLog.UNIT_SIZE
        end = position + len(block) * TimerLog.UNIT_SIZE
    if late and first_ms is not None and now_ms is not None:
        yield Finding(
            "overdue", "warning", "timer",
            f"{counted(late, 'timer')} not delivered, the first {duration((now_ms - first_ms) / 1000)} after its time, "
            f"{moment(first_ms)} UTC.",
            {"level": None, "messages": late, "due_timestamp_ms": first_ms, "late_s": (now_ms - first_ms) / 1000},
            "See whether the broker runs with timerWheelEnable=true, and as a master: slaves deliver nothing.",
        )  # fmt: skip
    if beyond:
        yield Finding(
            "timers-beyond-log", "error", "timer",
            f"{counted(beyond, 'unit')} of the timer log, the first at {first_beyond}, name messages beyond the log's "
            f"end at {store.log.end}: a broker of 5.x reads them again and again, and delivers no later timer.",
            {"units": beyond, "position": first_beyond, "log_end": store.log.end},
            "Copy the folder; then, with the broker stopped, delete timerwheel, timerlog/ and config/timercheck: the "
            "broker fills them again from the topic of timers, and delivers again what it had delivered of that.",
        )  # fmt: skip
    yield from _wheel_findings(view, log, end, last_waiting, max(0, checkpoint.log_position - size))


def _wheel_findings(view: StoreView, log: TimerLog, end: int, last_waiting: int, read_again: int) -> Iterator[Finding]:
    """Yield a finding if slots of the wheel lead nowhere, or if the wheel lacks units that wait.

    ``last_waiting`` is the position of the last unit that is still to be delivered, -1 without one. From ``read_again``
    on a broker that loads ``timerwheel`` reads the timer log again at its start.
    """
    store = view.store
    wheels = TimerWheel.files_in(store.path, store.files)
    for wheel in wheels:
        if wheel.damage is not None:
            yield Finding(
                "stale-wheel", "warning", wheel.name,
                f"{wheel.name} is no wheel: {wheel.damage.what}. A broker that reads it does not start.",
                {"slots": 0, "timer_log_end": end, "newest": wheels[0].name,
                 "snapshots": TimerWheel.snapshots_in(store.path, store.files)[-NAMED:], "bytes_behind": 0},
                "Run librmq can-start STORE, which names what to delete.",
            )  # fmt: skip
    wheels = [wheel for wheel in wheels if wheel.damage is None]
    if not wheels:
        return
    newest = wheels[0]
    try:
        slots = [slot for _, slot in TimerWheel.read_slots(store.path, store.files) if slot.messages > 0]
    except CorruptionError:
        slots = []  # reported above
    wrong = [slot for slot in slots if slot.last >= end or (slot.last >= log.begin and log.unit(slot.last) is None)]
    itself = next((wheel for wheel in wheels if wheel.position is None), None)
    behind = max(0, last_waiting - newest.last) if view.owner is None else 0  # a running broker flushes it now and then
    again = read_again if newest.position is None else newest.position
    lacks = behind > 0 and newest.last + TimerLog.UNIT_SIZE < again
    older = itself is not None and itself.last < newest.last
    by_librmq = "With the broker stopped, librmq serve makes timerwheel from the whole timer log."
    next_step = "Nothing, if the broker starts; librmq pending STORE --kind timer lists what waits, by the timer log."
    if wrong:
        what = (
            f"{counted(len(wrong), 'slot')} of {newest.name} lead to places that the timer log does not have, up to "
            f"{max(slot.last for slot in wrong)} of {end}: a broker revises the wheel from the timer log at its start."
        )
    elif behind:
        what = f"{newest.name} ends {behind} bytes before the last timer that waits, and a broker reads the timer log "
        if lacks:
            what += f"at its start only from {again} on: it does not deliver the timers between."
            next_step = f"Copy the folder. {by_librmq}"
        else:
            what += "again at its start."
    elif older:
        what = (
            f"timerwheel is older than its snapshot {newest.name}: a broker that reads no snapshots (up to 5.3.3, or "
            "with timerWheelSnapshotFlush=false) starts with the older one, and can miss timers."
        )
        next_step = f"Keep timerWheelSnapshotFlush=true. {by_librmq}"
    else:
        return
    yield Finding(
        "stale-wheel", "warning" if wrong or lacks else "info", "timer", what,
        {"slots": len(wrong), "timer_log_end": end, "newest": newest.name,
         "snapshots": TimerWheel.snapshots_in(store.path, store.files)[-NAMED:], "bytes_behind": behind},
        next_step,
    )  # fmt: skip
