"""Commands over stores that lack files of the log, or whose log is damaged in its middle."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from librmq import Broker, BrokerConfig, CorruptionError, ManualClock, Message, MessageStore, StoreConfig
from librmq.columns import reader
from librmq.message.record import QUEUE_ID_AT
from librmq.store import Wholeness
from tests.budget import many, some
from tests.cli.stand import Shell
from tests.stores import START_MS

CONFIG = StoreConfig.tiny(commitlog_file_size=4096, consumequeue_file_size=8 * 20)
MESSAGES = 140


def fill(path: Path, config: StoreConfig) -> Path:
    """Store 70 messages in each of two queues, of which the group ``G`` has consumed none."""
    with Broker.open(path, BrokerConfig(), store_config=config) as broker:
        broker.create_topic("T", 2)
        broker.set_group("G")
        broker.reset_group("G", "T", "begin")
        for number in range(MESSAGES):
            broker.store.append(Message("T", b"body %03d" % number, keys="k"), number % 2)
    return path


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the store in files of two sizes: tests copy them."""
    folder = tmp_path_factory.mktemp("damaged-stores")
    fill(folder / "small-files", CONFIG)
    fill(folder / "one-file", StoreConfig.tiny())
    return folder


@pytest.fixture
def orders(filled: Path, shell: Shell) -> Path:
    """Return a closed store with several files of each kind."""
    return shutil.copytree(filled / "small-files", shell.folder / "orders")


def remove_first_files(path: Path, count: int) -> int:
    """Remove the first files of the log, and return how many messages that leaves."""
    for file in sorted((path / "commitlog").iterdir())[:count]:
        file.unlink()
    return sum(file.read_bytes().count(b"body ") for file in (path / "commitlog").iterdir())


def kill(path: Path) -> None:
    """Leave a closed store as a kill after its first opening does: nothing notes what it had at a close."""
    (path / "abort").touch()
    (path / "librmq" / "closed.json").unlink()


def kinds(shell: Shell, *words: object) -> dict[str, dict[str, object]]:
    return {row["finding"]: row for row in shell("diagnose", *words).rows}


@pytest.mark.parametrize("appends", [False, True])
def test_what_a_close_noted_counts_after_a_killed_opening(shell: Shell, orders: Path, appends: bool) -> None:
    (orders / "librmq" / "flushed.json").unlink(missing_ok=True)
    broker = Broker.open(orders, store_config=CONFIG)
    broker.create_topic("Late", 1)
    if appends:
        broker.store.append(Message("Late", b"x"))
    broker.abandon()
    remove_first_files(orders, 1)
    for command in ("count", "topics", "diagnose", "verify", "can-start", "export -o out.jsonl"):
        answer = shell(command.split()[0], orders, *command.split()[1:])
        assert (answer.status, "the log began at 0 at the last close" in answer.said + answer.out) == (1, True), command


@pytest.mark.parametrize(("missing", "crashed"), [(1, False), (2, True), (3, False)])
def test_messages_in_missing_log_files_do_not_count(shell: Shell, orders: Path, missing: int, crashed: bool) -> None:
    left = remove_first_files(orders, missing)
    assert 0 < left < MESSAGES
    if crashed:
        (orders / "abort").touch()
        shutil.rmtree(orders / "librmq")  # it knows where the log began
    assert sum(row["lag"] for row in shell("lag", orders).rows) == left
    assert [row["messages"] for row in shell("topics", orders).rows if row["topic"] == "T"] == [left]
    assert shell("stats", orders).rows[0]["messages"] == left
    assert shell("count", orders).rows == [
        {"topic": "T", "messages": left, "bytes": shell("count", orders).rows[0]["bytes"]}
    ]
    for check in ("--verify", "--no-verify"):
        found = kinds(shell, orders, check)
        assert found["expired-unread"]["evidence"] == {"expired": MESSAGES - left}
        assert found["missing-log-files"]["severity"] == ("warning" if crashed else "error")
        assert "damage" not in found


def test_verify_says_that_the_log_lacks_its_begin(shell: Shell, orders: Path) -> None:
    remove_first_files(orders, 1)
    answer = shell("verify", orders)
    assert (answer.status, [one["offset"] for one in answer.rows[0]["damage"]]) == (1, [0])
    assert shell("recover", orders).status == 0
    assert shell("verify", orders).status == 0


