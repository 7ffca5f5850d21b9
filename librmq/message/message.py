"""Messages to send. Mirrors ``Message``; the names of properties are in ``MessageConst``.

`StoredMessage`, a message read from a log, and `MessageQueue` can be imported from here too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from json import dumps as to_json
from typing import Any, Final, NamedTuple, NoReturn, TypedDict, Unpack

from librmq.config import suggest, to_seconds
from librmq.errors import ConfigError, MessageIllegalError
from librmq.formatting import shown_body
from librmq.java.lang import java_int, string_hash, utf16_order
from librmq.message._stored_message import StoredMessage as StoredMessage
from librmq.message._stored_message import is_batch as is_batch
from librmq.message.properties import RESERVED_PROPERTIES, PropertyName, encode_properties, priority_of, split_keys
from librmq.override import override


class MessageQueue(NamedTuple):
    """One queue of a topic on one broker. Sorts as RocketMQ's ``MessageQueue``: strings by UTF-16 units."""

    topic: str
    broker_name: str
    queue_id: int
    """Number of the queue at its broker, from 0."""

    @property
    def java_hash(self) -> int:
        """Return ``hashCode()`` of RocketMQ's class."""
        code = 31 + string_hash(self.broker_name)
        code = 31 * code + self.queue_id
        code = 31 * code + string_hash(self.topic)
        return ((code & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000

    @override
    def __str__(self) -> str:
        """Return RocketMQ's text, which consistent hashing depends on."""
        return f"MessageQueue [topic={self.topic}, brokerName={self.broker_name}, queueId={self.queue_id}]"

    def sort_key(self) -> tuple[str, str, int]:
        """Return the key by which queues compare; with it, sorting many queues is faster."""
        return utf16_order(self.topic), utf16_order(self.broker_name), self.queue_id

    @override
    def __lt__(self, other: object) -> bool:
        return self.sort_key() < other.sort_key() if isinstance(other, MessageQueue) else NotImplemented

    @override
    def __le__(self, other: object) -> bool:
        return self.sort_key() <= other.sort_key() if isinstance(other, MessageQueue) else NotImplemented

    @override
    def __gt__(self, other: object) -> bool:
        return self.sort_key() > other.sort_key() if isinstance(other, MessageQueue) else NotImplemented

    @override
    def __ge__(self, other: object) -> bool:
        return self.sort_key() >= other.sort_key() if isinstance(other, MessageQueue) else NotImplemented


_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_LONGEST_DELAY_S: Final = 86_400 * 366 * 1000
_UNSET: Final[Any] = object()


class MessageKeywords(TypedDict, total=False):
    """Rare keywords of `Message`."""

    json: object
    """A value instead of a body, stored as JSON in UTF-8."""
    delay: float | timedelta | None
    """Seconds, or a `timedelta`, of the delay in the broker."""
    deliver_at: datetime | None
    """A time with a time zone at which the broker delivers the message."""
    delay_level: int | None
    """A delay level of the broker instead, counting from 1; 0 is no delay, and is stored as such."""
    priority: int | None
    """Which queue of its broker the message goes to, at most the last: in topics of type PRIORITY receives take the
    highest first, as in 5.4."""
    wait_store_ok: bool | None
    """Whether the answer waits until the broker's durability holds; None leaves it to the receiver, which waits."""
    flag: int
    """32 bits for the application."""
    unique_key: str | None
    """The unique id; a producer makes one if it is missing."""


class SendKeywords(MessageKeywords, total=False):
    """The keywords of `Message`, which every send accepts."""

    tags: str | None
    keys: str | Iterable[str]
    properties: Mapping[str, str] | None


class Message:
    """A message to send: topic, body, flag and delivery time; everything else is a property. Not thread-safe.

    ``properties`` is a plain dict. The order in the store depends on the order of insertion: the user's, TAGS, KEYS,
    UNIQ_KEY, DELAY, WAIT. A sender can add to it.
    """

    __slots__ = ("_delays", "body", "flag", "properties", "topic")

    _delays: tuple[float | None, int | None] | None
    """`delay_s` and `deliver_at_ms`; None for the usual message, which has neither."""
    body: bytes
    flag: int
    """32 bits for the application."""
    properties: dict[str, str]
    """Its properties as they are stored; tags and keys are among them."""
    topic: str

    def __init__(
        self,
        topic: str,
        body: bytes | bytearray | memoryview | str | None = None,
        *,
        tags: str | None = None,
        keys: str | Iterable[str] = (),
        properties: Mapping[str, str] | None = None,
        **options: Unpack[MessageKeywords],
    ) -> None:
        """The receiver checks the topic.

        Args:
            topic: Its topic.
            body: Bytes, or a text, which is stored as UTF-8.
            tags: The tag, by which subscriptions select.
            keys: Business keys for searches, without whitespace: one text, or a list of several.
            properties: The application's properties.
            **options: ``json``, a value to store as JSON instead of a body; ``delay`` in the broker, in seconds or as a
                `timedelta`; ``deliver_at``, a time with a time zone, or ``delay_level``, counting from 1, instead;
                ``priority``, 0 or more, which names the queue in place of the producer's turn;
                ``wait_store_ok``, whether the answer waits until the broker's durability holds; ``flag``, 32 bits for
                the application; ``unique_key``, which a producer makes if it is missing.

        Raises:
            MessageIllegalError: A part has a wrong type, a property is reserved, blank or can't be stored, body and
                ``json`` are both given or both missing, more than one of the three delays is given, or a delay and a
                priority.
        """
        if options:
            body = _as_bytes(body, options.get("json", _UNSET))
        elif type(body) is not bytes:
            body = _as_bytes(body, _UNSET)
        stored = _user_properties(properties) if properties else {}
        if tags:
            stored[PropertyName.TAGS] = tags
        if keys:
            if isinstance(keys, str):
                stored[PropertyName.KEYS] = keys if keys.split() == [keys] else _joined((keys,))
            else:
                stored[PropertyName.KEYS] = _joined(keys)
        if options and (unique_key := options.get("unique_key")):
            stored[PropertyName.UNIQUE_KEY] = unique_key
        if stored:
            try:
                values = "".join(stored.values())
            except TypeError:
                _refuse(stored)
            if "\1" in values or "\2" in values:
                _refuse(stored)
        self.topic = topic
        self.body = body
        self.flag = 0
        self.properties = stored
        self._delays = None
        if options:
            self._set_options(options)

    def _set_options(self, options: MessageKeywords) -> None:
        if unknown := options.keys() - MessageKeywords.__annotations__.keys():
            name = min(unknown)
            meant = suggest(name, SendKeywords.__annotations__.keys() | MessageKeywords.__annotations__.keys())
            raise TypeError(f"{name}: unknown keyword of a message; {meant}")
        delay_level, wait_store_ok = options.get("delay_level"), options.get("wait_store_ok")
        priority = options.get("priority")
        if priority is not None:
            self.properties[PropertyName.PRIORITY] = _priority(priority)
        if delay_level is not None:
            self.properties[PropertyName.DELAY] = str(_int32("delay_level", delay_level))
        if wait_store_ok is not None:
            self.properties[PropertyName.WAIT] = "true" if wait_store_ok else "false"
        self.flag = _int32("flag", options.get("flag", 0))
        delay, deliver_at = options.get("delay"), options.get("deliver_at")
        if delay is not None or deliver_at is not None:
            self._delays = _checked_delays(delay, deliver_at, delay_level)
        if priority is not None and (delay_level or self._delays is not None):
            raise MessageIllegalError(
                f"priority: expected None with a delay, found {priority}: a delayed message waits elsewhere, and has "
                "no priority after that"
            )

    @staticmethod
    def from_parts(
        topic: str,
        body: bytes,
        flag: int,
        properties: dict[str, str],
        delays: tuple[float | None, int | None] | None = None,
    ) -> Message:
        """Make a message of checked parts, for librmq's own modules; ``properties`` is not copied."""
        message: Message = _new_message(Message)
        message.topic = topic
        message.body = body
        message.flag = flag
        message.properties = properties
        message._delays = delays
        return message

    @property
    def delay_s(self) -> float | None:
        """Delay in seconds from the arrival at the broker; None without one."""
        return None if self._delays is None else self._delays[0]

    @property
    def deliver_at_ms(self) -> int | None:
        """Delivery time in milliseconds since 1970; None without one."""
        return None if self._delays is None else self._delays[1]

    @property
    def tags(self) -> str | None:
        """The tag; RocketMQ names it in the plural."""
        return self.properties.get(PropertyName.TAGS)

    @property
    def keys(self) -> tuple[str, ...]:
        """The business keys of the message."""
        return tuple(split_keys(self.properties.get(PropertyName.KEYS)))

    @property
    def unique_key(self) -> str | None:
        """The unique id that a producer gave the message."""
        return self.properties.get(PropertyName.UNIQUE_KEY)

    @property
    def delay_level(self) -> int:
        """The delay level, 0 for none."""
        return java_int(self.properties.get(PropertyName.DELAY, "")) or 0

    @property
    def priority(self) -> int | None:
        """The priority, None without one."""
        return priority_of(self.properties)

    @property
    def wait_store_ok(self) -> bool:
        """Whether the acknowledgement waits until the message is as durable as the broker's settings promise."""
        return self.properties.get(PropertyName.WAIT, "true").lower() == "true"

    @override
    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Message):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in Message.__slots__)

    @override
    def __repr__(self) -> str:
        fields = {
            "properties": self.properties,
            "flag": self.flag,
            "delay_s": self.delay_s,
            "deliver_at_ms": self.deliver_at_ms,
        }
        shown_fields = "".join(f", {name}={value!r}" for name, value in fields.items() if value)
        return f"Message({self.topic!r}, {shown_body(self.body)}{shown_fields})"


