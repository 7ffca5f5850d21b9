"""Records, properties, hosts and compressed bodies: how they are built, and every reason to refuse them."""

from __future__ import annotations

import dataclasses
import mmap
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from librmq.errors import (
    BodyChecksumError,
    BodyCompressionError,
    MalformedError,
    MessageIllegalError,
    MissingExtraError,
    RecordError,
)
from librmq.message import record as record_format
from librmq.message.ids import (
    Host,
    decode_host,
    encode_host,
    format_host,
    offset_message_id,
    parse_host,
    parse_offset_message_id,
)
from librmq.message.properties import (
    RESERVED_PROPERTIES,
    PropertyName,
    encode_all,
    encode_properties,
    find_property,
    split_keys,
    tags_code,
)
from librmq.message.record import check_record, compression_type, crc32, decode_record, encode_record
from librmq.message.topics import SystemTopic
from librmq.store.engine._append_fields import join_properties
from tests.message.samples import EQUAL_VALUES, record

V6 = ("fe80:0:0:0:0:0:0:1", 10911)


SHAPES = [
    pytest.param({}, id="plain"),
    pytest.param({"body": b""}, id="no body"),
    pytest.param({"properties_raw": b""}, id="no properties"),
    pytest.param({"topic": ""}, id="no topic"),
    pytest.param({"topic": "主题", "body": b"\0" * 70_000}, id="large"),
    pytest.param({"born_host": V6, "sys_flag": record_format.BORN_HOST_V6}, id="born v6"),
    pytest.param({"store_host": V6, "sys_flag": record_format.STORE_HOST_V6}, id="store v6"),
    pytest.param({"born_host": V6, "store_host": V6, "sys_flag": record_format.HOSTS_V6 | 8}, id="both v6"),
    pytest.param({"magic": record_format.MESSAGE_MAGIC_V2, "topic": "t" * 300}, id="second magic"),
    pytest.param({"magic": record_format.MESSAGE_MAGIC_V2, "born_host": V6, "sys_flag": 16}, id="second magic, v6"),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_truncated_record_is_refused_at_any_length(shape: dict[str, object]) -> None:
    raw = encode_record(record(**shape))
    for limit in range(min(len(raw), 500)):
        with pytest.raises(RecordError):
            check_record(raw, 0, limit, check_body=True)
        with pytest.raises(RecordError):
            decode_record(raw[:limit])


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, "mmap"])
def test_any_buffer_is_accepted(kind: object) -> None:
    raw = encode_record(record())
    buffer: record_format.Raw
    if kind == "mmap":
        buffer = mmap.mmap(-1, len(raw))
        buffer[:] = raw
    else:
        buffer = kind(raw)  # type: ignore[operator]
    assert check_record(buffer, 0, len(raw), check_body=True) == len(raw)
    assert decode_record(buffer) == record()


def patched(raw: bytes, at: int, value: bytes) -> bytes:
    return raw[:at] + value + raw[at + len(value) :]


@pytest.mark.parametrize(
    ("at", "value", "reason", "position"),
    [
        (0, b"\0\0\0\0", "size: expected 91 to 125, found 0", 0),
        (0, b"\x7f\xff\xff\xff", "size: expected 91 to 125, found 2147483647", 0),
        (0, b"\xff\xff\xff\xff", "size: expected 91 to 125, found -1", 0),
        (0, struct.pack(">i", 124), "properties length: expected 19, found 20", 103),
        (4, b"\xda\xa3\x20\xa8", "magic: expected daa320a7, found daa320a8", 4),
        (4, b"\xda\xa3\x20\xab", "topic length: expected 28 at most, found 2388", 93),
        (84, struct.pack(">i", 35), "body length: expected 34 at most, found 35", 84),
        (84, struct.pack(">i", 2**31 - 1), "body length: expected 34 at most, found 2147483647", 84),
        (84, struct.pack(">i", 0), "topic length: expected 34 at most, found 104", 88),
        (93, b"\x80", "topic length: expected 29 at most, found 128", 93),
        (93, b"\x1e", "topic length: expected 29 at most, found 30", 93),
        (93, b"\x0a", "properties length: expected 19, found 5204", 104),
        (103, b"\x00\x13", "properties length: expected 20, found 19", 103),
        (103, b"\xff\xff", "properties length: expected 20, found 65535", 103),
    ],
)
def test_every_length_is_checked_against_the_others(at: int, value: bytes, reason: str, position: int) -> None:
    raw = encode_record(record())
    assert len(raw) == 125
    for decode in (
        lambda broken: check_record(broken, 0, len(broken), check_body=False),
        lambda broken: decode_record(broken, check_body=False),
    ):
        with pytest.raises(RecordError) as caught:
            decode(patched(raw, at, value))
        assert (caught.value.reason, caught.value.position) == (reason, position)
        assert not isinstance(caught.value, BodyChecksumError)