def test_a_queue_whose_messages_are_all_gone_is_empty(shell: Shell, orders: Path) -> None:
    with Broker.open(orders, store_config=CONFIG) as broker:
        broker.store.append(Message("Late", bytes(3000)))
        broker.store.append(Message("Late", bytes(3000)))
    files = sorted((orders / "commitlog").iterdir())  # the last may be an empty one, prepared in the background
    remove_first_files(orders, next(index for index, file in enumerate(files) if b"Late" in file.read_bytes()))
    assert {row["lag"] for row in shell("lag", orders).rows} == {0}
    assert kinds(shell, orders)["expired-unread"]["evidence"] == {"expired": MESSAGES}
    with Broker.open(orders, store_config=CONFIG) as broker:
        broker.store.append(Message("T", b"new"), 1)
    assert sum(row["lag"] for row in shell("lag", orders).rows) == 1


@pytest.mark.parametrize("is_killed", [False, True])
def test_retention_leaves_no_missing_files(shell: Shell, orders: Path, is_killed: bool) -> None:
    config = replace(CONFIG, max_total_size=2 * 4096, keep_unconsumed=False)
    clock = ManualClock(START_MS)
    with MessageStore.open(orders, config, clock=clock, background=False) as store:
        begin = store.log.begin
        store.append(Message("T", b"new"))
        store.run_due(clock.now_ms() + 86_400_000)
        assert store.log.begin > begin
        if is_killed:
            store.abandon()
    assert "missing-log-files" not in kinds(shell, orders)


@pytest.mark.parametrize("lost", [0, 2])
def test_keys_that_the_index_has_lost_are_found(shell: Shell, tmp_path: Path, lost: int) -> None:
    """A broker's recovery deletes index files, and indexes the log from a later place on."""
    path = tmp_path / "keys"
    with MessageStore.open(path, StoreConfig.tiny(max_index_num=16), clock=ManualClock(START_MS)) as store:
        for number in range(60):
            store.append(Message("T", b"x", keys=f"k{number}"))
    assert "missing-keys" not in kinds(shell, path, "--no-verify")
    sorted((path / "index").iterdir())[lost].unlink()
    shutil.rmtree(path / "librmq")  # which says how librmq left the index
    key = f"k{15 * lost}"
    assert shell("query", path, "--topic", "T", "--key", key).rows == []
    finding = kinds(shell, path, "--no-verify")["missing-keys"]
    assert "librmq recover" in str(finding["next"])
    assert "damage" in kinds(shell, path, "--verify")
    assert shell("recover", path).status == 0
    assert kinds(shell, path, "--no-verify").keys().isdisjoint({"missing-keys", "damage"})
    assert len(shell("query", path, "--topic", "T", "--key", key).rows) == 1


# ------------------------------------------------------------------------------------------- a log that is cut short


@pytest.fixture(params=["crashed", "closed by a broker"])
def damaged(request: pytest.FixtureRequest, filled: Path, shell: Shell) -> tuple[Path, int]:
    """Return a store whose 42nd record is damaged, and the physical offset of that record."""
    path = shutil.copytree(filled / "one-file", shell.folder / "damaged")
    assert shell("reset", path, "--group", "G", "--topic", "T", "--to", "end").status == 0
    if request.param == "crashed":
        (path / "abort").touch()
    else:
        (path / "librmq" / "closed.json").unlink()
    log = min((path / "commitlog").iterdir())
    raw = log.read_bytes()
    log.write_bytes(raw.replace(b"body 041", b"bodi 041"))
    with MessageStore.open(path, read_only=True) as store:
        return path, store.log.end


READS = [
    ["topics"], ["stats"], ["groups"], ["lag"], ["lag", "--by", "group"], ["count"], ["count", "--by", "tag"],
    ["count", "--grep", "body"], ["queues"], ["show"], ["show", "--topic", "T"], ["tail", "--topic", "T"],
    ["diagnose", "--design"], ["pending"], ["query", "--topic", "T", "--key", "k"], ["story", "k"], ["dead-letters"],
]  # fmt: skip


