"""``import`` restores the messages that ``export`` wrote."""

from __future__ import annotations

import csv
import gzip
import io
import json
import sys
from importlib.util import find_spec
from typing import Any

import pytest

from librmq import Broker, Message, MessageStore
from librmq.cli import main
from librmq.clock import ManualClock
from librmq.errors import StoreIOError
from librmq.message import record
from librmq.runtime import ManualRunner
from tests.budget import many
from tests.cli.stand import Shell, files_of

pytestmark = pytest.mark.skipif(find_spec("pyarrow") is None, reason="needs the extra arrow")

OF_A_MESSAGE = (
    "topic", "queue_id", "queue_offset", "sys_flag", "born_timestamp", "store_timestamp", "reconsume_times", "body_crc",
    "body", "properties", "dispatch_tags_code", "dispatch_keys", "dispatch_uniq_key",
)  # fmt: skip


def messages(shell: Shell, store: str) -> list[dict[str, Any]]:
    """Return the fields that every store of a message shares, by topic and queue offset; hosts may differ."""
    rows = [
        {name: row[name] for name in OF_A_MESSAGE} | {"sys_flag": row["sys_flag"] & ~record.HOSTS_V6}
        for row in shell("show", store, "--body", "base64").rows
        if not row["topic"].startswith(("RMQ_SYS", "SCHEDULE")) and row["sys_flag"] & 12 in (0, 8)
    ]
    return sorted(rows, key=lambda row: (row["topic"], row["queue_id"], row["queue_offset"]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["all.jsonl", "all.csv", "all", "by topic"])
def test_an_export_is_imported_as_it_was(shell: Shell, name: str) -> None:
    more = ["--partition-by", "topic,queueId"] if name == "by topic" else []
    expected = messages(shell, "store")
    named = [word for topic in sorted({one["topic"] for one in expected}) for word in ("--topic", topic)]
    assert shell("export", "store", "-o", name, *named, *more).status == 0
    answer = shell("import", "new", name)
    assert (answer.status, answer.said) == (0, "")
    found = messages(shell, "new")
    for one in (*expected, *found):
        one["body_crc"] = None if one["sys_flag"] & record.COMPRESSED else one["body_crc"]  # compressors differ
        one["dispatch_keys"] = one["dispatch_keys"] or None  # a record's unreadable properties are not exported
    if name == "by topic":  # store times never decrease
        for one in (*expected, *found):
            del one["store_timestamp"]
    assert found == expected
    assert sum(row["messages"] for row in answer.rows) == len(expected)
    assert shell("verify", "new").status == 0
    topics = {row["topic"]: row for row in shell("topics", "new").rows}
    assert {row["topic"]: row["messages"] for row in answer.rows} == {
        topic: row["messages"] for topic, row in topics.items()
    }


def test_exported_hosts_and_flags_are_imported(shell: Shell) -> None:
    with MessageStore.open("old") as store:
        message = Message("T", b"x")
        message.flag = 7
        store.append(message, 2, born_host=("fe80::1", 99), store_host=("10.0.0.1", 10911))
    columns = "topic,queueId,flag,bornHost,storeHost,body,properties"
    assert shell("export", "old", "-o", "t.jsonl", "--columns", columns).status == 0
    assert shell("import", "new", "t.jsonl").status == 0
    (old,), (new,) = shell("show", "old").rows, shell("show", "new").rows
    for name in ("flag", "born_host", "store_host", "sys_flag", "queue_id", "msg_id"):
        assert new[name] == old[name]


def test_a_delivered_delay_is_not_delayed_again(shell: Shell) -> None:
    row = {"topic": "T", "body": "x", "properties": {"DELAY": "3", "REAL_TOPIC": "T"}}
    assert shell("import", "new", "-", given=json.dumps(row)).status == 0
    (found,) = shell("show", "new").rows
    assert (found["topic"], found["properties"]) == ("T", row["properties"])


def test_messages_for_a_store_in_use_are_stored_now(shell: Shell) -> None:
    with MessageStore.open("new", clock=ManualClock(1_700_000_000_000)) as store:
        store.append(Message("T", b"first"))
    row = {"topic": "T", "body": "second", "storeTimestamp": "2001-01-01T00:00:00.000Z"}
    assert shell("import", "new", "-", given=json.dumps(row)).status == 0
    first, second = shell("show", "new").rows
    assert second["store_timestamp"] > first["store_timestamp"]


def test_a_broker_knows_the_imported_topics(shell: Shell) -> None:
    """It also keeps those of a store that no broker has used, and what a topic has beside its queues."""
    with MessageStore.open("new", clock=ManualClock(1_700_000_000_000)) as store:
        store.append(Message("Old", b"before"), 1)
    shell("import", "new", "-", given='{"topic":"T","body":"x"}')
    with Broker.open("new", runner=ManualRunner()) as broker:
        assert broker.topics()["Old"].read_queues == 2
        broker.create_topic("T", 2, message_type="FIFO")
    shell("import", "new", "-", given='{"topic":"T","queueId":5,"body":"y"}')
    with Broker.open("new", runner=ManualRunner()) as broker:
        assert broker.topics()["T"].read_queues == 6
        assert broker.topics()["T"].message_type == "FIFO"
        assert [message.body for message in broker.messages("T")] == [b"x", b"y"]


def test_a_dry_run_counts_and_writes_nothing(shell: Shell) -> None:
    given = '{"topic":"T","body":"abc"}\n{"topic":"T","queueId":2,"body_b64":"/w=="}\n'
    row = {"topic": "T", "queues": 3, "messages": 2, "body_bytes": 4, "dry_run": True}
    assert shell("import", "new", "-", "--dry-run", given=given).rows == [row]
    assert not (shell.folder / "new").exists()


@many
@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "not JSON"),
        ("{}", "expected a column 'topic', found none"),
        ('{"Topic":"T"}', "expected a column 'topic', found 'Topic'"),
        ('{"topic":null}', "topic: expected text, found None"),
        ('{"topic":"SCHEDULE_TOPIC_XXXX"}', "the broker's own"),
        ('{"topic":"a\\u0001b\\nc"}', "topic 'a\\x01b\\nc' has control characters"),
        ('{"topic":"T","body_b64":"?"}', "body_b64: expected base64"),
        ('{"topic":"T","queueId":"x"}', "queueId: expected a whole number"),
        ('{"topic":"T","queueId":-1}', "queue"),
        ('{"topic":"T","storeTimestamp":9223372036854775808}', "storeTimestamp: expected a whole number of 64 bits"),
        ('{"topic":"T","bornTimestamp":"-9223372036854775809"}', "bornTimestamp: expected a whole number of 64 bits"),
        ('{"topic":"T","reconsumeTimes":2147483648}', "reconsumeTimes: expected a whole number of 32 bits"),
        ('{"topic":"T","sysFlag":1.5}', "sysFlag: expected a whole number"),
        ('{"topic":"T","bornTimestamp":"soon"}', "bornTimestamp: expected a time"),
        ('{"topic":"T","bornHost":"here"}', "bornHost: expected a host"),
        ('{"topic":"T","properties":{"a":1}}', "properties: expected names with strings"),
        ('{"topic":"T","properties":{"a":"\\ud800"}}', "property 'a' cannot be written as UTF-8"),
        ('{"topic":"T","body":"\\ud800"}', "half of a surrogate pair"),
        ('{"topic":"T","bornHost":5}', "bornHost: expected a host"),
        ('{"topic":"T","properties":{"a":"\\u0002"}}', "01 and 02 separate properties"),
        ('{"topic":"T","properties":{"a":""}}', "properties: 'a' is empty"),
        ('{"topic":"T","tags":["a"]}', "tags: expected text"),
    ],
)
def test_a_bad_row_ends_the_import_with_its_number(shell: Shell, line: str, said: str) -> None:
    good = '{"topic":"T","body":"x"}\n'
    answer = shell("import", "new", "-", given=f"{good}{line}\n{good}")
    assert (answer.status, answer.out) == (2, "")
    assert said in answer.said
    assert said in shell("import", "other", "-", "--dry-run", given=line).said
    assert len(shell("show", "new").rows) == 1
    assert "row 2: " in answer.said
    assert "--skip 1" in answer.said


