"""What commands print, held against what the original reported of the same stores; field order counts."""

from __future__ import annotations

import hashlib
import io
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from librmq.cli import main
from tests.conftest import StoreCopy
from tests.reference import Row, existing, jsonl, rows, store_folders

stores = pytest.mark.parametrize("folder", store_folders())

QUESTION_FIELDS = {
    "index_query": ("type", "topic", "key", "max_num", "begin", "end"),
    "get_message": ("type", "topic", "queue_id", "offset", "max_msg_nums", "sub_expression"),
    "offset_by_time": ("type", "topic", "queue_id"),
}


class Commands:
    """Runs commands in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self._capsys = capsys
        self._monkeypatch = monkeypatch

    def run(self, *words: str | Path, rows_in: Iterable[Row] = ()) -> tuple[int, list[str], str]:
        """Exit status, lines of standard output, standard error."""
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows_in)
        self._monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        status = main([str(word) for word in words])
        shown = self._capsys.readouterr()
        return status, shown.out.splitlines(), shown.err

    def rows(self, *words: str | Path, rows_in: Iterable[Row] = ()) -> list[str]:
        """The lines of a command that succeeds, in the form of `lines`."""
        status, out, err = self.run(*words, rows_in=rows_in)
        assert (status, err) == (0, "")
        return lines(json.loads(line) for line in out)


@pytest.fixture
def commands(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Commands:
    return Commands(capsys, monkeypatch)


def lines(rows_: Iterable[Row]) -> list[str]:
    """Rows in a form in which the order of fields counts."""
    return [json.dumps(row, ensure_ascii=False) for row in rows_]


def closed_cleanly(folder: Path) -> bool:
    return not rows(folder, "config")[0]["abort_file_present"]


@pytest.fixture
def settled(folder: Path, store_copy: StoreCopy, commands: Commands) -> Path:
    """The store of a golden folder where it was closed cleanly, else a copy that was recovered."""
    if closed_cleanly(folder):
        return folder / "store"
    store = store_copy(folder)
    status, _, _ = commands.run("recover", store)
    assert status == 0
    return store


def contents(store: Path) -> dict[str, str]:
    """Every file of a store and a hash of what is in it."""
    return {
        str(path.relative_to(store)): hashlib.sha1(path.read_bytes()).hexdigest() if path.is_file() else ""
        for path in sorted(store.rglob("*"))
    }


def log_rows(folder: Path) -> list[str]:
    return lines(row for row in jsonl(folder / "expected.jsonl") if row["type"] in ("message", "blank"))


def queue_rows(folder: Path) -> list[str]:
    """Those of the queues that have files: the original makes its delay queues up."""
    return lines(row for row in rows(folder, "store")[0]["queues"] if row["max_offset"])


# --- reading


@stores
def test_dump(folder: Path, settled: Path, commands: Commands) -> None:
    assert commands.rows("dump", settled) == log_rows(folder)


@stores
def test_dump_all_of_a_sound_log_is_the_same(folder: Path, settled: Path, commands: Commands) -> None:
    assert commands.rows("dump", "--all", settled) == log_rows(folder)


@stores
def test_dump_of_a_store_that_was_not_closed(folder: Path, commands: Commands) -> None:
    status, out, err = commands.run("dump", folder / "store")
    expected = log_rows(folder)
    printed = lines(json.loads(line) for line in out)
    assert printed == expected[: len(printed)]
    if status == 0:
        assert (len(printed), err) == (len(expected), "")
    else:
        last = json.loads(printed[-1]) if printed else {"phys": 0, "size": 0}
        assert status == 1
        assert err.startswith("librmq dump: ")
        assert f" at {last['phys'] + last['size']}: " in err


def test_dump_of_a_log_of_5(commands: Commands) -> None:
    folder = existing("timer-5.3.3")
    printed = [json.loads(line) for line in commands.rows("dump", folder / "store")]
    expected = rows(folder, "message")
    assert len(printed) == len(expected)
    for ours, theirs in zip(printed, expected, strict=True):
        shared = {name: value for name, value in theirs.items() if name != "body"}
        assert {name: ours[name] for name in shared} == shared


@stores
def test_queues(folder: Path, settled: Path, commands: Commands) -> None:
    assert commands.rows("queues", settled) == queue_rows(folder)


@stores
def test_queue(folder: Path, settled: Path, commands: Commands) -> None:
    printed: list[str] = []
    for line in queue_rows(folder):
        queue = json.loads(line)
        printed += commands.rows("queue", settled, queue["topic"], str(queue["queue_id"]))
    assert printed == lines(rows(folder, "cq"))


def spread(rows_: Sequence[Row], count: int) -> Sequence[Row]:
    return rows_[:: max(1, len(rows_) // count)]


@stores
def test_query_by_key(folder: Path, settled: Path, commands: Commands) -> None:
    messages = {row["phys"]: row for row in rows(folder, "message")}
    asked = [row for row in rows(folder, "index_query") if row["begin"] >= 0 and row["key"] and row["topic"]]
    for row in spread(asked, 40):
        words = ["--topic", row["topic"], f"--key={row['key']}", "--max", str(row["max_num"])]
        times = ["--begin", str(row["begin"]), "--end", str(row["end"])]
        printed = commands.rows("query", settled, *words, *times)
        assert printed == lines(messages[place] for place in row["query_message_phys"])


@stores
def test_query_by_offset_id(folder: Path, settled: Path, commands: Commands) -> None:
    for row in spread(rows(folder, "message"), 20):
        assert commands.rows("query", settled, "--id", row["msg_id"]) == lines([row])
        assert commands.rows("query", settled, "--id", row["msg_id"].lower()) == lines([row])


@stores
def test_query_by_unique_id(folder: Path, settled: Path, commands: Commands) -> None:
    by_id: dict[str, list[Row]] = {}
    for row in rows(folder, "message"):
        if row["dispatch_uniq_key"] and row["sys_flag"] & 12 != 12:  # rollbacks are not indexed
            by_id.setdefault(row["dispatch_uniq_key"], []).append(row)
    for unique_id in [
        *list(by_id)[:: max(1, len(by_id) // 20)],
        *[key for key in by_id if len(by_id[key]) > 1][:20],
    ]:
        assert commands.rows("query", settled, f"--id={unique_id}") == lines(by_id[unique_id])


@stores
def test_query_that_finds_nothing(settled: Path, commands: Commands) -> None:
    assert commands.rows("query", settled, "--topic", "NoSuchTopic", "--key", "k") == []
    assert commands.rows("query", settled, "--id", "NO-SUCH-ID") == []
    assert commands.rows("query", settled, "--id", "7F00000100002A9F00000000FFFFFFFF") == []


@stores
def test_ask(folder: Path, settled: Path, commands: Commands) -> None:
    expected = [row for row in jsonl(folder / "expected.jsonl") if row["type"] in QUESTION_FIELDS]
    questions = []
    for row in expected:
        question = {name: row[name] for name in QUESTION_FIELDS[row["type"]]}
        if row["type"] == "offset_by_time":
            question["timestamps"] = [timestamp for timestamp, _ in row["results"]]
        questions.append(question)
    answers = commands.rows("ask", settled, rows_in=questions)
    if closed_cleanly(folder):
        assert answers == lines(expected)
    else:
        assert lines(once(json.loads(line)) for line in answers) == lines(map(once, expected))


def once(row: Row) -> Row:
    """The original indexes keys again when it recovers; librmq does so once."""
    names = ("phys_offsets", "query_message_phys")
    return {name: list(dict.fromkeys(value)) if name in names else value for name, value in row.items()}


@stores
def test_reading_changes_nothing(folder: Path, store_copy: StoreCopy, commands: Commands) -> None:
    store = store_copy(folder)
    before = contents(store)
    topic, queue_id = rows(folder, "cq")[0]["topic"], rows(folder, "cq")[0]["queue_id"]
    question = {name: rows(folder, "get_message")[0][name] for name in QUESTION_FIELDS["get_message"]}
    commands.run("dump", store)
    commands.run("dump", "--all", store)
    commands.run("queues", store)
    commands.run("queue", store, topic, str(queue_id))
    commands.run("query", store, "--topic", topic, "--key", "key1")
    commands.run("query", store, "--id", rows(folder, "message")[0]["msg_id"])
    commands.run("ask", store, rows_in=[question])
    commands.run("verify", store)
    commands.run("broker-conf", store)
    assert contents(store) == before


# --- care


@stores
def test_verify(folder: Path, settled: Path, commands: Commands) -> None:
    status, out, _ = commands.run("verify", settled)
    assert (out, status) == (['{"type":"verify","sound":true,"damage":[]}'], 0)


@stores
def test_recover(folder: Path, store_copy: StoreCopy, commands: Commands) -> None:
    store = store_copy(folder)
    status, out, err = commands.run("recover", store)
    assert (status, err) == (0, "")
    (row,) = map(json.loads, out)
    expected = rows(folder, "store")[0]
    for name in ("type", "phase", "min_phy_offset", "max_phy_offset", "flushed_where"):
        assert row[name] == expected[name]
    assert lines(row["queues"]) == queue_rows(folder)
    assert row["topic_queue_table"] == {name: n for name, n in expected["topic_queue_table"].items() if n}
    assert list(row["topic_queue_table"]) == sorted(row["topic_queue_table"])
    if closed_cleanly(folder):
        assert row["cut"] == []
    for cut in row["cut"]:
        assert list(cut) == ["file", "offset", "bytes", "why"]
        assert (store / cut["file"]).is_relative_to(store)
    assert not (store / "abort").exists()
    assert commands.rows("dump", store) == log_rows(folder)


@stores
def test_recovering_twice_cuts_nothing_more(folder: Path, store_copy: StoreCopy, commands: Commands) -> None:
    store = store_copy(folder)
    commands.run("recover", store)
    before = contents(store)
    status, out, _ = commands.run("recover", store)
    assert status == 0
    assert json.loads(out[0])["cut"] == []
    after = contents(store)
    assert {name for name in before if before[name] != after.get(name)} <= {"checkpoint", "librmq/closed.json"}
    assert after.keys() == before.keys()


@stores
def test_broker_conf(folder: Path, commands: Commands) -> None:
    status, out, err = commands.run("broker-conf", folder / "store")
    assert (status, err) == (0, "")
    told = dict(line.split("=", 1) for line in out)
    (config,) = rows(folder, "config")
    assert told["mappedFileSizeCommitLog"] == str(config["commitlog_file_size"])
    assert told["mappedFileSizeConsumeQueue"] == str(config["consumequeue_file_size"])
    assert told["enableConsumeQueueExt"] == json.dumps(config["enable_consumequeue_ext"])
    assert told["maxHashSlotNum"] == str(config["max_hash_slot_num"])
    assert told["maxIndexNum"] == str(config["max_index_num"])
    assert told["messageDelayLevel"] == config["message_delay_level"]


# --- settings


@stores
def test_settings_may_be_given_as_the_config_row(
    folder: Path, settled: Path, commands: Commands, tmp_path: Path
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(rows(folder, "config")[0]))
    assert commands.rows("dump", settled, "--config", file) == log_rows(folder)
    assert commands.rows("queues", settled, "--config", file) == queue_rows(folder)


@stores
@pytest.mark.parametrize("command", ["dump", "queues", "verify", "recover", "load"])
def test_settings_that_disagree_with_the_files_are_bad_input(
    folder: Path, store_copy: StoreCopy, commands: Commands, tmp_path: Path, command: str
) -> None:
    store = store_copy(folder)
    before = contents(store)
    file = tmp_path / "config.json"
    row = dict(rows(folder, "config")[0])
    row["commitlog_file_size"] *= 2
    file.write_text(json.dumps(row))
    status, out, err = commands.run(command, store, "--config", file)
    assert (status, out) == (2, [])
    assert "commitlog_file_size" in err
    assert contents(store) == before
