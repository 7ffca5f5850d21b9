"""Transactions: half messages that wait for their end, op messages that record it, and checks of open ones.

    half    RMQ_SYS_TRANS_HALF_TOPIC/0     message with its topic and queue in REAL_TOPIC, REAL_QID
    final   its own topic and queue        sys flag COMMIT, prepared offset = physical offset of half
    op      RMQ_SYS_TRANS_OP_HALF_TOPIC/0  tag "d", body = queue offset of half, in decimal digits
    copy    RMQ_SYS_TRANS_HALF_TOPIC/0     half after a check, counted by TRANSACTION_CHECK_TIMES
    discard TRANS_CHECK_MAX_TIME_TOPIC/0   the half, given up

A commit writes the final message, then the op message; a rollback the op message alone. A half without an op is
pending, and checked: `librmq.scheduling.half_messages` asks a producer of the group how the transaction ended, and
appends a copy, which is then pending in place of the half.

Mirrors 4.9.4's ``TransactionalMessageServiceImpl``, ``TransactionalMessageBridge``, ``EndTransactionProcessor`` and
``DefaultTransactionalMessageCheckListener``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from itertools import islice
from typing import Any, Final, NamedTuple

from librmq.config import TransactionConfig
from librmq.errors import (
    CorruptionError,
    MessageIllegalError,
    TransactionRefusedError,
)
from librmq.java.lang import java_int
from librmq.message import Message, StoredMessage, record
from librmq.message.delays import parse_level
from librmq.message.properties import PropertyName
from librmq.message.topics import SystemTopic, validate_topic
from librmq.runtime.event_log import EventLog
from librmq.runtime.locks import Lock
from librmq.runtime.runner import Aside
from librmq.scheduling.half_messages import (
    HALF_SEPARATOR,
    OP_TAG,
    QUEUE,
    CheckBack,
    EndedHalves,
    HalfCheck,
    TransactionOffsets,
    transaction_of,
)
from librmq.store import AppendResult, MessageStore
from librmq.store.format import directory

__all__ = ["CheckBack", "TransactionConfig", "Transactions"]

_log = EventLog("librmq.txn")

_SAME_KEY: Final = 4096
"""The records of one id that a search reads: a client can send any number of halves with one id."""
_IDS: Final = 1 << 15  # A producer repeats a send within seconds, so the oldest ids can go.
_IDS_AT_OPENING: Final = 1 << 12  # The first half after an opening waits until these are read.
_SYSTEM_ERROR: Final = 1
_MESSAGE_ILLEGAL: Final = 13

_REMEMBERED: Final = 1024
_REMEMBERED_SIZE: Final = 8192
"""The size of a half, in bytes, up to which it is remembered, so that all of them take a few megabytes at most."""
# Reading these from their classes takes a twentieth of a transaction.
_HALF: Final = SystemTopic.HALF
_REAL_TOPIC: Final = PropertyName.REAL_TOPIC
_REAL_QUEUE_ID: Final = PropertyName.REAL_QUEUE_ID
_PRODUCER_GROUP: Final = PropertyName.PRODUCER_GROUP
_UNIQUE_KEY: Final = PropertyName.UNIQUE_KEY
_DELAY: Final = PropertyName.DELAY
_CHECK_TIMES: Final = PropertyName.TRANSACTION_CHECK_TIMES


class FinalMessage(NamedTuple):
    """A final message in the log."""

    topic: str
    """Its destination; a delayed one is in the schedule topic first."""
    queue_id: int
    """Number of the queue of its destination."""
    properties: Mapping[str, str]
    result: AppendResult
    """Where it was appended."""


class _Recent(NamedTuple):
    """A half that was prepared lately, with what its final message needs."""

    queue_offset: int
    half: Message
    queue_id: int
    born_timestamp_ms: int


_new = tuple.__new__  # in a third of the time


class _Transaction(NamedTuple):
    """The state of a transaction."""

    flag: int
    """The flag of the sent message; a copy has none."""
    to_end: list[StoredMessage]
    """The halves for which an end writes op messages: those that are pending, or the last one of a discarded one."""
    is_delivered: bool = False
    is_rolled_back: bool = False
    """Whether it has ended without a delivery, and was not discarded."""


class Transactions:
    """The transactions of a store: prepared, ended and checked. Not thread-safe: one caller at a time.

    The files are those of 4.9, but the behaviour is safer:

    - A transaction ends once. A repeated commit, or one by other offsets (a copy's, or after a crash between final and
      op message), writes what is missing and delivers nothing again. A commit after a rollback is refused, and so is
      the reverse. 4.9 delivers once for each commit.
    - A producer that got no answer sends its half again. Halves of one group with the same unique id, topic and body
      are one transaction. 4.9 delivers each of them.
    - An end by the offsets of a half that a check has copied ends its copies too. In 4.9 they stay pending, are
      checked again, and delivered again.
    - The final message has the flag of the sent message; a copy has none.

    This needs the unique id that producers give a message; without it only the named half is known.
    """

    def __init__(  # noqa: PLR0913 (what a broker gives it)
        self,
        store: MessageStore,
        offsets: TransactionOffsets,
        config: TransactionConfig | None = None,
        *,
        delivered: Callable[[FinalMessage], None] = lambda final: None,
        make_topic: Callable[[str], object] = lambda topic: None,
        is_reachable: Callable[[str], bool] | None = None,
        waits: bool = True,
        aside: Aside | None = None,
        start_ms: int | None = None,
    ) -> None:
        """Checks continue from the saved progress. The given functions must not raise, nor call this object.

        Args:
            store: Open for writing.
            offsets: Keeps the progress of the check.
            config: Times of the checks.
            delivered: ``delivered(final)`` is called with each final message as soon as it is in the log.
            make_topic: ``make_topic(topic)`` adds a topic of one queue, readable and writable, to the broker's table.
            is_reachable: ``is_reachable(group)`` returns whether a producer of the group can be asked. A check that
                reaches none does not count towards ``check_max``; None counts each, as 4.9 does.
            waits: With sync durability an end returns when it is on the device; False leaves the wait for `last_op` to
                the caller.
            aside: Flushes the store after a pass while other work continues; None flushes within `HalfCheck.run_due`.
            start_ms: Begins the grid of check passes; by default the store's present time.
        """
        self._store = store
        self._delivered = delivered
        self._waits = waits
        self._ended = EndedHalves(store, offsets)
        self.check: HalfCheck = HalfCheck(
            store,
            offsets,
            self._ended,
            config or TransactionConfig(),
            make_topic=make_topic,
            is_reachable=is_reachable,
            aside=aside,
            start_ms=start_ms,
        )
        """Asks about the transactions that stay open."""
        self._opened_at = store.log.end
        """The place of the first half that can be plain: the log can hold unknown ends of older ones."""
        self._without_op: set[int] = set()
        """The physical offsets of halves that were delivered, and that a failure has left without an op message."""
        self.last_op: AppendResult | None = None
        """The last op message; final messages are before it."""
        op_queue = store.queue(SystemTopic.OP, QUEUE)
        self._next_op = 0 if op_queue is None else op_queue.max_offset
        self._op: Message = Message(SystemTopic.OP, b"d", tags=OP_TAG, wait_store_ok=True)  # each gets a body
        self._recent: dict[int, _Recent] = {}
        """The latest halves by physical offset. Reading a half again would double the cost of a commit."""
        self._repeated = _RepeatedHalves(store)

    # ---- prepare and end

    def prepare(self, message: Message, queue_id: int, **fields: Any) -> AppendResult:  # noqa: ANN401 (those of `MessageStore.append`)
        """Store a half message for the queue ``queue_id`` of its topic, where no consumer sees it.

        Its properties must name the producer group (`PGROUP`), and TRAN_MSG as a client sets it. ``fields`` are those
        of `MessageStore.append`.

        Raises:
            MessageIllegalError: The message is refused; nothing is written.
        """
        topic = message.topic
        if type(topic) is not str or (topic, queue_id) not in self._store.appender.lanes:
            validate_topic(topic)
        properties = message.properties.copy()
        properties[_REAL_TOPIC], properties[_REAL_QUEUE_ID] = topic, str(queue_id)
        half = Message.from_parts(_HALF, message.body, message.flag, properties)
        if fields:
            fields["sys_flag"] = fields.get("sys_flag", 0) & ~record.TRANSACTION_MASK
        physical_offset, size, queue_offset, now_ms, _ = result = self._store.append(half, QUEUE, **fields)
        # A record that is read has no empty properties, so a half with one is read before it is delivered.
        if (
            self.half_stored(properties.get(_UNIQUE_KEY), physical_offset)
            and not fields
            and _DELAY not in properties
            and _CHECK_TIMES not in properties
            and all(properties.values())
            and size <= _REMEMBERED_SIZE
        ):
            recent = self._recent
            recent[physical_offset] = _new(_Recent, (queue_offset, half, queue_id, now_ms))
            if len(recent) > _REMEMBERED:
                _drop_oldest(recent)
        return result

    def half_stored(self, unique_key: str | None, physical_offset: int) -> bool:
        """Note a half that was stored without `prepare`; return False if it repeats another. Thread-safe."""
        repeated = self._repeated.add_half(unique_key, physical_offset) if unique_key else None
        if repeated is None:
            return True
        self._recent.pop(repeated, None)
        return False

    def commit(self, physical_offset: int, queue_offset: int, group: str) -> AppendResult | None:
        """Deliver the message whose half is at these offsets, and return its place; None if it was delivered before.

        Raises:
            TransactionRefusedError: There is no such half, it is another group's, or the transaction was rolled back;
                nothing is written.
        """
        final: AppendResult | None = None
        recent = self._pop_recent(physical_offset, queue_offset, group)
        if recent is not None:
            final = self._write_recent(physical_offset, recent)
            self._append_op(physical_offset, queue_offset)
            return final
        half = self._half(physical_offset, queue_offset, group)
        transaction = self._transaction(half)
        if transaction.is_rolled_back:
            how = "was rolled back" if half.unique_key else "has ended"
            raise TransactionRefusedError(_SYSTEM_ERROR, f"The transaction {how} before")
        if not transaction.is_delivered:
            final = self._write_final(half, transaction.flag)
        elif queue_offset not in self._ended and half.unique_key in self._repeated:
            _log.warning(
                "group %(group)s: the message of transaction %(message_id)s was delivered before, so its half at "
                "queue offset %(queue_offset)d ends without a delivery; remove UNIQ_KEY to send a message again",
                group=group,
                message_id=half.unique_key,
                queue_offset=queue_offset,
            )
        self._append_ops(transaction)
        return final

    def rollback(self, physical_offset: int, queue_offset: int, group: str) -> None:
        """Drop the message whose half is at these offsets; a repetition does nothing.

        Raises:
            TransactionRefusedError: There is no such half, it is another group's, or the message was delivered.
        """
        if self._pop_recent(physical_offset, queue_offset, group) is not None:
            self._append_op(physical_offset, queue_offset)
            return
        transaction = self._transaction(self._half(physical_offset, queue_offset, group))
        # Before the refusal, because a crash can have left a copy of a delivered message without its op message.
        self._append_ops(transaction)
        if transaction.is_delivered:
            raise TransactionRefusedError(_SYSTEM_ERROR, "The transaction was committed before")

    def open_halves(self) -> tuple[int, Callable[[int], bool]]:
        """Return the queue offset from which halves can be open, and a function for whether one has ended."""
        return self.check.judged_below, self._ended.ended_lookup()

    def is_rolled_back(self, half: StoredMessage) -> bool:
        """Return whether a half's transaction has ended without a delivery, so that `commit` refuses it."""
        return self._transaction(half).is_rolled_back

    # ---- the usual case: a half that was only prepared, and lately

    def _pop_recent(self, physical_offset: int, queue_offset: int, group: str) -> _Recent | None:
        """Return a half that was prepared since the last check, if these are its coordinates."""
        recent = self._recent.get(physical_offset)
        if (
            recent is None
            or recent.queue_offset != queue_offset
            or recent.half.properties.get(_PRODUCER_GROUP) != group
            or queue_offset < self.check.judged_below  # A check has copied it, so it is one of several.
        ):
            return None
        del self._recent[physical_offset]
        return recent

    def _write_recent(self, physical_offset: int, recent: _Recent) -> AppendResult:
        """Return the final message of a half that need not be read again."""
        _, half, queue_id, born_timestamp_ms = recent
        properties = half.properties
        half.topic = topic = properties[_REAL_TOPIC]
        try:
            result = self._store.append(
                half,
                queue_id,
                born_timestamp_ms=born_timestamp_ms,
                sys_flag=record.TRANSACTION_COMMIT,
                prepared_transaction_offset=physical_offset,
                wait=False,
            )
        except MessageIllegalError as error:
            raise TransactionRefusedError(_MESSAGE_ILLEGAL, str(error)) from None
        # Until its op message is written, this keeps the half from counting as one that was only prepared.
        self._without_op.add(physical_offset)
        self._delivered(_new(FinalMessage, (topic, queue_id, properties, result)))
        return result

    def _half(self, physical_offset: int, queue_offset: int, group: str) -> StoredMessage:
        try:
            half = self._store.message_at(physical_offset) if physical_offset >= 0 else None
        except CorruptionError as error:
            raise TransactionRefusedError(
                _SYSTEM_ERROR, f"Find prepared transaction message failed: {error}"
            ) from error
        if half is not None and half.queue_offset != queue_offset:  # its record's own word can be damaged
            at_offset = self._store.read(_HALF, QUEUE, queue_offset, 1).messages
            half = at_offset[0] if at_offset and at_offset[0].physical_offset == physical_offset else half
        if half is None or half.topic != _HALF:
            raise TransactionRefusedError(_SYSTEM_ERROR, "Find prepared transaction message failed")
        if half.properties.get(_PRODUCER_GROUP) != group:
            raise TransactionRefusedError(_SYSTEM_ERROR, "The producer group wrong")
        if half.queue_offset != queue_offset:
            raise TransactionRefusedError(_SYSTEM_ERROR, "The transaction state table offset wrong")
        if half.physical_offset != physical_offset:
            raise TransactionRefusedError(_SYSTEM_ERROR, "The commit log offset wrong")
        return half

    def _is_plain(self, half: StoredMessage) -> bool:
        """Return whether a half has only been prepared: the usual case, which needs no search."""
        return (
            half.physical_offset >= self._opened_at
            and half.queue_offset >= self.check.judged_below
            and half.queue_offset not in self._ended
            and half.physical_offset not in self._without_op
            and _CHECK_TIMES not in half.properties
            and half.unique_key not in self._repeated
        )

    # ---- all halves and copies of a transaction, of which any can end it

    def _transaction(self, half: StoredMessage) -> _Transaction:
        """Return what the log says of the transaction of a half."""
        if self._is_plain(half):
            return _Transaction(half.flag, [half])
        # The index can lack any of them, the half itself too: a broker can run without an index for a while.
        by_place = {member.physical_offset: member for member in self._records_of(SystemTopic.HALF, half)}
        by_place[half.physical_offset] = half
        members = [by_place[place] for place in sorted(by_place)]
        is_delivered = self._is_delivered(members)
        pending = self._pending(members)
        if not pending and not is_delivered:
            # The half queue is read only here, where a pending copy that the index lacks decides: without one a commit
            # is refused.
            pending = self._pending(self._in_queue(SystemTopic.HALF, self.check.judged_below, half))
        is_discarded = not pending and self._is_discarded(half)
        if is_discarded and not is_delivered and members[-1].queue_offset not in self._ended:
            pending = members[-1:]  # No check asks about it any more, so the op message is the only trace of its end.
        is_rolled_back = not (is_delivered or pending or is_discarded)
        return _Transaction(members[0].flag, pending, is_delivered, is_rolled_back)

    def _records_of(self, topic: str, half: StoredMessage) -> list[StoredMessage]:
        """Return the records of a topic that belong to the same transaction as a half, as far as the index knows."""
        if not half.unique_key:
            return []
        records = self._store.find_by_key(topic, half.unique_key, max_messages=_SAME_KEY)
        return [message for message in records if transaction_of(message) == transaction_of(half)]

    def _in_queue(self, topic: str, begin: int, half: StoredMessage) -> list[StoredMessage]:
        """Return the records of the same transaction in a queue of the checks, from a queue offset on."""
        if not half.unique_key:
            return []
        transaction = transaction_of(half)
        return [
            message for message in self._store.messages(topic, QUEUE, begin) if transaction_of(message) == transaction
        ]

    def _pending(self, members: list[StoredMessage]) -> list[StoredMessage]:
        below = self.check.judged_below
        return [half for half in members if half.queue_offset >= below and half.queue_offset not in self._ended]

    def _is_delivered(self, members: list[StoredMessage]) -> bool:
        """Return whether a final message of one of the members of a transaction is in the log."""
        half = members[0]
        if not half.unique_key:
            return half.physical_offset in self._without_op
        delayed = parse_level(half.properties.get(_DELAY)) > 0
        topic = SystemTopic.SCHEDULE if delayed else half.properties.get(PropertyName.REAL_TOPIC, "")
        places = {member.physical_offset for member in members}
        return any(
            message.sys_flag & record.TRANSACTION_MASK == record.TRANSACTION_COMMIT
            and (message.prepared_transaction_offset in places or self._is_final_of(message, half))
            for message in self._store.find_by_key(topic, half.unique_key, max_messages=_SAME_KEY)
        )

    def _is_final_of(self, message: StoredMessage, half: StoredMessage) -> bool:
        """Return whether a final message has its half, which the index can lack, in the transaction of another."""
        try:
            prepared = self._store.message_at(message.prepared_transaction_offset)
        except CorruptionError:
            return False
        return (
            prepared is not None
            and prepared.topic == SystemTopic.HALF
            and transaction_of(prepared) == transaction_of(half)
        )

    def _is_discarded(self, half: StoredMessage) -> bool:
        """Return whether a check has given a transaction up, or may have; a late commit still delivers it."""
        if not half.unique_key:
            return half.queue_offset < self.check.judged_below
        begin, _ = self._store.queue_range(SystemTopic.CHECK_MAX_TIME, QUEUE)
        return bool(
            self._records_of(SystemTopic.CHECK_MAX_TIME, half)
            or self._in_queue(SystemTopic.CHECK_MAX_TIME, begin, half)
        )

    def _append_ops(self, transaction: _Transaction) -> None:
        for half in transaction.to_end:
            self._append_op(half.physical_offset, half.queue_offset)
            self._recent.pop(half.physical_offset, None)

    # ---- final and op messages

    @cached_property
    def _op_body(self) -> bytes:
        # 4.9 can't read the form of 5.x, which can read both, so the longer form is for stores of 5.x alone.
        is_of_5 = directory.is_of_5(self._store.path, self._store.files)
        return f"%d{HALF_SEPARATOR}".encode() if is_of_5 else b"%d"

    def _write_final(self, half: StoredMessage, flag: int) -> AppendResult:
        properties = dict(half.properties)
        topic = properties.get(PropertyName.REAL_TOPIC, "")
        queue_id = java_int(properties.get(PropertyName.REAL_QUEUE_ID, ""))
        if queue_id is None:
            raise TransactionRefusedError(_MESSAGE_ILLEGAL, "the half message has no queue in REAL_QID")
        if parse_level(properties.get(PropertyName.DELAY)) > 0:
            # A message for the schedule topic has its properties encoded again, and 4.9 leaves these out of them.
            for name in (PropertyName.REAL_TOPIC, PropertyName.REAL_QUEUE_ID, PropertyName.TRANSACTION_PREPARED):
                properties.pop(name, None)
        sys_flag = half.sys_flag & ~record.TRANSACTION_MASK | record.TRANSACTION_COMMIT
        place = half.physical_offset
        try:
            result = self._store.copies.append_again(
                half, topic, queue_id, properties, flag=flag, sys_flag=sys_flag, prepared_transaction_offset=place
            )
        except MessageIllegalError as error:
            raise TransactionRefusedError(_MESSAGE_ILLEGAL, str(error)) from None
        self._without_op.add(place)
        self._delivered(FinalMessage(topic, queue_id, properties, result))
        return result

    def _append_op(self, physical_offset: int, queue_offset: int) -> None:
        self._op.body = self._op_body % queue_offset
        # The final message did not wait for the device. It stands before the op message in the log, so one wait is for
        # both.
        result = self.last_op = self._store.append(self._op, QUEUE, wait=self._waits)
        self._without_op.discard(physical_offset)
        op_offset = result.queue_offset
        if op_offset != self._next_op:  # Another writer has added op messages, which can end any half.
            self._recent.clear()
        self._next_op = op_offset + 1
        self._ended.mark_ended(queue_offset, op_offset)


