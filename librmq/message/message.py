"""Messages: one to be sent, one read from a log, and the queue that one is in.

Mirrors ``Message``, ``MessageExt`` and ``MessageQueue``; the properties' names stand in ``MessageConst``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from json import dumps as to_json
from json import loads as from_json
from typing import Any, Final, NamedTuple, NoReturn, Self

from librmq.config import to_seconds
from librmq.errors import ConfigError, MalformedError, MessageIllegalError, RecordError
from librmq.java.hashing import java_decode, string_hash, utf16_order
from librmq.java.numbers import java_int
from librmq.message.ids import UniqueIdParts as UniqueIdParts
from librmq.message.ids import UniqueIds as UniqueIds
from librmq.message.ids import decode_unique_id as decode_unique_id
from librmq.message.record import (
    BODY_CRC_AT,
    BORN_HOST_AT,
    BORN_HOST_V6,
    BORN_TIMESTAMP_AT,
    FIXED_SIZE,
    FLAG_AT,
    HOST_V6_EXTRA,
    LAYOUT,
    MAGIC_AT,
    PHYSICAL_OFFSET_AT,
    PROPERTY_DELAY,
    PROPERTY_KEYS,
    PROPERTY_TAGS,
    PROPERTY_UNIQUE_KEY,
    PROPERTY_WAIT,
    QUEUE_ID_AT,
    QUEUE_OFFSET_AT,
    RESERVED_PROPERTIES,
    STORE_TIMESTAMP_AT,
    SYS_FLAG_AT,
    Host,
    body_checksum,
    decode_host,
    decode_properties,
    decompress_body,
    find_property,
    frame,
    header_struct,
    host_ends,
    split_keys,
    tags_code,
)
from librmq.message.topics import dead_letter_topic as dead_letter_topic
from librmq.message.topics import is_system_topic as is_system_topic
from librmq.message.topics import retry_topic as retry_topic
from librmq.message.topics import validate_client_topic as validate_client_topic
from librmq.message.topics import validate_topic as validate_topic

DECOMPRESSED_LIMIT: Final = 64 << 20
"""The longest body that `StoredMessage.body` makes of a compressed one, in bytes."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_LONGEST_DELAY_S: Final = 86_400 * 366 * 1000

_INT: Final = struct.Struct(">i")
_unpack_body = header_struct("sys_flag", "body_length", unsigned=("body_length",)).unpack_from
_UNSIGNED: Final = struct.Struct(">I")
_LONG: Final = struct.Struct(">q")
_AFTER_HOSTS: Final = struct.Struct(f">{LAYOUT['reconsume_times']}{LAYOUT['prepared_offset']}")

_KEYS: Final = PROPERTY_KEYS.encode()
_TAGS: Final = PROPERTY_TAGS.encode()
_UNIQUE_KEY: Final = PROPERTY_UNIQUE_KEY.encode()


_UNSET: Final[Any] = object()


