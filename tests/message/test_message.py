"""Messages to be sent, messages read, queues, topics' names, unique ids."""

from __future__ import annotations

import copy
import dataclasses
import os
import pickle
import random
import struct
import subprocess
import sys
import threading
from datetime import datetime, timedelta, timezone

import pytest

from librmq.errors import BodyCompressionError, MalformedError, MessageIllegalError, RecordError
from librmq.message.message import (
    DECOMPRESSED_LIMIT,
    Message,
    MessageQueue,
    StoredMessage,
    UniqueIds,
    decode_unique_id,
    is_system_topic,
    validate_client_topic,
    validate_topic,
)
from librmq.message.record import (
    BODY_AT,
    COMPRESSED,
    COMPRESSION_ZLIB,
    MESSAGE_MAGIC_V2,
    RESERVED_PROPERTIES,
    TRANSACTION_COMMIT,
    Record,
    body_checksum,
    compress_body,
    encode_record,
    offset_message_id,
    tags_code,
)
from librmq.message.topics import NOT_FOR_SENDING

# --- Message


def test_all_but_topic_body_and_flag_are_ordered_properties() -> None:
    """Everything but topic body and flag is a property in a fixed order."""
    message = Message(
        "T",
        b"body",
        tags="TagA",
        keys=("k1", "k2"),
        properties={"z": "1", "a": "2"},
        delay_level=3,
        wait_store_ok=False,
        flag=7,
        unique_key="0A0B",
    )
    assert list(message.properties.items()) == [
        ("z", "1"),
        ("a", "2"),
        ("TAGS", "TagA"),
        ("KEYS", "k1 k2"),
        ("UNIQ_KEY", "0A0B"),
        ("DELAY", "3"),
        ("WAIT", "false"),
    ]
    assert (message.topic, message.body, message.flag) == ("T", b"body", 7)
    assert (message.tags, message.keys, message.unique_key) == ("TagA", ("k1", "k2"), "0A0B")
    assert (message.delay_level, message.wait_store_ok) == (3, False)


def test_a_bare_message_has_no_properties() -> None:
    message = Message("T", b"")
    assert (message.body, message.flag, message.properties) == (b"", 0, {})
    assert (message.tags, message.keys, message.unique_key) == (None, (), None)
    assert (message.delay_level, message.wait_store_ok) == (0, True)
    assert Message("T", b"", tags="", keys="", unique_key="", properties={}) == message
    assert Message("T", b"", wait_store_ok=True).properties == {"WAIT": "true"}


def test_keys_as_text_or_one_by_one() -> None:
    assert Message("T", b"", keys=" k1  k2 ").properties == {"KEYS": " k1  k2 "}
    assert Message("T", b"", keys=" k1  k2 ").keys == ("k1", "k2")
    assert Message("T", b"", keys=["k1"]).keys == ("k1",)
    assert Message("T", b"", keys=(key for key in ("k1", "k2"))).properties == {"KEYS": "k1 k2"}


def test_the_users_properties_are_copied() -> None:
    properties = {"a": "1"}
    message = Message("T", b"", properties=properties)
    message.properties["b"] = "2"
    assert properties == {"a": "1"}


def test_bodies_of_other_kinds_become_bytes() -> None:
    for body in (bytearray(b"x"), memoryview(b"x")):
        assert type(Message("T", body).body) is bytes
    assert Message("T", "grüße").body == "grüße".encode()


def test_a_json_value_instead_of_a_body() -> None:
    value = {"name": "grüße", "numbers": [1, 2.5, None]}
    message = Message("T", json=value)
    assert message.body == '{"name":"grüße","numbers":[1,2.5,null]}'.encode()
    assert read_back(message.body).json() == value
    assert Message("T", json=None).body == b"null"


def read_back(body: bytes) -> StoredMessage:
    return StoredMessage(encode_record(stored(body=body)))


