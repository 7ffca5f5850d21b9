"""A log on several paths (``storePathCommitLog``): read together, never written."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from librmq import Broker, CorruptionError, ManualClock, ManualRunner, Message, MessageStore, StoreConfig
from librmq.columns import reader
from librmq.errors import NotAStoreError
from librmq.store import snapshot, verify
from tests.budget import many
from tests.cli.stand import Shell
from tests.programs import Process, environment

SIZE = 4096
MESSAGES = 60


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store of six log files as a broker has closed it; tests copy it."""
    path = tmp_path_factory.mktemp("log-paths") / "whole"
    config = StoreConfig.tiny(commitlog_file_size=SIZE, max_index_num=16)
    clock = ManualClock(1_700_000_000_000)
    with MessageStore.open(path, config, clock=clock, background=False) as store:
        for number in range(MESSAGES):
            store.append(Message("T", bytes(300), keys=f"k{number}"))
        assert len(store.log.sequence.starts) == 6
    shutil.rmtree(path / "librmq")
    return path


def spread(whole: Path, store: Path, *, here: int, of: int, into: Path, files: int = 6) -> Path:
    """Copy a store with some of its log files, of which every ``of``-th stays, and move the others into a folder."""
    shutil.copytree(whole, store)
    into.mkdir(parents=True)
    for number, file in enumerate(sorted((store / "commitlog").iterdir())):
        if number >= files:
            file.unlink()
        elif number % of != here:
            file.rename(into / file.name)
    return store


def answers(shell: Shell, path: Path, *more: str) -> list[tuple[int, str]]:
    given = []
    for words in ("topics", "count", "queues", "dump", "query --topic T --key k3", "show --limit 5", "verify"):
        name, *rest = words.split()
        answer = shell(name, path, *rest, *more)
        given.append((answer.status, answer.out))
    return given


@many
@pytest.mark.parametrize(("here", "of"), [(0, 2), (1, 2), (0, 6), (5, 6), (2, 3)])
def test_paths_in_the_store_are_read_together(shell: Shell, whole: Path, here: int, of: int) -> None:
    path = spread(whole, shell.folder / "s", here=here, of=of, into=shell.folder / "s" / "log-b")
    before = sorted(path.rglob("*"))
    assert answers(shell, path) == answers(shell, whole)
    assert reader(str(path)).read_all().num_rows == MESSAGES
    assert verify(path).sound
    for opening in (Broker.open, MessageStore.open):
        with pytest.raises(NotAStoreError, match=r"on several paths \(storePathCommitLog\), here and in .*log-b"):
            opening(path)
    for words in (("recover",), ("skip", "--group", "G", "--topic", "T")):
        answer = shell(words[0], path, *words[1:])
        assert answer.status == 2
        assert "on several paths" in answer.said
    assert shell("can-start", path).rows[0]["librmq"] == "reads"
    assert sorted(path.rglob("*")) == before


def test_a_log_of_two_files_on_two_paths(shell: Shell, whole: Path) -> None:
    for here in (0, 1):
        path = shell.folder / f"s{here}"
        spread(whole, path, here=here, of=2, into=path / "log-b", files=2)
        with MessageStore.open(path, read_only=True) as store:
            assert (store.log.begin, len(store.log.sequence.starts)) == (0, 2)
        with pytest.raises(NotAStoreError, match="on several paths"):
            Broker.open(path)


def test_a_snapshot_has_one_path_and_can_be_written(shell: Shell, whole: Path) -> None:
    path = spread(whole, shell.folder / "s", here=0, of=2, into=shell.folder / "s" / "log-b")
    snapshot(str(path), str(shell.folder / "copy"))
    assert len(list((shell.folder / "copy" / "commitlog").iterdir())) == 6
    with Broker.open(shell.folder / "copy", runner=ManualRunner()) as broker:
        assert broker.store.append(Message("T", b"new")).queue_offset == MESSAGES


