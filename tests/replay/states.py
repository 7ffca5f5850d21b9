"""Compares states: progress, queues, allocations, configuration, what clients held, and what calls answered."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, Final

from librmq.files.interface import file_size
from librmq.java import json as java_json
from tests.reference import Row
from tests.replay.deviations import Difference, unlike
from tests.replay.reading import PROGRESS_FILE
from tests.replay.stage import CLIENT, STORE, Played

__all__ = ["states"]

_BEFORE_MS: Final = 10_000
_AFTER_MS: Final = 5_000
"""A broker knows progress only as of its clients' last report, which comes with pulls and at intervals."""
_TIMES: Final = ("bornTime", "clientVersion", "deadTime")


def states(played: Played) -> Iterator[Difference]:
    yield from _progress(played)
    yield from _queues(played)
    yield from _subscriptions(played)
    yield from _allocations(played)
    yield from _held(played)
    yield from _files(played)
    yield from _calls(played)
    yield from _configuration(played)


def _progress(played: Played) -> Iterator[Difference]:
    delivered = _delivered_offsets(played)
    for event in played.recording.progress_events:
        name = played.recording.broker_of(event)
        shown = [
            table
            for at_ms, broker, table in played.progress
            if broker == name and event["at_ms"] - _BEFORE_MS <= at_ms <= event["at_ms"] + _AFTER_MS
        ]
        for topic, group, queue_id, want in event["progress"]:
            around = [table[topic, group, queue_id] for table in shown]
            low, high = min(around, default=-1), max(around, default=-1)
            if low <= want <= high:
                continue
            if _is_told_apart(delivered, group, topic, queue_id, want, high if want > high else low):
                text = f"{event['seq']} ({event['label']}) {topic}@{group} {queue_id}: {low} to {high}, recorded {want}"
                yield Difference("progress", topic=topic, group=group, text=text)


Offsets = Mapping[tuple[str, str, int], set[int]]


def _is_told_apart(delivered: Offsets, group: str, topic: str, queue_id: int, one: int, other: int) -> bool:
    """Return whether a message of the group lies between two states of its progress.

    If none does, a filter skipped the messages between. A sweep at unknown times decides when that is noticed.
    """
    between = range(min(one, other), max(one, other))
    return -1 in between or not delivered[group, topic, queue_id].isdisjoint(between)


def _delivered_offsets(played: Played) -> Offsets:
    """Return the messages that each group got in both runs, by group, topic and queue."""
    group_of = {event["client"]: event["group"] for event in played.recording.of_kind("consumer_start")}
    found: dict[tuple[str, str, int], set[int]] = defaultdict(set)
    for event in played.recording.of_kind("deliver"):
        mq = event["mq"]
        where = group_of[event["client"]], mq["topic"], mq["queueId"]
        found[where].update(message["queueOffset"] for message in event["msgs"])
    for row in played.delivered:
        queue = row["mq"]
        found[group_of[row["client"]], queue.topic, queue.queue_id].add(row["msg"]["queueOffset"])
    return found


def _queues(played: Played) -> Iterator[Difference]:
    for event in played.recording.of_kind("queue_offsets"):
        found = played.seen[event["seq"]]
        if found != event["queues"]:
            text = f"{event['seq']} ({event['label']}): {found}, recorded {event['queues']}"
            yield Difference("queue", topic=event["topic"], text=text)


def _subscriptions(played: Played) -> Iterator[Difference]:
    """Return what the broker believes that a group subscribes to."""
    for event in played.recording.of_kind("subscription_at_broker"):
        want = {
            topic: {name: told[name] for name in ("subString", "expressionType")}
            for topic, told in event["subscriptions"].items()
        }
        have = played.seen[event["seq"]]
        if want != have:
            text = f"{event['seq']} ({event['label']}): {unlike(want, have)}"
            yield Difference("subscription", group=event["group"], text=text)


def _allocations(played: Played) -> Iterator[Difference]:
    """Compare by client and topic: inputs and shares that lasted must occur here in the same order."""
    wanted: dict[tuple[str, str], list[tuple[int, Row]]] = defaultdict(list)
    found: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for event in played.recording.of_kind("allocate"):
        shown = {name: event[name] for name in _ALLOCATION}
        wanted[event["client"], event["topic"]].append((event["at_ms"], shown))
    for row in played.allocated:
        found[row["client"], row["topic"]].append({name: row[name] for name in _ALLOCATION})
    end_ms = played.recording.events[-1]["at_ms"]
    for (client, topic), told in sorted(wanted.items()):
        until = [at_ms for at_ms, _ in told[1:]] + [end_ms]
        lasting = [shown for (at_ms, shown), to_ms in zip(told, until, strict=True) if to_ms - at_ms >= _LASTING_MS]
        have = iter(found[client, topic])
        if not all(shown in have for shown in lasting):
            text = f"{found[client, topic]}, recorded {lasting}"
            yield Difference("allocation", client=client, topic=topic, text=text)


