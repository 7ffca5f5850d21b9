"""Half messages: their ends, and the check of those that have not ended.

An op message records the end of a half: its body is the half's queue offset in decimal digits. 5.x collects the ends of
some seconds in one op message, ``3,4,7,``; it reads a number without a comma too. The check stores its progress in both
queues as group ``CID_RMQ_SYS_TRANS``. `librmq.txn` describes the records. Mirrors the op queue and the ``check`` of
4.9.4's ``TransactionalMessageServiceImpl``, and its ``TransactionalMessageCheckService``.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Final, NamedTuple, Protocol

from librmq.config import Between, Config, Seconds
from librmq.errors import LASTING, MessageIllegalError, RmqError
from librmq.java.lang import java_int, java_long
from librmq.message.message import StoredMessage
from librmq.message.properties import (
    PROPERTY_CHECK_IMMUNITY_TIME,
    PROPERTY_PRODUCER_GROUP,
    PROPERTY_REAL_QUEUE_ID,
    PROPERTY_REAL_TOPIC,
    PROPERTY_TRANSACTION_CHECK_TIMES,
    PROPERTY_TRANSACTION_PREPARED_QUEUE_OFFSET,
    PROPERTY_WAIT,
)
from librmq.message.topics import CHECK_MAX_TIME_TOPIC, HALF_TOPIC, OP_TOPIC
from librmq.runtime.event_log import EventLog, StateLog
from librmq.runtime.locks import Lock
from librmq.runtime.progress_saver import ProgressSaver
from librmq.runtime.runner import Aside
from librmq.store import MessageStore
from librmq.store.engine.read import GetStatus, ReadResult

_log = EventLog("librmq.txn")

CHECK_GROUP: Final = "CID_RMQ_SYS_TRANS"
"""The internal consumer group that has the check's progress."""
QUEUE: Final = 0
"""The only queue of halves, of op messages, and of discarded halves."""
OP_TAG: Final = "d"
"""The tag of every op message."""
HALF_SEPARATOR: Final = ","
"""Stands behind each queue offset in an op message of 5.x."""
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
                for queue_offset in halves_of(op):
                    if queue_offset < end:  # the body of an op message can be anything
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
                    del places[next(iter(places))]
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


def halves_of(op: StoredMessage) -> set[int]:
    """Return the queue offsets of the halves in an op message; −1 for an unreadable one, none without the tag."""
    if op.tags != OP_TAG:
        _log.error(
            "the op message at %(physical_offset)d is skipped: expected the tag 'd', found %(tags)r",
            physical_offset=op.physical_offset,
            tags=op.tags,
        )
        return set()
    numbers = map(java_long, op.stored_body.decode("utf-8", "replace").rstrip(HALF_SEPARATOR).split(HALF_SEPARATOR))
    return {-1 if queue_offset is None else queue_offset for queue_offset in numbers}


def is_copy(half: StoredMessage) -> bool:
    """Return whether a check has put a half back, as a copy of an earlier one."""
    return not half.properties.keys().isdisjoint((_CHECK_TIMES, _PREPARED_AT))


def transaction_of(half: StoredMessage) -> tuple[object, ...]:
    """Return what the halves of one transaction share; without a unique id each half is a transaction of its own.

    Time of birth and queue can differ: a producer that got no answer chooses them again.
    """
    properties = half.properties
    if not half.unique_key:
        return (half.physical_offset,)
    names = PROPERTY_PRODUCER_GROUP, PROPERTY_REAL_TOPIC
    return (half.unique_key, zlib.crc32(half.stored_body), len(half.stored_body), *map(properties.get, names))


# ---- check

_OPS_READ: Final = 32
_LOOK_AHEAD: Final = 1000
_CHECK_TIMES: Final = PROPERTY_TRANSACTION_CHECK_TIMES
_PREPARED_AT: Final = PROPERTY_TRANSACTION_PREPARED_QUEUE_OFFSET


