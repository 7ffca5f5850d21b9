"""Compares what librmq did with what was recorded, as far as the reference data say that it can be compared.

Times, ports and physical offsets differ from run to run, and so does the order of concurrent deliveries. A physical
offset is compared by what stands there: topic, unique id (or body), and the how manieth record of those it is.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

from librmq import brokerjson, codec
from librmq.levels import SCHEDULE_TOPIC
from tests.reference import Row
from tests.replay.driver import Played, describe
from tests.replay.reading import UNIQUE_KEY, Recording

__all__ = ["differences"]

_LEFT_OUT: Final = ("kind", "storeTimestamp", "bornTimestamp", "bornHost")
Address = Callable[[int], str]


class Log:
    """The records of a log, and a name for each that does not tell where it stands."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self.rows = list(rows)
        self._names: dict[int, str] = {}
        count: Counter[str] = Counter()
        for row in self.rows:
            name = f"{row['topic']} {row['properties'].get(UNIQUE_KEY) or row['body']}"
            count[name] += 1
            self._names[row["commitLogOffset"]] = f"{name} #{count[name]}"

    def name(self, physical_offset: int) -> str:
        """What stands at a physical offset."""
        return self._names.get(physical_offset, f"nothing at {physical_offset}")

    def name_of_id(self, offset_id: str) -> str:
        """What an offset id names; another text is itself."""
        try:
            host, physical_offset = codec.parse_offset_message_id(offset_id)
        except ValueError:
            return offset_id
        name = self._names.get(physical_offset)
        return offset_id if name is None else f"{name} of {codec.format_host(host)}"

    def comparable(self, row: Row, queue: str | None = None) -> Row:
        """A message without what differs from run to run; ``queue`` is the topic that it was read from."""
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
        if _is_unordered(row["topic"] if queue is None else queue):
            del shown["queueOffset"]
        if shown.pop("properties_raw", None) is not None:
            shown["order of properties"] = [part.partition("\1")[0] for part in row["properties_raw"].split("\2")]
        cut = shown.pop("bodyCutFrom", None)
        shown["body"] = f"{shown['body'][:100]} ({cut or len(shown['body'])})"
        return shown


def differences(played: Played) -> list[str]:
    """What librmq did otherwise, as lines; empty where all is equal."""
    recording = played.recording
    theirs = Log(recording.messages)
    name = recording.broker_settings["brokerName"]
    ours = Log(describe(message, None) for message in played.logs[name])
    found: list[str] = []
    found += _records(theirs, ours)
    found += _sends(played, theirs, ours)
    found += _deliveries(played, theirs, ours)
    found += _checks(played, theirs, ours)
    found += _observations(played)
    return found


def _records(theirs: Log, ours: Log) -> Iterator[str]:
    """Queue by queue, in order."""
    wanted, found = _by_queue(theirs), _by_queue(ours)
    for queue in sorted({*wanted, *found}):
        yield from _sequences(f"log {queue[0]}/{queue[1]}", wanted.get(queue, []), found.get(queue, []))


def _by_queue(log: Log) -> dict[tuple[str, int], list[Row]]:
    queues: dict[tuple[str, int], list[Row]] = defaultdict(list)
    for row in log.rows:
        queues[row["topic"], row["queueId"]].append(log.comparable(row))
    for (topic, _), rows in queues.items():
        if _is_unordered(topic):
            rows.sort(key=lambda row: str(row["commitLogOffset"]))
    return queues


def _is_unordered(topic: str) -> bool:
    """Whether the order of a topic is that in which concurrent listeners happened to end."""
    return topic == SCHEDULE_TOPIC or topic.startswith(("%RETRY%", "%DLQ%"))


