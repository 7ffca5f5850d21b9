"""Searches in a store: records by place, by key and by id.

Searches take places from the index or from queues, check them against the log, and mirror 4.9.4's
``DefaultMessageStore.queryMessage`` and ``MQAdminImpl.queryMessage``.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import Final

from librmq.config import wrong_kind
from librmq.consumequeue import offset_at_place
from librmq.consumequeue_entries import ENTRY
from librmq.errors import CorruptionError, MessageIllegalError
from librmq.java.lang import index_key_hash
from librmq.message import StoredMessage
from librmq.message import record as record_format
from librmq.message.ids import parse_offset_message_id
from librmq.message.message import is_batch
from librmq.store.engine._entry_checks import EntryChecks, is_usual
from librmq.store.engine.derivation import KeyBlock, has_queue_entry
from librmq.store.engine.read import unwrapped
from librmq.store.engine.store_parts import Parts, QueueName, QueueTable

_PLACE: Final = struct.Struct(">q")  # the first field of an entry
_unpack_place: Final = record_format.header_struct("queue_id", "queue_offset").unpack_from
_EVER: Final = (1 << 63) - 1


def _leading_to(queues: QueueTable, topic: str | None, place: int) -> Iterator[tuple[QueueName, int, int]]:
    """Yield queue, queue offset and size of the entries that lead to a place, in the queues of a topic or in all."""
    for name in [name for name in queues if topic in (None, name[0])]:
        queue_offset = offset_at_place(queues[name], place)
        raw = queues[name].read(queue_offset, 1)
        if raw.startswith(_PLACE.pack(place)):
            yield name, queue_offset, ENTRY.unpack(raw)[1]


def _leads_to(queues: QueueTable, name: QueueName, queue_offset: int, place: int) -> bool:
    try:
        queue = queues.find(name)
        return queue is not None and queue.read(queue_offset, 1).startswith(_PLACE.pack(place))
    except (CorruptionError, MessageIllegalError):
        return False


def _message_at(checks: EntryChecks, topic: str | None, place: int) -> StoredMessage | None:
    """Return the message at a place, as the entry says that leads there; ``topic`` is the one of its queue, if known.

    Raises:
        CorruptionError: The record is damaged.
    """
    raw = checks.log.read(place)
    if raw is None:
        return None
    queue_id, queue_offset = _unpack_place(raw)
    name = (topic or "", queue_id)
    if is_usual(raw, place, queue_offset, name) and _leads_to(checks.queues, name, queue_offset, place):
        return StoredMessage(raw)
    message = StoredMessage(checks.log.sound(raw, place))
    queue_name = message.topic, queue_id
    if not has_queue_entry(message.sys_flag) or (
        message.physical_offset == place and _leads_to(checks.queues, queue_name, queue_offset, place)
    ):
        return message
    for name, queue_offset, size in _leading_to(checks.queues, topic, place):
        raw = checks.record(checks.queues[name], name, queue_offset, place, size)
        if raw is not None and StoredMessage(raw).physical_offset == place:
            return StoredMessage(raw)
    return message


# ---- by key and by id


def find_by_key(  # noqa: PLR0913 (the arguments of `MessageStore.find_by_key`, and where it looks)
    checks: EntryChecks,
    parts: Parts,
    unindexed: Sequence[KeyBlock],
    topic: str,
    key: str,
    begin_ms: int,
    end_ms: int,
    max_messages: int,
    exact: bool,
) -> Iterator[StoredMessage]:
    """Yield messages by key; see `MessageStore.find_by_key`. The index lacks the last records, ``unindexed``."""
    for name, value in (("topic", topic), ("key", key)):
        if not isinstance(value, str):
            raise wrong_kind(name, value, "text")
    last = -1
    if exact and begin_ms == 0:
        begin_ms = -_EVER  # a clock can be before 1970
    places = parts.index.query(topic, key, begin_ms, end_ms, max_messages)
    if exact and len(places) < max_messages and (begin_ms > 0 or end_ms < _EVER):
        places = _with_records_before_jump(parts, places, topic, key, begin_ms, end_ms)[:max_messages]
    if unindexed:
        key_hash = index_key_hash(topic, key)
        key_places = itertools.chain.from_iterable(keys.places_of(key_hash, begin_ms, end_ms) for keys in unindexed)
        last_places = {place for place in key_places if place < parts.log.end}
        places = [*sorted(last_places.difference(places), reverse=True), *places][: max(max_messages, 0)]
    for physical_offset in sorted(places):
        if exact and physical_offset == last:
            continue
        message = _message_at(checks, topic, physical_offset)
        if message is None or (exact and message.topic != topic):
            continue
        has_key = not exact or key in message.keys or key == message.unique_key
        if is_batch(message):
            batch = unwrapped(parts.log, message) if physical_offset != last else []
            yield from (inner for inner in batch if has_key or key == inner.unique_key or key in inner.keys)
        elif has_key:
            yield message
        last = physical_offset


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


def find_by_id(
    checks: EntryChecks,
    parts: Parts,
    unindexed: Sequence[KeyBlock],
    message_id: str,
    known_topics: Callable[[], AbstractSet[str]],
) -> list[StoredMessage]:
    """Find messages by id; see `MessageStore.find_by_id`. ``known_topics()`` are searched besides those with queues."""
    damage: CorruptionError | None = None
    try:
        _, physical_offset = parse_offset_message_id(message_id)
    except ValueError:
        pass
    else:
        try:
            message = _message_at(checks, None, physical_offset)
        except CorruptionError as error:
            message = None
            # 32 digits can also be a unique id, and any number can stand for a place where no record begins.
            damage = error if any(_leading_to(parts.queues, None, physical_offset)) else None
        if message is not None and message.offset_id == message_id.upper():
            return unwrapped(parts.log, message)
    messages = {
        (message.physical_offset, message.queue_offset): message
        for topic in sorted({topic for topic, _ in parts.queues} | known_topics())
        for message in find_by_key(checks, parts, unindexed, topic, message_id, 0, (1 << 63) - 1, 1 << 31, True)
        if message.unique_key == message_id
    }
    if not messages:  # unindexed records: of a rollback, or of a topic without a queue; or batches
        messages = {
            (message.physical_offset, message.queue_offset): message
            for stored in parts.log.search(b"UNIQ_KEY\1" + message_id.encode(errors="surrogatepass"))
            for message in unwrapped(parts.log, stored)
            if message_id in (message.unique_key, stored.unique_key)
        }
    if not messages and damage is not None:
        raise damage
    return [messages[place] for place in sorted(messages)]
