"""Several records under one lock: messages that were prepared without it, new ones and copies of stored ones."""

from __future__ import annotations

import struct
import sys
from collections.abc import Mapping, Sequence

from librmq.config import StoreConfig
from librmq.errors import MessageIllegalError, StoreIOError
from librmq.message import record as record_format
from librmq.message.message import Message, StoredMessage
from librmq.store.engine.append import Appender
from librmq.store.engine.prepared import (
    AppendResult,
    CopyTarget,
    Prepared,
    host_bytes,
    place_copies,
    prepare,
    prepare_again,
)


class CopyWriter:
    """Writer of prepared records, beside the store's `Appender` and through it. Thread-safe."""

    def __init__(self, appender: Appender) -> None:
        self._appender = appender

    def configure(self, config: StoreConfig) -> None:
        """Use these settings from now on."""
        self._host = record_format.encode_host(record_format.parse_host(config.store_host))
        self._max_body_size = config.max_message_size
        self._compress_from = config.compress_from or sys.maxsize

    def prepare(
        self,
        message: Message,
        properties: Mapping[str, str],
        queue_id: int,
        born_timestamp_ms: int,
        born_host: record_format.Host,
        sys_flag: int,
        reconsume_times: int,
    ) -> Prepared | None:
        """Return a message with these properties as `append` takes it; None if it is one for `Appender.append`.

        That is a message to be delayed or compressed, one of a transaction, and any that the appender refuses.
        """
        lane = self._appender.lanes.get((message.topic, queue_id))
        if lane is None or sys_flag & record_format.TRANSACTION_MASK or "DELAY" in properties:
            return None
        body_size = len(message.body)
        if body_size > self._max_body_size or (
            body_size >= self._compress_from and not sys_flag & record_format.COMPRESSED
        ):
            return None
        try:
            prepared = prepare(
                lane,
                message,
                properties,
                sys_flag,
                born_timestamp_ms,
                host_bytes(born_host),
                self._host,
                reconsume_times,
            )
        except (MessageIllegalError, struct.error):
            return None
        return prepared if prepared[1] <= self._max_size() else None

    def prepare_again(self, record: StoredMessage, target: CopyTarget) -> Prepared:
        """Return the message of a record as `append` takes it, for another queue and with other properties.

        Raises:
            MessageIllegalError: The message can't be appended.
            RecordError: The bytes are no record.
        """
        lane = self._appender.lanes.get(target[:2]) or self._appender.lane(*target[:2])
        return prepare_again(record, target, lane, self._max_size())

    def _max_size(self) -> int:
        return self._appender.log.file_size - record_format.BLANK_SIZE

    def append(self, copies: Sequence[Prepared]) -> list[AppendResult]:
        """Append what `prepare` or `prepare_again` made, side by side; return at once, whatever the durability.

        If the disk gets full, the results are those of the first copies, which are written. If none is, the error is
        that of `Appender.append`.
        """
        results: list[AppendResult] = []
        lock = self._appender.lock
        lock.check_reentry()
        with lock.mutex:
            lock_holder = lock
            now = self._appender.admit()
            while len(results) < len(copies):
                try:
                    self._append_to_file(copies[len(results) :], now, results)
                except StoreIOError:
                    if not results:
                        raise
                    break
            del lock_holder  # `check_reentry` looks for it
        if results:
            self._appender.finish(results[-1].physical_offset + results[-1].size, wait=False)
        return results

    def _append_to_file(self, copies: Sequence[Prepared], now: int, results: list[AppendResult]) -> None:
        """Append the copies that fit into one file of the log, and add their results."""
        log = self._appender.log
        physical_offset = log.claim(copies[0].size)
        file_end = physical_offset - physical_offset % log.file_size + log.file_size - record_format.BLANK_SIZE
        placed = place_copies(copies, physical_offset, file_end, now, self._appender.dispatcher)
        self._appender.write(b"".join(placed.data), placed.entries_of, placed.records)
        results += placed.results
