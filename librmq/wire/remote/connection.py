"""One connection over TCP, with a thread that reads it. Mirrors the client's half of ``NettyRemotingAbstract``."""

from __future__ import annotations

import itertools
import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from librmq.errors import BrokerUnreachableError, MalformedError, RmqError
from librmq.runtime.event_log import EventLog
from librmq.runtime.locks import Lock
from librmq.wire.remote.host_names import split_address
from librmq.wire.remote.signing import AccessKeys
from librmq.wire.remote.transport import Dial, Ended, Requested, Transport
from librmq.wire.remoting.frames import Frame, FrameReader, encode
from librmq.wire.remoting.sockets import FrameSocket, limit_time

_log = EventLog("librmq.wire")
_RECEIVED: Final = 256 << 10
_MOST_OUTSTANDING: Final = 100_000
_SILENT_S: Final = 180.0


class _Waiter:
    """A caller that waits for an answer."""

    __slots__ = ("_turn", "outcome")

    def __init__(self) -> None:
        self.outcome: Frame | RmqError | None = None
        self._turn = Lock()
        self._turn.acquire()

    def ended(self, outcome: Frame | RmqError) -> None:
        self.outcome = outcome
        self._turn.release()

    def wait(self, timeout_s: float = threading.TIMEOUT_MAX) -> bool:
        return self._turn.acquire(timeout=max(0.0, min(timeout_s, threading.TIMEOUT_MAX)))


class _Connection:
    """A `Transport` over TCP."""

    def __init__(
        self,
        stream: FrameSocket,
        address: str,
        keys: AccessKeys | None,
        requested: Requested,
        lost: Callable[[Transport], None],
        silent_s: float,
    ) -> None:
        """``silent_s`` is the time for an answer after which a connection that brings nothing at all is ended."""
        self.address = address
        self._silent_s = silent_s
        self._stream = stream
        self._keys = keys
        self._requested = requested
        self._lost = lost
        self._lock = Lock()
        self._numbers = itertools.count(1)
        self._outstanding: dict[int, Ended] = {}
        self._received = 0
        self._latest = 0
        self._silence = 0, 0, 0.0
        """`_received`, the latest request, and seconds without an answer, at the last time-out."""
        self._is_open = True
        self._why = "it was closed"

    @property
    def is_open(self) -> bool:
        return self._is_open

    # ---- requests

    def request(self, frame: Frame, timeout_s: float) -> Frame:
        waiter, received = _Waiter(), self._received
        number = self._send(frame, waiter.ended)
        if not waiter.wait(timeout_s):
            with self._lock:
                is_late = self._outstanding.pop(number, None) is not None
            if is_late:
                if self._is_silent(number, received, timeout_s):  # it may be half open
                    self._end("the server is silent")
                raise BrokerUnreachableError(f"{self.address} has not answered within {timeout_s:.3g} s")
            waiter.wait()  # another thread is about to tell the outcome
        if isinstance(waiter.outcome, Frame):
            return waiter.outcome
        assert waiter.outcome is not None
        raise waiter.outcome

    def _is_silent(self, number: int, received: int, timeout_s: float) -> bool:
        """Return whether requests one after the other have waited long enough, and nothing came meanwhile."""
        with self._lock:
            if self._received != received:
                return False
            before, latest, waited_s = self._silence
            if before != received:
                latest, waited_s = 0, 0.0
            if number > latest:  # otherwise its time is that of another one
                self._silence = received, self._latest, waited_s + timeout_s
            return self._silence[2] >= self._silent_s

    def send(self, frame: Frame, ended: Ended) -> None:
        self._send(frame, ended)

    def send_one_way(self, frame: Frame) -> None:
        frame.one_way().opaque = self._next_number()
        self._write(self._encode(frame))

    def send_answer(self, frame: Frame) -> None:
        try:
            self._write(encode(frame))
        except RmqError as error:
            _log.debug("an answer to %(address)s was lost: %(error)s", address=self.address, error=error)

    def _send(self, frame: Frame, ended: Ended) -> int:
        number = frame.opaque = self._next_number()
        raw = self._encode(frame)
        with self._lock:
            if not self._is_open:
                raise self._has_ended()
            if len(self._outstanding) >= _MOST_OUTSTANDING:
                raise BrokerUnreachableError(
                    f"{self.address} has not answered {_MOST_OUTSTANDING:,} requests: no more are sent until it answers"
                )
            self._outstanding[number] = ended
        try:
            self._write(raw)
        except BrokerUnreachableError:
            with self._lock:
                if self._outstanding.pop(number, None) is None:
                    return number  # the end of the connection has called `ended`
            raise
        return number

    def _next_number(self) -> int:
        number = self._latest = next(self._numbers) & 0x7FFFFFFF
        return number

    def _encode(self, frame: Frame) -> bytes:
        if self._keys is not None:
            self._keys.sign(frame)
        return encode(frame)

    def _write(self, raw: bytes) -> None:
        try:
            self._stream.write(raw)
        except OSError as error:
            self._end(str(error))
            raise self._has_ended() from error
        except BaseException:  # Ctrl-C: part of the frame may be sent
            self._end("a write was interrupted")
            raise

    def _has_ended(self) -> BrokerUnreachableError:
        return BrokerUnreachableError(f"the connection to {self.address} has ended: {self._why}")

    # ---- answers

    def read(self) -> None:
        """Read until the connection ends."""
        reader = FrameReader()
        why = "the server has closed it"
        try:
            while received := self._stream.receive(_RECEIVED):
                self._received += 1
                for frame in reader.feed(received):
                    self._arrived(frame)
        except MalformedError as error:
            why = f"the server sends no frames: {error}"
        except OSError as error:
            why = str(error)
        finally:
            self._end(why)
            self._stream.release()

    def _arrived(self, frame: Frame) -> None:
        if not frame.is_answer:
            self._requested(self, frame)
            return
        with self._lock:
            ended = self._outstanding.pop(frame.opaque, None)
        if ended is not None:  # otherwise its caller waits no longer
            ended(frame)

    def close(self) -> None:
        self._end("it was closed")

    def _end(self, why: str) -> None:
        with self._lock:
            if not self._is_open:
                return
            self._is_open = False
            self._why = why
            outstanding, self._outstanding = list(self._outstanding.values()), {}
        self._stream.shut()
        for ended in outstanding:
            ended(self._has_ended())
        self._lost(self)