def test_reads_say_that_sound_records_follow(shell: Shell, damaged: tuple[Path, int]) -> None:
    path, end = damaged
    recovered = shutil.copytree(path, path.with_name("recovered"))
    shell("recover", recovered)
    for words in some(READS):
        answer = shell(words[0], path, *words[1:])
        assert answer.status == 1, words
        assert f"the log ends at {end}; " in answer.said, words
        assert "bytes with sound records follow" in answer.said, words
        accepted = shell(words[0], path, *words[1:], "--as-recovered")
        assert (accepted.status, accepted.rows) == (0, answer.rows), words
        if words[0] != "stats":
            assert shell(words[0], recovered, *words[1:]).rows == answer.rows, words


def test_an_export_fails_unless_the_end_is_accepted(shell: Shell, damaged: tuple[Path, int]) -> None:
    path, end = damaged
    for form in ("jsonl", "csv", "parquet"):
        answer = shell("export", path, "-o", f"out.{form}", "--format", form)
        assert (answer.status, answer.out) == (1, "")
        assert f" {end}: " in answer.said
        (row,) = shell("export", path, "-o", f"out.{form}", "--format", form, "--as-recovered").rows
        assert (row["rows"], row["skipped"]) == (41, True)


def test_early_damage_ends_exports_and_is_a_finding(filled: Path, shell: Shell) -> None:
    path = shutil.copytree(filled / "one-file", shell.folder / "damaged")
    log = min((path / "commitlog").iterdir())
    log.write_bytes(log.read_bytes().replace(b"body 041", b"bodi 041"))
    answer = shell("export", path, "-o", "out.jsonl")
    assert (answer.status, answer.out) == (1, "")
    assert "--as-recovered" in answer.said
    assert "PERMISSIVE" not in answer.said
    (row,) = shell("export", path, "-o", "out.jsonl", "--as-recovered").rows
    assert row["skipped"] is True
    assert row["rows"] == len(shell("show", path, "--as-recovered").rows) == 41
    (count,) = shell("count", path, "--by", "topic").rows  # reads no bodies, and queues lead to all messages
    (topic,) = [row for row in shell("topics", path).rows if row["topic"] == "T"]
    assert count["messages"] == topic["messages"] > 41
    answer = shell("diagnose", path, "--no-verify")
    assert answer.status == 1
    assert "damage" in [one["finding"] for one in answer.rows]


def test_a_report_counts_what_other_commands_count(shell: Shell, damaged: tuple[Path, int]) -> None:
    pytest.importorskip("jinja2")
    path, _ = damaged
    assert shell("report", path, "--out", "r.html").status == 1
    report = json.loads((shell.folder / "r.json").read_text())
    counts = {row["topic"]: row["messages"] for row in shell("topics", path, "--as-recovered").rows}
    assert {row["topic"]: row["messages"] for row in report["stores"][0]["topics"]} == counts


def test_a_dump_ends_there_too(shell: Shell, damaged: tuple[Path, int]) -> None:
    path, _ = damaged
    answer = shell("dump", path)
    assert (answer.status, len(answer.rows)) == (1, 41)
    accepted = shell("dump", path, "--as-recovered")
    assert (accepted.status, accepted.rows) == (0, answer.rows)


@pytest.mark.parametrize("check", ["--verify", "--no-verify"])
def test_diagnose_finds_it_without_reading_every_record(shell: Shell, damaged: tuple[Path, int], check: str) -> None:
    path, end = damaged
    found = kinds(shell, path, check)
    assert str(end) in str(found["damage"]["what"])
    assert "progress-beyond-end" not in found
    assert "salvage" in str(found["damage"]["next"])
    (*_, saved) = shell("salvage", path, "--into", "saved").rows
    assert saved["records"] == MESSAGES - 1
    assert shell("verify", "saved").status == 0


def test_a_torn_end_is_read_as_recovery_leaves_it(filled: Path, shell: Shell) -> None:
    path = shutil.copytree(filled / "one-file", shell.folder / "torn")
    kill(path)
    log = min((path / "commitlog").iterdir())
    raw = log.read_bytes()
    log.write_bytes(raw.replace(b"body 139", b"bodi 139"))
    for words in [*some(READS), ["export", "-o", "out.jsonl"]]:
        answer = shell(words[0], path, *words[1:])
        assert (answer.status, "sound records" in answer.said) == (0, False)
    assert shell("count", path).rows[0]["messages"] == MESSAGES - 1


