"""Half messages: which have ended, and the check of the others.

An op message records the end of a half: its body is the half's queue offset in decimal digits. 5.x collects the ends of
some seconds in one op message, ``3,4,7,``; it reads a number without a comma too. The check stores its progress in both
queues as group ``CID_RMQ_SYS_TRANS``. `librmq.txn` describes the records. Mirrors the op queue and the ``check`` of
4.9.4's ``TransactionalMessageServiceImpl``, and its ``TransactionalMessageCheckService``.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from librmq.config import TransactionConfig, check_now
from librmq.errors import LASTING, MessageIllegalError, RmqError
from librmq.java.lang import java_int, java_long
from librmq.message import StoredMessage
from librmq.message.properties import PropertyName
from librmq.message.topics import SystemTopic
from librmq.runtime import ProgressSaver, StateLog
from librmq.runtime.event_log import EventLog
from librmq.runtime.runner import Aside
from librmq.store import GetStatus, MessageStore, ReadResult

_log = EventLog("librmq.txn")

CHECK_GROUP: Final = "CID_RMQ_SYS_TRANS"
"""The internal consumer group that has the check's progress."""
QUEUE: Final = 0
"""The only queue of halves, of op messages, and of discarded halves."""
OP_TAG: Final = "d"
"""The tag of every op message."""
HALF_SEPARATOR: Final = ","
"""Stands behind each queue offset in an op message of 5.x."""
_CHECK_TIMES: Final = PropertyName.TRANSACTION_CHECK_TIMES
_PREPARED_AT: Final = PropertyName.TRANSACTION_PREPARED_QUEUE_OFFSET


class TransactionOffsets(Protocol):
    """Store of the check's progress: `librmq.store.BrokerTables`, or the progress of a running broker's groups."""

    def consumer_offset(self, topic: str, group: str, queue_id: int) -> int | None:
        """Return the queue offset of a group's next message, None if never stored."""

    def set_consumer_offset(self, topic: str, group: str, queue_id: int, queue_offset: int) -> None:
        """Store the queue offset of a group's next message."""


def halves_of(op: StoredMessage) -> set[int]:
    """Return the queue offsets of the halves in an op message; −1 for an unreadable one, none without the tag.

    Raises:
        RecordError: Its body does not match its checksum.
    """
    if op.tags != OP_TAG:
        _log.error(
            "the op message at %(physical_offset)d is skipped: expected the tag 'd', found %(tags)r",
            physical_offset=op.physical_offset,
            tags=op.tags,
        )
        return set()
    op._check_body()  # a damaged number would end another half
    numbers = map(java_long, op.stored_body.decode("utf-8", "replace").rstrip(HALF_SEPARATOR).split(HALF_SEPARATOR))
    return {-1 if queue_offset is None else queue_offset for queue_offset in numbers}


def transaction_of(half: StoredMessage) -> tuple[object, ...]:
    """Return what the halves of one transaction share; without a unique id each half is a transaction of its own.

    Time of birth and queue can differ: a producer that got no answer chooses them again.
    """
    if not half.unique_key:
        return (half.physical_offset,)
    # A digest stands in place of the body, because callers keep the result for many halves.
    body = hashlib.blake2b(half.stored_body, digest_size=16).digest()
    return (half.unique_key, body, *map(half.properties.get, (PropertyName.PRODUCER_GROUP, PropertyName.REAL_TOPIC)))


