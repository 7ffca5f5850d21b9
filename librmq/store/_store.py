"""The message store: one log, its queues, key index and checkpoint. Mirrors 4.9.4's ``DefaultMessageStore``.

An append returns when the record is in the log's page cache. There it survives the process, and after a flush the
machine too. Queue entries and keys are derived from the log and can always be rebuilt.
"""

from __future__ import annotations

import heapq
import itertools
import os
from collections.abc import Callable, Container, Iterator, Sequence
from datetime import datetime, timedelta
from functools import cached_property, partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar, Unpack, cast

from librmq.clock import Clock, SystemClock
from librmq.commitlog import CommitLog
from librmq.config import StoreConfig, check_kind, check_now, check_path, to_seconds, to_timestamp_ms, wrong_kind
from librmq.consumequeue import ConsumeQueue
from librmq.errors import ConfigError, ReplicaError
from librmq.files import Damage, DiskFiles, Files
from librmq.files.interface import fixed_path
from librmq.message import DelayLevels, Message, StoredMessage
from librmq.override import override
from librmq.runtime import critical
from librmq.runtime.closing import Closing
from librmq.runtime.compiled_core import CORE
from librmq.store._handle import StoreHandle
from librmq.store._writer import Writer
from librmq.store.engine._append import Appender
from librmq.store.engine._append_fields import AppendFields, AppendResult, BatchFields
from librmq.store.engine._durability import Acknowledgement
from librmq.store.engine._entry_checks import EntryChecks
from librmq.store.engine.read import MessageFilter, ReadResult, read_queue, unwrapped, wrong_argument
from librmq.store.engine.store_parts import QueueTable
from librmq.store.format import directory
from librmq.store.format._checkpoint import Checkpoint
from librmq.store.format._keyindex import KeyIndex
from librmq.store.retention import Readers, clean_unused_topics

if TYPE_CHECKING:
    from librmq.filter import Registrations, SqlFilter, WatchedPredicate
    from librmq.store._read_only_view import ReadOnlyView
    from librmq.store._snapshots import Snapshot
    from librmq.store.engine.copies import CopyWriter
    from librmq.store.engine.derivation import BitmapOf
    from librmq.store.engine.store_times import StoreTimes
    from librmq.store.recovery._condition import Condition
    from librmq.store.recovery._verify import Verdict

_Method = TypeVar("_Method", bound=Callable[..., Any])


class _WriterMethod(property):
    """A method of `MessageStore` that its writer carries out: on a store it is the writer's own method.

    A Python function in between takes a seventh of an append. A subclass or a test replaces the method like any other,
    on the class or on one store.
    """

    def __init__(self, attribute: str, function: Callable[..., Any]) -> None:
        def replace(store: MessageStore, replacement: object) -> None:
            setattr(store, attribute, replacement)

        def restore(store: MessageStore) -> None:
            store._append, store._append_batch = store.appender.append_methods()

        super().__init__(attrgetter(attribute), replace, restore)
        self.__doc__ = function.__doc__
        self.__wrapped__ = function  # for `inspect.signature`

    def __call__(self, store: MessageStore, *arguments: object, **fields: object) -> object:
        return self.__get__(store)(*arguments, **fields)


def _done_by(attribute: str) -> Callable[[_Method], _Method]:
    """Return a decorator for a method that is done by what a store has as ``attribute``."""

    def declare(function: _Method) -> _Method:
        return cast("_Method", _WriterMethod(attribute, function))

    return declare


def _check_arguments(
    path: object,
    config: object,
    files: object,
    clock: object,
    filters: object,
    wait: float | timedelta,
    at: object,
    *,
    read_only: bool,
) -> float:
    """Check what `MessageStore.open` gets, and return the seconds to wait."""
    check_path("path", path, "the folder of a store")
    check_kind("config", config, StoreConfig, "StoreConfig()")
    for name, value, needed, example in (
        ("files", files, "flush_folder", "MemoryFiles()"),
        ("clock", clock, "now_ms", "ManualClock()"),
        ("filters", filters, "bitmap", "Registrations()"),
    ):
        if value is not None and not hasattr(value, needed):
            raise wrong_kind(name, value, f"one such as {example}")
    wait_s = to_seconds("wait", wait)
    if at is not None and type(at) is not int and not isinstance(at, datetime):
        raise wrong_kind("at", at, "a time with a time zone or a physical offset")
    if at is not None and not read_only:
        raise ConfigError("at: expected read_only=True with it, because the past can't be written to")
    return wait_s