@pytest.mark.parametrize(
    "garbage", [b"\xda" * 300, bytes(500) + b"late", b"\0\0\0\x6a\xda\xa3\x20\xa7torn"], ids=["bytes", "late", "torn"]
)
def test_bytes_behind_the_end_of_a_killed_store_are_its_end(filled: Path, shell: Shell, garbage: bytes) -> None:
    path = shutil.copytree(filled / "one-file", shell.folder / "torn")
    with MessageStore.open(path, read_only=True) as store:
        end = store.log.end
    log = min((path / "commitlog").iterdir())
    raw = log.read_bytes()
    log.write_bytes(raw[:end] + garbage + raw[end + len(garbage) :])
    assert "damage" in kinds(shell, path, "--verify")
    (path / "abort").touch()
    assert "damage" not in kinds(shell, path, "--verify")
    assert shell("extract", path, "-o", "small").rows[0]["messages"] == MESSAGES
    assert {shell(words[0], path, *words[1:]).status for words in some(READS)} == {0}


@pytest.mark.parametrize("command", ["dump", "show", "queues"])
def test_a_killed_store_of_one_file_says_which_queue_lacks_its_file(shell: Shell, orders: Path, command: str) -> None:
    kill(orders)
    assert shell(command, orders).status == 0
    file = min(path for path in (orders / "consumequeue").rglob("*") if path.is_file())
    file.unlink()
    answer = shell(command, orders)
    assert (answer.status, "librmq recover makes the file again" in answer.said) == (1, True)
    (verdict,) = shell("verify", orders).rows  # as the view says, although the next opening makes it again
    assert (verdict["sound"], [damage["file"] for damage in verdict["damage"]]) == (
        False,
        [str(file.relative_to(orders))],
    )


@pytest.mark.parametrize("kind", ["consumequeue", "index"])
def test_a_truncated_file_of_a_queue_or_index_is_made_again(shell: Shell, orders: Path, kind: str) -> None:
    whole = shell("lag", orders).rows
    file = min(path for path in (orders / kind).rglob("*") if path.is_file())
    file.write_bytes(file.read_bytes()[:50])
    answer = shell("lag", orders)
    assert answer.status == 1
    assert "librmq recover makes the file again" in answer.said
    assert "salvage" not in answer.said
    assert shell("recover", orders).status == 0
    assert shell("lag", orders).rows == whole


# --------------------------------------------------------------------------------------------- a log without its end


def remove_end(path: Path) -> int:
    """Remove the last log file with records, and prepared ones after it; return where the log ended."""
    with MessageStore.open(path, read_only=True) as store:
        end = store.log.end
    for file in (path / "commitlog").iterdir():
        if int(file.name) + CONFIG.commitlog_file_size >= end:
            file.unlink()
    return end


@pytest.mark.parametrize("writer", ["librmq", "a broker"])
def test_reads_say_that_queues_lead_beyond_the_log(shell: Shell, orders: Path, writer: str) -> None:
    if writer == "a broker":
        (orders / "librmq" / "closed.json").unlink()
    whole_end = remove_end(orders)
    for words in (*some(READS), ["dump"], ["dump", "--all"]):
        answer = shell(words[0], orders, *words[1:])
        assert answer.status == 1, words
        assert f"queues have entries up to {whole_end}, beyond the log's end: without " in answer.said
        accepted = shell(words[0], orders, *words[1:], "--as-recovered")
        assert (accepted.status, accepted.rows) == (0, answer.rows), words


def test_exports_and_findings_say_what_leads_beyond_the_log(shell: Shell, orders: Path) -> None:
    remove_end(orders)
    answer = shell("export", orders, "-o", "out.jsonl")
    assert (answer.status, answer.out) == (1, "")
    assert "beyond the log's end" in answer.said
    (export,) = shell("export", orders, "-o", "out.jsonl", "--as-recovered").rows
    assert export["skipped"] is True
    (count,) = shell("count", orders, "--as-recovered").rows
    assert 0 < export["rows"] == count["messages"] < MESSAGES
    assert "beyond the log's end" in str(kinds(shell, orders, "--no-verify")["damage"]["what"])
    assert shell("recover", orders).status == 0
    assert (shell("count", orders).status, shell("count", orders).rows) == (0, [count])


