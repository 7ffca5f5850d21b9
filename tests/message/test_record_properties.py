"""Properties that hold for any values and any bytes: round trips, and no errors but typed ones."""

from __future__ import annotations

import enum
import itertools
import math
import struct
import zlib
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from librmq.errors import BodyChecksumError, BodyCompressionError, MalformedError, MessageIllegalError, RecordError
from librmq.java.json import ObjectKey, dumps, loads
from librmq.java.lang import string_hash
from librmq.message.batch import BatchItem, decode_batch, encode_batch
from librmq.message.ids import Host, decode_unique_id, offset_message_id, parse_host, parse_offset_message_id
from librmq.message.message import Message, MessageQueue, StoredMessage
from librmq.message.properties import decode_properties, encode_properties, find_property
from librmq.message.record import (
    BLANK_MAGIC,
    COMPRESSED,
    COMPRESSION_LZ4,
    COMPRESSION_ZLIB,
    COMPRESSION_ZSTD,
    FIXED_SIZE,
    HOSTS_V6,
    MAX_TOPIC_SIZE,
    MESSAGE_MAGIC,
    MESSAGE_MAGIC_V2,
    Record,
    body_checksum,
    check_record,
    compress_body,
    decode_record,
    decompress_body,
    encode_record,
    frame,
    header_struct,
    host_flags,
)
from librmq.message.topics import SystemTopic, validate_topic

TEXT = st.text(st.characters(codec="utf-8"))
INT32 = st.integers(-(2**31), 2**31 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)
V4 = st.tuples(st.ip_addresses(v=4).map(str), INT32)
V6 = st.tuples(
    st.ip_addresses(v=6).map(lambda ip: ":".join(f"{part:x}" for part in struct.unpack(">8H", ip.packed))), INT32
)


@st.composite
def records(draw: st.DrawFn) -> Record:
    born_host, store_host = draw(V4 | V6), draw(V4 | V6)
    magic = draw(st.sampled_from((MESSAGE_MAGIC, MESSAGE_MAGIC_V2)))
    most = MAX_TOPIC_SIZE if magic == MESSAGE_MAGIC else 1000
    body = draw(st.binary(max_size=300))
    topic = draw(TEXT.filter(lambda text: len(text.encode()) <= most) | st.just(SystemTopic.SCHEDULE))
    return Record(
        topic=topic,
        queue_id=draw(INT32),
        flag=draw(INT32),
        queue_offset=draw(INT64),
        physical_offset=draw(INT64),
        sys_flag=draw(INT32) & ~HOSTS_V6 | host_flags(born_host, store_host),
        born_timestamp_ms=draw(INT64),
        born_host=born_host,
        store_timestamp_ms=draw(INT64),
        store_host=store_host,
        reconsume_times=draw(INT32),
        prepared_transaction_offset=draw(INT64),
        body=body,
        body_crc=body_checksum(body),
        properties_raw=draw(st.binary(max_size=200)),
        magic=magic,
    )


@given(records(), st.binary(max_size=10), st.binary(max_size=100))
def test_records_there_and_back(record: Record, before: bytes, behind: bytes) -> None:
    raw = encode_record(record)
    assert len(raw) == record.size
    data = before + raw + behind
    assert decode_record(data, len(before)) == record
    body_at, body_end, topic_at, topic_end, properties_at, end = frame(data, len(before), len(data))
    assert data[body_at:body_end] == record.body
    assert data[topic_at:topic_end].decode() == record.topic
    assert data[properties_at:end] == record.properties_raw
    if record.topic != SystemTopic.SCHEDULE:
        assert check_record(data, len(before), len(data), check_body=True) == len(raw)


READ = sorted(name for name, value in vars(StoredMessage).items() if isinstance(value, property))


