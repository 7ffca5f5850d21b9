"""Compares librmq's run with the recording, as far as the reference data allow.

Times, ports and physical offsets differ from run to run, and so does the order of concurrent work. A physical offset is
compared by the record at that place: its topic, its unique id (or body), and its number among such records. Time and
host of a message's birth are compared by whether the first record with the same unique id has them too.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from librmq.errors import MalformedError
from librmq.message.ids import format_host, parse_offset_message_id
from librmq.message.properties import PropertyName
from librmq.message.topics import SystemTopic, TopicPrefix
from tests.reference import Row
from tests.replay.deviations import Difference, is_direct, unlike
from tests.replay.reading import UNIQUE_KEY, Recording
from tests.replay.stage import Played, in_log
from tests.replay.states import states

__all__ = ["differences"]

_LEFT_OUT: Final = ("kind", "storeTimestamp", "bornTimestamp", "bornHost")
_BODY_IN_BRIEF: Final = 20
_BEGIN: Final = 100  # length of a body's beginning that is compared


def differences(played: Played) -> list[Difference]:
    """Return the differences of librmq's run, or none if it is equal."""
    recording = played.recording
    usual = recording.broker_settings["brokerName"]
    others = {name: store for name, store in recording.stores.items() if name != usual}
    theirs = {usual: Log(recording.messages, recording)}
    theirs.update({name: Log(in_log(recording.log(store)), recording) for name, store in others.items()})
    ours = {name: Log(in_log(played.logs[name]), recording) for name in theirs}
    parts = (
        *(_records(name, theirs[name], ours[name]) for name in theirs),
        _sends(played, theirs, ours),
        _selectors(played),
        _deliveries(played, theirs, ours),
        _short_deliveries(played),
        _polls(played, theirs[usual], ours[usual]),
        _checks(played),
        states(played),
    )
    return [difference for part in parts for difference in part]


class Log:
    """The records of a log, each with a name that does not depend on its place."""

    def __init__(self, rows: Iterable[Row], recording: Recording) -> None:
        """Leave out recorded messages that raced, and early discarded ones in the topic for discarded ones."""
        raced = recording.raced_halves
        self._together = recording.delivered_together
        self.rows: list[Row] = []
        self._names: dict[int, str] = {}
        self._born: dict[str, tuple[int, str]] = {}
        halves: dict[int, str] = {}
        count: Counter[str] = Counter()
        for row in rows:
            key = row["properties"].get(UNIQUE_KEY)
            of = key or row["body"]
            self._born.setdefault(of, (row["bornTimestamp"], row["bornHost"]))
            if row["topic"] == SystemTopic.OP:  # the body is the queue offset of a half message
                of = halves.get(int(row["body"]), of)
            name = f"{row['topic']} {of}"
            count[name] += 1
            self._names[row["commitLogOffset"]] = f"{name} #{count[name]}"
            if row["topic"] == SystemTopic.HALF:
                halves[row["queueOffset"]] = self._names[row["commitLogOffset"]]
            is_early = row["topic"] == SystemTopic.CHECK_MAX_TIME and key in recording.given_up_early
            if not is_early and not raced.intersection((key, *of.split())):
                self.rows.append(row)

    def name(self, physical_offset: int) -> str:
        return self._names.get(physical_offset, "nothing")

    def name_of_id(self, offset_id: str) -> str:
        """Return the name of the record with an offset id; return any other text unchanged."""
        try:
            host, physical_offset = parse_offset_message_id(offset_id)
        except MalformedError:
            return offset_id
        name = self._names.get(physical_offset)
        return offset_id if name is None else f"{name} of {format_host(host)}"

    def comparable(self, row: Row, queue: str | None = None) -> Row:
        """Return a message without what differs from run to run; ``queue`` is the topic that it was read from."""
        shown = {name: value for name, value in row.items() if name not in _LEFT_OUT}
        shown["commitLogOffset"] = self.name(row["commitLogOffset"])
        if row["preparedTransactionOffset"]:
            shown["preparedTransactionOffset"] = self.name(row["preparedTransactionOffset"])
        for name in ("msgId", "offsetMsgId"):
            shown[name] = self.name_of_id(row[name] or "")
        properties = dict(row["properties"])
        if "ORIGIN_MESSAGE_ID" in properties:
            properties["ORIGIN_MESSAGE_ID"] = self.name_of_id(properties["ORIGIN_MESSAGE_ID"])
        for name in ("CONSUME_START_TIME", "MAX_OFFSET"):
            if name in properties:
                properties[name] = "there"
        shown["properties"] = properties
        first = self._born.get(properties.get(UNIQUE_KEY) or row["body"])
        shown["born as the first"] = (row["bornTimestamp"], row["bornHost"]) == first
        is_together = properties.get(UNIQUE_KEY) in self._together
        if is_together or _is_unordered(row, row["topic"] if queue is None else queue):
            shown["queueOffset"] = "any"
        raw = shown.pop("properties_raw", None)
        if _is_dead_letter(row):  # librmq's messages have one more property: the cause
            properties.pop(PropertyName.DEAD_LETTER_CAUSE, None)
            shown.pop("storeSize", None)
        elif raw is not None:
            shown["order of properties"] = [part.partition("\1")[0] for part in raw.split("\2")]
        length = shown.pop("bodyCutFrom", None) or len(row["body"])
        if row["topic"] == SystemTopic.OP:
            for name in ("body", "bodyCRC", "storeSize", "storedBodyLength"):
                shown.pop(name, None)
            return shown
        shown["body"] = f"{row['body'][:_BEGIN]} ({length})"
        return shown


