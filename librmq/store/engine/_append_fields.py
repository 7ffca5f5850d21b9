"""What an append is given and returns, and the checks of it: fields of records, the messages of a batch, results."""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat
from typing import Any, Final, NamedTuple, TypedDict

from librmq.config import wrong_kind
from librmq.errors import MessageIllegalError
from librmq.message import Message
from librmq.message import record as record_format
from librmq.message.delays import parse_level
from librmq.message.ids import Host, decode_host, encode_host, offset_message_id
from librmq.message.message import BATCH_FIXED_SIZE, body_too_large, check_batch_size, delayed_batch
from librmq.message.properties import (
    PropertyName,
    encode_all,
    encode_properties,
)

_MAX_PROPERTIES_SIZE: Final = record_format.MAX_PROPERTIES_SIZE
_MAGIC: Final = record_format.MESSAGE_MAGIC
_SHORT_BODY: Final = record_format.SHORT_BODY
_TWO_HOSTS: Final = 16  # the bytes of two with IPv4 addresses
_short_crc32: Final = record_format.short_crc32
_pack_short: Final = struct.Struct(">H").pack
_pack_header: Final = {hosts: header.pack for hosts, header in record_format.HEADERS.items()}
_pack_usual_header: Final = _pack_header[0]
_HOSTS_V6: Final = record_format.HOSTS_V6


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
        return offset_message_id(decode_host(self.store_host), self.physical_offset)


class AppendFields(TypedDict, total=False):
    """Fields of a record that a broker sets: times in ms, hosts as (address, port) or in the form of a record."""

    born_timestamp_ms: int | None
    born_host: Host | bytes | None
    store_host: Host | bytes | None
    sys_flag: int
    reconsume_times: int
    prepared_transaction_offset: int
    properties_raw: bytes | None
    is_copy: bool


class BatchFields(TypedDict, total=False):
    """These fields for a batch, and its properties."""

    properties: Mapping[str, str] | None
    born_timestamp_ms: int | None
    born_host: Host | None
    store_host: Host | None
    sys_flag: int
    reconsume_times: int


# ---- records


UnplacedRecord = tuple[int, int, bytes, Callable[..., bytes], int, int, int, int | None, bytes, int, int, int, bytes]
"""What of a record depends on neither its place nor its time: size, sys flag and store host; then the packer of its
header, checksum, queue id, flag, born time (None for the store time), born host, reconsume times, prepared offset, size
of the body, and what follows the header, which is empty for a message of a batch."""


def prepare_record(  # noqa: PLR0913 (a parameter for each field of a record)
    body: bytes,
    topic_field: bytes,
    raw: bytes,
    queue_id: int,
    flag: int,
    sys_flag: int,
    born_timestamp_ms: int | None,
    born_at: bytes,
    stored_at: bytes,
    reconsume_times: int = 0,
    prepared_offset: int = 0,
    compress_from: int = sys.maxsize,
    max_size: int = sys.maxsize,
) -> UnplacedRecord:
    """Return a record for `place_record`, so that only place and time are left to do under the writers' lock.

    A body is compressed from ``compress_from`` bytes on, and may then have ``max_size``.

    Raises:
        MessageIllegalError: A record can't have these fields.
    """
    body_size, raw_size = len(body), len(raw)
    if body_size >= compress_from and not sys_flag & record_format.COMPRESSED:
        body = record_format.compress_body(body)
        sys_flag |= record_format.COMPRESSED | record_format.COMPRESSION_ZLIB
        body_size = len(body)
    if body_size > max_size or raw_size > _MAX_PROPERTIES_SIZE:
        check_sizes(body_size, raw_size, max_size)
    hosts_size = len(born_at) + len(stored_at)
    pack_header = _pack_usual_header
    if sys_flag & _HOSTS_V6 or hosts_size > _TWO_HOSTS:
        sys_flag |= checked_host_flags(sys_flag, born_at, stored_at)
        pack_header = _pack_header[sys_flag & _HOSTS_V6]
    checksum = (_short_crc32 if body_size <= _SHORT_BODY else record_format.crc32)(body) & 0x7FFFFFFF
    tail = b"".join((body, topic_field, _pack_short(raw_size), raw))
    return (
        72 + hosts_size + len(tail), sys_flag, stored_at, pack_header, checksum, queue_id, flag, born_timestamp_ms,
        born_at, reconsume_times, prepared_offset, body_size, tail,
    )  # fmt: skip


