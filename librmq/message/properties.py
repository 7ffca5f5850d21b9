"""Properties of messages: their names in RocketMQ, their bytes in a record, and the cause of a dead letter.

Mirrors ``MessageConst`` and the half of ``MessageDecoder`` that deals with properties. Pure functions, thread-safe.

The cause says why a group gave the message up. Consumers and brokers write it by `record_cause`. A letter without it,
such as one of RocketMQ, gets a cause from its counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import chain
from typing import Final

from librmq.errors import MessageIllegalError
from librmq.java.lang import hash_map_order, java_decode, java_int, string_hash
from librmq.runtime.compiled_core import CORE


class PropertyName:
    """The names of RocketMQ's own properties, and of librmq's."""

    KEYS: Final = "KEYS"
    TAGS: Final = "TAGS"
    WAIT: Final = "WAIT"
    DELAY: Final = "DELAY"
    RETRY_TOPIC: Final = "RETRY_TOPIC"
    REAL_TOPIC: Final = "REAL_TOPIC"
    REAL_QUEUE_ID: Final = "REAL_QID"
    TRANSACTION_PREPARED: Final = "TRAN_MSG"
    PRODUCER_GROUP: Final = "PGROUP"
    MIN_OFFSET: Final = "MIN_OFFSET"
    MAX_OFFSET: Final = "MAX_OFFSET"
    BUYER_ID: Final = "BUYER_ID"
    ORIGIN_MESSAGE_ID: Final = "ORIGIN_MESSAGE_ID"
    TRANSFER_FLAG: Final = "TRANSFER_FLAG"
    CORRECTION_FLAG: Final = "CORRECTION_FLAG"
    MQ2_FLAG: Final = "MQ2_FLAG"
    RECONSUME_TIME: Final = "RECONSUME_TIME"
    MSG_REGION: Final = "MSG_REGION"
    TRACE_SWITCH: Final = "TRACE_ON"
    TRACE_CONTEXT: Final = "TRACE_CONTEXT"
    """The trace that a message belongs to, as a client of 5.x names it. Users may set and read it."""
    UNIQUE_KEY: Final = "UNIQ_KEY"
    MAX_RECONSUME_TIMES: Final = "MAX_RECONSUME_TIMES"
    DEAD_LETTER_CAUSE: Final = "DEAD_LETTER_CAUSE"
    """Property of librmq's own: the exception for which a consumer gave up a message."""
    PROCESS_DEATHS: Final = "PROCESS_DEATHS"
    """Property of librmq's own: how many receivers' processes have ended at a message, and how many of them alone."""
    DLQ_ORIGIN_TOPIC: Final = "DLQ_ORIGIN_TOPIC"
    DLQ_ORIGIN_MESSAGE_ID: Final = "DLQ_ORIGIN_MESSAGE_ID"
    RESENT_LETTER: Final = "RESENT_LETTER"
    """Property of librmq's own: the dead letter that a message of a retry topic is a copy of."""
    CONSUME_START_TIME: Final = "CONSUME_START_TIME"
    TRANSACTION_PREPARED_QUEUE_OFFSET: Final = "TRAN_PREPARED_QUEUE_OFFSET"
    TRANSACTION_CHECK_TIMES: Final = "TRANSACTION_CHECK_TIMES"
    CHECK_IMMUNITY_TIME: Final = "CHECK_IMMUNITY_TIME_IN_SECONDS"
    INSTANCE_ID: Final = "INSTANCE_ID"
    CORRELATION_ID: Final = "CORRELATION_ID"
    REPLY_TO_CLIENT: Final = "REPLY_TO_CLIENT"
    TTL: Final = "TTL"
    ARRIVE_TIME: Final = "ARRIVE_TIME"
    PUSH_REPLY_TIME: Final = "PUSH_REPLY_TIME"
    CLUSTER: Final = "CLUSTER"
    MESSAGE_TYPE: Final = "MSG_TYPE"
    PRIORITY: Final = "_SYS_MSG_PRIORITY_"
    """The priority of a message, as of 5.4."""
    SHARDING_KEY: Final = "__SHARDINGKEY"
    """The message group of a client of 5.x."""
    INNER_NUM: Final = "INNER_NUM"
    INNER_MULTI_DISPATCH: Final = "INNER_MULTI_DISPATCH"
    INNER_MULTI_QUEUE_OFFSET: Final = "INNER_MULTI_QUEUE_OFFSET"
    TIMER_DELAY_SEC: Final = "TIMER_DELAY_SEC"
    TIMER_DELAY_MS: Final = "TIMER_DELAY_MS"
    TIMER_DELIVER_MS: Final = "TIMER_DELIVER_MS"
    TIMER_OUT_MS: Final = "TIMER_OUT_MS"
    TIMER_ENQUEUE_MS: Final = "TIMER_ENQUEUE_MS"
    TIMER_DEQUEUE_MS: Final = "TIMER_DEQUEUE_MS"
    TIMER_ROLL_TIMES: Final = "TIMER_ROLL_TIMES"
    TIMER_DELETE_KEY: Final = "TIMER_DEL_UNIQKEY"
    TIMER_DELETES_EARLIER: Final = "TIMER_DEL_EARLIER"
    """In deleting messages of librmq, which 5.x ignores."""
    HOP_MS: Final = "SCHEDULE_TARGET_MS"
    """In messages of librmq's relay (`librmq.scheduling.relay`), as are the two below."""
    HOP_TOPIC: Final = "SCHEDULE_TARGET_TOPIC"
    HOP_QUEUE_ID: Final = "SCHEDULE_TARGET_QID"


