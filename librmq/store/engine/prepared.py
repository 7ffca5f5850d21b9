"""Records ready to append, without place, queue offset and store time; and the arguments and results of an append.

`Appender` prepares batches and copies of stored records without the writer's lock, then writes them under it.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, TypedDict

from librmq.config import wrong_kind
from librmq.consumequeue import ENTRY
from librmq.errors import MessageIllegalError
from librmq.message import record as record_format
from librmq.message.batch import BATCH_FIXED_SIZE, check_batch_size
from librmq.message.message import Message, StoredMessage, body_too_large, delayed_batch
from librmq.message.record import crc32
from librmq.runtime.locks import critical
from librmq.store.engine.dispatch import Dispatcher, Lane, Pending, has_queue_entry, is_indexed, parse_level

_MAX_PROPERTIES_SIZE: Final = record_format.MAX_PROPERTIES_SIZE
_pack_entry = ENTRY.pack
_pack_short = struct.Struct(">H").pack
_pack_int = struct.Struct(">i").pack
_pack_born = struct.Struct(">iq").pack
_pack_prepared = struct.Struct(">iq").pack
_TWO_HOSTS: Final = 16
"""Bytes of two IPv4 hosts."""
_new = tuple.__new__

# The spans are those of `Prepared`, which takes over as bytes what stays.
_pack_header: Final = {
    hosts: struct.Struct(
        f">IIII{record_format.span('flag', 'flag')}sqq"
        f"{record_format.span('sys_flag', 'born_host', hosts)}sq"
        f"{record_format.span('store_host', 'prepared_offset', hosts)}si"
    ).pack
    for hosts in record_format.HEADERS
}
"""Packer of a prepared record's header, by the flags of its hosts."""


class Prepared(NamedTuple):
    """A record without a place."""

    lane: Lane
    size: int
    flag: bytes
    to_born_host: bytes
    """Sys flag, born time and born host."""
    from_store_host: bytes
    """Store host, reconsume times and prepared offset."""
    checksum: int
    body_size: int
    tail: bytes
    """Everything from the body on."""
    properties_raw: bytes
    tags_code: int
    unique_key: str | None
    keys: str | None


class CopyTarget(NamedTuple):
    """The queue that a copy of a stored message goes to, and the properties of the copy."""

    topic: str
    queue_id: int
    properties_raw: bytes
    unique_key: str | None
    """As ``properties_raw`` has it; the caller vouches for that, as for keys and tags."""
    keys: str | None
    tags: str | None


class AppendResult(NamedTuple):
    """Where an appended message is stored."""

    physical_offset: int
    """Place of the record in the log."""
    size: int
    """Size of the record in bytes."""
    queue_offset: int
    """Number of the message in its queue."""
    store_timestamp_ms: int
    """Time of the append, in milliseconds since 1970."""
    store_host: bytes
    """Address and port, as in the record."""

    @property
    def offset_id(self) -> str:
        """Offset id of the message: store host and physical offset in hexadecimal."""
        return record_format.offset_message_id(record_format.decode_host(self.store_host), self.physical_offset)


class AppendFields(TypedDict, total=False):
    """Fields of a record that a broker sets: times in ms, hosts as (address, port) or in the form of a record."""

    born_timestamp_ms: int | None
    born_host: record_format.Host | bytes | None
    store_host: record_format.Host | bytes | None
    sys_flag: int
    reconsume_times: int
    prepared_transaction_offset: int
    properties_raw: bytes | None


class BatchFields(TypedDict, total=False):
    """These fields for a batch, and its properties."""

    properties: Mapping[str, str] | None
    born_timestamp_ms: int | None
    born_host: record_format.Host | None
    store_host: record_format.Host | None
    sys_flag: int
    reconsume_times: int