def test_damaged_parquet_is_named(shell: Shell) -> None:
    shell("export", "store", "-o", "folder", "--format", "parquet")
    (part,) = (shell.folder / "folder").iterdir()
    part.write_bytes(part.read_bytes()[:4] + bytes(1000) + part.read_bytes()[1004:])
    answer = shell("import", "new", "folder")
    assert answer.status == 2
    assert answer.said.startswith("librmq import: folder: row 1: the file is damaged: ")
    assert "file or folder" in shell("import", "new", "-", "--input-format", "parquet").said


@pytest.mark.parametrize("form", ["jsonl", "csv"])
def test_a_compressed_file_is_refused_with_the_command_that_reads_it(shell: Shell, form: str) -> None:
    (shell.folder / f"rows.{form}.gz").write_bytes(gzip.compress(b""))
    answer = shell("import", "new", f"rows.{form}.gz")
    assert answer.status == 2
    assert f": gzip -dc rows.{form}.gz | librmq import STORE - --input-format {form}\n" in answer.said


def test_a_bad_first_row_does_not_claim_an_import(shell: Shell) -> None:
    answer = shell("import", "new", "-", given='{}\n{"topic":"T","body":"x"}\n')
    assert (answer.status, answer.out) == (2, "")
    assert "row 1: " in answer.said
    assert "imported" not in answer.said
    assert "--skip" not in answer.said
    assert shell("show", "new").rows == []


