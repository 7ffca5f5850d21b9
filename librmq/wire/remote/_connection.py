"""One connection: requests out, answers and the server's requests in.

Mirrors the client's half of ``NettyRemotingAbstract``.
"""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar, cast

from librmq.clock import SystemClock
from librmq.errors import BrokerUnreachableError, MalformedError, RequestNotSentError, RmqError
from librmq.runtime.event_log import EventLog
from librmq.runtime.locks import Event, Lock, if_free
from librmq.wire.remoting._frames import Frame, FrameReader, FrameSocket, encode

T = TypeVar("T")


def as_caller(callers: set[int], call: Callable[..., T], *arguments: object) -> T:
    """Call a function while ``callers`` has this thread, so that a signal handler sees what it has interrupted."""
    thread = threading.get_ident()
    is_first = thread not in callers
    try:
        callers.add(thread)
        return call(*arguments)
    finally:
        if is_first:
            callers.discard(thread)


# ---- the seam of the client

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

    @property
    def is_interrupted(self) -> bool:
        """Whether this thread is within a request, so that the caller is a signal handler."""

    def request(self, frame: Frame, timeout_s: float) -> Frame:
        """Send a request, and wait for its answer.

        Raises:
            BrokerUnreachableError: No answer came in time, or the connection has ended.
            MalformedError: The request does not fit into a frame; nothing was sent.
        """

    def send(self, frame: Frame, ended: Ended) -> None:
        """Send a request, and let ``ended`` have its outcome.

        Raises:
            BrokerUnreachableError: The connection has ended; ``ended`` is not called.
        """

    def send_later(self, requests: Sequence[tuple[Frame, T]], ended: EndedTogether[T]) -> GiveUp | None:
        """Send requests with their keys together without waiting, and let ``ended`` have their outcomes as they come.

        Returns:
            A function that ends the wait for one answer; None, and nothing was sent, if that could wait.
        """

    def send_one_way(self, frame: Frame) -> None:
        """Send a request without an answer.

        Raises:
            BrokerUnreachableError: The connection has ended.
        """

    def send_answer(self, frame: Frame) -> None:
        """Send the answer to a request of the server; it is lost with the connection."""

    def close(self) -> None:
        """End the connection. A repetition does nothing."""


Requested = Callable[[Transport, Frame], None]
"""Gets a request of the server. Must not wait."""


# ---- a connection over a socket

_log = EventLog("librmq.wire")
_clock: Final = SystemClock()
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


@dataclass(slots=True, eq=False)
class _Later:
    """Requests that were sent together, and wait for their answers without a thread."""

    ended: EndedTogether[Any]
    keys: dict[int, Any]
    """By the numbers of the requests."""