@pytest.mark.parametrize("flag", [16, 32, 48])
def test_hosts_that_do_not_fit(flag: int) -> None:
    raw = encode_record(record(topic="", body=b"", properties_raw=b""))
    with pytest.raises(RecordError, match=r"sys flag: IPv6 hosts do not fit into 91 bytes \(at byte 36"):
        decode_record(patched(raw, record_format.SYS_FLAG_AT, struct.pack(">i", flag)))


def test_a_topic_has_127_bytes_at_most_with_the_first_magic() -> None:
    raw = encode_record(record(body=b"x" * 300))
    broken = patched(raw, 88 + 300, b"\x80")
    with pytest.raises(RecordError, match="topic length: expected 29 at most, found 128"):
        decode_record(broken)
    long = encode_record(record(topic="t" * 127, body=b"x" * 300))
    with pytest.raises(RecordError, match="topic length: expected 127 at most, found 128"):
        decode_record(patched(long, 88 + 300, b"\x80"))


def test_negative_lengths_count_as_0_as_in_rocketmq() -> None:
    raw = encode_record(record(body=b"", properties_raw=b""))
    for at, value in [(84, b"\x80\0\0\0"), (len(raw) - 2, b"\x80\0")]:
        odd = patched(raw, at, value)
        assert check_record(odd, 0, len(odd), check_body=True) == len(raw)
        assert (decode_record(odd).body, decode_record(odd).properties_raw) == (b"", b"")
        assert encode_record(decode_record(odd)) == raw  # encoding gives the regular record again


def test_only_the_body_has_a_checksum() -> None:
    raw = encode_record(record())
    for at in (
        record_format.BODY_AT,
        record_format.BODY_AT + 4,
        record_format.BODY_CRC_AT,
        record_format.BODY_CRC_AT + 3,
    ):
        broken = patched(raw, at, bytes((raw[at] ^ 0x80,)))
        assert check_record(broken, 0, len(broken), check_body=False) == len(raw)
        with pytest.raises(BodyChecksumError, match="body checksum: expected"):
            check_record(broken, 0, len(broken), check_body=True)
        with pytest.raises(BodyChecksumError):
            decode_record(broken)
        assert decode_record(broken, check_body=False).topic == "TopicTest"


def test_a_broken_frame_is_reported_before_a_broken_body() -> None:
    broken = patched(patched(encode_record(record()), 88, b"H"), 103, b"\x7f\xff")
    with pytest.raises(RecordError, match="properties length"):
        check_record(broken, 0, len(broken), check_body=True)


def test_the_checksum_of_an_empty_body_is_ignored() -> None:
    raw = encode_record(record(body=b"", body_crc=12345))
    assert check_record(raw, 0, len(raw), check_body=True) == len(raw)


def test_a_blank_has_size_0_wherever_8_bytes_are_left() -> None:
    for rest in (8, 90, 91, 4096):
        blank = struct.pack(">iI", rest, record_format.BLANK_MAGIC) + b"\xee" * (rest - 8)
        assert check_record(b"\0" + blank, 1, 1 + rest, check_body=True) == 0
    with pytest.raises(RecordError, match="found 7 bytes"):
        check_record(blank, 0, 7, check_body=True)
    with pytest.raises(RecordError, match="magic"):
        decode_record(blank)


def test_zeros_are_not_a_record() -> None:
    with pytest.raises(RecordError, match="magic: expected daa320a7, found 00000000"):
        check_record(bytes(200), 0, 200, check_body=True)