# fmt: off
RESERVED_PROPERTIES: Final = frozenset((
    PropertyName.KEYS, PropertyName.TAGS, PropertyName.WAIT, PropertyName.DELAY, PropertyName.RETRY_TOPIC,
    PropertyName.REAL_TOPIC, PropertyName.REAL_QUEUE_ID, PropertyName.TRANSACTION_PREPARED, PropertyName.PRODUCER_GROUP,
    PropertyName.MIN_OFFSET, PropertyName.MAX_OFFSET, PropertyName.BUYER_ID, PropertyName.ORIGIN_MESSAGE_ID,
    PropertyName.TRANSFER_FLAG, PropertyName.CORRECTION_FLAG, PropertyName.MQ2_FLAG, PropertyName.RECONSUME_TIME,
    PropertyName.MSG_REGION, PropertyName.TRACE_SWITCH, PropertyName.UNIQUE_KEY, PropertyName.MAX_RECONSUME_TIMES,
    PropertyName.CONSUME_START_TIME, PropertyName.INSTANCE_ID, PropertyName.CORRELATION_ID,
    PropertyName.REPLY_TO_CLIENT, PropertyName.TTL, PropertyName.ARRIVE_TIME, PropertyName.PUSH_REPLY_TIME,
    PropertyName.CLUSTER, PropertyName.MESSAGE_TYPE, PropertyName.INNER_MULTI_QUEUE_OFFSET, PropertyName.PRIORITY,
))
# fmt: on
"""Names that users' properties must not have."""


def is_half(properties: Mapping[str, str]) -> bool:
    """Return whether a message is a half one of a transaction."""
    return properties.get(PropertyName.TRANSACTION_PREPARED, "").lower() == "true"


def priority_of(properties: Mapping[str, str]) -> int | None:
    """Return the priority of a message, which names its queue; None without one. Mirrors 5.4's ``getPriority``."""
    priority = java_int(properties.get(PropertyName.PRIORITY, ""))
    return priority if priority is not None and priority >= 0 else None


def encode_properties(properties: Mapping[str, str]) -> bytes:
    """Encode properties in stored form, in the order of a Java map filled in the order of ``properties``.

    The length is not checked here. A value can contain 01, which is read back as part of it.

    Raises:
        MessageIllegalError: A name contains 01 or 02, a value 02, one of them is not text, or has no UTF-8 (half a
            surrogate pair).
    """
    if not properties:
        return b""
    names = tuple(properties)
    try:
        text = (_shapes.get(names) or _property_shape(names))(properties)
    except TypeError:
        raise _unwritable(properties) from None
    if text.count("\2") >= len(names):  # a reader would take the rest for another property
        raise _unwritable(properties)
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        name = next(name for name, value in properties.items() if _is_not_utf8(f"{name}{value}"))
        raise MessageIllegalError(f"property {name!r} cannot be written as UTF-8: {error.reason}") from None