@pytest.mark.parametrize("keeps_commitlog", [True, False])
def test_paths_elsewhere_are_named(shell: Shell, whole: Path, keeps_commitlog: bool) -> None:
    elsewhere = shell.folder / "disk-b" / "log"
    path = spread(whole, shell.folder / "s", here=0, of=2, into=elsewhere)
    paths = ["--log-path", str(elsewhere)]
    if not keeps_commitlog:
        (path / "commitlog").rename(shell.folder / "disk-a")
        paths += ["--log-path", str(shell.folder / "disk-a")]
    assert answers(shell, path, *paths) == answers(shell, whole)
    answer = shell("recover", path, *paths)
    assert answer.status == 2
    assert "on several paths" in answer.said
    without = shell("count", path)  # each command names them for itself
    assert without.status == 2
    assert "storePathCommitLog" in without.said
    assert "--log-path" in without.said


def test_what_helps_where_few_files_are_here(shell: Shell, whole: Path) -> None:
    path = spread(whole, shell.folder / "s", here=0, of=2, into=shell.folder / "b", files=3)
    for command in ("count", "dump", "topics"):
        answer = shell(command, path)
        assert answer.status in (1, 2)
        assert "--log-path" in answer.said, command
    links = shell.folder / "links"
    shutil.copytree(path, links, ignore=shutil.ignore_patterns("commitlog"))
    (links / "commitlog").mkdir()
    for file in (*(path / "commitlog").iterdir(), *(shell.folder / "b").iterdir()):
        os.symlink(file, links / "commitlog" / file.name)
    assert shell("dump", links).rows == shell("dump", path, "--log-path", shell.folder / "b").rows
    assert shell("count", path).status == 1  # without the other path
    with pytest.raises(CorruptionError, match="storePathCommitLog"):
        Broker.open(path)


def test_only_the_first_file_is_here(shell: Shell, whole: Path) -> None:
    """librmq would write a second file with the name of that on the other path."""
    path = spread(whole, shell.folder / "s", here=0, of=6, into=shell.folder / "b")
    with pytest.raises(CorruptionError, match="storePathCommitLog") as raised:
        Broker.open(path)
    assert raised.value.file == str(path / "commitlog" / f"{SIZE:020}")
    assert shell("count", path).status == 1
    assert len(list((path / "commitlog").iterdir())) == 1


def test_only_an_empty_file_is_here(shell: Shell, whole: Path) -> None:
    """A broker that is stopped can leave the next file, without a record, on another path than the last one."""
    path = spread(whole, shell.folder / "s", here=6, of=7, into=shell.folder / "b")
    (path / "commitlog" / f"{6 * SIZE:020}").write_bytes(bytes(SIZE))
    (path / "checkpoint").unlink()
    shutil.rmtree(path / "index")
    for command in ("count", "topics", "verify", "diagnose", "show"):
        answer = shell(command, path)
        assert answer.status == 1
        assert "the log begins at 24576 and has no record" in answer.said + answer.out
    with pytest.raises(CorruptionError, match="storePathCommitLog"):
        Broker.open(path)
    assert shell("count", path, "--log-path", shell.folder / "b").rows[0]["messages"] == MESSAGES


def test_a_recovery_without_any_record_survives_a_kill(shell: Shell, whole: Path) -> None:
    path = spread(whole, shell.folder / "s", here=6, of=7, into=shell.folder / "b")
    (path / "commitlog" / f"{6 * SIZE:020}").write_bytes(bytes(SIZE))
    with MessageStore.open(path, thorough=True, background=False) as store:
        assert store.verify().sound
        killed = shutil.copytree(path, shell.folder / "killed")
    assert verify(killed).sound
    with MessageStore.open(killed, background=False) as store:
        assert store.append(Message("T", b"after")).queue_offset == store.queues["T", 0].max_offset - 1