_ALLOCATION: Final = ("cidAll", "queuesAll", "result")
_LASTING_MS: Final = 5_000


def _held(played: Played) -> Iterator[Difference]:
    """Compare the most that a client's queues held where amounts are limited: flow control."""
    recording = played.recording
    group_of = {event["client"]: event["group"] for event in recording.of_kind("consumer_start")}
    wanted: dict[str, dict[str, int]] = {}
    for event in recording.of_kind("cached"):
        most = wanted.setdefault(event["client"], {"count": 0, "bytes": 0, "span": 0})
        most.update({name: max(most[name], event[name]) for name in most})
    for client, most in wanted.items():
        settings = recording.client_settings(group_of[client])
        want = {what: most[what] for limit, what in _LIMITS.items() if limit in settings}
        have = {what: played.held[client][what] for what in want}
        is_slow = bool(recording.durations.get(client))  # otherwise the samples miss short-lived messages
        if want != have if is_slow else any(have[what] < want[what] for what in want):
            yield Difference("held", client=client, text=unlike(want, have))


_LIMITS: Final = {
    "pullThresholdForQueue": "count",
    "pullThresholdSizeForQueue": "bytes",
    "consumeConcurrentlyMaxSpan": "span",
}


def _files(played: Played) -> Iterator[Difference]:
    """Compare files as they were during the run; those with progress are compared as progress."""
    for event in played.recording.events:
        if event["kind"] in ("file", "file_client") and not event["path"].endswith(PROGRESS_FILE):
            texts = event["text"], played.seen[event["seq"]]
            want, have = (None if text is None else java_json.loads(text) for text in texts)
            for key, one, other in _rows(want, have):
                if one != other:
                    text = f"{event['seq']} {event['path']} {key}: {other}, recorded {one}"
                    yield Difference("config", topic=key, text=text)


def _calls(played: Played) -> Iterator[Difference]:
    """Compare what calls answered, or that they failed."""
    for event in played.recording.events:
        if event["seq"] in played.seen and event["kind"] in ("refused", "send_result", "send_batch_result"):
            have = played.seen[event["seq"]]
            if isinstance(have, Exception) != (event["exception"] is not None):
                what = event.get("what") or event["form"]
                text = f"{what}: {have!r}, recorded {event['exception'] or event['result']}"
                yield Difference("refusal", client=event["client"], text=text)
    for event in played.recording.of_kind("call"):
        if event["seq"] not in played.seen:
            continue
        have = played.seen[event["seq"]]
        failed = isinstance(have, Exception)
        text = f"{event['what']}: {have!r}, recorded {event['exception'] or event['result']}"
        if failed != (event["exception"] is not None):
            area = "empty answer" if have == [] else "call"
            yield Difference(area, client=event["client"], text=text)
        elif not failed and have is not None and have != _answer(event["result"]):
            yield Difference("call", client=event["client"], text=text)


def _answer(result: Any) -> Any:
    """Return the result of a call, with messages given by their ids and queues by what names them."""
    if isinstance(result, dict) and "messages" in result:
        return sorted(message["msgId"] for message in result["messages"])
    if isinstance(result, dict) and "msgId" in result:
        return [result["msgId"]]
    if isinstance(result, list) and "timestampOffset" in result[0]:
        return {row["queueId"]: row["timestampOffset"] for row in result}
    if isinstance(result, list):
        return [(queue["topic"], queue["brokerName"], queue["queueId"]) for queue in result]
    return result


def _configuration(played: Played) -> Iterator[Difference]:
    """Compare the files that brokers and broadcasting clients left."""
    recording = played.recording
    for name, store in recording.stores.items():
        files = played.files[name]
        for file in _CONFIGURATION:
            path = f"{STORE}/config/{file}"
            have = None if file_size(files, path) is None else java_json.loads(files.read(path))
            for key, one, other in _rows(recording.config(store, file), have):
                topic, _, group = key.partition("@")
                if one != other:
                    text = f"{name} {file} {key}: {other}, recorded {one}"
                    yield Difference("config", topic=topic, group=group or topic, text=text)
    for path, want in recording.client_files().items():
        have = java_json.loads(played.files[""].read(f"{CLIENT}/{path}"))
        if have != want:
            yield Difference("config", text=f"{path}: {have}, recorded {want}")


_CONFIGURATION: Final = (
    "topics.json",
    "subscriptionGroup.json",
    PROGRESS_FILE,
    "consumerFilter.json",
    "delayOffset.json",
)


def _rows(want: Any, have: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the rows of a file in both versions, without times."""
    want, have = want or {}, have or {}
    table = next((key for key in (*want, *have) if key != "dataVersion"), "")
    one, other = want.get(table, {}), have.get(table, {})
    for key in sorted({*one, *other}, key=str):
        yield str(key), _without_times(one.get(key)), _without_times(other.get(key))


def _without_times(row: Any) -> Any:
    if not isinstance(row, dict):
        return row
    return {key: _without_times(value) for key, value in row.items() if key not in _TIMES}