def test_a_report_says_that_queues_lead_beyond_the_log(shell: Shell, orders: Path) -> None:
    pytest.importorskip("jinja2")
    remove_end(orders)
    answer = shell("report", orders, "--out", "r.html")
    assert answer.status == 1
    assert "the numbers can leave out messages" in answer.said
    assert shell("report", orders, "--out", "r.html", "--as-recovered").status == 0
    report = json.loads((shell.folder / "r.json").read_text())
    assert report["stores"][0]["skipped"] is True
    assert "damage" in [finding["finding"] for finding in report["stores"][0]["findings"]]
    (topic,) = [row for row in shell("topics", orders, "--as-recovered").rows if row["topic"] == "T"]
    assert [row["messages"] for row in report["stores"][0]["topics"] if row["topic"] == "T"] == [topic["messages"]]


def test_a_log_without_its_queues_ends_without_a_word(shell: Shell, orders: Path) -> None:
    remove_end(orders)
    shutil.rmtree(orders / "consumequeue")
    (orders / "librmq" / "closed.json").unlink()
    (orders / "checkpoint").unlink()
    for words in (["dump"], ["show"]):
        answer = shell(words[0], orders, *words[1:])
        assert (answer.status, answer.said) == (0, "")


def test_a_killed_writer_leaves_queues_ahead_without_a_word(shell: Shell, orders: Path) -> None:
    remove_end(orders)
    kill(orders)
    (orders / "checkpoint").unlink()
    for command in ("lag", "dump", "show"):
        answer = shell(command, orders)
        assert (answer.status, answer.said) == (0, "")


# ------------------------------------------------------------------------------------------------------- snapshots


def test_a_snapshot_keeps_the_evidence_and_says_what_it_changed(filled: Path, shell: Shell) -> None:
    path = shutil.copytree(filled / "one-file", shell.folder / "orders")
    progress = path / "config" / "consumerOffset.json"
    progress.write_text('{"offsetTable":{"T@G":{0:5992,1:3}}}')
    (row,) = shell("snapshot", path, "closed").rows
    assert row["changed"] == []
    assert (shell.folder / "closed" / "config" / "consumerOffset.json").read_bytes() == progress.read_bytes()
    before, after = kinds(shell, path), kinds(shell, "closed")
    assert before["progress-beyond-end"]["evidence"] == after["progress-beyond-end"]["evidence"]

    (path / "abort").touch()
    queue = path / "consumequeue" / "T" / "0" / f"{0:020d}"
    raw = queue.read_bytes()
    queue.write_bytes(raw[: 65 * 20] + bytes(5 * 20) + raw[70 * 20 :])
    (row,) = shell("snapshot", path, "crashed").rows
    assert [one["file"] for one in row["changed"]] == [f"consumequeue/T/0/{0:020d}", "abort"]
    assert kinds(shell, "crashed")["progress-beyond-end"]["evidence"] == before["progress-beyond-end"]["evidence"]
    assert shell("verify", "crashed").status == 0


@pytest.fixture
def slow_orders(shell: Shell) -> Path:
    """Return a closed store like `orders` whose messages were stored one second apart."""
    clock, path = ManualClock(START_MS), shell.folder / "slow"
    with MessageStore.open(path, CONFIG, clock=clock, background=False) as store:
        for number in range(MESSAGES):
            store.append(Message("T", b"body %03d" % number, keys="k"), number % 2)
            clock.move_to(clock.now_ms() + 1000)
    return path


def lose_last_file(path: Path, how: str) -> None:
    last = max((path / "commitlog").iterdir())
    if how == "missing":
        last.unlink()
    else:
        last.write_bytes(bytes(last.stat().st_size if how == "zeros" else 0))


@pytest.mark.parametrize("how", ["missing", "zeros"])
def test_a_killed_store_is_short_of_what_its_checkpoint_covers(shell: Shell, slow_orders: Path, how: str) -> None:
    lose_last_file(slow_orders, how)
    kill(slow_orders)
    for command in ("count", "stats", "lag", "topics", "show", "dump", "pending"):
        answer = shell(command, slow_orders)
        assert answer.status == 1, (command, answer)
        assert "the checkpoint covers records up to" in answer.said


