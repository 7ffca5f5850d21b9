"""``load`` on a store of a few messages: fields, refusals, transactions, times, and bad lines."""

from __future__ import annotations

import base64
import contextlib
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from librmq.config import StoreConfig
from librmq.errors import ConfigError, CorruptionError, InputError, StoreClosedError, StoreLockedError
from librmq.filter import BROKER_BLOOM
from librmq.message import record
from librmq.message.batch import decode_batch
from librmq.message.delays import SCHEDULE_TOPIC
from librmq.message.message import Message, StoredMessage
from librmq.message.topics import HALF_TOPIC, OP_TOPIC
from librmq.store import MessageStore
from tests.budget import examples, many
from tests.cases.load import run

Row = dict[str, Any]

CONFIG = StoreConfig.tiny()
AT = 1_700_000_100_000
PUT = {"op": "put", "topic": "T", "queueId": 0, "body": "b"}
HALF = {"op": "half", "id": "h", "topic": "T", "queueId": 3, "body": "b", "producerGroup": "P"}
END = {"commit": {"op": "commit", "id": "h"}, "rollback": {"op": "rollback", "id": "h"}}


class Load:
    """Runs operations on one store, and keeps the answers and warnings."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.warnings: list[str] = []

    def __call__(self, *operations: Row | str | bytes, config: StoreConfig | None = CONFIG) -> list[Row]:
        answers: list[Row] = []
        lines = [line if isinstance(line, str | bytes) else json.dumps(line) for line in operations]
        self.answers = answers
        run(self.path, config, lines, answers.append, warn=self.warnings.append)
        return answers

    def messages(self) -> list[StoredMessage]:
        with MessageStore.open(self.path, read_only=True) as store:
            return list(store)

    def put(self, **changes: object) -> StoredMessage:
        """Run one more put, and return the message that it stores."""
        (answer,) = self({**PUT, **changes})
        assert answer["status"] == "PUT_OK"
        return self.messages()[-1]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    return Load(tmp_path / "store")


# --- messages


def test_defaults_of_a_message(load: Load) -> None:
    message = load.put()
    assert (message.topic, message.queue_id, message.body) == ("T", 0, b"b")
    assert message.born_timestamp_ms == 1_700_000_000_000
    assert (message.born_host, message.store_host) == (("192.168.1.10", 54321), ("127.0.0.1", 10911))
    assert (message.flag, message.sys_flag, message.reconsume_times) == (0, 0, 0)
    assert (message.prepared_transaction_offset, message.properties_raw) == (0, b"")


def test_every_field_of_a_message(load: Load) -> None:
    message = load.put(
        tags="t", keys=" a  b ", uniqKey="u", props={"p": "v"}, bornTimestamp=5, bornHost="[2001:db8::1]:7",
        storeHost="10.0.0.9:1", flag=-1, reconsumeTimes=3, preparedTransactionOffset=-9, sysFlag=8,
    )  # fmt: skip
    assert message.properties == {"p": "v", "TAGS": "t", "KEYS": " a  b ", "UNIQ_KEY": "u"}
    assert (message.born_timestamp_ms, message.born_host) == (5, ("2001:db8:0:0:0:0:0:1", 7))
    assert (message.store_host, message.flag, message.reconsume_times) == (("10.0.0.9", 1), -1, 3)
    assert message.prepared_transaction_offset == -9
    assert message.sys_flag == record.TRANSACTION_COMMIT | record.BORN_HOST_V6


@pytest.mark.parametrize(
    ("fields", "body"),
    [
        ({"body": "é\n"}, "é\n".encode()),
        ({"body": ""}, b""),
        ({"body": None}, b""),
        ({"body": None, "body_b64": "AP8="}, b"\0\xff"),
    ],
)
def test_bodies(load: Load, fields: Row, body: bytes) -> None:
    assert load.put(**fields).stored_body == body


def test_empty_tags_are_stored(load: Load) -> None:
    assert load.put(tags="").properties_raw == b"TAGS\x01"


def test_raw_properties_are_stored_as_they_are(load: Load) -> None:
    assert load.put(propertiesString="a\x011\x02\x02x").properties_raw == b"a\x011\x02\x02x"


def test_compression_is_on_demand(load: Load) -> None:
    body = "x" * 5000
    assert load.put(body=body, compressionTypeBits=True).sys_flag == 0
    assert load.put(body=body, compress=True).sys_flag == record.COMPRESSED
    message = load.put(body=body, compress=True, compressionTypeBits=True)
    assert message.sys_flag == 0x301
    assert message.stored_body == zlib.compress(body.encode(), 5)
    assert load.put(body=None, compress=True).sys_flag == 0


@pytest.mark.parametrize(("level", "stored"), [(1, "1"), (18, "18"), (19, "18"), (2**31 - 1, "18")])
def test_a_delayed_message_waits_in_the_schedule_topic(load: Load, level: int, stored: str) -> None:
    message = load.put(queueId=5, delayLevel=level)
    assert (message.topic, message.queue_id) == (SCHEDULE_TOPIC, int(stored) - 1)
    assert message.properties == {"DELAY": stored, "REAL_TOPIC": "T", "REAL_QID": "5"}


@pytest.mark.parametrize("level", [0, -3])
def test_no_delay(load: Load, level: int) -> None:
    message = load.put(delayLevel=level)
    assert (message.topic, message.properties) == ("T", {"DELAY": str(level)})


def test_the_row_of_a_message(load: Load) -> None:
    first, second = load({**PUT, "at_ms": AT}, {**PUT, "storeHost": "[fe80::1]:10911"})
    assert list(first) == [
        "op", "status", "append_status", "phys", "wrote_bytes", "msg_id", "store_timestamp", "queue_offset", "msg_num",
    ]  # fmt: skip
    message, other = load.messages()
    assert (first["phys"], first["wrote_bytes"], first["queue_offset"]) == (0, message.size, 0)
    assert (first["msg_id"], first["store_timestamp"], first["msg_num"]) == (message.offset_id, AT, 1)
    assert (second["phys"], second["queue_offset"], second["msg_id"]) == (message.size, 1, other.offset_id)
    assert len(second["msg_id"]) == 56


def test_a_batch(load: Load) -> None:
    (answer,) = load(
        {
            "op": "batch", "topic": "T", "queueId": 1, "props": {"all": "x"}, "bornTimestamp": 9,
            "messages": [{"body": "1", "tags": "a", "flag": 4}, {"body": None, "props": {"k": "v"}}],
        }
    )  # fmt: skip
    one, two = load.messages()
    assert (one.properties_raw, two.properties_raw) == (b"TAGS\x01a\x02all\x01x", b"k\x01v\x02all\x01x")
    assert (one.flag, one.born_timestamp_ms, two.queue_offset) == (4, 9, 1)
    assert list(answer)[:3] == ["op", "batch_body_b64", "status"]
    items = decode_batch(base64.b64decode(answer["batch_body_b64"]))
    assert items == [(b"1", 4, b"TAGS\x01a"), (b"", 0, b"k\x01v")]
    assert answer["msg_id"] == f"{one.offset_id},{two.offset_id}"
    assert (answer["phys"], answer["wrote_bytes"], answer["msg_num"]) == (0, one.size + two.size, 2)


# --- refusals

BATCH = {"op": "batch", "topic": "T", "queueId": 0, "messages": [{"body": "b"}]}
REFUSED = {
    "empty topic": {**PUT, "topic": ""},
    "long topic": {**PUT, "topic": "题" * 43},
    "topic ..": {**PUT, "topic": ".."},
    "topic with a slash": {**PUT, "topic": "a/b"},
    "topic with NUL": {**PUT, "topic": "a\0"},
    "long body": {**PUT, "body": "b" * (CONFIG.max_message_size + 1)},
    "long properties": {**PUT, "props": {"p": "v" * 32768}},
    "long raw properties": {**PUT, "propertiesString": "v" * 32768},
    "separators": {**PUT, "props": {"p": "v\x02TAGS\x01x"}},
    "flag of a host": {**PUT, "sysFlag": record.BORN_HOST_V6},
    "empty batch": {**BATCH, "messages": []},
    "large batch": {**BATCH, "messages": [{"body": "b" * (CONFIG.max_message_size // 2)}] * 2},
    "delayed batch": {**BATCH, "delayLevel": 1},
    "batch delayed by a property": {**BATCH, "props": {"DELAY": "1"}},
    "batch of a delayed message": {**BATCH, "messages": [{"body": "b", "delayLevel": 1}]},
    "batch of a transaction": {**BATCH, "sysFlag": 4},
    "batch of a bad topic": {**BATCH, "topic": "."},
    "half of a bad topic": {**HALF, "topic": "a/b"},
    "long half": {**HALF, "props": {"p": "v" * 32760}},
}


@pytest.mark.parametrize("operation", REFUSED.values(), ids=REFUSED.keys())
def test_a_refusal_changes_nothing_and_the_run_continues(load: Load, operation: Row) -> None:
    answers = load(PUT, operation, PUT)
    expected = {name: operation[name] for name in ("op", "id") if name in operation}
    assert answers[1] == expected | {"status": "MESSAGE_ILLEGAL"}
    assert (answers[2]["phys"], answers[2]["queue_offset"]) == (answers[0]["wrote_bytes"], 1)
    assert len(load.messages()) == 2
    (warning,) = load.warnings
    assert warning.startswith("line 2: ")


def test_a_message_longer_than_a_file_is_refused(tmp_path: Path) -> None:
    load = Load(tmp_path / "store")
    config = StoreConfig.tiny(commitlog_file_size=1024)
    assert load({**PUT, "body": "b" * 1000}, config=config) == [{"op": "put", "status": "MESSAGE_ILLEGAL"}]


# --- transactions


def test_a_half_message(load: Load) -> None:
    (answer,) = load({**HALF, "sysFlag": 4 | record.MULTI_TAGS, "tags": "t"})
    (half,) = load.messages()
    assert list(answer)[:3] == ["op", "id", "status"]
    assert (half.topic, half.queue_id, half.queue_offset) == (HALF_TOPIC, 0, 0)
    assert half.sys_flag == record.MULTI_TAGS
    assert half.properties == {
        "TAGS": "t", "TRAN_MSG": "true", "PGROUP": "P", "REAL_TOPIC": "T", "REAL_QID": "3",
    }  # fmt: skip


def assert_op(message: StoredMessage, half: StoredMessage, at_ms: int) -> None:
    assert (message.topic, message.queue_id, message.sys_flag) == (OP_TOPIC, half.queue_id, 0)
    assert message.body == str(half.queue_offset).encode()
    assert message.properties == {"TAGS": "d", "WAIT": "true"}
    assert message.born_host == message.store_host == ("127.0.0.1", 10911)
    assert message.born_timestamp_ms == message.store_timestamp_ms == at_ms


def test_commit_writes_the_final_message_and_an_op(load: Load) -> None:
    other = {**HALF, "id": "other"}
    ours = {**HALF, "tags": "", "flag": 6, "reconsumeTimes": 2, "bornHost": "10.0.0.1:5", "storeHost": "[::1]:9"}
    answers = load({**other, "at_ms": AT}, ours, {**END["commit"], "at_ms": AT + 7})
    assert answers[2] == {"op": "commit", "id": "h", "response_code": 0, "remark": None}
    _, half, final, op = load.messages()
    assert (final.topic, final.queue_id, final.queue_offset) == ("T", 3, 0)
    assert final.sys_flag == record.TRANSACTION_COMMIT | record.STORE_HOST_V6
    assert final.prepared_transaction_offset == half.physical_offset
    assert (final.body, final.flag, final.reconsume_times) == (b"b", 6, 2)
    assert (final.born_host, final.store_host) == (half.born_host, half.store_host)
    assert (final.born_timestamp_ms, final.store_timestamp_ms) == (half.born_timestamp_ms, AT + 7)
    assert final.properties == half.properties
    assert b"TAGS" in half.properties_raw
    assert b"TAGS" not in final.properties_raw
    assert half.queue_offset == 1
    assert_op(op, half, AT + 7)


def test_load_writes_only_an_op_for_a_rollback(load: Load) -> None:
    answers = load({**HALF, "at_ms": AT}, {**END["rollback"], "at_ms": AT + 1})
    assert (answers[1]["id"], answers[1]["response_code"]) == ("h", 0)
    half, op = load.messages()
    assert_op(op, half, AT + 1)


def test_a_repeated_end_is_repeated(load: Load) -> None:
    load(HALF, END["commit"], END["commit"], END["rollback"])
    assert [message.topic for message in load.messages()] == [
        HALF_TOPIC, "T", OP_TOPIC, "T", OP_TOPIC, OP_TOPIC,
    ]  # fmt: skip


@pytest.mark.parametrize("end", END.values(), ids=END.keys())
def test_another_group_is_refused(load: Load, end: Row) -> None:
    answers = load(HALF, {**end, "producerGroup": "Q"}, {**end, "producerGroup": "P"})
    assert (answers[1]["response_code"], answers[1]["remark"]) == (1, "The producer group wrong")
    assert answers[2]["response_code"] == 0
    assert len(load.messages()) == (3 if end["op"] == "commit" else 2)
    assert load.warnings == ["line 2: The producer group wrong"]


def test_a_compressed_half_is_delivered_as_it_is_stored(load: Load) -> None:
    load({**HALF, "body": "x" * 99, "compress": True}, END["commit"])
    half, final, _ = load.messages()
    assert final.stored_body == half.stored_body
    assert final.body == b"x" * 99


def test_a_delayed_half_waits_as_in_rocketmq(load: Load) -> None:
    """The half topic is saved as the real topic, so the message is lost, as in RocketMQ."""
    load({**HALF, "delayLevel": 3}, END["commit"])
    half, final, op = load.messages()
    assert (half.topic, half.queue_id, half.sys_flag) == (SCHEDULE_TOPIC, 2, 0)
    assert half.properties["REAL_TOPIC"] == HALF_TOPIC
    assert (final.topic, final.queue_id, final.sys_flag) == (SCHEDULE_TOPIC, 2, record.TRANSACTION_COMMIT)
    assert final.properties == {"DELAY": "3", "PGROUP": "P", "REAL_TOPIC": HALF_TOPIC, "REAL_QID": "0"}
    assert_op(op, half, op.store_timestamp_ms)


def test_a_final_message_that_is_refused_gets_no_op(load: Load) -> None:
    # The record does not fit into a file with its own topic, which is longer than the half topic.
    config = StoreConfig.tiny(commitlog_file_size=1024)
    topic, fixed = "T" * 127, record.FIXED_SIZE + len(HALF_TOPIC) + record.BLANK_SIZE
    half = {**HALF, "topic": topic, "body": ""}
    load(half, config=config)
    properties = len(load.messages()[0].properties_raw)
    half["body"] = "b" * (1024 - fixed - properties)
    answers = load(half, END["commit"], config=config)
    assert answers[0]["status"] == "PUT_OK"
    assert (answers[1]["response_code"], load.warnings != []) == (13, True)
    assert [message.topic for message in load.messages()] == [HALF_TOPIC, HALF_TOPIC]


# --- time


def store_times(answers: list[Row]) -> list[int]:
    return [answer["store_timestamp"] for answer in answers if "store_timestamp" in answer]


def test_only_at_ms_and_sleep_move_time(load: Load) -> None:
    answers = load(
        {**PUT, "at_ms": AT}, PUT, {"op": "sleep", "ms": 250}, PUT, {"op": "wait_dispatch", "at_ms": AT + 300}, PUT,
        {"op": "sleep", "ms": 0, "at_ms": AT + 300}, PUT,
    )  # fmt: skip
    assert store_times(answers) == [AT, AT, AT + 250, AT + 300, AT + 300]
    assert answers[2] == {"op": "sleep"}


def test_before_the_first_at_ms_it_is_the_time_of_the_start(load: Load) -> None:
    times = store_times(load(PUT, {"op": "sleep", "ms": 5}, PUT))
    assert times[0] > AT
    assert times[1] == times[0] + 5


def test_the_first_at_ms_may_lie_before_the_start(load: Load) -> None:
    load({"op": "persist"}, {"op": "sleep", "ms": 9}, {**PUT, "at_ms": 1})
    assert load.messages()[0].store_timestamp_ms == 1


def test_at_ms_must_not_precede_a_stored_message(load: Load) -> None:
    with pytest.raises(InputError, match=r"line 2: at_ms: expected at least"):
        load(PUT, {**PUT, "at_ms": 1})


def test_time_cannot_go_back(load: Load) -> None:
    with pytest.raises(InputError, match=f"line 2: at_ms: expected at least {AT}, the time now"):
        load({**PUT, "at_ms": AT}, {**PUT, "at_ms": AT - 1})


@pytest.mark.parametrize(
    ("put_at", "now", "delivered_at"),
    [
        (0, 999, None),
        (0, 1000, 1000),
        (50, 1050, None),  # checked every 100 ms
        (50, 1099, None),
        (50, 1100, 1100),
        (50, 5000, 1100),  # delivered on the way to this time
    ],
)
def test_a_delayed_message_is_delivered_when_it_is_due(
    load: Load, put_at: int, now: int, delivered_at: int | None
) -> None:
    delayed = {**PUT, "delayLevel": 1, "queueId": 3, "tags": "t", "at_ms": AT + put_at}
    answers = load({**PUT, "at_ms": AT}, delayed, {**PUT, "body": "last", "at_ms": AT + now})
    assert answers[2]["store_timestamp"] == AT + now
    waited, *delivered, last = load.messages()[1:]
    assert (waited.topic, last.body) == (SCHEDULE_TOPIC, b"last")
    assert [message.store_timestamp_ms - AT for message in delivered] == (
        [] if delivered_at is None else [delivered_at]
    )
    for message in delivered:
        assert (message.topic, message.queue_id, message.body) == ("T", 3, b"b")
        assert message.properties == {"TAGS": "t", "DELAY": "1", "REAL_TOPIC": "T", "REAL_QID": "3"}
        assert (message.born_timestamp_ms, message.born_host) == (waited.born_timestamp_ms, waited.born_host)


def test_sleep_delivers_due_messages_too(load: Load) -> None:
    load({**PUT, "delayLevel": 1, "at_ms": AT}, {"op": "sleep", "ms": 1000})
    assert [message.topic for message in load.messages()] == [SCHEDULE_TOPIC, "T"]
    assert (load.path / "config" / "delayOffset.json").read_text() == '{\n\t"offsetTable":{1:1\n\t}\n}'


def test_deliveries_come_in_the_order_of_their_times(load: Load) -> None:
    puts = [{**PUT, "delayLevel": level, "body": str(level)} for level in (3, 1, 2, 1)]
    load({**puts[0], "at_ms": AT}, *puts[1:], {"op": "sleep", "ms": 20_000})
    assert [message.body for message in load.messages()[4:]] == [b"1", b"1", b"2", b"3"]


def test_waiting_messages_of_an_earlier_run_are_delivered(load: Load) -> None:
    load({**PUT, "delayLevel": 2, "at_ms": AT})
    load({**PUT, "at_ms": AT + 4999})
    assert len(load.messages()) == 2
    load(PUT)  # nothing is checked before the first at_ms
    assert len(load.messages()) == 3
    load({"op": "persist", "at_ms": AT + 5000})
    assert [message.body for message in load.messages()[3:]] == [b"b"]
    load({"op": "persist", "at_ms": AT + 9000})
    assert len(load.messages()) == 4


def test_a_clock_that_was_put_back_delivers_at_once(load: Load) -> None:
    load({**PUT, "delayLevel": 2, "at_ms": AT})
    load({"op": "persist", "at_ms": AT - 1})
    assert [message.store_timestamp_ms for message in load.messages()] == [AT, AT - 1]


# --- tables, filters, crash


def test_rows_without_fields(load: Load) -> None:
    names = ("persist", "wait_dispatch")
    assert load(*({"op": name} for name in names)) == [{"op": name} for name in names]


def test_persist_and_the_end_write_the_tables(load: Load) -> None:
    topics = load.path / "config" / "topics.json"
    seen = []

    def look(row: Row) -> None:
        seen.append("T1" in topics.read_text() if topics.exists() else None)

    topic = {"op": "topic", "topic": "T1", "readQueueNums": 1, "writeQueueNums": 2, "perm": 6}
    run(load.path, CONFIG, [json.dumps(row) for row in (topic, {"op": "persist"})], look, warn=print)
    assert seen == [None, True]
    load({**topic, "topic": "T2"})
    assert "T2" in topics.read_text()


def test_tables_that_cannot_be_read(load: Load) -> None:
    load(PUT)
    for name in ("topics.json", "topics.json.bak"):
        (load.path / "config" / name).write_text("{")
    with pytest.raises(CorruptionError, match=r"topics\.json"):
        load(PUT)
    assert not (load.path / "abort").exists()


def test_a_bad_filter_is_not_registered(load: Load) -> None:
    operation = {"op": "filter", "topic": "T", "group": "G", "expr": "a >", "version": 1}
    assert load(operation) == [{"op": "filter", "registered": False}]


def test_a_filter_is_kept_with_the_first_time(load: Load) -> None:
    filter_ = {"op": "filter", "topic": "T", "group": "G", "expr": "a > 1", "version": 1}
    answers = load(filter_, {**PUT, "at_ms": AT}, filter_, {**filter_, "version": 2})
    assert [answer["registered"] for answer in answers if answer["op"] == "filter"] == [True, False, True]
    text = (load.path / "config" / "consumerFilter.json").read_text()
    assert f'"bornTime":{AT},' in text
    assert '"clientVersion":2,' in text


FILTER = {"op": "filter", "topic": "T", "group": "G", "expr": "a > 1", "version": 1}
WITH_EXT = StoreConfig.tiny(enable_consumequeue_ext=True)
MATCHES, DOES_NOT = bytes(BROKER_BLOOM.bitmap("G#T")), bytes(14)


def bitmaps(load: Load, queue_id: int = 0) -> list[bytes | None]:
    """Return the bitmap of each message in a queue of topic T."""
    with MessageStore.open(load.path, WITH_EXT, read_only=True) as store:
        queue = store.queues["T", queue_id]
        entries = [queue.entry(number) for number in range(queue.max_offset)]
        units = [queue.ext_unit(entry.tags_code) for entry in entries if entry is not None]
        assert [unit and unit.store_timestamp_ms for unit in units] == [
            message.store_timestamp_ms for message in store if (message.topic, message.queue_id) == ("T", queue_id)
        ]
        return [unit and unit.bitmap for unit in units]


@pytest.mark.parametrize(
    ("operations", "queue_id", "expected"),
    [
        (
            [{**PUT, "props": {"a": "2"}}, PUT, {**PUT, "propertiesString": "a\x013\x02"}],
            0,
            [MATCHES, DOES_NOT, MATCHES],
        ),
        (
            [
                {**BATCH, "messages": [{"body": "x", "props": {"a": "2"}}, {"body": "y"}]},
                {**BATCH, "props": {"a": "5"}},
            ],
            0,
            [MATCHES, DOES_NOT, MATCHES],
        ),
        ([{**HALF, "props": {"a": "2"}}, END["commit"], HALF, END["commit"]], 3, [MATCHES, DOES_NOT]),
    ],
    ids=["put", "batch", "commit"],
)
def test_messages_get_the_bitmap_of_the_filters_that_match(
    load: Load, operations: list[Row], queue_id: int, expected: list[bytes]
) -> None:
    load(*operations, FILTER, *operations, config=WITH_EXT)
    assert bitmaps(load, queue_id) == [None] * len(expected) + expected
    load(*operations, config=WITH_EXT)  # the filter is read from its file
    assert bitmaps(load, queue_id) == [None] * len(expected) + 2 * expected


def test_a_filter_that_is_replaced_by_none_makes_no_bitmaps(load: Load) -> None:
    put = {**PUT, "props": {"a": "2"}}
    other = {**FILTER, "expr": "a > 5", "version": 2}
    answers = load(FILTER, put, other, put, {**other, "expr": "a >", "version": 3}, put, config=WITH_EXT)
    assert [answer["registered"] for answer in answers if answer["op"] == "filter"] == [True, True, False]
    assert bitmaps(load) == [MATCHES, DOES_NOT, None]


def test_unreadable_filters_are_reported_before_opening(load: Load) -> None:
    """Unreadable filters are reported before the store is opened."""
    load(FILTER, PUT, config=WITH_EXT)
    for name in ("consumerFilter.json", "consumerFilter.json.bak"):
        path = load.path / "config" / name
        if path.exists():
            path.write_text(path.read_text().replace('"bornTime":', '"bornTime":"x","other":'))
    with pytest.raises(ConfigError, match=r"consumerFilter\.json: T/G: bornTime"):
        load(PUT, config=WITH_EXT)
    assert not (load.path / "abort").exists()
    assert len(load.messages()) == 1


CHECK = {"op": "tx_check", "timeout_ms": 6000, "check_max": 2}


def test_a_check_asks_twice_and_gives_up(load: Load) -> None:
    half = {**HALF, "bornTimestamp": AT, "uniqKey": "u", "at_ms": AT}
    answers = load(
        CHECK, half, {**CHECK, "at_ms": AT + 5999}, {**CHECK, "at_ms": AT + 6000},
        {**CHECK, "at_ms": AT + 6001}, {**CHECK, "at_ms": AT + 6002}, {"op": "sleep", "ms": 60_000},
    )  # fmt: skip
    ours = [answer for answer in answers if answer["op"] == "tx_check"]
    asked = [[(one["queue_offset"], one["check_times"]) for one in answer["check_back"]] for answer in ours]
    assert asked == [[], [], [(1, "1")], [(2, "2")], []]
    assert [answer["half_consume_offset"] for answer in ours] == [-1, -1, 1, 2, 3]
    assert [answer["op_consume_offset"] for answer in ours] == [-1] * 5
    assert [answer["half_max_offset"] for answer in ours] == [0, 1, 2, 3, 3]
    assert ours[-1]["discarded"] == [{"uniq_key": "u", "queue_offset": 2, "check_times": "2"}]
    assert [message.topic for message in load.messages()] == [HALF_TOPIC] * 3 + ["TRANS_CHECK_MAX_TIME_TOPIC"]
    topics = (load.path / "config" / "topics.json").read_text()
    assert HALF_TOPIC in topics
    assert "TRANS_CHECK_MAX_TIME_TOPIC" in topics
    assert OP_TOPIC not in topics


@pytest.mark.parametrize("changes", [{"timeout_ms": None}, {"timeout_ms": -1}, {"check_max": 0}, {"check_max": "3"}])
def test_a_check_that_is_none(load: Load, changes: Row) -> None:
    with pytest.raises(InputError, match=f"line 1: {next(iter(changes))}"):
        load({**CHECK, **changes})


def test_a_crash_keeps_acknowledged_messages(load: Load) -> None:
    keyed = {**PUT, "keys": "k"}
    answers = load({**keyed, "at_ms": AT}, keyed, {"op": "crash"}, PUT)
    assert answers[-1] == {"op": "crash"}
    assert len(answers) == 3
    assert (load.path / "abort").exists()
    assert not (load.path / "config").exists()
    queue = (load.path / "consumequeue" / "T" / "0" / f"{0:020}").read_bytes()
    assert queue[20:28] == answers[1]["phys"].to_bytes(8, "big")
    (index,) = (load.path / "index").iterdir()
    assert index.read_bytes()[36:40] == (3).to_bytes(4, "big")
    with MessageStore.open(load.path, CONFIG) as store:
        assert len(store.find_by_key("T", "k")) == 2
    assert not (load.path / "abort").exists()


def test_an_abandoned_store_is_unusable(tmp_path: Path) -> None:
    store = MessageStore.open(tmp_path, CONFIG)
    store.append(Message("T", b"b"))
    store.abandon()
    store.abandon()
    store.close()
    assert (tmp_path / "abort").exists()
    with pytest.raises(StoreClosedError, match="abandoned"):
        store.append(Message("T", b"b"))
    with MessageStore.open(tmp_path, CONFIG) as again:
        assert len(list(again)) == 1


# --- lines

BAD = {
    "not JSON": "{",
    "not UTF-8": b'{"op": "p\xff"}',
    "not an object": "[]",
    "nested too deep": "[" * 200_000,
    "NaN": '{"op": "sleep", "ms": NaN}',
    "a very long number": '{"op": "sleep", "ms": ' + "9" * 5000 + "}",
    "no operation": {},
    "unknown operation": {"op": "puts"},
    "operation of a wrong kind": {"op": ["put"]},
    "topic is missing": {name: PUT[name] for name in PUT if name != "topic"},
    "queueId is missing": {**PUT, "queueId": None},
    "body is missing": {name: PUT[name] for name in PUT if name != "body"},
    "two bodies": {**PUT, "body_b64": ""},
    "body is no text": {**PUT, "body": 5},
    "body_b64 is no base64": {"op": "put", "topic": "T", "queueId": 0, "body_b64": "a"},
    "body_b64 is no base64 either": {"op": "put", "topic": "T", "queueId": 0, "body_b64": "YQ==é"},
    "half a surrogate pair": '{"op": "put", "topic": "T", "queueId": 0, "body": "\\ud800"}',
    "negative queueId": {**PUT, "queueId": -1},
    "large queueId": {**PUT, "queueId": 1 << 31},
    "queueId is no whole number": {**PUT, "queueId": 1.0},
    "queueId is true": {**PUT, "queueId": True},
    "large flag": {**PUT, "flag": 1 << 31},
    "large sysFlag": {**PUT, "sysFlag": 1 << 31},
    "large bornTimestamp": {**PUT, "bornTimestamp": 1 << 63},
    "large reconsumeTimes": {**PUT, "reconsumeTimes": 1 << 31},
    "large preparedTransactionOffset": {**PUT, "preparedTransactionOffset": 1 << 63},
    "large delayLevel": {**PUT, "delayLevel": 1 << 31},
    "bad bornHost": {**PUT, "bornHost": "localhost:1"},
    "bad storeHost": {**PUT, "storeHost": "1.2.3.4:99999"},
    "compress is no truth": {**PUT, "compress": 1},
    "props are no object": {**PUT, "props": []},
    "a property is no text": {**PUT, "props": {"p": 1}},
    "negative at_ms": {**PUT, "at_ms": -1},
    "large at_ms": {**PUT, "at_ms": 1 << 62},
    "negative sleep": {"op": "sleep", "ms": -1},
    "long sleep": {"op": "sleep", "ms": 1 << 62},
    "no messages": {**BATCH, "messages": None},
    "messages are no objects": {**BATCH, "messages": ["b"]},
    "a message without body": {**BATCH, "messages": [{"tags": "b"}]},
    "half without id": {**HALF, "id": None},
    "half without group": {**HALF, "producerGroup": None},
    "commit of an unknown id": {**END["commit"], "id": "other"},
    "rollback without id": {"op": "rollback"},
    "topic without perm": {"op": "topic", "topic": "T", "readQueueNums": 1, "writeQueueNums": 1},
    "bad topic": {"op": "topic", "topic": "a/b", "readQueueNums": 1, "writeQueueNums": 1, "perm": 6},
    "group without retries": {"op": "subgroup", "group": "G"},
    "offset is missing": {"op": "consumer_offset", "group": "G", "topic": "T", "queueId": 0},
    "filter without version": {"op": "filter", "topic": "T", "group": "G", "expr": "a = 1"},
}


@many
@pytest.mark.parametrize("line", BAD.values(), ids=BAD.keys())
def test_a_bad_line_ends_the_run_but_keeps_earlier_operations(load: Load, line: Row | str | bytes) -> None:
    with pytest.raises(InputError, match=r"^line 4: "):
        load(PUT, "", HALF, line, PUT)
    assert len(load.answers) == 2
    assert not (load.path / "abort").exists()
    assert (load.path / "config" / "topics.json").exists()
    with MessageStore.open(load.path, CONFIG) as store:
        assert store.recovered == []
        assert [message.topic for message in store] == ["T", HALF_TOPIC]
        assert store.read("T", 0, 0).messages[0].body == b"b"


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    operation=st.sampled_from([PUT, BATCH, HALF, END["commit"], {"op": "sleep", "ms": 1}]),
    name=st.sampled_from(
        ["op", "topic", "queueId", "body", "messages", "id", "props", "flag", "bornHost", "at_ms", "ms", "tags"]
    ),
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
        max_leaves=3,
    ),
)
def test_any_value_of_a_field_is_taken_refused_or_bad_input(
    load: Load, operation: Row, name: str, value: object
) -> None:
    with contextlib.suppress(InputError):
        (answer,) = load({**operation, name: value})
        assert answer["op"] == operation["op"]
    assert not (load.path / "abort").exists()


# --- the run


def test_each_row_is_printed_before_the_next_line_is_read(tmp_path: Path) -> None:
    answers: list[Row] = []

    def lines() -> Iterator[str]:
        for number in range(3):
            assert len(answers) == number
            yield json.dumps(PUT)

    run(tmp_path, CONFIG, lines(), answers.append, warn=print)
    assert len(answers) == 3


def unasked() -> Iterator[str]:
    raise AssertionError("no line must be asked for")
    yield ""


def test_a_second_writer_is_refused_before_its_first_line(load: Load) -> None:
    load(PUT)
    with MessageStore.open(load.path, CONFIG), pytest.raises(StoreLockedError):
        run(load.path, CONFIG, unasked(), print, warn=print)


def test_a_config_that_disagrees_with_the_files_is_refused(load: Load) -> None:
    load(PUT)
    other = StoreConfig.tiny(commitlog_file_size=1 << 17)
    with pytest.raises(ConfigError):
        run(load.path, other, unasked(), print, warn=print)


def test_without_config_the_files_tell_the_sizes(load: Load) -> None:
    load(PUT)
    load(PUT, config=None)
    assert len(load.messages()) == 2


@pytest.mark.parametrize("failing", ["write", "lines"])
def test_the_store_is_closed_after_any_error(load: Load, failing: str) -> None:
    class StopError(Exception):
        pass

    def lines() -> Iterator[str]:
        yield json.dumps(PUT)
        raise StopError

    def write(row: Row) -> None:
        if failing == "write":
            raise StopError

    with pytest.raises(StopError):
        run(load.path, CONFIG, lines(), write, warn=print)
    assert not (load.path / "abort").exists()
    assert len(load.messages()) == 1
