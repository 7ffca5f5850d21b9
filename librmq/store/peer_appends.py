"""Appends of a process that shares a store with its owner, straight to the log.

The owner follows: it writes queues and index from the log, and answers those who wait for messages.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from threading import get_ident
from typing import Any, Final

from librmq.clock import SystemClock
from librmq.commitlog import CommitLog
from librmq.config import StoreConfig
from librmq.errors import StoreError
from librmq.files import DiskFiles
from librmq.files.rolling import MappedFileQueue, MappingPool
from librmq.message import DelayLevels, Message
from librmq.runtime.compiled_core import AlarmState
from librmq.store.engine import _append_page as page_format
from librmq.store.engine._append import Appender, AppendResult
from librmq.store.engine._append_page import AppendPage, close_page
from librmq.store.engine.dispatch import Dispatcher, Lane
from librmq.store.format import directory

_RECORD: Final = 512
"""More than the bytes of a record beside its body, its topic and its properties."""
_WORST: Final = 4
"""Bytes of a character."""


class _NoQueue:
    """In place of the queue of a lane: the owner writes the entries."""

    ext = None
    max_offset = 0


class _NoHousekeeping(AlarmState):
    """In place of the work of the owner."""

    def __init__(self) -> None:
        self.alarm = self.watched = sys.maxsize


class _Full(StoreError):
    """The record does not fit into the room that the owner has made."""


def _refuse_turn() -> None:
    raise _Full("expected room that the owner has made")


class PeerAppender:
    """The writing side of a peer. Thread-safe.

    `append` returns None for what the owner has to store itself.
    """

    def __init__(self, path: str, page: AppendPage, unlock: Callable[[], object], wait_s: float) -> None:
        """Append to the store in ``path`` by its page; see `open`. `close` calls ``unlock()``."""
        settings = page.settings
        self._page, self._unlock, self._wait_s = page, unlock, wait_s
        self.cluster_name: str = settings["cluster_name"]
        """Name of the owner's cluster, which each message gets as a property."""
        self.store_host: str = settings["store_host"]
        """Address and port in each record."""
        self.is_sync: bool = settings["durability"] == "sync"
        """Whether senders wait for `reach`."""
        self.held_properties: frozenset[str] = frozenset(settings["held"])
        """Properties of messages that only the owner stores."""
        config = StoreConfig(
            max_message_size=settings["max_message_size"],
            compress_from=settings["compress_from"],
            store_host=self.store_host,
        )
        pool = MappingPool(2)
        self._log = CommitLog(
            MappedFileQueue(
                os.path.join(path, directory.COMMITLOG),
                settings["commitlog_file_size"],
                DiskFiles(),
                pool,
                writable=True,
            )
        )
        self._log.check_turn = _refuse_turn
        self._lanes: dict[tuple[str, int], tuple[int, Lane]] = {}
        self._epoch, self._count = -1, 0
        self._appender = appender = Appender(SystemClock(), _closed, lambda: None)
        appender.configure(config, DelayLevels.parse(config.message_delay_level))
        unwritten: Any = None
        appender.log, appender.dispatcher, appender.lanes = self._log, Dispatcher(unwritten), {}
        housekeeping: Any = _NoHousekeeping()
        appender._housekeeping = housekeeping
        appender.accepts = True
        self._append, _ = appender.append_methods()
        self._bell = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._bell.setblocking(False)
        try:
            # With the lock beside the owner's held: an owner that listens has lived since, so no other has written.
            self._bell.connect(settings["bell"])
        except BaseException:
            self._bell.close()
            self._log.close()
            raise

    @classmethod
    def open(cls, path: str, page_path: str, wait_s: float) -> PeerAppender | None:
        """Return the appender of the store in ``path`` by the page at ``page_path``; None if there is none.

        ``wait_s`` is how long `append` waits for other writers at most.

        Raises:
            OSError: It can't be opened now, or the owner has ended meanwhile.
            StoreLockedError: The owner has ended, and another writer has the store.
        """
        files = DiskFiles(has_peers=True)
        page = AppendPage.open(page_path) if files.has_peers else None
        if page is None:
            return None
        with ExitStack() as undo:
            undo.callback(page.close)
            unlock = undo.callback(files.lock_as_peer(directory.lock_path(path)).release)
            appender = cls(path, page, unlock, wait_s)
            undo.pop_all()
        return appender

    @staticmethod
    def end_all(page_path: str, wait_s: float) -> None:
        """Let no process append any more by the page of a former owner.

        Raises:
            BrokerUnreachableError: A process writes by it, and does not end within ``wait_s``.
        """
        close_page(page_path, wait_s)

    def append(
        self,
        message: Message,
        queue_id: int,
        wait_s: float = sys.maxsize,
        **fields: Any,  # noqa: ANN401
    ) -> AppendResult | None:
        """Append a message that is stored as it comes; the fields are those of `Appender.append`.

        Wait at most ``wait_s`` for other writers, but no longer than `open` says. Return None if the owner has to store
        it: the topic is not known here, or there is no room.

        Raises:
            MessageIllegalError: The message is refused; nothing is written.
            BrokerUnreachableError: Another process has held the lock of the log for too long.
            StoreError: A signal handler called this within another append of its thread.
        """
        page = self._page
        page.check_reentry()
        thread = get_ident()
        with page.mutex:
            page.thread = thread  # before any call, because a signal handler can come at one
            try:
                return self._append_alone(message, queue_id, wait_s, fields)
            finally:
                page.thread = 0

    def _append_alone(
        self, message: Message, queue_id: int, wait_s: float, fields: Mapping[str, Any]
    ) -> AppendResult | None:
        """Do as `append`, with ``mutex`` held."""
        page = self._page
        result, is_released = None, False
        try:
            try:
                if not page.is_closed:
                    page.take(min(self._wait_s, wait_s), self._ring)
                    result = self._append_in_turn(message, queue_id, fields)
            finally:
                self._end_turn()
                is_released = True
        finally:  # again, because a signal can interrupt the first: while this process lived, no other could append
            if not is_released:
                self._end_turn()
        if page.numbers[page_format.ASLEEP]:
            self._ring()
        return result

    def reach(self, end: int, wait_s: float) -> bool:
        """Wait until the owner has flushed the log up to ``end``; return False if it can't, because a flush has failed.

        Raises:
            LostAnswerError: The owner has ended before, so the message may be stored.
            BrokerUnreachableError: It has not flushed within ``wait_s``, so the message may be stored.
        """
        return self._page.wait_for_flush(end, wait_s)

    def _append_in_turn(self, message: Message, queue_id: int, fields: Mapping[str, Any]) -> AppendResult | None:
        page, log = self._page, self._log
        numbers = page.numbers
        if numbers[page_format.EPOCH] != self._epoch:
            log.drop_mappings()  # the owner may have replaced a file
        if numbers[page_format.WRITING]:
            page.end_write(log)
        if numbers[page_format.STATE] != page_format.OPEN:
            if numbers[page_format.STATE] != page_format.CLOSED:
                numbers[page_format.WISHED] = 1
                self._ring()
            return None
        if numbers[page_format.QUEUES] != self._count or numbers[page_format.EPOCH] != self._epoch:
            self._read_queues()
        queue = self._lanes.get((message.topic, queue_id))
        tail, room = numbers[page_format.TAIL], numbers[page_format.ROOM]
        end = tail + _most_bytes(message)
        if queue is None or end > room:
            return None
        number, lane = queue
        log.continue_at(tail, room)
        lane.next_queue_offset = page.offsets[number]
        page.begin_write(number, end)
        try:
            result = self._append(message, queue_id, **fields)
        except _Full:
            return None
        page.commit(number, lane.next_queue_offset, log.end)
        self._forget(lane)
        return result

    def _end_turn(self) -> None:
        """End a write that is not committed, because a signal has interrupted it or there was no room; unlock."""
        page = self._page
        try:
            if page.holds and page.numbers[page_format.WRITING]:
                page.end_write(self._log)
                for _, lane in self._lanes.values():
                    self._forget(lane)
        finally:
            page.release()

    def _ring(self) -> None:
        """Wake the thread of the owner that follows the peers; under ``mutex``, so that the pipe is open."""
        with suppress(OSError):  # the owner has ended, or has been woken so often that it wakes in any case
            self._bell.send(b".")

    def _forget(self, lane: Lane) -> None:
        """Forget the entries and keys, which the owner derives."""
        dispatcher = self._appender.dispatcher
        lane.pending.clear()
        dispatcher.lanes.clear()
        dispatcher.records.clear()
        dispatcher.writing_at = -1

    def _read_queues(self) -> None:
        page, lanes = self._page, self._lanes
        epoch, count = page.numbers[page_format.EPOCH], page.numbers[page_format.QUEUES]
        if epoch != self._epoch:
            lanes.clear()
            self._appender.lanes.clear()
            self._epoch, self._count = epoch, 0
        no_queue: Any = _NoQueue()
        for number in range(self._count, count):
            topic, queue_id = page.queue_at(number)
            lane = self._appender.lanes[topic, queue_id] = Lane(topic, queue_id, no_queue)
            lanes[topic, queue_id] = number, lane
        self._count = count

    def close(self) -> None:
        """Let go of page and log."""
        with self._page.mutex:
            self._page.close()
            self._bell.close()
        self._log.close()
        self._unlock()


def _most_bytes(message: Message) -> int:
    """Return how many bytes the record of a message has at most."""
    characters = sum(map(len, message.properties)) + sum(map(len, message.properties.values()))
    return _RECORD + len(message.body) + (len(message.body) >> 8) + _WORST * (characters + len(message.topic))


def _closed() -> Exception:
    return StoreError("the appender of a peer is closed")
