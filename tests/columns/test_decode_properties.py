"""The columnar decoder agrees with the plain decoder on every record, and on bytes that are no record."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

pytest.importorskip("pyarrow")

import numpy as np
import pyarrow as pa

from librmq.columns.decoding import COLUMNS, FIXED_COLUMNS, Block, Properties
from librmq.errors import RecordError
from librmq.message.ids import format_host
from librmq.message.properties import decode_properties
from librmq.message.record import (
    COMPRESSED,
    COMPRESSION_ZLIB,
    FIXED_SIZE,
    MESSAGE_MAGIC,
    MESSAGE_MAGIC_V2,
    Record,
    body_checksum,
    compress_body,
    decode_record,
    decompress_body,
    encode_record,
    frame,
    host_flags,
)
from tests.budget import examples

PIECES = st.sampled_from(
    [b"\1", b"\2", b"TAGS", b"KEYS", b"UNIQ_KEY", b"a", b"TAGS\1x", b"UNIQ_KEY\1id", b"UNIQ_KEX\1no", b"KEYS\1k1 k2",
     "消息".encode(), b"\xff", b"\xe6\xb6", b"\xed\xa0\x80", b"longer name than eight\1value", b"a\1" + b"v" * 40]
)  # fmt: skip
RAW_PROPERTIES = st.lists(PIECES, max_size=60).map(b"".join)
SIMILAR = [
    [b"TAGS", b"KEYS"],
    [b"UNIQ_KEY", b"UNIQ_KEX", b"UNIQ_KEY2"],
    [b"a", b"b", b"ab", b""],
    [b"longer name than eight", b"longer nbme than eight", b"longer name than eighu"],
    ["消息".encode()],
]
"""Names that are easily taken for each other."""


@st.composite
def rows_alike(draw: st.DrawFn) -> list[bytes]:
    """Rows with the same names in the same order, as one producer writes them; at times one row differs."""
    families = draw(st.lists(st.sampled_from(SIMILAR), min_size=1, max_size=4))
    names, end = [draw(st.sampled_from(one)) for one in families], draw(st.sampled_from([b"", b"\2"]))
    rows = [names] * draw(st.integers(1, 4))
    if draw(st.booleans()):
        rows.append([draw(st.sampled_from(one)) for one in families])
    value = st.sampled_from([b"", b"v", b"vip", b"\xff", b"x\1y"] if draw(st.booleans()) else [b"v", b"vip"])
    return [b"\2".join(name + b"\1" + draw(value) for name in own) + end for own in rows]


V4 = st.tuples(st.sampled_from(["10.0.0.1", "192.168.1.10", "255.255.255.255"]), st.integers(0, 65535))
V6 = st.tuples(st.sampled_from(["fe80::1:2", "::1", "2001:db8::ff"]), st.integers(0, 65535))
INT, LONG = st.integers(-(1 << 31), (1 << 31) - 1), st.integers(-(1 << 63), (1 << 63) - 1)
MOMENTS = st.integers(0, 4_000_000_000_000)


@st.composite
def records(draw: st.DrawFn) -> bytes:
    born, stored = draw(V4 | V6), draw(V4 | V6)
    body = draw(st.binary(max_size=80))
    flags = draw(st.sampled_from([0, 2, 4, 8, 12]))
    if draw(st.integers(0, 3)) == 0:
        flags |= COMPRESSED | COMPRESSION_ZLIB
        if draw(st.booleans()):
            body = compress_body(body)
    record = Record(
        topic=draw(st.sampled_from(["TopicA", "消息", "t" * 127, "%RETRY%g"])),
        queue_id=draw(INT),
        flag=draw(INT),
        queue_offset=draw(LONG),
        physical_offset=draw(LONG),
        sys_flag=flags | host_flags(born, stored),
        born_timestamp_ms=draw(MOMENTS),
        born_host=born,
        store_timestamp_ms=draw(MOMENTS),
        store_host=stored,
        reconsume_times=draw(INT),
        prepared_transaction_offset=draw(LONG),
        body=body,
        body_crc=body_checksum(body),
        properties_raw=draw(RAW_PROPERTIES),
        magic=draw(st.sampled_from([MESSAGE_MAGIC, MESSAGE_MAGIC_V2])),
    )
    return encode_record(record)


def block_of(raws: list[bytes], gap: bytes = b"") -> Block:
    places = np.cumsum([len(gap), *(len(raw) + len(gap) for raw in raws)])[: len(raws)].astype(np.int64)
    data = np.frombuffer(gap + gap.join(raws), np.uint8)
    return Block(data, places, np.array([len(raw) for raw in raws], np.int64))


@settings(max_examples=examples(60))
@given(st.lists(records(), max_size=6), st.binary(max_size=3))
def test_every_column_is_that_of_the_plain_decoder(raws: list[bytes], gap: bytes) -> None:
    block = block_of(raws, gap)
    assert block.sound.all()
    columns = {name: block.column(name).to_pylist() for name in COLUMNS if not name.endswith("Timestamp")}
    ((_, bodies, bad),) = block.bodies(1 << 62, checksums=False)
    born, stored = block.field("born_timestamp").tolist(), block.field("store_timestamp").tolist()
    for row, raw in enumerate(raws):
        plain = decode_record(raw)
        properties = decode_properties(plain.properties_raw)
        assert dict(columns["properties"][row]) == properties
        assert list(dict(columns["properties"][row])) == list(properties)
        assert len(columns["properties"][row]) == len(properties)
        for name, key in (("tags", "TAGS"), ("keys", "KEYS"), ("uniqueKey", "UNIQ_KEY")):
            assert columns[name][row] == properties.get(key)
        assert columns["topic"][row] == plain.topic
        assert columns["storedBody"][row] == plain.body
        assert columns["queueId"][row] == plain.queue_id
        assert columns["queueOffset"][row] == plain.queue_offset
        assert columns["physicalOffset"][row] == plain.physical_offset
        assert columns["flag"][row] == plain.flag
        assert columns["sysFlag"][row] == plain.sys_flag
        assert columns["reconsumeTimes"][row] == plain.reconsume_times
        assert columns["preparedTransactionOffset"][row] == plain.prepared_transaction_offset
        assert columns["bornHost"][row] == format_host(plain.born_host)
        assert columns["storeHost"][row] == format_host(plain.store_host)
        assert columns["size"][row] == len(raw)
        assert (born[row], stored[row]) == (plain.born_timestamp_ms, plain.store_timestamp_ms)
        try:
            body: bytes | None = decompress_body(plain.body, plain.sys_flag, 1 << 26)
        except RecordError:
            body = None
        assert bodies[row].as_py() == body
        assert (row in bad) is (body is None)


@settings(max_examples=examples(150))
@given(st.lists(records(), min_size=1, max_size=4), st.data())
def test_invalid_records_are_reported_as_by_the_plain_decoder(raws: list[bytes], data: st.DataObject) -> None:
    whole = bytearray(b"".join(raws))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    places = data.draw(st.lists(st.integers(-5, len(whole) + 5), max_size=4))
    places += np.cumsum([0, *map(len, raws)])[: len(raws)].tolist()
    block = Block(np.frombuffer(bytes(whole), np.uint8), np.array(places, np.int64))
    for row, place in enumerate(places):
        try:
            assert 0 <= place <= len(whole) - FIXED_SIZE
            frame(whole, place, len(whole))
        except (RecordError, AssertionError):
            assert not block.sound[row]
            assert isinstance(block.reason(row), RecordError)
        else:
            assert block.sound[row]
    for row, place in enumerate(places):
        size = data.draw(st.just(int(block.field("size")[row])) | st.integers(0, 200)) if block.sound[row] else 100
        one = Block(np.frombuffer(bytes(whole), np.uint8), np.array([place]), np.array([size]))
        assert one.sound[0] == (block.sound[row] and size == block.field("size")[row])
        if one.sound[0]:
            assert all(one.column(name)[0] == block.column(name)[row] for name in COLUMNS)
    loose = Block(np.frombuffer(bytes(whole), np.uint8), np.array(places, np.int64), frames=False)
    assert not (block.sound & ~loose.sound).any()
    for name in FIXED_COLUMNS:
        kind = pa.int64() if name.endswith("Timestamp") else COLUMNS[name][0]
        both = block.column(name).cast(kind).to_pylist(), loose.column(name).cast(kind).to_pylist()
        same = zip(*both, block.sound, strict=True)
        assert all(ours == theirs for ours, theirs, sound in same if sound)
    for name in COLUMNS:  # the values of invalid rows don't matter, but reading them must not fail
        assert len(block.column(name)) == len(places)


@settings(max_examples=examples(150))
@given(st.lists(RAW_PROPERTIES, max_size=8) | rows_alike())
@example([b"\2".join(b"n%d\1v" % (number % 90) for number in range(100))])  # very many
@example([b"KEYS\2a\1x\2", b"KEYS\1v\2a\1x\2"])  # a name without a value in the first row only
@example([b"KEYS\1v\2KEYS\1\2"])  # the last value that is not empty counts
def test_properties(stored: list[bytes]) -> None:
    data = np.frombuffer(b"".join(stored), np.uint8)
    ends = np.cumsum(list(map(len, stored)), dtype=np.int64)
    begins = ends - np.array(list(map(len, stored)), np.int64)
    properties = Properties(data, begins, ends)
    plain = list(map(decode_properties, stored))
    assert properties.map().to_pylist() == [list(row.items()) for row in plain]
    properties.map().validate(full=True)
    block = block_of([encode_record(Record(topic="T", properties_raw=raw)) for raw in stored])
    for name in (*(name.decode() for similar in SIMILAR for name in similar), "a\1b"):
        for values in (properties.value(name), block.property(name)):
            assert values.to_pylist() == [row.get(name) for row in plain]
            values.validate(full=True)


@pytest.mark.parametrize("length", [5, 5000])
def test_a_changed_body_is_found(length: int) -> None:
    body = b"sound" * (length // 5)
    good = encode_record(Record(topic="T", body=body, body_crc=body_checksum(body)))
    changed = bytearray(good)
    changed[good.index(body) + length - 1] ^= 1
    block = block_of([good, bytes(changed), encode_record(Record(topic="T")), good])
    assert list(block.bad_checksums()) == [1]