class CheckPass:
    """One check pass, from the progress to the end of the half queue at the start.

    It skips a half with an op message. It appends a copy of a half that is due, and asks the producer group about the
    copy. A half that was checked too often or is too old goes to the topic of discarded halves. The pass ends before a
    half that is too young to check. ``queue_offset`` is the offset of the next half. Not thread-safe.
    """

    def __init__(
        self,
        store: MessageStore,
        offsets: TransactionOffsets,
        start_ms: int,
        config: TransactionConfig,
        hooks: CheckHooks,
        uncounted: set[int],
        result: Checked | None,
    ) -> None:
        """Begin a pass.

        Args:
            store: Open for writing.
            offsets: Keeps the progress.
            start_ms: Start of the pass.
            config: Its limits.
            hooks: Functions that it calls.
            uncounted: Queue offsets of copies whose last check reached no producer.
            result: Collects the questions and discards; None drops them.
        """
        hooks.make_topic(HALF_TOPIC)
        self._store = store
        self._offsets = offsets
        self._start_ms = start_ms
        self._hooks = hooks
        self._uncounted = uncounted
        self._result = result
        self._reachable_at = -1
        self._timeout_ms = round(1000 * config.timeout_s)
        self._longest_ms = round(1000 * config.longest_pass_s)
        self._check_max = config.check_max
        hours = store.config.file_reserved_hours if config.reserved_hours is None else config.reserved_hours
        self._reserved_ms = (_RESERVED_HOURS if hours is None else hours) * 3_600_000  # None: messages of any age
        self._begin = self.queue_offset = progress(store, offsets, HALF_TOPIC)
        queue = store.queue(HALF_TOPIC, QUEUE)
        self._end = 0 if queue is None else queue.max_offset  # its own copies wait for the next pass
        self._op_begin = self._op_end = self._next_op = progress(store, offsets, OP_TOPIC)
        self._op_by_half: dict[int, int] = {}  # op messages by half that were read and not used yet
        self._halves_left: dict[int, int] = {}  # unused halves of each op message that names several
        self._used_ops: set[int] = set()  # used op messages from `_op_end` on
        # Born time of the last op message in the last batch; None for an empty batch.
        self._last_born_ms: int | None = None
        self._missed = False
        if queue is not None:
            self._read_ops()

    def progress(self) -> dict[str, int]:
        """Return the progress by topic, where it has changed."""
        ranges = {HALF_TOPIC: (self._begin, self.queue_offset), OP_TOPIC: (self._op_begin, self._op_end)}
        return {topic: after for topic, (before, after) in ranges.items() if before != after}

    def check_halves(self, now_ms: int, limit: int) -> bool:
        """Check up to ``limit`` halves; return True if the pass is over."""
        for _ in range(limit):
            if now_ms - self._start_ms > self._longest_ms or self.queue_offset >= self._end:
                return True
            if not self._use_op(self.queue_offset):
                batch = self._store.read(HALF_TOPIC, QUEUE, self.queue_offset, 1)
                if not batch.messages:
                    if self._missed or not _is_illegal(batch):
                        return True
                    self._missed = True
                    self.queue_offset = batch.next_offset
                    continue
                if not self._check_half(batch.messages[0], now_ms):
                    return True
            self.queue_offset += 1
        return False

    def _check_half(self, half: StoredMessage, now_ms: int) -> bool:
        """Check a half that has no op message; return False if the pass ends before it."""
        properties = dict(half.properties)
        check_times = self._times_checked(half) + 1
        if check_times > self._check_max:
            return self._discard(half, properties)
        properties[_CHECK_TIMES] = str(check_times)
        age_ms = now_ms - half.born_timestamp_ms
        if age_ms > self._reserved_ms:
            return self._discard(half, properties)
        if half.store_timestamp_ms >= self._start_ms:
            return False
        immunity_ms = self._timeout_ms
        immunity = properties.get(PROPERTY_CHECK_IMMUNITY_TIME)
        if immunity is not None:
            seconds = java_long(immunity)
            if seconds is not None and seconds != -1:
                immunity_ms = 1000 * seconds
            if age_ms < immunity_ms and self._keep_immune(half, properties):
                return True
        elif 0 <= age_ms < immunity_ms:
            return False
        while not self._is_due(age_ms, immunity_ms):
            previous_born_ms = self._last_born_ms
            self._read_ops()
            if self._use_op(self.queue_offset):
                return True
            if previous_born_ms is None and self._last_born_ms is None:
                break  # no op message yet: 4.9 would read again until the pass times out
        if self._hooks.has_ended(half.queue_offset):  # during the pass
            self._find_op()
            return True
        return self._ask_about(half, properties, check_times, now_ms)

    def _times_checked(self, half: StoredMessage) -> int:
        """Return how often a half was checked, without checks that reached no producer."""
        checked = half.properties.get(_CHECK_TIMES)
        if checked is None:
            return 0
        parsed = java_int(checked)
        times = -1 if parsed is None else parsed
        return times - (half.queue_offset in self._uncounted)

    def _ask_about(self, half: StoredMessage, properties: dict[str, str], check_times: int, now_ms: int) -> bool:
        """Append a copy of a half and ask about it; return False if no producer can be asked, which ends the pass."""
        group = properties.get(PROPERTY_PRODUCER_GROUP, "")
        is_reachable = self._hooks.is_reachable
        if is_reachable is not None and not is_reachable(group):
            if not self._has_reachable_ahead(now_ms, is_reachable):
                return False  # nothing is written for halves that all wait for a producer
            properties[_CHECK_TIMES] = str(check_times - 1)
            self._append_copy(half, properties)
            return True
        copy = self._append_copy(half, properties)
        if copy is not None:
            question = CheckBack(group, copy, check_times)
            self._hooks.ask(question)
            if self._result is not None:
                self._result.questions.append(question)
        return True

    def _has_reachable_ahead(self, now_ms: int, is_reachable: Callable[[str], bool]) -> bool:
        """Return whether a producer can be asked about a due half later in this pass.

        It examines `_LOOK_AHEAD` halves, and returns True if there are more.
        """
        for queue_offset in range(max(self._reachable_at, self.queue_offset + 1), self._end):
            if queue_offset > self.queue_offset + _LOOK_AHEAD:
                return True
            if queue_offset in self._op_by_half or self._hooks.has_ended(queue_offset):
                continue
            batch = self._store.read(HALF_TOPIC, QUEUE, queue_offset, 1)
            if not batch.messages or 0 <= now_ms - batch.messages[0].born_timestamp_ms < self._timeout_ms:
                return False
            if is_reachable(batch.messages[0].properties.get(PROPERTY_PRODUCER_GROUP, "")):
                self._reachable_at = queue_offset
                return True
        return False

    def _find_op(self) -> None:
        """Read op messages up to the current half's."""
        while not self._use_op(self.queue_offset):
            self._read_ops()
            if self._last_born_ms is None:
                return

    def _is_due(self, age_ms: int, immunity_ms: int) -> bool:
        if self._last_born_ms is None:
            return age_ms > immunity_ms or age_ms <= -1
        return self._last_born_ms - self._start_ms > self._timeout_ms or age_ms <= -1

    def _keep_immune(self, half: StoredMessage, properties: dict[str, str]) -> bool:
        """Append a copy of a half that is still immune, unless it has ended; return False if that fails."""
        first = properties.get(_PREPARED_AT)
        if first is not None:
            queue_offset = java_long(first)
            if queue_offset is None or queue_offset == -1:
                return False
            if self._use_op(queue_offset):
                return True
        properties[PROPERTY_WAIT] = "false"
        properties.setdefault(_PREPARED_AT, str(half.queue_offset))
        self._append_copy(half, properties)
        return True

    def _append_copy(self, half: StoredMessage, properties: dict[str, str]) -> StoredMessage | None:
        """Append a copy of a half with these properties; None if the half had to be given up."""
        try:
            result = self._store.appender.append_again(
                half, HALF_TOPIC, half.queue_id, properties, flag=0, reconsume_times=0
            )
        except MessageIllegalError as error:  # the copy has no room for its properties
            _log.error(
                "the half message at queue offset %(queue_offset)d can't be copied: %(error)s",
                queue_offset=half.queue_offset,
                error=error,
            )
            self._discard(half, half.properties)
            return None
        copy = self._store.message_at(result.physical_offset)
        assert copy is not None
        return copy

    def _discard(self, half: StoredMessage, properties: Mapping[str, str]) -> bool:
        """Move a half that was checked too often or is too old to the topic of discarded halves; the pass continues."""
        check_times = java_int(properties.get(_CHECK_TIMES, "")) or 0
        _log.error(
            "the half message at queue offset %(queue_offset)d, for topic %(target_topic)s, is discarded after "
            "%(checks)d checks",
            queue_offset=half.queue_offset,
            target_topic=properties.get(PROPERTY_REAL_TOPIC),
            checks=check_times,
            topic=HALF_TOPIC,
            queue_id=half.queue_id,
        )
        self._hooks.make_topic(CHECK_MAX_TIME_TOPIC)
        try:
            self._store.appender.append_again(half, CHECK_MAX_TIME_TOPIC, QUEUE, properties)
        except MessageIllegalError as error:  # the half itself stays in the log
            _log.error(
                "the half message at physical offset %(physical_offset)d can't be discarded: %(error)s",
                physical_offset=half.physical_offset,
                error=error,
            )
        self._hooks.discarded(half, check_times)
        if self._result is not None:
            self._result.discarded.append((half, check_times))
        return True

    def _read_ops(self) -> None:
        batch = self._store.read(OP_TOPIC, QUEUE, self._next_op, _OPS_READ)
        self._last_born_ms = batch.messages[-1].born_timestamp_ms if batch.messages else None
        if _is_illegal(batch):
            _log.error(
                "the check found no op message at %(queue_offset)d, and continues at %(next_offset)d",
                queue_offset=self._next_op,
                next_offset=batch.next_offset,
            )
            self._offsets.set_consumer_offset(OP_TOPIC, CHECK_GROUP, QUEUE, batch.next_offset)
        for op in batch.messages:
            halves = [half for half in halves_of(op) if half >= self._begin]
            self._op_by_half.update(dict.fromkeys(halves, op.queue_offset))
            if not halves:
                self._mark_used(op.queue_offset)
            elif len(halves) > 1:
                self._halves_left[op.queue_offset] = len(halves)
        if batch.status is not GetStatus.NO_MESSAGE_IN_QUEUE:
            self._next_op = batch.next_offset

    def _use_op(self, half_offset: int) -> bool:
        """Use the op message of a half; return False if none was read. One of several halves is used with its last."""
        op_offset = self._op_by_half.pop(half_offset, None)
        if op_offset is None:
            return False
        left = self._halves_left.pop(op_offset, 1) - 1
        if left:
            self._halves_left[op_offset] = left
        else:
            self._mark_used(op_offset)
        return True

    def _mark_used(self, op_offset: int) -> None:
        self._used_ops.add(op_offset)
        while self._op_end in self._used_ops:
            self._used_ops.discard(self._op_end)
            self._op_end += 1