class _Silence:
    """The time that requests have waited one after the other while nothing came."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._reads = self._latest = 0
        self._waited_s = 0.0

    def is_too_long(self, number: int, latest: int, reads: int, timeout_s: float) -> bool:
        """Add the wait of the request of a number, and return whether the silence is longer than the limit.

        ``latest`` is the number of the latest request, ``reads`` the count of reads, which this wait has not changed.
        """
        if self._reads != reads:
            self._reads, self._latest, self._waited_s = reads, 0, 0.0
        # Requests that wait side by side wait in the same time, so only those sent after the last one counted add
        # theirs.
        if number > self._latest:
            self._latest, self._waited_s = latest, self._waited_s + timeout_s
        return self._waited_s >= self._limit_s


@dataclass(eq=False, repr=False)
class Connection:
    """A `Transport` over a socket."""

    stream: FrameSocket
    address: str
    sign: Callable[[Frame], None] | None
    requested: Requested
    lost: Callable[[Transport], None]
    silent_s: float
    """Time for an answer after which a connection that brings nothing at all is ended."""

    def __post_init__(self) -> None:
        self._lock = Lock()
        self._numbers = itertools.count(1)
        self._latest = 0
        self._silence = _Silence(self.silent_s)
        self._callers: set[int] = set()
        """The threads within a call of this connection."""
        self._is_open = True
        self._why = "it was closed"
        self.outstanding: dict[int, Ended | _Later] = {}
        self.answers = Answers(self.stream, self)
        self.has_finished = False
        """Whether nothing more is read."""
        self.was_interrupted = False

    @property
    def is_open(self) -> bool:
        return self._is_open

    @property
    def is_interrupted(self) -> bool:
        return threading.get_ident() in self._callers

    def begin_reading(self) -> Connection:
        """Start the thread that reads, and return the connection."""
        reader = threading.Thread(target=self.answers.read, name=f"librmq {self.address}", daemon=True)
        try:
            reader.start()
        except RuntimeError as error:
            self.stream.close()
            raise BrokerUnreachableError(f"{self.address} can't be read: no thread can start: {error}") from error
        return self

    # ---- requests

    def request(self, frame: Frame, timeout_s: float) -> Frame:
        return as_caller(self._callers, self._request, frame, timeout_s)

    def _request(self, frame: Frame, timeout_s: float) -> Frame:
        waiter, answers = _Waiter(), self.answers
        reads = answers.reads
        number = self._send_request(frame, waiter.ended, is_waited_for=True)
        left_s = answers.read_own(waiter, timeout_s) if answers.is_left else timeout_s
        if not waiter.wait(left_s):
            timeout = self._give_up(number, reads, timeout_s)
            if timeout is not None:
                raise timeout
            # The answer or the end of the connection was taken from `outstanding` by another thread, which sets the
            # outcome now.
            waiter.wait()
        if isinstance(waiter.outcome, Frame):
            return waiter.outcome
        assert waiter.outcome is not None
        raise waiter.outcome

    def _give_up(self, number: int, reads: int, timeout_s: float) -> BrokerUnreachableError | None:
        """Wait no longer for an answer; return None if it, or an error, has come."""
        with self._lock:
            if self.outstanding.pop(number, None) is None:
                return None
            is_silent = self.answers.reads == reads and self._silence.is_too_long(
                number, self._latest, reads, timeout_s
            )
        # End a connection on which nothing has come for long: a peer that lost its power never closes it.
        if is_silent:
            self.end("the server is silent")
        return BrokerUnreachableError(f"{self.address} has not answered within {timeout_s:.3g} s")

    def send(self, frame: Frame, ended: Ended) -> None:
        as_caller(self._callers, self._send_request, frame, ended)

    def send_later(self, requests: Sequence[tuple[Frame, T]], ended: EndedTogether[T]) -> GiveUp | None:
        # Where the stream can't be polled, a write could block the event loop.
        return as_caller(self._callers, self._send_later, requests, ended) if self.stream.can_poll else None

    def _send_later(self, requests: Sequence[tuple[Frame, T]], ended: EndedTogether[T]) -> GiveUp | None:
        reads = self.answers.reads
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
                is_sent = self.stream.write_now(raw)
                if is_sent is None:
                    return None
                self.outstanding.update(dict.fromkeys(later.keys, later))
        except OSError as error:
            self._end_writing(error)
            return None
        except BaseException:
            # After Ctrl-C part of a frame may be sent, and what followed it would be read as its end.
            self.end_interrupted("a write was interrupted")
            raise
        self.answers.call_reader()
        if not is_sent:
            writer = threading.Thread(target=self._write_unsent, name=f"librmq {self.address}", daemon=True)
            try:
                writer.start()
            except RuntimeError as error:
                self.end(f"it can't be written: no thread can start: {error}")

        def give_up(number: int, timeout_s: float) -> BrokerUnreachableError | None:
            return as_caller(self._callers, self._give_up, number, reads, timeout_s)

        return give_up

    def _write_unsent(self) -> None:
        # The requests of this connection end with it, so the failed write needs no error of its own.
        with suppress(BrokerUnreachableError):
            self._write_bytes(b"")

    def send_one_way(self, frame: Frame) -> None:
        frame.one_way().opaque = self._next_number()
        as_caller(self._callers, self._write_bytes, self._encode(frame))

    def send_answer(self, frame: Frame) -> None:
        try:
            as_caller(self._callers, self._write_bytes, encode(frame))
        except RmqError as error:
            _log.debug("an answer to %(address)s was lost: %(error)s", address=self.address, error=error)

    def _send_request(self, frame: Frame, ended: Ended, *, is_waited_for: bool = False) -> int:
        number = frame.opaque = self._next_number()
        raw = self._encode(frame)
        with self._lock:
            if not self._is_open:
                raise self._error_of_end(RequestNotSentError)
            if len(self.outstanding) >= _MOST_OUTSTANDING:
                raise BrokerUnreachableError(
                    f"{self.address} has not answered {_MOST_OUTSTANDING:,} requests: no more are sent until it answers"
                )
            self.outstanding[number] = ended
        if not is_waited_for:
            self.answers.call_reader()
        try:
            self._write_bytes(raw)
        except BrokerUnreachableError:
            with self._lock:
                # The thread that removes the request from `outstanding` reports its end. If it is gone, the end of the
                # connection has called `ended` already, and raising as well would end it twice.
                is_reported = self.outstanding.pop(number, None) is None
            if is_waited_for or not is_reported:
                raise
        return number

    def _next_number(self) -> int:
        number = self._latest = next(self._numbers) & 0x7FFFFFFF
        return number

    def _encode(self, frame: Frame) -> bytes:
        if self.sign is not None:
            self.sign(frame)
        return encode(frame)

    def _write_bytes(self, raw: bytes) -> None:
        try:
            self.stream.write(raw)
        except OSError as error:
            self._end_writing(error)
            raise self._error_of_end(RequestNotSentError) from error
        except BaseException:
            # After Ctrl-C part of the frame may be sent, and what followed it would be read as its end.
            self.end_interrupted("a write was interrupted")
            raise

    # ---- what has come

    def pass_on(self, frames: Iterable[Frame]) -> None:
        """Pass frames on; those for which no thread waits together, because each time wakes their event loop."""
        together: dict[_Later, list[tuple[Any, Frame]]] = {}
        try:
            for frame in frames:
                if not frame.is_answer:
                    self.requested(self, frame)
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

    # ---- the end

    def close(self) -> None:
        """End the connection, and every call that waits for an answer."""
        as_caller(self._callers, self.end, "it was closed")

    def end_interrupted(self, why: str) -> None:
        """End the connection after Ctrl-C."""
        self.was_interrupted = True
        self.end(why)

    def _end_writing(self, error: OSError) -> None:
        if isinstance(error, BrokenPipeError):
            # The server reads no more, but the answers that it has sent before are still read.
            with self._lock:
                if self._is_open:
                    self._is_open, self._why = False, str(error)
        else:
            self.end(str(error))

    def end(self, why: str) -> None:
        """End the connection for a reason, which the error of every outstanding request names."""
        with self._lock:
            if self.has_finished:
                return
            self.has_finished = True
            if self._is_open:
                self._is_open, self._why = False, why
            outstanding, self.outstanding = list(self.outstanding.items()), {}
        self.stream.shut()
        self.answers.is_needed.set()
        for number, ended in outstanding:
            if isinstance(ended, _Later):
                ended.ended([(ended.keys[number], self._error_of_end())])
            else:
                ended(self._error_of_end())
        self.lost(self)

    def _error_of_end(self, kind: type[BrokerUnreachableError] = BrokerUnreachableError) -> BrokerUnreachableError:
        return kind(f"the connection to {self.address} has ended: {self._why}")


# ---- who reads

_RECEIVED: Final = 256 << 10
_INTERRUPTED: Final = "a read was interrupted"
_LEFT_S: Final = 0.01
"""A caller reads its own answer for this time at most, and the reader's thread reads again after twice this time."""
_LOOK_S: Final = 0.001
"""After this time, or the few ms that it takes a socket, a caller looks whether another thread has read its answer."""


