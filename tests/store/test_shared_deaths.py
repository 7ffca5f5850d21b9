"""Processes that die or stop while they append to a shared log: at each line of an append, and with the lock."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from librmq import Message, MessageStore
from librmq.errors import BrokerUnreachableError
from librmq.files import DiskFiles
from librmq.store import verify
from librmq.store.engine._append_page import AppendPage
from librmq.store.peer_appends import PeerAppender
from tests.budget import run
from tests.conftest import SlowBudget
from tests.interrupting import killed_at_line
from tests.store.shared_store import CONFIG, Shared, within_a_write

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="only there peers append by themselves"),
    pytest.mark.platform,
]

if sys.platform != "win32":
    import fcntl

REFUSED = 2
"""Exit status of a peer that may not append at this moment, because the owner has to send first."""
STEP = 12
"""The quick check lets a peer die at one line in this many, the whole check at four times as many."""
LINES = 160
"""A few more than an append of an owner has."""


@contextmanager
def child(work: Callable[[Callable[[], object], Callable[[], object]], int | None]) -> Iterator[Child]:
    """Fork a process that calls ``work(tell, wait)``: tell its parent of a step, and wait for a word of it.

    ``work`` returns the exit status, None for 0.
    """
    (reading, telling), (waiting, writing) = os.pipe(), os.pipe()
    process = os.fork()
    if not process:
        try:
            status = work(lambda: os.write(telling, b"."), lambda: os.read(waiting, 1))
        except BaseException:
            status = 1
        os._exit(status or 0)
    os.close(telling)
    os.close(waiting)
    made = Child(process, reading, writing)
    try:
        yield made
    finally:
        made.end(signal.SIGKILL)


def stop_here() -> None:
    """Stop this process within this call: a signal to the process lets a thread that isn't its first run on."""
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


class Child:
    """A forked process, and the pipes to it."""

    def __init__(self, process: int, reading: int, writing: int) -> None:
        self.process, self._reading, self._writing = process, reading, writing
        self._status: int | None = None

    def step(self) -> bool:
        """Wait until it tells of a step; return False if it has ended before."""
        return os.read(self._reading, 1) == b"."

    def let_on(self) -> None:
        os.write(self._writing, b".")

    def end(self, number: int = 0) -> int:
        """Wait for its end, after a signal; return its exit status, or its signal as a negative number."""
        if self._status is None:
            os.kill(self.process, number)
            self._status = os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])
            os.close(self._reading)
            os.close(self._writing)
        return self._status


