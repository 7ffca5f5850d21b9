"""Messages between their form on the wire and that in the log.

Mirrors ``SendMessageActivity`` and ``GrpcConverter`` of 5.3.3's proxy.
"""

from __future__ import annotations

import enum
import gzip
import hashlib
import io
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

from librmq.broker import Broker
from librmq.errors import BodyCompressionError, MessageIllegalError
from librmq.java.lang import string_hash
from librmq.message import Message, StoredMessage, record
from librmq.message.properties import RESERVED_PROPERTIES, PropertyName, is_half, priority_of
from librmq.message.topics import (
    NOT_FOR_SENDING,
    TopicType,
    check_receive_retry_topic,
    is_system_topic,
    validate_client_topic,
    validate_group,
)
from librmq.protocol import Received
from librmq.wire.grpc._protocol import Code, Refusal, message_class

MAX_BODY: Final = 4 << 20
MAX_DELAY_MS: Final = 24 * 3_600_000
_MAX_PROPERTIES: Final = 128
_MAX_PROPERTIES_SIZE: Final = 16 << 10
_MAX_GROUP: Final = 64
_MAX_RECOVERY_S: Final = 3600
_SYSTEM_GROUP: Final = "CID_RMQ_SYS_"
_LITE: Final = 5
"""The type of messages of lite topics, which 5.5 has."""
_IDENTITY, _GZIP, _MD5 = 1, 2, 2
_SHARDING_KEY: Final = PropertyName.SHARDING_KEY
_BORN_HOST: Final = "__BORNHOST"
_BORN_TIME: Final = "BORN_TIMESTAMP"
_RESERVED: Final = RESERVED_PROPERTIES.union(
    ("EXTEND_UNIQ_INFO", "POP_CK", "POP_CK_OFFSET", "1ST_POP_TIME", "TRAN_PREPARED_QUEUE_OFFSET", "DUP_INFO"),
    ("INNER_MULTI_DISPATCH", _BORN_HOST, _BORN_TIME, "TIMER_DELAY_SEC", "TIMER_DELAY_MS", "TIMER_DELIVER_MS"),
    ("TIMER_ENQUEUE_MS", "TIMER_DEQUEUE_MS", "TIMER_ROLL_TIMES", "TIMER_OUT_MS", "TIMER_DEL_UNIQKEY"),
    ("TIMER_DELAY_LEVEL", "DLQ_ORIGIN_TOPIC", "DLQ_ORIGIN_MESSAGE_ID"),
)
_TIMED: Final = ("DELAY", PropertyName.TIMER_DELAY_SEC, PropertyName.TIMER_DELAY_MS, PropertyName.TIMER_DELIVER_MS)

_Message = message_class("Message")


class MessageType(enum.IntEnum):
    """What kind of message the client sends."""

    NORMAL = 1
    FIFO = 2
    DELAY = 3
    TRANSACTION = 4
    PRIORITY = 6

    @classmethod
    def of_topic(cls, message_type: TopicType) -> list[MessageType]:
        """Return the kinds that clients may send to a topic; as in 5.4 no priority to a mixed one."""
        return [kind for kind in cls if kind is not cls.PRIORITY] if message_type == "MIXED" else [cls[message_type]]


def check_topic(name: str) -> str:
    """Return the name of a topic; refuse one that is not a user's."""
    try:
        validate_client_topic(name)
    except MessageIllegalError as error:
        raise Refusal(Code.ILLEGAL_TOPIC, str(error)) from error
    if is_system_topic(name) or name in NOT_FOR_SENDING:
        raise Refusal(Code.ILLEGAL_TOPIC, f"topic {name!r} is the broker's own: choose another name")
    return name


def check_group(name: str) -> str:
    """Return the name of a consumer group; refuse one that is not a user's."""
    try:
        validate_group(name)
    except MessageIllegalError as error:
        raise Refusal(Code.ILLEGAL_CONSUMER_GROUP, str(error)) from error
    if name.startswith(_SYSTEM_GROUP):
        raise Refusal(Code.ILLEGAL_CONSUMER_GROUP, f"group {name!r} is the broker's own: choose another name")
    return name


def check_retry_topic(broker: Broker, group: str, topic: str) -> None:
    """Refuse a group and a topic whose names are too long for a retry topic, unless the group is ordered."""
    try:
        check_receive_retry_topic(group, topic)
    except MessageIllegalError as error:
        if not broker.is_ordered(group):
            raise Refusal(Code.ILLEGAL_CONSUMER_GROUP, str(error)) from error


def milliseconds(value: Any, name: str, code: Code = Code.BAD_REQUEST) -> int:
    """Return a time or a duration in milliseconds; refuse one out of protobuf's range."""
    try:
        return int(value.ToMilliseconds())
    except ValueError as error:
        raise Refusal(code, f"{name}: {error}") from error


