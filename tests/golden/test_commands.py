"""Output of commands compared with RocketMQ's reports about the same stores; the order of fields matters."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from librmq.config import StoreConfig
from librmq.errors import CorruptionError
from librmq.files._disk import DiskFiles
from librmq.store.format.directory import infer_config
from tests.budget import examples, many
from tests.conftest import Run, StoreCopy
from tests.golden.deviations import DEVIATIONS, answer_deviation, entry_deviations
from tests.golden.recorded import contents, left_sound
from tests.reference import Row, existing, jsonl, rows, store_folders

stores = pytest.mark.parametrize("folder", store_folders())

QUESTION_FIELDS = {
    "index_query": ("type", "topic", "key", "max_num", "begin", "end"),
    "get_message": ("type", "topic", "queue_id", "offset", "max_msg_nums", "sub_expression"),
    "offset_by_time": ("type", "topic", "queue_id"),
}


class Commands:
    """Runs commands in this process, on stores with ``settings`` unless a call passes others."""

    def __init__(self, call: Run) -> None:
        self._call = call
        self.settings: list[str] = []

    def run(self, *words: str | Path, rows_in: Iterable[Row] = ()) -> tuple[int, list[str], str]:
        """Return exit status, lines of standard output, and standard error."""
        return self._call(*words, *([] if "--config" in words else self.settings), given=list(rows_in))

    def rows(self, *words: str | Path, rows_in: Iterable[Row] = ()) -> list[str]:
        """Return the lines of a command that succeeds, in the form of `lines`."""
        status, out, err = self.run(*words, rows_in=rows_in)
        assert status == 0
        assert err == "" or "as many as --max allows" in err
        return lines(json.loads(line) for line in out)


@pytest.fixture
def commands(run_lines: Run, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Commands:
    """Return commands with the settings of the current store, unless its files show them."""
    commands = Commands(run_lines)
    if "folder" in request.fixturenames:
        folder: Path = request.getfixturevalue("folder")
        (row,) = rows(folder, "config")
        if StoreConfig.from_row(row) != inferred(folder / "store"):
            file = tmp_path_factory.mktemp("settings") / "config.json"
            file.write_text(json.dumps(row))
            commands.settings = ["--config", str(file)]
    return commands


def inferred(store: Path) -> StoreConfig | None:
    """Return the settings that a store's files show, or None if they are damaged."""
    try:
        return infer_config(str(store), DiskFiles())
    except CorruptionError:
        return None


def lines(rows_: Iterable[Row]) -> list[str]:
    """Return rows in a form in which the order of fields matters."""
    return [json.dumps(row, ensure_ascii=False) for row in rows_]


@pytest.fixture
def settled(folder: Path, store_copy: StoreCopy, commands: Commands) -> Path:
    """Return the store of a golden folder if it is sound, else a recovered copy."""
    if left_sound(folder):
        return folder / "store"
    store = store_copy(folder)
    status, _, _ = commands.run("recover", store)
    assert status == 0
    return store


def log_rows(folder: Path) -> list[str]:
    return lines(row for row in jsonl(folder / "expected.jsonl") if row["type"] in ("message", "blank"))


def queue_rows(folder: Path) -> list[str]:
    """Return the rows of queues that have files.

    RocketMQ lists delay queues without files, and may create some at start.
    """
    return lines(row for row in rows(folder, "store")[1]["queues"] if row["max_offset"])


def queues_with_entries(folder: Path) -> list[tuple[str, int]]:
    """Return topic and id of each queue that has entries in the reports."""
    return [(row["topic"], row["queue_id"]) for row in map(json.loads, queue_rows(folder))]


# --- reading


@stores
@pytest.mark.parametrize("words", [[], ["--all"]])
def test_dump(folder: Path, settled: Path, commands: Commands, words: list[str]) -> None:
    assert commands.rows("dump", *words, settled) == log_rows(folder)


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
    for topic, queue_id in queues_with_entries(folder):
        printed = commands.rows("queue", settled, topic, str(queue_id))
        entry_deviations(folder, (topic, queue_id), [json.loads(line) for line in printed])
        recorded = lines(row for row in rows(folder, "cq") if (row["topic"], row["queue_id"]) == (topic, queue_id))
        if left_sound(folder):
            assert printed == recorded