class Answers:
    """What comes on a connection, read by a thread of its own or by a caller that waits for its own answer.

    Waking a thread takes longer than a small request: with the thread alone the sends of one caller take 1.15 to 1.2
    times as long, and 1.2 to 1.3 times the processor time. So after an answer, when nothing else is waited for, the
    thread leaves reading to one caller at a time, which reads what comes. The thread reads again when a caller needs
    it, and otherwise after a moment without such callers. So it does not matter where an exception ends a caller: only
    one that ends between taking bytes and passing them on ends the connection.
    """

    def __init__(self, stream: FrameSocket, connection: Connection) -> None:
        self._stream = stream
        stream.look_briefly(_LOOK_S)
        self._connection = connection
        self._frames = FrameReader()
        self.reads = 0
        """The number of reads that have brought bytes."""
        self._reading = Lock()
        """Held by the thread that reads."""
        self._is_within_read = False
        """Whether bytes were read and not passed on: forever, if no thread reads now."""
        self._waiting = Lock()
        """Held by the caller that waits for bytes to come."""
        self.is_left = False
        """Whether the reader's thread leaves reading to callers."""
        self.is_needed: Event = Event()
        """Set to let the reader's thread read before its time, or see that the connection has ended."""
        self._own_reads = 0
        """Answers that callers have read."""

    # ---- the reader's thread

    def read(self) -> None:
        """Read until the connection ends."""
        connection = self._connection
        try:
            is_open = True
            while is_open:
                with self._reading:
                    while is_open and not self.is_left:
                        is_open = self._read_some()
                        self.is_left = is_open and self._stream.can_poll and not connection.outstanding
                        # A request was registered between the read and the line above, and its caller relies on this
                        # thread.
                        if connection.outstanding:
                            self.is_left = False
                self._await_need()
        finally:
            connection.end("its reader has ended")
            self._stream.close()

    def _await_need(self) -> None:
        """Leave reading to callers as long as they read."""
        reads = -1
        while reads != self._own_reads and self.is_left:
            reads = self._own_reads
            self.is_left = not _clock.wait(self.is_needed, _LEFT_S)
        self.is_left = False
        self.is_needed.clear()

    # ---- callers

    def call_reader(self) -> None:
        """Let the reader's thread read again, unless a caller waits, which looks at its end whether to call it."""
        if self.is_left and not self._waiting.locked():
            self.is_left = False
            self.is_needed.set()

    def read_own(self, waiter: _Waiter, timeout_s: float) -> float:
        """Wait a moment for an answer and read it, unless another caller does; return the seconds that are left."""
        begin = now = _clock.monotonic()
        until = begin + min(timeout_s, _LEFT_S)
        for _ in if_free(self._waiting):
            try:
                while waiter.outcome is None and now < until:
                    reads = self.reads
                    if self._stream.wait(timeout_s - (now - begin)) and not self._read_ready(reads):
                        break
                    now = _clock.monotonic()
                self._own_reads += 1
            except BaseException:
                # After Ctrl-C bytes that were read may be lost. End the connection here, so that the caller's next
                # request opens another one and does not meet its end.
                if self._is_within_read:
                    self._connection.end_interrupted(_INTERRUPTED)
                raise
            finally:
                self._waiting.release()
                # Hand reading back to the connection's thread where others wait for answers, or where this read was
                # interrupted.
                if self._connection.outstanding or self._is_within_read:
                    self.call_reader()
            break
        return timeout_s - (now - begin)

    def _read_ready(self, reads: int) -> bool:
        """Read the bytes that have come since `reads` had this value.

        Returns:
            False if the connection has ended, or if another thread reads.
        """
        for _ in if_free(self._reading):
            try:
                # Another thread can have read them before this one got the lock. The flag alone does not keep this one
                # from waiting then, because a socket of gevent ignores it.
                return self.reads != reads or self._read_some(socket.MSG_DONTWAIT)
            finally:
                self._reading.release()
        return False

    # ---- both

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
            self.reads += 1
            try:
                self._connection.pass_on(self._frames.feed(received))
            except MalformedError as error:
                why = f"the server sends no frames: {error}"
            else:
                self._is_within_read = False
                return not self._connection.has_finished
        self._connection.end(why)
        return False