@pytest.mark.parametrize(
    ("level", "sound"), [(b"3", True), (b"-1", True), (b"+3", True), (b"x3", False), (b"3.0", False), (b" 3", False)]
)
def test_a_delayed_message_needs_a_level_that_is_a_number(level: bytes, sound: bool) -> None:
    for topic, needed in [(SystemTopic.SCHEDULE, True), (SystemTopic.SCHEDULE.lower(), False), ("T", False)]:
        raw = encode_record(record(topic=topic, properties_raw=b"A\x01b\x02DELAY\x01" + level))
        if sound or not needed:
            assert check_record(raw, 0, len(raw), check_body=True) == len(raw)
        else:
            with pytest.raises(RecordError, match="DELAY of a delayed message: expected a number"):
                check_record(raw, 0, len(raw), check_body=True)
    without = encode_record(record(topic=SystemTopic.SCHEDULE, properties_raw=b"A\x01b"))
    assert check_record(without, 0, len(without), check_body=True) == len(without)


@pytest.mark.parametrize(
    "changes",
    [
        {"topic": "t" * 128},
        {"topic": "中" * 43},
        {"topic": "\ud800"},
        {"topic": "t" * 32_768, "magic": record_format.MESSAGE_MAGIC_V2},
        {"properties_raw": bytes(32_768)},
        {"queue_id": 2**31},
        {"flag": -(2**31) - 1},
        {"queue_offset": 2**63},
        {"reconsume_times": 2**31},
        {"born_host": ("300.1.1.1", 1)},
        {"born_host": ("localhost", 1)},
        {"born_host": ("1.2.3.4", 2**31)},
        {"store_host": ("fe80:::1", 1), "sys_flag": 32},
        {"born_host": V6},
        {"sys_flag": record_format.STORE_HOST_V6},
        {"magic": record_format.BLANK_MAGIC},
    ],
)
def test_rows_that_do_not_fit_are_not_written(changes: dict[str, object]) -> None:
    with pytest.raises(MessageIllegalError):
        encode_record(record(**changes))


def test_the_largest_values_that_fit() -> None:
    largest = record(topic="t" * 127, properties_raw=bytes(32_767), queue_id=2**31 - 1, flag=-(2**31))
    assert decode_record(encode_record(largest)) == largest
    second = dataclasses.replace(largest, magic=record_format.MESSAGE_MAGIC_V2, topic="t" * 32_767)
    assert decode_record(encode_record(second)) == second


# --- properties


def test_properties_that_share_a_bucket_keep_their_order() -> None:
    assert encode_properties({"Aa": "1", "BB": "2"}) == b"Aa\x011\x02BB\x012"
    assert encode_properties({"BB": "2", "Aa": "1"}) == b"BB\x012\x02Aa\x011"


def test_few_properties() -> None:
    assert encode_properties({}) == b""
    assert encode_properties({"a": ""}) == b"a\x01"
    assert encode_properties({"%": "%d"}) == b"%\x01%d"


@pytest.mark.parametrize(
    ("properties", "what"),
    [
        ({"a": "1", "b": "x\2c\1d"}, "'b'"),
        ({"a": "x\2"}, "'a'"),
        ({"a\1b": "x"}, "separate properties"),
        ({"a\2b": "x"}, "separate properties"),
        ({"a": 1}, "'a': expected text, found 1"),
        ({"a": "1", "b": None}, "'b': expected text, found None"),
        ({1: "a"}, "1: expected text"),
    ],
)
def test_properties_that_would_read_back_otherwise_are_refused(properties: dict[str, str], what: str) -> None:
    with pytest.raises(MessageIllegalError, match=what):
        encode_properties(properties)
    with pytest.raises(MessageIllegalError, match=what):
        encode_all([dict.fromkeys(properties, "x"), properties])


def test_text_without_utf8_is_refused() -> None:
    for properties in ({"a": "\ud800"}, {"\udfff": "a"}):
        with pytest.raises(MessageIllegalError, match="UTF-8"):
            encode_properties(properties)
        with pytest.raises(MessageIllegalError, match="UTF-8"):
            encode_all([dict.fromkeys(properties, "x"), properties])


@pytest.mark.parametrize("many", [[{"BB": "2", "Aa": "1"}, {"Aa": "3", "BB": "é"}], [{"a": "1"}] * 3, [{}, {"a": "1"}]])
def test_properties_of_many_messages_are_encoded_like_those_of_each(many: list[dict[str, str]]) -> None:
    assert encode_all(many) == [encode_properties(properties) for properties in many]


