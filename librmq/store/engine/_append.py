"""Appending: records are made of messages and written to the log; their entries and keys are derived from it later.

Mirrors 4.9.4's ``CommitLog.asyncPutMessage`` and ``asyncPutMessages``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate, chain, repeat
from threading import get_ident
from typing import TYPE_CHECKING, Final, TypeVar

from librmq.clock import Clock, ManualClock, SystemClock
from librmq.commitlog import CommitLog
from librmq.config import StoreConfig, wrong_kind
from librmq.errors import MessageIllegalError, StoreIOError
from librmq.files.interface import is_full
from librmq.message import DelayLevels, Message
from librmq.message import record as record_format
from librmq.message.delays import parse_level, queue_id_of_level
from librmq.message.ids import Host, encode_host, parse_host
from librmq.message.message import BATCH_FIXED_SIZE, check_batch
from librmq.message.properties import checked_encoding, encode_properties
from librmq.message.topics import SystemTopic, validate_topic
from librmq.override import override
from librmq.runtime import critical
from librmq.runtime.compiled_core import CORE, AppendState
from librmq.runtime.event_log import EventLog
from librmq.runtime.locks import Lock
from librmq.store.engine._append_fields import (
    AppendResult,
    UnplacedRecord,
    check_fields,
    check_queue_id,
    checked_host_flags,
    host_bytes,
    place_record,
    prepare_batch,
    prepare_record,
)
from librmq.store.engine._durability import GroupCommit, Housekeeping
from librmq.store.engine.derivation import KeyBlock
from librmq.store.engine.dispatch import Dispatcher, Lane
from librmq.store.engine.store_parts import AppendLock, Parts

if TYPE_CHECKING:
    from librmq.store.engine._shared_appends import SharedAppends

T = TypeVar("T")
_log = EventLog("librmq.store")

_BATCH: Final = Dispatcher.BATCH
_UNQUEUED: Final = record_format.UNQUEUED
_DELAYS_KEPT: Final = 1024
_new_result = tuple.__new__


class Appender(AppendState):
    """The only writer of an open store: its lock, and everything that is written under it. Thread-safe.

    It outlives its parts: `use_parts` gives it those of a recovery. Every append and every other change of the parts
    waits for ``lock``.
    """

    log: CommitLog
    dispatcher: Dispatcher
    lanes: dict[tuple[str, int], Lane]

    def __init__(self, clock: Clock, refusal: Callable[[], Exception], wake: Callable[[], None]) -> None:
        """Take ``refusal()``, which returns why no append is accepted, and ``wake()``, which wakes housekeeping."""
        self.lock: AppendLock = AppendLock(clock)
        self.is_locked: Callable[[], bool] = self.lock.mutex.locked
        self.accepts: bool = False
        """Whether appends are accepted."""
        self.room_until: int = -1
        """While the log ends before this physical offset, a send has room, and need not call `MessageStore.check_room`.

        It is -1 when a send has to look: at a disk that was not seen for a while, or is too full."""
        self.parts: Parts | None = None
        self.shared: SharedAppends | None = None
        """The page through which other processes append too; None for a store that is not shared."""
        self.lanes = {}
        self.now_ms: Callable[[], int] = clock.now_ms
        if CORE.module is not None:  # without it, Python finds each of fewer attributes faster
            # The compiled append makes results and reads these two clocks itself.
            self.system_now_ms: Callable[[], int] | None = self.now_ms if type(clock) is SystemClock else None
            self.manual_now_ms: Callable[[], int] | None = self.now_ms if type(clock) is ManualClock else None
            self.message_class: type[Message] = Message
            self.result_class: type[AppendResult] = AppendResult
            self.batch_fixed_size: int = BATCH_FIXED_SIZE
            self.host_bytes = host_bytes
        self.refusal = refusal
        self._wake = wake
        self._watchers: list[Callable[[], None]] = []
        self._watching = Lock()

    def refuse(self) -> None:
        """Accept no more appends."""
        self.accepts = False
        self.look_for_room()

    def look_for_room(self) -> None:
        """Let the next send look whether there is room for it, also that of another process."""
        self.room_until = -1
        if self.shared is not None:
            self.shared.refuse()

    def after_fork(self) -> None:
        """Leave the store to the parent, in a child process after a fork."""
        if self.shared is not None:
            self.shared.after_fork()
        self.parts, self.accepts, self.shared = None, False, None
        self._watchers, self._watching = [], Lock()
        self.lock.make_locks()
        self.is_locked = self.lock.mutex.locked

    def configure(self, config: StoreConfig, levels: DelayLevels) -> None:
        """Use these settings from now on."""
        self._levels = levels
        self._delays: dict[str, tuple[int, str]] = {}  # the results of `_delay`
        self._host = encode_host(parse_host(config.store_host))
        # The born host of the last append and its bytes, because a producer gives each message the same object.
        self._last_host: tuple[Host | bytes, bytes] = self._host, self._host
        self._max_body_size = config.max_message_size
        self._compress_from = config.compress_from or sys.maxsize
        self.is_sync: bool = config.durability == "sync"
        # An entry's unit has the bits of the filters that are registered as the message is stored.
        self._has_units = config.enable_consumequeue_ext

    def use_parts(self, parts: Parts, commit: GroupCommit, housekeeping: Housekeeping) -> None:
        """Write to these parts from now on."""
        # Callers keep lanes between appends, so the lanes stay and get the queues of the new parts.
        for name, lane in self.lanes.items():
            lane.queue = parts.queue(*name)
            lane.next_queue_offset = lane.queue.max_offset
            parts.lanes[name] = lane
        self.parts = parts
        self.log, self.dispatcher, self.lanes = parts.log, parts.dispatcher, parts.lanes
        self._commit, self._housekeeping = commit, housekeeping
        if self._watchers:
            housekeeping.watch_from(0)

    @override
    def __reduce__(self) -> str:
        raise TypeError("a store and its methods can't be pickled, because one process owns a store; open it there")

    def open_parts(self) -> Parts:
        """Return the parts, or raise why there are none."""
        if self.parts is None:
            raise self.refusal()
        return self.parts

    def append_methods(self) -> tuple[Callable[..., AppendResult], Callable[..., list[AppendResult]]]:
        """Return the methods that append a message and a batch: the compiled core's, or those of this class."""
        return getattr(self, "append_usual", self.append), getattr(self, "append_batch_usual", self.append_batch)

    def begin_turn(self) -> None:
        """Keep other processes from appending, in each block that writes to the log under ``lock``."""
        if self.shared is not None:
            self.shared.begin_turn()

    def end_turn(self) -> None:
        """Let other processes append, at the end of each such block."""
        if self.shared is not None:
            self.shared.end_turn()

    def follow(self) -> None:
        """Take note of what other processes have appended."""
        if self.shared is not None:
            self.shared.follow()

    # -------------------------------------------------------------------------------------------------------- append

    def append(  # noqa: PLR0913 (the hot path; a keyword for each field of a record)
        self,
        message: Message,
        queue_id: int = 0,
        born_timestamp_ms: int | None = None,
        born_host: Host | bytes | None = None,
        store_host: Host | bytes | None = None,
        sys_flag: int = 0,
        reconsume_times: int = 0,
        prepared_transaction_offset: int = 0,
        properties_raw: bytes | None = None,
        wait: bool = True,
        is_copy: bool = False,
    ) -> AppendResult:
        """See `MessageStore.append`.

        Its fields are not keyword-only, because filling in such defaults takes 3 % of an append.
        """
        try:
            topic, body, delays = message.topic, message.body, message._delays
        except AttributeError:
            raise wrong_kind("message", message, "a Message") from None
        if delays is not None:
            raise MessageIllegalError("delay, deliver_at: a broker resolves them; a store takes a delay_level")
        try:
            properties: Mapping[str, str] = message.properties
            if properties_raw is None:
                if "DELAY" in properties and not sys_flag & _UNQUEUED:
                    text = properties["DELAY"]
                    level, name = self._delays.get(text) or self._delay(text)
                    if level > 0:
                        properties = {**properties, "DELAY": name, "REAL_TOPIC": topic, "REAL_QID": str(queue_id)}
                        topic, queue_id = SystemTopic.SCHEDULE, queue_id_of_level(level)
                raw = encode_properties(properties)
            else:
                raw = properties_raw
                checked_encoding(raw, properties)
            lane = self.lanes.get((topic, queue_id)) or self.lane(topic, queue_id)
            stored_at = born_at = self._host
            if store_host is not None:
                stored_at = host_bytes(store_host)
            if born_host is not None:
                last_host, born_at = self._last_host
                if born_host is not last_host:
                    born_at = host_bytes(born_host)
                    self._last_host = born_host, born_at
            record = prepare_record(
                body, lane.topic_field, raw, queue_id, message.flag, sys_flag, born_timestamp_ms, born_at, stored_at,
                reconsume_times, prepared_transaction_offset, self._compress_from,
                sys.maxsize if is_copy else self._max_body_size,
            )  # fmt: skip
            return self._append_record(lane, record, wait)
        except TypeError:
            check_fields(queue_id, sys_flag)
            raise

    def _append_record(self, lane: Lane, record: UnplacedRecord, wait: bool) -> AppendResult:
        """Write a record, count it in its queue, and wait for the device if the caller wants that."""
        size, is_queued, lock = record[0], not record[1] & _UNQUEUED, self.lock
        mutex = lock.mutex
        # Pause outside of a lock that others want: threads that change places at each message take much longer.
        if lock.crowd or mutex.locked():
            lock.yield_to_waiters()
        thread = get_ident()
        with mutex:
            try:
                # A signal's handler that calls the store in this thread finds its own id, and is refused instead of
                # waiting for itself.
                lock.owner = thread
                if not self.accepts:
                    raise self.refusal()
                if self.shared is not None:
                    self.shared.begin_turn()
                # Read log and dispatcher only under the lock, because the repair of an interrupted append replaces
                # both.
                log, dispatcher = self.log, self.dispatcher
                if dispatcher.due >= _BATCH or dispatcher.writing_at >= 0:
                    lock.count_turn()
                    # Before a place is claimed: a full disk can refuse the entries of earlier messages, and then
                    # nothing of this one may have been written.
                    self.catch_up()
                now = self.now_ms()
                physical_offset = log.end
                has_room = physical_offset + size <= log.sure
                if not has_room:
                    physical_offset = log.claim(size)
                queue_offset = lane.next_queue_offset if is_queued else 0
                data = place_record(record, queue_offset, physical_offset, now)
                if not has_room:
                    self._make_room(size)
                # The mark comes before the first byte and goes after the queue's count. What a signal's handler
                # interrupts in between, the next append repairs from the log.
                dispatcher.writing_at = physical_offset
                log.copy_in(data, size)
                if is_queued:
                    lane.next_queue_offset = queue_offset + 1
                    if self.shared is not None and self.shared.is_open:
                        self.shared.moved.append(lane)
                dispatcher.due += 1
                dispatcher.writing_at = -1
            finally:
                try:
                    if self.shared is not None:
                        self.shared.end_turn()
                finally:
                    lock.owner = 0
        if self._has_units:
            self.write_due()
        # Wait for the flush without the lock, so that messages appended meanwhile share it.
        end = physical_offset + size
        if self.is_sync or end >= self._housekeeping.alarm:
            self._acknowledge(end, wait)
        return _new_result(AppendResult, (physical_offset, size, queue_offset, now, record[2]))

    def append_batch(  # noqa: PLR0913 (a keyword for each field of a record)
        self,
        messages: Sequence[Message],
        queue_id: int = 0,
        *,
        properties: Mapping[str, str] | None = None,
        born_timestamp_ms: int | None = None,
        born_host: Host | None = None,
        store_host: Host | None = None,
        sys_flag: int = 0,
        reconsume_times: int = 0,
        wait: bool = True,
    ) -> list[AppendResult]:
        """See `MessageStore.append_batch`."""
        try:
            check_batch(messages)
        except (AttributeError, TypeError):
            raise wrong_kind("messages", messages, "a list of Message") from None
        check_fields(queue_id, sys_flag)
        if properties is not None and not isinstance(properties, Mapping):
            raise wrong_kind("properties", properties, "a mapping of names to texts")
        if sys_flag & record_format.TRANSACTION_MASK:
            raise MessageIllegalError("a batch can't be part of a transaction")
        stored_at = self._host if store_host is None else host_bytes(store_host)
        born_at = self._host if born_host is None else host_bytes(born_host)
        sys_flag |= checked_host_flags(sys_flag, born_at, stored_at)
        lane = self.lanes.get((messages[0].topic, queue_id)) or self.lane(messages[0].topic, queue_id)
        sizes, records, tails = prepare_batch(
            messages, lane.topic_field, properties, queue_id, sys_flag, born_timestamp_ms, born_at, stored_at,
            reconsume_times, self._max_body_size,
        )  # fmt: skip
        if self.lock.mutex.locked():
            self.lock.yield_to_waiters()
        thread = get_ident()
        with self.lock.mutex:
            try:
                self.lock.owner = thread
                now = self.admit()
                places = list(accumulate(sizes, initial=self.log.claim(sum(sizes))))
                end = places.pop()
                queue_offsets = range(lane.next_queue_offset, lane.next_queue_offset + len(messages))
                headers = map(place_record, records, queue_offsets, places, repeat(now))
                data = b"".join(chain.from_iterable(zip(headers, *tails, strict=False)))
                self.write(data, len(messages), {lane: len(messages)})
            finally:
                try:
                    self.end_turn()
                finally:
                    self.lock.owner = 0
        self.finish_append(end, wait)
        results = zip(places, sizes, queue_offsets, repeat(now), repeat(stored_at), strict=False)
        return list(map(_new_result, repeat(AppendResult), results))

    def write(self, data: bytes, count: int, queued: Mapping[Lane, int]) -> None:
        """Write ``count`` records side by side, and count those in queues; `append` does the same for one."""
        log, dispatcher = self.log, self.dispatcher
        size = len(data)
        if log.end + size > log.sure:
            self._make_room(size)
        dispatcher.writing_at = log.end
        log.copy_many_in(data, size)
        for lane, in_queue in queued.items():
            lane.next_queue_offset += in_queue
        if self.shared is not None and self.shared.is_open:
            self.shared.moved += queued
        dispatcher.due += count
        dispatcher.writing_at = -1

    def _make_room(self, size: int) -> None:
        """Make room for records at the place that they claimed, under the lock."""
        # A new file does not take what the entries of earlier records need: on a full disk all of them can be read.
        if self.dispatcher.due and self.log.end + size > self.log.fits:
            self.lock.count_turn()
            self.open_parts().drain()
        with critical:
            self.log.make_room(size)

    def admit(self) -> int:
        """Return the store time for records to be written now, under the lock; a single append has this inline.

        The error says why no append is accepted, or is that of writing due entries.
        """
        if not self.accepts:
            raise self.refusal()
        self.begin_turn()
        if self.dispatcher.due >= _BATCH or self.dispatcher.writing_at >= 0:
            self.catch_up()
        return self.now_ms()

    def _acknowledge(self, end: int, wait: bool) -> None:
        """Wait for the device if the caller wants that; otherwise, and at the alarm, wake the thread that flushes."""
        wait = wait and self.is_sync
        if not wait or end >= self._housekeeping.alarm:
            self._wake()
        if end >= self._housekeeping.watched:
            self._notify_watchers()
        if wait:
            self._commit.reach(end)

    @property
    def flushed(self) -> int:
        """Physical offset below which everything is on the device."""
        return self._commit.flushed

    def finish_append(self, end: int, wait: bool = True) -> None:
        """Do for records up to ``end`` what `append` does inline: wait for the device, wake threads."""
        if self.dispatcher.due >= _BATCH or self._has_units:
            self.write_due()
        if self.is_sync or end >= self._housekeeping.alarm:
            self._acknowledge(end, wait)

    def watch_log(self, physical_offset: int, appended: Callable[[], None]) -> None:
        """Call ``appended()`` once when the log ends after ``physical_offset``, in the thread of an append."""
        with self._watching:
            self._watchers.append(appended)
            self._housekeeping.watch_from(physical_offset)
        if self.log.end > physical_offset:
            self._notify_watchers()

    def _notify_watchers(self) -> None:
        with self._watching:
            watchers, self._watchers = self._watchers, []
            self._housekeeping.watched = sys.maxsize
        for appended in watchers:
            appended()

    def lane(self, topic: str, queue_id: int) -> Lane:
        """Return the lane of a queue, which its first append makes.

        Raises:
            MessageIllegalError: No queue can have this topic or queue id.
        """
        validate_topic(topic)
        check_queue_id(queue_id)
        self.lock.check_reentry()
        with critical, self.lock.mutex:
            if not self.accepts:
                raise self.refusal()
            return self.open_parts().lane(topic, queue_id)

    def _delay(self, text: str) -> tuple[int, str]:
        """Return the delay level that a text stands for, and its name."""
        level = self._levels.cap(parse_level(text))
        delay = level, str(level)
        if len(self._delays) < _DELAYS_KEPT:
            self._delays[text] = delay
        return delay

    # ------------------------------------------------------------------------------------------------ derived from it

    def repair(self) -> Parts:
        """Repair what an interrupted append left, under the lock, before derived data are used; return the parts."""
        parts = self.open_parts()
        if self.dispatcher.writing_at >= 0:
            has_begun = self.shared is not None and self.shared.take_turn()
            try:
                with critical:
                    parts.derive_again()
            finally:
                if has_begun:
                    self.end_turn()
        return parts

    def catch_up(self) -> None:
        """Write all queue entries and keys that are due, under the lock; raise why there are no parts."""
        self.repair().drain()

    def under_lock(self, act: Callable[[], T]) -> T:
        """Return what ``act()`` does under the lock, where signal handlers can run."""
        self.lock.check_reentry()
        thread = get_ident()
        with self.lock.mutex:
            try:
                self.lock.owner = thread
                return act()
            finally:
                self.lock.owner = 0

    def advance(self) -> None:
        """Write the entries and keys that are due, before a compiled append."""
        if self.lock.mutex.locked():
            self.lock.yield_to_waiters()
        self.under_lock(lambda: self.catch_up() if self.accepts else None)

    def drain(self) -> None:
        """Write the entries and keys that are due, for readers of queues and index."""
        self.follow()
        if self.dispatcher.due or self.dispatcher.writing_at >= 0:
            self.under_lock(self.catch_up)

    def make_room(self, size: int) -> None:
        """Make room for a compiled batch at the log's end, under the lock, if its file has some."""
        log = self.log
        if log.end + size <= log.fits:
            with critical, suppress(StoreIOError):  # the append that finds no room raises it
                log.make_room(size)

    def write_due(self) -> None:
        """Dispatch records that are stored, so that an error is no reason to send them again: a later call goes on."""
        try:
            self.under_lock(lambda: self.repair().follow())
        except StoreIOError as error:
            _log.warning("queue entries of stored messages wait: %(error)s", error=error)

    def write_entries(self) -> None:
        """Write the entries that are due, for readers of queues, as far as the disk has room."""
        dispatcher = self.dispatcher
        # Each read of a queue calls this.
        if dispatcher.followed < self.log.end or dispatcher.writing_at >= 0 or self.shared is not None:
            with _as_far_as_it_fits():
                if self.shared is not None:
                    self.shared.follow()
                if dispatcher.followed < self.log.end or dispatcher.writing_at >= 0:
                    self.under_lock(lambda: self.repair().follow())

    def drain_what_fits(self) -> Sequence[KeyBlock]:
        """Write the entries and keys that are due, as far as the disk has room; return the keys of other records."""
        with _as_far_as_it_fits():
            self.drain()
            return ()
        self.lock.check_reentry()
        with critical, self.lock.mutex:
            return self.open_parts().unindexed()

    def end_between_appends(self) -> int:
        """Return the log's end when no append is running."""
        self.follow()
        self.lock.check_reentry()
        with critical, self.lock.mutex:
            self.repair()
            return self.log.end


@contextmanager
def _as_far_as_it_fits() -> Iterator[None]:
    """End the block at a full disk: a reader needs no room, and the next append raises the error again."""
    try:
        yield
    except StoreIOError as error:
        if not is_full(error):
            raise
