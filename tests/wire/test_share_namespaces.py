"""Processes of two PID namespaces, as of two containers, share one folder."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Final

import pytest

import librmq
from librmq import MessageStore
from librmq.clock import SystemClock
from librmq.store import verify
from tests.programs import Process, environment

CLOCK: Final = SystemClock()

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("sys.platform != 'linux'", reason="no PID namespaces"),
    pytest.mark.skipif("not hasattr(os, 'geteuid') or os.geteuid() != 0", reason="only root makes PID namespaces"),
    pytest.mark.skipif(shutil.which("unshare") is None, reason="no program that makes PID namespaces"),
]

MEMBER = """
import sys
import librmq
from librmq.wire._peer_sends import PeerSends

alone, append = [0], PeerSends.send

def counted(self, request):
    sent = append(self, request)
    alone[0] += sent is not None
    return sent

PeerSends.send = counted
with librmq.share(sys.argv[1], wait=60) as shared, librmq.Producer(shared, "shop", timeout=60) as producer:
    for words in map(str.split, sys.stdin):
        for number in range(int(words[1])):
            producer.send("orders", f"{words[0]} {number}".encode())
        shared.topic_route("absent")  # an owner is asked for it, without which this has appended perhaps
        print(words[0], alone[0], shared.is_owner, flush=True)
"""
COUNT = 300


CONSUMER = """
import os
import sys
import threading
import librmq

lines = os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
waits = sys.argv[3] == "waits"

def listen(message):
    os.write(lines, b"begins " + message.body + b"\\n")
    if waits and message.body == b"0":
        threading.Event().wait()
    os.write(lines, b"ends " + message.body + b"\\n")

with librmq.share(sys.argv[1], wait=60) as shared:
    consumer = librmq.PushConsumer(shared, "g", threads=2, consume_from=librmq.ConsumeFrom.FIRST)
    consumer.subscribe("orders", listen)
    with consumer:
        print(os.getpid(), flush=True)
        sys.stdin.readline()
"""


def member(path: Path, *words: object, in_namespace: bool, program: str = MEMBER) -> Process[str]:
    before = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"] if in_namespace else []
    command = [*before, sys.executable, "-P", "-c", program, str(path), *map(str, words)]
    return Process(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment())


def skip_without_namespaces() -> None:
    if subprocess.run(["unshare", "--pid", "--fork", "--mount-proc", "true"], check=False).returncode:
        pytest.skip("this container may not make PID namespaces")


def ask(process: Process[str], name: str, count: int = COUNT) -> None:
    process.stdin.write(f"{name} {count}\n")
    process.stdin.flush()


def answer(process: Process[str]) -> tuple[int, bool]:
    """Return how many messages it has appended alone, and whether it owns the store."""
    _, alone, is_owner = process.stdout.readline().split()
    return int(alone), is_owner == "True"


@pytest.mark.parametrize("owner", ["outside", "inside"])
def test_two_pid_namespaces_append_to_one_log(tmp_path: Path, owner: str) -> None:
    skip_without_namespaces()
    store = tmp_path / "store"
    with member(store, in_namespace=owner == "inside") as first:
        ask(first, "first")
        assert answer(first) == (0, True)
        with member(store, in_namespace=owner != "inside") as second:
            ask(second, "second")
            ask(first, "beside")
            alone, is_owner = answer(second)
            assert not is_owner
            assert alone > COUNT // 2
            answer(first)
            first.kill()
            first.stdout.read()  # until the process in the namespace has ended too
            ask(second, "after")
            assert answer(second)[1]
            second.stdin.close()
            assert second.wait(60) == 0
    with MessageStore.open(store, read_only=True) as stored:
        bodies = [message.body for message in stored.topic_messages("orders")]
    names = (b"first", b"second", b"beside", b"after")
    expected = [b"%s %d" % (name, number) for name in names for number in range(COUNT)]
    assert sorted(bodies) == sorted(expected)
    assert verify(str(store)).sound


def test_a_kill_in_one_namespace_repeats_what_was_in_work_there(tmp_path: Path) -> None:
    """Both processes have the same process id, by which neither may be taken for the other."""
    skip_without_namespaces()
    store, ledger = tmp_path / "store", tmp_path / "ledger"
    with librmq.share(store) as shared, librmq.Producer(shared, "shop") as producer:
        shared.create_topic("orders", 2)
        for number in range(COUNT):
            producer.send("orders", b"%d" % number)

    def wait_for(lines: int) -> list[str]:
        for _ in range(1200):
            ended = [line for line in ledger.read_text().splitlines() if line.startswith("ends")]
            if len(set(ended)) >= lines:
                return ended
            CLOCK.wait(threading.Event(), 0.05)
        raise AssertionError(f"{len(set(ended))} of {lines} messages are consumed")

    with member(store, ledger, "waits", in_namespace=True, program=CONSUMER) as first:
        assert first.stdout.readline() == "1\n"
        last = wait_for(COUNT - 1)[-1]
        with member(store, ledger, "runs", in_namespace=True, program=CONSUMER) as second:
            assert second.stdout.readline() == "1\n"
            first.kill()
            first.stdout.read()
            wait_for(COUNT)
            second.stdin.close()
            assert second.wait(60) == 0
    begun = Counter(line for line in ledger.read_text().splitlines() if line.startswith("begins"))
    in_work = {"begins 0", last.replace("ends", "begins")}  # nothing says that the end of the last one is kept
    assert {line for line, times in begun.items() if times > 1} <= in_work
    assert begun["begins 0"] == 2
    with librmq.share(store) as shared:
        assert shared.lag("g") == 0