def _drop_oldest(entries: dict[Any, Any]) -> None:
    """Drop the first eighth of a dict: one by one takes long, because each search passes the places of those before."""
    for key in list(islice(entries, len(entries) >> 3)):
        del entries[key]


class _RepeatedHalves:
    """The latest unique ids that several halves share: a producer that got no answer sends its half again.

    Thread-safe. Above 32,768 ids the oldest go. At its first half it reads the ids of the 4,096 halves before.
    """

    def __init__(self, store: MessageStore) -> None:
        self._store = store
        # A half that a client sends is stored without the lock of the ends, so this has a lock of its own.
        self._lock = Lock()
        self._places: dict[str, int | None] | None = None
        """The place of the only half of an id, None for several; not read before the first half."""

    def add_half(self, unique_key: str, physical_offset: int) -> int | None:
        """Note a half that was stored; return the physical offset of the half that it repeats, None for a new one.

        -1 stands for several halves.
        """
        with self._lock:
            places = self._places
            if places is None:
                places = self._places = self._read_last_halves(physical_offset)
            if unique_key not in places:
                places[unique_key] = physical_offset
                if len(places) > _IDS:
                    _drop_oldest(places)
                return None
            repeated = places.pop(unique_key)
            places[unique_key] = None
            return -1 if repeated is None else repeated

    def __contains__(self, unique_key: str | None) -> bool:
        """Return whether several halves have this id."""
        with self._lock:
            return unique_key is not None and self._places is not None and self._places.get(unique_key, -1) is None

    def _read_last_halves(self, before: int) -> dict[str, int | None]:
        """Return the ids of the last halves in the log before a physical offset."""
        places: dict[str, int | None] = {}
        low, end = self._store.queue_range(SystemTopic.HALF, QUEUE)
        for half in self._store.messages(SystemTopic.HALF, QUEUE, max(low, end - _IDS_AT_OPENING), end):
            if half.unique_key and half.physical_offset < before:
                places[half.unique_key] = None if half.unique_key in places else half.physical_offset
        return places
