"""Workers of Celery over the transport: their pools, retries, delays, inspection, and their ends by SIGKILL."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import librmq
from librmq.wire.remoting import RemotingServer
from tests.programs import Process, environment, run_program
from tests.wire.stub import wait_until

pytest.importorskip("celery")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.platform,
    pytest.mark.skipif(sys.platform == "win32", reason="librmq.share is not for Windows yet"),
]
TASKS = "tests.integrations.celery_tasks"


@contextmanager
def worker(folder: Path, *words: str, **variables: str) -> Iterator[Process[str]]:
    (folder / "results").mkdir(exist_ok=True)
    with open(folder / "worker.log", "a") as log:
        process = Process(
            [sys.executable, "-m", "celery", "-A", TASKS, "worker", "--concurrency", "2", *words],
            env=environment(TASKS_FOLDER=str(folder), **variables),
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        with process:
            yield process
            # A signal that comes before Celery has its handlers ends the process at once.
            wait_until(lambda: process.poll() is not None or (folder / f"ready {process.pid}").exists(), "it has begun")
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                assert process.wait(200) == 0


def call(folder: Path, code: str, **variables: str) -> str:
    """Run code of a sender, and return what it prints."""
    (folder / "results").mkdir(exist_ok=True)
    done = run_program(f"from {TASKS} import *\n{code}", timeout=300, TASKS_FOLDER=str(folder), **variables)
    assert not done.returncode, done.stderr + (folder / "worker.log").read_text()
    return done.stdout.strip()


def notes(folder: Path) -> Counter[str]:
    path = folder / "notes"
    return Counter(path.read_text().splitlines() if path.exists() else [])


EVERYTHING = """
from celery import chain, group
results = [add.delay(number, 1) for number in range(30)]
assert [result.get(timeout=200) for result in results] == list(range(1, 31))
assert third_time.delay().get(timeout=200) == 2
assert add.apply_async((1, 2), countdown=1).get(timeout=200) == 3
assert chain(add.s(1, 2), add.s(3))().get(timeout=200) == 6
assert group(add.s(number, 1) for number in range(5))().get(timeout=200) == [1, 2, 3, 4, 5]
print("all done")
"""
INSPECTION = """
inspect = app.control.inspect(timeout=100, limit=1)
assert [{"ok": "pong"}] == list(inspect.ping().values())
assert [names] == list(inspect.registered().values()) if (names := sorted(
    name for name in app.tasks if name.startswith("tests."))) else False