def _is_illegal(result: ReadResult) -> bool:
    """Return whether a read found nothing although the queue has more entries."""
    return not result.messages and result.status not in (GetStatus.NO_MESSAGE_IN_QUEUE, GetStatus.OFFSET_OVERFLOW_ONE)


# ---- schedule

_CHECK: Final = ("check",), "the check of half messages"
_RESERVED_HOURS: Final = 72
_MAX_UNCOUNTED: Final = 1 << 16
_MAX_INT: Final = (1 << 31) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TransactionConfig(Config):
    """Settings for the checks of half messages; the defaults are 4.9.4's."""

    timeout_s: Annotated[float, Seconds()] = 6
    """Age of a half message at its first check, unless it has an immunity of its own."""
    check_max: Annotated[int, Between(1, _MAX_INT)] = 15
    """Checks after which a half message is discarded."""
    interval_s: Annotated[float, Seconds(0.001)] = 60
    """Time between two check passes."""
    longest_pass_s: Annotated[float, Seconds(0.001)] = 60
    """A pass that takes longer ends early."""
    reserved_hours: Annotated[int | None, Between(1, _MAX_INT)] = None
    """Age at which a half message is discarded; None means the store's ``file_reserved_hours``, or else 72."""
    most_at_once: Annotated[int, Between(1, _MAX_INT)] = 1000
    """Half messages in one turn of `Transactions.run_due`; the next turn continues the pass."""


