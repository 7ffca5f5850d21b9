"""A message read from a log: a record whose parts are decoded on demand. Mirrors ``MessageExt``."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from json import loads as from_json
from typing import Any, Final, Self, overload

from librmq.errors import MalformedError, RecordError
from librmq.formatting import shown_body
from librmq.java.lang import java_decode
from librmq.message.ids import Host, decode_host
from librmq.message.properties import PropertyName, decode_properties, find_property, priority_of, split_keys, tags_code
from librmq.message.record import (
    BODY_AT,
    BODY_CRC_AT,
    BORN_HOST_AT,
    BORN_HOST_V6,
    BORN_TIMESTAMP_AT,
    DECOMPRESSED_LIMIT,
    FIXED_SIZE,
    FLAG_AT,
    HOST_V6_EXTRA,
    INNER_BATCH,
    LAYOUT,
    MAGIC_AT,
    PHYSICAL_OFFSET_AT,
    QUEUE_ID_AT,
    QUEUE_OFFSET_AT,
    STORE_TIMESTAMP_AT,
    SYS_FLAG_AT,
    Frame,
    body_checksum,
    decompress_body,
    frame,
    header_struct,
    host_ends,
)
from librmq.override import override
from librmq.runtime.compiled_core import CORE, StoredState

_INT: Final = struct.Struct(">i")
_unpack_body = header_struct("sys_flag", "body_length", unsigned=("body_length",)).unpack_from
_UNSIGNED: Final = struct.Struct(">I")
_LONG: Final = struct.Struct(">q")
_AFTER_HOSTS: Final = struct.Struct(f">{LAYOUT['reconsume_times']}{LAYOUT['prepared_offset']}")

_KEYS: Final = PropertyName.KEYS.encode()
_INNER_NUM: Final = PropertyName.INNER_NUM.encode()
_TAGS: Final = PropertyName.TAGS.encode()
_UNIQUE_KEY: Final = PropertyName.UNIQUE_KEY.encode()


class StoredMessage(StoredState):
    """A message read from a log: a record whose parts are decoded on demand.

    Messages are equal if their records are, byte for byte. Both kinds of magic are read. Thread-safe.

    Readers of the log check records first. An attribute of an unchecked record can raise `RecordError`.
    """

    __slots__: tuple[str, ...] = (  # with the core, its base class has the slots
        ("_frame", "_properties", "raw") if CORE.module is None else ()
    )

    raw: bytes
    _frame: Frame
    _properties: dict[str, str]

    def __init__(self, raw: bytes) -> None:
        """``raw`` is a whole record.

        Raises:
            RecordError: ``raw`` is too short for a record.
        """
        if len(raw) < FIXED_SIZE:
            raise RecordError(f"expected a record of at least {FIXED_SIZE} bytes, found {len(raw)} bytes")
        self.raw = raw

    @classmethod
    def framed(cls, raw: bytes) -> Self:
        """Return the message of a whole record and find its `frame` now, which is faster if its parts are needed.

        Raises:
            RecordError: ``raw`` is not a record.
        """
        message = cls(raw)
        message._frame = frame(raw, 0, len(raw))
        return message

    @property
    def frame(self) -> Frame:
        """The places of its parts, from `record.frame`."""
        places: Frame | None = getattr(self, "_frame", None)
        if places is None:
            self._frame = places = frame(self.raw, 0, len(self.raw))
        return places

    @property
    def size(self) -> int:
        """The length of the record in bytes."""
        return len(self.raw)

    @property
    def magic(self) -> int:
        """`record.MESSAGE_MAGIC`, or `record.MESSAGE_MAGIC_V2` in stores of 5.x."""
        return int(_UNSIGNED.unpack_from(self.raw, MAGIC_AT)[0])

    @property
    def topic(self) -> str:
        """The topic in the record; for a waiting message it is not the topic that the message was sent to."""
        _, _, begin, end, _, _ = self.frame
        return java_decode(self.raw[begin:end])

    @property
    def queue_id(self) -> int:
        """The number of the queue within its topic."""
        return int(_INT.unpack_from(self.raw, QUEUE_ID_AT)[0])

    @property
    def queue_offset(self) -> int:
        """The number of the message's entry in the queue."""
        return int(_LONG.unpack_from(self.raw, QUEUE_OFFSET_AT)[0])

    @property
    def physical_offset(self) -> int:
        """The position of the record's first byte in the log."""
        return int(_LONG.unpack_from(self.raw, PHYSICAL_OFFSET_AT)[0])

    @property
    def flag(self) -> int:
        """32 bits for the application."""
        return int(_INT.unpack_from(self.raw, FLAG_AT)[0])

    @property
    def sys_flag(self) -> int:
        """The bits named in `librmq.message.record`: compression, transaction, kinds of hosts."""
        return int(_INT.unpack_from(self.raw, SYS_FLAG_AT)[0])

    @property
    def born_timestamp_ms(self) -> int:
        """The time of the send, by the sender's clock."""
        return int(_LONG.unpack_from(self.raw, BORN_TIMESTAMP_AT)[0])

    @property
    def born_host(self) -> Host:
        """Address and port of the sender."""
        return decode_host(self.raw[BORN_HOST_AT : self._host_ends()[0]])

    @property
    def store_timestamp_ms(self) -> int:
        """The time of storing, by the broker's clock."""
        raw = self.raw
        v6 = raw[SYS_FLAG_AT + 3] & BORN_HOST_V6
        return int(_LONG.unpack_from(raw, STORE_TIMESTAMP_AT + HOST_V6_EXTRA if v6 else STORE_TIMESTAMP_AT)[0])

    @property
    def store_host(self) -> Host:
        """Address and port of the broker."""
        born_end, store_end = self._host_ends()
        return decode_host(self.raw[born_end + 8 : store_end])

    @property
    def reconsume_times(self) -> int:
        """The number of times a consumer group has failed on the message."""
        return int(_AFTER_HOSTS.unpack_from(self.raw, self._host_ends()[1])[0])

    @property
    def prepared_transaction_offset(self) -> int:
        """For the final message of a transaction, the physical offset of its half message, else 0."""
        return int(_AFTER_HOSTS.unpack_from(self.raw, self._host_ends()[1])[1])

    def _host_ends(self) -> tuple[int, int]:
        ends = host_ends(self.sys_flag)
        if ends[1] + _AFTER_HOSTS.size > len(self.raw):
            raise RecordError(f"sys flag: IPv6 hosts do not fit into {len(self.raw)} bytes", SYS_FLAG_AT)
        return ends

    @property
    def body(self) -> bytes:
        """The body as sent.

        Raises:
            BodyCompressionError: The body can't be decompressed.
            MissingExtraError: The body is compressed by lz4 or zstd, and the extra ``compression`` is not installed.
        """
        raw = self.raw
        flags, length = _unpack_body(raw)
        if not flags & 49 and length <= len(raw) - FIXED_SIZE:
            return raw[BODY_AT : BODY_AT + length]  # fast path: no IPv6 hosts (16, 32), not compressed (1)
        return self.decompressed_body(DECOMPRESSED_LIMIT)

    def _check_body(self) -> None:
        """Compare the body with its checksum, if the reader has left that to its first use.

        Raises:
            BodyChecksumError: It does not match.
        """

    def text(self) -> str:
        """Return the body as text.

        Raises:
            MalformedError: The body is not UTF-8.
            BodyCompressionError: The body can't be decompressed.
        """
        try:
            return self.body.decode()
        except UnicodeDecodeError as error:
            raise MalformedError(f"body of {self.message_id}: expected UTF-8: {error}") from None

    def json(self) -> Any:  # noqa: ANN401 as json.loads
        """Return the value of a JSON body.

        Raises:
            MalformedError: The body is not JSON.
            BodyCompressionError: The body can't be decompressed.
        """
        try:
            return from_json(self.body)
        except (ValueError, RecursionError) as error:
            raise MalformedError(f"body of {self.message_id}: expected JSON: {error}") from None

    def decompressed_body(self, limit: int) -> bytes:
        """Return the body as sent.

        Raises:
            BodyCompressionError: It has more than ``limit`` bytes, or can't be decompressed.
        """
        return decompress_body(self.stored_body, self.sys_flag, limit)

    @property
    def stored_body(self) -> bytes:
        """The body as stored, compressed or not."""
        begin, end, _, _, _, _ = self.frame
        return self.raw[begin:end]

    @property
    def body_crc(self) -> int:
        """The checksum in the record."""
        return int(_INT.unpack_from(self.raw, BODY_CRC_AT)[0])

    @property
    def crc_ok(self) -> bool:
        """Whether the stored body matches its checksum; always true for an empty body."""
        body = self.stored_body
        return not body or body_checksum(body) == self.body_crc

    @property
    def properties_raw(self) -> bytes:
        """The properties as stored."""
        _, _, _, _, begin, end = self.frame
        return self.raw[begin:end]

    @property
    def properties(self) -> Mapping[str, str]:
        """All properties, decoded once."""
        properties: dict[str, str] | None = getattr(self, "_properties", None)
        if properties is None:
            self._properties = properties = decode_properties(self.properties_raw)
        return properties

    def _property(self, name: bytes) -> str | None:
        value = find_property(self.properties_raw, name)
        return None if value is None else java_decode(value)

    @property
    def tags(self) -> str | None:
        """The tag."""
        return self._property(_TAGS)

    @property
    def priority(self) -> int | None:
        """The priority with which it was sent, None without one."""
        return priority_of(self.properties)

    @property
    def tags_code(self) -> int:
        """The hash of the tag, 0 without one."""
        return tags_code(self.tags)

    @property
    def keys(self) -> tuple[str, ...]:
        """The business keys, under which the index finds the message."""
        return tuple(split_keys(self._property(_KEYS)))

    @property
    def unique_key(self) -> str | None:
        """The unique id that the producer gave the message."""
        return self._property(_UNIQUE_KEY)

    @property
    def offset_id(self) -> str:
        """The id that the broker assigned: store host and physical offset in hex."""
        born_end, store_end = self._host_ends()
        place = self.raw[PHYSICAL_OFFSET_AT : PHYSICAL_OFFSET_AT + 8]
        return (self.raw[born_end + 8 : store_end] + place).hex().upper()

    @property
    def message_id(self) -> str:
        """The unique id if there is one, else the offset id."""
        return self.unique_key or self.offset_id

    @override
    def __eq__(self, other: object) -> bool:
        return self.raw == other.raw if isinstance(other, StoredMessage) else NotImplemented

    @override
    def __hash__(self) -> int:
        return hash(self.raw)

    @override
    def __reduce__(self) -> tuple[type[StoredMessage], tuple[bytes]]:
        return StoredMessage, (self.raw,)

    @override
    def __repr__(self) -> str:
        try:
            return (
                f"StoredMessage({self.topic!r}, queue_id={self.queue_id}, queue_offset={self.queue_offset}, "
                f"physical_offset={self.physical_offset}, tags={self.tags!r}, keys={self.keys!r}, "
                f"{shown_body(self.stored_body)})"
            )
        except RecordError as error:
            return f"StoredMessage({len(self.raw)} bytes, damaged: {error.reason})"


