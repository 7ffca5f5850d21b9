"""Processes of two PID namespaces, as of two containers, share one folder."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from librmq import MessageStore
from librmq.store import verify
from tests.programs import Process, environment

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

def counted(self, *place, **fields):
    sent = append(self, *place, **fields)
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


def member(path: Path, *, in_namespace: bool) -> Process[str]:
    before = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"] if in_namespace else []
    command = [*before, sys.executable, "-P", "-c", MEMBER, str(path)]
    return Process(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment())


def ask(process: Process[str], name: str, count: int = COUNT) -> None:
    process.stdin.write(f"{name} {count}\n")
    process.stdin.flush()


def answer(process: Process[str]) -> tuple[int, bool]:
    """Return how many messages it has appended alone, and whether it owns the store."""
    _, alone, is_owner = process.stdout.readline().split()
    return int(alone), is_owner == "True"


@pytest.mark.parametrize("owner", ["outside", "inside"])
def test_two_pid_namespaces_append_to_one_log(tmp_path: Path, owner: str) -> None:
    if subprocess.run(["unshare", "--pid", "--fork", "--mount-proc", "true"], check=False).returncode:
        pytest.skip("this container may not make PID namespaces")
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
