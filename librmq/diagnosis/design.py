"""Check of a store's design: problems that its topics, keys and groups will cause later.

Queue entries have exact sizes. Kinds and keys are read from the newest messages of each topic.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from librmq.consumequeue import HOLE_SIZE
from librmq.diagnosis.findings import Finding, Thresholds, counted, sample, worst_first
from librmq.diagnosis.pending import kind_of
from librmq.diagnosis.samples import newest
from librmq.diagnosis.view import Source, StoreView, is_own_group, viewed
from librmq.message.message import StoredMessage
from librmq.message.record import FIXED_SIZE
from librmq.message.topics import is_user_topic

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
            findings += _of_volume(volume, limits)
            findings += _of_messages(volume, list(newest(view, volume.topic, limits.sampled)), limits)
        findings += _of_groups(view, volumes)
        return worst_first(findings)


def _of_volume(volume: TopicVolume, limits: Thresholds) -> Iterator[Finding]:
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


def _of_messages(volume: TopicVolume, messages: list[StoredMessage], limits: Thresholds) -> Iterator[Finding]:
    kinds: Counter[str] = Counter(map(kind_of, messages))
    if len(kinds) > 1:
        yield Finding(
            "mixed-kinds", "warning", f"topic {volume.topic}",
            f"The topic mixes kinds of messages: {', '.join(f'{count:,} {kind}' for kind, count in kinds.items())}"
            + (f", of the newest {len(messages):,}." if len(messages) < volume.messages else "."),
            {"kinds": dict(kinds), **sample(len(messages), volume.messages)},
            "Give each kind its own topic: RocketMQ 5 refuses mixtures, and their rates differ.",
        )  # fmt: skip
    keys: Counter[str] = Counter(key for message in messages for key in set(message.keys))
    if keys and len(messages) >= limits.busy_messages:
        key, count = keys.most_common(1)[0]
        if count > limits.key_share * len(messages):
            yield Finding(
                "skewed-key", "warning", f"topic {volume.topic}",
                f"{count / len(messages):.0%} of the newest {counted(len(messages), 'message')} have the key {key}.",
                {"key": key, "messages": count, **sample(len(messages), volume.messages)},
                "If keys select the queue, that queue limits the topic: split the key, or give it its own topic.",
            )  # fmt: skip


def _of_groups(view: StoreView, volumes: dict[str, TopicVolume]) -> Iterator[Finding]:
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