def prepare(
    lane: Lane,
    message: Message,
    properties: Mapping[str, str],
    sys_flag: int,
    born_timestamp_ms: int,
    born_at: bytes,
    stored_at: bytes,
    reconsume_times: int,
) -> Prepared:
    """Prepare a message with these properties for the queue of ``lane``; see `CopyWriter.prepare`.

    Raises:
        MessageIllegalError: The properties can't be stored.
        struct.error: A field is out of range.
    """
    raw = record_format.encode_properties(properties)
    raw_size = len(raw)
    if raw_size > _MAX_PROPERTIES_SIZE:
        check_sizes(0, raw_size, 0)
    hosts_size = len(born_at) + len(stored_at)
    if sys_flag or hosts_size > _TWO_HOSTS:
        sys_flag |= checked_host_flags(sys_flag, born_at, stored_at)
    get = properties.get
    tags = get("TAGS")
    body = message.body
    tail = b"".join((body, lane.topic_field, _pack_short(raw_size), raw))
    return _new(
        Prepared,
        (
            lane, 72 + hosts_size + len(tail), _pack_int(message.flag),
            _pack_born(sys_flag, born_timestamp_ms) + born_at, stored_at + _pack_prepared(reconsume_times, 0),
            crc32(body) & 0x7FFFFFFF, len(body), tail, raw,
            record_format.tags_code(tags) if tags else 0, get("UNIQ_KEY"), get("KEYS"),
        ),
    )  # fmt: skip


def prepare_again(record: StoredMessage, target: CopyTarget, lane: Lane, max_size: int) -> Prepared:
    """Prepare the message of a record for the queue of ``lane``; see `CopyWriter.prepare_again`."""
    _, _, raw, unique_key, keys, tags = target
    try:
        data = record.raw
    except AttributeError:
        raise wrong_kind("record", record, "a StoredMessage") from None
    begin, end, _, _, _, _ = record.frame
    body = data[begin:end]
    raw_size = len(raw)
    size = end + len(lane.topic_field) + 2 + raw_size
    if raw_size > _MAX_PROPERTIES_SIZE or size > max_size:
        raise MessageIllegalError(f"a record of {size} bytes, {raw_size} of them properties, can't be stored")
    bits = data[39]
    born_end = 68 if bits & record_format.BORN_HOST_V6 else 56
    if bits & record_format.TRANSACTION_MASK and not is_indexed(bits):
        unique_key = keys = None
    return _new(
        Prepared,
        (
            lane, size, data[16:20], data[36:born_end], data[born_end + 8 : begin - 4],
            crc32(body) & 0x7FFFFFFF, end - begin,
            b"".join((body, lane.topic_field, _pack_short(raw_size), raw)), raw,
            record_format.tags_code(tags) if tags else 0, unique_key, keys,
        ),
    )  # fmt: skip


class PlacedCopies(NamedTuple):
    """Copies with their places in one file of the log, as the writer needs them."""

    data: list[bytes]
    entries_of: dict[Lane, list[bytes]]
    records: list[Pending]
    results: list[AppendResult]


def place_copies(
    copies: Sequence[Prepared], physical_offset: int, file_end: int, now: int, dispatcher: Dispatcher
) -> PlacedCopies:
    """Place the first copies, as many as fit between two physical offsets, at a store time; under the writer's lock."""
    placed = PlacedCopies([], {}, [], [])
    data, entries_of, records, results = placed
    entries: list[bytes] = []
    last: Lane | None = None
    next_queue_offset = 0
    for (
        lane, size, flag, to_born_host, from_store_host, checksum, body_size, tail, raw, code, unique_key, keys
    ) in copies:  # fmt: skip
        if physical_offset + size > file_end:
            break
        if lane is not last:
            last, entries = lane, entries_of.setdefault(lane, [])
            next_queue_offset = lane.next_queue_offset + len(entries)
        bits = to_born_host[3]
        if bits & record_format.TRANSACTION_MASK and not has_queue_entry(bits):
            queue_offset = 0
        else:
            queue_offset = next_queue_offset
            next_queue_offset += 1
            if lane.queue.ext is not None:
                with critical:
                    code = dispatcher.add_unit(lane, code, now, raw)
            entries.append(_pack_entry(physical_offset, size, code))
        data += (
            _pack_header[bits & 48](
                size, record_format.MESSAGE_MAGIC, checksum, lane.queue_id, flag, queue_offset, physical_offset,
                to_born_host, now, from_store_host, body_size,
            ),
            tail,
        )  # fmt: skip
        records.append((physical_offset, now, lane.prefix_hash, unique_key, keys))
        results.append(_new(AppendResult, (physical_offset, size, queue_offset, now, from_store_host[:-12])))
        physical_offset += size
    return placed


class PreparedBatch(NamedTuple):
    """The messages of a batch, column by column, because calls for whole columns cost least."""

    sizes: list[int]
    flags: list[int]
    body_sizes: list[int]
    bodies: list[bytes]
    raw_sizes: list[bytes]
    """Packed."""
    raws: list[bytes]
    checksums: list[int]
    tags_codes: list[int]
    unique_keys: list[str | None]
    keys: list[str | None]