def test_what_was_stored_is_read_as_text_or_json() -> None:
    assert read_back("grüße".encode()).text() == "grüße"
    with pytest.raises(MalformedError, match="expected UTF-8"):
        read_back(b"\xff").text()
    with pytest.raises(MalformedError, match="expected JSON"):
        read_back(b"{").json()


def test_a_time_to_wait_for() -> None:
    assert Message("T", b"").delay_s is Message("T", b"").deliver_at_ms is None
    assert Message("T", b"", delay=timedelta(minutes=1)).delay_s == Message("T", b"", delay=60).delay_s == 60
    at = datetime(2030, 1, 1, 1, tzinfo=timezone(timedelta(hours=1)))
    assert Message("T", b"", deliver_at=at).deliver_at_ms == 1_893_456_000_000
    assert Message("T", b"", delay=1) != Message("T", b"")
    assert "delay_s=1" in repr(Message("T", b"", delay=1))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"body": 1}, "body: expected bytes or text, or a value for json, found int"),
        ({"body": None}, "body: expected bytes or text, or a value for json, found none"),
        ({"body": "\ud800"}, "body: the text can't be written as UTF-8"),
        ({"body": b"x", "json": 1}, "body: expected either a body or json, found both"),
        ({"body": "x", "json": 1}, "body: expected either a body or json, found both"),
        ({"json": object()}, "can't be written as JSON"),
        ({"json": float("nan")}, "can't be written as JSON"),
        ({"json": "\ud800"}, "can't be written as JSON"),
        ({"delay": -1}, "delay: expected seconds or a timedelta"),
        ({"delay": "1"}, "delay: expected seconds or a timedelta"),
        (
            {"deliver_at": datetime(2030, 1, 1)},
            "found datetime.datetime(2030, 1, 1, 0, 0), which has none: pass tzinfo=UTC",
        ),
        ({"deliver_at": 1}, "deliver_at: expected a datetime with a time zone, found 1; give a duration as delay"),
        ({"delay": 1, "delay_level": 1}, "expected one of them, found several"),
        ({"tags": 5}, "property 'TAGS': expected text, found 5"),
        ({"tags": "a\x01b"}, "property 'TAGS': 01 and 02"),
        ({"keys": "a\x02b"}, "property 'KEYS': 01 and 02"),
        ({"keys": ["a", "b c"]}, "keys: one is empty or contains a space"),
        ({"keys": ["a", ""]}, "keys: one is empty or contains a space"),
        ({"keys": [1]}, "keys: expected texts"),
        ({"keys": 5}, "keys: expected texts"),
        ({"keys": b"k"}, "keys: expected texts"),
        ({"unique_key": b"0A"}, "property 'UNIQ_KEY': expected text"),
        ({"unique_key": "\x01"}, "property 'UNIQ_KEY': 01 and 02"),
        ({"flag": 2**31}, "flag: expected a whole number of 32 bits"),
        ({"flag": "1"}, "flag: expected a whole number of 32 bits"),
        ({"delay_level": 1.5}, "delay_level: expected a whole number of 32 bits"),
        ({"delay_level": -(2**31) - 1}, "delay_level: expected a whole number of 32 bits"),
        ({"properties": [1]}, "properties: expected texts by name"),
        ({"properties": 5}, "properties: expected texts by name"),
        ({"properties": {"a": 1}}, "property 'a': expected text, found 1"),
        ({"properties": {1: "a"}}, "property 1: expected text, found 1"),
        ({"properties": {b"a": "1"}}, "property b'a': expected text"),
        ({"properties": {"a": None}}, "property 'a': expected text, found None"),
        ({"properties": {"": "1"}}, "property '': name or value is blank"),
        ({"properties": {"a": " \t"}}, "property 'a': name or value is blank"),
        ({"properties": {"a\x01": "1"}}, "01 and 02 separate properties"),
        ({"properties": {"a": "1\x02b\x012"}}, "property 'a': 01 and 02 separate properties"),
        ({"properties": {"a": "1", "WAIT": "true"}}, "WAIT is not for users"),
        ({"properties": {"UNIQ_KEY": "1", "TAGS": "a"}}, "TAGS, UNIQ_KEY is not for users"),
    ],
)
def test_what_cannot_be_stored_is_refused(arguments: dict[str, object], reason: str) -> None:
    with pytest.raises(MessageIllegalError) as caught:
        Message("T", **({"body": b""} if arguments.keys().isdisjoint({"body", "json"}) else {}), **arguments)  # type: ignore[arg-type]
    assert reason in str(caught.value)


