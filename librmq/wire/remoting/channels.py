"""A client's connection on the server's side: frames in, frames out, and requests to the client.

Mirrors the server's half of ``NettyRemotingAbstract``.
"""

from __future__ import annotations

import queue
import socket
import ssl
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final

from librmq.errors import BrokerUnreachableError
from librmq.message.ids import Host
from librmq.protocol import Endpoint
from librmq.runtime.event_log import EventLog
from librmq.runtime.locks import Lock
from librmq.wire.remoting.frames import Frame, FrameSocket, encode

_log = EventLog("librmq.wire")
_MOST_TASKS: Final = 10_000
_MOST_ASKED: Final = 1_000


class Channel:
    """One connection. Thread-safe."""

    def __init__(self, connected: socket.socket, peer: Host, own_host: Host, endpoint: Endpoint) -> None:
        """``own`` is the address that the client has connected to; ``endpoint`` answers what clients ask the broker."""
        self._stream = FrameSocket(connected)
        self.peer = peer
        self.own = own_host
        self.endpoint = endpoint
        self.client_ids: set[str] = set()
        """The client ids in its heartbeats, usually one."""
        self.reader: threading.Thread | None = None
        self.is_open = True
        self.is_tls = False
        self._lock = Lock()
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._worker: threading.Thread | None = None
        self._asked: dict[int, Future[Frame]] = {}
        self._opaque = 0

    @property
    def client_id(self) -> str | None:
        """The client id of its heartbeats; None before the first one."""
        return next(iter(self.client_ids), None)

    def begin_tls(self, context: ssl.SSLContext) -> None:
        """Let the client begin TLS."""
        self.is_tls = True
        self._stream.begin_tls(context)

    def receive(self, size: int) -> bytes:
        """Wait for bytes and return them; none at the end of the connection. Called by one thread only."""
        return self._stream.receive(size)

    def write(self, data: bytes | bytearray) -> None:
        """Send bytes; a client that does not read them in time is cut off. Waits: never under a runner's lock."""
        try:
            self._stream.write(data)
        except OSError:
            self.close()

    def run_later(self, task: Callable[[], None]) -> None:
        """Run a task in the connection's own thread, in order, without waiting. A client with too many is cut off."""
        with self._lock:
            if not self.is_open:
                return
            is_started = self._worker is not None or self._start()
        if not is_started or self._tasks.qsize() >= _MOST_TASKS:
            self.close()
        else:
            self._tasks.put(task)

    def _start(self) -> bool:
        """Start the connection's own thread; return False if no thread is free."""
        worker = threading.Thread(target=self._work, name=f"librmq {self.peer[0]}", daemon=True)
        try:
            worker.start()
        except RuntimeError as error:
            _log.error("client %(client)s is cut off: %(error)s", client=self.peer[0], error=error)
            return False
        self._worker = worker
        return True

    def send_one_way(self, frame: Frame) -> None:
        """Send a request without an answer, without waiting."""
        with self._lock:
            self._numbered(frame.one_way())
        self.run_later(lambda: self.write(encode(frame)))

    def request(self, frame: Frame, timeout_s: float) -> Frame:
        """Send a request and wait for its answer.

        Raises:
            BrokerUnreachableError: No answer came in time, or the connection has ended.
        """
        waiting: Future[Frame] = Future()
        with self._lock:
            if not self.is_open or len(self._asked) >= _MOST_ASKED:
                raise BrokerUnreachableError(f"client {self.client_id or self.peer[0]} can't be asked")
            self._numbered(frame)
            self._asked[frame.opaque] = waiting
        try:
            self.write(encode(frame))
            return waiting.result(timeout_s)
        except TimeoutError:
            client = self.client_id or self.peer[0]
            raise BrokerUnreachableError(f"client {client} did not answer within {timeout_s:g} s") from None
        finally:
            with self._lock:
                self._asked.pop(frame.opaque, None)

    def accept_answer(self, answer: Frame) -> None:
        """Accept an answer; ignore one for which no call waits."""
        with self._lock:
            waiting = self._asked.pop(answer.opaque, None)
        if waiting is not None:
            waiting.set_result(answer)

    def close(self) -> None:
        """End the connection; its reader will notice."""
        with self._lock:
            if not self.is_open:
                return
            self.is_open = False
            waiters, self._asked = list(self._asked.values()), {}
        for waiting in waiters:
            waiting.set_exception(BrokerUnreachableError(f"client {self.peer[0]} has gone"))
        self._tasks.put(None)
        self._stream.shut()

    def release(self) -> None:
        """Close the socket once nothing reads from it."""
        self.close()
        self._stream.release()

    def _numbered(self, frame: Frame) -> Frame:
        self._opaque = frame.opaque = (self._opaque + 1) & 0x7FFFFFFF
        frame.language = "JAVA"
        return frame

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except Exception as error:  # later tasks could no longer run in order
                _log.exception("client %(client)s is cut off: %(error)s", client=self.peer[0], error=error)
                self.close()
