"""Pull consumers and administration of a replay: calls that a recording tells of in words."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

from librmq.consumer import PullConsumer
from librmq.errors import RmqError
from librmq.message import MessageQueue, StoredMessage
from librmq.protocol import OffsetByTime, QueryMessages, ResetGroup, UpdateOffset, ViewMessage
from tests.reference import Row
from tests.replay.stage import Stage, describe

__all__ = ["Calls"]

_QUEUE: Final = re.compile(r"\bq(\d+)")


class Calls:
    """Each ``on_kind`` repeats an event."""

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
        """The consumer of a client; started, unless it is the first time."""
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
        """Shut down those that had left by then."""
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
            "seekToBegin": lambda: [consumer.seek_to_begin(one) for one in queues],
            "seekToEnd": lambda: [consumer.seek_to_end(one) for one in queues],
            "commitSync": consumer.commit,
            "commit ": lambda: consumer.commit({one: consumer.position(one) for one in queues}),
            "pause": lambda: consumer.pause(queues),
            "resume": lambda: consumer.resume(queues),
            "offsetForTimestamp": lambda: consumer.offset_by_time(queue, next(self._searched)),
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
        broker = self.stage.broker(event)
        words = what.split()
        if words[0] == "resetOffsetByTimestamp":
            group = words[1]
            timestamp_ms = int(words[-1]) if words[-1].lstrip("-").isdigit() else 0
            found = broker.call(ResetGroup(group, self._topic(group), timestamp_ms))
            return {f"{queue.topic}:{queue.queue_id}": value for queue, value in found.items()}
        if words[0] == "resetOffsetByTimestampOld":
            group, topic = words[1], self._topic(words[1])
            for row in event["result"]:
                middle = self._reset_time(event)
                offset = broker.call(OffsetByTime(topic, row["queueId"], middle))
                broker.call(UpdateOffset(group, topic, row["queueId"], offset))
            return None
        if words[0] == "viewMessage":
            return self._view(event, words[-1])
        if words[0].startswith("queryMessage") and "," not in what:
            key = re.search(r"(?:key )?(\w+) max (\d+)", what)
            if key is not None:
                topic = next(one["topic"] for one in self.recording.events if one["kind"] == "create_topic")
                found = broker.call(QueryMessages(topic, key[1], int(key[2])))
                return sorted(message.message_id for message in found)
        return NotImplemented

    def _view(self, event: Row, message_id: str) -> Any:
        return NotImplemented

    def _topic(self, group: str) -> str:
        """What a group subscribes to."""
        return next(
            topic
            for event in self.recording.events
            if event["kind"] == "consumer_start" and event["group"] == group
            for topic in event["subscription"]
            if not topic.startswith("%RETRY%")
        )

    def _reset_time(self, event: Row) -> int:
        """The time of the last reset to the middle."""
        return next(
            int(one["what"].rpartition(" ")[2])
            for one in self.recording.events
            if one["kind"] == "call" and one["what"].startswith("resetOffsetByTimestamp ") and "middle" in one["what"]
        )