def test_copies_and_older_files_are_no_paths(shell: Shell, whole: Path) -> None:
    path = shutil.copytree(whole, shell.folder / "s")
    shutil.copytree(path / "commitlog", path / "commitlog.bak")
    first, second, *_ = sorted((path / "commitlog").iterdir())
    for file in (first, second):
        file.unlink()
    (path / "old").mkdir()
    shutil.copy(whole / "commitlog" / first.name, path / "old")  # not next to a file of the log
    (path / "zeros").mkdir()
    (path / "zeros" / second.name).write_bytes(bytes(SIZE))
    with Broker.open(path, runner=ManualRunner()) as broker:
        assert broker.store.log.begin == 2 * SIZE


def test_a_path_that_a_young_broker_has_not_used_is_empty(shell: Shell, whole: Path) -> None:
    path = shutil.copytree(whole, shell.folder / "s")
    (shell.folder / "empty").mkdir()
    assert answers(shell, path, "--log-path", str(shell.folder / "empty")) == answers(shell, whole)
    answer = shell("recover", path, "--log-path", shell.folder / "empty")  # its next file belongs there
    assert (answer.status, "on several paths" in answer.said) == (2, True)
    answer = shell("count", path, "--log-path", shell.folder / "none")
    assert (answer.status, "expected a folder with files of a log" in answer.said) == (2, True)


def test_a_report_takes_the_paths_of_a_store(shell: Shell, whole: Path) -> None:
    path = spread(whole, shell.folder / "s", here=0, of=2, into=shell.folder / "b")
    assert "--log-path" in shell("report", path).said
    (row,) = shell("report", path, "--log-path", shell.folder / "b").rows
    shell("report", whole, "-o", "whole.html")
    report, expected = (json.loads((shell.folder / name).read_text("utf-8")) for name in (row["json"], "whole.json"))
    assert report["stores"][0]["traffic"] == expected["stores"][0]["traffic"]
    answer = shell("report", path, whole, "--log-path", shell.folder / "b")
    assert (answer.status, "--log-path: expected it with a single folder" in answer.said) == (2, True)


@pytest.mark.slow
def test_a_console_takes_the_paths_of_a_store(shell: Shell, whole: Path) -> None:
    path = spread(whole, shell.folder / "s", here=0, of=2, into=shell.folder / "b")
    answer = shell("console", "127.0.0.1:1", "--log-path", shell.folder / "b")
    assert (answer.status, "--log-path: expected it with the folder" in answer.said) == (2, True)
    command = [sys.executable, "-P", "-m", "librmq", "console", path, "--log-path", shell.folder / "b"]
    with Process([str(word) for word in command], stdout=subprocess.PIPE, text=True, env=environment()) as process:
        link = json.loads(process.stdout.readline())["url"]
        with httpx.Client(follow_redirects=True) as client:
            assert f">{MESSAGES}<" in client.get(link.replace("/?", "/topics?")).text
        process.terminate()


def test_a_folder_without_log_files_is_refused(shell: Shell, whole: Path) -> None:
    answer = shell("count", whole, "--log-path", shell.folder)
    assert answer.status == 2
    assert "expected a folder with files of a log" in answer.said
    answer = shell("count", whole, "--log-path", shutil.copytree(whole / "commitlog", shell.folder / "copy"))
    assert answer.status == 2
    assert "of this name too" in answer.said


def test_static_topics_are_named(shell: Shell, whole: Path) -> None:
    """Their queues are those of several brokers, whose numbers users see."""
    path = shutil.copytree(whole, shell.folder / "s")
    (path / "config").mkdir(exist_ok=True)
    table = {"T": {"topic": "T", "totalQueues": 4, "bname": "broker-a", "epoch": 1, "hostedQueues": {}}}
    (path / "config" / "topicQueueMapping.json").write_text(json.dumps({"topicQueueMappingInfoMap": table}))
    for command in ("verify", "topics", "stats"):
        said = shell(command, path).said
        assert "topicQueueMapping.json" in said, command
        assert "static topic T" in said, command
