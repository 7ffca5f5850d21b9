"""Every row of ``encoding.json`` about hashes, ids, properties, records, batches, levels and names."""

from __future__ import annotations

from base64 import b64decode

import pytest

from librmq.errors import BodyChecksumError, MessageIllegalError, RecordError
from librmq.java.lang import hash_append, index_key_hash, string_hash
from librmq.message import record as record_format
from librmq.message.batch import BatchItem, decode_batch, encode_batch
from librmq.message.delays import DelayLevels
from librmq.message.ids import (
    UniqueIds,
    decode_unique_id,
    format_host,
    offset_message_id,
    parse_host,
    parse_offset_message_id,
)
from librmq.message.message import Message, MessageQueue, StoredMessage
from librmq.message.properties import decode_properties, encode_properties, find_property, split_keys, tags_code
from librmq.message.record import compression_type
from librmq.message.topics import (
    NOT_FOR_SENDING,
    dead_letter_topic,
    is_system_topic,
    retry_topic,
    validate_client_topic,
    validate_topic,
)
from tests.reference import Row, encoding


def test_crc32() -> None:
    for row in encoding("crc32"):
        assert record_format.body_checksum(b64decode(row["body_b64"])) == row["body_crc"]


def test_string_hash() -> None:
    rows = encoding("string_hash")
    for row in rows:
        text = row["s"]
        assert string_hash(text) == row["hash_code"]
        assert tags_code(text) == row["tags_code"] == row["tags_code_multi"]
        for at in range(len(text) + 1):
            assert hash_append(string_hash(text[:at]), text[at:]) == row["hash_code"]


def test_index_key_hash() -> None:
    for row in encoding("index_key_hash"):
        assert index_key_hash(row["topic"], row["key"]) == row["key_hash"]
        assert hash_append(string_hash(row["topic"] + "#"), row["key"]) == row["string_hash"]
        assert row["key_hash"] % 5_000_000 == row["slot_of_5000000"]
        assert row["key_hash"] % 64 == row["slot_of_64"]


def test_message_id() -> None:
    for row in encoding("message_id"):
        host = parse_host(row["addr"])
        assert format_host(host) == row["addr"]
        assert offset_message_id(host, row["offset"]) == row["msg_id"]
        decoded, physical_offset = parse_offset_message_id(row["msg_id"])
        assert (format_host(decoded), physical_offset) == (row["decoded_addr"], row["decoded_offset"])


