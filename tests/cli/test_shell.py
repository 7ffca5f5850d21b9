"""``librmq send`` and ``librmq consume``: a producer and a worker in a shell; ``librmq schedules``."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import librmq
from librmq import Broker, ManualClock, ManualRunner
from librmq.diagnosis import StoreView, pending_messages, story
from librmq.scheduling.schedules import ScheduleRule
from librmq.store import MessageStore
from librmq.wire.remoting import RemotingServer
from tests.cli.stand import Shell
from tests.programs import POSIX, environment

pytestmark = [POSIX, pytest.mark.platform]


def ran(*words: object, given: str = "", **settings: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "librmq", *map(str, words)]
    return subprocess.run(command, input=given, capture_output=True, text=True, env=environment(), **settings)


def bodies(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [json.loads(line)["body"] for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def sent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sent") / "s"
    sent = ran("send", path, "t", "--create", "--lines", "--tag", "x", given="one\ntwo\nthree\n")
    assert (sent.returncode, len(sent.stdout.splitlines())) == (0, 3), sent.stderr
    return path


@pytest.fixture
def store(sent: Path, tmp_path: Path) -> Path:
    """A store with the lines one, two and three in the topic t."""
    return Path(shutil.copytree(sent, tmp_path / "s"))


def test_what_was_sent_is_printed_once_for_a_group(store: Path) -> None:
    first = ran("consume", store, "t", "--group", "g", "--until-end")
    assert (first.returncode, sorted(bodies(first))) == (0, ["one", "three", "two"])
    assert {json.loads(line)["properties"]["TAGS"] for line in first.stdout.splitlines()} == {"x"}
    assert ran("consume", store, "t", "--group", "g", "--until-end").stdout == ""


@pytest.mark.slow
def test_max_leaves_the_rest(store: Path) -> None:
    first = bodies(ran("consume", store, "t", "--group", "g", "--max", "2"))
    rest = bodies(ran("consume", store, "t", "--group", "g", "--until-end"))
    assert (len(first), sorted(first + rest)) == (2, ["one", "three", "two"])


@pytest.mark.slow
def test_a_broken_pipe_gives_the_rest_back(tmp_path: Path) -> None:
    lines = "".join(f"{number}-{'x' * 1000}\n" for number in range(300))
    assert ran("send", tmp_path / "s", "t", "--create", "--lines", given=lines).returncode == 0
    words = [sys.executable, "-m", "librmq", "consume", str(tmp_path / "s"), "t", "--group", "g"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment()) as child:
        assert child.stdout is not None
        first = [json.loads(child.stdout.readline())["body"] for _ in range(3)]
        child.stdout.close()
        assert child.wait(60) == 0
    rest = bodies(ran("consume", tmp_path / "s", "t", "--group", "g", "--until-end"))
    lost = 300 - len({*first, *rest})
    assert lost * 1500 < (1 << 17)  # what the pipe had when its reader left: it was written


@pytest.mark.slow
def test_a_program_gets_the_body_and_its_failure_is_one_with_its_last_line(store: Path) -> None:
    assert ran("group", "create", store, "g", "--retries", "0").returncode == 0
    script = (
        'read body; [ "$body" != two ] || { echo first >&2; echo "no stock" >&2; exit 3; }; '
        'echo "$body $MESSAGE_TOPIC $MESSAGE_TAG $MESSAGE_ATTEMPT"'
    )
    done = ran("consume", store, "t", "--group", "g", "--until-end", "--", "sh", "-c", script)
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == ["one t x 1", "three t x 1"]
    assert "first\nno stock\n" in done.stderr
    (letter,) = map(json.loads, ran("dead-letters", store, "--group", "g").stdout.splitlines())
    assert letter["cause"] == "ReconsumeLater: no stock"


def test_a_failure_is_a_retry(store: Path) -> None:
    ran("consume", store, "t", "--group", "g", "--until-end", "--", "false")
    with MessageStore.open(store, read_only=True) as opened:
        assert [message.kind for message in pending_messages(opened)] == ["retry"] * 3


@pytest.mark.slow
def test_until_end_takes_the_retries_that_are_due(tmp_path: Path) -> None:
    """A worker that cron starts would else never try a failed message again, because it ends before the first look."""
    with Broker.open(tmp_path / "s", runner=ManualRunner(ManualClock(1_700_000_000_000))) as broker:
        with librmq.Producer(broker, "shop") as producer:
            producer.send("t", b"late")
        failing = librmq.PushConsumer(broker, "g", consume_from=librmq.ConsumeFrom.FIRST)
        failing.subscribe("t", lambda message: 1 / 0)
        with failing:
            broker.runner.pass_time(1)
    again = ran("consume", tmp_path / "s", "t", "--group", "g", "--until-end")
    assert (again.returncode, bodies(again)) == (0, ["late"]), again.stderr


@pytest.mark.slow
def test_an_end_fails_nothing(store: Path) -> None:
    assert "what listeners call" not in ran("consume", store, "t", "--group", "g", "--max", "1").stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.slow
def test_a_full_disk_is_an_error_and_acknowledges_nothing(store: Path) -> None:
    with open("/dev/full", "wb") as full:
        words = [sys.executable, "-m", "librmq", "consume", str(store), "t", "--group", "g", "--until-end"]
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, env=environment())
    assert (done.returncode, "No space left on device" in done.stderr) == (2, True), done.stderr
    assert len(bodies(ran("consume", store, "t", "--group", "g", "--until-end"))) == 3


@pytest.mark.slow
def test_a_share_s_processes_and_a_shell_use_one_store(store: Path) -> None:
    with librmq.share(store) as broker:
        assert ran("send", store, "t", "four").returncode == 0
        assert len(list(broker.messages("t"))) == 4
        assert len(bodies(ran("consume", store, "t", "--group", "g", "--until-end"))) == 4


@pytest.mark.slow
def test_over_a_name_server(tmp_path: Path) -> None:
    with Broker.temporary() as broker, RemotingServer(broker) as server:
        place = server.address
        sent = ran("send", place, "t", "-", "--key", "k", "--property", "a=b", given="text")
        assert sent.returncode == 0, sent.stderr
        (message,) = broker.messages("t")
        assert (message.body, message.keys, message.properties["a"]) == (b"text", ("k",), "b")
        done = ran("consume", place, "t", "--group", "g", "--max", "1")
        assert bodies(done) == ["text"], done.stderr


@pytest.mark.parametrize(
    ("words", "given", "what"),
    [
        (["send", "none", "t", "x"], "", "none: expected the folder of a store"),
        (["consume", "none", "t", "--group", "g"], "", "none: expected the folder of a store"),
        (
            ["consume", "s", "t", "--group", "g", "--", "no-such-program"],
            "",
            "no-such-program: there is no such program",
        ),
        (["send", "s", "t", "--lines"], "a\n\nb\n", "line 2 of standard input is empty"),
        (["send", "s", "t", "x", "--lines"], "", "--lines: expected no BODY"),
        (["send", "s", "no topic", "x"], "", "topic"),
    ],
)
def test_bad_input_is_refused(shell: Shell, sent: Path, words: list[str], given: str, what: str) -> None:
    shutil.copytree(sent, shell.folder / "s")
    answer = shell(*words, given=given)
    assert answer.status == 2
    assert what in answer.said


# ---- schedules


def test_schedules_are_listed_wait_and_are_in_the_story(tmp_path: Path, shell: Shell) -> None:
    folder, runner = tmp_path / "scheduled", ManualRunner(ManualClock(0))
    with Broker.open(folder, runner=runner) as broker:
        broker.set_schedule("hourly", topic="t", every=3600)
        broker.set_schedule("paused", topic="t", every=60)
        broker.pause_schedule("paused")
        runner.advance(3_600_000)
    hourly, paused = shell("schedules", folder).rows
    assert hourly == {
        "name": "hourly", "topic": "t", "next_ms": 7_200_000, "last_ms": 3_600_000, "paused": False,
        "rule": "every 3600 s", "missed": "once",
    }  # fmt: skip
    assert (paused["next_ms"], paused["paused"]) == (None, True)
    (waiting,) = shell("pending", folder, "--kind", "schedule").rows
    assert (waiting["topic"], waiting["due_ms"]) == ("t", 7_200_000)
    assert waiting["unique_key"] == ScheduleRule.message_id("hourly", 7_200_000)
    with MessageStore.open(folder, read_only=True) as store:
        (event,) = (event for event in story(StoreView.over(store), ScheduleRule.message_id("hourly", 3_600_000)))
        assert (event.event, event.note) == ("stored", "by schedule hourly")