def encode_all(many: Sequence[Mapping[str, str]]) -> list[bytes]:
    """Do as `encode_properties` for each; if all have the same names this takes two thirds of the time."""
    shapes = set(map(tuple, many))
    names = shapes.pop()
    shape = _shapes.get(names)
    if not shapes and shape is not None:
        with suppress(TypeError, UnicodeEncodeError):  # the calls below raise why
            texts = list(map(shape, many))
            if "".join(texts).count("\2") == (len(names) - 1) * len(texts):
                return list(map(str.encode, texts))
    return list(map(encode_properties, many))


def _is_not_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _unwritable(properties: Mapping[str, str]) -> MessageIllegalError:
    for name, value in properties.items():
        for text in (name, value):
            if not isinstance(text, str):
                return MessageIllegalError(f"property {name!r:.80}: expected text, found {text!r:.80}")
        if "\1" in name or "\2" in name + value:
            return MessageIllegalError(f"property {name!r:.80}: 01 and 02 separate properties in a record")
    raise AssertionError("all properties can be stored")


def is_encoding_of(raw: bytes, properties: Mapping[str, str]) -> bool:
    """Return whether encoding ``properties`` gives ``raw``, from which they were decoded; False if in doubt."""
    names = tuple(properties)
    return raw.isascii() and raw.count(b"\2") == len(names) - 1 and _is_in_order(names)


@lru_cache(maxsize=1024)
def _is_in_order(names: tuple[str, ...]) -> bool:
    return hash_map_order(names) == tuple(range(len(names)))


_Shape = Callable[[Mapping[str, str]], str]
# Cached for a set of names in one order: the function that joins them with their values. An application has few such
# sets.
_shapes: dict[tuple[str, ...], _Shape] = {}
_SHAPES_KEPT: Final = 1024
_LARGEST_SHAPE_KEPT: Final = 64


def texts_before_values(names: Sequence[str]) -> list[str]:
    """Return what stands before each value in the stored form of properties with these names, in their order."""
    befores = ["".join(("\2", name, "\1")) for name in names]  # a format would write the name of an enum's member
    befores[0] = befores[0][1:]
    return befores


def _property_shape(names: tuple[str, ...]) -> _Shape:
    """Return the function that joins properties with these names, in stored order."""
    try:
        text = "".join(names)
    except TypeError:
        raise _unwritable(dict.fromkeys(names, "")) from None
    if "\1" in text or "\2" in text:
        raise _unwritable(dict.fromkeys(names, ""))
    ordered = [names[at] for at in hash_map_order(names)]
    befores = texts_before_values(ordered)
    if len(names) > _LARGEST_SHAPE_KEPT:
        return lambda properties: "".join(
            chain.from_iterable((before, properties[name]) for before, name in zip(befores, ordered, strict=True))
        )
    if len(_shapes) >= _SHAPES_KEPT:
        _shapes.clear()
        CORE.shapes.clear()
    shape = _shapes[names] = _make_shape(len(names))(*befores, *ordered)
    if text.isascii():
        CORE.shapes[names] = list(zip(map(str.encode, befores), hash_map_order(names), strict=True))
    return shape


@lru_cache(maxsize=_LARGEST_SHAPE_KEPT)
def _make_shape(count: int) -> Callable[..., _Shape]:
    """Return the function that makes a shape of ``count`` names; they are variables of its source."""
    variables = [f"{kind}{at}" for kind in "bn" for at in range(count)]
    parts = ", ".join(f"b{at}, properties[n{at}]" for at in range(count))
    namespace: dict[str, Callable[..., _Shape]] = {}
    exec(f"def make({', '.join(variables)}, join=''.join): return lambda properties: join(({parts}))", namespace)
    return namespace["make"]


def decode_properties(raw: bytes | str) -> dict[str, str]:
    """Decode stored properties to a dict, in stored order. Never raises.

    Parts without 01, with an empty name or with an empty value are dropped. A value can contain 01. If a name occurs
    twice, the last one counts.
    """
    text = raw if isinstance(raw, str) else java_decode(raw)
    properties = {}
    for part in text.split("\2"):
        name, _, value = part.partition("\1")
        if name and value:
            properties[name] = value
    return properties


