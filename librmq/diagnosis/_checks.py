"""Checks of a store or a broker: all findings, damage, those from its newest messages, and those about its design.

Of each topic a sample of the newest messages is read: a finding says how many it looked at, and a rare case can stay
unseen. The design is what topics, keys and groups will make a problem later; queue entries have exact sizes.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from librmq.config import nearest
from librmq.consumequeue_entries import ENTRY_SIZE, HOLE_SIZE
from librmq.diagnosis._findings import Finding, Thresholds, cut_evidence, sample_evidence, worst_first
from librmq.diagnosis._instances import consistency_findings, stuck_findings
from librmq.diagnosis._kept_progress import kept_progress_findings
from librmq.diagnosis._lag_report import Lag, lag, lag_findings
from librmq.diagnosis._pop import pop_findings
from librmq.diagnosis.deadletters import ASKED, dead_letter_findings, given_up
from librmq.diagnosis.pending import half_findings, kind_of, never_read_topics
from librmq.diagnosis.view import ClusterView, LiveSource, LiveView, Source, StoreView, viewed, viewed_live
from librmq.errors import CorruptionError
from librmq.files import file_size
from librmq.files.rolling import file_name
from librmq.filter import Registration
from librmq.formatting import NAMED, duration
from librmq.message import StoredMessage, record
from librmq.message.topics import SystemTopic, TopicPrefix, group_of_retries, is_own_group, is_user_topic
from librmq.runtime.event_log import counted
from librmq.store import Wholeness
from librmq.store.engine.store_parts import QueueName
from librmq.store.format import directory
from librmq.store.format.broker_tables import progress_export, unlisted_topics
from librmq.store.format.directory import has_abort
from librmq.store.recovery.missing_files import missing_first_files, missing_keys

if TYPE_CHECKING:
    from librmq.files import Damage, Files


# ---- damage: what verify finds, or without it the queues whose files are missing

AT_ONCE: Final = 30_000
"""The most messages that `diagnose` verifies without being asked."""
_SALVAGE: Final = "librmq salvage STORE --into NEW saves every record that can be read, and leaves STORE as it is."
_NEXT: Final = (
    f"{_SALVAGE} To repair STORE itself, copy the folder first (cp -a), then see what librmq recover STORE --dry-run "
    "would cut."
)


def is_verified(view: StoreView, check: bool | None, limit: int) -> bool:
    """Return whether to verify each record: as ``check`` says, or where None, of up to ``limit`` messages."""
    return view.message_count() <= limit if check is None else check


def _damage_findings(view: StoreView, check: bool | None) -> Iterator[Finding]:
    """Yield a finding if the folder of a store is damaged, and one if only a comparison could show that.

    A running broker's own store is not checked. ``check`` is that of `diagnose`.
    """
    if view.is_live:
        return
    path = view.store.path
    if not is_verified(view, check, AT_ONCE):
        yield from unverified_damage(view)
        yield not_verified(f"store {path}", AT_ONCE)
        return
    places, recoverable = verified_places(path, view.store.files)
    if places:
        finding = damage_finding(f"store {path}", places, path, first_lost(view))
        yield finding if view.store.queues.has_files else finding._replace(next_step=_SALVAGE)
    if recoverable:
        yield recoverable_finding(f"store {path}", recoverable, path)


def first_lost(view: StoreView) -> str | None:
    """Return what the log lacks first behind its beginning, as commands say it; None if it lacks nothing there."""
    condition = view.store.condition
    lost = next((damage for damage in condition.lost if damage is not condition.begin), None)
    return None if lost is None else directory.told(lost).rpartition(": ")[0]


def verified_places(path: str, files: Files | None) -> tuple[list[Damage], list[Damage]]:
    """Return what `verify` finds damaged and recoverable, without the missing beginning of the log.

    That is a finding of its own.
    """
    from librmq.store import verify

    verdict = verify(path, files=files)
    damage = [place for place in verdict.damage if place.kind != directory.MISSING_LOG]
    return damage, list(verdict.recoverable)


def recoverable_finding(subject: str, places: Sequence[Damage], path: str = "") -> Finding:
    """Return the finding about places as a kill left them; ``path`` is that of `damage_finding`."""
    file = os.path.relpath(places[0].file, path) if path else places[0].file
    first = f"{file} at {places[0].offset}: {places[0].what}"
    return Finding(
        "recoverable", "info", subject,
        f"The store is recoverable: {counted(len(places), 'place')} as a kill, or a copy of a running store, leaves "
        f"{'it' if len(places) == 1 else 'them'}; the first: {first}.",
        {"places": len(places), "kinds": sorted({place.kind for place in places}), "first": first},
        "Nothing: the next opening repairs the store without a loss. librmq recover STORE --dry-run shows how.",
    )  # fmt: skip


def not_verified(subject: str, limit: int) -> Finding:
    """Return the finding that a check of at most ``limit`` messages has not compared queues and index with the log."""
    return Finding(
        "not-verified", "info", subject,
        "verify did not run: queues and index were not compared with each record, which takes long from "
        f"{limit:,} messages on.",
        {"limit": limit}, "Run librmq verify STORE, or this command with --verify.",
    )  # fmt: skip


def _progress_findings(view: StoreView) -> Iterator[Finding]:
    """Yield a finding if the progress of groups is unknown, so that no lag is known."""
    tables, why = view.tables, view.unknown_progress
    if why is None and not view.is_live and SystemTopic.SCHEDULE in view.topics:
        why = tables.unknown_delays()
    if why is not None and tables.database is None:
        yield Finding(
            "unknown-progress", "warning", f"store {view.store.path}",
            f"{why[0].upper()}{why.partition(':')[0][1:]}, because its file in config/ is missing or empty: no lag, "
            "no backlog and nothing that waits is judged by it.",
            {"folder": directory.CONFIG}, f"{why.rpartition(': ')[2][0].upper()}{why.rpartition(': ')[2][1:]}.",
        )  # fmt: skip
    elif why is not None:
        folder = os.path.relpath(tables.database or "", view.store.path)
        yield Finding(
            "unknown-progress", "info", f"store {view.store.path}",
            f"The broker keeps the progress of groups in RocksDB ({folder}), which was not read: {tables.unread}.",
            {"folder": folder}, "Install the extra rocksdb, or write an export beside it: "
            f"{progress_export('STORE/config')}.",
        )  # fmt: skip
    if keys := tables.offsets.unnamed():
        name = os.path.basename(tables.offsets.path)
        yield Finding(
            "unknown-progress", "info", f"store {view.store.path}",
            f"{name} has {len(keys):,} keys that are no topic@group, such as {keys[0]!r:.80}, which count for no "
            "group, as at a broker.",
            {"keys": keys[:10]}, f"Nothing, or take {name} from a backup if a group begins at a wrong place.",
        )  # fmt: skip


def _missing_log_findings(view: StoreView) -> Iterator[Finding]:
    """Yield a finding if the log lacks its first files, or may lack them, though retention did not delete them."""
    store = view.store
    log, path, files = store.log, store.path, store.files
    if view.is_live or view.owner is not None or not log.begin or not store.queues.has_files:
        return
    missing, note = missing_first_files(path, log, files, store.config, was_closed=not has_abort(files, path))
    if missing is None and not note:
        return
    what = note if missing is None else f"{missing.what}: its first files are missing"
    yield Finding(
        "missing-log-files", "warning" if missing is None else "error", f"store {path}",
        f"{what[0].upper()}{what[1:]}.",
        {"log_begin": log.begin, "log_began": missing.offset if missing is not None and missing.bytes else None},
        "Copy the missing files of commitlog/ from the store that this is a copy of. Without them their messages "
        "are lost; the findings expired-unread count those that a group had not consumed.",
    )  # fmt: skip


def _has_queue_file(view: StoreView, name: QueueName, queue_offset: int) -> bool:
    store, size = view.store, view.store.config.consumequeue_file_size
    start = queue_offset * ENTRY_SIZE // size * size
    path = os.path.join(directory.queue_folder(store.path, *name), file_name(start))
    return file_size(store.files, path) is not None


def _unlisted_topic_findings(view: StoreView) -> Iterator[Finding]:
    """Yield a finding for each topic that has messages and is not in the broker's table, if there is one."""
    tables, ranges = view.tables, view.ranges
    if tables.topics.is_new:
        return

    def range_of(topic: str, queue_id: int) -> tuple[int, int]:
        state = ranges[topic, queue_id]
        return state.min_offset, state.max_offset

    for topic, queues in unlisted_topics(ranges, range_of, tables.topics.rows).items():
        # A broker with configManagerVersion=v2 does not store the topics that it makes by itself.
        if tables.database is not None and topic.startswith((TopicPrefix.RETRY, TopicPrefix.DEAD_LETTER)):
            continue
        count = view.message_count(topic)
        yield Finding(
            "unlisted-topic", "warning", f"topic {topic}",
            f"{counted(count, 'message')} of the topic can't be consumed, because topics.json does not have it.",
            {"messages": count, "queues": queues},
            f"If it was deleted on purpose, clean_unused_topics deletes its queues; else make it again: "
            f"Broker.create_topic({topic!r}, {queues}).",
        )  # fmt: skip