"""


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo"])
def test_pools(tmp_path: Path, pool: str) -> None:
    with worker(tmp_path, "--pool", pool):
        assert call(tmp_path, EVERYTHING + INSPECTION) == "all done"


def test_a_cluster(tmp_path: Path) -> None:
    with librmq.Broker.open(tmp_path / "broker") as broker, RemotingServer(broker) as server:
        address = f"librmq+connect://127.0.0.1:{server.port}"
        with worker(tmp_path, "--pool", "threads", TASKS_BROKER=address):
            assert call(tmp_path, EVERYTHING + INSPECTION, TASKS_BROKER=address) == "all done"


def test_a_worker_whose_processes_are_busy_answers(tmp_path: Path) -> None:
    with worker(tmp_path):
        ready = "assert add.delay(1, 1).get(timeout=200) == 2\n"  # a broadcast before has no queue yet
        call(tmp_path, ready + "for _ in range(8): held.delay()\n" + INSPECTION)
        assert not notes(tmp_path)
        (tmp_path / "go").touch()


def test_the_store_waits_instead_of_the_worker(tmp_path: Path) -> None:
    with worker(tmp_path, TASKS_DELAYED="1"):
        code = "print(add.apply_async((1, 2), countdown=3).get(timeout=200))"
        assert call(tmp_path, code, TASKS_DELAYED="1") == "3"


@pytest.mark.parametrize("owns", ["the worker", "the sender"])
def test_a_killed_worker_loses_nothing(tmp_path: Path, owns: str) -> None:
    many = 12
    send = f"for number in range({many}): note.delay(number, 0.3)"
    if owns == "the sender":
        call(tmp_path, send)
        owner = librmq.share(tmp_path / "queue")
    with worker(tmp_path) as first:
        if owns == "the worker":
            call(tmp_path, send)
        wait_until(lambda: sum(notes(tmp_path).values()) > 5, "the first worker works")
        os.killpg(first.pid, signal.SIGKILL)
        first.wait(60)
    with worker(tmp_path):
        wait_until(
            lambda: all(notes(tmp_path)[f"ends {number}"] for number in range(many)), "the second worker does the rest"
        )
    if owns == "the sender":
        owner.close()
    done = notes(tmp_path)
    assert max(done[f"begins {number}"] for number in range(many)) <= 2


@pytest.mark.parametrize("pool", ["threads", "solo"])
def test_a_task_that_ends_its_worker_is_a_dead_letter(tmp_path: Path, pool: str) -> None:
    call(tmp_path, "for number in range(6):\n    note.delay(number)\n    if number == 2: end_process.delay()")

    def causes() -> list[str]:
        with librmq.share(tmp_path / "queue") as shared:
            return [letter.properties["DEAD_LETTER_CAUSE"] for letter in shared.dead_letters("kombu")]

    def is_done() -> bool:
        return all(notes(tmp_path)[f"ends {number}"] for number in range(6)) and bool(causes())

    deaths = 0
    while not is_done():
        with worker(tmp_path, "--pool", pool) as process:
            wait_until(lambda: process.poll() is not None or is_done(), "the worker ends, or everything is done")
            deaths += process.poll() == 1
        assert deaths <= 1 + 3
    assert deaths == 1 + 3
    assert causes() == ["its process ended 3 times while it ran alone (max_process_deaths=3)"]


def test_a_warm_shutdown_ends_running_tasks_and_loses_none(tmp_path: Path) -> None:
    """On a busy machine a task that ends during the shutdown can run again: its acknowledgement came too late."""
    with worker(tmp_path) as first:
        call(tmp_path, "for number in range(8): note.delay(number, 1)")
        wait_until(lambda: sum(notes(tmp_path).values()) >= 2, "it works")
        first.send_signal(signal.SIGTERM)
        assert first.wait(200) == 0
    with worker(tmp_path):
        wait_until(lambda: all(notes(tmp_path)[f"ends {number}"] for number in range(8)), "the rest is done")
    assert min(notes(tmp_path).values()) >= 1


def end(worker: Process[str], log: Path) -> None:
    """Wait for the end of a worker; kill one that Celery itself holds up.

    Its handler of SIGQUIT waits in the main thread for the results of its processes. Where the signal came while that
    thread held the counter of results or had written half of a task, a process waits for it in turn.
    """
    try:
        worker.wait(90)
    except subprocess.TimeoutExpired:
        worker.send_signal(signal.SIGUSR1)  # prints the stacks of all threads
        wait_until(lambda: "LOCAL VARIABLES" in log.read_text(), "the stacks")
        stacks = log.read_text()
        assert ", in _flush_outqueue" in stacks, stacks
        worker.kill()
        worker.wait(60)


@pytest.mark.parametrize("number", [signal.SIGQUIT, signal.SIGKILL], ids=["cold", "killed"])
def test_a_worker_goes_on_when_the_owner_ends_and_a_cold_shutdown_loses_nothing(
    tmp_path: Path, number: signal.Signals
) -> None:
    """The owner is killed while the worker works; then the worker ends, and a new one does the rest."""
    many = 36
    (tmp_path / "results").mkdir()
    own = f"from {TASKS} import *\nadd.delay(1, 1); print('open', flush=True); input()"
    owner = Process(
        [sys.executable, "-c", own], env=environment(TASKS_FOLDER=str(tmp_path)), stdin=-1, stdout=-1, text=True
    )
    with owner:
        assert owner.stdout.readline() == "open\n"
        with worker(tmp_path) as first:
            call(tmp_path, f"for number in range({many}): note.delay(number, 0.2)")
            wait_until(lambda: sum(notes(tmp_path).values()) > 24, "the worker works")
            owner.kill()
            owner.wait(60)
            before = sum(notes(tmp_path).values())
            more = min(before + 6, 2 * many - 1)  # all may have ended before this was read
            wait_until(lambda: sum(notes(tmp_path).values()) > more, "it goes on without the owner")
            first.send_signal(number)
            end(first, tmp_path / "worker.log")
        with worker(tmp_path):
            wait_until(lambda: all(notes(tmp_path)[f"ends {each}"] for each in range(many)), "all tasks end")
    done = notes(tmp_path)
    assert max(done[f"begins {each}"] for each in range(many)) <= 3, "once more after each of the two ends"
