"""The message store: log, queues, key index and checkpoint, composed.

Mirrors 4.9.4's ``DefaultMessageStore``. A message is acknowledged when its record is in the log (in the page cache:
it survives the process, not the machine; `MessageStore.flush` makes it survive the machine). Queue entries and keys are
derived from the log and can always be rebuilt.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from logging import getLogger
from typing import TYPE_CHECKING, Self, Unpack

from librmq.clock import Clock, SystemClock, moves_by_itself
from librmq.commitlog import CommitLog
from librmq.config import StoreConfig, to_seconds, to_timestamp_ms
from librmq.consumequeue import ConsumeQueue
from librmq.errors import FlushFailedError, ReadOnlyError, StoreClosedError, StoreIOError
from librmq.files.damage import Damage
from librmq.files.disk import DiskFiles, TemporaryFolder
from librmq.files.seam import FileLock, Files, make_folders
from librmq.message.delay_levels import DelayLevels
from librmq.message.message import Message, StoredMessage
from librmq.runtime.critical import critical
from librmq.store.engine.append import Appender
from librmq.store.engine.durability import Durability
from librmq.store.engine.group_commit import Acknowledgement
from librmq.store.engine.housekeeping import Housekeeping, HousekeepingThread
from librmq.store.engine.open_store import Parts
from librmq.store.engine.prepared import AgainFields, AppendFields, AppendResult, BatchFields, Prepared
from librmq.store.engine.query import find_by_id, find_by_key
from librmq.store.engine.queue_table import QueueTable
from librmq.store.engine.read import GetStatus, MessageFilter, ReadResult, Transfer, read_queue
from librmq.store.engine.store_lock import forget_locks, lock_store, unlock_store
from librmq.store.format import directory
from librmq.store.format.checkpoint import Checkpoint, clear_abort, has_abort
from librmq.store.format.kept_config import write_kept_config
from librmq.store.format.keyindex import KeyIndex
from librmq.store.live.reader import Following
from librmq.store.recovery.clean_shutdown import write_closed_state
from librmq.store.recovery.open import describe_recovery, load
from librmq.store.recovery.plan import RecoveryMode
from librmq.store.recovery.verify import Verdict, verify_parts
from librmq.store.upkeep.retention import Retention
from librmq.store.upkeep.snapshot import Snapshot, snapshot
from librmq.store.upkeep.unread import Readers
from librmq.store.upkeep.unused_topics import clean_unused_topics

if TYPE_CHECKING:
    from librmq.filter import Registrations, SqlFilter, WatchedPredicate

__all__ = ["AppendResult", "GetStatus", "MessageFilter", "MessageStore", "ReadResult"]

_log = getLogger("librmq.store")


class MessageStore:
    """A store directory, opened.

    Thread-safe: producers are serialised, readers take no lock. A handle is of no use in a child process after a fork.
    """

    log: CommitLog
    _queues: QueueTable
    index: KeyIndex
    checkpoint: Checkpoint
    filters: Registrations | None
    """The consumer groups' filters; where the store has extension files, each message gets a bitmap of them."""
    readers: Readers | None = None
    """What tells retention which messages are not consumed; set by the broker that opens the store."""
    _in_background: bool
    recovered: list[Damage]
    """What opening and `recover` found and cut."""

    def __init__(self, *_: object, **__: object) -> None:
        raise TypeError("a store is opened: MessageStore.open(path)")

    @classmethod
    def open(  # noqa: PLR0913 (each is a choice of its own, by name)
        cls,
        path: str | os.PathLike[str],
        config: StoreConfig | None = None,
        *,
        read_only: bool = False,
        thorough: bool = False,
        files: Files | None = None,
        clock: Clock | None = None,
        background: bool | None = None,
        filters: Registrations | None = None,
        wait: float | timedelta = 0,
    ) -> Self:
        """Open the store in ``path``; make a new one where there is nothing, unless ``read_only``.

        A store that was not closed cleanly is recovered as RocketMQ 4.9 does it; `recovered` lists what was cut.

        Args:
            path: The store's directory.
            config: None takes the sizes from the store's files and the retention that it keeps, if any; a new store
            gets
                `StoreConfig()`.
            read_only: Take no lock and change no byte. Beside a writer the handle sees its messages (`refresh`);
            without
                one it sees the result of a recovery, in memory.
            thorough: Check the whole log, and rebuild the same parts as `recover`.
            files: The file system; the disk by default.
            clock: The clock; the machine's by default.
            background: Let a thread of the store flush and expire by time, from the first append on. None does so
                unless ``clock`` is given; without it the caller calls `run_due`.
            filters: The groups' SQL filters, for the messages' bitmaps if the store has extension files. They can
            change
                while it is open.
            wait: Seconds to wait for another writer to release the store.

        Raises:
            NotAStoreError: The directory holds something else, or another kind of store.
            ConfigError: The configuration disagrees with the files, or ``wait`` is no duration.
            StoreLockedError: Another handle writes to the store; the message names its process.
            CorruptionError: Names, lengths or damage that no crash explains. Where sound records follow a damage, they
                are cut (and kept, see `librmq.store.recovery.salvage`) only if ``thorough``.
        """
        if config is not None and not isinstance(config, StoreConfig):
            raise TypeError(
                f"config: expected a StoreConfig, found {config!r:.80}: write StoreConfig(…) or leave it out"
            )
        seconds = to_seconds("wait", wait)
        store = object.__new__(cls)
        store.filters = filters
        store._in_background = not read_only and (clock is None if background is None else background)
        opened_by = files or DiskFiles()
        store._open(os.fspath(path), config, read_only, thorough, opened_by, clock or SystemClock(), seconds)
        return store

    @classmethod
    def temporary(cls, config: StoreConfig | None = None, *, clock: Clock | None = None) -> Self:
        """Open a new store in a directory of its own that is deleted on closing, with tiny files by default.

        For a store that touches no disk at all: ``MessageStore.open("/store", files=MemoryFiles())``.
        """
        folder = TemporaryFolder()
        store = cls.open(folder.name, config or StoreConfig.tiny(), clock=clock)
        store._temporary = folder
        return store

    def _open(
        self,
        path: str,
        config: StoreConfig | None,
        read_only: bool,
        thorough: bool,
        files: Files,
        clock: Clock,
        wait_s: float,
    ) -> None:
        self.path = path
        self.read_only = read_only
        self.files = files
        self.clock = clock
        self._closed: str | None = "was not opened"
        self._thread = HousekeepingThread(path, self._housekeep, clock)
        self._appender = Appender(clock, self._refusal, self._thread.wake)
        self.append = self._appender.append  # type: ignore[method-assign]  # without a call more for each message
        self.recovered = []
        self._file_lock: FileLock | None = None
        self._following: Following | None = None
        self._temporary: TemporaryFolder | None = None
        kind = directory.check_kind(path, files, writable=not read_only)
        was_killed, begin_ms = False, 0
        try:
            if not read_only:
                if kind is directory.StoreKind.NEW:
                    with critical:
                        make_folders(files, path)
                self._file_lock = lock_store(self, path, files, wait_s)
                was_killed, begin_ms = has_abort(files, path), clock.now_ms()
            if config is not None:
                directory.check_config(path, config, files)
            if read_only:
                self._follow(config)
            else:
                self._set_config(config or directory.infer_config(path, files))
                self._load(RecoveryMode.WHOLE_LOG if thorough else RecoveryMode.LAST_EXIT)
                if config is not None or kind is directory.StoreKind.NEW:
                    write_kept_config(path, self.config, files)
            if was_killed:
                took_ms = clock.now_ms() - begin_ms
                _log.warning("%s", describe_recovery(path, self.log.end, self.recovered, took_ms))
        except BaseException:
            with critical:
                self._release()
            raise
        self._take_calls()
        _open_stores.add(self)

    def _set_config(self, config: StoreConfig) -> None:
        self.config = config
        self.levels = DelayLevels.parse(config.message_delay_level)
        self._appender.configure(config, self.levels)
        self._transfer = Transfer(config)

    def _load(self, mode: RecoveryMode) -> None:
        """Open the parts and make them agree."""
        bitmaps = self.filters if self.config.enable_calc_filter_bitmap else None
        parts = load(
            self.path,
            self.config,
            self.levels,
            self.files,
            self.clock,
            mode=mode,
            bitmap_of=None if bitmaps is None else bitmaps.bitmap,
        )
        with critical:
            self._take(parts)
        self.recovered = self.recovered + parts.cuts

    def _follow(self, config: StoreConfig | None) -> None:
        """Open the parts for reading only, beside a writer in another process."""

        def opened(following: Following) -> None:
            self._set_config(following.config)
            with critical:
                self._take(following.parts)
            self.recovered = following.parts.cuts

        bitmaps = self.filters
        self._following = Following(
            self.path, config, self.files, self.clock, None if bitmaps is None else bitmaps.bitmap, opened
        )

    def _take(self, parts: Parts) -> None:
        appender = self._appender
        self.log, self.index, self.checkpoint, self._queues = parts.log, parts.index, parts.checkpoint, parts.queues
        self._durability = Durability(parts, appender, self._check_lock)
        self._retention = Retention(
            self.log,
            lambda: list(parts.queues.values()),
            self.index,
            self.config,
            self.files,
            self.path,
            lock=appender,
            settled=lambda: self._durability.settled,
            flush_log=lambda: self._durability.commit.reach(self.log.end),
            watch_disk=moves_by_itself(self.clock),
            readers=lambda: self.readers,
            find_queue=lambda topic, queue_id: self.queues.find((topic, queue_id)),
        )
        self._housekeeping = Housekeeping(
            self.config,
            self.log,
            self._durability.commit,
            self._durability.flush,
            lambda: parts.dispatcher.entries + len(parts.dispatcher.records),
            self._expire,
            self.clock.now_ms(),
        )
        appender.take(parts, self._durability.commit, self._housekeeping)

    def _check_lock(self) -> None:
        if self._file_lock is not None:
            self._file_lock.check()

    def _take_calls(self) -> None:
        """Take the calls of users from now on."""
        self._closed = None
        self._appender.accepts = not self.read_only
        if self._in_background:
            self._thread.allow()

    # -------------------------------------------------------------------------------------------------------- append

    def append(
        self, message: Message, queue_id: int = 0, *, wait: bool = True, **fields: Unpack[AppendFields]
    ) -> AppendResult:
        """Append a message to the queue ``queue_id`` of its topic.

        Returns when it stands in the log's page cache (it survives the process), with ``durability="sync"`` when it has
        reached the device (it survives the machine), unless ``wait`` is false; producers that wait together share one
        flush.

        A message with a delay level goes to the schedule topic, unless it is prepared or a rollback. The keywords of
        `AppendFields` are the record's fields that a broker fills in: both hosts are the store's and the born time is
        now unless given. ``properties_raw`` stores the bytes as they are instead of encoding the message's properties;
        a message that has properties all the same vouches that the bytes say them.

        `MessageIllegalError` before a byte is written: topic, body, properties or record too long, a field out of
        range.
        """
        return self._appender.append(message, queue_id, wait=wait, **fields)

    def append_again(
        self,
        record: StoredMessage,
        topic: str,
        queue_id: int,
        properties: Mapping[str, str],
        **fields: Unpack[AgainFields],
    ) -> AppendResult:
        """Append the message of a record once more, with these properties, to this queue of this topic.

        Body, born time and hosts are the record's, flags and counts too unless given. ``raw`` are the properties as
        they are to be stored, whatever they say of a delay; None encodes them as `append` does. Returns at once,
        whatever the durability. Raises what `append` does, and `RecordError` for a record that is none.
        """
        return self._appender.append_again(record, topic, queue_id, properties, **fields)

    def prepare_again(
        self,
        record: StoredMessage,
        topic: str,
        queue_id: int,
        raw: bytes,
        unique_key: str | None,
        keys: str | None,
        tags: str | None,
    ) -> Prepared:
        """Return the message of a record as `append_copies` takes it, for a queue of a topic.

        Its properties are stored as ``raw``; the caller vouches that they say these keys and tags. The rest stays.

        `MessageIllegalError` for what can't be appended, `RecordError` for a record that is none.
        """
        return self._appender.prepare_again(record, topic, queue_id, raw, unique_key, keys, tags)

    def append_copies(self, copies: Sequence[Prepared]) -> list[AppendResult]:
        """Append what `prepare_again` made, side by side. Returns at once, whatever the durability.

        The results are fewer than the copies where the disk got full on the way: those of the first, which were
        written. Raises what `append` does, where none was.
        """
        return self._appender.append_copies(copies)

    def append_batch(
        self, messages: Sequence[Message], queue_id: int = 0, *, wait: bool = True, **fields: Unpack[BatchFields]
    ) -> list[AppendResult]:
        """Append messages of one topic to one queue, all or none, side by side in one file of the log.

        ``properties`` are the batch's own, appended to each message's; ``wait`` is as in `append`.
        `MessageIllegalError` before a byte is written: an empty batch, topics or wait flags that differ, a delay, a
        transaction flag, or more than ``max_message_size`` bytes as a client encodes it;
        `librmq.message.batch.split_batch` cuts what is larger.
        """
        return self._appender.append_batch(messages, queue_id, wait=wait, **fields)

    def submit(
        self, message: Message, queue_id: int = 0, **fields: Unpack[AppendFields]
    ) -> Acknowledgement[AppendResult]:
        """Append like `append` with the same keywords, but return at once, whatever the durability.

        The acknowledgement completes when the message has reached the device: soon by itself with
        ``durability="sync"``, else with the next flush; its ``wait`` hurries.
        """
        result = self.append(message, queue_id, wait=False, **fields)
        return Acknowledgement(result, self._durability.commit, result.physical_offset + result.size)

    def wait_for(self, result: AppendResult) -> None:
        """Return when a message that `submit` took has reached the device; `FlushFailedError` if that is not known."""
        self._durability.commit.reach(result.physical_offset + result.size)

    def is_writing(self) -> bool:
        """Return whether a call appends at this moment; a deletion by retention does not count."""
        return self._appender.is_writing()

    def is_free_within(self, seconds: float) -> bool:
        """Wait until no call appends, or for ``seconds``; return whether none did."""
        return self._appender.is_free_within(seconds)

    # ---------------------------------------------------------------------------------------------------------- read

    def read(
        self,
        topic: str,
        queue_id: int,
        queue_offset: int,
        max_messages: int = 32,
        matching: MessageFilter | None = None,
    ) -> ReadResult:
        """Read up to ``max_messages`` messages of a queue from ``queue_offset`` on.

        At most 32 messages and 256 KiB a call (8 and 64 KiB from far behind the log's end), the first is always given;
        a read does not cross a queue file. Whatever the status, ``next_offset`` says where to go on. While the disk is
        full, the newest messages may not be in their queues yet, and are read when there is room again.

        `CorruptionError` if an entry points at what is no record of its size.
        """
        if self._closed is not None:
            raise self._unusable()
        if self._following is not None:
            return self._following.read((topic, queue_id), queue_offset, max_messages, matching, self._transfer)
        self._appender.write_entries_that_fit()
        return read_queue(
            self.log, self._queues.find((topic, queue_id)), queue_offset, max_messages, matching, self._transfer
        )

    def matching(
        self,
        *,
        tags: str | None = None,
        sql: str | SqlFilter | None = None,
        registration: tuple[str, str] | None = None,
        predicate: Callable[[StoredMessage], object] | WatchedPredicate[StoredMessage] | None = None,
    ) -> MessageFilter | None:
        """Return what `read` takes as its filter, from at most one of the arguments; without any None: all messages.

        Args:
            tags: Tags, as ``a || b``.
            sql: An SQL92 expression.
            registration: A group's registration that is in force now, as (topic, group). Its bitmaps are read before
                the log.
            predicate: A function of the message. One that takes more than 10 ms is reported, and one that raises does
                not match; a `WatchedPredicate` has its own budget, policies and counts.

        Raises:
            ConfigError: SQL is asked for and ``enable_property_filter`` is off, or no such group is registered.
            FilterSyntaxError: The expression does not compile.
        """
        from librmq.store.engine.message_filters import message_filter  # a grammar comes with it

        return message_filter(
            tags,
            sql,
            registration,
            predicate,
            filters=self.filters,
            sql_allowed=self.config.enable_property_filter,
            clock=self.clock,
        )

    def queue(self, topic: str, queue_id: int) -> ConsumeQueue | None:
        """Return the entries of a queue, None where there is no such queue; for reading only.

        All that was acknowledged before the call is among them.
        """
        self._check_open()
        self._appender.write_entries()
        return self._queues.find((topic, queue_id))

    @property
    def queues(self) -> QueueTable:
        """Return the queues by topic and queue id, with the entries of all that was appended before."""
        if self._closed is None:
            self._appender.write_entries_that_fit()
        return self._queues

    def queue_range(self, topic: str, queue_id: int) -> tuple[int, int]:
        """Return the queue offsets of a queue's oldest and next message; (0, 0) where there is no such queue.

        An append counts at once, though its entry may not be written yet.
        """
        self._check_open()
        queue = self._queues.find((topic, queue_id))
        if queue is None:
            return 0, 0
        lane = self._appender.lanes.get((topic, queue_id))
        return queue.min_offset, queue.max_offset if lane is None else lane.next_queue_offset

    def counts_as_on_disk(self, physical_offset: int) -> bool:
        """Return whether a message is so far behind the log's end that it counts as no longer in memory."""
        return self._transfer.is_on_disk(self.log.end, physical_offset)

    def message_at(self, physical_offset: int) -> StoredMessage | None:
        """Return the message whose record starts at ``physical_offset``; None where the log has nothing.

        `CorruptionError` if no sound record stands there.
        """
        self._check_open()
        if not isinstance(physical_offset, int):
            raise TypeError(f"physical_offset: expected a whole number, found {physical_offset!r:.80}")
        message = self.log.message(physical_offset)
        return self.log.message(physical_offset) if message is None and self.refresh() else message

    def find_by_key(
        self,
        topic: str,
        key: str,
        begin_ms: int = 0,
        end_ms: int = (1 << 63) - 1,
        max_messages: int = 64,
        *,
        exact: bool = True,
    ) -> list[StoredMessage]:
        """Return the messages of ``topic`` with this key, or with it as unique key, in log order.

        The index knows hashes and whole seconds: ``max_messages`` bounds what it gives, and ``exact`` false gives that
        whole, collisions and repetitions included, as a broker does.
        """
        return find_by_key(self._up_to_date(), topic, key, begin_ms, end_ms, max_messages, exact)

    def find_by_id(self, message_id: str) -> list[StoredMessage]:
        """Return the messages with an id, in log order.

        An offset id (32 or 56 hexadecimal digits) that names a record gives that one; else it is taken for a unique
        key, which gives every record that has it, over all topics.

        Raises:
            TypeError: The id is no text.
        """
        if not isinstance(message_id, str):
            raise TypeError(
                f"message_id: expected an offset id or a unique key as a str, found {message_id!r:.80}: "
                f"message_at takes a physical offset, messages a queue offset"
            )
        topics = directory.known_topics(self.path, self.files)
        return find_by_id(self._up_to_date(), message_id, topics)

    def messages(
        self, topic: str, queue_id: int = 0, begin: int = 0, end: int | None = None
    ) -> Iterator[StoredMessage]:
        """Yield the messages of a queue from queue offset ``begin``, or its first, up to ``end``, or its end now.

        Messages that retention deletes meanwhile are left out. `CorruptionError` as for `read`.
        """
        at = begin
        if end is None:
            self.refresh()  # else what is known so far would pass for the end
        while True:
            result = self.read(topic, queue_id, at)
            if end is None:
                end = result.max_offset
            for place, message in enumerate(result.messages, at):
                if place >= end:
                    return
                yield message
            if result.next_offset >= end or (result.next_offset <= at and not result.messages):
                return
            at = result.next_offset

    def queue_offset_at(self, topic: str, queue_id: int, time: datetime | int) -> int:
        """Return the queue offset of the message stored nearest to a time, as a broker answers; 0 for no queue.

        Raises:
            ConfigError: ``time`` is no `datetime` with a time zone, nor milliseconds since 1970.
        """
        timestamp_ms = to_timestamp_ms("time", time)
        parts = self._up_to_date()
        queue = parts.queues.find((topic, queue_id))
        return 0 if queue is None else queue.queue_offset_at(timestamp_ms, parts.log.store_timestamp_ms)

    def __iter__(self) -> Iterator[StoredMessage]:
        """Yield all messages in log order; `CorruptionError` at the first that can't be read."""
        for _, _, raw in self._up_to_date().log.scan():
            if raw is not None:
                yield StoredMessage(raw)

    def refresh(self) -> bool:
        """See what another process has written, deleted or recovered since; return whether there is anything new.

        For a handle that only reads. Reading at a queue's end, finding and iterating do it by themselves; `log`,
        `queues` and `index` show the store as of the last time, and may be other objects afterwards. What was given
        out before stays as it was.
        """
        self._check_open()
        return self._following is not None and self._following.refresh()

    # ----------------------------------------------------------------------------------------------- flush and close

    def flush(self) -> int:
        """Return when all that was appended before is on the device, with its queue entries and keys.

        Gives the physical offset up to which it is. After a flush that has failed, each that follows fails too until
        the store is reopened: what the kernel dropped would pass for flushed.

        Raises:
            FlushFailedError: A flush of the log has failed.
            StoreIOError: A flush of queues or index has failed; opening makes them again from the log.
        """
        self._check_writable()
        self._appender.check_reentry()
        with critical, self._appender.flushing:  # a recovery puts another one in its place
            return self._durability.flush()

    def run_due(self, now_ms: int) -> int | None:
        """Do what is due by time (flush, checkpoint, retention); returns when to call next (ms), None for not yet.

        A thread of the store does this by itself, unless it was opened with ``background=False`` or a clock of the
        caller's: then this is the caller's to call.
        """
        self._check_writable()
        with critical:
            return self._housekeeping.run_due(now_ms)

    def _housekeep(self, now_ms: int) -> int | None:
        return self._housekeeping.run_due(now_ms)  # after `recover` it is another

    def _expire(self, now_ms: int) -> int | None:
        """Take the step of retention, which finds whether the disk has room for messages."""
        try:
            return self._retention.run_due(now_ms)
        finally:
            appender, commit = self._appender, self._durability.commit
            with appender.lock:
                refused = self._closed is not None or commit.failure is not None
                appender.accepts = not refused and not self._retention.refuses_writes
                if commit.failure is not None:  # meanwhile
                    appender.accepts = False

    def check_room(self) -> None:
        """Refuse a send while messages that must stay until they are consumed take all the room.

        Only with ``keep_unconsumed``, and where `readers` tells what was consumed. What the broker writes itself
        (retries, deliveries, ends of transactions) is not refused: it lets messages be consumed.

        Raises:
            StoreFullError: which group holds back what, and what to do.
        """
        error = self._retention.full_error()
        if error is not None:
            raise error
        if self._retention.is_held and self._retention.is_full():
            self._housekeeping.expire_soon()
            self._thread.wake()

    def clean_unused_topics(self, topics: Container[str]) -> list[tuple[str, int]]:
        """Delete the queues whose topic is none of ``topics`` and whose messages retention has deleted.

        Returns them as (topic, queue id). The broker's own topics stay. A queue that is written again starts at queue
        offset 0. RocketMQ 4.9 also deletes queues of messages that the log still has; the next recovery of such a
        store makes them again.
        """
        self._check_writable()
        return clean_unused_topics(self.path, self.files, self._appender, topics)

    def recover(self) -> list[Damage]:
        """Look at the whole log and make queues and index agree with it; returns what was cut or rewritten.

        The log is cut at the first record that can't be read. Opening does the part of this that the last exit calls
        for; call this where you suspect more damage. Producers and readers wait.
        """
        appender = self._appender
        appender.check_reentry()
        self._thread.stop()
        with appender.flushing, appender.lock:
            lock_holder = appender
            if self._closed is not None or self.read_only:
                raise self._unusable()
            with critical:
                appender.catch_up()
                self._closed, appender.accepts = "could not be recovered", False  # unless it is
                self._close_parts()
            before = len(self.recovered)
            try:
                self._load(RecoveryMode.LIVING)
                self._take_calls()
            except BaseException:
                with critical:
                    self._closed, appender.accepts = "could not be recovered", False
                    self._release()
                raise
            del lock_holder  # which `check_reentry` looks at
            return self.recovered[before:]

    def snapshot(self, target: str | os.PathLike[str], *, copy: bool = False) -> Snapshot:
        """Make a store in ``target`` (empty, or not there yet) of all that was appended before the call.

        Producers, readers and retention go on meanwhile. Full files of the log are linked where the file system can,
        unless ``copy``. `librmq.store.snapshot` does it without a handle, and says what it raises and costs.
        """
        self._check_open()
        return snapshot(
            self.path,
            os.fspath(target),
            self.config,
            copy=copy,
            files=self.files,
            clock=self.clock,
            end=None if self.read_only else self._appender.end_between_appends,
        )

    def verify(self) -> Verdict:
        """Look at all of the store, changing nothing; producers wait."""
        appender = self._appender
        appender.check_reentry()
        with appender.lock:
            lock_holder = appender
            self._check_open()
            appender.catch_up()
            verdict = verify_parts(self.path, self.config, self.files)
            del lock_holder  # which `check_reentry` looks at
        return verdict

    def close(self) -> None:
        """Flush, mark the store as cleanly closed and release the lock. A second call does nothing.

        After a failed flush the store is released as it is, and the next open recovers.

        Raises:
            FlushFailedError: A flush of the log has failed.
            StoreIOError: A flush of queues or index has failed.
        """
        with critical:
            if not self._end("is closed"):
                self._release()  # what a signal has left of an open or a recovery
                return
            try:
                if not self.read_only:
                    self._durability.flush()
                    for queue in self._queues.opened():
                        queue.flush()  # retention deletes files of queues that no append wrote to
                    write_closed_state(self.path, self.files, self.log, self._queues, self.index)
                    clear_abort(self.files, self.path)
            finally:
                self._release()

    def abandon(self, *, why: str = "was abandoned") -> None:
        """Release the store as a dying process does: keep the abort marker, write no checkpoint.

        All that was appended is in the log, and in queues and index as far as the disk has room; the next `open`
        recovers. A second call, or one after `close`, does nothing. Later calls raise an error that says ``why``.
        """
        with critical:
            if not self._end(why):
                self._release()
                return
            try:
                if not self.read_only:
                    with suppress(StoreIOError), self._appender.lock:  # a reader may be writing entries too
                        self._appender.catch_up()
            finally:
                self._release()

    def _end(self, why: str) -> bool:
        """Take no more calls; return False if that was so already."""
        self._appender.check_reentry()
        with self._appender.lock:
            if self._closed is not None:
                return False
            self._closed, self._appender.accepts = why, False
        self._thread.stop()
        return True

    @property
    def is_closed(self) -> bool:
        """Return whether the store takes no more calls: it was closed or abandoned, or a recovery failed."""
        return self._closed is not None

    def _close_parts(self) -> None:
        appender = self._appender
        with appender.flushing:
            parts, appender.parts = appender.parts, None
            if parts is not None:
                self._durability.commit.stop(f"{self.path}: the log was let go before this had reached the device")
                parts.close()

    def _release(self) -> None:
        """Release everything."""
        try:
            self._close_parts()
        finally:
            if self._file_lock is not None:
                unlock_store(self._file_lock)
                self._file_lock = None
            if self._temporary is not None:
                self._temporary.delete()

    def _up_to_date(self) -> Parts:
        """Return the parts, with everything in them that was acknowledged before the call."""
        self.refresh()
        self._appender.drain()
        parts = self._appender.parts
        if parts is None:
            raise self._unusable()
        return parts

    def _check_open(self) -> None:
        if self._closed is not None:
            raise self._unusable()

    def _check_writable(self) -> None:
        if self._closed is not None or self.read_only:
            raise self._unusable()

    def _refusal(self) -> Exception:
        """Return why nothing can be appended."""
        if self._closed is None and not self.read_only:
            if self._durability.commit.failure is not None:
                return FlushFailedError(self._durability.commit.failure)
            if self._retention.refuses_writes:
                return self._retention.refusal()
        return self._unusable()

    def _unusable(self) -> Exception:
        if self._closed is not None:
            return StoreClosedError(f"{self.path}: this handle {self._closed}")
        return ReadOnlyError(f"{self.path}: this handle only reads")

    def __reduce__(self) -> str:
        raise TypeError(
            f"{self!r} can't be pickled, nor can what holds it: one process owns a store; open it there, with "
            f"read_only=True beside a writer"
        )

    def __repr__(self) -> str:
        state = self._closed or ("is open for reading" if self.read_only else "is open for writing")
        return f"<MessageStore {self.path!r}: {state}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_open_stores: weakref.WeakSet[MessageStore] = weakref.WeakSet()


def _after_fork() -> None:
    for store in list(_open_stores):
        store._closed = "was opened before a fork: reopen the store in the child"
        store._thread.forget()
        store._file_lock = None  # so that closing waits for no thread of the parent's
        store._appender.forget()
        store._durability.commit.forget(f"{store.path}: this handle {store._closed}")
    _open_stores.clear()
    forget_locks()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
