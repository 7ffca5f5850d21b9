"""Check of half messages that have not ended: ask about them, append copies, give them up.

A pass goes from the progress to the end of the half queue at its start. It skips a half with an op message. It appends
a copy of a half that is due, and asks the producer group about the copy. A half that was checked too often or is too
old goes to the topic of discarded halves. The pass ends before a half that is too young to check.
Mirrors the ``check`` of 4.9.4's ``TransactionalMessageServiceImpl``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from librmq.errors import MessageIllegalError
from librmq.java.numbers import java_int, java_long
from librmq.message import record
from librmq.message.message import StoredMessage
from librmq.message.topics import CHECK_MAX_TIME_TOPIC, HALF_TOPIC, OP_TOPIC
from librmq.runtime.event_log import EventLog
from librmq.scheduling.half_messages import CHECK_GROUP, QUEUE, TransactionOffsets, half_of, progress
from librmq.store import MessageStore
from librmq.store.engine.read import GetStatus, ReadResult

_log = EventLog("librmq.txn")

_OPS_READ: Final = 32
_LOOK_AHEAD: Final = 1000
_CHECK_TIMES: Final = record.PROPERTY_TRANSACTION_CHECK_TIMES
_PREPARED_AT: Final = record.PROPERTY_TRANSACTION_PREPARED_QUEUE_OFFSET


class CheckPass:
    """One check pass, from the progress to the end of the half queue at the start.

    ``queue_offset`` is the offset of the next half. Not thread-safe.
    """

    def __init__(  # noqa: PLR0913 (each is a collaborator or a limit of its own)
        self,
        store: MessageStore,
        offsets: TransactionOffsets,
        start_ms: int,
        *,
        timeout_ms: int,
        longest_ms: int,
        check_max: int,
        reserved_ms: int,
        has_ended: Callable[[int], bool],
        ask: Callable[[StoredMessage, int], None],
        discarded: Callable[[StoredMessage, int], None],
        make_topic: Callable[[str], None],
        is_reachable: Callable[[str], bool] | None = None,
        uncounted: set[int] | None = None,
    ) -> None:
        """Begin a pass, with the limits of `librmq.txn.TransactionConfig`.

        Args:
            store: Open for writing.
            offsets: Keeps the progress.
            start_ms: Start of the pass.
            timeout_ms: Age of a half at its first check, unless it has an immunity of its own.
            longest_ms: A pass that takes longer ends early.
            check_max: A half is discarded after this many checks.
            reserved_ms: A half is discarded at this age.
            has_ended: ``has_ended(queue_offset)`` returns whether a half ended during the pass.
            ask: ``ask(copy, check_times)`` is called for each appended copy.
            discarded: ``discarded(half, check_times)`` is called for each discarded half.
            make_topic: ``make_topic(topic)`` is called before a topic is needed.
            is_reachable: ``is_reachable(group)`` returns whether a producer of the group can be asked. A check that
                reaches none does not count; with None each check counts, as in 4.9.
            uncounted: Queue offsets of copies whose last check reached no producer.
        """
        self._is_reachable = is_reachable
        self._uncounted = set() if uncounted is None else uncounted
        self._reachable_at = -1
        self._store = store
        self._offsets = offsets
        self._start_ms = start_ms
        self._timeout_ms = timeout_ms
        self._longest_ms = longest_ms
        self._check_max = check_max
        self._reserved_ms = reserved_ms
        self._has_ended = has_ended
        self._ask = ask
        self._discarded = discarded
        self._make_topic = make_topic
        self._begin = self.queue_offset = progress(store, offsets, HALF_TOPIC)
        queue = store.queue(HALF_TOPIC, QUEUE)
        self._end = 0 if queue is None else queue.max_offset  # its own copies wait for the next pass
        self._op_begin = self._op_end = self._next_op = progress(store, offsets, OP_TOPIC)
        self._op_by_half: dict[int, int] = {}  # op messages by half that were read and not used yet
        self._used_ops: set[int] = set()  # used op messages from `_op_end` on
        self._last_born_ms: int | None = None  # of the last op message in the last batch; None for an empty batch
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
            op = self._op_by_half.pop(self.queue_offset, None)
            if op is not None:
                self._mark_used(op)
            else:
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
        immunity = properties.get(record.PROPERTY_CHECK_IMMUNITY_TIME)
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
            op = self._op_by_half.pop(self.queue_offset, None)
            if op is not None:
                self._mark_used(op)
                return True
            if previous_born_ms is None and self._last_born_ms is None:
                break  # no op message yet: 4.9 would read again until the pass times out
        if self._has_ended(half.queue_offset):  # during the pass
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
        group = properties.get(record.PROPERTY_PRODUCER_GROUP, "")
        if self._is_reachable is not None and not self._is_reachable(group):
            if not self._has_reachable_ahead(now_ms):
                return False  # nothing is written for halves that all wait for a producer
            properties[_CHECK_TIMES] = str(check_times - 1)
            self._append_copy(half, properties)
            return True
        copy = self._append_copy(half, properties)
        if copy is not None:
            self._ask(copy, check_times)
        return True

    def _has_reachable_ahead(self, now_ms: int) -> bool:
        """Return whether a producer can be asked about a due half later in this pass.

        It examines `_LOOK_AHEAD` halves, and returns True if there are more.
        """
        assert self._is_reachable is not None
        for queue_offset in range(max(self._reachable_at, self.queue_offset + 1), self._end):
            if queue_offset > self.queue_offset + _LOOK_AHEAD:
                return True
            if queue_offset in self._op_by_half or self._has_ended(queue_offset):
                continue
            batch = self._store.read(HALF_TOPIC, QUEUE, queue_offset, 1)
            if not batch.messages or 0 <= now_ms - batch.messages[0].born_timestamp_ms < self._timeout_ms:
                return False
            if self._is_reachable(batch.messages[0].properties.get(record.PROPERTY_PRODUCER_GROUP, "")):
                self._reachable_at = queue_offset
                return True
        return False

    def _find_op(self) -> None:
        """Read op messages up to the current half's."""
        while self.queue_offset not in self._op_by_half:
            self._read_ops()
            if self._last_born_ms is None:
                return
        self._mark_used(self._op_by_half.pop(self.queue_offset))

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
            op = self._op_by_half.pop(queue_offset, None)
            if op is not None:
                self._mark_used(op)
                return True
        properties[record.PROPERTY_WAIT] = "false"
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
            target_topic=properties.get(record.PROPERTY_REAL_TOPIC),
            checks=check_times,
            topic=HALF_TOPIC,
            queue_id=half.queue_id,
        )
        self._make_topic(CHECK_MAX_TIME_TOPIC)
        try:
            self._store.appender.append_again(half, CHECK_MAX_TIME_TOPIC, QUEUE, properties)
        except MessageIllegalError as error:  # the half itself stays in the log
            _log.error(
                "the half message at physical offset %(physical_offset)d can't be discarded: %(error)s",
                physical_offset=half.physical_offset,
                error=error,
            )
        self._discarded(half, check_times)
        return True

    def _read_ops(self) -> None:
        """Read the next op messages."""
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
            half = half_of(op)
            if half is None or half < self._begin:
                self._mark_used(op.queue_offset)
            else:
                self._op_by_half[half] = op.queue_offset
        if batch.status is not GetStatus.NO_MESSAGE_IN_QUEUE:
            self._next_op = batch.next_offset

    def _mark_used(self, op_offset: int) -> None:
        self._used_ops.add(op_offset)
        while self._op_end in self._used_ops:
            self._used_ops.discard(self._op_end)
            self._op_end += 1


def _is_illegal(result: ReadResult) -> bool:
    """Return whether a read found nothing although the queue has more entries."""
    return not result.messages and result.status not in (GetStatus.NO_MESSAGE_IN_QUEUE, GetStatus.OFFSET_OVERFLOW_ONE)
