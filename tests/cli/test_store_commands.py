"""Commands that read whole stores: refusals, and messages about damage."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from librmq import Broker, ManualRunner, Producer
from librmq.cli import main
from tests.budget import many
from tests.conftest import Run, StoreCopy
from tests.reference import existing, rows

LOG = f"commitlog/{0:020d}"


@pytest.fixture
def store() -> Path:
    """Return the store of ``store-basic``; tests only read it."""
    return existing("store-basic", "store")


@pytest.fixture
def copy(store_copy: StoreCopy) -> Path:
    """Return a copy of ``store-basic`` that the test may change."""
    return store_copy("store-basic")


# --- broker-conf


def test_broker_conf_counts_what_waits_in_the_timer(tmp_path: Path, run_lines: Run) -> None:
    """A broker of 4.9 would not deliver it."""
    with Broker.open(tmp_path, runner=ManualRunner()) as broker, Producer(broker, "p") as producer:
        producer.send("reminders", b"level", delay=10)
    status, out, err = run_lines("broker-conf", tmp_path)
    assert (status, err) == (0, "")
    assert any("RocketMQ 4.9 delivers no message that waits" in line for line in out)
    with Broker.open(tmp_path, runner=ManualRunner()) as broker, Producer(broker, "p") as producer:
        for delay in (37, 38):
            producer.send("reminders", b"timer", delay=delay)
    status, _, err = run_lines("broker-conf", tmp_path)
    assert status == 0
    assert "2 messages wait in the timer (librmq pending), and RocketMQ 4.9 would not deliver them" in err


# --- queue


@pytest.mark.parametrize(
    ("topic", "queue_id", "said"),
    [
        ("TopicTest", "4", "unknown queue: there is no queue 4 of topic 'TopicTest'; its queues are 0-3,9"),
        ("NoSuchTopic", "0", "no queue 0 of topic 'NoSuchTopic'; librmq topics lists the topics"),
        ("../TopicTest", "0", "unknown queue"),
        ("TopicTest", "x", "argument ID: expected a whole number, found 'x'"),
        ("TopicTest", "٣", "argument ID: expected"),
        ("TopicTest", "99999999999999999999", "argument ID: expected"),
    ],
)
def test_unknown_queues(run: Run, store: Path, topic: str, queue_id: str, said: str) -> None:
    status, printed, err = run("queue", store, topic, queue_id)
    assert (status, printed) == (2, [])
    assert said in err


# --- query


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "expected either --topic and --key, or --id"),
        (["--topic", "T", "--key", "k", "--id", "x"], "expected either"),
        (["--key", "k"], "needs both"),
        (["--topic", "T"], "needs both"),
        (["--topic", "T", "--key", ""], "needs both"),
        (["--topic", "T", "--key", "k", "--begin", "soon"], "not a time"),
        (["--topic", "T", "--key", "k", "--max", "0"], "--max"),
        (["--topic", "T", "--key", "k", "--max", "many"], "--max"),
        (["--id", ""], "malformed id"),
        (["--id", "two words"], "malformed id"),
        (["--id", "a\x1bb"], "malformed id"),
        (["--id", "7F00000100002A9F00000000000000001"], "malformed id: 33 hex digits"),
        (["--id", "0" * 57], "malformed id: 57 hex digits"),
    ],
)
def test_bad_queries(run: Run, store: Path, words: list[str], said: str) -> None:
    status, printed, err = run("query", store, *words)
    assert (status, printed) == (2, [])
    assert said in err


def test_a_query_is_bounded_in_time_and_number(run: Run, store: Path) -> None:
    asked = [row for row in rows(existing("store-basic"), "index_query") if len(row["query_message_phys"]) > 2]
    words = ["query", store, "--topic", asked[0]["topic"], "--key", asked[0]["key"]]
    everything = run(*words)[1]
    assert len(run(*words, "--max", "1")[1]) == 1
    assert run(*words, "--begin", "1970-01-01T00:00:00Z", "--end", "9999-01-01T00:00:00Z")[1] == everything
    assert run(*words, "--end", "1970-01-02T00:00:00Z")[1] == []


# --- ask

GET = {"type": "get_message", "topic": "TopicTest", "queue_id": 0, "offset": 0}


def test_missing_fields_of_a_query_have_defaults(run: Run, store: Path) -> None:
    questions = [
        GET,
        {"type": "index_query", "topic": "TopicTest", "key": "zp1Axdzf"},
        {"type": "offset_by_time", "topic": "TopicTest", "queue_id": 0, "timestamps": []},
    ]
    status, answers, _ = run("ask", store, given="".join(json.dumps(row) + "\n" for row in questions))
    assert status == 0
    assert (answers[0]["max_msg_nums"], answers[0]["sub_expression"]) == (32, None)
    assert (answers[1]["max_num"], answers[1]["begin"], answers[1]["end"]) == (64, 0, (1 << 63) - 1)
    assert answers[2]["results"] == []


def test_an_unknown_queue_is_a_status(run: Run, store: Path) -> None:
    unknown = {"topic": "NoSuchTopic", "queue_id": 7}
    questions = [GET | unknown, {"type": "offset_by_time", "timestamps": [0, 1 << 62]} | unknown]
    status, answers, _ = run("ask", store, given="".join(json.dumps(row) + "\n" for row in questions))
    assert status == 0
    assert answers[0]["status"] in ("NO_MESSAGE_IN_QUEUE", "NO_MATCHED_LOGIC_QUEUE")
    assert (answers[0]["next_begin_offset"], answers[0]["max_offset"]) == (0, 0)
    assert answers[1]["results"] == [[0, 0], [1 << 62, 0]]
    assert answers[1]["earliest_message_time"] == -1


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "not JSON"),
        ('{"type": "what"}', "type: expected one of index_query, get_message, offset_by_time, found 'what'"),
        ('{"type": "get_message", "topic": "T", "queue_id": 0}', "offset is missing"),
        (json.dumps(GET | {"queue_id": "0"}), "queue_id: expected a whole number"),
        (json.dumps(GET | {"sub_expression": "||"}), "sub_expression: "),
        ('{"type": "index_query", "topic": "\\ud800", "key": "k"}', "surrogate"),
    ],
)
def test_a_malformed_question_ends_with_the_answers_before_it(run: Run, store: Path, line: str, said: str) -> None:
    good = json.dumps(GET)
    status, answers, err = run("ask", store, given=f"{good}\n{good}\n{line}\n{good}\n")
    assert (status, len(answers)) == (2, 2)
    assert err.startswith("librmq ask: line 3: ")
    assert said in err


@pytest.mark.parametrize("most", [0, -1, 1 << 40])
@pytest.mark.parametrize("queue_offset", [-1, -(1 << 63), (1 << 63) - 1])
def test_extreme_numbers_are_answered(run: Run, store: Path, most: int, queue_offset: int) -> None:
    questions = [
        GET | {"offset": queue_offset, "max_msg_nums": most},
        GET | {"max_msg_nums": most, "sub_expression": "TagA"},
        GET | {"queue_id": queue_offset},
        {"type": "index_query", "topic": "TopicTest", "key": "zp1Axdzf", "max_num": most, "begin": queue_offset},
        {"type": "offset_by_time", "topic": "TopicTest", "queue_id": 0, "timestamps": [queue_offset]},
    ]
    status, answers, err = run("ask", store, given="".join(json.dumps(row) + "\n" for row in questions))
    assert (status, len(answers), err) == (0, len(questions), "")


# --- verify


def test_damage_is_reported_with_its_place(run: Run, copy: Path) -> None:
    data = bytearray((copy / LOG).read_bytes())
    data[88] ^= 1
    (copy / LOG).write_bytes(data)
    status, printed, _ = run("verify", copy)
    assert status == 1
    (row,) = printed
    assert (row["type"], row["sound"]) == ("verify", False)
    assert list(row) == ["type", "sound", "damage", "recoverable"]
    first = row["damage"][0]
    assert list(first) == ["file", "offset", "kind", "what"]
    assert (first["file"], first["offset"], first["kind"]) == (LOG, 0, "checksum")


def test_an_abort_marker_alone_is_reported_and_sound(run: Run, copy: Path) -> None:
    (copy / "abort").write_bytes(b"")
    status, printed, err = run("verify", copy)
    assert (status, printed) == (0, [{"type": "verify", "sound": True, "damage": [], "recoverable": []}])
    assert "abort" in err


def test_a_folder_that_is_not_a_queue_is_damage(run: Run, copy: Path) -> None:
    (copy / "consumequeue" / ("t" * 128) / "0").mkdir(parents=True)
    status, printed, _ = run("verify", copy)
    assert status == 1
    assert [one["kind"] for one in printed[0]["damage"]] == ["name"]
    assert printed[0]["damage"][0]["file"] == f"consumequeue/{'t' * 128}"


# --- paths without a store

ON_STORES = ("dump", "queues", "queue", "query", "ask", "verify", "recover", "broker-conf")
MORE = {"queue": ["T", "0"], "query": ["--id", "x"]}


@pytest.mark.parametrize("command", ON_STORES)
def test_folders_that_are_not_stores(run: Run, tmp_path: Path, command: str) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"")
    empty = tmp_path / "empty"
    empty.mkdir()
    for path in (file, empty, tmp_path / "absent"):
        status, printed, err = run(command, path, *MORE.get(command, ()))
        assert (status, printed, err.count("\n")) == (2, [], 1)
    assert sorted(tmp_path.iterdir()) == [empty, file]


@pytest.mark.parametrize("command", [*ON_STORES, "load"])
def test_a_log_of_dledger_is_refused_by_name(run: Run, tmp_path: Path, command: str) -> None:
    (tmp_path / "commitlog").mkdir()
    (tmp_path / "dledger-n0" / "data").mkdir(parents=True)
    status, printed, err = run(command, tmp_path, *MORE.get(command, ()))
    assert (status, printed) == (2, [])
    assert "DLedger" in err


# --- files of a wrong length


@many
@pytest.mark.parametrize("command", ["queues", "ask", "verify"])
@pytest.mark.parametrize("length", [0, 1, 100])
@pytest.mark.parametrize("kind", ["commitlog", "consumequeue", "index"])
def test_a_file_of_another_length_is_damage(run: Run, copy: Path, command: str, length: int, kind: str) -> None:
    file = sorted(path for path in (copy / kind).rglob("*") if path.is_file())[-1]
    file.write_bytes(file.read_bytes()[:length])
    status, _, err = run(command, copy, given=json.dumps(GET))
    assert status == 1
    if command != "verify":
        assert str(file) in err


def test_recover_removes_files_of_length_zero(run: Run, copy: Path) -> None:
    (copy / "abort").write_bytes(b"")
    ahead = copy / "commitlog" / f"{5 * 65536:020d}"
    ahead.write_bytes(b"")
    for command in ("queues", "lag", "groups", "dump"):
        status, _, err = run(command, copy)
        assert (status, err) == (0, "")
    status, printed, _ = run("recover", copy)
    assert status == 0
    assert printed[0]["cut"][0]["file"] == f"commitlog/{ahead.name}"
    assert not ahead.exists()
    assert run("verify", copy)[0] == 0


@pytest.mark.parametrize("options", [(), ("--dry-run",)])
def test_recover_of_a_store_that_is_open_elsewhere_is_refused(run: Run, copy: Path, options: tuple[str, ...]) -> None:
    from librmq.store import MessageStore

    with MessageStore.open(str(copy)):
        status, printed, err = run("recover", *options, copy)
        assert (status, printed) == (2, [])
        assert "locked by" in err
        assert run("queues", copy)[0] == 0


# --- load


PUT = {"op": "put", "topic": "T", "queueId": 0, "body": "text"}


def test_load_makes_a_store_with_the_settings_given(run: Run, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(rows(existing("store-basic"), "config")[0]))
    store = tmp_path / "new"
    given = f"{json.dumps(PUT)}\n\n{json.dumps(PUT)}\n"
    status, printed, err = run("load", store, "--config", config, given=given)
    assert (status, err) == (0, "")
    assert [(row["op"], row["status"], row["queue_offset"]) for row in printed] == [
        ("put", "PUT_OK", n) for n in (0, 1)
    ]
    assert (store / LOG).stat().st_size == 65536
    assert not (store / "abort").exists()
    assert [row["max_offset"] for row in run("queues", store)[1]] == [2]


@pytest.mark.parametrize("line", ["{", "[]", '{"op": "what"}', '{"op": "put", "topic": "T", "queueId": 0}', "\xff"])
def test_load_ends_at_an_invalid_line(run: Run, copy: Path, line: str) -> None:
    given = f"{json.dumps(PUT)}\n{line}\n{json.dumps(PUT)}\n".encode("latin-1")
    status, printed, err = run("load", copy, given=given)
    assert (status, len(printed)) == (2, 1)
    assert err.startswith("librmq load: line 2: ")
    assert not (copy / "abort").exists()
    assert run("verify", copy)[0] == 0


def test_an_interruption_leaves_a_closed_store(run: Run, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lines() -> Iterator[bytes]:
        yield json.dumps(PUT).encode()
        raise KeyboardInterrupt

    monkeypatch.setattr("tests.cases.load.standard_input", lines)
    status, printed, err = run("load", copy)
    assert (status, len(printed), err) == (130, 1, "interrupted\n")
    assert not (copy / "abort").exists()


@pytest.mark.slow
def test_tables_of_every_command(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    for words in (["dump"], ["queues"], ["queue", "TopicTest", "0"], ["query", "--topic", "TopicTest", "--key", "Aa"]):
        assert main(["--format", "table", words[0], str(store), *words[1:]]) == 0
        shown = capsys.readouterr()
        assert shown.err == ""
        assert "─" in shown.out
        assert not shown.out.startswith("{")


def test_a_copy_behaves_the_same(run: Run, store: Path, copy: Path) -> None:
    moved = copy.with_name("moved 订单")
    shutil.move(copy, moved)
    assert run("queues", moved) == run("queues", store)
