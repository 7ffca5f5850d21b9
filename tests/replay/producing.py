"""The producers of a replay: they send with the recorded unique ids, queues and local transactions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

from librmq.client import CheckedMessage, TransactionProducer
from librmq.client.producer import Producer
from librmq.client.queue_selectors import select_by_hash
from librmq.client.sender import SendResult
from librmq.errors import RmqError
from librmq.message import record
from librmq.message.message import Message, MessageQueue, StoredMessage
from librmq.protocol import PERM_WRITE, TransactionState
from librmq.runtime.runner import Step
from tests.reference import Row
from tests.replay.deviations import without_delay
from tests.replay.reading import UNIQUE_KEY
from tests.replay.runner import until
from tests.replay.stage import Stage, describe

__all__ = ["Producers"]

_COMPRESS_FROM: Final = 4096
_STATES: Final = {
    "COMMIT_MESSAGE": TransactionState.COMMIT,
    "ROLLBACK_MESSAGE": TransactionState.ROLLBACK,
    "UNKNOW": TransactionState.UNKNOWN,
    None: None,
}
_IN_TURN: Final = ("sync", "oneway", "transaction")


class Producers:
    """Each ``on_kind`` method repeats an event."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.recording = stage.recording
        self.producers: dict[str, Producer] = {}
        self._checks: dict[str, int] = {}

    def on_producer_start(self, event: Row) -> None:
        name, group = event["client"], event["group"]
        if name in self.recording.transactional_clients:
            producer: Producer = TransactionProducer(self.stage.route, group, self._checker(name), instance_name=name)
        else:
            avoid = bool(event.get("sendLatencyFaultEnable"))
            producer = Producer(self.stage.route, group, instance_name=name, avoid_slow_brokers=avoid)
        self.producers[name] = producer
        told_ms = self.recording.introduced(event)
        if told_ms is None:
            producer.start()
        else:
            self.stage.runner.wake(Step(f"{name} starts", lambda now_ms: _start(producer)), told_ms)

    def on_producer_shutdown(self, event: Row) -> None:
        self.producers.pop(event["client"]).shutdown()

    def beat(self, name: str) -> None:
        """Send a client's heartbeat to the brokers."""
        if name in self.producers:
            self.producers[name].client.beat()

    # ---- one message, or a batch

    def on_send(self, event: Row) -> None:
        key = self.recording.key_of(event)
        producer, form = self.producers[event["client"]], event["form"]
        message = self._message(event["message"], key)
        self._prepare(event, producer, key)
        if form == "sync_to_queue":
            self._note(event, lambda: producer.send(message, queue=event["args"]))
        elif form == "orderly":
            self._note(event, lambda: producer.send(message, selector=self._select, arg=event["args"]))
        elif form == "oneway":
            producer.send_oneway(message)
        elif form == "async":
            with _turn_of_its_own(producer, message.topic):
                self._note(event, lambda: producer.send(message))
        elif form == "transaction":
            assert isinstance(producer, TransactionProducer)
            execute = self._local(key)
            self._note(
                event, lambda: producer.send_in_transaction(without_delay(message), event["args"], execute=execute).sent
            )
        else:
            self._note(event, lambda: producer.send(message))

    def on_send_batch(self, event: Row) -> None:
        after = (self.recording.results.get(event["seq"]) or {}).get("messages_after") or []
        keys = [one["properties"].get(UNIQUE_KEY) for one in after] or [None] * len(event["messages"])
        producer = self.producers[event["client"]]
        self._prepare(event, producer, keys[0])
        batch = [self._message(told, key) for told, key in zip(event["messages"], keys, strict=True)]
        self._note(event, lambda: producer.send_batch(batch))

    def _select(self, queues: Sequence[MessageQueue], message: Message, key: object) -> MessageQueue:
        self.stage.played.selected_from.append(len(queues))
        return select_by_hash(queues, message, key)

    def _note(self, event: Row, send: Callable[[], SendResult]) -> None:
        try:
            self.stage.played.sent[event["seq"]] = send()
        except RmqError as error:
            self.stage.played.sent[event["seq"]] = error

    def _message(self, told: Row, key: str | None) -> Message:
        """Return the message of an event, with its whole body and with its properties in stored order."""
        stored = self.recording.stored.get(key or "")
        body = (told["body"] or "").encode() if stored is None else stored.body
        message = Message(told["topic"], body, flag=told["flag"])
        order = [] if stored is None else [name for name in stored.properties if name in told["properties"]]
        message.properties = {name: told["properties"][name] for name in (*order, *told["properties"])}
        if key:
            message.properties[UNIQUE_KEY] = key
        return message

    def _prepare(self, event: Row, producer: Producer, key: str | None) -> None:
        """Let time pass until the message was stored; give the producer the recorded settings and first turn."""
        stored = self.recording.stored.get(key or "")
        if stored is not None:
            self.stage.play_to(stored.store_timestamp_ms)
            producer.config = replace(producer.config, compress_from=_compress_from(stored))
        if key in self.recording.default_queues:
            queues = self.recording.default_queues[key or ""]
            producer.config = replace(producer.config, default_topic_queues=queues)
        told = event["messages"][0] if "messages" in event else event["message"]
        in_turn = event if event.get("form") == "async" else self._next_in_turn(event, told["topic"])
        queue = None if in_turn is None else self._queue_of(in_turn)
        if queue is not None:
            data = sorted(self.stage.route.topic_route(told["topic"]), key=lambda one: one.broker_name)
            writable = [one for one in data if one.permission & PERM_WRITE]
            self.stage.runner.begin_at(
                queue, [(one.broker_name, number) for one in writable for number in range(one.write_queues)]
            )

    def _next_in_turn(self, event: Row, topic: str) -> Row | None:
        for later in self.recording.events_from(event["seq"]):
            if later["client"] == event["client"] and (
                (later["kind"] == "send" and later["form"] in _IN_TURN and later["message"]["topic"] == topic)
                or (later["kind"] == "send_batch" and later["messages"][0]["topic"] == topic)
            ):
                return later
        return None

    def _queue_of(self, event: Row) -> tuple[str, int] | None:
        """Return broker and queue of the event's message."""
        result = (self.recording.results.get(event["seq"]) or {}).get("result") or {}
        queue = result.get("messageQueue")
        if queue is not None:
            return queue["brokerName"], queue["queueId"]
        stored = self.recording.stored.get(self.recording.key_of(event) or "")
        if stored is None:
            return None
        return self.recording.broker_settings["brokerName"], stored.queue_id

    # ---- sends recorded in brief, whose messages are in the log

    def on_sent(self, event: Row) -> None:
        self._note(event, lambda: self._again(event, self.recording.stored[event["msgId"]], event["queueId"]))

    def on_sent_big(self, event: Row) -> None:
        key, queue = event["result"]["msgId"], event["result"]["messageQueue"]
        stored = self.recording.stored.get(key)
        if stored is None:  # it was deleted with its file: use the longest remaining message of its topic
            of_topic = (one for one in self.recording.stored.values() if one.topic == queue["topic"])
            stored = max(of_topic, key=lambda one: one.size)
        self._note(event, lambda: self._again(event, stored, queue["queueId"], key))

    def on_sent_all(self, event: Row) -> None:
        for stored in list(self.recording.stored.values()):
            if stored.born_timestamp_ms <= event["at_ms"]:
                self._again(event, stored, stored.queue_id)

    def _again(self, event: Row, stored: StoredMessage, queue_id: int, key: str | None = None) -> SendResult:
        message = Message(stored.topic, stored.body, flag=stored.flag)
        message.properties = {name: value for name, value in stored.properties.items() if name != "CLUSTER"}
        if key is not None:
            message.properties[UNIQUE_KEY] = key
        producer = self.producers[event["client"]]
        producer.config = replace(producer.config, compress_from=_compress_from(stored))
        return producer.send(message, queue=queue_id)

    # ---- transactions

    def _local(self, key: str | None) -> Callable[[Message, Any], TransactionState | None]:
        answers = iter(self.recording.local_transactions.get(key or "", []))

        def execute(message: Message, arg: Any) -> TransactionState | None:
            return _state(next(answers))

        return execute

    def _checker(self, client: str) -> Any:
        async def check(message: CheckedMessage) -> TransactionState | None:
            key = message.message_id
            number = self._checks[key] = self._checks.get(key, 0) + 1
            shown = {**describe(message.half, None), "topic": message.topic, "properties": dict(message.properties)}
            self.stage.played.checked.append({"client": client, "n": number, "message": shown})
            answers = self.recording.checks[key]
            if number > len(answers):
                return TransactionState.UNKNOWN
            await until(answers[number - 1]["seq"])
            return _state(answers[number - 1])

        return check


def _start(producer: Producer) -> None:
    producer.start()


def _state(answer: Row) -> TransactionState | None:
    if answer["exception"] is not None:
        raise RuntimeError(answer["exception"]["message"])
    return _STATES[answer["state"]]


def _compress_from(stored: StoredMessage) -> int:
    """Return the size from which the producer compressed, as far as a message shows it."""
    size = len(stored.body)
    if stored.sys_flag & record.COMPRESSED:
        return min(_COMPRESS_FROM, size)
    return max(_COMPRESS_FROM, size + 1)


@contextmanager
def _turn_of_its_own(producer: Producer, topic: str) -> Iterator[None]:
    """RocketMQ counts turns per thread, and asynchronous sends run in other threads."""
    kept = producer._topics.pop(topic, None)
    yield
    if kept is not None:
        producer._topics[topic] = kept
