"""Half messages and their ends: which halves after the check's progress are pending.

An op message records the end of a half: its body is the half's queue offset in decimal digits. The check stores its
progress in both queues as group ``CID_RMQ_SYS_TRANS``. `librmq.txn` describes the records. Mirrors the op queue of
4.9.4's ``TransactionalMessageServiceImpl``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from librmq.java.lang import java_long
from librmq.message.message import StoredMessage
from librmq.message.topics import HALF_TOPIC, OP_TOPIC
from librmq.runtime.event_log import EventLog
from librmq.runtime.locks import Lock
from librmq.store import MessageStore
from librmq.store.engine.read import GetStatus

_log = EventLog("librmq.txn")

CHECK_GROUP: Final = "CID_RMQ_SYS_TRANS"
"""The internal consumer group that has the check's progress."""
QUEUE: Final = 0
"""The only queue of halves, of op messages, and of discarded halves."""
OP_TAG: Final = "d"
"""The tag of every op message."""
_IDS: Final = 1 << 15
_IDS_AT_OPENING: Final = 1 << 12


class TransactionOffsets(Protocol):
    """Store of the check's progress, such as `librmq.store.format.broker_tables.BrokerTables`."""

    def consumer_offset(self, topic: str, group: str, queue_id: int) -> int | None:
        """Return the queue offset of a group's next message, None if never stored."""

    def set_consumer_offset(self, topic: str, group: str, queue_id: int, queue_offset: int) -> None:
        """Store the queue offset of a group's next message."""


class EndedHalves:
    """The ended halves from the check's progress on: one bit for each, read from the op queue.

    Not thread-safe. The constructor reads the op messages from the progress on; `mark_ended` notes later ones.
    """

    def __init__(self, store: MessageStore, offsets: TransactionOffsets) -> None:
        """Read the op queue; `CorruptionError` as for `MessageStore.read`."""
        self._store = store
        self._base = progress(store, offsets, HALF_TOPIC) & ~7
        self._bits = bytearray()
        self._next_op = progress(store, offsets, OP_TOPIC)
        self._read_new_ops()

    def __contains__(self, queue_offset: int) -> bool:
        """Return whether the half at ``queue_offset`` has ended; False below the progress."""
        return _is_marked(self._bits, queue_offset - self._base)

    def ended_lookup(self) -> Callable[[int], bool]:
        """Return a function, for any thread, that returns whether a half has ended by now."""
        base, bits = self._base, bytes(self._bits)
        return lambda queue_offset: _is_marked(bits, queue_offset - base)

    def mark_ended(self, queue_offset: int, op_offset: int) -> None:
        """Note an op message that was just written for a half."""
        if op_offset == self._next_op:
            self._next_op += 1
            self._set_bit(queue_offset)
        else:  # another writer added op messages
            self._read_new_ops()

    def drop_below(self, queue_offset: int) -> None:
        """Drop halves that the check has passed."""
        passed_bytes = (queue_offset - self._base) >> 3
        if passed_bytes > 0:
            del self._bits[:passed_bytes]
            self._base += 8 * passed_bytes

    def _read_new_ops(self) -> None:
        queue = self._store.queue(HALF_TOPIC, QUEUE)
        end = 0 if queue is None else queue.max_offset
        while True:
            batch = self._store.read(OP_TOPIC, QUEUE, self._next_op)
            for op in batch.messages:
                queue_offset = half_of(op)
                if queue_offset is not None and queue_offset < end:  # the body of an op message can be anything
                    self._set_bit(queue_offset)
            if batch.next_offset == self._next_op or batch.status is GetStatus.NO_MESSAGE_IN_QUEUE:
                return
            self._next_op = batch.next_offset

    def _set_bit(self, queue_offset: int) -> None:
        at = queue_offset - self._base
        if at < 0:
            return
        if at >> 3 >= len(self._bits):
            self._bits.extend(bytes((at >> 3) + 1 - len(self._bits)))
        self._bits[at >> 3] |= 1 << (at & 7)


class RepeatedHalves:
    """The latest unique ids that several halves share: a producer that got no answer sends its half again.

    Thread-safe. It keeps the latest 32,768 ids; at the opening it reads the ids of the last 4,096 halves.
    """

    def __init__(self, store: MessageStore) -> None:
        self._store = store
        self._lock = Lock()
        self._places: dict[str, int | None] | None = None  # physical offset of the only half of an id; None for several

    def add_half(self, unique_key: str, physical_offset: int) -> int | None:
        """Note a half that was stored; return the physical offset of the only half that it repeats, if there is one."""
        with self._lock:
            if self._places is None:
                self._places = self._read_last_halves(physical_offset)
            is_new = unique_key not in self._places
            before = self._places.pop(unique_key, None)
            self._places[unique_key] = physical_offset if is_new else None
            if len(self._places) > _IDS:
                del self._places[next(iter(self._places))]
            return before

    def __contains__(self, unique_key: str | None) -> bool:
        """Return whether several halves have this id."""
        with self._lock:
            return unique_key is not None and self._places is not None and self._places.get(unique_key, -1) is None

    def _read_last_halves(self, before: int) -> dict[str, int | None]:
        """Return the ids of the last halves in the log before a physical offset."""
        places: dict[str, int | None] = {}
        low, end = self._store.queue_range(HALF_TOPIC, QUEUE)
        at = max(low, end - _IDS_AT_OPENING)
        while at < end:
            batch = self._store.read(HALF_TOPIC, QUEUE, at)
            for half in batch.messages:
                if half.unique_key and half.physical_offset < before:
                    places[half.unique_key] = None if half.unique_key in places else half.physical_offset
            if batch.next_offset <= at:
                break
            at = batch.next_offset
        return places


def _is_marked(bits: bytes | bytearray, at: int) -> bool:
    return 0 <= at < 8 * len(bits) and bool(bits[at >> 3] & (1 << (at & 7)))


def progress(store: MessageStore, offsets: TransactionOffsets, topic: str) -> int:
    """Return the check's progress in the queue of a topic; by default the start of the queue."""
    stored = offsets.consumer_offset(topic, CHECK_GROUP, QUEUE)
    if stored is not None and stored >= 0:
        return stored
    return store.queue_range(topic, QUEUE)[0]  # unlike others, this call writes no entries; each commit makes it


def half_of(op: StoredMessage) -> int | None:
    """Return the queue offset of the half in an op message; −1 if it is unreadable, None without the tag."""
    if op.tags != OP_TAG:
        _log.error(
            "the op message at %(physical_offset)d is skipped: expected the tag 'd', found %(tags)r",
            physical_offset=op.physical_offset,
            tags=op.tags,
        )
        return None
    queue_offset = java_long(op.stored_body[:64].decode("utf-8", "replace"))
    return -1 if queue_offset is None else queue_offset