@pytest.mark.parametrize("name", sorted(RESERVED_PROPERTIES))
def test_reserved_names_are_refused(name: str) -> None:
    with pytest.raises(MessageIllegalError, match="is not for users"):
        Message("T", b"", properties={name: "1"})


def test_names_that_the_original_leaves_to_users() -> None:
    properties = {"CHECK_IMMUNITY_TIME_IN_SECONDS": "30", "TRANSACTION_CHECK_TIMES": "1"}
    assert Message("T", b"", properties=properties).properties == properties


def test_a_message_is_compared_by_value_and_has_no_hash() -> None:
    assert Message("T", b"x", tags="a") == Message("T", b"x", tags="a")
    assert Message("T", b"x", tags="a") != Message("T", b"x", tags="b")
    assert Message("T", b"") != "T"
    with pytest.raises(TypeError):
        hash(Message("T", b""))


def test_long_bodies_are_cut_when_shown() -> None:
    assert repr(Message("T", b"x")) == "Message('T', b'x')"
    assert "(1,000,000 bytes)" in repr(Message("T", bytes(1_000_000)))
    assert len(repr(Message("T", bytes(1_000_000)))) < 400


# --- StoredMessage

RAW = b"UNIQ_KEY\x010A0B\x02KEYS\x01k1  k2\x02TAGS\x01TagA\x02e\x01\x02e\x01\xc3\xa9"


def stored(**changes: object) -> Record:
    body = changes.pop("body", b"hello")
    assert isinstance(body, bytes)
    fields: dict[str, object] = {
        "topic": "主题",
        "queue_id": 3,
        "flag": -7,
        "queue_offset": 2**40,
        "physical_offset": 2**41,
        "sys_flag": TRANSACTION_COMMIT,
        "born_timestamp_ms": 1,
        "born_host": ("192.168.1.10", 54321),
        "store_timestamp_ms": 2,
        "store_host": ("127.0.0.1", 10911),
        "reconsume_times": 4,
        "prepared_transaction_offset": 5,
        "body": body,
        "body_crc": body_checksum(body),
        "properties_raw": RAW,
    }
    return Record(**(fields | changes))  # type: ignore[arg-type]


V6 = ("20ee:f2f5:edc3:a55:5d7f:4438:b98e:36bd", 10911)
SHAPES: list[dict[str, object]] = [
    {},
    {"born_host": V6, "sys_flag": 16},
    {"store_host": V6, "sys_flag": 32},
    {"born_host": V6, "store_host": V6, "sys_flag": 48},
    {"magic": MESSAGE_MAGIC_V2, "topic": "t" * 200},
    {"body": b"", "properties_raw": b""},
]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_stored_message_says_what_its_record_says(shape: dict[str, object]) -> None:
    record = stored(**shape)
    raw = encode_record(record)
    message = StoredMessage(raw)
    for name in (field.name for field in dataclasses.fields(Record)):
        assert getattr(message, name) == getattr(record, name), name
    assert (message.raw, message.size) == (raw, record.size)
    assert message.stored_body == record.body
    assert message.crc_ok
    assert message.offset_id == offset_message_id(record.store_host, record.physical_offset)


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


def test_a_bomb_concerns_its_body_only() -> None:
    bomb = compress_body(bytes(DECOMPRESSED_LIMIT + 1), 9)
    message = StoredMessage(encode_record(stored(body=bomb, sys_flag=COMPRESSED)))
    with pytest.raises(BodyCompressionError, match="more than the 67,108,864 bytes"):
        _ = message.body
    assert message.topic == "主题"
    assert "主题" in repr(message)