def unverified_damage(view: StoreView) -> Iterator[Finding]:
    """Yield the findings about damage that shows without a comparison of queues and index with each record."""
    condition = view.store.condition
    repaired, index = view.store.recovered, os.path.join(view.store.path, directory.INDEX)
    # Index files that no checkpoint covers are made again to be sure, even if nothing is wrong with them.
    if any(item.kind == "ahead" and os.path.dirname(item.file) == index for item in repaired):
        repaired = [item for item in repaired if index not in (item.file, os.path.dirname(item.file))]
    if condition.kind is Wholeness.RECOVERABLE and view.store.past_ms is None and repaired:
        yield recoverable_finding(f"store {view.store.path}", repaired, view.store.path)
    cut = view.store.cut_short or view.store.check_covered()
    has_files = view.store.queues.has_files
    missing = list(_missing_queue_findings(view)) if has_files else []
    yield from missing
    yield from missing_key_findings(view)
    if cut is not None:
        path = view.store.path
        where = f"{os.path.relpath(cut.file, path)} at {cut.offset}: {cut.what}"
        cuts = f", and cut the {cut.bytes} bytes from there on" if cut.bytes else ""
        yield Finding(
            "damage", "error", f"store {path}", f"A recovery would end the log at {cut.offset}{cuts}: {where}.",
            {"places": 1, "kinds": [cut.kind], "log_end": cut.offset, "bytes": cut.bytes, "error": where},
            _NEXT if has_files else _SALVAGE,
        )  # fmt: skip
    for gap in condition.gaps:
        what, _, remedy = directory.told(gap).rpartition(": ")
        yield Finding(
            "damage", "error", f"store {view.store.path}", f"The log is not whole: {what}.",
            {"places": 1, "kinds": [gap.kind], "offset": gap.offset, "bytes": gap.bytes},
            f"{remedy[0].upper()}{remedy[1:]}.",
        )  # fmt: skip
    queues = os.path.join(view.store.path, directory.CONSUMEQUEUE, "")
    for damage in condition.derived:
        is_missing_queue = damage.kind == "missing" and damage.file.startswith(queues)
        if damage.kind not in ("entry", "record") and not (missing and is_missing_queue):  # those are found above
            file = os.path.relpath(damage.file, view.store.path)
            remedy = directory.derived_remedy(damage.file, view.store.files, damage.kind)
            yield Finding(
                "damage", "error", f"store {view.store.path}", f"{file} is damaged: {damage.what}.",
                {"places": 1, "kinds": [damage.kind], "file": file, "offset": damage.offset},
                f"{remedy[0].upper()}{remedy[1:]}.",
            )  # fmt: skip


