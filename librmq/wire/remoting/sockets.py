"""The bytes of one connection, in plain text or under TLS, at either end."""

from __future__ import annotations

import selectors
import socket
import ssl
import struct
from contextlib import suppress
from typing import Final

from librmq.runtime.locks import Lock

_HANDSHAKE_S: Final = 30
_IDLE_S: Final = 120
_SEND_S: Final = 30


class FrameSocket:
    """A socket that one thread reads, and any thread writes to. Thread-safe."""

    def __init__(self, connected: socket.socket, *, idle_s: float = _IDLE_S, send_s: float = _SEND_S) -> None:
        """Under TLS, reading fails after ``idle_s`` seconds of silence, and writing after ``send_s``."""
        self._socket = connected
        self._idle_s = idle_s
        self._send_s = send_s
        self._is_shut = False
        self._write_lock = Lock()

    def begin_tls(self, context: ssl.SSLContext, server_name: str | None = None) -> None:
        """Begin TLS: as the client of ``server_name``, or as the server if that is None."""
        connected = context.wrap_socket(
            self._socket,
            server_side=server_name is None,
            server_hostname=server_name,
            do_handshake_on_connect=False,
        )
        self._socket = connected  # before the handshake, so that `shut` can end it
        if self._is_shut:
            raise ConnectionAbortedError("closed before TLS began")
        connected.settimeout(_HANDSHAKE_S if server_name is None else self._send_s)
        connected.do_handshake()
        connected.setblocking(False)  # otherwise OpenSSL waits for the rest of a record forever

    def receive(self, size: int) -> bytes:
        """Wait for bytes and return them; none at the end of the connection. Called by one thread only."""
        connected = self._socket
        if not isinstance(connected, ssl.SSLSocket):
            return connected.recv(size)
        while True:
            try:
                with self._write_lock:  # TLS cannot read and write at the same time
                    return connected.recv(size)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as want:
                _wait(connected, want, self._idle_s)

    def write(self, data: bytes | bytearray) -> None:
        """Send bytes. The other end must read them in time."""
        with self._write_lock:
            connected = self._socket
            if isinstance(connected, ssl.SSLSocket):
                self._write_tls(connected, data)
            else:
                connected.sendall(data)

    def _write_tls(self, connected: ssl.SSLSocket, data: bytes | bytearray) -> None:
        unsent = memoryview(data)
        while unsent:
            try:
                unsent = unsent[connected.send(unsent) :]
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as want:
                _wait(connected, want, self._send_s)

    def shut(self) -> None:
        """End the connection; the thread that reads will notice."""
        self._is_shut = True
        with suppress(OSError):
            # Not `SSLSocket.shutdown`, after which a write under way would continue in plain text.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def release(self) -> None:
        """Close the socket once nothing reads from it."""
        with self._write_lock:
            self._socket.close()


def limit_time(connected: socket.socket, option: int, seconds: float) -> None:
    """Let blocking calls on a socket fail after some time; ``option`` is ``SO_RCVTIMEO`` or ``SO_SNDTIMEO``."""
    whole_s = int(seconds)
    with suppress(OSError, struct.error):  # systems other than Linux and macOS expect another form
        connected.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", whole_s, int(1e6 * (seconds - whole_s))))


def _wait(connected: ssl.SSLSocket, want: ssl.SSLError, timeout_s: float) -> None:
    """Wait until a socket is ready for what it has to do first."""
    event = selectors.EVENT_READ if isinstance(want, ssl.SSLWantReadError) else selectors.EVENT_WRITE
    with selectors.DefaultSelector() as selector:
        selector.register(connected, event)
        if not selector.select(timeout_s):
            raise TimeoutError(f"the other end has been silent for {timeout_s:g} s")
