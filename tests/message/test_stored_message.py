"""Messages read from a log."""

from __future__ import annotations

import copy
import pickle
import struct
import sys

import pytest

from librmq.errors import BodyCompressionError, MalformedError, RecordError
from librmq.message import StoredMessage
from librmq.message.properties import tags_code
from librmq.message.record import (
    BODY_AT,
    COMPRESSED,
    COMPRESSION_ZLIB,
    DECOMPRESSED_LIMIT,
    TRANSACTION_COMMIT,
    Record,
    compress_body,
    encode_record,
)
from tests.message.samples import record

RAW = b"UNIQ_KEY\x010A0B\x02KEYS\x01k1  k2\x02TAGS\x01TagA\x02e\x01\x02e\x01\xc3\xa9"


def stored(**changes: object) -> Record:
    places: dict[str, object] = {"topic": "主题", "queue_offset": 2**40, "physical_offset": 2**41}
    return record(**places | {"sys_flag": TRANSACTION_COMMIT, "properties_raw": RAW} | changes)


def read_back(body: bytes) -> StoredMessage:
    return StoredMessage(encode_record(stored(body=body)))


def test_stored_bodies_are_read_as_text_or_json() -> None:
    assert read_back("grüße".encode()).text() == "grüße"
    with pytest.raises(MalformedError, match="expected UTF-8"):
        read_back(b"\xff").text()
    with pytest.raises(MalformedError, match="expected JSON"):
        read_back(b"{").json()


def test_properties_of_a_stored_message() -> None:
    message = StoredMessage(encode_record(stored()))
    assert message.properties == {"UNIQ_KEY": "0A0B", "KEYS": "k1  k2", "TAGS": "TagA", "e": "é"}
    assert message.properties is message.properties
    assert (message.tags, message.keys, message.unique_key) == ("TagA", ("k1", "k2"), "0A0B")
    assert message.tags_code == tags_code("TagA")
    assert message.message_id == "0A0B"


def test_a_stored_message_without_properties() -> None:
    message = StoredMessage(encode_record(stored(properties_raw=b"TAGS\x01\x02x")))
    assert message.properties == {}
    assert (message.tags, message.tags_code, message.keys, message.unique_key) == (None, 0, (), None)
    assert message.message_id == message.offset_id == "7F00000100002A9F0000020000000000"


def test_compressed_bodies_are_restored() -> None:
    body = compress_body(b"hello" * 1000)
    raw = encode_record(stored(body=body, sys_flag=COMPRESSED | COMPRESSION_ZLIB))
    message = StoredMessage(raw)
    assert message.body == b"hello" * 1000
    assert message.stored_body == body
    assert message.crc_ok
    assert message.decompressed_body(5000) == b"hello" * 1000
    with pytest.raises(BodyCompressionError, match="4,999 bytes"):
        message.decompressed_body(4999)


@pytest.mark.slow
def test_a_zip_bomb_affects_only_its_body() -> None:
    bomb = compress_body(bytes(DECOMPRESSED_LIMIT + 1))
    message = StoredMessage(encode_record(stored(body=bomb, sys_flag=COMPRESSED)))
    with pytest.raises(BodyCompressionError, match="expected at most 67,108,864 bytes"):
        _ = message.body
    assert message.topic == "主题"
    assert "主题" in repr(message)


def test_a_damaged_body_is_reported_by_its_checksum() -> None:
    raw = bytearray(encode_record(stored()))
    raw[BODY_AT] ^= 1
    assert not StoredMessage(bytes(raw)).crc_ok
    assert StoredMessage(encode_record(stored(body=b"", body_crc=5))).crc_ok


def test_stored_messages_are_equal_if_their_bytes_are() -> None:
    raw = encode_record(stored())
    one, two = StoredMessage(raw), StoredMessage(bytes(bytearray(raw)))
    assert one == two
    assert hash(one) == hash(two)
    assert one != StoredMessage(encode_record(stored(flag=1)))
    assert one != raw
    assert pickle.loads(pickle.dumps(one)) == one
    assert copy.deepcopy(one) == one


def test_stored_messages_have_a_short_repr() -> None:
    text = repr(StoredMessage(encode_record(stored(body=bytes(100_000)))))
    assert text.startswith(
        "StoredMessage('主题', queue_id=3, queue_offset=1099511627776, physical_offset=2199023255552, "
        "tags='TagA', keys=('k1', 'k2'), "
    )
    assert text.endswith("(100,000 bytes))")
    assert len(text) < 500


def test_unchecked_records_raise_only_typed_errors() -> None:
    with pytest.raises(RecordError, match="at least 91 bytes, found 90"):
        StoredMessage(bytes(90))
    for flag in (0, 16, 32, 48):
        message = StoredMessage(bytes(36) + struct.pack(">i", flag) + bytes(51))
        assert message.queue_offset == 0
        assert message.store_timestamp_ms == 0
        assert "damaged: magic" in repr(message)
        for attribute in ("topic", "stored_body", "properties", "tags", "crc_ok"):
            with pytest.raises(RecordError, match="magic"):
                getattr(message, attribute)
    for attribute in ("store_host", "born_host", "reconsume_times", "prepared_transaction_offset", "offset_id"):
        with pytest.raises(RecordError, match="IPv6 hosts do not fit into 91 bytes"):
            getattr(message, attribute)


def test_a_stored_message_needs_little_more_than_its_bytes() -> None:

    assert sys.getsizeof(StoredMessage(encode_record(stored()))) <= 64
