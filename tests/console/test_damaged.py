"""Every page of the console over every damaged store of the commands' table shows what is there, and what is not."""

from __future__ import annotations

import html
import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from librmq import Message, MessageStore, StoreConfig
from librmq.files import DiskFiles
from tests.budget import many
from tests.cli.stand import Shell
from tests.cli.test_damage_by_command import COMMANDS, DAMAGES, SIZE, logs, readable, sound
from tests.console.pages import Asked, console
from tests.rocksdb_stores import write_database

__all__ = ["sound"]

TABLES = {name for name in DAMAGES if name.endswith("unreadable, without a backup")}
"""Damage of files in ``config/``, without which a broker has no topics or groups to show."""
RECORDS = {"closed, a record in the middle lost", "closed, one byte of a body changed"}
"""Damage that only who reads the record can see."""
PAGES = (
    "/",
    "/topics",
    "/topic?name=T",
    "/topic?name=T&key=k7",
    "/topic?name=T&queue=0&offset=7",
    "/groups",
    "/group?name=G",
    "/letters?group=G",
    "/busy",
    "/waiting",
    "/findings",
    "/find?q=nobody",
    "/?at=1700000030000",
)


def missing(page: str) -> list[str]:
    """Return what a page says at its top that the store lacks."""
    for banner in re.findall(r'<div class="verdict missing" role="alert">(.*?)</div>', page, re.DOTALL):
        return [html.unescape(re.sub("<[^>]*>", "", text)) for text in re.findall(r"<li>(.*?)</li>", banner, re.DOTALL)]
    return []


@many
@pytest.mark.parametrize("name", [name for name in DAMAGES if name not in TABLES])
def test_each_page_shows_what_is_there_and_what_is_missing(shell: Shell, sound: Path, name: str) -> None:
    path = shutil.copytree(sound, shell.folder / "s")
    DAMAGES[name](path)
    said = [line.partition(": s: ")[2] for line in shell("lag", "s").said.splitlines() if ": s: " in line]
    asked = Asked(console("s"))
    for page in PAGES:
        told = [what for what in missing(asked.page(page)) if not what.startswith("the record at ")]
        assert told == said, page
    if name in RECORDS:
        assert "the record at 8192 is damaged: " in asked.page("/topics"), "once a page has met it, each says it"


@pytest.mark.parametrize("name", ["a log file in the middle missing", "the last log file missing"])
def test_checks_and_reports_tell_it_in_the_same_words(shell: Shell, sound: Path, name: str) -> None:
    DAMAGES[name](shutil.copytree(sound, shell.folder / "s"))
    (told,) = missing(Asked(console("s")).page("/topics"))
    for command in ("verify", "can-start", "diagnose", "report"):
        answer = shell(*COMMANDS[command].split())
        assert f"librmq {command}: s: {told}" in answer.said, (command, answer.said)
    what = told.rpartition(": ")[0]
    (finding,) = [row for row in shell("diagnose", "s").rows if row["finding"] == "damage"]
    assert what in finding["what"]
    assert what in html.unescape((shell.folder / "r.html").read_text())


def test_a_missing_file_is_told_by_its_messages(shell: Shell, sound: Path) -> None:
    path = shutil.copytree(sound, shell.folder / "s")
    DAMAGES["a log file in the middle missing"](path)
    asked = Asked(console("s"))
    (told,) = missing(asked.page("/topics"))
    for command in ("show", "dump", "tail", "queues", "stats"):
        said = [line.partition(": s: ")[2] for line in shell(command, "s").said.splitlines()]
        assert said == [told], command
    lost = re.search(r"without (\d+) messages \((.*)\), stored after (\S+ \S+) and before (\S+ \S+):", told)
    assert lost is not None
    of_queues = re.findall(r"T/(\d) (\d+)-(\d+)", lost[2])
    offsets = {(int(queue), at) for queue, first, last in of_queues for at in range(int(first), int(last) + 1)}
    shown = {(row["queue_id"], row["queue_offset"]) for row in shell("show", "s", "--topic", "T").rows}
    every = {(queue, at) for queue in range(2) for at in range(20)}
    assert (offsets, int(lost[1])) == (every - shown, len(every - shown))
    page = asked.get("/topic?name=T&since=2023-11-14T22:13:25&until=2023-11-14T22:13:42&export=jsonl").text
    rows = [json.loads(line) for line in page.splitlines()]
    queue_offsets = [
        at for queue in range(2) for row in rows if row["queue_id"] == queue for at in [row["queue_offset"]]
    ]
    assert sorted(queue_offsets) == [2, 3, 3, 4, 4, 10, 10], "of those between the two times, the missing ones are not"


KINDS = ("of RocketMQ 5, with queues in RocksDB", "with a living writer")
GONE = {
    "a log file in the middle missing": "commitlog/00000000000000004096: missing, before 00000000000000008192: ",
    "a log file cut to 100 bytes": "commitlog/00000000000000004096: expected 4096 bytes, found 100: ",
    "a foreign file in the log": "commitlog/notes: expected a file named by its start in 20 digits: ",
}


@many
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", GONE)
def test_stores_of_other_kinds_show_what_is_there(shell: Shell, sound: Path, kind: str, name: str) -> None:
    path = shutil.copytree(sound, shell.folder / "s")
    if kind == KINDS[0]:
        shutil.rmtree(path / "consumequeue")
        write_database(path / "consumequeue", {"default": {}})
    else:
        (path / "abort").touch()
    DAMAGES[name](path)
    shown = readable(path, name)
    with holding(path if kind == KINDS[1] else None):
        asked = Asked(console("s"))
        ((told,),) = {tuple(missing(asked.page(page))) for page in PAGES if "at=" not in page}
        assert GONE[name] in told
        for command in COMMANDS.keys() - {"timers"}:
            answer = shell(*COMMANDS[command].split())
            assert answer.status == 1, (command, answer.said)
            core = told.partition(": ")[2].rpartition(": ")[0]  # an export ends there, with a remedy of its own
            assert (core if command == "export" else told) in answer.said, (command, answer.said)
            if command in ("show", "dump", "tail"):
                assert {row["phys"] for row in answer.rows if row["type"] == "message"} == shown, command


@contextmanager
def holding(path: Path | None) -> Iterator[None]:
    """Hold the lock of a store, as its writer does."""
    lock = None if path is None else DiskFiles().lock(str(path / "lock"))
    yield
    if lock is not None:
        lock.release()


@pytest.mark.slow
@pytest.mark.parametrize("has_prepared_file", [False, True])
def test_the_first_look_shows_a_lost_end_of_many_queues(shell: Shell, has_prepared_file: bool) -> None:
    config = StoreConfig.tiny(commitlog_file_size=SIZE, consumequeue_file_size=400)
    with MessageStore.open(shell.folder / "s", config) as store:
        for number in range(1_100):
            store.append(Message("T", b"body"), number)
    last = logs(shell.folder / "s")[-1]
    prepared = last.with_name(f"{int(last.name) + SIZE:020d}")
    for file in last.parent.iterdir():  # the writer has prepared some, or none yet
        if file.name > last.name:
            file.unlink()
    if has_prepared_file:
        prepared.write_bytes(bytes(SIZE))
    last.unlink()
    (told,) = missing(Asked(console("s")).page("/topics"))
    where = f"missing, before {prepared.name}: " if has_prepared_file else "beyond the log's end: "
    assert f"{where}without " in told
