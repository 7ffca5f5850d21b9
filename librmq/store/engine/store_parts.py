"""The opened parts of a store: log, queues, key index, checkpoint, the dispatch between them, and their lock."""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Self

from librmq.clock import Clock
from librmq.commitlog import CommitLog
from librmq.config import StoreConfig, wrong_kind
from librmq.consumequeue import ConsumeQueue, files_of
from librmq.consumequeue_entries import ENTRY_SIZE, HOLE_SIZE, places_and_sizes
from librmq.errors import CorruptionError, RecordError, StoreIOError
from librmq.files import Damage, Files
from librmq.files.rolling import MappedFileQueue, MappingPool, file_name
from librmq.java.lang import java_decode
from librmq.message import DelayLevels, frames
from librmq.message import record as record_format
from librmq.override import override
from librmq.runtime import critical
from librmq.runtime.compiled_core import CORE
from librmq.runtime.locks import Appending, Event, Lock, RLock
from librmq.store.engine.derivation import (
    FEW,
    UNUSUAL_IN_BLOCKS,
    Derivation,
    KeyBlock,
    derived_block,
)
from librmq.store.engine.dispatch import Dispatcher, Lane
from librmq.store.format import directory
from librmq.store.format._checkpoint import Checkpoint
from librmq.store.format._keyindex import KeyIndex

# ---- queues

QueueName = tuple[str, int]

OpenQueue = Callable[[str, int], ConsumeQueue]
"""Opens a queue by topic and queue id; a new queue is empty."""


class QueueState(NamedTuple):
    """The state of a queue at its close."""

    min_offset: int
    max_offset: int
    max_physic_offset: int