def test_uniq_id(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = encoding("uniq_id")
    for row in rows:
        # RocketMQ read the id a little later, at an unknown time. In the same millisecond it counts as a month old.
        at_ms = row["created_between_ms_to"]
        answers = [decode_unique_id(row["uniq_id"], now_ms) for now_ms in (at_ms, at_ms + 1)]
        assert row["nearly_time_ms_utc_evaluated_now"] in [answer.timestamp_ms for answer in answers]
        parts = answers[1]
        assert (parts.ip, parts.pid, parts.maker, parts.counter) == (
            row["ip"],
            row["pid"],
            row["classloader_hash"],
            row["counter"],
        )
        assert row["created_between_ms_from"] <= parts.timestamp_ms <= row["created_between_ms_to"]
        assert parts.timestamp_ms % (1 << 32) >= 0
        assert int(row["uniq_id"][-12:-4], 16) == row["month_ms_diff"]
        assert len(row["uniq_id"]) == 2 * row["bytes"]
    # Generate the ids again from their parts, in order. The rows have gaps, so generate the ids between them, too.
    monkeypatch.setattr("os.getpid", lambda: rows[0]["pid"])
    ip = bytes.fromhex(rows[0]["uniq_id"])[:-12]
    now_ms = 0
    ids = UniqueIds(lambda: now_ms, ip, rows[0]["classloader_hash"], first=0)
    made = 0
    for row in rows:
        now_ms = decode_unique_id(row["uniq_id"], row["created_between_ms_to"] + 1).timestamp_ms
        *_, latest = [ids.next() for _ in range(row["counter"] + 1 - made)]
        assert latest == row["uniq_id"]
        made = row["counter"] + 1


def test_uniq_id_decode_ipv4_constructed() -> None:
    for row in encoding("uniq_id_decode_ipv4_constructed"):
        parts = decode_unique_id(row["uniq_id"], row["evaluated_at_ms"])
        assert (parts.ip, parts.pid, parts.timestamp_ms) == (row["ip"], row["pid"], row["nearly_time_ms_utc"])


def names_in_order(text: str) -> list[str]:
    return [part.split("\1", 1)[0] for part in text.split("\2")] if text else []


def test_properties() -> None:
    for row in encoding("properties"):
        text, properties = row["string_java_hashmap_order"], row["map"]
        assert decode_properties(text) == decode_properties(text.encode()) == row["decoded"]
        # Rows have their maps sorted by name, which may not be the order of insertion. That order decides
        # the order within a bucket, and so the order of the result.
        assert encode_properties({name: properties[name] for name in names_in_order(text)}).decode() == text


def test_properties_string_decode() -> None:
    for row in encoding("properties_string_decode"):
        raw = row["string"].encode()
        assert decode_properties(row["string"]) == decode_properties(raw) == row["decoded"]
        for name in [*names_in_order(row["string"]), "a", "b", "c", "é"]:
            value = find_property(raw, name.encode())
            assert (None if value is None else value.decode()) == row["decoded"].get(name)


def as_in_the_rows(message: StoredMessage) -> Row:
    level = message.properties.get("DELAY", "0")
    return {
        "store_size": message.size,
        "body_crc": message.body_crc,
        "queue_id": message.queue_id,
        "flag": message.flag,
        "queue_offset": message.queue_offset,
        "commit_log_offset": message.physical_offset,
        "sys_flag": message.sys_flag,
        "born_timestamp": message.born_timestamp_ms,
        "born_host": format_host(message.born_host),
        "store_timestamp": message.store_timestamp_ms,
        "store_host": format_host(message.store_host),
        "reconsume_times": message.reconsume_times,
        "prepared_transaction_offset": message.prepared_transaction_offset,
        "topic": message.topic,
        "msg_id": message.offset_id,
        "tags": message.tags,
        "keys": message.properties.get("KEYS"),
        "uniq_key": message.unique_key,
        "delay_time_level": int(level),
        "wait_store_msg_ok": message.properties.get("WAIT", "true").lower() == "true",
    }


def test_message_encode() -> None:
    for row in encoding("message_encode"):
        raw = bytes.fromhex(row["encoded_hex"])
        expected = dict(row["decoded"])
        body = b64decode(expected.pop("body_b64") or "")
        properties = expected.pop("properties")
        message = StoredMessage(raw)
        assert as_in_the_rows(message) == expected
        assert message.body == body
        assert dict(message.properties) == (properties or {})
        assert split_keys(expected["keys"]) == list(message.keys)

        record = record_format.decode_record(raw, check_body=False)
        assert record_format.encode_record(record) == raw
        assert record.size == expected["store_size"]
        assert record_format.store_timestamp_ms(raw) == expected["store_timestamp"]
        # The encoder received the checksum of the uncompressed body.
        compressed = row["need_compress"] and message.sys_flag & record_format.COMPRESSED
        assert message.stored_body == (record_format.compress_body(body) if compressed else body)
        assert message.body_crc == record_format.body_checksum(body)
        assert message.crc_ok == (not compressed)

        dispatch = row["dispatch"]
        assert record_format.check_record(raw, 0, len(raw), check_body=not compressed) == dispatch["msg_size"]
        assert message.tags_code == dispatch["tags_code"]
        assert message.unique_key == dispatch["uniq_key"]
        assert message.queue_offset == dispatch["consume_queue_offset"]
        assert message.properties.get("KEYS", None if message.properties_raw else "") == dispatch["keys"]


@pytest.mark.parametrize(("check_body", "suffix"), [(True, ""), (False, "_no_crc")])
def test_commitlog_check(check_body: bool, suffix: str) -> None:
    for row in encoding("commitlog_check"):
        raw = bytes.fromhex(row["hex"])
        if row["success" + suffix]:
            assert record_format.check_record(raw, 0, len(raw), check_body=check_body) == row["msg_size" + suffix]
            continue
        with pytest.raises(RecordError) as caught:
            record_format.check_record(raw, 0, len(raw), check_body=check_body)
        only_the_body = check_body and row["success_no_crc"]
        assert isinstance(caught.value, BodyChecksumError) == only_the_body


def test_batch_encode() -> None:
    for row in encoding("batch_encode"):
        raw = bytes.fromhex(row["encoded_hex"])
        items = decode_batch(raw)
        assert encode_batch(items) == raw
        assert [(item.body, item.flag, decode_properties(item.properties_raw)) for item in items] == [
            (b64decode(message["body_b64"]), message["flag"], message["properties"]) for message in row["messages"]
        ]
        made = [
            Message("T", b64decode(message["body_b64"]), flag=message["flag"], properties=message["properties"])
            for message in row["messages"]
        ]
        assert raw == encode_batch(
            BatchItem(message.body, message.flag, encode_properties(message.properties)) for message in made
        )


def test_sys_flag() -> None:
    flags = encoding("sys_flag")
    assert flags["COMPRESSED_FLAG"] == record_format.COMPRESSED
    assert flags["MULTI_TAGS_FLAG"] == record_format.MULTI_TAGS
    assert flags["TRANSACTION_PREPARED_TYPE"] == record_format.TRANSACTION_PREPARED
    assert flags["TRANSACTION_COMMIT_TYPE"] == record_format.TRANSACTION_COMMIT
    assert flags["TRANSACTION_ROLLBACK_TYPE"] == record_format.TRANSACTION_ROLLBACK == record_format.TRANSACTION_MASK
    assert flags["BORNHOST_V6_FLAG"] == record_format.BORN_HOST_V6
    assert flags["STOREHOSTADDRESS_V6_FLAG"] == record_format.STORE_HOST_V6
    assert flags["COMPRESSION_LZ4_TYPE"] == record_format.COMPRESSION_LZ4
    assert flags["COMPRESSION_ZSTD_TYPE"] == record_format.COMPRESSION_ZSTD
    assert flags["COMPRESSION_ZLIB_TYPE"] == record_format.COMPRESSION_ZLIB
    assert flags["COMPRESSION_TYPE_COMPARATOR"] == record_format.COMPRESSION_MASK


def test_sys_flag_ops() -> None:
    for row in encoding("sys_flag_ops"):
        flag = row["flag"]
        assert flag & record_format.TRANSACTION_MASK == row["transaction_value"]
        assert flag & ~record_format.TRANSACTION_MASK | row["reset_to"] == row["after_reset"]
        assert flag & ~record_format.COMPRESSED == row["clear_compressed"]
        assert compression_type(flag) == row["compression_type"].lower()
        assert bool(flag & record_format.MULTI_TAGS) == (row["topic_filter_type"] == "MULTI_TAG")


def test_zlib() -> None:
    for row in encoding("zlib"):
        body, compressed = b64decode(row["body_b64"]), b64decode(row["level5_compressed_b64"])
        assert record_format.compress_body(body) == compressed
        for kind in (0, record_format.COMPRESSION_ZLIB):
            assert record_format.decompress_body(compressed, record_format.COMPRESSED | kind, len(body)) == body


def test_delay_levels() -> None:
    rows = encoding("delay_levels")
    levels = DelayLevels.parse(rows["message_delay_level"])
    assert levels.max_level == rows["max_delay_level"]
    for level, store_timestamp_ms, deliver_timestamp_ms in rows["compute_deliver_timestamp_level_store_result"]:
        assert levels.deliver_timestamp_ms(level, store_timestamp_ms) == deliver_timestamp_ms


def test_names() -> None:
    for row in encoding("names"):
        assert retry_topic(row["group"]) == row["retry_topic"]
        assert dead_letter_topic(row["group"]) == row["dlq_topic"]


def test_topic_validation() -> None:
    for row in encoding("topic_validation"):
        topic = row["topic"]
        if row["client_error"] is None:
            assert row["broker_valid"]
            validate_client_topic(topic)
            validate_topic(topic)
        else:
            with pytest.raises(MessageIllegalError):
                validate_client_topic(topic)
        assert is_system_topic(topic) == row["is_system_topic"]
        assert (topic in NOT_FOR_SENDING) == row["not_allowed_send"]


def test_message_queue_order() -> None:
    queues = [MessageQueue(*row) for row in encoding("message_queue_sort_input")]
    assert [list(queue) for queue in sorted(queues)] == encoding("message_queue_order")


def test_message_queue_hash_and_string() -> None:
    for topic, broker_name, queue_id, code, text in encoding("message_queue_hash_and_string"):
        queue = MessageQueue(topic, broker_name, queue_id)
        assert (queue.java_hash, str(queue)) == (code, text)