class Message:
    """A message to be sent: topic, body, flag, a time to wait for, and all else as properties.

    ``properties`` is a plain dict, in the order in which the map is filled that decides how they are stored:
    the user's, TAGS, KEYS, UNIQ_KEY, DELAY, WAIT. What sends a message may add to it. Not thread-safe.
    """

    __slots__ = ("_delays", "body", "flag", "properties", "topic")

    _delays: tuple[float | None, int | None] | None
    """`delay_s` and `deliver_at_ms`; None for the usual message, which has neither."""
    body: bytes
    flag: int
    properties: dict[str, str]
    topic: str

    def __init__(  # noqa: PLR0913 a keyword for each part
        self,
        topic: str,
        body: bytes | bytearray | memoryview | str | None = None,
        *,
        json: object = _UNSET,
        tags: str | None = None,
        keys: str | Iterable[str] = (),
        properties: Mapping[str, str] | None = None,
        delay: float | timedelta | None = None,
        deliver_at: datetime | None = None,
        delay_level: int | None = None,
        wait_store_ok: bool | None = None,
        flag: int = 0,
        unique_key: str | None = None,
    ) -> None:
        """Check the parts, but for the topic, which the receiver judges.

        Args:
            topic: where the message goes.
            body: bytes, or text, which is stored as UTF-8.
            json: a value instead of a body, stored as JSON in UTF-8.
            tags: the tag that subscriptions choose by.
            keys: business keys for queries. One text is taken as it is; several are joined by spaces.
            properties: the application's own.
            delay: seconds, or a `timedelta`, for which the broker holds the message back.
            deliver_at: a time with a time zone up to which the broker holds it back.
            delay_level: a level of the broker's instead, counting from 1; 0 waits for nothing, and is stored as such.
            wait_store_ok: whether the answer waits for what the broker's durability promises; None leaves it to the
                receiver, which waits.
            flag: 32 bits of the application's own.
            unique_key: the unique id; a producer makes one where it is missing.

        Raises:
            MessageIllegalError: a part has a wrong type, a property is reserved, blank or can't be stored, body and
                ``json`` are both given or both missing, or more than one of the three delays is given.
        """
        if type(body) is not bytes or json is not _UNSET:
            body = _as_bytes(body, json)
        stored = _user_properties(properties) if properties else {}
        if tags:
            stored[PROPERTY_TAGS] = tags
        if keys:
            stored[PROPERTY_KEYS] = keys if isinstance(keys, str) else _joined(keys)
        if unique_key:
            stored[PROPERTY_UNIQUE_KEY] = unique_key
        if stored:
            try:
                values = "".join(stored.values())
            except TypeError:
                _refuse(stored)
            if "\1" in values or "\2" in values:
                _refuse(stored)
        if delay_level is not None:
            stored[PROPERTY_DELAY] = str(_int32("delay_level", delay_level))
        if wait_store_ok is not None:
            stored[PROPERTY_WAIT] = "true" if wait_store_ok else "false"
        self.topic = topic
        self.body = body
        self.flag = _int32("flag", flag) if flag else 0
        self.properties = stored
        if delay is None and deliver_at is None:
            self._delays = None
        else:
            self._delays = _waiting(delay, deliver_at, delay_level)

    @staticmethod
    def _of(
        topic: str,
        body: bytes,
        flag: int,
        properties: dict[str, str],
        delays: tuple[float | None, int | None] | None = None,
    ) -> Message:
        """Make a message of parts that were checked before, for librmq's own modules; ``properties`` is kept."""
        made: Message = _new_message(Message)
        made.topic = topic
        made.body = body
        made.flag = flag
        made.properties = properties
        made._delays = delays
        return made

    @property
    def delay_s(self) -> float | None:
        """Seconds that the broker holds the message back from its arrival; None: it does not."""
        return None if self._delays is None else self._delays[0]

    @property
    def deliver_at_ms(self) -> int | None:
        """The time in milliseconds since 1970 up to which the broker holds the message back; None: it does not."""
        return None if self._delays is None else self._delays[1]

    @property
    def tags(self) -> str | None:
        """The tag; RocketMQ says tags and means one."""
        return self.properties.get(PROPERTY_TAGS)

    @property
    def keys(self) -> tuple[str, ...]:
        """The business keys under which the message can be found."""
        return tuple(split_keys(self.properties.get(PROPERTY_KEYS)))

    @property
    def unique_key(self) -> str | None:
        """The unique id that a producer gave the message."""
        return self.properties.get(PROPERTY_UNIQUE_KEY)

    @property
    def delay_level(self) -> int:
        """The delay level, 0 for none."""
        return java_int(self.properties.get(PROPERTY_DELAY, "")) or 0

    @property
    def wait_store_ok(self) -> bool:
        """Whether the acknowledgement waits for what the broker's durability promises."""
        return self.properties.get(PROPERTY_WAIT, "true").lower() == "true"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Message):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in Message.__slots__)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        rest = {
            "properties": self.properties,
            "flag": self.flag,
            "delay_s": self.delay_s,
            "deliver_at_ms": self.deliver_at_ms,
        }
        told = "".join(f", {name}={value!r}" for name, value in rest.items() if value)
        return f"Message({self.topic!r}, {_shown(self.body)}{told})"


_new_message = object.__new__


def _user_properties(properties: Mapping[str, str]) -> dict[str, str]:
    try:
        stored = dict(properties)
    except (TypeError, ValueError):
        raise MessageIllegalError(f"properties: expected texts by name, found {properties!r:.200}") from None
    try:
        sound = _are_names(tuple(stored)) and all(map(str.strip, stored.values()))
    except TypeError:
        sound = False
    if not sound:
        _refuse(stored)
    return stored


