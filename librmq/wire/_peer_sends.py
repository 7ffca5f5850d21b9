"""Sends of a peer that need no answer of the owner: it appends to the log by itself."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Final

from librmq.clock import SystemClock
from librmq.errors import BrokerUnreachableError, LostAnswerError, StoreLockedError
from librmq.message import Message
from librmq.message.ids import encode_host, parse_host
from librmq.message.properties import PropertyName
from librmq.protocol import PendingSend, SendLater, SendMessage, SendResponse, SendStatus
from librmq.runtime import critical
from librmq.runtime.event_log import EventLog
from librmq.runtime.locks import Lock
from librmq.store import AppendResult
from librmq.store.peer_appends import PeerAppender
from librmq.wire._unix_sockets import share_folder

_new = tuple.__new__
_log = EventLog("librmq.wire")
_AT_ONCE: Final = 64
"""Messages that are appended under one lock, so that other writers soon have their turn."""


def appends_path(path: str) -> str:
    """Return the path of the page of a shared store."""
    return os.path.join(share_folder(path), "appends")


class PeerSends:
    """Appends to a store by the page of its owner. Thread-safe."""

    def __init__(self, path: str, wait_s: float, stopped_error: Callable[[], Exception | None]) -> None:
        """Send to the store in ``path``; wait at most ``wait_s`` for another process that writes.

        ``stopped_error()`` returns the error of a request to the owner if that is stopped.
        """
        self._path, self._wait_s, self._stopped_error = path, wait_s, stopped_error
        self._guard = Lock()
        self._appender: PeerAppender | None = None
        self._is_closed = False
        self._id_prefix = ""
        self._executor: ThreadPoolExecutor | None = None

    def send(self, request: SendMessage) -> SendResponse | None:
        """Append a message as a broker stores it; None if the owner has to do it."""
        message, queue_id, timeout_ms = request.message, request.queue_id, request.timeout_ms
        appender = None if self._is_closed else self._appender or self._open()
        if appender is None or not self.may_append(message):
            return None
        wait = message.properties.get(PropertyName.WAIT, "true")
        waits = appender.is_sync and not request.is_one_way and wait.lower() == "true"
        wait_s = self._wait_s if timeout_ms is None else timeout_ms / 1000
        begin_s = SystemClock().monotonic() if waits else 0.0
        born_ms, host = request.born_timestamp_ms, request.born_host
        result = appender.append(message, queue_id, wait_s, born_ms, host, request.sys_flag)
        if result is None:
            return None
        status = SendStatus.SEND_OK
        if waits:
            end = result.physical_offset + result.size
            status = self._reach(appender, end, wait_s - (SystemClock().monotonic() - begin_s))
        return self._response(status, queue_id, result)

    def _response(self, status: SendStatus, queue_id: int, result: AppendResult) -> SendResponse:
        place, ids = result.physical_offset, (f"{self._id_prefix}{result.physical_offset:016X}",)
        return _new(SendResponse, (status, queue_id, result.queue_offset, place, ids, None, None))

    def send_later(self, request: SendLater, ask_owner: Callable[[SendLater], bool]) -> bool:
        """Append what an event loop sends soon, in a thread, which can wait for the disk and for other writers.

        Return False, and append nothing, if the owner has to store it. ``ask_owner`` gets what finds no room, and all
        that follow it.
        """
        sends, appender, executor = request.sends, self._appender, self._executor
        timeout_ms = sends[0].send.timeout_ms
        if self._is_closed or any(pending.send.timeout_ms != timeout_ms for pending in sends):  # they wait together
            return False
        if appender is None or executor is None:
            executor = executor or ThreadPoolExecutor(1, "librmq share append")
            with suppress(RuntimeError):  # the process has too many threads
                # Start the thread by a call that may be lost: where none starts, the call is queued all the same.
                executor.submit(self._open)
                self._executor = executor
            return False
        if appender.is_sync or not all(self.may_append(pending.send.message) for pending in sends):
            return False
        until_s = SystemClock().monotonic() + (self._wait_s if timeout_ms is None else timeout_ms / 1000)
        try:
            executor.submit(self._append_or_ask, appender, request, ask_owner, until_s)
        except RuntimeError:  # the share was closed meanwhile
            return False
        return True

    def _append_or_ask(
        self, appender: PeerAppender, request: SendLater, ask_owner: Callable[[SendLater], bool], until_s: float
    ) -> None:
        sends, count = request.sends, 0
        while count < len(sends):
            ended = self._append(appender, sends[count : count + _AT_ONCE], until_s)
            if not ended:
                break
            request.ended(ended)
            count += len(ended)
        request.sends = sends[count:]
        has_asked = False
        with suppress(Exception):  # a caller whose send has no outcome sends it by itself, and gets the error of that
            has_asked = not request.sends or ask_owner(request)
        if not has_asked:
            request.ended(request.sends)

    def _append(self, appender: PeerAppender, sends: Sequence[PendingSend], until_s: float) -> Sequence[PendingSend]:
        """Append messages under one lock, and return the first ones, which have an outcome."""
        results: list[AppendResult] = []
        try:
            records = [
                appender.encode(send.message, send.queue_id, (send.born_timestamp_ms, send.born_host), send.sys_flag)
                for send in (pending.send for pending in sends)
            ]
            appender.append_all(records, until_s - SystemClock().monotonic(), results)
        except BrokerUnreachableError as error:  # another process keeps the lock, which the owner would need too
            for pending in sends:
                pending.outcome = error
            return sends
        except Exception as error:  # it belongs to one message of many: the owner answers for each
            _log.debug("%(path)s: messages go to the owner: %(error)r", path=self._path, error=error)
        for pending, result in zip(sends, results, strict=False):
            pending.outcome = self._response(SendStatus.SEND_OK, pending.send.queue_id, result)
        return sends[: len(results)]

    def may_append(self, message: Message) -> bool:
        """Return whether the owner can let this process append a message, at another moment if not now."""
        appender = self._appender
        if appender is None or message._delays is not None:
            return False
        return appender.held_properties.isdisjoint(message.properties)

    def _reach(self, appender: PeerAppender, end: int, wait_s: float) -> SendStatus:
        """Wait for a flush; the error says that the message may be stored."""
        try:
            return SendStatus.SEND_OK if appender.reach(end, wait_s) else SendStatus.FLUSH_DISK_TIMEOUT
        except LostAnswerError:
            raise
        except BrokerUnreachableError as error:
            stopped = self._stopped_error()
            if stopped is None:
                raise
            raise BrokerUnreachableError(f"{error}; {stopped}") from error

    def _open(self) -> PeerAppender | None:
        """Open the page; None if there is none, which stays so as long as the owner is the same."""
        if self._is_closed:
            return None
        with critical, self._guard:  # a signal handler can send too, or close the share
            if self._appender is None and not self._is_closed:
                try:
                    appender = PeerAppender.open(self._path, appends_path(self._path), self._wait_s)
                except (OSError, StoreLockedError):  # the next send tries again, if the owner lives
                    return None
                if appender is None:
                    self._is_closed = True
                    return None
                self._id_prefix = encode_host(parse_host(appender.store_host)).hex().upper()
                self._appender = appender
            return self._appender

    def end(self) -> None:
        """Leave later sends to the owner, as a signal handler can do within a send, before another thread closes."""
        self._is_closed = True

    def after_fork(self) -> None:
        """Leave the page to the parent, in a forked child, which connects to the owner by itself."""
        self._guard, self._is_closed = Lock(), True
        self._appender = self._executor = None

    def close(self) -> None:
        """Append no more."""
        with self._guard:
            self._is_closed = True
            appender, self._appender = self._appender, None
            if appender is not None:
                appender.close()
        if self._executor is not None:
            self._executor.shutdown()  # what it has not appended goes to the owner
