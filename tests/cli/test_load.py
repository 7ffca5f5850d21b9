"""``load`` on a store of a few messages: fields, refusals, transactions, times, and bad lines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from librmq.config import StoreConfig
from librmq.errors import InputError
from librmq.filter import BROKER_BLOOM
from librmq.message import record
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


@pytest.fixture
def load(tmp_path: Path) -> Load:
    return Load(tmp_path / "store")


# --- messages


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


# --- refusals

BATCH = {"op": "batch", "topic": "T", "queueId": 0, "messages": [{"body": "b"}]}
REFUSED = {
    "empty topic": {**PUT, "topic": ""},
    "long properties": {**PUT, "props": {"p": "v" * 32768}},
    "long raw properties": {**PUT, "propertiesString": "v" * 32768},
    "separators": {**PUT, "props": {"p": "v\x02TAGS\x01x"}},
    "delayed batch": {**BATCH, "delayLevel": 1},
    "batch delayed by a property": {**BATCH, "props": {"DELAY": "1"}},
    "batch of a delayed message": {**BATCH, "messages": [{"body": "b", "delayLevel": 1}]},
    "half of a bad topic": {**HALF, "topic": "a/b"},
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


# --- tables, filters, crash


FILTER = {"op": "filter", "topic": "T", "group": "G", "expr": "a > 1", "version": 1}


def test_a_bad_filter_is_not_registered(load: Load) -> None:
    assert load({**FILTER, "expr": "a >"}) == [{"op": "filter", "registered": False}]


def test_a_filter_is_kept_with_the_first_time(load: Load) -> None:
    answers = load(FILTER, {**PUT, "at_ms": AT}, FILTER, {**FILTER, "version": 2})
    assert [answer["registered"] for answer in answers if answer["op"] == "filter"] == [True, False, True]
    text = (load.path / "config" / "consumerFilter.json").read_text()
    assert f'"bornTime":{AT},' in text
    assert '"clientVersion":2,' in text


WITH_EXT = StoreConfig.tiny(enable_consumequeue_ext=True)
MATCHES, DOES_NOT = bytes(BROKER_BLOOM.bitmap("G#T")), bytes(14)


def bitmaps(load: Load) -> list[bytes | None]:
    """Return the bitmap of each message in queue 3 of topic T."""
    with MessageStore.open(load.path, WITH_EXT, read_only=True) as store:
        queue = store.queues["T", 3]
        entries = [queue.entry(number) for number in range(queue.max_offset)]
        units = [queue.ext_unit(entry.tags_code) for entry in entries if entry is not None]
        return [unit and unit.bitmap for unit in units]


def test_a_committed_message_gets_the_bitmap_of_the_filters_that_match(load: Load) -> None:
    operations: list[Any] = [{**HALF, "props": {"a": "2"}}, END["commit"], HALF, END["commit"]]
    load(*operations, FILTER, *operations, config=WITH_EXT)
    load(*operations, config=WITH_EXT)  # the filter is read from its file
    assert bitmaps(load) == [None, None, *2 * [MATCHES, DOES_NOT]]


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
    "queueId is missing": {**PUT, "queueId": None},
    "body is missing": {name: PUT[name] for name in PUT if name != "body"},
    "two bodies": {**PUT, "body_b64": ""},
    "body_b64 is no base64 either": {"op": "put", "topic": "T", "queueId": 0, "body_b64": "YQ==é"},
    "half a surrogate pair": '{"op": "put", "topic": "T", "queueId": 0, "body": "\\ud800"}',
    "negative queueId": {**PUT, "queueId": -1},
    "queueId is true": {**PUT, "queueId": True},
    "large flag": {**PUT, "flag": 1 << 31},
    "bad bornHost": {**PUT, "bornHost": "localhost:1"},
    "compress is no truth": {**PUT, "compress": 1},
    "props are no object": {**PUT, "props": []},
    "a property is no text": {**PUT, "props": {"p": 1}},
    "large at_ms": {**PUT, "at_ms": 1 << 62},
    "long sleep": {"op": "sleep", "ms": 1 << 62},
    "messages are no objects": {**BATCH, "messages": ["b"]},
    "commit of an unknown id": {**END["commit"], "id": "other"},
    "rollback without id": {"op": "rollback"},
    "bad topic": {"op": "topic", "topic": "a/b", "readQueueNums": 1, "writeQueueNums": 1, "perm": 6},
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
