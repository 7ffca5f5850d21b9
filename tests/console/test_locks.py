"""No page reads a disk, or asks over a connection, while it holds the lock under which a runner's steps run."""

from __future__ import annotations

import mmap
import socket
from collections.abc import Callable, Iterator
from threading import get_ident
from typing import Any, Self

import pytest

from librmq import Broker, ManualRunner, MessageStore, ThreadRunner, connect
from librmq.files import MemoryFiles
from librmq.wire.remoting import RemotingServer
from tests.console.pages import Asked, console, shop

PAGES = (
    *("/", "/topics", "/topic?name=orders", "/topic?name=orders&key=o-3", "/topic?name=orders&sql=amount+%3E+50"),
    *("/groups", "/group?name=mail", "/group?name=billing", "/letters?group=mail", "/waiting", "/findings"),
)


class WatchedLock:
    """A runner's lock that says which thread holds it."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self._holders: list[int] = []

    def __enter__(self) -> None:
        self._lock.__enter__()
        self._holders.append(get_ident())

    def __exit__(self, *error: object) -> None:
        self._holders.pop()
        self._lock.__exit__(*error)

    @property
    def is_mine(self) -> bool:
        """Whether this thread holds it."""
        return get_ident() in self._holders

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lock, name)


class WatchedBuffer(mmap.mmap):
    note: Callable[[], None]

    def __new__(cls, size: int, note: Callable[[], None]) -> Self:
        self = super().__new__(cls, -1, size)
        self.note = note
        return self

    def __getitem__(self, place: Any) -> Any:
        self.note()
        return super().__getitem__(place)


class WatchedFiles(MemoryFiles):
    """Files that count the reads under a lock, while they are watched."""

    def __init__(self, lock: WatchedLock) -> None:
        super().__init__()
        self.runner_lock, self.is_watched, self.reads, self.reads_under_lock = lock, False, 0, 0

    def note(self) -> None:
        if self.is_watched:
            self.reads += 1
            self.reads_under_lock += self.runner_lock.is_mine

    def _new_buffer(self, path: str, size: int) -> mmap.mmap:
        return WatchedBuffer(size, self.note)


def noted(name: str) -> Callable[..., Any]:
    call = getattr(MemoryFiles, name)

    def called(self: WatchedFiles, *arguments: Any, **settings: Any) -> Any:
        self.note()
        return call(self, *arguments, **settings)

    return called


for reading in ("open", "list", "names", "status", "read", "read_used"):
    setattr(WatchedFiles, reading, noted(reading))


@pytest.fixture
def runner() -> ManualRunner:
    made = ManualRunner()
    made.lock = WatchedLock(made.lock)  # type: ignore[assignment]
    return made


@pytest.fixture
def files(runner: ManualRunner) -> WatchedFiles:
    return WatchedFiles(runner.lock)  # type: ignore[arg-type]


@pytest.fixture
def broker(runner: ManualRunner, files: WatchedFiles) -> Iterator[Broker]:
    with Broker.open("/store", runner=runner, files=files) as opened:
        yield opened


def test_pages_read_files_without_the_lock(broker: Broker, runner: ManualRunner, files: WatchedFiles) -> None:
    sent = shop(broker, runner)
    asked = Asked(console(broker, allow_changes=True))
    files.is_watched = True
    for page in (*PAGES, f"/message?id={sent[1]}", f"/?at={runner.now_ms()}"):
        files.reads = 0
        asked.page(page)
        assert files.reads_under_lock == 0, page
        assert files.reads or page in ("/topics", "/groups"), page
    with runner.lock, MessageStore.open("/store", read_only=True, files=files):  # the watch sees what it looks for
        pass
    assert files.reads_under_lock


class WatchedSocket(socket.socket):
    lock: WatchedLock
    requests = 0
    requests_under_lock = 0

    def sendall(self, *arguments: Any) -> None:
        WatchedSocket.requests += 1
        WatchedSocket.requests_under_lock += self.lock.is_mine
        super().sendall(*arguments)


def test_pages_ask_brokers_without_the_lock(
    broker: Broker, runner: ManualRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = shop(broker, runner)
    remote_runner = ThreadRunner()
    lock = WatchedLock(remote_runner.lock)
    remote_runner.lock = lock  # type: ignore[assignment]
    monkeypatch.setattr(WatchedSocket, "lock", lock, raising=False)

    def open_socket(address: tuple[str, int], timeout: float) -> socket.socket:
        plain = socket.create_connection(address, timeout)
        watched = WatchedSocket(fileno=plain.detach())
        watched.settimeout(timeout)
        return watched

    try:
        with (
            RemotingServer(broker) as server,
            connect(f"127.0.0.1:{server.port}", runner=remote_runner, open_socket=open_socket) as remote,
        ):
            asked = Asked(console(remote, allow_changes=True))
            for page in (*PAGES, f"/message?id={sent[1]}", "/change?what=resend&group=mail"):
                WatchedSocket.requests = 0
                asked.page(page)
                assert WatchedSocket.requests, page
            assert WatchedSocket.requests_under_lock == 0
    finally:
        remote_runner.shutdown()