@pytest.mark.parametrize(
    ("raw", "name", "value"),
    [
        (b"a\x011\x02b\x012", b"a", b"1"),
        (b"a\x011\x02b\x012", b"b", b"2"),
        (b"a\x011\x02b\x012", b"c", None),
        (b"a\x011\x02a\x012", b"a", b"2"),
        (b"a\x011\x02a\x01", b"a", b"1"),
        (b"a\x01\x02a\x01", b"a", None),
        (b"ba\x011\x02ab\x012", b"a", None),
        (b"a\x011\x012\x02", b"a", b"1\x012"),
        (b"x\x01a\x011", b"a", None),
        (b"\x01v", b"", None),
        (b"a\x01b\x01v", b"a\x01b", None),
        (b"k\x01v\x02a\x011", b"k\x01v\x02a", None),
        (b"", b"a", None),
        (b"a\x01", b"a", None),
    ],
)
def test_one_property_is_found(raw: bytes, name: bytes, value: bytes | None) -> None:
    assert find_property(raw, name) == value


@pytest.mark.parametrize(
    ("own", "batch", "joined"),
    [
        (b"", b"", b""),
        (b"a\x011", b"", b"a\x011"),
        (b"", b"b\x012", b"b\x012"),
        (b"a\x011", b"b\x012", b"a\x011\x02b\x012"),
        (b"a\x011\x02", b"b\x012", b"a\x011\x02b\x012"),
    ],
)
def test_properties_of_a_batch_follow_the_messages_own(own: bytes, batch: bytes, joined: bytes) -> None:
    assert join_properties(own, batch) == joined


def test_tags_and_keys() -> None:
    assert tags_code(None) == tags_code("") == 0
    assert tags_code("TagA") == 2598919
    assert split_keys(None) == split_keys("") == split_keys("  ") == []
    assert split_keys(" k1  k2 k1\tk3 ") == ["k1", "k2", "k1\tk3"]


def test_reserved_names_are_all_but_those_that_users_may_set() -> None:
    names = {value for name, value in vars(PropertyName).items() if name.isupper() and not name.startswith("TIMER_")}
    assert names - RESERVED_PROPERTIES == {
        "TRAN_PREPARED_QUEUE_OFFSET",
        "TRANSACTION_CHECK_TIMES",
        "CHECK_IMMUNITY_TIME_IN_SECONDS",
        "INNER_MULTI_DISPATCH",
        "INNER_NUM",
        "__SHARDINGKEY",
        "TRACE_CONTEXT",
        "DEAD_LETTER_CAUSE",  # librmq's own, like the next two
        "RESENT_LETTER",
        "PROCESS_DEATHS",
        "DLQ_ORIGIN_TOPIC",
        "DLQ_ORIGIN_MESSAGE_ID",
        "SCHEDULE_TARGET_MS",
        "SCHEDULE_TARGET_TOPIC",
        "SCHEDULE_TARGET_QID",
    }
    assert names >= RESERVED_PROPERTIES
    assert len(names) == 47


# --- hosts and ids


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("127.0.0.1:10911", ("127.0.0.1", 10911)),
        ("255.255.255.255:0", ("255.255.255.255", 0)),
        ("[fe80:0:0:0:0:0:0:1]:65535", ("fe80:0:0:0:0:0:0:1", 65535)),
        ("[::1]:1", ("0:0:0:0:0:0:0:1", 1)),
        ("[::ffff:1.2.3.4]:1", ("0:0:0:0:0:ffff:102:304", 1)),
    ],
)
def test_hosts(text: str, host: Host) -> None:
    assert parse_host(text) == host
    assert parse_host(format_host(host)) == host
    assert decode_host(encode_host(host)) == host


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":1",
        "1.2.3.4",
        "1.2.3.4:",
        "1.2.3.4:65536",
        "1.2.3.4:-1",
        "1.2.3.4:+1",
        "1.2.3.4:\uff11",
        "1.2.3.4: 1",
        "1.2.3.4:1x",
        "1.2.3:1",
        "1.2.3.256:1",
        "[1.2.3.4]:1",
        "fe80::1:1",
        "[fe80::1]",
        "[fe80::1:1",
        "fe80::1]:1",
        "[fe80::1%eth0]:1",
        "[:::]:1",
        "localhost:1",
        "1.2.3.4\0:1",
        "中:1",
        "1.2.3.4:" + "9" * 5000,
    ],
)
def test_no_hosts(text: str) -> None:
    with pytest.raises(MalformedError, match="expected an address"):
        parse_host(text)


@pytest.mark.parametrize(
    "text", ["", "7F", "x" * 32, "7F00000100002A9F000000000000000", " " * 32, "7f 0" * 8, "٣" * 32, "0" * 40]
)
def test_no_message_ids(text: str) -> None:
    with pytest.raises(MalformedError, match="message id of 32 or 56 hex digits"):
        parse_offset_message_id(text)