_new_message = object.__new__


def _user_properties(properties: Mapping[str, str]) -> dict[str, str]:
    try:
        stored = dict(properties)
    except (TypeError, ValueError):
        raise MessageIllegalError(f"properties: expected strings by name, found {properties!r:.200}") from None
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
        texts = tuple(keys)
        text = " ".join(texts)
    except TypeError:
        raise MessageIllegalError(f"keys: expected strings, found {keys!r:.200}") from None
    if (parts := text.split()) != list(texts):
        wrong = next(key for key in texts if key.split() != [key])
        raise MessageIllegalError(
            f"keys: {wrong!r:.80} is empty or has whitespace, where a record separates keys: write it "
            f"without, or pass several keys as a list{f', such as {parts!r:.80}' if parts else ''}"
        )
    return text


def _refuse(properties: Mapping[str, str]) -> NoReturn:
    """Raise an error that names the first invalid property."""
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


def _priority(value: object) -> str:
    if type(value) is not int or not 0 <= value < 1 << 31:
        raise MessageIllegalError(f"priority: expected a whole number from 0 to 2147483647, found {value!r:.80}")
    return str(value)


def _as_bytes(body: object, json: object) -> bytes:
    if type(body) is bytes and json is _UNSET:
        return body
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
    kind = "none" if body is None else type(body).__name__
    raise MessageIllegalError(f"body: expected bytes or text, or a value for json, found {kind}")


