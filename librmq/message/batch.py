"""Batches: several messages of one topic that are sent and stored together, or not at all.

A message inside a batch as clients send it, big-endian::

    size 4 | 0 4 | 0 4 | flag 4 | body length 4 | body | properties length 2 | properties

In the store each message is a record of its own, next to the others. For a topic with queues of batches, 5.x stores
the whole batch as one record (`inner_messages`). Mirrors ``MessageBatch`` and ``MessageDecoder.encodeMessages`` of
4.9.4, and ``MessageDecoder.decodeMessage`` of 5.3.3. Everything here is a pure function of its arguments, and
thread-safe.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from librmq.errors import MessageIllegalError, RecordError
from librmq.java.lang import java_int
from librmq.message.message import BATCH_FIXED_SIZE, Message, StoredMessage, body_too_large, is_batch
from librmq.message.properties import PropertyName, encode_properties
from librmq.message.record import (
    BODY_CRC_AT,
    COMPRESSED,
    COMPRESSION_MASK,
    FLAG_AT,
    INNER_BATCH,
    NEED_UNWRAP,
    QUEUE_OFFSET_AT,
    SYS_FLAG_AT,
    body_checksum,
)

_HEADER: Final = struct.Struct(">iiiii")  # size, magic, body crc, flag, body length
_SHORT: Final = struct.Struct(">h")
_ADDED: Final = {PropertyName.UNIQUE_KEY: "0" * 56, PropertyName.WAIT: "false"}
"""The longest properties that a producer adds to a message without them."""


def split_batch(messages: Iterable[Message], max_size: int = 4 << 20) -> Iterator[list[Message]]:
    """Cut ``messages``, in order, into batches of at most ``max_size`` bytes as a client encodes them.

    The unique id and the wait flag that a producer adds to each message are counted.

    Raises:
        MessageIllegalError: A single message is larger.
    """
    batch: list[Message] = []
    total = 0
    for message in messages:
        size = BATCH_FIXED_SIZE + len(message.body) + len(encode_properties(_ADDED | message.properties))
        if len(message.body) > max_size:
            raise body_too_large(len(message.body), max_size)
        if size > max_size:
            raise MessageIllegalError(
                f"topic {message.topic!r}: a message of {size:,} bytes does not fit into a batch of {max_size:,}: "
                "send it alone"
            )
        if total + size > max_size:
            yield batch
            batch, total = [], 0
        batch.append(message)
        total += size
    if batch:
        yield batch


class BatchItem(NamedTuple):
    """One message of a batch, as clients send it."""

    body: bytes
    flag: int = 0
    properties_raw: bytes = b""


def encode_batch(items: Iterable[BatchItem]) -> bytes:
    """Return messages as one body.

    Raises:
        MessageIllegalError: Properties are too long, or a flag exceeds 32 bits.
    """
    parts: list[bytes] = []
    for body, flag, properties_raw in items:
        size = BATCH_FIXED_SIZE + len(body) + len(properties_raw)
        try:
            parts += (
                _HEADER.pack(size, 0, 0, flag, len(body)),
                body,
                _SHORT.pack(len(properties_raw)),
                properties_raw,
            )
        except struct.error as error:
            raise MessageIllegalError(f"message {len(parts) // 4} of the batch is out of range: {error}") from None
    return b"".join(parts)


def decode_batch(raw: bytes) -> list[BatchItem]:
    """Return the messages of a batch.

    Raises:
        MessageIllegalError: The lengths of a message contradict each other; the error says which message.
    """
    items: list[BatchItem] = []
    at = 0
    while at < len(raw):
        if at + BATCH_FIXED_SIZE > len(raw):
            raise MessageIllegalError(f"batch: message {len(items)} is cut off at byte {len(raw)}")
        size, _, _, flag, body_length = _HEADER.unpack_from(raw, at)
        end = at + size
        body_at = at + _HEADER.size
        body_end = body_at + body_length
        if body_length < 0 or not body_end + 2 <= end <= len(raw):
            raise MessageIllegalError(
                f"batch: message {len(items)} at byte {at}: expected at most {len(raw) - at} bytes, "
                f"found {size} with a body of {body_length}"
            )
        (properties_length,) = _SHORT.unpack_from(raw, body_end)
        if body_end + 2 + properties_length != end:
            raise MessageIllegalError(
                f"batch: message {len(items)} at byte {at}: expected {end - body_end - 2} bytes of properties, "
                f"found {properties_length}"
            )
        items.append(BatchItem(raw[body_at:body_end], flag, raw[body_end + 2 : end]))
        at = end
    return items


# ---- batches in a log of 5.x

_INT: Final = struct.Struct(">i")
_LONG: Final = struct.Struct(">q")
_OF_BATCH: Final = INNER_BATCH | NEED_UNWRAP | COMPRESSED | COMPRESSION_MASK


def inner_messages(record: StoredMessage) -> list[StoredMessage]:
    """Return the messages of a record: itself, or those in its body if 5.x stored a batch as one record.

    These have the times, hosts and the physical offset of the record, the queue offsets from the record's on, and
    body, flag and properties of their own.

    Raises:
        RecordError: The body is not a batch, or has another number of messages than the property ``INNER_NUM``.
    """
    if not is_batch(record):
        return [record]
    try:
        items = decode_batch(record.body)
    except MessageIllegalError as error:
        raise RecordError(str(error), BODY_CRC_AT) from None
    number = record.properties[PropertyName.INNER_NUM]
    if not items:
        raise RecordError("batch: expected messages in the body, found none", BODY_CRC_AT)
    if (expected := java_int(number)) is None:
        raise RecordError(f"batch: {PropertyName.INNER_NUM}: expected a number, found {number!r:.40}", BODY_CRC_AT)
    if expected != len(items):
        raise RecordError(f"batch: expected {expected} messages in the body, found {len(items)}", BODY_CRC_AT)
    raw, (body_at, body_end, _, topic_end, _, _) = record.raw, record.frame
    topic, first = raw[body_end:topic_end], record.queue_offset
    messages = []
    for queue_offset, (body, flag, properties) in enumerate(items, first):
        text = (body, topic, _SHORT.pack(len(properties)), properties)
        head = bytearray(raw[:body_at])
        _INT.pack_into(head, 0, body_at + sum(map(len, text)))
        _INT.pack_into(head, BODY_CRC_AT, body_checksum(body))
        _INT.pack_into(head, FLAG_AT, flag)
        _LONG.pack_into(head, QUEUE_OFFSET_AT, queue_offset)
        _INT.pack_into(head, SYS_FLAG_AT, record.sys_flag & ~_OF_BATCH)
        _INT.pack_into(head, body_at - _INT.size, len(body))
        messages.append(StoredMessage(b"".join((head, *text))))
    return messages
