"""Appends of the owner of a shared store beside those of its peers, and the thread that follows theirs.

The owner has its turn within an append, under the append lock: it takes the lock of the page, adopts what peers have
written, writes, and shows them where the log ends. The log asks for the turn, because it has no room outside of one.
An append of the core leaves it to others to derive what it has adopted.

A reader follows too, whatever locks its caller holds. So it only adopts the records, and rings: the thread alone tells
those who wait for messages, because that takes the lock of the runner.
"""

from __future__ import annotations

import os
import select
import socket
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from threading import Thread, get_ident
from typing import Any, Final

from librmq.errors import BrokerUnreachableError, RecordError, RmqError, StoreError, StoreIOError
from librmq.java.lang import java_decode
from librmq.message import record
from librmq.runtime import StateLog, critical
from librmq.runtime.compiled_core import TurnState
from librmq.runtime.event_log import EventLog
from librmq.store.engine import _append_page as page_format
from librmq.store.engine._append import Appender
from librmq.store.engine._append_page import IS_ORDERED, AppendPage
from librmq.store.engine.dispatch import Lane

_log = EventLog("librmq.store")

PeersRecords = Mapping[tuple[str, int], tuple[int, int]]
"""What peers have appended: the number of messages of each queue, and the bytes of their records."""

_NAP_S: Final = 0.0002
"""Pause between two looks at what peers append."""
_LONG_NAPS_S: Final = (64 << 10, 0.008), (8 << 10, 0.002)
"""The same where they have appended so many bytes since the last look: the next one finds enough for a block."""
_AHEAD: Final = 1 << 20
"""Bytes that peers can write without a send by this process."""
_QUIET_S: Final = 1.0
"""After this time without an append of a peer the owner appends alone again."""
_SOON_S: Final = 0.1
"""The same for an owner that has had `_MANY` turns in this time: each costs as much as an append."""
_MANY: Final = 1000


