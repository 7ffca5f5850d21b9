"""``load`` on a store of a few messages: fields, refusals, transactions, times, and bad lines."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from librmq.config import StoreConfig
from librmq.errors import InputError
from librmq.filter import BROKER_BLOOM
from librmq.message import record
from librmq.message.batch import decode_batch
from librmq.message.message import StoredMessage
from librmq.message.topics import SystemTopic
from librmq.store import MessageStore
from tests.budget import many
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


@pytest.mark.parametrize(("level", "stored"), [(1, "1"), (18, "18"), (19, "18"), (2**31 - 1, "18")])
def test_a_delayed_message_waits_in_the_schedule_topic(load: Load, level: int, stored: str) -> None:
    message = load.put(queueId=5, delayLevel=level)
    assert (message.topic, message.queue_id) == (SystemTopic.SCHEDULE, int(stored) - 1)
    assert message.properties == {"DELAY": stored, "REAL_TOPIC": "T", "REAL_QID": "5"}


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


@many
@pytest.mark.parametrize("operation", REFUSED.values(), ids=REFUSED.keys())
def test_a_refusal_changes_nothing_and_the_run_continues(load: Load, operation: Row) -> None:
    answers = load(PUT, operation, PUT)
    expected = {name: operation[name] for name in ("op", "id") if name in operation}
    assert answers[1] == expected | {"status": "MESSAGE_ILLEGAL"}
    assert (answers[2]["phys"], answers[2]["queue_offset"]) == (answers[0]["wrote_bytes"], 1)
    assert len(load.messages()) == 2
    (warning,) = load.warnings
    assert warning.startswith("line 2: ")


# --- transactions


@pytest.mark.parametrize("end", END.values(), ids=END.keys())
def test_another_group_is_refused(load: Load, end: Row) -> None:
    answers = load(HALF, {**end, "producerGroup": "Q"}, {**end, "producerGroup": "P"})
    assert (answers[1]["response_code"], answers[1]["remark"]) == (1, "The producer group wrong")
    assert answers[2]["response_code"] == 0
    assert len(load.messages()) == (3 if end["op"] == "commit" else 2)
    assert load.warnings == ["line 2: The producer group wrong"]


def test_a_delayed_half_waits_as_in_rocketmq(load: Load) -> None:
    """The half topic is saved as the real topic, so the message is lost, as in RocketMQ.

    RocketMQ would put the op message into the queue of the level; here it goes where all are.
    """
    load({**HALF, "delayLevel": 3}, END["commit"])
    half, final, op = load.messages()
    assert (half.topic, half.queue_id, half.sys_flag) == (SystemTopic.SCHEDULE, 2, 0)
    assert half.properties["REAL_TOPIC"] == SystemTopic.HALF
    assert (final.topic, final.queue_id, final.sys_flag) == (SystemTopic.SCHEDULE, 2, record.TRANSACTION_COMMIT)
    assert final.properties == {"DELAY": "3", "PGROUP": "P", "REAL_TOPIC": SystemTopic.HALF, "REAL_QID": "0"}
    assert (op.topic, op.queue_id, op.body) == (SystemTopic.OP, 0, str(half.queue_offset).encode())


def test_a_final_message_that_is_refused_gets_no_op(load: Load) -> None:
    # The record does not fit into a file with its own topic, which is longer than the half topic.
    config = StoreConfig.tiny(commitlog_file_size=1024)
    topic, fixed = "T" * 127, record.FIXED_SIZE + len(SystemTopic.HALF) + record.BLANK_SIZE
    half = {**HALF, "topic": topic, "body": ""}
    load(half, config=config)
    properties = len(load.messages()[0].properties_raw)
    half["body"] = "b" * (1024 - fixed - properties)
    answers = load(half, END["commit"], config=config)
    assert answers[0]["status"] == "PUT_OK"
    assert (answers[1]["response_code"], load.warnings != []) == (13, True)
    assert [message.topic for message in load.messages()] == [SystemTopic.HALF, SystemTopic.HALF]


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
    assert (waited.topic, last.body) == (SystemTopic.SCHEDULE, b"last")
    assert [message.store_timestamp_ms - AT for message in delivered] == (
        [] if delivered_at is None else [delivered_at]
    )
    for message in delivered:
        assert (message.topic, message.queue_id, message.body) == ("T", 3, b"b")
        assert message.properties == {"TAGS": "t", "DELAY": "1", "REAL_TOPIC": "T", "REAL_QID": "3"}
        assert (message.born_timestamp_ms, message.born_host) == (waited.born_timestamp_ms, waited.born_host)


# --- tables, filters, crash


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
    assert [message.topic for message in load.messages()] == [SystemTopic.HALF] * 3 + ["TRANS_CHECK_MAX_TIME_TOPIC"]
    topics = (load.path / "config" / "topics.json").read_text()
    assert SystemTopic.HALF in topics
    assert "TRANS_CHECK_MAX_TIME_TOPIC" in topics
    assert SystemTopic.OP not in topics


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
        assert [message.topic for message in store] == ["T", SystemTopic.HALF]
        assert store.read("T", 0, 0).messages[0].body == b"b"


# --- the run


def test_each_row_is_printed_before_the_next_line_is_read(tmp_path: Path) -> None:
    answers: list[Row] = []

    def lines() -> Iterator[str]:
        for number in range(3):
            assert len(answers) == number
            yield json.dumps(PUT)

    run(tmp_path, CONFIG, lines(), answers.append, warn=print)
    assert len(answers) == 3