def test_a_damaged_body_is_told_by_its_checksum() -> None:
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


def test_stored_messages_are_shown_shortly() -> None:
    text = repr(StoredMessage(encode_record(stored(body=bytes(100_000)))))
    assert text.startswith(
        "StoredMessage('主题', queue_id=3, queue_offset=1099511627776, physical_offset=2199023255552, "
        "tags='TagA', keys=('k1', 'k2'), "
    )
    assert text.endswith("(100,000 bytes))")
    assert len(text) < 500


def test_what_was_not_checked_raises_typed_errors_only() -> None:
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
    for attribute in (
        "store_host",
        "born_host",
        "reconsume_times",
        "prepared_transaction_offset",
        "offset_id",
    ):
        with pytest.raises(RecordError, match="IPv6 hosts do not fit into 91 bytes"):
            getattr(message, attribute)


def test_a_stored_message_costs_little_beside_its_bytes() -> None:
    import sys

    assert sys.getsizeof(StoredMessage(encode_record(stored()))) <= 64


# --- MessageQueue


def test_a_queue_is_a_value() -> None:
    queue = MessageQueue("T", "broker-a", 3)
    assert str(queue) == "MessageQueue [topic=T, brokerName=broker-a, queueId=3]"
    assert queue == MessageQueue("T", "broker-a", 3)
    assert len({queue, MessageQueue("T", "broker-a", 3), MessageQueue("T", "broker-a", 4)}) == 2
    assert queue.java_hash == 1680488765


def test_queues_sort_by_utf16_units() -> None:
    ordered = [
        MessageQueue("A", "b", 10),
        MessageQueue("T", "a", 2),
        MessageQueue("T", "b", 1),
        MessageQueue("T\U0001f600", "a", 0),
        MessageQueue("T\uffee", "\U0001f600", 0),  # after it in UTF-16, before it by code points
        MessageQueue("T\uffee", "\uffee", 0),
    ]
    shuffled = ordered[:]
    random.Random(5).shuffle(shuffled)
    assert sorted(shuffled) == ordered
    for at, one in enumerate(ordered):
        for place, other in enumerate(ordered):
            assert (one < other, one <= other, one > other, one >= other) == (
                at < place,
                at <= place,
                at > place,
                at >= place,
            )


# --- topics


@pytest.mark.parametrize("topic", ["T", "a b", "中文", "T" * 127, "中" * 42, "...", "%RETRY%g", "a\\b", "rmq_sys_x"])
def test_topics_of_a_store(topic: str) -> None:
    validate_topic(topic)


@pytest.mark.parametrize("topic", ["", ".", "..", "a/b", "/", "a\0", "T" * 128, "中" * 43, "\ud800", None, 5, b"T"])
def test_no_topics(topic: str) -> None:
    for validate in (validate_topic, validate_client_topic):
        with pytest.raises(MessageIllegalError, match="topic"):
            validate(topic)


@pytest.mark.parametrize("topic", ["a b", "中文", "a.b", "T\n", "a+b", "...", "²"])
def test_clients_are_stricter(topic: str) -> None:
    validate_topic(topic)
    with pytest.raises(MessageIllegalError, match="may only contain"):
        validate_client_topic(topic)


def test_topics_for_the_broker_alone_are_system_topics() -> None:
    assert all(is_system_topic(topic) for topic in NOT_FOR_SENDING)
    assert not is_system_topic("%RETRY%g")


# --- unique ids

NOW = 1_700_000_000_000  # 2023-11-14 22:13:20
MONTH = 1_698_796_800_000  # 2023-11-01


