"""Commands on a store whose broker keeps its tables in RocksDB print what they print for the same tables in files."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from librmq.columns import reader
from librmq.store.format.broker_tables import BrokerTables
from tests.budget import many
from tests.cli.stand import Shell
from tests.programs import Process
from tests.rocksdb_stores import FORMS, write_tables
from tests.stores_of_5 import state_of

COMMANDS = (
    "groups store --all",
    "lag store",
    "topics store",
    "pending store",
    "expiring store --reserved 1ms --within 1ms",
    "diagnose store --no-verify",
    "disk store",
    "report store -o OUT.html",
)


def tables_of(config: Path) -> dict[str, dict[str, Any]]:
    """Return the tables in the files of a broker."""

    def table(file: str, name: str) -> dict[str, Any]:
        rows: dict[str, Any] = json.loads(re.sub(r"(\d+):", r'"\1":', (config / file).read_text()))[name]
        return rows

    return {
        "topics": table("topics.json", "topicConfigTable"),
        "groups": table("subscriptionGroup.json", "subscriptionGroupTable"),
        "offsets": table("consumerOffset.json", "offsetTable"),
    }


@pytest.fixture(params=FORMS)
def moved(request: pytest.FixtureRequest, shell: Shell) -> tuple[Shell, list[Any]]:
    """Return a shell whose store has its tables in RocksDB, and what the commands print for those in files."""
    config = shell.folder / "store" / "config"
    printed: list[Any] = [shell(*words.split())[:2] for words in COMMANDS]
    write_tables(config, request.param, tables_of(config))
    for name in ("topics.json", "subscriptionGroup.json", "consumerOffset.json"):
        for path in (config / name, config / f"{name}.bak"):
            path.unlink(missing_ok=True)
    return shell, printed


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
@pytest.mark.parametrize("what", ["pipe", "socket"])
def test_what_is_no_file_among_those_of_rocksdb(shell: Shell, what: str) -> None:
    config = shell.folder / "store" / "config"
    write_tables(config, FORMS[0], tables_of(config))
    folder = next(path.parent for path in config.rglob("CURRENT"))
    place = folder / "999999.sst"
    if what == "pipe":
        os.mkfifo(place)
    else:
        with socket.socket(socket.AF_UNIX) as server, contextlib.chdir(folder):  # the path can be too long for one
            server.bind(place.name)
    for name in ("topics.json", "subscriptionGroup.json", "consumerOffset.json"):
        (config / name).unlink()
        (config / f"{name}.bak").unlink(missing_ok=True)
    for command in ("groups", "diagnose"):
        answer = shell(command, "store")
        assert answer.status == 0, answer  # as with another database that can't be read
        assert f"{place.name}: at 0: expected a regular file" in answer.out + answer.said


def unread_rows(out: str) -> list[dict[str, Any]]:
    """Return what `disk` says of topics, the only rows that depend on the progress."""
    rows = [json.loads(line) for line in out.splitlines()]
    topics = [row for row in rows if "topic" in row]
    assert any("unread" in name for row in topics for name in row), topics[:1]
    return topics


@pytest.mark.slow
def test_reading_commands_print_the_same_as_for_files(moved: tuple[Shell, list[Any]]) -> None:
    shell, printed = moved
    before = state_of(shell.folder / "store")
    for words, expected in zip(COMMANDS, printed, strict=True):
        if not words.startswith("disk"):  # its bytes differ
            assert shell(*words.split())[:2] == expected, words
        else:
            assert unread_rows(shell(*words.split()).out) == unread_rows(expected[1])
    assert state_of(shell.folder / "store") == before


@many
def test_a_copy_has_the_progress(moved: tuple[Shell, list[Any]]) -> None:
    shell, _ = moved
    lag = [(row["group"], row["topic"], row["queue_id"], row["lag"]) for row in shell("lag", "store").rows]
    shell("extract", "store", "-o", "small")
    assert [(row["group"], row["topic"], row["queue_id"], row["lag"]) for row in shell("lag", "small").rows] == lag


def test_a_running_broker_keeps_its_database(shell: Shell) -> None:
    """All but what its RocksDB tells of itself, a few seconds after it was opened too."""
    pytest.importorskip("rocksdict")

    def state() -> dict[str, tuple[int, bytes]]:
        return {path: held for path, held in state_of(config).items() if path != os.path.join("consumerOffsets", "LOG")}

    config = shell.folder / "store" / "config"
    expected = shell("lag", "store").out
    write_tables(config, "separate", tables_of(config))
    (config / "consumerOffset.json").unlink()
    holder = Process[bytes](
        [sys.executable, "-c", "import sys, rocksdict\n"
         "options = rocksdict.Options(raw_mode=True)\n"
         "names = rocksdict.Rdict.list_cf(sys.argv[1], options)\n"
         "database = rocksdict.Rdict(sys.argv[1], options, {name: options for name in names})\n"
         "database[b'new@group'] = b'{\"offsetTable\":{0:5}}'\n"
         "print('open', flush=True)\nsys.stdin.read()\ndatabase.close()", str(config / "consumerOffsets")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    with holder:
        assert holder.stdout.readline() == b"open\n"
        before = state()
        tables = BrokerTables.open(str(config))
        assert tables.consumer_offset("new", "group", 0) == 5, "only in RocksDB's own log"
        assert set(expected.splitlines()) <= set(shell("lag", "store").out.splitlines())
        assert state() == before
        holder.stdin.close()
    assert holder.returncode == 0


@pytest.mark.parametrize("form", FORMS)
def test_a_file_with_more_changes_counts(tmp_path: Path, form: str) -> None:
    topics = {"t": {"topicName": "t", "perm": 6}}
    write_tables(tmp_path, form, {"topics": topics, "groups": {}, "offsets": {"t@g": {"0": 3}}}, counter=7)
    for counter, expected in ((7, 3), (8, 9)):
        document = {"dataVersion": {"counter": counter, "timestamp": 1}, "offsetTable": {"t@g": {"0": 9}}}
        (tmp_path / "consumerOffset.json").write_text(json.dumps(document))
        assert BrokerTables.open(str(tmp_path)).consumer_offset("t", "g", 0) == expected


def test_of_several_databases_the_one_that_changed_last_counts(tmp_path: Path) -> None:
    for at, form in enumerate(FORMS):
        tables = {"topics": {}, "groups": {}, "offsets": {"t@g": {"0": at}}}
        write_tables(tmp_path, form, tables, timestamp_ms=1_700_000_000_000 + at)
        assert BrokerTables.open(str(tmp_path)).consumer_offset("t", "g", 0) == at


@many
def test_a_damaged_database_leaves_progress_unknown(moved: tuple[Shell, list[Any]]) -> None:
    shell, _ = moved
    config = shell.folder / "store" / "config"
    for manifest in config.rglob("MANIFEST-*"):
        data = manifest.read_bytes()
        manifest.write_bytes(bytes((data[0] ^ 1,)) + data[1:])
    status, out, said = shell("lag", "store")
    assert (status, out) == (0, "")
    assert "note: the broker keeps the progress of groups in RocksDB" in said
    assert "can't be read" in said


@many
def test_without_the_extra_the_note_names_it(moved: tuple[Shell, list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    shell, _ = moved
    monkeypatch.setitem(sys.modules, "rocksdict", None)
    for command in ("lag store", "groups store", "diagnose store --no-verify"):
        status, out, said = shell(*command.split())
        assert status in (0, 1)
        assert "pip install 'librmq[rocksdb]'" in out + said, command


@many
@pytest.mark.parametrize("form", FORMS)
def test_columns_read_the_same_as_for_files(shell: Shell, form: str) -> None:
    """Also those of an unclean exit: what is in files is short of nothing because the tables are elsewhere."""
    store = shell.folder / "store"
    expected = [reader(store, view=view).read_all() for view in ("queues", "log")]
    write_tables(store / "config", form, tables_of(store / "config"))
    for name in ("topics.json", "subscriptionGroup.json", "consumerOffset.json"):
        for path in (store / "config" / name, store / "config" / f"{name}.bak"):
            path.unlink(missing_ok=True)
    before = state_of(store)
    assert [reader(store, view=view).read_all() for view in ("queues", "log")] == expected
    assert state_of(store) == before
    (store / "abort").touch()
    assert [reader(store, view=view).read_all() for view in ("queues", "log")] == expected