def _is_dead_letter(row: Row) -> bool:
    """Return whether a record is a dead letter, or waits in the delay topic to become one."""
    return any(
        topic.startswith(TopicPrefix.DEAD_LETTER) for topic in (row["topic"], row["properties"].get("REAL_TOPIC", ""))
    )


def _is_unordered(row: Row, topic: str) -> bool:
    """Return whether the place of a message depends on concurrent listeners or on answers to checks."""
    if topic in (SystemTopic.SCHEDULE, SystemTopic.OP, SystemTopic.OFFSET_MOVED) or topic.startswith(
        ("%RETRY%", "%DLQ%")
    ):
        return True
    was_checked = PropertyName.TRANSACTION_CHECK_TIMES in row["properties"]
    return was_checked and topic != SystemTopic.HALF


Logs = Mapping[str, Log]
"""Logs by broker."""


def _records(broker: str, theirs: Log, ours: Log) -> Iterator[Difference]:
    """Compare the records of each queue in order."""
    wanted, found = _by_queue(theirs), _by_queue(ours)
    for queue in sorted({*wanted, *found}):
        for text in _sequences(wanted.get(queue, []), found.get(queue, [])):
            yield Difference("log", topic=queue[0], text=f"{broker}/{queue[1]}, {text}")


def _by_queue(log: Log) -> dict[tuple[str, int], list[Row]]:
    """Return the messages, with those whose order is free sorted to the end."""
    queues: dict[tuple[str, int], list[Row]] = defaultdict(list)
    for row in log.rows:
        queues[row["topic"], row["queueId"]].append(log.comparable(row))
    for rows in queues.values():
        rows.sort(key=lambda row: str(row["commitLogOffset"]) if row["queueOffset"] == "any" else "")
    return queues


def _sends(played: Played, theirs: Logs, ours: Logs) -> Iterator[Difference]:
    for event in played.recording.events:
        sent = played.sent.get(event["seq"])
        if sent is None:
            continue
        outcome = played.recording.results.get(event["seq"], event)
        result = outcome.get("result")
        topic = _topic(event, result)
        if event["kind"] == "sent":
            if isinstance(sent, Exception) or sent.queue_offset != event["queueOffset"]:
                yield Difference("send", topic=topic, text=f"{event['seq']}: {sent}, recorded {event}")
        elif isinstance(sent, Exception) or result is None:
            if result is not None or not isinstance(sent, Exception):
                recorded = outcome.get("exception") or result
                yield Difference("send", topic=topic, text=f"{event['seq']}: {sent!r}, recorded {recorded}")
        else:
            queue = result["messageQueue"]
            wanted: Row = {
                "status": result["sendStatus"],
                "id": result["msgId"],
                "queue": (queue["topic"], queue["brokerName"], queue["queueId"]),
                "offset": result["queueOffset"],
            }
            found: Row = {
                "status": sent.status.value,
                "id": sent.message_id,
                "queue": tuple(sent.queue),
                "offset": sent.queue_offset,
            }
            if result["offsetMsgId"] is not None and event["kind"] != "sent_big":
                name = queue["brokerName"]
                wanted["offset id"] = [theirs[name].name_of_id(one) for one in result["offsetMsgId"].split(",")]
                found["offset id"] = [ours[name].name_of_id(one) for one in sent.offset_id.split(",")]
            if wanted != found:
                yield Difference("send", topic=topic, text=f"{event['seq']}: {unlike(wanted, found)}")


def _selectors(played: Played) -> Iterator[Difference]:
    """Compare the number of queues that selectors chose from, if it was recorded."""
    wanted = [event["queues"] for event in played.recording.of_kind("selector_sees")]
    if wanted and wanted != played.selected_from:
        yield Difference("selector", text=f"{played.selected_from}, recorded {wanted}")


def _topic(event: Row, result: Row | None) -> str:
    message = event.get("message") or (event.get("messages") or [{}])[0]
    topic: str = message.get("topic") or ((result or {}).get("messageQueue") or {}).get("topic", "")
    return topic