def _checked_delays(
    delay: float | timedelta | None, deliver_at: datetime | None, delay_level: int | None
) -> tuple[float | None, int | None]:
    if (delay is not None) + (deliver_at is not None) + bool(delay_level) > 1:
        raise MessageIllegalError("delay, deliver_at, delay_level: expected one of them, found several")
    if deliver_at is None:
        assert delay is not None
        try:
            return to_seconds("delay", delay, maximum=_LONGEST_DELAY_S), None
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


# ---- refusals of clients, brokers and stores alike


def reserved_topic(topic: str) -> MessageIllegalError:
    """Return the error of a send to a topic of the broker's own."""
    return MessageIllegalError(f"topic {topic!r} is the broker's own: clients can't send to it")


def body_too_large(size: int, max_size: int, *, as_stored: bool = False) -> MessageIllegalError:
    """Return the error of a body of ``size`` bytes, ``as_stored`` if they are counted after compression."""
    counted = f"{size:,} bytes{' as it is stored' if as_stored else ''}"
    return MessageIllegalError(
        f"the body has {counted}, at most {max_size:,} are taken: store it elsewhere and send a reference "
        "(docs/largebody.md), or raise max_message_size of the producer and of the store"
    )


def delayed_batch(topic: str) -> MessageIllegalError:
    """Return the error of a batch with a delivery time or a delay."""
    return MessageIllegalError(f"topic {topic!r}: a batch can't be delayed: send delayed messages one by one")


def priority_with_queue(topic: str) -> MessageIllegalError:
    """Return the error of a message with a priority for which the sender chooses a queue too."""
    return MessageIllegalError(
        f"topic {topic!r}: the message has a priority, which names its queue: send it without queue=, selector= and "
        "batches, or without a priority"
    )


def delayed_transaction(topic: str) -> MessageIllegalError:
    """Return the error of a message of a transaction with a delivery time or a delay."""
    return MessageIllegalError(
        f"topic {topic!r}: a message of a transaction can't be delayed: "
        "send it without delay, deliver_at and delay_level"
    )


# ---- what a batch may be; `librmq.message.batch` has its bytes

BATCH_FIXED_SIZE: Final = 22  # four-byte size, magic, checksum, flag and length of body, and the length of properties
"""Size of a message in a batch without its body and its properties."""


def check_batch(messages: Sequence[Message]) -> None:
    """Refuse a batch that no client would send and no broker would accept.

    Raises:
        MessageIllegalError: The batch is empty or delayed, or its messages differ in topic or wait flag.
    """
    if not messages:
        raise MessageIllegalError("expected at least one message in a batch")
    topic, waits = messages[0].topic, messages[0].wait_store_ok
    for message in messages:
        if message.topic != topic:
            raise MessageIllegalError(f"expected one topic in a batch, found {topic!r} and {message.topic!r}")
        properties = message.properties
        if not (waits and PropertyName.WAIT not in properties) and message.wait_store_ok != waits:
            raise MessageIllegalError("expected one wait flag in a batch, found both values")
        if message._delays is not None or (PropertyName.DELAY in properties and message.delay_level > 0):
            raise delayed_batch(topic)


def encoded_size(message: Message) -> int:
    """Return the size in bytes of a message in a batch as a client encodes it."""
    return BATCH_FIXED_SIZE + len(message.body) + len(encode_properties(message.properties))


def check_batch_size(size: int, max_size: int) -> None:
    """Refuse a batch of more than ``max_size`` bytes as a client encodes it."""
    if size > max_size:
        raise MessageIllegalError(f"expected a batch of at most {max_size:,} bytes, found {size:,}: use split_batch")
