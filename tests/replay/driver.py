"""Plays a recording: librmq gets the same calls at the same times.

A part repeats each event that is a call by its ``on_kind`` method. For each event that shows a state, it notes librmq's
state under the same ``seq``. Only events that RocketMQ produced by itself are compared.
"""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

from librmq.files.interface import file_size
from tests.reference import Row
from tests.replay.calls import Calls
from tests.replay.consuming import Consumers
from tests.replay.producing import Producers
from tests.replay.reading import Recording
from tests.replay.refusals import Refusals
from tests.replay.stage import STORE, Played, Stage
from tests.transactions_of_4 import HalfCheckOf4

__all__ = ["play"]


@patch("librmq.txn.HalfCheck", HalfCheckOf4)
def play(recording: Recording, before_ms: int = 0) -> Played:
    """Let librmq repeat a recording; brokers start this long before the recorded start."""
    stage = Stage(recording, before_ms)
    producers, consumers = Producers(stage), Consumers(stage)
    parts = (_Brokers(stage), producers, consumers, Calls(stage), Refusals(stage, producers.producers))
    runner, heartbeats = stage.runner, list(recording.heartbeats)
    if any(event["kind"] == "cached" for event in recording.events):
        runner.before_turn = consumers.note_held
    for event in recording.events:
        while stage.openings and stage.openings[0][0] <= event["at_ms"]:
            at, name = stage.openings.pop(0)
            stage.play_to(at)
            stage.open(name)
        while heartbeats and heartbeats[0][0] <= event["at_ms"]:
            at, client = heartbeats.pop(0)
            stage.play_to(at)
            producers.beat(client)
            consumers.beat(client)
        stage.play_to(recording.time_of(event))
        consumers.leave(event["seq"])
        for part in parts:
            act: Callable[[Row], None] | None = getattr(part, f"on_{event['kind']}", None)
            if act is not None:
                act(event)
        consumers.leave(event["seq"])
        runner.resume(event["seq"])
    for name in stage.brokers:
        stage.close(name)
    return stage.played


class _Brokers:
    """Repeats the steps of brokers and notes their states."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage

    def on_broker_shutdown(self, event: Row) -> None:
        self.stage.close(self.stage.recording.broker_of(event))

    def on_create_topic(self, event: Row) -> None:
        self.stage.broker(event).create_topic(
            event["topic"], event["readQueueNums"], write_queues=event["writeQueueNums"], permission=event["perm"]
        )

    def on_delete_files_manually(self, event: Row) -> None:
        """Delete the messages that were gone when the recording next looked at the queues."""
        store = self.stage.broker(event).store
        following = self.stage.recording.events_from(event["seq"])
        bounds = next(
            one for one in following if one["kind"] == "queue_offsets" and any(q["min"] for q in one["queues"])
        )
        first = [store.queue(bounds["topic"], one["queueId"]) for one in bounds["queues"]]
        offsets = [
            message.physical_offset
            for queue, one in zip(first, bounds["queues"], strict=True)
            if queue is not None
            for message in store.read(bounds["topic"], one["queueId"], one["min"], 1).messages
        ]
        store.flush()  # the deletion is durable
        store.writer.retention.delete_before(min(offsets))

    def on_queue_offsets(self, event: Row) -> None:
        store = self.stage.broker(event).store
        found = []
        for row in event["queues"]:
            begin, end = store.queue_range(event["topic"], row["queueId"])
            found.append({"queueId": row["queueId"], "min": begin, "max": end})
        self.stage.played.seen[event["seq"]] = found

    def on_file_client(self, event: Row) -> None:
        path = f"/client/{event['path']}"
        files = self.stage.files
        self.stage.played.seen[event["seq"]] = None if file_size(files, path) is None else files.read(path).decode()

    def on_file(self, event: Row) -> None:
        path = f"{STORE}/{event['path']}"
        files = self.stage.played.files[self.stage.recording.broker_of(event)]
        self.stage.played.seen[event["seq"]] = None if file_size(files, path) is None else files.read(path).decode()

    def on_subscription_at_broker(self, event: Row) -> None:
        broker = self.stage.broker(event)
        members = broker._context.clients.consumers.get(event["group"])
        self.stage.played.seen[event["seq"]] = (
            {}
            if members is None
            else {
                topic: {"subString": of.expression, "expressionType": of.expression_type}
                for topic, of in members.subscriptions.items()
            }
        )