def test_a_unique_id_tells_where_and_when(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getpid", lambda: 0x1_1234)
    text = UniqueIds(lambda: NOW, bytes((127, 0, 0, 1)), 0xDEADBEEF, first=0).next()
    assert text == f"7F0000011234DEADBEEF{NOW - MONTH:08X}0000"
    assert decode_unique_id(text, NOW + 1) == ("127.0.0.1", 0x1234, 0xDEADBEEF, NOW, 0)
    assert decode_unique_id(text.lower(), NOW + 1).timestamp_ms == NOW


def test_a_unique_id_of_ipv6() -> None:
    ip = bytes.fromhex("fe80000000000000000000000000a001")
    text = UniqueIds(lambda: NOW, ip, -1).next()
    assert len(text) == 56
    parts = decode_unique_id(text, NOW + 1)
    assert (parts.ip, parts.maker) == ("fe80:0000:0000:0000:0000:0000:0000:a001", 0xFFFFFFFF)


def test_unique_ids_count_on_through_time() -> None:
    times = iter([NOW, NOW, NOW + 1, MONTH - 1, MONTH])
    ids = UniqueIds(lambda: next(times), bytes(4), 0, first=0)
    parts = [decode_unique_id(ids.next(), NOW + 2) for _ in range(5)]
    assert [part.counter for part in parts] == [0, 1, 2, 3, 4]
    assert [part.timestamp_ms for part in parts[:3]] == [NOW, NOW, NOW + 1]
    assert parts[4].timestamp_ms == MONTH
    # Made in October, at the very end: read in November it is of October.
    assert decode_unique_id(f"{'0' * 20}{31 * 86_400_000 - 1:08X}0003", MONTH + 5).timestamp_ms == MONTH - 1


def test_the_counter_wraps() -> None:
    ids = UniqueIds(lambda: NOW, bytes(4), 0)
    made = [ids.next() for _ in range(65_537)]
    assert len(set(made)) == 65_536
    assert made[-1] == made[0]


def test_threads_make_distinct_ids() -> None:
    clock = iter(range(NOW, NOW + 1_000_000))
    ids = UniqueIds(lambda: next(clock) // 7, bytes(4), 0)
    made: list[str] = []

    def make() -> None:
        mine = [ids.next() for _ in range(5_000)]
        made.extend(mine)

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(made)) == 40_000


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_forked_child_makes_other_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though its process number and millisecond may be the parent's, as in containers."""
    monkeypatch.setattr("os.getpid", lambda: 1)
    ids = UniqueIds(lambda: NOW, bytes(4))
    ids.next()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, ids.next().encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    text = os.read(read, 100).decode()
    os.close(read)
    os.close(write)
    theirs, mine = decode_unique_id(text, NOW + 1), decode_unique_id(ids.next(), NOW + 1)
    assert theirs.timestamp_ms == mine.timestamp_ms == NOW
    assert theirs.maker != mine.maker


def test_unique_ids_differ_though_address_and_pid_are_shared() -> None:
    """Repair 1.5: in containers every process has number 1, and often starts in one millisecond with others."""
    program = (
        "import os; os.getpid = lambda: 1\n"
        "from librmq import ManualClock, ManualRunner, Broker, Producer\n"
        f"broker = Broker.temporary(runner=ManualRunner(ManualClock({NOW})))\n"
        "producer = Producer(broker, 'g')\n"
        "print(*[producer.send('T', b'x').message_id for _ in range(20)])\n"
    )
    made = [
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
        for _ in range(2)
    ]
    assert len({*made[0], *made[1]}) == 40
    assert made[0][0][-4:] != made[1][0][-4:] or made[0][0][12:20] != made[1][0][12:20]


@pytest.mark.parametrize("text", ["", "0" * 31, "0" * 33, "0" * 40, "g" * 32, " " * 32, "0 " * 16, "٣" * 32])
def test_no_unique_ids(text: str) -> None:
    with pytest.raises(MalformedError, match="unique id of 32 or 56 hex digits"):
        decode_unique_id(text, NOW)


def test_an_address_of_another_length_is_refused() -> None:
    with pytest.raises(MalformedError, match="4 or 16 bytes"):
        UniqueIds(lambda: NOW, b"abc", 0)


def test_a_keyword_that_a_message_does_not_take_is_named() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'tag'"):
        Message("T", b"x", tag="a")  # type: ignore[call-arg]
