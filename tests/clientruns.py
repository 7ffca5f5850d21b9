"""Recorded runs of real clients (``clients-*``), driven again: the same calls at the same times, the same results of
listeners, under a clock that is moved by hand.

Runs are taken whose sends are recorded one by one, on one broker that is not restarted, without transactions.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, Final

import pytest
from _pytest.mark import ParameterSet

from librmq.broker import Broker
from librmq.clock import ManualClock
from librmq.config import StoreConfig
from librmq.consumer import DeliveredMessage, OrderlyResult, PushConsumer
from librmq.files import MemoryFiles
from librmq.listener import ReconsumeLater, SuspendQueue
from librmq.message import Message, StoredMessage
from librmq.protocol import ConsumeFrom, CreateTopic, MessageModel, SendMessage
from librmq.runner import ManualRunner, Step, Work
from librmq.topics import RETRY_PREFIX
from tests.reference import ABSENT, Row, reference

NEEDED: Final = {"deliver", "return", "send", "send_result", "consumer_start"}
NOT_DRIVEN: Final = {
    "sent",
    "sent_all",
    "sent_big",
    "send_batch",
    "local_tx",
    "call",
    "broker_started_again",
    "delete_files_manually",
}
SLOW_MS: Final = 5_000
"""A listener that took longer is taken to have waited; others are taken to take no time."""


def events(folder: Path) -> list[Row]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text("utf-8").splitlines()]


def can_be_driven(rows: list[Row]) -> bool:
    kinds = Counter(row["kind"] for row in rows)
    return kinds.keys() >= NEEDED and not NOT_DRIVEN & kinds.keys() and kinds["broker_started"] == 1


def driven_folders() -> list[ParameterSet]:
    """The runs that are taken, as parameters of a test; one that is skipped where there is none."""
    found = [
        pytest.param(folder, id=folder.name)
        for folder in sorted(reference().folder.glob("clients-*"))
        if (folder / "events.jsonl").is_file() and can_be_driven(events(folder))
    ]
    reason = f"{ABSENT}no clients-* in {reference().origin}"
    return found or [pytest.param(None, id="no-clients-", marks=pytest.mark.skip(reason=reason))]


class Results:
    """What a client's listener returned, by the messages that it was given."""

    def __init__(self, rows: list[Row]) -> None:
        self.calls: dict[Any, list[tuple[Row, Row]]] = defaultdict(list)
        self.single: dict[Any, list[bool]] = defaultdict(list)
        delivered = {row["call"]: row for row in rows if row["kind"] == "deliver"}
        for row in rows:
            if row["kind"] == "return":
                call = delivered[row["call"]]
                self.calls[self.key(call["client"], call["msgs"])].append((call, row))
                consumed = _consumed(row, len(call["msgs"]))
                for at, message in enumerate(call["msgs"]):
                    self.single[self.key(call["client"], [message])].append(at < consumed)

    @staticmethod
    def key(client: str, messages: list[Row]) -> Any:
        return client, tuple((message["msgId"], message["reconsumeTimes"]) for message in messages)

    def of(self, client: str, messages: list[DeliveredMessage]) -> tuple[Row | None, int, int]:
        """The return row, how many messages of the call are consumed, and how long it took in ms."""
        rows = [{"msgId": message.message_id, "reconsumeTimes": message.reconsume_times} for message in messages]
        found = self.calls.get(self.key(client, rows))
        if found:
            call, row = found.pop(0) if len(found) > 1 else found[0]
            return row, _consumed(row, len(messages)), row["at_ms"] - call["at_ms"]
        consumed = 0  # batched otherwise: retries come when they come
        for row in rows:
            singles = self.single.get(self.key(client, [row]), [True])
            if not singles[0]:
                break
            consumed += 1
        return None, consumed, 0


def _consumed(row: Row, count: int) -> int:
    if row["status"] in ("CONSUME_SUCCESS", "SUCCESS", "COMMIT"):
        return max(0, min(row.get("ackIndex", count), count - 1) + 1) if "ackIndex" in row else count
    return 0


def breaks_the_client(row: Row) -> bool:
    """Whether the client of the original fails on what its listener returned: its batch is neither retried nor
    removed. On purpose such a result is a failure of the batch here.
    """
    return bool(row["kind"] == "return" and row.get("ackIndex", 0) < -1)


