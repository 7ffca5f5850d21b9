"""Compares states: progress, queues, allocations, files, what clients held, what calls answered."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any, Final

from librmq.message import MessageQueue
from tests.reference import Row
from tests.replay.deviations import Difference, unlike
from tests.replay.stage import Played

__all__ = ["states"]

_BEFORE_MS: Final = 10_000
_AFTER_MS: Final = 5_000
"""What a broker knows of progress is as old as its clients' habit of telling it: with pulls, and by time."""


def states(played: Played) -> Iterator[Difference]:
    """All differences of states."""
    yield from _progress(played)
    yield from _queues(played)


def _progress(played: Played) -> Iterator[Difference]:
    delivered = _delivered_offsets(played)
    usual = played.recording.broker_settings["brokerName"]
    for event in played.recording.events:
        if event["kind"] != "consumer_offsets_in_memory":
            continue
        name = event["client"] if event["client"].startswith("broker-") else usual
        shown = [
            table
            for at_ms, broker, table in played.progress
            if broker == name and event["at_ms"] - _BEFORE_MS <= at_ms <= event["at_ms"] + _AFTER_MS
        ]
        for key, row in event["table"].items():
            topic, _, group = key.partition("@")
            for queue_id, want in row.items():
                have = played.seen[event["seq"]][key][queue_id]
                around = [-1 if one is None else one for table in shown if (one := table[key][queue_id], True)[1]]
                if have == want or (around and min(around) <= want <= max(around)):
                    continue
                passed = range(min(want, have or 0), max(want, have or 0))
                if not delivered[group, topic, int(queue_id)].intersection(passed) and have is not None:
                    continue  # a filter passes them by: when that is noticed, a sweep at unknown times decides
                yield Difference(
                    "progress",
                    topic=topic,
                    group=group,
                    text=f"{event['seq']} ({event['label']}) {key} {queue_id}: {have}, recorded {want}",
                )


def _delivered_offsets(played: Played) -> dict[tuple[str, str, int], set[int]]:
    """Which messages each group was given by either, by group, topic and queue."""
    group_of = {e["client"]: e["group"] for e in played.recording.events if e["kind"] == "consumer_start"}
    found: dict[tuple[str, str, int], set[int]] = defaultdict(set)
    for event in played.recording.events:
        if event["kind"] == "deliver":
            mq = event["mq"]
            where = group_of[event["client"]], mq["topic"], mq["queueId"]
            found[where].update(message["queueOffset"] for message in event["msgs"])
    for row in played.delivered:
        queue: MessageQueue = row["mq"]
        found[group_of[row["client"]], queue.topic, queue.queue_id].add(row["msg"]["queueOffset"])
    return found


def _queues(played: Played) -> Iterator[Difference]:
    for event in played.recording.events:
        if event["kind"] == "queue_offsets":
            found = played.seen[event["seq"]]
            if found != event["queues"]:
                text = f"{event['seq']} ({event['label']}): {found}, recorded {event['queues']}"
                yield Difference("queue", topic=event["topic"], text=text)