class SharedAppends(TurnState):
    """The page of a store that this process owns. Thread-safe.

    While no peer appends, the store is written as one that is not shared.
    """

    SETTINGS: Final = ("commitlog_file_size", "compress_from", "durability", "max_message_size", "store_host")
    """Settings of the store that a peer needs."""

    def __init__(
        self,
        appender: Appender,
        path: str,
        settings: Mapping[str, Any],
        check_room: Callable[[], object],
        arrived: Callable[[PeersRecords], object],
        wait_s: float,
        is_hurried: Callable[[], bool],
    ) -> None:
        """Make the page at ``path``, and call ``arrived(records)`` for what peers have appended.

        ``check_room()`` raises if the store has no room for messages. ``settings["bell"]`` is the path of a new socket,
        by which peers wake the thread that follows them. ``wait_s`` is the time for another process to end its append;
        where ``is_hurried()``, other threads wait for the caller, which waits a moment only.
        """
        self._appender, self._check_room, self._arrived = appender, check_room, arrived
        self.wait_s: float = wait_s
        self._is_hurried = is_hurried
        self._lock = appender.lock
        self._own_bell, self._ring = socket.socketpair()
        self._bell = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        for bell in (self._bell, self._own_bell, self._ring):
            bell.setblocking(False)
        try:
            self._bell.bind(settings["bell"])
            self._page = AppendPage.make(path, settings)
        except BaseException:
            self._close_bells()
            raise
        self.offered: dict[str, int] = {}
        """Topics that take messages as they come, and their numbers of queues."""
        self._numbers: dict[Lane, int] = {}
        self.moved: list[Lane] = []
        """Queues to which this process has appended in its turn."""
        self._untold: list[tuple[int, int]] = []
        """Begins and ends of what peers have written to the log and the broker does not know of yet."""
        self.adopted_end: int = -1
        """Where the log ended when this process last adopted what peers had written. Changes in a turn only."""
        self._sure = -1
        self._has_turn = self._ends = self._is_closed = self._drops = False
        self.is_open: bool = False
        """Whether peers may append."""
        self._bells = select.poll()  # it takes descriptors of any number, as `select.select` does not
        for bell in (self._bell, self._own_bell):
            self._bells.register(bell, select.POLLIN)
        self._thread = Thread(target=self._follow_peers, name="librmq share follow", daemon=True)
        self._thread.start()

    # ---- the turn of this process, under the append lock

    def begin_turn(self) -> None:
        """Do as `take_turn` where no turn can be running, in a block that calls `end_turn` at its end."""
        if self._has_turn:  # a signal has interrupted its end
            self.end_turn()
        self.take_turn()

    def take_turn(self) -> bool:
        """Take the lock of the page, unless this process has it, follow the peers, and let the log take a record.

        Return whether a turn has begun, which ends by `end_turn`.

        Raises:
            BrokerUnreachableError: Another process does not end its append; the error names it.
        """
        page, log = self._page, self._appender.log
        if self._has_turn or not self.is_open:
            return False
        self._has_turn = True
        try:
            page.take(self.wait_s, is_hurried=self._has_to_hurry)
        except BrokerUnreachableError:
            self._has_turn = False
            raise
        numbers = page.numbers
        if self._drops:
            self._drop()
        if (
            numbers[page_format.WRITING]
            or not self._is_level()
            or numbers[page_format.STATE] == page_format.BROKEN
            or self._appender.dispatcher.writing_at >= 0
        ):
            with critical:
                self._tidy()
        numbers[page_format.WRITING] = page_format.OWNERS
        log.open_to_writes(self._sure)
        return True

    def _has_to_hurry(self) -> bool:
        # The thread of this page comes again soon, and waits with the lock of the writers.
        return self._is_hurried() or get_ident() == self._thread.ident

    def end_turn(self) -> None:
        """Show peers what was written, and leave the lock of the page, if this process has it."""
        if not self._has_turn:
            return
        page, appender = self._page, self._appender
        try:
            if page.holds and page.numbers[page_format.WRITING] == page_format.OWNERS:
                if appender.dispatcher.writing_at >= 0:  # a signal has interrupted the append
                    with critical:
                        self._repair()
                else:
                    self._sure = appender.log.close_to_writes()
                    self._show()
                page.numbers[page_format.WRITING] = 0
        finally:
            page.release()
            self._has_turn = False

    def _tidy(self) -> None:
        """Complete or undo what a writer has left, and follow the peers; in a turn and a critical block."""
        page, appender = self._page, self._appender
        numbers = page.numbers
        # A signal has interrupted the end of a turn, and a peer may have found that.
        if numbers[page_format.WRITING] == page_format.OWNERS or numbers[page_format.STATE] == page_format.BROKEN:
            self._repair()
            numbers[page_format.STATE] = page_format.OPEN
        elif numbers[page_format.WRITING]:
            end = appender.log.end  # records before the tail may wait to be adopted
            page.end_write(appender.log)
            appender.log.close_to_writes()
            appender.log.end = end
        numbers[page_format.WRITING] = 0
        self._adopt()

    def _repair(self) -> None:
        """Repair what a signal has interrupted, and show all of it; a repair can replace a file of the log."""
        self._appender.repair()
        self._sure = self._appender.log.close_to_writes()
        self._offer_all()

    def _adopt(self) -> None:
        """Take what peers have written into the log, and derive it, in a critical block.

        Raises:
            CorruptionError: The bytes are not records that continue their queues.
        """
        parts, tail = self._appender.open_parts(), self._page.numbers[page_format.TAIL]
        log = parts.log
        self.adopted_end = max(tail, log.end)  # before the end: who finds the end there knows by it what to wait for
        if tail > log.end:
            self._untold.append((log.end, tail))
            log.last_write, log.end = log.end, tail
        try:
            parts.follow()
        except StoreIOError:
            if parts.dispatcher.followed < log.end:  # or keys wait, and the next append raises the error
                raise
        if self._page.numbers[page_format.ASLEEP]:  # a peer that was killed has not rung
            self._wake()

    def _show(self) -> None:
        """Write the end of the log, the room behind it and the offsets of queues to the page."""
        page, appender = self._page, self._appender
        log, numbers, offsets = appender.log, page.numbers, page.offsets
        for lane in self.moved:
            number = self._numbers.get(lane)
            if number is not None:
                offsets[number] = lane.next_queue_offset
        self.moved.clear()
        numbers[page_format.ROOM] = min(self._sure, appender.room_until)
        if self._drops or not appender.accepts:  # after it, because another thread sets these, then withdraws the room
            numbers[page_format.ROOM] = -1
        numbers[page_format.TAIL] = log.end

    def refuse(self) -> None:
        """Let no peer append until this process has appended again, because the store refuses messages."""
        self._page.numbers[page_format.ROOM] = -1

    def _in_turn(self, change: Callable[[], object]) -> None:
        """Call ``change()`` under the append lock, in a turn if peers may append, without an interruption."""

        def take_turn() -> None:
            try:
                self.begin_turn()
                with critical:
                    change()
            finally:
                self.end_turn()

        self._appender.under_lock(take_turn)

    # ---- what peers have written

    def follow(self) -> None:
        """Take note of what peers have written before this call, and let the thread of this page tell of it.

        Without anything new this is a comparison.
        """
        if not self._is_level():
            self._appender.under_lock(self._adopt_in_order)

    def _is_level(self) -> bool:
        """Return whether all that peers have written is in the log of this process, and derived."""
        if not self.is_open:
            return True
        appender = self._appender
        is_adopted = self._page.numbers[page_format.TAIL] == appender.log.end
        return is_adopted and appender.dispatcher.followed >= self._adopted()

    def _adopted(self) -> int:
        """Return up to where the log has what peers have written; a recovery can have cut it since."""
        return min(self.adopted_end, self._appender.log.end)

    def _wake(self) -> None:
        with suppress(OSError):  # it has been woken so often that it wakes in any case, or has ended
            self._ring.send(b".")

    def _follow_and_tell(self) -> bool:
        """Do as `follow`, in the thread of this page; return whether there was something to tell."""
        self.follow()
        return self._tell()

    def _adopt_in_order(self) -> None:
        """Take note of what peers have written; under the append lock."""
        try:
            if not IS_ORDERED or self._is_interrupted():
                self.begin_turn()
            elif self.is_open:  # without the lock of the page, so that a reader waits for no other process
                with critical:
                    self._adopt()
        finally:
            self.end_turn()

    def _is_interrupted(self) -> bool:
        """Return whether a signal may have interrupted an append of this process, or the end of its turn."""
        return (
            self._has_turn
            or self._appender.dispatcher.writing_at >= 0
            or self._page.numbers[page_format.STATE] == page_format.BROKEN
        )

    def _tell(self) -> bool:
        """Tell of the messages of peers, in the thread of this page, without a lock; return whether there were some."""
        if not self._untold:
            return False
        with self._lock.mutex:
            untold, self._untold = self._untold, []
        log = self._appender.log
        self._appender.finish_append(log.end, wait=False)
        sums: defaultdict[tuple[bytes, bytes], tuple[int, int]] = defaultdict(lambda: (0, 0))
        for begin, end in untold:
            data, at = log.data_at(begin, end - begin), 0
            with suppress(RecordError):  # damage is found where it is read
                while at < len(data):
                    _, _, topic_at, topic_end, _, record_end = record.frame(data, at, len(data))
                    name = data[topic_at:topic_end], data[at + record.QUEUE_ID_AT : at + record.QUEUE_ID_AT + 4]
                    count, size = sums[name]
                    sums[name] = count + 1, size + record_end - at
                    at = record_end
        records = {(java_decode(topic), int.from_bytes(queue_id)): total for (topic, queue_id), total in sums.items()}
        self._arrived(records)
        return True

    def _is_unflushed(self) -> bool:
        """Return whether senders of peers wait for a flush."""
        flushed = self._page.numbers[page_format.FLUSHED]
        return self._appender.is_sync and 0 <= flushed < self._adopted()

    def _flush(self) -> None:
        """Flush with the next group what peers have written, and let their senders know."""
        numbers = self._page.numbers
        end = self._adopted()
        try:
            self._appender.finish_append(end)
            numbers[page_format.FLUSHED] = min(end, self._appender.flushed)
        except RmqError:  # the store refuses messages from now on, and says why
            numbers[page_format.FLUSHED] = -1

    def _follow_peers(self) -> None:
        """Follow the peers, in a thread of its own."""
        numbers = self._page.numbers
        states = StateLog(_log, self._page.path)
        ends = False
        while not ends:
            ends = self._ends  # before the last look, which finds all that peers have written
            numbers[page_format.ASLEEP] = 1
            # The system call orders the store above before the load below, as that of a peer's release does.
            rings = self._has_rung(0)
            is_quiet = False
            if not ends and not rings and self._is_level() and not self._untold and not self._is_unflushed():
                rings = self._wait_for_ring()
                is_quiet = not rings
            numbers[page_format.ASLEEP] = 0
            if rings:
                for bell in (self._bell, self._own_bell):
                    with suppress(BlockingIOError):
                        while bell.recv(64):
                            pass
            try:
                self._follow_while_they_append(is_quiet=is_quiet)
                states.works("following what peers append")
            except Exception as error:  # without this thread peers would send by the owner, and wake no consumer
                states.failing("following what peers append", error)
                select.select((), (), (), _QUIET_S)

    def _has_rung(self, wait_s: float | None) -> bool:
        return bool(self._bells.poll(None if wait_s is None else 1000 * wait_s))

    def _wait_for_ring(self) -> bool:
        """Return whether a bell has rung; false if no peer has appended for as long as the owner bears that."""
        numbers, rings = self._page.numbers, False
        for _ in range(round(_QUIET_S / _SOON_S)):
            turns = numbers[page_format.TAKES]
            rings = self._has_rung(_SOON_S if self.is_open else None)
            if rings or numbers[page_format.TAKES] - turns >= _MANY:
                break
        return rings

    def _follow_while_they_append(self, *, is_quiet: bool) -> None:
        """Follow the peers until they pause, and need not wake this thread; with ``is_quiet`` shut them out."""
        numbers = self._page.numbers
        if self._ends:  # no peer appends any more
            self._tell()
            return
        if self._has_turn:  # if a signal has interrupted its end, peers wait for that
            self._in_turn(lambda: None)
        if numbers[page_format.WISHED]:
            numbers[page_format.WISHED] = 0
            self._in_turn(self._open)
        has_followed = False
        begin = self._appender.log.end
        while self._follow_and_tell() or self._is_unflushed():
            end = self._appender.log.end
            if self._is_unflushed():
                self._flush()  # in place of a pause: others append meanwhile
            else:
                naps_s = (nap_s for much, nap_s in _LONG_NAPS_S if end - begin >= much)
                select.select((), (), (), next(naps_s, _NAP_S))
            has_followed, begin = True, end
            self._extend_room()
        if self.is_open and is_quiet and not has_followed:
            self._in_turn(self.shut)
            self._tell()

    def _extend_room(self) -> None:
        """Look for room before peers lack it, because each would ask this process by a send."""
        numbers, log = self._page.numbers, self._appender.log
        if numbers[page_format.ROOM] - numbers[page_format.TAIL] >= _AHEAD:
            return

        def extend() -> None:
            if self.is_open and log.end + _AHEAD <= log.fits:
                log.make_room(_AHEAD)

        with suppress(StoreError):  # the next send by this process raises it
            self._check_room()
            self._in_turn(extend)

    # ---- who may append

    def _open(self) -> None:
        """Let peers append; under the append lock."""
        page, log = self._page, self._appender.log
        if self.is_open or self._ends or log.file_start < 0:
            return
        try:
            page.take(self.wait_s)
            self._appender.repair()
            self.is_open = True
            log.check_turn = self.take_turn
            self._sure = log.close_to_writes()
            self._offer_all()
            page.numbers[page_format.FLUSHED] = self._appender.flushed
            page.numbers[page_format.STATE] = page_format.OPEN
        finally:
            page.release()

    def _offer_all(self) -> None:
        """Show peers the log and the queues, after they may have changed."""
        offered = self.offered
        if self._drops:
            self._drops, offered = False, {}
        self._clear()
        self._show()
        for topic, queues in offered.items():
            self.offered[topic] = queues
            self._add(topic, queues)

    def shut(self) -> None:
        """Let this process append alone, after all that peers have written; under the append lock."""
        if not self.is_open:
            return
        self.take_turn()
        with critical:
            self._page.numbers[page_format.STATE] = page_format.IDLE
            self.end_turn()
            self.is_open = False
            log = self._appender.log
            log.check_turn = None
            log.open_to_writes(self._sure)
            self._numbers.clear()

    def offer(self, topic: str, queues: int, is_current: Callable[[], bool]) -> None:
        """Let peers append to the queues of a topic that takes messages as they come, and has not changed since."""

        def add() -> None:
            if self._drops:  # before the look at the topic: one that changes behind the look stays withdrawn
                self._drop()
            if is_current():
                self.offered[topic] = queues
                if self.is_open:
                    self._add(topic, queues)

        self._in_turn(add)

    def _add(self, topic: str, queues: int) -> None:
        parts = self._appender.open_parts()
        for queue_id in range(queues):
            lane = parts.lane(topic, queue_id)
            number = self._page.add_queue(topic, queue_id, lane.next_queue_offset)
            if number is not None:
                self._numbers[lane] = number

    def withdraw(self) -> None:
        """Let peers append to no queue until it is offered again, because topics have changed.

        This waits for no other process. An append that is running counts as one that came before.
        """
        self._drops = True
        self.refuse()

    def _drop(self) -> None:
        self._drops = False
        self._clear()

    def _clear(self) -> None:
        self.offered = {}
        self._numbers.clear()
        self._page.drop_queues()

    def _close_bells(self) -> None:
        for bell in (self._bell, self._own_bell, self._ring):
            bell.close()

    def after_fork(self) -> None:
        """Close a forked child's copies: peers would find the bell of an owner that has ended."""
        self._close_bells()

    def _end_appends(self) -> None:
        self.shut()
        self._ends = True

    def close(self) -> None:
        """Let no process append by this page any more; a repetition does nothing.

        Raises:
            BrokerUnreachableError: Another process does not end its append, so that the store must stay open.
        """
        if self._is_closed:
            return
        if not self._ends:
            self._in_turn(self._end_appends)
        if self._thread.is_alive():
            self._wake()
            self._thread.join()
        if self._is_unflushed():
            self._flush()
        self._page.numbers[page_format.STATE] = page_format.CLOSED
        self._close_bells()
        self._page.close()
        self._page.unmap()  # because the parts of a store refer to each other, until a garbage collection
        self._is_closed = True
        with suppress(FileNotFoundError):
            os.unlink(self._page.path)
