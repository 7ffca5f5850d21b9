"""The table `DEVIATIONS`: all deliberate differences of librmq, with reasons."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from librmq.message import record
from librmq.message.message import Message
from librmq.message.properties import PropertyName
from librmq.message.topics import SystemTopic
from tests.reference import Row
from tests.replay.reading import UNIQUE_KEY, Recording

__all__ = [
    "DEVIATIONS",
    "Deviation",
    "Difference",
    "breaks_client",
    "bytes_of_whole_mib",
    "is_direct",
    "unlike",
    "without_delay",
]


class Difference(NamedTuple):
    """A difference between librmq and the recording."""

    area: str
    """``log``, ``send``, ``delivery``, ``poll``, ``check``, ``progress``, ``queue``, ``config``, ``call``, ..."""
    topic: str = ""
    group: str = ""
    client: str = ""
    text: str = ""


class Deviation(NamedTuple):
    """A deliberate difference."""

    name: str
    reason: str
    covers: Callable[[Recording, Difference], bool] = lambda recording, difference: False
    """Tells whether this deviation covers a difference; never does if the replay itself does something else."""


def _of_a_topic_not_yet_known(recording: Recording, difference: Difference) -> bool:
    allocated = [(event["client"], event["group"], event["topic"]) for event in recording.of_kind("allocate")]
    who = difference.client, difference.group
    own = {topic for client, group, topic in allocated if client == who[0] or group == who[1]}
    is_of_topic = difference.area in ("delivery", "config") and bool(difference.topic)
    return is_of_topic and bool(own) and difference.topic not in {*own, difference.group}


def _of_a_refused_group(recording: Recording, difference: Difference) -> bool:
    refused = {event["client"] for event in recording.of_kind("refused")}
    clients = {event["client"] for event in recording.of_kind("allocate")} & refused
    groups = {event["group"] for event in recording.of_kind("allocate") if event["client"] in clients}
    return bool({difference.group, difference.topic.removeprefix("%RETRY%")} & groups) or difference.client in clients


def _over_long(recording: Recording, difference: Difference) -> bool:
    size = re.match(r"random body of (\d+) bytes", difference.text)
    is_too_long = size is not None and int(size[1]) > int(recording.broker_settings["mappedFileSizeCommitLog"])
    return difference.area == "refusal" and is_too_long and "MessageIllegalError" in difference.text


def _of_the_half_topic(recording: Recording, difference: Difference) -> bool:
    unused = all(row["topic"] != SystemTopic.HALF for row in recording.messages)
    return difference.area == "config" and difference.topic == SystemTopic.HALF and unused


def _after_a_race(recording: Recording, difference: Difference) -> bool:
    counted = (SystemTopic.HALF, SystemTopic.OP, SystemTopic.CHECK_MAX_TIME)
    finals = {row["topic"] for row in recording.messages if row["properties"].get(UNIQUE_KEY) in recording.raced_halves}
    numbers = difference.area in ("config", "progress", "queue", "log") and "offset" in difference.text.lower()
    return bool(recording.raced_halves) and numbers and difference.topic in (*counted, *finals)


def _of_those_given_up_early(recording: Recording, difference: Difference) -> bool:
    is_counted = difference.area in ("config", "queue") and difference.topic == SystemTopic.CHECK_MAX_TIME
    return is_counted and bool(recording.given_up_early)


def _of_a_retry_queue(recording: Recording, difference: Difference) -> bool:
    is_new = difference.text.endswith(("None, recorded {0: 0}", "{0: 0}, recorded None"))
    return difference.area == "config" and difference.topic.startswith("%RETRY%") and is_new


def _of_a_commit(recording: Recording, difference: Difference) -> bool:
    clients = {event["client"] for event in recording.of_kind("call") if event["what"].startswith("commit")}
    groups = {told["consumerGroup"] for client, told in recording.pull_consumers.items() if client in clients}
    return difference.area in ("config", "progress") and difference.group in groups


def _of_a_route_in_parts(recording: Recording, difference: Difference) -> bool:
    is_made_by_heartbeats = difference.topic.startswith("%RETRY%") and len(recording.stores) > 1
    return difference.area == "allocation" and is_made_by_heartbeats


def _between_heartbeats(recording: Recording, difference: Difference) -> bool:
    starts = [event for event in recording.of_kind("consumer_start") if event["group"] == difference.group]
    told = [set(event["subscription"]) for event in starts]
    of_some = set().union(*told).difference(*(set.intersection(*told),) if told else ())
    parts = difference.text.partition("): ")[2].split("; ")
    found = [re.fullmatch(r"(\S+): (None, recorded \{.*\}|\{.*\}, recorded None)", part) for part in parts]
    return difference.area == "subscription" and all(one is not None and one[1] in of_some for one in found)


def _of_compressed_bodies(recording: Recording, difference: Difference) -> bool:
    is_of_bytes = difference.area == "held" and difference.text.startswith("bytes: ") and ";" not in difference.text
    return is_of_bytes and any(row["sysFlag"] & record.COMPRESSED for row in recording.messages)


def _of_what_is_passed_at_once(recording: Recording, difference: Difference) -> bool:
    if difference.area == "delivery":
        return difference.topic in recording.topics_of_differing_instances
    said = re.search(r": (\{.*\}|\d+)(?: to \d+)?, recorded (\{.*\}|\d+|None)$", difference.text)
    if difference.area not in ("config", "progress") or said is None:
        return False
    have, want = (_numbers(ast.literal_eval(one)) for one in said.groups())
    is_filtered = difference.topic in recording.filtered_topics.get(difference.group, ())
    return want.keys() <= have.keys() and all(
        number > want[key] and is_filtered if key in want else not want or difference.group == ""
        for key, number in have.items()
        if want.get(key) != number
    )


def _numbers(told: object, key: str = "") -> dict[str, int]:
    """Return the numbers in nested tables by the path of their keys."""
    if isinstance(told, Mapping):
        return {path: number for name, one in told.items() for path, number in _numbers(one, f"{key}/{name}").items()}
    return {key: told} if isinstance(told, int) else {}


def _empty_answer(recording: Recording, difference: Difference) -> bool:
    return difference.area == "empty answer"


DEVIATIONS: Final = (
    Deviation(
        "the over-long message",
        "A message longer than a file of the log is answered as stored by RocketMQ, and lost behind a blank "
        "record. librmq refuses it. Blank records are not compared.",
        _over_long,
    ),
    Deviation(
        "a route is known at once",
        "Clients of RocketMQ learn of a topic that a send has made up to 30 s later. librmq's know it at once, and "
        "may have consumed what RocketMQ's had not yet heard of.",
        _of_a_topic_not_yet_known,
    ),
    Deviation(
        "a filter that does not compile",
        "RocketMQ's client has joined, and asked for its progress, before the broker refuses the filter. librmq "
        "refuses it where the consumer subscribes.",
        _of_a_refused_group,
    ),
    Deviation(
        "a route known in part",
        "Heartbeats make the retry topic of a group broker by broker. A client of RocketMQ that asks in between "
        "sees a part of them until it asks again, 30 s later; librmq's see all of them.",
        _of_a_route_in_parts,
    ),
    Deviation(
        "a commit is stored",
        "RocketMQ's commitSync notes progress in the client, which tells the broker by time, or never. librmq's "
        "commit returns when the broker has it.",
        _of_a_commit,
    ),
    Deviation(
        "what a pull passes is progress at once",
        "RocketMQ's client hears up to 15 s later, when the hold of its pull ends, which messages its filter left out, "
        "and that a queue in which it found nothing begins at its end. librmq counts both as progress at once, so that "
        "a lag has no message that the group does not get. So instances with different filters skip more of each "
        "other's messages.",
        _of_what_is_passed_at_once,
    ),
    Deviation(
        "a half message given up and committed",
        "A pass of RocketMQ may meet its own copy of a half message, give it up, and yet hear that it is "
        "committed. Here a pass judges what was there when it began. Such messages are left out, and the numbers that "
        "they shift.",
        _after_a_race,
    ),
    Deviation(
        "a half message given up by the pass that put it back",
        "A pass of RocketMQ 4.9 may meet its own copy of a half message and give it up at once, though its producer "
        "has just been asked and may still roll it back. Here it is given up by the next pass, and only if no answer "
        "has come. Their records among those given up are left out, and how many these are.",
        _of_those_given_up_early,
    ),
    Deviation(
        "the retry queue of a new group",
        "A client of RocketMQ takes it at once, or up to 20 s later: then no progress is stored for it.",
        _of_a_retry_queue,
    ),
    Deviation(
        "the topic of half messages",
        "RocketMQ's check makes it even where there never is a transaction, librmq the first half message.",
        _of_the_half_topic,
    ),
    Deviation(
        "nothing found",
        "Asking for a message that is not there is an error in RocketMQ, and an empty answer here.",
        _empty_answer,
    ),
    Deviation(
        "bytes that a queue holds",
        "RocketMQ counts whole MiB, so that a limit of 1 MiB ends pulling from 2 MiB on; librmq counts bytes. The "
        "replay sets the limit to where RocketMQ's is.",
    ),
    Deviation(
        "heartbeats that repeat",
        "Clients of RocketMQ repeat their heartbeats, and each that does not name a topic takes it away from its "
        "group until another's comes. librmq's tell what changed. Whether the broker knows a topic that some instances "
        "lack is a matter of moments there.",
        _between_heartbeats,
    ),
    Deviation(
        "compressed bodies that a queue holds",
        "Clients of RocketMQ hold bodies decompressed, and count them so; librmq's hold them as they are stored.",
        _of_compressed_bodies,
    ),
    Deviation(
        "a result below -1",
        "RocketMQ's client fails on an acknowledged index below -1, and neither removes nor sends back the batch. "
        "librmq takes it as a failure of the listener. In the replay that listener never ends.",
    ),
    Deviation(
        "a producer is known at once",
        "A producer of RocketMQ tells brokers of itself 1 s after its start, and is asked for no transaction "
        "before. librmq's does so when it starts. In the replay it starts later, unless it sends before that.",
    ),
    Deviation(
        "the delay of a half message",
        "RocketMQ's client takes it away without a word, librmq refuses the message. The replay takes it away.",
    ),
    Deviation(
        "turns by thread",
        "RocketMQ counts by thread whose turn among the queues it is, and asynchronous sends have threads of their "
        "own. librmq counts by producer. The replay gives each asynchronous send the turn of its own.",
    ),
    Deviation(
        "consuming directly",
        "RocketMQ's administration can have a client consume a message on the spot, past its queue. librmq's "
        "cannot: those deliveries are left out.",
    ),
    Deviation(
        "the cause of a dead letter",
        "librmq's dead letters keep the exception of the last attempt as a property, RocketMQ 4.9's do not. The "
        "property is left out of the comparison, and with it the record's size and the order of properties.",
    ),
    Deviation(
        "delay levels that are due together",
        "In RocketMQ 4.9 each level has a timer of its own, so that messages of two levels which are due within one "
        "look of 100 ms come in either order. Here the lower level comes first. Their order is not compared.",
    ),
    Deviation(
        "a failure after the consume timeout",
        "RocketMQ 4.9 sends a message back when its listener has exceeded the consume timeout, and once more when that "
        "listener fails, so that it comes twice. librmq sends it back once. No recorded listener takes that long.",
    ),
    Deviation(
        "one-way sends",
        "RocketMQ raises where the broker of a one-way send can't be connected to, librmq logs it. Neither sends "
        "again: what is stored is compared.",
    ),
)


def breaks_client(answer: Row) -> bool:
    """Return whether RocketMQ's client fails on a listener's result."""
    return bool(answer.get("ackIndex", 0) < -1)


def bytes_of_whole_mib(limit_mib: int) -> int:
    """Return the limit in bytes that stops pulling at the same size as this limit in whole MiB."""
    return ((limit_mib + 1) << 20) - 1


def is_direct(event: Row) -> bool:
    """Return whether an administrator requested a ``deliver`` event."""
    return any(message["brokerName"] is None for message in event["msgs"])


def without_delay(message: Message) -> Message:
    message.properties.pop(PropertyName.DELAY, None)
    return message


def unlike(want: Mapping[str, Any], have: Mapping[str, Any]) -> str:
    """Describe the differences between two mappings."""
    parts = []
    for name in sorted({*want, *have}):
        one, other = want.get(name), have.get(name)
        if isinstance(one, Mapping) and isinstance(other, Mapping) and one != other:
            parts.append(f"{name} ({unlike(one, other)})")
        elif one != other:
            parts.append(f"{name}: {other!r:.200}, recorded {one!r:.200}")
    return "; ".join(parts)
