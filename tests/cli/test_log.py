"""``dump`` on logs built by the tests, both valid and damaged."""

from __future__ import annotations

import base64
import io
import json
import shutil
import struct
import zlib
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from librmq.cli import main
from librmq.java.lang import java_decode
from librmq.message.properties import decode_properties, tags_code
from librmq.message.record import (
    BLANK_MAGIC,
    BODY_AT,
    BORN_HOST_V6,
    COMPRESSED,
    COMPRESSION_LZ4,
    COMPRESSION_ZLIB,
    COMPRESSION_ZSTD,
    MESSAGE_MAGIC_V2,
    QUEUE_OFFSET_AT,
    STORE_HOST_V6,
    Record,
    body_checksum,
    encode_record,
)
from tests.budget import examples, many

FILE_SIZE = 1024
Row = dict[str, Any]


class Log:
    """A store that has nothing but a log."""

    def __init__(self, folder: Path, file_size: int = FILE_SIZE, begin: int = 0) -> None:
        self.store = folder
        self.file_size = file_size
        self.begin = begin
        self.data = bytearray()
        self.places: list[int] = []

    def add(self, body: bytes = b"body", **fields: Any) -> bytes:
        """Append a record; if it does not fit into the file, append a blank before it."""
        at = self.begin + len(self.data)
        record = Record(topic=fields.pop("topic", "T"), body=body, physical_offset=at, **fields)
        left = self.file_size - at % self.file_size
        if record.size + 8 > left:
            self.data += struct.pack(">II", left, BLANK_MAGIC) + b"\xee" * (left - 8)
            return self.add(body, topic=record.topic, **fields)
        record.body_crc = body_checksum(body)
        raw = encode_record(record)
        self.places.append(at)
        self.data += raw
        return raw

    def write(self) -> None:
        folder = self.store / "commitlog"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for start in range(0, max(1, len(self.data)), self.file_size):
            part = bytes(self.data[start : start + self.file_size])
            (folder / f"{self.begin + start:020d}").write_bytes(part.ljust(self.file_size, b"\0"))

    def dump(self, *words: str) -> tuple[int, list[Row], str]:
        """Write the log and dump it; return the exit status, the rows and the messages."""
        self.write()
        return dump(self.store, *words)


def dump(store: Path, *words: str) -> tuple[int, list[Row], str]:
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        status = main(["dump", str(store), *words])
    return status, [json.loads(line) for line in out.getvalue().splitlines()], err.getvalue()


@pytest.fixture
def log(tmp_path: Path) -> Log:
    """Return a log of ten records in three files."""
    made = Log(tmp_path)
    for number in range(10):
        made.add(b"body %d " % number * 20, queue_offset=number)
    return made


def places(rows: Sequence[Row], kind: str = "message") -> list[int]:
    return [row["phys"] for row in rows if row["type"] == kind]


def test_a_sound_log(log: Log) -> None:
    status, rows, err = log.dump()
    assert (status, err) == (0, "")
    assert places(rows) == log.places
    blanks = [row for row in rows if row["type"] == "blank"]
    assert [row["phys"] + row["size"] for row in blanks] == [FILE_SIZE, 2 * FILE_SIZE]
    assert log.dump("--all") == (0, rows, "")


def test_a_log_whose_old_files_are_gone(tmp_path: Path) -> None:
    log = Log(tmp_path, begin=5 * FILE_SIZE)
    log.add()
    assert places(log.dump()[1]) == [5 * FILE_SIZE]


def test_an_empty_log(tmp_path: Path) -> None:
    (tmp_path / "commitlog").mkdir()
    assert dump(tmp_path) == (0, [], "")
    (tmp_path / "commitlog" / f"{0:020d}").write_bytes(bytes(FILE_SIZE))
    assert dump(tmp_path) == (0, [], "")
    assert dump(tmp_path, "--all") == (0, [], "")


def test_files_created_ahead_are_not_damage(log: Log) -> None:
    expected = log.dump()
    for start in (3 * FILE_SIZE, 4 * FILE_SIZE):
        (log.store / "commitlog" / f"{start:020d}").write_bytes(bytes(FILE_SIZE))
    assert dump(log.store) == expected
    assert dump(log.store, "--all") == expected


