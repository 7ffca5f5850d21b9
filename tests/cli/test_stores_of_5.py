"""Commands on stores of 5.x with queues outside of plain files print what they print for the store with its files."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from librmq import Broker, StoreConfig
from librmq.errors import NotAStoreError
from librmq.store import MessageStore
from tests import budget
from tests.budget import many
from tests.cli.stand import Shell
from tests.reference import existing
from tests.stores_of_5 import KINDS, add_database, keep_queues_elsewhere, state_of

READING = (
    "count STORE --by topic --all",
    "count STORE --by key",
    "dead-letters STORE",
    "diagnose STORE --no-verify",
    "dump STORE",
    "expiring STORE --reserved 72h --within 6h",
    "export STORE -o OUT.jsonl",
    "extract STORE -o SMALL",
    "groups STORE --all",
    "lag STORE",
    "pending STORE --config LEVELS",
    "query STORE --id ID",
    "query STORE --topic TOPIC --key KEY",
    "queue STORE TOPIC 0",
    "report STORE -o OUT.html",
    "queues STORE",
    "salvage STORE",
    "show STORE --key KEY",
    "show STORE --topic TOPIC",
    "show STORE --topic TOPIC --tag TAG",
    "story STORE ID",
    "tail STORE",
    "timers STORE",
    "topics STORE",
    "pending STORE --config LEVELS --at PLACE",
    *(f"{words} --at PLACE" for words in ("lag STORE", "queues STORE", "show STORE", "topics STORE")),
    *(f"{words} --at PLACE" for words in ("query STORE --id ID", "story STORE ID")),
)

CHANGING = (
    "broker-conf STORE",
    "decide STORE 0 --rollback",
    "group copy STORE a --to b",
    "import STORE LINES",
    "load STORE",
    "recover STORE",
    "recover STORE --dry-run",
    "reset STORE --group a --topic T --to end",
    "serve STORE --grpc 0",
    "skip STORE --group a --topic T --keep 1",
    "topic create STORE orders",
)
STORES = ("store-basic", "store-crash", "store-tx", "clients-retry-dlq", "timer-5.3.3")


def message_of(shell: Shell) -> dict[str, str]:
    """Return words of a message in the middle of the store, for commands."""
    rows = [row for row in shell("dump", "store").rows if row["type"] == "message"]
    users = [row for row in rows if row["topic"][:1].isalpha() and row["queue_id"] == 0] or rows
    row = users[len(users) // 2]
    keys = next((key for row in users for key in row["properties"].get("KEYS", "").split()), "none")
    return {
        "TOPIC": row["topic"],
        "ID": row["properties"].get("UNIQ_KEY", "none"),
        "KEY": keys,
        "TAG": next((row["properties"]["TAGS"] for row in users if "TAGS" in row["properties"]), "none"),
        "PLACE": str(row["phys"]),
    }


@pytest.fixture(params=STORES)
def stores(request: pytest.FixtureRequest, shell: Shell) -> Shell:
    """Return a shell with a recorded store in ``store``, which has its queues in files.

    Their entries tell when a delayed message is due. Without them the delay levels do; one broker had its own.
    """
    levels = "1s 1s 1s 1s 1s 2s" if request.param == "clients-retry-dlq" else StoreConfig().message_delay_level
    (shell.folder / "LEVELS").write_text(json.dumps({"message_delay_level": levels}))
    shutil.rmtree(shell.folder / "store")
    shutil.copytree(existing(request.param, "store"), shell.folder / "store")
    return shell


def output_of(shell: Shell, words: list[str]) -> tuple[object, ...]:
    """Return what a command prints and the files that it makes, without what it says of the kind of store."""
    answer = shell(*words)
    made = {path.name: path for path in shell.folder.iterdir() if path.name not in ("store", "files", "LEVELS")}
    content = {name: dict(files_in(path)) if path.is_dir() else b"" for name, path in made.items()}
    if "OUT.json" in made:  # the page says the same
        report = json.loads(made["OUT.json"].read_text())
        content["OUT.json"] = {
            name: part for name, part in report.items() if name not in ("stores", "findings", "damage")
        }
    elif "OUT.jsonl" in made:
        content["OUT.jsonl"] = made["OUT.jsonl"].read_bytes()
    for path in made.values():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return answer, content


def files_in(folder: Path) -> list[tuple[str, bytes]]:
    return [
        (str(path.relative_to(folder)), path.read_bytes()) for path in folder.rglob("0" * 10 + "*") if path.is_file()
    ]


@pytest.mark.slow
@many
def test_reading_commands_print_the_same(stores: Shell) -> None:
    known = message_of(stores)
    commands = [["store" if word == "STORE" else known.get(word, word) for word in words.split()] for words in READING]
    expected = [output_of(stores, words) for words in commands]
    (stores.folder / "store").rename(stores.folder / "files")
    compared = list(zip(commands, expected, strict=True))
    kinds = KINDS if "%RETRY%CG_order" in str(expected) else KINDS[:1]
    for number, kind in enumerate(kinds):
        shutil.copytree(stores.folder / "files", stores.folder / "store")
        keep_queues_elsewhere(stores.folder / "store", kind)
        before = state_of(stores.folder / "store")
        # The quick check asks each command of one kind.
        for words, printed in compared[number :: len(kinds)] if budget.run.quick else compared:
            if words[0] == "diagnose" and "recoverable" in str(printed):
                continue  # there is nothing to repair in queues that are derived
            assert output_of(stores, words) == printed, (kind, words)
        assert state_of(stores.folder / "store") == before
        shutil.rmtree(stores.folder / "store")


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_written_to_such_a_store(shell: Shell, kind: str) -> None:
    keep_queues_elsewhere(shell.folder / "store", kind)
    before = state_of(shell.folder / "store")
    (shell.folder / "LINES").write_text("{}\n")
    for words in CHANGING:
        status, out, said = shell(*("store" if word == "STORE" else word for word in words.split()))
        assert (status, out, said.count("\n")) == (2, "", 1), words
        assert "RocksDB" in said, words
        assert state_of(shell.folder / "store") == before, words
    for opened in (MessageStore.open, Broker.open):
        with pytest.raises(NotAStoreError, match=r"RocksDB: librmq reads it .* `librmq extract`"):
            opened(shell.folder / "store")
    assert state_of(shell.folder / "store") == before


@pytest.mark.parametrize("kind", KINDS)
def test_kind_and_log_are_verified(shell: Shell, kind: str) -> None:
    keep_queues_elsewhere(shell.folder / "store", kind)
    status, out, said = shell("verify", "store")
    assert (status, json.loads(out)) == (0, {"type": "verify", "sound": True, "damage": [], "recoverable": []})
    assert "RocksDB: only its log was checked" in said
    assert "RocksDB" in shell("stats", "store").rows[0]["kind"]
    file = max((shell.folder / "store" / "commitlog").iterdir())
    file.write_bytes(b"\x01" + file.read_bytes()[1:])
    status, out, said = shell("verify", "store")
    assert (status, [damage["kind"] for damage in json.loads(out)["damage"]]) == (1, ["record"])
    assert "next: `librmq salvage STORE" in said


# --- progress of groups


PROGRESS = ("groups STORE", "lag STORE", "diagnose STORE --no-verify", "expiring STORE --reserved 1ms --within 1ms")


def test_progress_in_rocksdb_is_unknown_unless_exported(shell: Shell) -> None:
    keep_queues_elsewhere(shell.folder / "store", KINDS[0])
    commands = [["store" if word == "STORE" else word for word in words.split()] for words in PROGRESS]
    expected = [shell(*words) for words in commands]
    config = shell.folder / "store" / "config"
    for name in ("consumerOffsets", "topics", "subscriptionGroups"):
        add_database(config / name)
    before = state_of(shell.folder / "store")
    groups, lag, diagnosis, expiring = [shell(*words) for words in commands]
    assert all(
        "note: the broker keeps the progress of groups in RocksDB" in one.said for one in (groups, lag, expiring)
    )
    assert (lag.out, expiring.out) == ("", "")
    assert [row["group"] for row in groups.rows] == [row["group"] for row in expected[0].rows]
    assert {row["lag"] for row in groups.rows} == {None}
    findings = {row["finding"] for row in diagnosis.rows}
    assert "unknown-progress" in findings
    assert not findings & {"backlog", "old-messages", "retries-without-progress", "progress-beyond-end"}
    assert "note: the broker keeps the progress of groups in RocksDB" in shell("extract", "store", "-o", "small").said
    assert state_of(shell.folder / "store") == before

    # the file that mqadmin rocksDBConfigToJson -t consumerOffsets -e writes
    table = json.loads(re.sub(r"(\d+):", r'"\1":', (config / "consumerOffset.json").read_text()))
    (config / "consumerOffsets.json").write_text(json.dumps({"offsetTable": table["offsetTable"]}, indent=1))
    (config / "consumerOffset.json").write_text("{}")
    assert [shell(*words) for words in commands] == expected


@pytest.mark.parametrize("folder", ["rdb", "consumerOffsets", "metadata"])
def test_a_broker_with_tables_in_rocksdb_keeps_them(shell: Shell, folder: str) -> None:
    add_database(shell.folder / "store" / "config" / folder)
    before = state_of(shell.folder / "store")
    (shell.folder / "LINES").write_text("{}\n")
    for words in CHANGING:
        status, _, said = shell(*("store" if word == "STORE" else word for word in words.split()))
        assert (status, "topics, groups and progress in RocksDB" in said) == (2, True), words
    assert state_of(shell.folder / "store") == before
    assert shell("verify", "store").status == 0
    file = max((shell.folder / "store" / "commitlog").iterdir())
    file.write_bytes(b"\x01" + file.read_bytes()[1:])
    status, _, said = shell("verify", "store")
    assert (status, "next: `librmq salvage STORE" in said) == (1, True)


def test_compacted_topics_are_named(shell: Shell) -> None:
    config = shell.folder / "store" / "config" / "topics.json"
    tables = json.loads(config.read_text())
    topic = next(iter(tables["topicConfigTable"]))
    tables["topicConfigTable"][topic]["attributes"] = {"cleanup.policy": "COMPACTION"}
    config.write_text(json.dumps(tables))
    for command in ("topics", "verify"):
        status, _, said = shell(command, "store")
        assert (status, f"note: topic {topic} is compacted" in said) == (0, True)