def read_all(raw: bytes) -> dict[str, Any]:
    """Return all attributes of a stored message but those that raise; let errors other than librmq's through."""
    values: dict[str, Any] = {}
    try:
        message = StoredMessage(raw)
    except RecordError:
        return values
    for name in READ:
        try:
            values[name] = getattr(message, name)
        except RecordError:
            continue
    assert repr(message)
    return values


@given(records())
def test_stored_messages_agree_with_their_records(record: Record) -> None:
    raw = encode_record(record)
    values = read_all(raw)
    for name in Record.__slots__:
        if name != "body":
            assert values[name] == getattr(record, name)
    assert values["stored_body"] == record.body
    assert values["crc_ok"]
    if "body" in values and not record.sys_flag & COMPRESSED:
        assert values["body"] == record.body
    properties = decode_properties(record.properties_raw)
    assert values["properties"] == properties
    assert values["offset_id"] == offset_message_id(record.store_host, record.physical_offset)


@given(records(), st.data())
def test_one_changed_byte_gives_a_record_or_a_typed_error(record: Record, data: st.DataObject) -> None:
    raw = encode_record(record)
    at = data.draw(st.integers(0, len(raw) - 1))
    changed = bytearray(raw)
    changed[at] ^= data.draw(st.integers(1, 255))
    broken = bytes(changed)
    read_all(broken)
    try:
        size = check_record(broken, 0, len(broken), check_body=True)
    except RecordError:
        return
    assert size in (0, len(raw))
    if size:
        begin, end, _, _, _, _ = frame(raw, 0, len(raw))
        assert not begin <= at < end, "a body that was changed passed its checksum"
        decoded = decode_record(broken)
        if "\ufffd" not in decoded.topic:
            assert encode_record(decoded) in (broken, raw)  # raw, if a length of 0 became negative


@given(st.binary(max_size=300), st.integers(0, 300), st.integers(0, 300))
@example(b"\0" * 4 + b"\xcb\xd4\x31\x94", 0, 8)
def test_rubbish_is_a_typed_error(raw: bytes, position: int, limit: int) -> None:
    limit = min(limit, len(raw))
    read_all(raw)
    for check_body in (False, True):
        try:
            size = check_record(raw, position, limit, check_body=check_body)
        except RecordError:
            continue
        assert size == 0 or FIXED_SIZE <= size <= limit - position
    with suppress(RecordError):
        decode_record(raw)


@st.composite
def near_records(draw: st.DrawFn) -> bytes:
    """Return a plausible header with arbitrary lengths, and some bytes after it."""
    edges = st.sampled_from((-(2**31), -1, 0, 1, 3, 50, 91, 100, 115, 200, 2**31 - 1)) | st.integers(0, 260)
    magic = draw(st.sampled_from((MESSAGE_MAGIC, MESSAGE_MAGIC_V2, BLANK_MAGIC)))
    sys_flag = draw(st.sampled_from((0, 1, 16, 32, 48)))
    header = header_struct().pack(
        draw(edges), magic, 0, 0, 0, 0, 0, sys_flag, 0, bytes(8), 0, bytes(8), 0, 0, draw(edges)
    )
    return header + draw(st.binary(max_size=170))


@given(near_records())
def test_lengths_that_do_not_agree_are_a_typed_error(raw: bytes) -> None:
    read_all(raw)
    try:
        size = check_record(raw, 0, len(raw), check_body=False)
    except RecordError:
        with pytest.raises(RecordError):
            decode_record(raw)
        return
    if size:
        record = decode_record(raw, check_body=False)
        assert FIXED_SIZE <= size <= len(raw)
        assert record.size == size or "\ufffd" in record.topic
        # The careful decoder and the fast one agree.
        assert frame(raw, 0, len(raw))[-1] == size
        try:
            assert check_record(raw, 0, len(raw), check_body=True) == size
        except BodyChecksumError:
            assert zlib.crc32(record.body)


# --- properties

NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\1\2"), min_size=1)
VALUES = st.text(st.characters(codec="utf-8", exclude_characters="\2"), min_size=1)
PIECES = st.lists(
    st.sampled_from(["\1", "\2", "a", "b", "é", "中", "TAGS", "KEYS", "a\1", "\2a\1", "\2TAGS\1x"]), max_size=30
).map("".join)


@given(st.dictionaries(NAMES, VALUES, max_size=60))
def test_properties_there_and_back(properties: dict[str, str]) -> None:
    raw = encode_properties(properties)
    assert decode_properties(raw) == properties
    # A map filled in stored order keeps that order, as when a broker rewrites it.
    assert encode_properties(decode_properties(raw)) == raw


@given(st.dictionaries(NAMES, VALUES, max_size=12))
def test_twelve_properties_stand_in_order_of_their_buckets(properties: dict[str, str]) -> None:
    names = list(decode_properties(encode_properties(properties)))
    hashes = [string_hash(name) for name in names]
    buckets = [(code ^ (code & 0xFFFFFFFF) >> 16) & 15 for code in hashes]
    if all(buckets.count(bucket) <= 8 for bucket in buckets):
        assert buckets == sorted(buckets)


@given(PIECES, st.sampled_from(["TAGS", "KEYS", "a", "b", "é", "ab", "", "a\1", "\2"]))
def test_finding_is_decoding(text: str, name: str) -> None:
    value = find_property(text.encode(), name.encode())
    assert (None if value is None else value.decode()) == decode_properties(text).get(name)


@given(st.binary(max_size=200), NAMES)
def test_finding_in_rubbish(raw: bytes, name: str) -> None:
    find_property(raw, name.encode())
    assert all(name and value for name, value in decode_properties(raw).items())


@given(TEXT, st.dictionaries(TEXT, TEXT), st.lists(TEXT), TEXT)
def test_a_message_that_is_taken_can_be_read_back(
    tags: str, properties: dict[str, str], keys: list[str], body: str
) -> None:
    try:
        message = Message("T", body.encode(), tags=tags, keys=keys, properties=properties)
    except MessageIllegalError:
        return
    raw = encode_properties(message.properties)
    read = StoredMessage(encode_record(Record(topic="T", body=message.body, properties_raw=raw)))
    assert read.properties == message.properties
    assert (read.tags, list(read.keys)) == (tags or None, keys)
    assert properties.items() <= read.properties.items()


# --- batches, compression, ids, topics, JSON

ITEMS = st.builds(BatchItem, st.binary(max_size=50), INT32, st.binary(max_size=50))


@given(st.lists(ITEMS))
def test_batches_there_and_back(items: list[BatchItem]) -> None:
    assert decode_batch(encode_batch(items)) == items


@given(st.lists(ITEMS, min_size=1, max_size=3), st.data())
def test_a_damaged_batch_is_a_typed_error(items: list[BatchItem], data: st.DataObject) -> None:
    raw = bytearray(encode_batch(items))
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] ^= data.draw(st.integers(1, 255))
    damaged = bytes(raw[: data.draw(st.integers(0, len(raw)))])
    try:
        read = decode_batch(damaged)
    except MessageIllegalError:
        return
    assert sum(22 + len(item.body) + len(item.properties_raw) for item in read) == len(damaged)


@given(st.binary(max_size=2000), st.sampled_from((0, COMPRESSION_ZLIB)))
def test_bodies_there_and_back(body: bytes, kind: int) -> None:
    assert decompress_body(compress_body(body), COMPRESSED | kind, len(body)) == body


@given(st.binary(min_size=1, max_size=200), st.sampled_from([kind << 8 for kind in range(8)]), st.integers(0, 300))
@example(b"\x04\x22\x4d\x18\x60\x70\x73\xff\xff\xff\x7f", COMPRESSION_LZ4, 100)
@example(b"\x28\xb5\x2f\xfd\xa0\xff\xff\xff\x7f", COMPRESSION_ZSTD, 100)
def test_rubbish_is_not_a_compressed_body(body: bytes, kind: int, limit: int) -> None:
    pytest.importorskip("lz4.frame")
    pytest.importorskip("zstandard")
    with suppress(BodyCompressionError):
        assert len(decompress_body(body, COMPRESSED | kind, limit)) <= limit


