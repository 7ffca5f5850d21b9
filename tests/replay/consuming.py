"""The push consumers of a replay; their listeners answer each delivery as the recorded ones did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final

from librmq.client.allocation import allocate_averagely
from librmq.consumer import DeliveredMessage, OrderlyResult, PushConsumer
from librmq.listener import ReconsumeLater, SuspendQueue
from librmq.message.message import MessageQueue
from librmq.protocol import ConsumeFrom, MessageModel, UpdateOffset
from tests.reference import Row
from tests.replay.deviations import breaks_client, bytes_of_whole_mib
from tests.replay.reading import NEVER
from tests.replay.runner import until
from tests.replay.stage import CLIENT, Stage, describe

__all__ = ["Consumers"]

_FROM: Final = {
    "CONSUME_FROM_FIRST_OFFSET": ConsumeFrom.FIRST,
    "CONSUME_FROM_LAST_OFFSET": ConsumeFrom.LAST,
    "CONSUME_FROM_TIMESTAMP": ConsumeFrom.TIMESTAMP,
}
_AT_ONCE_MS: Final = 1  # such a listener does not wait until the recorded broker has delivered
_IN_PROSE: Final = {
    "consumeTimeout": "consume_timeout",
    "pullBatchSize": "pull_batch_size",
    "pullThresholdForQueue": "max_held_messages",
    "pullThresholdSizeForQueue": "max_held_bytes",
    "consumeConcurrentlyMaxSpan": "max_span",
}


class Consumers:
    """Each ``on_kind`` method repeats an event."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.recording = stage.recording
        self.consumers: dict[str, PushConsumer] = {}
        self._times: Counter[tuple[str, str]] = Counter()
        self._timestamps: dict[str, int] = {}
        self._leaving: list[tuple[int, str]] = []

    def on_consume_timestamp(self, event: Row) -> None:
        at = datetime.strptime(event["value"], "%Y%m%d%H%M%S").replace(tzinfo=UTC)
        self._timestamps[event["client"]] = round(at.timestamp() * 1000)

    def on_consumer_start(self, event: Row) -> None:
        name, group = event["client"], event["group"]
        if all(consumer.group != group for consumer in self.consumers.values()):
            broker = self.stage.broker(event)
            for topic, queue_id, queue_offset in self.recording.progress_before.get(group, []):
                broker.call(UpdateOffset(group, topic, queue_id, queue_offset))
        consumer = PushConsumer(self.stage.route, group, instance_name=name, **self._settings(event))
        listener = self._listener(name, group, consumer)
        for topic, told in event["subscription"].items():
            if not topic.startswith("%RETRY%"):
                kind = "sql" if told["expressionType"] == "SQL92" else "tags"
                consumer.subscribe(topic, batch=True, must_return=True, **{kind: told["subString"]})(listener)
        consumer.start()
        self.consumers[name] = consumer

    def _settings(self, event: Row) -> dict[str, Any]:
        name, group = event["client"], event["group"]
        settings: dict[str, Any] = {
            "model": MessageModel[event["messageModel"]],
            "consume_from": _FROM[event["consumeFromWhere"]],
            "consume_from_timestamp_ms": self._timestamps.get(name),
            "batch_size": event["consumeMessageBatchMaxSize"],
            "max_reconsume_times": None if event["maxReconsumeTimes"] < 0 else event["maxReconsumeTimes"],
            "orderly": name in self.recording.orderly_clients,
            "strategy": self._allocating(name, group),
            "offsets_folder": CLIENT,
            "files": self.stage.files,
            "shutdown_timeout": 0,
        }
        told = self.recording.client_settings(group)
        settings.update({ours: told[theirs] for theirs, ours in _IN_PROSE.items() if theirs in told})
        if "max_held_bytes" in settings:
            settings["max_held_bytes"] = bytes_of_whole_mib(settings["max_held_bytes"])
        if self.recording.durations.get(name):
            settings["threads"] = 1
        return settings

    def beat(self, name: str) -> None:
        """Send a client's heartbeat to its brokers."""
        if name in self.consumers and self.consumers[name].is_running:
            self.consumers[name].client.beat()

    def on_consumer_shutdown_begin(self, event: Row) -> None:
        self._leaving.append((self.recording.left_at(event), event["client"]))

    def leave(self, seq: int) -> None:
        """Shut down the consumers that had left their groups before or at the event with this number."""
        while self._leaving and self._leaving[0][0] <= seq:
            self.consumers[self._leaving.pop(0)[1]].shutdown()

    # ---- listeners

    def _listener(self, name: str, group: str, consumer: PushConsumer) -> Any:
        broadcasts = consumer.config.model is MessageModel.BROADCASTING
        scope = name if broadcasts else group

        async def listen(messages: list[DeliveredMessage]) -> Any:
            answers = [self._delivered(name, scope, message) for message in messages]
            await self._work(name, messages)
            for answer in answers:
                if answer is not None and breaks_client(answer):
                    await until(NEVER)
                elif answer is not None and answer.get("took_ms", NEVER) > _AT_ONCE_MS:
                    await until(answer["seq"])
            return _outcome(answers)

        return listen

    def _delivered(self, name: str, scope: str, message: DeliveredMessage) -> Row | None:
        """Note a delivery, and return the recorded listener's answer."""
        key = scope, message.message_id
        self.stage.played.delivered.append(
            {"client": name, "mq": message.queue, "msg": describe(message, message.queue)}
        )
        number = self._times[key]
        self._times[key] += 1
        known = self.recording.answers.get(key, [])
        return known[number] if number < len(known) else None

    async def _work(self, name: str, messages: list[DeliveredMessage]) -> None:
        """Take the listener's time if it is known only from its deliveries."""
        duration = self.recording.durations.get(name)
        if duration is None:
            return
        release = self.recording.release(name)
        if release is not None and messages[0].queue_offset == 0:
            await until(release["seq"])
        elif duration:
            await until(at_ms=self.stage.runner.now_ms() + duration)

    def _allocating(self, name: str, group: str) -> Any:
        usual = self.recording.broker_settings["brokerName"]

        def short(queue: MessageQueue) -> int | str:
            return queue.queue_id if queue.broker_name == usual else f"{queue.broker_name}:{queue.queue_id}"

        def allocate(client_id: str, queues: Sequence[MessageQueue], clients: Sequence[str]) -> list[MessageQueue]:
            share = allocate_averagely(client_id, queues, clients)
            self.stage.played.allocated.append(
                {
                    "client": name,
                    "group": group,
                    "topic": queues[0].topic,
                    "cid": client_id,
                    "cidAll": list(clients),
                    "queuesAll": [short(queue) for queue in queues],
                    "result": [short(queue) for queue in share],
                }
            )
            return share

        return allocate

    def note_held(self) -> None:
        """Note the largest amounts that the consumers have held so far."""
        for name, consumer in self.consumers.items():
            most = self.stage.played.held.setdefault(name, {"count": 0, "bytes": 0, "span": 0})
            for assigned in consumer.assigned.values():
                now = {"count": len(assigned.messages), "bytes": assigned.messages.size, "span": assigned.messages.span}
                most.update({what: max(most[what], value) for what, value in now.items()})


