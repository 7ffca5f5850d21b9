"""Resends: sends of producers that repeat an earlier one, and are dropped if the settings say so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, NamedTuple

from librmq.broker._context import BrokerContext
from librmq.errors import CorruptionError
from librmq.message import Message, StoredMessage
from librmq.message.ids import encode_host
from librmq.message.properties import PropertyName, is_half
from librmq.message.topics import SystemTopic, TopicPrefix
from librmq.protocol import TOOL_PRODUCERS, SendBatch
from librmq.runtime.locks import RLock
from librmq.scheduling.waiting import sent_to
from librmq.store import AppendResult

Name = tuple[str, str, str]
"""The topic and the unique id of a producer's send, and the producer group of a half message."""
_MOST_IDS: Final = 1 << 19
_UNIQUE_KEY: Final = PropertyName.UNIQUE_KEY
_GROUP: Final = PropertyName.PRODUCER_GROUP


class FirstSend(NamedTuple):
    """The place of a message that is sent again."""

    queue_id: int
    result: AppendResult


def name_of_send(group: str, message: Message) -> Name | None:
    """Return what a resend of a producer's message shares with it; None for messages of tools and consumers."""
    properties, topic = message.properties, message.topic
    unique_key = properties.get(_UNIQUE_KEY)
    is_own = group not in TOOL_PRODUCERS and not topic.startswith((TopicPrefix.RETRY, TopicPrefix.DEAD_LETTER))
    if not unique_key or not is_own or PropertyName.TIMER_DELETE_KEY in properties:
        return None
    target = properties.get(PropertyName.HOP_TOPIC, topic) if topic == SystemTopic.HOP else topic
    return target, unique_key, properties.get(_GROUP, "") if is_half(properties) else ""


def _name_of_record(message: StoredMessage) -> Name | None:
    """Return the name of the send that a record is the first of."""
    destination, unique_key = sent_to(message), message.unique_key
    if destination is None or not unique_key:
        return None
    group = message.properties.get(_GROUP, "") if message.topic == SystemTopic.HALF else ""
    return destination.topic, unique_key, group


class RecentSends:
    """The producers' sends of a time up to now, by topic and unique id.

    Memory holds a hash and a physical offset for each; the record there, which is the truth, has the rest. Ids leave in
    two generations, so that dropping old ones costs nothing.
    """

    def __init__(self, context: BrokerContext, window_ms: int, is_withdrawn: Callable[[StoredMessage], bool]) -> None:
        """Read the sends of the last ``window_ms`` from the log.

        ``is_withdrawn(message)`` returns whether a record was rolled back or cancelled: a message that is sent again
        after that is a new one.
        """
        self._lock = RLock()  # held from the search for a send until it is added
        self._store = context.store
        self._window_ms = window_ms
        self._now_ms = now_ms = context.runner.now_ms
        self._count = context.count
        self._is_withdrawn = is_withdrawn
        self._begin_ms = now_ms()
        self._recent: dict[int, int] = {}
        self._older: dict[int, int] = {}
        self._read_log(now_ms() - window_ms)
        if context.metrics is not None:
            context.metrics.gauge("resend_ids", lambda: len(self._recent) + len(self._older), owner=context)

    def _read_log(self, begin_ms: int) -> None:
        """Add the sends that were stored at a time or later; the first one of an id counts that was not withdrawn."""
        log = self._store.log
        for _, _, raw in log.scan(log.file_before(begin_ms - 1), check_body=False):
            message = None if raw is None else StoredMessage(raw)
            if message is not None and message.store_timestamp_ms >= begin_ms:
                name = _name_of_record(message)
                if name is not None and self.first_send(name) is None:
                    self.add_send(name, message.physical_offset)

    def first_send(self, name: Name) -> FirstSend | None:
        """Return the send within the window that this one repeats; None for a new message."""
        key = hash(name)
        place = self._recent.get(key, self._older.get(key))
        if place is None:
            return None
        try:
            message = self._store.message_at(place)
        except CorruptionError:
            return None
        if message is None or self._now_ms() - message.store_timestamp_ms > self._window_ms:
            return None
        destination = sent_to(message)
        if destination is None or _name_of_record(message) != name or self._is_withdrawn(message):
            return None
        host = encode_host(message.store_host)
        result = AppendResult(place, message.size, message.queue_offset, message.store_timestamp_ms, host)
        return FirstSend(destination.queue_id, result)

    def store_once(
        self,
        store: Callable[..., tuple[int, AppendResult]],
        group: str,
        message: Message,
        *fields: Any,  # noqa: ANN401 (of a send)
    ) -> tuple[int, AppendResult]:
        """Store a message by ``store(group, message, *fields)``, or find the one that it repeats."""
        name = name_of_send(group, message)
        if name is None:
            return store(group, message, *fields)
        with self._lock:
            first = self.first_send(name)
            if first is None:
                first = FirstSend(*store(group, message, *fields))
                self.add_send(name, first.result.physical_offset)
            else:
                self.count_resend(name)
        return first

    def store_new(
        self, store: Callable[[SendBatch], tuple[int, list[AppendResult]]], request: SendBatch
    ) -> tuple[int, list[AppendResult]]:
        """Store the messages of a batch that are no resends; return the queue of the first, and the places of all."""
        names = [name_of_send(request.group, message) for message in request.messages]
        sends: dict[Name | int, FirstSend] = {}
        new: dict[Name | int, Message] = {}
        with self._lock:
            for number, (name, message) in enumerate(zip(names, request.messages, strict=True)):
                first = None if name is None or name in new or name in sends else self.first_send(name)
                if first is not None and name is not None:
                    sends[name] = first
                    self.count_resend(name)
                elif name is None or name not in sends:
                    new.setdefault(number if name is None else name, message)
            if new:
                queue_id, results = store(replace(request, messages=tuple(new.values())))
                for new_name, result in zip(new, results, strict=True):
                    sends[new_name] = FirstSend(queue_id, result)
                    if not isinstance(new_name, int):
                        self.add_send(new_name, result.physical_offset)
        sent = [sends[number if name is None else name] for number, name in enumerate(names)]
        return sent[0].queue_id, [send.result for send in sent]

    def count_resend(self, name: Name) -> None:
        self._count("resends_dropped", topic=name[0])

    def add_send(self, name: Name, physical_offset: int) -> None:
        now_ms = self._now_ms()
        if now_ms - self._begin_ms >= self._window_ms or len(self._recent) >= _MOST_IDS // 2 or now_ms < self._begin_ms:
            if now_ms - self._begin_ms < self._window_ms and self._older:
                self._count("resend_ids_dropped", len(self._older))
            self._older, self._recent, self._begin_ms = self._recent, {}, now_ms
        self._recent[hash(name)] = physical_offset