def prepare_batch(
    messages: Sequence[Message], fixed_size: int, properties: Mapping[str, str] | None, max_size: int
) -> PreparedBatch:
    """Prepare the messages of a batch; see `MessageStore.append_batch`.

    ``fixed_size`` is what each record has beside body and properties; ``max_size`` is how many bytes a body, and the
    batch as a client encodes it, may have.
    """
    if properties and parse_level(properties.get(record_format.PROPERTY_DELAY)) > 0:
        raise delayed_batch(messages[0].topic)
    decoded = [message.properties for message in messages]
    raws = list(map(record_format.encode_properties, decoded))
    bodies = [message.body for message in messages]
    body_sizes, raw_sizes = list(map(len, bodies)), list(map(len, raws))
    encoded_size = sum(body_sizes) + sum(raw_sizes) + BATCH_FIXED_SIZE * len(messages)
    if properties:
        added = record_format.encode_properties(properties)
        raws = [record_format.join_properties(raw, added) for raw in raws]
        decoded = list(map(record_format.decode_properties, raws))
        raw_sizes = list(map(len, raws))
    check_sizes(max(body_sizes), max(raw_sizes), max_size)
    check_batch_size(encoded_size, max_size)
    tags = [pairs.get("TAGS") for pairs in decoded]
    code_of = {tag: record_format.tags_code(tag) for tag in set(tags)}  # few in most batches
    return PreparedBatch(
        [fixed_size + body_size + raw_size for body_size, raw_size in zip(body_sizes, raw_sizes, strict=True)],
        [message.flag for message in messages],
        body_sizes,
        bodies,
        list(map(_pack_short, raw_sizes)),
        raws,
        [crc32(body) & 0x7FFFFFFF for body in bodies],
        [code_of[tag] for tag in tags],
        [pairs.get("UNIQ_KEY") for pairs in decoded],
        [pairs.get("KEYS") for pairs in decoded],
    )


def check_sizes(body_size: int, properties_size: int, max_size: int) -> None:
    """Refuse a body of more than ``max_size`` bytes, and properties that no record can hold."""
    if body_size > max_size:
        raise body_too_large(body_size, max_size)
    if properties_size > _MAX_PROPERTIES_SIZE:
        raise MessageIllegalError(
            f"the properties have {properties_size:,} bytes, at most {_MAX_PROPERTIES_SIZE:,} are taken: "
            "put large values into the body"
        )


def checked_host_flags(sys_flag: int, born_host: bytes, store_host: bytes) -> int:
    """Return the bits that tell hosts of 16 bytes; refuse a ``sys_flag`` that claims more than the hosts."""
    flags = (record_format.BORN_HOST_V6 if len(born_host) > 8 else 0) | (
        record_format.STORE_HOST_V6 if len(store_host) > 8 else 0
    )
    if sys_flag & record_format.HOSTS_V6 & ~flags:
        raise MessageIllegalError(f"sys flag {sys_flag:#x} claims an IPv6 host; found an IPv4 host")
    return flags


def host_bytes(host: record_format.Host | bytes) -> bytes:
    """Return a host as in a record: 8 bytes, 20 for IPv6; refuse anything else."""
    if type(host) is bytes and len(host) in (8, 20):
        return host
    try:
        return record_format.encode_host(host)
    except TypeError:  # it can't be hashed
        raise MessageIllegalError(f"expected an IP address and a port of 32 bits, found {host!r:.80}") from None


def check_queue_id(queue_id: Any) -> None:  # noqa: ANN401 (what a caller gave)
    """Refuse what is no queue id, such as a text."""
    if isinstance(queue_id, bool) or not hasattr(queue_id, "__index__") or not 0 <= queue_id < 1 << 31:
        raise MessageIllegalError(f"queue id: expected a whole number from 0 to 2147483647, found {queue_id!r:.80}")


def check_fields(queue_id: object, sys_flag: object) -> None:
    """Refuse fields of a record of a wrong kind.

    Raises:
        MessageIllegalError: ``queue_id`` is none.
        TypeError: ``sys_flag`` is no whole number.
    """
    check_queue_id(queue_id)
    if not hasattr(sys_flag, "__index__"):
        raise wrong_kind("sys_flag", sys_flag, "a whole number")