def _sends(played: Played, theirs: Log, ours: Log) -> Iterator[str]:
    from tests.replay.driver import _results

    for seq, event in sorted(_results(played.recording).items()):
        if seq not in played.sent:
            continue
        sent = played.sent[seq]
        result = event["result"]
        if isinstance(sent, Exception):
            if result is not None:
                yield f"send {seq}: {sent!r}, recorded {result['sendStatus']}"
            continue
        if result is None:
            yield f"send {seq}: {sent}, recorded {event['exception']}"
            continue
        wanted = {
            "status": result["sendStatus"],
            "id": result["msgId"],
            "queue": result["messageQueue"],
            "offset": result["queueOffset"],
        }
        queue = sent.queue
        found = {
            "status": sent.status.value,
            "id": sent.message_id,
            "queue": {"topic": queue.topic, "brokerName": queue.broker_name, "queueId": queue.queue_id},
            "offset": sent.queue_offset,
        }
        if result["offsetMsgId"] is not None:
            wanted["offset id"] = [theirs.name_of_id(one) for one in result["offsetMsgId"].split(",")]
            found["offset id"] = [ours.name_of_id(one) for one in sent.offset_id.split(",")]
        if wanted != found:
            yield f"send {seq}: {_unlike(wanted, found)}"


def _deliveries(played: Played, theirs: Log, ours: Log) -> Iterator[str]:
    """Client by client and queue by queue: in order where it is kept, else as a set."""
    recording = played.recording
    wanted: dict[tuple[str, str], list[Row]] = defaultdict(list)
    found: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for event in recording.events:
        if event["kind"] == "deliver":
            mq = event["mq"]
            for message in event["msgs"]:
                wanted[event["client"], f"{mq['topic']}/{mq['brokerName']}/{mq['queueId']}"].append(
                    theirs.comparable(message, mq["topic"])
                )
    for row in played.delivered:
        mq = row["mq"]
        message = {k: v for k, v in row["msg"].items() if k not in ("storedBodyLength", "properties_raw")}
        found[row["client"], f"{mq.topic}/{mq.broker_name}/{mq.queue_id}"].append(ours.comparable(message, mq.topic))
    for client, queue in sorted({*wanted, *found}):
        want, have = wanted[client, queue], found[client, queue]
        if client not in recording.orderly_clients:
            want, have = _sorted(want), _sorted(have)
        yield from _sequences(f"delivered to {client} from {queue}", want, have)


def _checks(played: Played, theirs: Log, ours: Log) -> Iterator[str]:
    wanted = [e for e in played.recording.events if e["kind"] == "check"]
    for what, of in (("message", _checked), ("producer", lambda event: event["client"])):
        want, have = Counter(map(of, wanted)), Counter(map(of, played.checked))
        for one in sorted({*want, *have}):
            if want[one] != have[one]:
                yield f"checks by {what} {one}: {have[one]}, recorded {want[one]}"


def _checked(event: Row) -> str:
    properties = event["message"]["properties"]
    return (
        f"{properties[UNIQUE_KEY]} for the {properties['TRANSACTION_CHECK_TIMES']}. time ({event['message']['body']})"
    )


def _observations(played: Played) -> Iterator[str]:
    for event in played.recording.events:
        if event["seq"] not in played.seen:
            continue
        have = played.seen[event["seq"]]
        want = event.get("queues") if event["kind"] == "queue_offsets" else event.get("table")
        if have == want:
            continue
        if isinstance(want, dict):
            yield f"{event['kind']} at {event['seq']} ({event.get('label')}): {_unlike(want, have)}"
        else:
            yield f"{event['kind']} at {event['seq']} ({event.get('label')}): {have}, recorded {want}"


def _sorted(rows: list[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: (row.get("queueOffset", 0), row["commitLogOffset"], row["reconsumeTimes"]))


def _sequences(what: str, wanted: list[Row], found: list[Row]) -> Iterator[str]:
    for number, (want, have) in enumerate(zip(wanted, found, strict=False)):
        if want != have:
            yield f"{what}, {number}: {_unlike(want, have)}"
    if len(wanted) != len(found):
        more = [row["commitLogOffset"] for row in (wanted if len(wanted) > len(found) else found)]
        yield f"{what}: {len(found)}, recorded {len(wanted)}; {more[min(len(wanted), len(found)) :][:3]}"


def _unlike(want: Mapping[str, Any], have: Mapping[str, Any]) -> str:
    parts = []
    for name in sorted({*want, *have}):
        one, other = want.get(name), have.get(name)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            parts.append(f"{name} ({_unlike(one, other)})" if one != other else "")
        elif one != other:
            parts.append(f"{name}: {other!r:.200}, recorded {one!r:.200}")
    return "; ".join(part for part in parts if part)