def test_message_ids_in_either_case() -> None:
    text = offset_message_id(V6, 2**40)
    assert text == "FE80000000000000000000000000000100002A9F0000010000000000"
    assert parse_offset_message_id(text.lower()) == (V6, 2**40)


# --- compression

ZLIB = record_format.COMPRESSED | record_format.COMPRESSION_ZLIB
LZ4 = record_format.COMPRESSED | record_format.COMPRESSION_LZ4
ZSTD = record_format.COMPRESSED | record_format.COMPRESSION_ZSTD
SENT = b"".join(b"order %d shipped; " % number for number in range(40))

# As written by the classes that RocketMQ uses: LZ4FrameOutputStream, and ZstdOutputStream at level 5.
WRITTEN = {
    LZ4: bytes.fromhex(
        "04224d18607073bb000000f2026f72646572203020736869707065643b2011001c3111001c3211001c3311001c3411001c351100"
        "1c3611001c3711001c3811001c3911001e31ab000dac002d313236000dae001d31af001d31b0001d31b1001d31b2001d31b3001d"
        "31b4001d32b4001d32b4001d32b4002c3233c6001d32b4001d32b4001d32b4001d32b4001d32b4001d32b4001d33b4001d33b400"
        "1d33b4001d33b4002c3334c6001d33b4001d33b4001d33b4001d33b400c0333920736869707065643b2000000000"
    ),
    ZSTD: bytes.fromhex(
        "28b52ffd005804040022440d14a0a5e9041c9c79aa1aeae45b6bad4cbcd8ff340145acdc1d936ab46ddbb6ffff4f9224"
        "c901288841e82c62e5ee985441a1622810272080a3d203b3cc7766b3986f666799cfcc6631dfcccc32dfccce329f993d"
        "cb8df96ccdacd62cb4e69b353359b3c49a0fd6ccaf6673792c22c845182290431844906388a5218201010000"
    ),
    ZLIB: record_format.compress_body(SENT),
    record_format.COMPRESSED: record_format.compress_body(SENT),
}
KINDS = [
    pytest.param(flag, id=f"{flag:#x}-{compression_type(flag)}") for flag in (record_format.COMPRESSED, ZLIB, LZ4, ZSTD)
]


@pytest.fixture
def written(request: pytest.FixtureRequest) -> tuple[int, bytes]:
    """Return a sys flag, and the same body compressed as that flag says."""
    flag: int = request.param
    module = {"lz4": "lz4.frame", "zstd": "zstandard"}.get(compression_type(flag))
    if module:
        pytest.importorskip(module)
    return flag, WRITTEN[flag]


@pytest.mark.parametrize("written", KINDS, indirect=True)
def test_compressed_bodies(written: tuple[int, bytes]) -> None:
    flag, body = written
    assert record_format.decompress_body(body, flag, len(SENT)) == SENT
    assert record_format.decompress_body(body, flag | 12 | 48, 1 << 30) == SENT
    assert record_format.decompress_body(body, flag & ~record_format.COMPRESSED, 0) == body
    assert record_format.decompress_body(b"", flag, 0) == b""
    with pytest.raises(BodyCompressionError, match="expected at most 709 bytes decompressed"):
        record_format.decompress_body(body, flag, len(SENT) - 1)


@pytest.mark.parametrize("written", KINDS, indirect=True)
def test_damaged_compressed_bodies(written: tuple[int, bytes]) -> None:
    flag, body = written
    for end in range(1, len(body)):
        with pytest.raises(BodyCompressionError):
            record_format.decompress_body(body[:end], flag, 1 << 20)
    with pytest.raises(BodyCompressionError, match="3 bytes after its end"):
        record_format.decompress_body(body + b"end", flag, 1 << 20)
    with pytest.raises(BodyCompressionError):
        record_format.decompress_body(b"\xff" + body, flag, 1 << 20)
    with pytest.raises(BodyCompressionError):
        record_format.decompress_body(body + body, flag, 1 << 20)


def bomb(kind: str) -> bytes:
    """Return 64 MiB of zeros, compressed."""
    if kind == "lz4":
        return bytes(pytest.importorskip("lz4.frame").compress(bytes(1 << 26)))
    if kind == "zstd":
        stream = pytest.importorskip("zstandard").ZstdCompressor().compressobj()
        return b"".join(stream.compress(bytes(1 << 20)) for _ in range(64)) + bytes(stream.flush())
    deflate = zlib.compressobj(9)
    return b"".join(deflate.compress(bytes(1 << 20)) for _ in range(64)) + deflate.flush()


