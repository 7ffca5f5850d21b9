"""Copies of stored messages, also prepared without the writer's lock, and bytes of another store's log.

`append_log` dispatches the records of a copied log to queues and index. It mirrors 4.9.4's
``DefaultMessageStore.appendToCommitLog``, which appends a master's log to a slave's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from threading import get_ident
from typing import Any, Final, NamedTuple

from librmq.config import wrong_kind
from librmq.errors import MessageIllegalError, RmqError, StoreIOError
from librmq.message import Message, StoredMessage, frames
from librmq.message import record as record_format
from librmq.store.engine._append import Appender
from librmq.store.engine._append_fields import AppendResult, UnplacedRecord, place_record, prepare_record
from librmq.store.engine.dispatch import Lane
from librmq.store.engine.store_parts import Parts

_new = tuple.__new__
_COPIED: Final = (
    "flag", "sys_flag", "born_timestamp", "born_host", "store_host", "reconsume_times", "prepared_offset"
)  # fmt: skip
_unpack: Final = {
    hosts: record_format.header_struct(*_COPIED, sys_flag=hosts).unpack_from for hosts in record_format.HEADERS
}


class Prepared(NamedTuple):
    """A record without a place, for a queue."""

    lane: Lane
    record: UnplacedRecord


def _parts(record: StoredMessage) -> tuple[bytes, tuple[Any, ...]]:
    """Return the checked body of a record, and the fields of its header that a copy has too."""
    try:
        data = record.raw
    except AttributeError:
        raise wrong_kind("record", record, "a StoredMessage") from None
    record._check_body()  # or the copy would get a checksum of the damaged bytes
    begin, end, _, _, _, _ = record.frame
    return data[begin:end], _unpack[data[39] & 48](data)


class CopyWriter:
    """Writer of copies of stored messages, one by one or prepared, through the store's `Appender`. Thread-safe."""

    def __init__(self, appender: Appender) -> None:
        self._appender = appender

    def append_again(  # noqa: PLR0913 (a keyword for each field of a record)
        self,
        record: StoredMessage,
        topic: str,
        queue_id: int,
        properties: Mapping[str, str],
        *,
        raw: bytes | None = None,
        flag: int | None = None,
        sys_flag: int | None = None,
        reconsume_times: int | None = None,
        prepared_transaction_offset: int = 0,
    ) -> AppendResult:
        """Append the message of a record once more, with these properties, to this queue of this topic.

        Body, born time and hosts are the record's; flags and counts are too unless given. ``raw`` has the properties as
        they are to be stored, whatever they say of a delay; None encodes them as `Appender.append` does. The call
        returns at once, whatever the durability.

        Raises:
            MessageIllegalError: The message can't be appended.
            RecordError: The bytes are not a record.
        """
        body, (own_flag, own_sys_flag, born_timestamp_ms, born_at, stored_at, times, _) = _parts(record)
        message = Message.from_parts(topic, body, own_flag if flag is None else flag, dict(properties))
        append, _ = self._appender.append_methods()
        return append(
            message,
            queue_id,
            born_timestamp_ms=born_timestamp_ms,
            born_host=born_at,
            store_host=stored_at,
            sys_flag=own_sys_flag if sys_flag is None else sys_flag,
            reconsume_times=times if reconsume_times is None else reconsume_times,
            prepared_transaction_offset=prepared_transaction_offset,
            properties_raw=raw,
            wait=False,
        )

    def prepare_again(self, record: StoredMessage, topic: str, queue_id: int, raw: bytes) -> Prepared:
        """Return the message of a record as `append` takes it, for another queue and with ``raw`` as its properties.

        Raises:
            MessageIllegalError: The message can't be appended.
            RecordError: The bytes are not a record.
        """
        lane = self._appender.lanes.get((topic, queue_id)) or self._appender.lane(topic, queue_id)
        body, (flag, sys_flag, born_timestamp_ms, born_at, stored_at, times, prepared_offset) = _parts(record)
        copy = prepare_record(
            body, lane.topic_field, raw, lane.queue_id, flag, sys_flag, born_timestamp_ms, born_at, stored_at, times,
            prepared_offset,
        )  # fmt: skip
        if copy[0] > self._appender.log.file_size - record_format.BLANK_SIZE:
            raise MessageIllegalError(f"a record of {copy[0]} bytes can't be stored")
        return _new(Prepared, (lane, copy))

    def append_waiting(
        self, messages: Sequence[StoredMessage], befores: Sequence[bytes], places: tuple[int, ...]
    ) -> list[Any] | None:
        """Append messages that waited by the compiled core, and return a report of each.

        ``befores`` and ``places`` are those of their layout. None: nothing is written, because the core is absent or a
        message is not a usual one of this layout.
        """
        append: Callable[..., list[Any] | None] | None = getattr(self._appender, "append_waiting", None)
        return None if append is None else append(messages, befores, places)

    def append(self, copies: Sequence[Prepared]) -> list[AppendResult]:
        """Append what `prepare` or `prepare_again` made, side by side; return at once, whatever the durability.

        If the disk gets full, the results are those of the first copies, which are written. If none is, the error is
        that of `Appender.append`.
        """
        results: list[AppendResult] = []
        lock = self._appender.lock
        lock.check_reentry()
        thread = get_ident()
        with lock.mutex:
            try:
                lock.owner = thread
                now = self._appender.admit()
                while len(results) < len(copies):
                    try:
                        self._append_to_file(copies[len(results) :], now, results)
                        self._appender.end_turn()  # shows the queues, before the next part draws the lanes of others
                    except StoreIOError:
                        if not results:
                            raise
                        break
            finally:
                try:
                    self._appender.end_turn()
                finally:
                    lock.owner = 0
        if results:
            self._appender.finish_append(results[-1].physical_offset + results[-1].size, wait=False)
        return results

    def _append_to_file(self, copies: Sequence[Prepared], now: int, results: list[AppendResult]) -> None:
        """Append the copies that fit into one file of the log, and add their results."""
        log = self._appender.log
        physical_offset = log.claim(copies[0].record[0])
        file_end = physical_offset - physical_offset % log.file_size + log.file_size - record_format.BLANK_SIZE
        data: list[bytes] = []
        queued: dict[Lane, int] = {}
        placed: list[AppendResult] = []
        for lane, record in copies:
            size, sys_flag, stored_at = record[:3]
            if physical_offset + size > file_end:
                break
            queue_offset = 0
            if not sys_flag & record_format.UNQUEUED:
                before = queued.get(lane, 0)
                queue_offset = lane.next_queue_offset + before
                queued[lane] = before + 1
            data.append(place_record(record, queue_offset, physical_offset, now))
            placed.append(_new(AppendResult, (physical_offset, size, queue_offset, now, stored_at)))
            physical_offset += size
        self._appender.write(b"".join(data), len(placed), queued)
        results += placed