@lru_cache(maxsize=256)
def _are_names(names: tuple[Any, ...]) -> bool:
    text = "".join(names)
    blank = not all(map(str.strip, names))
    return not blank and "\1" not in text and "\2" not in text and RESERVED_PROPERTIES.isdisjoint(names)


def _joined(keys: Iterable[str]) -> str:
    try:
        each = tuple(keys)
        text = " ".join(each)
    except TypeError:
        raise MessageIllegalError(f"keys: expected texts, found {keys!r:.200}") from None
    if not all(each) or text.count(" ") != len(each) - 1:
        raise MessageIllegalError(f"keys: one is empty or contains a space: {each!r:.200}")
    return text


def _refuse(properties: Mapping[str, str]) -> NoReturn:
    """Say what is wrong with properties of which something is."""
    for name, value in properties.items():
        for text in (name, value):
            if not isinstance(text, str):
                raise MessageIllegalError(f"property {name!r:.80}: expected text, found {text!r:.80}")
            if not text.strip():
                raise MessageIllegalError(f"property {name!r:.80}: name or value is blank")
            if "\1" in text or "\2" in text:
                raise MessageIllegalError(f"property {name!r:.80}: 01 and 02 separate properties in a record")
    reserved = sorted(RESERVED_PROPERTIES & properties.keys())
    raise MessageIllegalError(f"properties: {', '.join(reserved)} is not for users")


def _int32(what: str, value: object) -> int:
    if not isinstance(value, int) or not -(1 << 31) <= value < 1 << 31:
        raise MessageIllegalError(f"{what}: expected a whole number of 32 bits, found {value!r:.80}")
    return value