@pytest.mark.slow
@pytest.mark.parametrize("flag", [ZLIB, LZ4, ZSTD])
def test_a_zip_bomb_is_an_error_and_takes_little_memory(flag: int) -> None:
    import tracemalloc

    body = bomb(compression_type(flag))
    tracemalloc.start()
    try:
        with pytest.raises(BodyCompressionError, match="expected at most 1,000,000 bytes"):
            record_format.decompress_body(body, flag, 1_000_000)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < (16 << 20) + 3 * len(body)


@pytest.mark.parametrize("kind", [4, 5, 6, 7])
def test_an_unknown_compression_is_refused(kind: int) -> None:
    with pytest.raises(BodyCompressionError, match="unknown compression type"):
        record_format.decompress_body(b"x", record_format.COMPRESSED | kind << 8, 100)


@pytest.mark.parametrize(("flag", "module"), [(LZ4, "lz4.frame"), (ZSTD, "zstandard")])
def test_a_missing_extra_is_named(flag: int, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=r"librmq\[compression\]") as caught:
        record_format.decompress_body(WRITTEN[flag], flag, 1 << 20)
    assert caught.value.extra == "compression"


# The checksum of a body is the same with and without ISA-L.


STORE = """
import sys
if sys.argv[2] == "without":
    sys.modules["isal"] = None
from librmq import ManualClock, Message, MessageStore
from librmq.message.record import crc32
with MessageStore.open(sys.argv[1], clock=ManualClock(1000)) as store:
    for size in range(0, 2000, 10):
        store.append(Message("t", bytes([size % 256]) * size, unique_key=str(size)))
    store.append_batch([Message("t", b"x" * size) for size in range(50)])
print(crc32.__module__)
"""


@given(st.binary(max_size=300), st.integers(0, 20))
def test_checksums_are_those_of_zlib(data: bytes, begin: int) -> None:
    assert crc32(data) == zlib.crc32(data)
    assert crc32(memoryview(data)[begin:]) == zlib.crc32(data[begin:])


@pytest.mark.slow
def test_logs_are_equal_with_and_without_isal(tmp_path: Path) -> None:
    pytest.importorskip("isal")
    logs = []
    for kind in ("with", "without"):
        ran = subprocess.run(
            [sys.executable, "-c", STORE, tmp_path / kind, kind], capture_output=True, text=True, check=True
        )
        assert (ran.stdout.strip() == "zlib") == (kind == "without")
        logs.append(min((tmp_path / kind / "commitlog").iterdir()).read_bytes())
    assert logs[0] == logs[1]


def test_an_error_does_not_name_one_value_twice() -> None:
    """A length of properties above 32,767 is negative for RocketMQ, though it is what the record has room for."""
    raw = encode_record(record(properties_raw=b"", body=b"x"))
    size = 40_004
    raw = struct.pack(">i", len(raw) + size) + raw[4:-2] + struct.pack(">H", size) + bytes(size)
    with pytest.raises(RecordError, match="properties length: expected at most 32767, found 40004"):
        decode_record(raw)
    for text, is_bad in (
        ("properties length: expected 40004, found 40004", True),
        ("expected the end at queue offset 3, as closed, found 3: run", True),
        ("expected a time at most 259200 s away, found 259200 s, where", True),
        ("size: expected 91 to 178, found 17", False),
        ("expected 3 messages in the body, found 30", False),
    ):
        assert bool(EQUAL_VALUES.search(text)) is is_bad


@pytest.mark.parametrize("changes", [{}, {"properties_raw": b"", "magic": record_format.MESSAGE_MAGIC_V2}])
def test_the_error_of_a_flipped_bit_does_not_name_one_value_twice(changes: dict[str, object]) -> None:
    raw = bytearray(encode_record(record(**changes)))
    errors = set()
    for bit in range(8 * len(raw)):
        raw[bit // 8] ^= 1 << bit % 8
        try:
            check_record(raw, 0, len(raw), check_body=True)
        except (RecordError, BodyChecksumError) as error:
            errors.add(str(error))
        raw[bit // 8] ^= 1 << bit % 8
    assert len(errors) > 100
    assert not list(filter(EQUAL_VALUES.search, errors))