@many
@pytest.mark.parametrize("command", ["count", "lag", "stats", "show", "dump"])
def test_a_log_file_of_length_zero_is_as_none(shell: Shell, slow_orders: Path, command: str) -> None:
    lose_last_file(slow_orders, "missing")
    kill(slow_orders)
    without = shell(command, slow_orders)
    assert without.status == 1
    assert "the checkpoint covers records up to" in without.said
    end = max((slow_orders / "commitlog").iterdir())
    end.with_name(f"{int(end.name) + CONFIG.commitlog_file_size:020d}").touch()
    assert shell(command, slow_orders) == without


@pytest.mark.parametrize("how", ["missing", "zeros", "empty"])
def test_columns_say_what_a_killed_store_has_lost(shell: Shell, slow_orders: Path, how: str) -> None:
    lose_last_file(slow_orders, how)
    kill(slow_orders)
    with pytest.raises(CorruptionError, match="the checkpoint covers records up to"):
        reader(slow_orders).read_all()
    left = reader(slow_orders, as_recovered=True).read_all().num_rows
    assert 0 < left < MESSAGES
    shown = reader(slow_orders, columns=["body", "_corrupt_record"], mode="PERMISSIVE").read_all()["_corrupt_record"]
    assert (len(shown), shown.null_count) == (left + 1, left)
    findings = kinds(shell, slow_orders)
    assert "beyond-end" not in findings
    assert findings["damage"]["severity"] == "error"


@pytest.mark.parametrize("how", ["missing", "zeros", "empty"])
def test_queues_ahead_of_what_nothing_covers_are_cut(shell: Shell, slow_orders: Path, how: str) -> None:
    lose_last_file(slow_orders, how)
    kill(slow_orders)
    (slow_orders / "checkpoint").unlink()
    assert [shell(command, slow_orders).status for command in ("count", "show", "dump")] == [0, 0, 0]
    assert 0 < reader(slow_orders).read_all().num_rows < MESSAGES
    with MessageStore.open(slow_orders, read_only=True) as store:
        assert store.condition.kind is Wholeness.RECOVERABLE


@pytest.fixture(scope="module")
def marked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a killed store of 12 messages, one in each file, whose last flush has left a mark."""
    path = tmp_path_factory.mktemp("marked") / "store"
    config = StoreConfig.tiny(commitlog_file_size=1 << 20, max_message_size=1 << 20)
    store = MessageStore.open(path, config, clock=ManualClock(START_MS), background=False)
    for number in range(12):
        store.append(Message("T", bytes([number]) * 900_000))
    store.flush()
    store.abandon()
    assert (path / "librmq" / "flushed.json").exists()
    return path


@pytest.mark.slow
@pytest.mark.parametrize("which", [0, -1])
def test_a_killed_store_lacks_what_a_mark_covers(shell: Shell, marked: Path, which: int) -> None:
    path = shutil.copytree(marked, shell.folder / "marked")
    with MessageStore.open(path, read_only=True) as store:
        assert store.condition.kind is Wholeness.RECOVERABLE
        last = store.log.sequence.path_at(store.log.end)
    (path / "commitlog" / ("0" * 20) if which == 0 else Path(last)).unlink()
    (path / "checkpoint").unlink()
    expected = "the log began at 0 at the last flush" if which == 0 else "the last flush noted that it reached"
    for command in ("count", "stats", "lag", "topics", "show", "dump"):
        answer = shell(command, path)
        assert (answer.status, expected in answer.said) == (1, True), command
    with pytest.raises(CorruptionError, match=expected):
        reader(path).read_all()
    assert reader(path, as_recovered=True).read_all().num_rows == 11
    (row,) = shell("verify", path).rows
    assert row["sound"] is False
    assert {"missing-log-files", "damage"} & kinds(shell, path).keys()


def test_a_kill_after_retention_leaves_no_missing_files(shell: Shell) -> None:
    path, clock = shell.folder / "kept-small", ManualClock(START_MS)
    config = StoreConfig.tiny(
        commitlog_file_size=1 << 20, max_message_size=1 << 20, max_total_size=10 << 20, keep_unconsumed=False
    )
    store = MessageStore.open(path, config, clock=clock, background=False)
    for number in range(14):
        store.append(Message("T", bytes([number]) * 900_000))
    store.flush()
    assert (path / "librmq" / "flushed.json").exists()
    clock.move_to(clock.now_ms() + 10_000)
    store.run_due(clock.now_ms())
    assert store.log.begin > 0
    store.abandon()
    answer = shell("count", path)
    assert (answer.status, answer.said) == (0, "")
    assert shell("verify", path).status == 0


def without_notes(path: Path, target: Path) -> Path:
    """Copy a store as a broker leaves it that is killed before its first checkpoint."""
    shutil.copytree(path, target, ignore=shutil.ignore_patterns("librmq", "checkpoint"))
    (target / "abort").touch()
    return target


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store with 15 small files of the log and many of its queues."""
    path = tmp_path_factory.mktemp("long") / "store"
    with MessageStore.open(path, CONFIG, background=False) as store:  # no thread allocates the next file ahead
        for number in range(560):
            store.append(Message("T", b"body %03d" % number, keys="k"), number % 2)
        assert len(store.log.sequence.starts) == 15
    return path