class ShortQueue(ConsumeQueue):
    """A queue with few entries at the beginning of its only file, which are in memory. It is only read.

    A store can have many thousands of queues of a few entries. Mapping the file of one takes several times as long as
    reading it, so it is mapped only if a caller asks for more than its entries.
    """

    __slots__ = ("_entries", "_first", "_open", "_opened")

    _SHORT: Final = 1 << 10
    """Most bytes of entries to keep in memory for a queue."""

    def __init__(self, first: int, entries: bytes, state: QueueState, open_queue: Callable[[], ConsumeQueue]) -> None:
        self._first, self._entries = first, entries + bytes(-len(entries) % ENTRY_SIZE)
        self._open = open_queue
        self._opened: ConsumeQueue | None = None
        self._closed = False
        self.ext = None
        self.min_offset, self.max_offset, self.max_physic_offset = max(first, state.min_offset), *state[1:]

    @classmethod
    def from_file(
        cls, folder: str, file_size: int, files: Files, state: QueueState, open_queue: Callable[[], ConsumeQueue]
    ) -> Self | None:
        """Return the queue in ``folder``; None if it is not short, or not as in ``state``: open it to see why."""
        start = state.min_offset * ENTRY_SIZE // file_size * file_size
        size = state.max_offset * ENTRY_SIZE - start
        if not 0 < size <= min(cls._SHORT, file_size):
            return None
        if not files.is_shared:  # mapping it takes no more time
            return None
        raw = None
        with suppress(StoreIOError, CorruptionError):  # opening the queue raises it with its reason
            # The entry behind the end is read too, because it shows what was written since the close.
            path = f"{folder}{os.sep}{file_name(start)}"
            raw = files.read_used(path, size + ENTRY_SIZE, file_size, is_whole=False)
        stored = short_state(start, raw) if raw else None
        if raw is None or stored is None or stored[1:] != state[1:]:
            return None
        return cls(start // ENTRY_SIZE, raw, state, open_queue)

    @property
    @override
    def _files(self) -> MappedFileQueue:  # type: ignore[override]
        queue = self._opened = self._opened or self._open()
        return files_of(queue)

    @property
    @override
    def stored_begin(self) -> int:
        """The first queue offset in the file."""
        return self._first

    @override
    def _raw(self, position: int, end: int) -> bytes:
        if self._closed:
            self._check_open()
        begin = self._first * ENTRY_SIZE
        return self._entries[max(position - begin, 0) : max(end - begin, 0)]

    @override
    def unmap_all(self) -> None:
        """Release the file, if it is mapped."""
        if self._opened is not None:
            self._opened.unmap_all()

    @override
    def close(self) -> None:
        """Close the queue."""
        self._closed = True
        if self._opened is not None:
            self._opened.close()


def short_state(start: int, raw: bytes) -> QueueState | None:
    """Return the state of a queue from the used part of its file at ``start``; None if an entry is not sound."""
    raw += bytes(-len(raw) % ENTRY_SIZE)  # the last entry can end in zeros
    places, sizes = places_and_sizes(raw)
    if min(sizes) <= 0 or min(places) < 0 or HOLE_SIZE in sizes:
        return None
    first = start // ENTRY_SIZE
    return QueueState(first, first + len(places), places[-1] + sizes[-1])


_ADVICE: Final = ": run librmq recover"


def without_advice(error: CorruptionError) -> str:
    """Return what is wrong with a queue, for a caller that says itself what helps."""
    return error.what.removesuffix(_ADVICE)


class QueueTable(MutableMapping[QueueName, ConsumeQueue]):
    """The queues of a store, each opened at its first use. Thread-safe like a dict.

    Iterating and counting open no queue; `opened` returns the open ones.
    """

    has_files = True
    """Whether files have the entries, perhaps without the last ones."""

    def __init__(self, open_queue: OpenQueue, closed_states: Mapping[QueueName, QueueState | None]) -> None:
        """``closed_states`` are the queues at the close of the store, with their states or None."""
        self._open_queue = open_queue
        self._closed_states = dict(closed_states)
        self._open: dict[QueueName, ConsumeQueue] = {}
        self.kept_to: Callable[[QueueName], int | None] = lambda _: None
        """For a view: up to which queue offset the files of a queue have its entries, if a recovery in memory changed
        it; else None."""
        self.rebuild: Callable[[CorruptionError], QueueTable] | None = None
        """For a view: returns the queues as the log has them, after an error of opening one."""
        self._rebuilding = Lock()
        self.read_short: Callable[[QueueName, QueueState], ConsumeQueue | None] = lambda *_: None
        """For a view: returns a queue that is quicker to read than to open; None if it is none."""

    @override
    def __repr__(self) -> str:
        return f"<QueueTable of {len(self)} queues>"

    @override
    def __getitem__(self, name: QueueName) -> ConsumeQueue:
        queue = self._open.get(name)
        if queue is not None:
            return queue
        state = self._closed_states[name]
        try:
            return self._opened(name, state)
        except CorruptionError as error:
            with self._rebuilding:  # another thread can have met a damaged queue too
                if self.rebuild is not None:
                    rebuilt, self.rebuild = self.rebuild(error), None
                    self._open, self._closed_states = rebuilt._open, rebuilt._closed_states
                    self.kept_to = rebuilt.kept_to
                elif name not in self._open:
                    raise
                return self._open[name]

    def _opened(self, name: QueueName, state: QueueState | None) -> ConsumeQueue:
        if state is not None and (short := self.read_short(name, state)) is not None:
            return self._open.setdefault(name, short)
        queue = self._open_queue(*name)
        opened = self._open.get(name)
        if opened is not None:  # another thread has opened it, and can have written to it
            return opened
        if state is None:
            return self._open.setdefault(name, queue)
        if state.max_offset and (missing := queue.what_is_missing()) is not None:
            raise CorruptionError(queue.folder, 0, "missing", f"{missing}{_ADVICE}")
        if (queue.max_offset, queue.max_physic_offset) != state[1:]:
            path, position = queue.place_of(min(queue.max_offset, state.max_offset))
            mismatch = f"expected the end at queue offset {state.max_offset}, as closed, found {queue.max_offset}"
            if queue.max_offset == state.max_offset:
                path, position = queue.place_of(queue.max_offset - 1)
                mismatch = (
                    f"queue offset {queue.max_offset - 1}: expected a message that ends at {state.max_physic_offset}, "
                    f"as closed, found one that ends at {queue.max_physic_offset}"
                )
            raise CorruptionError(path, position, "entry", f"{mismatch}{_ADVICE}")
        if state.min_offset < min(queue.stored_begin, state.max_offset):  # retention keeps what the log has
            path, position = queue.place_of(state.min_offset)
            mismatch = (
                f"expected the first entry at queue offset {state.min_offset}, as closed, found {queue.stored_begin}"
            )
            raise CorruptionError(path, position, "missing", f"{mismatch}{_ADVICE}")
        queue.min_offset = max(queue.min_offset, state.min_offset)
        return self._open.setdefault(name, queue)

    def find(self, name: QueueName) -> ConsumeQueue | None:
        """Return the queue, or None; faster than `get`.

        Raises:
            TypeError: No queue can have this name.
        """
        try:
            queue = self._open.get(name)
        except TypeError:  # it can't be hashed
            _check(name)
            raise
        if queue is None:
            if name in self._closed_states:
                return self[name]
            _check(name)
        return queue

    @override
    def __setitem__(self, name: QueueName, queue: ConsumeQueue) -> None:
        self._open[name] = queue

    @override
    def __delitem__(self, name: QueueName) -> None:
        del self._open[name]
        self._closed_states.pop(name, None)

    @override
    def __iter__(self) -> Iterator[QueueName]:
        return iter([*self._open, *(name for name in self._closed_states if name not in self._open)])

    @override
    def __len__(self) -> int:
        return len(self._open.keys() | self._closed_states.keys())

    @override
    def __contains__(self, name: object) -> bool:
        return name in self._open or name in self._closed_states

    def is_open(self, name: QueueName) -> bool:
        """Return whether the queue is open; opening another one takes a quarter of a millisecond."""
        return name in self._open

    def opened(self) -> list[ConsumeQueue]:
        """Return the queues that are open."""
        return list(self._open.values())

    def states(self) -> dict[QueueName, QueueState]:
        """Return the state of every queue; an unopened queue has its state at the close.

        Thread-safe; a queue that is written can be seen with its old end in the queue and its new one in the log.
        """
        opened = {
            name: QueueState(queue.min_offset, queue.max_offset, queue.max_physic_offset)
            for name, queue in list(self._open.items())
        }
        closed = list(self._closed_states.items())
        return {**{name: state for name, state in closed if state is not None}, **opened}

    @property
    def max_physic_offset(self) -> int:
        """The end of the last message that a queue has, as in `states`; 0 without one."""
        return max([0, *(state.max_physic_offset for state in self.states().values())])


def _check(name: QueueName) -> None:
    topic, queue_id = name
    if not isinstance(topic, str):
        raise wrong_kind("topic", topic, "text")
    if not hasattr(queue_id, "__index__"):
        raise wrong_kind("queue_id", queue_id, "a whole number")


@dataclass(frozen=True, slots=True)
class PartFiles:
    """Opens the parts of the store in folder ``path`` from its files, with the sizes of ``config``."""

    path: str
    config: StoreConfig
    files: Files

    def open_log(
        self,
        *,
        writable: bool = False,
        scan_from: Callable[[CommitLog], int] | None = None,
        on_record: Callable[[CommitLog, int, bytes], None] | None = None,
    ) -> CommitLog:
        """See `CommitLog.open`."""
        folder, size = os.path.join(self.path, directory.COMMITLOG), self.config.commitlog_file_size
        try:
            return CommitLog.open(
                folder, size, files=self.files, writable=writable, scan_from=scan_from, on_record=on_record
            )
        except CorruptionError as error:
            if error.kind != "name" or not os.path.basename(error.file).isdigit():
                raise
            # Retention makes no gap: a file is lost, or the broker keeps it elsewhere.
            raise CorruptionError(error.file, error.offset, error.kind, f"{error.what}; {directory.ON_PATHS}") from None

    def open_index(self, *, writable: bool = False, now_ms: Callable[[], int] | None = None) -> KeyIndex:
        """See `KeyIndex.open`."""
        folder, slots = os.path.join(self.path, directory.INDEX), self.config.max_hash_slot_num
        entries = self.config.max_index_num
        return KeyIndex.open(folder, slots=slots, entries=entries, files=self.files, now_ms=now_ms, writable=writable)

    def open_queue(
        self, topic: str, queue_id: int, pool: MappingPool | None = None, *,
        writable: bool = False, reads_small: bool = False,
    ) -> ConsumeQueue:  # fmt: skip
        """See `ConsumeQueue.open`."""
        with_ext = self.config.enable_consumequeue_ext
        return ConsumeQueue.open(
            directory.queue_folder(self.path, topic, queue_id),
            self.config.consumequeue_file_size,
            files=self.files,
            pool=pool,
            writable=writable,
            ext_folder=directory.queue_folder(self.path, topic, queue_id, ext=True) if with_ext else None,
            ext_file_size=self.config.consumequeue_ext_file_size,
            reads_small=reads_small,
        )


_BLOCK: Final = 1024
"""Most of them: a block costs as much by itself as some 200 of its records."""


_READ: Final = 1 << 14
"""Bytes of single records that are read together."""


@dataclass(slots=True)
class Recovered:
    """What an opening recovered, and what it did not look at."""

    cuts: list[Damage] = field(default_factory=list)
    """Everything that was cut or rewritten."""
    repairs: list[Damage] = field(default_factory=list)
    """What no kill explains: damaged files of queues, index and checkpoint that were made again, and what is lost."""
    is_brief: bool = False
    """Whether a view of a crashed store has passed over many records that the checkpoint covers, and left the index."""
    compared_from: int = 0
    """Where the comparison of the queues with the log began."""
    knows_ends: bool = True
    """Whether it is known that no queue lacks its last entries."""
    why_whole: str = ""
    """Why the recovery did not begin at the mark of the last flush, if there was one."""


@dataclass(slots=True)
class Parts:
    """The opened parts of a store."""

    levels: DelayLevels
    log: CommitLog
    queues: QueueTable
    index: KeyIndex
    checkpoint: Checkpoint
    dispatcher: Dispatcher
    open_queue: OpenQueue
    recovered: Recovered = field(default_factory=Recovered)
    """What the opening recovered."""
    lanes: dict[QueueName, Lane] = field(default_factory=dict)
    irregular_at: int = -1
    """Place of the first dispatched record that was not the next one in its queue, -1 for none."""
    _lanes_of_records: dict[tuple[bytes, int], Lane] = field(default_factory=dict)
    _derivation: Derivation = field(init=False)
    _apart: int = FEW
    """Number of records that are dispatched one by one behind a block that was of no use."""
    _block_from: int = 0
    """Place of the next block."""

    def __post_init__(self) -> None:
        self._derivation = Derivation(self.levels)

    @property
    def is_regular(self) -> bool:
        """Whether each dispatched record was the next one in its queue."""
        return self.irregular_at < 0

    def queue(self, topic: str, queue_id: int) -> ConsumeQueue:
        """Return a queue, made at its first use."""
        queue = self.queues.find((topic, queue_id))
        if queue is None:
            queue = self.queues[topic, queue_id] = self.open_queue(topic, queue_id)
        return queue

    def lane(self, topic: str, queue_id: int) -> Lane:
        """Return the lane of a queue, made at its first use."""
        lane = self.lanes.get((topic, queue_id))
        if lane is None:
            lane = self.lanes[topic, queue_id] = Lane(topic, queue_id, self.queue(topic, queue_id))
            self._lanes_of_records[lane.topic_field[1:], queue_id] = lane
        return lane

    def derive_again(self) -> None:
        """Repair queues and index from the log after a signal has interrupted an append.

        Only the writer calls it, under its lock, in a critical block. After an error such as a full disk the next call
        continues.
        """
        log, begin = self.log, self.dispatcher.writing_at
        walk = log.walk(begin)
        if walk.damage is not None:
            log.truncate(walk.physical_offset)
            # A power cut could otherwise leave the cut records beside the next ones, as no crash of a writer does.
            log.sequence.flush_part(log.file_start, walk.physical_offset, log.file_start + log.file_size)
        if walk.physical_offset > begin:
            log.end, log.last_write = walk.physical_offset, begin
        self.dispatch_rest()
        for lane in self.lanes.values():
            lane.next_queue_offset = lane.queue.max_offset
        self.dispatcher.writing_at = -1

    def follow(self) -> None:
        """Dispatch all records of the log; some of their keys stay collected.

        After an error such as a full disk the next call continues there.

        Raises:
            CorruptionError: A record is unreadable, or does not continue its queue.
        """
        log, dispatcher = self.log, self.dispatcher
        if CORE.follow is None or not CORE.follow(
            dispatcher, log, self._lanes_of_records, UNUSUAL_IN_BLOCKS, self.levels.delays_ms
        ):
            self.dispatch_rest()
        if self.irregular_at >= 0:
            what = "expected a record that continues its queue: close the store, and open it again"
            raise CorruptionError(log.sequence.path_at(self.irregular_at), self.irregular_at, "queue offset", what)
        if dispatcher.collected >= Dispatcher.BATCH:
            dispatcher.drain()
        dispatcher.due = dispatcher.collected

    def drain(self) -> None:
        """Dispatch all records of the log with their keys; after an error the next call continues there."""
        self.follow()
        self.dispatcher.drain()
        self.dispatcher.due = 0

    def check_counts(self) -> None:
        """Compare the queues with what was appended, after a `drain`.

        Raises:
            CorruptionError: A record has changed between its append and its dispatch, so that its queue lacks it.
        """
        for lane in self.lanes.values():
            if lane.next_queue_offset != lane.queue.max_offset:
                at, expected = lane.queue.max_offset, lane.next_queue_offset
                what = f"expected {expected} messages in {lane.topic}/{lane.queue_id}, found {at}: open the store again"
                raise CorruptionError(self.log.sequence.folder, self.dispatcher.followed, "changed", what)

    def unindexed(self) -> list[KeyBlock]:
        """Return the keys that the index may lack."""
        derived = self._derivation.blocks(self.log, self.dispatcher.followed, self.log.end)
        return [*self.dispatcher.unindexed(), *(block.keys for block in derived)]

    def dispatch_rest(self) -> set[Lane]:
        """Dispatch the records of the log that are not dispatched, and return the lanes of their queues.

        Raises:
            CorruptionError: A record is unreadable.
        """
        lanes: set[Lane] = set()
        while self.dispatcher.followed < self.log.end:
            lanes.update(self._dispatch(self.log.end))
        return lanes

    def _dispatch(self, end: int) -> Sequence[Lane]:
        """Dispatch some of the records up to a place, and return the lanes of their queues."""
        log, dispatcher = self.log, self.dispatcher
        at = dispatcher.followed
        raw = log.data_at(at, min(end - at, _READ))
        if len(raw) < record_format.BLANK_SIZE:
            raise CorruptionError(log.sequence.folder, at, "missing", "expected a record")
        size, magic = frames.SIZE_AND_MAGIC.unpack_from(raw)
        if magic == record_format.BLANK_MAGIC:
            dispatcher.followed = at + log.file_size - at % log.file_size
            return ()
        if not 0 < size <= end - at:
            raise CorruptionError(log.sequence.folder, at, "size", f"expected a record before {end}")
        if at >= self._block_from and (records := (end - at) // size) >= FEW:
            lanes = self._dispatch_block(at, end, min(records, _BLOCK))
            if lanes:
                self._apart = FEW
                return lanes
            # Where blocks are of no use, looking for others takes longer than it saves.
            self._apart = min(2 * self._apart, _BLOCK)
            self._block_from = at + self._apart * size
        return self._dispatch_few(at, raw if size <= len(raw) else log.data_at(at, size))

    def _dispatch_block(self, begin: int, end: int, max_records: int) -> Sequence[Lane]:
        """Dispatch usual records together; return no lane, without effect, if far fewer than ``max_records``."""
        block = derived_block(self.log, begin, end, max_records, levels=self.levels)
        if block is None:
            return ()
        of_records = self._lanes_of_records
        queued = [
            (of_records.get((topic, queue_id)) or self.lane_of(topic, queue_id), first, entries)
            for topic, queue_id, first, entries in block.queues
        ]
        with critical:
            if not self.dispatcher.add_block(queued, block):
                return ()
        return [lane for lane, _, _ in queued]

    def _dispatch_few(self, at: int, raw: bytes) -> Sequence[Lane]:
        """Dispatch records of any kind one by one; ``raw`` has a whole one, and what follows it.

        One that is not the next one in its queue is left out, which `irregular_at` says.
        """
        dispatcher, begin = self.dispatcher, at
        lanes: list[Lane] = []
        while (left := len(raw) + begin - at) >= record_format.BLANK_SIZE:
            size, magic = frames.SIZE_AND_MAGIC.unpack_from(raw, at - begin)
            if magic == record_format.BLANK_MAGIC or not 0 < size <= left:
                break
            try:
                record = self._derivation.derive(at, size, raw[at - begin : at - begin + size])
                _, _, _, topic, queue_id, _, _, _, _, _, _ = record
                lane = self._lanes_of_records.get((topic, queue_id)) or self.lane_of(topic, queue_id)
                is_next = dispatcher.add_record(lane, record)
            except (RecordError, struct.error, IndexError, ValueError) as error:
                raise CorruptionError(self.log.sequence.path_at(at), at, "record", str(error)) from error
            if is_next:
                lanes.append(lane)
            else:
                self.irregular_at = at if self.is_regular else self.irregular_at
                dispatcher.followed = at + size
            at += size
        return lanes

    def lane_of(self, topic: bytes, queue_id: int) -> Lane:
        """Return the lane of a record's queue, by its topic in a record's form."""
        lane = self._lanes_of_records.get((topic, queue_id))
        if lane is None:
            with critical:
                lane = self._lanes_of_records[topic, queue_id] = self.lane(java_decode(topic), queue_id)
        return lane

    def close(self) -> None:
        """Close every part."""
        self.log.close()
        self.index.close()
        self.checkpoint.close()
        for queue in self.queues.opened():
            queue.close()


# ---- lock

CTRL_C_WAITS_S: Final = 0.05
"""Seconds that a wait for the lock may delay Ctrl-C."""
_LOOK_S: Final = 0.01
_PAUSE_S: Final = 0.00005
_PAUSES: Final = 16
_THREADS_KEPT: Final = 32


class AppendLock(Appending):
    """A lock that a signal handler can't wait for while its own thread holds it. Thread-safe.

    Code that takes ``mutex`` outside a critical block calls `check_reentry` before, and has its thread in ``owner``
    while it holds it. It asks for the thread before it takes the lock, and clears ``owner`` before it releases it:
    Python runs a handler after a call, and none comes between those assignments and the lock. What a block calls at its
    end stands in a ``try`` whose ``finally`` clears ``owner``, because a handler can raise there too. Each caller has
    these statements itself, because Ctrl-C could end the ``__enter__`` of a helper after it has taken the lock, and
    leave the lock taken. As a context manager the lock is taken for a deletion by retention.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.make_locks()
        super().__init__()

    def make_locks(self) -> None:
        """Make new locks in a child process after a fork, because threads of the parent may hold the old ones."""
        self.mutex: Lock = Lock()
        self.flushing: RLock = RLock()
        """What a flush holds, and what replaces the parts that it flushes; taken before ``mutex``."""
        self.owner = 0
        """The thread that holds ``mutex`` where signal handlers can run; 0 without one."""
        self._deleting = False
        self._never = Event()
        self._last_thread = threading.get_ident()
        self._threads: set[int] = set()
        self.crowd: int = 0
        """Number of the next appends that make a pause, because several threads append."""

    @override
    def check_reentry(self) -> None:
        """Refuse a call of a signal handler that has interrupted an append; each append calls this."""
        if self.owner:
            super().check_reentry()

    @override
    def is_held_here(self) -> bool:
        """Return whether this thread has ``mutex`` where signal handlers can run."""
        return self.owner == threading.get_ident()

    def yield_to_waiters(self) -> None:
        """Check for reentry, and give other threads the interpreter before the caller waits for ``mutex``.

        A thread that waits inside ``mutex`` owns it as soon as it is released, long before it gets the interpreter. The
        releasing thread then waits at its next append, and so on: threads change places at each message. `count_turn`
        notices that, and a pause outside of ``mutex`` ends it.
        """
        self.check_reentry()
        self.crowd = max(self.crowd - 1, 0)
        for _ in range(_PAUSES):
            self.pause()
            if not self.mutex.locked():
                break

    def pause(self) -> None:
        """Give other threads the interpreter for a moment; outside of ``mutex``."""
        self._clock.wait(self._never, _PAUSE_S)

    def count_turn(self) -> None:
        """Note which thread appends; called now and then under the lock."""
        thread, threads = threading.get_ident(), self._threads
        if thread == self._last_thread:
            return
        self._last_thread = thread
        if len(threads) >= _THREADS_KEPT:
            threads.clear()
        threads.add(thread)
        self.crowd = len(threads)

    def is_writing(self) -> bool:
        """Return whether a call appends at this moment; a deletion by retention does not count."""
        return self.mutex.locked() and not self._deleting

    def is_free_within(self, seconds: float) -> bool:
        """Wait until no call appends, or for ``seconds``; return whether none did.

        A pause of the process does not count, because the other call was paused too. Neither does most of the time for
        which a loaded machine lets this thread wait between two looks, so these are many.
        """
        while True:
            step_s = min(seconds, _LOOK_S)
            with critical:  # a lock that Ctrl-C takes from view is never given back
                if self.mutex.acquire(timeout=step_s):
                    self.mutex.release()
                    return True
            seconds -= step_s
            if seconds <= 0:
                return False

    def __enter__(self) -> None:
        self.mutex.acquire()
        self._deleting = True

    def __exit__(self, *_: object) -> None:
        self._deleting = False
        self.mutex.release()