def _as_bytes(body: object, json: object) -> bytes:
    if json is not _UNSET:
        if body is not None:
            raise MessageIllegalError("body: expected either a body or json, found both")
        try:
            return to_json(json, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise MessageIllegalError(f"json: {json!r:.80} can't be written as JSON: {error}") from None
    if isinstance(body, str):
        try:
            return body.encode()
        except UnicodeEncodeError as error:
            raise MessageIllegalError(f"body: the text can't be written as UTF-8: {error.reason}") from None
    if isinstance(body, bytes | bytearray | memoryview):
        return bytes(body)
    found = "none" if body is None else type(body).__name__
    raise MessageIllegalError(f"body: expected bytes or text, or a value for json, found {found}")


def _waiting(
    delay: float | timedelta | None, deliver_at: datetime | None, delay_level: int | None
) -> tuple[float | None, int | None]:
    if (delay is not None) + (deliver_at is not None) + bool(delay_level) > 1:
        raise MessageIllegalError("delay, deliver_at, delay_level: expected one of them, found several")
    if deliver_at is None:
        assert delay is not None
        try:
            return to_seconds("delay", delay, most=_LONGEST_DELAY_S), None
        except ConfigError as error:
            raise MessageIllegalError(str(error)) from None
    if not isinstance(deliver_at, datetime):
        raise MessageIllegalError(
            f"deliver_at: expected a datetime with a time zone, found {deliver_at!r:.80}; give a duration as delay"
        )
    if deliver_at.utcoffset() is None:
        raise MessageIllegalError(
            f"deliver_at: expected a datetime with a time zone, found {deliver_at!r:.80}, which has none: "
            "pass tzinfo=UTC, or call its astimezone() for the machine's own zone"
        )
    return None, (deliver_at - _EPOCH) // timedelta(milliseconds=1)


def _shown(body: bytes) -> str:
    return repr(body) if len(body) <= 64 else f"{body[:48]!r}… ({len(body):,} bytes)"


class StoredMessage:
    """A message read from a log: its record, of which parts are decoded when they are asked for.

    Two are equal if their records are, byte for byte. Both kinds of magic are read. Thread-safe.

    Readers of the log check records first; of one that was not checked, an attribute may raise `RecordError`.
    """

    __slots__ = ("_frame", "_properties", "raw")

    _frame: tuple[int, int, int, int, int, int]
    _properties: dict[str, str]

    def __init__(self, raw: bytes) -> None:
        """``raw`` is the whole record; `RecordError` if it is too short for one."""
        if len(raw) < FIXED_SIZE:
            raise RecordError(f"expected a record of at least {FIXED_SIZE} bytes, found {len(raw)} bytes")
        self.raw = raw

    @classmethod
    def framed(cls, raw: bytes) -> Self:
        """The same with its `frame` found at once, which is quicker where it will be needed.

        `RecordError` for what is no record.
        """
        message = cls(raw)
        message._frame = frame(raw, 0, len(raw))
        return message

    @property
    def frame(self) -> tuple[int, int, int, int, int, int]:
        """Where its parts lie, as `codec.frame` finds them, once."""
        try:
            return self._frame
        except AttributeError:
            self._frame = found = frame(self.raw, 0, len(self.raw))
            return found

    @property
    def size(self) -> int:
        """The length of the record in bytes."""
        return len(self.raw)

    @property
    def magic(self) -> int:
        """`codec.MESSAGE_MAGIC`, or `codec.MESSAGE_MAGIC_V2` in stores of 5.x."""
        return int(_UNSIGNED.unpack_from(self.raw, MAGIC_AT)[0])

    @property
    def topic(self) -> str:
        """The topic that the record is filed under; for a waiting message not the one it was sent to."""
        _, _, begin, end, _, _ = self.frame
        return java_decode(self.raw[begin:end])

    @property
    def queue_id(self) -> int:
        """The queue's number within the topic."""
        return int(_INT.unpack_from(self.raw, QUEUE_ID_AT)[0])

    @property
    def queue_offset(self) -> int:
        """The entry of the queue that belongs to the message."""
        return int(_LONG.unpack_from(self.raw, QUEUE_OFFSET_AT)[0])

    @property
    def physical_offset(self) -> int:
        """Where in the log the record begins, in bytes."""
        return int(_LONG.unpack_from(self.raw, PHYSICAL_OFFSET_AT)[0])

    @property
    def flag(self) -> int:
        """The sender's own 32 bits."""
        return int(_INT.unpack_from(self.raw, FLAG_AT)[0])

    @property
    def sys_flag(self) -> int:
        """The bits that `codec` names: compression, transaction, kinds of hosts."""
        return int(_INT.unpack_from(self.raw, SYS_FLAG_AT)[0])

    @property
    def born_timestamp_ms(self) -> int:
        """When the message was sent, by the sender's clock."""
        return int(_LONG.unpack_from(self.raw, BORN_TIMESTAMP_AT)[0])

    @property
    def born_host(self) -> Host:
        """Address and port of the sender."""
        return decode_host(self.raw[BORN_HOST_AT : self._host_ends()[0]])

    @property
    def store_timestamp_ms(self) -> int:
        """When the message was stored."""
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
        """How often a consumer group has failed on the message."""
        return int(_AFTER_HOSTS.unpack_from(self.raw, self._host_ends()[1])[0])

    @property
    def prepared_transaction_offset(self) -> int:
        """Physical offset of the half message that the final message of a transaction belongs to, else 0."""
        return int(_AFTER_HOSTS.unpack_from(self.raw, self._host_ends()[1])[1])

    def _host_ends(self) -> tuple[int, int]:
        ends = host_ends(self.sys_flag)
        if ends[1] + _AFTER_HOSTS.size > len(self.raw):
            raise RecordError(f"sys flag: IPv6 hosts do not fit into {len(self.raw)} bytes", SYS_FLAG_AT)
        return ends

    @property
    def body(self) -> bytes:
        """The body as it was sent.

        `BodyCompressionError` if it cannot be restored; `MissingExtraError` for lz4, zstd without the extra.
        """
        raw = self.raw
        flags, length = _unpack_body(raw)
        if not flags & 49 and length < len(raw) - 90:
            return raw[88 : 88 + length]  # the usual body, at once: hosts of 4 bytes (16, 32), nothing compressed (1)
        return self.decompressed_body(DECOMPRESSED_LIMIT)

    def text(self) -> str:
        """Return the body as text.

        Raises:
            MalformedError: it is no UTF-8.
            BodyCompressionError: it can't be restored.
        """
        try:
            return self.body.decode()
        except UnicodeDecodeError as error:
            raise MalformedError(f"body of {self.message_id}: expected UTF-8: {error}") from None

    def json(self) -> Any:  # noqa: ANN401 as json.loads
        """Return the value that the body is the JSON of.

        Raises:
            MalformedError: it is no JSON.
            BodyCompressionError: it can't be restored.
        """
        try:
            return from_json(self.body)
        except (ValueError, RecursionError) as error:
            raise MalformedError(f"body of {self.message_id}: expected JSON: {error}") from None

    def decompressed_body(self, limit: int) -> bytes:
        """The body as it was sent; `BodyCompressionError` if that makes more than ``limit`` bytes."""
        return decompress_body(self.stored_body, self.sys_flag, limit)

    @property
    def stored_body(self) -> bytes:
        """The body as it is stored, compressed or not."""
        begin, end, _, _, _, _ = self.frame
        return self.raw[begin:end]

    @property
    def body_crc(self) -> int:
        """The checksum in the record."""
        return int(_INT.unpack_from(self.raw, BODY_CRC_AT)[0])

    @property
    def crc_ok(self) -> bool:
        """Whether the stored body matches its checksum; an empty one always does."""
        body = self.stored_body
        return not body or body_checksum(body) == self.body_crc

    @property
    def properties_raw(self) -> bytes:
        """The properties as they are stored."""
        _, _, _, _, begin, end = self.frame
        return self.raw[begin:end]

    @property
    def properties(self) -> Mapping[str, str]:
        """All properties, decoded once."""
        try:
            return self._properties
        except AttributeError:
            self._properties = decode_properties(self.properties_raw)
            return self._properties

    def _property(self, name: bytes) -> str | None:
        value = find_property(self.properties_raw, name)
        return None if value is None else java_decode(value)

    @property
    def tags(self) -> str | None:
        """The tag."""
        return self._property(_TAGS)

    @property
    def tags_code(self) -> int:
        """The hash of the tag, 0 without one."""
        return tags_code(self.tags)

    @property
    def keys(self) -> tuple[str, ...]:
        """The business keys under which the message can be found."""
        return tuple(split_keys(self._property(_KEYS)))

    @property
    def unique_key(self) -> str | None:
        """The unique id that the producer gave the message."""
        return self._property(_UNIQUE_KEY)

    @property
    def offset_id(self) -> str:
        """The broker's id: store host and physical offset in hex."""
        born_end, store_end = self._host_ends()
        place = self.raw[PHYSICAL_OFFSET_AT : PHYSICAL_OFFSET_AT + 8]
        return (self.raw[born_end + 8 : store_end] + place).hex().upper()

    @property
    def message_id(self) -> str:
        """The unique id if there is one, else the broker's."""
        return self.unique_key or self.offset_id

    def __eq__(self, other: object) -> bool:
        return self.raw == other.raw if isinstance(other, StoredMessage) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.raw)

    def __reduce__(self) -> tuple[type[StoredMessage], tuple[bytes]]:
        return StoredMessage, (self.raw,)

    def __repr__(self) -> str:
        try:
            return (
                f"StoredMessage({self.topic!r}, queue_id={self.queue_id}, queue_offset={self.queue_offset}, "
                f"physical_offset={self.physical_offset}, tags={self.tags!r}, keys={self.keys!r}, "
                f"{_shown(self.stored_body)})"
            )
        except RecordError as error:
            return f"StoredMessage({len(self.raw)} bytes, damaged: {error.reason})"