def _deliveries(played: Played, theirs: Logs, ours: Logs) -> Iterator[Difference]:
    """Compare deliveries by client and queue: in order where RocketMQ keeps it, else as a set."""
    recording = played.recording
    wanted: dict[tuple[str, str, str], list[Row]] = defaultdict(list)
    found: dict[tuple[str, str, str], list[Row]] = defaultdict(list)
    for event in recording.events:
        if event["kind"] == "deliver" and not is_direct(event):
            mq = event["mq"]
            where = event["client"], mq["topic"], f"{mq['brokerName']}/{mq['queueId']}"
            messages = [message for message in event["msgs"] if message["msgId"] not in recording.raced_halves]
            wanted[where] += [theirs[mq["brokerName"]].comparable(message, mq["topic"]) for message in messages]
    in_brief = {event["client"] for event in recording.events if event["kind"] == "deliver_short"}
    for row in played.delivered:
        mq = row["mq"]
        if row["client"] not in in_brief and row["msg"]["msgId"] not in recording.raced_halves:
            where = row["client"], mq.topic, f"{mq.broker_name}/{mq.queue_id}"
            found[where].append(ours[mq.broker_name].comparable(row["msg"], mq.topic))
    for client, topic, queue in sorted({*wanted, *found}):
        want, have = wanted[client, topic, queue], found[client, topic, queue]
        if client not in recording.orderly_clients:
            want, have = _sorted(want), _sorted(have)
        for text in _sequences(want, have):
            yield Difference("delivery", client=client, topic=topic, text=f"{queue}, {text}")


def _short_deliveries(played: Played) -> Iterator[Difference]:
    """Compare deliveries recorded in brief, by group, each message once: the instances' shares are a race."""
    recording = played.recording
    group_of = {event["client"]: event["group"] for event in recording.events if event["kind"] == "consumer_start"}
    wanted: dict[str, set[tuple[Any, ...]]] = defaultdict(set)
    found: dict[str, set[tuple[Any, ...]]] = defaultdict(set)
    fields: tuple[str, ...] = ()
    for event in recording.events:
        if event["kind"] == "deliver_short":
            told = ("topic", "queueId", "queueOffset", "reconsumeTimes", "msgId", "body", "MIN_OFFSET")
            fields = tuple(name for name in told if name in event)
            wanted[group_of[event["client"]]].add(_brief(event, fields))
    for row in played.delivered:
        group = group_of[row["client"]]
        if group in wanted:
            found[group].add(_brief({**row["msg"], **row["msg"]["properties"]}, fields))
    for group in wanted:
        for one in sorted(wanted[group] ^ found[group], key=str):
            who = "recorded only" if one in wanted[group] else "librmq only"
            yield Difference("delivery", group=group, text=f"{group}, {who}: {one}")


def _brief(row: Row, fields: tuple[str, ...]) -> tuple[Any, ...]:
    return tuple(row[name][:_BODY_IN_BRIEF] if name == "body" else row[name] for name in fields)


def _polls(played: Played, theirs: Log, ours: Log) -> Iterator[Difference]:
    """Compare by queue what polls returned between two moves of the position, whatever the size of each poll."""
    moves = ("seek", "assign")
    part, parts = 0, {}
    wanted: dict[tuple[str, int], list[Row]] = defaultdict(list)
    found: dict[tuple[str, int], list[Row]] = defaultdict(list)
    for event in played.recording.events:
        if event["kind"] == "assign" or (event["kind"] == "call" and event["what"].startswith(moves)):
            part += 1
        parts[event["seq"]] = part
        if event["kind"] == "poll_result":
            wanted[event["client"], part] += [theirs.comparable(message) for message in event["msgs"]]
    for row in played.polled:
        found[row["client"], parts[row["seq"]]].append(ours.comparable(row["msg"]))
    for client, number in sorted({*wanted, *found}):
        for text in _sequences(_sorted(wanted[client, number]), _sorted(found[client, number])):
            yield Difference("poll", client=client, text=f"part {number}, {text}")


def _checks(played: Played) -> Iterator[Difference]:
    """Compare the checked messages; all producers must take turns, and any may be first."""
    raced = played.recording.raced_halves
    wanted, found = (
        [event for event in events if event["message"]["properties"][UNIQUE_KEY] not in raced]
        for events in (played.recording.of_kind("check"), played.checked)
    )
    asked, answering = ({event["client"] for event in events} for events in (wanted, found))
    if asked != answering:
        yield Difference("check", text=f"asked are {answering}, recorded {asked}")
    want, have = Counter(map(_checked, wanted)), Counter(map(_checked, found))
    for one in sorted({*want, *have}, key=str):
        if want[one] != have[one]:
            yield Difference("check", text=f"{one}: {have[one]} times, recorded {want[one]}")


def _checked(event: Row) -> tuple[str, str, int]:
    properties = event["message"]["properties"]
    return properties[UNIQUE_KEY], properties[PropertyName.TRANSACTION_CHECK_TIMES], event["n"]


def _sorted(rows: list[Row]) -> list[Row]:
    return sorted(
        rows,
        key=lambda row: (
            row["queueId"],
            str(row["queueOffset"]).zfill(9),
            row["commitLogOffset"],
            row["reconsumeTimes"],
        ),
    )


def _sequences(wanted: list[Row], found: list[Row]) -> Iterator[str]:
    for number, (want, have) in enumerate(zip(wanted, found, strict=False)):
        if want != have:
            yield f"{number}: {unlike(want, have)}"
    if len(wanted) != len(found):
        longer = wanted if len(wanted) > len(found) else found
        rest = [row["commitLogOffset"] for row in longer[min(len(wanted), len(found)) :]]
        yield f"{len(found)} of them, recorded {len(wanted)}; more: {rest[:3]}"