def _outcome(answers: list[Row | None]) -> Any:
    """Return or raise what makes librmq's listener answer like the recorded one."""
    answer = next((one for one in answers if one is not None), None)
    if answer is None or answer["kind"] == "done":
        return True
    status = answer["status"]
    if answer["exception"] is not None:
        raise RuntimeError(answer["exception"]["message"])
    if status == "SUSPEND_CURRENT_QUEUE_A_MOMENT":
        suspend_ms = answer["suspendCurrentQueueTimeMillis"]
        raise SuspendQueue(seconds=None if suspend_ms < 0 else suspend_ms / 1000)
    if status == "RECONSUME_LATER":
        raise ReconsumeLater(delay_level=answer["delayLevelWhenNextConsume"])
    if status == "CONSUME_SUCCESS":
        consumed = [one is None or one["ackIndex"] >= one["position"] for one in answers]
        count = consumed.index(False) if False in consumed else len(consumed)
        if count < len(consumed) and answer["delayLevelWhenNextConsume"]:
            raise ReconsumeLater(delay_level=answer["delayLevelWhenNextConsume"], consumed=count)
        return count - 1
    if status in ("COMMIT", "ROLLBACK"):
        return OrderlyResult[status]
    if status == "SUCCESS":
        return True if answer["autoCommit"] else OrderlyResult.HOLD
    return None