def missing_key_findings(view: StoreView) -> Iterator[Finding]:
    """Yield a finding if a part of the log has keys that the index lacks, as a broker's own recovery can leave it."""
    store = view.store
    gap = missing_keys(store.index.files, store.log, store.levels) if store.queues.has_files else None
    folder = os.path.join(store.path, directory.INDEX)
    # The view of a closed store has completed the index in memory. A broker does not, as it starts.
    repairs = [] if has_abort(store.files, store.path) else store.recovered
    lacking = next((item for item in repairs if item.kind == "missing" and os.path.dirname(item.file) == folder), None)
    if gap is None and lacking is not None:
        yield Finding(
            "missing-keys", "warning", f"store {store.path}",
            f"{os.path.relpath(lacking.file, store.path)} {lacking.what}: a broker finds no message by them.",
            {"begin": None, "end": store.log.end},
            "The log has the messages: librmq recover STORE makes the index again.",
        )  # fmt: skip
    if gap is not None:
        begin, end = gap
        yield Finding(
            "missing-keys", "warning", f"store {store.path}",
            f"The index lacks the keys of messages from {begin} to {end} in the log: queries by key do not find them.",
            {"begin": begin, "end": end}, "The log has the messages: librmq recover STORE makes the index again.",
        )  # fmt: skip


