"""Half messages and their ends: which of those that a check has not passed yet are pending.

An op message tells that a half has ended, by the half's queue offset in decimal digits; how far the check has come in
both queues is the progress of group ``CID_RMQ_SYS_TRANS``. What a half is, and how the records hang together, is drawn
in `librmq.txn`. Mirrors the op queue of 4.9.4's ``TransactionalMessageServiceImpl``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, Protocol

from librmq.java.numbers import java_long
from librmq.message.message import StoredMessage
from librmq.message.topics import HALF_TOPIC, OP_TOPIC
from librmq.store import MessageStore
from librmq.store.engine.read import GetStatus

__all__ = ["CHECK_GROUP", "OP_TAG", "QUEUE", "EndedHalves", "TransactionOffsets", "half_of", "progress"]

_log = logging.getLogger("librmq.txn")

CHECK_GROUP: Final = "CID_RMQ_SYS_TRANS"
"""The internal consumer group whose progress is that of the check."""
QUEUE: Final = 0
"""The only queue of halves, of op messages, and of halves that were given up."""
OP_TAG: Final = "d"
"""Of an op message; it is the only one there is."""


class TransactionOffsets(Protocol):
    """Store of the check's progress, such as `librmq.store.format.broker_tables.BrokerTables`."""

    def consumer_offset(self, topic: str, group: str, queue_id: int) -> int | None:
        """Return the queue offset of a group's next message, None if never stored."""
        ...

    def set_consumer_offset(self, topic: str, group: str, queue_id: int, queue_offset: int) -> None:
        """Store the queue offset of a group's next message."""
        ...


class EndedHalves:
    """Which of the halves from the check's progress on have ended: one bit each, read from the op queue.

    Not thread-safe. Making one reads the op messages from the progress on; `add` tells of those written since.
    """

    def __init__(self, store: MessageStore, offsets: TransactionOffsets) -> None:
        """`CorruptionError` as for `MessageStore.read`."""
        self._store = store
        self._base = progress(store, offsets, HALF_TOPIC) & ~7
        self._bits = bytearray()
        self._next_op = progress(store, offsets, OP_TOPIC)
        self._catch_up()

    def __contains__(self, queue_offset: int) -> bool:
        """Return whether the half at ``queue_offset`` has ended; False below the progress."""
        return _is_marked(self._bits, queue_offset - self._base)

    def so_far(self) -> Callable[[int], bool]:
        """Return a function that tells which halves have ended by now, for another thread."""
        base, bits = self._base, bytes(self._bits)
        return lambda queue_offset: _is_marked(bits, queue_offset - base)

    def add(self, queue_offset: int, op_offset: int) -> None:
        """Note an op message that was just written for a half."""
        if op_offset == self._next_op:
            self._next_op += 1
            self._mark(queue_offset)
        else:  # another writer added some
            self._catch_up()

    def forget_below(self, queue_offset: int) -> None:
        """Drop halves that the check has passed."""
        gone = (queue_offset - self._base) >> 3
        if gone > 0:
            del self._bits[:gone]
            self._base += 8 * gone

    def _catch_up(self) -> None:
        queue = self._store.queue(HALF_TOPIC, QUEUE)
        end = 0 if queue is None else queue.max_offset
        while True:
            found = self._store.read(OP_TOPIC, QUEUE, self._next_op)
            for op in found.messages:
                queue_offset = half_of(op)
                if queue_offset is not None and queue_offset < end:  # an op may say anything
                    self._mark(queue_offset)
            if found.next_offset == self._next_op or found.status is GetStatus.NO_MESSAGE_IN_QUEUE:
                return
            self._next_op = found.next_offset

    def _mark(self, queue_offset: int) -> None:
        at = queue_offset - self._base
        if at < 0:
            return
        if at >> 3 >= len(self._bits):
            self._bits.extend(bytes((at >> 3) + 1 - len(self._bits)))
        self._bits[at >> 3] |= 1 << (at & 7)


def _is_marked(bits: bytes | bytearray, at: int) -> bool:
    return 0 <= at < 8 * len(bits) and bool(bits[at >> 3] & (1 << (at & 7)))


def progress(store: MessageStore, offsets: TransactionOffsets, topic: str) -> int:
    """Return the check's progress in the queue of a topic, by default the queue's beginning."""
    stored = offsets.consumer_offset(topic, CHECK_GROUP, QUEUE)
    if stored is not None and stored >= 0:
        return stored
    return store.queue_range(topic, QUEUE)[0]  # which writes no entries: every commit comes here


def half_of(op: StoredMessage) -> int | None:
    """The queue offset of the half that an op message tells of; −1 where it says none, None without the tag."""
    if op.tags != OP_TAG:
        _log.error("the op message at %d has tag %r, and is passed over", op.physical_offset, op.tags)
        return None
    found = java_long(op.stored_body[:64].decode("utf-8", "replace"))
    return -1 if found is None else found