def lines() -> Iterator[int]:
    """Yield lines until the caller breaks."""
    return iter(range(0, 1 << 20, STEP if run.quick else STEP // 4))


@pytest.mark.slow
@pytest.mark.parametrize("finder", ["peer", "owner"])
def test_a_peer_dies_at_each_line_of_an_append(tmp_path: Path, finder: str) -> None:
    shared = Shared(tmp_path)
    expected = [b"first"]
    for line in lines():
        status = REFUSED
        while status == REFUSED:
            shared.direct(before := b"before %d" % line)
            expected.append(before)

            def die(*_: object, line: int = line) -> int:
                peer = shared.peer()
                if peer.append(Message("orders", b"elsewhere"), 1) is None:
                    return REFUSED
                killed_at_line(line, lambda: peer.append(Message("orders", b"dying %d" % line, keys="k"), 0))
                return 0

            with child(die) as dying:
                status = dying.end()
        assert status in (0, -signal.SIGKILL)
        if finder == "peer":
            shared.direct(b"after %d" % line, peer=1)
        else:
            shared.send(Message("orders", b"after %d" % line))
        expected.append(b"after %d" % line)
        if not status:
            break
    bodies = shared.bodies()
    assert [body for body in bodies if not body.startswith(b"dying")] == expected
    dying_bodies = [body for body in bodies if body.startswith(b"dying")]
    assert len(dying_bodies) == len({*dying_bodies})
    shared.close()
    assert verify(shared.path).sound


@pytest.mark.slow
def test_an_owner_dies_at_each_line_of_an_append(tmp_path: Path, slow_budget: SlowBudget) -> None:
    """A peer goes on by the page of an owner that has died, until the next one has closed it."""
    for number in slow_budget.rounds(LINES, "lines at which an owner dies", at_least=4, of_list=True):
        line = number * 37 % LINES
        folder = tmp_path / f"{line}"
        folder.mkdir()

        def own(
            tell: Callable[[], object], wait: Callable[[], object], folder: Path = folder, line: int = line
        ) -> None:
            shared = Shared(folder)
            shared.direct(b"first of a peer", 1)
            tell()
            wait()
            shared.direct(b"second of a peer", 1)
            killed_at_line(line, lambda: shared.store.append(Message("orders", b"own"), 0))
            tell()

        with child(own) as owner:
            assert owner.step()
            peer = PeerAppender.open(str(folder / "store"), str(folder / "appends"), 20)
            assert peer is not None
            mapped = peer.append(Message("orders", b"mapped"), 0)
            owner.let_on()
            is_acknowledged = owner.step()
            status = owner.end()
        late = peer.append(Message("orders", b"late"), 0)
        PeerAppender.end_all(str(folder / "appends"), 20)
        assert peer.append(Message("orders", b"too late"), 0) is None
        with MessageStore.open(folder / "store", CONFIG, files=DiskFiles(has_peers=True)) as store:
            bodies = [message.body for message in store.messages("orders", 0)]
        sent = {b"first": True, b"mapped": mapped, b"own": is_acknowledged, b"late": late}
        assert all(bodies.count(body) == 1 for body, was_sent in sent.items() if was_sent), bodies
        assert {*bodies} <= sent.keys()
        peer.close()
        assert status in (0, -signal.SIGKILL)
        assert verify(str(folder / "store")).sound


@pytest.mark.parametrize("way", ["goes on", "is killed"])
def test_a_peer_is_stopped_with_the_lock(tmp_path: Path, way: str) -> None:
    """Others fail within their limit and name it; they go on as soon as it has ended its append, or itself."""
    shared = Shared(tmp_path)
    shared.direct(b"before")

    def stop(tell: Callable[[], object], _: Callable[[], object]) -> int:
        def tell_and_stop() -> None:
            tell()
            stop_here()

        with within_a_write(tell_and_stop):
            return REFUSED if shared.peer().append(Message("orders", b"stopped"), 0) is None else 0

    with ExitStack() as ending:
        stopped = ending.enter_context(child(stop))
        while not stopped.step():
            assert stopped.end() == REFUSED
            shared.direct(b"before")
            stopped = ending.enter_context(child(stop))
        os.waitid(os.P_PID, stopped.process, os.WSTOPPED)
        for _ in range(2):
            impatient = shared.peer(0.05)
            with pytest.raises(BrokerUnreachableError, match=f"process {stopped.process} "):
                impatient.append(Message("orders", b"refused"), 0)
            impatient.close()
        if way == "goes on":
            assert stopped.end(signal.SIGCONT) == 0
        else:
            assert stopped.end(signal.SIGKILL) == -signal.SIGKILL
        shared.direct(b"after")
        bodies = [body for body in shared.bodies() if body != b"before"]
        assert bodies == [b"first", *[b"stopped"] * (way == "goes on"), b"after"]
    shared.close()
    assert verify(shared.path).sound


def test_a_fork_does_not_keep_the_lock_of_a_writer_that_is_killed(tmp_path: Path) -> None:
    shared = Shared(tmp_path)

    def fork_and_die(tell: Callable[[], object], wait: Callable[[], object]) -> int:
        def fork_here() -> None:
            if os.fork() == 0:
                tell()
                wait()
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)

        with within_a_write(fork_here):
            return REFUSED if shared.peer().append(Message("orders", b"killed"), 0) is None else 0

    with ExitStack() as ending:
        killed = ending.enter_context(child(fork_and_die))
        while not killed.step():
            assert killed.end() == REFUSED
            shared.direct(b"before")
            killed = ending.enter_context(child(fork_and_die))
        ending.callback(killed.let_on)
        shared.direct(b"after")
    assert shared.bodies()[-1] == b"after"
    shared.close()
    assert verify(shared.path).sound


def test_an_owner_is_stopped_with_the_lock(tmp_path: Path) -> None:
    """Its peers fail within their limit and name it; they go on as soon as it has ended its append."""

    def own(tell: Callable[[], object], wait: Callable[[], object]) -> None:
        shared = Shared(tmp_path)
        shared.direct(b"before", 1)
        take = AppendPage.take

        def take_and_stop(page: AppendPage, *words: Any, **fields: Any) -> None:
            take(page, *words, **fields)
            AppendPage.take = take  # type: ignore[method-assign]
            tell()
            stop_here()

        while not shared.appends.is_open:
            shared.direct(b"before", 1)
        AppendPage.take = take_and_stop  # type: ignore[assignment, method-assign]
        shared.store.append(Message("orders", b"own"), 0)
        tell()
        wait()
        shared.close()

    with child(own) as owner:
        assert owner.step()
        os.waitid(os.P_PID, owner.process, os.WSTOPPED)
        peer = PeerAppender.open(str(tmp_path / "store"), str(tmp_path / "appends"), 0.05)
        assert peer is not None
        with pytest.raises(BrokerUnreachableError, match=f"process {owner.process} "):
            peer.append(Message("orders", b"refused"), 0)
        os.kill(owner.process, signal.SIGCONT)
        assert owner.step()
        peer.append(Message("orders", b"after"), 0)
        peer.close()
        owner.let_on()
        assert owner.end() == 0
    assert verify(str(tmp_path / "store")).sound


def test_a_process_that_is_stopped_as_it_takes_the_lock_is_named(tmp_path: Path) -> None:
    """The page does not name it yet."""
    shared = Shared(tmp_path)

    def lock(tell: Callable[[], object], wait: Callable[[], object]) -> None:
        with open(shared.page, "rb") as page:
            fcntl.flock(page, fcntl.LOCK_EX)
            tell()
            wait()

    shared.direct(b"before")
    with child(lock) as stopped:
        assert stopped.step()
        impatient = shared.peer(0.05)
        with pytest.raises(BrokerUnreachableError, match=f"process {stopped.process} "):
            impatient.append(Message("orders", b"refused"), 0)
        impatient.close()
        stopped.let_on()
        assert stopped.end() == 0
    shared.direct(b"after")
    shared.close()