def _missing_queue_findings(view: StoreView) -> Iterator[Finding]:
    """Yield a finding if the last file of a queue is missing; this takes a look at each folder, not at records.

    Only a clean exit says which queues there are: the queues of other stores are partly in memory.
    """
    if view.owner is not None or has_abort(view.store.files, view.store.path):
        return
    missing = [
        f"{name[0]}:{name[1]}"
        for name, state in view.ranges.items()
        if state.max_offset > state.min_offset and not _has_queue_file(view, name, state.max_offset - 1)
    ]
    if missing:
        others = " and others" * (len(missing) > 3)
        yield Finding(
            "damage", "error", f"store {view.store.path}",
            f"Files of {counted(len(missing), 'queue')} are missing: {', '.join(missing[:3])}{others}.",
            {"places": len(missing), "kinds": ["missing"], "queues": missing[:NAMED],
             **cut_evidence(len(missing) > NAMED), "error": None},
            "The log still has the messages: librmq recover STORE makes the queues again."
            if view.store.log.sequence.starts else
            "The log has no file to make them again from: copy commitlog/ from the store that this is a copy of.",
        )  # fmt: skip


def damage_finding(subject: str, damage: Sequence[Damage], path: str = "", error: str | None = None) -> Finding:
    """Return the finding about damaged places, or about the error that the opening of a store raised.

    ``path`` is the folder that the places' files are in, if they are not relative to it.
    """
    what = f"verify finds {counted(len(damage), 'damaged place')}" if damage else "The store cannot be read"
    if damage:
        file = os.path.relpath(damage[0].file, path) if path else damage[0].file
        error = error or f"{file} at {damage[0].offset}: {damage[0].what}"
    is_of_tables = bool(damage) and all(place.kind == "config" for place in damage)
    return Finding(
        "damage", "error", subject, f"{what}; the first: {error}." if damage else f"{what}: {error}.",
        {"places": len(damage), "kinds": sorted({place.kind for place in damage}), "error": error},
        "Run librmq verify STORE, which says what to do about each file." if is_of_tables else _NEXT,
    )  # fmt: skip


# ---- newest messages

_FEWEST: Final = 10
"""Fewest messages that say something about a filter."""