def test_show_compares_what_follows_a_missing_file_with_the_queues(shell: Shell, orders: Path) -> None:
    _, missing, behind, *_ = sorted((orders / "commitlog").iterdir())
    missing.unlink()
    assert "names another" not in shell("show", orders).said
    data = bytearray(behind.read_bytes())
    data[QUEUE_ID_AT + 3] ^= 1  # of its first record
    behind.write_bytes(data)
    assert "names another" in shell("show", orders).said


@pytest.mark.slow
@pytest.mark.parametrize("command", ["count", "lag", "stats", "topics", "show", "dump"])
def test_queue_files_tell_of_missing_log_files(shell: Shell, long: Path, command: str) -> None:
    path = without_notes(long, shell.folder / "long")
    assert (shell(command, path).status, "the log" in shell(command, path).said) == (0, False)
    first = f"consumequeue/T/0/{0:020d} is about messages before"
    remove_first_files(path, 1)
    answer = shell(command, path)  # a kill between the deletion of log and queue files leaves the same
    assert answer.status == 0
    assert f"note: the log begins at 4096, but {first} it: its first files are missing, or a kill" in answer.said
    remove_first_files(path, 11)
    answer = shell(command, path)  # a round of retention deletes at most ten files
    assert answer.status == 1
    assert f"the log begins at {12 * 4096}, but {first} {2 * 4096}: copy the missing part" in answer.said


@pytest.mark.slow
def test_every_check_judges_the_begin_alike(shell: Shell, long: Path) -> None:
    path = without_notes(long, shell.folder / "long")
    remove_first_files(path, 1)
    assert shell("verify", path).status == 0
    assert "note: the log begins at 4096" in shell("verify", path).said
    assert kinds(shell, path)["missing-log-files"]["severity"] == "warning"
    assert reader(path).read_all().num_rows > 500
    remove_first_files(path, 11)
    assert [one["kind"] for one in shell("verify", path).rows[0]["damage"]] == ["deleted"]
    assert kinds(shell, path)["missing-log-files"]["severity"] == "error"
    with pytest.raises(CorruptionError, match="the log begins at 49152"):
        reader(path).read_all()
    assert shell("recover", path).status == 0
    assert (shell("count", path).status, shell("count", path).said) == (0, "")


def test_an_index_file_tells_of_missing_log_files(shell: Shell) -> None:
    config, path = StoreConfig.tiny(commitlog_file_size=4096, max_index_num=20), shell.folder / "keys"
    with MessageStore.open(path, config, clock=ManualClock(START_MS), background=False) as store:
        for number in range(600):
            store.append(Message("T", b"body", keys=f"k{number}"))
    killed = without_notes(path, shell.folder / "killed")
    remove_first_files(killed, 12)
    answer = shell("count", killed)
    assert (answer.status, "but index/" in answer.said) == (1, True)