class Replay(ManualRunner):
    """One run, driven again."""

    def __init__(self, folder: Path) -> None:
        self.rows = events(folder)
        super().__init__(ManualClock(self.rows[0]["at_ms"]))
        self.results = Results(self.rows)
        self.orderly = {row["client"] for row in self.rows if row["kind"] == "deliver" and row["mode"] == "orderly"}
        calls = {row["call"]: row for row in self.rows if row["kind"] == "deliver"}
        broken = [calls[row["call"]] for row in self.rows if breaks_the_client(row)]
        self.broken = {message["msgId"] for call in broken for message in call["msgs"]}
        """The messages of such batches."""
        self.broken_clients = {call["client"] for call in broken}
        self.groups = {row["client"]: row["group"] for row in self.rows if row["kind"] == "consumer_start"}
        self.consumers: dict[str, PushConsumer] = {}
        self.delivered: list[tuple[str, DeliveredMessage, dict[str, str], int]] = []
        self.tables: list[tuple[Row, dict[str, dict[str, int]]]] = []
        self.lasts_ms = 0
        self.files = MemoryFiles()
        self.files.make_folder("/offsets")
        self.broker = self._open(self.rows[0]["config"])

    def _open(self, config: dict[str, str]) -> Broker:
        store = StoreConfig.embedded(
            commitlog_file_size=int(config["mappedFileSizeCommitLog"]),
            message_delay_level=config["messageDelayLevel"],
            enable_property_filter=config.get("enablePropertyFilter") == "true",
            enable_consumequeue_ext=config.get("enableConsumeQueueExt") == "true",
            enable_calc_filter_bitmap=config.get("enableCalcFilterBitMap") == "true",
        )
        self._opening: dict[str, Any] = {"store_config": store, "name": config["brokerName"]}
        return self.reopened()

    def reopened(self) -> Broker:
        """The broker on what is there."""
        return Broker.open("/store", files=self.files, runner=self, **self._opening)

    def perform(self, work: Work) -> None:
        """As by hand; a listener that took its time there ends after as long here."""
        self.lasts_ms = 0
        self.running.add(work)
        result, error = None, None
        try:
            result = work.call()
        except (ReconsumeLater, SuspendQueue, RuntimeError) as raised:
            error = raised
        if self.lasts_ms < SLOW_MS:
            self._finish(work, result, error)
            return

        def end(now_ms: int) -> None:
            self._finish(work, result, error)

        self.wake(Step(f"end of {work.label}", end, work.owner), self.now_ms() + self.lasts_ms)

    def move_to(self, at_ms: int) -> None:
        if at_ms > self.now_ms():
            self._take_turns(at_ms)
            self.manual_clock.move_to(at_ms)
        else:
            self._take_turns(self.now_ms())

    def run(self) -> None:
        sends: dict[str, list[Row]] = defaultdict(list)
        for row in self.rows:
            kind = row["kind"]
            if kind in ("deliver", "return", "owned", "allocate", "cached"):
                continue
            self.move_to(row["at_ms"])
            if kind == "create_topic":
                self.broker.call(CreateTopic(row["topic"], row["readQueueNums"], row["writeQueueNums"], row["perm"]))
            elif kind == "send":
                sends[row["client"]].append(row)
            elif kind == "send_result":
                self._send(sends[row["client"]].pop(0), row)
            elif kind == "consumer_start":
                self._start(row)
            elif kind == "consumer_shutdown_begin":
                self.consumers.pop(row["client"]).shutdown()
            elif kind == "consumer_offsets_in_memory":
                self.tables.append((row, self._offsets()))
        self.broker.close()

    def _send(self, sent: Row, result: Row) -> None:
        if not result["result"] or result["result"]["sendStatus"] != "SEND_OK":
            return
        row = sent["message"]
        message = Message(result["topic_after"], row["body"].encode(), flag=row["flag"])
        message.properties.update(result["message_properties_after"])
        queue_id = result["result"]["messageQueue"]["queueId"]
        self.broker.call(SendMessage("pg", message, queue_id, sent["at_ms"], ("127.0.0.1", 50000)))

    def _start(self, row: Row) -> None:
        name = row["client"]
        broadcasting = row["messageModel"] == "BROADCASTING"
        consumer = PushConsumer(
            self.broker,
            row["group"],
            instance_name=name,
            model=MessageModel.BROADCASTING if broadcasting else MessageModel.CLUSTERING,
            consume_from=ConsumeFrom(row["consumeFromWhere"]),
            max_reconsume_times=None if row["maxReconsumeTimes"] < 0 else row["maxReconsumeTimes"],
            batch_size=row["consumeMessageBatchMaxSize"],
            orderly=name in self.orderly,
            consume_timeout=60 if self._has_stuck() else 900,
            offsets_folder="/offsets",
            files=self.files,
        )
        for topic, subscription in row["subscription"].items():
            if not topic.startswith(RETRY_PREFIX):
                chosen = {"sql" if subscription["expressionType"] == "SQL92" else "tags": subscription["subString"]}
                consumer.subscribe(topic, batch=True, **chosen)(self._listener(name))
        consumer.start()
        self.consumers[name] = consumer

    def _has_stuck(self) -> bool:
        return any(row["kind"] == "release" for row in self.rows)

    def _listener(self, name: str) -> Any:
        def listen(messages: list[DeliveredMessage]) -> Any:
            for message in messages:
                self.delivered.append((name, message, dict(message.properties), message.reconsume_times))
            row, consumed, self.lasts_ms = self.results.of(name, messages)
            if name in self.orderly:
                return _orderly(row)
            if consumed == 0:
                raise ReconsumeLater(delay_level=row["delayLevelWhenNextConsume"] if row is not None else 0)
            return consumed - 1

        return listen

    def _offsets(self) -> dict[str, dict[str, int]]:
        table: dict[str, dict[str, int]] = {}
        for topic in self.broker.topics():
            for group in self.broker.groups():
                offsets = self.broker.consumer_offsets(group, topic)
                if offsets:
                    table[f"{topic}@{group}"] = {str(queue): offset for queue, offset in sorted(offsets.items())}
        return table


