"""Storing messages: what a producer sends, what a consumer sends back, and what the broker writes itself.

Mirrors ``SendMessageProcessor``. The properties of a stored message are those of the original, in its order. Appending
takes no lock of the runner; only who waits for the message is told under it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from librmq import codec
from librmq.broker.groups import Groups
from librmq.broker.holds import Holds
from librmq.broker.settings import BrokerSettings
from librmq.broker.topics import Topics
from librmq.dispatch import parse_level
from librmq.errors import BrokerBusyError, BrokerError, CorruptionError
from librmq.message import Message, StoredMessage, dead_letter_topic, retry_topic
from librmq.protocol import ResponseCode, SendBack, SendBatch, SendMessage, SendResponse, SendStatus
from librmq.runner import Runner
from librmq.store import AppendResult, MessageStore
from librmq.topics import HALF_TOPIC, RETRY_PREFIX

__all__ = ["Sending"]

_CLUSTER: Final = "CLUSTER"
_WAIT: Final = codec.PROPERTY_WAIT
_DELAY: Final = codec.PROPERTY_DELAY
_PREPARED: Final = "TRAN_MSG"
_RETRY_TOPIC: Final = "RETRY_TOPIC"
_ORIGIN_MESSAGE_ID: Final = "ORIGIN_MESSAGE_ID"
_FIRST_RETRY_LEVEL: Final = 3
_OK: Final = SendStatus.SEND_OK


class Sending:
    """The writing side of one broker. Thread-safe."""

    def __init__(
        self,
        runner: Runner,
        store: MessageStore,
        topics: Topics,
        groups: Groups,
        holds: Holds,
        settings: BrokerSettings,
        cluster_name: str,
        delayed: Callable[[int, int], None],
        stored: Callable[[], None] | None,
    ) -> None:
        """``delayed(level, store_timestamp_ms)`` is told of each message that waits, under the runner's lock;
        ``stored()``, unless None, of each message at all.
        """
        self._runner = runner
        self._now_ms = runner.now_ms
        self._store = store
        self._append = store.append
        self._topics = topics
        self._groups = groups
        self._held = holds.by_queue
        self._holds = holds
        self._cluster = cluster_name
        self._delayed = delayed
        self._stored = stored
        self._busy_after_ms = round(1000 * settings.busy_after_s)
        self._writing_since: int | None = None
        host = codec.encode_host(codec.parse_host(store.config.store_host))
        self._id_prefix = host.hex().upper()

    # ---- producers

    def send(self, request: SendMessage) -> SendResponse:
        """Store a message."""
        message = request.message
        name = message.topic
        topic = self._topics.known.get(name)
        if topic is None or not topic.is_sendable:
            with self._runner.lock:
                topic = self._topics.for_send(name, request.default_queues)
        queue_id = request.queue_id
        if queue_id < 0:
            queue_id = topic.next_queue()
        elif queue_id >= topic.queues:
            raise BrokerError(
                ResponseCode.SYSTEM_ERROR, f"topic {name!r} has {topic.queues} queues: there is no queue {queue_id}"
            )
        sys_flag = request.sys_flag | codec.MULTI_TAGS if topic.is_multi_tag else request.sys_flag
        properties = {**message.properties, _CLUSTER: self._cluster}
        wait = properties.pop(_WAIT, None)
        stored_queue_id = queue_id
        if _PREPARED in properties and properties[_PREPARED].lower() == "true":
            name, stored_queue_id, sys_flag = self._prepared(name, queue_id, sys_flag, properties, wait)
        elif name.startswith(RETRY_PREFIX):
            name, stored_queue_id = self._retried(request, name, queue_id)
        if _DELAY in properties and wait is not None and parse_level(properties[_DELAY]) > 0:
            properties[_WAIT] = wait
        result = self.put(
            _message(name, message.body, message.flag, properties),
            stored_queue_id,
            _wait=wait is None or wait.lower() == "true",
            born_timestamp_ms=request.born_timestamp_ms,
            born_host=request.born_host,
            sys_flag=sys_flag,
            reconsume_times=request.reconsume_times,
        )
        return SendResponse(
            _OK,
            queue_id,
            result.queue_offset,
            result.physical_offset,
            (f"{self._id_prefix}{result.physical_offset:016X}",),
        )

    def send_batch(self, request: SendBatch) -> SendResponse:
        """Store messages of one topic, side by side."""
        if not request.messages:
            raise BrokerError(ResponseCode.MESSAGE_ILLEGAL, "a batch needs at least one message")
        first = request.messages[0]
        with self._runner.lock:
            topic = self._topics.for_send(first.topic, request.default_queues)
        queue_id = request.queue_id
        if queue_id < 0:
            queue_id = topic.next_queue()
        elif queue_id >= topic.queues:
            raise BrokerError(
                ResponseCode.SYSTEM_ERROR,
                f"topic {first.topic!r} has {topic.queues} queues: there is no queue {queue_id}",
            )
        self._check_busy()
        results = self._store.append_batch(
            request.messages,
            queue_id,
            properties={_WAIT: first.properties.get(_WAIT, "true"), _CLUSTER: self._cluster},
            born_timestamp_ms=request.born_timestamp_ms,
            born_host=request.born_host,
            sys_flag=codec.MULTI_TAGS if topic.is_multi_tag else 0,
        )
        if (first.topic, queue_id) in self._held:
            with self._runner.lock:
                for message in request.messages:
                    self._holds.arrived((first.topic, queue_id), message.properties)
        if self._stored is not None:
            self._stored()
        offset_ids = tuple(f"{self._id_prefix}{result.physical_offset:016X}" for result in results)
        return SendResponse(_OK, queue_id, results[0].queue_offset, results[0].physical_offset, offset_ids)

    def _prepared(
        self, name: str, queue_id: int, sys_flag: int, properties: dict[str, str], wait: str | None
    ) -> tuple[str, int, int]:
        """Make a half message of one that a transaction decides about; where it goes, and its flags."""
        if wait is not None:
            properties[_WAIT] = wait
        properties.pop(_DELAY, None)  # what is not decided can't be delayed
        properties[codec.PROPERTY_REAL_TOPIC] = name
        properties[codec.PROPERTY_REAL_QUEUE_ID] = str(queue_id)
        with self._runner.lock:
            self._topics.ensure(HALF_TOPIC)
        return HALF_TOPIC, 0, sys_flag & ~codec.TRANSACTION_MASK

    def _retried(self, request: SendMessage, name: str, queue_id: int) -> tuple[str, int]:
        """Where a message goes that a consumer sends to its own retry topic."""
        with self._runner.lock:
            group = self._groups.get(name.removeprefix(RETRY_PREFIX))
            most = group.retry_max_times if request.max_reconsume_times is None else request.max_reconsume_times
            if request.reconsume_times < most:
                return name, queue_id
            return self._topics.ensure(dead_letter_topic(group.name)).name, 0

    # ---- consumers

    def send_back(self, request: SendBack) -> None:
        """Store a message again on which a consumer failed: for later, or as dead letter."""
        with self._runner.lock:
            group = self._groups.get(request.group)
            if group.retry_queues <= 0:
                return
            name = self._topics.ensure(retry_topic(group.name), group.retry_queues).name
        message = self._look_up(request.physical_offset)
        times = message.reconsume_times
        most = group.retry_max_times if request.max_reconsume_times is None else request.max_reconsume_times
        properties = dict(message.properties)
        properties.setdefault(_RETRY_TOPIC, message.topic)
        properties[_WAIT] = "false"
        if times >= most or request.delay_level < 0:
            with self._runner.lock:
                name = self._topics.ensure(dead_letter_topic(group.name)).name
            properties[_DELAY] = "0"
        else:
            properties[_DELAY] = str(request.delay_level or _FIRST_RETRY_LEVEL + times)
        properties.setdefault(_ORIGIN_MESSAGE_ID, message.offset_id)
        self.put(
            _message(name, message.stored_body, message.flag, properties),
            0,
            _wait=False,
            born_timestamp_ms=message.born_timestamp_ms,
            born_host=message.born_host,
            store_host=message.store_host,
            sys_flag=message.sys_flag,
            reconsume_times=times + 1,
        )

    def _look_up(self, physical_offset: int) -> StoredMessage:
        try:
            message = self._store.message_at(physical_offset)
        except CorruptionError as error:
            raise BrokerError(ResponseCode.SYSTEM_ERROR, f"no message stands there: {error}") from error
        if message is None:
            raise BrokerError(ResponseCode.SYSTEM_ERROR, f"no message stands at physical offset {physical_offset}")
        return message

    # ---- storing

    def put(self, message: Message, queue_id: int, **fields: Any) -> AppendResult:
        """Append a message as it is, and tell whoever waits for it; the keywords are those of `MessageStore.append`."""
        now = self._now_ms()
        since = self._writing_since
        if since is None:
            self._writing_since = now
        elif now - since > self._busy_after_ms:
            self._check_busy()
        try:
            result = self._append(message, queue_id, **fields)
        finally:
            if since is None:
                self._writing_since = None
        properties = message.properties
        if _DELAY in properties and (level := parse_level(properties[_DELAY])) > 0:
            with self._runner.lock:
                self._delayed(level, result.store_timestamp_ms)
        elif (message.topic, queue_id) in self._held:
            self.arrived(message.topic, queue_id, properties)
        if self._stored is not None:
            self._stored()
        return result

    def arrived(self, topic: str, queue_id: int, properties: Mapping[str, str]) -> None:
        """Tell whoever waits for a message that it has come."""
        with self._runner.lock:
            self._holds.arrived((topic, queue_id), properties)

    def _check_busy(self) -> None:
        since = self._writing_since
        if since is not None and self._now_ms() - since > self._busy_after_ms:
            raise BrokerBusyError(
                ResponseCode.SYSTEM_BUSY,
                f"the store is busy: a message has been written for {self._now_ms() - since} ms",
            )


def _message(topic: str, body: bytes, flag: int, properties: dict[str, str]) -> Message:
    """A message of parts that were checked when the client made them."""
    made = object.__new__(Message)
    made.topic, made.body, made.flag, made.properties = topic, body, flag, properties
    return made
