"""Retries of a consumer group that wait: in its retry topic, or for their delay to end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from librmq.diagnosis.group_lag import lag
from librmq.diagnosis.pending import pending_messages
from librmq.diagnosis.view import StoreView
from librmq.message import record
from librmq.message.message import Message, StoredMessage
from librmq.message.topics import retry_topic
from librmq.store import MessageStore
from librmq.store.format.broker_tables import BrokerTables, topic_row

_READABLE: Final = 6  # and writable
_OF_THE_DELAY: Final = frozenset((record.PROPERTY_DELAY, record.PROPERTY_REAL_TOPIC, record.PROPERTY_REAL_QUEUE_ID))


def waiting_retries(store: MessageStore, tables: BrokerTables, group: str) -> Iterator[StoredMessage]:
    """Yield the retries that a group has not consumed, those in its retry topic first."""
    topic = retry_topic(group)
    for row in lag(StoreView.over(store, tables), group=group, topic=topic, times=False):
        begin = max(row.min_offset, row.consumer_offset or 0)
        yield from store.messages(topic, row.queue_id, begin, row.max_offset)
    for pending in pending_messages(store, tables, kind="retry", topic=topic):
        message = store.message_at(pending.physical_offset)
        if pending.target_topic == topic and message is not None:
            yield message


def move_retries(store: MessageStore, tables: BrokerTables, group: str, new_group: str) -> tuple[int, int]:
    """Copy the waiting retries of a group to the retry topic of another one, and skip those that are due.

    The attempts so far count for the new group. Its retries are due at once.

    Returns:
        The number of copies, and how many of them the old group gets too when their delay ends.
    """
    topic, old_topic = retry_topic(new_group), retry_topic(group)
    if topic not in tables.topics.rows:
        tables.topics.set(topic, topic_row(topic, 1, 1, _READABLE))
    copies = delayed = 0
    for message in list(waiting_retries(store, tables, group)):
        copy = Message(topic, message.stored_body, flag=message.flag)
        copy.properties = {name: value for name, value in message.properties.items() if name not in _OF_THE_DELAY}
        copy.properties.setdefault(record.PROPERTY_ORIGIN_MESSAGE_ID, message.offset_id)
        store.append(
            copy,
            born_timestamp_ms=message.born_timestamp_ms,
            born_host=message.born_host,
            store_host=message.store_host,
            sys_flag=message.sys_flag,
            reconsume_times=message.reconsume_times,
        )
        copies += 1
        delayed += message.topic != old_topic
    if copies:
        tables.set_consumer_offset(topic, new_group, 0, store.queue_range(topic, 0)[1] - copies)
    for row in lag(StoreView.over(store, tables), group=group, topic=old_topic, times=False):
        if row.lag:
            tables.set_consumer_offset(old_topic, group, row.queue_id, row.max_offset)
    return copies, delayed