def test_what_retention_leaves_is_no_missing_file(shell: Shell, long: Path) -> None:
    """Queue files that messages of the log and older ones share, and full files that got a successor later."""
    config, clock = replace(CONFIG, max_total_size=3 * 4096), ManualClock(START_MS)
    path = shutil.copytree(long, shell.folder / "kept")
    with MessageStore.open(path, config, clock=clock, background=False) as store:
        for _ in range(8):  # fills the queue's first file, which is its last
            store.append(Message("idle", b"body", keys="k"))
        for number in range(560):
            store.append(Message("T", b"body %03d" % number), number % 2)
        clock.move_to(clock.now_ms() + 86_400_000)
        while (due_ms := store.run_due(clock.now_ms())) is not None:
            clock.move_to(max(due_ms, clock.now_ms()))
        assert store.log.begin > 24 * 4096
        store.append(Message("idle", b"body"))
    assert len(list((path / "consumequeue" / "idle" / "0").iterdir())) == 2
    killed = without_notes(path, shell.folder / "killed")
    for command in ("count", "lag", "dump"):
        assert (shell(command, killed).status, "the log" in shell(command, killed).said) == (0, False)
    assert "missing-log-files" not in kinds(shell, killed)


def test_a_killed_store_without_any_log_file_is_short(shell: Shell, orders: Path) -> None:
    path = without_notes(orders, shell.folder / "killed")
    remove_first_files(path, 100)
    answer = shell("count", path)
    assert (answer.status, "the log ends at 0; queues have entries up to" in answer.said) == (1, True)


@pytest.mark.parametrize("lost", [0, 2])
def test_keys_of_a_missing_older_index_file_are_found(shell: Shell, lost: int) -> None:
    config, path = StoreConfig.tiny(commitlog_file_size=4096, max_index_num=20), shell.folder / "keys"
    with MessageStore.open(path, config, clock=ManualClock(START_MS), background=False) as store:
        for number in range(60):
            store.append(Message("T", b"body", keys=f"k{number}"))
    sorted((path / "index").iterdir())[lost].unlink()
    (path / "abort").touch()
    with MessageStore.open(path, config, clock=ManualClock(START_MS), background=False) as store:
        assert [len(list(store.find_by_key("T", f"k{number}"))) for number in range(60)] == [1] * 60
    assert shell("verify", path).status == 0


def test_tables_that_no_broker_can_open_are_unsound(shell: Shell, orders: Path) -> None:
    for name in ("consumerOffset.json", "consumerOffset.json.bak", "topics.json"):
        (orders / "config" / name).write_text('{"offsetTable":{')
    answer = shell("verify", orders)
    assert (answer.status, answer.rows[0]["sound"]) == (1, False)
    topics, progress = answer.rows[0]["damage"]
    assert "a broker can't open the store" in progress["what"]
    assert "a broker starts without what the file had" in topics["what"]
    progress_advice = (
        "copy consumerOffset.json from a backup of the store, or move consumerOffset.json and consumerOffset.json.bak "
        "away: then groups begin where their consumers' consume_from says"
    )
    assert f"next: {progress_advice}" in answer.said
    assert "next: copy topics.json from a backup of the store, or move topics.json away" in answer.said
    assert "librmq recover" not in answer.said  # which does not touch tables
    (orders / "config" / "topics.json").unlink()
    assert progress_advice in shell("lag", orders).said
    with pytest.raises(CorruptionError, match=r"or move consumerOffset\.json and"):
        Broker.open(orders, store_config=CONFIG)
    for name in ("consumerOffset.json", "consumerOffset.json.bak"):
        (orders / "config" / name).unlink()
    assert shell("verify", orders).status == 0


def test_no_command_says_that_a_missing_log_has_the_messages(orders: Path, shell: Shell) -> None:
    for file in (orders / "commitlog").iterdir():
        file.unlink()
    queue = min((orders / "consumequeue" / "T" / "0").iterdir())
    queue.write_bytes(queue.read_bytes()[:10])
    for words in (["topics"], ["queue", "T", 0], ["diagnose", "--no-verify"]):
        answer = shell(words[0], "orders", *words[1:])
        assert answer.status == 1
        assert "commitlog/ has no file" in answer.said
        assert "the log has the messages" not in (answer.out + answer.said).lower()