class MessageQueue(NamedTuple):
    """One queue of a topic on one broker. Sorts as in RocketMQ: texts by UTF-16 units."""

    topic: str
    broker_name: str
    queue_id: int

    @property
    def java_hash(self) -> int:
        """``hashCode()`` of RocketMQ's class."""
        code = 31 + string_hash(self.broker_name)
        code = 31 * code + self.queue_id
        code = 31 * code + string_hash(self.topic)
        return ((code & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000

    def __str__(self) -> str:
        """Return RocketMQ's text, which consistent hashing depends on."""
        return f"MessageQueue [topic={self.topic}, brokerName={self.broker_name}, queueId={self.queue_id}]"

    def sort_key(self) -> tuple[str, str, int]:
        """What queues are compared by; sorting many by it is quicker than comparing them."""
        return utf16_order(self.topic), utf16_order(self.broker_name), self.queue_id

    def __lt__(self, other: object) -> bool:
        return self.sort_key() < other.sort_key() if isinstance(other, MessageQueue) else NotImplemented

    def __le__(self, other: object) -> bool:
        return self.sort_key() <= other.sort_key() if isinstance(other, MessageQueue) else NotImplemented

    def __gt__(self, other: object) -> bool:
        return self.sort_key() > other.sort_key() if isinstance(other, MessageQueue) else NotImplemented

    def __ge__(self, other: object) -> bool:
        return self.sort_key() >= other.sort_key() if isinstance(other, MessageQueue) else NotImplemented
