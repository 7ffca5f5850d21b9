"""Batches: several messages of one topic that are sent, and stored, as a whole or not at all.

A message inside a batch, as clients send it, big-endian::

    size 4 | 0 4 | 0 4 | flag 4 | body length 4 | body | properties length 2 | properties

Stored, each is a record of its own; they lie side by side. Mirrors 4.9.4's ``MessageBatch``, and
``MessageDecoder.encodeMessages``. Everything here is a pure function of its arguments, and thread-safe.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from librmq.errors import MessageIllegalError
from librmq.message.message import Message
from librmq.message.record import PROPERTY_DELAY, PROPERTY_WAIT, encode_properties

__all__ = [
    "BATCH_FIXED_SIZE",
    "BatchItem",
    "check_batch",
    "decode_batch",
    "encode_batch",
    "encoded_size",
    "split_batch",
]

_HEADER: Final = struct.Struct(">iiiii")  # size, magic, body crc, flag, body length
_SHORT: Final = struct.Struct(">h")
BATCH_FIXED_SIZE: Final = _HEADER.size + 2
"""What a message in a batch has beside its body and its properties."""


def check_batch(messages: Sequence[Message]) -> None:
    """Refuse what no client would send as a batch and no broker would take: `MessageIllegalError`.

    That is none at all, several topics or wait flags, and a delay.
    """
    if not messages:
        raise MessageIllegalError("a batch needs at least one message")
    topic, waits = messages[0].topic, messages[0].wait_store_ok
    for message in messages:
        if message.topic != topic:
            raise MessageIllegalError(f"a batch has one topic, found {topic!r} and {message.topic!r}")
        properties = message.properties
        if not (waits and PROPERTY_WAIT not in properties) and message.wait_store_ok != waits:
            raise MessageIllegalError("a batch has one wait flag, found several")
        if message._delays is not None or (PROPERTY_DELAY in properties and message.delay_level > 0):
            raise MessageIllegalError("a batch can't be delayed")


def encoded_size(message: Message) -> int:
    """The bytes that a message takes in a batch as a client encodes it."""
    return BATCH_FIXED_SIZE + len(message.body) + len(encode_properties(message.properties))


def split_batch(messages: Iterable[Message], max_size: int = 4 << 20) -> Iterator[list[Message]]:
    """Cut ``messages`` into batches of at most ``max_size`` bytes as a client encodes them, in order.

    `MessageIllegalError` for a message that is larger by itself.
    """
    batch: list[Message] = []
    total = 0
    for message in messages:
        size = encoded_size(message)
        if size > max_size:
            raise MessageIllegalError(f"a message of {size} bytes does not fit into a batch of {max_size}")
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
    """Messages as one body. `MessageIllegalError` for properties that are too long, a flag over 32 bits."""
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
    """The messages of a batch. `MessageIllegalError` says which one contradicts itself."""
    items: list[BatchItem] = []
    at = 0
    while at < len(raw):
        if at + BATCH_FIXED_SIZE > len(raw):
            raise MessageIllegalError(f"batch: message {len(items)} is cut short at byte {len(raw)}")
        size, _, _, flag, body_length = _HEADER.unpack_from(raw, at)
        end = at + size
        body_at = at + _HEADER.size
        body_end = body_at + body_length
        if body_length < 0 or not body_end + 2 <= end <= len(raw):
            raise MessageIllegalError(
                f"batch: message {len(items)} at byte {at} has {size} bytes with a body of {body_length}, "
                f"{len(raw) - at} bytes are left"
            )
        (properties_length,) = _SHORT.unpack_from(raw, body_end)
        if body_end + 2 + properties_length != end:
            raise MessageIllegalError(
                f"batch: message {len(items)} at byte {at} has {properties_length} bytes of properties, "
                f"expected {end - body_end - 2}"
            )
        items.append(BatchItem(raw[body_at:body_end], flag, raw[body_end + 2 : end]))
        at = end
    return items