class EndedHalves:
    """The ended halves from the check's progress on: one bit for each, read from the op queue at the first question.

    Not thread-safe. `mark_ended` and `read_new_ops` add later ones.
    """

    def __init__(self, store: MessageStore, offsets: TransactionOffsets) -> None:
        self._store = store
        self._offsets = offsets
        self._first = 0
        """The half of the first bit: a multiple of 8, so that whole bytes can be dropped."""
        self._bits = bytearray()
        self._next_op: int | None = None
        """The first op message that was not read; None until the first question, so that opening a store reads none."""

    def progress(self, topic: str) -> int:
        """Return the check's progress in the queue of a topic; by default the start of the queue."""
        stored = self._offsets.consumer_offset(topic, CHECK_GROUP, QUEUE)
        if stored is not None and stored >= 0:
            return stored
        # Unlike other reads this call writes no waiting queue entries, so it works on a full disk.
        return self._store.queue_range(topic, QUEUE)[0]

    def __contains__(self, queue_offset: int) -> bool:
        """Return whether the half at ``queue_offset`` has ended; False below the progress.

        Raises:
            CorruptionError: The op queue can't be read.
        """
        if self._next_op is None:
            self.read_new_ops()
        return _is_marked(self._bits, queue_offset - self._first)

    def ended_lookup(self) -> Callable[[int], bool]:
        """Return a function, for any thread, that returns whether a half has ended by now."""
        if self._next_op is None:
            self.read_new_ops()
        # A copy is returned, because the owner goes on to set and drop bits while other threads look them up.
        first, bits = self._first, bytes(self._bits)
        return lambda queue_offset: _is_marked(bits, queue_offset - first)

    def mark_ended(self, queue_offset: int, op_offset: int) -> None:
        """Note an op message that was just written for a half."""
        if op_offset == self._next_op:
            self._next_op += 1
            self._mark(queue_offset)
        elif self._next_op is not None:  # Another writer has added op messages before this one.
            self.read_new_ops()

    def drop_below(self, queue_offset: int) -> None:
        """Drop halves that the check has passed."""
        passed_bytes = (queue_offset - self._first) >> 3
        if passed_bytes > 0 and self._next_op is not None:
            del self._bits[:passed_bytes]
            self._first += 8 * passed_bytes

    def read_new_ops(self) -> None:
        """Read the op messages that were not read yet, those of other writers too; `CorruptionError` as for a read."""
        next_op = self._next_op
        if next_op is None:
            self._first = self.progress(SystemTopic.HALF) & ~7
            next_op = self.progress(SystemTopic.OP)
        while True:
            batch = self._store.read(SystemTopic.OP, QUEUE, next_op)
            for op in batch.messages:
                for queue_offset in halves_of(op):
                    self._mark(queue_offset)
            if batch.next_offset == next_op or batch.status is GetStatus.NO_MESSAGE_IN_QUEUE:
                break
            next_op = batch.next_offset
        self._next_op = next_op  # This comes last, so that a read that has failed is repeated as a whole.

    def _mark(self, queue_offset: int) -> None:
        if queue_offset >= self._store.queue_range(SystemTopic.HALF, QUEUE)[1]:
            return  # any client can name a huge number, and a damaged half too; it needs no bits
        at = queue_offset - self._first
        if at < 0:
            return
        if at >> 3 >= len(self._bits):
            self._bits.extend(bytes((at >> 3) + 1 - len(self._bits)))
        self._bits[at >> 3] |= 1 << (at & 7)


def _is_marked(bits: bytes | bytearray, at: int) -> bool:
    return 0 <= at < 8 * len(bits) and bool(bits[at >> 3] & (1 << (at & 7)))


# ---- the check

_LONGEST_PASS_MS: Final = 60_000  # a pass that takes longer ends early, as in 4.9
_OPS_READ: Final = 32
_LOOK_AHEAD: Final = 1000
"""The halves that are examined for a producer that can be asked: this reads each of them, and is done in one turn."""
_RESERVED_HOURS: Final = 72  # This is the limit of 4.9.
_MAX_UNCOUNTED: Final = 1 << 16
"""The copies that are remembered as not counted, so that a producer that stays away costs no more memory than this."""
_STATE: Final = "the check of half messages"


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
        return self.half.properties.get(PropertyName.REAL_TOPIC, "")


