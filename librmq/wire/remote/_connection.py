"""Connections over TCP, each with a thread that reads it: one for each address and client, reopened with a back-off.

Access keys sign each request: it carries the key's name and an HMAC-SHA1 of its fields and body. Mirrors the client's
half of ``NettyRemotingAbstract``, ``AclClientRPCHook`` and ``AclUtils``.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import itertools
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Final, Protocol, TypeVar, cast

from librmq.clock import SystemClock
from librmq.errors import BrokerUnreachableError, ConfigError, MalformedError, RmqError
from librmq.runtime.event_log import EventLog
from librmq.runtime.locks import Event, Lock, if_free
from librmq.wire.remoting._codec import read_plain_sent
from librmq.wire.remoting._frames import Frame, FrameReader, FrameSocket, encode

T = TypeVar("T")


class RequestNotSentError(BrokerUnreachableError):
    """The connection had ended before the whole request was sent, so the server has not carried it out."""


# ---- the seam of the client: requests out, answers and the server's requests in

Ended = Callable[[Frame | RmqError], None]
"""Gets the answer to a request, or the error that took its place. Called by any thread, and must not wait."""
EndedTogether = Callable[[Sequence[tuple[T, "Frame | RmqError"]]], None]
"""Gets outcomes like `Ended`, of requests with these keys."""
GiveUp = Callable[[int, float], BrokerUnreachableError | None]
"""Waits no longer for the answer to the request of a number, after a time in seconds; returns the error, or None if
there is an outcome already."""


class Transport(Protocol):
    """One open connection. Thread-safe."""

    address: str
    """The address of the server, or what names its process, for errors."""
    was_interrupted: bool
    """Whether Ctrl-C has ended it, and not the server."""

    @property
    def is_open(self) -> bool:
        """Whether requests can be sent."""
        ...

    @property
    def is_interrupted(self) -> bool:
        """Whether this thread is within a request, so that the caller is a signal handler."""
        ...

    def request(self, frame: Frame, timeout_s: float) -> Frame:
        """Send a request, and wait for its answer.

        Raises:
            BrokerUnreachableError: No answer came in time, or the connection has ended.
            MalformedError: The request does not fit into a frame; nothing was sent.
        """
        ...

    def send(self, frame: Frame, ended: Ended) -> None:
        """Send a request, and let ``ended`` have its outcome.

        Raises:
            BrokerUnreachableError: The connection has ended; ``ended`` is not called.
        """
        ...

    def send_later(self, requests: Sequence[tuple[Frame, T]], ended: EndedTogether[T]) -> GiveUp | None:
        """Send requests with their keys together without waiting, and let ``ended`` have their outcomes as they come.

        Returns:
            A function that ends the wait for one answer; None, and nothing was sent, if that could wait.
        """
        ...

    def send_one_way(self, frame: Frame) -> None:
        """Send a request without an answer.

        Raises:
            BrokerUnreachableError: The connection has ended.
        """
        ...

    def send_answer(self, frame: Frame) -> None:
        """Send the answer to a request of the server; it is lost with the connection."""
        ...

    def close(self) -> None:
        """End the connection. A repetition does nothing."""
        ...


Requested = Callable[[Transport, Frame], None]
"""Gets a request of the server. Must not wait."""


# ---- access keys

_KEY: Final = "AccessKey"
_TOKEN: Final = "SecurityToken"
_SIGNATURE: Final = "Signature"
_UNSIGNED: Final = frozenset((_SIGNATURE, "_UNIQUE_KEY_QUERY"))


class AccessKeys:
    """An access key with its secret, which signs requests. Thread-safe."""

    def __init__(self, access_key: str, secret_key: str, security_token: str | None = None) -> None:
        for name, value in (("access_key", access_key), ("secret_key", secret_key)):
            if not value:
                raise ConfigError(f"{name}: expected text, because a key has a name and a secret: found none")
        self.access_key = access_key
        self._secret = secret_key.encode()
        self._token = security_token

    def __repr__(self) -> str:
        return f"AccessKeys({self.access_key!r})"

    def sign(self, frame: Frame) -> None:
        """Add key and signature to the fields of a request."""
        fields = frame.fields
        fields[_KEY] = self.access_key
        if self._token is not None:
            fields[_TOKEN] = self._token
        signed = "".join(fields[name] for name in sorted(fields) if name not in _UNSIGNED).encode("utf-8", "replace")
        digest = hmac.new(self._secret, signed + frame.body, hashlib.sha1).digest()
        fields[_SIGNATURE] = base64.b64encode(digest).decode()


_log = EventLog("librmq.wire")
_clock: Final = SystemClock()
_RECEIVED: Final = 256 << 10
_INTERRUPTED: Final = "a read was interrupted"
_LEFT_S: Final = 0.01
"""A caller reads its own answer for this time at most, and the reader's thread reads again after twice this time."""
_LOOK_S: Final = 0.001
"""After this time, or the few ms that it takes a socket, a caller looks whether another thread has read its answer."""
_MOST_OUTSTANDING: Final = 100_000
_MOST_LATER: Final = 10_000
"""Requests for whose answers no thread waits."""


