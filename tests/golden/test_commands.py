"""Output of commands compared with RocketMQ's reports about the same stores; the order of fields matters."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

import pytest

from librmq.config import StoreConfig
from librmq.errors import CorruptionError
from librmq.files.disk import DiskFiles
from librmq.store.format.directory import infer_config
from tests.budget import examples
from tests.conftest import Run, StoreCopy
from tests.golden.recorded import contents
from tests.reference import Row, existing, jsonl, rows, store_folders

stores = pytest.mark.parametrize("folder", store_folders())

FILLER = 0x7FFFFFFF
"""RocketMQ puts entries of this size before the start of a queue that begins above 0."""

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
        assert (status, err) == (0, "")
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


def left_sound(folder: Path) -> bool:
    """Return whether the store was closed cleanly and has not been damaged since."""
    return not rows(folder, "config")[0]["abort_file_present"] and not (folder / "mutation.json").exists()


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


@cache
def entries(folder: Path) -> dict[tuple[str, int], list[Row]]:
    """Return the correct entries of each queue, with the tags codes of their records.

    RocketMQ keeps an entry when its record changes unnoticed. If RocketMQ lost the entries of a queue and wrote filler
    instead, the queue is None, because librmq still has them.
    """
    codes = {row["phys"]: (row["dispatch_tags_code"], row["dispatch_tags_code_hex"]) for row in rows(folder, "message")}
    found: dict[tuple[str, int], list[Row]] = {}
    for row in rows(folder, "cq"):
        if "ext" not in row and row["phys"] in codes:
            code, text = codes[row["phys"]]
            row = {**row, "tags_code": code, "tags_code_hex": text}
        found.setdefault((row["topic"], row["queue_id"]), []).append(row)
    return found


def is_whole(folder: Path, topic: str, queue_id: int) -> bool:
    """Return whether RocketMQ has all entries of a queue, without filler or gaps."""
    of_queue = entries(folder).get((topic, queue_id), [])
    return all(row["size"] != FILLER for row in of_queue) and len(of_queue) == sum(
        queue["max_offset"] - queue["min_offset"]
        for queue in rows(folder, "store")[1]["queues"]
        if (queue["topic"], queue["queue_id"]) == (topic, queue_id)
    )


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
    for line in queue_rows(folder):
        queue = json.loads(line)
        where = queue["topic"], queue["queue_id"]
        printed = commands.rows("queue", settled, *map(str, where))
        if is_whole(folder, *where):
            assert printed == lines(entries(folder)[where])
        else:
            assert not left_sound(folder)
            assert set(printed) >= set(lines(row for row in entries(folder)[where] if row["size"] != FILLER))


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
        wanted = lines(messages[place] for place in row["query_message_phys"])
        if left_sound(folder):
            assert printed == wanted
        elif is_of_all_times(folder, row) and len(printed) < row["max_num"]:
            assert set(printed) >= set(wanted)


def is_of_all_times(folder: Path, row: Row) -> bool:
    """Return whether an index query has no bounds. A recovery of 4.9 rounds times again, and may lose older keys."""
    return int(row["begin"]) <= 0 and int(row["end"]) > rows(folder, "message")[-1]["store_timestamp"]


@stores
def test_query_by_offset_id(folder: Path, settled: Path, commands: Commands) -> None:
    for row in spread(rows(folder, "message"), examples(20)):
        assert commands.rows("query", settled, "--id", row["msg_id"]) == lines([row])
        assert commands.rows("query", settled, "--id", row["msg_id"].lower()) == lines([row])


@pytest.mark.thorough
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
    if left_sound(folder):
        assert answers == lines(expected)
        return
    assert len(answers) == len(expected)
    there = {row["phys"] for row in rows(folder, "message")}
    for answer, wanted in zip(map(json.loads, answers), expected, strict=True):
        if wanted["type"] == "index_query":  # a recovery of RocketMQ indexes keys a second time, librmq only once
            if is_of_all_times(folder, wanted) and len(wanted["phys_offsets"]) < wanted["max_num"]:
                for name in ("phys_offsets", "query_message_phys"):
                    sound = [place for place in dict.fromkeys(wanted[name]) if place in there]
                    assert [place for place in dict.fromkeys(answer[name]) if place in sound] == sound
        elif is_whole(folder, wanted["topic"], wanted["queue_id"]) and not is_of_what_is_gone(folder, wanted):
            assert lines([answer]) == lines([wanted])


def is_of_what_is_gone(folder: Path, row: Row) -> bool:
    """Return whether an answer depends on messages of a queue whose files were deleted.

    The times of such files come from the file system, and the time at 0 is that of the first remaining file.
    """
    of_queue = entries(folder).get((row["topic"], row["queue_id"]), [])
    begin = rows(folder, "store")[1]["min_phy_offset"]
    return bool(of_queue) and of_queue[0]["phys"] < begin


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
    assert list(row["topic_queue_table"]) == sorted(row["topic_queue_table"])
    if all(is_whole(folder, *where) for where in entries(folder)):
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