class StoredRecords(Sequence[StoredMessage]):
    """Messages whose records follow one another in ``chunks``; each is made when it is asked for. Immutable."""

    __slots__ = ("_count", "chunks")

    def __init__(self, chunks: Sequence[bytes], count: int | None = None) -> None:
        """``chunks`` have ``count`` whole records, by default one each."""
        self.chunks: Sequence[bytes] = chunks
        self._count = len(chunks) if count is None else count

    @override
    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, at: int) -> StoredMessage: ...
    @overload
    def __getitem__(self, at: slice) -> list[StoredMessage]: ...
    @override
    def __getitem__(self, at: int | slice) -> StoredMessage | list[StoredMessage]:
        if isinstance(at, int) and len(self.chunks) == self._count:
            return StoredMessage(self.chunks[at])
        return list(self)[at]

    @override
    def __iter__(self) -> Iterator[StoredMessage]:
        return map(StoredMessage, self.chunks if len(self.chunks) == self._count else self._split())

    def _split(self) -> Iterator[bytes]:
        for chunk in self.chunks:
            begin = 0
            while begin < len(chunk):
                (size,) = _INT.unpack_from(chunk, begin)
                yield chunk[begin : begin + size]
                begin += size

    @staticmethod
    def raw_records(messages: Iterable[StoredMessage]) -> Sequence[bytes]:
        """Return the records of messages; of `StoredRecords` the chunks, which are the records if each has one."""
        return messages.chunks if isinstance(messages, StoredRecords) else [message.raw for message in messages]


def is_batch(record: StoredMessage) -> bool:
    """Return whether 5.x stored several messages as this record; no checksum covers the sys flag alone."""
    return bool(record.sys_flag & INNER_BATCH) and find_property(record.properties_raw, _INNER_NUM) is not None


if CORE.use_stored_messages is not None:
    CORE.use_stored_messages(StoredMessage, DECOMPRESSED_LIMIT)
    StoredMessage.body = CORE.module.StoredState.body  # type: ignore[method-assign]