class CheckBack(NamedTuple):
    """A question to a producer group: how did the local transaction of this message end?"""

    group: str
    """The producer group."""
    half: StoredMessage
    """The copy that the check has appended; the answer ends the transaction by the copy's offsets."""
    check_times: int
    """Number of this check, counting from 1."""

    @property
    def topic(self) -> str:
        """The message's own topic."""
        return self.half.properties.get(PROPERTY_REAL_TOPIC, "")

    @property
    def queue_id(self) -> int:
        """The message's own queue."""
        return java_int(self.half.properties.get(PROPERTY_REAL_QUEUE_ID, "")) or 0

    @property
    def properties(self) -> dict[str, str]:
        """The properties in the producer's form."""
        return {**self.half.properties, PROPERTY_WAIT: "false"}


class Checked(NamedTuple):
    """Result of one check pass."""

    questions: list[CheckBack]
    """The questions of the pass."""
    discarded: list[tuple[StoredMessage, int]]
    """The halves that were given up, with their numbers of checks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckHooks:
    """Functions that checks call; none of them may raise."""

    ask: Callable[[CheckBack], None]
    """Passes a question to a producer."""
    discarded: Callable[[StoredMessage, int], None]
    """``discarded(half, check_times)`` is called for each half that was given up."""
    make_topic: Callable[[str], None]
    """Adds a topic of one queue to the broker's table."""
    is_reachable: Callable[[str], bool] | None
    """Returns whether a producer of a group can be asked. A check that reaches none does not count; with None each
    check counts, as in 4.9."""
    has_ended: Callable[[int], bool]
    """``has_ended(queue_offset)`` returns whether a half ended during the pass."""
    passed: Callable[[int], None]
    """``passed(queue_offset)`` is called when no half below a queue offset is pending."""


