"""Searches by key and by id: places from the index, checked against the log.

Mirrors 4.9.4's ``DefaultMessageStore.queryMessage`` and ``MQAdminImpl.queryMessage``.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Final

from librmq.config import wrong_kind
from librmq.errors import CorruptionError
from librmq.message import record
from librmq.message.message import StoredMessage
from librmq.store.engine.open_store import Parts

_EVER: Final = (1 << 63) - 1


def find_by_key(
    parts: Parts, topic: str, key: str, begin_ms: int, end_ms: int, max_messages: int, exact: bool
) -> list[StoredMessage]:
    """Find messages by key; see `MessageStore.find_by_key`."""
    for name, value in (("topic", topic), ("key", key)):
        if not isinstance(value, str):
            raise wrong_kind(name, value, "text")
    messages = []
    last = -1
    if exact and begin_ms == 0:
        begin_ms = -_EVER  # a clock can be before 1970
    places = parts.index.query(topic, key, begin_ms, end_ms, max_messages)
    if exact and len(places) < max_messages and (begin_ms > 0 or end_ms < _EVER):
        places = _with_records_before_jump(parts, places, topic, key, begin_ms, end_ms)[:max_messages]
    for physical_offset in sorted(places):
        if exact and physical_offset == last:
            continue
        last = physical_offset
        message = parts.log.message(physical_offset, check_body=False)
        if message is None:
            continue
        if exact and (message.topic != topic or (key != message.unique_key and key not in message.keys)):
            continue
        messages.append(message)
    return messages


def _with_records_before_jump(
    parts: Parts, places: list[int], topic: str, key: str, begin_ms: int, end_ms: int
) -> list[int]:
    """Return the places, newest first, including records that the index has at another time.

    An index file has no times before its first record. After the clock was set back, that record can be a later one.
    """
    indexed, merged = set(places), list(places)
    for place in parts.index.query(topic, key, -_EVER, _EVER, _EVER):
        if place not in indexed:
            stored_ms = parts.log.store_timestamp_ms(place)
            if stored_ms is not None and begin_ms <= stored_ms <= end_ms:
                merged.append(place)
    return sorted(merged, reverse=True)


def find_by_id(parts: Parts, message_id: str, known_topics: AbstractSet[str]) -> list[StoredMessage]:
    """Find messages by id; see `MessageStore.find_by_id`. ``known_topics`` are searched besides those with queues."""
    try:
        _, physical_offset = record.parse_offset_message_id(message_id)
    except ValueError:
        pass
    else:
        try:
            message = parts.log.message(physical_offset)
        except CorruptionError:
            message = None  # 32 digits can also be a unique id
        if message is not None and message.offset_id == message_id.upper():
            return [message]
    messages = {
        message.physical_offset: message
        for topic in sorted({topic for topic, _ in parts.queues} | known_topics)
        for message in find_by_key(parts, topic, message_id, 0, (1 << 63) - 1, 1 << 31, True)
        if message.unique_key == message_id
    }
    if not messages:  # unindexed records: of a rollback, or of a topic without a queue
        messages = {
            message.physical_offset: message
            for message in parts.log.search(b"UNIQ_KEY\1" + message_id.encode(errors="surrogatepass"))
            if message.unique_key == message_id
        }
    return [messages[physical_offset] for physical_offset in sorted(messages)]
