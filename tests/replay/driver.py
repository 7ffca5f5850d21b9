"""Plays a recording: the same calls at the same times, answered by librmq; listeners answer as the recorded ones did.

Each event that is a call has a method ``_on_kind`` here; each that is an observation is noted in `Played.seen`, as
librmq shows it at that moment, under the ``seq`` of the event.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Final

from librmq import codec
from librmq.broker import Broker, BrokerSettings
from librmq.client import Client
from librmq.cluster import RouteTable
from librmq.config import StoreConfig
from librmq.consumer import DeliveredMessage, PushConsumer
from librmq.consumer.orderly import Transaction
from librmq.errors import RmqError
from librmq.files import MemoryFiles
from librmq.listener import ReconsumeLater, SuspendQueue
from librmq.message import Message, MessageQueue, StoredMessage
from librmq.producer import Producer, SendResult
from librmq.protocol import ConsumeFrom, MessageModel, TransactionState
from librmq.rebalance import allocate_averagely
from librmq.selectors import select_by_hash
from librmq.transactionproducer import CheckedMessage, TransactionProducer
from librmq.txn import TransactionSettings
from tests.reference import Row
from tests.replay.deviations import breaks_client
from tests.replay.reading import UNIQUE_KEY, Recording
from tests.replay.runner import ReplayRunner, until

__all__ = ["Played", "play"]

FOLDER: Final = "/client"
"""Where broadcasting clients keep their progress."""
_NEVER: Final = 1 << 62
_FROM: Final = {
    "CONSUME_FROM_FIRST_OFFSET": ConsumeFrom.FIRST,
    "CONSUME_FROM_LAST_OFFSET": ConsumeFrom.LAST,
    "CONSUME_FROM_TIMESTAMP": ConsumeFrom.TIMESTAMP,
}
_STATES: Final = {
    "COMMIT_MESSAGE": TransactionState.COMMIT,
    "ROLLBACK_MESSAGE": TransactionState.ROLLBACK,
    "UNKNOW": TransactionState.UNKNOWN,
    None: None,
}


@dataclass
class Played:
    """What librmq did."""

    recording: Recording
    sent: dict[int, SendResult | RmqError] = field(default_factory=dict)
    """By the ``seq`` of the event that sent."""
    delivered: list[Row] = field(default_factory=list)
    """Rows like ``deliver`` events, of one message each."""
    checked: list[Row] = field(default_factory=list)
    """Rows like ``check`` events."""
    allocated: list[Row] = field(default_factory=list)
    """Rows like ``allocate`` events."""
    seen: dict[int, Any] = field(default_factory=dict)
    """What was observed, by the ``seq`` of the event that tells what the original showed."""
    logs: dict[str, list[StoredMessage]] = field(default_factory=dict)
    """By broker: its log at the end."""
    configs: dict[str, MemoryFiles] = field(default_factory=dict)
    """By broker: its files."""
    files: MemoryFiles = field(default_factory=MemoryFiles)
    """Of broadcasting clients."""


def play(recording: Recording) -> Played:
    """Let librmq do what was done."""
    return _Player(recording).play()


class _Player:
    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.played = Played(recording)
        self._openings = list(recording.openings)
        self.runner = ReplayRunner(min(self._openings)[0])
        self.brokers: dict[str, Broker] = {}
        self.route: RouteTable | None = None
        self.producers: dict[str, Producer] = {}
        self.consumers: dict[str, PushConsumer] = {}
        self._times: Counter[tuple[str, str]] = Counter()
        self._checked: Counter[str] = Counter()
        self._timestamps: dict[str, int] = {}
        self._open_sends: dict[str, list[Row]] = defaultdict(list)
        self._results = _results(recording)

    def play(self) -> Played:
        for event in self.recording.events:
            while self._openings and self._openings[0][0] <= event["at_ms"]:
                at, name = self._openings.pop(0)
                self.runner.play_to(max(at, self.runner.now_ms()))
                self._open(name)
            if event["kind"] != "broker_shutdown":  # told at its end, seconds later
                self.runner.play_to(event["at_ms"])
            act: Callable[[Row], None] | None = getattr(self, f"_on_{event['kind']}", None)
            if act is not None:
                act(event)
            self.runner.resume(event["seq"])
        for name, broker in self.brokers.items():
            if not broker.dead:
                self._close(name)
        return self.played

    # ---- brokers

    def _open(self, name: str) -> None:
        told = self.recording.broker_settings
        store_host = self.recording.store_hosts.get(name, ("127.0.0.1", int(told["listenPort"])))
        broker = Broker.open(
            "/store",
            BrokerSettings(
                transactions=TransactionSettings(
                    timeout_s=int(told["transactionTimeOut"]) / 1000,
                    interval_s=int(told["transactionCheckInterval"]) / 1000,
                    check_max=int(told.get("transactionCheckMax", 15)),
                )
            ),
            name=name,
            cluster_name=told["brokerClusterName"],
            store_config=StoreConfig(
                commitlog_file_size=int(told["mappedFileSizeCommitLog"]),
                consumequeue_file_size=int(told["mappedFileSizeConsumeQueue"]),
                consumequeue_ext_file_size=int(told["mappedFileSizeConsumeQueueExt"]),
                max_hash_slot_num=int(told["maxHashSlotNum"]),
                max_index_num=int(told["maxIndexNum"]),
                message_delay_level=told["messageDelayLevel"],
                enable_consumequeue_ext=told.get("enableConsumeQueueExt") == "true",
                enable_calc_filter_bitmap=told.get("enableCalcFilterBitMap") == "true",
                enable_property_filter=told.get("enablePropertyFilter") == "true",
                store_host=codec.format_host(store_host),
                compress_from=None,
            ),
            runner=self.runner,
            files=self.played.configs.setdefault(name, MemoryFiles()),
        )
        self.brokers[name] = broker
        if self.route is None:
            self.route = RouteTable(broker)
        else:
            self.route.add(broker)

    def _close(self, name: str) -> None:
        broker = self.brokers[name]
        self.played.logs[name] = list(broker.store)
        broker.close()

    def _name(self, event: Row) -> str:
        """The broker that an event is about."""
        name = event.get("broker") or event["client"]
        return self.recording.broker_settings["brokerName"] if name in ("broker", "admin") else name

    def _on_broker_shutdown(self, event: Row) -> None:
        self._close(self._name(event))

    def _on_create_topic(self, event: Row) -> None:
        name = self._name(event)
        if name not in self.brokers:
            self._open(name)
        self.brokers[name].create_topic(
            event["topic"], event["readQueueNums"], write_queues=event["writeQueueNums"], permission=event["perm"]
        )

    # ---- producers

    def _on_producer_start(self, event: Row) -> None:
        name, group = event["client"], event["group"]
        assert self.route is not None
        is_transactional = any(
            e["kind"] in ("local_tx", "check") and e["client"] == name for e in self.recording.events
        )
        avoid = bool(event.get("sendLatencyFaultEnable"))
        if is_transactional:
            producer: Producer = TransactionProducer(self.route, group, self._checker(name), instance_name=name)
        else:
            producer = Producer(self.route, group, instance_name=name, avoid_slow_brokers=avoid)
        producer.start()
        self.producers[name] = producer

    def _on_producer_shutdown(self, event: Row) -> None:
        self.producers[event["client"]].shutdown()

    def _on_send(self, event: Row) -> None:
        result = self._results.get(event["seq"])
        key = result and (result.get("message_properties_after") or {}).get(UNIQUE_KEY)
        told = event["message"]
        form, client = event["form"], event["client"]
        producer = self.producers[client]

        def send() -> SendResult:
            message = self._message(told, key)
            if key in self.recording.born:
                self.runner.play_to(max(self.recording.born[key], event["at_ms"]))
            if form == "sync_to_queue":
                return producer.send(message, queue=event["args"])
            if form == "orderly":
                return producer.send(message, selector=self._selector(event), arg=event["args"])
            self._begin_at(producer, told["topic"], key, result)
            if form == "transaction":
                assert isinstance(producer, TransactionProducer)
                message.properties.pop(codec.PROPERTY_DELAY, None)
                return producer.send_in_transaction(message, event["args"], execute=self._local(key)).sent
            if form == "oneway":
                producer.send_oneway(message)
                raise _NoAnswer
            if form == "async":
                with _turn_of_its_own(producer, message.topic):
                    return producer.send(message)
            return producer.send(message)

        self._note_sent(event, send)

    def _note_sent(self, event: Row, send: Callable[[], SendResult]) -> None:
        try:
            self.played.sent[event["seq"]] = send()
        except _NoAnswer:
            pass
        except RmqError as error:
            self.played.sent[event["seq"]] = error

    def _on_send_batch(self, event: Row) -> None:
        result = self._results.get(event["seq"])
        after = (result or {}).get("messages_after") or []
        keys = [one["properties"].get(UNIQUE_KEY) for one in after] or [None] * len(event["messages"])
        producer = self.producers[event["client"]]

        def send() -> SendResult:
            messages = [self._message(told, key) for told, key in zip(event["messages"], keys, strict=True)]
            if keys[0] in self.recording.born:
                self.runner.play_to(max(self.recording.born[keys[0]], event["at_ms"]))
            self._begin_at(producer, messages[0].topic, keys[0], result)
            return producer.send_batch(messages)

        self._note_sent(event, send)

    def _begin_at(self, producer: Producer, topic: str, key: str | None, result: Row | None) -> None:
        """Where nothing says whose turn it is, the producer begins with the recorded queue."""
        assert self.route is not None
        queue = ((result or {}).get("result") or {}).get("messageQueue")
        stored = self.recording.stored.get(key or "")
        if queue is not None:
            self.runner.first_queue = queue["brokerName"], queue["queueId"]
        elif stored is not None:
            real = stored.properties.get(codec.PROPERTY_REAL_QUEUE_ID)
            name = next(iter(self.brokers))
            self.runner.first_queue = name, stored.queue_id if real is None else int(real)
        data = sorted(self.route.topic_route(topic), key=lambda one: one.broker_name)
        self.runner.know(
            [
                MessageQueue(topic, one.broker_name, n)
                for one in data
                if one.permission & 2
                for n in range(one.write_queues)
            ]
        )
        if key in self.recording.default_queues:
            queues = self.recording.default_queues[key or ""]
            producer.config = replace(producer.config, default_topic_queues=queues)

    def _selector(self, event: Row) -> Any:
        return select_by_hash

    def _message(self, told: Row, key: str | None) -> Message:
        stored = self.recording.stored.get(key or "")
        body = (told["body"] or "").encode() if stored is None else stored.body
        message = Message(told["topic"], body, flag=told["flag"])
        order = {} if stored is None else dict(stored.properties)
        properties = {name: told["properties"][name] for name in order if name in told["properties"]}
        message.properties = {**properties, **told["properties"]}
        if key:
            message.properties[UNIQUE_KEY] = key
        return message

    # ---- transactions

    def _local(self, key: str | None) -> Callable[[Message, Any], TransactionState | None]:
        answers = [
            after
            for event, after in zip(self.recording.events, self.recording.events[1:], strict=False)
            if event["kind"] == "local_tx" and event["message"]["properties"].get(UNIQUE_KEY) == key
        ]

        def execute(message: Message, arg: Any) -> TransactionState | None:
            answer = answers[0]
            if answer["exception"] is not None:
                raise RuntimeError(answer["exception"]["message"])
            return _STATES[answer["state"]]

        return execute

    def _checker(self, client: str) -> Any:
        async def check(message: CheckedMessage) -> TransactionState | None:
            half = message.half
            key = half.unique_key or ""
            self._checked[key] += 1
            number = self._checked[key]
            self.played.checked.append(
                {
                    "client": client,
                    "n": number,
                    "message": {**describe(half, None), "topic": message.topic, "properties": dict(message.properties)},
                }
            )
            answers = self.recording.checks[key]
            answer = answers[min(number, len(answers)) - 1] if answers else None
            if answer is None:
                return TransactionState.UNKNOWN
            await until(answer["seq"])
            if answer["exception"] is not None:
                raise RuntimeError(answer["exception"]["message"])
            return _STATES[answer["state"]]

        return check

    # ---- consumers

    def _on_consume_timestamp(self, event: Row) -> None:
        at = datetime.strptime(event["value"], "%Y%m%d%H%M%S").replace(tzinfo=UTC)
        self._timestamps[event["client"]] = round(at.timestamp() * 1000)

    def _on_consumer_start(self, event: Row) -> None:
        name, group = event["client"], event["group"]
        assert self.route is not None
        told = self.recording.client_settings(group)
        settings: dict[str, Any] = {
            "model": MessageModel[event["messageModel"]],
            "consume_from": _FROM[event["consumeFromWhere"]],
            "consume_from_timestamp_ms": self._timestamps.get(name),
            "batch_size": event["consumeMessageBatchMaxSize"],
            "max_reconsume_times": None if event["maxReconsumeTimes"] < 0 else event["maxReconsumeTimes"],
            "orderly": name in self.recording.orderly_clients,
            "strategy": self._allocating(name, group),
            "offsets_folder": FOLDER,
            "files": self.played.files,
            "shutdown_timeout": 0,
        }
        for theirs, ours, unit in (
            ("consumeTimeout", "consume_timeout", 1),
            ("pullBatchSize", "pull_batch_size", 1),
            ("pullThresholdForQueue", "max_held_messages", 1),
            ("pullThresholdSizeForQueue", "max_held_bytes", 1 << 20),
            ("consumeConcurrentlyMaxSpan", "max_span", 1),
        ):
            if theirs in told:
                settings[ours] = told[theirs] * unit
        consumer = PushConsumer(self.route, group, instance_name=name, **settings)
        scope = name if settings["model"] is MessageModel.BROADCASTING else group
        listener = self._listener(name, group, scope, consumer)
        for topic, subscription in event["subscription"].items():
            if not topic.startswith("%RETRY%"):
                expression = subscription["subString"]
                kind = "sql" if subscription["expressionType"] == "SQL92" else "tags"
                consumer.subscribe(topic, batch=True, must_return=True, **{kind: expression})(listener)
        consumer.start()
        self.consumers[name] = consumer

    def _listener(self, name: str, group: str, scope: str, consumer: PushConsumer) -> Any:
        async def listen(messages: list[DeliveredMessage]) -> Any:
            answers = []
            for message in messages:
                key = message.message_id
                self.played.delivered.append(
                    {"client": name, "group": group, "mq": message.queue, "msg": describe(message, message.queue)}
                )
                known = self.recording.answers.get((scope, key), [])
                number = self._times[scope, key]
                self._times[scope, key] += 1
                answers.append(known[number] if number < len(known) else None)
            for answer in answers:
                if answer is not None:
                    await until(_NEVER if breaks_client(answer) else answer["seq"])
            return _answer(answers)

        return listen

    def _allocating(self, name: str, group: str) -> Any:
        def allocate(client_id: str, queues: Sequence[MessageQueue], clients: Sequence[str]) -> list[MessageQueue]:
            share = allocate_averagely(client_id, queues, clients)
            self.played.allocated.append(
                {
                    "client": name,
                    "group": group,
                    "topic": queues[0].topic,
                    "cid": client_id,
                    "cidAll": list(clients),
                    "queuesAll": [self._short(queue) for queue in queues],
                    "result": [self._short(queue) for queue in share],
                }
            )
            return share

        return allocate

    def _short(self, queue: MessageQueue) -> int | str:
        usual = queue.broker_name == self.recording.broker_settings["brokerName"]
        return queue.queue_id if usual else f"{queue.broker_name}:{queue.queue_id}"

    def _on_consumer_shutdown_begin(self, event: Row) -> None:
        self.consumers[event["client"]].shutdown(0)

    # ---- observations

    def _on_queue_offsets(self, event: Row) -> None:
        store = self.brokers[self._name(event)].store
        found = []
        for row in event["queues"]:
            begin, end = store.queue_range(event["topic"], row["queueId"])
            found.append({"queueId": row["queueId"], "min": begin, "max": end})
        self.played.seen[event["seq"]] = found

    def _on_consumer_offsets_in_memory(self, event: Row) -> None:
        broker = self.brokers[self._name(event)]
        self.played.seen[event["seq"]] = {
            name: {
                queue_id: broker.consumer_offset(name.partition("@")[2], name.partition("@")[0], int(queue_id))
                for queue_id in row
            }
            for name, row in event["table"].items()
        }


class _NoAnswer(Exception):
    """A send that tells nothing."""


@contextmanager
def _turn_of_its_own(producer: Producer, topic: str) -> Iterator[None]:
    """The original counts turns by thread, and asynchronous sends run on threads of their own."""
    kept = producer._topics.pop(topic, None)
    yield
    if kept is not None:
        producer._topics[topic] = kept


def describe(message: StoredMessage, queue: MessageQueue | None) -> Row:
    """A message as the recordings show one."""
    delivered = message if isinstance(message, DeliveredMessage) else None
    return {
        "topic": message.topic,
        "brokerName": None if queue is None else queue.broker_name,
        "queueId": message.queue_id if queue is None else queue.queue_id,
        "queueOffset": message.queue_offset,
        "commitLogOffset": message.physical_offset,
        "msgId": message.message_id if queue is not None else message.offset_id,
        "offsetMsgId": message.offset_id,
        "bornTimestamp": message.born_timestamp_ms,
        "bornHost": codec.format_host(message.born_host),
        "storeTimestamp": message.store_timestamp_ms,
        "storeHost": codec.format_host(message.store_host),
        "storeSize": message.size,
        "bodyCRC": message.body_crc,
        "sysFlag": message.sys_flag,
        "flag": message.flag,
        "reconsumeTimes": message.reconsume_times,
        "preparedTransactionOffset": message.prepared_transaction_offset,
        "transactionId": None if delivered is None else delivered.transaction_id,
        "properties": dict(message.properties),
        "body": message.body.decode("utf-8", "replace"),
        "storedBodyLength": len(message.stored_body),
        "properties_raw": message.properties_raw.decode(),
    }


def _answer(answers: list[Row | None]) -> Any:
    """What librmq's listener returns, or raises, where the recorded one returned so."""
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
        return (consumed.index(False) if False in consumed else len(consumed)) - 1
    if status in ("COMMIT", "ROLLBACK"):
        return Transaction[status]
    if status == "SUCCESS":
        return True if answer["autoCommit"] else Transaction.HOLD
    return None


def _results(recording: Recording) -> dict[int, Row]:
    """The result of each send, by the send's ``seq``: the next of its client and form; async ones may cross."""
    waiting: dict[tuple[str, str], list[Row]] = defaultdict(list)
    found = {}
    for event in recording.events:
        kind = event["kind"]
        if kind in ("send", "send_batch"):
            waiting[event["client"], kind + event.get("form", "")].append(event)
        elif kind in ("send_result", "send_batch_result"):
            form = kind.removesuffix("_result") + event.get("form", "")
            sends = waiting[event["client"], form]
            if sends:
                found[sends.pop(0)["seq"]] = event
    return found
