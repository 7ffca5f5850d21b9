"""Sends of a peer that need no answer of the owner: it appends to the log by itself."""

from __future__ import annotations

import os
from collections.abc import Callable

from librmq.clock import SystemClock
from librmq.errors import BrokerUnreachableError, LostAnswerError, StoreLockedError
from librmq.message import Message
from librmq.message.ids import Host, encode_host, parse_host
from librmq.message.properties import PropertyName
from librmq.protocol import SendResponse, SendStatus
from librmq.runtime import critical
from librmq.runtime.locks import Lock
from librmq.store.peer_appends import PeerAppender
from librmq.wire._unix_sockets import share_folder

_new = tuple.__new__


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

    def send(
        self,
        message: Message,
        queue_id: int,
        born_timestamp_ms: int,
        born_host: Host,
        sys_flag: int = 0,
        timeout_ms: float | None = None,
        is_one_way: bool = False,
    ) -> SendResponse | None:
        """Append a message as a broker stores it; None if the owner has to do it."""
        appender = None if self._is_closed else self._appender or self._open()
        if appender is None or not self.may_append(message):
            return None
        properties = message.properties.copy()
        properties[PropertyName.CLUSTER] = appender.cluster_name
        wait = properties.pop(PropertyName.WAIT, "true")
        waits = appender.is_sync and not is_one_way and wait.lower() == "true"
        stored = Message.from_parts(message.topic, message.body, message.flag, properties)
        wait_s = self._wait_s if timeout_ms is None else timeout_ms / 1000
        begin_s = SystemClock().monotonic() if waits else 0.0
        result = appender.append(stored, queue_id, wait_s, born_timestamp_ms, born_host, sys_flag)
        if result is None:
            return None
        place, size, queue_offset, _, _ = result
        status = SendStatus.SEND_OK
        if waits:
            status = self._reach(appender, place + size, wait_s - (SystemClock().monotonic() - begin_s))
        ids = (f"{self._id_prefix}{place:016X}",)
        return _new(SendResponse, (status, queue_id, queue_offset, place, ids, None, None))

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
        self._guard, self._is_closed, self._appender = Lock(), True, None

    def close(self) -> None:
        """Append no more."""
        with self._guard:
            self._is_closed = True
            appender, self._appender = self._appender, None
            if appender is not None:
                appender.close()
