"""Derivation of queue entries and keys from the records of a log.

Recovery compares queues and index with the result, and a replica writes them from it.
"""

from __future__ import annotations

from typing import Final

from librmq.java.lang import java_decode
from librmq.message import record as record_format
from librmq.message.delay_levels import SCHEDULE_TOPIC, DelayLevels
from librmq.message.message import StoredMessage
from librmq.store.engine.dispatch import derived_tags_code, has_queue_entry, is_indexed

Derived = tuple[int, int, int, bytes, int, int, int | None, int, bytes, bytes | None, bytes | None]
"""Physical offset and size of a record, the physical offset that it names, its topic, queue id and queue offset, the
tags code of its queue entry (None if it gets none), its store time in ms, its properties, and its unique id and keys
(None if they are not indexed)."""

_unpack_fields = record_format.header_struct(
    "magic", "queue_id", "queue_offset", "physical_offset", "sys_flag", "store_timestamp", "body_length"
).unpack_from
_find_keys_and_tags = record_format.find_keys_and_tags
_MAGIC: Final = record_format.MESSAGE_MAGIC
_V6: Final = record_format.HOSTS_V6
_IN_TRANSACTION: Final = record_format.TRANSACTION_MASK
_SCHEDULE_TOPIC: Final = SCHEDULE_TOPIC.encode()
_TAGS_KEPT: Final = 10_000


class Derivation:
    """Reads records of one store and caches the codes of their tags. Not thread-safe."""

    def __init__(self, levels: DelayLevels) -> None:
        self._levels = levels
        self._tags_codes: dict[bytes | None, int] = {None: 0}

    def derive(self, physical_offset: int, size: int, raw: bytes) -> Derived:
        """Return what a record defines."""
        magic, queue_id, queue_offset, address, sys_flag, stored, body_size = _unpack_fields(raw)
        if magic != _MAGIC or sys_flag & _V6:
            stored = record_format.store_timestamp_ms(raw)
            _, _, topic_at, topic_end, properties_at, _ = record_format.frame(raw, 0, size)
        else:
            topic_at = 89 + body_size if body_size > 0 else 89
            topic_end = topic_at + raw[topic_at - 1]
            properties_at = topic_end + 2
        topic, properties = raw[topic_at:topic_end], raw[properties_at:]
        unique, key, tags = _find_keys_and_tags(properties)
        code: int | None = None
        if not sys_flag & _IN_TRANSACTION or has_queue_entry(sys_flag):
            if topic == _SCHEDULE_TOPIC:
                code = derived_tags_code(StoredMessage(raw), self._levels)
            else:
                code = self._tags_codes.get(tags)
                if code is None:
                    if len(self._tags_codes) > _TAGS_KEPT:
                        self._tags_codes = {None: 0}
                    code = self._tags_codes[tags] = record_format.tags_code(java_decode(tags or b""))
        if sys_flag & _IN_TRANSACTION and not is_indexed(sys_flag):
            unique = key = None
        return physical_offset, size, address, topic, queue_id, queue_offset, code, stored, properties, unique, key
