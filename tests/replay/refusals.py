"""The part of a replay for calls that were refused or only described in words; it reconstructs them."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any, Final

from librmq.client.producer import Producer
from librmq.consumer import PushConsumer
from librmq.errors import RmqError
from librmq.message.message import Message
from tests.reference import Row
from tests.replay.stage import Stage

__all__ = ["Refusals"]

_MIB: Final = re.compile(r"body of (\d+) MiB \+ (\d+)")
_BYTES: Final = re.compile(r"random body of (\d+) bytes")
_PROPERTY: Final = re.compile(r"one property of (\d+) characters")


class Refusals:
    """Each ``on_kind`` method repeats an event, and its result is noted under the event's ``seq``."""

    def __init__(self, stage: Stage, producers: dict[str, Producer]) -> None:
        self.stage = stage
        self.recording = stage.recording
        self._producers = producers

    def _note(self, event: Row, call: Callable[[], Any]) -> None:
        try:
            self.stage.played.seen[event["seq"]] = call()
        except RmqError as error:
            self.stage.played.seen[event["seq"]] = error

    def on_refused(self, event: Row) -> None:
        name = event["what"].rpartition(" ")[2]
        if event["what"].startswith("putUserProperty"):
            given = {"with empty value": {"name": ""}, "with empty name": {"": "value"}}
            properties = given.get(event["what"].partition(" ")[2], {name: "value"})
            self._note(event, lambda: Message("T", b"x", properties=properties))
        elif event["what"].startswith("SQL"):
            self._note(event, lambda: self._subscribe(event["client"]))

    def _subscribe(self, client: str) -> None:
        told = json.loads(next(row["body"] for row in self.recording.requests("HEART_BEAT") if row["client"] == client))
        data = told["consumerDataSet"][0]
        consumer = PushConsumer(self.stage.route, data["groupName"], instance_name=client)
        for subscription in data["subscriptionDataSet"]:
            if subscription["expressionType"] == "SQL92":
                consumer.subscribe(subscription["topic"], sql=subscription["subString"])

    def on_send_batch_result(self, event: Row) -> None:
        topic = self._topic()
        batches = {
            "two topics": [Message(topic, b"x"), Message(f"{topic}2", b"x")],
            "delay level": [Message(topic, b"x", delay_level=1)],
            "different wait flags": [Message(topic, b"x"), Message(topic, b"x", wait_store_ok=False)],
            "retry topic": [Message("%RETRY%g", b"x")],
            "empty": [],
        }
        batch = batches.get(event.get("what", ""))
        if batch is not None:
            self._note(event, lambda: self._producers[event["client"]].send_batch(batch))

    def on_send_result(self, event: Row) -> None:
        form = event["form"]
        if found := _MIB.match(form):
            message = Message(self._topic(), bytes((int(found[1]) << 20) + int(found[2])))
        elif found := _BYTES.match(form):
            message = Message(self._topic(), random.Random(0).randbytes(int(found[1])))
        elif found := _PROPERTY.match(form):
            message = Message(self._topic(), b"x", properties={"long": "p" * int(found[1])})
        else:
            return
        self._note(event, lambda: self._producers[event["client"]].send(message))

    def _topic(self) -> str:
        return str(next(self.recording.of_kind("create_topic"))["topic"])