def dial_by_tcp(
    tls: ssl.SSLContext | None, keys: AccessKeys | None, timeout_s: float, find: Callable[[str], tuple[str, ...]]
) -> Dial:
    """Return a function that opens connections over TCP, with TLS and signed requests if wanted.

    ``find`` returns the addresses of a host.
    """

    def connected_to(host: str, port: int) -> socket.socket:
        *others, last = find(host)
        for other in others:
            with suppress(OSError):
                return socket.create_connection((other, port), timeout=timeout_s)
        return socket.create_connection((last, port), timeout=timeout_s)

    def dial(address: str, requested: Requested, lost: Callable[[Transport], None]) -> Transport:
        host, port = split_address(address)
        try:
            connected = connected_to(host, int(port))
        except (OSError, ValueError, OverflowError) as error:
            raise BrokerUnreachableError(f"{address} can't be reached: {error}") from error
        stream = FrameSocket(connected, idle_s=_SILENT_S, send_s=timeout_s)
        try:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connected.settimeout(None)
            limit_time(connected, socket.SO_SNDTIMEO, timeout_s)
            if tls is not None:
                stream.begin_tls(tls, host)
        except OSError as error:
            stream.release()
            raise BrokerUnreachableError(f"{address}: TLS has failed: {error}") from error
        connection = _Connection(stream, address, keys, requested, lost, timeout_s)
        reader = threading.Thread(target=connection.read, name=f"librmq {address}", daemon=True)
        try:
            reader.start()
        except RuntimeError as error:
            stream.release()
            raise BrokerUnreachableError(f"{address} can't be read: no thread can start: {error}") from error
        return connection

    return dial
