"""Checks of a store or a broker: all findings, those from its newest messages, and those about its design.

Of each topic a sample of the newest messages is read: a finding says how many it looked at, and a rare case can stay
unseen. The design is what topics, keys and groups will make a problem later; queue entries have exact sizes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Final, NamedTuple

import numpy as np

from librmq.config import nearest
from librmq.consumequeue import HOLE_SIZE
from librmq.diagnosis.damage import damage_findings, missing_log_findings, unlisted_topic_findings
from librmq.diagnosis.deadletters import dead_letter_findings, given_up
from librmq.diagnosis.findings import (
    NAMED,
    Finding,
    Thresholds,
    counted,
    cut_evidence,
    sample_evidence,
    worst_first,
)
from librmq.diagnosis.formatting import duration
from librmq.diagnosis.group_lag import lag, lag_findings
from librmq.diagnosis.instances import consistency_findings, stuck_findings
from librmq.diagnosis.pending import half_findings, kind_of
from librmq.diagnosis.view import Source, StoreView, is_own_group, viewed
from librmq.errors import CorruptionError
from librmq.filter.registrations import Registration
from librmq.message.message import StoredMessage
from librmq.message.record import FIXED_SIZE
from librmq.message.topics import RETRY_PREFIX, is_user_topic

# ------------------------------------------------------------------------------------------------------ newest messages

_FEWEST: Final = 10
"""Fewest messages that say something about a filter."""


def newest(view: StoreView, topic: str, limit: int) -> Iterator[StoredMessage]:
    """Yield about ``limit`` of the newest messages of a topic, as many from each queue."""
    ids = view.topics.get(topic, ())
    for queue_id in ids:
        state = view.ranges[topic, queue_id]
        with suppress(CorruptionError):
            begin = max(state.min_offset, state.max_offset - max(1, limit // len(ids)))
            yield from view.store.messages(topic, queue_id, begin)


def registered_filters(view: StoreView) -> Iterator[tuple[str, str, str]]:
    """Yield group, topic and expression of each registered SQL filter that compiles."""
    if view.broker is not None:
        registrations: Iterable[Registration] = view.broker.store.filters or ()
    else:
        registrations = view.tables.registrations(0) if view.tables.filters else ()
    for registration in registrations:
        if registration.filter is not None:
            yield registration.group, registration.topic, registration.expression


def sample_findings(source: Source, thresholds: Thresholds | None = None) -> list[Finding]:
    """Return what the newest messages of each topic show; at most ``sampled`` are read of a topic or for one question.

    Raises:
        NotAStoreError: The folder holds no store.
        ConfigError: ``consumerFilter.json`` is malformed.
    """
    limits = thresholds or Thresholds()
    with viewed(source) as view:
        return [*_filter_findings(view, limits), *_clock_findings(view, limits), *_retry_findings(view, limits)]


def _filter_findings(view: StoreView, limits: Thresholds) -> Iterator[Finding]:
    """Yield the registered filters that match none of their topic's newest messages."""
    for group, topic, expression in registered_filters(view):
        from librmq.filter.filters import compiled  # loads a grammar
        from librmq.filter.parser import Property, postorder

        selector = compiled(expression)
        messages = list(newest(view, topic, limits.sampled))
        if len(messages) < _FEWEST or any(selector.matches(message.properties) for message in messages):
            continue
        names = {name for message in messages for name in message.properties}
        property_names = dict.fromkeys(
            node.name for node in postorder(selector.selector.root) if isinstance(node, Property)
        )
        near = {name: nearest(name, names) for name in property_names if name not in names}
        missing = [f"{name}" + f" (did you mean {other}?)" * (other is not None) for name, other in near.items()]
        yield Finding(
            "filter-matches-nothing",
            limits.severity_of(topic),
            f"group {group}, topic {topic}",
            f"The registered filter {expression} matches none of the newest {counted(len(messages), 'message')}"
            + (f"; none has the property {', '.join(missing)}." if missing else "."),
            {
                "expression": expression,
                "missing_properties": near,
                **sample_evidence(len(messages), view.message_count(topic)),
            },
            "Compare the expression with the messages: librmq show STORE --topic "
            f"{topic} --limit 1, and librmq filter explains it.",
        )


