"""Appends of a process that shares a store with its owner, straight to the log.

The owner follows: it writes queues and index from the log, and answers those who wait for messages.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from functools import lru_cache
from threading import get_ident

from librmq.clock import SystemClock
from librmq.commitlog import CommitLog
from librmq.files import DiskFiles
from librmq.files.interface import SystemCall
from librmq.files.rolling import MappedFileQueue, MappingPool
from librmq.message import Message
from librmq.message import record as record_format
from librmq.message.ids import Host, encode_host, parse_host
from librmq.message.properties import PropertyName, encode_properties
from librmq.message.topics import validate_topic
from librmq.store.engine import _append_page as page_format
from librmq.store.engine._append_fields import AppendResult, UnplacedRecord, host_bytes, place_record, prepare_record
from librmq.store.engine._append_page import AppendPage
from librmq.store.format import directory

_new = tuple.__new__


PreparedSend = tuple[tuple[str, int], UnplacedRecord]
"""Topic and id of a queue, and a record for it."""


@lru_cache(maxsize=1024)
def _topic_field(topic: str) -> bytes:
    validate_topic(topic)
    encoded = topic.encode()
    return bytes((len(encoded),)) + encoded


class PeerAppender:
    """The writing side of a peer. Thread-safe.

    `append` returns None for what the owner has to store itself.
    """

    def __init__(self, path: str, page: AppendPage, unlock: Callable[[], object], wait_s: float) -> None:
        """Append to the store in ``path`` by its page; see `open`. `close` calls ``unlock()``."""
        settings = page.settings
        self._page, self._unlock, self._wait_s = page, unlock, wait_s
        self._cluster_name: str = settings["cluster_name"]
        self.store_host: str = settings["store_host"]
        """Address and port in each record."""
        self.is_sync: bool = settings["durability"] == "sync"
        """Whether senders wait for `reach`."""
        self.held_properties: frozenset[str] = frozenset(settings["held"])
        """Properties of messages that only the owner stores."""
        self._host = encode_host(parse_host(self.store_host))
        self._max_body_size: int = settings["max_message_size"]
        self._compress_from: int = settings["compress_from"] or sys.maxsize
        self._log = CommitLog(
            MappedFileQueue(
                os.path.join(path, directory.COMMITLOG),
                settings["commitlog_file_size"],
                DiskFiles(),
                MappingPool(2),
                writable=True,
            )
        )
        self._lanes: dict[tuple[str, int], int] = {}
        self._epoch, self._count = -1, 0
        self._now_ms = SystemClock().now_ms
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
        with SystemCall("share", page_path):
            page = AppendPage.open(page_path)
        if page is None:
            return
        try:
            with page.mutex:
                try:
                    page.take(wait_s)
                    page.numbers[page_format.STATE] = page_format.CLOSED
                finally:
                    page.release()
        finally:
            page.close()
        with suppress(FileNotFoundError):
            os.unlink(page_path)

    def append(
        self,
        message: Message,
        queue_id: int,
        wait_s: float = sys.maxsize,
        born_timestamp_ms: int | None = None,
        born_host: Host | bytes | None = None,
        sys_flag: int = 0,
    ) -> AppendResult | None:
        """Append a message that is stored at once, with the properties with which a broker stores it.

        Wait at most ``wait_s`` for other writers, but no longer than `open` says. Return None if the owner has to store
        it: the topic is not known here, or there is no room.

        Raises:
            MessageIllegalError: The message is refused; nothing is written.
            BrokerUnreachableError: Another process has held the lock of the log for too long.
            StoreError: A signal handler called this within another append of its thread.
        """
        results: list[AppendResult] = []
        record = self.encode(message, queue_id, (born_timestamp_ms, born_host), sys_flag)
        self.append_all((record,), wait_s, results)
        return results[0] if results else None

    def encode(
        self, message: Message, queue_id: int, born: tuple[int | None, Host | bytes | None], sys_flag: int
    ) -> PreparedSend:
        """Return what `append_all` appends: all that can be computed before the lock is taken."""
        born_timestamp_ms, born_host = born
        properties = message.properties.copy()
        properties[PropertyName.CLUSTER] = self._cluster_name
        properties.pop(PropertyName.WAIT, None)
        record = prepare_record(
            message.body, _topic_field(message.topic), encode_properties(properties), queue_id, message.flag, sys_flag,
            born_timestamp_ms, self._host if born_host is None else host_bytes(born_host), self._host,
            0, 0, self._compress_from, self._max_body_size,
        )  # fmt: skip
        return (message.topic, queue_id), record

    def append_all(self, records: Iterable[PreparedSend], wait_s: float, results: list[AppendResult]) -> None:
        """Append records under one lock, as `append` does, up to the first that the owner has to store.

        ``results`` gets the place of each as soon as it is written, so that it has those before an error.
        """
        page = self._page
        thread = get_ident()
        if page.thread == thread:
            page.check_reentry()
        if wait_s > self._wait_s:
            wait_s = self._wait_s
        is_released = False
        with page.mutex:
            page.thread = thread  # before any call, because a signal handler can come at one
            try:
                try:
                    if not page.is_closed:
                        page.take(wait_s, self._ring)
                        for queue, record in records:
                            result = self._append_in_turn(queue, record)
                            if result is None:
                                break
                            results.append(result)
                finally:
                    self._end_turn()
                    is_released = True
                if page.numbers[page_format.ASLEEP]:
                    self._ring()
            finally:  # again, because a signal can interrupt the first: while this process lived, no other could append
                try:
                    if not is_released:
                        self._end_turn()
                finally:
                    page.thread = 0

    def reach(self, end: int, wait_s: float) -> bool:
        """Wait until the owner has flushed the log up to ``end``; return False if it can't, because a flush has failed.

        Raises:
            LostAnswerError: The owner has ended before, so the message may be stored.
            BrokerUnreachableError: It has not flushed within ``wait_s``, so the message may be stored.
        """
        return self._page.wait_for_flush(end, wait_s)

    def _append_in_turn(self, queue: tuple[str, int], record: UnplacedRecord) -> AppendResult | None:
        page, log = self._page, self._log
        numbers = page.numbers
        if numbers[page_format.EPOCH] != self._epoch or numbers[page_format.QUEUES] != self._count:
            self._read_queues()
        if numbers[page_format.WRITING]:
            page.end_write(log)
        if numbers[page_format.STATE] != page_format.OPEN:
            if numbers[page_format.STATE] != page_format.CLOSED:
                numbers[page_format.WISHED] = 1
                self._ring()
            return None
        size, sys_flag, stored_at = record[:3]
        number = self._lanes.get(queue)
        if number is None or sys_flag & record_format.TRANSACTION_MASK:  # such a record may have no queue entry
            return None
        tail, room = numbers[page_format.TAIL], numbers[page_format.ROOM]
        end = tail + size
        if end > room:
            return None
        now, queue_offset = self._now_ms(), page.offsets[number]
        data = place_record(record, queue_offset, tail, now)
        log.continue_at(tail, room)
        page.begin_write(number, end)
        log.copy_in(data, size)
        page.commit(number, queue_offset + 1, end)
        return _new(AppendResult, (tail, size, queue_offset, now, stored_at))

    def _end_turn(self) -> None:
        """End a write that is not committed, because a signal has interrupted it or there was no room; unlock."""
        page = self._page
        try:
            if page.holds and page.numbers[page_format.WRITING]:
                page.end_write(self._log)
        finally:
            page.release()

    def _ring(self) -> None:
        """Wake the thread of the owner that follows the peers; under ``mutex``, so that the pipe is open."""
        with suppress(OSError):  # the owner has ended, or has been woken so often that it wakes in any case
            self._bell.send(b".")

    def _read_queues(self) -> None:
        page, lanes = self._page, self._lanes
        epoch, count = page.numbers[page_format.EPOCH], page.numbers[page_format.QUEUES]
        if epoch != self._epoch:
            self._log.drop_mappings()  # the owner may have replaced a file
            lanes.clear()
            self._epoch, self._count = epoch, 0
        for number in range(self._count, count):
            lanes[page.queue_at(number)] = number
        self._count = count

    def close(self) -> None:
        """Let go of page and log."""
        with self._page.mutex:
            self._page.close()
            self._bell.close()
        self._log.close()
        self._unlock()
