"""The parts of a message's page: its fields, its body, and the lines that make a test begin with it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Final

from librmq.console._tables import Cell, topic_link
from librmq.diagnosis import StoryEvent
from librmq.errors import RmqError
from librmq.formatting import moment, number
from librmq.message import StoredMessage

BODY_SIZE: Final = 64 << 10
"""The most bytes of a body that are shown."""


_MOODS: Final = {"dead": "bad", "given_up": "bad", "retried": "warn", "not_passed": "warn", "passed": "good"}


def events_of(story: Iterable[StoryEvent]) -> list[list[Cell]]:
    """Return the rows of a story."""
    return [
        [
            Cell(moment(event.at_ms) if event.at_ms is not None else ""),
            Cell(event.event, "", _MOODS.get(event.event, "")),
            topic_link(event.topic),
            Cell(f"{event.queue_id} / {event.queue_offset}" if event.queue_offset >= 0 else "", is_number=True),
            Cell(event.group or ""),
            Cell(event.note),
        ]
        for event in story
    ]


def body_of(message: StoredMessage, kind: str) -> Mapping[str, str]:
    """Return the body as text, JSON or hexadecimal digits; it is never unpickled or run."""
    try:
        body = message.decompressed_body(BODY_SIZE)
    except RmqError as error:
        return {"kind": "unreadable", "text": str(error)}
    cut = body[:BODY_SIZE]
    if kind != "hex":
        try:
            if kind != "text":
                return {"kind": "JSON", "text": _indented(message)}
        except (RmqError, ValueError, RecursionError):
            pass
        try:
            return {"kind": "text", "text": cut.decode("utf-8")}
        except UnicodeDecodeError:
            pass
    return {"kind": "hex", "text": cut[:4096].hex(" ", -4)}


def fields_of(message: StoredMessage) -> list[list[Cell]]:
    values = {
        "queue / offset": f"{message.queue_id} / {message.queue_offset}",
        "physical offset": number(message.physical_offset),
        "offset id": message.offset_id,
        "unique id": message.unique_key or "none",
        "born": f"{moment(message.born_timestamp_ms)} at {message.born_host[0]}",
        "flag": str(message.flag),
    }
    return [[Cell(name), Cell(value)] for name, value in values.items()]


def _indented(message: StoredMessage) -> str:
    if len(message.stored_body) > BODY_SIZE:
        raise ValueError("too long to be laid out")
    return json.dumps(message.json(), indent=2, ensure_ascii=False)[:BODY_SIZE]


def as_test(message: StoredMessage) -> str:
    """Return the lines that make a test begin with a message like this one."""
    body = message.decompressed_body(BODY_SIZE)
    own = {
        name: value
        for name, value in message.properties.items()
        if name not in ("TAGS", "KEYS", "UNIQ_KEY", "WAIT", "CLUSTER") and name.islower()
    }
    arguments = [repr(message.topic), repr(body[:2048])]
    arguments += [f"tags={message.tags!r}"] if message.tags else []
    arguments += [f"keys={' '.join(message.keys)!r}"] if message.keys else []
    arguments += [f"properties={own!r}"] if own else []
    return f"def test_this_message(rmq):\n    rmq.producer().send({', '.join(arguments)})\n    rmq.advance(seconds=1)"