def _clock_findings(view: StoreView, limits: Thresholds) -> Iterator[Finding]:
    """Yield the topics with messages whose producers' clocks were far from the broker's."""
    topics = [topic for topic in view.topics if is_user_topic(topic)]
    for topic in topics:
        looked_at = 0
        late_s: list[float] = []
        hosts: Counter[str] = Counter()
        for message in newest(view, topic, max(_FEWEST, limits.sampled // len(topics))):
            looked_at += 1
            seconds = (message.store_timestamp_ms - message.born_timestamp_ms) / 1000
            if abs(seconds) > limits.clock_s and kind_of(message) == "plain":
                late_s.append(seconds)
                hosts[message.born_host[0]] += 1
        if late_s:
            most_s = max(late_s, key=abs)
            yield Finding(
                "born-far-from-stored",
                limits.severity_of(topic),
                f"topic {topic}",
                f"{counted(len(late_s), 'message')} of the newest {looked_at:,}: more than {duration(limits.clock_s)} "
                f"from birth to storing, up to {duration(abs(most_s))}{', born in the future' * (most_s < 0)}, most "
                f"often on host {hosts.most_common(1)[0][0]}.",
                {
                    "messages": len(late_s),
                    **sample_evidence(looked_at, view.message_count(topic)),
                    "most_s": most_s,
                    "hosts": dict(hosts.most_common(NAMED)),
                    **cut_evidence(len(hosts) > NAMED),
                },
                "Check the clock of that host, unless these messages were imported, replayed, or sent with a time of "
                "their own.",
            )


def _retry_findings(view: StoreView, limits: Thresholds) -> Iterator[Finding]:
    """Yield the topics in which a group has retries, but no progress."""
    for retry_topic in [topic for topic in view.topics if topic.startswith(RETRY_PREFIX)]:
        group = retry_topic.removeprefix(RETRY_PREFIX)
        if is_own_group(group) and not limits.own:
            continue
        waiting = view.message_count(retry_topic)
        if waiting and not _has_progress(view, group, retry_topic):
            yield Finding(
                "retries-without-progress",
                limits.severity_of(retry_topic),
                f"group {group}, topic {retry_topic}",
                f"{counted(waiting, 'message')} to retry: the group has no progress in this topic, so its lag does not "
                "count them.",
                {"messages": waiting},
                "Start the group, which subscribes to its retries by itself.",
            )
        topics = Counter(
            given_up(group, message).original_topic for message in newest(view, retry_topic, limits.sampled)
        )
        for topic, count in topics.items():
            if topic in view.topics and topic != retry_topic and not _has_progress(view, group, topic):
                yield Finding(
                    "retries-without-progress",
                    limits.severity_of(topic),
                    f"group {group}, topic {topic}",
                    f"{counted(count, 'retry message')} of this topic: the group consumed from it, but has no progress "
                    "there any more.",
                    {"messages": count, **sample_evidence(topics.total(), waiting)},
                    f"Set the progress before the group starts: librmq reset STORE --group {group} --topic {topic} "
                    "--to TIME.",
                )


def _has_progress(view: StoreView, group: str, topic: str) -> bool:
    progress = view.progress.get((group, topic))
    return progress is not None and (view.is_live or bool(progress))


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


# --------------------------------------------------------------------------------------------------------------- design

_FAR_APART = 100
"""Ratio from which one topic of a group delays the other."""


class TopicVolume(NamedTuple):
    """The content of a topic."""

    topic: str
    """Name of the topic."""
    queues: int
    """Number of its queues."""
    messages: int
    """Number of its messages."""
    bytes: int
    """Size of whole records in bytes."""
    largest: int
    """Size of the largest record in bytes."""


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
    messages = size = largest = 0
    for queue_id in view.topics[topic]:
        for _, block in view.store.queues[topic, queue_id].blocks():
            sizes = block["size"][block["size"] != HOLE_SIZE].astype(np.int64)
            messages += len(sizes)
            size += int(sizes.sum())
            largest = max(largest, int(sizes.max(initial=0)))
    return TopicVolume(topic, view.queue_count(topic), messages, size, largest)


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
    if volume.largest > limits.large_body + FIXED_SIZE:
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