def message_of(sent: Any, now_ms: int, client_ms: int) -> Message:
    """Return a sent message as it is stored; refuse it as 5.3.3's proxy does.

    ``now_ms`` is the broker's time, and ``client_ms`` the one that the client computes times of delivery by.
    """
    topic, system = check_topic(sent.topic.name), sent.system_properties
    _check_kind(system)
    body = _body(sent.body, system.body_encoding)
    tag = system.tag if system.HasField("tag") else None
    _check_texts(sent.user_properties, tag, system.keys)
    if not system.message_id:
        raise Refusal(Code.ILLEGAL_MESSAGE_ID, "message_id is empty")
    message = Message(topic, body)
    properties = message.properties
    properties.update(sent.user_properties)
    if tag is not None:
        properties[PropertyName.TAGS] = tag
    if system.keys:
        properties[PropertyName.KEYS] = " ".join(system.keys)
    properties[PropertyName.UNIQUE_KEY] = system.message_id
    if system.message_type == MessageType.TRANSACTION:
        properties[PropertyName.TRANSACTION_PREPARED] = "true"
        seconds = _recovery_seconds(system)
        if seconds:
            properties[PropertyName.CHECK_IMMUNITY_TIME] = str(seconds)
    if system.HasField("delivery_timestamp"):
        deliver_ms = milliseconds(system.delivery_timestamp, "delivery_timestamp", Code.ILLEGAL_DELIVERY_TIME)
        if deliver_ms > client_ms + MAX_DELAY_MS:
            raise Refusal(Code.ILLEGAL_DELIVERY_TIME, f"delivery_timestamp: {deliver_ms} ms is more than a day ahead")
        properties[PropertyName.TIMER_DELIVER_MS] = str(max(now_ms + deliver_ms - client_ms, 0))
    properties[PropertyName.PRODUCER_GROUP] = topic
    if system.HasField("message_group"):
        properties[_SHARDING_KEY] = _message_group(system.message_group)
    if system.HasField("priority"):
        properties[PropertyName.PRIORITY] = str(system.priority)
    if system.trace_context:
        properties[PropertyName.TRACE_CONTEXT] = system.trace_context
    properties[_BORN_HOST] = system.born_host
    properties[_BORN_TIME] = str(milliseconds(system.born_timestamp, "born_timestamp"))
    properties[PropertyName.RECONSUME_TIME] = "0"
    return message


def _check_kind(system: Any) -> None:
    """Refuse a message of a lite topic, a transactional one with a delivery time (as 5.5.1), and a priority below 0."""
    if system.message_type == _LITE or system.lite_topic:
        raise Refusal(
            Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE,
            f"lite_topic {system.lite_topic!r:.80}: lite topics are not served: send to topics of their own",
        )
    if system.message_type == MessageType.TRANSACTION and system.HasField("delivery_timestamp"):
        raise Refusal(
            Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE,
            "delivery_timestamp: a transactional message is delivered when it is committed: send it without a time",
        )
    if system.HasField("priority") and system.priority < 0:
        raise Refusal(Code.BAD_REQUEST, f"priority: expected 0 or more, found {system.priority}")


def _recovery_seconds(system: Any) -> int:
    seconds = int(system.orphaned_transaction_recovery_duration.ToSeconds())
    if not 0 <= seconds <= _MAX_RECOVERY_S:
        raise Refusal(Code.BAD_REQUEST, f"orphaned_transaction_recovery_duration: {seconds} s, 1 hour at most")
    return seconds


def _message_group(group: str) -> str:
    if not group.strip() or len(group.encode()) >= _MAX_GROUP or _has_control(group):
        raise Refusal(
            Code.ILLEGAL_MESSAGE_GROUP,
            f"message_group: expected 1 to {_MAX_GROUP - 1} bytes without control characters, found {group!r:.80}",
        )
    return group


def _body(body: bytes, encoding: int) -> bytes:
    if len(body) > MAX_BODY:
        raise Refusal(Code.MESSAGE_BODY_TOO_LARGE, f"message body cannot exceed the max {MAX_BODY}")
    if encoding == _GZIP and body:
        body = _unpacked(body)
    if not body:
        raise Refusal(Code.MESSAGE_BODY_EMPTY, "body is empty")
    return body


def _unpacked(body: bytes) -> bytes:
    """Return a compressed body unpacked, which it is by its first bytes: gzip or zlib."""
    try:
        if body[:2] == b"\x1f\x8b":
            with gzip.GzipFile(fileobj=io.BytesIO(body)) as unpacked:
                plain = unpacked.read(MAX_BODY + 1)
        else:
            plain = record.decompress_body(body, record.COMPRESSED, MAX_BODY + 1, cuts=True)
    except (OSError, EOFError, zlib.error, BodyCompressionError) as error:
        raise Refusal(Code.MESSAGE_CORRUPTED, f"body: encoded as GZIP, and can't be unpacked: {error}") from error
    if len(plain) > MAX_BODY:
        raise Refusal(Code.MESSAGE_BODY_TOO_LARGE, f"message body cannot exceed the max {MAX_BODY}, also unpacked")
    return plain