class Checked(NamedTuple):
    """Result of one turn of the check, or of a whole pass."""

    questions: list[CheckBack]
    """What producers are to be asked; each answers by `Transactions.commit` or `rollback`."""
    discarded: list[tuple[StoredMessage, int]]
    """The halves that were given up, with their numbers of checks."""


@dataclass(slots=True)
class _Pass:
    """A pass that is under way."""

    start_ms: int
    config: TransactionConfig
    end: int
    """The end of the half queue when the pass began: the copies that it appends are for later passes."""
    reachable_at: int = -1
    """A later half, about which a producer can be asked."""
    has_skipped: bool = False
    """Whether it has gone around a place that can't be read, which it does once."""


class HalfCheck:
    """The check of the halves that have not ended, in passes of one or several turns. Not thread-safe.

    A pass goes from the progress to the end that the half queue had when the pass began. It skips a half that has
    ended. It appends a copy of a half that is due, and asks the producer group about the copy, which is then pending in
    place of the half. A half that was checked too often or is too old goes to the topic of discarded halves. The pass
    ends before a half that is too young to check, so that one queue offset says what is still to be checked.
    """

    def __init__(
        self,
        store: MessageStore,
        offsets: TransactionOffsets,
        ended: EndedHalves,
        config: TransactionConfig,
        *,
        make_topic: Callable[[str], object],
        is_reachable: Callable[[str], bool] | None,
        aside: Aside | None,
        start_ms: int | None,
    ) -> None:
        """The first pass continues from the saved progress; `librmq.txn.Transactions` describes the arguments."""
        self.checked: Checked = Checked([], [])
        """The result of the last turn."""
        self._store = store
        self._offsets = offsets
        self._ended = ended
        self._config = config
        self._make_topic = make_topic
        self._is_reachable = is_reachable
        self._uncounted: set[int] = set()
        """The queue offsets of copies whose last check reached no producer."""
        self._put_back_progress()
        self._next_half = self._ended.progress(SystemTopic.HALF)
        self._next_op = self._ended.progress(SystemTopic.OP)
        self._saved = self._next_half, self._next_op
        self._interval_ms = round(1000 * config.interval_s)
        self._last_ms = store.clock.now_ms() if start_ms is None else start_ms
        self._first_ms = self._last_ms + self._interval_ms
        self._next_ms: int | None = None
        """The time of the next pass; None while nothing is pending."""
        self._pass: _Pass | None = None
        self._states = StateLog(_log, "transactions")
        self._saver = ProgressSaver(
            "the progress of the check of half messages",
            flush=lambda reached: store.flush(),
            reached=self._unsaved,
            note=self._note_saved,
            now_ms=store.clock.now_ms,
            save_every_s=0,
            aside=aside,
        )

    def _put_back_progress(self) -> None:
        """Set a progress beyond the end of its queue to the end, so that the next halves there are checked.

        A power failure can take the last records from the log of a broker of RocketMQ that has saved its progress.
        """
        for topic in (SystemTopic.HALF, SystemTopic.OP):
            _, end = self._store.queue_range(topic, QUEUE)
            stored = self._offsets.consumer_offset(topic, CHECK_GROUP, QUEUE)
            if stored is not None and stored > end:
                self._offsets.set_consumer_offset(topic, CHECK_GROUP, QUEUE, end)

    @property
    def judged_below(self) -> int:
        """The queue offset below which all halves have ended, were copied, or were discarded."""
        return self._next_half

    # ---- passes by time

    def run_due(self, now_ms: int) -> int | None:
        """Make the due pass or a part of it; return the time of the next call (ms), None if nothing is pending.

        What it asks and discards is in ``checked``. Passes come every 60 s from the start on, except those that would
        find nothing new in the half queue. Call this soon after preparing a half.

        Raises:
            StoreClosedError: The store was closed.
            FlushFailedError: A flush has failed; the store must be reopened.
            ReadOnlyError: The store is read-only.
        """
        check_now(now_ms)
        self.checked = Checked([], [])
        if now_ms < self._last_ms:  # The clock was set back, so the times noted before would come too late.
            self._first_ms = min(self._first_ms, now_ms + self._interval_ms)
            self._next_ms = None
            self._saver.put_back(now_ms)
        self._last_ms = now_ms
        try:
            if self._is_due(now_ms):
                self._next_ms = None
                if self._has_new():
                    self._begin_pass(now_ms, self._config)
            if self._pass is not None:
                if not self._check_halves(self._pass, now_ms):
                    return now_ms
                self._pass = None
                self._states.works(_STATE)
        except LASTING:
            raise
        except RmqError as error:
            # The halves that the pass could judge stay judged. The next pass begins at the one that has failed.
            self._pass = None
            self._states.failing(_STATE, error, logging.ERROR, again_ms=self._pass_after(now_ms) - now_ms)
        save_ms = self._saver.run_due(now_ms)
        if self._unsaved() is not None:
            return save_ms
        if not self._has_new():
            self._next_ms = None
        elif self._next_ms is None:
            self._next_ms = self._pass_after(self._last_ms)
        return self._next_ms

    def _is_due(self, now_ms: int) -> bool:
        """Return whether a pass is to begin: it starts from the saved progress, so that has to be the reached one."""
        is_idle = self._pass is None and self._unsaved() is None
        return is_idle and self._next_ms is not None and now_ms >= self._next_ms

    def _pass_after(self, now_ms: int) -> int:
        """Return the time of the first pass after ``now_ms``."""
        return max(self._first_ms, now_ms + self._interval_ms - (now_ms - self._first_ms) % self._interval_ms)

    def run_pass(self, now_ms: int, config: TransactionConfig | None = None) -> Checked:
        """Make a whole pass now, independent of `run_due`, and save its progress. Raises the store's errors."""
        check_now(now_ms)
        self.save()
        self.checked = Checked([], [])
        current = self._begin_pass(now_ms, config or self._config)
        try:
            while not self._check_halves(current, now_ms):
                pass
        finally:
            self.save()
        return self.checked

    def _has_new(self) -> bool:
        # The range is read without writing the queue entries that wait, so this works on a full disk too.
        return self._store.queue_range(SystemTopic.HALF, QUEUE)[1] > self._ended.progress(SystemTopic.HALF)

    def _begin_pass(self, now_ms: int, config: TransactionConfig) -> _Pass:
        self._make_topic(SystemTopic.HALF)
        # The progress is read again, because other processes, and administrators, can set it.
        self._next_half, self._next_op = self._ended.progress(SystemTopic.HALF), self._ended.progress(SystemTopic.OP)
        self._saved = self._next_half, self._next_op
        # The end is read before the op messages, so that each half before it has its end among these.
        queue = self._store.queue(SystemTopic.HALF, QUEUE)
        end = 0 if queue is None else queue.max_offset
        self._ended.read_new_ops()
        self._pass = _Pass(now_ms, config, end)
        return self._pass

    def save(self) -> None:
        """End a running pass and save its progress, after a flush of its records. Raises the errors of the flush."""
        self._pass = None
        self._saver.save()

    def _unsaved(self) -> tuple[int, int] | None:
        """Return the progress in both queues if it is to be saved; a running pass saves none."""
        reached = self._next_half, self._next_op
        return None if self._pass is not None or reached == self._saved else reached

    def _note_saved(self, reached: tuple[int, int]) -> None:
        """Note a progress, now that the copies and discarded halves that it passes over are on the device."""
        for topic, queue_offset, saved in zip((SystemTopic.HALF, SystemTopic.OP), reached, self._saved, strict=True):
            if queue_offset != saved:
                self._offsets.set_consumer_offset(topic, CHECK_GROUP, QUEUE, queue_offset)
        self._saved = reached
        self._uncounted = {queue_offset for queue_offset in self._uncounted if queue_offset >= reached[0]}
        self._ended.drop_below(reached[0])

    # ---- one turn of a pass

    def _check_halves(self, current: _Pass, now_ms: int) -> bool:
        """Check the halves of one turn; return whether the pass is over."""
        is_over = now_ms - current.start_ms > _LONGEST_PASS_MS
        for _ in range(self._config.most_at_once):
            is_over = is_over or self._next_half >= current.end or not self._pass_half(current, now_ms)
            if is_over:
                break
        self._pass_ops()
        return is_over

    def _pass_half(self, current: _Pass, now_ms: int) -> bool:
        """Check the next half unless it has ended, and move on; return False if the pass ends before it."""
        if self._next_half not in self._ended:
            batch = self._store.read(SystemTopic.HALF, QUEUE, self._next_half, 1)
            if not batch.messages:
                if current.has_skipped or not _is_illegal(batch):
                    return False
                current.has_skipped = True
                self._next_half = batch.next_offset
                return True
            if not self._check_half(current, batch.messages[0], now_ms):
                return False
        self._next_half += 1
        return True

    def _pass_ops(self) -> None:
        """Move the progress over the op messages whose halves this pass, or an earlier one, has passed.

        It stops before the first one that a later pass still needs: without its op an ended half would be asked about.
        """
        while True:
            batch = self._store.read(SystemTopic.OP, QUEUE, self._next_op, _OPS_READ)
            for op in batch.messages:
                if max(halves_of(op), default=-1) >= self._next_half:
                    return
                self._next_op = op.queue_offset + 1
            if not batch.messages:
                if batch.next_offset == self._next_op or not _is_illegal(batch):
                    return
                _log.error(
                    "the check found no op message at %(queue_offset)d, and continues at %(next_offset)d",
                    queue_offset=self._next_op,
                    next_offset=batch.next_offset,
                )
                self._next_op = batch.next_offset

    def _check_half(self, current: _Pass, half: StoredMessage, now_ms: int) -> bool:
        """Check a half that has not ended; return False if the pass ends before it."""
        config, properties = current.config, dict(half.properties)
        check_times = self._times_checked(half) + 1
        if check_times > config.check_max:
            return self._discard(half, properties)
        properties[_CHECK_TIMES] = str(check_times)
        age_ms = now_ms - half.born_timestamp_ms
        hours = self._store.config.file_reserved_hours if config.reserved_hours is None else config.reserved_hours
        # A store that keeps messages of any age sets no limit, so that of 4.9 counts.
        if age_ms > (_RESERVED_HOURS if hours is None else hours) * 3_600_000:
            return self._discard(half, properties)
        if half.store_timestamp_ms >= current.start_ms:
            return False  # Its producer has just sent it, whatever time of birth the producer's clock gave it.
        immunity = properties.get(PropertyName.CHECK_IMMUNITY_TIME)
        if immunity is None:
            # A half that is born in the future counts as old: it would block the pass until the clock is there.
            if 0 <= age_ms < round(1000 * config.timeout_s):
                return False
        else:
            seconds = java_long(immunity)
            immunity_ms = round(1000 * config.timeout_s) if seconds is None or seconds == -1 else 1000 * seconds
            if age_ms < immunity_ms and self._keep_immune(half, properties):
                return True
        return self._ask_about(current, half, properties, check_times, now_ms)

    def _times_checked(self, half: StoredMessage) -> int:
        """Return how often a half was checked, without checks that reached no producer."""
        checked = half.properties.get(_CHECK_TIMES)
        if checked is None:
            return 0
        parsed = java_int(checked)
        times = -1 if parsed is None else parsed
        return times - (half.queue_offset in self._uncounted)

    def _keep_immune(self, half: StoredMessage, properties: dict[str, str]) -> bool:
        """Append a copy of a half that is still immune, unless it has ended; return False if that fails."""
        first = properties.get(_PREPARED_AT)
        if first is not None:
            queue_offset = java_long(first)
            if queue_offset is None or queue_offset == -1:
                return False
            if queue_offset in self._ended:
                return True
        properties[PropertyName.WAIT] = "false"  # No producer waits for a copy, so none has to wait for the device.
        properties.setdefault(_PREPARED_AT, str(half.queue_offset))
        self._append_copy(half, properties)
        return True

    def _ask_about(
        self, current: _Pass, half: StoredMessage, properties: dict[str, str], check_times: int, now_ms: int
    ) -> bool:
        """Append a copy of a half and ask about it; return False if no producer can be asked, which ends the pass."""
        group = properties.get(PropertyName.PRODUCER_GROUP, "")
        if self._is_reachable is not None and not self._is_reachable(group):
            if not self._has_reachable_ahead(current, now_ms, self._is_reachable):
                return False  # Otherwise each pass would copy all halves of a producer that stays away.
            # The copy lets the pass go on to the others. It has the half's count, because no check has happened.
            properties[_CHECK_TIMES] = str(check_times - 1)
            self._append_copy(half, properties)
            return True
        copy = self._append_copy(half, properties)
        if copy is not None:
            self.checked.questions.append(CheckBack(group, copy, check_times))
        return True

    def _has_reachable_ahead(self, current: _Pass, now_ms: int, is_reachable: Callable[[str], bool]) -> bool:
        """Return whether a producer can be asked about a due half later in this pass.

        It examines `_LOOK_AHEAD` halves, and returns True if there are more.
        """
        timeout_ms = round(1000 * current.config.timeout_s)
        for queue_offset in range(max(current.reachable_at, self._next_half + 1), current.end):
            if queue_offset > self._next_half + _LOOK_AHEAD:
                return True
            if queue_offset in self._ended:
                continue
            batch = self._store.read(SystemTopic.HALF, QUEUE, queue_offset, 1)
            if not batch.messages or 0 <= now_ms - batch.messages[0].born_timestamp_ms < timeout_ms:
                return False
            if is_reachable(batch.messages[0].properties.get(PropertyName.PRODUCER_GROUP, "")):
                current.reachable_at = queue_offset
                return True
        return False

    def note_unreached(self, question: CheckBack) -> None:
        """Note that a question reached no producer. Such a check does not count, unless all do as in 4.9.

        This is kept in memory: after a restart the check counts.
        """
        if self._is_reachable is not None and len(self._uncounted) < _MAX_UNCOUNTED:
            self._uncounted.add(question.half.queue_offset)

    def _append_copy(self, half: StoredMessage, properties: dict[str, str]) -> StoredMessage | None:
        """Append a copy of a half with these properties; None if the half had to be given up."""
        try:
            result = self._store.copies.append_again(
                half, SystemTopic.HALF, half.queue_id, properties, flag=0, reconsume_times=0
            )
        except MessageIllegalError as error:  # The copy has no room for its properties.
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
            target_topic=properties.get(PropertyName.REAL_TOPIC),
            checks=check_times,
            topic=SystemTopic.HALF,
            queue_id=half.queue_id,
        )
        self._make_topic(SystemTopic.CHECK_MAX_TIME)
        try:
            self._store.copies.append_again(half, SystemTopic.CHECK_MAX_TIME, QUEUE, properties)
        except MessageIllegalError as error:  # The half itself stays in the log, but no check asks about it again.
            _log.error(
                "the half message at physical offset %(physical_offset)d can't be discarded: %(error)s",
                physical_offset=half.physical_offset,
                error=error,
            )
        self.checked.discarded.append((half, check_times))
        return True


def _is_illegal(result: ReadResult) -> bool:
    """Return whether a read found nothing although the queue has more entries."""
    return not result.messages and result.status not in (GetStatus.NO_MESSAGE_IN_QUEUE, GetStatus.OFFSET_OVERFLOW_ONE)