def _orderly(row: Row | None) -> OrderlyResult | None:
    if row is None or row["status"] == "SUCCESS":
        return None
    status, suspend_ms = row["status"], row.get("suspendCurrentQueueTimeMillis", -1)
    if status in ("COMMIT", "ROLLBACK"):
        return OrderlyResult[status]
    raise SuspendQueue(seconds=None if suspend_ms < 0 else suspend_ms / 1000)


def recorded_delivery(row: Row, message: Row) -> tuple[Any, ...]:
    queue = row["mq"]
    is_retry = queue["topic"].startswith(RETRY_PREFIX)
    return (
        queue["topic"],
        queue["queueId"],
        None if is_retry else message["queueOffset"],  # retries come back in any order
        message["topic"],
        message["msgId"],
        message["reconsumeTimes"],
        message["flag"],
        message["sysFlag"],
        message["body"],
        _settled(message["properties"]),
    )


def real_delivery(message: DeliveredMessage, properties: dict[str, str], times: int) -> tuple[Any, ...]:
    return (
        message.queue.topic,
        message.queue.queue_id,
        None if message.queue.topic.startswith(RETRY_PREFIX) else message.queue_offset,
        message.topic,
        message.message_id,
        times,
        message.flag,
        message.sys_flag,
        message.body.decode(),
        _settled(properties),
    )


def _settled(properties: dict[str, str]) -> tuple[tuple[str, str], ...]:
    """Without what depends on the moment or on other messages; what is a time is only known to be there."""
    free = {"MAX_OFFSET", "CONSUME_START_TIME", "ORIGIN_MESSAGE_ID"}
    return tuple(sorted((name, "" if name in free else value) for name, value in properties.items()))


def record_row(row: Row) -> tuple[Any, ...]:
    return row["topic"], row["reconsumeTimes"], row["flag"], row["body"], _settled(row["properties"])


def real_record(message: StoredMessage) -> tuple[Any, ...]:
    return (
        message.topic,
        message.reconsume_times,
        message.flag,
        message.body.decode(),
        _settled(dict(message.properties)),
    )