def _check_texts(properties: Mapping[str, str], tag: str | None, keys: Sequence[str]) -> None:
    """Refuse user properties, a tag or keys that a client must not send."""
    if len(properties) > _MAX_PROPERTIES:
        raise Refusal(
            Code.MESSAGE_PROPERTIES_TOO_LARGE, f"user properties: {len(properties)}, {_MAX_PROPERTIES} at most"
        )
    for name, value in properties.items():
        if not name or name in _RESERVED or _has_control(name) or _has_control(value):
            raise Refusal(
                Code.ILLEGAL_MESSAGE_PROPERTY_KEY,
                f"user property {name!r:.80}: the name is reserved, or it has control characters",
            )
    if tag is not None and (not tag.strip() or "|" in tag or _has_control(tag)):
        raise Refusal(
            Code.ILLEGAL_MESSAGE_TAG, f"tag: expected text without '|' and control characters, found {tag!r:.80}"
        )
    for key in keys:
        if not key.strip() or _has_control(key):
            raise Refusal(Code.ILLEGAL_MESSAGE_KEY, f"key: expected text without control characters, found {key!r:.80}")
    texts = (*properties.keys(), *properties.values(), tag or "", *keys)
    size = sum(len(text.encode()) for text in texts)
    if size > _MAX_PROPERTIES_SIZE:
        raise Refusal(
            Code.MESSAGE_PROPERTIES_TOO_LARGE,
            f"properties, tag and keys: {size} bytes, {_MAX_PROPERTIES_SIZE} at most",
        )


def _has_control(text: str) -> bool:
    return any(character < " " or "\x7f" <= character <= "\x9f" for character in text)


def to_received(received: Received, topic: str, invisible_ms: int) -> Any:
    """Return a message that was received from a topic in the form for its client."""
    message = to_message(received.message, topic)
    system = message.system_properties
    system.receipt_handle = received.receipt
    system.delivery_attempt = received.attempt
    system.invisible_duration.FromMilliseconds(invisible_ms)
    return message


def to_message(stored: StoredMessage, topic: str) -> Any:
    """Return a stored message in the form for clients, as one of ``topic``."""
    properties = stored.properties
    body = stored.body
    message = _Message(body=body)
    message.topic.name = topic
    message.user_properties.update({name: value for name, value in properties.items() if name not in _RESERVED})
    system = message.system_properties
    if stored.tags is not None:
        system.tag = stored.tags
    system.keys.extend(stored.keys)
    system.message_id = stored.message_id
    system.body_digest.type = _MD5  # a CRC32 each client writes differently
    system.body_digest.checksum = hashlib.md5(body, usedforsecurity=False).hexdigest().upper()
    system.body_encoding = _IDENTITY
    system.message_type = message_type_of(properties)
    system.born_timestamp.FromMilliseconds(stored.born_timestamp_ms)
    system.born_host = properties.get(_BORN_HOST) or stored.born_host[0]
    system.store_timestamp.FromMilliseconds(stored.store_timestamp_ms)
    system.store_host = "{}:{}".format(*stored.store_host)
    system.queue_id = stored.queue_id
    system.queue_offset = stored.queue_offset
    if PropertyName.TIMER_DELIVER_MS in properties and properties[PropertyName.TIMER_DELIVER_MS].isdecimal():
        system.delivery_timestamp.FromMilliseconds(int(properties[PropertyName.TIMER_DELIVER_MS]))
    if _SHARDING_KEY in properties:
        system.message_group = properties[_SHARDING_KEY]
    if PropertyName.TRACE_CONTEXT in properties:
        system.trace_context = properties[PropertyName.TRACE_CONTEXT]
    if (priority := priority_of(properties)) is not None:
        system.priority = priority
    return message


def message_type_of(properties: Mapping[str, str]) -> MessageType:
    if is_half(properties):
        return MessageType.TRANSACTION
    if any(name in properties for name in _TIMED):
        return MessageType.DELAY
    if _SHARDING_KEY in properties:
        return MessageType.FIFO
    return MessageType.NORMAL if priority_of(properties) is None else MessageType.PRIORITY


def group_queue(message_group: str, queues: int) -> int:
    """Return the queue of a message group: Guava's ``Hashing.consistentHash`` of Java's hash of the text."""
    state = string_hash(message_group) & 0xFFFFFFFFFFFFFFFF
    candidate = 0
    while True:
        state = (2862933555777941757 * state + 1) & 0xFFFFFFFFFFFFFFFF
        following = int((candidate + 1) / (((state >> 33) + 1) / 0x80000000))
        if not 0 <= following < queues:
            return candidate
        candidate = following