# ---- copies of a log


class CopiedRecords(NamedTuple):
    """Result of one copy."""

    end: int
    """The end of the copy's log."""
    queues: Collection[tuple[str, int]]
    """The queues that got messages, as topic and queue id."""
    is_regular: bool
    """`Parts.is_regular`, otherwise the queues must be recovered."""


def whole_size(data: bytes, room: int) -> tuple[int, int]:
    """Return the bytes of the whole records at the start of ``data``, and the total size of the next record.

    ``room`` is the number of bytes from the start of ``data`` to the end of its log file, which a blank fills.
    """
    at, size = 0, len(data)
    while at + record_format.BLANK_SIZE <= size:
        needed, magic = frames.SIZE_AND_MAGIC.unpack_from(data, at)
        if magic == record_format.BLANK_MAGIC:
            needed = room - at
        if at + needed > size or needed <= 0:
            return at, needed
        at += needed
    return at, 0 if at == size else record_format.BLANK_SIZE


def append_log(parts: Parts, data: bytes, *, is_checked: bool = False) -> CopiedRecords:
    """Append whole records and blanks of one file of another log, and dispatch them; under the append lock.

    If a signal interrupts this, `Appender.repair` does the rest. Where the log lacks room the caller is in a
    critical block.

    Raises:
        CorruptionError: The bytes are not records; nothing is appended.
        StoreIOError: There is no space. If the log already has the records, a later call dispatches them.
    """
    log, dispatcher = parts.log, parts.dispatcher
    size = len(data)
    if not size:
        return CopiedRecords(log.end, (), parts.is_regular)
    parts.follow()
    dispatcher.writing_at = log.end
    if is_checked and log.end + size <= log.sure and frames.SIZE_AND_MAGIC.unpack_from(data)[0] == size:
        log.copy_in(data, size)  # one record, for which a send waits
    else:
        try:
            log.append_copy(data, is_checked=is_checked)
        except RmqError:
            dispatcher.writing_at = -1  # nothing was appended
            raise
    queues = {lane.name for lane in parts.dispatch_rest()}
    dispatcher.writing_at = -1
    if parts.is_regular:
        parts.follow()
    return CopiedRecords(log.end, queues, parts.is_regular)
