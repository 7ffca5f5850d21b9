"""Processes that share a store: one owns it, and when it ends another takes over, and nothing is lost."""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import librmq
from librmq.clock import SystemClock
from librmq.protocol import QueryOffset
from librmq.testing import check_history
from librmq.wire import unix_sockets
from librmq.wire.unix_sockets import connect_to, owner_socket
from tests.programs import Process, environment
from tests.wire.stub import wait_until

pytestmark = pytest.mark.skipif("sys.platform == 'win32'", reason="no Unix domain sockets with credentials")
CLOCK = SystemClock()
WORKER = Path(__file__).with_name("share_worker.py")


class Worker:
    """A process of `share_worker`, and what it has printed."""

    def __init__(self, scene: Scene, name: str, **options: Any) -> None:
        words = [str(WORKER), str(scene.store), name, str(scene.folder), json.dumps(options)]
        self.name = name
        self.process: Process[str] = Process(
            [sys.executable, "-P", *words], stdin=-1, stdout=-1, text=True, env=environment()
        )
        self.lines: list[str] = []
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        self._scene = scene

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())

    @property
    def sends(self) -> list[tuple[str, float]]:
        """Outcome and seconds of each send."""
        return [(words[0], float(words[1])) for line in list(self.lines) if (words := line.split())[0] != "ready"]

    def wait_ready(self) -> Worker:
        wait_until(lambda: bool(self.lines) or self.process.poll() is not None, f"{self.name} is ready", 60)
        assert self.lines, f"{self.name} has failed"
        return self

    def wait_sends(self, more: int) -> None:
        count = len(self.sends) + more
        wait_until(lambda: len(self.sends) >= count, f"{self.name} sends", 60)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._scene.crashed(self.name)
        self.end()

    def stop_sending(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self) -> None:
        """End its input, and wait until it has shut down."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self._thread.join()
        self.process.stdout.close()
        self.process.wait()


class Scene:
    """The processes of one store."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = folder / "store"
        self.workers: dict[str, Worker] = {}
        self._count = 0
        self._events: list[dict[str, Any]] = []

    def start(self, **options: Any) -> Worker:
        self._count += 1
        worker = Worker(self, f"p{self._count}", **options)
        self.workers[worker.name] = worker
        return worker

    def owner(self) -> Worker:
        """Return the process that owns the store."""
        connected = connect_to(owner_socket(self.store), 5)
        with connected:
            pid = unix_sockets.credentials_of(connected).process
        return next(worker for worker in self.workers.values() if worker.process.pid == pid)

    def crashed(self, name: str) -> None:
        at_ms = CLOCK.now_ms()
        self._events.append({"event": "crash", "process": name, "at_ms": at_ms})
        self._events.append({"event": "crash", "broker": "broker-a", "at_ms": at_ms})
        del self.workers[name]

    def drain(self, group: str) -> None:
        """Stop all sends, and wait until a group has consumed everything."""
        for worker in self.workers.values():
            worker.stop_sending()
        with librmq.share(self.store) as shared:

            def is_drained() -> bool:
                with librmq.MessageStore.open(self.store, read_only=True) as store:
                    ends = {queue: store.queue_range(*queue)[1] for queue in store.queues if queue[0] == "orders"}
                progress = [(shared.call(QueryOffset(group, *queue)) or 0, end) for queue, end in ends.items()]
                return all(offset >= end for offset, end in progress)

            wait_until(is_drained, "everything is consumed", 90)
        self._events.append({"event": "drained", "group": group, "at_ms": CLOCK.now_ms() + 1})

    def events(self) -> list[dict[str, Any]]:
        lines = [line for path in sorted(self.folder.glob("*.jsonl")) for line in path.read_bytes().splitlines(True)]
        events = [json.loads(line) for line in lines if line.endswith(b"\n")] + self._events
        groups = {event["group"]: event for event in events if event["event"] == "group"}  # each process tells its own
        return [*groups.values(), *(event for event in events if event["event"] != "group")]


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path)
    try:
        yield made
    finally:
        for worker in list(made.workers.values()):
            worker.process.send_signal(signal.SIGCONT)
            worker.process.kill()
            worker.end()


@pytest.mark.parametrize("kills", [3, pytest.param(50, marks=pytest.mark.slow)])
def test_killed_owners_lose_nothing(scene: Scene, kills: int) -> None:
    for _ in range(3):
        scene.start(rate=100, group="billing").wait_ready()
    slowest = 0.0
    for _ in range(kills):
        before = {name: len(worker.sends) for name, worker in scene.workers.items()}
        scene.owner().kill()
        for worker in scene.workers.values():
            worker.wait_sends(20)
        outcomes = [send for name, worker in scene.workers.items() for send in worker.sends[before[name] :]]
        assert {outcome for outcome, _ in outcomes} == {"sent"}
        slowest = max(slowest, *(seconds for _, seconds in outcomes))
        scene.start(rate=100, group="billing").wait_ready()
    scene.drain("billing")
    for worker in list(scene.workers.values()):
        worker.end()
    assert check_history(scene.events()) == []
    print("slowest", slowest)