@given(V4 | V6, INT64)
def test_message_ids_there_and_back(host: Host, physical_offset: int) -> None:
    text = offset_message_id(host, physical_offset)
    assert parse_offset_message_id(text) == (host, physical_offset)
    assert decode_unique_id(text, 1_700_000_000_000).ip


@given(TEXT | st.text("0123456789abcdefABCDEF.:[] ", max_size=60))
def test_rubbish_is_not_an_id_or_host(text: str) -> None:
    for parse in (parse_host, parse_offset_message_id, lambda text: decode_unique_id(text, 1_700_000_000_000)):
        try:
            parse(text)
        except MalformedError:
            continue


@given(st.text(st.characters(exclude_categories=())))
def test_a_topic_that_is_taken_can_be_written_and_is_a_folder(topic: str) -> None:
    try:
        validate_topic(topic)
    except MessageIllegalError:
        return
    assert decode_record(encode_record(Record(topic=topic))).topic == topic
    assert not {"/", "\0"} & set(topic)
    assert topic not in ("", ".", "..")


@given(st.lists(st.builds(MessageQueue, TEXT, TEXT, INT32)))
@example(
    [
        MessageQueue("T", "\uffee", 0),
        MessageQueue("T", "\U0001f600", 0),
        MessageQueue("T\uffee", "a", 0),
        MessageQueue("T\U0001f600", "a", 0),
    ]
)
@example([MessageQueue("T", "b", 10), MessageQueue("T", "b", 2), MessageQueue("T", "b", 2)])
def test_queues_sort_as_java_compares(queues: list[MessageQueue]) -> None:
    def in_java(queue: MessageQueue) -> tuple[bytes, bytes, int]:
        return queue.topic.encode("utf-16-be"), queue.broker_name.encode("utf-16-be"), queue.queue_id

    assert sorted(queues) == sorted(queues, key=in_java)
    for one, other in itertools.pairwise(queues):
        a, b = in_java(one), in_java(other)
        assert (one < other, one <= other, one > other, one >= other) == (a < b, a <= b, a > b, a >= b)


SCALARS = st.none() | st.booleans() | INT64 | TEXT | st.floats(allow_nan=False, allow_infinity=False)
KEYS = TEXT | INT64 | st.dictionaries(TEXT, SCALARS, max_size=3).map(lambda fields: ObjectKey(fields.items()))
VALUES_OF_JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=20
)


def same(one: Any, other: Any) -> bool:
    """Return whether two values are equal, of the same types, and in the same order."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return same(list(one.items()), list(other.items()))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other) and (
        one != 0 or not isinstance(one, float) or math.copysign(1, one) == math.copysign(1, other)
    )


@given(VALUES_OF_JSON)
def test_json_there_and_back(value: Any) -> None:
    text = dumps(value)
    assert same(loads(text), value)
    assert dumps(loads(text)) == text


@given(TEXT | st.text('{}[]:,"\\ \n\t0123456789-+.eEtruefalsn', max_size=60) | st.binary())
def test_rubbish_is_not_json(text: str | bytes) -> None:
    try:
        value = loads(text)
    except MalformedError:
        return
    assert same(loads(dumps(value)), value)


def test_members_of_an_enum_are_names_by_their_text() -> None:
    """And plain texts that equal them are stored alike afterwards, because the function for a set of names is kept."""
    kind: Any = enum.Enum
    for properties in ({kind("Name", {"CITY": "a city's name"}, type=str).CITY: "Bonn"}, {"a city's name": "Bonn"}):
        assert encode_properties(properties) == b"a city's name\1Bonn"
