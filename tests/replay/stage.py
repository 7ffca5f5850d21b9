"""What the parts of a replay share: the recording, brokers with a manual clock, and librmq's results."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from librmq.broker import Broker, BrokerConfig
from librmq.client.sender import SendResult
from librmq.cluster import RouteTable
from librmq.config import StoreConfig
from librmq.consumer import DeliveredMessage
from librmq.errors import RmqError
from librmq.files._memory import MemoryFiles
from librmq.message.ids import format_host
from librmq.message.message import MessageQueue, StoredMessage
from librmq.txn import TransactionConfig
from tests.reference import Row
from tests.replay.reading import Recording
from tests.replay.runner import ReplayRunner

__all__ = ["Played", "Stage", "describe"]

STORE: Final = "/store"
_EVERY_MS: Final = 1_000
CLIENT: Final = "/client"
"""The folder in which broadcasting clients keep their progress."""
Table = dict[tuple[str, str, int], int]
"""Progress by topic, group and queue; -1 means none."""


@dataclass
class Played:
    """The results of librmq."""

    recording: Recording
    sent: dict[int, SendResult | RmqError] = field(default_factory=dict)
    """Results of sends, by the ``seq`` of the event that sent."""
    selected_from: list[int] = field(default_factory=list)
    """The number of queues that each selector was given."""
    delivered: list[Row] = field(default_factory=list)
    """Rows like ``deliver`` events, one for each message, which is ``msg``."""
    polled: list[Row] = field(default_factory=list)
    """Rows of the same form, of pull consumers."""
    checked: list[Row] = field(default_factory=list)
    """Rows like ``check`` events."""
    allocated: list[Row] = field(default_factory=list)
    """Rows like ``allocate`` events."""
    held: dict[str, Row] = field(default_factory=dict)
    """The most that each client's process queues held, as in ``cached`` events."""
    seen: dict[int, Any] = field(default_factory=dict)
    """Observations and answers, by the ``seq`` of the event that has RocketMQ's."""
    progress: list[tuple[int, str, Table]] = field(default_factory=list)
    """What each broker knew of progress, at many times: time, broker, progress."""
    logs: dict[str, list[StoredMessage]] = field(default_factory=dict)
    """Each broker's log at the end."""
    files: dict[str, MemoryFiles] = field(default_factory=dict)
    """The files of each broker; those of broadcasting clients are under ``""``."""


class Stage:
    """A replay under way."""

    def __init__(self, recording: Recording, before_ms: int) -> None:
        self.recording = recording
        self.played = Played(recording)
        self.played.files[""] = MemoryFiles()
        self.openings = recording.openings(before_ms)
        self.runner = ReplayRunner(min(self.openings)[0])
        self.brokers: dict[str, Broker] = {}
        self._route: RouteTable | None = None
        self._progress_of = sorted({where[:3] for event in recording.progress_events for where in event["progress"]})

    @property
    def route(self) -> RouteTable:
        """All brokers as clients know them. Clients look again at times that count from the first broker's start."""
        if self._route is None:
            self._route = RouteTable(*self.brokers.values())
        return self._route

    @property
    def files(self) -> MemoryFiles:
        return self.played.files[""]

    def broker(self, event: Row) -> Broker:
        """Return the broker that an event is about; open it if no start was recorded."""
        name = self.recording.broker_of(event)
        if name not in self.brokers:
            self.open(name)
        return self.brokers[name]

    def open(self, name: str) -> None:
        """Start a broker with the recorded settings on its store."""
        told = self.recording.broker_settings
        store_host = self.recording.store_hosts.get(name, ("127.0.0.1", int(told["listenPort"])))
        transactions = TransactionConfig(
            timeout_s=int(told["transactionTimeOut"]) / 1000,
            interval_s=self.recording.check_interval_ms / 1000,
            check_max=int(told.get("transactionCheckMax", 15)),
        )
        store = StoreConfig(
            commitlog_file_size=int(told["mappedFileSizeCommitLog"]),
            consumequeue_file_size=int(told["mappedFileSizeConsumeQueue"]),
            consumequeue_ext_file_size=int(told["mappedFileSizeConsumeQueueExt"]),
            max_hash_slot_num=int(told["maxHashSlotNum"]),
            max_index_num=int(told["maxIndexNum"]),
            message_delay_level=told["messageDelayLevel"],
            enable_consumequeue_ext=told.get("enableConsumeQueueExt") == "true",
            enable_calc_filter_bitmap=told.get("enableCalcFilterBitMap") == "true",
            enable_property_filter=told.get("enablePropertyFilter") == "true",
            store_host=format_host(store_host),
        )
        broker = Broker.open(
            STORE,
            BrokerConfig(transactions=transactions),
            name=name,
            cluster_name=told["brokerClusterName"],
            store_config=store,
            runner=self.runner,
            files=self.played.files.setdefault(name, MemoryFiles()),
        )
        self.brokers[name] = broker
        if self._route is not None:
            self._route.add(broker)

    def close(self, name: str) -> None:
        """Shut down a broker properly."""
        broker = self.brokers[name]
        if not broker.dead:
            self.played.logs[name] = list(broker.store)
            broker.close()

    def play_to(self, at_ms: int) -> None:
        """Let time pass, and note the brokers' progress from time to time."""
        while self.runner.now_ms() < at_ms:
            self.runner.play_to(min(at_ms, self.runner.now_ms() + _EVERY_MS))
            self._note_progress()
        self.runner.play_to(self.runner.now_ms())
        self._note_progress()

    def _note_progress(self) -> None:
        now_ms = self.runner.now_ms()
        for name, broker in self.brokers.items():
            if not broker.dead:
                self.played.progress.append((now_ms, name, self._progress(broker)))

    def _progress(self, broker: Broker) -> Table:
        table = {}
        for topic, group, queue_id in self._progress_of:
            queue_offset = broker.consumer_offset(group, topic, queue_id)
            table[topic, group, queue_id] = -1 if queue_offset is None else queue_offset
        return table


def describe(message: StoredMessage, queue: MessageQueue | None) -> Row:
    """Return a message in the form of the recordings."""
    delivered = message if isinstance(message, DeliveredMessage) else None
    return {
        "topic": message.topic,
        "brokerName": None if queue is None else queue.broker_name,
        "queueId": message.queue_id if queue is None else queue.queue_id,
        "queueOffset": message.queue_offset,
        "commitLogOffset": message.physical_offset,
        "msgId": message.offset_id if queue is None else message.message_id,
        "offsetMsgId": message.offset_id,
        "bornTimestamp": message.born_timestamp_ms,
        "bornHost": format_host(message.born_host),
        "storeTimestamp": message.store_timestamp_ms,
        "storeHost": format_host(message.store_host),
        "storeSize": message.size,
        "bodyCRC": message.body_crc,
        "sysFlag": message.sys_flag,
        "flag": message.flag,
        "reconsumeTimes": message.reconsume_times,
        "preparedTransactionOffset": message.prepared_transaction_offset,
        "transactionId": None if delivered is None else delivered.transaction_id,
        "properties": dict(message.properties),
        "body": message.body.decode("utf-8", "replace"),
    }


def in_log(messages: list[StoredMessage]) -> Iterator[Row]:
    """Return records in the form of ``messages.jsonl``."""
    for message in messages:
        yield {
            **describe(message, None),
            "storedBodyLength": len(message.stored_body),
            "properties_raw": message.properties_raw.decode(),
        }