def checked_encoding(raw: bytes, properties: Mapping[str, str]) -> dict[str, str]:
    """Return the properties that a reader of ``raw`` finds; they must be ``properties``, unless these are none.

    Raises:
        MessageIllegalError: They are others, so that queue and index would disagree with the record.
    """
    stored = decode_properties(raw)
    if properties and stored != properties and stored != decode_properties(encode_properties(properties)):
        names = sorted(name for name in stored.keys() | properties.keys() if stored.get(name) != properties.get(name))
        raise MessageIllegalError(
            f"properties as stored: {', '.join(names):.200} differ from the properties beside them: give one of the two"
        )
    return stored


def find_property(raw: bytes, name: bytes) -> bytes | None:
    """Return the stored value of property ``name`` that `decode_properties` finds, without decoding the others."""
    needle = _property_needle(name)
    if not needle:
        return None
    at = raw.rfind(needle)
    while at >= 0:
        value_at = at + len(needle)
        value_end = raw.find(b"\2", value_at)
        if value := raw[value_at:] if value_end < 0 else raw[value_at:value_end]:
            return value
        at = raw.rfind(needle, 0, at)  # an empty one counts as absent, so an earlier one can count
    if raw.startswith(needle[1:]):
        return raw[len(needle) - 1 :].split(b"\2", 1)[0] or None
    return None


def find_keys_and_tags(raw: bytes) -> tuple[bytes | None, bytes | None, bytes | None]:
    """Return UNIQ_KEY, KEYS and TAGS as `find_property` does, in one call for each record."""
    raw = b"\2" + raw  # so that the first property is found like the others
    last, following = raw.rfind, raw.find
    unique = keys = tags = None
    begin = last(b"\2UNIQ_KEY\1") + 10
    if begin > 9:
        until = following(b"\2", begin)
        unique = (raw[begin:until] if until > 0 else raw[begin:]) or find_property(raw, b"UNIQ_KEY")
    begin = last(b"\2KEYS\1") + 6
    if begin > 5:
        until = following(b"\2", begin)
        keys = (raw[begin:until] if until > 0 else raw[begin:]) or find_property(raw, b"KEYS")
    begin = last(b"\2TAGS\1") + 6
    if begin > 5:
        until = following(b"\2", begin)
        tags = (raw[begin:until] if until > 0 else raw[begin:]) or find_property(raw, b"TAGS")
    return unique, keys, tags  # an empty one needs the careful search


@lru_cache(maxsize=256)
def _property_needle(name: bytes) -> bytes:
    """Return the bytes before the value of ``name``; empty for an impossible name."""
    return b"" if not name or b"\1" in name or b"\2" in name else b"\2" + name + b"\1"


@lru_cache(maxsize=256)
def tags_code(tags: str | None) -> int:
    """Return the tags code of a queue entry: the hash of the tag, 0 without one."""
    return string_hash(tags) if tags else 0


def split_keys(keys: str | None) -> list[str]:
    """Return the keys of a message for the index: the parts between spaces, without empty ones."""
    return [key for key in keys.split(" ") if key] if keys else []


class CountedCause:
    """The causes of dead letters without a recorded one, as their counts show them."""

    AT_ONCE: Final = "never retried"
    USED_UP: Final = "retries used up"
    IN_ORDER: Final = "ordered, retries used up"


_ROOM: Final = 30_000
"""A failed message with fewer bytes of properties has room for the cause."""


def record_cause(properties: dict[str, str], cause: str | None, size: int) -> None:
    """Add the cause to the properties of a dead letter, unless those of the message, ``size`` bytes, leave no room."""
    if cause and size < _ROOM:
        properties[PropertyName.DEAD_LETTER_CAUSE] = cause


def cause_of(properties: Mapping[str, str], reconsume_times: int) -> str:
    """Return why a group gave a message up: what a consumer recorded, else what the record shows."""
    if recorded := properties.get(PropertyName.DEAD_LETTER_CAUSE):
        return recorded
    if java_int(properties.get(PropertyName.RECONSUME_TIME, "")) is not None:
        return CountedCause.IN_ORDER  # an orderly consumer sends the message itself, with its count as a property
    return CountedCause.AT_ONCE if reconsume_times <= 1 else CountedCause.USED_UP
