"""The part of a replay for pull consumers and administration: calls that a recording describes in words."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from librmq.consumer import PullConsumer
from librmq.errors import RmqError
from librmq.message.ids import parse_offset_message_id
from librmq.message.message import MessageQueue
from librmq.protocol import QueryMessages, QueueOffsetAt, ResetGroup, UpdateOffset, ViewMessage
from tests.reference import Row
from tests.replay.reading import UNIQUE_KEY
from tests.replay.stage import Stage, describe

__all__ = ["Calls"]

_QUEUE: Final = re.compile(r"\bq(\d+)")


class Calls:
    """Each ``on_kind`` method repeats an event."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.recording = stage.recording
        self.consumers: dict[str, PullConsumer] = {}
        self._searched = iter(self.recording.searched_times)

    # ---- pull consumers

    def on_poll(self, event: Row) -> None:
        self._shut_down(event)
        for message in self._consumer(event["client"]).poll(event["timeout"] / 1000):
            self.stage.played.polled.append(
                {
                    "client": event["client"],
                    "seq": event["seq"],
                    "mq": message.queue,
                    "msg": describe(message, message.queue),
                }
            )

    def on_assign(self, event: Row) -> None:
        self._shut_down(event)
        self._consumer(event["client"]).assign([self._queue(event["client"], number) for number in event["queues"]])

    def on_consumer_offsets_in_memory(self, event: Row) -> None:
        self._shut_down(event)

    def on_call(self, event: Row) -> None:
        self._shut_down(event)
        answer = self._administer if event["client"] == "admin" else self._pull
        try:
            found = answer(event)
        except RmqError as error:
            found = error
        if found is not NotImplemented:
            self.stage.played.seen[event["seq"]] = found

    def _consumer(self, name: str) -> PullConsumer:
        """Return a client's consumer; start it unless it has just been created."""
        consumer = self.consumers.get(name)
        if consumer is None:
            told = self.recording.pull_consumers[name]
            calls = [event["what"] for event in self.recording.of_kind("call") if event["client"] == name]
            consumer = self.consumers[name] = PullConsumer(
                self.stage.route,
                told["consumerGroup"],
                instance_name=name,
                pull_batch_size=int(told["maxMsgNums"]),
                auto_commit=not any(what.startswith("commit") and what[6] in "S " for what in calls),
            )
        elif not consumer.is_running:
            consumer.start()
        return consumer

    def _shut_down(self, event: Row) -> None:
        """Shut down the consumers that had left by the time of the event."""
        for name, consumer in self.consumers.items():
            if self.recording.left.get(name, event["at_ms"] + 1) <= event["at_ms"]:
                consumer.shutdown()

    def _queue(self, name: str, number: int) -> MessageQueue:
        return MessageQueue(
            self.recording.pull_consumers[name]["topic"], self.recording.broker_settings["brokerName"], number
        )

    def _pull(self, event: Row) -> Any:
        name, what = event["client"], event["what"]
        consumer = self._consumer(name)
        topic = self.recording.pull_consumers[name]["topic"]
        queues = [self._queue(name, int(number)) for number in _QUEUE.findall(what)] or [self._queue(name, 0)]
        queue = queues[0]
        subscribed = re.match(r"subscribe (Tag\w+)", what)
        if subscribed is not None:
            return consumer.subscribe(topic, tags=subscribed[1])
        if what == "fetchMessageQueues":
            return consumer.queues(topic)
        calls: dict[str, Callable[[], Any]] = {
            "poll before start": consumer.poll,
            "subscribe after assign": lambda: consumer.subscribe(topic),
            "assign after subscribe": lambda: consumer.assign(queues),
            "committed": lambda: consumer.committed(queue),
            "seekToBegin": lambda: deque(map(consumer.seek_to_begin, queues)),
            "seekToEnd": lambda: deque(map(consumer.seek_to_end, queues)),
            "commitSync": consumer.commit,
            "commit ": lambda: consumer.commit({one: consumer.position(one) for one in queues}),
            "pause": lambda: consumer.pause(queues),
            "resume": lambda: consumer.resume(queues),
            "offsetForTimestamp": lambda: consumer.queue_offset_at(queue, next(self._searched)),
            "seek": lambda: consumer.seek(queue, int((re.search(r"to (-?\d+)", what) or ["", "0"])[1])),
        }
        for begin, call in calls.items():
            if what.startswith(begin):
                found = call()
                return found if begin in ("committed", "offsetForTimestamp") else None
        return NotImplemented

    # ---- administration

    def _administer(self, event: Row) -> Any:
        what = event["what"]
        words = what.split()
        broker = self.stage.broker(event)
        if words[0] == "resetOffsetByTimestamp":
            group = words[1]
            timestamp_ms = int(words[-1]) if words[-1].lstrip("-").isdigit() else self._middle()
            offsets = broker.call(ResetGroup(group, self._topic(group), timestamp_ms))
            return {f"{queue.topic}:{queue.queue_id}": queue_offset for queue, queue_offset in offsets.items()}
        if words[0] == "resetOffsetByTimestampOld":
            return self._reset(event, words[1])
        if words[0] == "viewMessage":
            return self._view(event, words[-1])
        asked = re.match(r"queryMessage (?:key )?(\w+) max (\d+)", what)
        if asked is not None:
            return self._query(event, asked[1], int(asked[2]))
        return NotImplemented

    def _reset(self, event: Row, group: str) -> dict[int, int]:
        """Set the progress of a group that is not running."""
        topic, broker, found = self._topic(group), self.stage.broker(event), {}
        for row in event["result"]:
            queue_id = row["queueId"]
            found[queue_id] = broker.call(QueueOffsetAt(topic, queue_id, self._middle()))
            broker.call(UpdateOffset(group, topic, queue_id, found[queue_id]))
        return found

    def _view(self, event: Row, message_id: str) -> Any:
        """Return a message by its offset id or unique id, or [] if there is none."""
        if message_id == "record":
            return self._viewed(event, 1)
        if message_id == "end":
            return self._viewed(event, self.stage.broker(event).store.log.end)
        if event["what"].startswith("viewMessage topic"):
            return self._query(event, message_id, 1) if message_id in self.recording.stored else NotImplemented
        _, physical_offset = parse_offset_message_id(message_id)
        there = (row for row in self.recording.messages if row["commitLogOffset"] == physical_offset)
        key = next((row["properties"][UNIQUE_KEY] for row in there), None)
        here = (message.physical_offset for message in self.stage.broker(event).store if message.unique_key == key)
        return self._viewed(event, physical_offset if key is None else next(here))

    def _viewed(self, event: Row, physical_offset: int) -> list[str]:
        message = self.stage.broker(event).call(ViewMessage(physical_offset))
        return [] if message is None else [message.message_id]

    def _query(self, event: Row, key: str, most: int) -> list[str]:
        topic = next(self.recording.of_kind("create_topic"))["topic"]
        found = self.stage.broker(event).call(QueryMessages(topic, key, most))
        return sorted(message.message_id for message in found)

    def _topic(self, group: str) -> str:
        started = next(event for event in self.recording.of_kind("consumer_start") if event["group"] == group)
        return next(str(topic) for topic in started["subscription"] if not topic.startswith("%RETRY%"))

    def _middle(self) -> int:
        """Return the time to which the reset to the middle goes."""
        texts = (event["what"] for event in self.recording.of_kind("call"))
        return next(int(found[1]) for text in texts if (found := re.search(r"middle (\d+)", text)))