class CheckSchedule:
    """The check passes of a store's transactions. Not thread-safe: one caller at a time."""

    def __init__(
        self,
        store: MessageStore,
        offsets: TransactionOffsets,
        start_ms: int,
        config: TransactionConfig,
        hooks: CheckHooks,
        aside: Aside | None,
    ) -> None:
        """The first pass continues from the saved progress.

        Args:
            store: Open for writing.
            offsets: Keeps the progress of the check.
            start_ms: Start of the grid of check passes.
            config: When to check.
            hooks: Functions that checks call.
            aside: Flushes the store after a pass while other work continues; None flushes within `run_due`.
        """
        self._uncounted: set[int] = set()
        self._store = store
        self._offsets = offsets
        self._put_back_progress()
        self._config = config
        self._hooks = hooks
        self._interval_ms = round(1000 * config.interval_s)
        self._begin_ms = start_ms + self._interval_ms
        self._next_ms: int | None = None  # None while nothing is pending
        self._last_ms = start_ms
        self._pass: CheckPass | None = None
        self._is_over = False  # the pass is over: its halves count as judged, though its progress is not saved
        self._states = StateLog(_log, "transactions")
        self._saver = ProgressSaver(
            "the progress of the check of half messages",
            flush=lambda reached: store.flush(),
            reached=lambda: self._pass if self._is_over else None,
            note=self._save_progress,
            now_ms=store.clock.now_ms,
            save_every_s=0,
            aside=aside,
        )

    def _put_back_progress(self) -> None:
        """Set a progress beyond the end of its queue to the end, so that the next halves there are checked.

        A power failure can take the last records from the log of a broker of RocketMQ that has saved its progress.
        """
        for topic in (HALF_TOPIC, OP_TOPIC):
            end, stored = (
                self._store.queue_range(topic, QUEUE)[1],
                self._offsets.consumer_offset(topic, CHECK_GROUP, QUEUE),
            )
            if stored is not None and stored > end:
                self._offsets.set_consumer_offset(topic, CHECK_GROUP, QUEUE, end)

    def judged_below(self) -> int:
        """Return the queue offset below which all halves have ended, were copied, or were discarded."""
        if self._pass is not None:
            return self._pass.queue_offset
        return progress(self._store, self._offsets, HALF_TOPIC)

    def check(self, now_ms: int, config: TransactionConfig | None = None) -> Checked:
        """Make a whole check pass now, independent of `run_due`. Raises the store's errors."""
        self.save()
        result = Checked([], [])
        current = self._begin_pass(now_ms, config or self._config, result)
        try:
            while not current.check_halves(now_ms, self._config.most_at_once):
                pass
        finally:
            self.save()
        return result

    def run_due(self, now_ms: int) -> int | None:
        """Make the due check pass or a part of it; see `librmq.txn.Transactions.run_due`."""
        if now_ms < self._last_ms:  # the clock was set back
            self._begin_ms = min(self._begin_ms, now_ms + self._interval_ms)
            self._next_ms = None
            self._saver.put_back(now_ms)
        self._last_ms = now_ms
        try:
            if self._pass is None and self._next_ms is not None and now_ms >= self._next_ms:
                self._next_ms = None
                if self._has_new():
                    self._begin_pass(now_ms, self._config)
            if self._pass is not None and not self._is_over:
                if not self._pass.check_halves(now_ms, self._config.most_at_once):
                    return now_ms
                self._end_pass()
                self._states.works(*_CHECK)
        except LASTING:
            raise
        except RmqError as error:
            self._end_pass()
            self._states.failing(*_CHECK, error, logging.ERROR, again_ms=self.next_check_ms(now_ms) - now_ms)
        save_ms = self._saver.run_due(now_ms)
        return self._due() if self._pass is None else save_ms

    def _due(self) -> int | None:
        if not self._has_new():
            self._next_ms = None
        elif self._next_ms is None:
            self._next_ms = self.next_check_ms(self._last_ms)
        return self._next_ms

    def _begin_pass(self, now_ms: int, config: TransactionConfig, result: Checked | None = None) -> CheckPass:
        self._pass = CheckPass(self._store, self._offsets, now_ms, config, self._hooks, self._uncounted, result)
        return self._pass

    def next_check_ms(self, now_ms: int) -> int:
        """Return the time of the first check pass after ``now_ms``."""
        return max(self._begin_ms, now_ms + self._interval_ms - (now_ms - self._begin_ms) % self._interval_ms)

    def _has_new(self) -> bool:
        _, end = self._store.queue_range(HALF_TOPIC, QUEUE)  # report the result although the disk is full
        return end > progress(self._store, self._offsets, HALF_TOPIC)

    def not_reached(self, question: CheckBack) -> None:
        """Note that a question reached no producer; see `librmq.txn.Transactions.not_reached`."""
        if self._hooks.is_reachable is not None and len(self._uncounted) < _MAX_UNCOUNTED:
            self._uncounted.add(question.half.queue_offset)

    def save(self) -> None:
        """Save the progress of a running check pass; see `librmq.txn.Transactions.save`."""
        self._end_pass()
        self._saver.save()

    def _end_pass(self) -> None:
        """End the pass; its results are saved later."""
        if self._pass is not None and not self._pass.progress():
            self._pass = None
        self._is_over = self._pass is not None

    def _save_progress(self, current: CheckPass) -> None:
        for topic, queue_offset in current.progress().items():
            self._offsets.set_consumer_offset(topic, CHECK_GROUP, QUEUE, queue_offset)
        below = progress(self._store, self._offsets, HALF_TOPIC)
        self._uncounted.difference_update([offset for offset in self._uncounted if offset < below])
        self._hooks.passed(below)
        self._pass, self._is_over = None, False