@many
@pytest.mark.parametrize(
    "row",
    [
        {"tags": "a\2DELAY\0013"},
        {"keys": "k\2REAL_TOPIC\1other"},
        {"keys": ["k", "l\2DELAY\0013"]},
        {"uniqueKey": "u\2DELAY\0013"},
        {"properties": {"a\1b": "c"}},
        {"tags": "a", "propertiesString": "TAGS\1b\2KEYS\1k", "properties": {"TAGS": "a"}},
        {"keys": "k", "propertiesString": "TAGS\1b"},
    ],
)
def test_a_row_cannot_add_properties(shell: Shell, row: dict[str, Any]) -> None:
    assert shell("import", "new", "-", given=json.dumps({"topic": "T", "body": "good", "keys": "k"})).status == 0
    answer = shell("import", "new", "-", given=json.dumps({"topic": "T", "body": "x", **row}))
    assert answer.status == 2
    assert "row 1: propert" in answer.said
    (only,) = shell("show", "new").rows
    assert only["properties"] == {"KEYS": "k"}
    assert shell("verify", "new").status == 0


def test_stored_properties_are_imported_as_they_are(shell: Shell) -> None:
    row = {"topic": "T", "body": "x", "propertiesString": "KEYS\1Ann  Miller\2a\1b\1c\2\2"}
    assert shell("import", "new", "-", given=json.dumps(row)).status == 0
    (found,) = shell("show", "new").rows
    assert found["properties_raw"] == row["propertiesString"]
    assert shell("query", "new", "--topic", "T", "--key", "Miller").rows
    assert shell("verify", "new").status == 0


def test_a_message_is_no_longer_in_light_queues_of_the_store_that_was_exported(shell: Shell) -> None:
    properties = {"INNER_MULTI_DISPATCH": "%LMQ%one", "INNER_MULTI_QUEUE_OFFSET": "0"}
    rows = [{"topic": topic, "properties": properties, "body": "x"} for topic in ("orders", "%LMQ%one")]
    assert shell("import", "new", "-", given="\n".join(map(json.dumps, rows))).status == 0
    assert shell("verify", "new").status == 0