def test_the_blank_at_the_end_is_not_part_of_the_log(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.add(b"x" * 500)
    left = FILE_SIZE - len(log.data)
    log.data += struct.pack(">II", left, BLANK_MAGIC)
    status, rows, _ = log.dump()
    assert (status, places(rows), places(rows, "blank")) == (0, [0], [])


# --- damage


def test_a_wrong_body(log: Log) -> None:
    log.data[log.places[4] + BODY_AT] ^= 1
    status, rows, err = log.dump()
    assert (status, places(rows)) == (1, log.places[:4])
    assert f" at {log.places[4]}: " in err
    status, rows, err = log.dump("--all")
    assert (status, places(rows)) == (1, log.places)
    assert [row["phys"] for row in rows if row.get("crc_ok") is False] == [log.places[4]]
    assert f" at {log.places[4]}: " in err


@pytest.mark.parametrize("is_zero", [False, True])
def test_a_record_that_is_none(log: Log, is_zero: bool) -> None:
    begin, end = log.places[4:6]
    wrong = bytes(end - begin) if is_zero else b"\x7f\xff\xff\xff"
    log.data[begin : begin + len(wrong)] = wrong
    status, rows, err = log.dump()
    assert (status, places(rows)) == (1, log.places[:4])
    assert f" at {begin}: " in err
    status, rows, err = log.dump("--all")
    assert (status, places(rows)) == (1, log.places[:4] + log.places[5:])
    assert err.count("\n") == 1


def test_a_file_of_zeros_between_others_is_damage(log: Log) -> None:
    log.data[FILE_SIZE : 2 * FILE_SIZE] = bytes(FILE_SIZE)
    status, rows, err = log.dump()
    assert (status, places(rows)) == (1, [place for place in log.places if place < FILE_SIZE])
    assert f" at {FILE_SIZE}: " in err
    rows = log.dump("--all")[1]
    assert places(rows) == [place for place in log.places if not FILE_SIZE <= place < 2 * FILE_SIZE]


def test_a_wrong_blank(log: Log) -> None:
    end_of_file = max(place for place in log.places if place < FILE_SIZE)
    blank = end_of_file + struct.unpack_from(">I", log.data, end_of_file)[0]
    log.data[blank + 4] ^= 1
    status, rows, err = log.dump()
    assert (status, places(rows)) == (1, [place for place in log.places if place < FILE_SIZE])
    assert f" at {blank}: " in err
    assert places(log.dump("--all")[1]) == log.places


def test_bytes_after_the_end(log: Log) -> None:
    end = len(log.data)
    log.data += bytes(30) + b"rubbish"
    for words in ([], ["--all"]):
        status, rows, err = log.dump(*words)
        assert (status, places(rows)) == (1, log.places)
        assert f" at {end}: " in err


@pytest.mark.parametrize("words", [[], ["--all"]])
def test_a_batch_being_written_ends_the_log(log: Log, words: list[str]) -> None:
    """The mark replaces size and magic of its first record; sound records behind its bytes are no end."""
    at = log.places[-2]
    log.data[at : at + 8] = (len(log.data) - at).to_bytes(4, "big") + b"undo"
    status, rows, err = log.dump(*words)
    assert (status, places(rows), err) == (0, log.places[:-2], "")
    log.data[at : at + 4] = (log.places[-1] - at).to_bytes(4, "big")
    status, _, err = log.dump(*words)
    assert status == 1
    assert f" at {at}: " in err


def test_a_record_inside_a_body_is_not_a_record(tmp_path: Path) -> None:
    inner = Log(tmp_path).add(b"inner")
    log = Log(tmp_path)
    log.add(b"first")
    log.add(b"...." + inner + inner)
    log.add(b"last")
    log.data[log.places[1] : log.places[1] + 4] = bytes(4)
    status, rows, _ = log.dump("--all")
    assert (status, places(rows)) == (1, [log.places[0], log.places[2]])


@pytest.mark.parametrize("size", [0, 1, 700, FILE_SIZE - 1, FILE_SIZE + 1])
def test_a_file_of_another_length(log: Log, size: int) -> None:
    log.write()
    last = log.store / "commitlog" / f"{2 * FILE_SIZE:020d}"
    last.write_bytes(last.read_bytes().ljust(size, b"\0")[:size])
    whole = [at for at, end in pairwise([*log.places, len(log.data)]) if end <= 2 * FILE_SIZE + size]
    status, rows, err = dump(log.store)
    assert (status, places(rows)) == (1, whole)
    assert str(last) in err
    assert f"found {size}" in err


@pytest.mark.parametrize("name", ["x", "00000000000000000001", "0000000000000000409", f"{4 * FILE_SIZE:020d}"])
def test_a_name_that_is_none(log: Log, name: str) -> None:
    log.write()
    (log.store / "commitlog" / name).write_bytes(bytes(FILE_SIZE))
    status, rows, err = dump(log.store)
    assert (status, places(rows)) == (1, log.places)
    assert name in err


def test_queues_in_rocksdb_do_not_matter(log: Log) -> None:
    (log.store / "consumequeue").mkdir()
    for name in ("CURRENT", "MANIFEST-000005"):
        (log.store / "consumequeue" / name).write_bytes(b"x")
    assert places(log.dump()[1]) == log.places


@settings(max_examples=examples(150), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 3 * FILE_SIZE), written=st.binary(min_size=1, max_size=60), is_cut=st.booleans())
@example(at=251, written=b"\0\x80", is_cut=False)  # a negative queue offset in the second record
def test_any_change_is_reported_or_leaves_the_rest(log: Log, at: int, written: bytes, is_cut: bool) -> None:
    """After any change, ``dump`` exits with 0 or 1, prints all rows before it, and reports it in at most one line."""
    at %= len(log.data)
    changed = Log(log.store)
    changed.data, changed.places = bytearray(log.data), log.places
    changed.data[at : at + len(written)] = written
    if is_cut:
        del changed.data[-(-(at + 1) // FILE_SIZE) * FILE_SIZE :]
    status, rows, err = changed.dump()
    assert status in (0, 1)
    assert err.count("\n") == status
    before = [place for place in log.places if place + 240 <= at]
    assert places(rows)[: len(before)] == before
    status, all_rows, _ = changed.dump("--all")
    assert status in (0, 1)
    assert all_rows[: len(rows)] == rows


@many
@pytest.mark.parametrize("first", [0, 5])
@pytest.mark.parametrize("number", [0, 1, 9])
@pytest.mark.parametrize("wrong", [-1, -(1 << 63), 1 - (1 << 63), 1 << 58, 1 << 62, (1 << 63) - 1])
def test_an_impossible_queue_offset_is_printed(tmp_path: Path, first: int, number: int, wrong: int) -> None:
    log = Log(tmp_path)
    for queue_offset in range(first, first + 10):
        log.add(queue_offset=queue_offset)
    struct.pack_into(">q", log.data, log.places[number] + QUEUE_OFFSET_AT, wrong)
    expected = [wrong if at == number else first + at for at in range(10)]
    for words in ([], ["--all"]):
        status, rows, err = log.dump(*words)
        assert (status, err) == (0, "")
        assert [row["queue_offset"] for row in rows if row["type"] == "message"] == expected


# --- the contents of records


def only(log: Log) -> Row:
    status, rows, _ = log.dump()
    assert status == 0
    (row,) = rows
    return row


def test_hosts_of_16_bytes_as_java_prints_them(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.add(sys_flag=BORN_HOST_V6 | STORE_HOST_V6, born_host=("fe80::1", 10911), store_host=("::", 1))
    row = only(log)
    assert row["born_host"] == "[fe80:0:0:0:0:0:0:1]:10911"
    assert row["store_host"] == "[0:0:0:0:0:0:0:0]:1"
    assert len(row["msg_id"]) == 56


def test_the_second_magic(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.add(magic=MESSAGE_MAGIC_V2, topic="t" * 200)
    row = only(log)
    assert (row["magic"], row["topic"]) == ("daa320ab", "t" * 200)


@pytest.mark.parametrize("sys_flag", [COMPRESSED, COMPRESSED | COMPRESSION_ZLIB])
def test_a_compressed_body(tmp_path: Path, sys_flag: int) -> None:
    log = Log(tmp_path)
    stored = zlib.compress(b"text " * 100, 5)
    log.add(stored, sys_flag=sys_flag)
    row = only(log)
    assert base64.b64decode(row["body_b64"]) == b"text " * 100
    assert base64.b64decode(row["stored_body_b64"]) == stored


@pytest.mark.parametrize("kind", [0, COMPRESSION_LZ4, COMPRESSION_ZSTD, COMPRESSION_ZLIB])
def test_a_compressed_body_that_is_none(tmp_path: Path, kind: int) -> None:
    log = Log(tmp_path)
    log.add(b"not compressed", sys_flag=COMPRESSED | kind)
    row = only(log)
    assert row["body_b64"] is None
    assert base64.b64decode(row["stored_body_b64"]) == b"not compressed"
    assert row["crc_ok"] is True


@pytest.mark.parametrize(
    ("properties", "keys", "unique_key"),
    [
        (b"", "", None),
        (b"TAGS\1a", None, None),
        (b"KEYS\1a b\2UNIQ_KEY\1u", "a b", "u"),
        (b"KEYS\1\2UNIQ_KEY\1", None, None),
        (b"\xff\xfe", None, None),
    ],
)
def test_keys_as_they_are_handed_to_the_index(
    tmp_path: Path, properties: bytes, keys: str | None, unique_key: str | None
) -> None:
    log = Log(tmp_path)
    log.add(properties_raw=properties)
    row = only(log)
    assert (row["dispatch_keys"], row["dispatch_uniq_key"]) == (keys, unique_key)


def test_properties_of_any_kind_are_printed_as_they_are_read(tmp_path: Path) -> None:
    kinds = [
        b"", b"b\0012\2a\0011\2TAGS\1t", b"TAGS\1x\2TAGS\1y", b"a\1b\2", b"a\2TAGS\1", b"\1x\2a\1y", b"KEYS\1b\1c",
        b'"q\\u0001\1"\\', b"{n}{0}%s\1{1}%d\2KEYS\1{2}", "订\1单\2TAGS\1é".encode(), b"\x7f\1\xc2\x9b\2\xff\1\xfe",
        b"\2".join(b"k%d\1v" % number for number in range(70)), b"%\1%d\2TAGS\1(x)+", b"TAGS\1(x)+\2%\1%d",
    ]  # fmt: skip
    kinds += [*kinds, *(b"k%d\1v" % number for number in range(300)), *kinds]  # more layouts than are kept
    log = Log(tmp_path, file_size=1 << 16)
    for raw in kinds:
        log.add(properties_raw=raw)
    _, rows, _ = log.dump()
    for raw, row in zip(kinds, rows, strict=True):
        properties = decode_properties(raw)
        assert list(row["properties"].items()) == sorted(properties.items())
        assert row["properties_raw"] == java_decode(raw)
        assert row["dispatch_tags_code"] == tags_code(properties.get("TAGS"))
        assert (row["dispatch_keys"] or None, row["dispatch_uniq_key"]) == (properties.get("KEYS"), None)


@pytest.mark.parametrize(("level", "delay_ms"), [("1", 1_000), ("5", 60_000), ("18", 7_200_000), ("19", 7_200_000)])
def test_a_delayed_record_has_its_time_for_a_tags_code(tmp_path: Path, level: str, delay_ms: int) -> None:
    log = Log(tmp_path)
    log.add(topic="SCHEDULE_TOPIC_XXXX", properties_raw=b"DELAY\1%s" % level.encode(), store_timestamp_ms=5_000)
    row = only(log)
    assert row["dispatch_tags_code"] == 5_000 + delay_ms
    assert row["dispatch_tags_code_hex"] == f"{5_000 + delay_ms:016x}"


def test_delay_levels_come_from_the_settings(tmp_path: Path) -> None:
    log = Log(tmp_path / "store")
    log.add(topic="SCHEDULE_TOPIC_XXXX", properties_raw=b"DELAY\0012", store_timestamp_ms=5_000)
    log.write()
    file = tmp_path / "config.json"
    file.write_text('{"message_delay_level": "1s 7s"}')
    _, rows, _ = dump(log.store, "--config", str(file))
    assert rows[0]["dispatch_tags_code"] == 12_000
    file.write_text('{"message_delay_level": "soon"}')
    status, _, err = dump(log.store, "--config", str(file))
    assert status == 2
    assert "soon" in err