def newest(view: StoreView, topic: str, limit: int) -> Iterator[StoredMessage]:
    """Yield about ``limit`` of the newest messages of a topic, as many from each queue."""
    queues = view.queues(topic)
    for queue, offsets in queues.items():
        with suppress(CorruptionError):
            yield from view.messages(queue, offsets[-max(1, limit // len(queues)) :])


def registered_filters(view: StoreView) -> Iterator[tuple[str, str, str]]:
    """Yield group, topic and expression of each registered SQL filter that compiles."""
    if view.broker is not None:
        registrations: Iterable[Registration] = view.broker.store.filters or ()
    else:
        registrations = view.tables.registrations(0) if view.tables.filters else ()
    for registration in registrations:
        if registration.filter is not None:
            yield registration.group, registration.topic, registration.expression


def _filter_findings(view: StoreView, limits: Thresholds) -> Iterator[Finding]:
    """Yield the registered filters that match none of their topic's newest messages."""
    for group, topic, expression in registered_filters(view):
        from librmq.filter.filters import compiled  # loads a grammar

        selector = compiled(expression)
        messages = list(newest(view, topic, limits.sampled))
        if len(messages) < _FEWEST or any(selector.matches(message.properties) for message in messages):
            continue
        names = {name for message in messages for name in message.properties}
        near = {name: nearest(name, names) for name in selector.selector.properties() if name not in names}
        missing = [f"{name}" + f" (did you mean {other}?)" * (other is not None) for name, other in near.items()]
        yield Finding(
            "filter-matches-nothing", limits._severity_of(topic), f"group {group}, topic {topic}",
            f"The registered filter {expression} matches none of the newest {counted(len(messages), 'message')}"
            + (f"; none has the property {', '.join(missing)}." if missing else "."),
            {"expression": expression, "missing_properties": near,
             **sample_evidence(len(messages), view.message_count(topic))},
            "Compare the expression with the messages: librmq show STORE --topic "
            f"{topic} --limit 1, and librmq filter explains it.",
        )  # fmt: skip


_TOPICS_NAMED: Final = 3
"""Topics that the subject of a finding about several names."""


def _clock_findings(view: StoreView, limits: Thresholds) -> Iterator[Finding]:
    """Yield one finding for all messages whose producers' clocks were far from the broker's."""
    topics = [topic for topic in view.topics if is_user_topic(topic)]
    looked_at, most_s = 0, 0.0
    hosts: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for topic in topics:
        for message in newest(view, topic, max(_FEWEST, limits.sampled // len(topics))):
            looked_at += 1
            seconds = (message.store_timestamp_ms - message.born_timestamp_ms) / 1000
            if abs(seconds) > limits.clock_s and kind_of(message) == "plain":
                most_s = max(most_s, seconds, key=abs)
                hosts[message.born_host[0]] += 1
                counts[topic] += 1
    if counts:
        severities = {limits._severity_of(topic) for topic in counts}
        named = [topic for topic, _ in counts.most_common(_TOPICS_NAMED)]
        more = f" and {len(counts) - len(named)} more" * (len(counts) > len(named))
        # One for the store, because a wrong clock, or an import, concerns every topic that a producer sends to.
        yield Finding(
            "born-far-from-stored", "error" if "error" in severities else "warning",
            f"topic{'s' * (len(counts) > 1)} {', '.join(named)}{more}",
            f"{counted(counts.total(), 'message')} of the newest {looked_at:,}: more than {duration(limits.clock_s)} "
            f"from birth to storing, up to {duration(abs(most_s))}{', born in the future' * (most_s < 0)}, most "
            f"often on host {hosts.most_common(1)[0][0]}.",
            {"messages": counts.total(), **sample_evidence(looked_at, sum(map(view.message_count, topics))),
             "most_s": most_s, "topics": dict(counts.most_common(NAMED)), "hosts": dict(hosts.most_common(NAMED)),
             **cut_evidence(max(len(counts), len(hosts)) > NAMED)},
            "Check the clock of that host, unless these messages were imported, replayed, or sent with a time of "
            "their own.",
        )  # fmt: skip


def _retry_findings(view: StoreView, limits: Thresholds) -> Iterator[Finding]:
    """Yield the topics in which a group has retries, but no progress."""
    if view.unknown_progress is not None:
        return
    groups = set(view.groups)
    for retry_topic in [topic for topic in view.topics if topic.startswith(TopicPrefix.RETRY)]:
        group = group_of_retries(retry_topic, groups, view.topics)
        if is_own_group(group) and not limits.own:
            continue
        waiting = view.message_count(retry_topic)
        if waiting and not _has_progress(view, group, retry_topic):
            yield Finding(
                "retries-without-progress", limits._severity_of(retry_topic), f"group {group}, topic {retry_topic}",
                f"{counted(waiting, 'message')} to retry: the group has no progress in this topic, so its lag does not "
                "count them.",
                {"messages": waiting}, "Start the group, which subscribes to its retries by itself.",
            )  # fmt: skip
        topics = Counter(
            given_up(group, message).original_topic for message in newest(view, retry_topic, limits.sampled)
        )
        for topic, count in topics.items():
            if topic in view.topics and topic != retry_topic and not _has_progress(view, group, topic):
                yield Finding(
                    "retries-without-progress", limits._severity_of(topic), f"group {group}, topic {topic}",
                    f"{counted(count, 'retry message')} of this topic: the group consumed from it, but has no progress "
                    "there any more.",
                    {"messages": count, **sample_evidence(topics.total(), waiting)},
                    f"Set the progress before the group starts: librmq reset STORE --group {group} --topic {topic} "
                    "--to TIME.",
                )  # fmt: skip


def _never_read_findings(view: StoreView, limits: Thresholds) -> Iterator[Finding]:
    """Yield the topics of users whose messages retention has begun to delete, and which no group has read."""
    for topic in never_read_topics(view):
        deleted = sum(offsets.start for offsets in view.queues(topic).values())
        if deleted:
            yield Finding(
                "never-read", limits._severity_of(topic), f"topic {topic}",
                f"No group has read the topic, and retention has deleted {counted(deleted, 'message')} of it. "
                "Broadcasting consumers keep their progress elsewhere, and do not count.",
                {"deleted": deleted, "messages": view.message_count(topic)},
                "Start the group that is to read it, or stop sending to it.",
            )  # fmt: skip


def _has_progress(view: StoreView, group: str, topic: str) -> bool:
    progress = view.progress.get((group, topic))
    return progress is not None and (view.is_live or bool(progress))


def diagnose(source: LiveSource, thresholds: Thresholds | None = None, *, check: bool | None = None) -> list[Finding]:
    """Return the findings about a store or a cluster, worst first; empty for a healthy store that is verified.

    Args:
        source: A running broker, a share, what `librmq.connect` returned, the folder of a store, or a view of one.
            For a folder in use, progress can be some seconds old. Instances, threads and held messages are unknown for
            a folder. The finding ``not-asked`` says what no request to a cluster tells.
        thresholds: Limits beyond which something is a finding.
        check: Whether to compare queues and index of a folder with its log; by default of up to 30,000 messages. Every
            record is read without it too.

    Raises:
        NotAStoreError: The folder holds no store.
        CorruptionError: A file is damaged in a way that no crash explains. Of a folder that `verify` finds damaged, the
            damage is the only finding.
    """
    limits = thresholds or Thresholds()
    try:
        with viewed_live(source) as view:
            if isinstance(view, ClusterView):
                return worst_first(chain(_live_findings(view, limits, lag(view)), _not_asked(view)))
            return worst_first(chain(_damage_findings(view, check), other_findings(view, limits, lag(view))))
    except CorruptionError:  # a store that cannot be opened, or whose tables cannot be read
        if not isinstance(source, str | os.PathLike):
            raise
        from librmq.store import verify

        path = os.fspath(source)
        places = verify(path).damage
        if not places:
            raise
        return [damage_finding(f"store {path}", places, path)]


def _live_findings(view: LiveView, limits: Thresholds, group_lag: Lag) -> Iterator[Finding]:
    """Yield what requests to brokers tell too."""
    yield from lag_findings(view, limits, group_lag)
    yield from consistency_findings(view, limits, group_lag)
    yield from stuck_findings(view, limits, group_lag)
    yield from dead_letter_findings(view, limits)


def _not_asked(view: ClusterView) -> Iterator[Finding]:
    names, part = view.route.broker_names(), f"{counted(view.left_out, 'group')} more, " if view.left_out else ""
    yield Finding(
        "not-asked", "info", f"cluster {', '.join(names[:NAMED])}",
        f"Requests tell lag, instances, and the newest {ASKED} dead letters of a queue. Not asked for: {part}halves, "
        "timers, POP, filters, clocks, frequent keys, damage; and clients of a proxy can be unseen.",
        {"brokers": len(names), "left_out": view.left_out, **cut_evidence(len(names) > NAMED)},
        "For the rest run librmq diagnose STORE on each broker's machine.",
    )  # fmt: skip


def other_findings(view: StoreView, limits: Thresholds, group_lag: Lag) -> Iterator[Finding]:
    """Yield all findings but those about damage, by the lag of all groups."""
    yield from _missing_log_findings(view)
    yield from _progress_findings(view)
    yield from _unlisted_topic_findings(view)
    yield from _live_findings(view, limits, group_lag)
    yield from half_findings(view, limits)
    yield from pop_findings(view, limits)
    yield from kept_progress_findings(view, limits)
    yield from _filter_findings(view, limits)
    yield from _clock_findings(view, limits)
    yield from _retry_findings(view, limits)
    yield from _never_read_findings(view, limits)


# ---- design

_UNEVEN = 2
"""Ratio of the fullest queue of a topic to the mean over all its queues, empty ones too, from which it is skewed."""
_FAR_APART = 100
"""Ratio from which one topic of a group, or one tag of a topic, delays the other."""


class TopicVolume(NamedTuple):
    """The content of a topic."""

    topic: str
    queues: int
    """Number of its queues."""
    messages: int
    """Number of its messages."""
    bytes: int
    """Size of whole records in bytes."""
    largest: int
    """Size of the largest record in bytes."""
    fullest: int
    """Number of messages in the queue that has most of them."""


def topic_volumes(source: Source) -> list[TopicVolume]:
    """Return the content of each topic of producers, the largest first.

    Raises:
        NotAStoreError: The folder holds no store.
        CorruptionError: A file is damaged.
    """
    with viewed(source) as view:
        volumes = [_volume(view, topic) for topic in view.topics if is_user_topic(topic)]
        return sorted(volumes, key=lambda volume: (-volume.bytes, volume.topic))


def _volume(view: StoreView, topic: str) -> TopicVolume:
    messages = size = largest = fullest = 0
    for queue_id in view.topics[topic]:
        before = messages
        for _, block in view.store.queues[topic, queue_id].blocks():
            sizes = block["size"][block["size"] != HOLE_SIZE].astype(np.int64)
            messages += len(sizes)
            size += int(sizes.sum())
            largest = max(largest, int(sizes.max(initial=0)))
        fullest = max(fullest, messages - before)
    return TopicVolume(topic, view.queue_count(topic), messages, size, largest, fullest)


def design_check(source: Source, thresholds: Thresholds | None = None) -> list[Finding]:
    """Return findings about the design of topics, keys and groups, worst first.

    Args:
        source: A running broker, the folder of a store, or a view of either.
        thresholds: Limits beyond which something is a finding. The newest ``sampled`` messages of each topic are read.

    Raises:
        NotAStoreError: The folder holds no store.
        CorruptionError: A file is damaged.
    """
    limits = thresholds or Thresholds()
    with viewed(source) as view:
        volumes = {volume.topic: volume for volume in topic_volumes(view)}
        findings: list[Finding] = []
        for volume in volumes.values():
            findings += _volume_findings(volume, limits)
            findings += _kind_findings(volume, list(newest(view, volume.topic, limits.sampled)), limits)
        findings += _group_findings(view, volumes)
        return worst_first(findings)


def _volume_findings(volume: TopicVolume, limits: Thresholds) -> Iterator[Finding]:
    if volume.queues < limits.few_queues and volume.messages > limits.busy_messages:
        yield Finding(
            "few-queues", "warning", f"topic {volume.topic}",
            f"{volume.messages:,} messages share {volume.queues} queue, so only one consumer of a group is busy.",
            {"queues": volume.queues, "messages": volume.messages},
            "Add queues, unless all messages must stay in one order; stored messages do not move.",
        )  # fmt: skip
    if volume.messages > limits.busy_messages and volume.fullest * volume.queues >= _UNEVEN * volume.messages:
        ratio = volume.fullest * volume.queues / volume.messages
        yield Finding(
            "skewed-queues", "warning", f"topic {volume.topic}",
            f"One of {volume.queues} queues has {volume.fullest:,} of {volume.messages:,} messages, {ratio:.1f} times "
            "the mean, so the consumer of that queue limits the group.",
            {"queues": volume.queues, "messages": volume.messages, "fullest": volume.fullest},
            "Choose queues by a value that is spread evenly, or send without a queue: producers then take turns.",
        )  # fmt: skip
    if volume.largest > limits.large_body + record.FIXED_SIZE:
        yield Finding(
            "large-bodies", "warning", f"topic {volume.topic}",
            f"The largest record has {volume.largest:,} bytes; bodies over {limits.large_body:,} bytes slow every "
            "reader.",
            {"largest": volume.largest, "limit": limits.large_body},
            "Send a reference to a body that is stored elsewhere: see docs/largebody.md.",
        )  # fmt: skip


def _kind_findings(volume: TopicVolume, messages: list[StoredMessage], limits: Thresholds) -> Iterator[Finding]:
    kinds: Counter[str] = Counter(map(kind_of, messages))
    if len(kinds) > 1:
        yield Finding(
            "mixed-kinds", "warning", f"topic {volume.topic}",
            f"The topic mixes kinds of messages: {', '.join(f'{count:,} {kind}' for kind, count in kinds.items())}"
            + (f", of the newest {len(messages):,}." if len(messages) < volume.messages else "."),
            {"kinds": dict(kinds), **sample_evidence(len(messages), volume.messages)},
            "Give each kind its own topic: RocketMQ 5 refuses mixtures, and their rates differ.",
        )  # fmt: skip
    keys: Counter[str] = Counter(key for message in messages for key in set(message.keys))
    if keys and len(messages) >= limits.busy_messages:
        key, count = keys.most_common(1)[0]
        if count > limits.key_share * len(messages):
            yield Finding(
                "skewed-key", "warning", f"topic {volume.topic}",
                f"{count / len(messages):.0%} of the newest {counted(len(messages), 'message')} have the key {key}.",
                {"key": key, "messages": count, **sample_evidence(len(messages), volume.messages)},
                "If keys select the queue, that queue limits the topic: split the key, or give it its own topic.",
            )  # fmt: skip
    tags = Counter(message.tags for message in messages if message.tags).most_common()
    if tags and len(messages) >= limits.busy_messages and tags[0][1] >= _FAR_APART * tags[-1][1]:
        (largest, largest_count), (smallest, smallest_count) = tags[0], tags[-1]
        yield Finding(
            "uneven-tags", "info", f"topic {volume.topic}",
            f"Of the newest {counted(len(messages), 'message')} {largest_count:,} have the tag {largest} and "
            f"{smallest_count:,} the tag {smallest}: in a backlog the rare ones wait behind the others.",
            {"tags": dict(tags[:NAMED]), "smallest": smallest, "messages": smallest_count,
             **cut_evidence(len(tags) > NAMED), **sample_evidence(len(messages), volume.messages)},
            "If the rare ones are urgent, give them a topic of their own, or their listener a greater weight.",
        )  # fmt: skip


def _group_findings(view: StoreView, volumes: dict[str, TopicVolume]) -> Iterator[Finding]:
    topics: dict[str, list[str]] = {}
    for group, topic in sorted(view.progress):
        if not is_own_group(group) and is_user_topic(topic):
            topics.setdefault(group, []).append(topic)
    for group, its in topics.items():
        if len(its) < 2:
            continue
        counts = {topic: volumes[topic].messages if topic in volumes else 0 for topic in its}
        largest, smallest = max(counts.values()), min(counts.values())
        is_far = largest >= _FAR_APART * max(smallest, 1)
        yield Finding(
            "group-over-topics", "warning" if is_far else "info", f"group {group}",
            f"The group consumes {len(its)} topics"
            + (", and one is so large that the others wait for it." if is_far else "."),
            {"messages_by_topic": counts},
            "Use one group for each topic: instances that differ lose messages, and a slow topic delays the others.",
        )  # fmt: skip