@pytest.mark.parametrize("words", [("import", "new", "-"), ("send", "store", "OrderTopic")])
def test_a_closed_standard_input_is_named(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert (main(words), capsys.readouterr().err) == (2, f"librmq {words[0]}: -: standard input is closed\n")


def test_several_keys_are_a_list(shell: Shell) -> None:
    answer = shell("import", "new", "-", given='{"topic":"T","body":"x","keys":"Ann Miller"}')
    assert (answer.status, "pass several keys as a list, such as ['Ann', 'Miller']" in answer.said) == (2, True)
    (shell.folder / "in.csv").write_text('topic,body,keys\nT,x,"[""Ann"", ""Miller""]"\n')
    assert shell("import", "new", "-", given='{"topic":"T","body":"x","keys":["Ann","Miller"]}').status == 0
    assert shell("import", "new", "in.csv").status == 0
    assert len(shell("query", "new", "--topic", "T", "--key", "Miller").rows) == 2


def test_csv_of_a_spreadsheet_begins_with_a_byte_order_mark(shell: Shell) -> None:
    (shell.folder / "in.csv").write_bytes(b'\xef\xbb\xbf"topic",body\r\nT,"a\r\nb"\r\n')
    assert shell("import", "new", "in.csv").status == 0
    assert [row["body"] for row in shell("show", "new").rows] == ["a\r\nb"]


@pytest.mark.parametrize("row", ["T,a,b", "T", 'T,"a', 'T,"a"b'])
def test_a_row_of_csv_with_other_cells_than_the_heading_is_refused(shell: Shell, row: str) -> None:
    (shell.folder / "in.csv").write_text(f"topic,body\nT,x\n{row}\n")
    answer = shell("import", "new", "in.csv")
    assert (answer.status, "in.csv: row 2: " in answer.said, "continue by --skip 1" in answer.said) == (2, True, True)


HOSTILE = (
    "=1+1",
    "+1",
    "-1+1",
    "-1\n",
    "@a",
    "'=1",
    "\x1b[2J",
    "a\0b",
    "\u202eabc",
    "\\u001b",
    "\t=1",
    "a\rb\nc",
    "\x7f",
)


def test_formulas_in_csv_are_escaped_and_imported_as_they_were(shell: Shell) -> None:
    with MessageStore.open("old") as store:
        for text in HOSTILE:
            store.append(Message("T", text, tags=text, properties={"p": text}))
    columns = "topic,queueId,tags,properties,body"
    assert shell("export", "old", "-o", "t.csv", "--columns", columns).status == 0
    assert shell("export", "old", "-o", "tags.csv", "--columns", "topic,tags,body").status == 0
    for name in ("t.csv", "tags.csv"):
        with open(shell.folder / name, newline="", encoding="utf-8") as file:
            cells = [cell for row in csv.reader(file) for cell in row]
        assert not any(cell.startswith(("=", "+", "-", "@", "\t", "\r")) for cell in cells)
        assert not any(character in cell for cell in cells for character in "\x1b\0\u202e\x7f")
    assert shell("import", "new", "t.csv").status == 0
    assert shell("import", "tags", "tags.csv").status == 0
    for path in ("new", "tags"):
        with MessageStore.open(path, read_only=True) as store:
            assert [(message.text(), message.tags) for message in store] == [(text, text) for text in HOSTILE]
    with MessageStore.open("new", read_only=True) as store:
        assert [message.properties["p"] for message in store] == list(HOSTILE)


def test_formulas_in_the_csv_of_a_command_are_escaped(shell: Shell) -> None:
    with MessageStore.open("old") as store:
        for text in HOSTILE:
            store.append(Message("T", text, tags=text, properties={"p": text}))
    for words in (["show", "old"], ["count", "old", "--by", "tag"]):
        answer = shell(*words, "--format", "csv")
        assert answer.status == 0
        cells = [cell for row in csv.reader(io.StringIO(answer.out, newline="")) for cell in row]
        texts = [cell for cell in cells if not cell.lstrip("-").isdigit()]
        assert not any(cell.startswith(("=", "+", "-", "@", "\t", "\r")) for cell in texts)
        assert not any(character in answer.out for character in "\x1b\0\u202e\x7f")


@pytest.mark.parametrize(
    ("error", "status"),
    [(KeyboardInterrupt(), 130), (StoreIOError("write", "f", OSError(28, "No space left on device")), 2)],
)
def test_an_import_that_ends_early_is_continued(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, error: BaseException, status: int
) -> None:
    given = "".join(json.dumps({"topic": "T", "body": f"{number}"}) + "\n" for number in range(5))
    append, left = MessageStore.append, [3]

    def failing(*arguments: Any, **fields: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise error
        return append(*arguments, **fields)

    with monkeypatch.context() as patched:
        patched.setattr(MessageStore, "append", failing)
        answer = shell("import", "new", "-", given=given)
    assert (answer.status, "earlier rows are imported: continue by --skip 3" in answer.said) == (status, True)
    assert shell("import", "new", "-", "--skip", 3, given=given).status == 0
    assert [row["body"] for row in shell("show", "new").rows] == ["0", "1", "2", "3", "4"]


def test_skipped_rows_are_not_imported(shell: Shell) -> None:
    given = "".join(f'{{"topic":"T","body":"{number}"}}\n' for number in range(5))
    assert shell("import", "new", "-", "--skip", 3, given=given).rows[0]["messages"] == 2
    assert [row["body"] for row in shell("show", "new").rows] == ["3", "4"]


def test_an_import_into_a_store_in_use_is_refused(shell: Shell) -> None:
    before = files_of(shell.folder / "store" / "commitlog")
    with MessageStore.open("store"):
        answer = shell("import", "store", "-", given='{"topic":"T"}')
        assert (answer.status, "process" in answer.said) == (2, True)
    assert files_of(shell.folder / "store" / "commitlog") == before


@pytest.mark.parametrize("queue_id", [1 << 16, -1, 1 << 40])
def test_a_queue_that_no_topic_has_is_refused_by_name(shell: Shell, queue_id: int) -> None:
    row = json.dumps({"topic": "t", "queueId": queue_id, "body": "x"})
    answer = shell("import", "new", "-", given=row)
    assert answer.status == 2
    assert f"row 1: queueId: expected a whole number from 0 to 65535, found {queue_id}" in answer.said


def test_an_export_of_some_queues_and_of_a_text(shell: Shell) -> None:
    everything = shell("show", "store", "--topic", "OrderTopic", "--queue", "1").rows
    assert shell("export", "store", "-o", "q.jsonl", "--topic", "OrderTopic", "--queue", "1").status == 0
    exported = [json.loads(line) for line in (shell.folder / "q.jsonl").read_text().splitlines()]
    assert [row["queueOffset"] for row in exported] == [row["queue_offset"] for row in everything]
    assert shell("export", "store", "-o", "g.csv", "--grep", "order-1", "--columns", "topic,keys").status == 0
    found = [row for row in shell("show", "store", "--grep", "order-1").rows if row["sys_flag"] & 12 in (0, 8)]
    users = [row for row in found if not row["topic"].startswith(("RMQ_SYS", "SCHEDULE"))]
    with open(shell.folder / "g.csv") as file:
        rows = list(csv.DictReader(file))
    assert sorted(row["topic"] for row in rows) == sorted(row["topic"] for row in users)
    assert set(rows[0]) == {"topic", "keys"} if rows else not users
    wrong = shell("export", "store", "-o", "w.csv", "--grep", "(")
    assert (wrong.status, "grep" in wrong.said) == (2, True)


def test_columns_that_are_not_imported_are_noted_once(shell: Shell) -> None:
    rows = [{"topic": "T", "Body": "x", "queue_id": 3}] * 2 + [{"topic": "T", "queueOffset": 7, "owner": "me"}]
    (shell.folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    answer = shell("import", "new", "in.jsonl")
    assert answer.status == 0
    assert sorted(answer.said.splitlines()) == [
        "note: column 'Body' is unknown and not imported; did you mean body?",
        "note: column 'owner' is unknown and not imported",
        "note: column 'queue_id' is unknown and not imported; did you mean queueId?",
    ]
