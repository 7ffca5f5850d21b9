"""What librmq does otherwise on purpose, with the reason: the one table of it, `DEVIATIONS`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from librmq import codec
from librmq.message import Message
from librmq.topics import AUTO_CREATE_TOPIC
from tests.reference import Row
from tests.replay.reading import Recording

__all__ = ["DEVIATIONS", "Deviation", "Difference", "breaks_client", "is_direct", "unlike", "without_delay"]


class Difference(NamedTuple):
    """Something that librmq did otherwise."""

    area: str
    """``log``, ``send``, ``delivery``, ``poll``, ``check``, ``progress``, ``queue``, ``config``, ``call``, ..."""
    topic: str = ""
    group: str = ""
    client: str = ""
    text: str = ""


class Deviation(NamedTuple):
    """A difference that is meant."""

    name: str
    reason: str
    covers: Callable[[Recording, Difference], bool] = lambda recording, difference: False
    """Whether a difference is this one; never, where the replay itself goes another way."""


def _to_own_topic(recording: Recording, difference: Difference) -> bool:
    own = (AUTO_CREATE_TOPIC, recording.broker_settings["brokerName"], recording.broker_settings["brokerClusterName"])
    return difference.area in ("log", "send") and difference.topic in own


def _of_a_topic_not_yet_known(recording: Recording, difference: Difference) -> bool:
    allocated = {
        (event["client"], event["topic"]) for event in recording.events if event["kind"] == "allocate"
    }
    return difference.area == "delivery" and bool(difference.client) and (
        (difference.client, difference.topic) not in allocated
        and any(event["client"] == difference.client and event["kind"] == "allocate" for event in recording.events)
    )


def _of_a_refused_group(recording: Recording, difference: Difference) -> bool:
    started = {event["group"] for event in recording.events if event["kind"] == "consumer_start"}
    refused = any(event["kind"] == "refused" for event in recording.events)
    return difference.area == "progress" and refused and difference.group not in started


DEVIATIONS: Final = (
    Deviation(
        "the broker's own topics",
        "TBW102 and the names of broker and cluster are templates and addresses, not topics: librmq refuses to send "
        "to them, which the original takes.",
        _to_own_topic,
    ),
    Deviation(
        "the over-long message",
        "A message longer than a file of the log is answered as stored by the original, and lost behind a blank "
        "record. librmq refuses it. Its body is not recorded, so it is not sent again; blank records are not compared.",
    ),
    Deviation(
        "a route is known at once",
        "Clients of the original learn of a topic that a send has made up to 30 s later. librmq's know it at once, and "
        "may have consumed what the original's had not yet heard of.",
        _of_a_topic_not_yet_known,
    ),
    Deviation(
        "a filter that does not compile",
        "The original's client has joined, and asked for its progress, before the broker refuses the filter. librmq "
        "refuses it where the consumer subscribes.",
        _of_a_refused_group,
    ),
    Deviation(
        "a result below -1",
        "The original's client fails on an acknowledged index below -1, and neither removes nor sends back the batch. "
        "librmq takes it as a failure of the listener. In the replay that listener never ends.",
    ),
    Deviation(
        "the delay of a half message",
        "The original's client takes it away without a word, librmq refuses the message. The replay takes it away.",
    ),
    Deviation(
        "turns by thread",
        "The original counts by thread whose turn among the queues it is, and asynchronous sends have threads of their "
        "own. librmq counts by producer. The replay gives each asynchronous send the turn of its own.",
    ),
    Deviation(
        "consuming directly",
        "The original's administration can have a client consume a message on the spot, past its queue. librmq's "
        "cannot: those deliveries are left out.",
    ),
    Deviation(
        "one-way sends",
        "The original raises where the broker of a one-way send can't be connected to, librmq logs it. Neither sends "
        "again: what is stored is compared.",
    ),
)


def breaks_client(answer: Row) -> bool:
    """Whether a listener's result is one that the original's client fails on."""
    return bool(answer.get("ackIndex", 0) < -1)


def is_direct(event: Row) -> bool:
    """Whether a ``deliver`` event is one that an administrator asked for."""
    return any(message["brokerName"] is None for message in event["msgs"])


def without_delay(message: Message) -> Message:
    """The message without its delay."""
    message.properties.pop(codec.PROPERTY_DELAY, None)
    return message


def unlike(want: Mapping[str, Any], have: Mapping[str, Any]) -> str:
    """What differs between two mappings."""
    parts = []
    for name in sorted({*want, *have}):
        one, other = want.get(name), have.get(name)
        if isinstance(one, Mapping) and isinstance(other, Mapping) and one != other:
            parts.append(f"{name} ({unlike(one, other)})")
        elif one != other:
            parts.append(f"{name}: {other!r:.200}, recorded {one!r:.200}")
    return "; ".join(parts)