class _Waiter:
    __slots__ = ("_turn", "outcome")

    def __init__(self) -> None:
        self.outcome: Frame | RmqError | None = None
        self._turn = threading.Lock()  # noqa: TID251 (never in a `with` block)
        self._turn.acquire()

    def ended(self, outcome: Frame | RmqError) -> None:
        self.outcome = outcome
        self._turn.release()

    def wait(self, timeout_s: float = threading.TIMEOUT_MAX) -> bool:
        return self._turn.acquire(timeout=max(0.0, min(timeout_s, threading.TIMEOUT_MAX)))


class _Later:
    """Requests that were sent together, and wait for their answers without a thread."""

    __slots__ = ("ended", "keys")

    def __init__(self, ended: EndedTogether[Any], keys: dict[int, Any]) -> None:
        """``keys`` are by the numbers of the requests."""
        self.ended = ended
        self.keys = keys


class Connection:
    """A `Transport` over a socket.

    Waking a thread takes longer than a small request. So after an answer, when nothing else is waited for, the reader's
    thread leaves reading to one caller at a time, which waits for its own answer and reads what comes. The thread reads
    again when a caller needs it, and otherwise after a moment without such callers. So it does not matter where an
    exception ends a caller: only one that ends between taking bytes and passing them on ends the connection.
    """

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
        stream.look_briefly(_LOOK_S)
        self._keys = keys
        self._requested = requested
        self._lost = lost
        self._lock = Lock()
        self._numbers = itertools.count(1)
        self.outstanding: dict[int, Ended | _Later] = {}
        self._received = 0
        self._latest = 0
        self._silence = 0, 0, 0.0
        """`_received`, the latest request, and seconds without an answer, at the last time-out."""
        self._callers: set[int] = set()
        """The threads within a call of this connection."""
        self._frames = FrameReader(read_known=read_plain_sent)
        self._reading = Lock()
        """Held by the thread that reads."""
        self._is_within_read = False
        """Whether bytes were read and not passed on: forever, if no thread reads now."""
        self._waiting = Lock()
        """Held by the caller that waits for bytes to come."""
        self._is_left = False
        """Whether the reader's thread leaves reading to callers."""
        self._is_needed = Event()
        """Ends this before its time."""
        self._own_reads = 0
        """Answers that callers have read."""
        self._is_open = True
        self._has_finished = False
        """Whether nothing more is read."""
        self._why = "it was closed"
        self.was_interrupted = False

    @property
    def is_open(self) -> bool:
        """Whether requests can be written."""
        return self._is_open

    @property
    def is_interrupted(self) -> bool:
        """Whether this thread is within a call already, as in the handler of a signal."""
        return threading.get_ident() in self._callers

    # ---- requests

    def request(self, frame: Frame, timeout_s: float) -> Frame:
        """Return the answer to a request. A timeout or a lost connection raises `BrokerUnreachableError`."""
        return self._as_caller(self._request, frame, timeout_s)

    def _as_caller(self, call: Callable[..., T], *given: object) -> T:
        """Call a function that takes a lock, where `is_interrupted` tells signal handlers to keep away from it."""
        thread = threading.get_ident()
        is_first = thread not in self._callers
        try:
            self._callers.add(thread)
            return call(*given)
        finally:
            if is_first:
                self._callers.discard(thread)

    def _request(self, frame: Frame, timeout_s: float) -> Frame:
        waiter, received = _Waiter(), self._received
        number = self._send_request(frame, waiter.ended, is_waited_for=True)
        rest_s = self._read_own(waiter, timeout_s) if self._is_left else timeout_s
        if not waiter.wait(rest_s):
            timeout = self._give_up(number, received, timeout_s)
            if timeout is not None:
                raise timeout
            # The answer or the end of the connection was taken from `outstanding` by another thread, which sets the
            # outcome now.
            waiter.wait()
        if isinstance(waiter.outcome, Frame):
            return waiter.outcome
        assert waiter.outcome is not None
        raise waiter.outcome

    def _give_up(self, number: int, received: int, timeout_s: float) -> BrokerUnreachableError | None:
        """Wait no longer for an answer; return None if it, or an error, has come."""
        with self._lock:
            if self.outstanding.pop(number, None) is None:
                return None
        # End a connection on which nothing has come for long: a peer that lost its power never closes it.
        if self._is_silent(number, received, timeout_s):
            self._end_connection("the server is silent")
        return BrokerUnreachableError(f"{self.address} has not answered within {timeout_s:.3g} s")

    def _is_silent(self, number: int, received: int, timeout_s: float) -> bool:
        """Return whether requests one after the other have waited long enough, and nothing came meanwhile."""
        with self._lock:
            if self._received != received:
                return False
            before, latest, waited_s = self._silence
            if before != received:
                latest, waited_s = 0, 0.0
            # Requests that wait side by side wait in the same time, so only those sent after the last one counted add
            # theirs.
            if number > latest:
                self._silence = received, self._latest, waited_s + timeout_s
            return self._silence[2] >= self._silent_s

    def send(self, frame: Frame, ended: Ended) -> None:
        """Send a request whose answer goes to ``ended``, in the thread that reads the connection."""
        self._as_caller(self._send_request, frame, ended)

    def send_later(self, requests: Sequence[tuple[Frame, T]], ended: EndedTogether[T]) -> GiveUp | None:
        """Send requests of an event loop together; return None where the stream could block the loop."""
        return self._as_caller(self._send_later, requests, ended) if self._stream.can_poll else None

    def _send_later(self, requests: Sequence[tuple[Frame, T]], ended: EndedTogether[T]) -> GiveUp | None:
        received = self._received
        for frame, _ in requests:
            frame.opaque = self._next_number()
        later = _Later(ended, {frame.opaque: key for frame, key in requests})
        raw = b"".join([self._encode(frame) for frame, _ in requests])
        try:
            # Write under the lock, because an answer that another thread reads before the requests are registered would
            # be dropped as unknown.
            with self._lock:
                if not self._is_open or len(self.outstanding) + len(requests) > _MOST_LATER:
                    return None
                is_sent = self._stream.write_now(raw)
                if is_sent is None:
                    return None
                self.outstanding.update(dict.fromkeys(later.keys, later))
        except OSError as error:
            self._end_writing(error)
            return None
        except BaseException:
            # After Ctrl-C part of a frame may be sent, and what followed it would be read as its rest.
            self._end_interrupted("a write was interrupted")
            raise
        self._call_reader()
        if not is_sent:
            writer = threading.Thread(target=self._write_rest, name=f"librmq {self.address}", daemon=True)
            try:
                writer.start()
            except RuntimeError as error:
                self._end_connection(f"it can't be written: no thread can start: {error}")

        def give_up(number: int, timeout_s: float) -> BrokerUnreachableError | None:
            return self._as_caller(self._give_up, number, received, timeout_s)

        return give_up

    def _write_rest(self) -> None:
        # The requests of this connection end with it, so the failed write needs no error of its own.
        with suppress(BrokerUnreachableError):
            self._write_bytes(b"")

    def send_one_way(self, frame: Frame) -> None:
        """Send a request that has no answer."""
        frame.one_way().opaque = self._next_number()
        self._as_caller(self._write_bytes, self._encode(frame))

    def send_answer(self, frame: Frame) -> None:
        """Answer a request of the broker."""
        try:
            self._as_caller(self._write_bytes, encode(frame))
        except RmqError as error:
            _log.debug("an answer to %(address)s was lost: %(error)s", address=self.address, error=error)

    def _send_request(self, frame: Frame, ended: Ended, *, is_waited_for: bool = False) -> int:
        number = frame.opaque = self._next_number()
        raw = self._encode(frame)
        with self._lock:
            if not self._is_open:
                raise self._has_ended(RequestNotSentError)
            if len(self.outstanding) >= _MOST_OUTSTANDING:
                raise BrokerUnreachableError(
                    f"{self.address} has not answered {_MOST_OUTSTANDING:,} requests: no more are sent until it answers"
                )
            self.outstanding[number] = ended
        if not is_waited_for:
            self._call_reader()
        try:
            self._write_bytes(raw)
        except BrokerUnreachableError:
            with self._lock:
                # Who removes the request from `outstanding` reports its end. If it is gone, the end of the connection
                # has called `ended` already, and raising as well would end it twice.
                is_told = self.outstanding.pop(number, None) is None
            if is_waited_for or not is_told:
                raise
        return number

    def _next_number(self) -> int:
        number = self._latest = next(self._numbers) & 0x7FFFFFFF
        return number

    def _encode(self, frame: Frame) -> bytes:
        if self._keys is not None:
            self._keys.sign(frame)
        return encode(frame)

    def _write_bytes(self, raw: bytes) -> None:
        try:
            self._stream.write(raw)
        except OSError as error:
            self._end_writing(error)
            raise self._has_ended(RequestNotSentError) from error
        except BaseException:
            # After Ctrl-C part of the frame may be sent, and what followed it would be read as its rest.
            self._end_interrupted("a write was interrupted")
            raise

    def _end_writing(self, error: OSError) -> None:
        if isinstance(error, BrokenPipeError):
            self._end_sending(str(error))
        else:
            self._end_connection(str(error))

    def _has_ended(self, kind: type[BrokerUnreachableError] = BrokerUnreachableError) -> BrokerUnreachableError:
        return kind(f"the connection to {self.address} has ended: {self._why}")

    # ---- answers

    def read(self) -> None:
        """Read until the connection ends."""
        try:
            is_open = True
            while is_open:
                with self._reading:
                    while is_open and not self._is_left:
                        is_open = self._read_some()
                        self._is_left = is_open and self._stream.can_poll and not self.outstanding
                        # A request was registered between the read and the line above, and its caller relies on this
                        # thread.
                        if self.outstanding:
                            self._is_left = False
                self._await_need()
        finally:
            self._end_connection("its reader has ended")
            self._stream.close()

    def _await_need(self) -> None:
        """Leave reading to callers as long as they read."""
        reads = -1
        while reads != self._own_reads and self._is_left:
            reads = self._own_reads
            self._is_left = not _clock.wait(self._is_needed, _LEFT_S)
        self._is_left = False
        self._is_needed.clear()

    def _call_reader(self) -> None:
        """Let the reader's thread read again, unless a caller waits, which looks at its end whether to call it."""
        if self._is_left and not self._waiting.locked():
            self._is_left = False
            self._is_needed.set()

    def _read_own(self, waiter: _Waiter, timeout_s: float) -> float:
        """Wait a moment for an answer and read it, unless another caller does; return the rest of the time."""
        begin = now = _clock.monotonic()
        until = begin + min(timeout_s, _LEFT_S)
        for _ in if_free(self._waiting):
            try:
                while waiter.outcome is None and now < until:
                    received = self._received
                    if self._stream.wait(timeout_s - (now - begin)) and not self._read_ready(received):
                        break
                    now = _clock.monotonic()
                self._own_reads += 1
            except BaseException:
                # After Ctrl-C bytes that were read may be lost. End the connection here, so that the caller's next
                # request opens another one and does not meet its end.
                if self._is_within_read:
                    self._end_interrupted(_INTERRUPTED)
                raise
            finally:
                self._waiting.release()
                # Hand reading back to the connection's thread where others wait for answers, or where this read was
                # interrupted.
                if self.outstanding or self._is_within_read:
                    self._call_reader()
            break
        return timeout_s - (now - begin)

    def _read_ready(self, received: int) -> bool:
        """Read the bytes that have come since `_received` had this value.

        Returns:
            False if the connection has ended, or if another thread reads.
        """
        for _ in if_free(self._reading):
            try:
                # Another thread can have read them before this one got the lock. The flag alone does not keep this one
                # from waiting then, because a socket of gevent ignores it.
                return self._received != received or self._read_some(socket.MSG_DONTWAIT)
            finally:
                self._reading.release()
        return False

    def _read_some(self, flags: int = 0) -> bool:
        """Read, and pass the frames on that are complete; return False if the connection has ended."""
        # A read that finds another one unfinished in the same connection follows Ctrl-C. Bytes may be lost between the
        # two, so the connection ends.
        received, why = b"", _INTERRUPTED
        if not self._is_within_read:
            self._is_within_read, why = True, "the server has closed it"
            try:
                received = self._stream.receive(_RECEIVED, flags)
            except BlockingIOError:
                # Another thread has read the bytes that were announced.
                self._is_within_read = False
                return True
            except OSError as error:
                why = str(error)
        if received:
            self._received += 1
            try:
                only = self._frames.read_only(received)
                self._arrived(self._frames.feed(received) if only is None else (only,))
            except MalformedError as error:
                why = f"the server sends no frames: {error}"
            else:
                self._is_within_read = False
                return not self._has_finished
        self._end_connection(why)
        return False

    def _arrived(self, frames: Iterable[Frame]) -> None:
        """Pass frames on; those for which no thread waits together, because each time wakes their event loop."""
        together: dict[_Later, list[tuple[Any, Frame]]] = {}
        try:
            for frame in frames:
                if not frame.is_answer:
                    self._requested(self, frame)
                    continue
                with self._lock:
                    ended = self.outstanding.pop(frame.opaque, None)
                if type(ended) is _Later:
                    together.setdefault(ended, []).append((ended.keys[frame.opaque], frame))
                elif ended is not None:
                    # Without an entry the caller has given up, and the answer is dropped.
                    cast("Ended", ended)(frame)
        finally:
            for later, answers in together.items():
                later.ended(answers)

    def close(self) -> None:
        """End the connection, and every call that waits for an answer."""
        self._as_caller(self._end_connection, "it was closed")

    def close_unread(self) -> None:
        """Close the socket of a connection that no thread reads."""
        self._stream.close()

    def _end_interrupted(self, why: str) -> None:
        self.was_interrupted = True
        self._end_connection(why)

    def _end_sending(self, why: str) -> None:
        """Send no more, because the server reads no more; the answers that it has sent before are still read."""
        with self._lock:
            if self._is_open:
                self._is_open, self._why = False, why

    def _end_connection(self, why: str) -> None:
        with self._lock:
            if self._has_finished:
                return
            self._has_finished = True
            if self._is_open:
                self._is_open, self._why = False, why
            outstanding, self.outstanding = list(self.outstanding.items()), {}
        self._stream.shut()
        self._is_needed.set()
        for number, ended in outstanding:
            if isinstance(ended, _Later):
                ended.ended([(ended.keys[number], self._has_ended())])
            else:
                ended(self._has_ended())
        self._lost(self)