def place_record(record: UnplacedRecord, queue_offset: int, physical_offset: int, now: int) -> bytes:
    """Return a record at its place in queue and log, stored ``now``: every append in Python packs its records here.

    Raises:
        MessageIllegalError: A field is out of range.
    """
    size, bits, stored_at, pack, checksum, queue_id, flag, born, born_at, times, prepared, body_size, tail = record
    try:
        return pack(
            size, _MAGIC, checksum, queue_id, flag, queue_offset, physical_offset, bits,
            now if born is None else born, born_at, now, stored_at, times, prepared, body_size,
        ) + tail  # fmt: skip
    except struct.error as error:
        raise MessageIllegalError(f"a field of the record is out of range: {error}") from None


def prepare_batch(  # noqa: PLR0913 (a parameter for each field of a record)
    messages: Sequence[Message],
    topic_field: bytes,
    properties: Mapping[str, str] | None,
    queue_id: int,
    sys_flag: int,
    born_timestamp_ms: int | None,
    born_at: bytes,
    stored_at: bytes,
    reconsume_times: int,
    max_size: int,
) -> tuple[list[int], Iterable[UnplacedRecord], tuple[Iterable[bytes], ...]]:
    """Return sizes and records of a batch, and in columns what follows the headers, because such calls cost least.

    ``max_size`` is how many bytes a body, and the batch as a client encodes it, may have; see
    `MessageStore.append_batch`.
    """
    if properties and parse_level(properties.get(PropertyName.DELAY)) > 0:
        raise delayed_batch(messages[0].topic)
    raws = encode_all([message.properties for message in messages])
    bodies = [message.body for message in messages]
    body_sizes, raw_sizes = list(map(len, bodies)), list(map(len, raws))
    encoded_size = sum(body_sizes) + sum(raw_sizes) + BATCH_FIXED_SIZE * len(messages)
    if properties:
        added = encode_properties(properties)
        raws = [join_properties(raw, added) for raw in raws]
        raw_sizes = list(map(len, raws))
    check_sizes(max(body_sizes), max(raw_sizes), max_size)
    check_batch_size(encoded_size, max_size)
    fixed_size = 74 + len(born_at) + len(stored_at) + len(topic_field)
    sizes = [fixed_size + body_size + raw_size for body_size, raw_size in zip(body_sizes, raw_sizes, strict=True)]
    checksums, flags = list(map(record_format.body_checksum, bodies)), [message.flag for message in messages]
    records = zip(
        sizes, repeat(sys_flag), repeat(stored_at), repeat(_pack_header[sys_flag & _HOSTS_V6]), checksums,
        repeat(queue_id), flags, repeat(born_timestamp_ms), repeat(born_at), repeat(reconsume_times), repeat(0),
        body_sizes, repeat(b""), strict=False,
    )  # fmt: skip
    return sizes, records, (bodies, repeat(topic_field), list(map(_pack_short, raw_sizes)), raws)


def join_properties(message: bytes, batch: bytes) -> bytes:
    """Return the stored properties of a message in a batch: its own, then the batch's."""
    if message and batch and message[-1] != 2:
        return message + b"\2" + batch
    return message + batch


# ---- checks of fields


def check_sizes(body_size: int, properties_size: int, max_size: int) -> None:
    """Refuse a body of more than ``max_size`` bytes, and properties that no record can hold."""
    if body_size > max_size:
        raise body_too_large(body_size, max_size, as_stored=True)
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


def host_bytes(host: Host | bytes) -> bytes:
    """Return a host as in a record: 8 bytes, 20 for IPv6; refuse anything else."""
    if type(host) is bytes and len(host) in (8, 20):
        return host
    try:
        return encode_host(host)
    except TypeError:  # it can't be hashed
        raise MessageIllegalError(f"expected an IP address and a port of 32 bits, found {host!r:.80}") from None


def check_queue_id(queue_id: Any) -> None:  # noqa: ANN401 (what a caller gave)
    """Refuse a value that can't be a queue id, such as a text."""
    if isinstance(queue_id, bool) or not hasattr(queue_id, "__index__") or not 0 <= queue_id < 1 << 31:
        raise MessageIllegalError(f"queue id: expected a whole number from 0 to 2147483647, found {queue_id!r:.80}")


def check_fields(queue_id: object, sys_flag: object) -> None:
    """Refuse fields of a record of a wrong kind.

    Raises:
        MessageIllegalError: ``queue_id`` is none.
        TypeError: ``sys_flag`` is not a whole number.
    """
    check_queue_id(queue_id)
    if not hasattr(sys_flag, "__index__"):
        raise wrong_kind("sys_flag", sys_flag, "a whole number")
