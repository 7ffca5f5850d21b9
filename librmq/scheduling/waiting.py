"""Records that wait for their time: where they go, and when; and which records are the first of a producer's send.

::

    record in             goes to                  at
    SCHEDULE_TOPIC_XXXX   REAL_TOPIC, REAL_QID     the time in its queue entry
    rmq_sys_wheel_timer   REAL_TOPIC, REAL_QID     TIMER_DELIVER_MS, or its store time and TIMER_DELAY_MS or _SEC
    SYSTEM_SCHEDULE_MSG   SCHEDULE_TARGET_TOPIC,   SCHEDULE_TARGET_MS
                          SCHEDULE_TARGET_QID

A hop of the relay waits in the schedule topic with the properties of the last row.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from librmq.java.lang import java_int, java_long
from librmq.message import record
from librmq.message.delay_levels import SCHEDULE_TOPIC
from librmq.message.message import StoredMessage
from librmq.message.topics import DEAD_LETTER_PREFIX, HALF_TOPIC, RETRY_PREFIX, is_system_topic
from librmq.scheduling.relay import HOP_TOPIC, TARGET_MS, TARGET_QUEUE_ID, TARGET_TOPIC
from librmq.scheduling.timer_config import DELETE_KEY, OUT_MS, ROLL_TIMES, TIMER_TOPIC, deliver_time_ms

WAITING_TOPICS: Final = (SCHEDULE_TOPIC, TIMER_TOPIC, HOP_TOPIC)
"""The topics in which messages wait for their time."""
_OF_GROUPS: Final = (RETRY_PREFIX, DEAD_LETTER_PREFIX)
_PRECISION_MS: Final = 1000


class Destination(NamedTuple):
    """The queue that a message waits for."""

    topic: str
    """Empty if the record names none."""
    queue_id: int


def destination_of(message: StoredMessage) -> Destination:
    """Return where a record that waits, or an undecided half message, goes in the end."""
    properties = message.properties
    topic, queue_id = properties.get(record.PROPERTY_REAL_TOPIC, ""), properties.get(record.PROPERTY_REAL_QUEUE_ID)
    if HOP_TOPIC in (topic, message.topic):
        topic, queue_id = properties.get(TARGET_TOPIC, ""), properties.get(TARGET_QUEUE_ID)
    return Destination(topic, java_int(queue_id or "0") or 0)


def own_time_ms(message: StoredMessage) -> int | None:
    """Return the time that a waiting record has among its properties (ms); None for one of a delay level.

    A message that a timer has moved on and that names a delay waits at most a second longer than this.
    """
    properties = message.properties
    if HOP_TOPIC in (properties.get(record.PROPERTY_REAL_TOPIC), message.topic):
        return java_long(properties.get(TARGET_MS, ""))
    if message.topic != TIMER_TOPIC:
        return None
    out_ms = java_long(properties.get(OUT_MS, "0")) or 0
    if ROLL_TIMES in properties:  # its store time is not that of the send
        return out_ms + _PRECISION_MS
    return max(out_ms, deliver_time_ms(properties, message.store_timestamp_ms))


def sent_to(message: StoredMessage) -> Destination | None:
    """Return the queue of a producer's send that a record is the first of; None for a record that a broker made.

    A broker makes deliveries, hops, retries, dead letters, checked halves, final messages, op messages and the like.
    """
    properties, topic = message.properties, message.topic
    is_made = (
        message.reconsume_times
        or message.sys_flag & record.TRANSACTION_MASK == record.TRANSACTION_COMMIT
        or DELETE_KEY in properties
        or ROLL_TIMES in properties
        or record.PROPERTY_TRANSACTION_PREPARED_QUEUE_OFFSET in properties
        or record.PROPERTY_TRANSACTION_CHECK_TIMES in properties
    )
    real = properties.get(record.PROPERTY_REAL_TOPIC)
    if is_made or real == HOP_TOPIC:
        return None
    if topic in (SCHEDULE_TOPIC, TIMER_TOPIC, HALF_TOPIC) or (topic == HOP_TOPIC and real is None):
        destination = destination_of(message)
    elif real is None and not is_system_topic(topic):
        destination = Destination(topic, message.queue_id)
    else:
        return None
    return None if destination.topic.startswith(_OF_GROUPS) else destination