class MessageStore(Closing):
    """The open store in a directory.

    Thread-safe: appends take turns, reads take no lock. In a child process after a fork, calls raise an error.
    """

    path: str
    read_only: bool
    files: Files
    clock: Clock
    filters: Registrations | None
    """The groups' SQL filters, for the messages' bitmaps if the store has extension files."""
    appender: Appender
    """The writer itself, for copies of records that the store has and for parts of a broker."""
    _handle: StoreHandle
    """What a recovery or a refresh replaces: a `Writer` or a `ReadOnlyView`."""
    writer: Writer
    """The writing side, with retention, durability and thread, for parts of the library; not where ``read_only``."""
    _view: ReadOnlyView | None = None
    """The reading side where ``read_only``."""
    _append: Callable[..., AppendResult]
    _append_batch: Callable[..., list[AppendResult]]

    def __init__(self, *_: object, **__: object) -> None:
        raise TypeError("open a store with MessageStore.open(path)")

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
        replica_of: str | None = None,
        at: datetime | int | None = None,
    ) -> Self:
        """Open the store in ``path``; if nothing is there and ``read_only`` is off, create a new one.

        A store that was not closed cleanly is recovered as by RocketMQ 4.9; `recovered` lists what was cut.

        Args:
            path: The store's directory.
            config: The settings. None keeps the sizes of the store's files and its saved retention; a new store gets
                `StoreConfig()`.
            read_only: Take no lock and change no byte. While a writer has the store open, the handle sees its messages
                (`refresh`); otherwise it sees the result of a recovery, made in memory.
            thorough: Check the whole log, and rebuild the same parts as `recover`.
            files: The file system; the disk by default.
            clock: The clock; the machine's by default.
            background: Flush and delete expired files periodically in a thread, which the first append starts. If
                false, the caller calls `run_due`. None means true, unless ``clock`` is given.
            filters: The groups' SQL filters, which can change later, for bitmaps if the store has extension files.
            wait: Seconds to wait for another writer to release the store.
            replica_of: Name of the master whose log it copies, by `librmq.cluster.Replica`; it takes copies alone.
            at: Show the store as it was at this moment, for ``read_only``: a time with a time zone, or the physical
                offset at which its log ended. Log, queues and index end there, and `refresh` finds nothing new. Files
                that retention has deleted since are not there, and the progress of groups is not kept by time.

        Raises:
            ReadOnlyError: The store is a replica, and ``replica_of`` was not given.
            ReplicaError: ``replica_of`` was given, and the store is one of its own.
            NotAStoreError: The directory contains something else, or another kind of store.
            ConfigError: The configuration disagrees with the files, ``path`` is empty, ``wait`` is not a duration, or
                ``at`` is before the first message or beyond the log, or given without ``read_only``.
            StoreLockedError: Another handle writes to the store; the message names its process.
            CorruptionError: No crash explains a name, a length or damage. Sound records behind damage are cut only if
                ``thorough``, and `librmq.store.recovery.salvage` keeps them.
            TypeError: An argument has a wrong type.
        """
        wait_s = _check_arguments(path, config, files, clock, filters, wait, at, read_only=read_only)
        store = object.__new__(cls)
        store.files, store.clock = files or DiskFiles(), clock or SystemClock()
        store.path, store.read_only, store.filters = fixed_path(path, store.files), read_only, filters
        bitmap_of = None if filters is None else filters.bitmap
        if read_only:
            return store._open_view(config, bitmap_of, replica_of, at)
        store._handle = store.writer = writer = Writer(store.path, store.files, store.clock, bitmap_of, replica_of)
        store.appender = writer.appender
        store._append, store._append_batch = writer.appender.append_methods()
        writer.open(config, wait_s, thorough=thorough, background=clock is None if background is None else background)
        return store

    def _open_view(
        self, config: StoreConfig | None, bitmap_of: BitmapOf | None, replica_of: str | None, at: datetime | int | None
    ) -> Self:
        if replica_of is not None:
            raise ReplicaError(f"{self.path}: a replica copies, so it is not opened for reading only")
        from librmq.store._read_only_view import ReadOnlyView

        self._handle = self._view = ReadOnlyView(self.path, self.files, self.clock, bitmap_of, at)
        self._append = self._append_batch = self._refuse_append
        self._view.open(config)
        return self

    @classmethod
    def temporary(cls, config: StoreConfig | None = None, *, clock: Clock | None = None) -> Self:
        """Open a new store in a new directory that is deleted on closing, by default with tiny files.

        As with `Broker.temporary`, no call waits for the device.
        For a store without a disk use ``MessageStore.open("/store", files=MemoryFiles())``.
        """
        from librmq.files import TemporaryFolder

        folder = TemporaryFolder()
        store = cls.open(folder.name, config or StoreConfig.tiny(), files=folder.files, clock=clock)
        store.writer.temporary = folder
        return store

    @cached_property
    def copies(self) -> CopyWriter:
        """The writer of several records under one lock, for parts of a broker."""
        from librmq.store.engine.copies import CopyWriter  # many programs copy nothing

        return CopyWriter(self.appender)

    @property
    def config(self) -> StoreConfig:
        """The settings; a `refresh` can find that they have changed."""
        return self._handle.config

    @property
    def levels(self) -> DelayLevels:
        """The delay levels of the settings."""
        return self._handle.levels

    @property
    def log(self) -> CommitLog:
        """The log; `recover` and `refresh` can replace the object."""
        return self._handle.log

    @property
    def index(self) -> KeyIndex:
        """The key index; `recover` and `refresh` can replace the object."""
        if self._view is not None:
            self._view.complete()
        return self._handle.index

    @property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint; `recover` and `refresh` can replace the object."""
        return self._handle.checkpoint

    @property
    def _checks(self) -> EntryChecks:
        """The checked way from an entry to its record, for parts of a broker; `refresh` can replace the object."""
        return self._handle.checks

    @property
    def past_ms(self) -> int | None:
        """The time of the moment at which the store is shown, for ``at=`` in `open`; None for the present.

        It is 0 before the first message.
        """
        moment = None if self._view is None else self._view.moment
        if isinstance(moment, datetime):
            return to_timestamp_ms("at", moment)
        last = self.log.last_write
        if moment is None:
            return None
        return 0 if last is None else self.log.store_timestamp_ms(last)

    @property
    def recovered(self) -> list[Damage]:
        """What opening and `recover` found and cut."""
        return self._handle.recovered

    @property
    def condition(self) -> Condition:
        """How whole a read-only store is: sound, as a recovery leaves it, or short, and of what.

        A writable one is sound, because opening has recovered it.
        """
        from librmq.store.recovery._condition import Condition, Wholeness

        return Condition(Wholeness.SOUND) if self._view is None else self._view.condition()

    @property
    def cut_short(self) -> Damage | None:
        """The damage at which a read-only store ends although records follow or are missing there; else None.

        Reads return what a recovery would leave. ``offset`` is the log's end; ``bytes`` counts those from there to the
        last nonzero one, which a recovery would cut and ``librmq salvage`` returns. They are 0 if nothing follows: the
        queues of a closed store, its checkpoint or its last flush reach beyond the end, because the log lacks files.
        """
        return None if self._view is None else self._view.condition(looks_at_queues=False).cut

    def check_covered(self) -> Damage | None:
        """Return the first damage among all records up to the log's end, for a read-only store; None without any.

        Opening passes over the records before the last files, those that the checkpoint covers if they are many, and
        those that a clean shutdown left. This reads them all, with the checksums of their bodies. ``bytes`` counts
        those from the damage to the log's end.
        """
        return None if self._view is None else self._view.check_covered()

    @property
    def core(self) -> str:
        """Which code runs hot paths: ``compiled core``, or pure Python and the reason."""
        return CORE.state

    @property
    def readers(self) -> Readers | None:
        """Source of the unconsumed messages for retention; set by the broker that opens the store."""
        return self.writer.readers

    @readers.setter
    def readers(self, readers: Readers | None) -> None:
        self.writer.readers = readers

    # -------------------------------------------------------------------------------------------------------- append

    @_done_by("_append")
    def append(
        self, message: Message, queue_id: int = 0, *, wait: bool = True, **fields: Unpack[AppendFields]
    ) -> AppendResult:
        """Append a message to the queue ``queue_id`` of its topic.

        The call returns when the record is in the log's page cache. With ``durability="sync"`` and ``wait`` it returns
        when the record is on the device; callers that wait at the same time share one flush.

        A message with a delay level goes to the schedule topic, unless it is prepared or a rollback. ``fields`` are
        those that a broker fills in: ``born_timestamp_ms`` (by default now), ``born_host`` and ``store_host`` as
        (address, port) (by default the store's), ``sys_flag``, ``reconsume_times`` and ``prepared_transaction_offset``.
        ``properties_raw`` are bytes to store as the properties; if the message has properties too, they must be the
        same. With ``is_copy`` it is a copy of a stored message, which ``max_message_size`` does not limit.

        Raises:
            MessageIllegalError: Topic, body, properties or record are too long, a field is out of range, or
                ``properties_raw`` has other properties than the message. Nothing was written.
        """
        return self._append(message, queue_id, wait=wait, **fields)

    @_done_by("_append_batch")
    def append_batch(
        self, messages: Sequence[Message], queue_id: int = 0, *, wait: bool = True, **fields: Unpack[BatchFields]
    ) -> list[AppendResult]:
        """Append messages of one topic to one queue, all or none, next to each other in one log file.

        ``properties`` are added to those of each message; ``wait`` is as in `append`.

        Raises:
            MessageIllegalError: The batch is empty, has several topics or wait flags, a delay or a transaction flag, or
                takes more than ``max_message_size`` bytes as a client encodes it; `librmq.message.batch.split_batch`
                divides it. Nothing was written.
        """
        return self._append_batch(messages, queue_id, wait=wait, **fields)

    def submit(
        self, message: Message, queue_id: int = 0, **fields: Unpack[AppendFields]
    ) -> Acknowledgement[AppendResult]:
        """Append as `append` does, but return immediately, whatever the durability.

        The acknowledgement completes when the message is on the device: soon with ``durability="sync"``, otherwise at
        the next flush. Its ``wait`` flushes.
        """
        result = self.append(message, queue_id, wait=False, **fields)
        return Acknowledgement(result, self.writer.durability.commit, result.physical_offset + result.size)

    def wait_for(self, result: AppendResult) -> None:
        """Wait until a message that `submit` appended is on the device.

        Raises:
            FlushFailedError: A flush has failed, so the message may not be there.
        """
        try:
            end = result.physical_offset + result.size
        except AttributeError:
            raise wrong_kind("result", result, "the result of an Acknowledgement") from None
        self._writable().durability.commit.reach(end)

    def watch(self, physical_offset: int, appended: Callable[[], None]) -> None:
        """Call ``appended()`` once, when the log ends after ``physical_offset``; at once if it does.

        An append calls it in its thread, so it must be short.
        """
        self._writable().appender.watch_log(physical_offset, appended)

    # ---------------------------------------------------------------------------------------------------------- read

    def read(
        self,
        topic: str,
        queue_id: int,
        queue_offset: int,
        max_messages: int = 32,
        matching: MessageFilter | None = None,
        *,
        joined: bool = False,
        checked: bool = False,
    ) -> ReadResult:
        """Read up to ``max_messages`` messages of a queue from ``queue_offset`` on.

        A call reads at most 32 messages and 256 KiB (far from the log's end 8 messages and 64 KiB), but always the
        first message. It does not cross the end of a queue file. Continue at ``next_offset``, whatever the status.
        While the disk is full, the newest messages may not be in their queues yet. With ``joined`` the messages may be
        `StoredRecords`, which are read faster if only their bytes are needed. With ``checked`` bodies are compared with
        their checksums also in pure Python, which else does that when a body is first used.

        Raises:
            CorruptionError: The first message is damaged, or the log lacks it. The messages before another one are
                returned; the next read begins with that.
        """
        handle = self._handle
        if handle.closed is not None:
            handle.check_open()
        try:
            view = self._view
            if view is not None:
                return view.read((topic, queue_id), queue_offset, max_messages, matching, checked=checked)
            self.appender.write_entries()
            name, checks = (topic, queue_id), handle.checks
            queue = handle.queues.find(name)
            return read_queue(checks, queue, name, queue_offset, max_messages, matching, joined=joined, checked=checked)
        except (AttributeError, TypeError) as error:
            raise wrong_argument(queue_offset, max_messages, matching) or error from None

    def matching(
        self,
        *,
        tags: str | None = None,
        sql: str | SqlFilter | None = None,
        registration: tuple[str, str] | None = None,
        predicate: Callable[[StoredMessage], object] | WatchedPredicate[StoredMessage] | None = None,
    ) -> MessageFilter | None:
        """Return a filter for `read` from one of the arguments; without any, None, which matches all messages.

        Args:
            tags: Tags, as ``a || b``.
            sql: An SQL92 expression.
            registration: The registered filter of a group, as (topic, group). Its bitmaps are read before the log.
            predicate: A function of the message. A call that takes over 10 ms is logged, and a message does not match
                if the call raises; a `WatchedPredicate` has its own budget, policies and counts.

        Raises:
            ConfigError: ``sql`` is given but ``enable_property_filter`` is off, or the group has no filter.
            FilterSyntaxError: The expression does not compile.
        """
        if tags is None and sql is None and registration is None and predicate is None:
            return None
        from librmq.store.engine._message_filters import message_filter  # loads a grammar

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
        """Return the entries of a queue for reading, None if there is no such queue.

        They include those of all messages that were acknowledged before the call, as far as the disk has room.
        """
        self._handle.check_open()
        return self.queues.find((topic, queue_id))

    @property
    def queues(self) -> QueueTable:
        """Return the queues by topic and queue id, with the entries of all messages appended before."""
        return self._handle.queues if self.read_only else self.writer.written_queues()

    def queue_range(self, topic: str, queue_id: int) -> tuple[int, int]:
        """Return the queue offsets of a queue's oldest and next message; (0, 0) if there is no such queue.

        An append counts immediately, even if its entry is not written yet.
        """
        handle, name = self._handle, (topic, queue_id)
        if handle.closed is not None:
            handle.check_open()
        if not self.read_only:
            self.appender.follow()
        queue = handle.queues.find(name)
        if queue is None:
            return 0, 0
        lane = None if self.read_only else self.appender.lanes.get(name)
        return queue.min_offset, queue.max_offset if lane is None else lane.next_queue_offset

    def counts_as_on_disk(self, physical_offset: int) -> bool:
        """Return whether a message is so far from the log's end that a read counts it as on disk only."""
        return self.log.end - physical_offset > self._handle.transfer.memory

    def message_at(self, physical_offset: int) -> StoredMessage | None:
        """Return the message whose record begins at ``physical_offset``, None if the log has nothing there.

        If 5.x stored a batch as one record, this is the record; `librmq.message.batch.inner_messages` opens it.

        Raises:
            CorruptionError: No sound record begins there.
        """
        self._handle.check_open()
        if not isinstance(physical_offset, int):
            raise wrong_kind("physical_offset", physical_offset, "a whole number")
        if not self.read_only:
            self.appender.follow()
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
        is_unique: bool = False,
    ) -> list[StoredMessage]:
        """Return the messages of ``topic`` with this key or unique id, in log order.

        The index contains only hashes and whole seconds. ``max_messages`` limits the number of its entries that are
        used, the newest. If ``exact`` is false, the messages of all of them are returned, including collisions and
        repetitions, as by a broker. If ``is_unique``, the first ``max_messages`` with this unique id are returned,
        however many others have it as a key.
        """
        from librmq.store.engine._searches import find_by_key

        parts, unindexed = self._handle.with_index()
        if not is_unique:
            return list(find_by_key(self._checks, parts, unindexed, topic, key, begin_ms, end_ms, max_messages, exact))
        messages = find_by_key(self._checks, parts, unindexed, topic, key, begin_ms, end_ms, 1 << 31, True)
        return list(itertools.islice((message for message in messages if message.unique_key == key), max_messages))

    def find_by_id(self, message_id: str) -> list[StoredMessage]:
        """Return the messages with an id, in log order.

        If an offset id (32 or 56 hexadecimal digits) leads to a record, only that one is returned. Otherwise the id is
        a unique id, and all records with it, in all topics, are returned.

        Raises:
            CorruptionError: The record is damaged to which the id leads.
            TypeError: The id is not a string.
        """
        if not isinstance(message_id, str):
            raise TypeError(
                f"message_id: expected an offset id or a unique id as a str, found {message_id!r:.80}: "
                f"use message_at for a physical offset, messages for a queue offset"
            )
        from librmq.store.engine._searches import find_by_id

        topics = partial(directory.known_topics, self.path, self.files)
        parts, unindexed = self._handle.with_index()
        return find_by_id(self._checks, parts, unindexed, message_id, topics)

    def topic_messages(self, topic: str) -> Iterator[StoredMessage]:
        """Yield the messages of all queues of a topic in the order of the log, up to their ends now.

        Messages that retention deletes in the meantime are skipped.

        Raises:
            CorruptionError: An entry leads to no record of its size.
        """
        queues = [self.messages(*queue) for queue in sorted(self.queues) if queue[0] == topic]
        return heapq.merge(*queues, key=lambda message: message.physical_offset)

    def messages(
        self, topic: str, queue_id: int = 0, begin: int = 0, end: int | None = None
    ) -> Iterator[StoredMessage]:
        """Yield the messages of a queue from queue offset ``begin`` up to ``end``, by default its current end.

        Messages that retention deletes in the meantime are skipped.

        Raises:
            CorruptionError: An entry leads to no record of its size.
        """
        at = begin
        if end is None:
            self.refresh()  # otherwise the end of the last refresh would count
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
        """Return the queue offset of the message stored nearest to a time, as a broker answers; 0 without a queue.

        Raises:
            ConfigError: ``time`` is neither a `datetime` with a time zone nor milliseconds since 1970.
        """
        timestamp_ms = to_timestamp_ms("time", time)
        queue = self._handle.up_to_date().queues.find((topic, queue_id))
        return 0 if queue is None else self.times.nearest(queue, timestamp_ms)

    def first_offset_from(self, topic: str, queue_id: int, time: datetime | int) -> int:
        """Return the queue offset of the first message stored at a time or later; the queue's end without one.

        It is right whatever the clock did: no earlier message of the queue was stored at that time or later.

        Raises:
            ConfigError: ``time`` is neither a `datetime` with a time zone nor milliseconds since 1970.
        """
        timestamp_ms = to_timestamp_ms("time", time)
        queue = self._handle.up_to_date().queues.find((topic, queue_id))
        if queue is None:
            return 0
        return self.times.first_from(queue, timestamp_ms, range(queue.min_offset, queue.max_offset))

    @property
    def times(self) -> StoreTimes:
        """The store times of the messages, by queue."""
        return self._handle.times

    def __iter__(self) -> Iterator[StoredMessage]:
        """Yield all messages in log order.

        Raises:
            CorruptionError: A record can't be read.
        """
        log, view = self._handle.up_to_date().log, self._view
        if view is None or not view.derives_queues:
            return iter(log)
        return itertools.chain.from_iterable(unwrapped(log, message) for message in log)

    def refresh(self) -> bool:
        """Notice changes by another process since the last call; return whether there are any.

        For read-only handles. A read at a queue's end, a search and an iteration refresh automatically. `log`, `queues`
        and `index` show the state of the last refresh, which can replace these objects; the old objects do not change.
        """
        self._handle.check_open()
        return self._view is not None and self._view.refresh()

    # ----------------------------------------------------------------------------------------------- flush and close

    def flush(self) -> int:
        """Flush all that was appended before, with its queue entries and keys; return the log's flushed end.

        After a failed flush, each later one fails until the store is reopened, because the kernel can have dropped
        pages that were not written.

        Raises:
            FlushFailedError: A flush of the log has failed.
            StoreIOError: A flush of queues or index has failed; opening rebuilds them from the log.
        """
        lock = self._writable().lock
        lock.check_reentry()
        self.appender.follow()
        # Take the lock before `durability` is read, because a recovery replaces it.
        with critical, lock.flushing:
            return self._writable().durability.flush()

    def run_due(self, now_ms: int) -> int | None:
        """Do the periodic work that is due (flush, checkpoint, retention); return the next due time (ms).

        A thread of the store does this, unless the store was opened with ``background=False`` or with a clock.
        """
        check_now(now_ms)
        with critical:
            return self._writable().do_due_work(now_ms)

    def check_room(self) -> None:
        """Refuse a send while unread messages take all the space, if ``keep_unconsumed`` is on and `readers` is set.

        A broker does not call it for retries, deliveries and ends of transactions, because they let messages be
        consumed. The call also looks at the disk; if it is too full, appends raise `DiskFullError` from now on.

        Raises:
            StoreFullError: The error says which group holds back which messages, and what to do.
        """
        self._writable().check_room()

    def delete_expired(self) -> None:
        """Let the next `run_due` delete expired log files, whatever the hours of ``delete_when``.

        A file that has not expired stays, as does the file of the last message.
        """
        writer = self._writable()
        writer.retention.delete_expired()
        writer.expire_soon()

    def clean_unused_topics(self, topics: Container[str]) -> list[tuple[str, int]]:
        """Delete queues whose topics are not in ``topics`` and whose messages retention has deleted.

        Returns them as (topic, queue id). The broker's own topics stay. A queue that is written again starts at queue
        offset 0. RocketMQ 4.9 also deletes queues whose messages are still in the log; the next recovery rebuilds them.
        """
        writer = self._writable()
        if isinstance(topics, str | bytes) or not isinstance(topics, Container):
            raise wrong_kind("topics", topics, "a set of names")
        return clean_unused_topics(self.path, self.files, writer.appender, topics)

    def recover(self) -> list[Damage]:
        """Check the whole log, and make queues and index agree with it; return what was cut or rewritten.

        The log is cut at the first record that can't be read. Opening checks only what the last exit requires; call
        this if you suspect more damage. Calls from other threads wait. Close a broker before its store is recovered:
        groups, delays and timers that were further would pass over new messages in the places of those that were cut.
        """
        return self._writable().replace_parts()

    def snapshot(self, target: str | os.PathLike[str], *, copy: bool = False) -> Snapshot:
        """Copy everything appended before the call to a new store in ``target``, a new or empty folder.

        Appends, reads and retention continue. Full log files are hard-linked if the file system allows it, unless
        ``copy`` is true. `librmq.store.snapshot` does the same without a handle, and lists errors and costs.
        """
        from librmq.store._snapshots import snapshot

        self._handle.check_open()
        if self._view is not None and self._view.moment is not None:
            raise ConfigError("at: expected a store of the present to copy, because old progress of groups is not kept")
        return snapshot(
            self.path,
            os.fspath(target) if isinstance(target, os.PathLike) else target,
            self.config,
            copy=copy,
            files=self.files,
            clock=self.clock,
            end=None if self.read_only else self.appender.end_between_appends,
        )

    def verify(self) -> Verdict:
        """Check the whole store and change nothing; appends wait."""
        if not self.read_only:
            return self.writer.verify()
        from librmq.store.recovery._verify import verify_parts

        self._handle.check_open()
        return verify_parts(self.path, self.config, self.files)

    @override
    def close(self) -> None:
        """Flush, mark the store as cleanly closed and release it. A second call does nothing.

        After a failed flush the store is released as it is, and the next opening recovers it.

        Raises:
            FlushFailedError: A flush of the log has failed.
            StoreIOError: A flush of queues or index has failed.
        """
        self._handle.close()

    def abandon(self, *, why: str = "was abandoned") -> None:
        """Release the store as a dying process does: keep the abort marker, and write no checkpoint.

        Appended messages are in the log, and in queues and index as far as the disk has room. The next `open` recovers.
        A second call, or one after `close`, does nothing. Later calls raise an error that says ``why``.
        """
        self._handle.abandon(why)

    @property
    def is_own(self) -> bool:
        """Return whether librmq made the store; False in a broker's directory, and in a store open for reading."""
        return self._handle.is_own

    @property
    def is_closed(self) -> bool:
        """Return whether the store accepts no calls: it was closed or abandoned, or a recovery has failed."""
        return self._handle.closed is not None

    def _writable(self) -> Writer:
        """Return the writing side.

        Raises:
            StoreClosedError: The store is closed.
            ReadOnlyError: It is open for reading only.
        """
        self._handle.check_open()
        if self.read_only:
            raise self._handle.unusable()
        return self.writer

    def _refuse_append(self, *_: object, **__: object) -> NoReturn:
        raise self._handle.unusable()

    @override
    def __reduce__(self) -> str:
        raise TypeError(
            f"{self!r} and objects that hold it can't be pickled, because one process owns a store; open it there, "
            f"with read_only=True while another process writes"
        )

    @override
    def __repr__(self) -> str:
        state = self._handle.closed or ("is open for reading" if self.read_only else "is open for writing")
        return f"<MessageStore {self.path!r}: {state}>"