def spread(rows_: Sequence[Row], count: int) -> Sequence[Row]:
    return rows_[:: max(1, len(rows_) // count)]


@stores
def test_query_by_key(folder: Path, settled: Path, commands: Commands) -> None:
    messages = {row["phys"]: row for row in rows(folder, "message")}
    asked = [row for row in rows(folder, "index_query") if row["begin"] >= 0 and row["key"] and row["topic"]]
    for row in spread(asked, examples(40)):
        words = ["--topic", row["topic"], f"--key={row['key']}", "--max", str(row["max_num"])]
        times = ["--begin", str(row["begin"]), "--end", str(row["end"])]
        printed = commands.rows("query", settled, *words, *times)
        if printed != lines(messages[place] for place in row["query_message_phys"]):
            places = [json.loads(line)["phys"] for line in printed]
            assert printed == lines(messages[place] for place in places)
            answer = {**row, "phys_offsets": places, "query_message_phys": places}
            assert answer_deviation(folder, row, answer, set()) == "keys"


@stores
def test_query_by_offset_id(folder: Path, settled: Path, commands: Commands) -> None:
    for row in spread(rows(folder, "message"), examples(20)):
        assert commands.rows("query", settled, "--id", row["msg_id"]) == lines([row])
        assert commands.rows("query", settled, "--id", row["msg_id"].lower()) == lines([row])


@pytest.mark.slow
@stores
def test_query_by_unique_id(folder: Path, settled: Path, commands: Commands) -> None:
    by_id: dict[str, list[Row]] = {}
    for row in rows(folder, "message"):
        if row["dispatch_uniq_key"] and row["sys_flag"] & 12 != 12:  # rollbacks are not indexed
            by_id.setdefault(row["dispatch_uniq_key"], []).append(row)
    for unique_id in [*list(by_id)[:: max(1, len(by_id) // 20)], *[key for key in by_id if len(by_id[key]) > 1][:20]]:
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
    assert len(answers) == len(expected)
    differing = [
        (row, json.loads(answer)) for answer, row in zip(answers, expected, strict=True) if answer != lines([row])[0]
    ]
    for row, answer in differing:
        names: set[str] = set()
        if row["type"] != "index_query":
            queue = row["topic"], row["queue_id"]
            printed = commands.rows("queue", settled, row["topic"], str(row["queue_id"]))
            names = entry_deviations(folder, queue, [json.loads(line) for line in printed])
        assert answer_deviation(folder, row, answer, names) in DEVIATIONS


@pytest.mark.slow
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


# --- verifying and recovering


@stores
def test_verify(folder: Path, settled: Path, commands: Commands) -> None:
    status, out, _ = commands.run("verify", settled)
    assert (out, status) == (['{"type":"verify","sound":true,"damage":[],"recoverable":[]}'], 0)


@stores
def test_recover(folder: Path, store_copy: StoreCopy, commands: Commands) -> None:
    store = store_copy(folder)
    status, out, err = commands.run("recover", store)
    assert (status, err) == (0, "")
    (row,) = map(json.loads, out)
    expected = rows(folder, "store")[0]
    for name in ("type", "phase", "min_phy_offset", "max_phy_offset", "flushed_where"):
        assert row[name] == expected[name]
    assert list(row["topic_queue_table"]) == sorted(row["topic_queue_table"])
    deviating: set[str] = set()
    for topic, queue_id in queues_with_entries(folder):
        printed = commands.rows("queue", store, topic, str(queue_id))
        deviating |= entry_deviations(folder, (topic, queue_id), [json.loads(line) for line in printed])
    if "rebuilt" not in deviating:
        after_start = rows(folder, "store")[1]
        assert lines(row["queues"]) == queue_rows(folder)
        assert row["topic_queue_table"] == {name: n for name, n in after_start["topic_queue_table"].items() if n}
    if left_sound(folder):
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


@many
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
